"""All orders in which three tasks, a progress task, UCX and a timer can meet (``listening_model.py``), and planted
faults, among them those that a first attempt had.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
from listening_model import DUE, IDLE, LEADS, LISTENS, LOOKS, PARKED, RUNS, Worker

from trio_ucx.ucp._engine.listening import Listening, State

#: Stand for the tasks that the library is told of.
TASKS = [object(), object(), object()]


class Wrong(AssertionError):
    """Somebody is owed a wake-up, or two listen."""


def check(worker: Worker) -> None:
    """What holds always, and when everybody sleeps."""
    if worker.leader is not None and worker.progress_task == LISTENS:
        raise Wrong("two tasks wait for the descriptor")
    if worker.tasks.count(LEADS) > 1:
        raise Wrong("two tasks lead")
    if any(worker.must()):
        return
    listens = worker.armed and (worker.leader is not None or worker.progress_task == LISTENS)
    for doing, pending, queued in zip(worker.tasks, worker.pending, worker.queued, strict=True):
        if doing in (LEADS, PARKED):
            if pending or queued:
                raise Wrong("a message is there for a task that sleeps")
            if not listens:
                raise Wrong("a task waits, and nobody listens")
    if not (worker.timer or listens):
        raise Wrong("nobody will ever look")


class NoTimer:
    """Stands for the timer: the test calls ``ticked``."""

    def start(self) -> bool:
        return False

    def cancel(self) -> None:
        pass


def library(worker: Worker) -> Listening:
    """The library's rules, in the state in which the model's worker begins."""
    engine: Any = SimpleNamespace(is_moving=False)
    listening = Listening(engine, lambda: None, lambda: None, NoTimer(), always=False)
    listening.most, listening.in_a_row = worker.most, worker.in_a_row
    return listening


def follow(listening: Listening, before: Worker, what: str, task: int, after: Worker) -> Listening:
    """Calls what the library calls in a step of the model's, and compares the states."""
    listening = copy.copy(listening)
    if what == "progress":
        listening.begin()
    for number, (was, now) in enumerate(zip(before.tasks, after.tasks, strict=True)):
        if was == PARKED and now == DUE:
            listening.woken(TASKS[number])
    was, now = before.tasks[task], after.tasks[task]
    if what != "progress":
        listening.waiting += (was == IDLE) - (now == IDLE)
    if what == "progress":
        if listening.may_be_free():
            listening.be_free()
    elif what == "hook":
        assert listening.nobody_listens()
        listening.one_left()
    elif what == "timer":
        while listening.ticked():
            pass
    elif what in ("run", "cancel"):
        if was == LEADS != now:
            listening.stop_leading()
        if now == LEADS != was:
            listening.lead(SimpleNamespace(outcome=None))
        listening.parked -= was == PARKED != now and now != DUE
        if now == PARKED != was:
            listening.parked += 1
            listening.serve()
        if now == IDLE:
            listening.go_on()
    led, free = after.leader is not None, after.free
    if listening.state is not (State.LED if led else State.FREE if free else State.SERVED):
        raise Wrong(f"after {what}, the library's state is {listening.state.name}")
    return listening


def explore(worker: Worker, listening: Listening | None = None) -> int:
    """Checks all states that can be reached; returns how many. If ``listening`` is given, compares it."""
    seen, todo = {worker.key()}, [(worker, listening)]
    while todo:
        before, rules = todo.pop()
        for step in [*before.must(), *before.may()]:
            after = before.after(*step)
            later = follow(rules, before, *step, after) if rules is not None else None
            if after.key() not in seen:
                check(after)
                seen.add(after.key())
                todo.append((after, later))
    return len(seen)


def explore_all(make: type[Worker]) -> int:
    """Small worlds: messages, starts of waits, polls, cancellations, refusals to be armed, events that get lost."""
    worlds = [
        ([1, 1, 0], 3, 0, 1, 0, 0),
        ([1, 1, 1], 3, 0, 1, 1, 0),
        ([2, 1, 0], 4, 2, 0, 0, 0),
        ([1, 1, 0], 3, 2, 1, 1, 0),
        ([1, 1, 0], 3, 0, 1, 0, 2),
        ([1, 1, 1], 3, 2, 1, 0, 0, 1),
        ([1, 1, 1], 4, 1, 1, 1, 0, 2),
        ([3, 1, 0], 5, 1, 1, 0, 0, 3, 1),
        ([2, 1, 0], 4, 1, 1, 0, 1, 1, 0),
    ]
    workers = [make([IDLE] * 3, *world) for world in worlds]
    return sum(explore(worker, library(worker) if make is Worker else None) for worker in workers)


def test_all_orders() -> None:
    """The library follows the model in each step."""
    assert explore_all(Worker) > 10_000


class NobodyAfterTheLeader(Worker):
    """A leader that is cancelled goes, and nobody listens."""

    def cancelled(self, task: int) -> None:
        self.tasks[task] = IDLE


class LooksAlways(Worker):
    """A task that looks takes events from whoever listens."""

    def look(self, task: int) -> None:
        if not self.free and not self.queued[task]:
            self.progress()
        super().look(task)


class ParksWithoutALook(Worker):
    """A message that came between the last look and the token is not seen."""

    def look(self, task: int) -> None:
        if self.tasks[task] == LOOKS and not self.free:
            self.tasks[task] = PARKED
        else:
            super().look(task)


class ForgetsTheLeader(Worker):
    """A task that goes on makes the progress task listen, whoever else does."""

    def go_on(self) -> None:
        if PARKED in self.tasks:
            self.serve()
        else:
            super().go_on()


class ArmsBlindly(Worker):
    """Events that came right before arming are lost."""

    def progress_after_arming(self) -> None:
        pass


class HasNoTimer(Worker):
    def go_on(self) -> None:
        super().go_on()
        self.timer = False


class LeavesTokens(Worker):
    """A leader that parks tells nobody of what it has found for others, and the progress task only of what is new."""

    def lead(self, task: int) -> None:
        before = self.tasks[:]
        super().lead(task)
        self._forget(before, [True] * len(before))

    def progress(self) -> bool:
        before, old = self.tasks[:], [not count for count in self.pending]
        moved = super().progress()
        self._forget(before, old)
        return moved

    def _forget(self, before: list[str], those: list[bool]) -> None:
        for task, was in enumerate(before):
            if those[task] and was == PARKED and self.tasks[task] == DUE:
                self.tasks[task] = PARKED


class ListensAfterAPoll(Worker):
    """The progress task waits for the descriptor after it has polled, and has not armed."""

    def run_progress_task(self) -> None:
        super().run_progress_task()
        if self.progress_task == RUNS:
            self.progress_task = LISTENS


class HasNoHook(Worker):
    """The task for which the worker was free does something else, and nobody listens for those that are parked."""

    def must(self) -> Iterator[tuple[str, int]]:
        return (step for step in super().must() if step[0] != "hook")


FAULTS = [
    HasNoHook,
    ListensAfterAPoll,
    LeavesTokens,
    NobodyAfterTheLeader,
    LooksAlways,
    ParksWithoutALook,
    ForgetsTheLeader,
    ArmsBlindly,
    HasNoTimer,
]


@pytest.mark.parametrize("fault", FAULTS)
def test_planted_faults_are_found(fault: type[Worker]) -> None:
    with pytest.raises(Wrong):
        explore_all(fault)
