"""Ends this process when another one of its job has died.

A collective whose other end is gone waits for ever, on GPUs and (tried) on CPUs too, and so does a
barrier. By itself JAX notices that a process is gone after 100 s without a heartbeat, and ends the
others with a page of C++ stack; a process that fails and exits waits five minutes for the others to
leave with it, and is taken for alive meanwhile.

So every process holds a TCP connection to the first one for as long as it trains. When a process
dies, of whatever, its kernel closes that at once; when a host is lost, keepalive notices within
half a minute. The first process tells all others who it was, and each ends itself from a thread
that waits for nothing else. Kernels do the watching: a process that is only busy (compiling, or
holding Python's lock) is never taken for dead. JAX's own heartbeat stays behind as the second
net, for a process that is frozen.
"""

import ctypes
import os
import resource
import secrets
import selectors
import signal
import socket
import sys
import threading
import time
import traceback
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Self

import jax

# The key-value store of the processes; jax.experimental.multihost_utils takes it from here too.
from jax._src import distributed

HEARTBEAT_TIMEOUT_S = 40
"""For jax.distributed.initialize."""
MARK = "ended: "
"""Opens the line with which a process ends because of another."""
REFUSED, FAILED, ANOTHER_DIED = 2, 1, 75
"""Exit statuses: bad arguments; this process failed; another one did (EX_TEMPFAIL: run again)."""

_KEY, _START_MS = "moejax/liveness", 120_000
_KEEPALIVE = (("TCP_KEEPIDLE", 10), ("TCP_KEEPINTVL", 5), ("TCP_KEEPCNT", 4))  # 30 s in all
_FIRST_STAYS_S, _ABORT_WAITS_S, _BLAME_WAITS_S = 1.0, 3.0, 35.0


@dataclass
class _Link:
    """One end of a connection."""

    socket: socket.socket
    name: str = ""
    """Whose end the other one is; empty before it has said."""
    left: bool = False
    """Whether it has said that it leaves."""
    unread: bytes = b""


class Peers:
    """The processes of this job, each of which ends when one dies; nothing, for a process alone.

    A context manager around the training, entered after `job.join`. An exception that leaves
    the block ends all processes of the job, this one with status 1.
    """

    def __init__(self) -> None:
        self.way_on: Callable[[], str] = lambda: "run the same command again"
        """Returns what to do about it: closes the line that a process ends with."""
        state = distributed.global_state
        self._index, self._count, self._store = state.process_id, state.num_processes, state.client
        self._host = (state.coordinator_address or "").rpartition(":")[0].strip("[]")
        self._name = f"process {self._index} of {self._count}"
        self._name += f" (pid {os.getpid()} on {socket.gethostname()})"
        self._links: dict[int, _Link] = {}  # by file descriptor
        self._listener: socket.socket | None = None
        self._secret, self._num_left = "", 0
        self._selector = selectors.DefaultSelector()
        self._ending, self._leaving = threading.Lock(), threading.Event()
        self._thread = threading.Thread(target=self._watch, name="liveness", daemon=True)
        self._on_abort = ctypes.CFUNCTYPE(None, ctypes.c_int)(self._aborted)

    def __enter__(self) -> Self:
        store = self._store
        if self._count == 1 or store is None:
            return self
        try:
            if self._index == 0:
                self._listen(store)
            else:
                self._connect(store.blocking_key_value_get(_KEY, _START_MS))
        except OSError as error:  # not raised: an exit in good order would wait for the others
            _say(f"error: {self._name} cannot reach process 0 at {self._host}: {error}")
            os._exit(FAILED)
        _handle_abort(ctypes.cast(self._on_abort, ctypes.c_void_p))
        self._thread.start()
        store.wait_at_barrier(_KEY, _START_MS)  # before that nobody fails, or leaves
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        where: TracebackType | None,
    ) -> None:
        if not self._thread.is_alive():
            return
        if error is not None:
            traceback.print_exception(kind, error, where)
            if isinstance(error, jax.errors.JaxRuntimeError):
                time.sleep(_BLAME_WAITS_S)  # it may come of another's death: then that is named
            what = (str(error).splitlines() or [""])[0]
            self._fail(FAILED, f"{self._name} failed: {type(error).__name__}: {what}")
        for link in list(self._links.values()):
            _send(link, "left")
            with suppress(OSError):
                link.socket.shutdown(socket.SHUT_WR)
        self._leaving.set()
        self._thread.join()  # until all have left: it watches those that have not
        _handle_abort(None)

    def refuse(self, error: Exception) -> int:
        """Ends all processes over arguments that cannot run; returns the status for one alone."""
        if self._thread.is_alive():
            self._fail(REFUSED, f"{self._name} refused its arguments: {error}")
        return REFUSED

    def _listen(self, store: Any) -> None:
        _allow_files(self._count + 1024)
        both = socket.has_dualstack_ipv6()
        family = socket.AF_INET6 if both else socket.AF_INET
        self._listener = socket.create_server(
            ("", 0), family=family, dualstack_ipv6=both, backlog=self._count
        )
        self._secret = secrets.token_hex()
        self._selector.register(self._listener, selectors.EVENT_READ)
        store.key_value_set(_KEY, f"{self._listener.getsockname()[1]} {self._secret}")

    def _connect(self, told: str) -> None:
        port, secret = told.split()
        link = self._register(socket.create_connection((self._host, int(port)), timeout=30))
        link.name = f"process 0 of {self._count} (at {self._host}, where the job's processes meet)"
        _send(link, f"hello {secret} {self._name}")

    def _accept(self, listener: socket.socket) -> None:
        try:
            connection, _ = listener.accept()
        except OSError:  # gone again already
            return
        self._register(connection)

    def _register(self, connection: socket.socket) -> _Link:
        connection.settimeout(5)
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        for option, seconds in _KEEPALIVE:
            if hasattr(socket, option):  # Linux
                connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, option), seconds)
        link = self._links[connection.fileno()] = _Link(connection)
        self._selector.register(connection, selectors.EVENT_READ)
        return link

    def _watch(self) -> None:
        """The thread: reads what the others say, until all leave.

        A connection is closed when both ends have heard all that the other one said: closed before,
        it takes the last words back.
        """
        others = self._count - 1 if self._index == 0 else 1
        while not (self._leaving.is_set() and self._num_left == others):
            for key, _ in self._selector.select(timeout=0.2):
                if self._listener is not None and key.fileobj is self._listener:
                    self._accept(self._listener)
                else:
                    self._read(self._links[key.fd])
        for link in self._links.values():
            link.socket.close()
        if self._listener is not None:
            self._listener.close()
        self._selector.close()

    def _read(self, link: _Link) -> None:
        try:
            data = link.socket.recv(4096)
        except OSError:  # reset, or no answer to keepalive
            data = b""
        *lines, link.unread = (link.unread + data).split(b"\n")
        for line in lines:
            self._hear(link, line.decode(errors="replace"))
        if not data:
            self._selector.unregister(link.socket)
            self._num_left += link.left
            if link.name and not link.left:
                self._end(ANOTHER_DIED, f"{link.name} died")

    def _hear(self, link: _Link, line: str) -> None:
        verb, _, rest = line.partition(" ")
        if verb == "hello" and self._secret and rest.startswith(self._secret):
            link.name = rest.removeprefix(self._secret).strip()
        elif verb == "left":
            link.left = True
        elif verb == "ended" and link.name:
            status, _, what = rest.partition(" ")
            self._end(int(status), what)

    def _end(self, status: int, what: str) -> None:
        """Ends this process, and if it is the first one all others, because of another one."""
        self._ending.acquire()  # and never released: there is one end
        self._tell(status, what)
        more = "" if status == REFUSED else f"; {self.way_on()}"
        _say(f"{MARK}{what}{more}")
        os._exit(status)

    def _fail(self, status: int, what: str) -> None:
        """Ends all processes because of this one."""
        self._ending.acquire()
        sys.stdout.flush()
        sys.stderr.flush()
        self._tell(ANOTHER_DIED if status == FAILED else status, what)
        os._exit(status)

    def _tell(self, status: int, what: str) -> None:
        for link in list(self._links.values()):
            _send(link, f"ended {status} {what}")
        if self._index == 0:
            time.sleep(_FIRST_STAYS_S)  # without it JAX ends the others, in words of its own

    def _aborted(self, number: int) -> None:
        """C++ has given up in some thread: mostly JAX, since the first process is gone.

        The thread above hears of that too, and says so better.
        """
        time.sleep(_ABORT_WAITS_S)
        self._ending.acquire()
        _say(f"{MARK}{self._name} was aborted by a library, see the lines above; {self.way_on()}")
        os._exit(128 + number)


def _send(link: _Link, line: str) -> None:
    # A line is far smaller than the kernel's buffer; whoever has gone hears nothing.
    with suppress(OSError):
        link.socket.sendall(" ".join(line.split()).encode() + b"\n")


def _say(line: str) -> None:
    """Writes to stderr whoever holds the locks of Python's own."""
    os.write(2, (" ".join(line.split()) + "\n").encode())


def _handle_abort(function: ctypes.c_void_p | None) -> None:
    """Lets SIGABRT call `function`, None for the default.

    Handlers of `signal.signal` wait for the main thread, and abort() waits for nobody; the thread
    that aborts holds no lock of Python's, or its own.
    """
    libc = ctypes.CDLL(None)
    libc.signal.argtypes, libc.signal.restype = [ctypes.c_int, ctypes.c_void_p], ctypes.c_void_p
    libc.signal(signal.SIGABRT, function)


def _allow_files(number: int) -> None:
    """Lets this process open so many files, or as many as the system allows."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = number if hard == resource.RLIM_INFINITY else min(number, hard)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
