"""``python -m trio_ucx mesh``: starts the ranks of a mesh as processes of this machine, for trying things.

A rank and what it starts are a process group, which gets the signals and ends with the rank. Only a process that
leaves the group, as daemons do, escapes. The kernel kills a rank when the launcher has been killed.
"""

from __future__ import annotations

import argparse
import ctypes
import importlib.util
import math
import os
import secrets
import signal
import subprocess
import sys
import tempfile
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any

import attrs
import trio

from .._opening.authkey import AUTHKEY
from .._util.hidden import HiddenText
from .errors import how_it_ended

#: Seconds that the other ranks may take to end by themselves after one has failed, and then after SIGTERM.
GRACE, AFTER_SIGTERM = 10.0, 5.0
#: Seconds to wait for more output of a rank that has ended: its pipe stays open if another process has it, too.
_LAST_OUTPUT = 1.0
#: Longer lines are split.
_LONGEST_LINE = 2**20
_PASSED_ON = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
_PR_SET_PDEATHSIG = 1


def add_command(commands: Any) -> None:
    parser = commands.add_parser(
        "mesh",
        help="start the ranks of a mesh on this machine",
        description="Starts a Python program several times, for trio_ucx.mesh.join(). Each line of output gets the "
        "rank as a prefix. When a rank fails and is not started again, the others end, too, and its exit status is "
        "returned.",
    )
    parser.add_argument(
        "--ranks", type=_parse_ranks, metavar="N", help="number of processes (default: the number of CPUs)"
    )
    parser.add_argument(
        "--grace",
        type=_parse_grace,
        default=GRACE,
        metavar="S",
        help="seconds that the other ranks have to end by themselves when one has failed, or after Ctrl-C "
        f"(default {GRACE:g}); then they get SIGTERM, and {AFTER_SIGTERM:g} seconds later SIGKILL",
    )
    parser.add_argument(
        "--restart",
        type=_parse_restarts,
        default=0,
        metavar="N",
        help="start a rank again when it has failed, at most N times in all (default 0), but not rank 0, whose loss "
        'ends the group. The program needs join(on_loss="continue")',
    )
    parser.add_argument(
        "-m", dest="module", action="store_true", help="PROGRAM is the name of a module, as for python -m"
    )
    parser.add_argument("program", metavar="PROGRAM", help="a Python program")
    parser.add_argument("arguments", nargs=argparse.REMAINDER, metavar="ARGUMENTS", help="its arguments")

    def run(arguments: argparse.Namespace) -> int:
        if arguments.module and not _has_module(arguments.program):
            parser.error(f"there is no module {arguments.program}")
        if not arguments.module and not Path(arguments.program).exists():
            parser.error(f"there is no program {arguments.program}")
        return trio.run(run_ranks, arguments)

    parser.set_defaults(run=run, prog=parser.prog)


def _parse_ranks(text: str) -> int:
    if not text.isascii() or not text.isdecimal() or not 1 <= int(text) <= 2**16:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of processes")
    return int(text)


def _has_module(name: str) -> bool:
    """False if there is no such module for certain. Nothing is imported, so only its package is looked for."""
    package = name.partition(".")[0]
    return bool(package) and importlib.util.find_spec(package) is not None


def _parse_restarts(text: str) -> int:
    if not text.isascii() or not text.isdecimal() or len(text) > 9:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of restarts")
    return int(text)


def _parse_grace(text: str) -> float:
    with suppress(ValueError):
        if 0 <= (seconds := float(text)) <= 10**6:
            return seconds
    raise argparse.ArgumentTypeError(f"{text!r} is not a number of seconds")


async def run_ranks(arguments: argparse.Namespace) -> int:
    """Starts all ranks, and waits until they have ended; returns the exit status of the first that has failed, or 0.

    A rank that failed and was started again has not failed.
    """
    size: int = arguments.ranks or len(os.sched_getaffinity(0))
    command = [sys.executable, *(["-m"] if arguments.module else []), arguments.program, *arguments.arguments]
    ranks = Ranks(command, arguments.grace, arguments.prog, arguments.restart)
    with tempfile.TemporaryDirectory(prefix="trio_ucx-mesh-") as folder, trio.open_signal_receiver(*_PASSED_ON) as got:
        with ranks.ended_with_block():
            for rank, environment in enumerate(environments(size, Path(folder) / "address")):
                ranks.start(rank, environment)
            async with trio.open_nursery() as nursery:
                nursery.start_soon(ranks.pass_on, got, nursery.cancel_scope)
                nursery.start_soon(ranks.end_others)
                await ranks.wait()
                nursery.cancel_scope.cancel()
    if ranks.failed is not None:
        print(f"{arguments.prog}: {ranks.failed.ending}", file=sys.stderr, flush=True)
        return ranks.failed.exit_status
    return 0 if ranks.stopped_by is None else 128 + ranks.stopped_by


def environments(size: int, meeting: Path) -> Iterator[dict[str, str]]:
    """The environment of each rank, as :mod:`trio_ucx.mesh._place` reads it."""
    authkey = HiddenText(secrets.token_hex(32))
    for rank in range(size):
        yield {
            "PYTHONUNBUFFERED": "1",  # or lines would come late, because stdout is a pipe
            **os.environ,
            "TRIO_UCX_RANK": str(rank),
            "TRIO_UCX_SIZE": str(size),
            "TRIO_UCX_MEETING": meeting.as_uri(),
            AUTHKEY: authkey,
        }


@attrs.define(eq=False)
class Rank:
    """A process that was started.

    Attributes:
        pidfd: readable when the process has ended.
        status: its return code, negative for a signal; None while it runs.
    """

    number: int
    environment: Mapping[str, str]
    process: subprocess.Popen[bytes]
    pidfd: int
    status: int | None = None

    @property
    def exit_status(self) -> int:
        """The exit status as a shell shows it."""
        assert self.status is not None
        return self.status if self.status >= 0 else 128 - self.status

    @property
    def ending(self) -> str:
        """Returns how it ended, in words."""
        assert self.status is not None
        return f"rank {self.number} (pid {self.process.pid}) {how_it_ended(self.status)}"

    def signal(self, number: int) -> None:
        """Sends a signal to the process group, unless the rank has ended."""
        if self.status is None:
            with suppress(ProcessLookupError):
                os.killpg(self.process.pid, number)

    def reap(self) -> None:
        """Waits for the end of the process, and kills what it has left in its group.

        The group is killed before the process is reaped: until then no other process gets its id.
        """
        if self.status is None:
            os.waitid(os.P_PIDFD, self.pidfd, os.WEXITED | os.WNOWAIT)
            self.signal(signal.SIGKILL)
            self.status = self.process.wait()
            os.close(self.pidfd)


@attrs.define(eq=False)
class Ranks:
    """All ranks, and how they end.

    Attributes:
        restarts: how many times a rank may be started again, and how often one was.
    """

    command: Sequence[str]
    grace: float
    prog: str
    restarts: int
    restarted: int = 0
    ranks: list[Rank] = attrs.field(factory=list)
    #: The first rank that has failed.
    failed: Rank | None = None
    #: The signal that ended everything at once.
    stopped_by: int | None = None
    #: Set when all ranks are to end.
    ending: trio.Event = attrs.field(factory=trio.Event)
    #: Held while lines are written, which may go to the same terminal from stdout and stderr.
    writing: trio.Lock = attrs.field(factory=trio.Lock)

    @contextmanager
    def ended_with_block(self) -> Iterator[None]:
        """Kills the ranks that have not ended when the block is left, however it is left."""
        try:
            yield
        finally:
            for rank in self.ranks:
                rank.signal(signal.SIGKILL)
            for rank in self.ranks:
                rank.reap()
                for pipe in (rank.process.stdout, rank.process.stderr):
                    assert pipe is not None
                    pipe.close()

    def start(self, number: int, environment: Mapping[str, str]) -> Rank:
        # Not by Trio, which starts processes in a thread: PR_SET_PDEATHSIG is about the end of the parent's thread.
        process = subprocess.Popen(
            self.command,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            bufsize=0,
            process_group=0,
            preexec_fn=partial(_die_with_parent, os.getpid()),
        )
        rank = Rank(number, environment, process, os.pidfd_open(process.pid))
        self.ranks.append(rank)
        return rank

    def signal(self, number: int) -> None:
        for rank in self.ranks:
            rank.signal(number)

    async def wait(self) -> None:
        """Waits until all ranks have ended, and writes their output."""
        async with trio.open_nursery() as nursery:
            for rank in self.ranks:
                nursery.start_soon(self._attend, rank, nursery)

    async def _attend(self, rank: Rank, of_all: trio.Nursery) -> None:
        outputs = [
            (Output(trio.lowlevel.FdStream(os.dup(pipe.fileno()))), target.fileno())
            for pipe, target in ((rank.process.stdout, sys.stdout), (rank.process.stderr, sys.stderr))
            if pipe is not None
        ]
        async with trio.open_nursery() as nursery:
            for output, target in outputs:
                nursery.start_soon(self._copy, rank.number, output, target)
            await trio.lowlevel.wait_readable(rank.pidfd)
            rank.reap()
            for output, _ in outputs:
                output.rank_has_ended()
            if rank.status != 0:
                self._failed(rank, of_all)

    def _failed(self, rank: Rank, of_all: trio.Nursery) -> None:
        """A rank has failed: it is started again, or all others are to end. A rank can join again while rank 0 runs."""
        if self.restarted < self.restarts and not self.ending.is_set() and self.ranks[0].status is None:
            self.restarted += 1
            line = f"{self.prog}: {rank.ending}; restart {self.restarted} of {self.restarts}\n"
            of_all.start_soon(self._write, sys.stderr.fileno(), line.encode())
            of_all.start_soon(self._attend, self.start(rank.number, rank.environment), of_all)
        else:
            self.failed = self.failed or rank
            self.ending.set()

    async def _copy(self, number: int, output: Output, target: int) -> None:
        async with output.stream:
            async for lines in output.lines(b"[%d] " % number):
                await self._write(target, lines)

    async def _write(self, target: int, data: bytes) -> None:
        async with self.writing:
            await trio.to_thread.run_sync(_write, target, data, abandon_on_cancel=True)

    async def pass_on(self, signals: AsyncIterator[int], everything: trio.CancelScope) -> None:
        """Passes the first signal on to all ranks, which are to end then. The second one ends everything at once."""
        self.signal(await anext(signals))
        self.ending.set()
        self.stopped_by = await anext(signals)
        everything.cancel()

    async def end_others(self) -> None:
        """Ends the ranks that do not end by themselves when they are to."""
        await self.ending.wait()
        await trio.sleep(self.grace)
        self.signal(signal.SIGTERM)
        await trio.sleep(AFTER_SIGTERM)
        self.signal(signal.SIGKILL)


@attrs.define(eq=False)
class Output:
    """What a rank writes to stdout or stderr."""

    stream: trio.lowlevel.FdStream
    patience: float = math.inf
    waiting: trio.CancelScope | None = None

    def rank_has_ended(self) -> None:
        self.patience = _LAST_OUTPUT
        if self.waiting is not None:
            self.waiting.deadline = trio.current_time() + self.patience

    async def lines(self, prefix: bytes) -> AsyncIterator[bytes]:
        """Yields whole lines, one or several at a time, with a prefix before each."""
        begun = b""
        while data := await self._receive():
            *lines, begun = (begun + data).split(b"\n")
            if len(begun) > _LONGEST_LINE:
                lines.append(begun)
                begun = b""
            if lines:
                yield b"".join(prefix + line + b"\n" for line in lines)
        if begun:
            yield prefix + begun + b"\n"

    async def _receive(self) -> bytes:
        with trio.move_on_after(self.patience) as self.waiting:
            return bytes(await self.stream.receive_some())
        return b""


def _write(target: int, data: bytes) -> None:
    while data:
        data = data[os.write(target, data) :]


_libc = ctypes.CDLL(None)


def _die_with_parent(parent: int) -> None:
    """In a new process: asks the kernel to kill it when its parent has ended, and ends if it has already."""
    _libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(1)
