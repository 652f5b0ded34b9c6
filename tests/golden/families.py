"""The tiny models that make.py builds: one `Variant` for each folder beside this file.

A variant names a Hugging Face architecture, the config that differs from its defaults, and what the
folder is to show. Sizes are small, odd where the architecture allows, and never equal where an
exchange of two of them could hide (qk_nope_head_dim and v_head_dim, heads * head_dim and hidden).
In one variant of each family rms_norm_eps is LOUD: the true ones are lost in float32 noise.
"""

from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class Variant:
    name: str
    model_type: str
    shows: str
    config: dict[str, Any]
    length: int = 29
    """Tokens of each of the two sequences."""
    published: dict[str, Any] | None = None
    """If given, config.json uses the keys of published files (rope_theta, rope_scaling,
    torch_dtype) in place of rope_parameters and dtype, and has these keys, which HF ignores."""
    gain: dict[str, float] = field(default_factory=dict)
    """Substring of a tensor's name -> factor on its standard deviation."""
    ablate: tuple[dict[str, Any], ...] = ()
    """Changes of the config each of which must change the logits: proof that a feature acts."""
    float32: tuple[str, ...] = ("e_score_correction_bias",)
    """Substrings of names of tensors that are stored in float32, unrounded."""
    shards: int = 1
    mtp: bool = False
    store: str = "bfloat16"
    """How expert (mxfp4) or linear (fp8) weights are stored."""


def yarn(factor: float, original: int, theta: float = 10000.0, **more: Any) -> dict[str, Any]:
    rope = {"rope_type": "yarn", "factor": factor, "rope_theta": theta}
    return rope | {"original_max_position_embeddings": original, **more}


LOUD = {"rms_norm_eps": 1e-3}
PLAIN = {"rope_type": "default", "rope_theta": 10000.0}
DEEPSEEK = {
    **dict(vocab_size=64, hidden_size=32, num_hidden_layers=3, first_k_dense_replace=1),
    **dict(num_attention_heads=4, num_key_value_heads=4, qk_nope_head_dim=6, qk_rope_head_dim=8),
    **dict(v_head_dim=10, kv_lora_rank=12, q_lora_rank=20, intermediate_size=44),
    **dict(moe_intermediate_size=14, n_routed_experts=8, num_experts_per_tok=3, bos_token_id=0),
    **dict(eos_token_id=1, max_position_embeddings=1024, rope_parameters=PLAIN),
}
V2 = {**DEEPSEEK, "n_shared_experts": 2, "norm_topk_prob": False}
V3 = {
    **{**DEEPSEEK, "n_shared_experts": 1, "norm_topk_prob": True, "routed_scaling_factor": 2.5},
    **dict(num_nextn_predict_layers=0, n_group=4, topk_group=2),
}
V2_KEYS = dict(scoring_func="softmax", moe_layer_freq=1, seq_aux=True, aux_loss_alpha=0.001)
V3_KEYS = dict(scoring_func="sigmoid", topk_method="noaux_tc", moe_layer_freq=1, ep_size=1)
QWEN = {
    **dict(vocab_size=67, hidden_size=32, num_hidden_layers=2, num_attention_heads=4),
    **dict(num_key_value_heads=2, intermediate_size=44, moe_intermediate_size=14),
    **dict(num_experts=6, num_experts_per_tok=2, max_position_embeddings=1024),
    **dict(rope_parameters=PLAIN),
}
MIXTRAL = {
    **dict(vocab_size=64, hidden_size=32, num_hidden_layers=2, num_attention_heads=4),
    **dict(num_key_value_heads=2, intermediate_size=22, num_local_experts=5),
    **dict(num_experts_per_tok=2, max_position_embeddings=1024),
    **dict(rope_parameters={"rope_type": "default", "rope_theta": 1e6}),
}
GPT_OSS = {
    **dict(vocab_size=64, hidden_size=32, intermediate_size=32, num_hidden_layers=2, head_dim=16),
    **dict(num_attention_heads=4, num_key_value_heads=2, num_local_experts=4),
    **dict(num_experts_per_tok=2, sliding_window=8, max_position_embeddings=16384),
    **dict(rope_parameters=yarn(32.0, 512, 150000.0, beta_fast=32.0, beta_slow=1.0)),
}
GPT_OSS["rope_parameters"]["truncate"] = False
ALL_FULL = {"layer_types": ["full_attention"] * 2}
OLMOE = {
    **dict(vocab_size=64, hidden_size=32, intermediate_size=14, num_hidden_layers=2),
    **dict(num_attention_heads=4, num_experts=8, num_experts_per_tok=3, norm_topk_prob=False),
    **dict(eos_token_id=2, max_position_embeddings=1024, rope_parameters=PLAIN),
    # With a padding id HF gives that row of the embedding no gradient.
    **dict(pad_token_id=None),
}
GLM = {
    **dict(vocab_size=64, hidden_size=32, num_hidden_layers=3, first_k_dense_replace=1),
    **dict(num_attention_heads=4, num_key_value_heads=2, head_dim=12, intermediate_size=44),
    **dict(moe_intermediate_size=14, n_routed_experts=8, num_experts_per_tok=3),
    **dict(n_shared_experts=1, norm_topk_prob=True, max_position_embeddings=1024),
    **dict(num_nextn_predict_layers=0, attention_bias=True),
    **dict(rope_parameters={**PLAIN, "partial_rotary_factor": 0.5}),
}
FP8 = {"activation_scheme": "dynamic", "fmt": "e4m3", "quant_method": "fp8"}
FP8["weight_block_size"] = [128, 128]
MXFP4 = {"quant_method": "mxfp4", "modules_to_not_convert": ["model.layers.*.self_attn"]}
MXFP4["modules_to_not_convert"] += ["model.layers.*.mlp.router", "model.embed_tokens", "lm_head"]
V2_YARN = dict(mscale=0.707, mscale_all_dim=0.707, beta_fast=32, beta_slow=1)
V3_YARN = dict(mscale=1.0, mscale_all_dim=1.0, beta_fast=32, beta_slow=1)

VARIANTS = [
    Variant(
        *("deepseek_v2_lite", "deepseek_v2", "no q_lora, greedy, yarn .707/.707"),
        V2 | dict(q_lora_rank=None, topk_method="greedy", routed_scaling_factor=1.0)
        | dict(rope_parameters=yarn(40.0, 128, **V2_YARN)),
        published=V2_KEYS,
        ablate=({"rope_parameters": PLAIN},),
    ),
    Variant(
        *("deepseek_v2_grouped", "deepseek_v2", "q_lora, group_limited_greedy, no yarn"),
        V2 | dict(topk_method="group_limited_greedy", n_group=4, topk_group=2, vocab_size=67)
        | dict(routed_scaling_factor=3.0),
        ablate=({"topk_method": "greedy"},),
    ),
    Variant(
        *("deepseek_v2_mscales", "deepseek_v2", "yarn with mscale other than mscale_all_dim"),
        V2 | dict(topk_method="greedy", n_shared_experts=1, num_experts_per_tok=2)
        | dict(rope_parameters=yarn(8.0, 128, mscale=1.0, mscale_all_dim=0.4)) | LOUD,
        ablate=({"rope_parameters": yarn(8.0, 128, mscale=0.4, mscale_all_dim=0.4)},),
    ),
    Variant(
        *("deepseek_v3_yarn", "deepseek_v3", "sigmoid, bias, 4 groups of 2, yarn 1/1"),
        V3 | dict(rope_parameters=yarn(40.0, 4096, **V3_YARN), max_position_embeddings=163840),
        published=V3_KEYS,
        ablate=({"rope_parameters": PLAIN}, {"topk_group": 4}),
    ),
    Variant(
        *("deepseek_v3_dense2", "deepseek_v3", "2 dense layers of 4, 2 groups of 4, no yarn"),
        V3 | dict(num_hidden_layers=4, first_k_dense_replace=2, n_group=2, topk_group=1)
        | dict(vocab_size=67, num_experts_per_tok=2),
        ablate=({"topk_group": 2}, {"rope_interleave": False}),
        float32=("e_score_correction_bias", "mlp.gate.weight"),
    ),
    Variant(
        *("deepseek_v3_moonlight", "deepseek_v3", "no q_lora, one group (Moonlight, Kimi)"),
        V3 | dict(q_lora_rank=None, n_group=1, topk_group=1, routed_scaling_factor=2.446)
        | dict(n_shared_experts=2, rope_parameters={"rope_type": "default", "rope_theta": 5e4})
        | LOUD,
        published=V3_KEYS,
    ),
    Variant(
        *("deepseek_v3_mtp", "deepseek_v3", "an MTP layer; an index and 2 shards"),
        V3 | dict(num_hidden_layers=2, num_nextn_predict_layers=1),
        published=V3_KEYS,
        shards=2,
        mtp=True,
    ),
    Variant(
        *("deepseek_v3_fp8", "deepseek_v3", "float8_e4m3fn in blocks of 128 x 128, ragged"),
        V3 | dict(num_hidden_layers=2, hidden_size=132, intermediate_size=136, kv_lora_rank=10)
        | dict(num_attention_heads=2, num_key_value_heads=2, q_lora_rank=None, vocab_size=32)
        | dict(moe_intermediate_size=9, n_routed_experts=4, n_group=1, topk_group=1)
        | dict(num_experts_per_tok=2),
        length=25,
        published=V3_KEYS | {"quantization_config": FP8},
        store="fp8",
    ),
    Variant(
        *("qwen2_moe_plain", "qwen2_moe", "qkv biases, gated shared expert"),
        QWEN | dict(shared_expert_intermediate_size=26),
        published=dict(sliding_window=32768, max_window_layers=21),
    ),
    Variant(
        *("qwen2_moe_mixed", "qwen2_moe", "dense layers between; tied; 7 experts"),
        QWEN | dict(shared_expert_intermediate_size=18, num_hidden_layers=4, num_experts=7)
        | dict(decoder_sparse_step=2, mlp_only_layers=[3], tie_word_embeddings=True)
        | dict(num_experts_per_tok=3) | LOUD,
    ),
    Variant(
        *("qwen3_moe_untied", "qwen3_moe", "q and k norm, heads * head_dim twice the hidden size"),
        QWEN | dict(head_dim=16, norm_topk_prob=True, num_experts=8, num_experts_per_tok=3)
        | dict(rope_parameters={"rope_type": "default", "rope_theta": 1e6}),
        published={},
        length=31,
    ),
    Variant(
        *("qwen3_moe_tied", "qwen3_moe", "tied, yarn, a dense layer first"),
        QWEN | dict(head_dim=12, norm_topk_prob=True, tie_word_embeddings=True, vocab_size=64)
        | dict(mlp_only_layers=[0], num_hidden_layers=3, rope_parameters=yarn(4.0, 128, 1e4))
        | LOUD,
        ablate=({"rope_parameters": PLAIN},),
    ),
    Variant("mixtral_plain", "mixtral", "full attention", MIXTRAL, published={}),
    Variant(
        *("mixtral_sliding", "mixtral", "a window of 7 of 31 tokens"),
        MIXTRAL | dict(sliding_window=7, head_dim=12, vocab_size=67) | LOUD,
        length=31,
        ablate=({"sliding_window": None}, {"sliding_window": 8}),
    ),
    Variant(
        *("gpt_oss_yarn", "gpt_oss", "sinks, windows, biases, yarn without truncation"),
        GPT_OSS,
        length=35,
        published=dict(experts_per_token=2, initial_context_length=512),
        ablate=({"rope_parameters": PLAIN}, ALL_FULL)
        + ({"rope_parameters": GPT_OSS["rope_parameters"] | {"truncate": True}},),
    ),
    Variant(
        *("gpt_oss_clamp", "gpt_oss", "no yarn; activations large enough for the clamp to act"),
        GPT_OSS | dict(intermediate_size=24, num_local_experts=5, num_experts_per_tok=3)
        | dict(rope_parameters={"rope_type": "default", "rope_theta": 150000.0}, vocab_size=67)
        | LOUD,
        gain={"gate_up_proj": 5.0, "experts.down_proj": 0.1},
        ablate=({"swiglu_limit": 1e6}, ALL_FULL),
    ),
    Variant(
        *("gpt_oss_mxfp4", "gpt_oss", "experts as MXFP4 blocks and scales, 3 groups of 32"),
        GPT_OSS | dict(hidden_size=96, num_local_experts=3, head_dim=8, vocab_size=32)
        | dict(num_key_value_heads=1, sliding_window=5),
        length=25,
        published=dict(experts_per_token=2, quantization_config=MXFP4),
        store="mxfp4",
    ),
    Variant("olmoe_plain", "olmoe", "q and k norm over all heads", OLMOE, published={}),
    Variant(
        *("olmoe_clip", "olmoe", "2 kv heads; clip_qkv acts"),
        OLMOE | dict(num_key_value_heads=2, clip_qkv=0.8, vocab_size=67) | LOUD,
        ablate=({"clip_qkv": None},),
    ),
    Variant(
        *("glm4_moe_plain", "glm4_moe", "rotary on 6 of 12 dims, qkv biases, one group"),
        GLM,
        published=dict(partial_rotary_factor=0.5),
    ),
    Variant(
        *("glm4_moe_qknorm", "glm4_moe", "q and k norm, 2 groups of 4, no biases, scaled"),
        GLM | dict(use_qk_norm=True, n_group=2, topk_group=1, routed_scaling_factor=2.5)
        | dict(attention_bias=False, head_dim=16, vocab_size=67, num_experts_per_tok=2)
        | LOUD,
        ablate=({"topk_group": 2}, {"rms_norm_eps": 1e-5}),
    ),
]  # fmt: skip
