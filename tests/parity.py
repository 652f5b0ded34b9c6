"""Every fold against one device, as a table: `make parity` (python -m tests.parity).

    python -m tests.parity [float32|float64 [NUMBER ...]]

Errors are max|difference| / max|reference|, the largest over all arrays. Exits 1 on a miss.
"""

import subprocess
import sys

import jax


def run(dtype: str, numbers: list[int]) -> int:
    """Prints the table of one dtype; returns how many folds miss their tolerance."""
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", 16)
    jax.config.update("jax_numpy_rank_promotion", "raise")
    jax.config.update("jax_numpy_dtype_promotion", "strict")
    jax.config.update("jax_enable_x64", dtype == "float64")
    from tests.train import folds

    bounds = folds.FLOAT64 if dtype == "float64" else folds.FLOAT32
    print(f"{dtype:62}" + "".join(f"{name:>15}" for name in bounds))
    print(f"{'tolerance':62}" + "".join(f"{bound:15.0e}" for bound in bounds.values()))
    alone: dict = {}
    missed = 0
    for number in numbers or range(len(folds.FULL)):
        case = folds.FULL[number]
        if case.alone() not in alone:
            alone[case.alone()] = folds.train(case.alone(), dtype)
        found = folds.errors(folds.train(case, dtype), alone[case.alone()])
        good = all(found[name] <= bound for name, bound in bounds.items())
        missed += not good
        cells = "".join(f"{value:15.1e}" for value in found.values())
        print(f"{case!s:62}{cells}  {'ok' if good else 'MISSED'}", flush=True)
    return missed


if __name__ == "__main__":
    if len(sys.argv) > 1:
        sys.exit(min(run(sys.argv[1], [int(n) for n in sys.argv[2:]]), 1))
    codes = [
        subprocess.run([sys.executable, "-m", "tests.parity", dtype]).returncode
        for dtype in ("float32", "float64")
    ]
    sys.exit(max(codes))
