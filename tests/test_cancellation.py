"""Cancelling anything returns promptly, loses no message, and frees no memory that UCX may still touch."""

from __future__ import annotations

import random
import socket
from functools import partial

import pytest
import trio
import trio.testing
from helpers import (
    Rounds,
    assert_free,
    assert_pinned,
    assert_transports,
    live_handles,
    open_listener,
    open_pair,
    open_peer,
    open_raw_endpoint,
    open_raw_listener,
    open_raw_pair,
    pattern,
    until,
)
from timing import PROMPT, Stopwatch, cancelled_after, cancelled_promptly

import trio_ucx
from trio_ucx import testing, ucp

BIG = 2**26
#: Seconds that UCX may take to receive as much in one call: over shared memory it copies all of it; over TCP it reads
#: as long as data keep coming.
TRANSFER = 0.4


# ---- raw tag messages ----


async def test_pending_raw_receive_consumes_nothing(worker: ucp.Worker) -> None:
    async with open_raw_pair(worker) as (client, _):
        buffer = bytearray(10)
        await cancelled_promptly(worker.tag_receive, buffer, 1)
        assert_free(buffer)
        await client.tag_send(b"later", 1)
        assert await worker.tag_receive(buffer, 1) == (5, 1)
        assert buffer[:5] == b"later"
        assert worker.statistics().left_over_operations == 0


async def test_raw_send_that_nobody_receives(worker: ucp.Worker, transports: str) -> None:
    async with open_raw_pair(worker) as (client, _):
        for send in (client.tag_send, client.tag_send_sync):
            buffer = bytearray(pattern(BIG, 1))
            await cancelled_promptly(send, buffer, 2)
            assert_pinned(buffer)
            assert client.statistics().left_over_operations == worker.statistics().left_over_operations == 1
            target = bytearray(BIG)
            with trio.fail_after(15):
                assert await worker.tag_receive(target, 2) == (BIG, 2)
                assert target == buffer
                await until(lambda: not worker.statistics().left_over_operations)
            assert_free(buffer)
        assert_transports(client, transports)


async def test_raw_receive_cancelled_in_the_middle_keeps_its_buffer(worker: ucp.Worker, transports: str) -> None:
    """UCX cannot cancel a receive that has matched: the buffer is released when the message is there."""
    source = pattern(BIG)
    async with ucp.open_worker(config={"TLS": transports}) as receiver, open_raw_pair(worker, receiver) as (client, _):
        for _attempt in range(20):
            target = bytearray(len(source))
            async with trio.open_nursery() as nursery:
                nursery.start_soon(client.tag_send, source, 1)
                await until(lambda: receiver.tag_probe(1) is not None)
                with trio.CancelScope() as scope:

                    async def cancel_soon(scope: trio.CancelScope) -> None:
                        await trio.lowlevel.checkpoint()
                        scope.cancel()

                    nursery.start_soon(cancel_soon, scope)
                    await receiver.tag_receive(target, 1)
                if scope.cancelled_caught:
                    assert receiver.statistics().left_over_operations == 1
                    assert_pinned(target)
            await until(lambda: not receiver.statistics().left_over_operations)
            assert_free(target)
            assert target == source
            if scope.cancelled_caught:
                return
    pytest.fail("every receive ended before it was cancelled")


async def test_flush_and_close_of_raw_endpoint_against_a_stopped_peer(worker: ucp.Worker, transports: str) -> None:
    async with open_peer("raw_listener", transports=transports) as peer:
        address, _ = await peer.hear()
        endpoint = await open_raw_endpoint(worker, tuple(address))
        await endpoint.tag_send(b"x", 1)
        assert await peer.hear() == "accepted"
        await peer.stop()
        try:
            async with trio.open_nursery() as nursery:

                async def fill() -> None:
                    """Until nothing can be sent any more."""
                    for number in range(20_000):
                        with trio.move_on_after(0.3) as scope:
                            await endpoint.tag_send(bytes(8000), number)
                        if scope.cancelled_caught:
                            return
                    pytest.fail("the peer's queues never filled")

                with trio.fail_after(60):
                    await fill()
                await cancelled_promptly(endpoint.flush)
                await cancelled_promptly(worker.flush)
                with trio.CancelScope() as scope:
                    scope.cancel()
                    with Stopwatch():
                        await endpoint.aclose()
                assert scope.cancelled_caught
                assert worker.statistics().background_closes == 1
                nursery.cancel_scope.cancel()
        finally:
            peer.resume()
        await until(lambda: not worker.statistics().background_closes)
        assert not endpoint.alive


# ---- connections ----


async def test_pending_receives_consume_nothing(worker: ucp.Worker) -> None:
    async with open_pair(worker) as (client, server):
        buffer = bytearray(100)
        for receive in (
            lambda: server.receive(tag=1),
            lambda: server.receive_into(buffer, tag=1),
            lambda: server.wait_message(tag=1),
            lambda: server.receive_some(),
            lambda: server.messages(1).__anext__(),
        ):
            await cancelled_promptly(receive)
            assert_free(buffer)
        for size in (5, 100_000):
            async with trio.open_nursery() as nursery:
                nursery.start_soon(partial(client.send, pattern(size, 1), tag=1))
                assert await server.receive(tag=1) == pattern(size, 1)
        assert server.statistics().left_over_operations == 0


@pytest.mark.sample(1)
@pytest.mark.parametrize("way", ["receive", "receive_into", "same_buffer", "mixed"])
async def test_receive_cancelled_in_the_middle_loses_nothing(
    worker: ucp.Worker, transports: str, way: str, chance: random.Random, rounds: Rounds
) -> None:
    """Random moments of 64 MiB transfers: each message arrives once, whole, in order."""
    count = rounds(8, 25)
    same = bytearray(BIG)
    async with open_peer("numbered", count, BIG, transports=transports) as peer:
        address, _ = await peer.hear()
        async with trio_ucx.connect(tuple(address), worker=worker) as connection:
            for number in range(count):
                expected = pattern(BIG, number)
                got: bytes | bytearray | None = None
                # Now and then it is cancelled for sure: with the peer stopped, which over TCP has most of it yet to
                # send. Over shared memory we read the peer's memory ourselves, perhaps in one go: before it begins.
                stopped = number % 4 == 0
                if stopped:
                    await connection.wait_message(tag=1)
                    await peer.stop()
                while got is None:
                    into = {"receive": False, "mixed": chance.random() < 0.5}.get(way, True)
                    buffer = same if way == "same_buffer" else bytearray(BIG) if into else None
                    delay = chance.choice([0, 0.001, 0.003, 0.008, 0.02, 0.05])
                    with cancelled_after(0.05 if stopped else delay, limit=PROMPT + TRANSFER) as scope:
                        if stopped and transports != "tcp":
                            scope.cancel()
                        if buffer is None:
                            got = await connection.receive(tag=1)
                        else:
                            assert await connection.receive_into(buffer, tag=1) == BIG
                            got = buffer
                    if stopped:
                        assert got is None and scope.cancelled_caught
                        assert connection.statistics().left_over_operations == (transports == "tcp" and into)
                        peer.resume()
                        stopped = False
                    if got is None and buffer is not None and way != "same_buffer":
                        with trio.fail_after(15):
                            await connection.wait_buffers_released()
                        assert_free(buffer)
                assert got == expected, f"message {number} is torn, lost or doubled"
            with pytest.raises(trio.EndOfChannel):
                await connection.receive(tag=1)
            assert connection.statistics().left_over_operations == 0


async def test_buffer_of_a_cancelled_receive_stays_pinned(worker: ucp.Worker, transports: str) -> None:
    async with open_peer("numbered", 1, BIG, transports=transports) as peer:
        address, _ = await peer.hear()
        async with trio_ucx.connect(tuple(address), worker=worker) as connection:
            assert await connection.wait_message(tag=1) == BIG
            buffer = bytearray(BIG)
            stopped = transports == "tcp"  # over shared memory we read the peer's memory ourselves, in one call
            if stopped:
                await peer.stop()
            try:
                with trio.move_on_after(0.02) as scope:
                    await connection.receive_into(buffer, tag=1)
                if stopped:
                    assert scope.cancelled_caught
                    assert_pinned(buffer)
                    assert connection.statistics().left_over_operations == 1
                    with trio.move_on_after(0.05) as scope:
                        await connection.wait_buffers_released()
                    assert scope.cancelled_caught
            finally:
                peer.resume()
            if scope.cancelled_caught:
                with trio.fail_after(15):
                    await connection.wait_buffers_released()
                assert_free(buffer)
                assert connection.statistics().left_over_operations == 0
                buffer[:] = bytes(BIG)  # ours again: it must not matter to the message
                assert await connection.receive(tag=1) == pattern(BIG, 0)


async def test_send_that_nobody_receives(worker: ucp.Worker, transports: str) -> None:
    async with open_pair(worker) as (client, server):
        buffer = bytearray(pattern(BIG, 3))
        await cancelled_promptly(partial(client.send, buffer, tag=1))
        assert_pinned(buffer)
        assert client.statistics().left_over_operations == 1
        await cancelled_promptly(client.wait_buffers_released)
        with trio.fail_after(15):
            assert await server.receive(tag=1) == buffer  # it may be delivered, and if so, whole
            await client.wait_buffers_released()
        assert_free(buffer)
        assert client.statistics().left_over_operations == 0
        assert_transports(client, transports)


async def test_cancelled_large_sends_do_not_hinder_the_close(worker: ucp.Worker) -> None:
    async with open_pair(worker) as (client, server):
        buffer = bytearray(BIG)
        await cancelled_promptly(partial(client.send, buffer, tag=1))
        await client.send(b"after", tag=2)
        with Stopwatch(5):  # close_timeout is longer
            await client.aclose()
            await client.wait_buffers_released()
        assert_free(buffer)
        assert await server.receive(tag=2) == b"after"
        with pytest.raises(trio.EndOfChannel):
            await server.receive(tag=1)


async def test_send_that_waits_for_credit(worker: ucp.Worker) -> None:
    async with open_pair(worker, window=8192) as (client, server):
        await client.send(bytes(1000), tag=1)
        sent = 1
        with pytest.raises(trio.WouldBlock):
            while True:
                client.send_nowait(bytes(1000), tag=1)
                sent += 1
        assert sent < 8
        buffer = bytearray(1000)
        await cancelled_promptly(partial(client.send, buffer, tag=1))
        assert_free(buffer)
        with pytest.raises(trio.WouldBlock):
            client.send_nowait(bytes(1000), tag=1)
        for _ in range(sent):
            assert await server.receive(tag=1) == bytes(1000)
        await client.send(b"next", tag=1)
        assert await server.receive(tag=1) == b"next"


async def test_connect_where_nobody_answers(worker: ucp.Worker) -> None:
    with socket.create_server(("127.0.0.1", 0), backlog=1) as mute:
        address = mute.getsockname()
        await cancelled_promptly(lambda: trio_ucx.connect(address, worker=worker).__aenter__())
        with Stopwatch(1 + PROMPT), pytest.raises(TimeoutError, match="did not answer"):
            await trio_ucx.open_ucx_stream(*address, worker=worker, connect_timeout=1)
    with socket.socket() as bound, Stopwatch(0.3 + PROMPT), pytest.raises(OSError):
        bound.bind(("127.0.0.1", 0))
        await trio_ucx.open_ucx_stream(*bound.getsockname(), worker=worker, connect_timeout=0.3)


async def test_connect_to_a_stopped_peer(worker: ucp.Worker, transports: str) -> None:
    async with open_peer("silent", transports=transports) as peer:
        address, path = await peer.hear()
        await peer.stop()
        try:
            for target in (tuple(address), path):
                await cancelled_promptly(lambda target=target: trio_ucx.connect(target, worker=worker).__aenter__())
        finally:
            peer.resume()


async def test_connect_to_a_peer_that_says_no_hello(worker: ucp.Worker, transports: str) -> None:
    async with open_peer("unresponsive_listener", transports=transports) as peer:
        address, _ = await peer.hear()
        with Stopwatch(1 + PROMPT), pytest.raises(TimeoutError, match="trio_ucx listener"):
            await trio_ucx.open_ucx_stream(*address, worker=worker, connect_timeout=1)


async def test_accept(worker: ucp.Worker) -> None:
    async with open_listener(worker) as listener, await open_raw_listener(worker) as raw:
        await cancelled_promptly(listener.accept)
        await cancelled_promptly(raw.accept_request)
        async with trio_ucx.connect(listener.address, worker=worker) as client:
            server = await listener.accept()
            await client.send(b"x")
            assert await server.receive() == b"x"
        await server.aclose()


async def test_pair_of_connections_at_its_end(worker: ucp.Worker, monkeypatch: pytest.MonkeyPatch) -> None:
    """Both connections are open already when closing the listener is cancelled."""
    scope = trio.CancelScope()
    close = trio_ucx.Listener.aclose

    async def aclose(listener: trio_ucx.Listener) -> None:
        scope.cancel()
        await close(listener)

    monkeypatch.setattr(trio_ucx.Listener, "aclose", aclose)
    with scope:
        await testing.open_connection_pair(worker=worker).__aenter__()
    assert scope.cancelled_caught
    assert not live_handles()["connection"]


async def test_close_against_a_stopped_peer(worker: ucp.Worker, transports: str) -> None:
    async with open_peer("silent", 2**30, transports=transports) as peer:
        address, _ = await peer.hear()
        connections = [await trio_ucx.open_ucx_stream(*address, worker=worker, close_timeout=0.5) for _ in range(3)]
        for connection in connections:
            await connection.send(b"x")
        await peer.stop()
        try:
            with Stopwatch(0.5 + PROMPT), pytest.raises(trio.BrokenResourceError, match="close_timeout"):
                await connections[0].aclose()
            await cancelled_promptly(connections[1].aclose)
            await cancelled_promptly(connections[2].send_all, bytes(2**27), after=0.2)
            with Stopwatch():
                connections[2].abort()
        finally:
            peer.resume()
        await until(lambda: not worker.statistics().background_closes)


async def test_cancelled_send_all_leaves_a_prefix(worker: ucp.Worker) -> None:
    data = pattern(2**24)
    async with open_pair(worker) as (client, server):
        for delay in (0, 0.001, 0.005, 0.02):
            got = bytearray()

            async def read(got: bytearray) -> None:
                async for chunk in server:
                    got.extend(chunk)
                    if got.endswith(b"--end--"):
                        return

            async with trio.open_nursery() as nursery:
                nursery.start_soon(read, got)
                with trio.move_on_after(delay):
                    await client.send_all(data)
                await client.send_all(b"--end--")
            assert data.startswith(got[: -len(b"--end--")])


async def test_request_in_a_group(worker: ucp.Worker) -> None:
    async def wait(request: ucp.Request) -> None:
        await request

    async with open_raw_pair(worker) as (client, _):
        buffers = [bytearray(10), bytearray(10)]
        async with worker.open_request_group() as group:
            requests = [group.tag_receive(buffer, tag) for tag, buffer in enumerate(buffers)]
            await cancelled_promptly(wait, requests[0])
            assert not requests[0].done
            requests[1].cancel()
            assert requests[1].done
            with pytest.raises(ucp.RequestCancelled):
                await requests[1]
            assert_free(buffers[1])
            assert_pinned(buffers[0])
            await client.tag_send(b"a", 0)
            assert await requests[0] == (1, 0)
        with trio.move_on_after(0.05) as scope:
            async with worker.open_request_group() as group:
                group.tag_receive(buffers[0], 0)
        assert scope.cancelled_caught
        assert_free(buffers[0])
        assert worker.statistics().operations_in_flight == 0
