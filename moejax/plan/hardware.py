"""GPU clusters that can be rented: one dataclass for the compiler's target and the cost model.

Peaks are the vendor's, for dense matrices; what a program reaches of them is `cost`'s business.
Bandwidths are of one GPU and one direction.
"""

import dataclasses
import re

from pallas_kernels import deviceless
from pallas_kernels.deviceless import GPUS, Gpu

T, G, MICRO = 1e12, 1e9, 1e-6


@dataclasses.dataclass(frozen=True)
class Cluster:
    """GPUs of one kind, in NVLink domains that a network joins. Bytes, seconds, FLOP/s."""

    name: str
    gpu: Gpu
    """What the compiler knows, memory and its bandwidth with it."""
    peaks: tuple[tuple[str, float], ...]
    """FLOP/s of dense products by input dtype. Source: the GPU's data sheet, halved where it prints
    the figure of sparse matrices."""
    domain: int
    """GPUs that NVLink joins to each other."""
    nvlink: float
    """NVLink bandwidth. H100, H200 900 GB/s, Blackwell 1.8 TB/s, both ways together."""
    network: float
    """Bandwidth of the network: one adapter a GPU. ConnectX-7 400 Gb/s, ConnectX-8 800 Gb/s."""
    host_link: float
    """Bandwidth to the host's memory. PCIe 5 x16, or a GPU's share of NVLink-C2C."""
    host_memory: float
    """A GPU's share of the host's memory."""
    watts: float
    """Power limit of one GPU."""
    nvlink_latency: float = 8 * MICRO
    """A collective's fixed cost inside a domain, launch included: NCCL's small-message figures."""
    network_latency: float = 20 * MICRO
    """The same across the network."""

    def peak(self, dtype: str) -> float:
        """Returns the FLOP/s of dense products of that dtype; KeyError: it multiplies none."""
        return dict(self.peaks)[dtype]

    def devices(self, num_gpus: int) -> list:
        """Returns so many compile-only devices, as many a host as an NVLink domain has.

        Raises ValueError where whole domains do not make up the number.
        """
        per_host = min(num_gpus, self.domain)
        if num_gpus % per_host:
            raise ValueError(
                f"{num_gpus} GPUs are no whole number of {self.name} domains of {self.domain}"
            )
        return list(deviceless.devices(self.gpu_key, num_gpus // per_host, per_host))

    @property
    def gpu_key(self) -> str:
        """The GPU's key in `pallas_kernels.deviceless.GPUS`."""
        return next(key for key, gpu in GPUS.items() if gpu == self.gpu)


def _peaks(bfloat16: float, fp8: float, fp4: float = 0.0) -> tuple[tuple[str, float], ...]:
    found = {"float32": bfloat16 / 2, "bfloat16": bfloat16, "float16": bfloat16, "fp8": fp8}
    return tuple((found | ({"fp4": fp4} if fp4 else {})).items())  # float32 as TF32


_HOPPER = _peaks(989.4 * T, 1978.9 * T)  # H100 SXM, H200 SXM data sheets
_B200 = _peaks(2250 * T, 4500 * T, 9000 * T)  # HGX B200: 36 PFLOPS of FP8 with sparsity, 8 GPUs
_B300 = _peaks(2250 * T, 4500 * T, 13500 * T)  # HGX B300: 108 PFLOPS of dense FP4, 8 GPUs
_GB200 = _peaks(2500 * T, 5000 * T, 10000 * T)  # NVL72: 720 PFLOPS of FP8 with sparsity, 72 GPUs
_GB300 = _peaks(2500 * T, 5000 * T, 15000 * T)  # NVL72: 1,080 PFLOPS of dense FP4, 72 GPUs
_PCIE5, _C2C = 64 * G, 225 * G  # C2C: 900 GB/s both ways together, of a Grace and its two GPUs

# DGX H100 and H200 have 2 TB of memory for 8 GPUs, DGX B200 and B300 up to 4 TB, a Grace 480 GB
# for 2. Of an NVL72 domain jobs use 64 GPUs, so that powers of two fit. Power: data sheets; B300 of
# an HGX board.
CLUSTERS = {
    cluster.name: cluster
    for cluster in (
        Cluster("h100", GPUS["h100"], _HOPPER, 8, 450 * G, 50 * G, _PCIE5, 256 * G, 700),
        Cluster("h200", GPUS["h200"], _HOPPER, 8, 450 * G, 50 * G, _PCIE5, 256 * G, 700),
        Cluster("b200", GPUS["b200"], _B200, 8, 900 * G, 50 * G, _PCIE5, 512 * G, 1000),
        Cluster("b300", GPUS["b300"], _B300, 8, 900 * G, 100 * G, _PCIE5, 512 * G, 1100),
        Cluster("gb200", GPUS["gb200"], _GB200, 64, 900 * G, 50 * G, _C2C, 240 * G, 1200),
        Cluster("gb300", GPUS["gb300"], _GB300, 64, 900 * G, 100 * G, _C2C, 240 * G, 1400),
    )
}


def parse(text: str) -> tuple[Cluster, int]:
    """Returns (cluster, number of GPUs) of a text such as "h100x256", or one that ends so.

    Raises ValueError, naming the kinds there are.
    """
    found = re.search(r"([a-z]+\d+)x(\d+)$", text)
    if not found or found[1] not in CLUSTERS or not int(found[2]):
        raise ValueError(
            f"{text!r} names no cluster: write GPUxNUMBER, such as h100x256, with one of "
            + ", ".join(CLUSTERS)
        )
    return CLUSTERS[found[1]], int(found[2])
