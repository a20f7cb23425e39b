"""The byte stream of a Connection."""

from __future__ import annotations

from functools import partial

import pytest
import trio
import trio.testing
from helpers import Certificates, open_pair, pattern

import trio_ucx
from trio_ucx import ucp
from trio_ucx.testing import open_clogged_pair, open_connection_pair, open_pair_over_listener


async def test_bytes_arrive_in_order_beside_messages(worker: ucp.Worker) -> None:
    data = pattern(2**22)
    async with open_pair(worker) as (client, server), trio.open_nursery() as nursery:

        async def send() -> None:
            for start in range(0, len(data), 100_001):
                await client.send_all(data[start : start + 100_001])
                await client.send(start.to_bytes(4, "little"), 1)
            await client.send_all(b"")
            await client.send_eof()
            await client.send(b"after", 1)

        nursery.start_soon(send)
        got = b"".join([chunk async for chunk in server])
        assert got == data
        for start in range(0, len(data), 100_001):
            assert await server.receive(1) == start.to_bytes(4, "little")
        assert await server.receive(1) == b"after"
        with pytest.raises(trio.ClosedResourceError, match="send_eof"):
            await client.send_all(b"x")
        await server.send_all(b"the other way")
        assert await client.receive_some(3) == b"the"
        assert await client.receive_some(100) == b" other way"


async def test_one_task_at_a_time(worker: ucp.Worker) -> None:
    async with open_pair(worker) as (client, _), trio.open_nursery() as nursery:
        nursery.start_soon(client.receive_some)
        await trio.testing.wait_all_tasks_blocked()
        with pytest.raises(trio.BusyResourceError):
            await client.receive_some()
        nursery.cancel_scope.cancel()


RUNS = 20  # in a row, without a failure


async def test_trio_s_checks_of_a_half_closeable_stream(worker: ucp.Worker) -> None:
    for _ in range(RUNS):
        await trio.testing.check_half_closeable_stream(
            partial(open_pair_over_listener, worker=worker), partial(open_clogged_pair, worker=worker)
        )


async def test_trio_s_checks_by_worker_address(worker: ucp.Worker) -> None:
    await trio.testing.check_half_closeable_stream(partial(open_connection_pair, worker=worker), None)


async def test_trio_s_checks_under_tls(worker: ucp.Worker, certificates: Certificates) -> None:
    async def maker() -> tuple[trio.SSLStream[trio_ucx.Connection], trio.SSLStream[trio_ucx.Connection]]:
        client, server = await open_pair_over_listener(worker=worker)
        return (
            trio.SSLStream(client, certificates.client, server_hostname="localhost"),
            trio.SSLStream(server, certificates.server, server_side=True),
        )

    for _ in range(RUNS):
        await trio.testing.check_two_way_stream(maker, None)


async def test_cancelled_send_eof_can_be_called_again(worker: ucp.Worker) -> None:
    async with open_pair(worker) as (client, server):
        with pytest.raises(trio.WouldBlock):
            while True:
                client.send_nowait(b"", 1)
        with trio.move_on_after(0.05) as scope:
            await client.send_eof()
        assert scope.cancelled_caught
        async with trio.open_nursery() as nursery:
            nursery.start_soon(client.send_eof)
            with trio.fail_after(2):
                assert await server.receive_some() == b""
