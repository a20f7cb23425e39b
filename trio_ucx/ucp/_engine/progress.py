"""The progress task: makes a worker progress whenever the worker's state (``_engine/arming.py``) asks for it."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from time import perf_counter
from typing import TYPE_CHECKING

import trio

from ..._native import lib
from .._util import ignoring_late_run
from .arming import Event, Next
from .backoff import Backoff
from .loop_hooks import AfterWait, BeforeWait
from .safety_net import SafetyNet

if TYPE_CHECKING:
    from .engine import Engine


class ProgressTask:
    """What of one worker's progress depends on Trio: see :class:`~.arming.Loop`, which this implements.

    Attributes:
        efd: the worker's descriptor.
        stop: ends the task; None before it runs.
    """

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self.efd = lib.tu_worker_efd(engine.handle)
        self.stop: trio.CancelScope | None = None
        with ExitStack() as undo:
            self._backoff = Backoff(self.efd)
            undo.callback(self._backoff.close)
            self.safety_net = SafetyNet(engine)
            undo.pop_all()
        self._before_wait = BeforeWait(engine)
        self._after_wait = AfterWait(engine)
        self._suspended: trio.lowlevel.Task | None = None
        self.watch = self._before_wait.watch
        self.stop_watching = self._before_wait.stop_watching
        self.watch_events = self._after_wait.watch
        self.stop_watching_events = self._after_wait.stop_watching
        self.call_soon = engine.run.call_soon
        self.start_timer = self.safety_net.watch_polling
        self.now: Callable[[], float] = perf_counter

    def resume(self) -> None:
        """Lets the task run in the next round if it is suspended."""
        task, self._suspended = self._suspended, None
        if task is not None:
            trio.lowlevel.reschedule(task)

    async def run_until(self, finished: Callable[[], bool]) -> None:
        """Returns when that is so, or when the worker is closed or broken."""
        engine = self._engine
        while engine.handle is not None and not finished():
            began = perf_counter()
            what = engine.arming.next_step()
            if engine.handle is None or engine.broken is not None or finished():
                return
            try:
                await self._wait(what, began)
            except trio.Cancelled:
                engine.arming.interrupted()
                raise

    async def _wait(self, what: Next, began: float) -> None:
        engine = self._engine
        if what is Next.WAIT_READABLE:
            self._backoff.reset()
            await trio.lowlevel.wait_readable(self.efd)
            engine.counters["wakeups"] += 1
            engine.arming.handle(Event.READABLE)
        elif what is Next.SUSPEND:
            await self._suspend()
        elif what is Next.PAUSE:
            engine.counters["backoffs"] += 1
            await self._backoff.sleep(perf_counter() - began, engine.news())
        else:
            await trio.lowlevel.checkpoint_if_cancelled()
            if lib.tu_poll_goes_on(engine.handle):
                await engine.waiting.poll_for_sequences()
            else:
                await trio.lowlevel.cancel_shielded_checkpoint()

    async def _suspend(self) -> None:
        self._suspended = trio.lowlevel.current_task()

        def abort(_: object) -> trio.lowlevel.Abort:
            self._suspended = None
            return trio.lowlevel.Abort.SUCCEEDED

        await trio.lowlevel.wait_task_rescheduled(abort)

    def close(self) -> None:
        """The worker is closed: ends what waits for its descriptors, and closes those that are ours."""
        for fd in (self.efd, self.safety_net.timer, *self._backoff.descriptors):
            with ignoring_late_run():
                trio.lowlevel.notify_closing(fd)
        self._backoff.close()
        self.safety_net.close()
        if self.stop is not None:
            with ignoring_late_run():
                self.stop.cancel()
