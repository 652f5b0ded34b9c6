"""The Blackwell attention in Mosaic's interpreter, races detected, and through its compiler.

bfloat16 or float16 operands, compared with the definition in float32. The kernels round the weights
and the scores' gradients to the dtype for the second product, and every result on writing: 2^-9 of
a value each in bfloat16, of which sums keep less.
"""

import re
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import mosaic_gpu as plgpu
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from pallas_kernels import attention as public
from pallas_kernels.attention import blackwell, blackwell_backward, blackwell_parts, reference
from pallas_kernels.attention.visible import first_visible
from tests.deviceless.child import printed
from tests.oracle import max_relative_error

TOLERANCE = {"bfloat16": 2.0**-7, "float16": 2.0**-9}
# name: ((B, L, N, G, H, V), lengths of documents by row (negative: padding), window, dtype)
CASES = {
    "causal, blocks without a mask": ((1, 300, 1, 1, 64, 64), None, None, "bfloat16"),
    "documents, padding, an empty row, groups": (
        (2, 272, 4, 2, 64, 64),
        ([3, 100, 27, -20, 70, 40, -12], [-272]),
        None,
        "bfloat16",
    ),
    "windows within documents": ((1, 330, 2, 1, 64, 64), ([140, -6, 184],), 70, "bfloat16"),
    "one window": ((1, 200, 1, 1, 64, 64), None, 1, "bfloat16"),
    "latent attention": ((1, 136, 1, 1, 192, 128), ([70, 66],), None, "bfloat16"),
    "float16, wide": ((1, 129, 2, 2, 128, 128), ([129],), None, "float16"),
    "few queries": ((1, 5, 1, 1, 64, 64), ([2, 3],), None, "bfloat16"),
}


@pytest.fixture(autouse=True)
def _interpreted():
    with plgpu.force_gpu_interpret_mode(plgpu.InterpretGPUParams(detect_races=True)):
        yield


def _ids(documents):
    """Documents of these lengths by row, numbered so that ids neither rise nor start at 1."""
    rows = []
    for lengths in documents:
        ids = [0 if length < 0 else 100 - at for at, length in enumerate(lengths)]
        rows.append(np.repeat(ids, np.abs(lengths)))
    return jnp.asarray(np.stack(rows), jnp.int32)


def _operands(case):
    """((q, k, v), (do, dlse), segment ids, window)"""
    (B, L, N, G, H, V), documents, window, dtype = CASES[case]
    rng = np.random.default_rng(0)
    draw = lambda *shape: jnp.asarray(rng.normal(size=shape), jnp.float32)  # noqa: E731
    arrays = draw(B, L, N, H) * 2, draw(B, L, G, H), draw(B, L, G, V), draw(B, L, N, V)
    *qkv, do = (a.astype(dtype) for a in arrays)
    segments = None if documents is None else (_ids(documents),) * 2
    return qkv, (do, draw(B, L, N)), segments, window


@partial(jax.jit, static_argnames=("attend", "window"))
def _run(attend, qkv, cotangents, segments, window, sinks=None):
    """out, lse, which rows are empty, and the gradients."""

    def call(q, k, v, sinks):
        return attend(q, k, v, segments, window, sinks, q.shape[-1] ** -0.5)

    (out, lse), pull = jax.vjp(call, *qkv, sinks)
    do, dlse = cotangents
    empty = lse < -1e29
    grads = pull((do.astype(out.dtype), jnp.where(empty, 0, dlse)))
    return [out, jnp.where(empty, 0, lse), empty, *(g for g in grads if g is not None)]


def _agree(got, want, tolerance):
    for name, one, other in zip(
        ("out", "lse", "empty", "dq", "dk", "dv", "dsinks"), got, want, strict=False
    ):
        error = max_relative_error(one, other)
        assert error <= (1e-5 if name == "lse" else tolerance), (name, error)


def _wide(qkv):
    return [a.astype(jnp.float32) for a in qkv]


@pytest.mark.parametrize("case", CASES)
def test_equals_the_definition(case):
    qkv, cotangents, segments, window = _operands(case)
    got = _run(blackwell.attention, qkv, cotangents, segments, window)
    want = _run(reference.attention, _wide(qkv), cotangents, segments, window)
    dtype = CASES[case][-1]
    assert [str(a.dtype) for a in got] == [dtype, "float32", "bool", *[dtype] * 3]
    _agree(got, want, TOLERANCE[dtype])
    empty = np.asarray(want[2])
    assert not np.asarray(got[0])[empty].any() and not np.asarray(got[3])[empty].any()


def test_query_heads_stay_together_where_there_is_enough_to_do(monkeypatch):
    """dk and dv summed over the group in the kernel: as exact as by parts."""
    monkeypatch.setattr(blackwell_backward, "BUSY", 0)
    qkv, cotangents, segments, window = _operands("documents, padding, an empty row, groups")
    together = lambda *args: blackwell.attention(*args)  # noqa: E731 (compiled on its own)
    got = _run(together, qkv, cotangents, segments, window)
    want = _run(reference.attention, _wide(qkv), cotangents, segments, window)
    _agree(got, want, TOLERANCE["bfloat16"])


def test_how_query_heads_are_split():
    enough = blackwell_backward.BUSY
    split = blackwell_backward.splits_of
    assert [split(8, enough // n) for n in (1, 2, 4, 100)] == [1, 2, 4, 8]
    assert split(6, enough // 2 - 1) == 3 and split(1, 1) == 1


def test_scores_that_grow_block_by_block():
    """Every block's maximum is far above the last one's, so that out is scaled anew each time; and
    then far below, so that it is not."""
    rng, L = np.random.default_rng(1), 256
    q = jnp.ones((1, L, 1, 64), jnp.bfloat16)
    v, do = (jnp.asarray(rng.normal(size=(1, L, 1, 64)), jnp.bfloat16) for _ in range(2))
    height = jnp.asarray([0.0, 2.0, 8.0, 3.0], jnp.float32).repeat(64) + rng.normal(size=L) / 8
    k = jnp.broadcast_to(height.astype(jnp.bfloat16)[None, :, None, None], v.shape)
    cotangents = do, jnp.asarray(rng.normal(size=(1, L, 1)), jnp.float32)
    got = _run(blackwell.attention, (q, k, v), cotangents, None, None)
    want = _run(reference.attention, _wide((q, k, v)), cotangents, None, None)
    _agree(got, want, TOLERANCE["bfloat16"])


def test_what_no_block_visits_is_not_read():
    """NaN in the keys of whole blocks that no query of a tile sees."""
    qkv, cotangents, _, _ = _operands("causal, blocks without a mask")
    segments = (_ids([[128, 128, 44]]),) * 2
    want = _run(blackwell.attention, qkv, cotangents, segments, None)
    bad = [a.at[:, 128:256].set(jnp.nan) for a in qkv]
    got = _run(blackwell.attention, bad, cotangents, segments, None)
    for name in (0, 1, 3, 4, 5):
        for rows in (slice(0, 128), slice(256, 300)):
            np.testing.assert_array_equal(got[name][:, rows], want[name][:, rows])


def test_in_a_shard_map_that_checks_types_with_sinks():
    """One device: the interpreter mixes up kernels that several devices run at once."""
    qkv, cotangents, segments, _ = _operands("few queries")
    sinks = jnp.asarray([0.5], jnp.float32)

    def local(qkv, cotangents, segments, sinks):
        return _run(blackwell.attention, qkv, cotangents, segments, 3, sinks)

    mesh = Mesh(jax.devices()[:1], ("x",))
    run = jax.jit(jax.shard_map(local, mesh=mesh, in_specs=P("x"), out_specs=P("x")))
    got = run(qkv, cotangents, segments, sinks)
    want = _run(reference.attention, _wide(qkv), cotangents, segments, 3, sinks)
    assert len(got) == 7
    _agree(got, want, TOLERANCE["bfloat16"])


@pytest.mark.parametrize("window", [None, 100])
@pytest.mark.parametrize("offset", [0, 40])
def test_bounds_are_those_of_the_mask(window, offset):
    """Exactly the blocks where something is seen, from the first to the last, and all of it."""
    L = 700
    ids = _ids([[100, 1, -30, 200, 129, -40, 200], [-700], [600, -100], [700], [9] * 70 + [70]])
    S = L + offset
    keys = jnp.pad(ids, ((0, 0), (offset, 0)), constant_values=99)
    rows, at = jnp.arange(L, dtype=jnp.int32), jnp.arange(S, dtype=jnp.int32)
    seen = np.asarray(reference.visible(rows, at, (ids, keys), window, offset))
    first = first_visible((ids, keys), window, *ids.shape, S)

    def blocks(array, rows, columns):
        B, R, C = array.shape
        missing = (0, 0), (0, -R % rows), (0, -C % columns)
        array = np.pad(array, missing, constant_values=False)
        B, R, C = array.shape
        return array.reshape(B, R // rows, rows, C // columns, columns).transpose(0, 1, 3, 2, 4)

    def check(bounds, some, every):
        for b, tile in np.ndindex(bounds.shape[:2]):
            lo, hi, plain_from, plain_to = bounds[b, tile]
            for found, (from_, to) in (some, (lo, hi)), (every, (plain_from, plain_to)):
                held = np.flatnonzero(found[b, tile]) if tile < found.shape[1] else []
                assert (from_, to) == (min(held), max(held) + 1) if len(held) else from_ == to

    by_tile = blocks(seen, 128, 64)
    by_keys = np.asarray(blackwell_parts.key_bounds(first, S, 64, 2))
    check(by_keys, by_tile.any((3, 4)), by_tile.all((3, 4)))
    by_tile = blocks(seen.transpose(0, 2, 1), 128, 64)
    by_queries = np.asarray(blackwell_parts.query_bounds(first, S, 64))
    check(by_queries, by_tile.any((3, 4)), by_tile.all((3, 4)))


def test_only_programs_for_blackwell_are_served():
    qkv, _, segments, _ = _operands("few queries")
    with pytest.raises(ValueError, match="blackwell.*cannot serve.*runs on Blackwell GPUs"):
        public(*qkv, segment_ids=segments, impl="blackwell")


@pytest.mark.deviceless
@pytest.mark.parametrize("gpu", ["gb200", "gb300"])
@pytest.mark.parametrize("dims", [(64, 64), (128, 128), (192, 128)], ids=str)
def test_compiles_without_spills(gpu, dims, tmp_path):
    """All three kernels, as the public function chooses them inside shard_map: tensor cores used,
    no local memory, within shared and tensor memory."""
    said = printed("compile_attention_blackwell", gpu, *dims, dump=tmp_path)
    assert "kernels: 3" in said
    read = lambda kind: [p.read_text(errors="replace") for p in tmp_path.glob(f"*.{kind}")]  # noqa: E731
    codes, reports, budgets = read("ptx"), read("ptxas"), read("resources.txt")
    assert len(codes) == len(reports) == len(budgets) == 3
    for code in codes:
        assert "tcgen05.mma" in code and "ex2.approx" in code and ".local" not in code
    for report in reports:
        assert "0 bytes spill stores, 0 bytes spill loads" in report, report
        assert re.search(r"\b0 stack\b.*\b0 bytes lmem", report), report
        assert ("sm_103a" if gpu == "gb300" else "sm_100a") in report, report
    for budget in budgets:
        assert int(re.findall(r"tmem_scratch_cols=(\d+)", budget)[0]) <= 512, budget
        assert int(re.findall(r"smem_scratch_bytes=(\d+)", budget)[0]) <= 224 * 1024, budget
