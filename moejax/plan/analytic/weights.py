"""What an analytic plan does with weights: casts, gathers, sums of gradients, the update; and the
embedding and the head, which are little else."""

import dataclasses

from moejax.model.config import ModelConfig
from moejax.plan.analytic.attend import norm
from moejax.plan.analytic.layers import Layer
from moejax.plan.analytic.pieces import Made, Piece, ring
from moejax.plan.analytic.setup import Setup
from moejax.plan.hardware import Cluster
from moejax.plan.operations import COLLECTIVE, GEMM, MEMORY, Event, Run, Work

CHUNK = 1024  # tokens whose logits moejax holds at once: pallas_kernels.cross_entropy.xla


def attention_params(model: ModelConfig) -> int:
    """Returns the weights of one layer's attention."""
    cfg, D = model.attention, model.dim
    query, out = cfg.num_heads * cfg.qk_dim, cfg.num_heads * cfg.value_dim
    if cfg.kind == "gqa":
        return D * (query + 2 * cfg.num_kv_heads * cfg.head_dim + out)
    rank, latent = cfg.mla.q_rank, cfg.mla.kv_rank
    queries = rank * (D + query) if rank else D * query
    both = cfg.num_heads * (cfg.head_dim + cfg.value_dim)
    return queries + D * (latent + cfg.rope_dim) + latent * both + out * D


def layer_params(model: ModelConfig, kind: str) -> tuple[int, int]:
    """Returns the weights of one layer: (those that dp shares, the experts')."""
    dense, moe = attention_params(model), model.moe
    if kind.upper() == "D":
        return dense + 3 * model.dim * model.ffn_dim, 0
    width = moe.latent_dim or model.dim
    dense += 3 * model.dim * moe.shared_ffn_dim + model.dim * moe.num_experts
    return dense + 2 * model.dim * moe.latent_dim, 3 * moe.num_experts * width * moe.ffn_dim


def stage_params(setup: Setup) -> tuple[float, float]:
    """Returns one GPU's weights, as its layers use them: (those that dp shares, the experts')."""
    model = setup.model
    each = [layer_params(model, kind) for kind in model.all_kinds()]
    ends = (1 if model.tied else 2) * model.padded_vocab * model.dim
    joined = 2 * model.mtp_depth * model.dim**2
    dense = (sum(dense for dense, _ in each) + ends + joined) / setup.pp / setup.tp
    return dense, sum(experts for _, experts in each) / (setup.pp * setup.ep * setup.etp)


def resting_params(setup: Setup, cluster: Cluster, split: bool) -> tuple[float, float]:
    """Returns `stage_params`, or, split over data-parallel ranks, a GPU's share of them."""
    dense, experts = stage_params(setup)
    if not split:
        return dense, experts
    return (
        dense / setup.group("dp", cluster).size,
        experts / setup.group("edp", cluster).size,
    )


def _gather(setup: Setup, cluster: Cluster, axis: str, size: float, phase: str) -> Work:
    group = setup.group(axis, cluster)
    kind, role = ("all_gather", "zero gather")
    if phase == "reduce":
        kind, role = ("reduce_scatter" if setup.zero else "all_reduce"), "zero reduce"
    return Work(
        role, COLLECTIVE, "backward" if phase == "reduce" else phase, collective=kind,
        role=role, wire=ring(kind, size, group), group=group,
    )  # fmt: skip


def layer_weights(
    setup: Setup, cluster: Cluster, layer: Layer, phase: str, of: tuple[str, ...] = ("dp", "edp")
) -> tuple[Event, ...]:
    """Returns what moejax does to one layer's weights before it uses them ("forward", "recompute",
    "backward": cast, gather), or to their gradients ("reduce"). `of`: those that dp shares, the
    experts'."""
    if setup.software != "moejax":
        return ()
    kind = "M" if layer.there or layer.inside else "D"
    dense, experts = layer_params(setup.model, kind)
    dense, experts = dense / setup.tp, experts / (setup.ep * setup.etp)
    found = []
    for axis, params, arrays in (("dp", dense, _arrays(setup.model, kind)), ("edp", experts, 2)):
        rest = setup.group(axis, cluster).size if setup.zero == 3 else 1
        if not params or axis not in of:
            continue
        if phase == "reduce":
            # float32 gradients, which are reduced together, then added to those before them.
            found.append(_memory(6 * params, "backward"))
            if rest > 1:
                found.append(_gather(setup, cluster, axis, 4 * params, phase))
            found.append(_memory(12 * params / rest, "backward"))
            continue
        found.append(_memory(6 * params / rest, phase))
        if rest > 1:
            found += [_gather(setup, cluster, axis, 2 * params / arrays, phase)] * arrays
    return tuple(Run(work) for work in found)


def _arrays(model: ModelConfig, kind: str) -> int:
    """Returns in how many gathers the weights that dp shares come: as they are used, one after the
    other."""
    attention = 2 if model.attention.kind == "gqa" else 4
    return attention + 1 + (2 if kind == "D" or model.moe.shared_ffn_dim else 0)


def _memory(size: float, phase: str) -> Work:
    return Work("block", MEMORY, phase, bytes=size)


def gather_once(setup: Setup, cluster: Cluster) -> list[Work]:
    """Returns the gathers of ZeRO-1, once a step: 16-bit weights, or moejax's 32-bit ones."""
    dense, experts = stage_params(setup)
    size = 4 if setup.software == "moejax" else 2
    return [
        _gather(setup, cluster, axis, size * params, "update")
        for axis, params in (("dp", dense), ("edp", experts))
        if setup.group(axis, cluster).size > 1 and setup.zero
    ]


def reduce_once(setup: Setup, cluster: Cluster) -> list[Work]:
    """Returns the sums of float32 gradients over data-parallel ranks, once a step."""
    dense, experts = stage_params(setup)
    return [
        _gather(setup, cluster, axis, 4 * params, "reduce")
        for axis, params in (("dp", dense), ("edp", experts))
        if setup.group(axis, cluster).size > 1
    ]


def update(setup: Setup, cluster: Cluster) -> tuple[Event, ...]:
    """Returns the norm and the update: gradient, master and two moments in float32 are read, the
    last three written; and the weights' casts to 8 bits, both ways round, which are kept."""
    dense, experts = stage_params(setup)
    shares = resting_params(setup, cluster, setup.zero > 0)
    works = [Work("update", MEMORY, "update", bytes=(4 + 16 + 12 + 2) * sum(shares))]
    if setup.dtype == "fp8":
        works.append(Work("update", MEMORY, "update", bytes=(2 + 2) * (dense + experts)))
    return tuple(Run(work) for work in works)


def embed(setup: Setup, cluster: Cluster) -> tuple[Piece, ...]:
    """Returns the pieces of the embedding: a lookup, and its gradient's scattered sum."""
    made, model = Made(setup, cluster), setup.model
    T, D, local = setup.tokens, model.dim, model.padded_vocab / setup.tp
    columns = D
    if made.ours and setup.zero == 3 and local > T:  # tokens travel to columns of the table
        columns = D / setup.group("dp", cluster).size
        made.collective("embed", "all_to_all", "embed", "dp", 2 * T * D)
        made.memory("embed", 4 * T * D, 4 * T * D)
    elif made.ours and setup.zero == 3:
        _kept(made, "embed", D * local)
    # moejax's gradient is a float32 array of the table that it looks in, zeros and then sums.
    whole = 4 * columns * local if made.ours else 0.0
    made.memory("embed", 4 * T * D, 8 * T * D + 3 * whole)
    made.collective("embed", "reduce_scatter", "tp", "tp", 2 * T * D)
    return made.take()


def join(setup: Setup, cluster: Cluster) -> tuple[Piece, ...]:
    """Returns what a further module has before its layer: two norms, and a projection of both."""
    made, model = Made(setup, cluster), setup.model
    t, D = setup.here, model.dim
    made.memory("embed", 4 * setup.tokens * D, 8 * setup.tokens * D)
    for _ in range(2):
        norm(made, t * D)
    made.product("predict_ahead", t, D, 2 * D)
    norm(made, t * D)
    return made.take()


def head(setup: Setup, cluster: Cluster) -> tuple[Piece, ...]:
    """Returns the pieces of the final norm, the logits and the loss."""
    made, model = Made(setup, cluster), setup.model
    T, D, V = setup.tokens, model.dim, model.padded_vocab / setup.tp
    norm(made, setup.here * D)
    made.collective("unembed", "all_gather", "tp", "tp", 2 * T * D)
    if not made.ours:
        made.product("unembed", T, V, D, dtype="bfloat16")
        made.memory("loss", 2 * 2 * T * V, 2 * 2 * T * V)
        return made.take()
    if setup.zero == 3:
        made.memory("unembed", 6 * V * D / setup.dp, 0)
        _kept(made, "unembed", V * D)
    chunk = min(CHUNK, T)
    for _ in range(max(round(T / chunk), 1)):
        logits, size = 2 * chunk * V * D, 2 * (chunk * D + V * D)
        made.add(
            [_product((chunk, V, D), size + 4 * chunk * V),
             Work("unembed", MEMORY, bytes=8 * chunk * V)],
            [_product((chunk, D, V), size + 2 * chunk * V),
             _product((D, V, chunk), size + 2 * V * D + 2 * chunk * V),
             Work("unembed", MEMORY, bytes=12 * V * D)],
        )  # fmt: skip
        # The logits are made again, in the backward's own pass.
        made.add([], [Work("unembed", GEMM, "recompute", logits, size + 4 * chunk * V,
                           mnk=(chunk, V, D)),
                      Work("unembed", MEMORY, "recompute", bytes=6 * chunk * V)])  # fmt: skip
    return made.take()


def _kept(made: Made, name: str, params: float) -> None:
    """Adds the gather of weights that are kept for the backward, and their gradient's sum."""
    if made.setup.group("dp", made.cluster).size > 1:
        there = _gather(made.setup, made.cluster, "dp", 2 * params, "forward")
        back = _gather(made.setup, made.cluster, "dp", 4 * params, "reduce")
        made.add([dataclasses.replace(there, name=name)], [dataclasses.replace(back, name=name)])


def _product(mnk: tuple[float, float, float], size: float) -> Work:
    m, n, k = mnk
    return Work("unembed", GEMM, flops=2 * m * n * k, bytes=size, mnk=mnk)
