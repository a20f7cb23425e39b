"""Each tag is an ordered queue, which ends at the first missing message; and the cost of many tags."""

from __future__ import annotations

import traceback
from collections.abc import Awaitable, Callable
from functools import partial
from typing import Any

import pytest
import trio
from helpers import Rounds, open_pair, resident, until

import trio_ucx
from trio_ucx import ucp
from trio_ucx._link.message_port import MessagePort
from trio_ucx._link.receiving import Transfer
from trio_ucx._native import ffi
from trio_ucx.ucp import Status

#: Idle tag queues that are kept (``TU_IDLE_QUEUES``).
IDLE_QUEUES = 64

Receive = Callable[[trio_ucx.Connection], Awaitable[Any]]


async def receive_into(connection: trio_ucx.Connection) -> bytes:
    buffer = bytearray(2**20)
    return bytes(buffer[: await connection.receive_into(buffer, tag=1)])


async def receive_in_group(connection: trio_ucx.Connection) -> bytes:
    buffer = bytearray(2**20)
    try:
        async with connection.worker.open_request_group() as group:
            length = await group.receive_into(connection, buffer, tag=1)
    except ExceptionGroup as errors:
        raise errors.exceptions[0] from None
    return bytes(buffer[:length])


async def receive_nowait(connection: trio_ucx.Connection) -> bytes:
    while True:
        try:
            return connection.receive_nowait(tag=1)
        except trio.WouldBlock:
            await trio.sleep(0)


async def wait_and_receive(connection: trio_ucx.Connection) -> bytes:
    await connection.wait_message(tag=1)
    return await connection.receive(tag=1)


RECEIVES: dict[str, Receive] = {
    "receive": lambda connection: connection.receive(tag=1),
    "receive_into": receive_into,
    "group": receive_in_group,
    "receive_nowait": receive_nowait,
    "wait_message": wait_and_receive,
    "messages": lambda connection: anext(connection.messages(1)),
}


@pytest.mark.parametrize("how", RECEIVES)
@pytest.mark.parametrize("missing", [1, 2])
async def test_a_tag_queue_ends_at_a_hole(worker: ucp.Worker, how: str, missing: int) -> None:
    """A large message stays with its sender, who aborts: small ones that were sent after it are not delivered."""
    async with open_pair(worker) as (client, server):
        client.send_nowait(b"first", tag=1)
        for _ in range(missing):
            client.send_nowait(bytes(100_000), tag=1)
        client.send_nowait(b"behind the hole", tag=1)
        client.send_nowait(b"x" * 5000, tag=1)
        client.send_nowait(b"another tag", tag=2)
        await until(lambda: server.statistics().messages_received == 4 + missing)
        client.abort()
        with pytest.raises(trio_ucx.PeerLost):
            await server.wait_closed()
        with trio.fail_after(15):
            assert await RECEIVES[how](server) == b"first"
            lengths = set()
            for _ in range(3):
                with pytest.raises(trio.BrokenResourceError) as broken:
                    await RECEIVES[how](server)
                lengths.add(len(traceback.extract_tb(broken.tb)))
            assert len(lengths) == 1, "the error keeps the frames of all those that got it"
            assert await server.receive(tag=2) == b"another tag"
        server.abort()


async def test_a_cancelled_large_message_is_no_hole(worker: ucp.Worker) -> None:
    """A send that was cancelled may not be delivered; the connection closes in order, and the next message is."""
    async with open_pair(worker) as (client, server):
        with trio.move_on_after(0):
            await client.send(b"x", tag=1)  # cancelled before anything is sent
        with trio.CancelScope() as scope:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(partial(client.send, bytes(100_000), tag=1))
                await until(lambda: server.statistics().messages_received == 1)
                scope.cancel()
        await client.send(b"next", tag=1)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(client.aclose)
            received = [message async for message in server.messages(1)]
        assert received in ([b"next"], [bytes(100_000), b"next"])


@pytest.mark.parametrize("how", RECEIVES)
async def test_nothing_is_received_after_broken(worker: ucp.Worker, how: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Messages that arrive after a receive has reported that the connection broke are dropped, on every tag."""
    async with open_pair(worker) as (client, server):
        client.abort()
        with trio.fail_after(60), pytest.raises(trio.BrokenResourceError):
            await RECEIVES[how](server)
        receiving = server._link.receiving
        discarded: list[int] = []
        monkeypatch.setattr(MessagePort, "discard", lambda self, handle: discarded.append(handle))
        monkeypatch.setattr(MessagePort, "receive", lambda self, handle, pins: pytest.fail("received"))
        for tag in (1, 2):
            receiving.packed_arrived(
                tag, 1, 4, ffi.from_buffer("char[]", b"late")
            )  # UCX delivers what it read from the socket only now
            receiving.message_arrived(tag, tag, 5000)
            with pytest.raises(trio.BrokenResourceError):
                await server.receive(tag=tag)
        assert discarded == [1, 2]
        server.abort()


async def test_a_failed_transfer_breaks_the_connection(worker: ucp.Worker, monkeypatch: pytest.MonkeyPatch) -> None:
    """UCX gives up one message, and says nothing about the endpoint."""
    async with open_pair(worker) as (client, server), trio.open_nursery() as nursery:
        complete = Transfer.complete
        monkeypatch.setattr(
            Transfer, "complete", lambda self, status, length, tag: complete(self, Status.CONNECTION_RESET, length, tag)
        )
        with trio.fail_after(60):
            nursery.start_soon(partial(client.send, bytes(100_000), tag=1))
            with pytest.raises(trio.BrokenResourceError, match="receiving a message"):
                await server.receive(tag=1)
            assert server.peer_state is trio_ucx.PeerState.LOST and not server.closed
            with pytest.raises(trio.BrokenResourceError, match="broke: receiving a message"):
                await server.receive(tag=2)
            with pytest.raises(trio_ucx.PeerLost):
                await client.wait_closed()


# ---- many tags ----


async def send_and_receive(client: trio_ucx.Connection, server: trio_ucx.Connection, tag: int) -> None:
    """One message on a tag, received by one of several functions."""
    way, size = tag % 7, 100_000 if tag % 70 < 2 else 5000 if tag % 4 == 0 else 4
    data = tag.to_bytes(4, "big") * (size // 4)
    if way in (0, 1):  # somebody waits
        async with trio.open_nursery() as nursery:
            nursery.start_soon(partial(client.send, data, tag=tag))
            if way == 0:
                assert await server.receive(tag=tag) == data
            else:
                assert await server.receive_into(bytearray(size), tag=tag) == size
        return
    if way in (2, 6):
        with trio.move_on_after(0.0001):
            await server.receive(tag=tag)
    if way == 6:  # nothing ever comes
        return
    await client.send(data, tag=tag)
    if way == 3:
        assert await server.wait_message(tag=tag) == size
    if way == 4:
        while True:
            try:
                assert server.receive_nowait(tag=tag) == data
                return
            except trio.WouldBlock:
                await trio.sleep(0)
    assert await server.receive(tag=tag) == data


async def test_idle_tags_are_forgotten(worker: ucp.Worker, rounds: Rounds) -> None:
    async with open_pair(worker) as (client, server):
        count, before = rounds(3000, 10_000_000), 0
        for tag in range(count):
            await send_and_receive(client, server, tag)
            if tag == 2000:
                before = resident()
        assert resident() - before < 4 * 2**20
        assert server._link.native.counts.queues <= IDLE_QUEUES + 1
        # The client learns only now and then what the server has.
        assert client._link.native.counts.queues <= 2048 and not client._link.sending.waiting
