"""``admit=`` of listeners: the program decides which clients are let in, and knows who they are."""

from __future__ import annotations

import logging
import os
import ssl
import sys
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import trio
import trustme
from helpers import echo, open_listener, serving, until
from timing import Stopwatch

import trio_ucx
from trio_ucx import ucp
from trio_ucx._handshake import server as server_side
from trio_ucx._handshake.control_stream import ControlStream
from trio_ucx._rules.wire import MAGIC

NOT_LET_IN = r"refused the connection: the listener's admit= function does not let this client in$"
FAILED = r"refused the connection: the listener's admit= function failed, and its log says why$"


async def yes(peer: trio_ucx.PeerInfo) -> bool:
    return True


async def no(peer: trio_ucx.PeerInfo) -> bool:
    return False


async def expect_echo(address: Any, worker: ucp.Worker, **options: Any) -> None:
    with trio.fail_after(15):
        async with trio_ucx.connect(address, worker=worker, **options) as client:
            await client.send(b"x")
            assert await client.receive() == b"x"


async def expect_refused(address: Any, worker: ucp.Worker, match: str = NOT_LET_IN, **options: Any) -> None:
    with trio.fail_after(15), pytest.raises(trio_ucx.NotAdmitted, match=match):
        await trio_ucx.connect(address, worker=worker, **options)


async def test_addresses_of_clients(worker: ucp.Worker) -> None:
    seen: list[trio_ucx.PeerInfo] = []

    async def admit(peer: trio_ucx.PeerInfo) -> bool:
        seen.append(peer)
        await trio.lowlevel.checkpoint()
        return peer.address is not None and peer.address[0] != "127.0.0.9"

    connections: list[trio_ucx.Connection] = []

    async def handler(connection: trio_ucx.Connection) -> None:
        connections.append(connection)
        await echo(connection)

    async with serving(handler, worker, admit=admit) as listener:
        await expect_echo(listener.address, worker)
        [peer], [connection] = seen, connections
        assert peer.address == connection.remote_address and peer == connection.peer
        assert (peer.certificate, peer.pid, peer.uid, peer.gid) == (None, None, None, None)
        assert peer.stated_pid == os.getpid() and peer.stated_software.startswith("trio_ucx ")
        await expect_refused(listener.address, worker, local_address="127.0.0.9")
        await until(lambda: listener.statistics().refused == 1)
        assert len(connections) == 1 and listener.statistics().handshaking == 0
        await expect_echo(listener.address, worker)


async def test_nothing_of_a_refused_client_reaches_ucx(worker: ucp.Worker) -> None:
    before = worker.statistics().endpoints
    during: list[int] = []

    async def admit(peer: trio_ucx.PeerInfo) -> bool:
        during.append(worker.statistics().endpoints)
        return False

    async with ucp.open_worker() as other, open_listener(worker, admit=admit) as listener:
        await expect_refused(listener.address, other)
        await until(lambda: listener.statistics().refused == 1)
        assert during == [before] and worker.statistics().endpoints == before
        assert listener.statistics().waiting == 0


async def test_users_at_a_unix_socket(worker: ucp.Worker, tmp_path: Path) -> None:
    """The kernel says who they are."""
    users = {os.getuid()}
    seen: list[trio_ucx.PeerInfo] = []

    async def admit(peer: trio_ucx.PeerInfo) -> bool:
        seen.append(peer)
        return peer.uid in users

    async with trio.open_nursery() as nursery:
        serve = partial(trio_ucx.serve_ucx, echo, f"unix:{tmp_path}/socket", worker=worker, admit=admit)
        server = await nursery.start(serve)
        await expect_echo(server.address, worker)
        assert (seen[0].pid, seen[0].uid, seen[0].gid, seen[0].address) == (os.getpid(), os.getuid(), os.getgid(), None)
        users.clear()
        await expect_refused(server.address, worker)
        nursery.cancel_scope.cancel()


async def test_certificates(worker: ucp.Worker) -> None:
    """Each client has a certificate of the same authority; the program chooses among them."""
    authority = trustme.CA()
    server = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    authority.issue_cert("localhost").configure_cert(server)
    authority.configure_trust(server)
    server.verify_mode = ssl.CERT_REQUIRED

    def tls_of(name: str) -> dict[str, Any]:
        client = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        authority.configure_trust(client)
        authority.issue_cert(f"{name}@example.org").configure_cert(client)
        return {"ssl_context": client, "server_hostname": "localhost"}

    async def admit(peer: trio_ucx.PeerInfo) -> bool:
        assert peer.certificate is not None
        return ("email", "friend@example.org") in peer.certificate["subjectAltName"]

    async with serving(echo, worker, ssl_context=server, admit=admit) as listener:
        await expect_echo(listener.address, worker, **tls_of("friend"))
        await expect_refused(listener.address, worker, **tls_of("stranger"))


async def test_only_clients_that_the_rest_lets_in(worker: ucp.Worker) -> None:
    """With a wrong key, ``admit=`` is not asked. It does not replace the key, nor protected mode."""
    seen: list[trio_ucx.PeerInfo] = []

    async def admit(peer: trio_ucx.PeerInfo) -> bool:
        seen.append(peer)
        return True

    key = b"sixteen letters!"
    async with serving(echo, worker, authkey=key, admit=admit) as listener:
        await expect_refused(listener.address, worker, "authkeys of the two sides differ", authkey=key[::-1])
        await expect_refused(listener.address, worker, "has no authkey")
        assert not seen
        await expect_echo(listener.address, worker, authkey=key)
        assert len(seen) == 1
    async with open_listener(worker, admit=yes) as listener:
        assert not listener._acceptor._exchange_options.keeps_strangers_out


async def returns_nothing(peer: trio_ucx.PeerInfo) -> bool:
    return None  # type: ignore[return-value]


async def returns_something_true(peer: trio_ucx.PeerInfo) -> bool:
    """As a function does that forgets to await."""
    return [no]  # type: ignore[return-value]


async def raises(peer: trio_ucx.PeerInfo) -> bool:
    raise KeyError("no such client")


async def times_out(peer: trio_ucx.PeerInfo) -> bool:
    with trio.fail_after(0):
        await trio.sleep_forever()
    raise AssertionError


async def exits(peer: trio_ucx.PeerInfo) -> bool:
    sys.exit("a mistake")


class Plain:
    def __call__(self, peer: trio_ucx.PeerInfo) -> Any:
        return True


@pytest.mark.parametrize(
    ("admit", "logged"),
    [
        (returns_nothing, "TypeError: admit= must return True or False, not None"),
        (returns_something_true, "TypeError: admit= must return True or False, not [<function"),
        (raises, "KeyError: 'no such client'"),
        (times_out, "TooSlowError"),
        (exits, "SystemExit: a mistake"),
        (Plain(), "TypeError: object bool can't be used in 'await' expression"),
    ],
    ids=lambda value: getattr(value, "__name__", None),
)
async def test_functions_that_fail(
    worker: ucp.Worker, admit: Any, logged: str, caplog: pytest.LogCaptureFixture
) -> None:
    """The client is not let in, and the server goes on. However many come, a minute has one line."""
    admits: list[Any] = [admit, admit, yes]

    async def one_after_the_other(peer: trio_ucx.PeerInfo) -> bool:
        return await admits.pop(0)(peer)  # type: ignore[no-any-return]

    async with serving(echo, worker, admit=one_after_the_other) as listener:
        for _ in range(2):
            await expect_refused(listener.address, worker, FAILED)
        await until(lambda: listener.statistics().refused == 2)
        await expect_echo(listener.address, worker)
    [record] = [record for record in caplog.records if record.levelno >= logging.WARNING]
    assert record.levelno == logging.ERROR and "turned away 127.0.0.1:" in record.getMessage()
    assert logged in logging.Formatter().format(record)


async def test_slow_function(worker: ucp.Worker, caplog: pytest.LogCaptureFixture) -> None:
    """It keeps nobody else waiting, and takes ``connect_timeout`` at most."""
    caplog.set_level(logging.INFO)
    asked = trio.Event()
    answered = trio.Event()

    async def admit(peer: trio_ucx.PeerInfo) -> bool:
        assert peer.address is not None
        if peer.address[0] == "127.0.0.9":
            asked.set()
            await answered.wait()
        return True

    async with serving(echo, worker, admit=admit, connect_timeout=60) as listener, trio.open_nursery() as nursery:
        nursery.start_soon(partial(expect_echo, listener.address, worker, local_address="127.0.0.9"))
        with trio.fail_after(15):
            await asked.wait()
        await expect_echo(listener.address, worker)
        assert listener.statistics().handshaking == 1
        answered.set()
    answered = trio.Event()
    async with serving(echo, worker, admit=admit, connect_timeout=2) as listener:
        with trio.fail_after(15), pytest.raises(OSError, match="admit= function took too long: no connection within 2"):
            await trio_ucx.connect(listener.address, worker=worker, local_address="127.0.0.9")
        await expect_echo(listener.address, worker)


async def test_listener_closes_while_it_is_asked(worker: ucp.Worker) -> None:
    asked, cancelled = trio.Event(), trio.Event()

    async def admit(peer: trio_ucx.PeerInfo) -> bool:
        asked.set()
        try:
            await trio.sleep_forever()
        finally:
            cancelled.set()
        raise AssertionError

    async with open_listener(worker, admit=admit) as listener, trio.open_nursery() as nursery:

        async def connect() -> None:
            with pytest.raises(trio_ucx.ServerDraining):
                await trio_ucx.connect(listener.address, worker=worker)

        nursery.start_soon(connect)
        with trio.fail_after(15):
            await asked.wait()
            await listener.aclose()
            await cancelled.wait()


async def test_server_drains_while_it_is_asked(worker: ucp.Worker) -> None:
    """The drain does not wait for it, and the client is not let in any more."""
    asked, answered = trio.Event(), trio.Event()

    async def admit(peer: trio_ucx.PeerInfo) -> bool:
        asked.set()
        await answered.wait()
        return True

    async def connect(address: tuple[str, int]) -> None:
        with pytest.raises(trio_ucx.ServerDraining):
            await trio_ucx.connect(address, worker=worker)

    async with trio.open_nursery() as nursery:
        server = await nursery.start(partial(trio_ucx.serve_ucx, echo, "127.0.0.1:0", worker=worker, admit=admit))
        nursery.start_soon(connect, server.address)
        with trio.fail_after(15):
            await asked.wait()
            with Stopwatch(5):
                await server.drain(timeout=10)


async def test_strangers_that_wait_for_it_do_not_fill_the_listener(
    worker: ucp.Worker, monkeypatch: pytest.MonkeyPatch
) -> None:
    """While it is asked about them, they are strangers, and make room, whatever more they have sent."""
    monkeypatch.setattr(server_side, "MAX_EXCHANGES", 4)
    monkeypatch.setattr(server_side, "GRACE", 0.1)
    monkeypatch.setattr(ControlStream, "has_unread", True)

    async def admit(peer: trio_ucx.PeerInfo) -> bool:
        assert peer.address is not None
        if peer.address[0] == "127.0.0.9":
            await trio.sleep_forever()
        return True

    async def flood(address: tuple[str, int]) -> None:
        with pytest.raises(OSError):
            await trio_ucx.connect(address, worker=worker, local_address="127.0.0.9", connect_timeout=60)

    async with serving(echo, worker, admit=admit, connect_timeout=60) as listener, trio.open_nursery() as nursery:
        for _ in range(4):
            nursery.start_soon(flood, listener.address)
        await until(lambda: listener.statistics().handshaking == 4)
        clients = list(listener._acceptor._clients)
        await until(lambda: all(client.awaits_decision for client in clients))
        assert all(client.is_answered and not client.is_let_in for client in clients)
        with Stopwatch(10):
            await expect_echo(listener.address, worker)
        nursery.cancel_scope.cancel()


@pytest.mark.parametrize("wrong", [True, "yes", lambda peer: True, Plain().__call__, print, [yes]])
async def test_values_that_are_no_async_function(wrong: Any) -> None:
    for opening in trio_ucx.open_ucx_listeners, partial(trio_ucx.serve_ucx, echo):
        with pytest.raises(TypeError, match="admit must be an async function that takes a trio_ucx.PeerInfo"):
            await opening(0, admit=wrong)  # type: ignore[operator]


async def test_without_a_client_that_speaks_the_protocol(worker: ucp.Worker) -> None:
    seen: list[Any] = []

    async def admit(peer: trio_ucx.PeerInfo) -> bool:
        seen.append(peer)
        return True

    async with open_listener(worker, admit=admit) as listener:
        for data in (b"", MAGIC, b"GET / HTTP/1.0\r\n\r\n"):
            async with await trio.open_tcp_stream(*listener.address) as stream:
                await stream.send_all(data or b"x")
        await until(lambda: listener.statistics().refused == 3)
        assert not seen
