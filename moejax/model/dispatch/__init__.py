"""Token dispatch and combine, by name."""

from moejax.model.dispatch import (
    all_gather,
    all_to_all,
    hierarchical,
    nvlink,
    ragged,
    reference,
)
from moejax.model.dispatch.base import Dispatched, Dispatcher

DISPATCHERS: dict[str, Dispatcher] = {
    module.DISPATCHER.name: module.DISPATCHER
    for module in (reference, all_gather, all_to_all, ragged, hierarchical, nvlink)
}

__all__ = ["DISPATCHERS", "Dispatched", "Dispatcher"]
