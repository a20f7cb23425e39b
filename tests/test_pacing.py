"""How many pieces of long messages are under way, in simulated time: ``pacing.c``."""

from __future__ import annotations

import heapq
import statistics
from collections.abc import Callable

import pytest

from trio_ucx._native import ffi, lib

MILLISECOND = 1_000_000
SECOND = 1_000 * MILLISECOND


class Line:
    """A path that takes one piece after the other, and then a while for each: when a piece of this size arrives."""

    def __init__(self, delay: Callable[[int], int], bytes_per_nanosecond: float) -> None:
        self.delay = delay
        self.speed = bytes_per_nanosecond
        self.busy_until = 0

    def send(self, now: int, size: int) -> int:
        self.busy_until = max(now, self.busy_until) + int(size / self.speed)
        return self.busy_until + self.delay(now)


def simulate(line: Line, seconds: float, *, others_every: int = 0) -> list[tuple[int, int, int]]:
    """Endless long messages over a line: when each piece ended, its size, and the window then."""
    pace = ffi.new("tu_pacing_t *")
    pieces: list[tuple[int, int, int]] = []
    found = []
    now = SECOND
    end = now + int(seconds * SECOND)
    lib.tu_pacing_open(pace)
    while now < end:
        while len(pieces) < pace.window:
            heapq.heappush(pieces, (line.send(now, pace.piece), now, pace.piece))
        now, posted, size = heapq.heappop(pieces)
        lib.tu_pacing_piece_ended(pace, now, posted, now // others_every if others_every else 0)
        found.append((now - SECOND, size, pace.window))
    return found


def speed(pieces: list[tuple[int, int, int]], since: float) -> float:
    """Bytes a nanosecond, or GB/s, after so many seconds."""
    late = [(ended, size) for ended, size, _ in pieces if ended >= since * SECOND]
    return sum(size for _, size in late) / (late[-1][0] - since * SECOND)


@pytest.mark.parametrize("others_every", [0, 1, 60, 75, 100, 200])
@pytest.mark.parametrize("delay", [0.05, 1, 5, 10, 20])
def test_line_is_used(delay: float, others_every: int) -> None:
    """Whatever its length, and however often other messages come (in ms): also while that changes what is allowed."""
    line = Line(lambda now: int(delay * MILLISECOND), 1.0)
    pieces = simulate(line, 6, others_every=others_every * MILLISECOND)
    most = 64 * 2 * 63488 / (delay * MILLISECOND)  # a window full of small pieces
    assert speed(pieces, 2) > 0.6 * min(1.0, most)


def test_other_messages_do_not_wait() -> None:
    """On a short path, few pieces are under way while other messages come, and many while none do."""
    busy = simulate(Line(lambda now: 50_000, 3.0), 2, others_every=MILLISECOND)
    alone = simulate(Line(lambda now: 50_000, 3.0), 2)
    assert max(window for ended, _, window in busy if ended > SECOND) * 2 * 63488 / 3.0 < 0.5 * MILLISECOND
    assert {size for ended, size, _ in alone if ended > SECOND} == {8 * 63488}
    assert {size for ended, size, _ in busy if ended > SECOND} == {2 * 63488}


def test_path_that_becomes_slower_and_faster() -> None:
    """The peer becomes busy, and takes 4 ms for what took 0.05: that is no queue of ours, and a larger window helps."""
    line = Line(lambda now: 4 * MILLISECOND if 2 <= now / SECOND - 1 < 6 else 50_000, 1.0)
    pieces = simulate(line, 8, others_every=MILLISECOND)
    busy = [window for ended, _, window in pieces if 5 <= ended / SECOND < 6]
    idle = [window for ended, _, window in pieces if ended / SECOND >= 7]
    assert statistics.median_high(busy) > 16
    assert statistics.median_high(idle) < 8
