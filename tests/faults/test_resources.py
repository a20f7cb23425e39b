"""Resources run out at every kind of opening: a clear error, or it works without; and it goes on when they are back.

Each attempt is a process of its own (``starved_program.py``). It fails here if it crashes, hangs, corrupts data, raises
something else than an error for a missing resource, leaves a handle or a descriptor, or does not go on afterwards.
"""

from __future__ import annotations

import contextlib
import json
import random
import re
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import attrs
import pytest
import trio
from helpers import Rounds, open_listener
from networks import need
from refused_memory import few_allocations

import trio_ucx
from trio_ucx import ucp

from .starved_program import NEEDS_OTHER, THINGS, Round

PROGRAM = Path(__file__).with_name("starved_program.py")
SHARED = "tcp,sm,self"
#: What an error about missing descriptors or memory must say.
CLEAR = re.compile(
    r"needs \d+ file descriptors|running out of file descriptors|Too many open files|the client was told"
    r"|needs a thread|Out of memory|Cannot allocate memory|no memory|gave up the connection"
    r"|[Ss]hared memory|no System V segments|/dev/shm (cannot be written to|has \d+ bytes left)"
    r"|BrokenResourceError"
)


@attrs.frozen
class Case:
    """A thing, and what is missing meanwhile."""

    thing: str
    transports: str
    fault: str
    amount: Any

    def __str__(self) -> str:
        return f"{self.thing} over {self.transports}, {self.fault}: {self.amount}"


def attempts(cases: Sequence[Case], under: Sequence[str] = ()) -> Iterator[tuple[Case, list[Round]]]:
    """Makes the attempts; yields those that ended as they should, with what happened in their rounds."""
    command = [*under, sys.executable, "-W", "error", str(PROGRAM), json.dumps([attrs.astuple(case) for case in cases])]
    done = subprocess.run(command, capture_output=True, text=True, timeout=30 * len(cases) + 60, errors="replace")
    assert done.returncode == 0, done.stderr[-3000:]
    said = done.stderr.split("---- ")[1:]
    for case, line, stderr in zip(cases, done.stdout.splitlines(), said, strict=True):
        _, status, report = json.loads(line)
        assert status == 0, f"{case}: exit status {status}: {stderr[:6000]}"
        yield case, [Round(*each) for each in report]


def check(case: Case, rounds: list[Round]) -> None:
    """What holds of every attempt."""
    for each in rounds:
        assert each.error is None or CLEAR.search(each.error), f"{case}: {each.error}"
        assert each.goes_on_with != "new workers", f"{case}: {each}"


def sample(cases: list[Case], few: int, rounds: Rounds, chance: random.Random) -> list[Case]:
    return chance.sample(cases, rounds(few, len(cases)))


# ---- descriptors ----

#: With so few left, UCX loses for good what it needs for these: it chooses a protocol for the first large message, and
#: closes the worker's TCP port when it cannot accept. reliability.md, Known limits.
LOST_FOR_GOOD = {
    "large_message": 2,
    "first_raw_message": 4,
    "active_message": 4,
    "memory": 4,
    "atomic": 4,
    "chain": 4,
    "reached_by_address": 8,
}


@pytest.mark.sample(1)
@pytest.mark.parametrize("transports", ["tcp", SHARED])
@pytest.mark.timeout(1200)
def test_few_descriptors_at_every_opening(transports: str, rounds: Rounds, chance: random.Random) -> None:
    cases = [
        Case(thing, transports, "descriptors", left)
        for thing in THINGS
        for left in range(16)
        if left >= LOST_FOR_GOOD.get(thing, 0)
    ]
    for case, found in attempts(sample(cases, 10, rounds, chance)):
        check(case, found)


@pytest.mark.full
@pytest.mark.sample(1)
@pytest.mark.parametrize("transports", ["tcp", SHARED])
def test_what_ucx_loses_for_good_ends_with_its_workers(transports: str, rounds: Rounds, chance: random.Random) -> None:
    """Other workers of the same process are not affected."""
    cases = [Case(thing, transports, "descriptors", 0) for thing in LOST_FOR_GOOD if thing not in NEEDS_OTHER]
    for case, found in attempts(sample(cases, 1, rounds, chance)):
        assert found, case  # each attempt has gone on in the end, if only with new workers


# ---- memory ----

#: Not tried without memory for the C code: eager active messages are dropped then, as ucp.md says.
LOST_WITHOUT_MEMORY = {"active_message"}
#: UCX ends the process when it cannot start its thread.
STARTS_THREADS = {"context", "shared_worker"}


@pytest.mark.sample(1)
@pytest.mark.parametrize("transports", ["tcp", SHARED])
@pytest.mark.timeout(1200)
def test_no_memory_for_the_c_code(transports: str, rounds: Rounds, chance: random.Random) -> None:
    cases = [
        Case(thing, transports, "allocations", allowed)
        for thing in THINGS
        for allowed in range(6)
        if thing not in LOST_WITHOUT_MEMORY
    ]
    for case, found in attempts(sample(cases, 8, rounds, chance)):
        check(case, found)


@pytest.mark.parametrize("transports", ["tcp", SHARED])
async def test_without_memory_a_connection_opens_on_both_sides_or_on_neither(transports: str) -> None:
    """A side that could not post its HELLO had no connection, and the other one had."""
    config = {"TLS": transports}
    opened = []
    for allowed in range(20):
        async with ucp.open_worker(config=config) as one, ucp.open_worker(config=config) as other:
            async with open_listener(other) as listener:
                client = None
                with few_allocations(allowed), contextlib.suppress(OSError):
                    client = await trio_ucx.connect(listener.address, worker=one, connect_timeout=60).__aenter__()
                opened.append(client is not None)
                if client is not None:
                    with trio.fail_after(15):
                        server = await listener.accept()
                        await client.send(b"there")
                        assert await server.receive() == b"there"
                        await server.send(b"back")
                        assert await client.receive() == b"back"
                    client.abort()
                    server.abort()
    assert opened[-1] and not opened[0], opened


@pytest.mark.sample(1)
@pytest.mark.parametrize("transports", ["tcp", SHARED])
@pytest.mark.timeout(1200)
def test_little_address_space(transports: str, rounds: Rounds, chance: random.Random) -> None:
    """With less than this UCX itself ends the process: reliability.md, Known limits."""
    things = [thing for thing in THINGS if thing not in STARTS_THREADS]
    cases = [Case(thing, transports, "memory", kilobytes) for thing in things for kilobytes in (16384, 32768)]
    for case, found in attempts(sample(cases, 4, rounds, chance)):
        check(case, found)


# ---- shared memory, locked memory, the network ----


def in_namespaces(commands: str, *namespaces: str) -> list[str]:
    return ["unshare", *namespaces, "sh", "-c", f'{commands} && exec "$@"', "sh"]


SMALL_DEV_SHM = "mount -t tmpfs -o size=64m tmpfs /dev/shm"
LOCAL = [
    ("sysv", "shmmax", SHARED),
    ("sysv", "shmall", SHARED),
    ("sysv", "shmmni", SHARED),
    ("dev_shm", 64, "tcp,posix,self"),
    ("read_only_dev_shm", 0, "tcp,posix,self"),
    ("memlock", 0, SHARED),
]


@pytest.mark.sample(2)
@pytest.mark.parametrize(("fault", "amount", "transports"), LOCAL, ids=[f"{each[0]}-{each[1]}" for each in LOCAL])
def test_shared_and_locked_memory(
    fault: str, amount: Any, transports: str, rounds: Rounds, chance: random.Random
) -> None:
    need("unshare", "--ipc", "--mount", "true", why="limits of shared memory")
    cases = [Case(thing, transports, fault, amount) for thing in THINGS]
    for case, found in attempts(sample(cases, 2, rounds, chance), in_namespaces(SMALL_DEV_SHM, "--ipc", "--mount")):
        check(case, found)


@pytest.mark.parametrize("transports", ["tcp", SHARED])
def test_no_device_but_loopback(transports: str, rounds: Rounds, chance: random.Random) -> None:
    need("unshare", "--net", "true", why="network namespaces")
    cases = [Case(thing, transports, "none", 0) for thing in THINGS]
    for case, found in attempts(sample(cases, 2, rounds, chance), in_namespaces("ip link set lo up", "--net")):
        assert [each.error for each in found] == [None, None], case
