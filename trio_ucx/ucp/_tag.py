"""Posting tag operations: the step from checked arguments to an operation in flight."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import attrs
import trio

from .._native import lib
from ._buffers import Buffer, Pinned
from ._engine import Engine
from ._memory_kinds import MemoryType
from ._operations import EndpointCore, Operation, ReceiveOperation
from ._pending import Pending
from ._status import Status, UCXError, error_from_status
from ._util import FULL, OpenedNotConstructed, check_integer

if TYPE_CHECKING:
    from ._worker import Worker


@attrs.define(eq=False, repr=False)
class TagMessage(metaclass=OpenedNotConstructed):
    """A message that arrived and has not been received: what :meth:`Worker.tag_probe` found.

    Attributes:
        length: its bytes.
        sender_tag: its tag.
    """

    length: int
    sender_tag: int
    _worker: Worker
    #: UCX's handle of a message that the probe removed; None for one that stays, and once it was received.
    _handle: int | None

    def __repr__(self) -> str:
        return f"<TagMessage {self.length} bytes, tag {self.sender_tag:#x}>"


def check_tag(tag: int) -> int:
    return check_integer(tag, "the tag", 0, FULL)


_HOST = lib.TU_MEMORY_HOST


def check_reaches(engine: Engine, pins: Pinned) -> None:
    """Refuses memory that the worker's transports do not reach, which UCX would take for host memory.

    Raises:
        ValueError: ``pins`` are such, and released.
    """
    if pins.memory <= _HOST:
        return
    kind = MemoryType(pins.memory - 1)
    if not lib.tu_worker_memory_types(engine.handle) >> kind & 1:
        pins.release()
        raise ValueError(
            f"the transports of this worker do not reach {kind.name} memory: its option TLS (UCX_TLS) must have "
            f"{'rocm' if 'ROCM' in kind.name else 'cuda'} in it, and UCX a device and its module for it"
        )


async def completed(operation: Pending, engine: Engine) -> Any:
    """Waits for something that was just posted: always a checkpoint."""
    if operation.outcome is not None:
        await trio.lowlevel.cancel_shielded_checkpoint()
        return operation.result()
    engine.watch_events()
    return await operation.wait()


def pending_operation(
    engine: Engine,
    verdict: int,
    pins: Pinned | None,
    doing: str,
    core: EndpointCore | None = None,
    kind: Callable[[Engine, int, Pinned | None, str, EndpointCore | None], Operation] = Operation,
) -> Operation | None:
    """Takes a verdict that is not about a receive: None when the operation completed at once."""
    if verdict > 0:
        operation = kind(engine, verdict, pins, doing, core)
        engine.settle()
        return operation
    if pins is not None:
        pins.release()
    if verdict < 0:
        problem = core.problem() if core is not None else None
        raise problem or error_from_status(verdict, doing)
    return None


def post_send(core: EndpointCore, data: Buffer, tag: int, *, sync: bool = False) -> Operation | None:
    """Posts a send; None when UCX has taken the data already."""
    core.engine.check()
    core.check()
    pins = Pinned(data)
    return post_pinned_send(core, pins, tag, sync=sync)


def post_pinned_send(
    core: EndpointCore, pins: Pinned, tag: int, *, sync: bool = False, kind: type[Operation] = Operation
) -> Operation | None:
    check_reaches(core.engine, pins)
    core.unflushed = True
    if pins.many is None and not sync:
        verdict = lib.tu_tag_send_one(core.handle, pins.address, pins.size, pins.memory, tag)
    else:
        verdict = lib.tu_tag_send(core.handle, pins.native_list(), tag, sync)
    return pending_operation(core.engine, verdict, pins, "sending a message", core, kind)


def post_receive(engine: Engine, buffer: Buffer, tag: int, mask: int) -> ReceiveOperation | tuple[int, int]:
    """Posts a receive; the value when a message was there already."""
    engine.check()
    pins = Pinned(buffer, writable=True)
    check_reaches(engine, pins)
    verdict = lib.tu_tag_receive(engine.handle, pins.native_list(), tag, mask, engine.received)
    return _received(engine, verdict, pins, "receiving a message")


def post_message_receive(engine: Engine, handle: int, pins: Pinned) -> ReceiveOperation | tuple[int, int]:
    """The same for a message that a probe took off the queue. ``pins`` are released or owned by the operation."""
    if pins.many is None:
        verdict = lib.tu_message_receive_one(
            engine.handle, handle, pins.address, pins.size, pins.memory, engine.received
        )
    else:
        verdict = lib.tu_message_receive(engine.handle, handle, pins.native_list(), engine.received)
    return _received(engine, verdict, pins, "receiving a message")


def _received(engine: Engine, verdict: int, pins: Pinned, doing: str) -> ReceiveOperation | tuple[int, int]:
    if verdict > 0:
        operation = TruncatingReceive(engine, verdict, pins, doing)
        engine.settle()
        return operation
    size = pins.size
    pins.release()
    if verdict < 0:
        raise receive_error(verdict, size, doing)
    return engine.received.length, engine.received.tag


class TruncatingReceive(ReceiveOperation):
    __slots__ = ("size",)

    def __init__(self, engine: Engine, id: int, pins: Pinned, doing: str) -> None:
        super().__init__(engine, id, pins, doing)
        self.size = pins.size

    def error(self, status: int) -> Exception:
        return receive_error(status, self.size, self.doing)


def receive_error(status: int, size: int, doing: str) -> Exception:
    if status == Status.MESSAGE_TRUNCATED:
        return UCXError(status, f"{doing}: it was longer than the buffer of {size} bytes and is lost")
    return error_from_status(status, doing)
