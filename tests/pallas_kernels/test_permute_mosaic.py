"""The Mosaic GPU kernels of permute: simulated on CPU, and compiled for GPUs that are not there.

The simulation checks values against the reference and looks for data races (an error if it finds
one). A gathered row is a copy, so permute is exact; sums carry the tolerances of `test_permute`.
"""

import itertools
import re
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import mosaic_gpu as plgpu
from jax.sharding import PartitionSpec as P

from pallas_kernels import deviceless
from pallas_kernels.permute import mosaic, reference
from tests.deviceless.child import printed
from tests.oracle import max_relative_error

TOLERANCE = {"float32": 1e-6, "bfloat16": 2.0**-7}
permute = partial(mosaic.permute, num_sms=1)
unpermute = partial(mosaic.unpermute, num_sms=1)


@pytest.fixture(autouse=True)
def simulated(request):
    """Runs every kernel of the test in the simulator; a data race raises."""
    if request.node.get_closest_marker("deviceless"):
        yield
        return
    with plgpu.force_gpu_interpret_mode(plgpu.InterpretGPUParams(detect_races=True)):
        yield


def _routing(T: int, K: int, seed: int):
    """(tokens_S, slots_TK): a shuffle of the slots, and one in five dropped (-1 on both sides)."""
    rng = np.random.default_rng(seed)
    order = rng.permutation(T * K)
    kept = rng.random(T * K) >= 0.2
    slots = np.empty(T * K, np.int32)
    slots[order] = np.where(kept, np.arange(T * K), -1)
    tokens = np.where(kept, order // K, -1).astype(np.int32)
    return jnp.asarray(tokens), jnp.asarray(slots.reshape(T, K))


def _normal(shape, dtype, seed):
    return jnp.asarray(np.random.default_rng(seed).standard_normal(shape)).astype(dtype)


# (11, 4, 24): 16 rows an item and 12 left over, a sum padded from 24 columns to 256.
# (9, 8, 2304): three rows an item, more items than stages; a sum in pieces of 1280 and 1024.
# (3, 2, 8200): rows longer than a stage, in pieces of 2816, 2816 and 2568.
@pytest.mark.parametrize(
    ("T", "K", "D", "dtype"),
    [
        (11, 4, 24, "float32"),
        (9, 8, 2304, "bfloat16"),
        (3, 2, 8200, "float32"),
        (1, 1, 8, "bfloat16"),
    ],
)
def test_matches_reference(T, K, D, dtype):
    """Both moves and their gradients, the weights' too."""
    tokens, slots = _routing(T, K, seed=T)
    x, dy = _normal((T, D), dtype, 0), _normal((T, D), dtype, 1)
    dx, weights = _normal((T * K, D), dtype, 2), _normal((T, K), "float32", 3)

    def run(permute, unpermute):
        rows, back = jax.vjp(lambda x: permute(x, tokens, slots), x)
        y, undo = jax.vjp(lambda y, w: unpermute(y, slots, tokens, w), dx, weights)
        plain, undo_plain = jax.vjp(lambda y: unpermute(y, slots, tokens, None), dx)
        return rows, *back(dx), y, *undo(dy), plain, *undo_plain(dy)

    found = jax.jit(partial(run, permute, unpermute))()
    wanted = jax.jit(partial(run, reference.permute, reference.unpermute))()
    assert np.array_equal(found[0], wanted[0]) and np.array_equal(found[-1], wanted[-1])
    for a, b in zip(found, wanted, strict=True):
        assert a.dtype == b.dtype
        assert max_relative_error(a, b) <= TOLERANCE[dtype] * np.sqrt(max(K, D))


@pytest.mark.parametrize("weighted", [False, True])
def test_the_sum_is_in_the_order_of_k(weighted):
    """In float32 1e8 + 1 is 1e8, so [1e8, 1, -1e8, 1] sums to 1 in order and to 0 or 2 out of it.

    The second token misses its first slot. Weights are powers of two: no product rounds.
    """
    values = np.array([1e8, 1, -1e8, 1], np.float32)
    slots = jnp.array([[2, 0, 3, 1], [-1, 2, 0, 3]], jnp.int32)
    y = np.empty((4, 4), np.float32)
    y[np.asarray(slots[0])] = values[:, None]
    weights = np.array([[1, 2, 1, 4], [0.5, 4, 1, 4]], np.float32)
    wanted = np.zeros((2, 4), np.float32)
    for t, k in np.ndindex(2, 4):
        if slots[t, k] >= 0:
            wanted[t] += y[slots[t, k]] * (weights[t, k] if weighted else np.float32(1))
    tokens = jnp.zeros(4, jnp.int32)
    found = unpermute(jnp.asarray(y), slots, tokens, jnp.asarray(weights) if weighted else None)
    assert np.array_equal(found, wanted)


def test_what_nobody_owns_leaks_nowhere():
    """NaN and infinity in rows, and in weights, behind a -1; row 0 and the last row among them."""
    nan, inf = jnp.nan, jnp.inf
    slots = jnp.array([[1, -1], [-1, 2], [-1, -1]], jnp.int32)
    tokens = jnp.array([-1, 0, 1, -1], jnp.int32)
    y = jnp.ones((4, 8)).at[0].set(nan).at[3].set(inf)
    weights = jnp.array([[2, nan], [inf, 4], [nan, nan]])
    out, back = jax.vjp(lambda y, w: unpermute(y, slots, tokens, w), y, weights)
    assert np.asarray(out)[:, 0].tolist() == [2, 4, 0]
    dy, dw = back(jnp.ones((3, 8)).at[2].set(nan))
    assert np.asarray(dy)[:, 7].tolist() == [0, 2, 4, 0]
    assert np.asarray(dw).tolist() == [[8, 0], [0, 8], [0, 0]]
    x = jnp.full((3, 8), 5.0).at[2].set(nan)
    rows, back = jax.vjp(lambda x: permute(x, tokens, slots), x)
    assert np.asarray(rows)[:, 0].tolist() == [0, 5, 5, 0]
    assert np.asarray(back(y)[0])[:, 0].tolist() == [1, 1, 0]


def test_nothing_to_move():
    """No rows, or no tokens: zeros of the right shape, and no kernel."""
    none, slots = jnp.zeros(0, jnp.int32), jnp.full((2, 3), -1, jnp.int32)
    assert permute(jnp.ones((2, 8)), none, slots).shape == (0, 8)
    y = unpermute(jnp.ones((0, 8)), slots, none, None)
    assert y.shape == (2, 8) and not np.asarray(y).any()
    rows = permute(jnp.ones((0, 8)), jnp.full(4, -1, jnp.int32), slots[:0])
    assert rows.shape == (4, 8) and not np.asarray(rows).any()


def test_outputs_vary_as_inputs_do_in_shard_map():
    """Under check_vma, forward and back, the result is as varying as the rows."""
    tokens, slots = _routing(6, 2, seed=0)

    def local(x, weights):
        def there_and_back(x, weights):
            return unpermute(permute(x, tokens, slots), slots, tokens, weights)

        y, back = jax.vjp(there_and_back, x, weights)
        return y, *back(y)

    mesh = jax.make_mesh((2,), ("a",), axis_types=(jax.sharding.AxisType.Auto,))
    mapped = jax.shard_map(local, mesh=mesh, in_specs=P("a"), out_specs=P("a"), check_vma=True)
    shapes = jax.eval_shape(mapped, jnp.ones((12, 8)), jnp.ones((12, 2)))
    assert [a.shape for a in shapes] == [(12, 8), (12, 8), (12, 2)]

    def replicated_rows(tokens):
        return permute(jnp.ones((6, 8)), tokens, slots)

    mapped = jax.shard_map(replicated_rows, mesh=mesh, in_specs=P("a"), out_specs=P("a"))
    with pytest.raises(ValueError, match=r"\['a'\] and the rows do not"):
        jax.eval_shape(mapped, jnp.zeros(8, jnp.int32))


@pytest.mark.parametrize(
    ("dtype", "dim", "rows", "k", "why"),
    [
        ("bfloat16", 8, 1, 32, None),
        ("float32", 4, 1, 1, None),
        ("bfloat16", 12, 1, 1, "multiple of 8"),
        ("float32", 6, 1, 1, "multiple of 4"),
        ("float32", 0, 1, 1, "multiple of 4"),
        ("float16", 8, 1, 1, "float16"),
        ("bfloat16", 8, 2**31 - 1, 1, "32 bits"),
        ("bfloat16", 8, 1, 33, "rows a token"),
    ],
)
def test_refuses(dtype, dim, rows, k, why):
    found = mosaic.refusal(jnp.dtype(dtype), dim, num_rows=rows, num_experts_per_token=k)
    assert found is None if why is None else why in (found or "")


def test_a_refused_call_raises():
    """Also for indices that are not int32."""
    tokens, slots = _routing(2, 1, seed=0)
    with pytest.raises(ValueError, match="multiple of 4"):
        permute(jnp.ones((2, 6)), tokens, slots)
    with pytest.raises(ValueError, match="int32"):
        permute(jnp.ones((2, 8)), tokens.astype(jnp.int16), slots)


def test_plans_fit():
    """Pieces tile the row in units of 16 bytes; two blocks fit in a multiprocessor's memory."""
    dims = (8, 24, 128, 2048, 2056, 2880, 4096, 7168, 12288, 16384, 65544)
    for itemsize, dim in itertools.product((2, 4), dims):
        copy = mosaic._plan_copy(65536, dim, itemsize)
        assert copy.depth * copy.rows * copy.width * itemsize <= mosaic.BLOCK_BYTES
        assert copy.depth > mosaic.STORES
        plans = [copy]
        for K in (1, 2, 6, 8, 16, 22, 32):
            plans.append(mosaic._plan_sum(dim, itemsize, K))
            used = (plans[-1].depth * K + mosaic.STORES) * plans[-1].width * itemsize
            assert used <= mosaic.BLOCK_BYTES
        for plan in plans:
            assert (plan.pieces - 1) * plan.width + plan.last == dim
            assert 0 < plan.last <= plan.width and plan.last * itemsize % 16 == 0


@pytest.mark.deviceless
@pytest.mark.parametrize("gpu", ["h100", "gb300"])
@pytest.mark.parametrize(("dim", "dtype"), [(2048, "bfloat16"), (7168, "bfloat16")])
def test_compiles_without_spills(gpu, dim, dtype, tmp_path):
    """The real compiler and assembler: registers hold everything, row offsets have 64 bits."""
    printed("compile_permute", gpu, dim, dtype, dump=tmp_path)
    reports = [path.read_text() for path in sorted(tmp_path.glob("*.ptxas"))]
    names = [re.findall(r"entry function '(\w+)_mosaic_gpu_kernel'", text) for text in reports]
    assert {name for [name] in names} == {"permute", "unpermute", "unpermute_gradient"}
    target = "sm_{}{}a".format(*deviceless.GPUS[gpu].capability)
    for report in reports:
        assert f"for '{target}'" in report
        assert "0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads" in report
    for path in tmp_path.glob("*.ptx"):
        product = rf"mul\.wide\.[us]32\s+%rd\d+, %r\d+, ({dim}|{dim * 2});"
        assert re.search(product, path.read_text())
