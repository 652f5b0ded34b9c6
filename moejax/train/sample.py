"""A text sample from a model in training, on whatever fold it trains on. No cache: a look, not a
server."""

from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec as P

from moejax.core import collectives
from moejax.core.precision import at_least_float32
from moejax.model.stream import count_batch, one_microbatch
from moejax.train.state import Layout, TrainState
from moejax.train.step import stored_to_used


def make_next_logits(layout: Layout) -> Callable[[TrainState, jax.Array, jax.Array], jax.Array]:
    """Returns the jitted (state, tokens [1, L], length) -> logits [V] after token length-1.

    Every dp rank works on the same row; all devices get the logits.
    """

    def next_logits(state: TrainState, tokens_bL, length):
        fold = layout.fold
        tokens_bL = collectives.vary(tokens_bL, fold["dp"])
        model = layout.model(stored_to_used(layout, state.params), state.buffers)
        place_L = jnp.arange(tokens_bL.shape[1], dtype=jnp.int32)
        segment_bL = jnp.broadcast_to((place_L < length).astype(jnp.int32)[None], tokens_bL.shape)
        segment_bL = collectives.vary(segment_bL, fold["dp"])
        counts = one_microbatch(count_batch(segment_bL, tokens_bL, fold))
        places_bL = jnp.broadcast_to(place_L[None], tokens_bL.shape)
        x_tD, _ = model.hidden(tokens_bL, segment_bL, places_bL, counts)
        x_TD = collectives.all_gather(x_tD, fold["tp"])
        x_bLD = x_TD.reshape(*tokens_bL.shape, -1)
        last_D = jax.lax.dynamic_index_in_dim(x_bLD, length - 1, axis=1, keepdims=False)[0]
        wide = at_least_float32(last_D.dtype)
        logits_v = jnp.matmul(last_D, model.head_weight(), preferred_element_type=wide)
        logits_tv = jnp.zeros((fold.degree("tp"), logits_v.shape[0]), wide)
        logits_tv = logits_tv.at[collectives.axis_index(fold["tp"])].set(logits_v)
        alone = collectives.axis_index(fold["dp"]) == 0
        return collectives.psum(jnp.where(alone, logits_tv, 0), fold.tokens).reshape(-1)

    sharded = jax.shard_map(
        next_logits,
        mesh=layout.mesh,
        in_specs=(layout.specs, P(), P()),
        out_specs=P(),
        check_vma=True,
    )
    return jax.jit(sharded)


def sample(
    next_logits: Callable,
    state: TrainState,
    prompt: Sequence[int],
    *,
    num_tokens: int,
    length: int,
    vocab_size: int,
    seed: int = 0,
    temperature: float = 0.8,
) -> list[int]:
    """Returns the prompt and `num_tokens` sampled tokens, within a window of `length` tokens.

    Waits for the device at each token.
    """
    generator, ids = np.random.default_rng(seed), list(prompt)
    for _ in range(num_tokens):
        window = ids[-length:]
        tokens = np.zeros((1, length), np.int32)
        tokens[0, : len(window)] = window
        logits = next_logits(state, tokens, np.int32(len(window)))
        scores_V = np.asarray(logits, np.float64)[:vocab_size] / temperature
        chances_V = np.exp(scores_V - scores_V.max())
        ids += generator.choice(vocab_size, 1, p=chances_V / chances_V.sum()).tolist()
    return ids
