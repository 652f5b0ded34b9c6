"""Attention layers in float64 numpy, one query at a time, from their papers and public code."""

import numpy as np

from moejax.model.attention import AttentionConfig
from moejax.model.rope import RopeConfig


def slowed_share(cfg: RopeConfig, dim: int, pair: int) -> float:
    """How much of a pair's speed is divided by the factor."""
    if cfg.scaling in ("none", "linear"):
        return float(cfg.scaling == "linear")
    wave = 2 * np.pi * cfg.theta ** (2 * pair / dim)
    if cfg.scaling == "llama3":
        if wave < cfg.original_length / cfg.beta_fast:
            return 0.0
        if wave > cfg.original_length / cfg.beta_slow:
            return 1.0
        turns = cfg.original_length / wave
        return 1 - (turns - cfg.beta_slow) / (cfg.beta_fast - cfg.beta_slow)

    def dim_of(turns):
        return dim * np.log(cfg.original_length / (turns * 2 * np.pi)) / (2 * np.log(cfg.theta))

    low, high = dim_of(cfg.beta_fast), dim_of(cfg.beta_slow)
    if cfg.truncate:
        low, high = np.floor(low), np.ceil(high)
    low, high = max(low, 0), min(high, dim - 1)
    return float(np.clip((pair - low) / (high - low), 0, 1))


def m(cfg: RopeConfig, scale: float) -> float:
    return 0.1 * scale * np.log(cfg.factor) + 1 if cfg.scaling == "yarn" else 1.0


def cos_sin(cfg: RopeConfig, dim: int, place: int) -> tuple[np.ndarray, np.ndarray]:
    """The table's row of a position."""
    factor = m(cfg, cfg.mscale) / m(cfg, cfg.mscale_all_dim)
    factor = cfg.attention_factor or factor
    angles = []
    for pair in range(dim // 2):
        speed, slow = cfg.theta ** (-2 * pair / dim), slowed_share(cfg, dim, pair)
        angles.append(place * (slow * speed / cfg.factor + (1 - slow) * speed))
    return np.cos(angles) * factor, np.sin(angles) * factor


def turn(x: np.ndarray, cfg: RopeConfig, dim: int, place: int) -> np.ndarray:
    """x [..., H] with its first `dim` dims turned, pair by pair."""
    y, (cos, sin) = x.copy(), cos_sin(cfg, dim, place)
    for i in range(dim // 2):
        a, b = (i, i + dim // 2) if cfg.layout == "half" else (2 * i, 2 * i + 1)
        y[..., a] = x[..., a] * cos[i] - x[..., b] * sin[i]
        y[..., b] = x[..., b] * cos[i] + x[..., a] * sin[i]
    return y


def rms(x: np.ndarray, scale: np.ndarray, eps: float) -> np.ndarray:
    return x / np.sqrt((x * x).mean(axis=-1, keepdims=True) + eps) * scale


def gqa_heads(w: dict, cfg: AttentionConfig, x: np.ndarray, place: int, eps: float):
    """(q [N, H], k [G, H], v [G, H]) of one token."""
    made = []
    for name in "qkv":
        y = x @ w[f"w_{name}"] + (w[f"b_{name}"] if cfg.bias else 0)
        if cfg.qk_norm == "full" and name != "v":
            y = rms(y, w[f"{name}_scale"], eps)
        y = np.clip(y, -cfg.clip_qkv, cfg.clip_qkv) if cfg.clip_qkv else y
        y = y.reshape(-1, cfg.head_dim)
        if cfg.qk_norm == "head" and name != "v":
            y = rms(y, w[f"{name}_norm"]["scale"], eps)
        made.append(y)
    dim = cfg.rope.dim or cfg.head_dim
    return *(turn(y, cfg.rope, dim, place) for y in made[:2]), made[2]


def mla_heads(w: dict, cfg: AttentionConfig, x: np.ndarray, place: int, eps: float):
    """(q [N, H + P], k [N, H + P], v [N, V]) of one token; DeepSeek's latent norms ignore eps."""
    eps = 1e-6
    N, H, R, P = cfg.num_heads, cfg.head_dim, cfg.mla.kv_rank, cfg.rope.dim
    if cfg.mla.q_rank:
        q = rms(x @ w["w_q_down"], w["q_norm"]["scale"], eps) @ w["w_q_up"]
    else:
        q = x @ w["w_q"]
    q = q.reshape(N, H + P)
    q = np.concatenate([q[:, :H], turn(q[:, H:], cfg.rope, P, place)], axis=1)
    down = x @ w["w_kv_down"]
    kv = (rms(down[:R], w["kv_norm"]["scale"], eps) @ w["w_kv_up"]).reshape(N, -1)
    rope = np.tile(turn(down[R:], cfg.rope, P, place), (N, 1))
    return q, np.concatenate([kv[:, :H], rope], axis=1), kv[:, H:]


def attend(w, cfg: AttentionConfig, window: int, x_bLD, segments, places, eps: float):
    """The layer's output [b, L, D]; `w` holds its weights as float64 numpy arrays, by name."""
    heads = mla_heads if cfg.kind == "mla" else gqa_heads
    y_bLD = np.zeros(x_bLD.shape)
    for b, row in enumerate(x_bLD):
        made = [heads(w, cfg, x, places[b][i], eps) for i, x in enumerate(row)]
        width = made[0][0].shape[1]
        scale = width**-0.5 * m(cfg.rope, cfg.rope.mscale_all_dim) ** 2
        for i in range(len(row)):
            first = max(i - window + 1, 0) if window else 0
            seen = [j for j in range(first, i + 1) if segments[b][j] == segments[b][i] != 0]
            out = []
            for n, q in enumerate(made[i][0]):
                g = n * made[i][1].shape[0] // cfg.num_heads
                scores = np.array([q @ made[j][1][g] for j in seen]) * scale
                weights = np.exp(scores)
                total = weights.sum() + (np.exp(w["sinks"][n]) if cfg.sinks else 0)
                values = [p * made[j][2][g] / total for p, j in zip(weights, seen, strict=True)]
                out.append(sum(values, np.zeros(made[i][2].shape[1])))
            y_bLD[b, i] = np.concatenate(out) @ w["w_o"] + (w["b_o"] if cfg.out_bias else 0)
    return y_bLD
