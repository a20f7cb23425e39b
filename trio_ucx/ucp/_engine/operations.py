"""Operations in flight, and the endpoints that they belong to: what the engine keeps its books about.

An :class:`Operation` owns its buffers until UCX has completed it, whatever became of the task that posted it. UCX can
cancel only a tag receive that has not matched; any other operation whose task is cancelled is *detached*.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import suppress
from typing import TYPE_CHECKING, Any, Protocol

import trio
from outcome import Error, Value

from ..._native import ffi, lib
from .. import _reach
from .._address import WorkerAddress
from .._contained import contained, report
from .._features import Feature
from .._live_handles import live_handles
from .._memory.buffers import Pinned
from .._process import NOBODY
from .._status import Status, UCXError, broken, error_from_status
from .._util import ConflictDetector
from .pairs import Pair
from .pending import Pending, Signal
from .stream_buffer import StreamBuffer

if TYPE_CHECKING:
    from .engine import Engine

#: More than UCX's ``max_debug_string``, which is 200 in UCX 1.22.
_DESCRIPTION_SIZE = 1024
#: Operations that the message of a timeout describes.
_DESCRIBED = 4
#: Seconds after a forced close in which UCX may finish what it has begun to write over TCP.
WRITING_TIME = 0.5


class Operation(Pending):
    """A UCX operation in flight. Owns its buffers until UCX has completed it."""

    __slots__ = ("detached", "doing", "endpoint", "engine", "id", "pins")

    def __init__(self, engine: Engine, id: int, pins: Pinned | None, doing: str, endpoint: Scope | None = None) -> None:
        super().__init__()
        self.engine = engine
        self.id = id
        self.pins = pins
        self.doing = doing
        self.endpoint = endpoint
        self.detached = False
        if id:  # else it waits to be posted
            engine.in_flight[id] = self
            if endpoint is not None:
                endpoint.pending.add(self)

    def posted(self, id: int) -> None:
        """UCX has begun it, after it has waited."""
        self.id = id
        self.engine.in_flight[id] = self
        if self.endpoint is not None:
            self.endpoint.pending.add(self)

    def complete(self, status: int, length: int, tag: int) -> None:
        """UCX is done with it. Called once, by the engine."""
        self.release()
        self.conclude(status, length, tag)

    def conclude(self, status: int, length: int, tag: int) -> None:
        """Finishes with this status. UCX has completed it, or :meth:`complete` is called when it has."""
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
            self.fail(self.error(status))

    def fail(self, error: Exception) -> None:
        """Finishes with an error. Its endpoint records whether a task gets that error."""
        if self.endpoint is not None and self.outcome is None and (self.awaited or self.notify is not None):
            self.endpoint.told = True
        self.finish(Error(error))

    def value(self, length: int, tag: int) -> Any:
        return None

    def error(self, status: int) -> Exception:
        if self.endpoint is not None:
            return self.endpoint.error_of(status, self.doing)
        return error_from_status(status, self.doing)

    def release(self) -> None:
        if self.detached:
            self.detached = False
        if self.endpoint is not None:
            self.endpoint.pending.discard(self)
            self.endpoint.changed()
        if self.pins is not None:
            self.pins.release()
        self.engine.counters["completed"] += 1

    def worker_destroyed(self) -> None:
        """UCX's worker has gone without having ended it: nothing touches its buffers any more."""
        if self.endpoint is not None:
            self.endpoint.pending.discard(self)
            self.endpoint.changed()
        if self.pins is not None:
            self.pins.release()

    def cancel(self) -> bool:
        engine = self.engine
        if self.id not in engine.in_flight:
            return True  # its outcome came from elsewhere, and the operation itself is over
        if lib.tu_operation_cancel(engine.handle, self.id):
            engine.progress()  # its record is in the ring, or in a delivery that is under way: that one decides
            return False
        self.detach()
        return True

    def internal_error(self, error: BaseException) -> None:
        """Ends its endpoint, or else the worker, after an exception in our own code. Never raises."""
        contained(lambda: self.finish(Error(broken(f"{self.doing}: an internal error of trio_ucx: {error!r}", error))))
        if self.endpoint is not None:
            self.endpoint.internal_error(error)
        else:
            self.engine.internal_error(error)

    def describe(self) -> str:
        """What it does, and UCX's own words for it where UCX can be asked (``ucp_request_query``). Never raises."""
        where = f" (to {self.endpoint.label})" if self.endpoint is not None else ""
        detached = ", detached: no task waits for it" if self.detached else ""
        ucx = self._described_by_ucx()
        return f"{self.doing}{where}{detached}" + (f": {ucx}" if ucx else "")

    def _described_by_ucx(self) -> str:
        engine = self.engine
        if not engine.usable or self.id not in engine.in_flight:
            return ""  # over
        if self.endpoint is not None and self.endpoint.native.id not in engine.endpoints:
            return ""  # UCX has freed the endpoint, at which it would look
        out = ffi.new("char[]", _DESCRIPTION_SIZE)
        if lib.tu_operation_describe(engine.handle, self.id, out, _DESCRIPTION_SIZE) != Status.OK:
            return ""
        return ffi.string(out).decode(errors="replace").strip()

    def detach(self) -> None:
        """Nobody waits for it any more, but UCX may still touch its buffers: keep them."""
        if not self.detached and self.id in self.engine.in_flight:
            self.detached = True
            self._task = None
            if self.endpoint is not None:
                self.endpoint.changed()


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


class Scope:
    """What operations belong to: an endpoint, or a Connection's share in one.

    Args:
        id: its own.
        handle: UCX's endpoint.
        label: what to call the peer in messages.
    """

    __slots__ = (
        "__weakref__",
        "at_end",
        "closing",
        "engine",
        "error",
        "facade",
        "features",
        "handle",
        "id",
        "label",
        "on_failure",
        "origin",
        "peer_address",
        "pending",
        "tags",
        "told",
        "unflushed",
        "watchers",
    )

    def __init__(self, engine: Engine, id: int, handle: Any, label: str) -> None:
        self.engine = engine
        self.id = id
        self.handle: Any = handle  # None once closed
        self.label = label
        #: Whether the user closes it, or has closed it.
        self.closing = False
        #: The UCXError it failed with, if it did.
        self.error: UCXError | None = None
        #: Marks the errors about it: see :func:`_status.origin_of`.
        self.origin = object()
        #: To which worker it leads, where that is known.
        self.peer_address: WorkerAddress | None = None
        #: The features that our context has and, as far as is known, the peer's; and whether TAG is among them.
        self.features: Feature = engine.context.features
        self.tags = engine.tags
        #: The user's object for it.
        self.facade: Callable[[], Any] = lambda: None
        self.pending: set[Operation] = set()
        #: Called when a Connection's share ends, and the endpoint perhaps goes on: what they belong to ends, too.
        self.at_end: set[Callable[[], None]] = set()
        #: Called once, when it fails (not when it is closed).
        self.on_failure: Callable[[], None] | None = None
        #: Whether something was sent since the last flush.
        self.unflushed = False
        #: Whether an operation of the user's has reported that it broke: then closing it need not.
        self.told = False
        #: Set, and forgotten, whenever something about its operations changes.
        self.watchers: list[Signal] = []

    @property
    def native(self) -> EndpointCore:
        """The endpoint itself."""
        raise NotImplementedError

    def require(self, feature: Feature, doing: str) -> None:
        """Refuses an operation if our context or the peer's lacks the feature: the peer would never answer.

        Raises:
            RuntimeError: with what to do.
        """
        if feature not in self.features:
            self.engine.context.require(feature, doing)
            raise RuntimeError(
                f"{doing} needs Feature.{feature.name} at the peer, too, and the peer's context was opened without it: "
                f"open that one with features=ucp.DEFAULT_FEATURES | ucp.Feature.{feature.name}"
            )

    @property
    def gone(self) -> bool:
        """Whether nothing can be sent or received any more: it was closed, has failed, or its worker broke."""
        return self.handle is None or self.error is not None

    def problem(self, origin: object = None) -> Exception | None:
        """The exception for using it now, if it cannot be used.

        Args:
            origin: instead of its own.
        """
        if self.error is not None:
            text = f"the connection to {self.label} broke: {self.error}"
            return broken(text, self.error, self.origin if origin is None else origin)
        if self.handle is None:
            return trio.ClosedResourceError("this endpoint was closed")
        return None

    def error_of(self, status: int, doing: str) -> Exception:
        """The exception for a failed operation on it."""
        return self.problem() or error_from_status(status, doing, self.origin, self.hint(status))

    def hint(self, status: int) -> str:
        """What is known about a peer that cannot be reached, in parentheses."""
        return _reach.hint(self.engine.context, status, self.peer_address)

    def check(self, over: EndpointCore | None = None) -> None:
        """Refuses to use it if it has ended.

        Args:
            over: the endpoint that is to be used, if that may be the one beside its own.
        """
        problem = self.problem()
        if problem is None and over is not None:
            problem = over.problem(self.origin)
        if problem is not None:
            self.told = True
            raise problem

    def changed(self) -> None:
        if self.watchers:
            for watcher in self.watchers:
                watcher.set()
            self.watchers = []  # only now: if waking one fails, the next call wakes the others

    async def wait_until(self, condition: Callable[[], bool]) -> None:
        """Waits for a condition on its operations. No checkpoint if it holds already."""
        while not condition():
            watcher = Signal()
            self.watchers.append(watcher)
            try:
                await self.engine.waiting.wait(watcher)
            finally:
                if watcher in self.watchers:
                    self.watchers.remove(watcher)

    def under_way(self) -> list[Operation]:
        """Its operations, in the order in which they were posted."""
        return [operation for operation in self.engine.in_flight.values() if operation.endpoint is self]

    def sends_done(self) -> bool:
        """Whether no operation is under way but detached ones."""
        return all(operation.detached for operation in self.pending)

    def buffers_released(self) -> bool:
        return not any(operation.detached for operation in self.pending)

    def end_operations(self) -> None:
        """Ends the waits for its operations, which UCX may not have completed."""
        for operation in list(self.pending):
            contained(self._end_operation, operation)

    def _end_operation(self, operation: Operation) -> None:
        if operation.outcome is None and not operation.detached:
            problem = self.problem()
            assert problem is not None
            operation.fail(problem)
            operation.detach()

    def failed(self) -> None:
        """Calls :attr:`on_failure`, once."""
        callback, self.on_failure = self.on_failure, None
        if callback is not None:
            callback()

    def fail(self, error: UCXError) -> None:
        """Marks it as failed, and ends its operations. Failed or closed already: no effect."""
        raise NotImplementedError

    def close(self) -> None:
        """Closes it by force."""
        raise NotImplementedError

    def internal_error(self, error: BaseException) -> None:
        """Ends it, and no other, after an exception in our own code. Never raises."""
        report(f"an internal error of trio_ucx, at the endpoint to {self.label}", error)
        contained(self.fail_inside, error)

    def fail_inside(self, error: BaseException) -> None:
        """Fails with an internal error."""
        failure = UCXError(Status.IO_ERROR, f"an internal error of trio_ucx: {error!r}")
        failure.__cause__ = error
        self.fail(failure)


class SharesEndpoint(Protocol):
    """A Connection's share in an endpoint: :class:`_link.share.Share`."""

    handle: Any
    facade: Callable[[], Any]

    def endpoint_ended(self) -> None:
        """The endpoint was closed, or has failed."""

    def worker_broke(self, error: BaseException) -> None:
        """Its worker is of no use any more."""


class EndpointCore(Scope):
    """The engine's side of an endpoint: its handle, its operations, and what became of it."""

    __slots__ = (
        "_left",
        "beside",
        "connected",
        "end_watch",
        "forcible",
        "greeted",
        "lanes_when_greeted",
        "main",
        "pair",
        "peer",
        "shares",
        "stream_buffer",
        "stream_guard",
    )

    def __init__(self, engine: Engine, id: int, handle: Any, label: str) -> None:
        super().__init__(engine, id, handle, label)
        #: Which process it leads to, where that is known.
        self.peer = NOBODY
        #: What came of its UCP stream, once something came.
        self.stream_buffer: StreamBuffer | None = None
        self.stream_guard = ConflictDetector("another task is receiving from this stream")
        #: Another endpoint for its operations (:func:`._connecting.connect_beside`), which ends with it.
        self.beside: EndpointCore | None = None
        #: The other way round: the endpoint beside which this one is.
        self.main: EndpointCore | None = None
        #: Of a shared endpoint: the endpoints to the same worker; the Connections that have not left it; and whether
        #: something has arrived over it for a Connection.
        self.pair: Pair[EndpointCore] | None = None
        self.shares: dict[SharesEndpoint, None] = {}
        self.greeted = False
        #: Whether it is known to be up, and will not change its lanes any more.
        self.connected = False
        #: Its lanes at that moment: see :meth:`lanes`.
        self.lanes_when_greeted: list[bytes] = []
        #: Whether UCX may close it by force.
        self.forcible = True
        #: UCX's endpoint, if this object was closed and UCX still has something to write.
        self._left: Any = None
        #: Ends the watch of the peer's process, if there is one.
        self.end_watch: Callable[[], None] | None = None
        engine.endpoints[id] = self
        live_handles.opened("endpoint")

    @property
    def native(self) -> EndpointCore:
        return self

    def set_peer(self, address: WorkerAddress) -> None:
        """Records which worker it leads to."""
        self.peer, self.peer_address = address.process, address
        self.features = self.engine.context.features & address.features
        self.tags = Feature.TAG in self.features

    def user_object(self) -> Any:
        """The user's object for it, or for the share of a Connection that has not ended; None if there is none."""
        holders: list[SharesEndpoint | EndpointCore] = [*self.shares, self]
        found = (holder.facade() for holder in holders)
        return next((facade for facade in found if facade is not None), None)

    def disown(self) -> None:
        """In a forked child: drops the handles."""
        self.handle = None
        for share in self.shares:
            share.handle = None

    # ---- Connections that share it ----

    @property
    def is_shared(self) -> bool:
        """Whether Connections share it, or did."""
        return self.pair is not None or bool(self.shares)

    def join(self, share: SharesEndpoint) -> None:
        """A Connection begins to use it."""
        self.shares[share] = None

    def leave(self, share: SharesEndpoint, *, keep: bool, error: UCXError | None = None) -> None:
        """A Connection uses it no more. Left already: no effect.

        Args:
            keep: if it was the last one, see :meth:`Pair.left`.
            error: why the Connection broke, if it did.
        """
        if share not in self.shares:
            return
        del self.shares[share]
        if self.shares or self.handle is None:
            return
        keep = keep and self.stream_buffer is None and not self._in_use()
        if self.pair is not None and self.pair.left(self, keep=keep):
            return
        if error is None:
            self.close()
        else:
            self.fail(error)

    def open_stream_buffer(self) -> StreamBuffer:
        if self.stream_buffer is None:
            self.stream_buffer = StreamBuffer(self.engine)
        return self.stream_buffer

    def fail(self, error: UCXError) -> None:
        """Marks it as failed, and ends its operations. Failed or closed already: no effect."""
        if self.gone:
            return
        self.error = error
        try:
            self._force_close()
        finally:
            if self.stream_buffer is not None:
                contained(self.stream_buffer.wake)  # what has arrived can still be read
            self.failed()

    def worker_broke(self, error: BaseException) -> None:
        """Its worker is of no use any more: ends all waits."""
        for share in list(self.shares):
            contained(share.worker_broke, error)
        if self.error is None:
            self.error = worker_error(error)
        if self.stream_buffer is not None:
            contained(self.stream_buffer.wake)
        contained(self.changed)
        self.failed()

    def greet(self) -> None:
        """Something has arrived over it for a Connection. Known already: no effect."""
        if not self.greeted:
            self.greeted = True
            self.lanes_when_greeted = self.lanes() or []

    def lanes(self) -> list[bytes] | None:
        """The transport and device of each lane; None before UCX 1.14, which does not tell."""
        text = ffi.new("char[4096]")
        if lib.tu_endpoint_transports(self.handle, text, 4096) != Status.OK:
            return None
        return list(ffi.string(text).splitlines())

    def close(self) -> None:
        """Closes by force, at once. Waiters get ClosedResourceError."""
        self.on_failure = None
        if self.handle is not None:
            self._force_close()
        elif self._left is not None and self.engine.teardown.begun:
            self._close_left()
        if self.stream_buffer is not None:
            self.stream_buffer.discard()

    def stop_watching(self) -> None:
        end_watch, self.end_watch = self.end_watch, None
        if end_watch is not None:
            end_watch()

    def _let_go(self) -> Any:
        """Ends all waits, here and at the endpoints beside it. Returns UCX's endpoint, to be closed."""
        contained(self.stop_watching)
        contained(self.engine.receive_queue.endpoint_closing, self)
        handle, self.handle = self.handle, None
        if self.pair is not None:
            self.pair.ended(self)
        self.end_operations()
        shares, self.shares = list(self.shares), {}
        for share in shares:
            share.handle = None  # none of them may use it while others are told
        for share in shares:
            contained(share.endpoint_ended)
        beside, self.beside = self.beside, None
        if beside is not None:
            contained(beside.follow, self)
        return handle

    def _force_close(self) -> None:
        engine = self.engine
        sending = self._sending()
        handle = self._let_go()
        if not self.forcible:
            # UCX can only flush it, for as long as that takes, and keeps it as long as the peer has its end. Towards a
            # peer that died, that is for ever: the worker ends it.
            if self.error is None:
                verdict = lib.tu_endpoint_close(handle, lib.TU_CLOSE)
                if verdict > 0:
                    Operation(engine, verdict, None, "closing an endpoint without error handling").detach()
            self.closed(handle)
        elif engine.teardown.begun:
            self._close_native(handle, lib.TU_CLOSE_STOP)
        elif not self._close_native(handle, lib.TU_CLOSE_EXACT if sending else lib.TU_CLOSE):
            self._finish_writing(handle)
        engine.progress()  # UCX takes the lanes apart in its progress, completed or not

    def _in_use(self) -> bool:
        """Whether an operation is under way over it, whoever posted it."""
        operations = self.engine.in_flight.values()
        return any(one.endpoint is not None and one.endpoint.native is self for one in operations)

    def _sending(self) -> bool:
        """Whether UCX may still send from a buffer, whoever gave it."""
        owners = self, self.main
        return any(
            one.pins and one.endpoint and one.endpoint.native in owners for one in self.engine.in_flight.values()
        )

    def _finish_writing(self, handle: Any) -> None:
        """Closes UCX's endpoint when everything is written, or after WRITING_TIME.

        If UCX 1.22 still has something to write when the peer closes its end, UCX may use an endpoint that it has freed
        (docs/ucx-reports.md: "TCP: both sides close by force"). If UCX is kept from writing, it keeps the socket until
        the peer has closed its end, which the peer cannot do if it is kept from writing, too.
        """
        self._left = handle

        async def finish() -> None:
            lost = UCXError, trio.BrokenResourceError, trio.ClosedResourceError
            try:
                with trio.move_on_after(WRITING_TIME), suppress(*lost):
                    await self.wait_until(lambda: not self._sending())
                    await self._flush(handle)
            finally:
                self._close_left()

        try:
            self.engine.run.spawn(finish, f"trio_ucx close of an endpoint to {self.label}")
        except RuntimeError:  # the run has ended
            self._close_left()

    async def _flush(self, handle: Any) -> None:
        """Waits until UCX has written everything, unless the endpoint is closed."""
        verdict = lib.tu_endpoint_flush_ucx(handle) if self._left else 0
        if verdict > 0:
            flush = Operation(self.engine, verdict, None, "writing what an endpoint has to send")
            self.engine.progress()
            await self.engine.waiting.wait(flush)

    def _close_left(self) -> None:
        """Closes UCX's endpoint if :meth:`_finish_writing` has not done that yet."""
        handle, self._left = self._left, None
        if handle is not None and self.engine.usable:
            self._close_native(handle, lib.TU_CLOSE_STOP)
            self.engine.progress()

    def _close_native(self, handle: Any, how: int) -> bool:
        """Closes UCX's endpoint by force. Returns False if UCX still has something to write."""
        verdict = lib.tu_endpoint_close(handle, how)
        if verdict == Status.BUSY:
            return False
        if verdict > 0:
            CloseOperation(self.engine, verdict, self, handle)
        else:
            self.closed(handle)
        return True

    def follow(self, other: EndpointCore) -> None:
        """Ends as the endpoint did that watched for it."""
        self.on_failure = None
        if self.handle is not None:
            self.error = other.error
            self._force_close()

    def closed(self, handle: Any) -> None:
        """UCX has closed it."""
        lib.tu_endpoint_free(handle)
        self.engine.endpoints.pop(self.id, None)
        live_handles.closed("endpoint")


def worker_error(error: BaseException) -> UCXError:
    """The error of an endpoint whose worker broke."""
    failure = UCXError(Status.IO_ERROR, f"the worker broke: {error!r}")
    failure.__cause__ = error
    return failure


def with_endpoints_beside(scope: Scope) -> list[Scope]:
    """An endpoint or a share in one, and the endpoint beside it that carries what is asked of it."""
    beside = scope.native.beside
    return [scope] if beside is None else [scope, beside]


class CloseOperation(Operation):
    __slots__ = ("core", "native")

    def __init__(self, engine: Engine, id: int, core: EndpointCore, native: Any) -> None:
        super().__init__(engine, id, None, "closing an endpoint")
        self.core = core
        self.native = native

    def internal_error(self, error: BaseException) -> None:
        report(f"an internal error of trio_ucx, closing the endpoint to {self.core.label}", error)

    def complete(self, status: int, length: int, tag: int) -> None:
        self.release()
        self.core.closed(self.native)
        self.finish(Value(None))
