"""The host's memory allocator, set for a process that computes on its CPU.

XLA:CPU takes every temporary from malloc. By default glibc maps each large one afresh and gives it
back at once, and the kernel zeroes its pages on first touch, every time: measured on two Zen 5
cores, a gather of 64 MB takes 12 ms instead of 3, a MoE layer 1.3 times as long.
"""

import ctypes
import platform

_M_TRIM_THRESHOLD, _M_TOP_PAD, _M_MMAP_MAX, _M_ARENA_MAX = -1, -2, -4, -8
_GIB = 1 << 30


def keep_freed_memory() -> bool:
    """Lets malloc reuse freed memory instead of returning it to the kernel; for CPU training.

    The process keeps its high-water mark. Returns whether it took effect: elsewhere than with
    glibc nothing changes, and results never do.
    """
    if platform.libc_ver()[0] != "glibc":
        return False
    libc = ctypes.CDLL(None)
    settings = (
        (_M_MMAP_MAX, 0),
        (_M_TRIM_THRESHOLD, 2 * _GIB - 1),
        (_M_TOP_PAD, _GIB // 16),
        (_M_ARENA_MAX, 1),
    )
    return all(libc.mallopt(name, value) == 1 for name, value in settings)
