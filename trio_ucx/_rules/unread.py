"""How many messages of a tag queue the peer has unread: for sends with ``max_unread``. Pure: the sender's side.

The sender keeps an upper bound: what it has sent since it was last told. When the bound leaves no room it asks (ASK,
with its limit); the receiver answers (UNREAD) as soon as fewer messages than that are unread. Messages that were sent
between ASK and UNREAD are added to the answer, because it may not count them.
"""

from __future__ import annotations


class _Bound:
    """What the sender knows about one tag queue."""

    __slots__ = ("asked", "since", "unread")

    def __init__(self) -> None:
        #: The peer has at most so many unread.
        self.unread = 0
        #: The limit of the question to which the answer is due, 0 if none is; and how many messages were sent since.
        self.asked = 0
        self.since = 0


#: About so many tag queues are remembered; the peer is asked about others, which can be forgotten when all was read.
_REMEMBERED = 1024


class UnreadThere:
    """What the peer has unread, as far as we know."""

    def __init__(self) -> None:
        self._bounds: dict[int, _Bound] = {}

    def may_send(self, queue: int, limit: int) -> bool:
        """True if the peer is known to have fewer messages of this queue unread."""
        bound = self._bounds.get(queue)
        return bound is None or bound.unread < limit

    def must_ask(self, queue: int, limit: int) -> bool:
        """True if ASK is due; from then on it counts as sent. A greater limit takes the place of a smaller one."""
        bound = self._bounds[queue]
        if bound.asked >= limit:
            return False
        bound.asked, bound.since = limit, 0
        return True

    def sent(self, queue: int) -> None:
        bound = self._bounds.setdefault(queue, _Bound())
        bound.unread += 1
        bound.since += 1

    def oldest(self) -> int | None:
        """A tag queue to ask about so that it can be forgotten, a different one each time; None while there are few."""
        if len(self._bounds) <= _REMEMBERED:
            return None
        queue = next(iter(self._bounds))
        self._bounds[queue] = self._bounds.pop(queue)
        return queue

    def answered(self, queue: int, limit: int, unread: int) -> None:
        """UNREAD arrived. It says nothing if the question was replaced, or the queue forgotten."""
        bound = self._bounds.get(queue)
        if bound is None or bound.asked != limit:
            return
        bound.asked = 0
        bound.unread = unread + bound.since
        if not bound.unread:
            del self._bounds[queue]

    def forget(self, queue: int) -> None:
        self._bounds.pop(queue, None)
