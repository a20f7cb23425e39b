"""What the documents say for two hosts, and a server that starts before its network. Rank 0 serves."""

from __future__ import annotations

import logging
import os
import re
import subprocess
import sys
import time
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import trio
from common import KEY, PEER, RANK, ask_host, barrier, echo, get, main, part, put, shell

import trio_ucx

TUTORIAL = Path(trio_ucx.__file__).parents[1] / "docs/tutorial/5-several-hosts.md"


@contextmanager
def started(command: str, says: str):
    """Starts a program; gives what it prints, up to what `says` matches; ends it by SIGTERM."""
    with open("/tmp/started.log", "w+") as log:
        process = subprocess.Popen(f"exec {command}", shell=True, stdout=log, stderr=log)
        try:
            end = time.monotonic() + 60
            while not (found := re.search(says, Path(log.name).read_text())):
                assert process.poll() is None and time.monotonic() < end, Path(log.name).read_text()
                time.sleep(0.2)
            yield found[1]
        finally:
            process.terminate()
            status = process.wait(60)
    assert status in (0, -15), f"{command}: {status}: {Path(log.name).read_text()}"


@part
async def tutorial():
    for name, program in re.findall(r"<!-- file: (\S+) -->\n```python\n(.*?)```", TUTORIAL.read_text(), re.DOTALL):
        Path("/tmp", name).write_text(program)
    os.environ |= {"UCX_TCP_PORT_RANGE": "23350-23399", "TRIO_UCX_AUTHKEY": KEY.decode()}
    client = f"echo 'to be or not to be' | {sys.executable} /tmp/client.py"
    try:
        if RANK == 0:
            with started(f"{sys.executable} /tmp/server.py", "()"):
                await barrier("tutorial")
            return
        for address in PEER, "guest0", "guest9:23306 guest0":
            assert await shell(f"{client} {address}:23306") == '[["to", 2], ["be", 2]]'
        refused = await shell(f"export TRIO_UCX_AUTHKEY=another-key-of-16-bytes; {client} {PEER}:23306", check=False)
        assert "the authkeys of the two sides differ" in refused
        await barrier("tutorial")
    finally:
        del os.environ["UCX_TCP_PORT_RANGE"], os.environ["TRIO_UCX_AUTHKEY"]


async def other_machine(command: str, server: int, options: str = "") -> str:
    """A command that listens, at one rank; at the other, the command that it prints."""
    name = f"{command.split()[0]}.{server}"
    if server == RANK:
        with started(f"{sys.executable} -u -m trio_ucx {command}", r"on the other machine:\s*(.*)") as printed:
            put(name, printed)
            await barrier(name)
        return printed
    try:
        return await shell(f"{await get(name)} {options}", 100)
    finally:
        await barrier(name)


@part
async def check():
    return [(await other_machine("check --listen", server)).splitlines()[-1] for server in (0, 1)]


@part
async def perf():
    return (await other_machine("perf --listen 13337", 0, "--sizes 8,64k --seconds 1")).splitlines()[-1]


@part
async def served_before_the_network_is_up():
    """UCX uses the network devices that have a carrier when a worker is opened."""
    carrier = Path("/sys/class/net/eth0/carrier")

    async def until(value):
        with trio.fail_after(90):
            while carrier.read_text().strip() != value:
                await trio.sleep(0.1)

    if RANK == 0:
        await ask_host("carrier 0 30")
        await until("0")
        async with trio.open_nursery() as nursery:
            serve = partial(trio_ucx.serve_ucx, echo, 23307, host="0.0.0.0", authkey=KEY, on_handler_error="log")
            await nursery.start(serve)
            assert carrier.read_text().strip() == "0", "it took so long that the network is up"
            await until("1")
            await barrier("carrier.up")
            await barrier("carrier.done")
            nursery.cancel_scope.cancel()
        return None
    await barrier("carrier.up")
    for _ in range(2):
        async with trio_ucx.connect(f"{PEER}:23307", authkey=KEY, connect_timeout=60) as c:
            await c.send(b"x")
            assert await c.receive() == b"x"
            transports = c.transports
    await barrier("carrier.done")
    return transports


logging.basicConfig(level=logging.INFO)
main(timeout=150)
