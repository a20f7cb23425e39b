"""Processes that are killed while they open their worker leave no shared memory behind.

What they may leave is the number of a SysV segment, between its making and its removal. UCX makes one of a page to see
whether it hears of such system calls (``ucm_fire_mmap_events``). Nobody has written to it, so it takes no memory.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

from trio_ucx import ucp

#: Kills children of its own, which open workers and talk over shared memory, at random moments of their first 150 ms;
#: where none gets as far as that, of a longer time.
#: Prints, as JSON, the files in /dev/shm that they left, the bytes in use of each SysV segment, how far each got, and
#: how many wake-up sockets there were, then and after each of a few workers was opened.
KILLER = """
import json, os, random, signal, sys, time, trio, trio_ucx
from pathlib import Path
from trio_ucx import ucp

KILLS, longest = 60, 0.15
folder = Path("/dev/shm", f"trio_ucx-{os.geteuid()}")

async def sweep():
    counts = [len(list(folder.iterdir()))]
    for path in folder.iterdir():
        os.utime(path, (0, 0))
    for _ in range(6):
        async with ucp.open_worker():
            pass
        counts.append(len(list(folder.iterdir())))
    return counts

def files():
    return set(os.listdir("/dev/shm")) - {folder.name}

def segments(pids):
    names, *rows = (line.split() for line in Path("/proc/sysvipc/shm").read_text().splitlines())
    found = [dict(zip(names, map(int, row))) for row in rows]
    return [one["rss"] + one["swap"] for one in found if one["cpid"] in pids and not one["nattch"]]

async def live(report):
    async with ucp.open_worker() as one, ucp.open_worker() as other:
        os.write(report, b"w")
        [listener] = await trio_ucx.open_ucx_listeners(0, host="127.0.0.1", worker=one)
        client = await trio_ucx.open_ucx_stream(*listener.address, worker=other)
        server = await listener.accept()
        assert {"sysv", "posix"} & {transport.name for transport in client.endpoint.transports}
        os.write(report, b"c")
        while True:
            await client.send(bytes(5000))
            await server.receive()

before, dice, pids, progress = files(), random.Random(4), set(), []
for _ in range(KILLS):
    reading, report = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            trio.run(live, report)
        finally:
            os._exit(1)
    pids.add(pid)
    os.close(report)
    time.sleep(dice.random() * longest)
    os.kill(pid, signal.SIGKILL)
    _, status = os.waitpid(pid, 0)
    assert os.WIFSIGNALED(status), "a child ended by itself"
    progress.append(os.read(reading, 10).decode())
    longest *= 1 if any(progress) else 1.1
    os.close(reading)
time.sleep(0.5)  # the kernel may take a moment to free what a process had
print(json.dumps([sorted(files() - before), segments(pids), progress, trio.run(sweep)]))
"""

#: Keeps the shared memory of other programs out of sight, where it can be had.
ALONE = ["unshare", "--ipc", "--mount", "sh", "-c", 'mount -t tmpfs none /dev/shm && exec "$@"', "-"]


def alone() -> list[str]:
    try:
        subprocess.run([*ALONE, "true"], check=True, capture_output=True, timeout=20)
    except (OSError, subprocess.SubprocessError):
        return []
    return ALONE


def test_nothing_is_left() -> None:
    environment = {name: value for name, value in os.environ.items() if name != "UCX_TLS"}
    under = alone()
    command = [*under, sys.executable, "-c", KILLER]
    done = subprocess.run(command, env=environment, capture_output=True, timeout=120, text=True)
    assert done.returncode == 0, done.stderr
    files, segments, progress, sockets = json.loads(done.stdout.splitlines()[-1])
    assert files == [], "in /dev/shm"
    assert not under or (sockets[0] > 0 and sockets[-1] == 0), sockets
    assert len(segments) <= len(progress) / 4 and sum(segments) == 0, segments
    assert "" in progress and progress != [""] * len(progress), "all were killed before, or after, they opened a worker"


def test_posix_is_there_for_those_who_ask(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("UCX_TLS", raising=False)
    with ucp.open_context() as context:
        assert "sysv/memory" in context.info_text() and "posix/memory" not in context.info_text()
    with ucp.open_context({"TLS": "tcp,posix,self"}) as context:
        assert "posix/memory" in context.info_text()
    monkeypatch.setenv("UCX_TLS", "tcp,sysv,posix,self")
    with ucp.open_context() as context:
        assert "posix/memory" in context.info_text()
