"""Malicious and broken peers: only their own connection suffers, at once or by the deadline, and memory is bounded."""

from __future__ import annotations

import contextlib
import logging
import socket
import struct
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest
import trio
from helpers import PROMPT, Stopwatch, open_pair, open_peer, open_raw_pair, pattern

import trio_ucx
from trio_ucx import _wire as wire
from trio_ucx import ucp
from trio_ucx._handshake import send_hello
from trio_ucx._stream import MAX_PIECE

OPEN = wire.Hello(kind=wire.OPEN, client_id=2**31 + 5, window=2**20, threshold=2**16, software="test")


@asynccontextmanager
async def unharmed(worker: ucp.Worker) -> AsyncIterator[None]:
    """Another connection of the worker, which goes on as if nothing were."""
    async with open_pair(worker) as (client, server):
        yield
        with trio.fail_after(10):
            client.send_nowait(pattern(100_000))
            assert await server.receive() == pattern(100_000)


def damaged(data: bytes, offset: int, format: str, value: object) -> bytes:
    copy = bytearray(data)
    struct.pack_into(format, copy, offset, value)
    return bytes(copy)


#: What a client may say first, and what its turning away is logged as.
BAD_HELLOS = {
    "empty": (b"", "no magic"),
    "noise": (bytes(range(256)) * 10, "no magic"),
    "no magic": (b"x" + OPEN.encode()[1:], "no magic"),
    "wrong version": (damaged(OPEN.encode(), 8, "<H", 7), "version 7"),
    "unknown kind": (damaged(OPEN.encode(), 10, "<B", 9), "malformed"),
    "cut off": (OPEN.encode()[:40], "malformed"),
    "address longer than all": (damaged(OPEN.encode(), 16, "<I", 2**32 - 1), "malformed"),
    "id of nobody": (damaged(OPEN.encode(), 12, "<I", 5), "malformed"),
    "no window": (damaged(OPEN.encode(), 32, "<Q", 0), "malformed"),
    "a welcome": (damaged(OPEN.encode(), 10, "<B", wire.WELCOME), "malformed"),
    "a refusal": (wire.Refusal(2**31 + 5, "no").encode(), "did not ask"),
}


@pytest.mark.parametrize("what", BAD_HELLOS)
async def test_bad_hello(worker: ucp.Worker, caplog: pytest.LogCaptureFixture, what: str) -> None:
    hello, reason = BAD_HELLOS[what]
    caplog.set_level(logging.INFO, "trio_ucx")
    [listener] = await trio_ucx.open_ucx_listeners(0, host="127.0.0.1", worker=worker, connect_timeout=5)
    async with unharmed(worker), listener:
        raw = await worker.open_endpoint(listener.address)
        await send_hello(raw._core, hello, reply=True)
        with trio.fail_after(10):
            while listener.statistics().refused != 1 or raw.alive:
                await trio.sleep(0.005)
        assert reason in caplog.text
        assert listener.statistics().handshaking == listener.statistics().waiting == 0
        raw.abort()


async def test_no_hello_at_all(worker: ucp.Worker, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "trio_ucx")
    [listener] = await trio_ucx.open_ucx_listeners(0, host="127.0.0.1", worker=worker, connect_timeout=0.5)
    async with unharmed(worker), listener:
        raw = [await worker.open_endpoint(listener.address) for _ in range(5)]
        with trio.fail_after(10):
            while any(each.alive for each in raw):
                await trio.sleep(0.005)
        assert caplog.text.count("no hello within 0.5 seconds") == 5
        assert listener.statistics() == trio_ucx.ListenerStatistics(0, 0, 0, 5)
        for each in raw:
            each.abort()


ANSWERS = {
    "wrong version": (lambda hello: damaged(hello, 8, "<H", 7), "version 7"),
    "cut off": (lambda hello: hello[:40], "malformed"),
    "no window": (lambda hello: damaged(hello, 32, "<Q", 0), "malformed"),
    "id of nobody": (lambda hello: damaged(hello, 20, "<I", 5), "malformed"),
    "unknown kind": (lambda hello: damaged(hello, 10, "<B", 9), "malformed"),
}


@pytest.mark.parametrize("what", ANSWERS)
async def test_bad_answer(worker: ucp.Worker, monkeypatch: pytest.MonkeyPatch, what: str) -> None:
    """A listener that answers nonsense: the client is told so at once."""
    spoil, reason = ANSWERS[what]
    encode = wire.Hello.encode
    monkeypatch.setattr(
        wire.Hello, "encode", lambda hello: encode(hello) if hello.kind == wire.OPEN else spoil(encode(hello))
    )
    [listener] = await trio_ucx.open_ucx_listeners(0, host="127.0.0.1", worker=worker)
    async with listener:
        with Stopwatch(5), pytest.raises(ConnectionRefusedError, match=reason):
            await trio_ucx.open_ucx_stream(*listener.address, worker=worker)
        (await listener.accept()).abort()


async def test_listener_that_never_answers(worker: ucp.Worker) -> None:
    async with await worker.open_listener("127.0.0.1", 0) as deaf:
        with Stopwatch(0.5 + PROMPT), pytest.raises(TimeoutError, match="is it a trio_ucx listener"):
            await trio_ucx.open_ucx_stream(*deaf.address, worker=worker, connect_timeout=0.5)


BAD_FRAMES = {
    "noise": (wire.CONTROL, b"nonsense"),
    "empty": (wire.CONTROL, b""),
    "long": (wire.CONTROL, bytes(1000)),
    "very long": (wire.CONTROL, bytes(2**20)),
    "credit for nothing": (wire.CONTROL, wire.encode_frame(wire.Grant(1, 0))),
    "credit beyond counting": (wire.CONTROL, wire.encode_frame(wire.Grant(2**64 - 1, 0))),
    "messages that were not sent": (wire.CONTROL, wire.encode_frame(wire.Admit(1, 99))),
    "reserved lane": (wire.BATCH + 1, b"x"),
    "cut off batch": (wire.BATCH, wire.RUN_HEAD.pack(1, 8, 3) + bytes(20)),
    "no head of a run": (wire.BATCH, wire.RUN_HEAD.pack(1, 8, 1) + bytes(12)),
    "empty run": (wire.BATCH, wire.RUN_HEAD.pack(1, 8, 0)),
    "batch for a reserved lane": (wire.BATCH, wire.RUN_HEAD.pack(wire.BATCH + 1, 8, 1) + bytes(8)),
    "batch in a batch": (wire.BATCH, wire.RUN_HEAD.pack(wire.BATCH, 8, 1) + bytes(8)),
    "batch of noise for the library": (wire.BATCH, wire.RUN_HEAD.pack(wire.CONTROL, 8, 1) + bytes(8)),
    "long batch": (wire.BATCH, bytes(wire.MAX_BATCH + 1)),
    "batch of very many empty messages": (wire.BATCH, wire.RUN_HEAD.pack(1, 0, 2**16 - 1) * 512),
    "last lane": (2**32 - 1, b"x"),
    "huge piece of the stream": (wire.STREAM, bytes(MAX_PIECE + 1)),
}


@pytest.mark.parametrize("what", BAD_FRAMES)
async def test_garbage_after_the_hello(worker: ucp.Worker, what: str) -> None:
    lane, data = BAD_FRAMES[what]
    async with unharmed(worker), open_pair(worker) as (client, server), trio.open_nursery() as nursery:

        async def cheat() -> None:
            with contextlib.suppress(trio.BrokenResourceError, trio.ClosedResourceError):
                await client.endpoint.tag_send(data, (client._link.peer_id << 32) | lane)

        nursery.start_soon(cheat)
        with trio.fail_after(10), pytest.raises(trio.BrokenResourceError, match="cut off"):
            await server.receive()
        with pytest.raises(trio.BrokenResourceError, match="cut off"):
            await server.send_all(b"x")
        client.abort()


async def test_second_hello(worker: ucp.Worker) -> None:
    """One that says hello again, as a client, as a server, as somebody else: nothing happens."""
    async with unharmed(worker), open_pair(worker) as (client, server):
        for hello in (OPEN, wire.Hello(kind=wire.WELCOME, client_id=OPEN.client_id, server_id=2**31 + 1, window=1)):
            await send_hello(client.endpoint._core, hello.encode(), reply=True)
        await client.send(b"and on")
        assert await server.receive() == b"and on"
        assert worker.statistics().endpoints == 4


async def test_messages_to_nobody(worker: ucp.Worker) -> None:
    """Wrong connection ids: thrown away, and their memory with them."""
    async with unharmed(worker), open_raw_pair(worker) as (raw, _):
        for size in (0, 10, 5000, 200_000):
            with trio.move_on_after(1):
                await raw.tag_send(bytes(size), 0xFFFF_FFFF_0000_0001)
        assert worker.tag_probe(2**63, 2**63) is None


@pytest.mark.parametrize("lane", [1, wire.STREAM])
async def test_messages_beyond_the_window(worker: ucp.Worker, lane: int) -> None:
    async with unharmed(worker), open_pair(worker, window=8192) as (client, server):
        with contextlib.suppress(trio.BrokenResourceError):
            for _ in range(50):
                await client.endpoint.tag_send(bytes(1000), (client._link.peer_id << 32) | lane)

        async def receive() -> bytes:
            return await (server.receive(lane) if lane == 1 else server.receive_some(1000))

        for _ in range(6):
            assert await receive() == bytes(1000)
        with trio.fail_after(10), pytest.raises(trio.BrokenResourceError, match="ignores its credit"):
            while True:
                await receive()


async def test_run_beyond_the_window(worker: ucp.Worker) -> None:
    """What the peer had credit for is received, also if it came together with what it had none for."""
    async with unharmed(worker), open_pair(worker, window=8192) as (_, server):
        server._link.run_came(1, 50, 1000, bytes(50_000))
        for _ in range(6):
            assert await server.receive(1) == bytes(1000)
        with pytest.raises(trio.BrokenResourceError, match="ignores its credit"):
            await server.receive(1)


async def test_flood_beyond_the_window_is_bounded(transports: str) -> None:
    """200 MB from a peer that ignores its credits, to a process that reads nothing: it is cut off, and stays small."""
    async with open_peer("victim", transports=transports) as victim:
        address = await victim.hear()
        async with ucp.open_worker(config={"TLS": transports}) as worker:
            client = await trio_ucx.open_ucx_stream(*address, worker=worker)
            with trio.fail_after(20), pytest.raises((trio.BrokenResourceError, trio.ClosedResourceError)):
                for _ in range(25_000):
                    await client.endpoint.tag_send(bytes(8000), (client._link.peer_id << 32) | 1)
            client.abort()
            async with trio_ucx.connect(tuple(address), worker=worker) as other:
                await other.send(b"how are you?", 7)
                grown, broken = await _answer(other)
            assert broken == 1
            assert grown < 2**20 + 16 * 2**20


async def _answer(connection: trio_ucx.Connection) -> tuple[int, int]:
    with trio.fail_after(10):
        return struct.unpack("<qq", await connection.receive(7))


async def test_request_that_comes_after_the_listener_was_closed(transports: str) -> None:
    """UCX by itself would call the freed listener: in another process, because that would end it."""
    async with open_peer("closes_listeners", 20, transports=transports) as peer:
        for _ in range(20):
            address = await peer.hear()
            with socket.create_connection(tuple(address)) as client:
                await trio.sleep(0.05)  # UCX accepts it
                await peer.tell()
                assert await peer.hear() == "closed"
                with contextlib.suppress(OSError):
                    client.sendall(struct.pack("<QB7x", 64, 0) + bytes(64))
                await trio.sleep(0.01)
        assert await peer.ended() == 0


async def test_small_message_by_rendezvous_against_the_hello(worker: ucp.Worker, transports: str) -> None:
    """Small messages are received as they come. One that does not come whole is a breach of what its sender said."""
    async with unharmed(worker), ucp.open_worker(config={"TLS": transports, "RNDV_THRESH": "1"}) as liar:
        liar.context.rendezvous_threshold = 65536
        async with open_pair(liar, worker) as (client, server), trio.open_nursery() as nursery:
            nursery.start_soon(send_whatever_becomes_of_it, client)
            with trio.fail_after(10), pytest.raises(trio.BrokenResourceError, match="did not arrive in one piece"):
                await server.receive(1)
            nursery.cancel_scope.cancel()


async def send_whatever_becomes_of_it(connection: trio_ucx.Connection) -> None:
    with contextlib.suppress(trio.BrokenResourceError):
        await connection.send(bytes(500), 1)


async def test_low_threshold_told_in_the_hello(worker: ucp.Worker, transports: str) -> None:
    async with ucp.open_worker(config={"TLS": transports, "RNDV_THRESH": "100"}) as other:
        async with open_pair(other, worker) as (client, server), trio.open_nursery() as nursery:
            for size in (0, 1, 99, 100, 101, 1024, 1025):
                nursery.start_soon(client.send, pattern(size), 1)
                with trio.fail_after(10):
                    assert await server.receive(1) == pattern(size)
