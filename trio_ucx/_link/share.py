"""A Connection's share in the endpoint that all Connections between two workers use."""

from __future__ import annotations

from collections.abc import Callable

from .._native import lib
from ..ucp import UCXError
from ..ucp._contained import contained
from ..ucp._engine.operations import EndpointCore, Operation, Scope, worker_error


class Share(Scope):
    """The operations, the waits and the end of one Connection at a shared endpoint.

    When it ends, what UCX still does for it goes on, detached, as long as the endpoint is there.

    Args:
        endpoint: it must be open.
        label: what to call the peer in messages.
    """

    __slots__ = ("endpoint", "on_close", "on_internal_error")

    def __init__(self, endpoint: EndpointCore, label: str) -> None:
        super().__init__(endpoint.engine, endpoint.engine.next_id(), endpoint.handle, label)
        self.endpoint = endpoint
        self.peer_address = endpoint.peer_address
        self.features, self.tags = endpoint.features, endpoint.tags
        #: Called once, when the endpoint is closed (not when it fails, or the share is closed).
        self.on_close: Callable[[], None] | None = None
        #: Called with an exception in our own code, instead of failing.
        self.on_internal_error: Callable[[BaseException], None] | None = None
        self.error = endpoint.error
        endpoint.join(self)

    @property
    def native(self) -> EndpointCore:
        return self.endpoint

    def changed(self) -> None:
        super().changed()
        self.endpoint.changed()

    def fail(self, error: UCXError, *, keep: bool = False) -> None:
        """Marks it as failed, ends its operations, and leaves the endpoint. Failed or closed already: no effect.

        Args:
            keep: whether nothing was left at the endpoint: see :meth:`Pair.left`.
        """
        if self.gone:
            return
        self.error = error
        try:
            self._end(keep)
        finally:
            self.failed()

    def close(self, *, keep: bool = False) -> None:
        """Ends its operations with ClosedResourceError, and leaves the endpoint. Failed already: forgets what to call.

        Args:
            keep: as for :meth:`fail`.
        """
        self.on_failure = self.on_close = None
        if self.handle is not None:
            self._end(keep)

    def _end(self, keep: bool) -> None:
        self.handle = None
        operations = list(self.pending)
        self.end_operations()
        self._cancel(operations)
        for end in list(self.at_end):
            contained(end)
        if self.endpoint.stream_buffer is not None:
            contained(self.endpoint.stream_buffer.wake)
        self.endpoint.leave(self, keep=keep, error=self.error)
        if operations or self.at_end:
            self.engine.progress()

    def _cancel(self, operations: list[Operation]) -> None:
        """Gives up what has not begun yet: a put that waits for its turn, say."""
        for operation in operations:
            lib.tu_operation_cancel(self.engine.handle, operation.id)

    def endpoint_ended(self) -> None:
        """The endpoint was closed, or has failed."""
        self.handle = None
        self.error = self.error or self.endpoint.error
        self.end_operations()
        if self.error is not None:
            self.on_close = None
            self.failed()
            return
        self.on_failure = None
        callback, self.on_close = self.on_close, None
        if callback is not None:
            callback()

    def worker_broke(self, error: BaseException) -> None:
        """Its worker is of no use any more: ends all waits."""
        if self.error is None:
            self.error = worker_error(error)
        contained(self.changed)
        self.failed()

    def internal_error(self, error: BaseException) -> None:
        """Ends the Connection, and no other, after an exception in our own code. Never raises."""
        if self.on_internal_error is not None:
            self.on_internal_error(error)
        else:
            super().internal_error(error)
