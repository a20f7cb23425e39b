"""A server that is attacked, and its honest client, each in a process of its own.

The client is connected before the attack. Meanwhile it measures its round trips, and how late its own sleeps end.
Machines that run tests are busy: what either process waited for a processor in a round trip does not count (Linux's
``schedstat``). Elsewhere, and where a virtual machine stands still, the lateness of 99 sleeps in a hundred is allowed
for, three times, as a round trip needs both processes; and one round trip in a hundred may take longer.

As a program this file runs the server, which is ``peers.py`` with a log in a file, or the honest client.
"""

from __future__ import annotations

import json
import logging
import os
import re
import runpy
import sys
import time
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import attrs
import trio
from helpers import Peer, open_peer, pattern
from timing import Noise, waited_by

import trio_ucx
from trio_ucx import ucp
from trio_ucx._util.limited_log import LOG_INTERVAL

#: Seconds that a round trip of the honest client may take.
PATIENCE = 0.1


def serve(log: str, peers: str, *arguments: str) -> None:
    """Runs ``peers.py`` with a log."""
    logging.basicConfig(filename=log, level=logging.INFO, format="%(levelname)s %(message)s")
    sys.argv = [peers, *arguments]
    runpy.run_path(peers, run_name="__main__")


async def measure(address: list[Any], server: int) -> None:
    """The honest client: makes round trips. For each line of the test it reports how long they took, less the noise,
    and how late it woke from its sleeps.

    Args:
        server: the process at the other end.
    """
    from peers import ask, say

    seconds: list[float] = []
    late: list[float] = []

    async def trips() -> None:
        async with trio_ucx.connect(tuple(address)) as connection:
            say("ready")
            with Noise(waited_by(server)) as noise:
                while True:
                    start = time.perf_counter()
                    await connection.send(b"are you there?")
                    await connection.receive()
                    end = time.perf_counter()
                    seconds.append(end - start - noise.since(start, end))
                    await trio.sleep(0.005)
                    late.append(time.perf_counter() - end - 0.005)

    async with trio.open_nursery() as nursery:
        nursery.start_soon(trips)
        while True:
            try:
                await ask()
            except EOFError:
                break
            say([seconds, late])
            seconds.clear()
            late.clear()
        nursery.cancel_scope.cancel()


def turned_away(lines: list[str], began: float) -> set[str]:
    """Why clients were turned away, by a log since this moment; asserts that it does not repeat itself."""
    found = Counter(re.findall(r"^INFO turned away \S+: ([^:]*)", "\n".join(lines), re.MULTILINE))
    most = 1 + (time.monotonic() - began) // LOG_INTERVAL
    assert all(count <= most for count in found.values()), f"more than {most:.0f} lines of a kind: {found}"
    return set(found)


@attrs.define(eq=False)
class AttackedServer:
    """A server under attack, an honest client of it, and the server's log."""

    address: tuple[str, int]
    peer: Peer
    honest: Peer
    log: Path
    #: When it had no lines yet.
    began: float

    def lines(self) -> list[str]:
        return self.log.read_text().splitlines() if self.log.exists() else []

    @property
    def pid(self) -> int:
        return self.peer.process.pid

    @property
    def descriptors(self) -> int:
        return len(os.listdir(f"/proc/{self.pid}/fd"))

    async def assert_well(self, kinds: int | None = None) -> None:
        """Asserts that the server still runs and serves, at its usual speed.

        Args:
            kinds: how many kinds of clients have been refused; the log has one line for each.
        """
        assert self.peer.process.poll() is None, "the server ended"
        seconds: list[float] = []
        noise: list[float] = []
        with trio.fail_after(100):
            while len(seconds) < 20:
                await self.honest.tell()
                for total, more in zip((seconds, noise), await self.honest.hear(), strict=True):
                    total += more
                await trio.sleep(0.05)
        seconds.sort()
        noise.sort()
        limit = PATIENCE + 3 * noise[len(noise) * 99 // 100]
        late = [each for each in seconds if each > limit]
        summary = (
            f"{len(seconds)} round trips, {len(late)} longer than {limit:.3f} s, the longest {seconds[-1]:.3f} s; "
            f"a sleep was late by {noise[-1]:.3f} s"
        )
        assert len(late) <= len(seconds) / 20 + 1 and seconds[-1] < 1 + 3 * noise[-1], summary
        async with ucp.open_worker() as worker:
            for _ in range(3):
                with trio.fail_after(60):
                    async with trio_ucx.connect(self.address, worker=worker, connect_timeout=60) as client:
                        client.send_nowait(pattern(100_000))
                        assert await client.receive() == pattern(100_000)
        assert self.peer.process.poll() is None, "the server ended"
        # A damaged address can name another program's port, or another host; UCX logs an error.
        lines = [line for line in self.lines() if not line.startswith(("ERROR tcp_cm.c", "ERROR select.c"))]
        assert all(line.startswith("INFO turned away") for line in lines), lines[:5]
        found = turned_away(lines, self.began)
        if kinds is not None:
            assert len(found) == kinds, found


@asynccontextmanager
async def open_attacked_server(tmp_path: Path, transports: str, **environment: str) -> AsyncIterator[AttackedServer]:
    log = tmp_path / "log"
    python = [sys.executable, "-W", "error", "-X", "faulthandler"]
    wrapper = [*python, __file__, "serve", str(log)]
    async with open_peer("echo", [0], transports=transports, under=wrapper, **environment) as server:
        address, _ = await server.hear()
        began = time.monotonic()
        honest_client = [*python, __file__, "measure", json.dumps(address), str(server.process.pid)]
        async with open_peer("measure", transports=transports, under=honest_client) as honest:
            assert await honest.hear() == "ready"
            yield AttackedServer(tuple(address), server, honest, log, began)


if __name__ == "__main__":
    if sys.argv[1] == "serve":
        # What helpers.open_peer runs: a Python and its options, then peers.py and its arguments.
        start = next(at for at, each in enumerate(sys.argv) if each.endswith("peers.py"))
        serve(sys.argv[2], *sys.argv[start:])
    else:
        trio.run(measure, json.loads(sys.argv[2]), int(sys.argv[3]))
