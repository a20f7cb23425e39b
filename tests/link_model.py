"""A model of the messages of one connection: credit, tag queues, and tasks that wait. Pure.

It is the specification of the C code in ``_native/link``, and speaks the frames of the library. *Wake, then take*: a
message stays in its queue until a task takes it. A task that has to wait queues a *token*; a message only makes the
token *due*, which wakes the task, and the task takes the message when it runs. So nothing is handed over: if the task
is cancelled instead, the next one gets its message.

* In each queue, the token at index n (from 0) is due if there are more than n messages. Its task takes message n, even
  if it runs before the tasks of the tokens in front. (Trio runs woken tasks in any order.) So messages go to receives
  in the order in which these began. A receive without a token takes the first message that no token is to take.
* A token may be in several queues. It is removed from all of them when its task takes a message.
* A send without credit waits. When its token is due, its cost is *reserved*, and given back if its task is cancelled.
  Only the first send of a queue can be due, so the messages of a queue stay in order. Queues take turns.
* A message gets its number when it is sent, not when its cost is reserved. An ADMIT names the last message that had
  arrived; if a number of that queue was never sent, the sender would ignore it for ever.
* A message that is longer than the limit of its receive is dropped, and its sender told.
* When receives or sends end, the tokens of those that would wait for ever are due, and their tasks get the end.
"""

from __future__ import annotations

import collections
import enum
from typing import NamedTuple

import attrs

from trio_ucx._rules import wire
from trio_ucx._rules.credit import LONE
from trio_ucx._rules.credit import cost as cost

#: The most tag queues whose next message one side may have admitted.
MOST_ADMISSIONS = 1 << 16


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


class Dropped(NamedTuple):
    queue: int
    length: int


Frame = Message | Grant | Stalled | Admit | Dropped


class Answer(enum.Enum):
    """What a send or a receive gets instead of being sent, or of a message."""

    SENT = enum.auto()
    WAITS = enum.auto()  # for credit
    EMPTY = enum.auto()  # no message is there
    ENDED = enum.auto()
    TOO_LONG = enum.auto()  # the message was dropped
    REFUSED = enum.auto()  # by UCX


class Refused(Exception):
    """The peer breaks the protocol."""


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
    #: Whether the end of the byte stream was read.
    at_end: bool = False
    #: The number of its last message, counted over all messages of the connection.
    last_sent: int = 0
    admitted_by_peer: bool = False
    admitted_by_us: bool = False

    @property
    def lacks(self) -> bool:
        """True if a receive waits for which no message is there."""
        return len(self.receives) > len(self.messages)


@attrs.define(eq=False)
class Side:
    """One side of a connection.

    Attributes:
        frames: what it has sent, in order; the caller takes it from there.
        due: the tokens whose tasks may go on, in order; the caller takes them from there.
    """

    window: int
    peer_window: int
    threshold: int = 0
    peer_threshold: int = 0
    most_admissions: int = MOST_ADMISSIONS
    frames: collections.deque[Frame] = attrs.Factory(collections.deque)
    due: collections.deque[int] = attrs.Factory(collections.deque)
    queues: dict[int, Queue] = attrs.Factory(dict)
    receives_end: bool = False
    drains: bool = False
    sends_end: bool = False
    # What may be sent.
    credit: int = attrs.field(init=False)
    sent: int = 0
    arrived_there: int = 0
    grants: int = 0
    reported: int = -1
    #: The sends that wait: token to queue and cost; those of them that are due because their cost is reserved.
    waiting: dict[int, tuple[Queue, int]] = attrs.Factory(dict)
    reserved: set[int] = attrs.Factory(set)
    #: The queues whose first send waits for credit, in order.
    line: list[Queue] = attrs.Factory(list)
    # What arrives.
    outstanding: int = 0
    unread: int = 0
    received: int = 0
    granted: int = 0
    stalled: bool = False
    #: The receives that wait: token to queues; those of them that are due.
    waits: dict[int, list[Queue]] = attrs.Factory(dict)
    woken: set[int] = attrs.Factory(set)
    #: The queues that lack messages, in the order in which they began to.
    awaited: dict[Queue, None] = attrs.Factory(dict)

    def __attrs_post_init__(self) -> None:
        self.credit = self.peer_window

    def queue(self, number: int) -> Queue:
        return self.queues.setdefault(number, Queue(number))

    # ---- sending ----

    def send(self, number: int, data: bytes, refused: bool = False) -> Answer:
        """Sends a message if it may be sent now. If it WAITS: :meth:`wait_send`.

        Args:
            refused: UCX will not take it.
        """
        queue, amount = self.queue(number), cost(len(data), self.threshold)
        if self.sends_end:
            return Answer.ENDED
        if queue.sends or not (queue.admitted_by_peer or (not self.line and self._suffices(amount))):
            self._report()
            return Answer.WAITS
        if refused:
            return Answer.REFUSED
        self.credit -= amount
        self._post(queue, data)
        return Answer.SENT

    def wait_send(self, number: int, size: int, token: int) -> None:
        """A send waits until its token is due; then it calls :meth:`send_reserved`."""
        queue = self.queue(number)
        queue.sends.append(token)
        self.waiting[token] = queue, cost(size, self.threshold)
        if self.sends_end:
            self.due.append(token)
        else:
            self._line_up(queue)
            self._wake_sends()

    def send_reserved(self, token: int, data: bytes, refused: bool = False) -> Answer:
        """The task of a send whose token was due sends its message. The token has left."""
        answer = Answer.ENDED if self.sends_end else Answer.REFUSED if refused else Answer.SENT
        if answer is Answer.SENT:
            self.reserved.remove(token)
            self._post(self.waiting[token][0], data)
        self.leave_send(token)
        return answer

    def leave_send(self, token: int) -> None:
        """The task of a send is gone, whether its token was due or not."""
        queue, amount = self.waiting.pop(token)
        queue.sends.remove(token)
        if token in self.reserved:
            self.reserved.remove(token)
            self.credit += amount
        if not queue.sends and queue in self.line:
            self.line.remove(queue)
        self._line_up(queue)
        self._wake_sends()

    def _suffices(self, amount: int) -> bool:
        return amount <= self.credit or (self.credit == self.peer_window and amount <= LONE)

    def _post(self, queue: Queue, data: bytes) -> None:
        queue.last_sent = self.sent = self.sent + 1
        queue.admitted_by_peer = False
        self.frames.append(Message(queue.number, data))

    def _line_up(self, queue: Queue) -> None:
        """The first send of a queue waits for its turn."""
        if queue.sends and queue.sends[0] not in self.reserved:
            if queue not in self.line:
                self.line.append(queue)
            if queue.admitted_by_peer:
                self._reserve(queue)

    def _reserve(self, queue: Queue) -> None:
        """The first send of a queue may go on."""
        token = queue.sends[0]
        self.line.remove(queue)
        self.credit -= self.waiting[token][1]
        self.reserved.add(token)
        if token not in self.due:
            self.due.append(token)

    def _wake_sends(self) -> None:
        while self.line and self._suffices(self.waiting[self.line[0].sends[0]][1]):
            self._reserve(self.line[0])
        if self.line:
            self._report()

    def _report(self) -> None:
        if self.reported != self.grants:
            self.reported = self.grants
            self.frames.append(Stalled(self.grants))

    # ---- receiving ----

    def receive(self, number: int, limit: int) -> bytes | Answer:
        """Takes the first message that no token has, or what is there of the byte stream."""
        queue = self.queue(number)
        place = len(queue.receives)
        if len(queue.messages) > place or queue.at_end:
            return self._take(queue, place, limit)
        if self._ended(queue):
            return Answer.ENDED
        self._found_empty(queue)
        return Answer.EMPTY

    def wait(self, numbers: list[int], token: int) -> None:
        """A receive waits until its token is due; then it calls :meth:`take`."""
        self.waits[token] = [self.queue(number) for number in numbers]
        for queue in self.waits[token]:
            queue.receives.append(token)
            self._notice(queue)
            if queue.lacks and not queue.at_end and not self._ended(queue):
                self._found_empty(queue)
        self._wake_receives(*self.waits[token])
        if any(queue.at_end for queue in self.waits[token]) or all(map(self._ended, self.waits[token])):
            self._wake(token)

    def take(self, token: int, limit: int) -> tuple[int, bytes | Answer]:
        """Takes the message of a token that was due, and says from which queue. The token has left."""
        queues = self.waits[token]
        self.woken.discard(token)
        places = [(queue, queue.receives.index(token)) for queue in queues]
        served = [(queue, place) for queue, place in places if place < len(queue.messages) or queue.at_end]
        if not served:
            if not all(map(self._ended, queues)):
                return 0, Answer.EMPTY
            self.leave(token)
            return 0, Answer.ENDED
        queue, place = served[0]
        data = self._take(queue, place, limit)
        queue.receives.remove(token)
        self._notice(queue)
        self.waits[token] = [each for each in queues if each is not queue]
        self.leave(token)
        return queue.number, data

    def leave(self, token: int) -> None:
        """The task of a receive is gone, whether its token was due or not."""
        queues = self.waits.pop(token)
        self.woken.discard(token)
        for queue in queues:
            queue.receives.remove(token)
            self._notice(queue)
        self._wake_receives(*queues)
        for queue in queues:
            self._keep_newest(queue)

    def newest(self, number: int) -> None:
        """From now on a message takes the place of those before it that no receive waits for."""
        self.queue(number).newest_only = True
        self._keep_newest(self.queue(number))

    def end(self, *, receives: bool = False, drains: bool = False, sends: bool = False) -> None:
        """Receives end where no message is (``drains``: of a user's tags, and of the byte stream); sends end."""
        self.receives_end |= receives
        self.drains |= drains
        self.sends_end |= sends
        for token, queues in self.waits.items():
            if any(queue.lacks and self._ended(queue) for queue in queues):
                self._wake(token)
        if self.sends_end:
            self.due.extend(token for token in self.waiting if token not in self.due and token not in self.reserved)

    def _ended(self, queue: Queue) -> bool:
        return self.receives_end or (self.drains and queue.number < wire.CONVERSATIONS)

    def _take(self, queue: Queue, place: int, limit: int) -> bytes | Answer:
        if queue.number == wire.STREAM:
            return self._read(queue, limit)
        data = queue.messages.pop(place)
        self._consumed(len(data))
        if len(data) > limit:
            self.frames.append(Dropped(queue.number, len(data)))
            return Answer.TOO_LONG
        return data

    def _read(self, queue: Queue, limit: int) -> bytes:
        """Joins the first pieces of the byte stream."""
        data = b""
        while queue.messages and len(data) < limit and not queue.at_end:
            piece = queue.messages[0]
            if not piece and data:
                break
            queue.at_end = not piece
            part = piece[: limit - len(data)]
            data += part
            queue.messages[0] = Rest(piece[len(part) :], whole_of(piece))
            if len(part) == len(piece):
                self._consumed(whole_of(queue.messages.pop(0)))
        return data

    def _notice(self, queue: Queue) -> None:
        """Whether a queue lacks messages may have changed."""
        if queue.lacks:
            self.awaited.setdefault(queue)
        else:
            self.awaited.pop(queue, None)

    def _wake_receives(self, *queues: Queue) -> None:
        for queue in queues:
            for token in queue.receives[: len(queue.messages)]:
                self._wake(token)

    def _wake(self, token: int) -> None:
        if token not in self.woken:
            self.woken.add(token)
            self.due.append(token)

    def _keep_newest(self, queue: Queue) -> None:
        while queue.newest_only and len(queue.messages) > len(queue.receives) + 1:
            self._consumed(len(queue.messages.pop(len(queue.receives))))

    def _consumed(self, size: int) -> None:
        self.unread -= cost(size, self.peer_threshold)
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
        """A receive has found no message: if the sender lacks credit, it gets some, and may send the next message."""
        if self.stalled:
            self._grant()
            admitted = sum(queue.admitted_by_us for queue in self.queues.values())
            if not queue.admitted_by_us and admitted < self.most_admissions:
                queue.admitted_by_us = True
                self.frames.append(Admit(queue.number, self.received))

    # ---- what comes from the peer ----

    def arrived(self, frame: Frame) -> None:
        """A frame has arrived.

        Raises:
            Refused: the peer breaks the protocol.
        """
        if isinstance(frame, Message):
            self._message_arrived(self.queue(frame.queue), frame.data)
        elif isinstance(frame, Grant):
            if frame.amount > self.peer_window - self.credit:
                raise Refused
            self.credit += frame.amount
            self.arrived_there = frame.received
            self.grants += 1
            self._wake_sends()
        elif isinstance(frame, Stalled):
            if frame.grants == self.granted and not self._grant():  # else a grant is on its way
                self.stalled = True
                for queue in list(self.awaited):
                    self._found_empty(queue)
        elif isinstance(frame, Admit):
            queue = self.queue(frame.queue)
            self.arrived_there = frame.received
            if queue.last_sent <= frame.received and not queue.admitted_by_peer:
                if sum(queue.admitted_by_peer for queue in self.queues.values()) == self.most_admissions:
                    raise Refused
                queue.admitted_by_peer = True
                if queue in self.line:
                    self._reserve(queue)

    def _message_arrived(self, queue: Queue, data: bytes) -> None:
        amount = cost(len(data), self.peer_threshold)
        self.received += 1
        self.outstanding += amount
        self.unread += amount
        queue.admitted_by_us = False
        queue.messages.append(data)
        self._keep_newest(queue)
        self._notice(queue)
        self._wake_receives(queue)
        if queue.lacks:
            self._found_empty(queue)


class Rest(bytes):
    """What is left of a piece of the byte stream."""

    whole: int

    def __new__(cls, data: bytes, whole: int) -> Rest:
        rest = super().__new__(cls, data)
        rest.whole = whole
        return rest


def whole_of(piece: bytes) -> int:
    """Returns how many bytes a piece had."""
    return piece.whole if isinstance(piece, Rest) else len(piece)
