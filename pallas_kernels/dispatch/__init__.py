"""Rows to other devices and back: an all-to-all of as many rows as there are.

    out_RD, beside_RC = send_rows(x_TD, beside_SC, order, there, back, R, axes, collective=..)
    y_TD = return_rows(out_RD, order, there, back, axes, collective=..)

`order` is (tokens_S, slots_TK) as of `permute`: place s of what is sent is x_TD[tokens_S[s]]. Rows
are gathered on the way there, and a token's rows summed after the way back; either is the other's
gradient. `there` and `back` are each device's own view of the two ways (`work.Tables`): sizes are
device values, which all have learned from one another.
"""

from collections.abc import Callable
from functools import partial

import jax
from jax import lax
from jaxtyping import Array, Float, Int

from pallas_kernels.deviceless import gpu_of, refusal_for, target_gpu
from pallas_kernels.dispatch import mosaic
from pallas_kernels.dispatch.work import Tables
from pallas_kernels.permute import permute, unpermute
from pallas_kernels.pick import Choice, pick, target

NVLINK_DOMAIN = {"gb200": 72, "gb300": 72}
"""GPUs that NVLink joins, where they are more than the 8 of a host."""
MAX_PEERS = 32
"""Devices that the runtime's barrier has room for (XLA, MultiGpuBarrierKernel::kMaxPeers)."""

Order = tuple[Int[Array, " S"], Int[Array, "T K"]]


def send_rows(
    x_TD: Float[Array, "T D"],
    beside_SC: Float[Array, "S C"],
    order: Order,
    there: Tables,
    back: Tables,
    num_rows: int,
    axes: tuple[str, ...],
    *,
    collective: Callable[..., Array],
    impl: str | None = None,
) -> tuple[Float[Array, "R D"], Float[Array, "R C"]]:
    """Returns the `num_rows` rows that devices along `axes` send here, zeros where nobody sends
    one, and what travels beside each, an array that is already in their order.

    A token of -1 sends zeros. What a device receives fills its first rows, and must have room
    there. `collective(rows, output, *tables, axes)` is the exchange where no kernel serves. Raises
    ValueError where `impl` names what cannot serve, and says why.
    """
    choices = [
        Choice("mosaic", _send, refusal((x_TD, beside_SC), max(num_rows, order[0].size))),
        Choice("collective", partial(_send_by, collective)),
    ]
    run = pick("send_rows", impl, choices)
    return run(num_rows, axes, x_TD, beside_SC, order, there, back)


def return_rows(
    y_RD: Float[Array, "R D"],
    order: Order,
    there: Tables,
    back: Tables,
    axes: tuple[str, ...],
    *,
    collective: Callable[..., Array],
    impl: str | None = None,
) -> Float[Array, "T D"]:
    """Returns the sum of each token's rows, which come back by the tables `back` (float32, in the
    order of k). The rest is as in `send_rows`."""
    choices = [
        Choice("mosaic", _return, refusal((y_RD,), max(y_RD.shape[0], order[0].size))),
        Choice("collective", partial(_return_by, collective)),
    ]
    return pick("return_rows", impl, choices)(axes, y_RD, order, there, back)


def refusal(arrays, most: int) -> str | None:
    """Returns why the kernel cannot serve rows of these arrays, `most` of them at most, or None."""
    why = refusal_for("hopper", "blackwell", oldest_jax=(0, 12, 0)) or mesh_refusal()
    for rows in arrays:
        why = why or mosaic.refusal(rows.dtype, rows.shape[1], num_rows=max(most, rows.shape[0]))
    return why


def mesh_refusal() -> str | None:
    """Returns why the kernel cannot serve the mesh in use, or None: the runtime waits for all of
    its devices before each launch, and gives each the others' addresses."""
    devices = jax.sharding.get_abstract_mesh().size
    domain = NVLINK_DOMAIN.get(gpu_of(target().kind) or "", 8)
    if devices > domain:
        return f"the mesh has {devices} devices, and NVLink joins {domain} of {target().kind}"
    if devices > MAX_PEERS:
        return f"the mesh has {devices} devices, and XLA's barrier of kernels serves {MAX_PEERS}"
    return None


def _send_by(collective, num_rows, axes, x_TD, beside_SC, order, there, back):
    """`send_rows` by the caller's collective, of rows sorted beforehand."""

    def run(rows):
        output = lax.full_like(rows, 0, shape=(num_rows, rows.shape[1]))
        return collective(rows, output, *there, axes)

    return run(permute(x_TD, *order)), run(beside_SC)


def _return_by(collective, axes, y_RD, order, there, back):
    """`return_rows` by the caller's collective."""
    tokens_S, slots_TK = order
    output = lax.full_like(y_RD, 0, shape=(tokens_S.shape[0], y_RD.shape[1]))
    return unpermute(collective(y_RD, output, *back, axes), slots_TK, tokens_S)


def _exchange(num_rows, axes, arrays, tables):
    """The kernel, on all streaming multiprocessors."""
    gpu = target_gpu()
    launch = mosaic.Launch(axes, num_rows, gpu.cores if gpu else 0)
    return mosaic.exchange(launch, arrays, tables)


@partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _send(num_rows, axes, x_TD, beside_SC, order, there, back):
    """`send_rows` by the kernel."""
    out_RD, beside_RC = _exchange(num_rows, axes, [(x_TD, order[0]), (beside_SC, None)], there)
    return out_RD, beside_RC


def _send_forward(num_rows, axes, x_TD, beside_SC, order, there, back):
    return _send(num_rows, axes, x_TD, beside_SC, order, there, back), (order, back)


def _send_backward(num_rows, axes, residuals, d_outs):
    (tokens_S, slots_TK), back = residuals
    d_SD, d_SC = _exchange(tokens_S.shape[0], axes, [(d, None) for d in d_outs], back)
    return unpermute(d_SD, slots_TK, tokens_S), d_SC, None, None, None


_send.defvjp(_send_forward, _send_backward)


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _return(axes, y_RD, order, there, back):
    """`return_rows` by the kernel."""
    tokens_S, slots_TK = order
    [y_SD] = _exchange(tokens_S.shape[0], axes, [(y_RD, None)], back)
    return unpermute(y_SD, slots_TK, tokens_S)


def _return_forward(axes, y_RD, order, there, back):
    return _return(axes, y_RD, order, there, back), (y_RD.shape[0], order[0], there)


def _return_backward(axes, residuals, d_TD):
    num_rows, tokens_S, there = residuals
    return *_exchange(num_rows, axes, [(d_TD, tokens_S)], there), None, None, None


_return.defvjp(_return_forward, _return_backward)

__all__ = ["Tables", "mesh_refusal", "refusal", "return_rows", "send_rows"]
