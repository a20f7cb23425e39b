"""Waiting for what UCX will report: a task polls for a moment before it parks.

Waking a parked task takes longer than most answers, so a task that has to wait polls in C first. It polls only while no
other task has work to do, which two cheap checks find out:

* All tasks that this worker woke have run.
* The schedule point before the poll was short. Every call owes Trio a schedule point anyway, and other runnable tasks
  run during it.

C code decides for how long a task polls (``adaptive_poll.c``): the time grows while polling finds something, and
polling stops while it does not. Each millisecond the poll is interrupted by a schedule point, for Trio's deadlines and
signals.

The worker is not armed while tasks poll. Over shared memory, an armed worker costs its peer a system call for every
message, and itself an event. A task that parks arms the worker, or lets the progress task do that. A task that found
what it waited for goes on without arming, because it will most probably wait again; meanwhile its polls serve other
waiting tasks, too. If it does not wait again, ``arming.py`` sees to it that the worker is armed.
"""

from __future__ import annotations

import math
from time import perf_counter
from typing import TYPE_CHECKING, Any

import trio
from outcome import Error

from ..._native import lib
from .._util import check_timeout
from .arming import Event
from .pending import Pending

if TYPE_CHECKING:
    from .engine import Engine

#: The default of ``spin``, in seconds: three times what it costs to wake a task.
DEFAULT_SPIN = 100e-6
#: Its limit, in seconds: a task that waits in vain uses a core for so long.
MOST_SPIN = 1.0
#: Seconds. A schedule point takes 3 to 10 microseconds by itself; a longer one includes the work of other tasks.
_ALONE = 25e-6
#: Seconds. A schedule point between these two limits may have included the progress task only, or a delay of the
#: machine: another one is measured, up to so many in all.
_SURELY_OTHERS = 100e-6
_MEASURED = 3


def check_spin(spin: float | None) -> float:
    if spin is None:
        return DEFAULT_SPIN
    spin = check_timeout(spin, "spin")
    if spin > MOST_SPIN:
        raise ValueError(f"spin must be at most {MOST_SPIN} seconds, not {spin}: polling uses a whole core")
    return spin


def check_yield_interval(yield_interval: float) -> float:
    yield_interval = check_timeout(yield_interval, "yield_interval")
    if yield_interval == math.inf:
        raise ValueError("yield_interval must be finite: other tasks would never run")
    return yield_interval


class Waiting:
    """How the tasks of one worker wait."""

    __slots__ = ("_engine", "_yield_interval", "_yielded", "parked", "polling", "woken")

    def __init__(self, engine: Engine, spin: float, yield_interval: float) -> None:
        self._engine = engine
        self.polling = spin > 0
        lib.tu_poll_bound(engine.handle, int(spin * 1e9))
        self._yield_interval = yield_interval
        #: When a task last passed a schedule point.
        self._yielded = 0.0
        #: How many tasks are parked here, and how many of them were woken and have not run yet.
        self.parked = 0
        self.woken = 0

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
        # If another task passed that schedule point, ours has run since, so it yielded later.
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
        if not self._engine.arming.armed:
            self._go_on()

    async def wait(self, pending: Pending, *, watch: bool = False) -> Any:
        """Waits for something pending. A schedule point, unless one was passed within the ``yield_interval``.

        If the wait is cancelled, so is ``pending``; with ``watch``, ``pending`` goes on.
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
            if engine.arming.armed_at != engine.progress_count:  # not armed
                self._go_on()
        return pending.result()

    async def _poll(self, pending: Pending) -> None:
        engine = self._engine
        while await self._alone() and not self.woken:
            while pending.outcome is None and not self.woken and engine.take(lib.tu_poll):
                pass
            if pending.outcome is not None or self.woken or engine.handle is None:
                break
            if not lib.tu_poll_continues(engine.handle):
                break
            if trio.current_effective_deadline() == -math.inf:
                break  # cancelled, which parking tells
            engine.arming.handle(Event.POLLED)  # the progress task need not look
            self._yielded = 0.0  # whatever the yield_interval: deadlines and signals wait
        if isinstance(pending.outcome, Error):
            await trio.lowlevel.checkpoint_if_cancelled()  # as a parked task, which gets the cancellation first

    async def poll_for_sequences(self) -> None:
        """For the progress task: sequences go on (``native.h``) whose tasks are parked. A schedule point, as
        :meth:`wait` is."""
        if await self._alone() and not self.woken:
            self._engine.take(lib.tu_poll)

    async def _alone(self) -> bool:
        """A schedule point, unless one was passed lately. Returns whether no other task seems to have work to do."""
        if self._yield_interval and self._yielded_lately():
            return True
        took = 0.0
        for _ in range(_MEASURED):
            began = perf_counter()
            await trio.lowlevel.cancel_shielded_checkpoint()
            self._yielded = perf_counter()
            took = self._yielded - began
            if took < _ALONE or took > _SURELY_OTHERS:
                break
        return took < _ALONE

    async def _park(self, pending: Pending, watch: bool) -> None:
        engine = self._engine
        if engine.arming.armed_at != engine.progress_count and not self.woken:
            engine.arming.handle(Event.PARKS)
            if pending.outcome is not None:
                await self.schedule_point()
                return
        engine.watch_events()
        self.parked += 1
        pending.expected = False
        pending.on_wake = self.wake
        try:
            await (pending.watch() if watch else pending.wait())
        finally:
            self.parked -= 1
            if pending.on_wake is None:
                self.woken -= 1
            pending.on_wake = None
            if self._yield_interval:
                self._yielded = perf_counter()

    def wake(self) -> None:
        """Counts a parked task that was made runnable."""
        self.woken += 1

    def _go_on(self) -> None:
        """A task goes on, and the worker is not armed."""
        arming = self._engine.arming
        # Otherwise a woken task will do this when it goes on, or the timer looks at the worker.
        if not self.woken and (self.parked or not arming.steady):
            arming.went_on(alone=self.polling and not self.parked)
