"""What attention remembers of the tokens before: a cache for decoding.

A layer's memory is a tuple of arrays [b, S, ...], its last S tokens, the newest at the end: keys
and values (GQA), or the latent and the rope key (MLA). New tokens are put behind it, so that a
query sees keys as in one long row: causal mask, window and document ids need no special case, any
number of tokens may come at a time, and the oldest are forgotten. Slots that nothing has reached
yet have document id 0, which nothing sees. The same on one device and inside `shard_map`, where
each device holds the memory of its own rows and heads.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Int, Shaped

from moejax.model.stream import Stream

Memory = tuple[Shaped[Array, "b S ..."], ...]


class Cache(NamedTuple):
    """A model's memory of the last S tokens of each of b rows."""

    segment_ids_bS: Any
    """int32 [b, S]. Document ids; 0: padding, or nothing yet."""
    layers: Any = None
    """{stack: {block: Memory}}, arrays with a leading layer dim; None: nothing yet."""


def empty_cache(rows: int, slots: int) -> Cache:
    """Returns the Cache of `rows` rows that will remember `slots` tokens, and holds none."""
    return Cache(jnp.zeros((rows, slots), jnp.int32))


def last(x: Shaped[Array, "b S ..."], slots: int) -> Shaped[Array, "b slots ..."]:
    """Returns the last `slots` of dim 1, zeros before them where there are fewer."""
    kept = x[:, max(x.shape[1] - slots, 0) :]
    missing = ((0, 0), (slots - kept.shape[1], 0), *((0, 0),) * (x.ndim - 2))
    return jnp.pad(kept, missing)


def recall(
    new: Memory, held: Memory | None, stream: Stream, window: int
) -> tuple[Memory, Int[Array, "b S"], Memory | None]:
    """Returns (held and new together, their document ids, what is held from now on).

    Nothing is held where the stream has no memory (training). A layer with a window holds no more
    than the window shows.
    """
    ids_bL, before_bS = stream.segment_ids_bL, stream.remembered_ids_bS
    if before_bS is None:
        return new, ids_bL, None
    slots = min(before_bS.shape[1], window - 1) if window else before_bS.shape[1]
    if held is not None:
        new = jax.tree.map(lambda h, n: jnp.concatenate([h, n], axis=1), held, new)
        ids_bL = jnp.concatenate([last(before_bS, slots), ids_bL], axis=1)
    return new, ids_bL, jax.tree.map(lambda x: last(x, slots), new)
