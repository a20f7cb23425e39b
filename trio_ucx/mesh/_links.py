"""The connections of a rank to the others: opened on demand, one for each pair.

Each rank listens. The rank that needs a connection first opens it. If both ranks of a pair open one at the same time,
the lower rank's is used: the lower rank refuses the other one.

Besides the program's messages, a connection carries a :class:`trio_ucx.Channel` for collectives.
"""

from __future__ import annotations

import os
from collections.abc import Awaitable, Callable, Iterable, Iterator
from contextlib import AsyncExitStack, contextmanager
from functools import partial
from typing import Any, TypeVar

import attrs
import trio
from trio.lowlevel import enable_ki_protection

from .. import Channel, Connection, Error, Listener, ServerFull, open_ucx_stream
from .._link import Owner
from .._util.contained import report
from .._util.limits import CAPACITY_ERRORS
from .._util.process import host_name
from ..ucp import Worker
from ..ucp._internal_api import Signal
from ._members import Members
from ._messages import LONGEST_WAIT, Leaving, Message, RankAnswer, RankHello, decode, encode
from ._variables import MAX_SIZE

_T = TypeVar("_T", bound=Message)

#: What an operation on a connection raises when the peer has gone, or the connection was closed.
GONE = (trio.BrokenResourceError, trio.ClosedResourceError, trio.EndOfChannel)
#: What receiving a message raises besides when it is none of ours, too long, or there is no memory for it.
UNREADABLE = (ValueError, Error, MemoryError)
#: A rank may connect before this one knows that it has joined: seconds for which it is kept waiting.
_LATE = 10
#: Descriptors or memory may be short for a moment, here or at the other rank: seconds for which this one tries to
#: connect all the same, and between two attempts.
_SHORTAGE, _AGAIN = 10, 0.1
#: Bytes.
_LONGEST_HELLO = 4096


def has_left() -> trio.ClosedResourceError:
    return trio.ClosedResourceError("this rank has left the group")


def owned(connection: Connection, what: str, **more: Any) -> None:
    """Says in reports what a connection is; ``more`` is for :class:`Owner`."""
    connection._link.owner = Owner(f"a group: {what}", **more)


@attrs.define(eq=False)
class RankConnection:
    """The connection to one rank.

    Attributes:
        ready: set when there is a connection, or there will be none.
        channel: for collectives; it belongs to the connection.
        outbox: messages of collectives that the peer's window has no room for.
        pending: messages of collectives that arrived too early.
        connecting: whether this rank is opening the connection.
        causes: returns why a collective operation with this rank may hang, in sentences.
    """

    rank: int
    causes: Callable[[RankConnection], Iterable[str]]
    ready: trio.Event = attrs.field(factory=trio.Event)
    channel: Channel | None = None
    outbox: list[bytes] = attrs.field(factory=list)
    pending: list[bytes] = attrs.field(factory=list)
    connecting: bool = False

    @property
    def connection(self) -> Connection | None:
        """The connection, when there is one."""
        return None if self.channel is None else self.channel.connection

    def establish(self, channel: Channel) -> None:
        name, causes = f"the connection with rank {self.rank}", partial(self.causes, self)
        owned(channel.connection, name, queue=channel._state.number, causes=causes)
        self.channel = channel
        self.ready.set()

    def has_message(self, tag: int) -> bool:
        """True if a message with this tag has arrived that no receive waits for."""
        return self.connection is not None and self.connection._link.receiving.has_spare(tag)

    def ended(self, tag: int) -> Exception | None:
        """Returns why no message with this tag will arrive; None if one may."""
        return None if self.connection is None else self.connection._link.receiving.any_end((tag,))

    @contextmanager
    def watching(self, tag: int, signal: Signal) -> Iterator[None]:
        """Sets the signal when :meth:`has_message` or :meth:`ended` may have changed."""
        assert self.connection is not None
        with self.connection._link.receiving.watching((tag,), signal):
            yield

    @property
    def first(self) -> bytes | None:
        """The next message of collectives, which is not taken; None if it is not there."""
        if self.pending or self.channel is None:
            return self.pending[0] if self.pending else None
        return self.channel._first()

    def take(self) -> bytes | None:
        """Takes the next message of collectives if it is there; see :meth:`Receiving.take_ready`."""
        assert self.channel is not None
        return self.channel._take_ready()

    async def schedule_point(self) -> None:
        """Lets other tasks run, if that is due."""
        assert self.connection is not None
        await self.connection._link.engine.waiting.schedule_point()

    def end(self) -> None:
        """The rank has gone: waiting tasks go on, and find out why."""
        if self.connection is not None:
            self.connection.abort()
        self.ready.set()


class Links:
    """The connections of this rank.

    Args:
        nursery: for tasks that open connections, and answer those who do.
        options: for each connection.

    Attributes:
        suspect: called when a rank cannot be reached, with the reason.
    """

    def __init__(self, members: Members, nursery: trio.Nursery, worker: Worker | None, options: dict[str, Any]) -> None:
        self.members = members
        self.nursery = nursery
        self.worker = worker
        self.options = options
        self.suspect: Callable[[int, str], None] = lambda rank, reason: None
        self.by_rank: dict[int, RankConnection] = {}
        #: Whether this rank leaves: it opens no connections, and refuses those that others open.
        self.leaving = False
        #: Whether all links have ended.
        self.ended: bool = False
        #: The host at which this rank has reached rank 0.
        self.meeting_host = "127.0.0.1"
        #: See :class:`RankConnection`.
        self.causes: Callable[[RankConnection], Iterable[str]] = lambda link: ()
        #: Called when a connection was made.
        self.on_established: Callable[[], None] = lambda: None
        members.on_change.append(self._member_changed)

    def _member_changed(self, rank: int) -> None:
        link = self.by_rank.get(rank)
        if link is not None and rank not in self.members.departed:  # what it has sent before it left can be received
            link.end()
            if rank not in self.members.lost:
                del self.by_rank[rank]  # a new process has its number

    def hello(self, to: int, port: int = 0, seconds: float = 0) -> RankHello:
        """The first message of a connection to a rank."""
        members, host, pid = self.members, host_name(), os.getpid()
        who = members.name, members.member(members.rank), host, pid
        return RankHello(members.rank, to, members.size, port, min(seconds, LONGEST_WAIT), members.on_loss, *who)

    def link(self, rank: int) -> RankConnection:
        link = self.by_rank.get(rank)
        if link is None:
            link = self.by_rank[rank] = RankConnection(rank, lambda link: self.causes(link))
        return link

    async def connected(self, rank: int) -> RankConnection:
        """Returns the link to a rank, with its connection. No checkpoint if that is there.

        Raises:
            RankLostError: the rank was lost.
            trio.ClosedResourceError: there is no connection, and this rank has left the group.
        """
        while True:
            link = self.link(rank)
            error = self.members.error(rank)
            if error is not None:
                raise error
            if link.connection is not None:
                return link
            if self.leaving or self.ended:
                raise has_left()
            if not link.connecting:
                link.connecting = True
                self.nursery.start_soon(self._connect, link)
            await link.ready.wait()

    @enable_ki_protection
    async def _connect(self, link: RankConnection) -> None:
        try:
            answer = await self._try_to_connect(link)
        except (OSError, *UNREADABLE, *GONE) as error:
            if self.by_rank.get(link.rank) is link and link.connection is None:
                self.suspect(link.rank, f"rank {self.members.rank} cannot connect to it: {error}")
        else:
            if answer.refused and not answer.crossed and link.connection is None:
                self.suspect(link.rank, f"it refused a connection of rank {self.members.rank}: {answer.refused}")
        finally:
            link.connecting = False

    async def _open(self, link: RankConnection) -> Connection:
        host, port = self.members.addresses[link.rank]
        deadline = trio.current_time() + _SHORTAGE
        while True:
            try:
                return await open_ucx_stream(host or self.meeting_host, port, worker=self.worker, **self.options)
            except OSError as error:
                is_short = isinstance(error, ServerFull) or error.errno in CAPACITY_ERRORS
                if not is_short or trio.current_time() > deadline:
                    raise
                await trio.sleep(_AGAIN)
                if self.by_rank.get(link.rank) is not link or self.members.error(link.rank) is not None:
                    raise

    async def _try_to_connect(self, link: RankConnection) -> RankAnswer:
        connection = await self._open(link)
        owned(connection, f"a new connection with rank {link.rank}")
        async with AsyncExitStack() as stack:
            stack.callback(connection.abort)
            channel = connection.open_conversation()
            await channel.send(encode(self.hello(link.rank)))
            answer = expect(await channel.receive(), RankAnswer, self.members.size)
            if not answer.refused and self.by_rank.get(link.rank) is link and link.connection is None:
                stack.pop_all()
                link.establish(channel)
                self.on_established()
        return answer

    def end(self) -> None:
        """Ends the links to all ranks. A connection that is still being opened is dropped when it is up."""
        self.ended = True
        for link in self.by_rank.values():
            link.end()
        self.by_rank.clear()

    @enable_ki_protection
    async def close(self) -> None:
        """Closes the connections gracefully."""
        async with trio.open_nursery() as nursery:
            for link in self.by_rank.values():
                if link.channel is not None:
                    nursery.start_soon(close, link.channel)

    # ---- connections that others open ----

    @enable_ki_protection
    async def serve(self, listener: Listener, greet: Callable[[Connection], Awaitable[object]]) -> None:
        """Accepts connections until the listener is closed."""
        try:
            while True:
                connection = await listener.accept()
                owned(connection, "a new connection")
                self.nursery.start_soon(greet, connection)
        except trio.ClosedResourceError:
            pass

    @enable_ki_protection
    async def greet(self, connection: Connection) -> None:
        """A rank has connected."""
        with self.unless_used(connection), trio.move_on_after(_LATE):
            await self.answer(*await first_message(connection))

    @contextmanager
    def unless_used(self, connection: Connection) -> Iterator[None]:
        """Ends a connection that another rank has opened, unless it is the one between the two ranks then."""
        try:
            yield
        except (*GONE, *UNREADABLE):
            pass  # it has gone, or is none of ours
        except Exception as error:  # whatever it is, the group goes on
            report("an internal error of trio_ucx.mesh, while a rank connected", error)
        finally:
            if not any(link.connection is connection for link in self.by_rank.values()):
                connection.abort()

    async def answer(self, channel: Channel, hello: RankHello) -> None:
        """Tells a rank that has connected whether its connection is wanted."""
        members = self.members
        while members.ended is None and (not members.name or hello.member > members.member(hello.rank)):
            await members.changed.park()  # rank 0 has told the other one sooner than us
        answer = self._judge(hello)
        if not answer.refused:  # from now on, this rank opens none
            self.link(hello.rank).establish(channel)
            self.on_established()
        await channel.send(encode(answer))
        if answer.refused:
            await channel.connection.aclose()

    def _judge(self, hello: RankHello) -> RankAnswer:
        members, link = self.members, self.by_rank.get(hello.rank)
        if self.leaving or self.ended:
            return RankAnswer("it has left the group")
        is_other = hello.rank < members.size and hello.rank != members.rank
        if hello.to != members.rank or hello.group != members.name or not is_other:
            return RankAnswer(f"this is rank {members.rank} of another group, of process {os.getpid()}")
        if hello.rank in members.lost or hello.member < members.member(hello.rank):
            return RankAnswer(f"rank {hello.rank} was lost")
        if link is not None and link.connection is not None:
            return RankAnswer("there is a connection already", crossed=True)
        if link is not None and link.connecting and members.rank < hello.rank:
            return RankAnswer("both have connected at once", crossed=True)
        return RankAnswer()


@enable_ki_protection
async def close(channel: Channel, *last: RankAnswer | Leaving) -> None:
    """Sends the messages ``last``, and closes the connection gracefully."""
    try:
        for message in last:
            await channel.send(encode(message))
        await channel.connection.aclose()
    except GONE:
        channel.connection.abort()


async def first_message(connection: Connection) -> tuple[Channel, RankHello]:
    """The channel that the other side has opened, and its :class:`RankHello`.

    Raises:
        ValueError: it says something else.
        trio.EndOfChannel, trio.BrokenResourceError: it has gone.
    """
    async for channel in connection.conversations():
        return channel, expect(await channel.receive(max_size=_LONGEST_HELLO), RankHello)
    raise trio.EndOfChannel


def expect(data: bytes, kind: type[_T], size: int = MAX_SIZE) -> _T:
    message = decode(data, size)
    if not isinstance(message, kind):
        raise ValueError(f"expected {kind.__name__} of trio_ucx.mesh, not {message!r}")
    return message
