"""Tiles of the grouped GEMM kernels: computed, measured, looked up; and the tuner that measures."""

import json
import math
from dataclasses import replace

import jax.numpy as jnp
import pytest

from pallas_kernels import tune
from pallas_kernels.deviceless import GPUS
from pallas_kernels.grouped_gemm import blackwell, blackwell_loop, tiles
from pallas_kernels.grouped_gemm.tiles import OPS, ByOp, Extent, Measured, Tiles

H100, B200 = GPUS["h100"], GPUS["b200"]
WIDE = Tiles(rows=128, cols=256, depth=64, stages=4, snake=16, cores=1)
NARROW = replace(WIDE, cols=128, stages=6)
TABLE = [
    Measured("forward", Extent(32768, 4096, 2048), WIDE, 600.5),
    Measured("forward", Extent(32768, 2048, 2048), NARROW, 500.0),
    Measured("weight", Extent(2048, 4096, 4096), NARROW, 400.0),
]


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """An empty folder of measured tiles."""
    monkeypatch.setattr(tiles, "MEASURED", tmp_path)
    tiles._of_gpu.cache_clear()
    yield tmp_path
    tiles._of_gpu.cache_clear()


@pytest.mark.parametrize(
    ("op", "extent", "found"),
    [
        ("forward", (32768, 4096, 2048), 0),
        ("forward", (32768, 3000, 2048), 0),  # 4096 / 3000 < 3000 / 2048
        ("forward", (32768, 2800, 2048), 1),
        ("forward", (60000, 4096, 1100), 0),  # within a factor of two in each
        ("forward", (70000, 4096, 2048), None),
        ("forward", (32768, 4096, 1000), None),
        ("forward", (32768, 4096, 0), 0),  # a depth that is not known
        ("input", (32768, 4096, 2048), None),
        ("weight", (2048, 4096, 4096), 2),
    ],
)
def test_the_nearest_measured_shape(op, extent, found):
    entry = tiles.nearest(TABLE, op, Extent(*extent))
    assert entry == (None if found is None else TABLE[found])


def test_measured_tiles_are_chosen_and_others_computed(folder):
    computed = tiles.choose("forward", H100, 32768, 2048, 2048)
    assert computed == Tiles(128, 256, 64, 4, 8, 132)
    tiles._of_gpu.cache_clear()
    tiles.save(folder / "h100.json", TABLE, {})
    assert tiles.choose("forward", H100, 32768, 2048, 2048) == replace(NARROW, cores=132)
    few = replace(H100, cores=100)  # a part of one
    assert tiles.choose("forward", few, 32768, 2048, 2048) == replace(NARROW, cores=100)
    assert tiles.choose("forward", H100, 32768, 8192 + 8, 2048).snake == 8
    assert tiles.choose("forward", GPUS["h200"], 32768, 2048, 2048) == computed
    own = tiles.choose_all(H100, M=32768, K=2048, N=4096, G=8)
    assert own == ByOp(*(replace(t, cores=132) for t in (WIDE, computed, NARROW)))
    assert tiles.of(own, "weight") == own.weight and tiles.of(WIDE, "weight") == WIDE
    with pytest.raises(KeyError):
        tiles.choose("backward", B200, 8, 8)


def test_computed_tiles_of_blackwell_are_the_kernels_default():
    assert tiles.choose_all(B200, M=8192, K=2880, N=5760, G=8) == ByOp(*[blackwell.DEFAULT] * 3)
    assert tiles.choose_all(B200, M=0, K=8, N=8, G=1) == ByOp(*[blackwell.DEFAULT] * 3)


def test_extents():
    assert tiles.extent("forward", 100, 20, 30, 4) == (100, 30, 20)
    assert tiles.extent("input", 100, 20, 30, 4) == (100, 20, 30)
    assert tiles.extent("weight", 100, 20, 30, 4) == (20, 30, 25)


def test_a_file_gives_back_what_was_saved(tmp_path):
    path = tmp_path / "new" / "h100.json"
    tiles.save(path, TABLE, {"device": "NVIDIA H100 80GB HBM3", "jax": "0.12"})
    assert tiles.load(path) == TABLE
    said = json.loads(path.read_text())
    assert said["device"] == "NVIDIA H100 80GB HBM3" and "cores" not in said["measured"][0]["tiles"]
    tiles.save(path, [], {})
    assert tiles.load(path) == []
    path.write_text(path.read_text().replace("[", '[{"op": "forward"}', 1))
    with pytest.raises(KeyError):
        tiles.load(path)


@pytest.mark.parametrize("name", [n for n, gpu in GPUS.items() if gpu.capability[0] >= 9])
def test_candidates_fit_the_device_and_hold_the_default(name):
    gpu = GPUS[name]
    found = tiles.candidates(gpu)
    assert len(set(found)) == len(found) >= 6
    assert tiles.choose("forward", gpu, 8192, 4096) in found
    for own in found:
        ring = own.stages * (own.rows + own.cols) * own.depth * 2
        assert own.stages >= 2 and ring + 256 * own.rows < gpu.shared_bytes <= 232448
        assert own.rows * own.cols <= 128 * 256
        if gpu.capability[0] == 10:
            a, b = (own.rows, own.depth), (own.depth, own.cols)
            blackwell_loop.scratch_types(own, a, b, jnp.bfloat16, (2, 64))


SLOW, WRONG, BROKEN, BEST = tiles.candidates(B200)[:4]


def with_tiles(own):
    """A grouped GEMM for groups of one size: wrong with some tiles, fails with others."""

    def gemm(x, w, sizes):
        if own == BROKEN:
            raise ValueError("no room\nfor this")
        y = jnp.einsum("gmk,gkn->gmn", x.reshape(len(sizes), -1, x.shape[1]), w)
        return y.reshape(x.shape[0], -1) * (1.5 if own == WRONG else 1)

    gemm.tiles = own
    return gemm


def test_the_tuner_finds_the_fastest_that_is_right(monkeypatch, capsys):
    took = {SLOW: 3e-6, WRONG: 1e-6, BEST: 2e-6}
    last = []
    products = tune.products
    monkeypatch.setattr(tune, "products", lambda g: last.append(g.tiles) or products(g))
    timer = lambda *_: took.get(last[-1], 4e-6)  # noqa: E731
    best = tune.tune([(64, 16, 24, 4)], B200, with_tiles, timer)
    assert [m.op for m in best] == list(OPS) and {m.tiles for m in best} == {BEST}
    assert best[2].extent == (16, 24, 16)
    assert math.isclose(best[0].tflops, 2 * 64 * 16 * 24 / 2e-6 / 1e12)
    said = capsys.readouterr().out
    assert said.count("WRONG") == said.count("failed: no room") == said.count("is best") == 3


def test_the_tuner_writes_what_the_kernels_read(folder, monkeypatch, capsys):
    monkeypatch.setattr(tune, "target_gpu", lambda: B200)
    monkeypatch.setattr(tune, "kernels", lambda gpu: with_tiles)
    monkeypatch.setattr(tune, "refusal", lambda gpu, kind: None)
    monkeypatch.setattr(tiles, "candidates", lambda gpu: [WRONG, BEST])
    assert tune.main(["--shape", "64,16,24,4"]) == 0
    assert json.loads((folder / "b200.json").read_text())["jax"]
    assert tiles.choose("input", B200, 100, 16, 24) == BEST
    monkeypatch.setattr(tiles, "candidates", lambda gpu: [WRONG])
    assert tune.main(["--shape", "64,16,24,4", "--out", str(folder / "other.json")]) == 1
    assert tiles.load(folder / "other.json") == []


def test_the_tuner_refuses_what_it_cannot_time(capsys, monkeypatch):
    assert tune.main([]) == 2
    assert "Hopper and Blackwell GPUs, and this is cpu" in capsys.readouterr().err
    monkeypatch.setattr(tune.jax, "__version_info__", (0, 11, 2))
    assert "needs JAX 0.12" in str(tune.refusal(B200, "NVIDIA B200"))
    assert tune.refusal(H100, "NVIDIA H100") is None
    assert "this is NVIDIA A100" in str(tune.refusal(GPUS["a100"], "NVIDIA A100"))
    for wrong in (["--shape", "1,2,3"], ["--shape", "64,12,8,1"], ["--gpu", "h100"]):
        with pytest.raises(SystemExit):
            tune.main(wrong)


def test_a_dry_run_lists_candidates(capsys, monkeypatch):
    monkeypatch.setattr(tune.jax, "__version_info__", (0, 12, 0))
    assert tune.main(["--dry-run", "--gpu", "h100"]) == 0
    said = capsys.readouterr().out.splitlines()
    assert "3 operations, 10 shapes" in said[0] and len(said) == 1 + len(tiles.candidates(H100))


def test_the_timer_gives_the_time_of_one_call():
    assert 0 < tune.seconds(lambda x: x + 1, jnp.ones(8)) < 1


@pytest.mark.deviceless
def test_every_candidate_of_blackwell_compiles_without_spills(capsys):
    """In a child process; Hopper's take three times as long, and two of them spill."""
    shape = "1024,512,512,4"
    assert tune.main(["--dry-run", "--compile", "--gpu", "gb300", "--shape", shape]) == 0
    said = capsys.readouterr().out.splitlines()
    # Four products and a weight gradient of each of two sizes: pairs share in the products alone.
    kernels = [line for line in said if line.startswith("grouped_gemm")]
    assert len(kernels) == 10 and all("gb300" in line for line in kernels)
