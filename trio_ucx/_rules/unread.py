"""How many messages of a tag queue the peer has unread: for sends with ``max_unread``. Pure: the sender's side.

The sender keeps an upper bound: what it has sent since it was last told. When the bound leaves no room it asks (ASK,
with its limit); the receiver answers (UNREAD) as soon as fewer messages than that are unread. Messages that were sent
between ASK and UNREAD are added to the answer, because it may not count them.
"""

from __future__ import annotations


class UnreadThere:
    """What the sender knows about one tag queue."""

    __slots__ = ("asked", "since", "unread")

    def __init__(self) -> None:
        #: The peer has at most so many unread.
        self.unread = 0
        #: The limit of the question to which the answer is due, 0 if none is; and how many messages were sent since.
        self.asked = 0
        self.since = 0

    def must_ask(self, limit: int) -> bool:
        """True if ASK is due; from then on it counts as sent. A greater limit takes the place of a smaller one."""
        if self.asked >= limit:
            return False
        self.asked, self.since = limit, 0
        return True

    def sent(self) -> None:
        self.unread += 1
        self.since += 1

    def answered(self, limit: int, unread: int) -> bool:
        """UNREAD arrived; ignored if another question has replaced this one. Returns True if the peer has read all."""
        if self.asked != limit:
            return False
        self.asked = 0
        self.unread = unread + self.since
        return not self.unread
