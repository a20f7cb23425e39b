"""Timers that are restarted just before the task runs that their last expiry woke."""

from __future__ import annotations

import re
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, closing
from pathlib import Path

import pytest
import trio
import trio.testing
from helpers import TRANSPORTS, until
from peers import REMOTE
from timing import Stopwatch

from trio_ucx import ucp
from trio_ucx._native import lib
from trio_ucx.testing import internals
from trio_ucx.ucp import chains
from trio_ucx.ucp._engine import progress
from trio_ucx.ucp.chains._run import Timer

#: Nanoseconds: at once, and so late that it is not in the test's time.
NOW, LATER = 1, 1000 * 10**9


def remaining(timer: int) -> float:
    """Seconds until a timer ends; 0 if it is not armed."""
    found = re.search(r"it_value: \((\d+), (\d+)\)", Path(f"/proc/self/fdinfo/{timer}").read_text())
    assert found is not None
    return int(found[1]) + int(found[2]) / 1e9


class JustBefore(trio.abc.Instrument):
    """Calls something once, just before a task runs that was woken."""

    def __init__(self, name: str, function: Callable[[], object]) -> None:
        self._name = name
        self._function: Callable[[], object] | None = function
        self.done = trio.Event()

    def before_task_step(self, task: trio.lowlevel.Task) -> None:
        if task.name.startswith(self._name) and self._function is not None:
            function, self._function = self._function, None
            function()

    def after_task_step(self, task: trio.lowlevel.Task) -> None:
        if task.name.startswith(self._name):
            self.done.set()


@asynccontextmanager
async def just_before(name: str, function: Callable[[], object]) -> AsyncIterator[None]:
    """Returns when the task that was woken in the block has run."""
    instrument = JustBefore(name, function)
    trio.lowlevel.add_instrument(instrument)
    try:
        yield
        with trio.fail_after(15):
            await instrument.done.wait()
    finally:
        trio.lowlevel.remove_instrument(instrument)


@asynccontextmanager
async def open_chain(delay: float, retries: int) -> AsyncIterator[tuple[ucp.Worker, chains.RequestChain]]:
    """A request chain whose condition fails so many times."""
    config = {"TLS": TRANSPORTS[1]}
    async with (
        ucp.open_worker(config=config, features=REMOTE) as owner,
        ucp.open_worker(config=config, features=REMOTE) as worker,
        await worker.open_endpoint(owner.address) as endpoint,
    ):
        with owner.context.allocate(4096) as memory, endpoint.attach(memory.descriptor) as remote:
            memory.memoryview[:] = bytes(4096)
            with closing(worker.new_chain(capacity=4)) as chain:
                got = chain.get(remote, 0, 8)
                chain.check(got.u64() == 1, on_false=chains.Retry(retries, again=got, delay=delay, then="skip"))
                yield worker, chain


async def test_the_timer_of_request_chains() -> None:
    async with open_chain(0.001, 1) as (worker, chain):
        await chain.run()
        timer = Timer.of[internals(worker)]._fd
        async with just_before("trio_ucx chain timer", lambda: lib.tu_timer_set(timer, LATER, 0)):
            lib.tu_timer_set(timer, NOW, 0)
        assert remaining(timer) > LATER / 2e9, "what C had armed was disarmed"


async def test_short_delays_are_short() -> None:
    async with open_chain(50e-6, 100) as (_, chain):
        await chain.run()
        with Stopwatch(0.5):  # each of 1000 delays takes 50 us; in milliseconds it would be a second
            for _ in range(10):
                await chain.run()


async def test_the_safety_net(monkeypatch: pytest.MonkeyPatch) -> None:
    """A tick that was asked for must not be skipped because of an earlier expiry of the timer."""
    monkeypatch.setattr(progress, "SHORT_TICK", LATER / 1e9)
    monkeypatch.setattr(progress, "LONG_TICK", LATER / 1e9)
    async with ucp.open_worker() as worker:
        net = internals(worker).progress_task.safety_net
        await trio.testing.wait_all_tasks_blocked()
        async with just_before("trio_ucx safety net", net.start):
            lib.tu_timer_set(net.timer, NOW, False)
        assert net._tick_after == LATER / 1e9
        assert remaining(net.timer) > 0
        lib.tu_timer_set(net.timer, NOW, False)
        await until(lambda: not net._tick_after)
