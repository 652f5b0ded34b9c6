"""A run of many processes on this machine: `python launch/local.py N [--devices=K] ARGUMENTS`.

Starts launch/train.py N times, as on N hosts, with its ARGUMENTS. Where the devices are CPUs, each
process has K simulated ones, by default an Nth of those that the fold asks for. What the first
process says is passed on as it is; of the others what they say on stderr, behind their number.
SIGTERM and Ctrl-C reach all of them. When one fails the others are stopped, and the exit status is
that of the one (128 and the number of the signal that killed it).
"""

import os
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import IO

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from moejax import config as configuration  # noqa: E402
from moejax.core import liveness  # noqa: E402
from moejax.train import checkpoint  # noqa: E402

TRAIN = Path(__file__).resolve().with_name("train.py")
USAGE = f"""{__doc__}
Example
  python launch/local.py 4 --config=configs/demo.py:demo_fold8 --config.train.steps=50
"""


def main(arguments: list[str]) -> int:
    """Returns the exit status: 0, 2 for arguments that cannot run, or the first failure's."""
    if not arguments or {"--help", "-h"} & set(arguments):
        print(USAGE)
        return 0 if arguments else liveness.REFUSED
    try:
        count, devices, rest = _split(arguments)
        config = configuration.parse(rest)
        devices = devices or _share(config.parallel.num_devices(), count)
    except (ValueError, FileNotFoundError) as error:
        print(f"error: {error}", file=sys.stderr)
        return liveness.REFUSED
    processes, readers = _start(count, devices, rest)
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda number, _: _signal(processes, number))
    failed = _wait(processes)
    for process in processes:
        if process.poll() is None:
            process.kill()
            process.wait()
    for reader in readers:
        reader.join()
    if failed is None:
        return 0
    process, status = processes[failed], processes[failed].returncode
    how = f"was killed by signal {-status}" if status < 0 else f"ended with status {status}"
    more = "" if status == liveness.REFUSED else f"; {checkpoint.way_on(config.run_dir)}"
    print(
        f"process {failed} (pid {process.pid}) {how}; the others were stopped{more}",
        file=sys.stderr, flush=True,
    )  # fmt: skip
    return 128 - status if status < 0 else status


def _split(arguments: list[str]) -> tuple[int, int, list[str]]:
    """Returns (N, K or 0, the rest) of the command line."""
    if not arguments[0].isdecimal() or int(arguments[0]) < 1:
        raise ValueError(f"the first argument is the number of processes, not {arguments[0]!r}")
    given = [a.partition("=")[2] for a in arguments[1:] if a.startswith("--devices=")]
    if given and (not given[-1].isdecimal() or int(given[-1]) < 1):
        raise ValueError(f"--devices={given[-1]}: give the number of devices of each process")
    rest = [a for a in arguments[1:] if not a.startswith("--devices=")]
    return int(arguments[0]), int(given[-1]) if given else 0, rest


def _share(devices: int, count: int) -> int:
    """Returns how many simulated devices each process has of those of the fold."""
    if devices % count:
        raise ValueError(
            f"the fold's {devices} devices cannot be shared by {count} processes; "
            "let their number divide them"
        )
    return max(devices // count, 1)  # 0 where the fold takes what there is


def _start(
    count: int, devices: int, arguments: list[str]
) -> tuple[list[subprocess.Popen], list[threading.Thread]]:
    """Starts all processes, and a thread for each that passes on what it says."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{free.getsockname()[1]}"
    processes, readers = [], []
    for index in range(count):
        told = {
            "JAX_COORDINATOR_ADDRESS": address,
            "JAX_NUM_PROCESSES": str(count),
            "JAX_PROCESS_ID": str(index),
            "JAX_NUM_CPU_DEVICES": str(devices),
        }
        process = subprocess.Popen(
            [sys.executable, str(TRAIN), *arguments],
            env={**os.environ, **told},
            stdout=None if index == 0 else subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            # A terminal's Ctrl-C reaches this process alone, which passes it on once.
            start_new_session=True,
        )
        reader = threading.Thread(target=_pass_on, args=(process.stderr, index), daemon=True)
        reader.start()
        processes.append(process)
        readers.append(reader)
    return processes, readers


def _pass_on(lines: IO[bytes], index: int) -> None:
    """Passes lines on to stderr, but for those on the end of another process: that is told here."""
    with lines:
        for line in lines:
            if not line.startswith(liveness.MARK.encode()):
                sys.stderr.buffer.write((b"[%d] " % index if index else b"") + line)
                sys.stderr.buffer.flush()


def _signal(processes: list[subprocess.Popen], number: int) -> None:
    for process in processes:
        if process.poll() is None:
            process.send_signal(number)


def _wait(processes: list[subprocess.Popen]) -> int | None:
    """Waits for all, or for the first failure; returns which process that is, None for none."""
    while True:
        statuses = [process.poll() for process in processes]
        if any(statuses):
            time.sleep(0.3)  # those that end because of it may be seen first
            statuses = [process.poll() for process in processes]
            own = [i for i, s in enumerate(statuses) if s and s != liveness.ANOTHER_DIED]
            return (own or [i for i, s in enumerate(statuses) if s])[0]
        if None not in statuses:
            return None
        time.sleep(0.02)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
