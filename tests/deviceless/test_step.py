"""The train step, compiled by the real GPU compiler for GPUs that are not there."""

import re

import pytest

from pallas_kernels import inspect
from tests.deviceless.child import printed

pytestmark = pytest.mark.deviceless

KERNELS = {
    "attention_forward",
    "attention_key_value_gradient",
    "attention_query_gradient",
    "grouped_gemm_forward",
    "grouped_gemm_input_gradient",
    "grouped_gemm_weight_gradient",
    "grouped_mlp_forward",
    "grouped_mlp_gradient",
    "permute",
    "router",
    "unpermute",
}


def check_kernels(program: str) -> None:
    """Our kernels are in it, and the host learns nothing while it runs: no callback, no transfer,
    no branch or loop that waits for a value of the device."""
    calls = [line for line in program.splitlines() if "mosaic_gpu" in line]
    names = {name for line in calls for name in re.findall(r'op_name="[^"]*/(\w+)/[^/"]*"', line)}
    assert names >= KERNELS, names
    for host in ("outfeed", "infeed", "xla_python_cpu_callback", "xla_python_gpu_callback", "S(5)"):
        assert host not in program
    loops = [line for line in program.splitlines() if re.search(r" while\(", line)]
    assert loops and all("known_trip_count" in line for line in loops)
    assert not re.search(r" conditional\(", program)


@pytest.mark.parametrize("gpu", ["h100", "gb300"])
def test_the_demo_runs_our_kernels_on_one_gpu(gpu):
    """No product of its program is expanded over the experts: none has all of w_in or w_out."""
    program = printed("compile_step", gpu)
    check_kernels(program)
    products = re.findall(r"(?:dot\(|__cublas\$|__triton_gemm).*", program)
    assert products and not any("[16,256,512]" in p or "[16,256,256]" in p for p in products)
    assert "ragged-dot" not in program


@pytest.mark.parametrize(
    ("dispatch", "collective"), [("ragged", "ragged-all-to-all"), ("all_to_all", "all-to-all")]
)
def test_the_folded_step_compiles_for_gpus(dispatch, collective):
    """Each dispatcher becomes its own collective."""
    program = printed("compile_step", "h100", dispatch)
    check_kernels(program)
    assert f" {collective}" in program
    assert (" ragged-all-to-all" in program) == (dispatch == "ragged")


def test_the_inspector_finds_nothing_wrong():
    """All kernels at one model's shapes; `python -m pallas_kernels.inspect` has the others."""
    reports = inspect.inspect(["h100", "gb300"], "gpt-oss")
    assert {r.kernel for r in reports} >= KERNELS and {r.gpu for r in reports} == {"h100", "gb300"}
    assert not [r for r in reports if r.wrong]
    for report in reports:
        assert report.registers > 0 and report.shared > 0 and report.floor_us > 0
        multiplies = report.kernel.startswith(("grouped", "attention"))
        assert (report.instructions > 0) == multiplies
        assert (report.tensor_columns > 0) == (report.gpu == "gb300" and multiplies)
