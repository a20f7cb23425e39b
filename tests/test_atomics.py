"""Atomics: their arithmetic, that no update is lost, and how they end when the peer is lost."""

from __future__ import annotations

import os
import random
import signal
import sys
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack

import pytest
import trio
import trio.testing
from helpers import open_peer, open_raw_pair, until
from peers import REMOTE
from remote import (
    ATOMICS,
    SOON,
    WAYS,
    abort_way,
    expect_broken,
    for_ucx,
    open_endpoint_and_context,
    open_owner,
    open_to_peer,
    open_two,
    open_way,
    released,
)
from timing import Stopwatch, cancelled_promptly

import trio_ucx
from trio_ucx import ucp
from trio_ucx.testing import internals
from trio_ucx.ucp import _connecting as connecting
from trio_ucx.ucp._connecting import connect_beside
from trio_ucx.ucp._rma import access_paths


@pytest.fixture
async def worker(transports: str) -> AsyncIterator[ucp.Worker]:
    async with ucp.open_worker(config={"TLS": transports}, features=REMOTE) as worker:
        yield worker


@pytest.mark.sample(8)
@pytest.mark.parametrize(("transports", "way"), [*WAYS, ("tcp", "accepted"), ("tcp,sm,self", "accepted")])
async def test_arithmetic(transports: str, way: str) -> None:
    """Against Python's, with random values; the neighbours stay as they are."""
    rng = random.Random(3)
    assert set(ATOMICS) == set(ucp.AtomicOp)
    with trio.fail_after(30):
        async with open_endpoint_and_context(transports, way) as (endpoint, context):
            for memory in (context.allocate(64), context.register(bytearray(64))):
                with memory, endpoint.attach(memory.descriptor) as remote:
                    view = memory.memoryview
                    for bits in (32, 64):
                        size = bits // 8
                        view[:] = rng.randbytes(64)
                        expected = bytearray(view)
                        for _ in range(60):
                            offset = rng.randrange(64 // size) * size
                            value = rng.choice(
                                [0, 1, -1, 2**bits - 1, -(2 ** (bits - 1)), rng.getrandbits(bits), rng.getrandbits(7)]
                            )
                            old = int.from_bytes(expected[offset : offset + size], sys.byteorder)
                            op = rng.choice([*ATOMICS, None])
                            if op is None:
                                compared = rng.choice([old, old ^ 1])
                                new = value if compared == old else old
                                assert await remote.compare_swap(compared, value, offset, bits=bits) == old
                            else:
                                new = ATOMICS[op](old, value % 2**bits)
                                fetch = rng.random() < 0.5
                                if op is ucp.AtomicOp.ADD and fetch and rng.random() < 0.5:
                                    got: int | None = await remote.fetch_add(value, offset, bits=bits)
                                else:
                                    got = await remote.atomic(op, value, offset, bits=bits, fetch=fetch)
                                if fetch or op is ucp.AtomicOp.SWAP:
                                    assert got == old, op
                                else:
                                    assert got is None, op
                                    await remote.flush()
                            expected[offset : offset + size] = (new % 2**bits).to_bytes(size, sys.byteorder)
                            await remote.flush()
                            assert view == expected, (op, bits, value)
                    del view


@pytest.mark.parametrize(("transports", "way"), WAYS)
async def test_where_ucx_puts_by_hardware(transports: str, way: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """With RDMA, puts and gets are UCX's own, and atomics are not."""
    monkeypatch.setattr(access_paths, "_SOFTWARE", ())
    async with open_endpoint_and_context(transports, way) as (endpoint, context):
        with context.register(bytearray(8)) as memory, endpoint.attach(memory.descriptor) as remote:
            await remote.put((5).to_bytes(8, "little"))
            await remote.flush()
            assert await remote.fetch_add(1) == 5
            with endpoint.worker.new_chain() as chain:
                added = chain.fetch_add(remote, 1)
                read = chain.get(remote, after=added)
                outcomes = await chain.run()
                assert outcomes[added].unwrap() == 6
                assert outcomes[read].unwrap() == (7).to_bytes(8, "little")
            assert remote._ucx_path is not None


async def test_mapped_memory_needs_no_token() -> None:
    """As that of a program without trio_ucx."""
    async with open_endpoint_and_context("sm,self", "worker") as (endpoint, context):
        with context.allocate(8) as memory, endpoint.attach(for_ucx(memory.descriptor)) as remote:
            memory.memoryview[:] = bytes(8)
            assert [await remote.fetch_add(1) for _ in range(2)] == [0, 1]


async def test_refused(worker: ucp.Worker) -> None:
    with worker.context.allocate(64) as memory:
        memory.memoryview[:] = bytes(64)
        async with await worker.open_endpoint(worker.address) as endpoint:
            with endpoint.attach(memory.descriptor) as remote:
                for bits in (16, 8, 128, 0, -64, 64.0, "64", None, True):
                    with pytest.raises(ValueError, match="32 or 64"):
                        await remote.atomic(ucp.AtomicOp.ADD, 1, bits=bits)
                for offset, bits in ((1, 64), (4, 64), (2, 32), (7, 32)):
                    with pytest.raises(ValueError, match="multiple"):
                        await remote.fetch_add(1, offset, bits=bits)
                for offset, bits in ((64, 64), (64, 32), (60, 64), (2**62, 64)):
                    with pytest.raises(ValueError, match="beyond the end"):
                        await remote.atomic(ucp.AtomicOp.SWAP, 1, offset, bits=bits)
                for bits in (32, 64):
                    for value in (2**bits, -(2 ** (bits - 1)) - 1, 2**200):
                        with pytest.raises(ValueError, match="value"):
                            await remote.atomic(ucp.AtomicOp.OR, value, bits=bits, fetch=True)
                        with pytest.raises(ValueError, match="value"):
                            await remote.compare_swap(value, 0, bits=bits)
                        with pytest.raises(ValueError, match="value"):
                            await remote.compare_swap(0, value, bits=bits)
                for bad in (1.0, "1", None):
                    with pytest.raises(TypeError):
                        await remote.atomic(ucp.AtomicOp.ADD, bad)
                    with pytest.raises(TypeError):
                        await remote.atomic(ucp.AtomicOp.ADD, 1, bad)
                    with pytest.raises(TypeError):
                        await remote.compare_swap(0, bad)
                    with pytest.raises(TypeError):
                        await remote.compare_swap(bad, 0)
                message = r"an AtomicOp \(ADD, AND, OR, XOR or SWAP\), not .*compare_swap\(\)"
                for wrong in ("ADD", "add", 0, 2, None, ucp.Access.ATOMIC):
                    for fetch in (False, True):
                        with pytest.raises(TypeError, match=message):
                            await remote.atomic(wrong, 1, fetch=fetch)
            with worker.context.register(memory.memoryview[4:36]) as odd, endpoint.attach(odd.descriptor) as remote:
                with pytest.raises(ValueError, match="multiple"):
                    await remote.atomic(ucp.AtomicOp.ADD, 1)
                await remote.fetch_add(1, 4)
                await remote.fetch_add(1, bits=32)
        assert memory.memoryview == bytes(4) + (1).to_bytes(4, "little") + (1).to_bytes(8, "little") + bytes(48)


@pytest.mark.parametrize(("transports", "how"), [("tcp", "fetch"), ("sm,self", "flush"), ("sm,self", "fetch")])
async def test_counter_of_four_processes(transports: str, how: str) -> None:
    count = 300
    async with open_peer("owner", 8, transports=transports) as owner:
        said = await owner.hear()
        arguments = (said["worker"], said["descriptor"], count, how)
        async with (
            open_peer("counting", *arguments, transports=transports) as a,
            open_peer("counting", *arguments, transports=transports) as b,
            open_peer("counting", *arguments, transports=transports) as c,
            open_peer("counting", *arguments, transports=transports) as d,
        ):
            for peer in (a, b, c, d):
                assert await peer.hear() == "ready"
            for peer in (a, b, c, d):
                await peer.tell()
            found = [number for peer in (a, b, c, d) for number in await peer.hear()]
            if how == "fetch":
                assert sorted(found) == list(range(4 * count))
            await owner.tell(["word", 0])
            assert await owner.hear() == 4 * count


@pytest.mark.parametrize("transports", ["tcp", "sm,self"])
async def test_lock_of_two_processes(transports: str) -> None:
    count = 50
    async with open_peer("owner", 16, transports=transports) as owner:
        said = await owner.hear()
        arguments = (said["worker"], said["descriptor"], count)
        async with (
            open_peer("locking", *arguments, 1, transports=transports) as a,
            open_peer("locking", *arguments, 2, transports=transports) as b,
        ):
            for peer in (a, b):
                assert await peer.hear() == "ready"
            for peer in (a, b):
                await peer.tell()
            for peer in (a, b):
                assert await peer.hear() == "done"
            await owner.tell(["word", 8])
            assert await owner.hear() == 2 * count


async def test_many_tasks_on_a_fresh_endpoint(worker: ucp.Worker) -> None:
    async with open_raw_pair(worker) as (client, _):
        with worker.context.allocate(8) as memory, client.attach(memory.descriptor) as remote:
            memory.memoryview[:] = bytes(8)
            found = []

            async def add() -> None:
                found.append(await remote.fetch_add(1))

            with trio.fail_after(15):
                async with trio.open_nursery() as nursery:
                    for _ in range(20):
                        nursery.start_soon(add)
                        nursery.start_soon(remote.get)
            assert sorted(found) == list(range(20))


@pytest.mark.sample(7)
@pytest.mark.parametrize(("transports", "way"), WAYS)
async def test_graceful_close_flushes(transports: str, way: str) -> None:
    """What was added happens, although nobody called flush: aclose waits for atomics, too."""
    async with open_peer("owner", 8, transports=transports) as peer:
        said = await peer.hear()
        async with ucp.open_worker(config={"TLS": transports}, features=REMOTE) as worker:
            async with open_to_peer(way, worker, said) as endpoint:
                with endpoint.attach(bytes.fromhex(said["descriptor"])) as memory:
                    for _ in range(100):
                        await memory.atomic(ucp.AtomicOp.ADD, 1)
                    with trio.fail_after(15):
                        await (endpoint.flush() if way == "connection" else endpoint.aclose())
                await peer.tell(["word", 0])
                assert await peer.hear() == 100


@pytest.mark.parametrize(("transports", "way"), WAYS)
async def test_atomics_end_with_their_endpoint(transports: str, way: str) -> None:
    async with open_endpoint_and_context(transports, way) as (endpoint, context):
        with context.register(bytearray(8)) as memory, endpoint.attach(memory.descriptor) as remote:
            await remote.atomic(ucp.AtomicOp.SWAP, 5)

            async def use_until_closed() -> None:
                with pytest.raises(trio.ClosedResourceError):
                    while True:
                        await remote.fetch_add(1)

            with trio.fail_after(15):
                async with trio.open_nursery() as nursery:
                    for _ in range(3):
                        nursery.start_soon(use_until_closed)
                    for _ in range(10):
                        await trio.sleep(0)
                    abort_way(endpoint)


async def test_addresses_whose_uid_is_elsewhere(transports: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """In an unknown layout the uid may be elsewhere: no endpoint is made that both sides would count."""
    async with open_two(transports) as (worker, owner):
        endpoint = await worker.open_endpoint(owner.address)
        monkeypatch.setattr(connecting, "with_uid", lambda blob, uid: blob)
        with pytest.raises(OSError, match="UCX's worker address has an unknown layout"):
            connect_beside(internals(endpoint))
        endpoint.abort()


@pytest.mark.sample(7)
@pytest.mark.parametrize(("transports", "way"), WAYS)
async def test_stopped_peer(transports: str, way: str) -> None:
    async with open_owner(transports, way, 8, "registered") as (peer, endpoint, memory):
        await memory.atomic(ucp.AtomicOp.SWAP, 5)
        await peer.stop()
        try:
            if "sm" not in transports:
                await cancelled_promptly(memory.fetch_add, 1)
                await cancelled_promptly(memory.compare_swap, 0, 1)
                assert endpoint.statistics().left_over_operations >= 1
            else:  # either by the processor or by messages
                with trio.move_on_after(0.05):
                    await memory.fetch_add(1)
        finally:
            peer.resume()
        await released(endpoint.worker)
        assert await memory.fetch_add(0) == 6


@pytest.mark.sample(5)
@pytest.mark.cut_off
@pytest.mark.parametrize(("transports", "way"), WAYS)
async def test_killed_peer(transports: str, way: str) -> None:
    async with open_peer("owner", 64, "registered", transports=transports) as peer, AsyncExitStack() as closing:
        said = await peer.hear()
        async with ucp.open_worker(config={"TLS": transports}, features=REMOTE) as worker:
            async with open_to_peer(way, worker, said) as endpoint:
                memory = endpoint.attach(bytes.fromhex(said["descriptor"]))
                await memory.fetch_add(1)
                with Stopwatch(SOON), trio.fail_after(60):
                    async with trio.open_nursery() as nursery:
                        for _ in range(3):
                            nursery.start_soon(expect_broken, memory.fetch_add, 1)
                        nursery.start_soon(expect_broken, memory.atomic, ucp.AtomicOp.ADD, 1, 8)
                        nursery.start_soon(expect_broken, memory.compare_swap, 1, 1, 16)
                        for _ in range(20):
                            await trio.sleep(0)
                        peer.signal(signal.SIGKILL)
                for fetch in (True, False):
                    with pytest.raises(trio.BrokenResourceError):
                        await memory.atomic(ucp.AtomicOp.ADD, 1, fetch=fetch)
                with pytest.raises(trio.BrokenResourceError):
                    await memory.flush()
                memory.close()
            closing.enter_context(Stopwatch(3))


@pytest.mark.parametrize("transports", ["tcp", "tcp,sm,self", "sm,self"])
async def test_one_client_after_another(transports: str) -> None:
    async with open_peer("owner", 8, transports=transports) as peer:
        said = await peer.hear()
        for number in range(3):
            async with ucp.open_worker(config={"TLS": transports}, features=REMOTE) as worker:
                async with open_to_peer("worker", worker, said) as endpoint:
                    with endpoint.attach(bytes.fromhex(said["descriptor"])) as memory, trio.fail_after(15):
                        assert await memory.fetch_add(1) == number


@pytest.mark.sample(3)
@pytest.mark.cut_off
@pytest.mark.parametrize("transports", ["tcp", "sm,self"])
@pytest.mark.parametrize("end", ["kill", "abort", "close"])
@pytest.mark.parametrize("fetch", [False, True])
async def test_storm_against_a_stopped_peer(transports: str, end: str, fetch: bool) -> None:
    """More are queued here than can be sent."""
    async with open_peer("owner", 8, "registered", transports=transports) as peer:
        said = await peer.hear()
        async with ucp.open_worker(config={"TLS": transports}, features=REMOTE) as worker:
            endpoint = await worker.open_endpoint(ucp.WorkerAddress(bytes.fromhex(said["worker"])))
            descriptor = bytes.fromhex(said["descriptor"])
            with trio.fail_after(20), endpoint.attach(descriptor) as memory:
                await memory.fetch_add(1)
                await peer.stop()
                ended = []

                async def storm() -> None:
                    try:
                        while True:
                            await memory.atomic(ucp.AtomicOp.ADD, 1, fetch=fetch)
                    except (trio.BrokenResourceError, trio.ClosedResourceError) as error:
                        ended.append(error)

                async with trio.open_nursery() as nursery:
                    for _ in range(500):
                        nursery.start_soon(storm)
                    with trio.move_on_after(0.5):
                        while True:
                            await trio.sleep(0.01)
                    if end == "kill":
                        peer.signal(signal.SIGKILL)
                    elif end == "abort":
                        endpoint.abort()
                    if end == "close":
                        nursery.cancel_scope.cancel()
                assert len(ended) == (0 if end == "close" else 500)
            endpoint.abort()
        peer.resume()


@pytest.mark.sample(1)
@pytest.mark.parametrize("kind", ["allocated", "registered"])
@pytest.mark.parametrize("transports", ["tcp", "tcp,sm,self", "sm,self"])
async def test_killed_clients(transports: str, kind: str, chance: random.Random) -> None:
    """The owner goes on, and logs nothing."""
    async with open_peer("owner", 8, kind, transports=transports, UCX_LOG_FILE="stderr") as owner:
        said = await owner.hear()
        arguments = (said["worker"], said["descriptor"], 10**6, "fetch")
        before = 0
        for _ in range(3):
            async with open_peer("counting", *arguments, transports=transports) as client:
                assert await client.hear() == "ready"
                await client.tell()
                while True:
                    await owner.tell(["word", 0])
                    if (now := await owner.hear()) > before:
                        break
                await trio.sleep(0.02 * chance.random())
                client.signal(signal.SIGKILL)
                await client.ended()
            before = now
        await owner.tell(["word", 0])
        assert await owner.hear() >= before


@pytest.mark.parametrize(("transports", "way"), WAYS)
async def test_closed_memory_is_refused(transports: str, way: str) -> None:
    """Otherwise an atomic would write to whatever is there now."""
    async with open_endpoint_and_context(transports, way) as (endpoint, context):
        memory = context.register(bytearray(8))
        with endpoint.attach(memory.descriptor) as remote, endpoint.worker.new_chain() as chain:
            assert await remote.fetch_add(1) == 0
            memory.close()
            with pytest.raises(trio_ucx.UCXError, match="refused") as caught:
                await remote.fetch_add(1)
            assert caught.value.status is ucp.Status.NO_ELEM
            await remote.atomic(ucp.AtomicOp.ADD, 1)
            with pytest.raises(trio_ucx.UCXError, match="refused"):
                await remote.flush()
            await remote.flush()
            added = chain.fetch_add(remote, 1)
            outcome = (await chain.run())[added]
            with pytest.raises(trio_ucx.UCXError, match="refused"):
                outcome.unwrap()
        assert endpoint.alive


@pytest.mark.parametrize("transports", ["tcp", "sm,self"])
async def test_a_fence_orders_puts_and_atomics(transports: str) -> None:
    """An atomic behind a fence happens after the puts before it, and a put behind it after the atomic."""
    async with open_endpoint_and_context(transports, "worker") as (endpoint, context):
        size = 2**21
        with context.register(bytearray(size)) as memory, endpoint.attach(memory.descriptor) as remote:
            view = memory.memoryview
            for number in range(1, 10):
                async with trio.open_nursery() as nursery:
                    nursery.start_soon(remote.put, bytes([number]) * size)
                    await trio.testing.wait_all_tasks_blocked(0.0001)
                    endpoint.worker.fence()
                    nursery.start_soon(remote.atomic, ucp.AtomicOp.ADD, 1)
                    await trio.testing.wait_all_tasks_blocked(0.0001)
                    endpoint.worker.fence()
                    assert await remote.get(0, 8) == bytes([number + 1]) + bytes([number]) * 7
                await remote.flush()
                assert view[8:] == bytes([number]) * (size - 8)
            del view


@pytest.mark.parametrize("transports", ["tcp", "sm,self"])
async def test_connections_with_atomics_leave_nothing(transports: str) -> None:
    async with open_two(transports) as (worker, owner):
        with owner.context.register(bytearray(8)) as memory:
            way = "connection" if transports == "tcp" else "worker"

            async def use_one() -> None:
                async with open_way(way, worker, owner) as endpoint:
                    with endpoint.attach(memory.descriptor) as remote, worker.new_chain() as chain:
                        await remote.fetch_add(1)
                        added = chain.atomic(remote, ucp.AtomicOp.ADD, 1)
                        (await chain.run())[added].unwrap()

            for _ in range(5):
                await use_one()
            before = len(os.listdir("/proc/self/fd"))
            for _ in range(50):
                await use_one()
            assert int.from_bytes(memory.memoryview, "little") == 110
            await until(lambda: len(os.listdir("/proc/self/fd")) <= before + 8)
