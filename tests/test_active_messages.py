"""Active messages: data arrive unchanged, queues are bounded, and borrowed memory lives as long as it is used."""

from __future__ import annotations

import gc
import random
import signal
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from functools import partial
from typing import Any

import numpy as np
import pytest
import trio
from helpers import (
    assert_free,
    assert_pinned,
    assert_transports,
    expect_closed,
    live_handles,
    open_pair,
    open_peer,
    open_raw_endpoint,
    open_raw_pair,
    pattern,
    resident,
    until,
)
from injected_faults import close_context, close_worker, record_workers_left_alone
from refused_memory import few_allocations
from timing import cancelled_after

import trio_ucx
from trio_ucx import ucp
from trio_ucx.testing import internals
from trio_ucx.ucp._engine import engine as _engine

AUTO, EAGER, RENDEZVOUS = ucp.SendProtocol
HOLD, REFUSE = ucp.WhenFull

#: On both sides of what UCX sends at once, and of its rendezvous (RNDV_THRESH is 65 KiB).
SIZES = [0, 1, 4095, 4096, 8191, 65535, 65536, 66559, 66560, 2**20]
#: Long enough for the data to be borrowed from UCX, whatever the transport.
BORROWED = 100_000
LARGE = 2**20


async def exchange(
    client: ucp.Endpoint, queue: ucp.ActiveMessages, data: Any = b"", *args: Any, **options: Any
) -> ucp.ActiveMessage:
    """Sends a message, and returns it as received. For eager messages only: a rendezvous send would wait."""
    with trio.fail_after(20):
        await client.am_send(queue._id, data, *args, **options)
        return await queue.receive()


# ---- the data ----


@pytest.mark.parametrize("protocol", ucp.SendProtocol)
async def test_sizes(worker: ucp.Worker, transports: str, protocol: ucp.SendProtocol) -> None:
    async with open_raw_pair(worker) as (client, _):
        with worker.open_active_messages(3) as queue, trio.fail_after(30):
            for size in SIZES:
                data = pattern(size, size)
                for way in ("receive", "receive_into", "scatter", "larger", "data", "release"):
                    async with trio.open_nursery() as nursery:
                        nursery.start_soon(lambda data=data: client.am_send(3, data, b"header", protocol=protocol))
                        message = await queue.receive()
                        assert (message.id, message.header, message.length) == (3, b"header", size)
                        if protocol is not AUTO:
                            assert message.rendezvous == (protocol is RENDEZVOUS)
                        if way == "receive":
                            assert await message.receive() == data
                        elif way == "receive_into":
                            buffer = bytearray(size)
                            assert await message.receive_into(buffer) == size
                            assert buffer == data
                            assert_free(buffer)
                        elif way == "scatter":
                            parts = [bytearray(size // 3), bytearray(0), np.zeros(size - size // 3, np.uint8)]
                            assert await message.receive_into(parts) == size
                            assert b"".join(map(bytes, parts)) == data
                        elif way == "larger":
                            buffer = bytearray(b"#" * (size + 5))
                            assert await message.receive_into(buffer) == size
                            assert buffer == data + b"#####"
                        elif way == "data" and not message.rendezvous:
                            assert message.data == data
                            assert message.data.readonly
                            message.release()
                        else:
                            message.release()
                        message.release()  # no effect
                        for again in (
                            message.receive,
                            lambda message=message, size=size: message.receive_into(bytearray(size)),
                        ):
                            with pytest.raises(ValueError, match="already"):
                                await again()
                        with pytest.raises(ValueError):
                            _ = message.data
            assert queue.statistics() == ucp.ActiveMessagesStatistics(0, 0, 0, 0)
        if transports == "tcp":
            assert_transports(client, transports)


async def test_64_mib(worker: ucp.Worker) -> None:
    data = pattern(2**26)
    async with open_raw_pair(worker) as (client, _):
        with worker.open_active_messages(3) as queue, trio.fail_after(30):
            for protocol in (AUTO, EAGER):
                async with trio.open_nursery() as nursery:
                    nursery.start_soon(lambda protocol=protocol: client.am_send(3, data, protocol=protocol))
                    message = await queue.receive()
                    assert message.rendezvous == (protocol is AUTO)
                    assert await message.receive() == data


async def test_automatic_rendezvous_begins_at_the_threshold(transports: str) -> None:
    async with (
        ucp.open_worker(config={"TLS": transports, "RNDV_THRESH": "64k"}) as worker,
        open_raw_pair(worker) as (client, _),
    ):
        with worker.open_active_messages(3) as queue, trio.fail_after(20):
            for size in (60_000, 65536 + 1000):
                async with trio.open_nursery() as nursery:
                    nursery.start_soon(client.am_send, 3, bytes(size))
                    with await queue.receive() as message:
                        assert message.rendezvous == (size > 65536)


async def test_headers(worker: ucp.Worker) -> None:
    longest = worker.attributes().max_am_header
    assert longest >= 200  # over UD it is less than a packet
    async with open_raw_pair(worker) as (client, _):
        with worker.open_active_messages(3) as queue, trio.fail_after(20):
            for size in (0, 1, longest):
                for length in (0, 1, 100_000):
                    for protocol in (AUTO, RENDEZVOUS):
                        header, data = pattern(size, 1), pattern(length, 2)
                        mutable = bytearray(header)
                        async with trio.open_nursery() as nursery:
                            nursery.start_soon(
                                lambda data=data, mutable=mutable, protocol=protocol: client.am_send(
                                    3, data, mutable, protocol=protocol
                                )
                            )
                            message = await queue.receive()
                            mutable[:] = bytes(len(mutable))  # it was copied
                            assert_free(mutable)
                            assert message.header == header
                            assert await message.receive() == data
            for size in (longest + 1, 2**20):
                with pytest.raises(ValueError, match=f"{size} bytes is too long: this worker's limit is {longest}"):
                    await client.am_send(3, b"", bytes(size))
            message = await exchange(client, queue, b"x", [b"a", bytearray(b"b"), memoryview(b"c")])
            assert (message.header, bytes(message.data)) == (b"abc", b"x")


async def test_gather_lists_and_strided_arrays(worker: ucp.Worker) -> None:
    async with open_raw_pair(worker) as (client, _):
        with worker.open_active_messages(3) as queue, trio.fail_after(20):
            for side in (10, 100, 400):
                matrix = np.arange(side * side, dtype=np.int32).reshape(side, side)
                source, target = matrix[::2, ::3], np.zeros((side, side), np.int32)[1::2, ::3]
                for protocol in ucp.SendProtocol:
                    for given, expected in (
                        ([matrix[0], b"", matrix[1:]], matrix.tobytes()),
                        ([], b""),
                        (ucp.Strided(source), source.tobytes()),
                    ):
                        async with trio.open_nursery() as nursery:
                            nursery.start_soon(
                                lambda given=given, protocol=protocol: client.am_send(3, given, protocol=protocol)
                            )
                            assert await (await queue.receive()).receive() == expected
                    target[...] = 0
                    copy = source.copy()
                    async with trio.open_nursery() as nursery:
                        nursery.start_soon(
                            lambda protocol=protocol, copy=copy: client.am_send(3, copy, protocol=protocol)
                        )
                        assert await (await queue.receive()).receive_into(ucp.Strided(target)) == source.nbytes
                    assert (target == source).all()


async def test_ids(worker: ucp.Worker) -> None:
    async with open_raw_pair(worker) as (client, _), AsyncExitStack() as stack:
        queues = {id: await stack.enter_async_context(worker.open_active_messages(id)) for id in (0, 127, 65535)}
        with trio.fail_after(20):
            for number in range(100):
                id = random.choice(list(queues))
                message = await exchange(client, queues[id], str(number).encode())
                assert (message.id, bytes(message.data)) == (id, str(number).encode())
        for id in queues:
            with pytest.raises(ValueError, match=f"id {id} go to another open_active_messages"):
                worker.open_active_messages(id)
        queues[0].__exit__()
        with worker.open_active_messages(0) as queue:
            assert (await exchange(client, queue, b"again")).length == 5


async def test_connections_and_active_messages_side_by_side(worker: ucp.Worker, transports: str) -> None:
    async with ucp.open_worker(config={"TLS": transports}) as other, open_pair(other, worker) as (client, server):
        with worker.open_active_messages(1) as queue, trio.fail_after(20):
            for number in range(20):
                await client.send(bytes([number]))
                await client.endpoint.am_send(1, bytes([number]), reply=True)
                message = await queue.receive()
                assert await server.receive() == await message.receive() == bytes([number])
                assert message.reply_endpoint is server.endpoint


async def test_order_and_several_receivers(worker: ucp.Worker) -> None:
    """First come, first served; a receiver that was cancelled takes nothing."""
    async with open_raw_pair(worker) as (client, _):
        with worker.open_active_messages(3, max_bytes=2**30) as queue, trio.fail_after(20):
            got: list[tuple[int, int]] = []

            async def receive(name: int) -> None:
                got.append((name, int.from_bytes(await (await queue.receive()).receive(), "big")))

            async with trio.open_nursery() as nursery:
                with trio.CancelScope() as scope:
                    async with trio.open_nursery() as inner:
                        for name in range(6):
                            (inner if name in (0, 3) else nursery).start_soon(receive, name)
                            await trio.testing.wait_all_tasks_blocked()
                        scope.cancel()
                        for number in range(4):
                            await client.am_send(3, number.to_bytes(2, "big"))
                for number in range(4):
                    await client.am_send(3, number.to_bytes(2, "big"))
            assert sorted(got) == [(1, 0), (2, 1), (4, 2), (5, 3)]


async def test_cancelled_receivers_lose_nothing(worker: ucp.Worker) -> None:
    """At random moments, several at once, against messages of every kind."""
    rng = random.Random(1)
    count = 300
    async with open_raw_pair(worker) as (client, _):
        with worker.open_active_messages(3, max_bytes=2**30) as queue, trio.fail_after(30):
            got = []

            async def send() -> None:
                for number in range(count):
                    size = rng.choice([2, 2, 5000, 30_000, 100_000])
                    await client.am_send(3, number.to_bytes(2, "big") + pattern(size, number))
                    await trio.sleep(rng.choice([0, 0, 0.0005]))

            async def receive() -> None:
                while len(got) < count:
                    with trio.CancelScope() as scope:
                        if rng.random() < 0.7:
                            scope.deadline = trio.current_time() + rng.choice([0, 0.0001, 0.001])
                        message = await queue.receive()
                    if scope.cancelled_caught:
                        await trio.lowlevel.checkpoint()
                        continue
                    while True:  # the receive of a rendezvous can be taken up again
                        with trio.move_on_after(rng.choice([0, 0.0001, 1])) as scope:
                            data = await message.receive()
                        if not scope.cancelled_caught:
                            break
                    number = int.from_bytes(data[:2], "big")
                    assert data[2:] == pattern(len(data) - 2, number)
                    got.append(number)
                    if len(got) == count:
                        nursery.cancel_scope.cancel()

            async with trio.open_nursery() as nursery:
                nursery.start_soon(send)
                for _ in range(3):
                    nursery.start_soon(receive)
            assert sorted(got) == list(range(count))
        await until(lambda: worker.statistics().operations_in_flight == 0)


async def test_iteration_ends_with_the_queue(worker: ucp.Worker) -> None:
    async with open_raw_pair(worker) as (client, _):
        got = []
        async with worker.open_active_messages(3) as queue:
            async with trio.open_nursery() as nursery:

                async def read() -> None:
                    async for message in queue:
                        got.append(await message.receive())

                nursery.start_soon(read)
                for number in range(10):
                    await client.am_send(3, bytes([number]))
                await until(lambda: len(got) >= 10)
                queue.__exit__()
        assert got == [bytes([number]) for number in range(10)]
        for function in (queue.receive_nowait, queue.receive):
            with pytest.raises(trio.ClosedResourceError, match="were closed"):
                result = function()
                if not isinstance(result, ucp.ActiveMessage):
                    await result


# ---- who sent it ----


async def test_reply_by_socket_address(worker: ucp.Worker) -> None:
    async with open_raw_pair(worker) as (client, server), open_raw_pair(worker) as (other, other_server):
        with worker.open_active_messages(3) as queue, trio.fail_after(20):
            for protocol in (AUTO, RENDEZVOUS):
                for sender, here in ((client, server), (server, client), (other, other_server), (other_server, other)):
                    for reply in (True, False):
                        async with trio.open_nursery() as nursery:
                            nursery.start_soon(
                                lambda sender=sender, reply=reply, protocol=protocol: sender.am_send(
                                    3, b"x", reply=reply, protocol=protocol
                                )
                            )
                            with await queue.receive() as message:
                                assert message.reply_endpoint is (here if reply else None)
            message = await exchange(client, queue, b"x", reply=True)
            server.abort()
            assert message.reply_endpoint is None


async def test_reply_by_worker_address(worker: ucp.Worker, transports: str) -> None:
    async with ucp.open_worker(config={"TLS": transports}) as other:
        with worker.open_active_messages(3) as here, other.open_active_messages(3) as there, trio.fail_after(20):
            to_other = await worker.open_endpoint(other.address)
            message = await exchange_between(to_other, there)
            assert message.reply_endpoint is None  # nobody has opened an endpoint there
            to_here = await other.open_endpoint(worker.address)
            for endpoint, queue, back in ((to_other, there, to_here), (to_here, here, to_other)) * 2:
                assert (await exchange_between(endpoint, queue)).reply_endpoint is back
            to_here.abort()
            to_other.abort()


async def exchange_between(endpoint: ucp.Endpoint, queue: ucp.ActiveMessages) -> ucp.ActiveMessage:
    await endpoint.am_send(3, b"x", reply=True)
    message = await queue.receive()
    assert await message.receive() == b"x"
    return message


async def test_reply_when_both_sides_open_endpoints_first(worker: ucp.Worker, transports: str) -> None:
    async with ucp.open_worker(config={"TLS": transports}) as other:
        with worker.open_active_messages(3) as here, other.open_active_messages(3) as there, trio.fail_after(20):
            to_other, to_here = await worker.open_endpoint(other.address), await other.open_endpoint(worker.address)
            async with trio.open_nursery() as nursery:
                nursery.start_soon(lambda: to_other.am_send(3, b"x", reply=True))
                nursery.start_soon(lambda: to_here.am_send(3, b"x", reply=True))
                assert (await there.receive()).reply_endpoint is to_here
                assert (await here.receive()).reply_endpoint is to_other
            to_here.abort()
            to_other.abort()


# ---- the bounded queue ----


async def full_queue(client: ucp.Endpoint, queue: ucp.ActiveMessages, count: int = 1) -> None:
    for _ in range(count):
        await client.am_send(3, b"first")
    await until(lambda: queue.statistics().waiting == count)


async def test_hold(worker: ucp.Worker) -> None:
    async with open_raw_pair(worker) as (client, _):
        with worker.open_active_messages(3, max_messages=2, when_full=HOLD) as queue, trio.fail_after(20):
            await full_queue(client, queue, 2)
            assert queue.statistics() == ucp.ActiveMessagesStatistics(2, 2 * (128 + 5), 0, 0)
            for number in range(3):
                await client.am_send(3, bytes(number))
            await until(lambda: queue.statistics().dropped == 3)
            async with trio.open_nursery() as nursery:
                sent = []

                async def send(number: int) -> None:
                    await client.am_send(3, pattern(100_000, number), bytes([number]))
                    sent.append(number)

                for number in range(5):
                    nursery.start_soon(send, number)
                await until(lambda: queue.statistics().waiting == 7)
                assert queue.statistics() == ucp.ActiveMessagesStatistics(7, 2 * 133 + 5 * 129, 3, 0)
                assert not sent
                for _ in range(2):
                    assert await queue.receive_nowait().receive() == b"first"
                for _ in range(5):
                    message = await queue.receive()
                    assert await message.receive() == pattern(100_000, message.header[0])
            assert sorted(sent) == list(range(5))
            assert queue.statistics() == ucp.ActiveMessagesStatistics(0, 0, 3, 0)
            with pytest.raises(trio.WouldBlock):
                queue.receive_nowait()


@pytest.mark.parametrize("when_full", [HOLD, REFUSE])
async def test_dropped_messages_are_logged(
    worker: ucp.Worker, when_full: ucp.WhenFull, caplog: pytest.LogCaptureFixture
) -> None:
    """For each queue at once, then at most once a minute, and when it is closed."""

    def lines() -> list[str]:
        return [record.getMessage() for record in caplog.records if "dropped" in record.getMessage()]

    async with open_raw_pair(worker) as (client, _):
        with trio.fail_after(20), worker.open_active_messages(4, max_messages=1) as other:
            with worker.open_active_messages(3, max_messages=1, when_full=when_full) as queue:
                await full_queue(client, queue)
                assert not lines()
                await client.am_send(3, b"dropped")
                await until(lines)
                for _ in range(9):
                    await client.am_send(3, b"dropped")
                await until(lambda: queue.statistics().dropped == 10)
                [line] = lines()
                assert line.startswith("active messages with id 3: 1 were dropped, because nobody took those that fill")
                for _ in range(2):
                    await client.am_send(4, b"another queue")
                await until(lambda: len(lines()) == 2)
                assert "with id 4: 1 were dropped" in lines()[1]
            assert len(lines()) == 3
            assert "with id 3: 9 were dropped since the last such line, 10 in all" in lines()[2]
            other.receive_nowait().release()
        assert len(lines()) == 3  # nothing was dropped that had not been logged
    assert {record.levelname for record in caplog.records if "dropped" in record.getMessage()} == {"WARNING"}


async def test_refuse(worker: ucp.Worker) -> None:
    async with open_raw_pair(worker) as (client, server):
        with worker.open_active_messages(3, max_messages=1, when_full=REFUSE) as queue, trio.fail_after(20):
            await full_queue(client, queue)
            for size in (0, 10, 100_000):
                buffer = bytearray(size)
                with pytest.raises(trio_ucx.UCXError, match="the receiver refused it, its queue is full") as caught:
                    await client.am_send(3, buffer, protocol=RENDEZVOUS)
                assert caught.value.status is ucp.Status.NO_RESOURCE
                assert_free(buffer)
            await client.am_send(3, b"dropped")
            await until(lambda: queue.statistics().dropped == 1)
            assert queue.statistics() == ucp.ActiveMessagesStatistics(1, 133, 1, 3)
            assert client.alive and server.alive
            assert await queue.receive_nowait().receive() == b"first"
            assert await (await exchange(client, queue, b"next")).receive() == b"next"


async def test_empty_queue_takes_anything(worker: ucp.Worker) -> None:
    async with open_raw_pair(worker) as (client, _):
        with worker.open_active_messages(3, max_bytes=1, max_messages=1, when_full=REFUSE) as queue:
            for protocol in (EAGER, RENDEZVOUS):
                async with trio.open_nursery() as nursery:
                    nursery.start_soon(lambda protocol=protocol: client.am_send(3, bytes(100_000), protocol=protocol))
                    with trio.fail_after(20):
                        assert await (await queue.receive()).receive() == bytes(100_000)
            assert queue.statistics() == ucp.ActiveMessagesStatistics(0, 0, 0, 0)


async def test_bytes_are_counted(worker: ucp.Worker) -> None:
    async with open_raw_pair(worker) as (client, _):
        with worker.open_active_messages(3, max_bytes=3 * (128 + 10 + 1000)) as queue, trio.fail_after(20):
            for _ in range(5):
                await client.am_send(3, bytes(1000), bytes(10))
            await until(lambda: queue.statistics().dropped == 2)
            assert queue.statistics() == ucp.ActiveMessagesStatistics(3, 3 * 1138, 2, 0)
            for left in (2, 1, 0):
                queue.receive_nowait().release()
                assert queue.statistics() == ucp.ActiveMessagesStatistics(left, left * 1138, 2, 0)


async def test_no_queue_at_all(worker: ucp.Worker) -> None:
    """Before it was opened, and after it was closed: eager messages are dropped, rendezvous fail, nothing breaks."""
    async with open_raw_pair(worker) as (client, _):
        with trio.fail_after(20):
            for _ in range(2):
                await client.am_send(3, b"eager")
                with pytest.raises(trio_ucx.UCXError, match="nobody there has opened its id"):
                    await client.am_send(3, b"rendezvous", protocol=RENDEZVOUS)
                with worker.open_active_messages(3) as queue:
                    assert await (await exchange(client, queue, b"heard")).receive() == b"heard"
                    assert queue.statistics() == ucp.ActiveMessagesStatistics(0, 0, 0, 0)
            assert client.alive


@pytest.mark.sample(2)
@pytest.mark.parametrize("size", [8, 200, 3000, 5000, 40_000])
async def test_flood_to_a_queue_that_nobody_reads(transports: str, size: int) -> None:
    """Half as much again as fits. Over shared memory UCX has 8 KiB for each message, small ones too."""
    limit = 2**20 if size == 8 else 2**22
    async with (
        ucp.open_worker(config={"TLS": transports}) as worker,
        ucp.open_worker(config={"TLS": transports}) as sender,
    ):
        async with open_raw_pair(sender, worker) as (client, _):
            with worker.open_active_messages(3, max_bytes=limit) as queue, trio.fail_after(30):
                await exchange(client, queue, bytes(size))
                before = resident()
                fits = limit // (size + 128)
                count = fits * 3 // 2
                for number in range(count):
                    await client.am_send(3, bytes(size), protocol=EAGER)
                    if number % 64 == 0:
                        await client.flush()
                await until(lambda: queue.statistics().waiting + queue.statistics().dropped == count)
                assert queue.statistics().waiting == fits
                assert resident() - before < 3 * limit + 2**22
                while queue.statistics().waiting:
                    assert queue.receive_nowait().length == size
                assert await (await exchange(client, queue, b"next")).receive() == b"next"


async def test_queues_opened_and_closed_over_and_over(worker: ucp.Worker) -> None:
    """Each has a place in the worker's ring of records, to be given back in whatever state it closes."""
    counts = _engine.ffi.new("tu_counts_t *")
    rng = random.Random(2)
    async with open_raw_pair(worker) as (client, _):
        for _ in range(1500):
            with worker.open_active_messages(3) as queue:
                state = rng.randrange(4)
                if state > 0:
                    await client.am_send(3, b"x")
                if state > 1:
                    with trio.fail_after(20):
                        while not queue.statistics().waiting:
                            await trio.lowlevel.checkpoint()
                if state > 2:
                    queue.receive_nowait().release()
                    if rng.random() < 0.5:
                        with pytest.raises(trio.WouldBlock):
                            queue.receive_nowait()
        _engine.lib.tu_worker_counts(internals(worker).handle, counts)
        assert counts.ring_capacity == 512  # it never had to grow
        with worker.open_active_messages(3, max_bytes=2**30) as queue, trio.fail_after(20):
            for number in range(3000):
                await client.am_send(3, number.to_bytes(2, "big"))
            for number in range(3000):
                assert await (await queue.receive()).receive() == number.to_bytes(2, "big")


# ---- borrowed memory ----


async def test_data_lives_until_it_is_released(worker: ucp.Worker) -> None:
    async with open_raw_pair(worker) as (client, _):
        with worker.open_active_messages(3, max_bytes=2**30) as queue, trio.fail_after(20):
            kept = []
            for number in range(200):
                message = await exchange(client, queue, pattern(BORROWED, number), protocol=EAGER)
                kept.append((number, message, message.data))
            random.Random(3).shuffle(kept)
            while kept:
                number, message, view = kept.pop()
                assert view == pattern(BORROWED, number)
                message.release()
                with pytest.raises(ValueError, match="released"):
                    bytes(view)
                with pytest.raises(ValueError, match="already"):
                    _ = message.data


def numpy_array(view: memoryview) -> Any:
    return np.frombuffer(view, np.uint8)


def piece(view: memoryview) -> Any:
    return view[5:]


def array_of_piece(view: memoryview) -> Any:
    return np.frombuffer(view[5:], np.uint8)


def another_view(view: memoryview) -> Any:
    return memoryview(view)


def another_type(view: memoryview) -> Any:
    return view.cast("I")


MADE = [numpy_array, piece, array_of_piece, another_view, another_type]


@pytest.mark.parametrize("make", MADE)
async def test_release_while_something_uses_the_data(worker: ucp.Worker, make: Callable[[memoryview], Any]) -> None:
    async with open_raw_pair(worker) as (client, _):
        with worker.open_active_messages(3) as queue:
            message = await exchange(client, queue, pattern(BORROWED), protocol=EAGER)
            made = make(message.data)
            expected = bytes(made)
            for _ in range(2):
                with pytest.raises(BufferError, match="still in use"):
                    message.release()
                with pytest.raises(BufferError, match="still in use"):
                    await message.receive()
                with pytest.raises(BufferError, match="still in use"):
                    await message.receive_into(bytearray(BORROWED))
                assert message.data == pattern(BORROWED)
                assert bytes(made) == expected
            del made
            assert await message.receive() == pattern(BORROWED)
            message.release()


async def test_view_that_its_user_released(worker: ucp.Worker) -> None:
    async with open_raw_pair(worker) as (client, _):
        with worker.open_active_messages(3) as queue:
            message = await exchange(client, queue, pattern(BORROWED), protocol=EAGER)
            for _ in range(2):
                with message.data as data:
                    assert data == pattern(BORROWED)
            assert await message.receive() == pattern(BORROWED)


async def test_worker_closed_while_data_is_held(transports: str) -> None:
    async with ucp.open_worker(config={"TLS": transports}) as worker, open_raw_pair(worker) as (client, _):
        queue = worker.open_active_messages(3)
        messages = [await exchange(client, queue, bytes(BORROWED), protocol=EAGER) for _ in range(3)]
        view = messages[0].data
        async with trio.open_nursery() as nursery:
            nursery.start_soon(expect_closed, partial(client.am_send, 3, bytes(10), protocol=RENDEZVOUS))
            held = await queue.receive()
            with pytest.warns(ResourceWarning, match="RawListener"):  # the pair's
                await close_worker(worker)
        with pytest.raises(ValueError, match="released"):
            bytes(view)
        for message in messages:
            message.release()
            with pytest.raises(ValueError, match="already"):
                _ = message.data
        with pytest.raises((ValueError, trio.ClosedResourceError)):
            await held.receive()
        held.release()


@pytest.mark.parametrize("make", [numpy_array, piece])
@pytest.mark.filterwarnings("default::ResourceWarning")
async def test_worker_closed_while_something_uses_the_data(
    transports: str, make: Callable[[memoryview], Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The memory is leaked, because freeing it would crash."""
    kept = record_workers_left_alone(monkeypatch)
    with pytest.warns(ResourceWarning, match="still in use"):
        async with ucp.open_worker(config={"TLS": transports}) as worker, open_raw_pair(worker) as (client, _):
            with worker.open_active_messages(3) as queue:
                message = await exchange(client, queue, pattern(BORROWED), protocol=EAGER)
                made = make(message.data)
                expected = pattern(BORROWED)[BORROWED - len(made) :]
    assert len(kept) == 1
    gc.collect()
    assert bytes(made) == expected
    with pytest.raises(BufferError):
        message.release()
    del made
    message.release()
    close_context(worker.context)


async def test_dropped_messages_are_released(worker: ucp.Worker) -> None:
    async with open_raw_pair(worker) as (client, _):
        with worker.open_active_messages(3, max_bytes=2**30) as queue, trio.fail_after(20):
            children = len(internals(worker).teardown.children)
            for number in range(300):
                message = await exchange(client, queue, bytes(BORROWED if number % 2 else 10), protocol=EAGER)
                del message
            gc.collect()
            await until(lambda: len(internals(worker).teardown.children) == children)


@pytest.mark.filterwarnings("default::ResourceWarning")
async def test_dropped_message_whose_data_is_used(worker: ucp.Worker) -> None:
    """It warns; and once nobody uses it any more, the worker can end properly."""
    async with open_raw_pair(worker) as (client, _):
        with worker.open_active_messages(3) as queue:
            message = await exchange(client, queue, pattern(BORROWED), protocol=EAGER)
            array = np.frombuffer(message.data, np.uint8)
            with pytest.warns(ResourceWarning, match="still in use"):
                del message
                gc.collect()
                await until(lambda: internals(worker).teardown.unreleased)
            assert array.tobytes() == pattern(BORROWED)
            del array


@pytest.mark.filterwarnings("default::ResourceWarning")
async def test_dropped_rendezvous_lets_its_sender_go(worker: ucp.Worker) -> None:
    async with open_raw_pair(worker) as (client, _):
        with worker.open_active_messages(3) as queue, trio.fail_after(20):
            with pytest.warns(ResourceWarning, match="neither received nor released"):
                async with trio.open_nursery() as nursery:
                    nursery.start_soon(client.am_send, 3, bytes(100_000))
                    await queue.receive()
                    gc.collect()


async def test_queue_closed_with_messages_in_it_and_out_of_it(worker: ucp.Worker) -> None:
    async with open_raw_pair(worker) as (client, _):
        with trio.fail_after(20):
            async with trio.open_nursery() as nursery:
                with worker.open_active_messages(3) as queue:
                    outside = [await exchange(client, queue, pattern(BORROWED, n), protocol=EAGER) for n in range(3)]
                    nursery.start_soon(client.am_send, 3, pattern(100_000, 7))
                    outside.append(await queue.receive())
                    for size in (10, BORROWED):
                        await client.am_send(3, bytes(size), protocol=EAGER)
                    nursery.start_soon(client.am_send, 3, pattern(100_000))
                    await until(lambda: queue.statistics().waiting == 3)
                assert queue.statistics().waiting == 3
                for number, message in enumerate(outside[:3]):
                    assert await message.receive() == pattern(BORROWED, number)
                assert await outside[3].receive() == pattern(100_000, 7)


async def test_messages_outlive_the_endpoint(worker: ucp.Worker) -> None:
    with worker.open_active_messages(3) as queue:
        async with open_raw_pair(worker) as (client, server):
            eager = await exchange(client, queue, pattern(BORROWED), protocol=EAGER)
            async with trio.open_nursery() as nursery:

                async def send() -> None:
                    with pytest.raises((trio.ClosedResourceError, trio.BrokenResourceError)):
                        await client.am_send(3, bytearray(2**20))

                nursery.start_soon(send)
                held = await queue.receive()
                client.abort()
            await until(lambda: not server.alive)
        assert await eager.receive() == pattern(BORROWED)
        with trio.fail_after(15), pytest.raises(trio.BrokenResourceError):
            await held.receive()


# ---- cancelling ----


async def test_cancelled_rendezvous_send_stays_pinned(worker: ucp.Worker) -> None:
    async with open_raw_pair(worker) as (client, _):
        with worker.open_active_messages(3) as queue, trio.fail_after(20):
            buffer = bytearray(pattern(2**20))
            with trio.move_on_after(0.02) as scope:
                await client.am_send(3, buffer)
            assert scope.cancelled_caught
            assert_pinned(buffer)
            assert worker.statistics().left_over_operations == 1
            assert await (await queue.receive()).receive() == buffer
            await until(lambda: worker.statistics().left_over_operations == 0)
            assert_free(buffer)


async def test_cancelled_rendezvous_receive_goes_on(worker: ucp.Worker, transports: str) -> None:
    """A stopped sender makes sure that it has not ended: into a buffer that stays pinned, or a bytes object."""
    async with open_peer("am_sender", [[2**24, 1], [2**24, 2], [2**24, 3]], transports=transports) as peer:
        with worker.open_active_messages(3) as queue, trio.fail_after(30):
            address, _ = await peer.hear()
            endpoint = await open_raw_endpoint(worker, tuple(address))
            await endpoint.am_send(1, bytes(worker.address), reply=True)
            first, second, third = [await queue.receive() for _ in range(3)]
            await peer.stop()
            buffer = bytearray(2**24)
            cancelled = []
            try:
                for function in (first.receive, lambda: second.receive_into(buffer)):
                    with cancelled_after(0.05) as scope:
                        await function()
                    cancelled.append(scope.cancelled_caught)
                if transports == "tcp":  # over shared memory we read the sender's memory, and may end any time
                    assert cancelled == [True, True]
                    assert_pinned(buffer)
                    with pytest.raises(ValueError, match="another buffer"):
                        await second.receive_into(bytearray(2**24))
                    with pytest.raises(ValueError, match="go on with receive_into"):
                        await second.receive()
                    second.release()  # no effect
            finally:
                peer.resume()
            if cancelled[1]:
                assert await second.receive_into(buffer) == 2**24
            assert buffer == pattern(2**24, 2)
            if cancelled[0]:
                assert await first.receive() == pattern(2**24, 1)
            assert_free(buffer)
            third.release()
            assert await peer.hear() == "sent"
            endpoint.abort()


@pytest.mark.parametrize("then", ["receive_into", "receive", "release"])
async def test_receive_without_memory(worker: ucp.Worker, then: str) -> None:
    async with open_raw_pair(worker) as (client, _):
        with worker.open_active_messages(1) as messages, trio.fail_after(15):
            async with trio.open_nursery() as nursery:  # which waits for the sender
                nursery.start_soon(client.am_send, 1, pattern(LARGE))
                message = await messages.receive()
                halves = [bytearray(LARGE // 2), bytearray(LARGE // 2)]
                for _ in range(2):
                    with few_allocations(), pytest.raises(MemoryError):
                        await message.receive_into(halves)
                    assert_free(*halves)
                if then == "receive_into":
                    assert await message.receive_into(halves) == LARGE
                    assert halves[0] + halves[1] == pattern(LARGE)
                elif then == "receive":
                    assert await message.receive() == pattern(LARGE)
                else:
                    message.release()


async def test_two_tasks_receive_one_message(worker: ucp.Worker) -> None:
    async with open_raw_pair(worker) as (client, _):
        with worker.open_active_messages(3) as queue, trio.fail_after(20):
            async with trio.open_nursery() as nursery:
                nursery.start_soon(client.am_send, 3, pattern(2**24))
                message = await queue.receive()
                outcomes: list[object] = []

                async def receive() -> None:
                    try:
                        outcomes.append(await message.receive() == pattern(2**24))
                    except (trio.BusyResourceError, ValueError) as error:
                        outcomes.append(type(error))

                nursery.start_soon(receive)
                nursery.start_soon(receive)
            assert outcomes.count(True) == 1 and len(outcomes) == 2


async def test_stopped_peer(worker: ucp.Worker, transports: str) -> None:
    """Sends to it that were cancelled return promptly, and complete when it goes on."""
    async with open_peer("am_sender", [], transports=transports) as peer:
        address, _ = await peer.hear()
        endpoint = await open_raw_endpoint(worker, tuple(address))
        await endpoint.am_send(1, reply=True)
        await peer.hear()
        await peer.stop()
        try:
            buffers = [bytearray(size) for size in (10, 60_000, 2**20, 2**24)]
            for buffer in buffers:
                with cancelled_after(0.05):
                    await endpoint.am_send(1, buffer)
            with pytest.raises(BufferError):
                buffers[-1].append(0)
            assert worker.statistics().left_over_operations
        finally:
            peer.resume()
        await until(lambda: worker.statistics().left_over_operations == 0)
        assert_free(*buffers)
        endpoint.abort()


# ---- the peer dies ----


@pytest.mark.sample(2)
@pytest.mark.cut_off
@pytest.mark.parametrize("by", ["socket_address", "worker_address"])
async def test_killed_sender(transports: str, by: str) -> None:
    """What is eager and has arrived can be received; the receive of a rendezvous fails, begun or not."""
    async with ucp.open_worker(config={"TLS": transports}) as worker:
        plan = [[10, 0], [60_000, 1], [2**26, 2], [2**26, 3], [2**26, 4]]
        async with open_peer("am_sender", plan, transports=transports) as peer:
            with worker.open_active_messages(3) as queue:
                address, blob = await peer.hear()
                target = tuple(address) if by == "socket_address" else ucp.WorkerAddress(bytes.fromhex(blob))
                endpoint = await open_raw_endpoint(worker, target)
                await endpoint.am_send(1, bytes(worker.address), reply=True)
                with trio.fail_after(20):
                    messages = [await queue.receive() for _ in plan]
                buffer = bytearray(2**26)
                await peer.stop()
                failures = []

                async def receive() -> None:
                    try:
                        await messages[2].receive_into(buffer)
                    except trio.BrokenResourceError as error:
                        failures.append(error)

                with trio.fail_after(20):
                    async with trio.open_nursery() as nursery:
                        nursery.start_soon(receive)
                        await trio.testing.wait_all_tasks_blocked()
                        peer.signal(signal.SIGKILL)
                        with pytest.raises(trio.BrokenResourceError):
                            while True:
                                await endpoint.am_send(1, bytearray(2**20), protocol=RENDEZVOUS)
                    assert await messages[0].receive() == pattern(10, 0)
                    assert await messages[1].receive() == pattern(60_000, 1)
                    assert failures or transports != "tcp"
                    if not failures:  # over shared memory the data may be read from a stopped process
                        assert buffer == pattern(2**26, 2)
                    with pytest.raises(trio.BrokenResourceError):
                        await messages[3].receive()
                    messages[4].release()
                assert_free(buffer)
                endpoint.abort()


# ---- mistakes ----


async def test_wrong_arguments(worker: ucp.Worker) -> None:
    async with open_raw_pair(worker) as (client, server):
        with worker.open_active_messages(3) as queue, trio.fail_after(20):
            buffer = bytearray(10)
            bad: Sequence[tuple[Any, Any, type[Exception], str]] = [
                ((-1, b""), {}, ValueError, "the id must be between 0 and 65535"),
                ((65536, b""), {}, ValueError, "the id"),
                (("3", b""), {}, TypeError, "the id must be an integer"),
                ((3, "text"), {}, TypeError, "cannot send a str"),
                ((3, [buffer, "text"]), {}, TypeError, "cannot send a str"),
                ((3, np.zeros((4, 4))[:, 1]), {}, ValueError, "non-contiguous"),
                ((3, buffer, "text"), {}, TypeError, "cannot send a str"),
                ((3, buffer, bytes(10**6)), {}, ValueError, "too long"),
                ((3, buffer), {"protocol": "eager"}, TypeError, "SendProtocol"),
            ]
            for arguments, options, kind, match in bad:
                with pytest.raises(kind, match=match):
                    await client.am_send(*arguments, **options)
                with pytest.raises(kind, match=match):
                    async with worker.open_request_group() as group:
                        try:
                            group.am_send(client, *arguments, **options)
                        except Exception as error:
                            failure = error
                    raise failure
                assert_free(buffer)
            for options, kind in (
                ({"id": -1}, ValueError),
                ({"id": 65536}, ValueError),
                ({"id": 1.0}, TypeError),
                ({"max_messages": 0}, ValueError),
                ({"max_bytes": 0}, ValueError),
                ({"max_bytes": "1"}, TypeError),
                ({"max_message_size": -1}, ValueError),
                ({"when_full": "hold"}, TypeError),
            ):
                given: dict[str, Any] = {"id": 9, **options}
                with pytest.raises(kind, match=next(iter(options))):
                    worker.open_active_messages(**given)
            for protocol in (EAGER, RENDEZVOUS):
                async with trio.open_nursery() as nursery:
                    nursery.start_soon(lambda protocol=protocol: client.am_send(3, pattern(5000), protocol=protocol))
                    message = await queue.receive()
                    for target, kind, match in (
                        (
                            bytearray(4999),
                            trio_ucx.MessageTooLong,
                            "5000 bytes .* buffer of 4999; it stays",
                        ),
                        ([bytearray(4000), bytearray(999)], trio_ucx.MessageTooLong, "of 4999; it stays"),
                        (bytes(5000), TypeError, "read-only"),
                        (None, TypeError, "cannot receive into"),
                        (np.zeros(10_000, np.uint8)[::2], ValueError, "non-contiguous"),
                    ):
                        with pytest.raises(kind, match=match):
                            await message.receive_into(target)
                        if type(target) is bytearray:
                            assert_free(target)
                    assert await message.receive() == pattern(5000)
            client.abort()
            for function in (
                lambda: client.am_send(3, buffer),
                lambda: server.am_send(3, buffer),
            ):
                await until(lambda: not server.alive)
                with pytest.raises((trio.ClosedResourceError, trio.BrokenResourceError)):
                    await function()
            assert_free(buffer)
        for cls in (ucp.ActiveMessages, ucp.ActiveMessage, ucp.StreamData):
            with pytest.raises(TypeError, match="no public constructor"):
                cls()
    assert worker.statistics().left_over_operations == 0


async def test_max_message_size(worker: ucp.Worker) -> None:
    async with open_raw_pair(worker) as (client, _):
        with worker.open_active_messages(3, max_message_size=1000) as queue, trio.fail_after(20):
            for protocol in (EAGER, RENDEZVOUS):
                for size in (1000, 1001):
                    async with trio.open_nursery() as nursery:
                        nursery.start_soon(
                            lambda protocol=protocol, size=size: client.am_send(3, bytes(size), protocol=protocol)
                        )
                        message = await queue.receive()
                        if size == 1000:
                            assert await message.receive() == bytes(1000)
                        else:
                            with pytest.raises(trio_ucx.MessageTooLong, match="max_message_size of 1000") as caught:
                                await message.receive()
                            assert (caught.value.length, caught.value.limit) == (1001, 1000)
                            assert await message.receive_into(bytearray(1001)) == 1001


async def test_without_the_feature(transports: str) -> None:
    async with ucp.open_worker(config={"TLS": transports}, features=ucp.Feature.TAG) as worker:
        async with open_raw_pair(worker) as (client, _):
            with pytest.raises(RuntimeError, match=r"Feature\.AM"):
                worker.open_active_messages(3)
            with pytest.raises(RuntimeError, match=r"Feature\.AM"):
                await client.am_send(3, b"x")


async def test_closed_worker(transports: str) -> None:
    async with ucp.open_worker(config={"TLS": transports}) as worker:
        queue = worker.open_active_messages(3)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(expect_closed, queue.receive)
            await trio.testing.wait_all_tasks_blocked()
            await close_worker(worker)
    with pytest.raises(trio.ClosedResourceError, match="worker was closed"):
        worker.open_active_messages(4)
    with pytest.raises(trio.ClosedResourceError):
        await queue.receive()
    assert [message async for message in queue] == []
    queue.__exit__()
    assert queue.statistics().waiting == 0


async def test_opening_a_queue_in_a_cancelled_scope(worker: ucp.Worker) -> None:
    with trio.CancelScope() as scope:
        scope.cancel()
        async with worker.open_active_messages(3):
            raise AssertionError("it was cancelled")
    assert scope.cancelled_caught
    async with worker.open_active_messages(3):
        pass


@pytest.mark.filterwarnings("default::ResourceWarning")
async def test_dropped_in_another_thread(worker: ucp.Worker) -> None:
    """Destructors run wherever the last reference goes: what they close is closed in the worker's thread."""
    async with open_raw_pair(worker) as (client, _):
        with worker.open_active_messages(3) as queue, trio.fail_after(20):
            async with trio.open_nursery() as nursery:
                nursery.start_soon(client.am_send, 3, bytes(100_000))
                held = [await queue.receive()]
                with pytest.warns(ResourceWarning, match="neither received nor released"):
                    await trio.to_thread.run_sync(held.clear)
        chains = [worker.new_chain()]
        await trio.to_thread.run_sync(chains.clear)
        await until(lambda: not live_handles()["request chain"])


async def test_request_groups(worker: ucp.Worker) -> None:
    async with open_raw_pair(worker) as (client, server):
        with worker.open_active_messages(3, max_bytes=2**30) as queue, trio.fail_after(30):
            sizes = [10, 5000, 70_000, 2**20] * 20
            got = []
            async with trio.open_nursery() as nursery:

                async def receive() -> None:
                    for _ in sizes:
                        message = await queue.receive()
                        assert message.reply_endpoint is server
                        data = await message.receive()
                        got.append((int.from_bytes(message.header, "big"), data))

                nursery.start_soon(receive)
                async with worker.open_request_group() as group:
                    requests = [
                        group.am_send(client, 3, pattern(size, n), n.to_bytes(2, "big"), reply=True)
                        for n, size in enumerate(sizes)
                    ]
                for request in requests:
                    await request
            assert sorted(n for n, _ in got) == list(range(len(sizes)))
            assert all(data == pattern(sizes[n], n) for n, data in got)
            buffer = bytearray(2**20)
            with cancelled_after(0.02) as scope:
                async with worker.open_request_group() as group:
                    group.am_send(client, 3, buffer)
            assert scope.cancelled_caught
            assert_pinned(buffer)
            (await queue.receive()).release()
            await until(lambda: not worker.statistics().left_over_operations)
            assert_free(buffer)


@asynccontextmanager
async def assert_worker_survives(worker: ucp.Worker) -> AsyncIterator[None]:
    """Asserts that the worker still works afterwards."""
    yield
    assert internals(worker).broken is None


async def test_random_programs(worker: ucp.Worker) -> None:
    """All operations at once, cancelled at random moments; then nothing is left."""
    rng = random.Random(4)
    async with assert_worker_survives(worker), open_raw_pair(worker) as (client, server):
        with trio.move_on_after(1):
            async with trio.open_nursery() as nursery:

                async def send(endpoint: ucp.Endpoint) -> None:
                    while True:
                        size = rng.choice([0, 10, 3000, 10_000, 70_000, 500_000])
                        with trio.move_on_after(rng.choice([0, 0.0003, 0.003, 0.02])):
                            try:
                                await endpoint.am_send(
                                    rng.randrange(4), pattern(size, size), protocol=rng.choice([*ucp.SendProtocol])
                                )
                            except trio_ucx.UCXError:
                                pass
                        await trio.lowlevel.checkpoint()

                async def live(id: int) -> None:
                    while True:
                        with worker.open_active_messages(
                            id, max_messages=5, when_full=rng.choice([HOLD, REFUSE])
                        ) as queue:
                            with trio.move_on_after(rng.choice([0.001, 0.01, 0.1])):
                                async for message in queue:
                                    with message, trio.move_on_after(rng.choice([0, 0.001, 1])):
                                        if rng.random() < 0.7:
                                            data = await message.receive()
                                            assert data == pattern(len(data), len(data))
                        await trio.sleep(0)

                for id in range(3):  # 3 is never opened
                    nursery.start_soon(live, id)
                for endpoint in (client, server) * 3:
                    nursery.start_soon(send, endpoint)
        await until(lambda: worker.statistics().operations_in_flight == 0)
        assert worker.statistics().left_over_operations == 0
