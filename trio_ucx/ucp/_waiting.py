"""Waiting: how a task waits for something that UCX will tell, and what its schedule points cost.

A task that has to wait polls in C for a moment before it parks, because waking it takes longer than most answers. It
polls only while nothing else can run, as far as that can be known for nearly nothing:

* of the tasks that this worker woke, all have run;
* the schedule point that comes first, and that every call owes Trio anyway, took about as little as it can. (Had others
  been runnable, they would have run meanwhile.)

For how long is decided in C (``adaptive_poll.c``): it grows while it pays and ends when it does not.

While tasks poll, the worker is not armed: over shared memory, armed means that every message of the peer costs it a
system call, and us an event. Whoever parks last arms. A task that found what it waited for goes on without arming: it
will most probably wait again, and others that wait get what it finds. If it does not, the worker is armed as soon as
Trio has nothing else to run (``_between.py``).
"""

from __future__ import annotations

import math
from time import perf_counter, perf_counter_ns
from typing import TYPE_CHECKING, Any

import trio

from .._native import lib
from ._pending import Pending
from ._util import check_timeout

if TYPE_CHECKING:
    from ._engine import Engine

#: The default of ``spin``, in seconds: three times what it costs to wake a task.
DEFAULT_SPIN = 100e-6
#: Its limit, in seconds: all of Trio stands still meanwhile.
MOST_SPIN = 1.0
#: A schedule point that took longer than this many times the shortest: others have run.
_OTHERS = 1.7
#: Nanoseconds. None is believed to take longer by itself: the first ones may have been measured while others ran.
_LONGEST = 10_000.0
#: One that took longer than this many times the shortest: certainly. In between, it is worth another look.
_BUSY = 6
_LOOKS = 3


def check_spin(spin: float | None) -> float:
    if spin is None:
        return DEFAULT_SPIN
    spin = check_timeout(spin, "spin")
    if spin > MOST_SPIN:
        raise ValueError(f"spin must be at most {MOST_SPIN} seconds, not {spin}: nothing else runs meanwhile")
    return spin


def check_yield_interval(yield_interval: float) -> float:
    yield_interval = check_timeout(yield_interval, "yield_interval")
    if yield_interval == math.inf:
        raise ValueError("yield_interval must be finite: other tasks would never run")
    return yield_interval


class Waiting:
    """One worker's waits."""

    __slots__ = ("_engine", "_shortest", "_yield_interval", "_yielded", "parked", "polling", "polls_for_all", "woken")

    def __init__(self, engine: Engine, spin: float, yield_interval: float) -> None:
        self._engine = engine
        self.polling = spin > 0
        lib.tu_poll_bound(engine.handle, int(spin * 1e9))
        self._yield_interval = yield_interval
        #: When a task last passed a schedule point.
        self._yielded = 0.0
        #: Nanoseconds of the shortest schedule points; creeps up, so that it is not for ever.
        self._shortest = _LONGEST
        #: How many tasks are parked here, and how many of them were woken and have not run yet.
        self.parked = 0
        self.woken = 0
        #: Whether polling has been paying for tasks that wait: then nobody else need look.
        self.polls_for_all = False

    async def schedule_point(self) -> None:
        """Lets other tasks run, if this has not been done for the ``yield_interval``. No cancel point."""
        if self._yield_interval:
            if self._yielded_lately():
                return
            await trio.lowlevel.cancel_shielded_checkpoint()
            self._yielded = perf_counter()
        else:
            await trio.lowlevel.cancel_shielded_checkpoint()

    def _yielded_lately(self) -> bool:
        # Whoever passed a schedule point then: if that was another task, ours has run since, so it yielded later.
        return perf_counter() - self._yielded < self._yield_interval

    def poll_at_once(self) -> bool:
        """Polls without a schedule point, where none is due and it has been paying. Whether something was delivered.

        If so, call :meth:`went_on` before going on.
        """
        if not self._yield_interval or not self.polling or self.woken:
            return False
        return self._yielded_lately() and self._engine.take(lib.tu_poll_at_once)

    def went_on(self) -> None:
        """A task found what it wanted, by polling."""
        if not self._engine.armed:
            self._go_on()

    async def wait(self, pending: Pending, *, watch: bool = False) -> Any:
        """Waits for something pending: always a schedule point.

        Cancelling that abandons it; with ``watch``, changes nothing about it.
        """
        engine = self._engine
        pending.expected = True
        try:
            if self.polling and not self.woken and engine.handle is not None and lib.tu_poll_begin(engine.handle):
                await self._poll(pending)
            if pending.outcome is None:
                await self._park(pending, watch)
        finally:
            pending.expected = False
            if not engine.armed:
                self._go_on()
        return pending.result()

    async def _poll(self, pending: Pending) -> None:
        engine = self._engine
        while await self._alone(pending) and not self.woken:
            while pending.outcome is None and not self.woken and engine.take(lib.tu_poll):
                pass
            if pending.outcome is not None or self.woken or not lib.tu_poll_goes_on(engine.handle):
                break
            self.polls_for_all = True  # a request chain goes on: the progress task need not look

    async def poll_chains(self) -> None:
        """For the progress task: request chains go on whose tasks are parked. A schedule point."""
        if await self._alone() and not self.woken:
            self._engine.take(lib.tu_poll)

    async def _alone(self, pending: Pending | None = None) -> bool:
        """A schedule point, or a few. Returns whether no other task seems to be runnable."""
        if self._yield_interval and self._yielded_lately():
            return True
        alone = False
        for _ in range(_LOOKS):
            woken = self._engine.parked and not self._engine.armed  # the progress task, too: it is about to run
            begin = perf_counter_ns()
            await trio.lowlevel.cancel_shielded_checkpoint()
            took = perf_counter_ns() - begin
            if woken:
                continue
            self._shortest = min(took, self._shortest * 1.001, _LONGEST)
            alone = took < self._shortest * _OTHERS
            if alone or took > self._shortest * _BUSY or (pending is not None and pending.outcome is not None):
                break  # else it may have been the progress task, or the machine
        if self._yield_interval:
            self._yielded = perf_counter()
        return alone

    async def _park(self, pending: Pending, watch: bool) -> None:
        engine = self._engine
        self.polls_for_all = False
        if not engine.armed and not self.woken:
            engine.rearm()
            if pending.outcome is not None:
                await self.schedule_point()
                return
        engine.watch_events()
        self.parked += 1
        pending.expected = False
        pending.parked_at = self
        try:
            await (pending.watch() if watch else pending.wait())
        finally:
            self.parked -= 1
            if pending.parked_at is None:
                self.woken -= 1
            pending.parked_at = None
            if self._yield_interval:
                self._yielded = perf_counter()

    def wake(self) -> None:
        """A task that is parked here was made runnable."""
        self.woken += 1

    def _go_on(self) -> None:
        """A task goes on, and the worker is not armed."""
        if not self.woken:  # else so will others
            self.polls_for_all = self.polling
            if self.parked or not self._engine.between.trusted:
                self._engine.between.went_on(alone=self.polling and not self.parked)
