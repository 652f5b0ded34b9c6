"""Mosaic's GPU interpreter, with what JAX 0.12 lacks there: a left operand in registers."""

import contextlib
from functools import partial
from unittest import mock

import jax
import numpy as np
from jax._src.pallas.mosaic_gpu.interpret import gpu_callbacks as callbacks
from jax.experimental.pallas import mosaic_gpu as plgpu


def _wgmma(original, *, a_allocation_key_as_array, **others):
    """The interpreter's wgmma; `a` is the key of a buffer, or the operand itself."""
    if a_allocation_key_as_array.ndim == 1:
        return original(a_allocation_key_as_array=a_allocation_key_as_array, **others)
    shared = callbacks._get_shared_memory()
    thread = others["thread"]
    said = callbacks.memory.GPULoggingInfo(others["mesh_location"], thread, others["source_info"])

    def place(name):
        key = callbacks.HostAllocationKey.from_array(others[f"{name}_allocation_key_as_array"])
        transforms = callbacks._remove_noop_transforms(others[f"{name}_transforms"])
        return key, shared.access(key, jax.tree.map(int, transforms))

    b, total = (
        shared.get_buffer_content(*place(name), thread, logging_info=said)[0]
        for name in ("b", "acc")
    )
    total = total + np.matmul(np.asarray(a_allocation_key_as_array), b, dtype=total.dtype)
    shared.store_buffer_content(*place("acc"), total, thread, logging_info=said)
    return others["token"]


@contextlib.contextmanager
def interpreted():
    """Runs Mosaic GPU kernels on a CPU, and looks for races."""
    wgmma = partial(_wgmma, callbacks.wgmma)
    with (
        mock.patch.object(callbacks, "wgmma", wgmma),
        plgpu.force_gpu_interpret_mode(plgpu.InterpretGPUParams(detect_races=True)),
    ):
        yield
