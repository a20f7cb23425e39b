"""Hooks into Trio's loop, which bound how long deferred work waits: instruments that come and go."""

from __future__ import annotations

from contextlib import suppress
from time import perf_counter
from typing import TYPE_CHECKING

import trio

from .arming import MOMENT

if TYPE_CHECKING:
    from .engine import Engine


class _Hook(trio.abc.Instrument):
    """An instrument that is present only while it is needed. An exception in it breaks the worker."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._present = False

    def watch(self) -> None:
        if not self._present:
            self._present = True
            trio.lowlevel.add_instrument(self)

    def stop_watching(self) -> None:
        if self._present:
            self._present = False
            with suppress(KeyError):  # Trio drops an instrument that has raised
                trio.lowlevel.remove_instrument(self)


class BeforeWait(_Hook):
    """Before Trio waits for events: sends batches, and re-arms a worker that was left disarmed.

    It must not make a task runnable, because Trio has decided already how long it waits.
    """

    def before_io_wait(self, timeout: float) -> None:
        engine = self._engine
        try:
            if engine.batches.batches and (timeout > 0 or perf_counter() - engine.batches.since > MOMENT):
                engine.send_batches()
            engine.arming.before_wait(timeout, batches=bool(engine.batches.batches))
        except BaseException as error:  # Trio would drop this instrument
            engine.internal_error(error)


class AfterWait(_Hook):
    """After Trio has waited for events: see :meth:`~.arming.Arming.after_wait`."""

    def after_io_wait(self, timeout: float) -> None:
        try:
            self._engine.arming.after_wait(timeout)
        except BaseException as error:
            self._engine.internal_error(error)
