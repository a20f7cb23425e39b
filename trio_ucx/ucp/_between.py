"""Deferred work: batches not yet sent, a worker not yet armed, and the hooks that bound how long they wait.

A task defers two things, because it will most probably come back at once:

* *Batches.* A message that closely follows another may wait for more, to be sent as one with them.
* *Arming.* A task that found what it waited for, by polling, goes on without arming the worker.

The work is done, at the latest, when Trio has nothing more to run, or has run other tasks for ``MOMENT``. Trio calls an
instrument before it waits for events, and tells it how long it may wait. (Batches are sent before that whenever
anything makes the worker progress, and so always before a task polls.)

The instrument costs half a microsecond for each round of Trio's loop. So when a task has come back ``_STEADY`` times,
and no other task waits, the instrument is removed, and the safety net's timer checks every few milliseconds.

A second instrument serves workers whose tasks do not poll: after Trio has waited, perhaps for an event of the worker,
parked tasks are woken at once, before the progress task has run.
"""

from __future__ import annotations

from contextlib import suppress
from time import perf_counter
from typing import TYPE_CHECKING, Protocol

import trio

from .._native import lib

if TYPE_CHECKING:
    from ._engine import Engine

#: Seconds for which something is left open while other tasks run; and within which one message closely follows another.
#: More would save calls, but a receiver that polls for DEFAULT_SPIN should not have to park meanwhile.
MOMENT = 75e-6
#: The instrument goes when Trio was idle so often with nothing left open: adding it takes as long as some messages.
_IDLE = 100
#: Who delivers at once goes after so many rounds in which there was no waiting.
_BUSY = 4
#: As often as this a task has come back that is trusted to do so once more.
_STEADY = 64


class DeferredBatch(Protocol):
    """The sending half of a connection, with messages that wait to be sent as a batch."""

    def send_batch(self) -> None:
        """Hands them to UCX, and settles the engine if something remains to be done about them. Never raises."""

    def internal_error(self, error: BaseException) -> None:
        """Handing them to UCX failed by an internal error: ends the connection. Never raises."""


class _Hook(trio.abc.Instrument):
    """An instrument that comes and goes often."""

    #: The name of its only method that Trio calls.
    method: str

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._watching = False

    def __dir__(self) -> tuple[str]:
        return (self.method,)  # Trio looks through these names: with all of them, that takes 10 microseconds

    def watch(self) -> None:
        if not self._watching:
            self._watching = True
            trio.lowlevel.add_instrument(self)

    def stop_watching(self) -> None:
        if self._watching:
            self._watching = False
            with suppress(KeyError):  # Trio drops an instrument that has raised
                trio.lowlevel.remove_instrument(self)


class Between(_Hook):
    """What is left open on one worker."""

    method = "before_io_wait"

    def __init__(self, engine: Engine) -> None:
        super().__init__(engine)
        #: Who holds something back; some have sent it meanwhile. And since when.
        self.holders: set[DeferredBatch] = set()
        self._since = 0.0
        self._unarmed = False
        # The worker's turns, and when they were last seen to grow.
        self._turns = 0
        self._turned = 0.0
        self._idle = 0
        #: How often in a row the only task that waits has come back; and whether that is trusted.
        self._returns = 0
        self.trusted = False

    def hold(self, holder: DeferredBatch) -> None:
        """It holds messages back."""
        if not self.holders:
            self._since = perf_counter()
            self.watch()
        self.holders.add(holder)

    def leave_unarmed(self) -> None:
        """Somebody will most probably come back."""
        if not self._unarmed and not self.trusted:
            self._unarmed = True
            self.watch()

    def went_on(self, *, alone: bool) -> None:
        """A task found what it waited for, and leaves the worker unarmed; ``alone`` if no other one waits."""
        self._returns = self._returns + 1 if alone else 0
        self.trusted = self._returns > _STEADY and not self.holders
        if self.trusted:
            self._unarmed = False
            self.stop_watching()
            self._engine.arm_soon()
        else:
            self.leave_unarmed()

    def attend(self) -> None:
        """Nobody has come back."""
        self._unarmed = self.trusted = False
        self._returns = 0
        self._engine.call_soon(self._engine.attend)

    def watch(self) -> None:
        self._idle = 0
        super().watch()

    def send_held(self) -> None:
        """Sends everything that is held back."""
        holders, self.holders = self.holders, set()
        for holder in holders:
            try:
                holder.send_batch()
            except BaseException as error:
                holder.internal_error(error)

    def before_io_wait(self, timeout: float) -> None:
        try:
            if self.holders and (timeout > 0 or perf_counter() - self._since > MOMENT):
                self._engine.send_held()
            if self._unarmed:
                if self._engine.armed:
                    self._unarmed = False
                elif timeout > 0 or not self._turning():
                    self.attend()
            elif timeout > 0 and not self.holders:
                self._idle += 1
                if self._idle > _IDLE:
                    self.stop_watching()
        except BaseException as error:  # Trio would drop this instrument
            self._engine.internal_error(error)

    def _turning(self) -> bool:
        """Whether somebody made the worker progress lately."""
        turns = self._engine.turns
        if turns != self._turns:
            self._turns = turns
            self._turned = perf_counter()
            return True
        return perf_counter() - self._turned <= MOMENT


class Prompt(_Hook):
    """Delivers in the round that begins with an event.

    If only the progress task did, who waits would run a round later.
    """

    method = "after_io_wait"

    def __init__(self, engine: Engine) -> None:
        super().__init__(engine)
        self._busy = 0  # rounds since an event was waited for
        self._turn = -1  # the last that delivered here, and left the rest to others

    def watch(self) -> None:
        """A task parks."""
        self._busy = 0
        super().watch()

    def after_io_wait(self, timeout: float) -> None:
        engine = self._engine
        try:
            if timeout > 0 and engine.parked:
                self._busy = 0
                if lib.tu_readable(engine.efd):
                    if engine.leave_to_others():
                        self._turn = engine.turns
                    # It may have become readable after Trio looked: then the progress task is not about to run, and
                    # what would have woken it has been taken.
                    engine.between.leave_unarmed()
            else:
                self._busy += 1
                if self._busy > _BUSY:
                    self.stop_watching()
        except BaseException as error:
            engine.internal_error(error)

    @property
    def delivered(self) -> bool:
        """Whether what the last event announced has been delivered, and the rest is others' business."""
        return self._turn == self._engine.turns
