"""Train a model: `python launch/train.py --config=FILE.py[:RECIPE] [--config.LEAF=VALUE ...]`.

Parses, builds, runs. Run again with the same arguments, it resumes from the last checkpoint.
On a cluster, the same command on every host: see moejax.core.job.
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import jax  # noqa: E402

from moejax import config as configuration  # noqa: E402
from moejax.core import host, job, liveness  # noqa: E402
from moejax.plan import guide  # noqa: E402
from moejax.train import checkpoint, loop, setup  # noqa: E402

USAGE = f"""{__doc__}
  --help [--config=FILE.py[:RECIPE]]   this text, and every leaf with its value

Examples
  python -m launch.train --config=configs/demo.py
  python -m launch.train --config=configs/demo.py:demo_fold8 --config.train.steps=50
"""


def main(arguments: list[str]) -> int:
    """Returns the exit status: 0 done or cleanly stopped, 2 for arguments that cannot run.

    Where another process of the job ends this one, it is that of moejax.core.liveness.
    """
    if {"--help", "-h", "-help"} & set(arguments):
        base = [a.split("=", 1)[1] for a in arguments if a.startswith("--config=")]
        print(USAGE)
        print("Leaves, with their values in", (base or ["configs/demo.py"])[0])
        print(configuration.describe(configuration.load_recipe((base or ["configs/demo.py"])[0])))
        return 0
    try:
        num_processes = job.join()
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        return liveness.REFUSED
    # Before anything is read: a process alone whose arguments differ, or whose file is not there,
    # ends the others too.
    with liveness.Peers() as peers:
        try:
            config, run = prepare(arguments, num_processes, peers)
        except (ValueError, FileNotFoundError) as error:
            print(f"error: {error}", file=sys.stderr)
            return peers.refuse(error)
        loop.train(run, guide.compiler(config, setup.cache_dir(config) / "xla"))
    return 0


def prepare(arguments: list[str], num_processes: int, peers: liveness.Peers):
    """Returns (the configuration, the run) that the arguments ask for.

    Raises as `parse` and `setup.prepare` do.
    """
    config = configuration.parse(arguments)
    peers.way_on = lambda: checkpoint.way_on(config.run_dir)
    # Where the devices are CPUs, there are as many as the fold asks for: all simulated.
    if jax.config.jax_num_cpu_devices < 0:
        simulated = max(config.parallel.num_devices() // num_processes, 1)
        jax.config.update("jax_num_cpu_devices", simulated)
    if jax.default_backend() == "cpu":
        host.keep_freed_memory()
    return config, setup.prepare(config)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
