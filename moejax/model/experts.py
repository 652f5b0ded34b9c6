"""The experts: two grouped GEMMs over rows sorted by expert, sizes read on the device.

The routing weight multiplies the activation *before* the second GEMM (memory-efficient
permutation): the output of an expert is then never needed again, and never saved.
"""

import jax
from flax import nnx
from jaxtyping import Array, Float, Int

from moejax.core import params
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
    ):
        self.impl = impl or None
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
        return grouped_mlp(x_sD, w_in, self.w_out[...], weights_s, sizes_e, impl=self.impl)
