"""Runs the Triton grouped GEMM in Triton's interpreter, on a CPU, and compares with the definition.

    TRITON_INTERPRET=1 JAX_PLATFORMS=cpu python -m tests.deviceless.interpret_grouped_gemm_triton

The interpreter wants tensors of PyTorch's kind. `Host` is as much of one as it asks for, in NumPy.
It would multiply bfloat16 by its bits, as integers: `dot` widens them first, as tensor cores do.
What a kernel does not write stays NaN; an access past an array's end ends the process. JAX's side
of the call (types, options) is not run here.
"""

import ctypes
import mmap
from copy import copy

import jax
import jax.numpy as jnp
import jax_triton
import numpy as np
from triton.runtime.interpreter import interpreter_builder

from pallas_kernels.deviceless import GPUS
from pallas_kernels.grouped_gemm import reference, triton
from pallas_kernels.grouped_gemm.triton import Cut
from tests.oracle import max_relative_error

A100 = GPUS["a100"]
SMALL = Cut(rows=32, cols=16, depth=16, stages=2, warps=4, band=2)
WIDE = Cut(rows=16, cols=64, depth=32, stages=2, warps=4, band=3)
TYPES = {"bfloat16": "bfloat16", "float16": "float16", "float32": "float32", "int32": "int32"}
plain_dot = interpreter_builder.create_dot
# The interpreter cuts float32 off to bfloat16 where a GPU rounds.
ROUNDING = {"bfloat16": 2.0**-7, "float16": 2.0**-11, "float32": 1e-6}


class Host:
    """A copy of an array that the interpreter takes for a tensor, and its storage. It ends where
    a page ends, and the next page cannot be accessed."""

    def __init__(self, array):
        array, page = np.asarray(array), mmap.PAGESIZE
        size = -(-array.nbytes // page) * page
        memory = mmap.mmap(-1, size + page)
        end = ctypes.addressof(ctypes.c_char.from_buffer(memory)) + size
        assert ctypes.CDLL(None).mprotect(ctypes.c_void_p(end), page, 0) == 0
        self.array = np.ndarray(array.shape, array.dtype, memory, size - array.nbytes)
        self.array[...] = array
        self.dtype = TYPES[str(self.array.dtype)]

    def data_ptr(self):
        return self.array.ctypes.data

    def untyped_storage(self):
        return self

    def cpu(self):
        return self

    def new_empty(self, size, device):
        return copy(self)

    def set_(self, storage, *_):
        self.array = storage.array

    def copy_(self, storage):
        assert storage.array is self.array

    def storage_offset(self):
        return 0

    def size(self):
        return self.array.shape

    def stride(self):
        return self.array.strides


def call(*args, kernel, out_type, grid, num_warps, num_stages, compute_capability,
         backend_options, **sizes):  # fmt: skip
    """jax_triton.triton_call, by the interpreter."""
    out = Host(np.full(out_type.shape, np.nan, out_type.dtype))
    kernel[grid](*map(Host, args), out, **sizes)
    return jnp.array(out.array)


def dot(a, b, acc, *precision):
    """The interpreter's product, of bfloat16 too."""
    for operand in (a, b):
        if operand.data.dtype == np.uint16:
            operand.data = operand.data.view(jnp.bfloat16).astype(np.float32)
    return plain_dot(a, b, acc, *precision)


def step(gemm, x, w, dy, sizes):
    """y, dx, dw of one call."""
    y, pull = jax.vjp(lambda x, w: gemm(x, w, sizes), x, w)
    return y, *pull(dy)


def arrays(M, K, N, sizes, dtype):
    """x, w, dy and the sizes; NaN in all rows past the sum."""
    rng = np.random.default_rng(0)
    made = lambda *shape: jnp.asarray(rng.standard_normal(shape), dtype)  # noqa: E731
    x, w, dy, total = made(M, K), made(len(sizes), K, N), made(M, N), sum(sizes)
    x, dy = x.at[total:].set(jnp.nan), dy.at[total:].set(jnp.nan)
    return x, w, dy, jnp.array(sizes, jnp.int32)


def check(M, K, N, sizes, dtype="bfloat16", cut=SMALL):
    """All three products of one shape."""
    x, w, dy, sizes_G = arrays(M, K, N, sizes, dtype)
    found = step(lambda *a: triton.grouped_gemm(*a, A100, cut), x, w, dy, sizes_G)
    clipped = np.diff(np.minimum(np.cumsum([0, *sizes]), M))
    wide = (a.astype(jnp.float32) for a in (x, w, dy))
    wanted = step(reference.grouped_gemm, *wide, jnp.asarray(clipped, jnp.int32))
    for result, right in zip(found, wanted, strict=True):
        assert result.dtype == jnp.dtype(dtype)
        assert max_relative_error(result.astype(jnp.float32), right) < ROUNDING[dtype]
    y, dx, dw = found
    assert not y[sum(sizes) :].any() and not dx[sum(sizes) :].any()
    assert not dw[clipped == 0].any()
    print("right:", M, K, N, sizes, dtype)


def check_nan_stays(sizes=(20, 13, 30)):
    """In its group, in x and in dy."""
    x, w, dy, sizes_G = arrays(63, 24, 40, sizes, "bfloat16")
    gemm = lambda *a: triton.grouped_gemm(*a, A100, SMALL)  # noqa: E731
    clean = step(gemm, x, w, dy, sizes_G)
    soiled = step(gemm, x.at[20:33].set(jnp.nan), w, dy.at[20:33].set(jnp.inf), sizes_G)
    other = np.r_[0:20, 33:63]
    for before, after in zip(clean[:2], soiled[:2], strict=True):
        np.testing.assert_array_equal(before[other], after[other])
    np.testing.assert_array_equal(clean[2][np.r_[0, 2]], soiled[2][np.r_[0, 2]])
    assert jnp.isnan(soiled[0][20:33]).all() and jnp.isnan(soiled[2][1]).all()
    print("a NaN stays in its group")


def check_float32_weights():
    """The weight gradient is not rounded on its way."""
    x, w, dy, sizes_G = arrays(60, 24, 40, (35, 0, 20), "bfloat16")
    dw = triton.weight_gradient(x, dy, sizes_G, A100, SMALL, jnp.float32)
    wide = (a.astype(jnp.float32) for a in (x, w, dy))
    wanted = step(reference.grouped_gemm, *wide, sizes_G)[2]
    assert dw.dtype == jnp.float32 and max_relative_error(dw, wanted) < 1e-6
    print("float32 weight gradient")


def main() -> None:
    """Runs every check."""
    interpreter_builder.create_dot = dot
    jax_triton.triton_call = call
    check(100, 40, 56, (32, 0, 17, 51))  # whole tiles, an empty group, a border
    check(100, 33, 35, (33, 1, 15, 31), cut=WIDE)  # odd sizes; rows past the sum
    check(90, 48, 32, (0, 90, 0))  # all in one; nothing overhangs
    check(40, 16, 16, (0, 0))  # none at all
    check(1, 3, 5, (1,))
    check(4, 20, 20, (1, 1, 1))  # as many tiles as there can be
    check(70, 24, 40, (50, 50, 50))  # beyond the rows: clipped
    check(45, 20, 70, (9, 30, 6), "float16", WIDE)
    check(45, 20, 70, (9, 30, 6), "float32")
    check_nan_stays()
    check_float32_weights()


if __name__ == "__main__":
    main()
