"""Rows over NVLink on the GPUs of this host: right first, then how fast, beside XLA's collective.

    python benchmarks/exchange.py              all GPUs of this process, one exchange group
    python benchmarks/exchange.py --small      tiny shapes, few calls

Every call has other rows and another routing, spread or with one device that most want, and its
results and gradients have to be those of `ragged_all_to_all`, to the bit: call after call into the
same buffers is what would show a peer that writes too early. A time is the best of five bursts of
calls, there and back, each waited for once. Without GPUs both columns are the emulation.
"""

import argparse
import sys
import time
from functools import partial
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import jax  # noqa: E402
import jax.numpy as jnp  # noqa: E402
import numpy as np  # noqa: E402
from jax.sharding import PartitionSpec  # noqa: E402

from moejax.core import collectives  # noqa: E402
from moejax.core.mesh import fold, make_mesh  # noqa: E402
from moejax.model.dispatch.ragged import tables  # noqa: E402
from pallas_kernels import return_rows, send_rows, sort_slots  # noqa: E402

K = 8
DIMS = {"Qwen3-30B": 2048, "DeepSeek-V3": 7168}


def there_and_back(grid, rows: int, impl, x_tD, ranks_tK, dy_tD):
    """Returns each token's sum of the rows that it sent, twice what they were, and the gradient."""
    num, axes = grid.degree("ep"), grid["ep"]
    tokens_s, slots_tK, sizes_r = sort_slots(ranks_tK, num)
    there, back, _ = tables(sizes_r, rows, axes)
    order, beside_s4 = (tokens_s, slots_tK), jnp.ones((tokens_s.shape[0], 4), jnp.float32)
    move = {"collective": collectives.ragged_all_to_all, "impl": impl}

    def run(x_tD):
        beside = collectives.vary(2 * beside_s4, grid.all)
        x_rD, beside_r4 = send_rows(x_tD, beside, order, there, back, rows, axes, **move)
        y_rD = x_rD * beside_r4[:, :1].astype(x_rD.dtype)
        return return_rows(y_rD, order, there, back, axes, **move)

    y_tD, pull = jax.vjp(run, x_tD)
    return y_tD, *pull(dy_tD)


def arrays(generator, num: int, tokens: int, dim: int, skewed: bool):
    """Returns x, to which devices each of its rows goes (one has most where skewed), and dy."""
    x, dy = (
        jnp.asarray(generator.standard_normal((num * tokens, dim)), jnp.bfloat16) for _ in range(2)
    )
    shares = np.r_[0.7 if skewed else 1.0, np.full(num - 1, 0.3 / (num - 1) if skewed else 1.0)]
    ranks = generator.choice(num, (num * tokens, K), p=shares / shares.sum())
    return x, jnp.asarray(ranks, jnp.int32), dy


def seconds(function, *args, bursts: int, calls: int) -> float:
    """Returns the best mean time of a call."""
    best = float("inf")
    for _ in range(bursts):
        start = time.perf_counter()
        jax.block_until_ready([function(*args) for _ in range(calls)][-1])
        best = min(best, (time.perf_counter() - start) / calls)
    return best


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--small", action="store_true", help="tiny shapes, few calls")
    small = parser.parse_args().small
    if jax.device_count() < 2:
        sys.exit("one device: there is nobody to exchange rows with")
    num, tokens, checks = jax.device_count(), 16 if small else 4096, 3 if small else 50
    grid = fold({"dp": num}, {"ep": num})
    mesh, spec, rows = make_mesh(grid), PartitionSpec(grid.all), num * tokens * K
    on_gpu = jax.devices()[0].platform == "gpu"

    def compiled(impl):
        body = partial(there_and_back, grid, rows, impl)
        return jax.jit(jax.shard_map(body, mesh=mesh, in_specs=(spec,) * 3, out_specs=spec))

    mine, plain = compiled("mosaic" if on_gpu else None), compiled("collective")
    generator = np.random.default_rng(0)
    for model, dim in {"small": 16}.items() if small else DIMS.items():
        for skewed in (False, True):
            made = partial(arrays, generator, num, tokens, dim, skewed)
            for _ in range(checks):
                args = made()
                for found, right in zip(mine(*args), plain(*args), strict=True):
                    np.testing.assert_array_equal(np.asarray(found), np.asarray(right))
            args, calls = made(), 2 if small else 20
            first, second = (1e6 * seconds(f, *args, bursts=5, calls=calls) for f in (mine, plain))
            print(
                f"{model}, {num} devices, {'skewed' if skewed else 'spread'}: {checks} calls right;"
                f" there and back, and gradients: {first:.0f} us, collective {second:.0f} us"
            )


if __name__ == "__main__":
    main()
