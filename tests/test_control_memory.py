"""The memory that a peer can occupy through a control socket: little, whatever it sends, and none after the close."""

from __future__ import annotations

import contextlib
import ctypes
import gc
import socket
import ssl
import struct
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import trio
import trustme
from helpers import SANITIZED, Certificates, open_listener, resident, until

import trio_ucx
from trio_ucx import ucp
from trio_ucx._handshake.control_stream import CHUNK, MAX_TLS_BYTES, MAX_TLS_HANDSHAKE_BYTES, TLS
from trio_ucx._handshake.exchange import MAX_FRAME, Exchange, FrameKind
from trio_ucx._rules.wire import MAGIC, VERSION
from trio_ucx.testing import internals

#: Bytes that one side may keep without processing them: a message of the TLS handshake, or a frame.
MOST_KEPT = 2**17
#: Bytes after which a flood must have been ended, those in the kernel's buffers included.
MOST_SENT = 16 * 2**20


def record(kind: int, body: bytes, length: int | None = None) -> bytes:
    return struct.pack(">BHH", kind, 0x301, len(body) if length is None else length) + body


#: The beginning of a handshake message of the greatest length that OpenSSL accepts.
BEGIN = record(22, b"\x01" + (130_000).to_bytes(3, "big"))


class Talker:
    """One side of a TLS connection that can send what the ssl module does not."""

    def __init__(self, context: ssl.SSLContext, is_client: bool) -> None:
        self.incoming, self.outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
        self.object = context.wrap_bio(
            self.incoming, self.outgoing, not is_client, server_hostname="localhost" if is_client else None
        )

    def key_updates(self, count: int = 200) -> bytes:
        for _ in range(count):
            key_update(self.object)
        return self.outgoing.read()

    def close_notify(self) -> bytes:
        with contextlib.suppress(ssl.SSLError):
            self.object.unwrap()
        return self.outgoing.read()

    def messages(self, data: bytes) -> bytes:
        self.object.write(data)
        return self.outgoing.read()


def key_update(side: ssl.SSLObject) -> None:
    """Sends KeyUpdate, and asks for one. (The ssl module has no function for that: calls OpenSSL's.)"""
    handle = ctypes.c_void_p.from_address(id(side._sslobj) + 3 * ctypes.sizeof(ctypes.c_void_p))  # type: ignore[attr-defined]
    try:
        library = ctypes.CDLL("libssl.so.3")
    except OSError as error:
        pytest.skip(str(error))
    assert library.SSL_key_update(handle, 1) == 1
    assert library.SSL_do_handshake(handle) == 1


#: Floods of a peer that has not ended the TLS handshake: the first bytes, and what it repeats.
BEFORE = {
    "fragments": (BEGIN, record(22, b"x")),
    "empty records": (BEGIN, record(22, b"")),
    "alerts": (BEGIN, record(21, b"\x01\x5a")),
    "change cipher spec": (BEGIN, record(20, b"\x01")),
    "application data": (BEGIN, record(23, bytes(1000))),
    "long record": (b"", record(22, bytes(1000), 0xFFFF)),
    "one record without end": (BEGIN[:5], b""),
}

Flood = Iterator[bytes]


def key_updates(talker: Talker) -> Flood:
    while True:
        yield talker.key_updates()


def after_close_notify(talker: Talker) -> Flood:
    yield talker.close_notify()
    while True:
        yield bytes(65536)


def empty_messages(talker: Talker) -> Flood:
    while True:
        yield b"".join(talker.messages(b"") for _ in range(100)) or talker.messages(b"x")


def preambles(talker: Talker) -> Flood:
    yield talker.messages(MAGIC + struct.pack("<HH", VERSION, 0) + bytes(32))
    yield talker.messages(struct.pack("<IB", MAX_FRAME, FrameKind.OPEN))
    while True:
        yield talker.messages(bytes(1000))


def records_of_junk(talker: Talker) -> Flood:
    while True:
        yield record(23, bytes(16000))


#: Floods of a peer that has ended the TLS handshake.
AFTER: dict[str, Callable[[Talker], Flood]] = {
    "key updates": key_updates,
    "after close_notify": after_close_notify,
    "empty messages": empty_messages,
    "an exchange without end": preambles,
    "junk": records_of_junk,
}
FLOODS = [*BEFORE, *AFTER]


def shake_hands(one: Any, other: Any) -> None:
    for _ in range(8):
        for side, peer in ((one, other), (other, one)):
            with contextlib.suppress(ssl.SSLWantReadError):
                side.object.do_handshake()
            peer.incoming.write(side.outgoing.read())


@pytest.mark.sample(10)
@pytest.mark.parametrize("is_client", [True, False])
@pytest.mark.parametrize("kind", FLOODS)
def test_flood(kind: str, is_client: bool, certificates: Certificates) -> None:
    """The state machine alone; its answers are not read. ``is_client``: which side is attacked."""
    context, others = certificates.client, certificates.server
    if not is_client:
        context, others = others, context
    attacked = TLS(context, is_client=is_client, server_hostname="localhost" if is_client else None)
    talker = Talker(others, not is_client)
    exchange = Exchange(is_client=False, software="", authkey=None)
    if kind in AFTER:
        shake_hands(talker, attacked)
        flood = AFTER[kind](talker)
    else:
        flood = iter([BEFORE[kind][0], *[BEFORE[kind][1] * 100 or bytes(10_000)] * 4000])
    taken = 0

    def drive() -> None:
        nonlocal taken
        for data in flood:
            for at in range(0, len(data), CHUNK):
                taken += len(data[at : at + CHUNK])
                assert taken <= MAX_TLS_BYTES + CHUNK
                if kind in AFTER:
                    exchange.receive_data(attacked.decrypt(data[at : at + CHUNK]))
                    exchange.next_event()
                else:
                    attacked.receive(data[at : at + CHUNK])
                    with contextlib.suppress(ssl.SSLWantReadError):
                        attacked.do_handshake()
                assert attacked.incoming.pending + len(exchange._buffer) <= MOST_KEPT
                assert attacked.outgoing.pending <= MAX_TLS_BYTES

    with pytest.raises((ssl.SSLError, trio_ucx._rules.wire.ProtocolError)):
        drive()
    if kind == "after close_notify":
        assert taken <= 2 * CHUNK, "at once"


# ---- on real sockets ----


def alive() -> list[Any]:
    """The objects of handshakes in this process, uncollected garbage included."""
    return [each for each in gc.get_objects() if isinstance(each, (TLS, Exchange))]


@contextlib.contextmanager
def without_collector() -> Iterator[Callable[[], list[Any]]]:
    """Returns a function that lists the objects of handshakes made since."""
    gc.collect()
    before = alive()  # of earlier tests: a traceback may hold some
    gc.disable()
    try:
        yield lambda: [each for each in alive() if not any(each is one for one in before)]
    finally:
        gc.enable()


async def expect_cut_off(stream: trio.SocketStream, flood: Flood) -> None:
    sent = 0
    with trio.fail_after(15), pytest.raises(trio.BrokenResourceError):
        for data in flood:
            await stream.send_all(data)
            sent += len(data)
            assert sent <= MOST_SENT
    await stream.aclose()


async def end_handshake(stream: trio.SocketStream, talker: Talker) -> None:
    while True:
        try:
            talker.object.do_handshake()
        except ssl.SSLWantReadError:
            pass
        else:
            await stream.send_all(talker.outgoing.read() or b"")
            return
        await stream.send_all(talker.outgoing.read())
        talker.incoming.write(await stream.receive_some())


async def flood_of(kind: str, stream: trio.SocketStream, context: ssl.SSLContext, is_client: bool) -> Flood:
    if kind in BEFORE:
        return iter([BEFORE[kind][0], *[BEFORE[kind][1] * 100 or bytes(10_000)] * 4000])
    talker = Talker(context, is_client)
    await end_handshake(stream, talker)
    return AFTER[kind](talker)


@pytest.mark.sample(5)
@pytest.mark.parametrize("transports", ["tcp"], indirect=True)
@pytest.mark.parametrize("kind", FLOODS)
async def test_strangers(kind: str, worker: ucp.Worker, certificates: Certificates) -> None:
    """They are cut off, and leave no garbage for the collector."""
    async with open_listener(worker, ssl_context=certificates.server, connect_timeout=3) as listener:
        with without_collector() as kept:
            stream = await trio.open_tcp_stream(*listener.address)
            await expect_cut_off(stream, await flood_of(kind, stream, certificates.client, True))
            await until(lambda: listener.statistics() == trio_ucx.ListenerStatistics(0, 0, 0, 1))
            assert kept() == []


@pytest.mark.sample(5)
@pytest.mark.parametrize("transports", ["tcp"], indirect=True)
@pytest.mark.parametrize("kind", FLOODS)
async def test_false_listeners(kind: str, worker: ucp.Worker, certificates: Certificates) -> None:
    """Clients need no more memory than listeners."""
    [listener] = await trio.open_tcp_listeners(0, host="127.0.0.1")
    address = listener.socket.getsockname()

    async def attack() -> None:
        stream = await listener.accept()
        await expect_cut_off(stream, await flood_of(kind, stream, certificates.server, False))

    async with listener:
        with without_collector() as kept:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(attack)
                with trio.fail_after(15), pytest.raises(OSError, match=f"{address[0]}:{address[1]}"):
                    await trio_ucx.open_ucx_stream(
                        *address,
                        worker=worker,
                        ssl_context=certificates.client,
                        server_hostname="localhost",
                        connect_timeout=3,
                    )
            assert kept() == []


@pytest.mark.sample(4)
@pytest.mark.parametrize("transports", ["tcp"], indirect=True)
@pytest.mark.parametrize("is_client", [True, False])
@pytest.mark.parametrize("kind", AFTER)
async def test_open_connections(kind: str, is_client: bool, worker: ucp.Worker, certificates: Certificates) -> None:
    """The connection ends and keeps no memory, whichever side floods."""
    async with open_listener(worker, ssl_context=certificates.server) as listener:
        with without_collector() as kept:
            client = await trio_ucx.open_ucx_stream(
                *listener.address, worker=worker, ssl_context=certificates.client, server_hostname="localhost"
            )
            server = await listener.accept()
            flooder, attacked = (client, server) if is_client else (server, client)
            talker: Any = Talker.__new__(Talker)
            control = internals(flooder).closing.control_socket
            talker.object, talker.outgoing = control._tls.object, control._tls.outgoing
            stream = trio.SocketStream(trio.socket.from_stdlib_socket(control._socket.dup()))
            await expect_cut_off(stream, AFTER[kind](talker))
            with trio.fail_after(15), pytest.raises(trio.BrokenResourceError):
                await attacked.receive()
            del talker, control
            client.abort()
            server.abort()
            assert [each for each in kept() if isinstance(each, TLS) or each._buffer] == []


# ---- what a client costs that was not let in: docs/operation/security.md ----

SERVER = """
import ssl, sys, trio, trio_ucx

async def main():
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH, cafile=f"{sys.argv[1]}/ca.pem")
    context.load_cert_chain(f"{sys.argv[1]}/server.pem")
    context.verify_mode = ssl.CERT_REQUIRED
    [listener] = await trio_ucx.open_ucx_listeners(0, host="127.0.0.1", authkey=b"k" * 32, ssl_context=context)
    print(listener.address[1], flush=True)
    await trio.sleep_forever()

trio.run(main)
"""
#: The most that such a client sends: a preamble, and nearly all of an OPEN, which it could not end rightly.
UNPROVEN = MAGIC + struct.pack("<HH", VERSION, 1) + bytes(32) + struct.pack("<IB", MAX_FRAME, FrameKind.OPEN)
UNPROVEN += bytes(MAX_FRAME - 100)


def many_certificates(size: int) -> bytes:
    """Small certificates that nobody has asked for, in PEM: OpenSSL needs most memory for those."""
    found = b""
    while size > 0:
        one = trustme.CA().cert_pem.bytes()
        size -= len(ssl.PEM_cert_to_DER_cert(one.decode()))
        found += one
    return found


@pytest.mark.skipif(bool(SANITIZED), reason="a checker keeps what was freed")
@pytest.mark.parametrize(
    ("certificates_of", "most"), [("nobody", 200), ("the authority", 200), ("the authority, many", 500)]
)
def test_what_a_client_costs(certificates_of: str, most: int, tmp_path: Path) -> None:
    """KiB for each client that was not let in; with a certificate, and without, that the listener trusts."""
    authority = trustme.CA()
    authority.cert_pem.write_to_path(str(tmp_path / "ca.pem"))
    authority.issue_cert("localhost").private_key_and_cert_chain_pem.write_to_path(str(tmp_path / "server.pem"))
    pem = authority.issue_cert("client").private_key_and_cert_chain_pem.bytes()
    if "many" in certificates_of:
        pem += many_certificates(MAX_TLS_HANDSHAKE_BYTES - 3500)
    (tmp_path / "client.pem").write_bytes(pem)
    context = ssl.create_default_context(cafile=str(tmp_path / "ca.pem"))
    context.load_cert_chain(tmp_path / "client.pem")
    count, sockets = 60, []

    def connect(port: int) -> None:
        control = socket.create_connection(("127.0.0.1", port))
        if certificates_of == "nobody":  # a ClientHello that does not end
            sockets.append(control)
            control.sendall(record(22, b"\x01" + (MAX_TLS_HANDSHAKE_BYTES - 100).to_bytes(3, "big")))
            control.sendall(record(22, bytes(15_000)) * 2)
        else:
            sockets.append(context.wrap_socket(control, server_hostname="localhost"))
            sockets[-1].sendall(UNPROVEN)

    command = [sys.executable, "-c", SERVER, str(tmp_path)]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as server:
        try:
            assert server.stdout is not None
            port = int(server.stdout.readline())
            for _ in range(20):
                connect(port)
            time.sleep(0.5)
            before = resident(server.pid)
            for _ in range(count):
                connect(port)
            time.sleep(0.5)
            each = (resident(server.pid) - before) / count / 1024
            for control in sockets:
                control.setblocking(False)
                with pytest.raises((BlockingIOError, ssl.SSLWantReadError)):  # it was not turned away
                    while control.recv(1000):
                        pass
        finally:
            server.kill()
            for control in sockets:
                control.close()
    assert 10 < each < most, each
