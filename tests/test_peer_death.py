"""A peer's process is killed: waiting tasks get an error, data that had arrived can be read, memory is released. How
soon each side notices, and other ways to lose a peer: ``test_peer_loss_detection.py``.
"""

from __future__ import annotations

import gc
import os
import select
import signal
import time
from collections.abc import Awaitable, Callable
from contextlib import AsyncExitStack
from functools import partial
from pathlib import Path

import attrs
import pytest
import trio
import trio.testing
from helpers import (
    assert_free,
    assert_pinned,
    assert_transports,
    live_handles,
    nothing_happens,
    open_listener,
    open_peer,
    open_raw_endpoint,
    open_raw_pair,
    pattern,
    segments,
    until,
)
from injected_faults import fail_flushes, lose_completions
from timing import Stopwatch

import trio_ucx
from trio_ucx import ucp
from trio_ucx._link.receiving import Transfer
from trio_ucx._util.process import start_time, this_process
from trio_ucx.testing import internals
from trio_ucx.ucp._engine.endpoint_core import EndpointCore

#: UCX's own interval is 20 seconds.
SOON = 5.0


@pytest.mark.parametrize("by", ["tcp", "unix"])
async def test_every_waiting_task_gets_an_error(worker: ucp.Worker, transports: str, by: str) -> None:
    async with open_peer("sender_then_wait", [[1, 100, 1], [1, 5000, 2]], transports=transports) as peer:
        address, path = await peer.hear()
        target = tuple(address) if by == "tcp" else path
        async with trio.open_nursery() as nursery:
            connection = await trio_ucx.connect(target, worker=worker).__aenter__()
            try:
                assert await peer.hear() == "sent"
                assert_transports(connection, transports)
                await until(lambda: connection.statistics().messages_received == 2)
                failed: list[object] = []

                async def expect_broken(function: Callable[[], Awaitable[object]]) -> None:
                    with pytest.raises(trio.BrokenResourceError) as caught:
                        await function()
                    assert isinstance(caught.value.__cause__, trio_ucx.UCXError)
                    failed.append(function)

                async def send_for_ever() -> None:
                    while True:
                        await connection.send(bytes(1000), tag=7)

                async def group() -> None:
                    with pytest.raises(ExceptionGroup) as caught:
                        async with worker.open_request_group() as requests:
                            requests.send(connection, bytes(2**26), tag=9)
                            requests.receive_into(connection, bytearray(10), tag=9)
                    assert caught.group_contains(trio.BrokenResourceError)
                    failed.append("group")

                waiting = [
                    partial(connection.receive, tag=2),
                    partial(connection.receive_into, bytearray(10), tag=3),
                    partial(connection.wait_message, tag=4),
                    connection.receive_some,
                    partial(connection.send, bytearray(2**26), tag=5),  # a rendezvous that is not asked for
                    send_for_ever,
                ]
                for function in waiting:
                    nursery.start_soon(expect_broken, function)
                nursery.start_soon(group)
                await nothing_happens(0.2)
                assert not failed
                peer.signal(signal.SIGKILL)
                with Stopwatch(SOON):
                    await until(lambda: len(failed) > len(waiting))
                assert await connection.receive(tag=1) == pattern(100, 1)
                assert connection.receive_nowait(tag=1) == pattern(5000, 2)
                for function in (connection.receive, connection.wait_message):
                    with pytest.raises(trio.BrokenResourceError):
                        await function(tag=1)
                with pytest.raises(trio.BrokenResourceError):
                    connection.send_nowait(b"x")
                with trio.fail_after(15):
                    await connection.wait_buffers_released()
                await connection.aclose() if connection.statistics().messages_sent == 0 else connection.abort()
            finally:
                connection.abort()


async def test_raw_endpoint(worker: ucp.Worker, transports: str) -> None:
    async with open_peer("raw_listener", transports=transports) as peer:
        address, _ = await peer.hear()
        endpoint = await open_raw_endpoint(worker, tuple(address))
        await endpoint.tag_send(b"x", 1)
        assert await peer.hear() == "accepted"

        async def expect_broken() -> None:
            with pytest.raises(trio.BrokenResourceError):
                await endpoint.tag_send(bytearray(2**26), 2)

        with Stopwatch(SOON), trio.fail_after(60):
            async with trio.open_nursery() as nursery:
                nursery.start_soon(expect_broken)
                await trio.testing.wait_all_tasks_blocked()
                peer.signal(signal.SIGKILL)
        assert not endpoint.alive
        with pytest.raises(trio.BrokenResourceError):
            await endpoint.flush()
        await endpoint.aclose()


async def test_peer_ends_while_an_endpoint_is_opened(
    worker: ucp.Worker, transports: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """UCX has made the endpoint, and nothing watches the process yet: over shared memory UCX would report nothing."""
    watch = EndpointCore.watch_process

    def watch_late(core: EndpointCore) -> None:
        with open(os.pidfd_open(peer.process.pid)) as process:
            peer.process.kill()
            assert select.select([process], [], [], 60)[0]
        watch(core)

    async with open_peer("raw_listener", transports=transports) as peer:
        _, address = await peer.hear()
        monkeypatch.setattr(EndpointCore, "watch_process", watch_late)
        endpoint = await worker.open_endpoint(ucp.WorkerAddress(bytes.fromhex(address)))
        monkeypatch.undo()
        with Stopwatch(SOON), trio.fail_after(60), pytest.raises(trio.BrokenResourceError) as caught:
            await endpoint.tag_send(bytearray(2**26), 2)
        assert isinstance(caught.value.__cause__, trio_ucx.UCXError)
        await endpoint.aclose()
        assert await peer.ended() == -signal.SIGKILL


UNFLUSHED = {
    "tag": lambda endpoint: endpoint.tag_send(b"unflushed", 2),
    "active message": lambda endpoint: endpoint.am_send(2, b"unflushed"),
    "stream": lambda endpoint: endpoint.stream_send(b"unflushed"),
}


@pytest.mark.sample(8)
@pytest.mark.parametrize("sent", [None, *UNFLUSHED])
@pytest.mark.parametrize("way", ["socket", "worker"])
async def test_raw_endpoint_that_breaks_while_idle(transports: str, way: str, sent: str | None) -> None:
    """Then its close says that something may be lost, if something was sent and not flushed; and says it once."""
    features = ucp.DEFAULT_FEATURES | ucp.Feature.STREAM
    async with (
        open_peer("raw_listener", transports=transports) as peer,
        ucp.open_worker(config={"TLS": transports}, features=features) as worker,
    ):
        address, worker_address = await peer.hear()
        target = tuple(address) if way == "socket" else ucp.WorkerAddress(bytes.fromhex(worker_address))
        endpoints = [await open_raw_endpoint(worker, target) for _ in range(3)]
        for endpoint in endpoints:
            await endpoint.tag_send(b"x", 1)
            await endpoint.flush()
        await peer.stop()
        if sent is not None:
            for endpoint in endpoints:
                await UNFLUSHED[sent](endpoint)
        peer.signal(signal.SIGKILL)
        with Stopwatch(SOON):
            await until(lambda: not any(endpoint.alive for endpoint in endpoints))
        looked, forced, unnoticed = endpoints
        with pytest.raises(trio.BrokenResourceError):
            await looked.tag_send(b"x", 1)
        await looked.aclose()  # its error was reported already
        await forced.aclose(ucp.CloseMode.FORCE)
        await forced.aclose()
        if sent is not None:
            with pytest.raises(trio.BrokenResourceError, match="may not have arrived") as caught:
                await unnoticed.aclose()
            cause = caught.value.__cause__
            assert isinstance(cause, trio_ucx.UCXError) and str(cause) in str(caught.value)
        await unnoticed.aclose()  # closed it is


async def test_leaving_the_block_of_a_raw_endpoint_that_broke(worker: ucp.Worker, transports: str) -> None:
    async with open_peer("raw_listener", transports=transports) as peer:
        address, _ = await peer.hear()
        with pytest.raises(trio.BrokenResourceError, match="may not have arrived"):
            async with await open_raw_endpoint(worker, tuple(address)) as endpoint:
                await endpoint.tag_send(b"x", 1)
                assert await peer.hear() == "accepted"
                peer.signal(signal.SIGKILL)
                with Stopwatch(SOON):
                    await until(lambda: not endpoint.alive)


async def test_flush_that_fails_gives_its_reason(worker: ucp.Worker, monkeypatch: pytest.MonkeyPatch) -> None:
    """The flush of a close fails before UCX says that the endpoint did: UCX's words, and its error as the cause."""
    async with open_raw_pair(worker) as (client, _):
        await client.tag_send(b"x", 1)
        fail_flushes(monkeypatch, ucp.Status.NOT_CONNECTED)
        with pytest.raises(trio.BrokenResourceError, match="may not have arrived: flushing: ") as caught:
            await client.aclose()
        cause = caught.value.__cause__
        assert isinstance(cause, trio_ucx.UCXError) and cause.status is ucp.Status.NOT_CONNECTED
        assert await worker.tag_receive(bytearray(1), 1) == (1, 1)


@pytest.mark.sample(2)
@pytest.mark.cut_off
@pytest.mark.parametrize("by", ["tcp", "unix"])
async def test_killed_in_the_middle_of_transfers(transports: str, by: str) -> None:
    """At ten moments. Each with a worker of its own: a peer that dies while it writes to the shared-memory queue of a
    worker, which all its peers share, stops that queue for good (tests/test_receive_queue.py)."""
    limit = trio.CapacityLimiter(3)

    async def receive_until_killed(moment: int) -> None:
        async with (
            limit,
            ucp.open_worker(config={"TLS": transports}) as worker,
            open_peer("numbered", 1000, 2**20 if moment % 2 else 50_000, transports=transports) as peer,
        ):
            address, path = await peer.hear()
            target = tuple(address) if by == "tcp" else path
            connection = await trio_ucx.connect(target, worker=worker).__aenter__()
            try:
                number = 0
                with (
                    Stopwatch(SOON + 2),
                    trio.fail_after(60),
                    pytest.raises((trio.BrokenResourceError, trio.EndOfChannel)),
                ):
                    async with trio.open_nursery() as nursery:

                        async def kill() -> None:
                            await trio.sleep(0.01 + moment * 0.004)
                            peer.signal(signal.SIGKILL)

                        nursery.start_soon(kill)
                        try:
                            while True:
                                data = await connection.receive(tag=1)
                                assert data == pattern(len(data), number)
                                number += 1
                        except (trio.BrokenResourceError, trio.EndOfChannel) as error:
                            failure = error
                    raise failure
            finally:
                connection.abort()

    async with trio.open_nursery() as nursery:
        for moment in range(10):
            nursery.start_soon(receive_until_killed, moment)


@pytest.mark.cut_off
async def test_buffers_are_released_with_the_worker(transports: str) -> None:
    """UCX never ends a receive whose sender was killed in the middle. Its buffer is free when the worker is gone."""
    buffer = bytearray(2**26)
    async with ucp.open_worker(config={"TLS": transports}) as worker, open_peer("numbered", 1, 2**26) as peer:
        address, _ = await peer.hear()
        connection = await trio_ucx.connect(tuple(address), worker=worker).__aenter__()
        with trio.move_on_after(10) as receiving:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(partial(connection.receive_into, buffer, tag=1))
                await until(lambda: worker.statistics().operations_in_flight)
                lose_completions(worker)
                receiving.cancel()
        assert_pinned(buffer)
        connection.abort()
    with trio.fail_after(15):
        await connection.wait_buffers_released()
    assert_free(buffer)


@pytest.mark.cut_off
async def test_a_message_of_which_half_arrived() -> None:
    """The second of two TCP segments never comes. The worker keeps what it has of the message until it is closed."""
    buffer = bytearray(2**16)

    def transfers() -> int:
        gc.collect()
        return sum(isinstance(one, Transfer) for one in gc.get_objects())

    async with ucp.open_worker(config={"TLS": "tcp"}) as worker, open_listener(worker=worker) as listener:
        for _ in range(50):
            async with open_peer("killed_in_the_middle_of_a_message", listener.address, len(buffer)):
                connection = await listener.accept()
                try:
                    await connection.send(await connection.receive(tag=1), tag=1)
                    with Stopwatch(SOON), trio.fail_after(60), pytest.raises(trio.BrokenResourceError):
                        await connection.receive_into(buffer)
                finally:
                    connection.abort()
            await trio.sleep(0.1)
            if worker.statistics().operations_in_flight:
                break
        assert worker.statistics().operations_in_flight == 1, "UCX has ended all receives: is its fault mended?"
        assert_free(buffer)
        assert transfers() == 1
    assert transfers() == 0


async def test_other_connections_are_not_affected(worker: ucp.Worker, transports: str) -> None:
    async with open_peer("echo", [0], transports=transports) as good:
        good_address, _ = await good.hear()
        async with trio_ucx.connect(tuple(good_address), worker=worker) as healthy:
            async with open_peer("silent", transports=transports) as bad:
                bad_address, _ = await bad.hear()
                connection = await trio_ucx.open_ucx_stream(*bad_address, worker=worker)
                await connection.ping()  # then it writes no more to our queue
                bad.signal(signal.SIGKILL)
                with Stopwatch(SOON), trio.fail_after(60), pytest.raises(trio.BrokenResourceError):
                    await connection.receive()
                await connection.aclose()
            await healthy.send(b"well?")
            assert await healthy.receive() == b"well?"


@pytest.mark.sample(1)
async def test_worker_uses_no_cpu_after_a_peer_died_with_unread_messages(worker: ucp.Worker, transports: str) -> None:
    """Over shared memory UCX never gets rid of what it had for such a peer, and cannot be armed any more."""
    async with open_peer("sender_then_wait", [], transports=transports) as peer:
        address, _ = await peer.hear()
        connection = await trio_ucx.open_ucx_stream(*address, worker=worker)
        assert await peer.hear() == "sent"
        await peer.stop()
        with pytest.raises(trio.WouldBlock):
            while True:
                connection.send_nowait(bytes(2000), tag=1)
        peer.signal(signal.SIGKILL)
        with Stopwatch(SOON), trio.fail_after(60), pytest.raises(trio.BrokenResourceError):
            await connection.receive()
        connection.abort()
    await trio.sleep(3)
    before, began = worker.statistics(), time.process_time()
    await trio.sleep(3)
    after, took = worker.statistics(), time.process_time() - began
    assert after.operations_in_flight == 0
    assert (after.backoffs - before.backoffs) / 3 <= 12
    assert took / 3 < 0.01, f"{took / 3:.1%} of a core"
    # Others come through, and as soon as something happens, it is quick again.
    async with open_peer("echo", [0], transports=transports) as peer:
        address, _ = await peer.hear()
        with trio.fail_after(60):
            async with trio_ucx.connect(tuple(address), worker=worker) as connection:
                assert_transports(connection, transports)
                with Stopwatch(2, peer.process.pid):
                    for _ in range(100):
                        await connection.send(b"x")
                        assert await connection.receive() == b"x"


async def test_client_is_killed_while_it_requests_the_server_s_endpoint() -> None:
    """It has stopped the server's shared-memory queue."""
    async with AsyncExitStack() as stack:
        config = {"TLS": "tcp,sm,self", "KEEPALIVE_INTERVAL": "inf"}
        server = await stack.enter_async_context(ucp.open_worker(config=config))
        [listener] = await trio_ucx.open_ucx_listeners(0, host="127.0.0.1", worker=server)
        await stack.enter_async_context(listener)
        other = await stack.enter_async_context(ucp.open_worker(config={"TLS": "tcp,sm,self"}))
        innocent = await trio_ucx.open_ucx_stream(*listener.address, worker=other)
        stack.callback(innocent.abort)
        served = await listener.accept()
        stack.callback(served.abort)
        assert_transports(served, "tcp,sm,self")
        arguments = listener.address, "in the request"
        async with open_peer("killed_while_connecting", *arguments, transports="tcp,sm,self") as client:
            assert await client.ended() == -signal.SIGKILL
        with Stopwatch(SOON), trio.fail_after(60), pytest.raises(trio.BrokenResourceError):
            await served.receive()
        assert server.statistics().stopped_queues == 1


async def test_peer_is_killed_before_its_memory_is_attached() -> None:
    """UCX cannot make the endpoint that the peer has asked for, and its keepalive may look at it all the same."""
    config = {"TLS": "tcp,sm,self", "KEEPALIVE_INTERVAL": "1ms", "KEEPALIVE_NUM_EPS": "inf"}
    async with (
        ucp.open_worker(config=config) as worker,
        ucp.open_worker(config=config) as other,
        await worker.open_endpoint(other.address) as endpoint,
    ):
        await endpoint.tag_send(b"x", 1)  # so that keepalive has something to look at
        await other.tag_receive(bytearray(1), 1)
        for _ in range(10):
            address = bytes(worker.address).hex()
            async with open_peer("killed_after_its_request", address, transports="tcp,sm,self") as peer:
                await peer.hear()
                with open(os.pidfd_open(peer.process.pid)) as process:
                    await peer.tell()
                    select.select([process], [], [], 60)  # nothing is progressed here meanwhile
                assert await peer.ended() == -signal.SIGKILL
            await trio.sleep(0.02)
        await endpoint.tag_send(b"y", 1)
        await other.tag_receive(bytearray(1), 1)


async def test_watches_of_one_process(worker: ucp.Worker) -> None:
    """Each is called once when the process ends, unless it was forgotten, also by another one that is called."""
    watches, called = internals(worker).peer_processes, list[str]()
    child = await trio.lowlevel.open_process(["sleep", "60"])
    process = attrs.evolve(this_process(), pid=child.pid, start=start_time(child.pid))
    try:

        def first_to_end(name: str, other: str) -> None:
            called.append(name)
            watches.forget(process, other)

        for name, other in (("a", "b"), ("b", "a")):
            assert watches.watch(process, name, partial(first_to_end, name, other))
        assert watches.watch(process, "c", partial(called.append, "c"))
        assert watches.watch(process, "d", partial(called.append, "d"))
        watches.forget(process, "d")
    finally:
        child.kill()
        await child.wait()
    await until(lambda: len(called) >= 2)
    await trio.testing.wait_all_tasks_blocked()
    assert sorted(called) in (["a", "c"], ["b", "c"])
    assert not live_handles()["pidfd"]


def mapped() -> set[str]:
    """Where this process has attached shared-memory segments of UCX's."""
    lines = Path("/proc/self/maps").read_text().splitlines()
    return {line for line in lines if "/SYSV" in line or "ucx_shm" in line}


async def test_endpoint_to_a_client_that_was_killed_before_hello() -> None:
    """The server's endpoint has shared memory of the client's, which is detached when the server gives up."""
    async with AsyncExitStack() as stack:
        config = {"TLS": "tcp,sm,self", "KEEPALIVE_INTERVAL": "inf"}
        server = await stack.enter_async_context(ucp.open_worker(config=config))
        [listener] = await trio_ucx.open_ucx_listeners(0, host="127.0.0.1", worker=server)
        await stack.enter_async_context(listener)
        before = segments()
        for _ in range(3):
            others = mapped()
            async with open_peer(
                "killed_while_connecting", listener.address, "before HELLO", transports="tcp,sm,self"
            ) as client:
                assert await client.hear() == "before HELLO"
                await until(lambda others=others: mapped() - others)  # there is an endpoint to it
                await client.tell()
                assert await client.ended() == -signal.SIGKILL
        await until(lambda: segments() == before and listener.statistics().refused == 3)
        # What UCX gave up with the endpoint is delivered a round of Trio's loop later.
        await until(lambda: server.statistics().operations_in_flight == 0)
