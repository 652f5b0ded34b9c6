"""What the config.json of each published model says of its architecture."""

from typing import Any

MLA = dict(
    kv_lora_rank=512, qk_nope_head_dim=128, qk_rope_head_dim=64, v_head_dim=128,
    num_nextn_predict_layers=0, tie_word_embeddings=False, rms_norm_eps=1e-6,
)  # fmt: skip
V2_YARN = dict(
    beta_fast=32, beta_slow=1, factor=40, mscale=0.707, mscale_all_dim=0.707,
    original_max_position_embeddings=4096, type="yarn",
)  # fmt: skip
V3_YARN = V2_YARN | dict(mscale=1.0, mscale_all_dim=1.0)
V2 = MLA | dict(
    model_type="deepseek_v2", vocab_size=102400, first_k_dense_replace=1, moe_layer_freq=1,
    n_shared_experts=2, num_experts_per_tok=6, norm_topk_prob=False, scoring_func="softmax",
    rope_theta=10000, rope_scaling=V2_YARN, max_position_embeddings=163840,
)  # fmt: skip
V3 = MLA | dict(
    model_type="deepseek_v3", vocab_size=129280, hidden_size=7168, num_hidden_layers=61,
    first_k_dense_replace=3, moe_layer_freq=1, intermediate_size=18432,
    moe_intermediate_size=2048, n_routed_experts=256, n_shared_experts=1, num_experts_per_tok=8,
    n_group=8, topk_group=4, topk_method="noaux_tc", scoring_func="sigmoid", norm_topk_prob=True,
    routed_scaling_factor=2.5, num_attention_heads=128, num_key_value_heads=128,
    q_lora_rank=1536, rope_theta=10000, rope_scaling=V3_YARN, max_position_embeddings=163840,
    num_nextn_predict_layers=1,
)  # fmt: skip
QWEN3 = dict(
    model_type="qwen3_moe", vocab_size=151936, head_dim=128, num_key_value_heads=4,
    num_experts=128, num_experts_per_tok=8, norm_topk_prob=True, decoder_sparse_step=1,
    mlp_only_layers=[], rope_theta=1000000.0, rope_scaling=None, rms_norm_eps=1e-6,
    attention_bias=False, use_sliding_window=False, sliding_window=None,
    tie_word_embeddings=False, max_position_embeddings=40960,
)  # fmt: skip
MIXTRAL = dict(
    model_type="mixtral", vocab_size=32000, num_key_value_heads=8, num_local_experts=8,
    num_experts_per_tok=2, rope_theta=1000000.0, rms_norm_eps=1e-5, sliding_window=None,
    tie_word_embeddings=False,
)  # fmt: skip
GPT_OSS = dict(
    model_type="gpt_oss", vocab_size=201088, hidden_size=2880, intermediate_size=2880, head_dim=64,
    num_attention_heads=64, num_key_value_heads=8, num_experts_per_tok=4, experts_per_token=4,
    attention_bias=True, sliding_window=128, swiglu_limit=7.0, rms_norm_eps=1e-5,
    rope_theta=150000, initial_context_length=4096, max_position_embeddings=131072,
    rope_scaling=dict(
        beta_fast=32.0, beta_slow=1.0, factor=32.0, original_max_position_embeddings=4096,
        rope_type="yarn", truncate=False,
    ),
    tie_word_embeddings=False,
)  # fmt: skip
WINDOWS = ["sliding_attention", "full_attention"]
GLM = dict(
    model_type="glm4_moe", vocab_size=151552, head_dim=128, num_attention_heads=96,
    num_key_value_heads=8, num_experts_per_tok=8, n_shared_experts=1, n_group=1, topk_group=1,
    norm_topk_prob=True, attention_bias=True, partial_rotary_factor=0.5, rope_theta=1000000,
    rope_scaling=None, rms_norm_eps=1e-5, tie_word_embeddings=False, num_nextn_predict_layers=1,
    max_position_embeddings=131072,
)  # fmt: skip

# Recipe (file, function) -> config.json.
PUBLISHED: dict[tuple[str, str], dict[str, Any]] = {
    ("deepseek_v2", "v2_lite"): V2 | dict(
        hidden_size=2048, num_hidden_layers=27, intermediate_size=10944,
        moe_intermediate_size=1408, n_routed_experts=64, n_group=1, topk_group=1,
        topk_method="greedy", routed_scaling_factor=1.0, num_attention_heads=16,
        num_key_value_heads=16, q_lora_rank=None,
    ),
    ("deepseek_v2", "v2"): V2 | dict(
        hidden_size=5120, num_hidden_layers=60, intermediate_size=12288,
        moe_intermediate_size=1536, n_routed_experts=160, n_group=8, topk_group=3,
        topk_method="group_limited_greedy", routed_scaling_factor=16.0, num_attention_heads=128,
        num_key_value_heads=128, q_lora_rank=1536,
    ),
    ("deepseek_v3", "v3"): V3,
    ("deepseek_v3", "r1"): V3,
    ("moonlight", "moonlight_16b"): V3 | dict(
        vocab_size=163840, hidden_size=2048, num_hidden_layers=27, first_k_dense_replace=1,
        intermediate_size=11264, moe_intermediate_size=1408, n_routed_experts=64,
        n_shared_experts=2, num_experts_per_tok=6, n_group=1, topk_group=1,
        routed_scaling_factor=2.446, num_attention_heads=16, num_key_value_heads=16,
        q_lora_rank=None, rope_theta=50000.0, rope_scaling=None, rms_norm_eps=1e-5,
        max_position_embeddings=8192, num_nextn_predict_layers=0,
    ),
    ("kimi_k2", "kimi_k2"): V3 | dict(
        model_type="kimi_k2", vocab_size=163840, first_k_dense_replace=1, n_routed_experts=384,
        n_group=1, topk_group=1, routed_scaling_factor=2.827, num_attention_heads=64,
        num_key_value_heads=64, rope_theta=50000.0, max_position_embeddings=131072,
        rope_scaling=V3_YARN | dict(beta_fast=1.0, beta_slow=1.0, factor=32.0),
        num_nextn_predict_layers=0,
    ),
    ("qwen2_moe", "qwen2_57b_a14b"): dict(
        model_type="qwen2_moe", vocab_size=151936, hidden_size=3584, num_hidden_layers=28,
        intermediate_size=18944, moe_intermediate_size=2560, num_experts=64,
        shared_expert_intermediate_size=20480, num_experts_per_tok=8, norm_topk_prob=False,
        decoder_sparse_step=1, num_attention_heads=28, num_key_value_heads=4,
        rope_theta=1000000.0, rms_norm_eps=1e-6, use_sliding_window=False, sliding_window=65536,
        tie_word_embeddings=False,
    ),
    ("qwen3_moe", "qwen3_30b_a3b"): QWEN3 | dict(
        hidden_size=2048, num_hidden_layers=48, intermediate_size=6144, moe_intermediate_size=768,
        num_attention_heads=32,
    ),
    ("qwen3_moe", "qwen3_235b_a22b"): QWEN3 | dict(
        hidden_size=4096, num_hidden_layers=94, intermediate_size=12288,
        moe_intermediate_size=1536, num_attention_heads=64,
    ),
    ("mixtral", "mixtral_8x7b"): MIXTRAL | dict(
        hidden_size=4096, num_hidden_layers=32, intermediate_size=14336, num_attention_heads=32,
    ),
    ("mixtral", "mixtral_8x22b"): MIXTRAL | dict(
        hidden_size=6144, num_hidden_layers=56, intermediate_size=16384, num_attention_heads=48,
    ),
    ("gpt_oss", "gpt_oss_20b"): GPT_OSS | dict(
        num_hidden_layers=24, num_local_experts=32, layer_types=WINDOWS * 12,
    ),
    ("gpt_oss", "gpt_oss_120b"): GPT_OSS | dict(
        num_hidden_layers=36, num_local_experts=128, layer_types=WINDOWS * 18,
    ),
    ("olmoe", "olmoe_1b_7b"): dict(
        model_type="olmoe", vocab_size=50304, hidden_size=2048, num_hidden_layers=16,
        intermediate_size=1024, num_attention_heads=16, num_key_value_heads=16, num_experts=64,
        num_experts_per_tok=8, norm_topk_prob=False, clip_qkv=None, rope_theta=10000.0,
        rope_scaling=None, rms_norm_eps=1e-5, attention_bias=False, tie_word_embeddings=False,
    ),
    ("glm4_moe", "glm_4_5"): GLM | dict(
        hidden_size=5120, num_hidden_layers=92, first_k_dense_replace=3, intermediate_size=12288,
        moe_intermediate_size=1536, n_routed_experts=160, routed_scaling_factor=2.5,
        use_qk_norm=True,
    ),
    ("glm4_moe", "glm_4_5_air"): GLM | dict(
        hidden_size=4096, num_hidden_layers=46, first_k_dense_replace=1, intermediate_size=10944,
        moe_intermediate_size=1408, n_routed_experts=128, routed_scaling_factor=1.0,
        use_qk_norm=False,
    ),
}  # fmt: skip
