"""Noticing that a peer's process died, where UCX would not: endpoints by worker address over shared memory.

A worker address, and a Connection's hello, say which process they are from. On the same host, in the same pid
namespace, a pidfd becomes readable when that process ends.
"""

from __future__ import annotations

import os

import trio

from .._live_handles import live_handles
from .._process import Process, open_pidfd
from .._status import Status, UCXError
from .._util import ignoring_late_run
from .operations import EndpointCore


class Watch:
    """Watches one process for one endpoint, which fails when it dies."""

    def __init__(self, core: EndpointCore, fd: int) -> None:
        self._core = core
        self._fd = fd
        live_handles.opened("pidfd")

    async def _wait(self) -> None:
        if self._fd < 0:
            return
        try:
            await trio.lowlevel.wait_readable(self._fd)
        except trio.ClosedResourceError:
            return
        if self._fd >= 0 and self._core.engine.usable:
            try:
                self._died()
            except Exception as error:
                self._core.internal_error(error)

    def _died(self) -> None:
        # What it had sent before is in shared memory or in a socket: take it before UCX closes them.
        core = self._core
        core.engine.progress()
        core.fail(UCXError(Status.CONNECTION_RESET, f"the process at {core.label} died"))
        core.engine.receive_queue.suspect()

    def close(self) -> None:
        fd, self._fd = self._fd, -1
        if fd >= 0:
            with ignoring_late_run():
                trio.lowlevel.notify_closing(fd)
            os.close(fd)
            live_handles.closed("pidfd")


def watch_process(core: EndpointCore, process: Process) -> None:
    """Begins to watch, or does not: another host, no such process, or nothing to notice. Watched already: no effect."""
    if core.end_watch is not None or core.handle is None:
        return
    try:
        fd = open_pidfd(process)
    except ProcessLookupError:
        return
    if fd is None:
        return
    watch = Watch(core, fd)
    core.end_watch = watch.close
    try:
        core.engine.run.spawn(watch._wait, f"trio_ucx watch of process {process.pid}")
    except RuntimeError:
        core.stop_watching()
