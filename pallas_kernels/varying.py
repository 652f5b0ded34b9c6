"""What a kernel's result says of itself inside shard_map(check_vma=True)."""

import jax
import jax.numpy as jnp
from jax import lax


def varying_as(y, *operands):
    """Returns y, as varying over mesh axes as the operands are, for calls that say nothing of their
    result (plgpu.kernel, jax-triton): a slice that starts at zeros of theirs, to XLA y itself."""
    zero = sum(lax.full_like(a, 0, shape=(), dtype=jnp.int32) for a in operands)
    return y if varies_nowhere(zero) else lax.dynamic_slice_in_dim(y, zero, y.shape[0])


def varies_nowhere(x) -> bool:
    """Returns whether x is the same on all devices, as far as its type knows."""
    return not jax.typeof(x).manual_axis_type.varying
