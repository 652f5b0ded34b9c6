"""The router on NVIDIA Hopper and Blackwell: one read of the logits.

    choice_TE = logits, or scores + bias         as whole numbers of the same order
    K times: best = max of a row, expert = the lowest column that holds it; that column is taken
    weights_TK from the K chosen logits; load_E = how many rows took each column

Grid: up to `BLOCKS_PER_SM` blocks of one warpgroup for each of `num_sms` streaming multiprocessors.
A block takes every (number of blocks)th tile of R tokens x E experts. TMA loads two tiles ahead
into two stages, which pads T and E by zeros; the kernel masks them.

A tile in registers: a row lies over L lanes, and 32 / L rows over a warp. L is 8 with 4 columns
each from 32 experts on, 16 with 2 columns from 256 on: 128 bytes of a row side by side, and 8 rows
of 256 take 16 registers a thread for each of logits, choice and counts. A row's maximum is log2(L)
shuffles, and the load costs one addition an element: counts stay in registers until the end.

Comparing whole numbers makes every case an ordinary one: a column that is taken is below every
value, -infinity among them, so the K experts of a row differ whatever it holds; a NaN is a large
number; ties go to the lowest column by a second reduction. Where there is no bias, the chosen logit
is the number itself read back. Groups: the best scores of each by the same rounds, the groups that
may be used by comparing all with all, G^2 instructions on one number a row.

Outputs are written from registers, 4 bytes a slot; load_E as one row a block, added by XLA (whole
numbers: the same bits in any order).

Bytes: 4 T E read, 8 T K and 4 E a block written. T = 8192, E = 256, K = 8: 8.9 MB, 2.7 us on an
H100 and 1.1 on a GB300 (3.35 and 7.93 TB/s). Instructions: about 5 (K + 2) an element, T E / 32
elements a warp: 4 million, 4 us of an H100's 528 schedulers. So neither is far from the time of a
launch, and what matters is that there is one.

Compiled and simulated; not yet run on a GPU, so no time measured is given.
"""

import dataclasses
from functools import partial

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, Bool, Float

from pallas_kernels.router import xla
from pallas_kernels.router.options import RouterOptions, Routes

BLOCKS_PER_SM = 4
STAGES = 2
TILE_ELEMENTS = 2048
"""Of a tile, at most, where more than the fewest rows fit: 16 registers of each thread."""
BOX = 256
"""The most columns that TMA copies at once."""
MAX_E, MAX_K, MAX_GROUPS = 512, 32, 32
MAX_ROWS = 2**31 // (4 * MAX_K)
"""Outputs are addressed in 32 bits."""
TAKEN = -(2**31)
"""The choice of a column that cannot be chosen (again): below that of every float."""
NOTHING = TAKEN + 2**23 - 1
"""The choice of -infinity: of experts in groups out of reach."""


def refusal(dtype, num_tokens: int, num_experts: int, options: RouterOptions) -> str | None:
    """Returns why this kernel cannot serve logits [num_tokens, num_experts], or None."""
    E, size = num_experts, num_experts // options.num_groups
    if jnp.dtype(dtype) != jnp.float32:
        return f"logits of {jnp.dtype(dtype).name}; float32 is served"
    if E % 8 or not 8 <= E <= MAX_E:
        return f"E={E} experts; multiples of 8 up to {MAX_E} are served"
    if options.top_k > MAX_K:
        return f"K={options.top_k} experts a token; at most {MAX_K} are served"
    if options.limited and (options.num_groups > MAX_GROUPS or size % min(E, 32)):
        return (
            f"num_groups={options.num_groups} of E={E}; at most {MAX_GROUPS} groups of a multiple "
            "of 32 experts are served"
        )
    if options.bias_on != "scores":
        return f"bias_on={options.bias_on!r}; a bias on scores is served"
    if num_tokens > MAX_ROWS:
        return f"{num_tokens} tokens; at most {MAX_ROWS} are served"
    return None


@dataclasses.dataclass(frozen=True)
class Plan:
    """How a tile of the logits lies in registers."""

    rows: int
    """Tokens of a tile."""
    cols: int
    """Experts, padded to whole spans, and to equal boxes."""
    boxes: int
    """Copies of a tile, side by side."""
    span: int
    """Columns that the lanes of one row hold side by side; also of the tile of chosen experts."""
    lanes: int
    """Lanes of a row."""
    experts: int

    @property
    def layout(self):
        """4 warps by rows, each 32 / L rows by L lanes, 2 or 4 columns a lane."""
        in_warp = 32 // self.lanes
        tiles = ((4 * in_warp, self.span), (in_warp, self.span), (self.span // self.lanes,))
        return plgpu.Layout.TILED(plgpu.Tiling(tiles), (-5,), (-3, -2), -1)


def make_plan(num_tokens: int, num_experts: int, num_sms: int) -> Plan:
    """Worked example, 8192 tokens, 132 SMs: E = 256 gives tiles of 16 x 256; 8 gives 64 x 8."""
    span = min(32, pl.next_power_of_2(num_experts))
    boxes = pl.cdiv(num_experts, BOX)
    cols = pl.cdiv(num_experts, boxes * span) * boxes * span
    lanes = span // (4 if cols < BOX else 2)  # half the columns a thread where there are many
    rows = 4 * 32 // lanes
    while (
        rows < 128
        and 2 * rows * cols <= TILE_ELEMENTS
        and pl.cdiv(num_tokens, 2 * rows) >= num_sms * BLOCKS_PER_SM
    ):
        rows *= 2
    return Plan(rows, cols, boxes, span, lanes, num_experts)


# Whole numbers in the order of floats.


def _ordered(x):
    """Returns int32 that compare as the floats do: -0 is 0, and any NaN is above infinity."""
    bits = lax.bitcast_convert_type(x, jnp.int32)
    bits = jnp.where(bits == TAKEN, 0, bits)  # -0
    magnitude = bits & 0x7FFFFFFF
    return jnp.where(
        magnitude > 0x7F800000, 0x7FFFFFFF, jnp.where(bits < 0, bits ^ 0x7FFFFFFF, bits)
    )


def _value(ordered):
    """Returns the float of `_ordered`."""
    bits = jnp.where(ordered < 0, ordered ^ 0x7FFFFFFF, ordered)
    return lax.bitcast_convert_type(bits, jnp.float32)


# Scores.


def _log1p(y):
    """log(1 + y) for 0 <= y <= 1, to rounding: the error of 1 + y is divided out (Kahan)."""
    u = 1.0 + y
    return jnp.where(u == 1.0, y, y * (jnp.log(u) / jnp.where(u == 1.0, 1.0, u - 1.0)))


def _softplus(x):
    return jnp.maximum(x, 0.0) + _log1p(jnp.exp(-jnp.abs(x)))


def _log_score(x, score: str):
    """`options.log_scores` for what is not a softmax, with what a kernel can lower."""
    if score == "sigmoid":
        return -_softplus(-x)
    small = jnp.minimum(x, -15.0)
    y = jnp.exp(small)
    large = jnp.log(_softplus(jnp.maximum(x, -15.0)))
    return 0.5 * jnp.where(x < -15.0, small - y * (0.5 - y * (5 / 24)), large)


class _Tile:
    """A plan's arrays, and what is done by row. `wide` is the tile, `narrow` its first span."""

    def __init__(self, plan: Plan):
        self.plan = plan
        self.wide, self.narrow = (plan.rows, plan.cols), (plan.rows, plan.span)
        self.col = self.iota(self.wide)
        self.slot = self.iota(self.narrow)

    def iota(self, shape):
        return plgpu.broadcasted_iota(jnp.int32, shape, 1, layout=self.plan.layout)

    def across(self, x_R, shape):
        """Returns a number a row in every column."""
        return plgpu.layout_cast(lax.broadcast_in_dim(x_R, shape, (0,)), self.plan.layout)

    def down(self, x_C, shape):
        """Returns a number a column in every row."""
        return plgpu.layout_cast(lax.broadcast_in_dim(x_C, shape, (1,)), self.plan.layout)

    def full(self, shape, value, dtype):
        return plgpu.layout_cast(jnp.full(shape, value, dtype), self.plan.layout)

    def best(self, choice, col):
        """Returns (a row's largest choice, the lowest column that holds it, where that is)."""
        best_R = choice.max(axis=1)
        held = choice == self.across(best_R, choice.shape)
        at_R = jnp.where(held, col, 2**30).min(axis=1)
        return best_R, at_R, col == self.across(at_R, choice.shape)


def _all_scores(tile: _Tile, options: RouterOptions, x):
    """Returns the score of every expert."""
    if options.score == "sigmoid":
        return 1.0 / (1.0 + jnp.exp(-x))
    if options.score == "sqrt_softplus":
        return jnp.sqrt(_softplus(x))
    e = jnp.exp(x - tile.across(x.max(axis=1), tile.wide))
    return e / tile.across(e.sum(axis=1), tile.wide)


def _reach(tile: _Tile, options: RouterOptions, biased):
    """Returns which experts are in the groups that the row may use."""
    size = tile.plan.experts // options.num_groups
    ranks = []
    for g in range(options.num_groups):
        own = biased[:, g * size : (g + 1) * size]
        choice, col, total_R = _ordered(own), tile.iota(own.shape), None
        for n in range(options.num_group_score):
            best_R, _, where = tile.best(choice, col)
            value_R = _value(best_R)
            total_R = value_R if total_R is None else total_R + value_R
            if n + 1 < options.num_group_score:
                choice = jnp.where(where, TAKEN, choice)
        ranks.append(_ordered(total_R))
    bits_R = jnp.zeros_like(ranks[0])
    for g, mine_R in enumerate(ranks):
        above_R = jnp.zeros_like(mine_R)
        for h, other_R in enumerate(ranks):
            # Ties go to the lowest group.
            first = (other_R >= mine_R) if h < g else (other_R > mine_R)
            above_R = above_R + jnp.where(first, 1, 0)
        bits_R = bits_R | jnp.where(above_R < options.topk_groups, 1 << g, 0)
    return (tile.across(bits_R, tile.wide) >> lax.div(tile.col, jnp.int32(size))) & 1 != 0


def _choose(tile: _Tile, options: RouterOptions, x, bias_gmem):
    """Returns what experts are ranked by, as whole numbers."""
    choice = x
    if bias_gmem is not None or options.limited:
        biased = _all_scores(tile, options, x)
        if bias_gmem is not None:
            bias = plgpu.load(bias_gmem, layout=tile.plan.layout.reduce(0), optimized=False)
            choice = biased = biased + tile.down(bias, tile.wide)
        if options.limited:
            reached = _reach(tile, options, biased)
            choice = jnp.where(reached, _ordered(choice), NOTHING)
    if choice.dtype != jnp.int32:
        choice = _ordered(choice)
    if tile.plan.cols > tile.plan.experts:
        choice = jnp.where(tile.col < tile.plan.experts, choice, TAKEN)
    return choice


def _weigh(tile: _Tile, options: RouterOptions, chosen, x):
    """Returns the weights of the chosen logits: the first K columns of `narrow`."""
    used = tile.slot < options.top_k
    if options.score != "softmax":
        chosen = _log_score(chosen, options.score)
    if options.renormalize:
        chosen = jnp.where(used, chosen, -jnp.inf)
        e = jnp.exp(chosen - tile.across(chosen.max(axis=1), tile.narrow))
        return e * (options.scale / tile.across(e.sum(axis=1), tile.narrow))
    if options.score == "softmax":
        most_R = x.max(axis=1)
        total_R = jnp.exp(x - tile.across(most_R, tile.wide)).sum(axis=1)
        chosen = chosen - tile.across(most_R + jnp.log(total_R), tile.narrow)
    return jnp.exp(chosen) * options.scale


def _visit(plan: Plan, options: RouterOptions, refs, x, item, hits):
    """Routes one tile, and returns the hits with its own added."""
    bias_gmem, valid_gmem, experts_gmem, weights_gmem = refs
    tile, rows, K = _Tile(plan), pl.ds(item * plan.rows, plan.rows), options.top_k
    if plan.cols > plan.experts:
        x = jnp.where(tile.col < plan.experts, x, -jnp.inf)
    by_row = plan.layout.reduce(1)
    valid_R = plgpu.load(valid_gmem.at[rows], layout=by_row, optimized=False) != 0

    def take(k, carry):
        choice, chosen = carry
        best_R, at_R, where = tile.best(choice, tile.col)
        logit_R = _value(best_R)
        if bias_gmem is not None:  # the choice is not the logit
            logit_R = jnp.where(where, x, 0.0).sum(axis=1)
        plgpu.store(
            experts_gmem.at[rows, k], jnp.where(valid_R, at_R, plan.experts), optimized=False
        )
        chosen = jnp.where(tile.slot == k, tile.across(logit_R, tile.narrow), chosen)
        return jnp.where(where, TAKEN, choice), chosen

    choice, chosen = lax.fori_loop(
        0, K, take, (_choose(tile, options, x, bias_gmem), tile.full(tile.narrow, 0.0, jnp.float32))
    )
    weights = _weigh(tile, options, chosen, x)
    for k in range(K):
        weight_R = jnp.where(tile.slot == k, weights, 0.0).sum(axis=1)
        plgpu.store(weights_gmem.at[rows, k], jnp.where(valid_R, weight_R, 0.0), optimized=False)
    one = tile.across(jnp.where(valid_R, 1, 0), tile.wide)
    return hits + jnp.where(choice == TAKEN, one, 0)


def _kernel(plan: Plan, options: RouterOptions, num_blocks: int, biased: bool, *refs):
    """One block's share of the tiles."""
    logits_gmem, *bias, valid_gmem, experts_gmem, weights_gmem, counts_gmem, smem, loaded = refs
    block = lax.axis_index("block")
    num_tiles = pl.cdiv(logits_gmem.shape[0], plan.rows)
    steps = lax.div(num_tiles - block + num_blocks - 1, num_blocks)

    none = jnp.minimum(block, 0)  # 0, but not to JAX, which lets no static slice overhang

    def load(step):
        stage = lax.rem(step, STAGES)
        rows = pl.ds((block + step * num_blocks) * plan.rows, plan.rows)
        for box in range(plan.boxes):
            cols = pl.ds(none + box * smem.shape[3], smem.shape[3])
            plgpu.copy_gmem_to_smem(
                logits_gmem.at[rows, cols], smem.at[stage, box], loaded.at[stage]
            )

    outputs = (*(bias or [None]), valid_gmem, experts_gmem, weights_gmem)

    def visit(step, hits):
        stage = lax.rem(step, STAGES)
        plgpu.barrier_wait(loaded.at[stage])
        boxes = [
            plgpu.load(smem.at[stage, box], layout=plan.layout, optimized=False)
            for box in range(plan.boxes)
        ]
        x = boxes[0] if plan.boxes == 1 else jnp.concatenate(boxes, axis=1)
        plgpu.commit_smem()  # all have read it
        pl.when(step + STAGES < steps)(lambda: load(step + STAGES))
        return _visit(plan, options, outputs, x, block + step * num_blocks, hits)

    lax.fori_loop(0, jnp.minimum(steps, STAGES), lambda step, _: load(step), None)
    hits = _Tile(plan).full((plan.rows, plan.cols), 0, jnp.int32)
    hits = lax.fori_loop(0, steps, visit, hits)
    plgpu.store(counts_gmem.at[block], hits.sum(axis=0), optimized=False)


_PARAMS = plgpu.CompilerParams(
    lowering_semantics=plgpu.LoweringSemantics.Lane,
    # Shared memory is written by TMA alone, after commit_smem: see `visit`.
    unsafe_no_auto_barriers=True,
)


def _select(num_sms: int, options: RouterOptions, logits_TE, bias_E, valid_T) -> Routes:
    """The forward pass."""
    (T, E), K = logits_TE.shape, options.top_k
    plan = make_plan(T, E, num_sms)
    num_tiles = pl.cdiv(T, plan.rows)
    num_blocks, padded = min(num_tiles, num_sms * BLOCKS_PER_SM), num_tiles * plan.rows
    bias = [] if bias_E is None else [jnp.pad(bias_E, (0, plan.cols - E))]
    valid = jnp.pad(valid_T.astype(jnp.int32), (0, padded - T))

    def out(shape, dtype):
        return jax.typeof(logits_TE).update(shape=shape, dtype=jnp.dtype(dtype), weak_type=False)

    experts, weights, counts = plgpu.kernel(
        partial(_kernel, plan, options, num_blocks, bias_E is not None),
        out_type=(
            out((padded, K), jnp.int32),
            out((padded, K), jnp.float32),
            out((num_blocks, plan.cols), jnp.int32),
        ),
        scratch_types=[
            plgpu.SMEM((STAGES, plan.boxes, plan.rows, plan.cols // plan.boxes), jnp.float32),
            plgpu.Barrier(num_arrivals=plan.boxes, num_barriers=STAGES),
        ],
        grid=(num_blocks,),
        grid_names=("block",),
        compiler_params=_PARAMS,
        kernel_name="router",
    )(logits_TE, *bias, valid)
    load_E = counts.sum(axis=0, dtype=jnp.int32)[:E]
    return Routes(experts[:T], weights[:T], load_E)


def route(
    logits_TE: Float[Array, "T E"],
    bias_E: Float[Array, " E"] | None,
    valid_T: Bool[Array, " T"],
    options: RouterOptions,
    *,
    num_sms: int = 132,
) -> Routes:
    """See the package. `num_sms` is the number of streaming multiprocessors to fill.

    Raises ValueError where `refusal` says so, and inside shard_map where the bias or the mask vary
    over an axis that the logits do not vary over.
    """
    T, E = logits_TE.shape
    if (why := refusal(logits_TE.dtype, T, E, options)) is not None:
        raise ValueError(why)
    operands = [a for a in (logits_TE, bias_E, valid_T) if a is not None]
    axes = [jax.typeof(a).manual_axis_type.varying for a in operands]
    if missing := frozenset.union(*axes) - axes[0]:
        raise ValueError(
            f"bias or valid vary over mesh axes {sorted(missing)} and the logits do not; the "
            "result takes its type from the logits: make them varying first"
        )
    if T == 0:
        return xla.route(logits_TE, bias_E, valid_T, options)
    return xla.differentiable(partial(_select, num_sms), options, logits_TE, bias_E, valid_T)
