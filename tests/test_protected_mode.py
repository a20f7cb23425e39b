"""Protected mode: a TCP listener that demands no credentials lets in only clients of its own user, on its own machine.

How the kernel is asked for the user is tested in ``test_socket_owner.py``.
"""

from __future__ import annotations

import contextlib
import errno
import os
import socket
import ssl
import struct
import subprocess
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import trio
import trustme
from helpers import Certificates, open_listener, open_peer, until
from networks import Host, as_user, open_network

import trio_ucx
from trio_ucx import ucp
from trio_ucx._handshake import handshake as handshake_side
from trio_ucx._handshake import socket_owner
from trio_ucx._handshake.exchange import Exchange, FrameKind, ProtectedMode
from trio_ucx._handshake.peer_description import PeerDescription
from trio_ucx._rules.wire import MAGIC, VERSION
from trio_ucx._util import limited_log

KEY = "sixteen letters!"
CURES = ("authkey=", "ssl.CERT_REQUIRED", "allow_anyone=True")
ONE, TWO, ALSO_TWO = "10.200.9.1", "10.200.9.2", "10.200.9.3"


# ---- two hosts ----


#: A program that prints which addresses count as addresses of this machine.
WHO_IS_HERE = """
import socket, sys
from trio_ucx._handshake.control_stream import leads_to_this_machine

class Control:
    def __init__(self, peer):
        [(self.family, *_, self.peer)] = socket.getaddrinfo(peer, 1, type=socket.SOCK_STREAM)
    def getpeername(self):
        return self.peer
    def getsockname(self):
        return ("another address", 1)

print([peer for peer in sys.argv[1:] if leads_to_this_machine(Control(peer))])
"""


@pytest.fixture
async def hosts() -> AsyncIterator[tuple[Host, Host]]:
    with open_network() as network:
        one, two = network.host(), network.host()
        network.cable((one, "cable", f"{ONE}/24"), (two, "cable", f"{TWO}/24"))
        two.ip("addr", "add", f"{ALSO_TWO}/24", "dev", "cable")
        for address in ("fd00:209::2", "fd00:209::3", "fe80::2"):
            two.ip("addr", "add", f"{address}/64", "dev", "cable", "nodad")
        await network.ready()
        yield one, two


async def test_two_hosts(hosts: tuple[Host, Host]) -> None:
    one, two = hosts
    async with open_peer("host", [TWO], {"allow_anyone": False}, under=two.under) as server:
        [address] = await server.hear()

        async def visit(client: Host, **options: Any) -> list[Any]:
            async with open_peer("visitor", options, [1], under=client.under) as peer:
                await peer.tell(address)
                said: list[Any] = await peer.hear()
                return said

        async def refused() -> None:
            said = await visit(one)
            assert said[:2] == ["NotAdmitted", errno.EACCES] and said[3] < 9, said
            assert all(word in said[2] for word in ("protected mode", "another machine", *CURES)), said

        async def let_in() -> None:
            assert (await visit(two, local_address=ALSO_TWO))[0] == "connected"

        async with trio.open_nursery() as nursery:
            nursery.start_soon(refused)
            nursery.start_soon(let_in)
        await server.tell()
        _, [line, *_] = await server.hear()
        assert line.startswith(f"WARNING turned away {ONE}:") and all(cure in line for cure in CURES)


async def test_addresses_of_this_machine(hosts: tuple[Host, Host]) -> None:
    """Also if the kernel lets every address be bound. (A broadcast address can always be bound.)"""
    _, two = hosts
    ours = ["127.0.0.1", "127.0.0.9", "::1", TWO, ALSO_TWO, "fd00:209::2", "fd00:209::3", "fe80::2%cable"]
    others = [
        ONE,
        "10.200.9.255",
        "10.200.9.0",
        "192.0.2.1",
        "fd00:209::1",
        "fd00:209::",
        "fe80::1%cable",
        "2001:db8::1",
    ]
    for nonlocal_bind in (0, 1):
        for version in ("ipv4", "ipv6"):
            two.run("sh", "-c", f"echo {nonlocal_bind} > /proc/sys/net/{version}/ip_nonlocal_bind")
        assert two.run(sys.executable, "-c", WHO_IS_HERE, *ours, *others).strip() == repr(ours)


# ---- users ----

OTHER, THIRD = 65534, 65533


@pytest.mark.parametrize("host", ["127.0.0.1", "::1"])
async def test_users(host: str) -> None:
    """A listener lets in its own user and root."""
    other, third = as_user(OTHER), as_user(THIRD)
    for server, clients in (((), {(): 0, tuple(other): OTHER}), (other, {(): 0, tuple(other): 0, tuple(third): THIRD})):
        async with open_peer("host", [host], {"allow_anyone": False}, under=server) as listening:
            [address] = await listening.hear()
            for client, refused in clients.items():
                async with open_peer("visitor", {}, [1], under=client) as peer:
                    await peer.tell(address)
                    said = await peer.hear()
                if not refused:
                    assert said[0] == "connected", said
                else:
                    assert said[0] == "NotAdmitted", said
                    assert all(word in said[2] for word in (f"another user (uid {refused})", *CURES)), said
            await listening.tell()
            _, log = await listening.hear()
            [line] = [each for each in log if "shared memory" not in each]
            assert line.startswith("WARNING turned away ") and ": it belongs to another user: protected mode" in line


#: Connects, sends a preamble and a request, and ends.
SENDS_AND_ENDS = """
import socket, sys
client = socket.create_connection((sys.argv[1], int(sys.argv[2])))
client.sendall(bytes.fromhex(sys.argv[3]))
"""


async def test_a_client_that_has_ended(
    worker: ucp.Worker, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The kernel reports the socket that it leaves as root's; but nothing of its request is read."""
    caplog.set_level("INFO", "trio_ucx")
    monkeypatch.delattr(PeerDescription, "decode")
    begin = MAGIC + struct.pack("<HH", VERSION, 0) + bytes(32) + struct.pack("<IB", 9, FrameKind.OPEN) + bytes(8)
    under = as_user(OTHER) if os.geteuid() == 0 else []
    async with open_listener(worker) as listener:
        command = [*under, sys.executable, "-c", SENDS_AND_ENDS, *map(str, listener.address), begin.hex()]
        # The loop stands still meanwhile, so that the listener accepts a client that has ended.
        subprocess.run(command, check=True, timeout=60)
        await until(lambda: listener.statistics().refused == 1)
    [line] = [record.getMessage() for record in caplog.records if "turned away" in record.getMessage()]
    assert "it left without sending anything" in line


async def test_a_client_that_nobody_knows(worker: ucp.Worker, monkeypatch: pytest.MonkeyPatch) -> None:
    async def owner(control: object) -> None:
        return None

    monkeypatch.setattr(handshake_side, "owner_of_peer", owner)
    async with open_listener(worker) as listener:
        assert not await connects(worker, listener)


async def test_without_netlink(worker: ucp.Worker, monkeypatch: pytest.MonkeyPatch) -> None:
    def blocked(*ends: object) -> None:
        raise OSError(errno.EAFNOSUPPORT, "netlink is blocked")

    monkeypatch.setattr(socket_owner, "ask_netlink", blocked)
    async with open_listener(worker) as listener:
        assert await connects(worker, listener)


async def test_only_root_counts_besides_this_user(worker: ucp.Worker, monkeypatch: pytest.MonkeyPatch) -> None:
    for uid, wanted in ((os.geteuid(), True), (0, True), (os.geteuid() + 1, False)):

        async def owner(control: object, uid: int = uid) -> int:
            return uid

        monkeypatch.setattr(handshake_side, "owner_of_peer", owner)
        async with open_listener(worker) as listener:
            assert await connects(worker, listener) is wanted


# ---- one process, in which clients seem to be on another host ----


@pytest.fixture
def from_elsewhere(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(handshake_side, "leads_to_this_machine", lambda control: control.family == socket.AF_UNIX)
    monkeypatch.setattr(handshake_side, "is_loopback", lambda host: False)  # nobody elsewhere has only such addresses


async def connects(worker: ucp.Worker, listener: trio_ucx.Listener, **options: Any) -> bool:
    """Whether the listener lets such a client in, rather than refusing it by protected mode."""
    with trio.fail_after(15):
        try:
            client = await trio_ucx.connect(listener.address, worker=worker, **options).__aenter__()
        except trio_ucx.NotAdmitted as error:
            assert "protected mode" in str(error) and all(cure in str(error) for cure in CURES)
            return False
        (await listener.accept()).abort()
        client.abort()
        return True


def warnings(caplog: pytest.LogCaptureFixture) -> list[str]:
    """Without those about shared memory, which clients that seem to be elsewhere do not use."""
    found = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    return [text for text in found if "shared memory" not in text]


@pytest.mark.usefixtures("from_elsewhere")
async def test_what_lets_a_client_in(worker: ucp.Worker, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    key = KEY.encode()
    for host, options, wanted in (
        ("127.0.0.1", {}, False),
        ("::1", {"isolate": True}, False),
        ("127.0.0.1", {"allow_anyone": True}, True),
        ("127.0.0.1", {"authkey": key}, True),
        (f"unix:{tmp_path}/socket", {}, True),
    ):
        async with open_listener(worker, host=host, **options) as listener:
            given = {"authkey": key} if "authkey" in options else {}
            assert await connects(worker, listener, **given) is wanted
            await until(lambda listener=listener, wanted=wanted: listener.statistics().refused == (not wanted))
    assert len(warnings(caplog)) == 2


@pytest.mark.parametrize(("interval", "levels"), [(60, ["WARNING"]), (0, ["WARNING", *4 * ["INFO"]])])
@pytest.mark.usefixtures("from_elsewhere")
async def test_the_first_refusal_is_a_warning(
    worker: ucp.Worker,
    interval: float,
    levels: list[str],
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    caplog.set_level("INFO", "trio_ucx")
    monkeypatch.setattr(limited_log, "LOG_INTERVAL", interval)
    async with open_listener(worker) as listener:
        for _ in range(5):
            assert not await connects(worker, listener)
        await until(lambda: listener.statistics().refused == 5)
    records = [each for each in caplog.records if "turned away" in each.getMessage()]
    assert [each.levelname for each in records] == levels
    assert all(word in records[0].getMessage() for word in ("127.0.0.1:", *CURES))


@pytest.mark.parametrize(
    "more", [b"", b"\0" * 100_000, struct.pack("<IB", 2**32 - 1, FrameKind.OPEN), bytes(range(256))]
)
@pytest.mark.usefixtures("from_elsewhere")
async def test_a_stranger_gets_no_further_than_the_preamble(
    worker: ucp.Worker, more: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The listener reads nothing after the preamble, whatever it is."""
    monkeypatch.delattr(PeerDescription, "decode")
    async with open_listener(worker) as listener, await trio.open_tcp_stream(*listener.address) as stream:
        got = bytearray()
        with trio.fail_after(15), contextlib.suppress(trio.BrokenResourceError):
            await stream.send_all(MAGIC + struct.pack("<HH", VERSION, 0) + bytes(32) + more)
            async for chunk in stream:
                got += chunk
        if len(more) < 1000:  # otherwise the kernel may drop what a closed socket has sent
            assert got.startswith(MAGIC) and b"protected mode" in got
        await until(lambda: listener.statistics().refused == 1)


def test_a_server_refuses_before_it_reads() -> None:
    """Also a client of another version, or with an authkey."""
    for version, flags in ((VERSION, 0), (VERSION + 1, 0), (VERSION, 1), (VERSION, 0xFFFF)):
        server = Exchange(is_client=False, software="", authkey=None)
        server.protected = ProtectedMode("it is a test")
        server.receive_data(MAGIC + struct.pack("<HH", version, flags) + bytes(32) + b"\xff" * 100)
        with pytest.raises(Exception, match="protected mode"):
            server.next_event()
        assert server.next_event() is None and len(server.data_to_send()) < 600


# ---- TLS ----


def contexts() -> Certificates:
    """For "localhost"; the client has a certificate, and both sides trust the authority."""
    authority = trustme.CA()
    server, client = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER), ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    for context, name in ((server, "localhost"), (client, "client")):
        authority.issue_cert(name).configure_cert(context)
        authority.configure_trust(context)
    return Certificates(server, client)


@pytest.mark.usefixtures("from_elsewhere")
async def test_only_required_certificates_lift_it(worker: ucp.Worker, caplog: pytest.LogCaptureFixture) -> None:
    for verify_mode, options, wanted, warned in (
        (ssl.CERT_NONE, {}, False, True),
        (ssl.CERT_OPTIONAL, {}, False, True),
        (ssl.CERT_REQUIRED, {}, True, False),
        (ssl.CERT_NONE, {"allow_anyone": True}, True, False),
    ):
        caplog.clear()
        both = contexts()
        both.server.verify_mode = verify_mode
        async with open_listener(worker, ssl_context=both.server, **options) as listener:
            opening = warnings(caplog)
            assert len(opening) == warned
            if warned:
                assert f":{listener.address[1]} " in opening[0] and all(cure in opening[0] for cure in CURES)
            given = {"ssl_context": both.client, "server_hostname": "localhost"}
            assert await connects(worker, listener, **given) is wanted


async def test_warning_of_listeners_with_tls(
    worker: ucp.Worker, certificates: Certificates, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """One line for all addresses; none for a Unix socket, or with a key."""
    for listener in await trio_ucx.open_ucx_listeners(0, worker=worker, ssl_context=certificates.server):
        await listener.aclose()
    [line] = warnings(caplog)
    assert "0.0.0.0:" in line and "[::]:" in line
    for host, key in ((f"unix:{tmp_path}/socket", None), ("127.0.0.1", KEY.encode())):
        async with open_listener(worker, host=host, ssl_context=certificates.server, authkey=key):
            pass
    assert len(warnings(caplog)) == 1


async def test_clients_of_this_machine(worker: ucp.Worker, certificates: Certificates) -> None:
    async with open_listener(worker) as listener:
        assert await connects(worker, listener)
    async with open_listener(worker, ssl_context=certificates.server) as listener:
        assert await connects(worker, listener, ssl_context=certificates.client, server_hostname="localhost")


async def test_wrong_argument(worker: ucp.Worker) -> None:
    with pytest.raises(TypeError, match="allow_anyone must be a bool, not str"):
        await trio_ucx.open_ucx_listeners(0, worker=worker, allow_anyone="yes")  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="allow_anyone must be a bool"):
        await trio_ucx.serve_ucx(lambda _: trio.sleep(0), 0, worker=worker, allow_anyone=1)
