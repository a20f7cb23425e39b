"""A model of the small messages of one connection: credit, tag queues, and tasks that wait. Pure.

It is the specification of ``link.c`` (to come), and speaks the frames of today's library. *Wake, then take*: a message
stays in its queue until a task takes it. A task that has to wait queues a *token*; a message only makes the token
*due*, which wakes the task, and the task takes the message when it runs. So nothing is handed over: if the task is
cancelled instead, the next one gets its message.

* In each queue, the token at index n (from 0) is due if there are more than n messages. Its task takes message n, even
  if it runs before the tasks of the tokens in front. (Trio runs woken tasks in any order.) So messages go to receives
  in the order in which these began. A receive without a token takes the first message that no token is to take.
* A token may be in several queues. It is removed from all of them when its task takes a message.
* A send without credit waits. When its token is due, its cost is *reserved*, and given back if its task is cancelled.
  Only the first send of a queue can be due, so the messages of a queue stay in order.
* A message gets its number when it is sent, not when its cost is reserved. An ADMIT names the last message that had
  arrived; if a number of that queue was never sent, the sender would ignore it for ever.
"""

from __future__ import annotations

import collections
from typing import NamedTuple

import attrs

from trio_ucx._rules.credit import LARGE_OVERHEAD, LONE, MESSAGE_OVERHEAD
from trio_ucx._rules.wire import SMALL_MESSAGE


class Message(NamedTuple):
    queue: int
    data: bytes


class Grant(NamedTuple):
    amount: int
    received: int


class Stalled(NamedTuple):
    grants: int


class Admit(NamedTuple):
    queue: int
    received: int


Frame = Message | Grant | Stalled | Admit


def cost(size: int) -> int:
    """What a message costs that is sent whole."""
    return size + (MESSAGE_OVERHEAD if size <= SMALL_MESSAGE else LARGE_OVERHEAD)


@attrs.define(eq=False)
class Queue:
    number: int
    messages: list[bytes] = attrs.Factory(list)
    #: The tokens of receives that wait, in order.
    receives: list[int] = attrs.Factory(list)
    #: The tokens of sends that wait, in order; the first one may be due.
    sends: list[int] = attrs.Factory(list)
    #: Whether a message takes the place of those before it that no receive waits for.
    newest_only: bool = False
    #: The number of its last message, counted over all messages of the connection.
    last_sent: int = 0
    admitted_by_peer: bool = False
    admitted_by_us: bool = False


@attrs.define(eq=False)
class Side:
    """One side of a connection.

    Attributes:
        frames: what it has sent, in order; the caller takes it from there.
        due: the tokens whose tasks may go on, in order; the caller takes them from there.
    """

    window: int
    peer_window: int
    frames: collections.deque[Frame] = attrs.Factory(collections.deque)
    due: collections.deque[int] = attrs.Factory(collections.deque)
    queues: dict[int, Queue] = attrs.Factory(dict)
    # What may be sent.
    credit: int = attrs.field(init=False)
    sent: int = 0
    arrived_there: int = 0
    grants: int = 0
    reported: int = -1
    #: The sends that wait: token to queue and cost, in order; those of them that are due.
    waiting: dict[int, tuple[Queue, int]] = attrs.Factory(dict)
    reserved: set[int] = attrs.Factory(set)
    # What arrives.
    outstanding: int = 0
    unread: int = 0
    received: int = 0
    granted: int = 0
    stalled: bool = False
    #: The receives that wait: token to queues; those of them that are due.
    waits: dict[int, list[Queue]] = attrs.Factory(dict)
    woken: set[int] = attrs.Factory(set)

    def __attrs_post_init__(self) -> None:
        self.credit = self.peer_window

    def queue(self, number: int) -> Queue:
        return self.queues.setdefault(number, Queue(number))

    # ---- sending ----

    def send(self, number: int, data: bytes) -> bool:
        """Sends a message if it may be sent now, and returns whether it was. Otherwise: :meth:`wait_send`."""
        queue = self.queue(number)
        if queue.sends or not (queue.admitted_by_peer or (not self._in_line() and self._suffices(cost(len(data))))):
            return False
        self.credit -= cost(len(data))
        self._post(queue, data)
        return True

    def wait_send(self, number: int, size: int, token: int) -> None:
        """A send waits until its token is due; then it calls :meth:`send_reserved`."""
        queue = self.queue(number)
        queue.sends.append(token)
        self.waiting[token] = queue, cost(size)
        self._report()

    def send_reserved(self, token: int, data: bytes) -> None:
        queue, _ = self.waiting.pop(token)
        self.reserved.remove(token)
        queue.sends.remove(token)
        self._post(queue, data)
        self._wake_sends()

    def leave_send(self, token: int) -> None:
        """The task of a send is gone, whether its token was due or not."""
        queue, amount = self.waiting.pop(token)
        queue.sends.remove(token)
        if token in self.reserved:
            self.reserved.remove(token)
            self.credit += amount
        self._wake_sends()

    def _in_line(self) -> bool:
        """True if a send waits that is not due."""
        return len(self.waiting) > len(self.reserved)

    def _suffices(self, amount: int) -> bool:
        return amount <= self.credit or (self.credit == self.peer_window and amount <= LONE)

    def _post(self, queue: Queue, data: bytes) -> None:
        queue.last_sent = self.sent = self.sent + 1
        queue.admitted_by_peer = False
        self.frames.append(Message(queue.number, data))

    def _wake_sends(self) -> None:
        """First come, first served; an admitted queue overtakes; in each queue only the first."""
        blocked = False
        for token, (queue, amount) in self.waiting.items():
            if token in self.reserved or queue.sends[0] != token:
                continue
            if not queue.admitted_by_peer:
                blocked = blocked or not self._suffices(amount)
                if blocked:
                    continue
            self.credit -= amount
            self.reserved.add(token)
            self.due.append(token)
        if self._in_line():
            self._report()

    def _report(self) -> None:
        if self.reported != self.grants:
            self.reported = self.grants
            self.frames.append(Stalled(self.grants))

    # ---- receiving ----

    def receive(self, number: int) -> bytes | None:
        """Takes the first message that no token has; None if there is none."""
        queue = self.queue(number)
        place = len(queue.receives)
        return self._take(queue, place) if len(queue.messages) > place else None

    def wait(self, numbers: list[int], token: int) -> None:
        """A receive waits until its token is due; then it calls :meth:`take`."""
        self.waits[token] = [self.queue(number) for number in numbers]
        for queue in self.waits[token]:
            queue.receives.append(token)
            if len(queue.messages) < len(queue.receives):
                self._found_empty(queue)
        self._wake_receives(*self.waits[token])

    def take(self, token: int) -> tuple[int, bytes]:
        """Takes the message of a token that was due, and says from which queue. The token has left."""
        queues = self.waits.pop(token)
        self.woken.remove(token)
        places = [(queue, queue.receives.index(token)) for queue in queues]
        queue, place = next((queue, place) for queue, place in places if place < len(queue.messages))
        for each in queues:
            each.receives.remove(token)
        data = self._take(queue, place)
        self._wake_receives(*queues)
        return queue.number, data

    def leave(self, token: int) -> None:
        """The task of a receive is gone, whether its token was due or not."""
        queues = self.waits.pop(token)
        self.woken.discard(token)
        for queue in queues:
            queue.receives.remove(token)
        self._wake_receives(*queues)

    def _take(self, queue: Queue, place: int) -> bytes:
        data = queue.messages.pop(place)
        self._consumed(cost(len(data)))
        return data

    def _wake_receives(self, *queues: Queue) -> None:
        for queue in queues:
            for token in queue.receives[: len(queue.messages)]:
                if token not in self.woken:
                    self.woken.add(token)
                    self.due.append(token)

    def _consumed(self, amount: int) -> None:
        self.unread -= amount
        if self.outstanding - self.unread >= max(self.window // 4, 1) or (self.stalled and not self.unread):
            self._grant()

    def _grant(self) -> bool:
        amount = self.outstanding - self.unread
        if amount > 0:
            self.outstanding -= amount
            self.granted += 1
            self.stalled = False  # a peer that still is will say so
            self.frames.append(Grant(amount, self.received))
        return amount > 0

    def _found_empty(self, queue: Queue) -> None:
        """A receive waits for a message that has not arrived: if its sender lacks credit, it gets some."""
        if self.stalled:
            self._grant()
            if not queue.admitted_by_us:
                queue.admitted_by_us = True
                self.frames.append(Admit(queue.number, self.received))

    # ---- what comes from the peer ----

    def arrived(self, frame: Frame) -> None:
        if isinstance(frame, Message):
            queue, amount = self.queue(frame.queue), cost(len(frame.data))
            self.received += 1
            self.outstanding += amount
            self.unread += amount
            queue.admitted_by_us = False
            while queue.newest_only and len(queue.messages) > len(queue.receives):
                self._take(queue, len(queue.messages) - 1)
            queue.messages.append(frame.data)
            self._wake_receives(queue)
            if len(queue.receives) > len(queue.messages):
                self._found_empty(queue)
        elif isinstance(frame, Grant):
            self.credit += frame.amount
            self.arrived_there = frame.received
            self.grants += 1
            self._wake_sends()
        elif isinstance(frame, Stalled):
            if frame.grants == self.granted and not self._grant():  # else a grant is on its way
                self.stalled = True
                for queue in self.queues.values():
                    if len(queue.receives) > len(queue.messages):
                        self._found_empty(queue)
        else:
            queue = self.queue(frame.queue)
            self.arrived_there = frame.received
            if queue.last_sent <= frame.received:
                queue.admitted_by_peer = True
                self._wake_sends()
