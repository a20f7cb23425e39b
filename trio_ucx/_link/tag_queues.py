"""The tag queues of one connection: made when they are looked up, and forgotten when there is nothing to remember."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from .._rules import wire
from .._rules.credit import SendCredit
from .._rules.tag_queue import Mover, TagQueue

#: So many idle tag queues are kept: one is used again and again, most often.
IDLE_QUEUES = 64
#: The least number of tag queues at which those are looked for that have become idle since they were used.
_LEAST_SWEEP = 256


class TagQueues(dict[int, TagQueue]):
    """The tag queues of one connection, by the number of the one that this side reads. A missing one is made.

    Nobody keeps an idle one while messages may arrive: it may be forgotten, and another one made.

    Args:
        mover: what moves the messages that arrive.
        credit: it knows how many messages the peer has.
        ask: asks the peer about a queue of which it may have something unread.
    """

    def __init__(self, mover: Mover, credit: SendCredit[Any], ask: Callable[[TagQueue], None]) -> None:
        #: Those in which receives may wait.
        self.awaited: set[TagQueue] = set()
        self._mover = mover
        self._credit = credit
        self._ask = ask
        self._sweep_at = _LEAST_SWEEP

    def __missing__(self, number: int) -> TagQueue:
        if len(self) >= self._sweep_at:
            self._sweep()
        queue = self[number] = TagQueue(number, self._mover)
        return queue

    def that_writes_to(self, number: int) -> TagQueue | None:
        """Returns the tag queue whose messages the peer reads in this one; None for a conversation that is over.

        Raises:
            ProtocolError: there is no such tag queue.
        """
        wire.check_queue(number)
        return self.get(wire.other_direction(number)) if number >= wire.CONVERSATIONS else self[number]

    def forget(self, queue: TagQueue) -> bool:
        """Returns whether it was there: another one may have its number by now."""
        if self.get(queue.number) is not queue:
            return False
        del self[queue.number]
        self.awaited.discard(queue)
        return True

    def forget_if_idle(self, queue: TagQueue) -> None:
        if len(self) > IDLE_QUEUES and queue.idle(self._credit.arrived_there):
            self.forget(queue)

    def _sweep(self) -> None:
        """Forgets the queues that have become idle when the peer told what it has, which names none of them."""
        for queue in list(self.values()):
            self.forget_if_idle(queue)
            if queue.unread_there is not None:
                self._ask(queue)
        self._sweep_at = max(_LEAST_SWEEP, 2 * len(self))

    def close(self, error: Exception) -> None:
        """The connection is closed: drops all messages."""
        for queue in list(self.values()):
            queue.close(error)
        self.clear()
        self.awaited.clear()
