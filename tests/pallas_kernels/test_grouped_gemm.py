"""Grouped GEMM: every implementation against the reference, and the reference against numpy.

The tolerance of a sum of n products is 4 sqrt(n) of the dtype's rounding: errors of random signs
add up as a random walk. bfloat16 results are sums in float32, rounded once: one unit in the last
place, at most 2^-7 of a value, where two implementations fall on either side of a tie.
"""

import math
import sys
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from jax.sharding import PartitionSpec as P

from pallas_kernels import deviceless
from pallas_kernels.deviceless import GPUS
from pallas_kernels.grouped_gemm import grouped_gemm, overflow_rows, xla
from pallas_kernels.pick import Choice, Target, pick, target
from tests.oracle import max_relative_error

IMPLS = ["xla"]
ALL = ["reference", *IMPLS]
LARGE = (5411, 16, 12)
# name: (group sizes, M, K, N)
CASES = {
    "unaligned": ([5, 3, 8, 17], 33, 24, 40),
    "first, middle and last empty": ([0, 9, 0, 0, 7, 0], 16, 8, 8),
    "one group of two, twice": ([8, 0, 8, 0], 16, 64, 32),
    "18 groups, the first 6 used": ([7, 4, 6, 5, 1, 9, *[0] * 12], 32, 64, 43),
    "nothing": ([0, 0, 0], 20, 4, 6),
    "one row": ([0, 1], 1, 4, 6),
    "no rows": ([0, 0], 0, 4, 6),
    "one row a group": ([1] * 40, 40, 43, 25),
    # Of one shape, so that they share a compilation.
    "skewed": ([162, 0, 2577, 446, 0, 83], *LARGE),
    "around the sizes of blocks": ([1280, 1281, 768, 2049, 16, 17], *LARGE),
    "all rows in one group": ([0, 0, 0, LARGE[0], 0, 0], *LARGE),
    "rows far beyond the sum": ([3, 0, 50, 0, 0, 0], *LARGE),
    "large and nothing": ([0] * 6, *LARGE),
}


def _tolerance(dtype, num_terms: int) -> float:
    if dtype == jnp.bfloat16:
        return 2.0**-7
    return 4 * math.sqrt(max(num_terms, 1)) * float(jnp.finfo(dtype).eps)


def _operands(case: str, dtype, seed: int = 0):
    """(x, w, sizes, dy) of a case, drawn in numpy: random normal rows, also past the sum."""
    sizes, M, K, N = CASES[case]
    rng = np.random.default_rng(seed)
    shapes = ((M, K), (len(sizes), K, N), (M, N))
    x, w, dy = (jnp.asarray(rng.standard_normal(shape)).astype(dtype) for shape in shapes)
    return x, w, jnp.asarray(sizes, jnp.int32), dy


@partial(jax.jit, static_argnums=0)
def _run(impl, x, w, sizes, dy):
    """(y, dx, dw), compiled, with the sizes traced."""
    y, back = jax.vjp(lambda x, w: grouped_gemm(x, w, sizes, impl=impl), x, w)
    return y, *back(dy)


def _expected(x, w, sizes, dy):
    """(y, dx, dw) by one numpy product a group, in float64."""
    x, w, dy = (np.asarray(a).astype(np.float64) for a in (x, w, dy))
    y, dx, dw, start = np.zeros(dy.shape), np.zeros(x.shape), np.zeros(w.shape), 0
    for g, size in enumerate(np.asarray(sizes)):
        rows = slice(start, start + size)
        y[rows], dx[rows] = x[rows] @ w[g], dy[rows] @ w[g].T
        dw[g] = x[rows].T @ dy[rows]
        start += size
    return y, dx, dw


def _dirty_memory() -> None:
    """Leaves NaN in the pages that the next allocations reuse: nothing may rely on zeros there."""
    arrays = [jnp.full((size,), jnp.nan) for size in (1 << 8, 1 << 14, 1 << 18, 1 << 22) * 3]
    jax.block_until_ready(arrays)


def _agree(found, wanted, dtype, sizes, K, N) -> None:
    terms = (K, N, int(np.max(sizes, initial=1)))
    for name, a, b, n in zip(("y", "dx", "dw"), found, wanted, terms, strict=True):
        assert a.dtype == dtype, name
        assert max_relative_error(a, b) <= _tolerance(dtype, n), name
    total = int(np.sum(sizes))
    assert not np.asarray(found[0])[total:].any() and not np.asarray(found[1])[total:].any()
    assert not np.asarray(found[2])[np.asarray(sizes) == 0].any()


@pytest.mark.parametrize(
    "dtype, case",
    [("float32", case) for case in CASES]
    + [(d, c) for d in ("bfloat16", "float64") for c in ("unaligned", "skewed", "nothing")],
)
@pytest.mark.parametrize("impl", IMPLS)
def test_matches_reference(impl, dtype, case):
    with jax.enable_x64(dtype == "float64"):
        operands = _operands(case, jnp.dtype(dtype))
        sizes, _, K, N = CASES[case]
        wanted = _run("reference", *operands)
        for _ in range(2):
            _dirty_memory()
            _agree(_run(impl, *operands), wanted, jnp.dtype(dtype), sizes, K, N)


@pytest.mark.parametrize("case", ["unaligned", "skewed", "rows far beyond the sum"])
def test_reference_matches_a_product_per_group(case):
    with jax.enable_x64(True):
        operands = _operands(case, jnp.float64)
        sizes, _, K, N = CASES[case]
        _agree(_run("reference", *operands), _expected(*operands), jnp.float64, sizes, K, N)


@pytest.mark.parametrize("impl", ALL)
def test_nan_of_one_group_stays_in_it(impl):
    """A row that diverged poisons its own group's weight gradient, and no other row or group."""
    x, w, sizes, dy = _operands("unaligned", jnp.float32)
    bad = 6  # the second row of group 1: rows 5 .. 7
    y, dx, dw = _run(impl, x.at[bad].set(jnp.inf), w, sizes, dy.at[bad].set(jnp.nan))
    for a, poisoned in ((y, {bad}), (dx, {bad}), (dw, {1})):
        finite = np.isfinite(np.asarray(a)).reshape(a.shape[0], -1).all(axis=1)
        assert set(np.flatnonzero(~finite)) == poisoned


@pytest.mark.parametrize("impl", ALL)
def test_sizes_beyond_the_rows_are_an_error_or_a_count(impl):
    """Forty rows, 76 wanted: the last group gets the 34 that are left."""
    w = jnp.broadcast_to(jnp.array([1.0, 2.0])[:, None, None], (2, 4, 3))
    x, dy, sizes = jnp.ones((40, 4)), jnp.ones((40, 3)), jnp.array([6, 70], jnp.int32)
    with pytest.raises(ValueError, match=r"76.*40"):
        grouped_gemm(x, w, sizes, impl=impl)
    for a, wanted in zip(
        _run(impl, x, w, sizes, dy),
        ([4] * 6 + [8] * 34, [3] * 6 + [6] * 34, [[6], [34]]),
        strict=True,
    ):
        assert (np.asarray(a) == np.asarray(wanted).reshape(a.shape[0], *(1,) * (a.ndim - 1))).all()
    assert int(jax.jit(overflow_rows, static_argnums=1)(sizes, 40)) == 36
    assert int(overflow_rows(jnp.array([6, 3], jnp.int32), 10)) == 0


@pytest.mark.parametrize("impl", IMPLS)
def test_bfloat16_sums_in_float32_and_rounds_once(impl):
    """Each element is within half a unit in the last place; all terms are positive, so float32 adds
    next to nothing to that. Several blocks of rows make up one weight gradient."""
    x, w, sizes, dy = _operands("around the sizes of blocks", jnp.float32)
    operands = [jnp.abs(a).astype(jnp.bfloat16) for a in (x, w)]
    operands += [sizes, jnp.abs(dy).astype(jnp.bfloat16)]
    for a, b in zip(_run(impl, *operands), _expected(*operands), strict=True):
        half_unit = 2.0 ** (np.frexp(b)[1] - 9)
        assert (np.abs(np.asarray(a).astype(np.float64) - b) <= half_unit + 1e-5 * b).all()


@pytest.mark.parametrize(
    "x, w, sizes, message",
    [
        ((4, 3), (2, 5, 6), (2,), "K and dtype"),
        ((4, 3), (2, 3, 6), (3,), r"takes \[M, K\]"),
        ((4, 3), (3, 6), (2,), r"takes \[M, K\]"),
    ],
)
def test_shapes_that_do_not_fit(x, w, sizes, message):
    with pytest.raises(ValueError, match=message):
        grouped_gemm(jnp.ones(x), jnp.ones(w), jnp.ones(sizes, jnp.int32))
    with pytest.raises(ValueError, match="bfloat16"):
        grouped_gemm(jnp.ones((4, 3)), jnp.ones((1, 3, 2), jnp.bfloat16), jnp.ones(1, jnp.int32))


def test_pick_names_its_reasons():
    able, unable = Choice("b", len), Choice("a", max, "needs a GPU")
    assert pick("op", None, [unable, able]) is len and pick("op", "b", [unable, able]) is len
    with pytest.raises(ValueError, match=r"'a'.*needs a GPU.*b"):
        pick("op", "a", [unable, able])
    with pytest.raises(ValueError, match=r"unknown impl='c'.*a, b"):
        pick("op", "c", [unable, able])
    with pytest.raises(ValueError, match="a: needs a GPU"):
        pick("op", None, [unable])


@partial(jax.jit, static_argnums=1)
def _plan(sizes, num_rows):
    """[blocks, 3] of (group, start, end), in the order in which the portable loop visits them; the
    last row holds how many there are."""
    starts, ends, blocks = xla._cut(sizes, num_rows)

    def visit(seen, g, start, end):
        at = seen[-1, 0]
        return seen.at[at].set(jnp.stack([g, start, end])).at[-1, 0].add(1)

    seen = jnp.zeros((40, 3), jnp.int32)
    return xla._for_blocks(visit, seen, starts, ends, blocks, num_rows)


@pytest.mark.parametrize("num_rows", [20, 9000])
@given(data=st.data())
def test_blocks_cover_each_row_once_and_waste_little(num_rows, data):
    sizes = data.draw(st.lists(st.integers(0, num_rows // 3), min_size=3, max_size=3))
    plan = np.asarray(_plan(jnp.asarray(sizes, jnp.int32), num_rows))
    plan, ladder = plan[: plan[-1, 0]], xla._ladder(num_rows, xla._STEP_ROWS)
    rows = [np.arange(start, end) for _, start, end in plan]
    assert np.concatenate([np.arange(0), *rows]).tolist() == list(range(sum(sizes)))
    groups = [[g] * (end - start) for g, start, end in plan]
    assert sum(groups, []) == np.repeat(np.arange(3), sizes).tolist()
    padded = [ladder[(end - start > np.asarray(ladder)).sum()] for _, start, end in plan]
    assert all(size >= len(r) for size, r in zip(padded, rows, strict=True))
    assert sum(padded) - sum(sizes) < xla._STEP_ROWS * max(np.count_nonzero(sizes), 1)


def test_nothing_is_expanded_over_the_groups():
    """No intermediate of forward or backward is larger than x, y and w: not [G, M, N]."""
    M, K, N, G = 512, 16, 32, 64
    x, w, sizes = jnp.ones((M, K)), jnp.ones((G, K, N)), jnp.full((G,), 2, jnp.int32)
    gradient = jax.grad(lambda x, w: grouped_gemm(x, w, sizes, impl="xla").sum(), (0, 1))
    program = jax.jit(gradient).lower(x, w).compile()
    assert program.memory_analysis().temp_size_in_bytes <= 4 * (3 * M * (K + N) + 2 * G * K * N)


@pytest.mark.parametrize("impl", ALL)
def test_inside_scan_and_fully_manual_shard_map(impl):
    """Two layers in a scan, on eight devices of two axes with rows, matrices and sizes of their
    own, under check_vma: each device's loss and gradients are those it has alone."""
    devices, M, D, G = 8, 24, 8, 3
    rng = np.random.default_rng(7)
    x = rng.standard_normal((devices, M, D)).astype(np.float32)
    w = rng.standard_normal((devices, 2, G, D, D)).astype(np.float32)
    sizes = rng.integers(0, M // G + 1, (devices, G)).astype(np.int32)

    def loss(x, w, sizes):
        y, _ = jax.lax.scan(lambda x, w: (grouped_gemm(x, w, sizes, impl=impl), None), x, w)
        return (y * y).sum(), y

    def local(x, w, sizes):
        (_, y), grads = jax.value_and_grad(loss, (0, 1), has_aux=True)(x[0], w[0], sizes[0])
        return y[None], grads[0][None], grads[1][None]

    mesh = jax.make_mesh((2, 4), ("a", "b"), axis_types=(jax.sharding.AxisType.Auto,) * 2)
    spec = P(("a", "b"))
    mapped = jax.shard_map(local, mesh=mesh, in_specs=spec, out_specs=spec, check_vma=True)
    found = jax.jit(mapped)(x, w, sizes)
    alone = jax.jit(local)
    for i in range(devices):
        each = (a[i : i + 1] for a in (x, w, sizes))
        for a, b in zip(found, alone(*each), strict=True):
            assert max_relative_error(a[i], b[0]) <= 1e-6


def test_each_gpu_gets_the_kernels_of_its_generation(monkeypatch):
    """And none of them where JAX is older than they are; a refusal says why."""
    package = sys.modules["pallas_kernels.grouped_gemm"]
    x, w = jnp.ones((8, 16), jnp.bfloat16), jnp.ones((2, 16, 8), jnp.bfloat16)

    def refusals(gpu, x):
        kind = GPUS[gpu].name if gpu in GPUS else gpu
        monkeypatch.setattr(deviceless, "target", lambda: Target("gpu", kind, 0))
        return [choice.refusal for choice in package._gpu_choices(x, w)]

    monkeypatch.setattr(jax, "__version_info__", (0, 12, 0))
    assert all("this program is for cpu" in why for why in refusals("cpu", x))
    hopper, blackwell = refusals("h100", x)
    assert hopper is None and "runs on Blackwell" in blackwell
    hopper, blackwell = refusals("gb300", x)
    assert blackwell is None and "runs on Hopper" in hopper
    assert "bfloat16" in refusals("h200", x.astype(jnp.float32))[0]
    monkeypatch.setattr(jax, "__version_info__", (0, 11, 2))
    assert refusals("h100", x)[0] is None and "needs JAX 0.12" in refusals("gb300", x)[1]
    monkeypatch.setattr(jax, "__version_info__", (0, 11, 1))
    assert "needs JAX 0.11.2" in refusals("h100", x)[0]
    with pytest.raises(ValueError, match="impl='hopper' cannot serve.*runs on Hopper GPUs"):
        monkeypatch.setattr(deviceless, "target", target)
        grouped_gemm(x, w, jnp.array([4, 4], jnp.int32), impl="hopper")
