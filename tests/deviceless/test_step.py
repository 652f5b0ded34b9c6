"""The train step, compiled by the real GPU compiler for GPUs that are not there."""

import re

import pytest

from moejax.plan.reader import hlo
from pallas_kernels import inspect
from tests.deviceless.child import printed

pytestmark = pytest.mark.deviceless

DIM = 256
"""Width of the demo."""
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


def products_beside(program: str, collective: str) -> int:
    """Returns how many products of the shared expert's forward pass are scheduled between start
    and done of a collective of rows of tokens."""
    found: set[str] = set()
    for body in hlo.parse(program).computations.values():
        running: set[str] = set()
        for instruction in body:
            rows = len(instruction.shapes) > 1 and instruction.shapes[1].dims[-1:] == (DIM,)
            own = re.search(r"jvp\(loss\)/.*/mlp/.*dot_general$", instruction.op_name)
            product = own and re.search("gemm|cublas", instruction.name + instruction.attributes)
            if instruction.opcode == f"{collective}-start" and rows:
                running.add(instruction.name)
            elif instruction.opcode == f"{collective}-done":
                running -= {instruction.operands[0]}
            elif running and product and "transpose" not in instruction.op_name:
                found.add(instruction.name)
    return len(found)


@pytest.mark.parametrize(
    ("dispatch", "collective"),
    [
        ("ragged", "ragged-all-to-all"),
        ("all_to_all", "all-to-all"),
        ("hierarchical", "ragged-all-to-all"),
    ],
)
def test_the_folded_step_compiles_for_gpus(dispatch, collective):
    """Each dispatcher becomes its own collective, and both products of the shared expert run while
    rows are on the way."""
    program = printed("compile_step", "h100", dispatch)
    check_kernels(program)
    assert f" {collective}-start" in program
    assert (" ragged-all-to-all" in program) == (dispatch != "all_to_all")
    assert products_beside(program, collective) == 2
    sent = [line for line in program.splitlines() if f" {collective}-start(" in line]
    groups = {found for line in sent for found in re.findall(r"replica_groups=(\{\{\S*\}\})", line)}
    if dispatch == "hierarchical":
        assert groups == {"{{0,1,2,3},{4,5,6,7}}", "{{0,4},{1,5},{2,6},{3,7}}"}


def test_merged_asks_the_host_nothing_and_copies_nothing_it_keeps():
    """Of each microbatch the input of each layer is kept, [128, 256]: two times four, and one that
    nobody needs. One is written in the loop body that reads another."""
    program = printed("compile_step", "h100", "ragged", "merged")
    check_kernels(program)
    kept = [line for line in program.splitlines() if "bf16[9,128,256]" in line.split("(")[0]]
    assert kept and not [line for line in kept if re.search(r"= \S+ copy(-start)?\(", line)]


def test_the_folded_step_writes_over_nvlink():
    """Dispatch and combine, their gradients, and dispatch where a layer is computed again, are
    launches of the exchange, and nothing else."""
    program = printed("compile_step", "h100", "nvlink")
    check_kernels(program)
    calls = [line for line in program.splitlines() if "mosaic_gpu" in line and "/exchange/" in line]
    places = [re.findall(r"(dispatch|combine)\)*/exchange", call)[0] for call in calls]
    assert sorted(places) == ["combine", "combine", "dispatch", "dispatch", "dispatch"]
    collectives = [line for line in program.splitlines() if re.search(r" \S*all-to-all", line)]
    assert not [line for line in collectives if re.search("dispatch|combine", line)]


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
