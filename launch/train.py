"""Train a model: `python launch/train.py --config=FILE.py[:RECIPE] [--config.LEAF=VALUE ...]`.

Parses, builds, runs. Run again with the same arguments, it resumes from the last checkpoint.
On a cluster, the same command on every host: see moejax.core.cluster.join.
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import jax  # noqa: E402

from moejax import config as configuration  # noqa: E402
from moejax.core import cluster, host  # noqa: E402
from moejax.train import loop, setup  # noqa: E402

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
        num_processes = cluster.join()
        # Where the devices are CPUs, there are as many as the fold asks for: all simulated.
        simulated = max(config.parallel.num_devices() // num_processes, 1)
        jax.config.update("jax_num_cpu_devices", simulated)
        if jax.default_backend() == "cpu":
            host.keep_freed_memory()
        run = setup.prepare(config)
    except (ValueError, FileNotFoundError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    loop.train(run)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
