"""The queue through which a worker receives over shared memory, as far as the engine knows it."""

from __future__ import annotations

import collections
from typing import Any, Protocol

from ..._util.process import Process


class ClosingEndpoint(Protocol):
    """The part of an endpoint that the receive queue uses."""

    handle: Any

    @property
    def peer(self) -> Process:
        """Returns the process that it leads to, as far as that is known."""

    def lanes(self) -> list[bytes] | None:
        """Returns ``transport/device`` of each lane; None if UCX does not say."""


class ReceiveQueue:
    """A queue that nobody watches. Users' workers have a :class:`~.._quirks.stopped_queue.WatchedQueue` instead.

    Attributes:
        stopped: whether nothing arrives there any more, because a process died that wrote to it.
        counters: those for ``stopped_queues``: the counters of the worker that this one succeeds, if it is a successor.
    """

    def __init__(self, counters: collections.Counter[str]) -> None:
        self.stopped = False
        self.counters = counters

    def suspect(self) -> None:
        """Called when a process may have died that wrote to this worker."""

    def endpoint_closing(self, core: ClosingEndpoint) -> None:
        """Called when an endpoint is being closed here, while its peer may be in the middle of writing."""

    def may_be_writing(self, process: Process) -> None:
        """Called when this process may be in the middle of writing, and we have no endpoint to it."""
