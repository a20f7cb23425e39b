"""Two sides of a link (``link_model.py``), the tasks of their programs, and a network between them: random steps, and
what must hold after each."""

from __future__ import annotations

import collections
import random
from collections.abc import Callable

import attrs
from link_model import LONE, Answer, Frame, Grant, Item, Message, Side, State, cost

from trio_ucx._rules import wire

QUEUES = range(3)
#: Some need all of a window, or more.
SIZES = [0, 0, 1, 8, 8, 100, 1024, 1025, 4000, 20_000]
_LARGE = 1 << 17
#: What some receives take at most.
_LIMIT = 100
#: Of a world with long transfers.
LARGE_SIZES = [8, 1025, 1025, 2000, 4000, 66_000]
#: Messages from this size on may be large ones, which UCX holds.
HELD = 1025


class Wrong(AssertionError):
    """The link breaks a promise."""


def require(condition: object, *what: object) -> None:
    if not condition:
        raise Wrong(*what)


@attrs.define(eq=False)
class End:
    """A side, and the tasks of its program."""

    side: Side
    #: What is on its way to the other end.
    network: collections.deque[Frame] = attrs.Factory(collections.deque)
    #: The sends that wait, by token. A message begins with its number in its queue.
    sends: dict[int, tuple[int, bytes]] = attrs.Factory(dict)
    #: The receives that wait, by token.
    receives: dict[int, list[int]] = attrs.Factory(dict)
    #: By queue: the messages that were sent or wait to be sent, in the order in which their sends began; and what was
    #: received, by when its receive began.
    sent: dict[int, list[bytes]] = attrs.Factory(lambda: collections.defaultdict(list))
    got: dict[int, dict[int, bytes]] = attrs.Factory(lambda: collections.defaultdict(dict))
    #: How many were dropped because they were too long.
    dropped: collections.Counter[int] = attrs.Factory(collections.Counter)
    #: Transfers that go on: the message, and its queue.
    transfers: list[tuple[Item, int]] = attrs.Factory(list)
    #: The byte stream.
    wrote: bytearray = attrs.Factory(bytearray)
    read: bytearray = attrs.Factory(bytearray)


class World:
    """Two ends, and a source of random choices.

    Args:
        make: makes a side, of its window, its peer's, and both thresholds.
        leave_due: whether a task may leave after its token was due. The order in which receives get their messages is
            checked only if not. (Trio does not cancel a task that is about to run.)
        several: whether receives wait in several queues.
        ends: whether receives and sends may end.
    """

    def __init__(
        self,
        seed: int,
        make: Callable[[int, int, int, int], Side] = Side,
        leave_due: bool = False,
        several: bool = False,
        ends: bool = False,
    ):
        self.chance = random.Random(seed)
        #: Whether it is mostly about transfers, which overlap and are cancelled.
        self.moves = self.chance.random() < 0.3
        self.queues = QUEUES[:1] if self.moves else QUEUES
        #: How often a message is fetched when it is announced.
        self.fetches = self.chance.choice([0, 0, 0.1, 0.5, 1])
        windows = [self.chance.choice([1, 1000, 4096, 16384, 100_000][self.moves * 3 :]) for _ in range(2)]
        thresholds = [self.chance.choice([0, 0, 2000]) for _ in range(2)]
        self.ends = [End(make(*windows, *thresholds)), End(make(*windows[::-1], *thresholds[::-1]))]
        self.leave_due = leave_due
        self.several = several
        self.may_end = ends
        self.over = False
        #: The most receives that have waited at the same time.
        self.most_waits = 0
        self.newest = self.chance.choice([None, None, 0, 2])
        if self.newest is not None:
            for end in self.ends:
                end.side.newest(self.newest)
        self.began = 0
        self.limit = _LIMIT

    def begin(self) -> int:
        self.began += 1
        return self.began

    def other(self, end: End) -> End:
        return self.ends[end is self.ends[0]]

    # ---- steps ----

    def step(self) -> None:
        steps = [self.send, self.receive, self.run, self.run, self.leave, self.deliver, self.deliver, self.stream]
        steps += [self.receive, self.receive] if self.moves else [self.move, self.move]
        steps += [self.leave, self.deliver, self.move] if self.moves else []
        self.chance.choice(steps)(self.chance.choice(self.ends))
        if self.may_end and self.chance.random() < 0.005:
            self.over = True
            self.end(self.chance.choice(self.ends))
        self.check()

    def end(self, end: End) -> None:
        """Something of a side ends."""
        which = self.chance.choice(["receives", "drains", "sends", "lost", "closed", "failed"])
        if which == "lost":
            end.side.lose()
        elif which == "closed":
            if not any(item.with_sender for item in end.side.queue(wire.STREAM).messages):
                end.side.end(receives=True)
                end.side.forget_with_sender()
        elif which == "failed":
            if end.transfers:
                end.side.failed(*end.transfers.pop())
        else:
            end.side.end(**{which: True})

    def send(self, end: End, number: int | None = None) -> None:
        token = self.begin()
        number = self.chance.choice(self.queues) if number is None else number
        data = token.to_bytes(8, "big") + bytes(self.chance.choice(LARGE_SIZES if self.moves else SIZES))
        end.sent[number].append(data)
        answer = end.side.send(number, data)
        if answer is Answer.WAITS:
            end.side.wait_send(number, len(data), token)
            end.sends[token] = number, data
        else:
            self.was_sent(end, number, data, answer)

    def was_sent(self, end: End, number: int, data: bytes, answer: Answer) -> None:
        if answer is not Answer.SENT:
            require(answer is Answer.REFUSED or self.over, "a send has ended")
            end.sent[number].remove(data)
        elif number == wire.STREAM:
            end.wrote += data

    def receive(self, end: End, numbers: list[int] | None = None) -> None:
        token = self.begin()
        if numbers is None:
            both = self.several and self.chance.random() < 0.3
            numbers = self.chance.sample(QUEUES, 2) if both else [self.chance.choice(self.queues)]
        for number in numbers:
            data = end.side.receive(number, self.limit if self.chance.random() < 0.1 else _LARGE)
            if data is not Answer.EMPTY:
                self.was_received(end, token, number, data)
                return
        end.side.wait(numbers, token)
        end.receives[token] = numbers

    def was_received(self, end: End, token: int, number: int, data: bytes | Answer) -> None:
        if data is Answer.TOO_LONG:
            end.dropped[number] += 1
        elif data is Answer.ENDED:
            require(self.over, "a receive has ended")
        else:
            assert isinstance(data, bytes)
            if number == wire.STREAM:
                end.read += data
            else:
                end.got[number][token] = data

    def stream(self, end: End) -> None:
        """A write or a read of the byte stream; only one task reads."""
        if self.chance.random() < 0.5:
            self.send(end, wire.STREAM)
        elif not any(wire.STREAM in numbers for numbers in end.receives.values()):
            self.receive(end, [wire.STREAM])

    def run(self, end: End) -> None:
        """Some task runs whose token is due."""
        if end.side.due:
            index = self.chance.randrange(len(end.side.due))
            token = end.side.due[index]
            del end.side.due[index]
            if token in end.sends:
                number, data = end.sends.pop(token)
                self.was_sent(end, number, data, end.side.send_reserved(token, data))
            elif token in end.receives:
                limit = self.limit if self.chance.random() < 0.1 else _LARGE
                number, got = end.side.take(token, limit)
                if got is Answer.BEGIN:
                    got = self.transfer(end, token, number, limit)
                elif got is Answer.SAVE:
                    end.side.save(end.side.holding[token], number)
                if got not in (Answer.EMPTY, Answer.BEGIN, Answer.SAVE):
                    del end.receives[token]
                    self.was_received(end, token, number, got)

    def transfer(self, end: End, token: int, number: int, limit: int) -> Answer:
        """Begins the transfer of a message, or drops it if it is too long."""
        queue = end.side.queue(number)
        item = queue.messages[queue.receives.index(token)]
        if len(item.data) > limit and number != wire.STREAM:
            end.side.drop(token, number)
            return Answer.TOO_LONG
        end.side.begin(token, number)
        end.transfers.append((item, number))
        return Answer.BEGIN

    def move(self, end: End) -> None:
        """A transfer ends."""
        if end.transfers:
            item, number = end.transfers.pop(self.chance.randrange(len(end.transfers)))
            if end.side.moved(item, number):
                end.side.save(item, number)

    def leave(self, end: End) -> None:
        tokens = [token for token in [*end.sends, *end.receives] if self.leave_due or token not in end.side.due]
        if self.moves and self.chance.random() < 0.5:
            tokens = [token for token in tokens if token in end.side.holding] or tokens
        if tokens and self.chance.random() < 0.3:
            token = self.chance.choice(tokens)
            if token in end.sends:
                number, data = end.sends.pop(token)
                end.side.leave_send(token)
                end.sent[number].remove(data)
            else:
                del end.receives[token]
                item = end.side.holding.get(token)
                if item is not None and item.state is State.ARRIVED:
                    end.side.save(item, end.side.holding_queue(token).number)
                end.side.leave(token)
            if token in end.side.due:
                end.side.due.remove(token)

    def deliver(self, end: End) -> None:
        """A frame arrives there."""
        network = self.other(end).network
        if network:
            frame = network.popleft()
            size = len(frame.data) if isinstance(frame, Message) else 0
            if size > 65536 or (size >= HELD and self.chance.random() < 0.7):
                assert isinstance(frame, Message)
                fetch = self.chance.random() < self.fetches
                item = end.side.announced(frame, self.chance.random() < 0.5, fetch)
                if fetch and item in end.side.queue(frame.queue).messages:
                    end.transfers.append((item, frame.queue))
            else:
                end.side.arrived(frame)

    # ---- promises ----

    def check(self) -> None:
        for end in self.ends:
            end.network.extend(end.side.frames)
            end.side.frames.clear()
        for end in self.ends:
            side, there = end.side, self.other(end).side
            for queue in side.queues.values():
                for place, token in enumerate(queue.receives[: len(queue.messages)]):
                    item, held = queue.messages[place], side.holding.get(token)
                    begins = held is None and side.may_begin(queue, place)
                    begins = begins and (len(item.data) <= _LIMIT or side.settled(queue, place))
                    if begins or (held in (None, item) and side.is_at_hand(queue, place)):
                        require(token in side.due, "a message is there, and nobody is woken", queue)
            flying = sum(cost(len(frame.data), side.threshold) for frame in end.network if isinstance(frame, Message))
            grants = sum(frame.amount for frame in self.other(end).network if isinstance(frame, Grant))
            reserved = sum(side.waiting[token][1] for token in side.reserved)
            total = side.credit + reserved + flying + there.outstanding + grants
            require(total == side.peer_window, "credit is lost, or made", total, side.peer_window)
            self.most_waits = max(self.most_waits, len(side.waits), len(there.waits))
            admitted = (len(there.queues) + self.most_waits) * max(
                cost(size, 0) for size in [*SIZES, *LARGE_SIZES]
            ) + LONE
            require(there.unread <= there.window + admitted, "too much is unread", there.unread)
            require(self.other(end).wrote.startswith(end.read), "the byte stream is not what was written")

    def finish(self) -> None:
        """Nobody leaves any more. One queue after the other is read, and gets through though nobody reads the others.
        All arrives, once, in order.
        """
        self.limit = _LARGE
        if self.over:
            self.finish_ends()
            return
        for number in [*self.chance.sample(QUEUES, len(QUEUES)), wire.STREAM]:
            for _ in range(10_000):
                busy = False
                for end in self.ends:
                    busy = busy or bool(end.side.due) or bool(self.other(end).network) or bool(end.transfers)
                    self.run(end)
                    self.move(end)
                    self.deliver(end)
                    self.check()
                if busy:
                    continue
                if all(self.is_through(end, number) for end in self.ends):
                    break
                for end in self.ends:
                    if not end.side.queue(number).receives:
                        self.receive(end, [number])
                        self.check()
                        busy = True
                require(busy, "everybody waits, and nothing comes", number)
        for end in self.ends:
            require(end.read == self.other(end).wrote, "a part of the byte stream is missing")
            for number in QUEUES:
                sent, got = self.other(end).sent[number], end.got[number]
                if number != self.newest:
                    require(len(got) + end.dropped[number] == len(sent), "lost or doubled", number)
                require(set(got.values()) <= set(sent) and len(set(got.values())) == len(got), "made up", number)
                if not self.leave_due and not self.several:
                    order = [sent.index(got[began]) for began in sorted(got)]
                    require(order == sorted(order), "out of order", number, order)

    def is_through(self, end: End, number: int) -> bool:
        waiting = any(number == queue for queue, _ in end.sends.values())
        return not waiting and not self.other(end).side.queue(number).messages

    def finish_ends(self) -> None:
        """Everything ends: nobody waits for ever."""
        for end in self.ends:
            end.side.end(receives=True, sends=True)
            while end.side.due or end.transfers:
                self.run(end)
                self.move(end)
            require(not end.sends and not end.receives, "somebody waits for ever")


def play(seed: int, steps: int, make: Callable[[int, int, int, int], Side] = Side, **options: bool) -> World:
    world = World(seed, make, **options)
    for _ in range(steps):
        world.step()
    world.finish()
    return world
