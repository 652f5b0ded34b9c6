"""A text sample from a model in training, on whatever fold it trains on: a look, not a server."""

from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, Float, Int

from moejax.core import collectives
from moejax.core.precision import at_least_float32
from moejax.model.attention import Cache, empty_cache
from moejax.train.gradients import stored_to_used
from moejax.train.state import Layout, TrainState

NextLogits = Callable[
    [TrainState, Int[np.ndarray, "1 L"], np.int32, Cache | None],
    tuple[Float[Array, " V"], Cache],
]


def make_next_logits(layout: Layout, slots: int) -> NextLogits:
    """Returns (state, tokens [1, L], place of the first, cache) -> (logits [V] after the last,
    cache with the tokens): without a cache for a prompt, then with the one that came back, which
    remembers `slots` tokens.

    Every device of the batch works on the same row, as often as tp has devices, so that the tokens
    divide over tp; all get the logits. Of the cache each device keeps its own.
    """
    fold = layout.fold

    def next_logits(state: TrainState, tokens_1L, first, cache):
        rows = fold.degree("tp")
        model = layout.model(stored_to_used(layout, state.params), state.buffers)
        tokens_bL, places_bL = collectives.vary(
            [
                jnp.broadcast_to(a, (rows, tokens_1L.shape[1]))
                for a in (tokens_1L, first + jnp.arange(tokens_1L.shape[1], dtype=jnp.int32)[None])
            ],
            fold["dp"],
        )
        cache = empty_cache(rows, slots) if cache is None else cache
        x_tD, cache = model.extend(tokens_bL, jnp.ones_like(tokens_bL), places_bL, cache)
        last_D = collectives.all_gather(x_tD, fold["tp"]).reshape(*tokens_bL.shape, -1)[0, -1]
        wide = at_least_float32(last_D.dtype)
        logits_v = jnp.matmul(last_D, model.head_weight(), preferred_element_type=wide)
        logits_tv = jnp.zeros((fold.degree("tp"), logits_v.shape[0]), wide)
        logits_tv = logits_tv.at[collectives.axis_index(fold["tp"])].set(logits_v)
        alone = collectives.axis_index(fold["dp"]) == 0
        logits_V = collectives.psum(jnp.where(alone, logits_tv, 0), fold.tokens).reshape(-1)
        return logits_V[: model.cfg.vocab_size], collectives.vary(cache, fold.all)

    own = Cache(P(fold.all or None), P(None, fold.all or None))
    prefill, decode = (
        jax.jit(
            jax.shard_map(
                next_logits,
                mesh=layout.mesh,
                in_specs=(layout.specs, P(), P(), given),
                out_specs=(P(), own),
                check_vma=True,
            )
        )
        for given in (None, own)
    )
    return lambda state, tokens, first, cache: (prefill if cache is None else decode)(
        state, tokens, first, cache
    )


def sample(
    next_logits: NextLogits,
    state: TrainState,
    prompt: Sequence[int],
    *,
    num_tokens: int,
    vocab_size: int,
    seed: int = 0,
    temperature: float = 0.8,
) -> list[int]:
    """Returns the prompt and `num_tokens` sampled tokens. Waits for the device at each token."""
    generator, ids, cache = np.random.default_rng(seed), list(prompt), None
    given = ids
    for _ in range(num_tokens):
        tokens, first = np.asarray([given], np.int32), np.int32(len(ids) - len(given))
        logits, cache = next_logits(state, tokens, first, cache)
        scores_V = np.asarray(logits, np.float64)[:vocab_size] / temperature
        chances_V = np.exp(scores_V - scores_V.max())
        given = generator.choice(vocab_size, 1, p=chances_V / chances_V.sum()).tolist()
        ids += given
    return ids
