"""Compiles a train step for a cluster that is not there, and keeps what the compiler said.

`compile_step` runs the real XLA GPU compiler in a process of its own (a compiler that aborts takes
its process along) over the very step that `moejax.train.setup` makes for a run. What comes of it
lies in a cache folder: the scheduled program, the compiler's buffers and when each is live, its
memory totals. The key of the cache is everything that the program depends on, this source included.

    compiled = compile_step(config, CLUSTERS["h100"], 256, progress=print)
    compiled.text, compiled.totals["temp"], compiled.seconds
"""

import base64
import dataclasses
import gzip
import hashlib
import importlib.metadata
import json
import os
import pickle
import re
import resource
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import jax
from jax.sharding import Mesh

from moejax.config import REPOSITORY, Config
from moejax.core.mesh import make_mesh
from moejax.plan import guide
from moejax.plan.hardware import Cluster
from moejax.train import setup
from pallas_kernels import deviceless

CACHE = Path("~/.cache/moejax/plan")
SECTIONS = ("model", "parallel", "precision", "train", "optimizer")
"""Sections of a config that the program depends on."""
LEAVES_NO_STEP = {"train": ("eval_every", "eval_batches")}
"""Leaves of those that it does not."""
TOTALS = {
    "arguments": "argument_size_in_bytes",
    "outputs": "output_size_in_bytes",
    "aliased": "alias_size_in_bytes",
    "temp": "temp_size_in_bytes",
    "code": "generated_code_size_in_bytes",
    "host arguments": "host_argument_size_in_bytes",
    "host outputs": "host_output_size_in_bytes",
    "host aliased": "host_alias_size_in_bytes",
    "host temp": "host_temp_size_in_bytes",
}
DUMPED = {"buffers": "*_after_optimizations-buffer-assignment.txt", "live": "*-live-range.txt"}
NO_COMPILER = (
    "the GPU compiler is not installed: `.ci/venv .venv-gpu gpu` makes an environment that has it "
    "(then .venv-gpu/bin/python), or: pip install 'moejax[gpu]'"
)

ASSEMBLER = r"LLVM ERROR|ptxas"
_WARNING = r"^W\d{4} [\d:.]+ +\d+ \S+\] (.*)"


class CompileError(Exception):
    """The compiler gave up; the message says on what, as far as it says so itself."""


@dataclasses.dataclass(frozen=True)
class Compiled:
    """What the compiler made of a step for one GPU of a cluster."""

    folder: Path
    totals: dict[str, int]
    """Bytes on one GPU ("host ..": of its host), by the keys of `TOTALS`."""
    seconds: dict[str, float]
    """Of "trace", "lower" and "compile"."""
    host_bytes: int
    """Most memory that the compiling process held."""
    warnings: tuple[str, ...]
    """What the compiler warned of, once each."""
    cached: bool
    """Whether it had been compiled before."""

    @property
    def text(self) -> str:
        """The scheduled program."""
        return _unpacked(self.folder / "program.gz")

    @property
    def buffers(self) -> str:
        """The compiler's buffer assignment."""
        return _unpacked(self.folder / "buffers.gz")

    @property
    def live(self) -> str:
        """When each of those is live, and those live at the peak."""
        return _unpacked(self.folder / "live.gz")

    @property
    def device_bytes(self) -> int:
        """Memory that a GPU needs: arguments, temporary memory, outputs that reuse neither."""
        own = self.totals["outputs"] - self.totals["aliased"]
        return self.totals["arguments"] + self.totals["temp"] + own + self.totals["code"]


def compile_step(
    config: Config,
    cluster: Cluster,
    num_gpus: int,
    *,
    worst_case: bool = False,
    cache: Path = CACHE,
    progress: Callable[[str], None] = lambda line: None,
) -> Compiled:
    """Returns the train step of `config`, compiled for GPUs of a cluster, or found in `cache`.

    `worst_case` compiles the step for a batch that overflowed its budget. `progress` is told each
    stage. Raises ValueError for a fold that does not fit, before anything is compiled, and
    CompileError where the compiler fails or is not there.
    """
    config.fold_over(num_gpus)
    folder = cache.expanduser() / key(config, cluster, num_gpus, worst_case)
    if cached := (folder / "found.json").is_file():
        progress(f"compiled before: {folder.name}")
    else:
        plugins = importlib.metadata.entry_points(group="jax_plugins")
        if not any(plugin.name.startswith("xla_cuda") for plugin in plugins):
            raise CompileError(NO_COMPILER)
        request = base64.b64encode(pickle.dumps((config, cluster, num_gpus, worst_case)))
        folder.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=folder.parent, prefix="compiling-") as work:
            command = [sys.executable, "-m", "moejax.plan.compile", work]
            said = supervise(command, request, Path(work), progress)
            made = Path(work, "found")
            found = json.loads((made / "found.json").read_text())
            found["warnings"] = list(dict.fromkeys(re.findall(_WARNING, said, re.MULTILINE)))
            (made / "found.json").write_text(json.dumps(found, indent=1))
            shutil.rmtree(folder, ignore_errors=True)
            os.rename(made, folder)
    found = json.loads((folder / "found.json").read_text())
    warnings = tuple(found["warnings"])
    return Compiled(
        folder, found["totals"], found["seconds"], found["host_bytes"], warnings, cached
    )


def key(config: Config, cluster: Cluster, num_gpus: int, worst_case: bool) -> str:
    """Returns the name of all that a compiled program depends on."""
    sections = {name: dataclasses.asdict(getattr(config, name)) for name in SECTIONS}
    for section, leaves in LEAVES_NO_STEP.items():
        for leaf in leaves:
            del sections[section][leaf]
    versions = [importlib.metadata.version(name) for name in ("jax", "jaxlib")]
    says = json.dumps([sections, str(cluster), num_gpus, worst_case, versions], default=str)
    hashed = hashlib.sha256(says.encode())
    for place in ("moejax", "pallas_kernels"):
        for path in sorted((REPOSITORY / place).rglob("*")):
            planner = "plan" in path.relative_to(REPOSITORY).parts and guide.streams(config) == 1
            if path.suffix in (".py", ".json") and not planner:
                hashed.update(path.read_bytes())
    hashed.update(Path(__file__).read_bytes())
    return f"{config.name}-{cluster.name}x{num_gpus}-{hashed.hexdigest()[:16]}"


def _unpacked(path: Path) -> str:
    return gzip.decompress(path.read_bytes()).decode()


def supervise(
    command: list[str], request: bytes, work: Path, progress: Callable[[str], None]
) -> str:
    """Runs a compiling process, which is handed `request`, and tells `progress` what it prints;
    returns its standard error. One that fails in the assembler runs once more, to name the kernel.

    Raises ValueError where it printed "ValueError: ..", and CompileError where it fails otherwise.
    """
    child = dict(os.environ) | {
        "JAX_SKIP_CUDA_CONSTRAINTS_CHECK": "1",
        "PYTHONPATH": os.pathsep.join(p for p in sys.path if p),
    }
    for name in ("JAX_PLATFORMS", "XLA_FLAGS"):  # the child is for cuda, with our options alone
        child.pop(name, None)
    code, stderr = _run(command, request, work, child, progress)
    if code and re.search(ASSEMBLER, stderr):
        progress("failed; once more, to learn at which kernel")
        # Each kernel leaves files of 100 MB there, which cost time.
        code, stderr = _run(
            command, request, work, child | {"MOSAIC_GPU_DUMP_TO": str(work)}, lambda line: None
        )
    if code:
        raise CompileError(explain(stderr, work, code))
    return stderr


def _run(command, request: bytes, work: Path, child, progress) -> tuple[int, str]:
    """Runs a process in the environment `child`; returns its exit status and standard error."""
    with open(work / "stderr", "w+") as errors:
        with subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=errors, env=child
        ) as running:
            assert running.stdin and running.stdout
            running.stdin.write(request)
            running.stdin.close()
            for line in running.stdout:
                said = line.decode().rstrip()
                if said.startswith("ValueError: "):
                    raise ValueError(said.removeprefix("ValueError: "))
                progress(said)
        errors.seek(0)
        return running.returncode, errors.read()


def explain(stderr: str, work: Path, code: int) -> str:
    """Returns in a few lines what a compiler that ended with status `code` complained of: its
    fatal lines, and the instruction, the line of our source, the kernel, where it shows them."""
    fatal = r"LLVM ERROR|Check failed|ptxas (?:fatal|error)|ptxas .*: error|[A-Z_]{6,}: |\w+Error: "
    lines = [
        re.sub(r"^[EFW]\d{4} [\d:.]+ +\d+ ", "", line).strip()
        for line in stderr.splitlines()
        if re.search(fatal, line) and not re.match(r"[WI]\d{4} ", line)
    ]
    last = [line for line in stderr.splitlines() if line.strip()][-1:]
    said = list(dict.fromkeys(lines))[-4:] or last or [f"it said nothing (exit status {code})"]
    if code < 0:
        said.append(f"ended by signal {-code}" + (" (out of memory?)" if code == -9 else ""))
    if found := re.findall(r"%[\w.-]+ = \(?\w+\[[^\n]*?[\w-]+\([^\n]*", stderr):
        said.append(f"instruction: {found[-1].strip()[:300]}")
    if found := re.findall(r'File "[^"]*/((?:moejax|pallas_kernels)/[^"]*)", line (\d+)', stderr):
        said.append(f"source: {found[-1][0]}:{found[-1][1]}")
    kernels = sorted(work.glob("*.resources.txt"), key=lambda path: path.stat().st_mtime_ns)
    if kernels and re.search(ASSEMBLER, stderr):
        said.append(f"kernel: {re.sub(r'_[0-9]+.resources.txt$', '', kernels[-1].name)}")
    return "the GPU compiler failed: " + "\n  ".join(line[:600] for line in said)


def main(work: Path) -> None:
    """Compiles what standard input asks for; the result goes to the folder `work`/found."""
    config, cluster, num_gpus, worst_case = pickle.loads(base64.b64decode(sys.stdin.buffer.read()))
    print("trace", flush=True)
    began = time.monotonic()
    try:
        steps, mesh = make_steps(config, cluster, num_gpus)
    except ValueError as error:
        print(f"ValueError: {' '.join(str(error).split())}", flush=True)
        return
    lowered, traced_at = lower(config, steps, mesh, worst_case)
    seconds = {"trace": traced_at - began, "lower": time.monotonic() - traced_at}
    began, dump = time.monotonic(), work / "dump"
    options = {
        "xla_dump_to": str(dump), "xla_dump_hlo_as_text": True, "xla_dump_hlo_as_proto": False,
    }  # fmt: skip
    print("compile", flush=True)
    own = dict(deviceless.COMPILER_OPTIONS)
    if guide.streams(config) > 1 and not worst_case:
        first = lowered.compile(own | guide.OPTIONS)
        print("compile again, by the price of each instruction", flush=True)
        own |= guide.priced(first, config, cluster, num_gpus, work)
    compiled = lowered.compile(own | options)
    seconds["compile"] = time.monotonic() - began
    memory = compiled.memory_analysis()
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    print(f"compiled in {seconds['compile']:.0f} s, {peak / 1e9:.1f} GB of memory here", flush=True)
    folder = work / "found"
    folder.mkdir()
    texts = {"program": compiled.as_text() or ""}
    for name, pattern in DUMPED.items():
        texts[name] = max(dump.glob(pattern), key=lambda path: path.stat().st_size).read_text()
    for name, text in texts.items():
        (folder / f"{name}.gz").write_bytes(gzip.compress(text.encode(), 1))
    totals = {name: getattr(memory, attribute) for name, attribute in TOTALS.items()}
    found = {"totals": totals, "seconds": seconds, "host_bytes": peak}
    (folder / "found.json").write_text(json.dumps(found, indent=1))


def make_steps(config: Config, cluster: Cluster, num_gpus: int) -> tuple[setup.Steps, Mesh]:
    """Returns a run's steps on a cluster, and the mesh of its GPUs.

    Raises ValueError where the fold, the batch or a dim does not fit.
    """
    precision = config.precision
    if precision.compute_dtype == "auto":
        precision = dataclasses.replace(precision, compute_dtype="bfloat16")
    fold = config.fold_over(num_gpus)
    mesh = make_mesh(fold, cluster.devices(num_gpus))
    return setup.make_steps(config, fold, mesh, precision), mesh


def lower(
    config: Config, steps: setup.Steps, mesh: Mesh, worst_case: bool
) -> tuple[jax.stages.Lowered, float]:
    """Returns (the step lowered for the cluster, the time at which it had been traced)."""
    step, layout = (
        (steps.again_step, steps.worst_case) if worst_case else (steps.train_step, steps.layout)
    )
    arguments = (layout.resting, setup.abstract_batch(config, layout))
    with jax.sharding.use_abstract_mesh(mesh.abstract_mesh):
        traced = step.trace(*arguments)
        traced_at = time.monotonic()
        print("lower", flush=True)
        return traced.lower(), traced_at


if __name__ == "__main__":
    main(Path(sys.argv[1]))
