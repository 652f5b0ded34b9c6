"""One grid of devices, read twice (parallel folding).

Attention reads the devices as (pp, dp, cp, tp), slowest first; the experts read the same
devices, in the same order, as (pp, edp, ep, etp). The mesh is the *common refinement* of the two
readings: put the axis boundaries of both on one ruler; the pieces between neighbouring cuts are
the mesh axes. Each lies inside exactly one axis of each reading and is named after the pair
(`dp_ep`, `tp_ep`). A *role* (`tp`, `ep`, ...) is then a tuple of mesh axes, `()` at degree 1, and
collectives take the tuple: no code asks `if ep > 1`.

Where ep reaches beyond one NVLink domain, `parallel.node` cuts it once more: `ep_out` crosses
nodes, `ep_in` stays inside one, and `ep` is both (ep=8 over nodes of 4: `ep_out` 2, `ep_in` 4).

Outsiders need: `ParallelConfig`, `Fold`, `fold`, `make_mesh`, `fold_table`.
"""

import dataclasses
from collections.abc import Mapping, Sequence
from itertools import accumulate, pairwise
from math import log, prod
from operator import mul

import jax
from jax.sharding import AxisType, Mesh

ATTENTION = ("pp", "dp", "cp", "tp")
EXPERTS = ("pp", "edp", "ep", "etp")
EP = ("ep", "ep_out", "ep_in")
"""The expert-parallel role, or its two parts, slowest first."""
CONTEXTS = ("ulysses", "ulysses_ring", "ring", "all_gather", "dynamic")
Reading = Mapping[str, int]
_MAY_BE_0 = ("dp", "edp", "node", "vpp")


@dataclasses.dataclass(frozen=True)
class ParallelConfig:
    """Degrees of the two readings, and how weights rest."""

    pp: int = 1
    """Pipeline-parallel degree: the layers are split over so many devices, in both readings."""
    vpp: int = 1
    """Stages (chunks of layers) that each of them holds; 0: as many as `layout` gives."""
    layout: str = ""
    """Which stage has what: E embedding, t a layer, m a further module (MTP), L loss, | the end of
    a stage, *n and (..)*n repeats ("Et*3|(tt|)*29m|L"); empty: layers spread evenly."""
    schedule: str = ""
    """In which order stages run microbatches forward and backward: "1f1b", or "merged", each
    forward beside the backward of another microbatch, so that the communication of one can hide
    under the products of the other (with pp=1 too), or "zero_bubble", gradients of weights apart
    from those of inputs, in ticks in which a rank would wait. Empty: one microbatch after the other
    without pp, "1f1b" with it."""
    dp: int = 1
    """Data-parallel degree of attention; 0: all devices that the other degrees leave."""
    cp: int = 1
    """Context-parallel degree: each row's tokens are split over so many devices."""
    cp_kind: str = "ulysses"
    """How attention sees whole rows: "ulysses" (heads are split instead: cp divides those that tp
    leaves), "ring" (keys and values travel, in blocks; with pp, head by head), "ulysses_ring"
    (heads as far as those of keys divide, a ring beyond), "all_gather" (keys, or latents),
    "dynamic" (the same, of as many ranks as the longest documents of a microbatch are cut over:
    1, 2, 4 .. cp, each document by its length)."""
    tp: int = 1
    """Tensor-parallel degree (with sequence parallelism between) of attention and dense MLPs."""
    ep: int = 1
    """Expert-parallel degree: the experts are split over so many devices."""
    etp: int = 1
    """Tensor-parallel degree inside each expert."""
    edp: int = 0
    """Data-parallel degree of the experts; 0: all devices that ep and etp leave."""
    node: int = 0
    """Devices of one node, or larger NVLink domain (8 on HGX, 64 on NVL72), where ep reaches
    beyond it: "hierarchical" dispatch crosses nodes once a token. 0: ep stays inside a node."""
    zero: int = 1
    """ZeRO stage. 0: weights and optimizer state replicated over data-parallel ranks; 1: both
    rest sharded, weights gathered once a step; 3: gathered again for each layer, while the one
    before it runs."""

    def __post_init__(self):
        for name in (*ATTENTION, *EXPERTS, "vpp", "node"):
            value, low = getattr(self, name), int(name not in _MAY_BE_0)
            if value < low:
                raise ValueError(f"parallel.{name}={value} is below {low}")
        if self.pp == 1 and (self.vpp > 1 or self.layout):
            raise ValueError(
                f"parallel.vpp={self.vpp}, layout={self.layout!r} split no pipeline: set pp too"
            )
        if self.cp_kind not in CONTEXTS:
            raise ValueError(
                f"parallel.cp_kind={self.cp_kind!r}: choose from {', '.join(CONTEXTS)}"
            )
        if self.zero not in (0, 1, 3):
            raise ValueError(f"parallel.zero={self.zero}: choose 0, 1 or 3")

    def readings(self, num_devices: int) -> tuple[dict[str, int], dict[str, int]]:
        """Returns the attention and the expert reading of `num_devices`, degrees of 0 filled in.
        Where `node` cuts ep, the expert reading has ep_out and ep_in in its place.

        Raises ValueError when the degrees cannot cover the devices, or a node's cannot ep's.
        """
        world = self.num_devices() or num_devices
        dp = self.dp or world // (self.pp * self.cp * self.tp)
        edp = self.edp or world // (self.pp * self.ep * self.etp)
        attention = {"pp": self.pp, "dp": dp, "cp": self.cp, "tp": self.tp}
        experts = {"pp": self.pp, "edp": edp, "ep": self.ep, "etp": self.etp}
        for name, reading in (("attention", attention), ("experts", experts)):
            if prod(reading.values()) != world:
                raise ValueError(
                    f"the {name} reading {_shown(reading)} covers {prod(reading.values())} "
                    f"devices, the other reading or the machine has {world}: change a degree "
                    f"(dp=0 and edp=0 fill in what the others leave)"
                )
        return attention, _cut_ep(experts, self.node)

    def fold(self, num_devices: int = 0) -> "Fold":
        """Returns the fold of these degrees over the devices. Raises ValueError as `readings` and
        `fold` do."""
        return fold(*self.readings(num_devices), self.cp_kind)

    def num_devices(self) -> int:
        """The devices that the degrees ask for; 0 where dp leaves that to the machine."""
        return self.pp * self.dp * self.cp * self.tp


@dataclasses.dataclass(frozen=True)
class Fold:
    """Mesh axes and roles of a folded grid; `Fold()` is one device with no mesh.

    Hashable: modules keep it as a static attribute. `fold[role]` is a tuple of mesh axes.
    """

    axes: tuple[tuple[str, int], ...] = ()
    roles: tuple[tuple[str, tuple[str, ...]], ...] = ()
    context: str = CONTEXTS[0]
    """How attention sees whole rows (`ParallelConfig.cp_kind`)."""

    def __getitem__(self, role: str) -> tuple[str, ...]:
        return dict(self.roles).get(role, ())

    @property
    def all(self) -> tuple[str, ...]:
        """Every mesh axis, slowest first."""
        return tuple(name for name, _ in self.axes)

    @property
    def batch(self) -> tuple[str, ...]:
        """The axes over which tokens enter: rows over dp, length over cp."""
        return self["dp"] + self["cp"]

    @property
    def tokens(self) -> tuple[str, ...]:
        """The axes over which the tokens of a residual stream are split: dp, cp, tp."""
        return self.batch + self["tp"]

    def degree(self, role: str) -> int:
        """The number of devices along a role."""
        sizes = dict(self.axes)
        return prod(sizes[axis] for axis in self[role])

    @property
    def groups(self) -> tuple[int, ...]:
        """The sizes of the groups of neighbouring cp ranks over which "dynamic" cuts documents,
        1 .. cp, each along the innermost axes; () of other kinds."""
        if self.context != "dynamic" or not self["cp"]:
            return ()
        sizes = dict(self.axes)
        return tuple(accumulate((sizes[axis] for axis in self["cp"][::-1]), mul, initial=1))


def _cut_ep(experts: Reading, node: int) -> dict[str, int]:
    """Returns the expert reading with ep cut at the border of nodes of so many devices, in one
    line; ep inside a node stays whole. Raises ValueError where groups and nodes do not line up.

    >>> _cut_ep({"pp": 1, "edp": 2, "ep": 8, "etp": 2}, 8)
    {'pp': 1, 'edp': 2, 'ep_out': 2, 'ep_in': 4, 'etp': 2}
    """
    ep, etp = experts["ep"], experts["etp"]
    if not _lines_up(ep, etp, node):
        raise ValueError(
            f"parallel.node={node}: groups of ep={ep} x etp={etp} devices neither fill nodes nor "
            f"divide them: choose a node that is a multiple of etp={etp}, and divides or is a "
            f"multiple of {ep * etp}, or 0 (ep stays inside a node)"
        )
    if node % (ep * etp) == 0:
        return dict(experts)
    parts = {"ep_out": ep * etp // node, "ep_in": node // etp}
    return {"pp": experts["pp"], "edp": experts["edp"], **parts, "etp": etp}


def _lines_up(ep: int, etp: int, node: int) -> bool:
    """Whether groups of ep x etp devices fill whole nodes, with etp inside one, or lie in one."""
    return node % (ep * etp) == 0 or (ep * etp % node == 0 and node % etp == 0)


def _whole_ep(experts: Reading) -> dict[str, int]:
    """Undoes `_cut_ep`."""
    parts = {"ep": prod(experts.get(role, 1) for role in EP)}
    return {role: {**experts, **parts}.get(role, 1) for role in EXPERTS}


def _shown(reading: Reading) -> str:
    return "(" + ", ".join(f"{role}={n}" for role, n in reading.items() if n > 1) + ")"


def _ends(reading: Reading) -> list[int]:
    return list(accumulate(list(reading.values())[::-1], mul))


def _strides(reading: Reading) -> list[int]:
    """Device strides at which the reading's axes begin and end: 1 .. number of devices."""
    return [1, *_ends(reading)]


def _role_at(reading: Reading, stride: int) -> str:
    """The role whose axis covers the devices `stride` apart."""
    roles = list(reading)[::-1]
    return next(
        role for role, end in zip(roles, _ends(reading), strict=True) if stride < end
    )


def _cuts(attention: Reading, experts: Reading) -> list[int]:
    return sorted({*_strides(attention), *_strides(experts)}, reverse=True)


def _nests(attention: Reading, experts: Reading) -> bool:
    return all(outer % inner == 0 for outer, inner in pairwise(_cuts(attention, experts)))


def _nearest(attention: Reading, experts: Reading) -> list[Reading]:
    """Expert readings that nest with `attention`, nearest (in log degrees) first."""
    node = experts["ep_in"] * experts["etp"] if "ep_in" in experts else 0
    experts = _whole_ep(experts)
    per_stage = prod(experts.values()) // experts["pp"]
    sizes = [n for n in range(1, per_stage + 1) if per_stage % n == 0]
    found = [
        {**experts, "edp": edp, "ep": ep, "etp": per_stage // edp // ep}
        for edp in sizes
        for ep in sizes
        if per_stage % (edp * ep) == 0 and _lines_up(ep, per_stage // edp // ep, node)
    ]
    found = [reading for reading in found if _nests(attention, _cut_ep(reading, node))]
    return sorted(found, key=lambda r: sum(abs(log(r[k] / experts[k])) for k in experts))


def _factors(size: int) -> list[int]:
    """The prime factors, the greatest first."""
    least = next((n for n in range(2, size) if size % n == 0), size)
    return [size] if least == size else [*_factors(size // least), least]


def fold(attention: Reading, experts: Reading, context: str = CONTEXTS[0]) -> Fold:
    """Returns the common refinement of the two readings (role -> degree, slowest first). Where
    `context` is one that splits cp once more ("ulysses_ring", "dynamic"), cp has a mesh axis for
    each prime.

    Of an expert reading that has ep_out and ep_in in the place of ep, the role ep is both; of one
    that has not, ep_in is ep.

    Raises ValueError when they cover different device counts, or when their strides do not nest;
    the message then names the nearest expert readings that do.
    """
    if prod(attention.values()) != prod(experts.values()):
        raise ValueError(
            f"attention {_shown(attention)} covers {prod(attention.values())} devices, "
            f"experts {_shown(experts)} cover {prod(experts.values())}"
        )
    if not _nests(attention, experts):
        near = " or ".join(_shown(reading) for reading in _nearest(attention, experts)[:2])
        raise ValueError(
            f"the fold of attention {_shown(attention)} and experts {_shown(experts)} does not "
            f"nest (a device stride of one does not divide the other's); nearest experts that "
            f"do: {near}"
        )
    axes: dict[str, int] = {}
    roles: dict[str, tuple[str, ...]] = {role: () for role in (*attention, *experts)}
    for outer, inner in pairwise(_cuts(attention, experts)):
        owners = dict.fromkeys((_role_at(attention, inner), _role_at(experts, inner)))
        name = "_".join(owners)
        sizes = [outer // inner]
        if context in ("ulysses_ring", "dynamic") and "cp" in owners:
            sizes = _factors(*sizes)
        for number, size in enumerate(sizes):
            piece = name if len(sizes) == 1 else f"{name}_{number}"
            axes[piece] = size
            for role in owners:
                roles[role] += (piece,)
    # The vocabulary is split over both, so that no stage carries embedding and head alone.
    roles["vocab"] = roles.get("pp", ()) + roles.get("tp", ())
    parts = {"ep_out": roles.get("ep_out", ()), "ep_in": roles.get("ep_in", roles.get("ep", ()))}
    roles |= parts | {"ep": parts["ep_out"] + parts["ep_in"]}
    return Fold(tuple(axes.items()), tuple(roles.items()), context)


def make_mesh(folded: Fold, devices: Sequence[jax.Device] | None = None) -> Mesh:
    """Returns the mesh of a fold over `devices` (default: the first ones of `jax.devices()`).

    One device gets an axis that no role has, for a mesh without axes does not know its device.
    Raises ValueError when there are fewer devices than the fold has.
    """
    names, sizes = folded.all or ("one",), [size for _, size in folded.axes] or [1]
    devices = jax.devices() if devices is None else devices
    if len(devices) < prod(sizes):
        raise ValueError(f"the fold needs {prod(sizes)} devices, this machine has {len(devices)}")
    return jax.make_mesh(
        sizes, names, devices=devices[: prod(sizes)], axis_types=(AxisType.Auto,) * len(sizes)
    )


def fold_table(folded: Fold) -> str:
    """Returns the fold as text: a column a mesh axis, a row a role of each reading."""
    if not folded.axes:
        return "one device, no mesh"
    width = max(9, *(len(name) + 2 for name in folded.all))
    head = "".join(f"{name:>{width}}" for name in folded.all)
    lines = [f"{'':17}{head}", f"{'mesh':17}" + "".join(f"{n:{width}}" for _, n in folded.axes)]
    for reading, roles in (("attention", ATTENTION), ("experts", EXPERTS)):
        for i, role in enumerate(roles):
            cells = [role if axis in folded[role] else "." for axis in folded.all]
            row = "".join(f"{cell:>{width}}" for cell in cells)
            lines.append(f"{'' if i else reading:11}{role:6}{row}   = {folded.degree(role)}")
    return "\n".join(lines)
