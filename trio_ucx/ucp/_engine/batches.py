"""Deferred batches: small messages of connections that wait for more, to be sent as one."""

from __future__ import annotations

from collections.abc import Callable
from time import perf_counter
from typing import Protocol


class DeferredBatch(Protocol):
    """The sending part of a connection, with small messages that wait to be sent as one."""

    def send_batch(self) -> None:
        """Hands the batched messages to UCX, and submits what remains to be done. Never raises.

        On failure it may wake tasks, although the caller may be the hook before Trio's waits. It then schedules a
        reap, which ends Trio's wait.
        """

    def internal_error(self, error: BaseException) -> None:
        """Handing them to UCX failed by an internal error: ends the connection. Never raises."""


class Batches:
    """The deferred batches of one worker. A hook before Trio's waits bounds how long they wait (``progress.py``).

    Args:
        watch: makes that hook look.
    """

    __slots__ = ("_watch", "batches", "since")

    def __init__(self, watch: Callable[[], None]) -> None:
        self._watch = watch
        #: Those that may have something to send; and since when there have been some.
        self.batches: set[DeferredBatch] = set()
        self.since = 0.0

    def defer(self, batch: DeferredBatch) -> None:
        """Adds a connection whose small messages wait for more."""
        if not self.batches:
            self.since = perf_counter()
            self._watch()
        self.batches.add(batch)

    def send_all(self) -> None:
        """Sends all deferred batches."""
        batches, self.batches = self.batches, set()
        for batch in batches:
            try:
                batch.send_batch()
            except BaseException as error:
                batch.internal_error(error)
