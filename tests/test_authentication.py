"""Authentication: TLS, authkeys, permissions of a Unix socket; and attacks by a man in the middle."""

from __future__ import annotations

import contextlib
import datetime
import errno
import itertools
import os
import socket
import ssl
import struct
import tempfile
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import AsyncExitStack, asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Any

import attrs
import pytest
import trio
import trustme
from helpers import Certificates, Rounds, open_listener, pattern, until
from timing import PROMPT, Stopwatch

import trio_ucx
from trio_ucx import ucp
from trio_ucx._handshake import client as client_side
from trio_ucx._handshake import handshake as handshake_side
from trio_ucx._handshake import server as server_side
from trio_ucx._handshake.control_stream import ControlStream
from trio_ucx._handshake.exchange import Exchange, FrameKind
from trio_ucx._opening import unix as _unix
from trio_ucx._opening.options import check_exchange_options
from trio_ucx._rules.wire import MAGIC, VERSION
from trio_ucx._util.process import this_host
from trio_ucx.testing import internals

KEY = b"correct horse battery staple"
OTHER_KEY = b"16 other letters"
HEAD = struct.Struct("<IB")
PREAMBLE = 44


@contextlib.contextmanager
def patient(listener: trio_ucx.Listener) -> Iterator[None]:
    """Clients have a minute to connect, whatever the listener's ``connect_timeout``."""
    acceptor = listener._acceptor
    before, acceptor._timeout = acceptor._timeout, 60
    try:
        yield
    finally:
        acceptor._timeout = before


async def exchange(
    worker: ucp.Worker, listener: trio_ucx.Listener, address: Any = None, **options: Any
) -> tuple[trio_ucx.Connection, trio_ucx.Connection]:
    """Returns a client, and what the listener accepts: the other end of some such client."""
    with trio.fail_after(15):
        client = await trio_ucx.connect(address or listener.address, worker=worker, **options).__aenter__()
        server = await listener.accept()
        for one, other in ((client, server), (server, client)):
            one.send_nowait(pattern(100_000))
            assert await other.receive() == pattern(100_000)
        return client, server


async def expect_works(worker: ucp.Worker, listener: trio_ucx.Listener, address: Any = None, **options: Any) -> None:
    for end in await exchange(worker, listener, address, **options):
        end.abort()


async def expect_nothing_left(worker: ucp.Worker, listener: trio_ucx.Listener, refused: int | None = None) -> None:
    """Nobody was accepted, and no endpoint stays."""
    await until(lambda: listener.statistics().handshaking == 0)
    assert listener.statistics().waiting == 0
    if refused is not None:
        assert listener.statistics().refused == refused
    await until(lambda: worker.statistics().endpoints == 0)


def telling_bytes(worker: ucp.Worker) -> list[bytes]:
    """Parts of what a side says about itself."""
    address = internals(worker).identity.address.ucx
    return [address[1:9], address[-12:], this_host().process.host]


# ---- TLS ----


def contexts(authority: trustme.CA, *names: str) -> Certificates:
    server, client = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER), ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    if names:
        authority.issue_cert(*names).configure_cert(server)
    authority.configure_trust(client)
    authority.configure_trust(server)
    return Certificates(server, client)


async def test_tls(worker: ucp.Worker, certificates: Certificates) -> None:
    async with open_listener(worker, ssl_context=certificates.server) as listener:
        port = listener.address[1]
        context = certificates.client
        await expect_works(worker, listener, ("localhost", port), ssl_context=context)
        await expect_works(worker, listener, ssl_context=context, server_hostname="localhost")
        before = listener.statistics().refused
        for address, options in (
            (listener.address, {}),  # the certificate does not name 127.0.0.1
            (("localhost", port), {"server_hostname": "elsewhere"}),
            (("localhost", port), {"ssl_context": ssl.create_default_context()}),  # does not know the authority
        ):
            with pytest.raises(trio_ucx.NotAdmitted) as caught:
                await trio_ucx.connect(address, worker=worker, **{"ssl_context": context, **options}).__aenter__()
            assert f"connecting to {address[0]}:{port}: " in str(caught.value)
            assert "the other trusts" in str(caught.value)
            assert isinstance(caught.value.__cause__, ssl.SSLCertVerificationError)
        await until(lambda: listener.statistics().refused == before + 3)
        await until(lambda: listener.statistics().handshaking == 0)


@pytest.mark.parametrize("version", [ssl.TLSVersion.TLSv1_2, ssl.TLSVersion.TLSv1_3])
@pytest.mark.parametrize("days", [-10, 10], ids=["expired", "not_yet_valid"])
@pytest.mark.parametrize("whose", ["server", "client"])
async def test_a_wrong_clock(
    worker: ucp.Worker, whose: str, days: int, version: ssl.TLSVersion, caplog: pytest.LogCaptureFixture
) -> None:
    """A certificate is not valid at the time of a side: this side says its time, and the other asks for its clock."""
    authority, caught_at = trustme.CA(), datetime.datetime.now(datetime.UTC)
    begin = caught_at + datetime.timedelta(days=days)
    dates = {"not_before": begin, "not_after": begin + datetime.timedelta(days=5)}
    context = contexts(authority)
    for side, one in (("server", context.server), ("client", context.client)):
        authority.issue_cert("localhost", **(dates if side == whose else {})).configure_cert(one)
    context.client.maximum_version, context.server.verify_mode = version, ssl.CERT_REQUIRED
    caplog.set_level("INFO", "trio_ucx")
    async with open_listener(worker, ssl_context=context.server) as listener:
        with pytest.raises(trio_ucx.NotAdmitted) as caught:
            options = {"ssl_context": context.client, "server_hostname": "localhost"}
            await trio_ucx.connect(listener.address, worker=worker, **options).__aenter__()
        await expect_nothing_left(worker, listener, 1)
    texts = {"client": str(caught.value), "server": caplog.text}
    finder = "client" if whose == "server" else "server"
    what = "certificate has expired" if days < 0 else "certificate is not yet valid"
    assert what in texts[finder] and f"is this machine's clock right? It says {caught_at:%Y-}" in texts[finder]
    assert "is the clock of the peer's machine right?" in texts[whose]
    assert "other trusts" not in texts["client"]


@pytest.mark.parametrize("version", [ssl.TLSVersion.TLSv1_2, ssl.TLSVersion.TLSv1_3])
async def test_client_certificates(worker: ucp.Worker, version: ssl.TLSVersion) -> None:
    ours, other = trustme.CA(), trustme.CA()
    context = contexts(ours, "localhost")
    context.server.verify_mode = ssl.CERT_REQUIRED
    context.server.maximum_version = context.server.minimum_version = version
    async with open_listener(worker, ssl_context=context.server, connect_timeout=3) as listener:
        for authority in (None, other):
            client = contexts(ours, "client").client
            if authority is not None:
                authority.issue_cert("client@example.org").configure_cert(client)
            with Stopwatch(2), pytest.raises(OSError):
                await trio_ucx.connect(
                    listener.address, worker=worker, ssl_context=client, server_hostname="localhost"
                ).__aenter__()
        await expect_nothing_left(worker, listener, 2)
        ours.issue_cert("client@example.org").configure_cert(context.client)
        await expect_works(worker, listener, ssl_context=context.client, server_hostname="localhost")


@pytest.mark.parametrize("options", [{}, {"authkey": KEY}, {"allow_anyone": True}])
async def test_certificates_are_required_also_with_post_handshake_auth(
    worker: ucp.Worker, options: dict[str, Any]
) -> None:
    """Then OpenSSL does not ask for one in the handshake, and local clients came without."""
    authority = trustme.CA()
    context = contexts(authority, "localhost")
    context.server.verify_mode = ssl.CERT_REQUIRED
    context.server.post_handshake_auth = True
    given = {"authkey": options.get("authkey"), "ssl_context": context.client, "server_hostname": "localhost"}
    async with open_listener(worker, ssl_context=context.server, **options) as listener:
        with pytest.raises(trio_ucx.NotAdmitted, match="requires a certificate"):
            await trio_ucx.connect(listener.address, worker=worker, **given).__aenter__()
        await expect_nothing_left(worker, listener, 1)


class Resuming(ssl.SSLContext):
    """A client's context that resumes a TLS session, as trio_ucx's own client never does."""

    session: ssl.SSLSession | None = None
    last: ssl.SSLObject

    def wrap_bio(self, *arguments: Any, **options: Any) -> ssl.SSLObject:
        self.last = super().wrap_bio(*arguments, **{**options, "session": self.session})
        return self.last


@pytest.mark.parametrize("transports", ["tcp"], indirect=True)
@pytest.mark.parametrize("tickets", [True, False])
@pytest.mark.parametrize("version", [ssl.TLSVersion.TLSv1_2, ssl.TLSVersion.TLSv1_3])
@pytest.mark.parametrize("mode", ssl.VerifyMode)
async def test_resumed_tls_session(
    worker: ucp.Worker, version: ssl.TLSVersion, mode: ssl.VerifyMode, tickets: bool
) -> None:
    """OpenSSL does not verify the client's certificate again, which may have expired, or been revoked."""
    authority = trustme.CA()
    server = contexts(authority, "localhost").server
    server.verify_mode = mode
    server.minimum_version = server.maximum_version = version
    if not tickets:
        server.options |= ssl.OP_NO_TICKET  # the listener's OpenSSL keeps the sessions of open connections
    client = Resuming(ssl.PROTOCOL_TLS_CLIENT)
    authority.configure_trust(client)
    authority.issue_cert("client@example.org").configure_cert(client)
    options = {"ssl_context": client, "server_hostname": "localhost"}
    async with open_listener(worker, ssl_context=server) as listener:
        first = await trio_ucx.connect(listener.address, worker=worker, **options).__aenter__()
        client.session = client.last.session
        if mode == ssl.CERT_NONE:
            second = await trio_ucx.connect(listener.address, worker=worker, **options).__aenter__()
            second.abort()
        else:
            with pytest.raises(trio_ucx.NotAdmitted, match="connect with a new session"):
                await trio_ucx.connect(listener.address, worker=worker, **options).__aenter__()
            await until(lambda: listener.statistics().refused == 1)
        assert client.last.session_reused
        first.abort()


async def test_only_one_side_with_tls(
    worker: ucp.Worker, certificates: Certificates, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", "trio_ucx")
    for key in (None, KEY):
        async with open_listener(worker, ssl_context=certificates.server, authkey=key) as listener:
            with Stopwatch(2), pytest.raises(trio_ucx.NotAdmitted, match="wants TLS: connect with ssl_context="):
                await trio_ucx.connect(listener.address, worker=worker, authkey=key).__aenter__()
            await expect_nothing_left(worker, listener, 1)
        async with open_listener(worker, authkey=key) as listener:
            with Stopwatch(2), pytest.raises(trio_ucx.NotAdmitted, match="does the listener have an ssl_context"):
                await trio_ucx.connect(
                    listener.address,
                    worker=worker,
                    authkey=key,
                    ssl_context=certificates.client,
                    server_hostname="localhost",
                ).__aenter__()
            await expect_nothing_left(worker, listener, 1)
    assert "a TLS client, and this listener has no ssl_context" in caplog.text


async def test_deadline_in_the_tls_handshake(worker: ucp.Worker, certificates: Certificates) -> None:
    with socket.create_server(("127.0.0.1", 0)) as deaf:
        with Stopwatch(1 + PROMPT), pytest.raises(TimeoutError, match="TLS handshake did not end"):
            await trio_ucx.connect(
                deaf.getsockname(),
                worker=worker,
                ssl_context=certificates.client,
                server_hostname="localhost",
                connect_timeout=1,
            ).__aenter__()
    async with open_listener(worker, ssl_context=certificates.server, connect_timeout=0.3) as listener:
        for begin in (b"", b"\x16", b"\x16\x03\x01\x02\x00\x01"):
            async with await trio.open_tcp_stream(*listener.address) as slow:
                with Stopwatch(3), trio.fail_after(60), contextlib.suppress(trio.BrokenResourceError):
                    if begin:
                        await slow.send_all(begin)
                    while await slow.receive_some():
                        pass
        await expect_nothing_left(worker, listener, 3)


@pytest.mark.parametrize("transports", ["tcp"], indirect=True)
async def test_strangers_do_not_shut_out_clients(
    worker: ucp.Worker, certificates: Certificates, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Sockets that stop after the TLS handshake, in it or before it, and new ones all the time, at one address."""
    monkeypatch.setattr(server_side, "MAX_EXCHANGES", 24)
    hello = ssl.MemoryBIO()
    with contextlib.suppress(ssl.SSLWantReadError):
        certificates.client.wrap_bio(ssl.MemoryBIO(), hello, server_hostname="localhost").do_handshake()
    begin = hello.read()
    held: deque[socket.socket] = deque()
    async with open_listener(worker, ssl_context=certificates.server, authkey=KEY) as listener:
        async with in_the_middle(listener.address) as proxy, trio.open_nursery() as nursery, AsyncExitStack() as stack:
            proxy.delay = 0.02

            async def strangers() -> None:
                for number in itertools.count():
                    held.append(stack.enter_context(socket.create_connection(listener.address)))
                    held[-1].sendall((b"", begin[:100], begin)[number % 3])
                    if len(held) > 48:
                        held.popleft().close()
                        await trio.sleep(1 / 30)

            for _ in range(24):
                held.append(stack.enter_context(socket.create_connection(listener.address)))
                stream = trio.SocketStream(trio.socket.from_stdlib_socket(held[-1].dup()))
                await trio.SSLStream(stream, certificates.client, server_hostname="localhost").do_handshake()
                await trio.aclose_forcefully(stream)
            nursery.start_soon(strangers)
            await until(lambda: listener.statistics().handshaking == 24)
            for _ in range(3):
                await expect_works(
                    worker,
                    listener,
                    proxy.address,
                    authkey=KEY,
                    ssl_context=certificates.client,
                    server_hostname="localhost",
                    connect_timeout=5,
                )
            nursery.cancel_scope.cancel()


class SlowStream(ControlStream):
    """The control socket of a client that takes long to answer."""

    async def _receive_raw(self) -> bytes:
        data = await super()._receive_raw()
        await trio.sleep(0.6)
        return data


@pytest.mark.parametrize("transports", ["tcp"], indirect=True)
@pytest.mark.parametrize("tls", [False, True])
async def test_many_sources_do_not_shut_out_slow_clients(
    worker: ucp.Worker, certificates: Certificates, tls: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Clients of one host, which need longer than GRACE for each answer; and strangers, each from a source of its own,
    which send one byte, and come again when their exchange is ended."""
    monkeypatch.setattr(server_side, "MAX_EXCHANGES", 24)
    monkeypatch.setattr(server_side, "GRACE", 0.3)
    monkeypatch.setattr(client_side, "ControlStream", SlowStream)
    options: dict[str, Any] = {"authkey": KEY}
    if tls:
        options |= {"ssl_context": certificates.client, "server_hostname": "localhost"}
    first = b"\x16" if tls else MAGIC[:1]
    opened = 0
    async with (
        open_listener(worker, ssl_context=certificates.server if tls else None, authkey=KEY) as listener,
        trio.open_nursery() as nursery,
    ):

        async def stranger(number: int) -> None:
            nonlocal opened
            while True:
                opened += 1
                with contextlib.suppress(OSError, trio.BrokenResourceError):
                    async with await trio.open_tcp_stream(
                        *listener.address, local_address=f"127.0.2.{number}"
                    ) as stream:
                        await stream.send_all(first)
                        await stream.receive_some()
                await trio.sleep(0.3)

        for number in range(1, 49):
            nursery.start_soon(stranger, number)
        await until(lambda: listener.statistics().handshaking == 24)
        ends: list[trio_ucx.Connection] = []

        async def client() -> None:
            ends.extend(await exchange(worker, listener, **options))

        for _ in range(2):
            async with trio.open_nursery() as clients:
                for _ in range(8):
                    clients.start_soon(client)
            while ends:
                ends.pop().abort()
        assert opened > 60
        nursery.cancel_scope.cancel()


async def test_client_that_hangs_up_in_the_tls_handshake(worker: ucp.Worker, certificates: Certificates) -> None:
    """As health checks do. Nobody else is affected."""
    hello = b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc"
    async with open_listener(worker, ssl_context=certificates.server) as listener:

        def clients() -> int:
            return listener.statistics().handshaking + listener.statistics().refused

        for linger in (struct.pack("ii", 0, 0), struct.pack("ii", 1, 0)):  # the latter ends by RST
            for length in (0, 1, 5, 9):
                before = clients()
                with socket.create_connection(listener.address) as client:
                    client.sendall(hello[:length])
                    await until(lambda before=before: clients() > before)
                    client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, linger)
        await until(lambda: listener.statistics().refused == 8)
        await expect_works(worker, listener, ssl_context=certificates.client, server_hostname="localhost")


async def test_tls_and_authkey_at_a_unix_socket(worker: ucp.Worker, certificates: Certificates, tmp_path: Path) -> None:
    """With TLS at a Unix socket, the client must say which name the certificate has to have."""
    async with open_listener(
        worker, host=f"unix:{tmp_path}/socket", ssl_context=certificates.server, authkey=KEY
    ) as listener:
        options = {"ssl_context": certificates.client, "server_hostname": "localhost"}
        await expect_works(worker, listener, authkey=KEY, **options)
        for wrong in ({"authkey": OTHER_KEY, **options}, {"authkey": KEY}, options):
            with pytest.raises(trio_ucx.NotAdmitted):
                await trio_ucx.connect(listener.address, worker=worker, **wrong).__aenter__()
        with pytest.raises(ValueError, match="server_hostname= is missing"):
            await trio_ucx.connect(
                listener.address, worker=worker, authkey=KEY, ssl_context=certificates.client
            ).__aenter__()


# ---- a man in the middle ----


@attrs.define(eq=False)
class Proxy:
    """Carries bytes between clients and a listener.

    Attributes:
        change: for the number of a connection, which direction to change ("client" is what it sends) and at which byte.
        recorded: what each connection's sides have sent, as it reached the other.
        delay: seconds by which everything comes later.
    """

    target: tuple[str, int]
    change: Callable[[int], tuple[str, int] | None] = lambda number: None
    recorded: list[dict[str, bytearray]] = attrs.field(factory=list)
    delay: float = 0.0
    address: tuple[str, int] = ("", 0)

    async def run(self, task_status: Any = trio.TASK_STATUS_IGNORED) -> None:
        [listener] = await trio.open_tcp_listeners(0, host="127.0.0.1")
        self.address = listener.socket.getsockname()
        await trio.serve_listeners(self._serve, [listener], task_status=task_status)

    async def _serve(self, client: trio.SocketStream) -> None:
        record = {"client": bytearray(), "server": bytearray()}
        change = self.change(len(self.recorded))
        self.recorded.append(record)
        with contextlib.suppress(OSError, trio.BrokenResourceError, trio.ClosedResourceError):
            async with await trio.open_tcp_stream(*self.target) as server, trio.open_nursery() as nursery:
                nursery.start_soon(self._carry, client, server, record["client"], "client", change)
                await self._carry(server, client, record["server"], "server", change)
                nursery.cancel_scope.cancel()

    async def _carry(
        self,
        source: trio.SocketStream,
        sink: trio.SocketStream,
        record: bytearray,
        name: str,
        change: tuple[str, int] | None,
    ) -> None:
        at = change[1] if change is not None and change[0] == name else -1
        with contextlib.suppress(trio.BrokenResourceError, trio.ClosedResourceError):
            async for chunk in source:
                if len(record) <= at < len(record) + len(chunk):
                    chunk = bytearray(chunk)
                    chunk[at - len(record)] ^= 1 << at % 8
                record += chunk
                await trio.sleep(self.delay)
                await sink.send_all(chunk)
            await sink.send_eof()


@asynccontextmanager
async def in_the_middle(target: tuple[str, int]) -> AsyncIterator[Proxy]:
    proxy = Proxy(target)
    async with trio.open_nursery() as nursery:
        await nursery.start(proxy.run)
        yield proxy
        nursery.cancel_scope.cancel()


def frames(data: bytes) -> list[tuple[int, int]]:
    """Where the frames of one side are in what it has sent: begins and ends, the preamble first."""
    found = [(0, PREAMBLE)]
    while found[-1][1] < len(data):
        begin = found[-1][1]
        found.append((begin, begin + 4 + HEAD.unpack_from(data, begin)[0]))
    assert found[-1][1] == len(data)
    return found


def records(data: bytes) -> list[tuple[int, int]]:
    """The same of the records of TLS."""
    found: list[tuple[int, int]] = []
    begin = 0
    while begin < len(data):
        end = begin + 5 + int.from_bytes(data[begin + 3 : begin + 5], "big")
        found.append((begin, end))
        begin = end
    assert begin == len(data)
    return found


@asynccontextmanager
async def counted_endpoints(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[list[int]]:
    """The generations of the endpoints that connections ask for."""
    made: list[int] = []
    original = handshake_side.connect_shared

    def counting(*args: Any) -> Any:
        made.append(args[2])
        return original(*args)

    with monkeypatch.context() as patch:
        patch.setattr(handshake_side, "connect_shared", counting)
        yield made


async def record_exchange(worker: ucp.Worker, listener: trio_ucx.Listener, **options: Any) -> dict[str, bytes]:
    """Records both sides of an exchange without interference."""
    options["connect_timeout"] = 60
    async with in_the_middle(listener.address) as proxy:
        with patient(listener):
            client = await trio_ucx.connect(proxy.address, worker=worker, **options).__aenter__()
            server = await listener.accept()
        [record] = proxy.recorded
        said = {name: bytes(data) for name, data in record.items()}
        client.abort()
        server.abort()
    await until(lambda: worker.statistics().endpoints == 0)
    return said


async def expect_all_refused(
    worker: ucp.Worker, listener: trio_ucx.Listener, changes: list[tuple[str, int]], **options: Any
) -> None:
    """Connects once for each change; every attempt fails, and nothing is accepted."""
    async with in_the_middle(listener.address) as proxy:
        proxy.change = lambda number: changes[min(number, len(changes) - 1)]
        opened: list[tuple[str, int]] = []

        limiter = trio.CapacityLimiter(32)

        async def attempt() -> None:
            async with limiter:
                try:
                    connection = await trio_ucx.connect(proxy.address, worker=worker, **options).__aenter__()
                except OSError:
                    return
                opened.append(connection.local_address)  # type: ignore[arg-type]
                connection.abort()

        while len(proxy.recorded) < len(changes):  # an attempt may time out before it reaches the proxy
            async with trio.open_nursery() as nursery:
                for _ in range(len(changes) - len(proxy.recorded)):
                    nursery.start_soon(attempt)
        assert not opened, f"{len(opened)} connections although something was changed"
    await expect_nothing_left(worker, listener)


@pytest.mark.parametrize("transports", ["tcp"])
async def test_changed_byte_with_authkey(worker: ucp.Worker, monkeypatch: pytest.MonkeyPatch) -> None:
    """At every place of the exchange, in both directions."""
    async with open_listener(worker, authkey=KEY, connect_timeout=0.5) as listener:
        options: dict[str, Any] = {"authkey": KEY, "connect_timeout": 0.5}
        said = await record_exchange(worker, listener, **options)
        before, last = [], []
        for who, data in said.items():
            *_, (begin, end) = frames(data)
            before += [(who, at) for at in range(begin)]
            last += [(who, at) for at in range(begin, end)]
        async with counted_endpoints(monkeypatch) as made:
            await expect_all_refused(worker, listener, before, **options)
            assert made == []
            await expect_all_refused(worker, listener, last, **options)
            assert len(made) <= sum(who == "client" for who, _ in last)  # TAKE: the client has made its own
        with patient(listener):
            await expect_works(worker, listener, authkey=KEY)


@pytest.mark.parametrize("transports", ["tcp"])
async def test_changed_byte_with_tls(
    worker: ucp.Worker, certificates: Certificates, monkeypatch: pytest.MonkeyPatch, rounds: Rounds
) -> None:
    """At every place that is not encrypted, and every tenth one that is (with ``--full`` every third).

    But TLS ignores the version in the head of an unencrypted record, and ChangeCipherSpec altogether.
    """
    async with open_listener(worker, ssl_context=certificates.server, connect_timeout=0.5) as listener:
        options: dict[str, Any] = {
            "ssl_context": certificates.client,
            "server_hostname": "localhost",
            "connect_timeout": 0.5,
        }
        said = await record_exchange(worker, listener, **options)
        before: list[tuple[str, int]] = []
        last: list[tuple[str, int]] = []
        for who, data in said.items():
            found = records(data)
            for begin, end in found:
                kind = data[begin]
                if kind == 20:
                    continue
                # Whatever is encrypted, the head included, has a code over all of it.
                encrypted = [*range(begin, begin + 5), *range(begin + 5, end, rounds(10, 3)), end - 1]
                places = [begin, *range(begin + 3, end)] if kind == 22 else encrypted
                (last if (begin, end) == found[-1] else before).extend((who, at) for at in places)
        async with counted_endpoints(monkeypatch) as made:
            # Records differ in length from time to time, by a few bytes of signatures.
            sure = [(who, at) for who, at in before if at < records(said[who])[-1][0] - 12]
            await expect_all_refused(worker, listener, sure, **options)
            assert made == []
            unsure = [change for change in before if change not in sure]
            await expect_all_refused(worker, listener, unsure + last[: len(last) - 12], **options)
        with patient(listener):
            await expect_works(worker, listener, ssl_context=certificates.client, server_hostname="localhost")


async def test_man_in_the_middle_who_changes_nothing(worker: ucp.Worker, certificates: Certificates) -> None:
    """Nobody notices; under TLS the peer descriptions that the sides send are not readable."""
    async with open_listener(worker, ssl_context=certificates.server, authkey=KEY) as listener:
        said = await record_exchange(
            worker, listener, ssl_context=certificates.client, server_hostname="localhost", authkey=KEY
        )
        for data in said.values():
            for part in telling_bytes(worker):
                assert part not in data


@pytest.mark.parametrize("with_tls", [False, True])
async def test_recorded_exchange_cannot_be_played_again(
    worker: ucp.Worker, certificates: Certificates, with_tls: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    tls = {"ssl_context": certificates.server} if with_tls else {}
    timeout = 0.5 if with_tls else 10  # under TLS only this ends an exchange that is played again
    async with open_listener(worker, authkey=None if with_tls else KEY, connect_timeout=timeout, **tls) as listener:
        options: dict[str, Any] = {"authkey": None if with_tls else KEY}
        if with_tls:
            options |= {"ssl_context": certificates.client, "server_hostname": "localhost"}
        said = await record_exchange(worker, listener, **options)
        refused = listener.statistics().refused
        async with counted_endpoints(monkeypatch) as made:
            for _ in range(3):
                async with await trio.open_tcp_stream(*listener.address) as stream:
                    got = bytearray()
                    with trio.fail_after(15), contextlib.suppress(trio.BrokenResourceError):
                        await stream.send_all(said["client"])
                        async for chunk in stream:
                            got += chunk
                if not with_tls:
                    assert b"authkeys" in got
                for part in telling_bytes(worker):
                    assert part not in got
            await expect_nothing_left(worker, listener, refused + 3)

            async def play(stream: trio.SocketStream) -> None:
                with contextlib.suppress(trio.BrokenResourceError):
                    await stream.send_all(said["server"])
                    async for _ in stream:
                        pass

            async with trio.open_nursery() as nursery:  # the server's side, to a client
                [fake] = await trio.open_tcp_listeners(0, host="127.0.0.1")
                nursery.start_soon(trio.serve_listeners, play, [fake])
                with Stopwatch(3), pytest.raises(OSError):
                    await trio_ucx.connect(
                        fake.socket.getsockname(), worker=worker, connect_timeout=1, **options
                    ).__aenter__()
                nursery.cancel_scope.cancel()
            assert made == []


# ---- authkey ----


@pytest.mark.parametrize(
    ("client_key", "server_key", "words"),
    [
        (None, KEY, "this client has no authkey, and its peer wants one|wants an authkey, and its peer has none"),
        (KEY, None, "this client wants an authkey, and its peer has none|has no authkey, and its peer wants one"),
        (KEY, KEY[:-1], "the authkeys of the two sides differ"),
        (OTHER_KEY, KEY, "the authkeys of the two sides differ"),
    ],
)
async def test_keys_that_differ(
    worker: ucp.Worker,
    client_key: bytes | None,
    server_key: bytes | None,
    words: str,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Both sides report it, and neither has sent the other its peer description."""
    caplog.set_level("INFO", "trio_ucx")
    async with open_listener(worker, authkey=server_key) as listener, counted_endpoints(monkeypatch) as made:
        async with in_the_middle(listener.address) as proxy:
            with Stopwatch(2), pytest.raises(trio_ucx.NotAdmitted, match=words):
                await trio_ucx.connect(proxy.address, worker=worker, authkey=client_key).__aenter__()
            await until(lambda: listener.statistics().refused == 1)
            await expect_nothing_left(worker, listener, 1)
            [record] = proxy.recorded
            for part in telling_bytes(worker):
                assert part not in record["server"]
                assert part not in record["client"] or client_key is None
        assert made == []
    assert "turned away" in caplog.text and "authkey" in caplog.text


async def test_authkey(worker: ucp.Worker, transports: str) -> None:
    async with ucp.open_worker(config={"TLS": transports}) as other:
        for key in (OTHER_KEY, KEY, bytes(1000), bytearray(b"a key in a bytearray")):
            async with open_listener(worker, authkey=key) as listener:
                await expect_works(other, listener, authkey=key)
    for bad, kind in (("text", TypeError), (b"", ValueError), (OTHER_KEY[1:], ValueError), (7, TypeError)):
        words = "authkey must be bytes" if kind is TypeError else r"authkey has \d+ bytes.* secrets\.token_bytes\(32\)"
        for attempt in (
            lambda bad=bad: trio_ucx.connect("127.0.0.1:1", authkey=bad),
            partial(trio_ucx.open_ucx_stream, "127.0.0.1", 1, authkey=bad),
            partial(trio_ucx.open_ucx_listeners, 0, worker=worker, authkey=bad),
        ):
            with pytest.raises(kind, match=words) as caught:
                await attempt()
            assert "letters" not in str(caught.value)


def test_the_authkey_is_not_shown() -> None:
    """No repr or str of an object that holds a key shows the key."""
    options = check_exchange_options("auto", 20, KEY, None)
    assert options.authkey == KEY
    for holder in (options, Exchange(is_client=True, software="", authkey=KEY), trio_ucx.connect("a:1", authkey=KEY)):
        assert "horse" not in repr(holder) and "horse" not in str(holder)


#: What a client without the key says after a preamble that claims to have it.
WITHOUT_THE_KEY = {
    "nothing": b"",
    "open": HEAD.pack(1 + 400 + 32, FrameKind.OPEN) + bytes(432),
    "open without a code": HEAD.pack(1, FrameKind.OPEN),
    "proof": HEAD.pack(33, FrameKind.PROOF) + bytes(32),
    "take": HEAD.pack(37, FrameKind.TAKE) + bytes(36),
    "refusal": HEAD.pack(1, FrameKind.REFUSE),
}


@pytest.mark.parametrize("what", WITHOUT_THE_KEY)
@pytest.mark.parametrize("flags", [0, 1])
async def test_unauthenticated_client_learns_nothing(worker: ucp.Worker, what: str, flags: int) -> None:
    async with open_listener(worker, authkey=KEY, connect_timeout=0.3) as listener:
        async with await trio.open_tcp_stream(*listener.address) as stream:
            got = bytearray()
            with trio.fail_after(15), contextlib.suppress(trio.BrokenResourceError):
                await stream.send_all(MAGIC + struct.pack("<HH", VERSION, flags) + bytes(32) + WITHOUT_THE_KEY[what])
                async for chunk in stream:
                    got += chunk
        for part in telling_bytes(worker):
            assert part not in got
        assert len(got) < 500
        await expect_nothing_left(worker, listener, 1)


async def test_client_does_not_learn_internal_errors(
    worker: ucp.Worker, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    async with open_listener(worker, authkey=KEY) as listener:
        monkeypatch.setattr(server_side.Acceptor, "_has_place", lambda _: {}["secret"])
        with pytest.raises(ConnectionRefusedError, match="an internal error") as caught:
            await trio_ucx.connect(listener.address, authkey=KEY, worker=worker).__aenter__()
        assert "secret" not in str(caught.value) and "secret" in caplog.text
        monkeypatch.undo()
        await expect_nothing_left(worker, listener, 1)


# ---- Unix sockets ----


async def test_unix_socket(worker: ucp.Worker, tmp_path: Path) -> None:
    path = tmp_path / "socket"
    for _ in range(2):
        async with open_listener(worker, host=f"unix:{path}") as listener:
            assert listener.address == (f"unix:{path}", 0) and path.is_socket()
            for address in (listener.address, f"unix:{path}"):
                client, server = await exchange(worker, listener, address)
                assert server.local_address == client.remote_address == listener.address
                client.abort()
                server.abort()
        assert not path.exists()
    with pytest.raises(FileNotFoundError, match="socket") as caught:
        await trio_ucx.connect(f"unix:{path}", worker=worker).__aenter__()
    assert caught.value.errno == errno.ENOENT


async def test_path_that_is_taken(worker: ucp.Worker, tmp_path: Path) -> None:
    """A socket that a dead server has left behind is replaced; nothing else is."""
    path = tmp_path / "socket"
    with socket.socket(socket.AF_UNIX) as stale:
        stale.bind(str(path))
    with pytest.raises(ConnectionRefusedError) as refused:
        await trio_ucx.connect(f"unix:{path}", worker=worker).__aenter__()
    assert refused.value.errno == errno.ECONNREFUSED
    async with open_listener(worker, host=f"unix:{path}") as listener:
        await expect_works(worker, listener)
        for _ in range(3):  # it does not disturb the listener
            with pytest.raises(OSError, match="another process has bound it already") as caught:
                await trio_ucx.open_ucx_listeners(0, host=f"unix:{path}", worker=worker)
            assert caught.value.errno == errno.EADDRINUSE
        await expect_works(worker, listener)
        assert listener.statistics().refused == 0
    with socket.socket(socket.AF_UNIX) as busy:
        busy.bind(str(path))
        busy.listen(0)
        with contextlib.ExitStack() as stack:
            for _ in range(3):  # its queue is full
                probe = stack.enter_context(socket.socket(socket.AF_UNIX))
                probe.setblocking(False)
                with contextlib.suppress(BlockingIOError):
                    probe.connect(str(path))
            with pytest.raises(OSError, match="another process has bound it") as caught:
                await trio_ucx.open_ucx_listeners(0, host=f"unix:{path}", worker=worker)
            assert caught.value.errno == errno.EADDRINUSE
    path.unlink()
    for make in (lambda: path.write_text("precious"), path.mkdir, lambda: path.symlink_to("/etc/hostname")):
        make()
        with pytest.raises(OSError, match="something other than a socket") as caught:
            await trio_ucx.open_ucx_listeners(0, host=f"unix:{path}", worker=worker)
        assert caught.value.errno == errno.EEXIST and os.path.lexists(path)
        path.rmdir() if path.is_dir() else path.unlink()
    for odd in (tmp_path / ("x" * 200), tmp_path / "no" / "folder"):
        with pytest.raises(OSError, match="directory|too long") as caught:
            await trio_ucx.open_ucx_listeners(0, host=f"unix:{odd}", worker=worker)
        assert caught.value.errno
        with pytest.raises(OSError):
            await trio_ucx.connect(f"unix:{odd}", worker=worker).__aenter__()
    path.symlink_to(tmp_path / "nowhere")
    with pytest.raises(OSError):
        await trio_ucx.open_ucx_listeners(0, host=f"unix:{path}", worker=worker)
    assert path.is_symlink()


async def test_bound_path_of_a_process_that_does_not_listen_yet(worker: ucp.Worker, tmp_path: Path) -> None:
    path = tmp_path / "socket"
    for kind in (socket.SOCK_STREAM, socket.SOCK_SEQPACKET, socket.SOCK_DGRAM):
        with socket.socket(socket.AF_UNIX, kind) as bound:
            bound.bind(str(path))
            with pytest.raises(OSError, match="another process has bound it already") as caught:
                await trio_ucx.open_ucx_listeners(0, host=f"unix:{path}", worker=worker)
            assert caught.value.errno == errno.EADDRINUSE and path.is_socket()
        path.unlink()
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("step", ["stat", "flock", "connect", "unlink"])
async def test_servers_that_find_the_same_stale_path(
    worker: ucp.Worker, tmp_path: Path, step: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another server acts before each step of one that replaces the path: one of them gets the path, and keeps it."""
    path = str(tmp_path / "socket")
    with socket.socket(socket.AF_UNIX) as stale:
        stale.bind(path)
    opened: list[Any] = []

    def open_one() -> None:
        try:
            opened.append(_unix.open_unix_listener(path, 5))
        except OSError as error:
            assert error.errno == errno.EADDRINUSE
            opened.append(None)

    def other_first(original: Callable[..., Any]) -> Callable[..., Any]:
        def step(*args: Any, **options: Any) -> Any:
            patch.undo()
            open_one()
            return original(*args, **options)

        return step

    patch = monkeypatch
    owner, name = {
        "stat": (os, "stat"),
        "flock": (_unix.fcntl, "flock"),
        "connect": (_unix, "_is_bound"),
        "unlink": (os, "unlink"),
    }[step]
    patch.setattr(owner, name, other_first(getattr(owner, name)))
    open_one()
    assert len(opened) == 2
    [(listener, remove)] = [each for each in opened if each is not None]
    with socket.socket(socket.AF_UNIX) as client:
        client.connect(path)
    remove()
    listener.socket.close()
    assert list(tmp_path.iterdir()) == []


async def test_lock_that_was_removed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The holder of the lock removes its file. A lock on a removed file is void: there may be a new file."""
    path = tmp_path / "socket"
    with socket.socket(socket.AF_UNIX) as stale:
        stale.bind(str(path))
    flock = _unix.fcntl.flock

    def replace_first(*args: Any) -> None:
        (tmp_path / "socket.lock").unlink()
        (tmp_path / "socket.lock").touch()
        flock(*args)

    monkeypatch.setattr(_unix.fcntl, "flock", replace_first)
    with pytest.raises(OSError, match="bound it already"):
        _unix.open_unix_listener(str(path), 5)
    assert path.is_socket() and (tmp_path / "socket.lock").exists()


async def test_path_that_a_client_is_bound_to(
    worker: ucp.Worker, tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Text that moves a terminal's cursor, or is not UTF-8, is shown without those characters."""
    caplog.set_level("INFO", "trio_ucx")
    async with open_listener(worker, host=f"unix:{tmp_path}/socket") as listener:
        for number, part in enumerate((b"\x1b[2J\n", "\u202e\u009b".encode(), b"\xff")):
            path = os.fsencode(tmp_path) + b"/" + str(number).encode() + part
            shown = f"unix:{tmp_path}/{number}"

            async def open_bound(path: bytes = path) -> trio.SocketStream:
                bare = trio.socket.socket(socket.AF_UNIX)
                await bare.bind(path)
                await bare.connect(f"{tmp_path}/socket")
                return trio.SocketStream(bare)

            async with await open_bound() as stranger:
                await stranger.send_all(b"nonsense")
                await until(lambda number=number: listener.statistics().refused > number)
            os.unlink(path)
            monkeypatch.setattr(trio, "open_unix_socket", lambda _, open_bound=open_bound: open_bound())
            client = await trio_ucx.connect(listener.address, worker=worker).__aenter__()
            server = await listener.accept()
            client.abort()
            server.abort()
            with pytest.raises(trio.ClosedResourceError) as caught:
                await server.send(b"")
            for text in (repr(server), str(server.remote_address), str(caught.value)):
                assert text.isprintable()
            assert shown in repr(server) and server.remote_address is not None
        logged = [record.getMessage() for record in caplog.records]
        assert shown and any("/0?[2J?" in line for line in logged) and all(line.isprintable() for line in logged)


async def test_path_of_a_successor_is_kept(worker: ucp.Worker, tmp_path: Path) -> None:
    path = tmp_path / "socket"
    async with open_listener(worker, host=f"unix:{path}"):
        path.unlink()
        async with open_listener(worker, host=f"unix:{path}") as successor:
            pass
        assert not path.exists()
        path.write_text("precious")
    assert path.read_text() == "precious"
    assert successor.address == (f"unix:{path}", 0)


@contextlib.contextmanager
def unprivileged() -> Any:
    """Drops root's privileges for the block, if this process has them."""
    if os.geteuid() != 0:
        yield
        return
    os.seteuid(65534)
    try:
        yield
    finally:
        os.seteuid(0)


@pytest.mark.parametrize("transports", ["tcp"])
async def test_permissions_of_the_path(worker: ucp.Worker) -> None:
    with tempfile.TemporaryDirectory() as folder:
        await check_permissions(worker, Path(folder))


async def check_permissions(worker: ucp.Worker, tmp_path: Path) -> None:
    path = tmp_path / "socket"
    tmp_path.chmod(0o755)
    async with open_listener(worker, host=f"unix:{path}") as listener:
        path.chmod(0)
        with unprivileged(), pytest.raises(PermissionError, match="unix:") as caught:
            await trio_ucx.connect(listener.address, worker=worker).__aenter__()
        assert caught.value.errno == errno.EACCES
        path.chmod(0o777)
        with unprivileged():
            await expect_works(worker, listener)
    tmp_path.chmod(0o555)
    with unprivileged(), pytest.raises(PermissionError, match="listening at unix:"):
        await trio_ucx.open_ucx_listeners(0, host=f"unix:{path}", worker=worker)
    tmp_path.chmod(0o755)
