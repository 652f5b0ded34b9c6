"""Rotary positions as config.json has them, in either of its two shapes."""

from collections.abc import Mapping
from typing import Any

from moejax.model.rope import RopeConfig

# Our field -> their key, and the value that an absent key stands for.
YARN = {
    "factor": ("factor", 1.0),
    "beta_fast": ("beta_fast", 32.0),
    "beta_slow": ("beta_slow", 1.0),
    "attention_factor": ("attention_factor", 0.0),
    "truncate": ("truncate", True),
}
LLAMA3 = {
    "factor": ("factor", 8.0),
    "beta_slow": ("low_freq_factor", 1.0),
    "beta_fast": ("high_freq_factor", 4.0),
}
KINDS = {"default": {}, "linear": {"factor": ("factor", 1.0)}, "yarn": YARN, "llama3": LLAMA3}


def rope_from_hf(hf: Mapping[str, Any], *, dim: int = 0, layout: str = "half") -> dict[str, Any]:
    """Returns {our leaf: value}. Raises ValueError for a scaling that is not known."""
    said = dict(hf.get("rope_parameters") or hf.get("rope_scaling") or {})
    kind = said.get("rope_type") or said.get("type") or "default"
    if kind not in KINDS:
        raise ValueError(f"rope_type={kind!r}: known are {', '.join(KINDS)}")
    made = {ours: said.get(key) or other for ours, (key, other) in KINDS[kind].items()}
    if kind == "yarn":
        made["truncate"] = said.get("truncate", True)
        both = said.get("mscale"), said.get("mscale_all_dim")
        # cos and sin: m(mscale) / m(mscale_all_dim) if both are there and not 0, else m(1).
        made["mscale"], made["mscale_all_dim"] = both if all(both) else (1.0, both[1] or 0.0)
    if kind in ("yarn", "llama3"):
        length = said.get("original_max_position_embeddings") or hf["max_position_embeddings"]
        made["original_length"] = length
    theta = said.get("rope_theta") or hf.get("rope_theta") or 10000.0
    made |= {"theta": theta, "dim": dim, "layout": layout}
    made["scaling"] = "none" if kind == "default" else kind
    made = {name: v for name, v in made.items() if name != "dim" or dim}
    return {f"attention.rope.{name}": value for name, value in made.items()}


def rope_to_hf(rope: RopeConfig) -> dict[str, Any]:
    """Returns what the published files say: rope_theta and rope_scaling."""
    made: dict[str, Any] = {"rope_theta": rope.theta, "rope_scaling": None}
    if rope.scaling == "none":
        return made
    said: dict[str, Any] = {"rope_type": rope.scaling, "type": rope.scaling}
    for ours, (key, _) in KINDS[rope.scaling].items():
        said[key] = getattr(rope, ours)
    if rope.scaling == "yarn":
        if not rope.attention_factor:
            del said["attention_factor"]
        if rope.mscale_all_dim:
            said |= {"mscale": rope.mscale, "mscale_all_dim": rope.mscale_all_dim}
    if rope.scaling in ("yarn", "llama3"):
        said["original_max_position_embeddings"] = rope.original_length
    return made | {"rope_scaling": said}
