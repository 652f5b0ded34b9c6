"""Grouped MLP for Blackwell's tensor cores (sm_100a, sm_103a): the elementwise work between the two
grouped GEMMs happens while a tile is on the chip.

    forward    h[m] = x[m] @ [gate[g], up[g]]                                4 M D F FLOPs
               a[m] = silu(h_gate[m]) * h_up[m] * weight[m]                  in its epilogue
               y[m] = a[m] @ w_out[g]                                        2 M D F
    gradient   da[m] = dy[m] @ w_out[g]^T                                    2 M D F
               dh[m], a[m], dweight[m] from da[m], h[m] and weight[m]        in its epilogue
               dw_out[g] = sum of a[m]^T dy[m]                               2 M D F
               dx[m] = dh[m] @ [gate[g], up[g]]^T                            4 M D F
               dw_in[g] = sum of x[m]^T dh[m]                                4 M D F

The first product of each line of work has a kernel here; the others are `grouped_gemm`'s. Saved for
the backward are the arguments and h, 4 M F bytes; a is computed again from it. A kernel of its own
would read h and write a (6 M F bytes) between the products of the forward, and in the backward read
da and h, and write dh and a, after da was written (14 M F bytes): here it is 2 M F and 10 M F.

The loop is that of `grouped_gemm/blackwell_loop.py`, and rows are cut into tiles as there.
- Forward: a tile of `cols` columns of the sum is cols / 2 of gate and the same ones of up. To TMA,
  w_in is [G D, 2, F] and h is [M, 2, F]: one copy brings both parts, and each is clipped at F. The
  activation is computed in float32 from the rounded h, so that a is SwiGLU of what is saved.
- Gradient: warpgroup 2 asks for each piece of h, 32 columns, one piece ahead, and for the first one
  of a tile before it waits for the tensor core. It never writes da, which is used as float32 from
  tensor memory. Its sum over a tile's columns of da * silu(gate) * up becomes a row of
  [column tiles, rows of all tiles], float32, and XLA sums over column tiles in a fixed order.
- Rows of a tile that belong to others are computed and not stored. Rows past the groups' sum are
  never written in h, a and dh: the kernels that read them store nothing of them.

Shared memory by default: forward 4 slots of 48 KiB and 3 pieces of 8 KiB, 216 KiB; gradient 3
slots of 48 KiB, 32 KiB of h and 3 pieces of 8 KiB, 200 KiB. Both use up to 168 registers, all that
three warpgroups may have, and spill nothing: hence pieces in a loop, and what borders need read
anew for each. Tested in Mosaic's interpreter and put through the compiler, but not yet run on a
GPU: no time has been measured.
"""

from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.deviceless import GPUS, Gpu
from pallas_kernels.grouped_gemm import blackwell as gemm
from pallas_kernels.grouped_gemm.blackwell_loop import (
    ALIGN,
    LINE,
    Scratch,
    by_warpgroup,
    drain,
    feed,
    feed_rows,
    launch,
    multiply,
    padded,
    pieces,
    place,
    put_rows,
    row_tiles,
    scratch_types,
    tile_rows,
)
from pallas_kernels.grouped_gemm.tiles import Tiles, choose
from pallas_kernels.grouped_gemm.work import following
from pallas_kernels.swiglu.reference import activate, slopes
from pallas_kernels.varying import varying_as

OLDEST_JAX = gemm.OLDEST_JAX
_PIECE = 32  # columns of h that the gradient's epilogue holds at once, and asks for ahead
_RING_BYTES = 168 * 1024  # what the gradient's ring may fill


def refusal(x_MD, w_in_GDF2, w_out_GFD) -> str | None:
    """Returns why these kernels cannot serve the arguments (arrays or their types), or None."""
    return gemm.refusal(x_MD, w_in_GDF2) or gemm.refusal(x_MD, w_out_GFD)


def _across(value_M, width: int):
    return lax.broadcast_in_dim(value_M, (value_M.shape[0], width), (0,))


def _sends(pair, single, cols, gate, up, value):
    """What `put_rows` stores of a piece: two parts of [M, 2, F], and one of [M, F]."""
    return [
        (gate, lambda rows: pair.at[rows, 0, cols]),
        (up, lambda rows: pair.at[rows, 1, cols]),
        (value, lambda rows: single.at[rows, cols]),
    ]


def _weights_of(work, weights, where, tiles: Tiles):
    """What `drain` loads early: the routing weights of an item's rows."""

    def load(item):
        rows = pl.ds(work[where(item)[0], 1] * ALIGN, tiles.rows)
        return plgpu.load(weights.at[rows], optimized=False)  # not from shared memory

    return load


# Forward: x @ w_in, and the activation.


def _forward_kernel(work, counts, x, w_in, weights, h, a, *scratch, tiles: Tiles):
    s, half = Scratch(*scratch), tiles.cols // 2
    col_tiles, steps = pl.cdiv(a.shape[1], half), pl.cdiv(x.shape[1], tiles.depth)
    num_items = counts[0] * col_tiles
    where = partial(place, num_rows=counts[0], num_cols=col_tiles, band=tiles.snake)

    def w_tile(g, n, k):
        return w_in.at[pl.ds((g * steps + k) * tiles.depth, tiles.depth), :, pl.ds(n * half, half)]

    def operands(slot):
        return s.a.at[slot], s.b.at[slot].reshape(tiles.depth, tiles.cols)

    def write(item, read, weight):
        t, n = where(item)

        def piece(p, _):
            cols = pl.ds((n * (half // _PIECE) + p) * _PIECE, _PIECE)
            gate, up = (read(at + p * _PIECE, _PIECE).astype(h.dtype) for at in (0, half))
            value = activate(gate.astype(jnp.float32), up.astype(jnp.float32))
            value = (value * _across(weight, _PIECE)).astype(a.dtype)
            put_rows(s, _sends(h, a, cols, gate, up, value), tile_rows(work, t, tiles))

        lax.fori_loop(0, half // _PIECE, piece, None)

    def store():
        drain(num_items, tiles, s, write, _weights_of(work, weights, where, tiles))
        plgpu.wait_smem_to_gmem(0)

    by_warpgroup(
        lambda: feed(num_items, tiles, s, feed_rows(work, where, x, tiles, s, w_tile)),
        lambda: multiply(num_items, tiles, s, lambda _: steps, operands),
        store,
    )


def activations(x_MD, w_in_GDF2, weights_M, group_sizes_G, tiles: Tiles):
    """Returns (h [M, 2, F], a [M, F]) with M by 8s and F by 64s; nothing past the groups' sum.

    Raises ValueError for tiles that do not hold whole lines of both gate and up.
    """
    if tiles.cols % (2 * LINE):
        raise ValueError(f"cols must be 128 or 256, half for gate and half for up; got {tiles}")
    tiles = replace(tiles, pair=False)
    G, D, F = *w_in_GDF2.shape[:2], w_in_GDF2.shape[2] // 2
    x_MD = padded(x_MD, (ALIGN, LINE))
    w_in = padded(w_in_GDF2.reshape(G, D, 2, F), (1, LINE, 1, LINE))
    w_in = w_in.reshape(G * x_MD.shape[1], 2, -1)
    (M, _), F = x_MD.shape, w_in.shape[2]
    kernel = plgpu.kernel(
        partial(_forward_kernel, tiles=tiles),
        out_type=(
            jax.ShapeDtypeStruct((M, 2, F), x_MD.dtype),
            jax.ShapeDtypeStruct((M, F), x_MD.dtype),
        ),
        scratch_types=scratch_types(
            tiles,
            (tiles.rows, tiles.depth),
            (tiles.depth, 2, tiles.cols // 2),
            x_MD.dtype,
            (3, _PIECE),
        ),
        kernel_name="grouped_mlp_forward",
        num_threads=3,
        **launch(tiles),
    )
    work, counts = row_tiles(group_sizes_G, M, tiles.rows)
    results = kernel(work, counts, x_MD, w_in, _row_weights(weights_M, M, tiles))
    operands = x_MD, w_in, weights_M, group_sizes_G
    return tuple(varying_as(result, *operands) for result in results)


def _row_weights(weights_M, num_rows: int, tiles: Tiles):
    """In float32, and with a tile's rows of zeros, which the last tile may reach into."""
    return jnp.pad(weights_M.astype(jnp.float32), (0, num_rows - weights_M.shape[0] + tiles.rows))


# Gradient: dy @ w_out^T, and the activation's gradient.


def _gradient_kernel(
    work, counts, dy, w_out, weights, h, dh, a, sums, *scratch, tiles: Tiles, num_cols: int
):
    s, h_smem = Scratch(*scratch[:-1]), scratch[-1]
    col_tiles, steps = pl.cdiv(a.shape[1], tiles.cols), pl.cdiv(dy.shape[1], tiles.depth)
    num_items = counts[0] * col_tiles
    where = partial(place, num_rows=counts[0], num_cols=col_tiles, band=tiles.snake)

    def w_tile(g, n, k):
        ks, cols = pl.ds(k * tiles.depth, tiles.depth), pl.ds(n * tiles.cols, tiles.cols)
        return w_out.at[g, cols, ks]

    def operands(slot):
        return s.a.at[slot], s.b.at[slot].transpose((1, 0))

    per_item = tiles.cols // _PIECE  # an even number, so that slots of h take turns

    def fetch(item, p):
        """Asks for piece p of an item's h."""

        @pl.when(item < num_items)
        def _():
            (t, n), slot = where(item), lax.rem(p, jnp.int32(2))
            rows = pl.ds(work[t, 1] * ALIGN, tiles.rows)
            cols = pl.ds((n * per_item + p) * _PIECE, _PIECE)
            for part in range(2):
                source, target = h.at[rows, part, cols], h_smem.at[slot, part]
                plgpu.copy_gmem_to_smem(source, target, s.fetched.at[slot])

    def write(item, read, weight):
        t, n = where(item)

        def piece(p, total):
            last, slot, first = p == per_item - 1, lax.rem(p, jnp.int32(2)), n * per_item + p
            fetch(jnp.where(last, following(item, tiles.cores), item), jnp.where(last, 0, p + 1))
            plgpu.barrier_wait(s.fetched.at[slot])
            operands = read(p * _PIECE, _PIECE), h_smem[slot, 0], h_smem[slot, 1]
            results, dweight = _slopes(*operands, weight, num_cols - first * _PIECE)
            cols = pl.ds(first * _PIECE, _PIECE)
            put_rows(s, _sends(dh, a, cols, *results), tile_rows(work, t, tiles))
            return total + dweight

        total = jnp.zeros((tiles.rows,), jnp.float32)
        total = lax.fori_loop(0, per_item, piece, total)
        plgpu.store(sums.at[n, pl.ds(t * tiles.rows, tiles.rows)], total, optimized=False)

    def store():
        fetch(lax.axis_index("sm"), jnp.int32(0))
        drain(num_items, tiles, s, write, _weights_of(work, weights, where, tiles))
        plgpu.wait_smem_to_gmem(0)

    by_warpgroup(
        lambda: feed(num_items, tiles, s, feed_rows(work, where, dy, tiles, s, w_tile)),
        lambda: multiply(num_items, tiles, s, lambda _: steps, operands),
        store,
    )


def _slopes(da, gate, up, weight, cols_left):
    """((d_gate, d_up, a), the rows' sums of da times the unweighted activation). Columns from
    cols_left on are there for the tile's sake, and add nothing, whatever they hold."""
    by_gate, by_up, value = slopes(gate.astype(jnp.float32), up.astype(jnp.float32))
    inside = lax.broadcasted_iota(jnp.int32, da.shape, 1) < cols_left
    dweight = jnp.where(inside, da * value, 0.0).sum(axis=1)
    weight = _across(weight, da.shape[1])
    scaled = da * weight
    results = scaled * by_gate, scaled * by_up, value * weight
    return [result.astype(gate.dtype) for result in results], dweight


def slopes_of(dy_MD, w_out_GFD, weights_M, h_M2F, group_sizes_G, tiles: Tiles):
    """Returns (dh [M, 2, F], a [M, F], dweights [M]) for `activations`' h, in its shape."""
    num_cols, (M, _, F) = w_out_GFD.shape[1], h_M2F.shape
    dy_MD, w_out = padded(dy_MD, (ALIGN, LINE)), padded(w_out_GFD, (1, LINE, LINE))
    stage_bytes = (tiles.rows + tiles.cols) * tiles.depth * 2
    tiles = replace(tiles, stages=min(tiles.stages, _RING_BYTES // stage_bytes), pair=False)
    work, counts = row_tiles(group_sizes_G, M, tiles.rows)
    tile = (tiles.rows, tiles.depth), (tiles.cols, tiles.depth)
    scratch = scratch_types(tiles, *tile, dy_MD.dtype, (3, _PIECE))
    scratch = scratch._replace(fetched=plgpu.Barrier(num_arrivals=2, num_barriers=2))
    sums_shape = (pl.cdiv(F, tiles.cols), work.shape[0] * tiles.rows)
    kernel = plgpu.kernel(
        partial(_gradient_kernel, tiles=tiles, num_cols=num_cols),
        out_type=(
            jax.ShapeDtypeStruct(h_M2F.shape, dy_MD.dtype),
            jax.ShapeDtypeStruct((M, F), dy_MD.dtype),
            jax.ShapeDtypeStruct(sums_shape, jnp.float32),
        ),
        scratch_types=(*scratch, pieces((2, 2, tiles.rows, _PIECE), dy_MD.dtype)),
        kernel_name="grouped_mlp_gradient",
        num_threads=3,
        **launch(tiles),
    )
    row_weights = _row_weights(weights_M, M, tiles)
    results = kernel(work, counts, dy_MD, w_out, row_weights, h_M2F)
    operands = dy_MD, w_out, weights_M, group_sizes_G
    dh_M2F, a_MF, sums = (varying_as(result, *operands) for result in results)
    dweights_M = _of_rows(sums, work, counts, weights_M.shape[0], tiles.rows)
    return dh_M2F, a_MF, dweights_M.astype(weights_M.dtype)


def _of_rows(sums, work, counts, num_rows: int, rows: int):
    """Each row's sum over column tiles, found in its tile; 0 past the groups' sum."""
    m_M, t_T = jnp.arange(num_rows, dtype=jnp.int32), jnp.arange(work.shape[0])
    before_MT = (work[None, :, 3] <= m_M[:, None]) & (t_T < counts[0])[None]
    t_M = jnp.minimum(before_MT.sum(1, dtype=jnp.int32), work.shape[0] - 1)
    sum_M = sums[:, t_M * rows + m_M - work[t_M, 1] * ALIGN].sum(0)
    return jnp.where(m_M < counts[1], sum_M, 0.0)


def grouped_mlp(
    x_MD,
    w_in_GDF2,
    w_out_GFD,
    weights_M,
    group_sizes_G,
    gpu: Gpu = GPUS["b200"],
    tiles: Tiles | None = None,
):
    """See the package. For arguments that `refusal` has nothing against.

    `gpu` chooses tiles and cores; `tiles` replaces that choice.
    Raises ValueError for tiles that the kernels have no form for.
    """
    if 0 in (*x_MD.shape, *w_out_GFD.shape):
        return lax.full_like(x_MD, 0)
    return _grouped_mlp(x_MD, w_in_GDF2, w_out_GFD, weights_M, group_sizes_G, gpu, tiles)


@partial(jax.custom_vjp, nondiff_argnums=(5, 6))
def _grouped_mlp(x_MD, w_in_GDF2, w_out_GFD, weights_M, group_sizes_G, gpu, tiles):
    return _forward(x_MD, w_in_GDF2, w_out_GFD, weights_M, group_sizes_G, gpu, tiles)[0]


def _forward(x_MD, w_in_GDF2, w_out_GFD, weights_M, group_sizes_G, gpu, tiles):
    (M, D), F2 = x_MD.shape, w_in_GDF2.shape[2]
    own = tiles or choose("mlp_forward", gpu, M, F2)
    h_M2F, a_MF = activations(x_MD, w_in_GDF2, weights_M, group_sizes_G, own)
    own = tiles or choose("forward", gpu, M, D)
    y_MD = gemm.product(a_MF, w_out_GFD, group_sizes_G, False, own)[:M]
    return y_MD, (x_MD, w_in_GDF2, w_out_GFD, weights_M, group_sizes_G, h_M2F)


def _backward(gpu, tiles, saved, dy_MD):
    x_MD, w_in_GDF2, w_out_GFD, weights_M, group_sizes_G, h_M2F = saved
    (M, D), (G, F, _) = x_MD.shape, w_out_GFD.shape

    def own(op, rows, cols):
        return tiles or choose(op, gpu, rows, cols)

    dh_M2F, a_MF, dweights_M = slopes_of(
        dy_MD, w_out_GFD, weights_M, h_M2F, group_sizes_G, own("mlp_gradient", M, F)
    )
    dh_MF2 = dh_M2F.reshape(dh_M2F.shape[0], -1)
    w_in = padded(w_in_GDF2.reshape(G, D, 2, F), (1, 1, 1, LINE)).reshape(G, D, -1)
    weight = own("weight", F, D), own("weight", D, 2 * F)
    dw_out = gemm.weight_gradient(a_MF, dy_MD, group_sizes_G, tiles=weight[0])[:, :F]
    dx_MD = gemm.product(dh_MF2, w_in, group_sizes_G, True, own("input", M, D))[:M]
    dw_in = gemm.weight_gradient(x_MD, dh_MF2, group_sizes_G, tiles=weight[1])
    dw_in = dw_in.reshape(G, D, 2, -1)[..., :F].reshape(G, D, 2 * F)
    return dx_MD, dw_in, dw_out, dweights_M, None


_grouped_mlp.defvjp(_forward, _backward)
