"""The shape of the decoder."""

import dataclasses

from moejax.model.attention import AttentionConfig
from moejax.model.moe import MoEConfig
from moejax.model.stack import REMAT


@dataclasses.dataclass(frozen=True)
class ModelConfig:
    """Shape of the decoder."""

    vocab_size: int = 4096
    """Tokens V that the model knows: the ids of its inputs and the width of its logits."""
    vocab_multiple: int = 1
    """Embedding and head are stored with rows of zeros up to a multiple of this, so that they
    divide over tp, or fit tiles (128). Padding counts in no softmax, and its gradient is 0."""
    dim: int = 256
    """Width D of the residual stream."""
    num_layers: int = 4
    """Layers in all."""
    first_k_dense: int = 0
    """Layers at the start with a dense MLP instead of experts."""
    pattern: str = "M"
    """Kinds of the layers after those, repeated: "M" a MoE layer, "D" a dense one; in lower case
    ("m", "d") with attention.window. first_k_dense layers have it where the whole pattern does."""
    ffn_dim: int = 1024
    """Width of a dense MLP."""
    attention: AttentionConfig = AttentionConfig()
    """Every layer's attention."""
    moe: MoEConfig = MoEConfig()
    """Every MoE layer."""
    mtp_depth: int = 0
    """Modules that predict further tokens, one after the other (DeepSeek-V3): the first predicts
    the token after the next. Training alone runs them; `train.mtp_coeff` weighs their loss."""
    norm_eps: float = 1e-6
    """Added to the mean square in RMSNorm."""
    tied: bool = False
    """The head is the embedding, transposed."""
    init_std: float = 0.02
    """Standard deviation of initial weights; projections back into the residual stream get
    init_std / sqrt(2 num_layers) (GPT-2)."""
    remat: str = "none"
    """What the backward pass computes again: "none", "full" (whole layers), or "selective": all but
    the rows that came from other devices, so that nothing travels twice."""

    def __post_init__(self):
        if self.vocab_multiple < 1:
            raise ValueError(f"model.vocab_multiple={self.vocab_multiple} must be at least 1")
        if self.mtp_depth < 0:
            raise ValueError(f"model.mtp_depth={self.mtp_depth} must be 0 (none) or more")
        if self.remat not in REMAT:
            raise ValueError(f"model.remat={self.remat!r}: choose from {', '.join(REMAT)}")
        if not self.pattern or set(self.pattern) - set("MDmd"):
            raise ValueError(
                f"model.pattern={self.pattern!r}: letters M (MoE) and D (dense) only, in lower "
                "case for layers with attention.window"
            )
        if (self.pattern != self.pattern.upper()) != bool(self.attention.window):
            raise ValueError(
                f"model.pattern={self.pattern!r} with attention.window={self.attention.window}: "
                "layers in lower case have a window, and a window needs some (gpt-oss: 'mM')"
            )
        rest = self.num_layers - self.first_k_dense
        if rest < 0 or rest % len(self.pattern):
            raise ValueError(
                f"model.num_layers={self.num_layers} less first_k_dense={self.first_k_dense} "
                f"is not a multiple of the pattern {self.pattern!r}"
            )

    @property
    def padded_vocab(self) -> int:
        """Rows of the embedding, columns of the head, as they are stored."""
        return -(-self.vocab_size // self.vocab_multiple) * self.vocab_multiple

    def worst_case(self) -> "ModelConfig":
        """Returns the same model with room, on every device, for whatever may arrive there. Where
        there was a budget, tokens go in pieces: the room is little more than a balanced load's."""
        pieces = 0 if self.moe.budget else self.moe.pieces
        return dataclasses.replace(
            self, moe=dataclasses.replace(self.moe, budget=0.0, pieces=pieces)
        )

    def stacks(self) -> tuple[tuple[str, int], ...]:
        """Returns (kinds of one unit, how many) of each run of equal layers."""
        dense, rest = self.first_k_dense, self.num_layers - self.first_k_dense
        first = "d" if self.pattern.islower() else "D"
        runs = ((first, dense), (self.pattern, rest // len(self.pattern)))
        return tuple((kinds, count) for kinds, count in runs if count)

    def kinds(self) -> str:
        """Returns the kind of every layer, e.g. "DMMM", windows left out."""
        return "".join(kinds * count for kinds, count in self.stacks()).upper()

    @property
    def mtp_kind(self) -> str:
        """The kind of a further module's layer: that of the last layer."""
        return self.stacks()[-1][0][-1]

    def all_kinds(self) -> str:
        """Returns the kind of every layer, those of the further modules last."""
        return self.kinds() + self.mtp_kind.upper() * self.mtp_depth

    def windows(self) -> tuple[int, ...]:
        """Returns the window of every layer, 0: none."""
        kinds = "".join(kinds * count for kinds, count in self.stacks())
        return tuple(self.attention.window if kind.islower() else 0 for kind in kinds)
