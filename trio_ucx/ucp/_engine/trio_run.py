"""The process, thread and Trio run that a worker belongs to, and its system tasks there.

An exception that left a system task would end the run. Here it ends the worker at most.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Awaitable, Callable
from typing import Protocol

import trio

from ..._util.contained import contained, report
from .._quirks.forks import Birth


class HostedEngine(Protocol):
    """The part of the engine that :class:`TrioRun` uses."""

    @property
    def usable(self) -> bool:
        """True if UCX's worker exists, and this thread may use it."""

    def wake(self) -> None:
        """Makes the progress task look."""

    def guard(self, function: Callable[[], None]) -> None:
        """Calls a function; an exception breaks the worker."""

    def internal_error(self, error: BaseException) -> None:
        """Breaks the worker. Never raises."""


class TrioRun(Birth):
    """Where one worker was opened, and where alone it can be used."""

    def __init__(self, engine: HostedEngine) -> None:
        super().__init__()
        self._engine = engine
        self._token = trio.lowlevel.current_trio_token()
        self.thread = threading.get_ident()
        #: Whether Trio's clock may jump when no task is runnable (trio.testing.MockClock), instead of waiting.
        self.clock_jumps = hasattr(trio.lowlevel.current_clock(), "autojump_threshold")
        root = trio.lowlevel.current_root_task()
        assert root is not None, "a Trio run has a root task"
        #: All tasks of the run are below it.
        self.root_task = weakref.ref(root)
        #: How many closes go on after their task was cancelled.
        self.background = 0
        self._background_ended = trio.lowlevel.ParkingLot()

    def check_thread(self) -> None:
        """Raises RuntimeError in another thread. (A forked child may close what it inherited, without an effect.)"""
        if self.thread != threading.get_ident() and not self.inherited:
            raise RuntimeError(
                "this worker belongs to another thread: open a worker in each thread that runs Trio, or use "
                "trio.from_thread.run"
            )

    def spawn(self, function: Callable[[], Awaitable[object]], name: str) -> None:
        """Runs an async function in a system task; its errors break the worker."""

        async def run() -> None:
            try:
                await function()
            except Exception as error:
                self._engine.internal_error(error)

        trio.lowlevel.spawn_system_task(run, name=name)

    def spawn_background(self, function: Callable[[], Awaitable[object]], name: str) -> bool:
        """Runs an async function, shielded, in a system task, for which closing the worker waits.

        Returns:
            False when the Trio run has ended too far for that.
        """

        async def run() -> None:
            try:
                with trio.CancelScope(shield=True):
                    await function()
            except Exception as error:
                report(f"{name} failed", error)
            finally:
                self.background -= 1
                if not self.background:
                    contained(self._background_ended.unpark_all)
                if self._engine.usable:
                    contained(self._engine.wake)  # the progress task may be waiting for the last background task

        try:
            trio.lowlevel.spawn_system_task(run, name=name)
        except RuntimeError:
            return False
        self.background += 1
        return True

    async def wait_background_ended(self) -> None:
        """Waits until the last close in the background has ended. There must be one."""
        await self._background_ended.park()

    def call_soon(self, function: Callable[[], None], *, always: bool = False) -> None:
        """Calls a function in the worker's thread and run, from anywhere (a destructor, say); not after the run.

        Args:
            always: also if the worker was closed, or broke. The function must not raise.
        """

        def call() -> None:
            if always:
                function()
            elif self._engine.usable:
                self._engine.guard(function)

        if self.inherited:
            return
        try:
            self._token.run_sync_soon(call)
        except trio.RunFinishedError:
            pass
