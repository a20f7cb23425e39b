"""Whose the client's end of a connection is: what the kernel says, and when that does not count."""

from __future__ import annotations

import errno
import ipaddress
import os
import socket
import struct
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import attrs
import pytest
import trio
from networks import as_user, need, open_network

from trio_ucx._handshake import socket_owner
from trio_ucx._handshake.socket_owner import (
    End,
    SocketRecord,
    ask_netlink,
    decode_answer,
    encode_request,
    find_in_table,
    has_all_uids,
    read_tables,
)

ESTABLISHED, FIN_WAIT2, TIME_WAIT = 1, 5, 6
OTHER = 65534


def owner(control: Any) -> int | None:
    async def find() -> int | None:
        return await socket_owner.owner_of_peer(control)

    return trio.run(find)


@contextmanager
def connected(family: int, host: str, client_family: int, target: str) -> Iterator[tuple[socket.socket, socket.socket]]:
    """A client, and the listener's end."""
    with socket.socket(family) as listener, socket.socket(client_family) as client:
        if family == socket.AF_INET6:
            listener.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
        listener.bind((host, 0))
        listener.listen()
        client.connect((target, listener.getsockname()[1]))
        accepted, _ = listener.accept()
        with accepted:
            yield client, accepted


@contextmanager
def pair() -> Iterator[tuple[socket.socket, socket.socket]]:
    with connected(socket.AF_INET, "127.0.0.1", socket.AF_INET, "127.0.0.1") as both:
        yield both


def ends(accepted: socket.socket) -> tuple[End, End]:
    return End.of(accepted.getpeername()), End.of(accepted.getsockname())


@pytest.fixture(params=["netlink", "/proc"])
def source(
    request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> Callable[[End, End], SocketRecord | None]:
    """Asks the kernel one way. The other way is blocked."""

    def blocked(local: End, remote: End) -> None:
        raise OSError(errno.EAFNOSUPPORT, "netlink is blocked")

    if request.param == "netlink":
        monkeypatch.setattr(socket_owner, "read_tables", lambda *arguments: pytest.fail("tables are slow"))
        return ask_netlink
    monkeypatch.setattr(socket_owner, "ask_netlink", blocked)
    return partial(read_tables, "/proc/thread-self/net")


# ---- this machine's kernel ----


@pytest.mark.parametrize(
    ("family", "host", "client_family", "target"),
    [
        (socket.AF_INET, "127.0.0.1", socket.AF_INET, "127.0.0.1"),
        (socket.AF_INET, "127.0.0.1", socket.AF_INET6, "::ffff:127.0.0.1"),
        (socket.AF_INET6, "::", socket.AF_INET, "127.0.0.9"),
        (socket.AF_INET6, "::", socket.AF_INET6, "::ffff:127.0.0.1"),
        (socket.AF_INET6, "::", socket.AF_INET6, "::1"),
        (socket.AF_INET6, "::1", socket.AF_INET6, "::1"),
    ],
)
@pytest.mark.usefixtures("source")
def test_families(family: int, host: str, client_family: int, target: str) -> None:
    with connected(family, host, client_family, target) as (_, accepted):
        assert owner(accepted) == os.geteuid()


def test_what_the_kernel_says(source: Callable[[End, End], SocketRecord | None]) -> None:
    with pair() as (client, accepted):
        peer, own = ends(accepted)
        for control, local, remote in ((client, peer, own), (accepted, own, peer)):
            found = source(local, remote)
            assert found == SocketRecord(ESTABLISHED, os.geteuid(), os.fstat(control.fileno()).st_ino)
        assert source(peer, attrs.evolve(own, port=1)) is None


def test_a_socket_that_its_process_has_closed(source: Callable[[End, End], SocketRecord | None]) -> None:
    """Most kernels report it as root's."""
    with pair() as (client, accepted):
        peer, own = ends(accepted)
        client.close()
        found = source(peer, own)
        assert found is not None and found.inode == 0 and found.state != ESTABLISHED
        with pytest.raises(ConnectionResetError):
            owner(accepted)
        accepted.shutdown(socket.SHUT_WR)
        found = source(peer, own)
        assert found is None or (found.inode == 0 and found.state == TIME_WAIT)


@pytest.mark.usefixtures("source")
def test_a_socket_that_sends_no_more() -> None:
    with pair() as (client, accepted):
        client.shutdown(socket.SHUT_WR)
        with pytest.raises(ConnectionResetError):
            owner(accepted)


@pytest.mark.usefixtures("source")
def test_a_client_that_has_reset_the_connection() -> None:
    with pair() as (client, accepted):
        client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        client.close()
        with pytest.raises(OSError, match="not connected"):
            owner(accepted)


def test_a_socket_that_is_not_accepted(source: Callable[[End, End], SocketRecord | None]) -> None:
    """It is connected, and no process has it."""
    with socket.create_server(("127.0.0.1", 0)) as listener, socket.socket() as client:
        client.connect(listener.getsockname())
        found = source(End.of(client.getpeername()), End.of(client.getsockname()))
        assert found is not None and found.inode == 0
        assert owner(client) is None


@pytest.mark.parametrize("record", [SocketRecord(FIN_WAIT2, 0, 7), SocketRecord(ESTABLISHED, 0, 0), None])
def test_what_does_not_count(record: SocketRecord | None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(socket_owner, "ask_netlink", lambda local, remote: record)
    monkeypatch.setattr(socket_owner, "read_tables", lambda *arguments: record)
    with pair() as (_, accepted):
        assert owner(accepted) is None


def test_a_client_that_ends_meanwhile(monkeypatch: pytest.MonkeyPatch) -> None:
    """Another socket may have its address by then."""
    with pair() as (client, accepted):

        def ask(local: End, remote: End) -> SocketRecord:
            client.close()
            return SocketRecord(ESTABLISHED, 0, 7)

        monkeypatch.setattr(socket_owner, "ask_netlink", ask)
        with pytest.raises(ConnectionResetError):
            owner(accepted)


def test_a_kernel_without_the_service(monkeypatch: pytest.MonkeyPatch) -> None:
    """It says that there is no such socket, and says so of our own end, too."""
    monkeypatch.setattr(socket_owner, "ask_netlink", lambda local, remote: None)
    with pair() as (_, accepted):
        assert owner(accepted) == os.geteuid()


def test_nothing_can_be_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    def blocked(*arguments: Any) -> None:
        raise PermissionError(errno.EPERM, "blocked")

    with pair() as (_, accepted), monkeypatch.context() as patched:
        patched.setattr(socket_owner, "ask_netlink", blocked)
        patched.setattr("builtins.open", blocked)
        assert owner(accepted) is None


@pytest.mark.usefixtures("source")
def test_another_user() -> None:
    program = "import socket, sys; c = socket.create_connection(('127.0.0.1', int(sys.argv[1]))); sys.stdin.read()"
    with socket.create_server(("127.0.0.1", 0)) as listener:
        command = [*as_user(OTHER), sys.executable, "-c", program, str(listener.getsockname()[1])]
        with subprocess.Popen(command, stdin=subprocess.PIPE):
            accepted, _ = listener.accept()
            with accepted:
                assert owner(accepted) == OTHER


# ---- user namespaces and networks ----

#: Listens at each of the addresses; says who owns a client, by netlink and by the tables. Its clients are its own; or,
#: with "outside", each is somebody else's.
WHOSE = """
import socket, sys, trio
from trio_ucx._handshake import socket_owner

def say(accepted):
    ask = socket_owner.ask_netlink
    by_netlink = trio.run(socket_owner.owner_of_peer, accepted)
    socket_owner.ask_netlink = lambda local, remote: None
    by_tables = trio.run(socket_owner.owner_of_peer, accepted)
    socket_owner.ask_netlink = ask
    print(by_netlink, by_tables, flush=True)

outside, *hosts = sys.argv[1:]
for host in hosts:
    [(family, *_, name)] = socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM)
    with socket.socket(family) as listener, socket.socket(family) as client:
        listener.bind(name)
        listener.listen()
        if outside == "outside":
            print(listener.getsockname()[1], flush=True)
        else:
            client.connect(listener.getsockname())
        say(listener.accept()[0])
"""


@pytest.mark.parametrize(
    ("namespace", "own", "others"),
    [(["--map-root-user"], "0", "None"), ([], "None", "None")],
    ids=["this user is root", "no user has a number"],
)
def test_user_namespaces(namespace: list[str], own: str, others: str) -> None:
    """A user without a number there is reported as uid 65534, which may be that of the listener's process, too."""
    under = ["unshare", "--user", *namespace]
    try:
        subprocess.run([*under, "true"], check=True, capture_output=True)
    except (OSError, subprocess.CalledProcessError) as error:
        pytest.skip(f"no user namespaces: {error}")
    users = {os.geteuid(): own, **({OTHER: others} if os.geteuid() == 0 else {})}
    for uid, wanted in users.items():
        command = [*under, sys.executable, "-c", WHOSE, "outside", "127.0.0.1"]
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process, socket.socket() as client:
            assert process.stdout is not None
            port = int(process.stdout.readline())
            if uid == os.geteuid():
                client.connect(("127.0.0.1", port))
            else:
                os.fchown(client.fileno(), uid, uid)  # as if that user had made it
                client.connect(("127.0.0.1", port))
            assert process.stdout.readline().split() == [wanted, wanted]


def test_addresses() -> None:
    """Addresses that are not loopback's, also with a scope."""
    need("ip", "netns", "list", why="network namespaces")
    with open_network() as network:
        one, two = network.host(), network.host()
        network.cable((one, "cable", "10.200.12.1/24"), (two, "cable", "10.200.12.2/24"))
        for address in ("fd00:212::2", "fe80::2"):
            two.ip("addr", "add", f"{address}/64", "dev", "cable", "nodad")
        hosts = ["10.200.12.2", "fd00:212::2", "fe80::2%cable", "127.0.0.1", "::1"]
        said = two.run(sys.executable, "-c", WHOSE, "inside", *hosts)
    assert said.splitlines() == ["0 0"] * len(hosts)


@pytest.mark.parametrize(
    ("uid_map", "everything"),
    [
        ("         0          0 4294967295\n", True),
        ("0 0 2147483648\n2147483648 2147483648 2147483647\n", True),
        ("0 1000 1\n", False),
        ("0 1000 1\n1 100000 65536\n", False),
        ("", False),
    ],
)
def test_uid_maps(uid_map: str, everything: bool) -> None:
    assert has_all_uids(uid_map) is everything


# ---- formats ----

LOCAL, REMOTE = End(bytes([10, 0, 0, 1]), 40000), End(bytes([127, 0, 0, 1]), 443)
HEADER = b"  sl  local_address rem_address   st tx_queue rx_queue tr tm->when retrnsmt   uid  timeout inode\n"


def line(local: str, remote: str, state: str, uid: int, inode: int) -> bytes:
    text = (
        f"   0: {local} {remote} {state} 00000000:00000000 00:00000000 00000000 {uid:5d}        0 {inode} 1 0000 20 4"
    )
    return f"{text:<149}\n".encode()


def word(*numbers: int) -> str:
    """Four bytes of an address as this machine writes them in a table."""
    return f"{int.from_bytes(numbers, sys.byteorder):08X}"


def test_tables() -> None:
    local, remote = f"{word(10, 0, 0, 1)}:9C40", f"{word(127, 0, 0, 1)}:01BB"
    found = SocketRecord(ESTABLISHED, 1000, 4711)
    right = line(local, remote, "01", 1000, 4711)
    others = [line(remote, local, "01", 0, 1), line(local, f"{word(127, 0, 0, 1)}:01BC", "01", 0, 2)]
    assert find_in_table([HEADER, *others, right, *others], LOCAL, REMOTE) == found
    assert find_in_table([HEADER, *others], LOCAL, REMOTE) is None
    zeros = f"{'0' * 16}{word(0, 0, 255, 255)}"
    mapped = line(f"{zeros}{local}", f"{zeros}{remote}", "06", 0, 0)
    assert find_in_table([mapped], LOCAL, REMOTE, mapped=True) == SocketRecord(TIME_WAIT, 0, 0)
    assert find_in_table([mapped], LOCAL, REMOTE) is None
    ip = ipaddress.ip_address("fd00::1:2:3:4").packed
    six = f"{word(*ip[:4])}{word(*ip[4:8])}{word(*ip[8:12])}{word(*ip[12:])}"
    table = line(f"{six}:9C40", f"{six}:01BB", "01", 1000, 4711)
    assert find_in_table([table], End(ip, 40000, 3), End(ip, 443, 3)) == found


def test_a_long_table_is_not_read_to_its_end(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    right = line(f"{word(*LOCAL.ip)}:9C40", f"{word(*REMOTE.ip)}:01BB", "01", 1000, 4711)
    (tmp_path / "tcp").write_bytes(HEADER + right)
    assert read_tables(str(tmp_path), LOCAL, REMOTE) == SocketRecord(ESTABLISHED, 1000, 4711)
    monkeypatch.setattr(socket_owner, "MAX_SOCKETS", 1)
    assert read_tables(str(tmp_path), LOCAL, REMOTE) is None


def answer(kind: int, body: bytes) -> bytes:
    return struct.pack("=IHHII", 16 + len(body), kind, 0, 0, 77) + body


def test_netlink_messages() -> None:
    request = encode_request(LOCAL, REMOTE)
    assert len(request) == 72 and struct.unpack_from("=IHH", request) == (72, 20, 1)
    assert request[16:18] == bytes([socket.AF_INET, socket.IPPROTO_TCP])
    assert request[24:28] == struct.pack(">HH", 40000, 443)
    assert request[28:32] == LOCAL.ip and request[44:48] == REMOTE.ip
    six = End(bytes(range(16)), 1, 7)
    assert encode_request(six, six)[16] == socket.AF_INET6
    assert encode_request(six, six)[28:64] == six.ip * 2 + struct.pack("=I", 7)
    body = struct.pack("=BBBB48sIIIII", socket.AF_INET, 1, 0, 0, bytes(48), 0, 0, 0, 1000, 4711)
    assert decode_answer(answer(20, body + b"attributes")) == SocketRecord(ESTABLISHED, 1000, 4711)
    with pytest.raises(FileNotFoundError):
        decode_answer(answer(2, struct.pack("=i", -errno.ENOENT) + bytes(16)))
    for wrong in (b"", bytes(15), answer(20, body[:-1]), answer(3, body), answer(2, b"")):
        with pytest.raises(OSError, match="no answer"):
            decode_answer(wrong)


def test_ends() -> None:
    assert End.of(("127.0.0.1", 5)) == End.of(("::ffff:127.0.0.1", 5, 0, 0)) == End(b"\x7f\0\0\1", 5)
    assert End.of(("fe80::1%lo", 5, 0, 3)) == End(b"\xfe\x80" + bytes(13) + b"\1", 5, 3)
