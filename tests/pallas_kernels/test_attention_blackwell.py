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
from pallas_kernels.attention import blackwell, blackwell_parts, reference
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
