"""Messages that go in pieces: what arrives, in which order, and what happens when either side gives one up."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Awaitable, Callable
from functools import partial
from typing import Any

import numpy as np
import pytest
import trio
from helpers import (
    TRANSPORTS,
    assert_free,
    assert_pinned,
    nothing_happens,
    open_pair,
    open_peer,
    pattern,
    until,
    until_over,
)
from timing import PROMPT, Stopwatch

import trio_ucx
from trio_ucx import ucp
from trio_ucx._native import lib
from trio_ucx._rules import wire
from trio_ucx.ucp._engine.endpoint_core import WRITING_TIME

LONG = lib.TU_LONG
BIG = 2**26
#: Below, at and above the length from which on messages go in pieces, and lengths that pieces of one size do not make.
SIZES = [LONG - 1, LONG, LONG + 1, 2 * LONG + 17, 5 * 507904, 5 * 507904 + lib.TU_LONGEST_THRESHOLD, 2**24 + 3]


async def quiet(function: Callable[..., Awaitable[object]], *arguments: object) -> None:
    with contextlib.suppress(trio.BrokenResourceError, trio.ClosedResourceError, trio.EndOfChannel):
        await function(*arguments)


def test_c_knows_the_same_numbers() -> None:
    assert lib.TU_LONG_QUEUE == wire.LONG
    assert lib.TU_PIECE_QUEUES == wire.PIECES


async def test_order(worker: ucp.Worker) -> None:
    """Long messages and others of one tag arrive in their order, both ways at once; other tags do not wait for them."""
    sizes = [0, *SIZES, 10, LONG + 5, 70_000, LONG + 6, 2000]

    async def send_all(connection: trio_ucx.Connection) -> None:
        for number, size in enumerate(sizes):
            await connection.send(pattern(size, number), tag=7)

    async def receive_all(connection: trio_ucx.Connection, into: bool) -> None:
        for number, size in enumerate(sizes):
            assert await connection.wait_message(tag=7) == size
            if into:
                buffer = bytearray(size + 3)
                assert await connection.receive_into(buffer, tag=7) == size
                assert buffer[:size] == pattern(size, number)
            else:
                assert await connection.receive(tag=7) == pattern(size, number)

    async with open_pair(worker) as (client, server):
        with trio.fail_after(30):
            async with trio.open_nursery() as nursery:
                nursery.start_soon(send_all, client)
                nursery.start_soon(send_all, server)
                await client.send(b"not behind them", tag=8)
                assert await server.receive(tag=8) == b"not behind them"
                nursery.start_soon(receive_all, client, True)
                nursery.start_soon(receive_all, server, False)


async def test_many_at_once(worker: ucp.Worker) -> None:
    async with open_pair(worker) as (client, server):

        async def receive(tag: int) -> None:
            for number in range(3):
                assert await server.receive(tag=tag) == pattern(2 * LONG + tag, number)

        async def send(tag: int) -> None:
            for number in range(3):
                await client.send(pattern(2 * LONG + tag, number), tag=tag)

        with trio.fail_after(30):
            async with trio.open_nursery() as nursery:
                for tag in range(20):
                    nursery.start_soon(send, tag)
                await trio.testing.wait_all_tasks_blocked()
                for tag in reversed(range(20)):
                    nursery.start_soon(receive, tag)


def contiguous(size: int) -> tuple[Any, Callable[[], bytes], Callable[[bytes], None]]:
    buffer = bytearray(size)

    def fill(data: bytes) -> None:
        buffer[:] = data

    return buffer, lambda: bytes(buffer), fill


def listed(size: int) -> tuple[Any, Callable[[], bytes], Callable[[bytes], None]]:
    """Parts of very different lengths, which begin and end anywhere in the pieces."""
    cuts = [0, 3, 3, 100_000, 100_001, size // 2, size // 2 + 7, size]
    parts = [bytearray(end - start) for start, end in itertools.pairwise(cuts)]

    def fill(data: bytes) -> None:
        for part, start in zip(parts, cuts[:-1], strict=True):
            part[:] = data[start : start + len(part)]

    return parts, lambda: b"".join(parts), fill


def strided(size: int) -> tuple[Any, Callable[[], bytes], Callable[[bytes], None]]:
    array = np.zeros((size // 4, 2), "u4")[:, 1]

    def fill(data: bytes) -> None:
        array[:] = np.frombuffer(data, "u4")

    return ucp.Strided(array), array.tobytes, fill


@pytest.mark.parametrize("receives", [contiguous, listed, strided])
@pytest.mark.parametrize("sends", [contiguous, listed, strided])
async def test_kinds_of_buffers(worker: ucp.Worker, sends: Any, receives: Any) -> None:
    size = 3 * LONG + 4 * 12_345
    data = pattern(size, 1)
    source, _, fill = sends(size)
    target, got, _ = receives(size)
    fill(data)
    async with open_pair(worker) as (client, server):
        with trio.fail_after(20):
            async with trio.open_nursery() as nursery:
                nursery.start_soon(client.send, source)
                assert await server.receive_into(target) == size
    assert got() == data


async def test_others_get_through(worker: ucp.Worker) -> None:
    """Small messages come and go while a long one is on its way."""
    async with open_pair(worker) as (client, server):
        arrived = trio.Event()

        async def receive() -> None:
            await server.receive_into(bytearray(4 * BIG), tag=1)
            arrived.set()

        async def answer() -> None:
            async for message in server.messages(2):
                await server.send(message, tag=2)

        async with trio.open_nursery() as nursery:
            nursery.start_soon(answer)
            nursery.start_soon(receive)
            nursery.start_soon(partial(client.send, bytes(4 * BIG), tag=1))
            answers = 0
            with trio.fail_after(200):
                while not arrived.is_set():
                    await client.send(b"ping", tag=2)
                    await client.receive(tag=2)
                    answers += 1
            nursery.cancel_scope.cancel()
    assert answers > 20


async def test_too_long_for_its_receive(worker: ucp.Worker) -> None:
    """It is dropped, and its sender's buffer is released; the next message arrives."""
    buffer = bytearray(BIG)
    async with open_pair(worker, max_message_size=2**20) as (client, server):
        async with trio.open_nursery() as nursery:
            nursery.start_soon(client.send, buffer)
            with pytest.raises(trio_ucx.MessageTooLong):
                await server.receive_into(bytearray(LONG))
            nursery.start_soon(client.send, buffer)
            with pytest.raises(trio_ucx.MessageTooLong):
                await server.receive()
        assert_free(buffer)
        await client.send(b"next")
        assert await server.receive() == b"next"


# ---- given up ----


@pytest.mark.parametrize("begun", [False, True], ids=["not received", "being received"])
async def test_cancelled_send_arrives_whole_or_not_at_all(worker: ucp.Worker, begun: bool) -> None:
    buffer = bytearray(pattern(BIG, 5))
    async with open_pair(worker) as (client, server):
        got: list[bytes] = []

        async def receive() -> None:
            got.append(await server.receive())

        async with trio.open_nursery() as nursery:
            if begun:
                nursery.start_soon(receive)
            with trio.move_on_after(0.005) as scope:
                await client.send(buffer)
            if scope.cancelled_caught and not begun:
                assert_pinned(buffer)
                nursery.start_soon(receive)
        assert got == [pattern(BIG, 5)]
        with trio.fail_after(5):
            await client.wait_buffers_released()
        assert_free(buffer)


@pytest.mark.parametrize("who", ["sender", "receiver"])
@pytest.mark.parametrize("begun", [False, True], ids=["not received", "being received"])
async def test_abort_releases_buffers_while_others_use_the_endpoint(
    worker: ucp.Worker, transports: str, who: str, begun: bool
) -> None:
    """Neither side waits for the rest of the message, and the other Connection of the endpoint goes on."""
    outgoing, incoming = bytearray(BIG), bytearray(BIG)
    async with ucp.open_worker(config={"TLS": transports}) as other, open_pair(worker, other) as (steady, other_steady):
        for _ in range(5):
            async with open_pair(worker, other) as (client, server), trio.open_nursery() as nursery:
                assert client.endpoint != steady.endpoint
                nursery.start_soon(quiet, client.send, outgoing)
                await server.wait_message()
                if begun:
                    nursery.start_soon(quiet, server.receive_into, incoming)
                    await trio.sleep(0.002)
                (client if who == "sender" else server).abort()
                await until_over(client)
                await until_over(server)
                with Stopwatch(PROMPT):
                    await client.wait_buffers_released()
                    await server.wait_buffers_released()
                assert_free(outgoing, incoming)
            async with trio.open_nursery() as nursery:
                nursery.start_soon(steady.send, bytes(2 * LONG))
                assert len(await other_steady.receive()) == 2 * LONG


async def test_close_does_not_wait_for_a_cancelled_one(worker: ucp.Worker) -> None:
    buffer = bytearray(BIG)
    async with open_pair(worker) as (client, server):
        with trio.move_on_after(0.005):
            await client.send(buffer, tag=1)
        await client.send(b"after", tag=2)
        with Stopwatch(5):
            await client.aclose()
            await client.wait_buffers_released()
        assert_free(buffer)
        assert await server.receive(tag=2) == b"after"


@pytest.mark.cut_off
@pytest.mark.parametrize("transports", TRANSPORTS, indirect=True)
async def test_killed_peer(worker: ucp.Worker, transports: str) -> None:
    size = 2**24
    outgoing, incoming = bytearray(size), bytearray(size)
    async with open_peer("busy_both_ways", size, transports=transports) as peer:
        address, _ = await peer.hear()
        connection = await trio_ucx.open_ucx_stream(*address, worker=worker)

        async def send() -> None:
            while True:
                await connection.send(outgoing)

        async def receive() -> None:
            while True:
                await connection.receive_into(incoming)

        async with trio.open_nursery() as nursery:
            nursery.start_soon(quiet, send)
            nursery.start_soon(quiet, receive)
            await until(lambda: connection.statistics().messages_received > 2)
            peer.process.kill()
            with trio.fail_after(10):
                await until_over(connection)
        connection.abort()
        if transports == "tcp":
            with Stopwatch(PROMPT), trio.fail_after(10):
                await connection.wait_buffers_released()
            assert_free(outgoing, incoming)
        else:  # a receive may keep its buffer until the worker closes: reliability.md
            await nothing_happens()
            assert_free(outgoing)


@pytest.mark.parametrize("transports", TRANSPORTS, indirect=True)
async def test_suspended_peer(worker: ucp.Worker, transports: str) -> None:
    """It does not answer to the first pieces, and its shared-memory queue is full. UCX completes them only when it has
    read that; the buffer is released all the same.
    """
    buffer = bytearray(BIG)
    async with open_peer("silent", 2**27, transports=transports) as peer:
        [address, _] = await peer.hear()
        connection = await trio_ucx.open_ucx_stream(*address, worker=worker)
        await peer.stop()
        async with trio.open_nursery() as nursery:
            nursery.start_soon(quiet, partial(connection.send, buffer, tag=1))
            await trio.testing.wait_all_tasks_blocked()
            for _ in range(600):
                connection.send_nowait(bytes(4000), tag=2)
            await nothing_happens()
            connection.abort()
        with Stopwatch(WRITING_TIME + PROMPT), trio.fail_after(10):
            await connection.wait_buffers_released()
        assert_free(buffer)
        peer.resume()
