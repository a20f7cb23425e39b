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
from ..ucp._status import Origin, about
from .sending import Sending


@attrs.define(eq=False)
class ChannelState:
    """One channel.

    Attributes:
        into, out: the tag queues that this side reads, and writes to.
        origin: marks the errors that say that the peer has left it.
        left, peer_left: whether this side, and the peer, have left it.
        by_force: whether the peer's block was left by an exception.
        accepted: whether a user has it.
    """

    into: int
    out: int
    origin: Origin
    left: bool = False
    peer_left: bool = False
    by_force: bool = False
    accepted: bool = True

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
        drop: drops what is in a tag queue, and what will arrive there; its receives get the error.
        forget: forgets a tag queue, which can be used anew.
        announce: tells that the peer has begun a conversation.
    """

    def __init__(
        self,
        sending: Sending,
        *,
        end: Callable[[int], None],
        drop: Callable[[int, Exception], None],
        forget: Callable[[int], None],
        announce: Callable[[int], None],
    ) -> None:
        #: By the tag queue that is read.
        self.channels: dict[int, ChannelState] = {}
        self._sending = sending
        self._end = end
        self._drop = drop
        self._forget = forget
        self._announce = announce
        #: Those that were announced, and that nobody has taken or found gone.
        self._announced: set[int] = set()
        self._free: list[int] = []
        self._next = 0

    def _add(self, into: int, out: int, *, accepted: bool = True) -> ChannelState:
        talk = self.channels[into] = ChannelState(into, out, Origin(self._sending.ending.origin), accepted=accepted)
        return talk

    def open(self) -> ChannelState:
        """Opens a conversation. The peer learns of it with the first message."""
        if self._free:
            number = self._free.pop()
        else:
            number = self._next
            if number == wire.MAX_CONVERSATIONS:
                raise RuntimeError(f"{number} conversations are open on this connection: leave those that have ended")
            self._next += 1
        return self._add(wire.ANSWERS + number, wire.CONVERSATIONS + number)

    def over_tag(self, tag: int) -> ChannelState:
        """The channel over a user's tag.

        Raises:
            RuntimeError: this side has left the last one, and the peer has not.
            trio.BrokenResourceError: the same, and the peer has gone.
        """
        talk = self.channels.get(tag) or self._add(tag, tag)
        if talk.left:
            self._sending.check()
            raise RuntimeError(
                f"this side has closed its channel with tag {tag}, and the peer has not closed its end yet: use "
                "another tag, or open_conversation()"
            )
        return talk

    def begun(self, into: int) -> None:
        """A message arrived in a tag queue of conversations.

        Raises:
            wire.ProtocolError: it belongs to none.
        """
        if into in self.channels:
            return
        if into >= wire.ANSWERS:
            raise wire.ProtocolError(f"a message for the conversation {into - wire.ANSWERS}, which is not open")
        self._add(into, into - wire.CONVERSATIONS + wire.ANSWERS, accepted=False)
        if into not in self._announced:  # else an earlier one with this number was left before anybody took it
            self._announced.add(into)
            self._announce(into)

    def accept(self, into: int) -> ChannelState | None:
        """A user takes a conversation of the peer's; None if the peer has left it meanwhile."""
        self._announced.discard(into)
        talk = self.channels.get(into)
        if talk is None or talk.accepted:
            return None
        talk.accepted = True
        return talk

    def leave(self, talk: ChannelState, *, by_force: bool = False) -> None:
        """This side leaves. Left already: no effect."""
        if talk.left:
            return
        talk.left = True
        error = trio.ClosedResourceError("this channel was closed")
        self._end_sends(talk, error)
        self._sending.add_frame(wire.Leave(talk.out, by_force))
        self._drop(talk.into, error)  # after LEAVE: it gives credit back, which the peer must not spend here
        self._free_if_over(talk)

    def peer_left(self, into: int, *, by_force: bool) -> None:
        """LEAVE arrived.

        Raises:
            wire.ProtocolError: there is no such channel.
        """
        talk = self.channels.get(into)
        if talk is None:
            if wire.CONVERSATIONS <= into < wire.ANSWERS:  # it has sent nothing there
                self._sending.send_frame(wire.Leave(into - wire.CONVERSATIONS + wire.ANSWERS, False))
                return
            if into > wire.MAX_TAG:
                raise wire.ProtocolError(f"the peer left the tag queue {into}, which is no channel")
            talk = self._add(into, into)
        talk.peer_left = True
        talk.by_force = by_force
        if not talk.left:  # else nothing waits here any more
            problem = talk.problem()
            assert problem is not None
            self._end_sends(talk, problem)
            self._end(into)
            if by_force and not talk.accepted:  # nobody waits for an answer
                self.leave(talk)
        self._free_if_over(talk)

    def _end_sends(self, talk: ChannelState, error: Exception) -> None:
        """Ends the sends that wait for credit, or until the peer has fewer messages unread."""
        self._sending.unread.forget(talk.out)
        self._sending.withdraw(talk.out, error)

    def _free_if_over(self, talk: ChannelState) -> None:
        if talk.left and talk.peer_left and self.channels.pop(talk.into, None) is talk:
            self._forget(talk.into)
            self._sending.unread.forget(talk.out)
            if talk.into >= wire.ANSWERS:
                self._free.append(talk.into - wire.ANSWERS)
