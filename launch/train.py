"""Train a model: `python launch/train.py --config=FILE.py[:RECIPE] [--config.LEAF=VALUE ...]`.

Parses, builds, runs. Run again with the same arguments, it resumes from the last checkpoint.
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import jax  # noqa: E402

from moejax import config as configuration  # noqa: E402
from moejax.train import loop  # noqa: E402

USAGE = f"""{__doc__}
  --help [--config=FILE.py[:RECIPE]]   this text, and every leaf with its value

Examples
  python -m launch.train --config=configs/demo.py
  python -m launch.train --config=configs/demo.py:demo_fold8 --config.train.steps=50
"""


def main(arguments: list[str]) -> int:
    """Returns the exit status: 0 done or cleanly stopped, 2 for arguments that cannot run."""
    if {"--help", "-h", "-help"} & set(arguments):
        base = [a.split("=", 1)[1] for a in arguments if a.startswith("--config=")]
        print(USAGE)
        print("Leaves, with their values in", (base or ["configs/demo.py"])[0])
        print(configuration.describe(configuration.load_recipe((base or ["configs/demo.py"])[0])))
        return 0
    try:
        config = configuration.parse(arguments)
        simulate_devices(config.parallel.num_devices())
        loop.train(config)
    except (ValueError, FileNotFoundError) as error:
        if not getattr(error, "__notes__", None):
            print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


def simulate_devices(wanted: int) -> None:
    """Gives a CPU-only machine as many devices as the fold asks for."""
    if wanted > 1 and "cuda" not in jax.lib.xla_bridge.backends():
        jax.config.update("jax_num_cpu_devices", wanted)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
