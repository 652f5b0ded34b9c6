"""Fused attention for Hopper GPUs (sm_90a), forward: TMA copies, asynchronous products (wgmma).

    s = q k^T,  p = exp2(c s - peak),  out = p v / sum p,  lse = ln2 * peak + ln sum p
    c = scale * log2 e; the peak is that of the keys so far (Milakov and Gimelshein, 2018)

Query i sees keys first_i <= j <= i (`visible.py`: documents, window and causality in one array).

Grid: (row of the batch, key head, block of 128 queries, query head of the group), the last fastest:
who reads the same keys runs at the same time, so that the L2 serves all but one (at 192 and 128
columns the keys of one block alone ask for twice the memory's rate); the last blocks of queries,
which see the most keys, come first.

A block is two warpgroups of 64 queries each, which multiply against the same keys, one's products
under the other's arithmetic; the first also asks for loads. Blocks of 128 keys come by TMA into two
rings of stages, of k and of v. Which ones is read on the device: none before the first key that any
query of the block sees, none after the last. Blocks that all queries see whole take no mask.

q waits in shared memory; s is an accumulator, and p goes from registers into the second product.
out leaves in chunks of 64 columns through shared memory; rows past L are dropped by TMA.

FLOPs: 2*(H + V) for each query, key of a visited block, and head. One document of n blocks: the
share (n + 1) / 2n of all keys, 0.516 at 4096 tokens, where 0.5 is seen; eight documents of 512
tokens: 0.078, where 0.063 is seen. Bytes: q, out and lse once, k and v once for each block that
visits them, which the L2 mostly serves.

hopper_backward.py is the other pass, and builds on what has no underscore here.

Not yet run or timed on a GPU. Assembled for an H100, no spills, no local memory; registers a thread
(255 fit) and bytes of shared memory (232,448 fit), barriers aside:

    H, V           64, 64    195, 100,352
                  128, 128   231, 182,272
                  192, 128   239, 231,424
"""

import math
from functools import partial
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.attention.reference import NOTHING
from pallas_kernels.attention.visible import key_blocks
from pallas_kernels.grouped_gemm.hopper import like, store, swizzled

OLDEST_JAX = (0, 12)
WARPGROUPS, TILE = 2, 64  # rows of an accumulator that one warpgroup holds
ROWS = WARPGROUPS * TILE
LOG2E = math.log2(math.e)
WGMMA = plgpu.Layout.WGMMA
BY_ROW, BY_COL = WGMMA.reduce(1), WGMMA.reduce(0)  # a value for each row, column of an accumulator


class Ring(NamedTuple):
    """The stages that blocks arrive in: stage n % stages holds the n-th, of `count`.

    In step n the first warpgroup asks for block n + stages - 1, which takes the stage of step n-1,
    and so waits for the other one to be through with that. It asks where that may be half a step
    behind, its products under this one's arithmetic.
    """

    stages: int
    count: Any
    full: Any
    empty: Any

    def slot(self, n):
        return lax.rem(n, self.stages)

    def load(self, n, copies):
        """Asks for the n-th block, on the first warpgroup: copies(n, slot) lists (source, target)
        of each copy."""

        @pl.when((lax.axis_index("wg") == 0) & (n < self.count))
        def _():
            slot = self.slot(n)

            @pl.when(n >= self.stages)
            def _():
                plgpu.barrier_wait(self.empty.at[slot])

            for source, target in copies(n, slot):
                plgpu.copy_gmem_to_smem(source, target, self.full.at[slot])

    def prefetch(self, copies):
        """Asks for the first blocks: all stages but one, which step 0 fills."""
        for n in range(self.stages - 1):
            self.load(jnp.int32(n), copies)

    def ahead(self, n):
        """The block to ask for in step n."""
        return n + self.stages - 1


def ring_types(stages: int, copies: int):
    """Barriers of a ring: a stage is full after its copies, empty after two warpgroups."""
    return [plgpu.Barrier(num_arrivals=n, num_barriers=stages) for n in (copies, WARPGROUPS)]


def spread(value, shape, dim: int):
    """One value for each row (dim 0) or column (1), repeated over an accumulator's shape."""
    return plgpu.layout_cast(lax.broadcast_in_dim(value, shape, (dim,)), WGMMA)


def number(start, shape, dim: int):
    """start + 0, 1, .. along a dim of an accumulator."""
    return plgpu.broadcasted_iota(jnp.int32, shape, dim, layout=WGMMA) + start


def filled(value, shape, layout):
    return plgpu.layout_cast(jnp.full(shape, value, jnp.float32), layout)


def product(a, b):
    """a @ b, awaited; a, of a warpgroup's rows, may be in registers. The interpreter cannot give an
    accumulator a value to start from."""

    def scope(acc):
        plgpu.wgmma(acc, a, b)
        return acc[...]

    return pl.run_scoped(scope, plgpu.ACC((TILE, b.shape[1])))


def store_tile(value, gmem, smem):
    """Stores a warpgroup's rows, 64 columns at a time through its part of shared memory."""
    width = smem.shape[-1]
    for col in range(0, value.shape[1], width):
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)
        smem[...] = value[:, col : col + width].astype(smem.dtype)
        plgpu.commit_smem()
        plgpu.copy_smem_to_gmem(smem, gmem.at[:, pl.ds(col, width)])


def seen_scores(s, first, row, key):
    """s, of the queries from `row` on and the keys from `key` on; -inf where one is not seen."""
    at = number(key, s.shape, 1)
    seen = (at >= spread(first, s.shape, 0)) & (at <= number(row, s.shape, 0))
    return jnp.where(seen, s, filled(-jnp.inf, s.shape, WGMMA))


def launch(name, kernel, out_type, grid, scratch):
    """Blocks of two warpgroups over a grid (B, G, blocks of a row, heads of a group)."""

    def body(*refs):
        pl.run_scoped(partial(kernel, *refs), *scratch, collective_axes="wg")

    mesh = plgpu.Mesh(
        grid=grid,
        grid_names=("row", "group", "block", "member"),
        num_threads=WARPGROUPS,
        thread_name="wg",
    )
    params = plgpu.CompilerParams(
        lowering_semantics=plgpu.LoweringSemantics.Lane, approx_math=True
    )
    launched: Any = pl.kernel(body, out_type, mesh=mesh, compiler_params=params, name=name)
    return launched


def _forward_kernel(*refs, scale, keys, stages, group):
    blocks_gmem, first_gmem, q_gmem, k_gmem, v_gmem, out_gmem, lse_gmem, *scratch = refs
    q_smem, k_smem, v_smem, out_smem, q_full, *barriers = scratch
    batch, own_head, wg = (lax.axis_index(name) for name in ("row", "group", "wg"))
    head = own_head * group + lax.axis_index("member")
    block = blocks_gmem.shape[2] - 1 - lax.axis_index("block")
    begin, whole, whole_end, end = (blocks_gmem[i, batch, block] for i in range(4))
    of_k, of_v = (Ring(stages, end - begin, *barriers[i : i + 2]) for i in (0, 2))
    V = v_gmem.shape[3]
    row = block * ROWS + wg * TILE
    own = pl.ds(row, TILE)

    def copies(gmem, smem, n, slot):
        yield gmem.at[batch, pl.ds((begin + n) * keys, keys), own_head], smem.at[slot]

    k_copies, v_copies = (
        partial(copies, *refs) for refs in ((k_gmem, k_smem), (v_gmem, v_smem))
    )

    plgpu.copy_gmem_to_smem(q_gmem.at[batch, own, head], q_smem.at[wg], q_full.at[wg])
    of_k.prefetch(k_copies)
    of_v.prefetch(v_copies)
    first = plgpu.load(first_gmem.at[batch, own], layout=BY_ROW, optimized=False)
    plgpu.barrier_wait(q_full.at[wg])

    def step(n, carry):
        out, peak, total = carry
        slot, at = of_k.slot(n), begin + n
        of_k.load(of_k.ahead(n), k_copies)  # half a step after the last product with that stage
        plgpu.barrier_wait(of_k.full.at[slot])
        s = product(q_smem.at[wg], k_smem.at[slot].transpose((1, 0)))
        plgpu.barrier_arrive(of_k.empty.at[slot])
        partly = (at < whole) | (at >= whole_end)
        s = lax.cond(partly, lambda s: seen_scores(s, first, row, at * keys), lambda s: s, s)
        new = jnp.maximum(peak, s.max(axis=1) * (scale * LOG2E))
        p = jnp.exp2(s * (scale * LOG2E) - spread(new, s.shape, 0))
        rest = jnp.exp2(peak - new)
        total = total * rest + p.sum(axis=1)
        of_v.load(of_v.ahead(n), v_copies)
        plgpu.barrier_wait(of_v.full.at[slot])
        added = product(p.astype(v_smem.dtype), v_smem.at[slot])
        out = out * spread(rest, out.shape, 0) + added
        plgpu.barrier_arrive(of_v.empty.at[slot])
        return out, new, total

    start = (
        filled(0, (TILE, V), WGMMA),
        filled(NOTHING, (TILE,), BY_ROW),
        filled(0, (TILE,), BY_ROW),
    )
    out, peak, total = lax.fori_loop(0, of_k.count, step, start)
    empty_row = total == 0
    total = jnp.where(empty_row, jnp.ones_like(total), total)
    store_tile(out / spread(total, out.shape, 0), out_gmem.at[batch, own, head], out_smem.at[wg])
    lse = jnp.where(empty_row, filled(NOTHING, (TILE,), BY_ROW), peak / LOG2E + jnp.log(total))
    store(lse_gmem.at[batch, head, own], lse)
    plgpu.wait_smem_to_gmem(0)


def by_blocks(x_BL, value):
    """Padded with `value` to whole blocks of queries."""
    return jnp.pad(x_BL, ((0, 0),) * (x_BL.ndim - 1) + ((0, -x_BL.shape[-1] % ROWS),),
                   constant_values=value)  # fmt: skip


def forward(q_BLNH, k_BSGH, v_BSGV, first_BL, scale):
    """See `fused.Kernels`."""
    (B, L, N, H), (G, V), dtype = q_BLNH.shape, v_BSGV.shape[2:], q_BLNH.dtype
    keys, stages = 128, 2
    first = by_blocks(first_BL, L + ROWS)
    scratch = [
        swizzled((WARPGROUPS, TILE, H), dtype),
        swizzled((stages, keys, H), dtype),
        swizzled((stages, keys, V), dtype),
        swizzled((WARPGROUPS, TILE, 64), dtype),
        plgpu.Barrier(num_barriers=WARPGROUPS),
        *ring_types(stages, 1),
        *ring_types(stages, 1),
    ]
    kernel = partial(_forward_kernel, scale=scale, keys=keys, stages=stages, group=N // G)
    lse_type = like(q_BLNH, (B, N, first.shape[1]), jnp.float32)
    out_type = like(q_BLNH, (B, L, N, V), dtype), lse_type
    grid = (B, G, first.shape[1] // ROWS, N // G)
    run = launch("attention_forward", kernel, out_type, grid, scratch)
    out, lse = run(key_blocks(first_BL, ROWS, keys), first, q_BLNH, k_BSGH, v_BSGV)
    return out, lse[:, :, :L].transpose(0, 2, 1)
