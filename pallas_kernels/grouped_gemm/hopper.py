"""Grouped GEMM for Hopper GPUs (sm_90a): TMA copies, asynchronous tensor-core products (wgmma).

    forward   y[m]   = x[m] @ w[g]          for rows m of group g
    input     dx[m]  = dy[m] @ w[g]^T       w is read as it lies; wgmma transposes its operand
    weight    dw[g]  = sum over rows m of g   x[m]^T dy[m]

bfloat16 in, float32 sums. 2*M*K*N FLOPs each. Group sizes are read on the device: a few fused XLA
operations turn them into a list of tiles, and the kernels walk that list.

Grid: one block for each streaming multiprocessor, which takes a tile of each round (`work.mine`).
Its third warpgroup loads tiles of both operands into a ring of `stages` buffers and runs ahead into
the next tile; the first two multiply, each the upper or lower half of the tile's rows, and store.
grouped_mlp/hopper.py builds on what has no underscore here.

Products by rows (forward, input): tiles start at their group's first row, so that none spans two
groups. The last one of a group may load rows of the next; what it computes from them stays in rows
that are not stored. TMA boxes have fixed shapes, so a border of n rows leaves as boxes of 64, 32,
.. 1 rows, one for each bit of n. Rows past the sum make tiles of zeros, of which x is never read.
Least traffic: x and y once, w once for each band of `snake` row tiles.

Weight gradient: one block of depth rows at a time, from the group's first row. The last block may
hold rows of the next group, so both operands are cleared there by select, in shared memory (a NaN
times a zero is a NaN); it is taken first, out of the loop. Groups come longest first, so that a
skewed load ends evenly; one group that outweighs a core's fair share still needs its rows split.

One rule of the assembler (ptxas 13) shaped the code: integer division by a value known only on the
device becomes a call, and one call anywhere makes it wait after every wgmma. Hence loops and a tile
order of our own in place of `plgpu.nd_loop` and `plgpu.planar_snake`, which divide by their sizes.

Not yet run or timed on a GPU. Assembled for an H100 at M=8192: no spills, no local memory; these
registers a thread (168 fit) and bytes of shared memory (232,448 fit), barriers aside:

    K=2048, N=1536, G=16    products 154, 229,376    weight 168, 212,992 (float32 229,376)
    K=2880, N=5760, G=8     products 122, 196,608    weight 151, 180,224 (float32 196,608)

ptxas reports that it ignores `setmaxnreg` in the way Mosaic calls it; nothing here depends on it.
"""

from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.deviceless import GPUS, Gpu
from pallas_kernels.grouped_gemm.tiles import Tiles, choose
from pallas_kernels.grouped_gemm.work import by_size, mine, row_tiles

H100 = GPUS["h100"]
OLDEST_JAX = (0, 11, 2)
CHUNK = 32  # columns of the output that a warpgroup stores at once
_MEMORY_WG = 2  # the warpgroup that issues loads; 0 and 1 compute
_MEMORY_REGISTERS, _COMPUTE_REGISTERS = 40, 232  # a thread; 2 * 232 + 40 <= 65536 / 128


class Ring(NamedTuple):
    """The barriers of the stages in shared memory."""

    stages: int
    full: Any
    empty: Any


class Place(NamedTuple):
    """One output tile of a product by rows, as its device sees it."""

    group: Any
    row: Any  # its first row
    end: Any  # the end of its group, beyond the tile's own or not
    tile: Any  # its number among the row tiles
    col: Any  # and among the column tiles


def swizzled(shape, dtype):
    """A shared-memory buffer in the layout that wgmma reads and TMA writes without conflicts."""
    swizzle = plgpu.find_swizzle(shape[-1] * jnp.dtype(dtype).itemsize * 8)
    tiling = plgpu.TilingTransform((8, swizzle // jnp.dtype(dtype).itemsize))
    return plgpu.SMEM(shape, dtype, transforms=(tiling, plgpu.SwizzleTransform(swizzle)))


def _for_mine(visit, count, cores, done):
    """done = visit(index, done) for every index below count that is this core's."""
    turns, index = mine(count, lax.axis_index("core"), cores)
    return lax.fori_loop(0, turns, lambda turn, done: visit(index(turn), done), done)


def _snake(index, num_rows, num_cols, width):
    """(row, column) of the index-th tile: bands of `width` rows, walked column by column, every
    other band backwards, so that tiles in flight share rows of x and columns of w.

    3 rows, 4 columns, width 2:   0 2 4 6
                                  1 3 5 7
                                  11 10 9 8
    """
    band = lax.div(index, width * num_cols)
    within, left = index - band * (width * num_cols), num_rows - band * width
    col = lax.div(within, width)
    for rows in range(1, width):  # the last band has fewer rows; division by each one is static
        col = jnp.where(left == rows, lax.div(within, rows), col)
    row = band * width + within - col * jnp.minimum(left, width)
    return row, jnp.where(lax.rem(band, 2) == 0, col, num_cols - 1 - col)


def accumulate(steps, done, ring, multiply, prepare=lambda _: None, each=1):
    """Multiplies `steps` >= 1 stages: multiply(slot) issues the `each` products of one stage, after
    prepare(slot) for the first.

    A stage is handed back one step late, so that its products run while the next are issued. The
    first step stands apart: it alone has nothing to hand back, and may have rows to clear.
    """
    first = lax.rem(done, ring.stages)
    plgpu.barrier_wait(ring.full.at[first])
    prepare(first)
    multiply(first)

    def step(i, last):
        slot = lax.rem(done + i, ring.stages)
        plgpu.barrier_wait(ring.full.at[slot])
        multiply(slot)
        plgpu.wgmma_wait(each)
        plgpu.barrier_arrive(ring.empty.at[last])
        return slot

    last = lax.fori_loop(1, steps, step, first)
    plgpu.wgmma_wait(0)
    plgpu.barrier_arrive(ring.empty.at[last])


def _load(steps, done, ring, copies):
    """Fills `steps` stages: copies(step, slot) lists (source, destination)."""

    def step(i, _):
        slot = lax.rem(done + i, ring.stages)

        @pl.when(done + i >= ring.stages)
        def _():
            plgpu.barrier_wait(ring.empty.at[slot])

        for source, destination in copies(i, slot):
            plgpu.copy_gmem_to_smem(source, destination, ring.full.at[slot])

    lax.fori_loop(0, steps, step, None)


def _drain(done, ring):
    """Waits until the last stages are handed back: all that is completed has been waited for, which
    the interpreter of JAX 0.11 insists on."""

    def step(i, _):
        plgpu.barrier_wait(ring.empty.at[lax.rem(i, ring.stages)])

    lax.fori_loop(jnp.maximum(done - ring.stages, 0), done, step, None)


def store(ref, value):
    """Stores in any layout, bank conflicts or not. JAX 0.11 has no `store`, nor objects to them."""
    if hasattr(plgpu, "store"):
        plgpu.store(ref, value, optimized=False)
    else:
        ref[...] = value


def _store_full(chunk, y_gmem, smem, row, cols):
    smem[...] = chunk
    plgpu.commit_smem()
    rows = pl.ds(row, chunk.shape[0])
    plgpu.copy_smem_to_gmem(smem, y_gmem.at[rows, cols], commit_group=False)


def _store_border(chunk, y_gmem, smem, row, rows, cols):
    """Stores the first `rows` rows, fewer than there are: 11 = 8 + 2 + 1 leave as three boxes.

    A box of n rows starts at a multiple of 2 n rows of 64 bytes, so at the 128 bytes TMA asks for.
    """
    store(smem, chunk)  # row-major, for a box may start at any row
    plgpu.commit_smem()

    def box(at, size):
        source, target = smem.at[pl.ds(at, size)], y_gmem.at[pl.ds(row + at, size), cols]
        plgpu.copy_smem_to_gmem(source, target, commit_group=False)

    size = chunk.shape[0] // 2
    while size:
        rest = lax.rem(rows, 2 * size)
        pl.when(rest >= size)(partial(box, rows - rest, size))
        size //= 2


def chunks(value, y_gmem, col):
    """Cuts value, which belongs at column `col`, into what `store_rows` takes."""
    for c in range(0, value.shape[1], CHUNK):
        yield value[:, c : c + CHUNK].astype(y_gmem.dtype), y_gmem, pl.ds(col + c, CHUNK)


def store_rows(pieces, out_smem, border_smem, row, rows):
    """Stores the first `rows` rows of each (chunk, array, columns) at `row`; the other rows belong
    to other tiles."""
    for n, (chunk, y_gmem, cols) in enumerate(pieces):
        slot, most = n % 2, chunk.shape[0]
        plgpu.wait_smem_to_gmem(1, wait_read_only=True)  # the slot's last chunk has left
        full = partial(_store_full, chunk, y_gmem, out_smem.at[slot], row, cols)
        border = partial(_store_border, chunk, y_gmem, border_smem.at[slot], row, rows, cols)
        pl.when(rows >= most)(full)
        pl.when((rows > 0) & (rows < most))(border)
        plgpu.commit_smem_to_gmem_group()


def _zeros(tiles):
    """A warpgroup's half of an output tile that nothing adds to."""
    zeros = jnp.zeros((tiles.rows // 2, tiles.cols), jnp.float32)
    return plgpu.layout_cast(zeros, plgpu.Layout.WGMMA)


def _roles(load, compute):
    """Runs load on the memory warpgroup, and compute on the others, with registers to match."""

    @pl.when(lax.axis_index("wg") == _MEMORY_WG)
    def _():
        plgpu.set_max_registers(_MEMORY_REGISTERS, action="decrease")
        load()

    @pl.when(lax.axis_index("wg") != _MEMORY_WG)
    def _():
        plgpu.set_max_registers(_COMPUTE_REGISTERS, action="increase")
        compute()
        plgpu.wait_smem_to_gmem(0)


def by_rows(counts_gmem, tiles_gmem, num_cols, tiles, ring, phases, compute, clear=None):
    """Walks the tiles of a product by rows: one warpgroup loads, the others compute(place, done),
    and clear(place, done) the tiles of rows past the sum.

    Each tile takes the stages of all phases, (steps, copies): copies(place, step, slot) lists the
    (source, destination) of one. `done` counts stages of this core before the tile's first.
    """
    steps = sum(steps for steps, _ in phases)

    def for_tiles(visit, first, count):
        def one(index, done):
            tile, col = _snake(index, count, num_cols, tiles.snake)
            group, row, end = (tiles_gmem[i, first + tile] for i in range(3))
            visit(Place(group, row, end, first + tile, col), done)
            return done + steps

        # A zero that the compiler does not see through: from a constant it would know the slots of
        # every tile, and keep their addresses in registers that it does not have.
        zero = jnp.minimum(counts_gmem[0], 0)
        return _for_mine(one, count * num_cols, tiles.cores, zero)

    def load(place, done):
        for steps, copies in phases:
            _load(steps, done, ring, partial(copies, place))
            done += steps

    def compute_all():
        for_tiles(compute, 0, counts_gmem[0])
        if clear is not None:
            for_tiles(clear, counts_gmem[0], counts_gmem[1])

    _roles(lambda: _drain(for_tiles(load, 0, counts_gmem[0]), ring), compute_all)


def _product_kernel(*refs, tiles, transposed):
    counts_gmem, tiles_gmem, x_gmem, w_gmem, y_gmem, *scratch = refs
    x_smem, w_smem, out_smem, border_smem, full, empty = scratch
    wg, wg_rows, ring = lax.axis_index("wg"), tiles.rows // 2, Ring(tiles.stages, full, empty)
    steps = pl.cdiv(x_gmem.shape[1], tiles.depth)

    def copies(place, step, slot):
        group, deep = place.group, pl.ds(step * tiles.depth, tiles.depth)
        rows, cols = pl.ds(place.row, tiles.rows), pl.ds(place.col * tiles.cols, tiles.cols)
        w = w_gmem.at[group, cols, deep] if transposed else w_gmem.at[group, deep, cols]
        x = x_gmem.at[rows, deep]
        return (x, x_smem.at[slot]), (w, w_smem.at[slot])

    def store(y, place):
        row, pieces = place.row + wg * wg_rows, chunks(y, y_gmem, place.col * tiles.cols)
        store_rows(pieces, out_smem.at[wg], border_smem.at[wg], row, place.end - row)

    def compute(place, done):
        def scope(acc):
            def multiply(slot):
                x = x_smem.at[slot, pl.ds(wg * wg_rows, wg_rows)]
                w = w_smem.at[slot]
                plgpu.wgmma(acc, x, w.transpose((1, 0)) if transposed else w)

            accumulate(steps, done, ring, multiply)
            return acc[...]

        store(pl.run_scoped(scope, plgpu.ACC((wg_rows, tiles.cols))), place)

    def clear(place, _):
        store(_zeros(tiles), place)

    num_cols = pl.cdiv(y_gmem.shape[1], tiles.cols)
    by_rows(counts_gmem, tiles_gmem, num_cols, tiles, ring, [(steps, copies)], compute, clear)


def like(x, shape, dtype):
    """An output's type; inside a shard_map it varies over the axes that x varies over."""
    return jax.ShapeDtypeStruct(shape, dtype, manual_axis_type=jax.typeof(x).manual_axis_type)


def launch(name, kernel, out_type, tiles, scratch):
    """One block for each core: two warpgroups that compute and one that loads.

    `plgpu.kernel` would do the same, and lose the axes that the output varies over.
    """

    def body(*refs):
        pl.run_scoped(partial(kernel, *refs), *scratch, collective_axes="wg")

    mesh = plgpu.Mesh(grid=(tiles.cores,), grid_names=("core",), num_threads=3, thread_name="wg")
    params = plgpu.CompilerParams(lowering_semantics=plgpu.LoweringSemantics.Lane)
    launched: Any = pl.kernel(body, out_type, mesh=mesh, compiler_params=params, name=name)
    return launched


def ring_of(stages, copies=2):
    """Barriers of the ring: a stage is full after its copies, empty after two warpgroups."""
    return [plgpu.Barrier(num_arrivals=n, num_barriers=stages) for n in (copies, 2)]


def outbox(tiles, dtype):
    """Where chunks wait for their copies: of whole tiles, and row-major of borders."""
    shape = (2, 2, tiles.rows // 2, CHUNK)  # warpgroup, slot
    return [swizzled(shape, dtype), plgpu.SMEM(shape, dtype)]


def product(x_MK, w_GKN, group_sizes_G, tiles: Tiles, transposed: bool):
    """Returns y[m] = x[m] @ w[g], or x[m] @ w[g]^T where transposed; zeros past the sum."""
    M = x_MK.shape[0]
    cols = w_GKN.shape[1] if transposed else w_GKN.shape[2]
    w_tile = (tiles.cols, tiles.depth) if transposed else (tiles.depth, tiles.cols)
    scratch = [
        swizzled((tiles.stages, tiles.rows, tiles.depth), x_MK.dtype),
        swizzled((tiles.stages, *w_tile), x_MK.dtype),
        *outbox(tiles, x_MK.dtype),
        *ring_of(tiles.stages),
    ]
    kernel = partial(_product_kernel, tiles=tiles, transposed=transposed)
    name = "grouped_gemm_input_gradient" if transposed else "grouped_gemm_forward"
    run = launch(name, kernel, like(x_MK, (M, cols), x_MK.dtype), tiles, scratch)
    return run(*row_tiles(group_sizes_G, M, tiles.rows), x_MK, w_GKN)


def _clear_rows(smem, rows, col):
    """Zeroes rows `rows` and up of 64 columns of smem from column `col`, whatever they hold."""
    part = smem.at[:, pl.ds(col, 64)]
    row = plgpu.broadcasted_iota(jnp.int32, part.shape, 0, layout=plgpu.Layout.WGMMA)
    value = plgpu.load(part, layout=plgpu.Layout.WGMMA)
    part[...] = jnp.where(row < rows, value, jnp.zeros_like(value))


def _store_whole(value, dw_gmem, out_smem, group, row, col, add):
    """Stores value at (row, col) of a group, or adds it there; TMA drops what is out of bounds."""
    most = value.shape[0]
    for c in range(value.shape[1] // CHUNK):
        plgpu.wait_smem_to_gmem(1, wait_read_only=True)
        out_smem[c % 2] = value[:, c * CHUNK : (c + 1) * CHUNK].astype(dw_gmem.dtype)
        plgpu.commit_smem()
        plgpu.copy_smem_to_gmem(
            out_smem.at[c % 2],
            dw_gmem.at[group, pl.ds(row, most), pl.ds(col + c * CHUNK, CHUNK)],
            reduction_op="add" if add else None,
        )


def _clear_border(x_smem, dy_smem, masked, rows, wg):
    """Zeroes rows `rows` and up of one stage: of x the part that this warpgroup multiplies, and of
    dy, which both read, every other 64 columns. Then the two meet."""
    half = x_smem.shape[1] // 2
    for col in range(0, half, 64):
        _clear_rows(x_smem, rows, wg * half + col)
    for c in range(dy_smem.shape[1] // 64):
        pl.when(wg == c % 2)(partial(_clear_rows, dy_smem, rows, c * 64))
    plgpu.commit_smem()
    plgpu.barrier_arrive(masked)
    plgpu.barrier_wait(masked)


def _weight_kernel(*refs, tiles, add):
    live_gmem, groups_gmem, x_gmem, dy_gmem, dw_gmem, *scratch = refs
    x_smem, dy_smem, out_smem, masked, full, empty = scratch
    wg, wg_rows, ring = lax.axis_index("wg"), tiles.rows // 2, Ring(tiles.stages, full, empty)
    G, K, N = dw_gmem.shape
    num_rows, num_cols = pl.cdiv(K, tiles.rows), pl.cdiv(N, tiles.cols)
    tiles_each = num_rows * num_cols

    def for_tiles(visit, first, count):
        def one(index, done):
            nth = lax.div(index, tiles_each)
            row, col = _snake(index - nth * tiles_each, num_rows, num_cols, tiles.snake)
            start, end = groups_gmem[1, first + nth], groups_gmem[2, first + nth]
            steps = lax.div(end - start + tiles.depth - 1, tiles.depth)
            visit(first + nth, row * tiles.rows, col * tiles.cols, start, end, steps, done)
            return done + steps

        return _for_mine(one, count * tiles_each, tiles.cores, jnp.int32(0))

    def load(_, row, col, start, end, steps, done):
        def copies(step, slot):
            block = jnp.where(step == 0, steps - 1, step - 1)  # the border comes first
            deep = pl.ds(start + block * tiles.depth, tiles.depth)
            x = x_gmem.at[deep, pl.ds(row, tiles.rows)]
            dy = dy_gmem.at[deep, pl.ds(col, tiles.cols)]
            return (x, x_smem.at[slot]), (dy, dy_smem.at[slot])

        _load(steps, done, ring, copies)

    def store(dw, nth, row, col):
        group = groups_gmem[0, nth]
        _store_whole(dw, dw_gmem, out_smem.at[wg], group, row + wg * wg_rows, col, add)

    def compute(nth, row, col, start, end, steps, done):
        border = end - start - (steps - 1) * tiles.depth

        def prepare(slot):
            clear = partial(_clear_border, x_smem.at[slot], dy_smem.at[slot], masked, border, wg)
            pl.when(border < tiles.depth)(clear)

        def scope(acc):
            def multiply(slot):
                x = x_smem.at[slot, :, pl.ds(wg * wg_rows, wg_rows)]
                plgpu.wgmma(acc, x.transpose((1, 0)), dy_smem.at[slot])

            accumulate(steps, done, ring, multiply, prepare)
            return acc[...]

        store(pl.run_scoped(scope, plgpu.ACC((wg_rows, tiles.cols))), nth, row, col)

    def clear(nth, row, col, *_):
        store(_zeros(tiles), nth, row, col)

    def compute_all():
        for_tiles(compute, 0, live_gmem[0])
        if not add:  # an empty group adds nothing
            for_tiles(clear, live_gmem[0], G - live_gmem[0])

    _roles(lambda: _drain(for_tiles(load, 0, live_gmem[0]), ring), compute_all)


def weight_gradient(x_MK, dy_MN, group_sizes_G, tiles: Tiles, dtype=None, into=None):
    """Returns dw[g] = x[rows of g]^T dy[rows of g], [G, K, N], exactly 0 where a group is empty.

    In `dtype`, bfloat16 (the default) or float32. With a float32 `into` [G, K, N] it returns into +
    dw, added by the copies out of shared memory, in the same buffer where the caller donates it.
    Every element is added once, so the result is the same in every run. Inside a shard_map `into`
    needs check_vma=False: JAX 0.12 hands no varying Ref to a kernel, and raises ValueError.
    """
    (M, K), N, G = x_MK.shape, dy_MN.shape[1], group_sizes_G.shape[0]
    dtype = into.dtype if into is not None else dtype or x_MK.dtype
    kernel = partial(_weight_kernel, tiles=tiles, add=into is not None)
    scratch = [
        swizzled((tiles.stages, tiles.depth, tiles.rows), x_MK.dtype),
        swizzled((tiles.stages, tiles.depth, tiles.cols), x_MK.dtype),
        swizzled((2, 2, tiles.rows // 2, CHUNK), dtype),  # warpgroup, slot
        plgpu.Barrier(num_arrivals=2),
        *ring_of(tiles.stages),
    ]
    args, out_type = (*by_size(group_sizes_G, M), x_MK, dy_MN), like(x_MK, (G, K, N), dtype)
    run = partial(launch, "grouped_gemm_weight_gradient", kernel)
    if into is None:
        return run(out_type, tiles, scratch)(*args)
    dw_ref = jax.new_ref(into)
    run((), tiles, scratch)(*args, dw_ref)
    return jax.freeze(dw_ref)


def refusal(x_MK, w_GKN) -> str | None:
    """Returns why these kernels cannot serve, on any Hopper GPU; None if they can."""
    (M, K), (G, _, N) = x_MK.shape, w_GKN.shape
    if x_MK.dtype != jnp.bfloat16 or w_GKN.dtype != jnp.bfloat16:
        return f"it takes bfloat16, not {x_MK.dtype} and {w_GKN.dtype}"
    if K % 8 or N % 8:
        return f"its copies need K and N in multiples of 8 (16 bytes); got {K}, {N}"
    if not (M and K and N and G):
        return f"it has nothing to copy: M={M}, K={K}, N={N}, G={G}"
    return None


@partial(jax.custom_vjp, nondiff_argnums=(3, 4))
def grouped_gemm(x_MK, w_GKN, group_sizes_G, gpu: Gpu = H100, tiles: Tiles | None = None):
    """See the package; called only where `refusal` is None. Sizes beyond M are clipped.

    `gpu` chooses tiles and cores; `tiles` replaces that choice.
    """
    own = tiles or choose("forward", gpu, x_MK.shape[0], w_GKN.shape[2], x_MK.shape[1])
    return product(x_MK, w_GKN, group_sizes_G, own, transposed=False)


def _forward(x_MK, w_GKN, group_sizes_G, gpu, tiles):
    return grouped_gemm(x_MK, w_GKN, group_sizes_G, gpu, tiles), (x_MK, w_GKN, group_sizes_G)


def _backward(gpu, tiles, residuals, dy_MN):
    x_MK, w_GKN, group_sizes_G = residuals
    (M, K), N = x_MK.shape, w_GKN.shape[2]
    own = tiles or choose("input", gpu, M, K, N)
    dx_MK = product(dy_MN, w_GKN, group_sizes_G, own, transposed=True)
    own = tiles or choose("weight", gpu, K, N, M // w_GKN.shape[0])
    dw_GKN = weight_gradient(x_MK, dy_MN, group_sizes_G, own)
    return dx_MK, dw_GKN, None


grouped_gemm.defvjp(_forward, _backward)
