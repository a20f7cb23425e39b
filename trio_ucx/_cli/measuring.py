"""Measuring for a number of seconds or messages, with a progress bar."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from typing import Any

import attrs
import trio

from .. import ucp
from .perf_protocol import PerfClient, Timing
from .rounds import RoundKind, round_limit

DEFAULT_SECONDS = 1.0
WARM_UP_MESSAGES = 64

#: Reports how much of the measurements is done, from 0 to 1.
Advance = Callable[[float], None]


@asynccontextmanager
async def chosen_worker(transports: str | None) -> AsyncIterator[ucp.Worker | None]:
    """Opens a worker with these transports; None means the run's shared worker, if no transports were chosen."""
    if transports is None:
        yield None
    else:
        async with ucp.open_worker(config={"TLS": transports}) as worker:
            yield worker


async def repeat(
    client: PerfClient,
    kind: RoundKind,
    size: int,
    iterations: int | None,
    seconds: float | None,
    advance: Advance,
    **options: Any,
) -> Measured:
    """Runs rounds for a number of messages or seconds, after a warm-up; returns what was measured.

    Args:
        options: further fields of the :class:`Round`.
    """
    limit = round_limit(size, flows := options.get("flows", 1))
    warm_up = max(flows, min(WARM_UP_MESSAGES, limit, iterations or limit))
    warm = await client.run_next(kind, size, warm_up, **options)
    seconds = seconds or DEFAULT_SECONDS
    if iterations is None:  # several rounds, even if they are slow
        nanoseconds = max(warm.total, warm.back)
        limit = max(flows, int(min(limit, warm_up * seconds * 1e9 / 4 / nanoseconds)))
    measured, begin = Measured(), trio.current_time()
    while True:
        count = limit if iterations is None else min(limit, iterations - measured.messages)
        measured.timings.append(await client.run_next(kind, size, count, **options))
        measured.messages += count
        share = measured.messages / iterations if iterations else (trio.current_time() - begin) / seconds
        advance(min(share, 1))
        if share >= 1:
            return measured


@attrs.define
class Measured:
    """The times of the rounds of one measurement, and the number of messages in all."""

    timings: list[Timing] = attrs.field(factory=list)
    messages: int = 0

    @property
    def waits(self) -> list[float]:
        """The time of each answer in microseconds, the shortest first."""
        return sorted(nanoseconds / 1000 for timing in self.timings for nanoseconds in timing.round_trips)

    @property
    def half_trips(self) -> list[float]:
        """Half of each round trip in microseconds, the shortest first."""
        return [wait / 2 for wait in self.waits]

    @property
    def messages_a_second(self) -> float:
        return self.messages / (sum(timing.total for timing in self.timings) / 1e9)

    @property
    def messages_back_a_second(self) -> float:
        """Messages of the server; 0 if it has sent none by itself."""
        seconds = sum(timing.back for timing in self.timings) / 1e9
        return self.messages / seconds if seconds else 0.0

    @property
    def cpu_us(self) -> float:
        """CPU time of both processes in microseconds for each message of the client."""
        return sum(timing.cpu for timing in self.timings) / 1000 / self.messages


@contextmanager
def progress_bar(description: str) -> Iterator[Advance]:
    """Shows a progress bar on stderr until the end; nothing if stderr is not a terminal or rich is not installed."""
    try:
        from rich.console import Console
        from rich.progress import Progress
    except ImportError:
        yield lambda share: None
        return
    console = Console(stderr=True)
    # Without rich's own thread, which would take part in the measurement.
    with Progress(
        console=console,
        transient=True,
        auto_refresh=False,
        redirect_stdout=False,
        redirect_stderr=False,
        disable=not console.is_terminal,
    ) as progress:
        task = progress.add_task(description, total=1)
        yield lambda share: progress.update(task, completed=share, refresh=True)
