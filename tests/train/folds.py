"""The folds that parity is shown on, and one small training run of a shrunken demo recipe.

`FOLDS` is the whole list (`make parity`); a name in `COVERING` or `COVERING_64` is also in
`make test`. The oracle of each is one device with the `reference` dispatcher and the same
microbatches.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from configs.demo import demo
from moejax.core import params
from moejax.core.mesh import ParallelConfig, fold, make_mesh
from moejax.core.precision import PrecisionConfig
from moejax.data.context import order_tokens
from moejax.model.transformer import ModelConfig, Transformer
from moejax.parallel.stages import in_slots, in_units, pipeline_of
from moejax.train.optimizer import OptimizerConfig, decay_mask, make_optimizer
from moejax.train.state import Layout, TrainState, init_state, plan_state
from moejax.train.step import make_train_step
from tests.model.families import DEEPSEEK_V2_LITE, DEEPSEEK_V3, GPT_OSS, OLMOE, shrunken
from tests.oracle import max_relative_error

ROWS, LENGTH, VOCAB, STEPS = 16, 16, 64, 3

# With the usual eps of 1e-8 Adam's first steps have the size of the learning rate whatever the
# gradient's size, so where a gradient is rounding noise, the third loss is too (1.7e-5 on one fold
# that agrees to 1e-10 in float64). An eps above that noise leaves the comparison to the folds.
OPTIMIZER = OptimizerConfig(warmup_steps=2, eps=1e-4)


@dataclass(frozen=True)
class Case:
    """A fold, and what is trained on it."""

    name: str
    parallel: ParallelConfig
    dispatch: str
    microbatches: int = 1
    model: tuple[tuple[str, Any], ...] = ()
    """Changed leaves of the tiny model."""
    router: tuple[tuple[str, Any], ...] = ()
    """Changed leaves of its router."""
    balance: tuple[tuple[str, Any], ...] = ()
    """Changed leaves of its balance."""
    moe: tuple[tuple[str, Any], ...] = ()
    """Changed leaves of its MoE layers."""
    packed: bool = True
    """Two documents a row; else one, of any length."""
    short: bool = False
    """Four documents in each row of the second half."""


def _case(
    name, dispatch, microbatches=1, model=(), router=(), balance=(), moe=(), packed=True,
    short=False, **degrees,
) -> Case:  # fmt: skip
    parallel = ParallelConfig(**degrees)
    return Case(name, parallel, dispatch, microbatches, model, router, balance, moe, packed, short)


SEQUENCE = (("batch_coeff", 0.0), ("sequence_coeff", 0.05))
LOSSES = (("sequence_coeff", 0.05), ("global_coeff", 0.1))  # beside the demo's batch loss
QUANTILE = (("batch_coeff", 0.0), ("quantile_rate", 0.5))
SIGMOID, BIAS = (("score", "sigmoid"), ("scale", 2.5)), (("bias_rate", 1e-3),)
LATENT = (("latent_dim", 8), ("shared_gate", True))
PIECES = (("pieces", 2),)
DM = (("pattern", "DM"), ("num_layers", 2))
# Attention of each kind and option; tp=4 has two devices to each key/value head of OLMoE's.
OLMOE_HEADS = (("attention", shrunken(OLMOE, 8, 2)),)
LATENTS = shrunken(DEEPSEEK_V3, 8)
RECOMPUTED = replace(LATENTS, mla=replace(LATENTS.mla, recompute_up=True))
MLA_MTP = (("attention", RECOMPUTED), ("mtp_depth", 1))
# So many tokens of a vocabulary that, with ZeRO-3, those of a batch travel to the embedding.
MLA_LITE = (
    ("attention", shrunken(DEEPSEEK_V2_LITE, 8)), ("remat", "full"), ("vocab_size", 2 * VOCAB),
)  # fmt: skip
GPT_OSS_EXPERTS = (("bias", True), ("swiglu_limit", 0.02), ("shared_ffn_dim", 0))
WINDOWS = (("attention", shrunken(GPT_OSS, 8, 4)), ("pattern", "mM"), ("num_layers", 2))
STAGED = (("num_layers", 5), ("first_k_dense", 1), ("remat", "full"))
STAGED_MTP = (("num_layers", 5), ("first_k_dense", 1), ("mtp_depth", 1))
STAGED_PLAIN = STAGED[:2]
STAGED_SELECTIVE = (*STAGED_PLAIN, ("remat", "selective"))
WINDOWS_4 = (*WINDOWS[:2], ("num_layers", 4))
WINDOWS_SELECTIVE = (*WINDOWS_4, ("remat", "selective"))
MLA_SELECTIVE = (*MLA_MTP, ("remat", "selective"))
MLA_TIED = (("attention", LATENTS), ("tied", True), ("num_layers", 5))
DM_4 = (*DM[:1], ("num_layers", 6), ("first_k_dense", 2), ("remat", "full"))
TIED_MTP = (("num_layers", 4), ("tied", True), ("remat", "full"), ("mtp_depth", 1))
TIED_ALL = (*STAGED, ("tied", True), ("mtp_depth", 1))
SELECTIVE = (*STAGED_MTP, ("remat", "selective"))
FOLDS = {
    case.name: case
    for case in (
        _case("dp4tp4-ep8-zero1", "hierarchical", model=OLMOE_HEADS, balance=QUANTILE, moe=LATENT, dp=4, tp=4, ep=8, node=4, zero=1),  # noqa: E501
        _case("dp4tp4-ep4etp2-zero3", "all_gather", 4, MLA_LITE, balance=SEQUENCE, dp=4, tp=4, ep=4, etp=2, zero=3),  # noqa: E501
        _case("dp4tp4-ep4etp4-zero3", "ragged", 4, MLA_MTP, balance=LOSSES, moe=PIECES, dp=4, tp=4, ep=4, etp=4, zero=3),  # noqa: E501
        _case("dp8tp2-ep2etp4-zero0", "all_to_all", model=WINDOWS, router=SIGMOID, balance=BIAS, moe=GPT_OSS_EXPERTS, dp=8, tp=2, ep=2, etp=4, zero=0),  # noqa: E501
        _case("dp16-ep16-zero1", "all_to_all", balance=SEQUENCE, dp=16, ep=16, zero=1),
        _case("dp8tp2-edp16-zero3", "all_gather", model=(("tied", True),), dp=8, tp=2, zero=3),
        _case("dp4tp4-etp4-zero1", "ragged", 4, (("first_k_dense", 1),), (), SEQUENCE, dp=4, tp=4, etp=4),  # noqa: E501
        _case("dp4tp4-ep16-zero3-DM", "all_to_all", 4, DM, dp=4, tp=4, ep=16, zero=3),
        _case("dp16-ep4etp4-zero0", "all_to_all", model=(("tied", True),), dp=16, ep=4, etp=4, zero=0),  # noqa: E501
        _case("dp4tp4-ep4-zero3", "reference", 4, router=SIGMOID, balance=BIAS, dp=4, tp=4, ep=4, zero=3),  # noqa: E501
        _case("dp16-ep2-zero1-DM", "ragged", model=DM, balance=SEQUENCE, dp=16, ep=2, zero=1),
        _case("dp4tp4-ep8etp2-zero0", "ragged", 4, (), SIGMOID, BIAS, LATENT, dp=4, tp=4, ep=8, etp=2, zero=0),  # noqa: E501
        _case("dp4tp4-ep8etp2-node8-zero3", "hierarchical", 4, DM, dp=4, tp=4, ep=8, etp=2, node=8, zero=3),  # noqa: E501
        # Rows split over cp, which folds into ep, in each of the ways of attention.
        _case("dp4cp2tp2-ep8-zero3", "ragged", 4, MLA_MTP, balance=LOSSES, moe=PIECES, dp=4, cp=2, tp=2, ep=8, zero=3),  # noqa: E501
        _case("dp2cp4tp2-ep8-zero1-both", "all_to_all", 1, WINDOWS, SIGMOID, BIAS, GPT_OSS_EXPERTS, dp=2, cp=4, tp=2, ep=8, cp_kind="ulysses_ring"),  # noqa: E501
        _case("dp2cp4tp2-ep4etp2-zero3-ring", "all_gather", 4, MLA_LITE, balance=SEQUENCE, dp=2, cp=4, tp=2, ep=4, etp=2, zero=3, cp_kind="ring"),  # noqa: E501
        _case("dp4cp4-ep16-zero1-gather", "all_to_all", model=OLMOE_HEADS, balance=QUANTILE, moe=LATENT, dp=4, cp=4, ep=16, cp_kind="all_gather"),  # noqa: E501
        # Stages: uneven, with chunks, with everything that rides along.
        _case("pp2-1f1b", "all_gather", 4, (("num_layers", 3),), pp=2),
        _case("pp2vpp2dp2tp2-ep4-zero3", "all_to_all", 4, STAGED, balance=LOSSES, pp=2, vpp=2, dp=2, tp=2, ep=4, zero=3),  # noqa: E501
        _case("pp2vpp2dp4tp2-ep2-zero1-merged", "ragged", 4, STAGED_MTP, pp=2, vpp=2, schedule="merged", dp=4, tp=2, ep=2),  # noqa: E501
        _case("pp4dp2-zero1-merged-tied", "all_gather", 4, TIED_MTP, balance=LOSSES, pp=4, schedule="merged", dp=2),  # noqa: E501
        _case("dp4tp4-ep8-zero1-merged", "all_to_all", 4, STAGED_MTP, balance=LOSSES, dp=4, tp=4, ep=8, schedule="merged"),  # noqa: E501
        _case("pp2cp2tp2-ep4-zero3-ring", "all_gather", 4, MLA_LITE, pp=2, cp=2, tp=2, dp=2, ep=4, zero=3, cp_kind="ring"),  # noqa: E501
        _case("pp2dp2tp2-ep4-zero3-zb", "all_to_all", 4, STAGED, balance=LOSSES, pp=2, dp=2, tp=2, ep=4, zero=3, schedule="zero_bubble"),  # noqa: E501
        _case("pp4dp2-zero1-zb-tied", "all_gather", 8, TIED_ALL, balance=LOSSES, pp=4, schedule="zero_bubble", dp=2),  # noqa: E501
        _case("pp2vpp2dp2tp2-ep2-zero1-zb", "ragged", 4, SELECTIVE, SIGMOID, BIAS, PIECES, pp=2, vpp=2, schedule="zero_bubble", dp=2, tp=2, ep=2),  # noqa: E501
        # Stages and split rows together, in each of the ways of attention.
        _case("pp2dp2cp2tp2-ep4etp2-zero1-ulysses", "ragged", 4, MLA_MTP, balance=LOSSES, pp=2, dp=2, cp=2, tp=2, ep=4, etp=2),  # noqa: E501
        _case("pp2vpp2dp4cp2-ep8-zero1-gather", "all_to_all", 4, OLMOE_HEADS, balance=QUANTILE, moe=LATENT, pp=2, vpp=2, dp=4, cp=2, ep=8, cp_kind="all_gather"),  # noqa: E501
        _case("pp2cp4tp2-ep8-zero3-both", "all_to_all", 4, WINDOWS_4, SIGMOID, BIAS, GPT_OSS_EXPERTS, pp=2, cp=4, tp=2, ep=8, zero=3, cp_kind="ulysses_ring"),  # noqa: E501
        _case("pp2dp2cp2tp2-ep4-zero1-merged-ring", "all_gather", 4, WINDOWS_4, SIGMOID, BIAS, GPT_OSS_EXPERTS, pp=2, dp=2, cp=2, tp=2, ep=4, schedule="merged", cp_kind="ring"),  # noqa: E501
        _case("pp2cp4tp2-ep2etp4-zero0-merged-both-rows", "all_gather", 4, MLA_LITE, packed=False, pp=2, cp=4, tp=2, ep=2, etp=4, zero=0, schedule="merged", cp_kind="ulysses_ring"),  # noqa: E501
        _case("dp2cp4tp2-ep8etp2-zero3-merged-ring-rows", "ragged", 4, STAGED_MTP, balance=SEQUENCE, packed=False, dp=2, cp=4, tp=2, ep=8, etp=2, zero=3, schedule="merged", cp_kind="ring"),  # noqa: E501
        _case("dp4cp2tp2-ep16-zero0-gather-rows", "all_to_all", 4, MLA_MTP, balance=LOSSES, packed=False, dp=4, cp=2, tp=2, ep=16, zero=0, cp_kind="all_gather"),  # noqa: E501
        # Documents cut over 4, 2 and 1 ranks, not alike in all microbatches, nor on ranks of dp.
        _case("dp2cp4tp2-ep8-zero3-dynamic", "all_to_all", 4, MLA_MTP, balance=LOSSES, short=True, dp=2, cp=4, tp=2, ep=8, zero=3, cp_kind="dynamic"),  # noqa: E501
        _case("pp2dp2cp4-ep8-zero1-merged-dynamic", "all_gather", 4, WINDOWS_4, SIGMOID, BIAS, GPT_OSS_EXPERTS, short=True, pp=2, dp=2, cp=4, ep=8, schedule="merged", cp_kind="dynamic"),  # noqa: E501
        # Stages: experts split, nodes crossed, a tied head, microbatches and layers that do not
        # divide, empty stages, fewer microbatches than stages.
        _case("pp2dp2tp4-etp4-zero0", "all_gather", 4, MLA_TIED, balance=BIAS, pp=2, dp=2, tp=4, etp=4, zero=0),  # noqa: E501
        _case("pp2dp4tp2-ep8-node4-zero3", "hierarchical", 4, STAGED, balance=LOSSES, moe=PIECES, pp=2, dp=4, tp=2, ep=8, node=4, zero=3),  # noqa: E501
        _case("pp2dp2tp4-ep4etp2-zero3-merged", "ragged", 4, MLA_TIED, balance=SEQUENCE, moe=LATENT, pp=2, dp=2, tp=4, ep=4, etp=2, zero=3, schedule="merged"),  # noqa: E501
        _case("pp4dp2tp2-ep4-zero3-tied-rows", "all_to_all", 4, TIED_MTP, balance=LOSSES, packed=False, pp=4, dp=2, tp=2, ep=4, zero=3),  # noqa: E501
        _case("pp4vpp2dp2tp2-ep2etp2-zero1", "ragged", 6, STAGED_MTP, pp=4, vpp=2, dp=2, tp=2, ep=2, etp=2),  # noqa: E501
        _case("pp2vpp2dp2tp4-ep8-zero3-merged-DM", "all_to_all", 7, DM_4, balance=LOSSES, pp=2, vpp=2, dp=2, tp=4, ep=8, zero=3, schedule="merged"),  # noqa: E501
        _case("pp8tp2-ep2-zero1-merged", "all_gather", 2, STAGED_PLAIN, pp=8, layout="Et||tt|t||t||L", tp=2, ep=2, schedule="merged"),  # noqa: E501
        # Layers computed again, but for what travelled.
        _case("dp4tp4-ep4etp2-zero3-selective", "ragged", 4, MLA_SELECTIVE, balance=LOSSES, moe=PIECES, dp=4, tp=4, ep=4, etp=2, zero=3),  # noqa: E501
        _case("dp8cp2-ep16-node8-zero1-selective", "hierarchical", 2, WINDOWS_SELECTIVE, SIGMOID, BIAS, GPT_OSS_EXPERTS, dp=8, cp=2, ep=16, node=8),  # noqa: E501
        _case("pp2vpp2dp4tp2-ep8-zero3-merged-selective", "ragged", 4, SELECTIVE, balance=LOSSES, pp=2, vpp=2, dp=4, tp=2, ep=8, zero=3, schedule="merged"),  # noqa: E501
        _case("pp2vpp2dp4cp2-ep8-node4-zero1-merged-selective", "hierarchical", 4, STAGED_SELECTIVE, balance=LOSSES, pp=2, vpp=2, dp=4, cp=2, ep=8, node=4, schedule="merged"),  # noqa: E501
        # The five of the case "expert gradients exactly ep times too big", on 8 devices.
        _case("dp8-ep4", "all_to_all", dp=8, ep=4),
        _case("dp8-etp4", "all_gather", dp=8, etp=4),
        _case("dp4tp2-ep4", "ragged", dp=4, tp=2, ep=4),
        _case("dp8-ep8-zero3", "ragged", dp=8, ep=8, zero=3),
        _case("dp2tp4-ep2etp2", "all_to_all", dp=2, tp=4, ep=2, etp=2),
    )
}
# Every axis, ZeRO stage, dispatcher but the oracle's, all losses and biases, 1 and 4 microbatches,
# all attention, experts of gpt-oss, a module that predicts a further token; layers kept, computed
# again, and computed again but for what travelled.
COVERING = (
    "dp4tp4-ep8-zero1", "dp4tp4-ep4etp2-zero3", "dp8tp2-ep2etp4-zero0", "dp4cp2tp2-ep8-zero3",
    "pp2vpp2dp2tp2-ep4-zero3", "pp2dp2tp2-ep4-zero3-zb", "pp4dp2-zero1-merged-tied",
    "pp2vpp2dp4tp2-ep8-zero3-merged-selective",
)  # fmt: skip
COVERING_64 = ("dp4tp4-ep4etp4-zero3", "dp4tp4-ep8-zero1", "pp2vpp2dp2tp2-ep4-zero3")
GRADIENTS = ("dp8-etp4", "dp8-ep8-zero3", "dp2tp4-ep2etp2")


def tiny_model(case: Case) -> ModelConfig:
    """Returns the demo's model, shrunk, with what the case changes."""
    base = demo().model
    attention = replace(base.attention, num_heads=8, num_kv_heads=4, head_dim=8, qk_norm="head")
    router = replace(base.moe.router, **dict(case.router))
    balance = replace(base.moe.balance, **({"z_coeff": 1e-3} | dict(case.balance)))
    moe = replace(
        base.moe, num_experts=16, top_k=2, ffn_dim=16, shared_ffn_dim=16,
        dispatch=case.dispatch, router=router, balance=balance,
    )  # fmt: skip
    moe = replace(moe, **dict(case.moe))
    small = dict(vocab_size=VOCAB, dim=32, num_layers=3, ffn_dim=64, attention=attention, moe=moe)
    return replace(base, **(small | dict(case.model)))


def oracle_of(case: Case) -> Case:
    """Returns the case that defines what is right: one device, the obvious dispatcher, no remat."""
    model = tuple((name, value) for name, value in case.model if name != "remat")
    alone = ParallelConfig(zero=0)
    return replace(case, name="", parallel=alone, dispatch="reference", model=model)


def batches(
    microbatches: int,
    steps: int = STEPS,
    cp: int = 1,
    packed: bool = True,
    short: bool = False,
    groups: Sequence[int] = (),
) -> list[dict[str, np.ndarray]]:
    """Returns batches [microbatches, rows, L]: two documents a row (or one; or four, in the second
    half), padding, empty rows. Rows that the microbatches do not divide are left out."""
    generator = np.random.default_rng(0)
    segments = np.ones((ROWS, LENGTH), np.int32)
    positions = np.tile(np.arange(LENGTH, dtype=np.int32), (ROWS, 1))
    if packed:
        segments[:, 9:], positions[:, 9:] = 2, range(LENGTH - 9)
        segments[3, 12:] = 0
    else:
        segments[1::2, 11:] = 0
    segments[5] = 0
    if short:
        for rows, sizes in ((slice(8, None), [4, 4, 4, 4]), ([8, 9, 14, 15], [6, 4, 4, 2])):
            segments[rows] = np.repeat([1, 2, 3, 4], sizes)
            positions[rows] = np.concatenate([np.arange(size) for size in sizes])
    used = ROWS - ROWS % microbatches
    made = []
    for _ in range(steps):
        tokens = generator.integers(0, VOCAB, (ROWS, LENGTH), dtype=np.int32)
        inside = (segments == np.roll(segments, -1, axis=1)) & (segments > 0)
        inside[:, -1] = False
        targets = np.where(inside, np.roll(tokens, -1, axis=1), -1).astype(np.int32)
        arrays = dict(tokens=tokens, targets=targets, segment_ids=segments, positions=positions)
        if cp > 1:
            arrays["order"] = order_tokens(segments, cp, groups)
        made.append({k: a[:used].reshape(microbatches, -1, LENGTH) for k, a in arrays.items()})
    return made


@dataclass(frozen=True)
class Trainer:
    """A compiled step and its first state; the state is made anew for each use."""

    layout: Layout
    step: Any
    new_state: Any
    model: ModelConfig


def make_trainer(
    case: Case,
    dtype: str = "float32",
    *,
    compute: str = "",
    with_grads: bool = True,
    loss_mean: str = "token",
) -> Trainer:
    """Returns the train step of a case with every dtype `dtype`, but for that of `compute`."""
    precision, model = PrecisionConfig(dtype, compute or dtype, dtype, dtype), tiny_model(case)
    grid = case.parallel.fold()
    options, mesh = OPTIMIZER, make_mesh(grid)
    abstract = nnx.eval_shape(
        lambda: Transformer(model, fold=grid, precision=precision, rngs=nnx.Rngs(0))
    )
    optimizer = make_optimizer(options, 10, decay_mask(params.dims_of(abstract)[0]))
    pipeline = pipeline_of(case.parallel, model)
    layout = plan_state(model, optimizer, grid, mesh, case.parallel.zero, precision, pipeline)
    step = make_train_step(
        model, options, optimizer, layout, precision, 10, with_grads=with_grads,
        loss_mean=loss_mean,
    )  # fmt: skip

    def new_state() -> TrainState:
        alone = replace(oracle_of(case), microbatches=1, packed=True, short=False)
        copied = jax.tree.map(jnp.copy, _first_state(alone, dtype))  # a step donates it
        if pipeline:
            parts = in_slots(pipeline, (copied.params, copied.opt_state))
            copied = replace(copied, params=parts[0], opt_state=parts[1])
        return jax.device_put(copied, layout.shardings)

    return Trainer(layout, step, new_state, model)


@cache
def _first_state(alone: Case, dtype: str) -> TrainState:
    """Returns the state at step 0, made once, on one device: compiling it per fold is slow."""
    precision, model, grid = PrecisionConfig(*[dtype] * 4), tiny_model(alone), fold({}, {})
    abstract = nnx.eval_shape(lambda: Transformer(model, precision=precision, rngs=nnx.Rngs(0)))
    mask = decay_mask(params.dims_of(abstract)[0])
    optimizer = make_optimizer(OPTIMIZER, 10, mask)
    layout = plan_state(model, optimizer, grid, make_mesh(grid), 0, precision)
    return init_state(model, optimizer, layout, precision, 0)


@dataclass(frozen=True)
class Record:
    """What a tiny run gave: host arrays."""

    losses: list[float]
    norms: list[float]
    grads: dict
    """Of the first step."""
    moe: list[dict] = field(default_factory=list)


def tiny_run(case: Case, dtype: str = "float32", steps: int = STEPS) -> Record:
    """Trains a few steps; returns losses, gradient norms, gradients, MoE metrics."""
    trainer = make_trainer(case, dtype)
    state, metrics = trainer.new_state(), []
    rows = (case.packed, case.short, trainer.layout.fold.groups)
    for batch in batches(case.microbatches, steps, case.parallel.cp, *rows):
        state, out = trainer.step(state, batch)
        if trainer.layout.pipeline and not metrics:
            out["grads"] = in_units(trainer.layout.pipeline, out["grads"])
        metrics.append(jax.tree.map(np.asarray, out))
    return Record(
        [float(m["loss"]) for m in metrics],
        [float(m["grad_norm"]) for m in metrics],
        metrics[0]["grads"],
        [m["moe"] for m in metrics],
    )


def part_of(path: str) -> str:
    """Returns which part of the model a gradient's path belongs to."""
    names = {"'experts'": "experts", "w_router": "router", "'shared'": "shared"}
    return next((part for word, part in names.items() if word in path), "dense")


def errors(actual: Record, expected: Record) -> dict[str, float]:
    """Returns the errors that parity limits, by name (house definition of error)."""
    grads = jax.tree.map(max_relative_error, actual.grads, expected.grads)
    by_part: dict[str, float] = {}
    for path, error in jax.tree_util.tree_leaves_with_path(grads):
        part = part_of(jax.tree_util.keystr(path))
        by_part[part] = max(by_part.get(part, 0.0), error)
    return {
        "loss_1": max_relative_error(actual.losses[0], expected.losses[0]),
        "loss_3": max(map(max_relative_error, actual.losses, expected.losses)),
        "norm": max_relative_error(actual.norms[0], expected.norms[0]),
        **by_part,
    }


LIMITS = {
    "float32": {"loss_1": 1e-6, "loss_3": 5e-6, "norm": 1e-6},
    "float64": {"loss_1": 1e-10, "loss_3": 1e-10, "norm": 1e-10},
}
GRADIENT_LIMIT = {"float32": 1e-5, "float64": 1e-10}


def misses(found: dict[str, float], dtype: str) -> dict[str, float]:
    """Returns the errors above their limit."""
    limits = LIMITS[dtype]
    return {k: e for k, e in found.items() if not e <= limits.get(k, GRADIENT_LIMIT[dtype])}
