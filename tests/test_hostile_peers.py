"""Strangers and faulty peers: only their own connection fails, at once or by the deadline, and memory is bounded."""

from __future__ import annotations

import contextlib
import socket
import struct
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial
from typing import Any

import pytest
import trio
from helpers import Certificates, open_listener, open_pair, open_peer, open_raw_pair, pattern
from injected_faults import delay_handshakes, has_unexpected_messages, send_false_threshold, send_to_queue
from timing import PROMPT, Stopwatch

import trio_ucx
from trio_ucx import ucp
from trio_ucx._handshake import handshake as handshake_side
from trio_ucx._handshake.exchange import MAX_FRAME, FrameKind, Taken
from trio_ucx._rules import wire
from trio_ucx.testing import internals


@asynccontextmanager
async def unharmed(worker: ucp.Worker) -> AsyncIterator[None]:
    """Another connection of the worker, which must not be affected."""
    async with open_pair(worker) as (client, server):
        yield
        with trio.fail_after(15):
            client.send_nowait(pattern(100_000))
            assert await server.receive() == pattern(100_000)


# ---- servers that answer nonsense ----

PREAMBLE = wire.MAGIC + struct.pack("<HH", wire.VERSION, 0) + bytes(32)

#: What a server sends, whether it then closes, and what the client's error says.
ANSWERS: dict[str, tuple[bytes, bool, str]] = {
    "nothing": (b"", True, "ended the connection during the exchange|reset"),
    "HTTP": (b"HTTP/1.1 400 Bad Request\r\n\r\n", False, "is it a trio_ucx listener"),
    "noise": (bytes(range(256)) * 10, False, "is it a trio_ucx listener"),
    "cut off magic": (b"trio_", True, "ended the connection during the exchange|reset"),
    "cut off preamble": (PREAMBLE[:40], True, "ended the connection during the exchange|reset"),
    "wrong version": (wire.MAGIC + struct.pack("<HH", 77, 0) + bytes(32), False, "wire version 77"),
    "empty frame": (PREAMBLE + bytes(5), False, "a frame of 0 bytes"),
    "endless frame": (PREAMBLE + b"\xff" * 5, False, "a frame of 4294967295 bytes"),
    "frame out of place": (PREAMBLE + struct.pack("<IB", 1, FrameKind.TAKE), False, "kind 7 is out of place"),
    "empty welcome": (PREAMBLE + struct.pack("<IB", 1, FrameKind.WELCOME), False, "malformed"),
    "refusal": (
        PREAMBLE + struct.pack("<IB", 7, FrameKind.REFUSE) + b"\xff\x1bnope",
        False,
        "refused the connection: .nope",
    ),
}


@pytest.mark.parametrize("what", ANSWERS)
async def test_bad_answer(worker: ucp.Worker, what: str) -> None:
    """The client gets an error at once."""
    data, hangs_up, reason = ANSWERS[what]

    async def serve(stream: trio.SocketStream) -> None:
        with contextlib.suppress(trio.BrokenResourceError):
            if data:
                await stream.send_all(data)
            if not hangs_up:
                async for _ in stream:
                    pass

    async with unharmed(worker), trio.open_nursery() as nursery:
        [listener, *_] = await nursery.start(partial(trio.serve_tcp, serve, 0, host="127.0.0.1"))
        port = listener.socket.getsockname()[1]
        with Stopwatch(5), pytest.raises(OSError, match=reason):
            await trio_ucx.open_ucx_stream("127.0.0.1", port, worker=worker)
        nursery.cancel_scope.cancel()


async def test_listener_that_never_answers(worker: ucp.Worker) -> None:
    with socket.create_server(("127.0.0.1", 0)) as deaf:
        with Stopwatch(1 + PROMPT), pytest.raises(TimeoutError, match="is it a trio_ucx listener"):
            await trio_ucx.open_ucx_stream(*deaf.getsockname(), worker=worker, connect_timeout=1)


# ---- messages ----

BAD_FRAMES = {
    "noise": (wire.CONTROL, b"nonsense"),
    "empty": (wire.CONTROL, b""),
    "long": (wire.CONTROL, bytes(1000)),
    "very long": (wire.CONTROL, bytes(2**20)),
    "batch of greetings": (
        wire.BATCH,
        wire.PACKED_HEAD.pack(wire.CONTROL, 1, 3) + wire.encode_frame(wire.Hello()) * 3,
    ),
    "batch of control frames": (wire.BATCH, wire.PACKED_HEAD.pack(wire.CONTROL, 1, 2) + b"\x02\x02"),
    "end of a reserved kind": (wire.CONTROL, b"\x06"),
    "permission for a reserved queue": (wire.CONTROL, wire.encode_frame(wire.Admit(wire.BATCH, 0))),
    "reserved queue": (wire.LONG + 1, b"x"),
    "cut off batch": (wire.BATCH, wire.PACKED_HEAD.pack(1, 8, 3) + bytes(20)),
    "no head of packed messages": (wire.BATCH, wire.PACKED_HEAD.pack(1, 8, 1) + bytes(12)),
    "no packed messages": (wire.BATCH, wire.PACKED_HEAD.pack(1, 8, 0)),
    "batch for a reserved queue": (wire.BATCH, wire.PACKED_HEAD.pack(wire.LONG + 1, 8, 1) + bytes(8)),
    "batch in a batch": (wire.BATCH, wire.PACKED_HEAD.pack(wire.BATCH, 8, 1) + bytes(8)),
    "batch of noise for the library": (wire.BATCH, wire.PACKED_HEAD.pack(wire.CONTROL, 8, 1) + bytes(8)),
    "long batch": (wire.BATCH, bytes(wire.MAX_BATCH + 1)),
    "last reserved queue": (wire.PIECES - 1, b"x"),
    "announcement of another length": (wire.LONG, bytes(17)),
    "announcement for a reserved queue": (wire.LONG, struct.pack("<IIQ", wire.CONTROL, wire.PIECES, 2**21)),
    "announcement of a short message": (wire.LONG, struct.pack("<IIQ", 0, wire.PIECES, 5)),
    "announcement of too long a message": (wire.LONG, struct.pack("<IIQ", wire.STREAM, wire.PIECES, 2**63)),
}


@pytest.mark.sample(16)
@pytest.mark.parametrize("what", BAD_FRAMES)
async def test_garbage_among_messages(worker: ucp.Worker, what: str) -> None:
    queue, data = BAD_FRAMES[what]
    async with unharmed(worker), open_pair(worker) as (client, server), trio.open_nursery() as nursery:

        async def cheat() -> None:
            with contextlib.suppress(trio.BrokenResourceError, trio.ClosedResourceError):
                await send_to_queue(client, queue, data)

        nursery.start_soon(cheat)
        with Stopwatch(1), trio.fail_after(15), pytest.raises(trio.BrokenResourceError, match="cut off"):
            await server.receive()
        with pytest.raises(trio.BrokenResourceError, match="cut off"):
            await server.send_all(b"x")
        client.abort()


#: Pieces of a message of 2 MiB of which each is good for itself, and not all together.
BAD_PIECES = {
    "short": [1000],
    "too long": [2**21 + 1],
    "too many before the first is received": [70_000] * 3,
    "longer than the rest": [2**20, 2**20 + 1],
}


@pytest.mark.parametrize("what", BAD_PIECES)
async def test_pieces_that_do_not_fit(worker: ucp.Worker, what: str) -> None:
    async with unharmed(worker), open_pair(worker) as (client, server), trio.open_nursery() as nursery:

        async def cheat(queue: int, data: bytes) -> None:
            with contextlib.suppress(trio.BrokenResourceError, trio.ClosedResourceError):
                await send_to_queue(client, queue, data)

        nursery.start_soon(cheat, wire.LONG, struct.pack("<IIQ", 1, wire.PIECES, 2**21))
        await server.wait_message(tag=1)
        for size in BAD_PIECES[what]:
            nursery.start_soon(cheat, wire.PIECES, bytes(size))
            await trio.testing.wait_all_tasks_blocked(0.01)
        with trio.fail_after(15), pytest.raises((trio.BrokenResourceError, trio_ucx.UCXError)):
            await server.receive_into(bytearray(2**21), tag=1)
        with trio.fail_after(15), pytest.raises(trio.BrokenResourceError, match="cut off"):
            await server.receive(tag=2)
        client.abort()


@pytest.mark.parametrize(
    ("what", "queue", "data"),
    [
        ("frame", wire.CONTROL, b"nonsense"),
        ("frame before TAKE is read", wire.CONTROL, b"nonsense"),
        ("short message before TAKE is read", 1, b"x"),
        ("long message before TAKE is read", 1, bytes(200_000)),
    ],
)
async def test_client_that_sends_something_instead_of_hello(
    worker: ucp.Worker, what: str, queue: int, data: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    hello = handshake_side.post_bytes_send

    def send_instead(share: Any, frame: bytes, tag: int) -> None:
        client = share.engine is not internals(worker)
        hello(share, data, tag & ~0xFFFFFFFF | queue) if client else hello(share, frame, tag)

    monkeypatch.setattr(handshake_side, "post_bytes_send", send_instead)
    if "before TAKE" in what:
        delay_handshakes(monkeypatch, Taken, partial(trio.sleep, 0.3))
    async with ucp.open_worker() as liar:
        async with open_listener(worker) as listener:
            # The server's HELLO opens the connection for the liar.
            with trio.fail_after(15), pytest.raises((OSError, trio.BrokenResourceError), match="refused|aborted"):
                async with trio_ucx.connect(listener.address, worker=liar) as client:
                    await client.receive()
            assert listener.statistics().waiting == listener.statistics().accepted == 0
        monkeypatch.undo()
        async with unharmed(worker):
            pass
    assert not internals(worker).tag_dispatch.sinks


async def test_messages_for_an_ended_connection(worker: ucp.Worker) -> None:
    """Messages that are late for an ended connection are dropped, and their memory is freed."""
    async with unharmed(worker), open_raw_pair(worker) as (raw, _):
        for size in (0, 10, 5000, 200_000):
            with trio.move_on_after(1):
                await raw.tag_send(bytes(size), 0xFFFF_FFFF_0000_0001)
        assert not has_unexpected_messages(worker)


async def test_client_half_way_when_the_listener_closes(transports: str) -> None:
    """In another process, because a fault might end it."""
    async with open_peer("closes_listeners", 20, transports=transports) as peer:
        for number in range(20):
            address = await peer.hear()
            with socket.create_connection(tuple(address)) as client:
                client.sendall(PREAMBLE[: number * 3])
                await trio.sleep(0.02)
                await peer.tell()
                assert await peer.hear() == "closed"
                with contextlib.suppress(OSError):
                    client.sendall(PREAMBLE[number * 3 :])
                await trio.sleep(0.01)
        assert await peer.ended() == 0


async def test_small_message_by_rendezvous_against_its_facts(worker: ucp.Worker, transports: str) -> None:
    """It is received all the same."""
    async with unharmed(worker), ucp.open_worker(config={"TLS": transports, "RNDV_THRESH": "100"}) as liar:
        liar.context.rendezvous_threshold = 65536
        async with open_pair(liar, worker) as (client, server), trio.open_nursery() as nursery:
            nursery.start_soon(partial(client.send, pattern(500), tag=1))
            with trio.fail_after(15):
                assert await server.receive(tag=1) == pattern(500)


@pytest.mark.parametrize("size", [wire.MAX_FRAME, 70])
async def test_control_frame_by_rendezvous(
    worker: ucp.Worker, transports: str, size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its sender still has it: nothing of Python's is left for UCX to write it to."""
    monkeypatch.setattr(ucp.Context, "_least_rendezvous_threshold", None)
    # HELLO is shorter than this; the peer description says more.
    async with unharmed(worker), ucp.open_worker(config={"TLS": transports, "RNDV_THRESH": "20"}) as liar:
        liar.context.rendezvous_threshold = wire.MIN_THRESHOLD
        async with open_pair(liar, worker) as (client, server), trio.open_nursery() as nursery:

            async def send_frame() -> None:
                with contextlib.suppress(trio.BrokenResourceError):
                    await send_to_queue(client, wire.CONTROL, bytes(size))

            nursery.start_soon(send_frame)
            with trio.fail_after(15), pytest.raises(trio.BrokenResourceError, match="did not arrive in one piece"):
                await server.receive(tag=1)
            writing = [each for each in internals(worker).in_flight.values() if each.doing.startswith("receiving")]
            assert all(each.pins is not None for each in writing)
            nursery.cancel_scope.cancel()


def test_no_control_frame_may_be_sent_by_rendezvous() -> None:
    """All are shorter than the least threshold, so that all are received in C as they come."""
    longest = max(struct.calcsize(frame.format) for frame in wire._FRAMES.values())
    assert longest <= wire.MAX_FRAME < wire.MIN_THRESHOLD


async def test_low_threshold_told_in_the_exchange(worker: ucp.Worker, transports: str) -> None:
    async with ucp.open_worker(config={"TLS": transports, "RNDV_THRESH": "100"}) as other:
        async with open_pair(other, worker) as (client, server), trio.open_nursery() as nursery:
            for size in (0, 1, 99, 100, 101, 1024, 1025):
                nursery.start_soon(partial(client.send, pattern(size), tag=1))
                with trio.fail_after(15):
                    assert await server.receive(tag=1) == pattern(size)


@pytest.mark.parametrize("threshold", [1, wire.MIN_THRESHOLD - 1])
async def test_threshold_too_low(worker: ucp.Worker, threshold: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is refused by both sides, by name."""
    async with unharmed(worker), ucp.open_worker(config={"TLS": "tcp"}) as liar:
        send_false_threshold(liar, threshold, monkeypatch)
        for ours, theirs in ((worker, liar), (liar, worker)):
            async with open_listener(theirs) as listener:
                with pytest.raises(trio_ucx.NotAdmitted, match=f"UCX_RNDV_THRESH\\) of {threshold} bytes"):
                    await trio_ucx.open_ucx_stream(*listener.address, worker=ours)


@pytest.mark.parametrize("threshold", ["0", "1", "17", "63", "intra:10,inter:64k"])
async def test_our_own_threshold_too_low(threshold: str) -> None:
    """Raw operations work with it."""
    async with ucp.open_worker(config={"TLS": "tcp", "RNDV_THRESH": threshold}) as worker:
        with pytest.raises(ValueError, match="RNDV_THRESH"):
            await trio_ucx.open_ucx_listeners(0, host="127.0.0.1", worker=worker)
        with pytest.raises(ValueError, match="RNDV_THRESH"):
            await trio_ucx.open_ucx_stream("127.0.0.1", 1, worker=worker)


async def test_least_threshold(transports: str) -> None:
    async with ucp.open_worker(config={"TLS": transports, "RNDV_THRESH": str(wire.MIN_THRESHOLD)}) as worker:
        async with open_pair(worker, window=16384) as (client, server):
            for size in (0, 1, 63, 64, 65, 1024, 1025, 10_000, 100_000):
                with trio.fail_after(15):
                    async with trio.open_nursery() as nursery:
                        nursery.start_soon(partial(client.send, pattern(size), tag=1))
                        nursery.start_soon(client.send_all, pattern(size))
                        assert await server.receive(tag=1) == pattern(size)
                        got = b""
                        while len(got) < size:
                            got += await server.receive_some()
                        assert got == pattern(size)


# ---- the control socket, after the exchange ----

#: What a client says of frames that may come late, and here are malformed.
LATE = {FrameKind.REFUSE: "|refused the connection", FrameKind.AGAIN: "|longer than its kind allows"}
#: Bytes there, and what they do to the connection.
BYTES: dict[str, tuple[bytes, str]] = {
    "noise": (bytes(range(1, 256)) * 8, f"bytes; {MAX_FRAME} are allowed"),
    "zeros": (bytes(2**20), "a frame of 0 bytes"),
    "endless frame": (struct.pack("<IB", 2**32 - 1, FrameKind.ABORT), "4294967295 bytes"),
    "unknown kind": (struct.pack("<IB", 1, 99), "kind 99 is out of place"),
    "another exchange": (PREAMBLE, f"bytes; {MAX_FRAME} are allowed"),
    "abort": (struct.pack("<IBQ", 9, FrameKind.ABORT, 0), "aborted the connection"),
    "abort without its field": (struct.pack("<IB", 1, FrameKind.ABORT), "shorter or longer"),
    "abort after too many": (struct.pack("<IBQ", 9, FrameKind.ABORT, 2**64 - 1), "out of range"),
    "AGAIN": (
        struct.pack("<IB", 1, FrameKind.AGAIN),
        "kind 5 is out of place|refused the connection: its worker has lost",
    ),
    "abort and more": (struct.pack("<IBQ", 9, FrameKind.ABORT, 0) + bytes(100_000), "aborted the connection"),
    **{
        f"late {kind.name}": (
            struct.pack("<IB", 5, kind) + bytes(4),
            f"kind {kind} is out of place" + LATE.get(kind, ""),
        )
        for kind in FrameKind
        if kind is not FrameKind.ABORT
    },
}


def control_socket(connection: trio_ucx.Connection) -> socket.socket:
    control = internals(connection).closing.control_socket
    assert control is not None and control._socket is not None
    return control._socket


@pytest.mark.sample(12)
@pytest.mark.parametrize("who", ["client", "server"])
@pytest.mark.parametrize("what", BYTES)
async def test_bytes_on_the_control_socket(worker: ucp.Worker, what: str, who: str) -> None:
    data, reason = BYTES[what]
    async with unharmed(worker), open_pair(worker) as pair:
        liar, other = pair if who == "client" else reversed(pair)
        with contextlib.suppress(OSError):
            control_socket(liar).send(data)
        with trio.fail_after(15), pytest.raises(trio.BrokenResourceError, match=reason):
            await other.receive()


@pytest.mark.parametrize("who", ["client", "server"])
async def test_bytes_under_tls(worker: ucp.Worker, certificates: Certificates, who: str) -> None:
    [listener] = await trio_ucx.open_ucx_listeners(0, host="localhost", worker=worker, ssl_context=certificates.server)
    async with unharmed(worker), listener:
        for data in (b"noise" * 10, bytes(100), b"\x17\x03\x03\x00\x40" + bytes(64), b"\x15\x03\x03\x00\x02\x01\x00"):
            client = await trio_ucx.open_ucx_stream(
                "localhost", listener.address[1], worker=worker, ssl_context=certificates.client
            )
            server = await listener.accept()
            liar, other = (client, server) if who == "client" else (server, client)
            await liar.send(b"last words")
            control_socket(liar).send(data)
            with trio.fail_after(15):
                assert await other.receive() == b"last words"
                with pytest.raises(trio.BrokenResourceError, match="control connection ended"):
                    await other.receive()
            client.abort()
            server.abort()


@pytest.mark.parametrize("who", ["client", "server"])
async def test_half_a_frame_on_the_control_socket(worker: ucp.Worker, who: str) -> None:
    """No harm is done until it is complete, or the socket ends."""
    async with open_pair(worker) as pair:
        liar, other = pair if who == "client" else reversed(pair)
        for part in (b"\x01", b"\x00\x00"):
            control_socket(liar).send(part)
            liar.send_nowait(pattern(100_000))
            with trio.fail_after(15):
                assert await other.receive() == pattern(100_000)
        control_socket(liar).shutdown(socket.SHUT_WR)
        with trio.fail_after(15), pytest.raises(trio.BrokenResourceError, match="control connection ended"):
            await other.receive()


async def test_long_frame_on_the_control_socket_is_not_kept(worker: ucp.Worker) -> None:
    """A connection that is open accepts one kind of frame there, which may be as long as any."""
    async with unharmed(worker), open_pair(worker) as (client, server):
        liar: Any = control_socket(client)
        liar.send(struct.pack("<IB", MAX_FRAME, FrameKind.ABORT))
        sent = 0
        with trio.fail_after(15):
            while not internals(server).life.closed and sent < 2 * MAX_FRAME and internals(server).share.error is None:
                with contextlib.suppress(BlockingIOError, ConnectionError):
                    sent += liar.send(bytes(4096))
                control = internals(server).closing.control_socket
                if control is not None:
                    assert len(control.exchange._buffer) <= MAX_FRAME + 4096 + 4
                await trio.sleep(0)
            with pytest.raises(trio.BrokenResourceError, match="shorter or longer"):
                await server.receive()
