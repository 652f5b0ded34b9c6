"""GPUs that are not there, to compile for: topologies and compiler options.

XLA's GPU compiler, assembler included, runs on any x86-64 Linux machine with `jax[cuda13]`
installed; no GPU, no driver. Set `JAX_SKIP_CUDA_CONSTRAINTS_CHECK=1` before importing jax, and run
each compile in a child process: a compiler abort takes its process along.

    mesh = Mesh(devices("h100", hosts=1, per_host=8), ("x",))
    with jax.sharding.use_abstract_mesh(mesh.abstract_mesh):
        compiled = jax.jit(f).lower(*abstract_args).compile(COMPILER_OPTIONS)
"""

import dataclasses
import re

import jax
from jax.experimental import topologies

from pallas_kernels.pick import target


@dataclasses.dataclass(frozen=True)
class Gpu:
    """What the compiler has to know of a GPU (its vendor's data sheet)."""

    name: str
    capability: tuple[int, int]
    """Compute capability, major and minor."""
    cores: int
    """Streaming multiprocessors."""
    clock_ghz: float
    memory_bytes: int
    memory_bytes_per_s: int
    l2_bytes: int

    @property
    def shared_bytes(self) -> int:
        """Shared memory that one thread block can have (CUDA programming guide, capabilities)."""
        return {(8, 0): 163 * 1024, (8, 9): 99 * 1024}.get(self.capability, 227 * 1024)


_HOPPER_L2, _B200_L2, _GB_L2 = 52_428_800, 132_644_864, 135_528_448
_GB_RATE = 7_928_064_000_000
GPUS = {
    # The data sheets of the A100 80GB SXM, whose kind also names the 40GB one, and of the L40S.
    "a100": Gpu("NVIDIA A100", (8, 0), 108, 1.41, 85_100_068_864, 2_039_040_000_000, 41_943_040),
    "l40s": Gpu("NVIDIA L40S", (8, 9), 142, 2.52, 48_305_799_168, 864_000_000_000, 100_663_296),
    "h100": Gpu("NVIDIA H100", (9, 0), 132, 1.98, 84_942_979_072, 3_352_320_000_000, _HOPPER_L2),
    "h200": Gpu("NVIDIA H200", (9, 0), 132, 1.98, 151_397_597_184, 4_800_000_000_000, _HOPPER_L2),
    "b200": Gpu("NVIDIA B200", (10, 0), 148, 1.965, 191_514_411_008, 7_672_320_000_000, _B200_L2),
    "b300": Gpu("NVIDIA B300", (10, 3), 148, 1.965, 297_021_079_552, 7_672_320_000_000, _B200_L2),
    "gb200": Gpu("NVIDIA GB200", (10, 0), 152, 2.062, 197_897_748_480, _GB_RATE, _GB_L2),
    "gb300": Gpu("NVIDIA GB300", (10, 3), 152, 2.07, 297_021_079_552, _GB_RATE, _GB_L2),
}

GENERATIONS = {"hopper": 9, "blackwell": 10}
"""Major compute capability of the generations that have kernels of their own."""

SCHEDULING = {"xla_gpu_enable_latency_hiding_scheduler": True}
"""Compiler options of a training step, for GPUs that are there too."""

# Small all-reduces abort the compiler unless collective kernels are off; a sort asks a GPU that is
# not there unless CUB's radix sort is.
COMPILER_OPTIONS = SCHEDULING | {
    "xla_gpu_experimental_use_collective_kernels": "",
    "xla_gpu_enable_cub_radix_sort": False,
}


def gpu_of(kind: str) -> str | None:
    """Returns the key in `GPUS` of a device kind such as "NVIDIA H100 80GB HBM3"; None: not there.

    >>> gpu_of("NVIDIA GB200"), gpu_of("NVIDIA A100-SXM4-80GB"), gpu_of("NVIDIA RTX A1000")
    ('gb200', 'a100', None)
    """
    longest_first = sorted(GPUS, key=len)[::-1]
    return next((k for k in longest_first if re.search(rf"{k.upper()}(?!\d)", kind)), None)


def target_gpu() -> Gpu | None:
    """Returns the GPU that a program being traced is for (see `pick.target`); None for others."""
    device = target()
    name = gpu_of(device.kind) if device.platform == "gpu" else None
    if name is None:
        return None
    return dataclasses.replace(GPUS[name], cores=device.cores or GPUS[name].cores)


def refusal_for(*generations: str, oldest_jax: tuple[int, ...]) -> str | None:
    """Returns why kernels of these `GENERATIONS` do not serve the program being traced: it is for
    another device, or this JAX is older than they are. None: they may."""
    gpu = target_gpu()
    if gpu is None or gpu.capability[0] not in (GENERATIONS[name] for name in generations):
        names = " and ".join(name.title() for name in generations)
        return f"it runs on {names} GPUs, and this program is for {target().kind}"
    return too_old(oldest_jax)


def too_old(oldest_jax: tuple[int, ...]) -> str | None:
    """Returns why this JAX cannot compile kernels that need at least `oldest_jax`, or None."""
    if jax.__version_info__ >= oldest_jax:
        return None
    return f"it needs JAX {'.'.join(map(str, oldest_jax))}, and this is {jax.__version__}"


def target_config(gpu: Gpu) -> str:
    """Returns XLA's description of one GPU, a text proto."""
    major, minor = gpu.capability
    ampere, ada = gpu.capability == (8, 0), gpu.capability == (8, 9)
    return f"""
gpu_device_info {{
  threads_per_block_limit: 1024
  threads_per_warp: 32
  shared_memory_per_block: 49152
  shared_memory_per_core: {gpu.shared_bytes + 1024}
  shared_memory_per_block_optin: {gpu.shared_bytes}
  threads_per_core_limit: {1536 if ada else 2048}
  core_count: {gpu.cores}
  fpus_per_core: {64 if ampere else 128}
  block_dim_limit_x: 2147483647
  block_dim_limit_y: 65535
  block_dim_limit_z: 65535
  thread_dim_limit_x: 1024
  thread_dim_limit_y: 1024
  thread_dim_limit_z: 64
  registers_per_core_limit: 65536
  registers_per_block_limit: 65536
  memory_bandwidth: {gpu.memory_bytes_per_s}
  l2_cache_size: {gpu.l2_bytes}
  clock_rate_ghz: {gpu.clock_ghz}
  device_memory_size: {gpu.memory_bytes}
  cuda_compute_capability {{
    major: {major} minor: {minor}
    feature_extension: {"ACCELERATED_FEATURES" if major >= 9 else "NONE"}
  }}
  device_vendor: "NVIDIA Corporation"
  device_address_bits: 64
  pcie_bandwidth: 64000000000
  ecc_enabled: true
  name: "{gpu.name}"
  driver_version: "13.0.0"
  runtime_version: "13.0.0"
  compile_time_toolkit_version: "13.0.0"
  dnn_version: "9.10.0"
  device_interconnect_info {{ active_links: {0 if ada else 12 if ampere else 18} }}
}}
platform_name: "CUDA"
dnn_version_info {{ major: 9 minor: 10 patch: 0 }}
device_description_str: "{gpu.name}"
"""


def devices(gpu: str, hosts: int, per_host: int):
    """Returns compile-only devices of `hosts` x `per_host` GPUs, host-major.

    Raises KeyError for a GPU that `GPUS` does not have.
    """
    return topologies.get_topology_desc(
        platform="cuda",
        topology_name="",
        target_config=target_config(GPUS[gpu]),
        topology=f"1x{hosts}x{per_host}",
    ).devices
