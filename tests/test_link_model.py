"""Two sides of the model of a link (``link_model.py``) and a network between them: random steps, and faults planted in
the model to show that the steps find such."""

from __future__ import annotations

import pytest
from helpers import Rounds
from link_model import Answer, Item, Queue, Side, State
from link_world import Wrong, play


@pytest.mark.parametrize("leave_due", [False, True])
@pytest.mark.parametrize("several", [False, True])
def test_random_steps(leave_due: bool, several: bool, rounds: Rounds) -> None:
    for seed in range(rounds(20, 2000)):
        play(seed, 500, leave_due=leave_due, several=several)


def test_ends(rounds: Rounds) -> None:
    for seed in range(rounds(40, 2000)):
        play(seed, 300, leave_due=True, several=True, ends=True)


# ---- planted faults ----


class ForgetsTheNext(Side):
    """A receive that leaves does not wake the next one."""

    def leave(self, token: int) -> None:
        for queue in self.waits.pop(token):
            queue.receives.remove(token)
            self._notice(queue)
        self.woken.discard(token)
        if (item := self.holding.pop(token, None)) is not None:
            item.holder = None


class TakesTheFirst(Side):
    """Whoever runs first gets the first message."""

    def _take(self, queue: Queue, place: int, limit: int) -> bytes | Answer:
        return super()._take(queue, 0, limit)


class KeepsTheReserved(Side):
    """A send that leaves does not give back its credit."""

    def leave_send(self, token: int) -> None:
        self.credit -= self.waiting[token][1] if token in self.reserved else 0
        super().leave_send(token)


class NumbersWhenReserved(Side):
    """A message is numbered when its credit is reserved; one that is never sent makes an ADMIT void."""

    def _reserve(self, queue: Queue) -> None:
        super()._reserve(queue)
        queue.last_sent = self.sent = self.sent + 1


class WakesAll(Side):
    """All sends of a queue may be due at the same time."""

    def _wake_sends(self) -> None:
        super()._wake_sends()
        for token, (_, amount) in self.waiting.items():
            if token not in self.reserved and self._suffices(amount):
                self.credit -= amount
                self.reserved.add(token)
                self.due.append(token)


class DoesNotAdmit(Side):
    def _found_empty(self, queue: Queue) -> None:
        pass


class CompletesOutOfOrder(Side):
    """A receive takes its message before the receives in front have theirs."""

    def settled(self, queue: Queue, place: int) -> bool:
        return True


class KeepsWhatIsAnothers(Side):
    """A receive takes the message in its buffer, although the one before is its own by now."""

    def take(self, token: int, limit: int) -> tuple[int, bytes | Answer]:
        item = self.holding.get(token)
        if item is None or item.state is not State.ARRIVED:
            return super().take(token, limit)
        queue = self.holding_queue(token)
        del self.holding[token]
        queue.messages.remove(item)
        self._consumed(len(item.data))
        self.leave(token)
        return queue.number, item.data


class DropsWithTheReceive(Side):
    """A message whose transfer is cancelled is gone."""

    def leave(self, token: int) -> None:
        for queue in self.waits[token]:
            if (item := self.holding.get(token)) in queue.messages:
                queue.messages.remove(item)
                self._consumed(len(item.data))
        super().leave(token)


class FetchesInSilence(Side):
    """A message that was fetched wakes nobody."""

    def _became_ready(self, item: Item, number: int) -> None:
        item.state = State.READY


class ForgetsWhoWaits(Side):
    """The end of receives wakes nobody."""

    def end(self, *, receives: bool = False, drains: bool = False, sends: bool = False) -> None:
        super().end(drains=drains, sends=sends)
        self.receives_end |= receives


class ReportsOnce(Side):
    def _report(self) -> None:
        if not self.grants:
            super()._report()


@pytest.mark.parametrize(
    "fault",
    [
        ForgetsTheNext,
        TakesTheFirst,
        KeepsTheReserved,
        NumbersWhenReserved,
        WakesAll,
        DoesNotAdmit,
        ReportsOnce,
        ForgetsWhoWaits,
        CompletesOutOfOrder,
        KeepsWhatIsAnothers,
        DropsWithTheReceive,
        FetchesInSilence,
    ],
)
def test_planted_faults_are_found(fault: type[Side]) -> None:
    with pytest.raises((Wrong, LookupError, ValueError, StopIteration)):
        for seed in range(100):
            play(seed, 500, fault, leave_due=seed % 2 == 1, ends=seed % 8 == 7)
