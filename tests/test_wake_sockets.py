"""The sockets that wake a worker which sleeps on shared memory: only this user reaches them, and none remains."""

from __future__ import annotations

import errno
import os
import shutil
import signal
import socket
import stat
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import attrs
import pytest
import trio
import trio.testing
from helpers import free_port, open_pair, open_peer
from injected_faults import Library
from networks import Side, meet, need

import trio_ucx
from trio_ucx import ucp
from trio_ucx._native import ffi, lib
from trio_ucx._util import private_folder as private_folder_module
from trio_ucx.testing import internals
from trio_ucx.ucp._engine import identity
from trio_ucx.ucp._quirks import shared_memory, wake_sockets
from trio_ucx.ucp._transports import obstacle_to_shared_memory

KINDS = pytest.mark.parametrize("kind", ["sysv", "posix"])
#: The longest time that a message to a sleeping worker takes, in seconds. A lost wake-up takes up to a second.
SOON = 0.5


@pytest.fixture
def tmp_path() -> Iterator[Path]:
    """A short path, because that of a socket has at most 107 bytes."""
    with tempfile.TemporaryDirectory(dir="/tmp") as path:
        yield Path(path)


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder in which this test's workers have their sockets; nothing is there yet."""
    monkeypatch.setattr(private_folder_module, "SHARED", tmp_path)
    return tmp_path / f"trio_ucx-{os.geteuid()}"


@pytest.fixture
def nowhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """No folder can be had: something is in the way everywhere."""
    (tmp_path / f"trio_ucx-{os.geteuid()}").write_text("")
    monkeypatch.setattr(private_folder_module, "SHARED", tmp_path)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.delenv("XDG_RUNTIME_DIR", raising=False)
    return tmp_path


def unix_names(pid: int | str = "self") -> list[str]:
    """The names of a process's Unix sockets."""
    links = [f"/proc/{pid}/fd/{fd}" for fd in os.listdir(f"/proc/{pid}/fd")]
    open_here = {os.readlink(link) for link in links if os.path.islink(link)}
    rows = [line.split() for line in Path("/proc/self/net/unix").read_text().splitlines()[1:]]
    return [row[7] for row in rows if len(row) == 8 and f"socket:[{row[6]}]" in open_here]


def assert_no_missed_event(*workers: ucp.Worker) -> None:
    assert [worker.statistics().missed_events for worker in workers] == [0] * len(workers)


# ---- the sockets ----


@KINDS
async def test_sockets_are_of_this_user(folder: Path, kind: str) -> None:
    async with ucp.open_worker(config={"TLS": f"tcp,{kind},self"}):
        [path] = folder.iterdir()
        found, above = path.lstat(), folder.lstat()
        assert stat.S_ISSOCK(found.st_mode) and stat.S_IMODE(found.st_mode) == 0o600
        assert stat.S_IMODE(above.st_mode) == 0o700 and found.st_uid == above.st_uid == os.geteuid()
        assert unix_names().count(str(path)) == 1
        assert not [name for name in unix_names() if name.startswith("@")]
    assert not list(folder.iterdir())


async def test_without_shared_memory_there_is_no_folder(folder: Path) -> None:
    async with ucp.open_worker(config={"TLS": "tcp,self"}) as worker:
        assert not folder.exists()
        assert worker.address.wake_folder == bytes(16)


async def test_a_worker_that_cannot_be_opened_leaves_no_socket(folder: Path) -> None:
    config = {"TLS": "tcp,sysv,self", "TCP_PORT_RANGE": f"{(port := free_port())}-{port}", "NET_DEVICES": "lo"}
    with pytest.raises(OSError, match="no free port"):
        async with ucp.open_worker(config=config), ucp.open_worker(config=config):
            pass
    assert not list(folder.iterdir())


async def wake(one: trio_ucx.Connection, other: trio_ucx.Connection) -> None:
    """Sends a message to a side that sleeps."""
    async with trio.open_nursery() as nursery:
        start = 0.0

        async def receive() -> None:
            assert await other.receive() == b"wake up"
            assert time.perf_counter() - start < SOON

        nursery.start_soon(receive)
        await trio.testing.wait_all_tasks_blocked(0.05)
        start = time.perf_counter()
        await one.send(b"wake up")


@KINDS
@pytest.mark.parametrize("mask", [0o777, 0o000])
async def test_any_umask(folder: Path, kind: str, mask: int) -> None:
    """The mask could take the permission to send from this user's own peers."""
    config = {"TLS": f"tcp,{kind},self"}
    before = os.umask(mask)
    try:
        async with ucp.open_worker(config=config) as one, ucp.open_worker(config=config) as other:
            os.umask(before)
            assert {stat.S_IMODE(path.lstat().st_mode) for path in folder.iterdir()} == {0o600}
            assert stat.S_IMODE(folder.lstat().st_mode) == 0o700
            async with open_pair(one, other, shared_memory=True) as (client, server):
                for _ in range(3):
                    await wake(client, server)
                    await wake(server, client)
            assert_no_missed_event(one, other)
    finally:
        os.umask(before)


@KINDS
@pytest.mark.parametrize("datagram", [b"", b"x"], ids=["empty", "one_byte"])
async def test_datagrams_of_this_user_end_nothing(folder: Path, kind: str, datagram: bytes) -> None:
    """A full queue, and then a flood. Afterwards, nothing remains of it: messages wake a worker, and it sleeps."""
    config = {"TLS": f"tcp,{kind},self"}
    async with ucp.open_worker(config=config) as one, ucp.open_worker(config=config) as other:
        paths = [str(path) for path in folder.iterdir()]
        assert len(paths) == 2
        flooding = threading.Event()

        def flood() -> int:
            sent = 0
            with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sender:
                sender.setblocking(False)
                while flooding.is_set():
                    for path in paths:
                        try:
                            sent += sender.sendto(datagram, path) == len(datagram)
                        except BlockingIOError:
                            time.sleep(0.0001)
            return sent

        async with open_pair(one, other, shared_memory=True) as (client, server):
            await wake(client, server)
            flooding.set()
            async with trio.open_nursery() as nursery:

                async def flood_here() -> None:
                    assert await trio.to_thread.run_sync(flood) > 100

                nursery.start_soon(flood_here)
                end = time.monotonic() + 0.5
                while time.monotonic() < end:
                    with trio.fail_after(10):
                        await client.send(b"x")
                        assert await server.receive() == b"x"
                        await trio.sleep(0.01)
                flooding.clear()
            for _ in range(3):
                await wake(client, server)
                await wake(server, client)
            with trio.fail_after(20):
                await trio.testing.wait_all_tasks_blocked()
            used = time.process_time()
            await trio.sleep(0.5)
            assert time.process_time() - used < 0.1
        assert_no_missed_event(one, other)


# ---- sockets of other processes ----


def leave_sockets(folder: Path, count: int, seconds_ago: float = 3600) -> list[Path]:
    """Makes sockets to which nobody listens any more."""
    paths = [folder / f"{number:016x}{wake_sockets.SUFFIX}" for number in range(count)]
    for path in paths:
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as made:
            made.bind(str(path))
        made_at = time.time() - seconds_ago
        os.utime(path, (made_at, made_at))
    return paths


@pytest.fixture
def swept(folder: Path) -> Iterator[Path]:
    folder.mkdir(mode=0o700)
    yield folder


async def open_one_worker() -> None:
    async with ucp.open_worker(config={"TLS": "tcp,sysv,self"}):
        pass


async def test_sockets_of_killed_processes_are_removed(swept: Path) -> None:
    left = leave_sockets(swept, 100)
    sizes = []
    for _ in range(6):
        await open_one_worker()
        sizes.append(sum(path.exists() for path in left))
    assert sizes == [68, 36, 4, 0, 0, 0], "32 when a worker is opened"


async def test_what_a_sweep_leaves(swept: Path) -> None:
    """Sockets that are in use or that may just be being made, and files that are no such sockets."""
    [young] = leave_sockets(swept, 1, seconds_ago=5)
    file, other = swept / f"file{wake_sockets.SUFFIX}", swept / "mesh-1"
    for path in (file, other):
        path.write_text("")
        os.utime(path, (0, 0))
    used = swept / f"used{wake_sockets.SUFFIX}"
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as live:
        live.bind(str(used))
        os.utime(used, (0, 0))
        await open_one_worker()
        assert set(swept.iterdir()) == {young, file, other, used}
    await open_one_worker()
    assert set(swept.iterdir()) == {young, file, other}


async def test_a_killed_process_leaves_sockets_for_the_next() -> None:
    async with open_peer("echo", [0]) as peer:
        await peer.hear()
        left = [Path(name) for name in unix_names(peer.process.pid) if name.endswith(wake_sockets.SUFFIX)]
        assert left and all(path.exists() for path in left)
        peer.signal(signal.SIGKILL)
        await peer.ended()
    for path in left:
        os.utime(path, (0, 0))
    for _ in range(100):  # other tests have sockets there, too
        await open_one_worker()
    assert not any(path.exists() for path in left)


def test_a_forked_child_removes_nothing(tmp_path: Path) -> None:
    """Not even one that finalises everything."""
    code = """
import atexit, gc, os, pathlib, sys, trio
from trio_ucx import ucp
from trio_ucx._util import private_folder
from trio_ucx.ucp._quirks import wake_sockets
private_folder.SHARED = pathlib.Path(sys.argv[1])  # other tests use the usual folder
async def main():
    async with ucp.open_worker(config={"TLS": "tcp,sysv,self"}):
        folder = wake_sockets.find_folder()
        before = {*os.listdir(folder)}
        if not os.fork():
            atexit._run_exitfuncs()
            gc.collect()
            os._exit(0)
        assert os.wait()[1] == 0
        assert before and before <= {*os.listdir(folder)}
        print("still there")
trio.run(main)
"""
    command = [sys.executable, "-c", code, tmp_path]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0 and done.stdout == "still there\n", done.stderr


# ---- both sides need the same folder ----

#: In a mount namespace, /dev/shm is another one.
ELSEWHERE = ["unshare", "--mount", "sh", "-c", 'mount -t tmpfs tmpfs /dev/shm && exec "$@"', "sh"]


@pytest.mark.root
@pytest.mark.parametrize("who", ["client", "server"])
async def test_different_folders(who: str) -> None:
    need("unshare", "--mount", "true", why="folders of their own")
    elsewhere = Side(ELSEWHERE)
    (await (meet(elsewhere, Side()) if who == "client" else meet(Side(), elsewhere))).assert_tcp()
    insists = attrs.evolve(elsewhere, options={"shared_memory": True})
    meeting = await (meet(insists, Side()) if who == "client" else meet(Side(), insists))
    meeting.assert_refused("different folders for wake-up sockets")


@pytest.mark.root
async def test_another_mount_namespace_with_the_same_folder() -> None:
    need("unshare", "--mount", "true", why="mount namespaces")
    (await meet(Side(["unshare", "--mount"]), Side())).assert_shared_memory()


async def test_raw_endpoints_follow_the_rule(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async with ucp.open_worker() as one:
        monkeypatch.setattr(private_folder_module, "SHARED", folder.parent.parent)
        (folder.parent.parent / folder.name).mkdir(mode=0o700, exist_ok=True)
        async with ucp.open_worker() as other:
            found = obstacle_to_shared_memory(one.address, other.address)
            assert found is not None and "different folders for wake-up sockets" in found
            async with await one.open_endpoint(other.address) as endpoint:
                await endpoint.tag_send(b"x", 1)
                await endpoint.flush()
                assert {transport.name for transport in endpoint.transports} == {"tcp"}
    address = one.address._changed(wake_folder=bytes(16))
    assert obstacle_to_shared_memory(address, address) is not None


async def test_an_address_states_its_folder(folder: Path) -> None:
    async with ucp.open_worker() as one, ucp.open_worker() as other:
        assert any(one.address.wake_folder) and one.address.wake_folder == other.address.wake_folder
        assert ucp.WorkerAddress(bytes(one.address)).wake_folder == one.address.wake_folder
    folder.rename(folder.with_name("moved"))
    async with ucp.open_worker() as other:
        assert other.address.wake_folder != one.address.wake_folder


async def test_a_removed_folder_makes_messages_late(folder: Path) -> None:
    """...not more: the safety net finds them, and counts them."""
    config = {"TLS": "tcp,sysv,self"}
    async with ucp.open_worker(config=config) as one, ucp.open_worker(config=config) as other:
        async with open_pair(one, other, shared_memory=True) as (client, server):
            await wake(client, server)
            shutil.rmtree(folder)
            async with trio.open_nursery() as nursery:

                async def receive() -> None:
                    with trio.fail_after(3):
                        assert await server.receive() == b"late"

                nursery.start_soon(receive)
                await trio.testing.wait_all_tasks_blocked(0.05)
                await client.send(b"late")
        assert other.statistics().missed_events
        for worker in (one, other):
            internals(worker).counters["missed_events"] = 0  # the fixture expects none


# ---- no folder, or no private sockets ----


async def test_without_a_folder_connections_use_tcp(nowhere: Path, caplog: pytest.LogCaptureFixture) -> None:
    before = set(unix_names())  # a test may have left a worker alone
    async with ucp.open_worker() as worker, open_pair(worker) as (client, server):
        assert {transport.name for transport in client.endpoint.transports} == {"tcp"}
        await client.send(b"x")
        assert await server.receive() == b"x"
        assert not worker.address.shared_memory_kinds
        new = set(unix_names()) - before
        assert not [name for name in new if name.startswith("@") or name.endswith(wake_sockets.SUFFIX)]
    [line] = [record.getMessage() for record in caplog.records if "does without shared memory" in record.getMessage()]
    assert line.count("no folder for wake-up sockets") == 1 and "set XDG_RUNTIME_DIR" in line


def test_nothing_but_shared_memory_is_allowed(nowhere: Path) -> None:
    with pytest.raises(OSError, match="no folder for wake-up sockets") as caught:
        shared_memory.restrict({"TLS": "sm,self"})
    assert caught.value.errno == errno.EACCES


@pytest.mark.parametrize(
    ("wanted", "left"),
    [
        ("all", "^sysv,posix"),
        ("^tcp", "^tcp,sysv,posix"),
        ("tcp,sm,self", "tcp,cma,self"),
        ("posix,tcp,self", "tcp,self"),
        ("tcp,self", None),
    ],
)
def test_transports_without_a_folder(nowhere: Path, wanted: str, left: str | None) -> None:
    assert shared_memory.restrict({"TLS": wanted}).get("TLS") == left


async def test_a_folder_that_is_lost_later(folder: Path) -> None:
    with ucp.open_context({"TLS": "tcp,sysv,self"}) as context:
        folder.rmdir()
        folder.parent.chmod(0o777)  # without the sticky bit, others could replace what is there
        tempfile_before, tempfile.tempdir = tempfile.tempdir, str(folder.parent)
        try:
            with pytest.raises(OSError, match="no folder for wake-up sockets"):
                async with ucp.open_worker(context=context):
                    pass
        finally:
            tempfile.tempdir = tempfile_before


def test_a_path_that_is_too_long(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, nowhere: Path) -> None:
    for length, does in (lib.TU_WAKE_FOLDER - 1, True), (lib.TU_WAKE_FOLDER, False):
        name = f"trio_ucx-{os.geteuid()}"
        parent = Path("/tmp", "x" * (length - len(f"/tmp//{name}")))
        parent.mkdir(mode=0o700)
        monkeypatch.setattr(private_folder_module, "SHARED", parent)
        try:
            if does:
                assert len(wake_sockets.find_folder()) == length
            else:
                with pytest.raises(OSError, match="no folder for wake-up sockets"):
                    wake_sockets.find_folder()
        finally:
            (parent / name).rmdir()
            parent.rmdir()


async def test_longest_path_works(monkeypatch: pytest.MonkeyPatch, nowhere: Path) -> None:
    name = f"trio_ucx-{os.geteuid()}"
    parent = Path("/tmp", "y" * (lib.TU_WAKE_FOLDER - 1 - len(f"/tmp//{name}")))
    parent.mkdir(mode=0o700)
    monkeypatch.setattr(private_folder_module, "SHARED", parent)
    config = {"TLS": "tcp,sysv,self"}
    try:
        async with ucp.open_worker(config=config) as one, ucp.open_worker(config=config) as other:
            assert {len(str(path)) for path in (parent / name).iterdir()} == {107}
            async with open_pair(one, other, shared_memory=True) as (client, server):
                await wake(client, server)
            assert_no_missed_event(one, other)
    finally:
        (parent / name).rmdir()
        parent.rmdir()


def test_functions_that_cannot_be_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    class Other(Library):
        def tu_keep_wakes_private(self) -> bool:
            return False

    monkeypatch.setattr(wake_sockets, "lib", Other())
    assert shared_memory.restrict({"TLS": "tcp,sm,self"})["TLS"] == "tcp,cma,self"
    with pytest.raises(OSError, match="does not import"):
        shared_memory.restrict({"TLS": "sysv,self"})


async def test_sockets_that_are_made_in_another_way(monkeypatch: pytest.MonkeyPatch) -> None:
    class Other(Library):
        def tu_worker_wake_folder(self, worker: Any) -> Any:
            return ffi.new("char[]", b"")

    monkeypatch.setattr(identity, "lib", Other())
    with pytest.raises(PermissionError, match="makes the sockets that wake it in an unknown way"):
        async with ucp.open_worker(config={"TLS": "tcp,sysv,self"}):
            pass
    async with ucp.open_worker(config={"TLS": "tcp,self"}):
        pass


@pytest.mark.root
@pytest.mark.parametrize("option", ["ro", "nr_inodes=2"])
def test_folders_that_are_full_or_read_only(option: str) -> None:
    """The next one is used."""
    need("unshare", "--mount", "true", why="folders of their own")
    code = """
import os, sys, tempfile, trio
from trio_ucx import ucp
tempfile.tempdir = sys.argv[1]
async def main():
    async with ucp.open_worker(config={"TLS": "tcp,sysv,self"}) as worker:
        print(len(os.listdir(os.path.join(sys.argv[1], f"trio_ucx-{os.geteuid()}"))), any(worker.address.wake_folder))
trio.run(main)
"""
    mount = f"mount -t tmpfs tmpfs /dev/shm && mkdir -m 700 /dev/shm/trio_ucx-0 && mount -o remount,{option} /dev/shm"
    with tempfile.TemporaryDirectory() as other:
        done = subprocess.run(
            ["unshare", "--mount", "sh", "-c", f'{mount} && exec "$@"', "sh", sys.executable, "-c", code, other],
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
            env={name: value for name, value in os.environ.items() if name != "XDG_RUNTIME_DIR"},
        )
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == ["1", "True"]
