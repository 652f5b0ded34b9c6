"""The experts: two grouped GEMMs over rows sorted by expert, sizes read on the device.

The routing weight multiplies the activation *before* the second GEMM (memory-efficient
permutation): the output of an expert is then never needed again, and never saved. Experts with
biases (gpt-oss) have theirs multiplied by it too: weight * (h w_out + b_out).
"""

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Int

from moejax.core import collectives, params
from moejax.core.mesh import Fold
from moejax.core.precision import PrecisionConfig
from pallas_kernels import grouped_mlp


class Experts(nnx.Module):
    """E gated MLPs; this device holds e = E/ep of them, and f = F/etp of each one's width."""

    def __init__(
        self,
        num_experts: int,
        dim: int,
        ffn_dim: int,
        *,
        std: float,
        out_std: float,
        fold: Fold,
        precision: PrecisionConfig,
        rngs: nnx.Rngs,
        impl: str = "",
        bias: bool = False,
        swiglu_limit: float = 0.0,
    ):
        self.impl, self.limit, self.fold = impl or None, swiglu_limit, fold
        for role, name, size in (
            ("ep", "num_experts", num_experts),
            ("etp", "moe.ffn_dim", ffn_dim),
        ):
            if size % fold.degree(role):
                raise ValueError(f"{name}={size} does not divide over {role}={fold.degree(role)}")
        dims = ("expert", "expert_embed", "glu", "expert_ffn")
        self.w_in = params.normal(rngs, (num_experts, dim, 2, ffn_dim), dims, std, precision)
        self.w_out = params.normal(
            rngs,
            (num_experts, ffn_dim, dim),
            ("expert", "expert_ffn", "expert_embed"),
            out_std,
            precision,
        )
        self.bias = bias
        if bias:
            make = lambda shape, dims: params.constant(shape, dims, 0.0, precision)  # noqa: E731
            self.b_in = make((num_experts, 2, ffn_dim), ("expert", "glu", "expert_ffn"))
            self.b_out = make((num_experts, dim), ("expert", "expert_embed"))

    @jax.named_scope("experts")
    def __call__(
        self,
        x_sD: Float[Array, "s D"],
        weights_s: Float[Array, " s"],
        sizes_e: Int[Array, " e"],
    ) -> Float[Array, "s D"]:
        """Returns weight * expert(x) of each row; rows past the sum of the sizes give zeros.

        With etp, each device returns its part of a sum.
        """
        w_in = self.w_in[...]
        w_in = params.merge_glu(w_in) if w_in.ndim == 4 else w_in
        args = (x_sD, w_in, self.w_out[...], weights_s, sizes_e)
        return grouped_mlp(*args, **self._biases(), limit=self.limit, impl=self.impl)

    def _biases(self) -> dict[str, Array]:
        if not self.bias:
            return {}
        b_in, b_out_eD = self.b_in[...], self.b_out[...]
        b_in_ef = params.merge_glu(b_in) if b_in.ndim == 3 else b_in
        # Of the devices whose parts are added up, one adds the bias.
        first = collectives.axis_index(self.fold["etp"]) == 0
        return {"b_in_GF2": b_in_ef, "b_out_GD": jnp.where(first, b_out_eD, 0)}
