"""Where each family keeps its tensors: the rules of a layer and of the whole model."""

import dataclasses
from collections.abc import Sequence
from typing import Any

from moejax.convert.table import Rule
from moejax.model.transformer import ModelConfig

LAYER = "model.layers.{layer}."
NUM_FURTHER = "num_nextn_predict_layers"
IN_OUT = dict(ours="in out", theirs="out in")


def linear(path: str, name: str) -> Rule:
    """[in, out] of ours is [out, in] of theirs."""
    return Rule(path, f"{name}.weight", **IN_OUT)


def vector(path: str, name: str) -> Rule:
    """The same on both sides."""
    return Rule(path, name, ours="dim", theirs="dim")


def whole_model(cfg: ModelConfig) -> list[Rule]:
    """Returns the rules of what is in no layer."""
    found = [
        Rule("embedding", "model.embed_tokens.weight", ours="vocab dim", theirs="vocab dim"),
        vector("final_norm/scale", "model.norm.weight"),
    ]
    if not cfg.tied:
        found.append(Rule("head", "lm_head.weight", ours="dim vocab", theirs="vocab dim"))
    return found


def further(rules: list[Rule]) -> list[Rule]:
    """Returns the rules of a module that predicts a further token (DeepSeek-V3, GLM-4.5), with
    those of its layer."""
    own = [
        vector("enorm/scale", "enorm.weight"),
        vector("hnorm/scale", "hnorm.weight"),
        linear("proj", "eh_proj"),
        vector("final_norm/scale", "shared_head.norm.weight"),
    ]
    return own + [dataclasses.replace(rule, path=f"block/{rule.path}") for rule in rules]


def copies(cfg: ModelConfig) -> list[Rule]:
    """Returns the rules of what such a module's files repeat of the main model."""
    found = [Rule("embedding", "embed_tokens.weight", ours="vocab dim", theirs="vocab dim")]
    path, ours = ("embedding", "vocab dim") if cfg.tied else ("head", "dim vocab")
    return [*found, Rule(path, "shared_head.head.weight", ours=ours, theirs="vocab dim")]


def norms() -> list[Rule]:
    """Returns the rules of a layer's two norms."""
    return [
        vector("attention_norm/scale", "input_layernorm.weight"),
        vector("mlp_norm/scale", "post_attention_layernorm.weight"),
    ]


def gqa(cfg: ModelConfig) -> list[Rule]:
    """Returns the rules of grouped-query attention."""
    attention, found = cfg.attention, []
    for ours in "qkvo":
        found.append(linear(f"attention/w_{ours}", f"self_attn.{ours}_proj"))
    for ours in ("qkv" if attention.bias else "") + ("o" if attention.out_bias else ""):
        found.append(vector(f"attention/b_{ours}", f"self_attn.{ours}_proj.bias"))
    if attention.qk_norm:
        path = "attention/{}_norm/scale" if attention.qk_norm == "head" else "attention/{}_scale"
        for ours in "qk":
            found.append(vector(path.format(ours), f"self_attn.{ours}_norm.weight"))
    if attention.sinks:
        found.append(vector("attention/sinks", "self_attn.sinks"))
    return found


def mla(cfg: ModelConfig) -> list[Rule]:
    """Returns the rules of multi-head latent attention."""
    if cfg.attention.mla.q_rank:
        queries = [
            linear("attention/w_q_down", "self_attn.q_a_proj"),
            vector("attention/q_norm/scale", "self_attn.q_a_layernorm.weight"),
            linear("attention/w_q_up", "self_attn.q_b_proj"),
        ]
    else:
        queries = [linear("attention/w_q", "self_attn.q_proj")]
    return queries + [
        linear("attention/w_kv_down", "self_attn.kv_a_proj_with_mqa"),
        vector("attention/kv_norm/scale", "self_attn.kv_a_layernorm.weight"),
        linear("attention/w_kv_up", "self_attn.kv_b_proj"),
        linear("attention/w_o", "self_attn.o_proj"),
    ]


def gated(path: str, name: str, glu: Sequence[str] = ("gate_proj", "up_proj", "down_proj")):
    """Returns the rules of a gated MLP, `name` with its dot."""
    return [
        Rule(
            f"{path}/w_in", f"{name}{{glu}}.weight", ours="in glu out", theirs="out in",
            names={"glu": tuple(glu[:2])},
        ),
        linear(f"{path}/w_out", f"{name}{glu[2]}"),
    ]  # fmt: skip


def experts(name: str, glu: Sequence[str] = ("gate_proj", "up_proj", "down_proj")) -> list[Rule]:
    """Returns the rules of experts that are tensors of their own."""
    return [
        Rule(
            "moe/experts/w_in", f"{name}{{expert}}.{{glu}}.weight", ours="expert in glu out",
            theirs="out in", names={"glu": tuple(glu[:2])},
        ),
        Rule(
            "moe/experts/w_out", f"{name}{{expert}}.{glu[2]}.weight", ours="expert in out",
            theirs="out in",
        ),
    ]  # fmt: skip


def deepseek(cfg: ModelConfig, kind: str) -> list[Rule]:
    """DeepSeek-V2, V3, R1, Moonlight, Kimi-K2, and GLM-4.5."""
    found = norms() + (mla(cfg) if cfg.attention.kind == "mla" else gqa(cfg))
    if kind == "D":
        return found + gated("mlp", "mlp.")
    found += [linear("moe/w_router", "mlp.gate"), *experts("mlp.experts.")]
    if cfg.moe.router.score == "sigmoid":
        found.append(vector("moe/bias", "mlp.gate.e_score_correction_bias"))
    return found + (gated("moe/shared", "mlp.shared_experts.") if cfg.moe.shared_ffn_dim else [])


def qwen(cfg: ModelConfig, kind: str) -> list[Rule]:
    """Qwen2-MoE, Qwen3-MoE, OLMoE."""
    found = norms() + gqa(cfg)
    if kind == "D":
        return found + gated("mlp", "mlp.")
    found += [linear("moe/w_router", "mlp.gate"), *experts("mlp.experts.")]
    if cfg.moe.shared_ffn_dim:
        found += gated("moe/shared", "mlp.shared_expert.")
        found.append(linear("moe/w_gate", "mlp.shared_expert_gate"))
    return found


def mixtral(cfg: ModelConfig, kind: str) -> list[Rule]:
    """Mixtral: w1 is the gate, w3 up, w2 down."""
    router = linear("moe/w_router", "block_sparse_moe.gate")
    mine = experts("block_sparse_moe.experts.", ("w1", "w3", "w2"))
    return [*norms(), *gqa(cfg), router, *mine]


def gpt_oss(cfg: ModelConfig, kind: str) -> list[Rule]:
    """gpt-oss: all experts in one tensor, as [in, out], gate and up in turns."""
    name = "mlp.experts."
    return [
        *norms(),
        *gqa(cfg),
        linear("moe/w_router", "mlp.router"),
        vector("moe/b_router", "mlp.router.bias"),
        Rule("moe/experts/w_in", f"{name}gate_up_proj", "expert in glu out", "expert in (out glu)"),
        Rule("moe/experts/b_in", f"{name}gate_up_proj_bias", "expert glu out", "expert (out glu)"),
        Rule("moe/experts/w_out", f"{name}down_proj", "expert in out", "expert in out"),
        Rule("moe/experts/b_out", f"{name}down_proj_bias", "expert out", "expert out"),
    ]


def layers_of(kinds: str) -> dict[str, Any]:
    """Returns our leaves for layers of these kinds: dense ones at the start, then a pattern.

    >>> layers_of("DMMM"), layers_of("mMmM")
    ({'first_k_dense': 1, 'pattern': 'M'}, {'first_k_dense': 0, 'pattern': 'mM'})
    """
    first = len(kinds) - len(kinds.lstrip("D"))
    rest = kinds[first:] or kinds
    first = first if kinds[first:] else 0
    for length in range(1, len(rest) + 1):
        if len(rest) % length == 0 and rest[:length] * (len(rest) // length) == rest:
            return {"first_k_dense": first, "pattern": rest[:length]}
    raise AssertionError("a pattern is at most all of it")
