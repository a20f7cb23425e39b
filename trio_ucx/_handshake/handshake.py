"""One side of a handshake: from the exchange on the control socket to an open connection.

When the exchange has agreed on the number of the endpoints, each side gets its endpoint and sends HELLO, a control
frame, over UCX. The side whose worker has the greater uid adopts its endpoint, when the peer's HELLO has arrived: see
``ucp/_engine/numbering.py``. A side opens the connection when its endpoint exists and the peer's HELLO has arrived. It
does so inside the delivery of that HELLO, or in ``greet`` if HELLO came first. So nothing that follows HELLO arrives
before its connection exists.
"""

from __future__ import annotations

import errno
import os
import ssl
from collections.abc import Callable
from contextlib import suppress

import attrs
import trio
from outcome import Error, Value

from .. import _wire as wire
from .._link import Link, Options, Transport
from .._wire import ProtocolError
from ..ucp import Feature, UCXError, WorkerAddress
from ..ucp._address import format_address
from ..ucp._connecting import connect_paired
from ..ucp._contained import contained, report
from ..ucp._engine.engine import InFlight
from ..ucp._engine.numbering import NotRequested, Numbers, PeerNumbers, UsedUp
from ..ucp._engine.operations import EndpointCore
from ..ucp._engine.pending import Signal
from ..ucp._status import os_error_from_status
from ..ucp._tag import post_bytes_send
from ..ucp._util import ignoring_late_run
from .control_sockets import ControlSocket
from .control_stream import (
    Address,
    ControlStream,
    has_route,
    ip_of,
    leads_to_this_machine,
    local_address,
    remote_address,
)
from .exchange import MAX_DECLINED, Aborted, Event, Exchange, Refused
from .facts import Facts, Reach, SharedMemory, use_shared_memory
from .registry import Registry

#: Seconds after which the endpoint of a connect over TCP that was given up is closed.
_GIVEN_UP = 1.0


@attrs.frozen
class ExchangeOptions:
    """What a user can choose about the exchange on the control socket.

    Attributes:
        server_hostname: the name that the server's certificate must have.
        keepalive_interval: see :func:`control_stream.set_keepalive`.
        allow_anyone: for a listener: switches protected mode off.
    """

    shared_memory: SharedMemory
    keepalive_interval: float
    authkey: bytes | None = attrs.field(repr=False)
    ssl_context: ssl.SSLContext | None
    server_hostname: str | None = None
    allow_anyone: bool = False

    @property
    def keeps_strangers_out(self) -> bool:
        """Whether a listener with these options asks its clients for credentials."""
        context = self.ssl_context
        return self.authkey is not None or (context is not None and context.verify_mode == ssl.CERT_REQUIRED)

    def lets_in(self, client: ControlStream) -> bool:
        """For a listener, after the TLS handshake: whether protected mode lets this client go on."""
        return self.allow_anyone or self.keeps_strangers_out or leads_to_this_machine(client.socket)


@attrs.frozen
class Greeted:
    """The awaited HELLO has arrived, so we can adopt our endpoint: see :meth:`Handshake.expect_greeting`."""

    number: int


def _greeting(frame: bytes) -> int | None:
    """The number of a HELLO; None if it is something else."""
    try:
        hello = wire.decode_frame(frame)
    except ProtocolError:
        return None
    return hello.number if isinstance(hello, wire.Hello) else None


class Handshake:
    """One side of a handshake: a ``ucp._engine.tag_dispatch.TagSink`` until the :class:`Link` takes its place.

    The two sides differ in their answers to the peer's frames: see ``client`` and ``server``.

    Args:
        label: what to call the peer in error messages.
    """

    def __init__(self, registry: Registry, options: Options, label: str) -> None:
        self.options = options
        self.label = label
        #: Of the worker that the connection gets.
        self.registry = registry
        #: The id of the connection, from our facts on: a stranger needs none.
        self.id = 0
        #: Finishes with the Link when the connection is open, or with the error that made it impossible.
        self.opened = Signal()
        self.control: ControlSocket | None = None
        #: Closes the connection's own worker (``isolate=True``).
        self._close_own_worker: Callable[[], None] | None = None
        self._core: EndpointCore | None = None
        self._own_facts: Facts | None = None
        self._peer: Reach | None = None
        #: The numbers in the HELLOs that have arrived.
        self._greetings: set[int] = set()
        #: Our endpoint is adopted when the HELLO with this number has arrived.
        self._awaited: int | None = None
        self._receiving = trio.CancelScope()
        self._shared_memory = False
        #: The number of our endpoint, once that has been made.
        self.number: int | None = None
        #: The numbers of our endpoints without error handling, as last sent to the peer.
        self._sent_plain: tuple[int, ...] = ()
        #: The number that this side has chosen, until its endpoint has been made.
        self.chosen: int | None = None
        #: The addresses of the control socket.
        self.local: Address = None
        self.remote: Address = None
        #: The address that the peer's control socket comes from, if it is another machine's.
        self._other_host: str | None = None

    # ---- the exchange ----

    async def run_exchange(
        self, stream: ControlStream, exchange: Exchange, answer: Callable[[Event | Greeted], object]
    ) -> None:
        """Runs the exchange on the control socket until we have our endpoint.

        What the last answer has to send is left to :meth:`hand_over`.

        Args:
            answer: called with each event; it answers the peer through ``exchange``.

        Raises:
            ProtocolError: the peer must be refused.
            OSError, UCXError: the peer refused or left; UCX cannot reach it.
        """
        while self.number is None:
            event = await self.next_event(stream, exchange)
            answer(event)
            if isinstance(event, Greeted) and self.number is None:
                await trio.lowlevel.checkpoint()  # making thousands of placeholder endpoints takes long

    async def next_event(self, stream: ControlStream, exchange: Exchange) -> Event | Greeted:
        """Sends what the exchange has to send, and waits for its next event.

        Raises:
            ProtocolError: the peer must be refused.
            OSError: the peer left, or the handshake has failed.
        """
        while True:
            self.check()
            event = exchange.next_event() or self._awaited_greeting()
            if event is not None:
                return event
            with suppress(ConnectionError):  # the peer may have sent a REFUSE before it left
                await stream.send_all(exchange.data_to_send())
            data = await self._receive(stream)
            if data == b"":
                raise ConnectionResetError(errno.ECONNRESET, "it ended the connection during the exchange")
            exchange.receive_data(data or b"")

    async def _receive(self, stream: ControlStream) -> bytes | None:
        """Waits for bytes on the control socket; None if the awaited HELLO or a failure came first."""
        with trio.CancelScope() as self._receiving:
            if self.opened.outcome is None and self._awaited not in self._greetings:
                return await stream.receive_some()
        return None

    def expect_greeting(self, number: int) -> None:
        """Makes :meth:`run_exchange` wait for the peer's HELLO with this number, and answer it as a :class:`Greeted`.

        Raises:
            ProtocolError: the number needs more fillers than an honest peer can need, or one is awaited already.
            OSError: there is no route to the peer. UCX reports that only to the side that makes an endpoint.
        """
        hosts = () if self._shared_memory else self.peer.hosts
        if hosts and not any(map(has_route, hosts)):
            raise self._unreachable(errno.EHOSTUNREACH)
        if self._awaited is not None:
            raise ProtocolError("it sent TAKE again before it sent HELLO for the number that it had taken")
        if not self.numbers.is_near(number):
            raise ProtocolError(
                f"the other side's worker has made {number} endpoints to this worker, and this worker far fewer: "
                "connect from another worker"
            )
        self._awaited = number

    def _awaited_greeting(self) -> Greeted | None:
        if self._awaited is None or self._awaited not in self._greetings:
            return None
        number, self._awaited = self._awaited, None
        return Greeted(number)

    def hand_over(self, stream: ControlStream, exchange: Exchange, on_event: Callable[[Event], None]) -> None:
        """Hands the control socket over to the worker's control sockets, and greets the peer over UCX.

        Args:
            on_event: called with each further event of the exchange, until the connection is open.

        Raises:
            OSError: the connection has become impossible meanwhile.
        """
        self.check()
        self.control = control = ControlSocket(
            self.registry.control, stream.detach(), stream.tls, exchange, on_event, self.peer_lost
        )
        control.flush()
        self.greet()
        control.start()

    def set_addresses(self, stream: ControlStream) -> None:
        """Records the addresses of the control socket."""
        self.local, self.remote = local_address(stream.socket), remote_address(stream.socket)
        self._other_host = None if leads_to_this_machine(stream.socket) else ip_of(self.remote)

    def move_to_worker_with_numbers(self, facts: Facts) -> None:
        """Moves to a worker that still has endpoint numbers for this peer. For the server, before it sends its facts.

        Raises:
            ProtocolError: the peer's facts are invalid.
        """
        self.registry = self.registry.for_peer(Reach.of(facts).uid)

    def isolate(self) -> None:
        """Moves to a worker of its own. For the server, before it sends its facts."""
        owner = self.registry.worker
        worker = owner._open_isolated()
        self._close_own_worker = lambda: owner._close_isolated(worker)
        self.registry = Registry.of(worker)

    def move_to_running_worker(self) -> None:
        """Moves to a worker whose shared-memory queue has not stopped. For the client, before it sends its facts."""
        self.registry = self.registry.current

    def make_facts(self, shared_memory: SharedMemory) -> Facts:
        """Returns the facts that this side sends. From now on, messages for the connection come here."""
        sinks = self.registry.engine.tag_dispatch.sinks
        self.id = wire.new_connection_id()
        while self.id in sinks:
            self.id = wire.new_connection_id()
        sinks[self.id] = self
        self._own_facts = self.registry.facts(self.id, self.options, shared_memory, self._other_host is None)
        return self._own_facts

    def peer_facts_arrived(self, facts: Facts) -> None:
        """Checks the peer's facts, chooses the transports, and lets the peer connect to our data ports.

        Raises:
            ProtocolError: the facts are invalid, or make a connection impossible.
            OSError: there is no memory in which the peer's HELLO could be received.
        """
        self.registry.engine.check()
        self.registry.engine.tag_dispatch.reserve_memory()
        assert self._own_facts is not None
        self._peer = Reach.of(facts)
        self._shared_memory = use_shared_memory(Reach.of(self._own_facts), self._peer)
        hosts = [host for host, _ in self._peer.tcp_addresses]
        self.registry.engine.data_ports.admit_peer(hosts, self._other_host)

    @property
    def peer(self) -> Reach:
        assert self._peer is not None
        return self._peer

    @property
    def numbers(self) -> PeerNumbers[EndpointCore]:
        return self.registry.engine.numbering.of(self.peer.uid)

    def numbers_to_send(self) -> Numbers:
        """Our numbers, to be sent to the peer."""
        numbers = self.numbers.numbers()
        self._sent_plain = numbers.plain
        return numbers

    @property
    def peer_can_adopt(self) -> bool:
        """Whether the peer, if it adopts, knows which of our endpoints are without error handling.

        If the peer takes one for an endpoint that handles errors, it cannot close it.
        """
        return self.chooses_number is not False or self.numbers.numbers().plain == self._sent_plain

    @property
    def chooses_number(self) -> bool | None:
        """Whether this side chooses the endpoints' number; None if the number does not matter."""
        own = self.registry.engine.address.uid
        return None if own == self.peer.uid else own > self.peer.uid

    @property
    def adopts(self) -> bool:
        """Whether this side adopts its endpoint, and so gets it after the peer."""
        return self.chooses_number is True

    @property
    def _peer_address(self) -> bytes:
        """The worker address of the peer that our endpoint is made from."""
        facts = self.peer.facts
        return facts.address if self._shared_memory else facts.network_address

    def choose_number(self, peer_numbers: Numbers | None) -> int:
        """Chooses the number of the endpoints; another one after the first was declined.

        Raises:
            ProtocolError: none is left.
            OSError: the handshake has failed meanwhile.
        """
        self._return_number()
        self._awaited = None
        self.check()  # that may have closed an endpoint, and a message from the peer have arrived meanwhile
        try:
            self.chosen = 0 if self.chooses_number is None else self.numbers.choose(peer_numbers, self._peer_address)
        except UsedUp:
            raise ProtocolError(
                "UCX has used up its numbers for endpoints between these two workers: connect from another worker"
            ) from None
        return self.chosen

    def _return_number(self) -> None:
        chosen, self.chosen = self.chosen, None
        if chosen is not None and self.chooses_number is not None:
            self.numbers.release(chosen)

    def make_endpoint(self, number: int) -> bool:
        """Makes or adopts our endpoint, and returns whether it could get this number.

        Raises:
            ProtocolError: there is nothing to adopt.
            OSError, UCXError: UCX cannot reach the peer; or the handshake failed meanwhile, because making an endpoint
                progresses the worker.
        """
        facts = self.peer.facts
        address = WorkerAddress.from_ucx(
            self._peer_address,
            process=facts.host.process,
            shared_memory=facts.error_handling,
            features=Feature(facts.features),
        )
        try:
            core = connect_paired(self.registry.engine, address, self.peer.uid, number, self.label)
        except NotRequested as error:
            raise ProtocolError(
                f"UCX at {self.label} did not request this endpoint: set its option RESOLVE_REMOTE_EP_ID (in the "
                "environment, UCX_RESOLVE_REMOTE_EP_ID) to y"
            ) from error
        except OSError as error:  # its message has only the worker address
            raise self._unreachable(error.errno or errno.EHOSTUNREACH) from error
        if core is None:
            self.check()
            return False
        self._core = core
        self.number = number
        self._return_number()
        core.on_failure = self._endpoint_failed
        if self.opened.outcome is not None:
            self.drop_endpoint()
        self.check()
        return True

    def _unreachable(self, number: int) -> OSError:
        return OSError(number, f"UCX cannot connect to {self.label}: {os.strerror(number)} ({self.route})")

    def adopt_endpoint(self, number: int) -> bool:
        """Adopts our endpoint. If many fillers are missing, it adopts some of them, and :class:`Greeted` comes again.

        Returns:
            False if another number must be chosen.

        Raises: what :meth:`make_endpoint` does.
        """
        if self.make_endpoint(number):
            return True
        if not self.numbers.is_ahead(number):
            return False
        self._awaited = number
        return True

    def greet(self) -> None:
        """Sends HELLO over UCX. The link may exist when this returns."""
        core = self._core
        assert core is not None and self.number is not None
        try:
            core.check()
            post_bytes_send(
                core, wire.encode_frame(wire.Hello(self.number)), (self.peer.facts.connection_id << 32) | wire.CONTROL
            )
        except Exception as error:
            self.fail(error)
            return
        self._open_if_greeted()  # before the progress, in which the peer may answer with messages
        core.engine.progress()

    def under_way(self) -> list[InFlight]:
        """The operations in flight at our endpoint, for the message of a timeout."""
        return [] if self._core is None else self._core.under_way()

    def keep_as_filler(self) -> None:
        """Keeps our endpoint, though the peer declined its number: a raw endpoint of the peer may be paired with it."""
        core, self._core = self._core, None
        number, self.number = self.number, None
        if core is not None and number is not None:
            core.on_failure = None
            self.numbers.keep_as_filler(number, core)

    def replace_endpoint(self, use_number: Callable[[], None]) -> None:
        """Replaces our endpoint, whose number the peer could not use, and sends HELLO again if there is a new one.

        Args:
            use_number: makes the endpoint, and answers the peer through the exchange.
        """
        self.keep_as_filler()
        try:
            use_number()
        except (OSError, UCXError, ProtocolError) as error:
            self.fail(error)
            return
        self.flush()
        if self.number is not None:
            self.greet()

    def flush(self) -> None:
        """Sends what the exchange has to send, after :meth:`hand_over`."""
        assert self.control is not None
        self.control.flush()

    def drop_endpoint(self) -> None:
        """Closes our endpoint by force; over TCP a moment later.

        If it is closed at once, while UCX still connects it, another connection between the same two workers over TCP
        sometimes breaks (UCX 1.22: 6 of 900 cancelled attempts to connect did that).
        """
        core, self._core = self._core, None
        if core is None:
            return
        core.on_failure = None
        if self._shared_memory:
            core.close()
            return

        async def close() -> None:
            await trio.sleep(_GIVEN_UP)
            core.close()

        with ignoring_late_run():  # then the worker, which is about to be closed, closes it
            core.engine.spawn(close, f"trio_ucx close of an endpoint to {self.label}")

    # ---- messages from the peer, until the link takes over ----

    def message_arrived(self, queue: int, handle: int, length: int) -> None:
        self.registry.engine.tag_dispatch.discard(handle)
        self.fail(
            ConnectionError(
                errno.EPROTO, f"{self.label} broke the protocol of trio_ucx: it sent a message before its HELLO"
            )
        )

    def packed_arrived(self, queue: int, count: int, length: int, data: bytes) -> None:
        while True:
            number = _greeting(data[:length]) if count and queue == wire.CONTROL else None
            if number is None or number in self._greetings or len(self._greetings) > MAX_DECLINED:
                self.fail(ConnectionError(errno.EPROTO, f"{self.label} sent something other than its greeting"))
                return
            self._greetings.add(number)
            if number == self._awaited:
                self._receiving.cancel()
            count, data = count - 1, data[length:]
            link = self._open_if_greeted()
            if link is not None:
                if count:
                    link.receiving.packed_arrived(queue, count, length, data)
                return
            if not count:
                return

    def _open_if_greeted(self) -> Link | None:
        """Opens the connection if the peer's HELLO and our endpoint and control socket are there. Returns its link."""
        core, control = self._core, self.control
        if (
            self.number not in self._greetings
            or core is None
            or control is None
            or control.closed
            or self.opened.outcome is not None
        ):
            return None
        control.exchange.greeted()
        facts = self.peer.facts
        link = Link(
            self.registry.worker,
            Transport(core, facts.connection_id),
            self.id,
            facts.connection_id,
            facts.window,
            facts.threshold,
            self.options,
        )
        closing = link.closing
        closing.control_socket = control
        link.local_address, link.remote_address = self.local, self.remote
        closing.on_closed = self._close_own_worker
        if self._close_own_worker is None and self.chooses_number is not None and self.number is not None:
            number, numbers = self.number, self.numbers
            closing.keep_endpoint = lambda core: numbers.keep(number, core)
        control.on_event, control.on_lost = closing.control_said, closing.control_lost
        self.opened.finish(Value(link))
        return link

    # ---- failures ----

    def event_arrived(self, event: Event) -> None:
        """Handles an event on the control socket after our endpoint has been made."""
        match event:
            case Refused(reason=reason):
                self.fail(self.refusal(reason))
            case Aborted():
                self.fail(ConnectionResetError(errno.ECONNRESET, f"{self.label} gave up the connection"))
            case _:
                self.fail(ConnectionError(errno.EPROTO, f"{self.label} declined the number that it had chosen"))

    def refusal(self, reason: str) -> OSError:
        """The exception for a connection that the peer has refused."""
        return ConnectionRefusedError(errno.ECONNREFUSED, f"{self.label} refused the connection: {reason}")

    def peer_lost(self, reason: str, cause: BaseException | None = None) -> None:
        error = ConnectionResetError(errno.ECONNRESET, f"lost {self.label} while connecting: {reason}")
        error.__cause__ = cause
        self.fail(error)

    def internal_error(self, error: BaseException) -> None:
        """An exception in our own code: ends this handshake only. Never raises."""
        report(f"an internal error of trio_ucx, while connecting with {self.label}", error)
        failure = ConnectionError(errno.EIO, f"connecting with {self.label}: an internal error of trio_ucx: {error!r}")
        failure.__cause__ = error
        contained(self.fail, failure)

    def queue_stopped(self, error: UCXError) -> None:
        """The worker's shared-memory queue has stopped: see :mod:`ucp._receive_queue`."""
        if self._own_facts is not None and self._core is None and (self._peer is None or self._shared_memory):
            self.fail(ConnectionError(errno.EIO, f"connecting to {self.label}: {error}"))

    def _endpoint_failed(self) -> None:
        assert self._core is not None and self._core.error is not None
        hint = f" ({self.route})"
        error = os_error_from_status(self._core.error.status, f"connecting to {self.label} over UCX", hint)
        self.fail(error)

    @property
    def route(self) -> str:
        """How UCX connects to the peer, for error messages."""
        if self._peer is None:
            return "its addresses are not known yet"
        if self._shared_memory:
            return "over shared memory, or " + self._tcp
        return self._tcp

    @property
    def _tcp(self) -> str:
        addresses = ", ".join(format_address(address) for address in self.peer.tcp_addresses)
        return f"its UCX listens at {addresses or 'no TCP address'}"

    def check(self) -> None:
        """Raises the error that has made a connection impossible, if there is one.

        The peer may have sent a message before its greeting, for instance.
        """
        if self.opened.outcome is not None:
            self.opened.result()

    def fail(self, error: Exception) -> None:
        """Ends the handshake with an error. Failed or opened already: no effect."""
        if self.opened.outcome is None:
            self.opened.finish(Error(error if isinstance(error, OSError) else ConnectionError(str(error))))
            self._receiving.cancel()
            self._release("")

    def close(self, reason: str = "") -> None:
        """Gives up the handshake, or aborts the link: the task that waited for it has gone.

        Args:
            reason: what to tell the peer.
        """
        if isinstance(self.opened.outcome, Value):
            self.opened.outcome.value.abort()
        elif self.opened.outcome is None:
            self.opened.finish(Error(ConnectionError("given up")))
            self._release(reason)

    def _drop_awaited(self) -> None:
        """Adopts the awaited endpoint in order to close it: UCX would keep it."""
        number, self._awaited = self._awaited, None
        if number is not None:
            with suppress(Exception):  # it closes the endpoint, and raises this handshake's error
                self.make_endpoint(number)

    def _release(self, reason: str) -> None:
        engine = self.registry.engine
        if engine.tag_dispatch.sinks.get(self.id) is self:
            engine.tag_dispatch.remove(self.id)
        engine.call_soon(self._drop_awaited)  # not now: this may be the delivery of a message, while endpoints are made
        contained(self._return_number)
        if self.control is not None:
            contained(self.control.refuse, reason) if reason else contained(self.control.abort)
        contained(self.drop_endpoint)
        if self._peer is not None:
            contained(engine.numbering.forget_unused, self._peer.uid)
            if self._shared_memory:
                contained(engine.may_be_writing, self._peer.facts.host.process)
        if self._close_own_worker is not None:
            contained(self._close_own_worker)
