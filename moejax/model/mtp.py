"""Multi-token prediction (DeepSeek-V3, 2024): modules that predict tokens after the next one.

Module d (from 0) works on the states h of the module before it, or of the main model after its
final norm, and on the tokens d + 1 ahead, by the model's own embedding and head:

    x_i = concat(norm(embed(t_{i+d+1})), norm(h_i)) proj
    h'_i = norm(layer(x)_i)                  the head of h'_i predicts t_{i+d+2}

The embedding comes first, against equation 21 of the report: so the published weights have it.
Nothing crosses the end of a document. A token without one d + 1 ahead of it in its own document is
padding to the module: of documents of n tokens, module d sees n - d - 1 and is asked for n - d - 2.

    tokens            a1 a2 a3  P | b1 b2 b3 b4 b5  P  P  P
    their targets     a2 a3  .  . | b2 b3 b4 b5  .  .  .  .
    module 0 is given a2 a3  .  . | b2 b3 b4 b5  .  .  .  .
    and asked for     a3  .  .  . | b3 b4 b5  .  .  .  .  .

Tokens are moved before they are embedded, on whole rows: what is split over tp or cp never is
moved.
"""

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Int, Shaped

from moejax.core import params
from moejax.core.mesh import Fold
from moejax.core.precision import PrecisionConfig
from moejax.model.block import Block, Inputs
from moejax.model.config import ModelConfig
from moejax.model.norm import RMSNorm
from moejax.model.stream import Stream, number_documents
from pallas_kernels import linear


class MTP(nnx.Module):
    """One module; its embedding and head are the model's."""

    def __init__(self, cfg: ModelConfig, fold: Fold, precision: PrecisionConfig, rngs: nnx.Rngs):
        self.enorm, self.hnorm, self.final_norm = (
            RMSNorm(cfg.dim, cfg.norm_eps, precision) for _ in range(3)
        )
        shape, dims = (2 * cfg.dim, cfg.dim), ("joined", "embed")
        self.proj = params.normal(rngs, shape, dims, cfg.init_std, precision)
        self.block = Block(cfg, cfg.mtp_kind, fold, precision, rngs)

    @jax.named_scope("predict_ahead")
    def __call__(
        self,
        h_tD: Float[Array, "t D"],
        stream: Stream,
        inputs: Inputs,
        choices: dict | None = None,
    ) -> tuple[Array, tuple[dict, dict], dict]:
        """Returns (normed states, ({"block": aux}, {}), {"block": choices}), as `Unit` does; the
        dicts of a dense block are empty."""
        assert inputs.next_tD is not None
        both_tD = jnp.concatenate([self.enorm(inputs.next_tD), self.hnorm(h_tD)], axis=1)
        mine = inputs.stream(stream, 0, None if choices is None else choices.get("block"))
        x_tD, aux, _ = self.block(linear(both_tD, self.proj[...]), mine)
        if not aux:
            return self.final_norm(x_tD), ({}, {}), {}
        made = {"block": aux.pop("experts")}
        return self.final_norm(x_tD), ({"block": aux}, {}), made


def ahead(batch: dict[str, Shaped[Array, "... L"]], by: int) -> dict[str, Int[Array, "... L"]]:
    """Returns the batch with tokens and targets from `by` places further on in the same document;
    where there is no such place, padding, without a target. Positions (and the order) stay."""
    ids: Int[Array, "... L"] = batch["segment_ids"]
    length, number = ids.shape[-1], number_documents(ids.reshape(-1, ids.shape[-1]))
    by, number = min(by, length), jnp.where(ids != 0, number.reshape(ids.shape), -1)

    def move(a, fill):
        widths = [(0, 0)] * (a.ndim - 1) + [(0, by)]
        return jnp.pad(a[..., by:], widths, constant_values=fill)

    inside = (move(number, -1) == number) & (ids != 0)
    kept = {name: batch[name] for name in ("positions", "order") if name in batch}
    return kept | {
        "tokens": jnp.where(inside, move(batch["tokens"], 0), 0),
        "targets": jnp.where(inside, move(batch["targets"], -1), -1),
        "segment_ids": jnp.where(inside, ids, 0),
    }
