"""The list of items that the blocks of an exchange share: a little XLA arithmetic.

An item is up to `rows` neighbouring rows for one receiver, or rows of this device's own output that
nobody reaches and that are to be zeros. Receivers come in the order me, me + 1, ..: at any time the
senders are at different ones.

Example, two devices, rows = 4, seen by device 1: 5 rows from row 0 for device 0, to its row 2, and
3 rows from row 5 for itself, to its row 6; it receives 9 rows, and its output has 12.
    [peer, from, to, count]   [1, 5, 6, 3]  [0, 0, 2, 4]  [0, 4, 6, 1]  [1, -1, 9, 3]
"""

from typing import NamedTuple

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Int


class Tables(NamedTuple):
    """One device's view of an exchange, as `lax.ragged_all_to_all` has it."""

    input_offsets: Int[Array, " P"]
    """Where the rows for each device start here."""
    send_sizes: Int[Array, " P"]
    output_offsets: Int[Array, " P"]
    """Where they start there."""
    recv_sizes: Int[Array, " P"]


def max_items(num_sent: int, num_received: int, num_devices: int, rows: int) -> int:
    """Returns the most items that `num_sent` rows for so many devices, and zeros, can make."""
    return num_sent // rows + num_devices + -(-num_received // rows)


def items(
    tables: Tables, me: Int[Array, ""] | int, num_sent: int, num_received: int, rows: int
) -> Int[Array, " words"]:
    """Returns the number of items, and then of each: the device, the first row here (-1: zeros),
    the first row there, and how many. The rest of the array is zeros.

    What a device receives has to be packed: it fills the first `recv_sizes.sum()` rows there.
    """
    num_devices = tables.send_sizes.shape[0]
    order_q = lax.rem(me + jnp.arange(num_devices, dtype=jnp.int32), jnp.int32(num_devices))
    received = tables.recv_sizes.sum(dtype=jnp.int32)
    # The last segment is the rows of this device that nobody reaches.
    peer_q = jnp.append(order_q, jnp.int32(me))
    size_q = jnp.append(tables.send_sizes[order_q], num_received - received).astype(jnp.int32)
    from_q = jnp.append(tables.input_offsets[order_q], 0).astype(jnp.int32)
    to_q = jnp.append(tables.output_offsets[order_q], received).astype(jnp.int32)
    ends_q = jnp.cumsum((size_q + rows - 1) // rows, dtype=jnp.int32)

    item_i = jnp.arange(max_items(num_sent, num_received, num_devices, rows), dtype=jnp.int32)
    segment_i = (item_i[:, None] >= ends_q[None]).sum(axis=1, dtype=jnp.int32)
    here_i = segment_i <= num_devices
    segment_i = jnp.minimum(segment_i, num_devices)
    starts_q = jnp.append(jnp.zeros(1, jnp.int32), ends_q[:-1])
    done_i = (item_i - starts_q[segment_i]) * rows
    source_i = jnp.where(segment_i == num_devices, -1, from_q[segment_i] + done_i)
    count_i = jnp.minimum(size_q[segment_i] - done_i, rows)
    columns = peer_q[segment_i], source_i, to_q[segment_i] + done_i, count_i
    work_i4 = jnp.where(here_i[:, None], jnp.stack(columns, axis=1), 0)
    return jnp.append(ends_q[-1:], work_i4.reshape(-1))
