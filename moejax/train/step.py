"""One training step: a pure function, one `jit` over one fully manual `shard_map`.

Inside, code is written as one device sees it, and `check_vma=True` proves which values are the
same on which devices. The step

1. takes the resting parameters to what the layers use (`stored_to_used`): typed as varying over
   every axis, and for ZeRO-1 gathered, once a step. Its transpose is the one reduction of the
   gradients, to where the parameters rest: psum over the axes that replicate a parameter,
   reduce-scatter over those that shard it (dense: dp, experts: edp).
2. scans over microbatches, adding up gradients in the accumulation dtype.
3. updates parameters, moments and router bias, or, when loss or gradients are not finite, nothing.

Where a device received more rows than its budget, the step changes nothing but `overflowed`, and
while that is set, neither does any step after it. The host, which reads this one step late, runs
the batch again by the step that `worst_case` makes, which clears it, and goes on from there.
"""

import dataclasses

import jax
import jax.numpy as jnp
import optax
from jax.sharding import PartitionSpec as P
from jaxtyping import Array

from moejax.core import collectives
from moejax.core.precision import PrecisionConfig
from moejax.model import balance
from moejax.model.config import ModelConfig
from moejax.model.context import split_rows, spread_of
from moejax.model.stream import Draw, count_batch, one_microbatch
from moejax.train.auxes import by_block, by_layer
from moejax.train.gradients import Batch, Found, stored_to_used, sum_micro_grads
from moejax.train.loss import MEANS, nll_sums
from moejax.train.optimizer import (
    OptimizerConfig,
    apply_update,
    clip_scale,
    global_norm,
    make_schedule,
    num_updates,
)
from moejax.train.pipelined import pipelined_nll
from moejax.train.state import Layout, TrainState
from pallas_kernels import deviceless

SCALARS = ("loss", "grad_norm", "lr", "skipped", "overflowed", "num_tokens")


@dataclasses.dataclass(frozen=True)
class TrainConfig:
    """The length of a run and the shape of a step."""

    steps: int = 1000
    """Optimizer steps."""
    batch_size: int = 32
    """Rows of the global batch."""
    sequence_length: int = 256
    """Tokens of a row, L."""
    microbatches: int = 1
    """Pieces of the global batch whose gradients are added up one after the other."""
    loss_mean: str = "token"
    """What the cross-entropy is a mean of: every "token" of the global batch alike, or every
    "document" (a piece, as packed), the mean over its tokens. Balance losses are the same."""
    mtp_coeff: float = 0.1
    """Weight of the loss of tokens after the next one, a mean over the modules that predict them
    (`model.mtp_depth`)."""
    eval_every: int = 100
    """Steps between evaluations (one more at the end); 0: only at the end."""
    eval_batches: int = 16
    """Batches of each evaluation set; 0: all of it."""
    sample_tokens: int = 200
    """Tokens of the text sample at the end; 0: none."""

    def __post_init__(self):
        for name in ("steps", "batch_size", "sequence_length", "microbatches"):
            if getattr(self, name) < 1:
                raise ValueError(f"train.{name}={getattr(self, name)} must be at least 1")
        if not 0 <= self.mtp_coeff < float("inf"):
            raise ValueError(f"train.mtp_coeff={self.mtp_coeff} must be finite and not negative")
        if self.loss_mean not in MEANS:
            raise ValueError(f"train.loss_mean={self.loss_mean!r}: choose from {', '.join(MEANS)}")

    def check(self, layout_dp: int, tp: int, cp: int = 1) -> None:
        """Raises ValueError when a batch does not divide over microbatches and devices."""
        pieces = self.microbatches * layout_dp
        if self.batch_size % pieces:
            raise ValueError(
                f"train.batch_size={self.batch_size} does not divide into microbatches="
                f"{self.microbatches} x dp={layout_dp}: choose a multiple of {pieces}"
            )
        if self.sequence_length % cp:
            raise ValueError(
                f"train.sequence_length={self.sequence_length} does not divide over cp={cp}: "
                f"choose a multiple of {cp}"
            )
        tokens = self.batch_size // pieces * self.sequence_length // cp
        if tokens % tp:
            raise ValueError(f"{tokens} tokens a microbatch and device do not divide over tp={tp}")


def batch_spec(layout: Layout) -> P:
    """Returns how batch arrays [microbatches, rows, L] lie on the mesh: whole rows, of which each
    cp rank then takes its tokens (`model/context.py`)."""
    return P(None, layout.fold["dp"] or None, None)


def _of_step(auxes_m: dict, fold) -> dict:
    """Returns the aux of the whole step: sums over microbatches and devices, of the busiest rank
    the maximum."""
    busiest = jax.tree.map(
        lambda load: balance.busiest_rank(load, fold).max(axis=0), by_block(auxes_m, "load_E")
    )
    sums = collectives.psum(jax.tree.map(lambda a: a.sum(axis=0), auxes_m), fold.tokens)
    return {
        stack: {
            block: aux | {"busiest_rank": busiest[stack][block]} for block, aux in blocks.items()
        }
        for stack, blocks in sums.items()
    }


def _update_buffers(buffers, auxes: dict, cfg: balance.BalanceConfig, counts: Array):
    """Moves the bias of every router by the load of the whole step, where the step counts."""

    def move(moe, aux):
        bias = jnp.where(counts, balance.updated(moe["bias"], aux, cfg), moe["bias"])
        return {"moe": moe | {"bias": bias}}

    return {
        stack: {block: move(node["moe"], auxes[stack][block]) for block, node in blocks.items()}
        for stack, blocks in buffers.items()
    }


def _overflowed(auxes: dict) -> Array:
    """Returns whether a device, in some layer and microbatch, had no room for its rows."""
    if not any(auxes.values()):
        return jnp.zeros((), jnp.bool_)
    return (by_layer(auxes, "overflow") > 0).any()


def _moe_metrics(auxes: dict, agreed_mN, buffers, cfg: balance.BalanceConfig, fold) -> dict:
    """Per-layer metrics, [layers] or [layers, E], from the aux of the step and the new buffers.

    "load": share of the slots; "imbalance": max / mean of it; "entropy": 1 for an even load;
    "dead": experts without a token; "busiest_rank": see `balance`; the losses without their
    coefficients, and "aux_loss", what they added to the training loss; the bias's range; "agreed",
    where layers are computed again: the share of slots that would choose the same experts then
    (those of the first time count).
    """
    load_LE = by_layer(auxes, "load_E")
    bias_LE = by_layer(by_block(buffers, "moe"), "bias")
    share_LE = load_LE / jnp.maximum(load_LE.sum(axis=1, keepdims=True), 1.0)
    first = next(aux for blocks in auxes.values() for aux in blocks.values())
    found = {name: by_layer(auxes, name) for name in balance.LOSSES if name in first}
    found["aux_loss"] = balance.weighted(found, cfg)
    if agreed_mN is not None:
        agreed_N = collectives.psum(agreed_mN.sum(axis=0), fold.tokens)
        found["agreed"] = agreed_N / jnp.maximum(load_LE.sum(axis=1), 1.0)
    return found | {
        "load": share_LE,
        "imbalance": share_LE.max(axis=1) * load_LE.shape[1],
        "entropy": balance.entropy(share_LE),
        "dead": (load_LE == 0).sum(axis=1, dtype=jnp.float32),
        "busiest_rank": by_layer(auxes, "busiest_rank"),
        "dropped": by_layer(auxes, "dropped"),
        "bias_min": bias_LE.min(axis=1),
        "bias_max": bias_LE.max(axis=1),
    }


def _model_metrics(
    cfg: ModelConfig, found: Found, auxes: dict, buffers, fold, order: Array | None
) -> dict:
    """Returns the metrics that only some models have, of the whole step and the new buffers."""
    metrics: dict = {"mtp_loss": found.losses.mtp.sum()} if cfg.mtp_depth else {}
    if any(auxes.values()):
        metrics["moe"] = _moe_metrics(auxes, found.agreed_N, buffers, cfg.moe.balance, fold)
    if found.chosen_tNK is not None:
        metrics |= {"routing": found.chosen_tNK} | ({} if order is None else {"order": order})
    return metrics


def _metric_specs(model_cfg: ModelConfig, layout: Layout, with_grads: bool) -> dict:
    """Returns the PartitionSpecs of a step's metrics."""
    specs: dict = {name: P() for name in SCALARS}
    if with_grads:
        specs["grads"] = layout.specs.params
    if model_cfg.mtp_depth:
        specs["mtp_loss"] = P()
    if "M" in model_cfg.all_kinds():
        specs["moe"] = P()
        if model_cfg.moe.router.record:
            specs["routing"] = P(None, layout.fold.tokens or None)
            if layout.fold["cp"]:
                specs["order"] = batch_spec(layout)
    return specs | ({"grads": layout.specs.params} if with_grads else {})


def _options(layout: Layout) -> dict | None:
    """Returns the compiler options of a step on the layout's devices."""
    return deviceless.SCHEDULING if layout.mesh.devices.flat[0].platform == "gpu" else None


def make_train_step(
    model_cfg: ModelConfig,
    opt_cfg: OptimizerConfig,
    optimizer: optax.GradientTransformation,
    layout: Layout,
    precision: PrecisionConfig,
    total_steps: int,
    *,
    loss_mean: str = "token",
    mtp_coeff: float = 0.1,
    worst_case: bool = False,
    with_grads: bool = False,
) -> jax.stages.Wrapped:
    """Returns the jitted step: (state, batch of [microbatches, rows, L]) -> (state, metrics).

    The state is donated. Metrics stay on the device: "loss" (nats a token), "grad_norm", "lr",
    "num_tokens", "skipped", "overflowed", "moe" by layer, "mtp_loss" (that of the tokens after the
    next, without its coefficient) where the model predicts them, and, where the model records it,
    "routing": expert ids [microbatches, rows * L, layers, K] (`replay.in_row_order`). A batch may
    hold "routing" [microbatches, rows, L, layers, K], the experts to be chosen; with cp it holds an
    "order" (`data.context`). `worst_case`, for a layout without a budget, takes a state that
    overflowed for what it was before. `with_grads` adds "grads", where they rest, for tests.
    """
    schedule, fold = make_schedule(opt_cfg, total_steps), layout.fold
    axes, balances = layout.shard_axes(), model_cfg.moe.balance

    def step(state: TrainState, batch: Batch):
        weights, to_rest = jax.vjp(lambda p: stored_to_used(layout, p), state.params)
        grads, found = sum_micro_grads(
            layout, weights, state, batch, precision, loss_mean, mtp_coeff
        )
        loss, auxes = found.losses.nll.sum(), _of_step(found.auxes, fold)
        grads = jax.tree.map(lambda g, w: g.astype(w.dtype), grads, weights)
        (grads,) = to_rest(grads)
        norm = global_norm(grads, axes, collectives.psum)
        finite = jnp.isfinite(norm) & jnp.isfinite(loss)
        lr = schedule(num_updates(state.opt_state))
        overflowed = _overflowed(auxes) | (state.overflowed & (not worst_case))
        new_params, opt_state, skipped = apply_update(
            optimizer, grads, state.opt_state, state.params, state.num_skipped,
            scale=clip_scale(norm, opt_cfg.clip_norm), finite=finite, counts=~overflowed,
        )  # fmt: skip
        buffers = _update_buffers(state.buffers, auxes, balances, finite & ~overflowed)
        number = state.step + (~overflowed).astype(state.step.dtype)
        state = TrainState(number, new_params, buffers, opt_state, skipped, overflowed, state.key)
        count = count_batch(batch["segment_ids"], batch["targets"], fold).targets
        values = (loss, norm, lr, skipped, overflowed, count)
        metrics: dict = dict(zip(SCALARS, values, strict=True))
        metrics |= _model_metrics(model_cfg, found, auxes, buffers, fold, batch.get("order"))
        return state, metrics | ({"grads": grads} if with_grads else {})

    metric_specs = _metric_specs(model_cfg, layout, with_grads)
    sharded = jax.shard_map(
        step,
        mesh=layout.mesh,
        in_specs=(layout.specs, batch_spec(layout)),
        out_specs=(layout.specs, metric_specs),
        check_vma=True,
    )
    return jax.jit(sharded, donate_argnums=0, compiler_options=_options(layout))


def make_eval_step(layout: Layout) -> jax.stages.Wrapped:
    """Returns the jitted evaluation: (state, batch) -> (summed NLL in nats, number of targets)."""

    def evaluate(state: TrainState, batch: Batch):
        fold = layout.fold
        model = layout.model(stored_to_used(layout, state.params), state.buffers)
        if layout.pipeline:
            total = count_batch(batch["segment_ids"], batch["targets"], fold)
            mine = split_rows(batch, fold)
            return pipelined_nll(layout, layout.pipeline, model, mine, total), total.targets

        def add(total, micro):
            counted = count_batch(micro["segment_ids"], micro["targets"], fold)
            micro = split_rows(micro, fold)
            x_tD, _ = model.hidden(
                micro["tokens"], micro["segment_ids"], micro["positions"], one_microbatch(counted),
                Draw(spread=spread_of(micro, fold)),
            )  # fmt: skip
            targets_bL = micro["targets"]
            (nll,) = nll_sums(model, [x_tD], [targets_bL], [targets_bL >= 0])
            nll = collectives.psum(nll, fold.batch)
            return total + nll.astype(total.dtype), counted.targets

        total, targets_m = jax.lax.scan(add, jnp.zeros((), jnp.float32), batch)
        return total, targets_m.sum()

    sharded = jax.shard_map(
        evaluate,
        mesh=layout.mesh,
        in_specs=(layout.specs, batch_spec(layout)),
        out_specs=P(),
        check_vma=True,
    )
    return jax.jit(sharded)
