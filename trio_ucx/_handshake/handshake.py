"""One side of a handshake: from the exchange on the control socket to an open connection.

When the exchange has agreed on an endpoint, each side gets it, and makes the :class:`Link`. If no message has come
through between the two ends of the endpoint yet, both sides send HELLO, a control frame, over UCX. The connection is
open for a side when that side has the Link and, if HELLO is awaited, HELLO has arrived.

A client that need not wait for HELLO sends at once, and UCX may deliver that before the server has read TAKE from the
control socket. Such a client uses the shared endpoint of which WELCOME has told it, and which is proven. So the
server makes the Link with WELCOME if there is such an endpoint, and again in the rare case that the client takes
another one. Nothing but HELLO can arrive before there is a Link.
"""

from __future__ import annotations

import errno
import logging
import os
import socket
import ssl
from collections.abc import Callable
from contextlib import suppress
from ipaddress import ip_address
from typing import Any

import attrs
import trio
from outcome import Error, Value

from .._errors import refusal
from .._link import Link, MessagePort, Options
from .._native import ffi
from .._peer_info import Admit
from .._rules import wire
from .._rules.life import Loss
from .._util.contained import contained, report
from .._util.picklable import Picklable
from .._util.socket_addresses import family_of, format_address, is_loopback
from ..ucp import Status, WorkerAddress
from ..ucp._internal_api import (
    Admission,
    EndpointsToWorker,
    EndpointSummary,
    Ends,
    KeyPair,
    Operation,
    Share,
    Signal,
    connect_shared,
    may_lead_to,
    os_error_from_status,
    post_bytes_send,
    without_own,
)
from .control_sockets import ControlSocket
from .control_stream import (
    Address,
    ControlStream,
    leads_to_this_machine,
    local_address,
    remote_address,
)
from .exchange import Aborted, Again, Event, Exchange, ProtectedMode, Refused
from .peer_description import PeerDescription, SharedMemory, falls_back, why_not_shared_memory
from .registry import WorkerConnections
from .socket_owner import owner_of_peer

#: Why a client does not count as one of this user.
ANOTHER_MACHINE = "it comes from another machine"
ANOTHER_USER = "it belongs to another user"
UNKNOWN_USER = "the kernel does not say whose it is"


@attrs.frozen
class ExchangeOptions:
    """What a user can choose about the exchange on the control socket.

    Attributes:
        server_hostname: the name that the server's certificate must have.
        keepalive_interval: see :func:`control_stream.set_keepalive`.
        isolate: whether the connection has a worker of its own.
        allow_anyone: for a listener: switches protected mode off.
        admit: for a listener: decides which clients are let in.
    """

    shared_memory: SharedMemory
    keepalive_interval: float
    authkey: bytes | None = attrs.field(repr=False)
    ssl_context: ssl.SSLContext | None
    server_hostname: str | None = None
    isolate: bool = False
    allow_anyone: bool = False
    admit: Admit | None = None

    @property
    def keeps_strangers_out(self) -> bool:
        """True if a listener with these options asks its clients for credentials."""
        context = self.ssl_context
        return self.authkey is not None or (context is not None and context.verify_mode == ssl.CERT_REQUIRED)

    async def refusal_of(self, client: ControlStream, *, is_local: bool) -> ProtectedMode | None:
        """Returns the error by which a listener in protected mode refuses this client; None if it may go on.

        Clients of this user and of root may go on: root can do everything that a client can do.

        Args:
            is_local: whether the client is on this machine.
        """
        if self.allow_anyone or self.keeps_strangers_out or client.socket.family == socket.AF_UNIX:
            return None
        if not is_local:
            return ProtectedMode(ANOTHER_MACHINE)
        uid = await owner_of_peer(client.socket)
        if uid is None:
            return ProtectedMode(UNKNOWN_USER)
        return None if uid in (0, os.geteuid()) else ProtectedMode(ANOTHER_USER, f" (uid {uid})")


logger = logging.getLogger("trio_ucx")

#: Why connections on one machine did without shared memory: each reason is logged once.
_fallbacks: set[str | None] = set()


class NeedsAnotherWorker(Picklable, OSError):
    """The two workers have no endpoint that both can use: the client connects from another worker."""

    def __init__(self, label: str) -> None:
        super().__init__(
            errno.EAGAIN, f"this worker and {label} have no endpoint that both can use; connect from a new worker"
        )


class Handshake:
    """One side of a handshake: a ``ucp._engine.tag_dispatch.TagSink`` until there is a :class:`Link`.

    The two sides differ in their answers to the peer's frames: see ``client`` and ``server``.

    Args:
        label: what to call the peer in error messages.
    """

    def __init__(self, registry: WorkerConnections, options: Options, label: str) -> None:
        self.options = options
        self.label = label
        #: Of the worker that the connection gets.
        self.registry = registry
        #: The id of the connection, from our peer description on: a stranger needs none.
        self.id = 0
        #: Finishes with the Link when the connection is open, or with the error that made it impossible.
        self.opened = Signal()
        self.control: ControlSocket | None = None
        #: Closes the connection's own worker (``isolate=True``).
        self._close_own_worker: Callable[[], None] | None = None
        #: The connection, once there is an endpoint for it, and the generation of that endpoint.
        self._link: Link | None = None
        self._generation = 0
        self._own: PeerDescription | None = None
        self._peer: PeerDescription | None = None
        #: The peer's worker, with the transports that the connection uses.
        self._peer_address: WorkerAddress
        #: Whether the worker connects with itself. UCX connects each such endpoint with itself.
        self._with_itself = False
        #: Whether our shared endpoint is held for the client, which was told our endpoint summary and has not joined.
        self._holds = False
        #: Whether HELLO has to arrive over UCX before the connection is open, and whether it has.
        self._greet = True
        self._hello_received = False
        self._receiving = trio.CancelScope()
        self._shared_memory = False
        self._why_not: str | None = None
        #: The addresses of the control socket.
        self.local: Address = None
        self.remote: Address = None
        #: Whether the peer's control socket is on this machine.
        self.is_local = True
        #: The peer's keys in our key gate, until our endpoint gets them.
        self._admission: Admission | None = None

    # ---- the exchange ----

    async def next_event(self, stream: ControlStream, exchange: Exchange) -> Event:
        """Sends what the exchange has to send, and waits for its next event.

        Raises:
            ProtocolError: the peer must be refused.
            OSError: the peer left, or the handshake has failed.
        """
        while True:
            self.check()
            event = exchange.next_event()
            if event is not None:
                return event
            with suppress(ConnectionError):  # the peer may have sent a REFUSE before it left
                await stream.send_all(exchange.data_to_send())
            with trio.CancelScope() as self._receiving:
                data = await stream.receive_some()
                if not data:
                    raise ConnectionResetError(errno.ECONNRESET, "it ended the connection during the exchange")
                exchange.receive_data(data)

    def hand_over(self, stream: ControlStream, exchange: Exchange, generation: int, *, greet: bool) -> None:
        """Hands the control socket over to the worker's control sockets, and gets the endpoint.

        What the exchange has to send is sent first, so that both sides make an endpoint, or none does.

        Raises:
            OSError, UCXError: the connection is impossible.
        """
        self.check()
        self.control = control = ControlSocket(
            self.registry.control, stream.detach(), stream.tls, exchange, self._event_arrived, self.peer_lost
        )
        control.flush()
        self._join(generation, greet)
        control.start()

    def set_addresses(self, stream: ControlStream) -> None:
        """Records the addresses of the control socket."""
        self.local, self.remote = local_address(stream.socket), remote_address(stream.socket)
        self.is_local = leads_to_this_machine(stream.socket)

    @property
    def ends(self) -> Ends | None:
        """The IP addresses of the control socket, ours first, if the peer is on another machine."""
        return None if self.is_local or self.local is None or self.remote is None else (self.local[0], self.remote[0])

    def isolate(self) -> None:
        """Moves to a worker of its own, before this side sends its peer description."""
        self.registry.engine.check()
        owner = self.registry.worker
        worker = owner._open_isolated(self.ends)
        self._close_own_worker = lambda: owner._close_isolated(worker)
        self.registry = WorkerConnections.of(worker, self.registry)

    def describe(self, shared_memory: SharedMemory) -> PeerDescription:
        """Returns the peer description that this side sends. From now on, messages for the connection come here."""
        sinks = self.registry.engine.tag_dispatch.sinks
        self.id = wire.new_connection_id()
        while self.id in sinks:
            self.id = wire.new_connection_id()
        self._receive_here()
        self._own = self.registry.description(self.id, self.options, shared_memory, self.is_local, self.ends)
        return self._own

    def _receive_here(self) -> None:
        """Takes the peer's messages, until there is a Link."""
        engine = self.registry.engine
        engine.tag_dispatch.sinks[self.id] = self
        engine.teardown.children[self.id] = self.close

    def description_arrived(self, peer: PeerDescription) -> None:
        """Chooses the transports.

        Raises:
            ProtocolError: the two descriptions make a connection impossible.
            OSError: there is no memory in which the peer's HELLO could be received.
        """
        engine = self.registry.engine
        engine.check()
        engine.tag_dispatch.reserve_memory()
        assert self._own is not None
        self._peer = peer
        self._why_not = why_not_shared_memory(self._own, peer)
        self._shared_memory = self._why_not is None
        if falls_back(self._own, peer, self._why_not) and self._why_not not in _fallbacks:
            _fallbacks.add(self._why_not)
            logger.warning(
                "the connection with %s, on this machine, does without shared memory: %s", self.label, self._why_not
            )
        reachable = without_own(peer.worker, engine.identity.address)
        self._peer_address = reachable if self._shared_memory else reachable._without_shared_memory()
        self._with_itself = peer.worker.uid == engine.identity.address.uid

    def let_in(self, keys: KeyPair) -> None:
        """Lets the peer connect to our data ports, and our UCX to the peer's.

        UCX may connect as soon as the peer has its endpoint, which can be before its TAKE has been read here.

        Raises:
            OSError: there is no memory for that (ENOMEM).
        """
        self._admission = self.registry.engine.key_gate.let_in(keys, self.peer.worker)

    def peer_has_keys(self) -> None:
        """The peer has let us in, too."""
        if self._admission is not None:
            self._admission.peer_has_it()

    def _end_admission(self) -> None:
        admission, self._admission = self._admission, None
        if admission is not None:
            admission.end()

    @property
    def peer(self) -> PeerDescription:
        assert self._peer is not None
        return self._peer

    @property
    def _endpoints_to_worker(self) -> EndpointsToWorker:
        return self.registry.engine.endpoints_by_worker.of(self.peer.worker.uid)

    def endpoint_summary(self) -> EndpointSummary:
        """For the server: returns the endpoint summary for WELCOME, and holds the shared endpoint for the client.

        Until the client has joined or gone, our shared endpoint is neither replaced nor closed for being idle. If it
        is proven, the client may send over it at once, so the Link is made here.
        """
        if self._with_itself:
            return EndpointSummary()
        self._holds = True
        self._endpoints_to_worker.hold_for_client(self._peer_address)
        summary = self._endpoints_to_worker.summary(self._peer_address)
        if summary.proven:
            self._make_link(summary.shared)
        return summary

    def _release_hold(self) -> None:
        if self._holds:
            self._holds = False
            self._endpoints_to_worker.release_hold(self._peer_address)

    def choose(self, theirs: EndpointSummary) -> tuple[int, bool]:
        """For the client: the generation of the endpoint that both sides use, and whether they send HELLO.

        Raises:
            OSError: there is no route to the server.
            NeedsAnotherWorker: there is no such generation.
        """
        self.check_route()
        if self._lacks_queue:
            raise NeedsAnotherWorker(self.label)
        if self._with_itself:
            return 0, True
        endpoints = self._endpoints_to_worker
        generation = endpoints.choose(theirs, self._peer_address)
        if generation is None:
            raise NeedsAnotherWorker(self.label)
        ours = endpoints.summary(self._peer_address)
        return generation, not (ours.proven and theirs.proven and ours.shared == theirs.shared == generation)

    def _join(self, generation: int, greet: bool) -> None:
        """Makes the Link, and sends HELLO if that is awaited. The connection may be open when this returns.

        Raises:
            NeedsAnotherWorker: we cannot get the endpoint.
            OSError, UCXError: UCX cannot reach the peer.
        """
        self._release_hold()
        if self._lacks_queue:
            raise NeedsAnotherWorker(self.label)
        if not greet:
            self._end_admission()  # UCX has connected the two ends already
        if self._link is None or generation != self._generation:
            self._make_link(generation)
        assert self._link is not None
        share = self._link.share
        if greet and share.gone:
            raise NeedsAnotherWorker(self.label)
        if self._admission is not None:
            share.endpoint.keep(self._admission)
            self._admission = None
        self._greet = greet
        if greet:
            try:
                post_bytes_send(share, wire.encode_frame(wire.Hello()), (self.peer.connection_id << 32) | wire.CONTROL)
            except Exception as error:
                cause = error.__cause__ or error
                status = Status.NO_MEMORY if isinstance(error, MemoryError) else getattr(cause, "status", None)
                self.fail(error if status is None else self._not_connected(status))
                self.check()
        self._open_if_ready()
        self.registry.engine.submit()

    def _make_link(self, generation: int) -> None:
        """Gets the endpoint of this generation, and makes the Link, which from now on takes the peer's messages.

        A Link that was made before is given up.

        Raises: what :meth:`_join` does.
        """
        engine, peer = self.registry.engine, self.peer
        engine.check()
        try:
            core = connect_shared(engine, self._peer_address, None if self._with_itself else generation, self.label)
        except OSError as error:  # its message has only the worker address
            raise self._unreachable(error.errno or errno.EHOSTUNREACH) from error
        if core is None:
            raise NeedsAnotherWorker(self.label)
        self._give_up_link()
        share = Share(core, self.label)
        try:
            port = MessagePort(share, peer.connection_id)
            self._link = link = Link(
                self.registry.worker,
                port,
                self.id,
                peer.connection_id,
                peer.window,
                peer.threshold,
                self.options,
            )
        except BaseException:
            share.close(left_clean=core.proven)
            raise
        self._generation = generation
        link.local_address, link.remote_address = self.local, self.remote
        link.why_not_shared_memory = self._why_not
        link.on_hello = self._hello_arrived
        share.on_end = self._endpoint_ended
        engine.teardown.children[self.id] = self.close

    def check_route(self) -> None:
        """Refuses a peer to which no device of our worker leads: UCX would say that the connection was reset, or crash.

        Raises:
            OSError: with the addresses.
        """
        if self._shared_memory or self.is_local or not self.registry.engine.identity.has_only_tcp:
            return
        own = self.registry.engine.identity.address
        hosts = [host for host in self.peer.worker._tcp_hosts if not is_loopback(host)]
        if not any(may_lead_to(own, host) for host in hosts):
            raise self._unreachable(errno.EHOSTUNREACH)

    def _unreachable(self, number: int) -> OSError:
        return OSError(number, f"UCX cannot connect to {self.label}: {os.strerror(number)} ({self.route})")

    def _not_connected(self, status: int) -> OSError:
        """The exception for an endpoint that has failed with this UCX status."""
        hint = f" ({self.route})" if status == Status.NO_MEMORY else f": {self.obstacle}"
        return os_error_from_status(status, f"connecting to {self.label} over UCX", hint)

    def under_way(self) -> list[Operation]:
        """The operations in flight at our endpoint, for the message of a timeout."""
        return [] if self._link is None else self._link.share.operations.in_order()

    # ---- messages from the peer, until there is a Link ----

    def message_arrived(self, queue: int, handle: int, length: int) -> None:
        self.registry.engine.tag_dispatch.discard(handle)
        self._refuse_message(length)

    def link_broke(self, status: int) -> None:
        raise AssertionError("there is no link yet")

    def packed_arrived(self, queue: int, count: int, length: int, data: Any) -> None:
        if queue == wire.CONTROL and ffi.buffer(data, length)[:] == wire.encode_frame(wire.Hello()):
            self._hello_arrived()
        else:
            self._refuse_message(length)

    def _refuse_message(self, length: int) -> None:
        self.fail(ConnectionError(f"{self.label} sent a message of {length} bytes before its HELLO"))

    def _hello_arrived(self) -> None:
        self._hello_received = True
        self._open_if_ready()

    def _open_if_ready(self) -> None:
        """Opens the connection if its Link and control socket are there, and HELLO has arrived or is not awaited."""
        link, control = self._link, self.control
        if (
            (self._greet and not self._hello_received)
            or link is None
            or control is None
            or control.closed
            or (link.share.gone and not link.life.graceful)
            or self.opened.outcome is not None
        ):
            return
        link.share.endpoint.mark_proven()
        if link.share.endpoint.splits_batches:
            link.sending.send_each()
        control.exchange.mark_opened()
        link.peer_info = control.identify(self.peer, self.remote)
        self.registry.totals.add(link)
        closing = link.closing
        closing.control_socket = control
        closing.on_closed = self._close_own_worker
        link.on_hello = None
        link.share.on_end = closing.ended
        link.engine.teardown.children[self.id] = link.unclosed
        control.on_event = lambda event: _end(link, event)
        control.on_lost = closing.control_lost
        self.opened.finish(Value(link))

    # ---- failures ----

    def _event_arrived(self, event: Event) -> None:
        """Handles an event on the control socket after TAKE."""
        match event:
            case Refused():
                self.fail(self.refusal(event))
            case Again():
                self.fail(NeedsAnotherWorker(self.label))
            case _:
                self.fail(ConnectionResetError(errno.ECONNRESET, f"{self.label} gave up the connection: see its log"))

    def refusal(self, refused: Refused) -> OSError:
        """The exception for a connection that the peer has refused."""
        return refusal(refused.why, f"{self.label} refused the connection: {refused.reason}", self.label)

    def peer_lost(self, loss: Loss) -> None:
        error = ConnectionResetError(errno.ECONNRESET, f"lost {self.label} while connecting: {loss.reason}")
        error.__cause__ = loss.cause
        self.fail(error)

    def internal_error(self, error: BaseException) -> None:
        """An exception in our own code: ends this handshake only. Never raises."""
        report(f"an internal error of trio_ucx, while connecting with {self.label}", error)
        failure = ConnectionError(errno.EIO, f"connecting with {self.label}: an internal error of trio_ucx: {error!r}")
        failure.__cause__ = error
        contained(self.fail, failure, "an internal error (its log says which)")

    @property
    def _lacks_queue(self) -> bool:
        """True if the connection needs the worker's shared-memory queue, which has stopped (``_quirks.stopped_queue``).

        It can stop at any moment of the handshake. Then the connection needs another worker.
        """
        return self._shared_memory and self.registry.engine.receive_queue.stopped

    def _endpoint_ended(self) -> None:
        """The endpoint was closed, or the share has failed, before the connection was open."""
        link = self._link
        assert link is not None
        error = link.share.error
        if link.life.graceful:  # the client has sent, and closed, and we have not read its TAKE yet
            link.closing.ended()
        elif error is None:
            self.fail(ConnectionError("this worker was closed"))
        elif self.control is None and link.share.endpoint.gone:  # TAKE will name another endpoint
            self._give_up_link()
            self._receive_here()
        elif self._lacks_queue:
            if self.control is not None and not self.control.exchange.is_client:
                self.control.exchange.again()
                self.control.flush()
            self.fail(NeedsAnotherWorker(self.label))
        elif link.share.endpoint.gone:
            self.fail(self._not_connected(error.status))
        else:  # the peer does not keep to the protocol, or there was an internal error
            failure = ConnectionError(errno.EIO, f"connecting with {self.label}: {error}")
            failure.__cause__ = error.__cause__
            self.fail(failure)

    def _give_up_link(self) -> None:
        link, self._link = self._link, None
        if link is not None:
            link.closing.give_up()

    @property
    def obstacle(self) -> str:
        """Returns what keeps messages from the peer, as far as that is known, for error messages."""
        return f"messages did not get through over UCX ({self.route}); does a firewall or NAT block them?"

    @property
    def route(self) -> str:
        """Returns how UCX connects to the peer, for error messages."""
        if self._peer is None:
            return "its addresses are not known yet"
        if self._shared_memory:
            return "over shared memory, or " + self._tcp
        return self._tcp

    @property
    def _tcp(self) -> str:
        assert self._own is not None
        sides = (self.peer, self.remote), (self._own, self.local)
        theirs, ours = (self._places(*side) for side in sides)
        advice = "UCX_NET_DEVICES=eth0, for example, says which network devices a side uses"
        if not self.is_local and any(_has_only_link_local(*side) for side in sides):
            advice = "UCX uses no link-local addresses: give the network device there another address"
        return f"its UCX listens at {theirs}, ours at {ours}; {advice}"

    def _places(self, side: PeerDescription, end: Address) -> str:
        """Returns where a side's UCX listens, and says if that is not the address of its end of the control socket."""
        places = ", ".join(map(format_address, side.worker.tcp_addresses)) or "no TCP address"
        ip = "" if self.is_local or end is None else end[0].partition("%")[0]
        if not ip or not any(family_of(ip) == family_of(host) for host in {*side.worker._tcp_hosts} - {ip}):
            return places
        return (
            f"{places} (and not at {ip}, where its control socket is: NAT, or a device that UCX does not use, such as "
            "a bridge without UCX_TCP_BRIDGE_ENABLE=y?)"
        )

    def check(self) -> None:
        """Raises the error that has made a connection impossible, if there is one.

        The peer may have sent a message before its greeting, for instance.
        """
        if self.opened.outcome is not None:
            self.opened.result()

    def fail(self, error: Exception, reason: str = "") -> None:
        """Ends the handshake with an error. Failed or opened already: no effect.

        Args:
            reason: for the client, if it is not the text of the error. (A client sends none: for the server the
                connection may be open.)
        """
        if self.opened.outcome is None:
            failure = error if isinstance(error, OSError) else ConnectionError(str(error))
            self.opened.finish(Error(failure))
            self._receiving.cancel()
            serves = self.control is not None and not self.control.exchange.is_client
            self._release(Refused(reason or failure.strerror or str(failure)) if serves else None)

    def close(self, refused: Refused | None = None) -> None:
        """Gives up the handshake, or aborts the link: the task that waited for it has gone.

        Args:
            refused: what to tell the peer.
        """
        if isinstance(self.opened.outcome, Value):
            self.opened.outcome.value.abort()
        elif self.opened.outcome is None:
            self.opened.finish(Error(ConnectionError("given up")))
            self._release(refused)

    def _release(self, refused: Refused | None) -> None:
        engine = self.registry.engine
        if self.control is not None:
            contained(self.control.refuse, refused) if refused is not None else contained(self.control.abort)
        contained(self._give_up_link)
        if self.id:
            engine.tag_dispatch.remove(self.id)
            engine.teardown.children.pop(self.id, None)
        contained(self._end_admission)
        if self._peer is not None:
            contained(self._release_hold)
            contained(engine.endpoints_by_worker.forget_unused, self._peer.worker.uid)
            if self._shared_memory:
                contained(engine.receive_queue.may_be_writing, self._peer.worker.process)
        if self._close_own_worker is not None:
            contained(self._close_own_worker)


def _has_only_link_local(side: PeerDescription, end: Address) -> bool:
    """True if a side's end of the control socket has a link-local address, and its UCX has no address for others."""
    ip = "" if end is None else end[0].removeprefix("::ffff:")
    return bool(ip) and ip_address(ip).is_link_local and all(map(is_loopback, side.worker._tcp_hosts))


def _end(link: Link, event: Event) -> None:
    """The peer ends a connection that is open for this side: handles an event on the control socket."""
    match event:
        case Aborted(sent=sent):
            link.closing.peer_aborted(sent)
        case Refused(reason=reason) | Again(reason=reason):
            link.closing.peer_aborted(refusal=reason)
