"""The engine's side of an endpoint: UCX's endpoint, the operations on it, and the Connections that share it.

Operations belong to a :class:`Scope`: to an endpoint, or to a Connection's share in one (``share.py``).
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from typing import Any

import trio
from outcome import Value

from ..._native import ffi, lib
from ..._util.contained import contained, report
from ..._util.handles import ConflictDetector
from ..._util.live_handles import live_handles
from ..._util.process import NOBODY, Process
from .. import _hints
from .._features import Feature
from .._quirks.key_gate import Admission
from .._status import Origin, Status, UCXError, error_from_status
from .._worker_address import WorkerAddress
from .ending import CloseState, Ending, internal_failure, worker_failure
from .endpoints_to_worker import EndpointsToWorker
from .engine import Engine
from .operations import Operation, OperationSet
from .stream_buffer import StreamBuffer

#: Seconds after a forced close in which UCX may finish what it has begun to write over TCP.
WRITING_TIME = 0.5


class Scope:
    """What operations belong to: an endpoint, or a Connection's share in one.

    Args:
        id: its own.
        handle: UCX's endpoint.
        label: what to call the peer in messages.
        operations: those that belong to it.
    """

    #: What it is, for messages.
    NAME = "endpoint"
    __slots__ = (
        "__weakref__",
        "ending",
        "engine",
        "facade",
        "features",
        "handle",
        "id",
        "label",
        "operations",
        "peer_address",
    )

    def __init__(self, engine: Engine, id: int, handle: Any, label: str, operations: OperationSet) -> None:
        self.engine = engine
        self.id = id
        self.handle: Any = handle  # None once it has ended
        self.label = label
        self.operations = operations
        self.ending = Ending()
        #: To which worker it leads, where that is known.
        self.peer_address: WorkerAddress | None = None
        #: The features that our context has and, as far as is known, the peer's: an integer, which is fast to ask.
        self.features = engine.context.features.value
        #: The user's object for it.
        self.facade: Callable[[], Any] = lambda: None

    @property
    def endpoint(self) -> EndpointCore:
        """The endpoint itself."""
        raise NotImplementedError

    @property
    def error(self) -> UCXError | None:
        """Returns what it failed with, if it did."""
        return self.ending.error

    def require(self, feature: Feature, doing: str) -> None:
        """Refuses an operation if our context or the peer's lacks the feature: the peer would never answer.

        Raises:
            RuntimeError: with what to do.
        """
        if not self.features & feature.value:
            self.engine.context._require(feature, doing)
            raise RuntimeError(
                f"{doing} needs Feature.{feature.name} at the peer, too, and the peer's context was opened without it: "
                f"open that one with features=ucp.DEFAULT_FEATURES | ucp.Feature.{feature.name}"
            )

    @property
    def gone(self) -> bool:
        """True if nothing can be sent or received any more: it was closed, has failed, or its worker broke."""
        return self.handle is None or self.ending.error is not None

    def problem(self, origin: Origin | None = None) -> Exception | None:
        """The exception for using it now, if it cannot be used.

        Args:
            origin: instead of its own.
        """
        error = self.ending.broken(self.label, origin)
        if error is None and self.handle is None:
            return trio.ClosedResourceError(f"this {self.NAME} was closed")
        return error

    def error_of(self, status: int, doing: str) -> Exception:
        """The exception for a failed operation on it."""
        return self.problem() or error_from_status(status, doing, self.ending.origin, self.hint(status))

    def hint(self, status: int) -> str:
        """Returns what is known about a peer that cannot be reached, in parentheses."""
        return _hints.hint(self.engine.context._transports, status, self.peer_address)

    def check(self, over: EndpointCore | None = None) -> None:
        """Refuses to use it if it has ended.

        Args:
            over: the endpoint that is to be used, if that may be the one beside its own.
        """
        problem = self.problem()
        if problem is not None:
            self.ending.reported = True
        elif over is not None:
            problem = over.problem(self.ending.origin)
        if problem is not None:
            raise problem

    def detach(self) -> None:
        """UCX's endpoint goes, or has gone."""
        self.handle = None

    def fail(self, error: UCXError) -> None:
        """Marks it as failed, and ends its operations. Failed or closed already: no effect."""
        raise NotImplementedError

    def close(self) -> None:
        """Closes it by force."""
        raise NotImplementedError

    def follow(self, other: EndpointCore) -> None:
        """Ends as ``other`` has: the endpoint that it is a share of, or stands beside."""
        raise NotImplementedError

    def worker_broke(self, error: BaseException) -> None:
        """Its worker is of no use any more: ends all waits."""
        raise NotImplementedError

    def internal_error(self, error: BaseException) -> None:
        """Ends it, and no other, after an exception in our own code. Never raises."""
        report(f"an internal error of trio_ucx, at the endpoint to {self.label}", error)
        contained(self.fail, internal_failure(error))


class EndpointCore(Scope):
    """An endpoint, as the engine knows it. It lives until UCX has closed its endpoint."""

    __slots__ = (
        "_lingering",
        "admissions",
        "beside",
        "connected",
        "endpoints_to_worker",
        "forcible",
        "lanes_when_proven",
        "main",
        "shares",
        "stream_buffer",
        "stream_guard",
    )

    def __init__(self, engine: Engine, id: int, handle: Any, label: str, *, forcible: bool) -> None:
        super().__init__(engine, id, handle, label, OperationSet(engine))
        #: Whether UCX may close it by force.
        self.forcible = forcible
        #: What came of its UCP stream, once something came.
        self.stream_buffer: StreamBuffer | None = None
        self.stream_guard = ConflictDetector("another task is receiving from this stream")
        #: Its memory endpoint: another endpoint for its operations (:func:`._connecting.connect_beside`), which ends
        #: with it.
        self.beside: EndpointCore | None = None
        #: The other way round: the endpoint beside which this one is.
        self.main: EndpointCore | None = None
        #: Of a shared endpoint: the endpoints to the same worker; the Connections that have not left it; its lanes
        #: when the first message for a Connection arrived over it.
        self.endpoints_to_worker: EndpointsToWorker | None = None
        self.shares: dict[Scope, None] = {}
        self.lanes_when_proven: list[bytes] | None = None
        #: Whether it is known to be up, and will not change its lanes any more.
        self.connected = False
        #: UCX's endpoint, if this object was closed and UCX still has something to write.
        self._lingering: Any = None
        #: The keys of its peer, which UCX may need as long as it has the endpoint.
        self.admissions: list[Admission] = []
        engine.endpoints[id] = self
        live_handles.opened("endpoint")

    @property
    def endpoint(self) -> EndpointCore:
        return self

    @property
    def peer(self) -> Process:
        """Returns which process it leads to, where that is known."""
        return NOBODY if self.peer_address is None else self.peer_address.process

    def set_peer(self, address: WorkerAddress) -> None:
        """Records which worker it leads to."""
        self.peer_address = address
        self.features = (self.engine.context.features & address.features).value

    def user_object(self) -> Any:
        """The user's object for it, or for the share of a Connection that has not ended; None if there is none."""
        holders: list[Scope] = [*self.shares, self]
        found = (holder.facade() for holder in holders)
        return next((facade for facade in found if facade is not None), None)

    def disown(self) -> None:
        """In a forked child: drops the handles."""
        self.handle = None
        for share in self.shares:
            share.detach()

    def open_stream_buffer(self) -> StreamBuffer:
        if self.stream_buffer is None:
            self.stream_buffer = StreamBuffer(self.engine)
        return self.stream_buffer

    def keep(self, admission: Admission) -> None:
        """Lets its peer in as long as UCX has the endpoint."""
        self.admissions.append(admission)

    def lanes(self) -> list[bytes] | None:
        """``transport/device`` of each lane. None: it has ended, or UCX does not say (before 1.14)."""
        text = ffi.new("char[4096]")
        if self.handle is None or lib.tu_endpoint_transports(self.handle, text, 4096) != Status.OK:
            return None
        return list(ffi.string(text).splitlines())

    def operations_over_it(self) -> list[Operation]:
        """Returns all operations on it and on its main endpoint, those of shares that have ended included."""
        owners = self, self.main
        return [one for one in self.engine.in_flight.values() if one.scope and one.scope.endpoint in owners]

    # ---- Connections that share it ----

    @property
    def is_shared(self) -> bool:
        """True if Connections share it, or did."""
        return self.endpoints_to_worker is not None or bool(self.shares)

    @property
    def proven(self) -> bool:
        """True if something has arrived over it for a Connection."""
        return self.lanes_when_proven is not None

    def mark_proven(self) -> None:
        """Something has arrived over it for a Connection. Known already: no effect."""
        if not self.proven:
            self.lanes_when_proven = self.lanes() or []

    @property
    def splits_batches(self) -> bool:
        """True if UCX may send 4 KiB in several pieces: over UD a piece is no longer than a packet of the network."""
        return any(lane.startswith(b"ud_") for lane in self.lanes_when_proven or ())

    def join(self, share: Scope) -> None:
        """A Connection begins to use it."""
        self.shares[share] = None

    def leave(self, share: Scope, *, left_clean: bool) -> None:
        """Records that a Connection no longer uses it. Left already: no effect.

        Args:
            left_clean: if it was the last one, see :meth:`EndpointsToWorker.last_left`.
        """
        if share not in self.shares:
            return
        del self.shares[share]
        if self.shares or self.handle is None:
            return
        left_clean = left_clean and self.stream_buffer is None and not self.operations_over_it()
        if self.endpoints_to_worker is not None and self.endpoints_to_worker.last_left(self, left_clean=left_clean):
            return
        if share.error is None:
            self.close()
        else:
            self.fail(share.error)

    # ---- the end ----

    def fail(self, error: UCXError) -> None:
        """Marks it as failed, and ends its operations. Failed or closed already: no effect."""
        if self.gone:
            return
        self.ending.error = error
        try:
            self._force_close()
        finally:
            if self.stream_buffer is not None:
                contained(self.stream_buffer.wake)  # what has arrived can still be read

    def watch_process(self) -> None:
        """Lets it fail when its peer's process ends, or has ended already, if that can be noticed.

        Raises:
            OSError: it cannot be noticed for want of a descriptor or of memory.
        """
        if self.handle is None:
            return
        try:
            self.engine.peer_processes.watch(self.peer, self, self._process_ended)
        except ProcessLookupError:
            self._process_ended()

    def _process_ended(self) -> None:
        try:
            self.engine.reap()  # takes what it had sent, before UCX closes the shared memory or the socket
            self.fail(UCXError(Status.CONNECTION_RESET, f"the process at {self.label} died"))
            self.engine.receive_queue.suspect()
        except Exception as error:
            self.internal_error(error)

    def worker_broke(self, error: BaseException) -> None:
        for share in list(self.shares):
            contained(share.worker_broke, error)
        self.ending.error = self.error or worker_failure(error)
        if self.stream_buffer is not None:
            contained(self.stream_buffer.wake)
        contained(self.operations.changed)

    def close(self) -> None:
        """Closes the endpoint by force, at once. Waiters get ClosedResourceError."""
        if self.ending.state is CloseState.CLOSING:
            self.ending.state = CloseState.CLOSED
        if self.handle is not None:
            self._force_close()
        elif self._lingering is not None and self.engine.teardown.begun:
            self._close_lingering()
        if self.stream_buffer is not None:
            self.stream_buffer.discard()

    def follow(self, other: EndpointCore) -> None:
        """Ends this memory endpoint as ``other`` has ended, beside which it stands."""
        if self.handle is not None:
            self.ending.error = other.error
            self._force_close()

    def _let_go(self) -> Any:
        """Ends all waits, here and at the endpoint beside it. Returns UCX's endpoint, to be closed."""
        contained(self.engine.peer_processes.forget, self.peer, self)
        contained(self.engine.receive_queue.endpoint_closing, self)
        handle, self.handle = self.handle, None
        if self.endpoints_to_worker is not None:
            self.endpoints_to_worker.ended(self)
        self.operations.end(self.problem)
        shares, self.shares = list(self.shares), {}
        for share in shares:
            share.detach()  # none of them may use it while others are told
        for share in shares:
            contained(share.follow, self)
        beside, self.beside = self.beside, None
        if beside is not None:
            contained(beside.follow, self)
        return handle

    def _force_close(self) -> None:
        engine = self.engine
        sending = self._sending() or engine.links.sending
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
        engine.submit()  # UCX takes the lanes apart in its progress, completed or not

    def _sending(self) -> bool:
        """True if UCX may still send from a buffer, whoever gave it."""
        return any(operation.pins for operation in self.operations_over_it())

    def _finish_writing(self, handle: Any) -> None:
        """Closes UCX's endpoint when everything is written, or after WRITING_TIME.

        If UCX 1.22 still has something to write when the peer closes its end, UCX may use an endpoint that it has freed
        (ucx-reports.md: "TCP: both sides close by force"). If UCX is kept from writing, it keeps the socket until
        the peer has closed its end, which the peer cannot do if it is kept from writing, too.
        """
        self._lingering = handle

        async def finish() -> None:
            lost = UCXError, trio.BrokenResourceError, trio.ClosedResourceError
            try:
                with trio.move_on_after(WRITING_TIME), suppress(*lost):
                    await self.operations.wait_until(lambda: not self._sending())
                    await self._flush(handle)
            finally:
                self._close_lingering()

        try:
            self.engine.run.spawn(finish, f"trio_ucx close of an endpoint to {self.label}")
        except RuntimeError:  # the run has ended
            self._close_lingering()

    async def _flush(self, handle: Any) -> None:
        """Waits until UCX has written everything, unless the endpoint is closed."""
        verdict = lib.tu_endpoint_flush_ucx(handle) if self._lingering else 0
        if verdict > 0:
            flush = Operation(self.engine, verdict, None, "writing what an endpoint has to send")
            self.engine.submit()
            await self.engine.waiting.wait(flush)

    def _close_lingering(self) -> None:
        """Closes UCX's endpoint if :meth:`_finish_writing` has not done that yet."""
        handle, self._lingering = self._lingering, None
        if handle is not None and self.engine.usable:
            self._close_native(handle, lib.TU_CLOSE_STOP)
            self.engine.submit()

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

    def closed(self, handle: Any) -> None:
        """UCX has closed it."""
        lib.tu_endpoint_free(handle)
        if self.forcible:  # else UCX may use it until the worker ends
            for admission in self.admissions:
                admission.end()
        self.engine.endpoints.pop(self.id, None)
        live_handles.closed("endpoint")


def endpoints_of(engine: Engine) -> list[EndpointCore]:
    """Returns the endpoints of an engine, which itself knows them as :class:`~.dispatch.EngineEndpoint` only."""
    return [endpoint for endpoint in list(engine.endpoints.values()) if isinstance(endpoint, EndpointCore)]


def with_endpoints_beside(scope: Scope) -> list[Scope]:
    """The scope, and the memory endpoint beside its endpoint if there is one."""
    beside = scope.endpoint.beside
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
