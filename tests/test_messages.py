"""Messages between two processes: every size and kind of buffer, many tags, both directions, many connections."""

from __future__ import annotations

import array
import mmap
import time
from functools import partial

import numpy as np
import pytest
import trio
import trio.testing
from helpers import SANITIZED, Peer, assert_transports, open_listener, open_pair, open_peer, pattern

import trio_ucx
from trio_ucx import ucp

SIZES = [0, 1, 8, 100, 4096, 8191, 65535, 65536, 65537, 2**20, 2**24 + 3, 2**26]


async def listening(peer: Peer) -> tuple[str, int]:
    address, _ = await peer.hear()
    return tuple(address)


async def test_sizes(worker: ucp.Worker, transports: str) -> None:
    async with open_peer("echo", [5], transports=transports) as peer:
        async with trio_ucx.connect(await listening(peer), worker=worker) as connection:
            assert_transports(connection, transports)
            for size in SIZES:
                data = pattern(size, size)
                with trio.fail_after(20):
                    async with trio.open_nursery() as nursery:
                        nursery.start_soon(partial(connection.send, data, tag=5))
                        assert await connection.receive(tag=5) == data


async def test_sizes_by_unix_socket(worker: ucp.Worker, transports: str) -> None:
    async with open_peer("echo", [5], transports=transports) as peer:
        _, path = await peer.hear()
        async with trio_ucx.connect(path, worker=worker) as connection:
            assert (connection.local_address, connection.remote_address) == (None, (path, 0))
            for size in SIZES:
                data = pattern(size, size)
                buffer = bytearray(size)
                with trio.fail_after(20):
                    async with trio.open_nursery() as nursery:
                        nursery.start_soon(partial(connection.send, data, tag=5))
                        assert await connection.receive_into(buffer, tag=5) == size
                    assert buffer == data
            assert_transports(connection, transports)


@pytest.mark.parametrize("size", [1000, 3 * 2**20])
async def test_kinds_of_buffers(worker: ucp.Worker, transports: str, size: int) -> None:
    data = pattern(size, 1)
    with mmap.mmap(-1, size) as mapped:
        mapped[:] = data
        kinds = [
            data,
            bytearray(data),
            memoryview(data),
            memoryview(bytearray(data))[:],
            array.array("B", data),
            np.frombuffer(data, dtype=np.uint8),
            np.frombuffer(data, dtype=np.float64).reshape(5, -1) if size % 40 == 0 else np.frombuffer(data, "u4"),
            mapped,
        ]
        async with open_peer("echo", [0], transports=transports) as peer:
            async with trio_ucx.connect(await listening(peer), worker=worker) as connection:
                for kind in kinds:
                    expected = memoryview(kind).tobytes()
                    for target in (
                        bytearray(size),
                        memoryview(bytearray(size)),
                        np.zeros(size, dtype=np.uint8),
                        array.array("B", bytes(size)),
                        mapped,
                    ):
                        if kind is target:
                            continue
                        with trio.fail_after(20):
                            async with trio.open_nursery() as nursery:
                                nursery.start_soon(connection.send, kind)
                                length = await connection.receive_into(target)
                        assert length == len(expected)
                        assert memoryview(target).cast("B")[:length] == expected


@pytest.mark.parametrize("scale", [1, 100_000])
async def test_gather_and_scatter(worker: ucp.Worker, transports: str, scale: int) -> None:
    parts = [pattern(size * scale, size) for size in (3, 0, 40, 1)]
    whole = b"".join(parts)
    async with open_peer("echo", [9], transports=transports) as peer:
        async with trio_ucx.connect(await listening(peer), worker=worker) as connection:
            for gathered in (parts, [bytearray(part) for part in parts], tuple(parts), [whole], []):
                expected = b"".join(bytes(part) for part in gathered)
                targets = [bytearray(len(whole) // 2), bytearray(1), bytearray(len(whole))]
                with trio.fail_after(20):
                    async with trio.open_nursery() as nursery:
                        nursery.start_soon(partial(connection.send, gathered, tag=9))
                        length = await connection.receive_into(targets, tag=9)
                assert length == len(expected)
                assert b"".join(targets)[:length] == expected


async def test_gather_of_many_parts(worker: ucp.Worker, transports: str) -> None:
    parts = [pattern(997, seed) for seed in range(200)]
    async with open_pair(worker) as (client, server):
        targets = [bytearray(1000) for _ in range(200)]
        async with trio.open_nursery() as nursery:
            nursery.start_soon(client.send, parts)
            length = await server.receive_into(targets)
        assert b"".join(targets)[:length] == b"".join(parts)


async def test_hundred_tags_interleaved_both_ways(worker: ucp.Worker, transports: str) -> None:
    tags = list(range(0, 2**31 - 1, 2**31 // 100))[:99] + [2**31 - 1]
    sizes = [0, 7, 3000, 70_000]
    async with open_peer("echo", tags, transports=transports) as peer:
        async with trio_ucx.connect(await listening(peer), worker=worker) as connection:

            async def send(tag: int) -> None:
                for number, size in enumerate(sizes * 3):
                    await connection.send(pattern(size, tag + number), tag=tag)

            async def check(tag: int) -> None:
                for number, size in enumerate(sizes * 3):
                    assert await connection.receive(tag=tag) == pattern(size, tag + number)

            with trio.fail_after(60):
                async with trio.open_nursery() as nursery:
                    for tag in tags:
                        nursery.start_soon(send, tag)
                        nursery.start_soon(check, tag)


async def test_two_hundred_connections_on_one_worker(worker: ucp.Worker, transports: str) -> None:
    count = 30 if SANITIZED == "valgrind" else 200  # the listener gives each 10 seconds to connect
    async with open_peer("echo", [0], transports=transports) as peer:
        address = await listening(peer)

        async def client(number: int) -> None:
            async with trio_ucx.connect(address, worker=worker, connect_timeout=60, close_timeout=60) as connection:
                opened.append(connection)
                if len(opened) == count:
                    all_open.set()
                await all_open.wait()
                for size in (number, 70_000):
                    data = pattern(size, number)
                    async with trio.open_nursery() as nursery:
                        nursery.start_soon(connection.send, data)
                        assert await connection.receive() == data

        opened: list[trio_ucx.Connection] = []
        all_open = trio.Event()
        with trio.fail_after(120):
            async with trio.open_nursery() as nursery:
                for number in range(count):
                    nursery.start_soon(client, number)


async def test_nowait_and_wait_message(worker: ucp.Worker) -> None:
    async with open_pair(worker) as (client, server):
        with pytest.raises(trio.WouldBlock):
            server.receive_nowait(tag=3)
        data = bytearray(b"first")
        client.send_nowait(data, tag=3)
        data[:] = b"XXXXX"
        client.send_nowait([b"se", bytearray(b"cond")], tag=3)
        assert await server.wait_message(tag=3) == 5
        assert await server.wait_message(tag=3) == 5
        assert server.receive_nowait(tag=3) == b"first"
        assert await server.wait_message(tag=3) == 6
        assert await server.receive(tag=3) == b"second"
        with pytest.raises(ValueError, match="copies at most"):
            client.send_nowait(bytearray(2**20 + 1))
        client.send_nowait(bytes(2**22), tag=3)
        assert await server.wait_message(tag=3) == 2**22
        with pytest.raises(trio.WouldBlock):
            server.receive_nowait(tag=3)
        assert await server.receive(tag=3) == bytes(2**22)


async def test_messages_iterator_survives_timeouts(worker: ucp.Worker) -> None:
    async with open_pair(worker) as (client, server):
        messages = server.messages(4)
        got = []
        for number in range(3):
            with trio.move_on_after(0.02):
                async for message in messages:
                    got.append(message)
            await client.send(str(number).encode(), tag=4)
        await client.aclose()
        async for message in messages:
            got.append(message)
        assert got == [b"0", b"1", b"2"]


async def test_waiters_are_first_come_first_served(worker: ucp.Worker) -> None:
    got: list[tuple[int, bytes]] = []

    async def receive(number: int) -> None:
        got.append((number, await server.receive(tag=1)))

    async with open_pair(worker) as (client, server), trio.open_nursery() as nursery:
        for number in range(20):
            nursery.start_soon(receive, number)
            await trio.testing.wait_all_tasks_blocked()
        for number in range(20):
            nursery.start_soon(partial(client.send, bytes([number]) * (1 if number % 3 else 100_000), tag=1))
            await trio.testing.wait_all_tasks_blocked()
    assert sorted((number, message[0]) for number, message in got) == [(number, number) for number in range(20)]


IPV6 = pytest.mark.skipif(
    ucp.library().version < (1, 17), reason="older UCX is told about IPv6 by the environment only"
)


@IPV6
async def test_ipv6() -> None:
    async with ucp.open_worker(config={"TLS": "tcp", "TCP_AF_PRIO": "inet6,inet"}) as worker:
        async with open_listener(worker, host="::1") as listener:
            for address in (f"[::1]:{listener.address[1]}", ("::1", listener.address[1])):
                async with trio_ucx.connect(address, worker=worker) as client:
                    server = await listener.accept()
                    assert client.remote_address == listener.address
                    await client.send(pattern(1000))
                    assert await server.receive() == pattern(1000)
                await server.aclose()


@IPV6
async def test_shared_worker_of_both_families() -> None:
    listeners = [
        *await trio_ucx.open_ucx_listeners(0, host="127.0.0.1"),
        *await trio_ucx.open_ucx_listeners(0, host="::1"),
    ]
    for listener in listeners:
        async with listener, trio_ucx.connect(listener.address) as client:
            assert client.worker is listener.worker is listeners[0].worker
            server = await listener.accept()
            await server.send(b"hello")
            assert await client.receive() == b"hello"
            async with trio.open_nursery() as nursery:
                nursery.start_soon(server.aclose)
                nursery.start_soon(client.aclose)


async def test_receives_that_overlap(worker: ucp.Worker, transports: str) -> None:
    """The second transfer is begun while the first is about to complete: beginning one delivers the other."""
    async with open_peer("numbered", 40, 300_000, transports=transports) as peer:
        async with trio_ucx.connect(await listening(peer), worker=worker) as connection:
            for number in range(0, 40, 2):
                await connection.wait_message(tag=1)
                buffers = [bytearray(300_000), bytearray(300_000)]
                with trio.fail_after(15):
                    async with worker.open_request_group() as group:
                        group.receive_into(connection, buffers[0], tag=1)
                        time.sleep(0.005)
                        group.receive_into(connection, buffers[1], tag=1)
                assert buffers == [pattern(300_000, number), pattern(300_000, number + 1)]
