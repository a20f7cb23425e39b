"""Starts the ranks of a program as processes of this machine, which meet by a file."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

import pytest

#: Seconds that a rank has to write what a test waits for, or to end.
DEADLINE = 45.0
#: UCX's lines about connections that were cut off.
_OF_LOST_PEERS = re.compile(r"^(tcp_ep\.c:\d+ UCX ERROR|callbackq\.c:\d+ UCX WARN) .*\n", re.MULTILINE)


class Rank:
    """A process, whose output goes to files."""

    def __init__(self, command: Sequence[str], environment: Mapping[str, str], files: Path) -> None:
        self._output, self._errors = files.with_suffix(".out"), files.with_suffix(".err")
        with self._output.open("w") as output, self._errors.open("w") as errors:
            self.process = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=output, stderr=errors, env=environment
            )

    @property
    def output(self) -> str:
        return self._output.read_text()

    @property
    def errors(self) -> str:
        """stderr, without what UCX says of peers that were lost."""
        return _OF_LOST_PEERS.sub("", self._errors.read_text())

    def wait_output(self, pattern: str, begin: int = 0) -> None:
        """Waits until the output, from its character ``begin`` on, has a line that matches."""
        self._wait(pattern, lambda: self.output[begin:])

    def wait_error(self, pattern: str) -> None:
        """Waits until stderr has a line that matches."""
        self._wait(pattern, lambda: self.errors)

    def _wait(self, pattern: str, text: Callable[[], str]) -> None:
        end = time.monotonic() + DEADLINE
        while not re.search(pattern, text(), re.MULTILINE):
            assert self.process.poll() is None and time.monotonic() < end, f"nothing like {pattern!r} of {self}"
            time.sleep(0.02)

    def finish(self) -> int:
        """Waits until it has ended. Returns its status."""
        try:
            return self.process.wait(DEADLINE)
        except subprocess.TimeoutExpired:
            self.process.send_signal(signal.SIGABRT)  # faulthandler says where it hangs
            self.process.wait(DEADLINE)
            pytest.fail(f"a rank hangs: {self}")

    def kill(self) -> None:
        """Kills it with SIGKILL, if it runs."""
        self.process.kill()
        self.process.wait()

    def __str__(self) -> str:
        return f"process {self.process.pid}, status {self.process.poll()}:\n{self.output}{self.errors}"


class Ranks(dict[int, Rank]):
    """The ranks of one group, by number. One that is started again replaces the one before."""

    def __init__(self, size: int, folder: Path, program: Path, arguments: tuple[object, ...]) -> None:
        super().__init__()
        self._size, self._folder = size, folder
        self._command = [sys.executable, str(program), *map(str, arguments)]
        self._started: list[Rank] = []

    def start(self, rank: int, *, under: Sequence[str] = (), **environment: str) -> Rank:
        """Starts a rank, under a command that runs another one if need be."""
        environment = {
            **os.environ,
            "TRIO_UCX_RANK": str(rank),
            "TRIO_UCX_SIZE": str(self._size),
            "TRIO_UCX_MEETING": f"file://{self._folder}/meeting",
            "PYTHONWARNINGS": "error",
            "PYTHONUTF8": "1",
            "PYTHONUNBUFFERED": "1",
            "PYTHONFAULTHANDLER": "1",
            "OPENBLAS_NUM_THREADS": "1",
            **environment,
        }
        self[rank] = started = Rank([*under, *self._command], environment, self._folder / f"{len(self._started)}")
        self._started.append(started)
        return started

    def finish(self) -> str:
        """Waits until all have ended without a complaint. Returns what they have printed, in the ranks' order."""
        for number, rank in sorted(self.items()):
            assert (rank.finish(), rank.errors) == (0, ""), f"rank {number}, {rank}"
        return "".join(rank.output for _, rank in sorted(self.items()))

    def kill(self) -> None:
        for rank in self._started:
            rank.kill()


@contextmanager
def ranks(size: int, folder: Path, program: Path, *arguments: object, start: bool = True) -> Iterator[Ranks]:
    """Starts so many ranks of a program; kills those that still run at the end of the block.

    Args:
        folder: for the file in which they meet, and for their output.
        start: False: the test starts them.
    """
    started = Ranks(size, folder, program, arguments)
    try:
        for rank in range(size if start else 0):
            started.start(rank)
        yield started
    finally:
        started.kill()
