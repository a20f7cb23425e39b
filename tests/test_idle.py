"""An idle worker uses no CPU, and no event is missed."""

from __future__ import annotations

import math
import os
import time

import pytest
import trio
import trio.testing
from helpers import open_pair, open_peer, pattern, until
from remote import ask_the_owner, for_ucx, open_two, open_way
from timing import Stopwatch

import trio_ucx
from trio_ucx import ucp
from trio_ucx.testing import internals


@pytest.mark.parametrize("keepalive", ["20s", "inf"])
async def test_idle_connections_use_no_cpu(transports: str, keepalive: str) -> None:
    config = {"TLS": transports, "KEEPALIVE_INTERVAL": keepalive}
    async with ucp.open_worker(config=config) as worker, open_pair(worker) as (client, server):
        await client.send(b"x")
        assert await server.receive() == b"x"
        async with trio.open_nursery() as nursery:
            nursery.start_soon(server.receive)
            nursery.start_soon(client.receive_some)
            with trio.fail_after(20):
                await trio.testing.wait_all_tasks_blocked()
            before, used = worker.statistics(), time.process_time()
            await trio.sleep(2)
            used = time.process_time() - used
            after = worker.statistics()
            assert after.wakeups - before.wakeups <= 4
            assert after.progress_calls - before.progress_calls <= 100
            assert used <= 0.1, f"{used} s of CPU in 2 s"
            nursery.cancel_scope.cancel()
        assert worker.statistics().missed_events == 0
        assert worker.statistics().backoffs < 20


async def test_wait_all_tasks_blocked_returns(worker: ucp.Worker) -> None:
    async with open_pair(worker):
        with trio.fail_after(20):
            await trio.testing.wait_all_tasks_blocked(0.01)


async def test_no_keepalive_no_missed_event(transports: str) -> None:
    """Posts to an armed worker many times. Nothing but the safety nets could wake it then, and they count what they
    find.
    """
    config = {"TLS": transports, "KEEPALIVE_INTERVAL": "inf"}
    async with open_peer("echo", [1], True, transports=transports, UCX_KEEPALIVE_INTERVAL="inf") as peer:
        address, _ = await peer.hear()
        async with ucp.open_worker(config=config) as worker:
            async with trio_ucx.connect(tuple(address), worker=worker) as connection:
                for size in (8, 5000, 65536, 2**20):
                    for number in range(100 if size < 2**20 else 20):
                        await trio.testing.wait_all_tasks_blocked()
                        connection.send_nowait(pattern(size, number), tag=1)
                        with trio.fail_after(20):
                            assert await connection.receive(tag=1) == pattern(size, number)
            assert worker.statistics().missed_events == 0
        await peer.tell()
        assert await peer.hear() == 0


async def test_thousand_sends_to_an_armed_worker(worker: ucp.Worker, transports: str) -> None:
    async with open_pair(worker) as (client, server):
        for number in range(1000):
            client.send_nowait(number.to_bytes(8, "little"), tag=3)
        with trio.fail_after(20):
            for number in range(1000):
                assert await server.receive(tag=3) == number.to_bytes(8, "little")
        assert worker.statistics().missed_events == 0  # the safety net would have helped


async def test_a_missed_event_is_found_and_counted(worker: ucp.Worker, transports: str) -> None:
    """The worker's descriptor is replaced by one that never becomes readable, so every event is missed."""
    async with ucp.open_worker(config={"TLS": transports}) as other, open_pair(worker, other) as (client, server):
        engine = internals(other)
        efd, (silent, end) = engine.efd, os.pipe()
        await trio.testing.wait_all_tasks_blocked()
        try:
            engine.efd = silent
            engine.wake()
            with trio.fail_after(60):
                while other.statistics().missed_events == 0:  # an interrupted look counts nothing
                    async with trio.open_nursery() as nursery:
                        nursery.start_soon(server.receive)
                        await trio.testing.wait_all_tasks_blocked()
                        await client.send(b"x")
        finally:
            trio.lowlevel.notify_closing(silent)
            engine.efd = efd
            os.close(silent)
            os.close(end)
        engine.counters["missed_events"] = 0  # the fixture expects none


async def test_jumping_clock_does_not_make_the_safety_net_fire(mock_clock: trio.testing.MockClock) -> None:
    async with ucp.open_worker(config={"TLS": "tcp"}) as worker, open_pair(worker) as (client, server):
        async with trio.open_nursery() as nursery:
            nursery.start_soon(server.receive)
            start = time.monotonic()
            mock_clock.autojump_threshold = 0
            await trio.sleep(100 * 3600)
            mock_clock.autojump_threshold = math.inf
            assert time.monotonic() - start < 60  # of 100 hours
            assert worker.statistics().wakeups < 1000  # of 360,000 seconds
            await client.send(b"x")
        assert worker.statistics().missed_events == 0


async def test_busy_peer_is_backed_off_from(worker: ucp.Worker, transports: str) -> None:
    """A stopped peer's full shared-memory queue keeps UCX from being armed: the worker backs off rather than spin."""
    async with open_peer("silent", 2**30, transports=transports) as peer:
        address, _ = await peer.hear()
        connection = await trio_ucx.open_ucx_stream(*address, worker=worker)
        await connection.send(b"x")
        await peer.stop()
        try:
            with trio.move_on_after(0.5):
                await connection.send_all(bytes(2**28))
            before, used = worker.statistics(), time.process_time()
            await trio.sleep(1)
            used = time.process_time() - used
            assert worker.statistics().progress_calls - before.progress_calls < 20_000
            assert used < 0.25, f"{used} s of CPU in 1 s"
        finally:
            peer.resume()
            connection.abort()


async def test_client_without_error_handling_leaves_the_server_reachable(worker: ucp.Worker, transports: str) -> None:
    """With UCX's adaptive progress, the event of the next client would be lost."""
    with worker.open_active_messages(3) as messages:
        for _ in range(3):
            async with ucp.open_worker(config={"TLS": transports}) as other:
                endpoint = await other.open_endpoint(worker.address, error_mode=ucp.ErrorMode.NONE)
                with trio.fail_after(20):
                    await endpoint.am_send(3, b"hello", reply=True)
                    (await messages.receive()).release()
                    await endpoint.flush()
                endpoint.abort()
            await trio.sleep(0.05)  # the worker has nothing to do


@pytest.mark.sample(2)
@pytest.mark.parametrize("kind", ["tag", "active message", "put", "get", "chain", "UCX's put"])
async def test_a_long_transfer_is_not_taken_for_a_quiet_worker(kind: str) -> None:
    """A large message completes nothing before its end, but its fragments move. The transfer lasts longer than the
    second after which a worker is quiet: nothing runs for as long.
    """
    size = 100 << 20
    data, there = bytearray(b"x" * size), bytearray(size)
    async with open_two("sysv,self") as (worker, other), open_way("worker", worker, other) as endpoint:
        memory = other.context.register(there)
        descriptor = for_ucx(memory.descriptor) if kind == "UCX's put" else memory.descriptor

        async def receive_active_message() -> None:
            with other.open_active_messages(1) as messages:
                await (await messages.receive()).receive_into(there)

        async def put(remote: ucp.RemoteMemory) -> None:
            await remote.put(data)
            await remote.flush()

        async def run_chain(remote: ucp.RemoteMemory) -> None:
            with worker.new_chain() as chain:
                chain.put(remote, data)
                await chain.run()

        with memory, endpoint.attach(descriptor) as remote:
            await ask_the_owner(remote)
            async with trio.open_nursery() as nursery:
                if kind == "tag":
                    nursery.start_soon(other.tag_receive, there, 1)
                    nursery.start_soon(endpoint.tag_send, data, 1)
                elif kind == "active message":
                    nursery.start_soon(receive_active_message)
                    nursery.start_soon(endpoint.am_send, 1, data)
                elif kind == "get":
                    there[:] = data
                    data[:] = bytes(size)
                    nursery.start_soon(remote.get_into, data)
                elif kind == "chain":
                    nursery.start_soon(run_chain, remote)
                else:
                    nursery.start_soon(put, remote)
                sender = other if kind == "get" else worker
                before = sender.statistics().backoffs
                await until(lambda: sender.statistics().backoffs > before)
                time.sleep(1.1)
                with Stopwatch(2):  # with pauses of 0.1 s it takes at least 4
                    await until(lambda: not nursery.child_tasks)
            assert there == data == b"x" * size
