"""Registered memory, put and get: data arrive, misuse is refused, and all is freed when either side closes or dies."""

from __future__ import annotations

import hashlib
import itertools
import mmap
import os
import random
import signal
import struct
import zlib
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from functools import partial
from typing import Any

import attrs
import numpy as np
import pytest
import trio
from helpers import (
    HARDWARE,
    assert_free,
    assert_pinned,
    assert_transports,
    live_handles,
    open_peer,
    open_raw_endpoint,
    open_raw_listener,
    open_raw_pair,
    pattern,
    until,
)
from peers import REMOTE
from remote import (
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
from trio_ucx.ucp._rma.access_paths import PART_OVER_TCP

SIZES = [0, 1, 65535, 65536, 65537]
BIG = 2**26
FEW_WAYS = [("tcp", "raw"), ("tcp,sm,self", "connection"), ("sm,self", "worker")]
ALL_WAYS = [*WAYS, ("tcp", "accepted"), ("tcp,sm,self", "accepted")]


@pytest.fixture
async def worker(transports: str) -> AsyncIterator[ucp.Worker]:
    async with ucp.open_worker(config={"TLS": transports}, features=REMOTE) as worker:
        yield worker


# ---- what arrives ----


@pytest.mark.parametrize("first", ["get", "put"])
@pytest.mark.parametrize(("transports", "way"), ALL_WAYS)
async def test_put_and_get(transports: str, way: str, first: str) -> None:
    """Of all sizes, at offsets; allocated and registered memory. Also as the first that an endpoint does."""
    with trio.fail_after(50):
        async with open_endpoint_and_context(transports, way) as (endpoint, context):
            buffers = [context.allocate(70_000), context.register(bytearray(70_000))]
            for memory in buffers:
                view = memory.memoryview
                view[:] = bytes(memory.nbytes)
                with memory, endpoint.attach(memory.descriptor) as remote:
                    assert (remote.nbytes, len(memory)) == (70_000, 70_000)
                    if first == "get":
                        assert await remote.get() == bytes(70_000)
                    for number, size in enumerate(SIZES):
                        data, before = pattern(size, number), bytes(view)
                        await remote.put(data, 50)
                        await remote.flush()
                        assert view == before[:50] + data + before[50 + size :]
                        assert await remote.get(50, size) == data
                        buffer = bytearray(size + 2)
                        assert await remote.get_into(memoryview(buffer)[1:-1], 50) == size
                        assert_free(buffer)
                        assert buffer == b"\0" + data + b"\0"
                    assert await remote.get(69_997) == view[-3:]
                    assert await remote.get(70_000) == await remote.get(0, 0) == b""
                    await remote.put(b"", 70_000)
                    del view


@pytest.mark.sample(2)
@pytest.mark.parametrize(("transports", "way"), FEW_WAYS)
@pytest.mark.parametrize("kind", ["allocated", "registered"])
async def test_large_ones_to_another_process(transports: str, way: str, kind: str) -> None:
    async with open_owner(transports, way, BIG + 7, kind) as (peer, endpoint, memory):
        with trio.fail_after(30):
            data = pattern(BIG)
            await memory.put(data, 7)
            await memory.flush()
            await peer.tell(["digest"])
            assert await peer.hear() == hashlib.sha256(bytes(7) + data).hexdigest()
            buffer = bytearray(BIG)
            assert await memory.get_into(buffer, 7) == BIG
            assert buffer == data
            assert await memory.get() == bytes(7) + data
            if way != "connection":
                assert_transports(endpoint, "tcp" if transports == "tcp" else "sm")


def available_memory() -> int:
    with open("/proc/meminfo") as meminfo:
        fields = dict(line.split(":") for line in meminfo)
    return int(fields["MemAvailable"].split()[0]) * 1024


@pytest.mark.full
@pytest.mark.sample(1)
@pytest.mark.skipif(available_memory() < 3 * 2**30, reason="takes 1 GiB of memory, and less than 3 GiB are available")
@pytest.mark.parametrize(("transports", "way"), [("tcp", "raw"), ("sm,self", "worker")])
async def test_a_gigabyte_in_random_pieces(transports: str, way: str) -> None:
    """Every byte of it, in random order; the other copy is a pattern, of which the pieces are slices."""
    rng = random.Random(42)
    size = 2**30
    cuts = [0, *sorted(rng.sample(range(1, size), 40)), size]
    pieces = [(start, stop - start, rng.randrange(2**20)) for start, stop in itertools.pairwise(cuts)]
    data = memoryview(pattern(2**20 + max(length for _, length, _ in pieces)))
    with trio.fail_after(55):
        async with open_endpoint_and_context(transports, way) as (endpoint, context):
            with context.allocate(size) as memory, endpoint.attach(memory.descriptor) as remote:
                rng.shuffle(pieces)
                for start, length, where in pieces:
                    await remote.put(data[where : where + length], start)
                await remote.flush()
                rng.shuffle(pieces)
                for start, length, where in pieces:
                    assert memory.memoryview[start : start + length] == data[where : where + length]
                    if start % 3 == 0:
                        assert await remote.get(start, length) == data[where : where + length]


async def test_what_can_be_registered(worker: ucp.Worker) -> None:
    content = pattern(5000)
    with mmap.mmap(-1, 5000) as mapped:
        mapped[:] = content
        array = np.frombuffer(bytearray(content), np.uint8)
        endpoint = await worker.open_endpoint(worker.address)
        for buffer, access in (
            (content, ucp.Access.READ),
            (bytearray(content), ucp.Access.ALL),
            (memoryview(bytearray(b"##" + content + b"##"))[2:-2], ucp.Access.ALL),
            (array, ucp.Access.ALL),
            (array.view(np.uint64), ucp.Access.READ | ucp.Access.WRITE),
            (mapped, ucp.Access.ALL),
        ):
            with worker.context.register(buffer, access=access) as memory:
                assert memory.nbytes == 5000
                assert memory.memoryview == content
                assert memory.memoryview.readonly == (access == ucp.Access.READ)
                with endpoint.attach(memory.descriptor) as remote:
                    assert await remote.get() == content
                    assert remote.access == access
                    if ucp.Access.WRITE in access:
                        await remote.put(content[:100], 200)
                        await remote.flush()
                        assert (
                            bytes(memoryview(buffer).cast("B")[:400])
                            == content[:200] + content[:100] + content[300:400]
                        )
                        memory.memoryview[200:300] = content[200:300]
            if isinstance(buffer, bytearray):
                assert_free(buffer)
        await endpoint.aclose()


async def test_registered_buffers_are_pinned(worker: ucp.Worker) -> None:
    buffer = bytearray(100)
    memory = worker.context.register(buffer)
    assert_pinned(buffer)
    memory.close()
    memory.close()
    assert_free(buffer)


async def test_what_cannot_be_registered(worker: ucp.Worker) -> None:
    register = worker.context.register
    for bad in (b"read-only", memoryview(bytearray(8)).toreadonly()):
        for access in (ucp.Access.ALL, ucp.Access.WRITE, ucp.Access.ATOMIC):
            with pytest.raises((TypeError, ValueError)):
                register(bad, access=access)
    for empty in (b"", bytearray()):
        with pytest.raises(ValueError, match="empty"):
            register(empty, access=ucp.Access.READ)
    strided = ucp.Strided(np.zeros((8, 8), np.uint8)[:, ::2])
    for bad in ([bytearray(8)], (bytearray(8), bytearray(8)), strided, "text", 5, None):
        with pytest.raises(TypeError):
            register(bad)
    with pytest.raises((TypeError, ValueError)):
        register(np.zeros((8, 8))[:, ::2])
    for access in (7, "READ", None):
        with pytest.raises(TypeError, match="Access"):
            register(bytearray(8), access=access)
    for nbytes in (0, -1, 2**62 + 1):
        with pytest.raises(ValueError):
            worker.context.allocate(nbytes)
    with pytest.raises(MemoryError):  # before UCX tries: it would fill all of the shared memory that there is
        worker.context.allocate(2**60)
    with pytest.raises(TypeError):
        worker.context.allocate(1.5)
    with pytest.raises(TypeError):
        ucp.Memory()
    with pytest.raises(TypeError):
        ucp.RemoteMemory()
    assert not live_handles()["memory"]


# ---- what is refused ----


async def test_beyond_the_end(worker: ucp.Worker) -> None:
    buffer = bytearray(100)
    async with await worker.open_endpoint(worker.address) as endpoint:
        with worker.context.register(buffer) as memory, endpoint.attach(memory.descriptor) as remote:
            target = bytearray(1)
            for offset in (-1, -(2**63), 101, 2**32, 2**62, 2**64 - 1, 2**64, 2**100):
                for call in (
                    lambda offset=offset: remote.get(offset),
                    lambda offset=offset: remote.get(offset, 0),
                    lambda offset=offset: remote.get(offset, 1),
                    lambda offset=offset: remote.get_into(target, offset),
                    lambda offset=offset: remote.put(b"x", offset),
                    lambda offset=offset: remote.put(b"", offset),
                    lambda offset=offset: remote.fetch_add(1, offset),
                ):
                    with pytest.raises(ValueError):
                        await call()
            for nbytes in (-1, 101, 2**63, 2**64 - 50, 2**64):
                with pytest.raises(ValueError):
                    await remote.get(0, nbytes)
            for call in (
                lambda: remote.get(50, 51),
                lambda: remote.get(100, 1),
                lambda: remote.put(bytes(51), 50),
                lambda: remote.put(bytes(101)),
                lambda: remote.get_into(bytearray(101)),
                lambda: remote.get_into(target, 100),
            ):
                with pytest.raises(ValueError, match="beyond the end"):
                    await call()
            for offset in (1.0, "1", None, b"1"):
                with pytest.raises(TypeError):
                    await remote.get(offset)
                with pytest.raises(TypeError):
                    await remote.put(b"x", offset)
            assert_free(target)
            assert buffer == bytes(100)


async def test_buffers_that_ucx_does_not_take(worker: ucp.Worker) -> None:
    strided = np.zeros((8, 8), np.uint8)[:, ::2]
    async with await worker.open_endpoint(worker.address) as endpoint:
        with worker.context.allocate(100) as memory, endpoint.attach(memory.descriptor) as remote:
            part = bytearray(4)
            for bad in ([part], [part, bytearray(4)], (part,), [], ucp.Strided(strided)):
                with pytest.raises(TypeError, match="contiguous"):
                    await remote.put(bad)
                with pytest.raises(TypeError, match="contiguous"):
                    await remote.get_into(bad)
            for bad in (strided, b"read-only", memoryview(b"read-only"), None, "text", 4):
                with pytest.raises((TypeError, ValueError, BufferError)):
                    await remote.get_into(bad)
            for bad in (strided, None, "text", 4):
                with pytest.raises((TypeError, ValueError, BufferError)):
                    await remote.put(bad)
            assert_free(part)


async def test_access(worker: ucp.Worker) -> None:
    async with await worker.open_endpoint(worker.address) as endpoint:
        for access in (ucp.Access.READ, ucp.Access.WRITE, ucp.Access.ATOMIC, ucp.Access.READ | ucp.Access.ATOMIC):
            with worker.context.allocate(64, access=access) as memory:
                memory.memoryview[:] = bytes(64)
                with endpoint.attach(memory.descriptor) as remote:
                    assert memory.access == remote.access == access
                    add = partial(remote.atomic, ucp.AtomicOp.ADD, 0)
                    for right, calls in (
                        (ucp.Access.READ, [remote.get, lambda: remote.get_into(bytearray(1))]),
                        (ucp.Access.WRITE, [lambda: remote.put(b"\0")]),
                        (
                            ucp.Access.ATOMIC,
                            [lambda: remote.fetch_add(0), lambda: remote.compare_swap(1, 1), add],
                        ),
                    ):
                        for call in calls:
                            if right in access:
                                await call()
                            else:
                                with pytest.raises(ValueError, match="does not allow"):
                                    await call()
                    if ucp.Access.READ not in access:
                        with pytest.raises(ValueError, match="does not allow"):
                            remote.map()


async def test_without_the_features() -> None:
    async with ucp.open_worker(features=ucp.Feature.TAG | ucp.Feature.WAKEUP) as plain:
        with pytest.raises(RuntimeError, match="Feature.AM"):
            plain.context.register(bytearray(8))
        with pytest.raises(RuntimeError, match="Feature.AM"):
            plain.context.allocate(8)
        async with ucp.open_worker() as able, await plain.open_endpoint(plain.address) as endpoint:
            with able.context.allocate(8) as memory, pytest.raises(RuntimeError, match="Feature.AM"):
                endpoint.attach(memory.descriptor)
    async with ucp.open_worker(config={"TLS": "tcp"}) as worker:
        async with await worker.open_endpoint(worker.address) as endpoint:
            with worker.context.allocate(8) as memory:
                with endpoint.attach(for_ucx(memory.descriptor)) as remote:
                    with pytest.raises(RuntimeError, match="UCX's own puts and gets.*Feature.RMA"):
                        await remote.get()
                    buffer = bytearray(8)
                    with pytest.raises(RuntimeError, match="UCX's own puts and gets.*Feature.RMA"):
                        await remote.get_into(buffer)
                    assert_free(buffer)


async def test_closed_things(worker: ucp.Worker) -> None:
    def calls(remote: ucp.RemoteMemory) -> list[Any]:
        return [
            remote.get,
            lambda: remote.get(0, 0),
            lambda: remote.get_into(bytearray(8)),
            lambda: remote.put(b"12345678"),
            remote.flush,
            lambda: remote.fetch_add(1),
            lambda: remote.atomic(ucp.AtomicOp.ADD, 1),
        ]

    memory = worker.context.allocate(8)
    endpoint = await worker.open_endpoint(worker.address)
    remote = endpoint.attach(memory.descriptor)
    await remote.get()
    remote.close()
    remote.close()
    for call in calls(remote):
        with pytest.raises(ValueError, match="closed"):
            await call()
    with pytest.raises(ValueError, match="closed"):
        remote.map()
    with endpoint.attach(memory.descriptor) as remote:
        await remote.fetch_add(1)
        endpoint.abort()
        for call in calls(remote):
            with pytest.raises(trio.ClosedResourceError):
                await call()
        with pytest.raises(trio.ClosedResourceError):
            remote.map()
    with pytest.raises(trio.ClosedResourceError):
        endpoint.attach(memory.descriptor)
    descriptor = memory.descriptor
    memory.close()
    for use in ("memoryview", "rkey", "descriptor"):
        with pytest.raises(ValueError, match="closed"):
            getattr(memory, use)
    assert "closed" in repr(memory) and "closed" in repr(remote)
    with ucp.open_context(features=REMOTE) as context:
        async with ucp.open_worker(context=context) as other:
            endpoint = await other.open_endpoint(other.address)
            remote = endpoint.attach(descriptor)
            await remote.flush()
        for call in calls(remote):
            with pytest.raises(trio.ClosedResourceError):
                await call()
        remote.close()
    for make in (lambda: context.allocate(8), lambda: context.register(bytearray(8))):
        with pytest.raises(RuntimeError, match="context was closed"):
            make()


# ---- descriptors ----


async def test_descriptors(worker: ucp.Worker) -> None:
    with worker.context.allocate(100, access=ucp.Access.READ) as memory:
        descriptor = ucp.MemoryDescriptor.from_bytes(memory.descriptor)
        assert (descriptor.address, descriptor.nbytes, descriptor.rkey) == (memory.address, 100, memory.rkey)
        assert descriptor.access == ucp.Access.READ
        assert bytes(descriptor) == memory.descriptor
        assert ucp.MemoryDescriptor.from_bytes(bytearray(memory.descriptor)) == descriptor
        async with await worker.open_endpoint(worker.address) as endpoint:
            with endpoint.attach(descriptor) as remote:
                assert len(await remote.get()) == 100


async def test_damaged_descriptors(worker: ucp.Worker) -> None:
    """Every byte, every length; nothing of it gets as far as UCX, which would crash."""
    with worker.context.allocate(100) as memory:
        good = memory.descriptor
    async with await worker.open_endpoint(worker.address) as endpoint:
        for where in range(len(good)):
            for mask in (0x01, 0x80, 0xFF):
                bad = bytearray(good)
                bad[where] ^= mask
                with pytest.raises(ValueError):
                    endpoint.attach(bytes(bad))
        for length in range(len(good)):
            with pytest.raises(ValueError):
                endpoint.attach(good[:length])
        for bad in (good + b"x", b"", bytes(500), bytes(worker.address)):
            with pytest.raises(ValueError):
                endpoint.attach(bad)
        for bad in ("text", None, 5, [good]):
            with pytest.raises(TypeError):
                endpoint.attach(bad)
        newer = bytearray(good[:-4])
        newer[4] += 1
        with pytest.raises(ValueError, match="version 3: this trio_ucx speaks version 2"):
            endpoint.attach(bytes(newer) + struct.pack("<I", zlib.crc32(newer)))
        for lie in (slice(8, 16), slice(16, 24), slice(-len(good), None)):
            liar = bytearray(good[:-4])
            liar[lie] = b"\xff" * len(liar[lie])
            with pytest.raises(ValueError):
                endpoint.attach(bytes(liar) + struct.pack("<I", zlib.crc32(liar)))


@pytest.mark.sample(6)
@pytest.mark.parametrize("chained", [False, True])
@pytest.mark.parametrize(
    ("owners", "missing", "what"),
    [
        (ucp.Feature.RMA, "AM", "atomic"),
        (ucp.Feature.AMO32, "RMA", "get"),
        (ucp.Feature.AMO64, "RMA", "put"),
        (ucp.Feature.RMA, "", "get"),
    ],
)
async def test_owner_that_would_never_answer(
    transports: str, owners: ucp.Feature, missing: str, what: str, chained: bool
) -> None:
    """UCX's puts and gets need the owner's features, and atomics need messages, unless the memory is mapped."""
    config = {"TLS": transports}

    async def do(remote: ucp.RemoteMemory) -> None:
        if chained:
            chain = us.new_chain()
            {"atomic": lambda: chain.fetch_add(remote, 1), "get": lambda: chain.get(remote, 0, 8)}.get(
                what, lambda: chain.put(remote, bytes(8))
            )()
            await chain.run()
        elif what == "atomic":
            await remote.fetch_add(1)
        else:
            await (remote.get() if what == "get" else remote.put(bytes(8)))
        await remote.flush()

    for messages in (False, True):
        features = owners | ucp.Feature.TAG | (ucp.Feature.AM if messages else ucp.Feature(0))
        ours = REMOTE if messages else REMOTE & ~ucp.Feature.AM
        async with (
            ucp.open_worker(config=config, features=features) as owner,
            ucp.open_worker(config=config, features=ours) as us,
        ):
            with owner.context.allocate(64) as allocated, owner.context.register(bytearray(64)) as registered:
                for memory in (allocated, registered):
                    answered = messages or not missing or (memory is allocated and transports != "tcp")
                    endpoint = await us.open_endpoint(owner.address)
                    with trio.fail_after(60), endpoint.attach(memory.descriptor) as remote:
                        if answered:
                            await do(remote)
                        else:
                            with pytest.raises(RuntimeError, match=rf"without.* ucp\.Feature\.{missing}\b"):
                                await do(remote)
                    endpoint.abort()


async def test_descriptor_made_by_hand(worker: ucp.Worker) -> None:
    """As of a plain UCP program, which sends the address, the length and the packed key."""
    with worker.context.register(bytearray(pattern(104))) as memory:
        plain = ucp.MemoryDescriptor(memory.address, memory.nbytes, memory.rkey)
        assert plain.access == ucp.Access.ALL
        async with open_raw_pair(worker) as (client, server):
            for endpoint in (client, server):
                with endpoint.attach(plain) as remote:
                    assert await remote.get() == pattern(104)
                    await remote.put(bytes(8))
                    with pytest.raises(RuntimeError, match="no token"):
                        await remote.fetch_add(1, 8)
                    await remote.put(pattern(104))
        for change in (
            {"address": -1},
            {"address": 2**64},
            {"nbytes": -1},
            {"nbytes": 2**64 - 1},
            {"rkey": b""},
            {"rkey": memory.rkey[:8]},
            {"rkey": memory.rkey[:-2]},
            {"rkey": bytes(8) + b"\xff"},
            {"rkey": b"\xff" * 20},
        ):
            with pytest.raises(ValueError):
                attrs.evolve(plain, **change)
        for change in (
            {"address": "0"},
            {"nbytes": 1.5},
            {"rkey": "key"},
            {"rkey": None},
            {"access": 7},
            {"worker": b"address"},
        ):
            with pytest.raises(TypeError):
                attrs.evolve(plain, **change)


@pytest.mark.parametrize("way", ["connection", "worker"])
async def test_descriptor_of_another_process(worker: ucp.Worker, transports: str, way: str) -> None:
    async with (
        open_peer("owner", 100, transports=transports) as peer,
        open_peer("owner", 100, transports=transports) as other,
    ):
        said, others = await peer.hear(), await other.hear()
        async with open_to_peer(way, worker, said) as endpoint:
            with worker.context.allocate(100) as ours:
                for wrong in (bytes.fromhex(others["descriptor"]), ours.descriptor):
                    with pytest.raises(ValueError, match="another process"):
                        endpoint.attach(wrong)
            with endpoint.attach(bytes.fromhex(said["descriptor"])) as memory:
                assert await memory.get() == bytes(100)


# ---- by load and store ----


@pytest.mark.parametrize("way", ["raw", "connection", "worker", "accepted"])
async def test_map(way: str) -> None:
    async with open_endpoint_and_context("tcp,sm,self", way) as (endpoint, context):
        with context.allocate(5000) as memory, endpoint.attach(memory.descriptor) as remote:
            memory.memoryview[:] = pattern(5000)
            await remote.flush()
            view = remote.map()
            assert remote.map() is view
            assert view == pattern(5000)
            view[:3] = b"abc"
            assert memory.memoryview[:3] == b"abc"
            memory.memoryview[-3:] = b"xyz"
            assert view[-3:] == await remote.get(4997) == b"xyz"
            array = np.frombuffer(view, np.uint8)
            with pytest.raises(BufferError):
                remote.close()
            assert array[0] == ord("a")
            assert await remote.get(0, 3) == b"abc"
            del array
            remote.close()
            with pytest.raises(ValueError):
                view[0]
        with context.allocate(10, access=ucp.Access.READ) as memory, endpoint.attach(memory.descriptor) as remote:
            assert remote.map().readonly
        with context.register(bytearray(10)) as memory, endpoint.attach(memory.descriptor) as remote:
            with pytest.raises(trio_ucx.UCXError) as caught:
                remote.map()
            assert caught.value.status == ucp.Status.UNREACHABLE
            assert await remote.get() == bytes(10)


async def test_map_to_another_process() -> None:
    async with open_owner("sm,self", "worker", 5000) as (peer, _, memory):
        await memory.flush()
        memory.map()[:] = pattern(5000)
        await peer.tell(["digest"])
        assert await peer.hear() == hashlib.sha256(pattern(5000)).hexdigest()


async def test_map_over_tcp() -> None:
    async with open_endpoint_and_context("tcp", "raw") as (endpoint, context):
        with context.allocate(100) as memory, endpoint.attach(memory.descriptor) as remote:
            await remote.flush()
            with pytest.raises(trio_ucx.UCXError) as caught:
                remote.map()
            assert caught.value.status == ucp.Status.UNREACHABLE


async def test_map_before_the_connection_is_up() -> None:
    """A key unpacked by then would never reach the memory."""
    async with open_two("tcp,sm,self") as (worker, owner), await open_raw_listener(owner, worker) as listener:
        with owner.context.allocate(10) as memory:
            client = await worker.open_endpoint(listener.address)
            remote = client.attach(memory.descriptor)
            with pytest.raises(trio_ucx.UCXError) as caught:
                remote.map()
            assert caught.value.status == ucp.Status.NOT_CONNECTED
            server = await (await listener.accept_request()).accept()
            with trio.fail_after(15):
                await remote.flush()
            memory.memoryview[:] = b"0123456789"
            assert remote.map() == await remote.get() == b"0123456789"
            remote.close()
            client.abort()
            server.abort()


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
async def test_map_that_outlives_everything() -> None:
    """Memory with live views stays mapped, whatever else was closed; the worker is kept rather than crash."""
    async with open_peer("owner", 2**20, transports="sm,self") as peer:
        said = await peer.hear()
        async with ucp.open_worker(config={"TLS": "sm,self"}, features=REMOTE) as worker:
            endpoint = await worker.open_endpoint(ucp.WorkerAddress(bytes.fromhex(said["worker"])))
            memory = endpoint.attach(bytes.fromhex(said["descriptor"]))
            await memory.flush()
            array = np.frombuffer(memory.map(), np.uint8)
            array[:] = 5
    assert array.sum() == 5 * 2**20


# ---- order ----


@pytest.mark.parametrize(("transports", "way"), FEW_WAYS)
async def test_fence(transports: str, way: str) -> None:
    """Put, fence, put of a flag: who sees the flag sees the data."""
    async with open_owner(transports, way, 2**20 + 1) as (peer, endpoint, memory):
        with trio.fail_after(30):
            for number in range(1, 6):
                data = pattern(2**20, number)
                await memory.put(b"\0", 2**20)
                await memory.flush()
                await peer.tell(["poll", 2**20, 0, 2**20])
                await memory.put(data)
                endpoint.worker.fence()
                await memory.put(b"\1", 2**20)
                await memory.flush()
                assert await peer.hear() == hashlib.sha256(data).hexdigest()


# ---- cancelled, and closed meanwhile ----


@pytest.mark.skipif(HARDWARE, reason="hardware does not need the peer's process")
@pytest.mark.sample(1)
@pytest.mark.parametrize(("transports", "way"), FEW_WAYS)
async def test_stopped_peer(transports: str, way: str) -> None:
    """Cancelling returns at once; the buffers are UCX's until the peer goes on."""
    async with open_owner(transports, way, BIG, "registered") as (peer, endpoint, memory):
        await memory.put(b"x")
        await memory.flush()
        data, buffer = bytearray(pattern(BIG)), bytearray(BIG)
        await peer.stop()
        assert memory._path is not None
        try:
            await cancelled_promptly(memory.put, data)
            if memory._path.native.pid:  # the kernel reads it without the owner
                assert await memory.get_into(buffer) == BIG
            else:
                await cancelled_promptly(memory.get_into, buffer)
                await cancelled_promptly(memory.get, 0, 100)
            await cancelled_promptly(memory.flush)
            assert_pinned(data)
            least = 4
            if memory._path.native.pid:
                assert_free(buffer)
                least = 2
            elif transports == "tcp":
                assert_free(buffer)  # the put's parts fill the window, so nothing of the gets was sent
                least = 2
            else:
                assert_pinned(buffer)
            assert endpoint.worker.statistics().left_over_operations >= least
            assert endpoint.statistics().left_over_operations >= least
            memory.close()  # keys stay as long as they are used
        finally:
            peer.resume()
        await released(endpoint.worker)
        assert_free(data)
        assert_free(buffer)
        assert not live_handles()["remote key"]
        await endpoint.flush()
        with endpoint.attach(memory._descriptor) as again:
            written = await again.get()
            if transports == "tcp":  # the parts that had been sent
                sent = 64 * PART_OVER_TCP
                assert written == data[:sent] + bytes(BIG - sent)
            else:
                assert written == data


@pytest.mark.parametrize(("transports", "way"), FEW_WAYS)
async def test_cancelled_at_random_moments(transports: str, way: str) -> None:
    """A cancelled put wrote all of its bytes, none, or some of them; nothing else, nowhere else."""
    rng = random.Random(7)
    size = 2**21
    async with open_endpoint_and_context(transports, way) as (endpoint, context):
        memory = context.register(np.zeros(size, np.uint8))
        remote = endpoint.attach(memory.descriptor)
        there = np.frombuffer(memory.memoryview, np.uint8)
        await remote.get(0, 1)
        with trio.fail_after(40):
            for number in range(1, 30):
                start, stop = sorted(rng.sample(range(size), 2))
                before = there.copy()
                with trio.move_on_after(rng.choice([0, 0.0001, 0.0005, 0.002])) as scope:
                    if number % 3:
                        await remote.put(np.full(stop - start, number, np.uint8), start)
                    else:
                        await remote.get_into(bytearray(stop - start), start)
                await released(endpoint.worker)
                await remote.flush()
                changed = there != before
                assert not changed[:start].any() and not changed[stop:].any()
                if number % 3:
                    assert (there[start:stop][changed[start:stop]] == number).all()
                    if not scope.cancelled_caught:
                        assert (there[start:stop] == number).all()
                else:
                    assert not changed.any()
        del there
        remote.close()
        memory.close()


# The owner may be left with answers that nobody takes any more, which UCX cannot get rid of; it says so.
@pytest.mark.sample(8)
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.cut_off
@pytest.mark.parametrize("how", ["close", "abort", "leave"])
@pytest.mark.parametrize(("transports", "way"), WAYS)
async def test_closed_with_operations_under_way(transports: str, way: str, how: str) -> None:
    """RemoteMemory.close lets them finish; abort, and the worker's end, tell who waits."""
    async with open_two(transports) as (_, owner):
        memory = owner.context.register(bytearray(2**22))
        ended: list[object] = []

        async def use(function: Any, *args: object) -> None:
            try:
                while True:
                    await function(*args)
            except (trio.ClosedResourceError, ValueError) as error:
                ended.append(type(error))

        async with trio.open_nursery() as nursery:
            async with ucp.open_worker(config={"TLS": transports}, features=REMOTE) as worker:
                async with open_way(way, worker, owner) as endpoint:
                    remote = endpoint.attach(memory.descriptor)
                    for _ in range(3):
                        nursery.start_soon(use, remote.put, bytes(2**22))
                        nursery.start_soon(use, remote.get_into, bytearray(2**22))
                        nursery.start_soon(use, remote.get)
                        nursery.start_soon(use, remote.fetch_add, 1)
                    with trio.fail_after(15):
                        while endpoint.statistics().operations_in_flight < 6:
                            await trio.sleep(0)
                        if how == "close":
                            remote.close()
                            await until(lambda: len(ended) >= 12)
                            with endpoint.attach(memory.descriptor) as again:
                                assert len(await again.get()) == 2**22
                        elif how == "abort":
                            abort_way(endpoint)
            await until(lambda: len(ended) >= 12)
        assert set(ended) == {ValueError if how == "close" else trio.ClosedResourceError}
        memory.close()


async def test_graceful_close_waits_for_puts(worker: ucp.Worker, transports: str) -> None:
    async with open_peer("owner", 2**24, "registered", transports=transports) as peer:
        said = await peer.hear()
        async with trio.open_nursery() as nursery:
            async with await open_raw_endpoint(worker, tuple(said["raw"])) as endpoint:
                memory = endpoint.attach(bytes.fromhex(said["descriptor"]))
                await memory.flush()
                nursery.start_soon(memory.put, pattern(2**24))
                await trio.testing.wait_all_tasks_blocked()
        memory.close()
        with trio.fail_after(15):
            while True:  # UCX's flush says that it is out of our process
                await peer.tell(["digest"])
                if await peer.hear() == hashlib.sha256(pattern(2**24)).hexdigest():
                    break


# ---- closing memory ----


async def test_memory_in_use(worker: ucp.Worker) -> None:
    memory = worker.context.allocate(100)
    array = np.frombuffer(memory.memoryview, np.uint8)
    with pytest.raises(BufferError, match="in use"):
        memory.close()
    array[:] = 5
    assert memory.memoryview == b"\5" * 100
    del array
    memory.close()


async def test_exception_in_the_block(worker: ucp.Worker) -> None:
    with pytest.raises(KeyError):
        with worker.context.allocate(100) as memory:
            view = memory.memoryview
            raise KeyError
    with pytest.raises(ValueError):
        view[0]
    with pytest.warns(ResourceWarning, match="stays open"), pytest.raises(KeyError):
        with worker.context.allocate(100) as memory:
            array = np.frombuffer(memory.memoryview, np.uint8)
            raise KeyError
    assert len(array) == 100
    del array
    memory.close()


async def test_context_closed_with_memory_open() -> None:
    with pytest.warns(ResourceWarning, match="unclosed <trio_ucx.ucp.Memory"):
        with ucp.open_context(features=REMOTE) as context:
            context.allocate(100)
            context.register(buffer := bytearray(100))
    assert_free(buffer)
    assert not live_handles()


async def test_context_closed_with_memory_in_use() -> None:
    """It stays, and so does the context, until nobody uses it any more."""
    with pytest.warns(ResourceWarning, match="unclosed <trio_ucx.ucp.Memory"):
        with ucp.open_context(features=REMOTE) as context:
            memories = [context.allocate(100), context.register(bytearray(100))]
            arrays = [np.frombuffer(memory.memoryview, np.uint8) for memory in memories]
    for array in arrays:
        array[:] = 7
        assert array.sum() == 700
    del array, arrays
    for memory in memories:
        memory.close()
    assert not context._memories and context._handle is None
    assert not live_handles()


async def test_dropped_remote_memory(worker: ucp.Worker) -> None:
    async with await worker.open_endpoint(worker.address) as endpoint:
        with worker.context.allocate(100) as memory:
            remote = endpoint.attach(memory.descriptor)
            await remote.get()
            assert live_handles()["remote key"]
            with pytest.warns(ResourceWarning, match="unclosed <trio_ucx.ucp.RemoteMemory"):
                del remote
            with trio.fail_after(15):
                while live_handles()["remote key"]:
                    await trio.sleep(0)


# ---- peers that die ----


@pytest.mark.sample(6)
@pytest.mark.cut_off
@pytest.mark.parametrize("doing", ["put", "get"])
@pytest.mark.parametrize(("transports", "way"), WAYS)
async def test_killed_peer(transports: str, way: str, doing: str) -> None:
    async with open_peer("owner", BIG, "registered", transports=transports) as peer:
        said = await peer.hear()
        async with AsyncExitStack() as closing:
            worker = await closing.enter_async_context(ucp.open_worker(config={"TLS": transports}, features=REMOTE))
            async with open_to_peer(way, worker, said) as endpoint:
                memory = endpoint.attach(bytes.fromhex(said["descriptor"]))
                await memory.flush()
                with Stopwatch(SOON), trio.fail_after(60):
                    async with trio.open_nursery() as nursery:
                        for _ in range(2):
                            if doing == "put":
                                nursery.start_soon(expect_broken, memory.put, bytes(BIG))
                            else:
                                nursery.start_soon(expect_broken, memory.get)
                                nursery.start_soon(expect_broken, memory.get_into, bytearray(BIG))
                        nursery.start_soon(expect_broken, memory.put, b"x")
                        nursery.start_soon(expect_broken, memory.get, 5, 5)
                        while not endpoint.statistics().operations_in_flight:
                            await trio.sleep(0)
                        peer.signal(signal.SIGKILL)
                for call in (memory.get, memory.flush, lambda: memory.put(b"x")):
                    with pytest.raises(trio.BrokenResourceError):
                        await call()
                assert not endpoint.alive
                memory.close()
            with Stopwatch(3):
                await closing.aclose()


@pytest.mark.cut_off
async def test_killed_peer_by_shared_memory_alone() -> None:
    """UCX itself never notices; the worker's address says which process it is."""
    async with open_peer("owner", 100, transports="sm,self") as peer:
        said = await peer.hear()
        async with AsyncExitStack() as closing:
            worker = await closing.enter_async_context(ucp.open_worker(config={"TLS": "sm,self"}, features=REMOTE))
            async with open_to_peer("worker", worker, said) as endpoint:
                await endpoint.flush()
                with Stopwatch(SOON), trio.fail_after(60):
                    async with trio.open_nursery() as nursery:
                        nursery.start_soon(expect_broken, endpoint.tag_send, bytearray(BIG), 1)
                        nursery.start_soon(expect_broken, endpoint.tag_send_sync, b"x", 2)
                        while endpoint.statistics().operations_in_flight < 2:
                            await trio.sleep(0)
                        peer.signal(signal.SIGKILL)
            with Stopwatch(3):
                await closing.aclose()


# ---- leaks ----


@pytest.mark.sample(1)
@pytest.mark.parametrize("way", ["raw", "worker"])
async def test_many_cycles(worker: ucp.Worker, transports: str, way: str) -> None:
    """File descriptors and handles, before and after."""

    async def cycle() -> None:
        with worker.context.allocate(4096) as memory:
            async with open_way(way, worker, worker) as endpoint:
                for _ in range(2):
                    with endpoint.attach(memory.descriptor) as remote:
                        await remote.put(b"12345678")
                        await remote.flush()
                        assert await remote.get(0, 8) == b"12345678"

    handles = live_handles()
    with trio.fail_after(55):
        for _ in range(10):
            await cycle()
        await until(lambda: live_handles() == handles)
        files = len(os.listdir("/proc/self/fd"))
        for _ in range(60):
            await cycle()
        await until(lambda: live_handles() == handles and len(os.listdir("/proc/self/fd")) <= files + 6)
