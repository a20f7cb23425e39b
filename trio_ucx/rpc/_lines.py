"""The connections of a client: one that was given, or those that it opens one after the other."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from functools import partial

import attrs
import trio

from .. import Backoff, Channel, Connection, PeerState
from .._opening.backoff import is_temporary
from ._errors import CallLost
from ._messages import MOST_KEPT


@attrs.define(eq=False)
class Line:
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


class Lines:
    """Where a client finds a connection.

    Attributes:
        current: the one to use, if it is usable.
    """

    current: Line | None = None

    async def next(self) -> Line:
        """Returns a usable one.

        Raises:
            CallLost: there is none.
            trio.ClosedResourceError: the client was closed.
        """
        raise NotImplementedError

    async def replace(self, line: Line, error: CallLost, tries: int) -> bool:
        """A call was lost on a line, for the first time if ``tries`` is 1. Returns True if it can be made again."""
        raise NotImplementedError


class OneLine(Lines):
    """A connection that was given."""

    def __init__(self, connection: Connection) -> None:
        self.current = Line(connection)

    async def next(self) -> Line:
        assert self.current is not None
        return self.current  # its own error is the best one

    async def replace(self, line: Line, error: CallLost, tries: int) -> bool:
        return False


@attrs.define(eq=False)
class _Dial:
    """The opening of a connection, for which calls wait."""

    done: trio.Event = attrs.field(factory=trio.Event)
    failure: Exception | None = None


@attrs.define(eq=False)
class DialedLines(Lines):
    """Connections to one of several servers, the next of which is opened when a call needs one.

    Attributes:
        nursery: for the tasks that have the connections.
        openers: open a connection to each of the servers.
        retry: how to try again when none could be reached; None: not at all.
        closed: whether the client was closed: none is opened any more.
    """

    nursery: trio.Nursery
    openers: Sequence[Callable[[], Awaitable[Connection]]]
    retry: Backoff | None
    current: Line | None = None
    closed: bool = False
    held: list[Line] = attrs.field(factory=list)
    _first: int = 0
    _dial: _Dial | None = None

    async def next(self) -> Line:
        while self.current is None or not self.current.usable:
            if self.closed:
                await trio.lowlevel.checkpoint()
                raise trio.ClosedResourceError("this client was closed")
            if self._dial is None:
                self._dial = _Dial()
                self.nursery.start_soon(self._hold, self._dial)
            dial = self._dial
            await dial.done.wait()
            if dial.failure is not None:
                raise CallLost(f"there is no connection: {dial.failure}", may_have_run=False) from dial.failure
        return self.current

    async def replace(self, line: Line, error: CallLost, tries: int) -> bool:
        if not error.may_have_run:
            line.retire()
        if self.retry is None and tries > len(self.openers):
            return False
        await trio.sleep(0 if tries == 1 else min(0.01 * 2 ** min(tries, 10), 1))
        return True

    async def _hold(self, dial: _Dial) -> None:
        """Opens a connection, and closes it when it has ended and no call uses it."""
        try:
            connection = await (self._round() if self.retry is None else self.retry._run(self._round))
            self.current = line = Line(connection)
        except Exception as error:
            dial.failure = error
            return
        finally:
            self._dial = None
            dial.done.set()
        self.held.append(line)
        try:
            await line.wait_unused()
            await close(connection)
        finally:
            connection.abort()
            self.held.remove(line)

    async def _round(self) -> Connection:
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
