"""The MoE layer alone, with no mesh, against plain numpy: latent width, shared expert, its gate."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from moejax.core.mesh import Fold
from moejax.core.precision import PrecisionConfig
from moejax.model.dispatch import DISPATCHERS
from moejax.model.moe import MoE, MoEConfig
from moejax.model.rope import RopeConfig, rope_table
from moejax.model.router import RouterConfig
from moejax.model.stream import Counts, make_stream
from tests.oracle import max_relative_error

T, D, E, K, F, SHARED, LATENT = 6, 8, 4, 2, 5, 7, 3
FLOAT32 = PrecisionConfig(compute_dtype="float32")


def stream():
    ids, one = jnp.ones((1, T), jnp.int32), jnp.asarray(1.0)
    rope = rope_table(jnp.arange(T, dtype=jnp.int32)[None], 4, RopeConfig(), jnp.float32)
    count = jnp.asarray(float(T))
    return make_stream(ids, rope, Counts(count, count, one, count), Fold())


def silu(x):
    return x / (1 + np.exp(-x))


def expected(layer: MoE, x):
    """Each token through its experts one by one."""
    w = {name: np.asarray(value, np.float64) for name, value in weights(layer).items()}
    logits = x @ w["w_router"]
    y = np.zeros_like(x)
    sent = x @ w["w_down"] if "w_down" in w else x
    for t in range(T):
        chosen = np.argsort(-logits[t], kind="stable")[:K]
        probs = np.exp(logits[t, chosen] - logits[t, chosen].max())
        out = 0
        for e, weight in zip(chosen, probs / probs.sum(), strict=True):
            gate, up = np.einsum("d,dcf->cf", sent[t], w["w_in"][e])
            out = out + weight * (silu(gate) * up) @ w["w_out"][e]
        y[t] = out @ w["w_up"] if "w_up" in w else out
    gate, up = np.moveaxis(np.einsum("td,dcf->tcf", x, w["shared_in"]), 1, 0)
    shared = (silu(gate) * up) @ w["shared_out"]
    if "w_gate" in w:
        shared = shared / (1 + np.exp(-(x @ w["w_gate"])))
    return y + shared


def weights(layer: MoE) -> dict:
    names = ("w_router", "w_down", "w_up", "w_gate")
    found = {name: getattr(layer, name)[...] for name in names if hasattr(layer, name)}
    found |= {"w_in": layer.experts.w_in[...], "w_out": layer.experts.w_out[...]}
    return found | {"shared_in": layer.shared.w_in[...], "shared_out": layer.shared.w_out[...]}


@pytest.mark.parametrize("latent_dim", [0, LATENT])
@pytest.mark.parametrize("shared_gate", [False, True])
def test_it_equals_numpy(latent_dim, shared_gate):
    cfg = MoEConfig(
        num_experts=E, top_k=K, ffn_dim=F, shared_ffn_dim=SHARED,
        latent_dim=latent_dim, shared_gate=shared_gate,
    )  # fmt: skip
    layer = MoE(cfg, D, std=0.7, out_std=0.7, precision=FLOAT32, rngs=nnx.Rngs(1))
    assert layer.experts.w_in.shape == (E, latent_dim or D, 2, F)
    x = jax.random.normal(jax.random.key(0), (T, D))
    y, _ = layer(x, stream())
    assert max_relative_error(y, expected(layer, np.asarray(x, np.float64))) < 1e-5


def test_biases_of_experts_are_weighted_as_their_output_is():
    """D30, as gpt-oss: weight * (h w_out + b_out), h clamped; against numpy, expert by expert."""
    cfg = MoEConfig(num_experts=E, top_k=K, ffn_dim=F, bias=True, swiglu_limit=1.0)
    layer = MoE(cfg, D, std=0.7, out_std=0.7, precision=FLOAT32, rngs=nnx.Rngs(1))
    experts = layer.experts
    assert experts.b_in.shape == (E, 2, F) and experts.b_out.shape == (E, D)
    for b in (experts.b_in, experts.b_out):
        b[...] = jax.random.normal(jax.random.key(b.size), b.shape)
    x = jax.random.normal(jax.random.key(0), (T, D))
    y, _ = layer(x, stream())
    w_in, b_in, w_out, b_out, w_router = (
        np.asarray(a[...], np.float64)
        for a in (experts.w_in, experts.b_in, experts.w_out, experts.b_out, layer.w_router)
    )
    logits, right = np.asarray(x, np.float64) @ w_router, np.zeros((T, D))
    for t in range(T):
        chosen = np.argsort(-logits[t], kind="stable")[:K]
        chances = np.exp(logits[t, chosen])
        for e, weight in zip(chosen, chances / chances.sum(), strict=True):
            gate, up = np.einsum("d,dcf->cf", x[t], w_in[e]) + b_in[e]
            gate, up = np.minimum(gate, 1), np.clip(up, -1, 1)
            h = (up + 1) * gate / (1 + np.exp(-1.702 * gate))
            right[t] += weight * (h @ w_out[e] + b_out[e])
    assert max_relative_error(y, right) < 1e-5


def test_filling_experts_up_evens_their_rows_and_changes_nothing_else(monkeypatch):
    """Room for ceil(6 * 2 / 4) = 3 tokens each; 4 slots a token then, and a budget of as many rows
    as 2 slots a token would get."""
    seen = []
    plain = DISPATCHERS["all_gather"]

    def watched(x_tD, experts, weights, num_experts, fold, budget):
        made = plain.dispatch(x_tD, experts, weights, num_experts, fold, budget)
        seen.append((np.asarray(made.sizes_e).tolist(), budget, experts.shape[1]))
        return made

    monkeypatch.setitem(DISPATCHERS, "all_gather", plain._replace(dispatch=watched))
    x, found = jax.random.normal(jax.random.key(0), (T, D)), []
    for fill in (False, True):
        router = RouterConfig(capacity_factor=1.0, pad_to_capacity=fill)
        cfg = MoEConfig(num_experts=E, top_k=K, ffn_dim=F, budget=1.5, router=router)
        layer = MoE(cfg, D, std=0.7, out_std=0.7, precision=FLOAT32, rngs=nnx.Rngs(1))
        found.append(layer(x, stream()))
    (y, aux), (filled_y, filled_aux) = found
    (sizes, budget, slots), (filled_sizes, filled_budget, filled_slots) = seen
    assert filled_sizes == [3] * E and sum(sizes) < 3 * E
    assert (budget * slots, filled_budget * filled_slots, filled_slots) == (1.5 * K, 1.5 * K, E)
    assert aux["dropped"] == filled_aux["dropped"] == K * T - sum(sizes) > 0
    assert max_relative_error(filled_y, y) < 1e-6


def test_a_gate_without_a_shared_expert_is_refused():
    with pytest.raises(ValueError, match="gates no shared expert"):
        MoEConfig(shared_gate=True)
    with pytest.raises(ValueError, match=r"moe.budget=0.5 is below"):
        MoEConfig(budget=0.5)
    with pytest.raises(ValueError, match="the shared expert has neither bias nor clamp"):
        MoEConfig(shared_ffn_dim=8, swiglu_limit=7.0)
