"""The run's shared worker: opened on first use, closed when the run ends."""

from __future__ import annotations

import trio

from ..ucp import Worker

_worker: trio.lowlevel.RunVar[Worker] = trio.lowlevel.RunVar("trio_ucx worker")


def shared_worker() -> Worker:
    """Returns the worker of all that is opened without ``worker=``.

    Opens one if there is none, or it was closed, or broke.
    """
    try:
        worker = _worker.get()
    except LookupError:
        worker = None
    if worker is not None:
        worker._engine.run.check("this run's worker")
    if worker is None or worker._engine.handle is None or worker._engine.broken is not None:
        worker = Worker._open(None, None)
        _worker.set(worker)
    return worker
