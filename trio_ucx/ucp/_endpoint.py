"""Endpoints: one connection of a worker to a peer, without any handshake of ours."""

from __future__ import annotations

import enum
import math
import weakref
from contextlib import suppress
from typing import TYPE_CHECKING, Any

import attrs
import trio
from trio.lowlevel import enable_ki_protection

from .._native import ffi, lib, ucx
from .._util.arguments import check_integer
from .._util.handles import OpenedNotConstructed, warn_resource
from ._am_send import SendProtocol, post_am_send
from ._attributes import text
from ._engine.ending import CloseState
from ._engine.endpoint_core import EndpointCore, Scope, with_endpoints_beside
from ._engine.engine import Engine
from ._engine.operations import under_way
from ._engine.posting import completed, flush
from ._memory.buffers import Buffer, WritableBuffer
from ._memory.registered import MemoryDescriptor
from ._rma.remote_memory import RemoteMemory, attach
from ._status import Status, UCXError, broken, error_from_status
from ._stream import StreamData, StreamReader, post_stream_send
from ._tag import check_tag, post_send

if TYPE_CHECKING:
    from ._worker import Worker

#: Seconds that a close which nobody waits for any more may take.
BACKGROUND_CLOSE_TIMEOUT = 10.0


class CloseMode(enum.Enum):
    """How an endpoint closes.

    FLUSH waits for what was sent to be on its way; FORCE drops everything at once.
    """

    FLUSH = "flush"
    FORCE = "force"


@attrs.frozen
class Transport:
    """One lane of an endpoint.

    Attributes:
        name: the UCX transport, such as ``tcp``, ``sysv`` or ``rc_mlx5``.
        device: the device that it uses, such as ``eth0``.
    """

    name: str
    device: str


@attrs.frozen
class EndpointStatistics:
    """Figures about an :class:`Endpoint`.

    Attributes:
        operations_in_flight: posted and not completed.
        left_over_operations: those of them whose task was cancelled.
    """

    operations_in_flight: int
    left_over_operations: int


def check_mode(mode: CloseMode) -> CloseMode:
    if not isinstance(mode, CloseMode):
        raise TypeError(f"mode must be CloseMode.FLUSH or CloseMode.FORCE, not {mode!r}")
    return mode


def query_sockaddr(core: EndpointCore, remote: bool) -> tuple[str, int] | None:
    """The ``(host, port)`` of one side, or None where UCX has none (endpoints by worker address)."""
    if core.handle is None:
        return None
    return read_sockaddr(lambda *out: lib.tu_endpoint_sockaddr(core.handle, remote, *out))


def read_sockaddr(call: Any) -> tuple[str, int] | None:
    host = ffi.new("char[64]")
    port = ffi.new("unsigned *")
    if call(host, 64, port) != Status.OK:
        return None
    return ffi.string(host).decode(), port[0]


def query_transports(core: EndpointCore) -> tuple[Transport, ...]:
    lanes = core.lanes()
    if lanes is None:
        raise UCXError(
            Status.NOT_IMPLEMENTED,
            f"asking for an endpoint's transports needs UCX 1.14 or later; this is UCX {ucx.release}",
        )
    return as_transports(lanes)


def as_transports(lanes: list[bytes]) -> tuple[Transport, ...]:
    transports = (Transport(*lane.decode().split("/", 1)) for lane in lanes)
    # The one without a device is the connection manager, which carries no data.
    return tuple(transport for transport in transports if transport.device)


def query_name(core: EndpointCore) -> str:
    out = ffi.new("char[]", 64)
    status = lib.tu_endpoint_name(core.handle, out, 64)
    if status != Status.OK:
        raise error_from_status(status, "asking for an endpoint's name", core.ending.origin)
    return text(out)


def evaluate(core: EndpointCore, nbytes: int) -> float:
    core.engine.reap()  # a failure that UCX has not told yet
    core.check()
    core.engine.context._check_evaluation()
    seconds = ffi.new("double *")
    status = lib.tu_endpoint_evaluate(core.handle, nbytes, seconds)
    if status == Status.NO_RESOURCE:
        raise UCXError(status, "estimating the time of a transfer: the connection is not up yet, send something first")
    if status != Status.OK:
        raise error_from_status(status, "estimating the time of a transfer", core.ending.origin)
    return float(seconds[0])


@attrs.define(eq=False, repr=False)
class Endpoint(trio.abc.AsyncResource, metaclass=OpenedNotConstructed):
    """A UCP endpoint. Open one with :meth:`Worker.open_endpoint` or :meth:`ConnectionRequest.accept`.

    An async context manager: leaving the block normally closes with FLUSH, leaving it by an exception with FORCE.

    Cancellation: a cancelled block closes with FORCE.
    """

    _worker: Worker
    #: What its operations belong to: the endpoint, or a Connection's share in it.
    _scope: Scope
    _local: tuple[str, int] | None = None
    _remote: tuple[str, int] | None = None
    #: Whether a task is in :meth:`aclose`, waiting for the flush.
    _flushing: bool = False
    _name: str | None = None
    #: As last known.
    _transports: tuple[Transport, ...] = ()
    _reader: StreamReader = attrs.field(init=False)

    def __attrs_post_init__(self) -> None:
        self._reader = StreamReader(self._scope)
        self._scope.facade = weakref.ref(self)

    @property
    def _core(self) -> EndpointCore:
        return self._scope.endpoint

    @property
    def _is_of_connection(self) -> bool:
        return self._scope is not self._core

    @property
    def worker(self) -> Worker:
        """The worker that it lives on."""
        return self._worker

    @property
    def alive(self) -> bool:
        """True if it is open and not known to be broken."""
        scope = self._scope
        return scope.handle is not None and scope.ending.state is CloseState.OPEN and self._core.engine.usable

    @property
    def local_address(self) -> tuple[str, int] | None:
        """Our ``(host, port)``, or None for an endpoint made from a worker address (``ucp_ep_query``).

        After the end, as last known.
        """
        self._local = self._local or query_sockaddr(self._core, remote=False)
        return self._local

    @property
    def remote_address(self) -> tuple[str, int] | None:
        """The peer's ``(host, port)``, or None for an endpoint made from a worker address (``ucp_ep_query``).

        After the end, as last known.
        """
        self._remote = self._remote or query_sockaddr(self._core, remote=True)
        return self._remote

    @property
    def transports(self) -> tuple[Transport, ...]:
        """The transports of its lanes (``ucp_ep_query``; UCX 1.14). Complete once the first message went through.

        An endpoint that has ended returns those that were last known: a Connection's endpoint those with which it was
        opened, another endpoint none if it failed before the first call.

        Raises:
            UCXError: trio_ucx was built against UCX 1.13.
        """
        if self._has_not_ended:
            self._transports = query_transports(self._core)
        return self._transports or as_transports(self._core.lanes_when_proven or [])

    @property
    def name(self) -> str:
        """The name that it was given, or by which UCX calls it in its logs (``ucp_ep_query``).

        An endpoint that has ended returns the name that was last known, or its peer if UCX was not asked before.

        Raises: nothing.
        """
        if self._name is None and self._has_not_ended:
            self._name = query_name(self._core)
        return self._core.label if self._name is None else self._name

    @property
    def _has_not_ended(self) -> bool:
        return self._scope.problem() is None and self._core.engine.usable

    def _remember(self) -> None:
        """Asks UCX what can be asked after the end, too."""
        if self._has_not_ended:
            with suppress(Exception):  # UCX before 1.14 does not say
                self._transports = query_transports(self._core)
            self._local, self._remote = self.local_address, self.remote_address

    @enable_ki_protection
    def evaluate(self, nbytes: int) -> float:
        """Returns UCX's estimate of the seconds that a message takes (``ucp_ep_evaluate_perf``).

        It is made of what UCX knows about the fastest lane: its latency and its bandwidth, not the load on it.

        Raises:
            UCXError: the connection is not up yet (one by socket address, before the first message went through), or
                UCX cannot say, with its option UNIFIED_MODE.
            TypeError, ValueError: ``nbytes`` is no integer, or negative.
            trio.ClosedResourceError, trio.BrokenResourceError: it is closed, or broken.
        """
        nbytes = check_integer(nbytes, "nbytes", 0, 2**63 - 1)
        self._check()
        return evaluate(self._core, nbytes)

    def statistics(self) -> EndpointStatistics:
        """Returns what it has in flight.

        Raises: nothing, also after the close.
        """
        scopes = with_endpoints_beside(self._scope)
        pending = [operation for scope in scopes for operation in scope.operations.pending]
        return EndpointStatistics(len(pending), sum(operation.detached for operation in pending))

    def _check(self) -> None:
        self._core.engine.check()
        if self._scope.ending.state is not CloseState.OPEN:
            raise trio.ClosedResourceError(f"this {self._scope.NAME} was closed")
        self._scope.check()

    @enable_ki_protection
    async def tag_send(self, data: Buffer, tag: int) -> None:
        """Sends one message (``ucp_tag_send_nbx``).

        Returns when ``data`` may be used again, which is not yet delivery. A message larger than UCX's rendezvous
        threshold is taken only when the peer receives it.

        Args:
            data: a contiguous buffer, or a list of them, which arrives as one message; or a :class:`Strided`. Device
                memory goes to UCX as it is.
            tag: 64 bits, for the receiver to choose by.

        Cancellation: the message may or may not be sent, whole or not at all. ``data`` stays pinned until UCX lets go
        of it.

        Raises:
            trio.ClosedResourceError, trio.BrokenResourceError: this endpoint was closed; the peer is gone.
            TypeError, ValueError: not such a buffer; the tag is out of range.
            RuntimeError: our context, or the peer's if its features are known, was opened without ``Feature.TAG``.
        """
        tag = check_tag(tag)
        await trio.lowlevel.checkpoint_if_cancelled()
        self._check()
        await completed(post_send(self._scope, data, tag), self._core.engine)

    @enable_ki_protection
    async def tag_send_sync(self, data: Buffer, tag: int) -> None:
        """Sends one message and waits until the peer has begun to receive it (``ucp_tag_send_sync_nbx``).

        The arguments are :meth:`tag_send`'s.

        Cancellation: as :meth:`tag_send`.

        Raises: as :meth:`tag_send`.
        """
        tag = check_tag(tag)
        await trio.lowlevel.checkpoint_if_cancelled()
        self._check()
        await completed(post_send(self._scope, data, tag, sync=True), self._core.engine)

    @enable_ki_protection
    async def am_send(
        self,
        id: int,
        data: Buffer = b"",
        header: Buffer = b"",
        *,
        reply: bool = False,
        protocol: SendProtocol = SendProtocol.AUTO,
    ) -> None:
        """Sends an active message (``ucp_am_send_nbx``).

        It goes to the queue that the peer has opened for its id: :meth:`Worker.open_active_messages`.

        Returns when ``data`` may be used again. With a rendezvous, that is when the peer has received the message, or
        released it unread.

        Args:
            id: 0 to 65535.
            data: a contiguous buffer, or a list of them, which arrives as one.
            header: goes with the message, and is there before its data. At most ``max_am_header`` bytes of
                :meth:`Worker.attributes`.
            reply: let the receiver know which endpoint it came by (``UCP_AM_SEND_FLAG_REPLY``).
            protocol: see :class:`SendProtocol`.

        Cancellation: the message may or may not be sent, whole or not at all. ``data`` stays pinned until UCX lets go
        of it.

        Raises:
            UCXError: the receiver refused a rendezvous. (Nothing tells of an eager message that was dropped.)
            trio.ClosedResourceError, trio.BrokenResourceError: this endpoint was closed; the peer is gone.
            TypeError, ValueError: not a contiguous buffer; the header is too long; the id is out of range.
            RuntimeError: our context, or the peer's if its features are known, was opened without ``Feature.AM``.
        """
        await trio.lowlevel.checkpoint_if_cancelled()
        self._check()
        await completed(post_am_send(self._scope, id, data, header, reply, protocol), self._core.engine)

    @enable_ki_protection
    async def stream_send(self, data: Buffer) -> None:
        """Sends bytes on the endpoint's UCP stream (``ucp_stream_send_nbx``).

        Returns when ``data`` may be used again, which is not yet delivery. UCP streams have no backpressure: the peer
        holds whatever it does not read.

        Args:
            data: a contiguous buffer, or a list of them.

        Cancellation: the bytes may or may not be sent, all or none; ``data`` stays pinned until UCX lets go of it.

        Raises:
            trio.ClosedResourceError, trio.BrokenResourceError: this endpoint was closed; the peer is gone.
            TypeError, ValueError: not a contiguous buffer.
            RuntimeError: our context, or the peer's if its features are known, was opened without ``Feature.STREAM``.
        """
        await trio.lowlevel.checkpoint_if_cancelled()
        self._check()
        await completed(post_stream_send(self._scope, data), self._core.engine)

    @enable_ki_protection
    async def stream_receive(self, buffer: WritableBuffer, *, exact: bool = False) -> int:
        """Receives bytes of the endpoint's UCP stream into a buffer (``ucp_stream_recv_data_nb``).

        Args:
            buffer: a writable contiguous buffer, or a list of them.
            exact: wait until it is full. Otherwise the first bytes suffice.

        Returns:
            The number of bytes; 0 only for an empty buffer.

        Cancellation: no byte is lost. What the buffer has got is received again by the next call.

        Raises:
            trio.BrokenResourceError: the peer is gone (UCX cannot tell whether it closed), and everything that had
                arrived was read; with ``exact``, less than the buffer takes, which another receive still gets.
            trio.ClosedResourceError: this endpoint, or its worker, was closed.
            trio.BusyResourceError: another task is receiving.
            TypeError, ValueError: not such a buffer.
            RuntimeError: our context, or the peer's if its features are known, was opened without ``Feature.STREAM``.
        """
        return await self._reader.receive_into(buffer, exact)

    @enable_ki_protection
    async def stream_receive_some(self) -> StreamData:
        """Receives the next piece of the endpoint's UCP stream, where UCX has put it: no copy.

        Release it; until then it takes UCX's memory.

        Cancellation: no byte is lost.

        Raises: as :meth:`stream_receive`.
        """
        return await self._reader.receive_some()

    @enable_ki_protection
    def attach(self, descriptor: bytes | MemoryDescriptor) -> RemoteMemory:
        """Takes hold of memory of the peer's, by what its :attr:`Memory.descriptor` gave; nothing is sent.

        Raises:
            TypeError, ValueError: it is no descriptor, or damaged; it is known to be of another process than this
                endpoint leads to. (Known is that of a Connection's endpoint, and of one opened by a WorkerAddress.)
            RuntimeError: the context was opened without ``Feature.AM``, ``RMA``, ``AMO32`` and ``AMO64``.
            trio.ClosedResourceError, trio.BrokenResourceError: this endpoint was closed; the peer is gone.
        """
        self._check()
        return attach(self._check, self._scope, descriptor)

    @enable_ki_protection
    async def flush(self) -> None:
        """Waits until what was sent is out of this process (``ucp_ep_flush_nbx``).

        UCX does not count messages that wait for the peer to receive them (rendezvous): await their sends.

        Cancellation: it has no effect; the messages go on.

        Raises:
            trio.ClosedResourceError, trio.BrokenResourceError: this endpoint was closed; the peer is gone.
        """
        await trio.lowlevel.checkpoint_if_cancelled()
        self._check()
        await flush(self._scope)

    @enable_ki_protection
    def abort(self) -> None:
        """Closes by force, at once (``ucp_ep_close_nbx`` with FORCE). A plain function; closed already: no effect.

        Raises:
            RuntimeError: it is the endpoint of a Connection that is open: abort or close that.
        """
        self._core.engine.run.check_thread()
        self._check_is_not_shared()
        if self._is_of_connection:
            return
        self._remember()
        self._scope.ending.begin_close()
        if self._core.engine.usable:
            self._scope.close()
            self._core.engine.reap()

    @enable_ki_protection
    async def aclose(self, mode: CloseMode = CloseMode.FLUSH) -> None:
        """Closes it.

        FLUSH waits for the sends that were posted and not cancelled, flushes, then closes. FORCE closes at once, also
        while another task waits in ``aclose()``. A second FLUSH does not wait for the first.

        Cancellation: returns at once; the worker goes on with the FLUSH in the background, for at most 10 seconds. If
        another task waits in ``aclose()``, the endpoint is closed by force: so :func:`trio.aclose_forcefully` ends that
        wait.

        Raises:
            trio.BrokenResourceError: with FLUSH, the peer was lost, or closed its end, before everything was known to
                be flushed, and no operation on this endpoint has reported that yet. The endpoint is closed
                nevertheless. (UCX cannot tell whether the data had arrived; a :class:`trio_ucx.Connection` can.)
            trio.ClosedResourceError: with FLUSH, it was closed by force meanwhile.
            RuntimeError: it is the endpoint of a Connection that is open: close that.
            TypeError: ``mode`` is no :class:`CloseMode`.
        """
        check_mode(mode)
        self._core.engine.run.check_thread()
        self._check_is_not_shared()
        if mode is CloseMode.FORCE or self._is_of_connection:
            self.abort()
            await trio.lowlevel.checkpoint()
        elif self.alive:
            self._remember()
            self._scope.ending.begin_close()
            await self._flush_and_close()
        else:
            await self._closed_already()

    @enable_ki_protection
    async def wait_closed(self) -> None:
        """Waits until this side has closed it. Several tasks may wait, and none needs to receive.

        UCX cannot tell a peer that has closed its end from one that was lost: either raises ``BrokenResourceError``, as
        soon as UCX notices. Between worker addresses UCX does not notice that the peer has closed its end, but only
        that its process has gone; with ``ErrorMode.NONE`` it notices nothing.

        Cancellation: it has no effect.

        Raises:
            trio.BrokenResourceError: the peer was lost, or its worker or ours broke, before this side had closed it.
            RuntimeError: another thread than its worker's.
        """
        self._core.engine.run.check_thread()
        await trio.lowlevel.checkpoint_if_cancelled()
        scope = self._scope
        await scope.operations.wait_until(lambda: scope.gone)
        if scope.error is not None:
            scope.check()
        await trio.lowlevel.cancel_shielded_checkpoint()

    def _check_is_not_shared(self) -> None:
        if self._is_of_connection and self._scope.handle is not None and self._core.engine.usable:
            raise RuntimeError(
                "this endpoint belongs to all Connections between two workers: close or abort the Connection instead"
            )

    async def _closed_already(self) -> None:
        """It was closed, is being closed, or has failed."""
        scope = self._scope
        first = scope.ending.begin_close()
        try:
            await trio.lowlevel.checkpoint()
        except trio.Cancelled:
            if self._flushing:
                self.abort()
            raise
        if first and scope.operations.unflushed and not scope.ending.reported:
            _raise_if_broken(scope)

    async def _flush_and_close(self) -> None:
        self._flushing = True
        try:
            await trio.lowlevel.checkpoint_if_cancelled()
            await _flush_and_close(self._core, math.inf)
        except trio.Cancelled:
            close_in_background(self._core.engine, self._core, lambda: _flush_and_close(self._core))
            raise
        except BaseException:  # a KeyboardInterrupt, say
            self._core.close()
            raise
        finally:
            self._flushing = False

    @enable_ki_protection
    async def __aexit__(self, *exc_info: object) -> None:
        if exc_info[0] is None:
            await self.aclose()
        else:
            self.abort()
            await trio.lowlevel.cancel_shielded_checkpoint()

    def __del__(self) -> None:
        if self._core.engine.run.inherited:
            return
        if self._is_of_connection:
            return
        scope = self._scope
        if scope.ending.state is CloseState.OPEN and scope.handle is not None:
            dropped(self._core, f"unclosed {self!r}", self)
        elif self._core.stream_buffer is not None:
            self._core.engine.run.call_soon(self._core.close)  # it broke, and nobody can read any more what had arrived

    def __repr__(self) -> str:
        state = "open" if self.alive else "broken" if self._scope.error is not None else "closed"
        return f"<trio_ucx.ucp.Endpoint to {self._scope.label}, {state}>"


async def _flush_and_close(core: EndpointCore, timeout: float = BACKGROUND_CLOSE_TIMEOUT) -> None:
    reason: trio.BrokenResourceError | None = None
    with trio.move_on_after(timeout) as scope:
        try:
            for one in with_endpoints_beside(core):
                await one.operations.wait_until(one.operations.sends_done)
            if core.error is None:
                core.check()  # it may have been closed by force meanwhile
            if core.handle is not None and core.operations.unflushed:
                await flush(core)
        except trio.BrokenResourceError as error:
            if core.operations.unflushed:
                reason = error
    waiting = [operation for one in with_endpoints_beside(core) for operation in one.operations.in_order()]
    waiting_for = under_way(waiting) if scope.cancelled_caught else ""
    core.close()
    core.engine.reap()
    if reason is not None:
        _raise_if_broken(core)
        raise broken(f"closing: what was sent may not have arrived: {reason}", reason.__cause__, core.ending.origin)
    if scope.cancelled_caught:
        raise broken(
            f"closing: the peer {core.label} did not take everything within {timeout} seconds{waiting_for}",
            None,
            core.ending.origin,
        )
    await trio.lowlevel.cancel_shielded_checkpoint()


def _raise_if_broken(core: Scope) -> None:
    if core.error is not None:
        raise broken(f"closing: what was sent may not have arrived: {core.error}", core.error, core.ending.origin)


def close_in_background(engine: Engine, core: Scope, function: Any) -> None:
    """Goes on with a close whose task was cancelled; by force, where the run cannot."""

    async def run() -> None:
        try:
            await function()
        except (trio.BrokenResourceError, trio.ClosedResourceError):
            pass  # nobody is there to be told
        finally:
            core.close()

    if not engine.run.spawn_background(run, f"trio_ucx closing {core.label}"):
        core.close()


def dropped(core: EndpointCore, message: str, source: object) -> None:
    """Something was garbage collected that should have been closed: say so, and close it where it lives."""
    engine = core.engine
    warn_resource(message, source)
    engine.run.call_soon(core.close)
