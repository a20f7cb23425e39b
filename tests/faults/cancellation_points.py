"""Cancels an operation at its n-th point, one attempt for each n, and checks what is left of each attempt.

The points of an operation are: before it begins; each time its task yields, when it waits; each time its task is about
to go on, when what it waited for has happened; and each time another task of the run yields meanwhile. So an operation
is cancelled before it waits, while it waits, and after it was woken, in every state that the library passes through.
"""

from __future__ import annotations

import os
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager

import attrs
import trio
from helpers import live_handles, segments, until
from timing import PROMPT, Noise, check_prompt

from trio_ucx import ucp

#: Seconds for one attempt, with what is done after it.
LIMIT = 20
#: Seconds until what has ended is gone: endpoints that are kept for some seconds.
GONE = 15

Function = Callable[[], Awaitable[object]]


async def nothing() -> None:
    pass


@attrs.define
class Attempt:
    """One operation that is cancelled, and what is done around it.

    Attributes:
        operation: what is cancelled.
        beside: runs beside it, and is not cancelled: the peer.
        again: runs after it, cancelled or not. It shows that the same objects can still be used.
        verify: called at the end, with whether the operation was completed.
        cancel: cancels it, instead of its scope.
        limit: seconds within which it returns, besides the noise.
    """

    operation: Function
    beside: Function = nothing
    again: Function = nothing
    verify: Callable[[bool], None] = lambda completed: None
    cancel: Callable[[], None] | None = None
    limit: float = PROMPT


#: Begins an attempt; each has another number.
Begin = Callable[[int], Attempt]
#: Opens what the attempts of a scenario use one after the other: a scenario, by its transports and its ``spin``.
Scenario = Callable[[str, float | None], AbstractAsyncContextManager[Begin]]


class Points(trio.abc.Instrument):
    """Counts the points of an operation of the current task, and calls a function at one of them."""

    def __init__(self, at: int, cancel: Callable[[], None]) -> None:
        self._at = at
        self._cancel = cancel
        self._task = trio.lowlevel.current_task()
        self.count = 0
        #: When the function was called, and where.
        self.time: float | None = None
        self.where = ""

    def __enter__(self) -> Points:
        trio.lowlevel.add_instrument(self)
        self._point("before it began")
        return self

    def __exit__(self, *_: object) -> None:
        trio.lowlevel.remove_instrument(self)

    def before_task_step(self, task: trio.lowlevel.Task) -> None:
        if task is self._task:
            self._point("about to go on")

    def after_task_step(self, task: trio.lowlevel.Task) -> None:
        self._point("waiting" if task is self._task else f"after a step of {task.name}")

    def _point(self, where: str) -> None:
        if self.count == self._at:
            self.time = time.perf_counter()
            self.where = where
            self._cancel()
        self.count += 1


@attrs.define
class Sweep:
    """What the attempts of a sweep have shown.

    Attributes:
        attempts: how many there were, and how many of them were cancelled before they were completed.
        slowest: the longest time between a cancellation and the end of its operation, in seconds.
    """

    attempts: int = 0
    cancelled: int = 0
    slowest: float = 0.0


async def attempt(begin: Begin, number: int, at: int, noise: Noise, sweep: Sweep) -> int:
    """Makes one attempt, which is cancelled at a point. Returns how many points it has had."""
    this = begin(number)
    completed = False
    with trio.fail_after(LIMIT):
        async with trio.open_nursery() as nursery:
            nursery.start_soon(this.beside)
            with trio.CancelScope() as scope:
                with Points(at, this.cancel or scope.cancel) as points:
                    await this.operation()
                    completed = True
            if points.time is not None:
                now = time.perf_counter()
                sweep.slowest = max(sweep.slowest, now - points.time)
                check_prompt(now - points.time, this.limit, noise.since(points.time, now))
            try:
                await this.again()
            except BaseException as error:
                error.add_note(f"cancelled at the point {at}, {points.where}; completed: {completed}")
                raise
    try:
        this.verify(completed)
    except AssertionError as error:
        error.add_note(f"cancelled at the point {at}, {points.where}; completed: {completed}")
        raise
    sweep.attempts += 1
    sweep.cancelled += not completed
    return points.count


@asynccontextmanager
async def nothing_is_left() -> AsyncIterator[None]:
    """Asserts that the block leaves no native handle, no file descriptor, and no segment of shared memory."""
    with ucp.open_context():
        pass  # the first context starts a GPU's drivers, which keep descriptors

    def state() -> tuple[dict[str, int], int, int]:
        return live_handles(), len(os.listdir("/proc/self/fd")), segments()

    before = state()
    yield
    try:
        await until(lambda: state() == before, within=GONE)
    except trio.TooSlowError:
        raise AssertionError(f"before: {before}, left: {state()}") from None
