"""The safety net: events that UCX might lose, and what must be tried again later."""

from __future__ import annotations

import os
import time
from functools import partial
from typing import TYPE_CHECKING

import trio

from ..._native import lib
from .._quirks.descriptors import opened
from .arming import TIMER

if TYPE_CHECKING:
    from .engine import Engine

#: Seconds between two looks. Programs that send once a second should not do so at the moment of each look.
INTERVAL = 1.03
#: The longest wait for a processor, in seconds, in a look that counts: an event that arrives meanwhile was not missed.
INTERRUPTED = 0.0002


def _waited() -> float:
    """Grows, in seconds, while this thread does not run."""
    return time.perf_counter() - time.thread_time()


class SafetyNet:
    """Looks, while something is awaited, whether a worker has something to deliver although its descriptor is silent.

    The timer's time is real, not Trio's clock's, which ``autojump_clock`` would jump.
    """

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self.timer = opened(lib.tu_timer_create(), "creating a worker's timer")
        self._running = False
        #: Whether the timer looks more often, at a worker that is polled all the time.
        self._watches_polling = False

    def watch(self) -> None:
        """Something is awaited: look."""
        if not self._running:
            self._running = True
            if not self._watches_polling:
                self._set(INTERVAL)

    def watch_polling(self) -> None:
        """The worker is not armed: look whether it is being polled all the time."""
        if not self._watches_polling:
            self._watches_polling = True
            self._set(TIMER)

    def _set(self, seconds: float) -> None:
        if self._engine.handle is not None:  # else the descriptor is closed, and may be another's
            lib.tu_timer_set(self.timer, int(seconds * 1e9), False)

    async def run(self) -> None:
        engine = self._engine
        count = 0
        while engine.handle is not None:
            try:
                await trio.lowlevel.wait_readable(self.timer)
            except trio.ClosedResourceError:
                return
            if engine.handle is None:
                return  # the descriptor may be another's
            if not lib.tu_timer_ended(self.timer):
                continue  # the timer was started again meanwhile
            if self._watches_polling:
                if engine.arming.timer_ended():
                    self._set(TIMER)
                    continue
                count = engine.progress_count
                self._watches_polling = False
                self._running = True
                self._set(INTERVAL)
                continue
            if engine.pairs.idle:
                engine.guard(engine.pairs.close_idle)
            if engine.tag_dispatch.undiscarded:
                engine.guard(engine.tag_dispatch.discard_again)
            if not engine.awaited():
                self._running = False
                self._set(0)
                continue
            self._set(INTERVAL)
            # Only a worker that was quiet all the time since the last look can have missed something: in a busy one,
            # what is found now may have come just now.
            arming = engine.arming
            began = _waited()
            if arming.sleeps and count == engine.progress_count:
                before = engine.news()
                if arming.awaits_descriptor:
                    engine.take(partial(lib.tu_worker_look_unsignalled, engine.progress_task.efd))
                if before != engine.news() and _waited() - began < INTERRUPTED:
                    engine.counters["missed_events"] += 1
                engine.progress()
            count = engine.progress_count

    def close(self) -> None:
        os.close(self.timer)
