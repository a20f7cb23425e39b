"""What the cases have in common: parts that both ranks run at the same time, and what passes between the ranks.

Both ranks run the same program, in one guest or in two. RANK, RANKS, ADDRESS (of this guest), PEER (the other rank's),
GUESTS and GUEST are in the environment. The folder in which they run (/mnt) is shared by the ranks and the host.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
import traceback
from collections.abc import Awaitable, Callable, Iterable
from functools import partial
from pathlib import Path
from typing import Any

import trio

import trio_ucx

RANK, RANKS = int(os.environ["RANK"]), int(os.environ["RANKS"])
ADDRESS, PEER, OUT = os.environ["ADDRESS"], os.environ["PEER"], Path.cwd()
TWO_GUESTS = os.environ["GUESTS"] == "2"
KEY = b"the lab's key, which is no secret"
#: One of these files exists when the other rank has ended, or has failed in this part.
ENDED = [OUT / f"ended.{1 - RANK}"]
PARTS: dict[str, Callable[[], Awaitable[object]]] = {}


def part(function: Callable[[], Awaitable[object]]) -> Callable[[], Awaitable[object]]:
    """Marks a part: a function without arguments; what it returns is printed."""
    PARTS[function.__name__] = function
    return function


def tell(*words: object) -> None:
    sys.stdout.write(" ".join(map(str, words)) + "\n")  # in one piece: the other rank may print, too


def first(error: BaseException) -> BaseException:
    return first(error.exceptions[0]) if isinstance(error, BaseExceptionGroup) else error


def brief(error: BaseException) -> str:
    error = first(error)
    cause = f" <- {error.__cause__!r}" if error.__cause__ else ""
    return f"{error!r}{cause}".replace("\n", " | ")[:400]


def run_shell(command: str, timeout: float = 60, check: bool = True) -> str:
    done = subprocess.run(command, shell=True, capture_output=True, text=True, timeout=timeout)
    text = (done.stdout + done.stderr).strip()
    assert not check or done.returncode == 0, f"{command}: {done.returncode}: {text[-1000:]}"
    return text


async def shell(command: str, timeout: float = 60, check: bool = True) -> str:
    return await trio.to_thread.run_sync(run_shell, command, timeout, check)


# ---- between the ranks, and to the host ----


def write(name: str, text: str) -> None:
    path = OUT / f"new.{RANK}.{time.monotonic_ns()}"
    path.write_text(text)
    path.rename(OUT / name)


def put(name: str, text: object = "") -> None:
    write(f"note.{name}", str(text))


async def get(name: str, timeout: float = 200) -> str:
    with trio.fail_after(timeout):
        while True:
            ended = [path for path in ENDED if path.exists()]
            try:
                return (OUT / f"note.{name}").read_text()
            except OSError:
                assert not ended, f"the other rank has given up, and never told {name}"
                await trio.sleep(0.05)


async def barrier(name: str, timeout: float = 300) -> None:
    if RANKS == 2:
        put(f"barrier.{name}.{RANK}")
        await get(f"barrier.{name}.{1 - RANK}", timeout)


#: Faults, and what QEMU's monitor is told: frames are lost, a guest's card has no carrier, a guest is suspended.
FAULTS = {
    "cable": ("set_link cable off", "set_link cable on"),
    "carrier": ("set_link net off", "set_link net on"),
    "stop": ("stop", "cont"),
}


async def ask_host(fault: str) -> None:
    """Asks the host for a fault: "cable SECONDS", "carrier GUEST SECONDS" or "stop GUEST SECONDS"."""
    name, *guest, seconds = fault.split()
    begin, end = (f"{' '.join(guest) or 0} {command}" for command in FAULTS[name])
    order = f"order.{RANK}.{time.monotonic_ns()}"
    write(order, f"0 {begin}\n{seconds} {end}")
    with trio.fail_after(20):
        while not (OUT / f"done.{order}").exists():
            assert not (OUT / f"refused.{order}").exists(), f"the host refuses: {fault}"
            await trio.sleep(0.05)


# ---- a connection between the ranks ----


class Losses(dict[str, float]):
    """By name, when operations that were repeated for ever heard of the loss of their peer."""

    async def note(self, name: str, function: Callable[[], Awaitable[object]]) -> None:
        try:
            while True:
                await function()
        except (trio_ucx.PeerLost, trio_ucx.UCXError):
            self[name] = time.monotonic()

    def check(self, names: Iterable[str], began: float, limit: float) -> str:
        took = {name: round(at - began, 1) for name, at in self.items()}
        assert took.keys() == set(names) and max(took.values()) < limit, took
        return f"noticed after {took} s"


def check_events(connection: Any, check: bool) -> None:
    missed = connection.worker.statistics().missed_events
    assert not check or missed == 0, f"{missed} wake-ups were lost"


async def echo(c: Any) -> None:
    async for message in c.messages():
        await c.send(message)


async def connected(
    name: str,
    handler: Callable[[Any], Awaitable[object]],
    client: Callable[[Any], Awaitable[object]],
    *,
    ends: type[BaseException] | tuple[type[BaseException], ...] = trio_ucx.PeerClosed,
    check: bool = True,
    **options: Any,
) -> object:
    """Rank 0 serves one connection by the handler; rank 1 connects, and runs the client. Returns what that returned.

    Args:
        ends: exceptions with which the handler may end.
        check: whether a wake-up that was lost is an error.
    """
    if RANK == 0:
        result: list[object] = []

        async def handled(connection: Any) -> None:
            try:
                result.append(await handler(connection))
                check_events(connection, check)
            except Exception as error:
                result.append(first(error))
            finally:
                over.set()

        over = trio.Event()
        async with trio.open_nursery() as nursery:
            serve = partial(trio_ucx.serve_ucx, handled, 0, host="0.0.0.0", authkey=KEY, **options)
            server = await nursery.start(serve)
            put(f"port.{name}", server.address[1])
            while not over.is_set():
                assert not any(path.exists() for path in ENDED), "the other rank has given up"
                await trio.sleep(0.05)
            await barrier(f"done.{name}")
            nursery.cancel_scope.cancel()
        if isinstance(result[-1], Exception) and not isinstance(result[-1], ends):
            raise result[-1]
        return result[-1]
    address = f"{PEER}:{await get(f'port.{name}')}"
    async with trio_ucx.connect(address, authkey=KEY, connect_timeout=60, **options) as connection:
        note = await client(connection)
        check_events(connection, check)
    await barrier(f"done.{name}")
    return note


def main(timeout: float = 100) -> None:
    """Runs the parts that the command line names, or all, one after the other; each for `timeout` seconds at most."""
    names = sys.argv[1:] or list(PARTS)
    failed = False
    if RANK == 0:
        tell("PLAN", *names)

    async def all_parts() -> None:
        nonlocal failed
        for name in names:
            await barrier(f"begin.{name}")
            ENDED[1:] = [OUT / f"note.failed.{name}.{1 - RANK}"]
            began = time.monotonic()
            try:
                with trio.fail_after(timeout):
                    note = await PARTS[name]()
                tell(f"OK {name} rank {RANK} ({time.monotonic() - began:.1f} s)", note or "")
            except Exception as error:
                failed = True
                put(f"failed.{name}.{RANK}")
                tell(f"FAIL {name} rank {RANK} ({time.monotonic() - began:.1f} s): {brief(error)}")
                traceback.print_exception(error, limit=-3)
            ENDED[1:] = []
            await barrier(f"end.{name}", 60 + timeout)

    trio.run(all_parts)
    sys.exit(failed)
