"""Every fold against one device, as a table: `make parity` (python -m tests.parity).

    python -m tests.parity [float32|float64 [NUMBER ...]]

Errors are max|difference| / max|reference|, the largest over all arrays of a part of the model.
Exits 1 on a miss.
"""

import subprocess
import sys

import jax

COLUMNS = ("loss_1", "loss_3", "norm", "experts", "router", "shared", "dense")


def run(dtype: str, numbers: list[int]) -> int:
    """Prints the table of one dtype; returns how many folds miss a limit."""
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", 16)
    jax.config.update("jax_numpy_rank_promotion", "raise")
    jax.config.update("jax_numpy_dtype_promotion", "strict")
    jax.config.update("jax_enable_x64", dtype == "float64")
    from tests.train import folds

    limits = folds.LIMITS[dtype]
    print(f"{dtype:48}" + "".join(f"{name:>9}" for name in COLUMNS))
    bounds = [limits.get(name, folds.GRADIENT_LIMIT[dtype]) for name in COLUMNS]
    print(f"{'limit':48}" + "".join(f"{bound:9.0e}" for bound in bounds))
    cases, alone, missed = list(folds.FOLDS.values()), {}, 0
    for number in numbers or range(len(cases)):
        case = cases[number]
        oracle = folds.oracle_of(case)
        if oracle not in alone:
            alone[oracle] = folds.tiny_run(oracle, dtype)
        found = folds.errors(folds.tiny_run(case, dtype), alone[oracle])
        bad = folds.misses(found, dtype)
        missed += bool(bad)
        what = f"{case.name} {case.dispatch} x{case.microbatches}"
        cells = "".join(f"{found.get(name, float('nan')):9.1e}" for name in COLUMNS)
        print(f"{number:2} {what:45}{cells}  {'MISSED' if bad else 'ok'}", flush=True)
    return missed


if __name__ == "__main__":
    if len(sys.argv) > 1:
        sys.exit(min(run(sys.argv[1], [int(n) for n in sys.argv[2:]]), 1))
    codes = [
        subprocess.run([sys.executable, "-m", "tests.parity", dtype]).returncode
        for dtype in ("float32", "float64")
    ]
    sys.exit(max(codes))
