"""As "ragged", but GPUs write rows straight into each other's memory (`pallas_kernels.dispatch`).

Rows are gathered by token on the way, so no sorted copy is made; weight and expert id of each
travel in the same launch. On other platforms the rows travel as in "ragged".

The kernel waits for every device of the mesh, so all of them have to lie in one NVLink domain, and
to come to the layer together: there is no pipeline, whose ranks run different things at a time.
"""

import jax.numpy as jnp

from moejax.core import collectives
from moejax.core.mesh import Fold
from moejax.model.dispatch.ragged import Transport, dispatcher
from pallas_kernels import return_rows, send_rows
from pallas_kernels.pick import target


def _impl(fold: Fold) -> str | None:
    """Returns the implementation to ask for: on a GPU the kernel or an error, never another."""
    if target().platform != "gpu":
        return None
    if (stages := fold.degree("pp")) > 1:
        raise ValueError(
            f"moe.dispatch='nvlink': its kernel waits for all devices at once, and pp={stages} has "
            "them run different layers; use 'ragged'"
        )
    return "mosaic"


def _send(x_tD, sent, weights_s, ids_s, no_id, there, back, rows: int, fold: Fold):
    # An id of 0 stands for no row: those that nobody sends are zeros. Four columns: 16 bytes, the
    # unit of a copy. Whole numbers below 2^24 are exact in float32.
    kept_s = (ids_s + 1).astype(jnp.float32)
    zeros_s = jnp.zeros_like(kept_s)
    beside_s4 = jnp.stack([weights_s.astype(jnp.float32), kept_s, zeros_s, zeros_s], axis=1)
    x_rD, beside_r4 = send_rows(
        x_tD, beside_s4, tuple(sent), there, back, rows, fold["ep"],
        collective=collectives.ragged_all_to_all, impl=_impl(fold),
    )  # fmt: skip
    ids_r = beside_r4[:, 1].astype(jnp.int32)
    return x_rD, beside_r4[:, 0].astype(weights_s.dtype), jnp.where(ids_r > 0, ids_r - 1, no_id)


def _give_back(y_rD, sent, there, back, fold: Fold):
    return return_rows(
        y_rD, tuple(sent), there, back, fold["ep"],
        collective=collectives.ragged_all_to_all, impl=_impl(fold),
    )  # fmt: skip


DISPATCHER = dispatcher("nvlink", Transport(_send, _give_back))
