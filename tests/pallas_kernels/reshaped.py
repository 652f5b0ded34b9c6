"""Reads of reshaped references in Mosaic's GPU interpreter, which has slices and transposes alone.

The compiler folds the last dimensions of an MMA's operand; here the value read is reshaped.
"""

import dataclasses
from typing import Any

import pytest
from jax._src.pallas.mosaic.interpret import utils
from jax._src.pallas.mosaic_gpu.interpret import shared_memory
from jax._src.state.types import ReshapeTransform


@dataclasses.dataclass(frozen=True)
class _Access(utils.Access):
    """An access whose value has another shape in the end."""

    reshaped: tuple[int, ...] = ()


def allow_reshaped_reads(patch: pytest.MonkeyPatch) -> None:
    """Lets kernels that are interpreted read references whose last transform is a reshape."""
    memory: Any = shared_memory.GPUSharedMemory
    access_of, content_of = memory.access, memory.get_buffer_content

    def access(self, key, transforms):
        if not transforms or not isinstance(transforms[-1], ReshapeTransform):
            return access_of(self, key, transforms)
        plain = access_of(self, key, transforms[:-1])
        return _Access(plain.range, plain.permutation, tuple(transforms[-1].shape))

    def content(self, key, access, *args, **kwargs):
        result, *others = content_of(self, key, access, *args, **kwargs)
        if isinstance(access, _Access) and result is not None:
            result = result.reshape(access.reshaped)
        return (result, *others)

    patch.setattr(memory, "access", access)
    patch.setattr(memory, "get_buffer_content", content)
