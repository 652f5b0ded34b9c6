"""The layers of an analytic plan: dense MLP or experts behind attention, forward and backward."""

from typing import NamedTuple

from moejax.model.config import ModelConfig
from moejax.plan.analytic.attend import attend, norm
from moejax.plan.analytic.pieces import Made, Piece, ring
from moejax.plan.analytic.setup import Setup
from moejax.plan.hardware import Cluster
from moejax.plan.operations import COLLECTIVE, MEMORY, Group, Work


class Layer(NamedTuple):
    """A layer's pieces, cut where its tokens travel to the experts and back."""

    before: tuple[Piece, ...]
    there: tuple[Piece, ...] = ()
    inside: tuple[Piece, ...] = ()
    back: tuple[Piece, ...] = ()
    after: tuple[Piece, ...] = ()

    @property
    def pieces(self) -> tuple[Piece, ...]:
        """All of them, in order."""
        return sum(self, ())


def make_layer(setup: Setup, cluster: Cluster, kind: str) -> Layer:
    """Returns a layer of that kind: "M", "D", or in lower case with attention's window."""
    made, model = Made(setup, cluster), setup.model
    attend(made, model, model.attention.window if kind.islower() else 0)
    norm(made, setup.here * model.dim)
    if kind.upper() == "D":
        _mlp(made, model, model.ffn_dim, "mlp")
        made.memory("block", 6 * setup.here * model.dim, 0)
        return Layer(made.take())
    _route(made, model)
    if model.moe.shared_ffn_dim:
        _mlp(made, model, model.moe.shared_ffn_dim, "shared", "moe")
    return _experts(made, model)


def _mlp(made: Made, model: ModelConfig, width: float, *tags: str) -> None:
    """Adds a dense gated MLP."""
    setup, D = made.setup, model.dim
    T, wide = setup.tokens, setup.tokens * width / setup.tp
    made.collective("mlp", "all_gather", "tp", "tp", 2 * T * D, *tags)
    made.product("mlp", T, 2 * width / setup.tp, D, *tags)
    made.memory("mlp", 6 * wide, 10 * wide, *tags)
    made.product("mlp", T, D, width / setup.tp, *tags, again=not made.ours)
    made.collective("mlp", "reduce_scatter", "tp", "tp", 2 * T * D, *tags, again=not made.ours)


def _route(made: Made, model: ModelConfig) -> None:
    """Adds the router: logits, scores and selection, in float32."""
    t, E = made.setup.here, model.moe.num_experts
    made.product("route", t, E, model.dim, "moe", dtype="bfloat16")
    made.memory("route", (16 if made.ours else 8) * t * E, 12 * t * E, "moe")
    if made.ours:  # balance losses
        made.memory("losses", 12 * t * E, 4 * t * E)
        group = made.setup.group("dp", made.cluster)
        if group.size > 1:
            made.add([_load(E, group)], [])


def _load(experts: int, group: Group) -> Work:
    """The sum of the experts' loads over all tokens."""
    wire = ring("all_reduce", 4 * experts, group)
    return Work("losses", COLLECTIVE, collective="all_reduce", role="metrics", wire=wire,
                group=group)  # fmt: skip


def _experts(made: Made, model: ModelConfig) -> Layer:
    """Returns the layer: what was added before, then dispatch, experts and combine."""
    setup, moe = made.setup, model.moe
    t, K, width = setup.here, moe.top_k, moe.latent_dim or model.dim
    slots = t * K  # that a GPU sends, and, balanced, receives
    if moe.latent_dim:
        made.product("dispatch", t, width, model.dim, "moe")
    if made.ours:
        _sort(made, model, slots)
    elif setup.dispatcher != "fused":
        made.memory("dispatch", 4 * slots * width, 4 * slots * width, "moe")
    before = made.take()
    _travel(made, "dispatch", width, "moe")
    there = made.take()
    rows, groups = slots * setup.etp, moe.num_experts / setup.ep
    made.collective("dispatch", "all_gather", "etp", "etp", 2 * rows * width, "moe")
    made.memory("dispatch", 4 * rows * width, 4 * rows * width, "moe")  # by local expert
    each, ffn = rows / groups, moe.ffn_dim / setup.etp
    made.grouped("experts", groups, each, 2 * ffn, width, "moe")
    if not made.ours:  # whose grouped kernels have the activation in them
        made.memory("experts", 6 * rows * ffn, 10 * rows * ffn, "moe_act", "moe")
    if moe.bias:  # the second one is weighted; their gradients are sums over rows
        made.memory("experts", 4 * rows * width, 2 * rows * (width + 2 * ffn), "moe")
    lazy = not made.ours  # outputs of experts are not needed again, and torch computes them
    made.grouped("experts", groups, each, width, ffn, "moe", again=lazy)
    made.memory("combine", 4 * rows * width, 4 * rows * width, "moe", again=lazy)
    made.collective("combine", "reduce_scatter", "etp", "etp", 2 * rows * width, "moe", again=lazy)
    inside = made.take()
    _travel(made, "combine", width, "moe", again=lazy)
    back = made.take()
    if setup.dispatcher != "fused":
        size = 2 * (slots + t) * width
        made.memory("combine", size, size, "moe", again=lazy)
    if moe.latent_dim:
        made.product("combine", t, model.dim, width, "moe", again=lazy)
    made.memory("block", 6 * t * model.dim, 0)
    return Layer(before, there, inside, back, made.take())


def _sort(made: Made, model: ModelConfig, slots: float) -> None:
    """Adds what brings slots into the order of their experts, on both sides: two sorts, three
    searches, and the rows' copies."""
    moe = model.moe
    width, budget = moe.latent_dim or model.dim, moe.budget or 1.0
    small = [Work("dispatch", MEMORY, bytes=16 * slots) for _ in range(15)]
    room = Work("dispatch", MEMORY, bytes=2 * budget * slots * width)  # zeros where rows arrive
    copies = Work("dispatch", MEMORY, bytes=4 * slots * width)
    made.add([*small, copies, room], [copies, room], "moe")
    empty = 2 * slots * width  # and where they come back
    made.memory("combine", empty, empty, "moe", again=False)


def _travel(made: Made, name: str, width: float, *tags: str, again=True) -> None:
    """Adds one exchange of tokens with the group of experts."""
    setup, moe = made.setup, made.setup.model.moe
    group = setup.group("ep", made.cluster)
    role = f"ep {name}"
    if group.size == 1:
        return
    token = 2 * width * setup.here
    if setup.dispatcher == "all_gather":
        whole = token * group.size
        kind = "all_gather" if name == "dispatch" else "reduce_scatter"
        made.collective(name, kind, role, "ep", whole, *tags, again=again)
    elif setup.dispatcher == "fused":
        wire, seen = _fused(moe, token, group)
        made.exchange(name, "fused_all_to_all", role, wire, seen, *tags, again=again)
    elif setup.dispatcher == "hierarchical":
        hops = _hops(moe, token, group)
        for wire, seen in hops if name == "dispatch" else hops[::-1]:
            if seen.size > 1:
                made.exchange(name, "ragged_all_to_all", role, wire, seen, *tags, again=again)
    else:
        kind = "ragged_all_to_all" if setup.dispatcher == "ragged" else "all_to_all"
        wire = token * moe.top_k * (group.size - 1) / group.size
        made.exchange(name, kind, role, wire, group, *tags, again=again)


def _fused(moe, token: float, group: Group) -> tuple[float, Group]:
    """Returns (bytes sent, to whom) where a token goes once to each GPU that wants it or, across
    domains, once to each domain: a copy's way on inside the domain is the shorter one.
    """
    domains = group.size // group.local
    places = group.size if domains == 1 else domains
    wire = token * _hit(moe, places) * (places - 1) / places
    return wire, Group(places, places if domains == 1 else 1)


def _hops(moe, token: float, group: Group) -> list[tuple[float, Group]]:
    """Returns (bytes sent, to whom) across domains, once to each, and inside, once to each GPU."""
    domains, inside = group.size // group.local, group.local
    across = token * _hit(moe, domains) * (domains - 1) / domains
    spread = token * _hit(moe, group.size) * (inside - 1) / inside
    return [(across, Group(domains, 1)), (spread, Group(inside, inside))]


def _hit(moe, places: int) -> float:
    """Returns on how many of so many equal places a token's experts are, on average: of
    n that K experts are drawn from, n (1 - (1 - 1/n)^K)."""
    limits, many = moe.router.num_groups, moe.router.topk_groups
    among = places * many / limits if limits > 1 and places >= limits else places
    return among * (1 - (1 - 1 / among) ** moe.top_k) if among > 1 else 1.0
