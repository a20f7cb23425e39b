"""Backpressure: who may send how much. A pure state machine, one half for each direction.

Each side promises to hold at most ``window`` bytes of unread messages of the other. The sender counts what it has sent
and not been told to be read (:class:`Outbound`); the receiver counts the same, tells (GRANT), and notices a peer that
does not keep to it (:class:`Inbound`). Every message costs its payload plus an overhead; one that stays with its sender
until it is received (rendezvous) costs only what UCX keeps of its announcement.

*Lanes do not block each other.* All messages share the window, so a lane that nobody reads can use it up. A sender
without credit says so (STALLED, once for each grant); a receiver that waits at an empty lane then lets in that lane's
next message whatever the credit (ADMIT). The message is charged all the same: credit may go below zero. An ADMIT is
void when a message of that lane was on its way: so there is never more than one admitted message of a lane that nobody
has read.

Senders wait in one queue, first come first served, so that a large message is not starved by small ones. An admitted
lane may overtake.
"""

from __future__ import annotations

import collections
from typing import Protocol

from ._wire import ProtocolError

#: What an unread message of up to LONGEST_SMALL costs besides its payload: Python objects. Measured: 240 to 290 bytes
#: for the only message of a tag queue, 75 to 110 for one of many.
MESSAGE_OVERHEAD = 288
#: What a longer one costs besides its payload.
LARGE_OVERHEAD = 512
LONGEST_SMALL = 1024
#: What a message costs in all that stays with its sender: the objects, and UCX's buffer with its announcement, which is
#: one receive segment of shared memory (8,256 bytes), less over TCP.
ANNOUNCEMENT = 8960

#: Lanes whose last message is remembered before those are forgotten that the peer has.
_REMEMBERED = 1024
#: Admissions that a peer may have given us and we have not used. An honest one gives one for each lane it waits at.
MAX_ADMISSIONS = 1 << 16


def cost(length: int, threshold: int) -> int:
    """What a message of ``length`` bytes costs, sent with the rendezvous threshold ``threshold`` (0: none)."""
    if threshold and length >= threshold:
        return ANNOUNCEMENT
    return length + (MESSAGE_OVERHEAD if length <= LONGEST_SMALL else LARGE_OVERHEAD)


class Ticket(Protocol):
    """A message that waits for its turn."""

    lane: int
    size: int


class Outbound:
    """What we may send."""

    def __init__(self, window: int, threshold: int) -> None:
        self.window = window
        self.threshold = threshold
        self.credit = window
        self.sent = 0
        self.queue: collections.deque[Ticket] = collections.deque()
        self._queued: collections.Counter[int] = collections.Counter()
        #: How many messages the peer is known to have, and the number of the last one of each lane that it may not.
        self._arrived_there = 0
        self._last: dict[int, int] = {}
        self._remembered = _REMEMBERED
        self._admitted: set[int] = set()
        self._told = False

    def stays(self, size: int) -> bool:
        """Whether a message stays with us until the peer receives it."""
        return 0 < self.threshold <= size

    def take(self, lane: int, size: int) -> bool:
        """Whether a message may go now; if so, it is charged."""
        if self._queued and lane in self._queued:
            return False  # behind those of its lane
        if lane not in self._admitted and (self.queue or cost(size, self.threshold) > self.credit):
            return False
        self._charge(lane, size)
        return True

    def _charge(self, lane: int, size: int) -> None:
        self._admitted.discard(lane)
        self._count(lane, cost(size, self.threshold))

    def _count(self, lane: int, amount: int) -> None:
        self.credit -= amount
        self.sent += 1
        self._last[lane] = self.sent
        if len(self._last) > self._remembered:
            self._forget()

    def take_small(self, lane: int, size: int) -> bool:
        """The short way of :meth:`take`, for when nothing is special; if it says False, ask that one."""
        amount = cost(size, self.threshold)
        if self.queue or self._admitted or amount > self.credit or 0 < self.threshold <= size:
            return False
        self._count(lane, amount)
        return True

    def _forget(self) -> None:
        self._last = {lane: last for lane, last in self._last.items() if last > self._arrived_there}
        self._remembered = max(_REMEMBERED, 2 * len(self._last))

    def enqueue(self, ticket: Ticket) -> None:
        self.queue.append(ticket)
        self._queued[ticket.lane] += 1

    def withdraw(self, ticket: Ticket) -> None:
        self.queue.remove(ticket)
        self._queued[ticket.lane] -= 1
        if not self._queued[ticket.lane]:
            del self._queued[ticket.lane]

    def grant(self, amount: int, received: int) -> None:
        """GRANT came.

        Raises:
            ProtocolError: it grants more than was sent.
        """
        self._arrived(received)
        if self.credit + amount > self.window:
            raise ProtocolError("the peer granted more than it had been sent")
        self.credit += amount
        self._told = False

    def admit(self, lane: int, received: int) -> None:
        """ADMIT came.

        Raises:
            ProtocolError: the peer waits at an unlikely number of lanes.
        """
        self._arrived(received)
        if self._last.get(lane, 0) <= received:
            self._admitted.add(lane)
            if len(self._admitted) > MAX_ADMISSIONS:
                raise ProtocolError("the peer waits at too many lanes")

    def _arrived(self, received: int) -> None:
        if not self._arrived_there <= received <= self.sent:
            raise ProtocolError("the peer counts messages that were not sent")
        self._arrived_there = received

    def next_ready(self) -> Ticket | None:
        """Takes the message that must go next off the queue, if one may go now; it is charged."""
        ticket: Ticket | None = None
        if self.queue and self._admitted:
            ticket = next((waiting for waiting in self.queue if waiting.lane in self._admitted), None)
        if ticket is None and self.queue and cost(self.queue[0].size, self.threshold) <= self.credit:
            ticket = self.queue[0]
        if ticket is not None:
            self.withdraw(ticket)
            self._charge(ticket.lane, ticket.size)
        return ticket

    def has_room(self, lane: int) -> bool:
        """Whether a small message of this lane could go now."""
        if lane in self._queued:
            return False
        return lane in self._admitted or (not self.queue and self.credit > MESSAGE_OVERHEAD)

    def must_tell(self) -> bool:
        """Whether STALLED is due, for those who wait in the queue or outside; it counts as told then."""
        told, self._told = self._told, True
        return not told


class Inbound:
    """What the peer may send."""

    def __init__(self, window: int, threshold: int) -> None:
        self.window = window
        self.threshold = threshold
        #: What the messages cost that arrived and were not granted back.
        self.outstanding = 0
        self.unread = 0
        self.received = 0
        self.stalled = False
        #: From how much on it is granted without being asked for.
        self._worthwhile = max(window // 4, 1)
        #: Lanes whose next message was let in, until one arrives.
        self._admitted: set[int] = set()

    def arrived(self, lane: int, size: int) -> None:
        """A message arrived.

        Raises:
            ProtocolError: the peer had no credit for it.
        """
        amount = cost(size, self.threshold)
        self.received += 1
        self.outstanding += amount
        self.unread += amount
        if self.outstanding > self.window and lane not in self._admitted:
            raise ProtocolError(f"the peer ignores its credit: {self.outstanding} bytes sent, {self.window} allowed")
        self._admitted.discard(lane)

    def run_arrived(self, count: int, size: int) -> bool:
        """So many messages arrived, all of this size. If it says False, something is special: take them one by one."""
        amount = count * cost(size, self.threshold)
        if self._admitted or self.outstanding + amount > self.window or 0 < self.threshold <= size:
            return False
        self.received += count
        self.outstanding += amount
        self.unread += amount
        return True

    def consumed(self, size: int, count: int = 1) -> int:
        """So many messages of this size were read: how much to grant (0: not yet)."""
        self.unread -= count * cost(size, self.threshold)
        if self.outstanding - self.unread < self._worthwhile:
            return 0
        return self._due(self._worthwhile)

    def _due(self, least: int) -> int:
        amount = self.outstanding - self.unread
        if amount < max(least, 1):
            return 0
        self.outstanding -= amount
        self.stalled = False  # a peer that still is will say so
        return amount

    def peer_stalled(self) -> int:
        """STALLED came: how much to grant."""
        amount = self._due(1)
        self.stalled = amount == 0
        return amount

    def looked(self, lane: int) -> tuple[int, bool]:
        """Somebody found the lane empty: how much to grant, and whether to admit its next message."""
        if not self.stalled:
            return 0, False
        amount = self._due(1)
        if lane in self._admitted:
            return amount, False
        self._admitted.add(lane)
        return amount, True
