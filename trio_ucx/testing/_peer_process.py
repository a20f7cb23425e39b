"""A peer in another process, for tests of what happens when it dies, stops, or cannot be heard."""

from __future__ import annotations

import os
import pickle
import signal
import subprocess
import sys
import tempfile
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import suppress
from typing import Any, Unpack

import trio

from .. import Connection, ConnectionOptions, Listener, connect, open_ucx_listeners
from .._util.interrupts import protected_asynccontextmanager
from ..ucp import Worker
from ._faults import Faults

#: Seconds for which leaving the block waits for the handler to end.
HANDLER_TIMEOUT = 5.0
_CHILD = """
import pickle, sys
sys.path[:] = pickle.load(sys.stdin.buffer)
from trio_ucx.testing import _peer_process
_peer_process.run_handler(*pickle.load(sys.stdin.buffer))
"""


class PeerFaults(Faults):
    """Besides the faults in what our side sends: those of the peer's process. See :func:`open_peer_process`."""

    def __init__(self, connection: Connection, process: trio.Process) -> None:
        super().__init__(connection)
        self._process = process
        #: Whether it was killed, or is stopped.
        self._silent = False

    def kill_peer(self) -> None:
        """Kills the peer's process (SIGKILL), stopped or not. Ended already: no effect.

        Raises: nothing.
        """
        self._silent = True
        self._process.kill()

    def freeze(self) -> None:
        """Stops the peer's process (SIGSTOP), as an overloaded host or a debugger would. Returns once it has stopped.

        Raises: nothing.
        """
        self._silent = True
        self._process.send_signal(signal.SIGSTOP)
        with suppress(ChildProcessError):  # it has ended
            os.waitid(os.P_PID, self._process.pid, os.WSTOPPED | os.WEXITED | os.WNOWAIT)

    def thaw(self) -> None:
        """Lets the peer's process go on (SIGCONT).

        Raises: nothing.
        """
        self._silent = False
        self._process.send_signal(signal.SIGCONT)

    @property
    def _ordered(self) -> bool:
        """True if a graceful close would wait in vain."""
        return self._silent or self._port.faulty


@protected_asynccontextmanager
async def open_peer_process(
    handler: Callable[[Connection], Awaitable[object]],
    *,
    host: str | None = None,
    worker: Worker | None = None,
    **options: Unpack[ConnectionOptions],
) -> AsyncIterator[tuple[Connection, PeerFaults]]:
    """Starts a Python process that connects to us and runs ``handler(connection)`` there.

    An async context manager, which gives our Connection, and the faults that can be ordered::

        async with trio_ucx.testing.open_peer_process(handler) as (connection, faults):
            faults.freeze()
            with trio.move_on_after(1):
                await connection.ping()

    Leaving the block closes our Connection gracefully, lets the process go on for up to 5 seconds, and kills it. With a
    fault ordered, or an exception, it aborts the Connection and kills the process at once. The handler need not care
    that its Connection ends: it may let ``trio.EndOfChannel`` and ``trio.BrokenResourceError`` out.

    The process is a new one, not a fork. It has this one's environment, ``sys.path``, stdout and stderr.

    Args:
        handler: an async function that the process can import: one of a module, not of ``__main__``, no lambda and
            none within a function; or a ``functools.partial`` of one.
        host: an address of this machine, to connect over TCP; by default over a Unix socket that only this process can
            find. (Messages go over shared memory all the same, unless ``shared_memory=False``.)
        worker: the worker of our side; by default the run's shared worker.
        options: of both Connections, as for :func:`open_connection_pair`.

    Cancellation: the process is killed. With ``autojump_clock``, time jumps while the process starts.

    Raises:
        TypeError, ValueError: ``handler`` is no function that another process can import; an option cannot be sent.
        RuntimeError: leaving the block: the handler has failed, and nobody killed its process; stderr says how.
        OSError: the process cannot be started, or ends without connecting; as for :func:`trio_ucx.open_ucx_listeners`.
        trio.BrokenResourceError: leaving the block: as for :meth:`trio_ucx.Connection.aclose`.
    """
    check_importable(handler)
    with tempfile.TemporaryDirectory() as folder:
        address = f"unix:{folder}/socket" if host is None else host
        [listener] = await open_ucx_listeners(0, host=address, worker=worker, **options)
        async with listener:
            try:
                order = pickle.dumps(sys.path) + pickle.dumps((handler, listener.address, options))
            except (pickle.PicklingError, AttributeError, TypeError) as error:
                raise ValueError(f"{handler!r} or an option cannot be sent to another process: {error}") from error
            process = await trio.lowlevel.open_process([sys.executable, "-c", _CHILD], stdin=subprocess.PIPE)
            try:
                connection = await _accept(listener, process, order)
            except BaseException:
                await _end(process, 0)
                raise
    faults = PeerFaults(connection, process)
    handler_timeout = 0.0
    try:
        yield connection, faults
        if not faults._ordered:
            await connection.aclose()
            handler_timeout = HANDLER_TIMEOUT
    finally:
        connection.abort()
        await _end(process, handler_timeout)
    if process.returncode not in (0, -signal.SIGKILL):
        raise RuntimeError(f"the handler {handler!r} has failed: its process ended with {process.returncode}")
    await trio.lowlevel.checkpoint()


def check_importable(handler: object) -> None:
    function = getattr(handler, "func", handler)
    if not callable(function):
        raise TypeError(f"the handler must be an async function, not a {type(handler).__name__}")
    if getattr(function, "__module__", None) == "__main__":
        raise ValueError(f"another process cannot import {function!r}, which is in __main__: put it into a module")


async def _accept(listener: Listener, process: trio.Process, order: bytes) -> Connection:
    """Says what the process is to run, and takes its connection."""
    accepted: list[Connection] = []
    stdin = process.stdin
    assert stdin is not None
    async with stdin, trio.open_nursery() as nursery:

        async def watch() -> None:
            await process.wait()
            nursery.cancel_scope.cancel()

        nursery.start_soon(watch)
        with suppress(trio.BrokenResourceError):  # it has ended
            await stdin.send_all(order)
        await stdin.aclose()
        accepted.append(await listener.accept())
        nursery.cancel_scope.cancel()
    if not accepted:
        raise OSError(
            f"the peer's process ended with {process.returncode} before it had connected; its stderr says why"
        )
    return accepted[0]


async def _end(process: trio.Process, timeout: float) -> None:
    """Waits so long, shielded, for the process to end, and then kills it."""
    with trio.CancelScope(shield=True):
        with trio.move_on_after(timeout):
            await process.wait()
        process.kill()
        await process.wait()


def run_handler(handler: Callable[[Connection], Awaitable[object]], address: tuple[str, int], options: Any) -> None:
    """Runs a handler with a connection, as the whole of a process."""

    async def main() -> None:
        async with connect(address, **options) as connection:
            await handler(connection)

    try:
        trio.run(main)
    except* (trio.EndOfChannel, trio.BrokenResourceError):
        pass  # our Connection has ended, as it does when the block is left
