"""The tag queues of one connection: made when looked up, and forgotten when a new one would know as much."""

from __future__ import annotations

from typing import Any

from .._rules import wire
from .._rules.credit import SendCredit
from .._rules.tag_queue import Mover, TagQueue

#: Idle tag queues are kept while there are no more tag queues than this: most programs use a few, again and again.
IDLE_QUEUES = 64
#: A sweep looks at no more than so many tag queues for each message that the peer has received since the last one.
_LOOKS_PER_MESSAGE = 4


class TagQueues(dict[int, TagQueue]):
    """The tag queues of one connection, by the number that this side reads. ``queues[number]`` makes a missing one.

    Do not keep an idle queue while messages may arrive: it may be forgotten, and another one made. Look it up again.

    Args:
        mover: moves the messages that arrive.
        credit: knows how many messages the peer has received.
    """

    def __init__(self, mover: Mover, credit: SendCredit[Any]) -> None:
        #: The tag queues in which receives may wait.
        self.awaited: set[TagQueue] = set()
        #: The tag queues in which there may be messages.
        self.filled: set[TagQueue] = set()
        self._mover = mover
        self._credit = credit
        #: How many messages the peer had received at the last sweep.
        self._swept_at = 0

    def __missing__(self, number: int) -> TagQueue:
        queue = self[number] = TagQueue(number, self._mover)
        return queue

    def that_writes_to(self, number: int) -> TagQueue | None:
        """Returns the tag queue that writes to this one, which the peer reads.

        None: it is a conversation that was opened here, and is over. (One that the peer has opened may begin later.)

        Raises:
            ProtocolError: the number is reserved.
        """
        wire.check_queue(number)
        opened_here = wire.CONVERSATIONS <= number < wire.ANSWERS
        return self.get(wire.other_direction(number)) if opened_here else self[wire.other_direction(number)]

    def forget(self, queue: TagQueue) -> bool:
        """Forgets a tag queue. Returns True if it was there: another one may have its number by now, and stays."""
        if self.get(queue.number) is not queue:
            return False
        del self[queue.number]
        self.awaited.discard(queue)
        self.filled.discard(queue)
        return True

    def forget_if_idle(self, queue: TagQueue) -> None:
        if len(self) > IDLE_QUEUES and queue.idle(self._credit.arrived_there):
            self.forget(queue)

    def sweep_if_due(self) -> None:
        """Forgets the queues that have become idle because GRANT says how many messages the peer has received."""
        arrived_there = self._credit.arrived_there
        if IDLE_QUEUES < len(self) <= _LOOKS_PER_MESSAGE * (arrived_there - self._swept_at):
            self._swept_at = arrived_there
            for queue in list(self.values()):
                self.forget_if_idle(queue)

    def close(self, error: Exception) -> None:
        """Drops all messages, and ends all receives with an error, because the connection was closed."""
        for queue in list(self.values()):
            queue.close(error)
        self.clear()
        self.awaited.clear()
        self.filled.clear()
