"""The Listener: accepts Connections."""

from __future__ import annotations

import attrs
import trio
from trio.lowlevel import enable_ki_protection

from ._connection import Connection
from ._handshake.server import Acceptor
from ._util.handles import OpenedNotConstructed, warn_resource
from .ucp import Worker


@attrs.frozen
class ListenerStatistics:
    """Statistics of a :class:`Listener`. Counters only grow; gauges go up and down.

    Attributes:
        handshaking: gauge: clients whose handshake is not finished.
        waiting: gauge: connections that wait to be accepted.
        accepted: counter: connections that were accepted.
        refused: counter: clients that were turned away, or left before they were connected.
    """

    handshaking: int
    waiting: int
    accepted: int
    refused: int


@attrs.define(eq=False, repr=False)
class Listener(trio.abc.Listener[Connection], metaclass=OpenedNotConstructed):
    """Accepts Connections. Open with :func:`open_ucx_listeners`; works with ``trio.serve_listeners``."""

    _acceptor: Acceptor

    @property
    def address(self) -> tuple[str, int]:
        """The ``(host, port)`` that it is bound to, for :func:`connect`; ``("unix:/path", 0)`` at a Unix socket."""
        address = self._acceptor.address
        assert address is not None, "a listening socket has an address"
        return address

    @property
    def worker(self) -> Worker:
        """The worker that it was opened with; :attr:`Connection.worker` may be another one."""
        return self._acceptor.worker

    def statistics(self) -> ListenerStatistics:
        """Returns how many clients are in which state.

        Raises: nothing, also after the close.
        """
        acceptor = self._acceptor
        return ListenerStatistics(acceptor.handshaking, acceptor.waiting, acceptor.accepted, acceptor.refused.total())

    @enable_ki_protection
    async def accept(self) -> Connection:
        """Waits for a connection that is open: the exchange is done, and messages get through in both directions.

        Handshakes go on whether or not anybody accepts, until ``backlog`` connections wait. Clients that are turned
        away are never returned.

        Cancellation: no connection is lost.

        Raises:
            trio.ClosedResourceError: the listener was closed, perhaps meanwhile.
            trio.BrokenResourceError: its worker broke.
        """
        return Connection._wrap(await self._acceptor.accept())

    @enable_ki_protection
    async def aclose(self) -> None:
        """Stops listening. Turns away clients that were not accepted; accepted connections stay open.

        Cancellation: it is closed all the same.

        Raises: nothing, closed already or not.
        """
        self._close()
        await trio.lowlevel.checkpoint()

    def _close(self) -> None:
        self._acceptor.engine.run.check_thread()
        if self._acceptor.engine.usable:
            self._acceptor.close()

    def __del__(self) -> None:
        acceptor = self._acceptor
        if not acceptor.closed and acceptor.engine.handle is not None:
            warn_resource(f"unclosed {self!r}", self)
            acceptor.engine.run.call_soon(acceptor.close)

    def __repr__(self) -> str:
        state = "closed" if self._acceptor.closed else "listening"
        return f"<trio_ucx.Listener at {self.address}, {state}>"
