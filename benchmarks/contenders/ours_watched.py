"""trio_ucx's Connections, watched: when a message passes which point, or which system calls it needs.

The clock is read around every call into C that sends a message or looks for one. From finding a message to sending the
next one, only this process works on the message. The rest of half a round trip is the path to the other process, until
that has found it. Meanwhile the process does other things, which count only if the other process has to wait for them.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import trio

from trio_ucx._native import lib

from ..ends import Control, End, ping
from ..jobs import Batch
from . import ours

LOOP = "trio"
#: The calls into C that return records; the result is their number.
LOOKS = ("tu_poll", "tu_poll_at_once", "tu_worker_look", "tu_worker_progress_and_arm")

clock = time.perf_counter_ns


#: Between which points: the record is there; receive has returned; UCX is called; it has returned; send has returned;
#: we look for what arrives; the record is there. And from Trio's event to the record.
STEPS = ("deliver", "post", "send", "return", "begin", "look", "event")


class Watch(trio.abc.Instrument):
    """Nanoseconds of one process, message by message."""

    def __init__(self) -> None:
        self.clear()

    def clear(self) -> None:
        self.found = self.taken = self.sent = self.returned = self.looked = self.woken = 0
        self.steps: dict[str, list[int]] = {name: [] for name in STEPS}

    def after_io_wait(self, timeout: float) -> None:
        self.woken = clock()

    def install(self) -> None:
        """Replaces functions of the compiled module by ours."""
        watched = SimpleNamespace(**{name: getattr(lib, name) for name in dir(lib)})
        for name in dir(lib):
            if name in LOOKS:
                setattr(watched, name, self._look(getattr(lib, name)))
            elif name.startswith("tu_") and "send" in name:
                setattr(watched, name, self._send(getattr(lib, name)))
        for name, module in list(sys.modules.items()):
            if name.startswith("trio_ucx.") and getattr(module, "lib", None) is lib:
                module.lib = watched  # type: ignore[attr-defined]

    def _send(self, function: Callable[..., int]) -> Callable[..., int]:
        def call(*args: Any) -> int:
            begin = clock()
            verdict = function(*args)
            if self.taken:  # else a frame of the Connection's own
                self.sent = clock()
                self.steps["deliver"].append(self.taken - self.found)
                self.steps["post"].append(begin - self.taken)
                self.steps["send"].append(self.sent - begin)
                self.found = self.taken = self.looked = 0
            return verdict

        return call

    def _look(self, function: Callable[..., int]) -> Callable[..., int]:
        def call(*args: Any) -> int:
            begin = clock()
            count = function(*args)
            self.looked = self.looked or begin
            if count > 0 and self.sent and not self.found:
                self.found = clock()
                self.steps["return"].append(self.returned - self.sent)
                self.steps["begin"].append(self.looked - self.returned)
                self.steps["look"].append(self.found - self.looked)
                self.steps["event"].append(self.found - self.woken)
            return count

        return call

    def figures(self) -> dict[str, float]:
        return {f"{name}_us": statistics.median(found) / 1000 for name, found in self.steps.items() if found}


@contextlib.contextmanager
def system_calls() -> Iterator[dict[str, int]]:
    """Counts this process's system calls by name, until the block ends; none if strace is missing or forbidden."""
    counts: dict[str, int] = {}
    strace = shutil.which("strace")
    if strace is None:
        yield counts
        return
    with tempfile.TemporaryDirectory() as folder:
        output = Path(folder, "counts")
        command = [strace, "-c", "-f", "-p", str(os.getpid()), "-o", str(output)]
        with subprocess.Popen(command, stderr=subprocess.PIPE) as running:
            assert running.stderr is not None
            running.stderr.readline()  # "attached", or why not
            yield counts
            running.send_signal(signal.SIGINT)
            running.communicate()
        for line in output.read_text().splitlines() if output.exists() else ():
            fields = line.split()
            if len(fields) in (5, 6) and fields[3].isdigit() and fields[-1] != "total":
                counts[fields[-1]] = int(fields[3])


@asynccontextmanager
async def open_end(control: Control, setup: dict[str, Any]) -> AsyncIterator[End]:
    options = setup["options"]
    watch = Watch()
    if options["watch"] == "path":
        watch.install()
        if options["worker"].get("spin") == 0:  # else it would make the schedule points longer
            trio.lowlevel.add_instrument(watch)
    async with ours.open_end(control, setup) as end:
        yield WatchedEnd(end, watch, options["watch"] == "calls")


class WatchedEnd(ours.OurEnd):
    def __init__(self, end: End, watch: Watch, count: bool) -> None:
        assert isinstance(end, ours.OurEnd)
        super().__init__(end.connection)
        self.transports, self.watch, self.count = end.transports, watch, count

    async def ping(self, batch: Batch) -> list[int]:
        connection, payload, buffer, watch = self.connection, self.payload, self.buffer, self.watch
        self.last = buffer
        watch.clear()

        async def send() -> None:
            await connection.send(payload, tag=ours.TAG)
            watch.returned = clock()

        async def receive() -> None:
            await connection.receive_into(buffer, tag=ours.TAG)
            watch.taken = clock()

        with contextlib.ExitStack() as stack:
            counts = stack.enter_context(system_calls()) if self.count else {}
            times = await ping(send, receive, batch.count)
        self.more = {**watch.figures(), **{f"calls {name}": found / batch.count for name, found in counts.items()}}
        return times
