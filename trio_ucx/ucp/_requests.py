"""Request groups: many operations in flight without a task for each."""

from __future__ import annotations

from collections.abc import AsyncIterator, Generator
from typing import Any, Protocol

import attrs
import trio
from outcome import Error, Value
from trio.lowlevel import enable_ki_protection

from .._native import lib
from .._util.background import BlockScope
from .._util.contained import contained
from .._util.handles import OpenedNotConstructed
from .._util.interrupts import protected_asynccontextmanager
from . import _status
from ._am_send import SendProtocol, post_am_send
from ._endpoint import Endpoint
from ._engine.engine import Engine
from ._engine.posting import completed
from ._engine.waits import Pending, Signal
from ._memory.buffers import Buffer, Contiguous, WritableBuffer, WritableContiguous
from ._rma.remote_memory import AtomicOp, RemoteMemory, no_atomic_op
from ._stream import post_stream_send
from ._tag import check_mask, check_tag, post_receive, post_send


class _OnWorker(Protocol):
    """A :class:`Worker`."""

    _engine: Engine


class SupportsRequests(Protocol):
    """What a group needs of a :class:`trio_ucx.Connection`: the layer above provides it."""

    @property
    def worker(self) -> _OnWorker: ...
    def _submit_send(self, data: Buffer, tag: int) -> Pending | None: ...
    def _submit_receive_into(self, buffer: WritableBuffer, tag: int) -> Pending: ...


class RequestCancelled(_status.Error):
    """This request of a group was cancelled, by ``request.cancel()`` or because its group was."""


@attrs.define(eq=False, repr=False)
class Request(metaclass=OpenedNotConstructed):
    """An operation of a :class:`RequestGroup`. ``await request`` for its result, or leave that to the group.

    Awaiting it raises the operation's error or :exc:`RequestCancelled`; ``trio.BusyResourceError`` while another task
    awaits it.

    Cancellation: cancelling the await leaves the request to the group.
    """

    _pending: Pending
    _engine: Engine

    @property
    def done(self) -> bool:
        """True if it has completed, well or not."""
        return self._pending.outcome is not None

    def __await__(self) -> Generator[Any, Any, Any]:
        return self._wait().__await__()

    @enable_ki_protection
    async def _wait(self) -> Any:
        if self._pending.awaited:
            raise trio.BusyResourceError("another task is waiting for this request already")
        try:
            return await completed(self._pending, self._engine, watch=True)
        except RequestCancelled:
            await trio.lowlevel.checkpoint_if_cancelled()  # what cancelled it has cancelled this task, too
            raise

    @enable_ki_protection
    def cancel(self) -> None:
        """Asks UCX to cancel it (``ucp_request_cancel``).

        It then ends with :exc:`RequestCancelled`, which the group does not count as an error; or normally, if it was
        too late. What UCX cannot cancel goes on without the request: its buffers stay pinned until UCX lets go of them.

        Raises:
            RuntimeError: another thread, or a forked child.
        """
        self._engine.run.check("this worker")
        self._engine.run.check_thread()
        cancel(self._pending)
        self._engine.reap()

    def __repr__(self) -> str:
        return f"<trio_ucx.ucp.Request {self._pending.outcome or 'in flight'}>"


def cancel(pending: Pending) -> None:
    if pending.outcome is None:
        pending._raise_cancel = _raise_request_cancelled
        task = pending._task
        if pending.try_to_cancel():
            pending._task = task  # the task that awaits it is to be told
            pending.finish_cancelled()


def _raise_request_cancelled() -> None:
    raise RequestCancelled("this request was cancelled")


@attrs.define(eq=False, repr=False)
class RequestGroup(metaclass=OpenedNotConstructed):
    """A nursery for requests: see :meth:`Worker.open_request_group`."""

    _engine: Engine
    _scope: BlockScope
    _token: trio.lowlevel.TrioToken = attrs.field(factory=trio.lowlevel.current_trio_token)
    _unfinished: set[Pending] = attrs.field(factory=set)
    _errors: list[Exception] = attrs.field(factory=list)
    _closed: bool = False
    _changed: Signal | None = None
    #: The request of every send that completed at once.
    _sent: Request | None = None

    @enable_ki_protection
    def tag_send(self, endpoint: Endpoint, data: Buffer, tag: int) -> Request:
        """Posts :meth:`Endpoint.tag_send` at once.

        An error that UCX reports at once is raised here, and a later one is the request's.

        Raises:
            trio.ClosedResourceError: the group, the endpoint, or the worker was closed.
            trio.BrokenResourceError, RuntimeError: as for the method of the endpoint.
            TypeError, ValueError: the same; not an Endpoint, or one of another worker.
        """
        tag = check_tag(tag)
        self._check_endpoint(endpoint)
        return self._add(post_send(endpoint._scope, data, tag))

    @enable_ki_protection
    def tag_send_sync(self, endpoint: Endpoint, data: Buffer, tag: int) -> Request:
        """Posts :meth:`Endpoint.tag_send_sync` at once.

        Raises: as :meth:`tag_send`.
        """
        tag = check_tag(tag)
        self._check_endpoint(endpoint)
        return self._add(post_send(endpoint._scope, data, tag, sync=True))

    @enable_ki_protection
    def am_send(
        self,
        endpoint: Endpoint,
        id: int,
        data: Buffer = b"",
        header: Buffer = b"",
        *,
        reply: bool = False,
        protocol: SendProtocol = SendProtocol.AUTO,
    ) -> Request:
        """Posts :meth:`Endpoint.am_send` at once.

        Raises: as :meth:`tag_send`.
        """
        self._check_endpoint(endpoint)
        return self._add(post_am_send(endpoint._scope, id, data, header, reply, protocol))

    @enable_ki_protection
    def stream_send(self, endpoint: Endpoint, data: Buffer) -> Request:
        """Posts :meth:`Endpoint.stream_send` at once.

        Raises: as :meth:`tag_send`.
        """
        self._check_endpoint(endpoint)
        return self._add(post_stream_send(endpoint._scope, data))

    @enable_ki_protection
    def tag_receive(self, buffer: WritableBuffer, tag: int, mask: int | None = None) -> Request:
        """Posts :meth:`Worker.tag_receive` at once; its result is ``(length, sender_tag)``.

        Raises:
            trio.ClosedResourceError: the group, or the worker, was closed.
            UCXError: a message that was there already is longer than the buffer, and is lost.
            trio.BrokenResourceError, RuntimeError, TypeError, ValueError: as for :meth:`Worker.tag_receive`.
        """
        tag, mask = check_tag(tag), check_mask(mask)
        self._check(self._engine)
        return self._add(post_receive(self._engine, buffer, tag, mask))

    @enable_ki_protection
    def get_into(self, memory: RemoteMemory, buffer: WritableContiguous, offset: int = 0) -> Request:
        """Posts :meth:`RemoteMemory.get_into` at once; its result is the number of bytes.

        Raises:
            UCXError: NOT_CONNECTED: no access path is known yet. Await :meth:`RemoteMemory.connect` first; where UCX's
                own puts and gets are needed, await one get or put.
            trio.ClosedResourceError: the group, the endpoint, or the worker was closed.
            trio.BrokenResourceError, RuntimeError, TypeError, ValueError: as for the method of the memory.
        """
        self._check_memory(memory)
        return self._add(memory._submit_get_into(buffer, offset))

    @enable_ki_protection
    def put(self, memory: RemoteMemory, data: Contiguous, offset: int = 0) -> Request:
        """Posts :meth:`RemoteMemory.put` at once.

        Raises: as :meth:`get_into`.
        """
        self._check_memory(memory)
        return self._add(memory._submit_put(data, offset))

    @enable_ki_protection
    def atomic(
        self, memory: RemoteMemory, op: AtomicOp, value: int, offset: int = 0, *, bits: int = 64, fetch: bool = False
    ) -> Request:
        """Posts :meth:`RemoteMemory.atomic` at once; its result is the same.

        Raises: as :meth:`get_into`.
        """
        if not isinstance(op, AtomicOp):
            raise no_atomic_op(op)
        self._check_memory(memory)
        fetch = fetch or op is AtomicOp.SWAP
        return self._add(memory._submit_atomic(op, value, None, offset, bits, fetch=fetch))

    @enable_ki_protection
    def compare_swap(
        self, memory: RemoteMemory, expected: int, value: int, offset: int = 0, *, bits: int = 64
    ) -> Request:
        """Posts :meth:`RemoteMemory.compare_swap` at once; its result is the old value.

        Raises: as :meth:`get_into`.
        """
        self._check_memory(memory)
        kind = lib.TU_ATOMIC_COMPARE_SWAP
        return self._add(memory._submit_atomic(kind, expected, value, offset, bits, fetch=True))

    @enable_ki_protection
    def send(self, connection: SupportsRequests, data: Buffer, *, tag: int = 0) -> Request:
        """Posts :meth:`trio_ucx.Connection.send` at once, or as soon as the peer's window has room.

        Raises:
            trio.ClosedResourceError: the group, or the connection, was closed.
            trio.BrokenResourceError, RuntimeError: as for :meth:`trio_ucx.Connection.send`.
            TypeError, ValueError: the same; not a Connection, or one of another worker.
        """
        self._check_connection(connection)
        return self._add(connection._submit_send(data, tag))

    @enable_ki_protection
    def receive_into(self, connection: SupportsRequests, buffer: WritableBuffer, *, tag: int = 0) -> Request:
        """Queues :meth:`trio_ucx.Connection.receive_into` at once; its result is the message's length.

        Errors of the receive itself are the request's.

        Raises: as :meth:`send`.
        """
        self._check_connection(connection)
        return self._add(connection._submit_receive_into(buffer, tag))

    def _check_endpoint(self, endpoint: Endpoint) -> None:
        if not isinstance(endpoint, Endpoint):
            raise TypeError(f"this takes an Endpoint, not {type(endpoint).__name__}")
        self._check(endpoint._core.engine)
        endpoint._check()

    def _check_memory(self, memory: RemoteMemory) -> None:
        if not isinstance(memory, RemoteMemory):
            raise TypeError(f"this takes a RemoteMemory, not {type(memory).__name__}")
        self._check(memory._core.engine)

    def _check_connection(self, connection: SupportsRequests) -> None:
        if not hasattr(connection, "_submit_send"):
            raise TypeError(f"this takes a Connection, not {type(connection).__name__}")
        self._check(connection.worker._engine)

    def _check(self, engine: Engine) -> None:
        if self._closed:
            raise trio.ClosedResourceError("this request group is closed")
        if engine is not self._engine:
            raise ValueError("a request group takes operations of its own worker only")
        engine.check()

    def _add(self, posted: Any) -> Request:
        if posted is None:
            if self._sent is None:
                self._sent = self._done(None)
            return self._sent
        if not isinstance(posted, Pending):
            return self._done(posted)
        if posted.outcome is None:
            self._unfinished.add(posted)
            posted.notify = self._finished
            self._engine.watch_events()
            self._engine.reap()  # so that a loop that posts sees which requests are done
        else:
            self._note(posted)
        return Request._create(posted, self._engine)

    def _done(self, value: Any) -> Request:
        done = Signal()
        done.outcome = Value(value)
        return Request._create(done, self._engine)

    def _finished(self, pending: Pending) -> None:
        self._unfinished.discard(pending)
        self._note(pending)

    def _note(self, pending: Pending) -> None:
        result = pending.outcome
        if isinstance(result, Error) and not isinstance(result.error, RequestCancelled):
            assert isinstance(result.error, Exception)
            pending.reported(result.error)
            self._errors.append(result.error)
            if len(self._errors) == 1:
                self._token.run_sync_soon(contained, self._fail)  # not here, where UCX's records are delivered
        if self._changed is not None and (self._errors or not self._unfinished):
            self._changed.set()

    def _fail(self) -> None:
        self._cancel_all()
        self._scope.cancel()

    def _cancel_all(self) -> None:
        for pending in list(self._unfinished):
            cancel(pending)
            self._engine.reap()  # each time: one delivery takes a bounded number of records

    async def _wait_done(self) -> None:
        """Waits until all is done, or something has failed."""
        await trio.lowlevel.checkpoint()
        while self._unfinished and not self._errors:
            self._changed = Signal()
            await self._engine.waiting.wait(self._changed)

    def __repr__(self) -> str:
        return f"<trio_ucx.ucp.RequestGroup, {len(self._unfinished)} in flight>"


@protected_asynccontextmanager
async def open_request_group(engine: Engine) -> AsyncIterator[RequestGroup]:
    scope = BlockScope("trio_ucx.ucp.Worker.open_request_group")
    group: RequestGroup = RequestGroup._create(engine, scope)
    failures: list[BaseException] = []
    try:
        with scope:
            try:
                yield group
                group._closed = True
                await group._wait_done()
            finally:
                group._closed = True
                group._cancel_all()
    except BaseException as error:
        if isinstance(error, GeneratorExit) or (isinstance(error, trio.Cancelled) and not group._errors):
            raise
        failures.append(error)
    if found := [*group._errors, *failures]:
        raise BaseExceptionGroup("errors in a request group", found)


open_request_group.__module__, open_request_group.__qualname__ = "trio_ucx.ucp", "Worker.open_request_group"
