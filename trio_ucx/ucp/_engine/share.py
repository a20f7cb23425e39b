"""A Connection's share in the endpoint that all Connections between two workers use."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from ..._native import lib
from ..._util.contained import contained
from .._status import UCXError
from .ending import worker_failure
from .endpoint_core import EndpointCore, Scope
from .operations import Operation, OperationSet


class LinkedToEndpoint(Protocol):
    """What sends the messages of a Connection (``_link.native.NativeLink``)."""

    def detach(self) -> None:
        """The endpoint goes, or has gone."""


class Share(Scope):
    """The operations, the waits and the end of one Connection at a shared endpoint.

    When it ends, what UCX still does for it goes on, detached, as long as the endpoint is there.

    Args:
        endpoint: it must be open.
        label: what to call the peer in messages.

    Attributes:
        link: what sends over the endpoint, and is told first when that goes.
        on_end: called once when it fails, or its endpoint is closed; not when it is closed itself.
        on_internal_error: called with an exception in our own code, instead of failing.
    """

    NAME = "connection"
    __slots__ = ("_endpoint", "link", "on_end", "on_internal_error")

    def __init__(self, endpoint: EndpointCore, label: str) -> None:
        engine = endpoint.engine
        super().__init__(engine, engine.next_id(), endpoint.handle, label, OperationSet(engine, endpoint.operations))
        self._endpoint = endpoint
        self.peer_address, self.features = endpoint.peer_address, endpoint.features
        self.link: LinkedToEndpoint | None = None
        self.on_end: Callable[[], None] | None = None
        self.on_internal_error: Callable[[BaseException], None] | None = None
        self.ending.error = endpoint.error
        endpoint.join(self)

    @property
    def endpoint(self) -> EndpointCore:
        return self._endpoint

    def detach(self) -> None:
        self.handle = None
        if self.link is not None:
            self.link.detach()

    def fail(self, error: UCXError, *, left_clean: bool = False) -> None:
        """Marks it as failed, ends its operations, and leaves the endpoint. Failed or closed already: no effect.

        Args:
            left_clean: whether nothing was left at the endpoint: see :meth:`EndpointsToWorker.last_left`.
        """
        if self.gone:
            return
        self.ending.error = error
        try:
            self._leave(left_clean)
        finally:
            self._tell()

    def close(self, *, left_clean: bool = False) -> None:
        """Ends its operations with ClosedResourceError, and leaves the endpoint.

        If it has failed already, this only drops ``on_end``.

        Args:
            left_clean: as for :meth:`fail`.
        """
        self.on_end = None
        if self.handle is not None:
            self._leave(left_clean)

    def _leave(self, left_clean: bool) -> None:
        self.detach()
        operations = list(self.operations.pending)
        self.operations.end(self.problem)
        self._cancel(operations)
        at_end = list(self.operations.at_end)
        for end in at_end:
            contained(end)
        if self._endpoint.stream_buffer is not None:
            contained(self._endpoint.stream_buffer.wake)
        self._endpoint.leave(self, left_clean=left_clean)
        if operations or at_end:
            self.engine.submit()

    def _cancel(self, operations: list[Operation]) -> None:
        """Gives up what has not begun yet: a put that waits for its turn, say."""
        for operation in operations:
            lib.tu_operation_cancel(self.engine.handle, operation.id)

    def follow(self, other: EndpointCore) -> None:
        self.detach()
        self.ending.error = self.error or other.error
        self.operations.end(self.problem)
        self._tell()

    def worker_broke(self, error: BaseException) -> None:
        self.ending.error = self.error or worker_failure(error)
        contained(self.operations.changed)
        self._tell()

    def _tell(self) -> None:
        on_end, self.on_end = self.on_end, None
        if on_end is not None:
            on_end()

    def internal_error(self, error: BaseException) -> None:
        """Ends the Connection, and no other, after an exception in our own code. Never raises."""
        if self.on_internal_error is not None:
            self.on_internal_error(error)
        else:
            super().internal_error(error)
