"""A checkpoint of some 20 GB, to a run of ours and back: seconds, GB/s and peak memory.

    python benchmarks/convert.py                as many layers as half of the free disk holds
    python benchmarks/convert.py --layers 4     so many of the family's 27
    python benchmarks/convert.py --folder DIR   somewhere else than the system's temporary folder

The sizes are those of DeepSeek-V2-Lite (D=2048, 64 experts of F=1408 in 26 of 27 layers, V=102400:
31 GB in bfloat16), the weights random: one random block, for each tensor from another place on.
Each conversion is the command, in a process of its own, whose peak resident memory is the kernel's
figure (pages of mapped files count). The source goes before the export comes, so that the disk
needs to hold two of the three. Tensors of every kind are then compared bit for bit, and all is
removed.
"""

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
import zlib
from pathlib import Path

import jax
import ml_dtypes
import numpy as np

from moejax.convert import hf
from moejax.convert.arrays import leaves
from moejax.convert.families import FAMILIES
from moejax.convert.files import Reader, Tensor, Writer
from moejax.convert.to_run import abstract
from moejax.model.config import ModelConfig

BFLOAT16 = np.dtype(ml_dtypes.bfloat16)
LEAVES = {
    "vocab_size": 102400, "dim": 2048, "num_layers": 27, "first_k_dense": 1, "ffn_dim": 10944,
    "attention.kind": "mla", "attention.num_heads": 16, "attention.head_dim": 128,
    "attention.mla.kv_rank": 512, "attention.mla.value_dim": 128, "attention.mla.q_rank": 0,
    "attention.rope.dim": 64, "attention.rope.layout": "interleaved", "moe.num_experts": 64,
    "moe.top_k": 6, "moe.ffn_dim": 1408, "moe.shared_ffn_dim": 2816,
    "moe.router.renormalize": False,
}  # fmt: skip
FREE_BYTES = 5 * 10**9
"""Of the disk, left to others."""
BLOCK = 2**25
"""Values."""


def plan_of(num_layers: int) -> tuple[dict, dict[str, Tensor]]:
    """Returns (config.json, tensors) of so many layers."""
    family = FAMILIES["deepseek_v2"]
    cfg = hf.with_leaves(ModelConfig(), LEAVES | {"num_layers": num_layers})
    known = leaves(family, cfg, *abstract(cfg))
    return hf.hf_config(family, cfg), hf.planned(known, {}, BFLOAT16)


def size_of(plan: dict[str, Tensor]) -> int:
    """Returns the bytes of all tensors."""
    return sum(tensor.num_bytes for tensor in plan.values())


class Weights:
    """Random values that depend on the name of the tensor alone."""

    def __init__(self):
        block = np.random.default_rng(0).standard_normal(BLOCK, np.float32) * 0.02
        self._block = block.astype(BFLOAT16)

    def of(self, name: str, tensor: Tensor) -> np.ndarray:
        """Returns a tensor."""
        size = int(np.prod(tensor.shape, dtype=np.int64))
        first = zlib.crc32(name.encode()) % BLOCK
        times = -(-(first + size) // BLOCK)
        return np.concatenate([self._block] * times)[first : first + size].reshape(tensor.shape)


def make(folder: Path, said: dict, plan: dict[str, Tensor], weights: Weights) -> None:
    """Writes the checkpoint."""
    with Writer(folder, plan) as writer:
        for name, tensor in plan.items():
            writer.write(name, weights.of(name, tensor))
    (folder / "config.json").write_text(json.dumps(said))


def run(*arguments: str) -> tuple[float, float]:
    """Returns (seconds, peak GB in memory) of a command of `moejax.convert`. Exits if it fails."""
    command = [sys.executable, "-m", "moejax.convert", *arguments]
    started = time.monotonic()
    root = Path(__file__).parent.parent
    child = subprocess.Popen(command, cwd=root, stdout=subprocess.DEVNULL)
    _, status, usage = os.wait4(child.pid, 0)
    if status:
        sys.exit(f"{' '.join(arguments)} failed")
    return time.monotonic() - started, usage.ru_maxrss * 1024 / 1e9


def line(what: str, size: int, seconds: float, peak: float) -> None:
    """Prints a row."""
    print(
        f"{what:14} {size / 1e9:5.1f} GB in {seconds:6.1f} s   {size / 1e9 / seconds:5.2f} GB/s   "
        f"peak memory {peak:5.2f} GB",
        flush=True,
    )


def main() -> None:
    """Runs both conversions and prints the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--layers", type=int, default=0)
    parser.add_argument("--folder", default=tempfile.gettempdir())
    args = parser.parse_args()
    jax.config.update("jax_platforms", "cpu")  # shapes alone
    room = (shutil.disk_usage(args.folder).free - FREE_BYTES) / 2
    fitting = [n for n in range(2, LEAVES["num_layers"] + 1) if size_of(plan_of(n)[1]) <= room]
    if not args.layers and not fitting:
        sys.exit(f"{args.folder} has no room for two layers, there and back")
    layers = args.layers or fitting[-1]
    said, plan = plan_of(layers)
    size, weights = size_of(plan), Weights()
    print(f"DeepSeek-V2-Lite's sizes, {layers} of 27 layers: {len(plan)} tensors", flush=True)
    with tempfile.TemporaryDirectory(dir=args.folder) as where:
        source, ours, back = (Path(where) / name for name in ("source", "run", "back"))
        source.mkdir()
        make(source, said, plan, weights)
        line("hf-to-moejax", size, *run("hf-to-moejax", str(source), str(ours)))
        shutil.rmtree(source)
        line("moejax-to-hf", size, *run("moejax-to-hf", str(ours), str(back)))
        reader = Reader(back)
        last = f"model.layers.{layers - 1}."
        names = [name for name in plan if not name.startswith("model.layers.")]
        names += [name for name in plan if name.startswith(last) and ".experts." not in name]
        names += [name for name in plan if name.startswith(f"{last}mlp.experts.63.")]
        for name in names:
            if reader.map(name).tobytes() != weights.of(name, plan[name]).tobytes():
                sys.exit(f"{name} came back as something else")
        print(f"{len(names)} tensors of every kind compared: the same to the bit")


if __name__ == "__main__":
    main()
