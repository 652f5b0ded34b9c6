"""AdamW, its learning-rate schedules, and the norm that clips it: elementwise, on shards.

Everything here sees one device's shard of each parameter, inside `shard_map`, and issues no
collective of its own: the reduction that the global norm needs is passed in. One update is

    norm = global_norm(grads, axes_tree, psum)              each parameter counted once
    scale = clip_scale(norm, cfg.clip_norm)
    finite = jnp.isfinite(norm) & jnp.isfinite(loss)
    params, opt_state, num_skipped = apply_update(
        opt, grads, opt_state, params, num_skipped, scale=scale, finite=finite)

Names for outsiders: `OptimizerConfig`, `make_schedule`, `make_optimizer`, `decay_mask`,
`map_like_params`, `num_updates`, `global_norm`, `clip_scale`, `apply_update`.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax.typing import ArrayLike
from jaxtyping import Array, Bool, Float, Int, PyTree

SCHEDULES = ("warmup_cosine", "wsd", "constant")
STACK_DIMS = ("layer", "expert")  # they stack equal weights; a stack of vectors is no matrix

type Scalar = Float[Array, ""]
type Reduce = Callable[[Array, tuple[str, ...]], Array]


@dataclass(frozen=True)
class OptimizerConfig:
    """AdamW (Loshchilov and Hutter 2019, arXiv:1711.05101), its schedule and its clipping."""

    learning_rate: float = 1e-3
    """Peak learning rate, reached at the end of the warmup."""
    schedule: str = "warmup_cosine"
    """After the warmup: "warmup_cosine", "wsd" (stable, then a 1-sqrt decay) or "constant"."""
    warmup_steps: int = 50
    """Steps of linear warmup; step 0 already has the rate learning_rate / (warmup_steps + 1)."""
    decay_fraction: float = 0.2
    """Share of all steps that the decay of "wsd" takes, at the end (the others ignore it)."""
    final_lr_ratio: float = 0.1
    """Learning rate after the last step, as a share of the peak ("constant" ignores it)."""
    b1: float = 0.9
    """Decay of the first moment."""
    b2: float = 0.95
    """Decay of the second moment."""
    eps: float = 1e-8
    """Added to the root of the second moment."""
    weight_decay: float = 0.1
    """Decoupled: each step takes lr * weight_decay * p off the matrices (see `decay_mask`)."""
    clip_norm: float = 1.0
    """Gradients are scaled down to this global norm; 0 turns clipping off."""

    def __post_init__(self) -> None:
        if self.schedule not in SCHEDULES:
            known = ", ".join(SCHEDULES)
            raise ValueError(f"schedule {self.schedule!r} is unknown; choose one of {known}")
        for name in ("learning_rate", "eps"):
            if not getattr(self, name) > 0:
                raise ValueError(f"{name} {getattr(self, name)} must be above 0")
        for name in ("warmup_steps", "weight_decay", "clip_norm"):
            if not getattr(self, name) >= 0:
                raise ValueError(f"{name} {getattr(self, name)} must be 0 or more")
        for name in ("b1", "b2"):
            if not 0 <= getattr(self, name) < 1:
                raise ValueError(f"{name} {getattr(self, name)} must lie in [0, 1)")
        for name in ("decay_fraction", "final_lr_ratio"):
            if not 0 <= getattr(self, name) <= 1:
                raise ValueError(f"{name} {getattr(self, name)} must lie in [0, 1]")


def make_schedule(cfg: OptimizerConfig, total_steps: int) -> optax.Schedule:
    """The learning rate as a function of the number of updates made before this one.

    The warmup rises linearly from peak / (warmup_steps + 1) to the peak at step `warmup_steps`.
    "wsd" then stays there and, over the last `decay_fraction * total_steps` steps, falls by
    1 - sqrt(progress) (Hägele et al. 2024, arXiv:2405.18392, who find it better than a linear
    fall). The value is a float32 scalar. Raises ValueError when warmup and decay do not fit into
    `total_steps`.
    """
    peak, warmup = cfg.learning_rate, cfg.warmup_steps
    decay = {
        "warmup_cosine": total_steps - warmup,
        "wsd": round(cfg.decay_fraction * total_steps),
        "constant": 0,
    }[cfg.schedule]
    if warmup + decay > total_steps or decay < 0:
        raise ValueError(
            f"warmup_steps {warmup} + {max(decay, 0)} steps of decay exceed the run of "
            f"{total_steps} steps; lower warmup_steps or decay_fraction, or train longer"
        )

    def one_minus_sqrt(step: ArrayLike) -> ArrayLike:
        progress = jnp.clip(jnp.asarray(step, jnp.float32) / decay, 0.0, 1.0)
        return peak * (cfg.final_lr_ratio + (1 - cfg.final_lr_ratio) * (1 - jnp.sqrt(progress)))

    pieces: list[optax.Schedule] = []
    starts: list[int] = []
    if warmup:
        pieces += [optax.linear_schedule(peak / (warmup + 1), peak, warmup)]
        starts += [warmup]
    if cfg.schedule == "warmup_cosine" and decay:
        pieces += [optax.cosine_decay_schedule(peak, decay, alpha=cfg.final_lr_ratio)]
    else:
        pieces += [optax.constant_schedule(peak)]
    if cfg.schedule == "wsd" and decay:
        pieces += [one_minus_sqrt]
        starts += [total_steps - decay]
    joined = optax.join_schedules(pieces, starts)
    return lambda step: jnp.asarray(joined(jnp.asarray(step, jnp.float32)), jnp.float32)


def decay_mask(dims_tree: PyTree[tuple[str, ...]]) -> PyTree[bool]:
    """Which parameters decay: True for the matrices, given each parameter's tuple of logical dims.

    A parameter decays when it has two or more dims besides `STACK_DIMS` and is no bias (its own
    name neither holds "bias" nor starts with "b_": the bias of a (heads, head_dim) projection has
    two dims and is no matrix). Norm scales, biases and attention sinks therefore do not decay;
    embedding and head do, as in Megatron Core, which spares only vectors and biases.
    """

    def decays(path: tuple[Any, ...], dims: tuple[str, ...]) -> bool:
        name = jax.tree_util.keystr(path[-1:], simple=True)
        is_bias = "bias" in name or name.startswith("b_")
        return not is_bias and sum(dim not in STACK_DIMS for dim in dims) >= 2

    is_dims = lambda x: isinstance(x, tuple)  # noqa: E731
    return jax.tree_util.tree_map_with_path(decays, dims_tree, is_leaf=is_dims)


def make_optimizer(
    cfg: OptimizerConfig, total_steps: int, decay_mask: PyTree[bool]
) -> optax.GradientTransformation:
    """AdamW as optax builds it, with moments in at least float32 (float64 for float64 parameters).

    Clipping is not part of it: the norm needs the mesh, so `apply_update` gets the scale. The
    updates come back in the dtype of the moments.
    """
    adamw = optax.adamw(
        make_schedule(cfg, total_steps),
        b1=cfg.b1, b2=cfg.b2, eps=cfg.eps, weight_decay=cfg.weight_decay, mask=decay_mask,
    )  # fmt: skip

    def init(params: optax.Params) -> optax.OptState:
        return adamw.init(jax.tree.map(_at_least_float32, params))

    def update(
        updates: optax.Updates, state: optax.OptState, params: optax.Params | None = None
    ) -> tuple[optax.Updates, optax.OptState]:
        wide = jax.tree.map(_at_least_float32, (updates, params))
        # optax raises a Python float to the int32 count, which strict promotion refuses.
        with jax.numpy_dtype_promotion("standard"):
            return adamw.update(wide[0], state, wide[1])

    return optax.GradientTransformation(init, update)


def map_like_params(opt_state: Any, per_param: PyTree, other: Any) -> Any:
    """`opt_state` with each of its two trees of moments set to `per_param`, the rest to `other`.

    For describing the state: `map_like_params(jax.eval_shape(opt.init, params), param_specs, P())`
    are its partition specs.
    """
    adam, *rest = opt_state
    adam = adam._replace(count=other, mu=per_param, nu=per_param)
    return (adam, *jax.tree.map(lambda _: other, tuple(rest)))


def num_updates(opt_state: Any) -> Int[Array, ""]:
    """Updates made so far, skipped steps not counted: what the schedule is asked with."""
    return opt_state[0].count


def global_norm(grads: PyTree[Array], axes_tree: PyTree[tuple[str, ...]], psum: Reduce) -> Scalar:
    """The 2-norm over all gradients of all devices, each parameter counted once.

    `axes_tree` has, for each gradient, the mesh axes over which it is *sharded* (`()` if
    replicated); over other axes it must be replicated, and is not summed. Squares are summed in
    float32 (float64 for float64 gradients), locally by group of equal axes; `psum(value, axes)` is
    called once a group. The result is replicated.
    """
    leaves, treedef = jax.tree.flatten(grads)
    sums: dict[tuple[str, ...], Scalar] = {}
    for grad, axes in zip(leaves, treedef.flatten_up_to(axes_tree), strict=True):
        square = jnp.sum(jnp.square(_at_least_float32(grad)))
        sums[axes] = sums[axes] + square if axes in sums else square
    # Sorted, so that the order of the additions does not hang on the order of the parameters.
    totals = [psum(sums[axes], axes) for axes in sorted(sums)]
    return jnp.sqrt(sum(totals[1:], start=totals[0]))


def clip_scale(norm: Scalar, clip_norm: float) -> Scalar:
    """What to multiply the gradients by: min(1, clip_norm / norm), 1 where clip_norm is 0 (off)."""
    if clip_norm == 0:
        return jnp.ones_like(norm)
    return jnp.where(norm > clip_norm, clip_norm / norm, jnp.ones_like(norm))


@jax.named_scope("apply_update")
def apply_update(
    opt: optax.GradientTransformation,
    grads: PyTree[Array],
    opt_state: optax.OptState,
    params: PyTree[Array],
    num_skipped: Int[Array, ""],
    *,
    scale: Scalar,
    finite: Bool[Array, ""],
    counts: Bool[Array, ""] | bool = True,
) -> tuple[PyTree[Array], optax.OptState, Int[Array, ""]]:
    """Returns (params, opt_state, num_skipped) after a step along `grads * scale`.

    If not `finite`, parameters, moments and counts stay bit for bit as they were and `num_skipped`
    goes up by 1. `finite` must be the same on every device: make it from reduced norm and loss.
    A step that does not count changes nothing at all.
    """
    grads = jax.tree.map(_at_least_float32, grads)
    grads = jax.tree.map(lambda g: g * scale.astype(g.dtype), grads)
    updates, new_state = opt.update(grads, opt_state, params)
    new_params = jax.tree.map(
        lambda p, u: (_at_least_float32(p) + u).astype(p.dtype), params, updates
    )
    # A select, not a product: 0 * NaN is NaN.
    choose = lambda new, old: jnp.where(finite & counts, new, old)  # noqa: E731
    params, opt_state = jax.tree.map(choose, (new_params, new_state), (params, opt_state))
    return params, opt_state, num_skipped + (~finite & counts).astype(num_skipped.dtype)


def _at_least_float32(x: Array) -> Array:
    return x if x.dtype == jnp.float64 else x.astype(jnp.float32)
