"""What each family's Hugging Face files say, and where its tensors are: one `Family` each.

A family is a table of keys (our leaf <-> a key of config.json), a function for what is no plain
key in either direction, and the rules of its tensors. Published files and those that transformers 5
saves differ in names; both are read, and the published ones are written. Sources: configurations
and modeling code that the labs published; `tests/golden/README.md` has the facts one by one.
"""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

from moejax.convert import names
from moejax.convert.rope import rope_from_hf, rope_to_hf
from moejax.convert.table import Rule
from moejax.model.transformer import ModelConfig

Keys = dict[str, str]
HF = Mapping[str, Any]


@dataclasses.dataclass(frozen=True)
class Family:
    """A model_type of Hugging Face."""

    model_type: str
    architecture: str
    keys: Keys
    """Our leaf (dotted) -> their key, where the value is the same."""
    fixed: dict[str, Any]
    """Our leaves that are one value throughout the family."""
    more_from_hf: Callable[[HF], dict[str, Any]]
    """What else config.json says: {our leaf: value}."""
    more_to_hf: Callable[[ModelConfig], dict[str, Any]]
    """What else config.json has to say."""
    rules: Callable[[ModelConfig, str], list[Rule]]
    """Rules of a layer, "M" or "D"."""
    defaults: dict[str, Any] = dataclasses.field(default_factory=dict)
    """Their keys that may be absent."""


BASE: Keys = {
    "vocab_size": "vocab_size",
    "dim": "hidden_size",
    "num_layers": "num_hidden_layers",
    "norm_eps": "rms_norm_eps",
    "tied": "tie_word_embeddings",
    "attention.num_heads": "num_attention_heads",
    "moe.top_k": "num_experts_per_tok",
}
GQA: Keys = BASE | {"attention.num_kv_heads": "num_key_value_heads"}
MLA: Keys = BASE | {
    "attention.head_dim": "qk_nope_head_dim",
    "attention.mla.kv_rank": "kv_lora_rank",
    "attention.mla.value_dim": "v_head_dim",
    "attention.rope.dim": "qk_rope_head_dim",
}
DEEPSEEK: Keys = {
    "ffn_dim": "intermediate_size",
    "first_k_dense": "first_k_dense_replace",
    "moe.num_experts": "n_routed_experts",
    "moe.ffn_dim": "moe_intermediate_size",
    "moe.router.scale": "routed_scaling_factor",
}
COMMON_DEFAULTS = {"tie_word_embeddings": False}
V3_BALANCE = {
    "moe.balance.batch_coeff": 0.0,
    "moe.balance.sequence_coeff": 1e-4,
    "moe.balance.bias_rate": 1e-3,
}


def _head_dim(hf: HF) -> int:
    return hf.get("head_dim") or hf["hidden_size"] // hf["num_attention_heads"]


def _gqa(hf: HF) -> dict[str, Any]:
    head_dim = _head_dim(hf)
    partial = hf.get("partial_rotary_factor") or (hf.get("rope_parameters") or {}).get(
        "partial_rotary_factor"
    )
    dim = 0 if partial in (None, 1) else round(head_dim * partial)
    return {"attention.head_dim": head_dim} | rope_from_hf(hf, dim=dim)


def _shared(hf: HF) -> dict[str, Any]:
    return {"moe.shared_ffn_dim": (hf.get("n_shared_experts") or 0) * hf["moe_intermediate_size"]}


def _further(hf: HF) -> dict[str, Any]:
    return {"mtp_depth": hf.get(names.NUM_FURTHER) or 0}


def _num_shared(cfg: ModelConfig) -> dict[str, Any]:
    return {"n_shared_experts": cfg.moe.shared_ffn_dim // cfg.moe.ffn_dim or None}


# DeepSeek


def _v2_from_hf(hf: HF) -> dict[str, Any]:
    groups = hf.get("n_group") if hf.get("topk_method") == "group_limited_greedy" else None
    renormalized = bool(hf.get("norm_topk_prob")) and hf["num_experts_per_tok"] > 1
    made = rope_from_hf(hf, layout="interleaved") | _shared(hf)
    if groups:
        made |= {"moe.router.num_groups": groups, "moe.router.topk_groups": hf["topk_group"]}
        made |= {"moe.router.num_group_score": 1}
    if renormalized:  # DeepSeek's own code: renormalised, and then not scaled
        made |= {"moe.router.renormalize": True, "moe.router.scale": 1.0}
    return made | {"attention.mla.q_rank": hf.get("q_lora_rank") or 0}


def _v2_to_hf(cfg: ModelConfig) -> dict[str, Any]:
    router, attention = cfg.moe.router, cfg.attention
    grouped = router.num_groups > 1
    return _num_shared(cfg) | rope_to_hf(attention.rope) | {
        "q_lora_rank": attention.mla.q_rank or None,
        "topk_method": "group_limited_greedy" if grouped else "greedy",
        "n_group": router.num_groups,
        "topk_group": router.topk_groups,
        "norm_topk_prob": router.renormalize,
        "num_key_value_heads": attention.num_heads,
        "scoring_func": "softmax",
    }


def _v3_from_hf(hf: HF) -> dict[str, Any]:
    layout = "interleaved" if hf.get("rope_interleave", True) else "half"
    groups = hf.get("n_group") or 1
    made = rope_from_hf(hf, layout=layout) | _shared(hf) | _further(hf)
    made |= {"moe.router.num_groups": groups, "moe.router.num_group_score": 2 if groups > 1 else 0}
    made |= {"moe.router.topk_groups": hf.get("topk_group") or 1}
    made |= {"moe.router.renormalize": hf.get("norm_topk_prob", True)}
    return made | {"attention.mla.q_rank": hf.get("q_lora_rank") or 0}


def _v3_to_hf(cfg: ModelConfig) -> dict[str, Any]:
    made = _v2_to_hf(cfg) | {"topk_method": "noaux_tc", "scoring_func": "sigmoid"}
    return made | {
        "rope_interleave": cfg.attention.rope.layout == "interleaved",
        names.NUM_FURTHER: cfg.mtp_depth,
    }


# Qwen


def _qwen_from_hf(hf: HF) -> dict[str, Any]:
    step, only = hf.get("decoder_sparse_step") or 1, set(hf.get("mlp_only_layers") or ())
    kinds = "".join(
        "M" if i not in only and (i + 1) % step == 0 else "D"
        for i in range(hf["num_hidden_layers"])
    )
    windowed = hf.get("use_sliding_window") and hf.get("sliding_window")
    if windowed:
        raise ValueError("use_sliding_window=true: the windows of Qwen are not supported")
    return _gqa(hf) | names.layers_of(kinds) | {
        "moe.num_experts": hf.get("num_experts") or hf["num_local_experts"],
        "moe.router.renormalize": bool(hf.get("norm_topk_prob")),
    }


def _qwen_to_hf(cfg: ModelConfig) -> dict[str, Any]:
    dense = [i for i, kind in enumerate(cfg.kinds()) if kind == "D"]
    return rope_to_hf(cfg.attention.rope) | {
        "mlp_only_layers": dense,
        "decoder_sparse_step": 1,
        "num_experts": cfg.moe.num_experts,
        "norm_topk_prob": cfg.moe.router.renormalize,
        "head_dim": cfg.attention.head_dim,
    }


def _mixtral_from_hf(hf: HF) -> dict[str, Any]:
    window = hf.get("sliding_window") or 0
    return _gqa(hf) | {"attention.window": window, "pattern": "m" if window else "M"}


def _mixtral_to_hf(cfg: ModelConfig) -> dict[str, Any]:
    return rope_to_hf(cfg.attention.rope) | {
        "sliding_window": cfg.attention.window or None,
        "head_dim": cfg.attention.head_dim,
    }


def _gpt_oss_from_hf(hf: HF) -> dict[str, Any]:
    types = hf.get("layer_types") or [
        "full_attention" if i % 2 else "sliding_attention" for i in range(hf["num_hidden_layers"])
    ]
    kinds = "".join("m" if kind == "sliding_attention" else "M" for kind in types)
    return _gqa(hf) | names.layers_of(kinds) | {
        "attention.window": hf["sliding_window"] if "m" in kinds else 0,
        "moe.swiglu_limit": hf.get("swiglu_limit", 7.0),
    }


def _gpt_oss_to_hf(cfg: ModelConfig) -> dict[str, Any]:
    windows = cfg.windows()
    return rope_to_hf(cfg.attention.rope) | {
        "head_dim": cfg.attention.head_dim,
        "sliding_window": cfg.attention.window or None,
        "layer_types": ["sliding_attention" if w else "full_attention" for w in windows],
        "swiglu_limit": cfg.moe.swiglu_limit,
        "experts_per_token": cfg.moe.top_k,
        "attention_bias": True,
    }


def _olmoe_from_hf(hf: HF) -> dict[str, Any]:
    return _gqa(hf) | {
        "attention.clip_qkv": hf.get("clip_qkv") or 0.0,
        "moe.router.renormalize": bool(hf.get("norm_topk_prob")),
    }


def _olmoe_to_hf(cfg: ModelConfig) -> dict[str, Any]:
    return rope_to_hf(cfg.attention.rope) | {
        "clip_qkv": cfg.attention.clip_qkv or None,
        "norm_topk_prob": cfg.moe.router.renormalize,
        "pad_token_id": None,
    }


def _glm_from_hf(hf: HF) -> dict[str, Any]:
    partial = (hf.get("rope_parameters") or hf).get("partial_rotary_factor", 0.5)
    groups = hf.get("n_group") or 1
    return _gqa({**hf, "partial_rotary_factor": partial}) | _shared(hf) | _further(hf) | {
        "attention.bias": bool(hf.get("attention_bias")),
        "attention.qk_norm": "head" if hf.get("use_qk_norm") else "",
        "moe.router.num_groups": groups,
        "moe.router.topk_groups": hf.get("topk_group") or 1,
        "moe.router.num_group_score": 2 if groups > 1 else 0,
        "moe.router.renormalize": hf.get("norm_topk_prob", True),
    }


def _glm_to_hf(cfg: ModelConfig) -> dict[str, Any]:
    attention, router = cfg.attention, cfg.moe.router
    return _num_shared(cfg) | rope_to_hf(attention.rope) | {
        "head_dim": attention.head_dim,
        "partial_rotary_factor": attention.rope_dim / attention.head_dim,
        "attention_bias": attention.bias,
        "use_qk_norm": bool(attention.qk_norm),
        "n_group": router.num_groups,
        "topk_group": router.topk_groups,
        "norm_topk_prob": router.renormalize,
        names.NUM_FURTHER: cfg.mtp_depth,
    }


FAMILIES = {
    family.model_type: family
    for family in (
        Family(
            "deepseek_v2", "DeepseekV2ForCausalLM", MLA | DEEPSEEK,
            {"attention.kind": "mla", "moe.router.renormalize": False},
            _v2_from_hf, _v2_to_hf, names.deepseek,
            {"routed_scaling_factor": 1.0, "first_k_dense_replace": 0},
        ),
        Family(
            "deepseek_v3", "DeepseekV3ForCausalLM", MLA | DEEPSEEK,
            {"attention.kind": "mla", "moe.router.score": "sigmoid", **V3_BALANCE},
            _v3_from_hf, _v3_to_hf, names.deepseek,
            {"routed_scaling_factor": 2.5, "first_k_dense_replace": 3},
        ),
        Family(
            "qwen2_moe", "Qwen2MoeForCausalLM",
            GQA | {
                "ffn_dim": "intermediate_size",
                "moe.ffn_dim": "moe_intermediate_size",
                "moe.shared_ffn_dim": "shared_expert_intermediate_size",
                "attention.bias": "qkv_bias",
            },
            {"moe.shared_gate": True},
            _qwen_from_hf, _qwen_to_hf, names.qwen, {"qkv_bias": True},
        ),
        Family(
            "qwen3_moe", "Qwen3MoeForCausalLM",
            GQA | {"ffn_dim": "intermediate_size", "moe.ffn_dim": "moe_intermediate_size"},
            {"attention.qk_norm": "head"},
            _qwen_from_hf, _qwen_to_hf, names.qwen,
        ),
        Family(
            "mixtral", "MixtralForCausalLM",
            GQA | {"moe.num_experts": "num_local_experts", "moe.ffn_dim": "intermediate_size"},
            {}, _mixtral_from_hf, _mixtral_to_hf, names.mixtral,
        ),
        Family(
            "gpt_oss", "GptOssForCausalLM",
            GQA | {"moe.num_experts": "num_local_experts", "moe.ffn_dim": "intermediate_size"},
            {
                "attention.bias": True, "attention.out_bias": True, "attention.sinks": True,
                "moe.router.linear_bias": True, "moe.bias": True,
            },
            _gpt_oss_from_hf, _gpt_oss_to_hf, names.gpt_oss,
        ),
        Family(
            "olmoe", "OlmoeForCausalLM",
            GQA | {"moe.num_experts": "num_experts", "moe.ffn_dim": "intermediate_size"},
            {"attention.qk_norm": "full"},
            _olmoe_from_hf, _olmoe_to_hf, names.qwen,
        ),
        Family(
            "glm4_moe", "Glm4MoeForCausalLM", GQA | DEEPSEEK,
            {"moe.router.score": "sigmoid", **V3_BALANCE},
            _glm_from_hf, _glm_to_hf, names.deepseek, {"first_k_dense_replace": 1},
        ),
    )
}  # fmt: skip
