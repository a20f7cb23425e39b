"""Channels within one connection: conversations, each with a pair of tag queues of its own, and channels over tags.

Each side of a channel *leaves* it once (LEAVE). Then it reads and sends nothing there any more: what arrives is
dropped, and what the peer sends is refused there when LEAVE has arrived. When both sides have left, the numbers are
free again. All messages of a side come before its LEAVE, so nothing is late for the next conversation with the same
numbers.

The side that opens a conversation chooses its number *k*. It writes to the tag queue ``CONVERSATIONS + k``, and the
other side to ``ANSWERS + k``. A conversation begins for the other side when the first message arrives.
"""

from __future__ import annotations

import collections
from collections.abc import Callable
from typing import Protocol

import attrs
import trio

from .._errors import PeerClosed, PeerLost
from .._native import lib
from .._rules import wire
from ..ucp._internal_api import Origin, Waiters, about
from .native import NativeLink
from .sending import Sending


class EndedWait(Protocol):
    """A task that waits for a message, and may have to end."""

    def give_up(self, error: Exception) -> None:
        """Ends it with an error."""


@attrs.define(eq=False)
class ChannelState:
    """What is known about one channel.

    Attributes:
        number: which tag queue this side reads.
        origin: marks the errors that say that the peer has left it.
        left, peer_left: whether this side, and the peer, have left it.
        by_force: whether the peer has left it because of an exception or a cancellation.
        accepted: whether a user has it.
        on_end: called, once each, when the peer has left it, or the connection has ended, unless this side has left it
            before. They run no code of the user's.
    """

    number: int
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
        end_error: returns what a receive on an empty tag queue gets; None while a message may still come.
        changed: called when a side has left one.

    Attributes:
        channels: by the tag queue that this side reads.
        begun: the conversations that the peer has begun and that nobody has taken, by the same number.
        waiters: the tasks that wait for one.
        waits: the tasks that wait for the next message of a channel, by its number, if there are some.
    """

    def __init__(
        self,
        native: NativeLink,
        sending: Sending,
        *,
        end_error: Callable[[int], Exception | None],
        changed: Callable[[], None],
    ) -> None:
        self.channels: dict[int, ChannelState] = {}
        self.begun: collections.deque[int] = collections.deque()
        self.waiters = Waiters()
        self.waits: dict[int, list[EndedWait]] = {}
        self._native = native
        self._sending = sending
        self._end_error = end_error
        self._changed = changed
        self._most_begun = native.window // 256 + 1024  # more than can be unread
        #: Those that were announced, and that nobody has taken or found gone.
        self._announced: set[int] = set()
        #: The tags whose channel the peer has left, and which this side has never opened.
        self._unopened: set[int] = set()
        #: How many channels over tags this side has left, and the peer has not.
        self._left_alone = 0
        self._free: list[int] = []
        self._next = 0

    def _add(self, number: int, *, accepted: bool = True) -> ChannelState:
        if lib.tu_link_open_queue(self._native.handle, number):
            raise MemoryError("no memory for a channel")
        channel = ChannelState(number, Origin(self._sending.ending.origin), accepted=accepted)
        self.channels[number] = channel
        self._sending.channel_problem[number] = channel.problem
        return channel

    def all(self) -> list[ChannelState]:
        return list(self.channels.values())

    def open(self) -> ChannelState:
        """Opens a conversation. The peer learns of it with the first message."""
        if self._free:
            number = self._free.pop()
        else:
            number = self._next
            if number == wire.MAX_CONVERSATIONS:
                raise RuntimeError(f"{number} conversations are open on this connection: leave those that have ended")
            self._next += 1
        return self._add(wire.ANSWERS + number)

    def over_tag(self, tag: int) -> ChannelState:
        """The channel over a user's tag.

        Raises:
            RuntimeError: this side has left the last one, or very many, and the peer has not.
            trio.BrokenResourceError: the same, and the peer has gone.
        """
        if self._left_alone >= wire.MAX_LEFT_ALONE:
            self._sending.check()
            raise RuntimeError(
                f"this side has closed {self._left_alone} channels over tags, and the peer has not closed its ends: "
                "both sides must call channel(), or use open_conversation()"
            )
        self._unopened.discard(tag)
        channel = self.channels.get(tag) or self._add(tag)
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
        if number in self.channels:
            return
        if number >= wire.ANSWERS:
            raise wire.ProtocolError(f"a message for the conversation {number - wire.ANSWERS}, which is not open")
        channel = self._add(number, accepted=False)
        if self._sending.life.draining:  # nobody will accept it
            channel.accepted = True
            self.leave(channel)
        elif number not in self._announced:  # else an earlier one with this number was left before anybody took it
            if len(self._announced) > self._most_begun:
                raise wire.ProtocolError("it withdraws conversations without end that nobody has accepted")
            self._announced.add(number)
            if not self.waiters.give(number):
                self.begun.append(number)

    def waits_no_more(self, number: int, wait: EndedWait) -> None:
        waits = self.waits[number]
        waits.remove(wait)
        if not waits:
            del self.waits[number]

    def take_begun(self) -> int | None:
        """Takes the number of a conversation that the peer has begun, if there is one."""
        return self.begun.popleft() if self.begun else None

    def begun_end(self) -> Exception | None:
        """Returns what a wait for a conversation gets if none will begin; None while one may."""
        return self._end_error(wire.UNACCEPTED)

    def end_waits(self) -> None:
        """Ends the waits for a conversation, if none will begin any more."""
        if self.waiters:
            while self.waiters and (error := self.begun_end()) is not None:
                self.waiters.fail(error)

    def accept(self, number: int) -> ChannelState | None:
        """A user takes a conversation of the peer's; None if the peer has left it meanwhile."""
        self._announced.discard(number)
        channel = self.channels.get(number)
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
        number = channel.number
        self._left_alone += number <= wire.MAX_TAG and not channel.peer_left
        self._sending.withdraw(number, trio.ClosedResourceError("this channel was closed"))
        self._sending.send_frame(wire.Leave(wire.other_direction(number), by_force), later=True)
        if self._native.handle is not None:
            lib.tu_link_leave_queue(self._native.handle, number)  # after LEAVE: the peer must not spend its credit here
        self._settle()
        self._free_if_over(channel)

    def peer_left(self, number: int, *, by_force: bool) -> None:
        """LEAVE arrived.

        Raises:
            wire.ProtocolError: there is no such channel; or too many that only the peer has left.
        """
        channel = self.channels.get(number)
        if channel is None:
            if wire.CONVERSATIONS <= number < wire.ANSWERS:  # the peer has sent nothing there
                lib.tu_link_forget_queue(self._native.handle, number)
                self._sending.send_frame(wire.Leave(wire.other_direction(number), False))
                return
            if number > wire.MAX_TAG:
                raise wire.ProtocolError(f"the peer left the tag queue {number}, which is no channel")
            if len(self._unopened) >= wire.MAX_LEFT_ALONE:
                raise wire.ProtocolError(
                    f"it has left {len(self._unopened)} channels over tags that this side has not opened"
                )
            channel = self._add(number)
            self._unopened.add(number)
        self._left_alone -= number <= wire.MAX_TAG and channel.left and not channel.peer_left
        channel.peer_left = True
        channel.by_force = by_force
        channel.ended()
        if not channel.left:  # else nothing waits here any more
            if lib.tu_link_end_queue(self._native.handle, number, True, True):
                raise MemoryError("no memory for the end of a channel")
            self._settle()
            if by_force and not channel.accepted:  # nobody waits for an answer
                self.leave(channel)
        self._free_if_over(channel)

    def _settle(self) -> None:
        self._native.links.settle()
        self._changed()

    def connection_ended(self) -> None:
        """Nobody reads what this side sends, or this side has closed."""
        for channel in self.all():
            channel.ended()

    def _free_if_over(self, channel: ChannelState) -> None:
        number = channel.number
        if channel.left and channel.peer_left and self.channels.get(number) is channel:
            for wait in self.waits.get(number, [])[:]:  # the number may be another's before their tasks run
                wait.give_up(trio.ClosedResourceError("this channel was closed"))
            del self.channels[number], self._sending.channel_problem[number]
            if self._native.handle is not None:
                lib.tu_link_forget_queue(self._native.handle, number)
                self._native.links.settle()
            if number >= wire.ANSWERS:
                self._free.append(number - wire.ANSWERS)
