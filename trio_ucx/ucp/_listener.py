"""Raw listeners: connection requests as UCX has them, before any handshake."""

from __future__ import annotations

import os
import socket
import time
from collections import deque
from contextlib import suppress
from typing import TYPE_CHECKING, Any

import attrs
import trio
from trio.lowlevel import enable_ki_protection

from .._native import ffi, lib
from .._util.handles import OpenedNotConstructed, warn_resource
from .._util.live_handles import live_handles
from .._util.socket_addresses import Resolved, format_address
from ._attributes import check_name
from ._connecting import accept_request
from ._endpoint import Endpoint, read_sockaddr
from ._endpoint_options import EndpointOptions, ErrorMode, check_error_mode
from ._engine.engine import Engine, engines
from ._engine.waits import Waiters
from ._quirks import descriptors
from ._quirks.sandboxes import no_network_devices
from ._quirks.stopped_queue import check_queue
from ._status import Status, os_error_from_status

if TYPE_CHECKING:
    from ._worker import Worker

#: Connection requests that may wait at a listener; further clients are rejected.
BACKLOG = 256


#: Seconds that closing a listener waits, if need be, for UCX to notice that clients were dropped. Usually one
#: millisecond is enough.
DROP_TIMEOUT = 0.1


def _connections_at(address: tuple[str, int]) -> list[socket.socket]:
    """This process's established TCP connections whose local address this is; close them, they are duplicates."""
    host, port = address
    found = []
    for entry in os.listdir("/proc/self/fd"):
        with suppress(OSError):
            if not os.readlink(f"/proc/self/fd/{entry}").startswith("socket:"):
                continue
            connection = socket.socket(fileno=os.dup(int(entry)))
            try:
                mine = connection.family in (socket.AF_INET, socket.AF_INET6) and (
                    connection.getsockname()[1] == port
                    and host in (connection.getsockname()[0], "0.0.0.0", "::")
                    and connection.getpeername() is not None  # raises for what listens
                )
            except OSError:
                mine = False
            if mine:
                found.append(connection)
            else:
                connection.close()
    return found


class ListenerCore:
    """A native listener and the requests that wait at it."""

    def __init__(self, engine: Engine, address: Resolved) -> None:
        self.engine = engine
        self.id = engine.next_id()
        descriptors.require(descriptors.LISTENER, f"listening at {address}")
        out = ffi.new("tu_listener_t **")
        status = lib.tu_listener_create(
            engine.handle, self.id, int(address.family), address.ip.encode(), address.port, address.scope, out
        )
        if status != Status.OK:
            raise _listen_error(status, address)
        self.handle: Any = out[0]
        bound = read_sockaddr(lambda *out: lib.tu_listener_sockaddr(self.handle, *out))
        self.address: tuple[str, int] = bound or (address.ip, address.port)
        self.waiting: deque[int] = deque()
        #: Requests handed out and not answered yet.
        self.unanswered: set[int] = set()
        self._acceptors = Waiters()
        engine.receivers.listeners[self.id] = self._arrived
        engine.teardown.children[self.id] = self._unclosed
        engine.teardown.on_broken[self.id] = self._acceptors.fail
        live_handles.opened("listener")

    def _arrived(self, request: int) -> None:
        if self._acceptors.give(request):
            self.unanswered.add(request)
        elif len(self.waiting) >= BACKLOG:
            lib.tu_request_reject(self.handle, request)
        else:
            self.waiting.append(request)

    def _unclosed(self) -> None:
        """Called when the worker closes before the listener was closed."""
        warn_resource(f"unclosed <trio_ucx.ucp.RawListener at {self.address}>, closed with its worker")
        self.close()

    def check(self) -> None:
        self.engine.check()
        if self.handle is None:
            raise trio.ClosedResourceError("this listener was closed")

    async def next_request(self) -> int:
        await trio.lowlevel.checkpoint_if_cancelled()
        self.check()
        if self.waiting:
            request = self.waiting.popleft()
            self.unanswered.add(request)
            await trio.lowlevel.cancel_shielded_checkpoint()
        else:
            request = await self._acceptors.wait()
        self.check()  # closing has rejected it meanwhile
        return request

    def reject(self, request: int) -> None:
        self.engine.run.check("this worker")
        self.unanswered.discard(request)
        lib.tu_request_reject(self.handle, request)

    def close(self) -> None:
        """Rejects the waiting requests, and ends. Closed already: no effect."""
        if self.handle is None:
            return
        self.engine.reap()  # requests that are in the ring
        rejected = set()
        for request in [*self.waiting, *self.unanswered]:
            rejected.add(format_address(client_of(request)))
            self.reject(request)
        self.waiting.clear()
        with suppress(OSError):  # no descriptor is left for that: reliability.md, "Known limits"
            self._drop_silent_clients(rejected)
        handle, self.handle = self.handle, None
        del self.engine.receivers.listeners[self.id]
        self.engine.teardown.children.pop(self.id, None)
        lib.tu_listener_destroy(handle)
        live_handles.closed("listener")
        self.engine.teardown.on_broken.pop(self.id, None)
        self._acceptors.fail(trio.ClosedResourceError("this listener was closed"))

    def _drop_silent_clients(self, rejected: set[str]) -> None:
        """Ends the connections of clients that have sent no request yet.

        UCX leaves them open when a listener is destroyed, and calls the freed listener when their request comes: any
        program that can reach the port could crash us. They cannot be asked for, so they are found by their addresses.
        """
        ours = rejected | {core.label for engine in list(engines) for core in list(engine.endpoints.values())}
        give_up = time.monotonic() + DROP_TIMEOUT
        while time.monotonic() < give_up:
            silent = False
            for connection in _connections_at(self.address):
                with connection, suppress(OSError):
                    ip, peer_port, *_ = connection.getpeername()
                    if format_address((ip.partition("%")[0], peer_port)) not in ours:
                        silent = True
                        connection.shutdown(socket.SHUT_RDWR)  # which UCX's own thread notices, and closes it
            if not silent:
                return
            time.sleep(0.0005)


def client_of(request: int) -> tuple[str, int]:
    """Returns where a connection request comes from."""
    return read_sockaddr(lambda *out: lib.tu_request_client(request, *out)) or ("", 0)


def client_id_of(request: int) -> int | None:
    """Returns the id of the client in a connection request."""
    number = ffi.new("uint64_t *")
    return (number[0] or None) if lib.tu_request_client_id(request, number) == Status.OK else None


def _listen_error(status: int, address: Resolved) -> Exception:
    """UCX hardly says why; the kernel does, when it is asked to bind a plain socket there."""
    error = os_error_from_status(status, f"listening at {address}", _listen_hint(status))
    try:
        with socket.socket(address.family, socket.SOCK_STREAM) as probe:
            where = (address.ip, address.port, 0, address.scope) if address.scope else (address.ip, address.port)
            probe.bind(where)
    except OSError as reason:
        found = OSError(reason.errno, f"listening at {address}: {reason.strerror}")
        found.__cause__ = error.__cause__ or error
        return found
    return error


def _listen_hint(status: int) -> str:
    if status == Status.UNREACHABLE:
        advice = no_network_devices() or "add tcp to the option TLS or UCX_TLS, as in 'tcp,sm,self'"
        return f" (no transport in use can listen at a socket address: shared memory alone cannot; {advice})"
    return ""


@attrs.define(eq=False, repr=False)
class ConnectionRequest(metaclass=OpenedNotConstructed):
    """A client that asks for a connection. Answer it, by :meth:`accept` or :meth:`reject`.

    Attributes:
        client_address: its ``(host, port)`` (``ucp_conn_request_query``).
        client_id: the ``client_id`` of its worker, or None if it has none (``ucp_conn_request_query``).
    """

    _worker: Worker
    _core: ListenerCore
    _request: int | None
    client_address: tuple[str, int]
    client_id: int | None

    def _take(self) -> int:
        if self._request is None:
            raise trio.ClosedResourceError("this connection request was answered already")
        self._core.check()
        request, self._request = self._request, None
        return request

    @enable_ki_protection
    async def accept(
        self,
        worker: Worker | None = None,
        *,
        error_mode: ErrorMode = ErrorMode.PEER,
        name: str | None = None,
    ) -> Endpoint:
        """Accepts: makes the endpoint that talks to the client (``ucp_ep_create``).

        Args:
            worker: the worker of the endpoint; by default the listener's. It must be of the same context.
            error_mode: see :class:`ErrorMode`; the client's must be the same.
            name: for UCX's logs and ``endpoint.name``; at most 31 bytes.

        Cancellation: it has no effect; the request can still be answered.

        Raises:
            trio.ClosedResourceError: it was answered before, or the listener, or the worker, was closed.
            trio.BrokenResourceError: the worker broke; or its queue in shared memory has stopped
                (``statistics().stopped_queues``): accept on another worker.
            OSError: the client went away meanwhile, has no transport in common, or another release of UCX; too few file
                descriptors are left (EMFILE), or there is no memory for it (ENOMEM): the request can still be answered.
            PermissionError: the client's host is not admitted there without a key: see :meth:`Worker.admit`.
            TypeError, ValueError: a wrong argument; a worker of another context.
            NotImplementedError: this UCX does not know the ``error_mode``.
        """
        options = EndpointOptions(check_error_mode(error_mode), check_name(name))
        target = self._worker if worker is None else worker
        if not isinstance(target, type(self._worker)):
            raise TypeError(f"worker must be a Worker, not {type(worker).__name__}")
        if target.context is not self._worker.context:
            raise ValueError("a connection can only be accepted on a worker of the listener's context")
        await trio.lowlevel.checkpoint_if_cancelled()
        target._engine.check()
        doing = f"accepting {format_address(self.client_address)}"
        check_queue(target._engine, doing)
        descriptors.require(descriptors.ENDPOINT, doing)
        target._engine.key_gate.check_admitted([self.client_address[0]])
        request = self._take()
        self._core.unanswered.discard(request)
        answered = ffi.new("bool *")
        try:
            core = accept_request(target._engine, request, self.client_address, options, answered)
        except BaseException:
            if not answered[0]:
                self._request = request
                self._core.unanswered.add(request)
            raise
        endpoint = Endpoint._create(target, core, name=options.name)
        endpoint._remote = self.client_address
        await trio.lowlevel.cancel_shielded_checkpoint()
        return endpoint

    @enable_ki_protection
    def reject(self) -> None:
        """Refuses the client, whose first operation then fails (``ucp_listener_reject``).

        Raises:
            trio.ClosedResourceError: it was answered before, or the listener, or the worker, was closed.
            trio.BrokenResourceError: the worker broke.
        """
        self._core.reject(self._take())

    def __del__(self) -> None:
        if self._request is not None and self._core.handle is not None and not self._core.engine.run.inherited:
            warn_resource(f"unanswered {self!r}", self)
            core, request = self._core, self._request
            core.engine.run.call_soon(lambda: core.reject(request) if core.handle is not None else None)

    def __repr__(self) -> str:
        return f"<trio_ucx.ucp.ConnectionRequest from {self.client_address}>"


@attrs.define(eq=False, repr=False)
class RawListener(trio.abc.AsyncResource, metaclass=OpenedNotConstructed):
    """A UCP listener. Open one with :meth:`Worker.open_listener`; iterate over it for connection requests.

    An async context manager: leaving the block closes it. The iteration ends when it is closed.

    Cancellation: an iteration that is cancelled loses no request. Leaving a cancelled block closes all the same.
    """

    _worker: Worker
    _core: ListenerCore

    @property
    def address(self) -> tuple[str, int]:
        """The ``(host, port)`` that it is bound to."""
        return self._core.address

    @enable_ki_protection
    async def accept_request(self) -> ConnectionRequest:
        """Waits for the next connection request.

        Cancellation: no request is lost.

        Raises:
            trio.ClosedResourceError: the listener, or its worker, was closed, perhaps meanwhile.
            trio.BrokenResourceError: the worker broke.
        """
        request = await self._core.next_request()
        return ConnectionRequest._create(self._worker, self._core, request, client_of(request), client_id_of(request))

    def __aiter__(self) -> RawListener:
        return self

    @enable_ki_protection
    async def __anext__(self) -> ConnectionRequest:
        try:
            return await self.accept_request()
        except trio.ClosedResourceError:
            await trio.lowlevel.cancel_shielded_checkpoint()
            raise StopAsyncIteration from None

    @enable_ki_protection
    async def aclose(self) -> None:
        """Closes it (``ucp_listener_destroy``); clients that wait are rejected. May block the thread for 0.1 seconds.

        Cancellation: it is closed all the same.

        Raises: nothing, closed already or not.
        """
        self._core.engine.run.check_thread()
        if self._core.engine.usable:
            self._core.close()
        await trio.lowlevel.checkpoint()

    def __del__(self) -> None:
        core = self._core
        if core.handle is not None and core.engine.handle is not None:
            warn_resource(f"unclosed {self!r}", self)
            core.engine.run.call_soon(core.close)

    def __repr__(self) -> str:
        state = "closed" if self._core.handle is None else "listening"
        return f"<trio_ucx.ucp.RawListener at {self.address}, {state}>"
