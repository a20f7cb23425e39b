"""Noticing that a peer's process died, where UCX would not: connections by worker address over shared memory.

A hello says which process its sender is. On the same host, in the same pid namespace, a pidfd becomes readable when
that process ends.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import cache
from pathlib import Path

import trio

from ._wire import Process
from .ucp._engine import Engine
from .ucp._operations import live_handles


@cache
def _host() -> bytes:
    try:
        text = Path("/proc/sys/kernel/random/boot_id").read_text()
        return bytes.fromhex(text.strip().replace("-", ""))
    except (OSError, ValueError):
        return bytes(16)


def _namespace() -> int:
    try:
        return os.stat("/proc/self/ns/pid").st_ino
    except OSError:
        return 0


def _start_time(pid: int) -> int:
    """In clock ticks since boot; 0 when there is no such process."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        return int(fields[19])
    except (OSError, ValueError, IndexError):
        return 0


def this_process() -> Process:
    return Process(_host(), _namespace(), os.getpid(), _start_time(os.getpid()))


class Watch:
    """Watches one process for one connection."""

    def __init__(self, engine: Engine, fd: int, died: Callable[[], None]) -> None:
        self._engine = engine
        self._fd = fd
        self._died = died
        live_handles["pidfd"] += 1

    @classmethod
    def open(cls, engine: Engine, process: Process, died: Callable[[], None]) -> Watch | None:
        """Begins to watch, or does not: another host, no such process, or nothing to notice."""
        ours = this_process()
        if not process.pid or not any(process.host) or process.pid == ours.pid:
            return None
        if (process.host, process.namespace) != (ours.host, ours.namespace):
            return None
        try:
            fd = os.pidfd_open(process.pid)
        except OSError:
            return None
        if _start_time(process.pid) != process.start:
            os.close(fd)
            return None
        watch = cls(engine, fd, died)
        try:
            trio.lowlevel.spawn_system_task(watch._wait, name=f"trio_ucx watch of process {process.pid}")
        except RuntimeError:
            watch.close()
            return None
        return watch

    async def _wait(self) -> None:
        if self._fd < 0:
            return
        try:
            await trio.lowlevel.wait_readable(self._fd)
        except trio.ClosedResourceError:
            return
        if self._fd >= 0 and self._engine.usable:
            self._engine.guard(self._died)

    def close(self) -> None:
        fd, self._fd = self._fd, -1
        if fd >= 0:
            try:
                trio.lowlevel.notify_closing(fd)
            except RuntimeError:
                pass
            os.close(fd)
            live_handles["pidfd"] -= 1
