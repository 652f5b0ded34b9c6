"""The gated MLP (SwiGLU; Shazeer, 2020), split over tp: w_out(silu(x w_gate) * (x w_up))."""

import jax
from flax import nnx
from jaxtyping import Array, Float

from moejax.core import collectives, params
from moejax.core.mesh import Fold
from moejax.core.precision import PrecisionConfig
from pallas_kernels import linear, swiglu


class MLP(nnx.Module):
    """A dense gated MLP, also used as the shared expert."""

    def __init__(
        self,
        dim: int,
        ffn_dim: int,
        *,
        std: float,
        out_std: float,
        fold: Fold,
        precision: PrecisionConfig,
        rngs: nnx.Rngs,
    ):
        self.fold = fold
        self.w_in = params.normal(rngs, (dim, 2, ffn_dim), ("embed", "glu", "ffn"), std, precision)
        self.w_out = params.normal(rngs, (ffn_dim, dim), ("ffn", "embed"), out_std, precision)

    @jax.named_scope("mlp")
    def __call__(self, x_tD: Float[Array, "t D"]) -> Float[Array, "t D"]:
        """Returns the MLP of every token; tokens are split over tp before and after."""
        x_TD = collectives.all_gather(x_tD, self.fold["tp"])
        w_in = self.w_in[...]
        h_Tf = swiglu(linear(x_TD, params.merge_glu(w_in) if w_in.ndim == 3 else w_in))
        return collectives.psum_scatter(linear(h_Tf, self.w_out[...]), self.fold["tp"])
