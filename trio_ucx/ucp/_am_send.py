"""Sending active messages."""

from __future__ import annotations

import enum

from .._native import ffi, lib
from .._util.arguments import check_integer
from ._engine.endpoint_core import Scope
from ._engine.operations import Operation
from ._engine.posting import pending_operation, pin
from ._features import Feature
from ._memory.buffers import Buffer, Pinned
from ._status import Status, UCXError

#: The largest id of active messages.
MAX_ID = 65535


class SendProtocol(enum.Enum):
    """How an active message travels.

    AUTO leaves it to UCX, by size. EAGER sends the data along at once; the receiver has to have room for it. RENDEZVOUS
    announces the message; its data stays with the sender until the receiver takes it.
    """

    AUTO = lib.TU_AM_SEND_AUTO
    EAGER = lib.TU_AM_SEND_EAGER
    RENDEZVOUS = lib.TU_AM_SEND_RENDEZVOUS


#: What a receiver can answer to a rendezvous, and nothing else: the endpoint goes on working.
_REFUSALS = {
    Status.NO_RESOURCE: "the receiver refused it, its queue is full",
    Status.INVALID_PARAM: "the receiver refused it, nobody there has opened its id",
    Status.REJECTED: "the receiver refused it",
}


class _Send(Operation):
    __slots__ = ()

    def error(self, status: int) -> Exception:
        assert self.scope is not None
        refusal = _REFUSALS.get(Status(status))
        if refusal is not None and self.scope.problem() is None:
            return UCXError(status, f"{self.doing}: {refusal}")
        return super().error(status)


def post_am_send(
    core: Scope, id: int, data: Buffer, header: Buffer, reply: bool, protocol: SendProtocol
) -> Operation | None:
    """Posts an active message; None when UCX has taken all of it already."""
    id = check_integer(id, "the id", 0, MAX_ID)
    if not isinstance(protocol, SendProtocol):
        raise TypeError(f"protocol must be a SendProtocol, not {protocol!r}")
    engine = core.engine
    engine.check()
    core.check()
    core.require(Feature.AM, "sending active messages")
    pinned_header = Pinned(header)
    length = pinned_header.size
    kept_header = ffi.new("char[]", pinned_header.copy(length))
    pinned_header.release()
    longest = engine.identity.attributes.max_am_header
    if length > longest:
        raise ValueError(f"a header of {length} bytes is too long: this worker's limit is {longest}")
    pins = pin(engine, data)
    pins.kept = kept_header
    core.operations.unflushed = True
    verdict = lib.tu_am_send(core.handle, id, kept_header, length, pins.native_list(), bool(reply), protocol.value)
    return pending_operation(engine, verdict, pins, "sending an active message", core, _Send)
