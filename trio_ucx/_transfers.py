"""The operations of a connection in UCX's hands: messages on their way out, or into memory."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from outcome import Error, Outcome, Value

from ._lanes import Message
from .ucp._buffers import Pinned
from .ucp._operations import Operation

if TYPE_CHECKING:
    from ._link import Link


class SendOperation(Operation):
    """A message on its way: a ``_session.Sending``."""

    __slots__ = ("cancelled", "lane")

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.cancelled = False
        self.lane = 0

    @property
    def link(self) -> Link:
        assert self.endpoint is not None
        link: Link = self.endpoint.owner
        return link

    def finish(self, result: Outcome[Any]) -> None:
        if self.outcome is None and isinstance(result, Error) and not self.cancelled:
            self.link.send_failed(told=self.awaited or self.notify is not None)
        super().finish(result)

    def abandon(self) -> bool:
        self.link.send_cancelled(self)
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
        self.link.move_ended(self.message, self.held, status)

    def internal_error(self, error: BaseException) -> None:
        self.link.internal_error(error)
