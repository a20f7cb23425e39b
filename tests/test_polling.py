"""Polling: a waiting task polls before it parks; schedule points."""

from __future__ import annotations

import math
import os
from collections.abc import Iterator
from contextlib import contextmanager
from time import perf_counter

import pytest
import trio
import trio.testing
from helpers import open_listener, open_pair, open_peer, open_raw_pair, pattern, tasks_begin, until
from timing import Stopwatch

import trio_ucx
from trio_ucx import ucp
from trio_ucx._util.arguments import ALL_BITS
from trio_ucx.testing import internals
from trio_ucx.ucp._engine import waits
from trio_ucx.ucp._engine.listening import LONG_TICK, State
from trio_ucx.ucp._engine.operations import Operation
from trio_ucx.ucp._tag import post_receive, post_send


class Ticks(trio.abc.Instrument):
    """Counts the rounds of Trio's loop."""

    def __init__(self) -> None:
        self.count = 0

    def before_io_wait(self, timeout: float) -> None:
        self.count += 1


class RoundsToWake(trio.abc.Instrument):
    """Counts the rounds from the end of Trio's last wait, for whatever, to a step of a task."""

    def __init__(self, task: trio.lowlevel.Task) -> None:
        self._task = task
        self._rounds = 0
        self.counts: list[int] = []

    def before_io_wait(self, timeout: float) -> None:
        self._rounds = 0 if timeout > 0 else self._rounds + 1

    def before_task_step(self, task: trio.lowlevel.Task) -> None:
        if task is self._task:
            self.counts.append(self._rounds)


@contextmanager
def ticks() -> Iterator[Ticks]:
    instrument = Ticks()
    trio.lowlevel.add_instrument(instrument)
    try:
        yield instrument
    finally:
        trio.lowlevel.remove_instrument(instrument)


async def echoed(connection: trio_ucx.Connection, count: int) -> None:
    for number in range(count):
        data = pattern(8, number)
        await connection.send(data, tag=1)
        assert await connection.receive(tag=1) == data


async def test_no_polling_where_the_peer_needs_the_core() -> None:
    """Such a poll finds the answer, because the kernel gives the core to the peer meanwhile; but it delays it."""
    cores = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {min(cores)})
    try:
        async with open_peer("counts_polls", 3000, under=["taskset", "-c", str(min(cores))]) as peer:
            async with ucp.open_worker() as worker, trio_ucx.connect(tuple(await peer.hear()), worker=worker) as client:
                await echoed(client, 3000)
                polls = worker.statistics().polls + await peer.hear()
    finally:
        os.sched_setaffinity(0, cores)
    assert polls < 1500  # most often 100 to 300; without the rule, 3000 at one of the sides


@pytest.mark.parametrize("rounds", range(1, 6))
async def test_cancelled_before_the_connection_ended(worker: ucp.Worker, rounds: int) -> None:
    """A task that polls at that moment gets the cancellation, as one that is parked does."""
    scope = trio.CancelScope()

    async def receive(connection: trio_ucx.Connection) -> None:
        with scope:
            await connection.receive()

    async with open_pair(worker) as (client, _), trio.open_nursery() as nursery:
        nursery.start_soon(receive, client)
        for _ in range(rounds):
            await trio.lowlevel.checkpoint()
        scope.cancel()
        client.abort()  # raises trio.ClosedResourceError in a receive that was not cancelled


@pytest.mark.parametrize("rounds", range(1, 6))
@pytest.mark.parametrize("first", ["cancelled", "arrived"])
@pytest.mark.parametrize("kind", ["connection", "raw"])
async def test_a_cancelled_receive_reports_what_it_has_dropped(
    worker: ucp.Worker, rounds: int, first: str, kind: str
) -> None:
    """A message that is too long arrives: it stays, or the receive says that it was dropped, cancelled or not."""
    scope = trio.CancelScope()
    raised: list[trio_ucx.UCXError] = []

    async with open_pair(worker) as (client, server), trio.open_nursery() as nursery:

        async def receive() -> None:
            with scope:
                try:
                    if kind == "raw":
                        await worker.tag_receive(bytearray(1), 1)
                    else:
                        await server.receive(tag=1, max_size=1)
                except trio_ucx.UCXError as error:
                    raised.append(error)

        nursery.start_soon(receive)
        for _ in range(rounds):
            await trio.lowlevel.checkpoint()
        [receiver] = nursery.child_tasks
        if first == "cancelled":
            scope.cancel()
        if kind == "raw":
            post_send(client._link.share, b"too long", 1)
        else:
            client.send_nowait(b"too long", tag=1)
        deadline = perf_counter() + 0.05  # it arrives meanwhile, with no other task running
        while perf_counter() < deadline:
            worker._engine.reap()
        scope.cancel()
        await until(lambda: receiver not in nursery.child_tasks)
        if not raised:
            with trio.fail_after(5):
                if kind == "raw":
                    assert await worker.tag_receive(bytearray(10), 1) == (8, 1)
                else:
                    assert await server.receive(tag=1) == b"too long"


async def test_a_task_that_posts_in_every_round_starves_nobody(worker: ucp.Worker) -> None:
    async with open_raw_pair(worker) as (client, _), trio.open_nursery() as nursery:
        nursery.start_soon(worker.tag_receive, bytearray(8), 1)
        await trio.testing.wait_all_tasks_blocked()
        posted = []
        with trio.fail_after(10):
            while nursery.child_tasks:
                if len(posted) == 200:
                    post_send(internals(client), b"for it", 1)
                operation = post_receive(internals(worker), bytearray(8), 2, ALL_BITS)
                assert isinstance(operation, Operation)
                posted.append(operation)
                await trio.lowlevel.checkpoint()
        for operation in posted:
            operation.cancel()


async def test_a_receive_is_cancelled_at_once_after_many_in_a_row(worker: ucp.Worker) -> None:
    """The timer that ends FREE would end it later."""
    async with open_pair(worker) as (client, server):
        engine = internals(worker)
        late = []
        for _ in range(10):
            with trio.fail_after(10):
                while True:
                    await client.send(b"x")
                    await server.receive()
                    if (
                        engine.listening.state is State.FREE
                        and engine.progress_task.safety_net._tick_after == LONG_TICK
                    ):
                        break
            with trio.move_on_after(0.0005) as scope:
                await worker.tag_receive(bytearray(8), 3)
            late.append(trio.current_time() - scope.deadline)
        assert min(late) < 0.003


async def test_who_posts_arms_the_worker_again_for_a_task_that_waits(worker: ucp.Worker) -> None:
    """Posting progresses the worker, and that disarms it. What arrives then must not be left to the safety net."""
    async with open_pair(worker) as (client, server):
        engine = internals(worker)
        got: list[bytes] = []

        async def receive() -> None:
            got.append(await server.receive())

        async with trio.open_nursery() as nursery:
            for number in range(20):
                nursery.start_soon(receive)
                await trio.testing.wait_all_tasks_blocked()
                assert engine.listening.heard
                operation = post_receive(engine, bytearray(8), 3, ALL_BITS)
                assert isinstance(operation, Operation)
                await client.send(b"%d" % number)
                with trio.fail_after(10):
                    await until(lambda number=number: len(got) > number)  # type: ignore[misc]
                operation.cancel()
        assert worker.statistics().missed_events == 0


@pytest.mark.parametrize("rounds", range(1, 6))
async def test_a_loss_that_a_cancelled_task_was_not_told(worker: ucp.Worker, rounds: int) -> None:
    """Then closing says that what was sent may not have arrived."""
    scope = trio.CancelScope()

    async def receive(connection: trio_ucx.Connection) -> None:
        with scope:
            await connection.receive()

    async with open_pair(worker) as (client, server), trio.open_nursery() as nursery:
        await client.send(b"x")
        nursery.start_soon(receive, client)
        for _ in range(rounds):
            await trio.lowlevel.checkpoint()
        scope.cancel()
        client._link.closing.cut_off("broken", "is lost")
        await until(lambda: not nursery.child_tasks)
        with pytest.raises(trio_ucx.PeerLost, match="may not have been delivered"):
            await client.aclose()
        server.abort()


async def test_tasks_run_before_the_progress_task_polls(worker: ucp.Worker) -> None:
    """A poll keeps all others waiting, so whoever has work comes first, whether the worker has woken it or not."""
    polls = 0

    async def work(ran: trio.Event) -> None:
        ran.set()

    for _ in range(100):
        ran = trio.Event()
        async with trio.open_nursery() as nursery:
            nursery.start_soon(work, ran)
            if await worker._engine.waiting._all_wait(1):
                assert ran.is_set()
                polls += 1
    assert polls > 0, "each round took longer than one with few steps of tasks"


class NoTicks:
    """Stands for the timer that makes the progress task listen if no task has come back."""

    def start(self) -> bool:
        return False

    def cancel(self) -> None:
        pass


async def test_tasks_that_wait_for_long(transports: str) -> None:
    """One task that alone gets messages listens for those that are parked, too. When it sleeps, they are served."""
    async with (
        open_peer("echo", [1, 2], True, transports=transports) as peer,
        ucp.open_worker(config={"TLS": transports}) as worker,
        trio_ucx.connect(tuple((await peer.hear())[0]), worker=worker) as client,
    ):
        listening = worker._engine.listening
        listening._timer = NoTicks()  # type: ignore[assignment]
        with trio.fail_after(30):
            for number in range(3):
                async with trio.open_nursery() as nursery:
                    received = trio.Event()

                    async def wait(received: trio.Event = received, number: int = number) -> None:
                        assert await client.receive(tag=2) == bytes([number])
                        received.set()

                    nursery.start_soon(wait)
                    while listening.state is not State.FREE or not listening.parked:
                        await echoed(client, 50)
                    await client.send(bytes([number]), tag=2)
                    if number == 0:
                        await trio.testing.wait_all_tasks_blocked()
                        assert not listening.nobody_listens()
                    await trio.sleep(0.01)  # Trio waits, and nobody has come back
                    await received.wait()


async def test_a_poll_finds_what_has_arrived(transports: str) -> None:
    """With a long yield_interval, nothing but the poll can find it: no other task runs in between."""
    async with ucp.open_worker(config={"TLS": transports}, yield_interval=60) as worker:
        async with open_pair(worker) as (client, server):
            await client.send(b"x", tag=1)
            assert await server.receive(tag=1) == b"x"
            for _ in range(20):  # polling pauses when another process has used the core
                await trio.sleep(0.01)
                before = worker.statistics()
                with ticks() as loop:
                    for number in range(100):
                        data = pattern(8, number)
                        client.send_nowait(data, tag=1)
                        assert await server.receive(tag=1) == data
                after = worker.statistics()
                found = after.polls_paid - before.polls_paid + loop.count
                if found >= 90:
                    break
            assert found >= 90, "neither polls nor rounds brought messages"
            assert after.polls_paid > before.polls_paid
            assert after.poll_seconds > before.poll_seconds
            assert after.poll_limit <= 100e-6


async def test_spin_is_the_bound(transports: str) -> None:
    async with open_peer("echo", [1], True, transports=transports) as peer:
        address, _ = await peer.hear()
        for spin in (0, 1e-5, 0.01):
            async with ucp.open_worker(config={"TLS": transports}, spin=spin) as worker:
                async with trio_ucx.connect(tuple(address), worker=worker) as connection:
                    with trio.fail_after(30):
                        await echoed(connection, 300)
                statistics = worker.statistics()
                assert statistics.poll_limit <= spin
                assert (statistics.polls == 0) == (spin == 0)


@pytest.mark.parametrize("who", ["the task itself", "another task"])
async def test_a_long_poll_delays_no_deadline(transports: str, who: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A poll of up to a second ends at the deadline."""
    monkeypatch.setattr(waits, "_ALONE", math.inf)  # else a delay of the machine, taken for another task, may end it
    for _ in range(10):  # the machine may stand still between two slices of the poll
        async with ucp.open_worker(config={"TLS": transports}, spin=1) as worker, open_pair(worker) as (_, server):
            before = worker.statistics().poll_seconds
            with Stopwatch(0.5):
                async with trio.open_nursery() as nursery:
                    if who == "another task":
                        nursery.start_soon(server.receive)
                        await trio.sleep(0.05)
                        nursery.cancel_scope.cancel()
                    else:
                        with trio.move_on_after(0.05):
                            await server.receive()
            if worker.statistics().poll_seconds - before > 0.03:
                return
    pytest.fail("no poll went on until the deadline")


async def test_polling_in_vain_ends(transports: str) -> None:
    """When nothing arrives, a task stops polling after a few polls."""
    async with ucp.open_worker(config={"TLS": transports}) as worker, open_pair(worker) as (_, server):
        before = worker.statistics().polls
        for _ in range(50):
            with trio.move_on_after(0.001):
                await server.receive(tag=1)
        assert worker.statistics().polls - before <= 10


async def test_nobody_polls_while_others_run(transports: str) -> None:
    """Fifty tasks are always runnable: a waiting task does not delay them by polling."""
    async with open_peer("echo", [1], True, transports=transports) as peer:
        address, _ = await peer.hear()
        async with ucp.open_worker(config={"TLS": transports}) as worker:
            async with trio_ucx.connect(tuple(address), worker=worker) as connection, trio.open_nursery() as nursery:
                await echoed(connection, 50)

                async def busy() -> None:
                    while True:
                        await trio.lowlevel.checkpoint()

                for _ in range(50):
                    nursery.start_soon(busy)
                await tasks_begin()
                before = worker.statistics().polls
                with trio.fail_after(30):
                    await echoed(connection, 100)
                assert worker.statistics().polls - before <= 10
                nursery.cancel_scope.cancel()


async def test_a_parked_task_runs_in_the_round_that_begins_with_its_event(transports: str) -> None:
    config = {"TLS": transports}
    async with ucp.open_worker(config=config) as there, ucp.open_worker(config=config, spin=0) as worker:
        async with open_pair(there, worker) as (client, server):
            watch = RoundsToWake(trio.lowlevel.current_task())

            async def send_later(data: bytes) -> None:
                await trio.sleep(0.002)
                trio.lowlevel.add_instrument(watch)
                client.send_nowait(data, tag=1)

            with trio.fail_after(30):
                for number in range(50):
                    data = pattern(8, number)
                    async with trio.open_nursery() as nursery:
                        nursery.start_soon(send_later, data)
                        assert await server.receive(tag=1) == data
                        trio.lowlevel.remove_instrument(watch)
    assert len(watch.counts) == 50
    assert watch.counts.count(0) > 40, watch.counts


async def receive_to(connection: trio_ucx.Connection, got: list[bytes]) -> None:
    got.append(await connection.receive(tag=2))


async def test_worker_is_armed_for_other_tasks(transports: str) -> None:
    """A task polls all the time, and then does something else; another task's message is still noticed."""
    async with open_peer("echo", [1, 2], True, transports=transports) as peer:
        address, _ = await peer.hear()
        config = {"TLS": transports, "KEEPALIVE_INTERVAL": "inf"}
        async with ucp.open_worker(config=config) as worker:
            async with trio_ucx.connect(tuple(address), worker=worker) as connection:
                for number in range(200):
                    with trio.fail_after(20):
                        await echoed(connection, 3)
                        got: list[bytes] = []
                        async with trio.open_nursery() as nursery:
                            nursery.start_soon(receive_to, connection, got)
                            if number % 2:
                                await trio.lowlevel.checkpoint()
                            connection.send_nowait(pattern(9, number), tag=2)
                            await trio.sleep(0)
                        assert got == [pattern(9, number)]
            assert worker.statistics().missed_events == 0


async def test_others_are_served_while_the_one_that_polled_works(transports: str) -> None:
    """The task that polled never waits again, and Trio is never idle; another task's message is still noticed."""
    async with open_peer("echo", [1, 2], True, transports=transports) as peer:
        address, _ = await peer.hear()
        async with ucp.open_worker(config={"TLS": transports}) as worker:
            async with trio_ucx.connect(tuple(address), worker=worker) as connection:
                for number in range(50):
                    got: list[bytes] = []
                    async with trio.open_nursery() as nursery:
                        nursery.start_soon(receive_to, connection, got)
                        await echoed(connection, 5)
                        connection.send_nowait(pattern(9, number), tag=2)
                        with Stopwatch(0.8, peer.process.pid), trio.fail_after(60):  # before the safety net looks
                            while not got:
                                await trio.lowlevel.checkpoint()
            assert worker.statistics().missed_events == 0


async def test_a_new_client_is_served_after_polling(transports: str) -> None:
    """The last wait left the worker disarmed, and only accept() waits."""
    config = {"TLS": transports, "KEEPALIVE_INTERVAL": "inf"}
    async with open_peer("echo", [1], True, transports=transports) as peer:
        address, _ = await peer.hear()
        async with (
            ucp.open_worker(config=config) as worker,
            ucp.open_worker(config=config) as newcomers,
            trio_ucx.connect(tuple(address), worker=worker) as connection,
        ):
            async with open_listener(worker) as listener:
                for number in range(20):
                    with trio.fail_after(15):
                        await echoed(connection, 10)
                        async with trio_ucx.connect(listener.address, worker=newcomers) as client:
                            async with await listener.accept() as server:
                                client.send_nowait(pattern(50, number))
                                await until(lambda: server.statistics().messages_received)
                                assert server.receive_nowait() == pattern(50, number)
            assert worker.statistics().missed_events == 0


async def test_yield_interval_skips_schedule_points(transports: str) -> None:
    for interval, least, most in ((0.0, 200, 10**6), (60.0, 0, 20)):
        async with ucp.open_worker(config={"TLS": transports}, yield_interval=interval) as worker:
            async with open_pair(worker) as (client, server):
                await client.send(b"x")
                assert await server.receive() == b"x"
                for _ in range(100):
                    client.send_nowait(b"y")
                await until(lambda: server.statistics().messages_received == 101)
                await client.send(b"y")
                with ticks() as loop:
                    for _ in range(100):
                        await client.send(b"z", tag=2)
                    for _ in range(100):
                        assert await server.receive() == b"y"
                assert least <= loop.count <= most, loop.count


async def test_yield_interval_notices_cancellation(transports: str) -> None:
    async with ucp.open_worker(config={"TLS": transports}, yield_interval=60) as worker:
        async with open_pair(worker) as (client, server):
            await client.send(b"x")
            assert await server.receive() == b"x"
            with trio.CancelScope() as scope:
                await client.send(b"y")
                scope.cancel()
                await client.send(b"never")
            assert scope.cancelled_caught
            await client.send(b"z")
            with trio.fail_after(15):
                assert [await server.receive(), await server.receive()] == [b"y", b"z"]


@pytest.mark.parametrize(("option", "value"), [("spin", 1.5), ("spin", math.inf), ("yield_interval", math.inf)])
async def test_options_that_would_stop_everything(option: str, value: float) -> None:
    with pytest.raises(ValueError, match=option):
        async with ucp.open_worker(**{option: value}):  # type: ignore[arg-type]
            pass


@pytest.mark.parametrize("option", ["spin", "yield_interval"])
async def test_bad_options(option: str) -> None:
    for value, error in ((-1, ValueError), (float("nan"), ValueError), ("1", TypeError), (True, TypeError)):
        with pytest.raises(error, match=option):
            async with ucp.open_worker(**{option: value}):  # type: ignore[arg-type]
                pass
