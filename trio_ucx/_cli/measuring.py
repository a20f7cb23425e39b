"""Measuring for a number of seconds or messages, with a progress bar."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager

import trio

from .. import ucp
from .perf_protocol import PerfClient, RoundKind, Timing, round_limit

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
    *,
    plain: bool = False,
) -> list[tuple[Timing, int]]:
    """Runs rounds for a number of messages or seconds, after a warm-up; returns their times and numbers of messages.

    Args:
        plain: over plain TCP.
    """
    limit = round_limit(size)
    warm_up = min(WARM_UP_MESSAGES, limit, iterations or limit)
    warm = await client.run_next(kind, size, warm_up, plain=plain)
    seconds = seconds or DEFAULT_SECONDS
    if iterations is None:  # several rounds, even if they are slow
        limit = max(1, min(limit, int(warm_up * seconds * 1e9 / 4 / warm.total)))
    timings: list[tuple[Timing, int]] = []
    done = 0
    begin = trio.current_time()
    while True:
        count = limit if iterations is None else min(limit, iterations - done)
        timings.append((await client.run_next(kind, size, count, plain=plain), count))
        done += count
        share = done / iterations if iterations else (trio.current_time() - begin) / seconds
        advance(min(share, 1))
        if share >= 1:
            return timings


def half_trips(timings: list[tuple[Timing, int]]) -> list[float]:
    """Returns half of each round trip in microseconds, the shortest first."""
    return sorted(nanoseconds / 2000 for timing, _ in timings for nanoseconds in timing.round_trips)


def messages_a_second(timings: list[tuple[Timing, int]]) -> float:
    return sum(count for _, count in timings) / (sum(timing.total for timing, _ in timings) / 1e9)


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
