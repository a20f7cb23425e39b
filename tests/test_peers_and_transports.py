"""Who the peer of a connection is, how the connection reaches it, and whether it answers."""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import socket
import ssl
from pathlib import Path

import pytest
import trio
import trustme
from helpers import open_listener, open_pair, open_peer, until

import trio_ucx
from trio_ucx import ucp
from trio_ucx._handshake import handshake


async def test_peer(worker: ucp.Worker) -> None:
    async with open_pair(worker) as pair:
        for connection in pair:
            peer = connection.peer
            assert (peer.certificate, peer.pid, peer.uid, peer.gid) == (None, None, None, None)
            assert (peer.stated_host, peer.stated_pid) == (socket.gethostname(), os.getpid())
            assert peer.stated_software.startswith(f"trio_ucx {trio_ucx.__version__}, UCX ")


async def test_peer_at_a_unix_socket(worker: ucp.Worker, tmp_path: Path) -> None:
    async with (
        open_listener(worker, host=f"unix:{tmp_path}/socket") as listener,
        trio_ucx.connect(listener.address, worker=worker) as client,
        await listener.accept() as server,
    ):
        for connection in (client, server):
            peer = connection.peer
            assert (peer.pid, peer.uid, peer.gid) == (os.getpid(), os.getuid(), os.getgid())
            assert peer.certificate is None


async def test_peer_with_a_certificate(worker: ucp.Worker) -> None:
    authority = trustme.CA()
    server_side, client_side = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER), ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    authority.issue_cert("localhost").configure_cert(server_side)
    authority.issue_cert("client@example.org", common_name="a client").configure_cert(client_side)
    for context in (server_side, client_side):
        authority.configure_trust(context)
    server_side.verify_mode = ssl.CERT_REQUIRED
    [listener] = await trio_ucx.open_ucx_listeners(0, host="127.0.0.1", worker=worker, ssl_context=server_side)
    options = {"ssl_context": client_side, "server_hostname": "localhost"}
    async with listener, trio_ucx.connect(listener.address, worker=worker, **options) as client:  # type: ignore[arg-type]
        async with await listener.accept() as server:
            assert server.peer.certificate is not None and client.peer.certificate is not None
            assert server.peer.certificate["subject"][-1] == (("commonName", "a client"),)
            assert client.peer.certificate["subjectAltName"] == (("DNS", "localhost"),)


async def test_transports(worker: ucp.Worker, transports: str) -> None:
    async with open_pair(worker) as pair:
        for connection in pair:
            assert connection.shared_memory is (transports != "tcp")
            names = {each.partition("/")[0] for each in connection.transports}
            if transports == "tcp":
                assert names == {"tcp"} and "has no shared memory" in str(connection.why_not_shared_memory)
            else:
                assert "sysv" in names and connection.why_not_shared_memory is None
    async with open_pair(worker, shared_memory=False) as (client, _):
        assert client.why_not_shared_memory == "shared_memory=False"


async def test_fall_back_is_logged_once(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch, transports: str
) -> None:
    """Both sides have shared memory, on one machine, and cannot use it together; not if one does not want it."""
    monkeypatch.setattr(handshake, "_fallbacks", set())
    small = {"SYSV_SEG_SIZE": "8000", "POSIX_SEG_SIZE": "8000"}
    async with (
        ucp.open_worker(config={"TLS": transports}) as one,
        ucp.open_worker(config={"TLS": transports, **small}) as other,
    ):
        async with open_pair(one, other, shared_memory=False):
            assert not caplog.records
        for _ in range(2):
            async with open_pair(one, other) as (client, _):
                assert not client.shared_memory
    said = [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]
    if transports == "tcp":
        assert not said
    else:
        assert len(said) == 2, said  # each side says it from its point of view
        assert any(text.endswith(f"does without shared memory: {client.why_not_shared_memory}") for text in said)


async def test_ping(worker: ucp.Worker) -> None:
    async with open_pair(worker) as (client, server):
        for connection in (client, server):
            assert 0 < await connection.ping() < 5
        seconds: list[float] = []

        async def ping() -> None:
            seconds.append(await client.ping())

        async with trio.open_nursery() as nursery:
            for _ in range(20):
                nursery.start_soon(ping)
        assert len(seconds) == 20
        await server.aclose()
        with pytest.raises(trio_ucx.PeerClosed):
            await client.ping()
        await client.aclose()
        with pytest.raises(trio.ClosedResourceError):
            await client.ping()


@pytest.mark.parametrize("size", [10, 1000, 2**22])
async def test_ping_while_messages_are_unread(worker: ucp.Worker, size: int) -> None:
    """Both sides answer; so does a peer that closes, and waits until its last messages are received."""

    async def send() -> None:
        with contextlib.suppress(trio.ClosedResourceError):
            while True:
                await client.send(bytes(size))

    async with open_pair(worker) as (client, server), trio.open_nursery() as nursery:
        nursery.start_soon(send)
        await until(lambda: client.statistics().queued_sends or client.statistics().bytes_sent >= 2**20)
        for connection in (client, server):
            assert await connection.ping() < 5
        nursery.start_soon(client.aclose)
        await until(lambda: client.closed)
        await trio.testing.wait_all_tasks_blocked()
        assert server.peer_state is trio_ucx.PeerState.OPEN and await server.ping() < 5
        with pytest.raises(trio.EndOfChannel):
            while True:
                assert len(await server.receive()) == size
        with pytest.raises(trio_ucx.PeerClosed):
            await server.ping()


@pytest.mark.parametrize("end", ["goes on", "is killed", "we abort"])
async def test_ping_of_a_stopped_peer(worker: ucp.Worker, transports: str, end: str) -> None:
    async with (
        open_listener(worker) as listener,
        open_peer("client_of", list(listener.address), 7, transports=transports) as peer,
    ):
        connection = await listener.accept()
        assert await connection.receive(tag=1) == b"7"
        os.kill(peer.process.pid, signal.SIGSTOP)
        answered: list[float | BaseException] = []

        async def ping() -> None:
            try:
                answered.append(await connection.ping())
            except (trio.BrokenResourceError, trio.ClosedResourceError) as error:
                answered.append(error)

        async with trio.open_nursery() as nursery:
            with trio.move_on_after(0.05) as scope:
                await connection.ping()
            assert scope.cancelled_caught
            nursery.start_soon(ping)
            await trio.testing.wait_all_tasks_blocked()
            assert not answered
            with trio.fail_after(15):
                if end == "we abort":
                    connection.abort()
                else:
                    peer.process.kill() if end == "is killed" else os.kill(peer.process.pid, signal.SIGCONT)
                await until(lambda: answered)
        if end == "goes on":
            assert isinstance(answered[0], float) and answered[0] > 0
        else:
            assert type(answered[0]) is (trio.ClosedResourceError if end == "we abort" else trio_ucx.PeerLost)
        connection.abort()
        if end != "is killed":
            peer.process.kill()
