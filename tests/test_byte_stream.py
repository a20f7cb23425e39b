"""The byte stream of a Connection."""

from __future__ import annotations

import random
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from functools import partial
from typing import Any

import pytest
import trio
import trio.testing
from helpers import Certificates, Rounds, assert_free, check_stream, numbered_write, open_pair, pattern

import trio_ucx
from trio_ucx import ucp
from trio_ucx._link import sending
from trio_ucx._link.receiving import ReadBuffer
from trio_ucx.testing import open_clogged_pair, open_connection_pair


async def test_bytes_arrive_in_order_beside_messages(worker: ucp.Worker) -> None:
    data = pattern(2**22)
    async with open_pair(worker) as (client, server), trio.open_nursery() as nursery:

        async def send() -> None:
            for start in range(0, len(data), 100_001):
                await client.send_all(data[start : start + 100_001])
                await client.send(start.to_bytes(4, "little"), tag=1)
            await client.send_all(b"")
            await client.send_eof()
            await client.send(b"after", tag=1)

        nursery.start_soon(send)
        got = b"".join([chunk async for chunk in server])
        assert got == data
        for start in range(0, len(data), 100_001):
            assert await server.receive(tag=1) == start.to_bytes(4, "little")
        assert await server.receive(tag=1) == b"after"
        with pytest.raises(trio.ClosedResourceError, match="send_eof"):
            await client.send_all(b"x")
        await server.send_all(b"the other way")
        assert await client.receive_some(3) == b"the"
        assert await client.receive_some(100) == b" other way"


async def test_long_writes_go_in_pieces_without_a_threshold() -> None:
    """The reader need not wait for all of them, nor have memory for them, whatever they are written from."""
    data = pattern(2**20)
    async with ucp.open_worker(config={"TLS": "tcp", "RNDV_THRESH": "inf"}) as worker:
        async with open_pair(worker, window=2**26) as (client, server), trio.open_nursery() as nursery:
            for source in (data, bytearray(data), memoryview(data)):
                before = client.statistics().messages_sent
                nursery.start_soon(client.send_all, source)
                got = b""
                while len(got) < len(data):
                    got += await server.receive_some()
                assert got == data
                assert client.statistics().messages_sent - before >= len(data) // 2**16


async def test_a_write_is_cut_into_as_few_messages_as_can_be(worker: ucp.Worker) -> None:
    """64 KiB are one, because many programs write so much at once."""
    async with open_pair(worker) as (client, server):
        for size, most in ((2**16, 1), (2**16 + 1, 2), (200_000, 4), (2**18 - 1, 4), (2**18, 1)):
            before = client.statistics().messages_sent
            async with trio.open_nursery() as nursery:
                nursery.start_soon(client.send_all, bytearray(size))
                got = 0
                while got < size:
                    got += len(await server.receive_some())
            assert client.statistics().messages_sent - before == most, size


async def test_data_of_a_short_write_are_free_when_it_returns(
    worker: ucp.Worker, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Less than 256 KiB are copied: they wait for nobody, and may be changed at once, although nothing was received."""
    async with open_pair(worker) as (client, server):

        def pin(*args: object) -> None:
            raise AssertionError("a short write was pinned")

        monkeypatch.setattr(sending, "pin", pin)
        data = bytearray(pattern(200_000))
        with trio.fail_after(10):
            await client.send_all(data)
            await client.send_all(memoryview(data)[1:].cast("b"))
        expected = bytes(data) + bytes(data[1:])
        data[:] = bytes(len(data))
        data += b"it can be resized, so nothing has pinned it"
        got = b""
        while len(got) < len(expected):
            got += await server.receive_some()
        assert got == expected


async def test_data_of_a_write_that_failed_are_free(worker: ucp.Worker) -> None:
    """Also as long as the error is kept, whose traceback has what the write had."""
    async with open_pair(worker, window=4096) as (client, server):
        data = bytearray(200_000)
        errors: list[BaseException] = []

        async def write() -> None:
            try:
                await client.send_all(data)
            except trio.BrokenResourceError as error:
                errors.append(error)

        async with trio.open_nursery() as nursery:
            nursery.start_soon(write)
            await trio.testing.wait_all_tasks_blocked()
            server.abort()
        assert len(errors) == 1
        with trio.fail_after(10):
            await client.wait_buffers_released()
        assert_free(data)


async def test_one_task_at_a_time(worker: ucp.Worker) -> None:
    async with open_pair(worker) as (client, _), trio.open_nursery() as nursery:
        nursery.start_soon(client.receive_some)
        await trio.testing.wait_all_tasks_blocked()
        with pytest.raises(trio.BusyResourceError):
            await client.receive_some()
        nursery.cancel_scope.cancel()


Maker = Callable[[], Awaitable[tuple[trio_ucx.Connection, trio_ucx.Connection]]]
open_over_tcp = partial(open_connection_pair, host="127.0.0.1")


@asynccontextmanager
async def stream_makers(worker: ucp.Worker, *open_pairs: Any) -> AsyncIterator[list[Maker]]:
    async with AsyncExitStack() as stack:

        def maker(open_pair: Any) -> Maker:
            return lambda: stack.enter_async_context(open_pair(worker=worker))

        yield [maker(open_pair) for open_pair in open_pairs]


@pytest.mark.sample(1)
async def test_trio_s_checks_of_a_half_closeable_stream(worker: ucp.Worker, rounds: Rounds) -> None:
    for _ in range(rounds(5, 20)):  # in a row, without a failure
        async with stream_makers(worker, open_over_tcp, open_clogged_pair) as makers:
            await trio.testing.check_half_closeable_stream(*makers)


async def test_trio_s_checks_by_unix_socket(worker: ucp.Worker) -> None:
    async with stream_makers(worker, open_connection_pair) as [maker]:
        await trio.testing.check_half_closeable_stream(maker, None)


async def test_trio_s_checks_under_tls(worker: ucp.Worker, certificates: Certificates, rounds: Rounds) -> None:
    async def maker() -> tuple[trio.SSLStream[trio_ucx.Connection], trio.SSLStream[trio_ucx.Connection]]:
        client, server = await open_pair()
        return (
            trio.SSLStream(client, certificates.client, server_hostname="localhost"),
            trio.SSLStream(server, certificates.server, server_side=True),
        )

    for _ in range(rounds(5, 20)):
        async with stream_makers(worker, open_over_tcp) as [open_pair]:
            await trio.testing.check_two_way_stream(maker, None)


async def test_cancelled_send_eof_can_be_called_again(worker: ucp.Worker) -> None:
    async with open_pair(worker) as (client, server):
        with pytest.raises(trio.WouldBlock):
            while True:
                client.send_nowait(b"", tag=1)
        with trio.move_on_after(0.05) as scope:
            await client.send_eof()
        assert scope.cancelled_caught
        async with trio.open_nursery() as nursery:
            nursery.start_soon(client.send_eof)
            with trio.fail_after(15):
                assert await server.receive_some() == b""


@pytest.mark.sample(8)
@pytest.mark.parametrize("seed", range(25))
async def test_any_interleaving_delivers_a_prefix(worker: ucp.Worker, seed: int) -> None:
    """The byte stream of ``test_link.py`` over real connections: writes, reads, cancellations, ends and closes."""
    chance = random.Random(seed)
    window = chance.choice([2**14, 2**20])
    ending = chance.choice(["eof", "close", "close", "abort"])

    async def perhaps_cancelled(function: Callable[[], Awaitable[Any]]) -> Any:
        with trio.move_on_after(chance.choice([0, 0.0002, 0.002, 30, 30, 30])):
            return await function()
        return None

    async def write(connection: trio_ucx.Connection, writes: list[tuple[int, bool]]) -> None:
        for number in range(chance.randrange(1, 40)):
            data = numbered_write(number, chance.choice([0, 1, 100, 3000, 9000, 20_000, 40_000, 200_000]))
            writes.append((len(data), False))
            try:
                with trio.move_on_after(chance.choice([0, 0.0002, 0.002, 30, 30, 30])) as scope:
                    await connection.send_all(data)
            except trio.BrokenResourceError:
                return
            writes[-1] = len(data), not scope.cancelled_caught
        if ending == "eof":
            await connection.send_eof()

    async def read(connection: trio_ucx.Connection, got: bytearray) -> str:
        while True:
            if chance.random() < 0.05:
                await trio.sleep(0.002)
            size = chance.choice([None, 1, 8, 5000])
            try:
                part = await perhaps_cancelled(partial(connection.receive_some, size))
            except trio.BrokenResourceError:
                return "broken"
            except trio.ClosedResourceError:
                return "closed"
            if part == b"":
                return "end"
            got += part or b""

    async with open_over_tcp(worker=worker, window=window, close_timeout=20) as (client, server):
        ends: dict[trio_ucx.Connection, str] = {}
        gots: dict[trio_ucx.Connection, bytearray] = {client: bytearray(), server: bytearray()}
        written: dict[trio_ucx.Connection, list[tuple[int, bool]]] = {client: [], server: []}

        async def run(connection: trio_ucx.Connection, leaves: bool) -> None:
            async def reading() -> None:
                ends[connection] = await read(connection, gots[connection])

            async with trio.open_nursery() as nursery:
                nursery.start_soon(reading)
                await write(connection, written[connection])
                if leaves and ending == "close":
                    await connection.aclose()
                elif leaves and ending == "abort":
                    connection.abort()

        with trio.fail_after(30):
            async with trio.open_nursery() as nursery:
                nursery.start_soon(run, client, True)
                nursery.start_soon(run, server, False)
        check_stream(written[client], gots[server], everything=ending != "abort")
        check_stream(written[server], gots[client], everything=ending == "eof")
        assert ends[server] == ("broken" if ending == "abort" else "end")
        assert ends[client] == ("end" if ending == "eof" else "closed")


class _Memory:
    """Stands for a memoryview whose bytes cannot be had when memory is short."""

    def __init__(self, data: bytes) -> None:
        self.obj = bytearray(data)
        self.short = False

    def __len__(self) -> int:
        return len(self.obj)

    def __getitem__(self, part: slice) -> _Memory:
        rest = _Memory(self.obj[part])
        rest.short = self.short
        return rest

    def __bytes__(self) -> bytes:
        if self.short:
            raise MemoryError
        return bytes(self.obj)


@pytest.mark.parametrize("max_bytes", [2, None])
def test_bytes_for_which_there_is_no_memory_stay(max_bytes: int | None) -> None:
    buffer, memory = ReadBuffer(), _Memory(b"abcd")
    buffer.rest = memory  # type: ignore[assignment]
    memory.short = True
    with pytest.raises(MemoryError):
        buffer.take(max_bytes)
    memory.short = False
    assert buffer.take(None) == b"abcd"
