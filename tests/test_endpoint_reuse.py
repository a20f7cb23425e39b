"""Endpoints of gracefully closed connections are reused; when endpoint numbers run out, another worker takes over."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial

import pytest
import trio
from helpers import assert_transports, open_peer, pattern, until
from injected_faults import fill_worker, limit_endpoint_numbers

import trio_ucx
from trio_ucx import ucp
from trio_ucx.testing import internals, live_handles


@asynccontextmanager
async def open_echo(transports: str) -> AsyncIterator[tuple[ucp.Worker, trio_ucx.Listener]]:
    """A server that sends messages back, on a worker of its own in this process."""

    async def echo(connection: trio_ucx.Connection) -> None:
        try:
            async for message in connection.messages(1):
                await connection.send(message, 1)
        except trio.BrokenResourceError:
            pass

    async with ucp.open_worker(config={"TLS": transports}) as worker, trio.open_nursery() as nursery:
        [listener] = await nursery.start(partial(trio_ucx.serve_ucx, echo, 0, host="127.0.0.1", worker=worker))
        yield worker, listener
        nursery.cancel_scope.cancel()


async def works(connection: trio_ucx.Connection, seed: int) -> None:
    with trio.fail_after(15):
        for size in (10, 100_000):
            await connection.send(pattern(size, seed), 1)
            assert await connection.receive(1) == pattern(size, seed)


def endpoints_made(worker: ucp.Worker, other: ucp.Worker) -> int:
    return internals(worker).numbering.of(other.address.uid).numbers().next


async def test_connections_in_turn_share_endpoints(worker: ucp.Worker, transports: str) -> None:
    async with open_echo(transports) as (server, listener):
        for number in range(20):
            async with trio_ucx.connect(listener.address, worker=worker) as connection:
                await works(connection, number)
            await until(lambda: server.statistics().endpoints == 0)  # it has closed its side, too
        assert endpoints_made(worker, server) < 10
        assert worker.statistics().endpoints == 0
        with trio.fail_after(15):  # nobody comes: they are closed
            await until(lambda: not live_handles().get("endpoint", 0))


async def test_what_one_connection_left_does_not_reach_the_next(worker: ucp.Worker, transports: str) -> None:
    async with ucp.open_worker(config={"TLS": transports}) as other:
        [listener] = await trio_ucx.open_ucx_listeners(0, host="127.0.0.1", worker=other)
        async with listener:
            for number in range(10):
                async with trio_ucx.connect(listener.address, worker=worker) as client:
                    server = await listener.accept()
                    await client.send(bytes([number]), 5)
                    await client.send(b"never read", 6)
                    await client.send_all(b"never read, either")
                    await server.send(b"nor this", 7)
                    assert await server.receive(5) == bytes([number])
                    with pytest.raises(trio.WouldBlock):
                        server.receive_nowait(8)
                await server.aclose()


@pytest.mark.parametrize("how", ["aborted", "in hand", "large send under way"])
async def test_endpoints_that_are_not_used_again(worker: ucp.Worker, transports: str, how: str) -> None:
    async with open_echo(transports) as (server, listener):
        for number in range(5):
            connection = await trio_ucx.connect(listener.address, worker=worker).__aenter__()
            await works(connection, number)
            if how == "in hand":
                assert_transports(connection, transports)
                await connection.aclose()
            else:
                if how == "large send under way":
                    connection.send_nowait(bytes(2**24), 9)
                connection.abort()
        async with trio_ucx.connect(listener.address, worker=worker) as connection:
            await works(connection, 9)
        assert endpoints_made(worker, server) >= 6


async def test_ways_are_not_mixed_up(worker: ucp.Worker, transports: str) -> None:
    """An endpoint over shared memory is of no use to a connection without."""
    async with open_echo(transports) as (_, listener):
        for number in range(6):
            shared = number % 2 == 0
            wish: bool | str = "auto" if shared else False
            connection = await trio_ucx.connect(
                listener.address,
                worker=worker,
                shared_memory=wish,  # type: ignore[arg-type]
            ).__aenter__()
            await works(connection, number)
            assert internals(connection).core.peer_address is not None
            if number == 5:
                assert {one.name for one in connection.endpoint.transports} == {"tcp"}
            await connection.aclose()


async def test_idle_endpoint_to_a_process_that_ends(worker: ucp.Worker, transports: str) -> None:
    async with open_peer("echo", [1], transports=transports) as peer:
        address, _ = await peer.hear()
        async with trio_ucx.connect(tuple(address), worker=worker) as connection:
            await works(connection, 1)
        peer.process.kill()
        await peer.process.wait()
        with pytest.raises(OSError):
            await trio_ucx.open_ucx_stream(*address, worker=worker)
    await until(lambda: not live_handles().get("endpoint", 0))


async def test_used_up_numbers(worker: ucp.Worker, transports: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """UCX has 65,535 for two workers. The server then goes on with others, and closes those that nobody uses."""
    limit_endpoint_numbers(monkeypatch, 12)
    async with open_echo(transports) as (server, listener):
        async with trio_ucx.connect(listener.address, worker=worker) as first:
            for number in range(60):
                async with trio_ucx.connect(listener.address, worker=worker) as connection:
                    await works(connection, number)
                await works(first, number)
            assert server._successors
            await until(lambda: len(live_handles()) > 0 and live_handles()["worker"] <= 5)


async def test_worker_that_is_full(worker: ucp.Worker, transports: str) -> None:
    """UCX has room for 255 kinds of endpoints in a worker. A client that names ever other devices could use it up."""
    async with open_echo(transports) as (server, listener):
        async with trio_ucx.connect(listener.address, worker=worker) as before:
            fill_worker(server)
            async with trio_ucx.connect(listener.address, worker=worker) as connection:
                await works(connection, 1)
            await works(before, 2)
        assert len(server._successors) == 1


async def test_raw_endpoints_use_numbers_up_too(
    worker: ucp.Worker, transports: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    limit_endpoint_numbers(monkeypatch, 5)
    async with open_echo(transports) as (server, listener):
        for _ in range(8):
            (await worker.open_endpoint(server.address)).abort()
        for number in range(3):
            async with trio_ucx.connect(listener.address, worker=worker) as connection:
                await works(connection, number)
        assert server._successors
