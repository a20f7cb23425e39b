"""Assertions about time that allow for a busy machine by what was measured meanwhile, not by a guess."""

from __future__ import annotations

import bisect
import contextlib
import os
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import trio

#: Seconds within which a cancelled operation returns, besides the noise that was measured; emulated machines need more.
PROMPT = float(os.environ.get("TRIO_UCX_TEST_PROMPT", "0.1"))


def waited_by(*pids: int) -> Callable[[], float]:
    """What tells how many seconds the calling thread and these processes have been ready to run, and others had the
    processors.

    Linux counts that (``schedstat``); elsewhere it tells 0. Processes that have ended keep what they had.
    """
    own = f"/proc/self/task/{threading.get_native_id()}/schedstat"
    found = dict.fromkeys([Path(own), *(Path(f"/proc/{pid}/schedstat") for pid in pids)], 0)

    def waited() -> float:
        for path in found:
            with contextlib.suppress(OSError):
                found[path] = int(path.read_text().split()[1])
        return sum(found.values()) / 1e9

    return waited


class Noise:
    """How long this machine kept the calling thread waiting, while the block runs: the larger of two measurements.

    * How long the calling thread was ready to run, and others had the processors. That shows other programs.
    * How late another thread wakes that sleeps over and over, less the time in which this process computes (and that
      thread may wait for the GIL). That shows a virtual machine that stands still.

    Neither depends on Trio's loop: an operation that blocks the loop, or computes, is not excused.

    Args:
        waited, computed: measure, in seconds, what the calling thread has waited, and this process has computed.
    """

    #: Seconds that each sleep takes.
    TICK = 0.002
    #: A sleep is this late even on an idle machine: no noise.
    USUAL = 0.001

    def __init__(
        self, waited: Callable[[], float] | None = None, computed: Callable[[], float] = time.process_time
    ) -> None:
        self.waited = waited or waited_by()
        self._computed = computed
        #: Of each sleep that has ended: when it should have ended, when it did, and how long it waited in between.
        self._late: list[tuple[float, float, float]] = []
        #: When each sleep began, what the calling thread had waited by then, and what this process had computed.
        self._began: list[tuple[float, float, float]] = []
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._measure, daemon=True)

    def __enter__(self) -> Noise:
        self.record(time.perf_counter())
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        self._thread.join()

    def _measure(self) -> None:
        while not self._ended.wait(self.TICK):
            self.record(time.perf_counter())

    def record(self, now: float) -> None:
        """A sleep has ended; the next one begins."""
        if self._began:
            self._late.append(self._lateness(now))
        self._began.append((now, self.waited(), self._computed()))

    def _lateness(self, now: float) -> tuple[float, float, float]:
        began, _, computed = self._began[-1]
        due = began + self.TICK
        late = now - due if now > due + self.USUAL else 0.0
        return due, now, max(0.0, late - (self._computed() - computed))

    def since(self, start: float, now: float) -> float:
        """The noise between two values of :func:`time.perf_counter`, the second of which is the present."""
        late = 0.0
        over = bisect.bisect(self._late, start, key=lambda sleep: sleep[1])
        for due, woken, waited in [*self._late[over:], self._lateness(now)]:
            late += max(0.0, min(waited, woken - max(due, start)))
        before = max(0, bisect.bisect(self._began, start, key=lambda sleep: sleep[0]) - 1)
        return max(late, self.waited() - self._began[before][1])


def check_prompt(seconds: float, limit: float, noise: float) -> None:
    """Raises AssertionError if something took longer than the limit and the noise."""
    allowed = limit + noise
    assert seconds < allowed, f"took {seconds:.3f} s, allowed are {limit:.3f} s and {noise:.3f} s of noise"


class Stopwatch:
    """Asserts that its block ends within a limit, besides the noise; also where the block raises as expected.

    Put it outside of ``pytest.raises``: an exception that leaves its block is passed on, and nothing is asserted. For a
    block that is cancelled there is :func:`cancelled_after`.

    Args:
        pids: peers that the block waits for.
    """

    def __init__(self, limit: float = PROMPT, *pids: int) -> None:
        self.limit = limit
        self._noise = Noise(waited_by(*pids))

    def __enter__(self) -> Stopwatch:
        self._noise.__enter__()
        self.start = time.perf_counter()
        return self

    def __exit__(self, exc_type: object, *_: object) -> None:
        now = time.perf_counter()
        self.seconds = now - self.start
        noise = self._noise.since(self.start, now)
        self._noise.__exit__()
        if exc_type is None:
            check_prompt(self.seconds, self.limit, noise)


@contextlib.contextmanager
def cancelled_after(seconds: float, *, limit: float = PROMPT) -> Iterator[trio.CancelScope]:
    """Cancels the block after so many seconds, and asserts that it then ends promptly; it may have ended before."""
    with Noise() as noise:
        with trio.move_on_after(seconds) as scope:
            yield scope
        now = time.perf_counter()
        late = trio.current_time() - scope.deadline
        check_prompt(late, limit, noise.since(now - late, now))


async def cancelled_promptly(function: Callable[..., Any], *args: object, after: float = 0.05) -> None:
    """Cancels an operation that would not end; asserts that it then returns promptly, by Cancelled."""
    with cancelled_after(after) as scope:
        await function(*args)
    assert scope.cancelled_caught
