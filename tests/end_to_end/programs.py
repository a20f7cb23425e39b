"""Runs the examples and the command line as their users do: in processes of their own."""

from __future__ import annotations

import contextlib
import importlib.util
import os
import re
import select
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType

import pytest
import trio

EXAMPLES = Path(__file__).parent.parent.parent / "examples"
DEADLINE = 45  # seconds that a program has to end
#: UCX's lines about connections that were cut off.
_OF_LOST_PEERS = re.compile(r"^(tcp_ep\.c:\d+ UCX ERROR|callbackq\.c:\d+ UCX WARN) .*\n", re.MULTILINE)


def load(path: Path) -> ModuleType:
    """An example as a module, to test its parts."""
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[path.stem] = module
    spec.loader.exec_module(module)
    return module


def run_here(module: ModuleType, *arguments: object) -> int:
    """Runs an example in this process, as its command line would: its exit status. Processes take their time to start.

    Not from within Trio: it has a run of its own. In a thread, if it heeds no signals.
    """
    before = sys.argv
    sys.argv = [f"{module.__name__}.py", *map(str, arguments)]
    try:
        status: int = module.main()
    except SystemExit as exit:
        assert isinstance(exit.code, int)
        status = exit.code
    finally:
        sys.argv = before
    return status


def assert_complaint(errors: str, program: Path, reason: str = "") -> None:
    """Asserts that a program said in one line what went wrong."""
    assert errors.startswith(f"{program.stem}: ") and errors.count("\n") == 1 and reason in errors, errors


class Program:
    """An example in a process, which has ended when its block is left."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self.process = process
        self.address = ""
        self.output = ""  # what it printed that was not read before, once it has ended

    def finish(self) -> tuple[int, str]:
        """Waits until it has ended: (exit status, stderr without what UCX says of peers that were lost)."""
        try:
            self.output, errors = self.process.communicate(timeout=DEADLINE)
        except subprocess.TimeoutExpired:
            self.process.send_signal(signal.SIGABRT)  # faulthandler says where it hangs
            pytest.fail(f"{self.process.args!r} hangs: {self.process.communicate()[1]}")
        return self.process.returncode, _OF_LOST_PEERS.sub("", errors)

    async def end(self) -> tuple[int, str]:
        return await trio.to_thread.run_sync(self.finish)

    async def read_line(self) -> str:
        """The next line that it prints, without the newline."""
        assert self.process.stdout is not None
        return (await trio.to_thread.run_sync(self.process.stdout.readline)).rstrip("\n")

    async def wait_address(self) -> None:
        """Sets ``address`` to what it says it listens at."""
        line = await self.read_line()
        words, _, self.address = line.rpartition(" ")
        assert words == "listening at", line


@contextmanager
def program(path: Path, *arguments: object) -> Iterator[Program]:
    """Runs an example; ends it by force, if need be, with the block."""
    environment = dict(os.environ, PYTHONWARNINGS="error", PYTHONUTF8="1", PYTHONFAULTHANDLER="1")
    command = [sys.executable, str(path), *map(str, arguments)]
    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, errors="backslashreplace", env=environment
    )
    with process:
        try:
            yield Program(process)
        finally:
            if process.poll() is None:
                process.kill()


COMMAND = [sys.executable, "-m", "trio_ucx"]
TIMEOUT = 60
AUTHKEY = "a key for programs in tests"
QUICK = ["--sizes", "8,1k,64k", "--iterations", "20"]


def environment(without: Sequence[str] = (), **changes: str) -> dict[str, str]:
    """This process's environment with a key for ``perf``, and without UCX's options and a key of this user. Warnings,
    such as those for leaks, are errors there.
    """
    clean = {name: value for name, value in os.environ.items() if not name.startswith("UCX_")}
    clean |= {"PYTHONWARNINGS": "error", "TRIO_UCX_AUTHKEY": AUTHKEY, "XDG_CONFIG_HOME": "/dev/null", **changes}
    return {name: value for name, value in clean.items() if name not in without}


def run_cli(*arguments: str, without: Sequence[str] = (), **changes: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [*COMMAND, *arguments], env=environment(without, **changes), capture_output=True, text=True, timeout=TIMEOUT
    )


@contextlib.contextmanager
def start_cli(
    *arguments: str, stderr: int = subprocess.PIPE, without: Sequence[str] = (), **changes: str
) -> Iterator[subprocess.Popen[str]]:
    """A process in a session of its own, which is killed at the end of the block if it still runs."""
    process = subprocess.Popen(
        [*COMMAND, *arguments],
        env=environment(without, **changes),
        stdout=subprocess.PIPE,
        stderr=stderr,
        text=True,
        start_new_session=True,
    )
    with process:
        try:
            yield process
        finally:
            process.kill()


def read_line(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    ready, _, _ = select.select([process.stdout], [], [], TIMEOUT)
    assert ready, "no output"
    return process.stdout.readline()


def listening_address(server: subprocess.Popen[str]) -> str:
    assert server.stdout is not None
    line, other_side = read_line(server), server.stdout.readline()
    assert line.startswith("listening at ") and other_side.startswith("on the other machine"), (line, other_side)
    return line.split()[-1]
