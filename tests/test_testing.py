"""``trio_ucx.testing``: pairs, faults, and a peer in another process; and what mock clocks do."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager
from functools import partial
from typing import Any

import pytest
import trio
import trio.testing
from helpers import echo, open_pair, pattern

import trio_ucx
from trio_ucx import testing, ucp
from trio_ucx.testing import Faults, open_connection_pair, open_peer_process

open_over_tcp = partial(open_connection_pair, host="127.0.0.1")
PAIRS = [open_connection_pair, open_over_tcp, testing.open_clogged_pair]
OpenPair = Callable[..., AbstractAsyncContextManager[Any]]
SIZES = [0, 10, 5000, 100_000, 3 * 2**20]


# ---- handlers in the other process ----


async def tell(connection: trio_ucx.Connection, *, what: bytes) -> None:
    await connection.send(what)


async def fail(connection: trio_ucx.Connection) -> None:
    await connection.ping()  # the other process has accepted
    raise ValueError("the handler's own")


async def hang(connection: trio_ucx.Connection) -> None:
    await trio.sleep_forever()


# ---- pairs ----


@pytest.mark.parametrize("open_pair", PAIRS)
async def test_pairs_end_with_their_block(worker: ucp.Worker, open_pair: OpenPair) -> None:
    with trio.fail_after(20):
        async with open_pair(worker=worker) as (client, server):
            await client.ping()
            await client.aclose() if open_pair is open_connection_pair else None
        assert client.closed and server.closed
        with pytest.raises(ZeroDivisionError):
            async with open_pair(worker=worker) as (client, server):
                1 / 0  # noqa: B018
        assert client.closed and server.closed


# ---- faults ----


async def test_bytes_are_dropped_after_so_many(worker: ucp.Worker) -> None:
    async with open_connection_pair(worker=worker, close_timeout=0.2) as (client, server):
        with trio.fail_after(20):
            faults = Faults(client)
            faults.drop_after(150)
            await client.send(bytes(100), tag=1)
            assert await server.receive(tag=1) == bytes(100)
            await client.send(bytearray(2000), tag=1)  # does not fit
            await client.send(b"", tag=1)  # nothing after it does
            await client.send_all(b"x")
            with trio.move_on_after(0.1) as waited:
                await client.send(bytes(100_000), tag=1)
            assert waited.cancelled_caught
            with trio.move_on_after(0.1) as waited:
                await server.receive(tag=1)
            assert waited.cancelled_caught
            with trio.move_on_after(0.1) as waited:
                await server.receive_some()
            assert waited.cancelled_caught
            await server.send(b"the other direction", tag=1)
            assert await client.receive(tag=1) == b"the other direction"
            with pytest.raises(trio.BrokenResourceError, match="did not acknowledge"):
                await client.aclose()
            await client.wait_buffers_released()


async def test_nothing_gets_through_any_more(worker: ucp.Worker) -> None:
    async with open_over_tcp(worker=worker) as (client, server):
        Faults(server).drop_after(0)
        with trio.fail_after(20), trio.move_on_after(0.2) as waited:
            await client.ping()
        assert waited.cancelled_caught


@pytest.mark.parametrize("size", SIZES)
async def test_delay(worker: ucp.Worker, size: int) -> None:
    """In order, and in both ways of sending; a message that stays with its sender keeps it waiting."""
    async with open_connection_pair(worker=worker) as (client, server):
        with trio.fail_after(20):
            Faults(client).delay(0.2)
            began = time.monotonic()
            async with trio.open_nursery() as nursery:
                for number in range(4):
                    data = pattern(size, number)
                    nursery.start_soon(partial(client.send, bytearray(data) if number % 2 else data, tag=1))
                    await trio.testing.wait_all_tasks_blocked(0.001)
                for number in range(4):
                    assert await server.receive(tag=1) == pattern(size, number)
                    assert time.monotonic() - began > 0.2
            Faults(client).delay(0)
            assert await client.ping() + time.monotonic() - began > 0.2
            assert min([await client.ping() for _ in range(5)]) < 0.2
            await client.aclose()


async def test_a_delayed_byte_stream(worker: ucp.Worker) -> None:
    async with open_over_tcp(worker=worker) as (client, server):
        with trio.fail_after(30):
            for connection in (client, server):
                Faults(connection).delay(0.02)
            data = pattern(3_000_000)
            async with trio.open_nursery() as nursery:

                async def send() -> None:
                    await client.send_all(data)
                    await client.send_eof()

                nursery.start_soon(send)
                got = bytearray()
                while part := await server.receive_some():
                    got += part
            assert got == data
            await client.aclose()


@pytest.mark.parametrize("how", ["abort", "cancel", "leave"])
async def test_what_is_late_when_the_connection_ends_is_lost(worker: ucp.Worker, how: str) -> None:
    buffer = bytearray(100_000)
    async with open_connection_pair(worker=worker) as (client, server):
        with trio.fail_after(20):
            delay = 2 if how == "abort" else 0.3
            Faults(client).delay(delay)
            await client.send(b"late", tag=1)
            with trio.move_on_after(0.05):
                await client.send(buffer, tag=1)
            if how == "abort":
                client.abort()
                with pytest.raises(trio.BrokenResourceError):
                    await server.receive(tag=1)
            elif how == "cancel":  # the messages go on
                assert await server.receive(tag=1) == b"late"
                assert await server.receive(tag=1) == buffer
    with trio.fail_after(20):
        await client.wait_buffers_released()
        await trio.sleep(delay)
    buffer.append(0)


async def test_wrong_arguments() -> None:
    with pytest.raises(TypeError):
        Faults(3)  # type: ignore[arg-type]
    async with open_connection_pair() as (client, _):
        faults = Faults(client)
        for call in (partial(faults.drop_after, -1), partial(faults.delay, -1), partial(faults.delay, float("inf"))):
            with pytest.raises(ValueError):
                call()
        for wrong in (partial(faults.drop_after, "x"), partial(faults.delay, "x")):  # type: ignore[arg-type]
            with pytest.raises(TypeError):
                wrong()


# ---- a peer in another process ----


@pytest.mark.parametrize("options", [{}, {"shared_memory": False}, {"host": "127.0.0.1"}])
async def test_peer_process(options: dict[str, Any]) -> None:
    with trio.fail_after(60):
        async with open_peer_process(echo, **options) as (connection, _):
            names = {transport.name for transport in connection.endpoint.transports}
            assert ("tcp" in names) == (options == {"shared_memory": False}), names
            for size in SIZES:
                async with trio.open_nursery() as nursery:
                    nursery.start_soon(connection.send, pattern(size))
                    assert await connection.receive() == pattern(size)
        assert connection.closed


@pytest.mark.parametrize("shared_memory", [False, True])
async def test_kill_freeze_and_thaw(shared_memory: bool) -> None:
    with trio.fail_after(60):
        async with open_peer_process(echo, shared_memory=shared_memory) as (connection, faults):
            await connection.ping()
            faults.freeze()
            with trio.move_on_after(0.3) as waited:
                await connection.ping()
            assert waited.cancelled_caught
            faults.thaw()
            await connection.ping()
            faults.freeze()
            faults.kill_peer()
            with pytest.raises(trio.BrokenResourceError):
                await connection.receive()
            faults.freeze()  # it has ended: no effect
            faults.thaw()


async def test_faults_of_a_peer_process() -> None:
    with trio.fail_after(60):
        async with open_peer_process(echo) as (connection, faults):
            faults.delay(0.2)
            assert await connection.ping() >= 0.2
            faults.drop_after(0)
            with trio.move_on_after(0.3) as waited:
                await connection.ping()
            assert waited.cancelled_caught
        async with open_peer_process(hang) as (connection, faults):
            faults.freeze()  # leaving the block does not wait for it


async def test_handlers(capfd: pytest.CaptureFixture[str]) -> None:
    with trio.fail_after(60):
        async with open_peer_process(partial(tell, what=b"hello")) as (connection, _):
            assert await connection.receive() == b"hello"
        with pytest.raises(RuntimeError, match="has failed: its process ended with 1"):
            async with open_peer_process(fail) as (connection, _):
                with pytest.raises(trio.BrokenResourceError):
                    await connection.receive()
        assert "the handler's own" in capfd.readouterr().err

        async def local(connection: trio_ucx.Connection) -> None:
            pass

        for handler in (local, lambda _: trio.sleep(0)):
            with pytest.raises(ValueError, match="cannot be sent to another process"):
                await open_peer_process(handler).__aenter__()
        with pytest.raises(TypeError):
            await open_peer_process(3).__aenter__()  # type: ignore[arg-type]


# ---- mock clocks ----


async def exchange(transports: str, open_pair: OpenPair, sizes: list[int]) -> None:
    async with ucp.open_worker(config={"TLS": transports}) as worker:
        began = trio.current_time()
        async with open_pair(worker=worker) as (client, server):
            for size in sizes:
                for _ in range(20):
                    with trio.fail_after(0.001):
                        async with trio.open_nursery() as nursery:
                            nursery.start_soon(client.send, bytes(size))
                            assert len(await server.receive()) == size
            assert trio.current_time() == began
            Faults(client).delay(3600)
            await client.send(b"late")
            with trio.move_on_after(3599) as early:
                await server.receive()
            assert early.cancelled_caught
            assert await server.receive() == b"late"
            assert trio.current_time() == began + 3600


@pytest.mark.parametrize("open_pair", [open_connection_pair, open_over_tcp])
async def test_autojump_is_exact_for_short_messages(
    transports: str, autojump_clock: trio.testing.MockClock, open_pair: OpenPair
) -> None:
    """In one process. No time passes while they are on their way."""
    await exchange(transports, open_pair, [0, 10, 5000])


@pytest.fixture
def patient_clock() -> trio.testing.MockClock:
    return trio.testing.MockClock(autojump_threshold=0.01)


@pytest.mark.parametrize("open_pair", [open_connection_pair, open_over_tcp])
async def test_autojump_with_a_threshold_is_exact_for_all(
    transports: str, patient_clock: trio.testing.MockClock, open_pair: OpenPair
) -> None:
    await exchange(transports, open_pair, SIZES)


async def no_time_to_close(connection: trio_ucx.Connection) -> None:
    began = trio.current_time()
    await connection.aclose()
    assert trio.current_time() == began


async def read(connection: trio_ucx.Connection) -> None:
    async for _ in connection.messages(1):
        pass


async def test_no_time_passes_while_a_connection_closes(
    worker: ucp.Worker, autojump_clock: trio.testing.MockClock
) -> None:
    """The other end waits in a receive on the same worker."""
    for _ in range(10):
        async with open_connection_pair(worker=worker) as (client, server), trio.open_nursery() as nursery:
            nursery.start_soon(read, server)
            await client.send(b"x", tag=1)
            await trio.sleep(1)
            await no_time_to_close(client)


async def test_no_time_passes_while_a_batch_waits(transports: str, autojump_clock: trio.testing.MockClock) -> None:
    config = {"TLS": transports}
    async with ucp.open_worker(config=config) as worker, ucp.open_worker(config=config) as other:
        async with open_pair(worker, other) as (client, server):
            for _ in range(20):
                client.send_nowait(b"first")
                client.send_nowait(b"second")
                await trio.sleep(1)
                assert [server.receive_nowait() for _ in range(2)] == [b"first", b"second"]


async def test_no_time_passes_while_a_worker_is_left_disarmed(
    transports: str, autojump_clock: trio.testing.MockClock
) -> None:
    """The only task that waits has come back so often that it is expected to, and sleeps instead."""
    config = {"TLS": transports}
    async with ucp.open_worker(config=config) as worker, ucp.open_worker(config=config) as other:
        for _ in range(10):
            async with open_pair(worker, other) as (client, server), trio.open_nursery() as nursery:
                for _ in range(100):
                    server.send_nowait(b"x")
                    await client.receive()
                nursery.start_soon(no_time_to_close, server)
                await trio.sleep(1)


async def test_autojump_jumps_before_a_peer_process_connects(autojump_clock: trio.testing.MockClock) -> None:
    real = time.monotonic()
    with trio.move_on_after(10_000) as scope:
        async with open_peer_process(echo):
            raise AssertionError("it cannot have connected")
    assert scope.cancelled_caught and trio.current_time() >= 10_000
    assert time.monotonic() - real < 60
