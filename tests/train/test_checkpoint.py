"""Checkpoints: exact on any mesh, safe against donation and `kill -9`, kept and refused as told."""

import json
import logging
import random
import signal
import subprocess
import sys
import threading
import time
from dataclasses import replace
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from moejax.core.mesh import ParallelConfig
from moejax.train.checkpoint import CheckpointConfig, Checkpointer, load_weights, read_metadata
from tests.train.folds import VOCAB, Case, make_trainer

ROOT = Path(__file__).parents[2]
NUM_EXPERTS = 8


def make_mesh(dp: int, ep: int) -> Mesh:
    devices = jax.devices()[: dp * ep]
    return jax.make_mesh((dp, ep), ("dp", "ep"), axis_types=(AxisType.Auto,) * 2, devices=devices)


def make_state(mesh: Mesh, width: int = 16) -> dict:
    """A train state whose experts e hold the constant e, and with Adam moments after one update."""
    expert = jnp.arange(NUM_EXPERTS, dtype=jnp.float32)
    params = {
        "experts": {"w_in": jnp.broadcast_to(expert[:, None, None], (NUM_EXPERTS, 4, width))},
        "embed": jax.random.normal(jax.random.key(1), (32, 4), jnp.bfloat16),
        "router_bias": expert / 7,
    }
    opt = optax.adam(1e-2)
    with jax.numpy_dtype_promotion("standard"):
        _, moments = opt.update(jax.tree.map(jnp.ones_like, params), opt.init(params))
    state = {"params": params, "opt": moments, "step": jnp.int32(7), "rng": jax.random.key(42)}
    return jax.tree.map(lambda x, s: jax.device_put(x, s), state, shardings(mesh, state))


def shardings(mesh: Mesh, state: dict) -> dict:
    """Experts over ep, the embedding over dp, the rest replicated."""

    def one(path, leaf):
        name = jax.tree_util.keystr(path)
        spec = P("ep") if "experts" in name else P("dp") if "embed" in name else P()
        return NamedSharding(mesh, spec)

    return jax.tree_util.tree_map_with_path(one, state)


def abstract(state: dict, mesh: Mesh) -> dict:
    return jax.tree.map(
        lambda x, s: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=s),
        state,
        shardings(mesh, state),
    )


def raw(leaf: jax.Array) -> np.ndarray:
    return np.asarray(
        jax.random.key_data(leaf) if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key) else leaf
    )


def assert_equal(got: dict, want: dict) -> None:
    assert jax.tree.structure(got) == jax.tree.structure(want)
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        assert a.dtype == b.dtype
        assert raw(a).tobytes() == raw(b).tobytes()


def saved_run(folder: Path, cfg: CheckpointConfig, steps: list[int], state: dict) -> None:
    checkpointer = Checkpointer(folder, cfg)
    for step in steps:
        checkpointer.save(step, {**state, "step": jnp.int32(step)}, {"step": step})
    checkpointer.close()


def run_python(code: str, *args: str) -> str:
    done = subprocess.run(
        [sys.executable, "-c", code, *args], cwd=ROOT, capture_output=True, text=True, timeout=50
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


# --- restoring on another mesh ---


@pytest.fixture(scope="module")
def run_on_2x4(tmp_path_factory):
    """A run saved with its experts over 4 of 8 devices, and the state it saved."""
    folder = tmp_path_factory.mktemp("run")
    state = make_state(make_mesh(2, 4))
    checkpointer = Checkpointer(folder, CheckpointConfig())
    assert checkpointer.save(7, state, {"data": {"row": 56}, "config": {"lr": 0.1}})
    checkpointer.close()
    return folder, state


@pytest.mark.parametrize(("dp", "ep"), [(1, 8), (4, 2), (1, 1), (2, 4)])
def test_restores_bit_equal_onto_the_targets_mesh(run_on_2x4, dp, ep):
    folder, state = run_on_2x4
    target = abstract(state, make_mesh(dp, ep))
    checkpointer = Checkpointer(folder, CheckpointConfig())
    got, extra = checkpointer.restore(target)
    checkpointer.close()
    assert extra == {"data": {"row": 56}, "config": {"lr": 0.1}}
    assert_equal(got, state)
    assert got["params"]["router_bias"].dtype == jnp.float32
    for leaf, want in zip(jax.tree.leaves(got), jax.tree.leaves(target), strict=True):
        assert leaf.sharding.is_equivalent_to(want.sharding, leaf.ndim)
    for shard in got["params"]["experts"]["w_in"].addressable_shards:
        first, last, _ = shard.index[0].indices(NUM_EXPERTS)
        want = np.arange(first, last, dtype=np.float32)[:, None, None]
        np.testing.assert_array_equal(shard.data, np.broadcast_to(want, shard.data.shape))
    # The key goes on as it would have.
    bits = [np.asarray(jax.random.bits(tree["rng"], (4,))) for tree in (got, state)]
    np.testing.assert_array_equal(*bits)


def test_tables_of_hash_routing_are_bit_equal_on_another_fold(tmp_path):
    """A fixed random table [V, K] of each MoE layer, by which tokens choose."""
    router = (("hash_layers", 2),)
    one = Case("", ParallelConfig(dp=4, tp=2, ep=8, zero=3), "ragged", router=router)
    other = replace(one, parallel=ParallelConfig(dp=2, tp=2, ep=2, etp=2), dispatch="all_to_all")
    state = make_trainer(one).new_state()
    checkpointer = Checkpointer(tmp_path, CheckpointConfig(asynchronous=False))
    checkpointer.save(1, state, {})
    layout = make_trainer(other).layout
    target = jax.tree.map(
        lambda leaf, at: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=at),
        layout.abstract, layout.shardings,
    )  # fmt: skip
    got, _ = checkpointer.restore(target)
    checkpointer.close()
    assert_equal(got, state)
    table = got.buffers["stack_0"]["block_0"]["moe"]["hash_table"]
    assert table.dtype == jnp.int32 and table.shape == (3, VOCAB, 2)
    first, second, _ = np.asarray(table)
    assert len(np.unique(first)) == 16 and not np.array_equal(first, second)


def test_metadata_and_weights_are_readable_on_one_device(run_on_2x4):
    folder, state = run_on_2x4
    code = """
import json, sys, jax, jax.numpy as jnp
from moejax.train.checkpoint import load_weights, read_metadata
assert len(jax.devices()) == 1
meta = read_metadata(sys.argv[1])
weights = load_weights(sys.argv[1], {"router_bias": meta["params.router_bias"],
    "experts": {"w_in": meta["params.experts.w_in"]}, "embed": meta["params.embed"]})
print(json.dumps({"meta": {k: [str(v.dtype), *v.shape] for k, v in meta.items()},
                  "bias": weights["router_bias"].tolist(), "last": float(weights["experts"]["w_in"][7, 3, 15])}))
"""  # noqa: E501
    seen = json.loads(run_python(code, str(folder)))
    assert len(seen["meta"]) == len(jax.tree.leaves(state))
    assert seen["meta"]["params.experts.w_in"] == ["float32", 8, 4, 16]
    assert seen["meta"]["params.embed"] == ["bfloat16", 32, 4]
    assert seen["meta"]["opt.0.nu.experts.w_in"] == ["float32", 8, 4, 16]
    assert seen["meta"]["rng"] == ["uint32", 2]
    assert seen["bias"] == state["params"]["router_bias"].tolist() and seen["last"] == 7.0


def test_weights_alone_start_another_run(run_on_2x4):
    folder, state = run_on_2x4
    mesh = make_mesh(1, 2)
    target = abstract(state, mesh)["params"]
    embed = target["embed"]
    target["embed"] = jax.ShapeDtypeStruct(embed.shape, jnp.float32, sharding=embed.sharding)
    for path in (folder, folder / "checkpoints" / "7", str(folder)):
        got = load_weights(path, target)
    assert got["embed"].dtype == jnp.float32
    np.testing.assert_array_equal(got["embed"], state["params"]["embed"].astype(jnp.float32))
    experts = got["experts"]["w_in"]
    assert experts.sharding.is_equivalent_to(target["experts"]["w_in"].sharding, 3)
    np.testing.assert_array_equal(experts, state["params"]["experts"]["w_in"])


def test_refusals_are_one_line_and_name_the_leaf(run_on_2x4, tmp_path):
    folder, state = run_on_2x4
    mesh = make_mesh(1, 1)
    wider = abstract(make_state(mesh, width=17), mesh)
    fewer = abstract({**state, "step": state["rng"]}, mesh)
    more = {**abstract(state, mesh), "tail": jax.ShapeDtypeStruct((3,), jnp.float32)}
    checkpointer = Checkpointer(folder, CheckpointConfig())
    for target, words in (
        (wider, r"'opt.0.mu.experts.w_in' is float32\[8, 4, 16\] there and float32\[8, 4, 17\]"),
        (fewer, r"'step' is int32\[\] there and uint32\[2\] here"),
        (more, r"'tail' is missing there and float32\[3\] here"),
    ):
        with pytest.raises(ValueError, match=words) as error:
            checkpointer.restore(target)
        assert "\n" not in str(error.value)
    rounded = abstract(state, mesh)
    rounded["params"]["embed"] = jax.ShapeDtypeStruct((32, 4), jnp.float32)
    with pytest.raises(ValueError, match=r"'params.embed' is bfloat16\[32, 4\] there and float32"):
        checkpointer.restore(rounded)  # exact resume converts nothing; load_weights does
    with pytest.raises(FileNotFoundError, match=r"no checkpoint of step 8 .* has \[7\]"):
        checkpointer.restore(abstract(state, mesh), step=8)
    checkpointer.close()
    with pytest.raises(ValueError, match=r"'params.experts.w_in' is float32\[8, 4, 16\] there"):
        load_weights(folder, wider["params"])
    with pytest.raises(FileNotFoundError, match="no checkpoint in"):
        load_weights(tmp_path, wider["params"])
    with pytest.raises(FileNotFoundError, match="no checkpoint in"):
        read_metadata(tmp_path)
    empty = Checkpointer(tmp_path, CheckpointConfig())
    assert empty.latest_step() is None
    with pytest.raises(FileNotFoundError, match="no checkpoint in"):
        empty.restore(wider)
    empty.close()
    with pytest.raises(ValueError, match="keep_last 0 must be 1 or more"):
        CheckpointConfig(keep_last=0)


# --- saving ---


@pytest.mark.parametrize("asynchronous", [True, False])
def test_retention(tmp_path, asynchronous):
    cfg = CheckpointConfig(save_every=2, keep_last=2, keep_every=4, asynchronous=asynchronous)
    state = make_state(make_mesh(1, 1))
    saved_run(tmp_path, cfg, [2, 4, 6, 8, 10, 12, 14], state)
    kept = sorted(int(p.name) for p in (tmp_path / "checkpoints").iterdir())
    assert kept == [4, 8, 12, 14]
    checkpointer = Checkpointer(tmp_path, cfg)
    assert [s for s in range(7) if checkpointer.should_save(s)] == [2, 4, 6]
    assert checkpointer.latest_step() == 14
    assert not checkpointer.save(14, state, {})  # saved already: nothing happens
    target = abstract(state, make_mesh(1, 1))
    for step in (None, 4):
        got, extra = checkpointer.restore(target, step)
        assert int(got["step"]) == extra["step"] == (step or 14)
    checkpointer.close()


def test_the_only_complete_checkpoint_outlives_a_failed_save(tmp_path, monkeypatch):
    """With keep_last=1 the old one goes after the new one is complete, not before."""
    cfg = CheckpointConfig(keep_last=1)
    state = make_state(make_mesh(1, 1))
    saved_run(tmp_path, cfg, [1], state)
    checkpointer = Checkpointer(tmp_path, cfg)

    def fail(*_, **__):
        raise OSError("disk full")

    with monkeypatch.context() as patch:
        patch.setattr("tensorstore.Transaction", fail)
        checkpointer.save(2, state, {})
        with pytest.raises(OSError, match="disk full"):
            checkpointer.wait()
    for thread in threading.enumerate():  # other parts of the failed save may be writing still
        if type(thread).__name__ == "_SignalingThread":
            thread.join(30)
    again = Checkpointer(tmp_path, cfg)
    assert again.latest_step() == 1
    got, _ = again.restore(abstract(state, make_mesh(1, 1)))
    assert int(got["step"]) == 1
    again.save(3, state, {})
    assert again.latest_step() == 3
    again.close()
    assert [p.name for p in (tmp_path / "checkpoints").iterdir()] == ["3"]


def test_a_state_donated_right_after_save_is_saved_as_it_was(tmp_path):
    mesh = make_mesh(1, 4)
    zero = jax.device_put(jnp.zeros((64, 1 << 14)), NamedSharding(mesh, P("ep")))
    bump = jax.jit(lambda s: jax.tree.map(lambda x: x + 1, s), donate_argnums=0)
    state = {"w": zero, "small": jax.device_put(jnp.zeros(()), NamedSharding(mesh, P()))}
    like = jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), state
    )
    state = bump(state)
    before = state["w"].addressable_shards[0].data.unsafe_buffer_pointer()
    state = bump(state)
    after = state["w"].addressable_shards[0].data.unsafe_buffer_pointer()
    assert before == after  # otherwise nothing is donated here and the rest proves nothing

    checkpointer = Checkpointer(tmp_path, CheckpointConfig(keep_last=9))
    for step in range(2, 6):
        checkpointer.save(step, state, {})
        for _ in range(3):
            state = bump(state)
    for i, step in enumerate(range(2, 6)):
        got, _ = checkpointer.restore(like, step)
        for leaf in jax.tree.leaves(got):
            np.testing.assert_array_equal(leaf, np.full(leaf.shape, 2.0 + 3 * i))
    checkpointer.close()


def test_extra_must_be_json_and_is_copied(tmp_path):
    state, extra = make_state(make_mesh(1, 1)), {"rows": [1]}
    checkpointer = Checkpointer(tmp_path, CheckpointConfig())
    with pytest.raises(TypeError, match="JSON"):
        checkpointer.save(1, state, {"rows": jnp.ones(())})
    checkpointer.save(1, state, extra)
    extra["rows"].append(2)
    assert checkpointer.restore(abstract(state, make_mesh(1, 1)))[1] == {"rows": [1]}
    checkpointer.close()


def test_orbax_is_quiet_at_info(tmp_path, caplog):
    state = make_state(make_mesh(1, 1))
    absl = logging.getLogger("absl")
    level = absl.level
    absl.setLevel(logging.INFO)
    try:
        with caplog.at_level(logging.INFO):
            saved_run(tmp_path, CheckpointConfig(), [1, 2, 3], state)
            checkpointer = Checkpointer(tmp_path, CheckpointConfig())
            checkpointer.restore(abstract(state, make_mesh(1, 1)))
            checkpointer.close()
            absl.info("not of orbax")
    finally:
        absl.setLevel(level)
    assert [record.message for record in caplog.records] == ["not of orbax"]


# --- kill -9 ---

SAVE_FOREVER = """
import sys, jax, jax.numpy as jnp
from moejax.train.checkpoint import CheckpointConfig, Checkpointer
checkpointer = Checkpointer(sys.argv[1], CheckpointConfig(keep_last=1))
like = {name: jax.ShapeDtypeStruct((1 << 20,), jnp.float32) for name in "abcdef"}
step = 0
if checkpointer.latest_step() is not None:
    state, extra = checkpointer.restore(like)
    step = extra["step"]
    assert step == checkpointer.latest_step()
    for i, leaf in enumerate(state.values()):
        assert bool((leaf == step * 10 + i).all()), (step, i)
print("restored", step, flush=True)
while True:
    step += 1
    state = {name: jnp.full((1 << 20,), step * 10 + i, jnp.float32) for i, name in enumerate("abcdef")}
    checkpointer.save(step, state, {"step": step})
    print("saving", step, flush=True)
    checkpointer.wait()
    print("saved", step, flush=True)
"""  # noqa: E501


def test_kill_9_during_a_save_leaves_the_last_complete_one(tmp_path):
    """Killed at random moments while 24 MB are written; each restart finds what it should."""
    rng = random.Random(0)
    last_saved, caught = 0, 0
    for _ in range(6):
        child = subprocess.Popen(
            [sys.executable, "-c", SAVE_FOREVER, str(tmp_path)],
            cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        )  # fmt: skip
        word, step = child.stdout.readline().split() or ("died:", child.stderr.read())
        assert word == "restored", step
        assert int(step) >= last_saved
        for _ in range(rng.randrange(1, 6)):
            child.stdout.readline()
        time.sleep(rng.uniform(0.0, 0.06))
        child.send_signal(signal.SIGKILL)
        rest, _ = child.communicate(timeout=20)
        lines = [line.split() for line in rest.splitlines()]
        last_saved = max([int(s) for w, s in lines if w == "saved"], default=int(step))
        caught += any("tmp" in p.name for p in (tmp_path / "checkpoints").iterdir())
    assert caught > 0, "no kill fell into a save: make the state larger"
    final = run_python(SAVE_FOREVER.replace("while True:", "while step < 0:"), str(tmp_path))
    assert int(final.split()[1]) >= last_saved > 0
    complete = [p.name for p in (tmp_path / "checkpoints").iterdir() if "tmp" not in p.name]
    assert str(int(final.split()[1])) in complete
