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
* A message that is longer than the limit of its receive is dropped, and that is reported to its sender.
* A large message stays with UCX (HELD) until its task begins a *transfer* into its own buffer. Transfers overlap, but
  receives complete in order: a message is taken only when those before it are at hand. If the task of a transfer is
  cancelled, the transfer goes on without it; then the message is saved to memory of ours, and keeps its position. The
  receives behind it get the messages before theirs: one whose buffer has another message by now saves that, too.
* A large message may also be *fetched* to memory of ours as soon as it has arrived. It needs no task.
* When receives or sends end, the tokens of those that would wait for ever are due, and their tasks get the end.
"""

from __future__ import annotations

import collections
import enum
from collections.abc import Callable, Iterable
from typing import NamedTuple

import attrs

from trio_ucx._rules import wire

#: What an unread small message costs besides its payload, and a longer one; what one costs in all that stays with its
#: sender; and what a message may cost that goes by itself.
SMALL_OVERHEAD, LARGE_OVERHEAD, ANNOUNCEMENT, LONE = 352, 512, 8960, 68 << 10

#: Transfers of one queue that may go on at once.
AHEAD = 8
#: The most bytes that one read of the byte stream returns.
MOST_READ = 65536
#: The most tag queues whose next message one side may have admitted.
MOST_ADMISSIONS = 1 << 16
BYTES_AHEAD = 1 << 24


def cost(length: int, threshold: int) -> int:
    """Returns what a message of ``length`` bytes costs, sent with the rendezvous threshold ``threshold`` (0: none)."""
    if threshold and length >= threshold:
        return ANNOUNCEMENT
    return length + (SMALL_OVERHEAD if length <= wire.SMALL_MESSAGE else LARGE_OVERHEAD)


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
    BEGIN = enum.auto()  # the message is held: begin its transfer
    SAVE = enum.auto()  # save the message that is in the buffer: it is another receive's


class State(enum.Enum):
    """Where a message is."""

    HELD = enum.auto()  # UCX has it
    MOVING = enum.auto()  # on its way to the buffer of a receive
    ARRIVED = enum.auto()  # there
    READY = enum.auto()  # in memory of ours


@attrs.define(eq=False)
class Item:
    """A message.

    Attributes:
        holder: the token in whose buffer it is, or to which it is on its way; None if that has left.
        fetched: whether it is on its way to memory of ours, or was.
    """

    data: bytes
    state: State = State.READY
    holder: int | None = None
    fetched: bool = False
    #: Whether UCX is known to have all of it.
    whole: bool = True
    #: Bytes of a piece of the byte stream that were read.
    taken: int = 0

    @property
    def with_sender(self) -> bool:
        """True if it may be with its sender still."""
        return self.state is State.HELD and not self.whole


class Refused(Exception):
    """The peer breaks the protocol."""


@attrs.define(eq=False)
class Queue:
    number: int
    messages: list[Item] = attrs.Factory(list)
    #: The tokens of receives that wait, in order.
    receives: list[int] = attrs.Factory(list)
    #: The tokens of sends that wait, in order; the first one may be due.
    sends: list[int] = attrs.Factory(list)
    #: Whether a message takes the place of those before it that no receive waits for.
    newest_only: bool = False
    #: Whether the end of the byte stream was read.
    at_end: bool = False
    #: Whether a message is missing: those that arrive later are dropped.
    ended: bool = False
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
    bytes_ahead: int = BYTES_AHEAD
    frames: collections.deque[Frame] = attrs.Factory(collections.deque)
    due: collections.deque[int] = attrs.Factory(collections.deque)
    queues: dict[int, Queue] = attrs.Factory(dict)
    receives_end: bool = False
    drains: bool = False
    sends_end: bool = False
    # What may be sent.
    credit: int = attrs.field(init=False)
    #: What was sent costs, less what was granted.
    charged: int = 0
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
    #: What came by an admission costs, less all that was granted since.
    admitted: int = 0
    unread: int = 0
    received: int = 0
    granted: int = 0
    stalled: bool = False
    #: The receives that wait: token to queues; those of them that are due.
    waits: dict[int, list[Queue]] = attrs.Factory(dict)
    woken: set[int] = attrs.Factory(set)
    #: By token, the message that is in its buffer, or on its way there.
    holding: dict[int, Item] = attrs.Factory(dict)
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
            self.reserved.remove(token)  # it was paid
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
        self.charged += cost(len(data), self.threshold)
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
        """Takes the first message that no token has if it is at hand, or what is there of the byte stream."""
        queue = self.queue(number)
        place = len(queue.receives)
        if place and number == wire.STREAM:
            return Answer.EMPTY
        if queue.at_end or self.is_at_hand(queue, place):
            data = self._take(queue, place, limit)
            self._end_receives(queue)
            return data
        if len(queue.messages) > place:
            return Answer.EMPTY
        if self._ended(queue):
            return Answer.EMPTY if queue.messages else Answer.ENDED
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
        for queue in self.waits[token]:
            if not queue.lacks:
                self._serve(queue)
        if any(queue.at_end for queue in self.waits[token]) or self._waits_in_vain(token, all):
            self._wake(token)

    def take(self, token: int, limit: int) -> tuple[int, bytes | Answer]:
        """Takes the message of a token that was due, and says from which queue. The token has left, unless the answer
        is EMPTY, BEGIN or SAVE.

        After BEGIN :meth:`begin` or :meth:`drop`, after SAVE :meth:`save` follows.
        """
        queues = self.waits[token]
        self.woken.discard(token)
        if token in self.holding:
            item = self.holding[token]
            if item.state is State.MOVING:  # also if it was dropped: the buffer is still UCX's
                return 0, Answer.EMPTY
            queue = self.holding_queue(token)
            place = queue.receives.index(token)
            if place >= len(queue.messages) or queue.messages[place] is not item:
                return queue.number, Answer.SAVE
            if not self.settled(queue, queue.receives.index(token)):
                return 0, Answer.EMPTY
            queue.messages.remove(item)
            del self.holding[token]
            self._consumed(len(item.data))
            self.leave(token)
            return queue.number, item.data
        for queue in queues:
            place = queue.receives.index(token)
            if queue.at_end or self.is_at_hand(queue, place):
                data = self._take(queue, place, limit)
                self.leave(token)
                return queue.number, data
            if place < len(queue.messages) and self.may_begin(queue, place):
                too_long = len(queue.messages[place].data) > limit and queue.number != wire.STREAM
                if not too_long or self.settled(queue, place):  # that it is too long is an answer, and has its turn
                    return queue.number, Answer.BEGIN
        if not self._waits_in_vain(token, all):
            return 0, Answer.EMPTY
        self.leave(token)
        return 0, Answer.ENDED

    def leave(self, token: int) -> None:
        """The task of a receive is gone, whether its token was due or not. What has arrived in its buffer was saved."""
        queues = self.waits.pop(token)
        self.woken.discard(token)
        item = self.holding.pop(token, None)
        if item is not None:
            item.holder = None
        for queue in queues:
            queue.receives.remove(token)
            self._notice(queue)
        for queue in queues:
            self._serve(queue)
        for queue in queues:
            if queue.newest_only:
                self._keep_newest(queue)
                self._grant_if_due()
            self._end_receives(queue)

    # ---- transfers ----

    def holding_queue(self, token: int) -> Queue:
        """The queue of the message in a token's buffer."""
        return next(queue for queue in self.waits[token] if self.holding[token] in queue.messages)

    def begin(self, token: int, number: int) -> None:
        """The task of a token begins the transfer of its message."""
        queue = self.queue(number)
        item = queue.messages[queue.receives.index(token)]
        item.state, item.holder = State.MOVING, token
        self.holding[token] = item

    def drop(self, token: int, number: int) -> None:
        """The message of a token is too long for it. The token has left."""
        queue = self.queue(number)
        item = queue.messages.pop(queue.receives.index(token))
        self._consumed(len(item.data))
        self.frames.append(Dropped(number, len(item.data)))
        self.leave(token)

    def moved(self, item: Item, number: int) -> bool:
        """A transfer has ended. Returns whether the message is to be saved, because its task has gone."""
        if item not in self.queue(number).messages:
            self._over(item)
            return False  # it was dropped meanwhile
        if item.fetched:
            self._became_ready(item, number)
            return False
        item.state = State.ARRIVED
        if item.holder is not None:
            self._serve(self.queue(number))
        return item.holder is None

    def save(self, item: Item, number: int) -> None:
        """The message that had arrived in a buffer is in memory of ours now."""
        if item.holder is not None:
            self._wake(item.holder)  # there may be a message for it, also in another queue
            del self.holding[item.holder]
            item.holder = None
        self._became_ready(item, number)

    def _became_ready(self, item: Item, number: int) -> None:
        """A message is in memory of ours."""
        item.state = State.READY
        self._serve(self.queue(number))
        if self.queue(number).newest_only:
            self._keep_newest(self.queue(number))
            self._grant_if_due()

    def failed(self, item: Item, number: int) -> None:
        """A transfer has failed: the queue ends at this message."""
        if item in self.queue(number).messages:
            self._cut(self.queue(number), item)
            self._grant_if_due()
        self._over(item)

    def _over(self, item: Item) -> None:
        """The transfer of a message is over that was dropped: the receive has its buffer again."""
        if item.holder is not None:
            del self.holding[item.holder]
            self._wake(item.holder)

    def lose(self) -> None:
        """The peer is lost: each queue ends at the first message that has not arrived whole."""
        for queue in self.queues.values():
            for item in queue.messages:
                if item.state is State.MOVING or item.with_sender:
                    self._cut(queue, item)
                    break

    def forget_with_sender(self) -> None:
        """The peer closes: drops the messages that are still with it."""
        for queue in self.queues.values():
            self._drop(queue, [item for item in queue.messages if item.with_sender])

    def _cut(self, queue: Queue, missing: Item) -> None:
        """Drops a message that will not arrive, and everything behind it."""
        queue.ended = True
        self._drop(queue, queue.messages[queue.messages.index(missing) :])

    def _drop(self, queue: Queue, items: list[Item]) -> None:
        """Drops messages. What they cost is not granted now."""
        for item in items:
            queue.messages.remove(item)
            self.unread -= cost(len(item.data), self.peer_threshold)
            if item.holder is not None and item.state is not State.MOVING:
                self._wake(item.holder)  # there may be a message for it in another queue
                del self.holding[item.holder]
                item.holder = None
        self._notice(queue)
        self._end_receives(queue)
        self._serve(queue)

    def _end_receives(self, queue: Queue) -> None:
        """Wakes those that will get no message. As long as one is there, they may get it: those in front may leave."""
        for token in queue.receives if self._ended(queue) and not queue.messages else []:
            self._wake(token)

    def settled(self, queue: Queue, place: int) -> bool:
        """True if the messages before this place are at hand."""
        return all(
            item.state is State.READY or (item.state is State.ARRIVED and item.holder == token)
            for item, token in zip(queue.messages[:place], queue.receives[:place], strict=True)
        )

    def is_at_hand(self, queue: Queue, place: int) -> bool:
        """True if the message of this place can be taken."""
        item = queue.messages[place] if place < len(queue.messages) else None
        there = item is not None and (
            item.state is State.READY or (item.state is State.ARRIVED and item.holder in queue.receives[place:][:1])
        )
        return there and self.settled(queue, place)

    def may_begin(self, queue: Queue, place: int) -> bool:
        """True if UCX has the message of this place, and its transfer may begin: few go on before it, or may begin."""
        ahead = [item for item in queue.messages[:place] if item.state is not State.READY]
        moved = sum(len(item.data) for item in ahead if item.state is not State.ARRIVED)
        return queue.messages[place].state is State.HELD and len(ahead) < AHEAD and moved < self.bytes_ahead

    def _serve(self, queue: Queue) -> None:
        """Wakes those who may go on."""
        for place, token in enumerate(queue.receives):
            held = self.holding.get(token)
            item = queue.messages[place] if place < len(queue.messages) else None
            if held is not None and held not in queue.messages:
                continue  # a message of another queue
            if held is not None and held is not item:
                may = held.state is State.ARRIVED  # to save it
            elif item is None:
                continue
            elif held is None and item.state is State.HELD:
                may = self.may_begin(queue, place)
            else:
                may = self.is_at_hand(queue, place)
            if may:
                self._wake(token)

    def newest(self, number: int) -> None:
        """From now on a message takes the place of those before it that no receive waits for."""
        self.queue(number).newest_only = True
        self._keep_newest(self.queue(number))
        self._grant_if_due()

    def end(self, *, receives: bool = False, drains: bool = False, sends: bool = False) -> None:
        """Receives end where no message is (``drains``: of a user's tags, and of the byte stream); sends end."""
        self.receives_end |= receives
        self.drains |= drains
        self.sends_end |= sends
        for token in self.waits:
            if self._waits_in_vain(token, any):
                self._wake(token)
        if self.sends_end:
            self.due.extend(token for token in self.waiting if token not in self.due and token not in self.reserved)

    def _waits_in_vain(self, token: int, which: Callable[[Iterable[bool]], bool]) -> bool:
        """True if no message will come for it, in any or in all of its queues."""
        queues = self.waits[token]
        return which(self._ended(queue) and not queue.messages for queue in queues)

    def _ended(self, queue: Queue) -> bool:
        return self.receives_end or queue.ended or (self.drains and queue.number < wire.CONVERSATIONS)

    def _take(self, queue: Queue, place: int, limit: int) -> bytes | Answer:
        if queue.number == wire.STREAM:
            return self._read(queue, limit)
        data = queue.messages.pop(place).data
        self._consumed(len(data))
        if len(data) > limit:
            self.frames.append(Dropped(queue.number, len(data)))
            return Answer.TOO_LONG
        return data

    def _read(self, queue: Queue, limit: int) -> bytes:
        """Joins the first pieces of the byte stream."""
        data, limit = b"", min(limit, MOST_READ)
        while queue.messages and queue.messages[0].state is State.READY and len(data) < limit and not queue.at_end:
            item = queue.messages[0]
            if not item.data and data:
                break
            queue.at_end = not item.data
            part = item.data[item.taken : item.taken + limit - len(data)]
            data += part
            item.taken += len(part)
            if item.taken == len(item.data):
                self._consumed(len(queue.messages.pop(0).data))
        return data

    def _notice(self, queue: Queue) -> None:
        """Whether a queue lacks messages may have changed."""
        if queue.lacks:
            self.awaited.setdefault(queue)
        else:
            self.awaited.pop(queue, None)

    def _wake(self, token: int) -> None:
        if token not in self.woken:
            self.woken.add(token)
            self.due.append(token)

    def _keep_newest(self, queue: Queue) -> None:
        older = queue.messages[len(queue.receives) : -1] if queue.newest_only else []
        for item in older:
            if item.state in (State.HELD, State.READY):
                queue.messages.remove(item)
                self.unread -= cost(len(item.data), self.peer_threshold)

    def _consumed(self, size: int) -> None:
        self.unread -= cost(size, self.peer_threshold)
        self._grant_if_due()

    def _grant_if_due(self) -> None:
        if self.outstanding - self.unread >= max(self.window // 4, 1) or (self.stalled and not self.unread):
            self._grant()

    def _grant(self) -> bool:
        amount = self.outstanding - self.unread
        if amount > 0:
            self.outstanding -= amount
            self.admitted -= min(self.admitted, amount)
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
            self._message_arrived(self.queue(frame.queue), Item(frame.data))
        elif isinstance(frame, Grant):
            if not 0 < frame.amount <= self.charged or not self.arrived_there <= frame.received <= self.sent:
                raise Refused
            self.charged -= frame.amount
            self.credit += frame.amount
            self.arrived_there = frame.received
            self.grants += 1
            self._wake_sends()
        elif isinstance(frame, Stalled):
            on_its_way = frame.grants != self.granted or self._grant()
            if not on_its_way and not self.stalled:
                self.stalled = True
                for queue in list(self.awaited):
                    if not self._ended(queue):
                        self._found_empty(queue)
        elif isinstance(frame, Admit):
            if not self.arrived_there <= frame.received <= self.sent:
                raise Refused
            queue = self.queue(frame.queue)
            self.arrived_there = frame.received
            if queue.last_sent <= frame.received and not queue.admitted_by_peer:
                if sum(queue.admitted_by_peer for queue in self.queues.values()) == self.most_admissions:
                    raise Refused
                queue.admitted_by_peer = True
                if queue in self.line:
                    self._reserve(queue)

    def announced(self, frame: Message, whole: bool, fetch: bool) -> Item:
        """A large message has arrived, which UCX holds. ``fetch``: its transfer to memory of ours begins."""
        item = Item(frame.data, State.MOVING if fetch else State.HELD, whole=whole, fetched=fetch)
        self._message_arrived(self.queue(frame.queue), item)
        return item

    def _message_arrived(self, queue: Queue, item: Item) -> None:
        amount = cost(len(item.data), self.peer_threshold)
        before = self.outstanding - self.admitted  # what was admitted may have overtaken what had its credit already
        if not (amount <= self.window - before or queue.admitted_by_us or (not before and amount <= LONE)):
            raise Refused  # it had no credit for that
        self.received += 1
        self.outstanding += amount
        self.admitted += amount * queue.admitted_by_us
        queue.admitted_by_us = False
        if queue.ended:
            self._grant_if_due()
            return
        self.unread += amount
        queue.messages.append(item)
        self._keep_newest(queue)
        self._notice(queue)
        self._serve(queue)
        if queue.lacks and not self._ended(queue):
            self._found_empty(queue)
        self._grant_if_due()
