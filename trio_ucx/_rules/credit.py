"""Credit: how much each side may send to the other. Pure; one class for each direction.

Each side promises to hold ``window`` bytes of unread messages of the other. The sender (:class:`SendCredit`)
counts what it has sent and what the peer has granted back. The receiver (:class:`ReceiveCredit`) counts the same, and
grants what was read (GRANT). Every message costs its payload plus an overhead; one that stays with its sender until it
is received (rendezvous) costs only what UCX keeps of its announcement.

*Tag queues do not block each other.* All messages share the window, so a tag queue that nobody reads can use it up. A
sender without credit says so (STALLED, once for each grant). A receiver that waits at an empty tag queue then admits
the next message of that queue whatever the credit (ADMIT). The message is charged all the same, so credit may go below
zero. An ADMIT is void when a message of that queue was already on its way. When a message has arrived and further
receives wait at its queue, the receiver admits the next one. So the admitted messages of a queue that nobody has read
are never more than the receives that have waited there at the same time.

*No message is too large for the window.* When the peer has read everything, a message that costs more than the window
may go by itself (:data:`LONE`); a larger one waits for its ADMIT.

Sends wait for credit in one list, first come first served, so that small messages do not starve a large one. An
admitted queue may overtake.
"""

from __future__ import annotations

import collections
from typing import Generic, Protocol, TypeVar, cast

from .tag_queue import NOTHING, TagQueue
from .wire import SMALL_MESSAGE, ProtocolError

#: What an unread small message costs besides its payload: Python objects. Measured: 300 to 350 bytes for the
#: only message of a tag queue, 75 to 110 for one of many.
MESSAGE_OVERHEAD = 352
#: What a longer one costs besides its payload.
LARGE_OVERHEAD = 512
#: What a message costs in all that stays with its sender: the objects, and UCX's buffer with its announcement, which is
#: one receive segment of shared memory (8,256 bytes), less over TCP.
ANNOUNCEMENT = 8960

#: What a message may cost that goes by itself: any that costs its payload with the usual rendezvous threshold.
LONE = 68 << 10

#: Greatest number of unused admissions. An admission stays unused when its receive was cancelled, and the peer sends
#: nothing on that tag. Receives beyond this number wait for credit.
MAX_ADMISSIONS = 1 << 16


def cost(length: int, threshold: int) -> int:
    """Returns what a message of ``length`` bytes costs, sent with the rendezvous threshold ``threshold`` (0: none)."""
    if threshold and length >= threshold:
        return ANNOUNCEMENT
    return length + (MESSAGE_OVERHEAD if length <= SMALL_MESSAGE else LARGE_OVERHEAD)


class WaitingSend(Protocol):
    """A send that waits for credit. Compared by identity."""

    queue: TagQueue
    size: int

    def __hash__(self) -> int: ...


_Send = TypeVar("_Send", bound=WaitingSend)


class SendCredit(Generic[_Send]):
    """What we may send, and the sends that wait for it."""

    def __init__(self, window: int, threshold: int) -> None:
        self.window = window
        self.threshold = threshold
        self.credit = window
        #: The number of messages that were charged.
        self.sent = 0
        self.waiting: collections.OrderedDict[_Send, None] = collections.OrderedDict()
        #: How many messages the peer is known to have received.
        self.arrived_there = 0
        #: How many tag queues have an admission of the peer; and those of them in which sends wait.
        self._admissions = 0
        self._overtaking: set[TagQueue] = set()
        #: For :meth:`take_back`: what ``last`` of the queue was before the latest charge, and the number of the latest
        #: message that used an admission.
        self._previous = 0
        self._last_admitted = 0
        #: How many grants have arrived, and how many had when STALLED was sent last.
        self.grants = 0
        self._reported = -1

    def stays(self, size: int) -> bool:
        """True if a message of this size stays with us until the peer receives it."""
        return 0 < self.threshold <= size

    def take(self, queue: TagQueue, size: int) -> bool:
        """Charges a message if it may be sent now, and returns whether it may."""
        if queue.waiting_sends:
            return False  # earlier sends of this queue wait
        if not queue.admitted_by_peer and (self.waiting or not self._suffices(size)):
            return False
        self._charge(queue, size)
        return True

    def _suffices(self, size: int) -> bool:
        amount = cost(size, self.threshold)
        return amount <= self.credit or (self.credit == self.window and amount <= LONE)

    def take_short(self, queue: TagQueue, size: int) -> bool:
        """Charges an eager message while nobody waits for credit: the usual case. False: ask :meth:`take`."""
        # cost(), written out: this runs for every small message.
        amount = size + (MESSAGE_OVERHEAD if size <= SMALL_MESSAGE else LARGE_OVERHEAD)
        if self.waiting or queue.admitted_by_peer or amount > self.credit or 0 < self.threshold <= size:
            return False
        self.credit -= amount
        self._previous = queue.last_sent
        queue.last_sent = self.sent = self.sent + 1
        return True

    def _charge(self, queue: TagQueue, size: int) -> None:
        self.credit -= cost(size, self.threshold)
        self._previous = queue.last_sent
        queue.last_sent = self.sent = self.sent + 1
        if queue.admitted_by_peer:
            self.void_admission(queue)
            self._last_admitted = self.sent

    def take_back(self, queue: TagQueue, size: int) -> None:
        """Undoes the charge of the message that was charged last: it was not sent.

        Nothing may have arrived from the peer in between: an ADMIT would have been taken for void.
        """
        self.credit += cost(size, self.threshold)
        if self._last_admitted == self.sent:
            self._last_admitted = 0
            self._set_admitted(queue)
        self.sent -= 1
        queue.last_sent = self._previous

    def wait(self, send: _Send) -> None:
        """Adds a send that :meth:`take` has refused; :meth:`next_ready` returns it in its turn."""
        self.waiting[send] = None
        if not send.queue.waiting_sends:
            send.queue.waiting_sends = collections.OrderedDict()
        send.queue.waiting_sends[send] = None

    def withdraw(self, send: _Send) -> None:
        queue = send.queue
        del self.waiting[send], queue.waiting_sends[send]
        if not queue.waiting_sends:
            queue.waiting_sends = NOTHING
            self._overtaking.discard(queue)

    def grant(self, amount: int, received: int) -> None:
        """GRANT arrived."""
        self.arrived_there = received
        self.credit += amount
        self.grants += 1

    def admit(self, queue: TagQueue, received: int) -> None:
        """ADMIT arrived.

        Raises:
            ProtocolError: the peer has admitted messages of more tag queues than it may.
        """
        self.arrived_there = received
        if queue.last_sent <= received and not queue.admitted_by_peer:
            if self._admissions == MAX_ADMISSIONS:
                raise ProtocolError(f"it admitted messages of more than {MAX_ADMISSIONS} tag queues")
            self._set_admitted(queue)

    def _set_admitted(self, queue: TagQueue) -> None:
        queue.admitted_by_peer = True
        self._admissions += 1
        if queue.waiting_sends:
            self._overtaking.add(queue)

    def void_admission(self, queue: TagQueue) -> None:
        """Ends the peer's admission of the next message, if there is one: it was used, or will never be."""
        if queue.admitted_by_peer:
            queue.admitted_by_peer = False
            self._admissions -= 1
            self._overtaking.discard(queue)

    def next_ready(self) -> _Send | None:
        """Takes the next waiting send, and charges it; None if it must go on waiting."""
        if self._overtaking:
            send = cast(_Send, next(iter(next(iter(self._overtaking)).waiting_sends)))
        elif self.waiting:
            send = next(iter(self.waiting))
            if not self._suffices(send.size):
                return None
        else:
            return None
        self.withdraw(send)
        self._charge(send.queue, send.size)
        return send

    def has_room(self, queue: TagQueue) -> bool:
        """True if a small message of this queue could be sent now."""
        if queue.waiting_sends:
            return False
        return queue.admitted_by_peer or (not self.waiting and self.credit > MESSAGE_OVERHEAD)

    def must_report(self) -> bool:
        """True if STALLED is due because something cannot be sent; from then on it counts as sent."""
        reported, self._reported = self._reported, self.grants
        return reported != self.grants


class ReceiveCredit:
    """What the peer may send."""

    def __init__(self, window: int, threshold: int) -> None:
        self.window = window
        self.threshold = threshold
        #: What the messages cost that arrived and were not granted back.
        self.outstanding = 0
        #: What the messages cost that arrived and were not read.
        self.unread = 0
        #: The number of messages that arrived.
        self.received = 0
        #: Whether the peer is known to have something to send and no credit for it.
        self.stalled = False
        #: How many grants were sent.
        self.grants = 0
        #: The least amount that is granted without being asked for.
        self._worthwhile = max(window // 4, 1)
        #: How many tag queues have an admission: their next message was admitted, and has not arrived.
        self._admissions = 0

    def arrived(self, queue: TagQueue, size: int, count: int = 1) -> None:
        """``count`` messages of this size arrived."""
        if 0 < self.threshold <= size:
            amount = count * ANNOUNCEMENT
        else:
            amount = count * (size + (MESSAGE_OVERHEAD if size <= SMALL_MESSAGE else LARGE_OVERHEAD))  # cost()
        self.received += count
        self.outstanding += amount
        self.unread += amount
        if queue.admitted_by_us:
            self.void_admission(queue)

    def void_admission(self, queue: TagQueue) -> None:
        """Ends our admission of the next message, if there is one: it was used, or will never be."""
        if queue.admitted_by_us:
            queue.admitted_by_us = False
            self._admissions -= 1

    def consumed(self, size: int, count: int = 1) -> int:
        """``count`` messages of this size were read. Returns the amount to grant, 0 for none yet."""
        if 0 < self.threshold <= size:
            self.unread -= count * ANNOUNCEMENT
        else:
            self.unread -= count * (size + (MESSAGE_OVERHEAD if size <= SMALL_MESSAGE else LARGE_OVERHEAD))  # cost()
        if self.outstanding - self.unread < self._worthwhile and (self.unread or not self.stalled):
            return 0
        return self._due()

    def _due(self) -> int:
        amount = self.outstanding - self.unread
        if amount < 1:
            return 0
        self.outstanding -= amount
        self.grants += 1
        self.stalled = False  # a peer that still is will say so
        return amount

    def peer_stalled(self, grants: int) -> int:
        """STALLED arrived, sent after so many grants. Returns the amount to grant."""
        if grants != self.grants:
            return 0  # a grant is on its way; granting little now would make each message need a grant of its own
        amount = self._due()
        self.stalled = amount == 0
        return amount

    def found_empty(self, queue: TagQueue) -> tuple[int, bool]:
        """A receiver found this queue empty. Returns the amount to grant, and whether to admit its next message."""
        if not self.stalled:
            return 0, False
        amount = self._due()
        if queue.admitted_by_us or self._admissions == MAX_ADMISSIONS:
            return amount, False
        queue.admitted_by_us = True
        self._admissions += 1
        return amount, True
