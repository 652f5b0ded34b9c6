"""Text from a model on whatever fold it lies on: a prompt, then token by token with a cache."""

from collections.abc import Callable, Iterator, Sequence
from itertools import islice

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, Float, Int

from moejax.core import collectives
from moejax.core.params import Tree
from moejax.core.precision import at_least_float32
from moejax.model.attention import Cache, empty_cache
from moejax.train.gradients import stored_to_used
from moejax.train.state import Layout

Weights = tuple[Tree, Tree]
"""(parameters, buffers) as they rest."""
NextLogits = Callable[
    [Weights, Int[np.ndarray, "1 L"], np.int32, Cache | None],
    tuple[Float[Array, " V"], Cache],
]


def make_next_logits(layout: Layout, slots: int) -> NextLogits:
    """Returns (weights, tokens [1, L], place of the first, cache) -> (logits [V] after the last,
    cache with the tokens): without a cache for a prompt, then with the one that came back, which
    remembers `slots` tokens.

    Every device of the batch works on the same row, as often as tp has devices, so that the tokens
    divide over tp; all get the logits. Of the cache each device keeps its own.
    """
    fold = layout.fold

    def next_logits(weights: Weights, tokens_1L, first, cache):
        rows = fold.degree("tp")
        model = layout.model(stored_to_used(layout, weights[0]), weights[1])
        tokens_bL, places_bL = collectives.vary(
            [
                jnp.broadcast_to(a, (rows, tokens_1L.shape[1]))
                for a in (tokens_1L, first + jnp.arange(tokens_1L.shape[1], dtype=jnp.int32)[None])
            ],
            fold.batch,
        )
        cache = empty_cache(rows, slots) if cache is None else cache
        x_tD, cache = model.extend(tokens_bL, jnp.ones_like(tokens_bL), places_bL, cache)
        last_D = collectives.all_gather(x_tD, fold["tp"]).reshape(*tokens_bL.shape, -1)[0, -1]
        wide = at_least_float32(last_D.dtype)
        logits_v = jnp.matmul(last_D, model.head_weight(), preferred_element_type=wide)
        logits_tv = jnp.zeros((fold.degree("tp"), logits_v.shape[0]), wide)
        logits_tv = logits_tv.at[collectives.axis_index(fold["tp"])].set(logits_v)
        alone = collectives.axis_index(fold.batch) == 0
        logits_V = collectives.psum(jnp.where(alone, logits_tv, 0), fold.tokens).reshape(-1)
        return logits_V[: model.cfg.vocab_size], collectives.vary(cache, fold.all)

    own = Cache(P(fold.all or None), P(None, fold.all or None))
    resting = (layout.specs.params, layout.specs.buffers)
    prefill, decode = (
        jax.jit(
            jax.shard_map(
                next_logits,
                mesh=layout.mesh,
                in_specs=(resting, P(), P(), given),
                out_specs=(P(), own),
                check_vma=True,
            )
        )
        for given in (None, own)
    )
    return lambda weights, tokens, first, cache: (prefill if cache is None else decode)(
        weights, tokens, first, cache
    )


def draw(
    logits_V: Float[np.ndarray, " V"],
    generator: np.random.Generator,
    temperature: float,
    top_p: float = 1.0,
) -> int:
    """Returns a token id drawn from softmax(logits / temperature), among the fewest likeliest ones
    whose chances together reach `top_p`; at temperature 0 the likeliest (the first of equals)."""
    if temperature == 0:
        return int(np.argmax(logits_V))
    scores_V = np.asarray(logits_V, np.float64) / temperature
    chances_V = np.exp(scores_V - scores_V.max())
    chances_V /= chances_V.sum()
    if top_p < 1:
        order_V = np.argsort(-chances_V, kind="stable")
        kept = np.searchsorted(np.cumsum(chances_V[order_V]), top_p) + 1
        chances_V[order_V[kept:]] = 0
        chances_V /= chances_V.sum()
    return generator.choice(len(chances_V), p=chances_V)


def read_prompt(
    next_logits: NextLogits, weights: Weights, prompt: Sequence[int]
) -> tuple[Float[Array, " V"], Cache]:
    """Returns (logits after a prompt of at least one token, the cache that holds it)."""
    return next_logits(weights, np.asarray([prompt], np.int32), np.int32(0), None)


def continuation(
    next_logits: NextLogits,
    weights: Weights,
    read: tuple[Float[Array, " V"], Cache],
    length: int,
    *,
    generator: np.random.Generator,
    vocab_size: int,
    temperature: float = 0.8,
    top_p: float = 1.0,
) -> Iterator[int]:
    """Yields sampled tokens without end, each once the device has it, after a prompt of `length`
    tokens that `read_prompt` has read. Ids from `vocab_size` on have no text, and are not drawn."""
    logits, cache = read
    while True:
        token = draw(np.asarray(logits)[:vocab_size], generator, temperature, top_p)
        yield token
        one = np.asarray([[token]], np.int32)
        logits, cache = next_logits(weights, one, np.int32(length), cache)
        length += 1


def sample(
    next_logits: NextLogits,
    weights: Weights,
    prompt: Sequence[int],
    *,
    num_tokens: int,
    vocab_size: int,
    seed: int = 0,
    temperature: float = 0.8,
) -> list[int]:
    """Returns the prompt and `num_tokens` sampled tokens. Waits for the device at each token."""
    drawn = continuation(
        next_logits, weights, read_prompt(next_logits, weights, prompt), len(prompt),
        generator=np.random.default_rng(seed), vocab_size=vocab_size, temperature=temperature,
    )  # fmt: skip
    return [*prompt, *islice(drawn, num_tokens)]
