"""The step from checked arguments to an operation in flight, of whatever capability."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import trio

from ..._native import lib
from .._memory.buffers import Buffer, Pinned
from .._memory.foreign import MemoryType
from .._status import error_from_status
from .endpoint_core import Scope, with_endpoints_beside
from .engine import Engine
from .operations import Operation
from .waits import Pending

_HOST = lib.TU_MEMORY_HOST


def pin(engine: Engine, data: Buffer, *, writable: bool = False, copies: bool = False) -> Pinned:
    """Pins a buffer for an operation, which releases it.

    Args:
        copies: the library, too, copies to it and from it.

    Raises:
        TypeError, ValueError: not a buffer that can be used so.
    """
    pins = Pinned(data, writable=writable)
    try:
        if copies:
            pins.check_copies()
        if pins.memory > _HOST:
            check_reaches(engine, pins)
    except BaseException:
        pins.release()
        raise
    return pins


def check_reaches(engine: Engine, pins: Pinned) -> None:
    """Refuses memory that the worker's transports do not reach, which UCX would take for host memory.

    Raises:
        ValueError: ``pins`` are such.
    """
    if pins.memory <= _HOST:
        return
    kind = MemoryType(pins.memory - 1)
    if not lib.tu_worker_memory_types(engine.handle) >> kind & 1:
        raise ValueError(
            f"the transports of this worker do not reach {kind.name} memory: its option TLS (UCX_TLS) must have "
            f"{'rocm' if 'ROCM' in kind.name else 'cuda'} in it, and UCX a device and its module for it"
        )


async def completed(operation: Pending | None, engine: Engine, *, watch: bool = False) -> Any:
    """Waits for something that was just posted (None: it completed at once): always a schedule point.

    Cancelling the wait cancels it; with ``watch``, it changes nothing about it, and the call is a checkpoint.
    """
    if watch:
        await trio.lowlevel.checkpoint_if_cancelled()
    if operation is not None and operation.outcome is None:
        return await engine.waiting.wait(operation, watch=watch)
    await engine.waiting.schedule_point()
    return None if operation is None else operation.result()


def pending_operation(
    engine: Engine,
    verdict: int,
    pins: Pinned | None,
    doing: str,
    core: Scope | None = None,
    kind: Callable[[Engine, int, Pinned | None, str, Scope | None], Operation] = Operation,
) -> Operation | None:
    """Takes a verdict that is not about a receive: None when the operation completed at once.

    Args:
        kind: makes the operation; has what must live as long as it besides ``pins``.
    """
    if verdict > 0:
        operation = engine.adopt(verdict, kind, engine, verdict, pins, doing, core)
        engine.submit()
        return operation
    if pins is not None:
        pins.release()
    if verdict < 0:
        if core is None:
            raise error_from_status(verdict, doing)
        error = core.error_of(verdict, doing)
        core.ending.note(error)
        raise error
    return None


def pending_send_of_bytes(
    engine: Engine, verdict: int, data: bytes, doing: str, core: Scope | None = None
) -> Operation | None:
    """Takes the verdict on a send of bytes that are not pinned yet: None when UCX has taken them already."""
    if verdict > 0:
        operation = engine.adopt(verdict, _send_of_bytes, engine, verdict, data, doing, core)
        engine.submit()
        return operation
    return pending_operation(engine, verdict, None, doing, core)


def _send_of_bytes(engine: Engine, id: int, data: bytes, doing: str, core: Scope | None) -> Operation:
    return Operation(engine, id, Pinned(data), doing, core)


def post_flush(core: Scope, owner: Scope | None = None) -> Operation | None:
    """Posts a flush of an endpoint.

    Args:
        owner: what it belongs to, if that is not ``core``: a share, or the endpoint beside which ``core`` is.
    """
    owner = owner or core
    core.engine.links.flush()
    owner.check(over=core.endpoint)
    verdict = lib.tu_endpoint_flush(core.handle)
    return pending_operation(core.engine, verdict, None, "flushing an endpoint", owner)


async def flush(scope: Scope) -> None:
    """Flushes an endpoint, and the memory endpoint beside it. Always a checkpoint."""
    scope.operations.unflushed = False
    try:
        for one in with_endpoints_beside(scope):
            operation = post_flush(one, scope)
            if operation is not None:
                await completed(operation, one.engine)
            one.endpoint.connected = True
    except BaseException:
        scope.operations.unflushed = True
        raise
    await trio.lowlevel.cancel_shielded_checkpoint()
