"""Hooks into Trio's loop: instruments that come and go, and the batches that one of them bounds the delay of."""

from __future__ import annotations

from contextlib import suppress
from time import perf_counter
from typing import TYPE_CHECKING, Protocol

import trio

from .arming import MOMENT

if TYPE_CHECKING:
    from .engine import Engine


class DeferredBatch(Protocol):
    """The sending part of a connection, with small messages that wait to be sent as one."""

    def send_batch(self) -> None:
        """Hands them to UCX, and makes the engine progress if something remains to be done about them. Never raises."""

    def internal_error(self, error: BaseException) -> None:
        """Handing them to UCX failed by an internal error: ends the connection. Never raises."""


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

    def __init__(self, engine: Engine) -> None:
        super().__init__(engine)
        #: Those that may have something to send; and since when.
        self.batches: set[DeferredBatch] = set()
        self._since = 0.0

    def defer(self, batch: DeferredBatch) -> None:
        """It has messages that wait for more."""
        if not self.batches:
            self._since = perf_counter()
            self._engine.arming.watch()
        self.batches.add(batch)

    def send_batches(self) -> None:
        """Sends all of them."""
        batches, self.batches = self.batches, set()
        for batch in batches:
            try:
                batch.send_batch()
            except BaseException as error:
                batch.internal_error(error)

    def before_io_wait(self, timeout: float) -> None:
        engine = self._engine
        try:
            if self.batches and (timeout > 0 or perf_counter() - self._since > MOMENT):
                engine.send_batches()
            engine.arming.before_wait(timeout, batches=bool(self.batches))
        except BaseException as error:  # Trio would drop this instrument
            engine.internal_error(error)


class AfterWait(_Hook):
    """After Trio has waited for events: see :meth:`_arming.Arming.after_wait`."""

    def after_io_wait(self, timeout: float) -> None:
        try:
            self._engine.arming.after_wait(timeout)
        except BaseException as error:
            self._engine.internal_error(error)
