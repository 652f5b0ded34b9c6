"""Grouped GEMM in Triton, for NVIDIA GPUs without kernels of their own here: Ampere, Ada.

    forward   y[m]   = x[m] @ w[g]          for rows m of group g
    input     dx[m]  = dy[m] @ w[g]^T       w is read as it lies, by other strides
    weight    dw[g]  = sum over rows m of g   x[m]^T dy[m]

bfloat16, float16 or float32 in, float32 sums; 2*M*K*N FLOPs each. Any sizes: M, K and N need be
multiples of nothing (of 8, for full speed: copies of 16 bytes). Group sizes are read on the device:
a few fused XLA operations make a list of tiles or of groups (`work.py`), and each program of the
grid looks its own entry up.

Grid: one program (thread block) for each tile of the result that any group sizes could need; those
past the list's end return at once. A program loads blocks of both operands, up to `stages` - 1 of
them on their way (cp.async), multiplies them (mma.sync; wgmma on Hopper) and stores its tile once.
Tiles are walked in bands of `band` rows, column by column, so that programs in flight share what
they load in L2. Least traffic: x and y once, w once for each band.

Products by rows: a tile starts at its group's first row and never spans two groups. In a group's
last tile the rows past its end read the end's row again, and are not stored. Rows past the sum make
tiles of zeros, and are never read. Weight gradient: rows past the group's end are not loaded, in
either operand; zeros stand in for them. So a NaN stays in its group. Each element of a result is
summed by one program in a fixed order: the same bits in every run.

Run in Triton's interpreter against the definition, and assembled for A100, L40S and H100 with no
spills; not yet run or timed on a GPU. This file imports Triton and jax-triton, which the package
does without: import it only where both are installed.
"""

from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
import jax_triton
import triton
import triton.language as tl
from jax.interpreters import partial_eval

from pallas_kernels.deviceless import Gpu
from pallas_kernels.grouped_gemm.work import by_size, row_tiles
from pallas_kernels.varying import varying_as

# What a plain CUDA 12 assembler and driver take; Triton would write for the newest that it knows.
_PTX_VERSION, _BLACKWELL_PTX_VERSION = 80, 88


def _mend_dce_rule():
    """Gives jax-triton's call a rule for dead code that JAX 0.12 can call.

    JAX 0.12 passes a rule which inputs live on, too; jax-triton 0.4.1 registers one that does not
    take them (`TypeError: .. takes 2 positional arguments but 3 were given` while lowering). This
    one does, and says the same: the call stays, and XLA drops it where nothing reads its results.
    """
    if jax.__version_info__ < (0, 12) or jax_triton.__version_info__ > (0, 4, 1):
        return
    call = jax_triton.triton_lib.triton_kernel_call_p
    partial_eval.dce_rules[call] = lambda used, live, eqn: ([True] * len(eqn.invars), eqn)


_mend_dce_rule()


class Cut(NamedTuple):
    """How a kernel is cut up: elements of the matrices it sees, powers of two."""

    rows: int
    cols: int
    depth: int
    """Summed elements of one block in shared memory."""
    stages: int
    """As Triton counts them: one block being multiplied, the others in shared memory or coming."""
    warps: int
    band: int
    """Row tiles that are walked together before the next column."""


def choose(dtype, gpu: Gpu | None, num_cols: int) -> Cut:
    """Returns a cut for a result of so many columns that fits the shared memory of `gpu`; of the
    smallest since Ampere, 99 KiB, where the GPU is unknown."""
    if jnp.dtype(dtype).itemsize > 2:  # without tensor cores: float32 products are exact
        return Cut(rows=64, cols=64, depth=32, stages=3, warps=4, band=8)
    if gpu is not None and gpu.capability != (8, 9) and num_cols > 128:
        return Cut(rows=128, cols=256, depth=64, stages=4, warps=8, band=8)
    return Cut(rows=128, cols=128, depth=64, stages=4, warps=8, band=8)


@triton.jit
def _place(index, num_rows, num_cols: tl.constexpr, band: tl.constexpr):
    """(row, column) of the index-th tile: bands of rows, each walked column by column."""
    first = index // (band * num_cols) * band
    within, height = index % (band * num_cols), tl.minimum(num_rows - first, band)
    return first + within % height, within // height


@triton.jit
def _within(at, size: tl.constexpr, step: tl.constexpr):
    """Which of `at` are below size; all, known to the compiler, where tiles of `step` fill it."""
    return at < size if size % step else tl.full(at.shape, 1, tl.int1)


def _name(specialization) -> str:
    transposed = specialization.constants["transposed"]
    return "grouped_gemm_input_gradient" if transposed else "grouped_gemm_forward"


@triton.jit(repr=_name)
def _product_kernel(
    counts, tiles, x, w, y,
    D: tl.constexpr, C: tl.constexpr, most: tl.constexpr, transposed: tl.constexpr,
    rows: tl.constexpr, cols: tl.constexpr, depth: tl.constexpr, band: tl.constexpr,
):  # fmt: skip
    """y [M, C] of x [M, D] and w [G, D, C], or [G, C, D] where transposed."""
    num_cols: tl.constexpr = (C + cols - 1) // cols
    live, index = tl.load(counts), tl.program_id(0)
    total = live + tl.load(counts + 1)
    if index >= total * num_cols:
        return
    tile, col = _place(index, total, num_cols, band)
    group, first = tl.load(tiles + tile).to(tl.int64), tl.load(tiles + most + tile)
    num_rows = tl.load(tiles + 2 * most + tile) - first
    x += first.to(tl.int64) * D
    w += group * (D * C)
    y += first.to(tl.int64) * C
    r, c, d = tl.arange(0, rows), col * cols + tl.arange(0, cols), tl.arange(0, depth)
    wide = _within(c, C, cols)
    x_at = x + tl.minimum(r, num_rows - 1)[:, None] * D + d[None, :]
    w_at = w + (c[None, :] * D + d[:, None] if transposed else d[:, None] * C + c[None, :])
    acc = tl.zeros((rows, cols), tl.float32)
    end = tl.where(tile < live, D, 0)
    for at in range(0, end, depth):
        deep = _within(at + d, D, depth)
        x_block = tl.load(x_at, mask=deep[None, :], other=0.0)
        w_block = tl.load(w_at, mask=deep[:, None] & wide[None, :], other=0.0)
        acc = tl.dot(x_block, w_block, acc, input_precision="ieee")
        x_at += depth
        w_at += depth if transposed else depth * C
    keep = (r < num_rows)[:, None] & wide[None, :]
    tl.store(y + r[:, None] * C + c[None, :], acc.to(y.dtype.element_ty), mask=keep)


@triton.jit(repr=lambda _: "grouped_gemm_weight_gradient")
def _weight_kernel(
    groups, x, dy, dw,
    K: tl.constexpr, N: tl.constexpr, G: tl.constexpr,
    rows: tl.constexpr, cols: tl.constexpr, depth: tl.constexpr, band: tl.constexpr,
):  # fmt: skip
    """dw [G, K, N] of x [M, K] and dy [M, N]; rows and columns are those of dw."""
    num_rows: tl.constexpr = (K + rows - 1) // rows
    num_cols: tl.constexpr = (N + cols - 1) // cols
    index = tl.program_id(0)
    nth = index // (num_rows * num_cols)
    row, col = _place(index % (num_rows * num_cols), num_rows, num_cols, band)
    group, first = tl.load(groups + nth).to(tl.int64), tl.load(groups + G + nth)
    size = tl.load(groups + 2 * G + nth) - first
    x += first.to(tl.int64) * K
    dy += first.to(tl.int64) * N
    dw += group * (K * N)
    k, n, d = row * rows + tl.arange(0, rows), col * cols + tl.arange(0, cols), tl.arange(0, depth)
    tall, wide = _within(k, K, rows), _within(n, N, cols)
    x_at, dy_at = x + d[None, :] * K + k[:, None], dy + d[:, None] * N + n[None, :]
    acc = tl.zeros((rows, cols), tl.float32)
    for at in range(0, size, depth):
        mine = at + d < size  # both operands: a NaN times a zero is a NaN
        x_block = tl.load(x_at, mask=mine[None, :] & tall[:, None], other=0.0)
        dy_block = tl.load(dy_at, mask=mine[:, None] & wide[None, :], other=0.0)
        acc = tl.dot(x_block, dy_block, acc, input_precision="ieee")
        x_at += depth * K
        dy_at += depth * N
    at_kn = k[:, None] * N + n[None, :]
    tl.store(dw + at_kn, acc.to(dw.dtype.element_ty), mask=tall[:, None] & wide[None, :])


def _capability(gpu: Gpu | None) -> tuple[int, int]:
    if gpu is not None:
        return gpu.capability
    device = jax.devices()[0]
    major, minor = getattr(device, "compute_capability", "0.0").split(".")
    if int(major) < 8:
        raise ValueError(
            f"grouped_gemm: impl='triton' needs compute capability 8.0 (Ampere) or more; "
            f"{device.device_kind} has {major}.{minor}"
        )
    return int(major), int(minor)


def _call(kernel, args, out_type, blocks, gpu: Gpu | None, cut: Cut, sizes):
    """Runs `blocks` programs of a kernel; a GPU that is not known is asked what it can do."""
    major, minor = _capability(gpu)
    ptx = _BLACKWELL_PTX_VERSION if major > 9 else _PTX_VERSION
    y = jax_triton.triton_call(
        *args,
        kernel=kernel,
        out_type=out_type,
        grid=(blocks,),
        num_warps=cut.warps,
        num_stages=cut.stages,
        compute_capability=10 * major + minor,
        backend_options={"ptx_version": ptx, "enable_fp_fusion": True},
        **sizes,
        **{size: getattr(cut, size) for size in ("rows", "cols", "depth", "band")},
    )
    return varying_as(y, *args)


def product(x_MD, w, group_sizes_G, transposed: bool, gpu: Gpu | None, cut: Cut | None = None):
    """Returns y[m] = x[m] @ w[g], or x[m] @ w[g]^T where transposed; zeros past the sum."""
    (M, D), C = x_MD.shape, w.shape[1 if transposed else 2]
    cut = cut or choose(x_MD.dtype, gpu, C)
    counts_2, tiles_3T = row_tiles(group_sizes_G, M, cut.rows)
    most = tiles_3T.shape[1]
    return _call(
        _product_kernel,
        (counts_2, tiles_3T, x_MD, w),
        jax.ShapeDtypeStruct((M, C), x_MD.dtype),
        most * triton.cdiv(C, cut.cols),
        gpu, cut, dict(D=D, C=C, most=most, transposed=transposed),
    )  # fmt: skip


def weight_gradient(
    x_MK, dy_MN, group_sizes_G, gpu: Gpu | None, cut: Cut | None = None, dtype=None
):
    """Returns dw[g] = x[rows of g]^T dy[rows of g], [G, K, N], exactly 0 where a group is empty.

    In `dtype`: that of x, the default, or float32.
    """
    (M, K), N, G = x_MK.shape, dy_MN.shape[1], group_sizes_G.shape[0]
    cut = cut or choose(x_MK.dtype, gpu, N)
    _, groups_3G = by_size(group_sizes_G, M)
    return _call(
        _weight_kernel,
        (groups_3G, x_MK, dy_MN),
        jax.ShapeDtypeStruct((G, K, N), dtype or x_MK.dtype),
        G * triton.cdiv(K, cut.rows) * triton.cdiv(N, cut.cols),
        gpu, cut, dict(K=K, N=N, G=G),
    )  # fmt: skip


@partial(jax.custom_vjp, nondiff_argnums=(3, 4))
def grouped_gemm(x_MK, w_GKN, group_sizes_G, gpu: Gpu | None = None, cut: Cut | None = None):
    """See the package. `gpu` is what the program is for (None: ask the one that is here)."""
    return product(x_MK, w_GKN, group_sizes_G, False, gpu, cut)


def _forward(x_MK, w_GKN, group_sizes_G, gpu, cut):
    return grouped_gemm(x_MK, w_GKN, group_sizes_G, gpu, cut), (x_MK, w_GKN, group_sizes_G)


def _backward(gpu, cut, residuals, dy_MN):
    x_MK, w_GKN, group_sizes_G = residuals
    dx_MK = product(dy_MN, w_GKN, group_sizes_G, True, gpu, cut)
    return dx_MK, weight_gradient(x_MK, dy_MN, group_sizes_G, gpu, cut), None


grouped_gemm.defvjp(_forward, _backward)
