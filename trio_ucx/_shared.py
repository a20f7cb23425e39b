"""The run's shared workers: made on first use, one per address family, closed when the run ends."""

from __future__ import annotations

import os
import socket

import trio

from .ucp import Worker

_workers: trio.lowlevel.RunVar[dict[socket.AddressFamily, Worker]] = trio.lowlevel.RunVar("trio_ucx workers")


def shared_worker(family: socket.AddressFamily = socket.AF_INET) -> Worker:
    """The worker that everything uses for which the user names none."""
    try:
        workers = _workers.get()
    except LookupError:
        workers = {}
        _workers.set(workers)
    worker = workers.get(family)
    if worker is None or worker._engine.handle is None:
        worker = workers[family] = Worker._open(None, _config(family))
    return worker


def _config(family: socket.AddressFamily) -> dict[str, str] | None:
    wanted = "inet6,inet" if family == socket.AF_INET6 else "inet,inet6"
    chosen = os.environ.get("UCX_TCP_AF_PRIO", "inet,inet6")
    if chosen.split(",")[0].strip() == wanted.split(",")[0]:
        return None
    return {"TCP_AF_PRIO": wanted}
