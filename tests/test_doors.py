"""Every descriptor, port, name and segment of a process that uses all of trio_ucx, and who can reach each.

What is not in :data:`DOORS` fails the test: a new socket needs a row there, and in security.md. So does a descriptor
that the programs which the process starts would inherit.
"""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import stat
import struct
import subprocess
import sys
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import attrs
import pytest
import trio
from environments import NOBODY
from helpers import free_port, open_peer
from networks import as_user

PROGRAM = Path(__file__).parent / "open_everything.py"
#: Who can reach what; the names of the kinds are those that :func:`describe` gives. "this user" includes root.
DOORS = {
    "eventfd": "nobody",
    "eventpoll": "nobody",
    "timerfd": "nobody",
    "pidfd": "nobody",
    "pipe": "nobody",
    "memfd 0777": "nobody",
    "deleted segment 0600": "nobody",
    "nameless Unix socket": "nobody",
    "connected TCP socket": "its peer",
    "connected Unix socket": "its peer",
    "wake-up socket 0600 in 0700": "this user",
    "System V segment 0600": "this user",
    "Unix listener 0700": "this user",
    "data port": "whoever shows a key, and admitted hosts",
    "control port": "everybody, until the handshake",
    "raw port": "everybody",
}
#: Without these the program has not opened what it should.
OPEN = {"wake-up socket 0600 in 0700", "Unix listener 0700", "data port", "control port", "raw port", "memfd 0777"}
LISTENS = "0A"
NO_PATH = "a socket that the kernel does not list"


@attrs.frozen
class Door:
    """A descriptor or a segment.

    Attributes:
        kind: a key of DOORS, if it is known.
        where: the path, the address or the id by which others could reach it; None if there is none.
    """

    kind: str
    where: str | int | tuple[str, int] | None = None


def mode_of(path: str | Path) -> str:
    return f"{stat.S_IMODE(os.lstat(path).st_mode):04o}"


def sockets(pid: int) -> dict[str, Door]:
    """The sockets of a process by their inode numbers. The kinds of ports are yet to be found."""
    found: dict[str, Door] = {}
    own = {os.readlink(entry) for entry in Path(f"/proc/{pid}/fd").iterdir()}
    folder = Path(f"/proc/{pid}/net")
    for name in ("tcp", "tcp6", "udp", "udp6", "raw", "raw6"):
        for line in (folder / name).read_text().splitlines()[1:]:
            _, local, _, state, *_, inode = line.split()[:10]
            host, port = local.split(":")
            kind = {LISTENS: "port"}.get(state, "connected TCP socket") if name.startswith("tcp") else name
            where = (socket.inet_ntoa(struct.pack("=I", int(host[-8:], 16))), int(port, 16))
            found[inode] = Door(kind, where if kind == "port" else None)
    for line in (folder / "unix").read_text().splitlines()[1:]:
        _, _, _, flags, _, _, inode, *path = line.split()
        listens = int(flags, 16) & 0x10000
        if f"socket:[{inode}]" not in own:
            continue  # another process may be closing it
        if not path:
            found[inode] = Door("nameless Unix socket")
        elif not path[0].startswith("/"):
            found[inode] = Door("abstract Unix socket", path[0])
        elif path[0].endswith(".wake"):
            kind = f"wake-up socket {mode_of(path[0])} in {mode_of(Path(path[0]).parent)}"
            found[inode] = Door(kind, path[0])
        else:
            kind = f"Unix listener {mode_of(path[0])}" if listens else "connected Unix socket"
            found[inode] = Door(kind, path[0] if listens else None)
    for line in (folder / "netlink").read_text().splitlines()[1:]:
        found[line.split()[9]] = Door("netlink socket")
    return found


def closes_on_exec(pid: int, descriptor: str) -> bool:
    flags = re.search(r"^flags:\s+(\d+)$", Path(f"/proc/{pid}/fdinfo/{descriptor}").read_text(), re.MULTILINE)
    assert flags is not None
    return bool(int(flags[1], 8) & os.O_CLOEXEC)


def doors(pid: int, control: int, raw: int) -> list[Door]:
    """Everything that a process has open, and its System V segments. Its owner is this user."""
    listed, found = sockets(pid), list[Door]()
    for entry in (each for each in Path(f"/proc/{pid}/fd").iterdir() if int(each.name) > 2):  # not the test's streams
        target = os.readlink(entry)
        if match := re.fullmatch(r"socket:\[(\d+)\]", target):
            door = listed.get(match[1], Door(NO_PATH))
            if door.kind == "port":
                assert isinstance(door.where, tuple)
                known = {control: "control port", raw: "raw port"}
                door = Door(known.get(door.where[1], "data port"), door.where)
        elif match := re.fullmatch(r"anon_inode:\[(\w+)\]|(pipe):\[\d+\]", target):
            door = Door(match[1] or match[2])
        else:
            named = {"/memfd:": "memfd", "/dev/shm/ucx_shm": "deleted segment"}
            [kind] = [kind for start, kind in named.items() if target.startswith(start)] or ["file"]
            deleted = target.endswith(" (deleted)")
            mode = f"{stat.S_IMODE(entry.stat().st_mode):04o}"
            door = Door(f"{kind} {mode}" if deleted else f"{target} {mode}", str(entry))
            assert entry.stat().st_uid == os.geteuid()
        found.append(door if closes_on_exec(pid, entry.name) else Door(f"inherited {door.kind}"))
    for row in Path("/proc/sysvipc/shm").read_text().splitlines()[1:]:
        _, id, mode, _, creator, _, _, uid, *_ = row.split()
        if int(creator) == pid:
            assert int(uid) == os.geteuid()
            found.append(Door(f"System V segment {int(mode, 8) & 0o777:04o}", int(id)))
    for path in (Path(each.where) for each in found if isinstance(each.where, str) and "socket" in each.kind):
        assert path.lstat().st_uid == path.parent.lstat().st_uid == os.geteuid()
    return found


@asynccontextmanager
async def everything(folder: Path, transports: str) -> AsyncIterator[tuple[int, list[Door]]]:
    folder.chmod(0o755)
    start = open_peer(
        "everything",
        str(folder),
        program=PROGRAM,
        transports=transports,
        under=["sh", "-c", 'umask 077; exec "$@"', "sh"],
        TRIO_UCX_REPORT="USR1",
    )
    async with start as peer:
        yield peer.process.pid, doors(peer.process.pid, *await peer.hear())


KINDS = pytest.mark.parametrize("kind", ["sysv", "posix"])


@KINDS
async def test_every_door_is_known(tmp_path: Path, kind: str) -> None:
    async with everything(tmp_path, f"tcp,{kind},self") as (_, found):
        counts = Counter(door.kind for door in found)
        assert not counts.keys() - DOORS.keys(), counts
        assert not OPEN - counts.keys(), counts
        assert counts["wake-up socket 0600 in 0700"] == 2, counts


#: A server whose handler starts a program. It says which, and ends.
STARTER = """
import os, sys, trio, trio_ucx

async def start(connection):
    os.system("sleep 600 >/dev/null 2>&1 & echo $!")

async def main():
    async with trio.open_nursery() as nursery:
        server = await nursery.start(trio_ucx.serve_ucx, start, f"127.0.0.1:{sys.argv[1]}")
        async with trio_ucx.connect(server.address) as connection:
            await connection.receive_some()
        nursery.cancel_scope.cancel()

trio.run(main)
"""


def test_a_server_restarts_while_what_it_started_runs() -> None:
    ports = free_port()
    local = {"UCX_TLS": "tcp", "UCX_NET_DEVICES": "lo", "UCX_TCP_PORT_RANGE": f"{ports}-{ports}"}
    command, started = [sys.executable, "-c", STARTER, str(free_port())], list[int]()
    try:
        for _ in range(2):
            server = subprocess.run(
                command, capture_output=True, text=True, timeout=60, check=False, env={**os.environ, **local}
            )
            started += map(int, server.stdout.split())
            assert server.returncode == 0, server.stderr
    finally:
        for each in started:
            os.kill(each, signal.SIGKILL)
    assert len(started) == 2


#: What another user tries. It prints what it could do that it should not have been able to.
STRANGER = """
import ctypes, json, os, socket, sys

def refused(function, *arguments):
    try:
        function(*arguments)
    except OSError as error:
        return error.errno in (errno.EACCES, errno.EPERM)
    return False

def answers(address):
    with socket.create_connection(address, timeout=10) as stranger:
        try:
            stranger.sendall(bytes(range(64)))
            return stranger.recv(100).decode("latin-1")
        except ConnectionError:
            return ""

import errno
libc = ctypes.CDLL(None, use_errno=True)
libc.shmat.restype = ctypes.c_void_p
pid, found = json.loads(sys.argv[1])
entered = []
for kind, where in found:
    if "port" in kind:
        if kind == "data port" and (said := answers(where)):
            entered.append([kind, where, said])
        continue
    if kind.startswith("System V"):
        held = libc.shmat(where, None, 0o10000) == ctypes.c_void_p(-1).value and ctypes.get_errno() == errno.EACCES
    elif "ocket" in kind or "listener" in kind:
        datagram = kind.startswith("wake")
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM if datagram else socket.SOCK_STREAM) as stranger:
            held = refused(stranger.connect, where)
            if datagram:
                held = held and refused(stranger.sendto, b"", where) and refused(os.listdir, os.path.dirname(where))
    else:
        held = refused(os.open, where, os.O_RDWR)
    if not held:
        entered.append([kind, where])
print(json.dumps([os.geteuid(), entered]))
"""


@pytest.mark.root
@KINDS
async def test_another_user_tries_every_door(tmp_path: Path, kind: str) -> None:
    stranger = [
        *as_user(NOBODY),
        "/usr/bin/python3" if os.path.exists("/usr/bin/python3") else "python3",
        "-c",
        STRANGER,
    ]
    async with everything(tmp_path, f"tcp,{kind},self") as (pid, found):
        where = [(door.kind, door.where) for door in found if door.where is not None]
        assert len(where) > 6
        done = await trio.run_process(
            [*stranger, json.dumps([pid, where])], capture_stdout=True, capture_stderr=True, check=False
        )
        assert done.returncode == 0, done.stderr.decode()
        assert json.loads(done.stdout) == [NOBODY, []]
