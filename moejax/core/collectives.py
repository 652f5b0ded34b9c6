"""Collectives over roles: tuples of mesh axes, where `()` means this device alone.

The only file that calls `jax.lax` collectives. Each function returns x itself for `()`, so that
one code path serves a lone device with no mesh and every fold. All are differentiable; under
`shard_map(check_vma=True)` the type system picks the transposes.
"""

from collections.abc import Callable
from functools import partial

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Int, Shaped

Axes = tuple[str, ...]


def psum(x, axes: Axes):
    """Returns the sum of x (a pytree) over the devices along `axes`, the same on all of them."""
    return lax.psum(vary(x, axes), axes) if axes else x


def pmax(x: Shaped[Array, "..."], axes: Axes) -> Shaped[Array, "..."]:
    """Returns the maximum over `axes`. Its gradient is zero by definition: use it to stabilise."""
    return lax.pmax(lax.stop_gradient(vary(x, axes)), axes) if axes else lax.stop_gradient(x)


def all_gather(x: Shaped[Array, "..."], axes: Axes, dim: int = 0) -> Shaped[Array, "..."]:
    """Returns the devices' x concatenated along `dim`, in the order of the devices.

    What is gathered becomes a leading dim first: XLA gathers along the slowest dim alone, and where
    x is a slice of stacked layers it would keep a copy of them all, transposed, outside the loop.
    """
    if not axes:
        return x
    gathered = lax.all_gather(x[None] if dim else x, axes, axis=0, tiled=True)
    shape = (*x.shape[:dim], -1, *x.shape[dim + 1 :])
    return jnp.moveaxis(gathered, 0, dim).reshape(shape) if dim else gathered


def psum_scatter(x: Shaped[Array, "..."], axes: Axes, dim: int = 0) -> Shaped[Array, "..."]:
    """Returns this device's piece, along `dim`, of the sum over `axes`."""
    if not axes:
        return x
    if dim:  # see `all_gather`
        pieces = x.reshape(*x.shape[:dim], lax.axis_size(axes), -1, *x.shape[dim + 1 :])
        return psum_scatter(jnp.moveaxis(pieces, dim, 0), axes)[0]
    return lax.psum_scatter(x, axes, scatter_dimension=0, tiled=True)


def all_to_all(x: Shaped[Array, "..."], axes: Axes) -> Shaped[Array, "..."]:
    """Sends block i of dim 0 to device i; returns the received blocks, stacked by sender."""
    return lax.all_to_all(x, axes, split_axis=0, concat_axis=0, tiled=True) if axes else x


def shift(x, axes: Axes, by: int = 1):
    """Returns the x (a pytree) of the device `by` places before along `axes`, which are a ring.

    A `ppermute`, which waits for *every* device of the mesh: not for a branch that only some of
    them take (a pipeline stage), where it would hang.
    """
    if not axes:
        return x
    size = axis_size(axes)
    pairs = [(device, (device + by) % size) for device in range(size)]
    return jax.tree.map(lambda leaf: lax.ppermute(leaf, axes, pairs), x)


def axis_size(axes: Axes) -> int:
    """Returns the number of devices along `axes` (1 for `()`)."""
    return lax.axis_size(axes) if axes else 1


def axis_index(axes: Axes) -> Int[Array, ""]:
    """Returns this device's index along `axes`, slowest first (0 for `()`)."""
    return lax.axis_index(axes) if axes else jnp.zeros((), jnp.int32)


def vary(x, axes: Axes):
    """Returns x (a pytree) typed as varying over `axes`; its transpose is the psum over them."""

    def one(leaf):
        varying = jax.typeof(leaf).manual_axis_type.varying
        missing = tuple(axis for axis in axes if axis not in varying)
        return lax.pcast(leaf, missing, to="varying") if missing else leaf

    return jax.tree.map(one, x) if axes else x


def ragged_all_to_all(
    operand: Shaped[Array, "rows ..."],
    output: Shaped[Array, "out_rows ..."],
    input_offsets: Int[Array, " peers"],
    send_sizes: Int[Array, " peers"],
    output_offsets: Int[Array, " peers"],
    recv_sizes: Int[Array, " peers"],
    axes: Axes,
) -> Shaped[Array, "out_rows ..."]:
    """Sends `operand[input_offsets[j]:][:send_sizes[j]]` to row `output_offsets[j]` of device j's
    output; rows of `output` that nothing reaches stay. All sizes are device values.

    `lax.ragged_all_to_all` where the platform has it; XLA:CPU has not, and runs an emulation.
    Differentiable in `operand` and `output`, with a choice of its own in the backward: autodiff of
    one choice would save it, and the compiled backward would ask the device which branch it is on.
    """
    tables = (input_offsets, send_sizes, output_offsets, recv_sizes)
    if not axes:
        return emulated_ragged_all_to_all(operand, output, *tables, axes=axes)
    choices: tuple[Callable, Callable] = (
        partial(emulated_ragged_all_to_all, axes=axes),
        partial(lax.ragged_all_to_all, axis_name=axes),
    )

    @jax.custom_vjp
    def send(operand, output, *tables):
        on_cpu, elsewhere = choices
        return lax.platform_dependent(operand, output, *tables, cpu=on_cpu, default=elsewhere)

    def backward(tables, d_sent):
        def pull(function):
            def run(d_sent, *tables):  # linear: where it is pulled back from does not matter
                at = [lax.full_like(d_sent, 0, shape=a.shape) for a in (operand, output)]
                return jax.vjp(lambda *ab: function(*ab, *tables), *at)[1](d_sent)

            return run

        on_cpu, elsewhere = map(pull, choices)
        pulled = lax.platform_dependent(d_sent, *tables, cpu=on_cpu, default=elsewhere)
        return *pulled, *(None,) * len(tables)

    send.defvjp(lambda *args: (send(*args), args[2:]), backward)
    return send(operand, output, *tables)


def emulated_ragged_all_to_all(
    operand, output, input_offsets, send_sizes, output_offsets, recv_sizes, axes: Axes
):
    """The definition of `ragged_all_to_all`: gathers everything, then each row finds its source.

    `recv_sizes` is implied by the peers' `send_sizes`; it is checked by nobody, as in XLA.
    """
    me, peers = axis_index(axes), send_sizes.shape[0]
    stacked = all_gather(jnp.stack([input_offsets, send_sizes, output_offsets]), axes)
    starts_p, sizes_p, places_p = stacked.reshape(peers, 3, peers)[:, :, me].T
    row_r = jnp.arange(output.shape[0], dtype=sizes_p.dtype)
    here_rp = (row_r[:, None] >= places_p[None]) & (row_r[:, None] < (places_p + sizes_p)[None])
    peer_r = jnp.argmax(here_rp, axis=1).astype(sizes_p.dtype)
    source_r = peer_r * operand.shape[0] + starts_p[peer_r] + row_r - places_p[peer_r]
    found = all_gather(operand, axes).at[source_r].get(mode="fill", fill_value=0)
    reached_r = here_rp.any(axis=1).reshape(-1, *(1,) * (output.ndim - 1))
    return jnp.where(reached_r, found, output)
