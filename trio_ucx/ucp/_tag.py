"""Tag messages: posting their operations, and messages that a probe found."""

from __future__ import annotations

from typing import TypeGuard

import attrs

from .._native import lib
from .._util.arguments import ALL_BITS, check_integer
from .._util.handles import OpenedNotConstructed
from ._engine.endpoint_core import Scope
from ._engine.engine import Engine
from ._engine.operations import Operation, ReceiveOperation
from ._engine.posting import pending_operation, pending_send_of_bytes, pin
from ._engine.tag_dispatch import CONNECTION_BIT
from ._features import Feature
from ._memory.buffers import Buffer, Pinned, WritableBuffer
from ._status import Status, UCXError, error_from_status

_TAG = Feature.TAG.value
#: Bytes of up to this length take the short way.
SHORT = 4096


def is_short(buffer: object, *, writable: bool = False) -> TypeGuard[bytearray | memoryview]:
    """True if a buffer is so small that to copy it costs less than to pin it, and it is surely in host memory."""
    if type(buffer) is memoryview:
        simple = buffer.format == "B" and buffer.ndim == 1 and buffer.c_contiguous
        if not simple or (writable and buffer.readonly) or type(buffer.obj) not in (bytes, bytearray):
            return False
    elif type(buffer) is not bytearray:
        return False
    return len(buffer) <= SHORT


@attrs.define(eq=False, repr=False)
class TagMessage(metaclass=OpenedNotConstructed):
    """A message that arrived and has not been received: what :meth:`Worker.tag_probe` found.

    Attributes:
        length: its bytes.
        sender_tag: its tag.
    """

    length: int
    sender_tag: int
    _engine: Engine
    #: UCX's handle of a message that the probe removed; None for one that stays, and once it was received.
    _handle: int | None

    def __repr__(self) -> str:
        return f"<TagMessage {self.length} bytes, tag {self.sender_tag:#x}>"


def check_tag(tag: int) -> int:
    return check_integer(tag, "the tag", 0, ALL_BITS)


def check_mask(mask: int | None) -> int:
    return ALL_BITS if mask is None else check_integer(mask, "the mask", 0, ALL_BITS)


def check_not_claimed(engine: Engine, tag: int, mask: int) -> None:
    """Refuses to look for messages of Connections.

    Raises:
        ValueError: only those have such a tag.
    """
    if engine.tag_dispatch.claimed and tag & mask & CONNECTION_BIT:
        raise ValueError(
            f"tags with bit 63, such as {tag:#x}, belong to the Connections of this worker: use a tag below 2**63, or "
            "another worker"
        )


def check_claim(engine: Engine) -> None:
    """Refuses Connections on a worker where a receive that waits could take their messages.

    Raises:
        RuntimeError: there is such a receive.
    """
    for operation in list(engine.in_flight.values()):
        if isinstance(operation, TruncatingReceive) and operation.takes_claimed and not operation.detached:
            raise RuntimeError(
                "a tag_receive that waits on this worker could take messages of Connections, whose tags have bit 63: "
                "open the first Connection or listener before it, cancel it, let its mask have bit 63 and its tag not, "
                "or use another worker"
            )


def check_feature(engine: Engine) -> None:
    if not engine.tag_dispatch.has_tags:
        engine.context._require(Feature.TAG, "receiving tag messages")


def post_send(core: Scope, data: Buffer, tag: int, *, sync: bool = False) -> Operation | None:
    """Posts a send; None when UCX has taken the data already."""
    core.engine.check()
    core.check()
    if not core.features & _TAG:
        core.require(Feature.TAG, "sending tag messages")
    if type(data) is bytes and len(data) <= SHORT and not sync:
        return post_bytes_send(core, data, tag)
    pins = pin(core.engine, data)
    core.operations.unflushed = True
    if pins.many is None and not sync:
        verdict = lib.tu_tag_send_one(core.handle, pins.address, pins.size, pins.memory, tag)
    else:
        verdict = lib.tu_tag_send(core.handle, pins.native_list(), tag, sync)
    return pending_operation(core.engine, verdict, pins, "sending a message", core)


def post_bytes_send(core: Scope, data: bytes, tag: int) -> Operation | None:
    """The short way for bytes that UCX will hardly keep: they are pinned only if it does."""
    core.operations.unflushed = True
    verdict = lib.tu_tag_send_one(core.handle, data, len(data), lib.TU_MEMORY_HOST, tag)
    if verdict == 0:
        return None
    return pending_send_of_bytes(core.engine, verdict, data, "sending a message", core)


def post_receive(engine: Engine, buffer: WritableBuffer, tag: int, mask: int) -> ReceiveOperation | tuple[int, int]:
    """Posts a receive; the value when a message was there already."""
    engine.check()
    check_feature(engine)
    pins = pin(engine, buffer, writable=True)
    if pins.many is None:
        verdict = lib.tu_tag_receive_one(
            engine.handle, pins.address, pins.size, pins.memory, tag, mask, engine.tag_dispatch.received
        )
    else:
        verdict = lib.tu_tag_receive(engine.handle, pins.many, tag, mask, engine.tag_dispatch.received)
    return _received(engine, verdict, pins, "receiving a message", tag, mask)


def post_message_receive(engine: Engine, message: TagMessage, pins: Pinned) -> ReceiveOperation | tuple[int, int]:
    """Receives a message that a probe took off the queue. ``pins`` are released, or owned by the operation."""
    handle = message._handle
    assert handle is not None
    if pins.many is None:
        verdict = lib.tu_message_receive_one(
            engine.handle, handle, pins.address, pins.size, pins.memory, engine.tag_dispatch.received
        )
    else:
        verdict = lib.tu_message_receive(engine.handle, handle, pins.native_list(), engine.tag_dispatch.received)
    if verdict != Status.NO_MEMORY:  # without memory nothing has happened
        message._handle = None
    return _received(engine, verdict, pins, "receiving a message")


def _received(
    engine: Engine, verdict: int, pins: Pinned, doing: str, tag: int = 0, mask: int = ALL_BITS
) -> ReceiveOperation | tuple[int, int]:
    if verdict > 0:
        operation = engine.adopt(verdict, TruncatingReceive, engine, verdict, pins, doing, tag, mask)
        engine.submit()
        return operation
    size = pins.size
    pins.release()
    if verdict < 0:
        check_not_claimed(engine, tag, mask)
        raise receive_error(verdict, size, doing)
    return engine.tag_dispatch.received.length, engine.tag_dispatch.received.tag


class TruncatingReceive(ReceiveOperation):
    __slots__ = ("size", "takes_claimed")

    def __init__(self, engine: Engine, id: int, pins: Pinned, doing: str, tag: int, mask: int) -> None:
        self.size = pins.size
        #: Whether it could match messages of Connections, if the worker had any.
        self.takes_claimed = (tag | ~mask) & CONNECTION_BIT != 0
        super().__init__(engine, id, pins, doing)

    def error(self, status: int) -> Exception:
        return receive_error(status, self.size, self.doing)


class TagWait(ReceiveOperation):
    """A wait for a message, which stays where it is: C code probes whenever the worker has progressed."""

    __slots__ = ("mask", "tag")
    tag: int
    mask: int
    engine: Engine

    def error(self, status: int) -> Exception:
        try:
            check_not_claimed(self.engine, self.tag, self.mask)
        except ValueError as error:  # since it began, the worker has got Connections
            return error
        return super().error(status)


def post_wait(engine: Engine, tag: int, mask: int) -> TagWait:
    """Begins to wait for a message with such a tag."""
    doing = "waiting for a message"
    operation = pending_operation(engine, lib.tu_tag_wait(engine.handle, tag, mask), None, doing, kind=TagWait)
    assert isinstance(operation, TagWait)
    operation.tag, operation.mask = tag, mask
    return operation


def receive_error(status: int, size: int, doing: str) -> Exception:
    if status == Status.MESSAGE_TRUNCATED:
        return UCXError(status, f"{doing}: it was longer than the buffer of {size} bytes and is lost")
    return error_from_status(status, doing)
