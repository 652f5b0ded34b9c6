"""Dispatch over two hops: what crosses nodes, what passes inside them, and what finds no room."""

from functools import cache

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from moejax.core.mesh import ParallelConfig, fold, make_mesh
from moejax.model.dispatch import hierarchical
from tests.oracle import max_relative_error

E, D, EACH = 16, 4, 6
CASES = {  # (K, devices of ep, of a node, of all)
    "two nodes": (3, 8, 4, 8),
    "four nodes, K=1": (1, 8, 2, 8),
    "K=E": (E, 4, 2, 8),
    "a device a node": (2, 4, 1, 4),
    "one node": (2, 4, 0, 4),
}


@cache
def compiled(case: str, budget: float):
    """Returns (grid, jitted (x, experts, weights, scales, cotangent) -> outputs), where expert e
    multiplies its rows by scales[e]."""
    _, ep, node, devices = CASES[case]
    grid = fold(*ParallelConfig(dp=devices, ep=ep, node=node).readings(devices))

    def layer(x, experts, weights, scales, cotangent):
        def loss(x, weights):
            rows = hierarchical.dispatch(x, experts, weights, E, grid, budget)
            place = jnp.arange(rows.x_sD.shape[0])
            ends = jnp.cumsum(rows.sizes_e)
            scale = scales[jnp.searchsorted(ends, place, side="right")]
            scale = jnp.where(place < ends[-1], scale, 0)
            y = hierarchical.combine(
                rows.x_sD * (rows.weights_s * scale)[:, None], rows.route, grid
            )
            return (y * cotangent).sum(), (y, rows)

        grads, (y, rows) = jax.grad(loss, argnums=(0, 1), has_aux=True)(x, weights)
        sent = [hop.back.recv_sizes[None] for hop in (rows.route.outer, rows.route.inner)]
        return y, grads, sent, rows.num_slots[None], rows.overflow[None]

    everyone = P(grid.all)
    mapped = jax.shard_map(
        layer, mesh=make_mesh(grid), out_specs=everyone,
        in_specs=(everyone, everyone, everyone, P(grid["ep"]), everyone),
    )  # fmt: skip
    return grid, jax.jit(mapped)


def choices(K: int, devices: int):
    """Yields experts [tokens, K], distinct per token; E is none."""
    generator, tokens = np.random.default_rng(0), devices * EACH
    spread = np.stack([generator.permutation(E)[:K] for _ in range(tokens)])
    yield "spread", spread
    gaps = np.where(generator.random(spread.shape) < 0.4, E, spread)
    gaps[EACH : 2 * EACH] = E  # all tokens of a device
    yield "with gaps", gaps
    for first in (0, E - K):
        yield f"all to {first}", np.tile(np.arange(first, first + K), (tokens, 1))
    odds = 0.6 ** np.arange(E)
    picks = [generator.choice(E, K, False, odds / odds.sum()) for _ in range(tokens)]
    yield "skewed", np.stack(picks)


def counted(experts, case):
    """Returns the rows of each hop [sender, peer], and the slots that each device receives."""
    K, ep, node, devices = CASES[case]
    inside = min(node or ep, ep)
    outer, inner = np.zeros((devices, ep // inside), int), np.zeros((devices, inside), int)
    slots = np.zeros(devices, int)
    for token, row in enumerate(experts):
        device = token // EACH
        group = device // ep * ep
        ranks = {e // (E // ep) for e in row if e < E}
        for to in {rank // inside for rank in ranks}:
            outer[device, to] += 1
            via = group + to * inside + device % inside
            for rank in (r for r in ranks if r // inside == to):
                inner[via, rank % inside] += 1
        for e in row[row < E]:
            slots[group + e // (E // ep)] += 1
    return outer, inner, slots


def check(case, experts, budget=0.0):
    """Compares values, gradients, rows on the way and their count; returns (overflow, grid)."""
    grid, run = compiled(case, budget)
    K, devices = experts.shape[1], CASES[case][3]
    generator = np.random.default_rng(1)
    x, cotangent = generator.normal(size=(2, devices * EACH, D)).astype(np.float32)
    weights = generator.normal(size=(devices * EACH, K)).astype(np.float32)
    scales = generator.normal(size=E).astype(np.float32)
    experts = experts.astype(np.int32)
    y, (dx, dw), sent, slots, overflow = run(x, experts, weights, scales, cotangent)
    if overflow.sum() == 0:
        scale = np.append(scales, 0)[experts]
        right = (weights * scale).sum(axis=1, keepdims=True)
        assert max_relative_error(y, right * x) < 1e-6
        assert max_relative_error(dx, right * cotangent) < 1e-6
        d_weights = scale * (x * cotangent).sum(axis=1, keepdims=True)
        assert max_relative_error(dw, d_weights) < 1e-6
        *rows, received = counted(experts, case)
        for mine, expected in zip((*sent, slots), (*rows, received), strict=True):
            np.testing.assert_array_equal(mine, expected)
        assert slots.sum() == (experts < E).sum()
    return int(overflow.sum()), grid


@pytest.mark.parametrize("case", CASES)
def test_each_token_crosses_once_to_a_node_and_once_to_a_device(case):
    K, *_, devices = CASES[case]
    for _, experts in choices(K, devices):
        overflow, _ = check(case, experts)
        assert overflow == 0, "there is room for the worst case"


@pytest.mark.parametrize("case", ["two nodes", "four nodes, K=1"])
def test_an_overflow_is_counted_where_any_room_is_exceeded_and_only_there(case):
    """Senders' and receivers' rooms of each hop, and the experts'."""
    K, ep, node, devices = CASES[case]
    found = set()
    for name, experts in choices(K, devices):
        overflow, grid = check(case, experts, budget=1.5)
        first, second, rows = hierarchical.rooms(EACH, K, E, grid, 1.5)
        outer, inner, slots = counted(experts, case)
        received = np.zeros((devices, 2), int)
        for device in range(devices):
            group, at = device // ep * ep, device % ep
            here, place = at // node, at % node
            received[device, 0] = sum(
                outer[group + n * node + place, here] for n in range(ep // node)
            )
            received[device, 1] = sum(inner[group + here * node + i, place] for i in range(node))
        assert outer.sum(axis=1).max() <= first.sent
        exceeded = {
            "crossing": received[:, 0].max() > first.received,
            "forwarded": inner.sum(axis=1).max() > second.sent,
            "inside": received[:, 1].max() > second.received,
            "slots": slots.max() > rows,
        }
        assert (overflow > 0) == any(exceeded.values()), (name, exceeded)
        found |= {what for what, is_so in exceeded.items() if is_so} or {"none"}
    assert found >= {"none", "slots"}, found
    if K == 1:
        assert found >= {"crossing", "inside"}, found


def test_the_rooms_of_a_worst_case_and_of_a_budget():
    """t=8, K=4, E=16 over 4 nodes of 2: a budget bounds what passes inside, and at the experts."""
    grid = fold(*ParallelConfig(dp=8, ep=8, node=2).readings(8))
    assert hierarchical.rooms(8, 4, 16, grid, 0.0) == ((32, 32), (64, 64), 128)
    assert hierarchical.rooms(8, 4, 16, grid, 1.5) == ((32, 32), (48, 48), 48)
    # One expert a token and four nodes: a quarter of the tokens, and half more, to each.
    assert hierarchical.rooms(8, 1, 16, grid, 1.5) == ((8, 12), (12, 16), 16)
