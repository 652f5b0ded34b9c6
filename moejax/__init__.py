"""Mixture-of-Experts language models in JAX, from one laptop CPU to a GPU cluster.

    from moejax import ModelConfig, Transformer

`import moejax` alone imports nothing else: each name is fetched where it is first asked for.
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from moejax.model.config import ModelConfig
    from moejax.model.moe import MoE, MoEConfig
    from moejax.model.transformer import Transformer

__all__ = ["MoE", "MoEConfig", "ModelConfig", "Transformer"]

_HOMES = {
    "MoE": "moejax.model.moe",
    "MoEConfig": "moejax.model.moe",
    "ModelConfig": "moejax.model.config",
    "Transformer": "moejax.model.transformer",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'moejax' has no attribute {name!r}; it has {sorted(_HOMES)}")
    return getattr(importlib.import_module(_HOMES[name]), name)
