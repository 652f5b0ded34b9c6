"""Public bug reports of grouped GEMMs and permutations, on each implementation that runs here.

The GPU kernels run in the interpreter, which hands out memory full of NaN and looks for races; the
others after memory full of NaN has been freed. Everything twice. D12: openxla/tokamax#887. D13:
pytorch/torchtitan#1237. D14: deepseek-ai/DeepGEMM#450. D15: NVIDIA/TransformerEngine#2908 and
databricks/megablocks#186.
"""

import contextlib
from collections.abc import Callable, Generator
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels import permute, unpermute
from pallas_kernels.grouped_gemm import blackwell, grouped_gemm, hopper
from pallas_kernels.grouped_gemm.tiles import Tiles
from pallas_kernels.permute import mosaic
from tests.oracle import max_relative_error

SMALL = Tiles(rows=128, cols=64, depth=64, stages=2, snake=2, cores=2)


class Impl(NamedTuple):
    """One implementation of the grouped GEMM."""

    run: Callable[..., Any]
    dtype: str
    step: int
    """K and N are multiples of it."""
    tolerance: float


IMPLS = {
    "reference": Impl(partial(grouped_gemm, impl="reference"), "float32", 1, 2e-6),
    "xla": Impl(partial(grouped_gemm, impl="xla"), "float32", 1, 2e-6),
    "hopper": Impl(
        lambda x, w, s: hopper.grouped_gemm(x, w, s, hopper.H100, SMALL), "bfloat16", 8, 2.0**-7
    ),
    "blackwell": Impl(
        lambda x, w, s: blackwell.grouped_gemm(x, w, s, SMALL), "bfloat16", 8, 2.0**-7
    ),
}
every = pytest.mark.parametrize("impl", IMPLS.values(), ids=IMPLS)


@contextlib.contextmanager
def dirty(interpreted: bool, races: bool = True) -> Generator[None]:
    """New memory holds NaN: the interpreter's, or the pages that XLA will reuse."""
    if interpreted:
        with plgpu.force_gpu_interpret_mode(plgpu.InterpretGPUParams(detect_races=races)):
            yield
        return
    arrays = [jnp.full((size,), jnp.nan) for size in (1 << 8, 1 << 14, 1 << 18, 1 << 22) * 3]
    jax.block_until_ready(arrays)
    del arrays
    yield


def check(impl: Impl, sizes, x, w, dy, wanted=None) -> None:
    """Twice: y, dx and dw are right, and exactly zero past the sum and where a group is empty."""
    sizes_G, total = jnp.asarray(sizes, jnp.int32), sum(sizes)
    x, w, dy = (jnp.asarray(a, impl.dtype) for a in (x, w, dy))
    wanted = wanted or expected(*(np.asarray(a, np.float64) for a in (x, w, dy)), sizes)

    @jax.jit
    def step(x, w, dy, sizes_G):
        y, back = jax.vjp(lambda x, w: impl.run(x, w, sizes_G), x, w)
        return y, *back(dy)

    for _ in range(2):
        # Hundreds of groups take a minute with the search for races, and hold none that two do not.
        with dirty(impl.dtype == "bfloat16", races=len(sizes) < 300):
            y, dx, dw = (np.asarray(a, np.float64) for a in step(x, w, dy, sizes_G))
        assert not y[total:].any() and not dx[total:].any()
        assert not dw[np.asarray(sizes) == 0].any()
        for found, right in zip((y, dx, dw), wanted, strict=True):
            assert max_relative_error(found, right) <= impl.tolerance


def expected(x, w, dy, sizes):
    """(y, dx, dw) by one product a group, in float64."""
    y, dx, dw, start = np.zeros(dy.shape), np.zeros(x.shape), np.zeros(w.shape), 0
    for g, size in enumerate(sizes):
        rows = slice(start, start + size)
        y[rows], dx[rows], dw[g] = x[rows] @ w[g], dy[rows] @ w[g].T, x[rows].T @ dy[rows]
        start += size
    return y, dx, dw


def drawn(impl: Impl, M: int, K: int, N: int, G: int):
    """x, w, dy; K and N rounded down to what the implementation takes."""
    K, N, rng = K - K % impl.step, N - N % impl.step, np.random.default_rng(M)
    return (rng.standard_normal(shape) for shape in ((M, K), (G, K, N), (M, N)))


@every
@pytest.mark.parametrize(
    ("sizes", "M", "K", "N"),
    [
        ([8, 0, 8, 0], 16, 64, 32),
        ([7, 4, 6, 5, 1, 9, *[0] * 12], 32, 64, 43),
        ([162, 0, 2577, 446, 0, 83], 3268, 16, 16),
        ([0, 9, 0, 0, 7, 0], 16, 8, 8),
        ([0, 0, 0], 20, 8, 16),
    ],
)
def test_d12_empty_groups(impl, sizes, M, K, N):
    """An empty group's weight gradient is exactly zero, wherever the group is."""
    check(impl, sizes, *drawn(impl, M, K, N, len(sizes)))


@every
def test_d12_by_hand(impl):
    """The loss is the sum of the output: dw[g][k, n] is the column sum of the group's rows."""
    sizes, (x, w, dy) = [8, 0, 8, 0], drawn(impl, 16, 64, 32, 4)
    x = np.round(4 * x)  # so that sums are exact in any dtype
    w = np.round(w)
    dw = np.zeros(w.shape)
    dw[0], dw[2] = x[:8].sum(axis=0)[:, None], x[8:].sum(axis=0)[:, None]
    y, dx, _ = expected(x, w, np.ones(dy.shape), sizes)
    check(impl, sizes, x, w, np.ones(dy.shape), (y, dx, dw))


@every
@pytest.mark.parametrize("sizes", [[5, 0, 6], [70, 0, 150]])
def test_d13_nan_past_the_sum(impl, sizes):
    """Rows past the sum hold NaN, and so does their incoming gradient."""
    total, M = sum(sizes), sum(sizes) + 5
    x, w, dy = drawn(impl, M, 64, 32, len(sizes))
    rounded = (np.asarray(jnp.asarray(a, impl.dtype), np.float64) for a in (x, w, dy))
    wanted = expected(*rounded, sizes)
    x[total:] = dy[total:] = np.nan
    check(impl, sizes, x, w, dy, wanted)


@every
@pytest.mark.parametrize("sizes", [[128, 130, 65], [1, 127, 129, 0, 66], [1] * 300])
def test_d14_unaligned_groups(impl, sizes):
    """Row r holds r, matrix g holds g + 1, so that a wrong group shows as a wrong integer: sums are
    exact in float32, and rounded once. Then random data. No K or N is a multiple of a tile."""
    M, G, step = sum(sizes), len(sizes), impl.step
    K, N = (43, 2881) if step == 1 else (40, 72) if G < 300 else (40, 56)
    group, row = np.repeat(np.arange(G), sizes), np.arange(M) % 256  # a bfloat16 counts that far
    matrix = np.arange(1, G + 1) % 256
    x = jnp.asarray(np.broadcast_to(row[:, None], (M, K)), impl.dtype)
    w = jnp.asarray(np.broadcast_to(matrix[:, None, None], (G, K, N)), impl.dtype)
    y = jnp.asarray(row * matrix[group] * K, impl.dtype)
    with dirty(impl.dtype == "bfloat16", races=G < 300):
        found = jax.jit(impl.run)(x, w, jnp.asarray(sizes, jnp.int32))
    assert (np.asarray(found) == np.asarray(y)[:, None]).all()
    check(impl, sizes, *drawn(impl, M, K, N, G))


class Moves(NamedTuple):
    """One implementation of permutation."""

    permute: Callable[..., Any]
    unpermute: Callable[..., Any]
    interpreted: bool = False


def _moves(impl: str) -> Moves:
    undo = lambda y, slots, tokens, w: unpermute(y, slots, tokens, weights_TK=w, impl=impl)  # noqa: E731
    return Moves(partial(permute, impl=impl), undo)


def _undo(y, slots, tokens, weights):
    return mosaic.unpermute(y, tokens_S=tokens, slots_TK=slots, weights_TK=weights, num_sms=1)


MOVES = {
    "reference": _moves("reference"),
    "xla": _moves("xla"),
    "mosaic": Moves(partial(mosaic.permute, num_sms=1), _undo, interpreted=True),
}
every_move = pytest.mark.parametrize("impl", MOVES.values(), ids=MOVES)


@every_move
def test_d15_a_dropped_slot(impl):
    """Three tokens, two slots each; slot 1 of token 1 is dropped. Columns past the second are
    zeros: rows are copied by 16 bytes."""
    wide = lambda rows: jnp.pad(jnp.asarray(rows, jnp.float32), ((0, 0), (0, 2)))  # noqa: E731
    first_two = lambda rows: np.asarray(rows)[:, :2].tolist()  # noqa: E731
    slots = jnp.array([[0, 2], [1, -1], [3, 4]], jnp.int32)
    tokens = jnp.array([0, 1, 0, 2, 2, -1], jnp.int32)
    y, dout = wide(np.arange(1, 13).reshape(6, 2)), wide([[1, 2], [4, 8], [16, 32]])
    x = wide(np.arange(6).reshape(3, 2))
    weights = jnp.array([[0.5, 0.25], [2.0, 64.0], [1.0, 3.0]])
    for _ in range(2):
        with dirty(impl.interpreted):
            plain, back = jax.vjp(lambda y: impl.unpermute(y, slots, tokens, None), y)
            assert first_two(plain) == [[6, 8], [3, 4], [16, 18]]
            assert first_two(back(dout)[0]) == [[1, 2], [4, 8], [1, 2], [16, 32], [16, 32], [0, 0]]
            out, back = jax.vjp(lambda y, w: impl.unpermute(y, slots, tokens, w), y, weights)
            assert first_two(out) == [[1.75, 2.5], [6, 8], [34, 38]]
            dy, dw = back(dout)
            assert first_two(dy) == [[0.5, 1], [8, 16], [0.25, 0.5], [16, 32], [48, 96], [0, 0]]
            assert np.asarray(dw).tolist() == [[5, 17], [44, 0], [368, 464]]
            rows, back = jax.vjp(lambda x: impl.permute(x, tokens, slots), x)
            assert first_two(rows) == [[0, 1], [2, 3], [0, 1], [4, 5], [4, 5], [0, 0]]
            assert first_two(back(y)[0]) == [[6, 8], [3, 4], [16, 18]]


@pytest.mark.parametrize(("rows", "dim"), [(299_600, 7168), (524_300, 4096)])
def test_d15_b_offsets_beyond_32_bits(rows, dim):
    """In bfloat16, 4.3 GB: rows whose offset exceeds 2^31 (row 299594 of 7168) are written by
    permute and read by unpermute. To hold one such array and not three, token i of 251 holds i,
    and row r of the large array is token r % 251."""
    tokens = jnp.arange(rows, dtype=jnp.int32) % 251
    x = jnp.broadcast_to(jnp.arange(251, dtype=jnp.bfloat16)[:, None], (251, dim))
    probe = np.array([0, 1, 299_589, *range(299_590, 299_600), rows - 2, rows - 1])
    slots = jnp.asarray(probe[:, None], jnp.int32)
    for _ in range(2):  # the second time in the pages of the first
        x_sorted = jax.jit(permute)(x, tokens, slots)
        assert (np.asarray(x_sorted)[:, :: dim - 1] == np.arange(rows)[:, None] % 251).all()
        back = jax.jit(unpermute)(x_sorted, slots, tokens)
        assert (np.asarray(back) == (probe % 251)[:, None]).all()
        del x_sorted


@pytest.mark.large
def test_d15_b_offsets_beyond_32_bits_in_the_interpreter():
    """The sum reads there. A third of a million rows take hours, so the interpreter does not write
    them: that copies out have 64-bit addresses is seen in the machine code, by
    `test_permute_mosaic.py`. Once, and with no search for races: a read takes ten seconds."""
    rows, dim = 299_600, 7168
    row = (jnp.arange(rows) % 251).astype(jnp.bfloat16)
    y = jax.jit(lambda row: jnp.broadcast_to(row[:, None], (rows, dim)))(row)
    slots, tokens = jnp.array([[299_594, rows - 1]], jnp.int32), jnp.zeros(rows, jnp.int32)
    with plgpu.force_gpu_interpret_mode(plgpu.InterpretGPUParams()):
        back = MOVES["mosaic"].unpermute(y, slots, tokens, None)
    assert (np.asarray(back) == 299_594 % 251 + (rows - 1) % 251).all()
