"""What is behind a Connection: joins sending, receiving and closing, and the engine with them.

It outlives the Connection object. Everything in this folder runs in plain functions, which the engine calls while it
delivers, or the user's task; only the graceful close waits.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from threading import get_ident
from time import perf_counter
from typing import Any, cast

import attrs
import trio

from .._native import lib
from .._peer_info import PeerInfo
from .._rules import wire
from .._rules.life import Answer, Life
from .._statistics import Totals
from .._util.contained import contained
from .._util.live_handles import live_handles
from ..ucp import Worker
from ..ucp._internal_api import Buffer, CloseState, WritableBuffer, completed, is_short
from .closing import Closing
from .immutable import immutable
from .message_port import MessagePort
from .native import NativeLink
from .receiving import BUFFER, ExactTarget, ReceiveTarget, Receiving, Want
from .sending import Sending


@attrs.frozen
class Owner:
    """What uses a Connection instead of the program, for reports.

    Attributes:
        name: what to call it. It closes the Connection.
        queue: the tag queue in which its own messages arrive.
        causes: returns what it knows of likely causes of a hang, in sentences.
    """

    name: str
    queue: int = -1
    causes: Callable[[], Iterable[str]] = tuple


@attrs.frozen
class Options:
    """What a user can choose about a Connection."""

    close_timeout: float = 10
    window: int = 2**20
    max_message_size: int = 2**30


class Link:
    """One connection, over an endpoint that it may share.

    Attributes:
        my_id, peer_id: the ids under which this side and the peer are written to.
        local_address, remote_address: of the control socket.
        peer_info: who the peer is.
        why_not_shared_memory: in words; None if it is used.
        pings, pongs: the number of the last PING that was sent, and of the last PONG that has arrived.
        on_unclosed: called when the worker closes before the link; the Connection sets it, and warns.
        on_hello: called when HELLO arrives, until the connection is open.
        totals: where it counts, once it is open.
    """

    def __init__(
        self,
        worker: Worker,
        port: MessagePort,
        my_id: int,
        peer_id: int,
        peer_window: int,
        peer_threshold: int,
        options: Options,
    ) -> None:
        self.worker = worker
        self.engine = port.engine
        self.share = share = port.share
        self.ending = share.ending
        self.opened_at = perf_counter()
        self.my_id = my_id
        self.peer_id = peer_id
        self.local_address: tuple[str, int] | None = None
        self.remote_address: tuple[str, int] | None = None
        self.peer_info: PeerInfo | None = None
        self.why_not_shared_memory: str | None = None
        self.pings = 0
        self.pongs = 0
        self.owner: Owner | None = None
        self.on_unclosed: Callable[[], None] | None = None
        self.on_hello: Callable[[], None] | None = None
        self.totals: tuple[Totals, ...] = ()
        self.life = life = Life(share.ending)
        threshold = worker.context.rendezvous_threshold or 0
        self.native = NativeLink(share, my_id, peer_id, options.window, peer_window, threshold, peer_threshold)
        self.sending = Sending(port, life, self.native, peer_window, threshold)
        self.receiving = Receiving(
            port,
            life,
            self.native,
            self.sending,
            peer_threshold,
            options.max_message_size,
            on_frame=self._frame_arrived,
            acknowledge=lambda: self.closing.acknowledge(),
        )
        self.window = options.window
        self.closing = Closing(
            port, life, self.native, self.sending, self.receiving, options.close_timeout, self._unregister
        )
        self.engine.tag_dispatch.sinks[my_id] = self.receiving
        self.engine.teardown.children[my_id] = self.unclosed
        share.on_internal_error = self.closing.internal_error
        share.on_end = self.closing.ended
        live_handles.opened("connection")

    def check(self) -> None:
        """Refuses use after the close.

        Raises:
            trio.ClosedResourceError: the connection was closed.
            Others: see ``Engine.check``.
        """
        engine = self.engine
        if engine.handle is None or engine.run.thread != get_ident() or engine.broken is not None:
            engine.check()  # raises
        if self.ending.state is not CloseState.OPEN:  # every message passes here
            raise trio.ClosedResourceError("this connection was closed")

    def is_over(self) -> bool:
        """True if :meth:`Connection.wait_closed` need not wait any more."""
        return self.life.over or self.engine.broken is not None

    async def ping(self) -> float:
        """Returns the seconds until the peer's library has answered, which it does as long as it may send messages.

        Raises:
            trio.BrokenResourceError: it cannot answer any more.
            trio.ClosedResourceError: the connection was closed meanwhile.
        """
        self.pings += 1
        number, begun = self.pings, perf_counter()
        if self._answers_pings():
            self.sending.send_frame(wire.Ping(number))
            self.engine.watch_events()
            await self.share.operations.wait_until(lambda: self.pongs >= number or not self._answers_pings())
        seconds = perf_counter() - begun
        if self.pongs < number:
            self.check()
            self.sending.check()
        return seconds

    def _answers_pings(self) -> bool:
        alive = self.share.problem() is None and self.engine.broken is None
        return alive and self.life.receives is Answer.GOES_ON

    # ---- messages of any tag queue, by the number that this side reads ----

    async def send(self, number: int, data: Buffer) -> None:
        """Sends a message; a schedule point."""
        sent = self.sending.send_short(number, data)
        if sent is True:
            await self.engine.waiting.schedule_point()
        else:
            await completed(sent or self.sending.send(number, data), self.engine)

    def send_nowait(self, number: int, data: Buffer) -> None:
        """Sends a message without waiting.

        Raises:
            trio.WouldBlock: there is no credit for it.
        """
        sending = self.sending
        if not sending.send_short(number, data):
            sending.send_nowait(number, immutable(data))

    async def receive(self, number: int, limit: int) -> bytes:
        """Receives a message of at most ``limit`` bytes; a schedule point."""
        data = self.receiving.take_ready(number, limit)
        if data is not None:
            await self.engine.waiting.schedule_point()
            return data
        return await self.receiving.next(number, limit)

    async def receive_newest(self, number: int, limit: int) -> bytes:
        """Receives the newest message, of at most ``limit`` bytes; a schedule point."""
        self.engine.reap()
        if lib.tu_link_newest(self.native.handle, number):
            raise MemoryError("no memory for a tag queue")
        self.engine.links.settle()
        return await self.receive(number, limit)

    async def receive_into(self, number: int, buffer: WritableBuffer, *, exact: bool = False) -> int:
        """Receives a message into a buffer, and returns its length; a schedule point.

        Args:
            exact: leave a message of another length.
        """
        if exact:
            return cast(int, await self.receive_suitable(number, ExactTarget(self.engine, buffer)))
        if is_short(buffer, writable=True):
            return await self._receive_copied(number, buffer)
        receiving = self.receiving
        receive = receiving.prepare(buffer)
        try:
            data = receiving.take_ready(number, receive.limit, receive.bound)
            got = await receiving.next(number, receive.limit, receive, bound=receive.bound) if data is None else data
        except BaseException:
            if not receive.begun:
                receive.release()
            raise
        if isinstance(got, int):
            return got
        receive.accept(got)
        if data is not None:
            await self.engine.waiting.schedule_point()
        return len(got)

    async def wait_message(self, number: int) -> int:
        """Waits for a message, which stays, and returns its length; a schedule point."""
        return cast(int, await completed(self.receiving.receive(number, Want.LENGTH), self.engine))

    async def receive_suitable(self, number: int, target: ReceiveTarget) -> Any:
        """Receives a message that the target wants, and returns the target's value; a schedule point."""
        return await completed(self.receiving.receive_suitable(number, target), self.engine)

    async def _receive_copied(self, number: int, buffer: bytearray | memoryview) -> int:
        """Receives into a short buffer."""
        with memoryview(buffer) as view:  # so that it keeps its size
            small = self.receiving.take_ready(number, len(buffer), BUFFER)
            data = await self.receiving.next(number, len(buffer), bound=BUFFER) if small is None else small
            view[: len(data)] = data
        if small is not None:
            await self.engine.waiting.schedule_point()
        return len(data)

    def abort(self) -> None:
        """See :meth:`Closing.abort`."""
        self.closing.abort()

    def _frame_arrived(self, frame: wire.Frame) -> None:
        """A control frame arrived that is not about credit.

        Raises:
            wire.ProtocolError: the peer must not send it.
        """
        match frame:
            case wire.Leave(queue=queue, by_force=by_force):
                self.receiving.conversations.peer_left(queue, by_force=bool(by_force))
            case wire.Stop():
                self.closing.stop_arrived()
            case wire.Goodbye():
                self.closing.goodbye_arrived()
            case wire.GoodbyeAck():
                self.closing.ack_arrived()
            case wire.Done():
                self.closing.done_arrived()
            case wire.Hello():
                if self.on_hello is not None:
                    self.on_hello()
            case wire.Dropped(queue=queue, length=length):
                self.sending.dropped_there(queue, length)
            case wire.Ping(number=number):
                self.sending.send_frame(wire.Pong(number))
            case wire.Pong(number=number):
                self.pongs = max(self.pongs, number)
                self.share.operations.changed()
            case _:
                raise wire.ProtocolError(f"a {type(frame).__name__} that is malformed")

    def buffers_released(self) -> bool:
        """True if no buffer of a cancelled send or receive belongs to the library."""
        return not self.receiving.detached_receives and self.share.operations.buffers_released()

    def traffic(self) -> tuple[int, int, int, int]:
        """Returns the messages and bytes that it has sent, and those that it has received."""
        counts = self.native.counts
        return counts.sent, counts.bytes_sent, counts.received, counts.bytes_received

    def end_reason(self) -> str | None:
        """Returns how it has ended, in the words of ``ConnectionTotals.ended``; None: it is open."""
        if not self.life.closed:
            return None
        if self.life.graceful:
            return "closed"
        failed = self.ending.error is not None or self.engine.broken is not None
        return self.life.reason or ("broken" if failed else "aborted_here")

    def unclosed(self) -> None:
        """The worker closes."""
        if self.on_unclosed is not None:
            self.on_unclosed()
        self.abort()

    def _unregister(self) -> None:
        """The endpoint has been closed: the engine forgets the connection."""
        engine = self.engine
        engine.teardown.children.pop(self.my_id, None)
        engine.tag_dispatch.remove(self.my_id)
        for totals in self.totals:
            contained(totals.end, self)
