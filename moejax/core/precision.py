"""Number formats, one for each purpose; every cast in the code names one of these."""

import dataclasses

import jax.numpy as jnp


@dataclasses.dataclass(frozen=True)
class PrecisionConfig:
    """dtypes by purpose, as names that numpy knows."""

    param_dtype: str = "float32"
    """Weights as they rest, and the optimizer's masters."""
    compute_dtype: str = "auto"
    """Matmul inputs and activations; "auto": bfloat16 where the device is fast in it."""
    accum_dtype: str = "float32"
    """Sums of gradients over microbatches; norms and losses."""
    router_dtype: str = "float32"
    """Router logits, scores and balance losses."""

    def __post_init__(self):
        for field in dataclasses.fields(self):
            name = getattr(self, field.name)
            if name == "auto" and field.name == "compute_dtype":
                continue
            try:
                known = jnp.issubdtype(jnp.dtype(name), jnp.floating)
            except TypeError:
                known = False
            if not known:
                raise ValueError(f"precision.{field.name}={name!r} is not a floating dtype")

    def dtype(self, purpose: str) -> jnp.dtype:
        """Returns the dtype of "param", "compute", "accum" or "router".

        "auto" that no run has settled (a module used alone) is float32.
        """
        name = getattr(self, f"{purpose}_dtype")
        return jnp.dtype("float32" if name == "auto" else name)


def at_least_float32(dtype: jnp.dtype) -> jnp.dtype:
    """Returns the dtype in which sums of such values are taken: float32, or float64 for float64."""
    return jnp.dtype(jnp.float64 if dtype == jnp.float64 else jnp.float32)
