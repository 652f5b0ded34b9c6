"""Who waits for whom in an exchange: one list of steps, run by the kernel and by its model.

P devices exchange, each sends to all of them (itself too). All run the same kernel of B blocks, and
each block has a semaphore of its own on each device.

0. *Entry barrier.* XLA's runtime runs it on the stream, before the kernel (`skip_device_barrier` is
   False): no kernel starts before every device of the mesh has reached this call. By then each has
   finished what it ran before: its output buffer is free, and its semaphores have been set to zero.
   So a peer may write there, and signal, however late this device's own kernel starts.
1. `send`: block b starts copies of its rows into the receivers' output buffers. Each row of an
   output
   has one writer: blocks of rows from two senders do not overlap there, and one sender's rows are
   divided among its B blocks. Rows that no sender reaches are the receiver's own to clear.
2. `land`: it waits until all of its copies are complete at their receivers (not only read from
   where
   they came).
3. `signal_all`: one signal to semaphore b of each of the P devices, with release semantics, after
   2:
   whoever sees it sees the block's rows.
4. `collect`: it waits for P signals, with acquire semantics, and takes them off its semaphore,
   which
   is zero again, for block b of P devices sends one each. A kernel ends when its last block does:
   by then all rows for its device are there, and no signal is still to come.

What frees a buffer: nobody writes into an output after its device's kernel has ended. The next call
that is given the same memory has an entry barrier of its own, which this device reaches after it
has read. The operand is read by its own device alone, so nothing waits for peers before it is
freed.

Blocks that find no room on the GPU start when earlier ones end. Where GPUs start them by number,
the lowest block that is not done runs on all devices, so it ends, and then the next.

`tests/pallas_kernels/test_exchange_protocol.py` runs `run_block` in all orders of events.
"""

from typing import Protocol


class Steps(Protocol):
    """What a block can do. Devices are numbered along the axes of the exchange."""

    def send(self) -> None:
        """Starts the copies of this block's rows."""

    def land(self) -> None:
        """Waits until all copies that this block started are complete."""

    def signal_all(self) -> None:
        """Adds 1 to this block's semaphore on every device."""

    def collect(self, signals: int) -> None:
        """Waits until this block's semaphore here is at least `signals`, and subtracts them."""


def run_block(steps: Steps, num_devices: int) -> None:
    """Runs one block of one device's kernel; step 0 lies before it."""
    steps.send()
    steps.land()
    steps.signal_all()
    steps.collect(num_devices)
