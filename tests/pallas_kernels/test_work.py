"""The lists of work: each item once, and cores evenly loaded under skew."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from benchmarks.gpu import zipf_sizes
from pallas_kernels.deviceless import GPUS
from pallas_kernels.grouped_gemm.tiles import choose
from pallas_kernels.grouped_gemm.work import by_size, following, mine
from pallas_kernels.inspect import GROUPS, ROWS, SHAPES

H100 = GPUS["h100"]


@pytest.mark.parametrize(("count", "cores"), [(0, 3), (1, 3), (3, 3), (7, 3), (11, 4), (24, 5)])
def test_every_item_is_one_cores(count, cores):
    seen = []
    for core in range(cores):
        turns, item = mine(jnp.int32(count), jnp.int32(core), cores)
        seen.append([int(item(jnp.int32(turn))) for turn in range(int(turns))])
        after = [int(following(jnp.int32(i), cores)) for i in seen[-1]]
        assert after[:-1] == seen[-1][1:] and all(i >= count for i in after[-1:])
    assert sorted(sum(seen, [])) == list(range(count))
    assert max(map(len, seen)) - min(map(len, seen)) <= 1


def at_work(sizes: np.ndarray, K: int, N: int) -> float:
    """The mean over the largest load of a core, in blocks of rows of the weight gradient."""
    tiles = choose("weight", H100, K, N, ROWS // GROUPS)
    each = -(-K // tiles.rows) * -(-N // tiles.cols)
    live, (_, first, end) = by_size(jnp.asarray(sizes, jnp.int32), ROWS)
    steps = np.repeat(-(-np.asarray(end - first)[: int(live[0])] // tiles.depth), each)
    load = np.zeros(H100.cores)
    count = len(steps)
    place = jax.vmap(lambda core: mine(jnp.int32(count), core, H100.cores)[0])
    turns = np.asarray(place(jnp.arange(H100.cores, dtype=jnp.int32)))
    for core in range(H100.cores):
        item = mine(jnp.int32(count), jnp.int32(core), H100.cores)[1]
        items = np.asarray(item(jnp.arange(turns[core], dtype=jnp.int32)))
        load[core] = steps[items].sum()
    assert load.sum() == steps.sum()
    return load.mean() / load.max()


@pytest.mark.parametrize("name", SHAPES)
@pytest.mark.parametrize("load", ["balanced", "zipf", "half"])
def test_cores_are_evenly_loaded(name, load):
    """The figures of the kernel guide."""
    half = np.full(GROUPS, ROWS // 2 // (GROUPS - 1), np.int32)
    half[0] = ROWS - half[1:].sum()
    sizes = {
        "balanced": np.full(GROUPS, ROWS // GROUPS), "zipf": zipf_sizes(ROWS, GROUPS), "half": half
    }[load]  # fmt: skip
    least = {"balanced": 0.97, "zipf": 0.89, "half": 0.85}[load]
    dim, ffn = SHAPES[name]
    for K, N in ((dim, 2 * ffn), (ffn, dim)):
        narrow = {"zipf": 0.74, "half": 0.57}.get(load, least) if (K, N) == (768, 2048) else least
        assert at_work(sizes, K, N) >= narrow - 0.005
