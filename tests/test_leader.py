"""The leader: a parked task that waits for the worker's descriptor itself (``ucp/_engine/listening.py``)."""

from __future__ import annotations

import gc
import signal
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest
import trio
import trio.testing
from helpers import assert_free, expect_closed, open_pair, open_peer, open_raw_pair, pattern, until
from outcome import Value

import trio_ucx
from trio_ucx import ucp
from trio_ucx.testing import internals
from trio_ucx.ucp._engine import progress
from trio_ucx.ucp._engine.lifetime import close_now
from trio_ucx.ucp._engine.listening import Listening, State
from trio_ucx.ucp._engine.waits import Pending

#: Round trips that are counted together, and how often they are.
TRIPS, PARTS = 100, 6


class Steps(trio.abc.Instrument):
    """Counts the rounds of Trio's loop, and the steps of each task."""

    def __init__(self) -> None:
        self.rounds = 0
        self.steps: dict[str, int] = {}

    def before_io_wait(self, timeout: float) -> None:
        self.rounds += 1

    def before_task_step(self, task: trio.lowlevel.Task) -> None:
        self.steps[task.name] = self.steps.get(task.name, 0) + 1


@asynccontextmanager
async def open_led(transports: str) -> AsyncIterator[tuple[trio_ucx.Connection, trio_ucx.Connection, ucp.Worker]]:
    """Opens two connected workers that do not poll. A task that parks in ``server.receive()`` leads the worker.

    However busy the machine is: the worker stays free until a task waits.
    """
    config = {"TLS": transports}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(progress, "SHORT_TICK", 1.0)
        patch.setattr(progress, "LONG_TICK", 1.0)
        async with (
            ucp.open_worker(config=config, spin=0) as worker,
            ucp.open_worker(config=config, spin=0) as other,
            open_pair(other, worker) as (client, server),
        ):
            async with trio.open_nursery() as nursery:
                nursery.start_soon(server.receive)
                await trio.sleep(0.01)  # it parks, and the progress task listens
                await client.send(b"x")
            yield client, server, worker


async def wait_led(worker: ucp.Worker) -> None:
    """Waits until a task leads."""
    with trio.fail_after(10):
        await until(lambda: internals(worker).listening.state is State.LED)


async def test_a_round_trip_wakes_one_task(transports: str) -> None:
    """It takes two rounds of Trio's loop, as with a socket: one for the send's schedule point, one for the wait.

    The progress task stays suspended. On a busy machine some round trips take more: the best of several parts counts.
    """
    async with open_peer("echo", [0], True, transports=transports) as peer:
        address, _ = await peer.hear()
        async with (
            ucp.open_worker(config={"TLS": transports}, spin=0) as worker,
            trio_ucx.connect(tuple(address), worker=worker) as connection,
        ):
            efd = internals(worker).efd
            parts = [await _count_round_trips(worker, connection) for _ in range(PARTS + 1)][1:]
            # Each look at a timer of 4 ms is a round more.
            rounds = [steps.rounds - steps.steps.get(f"trio_ucx safety net (efd {efd})", 0) for steps, _ in parts]
            assert min(rounds) <= 2.2 * TRIPS
            progressing = [steps.steps.get(f"trio_ucx progress (efd {efd})", 0) for steps, _ in parts]
            assert min(progressing) < 0.1 * TRIPS
            # The look that finds nothing yet, the one before arming, and the one after the event.
            assert min(calls for _, calls in parts) <= 3.3 * TRIPS


async def _count_round_trips(worker: ucp.Worker, connection: trio_ucx.Connection) -> tuple[Steps, int]:
    """Returns the steps of TRIPS round trips, and how often they progressed the worker."""
    before = worker.statistics().progress_calls
    steps = Steps()
    trio.lowlevel.add_instrument(steps)
    for number in range(TRIPS):
        await connection.send(pattern(8, number))
        assert await connection.receive() == pattern(8, number)
    trio.lowlevel.remove_instrument(steps)
    return steps, worker.statistics().progress_calls - before


async def test_each_of_several_parked_tasks_gets_its_message(transports: str) -> None:
    """One of the tasks leads. Messages for the others wake those."""
    async with open_led(transports) as (client, server, worker), trio.open_nursery() as nursery:
        got: list[bytes] = []

        async def receive(tag: int) -> None:
            got.append(await server.receive(tag=tag))

        for tag in (1, 2, 3):
            nursery.start_soon(receive, tag)
        await wait_led(worker)
        with trio.fail_after(10):
            for tag in (3, 1, 2):
                await client.send(b"%d" % tag, tag=tag)
                await until(lambda tag=tag: b"%d" % tag in got)  # type: ignore[misc]
        assert worker.statistics().missed_events == 0


@pytest.mark.parametrize("what", ["message", "end"])
async def test_cancelled_while_it_gets_something(transports: str, what: str) -> None:
    """A message is not lost. The next call reports the end of the connection, as if the task had not led."""
    async with open_led(transports) as (client, server, worker):
        scope = trio.CancelScope()
        got: list[bytes] = []

        async def receive() -> None:
            with scope:
                got.append(await server.receive())

        async with trio.open_nursery() as nursery:
            nursery.start_soon(receive)
            await wait_led(worker)
            scope.cancel()
            if what == "message":
                client.send_nowait(b"not lost")
                internals(client.worker).links.flush()
                internals(worker).reap()  # before the cancelled task runs
            else:
                server._link.closing.cut_off("broken", "is lost")
        if what == "message":
            with trio.fail_after(10):
                assert (got or [await server.receive()]) == [b"not lost"]
        else:
            assert scope.cancelled_caught
            with pytest.raises(trio.BrokenResourceError):
                await server.receive()


async def test_a_cancelled_leader_keeps_nothing(transports: str) -> None:
    async with open_led(transports) as (client, server, worker):
        buffer = bytearray(100)
        gc.disable()
        try:
            with trio.move_on_after(0.05) as scope:
                await server.receive_into(buffer)
            assert scope.cancelled_caught
            assert_free(buffer)
        finally:
            gc.enable()
        await client.send(b"later")
        with trio.fail_after(10):
            assert await server.receive() == b"later"
        assert not worker.statistics().missed_events


def test_interrupted_while_it_gets_something() -> None:
    """Neither the message nor Ctrl-C is lost."""
    got: list[bytes] = []
    interrupts = 0

    async def main() -> None:
        nonlocal interrupts
        async with open_led("sm,self") as (client, server, worker):

            def deliver() -> None:
                client.send_nowait(b"not lost")
                internals(client.worker).links.flush()
                internals(worker).reap()

            @trio.lowlevel.enable_ki_protection
            async def interrupt() -> None:
                await wait_led(worker)
                signal.raise_signal(signal.SIGINT)  # Trio soon tells the main task, which leads
                trio.lowlevel.current_trio_token().run_sync_soon(deliver)  # before that task runs

            async with trio.open_nursery() as nursery:
                nursery.start_soon(interrupt)
                with trio.fail_after(10):
                    while not got or not interrupts:
                        try:
                            if got:
                                await trio.lowlevel.checkpoint()
                            else:
                                got.append(await server.receive())
                        except KeyboardInterrupt:
                            interrupts += 1

    trio.run(main)
    assert got == [b"not lost"]
    assert interrupts == 1


class AtHand(Pending):
    """An operation that completes while it is being cancelled."""

    __slots__ = ()

    def cancel(self) -> bool:
        self.finish(Value("done"))
        return False


def test_interrupted_when_its_completion_is_at_hand() -> None:
    interrupts: list[KeyboardInterrupt] = []

    async def main() -> None:
        async with open_led("sm,self") as (_, _, worker), trio.open_nursery() as nursery:

            @trio.lowlevel.enable_ki_protection
            async def interrupt() -> None:
                await wait_led(worker)
                signal.raise_signal(signal.SIGINT)

            @trio.lowlevel.enable_ki_protection
            async def wait() -> object:
                return await internals(worker).waiting.wait(AtHand())

            nursery.start_soon(interrupt)
            assert await wait() == "done"
            with trio.fail_after(10):
                while not interrupts:
                    try:
                        await trio.lowlevel.checkpoint()
                    except KeyboardInterrupt as error:
                        interrupts.append(error)

    trio.run(main)
    assert len(interrupts) == 1


async def test_not_led_if_the_wait_ends_while_arming() -> None:
    """Progress goes on after a peer's end was reported, and arms the worker. The next task that waits must arm anew."""
    async with open_led("tcp,self") as (client, server, worker), open_raw_pair(client.worker, worker) as (far, near):
        engine = internals(worker)
        for _ in range(5):
            async with trio.open_nursery() as nursery:
                nursery.start_soon(client.send, b"x")
                await server.receive()
            if engine.listening.state is State.FREE:  # on a busy machine the progress task may be there first
                break
        far.abort()
        internals(client.worker).reap()
        time.sleep(0.05)  # it arrives, and nobody looks
        with pytest.raises(trio.BrokenResourceError):
            await near.wait_closed()
        assert engine.listening.state is not State.LED
        got: list[bytes] = []

        async def receive() -> None:
            got.append(await server.receive(tag=7))

        async with trio.open_nursery() as nursery:
            nursery.start_soon(receive)
            await trio.testing.wait_all_tasks_blocked()
            await client.send(b"y", tag=7)
            with trio.fail_after(10):
                await until(lambda: bool(got))
        assert got == [b"y"]
        assert worker.statistics().missed_events == 0


async def test_a_leader_that_is_not_woken_can_be_cancelled(transports: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """An internal error ends the connection. The worker goes on, and so does the task."""
    async with open_led(transports) as (client, server, worker), trio.open_nursery() as nursery:
        failed = False

        def wake_leader(_: Listening) -> None:
            nonlocal failed
            failed = True
            raise MemoryError("injected")

        nursery.start_soon(server.receive)
        await wait_led(worker)
        with monkeypatch.context() as patch, trio.fail_after(10):
            patch.setattr(Listening, "wake_leader", wake_leader)
            client.send_nowait(b"x")
            internals(client.worker).links.flush()
            while not failed:
                internals(worker).reap()  # delivers before the leader runs
        nursery.cancel_scope.cancel()
        with trio.fail_after(10):
            await until(lambda: not nursery.child_tasks)
        with pytest.raises(trio.BrokenResourceError, match="injected"):
            await server.receive()
        async with open_pair(client.worker, worker) as (later, later_server):
            await later.send(b"y")
            with trio.fail_after(10):
                assert await later_server.receive() == b"y"


async def test_the_worker_is_closed_under_it(transports: str) -> None:
    async with open_led(transports) as (_, server, worker), trio.open_nursery() as nursery:
        nursery.start_soon(expect_closed, server.receive)
        await wait_led(worker)
        with trio.fail_after(10), pytest.warns(ResourceWarning):
            close_now(internals(worker))
            await until(lambda: not nursery.child_tasks)
