"""Attention: every implementation that runs here against the definition, gradients included."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from pallas_kernels import attention
from pallas_kernels.attention import attention_gradients, cudnn, join, xla
from pallas_kernels.pick import Target
from tests.oracle import max_relative_error

# B, L, S, N, G, H, V, window, segments, sinks
CASES = {
    "causal": (2, 40, 40, 4, 2, 8, 8, None, False, False),
    "segments": (2, 40, 40, 4, 2, 8, 8, None, True, False),
    "unequal dims, sinks, S > L": (1, 40, 53, 4, 1, 8, 6, None, False, True),
    "window, segments, sinks": (2, 41, 41, 2, 2, 8, 4, 4, True, True),
    "one query": (1, 1, 41, 2, 1, 4, 4, 3, False, False),
}
# Every product rounds an operand to bfloat16 (2^-9 relative to its largest) and a result on
# writing: five roundings between an input and a gradient, and twice that for the worst of many.
TOLERANCE = {"float32": 1e-5, "float64": 1e-10, "bfloat16": 10 * 2**-9}
# ROWS, KEYS, FEW: one block; three unrolled ones; loops over queries and over keys.
BLOCKS = {"one": (128, 512, 8), "unrolled": (16, 512, 8), "looped": (16, 16, 1)}
RUNS = [
    *((case, "looped", "float64") for case in CASES),
    *((case, "unrolled", "float32") for case in CASES),
    *(("window, segments, sinks", blocks, "bfloat16") for blocks in BLOCKS),
    ("window, segments, sinks", "one", "float64"),
]


def _inputs(case, dtype):
    B, L, S, N, G, H, V, window, segmented, sunk = CASES[case]
    rng = np.random.default_rng(0)
    draw = lambda *shape: jnp.asarray(rng.normal(size=shape), dtype)  # noqa: E731
    q, k, v = draw(B, L, N, H), draw(B, S, G, H), draw(B, S, G, V)
    ids = jnp.asarray(np.sort(rng.integers(0, 4, (B, S)), axis=1)[:, ::-1], jnp.int32)
    segments = (ids[:, S - L :], ids) if segmented else None
    cotangents = draw(B, L, N, V), draw(B, L, N)
    return q, k, v, draw(N) if sunk else None, segments, window, cotangents


def _set_blocks(monkeypatch, blocks):
    for name, value in zip(("ROWS", "KEYS", "FEW"), BLOCKS[blocks], strict=True):
        monkeypatch.setattr(xla, name, value)


@partial(jax.jit, static_argnames=("impl", "blocks", "window"))
def _run(impl, blocks, q, k, v, sinks, segments, window, cotangents):
    """out, which rows are empty, lse of the others, the gradients in q, k, v (and the sinks).

    `blocks` is here so that each has its own compiled program.
    """

    def call(q, k, v, sinks):
        return attention(q, k, v, segment_ids=segments, window=window, sinks=sinks, impl=impl)

    (out, lse), vjp = jax.vjp(call, q, k, v, sinks)
    d_out, d_lse = cotangents
    empty = lse < -1e29
    d_lse = jnp.where(empty, 0, d_lse.astype(lse.dtype))
    grads = [g for g in vjp((d_out, d_lse)) if g is not None]
    return [out, empty, jnp.where(empty, 0, lse), *grads]


@pytest.mark.parametrize(("case", "blocks", "dtype"), RUNS)
def test_blocks_equal_the_definition(case, blocks, dtype, monkeypatch):
    _set_blocks(monkeypatch, blocks)
    with jax.enable_x64(dtype == "float64"):
        arguments = _inputs(case, dtype)
        looped = xla._plan(*arguments[0].shape[:2], arguments[1].shape[1], 2, None, 1.0).looped
        assert looped == (blocks == "looped" and case != "one query")
        got, want = _run("xla", blocks, *arguments), _run("reference", "", *arguments)
        for one, other in zip(got, want, strict=True):
            assert one.dtype == other.dtype
            assert max_relative_error(one, other) <= TOLERANCE[dtype]


PLACES = [*range(8), *range(32, 40), *range(44, 48)], [*range(10, 20), *range(40, 60)]


@pytest.mark.parametrize(("blocks", "window"), [("unrolled", 9), ("looped", None), ("looped", 9)])
def test_parts_of_a_row_by_position(blocks, window, monkeypatch):
    """Some queries, first over all keys, then over two parts of these, joined: results and
    gradients of the definition, without positions, over the whole row. There are gaps."""
    _set_blocks(monkeypatch, blocks)
    with jax.enable_x64(True):
        rng, (at, first) = np.random.default_rng(0), map(np.asarray, PLACES)
        rest = np.setdiff1d(np.arange(60), first)
        draw = lambda *shape: jnp.asarray(rng.normal(size=(2, 60, *shape)))  # noqa: E731
        q, k, v, cotangents = draw(4, 8), draw(2, 8), draw(2, 6), (draw(4, 6), draw(4))
        ids = jnp.asarray(np.sort(rng.integers(0, 4, (2, 60)), axis=1)[:, ::-1], jnp.int32)
        seeing = np.asarray(ids[:, at] != 0)[..., None]  # the others have no log-sum-exp
        mine = [jnp.where(seeing[..., None], cotangents[0][:, at], 0),
                jnp.where(seeing, cotangents[1][:, at], 0)]  # fmt: skip

        def whole(q, k, v):
            made = attention(q, k, v, segment_ids=(ids, ids), window=window, impl="reference")
            return [a[:, at] for a in made]

        def part(keys, impl):
            marks = dict(window=window, scale=8**-0.5, segment_ids=(ids[:, at], ids[:, keys]))
            places = (jnp.asarray(np.tile(p, (2, 1)), jnp.int32) for p in (at, keys))
            marks["positions"] = tuple(places)
            arrays = (q[:, at], k[:, keys], v[:, keys])
            run = jax.jit(partial(attention, **marks, impl=impl))
            return run(*arrays), lambda results: jax.jit(partial(attention_gradients, **marks))(
                arrays, results, mine
            )

        right, pull = jax.vjp(whole, q, k, v)
        grads = pull(mine)
        for impl in ("xla", "reference"):
            for one, other in zip(part(np.arange(60), impl)[0], right, strict=True):
                assert max_relative_error(one, other) <= 1e-10
        (early, pull_early), (late, pull_late) = part(first, "xla"), part(rest, "xla")
        results = join(early, late)
        for one, other in zip(results, right, strict=True):
            assert max_relative_error(one, other) <= 1e-10
        found = [np.zeros(a.shape) for a in (q, k, v)]
        for keys, pulled in ((first, pull_early(results)), (rest, pull_late(results))):
            for sum_, where, more in zip(found, (at, keys, keys), pulled, strict=True):
                sum_[:, where] += more
        for one, other in zip(found, grads, strict=True):
            assert max_relative_error(one, other) <= 1e-10


def test_keys_of_documents_before_are_skipped():
    """By position: those before the first document of a block of queries, in all rows."""
    plan = xla._Plan(1, 1, 4, 4, True, 0, None, 1.0)
    ids = jnp.asarray([[1] * 6 + [2] * 4 + [0] + [3] * 5, [1] * 9 + [2] * 7], jnp.int32)
    at = jnp.broadcast_to(jnp.arange(16, dtype=jnp.int32)[None], (2, 16))

    def ranges(rows, plan=plan, keys=slice(0, 16)):
        both = (ids[rows], ids[rows, keys]), (at[rows], at[rows, keys])
        marks = xla._Marks(*both)
        return [tuple(int(n) for n in xla._range_of(i, marks, plan)) for i in range(4)]

    assert ranges(slice(0, 1)) == [(0, 4), (0, 8), (6, 12), (11, 16)]
    assert ranges(slice(0, 2)) == [(0, 4), (0, 8), (0, 12), (9, 16)]
    assert ranges(slice(0, 1), plan._replace(window=3)) == [(0, 4), (2, 8), (6, 12), (11, 16)]
    # Of a document that has no key here nothing is known.
    assert ranges(slice(0, 1), keys=slice(8, 16)) == [(0, 0), (0, 0), (0, 4), (3, 8)]


def test_the_batch_is_worked_on_in_chunks(monkeypatch):
    """Rows of the batch do not mix, however many are worked on at once."""
    q, k, v, *_ = _inputs("causal", "float32")
    monkeypatch.setattr(xla, "SCORES_CPU", 1)
    assert xla._plan(6, 40, 40, 4, None, 1.0)[:2] == (1, 6)  # elsewhere there is room
    call = jax.jit(partial(attention, impl="xla"))
    alone = [call(*(a[b : b + 1] for a in (q, k, v))) for b in range(2)]
    both = call(q, k, v)
    for b in range(2):
        for got, want in zip(both, alone[b], strict=True):
            assert max_relative_error(got[b : b + 1], want) <= 1e-6
    monkeypatch.setattr(xla, "SCORES_CPU", 4 * 4 * 40 * 40)
    assert xla._plan(6, 40, 40, 4, None, 1.0).batch_cpu == 3  # four would fit, and do not divide 6


def _packed(seed: int):
    rng = np.random.default_rng(seed)
    shapes = ((1, 8, 2, 4),) * 3
    return [jnp.asarray(rng.normal(size=shape), jnp.float32) for shape in shapes]


@pytest.mark.parametrize("blocks", ["one", "looped"])
@pytest.mark.parametrize("impl", ["xla", "reference"])
def test_documents_do_not_see_each_other(impl, blocks, monkeypatch):
    """D24: 3 + 5 tokens in a row."""
    if blocks == "looped":
        for name, value in (("ROWS", 4), ("KEYS", 4), ("FEW", 0)):
            monkeypatch.setattr(xla, name, value)
    ids = jnp.asarray([[1, 1, 1, 2, 2, 2, 2, 2]], jnp.int32)
    first, other = _packed(0), _packed(1)
    pairs = zip(first, other, strict=True)
    mixed = [jnp.concatenate([b[:, :3], a[:, 3:]], axis=1) for a, b in pairs]

    @jax.jit
    def call(q, k, v, ids=ids):
        return attention(q, k, v, segment_ids=(ids, ids), impl=impl)[0]

    np.testing.assert_array_equal(call(*first)[:, 3:], call(*mixed)[:, 3:])
    grads = jax.grad(lambda *qkv: call(*qkv)[:, 3:].sum(), argnums=(0, 1, 2))(*first)
    assert all(not np.asarray(g[:, :3]).any() for g in grads)
    alone = call(*(a[:, 3:] for a in first), ids=jnp.ones((1, 5), jnp.int32))
    assert max_relative_error(call(*first)[:, 3:], alone) <= 1e-5


@pytest.mark.parametrize("impl", ["xla", "reference"])
def test_padding_gives_zeros_and_no_gradient(impl):
    ids = jnp.asarray([[1, 2, 2, 2, 2, 2, 0, 0]], jnp.int32)
    q, k, v = _packed(2)

    @jax.jit
    def call(q, k, v):
        return attention(q, k, v, segment_ids=(ids, ids), impl=impl)

    out, lse = call(q, k, v)
    assert not np.asarray(out[:, 6:]).any() and np.isfinite(lse).all()
    np.testing.assert_allclose(out[:, 0], v[:, 0], rtol=1e-6)  # a document of one token
    grads = jax.grad(lambda *qkv: (call(*qkv)[0] ** 2).sum(), argnums=(0, 1, 2))(q, k, v)
    assert all(np.isfinite(g).all() and not np.asarray(g[:, 6:]).any() for g in grads)


@pytest.mark.parametrize("impl", ["xla", "reference"])
def test_one_document_fills_the_row(impl):
    q, k, v = _packed(3)
    ids = jnp.full((1, 8), 7, jnp.int32)
    with_ids = attention(q, k, v, segment_ids=(ids, ids), impl=impl)
    for got, want in zip(with_ids, attention(q, k, v, impl=impl), strict=True):
        np.testing.assert_array_equal(got, want)


def test_memory_is_linear_in_the_length():
    def temp_bytes(length):
        array = jax.ShapeDtypeStruct((1, length, 2, 16), jnp.float32)
        loss = lambda q, k, v: attention(q, k, v, impl="xla")[0].sum()  # noqa: E731
        compiled = jax.jit(jax.grad(loss, (0, 1, 2))).lower(array, array, array).compile()
        return compiled.memory_analysis().temp_size_in_bytes

    short, long = temp_bytes(2048), temp_bytes(4096)
    assert long < 2.3 * short
    assert long < 4096 * 4096 * 2 * 4 / 4  # a quarter of one score matrix


@pytest.mark.parametrize("blocks", ["one", "looped"])
def test_it_runs_inside_shard_map(blocks, monkeypatch):
    """Fully manual and with varying types checked, where loop carries are the trap."""
    _set_blocks(monkeypatch, blocks)
    mesh = jax.make_mesh((8,), ("x",), axis_types=(jax.sharding.AxisType.Auto,))
    rng = np.random.default_rng(0)
    q, k, v = (jnp.asarray(rng.normal(size=(8, 20, 2, 4)), jnp.float32) for _ in range(3))
    ids = jnp.ones((8, 20), jnp.int32)

    def loss(q, k, v, ids):
        out, lse = attention(q, k, v, segment_ids=(ids, ids), impl="xla")
        return (out * out).sum(axis=(1, 2, 3)) + jnp.sin(lse).sum(axis=(1, 2))

    split = jax.shard_map(
        loss, mesh=mesh, in_specs=(P("x"),) * 4, out_specs=P("x"), check_vma=True
    )
    grads = [
        jax.jit(jax.grad(lambda *a, f=f: f(*a, ids).sum(), argnums=(0, 1, 2)))(q, k, v)
        for f in (split, loss)
    ]
    for got, want in zip(*grads, strict=True):
        assert max_relative_error(got, want) <= 1e-6


def test_cudnn_refuses_what_it_would_get_wrong(monkeypatch):
    """As on a GPU: each refusal by its reason, and the call that it can serve."""
    monkeypatch.setattr(cudnn, "target", lambda: Target("gpu", "NVIDIA H100", 132))
    wide = jnp.zeros((1, 8, 2, 256), jnp.bfloat16)
    q, k, v = (wide[..., :64],) * 3
    ids = jnp.ones((1, 8), jnp.int32)
    refusals = {
        "segment ids": (q, k, v, (ids, ids), None, None, 0.1),
        "sinks": (q, k, v, None, None, jnp.zeros(2), 0.1),
        "not float32": (*(a.astype(jnp.float32) for a in (q, k, v)), None, None, None, 0.1),
        "at most 128; got 64, 32": (q, k, v[..., :32], None, None, None, 0.1),
        "at most 128; got 256, 256": (wide, wide, wide, None, None, None, 0.1),
        "as many": (q[:, :4], k, v, None, None, None, 0.1),
    }
    for reason, arguments in refusals.items():
        assert reason in (cudnn.refusal(*arguments) or "served")
    assert cudnn.refusal(q, k, v, None, None, None, 0.1) is None
    assert cudnn.refusal(q, k, v, None, 4, None, 0.1) is None


def test_refusals_say_why():
    q, k, v = _packed(0)
    with pytest.raises(ValueError, match="cudnn.*cannot serve.*NVIDIA GPUs"):
        attention(q, k, v, impl="cudnn")
    places = (jnp.zeros((1, 8), jnp.int32),) * 2
    with pytest.raises(ValueError, match="impl='hopper' cannot serve.*it takes no positions"):
        attention(q, k, v, positions=places, impl="hopper")
    with pytest.raises(ValueError, match="unknown impl='flash'"):
        attention(q, k, v, impl="flash")
    with pytest.raises(ValueError, match="window=0 must be at least 1"):
        attention(q, k, v, window=0)
    with pytest.raises(ValueError, match="one dtype; got float32, bfloat16, float32"):
        attention(q, k.astype(jnp.bfloat16), v)
    with pytest.raises(ValueError, match="N a multiple of G"):
        attention(q, k[:, :, :1].repeat(3, axis=2), v, impl="xla")
