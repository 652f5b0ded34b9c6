"""One layer, and the unit of a few layers that a scan repeats."""

from math import sqrt
from typing import NamedTuple

from flax import nnx
from jaxtyping import Array, Float, Int

from moejax.core.mesh import Fold
from moejax.model.attention import ATTENTIONS
from moejax.model.attention.memory import Memory
from moejax.model.config import ModelConfig
from moejax.model.mlp import MLP
from moejax.model.moe import MoE
from moejax.model.norm import RMSNorm
from moejax.model.stream import Stream


class Block(nnx.Module):
    """x + attention(norm(x)), then x + MLP or MoE(norm(x))."""

    def __init__(self, cfg: ModelConfig, kind: str, fold: Fold, precision, rngs: nnx.Rngs):
        std, out_std = cfg.init_std, cfg.init_std / sqrt(2 * cfg.num_layers)
        kinds = dict(std=std, out_std=out_std, fold=fold, precision=precision, rngs=rngs)
        self.attention_norm = RMSNorm(cfg.dim, cfg.norm_eps, precision)
        window = cfg.attention.window if kind.islower() else 0
        self.attention = ATTENTIONS[cfg.attention.kind](
            cfg.attention, cfg.dim, window=window, eps=cfg.norm_eps, **kinds
        )
        self.mlp_norm = RMSNorm(cfg.dim, cfg.norm_eps, precision)
        if kind.upper() == "M":
            self.moe = MoE(cfg.moe, cfg.dim, vocab_size=cfg.vocab_size, **kinds)
        else:
            self.mlp = MLP(cfg.dim, cfg.ffn_dim, **kinds)
        self.kind = kind.upper()

    def __call__(
        self, x_tD: Float[Array, "t D"], stream: Stream, held: Memory | None = None
    ) -> tuple[Array, dict, Memory | None]:
        """Returns (x_tD, the MoE's aux, {} for a dense block; what attention is to hold)."""
        y_tD, held = self.attention(self.attention_norm(x_tD), stream, held)
        x_tD = x_tD + y_tD
        normed_tD = self.mlp_norm(x_tD)
        if self.kind == "D":
            return x_tD + self.mlp(normed_tD), {}, held
        y_tD, aux = self.moe(normed_tD, stream)
        return x_tD + y_tD, aux, held


class Inputs(NamedTuple):
    """What, beside x, differs between the units of a stack, or within one."""

    layer: Int[Array, "..."]
    """Number of the first MoE layer."""
    given_MtK: Int[Array, "... M t K"] | None
    """Experts that each of the unit's M MoE layers has to choose."""
    probe_M: Float[Array, "... M"] | None
    """See `Draw.probe_N`."""
    held: dict[str, Memory] | None = None
    """What each block's attention holds of the tokens before."""
    next_tD: Float[Array, "... t D"] | None = None
    """Embeddings of the tokens that a further module is given (see `mtp`)."""

    def stream(self, stream: Stream, nth: int, recalled_tK: Array | None) -> Stream:
        """Returns the stream as the unit's block behind `nth` MoE blocks sees it."""
        return stream._replace(
            layer=self.layer + nth,
            given_tK=_nth(self.given_MtK, nth),
            probe=_nth(self.probe_M, nth),
            recalled_tK=recalled_tK,
        )


def _nth(x_M: Array | None, nth: int) -> Array | None:
    """Returns x_M[nth]; None of nothing, and for a dense block behind the last MoE layer."""
    return None if x_M is None or nth == len(x_M) else x_M[nth]


class Unit(nnx.Module):
    """The layers that one step of the scan runs."""

    def __init__(self, cfg: ModelConfig, kinds: str, fold: Fold, precision, rngs: nnx.Rngs):
        self.num_blocks = len(kinds)
        for i, kind in enumerate(kinds):
            setattr(self, f"block_{i}", Block(cfg, kind, fold, precision, rngs))

    def __call__(self, x_tD, stream: Stream, inputs: Inputs, choices: dict | None = None):
        """Returns (x_tD, ({block name: aux}, {block name: what attention is to hold}), {block name:
        choices}); aux and choices of the MoE blocks, of which `inputs.layer` numbers the first; the
        choices are given where this is computed again."""
        auxes, holds, made = {}, {}, {}
        for i in range(self.num_blocks):
            name = f"block_{i}"
            recalled_tK = None if choices is None else choices.get(name)
            mine = inputs.stream(stream, len(auxes), recalled_tK)
            held = None if inputs.held is None else inputs.held[name]
            x_tD, aux, holds[name] = getattr(self, name)(x_tD, mine, held)
            if aux:
                made[name] = aux.pop("experts")
                auxes[name] = aux
        return x_tD, (auxes, holds), made
