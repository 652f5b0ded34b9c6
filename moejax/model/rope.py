"""Rotary position embedding (Su et al., 2021) and the ways it is stretched to longer texts.

Pair i of a head turns by position * speed_i, speed_i = theta^(-2i / dim). YaRN (Peng et al., 2023)
divides the speed of pairs that turn few times over the original length, keeps that of the fast
ones, and has *two* factors beside: `rope_factor` multiplies cos and sin, `softmax_factor` the scale
of the softmax. The table is made once per call of a model; `apply_rope` turns with it.
"""

import dataclasses
from math import ceil, floor, log, pi

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

Table = tuple[Float[Array, "B L h"], Float[Array, "B L h"]]
LAYOUTS = ("half", "interleaved")
SCALINGS = ("none", "linear", "yarn", "llama3")


@dataclasses.dataclass(frozen=True)
class RopeConfig:
    """Rotary positions, and how they are stretched."""

    theta: float = 10000.0
    """Base of the angles."""
    dim: int = 0
    """Dims that turn, even. GQA: the first of each head (GLM-4.5: half of them); 0: all. MLA: those
    that queries and the shared key have beside head_dim; 0: 64."""
    layout: str = "half"
    """Pairs: "half" turns dim i with i + dim/2, "interleaved" 2i with 2i + 1 (DeepSeek)."""
    scaling: str = "none"
    """How positions are stretched: "none", "linear", "yarn" (DeepSeek, gpt-oss), "llama3"."""
    factor: float = 1.0
    """Stretched length over the original one."""
    original_length: int = 4096
    """Tokens of the texts before they were stretched (yarn, llama3)."""
    beta_fast: float = 32.0
    """Pairs that turn this often over the original length keep their speed (llama3:
    high_freq_factor, 4)."""
    beta_slow: float = 1.0
    """Pairs that turn at most so often are slowed by `factor` (llama3: low_freq_factor)."""
    mscale: float = 1.0
    """yarn: cos and sin are multiplied by m(mscale) / m(mscale_all_dim), m(s) = 0.1 s ln(factor) +
    1."""
    mscale_all_dim: float = 0.0
    """yarn: the scale of the softmax is multiplied by m(mscale_all_dim)^2."""
    attention_factor: float = 0.0
    """yarn: what cos and sin are multiplied by instead; 0: computed from mscale."""
    truncate: bool = True
    """yarn: the ramp between slow and fast begins and ends at whole pairs (gpt-oss: false)."""

    def __post_init__(self):
        for name, known in (("layout", LAYOUTS), ("scaling", SCALINGS)):
            if getattr(self, name) not in known:
                raise ValueError(
                    f"rope.{name}={getattr(self, name)!r}: choose from {', '.join(known)}"
                )
        if self.dim < 0 or self.dim % 2:
            raise ValueError(f"rope.dim={self.dim} must be even, for dims turn in pairs")
        if self.factor < 1 or (self.scaling == "none" and self.factor != 1):
            raise ValueError(
                f"rope.factor={self.factor} with scaling={self.scaling!r}: choose at least 1, and "
                "a scaling (yarn, linear, llama3) for more"
            )
        if self.beta_fast < self.beta_slow:
            raise ValueError(
                f"rope.beta_fast={self.beta_fast} is below beta_slow={self.beta_slow}"
            )

    def _m(self, mscale: float) -> float:
        return 0.1 * mscale * log(self.factor) + 1.0 if self.scaling == "yarn" else 1.0

    @property
    def rope_factor(self) -> float:
        """What cos and sin are multiplied by."""
        if self.scaling == "yarn" and self.attention_factor:
            return self.attention_factor
        return self._m(self.mscale) / self._m(self.mscale_all_dim)

    @property
    def softmax_factor(self) -> float:
        """What the scale of the softmax, head_dim**-0.5, is multiplied by."""
        return self._m(self.mscale_all_dim) ** 2

    def speeds(self, dim: int) -> Float[np.ndarray, " h"]:
        """Returns the angle per position, float64, of each of `dim`/2 pairs."""
        speed_h = self.theta ** -(np.arange(0, dim, 2, dtype=np.float64) / dim)
        if self.scaling == "none":
            return speed_h
        if self.scaling == "linear":
            return speed_h / self.factor
        if self.scaling == "llama3":
            turns_h = self.original_length * speed_h / (2 * pi)
            slow_h = (self.beta_fast - turns_h) / max(self.beta_fast - self.beta_slow, 0.001)
        else:
            first, last = (self._pair(turns, dim) for turns in (self.beta_fast, self.beta_slow))
            if self.truncate:
                first, last = floor(first), ceil(last)
            first, last = max(first, 0), min(last, dim - 1)
            slow_h = (np.arange(dim // 2) - first) / max(last - first, 0.001)
        slow_h = np.clip(slow_h, 0, 1)
        return speed_h * (1 - slow_h) + speed_h / self.factor * slow_h

    def _pair(self, turns: float, dim: int) -> float:
        """Which pair (a fraction) turns so often over the original length."""
        return dim * log(self.original_length / (turns * 2 * pi)) / (2 * log(self.theta))


def rope_table(positions_BL: Int[Array, "B L"], dim: int, cfg: RopeConfig, dtype) -> Table:
    """Returns (cos, sin) of position * speed, both times `cfg.rope_factor`, for `dim` dims."""
    speed_h = jnp.asarray(cfg.speeds(dim), dtype)
    angle_BLh = positions_BL.astype(dtype)[..., None] * speed_h[None, None]
    return jnp.cos(angle_BLh) * cfg.rope_factor, jnp.sin(angle_BLh) * cfg.rope_factor


def apply_rope(
    x_BLNH: Float[Array, "B L N H"], table: Table, layout: str = "half"
) -> Float[Array, "B L N H"]:
    """Returns x with its first dims, as many as the table turns, turned in pairs; dtype of x."""
    cos, sin = (t[:, :, None, :] for t in table)
    dim = 2 * cos.shape[-1]
    wide = x_BLNH[..., :dim].astype(cos.dtype)
    if layout == "half":
        first, second = jnp.split(wide, 2, axis=-1)
    else:
        first, second = wide[..., ::2], wide[..., 1::2]
    pair = first * cos - second * sin, second * cos + first * sin
    if layout == "half":
        turned = jnp.concatenate(pair, axis=-1)
    else:
        turned = jnp.stack(pair, axis=-1).reshape(wide.shape)
    turned = turned.astype(x_BLNH.dtype)
    return turned if dim == x_BLNH.shape[-1] else jnp.concatenate([turned, x_BLNH[..., dim:]], -1)
