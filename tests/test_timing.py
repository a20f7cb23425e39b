"""The tests' assertions about time: they refuse what is late, and allow for what the machine delays."""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable

import pytest
import timing
import trio
from timing import PROMPT, Noise, Stopwatch, cancelled_after, cancelled_promptly, check_prompt

LATE = 0.3


async def late_operation() -> None:
    """An operation that returns 0.3 s after it was cancelled."""
    try:
        await trio.sleep_forever()
    finally:
        with trio.CancelScope(shield=True):
            await trio.sleep(LATE)


async def blocking_operation() -> None:
    """An operation that is cancelled in time, but holds up Trio's loop."""
    try:
        await trio.sleep_forever()
    finally:
        time.sleep(LATE)


def measured(monkeypatch: pytest.MonkeyPatch, noise: float) -> None:
    """Pretends that so much noise was measured, whatever the machine does."""
    monkeypatch.setattr(timing.Noise, "since", lambda *_: noise)


@pytest.mark.parametrize("operation", [late_operation, blocking_operation])
async def test_late_operations_are_refused_on_a_quiet_machine(
    monkeypatch: pytest.MonkeyPatch, operation: Callable[[], Awaitable[None]]
) -> None:
    measured(monkeypatch, 0)
    with pytest.raises(AssertionError, match=r"took \d+\.\d+ s, allowed are 0\.100 s and 0\.000 s of noise"):
        await cancelled_promptly(operation)
    with pytest.raises(AssertionError, match="took"):
        with cancelled_after(0.01):
            await operation()
    with pytest.raises(AssertionError, match="took"), Stopwatch():
        with trio.move_on_after(0.01):
            await operation()


async def test_late_operations_are_allowed_as_much_as_the_machine_was_late(monkeypatch: pytest.MonkeyPatch) -> None:
    measured(monkeypatch, 5)
    await cancelled_promptly(late_operation)
    with Stopwatch():
        with trio.move_on_after(0.01):
            await late_operation()


async def test_operation_that_ends_by_itself_is_refused() -> None:
    with pytest.raises(AssertionError):
        await cancelled_promptly(trio.sleep, 0, after=30)


def test_an_exception_is_passed_on_by_the_stopwatch() -> None:
    with pytest.raises(KeyError), Stopwatch(0):
        raise KeyError


def test_limit() -> None:
    check_prompt(0.15, PROMPT, 0.06)
    with pytest.raises(AssertionError):
        check_prompt(0.15, PROMPT, 0.04)


def nothing() -> float:
    return 0.0


def test_noise_is_the_sum_of_late_sleeps() -> None:
    noise = Noise(nothing, nothing)
    tick = Noise.TICK
    noise.record(0)
    noise.record(tick + 0.0005)  # as late as on an idle machine
    due = 2 * tick + 0.0005
    noise.record(due + 0.2)
    noise.record(due + 0.2 + tick + 0.1)
    now = due + 0.3 + tick
    assert noise.since(0, now) == pytest.approx(0.3)
    assert noise.since(due + 0.15, now) == pytest.approx(0.15)  # only what is in the interval
    assert noise.since(now, now) == 0
    assert noise.since(now, now + tick + 0.5) == pytest.approx(0.5)  # a sleep that has not ended yet


def test_sleeps_that_are_late_because_this_process_computes_are_no_noise() -> None:
    computed = 7.0
    noise = Noise(nothing, lambda: computed)
    noise.record(0)
    computed += 0.2
    noise.record(Noise.TICK + 0.3)
    now = Noise.TICK + 0.3
    assert noise.since(0, now) == pytest.approx(0.1)


def test_noise_of_sleeps_never_exceeds_the_interval() -> None:
    noise = Noise(nothing, nothing)
    noise.record(0)
    noise.record(100)
    assert noise.since(99, 101) == pytest.approx(1 + 1 - Noise.TICK)


def test_noise_is_the_time_that_others_had_the_processors() -> None:
    waited = 5.0
    noise = Noise(lambda: waited, nothing)
    for number in range(10):
        noise.record(number * Noise.TICK)
        waited += 0.01
    now = 10 * Noise.TICK
    assert noise.since(0, now) == pytest.approx(0.1)
    assert noise.since(5 * Noise.TICK, now) == pytest.approx(0.05)


@pytest.mark.parametrize("how", ["sleeps", "computes"])
def test_blocking_the_loop_is_no_noise(how: str) -> None:
    """What is noise is the time that other processes had the processors, which the kernel counts."""
    measurements = []
    for _ in range(10):
        with Noise() as noise:
            start, waited = time.perf_counter(), noise.waited()
            while time.perf_counter() < start + 0.05:
                if how == "sleeps":
                    time.sleep(0.05)
            measurements.append(noise.since(start, time.perf_counter()) - (noise.waited() - waited))
    assert min(measurements) < 0.025
