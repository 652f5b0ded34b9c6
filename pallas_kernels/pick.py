"""Choose the implementation of an operation, and say why one cannot serve.

Every operation of this package lists its implementations, best first, as `Choice`s. Whether one
serves is known from shapes, dtypes and the platform alone, so the choice is made while tracing and
costs nothing afterwards. There is no registry and no environment variable: the caller names an
implementation or leaves the choice to the order of the list.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax


class Choice(NamedTuple):
    """One implementation: its name, the function, and why it cannot serve here (None: it can)."""

    name: str
    function: Callable[..., Any]
    refusal: str | None = None


class Target(NamedTuple):
    """The device that a program being traced is for."""

    platform: str
    """"cpu", "gpu", ..."""
    kind: str
    """As its maker names it, e.g. "NVIDIA H100 80GB HBM3"."""
    cores: int
    """Streaming multiprocessors; 0 where that is not known."""


def target() -> Target:
    """Returns the devices of the mesh in use, which need not be on this machine (`deviceless.py`);
    with no mesh, the first device here."""
    device = jax.sharding.get_abstract_mesh().abstract_device
    if device is not None:
        return Target(device.platform, device.device_kind, device.num_cores or 0)
    first = jax.devices()[0]
    return Target(first.platform, first.device_kind, getattr(first, "core_count", 0) or 0)


def pick(op: str, impl: str | None, choices: Sequence[Choice]) -> Callable[..., Any]:
    """The function that serves this call of `op`.

    `impl=None` takes the first choice without a refusal; a name takes exactly that one.
    Raises ValueError when the name is unknown, when the named choice refuses, or when all refuse;
    the message holds the reasons.
    """
    if impl is None:
        for choice in choices:
            if choice.refusal is None:
                return choice.function
        reasons = "; ".join(f"{choice.name}: {choice.refusal}" for choice in choices)
        raise ValueError(f"{op}: no implementation serves this call ({reasons})")
    for choice in choices:
        if choice.name == impl:
            if choice.refusal is None:
                return choice.function
            able = [other.name for other in choices if other.refusal is None]
            raise ValueError(
                f"{op}: impl={impl!r} cannot serve this call: {choice.refusal}; "
                f"these can: {', '.join(able) or 'none'}"
            )
    names = ", ".join(choice.name for choice in choices)
    raise ValueError(f"{op}: unknown impl={impl!r}; choose from: {names}, or None for the best")
