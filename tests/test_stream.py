"""The byte stream of a Connection."""

from __future__ import annotations

import pytest
import trio
import trio.testing
from helpers import open_pair, pattern

import trio_ucx
from trio_ucx import ucp


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


async def test_trio_s_own_checks(worker: ucp.Worker) -> None:
    [listener] = await trio_ucx.open_ucx_listeners(0, host="127.0.0.1", worker=worker)

    async def maker() -> tuple[trio_ucx.Connection, trio_ucx.Connection]:
        client = await trio_ucx.open_ucx_stream(*listener.address, worker=worker)
        return client, await listener.accept()

    async def clogged_maker() -> tuple[trio_ucx.Connection, trio_ucx.Connection]:
        client, server = await maker()
        for end in (client, server):
            with pytest.raises(trio.WouldBlock):
                while True:
                    end._link.submit_nowait(2**31 + 1, bytes(3000))
            with pytest.raises(trio.WouldBlock):
                while True:
                    end._link.submit_nowait(2**31 + 1, b"x")
        return client, server

    async with listener:
        await trio.testing.check_half_closeable_stream(maker, clogged_maker)


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
