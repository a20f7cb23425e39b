"""Kinds of shared memory that are not available, and segments that killed processes leave."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import attrs
import pytest
from injected_faults import have_no_system_v, miss_shmget
from networks import Side, meet, need

from trio_ucx import ucp
from trio_ucx.ucp._quirks import shared_memory

#: Two workers exchange messages of all sizes. Says over what, or the error.
EXCHANGE = """
import json, logging, sys
import trio, trio_ucx
from trio_ucx import ucp

log = []
class Keep(logging.Handler):
    def emit(self, record):
        log.append(record.getMessage())
logging.getLogger("trio_ucx").addHandler(Keep())
config = json.loads(sys.argv[1])

async def main():
    async with ucp.open_worker(config=config) as a, ucp.open_worker(config=config) as b:
        [listener] = await trio_ucx.open_ucx_listeners(0, host="127.0.0.1", worker=a)
        async with listener, trio_ucx.connect(listener.address, worker=b) as client, await listener.accept() as server:
            for size in (8, 1_100, 8_000, 60_000, 1_000_000):
                async with trio.open_nursery() as nursery:
                    for _ in range(20):
                        nursery.start_soon(client.send, bytes(size))
                    with trio.fail_after(20):
                        for _ in range(20):
                            assert len(await server.receive()) == size
            return sorted({transport.name for transport in client.endpoint.transports})

try:
    found, number = trio.run(main), 0
except OSError as error:
    found, number = str(error), error.errno
print(json.dumps([found, number, log]))
"""


@attrs.frozen
class Limits:
    """A machine without some kinds of shared memory: namespaces, in which programs run."""

    name: str
    commands: str

    def run(self, code: str, *arguments: str) -> subprocess.CompletedProcess[str]:
        script = f'{self.commands} && exec "$@"'
        return subprocess.run(
            ["unshare", "--ipc", "--mount", "sh", "-c", script, "sh", sys.executable, "-c", code, *arguments],
            capture_output=True,
            text=True,
            timeout=90,
            check=False,
        )


NONE_OF_SYSV = [
    Limits("shmmax", "echo 4096 > /proc/sys/kernel/shmmax"),
    Limits("shmall", "echo 100 > /proc/sys/kernel/shmall"),
    Limits("shmmni", "echo 0 > /proc/sys/kernel/shmmni"),
]
NONE_OF_POSIX = [
    Limits("/dev/shm has 65536 bytes", "mount -t tmpfs -o size=64k tmpfs /dev/shm"),
    Limits("/dev/shm cannot be written to", "mount -t tmpfs -o ro tmpfs /dev/shm"),
    Limits("a file in /dev/shm may have at most 102400 bytes", "ulimit -f 200"),
]
NEITHER = [
    Limits(name=f"{one.name}; {other.name}", commands=f"{one.commands} && {other.commands}")
    for one, other in zip(NONE_OF_SYSV, NONE_OF_POSIX, strict=True)
]


def exchange(limits: Limits, transports: str) -> tuple[list[str] | str, int, list[str]]:
    config = {} if transports == "default" else {"TLS": transports}
    result = limits.run(EXCHANGE, json.dumps(config))
    assert result.returncode == 0, result.stderr[-3000:]
    found, number, log = json.loads(result.stdout)
    return found, number, log


@pytest.fixture(autouse=True, scope="module")
def _namespaces() -> None:
    need("unshare", "--ipc", "--mount", "true", why="limits of shared memory")


def ids(limits: Limits) -> str:
    return limits.name.replace("/", "_")


@pytest.mark.sample(2)
@pytest.mark.parametrize("transports", ["default", "tcp,sm,self", "sm,self", "tcp,sysv,self"])
@pytest.mark.parametrize("limits", NONE_OF_SYSV, ids=ids)
def test_without_system_v(limits: Limits, transports: str) -> None:
    found, _, _ = exchange(limits, transports)
    assert found == (["tcp"] if "sysv" in transports else ["posix"])


@pytest.mark.sample(2)
@pytest.mark.parametrize("transports", ["default", "tcp,sm,self", "sm,self", "tcp,posix,self"])
@pytest.mark.parametrize("limits", NONE_OF_POSIX, ids=ids)
def test_without_posix(limits: Limits, transports: str) -> None:
    found, _, log = exchange(limits, transports)
    assert found == (["tcp"] if "posix" in transports else ["sysv"])
    assert any(limits.name in line for line in log) == ("posix" in transports)


@pytest.mark.sample(2)
@pytest.mark.parametrize("transports", ["default", "tcp,sm,self", "^cma"])
@pytest.mark.parametrize("limits", NEITHER, ids=ids)
def test_without_any(limits: Limits, transports: str) -> None:
    found, _, log = exchange(limits, transports)
    assert found == ["tcp"]
    for name in limits.name.split("; "):
        assert any("does without shared memory" in line and name in line for line in log), log


@pytest.mark.sample(2)
@pytest.mark.parametrize(
    ("limits", "transports"),
    [
        *((limits, "sysv,self") for limits in NONE_OF_SYSV),
        *((limits, "posix,cma") for limits in NONE_OF_POSIX),
        *((limits, transports) for limits in NEITHER for transports in ("sm,self", "shm", "mm,self", "posix,sysv")),
    ],
    ids=lambda value: ids(value) if isinstance(value, Limits) else value,
)
def test_nothing_else_is_allowed(limits: Limits, transports: str) -> None:
    found, number, _ = exchange(limits, transports)
    assert isinstance(found, str) and number > 0
    assert "no shared memory can be had" in found and transports in found
    for name in limits.name.split("; "):
        assert name in found


@pytest.mark.sample(1)
@pytest.mark.parametrize("transports", ["default", "tcp,sm,self", "sm,self"])
def test_without_locked_memory(transports: str) -> None:
    found, _, _ = exchange(Limits("memlock", "ulimit -l 0"), transports)
    assert found == ["sysv"]


#: Many messages that nobody receives yet, when no further segment can be had.
GROWTH = """
import subprocess, sys
import trio, trio_ucx
from trio_ucx import ucp

size = int(sys.argv[1])

async def main():
    config = {"TLS": "sysv,self"}
    async with ucp.open_worker(config=config) as a, ucp.open_worker(config=config) as b:
        [listener] = await trio_ucx.open_ucx_listeners(0, host="127.0.0.1", worker=a)
        pairs = []
        for _ in range(8):
            pairs.append((await trio_ucx.open_ucx_stream(*listener.address, worker=b), await listener.accept()))
        with open("/proc/sysvipc/shm") as file:
            segments = len(file.readlines()) - 1
        assert segments > 0
        with open("/proc/sys/kernel/shmmni", "w") as file:
            file.write(str(segments))
        sent = []
        for client, _ in pairs:
            count = 0
            try:
                while True:
                    client.send_nowait(count.to_bytes(4, "little") + bytes(size - 4))
                    count += 1
            except trio.WouldBlock:
                sent.append(count)
        await trio.sleep(0.2)
        assert sum(sent) > 200
        with trio.fail_after(20):
            for (_, server), count in zip(pairs, sent):
                for number in range(count):
                    assert int.from_bytes((await server.receive())[:4], "little") == number
        for client, server in pairs:
            client.abort()
            server.abort()
        await listener.aclose()
trio.run(main)
"""


@pytest.mark.sample(1)
@pytest.mark.parametrize("size", [1_025, 1_500, 4_000, 8_000, 30_000])
def test_unread_messages_need_no_more_segments(size: int) -> None:
    result = Limits("", "true").run(GROWTH, str(size))
    assert result.returncode == 0, result.stderr[-3000:]
    assert result.stderr == "", "UCX ran out of buffers, and may lose messages then"


async def test_peers_with_different_kinds() -> None:
    """Each has the kind that the other lacks: they use TCP, and ``shared_memory=True`` is an error."""
    one, other = Side(environment={"UCX_TLS": "tcp,sysv,self"}), Side(environment={"UCX_TLS": "tcp,posix,self"})
    (await meet(one, other)).assert_tcp()
    insists = attrs.evolve(one, options={"shared_memory": True})
    (await meet(insists, other)).assert_refused("different kinds of shared memory (posix and sysv")


@pytest.mark.parametrize(
    ("wanted", "without"),
    [
        ("all", "^sysv"),
        ("^posix", "^posix,sysv"),
        ("tcp,sm,self", "tcp,posix,cma,self"),
        ("sysv,tcp", "tcp"),
        ("posix,sysv,self", "posix,self"),
    ],
)
def test_transports_without_system_v(wanted: str, without: str, monkeypatch: pytest.MonkeyPatch) -> None:
    have_no_system_v(monkeypatch)
    assert shared_memory.restrict({"TLS": wanted})["TLS"] == without


def test_what_the_user_chose_holds() -> None:
    assert shared_memory.restrict({"TLS": "tcp,posix,sysv,self"}) == {}
    assert shared_memory.restrict({"TLS": "posix,self"}) == {}
    assert shared_memory.restrict({"TLS": "tcp"}) == {}
    assert shared_memory.restrict({"TLS": "sm,self", "POSIX_SHM_MIN_SIZE": "1mb"}) == {}
    assert shared_memory.restrict({}) == {"POSIX_SHM_MIN_SIZE": "inf"}


def test_a_limit_that_is_reached_later() -> None:
    code = """
import errno, trio
from trio_ucx import ucp
async def main():
    with ucp.open_context({"TLS": "sysv,self"}) as context:
        with open("/proc/sys/kernel/shmmni", "w") as file:
            file.write("0")
        try:
            async with ucp.open_worker(context=context):
                pass
        except OSError as error:
            assert error.errno == errno.ENOSPC and "kernel.shmmni=0" in str(error), error
            return
    raise AssertionError("it was opened")
trio.run(main)
"""
    result = Limits("", "true").run(code)
    assert result.returncode == 0, result.stderr[-3000:]


@pytest.mark.parametrize("left", [15, 6])
def test_dev_shm_that_fills_up_later(left: int) -> None:
    """UCX's worker gets no memory as soon as less than 16 MiB are left, and crashes."""
    code = """
import errno, os, sys, trio
from trio_ucx import ucp
async def main():
    with ucp.open_context({"TLS": "posix,self"}) as context:
        with open("/dev/shm/filler", "wb") as file:
            state = os.statvfs("/dev/shm")
            os.posix_fallocate(file.fileno(), 0, state.f_bavail * state.f_bsize - int(sys.argv[1]) * 2**20)
        try:
            async with ucp.open_worker(context=context):
                pass
        except OSError as error:
            assert error.errno == errno.ENOSPC and "/dev/shm has" in str(error), error
            return
    raise AssertionError("it was opened")
trio.run(main)
"""
    result = Limits("", "mount -t tmpfs -o size=64m tmpfs /dev/shm").run(code, str(left))
    assert result.returncode == 0, result.stderr[-3000:]


#: Kills processes that open a worker and send messages, in the first moments of their lives. Says what they left.
KILLER = """
import json, os, random, signal, time
import trio
from trio_ucx import ucp
from trio_ucx.testing import open_connection_pair

async def victim(opened):
    async with ucp.open_worker() as worker:
        async with open_connection_pair(worker=worker) as (one, other), trio.open_nursery() as nursery:
            os.write(opened, b"x")  # killed before, it may leave a segment that UCX has not yet marked for removal
            async def send():
                while True:
                    await one.send(bytes(5000))
            nursery.start_soon(send)
            while True:
                await other.receive()

def left():
    with open("/proc/sysvipc/shm") as file:
        segments = len(file.readlines()) - 1
    return [segments, sorted(name for name in os.listdir("/dev/shm") if name.startswith("ucx"))]

rng = random.Random(4)
before = left()
for _ in range(20):
    opened, opening = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            trio.run(victim, opening)
        finally:
            os._exit(1)
    assert os.read(opened, 1)
    time.sleep(rng.random() * 0.05)
    os.kill(child, signal.SIGKILL)
    status = os.waitpid(child, 0)[1]
    assert status == signal.SIGKILL, status
print(json.dumps([before, left()]))
"""


def test_killed_processes_leave_nothing() -> None:
    result = Limits("", "mount -t tmpfs tmpfs /dev/shm").run(KILLER)
    assert result.returncode == 0, result.stderr[-3000:]
    before, after = json.loads(result.stdout)
    assert after == before == [0, []]


async def test_other_users_cannot_open_segments() -> None:
    """UCX asks for 0660, with which another user of the same group could read messages, and change them."""
    async with ucp.open_worker(config={"TLS": "sysv,self"}):
        rows = [line.split() for line in Path("/proc/sysvipc/shm").read_text().splitlines()[1:]]
        modes = [int(mode, 8) & 0o777 for _, _, mode, _, creator, *_ in rows if int(creator) == os.getpid()]
    assert modes
    assert set(modes) == {0o600}


def test_segments_that_others_could_open_are_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    miss_shmget(monkeypatch)
    assert shared_memory.restrict({"TLS": "tcp,sm,self"})["TLS"] == "tcp,posix,cma,self"
    with pytest.raises(OSError, match="other members of this user's group could open UCX's System V segments"):
        shared_memory.restrict({"TLS": "sysv,self"})
