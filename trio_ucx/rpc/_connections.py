"""The connections of a client: one that was given, or those that it opens one after the other."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from functools import partial

import attrs
import trio
from trio.lowlevel import enable_ki_protection

from .. import Backoff, Channel, Connection, PeerState
from .._opening.backoff import is_temporary
from ._errors import CallLost
from ._messages import MOST_KEPT


@attrs.define(eq=False)
class ClientConnection:
    """A connection, and the conversations that calls have there."""

    connection: Connection
    users: int = 0
    #: New calls use another one.
    retired: bool = False
    unused: trio.Event | None = None
    #: Conversations whose calls were answered.
    kept: list[Channel] = attrs.field(factory=list)

    @property
    def usable(self) -> bool:
        """True if new calls can use it, as far as this side knows."""
        return bool(self.kept) or (not self.retired and self.connection.peer_state is PeerState.OPEN)

    def open(self) -> Channel:
        """Opens a conversation."""
        talk = self.connection.open_conversation()
        self.users += 1
        return talk

    def take_kept(self) -> Channel | None:
        """Returns a conversation that was kept, if there is one. The peer may leave it at any time."""
        if not self.kept:
            return None
        talk = self.kept.pop()
        talk._state.on_end = ()
        self.users += 1
        return talk

    def _left(self, talk: Channel) -> None:
        """The peer has left a conversation that was kept, or the connection has ended."""
        self.kept.remove(talk)
        talk._close()

    def leave(self, talk: Channel, *, keep: bool = False, over: bool = False) -> None:
        """Keeps a conversation for another call, or leaves it: by force unless it is over."""
        if keep and not talk.peer_left and self.usable and len(self.kept) < MOST_KEPT:
            talk._state.on_end = (partial(self._left, talk),)
            self.kept.append(talk)
        else:
            talk._close(by_force=not over)
        self.users -= 1
        if not self.users and self.unused is not None:
            self.unused.set()

    def retire(self) -> None:
        """New calls use another connection."""
        self.retired = True
        for talk in self.kept:
            talk._close()
        self.kept.clear()

    async def wait_unused(self) -> None:
        """Waits until the connection has ended, and no call has anything to receive."""
        try:
            await self.connection.wait_closed()
        except trio.BrokenResourceError:
            pass
        self.retire()
        if self.users:
            self.unused = trio.Event()
            await self.unused.wait()


class GivenConnection:
    """A connection that was given: see :class:`ReopenedConnections` for its methods."""

    def __init__(self, connection: Connection) -> None:
        self.current = ClientConnection(connection)

    async def next(self) -> ClientConnection:
        return self.current  # its own error is the best one

    async def replace(self, used: ClientConnection, error: CallLost, tries: int) -> bool:
        return False


@attrs.define(eq=False)
class _Opening:
    """The opening of a connection, for which calls wait."""

    done: trio.Event = attrs.field(factory=trio.Event)
    failure: Exception | None = None


@attrs.define(eq=False)
class ReopenedConnections:
    """Connections to one of several servers, the next of which is opened when a call needs one.

    Attributes:
        nursery: for the tasks that have the connections.
        openers: open a connection to each of the servers.
        retry: how to try again when none could be reached; None: not at all.
        current: the one that calls use, if it is usable.
        closed: whether the client was closed. Then no connection is opened any more.
        held: those that are open.
    """

    nursery: trio.Nursery
    openers: Sequence[Callable[[], Awaitable[Connection]]]
    retry: Backoff | None
    current: ClientConnection | None = None
    closed: bool = False
    held: list[ClientConnection] = attrs.field(factory=list)
    _first: int = 0
    _opening: _Opening | None = None

    async def next(self) -> ClientConnection:
        """Returns a usable connection.

        Raises:
            CallLost: there is none.
            trio.ClosedResourceError: the client was closed.
        """
        while self.current is None or not self.current.usable:
            if self.closed:
                await trio.lowlevel.checkpoint()
                raise trio.ClosedResourceError("this client was closed")
            if self._opening is None:
                self._opening = _Opening()
                self.nursery.start_soon(self._keep_open, self._opening)
            opening = self._opening
            await opening.done.wait()
            if opening.failure is not None:
                raise CallLost(f"there is no connection: {opening.failure}", may_have_run=False) from opening.failure
        return self.current

    async def replace(self, used: ClientConnection, error: CallLost, tries: int) -> bool:
        """A call was lost, for the first time if ``tries`` is 1. Returns True if it can be made again."""
        if not error.may_have_run:
            used.retire()
        if self.retry is None and tries > len(self.openers):
            return False
        await trio.sleep(0 if tries == 1 else min(0.01 * 2 ** min(tries, 10), 1))
        return True

    @enable_ki_protection
    async def _keep_open(self, opening: _Opening) -> None:
        """Opens a connection, and closes it when it has ended and no call uses it."""
        try:
            connection = await (self._try_each() if self.retry is None else self.retry._run(self._try_each))
            self.current = used = ClientConnection(connection)
        except Exception as error:
            opening.failure = error
            return
        except trio.Cancelled:  # the nursery ends
            self.closed = True
            raise
        finally:
            self._opening = None
            opening.done.set()
        self.held.append(used)
        try:
            await used.wait_unused()
            await close(connection)
        finally:
            connection.abort()
            self.held.remove(used)

    async def _try_each(self) -> Connection:
        """Tries each server once, beginning with the one after the last.

        Raises:
            OSError: of one of those that may be reached later, if there is one.
        """
        errors = []
        for number in range(self._first, self._first + len(self.openers)):
            try:
                connection = await self.openers[number % len(self.openers)]()
            except OSError as error:
                errors.append(error)
            else:
                self._first = number + 1
                return connection
        raise next(filter(is_temporary, errors), errors[-1])


async def close(connection: Connection) -> None:
    try:
        await connection.aclose()
    except trio.BrokenResourceError:
        pass  # the calls know
