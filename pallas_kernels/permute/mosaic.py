"""Permutation on NVIDIA Hopper and Blackwell: rows moved by asynchronous bulk copies.

    permute     x_SD[s] = x_TD[tokens_S[s]]                          zeros where the token is -1
    unpermute   y_TD[t] = sum_k weights[t, k] * y_SD[slots[t, k]]    slots of -1 skipped
    unpermute_gradient      dy_SD[s] = w_S[s] * dy_TD[tokens_S[s]]   w_S: the weights, sorted
                            dot_S[s] = dy_TD[tokens_S[s]] . y_SD[s]  the weights' gradient, sorted

Other gradients: permute's is unpermute without weights, and unpermute's without weights is permute.

Grid: `BLOCKS_PER_SM` blocks of one warpgroup for each of `num_sms` streaming multiprocessors. A
block takes every (number of blocks)th item until none is left; it keeps a ring of shared-memory
stages, loads of later items in flight while it serves the oldest.

permute. An item is R sorted rows. One thread starts R copies, device to shared memory, each from a
row of x or from a row of zeros; one copy back stores the R rows, which are neighbours in the
output. No register sees the data. A row longer than a stage is cut into pieces (R is then 1).

unpermute. An item is one token's piece of W columns. One thread starts a copy for each k whose slot
is not -1; the warpgroup adds the K rows in registers, in float32, in the order of k (the same bits
every run), rounds once, and stores by a copy. A slot of -1 is skipped by a branch: its stage holds
what an earlier item left, and nothing of that is read.

unpermute_gradient. The same for two rows, a token's and a sorted one; a dot product is the sum of
one number a piece. A row of no token is written as zeros, and nothing is read for it.

Bytes, b a row's: permute writes S b and reads between T b (every repeated row found in L2) and S b.
unpermute reads one row a slot that is not -1, and writes T b; its gradient reads 2 S b and writes
S b. With nothing found in L2 and none of -1, T = 8192, K = 8, bfloat16, in microseconds at least:

               D = 2048                            D = 7168
    permute    0.54 GB, H100 160, GB300 68         1.88 GB, H100 561, GB300 237
    unpermute  0.30 GB, H100  90, GB300 38         1.06 GB, H100 315, GB300 133
    gradient   0.81 GB, H100 240, GB300 102        2.82 GB, H100 841, GB300 356

(3.35 and 7.93 TB/s.) FLOPs: 2 K T D, of no account.

Bytes in flight (Little's law, about 1 microsecond from request to data under load): 3.35 TB/s needs
3.4 MB over 132 multiprocessors, 25 KiB on each; 7.93 TB/s needs 51 KiB on each of 152. A block's
ring has loads of 56 KiB or more under way beside the stage that it serves (rows of 4 KiB or more),
and there are two blocks. Indices and weights of an item are requested before the wait for an older
item's rows, so that their latency hides behind it.

More than 2^31 elements: these copies take an address (`cp.async.bulk`), not coordinates, and Mosaic
computes it in 64 bits from the row and the column, which alone are 32 bits. Blackwell's gather of
four rows is not used: it moves 256 columns at most, where one of these copies moves a whole row.

Compiled and simulated; not yet run on a GPU, so no time measured is given.
"""

import dataclasses
from functools import partial

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, Float, Int

BLOCKS_PER_SM = 2
BLOCK_BYTES = 108 * 1024
"""Shared memory of one block: two share the 227 KiB of a multiprocessor, and each needs 1 more."""
MAX_DEPTH = 16
STORES = 2
"""Stores that may still be reading shared memory while later items are served."""
COPY_STAGE_BYTES = 16 * 1024
SUM_STAGE_BYTES = 32 * 1024
MAX_ROWS = 16
"""Rows of one item of permute: their indices are held in registers."""
LANES = 256
"""Pieces of a row are multiples of this many columns: 128 threads, two elements each at least."""
MAX_SUM_WIDTH = 4096
"""Columns of a sum, 32 registers of each thread."""
MAX_K = 32
"""Rows of a token: each is a branch of the kernel, and 64 of them take 20 seconds to compile."""
MAX_INDEX = 2**31 - 2**22
"""Items, and those that would follow the last one, are numbered in 32 bits."""

_PARAMS = plgpu.CompilerParams(
    lowering_semantics=plgpu.LoweringSemantics.Warpgroup,
    # permute touches no shared memory itself. In the others commit_smem, a barrier, stands between
    # the reads of a stage and the copy that overwrites it, and between one dot product's use of the
    # shared scratch and the next one's.
    unsafe_no_auto_barriers=True,
)


def refusal(dtype, dim: int, *, num_rows: int, num_experts_per_token: int = 1) -> str | None:
    """Returns why these kernels cannot serve rows of `dim` elements of `dtype`, or None.

    `num_rows` is the largest of T, S and T*K; `num_experts_per_token` is K.
    """
    if jnp.dtype(dtype) not in (jnp.bfloat16, jnp.float32):
        return f"rows of {jnp.dtype(dtype).name}; bfloat16 and float32 are served"
    step = 16 // jnp.dtype(dtype).itemsize
    if dim == 0 or dim % step:
        return f"D={dim} is not a multiple of {step}: rows are copied in units of 16 bytes"
    if num_experts_per_token > MAX_K:
        return f"K={num_experts_per_token} rows a token; at most {MAX_K} are served"
    if num_rows >= MAX_INDEX:
        return f"{num_rows} rows cannot be numbered in 32 bits"
    return None


@dataclasses.dataclass(frozen=True)
class Plan:
    """How an array's rows are cut into items, and how many stages the ring has."""

    rows: int
    """Rows of the output in an item."""
    width: int
    """Columns of a piece: of all pieces but the last, and of a stage."""
    last: int
    """Columns of the last piece."""
    pieces: int
    depth: int


def _plan_copy(num_rows: int, dim: int, itemsize: int) -> Plan:
    """Worked example, bfloat16: D = 2048 gives 4 rows a stage, 6 stages; 7168 one row, 7 stages."""
    pieces = pl.cdiv(dim * itemsize, COPY_STAGE_BYTES)
    if pieces == 1:
        rows = max(1, min(MAX_ROWS, COPY_STAGE_BYTES // (dim * itemsize), num_rows))
        return Plan(rows, dim, dim, 1, min(MAX_DEPTH, BLOCK_BYTES // (rows * dim * itemsize)))
    width = pl.cdiv(pl.cdiv(dim, pieces), LANES) * LANES
    pieces = pl.cdiv(dim, width)
    depth = BLOCK_BYTES // (width * itemsize)
    return Plan(1, width, dim - (pieces - 1) * width, pieces, depth)


def _plan_sum(dim: int, itemsize: int, K: int) -> Plan:
    """Worked example, bfloat16, K = 8: D = 2048 is one piece, 7168 four of 1792; 3 stages each."""
    longest = min(MAX_SUM_WIDTH, SUM_STAGE_BYTES // (K * itemsize))
    pieces = pl.cdiv(dim, max(LANES, longest // LANES * LANES))
    width = pl.cdiv(pl.cdiv(dim, pieces), LANES) * LANES
    pieces = pl.cdiv(dim, width)
    room = BLOCK_BYTES - STORES * width * itemsize
    depth = max(2, min(MAX_DEPTH, room // (K * width * itemsize)))
    return Plan(1, width, dim - (pieces - 1) * width, pieces, depth)


def _like(rows, num_rows: int):
    """Returns the type of `num_rows` rows, varying over the mesh axes that `rows` varies over.

    A type of JAX: plgpu.kernel ignores the manual_axis_type of a jax.ShapeDtypeStruct.
    """
    return jax.typeof(rows).update(shape=(num_rows, rows.shape[1]), weak_type=False)


def _for_piece(plan: Plan, piece, copy):
    """Calls copy(first column, columns); the number of columns is static, so one call a length."""
    if plan.pieces == 1:
        copy(0, plan.last)
        return
    start = piece * plan.width
    if plan.last == plan.width:
        copy(start, plan.width)
        return
    pl.when(piece < plan.pieces - 1)(lambda: copy(start, plan.width))
    pl.when(piece == plan.pieces - 1)(lambda: copy(start, plan.last))


def _share(num_items: int, num_blocks: int):
    """Returns (first, how many) of the items of this block: every `num_blocks`th."""
    first = lax.axis_index("block")
    return first, lax.div(num_items - first + num_blocks - 1, num_blocks)


def _place(plan: Plan, first, num_blocks: int, step):
    """Returns (row of the output, piece) of the block's item of this step."""
    item = first + step * num_blocks
    return lax.div(item, plan.pieces), lax.rem(item, plan.pieces)


def _each(num_steps, body):
    """Calls body(step) for each step, in a loop of the kernel."""
    lax.fori_loop(0, num_steps, lambda step, _: body(step), None)


def _load(src, dst, barrier):
    plgpu.copy_gmem_to_smem(src, dst, barrier, oob_mode=plgpu.OOBFillMode.PROMISE_IN_BOUNDS)


def _store(plan: Plan, value, bank_smem, row_gmem, piece):
    """Rounds `value` to the rows' dtype and starts its copy to a piece of `row_gmem`.

    The bank was last read by the store before the latest `STORES - 1`.
    """
    plgpu.wait_smem_to_gmem(STORES - 1, wait_read_only=True)
    bank_smem[...] = value.astype(bank_smem.dtype)
    plgpu.commit_smem()

    def copy(start, columns):
        to = row_gmem.at[pl.ds(start, columns)]
        plgpu.copy_smem_to_gmem(bank_smem.at[pl.ds(0, columns)], to)

    _for_piece(plan, piece, copy)


def _copy_kernel(
    plan: Plan, num_blocks: int, x_gmem, zero_gmem, tokens_gmem, out_gmem, stages_smem, loaded
):
    """One block's share of permute."""
    num_rows = out_gmem.shape[0]
    first, steps = _share(pl.cdiv(num_rows, plan.rows) * plan.pieces, num_blocks)

    def place(step):
        """Returns (first row, piece) of an item."""
        item = first + step * num_blocks
        return lax.div(item, plan.pieces) * plan.rows, lax.rem(item, plan.pieces)

    def tokens_of(step):
        """Returns the item's tokens; rows past the last one repeat it, and are not stored."""
        row, _ = place(step)
        return [tokens_gmem[jnp.minimum(row + r, num_rows - 1)] for r in range(plan.rows)]

    def load(step, tokens):
        slot, (_, piece) = lax.rem(step, plan.depth), place(step)

        def rows(start, columns):
            for r, token in enumerate(tokens):
                across = pl.ds(start, columns)
                to = stages_smem.at[slot, r, pl.ds(0, columns)], loaded.at[slot]
                pl.when(token >= 0)(partial(_load, x_gmem.at[token, across], *to))
                pl.when(token < 0)(partial(_load, zero_gmem.at[0, across], *to))

        _for_piece(plan, piece, rows)

    def serve(step):
        ahead = step + plan.depth - STORES
        tokens = tokens_of(ahead)
        slot, (row, piece) = lax.rem(step, plan.depth), place(step)
        plgpu.barrier_wait(loaded.at[slot])

        def store(start, columns):
            # The copy stops at the end of the array, so rows past the last one stay out.
            plgpu.copy_smem_to_gmem(
                stages_smem.at[slot, :, pl.ds(0, columns)],
                out_gmem.at[pl.ds(row, plan.rows), pl.ds(start, columns)],
            )

        _for_piece(plan, piece, store)
        plgpu.wait_smem_to_gmem(STORES, wait_read_only=True)
        pl.when(ahead < steps)(partial(load, ahead, tokens))

    _each(jnp.minimum(steps, plan.depth - STORES), lambda step: load(step, tokens_of(step)))
    _each(steps, serve)
    plgpu.wait_smem_to_gmem(0)


def _gather(num_sms: int, x_TD, tokens_S):
    """x_TD[tokens_S], zeros where the token is -1."""
    (T, D), (S,) = x_TD.shape, tokens_S.shape
    if T == 0 or S == 0:
        return jnp.zeros_like(x_TD, shape=(S, D))
    plan, num_blocks = _plan_copy(S, D, x_TD.dtype.itemsize), num_sms * BLOCKS_PER_SM
    return plgpu.kernel(
        partial(_copy_kernel, plan, num_blocks),
        out_type=_like(x_TD, S),
        scratch_types=[
            plgpu.SMEM((plan.depth, plan.rows, plan.width), x_TD.dtype),
            plgpu.Barrier(num_arrivals=plan.rows, num_barriers=plan.depth),
        ],
        grid=(num_blocks,),
        grid_names=("block",),
        compiler_params=_PARAMS,
        kernel_name="permute",
    )(x_TD, jnp.zeros((1, D), x_TD.dtype), tokens_S)


def _sum_kernel(plan: Plan, num_blocks: int, K: int, y_gmem, slots_gmem, *refs):
    """One block's share of unpermute. `refs` starts with the weights where there are some."""
    *weights_gmem, out_gmem, stages_smem, sums_smem, loaded = refs
    num_tokens = out_gmem.shape[0]
    first, steps = _share(num_tokens * plan.pieces, num_blocks)

    place = partial(_place, plan, first, num_blocks)  # (token, piece)

    def slots_of(step):
        """Returns where the token's K rows are; the last token's for an item past the end."""
        token = jnp.minimum(place(step)[0], num_tokens - 1)
        return [slots_gmem[token * K + k] for k in range(K)]

    def load(step, slots):
        stage, (_, piece) = lax.rem(step, plan.depth), place(step)

        def rows(start, columns):
            for k, slot in enumerate(slots):
                to, here = stages_smem.at[stage, k, pl.ds(0, columns)], loaded.at[stage]
                row = y_gmem.at[slot, pl.ds(start, columns)]
                pl.when(slot >= 0)(partial(_load, row, to, here))
                pl.when(slot < 0)(partial(plgpu.barrier_arrive, here))

        _for_piece(plan, piece, rows)

    def serve(step):
        ahead = step + plan.depth
        token, piece = place(step)
        mine, later = slots_of(step), slots_of(ahead)
        weights = [ref[token * K + k] for ref in weights_gmem for k in range(K)]
        stage, bank = lax.rem(step, plan.depth), lax.rem(step, STORES)
        plgpu.barrier_wait(loaded.at[stage])
        total = jnp.zeros((plan.width,), jnp.float32)
        for k, slot in enumerate(mine):

            def add(total, k=k):
                row = stages_smem[stage, k].astype(jnp.float32)
                return total + (row * weights[k] if weights else row)

            total = lax.cond(slot >= 0, add, lambda total: total, total)
        _store(plan, total, sums_smem.at[bank], out_gmem.at[token], piece)
        pl.when(ahead < steps)(partial(load, ahead, later))

    _each(jnp.minimum(steps, plan.depth), lambda step: load(step, slots_of(step)))
    _each(steps, serve)
    plgpu.wait_smem_to_gmem(0)


def _gather_sum(num_sms: int, y_SD, slots_TK, weights_TK):
    """The weighted sum of each token's rows; weights of 1 if None."""
    (S, D), (T, K) = y_SD.shape, slots_TK.shape
    if T == 0 or S == 0 or K == 0:
        return jnp.zeros_like(y_SD, shape=(T, D))
    plan, num_blocks = _plan_sum(D, y_SD.dtype.itemsize, K), num_sms * BLOCKS_PER_SM
    weights = [] if weights_TK is None else [weights_TK.astype(jnp.float32).reshape(-1)]
    return plgpu.kernel(
        partial(_sum_kernel, plan, num_blocks, K),
        out_type=_like(y_SD, T),
        scratch_types=[
            plgpu.SMEM((plan.depth, K, plan.width), y_SD.dtype),
            plgpu.SMEM((STORES, plan.width), y_SD.dtype),
            plgpu.Barrier(num_arrivals=K, num_barriers=plan.depth),
        ],
        grid=(num_blocks,),
        grid_names=("block",),
        compiler_params=_PARAMS,
        kernel_name="unpermute",
    )(y_SD, slots_TK.reshape(-1), *weights)


def _gradient_kernel(
    plan: Plan, num_blocks: int, dy_gmem, y_gmem, tokens_gmem, weights_gmem, *refs
):
    """One block's share of unpermute's gradients."""
    d_rows_gmem, dots_gmem, stages_smem, d_rows_smem, loaded = refs
    num_rows = d_rows_gmem.shape[0]
    first, steps = _share(num_rows * plan.pieces, num_blocks)

    place = partial(_place, plan, first, num_blocks)  # (row, piece)

    def token_of(step):
        """Returns the token of the item's row; the last row's for an item past the end."""
        return tokens_gmem[jnp.minimum(place(step)[0], num_rows - 1)]

    def load(step, token):
        stage, (row, piece) = lax.rem(step, plan.depth), place(step)
        here = loaded.at[stage]

        def rows(start, columns):
            across, to = pl.ds(start, columns), pl.ds(0, columns)
            for of, source in enumerate((dy_gmem.at[token, across], y_gmem.at[row, across])):
                pl.when(token >= 0)(partial(_load, source, stages_smem.at[stage, of, to], here))
                pl.when(token < 0)(partial(plgpu.barrier_arrive, here))

        _for_piece(plan, piece, rows)

    def serve(step):
        ahead = step + plan.depth
        row, piece = place(step)
        token, later, weight = token_of(step), token_of(ahead), weights_gmem[row]
        stage, bank = lax.rem(step, plan.depth), lax.rem(step, STORES)
        columns = jnp.where(piece < plan.pieces - 1, plan.width, plan.last)
        plgpu.barrier_wait(loaded.at[stage])

        def scale_and_dot():
            dy = stages_smem[stage, 0].astype(jnp.float32)
            products = dy * stages_smem[stage, 1].astype(jnp.float32)
            # A last piece leaves what an older item left behind its columns.
            column = lax.broadcasted_iota(jnp.int32, (plan.width,), 0)
            return dy * weight, jnp.sum(jnp.where(column < columns, products, 0.0))

        nothing = jnp.zeros((plan.width,), jnp.float32), jnp.float32(0)
        d_row, dot = lax.cond(token >= 0, scale_and_dot, lambda: nothing)
        dots_gmem[row * plan.pieces + piece] = dot
        _store(plan, d_row, d_rows_smem.at[bank], d_rows_gmem.at[row], piece)
        pl.when(ahead < steps)(partial(load, ahead, later))

    _each(jnp.minimum(steps, plan.depth), lambda step: load(step, token_of(step)))
    _each(steps, serve)
    plgpu.wait_smem_to_gmem(0)


def _gather_dot(num_sms: int, dy_TD, y_SD, tokens_S, weights_S):
    """Returns (dy_TD[tokens_S] * weights_S, their dot products with y_SD before the weights)."""
    (S, D), T = y_SD.shape, dy_TD.shape[0]
    if T == 0 or S == 0:
        return jnp.zeros_like(y_SD), jnp.zeros_like(weights_S)
    plan, num_blocks = _plan_sum(D, y_SD.dtype.itemsize, 2), num_sms * BLOCKS_PER_SM
    dots = jax.typeof(weights_S).update(shape=(S * plan.pieces,))
    d_rows_SD, dots = plgpu.kernel(
        partial(_gradient_kernel, plan, num_blocks),
        out_type=(_like(y_SD, S), dots),
        scratch_types=[
            plgpu.SMEM((plan.depth, 2, plan.width), y_SD.dtype),
            plgpu.SMEM((STORES, plan.width), y_SD.dtype),
            plgpu.Barrier(num_arrivals=2, num_barriers=plan.depth),
        ],
        grid=(num_blocks,),
        grid_names=("block",),
        compiler_params=_PARAMS,
        kernel_name="unpermute_gradient",
    )(dy_TD, y_SD, tokens_S, weights_S)
    return d_rows_SD, dots.reshape(S, plan.pieces).sum(axis=1)


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _permute(num_sms, x_TD, tokens_S, slots_TK):
    return _gather(num_sms, x_TD, tokens_S)


def _permute_forward(num_sms, x_TD, tokens_S, slots_TK):
    return _gather(num_sms, x_TD, tokens_S), slots_TK


def _permute_backward(num_sms, slots_TK, dx_SD):
    return _gather_sum(num_sms, dx_SD, slots_TK, None), None, None


_permute.defvjp(_permute_forward, _permute_backward)


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _unpermute(num_sms, y_SD, slots_TK, tokens_S, weights_TK):
    return _gather_sum(num_sms, y_SD, slots_TK, weights_TK)


def _unpermute_forward(num_sms, y_SD, slots_TK, tokens_S, weights_TK):
    kept = None if weights_TK is None else (y_SD, weights_TK)
    return _gather_sum(num_sms, y_SD, slots_TK, weights_TK), (slots_TK, tokens_S, kept)


def _unpermute_backward(num_sms, residuals, dy_TD):
    slots_TK, tokens_S, kept = residuals
    if kept is None:
        return _gather(num_sms, dy_TD, tokens_S), None, None, None
    y_SD, weights_TK = kept
    row_S1 = jnp.arange(tokens_S.shape[0], dtype=slots_TK.dtype)[:, None]
    # Index -1 reads the last entry; what comes of that is selected away, here or by the kernel.
    mine_SK = slots_TK.at[tokens_S].get(mode="clip") == row_S1
    weights_SK = jnp.where(mine_SK, weights_TK.at[tokens_S].get(mode="clip"), 0)
    weights_S = weights_SK.astype(jnp.float32).sum(axis=1)
    dy_SD, dots_S = _gather_dot(num_sms, dy_TD, y_SD, tokens_S, weights_S)
    d_weights_TK = jnp.where(slots_TK >= 0, dots_S.at[slots_TK].get(mode="clip"), 0)
    return dy_SD, None, None, d_weights_TK.astype(weights_TK.dtype)


_unpermute.defvjp(_unpermute_forward, _unpermute_backward)


def permute(
    x_TD: Float[Array, "T D"],
    tokens_S: Int[Array, " S"],
    slots_TK: Int[Array, "T K"],
    *,
    num_sms: int = 132,
) -> Float[Array, "S D"]:
    """Returns x_SD[s] = x_TD[tokens_S[s]], zeros where the token is -1; see the package.

    `num_sms` is the number of streaming multiprocessors to fill (`deviceless.GPUS`: 132 on Hopper).
    Raises ValueError where `refusal` says so, for indices that are not int32, and inside shard_map
    where indices vary over an axis that the rows do not vary over.
    """
    _check(x_TD, slots_TK, tokens_S)
    return _permute(num_sms, x_TD, tokens_S, slots_TK)


def unpermute(
    y_SD: Float[Array, "S D"],
    slots_TK: Int[Array, "T K"],
    tokens_S: Int[Array, " S"],
    weights_TK: Float[Array, "T K"] | None,
    *,
    num_sms: int = 132,
) -> Float[Array, "T D"]:
    """Returns y_TD[t] = sum_k weights_TK[t, k] * y_SD[slots_TK[t, k]], weights 1 if None.

    Summed in float32 in the order of k; a slot of -1 gives nothing. `num_sms` and errors as in
    `permute`. See the package.
    """
    _check(y_SD, slots_TK, tokens_S, *([] if weights_TK is None else [weights_TK]))
    return _unpermute(num_sms, y_SD, slots_TK, tokens_S, weights_TK)


def _check(rows, slots_TK, tokens_S, *weights):
    num_rows = max(rows.shape[0], tokens_S.size, slots_TK.size)
    K = slots_TK.shape[1]
    why = refusal(rows.dtype, rows.shape[1], num_rows=num_rows, num_experts_per_token=K)
    if why is not None:
        raise ValueError(why)
    if tokens_S.dtype != jnp.int32 or slots_TK.dtype != jnp.int32:
        raise ValueError(f"indices of {tokens_S.dtype} and {slots_TK.dtype}; int32 is served")
    axes = [jax.typeof(a).manual_axis_type.varying for a in (rows, tokens_S, slots_TK, *weights)]
    if missing := frozenset.union(*axes) - axes[0]:
        raise ValueError(
            f"indices or weights vary over mesh axes {sorted(missing)} and the rows do not; the "
            "result takes its type from the rows: make them varying first"
        )
