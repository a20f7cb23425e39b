"""The log of one process: one JSON object a line, each written by one ``write``, so that a killed process loses none.

Every line has ``t`` (CLOCK_MONOTONIC in nanoseconds, which processes of one machine share), ``pid`` and ``e``, the kind
of event. An operation has two lines: ``begin``, before it is called, and ``end``, with its outcome, after it returned.

====== ============================================================================================================
kind   what it says
====== ============================================================================================================
start  the process has begun: role, name, transports
begin  an operation begins: op (its number in this process), c (the connection), k (which operation), its arguments
end    it has ended: op, o (the outcome: ok, cancelled, late, broken, closed, end, error), why, what was received
open   a connection was opened: c, side ("client" or "server"), and for the client peer, the server's process id
ending a side ends a connection: c, side, how: "close", "abort", "exception", "exit"
over   a side has ended a connection, and all its operations: c, side, all (whether it received until the end)
am     the server received an active message: c, n, fault (None if it is as it was sent)
sample once a second: fds, threads, rss, starved (ns in which it could not run: stopped, or the machine let it wait)
worker once a second: missed_events and stopped_queues of the worker
finish the process ends by itself: handles (alive), missed_events
====== ============================================================================================================

The parent's log has ``spawn``, ``ready`` (all have started, the load begins), ``exited``, ``kill``, ``stop``,
``continue``, ``hung`` and ``machine``.
"""

from __future__ import annotations

import heapq
import json
import os
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import attrs

now = time.monotonic_ns


@attrs.frozen
class Event:
    """One line of a log.

    Attributes:
        line: the line itself.
        source: the file that it is in, and the line's number there.
    """

    t: int
    pid: int
    kind: str
    fields: dict[str, Any]
    line: str
    source: str

    def __getitem__(self, name: str) -> Any:
        return self.fields[name]

    def get(self, name: str, default: Any = None) -> Any:
        return self.fields.get(name, default)

    def __str__(self) -> str:
        return f"{self.source}: {self.line}"


class Log:
    """Appends to the log of this process."""

    def __init__(self, folder: Path, name: str) -> None:
        self._descriptor = os.open(
            folder / f"{name}.jsonl", os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o644
        )
        self._pid = os.getpid()
        self._operations = 0

    def event(self, kind: str, **fields: Any) -> int:
        """Writes one line; returns its time."""
        t = now()
        line = json.dumps({"t": t, "pid": self._pid, "e": kind, **fields}, separators=(",", ":"))
        os.write(self._descriptor, line.encode() + b"\n")
        return t

    def begin(self, connection: str, kind: str, **fields: Any) -> int:
        """Writes that an operation begins; returns its number."""
        self._operations += 1
        self.event("begin", op=self._operations, c=connection, k=kind, **fields)
        return self._operations

    def close(self) -> None:
        os.close(self._descriptor)


def parse(line: str, source: str = "") -> Event:
    """One line of a log.

    Raises:
        ValueError: it is none, such as a line that was cut off when the disk was full.
    """
    fields = json.loads(line)
    return Event(fields.pop("t"), fields.pop("pid"), fields.pop("e"), fields, line, source)


def read(folder: Path) -> Iterator[Event]:
    """The events of all logs in a folder, in the order of their times."""
    return heapq.merge(*(_read_file(path) for path in sorted(folder.glob("*.jsonl"))), key=_time)


def _time(event: Event) -> int:
    return event.t


def _read_file(path: Path) -> Iterator[Event]:
    with path.open() as file:
        for number, line in enumerate(file, 1):
            yield parse(line.rstrip("\n"), f"{path.name}:{number}")


def events(lines: Iterable[dict[str, Any]], source: Callable[[int], str] = lambda number: f"{number}") -> list[Event]:
    """Events that were not read from a file, for tests: dicts with ``t``, ``pid`` and ``e``."""
    return [parse(json.dumps(line), source(number)) for number, line in enumerate(lines, 1)]
