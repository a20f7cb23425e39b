"""Channels within one connection: conversations, each with a pair of tag queues of its own, and channels over tags.

Each side of a channel *leaves* it once (LEAVE). Then it reads and sends nothing there any more: what arrives is
dropped, and what the peer sends is refused there when LEAVE has arrived. When both sides have left, the numbers are
free again. All messages of a side come before its LEAVE, so nothing is late for the next conversation with the same
numbers.

The side that opens a conversation chooses its number *k*. It writes to the tag queue ``CONVERSATIONS + k``, and the
other side to ``ANSWERS + k``. A conversation begins for the other side when the first message arrives.
"""

from __future__ import annotations

from collections.abc import Callable

import attrs
import trio

from .._errors import PeerClosed, PeerLost
from .._rules import wire
from .._rules.credit import ReceiveCredit
from .._rules.tag_queue import TagQueue
from ..ucp._internal_api import Origin, about
from .sending import Sending
from .tag_queues import TagQueues


@attrs.define(eq=False)
class ChannelState:
    """What is known about one channel.

    Attributes:
        queue: its tag queue, which has it as its ``channel``.
        origin: marks the errors that say that the peer has left it.
        left, peer_left: whether this side, and the peer, have left it.
        by_force: whether the peer has left it because of an exception or a cancellation.
        accepted: whether a user has it.
        on_end: called, once each, when the peer has left it, or the connection has ended, unless this side has left it
            before. They run no code of the user's.
    """

    queue: TagQueue
    origin: Origin
    left: bool = False
    peer_left: bool = False
    by_force: bool = False
    accepted: bool = True
    on_end: tuple[Callable[[], None], ...] = ()

    def ended(self) -> None:
        """The peer has left it, or the connection has ended."""
        called, self.on_end = self.on_end, ()
        for function in called:
            function()

    @property
    def number(self) -> int:
        """Returns which tag queue this side reads."""
        return self.queue.number

    def problem(self) -> Exception | None:
        """Returns why nothing can be sent there, if so."""
        if self.left:
            return trio.ClosedResourceError("this channel was closed")
        if self.by_force:
            return self.broken_off()
        if self.peer_left:
            return about(self.origin, PeerClosed("the peer has left this channel: nobody would read the message"))
        return None

    def end(self) -> Exception:
        """Returns what a receive gets when the peer has left."""
        return (
            self.broken_off()
            if self.by_force
            else about(self.origin, trio.EndOfChannel("the peer has left this channel"))
        )

    def broken_off(self) -> PeerLost:
        error = about(self.origin, PeerLost("the peer has left this channel by an exception or a cancellation"))
        error.reason = "aborted"
        return error


class OpenChannels:
    """The channels of one connection.

    Args:
        end: ends the receives of a tag queue for which no message will arrive.
        announce: called with the number of a conversation that the peer has begun.
    """

    def __init__(
        self,
        queues: TagQueues,
        sending: Sending,
        receive_credit: ReceiveCredit,
        *,
        end: Callable[[TagQueue], None],
        announce: Callable[[int], None],
    ) -> None:
        self._queues = queues
        self._sending = sending
        self._receive_credit = receive_credit
        self._end = end
        self._announce = announce
        #: Those that were announced, and that nobody has taken or found gone.
        self._announced: set[int] = set()
        self._free: list[int] = []
        self._next = 0

    def _add(self, queue: TagQueue, *, accepted: bool = True) -> ChannelState:
        channel = queue.channel = ChannelState(queue, Origin(self._sending.ending.origin), accepted=accepted)
        return channel

    def all(self) -> list[ChannelState]:
        return [queue.channel for queue in list(self._queues.values()) if queue.channel is not None]

    def open(self) -> ChannelState:
        """Opens a conversation. The peer learns of it with the first message."""
        if self._free:
            number = self._free.pop()
        else:
            number = self._next
            if number == wire.MAX_CONVERSATIONS:
                raise RuntimeError(f"{number} conversations are open on this connection: leave those that have ended")
            self._next += 1
        return self._add(self._queues[wire.ANSWERS + number])

    def over_tag(self, tag: int) -> ChannelState:
        """The channel over a user's tag.

        Raises:
            RuntimeError: this side has left the last one, and the peer has not.
            trio.BrokenResourceError: the same, and the peer has gone.
        """
        queue = self._queues[tag]
        channel: ChannelState = queue.channel or self._add(queue)
        if channel.left:
            self._sending.check()
            raise RuntimeError(
                f"this side has closed its channel with tag {tag}, and the peer has not closed its end yet: use "
                "another tag, or open_conversation()"
            )
        return channel

    def arrived(self, number: int) -> None:
        """Called for each message of a conversation. If it is not open, the peer begins it with this message.

        Raises:
            wire.ProtocolError: the peer cannot begin it: its number is one of those that this side chooses.
        """
        queue = self._queues.get(number)
        if queue is not None and queue.channel is not None:
            return
        if number >= wire.ANSWERS:
            raise wire.ProtocolError(f"a message for the conversation {number - wire.ANSWERS}, which is not open")
        channel = self._add(self._queues[number], accepted=False)
        if self._sending.life.draining:  # nobody will accept it
            channel.accepted = True
            self.leave(channel)
        elif number not in self._announced:  # else an earlier one with this number was left before anybody took it
            if len(self._announced) > self._receive_credit.window // 256 + 1024:  # more than can be unread
                raise wire.ProtocolError("it withdraws conversations without end that nobody has accepted")
            self._announced.add(number)
            self._announce(number)

    def accept(self, number: int) -> ChannelState | None:
        """A user takes a conversation of the peer's; None if the peer has left it meanwhile."""
        self._announced.discard(number)
        queue = self._queues.get(number)
        channel: ChannelState | None = None if queue is None else queue.channel
        if channel is None or channel.accepted:
            return None
        channel.accepted = True
        return channel

    def leave(self, channel: ChannelState, *, by_force: bool = False) -> None:
        """This side leaves. Left already: no effect."""
        if channel.left:
            return
        channel.left = True
        channel.on_end = ()
        error = trio.ClosedResourceError("this channel was closed")
        self._end_sends(channel, error)
        self._sending.add_frame(wire.Leave(channel.queue.written, by_force))
        channel.queue.drop_all(error)  # after LEAVE: it gives credit back, which the peer must not spend here
        self._end(channel.queue)
        self._free_if_over(channel)

    def peer_left(self, number: int, *, by_force: bool) -> None:
        """LEAVE arrived.

        Raises:
            wire.ProtocolError: there is no such channel.
        """
        queue = self._queues.get(number)
        channel: ChannelState | None = None if queue is None else queue.channel
        if channel is None:
            if wire.CONVERSATIONS <= number < wire.ANSWERS:  # the peer has sent nothing there
                if queue is not None:
                    self._forget(queue)
                self._sending.send_frame(wire.Leave(wire.other_direction(number), False))
                return
            if number > wire.MAX_TAG:
                raise wire.ProtocolError(f"the peer left the tag queue {number}, which is no channel")
            channel = self._add(self._queues[number])
        channel.peer_left = True
        channel.by_force = by_force
        channel.ended()
        if not channel.left:  # else nothing waits here any more
            problem = channel.problem()
            assert problem is not None
            self._end_sends(channel, problem)
            self._end(channel.queue)
            if by_force and not channel.accepted:  # nobody waits for an answer
                self.leave(channel)
        self._free_if_over(channel)

    def connection_ended(self) -> None:
        """Nobody reads what this side sends, or this side has closed."""
        for channel in self.all():
            channel.ended()

    def _end_sends(self, channel: ChannelState, error: Exception) -> None:
        """Ends the sends that wait for credit."""
        self._sending.withdraw(channel.queue, error)

    def _free_if_over(self, channel: ChannelState) -> None:
        number = channel.number
        if channel.left and channel.peer_left and self._forget(channel.queue) and number >= wire.ANSWERS:
            self._free.append(number - wire.ANSWERS)

    def _forget(self, queue: TagQueue) -> bool:
        """Forgets the tag queue of a channel that is over. Returns True if that was not done before."""
        self._sending.credit.void_admission(queue)
        self._receive_credit.void_admission(queue)
        return self._queues.forget(queue)
