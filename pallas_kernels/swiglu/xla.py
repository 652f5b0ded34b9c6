"""SwiGLU whose backward keeps h alone; plain autodiff would keep four float32 arrays like it."""

from functools import partial

import jax
import jax.numpy as jnp

from pallas_kernels.swiglu import reference


@partial(jax.custom_vjp, nondiff_argnums=(2,))
def swiglu(h_MF2, weights_M, limit):
    """See the package."""
    return reference.swiglu(h_MF2, weights_M, limit)


def _forward(h_MF2, weights_M, limit):
    return swiglu(h_MF2, weights_M, limit), (h_MF2, weights_M)


def _backward(limit, saved, dy_MF):
    """The weight gets the unweighted activation . dy."""
    h_MF2, weights_M = saved
    wide = jnp.float64 if h_MF2.dtype == jnp.float64 else jnp.float32
    gate, up = jnp.split(h_MF2.astype(wide), 2, axis=-1)
    dy = dy_MF.astype(wide)
    by_gate, by_up, value = reference.slopes(gate, up, limit)
    scaled = dy if weights_M is None else dy * weights_M.astype(wide)[..., None]
    d_gate, d_up = (scaled * by_gate).astype(h_MF2.dtype), (scaled * by_up).astype(h_MF2.dtype)
    # Barriers: fused into one loop, the two halves and the sum over a row run scalar on XLA:CPU.
    dh = jnp.concatenate(jax.lax.optimization_barrier((d_gate, d_up)), axis=-1)
    if weights_M is None:
        return dh, None
    d_weights = jax.lax.optimization_barrier(dy * value).sum(axis=-1)
    return dh, d_weights.astype(weights_M.dtype)


swiglu.defvjp(_forward, _backward)
