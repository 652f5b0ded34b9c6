"""Attention over cp: every kind against one device, in float64, forward and gradients; what is
sent; and what is refused."""

import re
from dataclasses import replace
from functools import cache

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import PartitionSpec as P

from moejax.core import collectives, params
from moejax.core.mesh import CONTEXTS, Fold, ParallelConfig, make_mesh
from moejax.core.precision import PrecisionConfig
from moejax.core.sharding import COMPUTE, specs
from moejax.data.context import order_tokens
from moejax.model.attention import ATTENTIONS, AttentionConfig, MLAConfig
from moejax.model.attention.context import split_axes
from moejax.model.context import my_tokens, split_rows, spread_of, whole_rows
from moejax.model.rope import RopeConfig, rope_table
from moejax.model.stream import Draw, count_batch, make_stream, one_microbatch
from tests.oracle import max_relative_error

D, LENGTH, WINDOW = 16, 24, 5
WIDE = PrecisionConfig(*["float64"] * 4)
GQA = AttentionConfig(num_heads=8, num_kv_heads=4, head_dim=4, sinks=True)
PLAIN = replace(GQA, sinks=False)
MLA = AttentionConfig(
    kind="mla", num_heads=8, head_dim=4, mla=MLAConfig(q_rank=6, kv_rank=6, value_dim=4),
    rope=RopeConfig(dim=4),
)  # fmt: skip
RECOMPUTED = replace(MLA, sinks=True, mla=replace(MLA.mla, recompute_up=True))
FEW = replace(MLA, num_heads=4)  # two here: fewer than cp
# One document; documents of 1, 2, 1, 11 and 3 tokens, which do not divide, and padding; nearly all
# padding; nothing else.
SIZES = ((24,), (1, 2, 1, 11, 3), (1,), ())
# Rows whose documents "dynamic" cuts over none, 2 or 4 of 4 ranks (over 6: none, 2 or 6).
WHOLE = ((6, 6, 6, 6), (5, 1, 5, 1, 5, 1, 5, 1), (5, 5, 5, 5), ())
CUT_IN_2 = ((9, 6, 3, 6), WHOLE[0], (), WHOLE[1])
LEVELS = {4: (WHOLE, CUT_IN_2, SIZES), 6: (((4,) * 6,) * 4, ((8, 8, 8), *((4,) * 6,) * 3), SIZES)}
# (attention, window, kind, pp); the layers' tp is 2.
CASES = [
    *((GQA, WINDOW, kind, 1) for kind in CONTEXTS),
    *((PLAIN, 0, kind, 1) for kind in ("ring", "ulysses")),
    *((MLA, 0, kind, 1) for kind in CONTEXTS if kind != "ulysses_ring"),
    (FEW, 0, "ulysses_ring", 1),
    *((RECOMPUTED, WINDOW, kind, 1) for kind in ("ring", "ulysses")),
    (GQA, WINDOW, "ring", 2),
    (FEW, 0, "ulysses_ring", 2),
]


def rows(sizes_b=SIZES) -> dict[str, np.ndarray]:
    """Returns "segment_ids" and "positions" of the rows."""
    ids, places = np.zeros((2, len(sizes_b), LENGTH), np.int32)
    for row, sizes in enumerate(sizes_b):
        ends = np.cumsum(sizes, dtype=int)
        for document, (end, size) in enumerate(zip(ends, sizes, strict=True), start=1):
            ids[row, end - size : end], places[row, end - size : end] = document, np.arange(size)
    return dict(segment_ids=ids, positions=places)


def layer(cfg: AttentionConfig, window: int, grid: Fold):
    """Returns an attention layer on a grid."""
    make = ATTENTIONS[cfg.kind]
    return make(
        cfg, D, window=window, std=0.5, out_std=0.5, eps=1e-6, fold=grid, precision=WIDE,
        rngs=nnx.Rngs(0),
    )  # fmt: skip


@cache
def program(cfg: AttentionConfig, window: int, grid: Fold):
    """Returns the jitted (weights, x [b, L, D], pull, batch) -> (y, gradients of sum(y * pull) in
    the weights and x), whole rows and weights."""
    abstract = nnx.eval_shape(lambda: layer(cfg, window, grid))
    definition, (dims, _) = params.partition(abstract)[0], params.dims_of(abstract)

    def device(weights, x_bLD, pull_bLD, batch):
        ids_bL = batch["segment_ids"]
        counts = one_microbatch(count_batch(ids_bL, ids_bL, grid))

        def loss(weights, x_bLD):
            own = collectives.vary(weights, grid.all)
            micro = split_rows(batch | {"x": x_bLD, "pull": pull_bLD}, grid)
            spread = spread_of(micro, grid)
            rope = rope_table(micro["positions"], cfg.rope_dim, cfg.rope, jnp.float64)
            draw = Draw(spread=spread)
            stream = make_stream(micro["segment_ids"], rope, counts, grid, draw=draw)
            x_tD, pull_tD = (
                my_tokens(collectives.vary(micro[name], grid.all).reshape(-1, D), grid)
                for name in ("x", "pull")
            )
            y_tD, _ = params.assemble(definition, own, {})(x_tD, stream)
            share = collectives.psum((y_tD * pull_tD).sum(), grid.all) / grid.degree("pp")
            whole = whole_rows(y_tD, len(ids_bL), spread, grid)
            return share, collectives.pmax(whole, grid.all)

        grads, y_bLD = jax.grad(loss, (0, 1), has_aux=True)(weights, x_bLD)
        return y_bLD, grads

    w_specs = specs(dims, COMPUTE, grid)
    sharded = jax.shard_map(
        device, mesh=make_mesh(grid), in_specs=(w_specs, P(), P(), P()),
        out_specs=(P(), (w_specs, P())), check_vma=True,
    )  # fmt: skip
    return jax.jit(sharded)


def arguments(cfg: AttentionConfig, cp: int, groups=(), sizes=SIZES):
    """Returns the arguments of a program: random numbers, and the rows."""
    rng, batch = np.random.default_rng(0), rows(sizes)
    abstract = nnx.eval_shape(lambda: layer(cfg, 0, Fold()))
    weights = jax.tree.map(
        lambda leaf: rng.normal(size=leaf.shape) / np.sqrt(leaf.shape[0]),
        params.partition(abstract)[1],
    )
    x, pull = rng.normal(size=(2, *batch["segment_ids"].shape, D))
    return weights, x, pull, batch | {"order": order_tokens(batch["segment_ids"], cp, groups)}


@cache
def oracle(cfg: AttentionConfig, window: int, sizes=SIZES):
    """Returns what one device makes of whole rows."""
    given = arguments(cfg, 1, sizes=sizes)
    return jax.tree.map(np.asarray, program(cfg, window, Fold())(*given))


def assert_alike(found, wanted) -> None:
    """Asserts that results and gradients are those of one device."""
    for (path, mine), right in zip(
        jax.tree_util.tree_leaves_with_path(found), jax.tree.leaves(wanted), strict=True
    ):
        assert np.abs(right).max() > 0.1, jax.tree_util.keystr(path)
        assert max_relative_error(mine, right) < 1e-10, jax.tree_util.keystr(path)


def name_of(case) -> str:
    cfg, window, kind, pp = case
    shown = [cfg.kind, str(cfg.num_heads), "sinks" * cfg.sinks, "window" * bool(window), kind]
    return "-".join([*filter(None, shown), *["pp"] * (pp > 1)])


@pytest.mark.parametrize("case", CASES, ids=map(name_of, CASES))
def test_a_layer_attends_as_on_one_device(case):
    """Packed rows of any lengths, documents of one token, one that fills the row, padding alone."""
    cfg, window, kind, pp = case
    grid = ParallelConfig(pp=pp, cp=4, tp=2, ep=2, cp_kind=kind).fold()
    with jax.enable_x64(True):
        found = program(cfg, window, grid)(*arguments(cfg, 4, grid.groups))
        assert_alike(found, oracle(cfg, window))


@pytest.mark.parametrize("level", range(3))
@pytest.mark.parametrize(
    ("cfg", "window", "cp"),
    [(GQA, WINDOW, 4), (PLAIN, 0, 6), (MLA, 0, 4), (RECOMPUTED, WINDOW, 4)],
    ids=["gqa-sinks-window", "gqa-cp6", "mla", "mla-sinks-window-recomputed"],
)
def test_each_group_attends_as_on_one_device(cfg, window, cp, level):
    """Documents on one rank, on groups, on all: the device sees which from the order."""
    grid, sizes = dynamic(cp), LEVELS[cp][level]
    with jax.enable_x64(True):
        given = arguments(cfg, cp, grid.groups, sizes)
        assert level_of(given[-1], grid) == level
        assert_alike(program(cfg, window, grid)(*given), oracle(cfg, window, sizes))


def dynamic(cp: int) -> Fold:
    """Returns a grid of dynamic context parallelism."""
    return ParallelConfig(cp=cp, tp=2, ep=2, cp_kind="dynamic").fold()


def level_of(batch, grid: Fold) -> int:
    """Returns the level of a batch, which all ranks agree on."""

    def device(batch):
        spread = spread_of(split_rows(batch, grid), grid)
        assert spread is not None and spread.level is not None
        return collectives.vary(spread.level, grid.all)[None]

    mesh, out = make_mesh(grid), P(grid.all)
    run = jax.jit(jax.shard_map(device, mesh=mesh, in_specs=P(), out_specs=out, check_vma=True))
    (level,) = set(np.asarray(run(batch)).tolist())
    return level


def test_padding_and_neighbours_do_not_raise_the_level():
    """A document that ends where a rank does; padding, of id 0, on both sides of one."""
    ids = np.repeat([[1, 2, 0, 0, 3, 4, 0, 0]], 3, axis=1)
    batch = {"segment_ids": ids, "order": np.arange(24, dtype=np.int32)[None]}
    assert level_of(batch, dynamic(4)) == 0
    for first, level in ((5, 1), (17, 1), (11, 2)):
        joined = ids.copy()
        joined[0, first : first + 2] = 9
        assert level_of(batch | {"segment_ids": joined}, dynamic(4)) == level


def branches_in(jaxpr) -> list:
    """Returns the equations, at any depth, that switch between three branches."""
    found = []
    for eqn in jaxpr.eqns:
        inner = [p for v in eqn.params.values() for p in (v if isinstance(v, tuple) else [v])]
        jaxprs = [getattr(p, "jaxpr", p) for p in inner if hasattr(getattr(p, "jaxpr", p), "eqns")]
        is_switch = eqn.primitive.name == "cond" and len(eqn.params["branches"]) == 3
        found += [eqn] if is_switch else [e for j in jaxprs for e in branches_in(j)]
    return found


@pytest.mark.parametrize("cfg", [GQA, MLA], ids=["gqa", "mla"])
def test_whole_documents_send_nothing_and_groups_keep_nothing(cfg):
    """Forward and backward: no collective in the first branch, in the others of the group alone;
    of what is gathered nothing is saved."""
    grid, any_of = dynamic(4), r" (?:all_\w+|psum\w*|pmax|ppermute|reduce_scatter)\["
    with jax.enable_x64(True):
        made = program(cfg, 0, grid).trace(*arguments(cfg, 4, grid.groups)).jaxpr
    forward, backward = branches_in(made.jaxpr)
    for eqn, gradients in ((forward, False), (backward, True)):
        whole, *groups = map(str, eqn.params["branches"])
        assert not re.findall(any_of, whole)
        for count, text in enumerate(groups, start=1):
            axes = re.findall(r"axis_name=\(([^)]*)\)", text)
            assert {axis for found in axes for axis in re.findall(r"\w+", found)} == set(
                grid["cp"][-count:]
            )
            assert text.count(" all_gather[") == 2 and gradients == (" reduce_scatter[" in text)
    kept = [v.aval.shape for v in forward.outvars]
    assert kept and all(shape[:2] == (len(SIZES), LENGTH // 4) for shape in kept)


@pytest.mark.parametrize("kind", ["ring", "ulysses"])
def test_d24_documents_do_not_see_each_other(kind):
    """Tokens before a document leave its results as they are, to the bit, and get no gradient from
    them; it is as good alone."""
    cfg, ids = PLAIN, rows()["segment_ids"]
    grid = ParallelConfig(cp=4, tp=2, ep=2, cp_kind=kind).fold()
    with jax.enable_x64(True):
        run, (weights, x, pull, batch) = program(cfg, 0, grid), arguments(cfg, 4)
        here = (ids == 4)[..., None]
        y, (_, dx) = run(weights, x, pull * here, batch)
        changed, _ = run(weights, np.where(here, x, 2 * x + 1), pull * here, batch)
        mine = np.asarray(y)[here[..., 0]]
        np.testing.assert_array_equal(mine, np.asarray(changed)[here[..., 0]])
        assert np.asarray(dx)[here[..., 0]].any() and not np.asarray(dx)[~here[..., 0]].any()
        alone = batch | {"segment_ids": ids * here[..., 0]}
        order = order_tokens(alone["segment_ids"], 4)
        y, _ = run(weights, x, pull, alone | {"order": order})
        assert max_relative_error(np.asarray(y)[here[..., 0]], mine) < 1e-10


@pytest.mark.parametrize(
    ("kind", "pp", "sent"),
    [
        ("ring", 1, {"ppermute"}), ("ring", 2, set()), ("all_gather", 1, set()),
        ("ulysses", 1, {"all_to_all"}), ("ulysses_ring", 1, {"all_to_all", "ppermute"}),
        ("ulysses_ring", 2, {"all_to_all"}),
    ],
)  # fmt: skip
def test_what_is_sent(kind, pp, sent):
    """Beside all_gathers: no ppermute in a pipeline, where some devices would wait for all."""
    grid = ParallelConfig(pp=pp, cp=4, tp=2, ep=2, cp_kind=kind).fold()
    with jax.enable_x64(True):
        made = program(PLAIN, 0, grid).trace(*arguments(PLAIN, 4)).jaxpr
    assert {name for name in ("ppermute", "all_to_all") if f" {name}[" in str(made)} == sent


def test_heads_are_split_as_far_as_those_of_keys_divide():
    grid = ParallelConfig(cp=12, cp_kind="ulysses_ring", ep=12).fold()
    assert dict(grid.axes) == {"cp_ep_0": 3, "cp_ep_1": 2, "cp_ep_2": 2}
    axes = grid["cp"]
    for heads, count in ((8, 2), (2, 1), (3, 0), (12, 3)):
        assert split_axes(grid, heads) == (axes[3 - count :], axes[: 3 - count])


def test_groups_are_of_neighbours_along_the_innermost_axes():
    def groups(**degrees):
        return ParallelConfig(cp_kind="dynamic", **degrees).fold().groups

    assert groups(cp=8, ep=8) == (1, 2, 4, 8) and groups(cp=12, ep=12) == (1, 2, 4, 12)
    assert groups(cp=6, ep=2) == (1, 2, 6) and groups(cp=6, ep=3) == (1, 3, 6)
    assert groups(dp=2, ep=2) == () == ParallelConfig(cp=4, ep=4).fold().groups


def test_heads_that_do_not_divide_are_refused():
    grid = ParallelConfig(cp=4, tp=4, ep=16).fold()
    with pytest.raises(ValueError, match="num_heads=8 over tp=4 do not divide over cp=4: set par"):
        layer(GQA, 0, grid)
    with pytest.raises(ValueError, match="parallel.cp_kind='p2p': choose from ulysses, "):
        ParallelConfig(cp_kind="p2p")
    with pytest.raises(ValueError, match='with cp a batch needs the "order"'):
        split_rows({"tokens": jnp.zeros((1, 8))}, grid)
