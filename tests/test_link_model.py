"""Two sides of the model of a link (``link_model.py``) and a network between them: random steps, and faults planted in
the model to show that the steps find such."""

from __future__ import annotations

import collections
import random
from collections.abc import Callable

import attrs
import pytest
from helpers import Rounds
from link_model import Admit, Frame, Grant, Message, Queue, Side, Stalled, cost

from trio_ucx._rules.credit import LONE, ReceiveCredit
from trio_ucx._rules.tag_queue import TagQueue

QUEUES = range(3)
#: Some need all of a window, or more.
SIZES = [0, 0, 1, 8, 8, 100, 1024, 1025, 4000, 20_000]


class Wrong(AssertionError):
    """The model breaks a promise."""


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
    sends: dict[int, bytes] = attrs.Factory(dict)
    #: The receives that wait, by token.
    receives: set[int] = attrs.Factory(set)
    #: By queue: the messages that were sent or wait to be sent, in the order in which their sends began; and what was
    #: received, by when its receive began.
    sent: dict[int, list[bytes]] = attrs.Factory(lambda: collections.defaultdict(list))
    got: dict[int, dict[int, bytes]] = attrs.Factory(lambda: collections.defaultdict(dict))


class World:
    """Two ends, and a chance.

    Args:
        make: makes a side.
        leave_due: whether a task may leave after its token was due. The order in which receives get their messages is
            checked only if not. (Trio does not cancel a task that is about to run.)
        several: whether receives wait in several queues.
    """

    def __init__(
        self, seed: int, make: Callable[[int, int], Side] = Side, leave_due: bool = False, several: bool = False
    ):
        self.chance = random.Random(seed)
        windows = [self.chance.choice([1, 1000, 4096, 16384, 100_000]) for _ in range(2)]
        self.ends = [End(make(windows[0], windows[1])), End(make(windows[1], windows[0]))]
        self.leave_due = leave_due
        self.several = several
        self.newest = self.chance.choice([None, None, 2])
        self.began = 0

    def begin(self) -> int:
        self.began += 1
        return self.began

    def other(self, end: End) -> End:
        return self.ends[end is self.ends[0]]

    # ---- steps ----

    def step(self) -> None:
        end = self.chance.choice(self.ends)
        self.chance.choice([self.send, self.receive, self.run, self.run, self.leave, self.deliver, self.deliver])(end)
        self.check()

    def send(self, end: End) -> None:
        number, token = self.chance.choice(QUEUES), self.begin()
        data = token.to_bytes(8, "big") + bytes(self.chance.choice(SIZES))
        end.sent[number].append(data)
        if not end.side.send(number, data):
            end.side.wait_send(number, len(data), token)
            end.sends[token] = data

    def receive(self, end: End, numbers: list[int] | None = None) -> None:
        began = self.begin()
        if numbers is None:
            numbers = self.chance.sample(QUEUES, 2 if self.several and self.chance.random() < 0.3 else 1)
        for number in numbers:
            data = end.side.receive(number)
            if data is not None:
                end.got[number][began] = data
                return
        end.side.wait(numbers, began)
        end.receives.add(began)

    def run(self, end: End) -> None:
        """Some task runs whose token is due."""
        if end.side.due:
            index = self.chance.randrange(len(end.side.due))
            token = end.side.due[index]
            del end.side.due[index]
            if token in end.sends:
                end.side.send_reserved(token, end.sends.pop(token))
            elif token in end.receives:
                end.receives.remove(token)
                number, data = end.side.take(token)
                end.got[number][token] = data

    def leave(self, end: End) -> None:
        tokens = [token for token in [*end.sends, *end.receives] if self.leave_due or token not in end.side.due]
        if tokens and self.chance.random() < 0.3:
            token = self.chance.choice(tokens)
            if token in end.sends:
                data = end.sends.pop(token)
                end.side.leave_send(token)
                for sent in end.sent.values():
                    if data in sent:
                        sent.remove(data)
            else:
                end.receives.remove(token)
                end.side.leave(token)
            with_it = [due for due in end.side.due if due != token]
            end.side.due.clear()
            end.side.due.extend(with_it)

    def deliver(self, end: End) -> None:
        """A frame arrives there."""
        network = self.other(end).network
        if network:
            end.side.queue(2).newest_only = self.newest == 2
            end.side.arrived(network.popleft())

    # ---- promises ----

    def check(self) -> None:
        for end in self.ends:
            end.network.extend(end.side.frames)
            end.side.frames.clear()
        for end in self.ends:
            side, there = end.side, self.other(end).side
            for queue in side.queues.values():
                due = queue.receives[: len(queue.messages)]
                require(all(token in side.due for token in due), "a message is there, and nobody is woken", queue)
            flying = sum(cost(len(frame.data)) for frame in end.network if isinstance(frame, Message))
            grants = sum(frame.amount for frame in self.other(end).network if isinstance(frame, Grant))
            reserved = sum(side.waiting[token][1] for token in side.reserved)
            total = side.credit + reserved + flying + there.outstanding + grants
            require(total == side.peer_window, "credit is lost, or made", total, side.peer_window)
            admitted = len(there.queues) * max(map(cost, SIZES)) + LONE
            require(there.unread <= there.window + admitted, "too much is unread", there.unread)

    def finish(self) -> None:
        """Nobody leaves any more. One queue after the other is read, and gets through though nobody reads the others.
        All arrives, once, in order.
        """
        for number in self.chance.sample(QUEUES, len(QUEUES)):
            for _ in range(10_000):
                busy = False
                for end in self.ends:
                    busy = busy or bool(end.side.due) or bool(self.other(end).network)
                    self.run(end)
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
            for number in QUEUES:
                sent, got = self.other(end).sent[number], end.got[number]
                if number != self.newest:
                    require(sorted(got.values()) == sorted(sent), "lost or doubled", number)
                require(set(got.values()) <= set(sent) and len(set(got.values())) == len(got), "made up", number)
                if not self.leave_due and not self.several:
                    order = [sent.index(got[began]) for began in sorted(got)]
                    require(order == sorted(order), "out of order", number, order)

    def is_through(self, end: End, number: int) -> bool:
        waiting = any(data in end.sent[number] for data in end.sends.values())
        return not waiting and not self.other(end).side.queue(number).messages


def play(seed: int, steps: int, make: Callable[[int, int], Side] = Side, **options: bool) -> None:
    world = World(seed, make, **options)
    for _ in range(steps):
        world.step()
    world.finish()


@pytest.mark.parametrize("leave_due", [False, True])
@pytest.mark.parametrize("several", [False, True])
def test_random_steps(leave_due: bool, several: bool, rounds: Rounds) -> None:
    for seed in range(rounds(20, 2000)):
        play(seed, 500, leave_due=leave_due, several=several)


# ---- planted faults ----


class ForgetsTheNext(Side):
    """A receive that leaves does not wake the next one."""

    def leave(self, token: int) -> None:
        for queue in self.waits.pop(token):
            queue.receives.remove(token)
        self.woken.discard(token)


class TakesTheFirst(Side):
    """Whoever runs first gets the first message."""

    def _take(self, queue: Queue, place: int) -> bytes:
        return super()._take(queue, 0)


class KeepsTheReserved(Side):
    """A send that leaves does not give back its credit."""

    def leave_send(self, token: int) -> None:
        self.credit -= self.waiting[token][1] if token in self.reserved else 0
        super().leave_send(token)


class NumbersWhenReserved(Side):
    """A message is numbered when its credit is reserved; one that is never sent makes an ADMIT void."""

    def _wake_sends(self) -> None:
        before = set(self.reserved)
        super()._wake_sends()
        for token in self.reserved - before:
            self.sent += 1
            self.waiting[token][0].last_sent = self.sent


class WakesAll(Side):
    """All sends of a queue may be due at the same time."""

    def _wake_sends(self) -> None:
        for token, (_, amount) in self.waiting.items():
            if token not in self.reserved and self._suffices(amount):
                self.credit -= amount
                self.reserved.add(token)
                self.due.append(token)
        super()._wake_sends()


class DoesNotAdmit(Side):
    def _found_empty(self, queue: Queue) -> None:
        pass


class ReportsOnce(Side):
    def _report(self) -> None:
        if not self.grants:
            super()._report()


@pytest.mark.parametrize(
    "fault", [ForgetsTheNext, TakesTheFirst, KeepsTheReserved, NumbersWhenReserved, WakesAll, DoesNotAdmit, ReportsOnce]
)
def test_planted_faults_are_found(fault: type[Side]) -> None:
    with pytest.raises(Wrong):
        for seed in range(60):
            play(seed, 500, fault, leave_due=seed % 2 == 1)


# ---- the rules of today ----


def test_grants_as_today() -> None:
    """A side answers with the frames that today's rules say."""
    chance = random.Random(1)
    for _ in range(200):
        side, rules = Side(window := chance.choice([1, 1000, 4096, 20_000]), 1000), ReceiveCredit(window, 0)
        queues: dict[int, TagQueue] = {number: TagQueue(number, None) for number in QUEUES}  # type: ignore[arg-type]
        expected: list[Frame] = []

        def granted(amount: int, rules: ReceiveCredit = rules, expected: list[Frame] = expected) -> None:
            expected += [Grant(amount, rules.received)] if amount else []

        for step in range(300):
            number = chance.choice(QUEUES)
            queue = side.queue(number)
            what = chance.random()
            if what < 0.4:
                data = bytes(chance.choice(SIZES))
                side.arrived(Message(number, data))
                rules.arrived(queues[number], len(data))
            elif what < 0.7 and queue.messages:
                data = queue.messages[0]
                side.receive(number)
                granted(rules.consumed(len(data)))
            elif what < 0.85:
                grants = chance.choice([side.granted, side.granted - 1])
                side.arrived(Stalled(grants))
                granted(rules.peer_stalled(grants))
            elif not queue.messages:
                side.wait([number], step)
                amount, admits = rules.found_empty(queues[number])
                granted(amount)
                expected += [Admit(number, rules.received)] if admits else []
                side.leave(step)
            assert list(side.frames) == expected
