"""What fused attention kernels share: the first visible key, sinks, the gradient rule, refusals."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.attention import fused, reference
from pallas_kernels.attention.visible import first_visible, key_blocks, query_blocks
from tests.oracle import max_relative_error

IDS = jnp.asarray([[3, 3, 3, 1, 0, 0, 2, 7, 7, 0], [5] * 10, [0, 0] + [4] * 5 + [0] * 3], jnp.int32)


@pytest.mark.parametrize("window", [None, 1, 3, 20])
@pytest.mark.parametrize("queries", [10, 7, 1])
@pytest.mark.parametrize("segmented", [False, True])
def test_the_first_visible_key_is_that_of_the_mask(segmented, queries, window):
    S = IDS.shape[1]
    segments = (IDS[:, S - queries :], IDS) if segmented else None
    rows, keys = jnp.arange(queries, dtype=jnp.int32), jnp.arange(S, dtype=jnp.int32)
    wanted = reference.visible(rows, keys, segments, window, S - queries)
    first = first_visible(segments, window, 3, queries, S)
    assert first.dtype == jnp.int32 and (first[:, 1:] >= first[:, :-1]).all()
    at = rows[:, None] + S - queries
    seen = (keys[None, None] >= first[:, :, None]) & (keys[None, None] <= at[None])
    np.testing.assert_array_equal(seen, jnp.broadcast_to(wanted, seen.shape))
    if segmented:
        nothing = segments[0] == 0
        np.testing.assert_array_equal(first[nothing], (at[None, :, 0] + 0 * first + 1)[nothing])


@pytest.mark.parametrize("window", [None, 3])
@pytest.mark.parametrize("sizes", [(4, 2), (2, 4), (3, 3), (16, 4)])
def test_blocks_bound_what_is_seen(sizes, window):
    """None outside begin and end sees or is seen; all do between the whole ones."""
    rows, keys = sizes
    first = first_visible((IDS, IDS), window, *IDS.shape, IDS.shape[1])
    L, at = IDS.shape[1], np.arange(IDS.shape[1])
    seen = (at >= np.asarray(first)[:, :, None]) & (at <= at[:, None])  # [B, queries, keys]
    for found, turned, (own, other) in (
        (key_blocks(first, rows, keys), seen, (rows, keys)),
        (query_blocks(first, rows, keys), seen.transpose(0, 2, 1), (keys, rows)),
    ):
        assert found.dtype == jnp.int32 and found.shape == (4, 3, -(-L // own))
        found = np.asarray(found)
        assert (np.diff(found, axis=0) >= 0).all() and (found >= 0).all()
        for b, i in np.ndindex(found.shape[1:]):
            begin, whole, whole_end, end = found[:, b, i] * other
            mine = turned[b, i * own : (i + 1) * own]
            assert not mine[:, :begin].any() and not mine[:, end:].any()
            assert mine[:, whole:whole_end].all()


def test_a_long_document_needs_masks_at_the_diagonal_alone():
    first = jnp.zeros((1, 64), jnp.int32)
    assert key_blocks(first, 8, 8)[:, 0, 5].tolist() == [0, 0, 5, 6]
    assert query_blocks(first, 8, 8)[:, 0, 5].tolist() == [5, 6, 8, 8]
    ends = key_blocks(first_visible(None, 8, 1, 64, 64), 8, 8)[:, 0, 5]
    assert ends.tolist() == [4, 5, 5, 6]


def _definition_as_kernels():
    """A forward and a backward of the contract, in obvious jnp."""

    def seen(first_BL, S):
        at = jnp.arange(S, dtype=jnp.int32)
        return (at[None, None] >= first_BL[:, :, None]) & (at[None, None] <= at[None, :, None])

    def scores(q, k, scale):
        k = jnp.repeat(k, q.shape[2] // k.shape[2], axis=2)
        return jnp.einsum("BLNH,BSNH->BNLS", q, k, precision="highest") * scale

    def forward(q, k, v, first_BL, scale):
        R, mask = q.shape[2] // k.shape[2], seen(first_BL, k.shape[1])[:, None]
        s = jnp.where(mask, scores(q, k, scale), reference.NOTHING)
        lse = jax.nn.logsumexp(s, axis=-1)
        lse = jnp.where(mask.any(-1), lse, reference.NOTHING)
        p = jnp.where(mask, jnp.exp(s - lse[..., None]), 0)
        out = jnp.einsum("BNLS,BSNV->BLNV", p, jnp.repeat(v, R, axis=2), precision="highest")
        return out, lse.transpose(0, 2, 1)

    def backward(q, k, v, first_BL, lse, do, correction, scale):
        R, mask = q.shape[2] // k.shape[2], seen(first_BL, k.shape[1])[:, None]
        turn = lambda x: x.transpose(0, 2, 1)[..., None]  # noqa: E731
        p = jnp.where(mask, jnp.exp(scores(q, k, scale) - turn(lse)), 0)
        dp = scores(do, v, 1.0)
        ds = p * (dp - turn(correction)) * scale
        group = lambda x: x.reshape(*x.shape[:2], -1, R, x.shape[3]).sum(3)  # noqa: E731
        dq = jnp.einsum("BNLS,BSNH->BLNH", ds, jnp.repeat(k, R, axis=2), precision="highest")
        dk = jnp.einsum("BNLS,BLNH->BSNH", ds, q, precision="highest")
        dv = jnp.einsum("BNLS,BLNV->BSNV", p, do, precision="highest")
        return dq, group(dk), group(dv)

    return fused.Kernels(forward, backward)


@pytest.mark.parametrize("sunk", [False, True])
def test_the_gradient_rule_and_the_sinks(sunk):
    rng = np.random.default_rng(0)
    draw = lambda *shape: jnp.asarray(rng.normal(size=shape), jnp.float32)  # noqa: E731
    B, L = IDS.shape
    arrays = draw(B, L, 4, 6), draw(B, L, 2, 6), draw(B, L, 2, 5), draw(4) if sunk else None
    d_out, d_lse = draw(B, L, 4, 5), draw(B, L, 4)
    kernels = _definition_as_kernels()

    def of(attend):
        call = lambda q, k, v, sinks: attend(q, k, v, (IDS, IDS), 4, sinks, 0.3)  # noqa: E731
        (out, lse), pull = jax.vjp(call, *arrays)
        empty = lse == reference.NOTHING
        return [out, lse, *(g for g in pull((d_out, jnp.where(empty, 0, d_lse))) if g is not None)]

    got = of(lambda *a: fused.attend(kernels, *a))
    for one, other in zip(got, of(reference.attention), strict=True):
        assert max_relative_error(one, other) <= 1e-5


@pytest.mark.parametrize(
    ("shape", "dtype", "scale", "reason"),
    [
        ((8, 8, 4, 64, 64), jnp.bfloat16, 0.1, None),
        ((8, 8, 4, 192, 128), jnp.float16, 0.1, None),
        ((8, 8, 4, 64, 64), jnp.float32, 0.1, "bfloat16 and float16"),
        ((8, 8, 4, 192, 192), jnp.bfloat16, 0.1, "head dims"),
        ((8, 9, 4, 64, 64), jnp.bfloat16, 0.1, "as many"),
        ((0, 0, 4, 64, 64), jnp.bfloat16, 0.1, "nothing"),
        ((8, 8, 4, 64, 64), jnp.bfloat16, 0.0, "above 0"),
    ],
)
def test_refusals(shape, dtype, scale, reason):
    L, S, N, H, V = shape
    arrays = (jnp.zeros((1, n, N, h), dtype) for n, h in ((L, H), (S, H), (S, V)))
    said = fused.refusal_of(*arrays, scale)
    assert said is None if reason is None else reason in str(said)
