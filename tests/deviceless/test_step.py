"""The train step, compiled by the real GPU compiler for 8 H100s that are not there."""

import os
import subprocess
import sys

import pytest

pytestmark = pytest.mark.deviceless


@pytest.mark.parametrize(
    ("dispatch", "collective"), [("ragged", "ragged-all-to-all"), ("all_to_all", "all-to-all")]
)
def test_the_folded_step_compiles_for_gpus(dispatch, collective):
    """Each dispatcher becomes its own collective, and nothing is sent to the host."""
    child = {k: v for k, v in os.environ.items() if k != "JAX_PLATFORMS"}
    done = subprocess.run(
        [sys.executable, "-m", "tests.deviceless.compile_step", dispatch],
        capture_output=True,
        text=True,
        env=child | {"JAX_SKIP_CUDA_CONSTRAINTS_CHECK": "1"},
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert f" {collective}" in done.stdout
    assert (" ragged-all-to-all" in done.stdout) == (dispatch == "ragged")
    for host in ("outfeed", "infeed", "xla_python_cpu_callback", "xla_python_gpu_callback"):
        assert host not in done.stdout
