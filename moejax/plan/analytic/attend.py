"""The attention of an analytic plan: projections, the core as one kernel or as blocks, windows."""

from math import ceil

from moejax.model.config import ModelConfig
from moejax.plan.analytic.pieces import Item, Made
from moejax.plan.operations import ATTENTION, COLLECTIVE, GEMM, MEMORY, Group, Loop, Run, Work

ROWS, KEYS, SCORES = 128, 512, 2**26  # blocks of pallas_kernels.attention.xla
TINY = 4096.0  # bytes of a kernel that costs its launch


def attend(made: Made, model: ModelConfig, window: int) -> None:
    """Adds attention and the norm before it: x [t, D] to what is added to x, and the sum."""
    setup, cfg = made.setup, model.attention
    t, T, D, tp = setup.here, setup.tokens, model.dim, setup.tp
    norm(made, t * D)
    if cfg.kind == "mla":
        _latents(made, model)
    else:
        query, kv = cfg.num_heads * cfg.qk_dim / tp, cfg.num_kv_heads * cfg.head_dim / tp
        made.collective("attend", "all_gather", "tp", "tp", 2 * T * D)
        made.product("attend", T, query + 2 * kv, D)
        heads = 2 * T * (query + kv)
        if cfg.qk_norm:
            made.memory("attend", 2 * heads, 4 * heads)
        made.memory("attend", (3 if made.ours else 2) * heads, (4 if made.ours else 2) * heads)
    _core(made, model, window)
    made.product("attend", T, D, cfg.num_heads * cfg.value_dim / tp)
    made.collective("attend", "reduce_scatter", "tp", "tp", 2 * T * D)
    made.memory("block", 3 * 2 * t * D, 0)  # the residual's sum; its gradient is passed on


def norm(made: Made, elements: float, flops: float = 0.0) -> None:
    """Adds an RMSNorm of so many 16-bit elements."""
    if made.ours:  # one pass for the mean, one for the rest; backward two sums, and float32
        made.memory("block", 3 * 2 * elements, 9 * 2 * elements, "norm", flops=flops)
    else:
        made.memory("block", 2 * 2 * elements, 4 * 2 * elements, "norm", flops=flops)


def _latents(made: Made, model: ModelConfig) -> None:
    """Adds the projections of latent attention, to queries, keys and values."""
    setup, cfg = made.setup, model.attention
    t, T, tp = setup.here, setup.tokens, setup.tp
    rank, latent, rope = cfg.mla.q_rank, cfg.mla.kv_rank, cfg.rope_dim
    made.product("attend", t, rank + latent + rope, model.dim)
    norm(made, t * (rank + latent), flops=2 * t * (rank + latent))
    made.collective("attend", "all_gather", "tp", "tp", 2 * T * (rank + latent + rope))
    query = cfg.num_heads * cfg.qk_dim / tp
    both = cfg.num_heads * (cfg.head_dim + cfg.value_dim) / tp
    if rank:
        made.product("attend", T, query, rank, "mla_up")
    else:
        made.collective("attend", "all_gather", "tp", "tp", 2 * T * model.dim)
        made.product("attend", T, query, model.dim, "mla_up")
    made.product("attend", T, both, latent, "mla_up")
    # The rope key is copied to each head, and all that the core reads is written once more.
    made.memory("attend", 2 * T * (3 * query + 2 * both), 2 * T * (3 * query + 2 * both), "mla_up")


def _core(made: Made, model: ModelConfig, window: int) -> None:
    setup, cfg = made.setup, model.attention
    L, rows, share = setup.sequence_length, setup.rows, setup.tp * setup.cp
    heads, qk, value = cfg.num_heads / setup.tp, cfg.qk_dim, cfg.value_dim
    kv_heads = heads if cfg.kind == "mla" else max(cfg.num_kv_heads / setup.tp, 1)
    if setup.cp > 1:  # keys and values of the others come round a ring, beside the core
        group = setup.group("cp", made.cluster)
        wire = 2 * setup.tokens * kv_heads * (qk + value) * (group.size - 1)
        made.add(
            [_round(wire, group)], [_round(2 * wire, group)], "attend",
        )  # fmt: skip
    if setup.attention == "xla":
        blocks = _Blocks(rows, L, kv_heads, heads / kv_heads, qk, value, window)
        made.add(blocks.forward(), blocks.backward(), "attend")
        return
    seen = min(window or L, L)
    pairs = rows * (2 * L * seen - seen**2) / 2  # of query and key, the diagonal half
    flops = 2 * pairs * cfg.num_heads * (qk + value) / share
    work = Work("attend", ATTENTION, flops=flops, mnk=(setup.tokens, seen, min(qk, value)))
    # The backward makes the scores again: cuDNN's has 5 products for the forward's 2; ours makes
    # them twice, for the queries' gradients (s, dp, dq) and for the others (s, dp, dv, dk).
    more = (4 * qk + 3 * value) / (qk + value) if made.ours else 2.5
    made.add([work], [Work("attend", ATTENTION, "backward", more * flops, mnk=work.mnk)], "attend")


def _round(wire: float, group: Group) -> Work:
    return Work("attend", COLLECTIVE, collective="permute", role="cp", wire=wire, group=group)


class _Blocks:
    """The loops of `pallas_kernels.attention.xla`: query blocks, and the key blocks they see."""

    def __init__(self, rows, length, kv_heads, repeats, qk, value, window):
        queries = min(ROWS, length)
        self.keys = min(KEYS, length)
        # Chunks of the batch, and of the causal half the blocks that are seen, whole ones.
        room = max(int(SCORES // (kv_heads * repeats * queries * self.keys)), 1)
        chunk = max(size for size in range(1, int(rows) + 1) if rows % size == 0 and size <= room)
        self.blocks = ceil(length / queries)
        self.steps = sum(
            ceil((i + 1) * queries / self.keys)
            - (max(i * queries - window + 1, 0) // self.keys if window else 0)
            for i in range(self.blocks)
        )
        self.chunks = rows / chunk
        self.groups, self.m = chunk * kv_heads, repeats * queries
        self.qk, self.value = qk, value

    def _gemm(self, m: float, n: float, k: float, wide: bool) -> Run:
        size = 4 if wide else 2
        moved = self.groups * (2 * (m * k + k * n) + size * m * n)
        flops = 2 * self.groups * m * n * k
        return Run(Work("attend", GEMM, flops=flops, bytes=moved, mnk=(m, n, k),
                        groups=int(self.groups)))  # fmt: skip

    def _looped(self, name: str, step: list[Run], block: list[Run]) -> list[Item]:
        inside = Loop(f"{name} keys", self.steps / self.blocks, tuple(step))
        return [Loop(name, self.blocks * self.chunks, (*block, inside))]

    def forward(self) -> list[Item]:
        """Returns the loops of the forward."""
        scores, out = self.groups * self.m * self.keys, self.groups * self.m * self.value
        kv = self.groups * self.keys
        step = [
            *_elementwise(TINY, TINY, TINY, 4 * kv * self.qk, 4 * kv * self.value),
            self._gemm(self.m, self.keys, self.qk, wide=True),
            *_elementwise(4 * scores, 6 * scores),
            self._gemm(self.m, self.value, self.keys, wide=True),
            *_elementwise(TINY, 12 * out),
        ]
        query = self.groups * self.m * self.qk
        block = _elementwise(TINY, TINY, TINY, 4 * query, 4 * out, 6 * out)
        return self._looped("attend blocks", step, block)

    def backward(self) -> list[Item]:
        """Returns the loops of the backward."""
        m, keys, qk, value = self.m, self.keys, self.qk, self.value
        scores, kv = self.groups * m * keys, self.groups * keys
        step = [
            *_elementwise(TINY, TINY, 4 * kv * qk, 4 * kv * value),
            self._gemm(m, keys, qk, wide=True),
            self._gemm(m, keys, value, wide=True),
            *_elementwise(12 * scores),
            self._gemm(m, qk, keys, wide=True),
            *_elementwise(12 * self.groups * m * qk),
            self._gemm(qk, keys, m, wide=True),
            self._gemm(value, keys, m, wide=True),
            *_elementwise(12 * kv * qk, 12 * kv * value),
        ]
        query = self.groups * m
        block = _elementwise(TINY, TINY, TINY, 8 * query * qk, 8 * query * value, 6 * query * qk)
        return self._looped("attend blocks", step, block)


def _elementwise(*sizes: float) -> list[Run]:
    return [Run(Work("attend", MEMORY, bytes=size)) for size in sizes]
