"""Request groups: many operations in flight without a task for each."""

from __future__ import annotations

from time import perf_counter

import pytest
import trio
import trio.testing
from helpers import open_pair, open_raw_pair, pattern

import trio_ucx
from trio_ucx import ucp


async def test_many_raw_requests(worker: ucp.Worker) -> None:
    async with open_raw_pair(worker) as (client, server):
        buffers = [bytearray(100_000) for _ in range(100)]
        async with worker.open_request_group() as group:
            receives = [group.tag_receive(buffer, tag) for tag, buffer in enumerate(buffers)]
            sends = [group.tag_send(client, pattern(tag * 1000, tag), tag) for tag in range(50)]
            sends += [group.tag_send_sync(server, pattern(tag * 1000, tag), tag) for tag in range(50, 100)]
            assert await receives[3] == (3000, 3)
            assert await receives[3] == (3000, 3)  # as often as one likes
        assert all(request.done for request in (*receives, *sends))
        for tag, buffer in enumerate(buffers):
            assert await receives[tag] == (tag * 1000, tag)
            assert buffer[: tag * 1000] == pattern(tag * 1000, tag)
        with pytest.raises(trio.ClosedResourceError):
            group.tag_send(client, b"x", 1)


async def test_connection_requests(worker: ucp.Worker) -> None:
    async with open_pair(worker, window=65536) as (client, server):
        buffers = [bytearray(100_000) for _ in range(50)]
        async with worker.open_request_group() as group:
            for number in range(50):
                group.send(client, pattern(number * 2000, number), tag=7)
            receives = [group.receive_into(server, buffer, tag=7) for buffer in buffers]
        for number, buffer in enumerate(buffers):
            assert await receives[number] == number * 2000
            assert buffer[: number * 2000] == pattern(number * 2000, number)


async def test_an_error_cancels_the_rest_and_the_body(worker: ucp.Worker) -> None:
    async with open_raw_pair(worker) as (client, _):
        small, other = bytearray(1), bytearray(10)
        with pytest.raises(ExceptionGroup) as caught:
            async with worker.open_request_group() as group:
                group.tag_receive(small, 1)
                pending = group.tag_receive(other, 2)
                await client.tag_send(b"too long", 1)
                await trio.sleep_forever()
        [error] = caught.value.exceptions
        assert isinstance(error, trio_ucx.UCXError) and error.status is ucp.Status.MESSAGE_TRUNCATED
        with pytest.raises(ucp.RequestCancelled):
            await pending
        other.append(0)
        await client.tag_send(b"not lost", 2)
        assert await worker.tag_receive(other, 2) == (8, 2)


async def test_a_loop_that_only_posts_sees_which_requests_are_done(worker: ucp.Worker) -> None:
    async with open_raw_pair(worker) as (client, _), worker.open_request_group() as group:
        first, later = group.tag_receive(bytearray(4), 1), []
        group.tag_send(client, b"done", 1)
        deadline = perf_counter() + 10
        while not first.done and perf_counter() < deadline:
            later.append(group.tag_receive(bytearray(4), 2))
        assert first.done
        for request in later:
            request.cancel()


async def test_the_body_s_own_error(worker: ucp.Worker) -> None:
    buffer = bytearray(10)
    with pytest.raises(ExceptionGroup) as caught:
        async with worker.open_request_group() as group:
            group.tag_receive(buffer, 1)
            raise KeyError("mine")
    assert [type(error) for error in caught.value.exceptions] == [KeyError]
    buffer.append(0)


async def test_all_buffers_of_many_requests_are_free_when_their_group_was_cancelled(worker: ucp.Worker) -> None:
    buffers = [bytearray(10) for _ in range(2000)]
    with pytest.raises(ExceptionGroup):
        async with worker.open_request_group() as group:
            for buffer in buffers:
                group.tag_receive(buffer, 1)
            raise KeyError("mine")
    for buffer in buffers:
        buffer.append(0)


async def test_cancelled_group_with_sends_that_nobody_receives(worker: ucp.Worker) -> None:
    async with open_pair(worker) as (client, server):
        data = bytearray(2**20)
        with trio.move_on_after(0.05) as scope:
            async with worker.open_request_group() as group:
                group.send(client, data, tag=1)
        assert scope.cancelled_caught
        with pytest.raises(BufferError):
            data.append(0)
        assert await server.receive(tag=1) == data
        await client.wait_buffers_released()
        data.append(0)


async def test_misuse(worker: ucp.Worker, transports: str) -> None:
    async with open_raw_pair(worker) as (client, _), ucp.open_worker(config={"TLS": transports}) as other:
        async with other.open_request_group() as group:
            with pytest.raises(ValueError, match="own worker"):
                group.tag_send(client, b"x", 1)
        async with worker.open_request_group() as group:
            for wrong in (None, "endpoint", worker):
                for post in (group.tag_send, group.tag_send_sync):
                    with pytest.raises(TypeError, match="takes an Endpoint, not"):
                        post(wrong, b"x", 1)  # type: ignore[arg-type]
                with pytest.raises(TypeError, match="takes an Endpoint, not"):
                    group.am_send(wrong, 1, b"x")  # type: ignore[arg-type]
                with pytest.raises(TypeError, match="takes an Endpoint, not"):
                    group.stream_send(wrong, b"x")  # type: ignore[arg-type]
                with pytest.raises(TypeError, match="takes a Connection, not"):
                    group.send(wrong, b"x")  # type: ignore[arg-type]
                with pytest.raises(TypeError, match="takes a Connection, not"):
                    group.receive_into(wrong, bytearray(1))  # type: ignore[arg-type]
            request = group.tag_receive(bytearray(1), 1)

            async def wait() -> None:
                await request

            async with trio.open_nursery() as nursery:
                nursery.start_soon(wait)
                await trio.testing.wait_all_tasks_blocked()
                with pytest.raises(trio.BusyResourceError):
                    await request
                await client.tag_send(b"x", 1)
            request.cancel()  # too late: no effect
            assert await request == (1, 1)
