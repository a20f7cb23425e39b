"""The operations of a connection: messages that wait for credit, that are on their way out, or into memory."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from outcome import Error, Outcome, Value

from ._lanes import Message
from .ucp._buffers import Pinned
from .ucp._operations import Operation
from .ucp._pending import Pending

if TYPE_CHECKING:
    from ._link import Link


class QueuedSend(Pending):
    """A send that waits for credit; then for UCX."""

    __slots__ = ("lane", "link", "operation", "pins", "size")

    def __init__(self, link: Link, lane: int, pins: Pinned) -> None:
        super().__init__()
        self.link = link
        self.lane = lane
        self.pins = pins
        self.size = pins.size
        self.operation: Operation | None = None

    def post(self) -> None:
        try:
            self.operation = self.link.post(self.lane, self.pins)
        except Exception as error:
            self.finish(Error(error))
            return
        if self.operation is None:
            self.finish(Value(None))
        elif self.operation.outcome is not None:  # it completed while it was posted
            self.finish(self.operation.outcome)
        else:
            self.operation.notify = self._completed

    def _completed(self, operation: Pending) -> None:
        assert operation.outcome is not None
        self.finish(operation.outcome)

    def fail(self, error: Exception) -> None:
        self.pins.release()
        self.link.told = True
        self.finish(Error(error))

    def abandon(self) -> bool:
        if self.operation is None:
            self.link.outbound.withdraw(self)
            self.pins.release()
            self.link.send_ready()  # it may have been in others' way
        else:
            self.operation.notify = None
            self.link.abandon_send(self.operation)
        return True


class SendOperation(Operation):
    """A message on its way."""

    __slots__ = ("abandoned",)

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        #: Whether its task was cancelled, or it was: its outcome does not matter any more.
        self.abandoned = False

    @property
    def link(self) -> Link:
        assert self.endpoint is not None
        link: Link = self.endpoint.owner
        return link

    def finish(self, result: Outcome[Any]) -> None:
        if self.outcome is None and isinstance(result, Error) and not self.abandoned:
            self.link.failed_sends += 1
            self.link.told = self.link.told or self._task is not None or self.notify is not None
        super().finish(result)

    def abandon(self) -> bool:
        self.link.abandon_send(self)
        return True


class MoveOperation(Operation):
    """A message on its way into memory. The lane owns the buffer, which may be needed longer than the operation."""

    __slots__ = ("data", "held", "link", "message")

    def __init__(self, link: Link, id: int, message: Message, held: Pinned) -> None:
        super().__init__(link.engine, id, None, f"receiving {message.length} bytes from {link.core.label}")
        self.link = link
        self.message = message
        self.held = held

    def complete(self, status: int, length: int, tag: int) -> None:
        self.release()
        self.finish(Value(None))
        self.link.moved(self.message, self.held, status)
