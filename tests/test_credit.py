"""Backpressure, over real connections."""

from __future__ import annotations

import contextlib
from functools import partial

import pytest
import trio
import trio.testing
from helpers import nothing_happens, open_pair, open_peer, pattern, until
from refused_memory import few_allocations

from trio_ucx import ucp
from trio_ucx._link import MessagePort
from trio_ucx.ucp import Status

#: Besides the window: UCX's receive buffers, which it allocates in large steps, and Python's.
FIXED = 3 * 2**20


@pytest.mark.sample(1)
async def test_silent_receivers_hold_their_windows(transports: str) -> None:
    """A sender in a loop, and a receiver that reads nothing for 3 seconds, in processes of their own. All pairs at the
    same time."""
    window = 4 * 2**20

    async def check(size: int, count: int) -> None:
        async with open_peer("flood", count, size, transports=transports) as sender:
            address, _ = await sender.hear(60)
            async with open_peer(
                "flooded_receiver", address, 3, window, count, size, transports=transports
            ) as receiver:
                grown, held, received = await receiver.hear(120)
                assert held <= window, (size, held)
                assert grown < window + FIXED, (size, grown)
                assert received == count, (size, received)
                assert await receiver.ended() == 0

    async with trio.open_nursery() as nursery:
        for size, count in [(8, 30_000), (4096, 4000), (2**24, 8), (0, 300)]:
            nursery.start_soon(check, size, count)


async def test_unread_queue_does_not_block_others(worker: ucp.Worker) -> None:
    async with open_pair(worker, window=16384) as (client, server), trio.open_nursery() as nursery:

        async def flood() -> None:
            for number in range(1000):
                await client.send(pattern(1000, number), tag=1)

        nursery.start_soon(flood)
        await until(lambda: client.statistics().queued_sends)
        assert client.statistics().queued_sends == 1
        for number in range(20):
            with trio.fail_after(15):
                async with trio.open_nursery() as sends:  # one send_all is over before the next begins
                    sends.start_soon(partial(client.send, pattern(2000, number), tag=2))
                    sends.start_soon(client.send_all, bytes([number]) * 3000)
                    assert await server.receive(tag=2) == pattern(2000, number)
                    got = b""
                    while len(got) < 3000:
                        got += await server.receive_some()
                    assert got == bytes([number]) * 3000
        assert server.statistics().held <= 16384
        with trio.fail_after(15):
            for number in range(1000):
                assert await server.receive(tag=1) == pattern(1000, number)


async def test_polling_a_queue_with_receive_nowait_lets_messages_in(worker: ucp.Worker) -> None:
    async with open_pair(worker, window=8192) as (client, server), trio.open_nursery() as nursery:

        async def flood() -> None:
            with trio.move_on_after(0.2):
                while True:
                    await client.send(bytes(1000), tag=1)
            await client.send(b"here", tag=2)

        nursery.start_soon(flood)
        with trio.fail_after(15):
            while True:
                try:
                    assert server.receive_nowait(tag=2) == b"here"
                    break
                except trio.WouldBlock:
                    await trio.sleep(0.005)


@pytest.mark.parametrize("size", [1, 2000, 2**20])
async def test_all_receives_of_a_queue_are_served_beside_a_full_one(worker: ucp.Worker, size: int) -> None:
    """Tag 1 fills the window and has no reader; receives wait at tag 2 before the messages for them are sent."""
    count = 3  # they cost less in all than is granted without being asked for
    async with open_pair(worker, window=2**17) as (client, server):
        with pytest.raises(trio.WouldBlock):
            while True:
                client.send_nowait(bytes(100), tag=1)
        with trio.fail_after(15):
            async with worker.open_request_group() as group:
                buffers = [bytearray(size) for _ in range(count)]
                for buffer in buffers:
                    group.receive_into(server, buffer, tag=2)
                for number in range(count):
                    await client.send(pattern(size, number), tag=2)
        assert buffers == [pattern(size, number) for number in range(count)]


async def test_sends_that_find_no_memory_cost_no_credit(worker: ucp.Worker) -> None:
    async with open_pair(worker, window=2**16) as (client, server):
        parts = [bytes(10_000), bytes(10_000)]
        before = client.statistics()
        for _ in range(10):
            with few_allocations(), pytest.raises(MemoryError):
                await client.send(parts, tag=2)
            with few_allocations(), pytest.raises(MemoryError):
                client.send_nowait(parts, tag=2)
        assert client.statistics() == before
        with trio.fail_after(15):
            await client.send(parts, tag=1)  # it is not received: then tag 2 needs to be admitted
            async with trio.open_nursery() as nursery:
                nursery.start_soon(partial(client.send, bytes(60_000), tag=2))
                assert await server.receive(tag=2) == bytes(60_000)
            assert await server.receive(tag=1) == bytes(20_000)
            await client.aclose()


async def test_end_of_the_stream_that_finds_no_memory_can_be_sent_again(
    worker: ucp.Worker, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with open_pair(worker, window=4096) as (client, server), trio.open_nursery() as nursery:
        refused = trio.Event()

        async def end() -> None:
            with pytest.raises(MemoryError):
                await client.send_eof()
            refused.set()

        with pytest.raises(trio.WouldBlock):
            while True:
                client.send_nowait(bytes(1000), tag=1)
        nursery.start_soon(end)
        await until(lambda: client.statistics().queued_sends)
        monkeypatch.setattr(MessagePort, "send", lambda *_: Status.NO_MEMORY)
        with trio.fail_after(15):
            while not refused.is_set():
                with contextlib.suppress(trio.WouldBlock):  # all were read, and the sender does not know it yet
                    assert server.receive_nowait(tag=1) == bytes(1000)
                await trio.sleep(0.001)
            monkeypatch.undo()
            await client.send_eof()
            assert await server.receive_some() == b""


async def test_message_larger_than_the_window(worker: ucp.Worker) -> None:
    async with open_pair(worker, window=4096) as (client, server), trio.open_nursery() as nursery:
        for size in (4096, 60_000, 200_000):
            nursery.start_soon(partial(client.send, pattern(size), tag=1))
            with trio.fail_after(15):
                assert await server.receive(tag=1) == pattern(size)


@pytest.mark.parametrize("size", [5000, 60_000, 200_000])
async def test_message_larger_than_the_window_that_no_receive_asks_for(worker: ucp.Worker, size: int) -> None:
    """It goes by itself, when the peer has read everything else."""
    async with open_pair(worker, window=4096) as (client, server), trio.open_nursery() as nursery:

        async def ask() -> None:
            async with client.open_conversation() as talk:
                await talk.send(pattern(size))
                assert await talk.receive() == b"answer"

        with trio.fail_after(15):
            for tag in range(3):
                for data in (pattern(size), bytes(3000)):
                    nursery.start_soon(partial(client.send, data, tag=tag))
            sizes = [len((await server.receive_any())[1]) for _ in range(6)]
            assert sorted(sizes) == [3000] * 3 + [size] * 3
            nursery.start_soon(ask)
            async for talk in server.conversations():
                async with talk:
                    assert await talk.receive() == pattern(size)
                    await talk.send(b"answer")
                break


async def test_wait_send_all_might_not_block(worker: ucp.Worker) -> None:
    async with open_pair(worker, window=8192) as (client, server), trio.open_nursery() as nursery:
        await client.wait_send_all_might_not_block()
        with pytest.raises(trio.WouldBlock):
            while True:
                client.send_nowait(b"", tag=1)
        done = trio.Event()

        async def wait() -> None:
            await client.wait_send_all_might_not_block()
            done.set()

        nursery.start_soon(wait)
        await nothing_happens()
        assert not done.is_set()
        with trio.fail_after(15):
            while not done.is_set():
                with contextlib.suppress(trio.WouldBlock):
                    assert server.receive_nowait(tag=1) == b""
                await trio.sleep(0.001)


async def test_cancelled_queued_send_does_not_reorder_the_others(worker: ucp.Worker) -> None:
    """Credit that comes while the queue is being posted: posting large messages progresses the worker."""
    async with open_pair(worker, window=20_000) as (client, server), trio.open_nursery() as nursery:
        await client.send(bytes(15_000), tag=9)
        scope = trio.CancelScope()

        async def blocked() -> None:
            with scope:
                await client.send(bytes(19_000), tag=8)

        nursery.start_soon(blocked)
        await trio.testing.wait_all_tasks_blocked()
        for number in range(6):
            nursery.start_soon(partial(client.send, bytes([number]) * (100_000 if number % 2 else 1000), tag=1))
            await trio.testing.wait_all_tasks_blocked()
        scope.cancel()
        with trio.fail_after(15):
            assert [(await server.receive(tag=1))[0] for _ in range(6)] == list(range(6))
            await server.receive(tag=9)
