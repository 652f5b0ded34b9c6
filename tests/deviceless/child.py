"""Compiles for GPUs that are not there, in a process of its own: an abort takes that one along."""

import os
import subprocess
import sys
from pathlib import Path


def printed(module: str, *arguments: object, dump: Path | None = None) -> str:
    """Returns what `tests.deviceless.<module>` prints. Into the folder `dump` go the kernels (.ptx)
    and the assembler's report of each (.ptxas). Fails with the last of its stderr."""
    child = {k: v for k, v in os.environ.items() if k != "JAX_PLATFORMS"}
    child["JAX_SKIP_CUDA_CONSTRAINTS_CHECK"] = "1"
    if dump:
        child |= {"MOSAIC_GPU_DUMP_TO": str(dump), "MOSAIC_GPU_DUMP_PTXAS": "1"}
    command = [sys.executable, "-m", f"tests.deviceless.{module}", *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True, env=child)
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout
