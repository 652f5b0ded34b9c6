"""The price of work on a cluster: seconds of one kernel, collective or copy.

    seconds(Work("attend", GEMM, flops=..., mnk=(m, n, k)), CLUSTERS["h100"])

One function prices what XLA scheduled and what the analytic plan lists. A product costs the slower
of tensor cores and memory (a cubic mean joins the two where they are near), both at rates that were
measured; everything else costs its bytes over a link. Each rate below names its source. None was
chosen by comparing a whole step with a published one.
"""

from math import ceil, log2

from moejax.plan.hardware import Cluster
from moejax.plan.operations import (
    ATTENTION,
    COLLECTIVE,
    GEMM,
    GROUPED,
    HOST,
    IDLE,
    MEMORY,
    Work,
)

MICRO = 1e-6
SIZES = {"float32": 4, "bfloat16": 2, "float16": 2, "fp8": 1, "fp4": 0.5625}
"""Bytes of an element. fp4: 4 bits, and a scale of 8 for 16 of them."""

# Products of [m, k] and [k, n] run at peak * SUSTAINED * k / (k + LOST). LOST is the length k that
# would pass while a tile is begun and written. Hopper, FP8: the README of DeepGEMM (H800, NVCC
# 12.8) has 590, 990, 1025, 1304 and 1358 TFLOPS at k = 512, 1536, 2048, 7168 and 16384, which 0.71
# and 700 give within 6 %. Its BF16 steps take twice as long, so half of it is lost; 0.80 gives 707
# and 744 at 4096 and 8192 cubed, where cuBLAS reaches 716 and 795 (the README of
# pranjalssh/fast.cu) and 780 at its best shape ("H100 peak matmul FLOPS", a gist of Chillee).
# Blackwell's tensor cores lose no more, at the clock that power leaves them: cuBLAS on a B200 keeps
# them 96.6 % busy at 8192 cubed, and reaches 1,610 TFLOPS ("Matmul (Blackwell)", the tutorial of
# Tilus; Modular measures 1,763). FP8 and FP4 as Hopper's FP8: the time lost to a tile is the same.
SUSTAINED = {9: {"bfloat16": 0.80, "fp8": 0.71}, 10: {"bfloat16": 1.0, "fp8": 1.0, "fp4": 1.0}}
PER_WATT = {9: float("inf"), 10: 1610e12 / 0.966 / 1000}
"""BF16 FLOP/s that a watt buys: what those cores could do on a B200 (1,000 W), which bounds the
clock. Hopper's bound is in its rates above, all measured at 700 W."""
LOST = {"float32": 350.0, "bfloat16": 350.0, "float16": 350.0, "fp8": 700.0, "fp4": 1400.0}
TILES = ((128, 256), (256, 128), (128, 128), (64, 256), (64, 128))
"""Output tiles among which libraries choose (CUTLASS's and DeepGEMM's for Hopper)."""

# TFLOPS of cuDNN's causal attention, forward and backward, at 4,096 and 16,384 keys: "Scalable
# Training of Mixture-of-Experts Models with Megatron Core", DeepSeek-V3's heads (192 and 128 wide).
ATTENTION_RATES = {
    9: ((553e12, 638e12), (422e12, 523e12)),
    10: ((1324e12, 1698e12), (1083e12, 1298e12)),
}
NARROW = 0.75
"""Rate of heads 64 wide over that of 128: 497 and 648 TFLOPS forward at 16k (FlashAttention-3,
2024, figure 5)."""

# Share of peak memory bandwidth. Hopper: 84 % of 3.35 TB/s for coalesced loads ("GPU Memory
# Bandwidth: What Your Profiler Isn't Telling You", 2026); STREAM reaches 92 %. Blackwell: an MXFP8
# quantizer that is bound by memory, 6 TB/s on a B200 ("Chasing 6+ TB/s: an MXFP8 quantizer on
# Blackwell").
HBM = {9: 0.84, 10: 0.79}
CACHED = 2.0
"""Speed-up of what fits half of L2: 5.5 TB/s and more ("Nvidia's H100: Funny L2, and Tons of
Bandwidth", Chips and Cheese, 2023) over 2.8."""
LAUNCH = 2 * MICRO
"""Gap before a kernel, and the time in which it fills and empties the GPU ("Getting Started with
CUDA Graphs", NVIDIA, 2019: 3.4 to 3.8 us a kernel where kernels alone take 2.9)."""

# Shares of a link's bandwidth. All-to-all: Table 7 of the Megatron Core MoE paper (7168 wide, 4,096
# tokens, 8 of 256 experts, BF16). NCCL sends 7 copies inside 8 GPUs: 411 MB in 1,265 us on H100,
# 735 us on GB200; 7.9 inside 64 GPUs in 930 us; across the network 7 in 9,164 us and, of 16 GPUs, 4
# in 5,774 us. HybridEP sends a token once to each GPU (5.25 * 7/8 copies of 8: 661 and 391 us; 7.46
# of 64: 675 us) or, across the network, once to each domain (3.6 * 7/8, routed to 4 groups: 4,626
# us; of 16 GPUs, 1: 1,485 us).
NEAR = {
    9: {"ring": 0.80, "all_to_all": 0.72, "fused_all_to_all": 0.91},
    10: {"ring": 0.80, "all_to_all": 0.58, "fused_all_to_all": 0.74},
}
"""NVLink. "ring": what NCCL itself counts on (src/graph/topo.h): 20.6 of a Hopper link's 25 GB/s,
40.1 of a Blackwell link's 50."""
FAR = {"ring": 0.92, "all_to_all": 0.86, "fused_all_to_all": 0.80}
"""The network. "ring": 46 of 50 GB/s an adapter ("you should see 46-48 GB/s per NIC",
NVIDIA/nccl-tests#290)."""
HOP, FAR_HOP = 1.9 * MICRO, 4.0 * MICRO
"""Latency of a ring's step on NVLink and on the network (NCCL, src/graph/tuning.cc, LL128)."""
BRANCH, FAR_BRANCH = 1.2 * MICRO, 8.5 * MICRO
"""The same of a tree's (ibidem), by which NCCL sums what is small."""
HOST_LINK = 0.85
"""Share of PCIe's or NVLink-C2C's bandwidth that a large copy reaches: 54 of 64 GB/s (NVIDIA's
bandwidthTest on PCIe 5)."""


def generation(cluster: Cluster) -> int:
    """Returns the major compute capability: 9 Hopper, 10 Blackwell. KeyError: no rates for it."""
    major = cluster.gpu.capability[0]
    if major not in SUSTAINED:
        raise KeyError(f"no rates are known for compute capability {major} ({cluster.name})")
    return major


def seconds(work: Work, cluster: Cluster) -> float:
    """Returns the seconds that the work takes, alone on its GPU (or link)."""
    if work.kind == IDLE:
        return work.wait
    if work.kind == COLLECTIVE:
        return _collective(work, cluster)
    if work.kind == HOST:
        return work.bytes / (cluster.host_link * HOST_LINK)
    if work.kind == MEMORY:
        return LAUNCH + memory(work.bytes, cluster)
    if work.kind == ATTENTION:
        return LAUNCH + _attention(work, cluster)
    assert work.kind in (GEMM, GROUPED), work.kind
    moved = memory(product_bytes(work), cluster)
    return LAUNCH + (_product(work, cluster) ** 3 + moved**3) ** (1 / 3)


def clock(cluster: Cluster) -> float:
    """Returns the share of the peak's clock that the power limit leaves to busy tensor cores."""
    bound = PER_WATT[generation(cluster)] * cluster.watts
    return min(1.0, bound / cluster.peak("bfloat16"))


def memory(size: float, cluster: Cluster) -> float:
    """Returns the seconds of reading and writing so many bytes of device memory."""
    rate = cluster.gpu.memory_bytes_per_s * HBM[generation(cluster)]
    return size / (rate * CACHED if size <= cluster.gpu.l2_bytes / 2 else rate)


def product_bytes(work: Work) -> float:
    """Returns the bytes of a product's operands and (16-bit) result; those it names, if any."""
    if work.bytes:
        return work.bytes
    m, n, k = work.mnk
    return work.groups * ((m * k + k * n) * SIZES[work.dtype] + m * n * 2)


def _product(work: Work, cluster: Cluster) -> float:
    """Seconds of the tensor cores: whole tiles, in whole waves over the cores."""
    major, cores = generation(cluster), cluster.gpu.cores
    m, n, k = (max(size, 1.0) for size in work.mnk)
    kind = "bfloat16" if work.dtype in ("float32", "float16") else work.dtype
    rate = cluster.peak(work.dtype) * clock(cluster) * SUSTAINED[major][kind]
    rate *= k / (k + LOST[work.dtype])
    executed = min(
        ceil(_tiles(work, m, n, tile) / cores) * cores * tile[0] * tile[1] for tile in TILES
    )
    return 2.0 * executed * k / rate


def _tiles(work: Work, m: float, n: float, tile: tuple[int, int]) -> float:
    """Tiles of all products; groups of rows end, on average, in the middle of one."""
    rows = m / tile[0] + 0.5 if work.kind == GROUPED and work.groups > 1 else ceil(m / tile[0])
    return work.groups * rows * ceil(n / tile[1])


def _attention(work: Work, cluster: Cluster) -> float:
    """Seconds of flash attention. mnk: queries, keys seen, width of a head."""
    _, keys, width = work.mnk
    short, long = ATTENTION_RATES[generation(cluster)][work.phase == "backward"]
    share = min(max((keys - 4096) / (16384 - 4096), 0.0), 1.0)
    rate = short + share * (long - short)
    if keys < 4096:  # what is lost at the diagonal is a block of about 256 keys
        rate *= keys / (keys + 256) * (4096 + 256) / 4096
    return work.flops / (rate * (NARROW if width <= 64 else 1.0))


def _collective(work: Work, cluster: Cluster) -> float:
    group, near = work.group, NEAR[generation(cluster)]
    if group.size <= 1 or not work.wire:
        return 0.0
    domains = group.size / group.local
    if work.collective in ("all_gather", "reduce_scatter", "all_reduce"):
        # Each domain's members carry a ring's crossings together, an adapter each.
        inside = work.wire / (cluster.nvlink * near["ring"]) if group.local > 1 else 0.0
        across = work.wire / group.local / (cluster.network * FAR["ring"]) if domains > 1 else 0.0
        hops = (group.size - domains) * HOP + (domains - 1) * FAR_HOP
        if work.collective == "all_reduce":
            tree = (group.local - 1) * BRANCH + log2(domains) * FAR_BRANCH
            hops = 2 * min(hops, tree)
        return max(inside, across) + max(hops, _latency(cluster, domains))
    kind = "fused_all_to_all" if work.collective == "fused_all_to_all" else "all_to_all"
    far = work.wire * (group.size - group.local) / (group.size - 1)
    inside = (work.wire - far) / (cluster.nvlink * near[kind])
    return max(inside, far / (cluster.network * FAR[kind])) + _latency(cluster, domains)


def _latency(cluster: Cluster, domains: float) -> float:
    return cluster.network_latency if domains > 1 else cluster.nvlink_latency
