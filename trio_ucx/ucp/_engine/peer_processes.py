"""Notices that a peer's process ended, where UCX would not: over shared memory, by worker address.

A worker address says which process it is of. On the same host, in the same PID namespace, a pidfd becomes readable when
that process ends. (A Connection has its control socket for that, which tells more.)
"""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import partial

import attrs
import trio

from ..._util.contained import contained, ignoring_late_run
from ..._util.live_handles import live_handles
from ..._util.process import Process, open_pidfd
from .trio_run import TrioRun


@attrs.define
class _Watch:
    fd: int
    #: What to call when the process ends, by who asked.
    callbacks: dict[object, Callable[[], None]] = attrs.Factory(dict)


class PeerProcesses:
    """The processes that are watched for one worker.

    An ``ended`` that raises is reported, and has no other effect.
    """

    def __init__(self, run: TrioRun) -> None:
        self._run = run
        self._watches: dict[Process, _Watch] = {}
        self._closed = False

    def watch(self, process: Process, who: object, ended: Callable[[], None]) -> bool:
        """Calls ``ended``, once, when the process ends, unless ``who`` is forgotten before.

        Returns:
            False if it cannot be watched: it is this process, or one of another host or PID namespace, say; or the
            worker closes.

        Raises:
            ProcessLookupError, OSError: see :func:`.open_pidfd`.
        """
        watch = self._watches.get(process)
        if watch is None:
            if self._closed:
                return False
            fd = open_pidfd(process)
            if fd is None:
                return False
            watch = self._watches[process] = _Watch(fd)
            live_handles.opened("pidfd")
            try:
                self._run.spawn(partial(self._wait, process, watch), f"trio_ucx watch of process {process.pid}")
            except RuntimeError:  # Trio's run is over
                self._close(process)
                return False
        watch.callbacks[who] = ended
        return True

    def forget(self, process: Process, who: object) -> None:
        """Stops watching a process for ``who``. Not watched for it, or stopped already: no effect."""
        watch = self._watches.get(process)
        if watch is not None and watch.callbacks.pop(who, None) is not None and not watch.callbacks:
            self._close(process)

    def close(self) -> None:
        """Stops watching all processes; none can be watched any more."""
        self._closed = True
        for process in list(self._watches):
            self._close(process)

    async def _wait(self, process: Process, watch: _Watch) -> None:
        if watch.fd < 0:
            return
        try:
            await trio.lowlevel.wait_readable(watch.fd)
        except trio.ClosedResourceError:
            return
        while watch.callbacks and not self._closed:
            contained(watch.callbacks.popitem()[1])  # which may forget others
        if self._watches.get(process) is watch:
            self._close(process)

    def _close(self, process: Process) -> None:
        watch = self._watches.pop(process)
        fd, watch.fd = watch.fd, -1
        with ignoring_late_run():
            trio.lowlevel.notify_closing(fd)
        os.close(fd)
        live_handles.closed("pidfd")
