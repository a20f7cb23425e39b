"""Operations in flight.

An :class:`Operation` owns its buffers until UCX has completed it, whatever became of the task that posted it. UCX can
cancel a tag receive that has not matched, and our C code a transfer or a chain that has not begun. Any other operation
whose task is cancelled is *detached*.
"""

from __future__ import annotations

import collections
from collections.abc import Callable, Container, Iterable, Iterator
from contextlib import contextmanager
from typing import Any, Protocol

from outcome import Error, Value

from ..._native import ffi, lib
from ..._util.contained import contained
from ..._util.text import printable
from .._memory.buffers import Pinned
from .._status import Origin, Status, broken, error_from_status
from .ending import Ending
from .trio_run import TrioRun
from .waits import Pending, Signal, Waiting

#: More than UCX's ``max_debug_string``, which is 200 in UCX 1.22.
_DESCRIPTION_SIZE = 1024
#: Operations that the message of a timeout describes.
_DESCRIBED = 4


class OperatingEngine(Protocol):
    """The part of the engine that operations use."""

    handle: Any
    run: TrioRun
    waiting: Waiting
    counters: collections.Counter[str]
    in_flight: dict[int, Operation]

    @property
    def endpoints(self) -> Container[int]: ...
    @property
    def usable(self) -> bool:
        """True if UCX's worker exists, and this thread may use it."""

    def submit(self) -> None:
        """Makes UCX begin what was posted and is pending. Call it after posting."""

    def internal_error(self, error: BaseException) -> None:
        """Breaks the worker. Never raises."""


class OperationScope(Protocol):
    """What operations belong to: see :class:`~.endpoint_core.Scope`."""

    id: int
    label: str
    ending: Ending
    operations: OperationSet

    @property
    def endpoint(self) -> OperationScope: ...
    def problem(self, origin: Origin | None = None) -> Exception | None: ...
    def error_of(self, status: int, doing: str) -> Exception: ...
    def internal_error(self, error: BaseException) -> None: ...


class Operation(Pending):
    """A UCX operation in flight. Owns its buffers until UCX has completed it."""

    __slots__ = ("detached", "doing", "engine", "id", "pins", "scope")

    def __init__(
        self, engine: OperatingEngine, id: int, pins: Pinned | None, doing: str, scope: OperationScope | None = None
    ) -> None:
        super().__init__()
        self.engine = engine
        self.id = id
        self.pins = pins
        self.doing = doing
        self.scope = scope
        self.detached = False
        if id:  # else it waits to be posted
            engine.in_flight[id] = self
            if scope is not None:
                scope.operations.pending.add(self)

    def posted(self, id: int) -> None:
        """UCX has begun it, after it has waited."""
        self.id = id
        self.engine.in_flight[id] = self
        if self.scope is not None:
            self.scope.operations.pending.add(self)

    def complete(self, status: int, length: int, tag: int) -> None:
        """UCX is done with it. Called once, by the engine."""
        self.release()
        self.conclude(status, length, tag)

    def conclude(self, status: int, length: int, tag: int) -> None:
        """Finishes the operation with this status. UCX has completed it, or :meth:`complete` is called when it has."""
        if status == Status.OK:
            try:
                value = self.value(length, tag)
            except Exception as error:  # not enough memory for a copy, for instance
                self.finish(Error(error))
            else:
                self.finish(Value(value))
        elif status == Status.CANCELED and self._raise_cancel is not None:
            self.finish_cancelled()
        else:
            self.finish(Error(self.error(status)))

    def reported(self, error: BaseException) -> None:
        if self.scope is not None:
            self.scope.ending.note(error)

    def value(self, length: int, tag: int) -> Any:
        return None

    def error(self, status: int) -> Exception:
        if self.scope is not None:
            return self.scope.error_of(status, self.doing)
        return error_from_status(status, self.doing)

    def release(self) -> None:
        if self.detached:
            self.detached = False
        if self.scope is not None:
            self.scope.operations.ended(self)
        if self.pins is not None:
            self.pins.release()
        self.engine.counters["completed"] += 1

    def worker_destroyed(self) -> None:
        """Releases the buffers: UCX's worker was destroyed, and no record of this operation will come."""
        if self.scope is not None:
            self.scope.operations.ended(self)
        if self.pins is not None:
            self.pins.release()

    def cancel(self) -> bool:
        engine = self.engine
        if self.id not in engine.in_flight:
            return True  # its outcome came from elsewhere, and the operation itself is over
        if lib.tu_operation_cancel(engine.handle, self.id):
            engine.submit()  # its record is in the ring, or in a delivery that is under way: that one decides
            return False
        self.detach()
        return True

    def internal_error(self, error: BaseException) -> None:
        """Ends its scope, or else the worker, after an exception in our own code. Never raises."""
        contained(lambda: self.finish(Error(broken(f"{self.doing}: an internal error of trio_ucx: {error!r}", error))))
        if self.scope is not None:
            self.scope.internal_error(error)
        else:
            self.engine.internal_error(error)

    def describe(self, *, ask: bool = True) -> str:
        """Returns what it does, with UCX's own words where UCX can be asked (``ucp_request_query``). Never raises."""
        where = f" (to {self.scope.label})" if self.scope is not None else ""
        detached = ", detached: no task waits for it" if self.detached else ""
        ucx = self._described_by_ucx() if ask else ""
        return f"{self.doing}{where}{detached}" + (f": {ucx}" if ucx else "")

    def _described_by_ucx(self) -> str:
        engine = self.engine
        if not engine.usable or self.id not in engine.in_flight:
            return ""  # over
        if self.scope is not None and self.scope.endpoint.id not in engine.endpoints:
            return ""  # UCX has freed the endpoint, at which it would look
        out = ffi.new("char[]", _DESCRIPTION_SIZE)
        if lib.tu_operation_describe(engine.handle, self.id, out, _DESCRIPTION_SIZE) != Status.OK:
            return ""
        return printable(ffi.string(out).decode(errors="replace").strip())

    def detach(self) -> None:
        """Nobody waits for it any more, but UCX may still touch its buffers: keep them."""
        if not self.detached and self.id in self.engine.in_flight:
            self.detached = True
            self._task = None
            if self.scope is not None:
                self.scope.operations.changed()


def under_way(operations: Iterable[Operation]) -> str:
    """For the message of a timeout: which operations had not ended, the first few in words."""
    found = list(operations)
    if not found:
        return ""
    described = [operation.describe() for operation in found[:_DESCRIBED]]
    if len(found) > _DESCRIBED:
        described.append(f"and {len(found) - _DESCRIBED} more")
    return f"; under way: {'; '.join(described)}"


class ReceiveOperation(Operation):
    """Its value is ``(length, sender_tag)``."""

    __slots__ = ()

    def value(self, length: int, tag: int) -> tuple[int, int]:
        return length, tag


class OperationSet:
    """The operations of one scope that are in flight, and the tasks that wait for a change of them.

    Args:
        around: for a share: those of its endpoint. A change here is one there.
    """

    __slots__ = ("_around", "_engine", "_watchers", "at_end", "pending", "unflushed")

    def __init__(self, engine: OperatingEngine, around: OperationSet | None = None) -> None:
        self._engine = engine
        self._around = around
        self._watchers: list[Signal] = []
        self.pending: set[Operation] = set()
        #: Whether something was sent since the last flush.
        self.unflushed = False
        #: Called when a share ends, and its endpoint perhaps goes on: what else belongs to the share ends, too.
        self.at_end: set[Callable[[], None]] = set()

    def ended(self, operation: Operation) -> None:
        """Removes an operation that is over."""
        self.pending.discard(operation)
        self.changed()

    def changed(self) -> None:
        """Lets waiting tasks look again."""
        if self._watchers:
            for watcher in self._watchers:
                watcher.set()
            self._watchers = []  # only now: if waking one fails, the next call wakes the others
        if self._around is not None:
            self._around.changed()

    async def wait_until(self, condition: Callable[[], bool]) -> None:
        """Waits for a condition on the operations. No checkpoint if it holds already."""
        while not condition():
            watcher = Signal()
            with self.watching(watcher):
                await self._engine.waiting.wait(watcher)

    @contextmanager
    def watching(self, watcher: Signal) -> Iterator[None]:
        """Sets the watcher at the next change."""
        self._watchers.append(watcher)
        try:
            yield
        finally:
            if watcher in self._watchers:
                self._watchers.remove(watcher)

    def in_order(self) -> list[Operation]:
        """The operations, in the order in which they were posted."""
        return [operation for operation in self._engine.in_flight.values() if operation in self.pending]

    def sends_done(self) -> bool:
        """True if all operations that are under way are detached."""
        return all(operation.detached for operation in self.pending)

    def buffers_released(self) -> bool:
        return not any(operation.detached for operation in self.pending)

    def end(self, problem: Callable[[], Exception | None]) -> None:
        """Ends the waits for the operations, which UCX may not have completed: their scope has ended."""

        def end(operation: Operation) -> None:
            if operation.outcome is None and not operation.detached:
                error = problem()
                assert error is not None
                operation.finish(Error(error))
                operation.detach()

        for operation in list(self.pending):
            contained(end, operation)
        contained(self.changed)
