"""Request groups: many operations in flight without a task for each."""

from __future__ import annotations

from contextlib import AsyncExitStack
from time import perf_counter

import pytest
import trio
import trio.testing
from helpers import assert_free, open_pair, open_raw_pair, pattern
from remote import for_ucx, open_two, open_way

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


@pytest.mark.parametrize(("transports", "way"), [("tcp", "connection"), ("tcp,sm,self", "connection"), ("tcp", "raw")])
@pytest.mark.parametrize("kind", ["allocated", "registered", "for UCX"])
async def test_remote_memory_requests(transports: str, way: str, kind: str) -> None:
    async with open_two(transports) as (mine, owner), open_way(way, mine, owner) as endpoint, AsyncExitStack() as stack:
        context = owner.context
        memory = stack.enter_context(
            context.allocate(10**6) if kind == "allocated" else context.register(bytearray(10**6))
        )
        memory.memoryview[:] = bytes(10**6)
        descriptor = for_ucx(memory.descriptor) if kind == "for UCX" else memory.descriptor
        remote = stack.enter_context(endpoint.attach(descriptor))
        await remote.get(0, 100)
        async with mine.open_request_group() as group:
            for number in range(99):
                group.put(remote, pattern(9_999, number), number * 10_000)
            group.put(remote, b"", 5)
        await remote.flush()
        buffers = [bytearray(9_999) for _ in range(99)]
        async with mine.open_request_group() as group:
            gets = [group.get_into(remote, buffer, number * 10_000) for number, buffer in enumerate(buffers)]
            assert await gets[5] == 9_999
            assert await group.get_into(remote, bytearray(0)) == 0
        for number, buffer in enumerate(buffers):
            assert buffer == pattern(9_999, number)
            assert_free(buffer)
        if kind == "for UCX":
            async with mine.open_request_group() as group:
                with pytest.raises(RuntimeError, match="no token"):
                    group.atomic(remote, ucp.AtomicOp.ADD, 1)
            return
        await remote.put(bytes(8))
        await remote.flush()
        async with mine.open_request_group() as group:
            for _ in range(100):
                assert await group.atomic(remote, ucp.AtomicOp.ADD, 2) is None
            adds = [group.atomic(remote, ucp.AtomicOp.ADD, 1, fetch=True) for _ in range(100)]
        assert sorted([await add for add in adds]) == sorted({await add for add in adds})
        async with mine.open_request_group() as group:
            assert await group.compare_swap(remote, 300, 7) == 300
            assert await group.atomic(remote, ucp.AtomicOp.SWAP, 9, bits=32) == 7


async def test_a_refused_get_fails_its_group() -> None:
    async with open_two("tcp") as (mine, owner), open_way("worker", mine, owner) as endpoint:
        memory = owner.context.register(bytearray(64))
        with endpoint.attach(memory.descriptor) as remote:
            await remote.get()
            memory.close()
            with pytest.raises(ExceptionGroup) as caught:
                async with mine.open_request_group() as group:
                    group.get_into(remote, bytearray(64))
            [error] = caught.value.exceptions
            assert isinstance(error, trio_ucx.UCXError) and error.status is ucp.Status.NO_ELEM


async def test_remote_memory_misuse() -> None:
    async with open_two("tcp") as (mine, owner), open_way("worker", mine, owner) as endpoint:
        with owner.context.allocate(64) as memory, endpoint.attach(memory.descriptor) as remote:
            async with mine.open_request_group() as group, owner.open_request_group() as other:
                with pytest.raises(trio_ucx.UCXError, match=r"await connect\(\) first"):
                    group.put(remote, b"x")
                await remote.connect()
                with pytest.raises(ValueError, match="of its own worker"):
                    other.put(remote, b"x")
                with pytest.raises(ValueError, match="beyond the end"):
                    group.get_into(remote, bytearray(8), 60)
                with pytest.raises(TypeError, match="read-only"):
                    group.get_into(remote, b"12345678")  # type: ignore[arg-type]
                with pytest.raises(TypeError, match="takes a RemoteMemory, not bytes"):
                    group.put(b"x", b"x")  # type: ignore[arg-type]
                with pytest.raises(TypeError, match="op must be"):
                    group.atomic(remote, 1, 1)  # type: ignore[arg-type]
                remote.close()
                buffer = bytearray(8)
                for call in (
                    lambda: group.get_into(remote, buffer),
                    lambda: group.put(remote, buffer),
                    lambda: group.compare_swap(remote, 1, 2),
                ):
                    with pytest.raises(ValueError, match="closed"):
                        call()
                assert_free(buffer)
