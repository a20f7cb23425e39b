"""Queues of waiting tasks, without UCX."""

from __future__ import annotations

import pytest
import trio
import trio.testing

from trio_ucx.ucp._engine.waits import Waiters


async def test_first_come_first_served() -> None:
    waiters = Waiters()
    assert not waiters
    assert not waiters.give("nobody")
    got = []

    async def wait(number: int) -> None:
        got.append((number, await waiters.wait()))

    async with trio.open_nursery() as nursery:
        for number in range(3):
            nursery.start_soon(wait, number)
            await trio.testing.wait_all_tasks_blocked()
        assert waiters
        for thing in "abc":
            assert waiters.give(thing)
        assert not waiters
    assert sorted(got) == [(0, "a"), (1, "b"), (2, "c")]


async def test_cancelled_waiter_is_given_nothing() -> None:
    """From the moment of its cancellation, even before its task has run: what it were given would be lost."""
    waiters = Waiters()
    got = []
    scope = trio.CancelScope()

    async def cancelled() -> None:
        with scope:
            got.append(await waiters.wait())

    async def patient() -> None:
        got.append(await waiters.wait())

    async with trio.open_nursery() as nursery:
        nursery.start_soon(cancelled)
        await trio.testing.wait_all_tasks_blocked()
        nursery.start_soon(patient)
        await trio.testing.wait_all_tasks_blocked()
        scope.cancel()
        assert waiters.give("thing")
        assert not waiters.give("another")
    assert got == ["thing"]


async def test_all_fail() -> None:
    waiters = Waiters()

    async def wait() -> None:
        with pytest.raises(ZeroDivisionError):
            await waiters.wait()

    async with trio.open_nursery() as nursery:
        for _ in range(3):
            nursery.start_soon(wait)
        await trio.testing.wait_all_tasks_blocked()
        waiters.fail(ZeroDivisionError())
