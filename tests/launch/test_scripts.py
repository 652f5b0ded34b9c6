"""The launch scripts for clusters, as far as a machine without one can tell."""

import os
import re
import subprocess
from pathlib import Path

import pytest
import yaml

from moejax import config as configuration
from moejax.core import job

ROOT = Path(__file__).parents[2]
SBATCH, JOBSET = ROOT / "launch/slurm/train.sbatch", ROOT / "launch/kubernetes/jobset.yaml"

FAKES = {
    "srun": 'echo "$@" > srun.txt\n[ -z "$SLEEP" ] || { kill -TERM $PPID; sleep 1; }\nexit $STATUS',
    "scancel": 'echo "$@" > scancel.txt',
    "squeue": "echo $STATE",
    "scontrol": 'echo "$@" > scontrol.txt',
}


def sbatch(folder: Path, **environ: str) -> tuple[int, dict[str, str]]:
    """Runs the batch script with stand-ins for Slurm; returns its status, and their arguments."""
    for name, body in FAKES.items():
        (folder / name).write_text(f"#!/bin/bash\n{body}\n")
        (folder / name).chmod(0o755)
    told = {
        "SLURM_SUBMIT_DIR": str(folder), "SLURM_JOB_ID": "17", "STATUS": "0", "STATE": "RUNNING",
        "SLEEP": "", "PATH": f"{folder}:{os.environ['PATH']}", **environ,
    }  # fmt: skip
    ended = subprocess.run(["bash", str(SBATCH), "--a=('b c',)"], env=told, timeout=60, check=False)
    calls = {p.stem: p.read_text().strip() for p in folder.glob("*.txt")}
    return ended.returncode, calls


def test_the_batch_script_is_bash_and_asks_for_a_signal_ahead_of_the_limit():
    subprocess.run(["bash", "-n", str(SBATCH)], check=True)
    options = re.findall(r"^#SBATCH (\S+)", SBATCH.read_text(), re.MULTILINE)
    assert {"--requeue", "--signal=B:TERM@120", "--open-mode=append"} <= set(options)


@pytest.mark.parametrize(
    ("environ", "status", "requeued"),
    [
        ({}, 0, False),
        ({"SLEEP": "1"}, 0, True),  # the time limit
        ({"SLEEP": "1", "STATE": "COMPLETING"}, 0, False),  # scancel
        ({"SLEEP": "1", "SLURM_RESTART_COUNT": "100"}, 0, False),
        ({"STATUS": "75"}, 75, False),  # at once
        ({"STATUS": "75", "LEAST_SECONDS": "0"}, 75, True),
        ({"STATUS": "2", "LEAST_SECONDS": "0"}, 2, False),
    ],
)
def test_the_batch_script_goes_back_into_the_queue(environ, status, requeued, tmp_path):
    ended, calls = sbatch(tmp_path, **environ)
    assert ended == status
    assert calls["srun"].endswith(".venv/bin/python launch/train.py --a=('b c',)")
    assert calls.get("scontrol") == ("requeue 17" if requeued else None)
    assert calls.get("scancel") == ("--signal=TERM 17" if "SLEEP" in environ else None)


def test_the_manifest_tells_its_pods_what_joining_needs():
    manifest = yaml.safe_load(JOBSET.read_text())
    assert manifest["kind"] == "JobSet" and manifest["spec"]["failurePolicy"]["maxRestarts"] > 0
    (workers,) = manifest["spec"]["replicatedJobs"]
    inner = workers["template"]["spec"]
    assert workers["replicas"] == 1 and inner["completionMode"] == "Indexed"
    pod = inner["template"]["spec"]
    (container,) = pod["containers"]
    environ = {e["name"]: e["value"] for e in container["env"]}
    found = job.find(environ | {"JOB_COMPLETION_INDEX": "3"})
    assert found.count == inner["parallelism"] == inner["completions"] and found.index == 3
    name, network = (
        f"{manifest['metadata']['name']}-{workers['name']}-0-0",
        manifest["metadata"]["name"],
    )
    assert found.address == f"{name}.{network}:{container['ports'][0]['containerPort']}"
    assert {m["name"] for m in container["volumeMounts"]} == {v["name"] for v in pod["volumes"]}
    failing = inner["podFailurePolicy"]["rules"][0]["onExitCodes"]
    assert failing["containerName"] == container["name"] and failing["values"] == [2]

    gpus = found.count * container["resources"]["limits"]["nvidia.com/gpu"]
    config = configuration.parse(container["args"])
    assert config.parallel.num_devices() == gpus
    config.fold_over(gpus)


def test_an_evicted_pod_fails_though_its_run_ends_well(tmp_path):
    (container,) = _pod()["containers"]
    fake = tmp_path / ".venv/bin/python"
    fake.parent.mkdir(parents=True)
    for body, status in (
        ("trap 'exit 0' TERM; echo $* > args; kill -TERM $PPID; sleep 1", 75),
        ("exit 0", 0), ("exit 2", 2), ("kill -9 $$", 137),
    ):  # fmt: skip
        fake.write_text(f"#!/bin/bash\n{body}\n")
        fake.chmod(0o755)
        command = [*container["command"], *container["args"]]
        assert subprocess.run(command, cwd=tmp_path, check=False).returncode == status, body
    assert (tmp_path / "args").read_text().split() == ["launch/train.py", *container["args"]]


def _pod() -> dict:
    manifest = yaml.safe_load(JOBSET.read_text())
    return manifest["spec"]["replicatedJobs"][0]["template"]["spec"]["template"]["spec"]
