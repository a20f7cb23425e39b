"""A worker's Connections while they come about: ids, control sockets, endpoints, and the greeting over UCX.

A worker gets its :class:`Registry` when it is first used for Connections. When the exchange on the control socket has
settled the endpoint's number, an :class:`Introduction` makes it and sends HELLO, a control frame, over UCX. The peer
does the same. A connection is open on each side when the other's HELLO has arrived: so messages get through in both
directions. The engine's delivery decides that, so nothing that follows HELLO arrives before its connection exists.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Callable

from outcome import Error, Value

from .. import _wire as wire
from .._link import Link, Options, Transport
from .._native import ucx
from .._version import __version__
from .._wire import ProtocolError
from ..ucp import Feature, Status, UCXError, Worker, WorkerAddress
from ..ucp._address import format_address
from ..ucp._address_format import parse_worker_address
from ..ucp._connecting import connect_paired
from ..ucp._contained import contained, report
from ..ucp._engine.engine import Engine, InFlight
from ..ucp._engine.numbering import Numbers, PeerNumbers, UsedUp
from ..ucp._engine.operations import EndpointCore
from ..ucp._engine.pending import Signal
from ..ucp._process import this_host
from ..ucp._status import os_error_from_status
from ..ucp._tag import post_bytes_send
from .control import ControlSocket, ControlSockets
from .exchange import MAX_DECLINED, Aborted, Assigned, Declined, Event, Refused
from .facts import Facts, Reach, SharedMemory, use_shared_memory

#: Host and port; ``("unix:/path", 0)`` for a Unix socket, or None where that has no name.
Address = tuple[str, int] | None

SOFTWARE = f"trio_ucx {__version__}, UCX {ucx.release}"


class Registry:
    """What a worker needs for its exchanges: its addresses, control sockets, and workers that still have numbers."""

    def __init__(self, worker: Worker) -> None:
        if not worker.context.features & Feature.TAG:
            raise ValueError(
                f"Connections need a worker whose context has the feature TAG; this one has {worker.context.features!r}"
            )
        least = worker.context.least_rendezvous_threshold
        if least is not None and least < wire.MIN_THRESHOLD:
            raise ValueError(
                f"Connections need a worker with an RNDV_THRESH (UCX_RNDV_THRESH) of {wire.MIN_THRESHOLD} or more; "
                f"here it is {least}: their greeting and their credits must not wait to be asked for"
            )
        self.worker = worker
        self.engine: Engine = worker._engine
        self._network_address = _network_address(self.engine)
        self.control = ControlSockets(self.engine)
        self.engine.at_end[self.engine.next_id()] = self.control.close
        self.engine.tag_dispatch.claim()

    def toward(self, uid: int) -> Registry:
        """The registry whose worker still has room for endpoints to a peer worker: this one, or a successor's."""
        return self._first(lambda engine: not engine.is_full and not engine.numbering.of(uid).used_up)

    @property
    def current(self) -> Registry:
        """The registry for new connections: this one, or a successor's if its queue or a data port has stopped."""
        return self._first(lambda engine: True)

    def _first(self, suits: Callable[[Engine], bool]) -> Registry:
        for worker in (self.worker, *self.worker._successors.values()):
            engine = worker._engine
            if not engine.queue_stopped and not engine.data_ports.lost and suits(engine):
                return Registry.of(worker)
        return Registry.of(self.worker._open_successor())

    @classmethod
    def of(cls, worker: Worker) -> Registry:
        if worker._connections is None:
            worker._connections = cls(worker)
        registry: Registry = worker._connections
        return registry

    def facts(self, connection_id: int, options: Options, shared_memory: SharedMemory, sees_local: bool) -> Facts:
        """What this side says about itself."""
        engine = self.engine
        return Facts(
            connection_id=connection_id,
            window=options.window,
            threshold=engine.context.rendezvous_threshold or 0,
            shared_memory=shared_memory,
            error_handling=engine.context.shared_memory_handles_errors,
            sees_local=sees_local,
            host=this_host(),
            address=engine.address.ucx,
            network_address=self._network_address,
            software=SOFTWARE,
            ucx=(ucx.version[0], ucx.version[1]),
        )


def _network_address(engine: Engine) -> bytes:
    """The worker's address without shared memory; empty if it has no other transport."""
    blob = engine.network_address.ucx
    try:
        parse_worker_address(blob)
    except ValueError:
        return b""
    return blob


def _plain_host(address: Address) -> str | None:
    """The host of a control socket's end, with IPv4-mapped addresses as IPv4; None for a Unix socket."""
    if address is None or address[0].startswith("unix:"):
        return None
    host = address[0].partition("%")[0]
    return host.removeprefix("::ffff:") if "." in host else host


def _greeting(frame: bytes) -> int | None:
    """The number of a HELLO; None if it is something else."""
    try:
        hello = wire.decode_frame(frame)
    except ProtocolError:
        return None
    return hello.number if isinstance(hello, wire.Hello) else None


class Introduction:
    """One side of a connection that comes about: from its id to its link.

    Args:
        label: what to call the peer in error messages.
    """

    def __init__(self, registry: Registry, options: Options, label: str) -> None:
        self.options = options
        self.label = label
        self._enter(registry)
        #: The Link, once the peers have greeted each other.
        self.answer = Signal()
        self.control: ControlSocket | None = None
        #: Closes the connection's own worker (``isolate=True``).
        self._end_isolation: Callable[[], None] | None = None
        self._core: EndpointCore | None = None
        self._ours: Facts | None = None
        self._theirs: Reach | None = None
        #: The numbers in the HELLOs that have come, and those which are of no use: their TAKE was declined.
        self._greetings: set[int] = set()
        self.late_greetings: set[int] = set()
        self._shared_memory = False
        #: The number of our endpoint, once it has been made; and what was chosen for it.
        self.number: int | None = None
        self.chosen: int | None = None
        #: The addresses of the control socket.
        self.local: Address = None
        self.remote: Address = None

    def _enter(self, registry: Registry) -> None:
        self.registry = registry
        sinks = registry.engine.tag_dispatch.sinks
        self.id = wire.new_connection_id()
        while self.id in sinks:
            self.id = wire.new_connection_id()
        sinks[self.id] = self

    # ---- the exchange ----

    def find_numbers(self, facts: Facts) -> None:
        """Moves to a worker that still has numbers for this peer. For the server, before it sends its facts.

        Raises:
            ProtocolError: what the peer says about itself is nonsense.
        """
        self._move(self.registry.toward(Reach.of(facts).uid))

    def isolate(self) -> None:
        """Moves to a worker of its own. For the server, before it sends its facts."""
        owner = self.registry.worker
        worker = owner._open_isolated()
        self._end_isolation = lambda: owner._close_isolated(worker)
        self._move(Registry.of(worker))

    def leave_stopped_worker(self) -> None:
        """Moves to a worker whose queue has not stopped. For the client, before it sends its facts."""
        self._move(self.registry.current)

    def _move(self, registry: Registry) -> None:
        if registry is not self.registry:
            del self.registry.engine.tag_dispatch.sinks[self.id]
            self._enter(registry)

    def say(self, shared_memory: SharedMemory, sees_local: bool) -> Facts:
        """What we say about ourselves."""
        self._ours = self.registry.facts(self.id, self.options, shared_memory, sees_local)
        return self._ours

    def heard(self, facts: Facts) -> None:
        """What the peer says about itself.

        Raises:
            ProtocolError: it is nonsense, or makes a connection impossible.
        """
        assert self._ours is not None
        self._theirs = Reach.of(facts)
        self._shared_memory = use_shared_memory(Reach.of(self._ours), self._theirs)
        hosts = [host for host, _ in self._theirs.tcp_addresses]
        self.registry.engine.data_ports.admit(hosts, _plain_host(self.remote), facts.ucx)

    @property
    def theirs(self) -> Reach:
        assert self._theirs is not None
        return self._theirs

    @property
    def numbers(self) -> PeerNumbers[EndpointCore]:
        return self.registry.engine.numbering.of(self.theirs.uid)

    @property
    def leads(self) -> bool | None:
        """Whether this side chooses the endpoints' number; None if it does not matter."""
        ours = self.registry.engine.address.uid
        return None if ours == self.theirs.uid else ours > self.theirs.uid

    @property
    def _blob(self) -> bytes:
        """The address of the peer's that its endpoint is made by."""
        facts = self.theirs.facts
        return facts.address if self._shared_memory else facts.network_address

    def choose(self, theirs: Numbers | None) -> int:
        """Chooses the number of the endpoints; a new one, if that was declined.

        Raises:
            ProtocolError: none is left.
        """
        self._give_back()
        try:
            self.chosen = 0 if self.leads is None else self.numbers.choose(theirs, self._blob)
        except UsedUp:
            raise ProtocolError(
                "UCX has used up its numbers for endpoints between these two workers: connect from another worker"
            ) from None
        return self.chosen

    def _give_back(self) -> None:
        chosen, self.chosen = self.chosen, None
        if chosen is not None and self.leads is not None:
            self.numbers.give_back(chosen)

    def make_endpoint(self, number: int) -> bool:
        """Makes our endpoint. Whether that number could be used.

        Raises:
            OSError, UCXError: UCX cannot reach the peer.
        """
        address = WorkerAddress.from_ucx(self._blob, process=self.theirs.facts.host.process)
        try:
            core = connect_paired(self.registry.engine, address, self.theirs.uid, number, self.label)
        except OSError as error:  # it names the worker address only
            reason = os.strerror(error.errno or errno.EHOSTUNREACH)
            raise OSError(error.errno, f"UCX cannot connect to {self.label}: {reason} ({self.tried})") from error
        if core is None:
            return False
        self._core = core
        self.number = number
        self.chosen = None
        core.on_failure = self._endpoint_failed
        return True

    def greet(self) -> None:
        """Sends HELLO over UCX. The link may exist when this returns."""
        core = self._core
        assert core is not None and self.number is not None
        # First of all: the peer may answer our HELLO with messages before this function returns.
        self._open_if_greeted()
        try:
            core.check()
            post_bytes_send(
                core, wire.encode_frame(wire.Hello(self.number)), (self.theirs.facts.connection_id << 32) | wire.CONTROL
            )
        except Exception as error:
            self.fail(error if isinstance(error, OSError) else ConnectionError(str(error)))
            return
        core.engine.progress()

    def under_way(self) -> list[InFlight]:
        """What has not ended at our endpoint, for the message of a timeout."""
        return [] if self._core is None else self._core.under_way()

    def keep_as_filler(self) -> None:
        """The peer cannot use the number of our endpoint: a raw endpoint of its may have it, which needs ours."""
        core, self._core = self._core, None
        number, self.number = self.number, None
        if core is not None and number is not None:
            core.on_failure = None
            self.numbers.keep_as_filler(number, core)

    def drop_endpoint(self) -> None:
        """Closes our endpoint by force; over TCP a moment later.

        Closing it at once, while UCX still connects it, sometimes breaks another connection between the same two
        workers over TCP (UCX 1.22: of 900 that were cancelled, 6 did).
        """
        core, self._core = self._core, None
        if core is not None:
            core.on_failure = None
            if not self._shared_memory:
                core.fail(UCXError(Status.CANCELED, f"connecting to {self.label} was given up"), linger=True)
            core.close()

    # ---- the sink of its messages, until the link is that ----

    def message_arrived(self, queue: int, handle: int, length: int) -> None:
        self.registry.engine.tag_dispatch.discard(handle)
        self.fail(ConnectionError(errno.EPROTO, f"{self.label} sent a message before its greeting"))

    def packed_arrived(self, queue: int, count: int, length: int, data: bytes) -> None:
        while True:
            number = _greeting(data[:length]) if count and queue == wire.CONTROL else None
            if number is None or number in self._greetings or len(self._greetings) > MAX_DECLINED:
                self.fail(ConnectionError(errno.EPROTO, f"{self.label} sent something else than its greeting"))
                return
            self._greetings.add(number)
            count, data = count - 1, data[length:]
            link = self._open_if_greeted()
            if link is not None:
                if count:
                    link.receiving.packed_arrived(queue, count, length, data)
                return
            if not count:
                return

    def _open_if_greeted(self) -> Link | None:
        """Both have sent their HELLO: the connection is open."""
        core, control = self._core, self.control
        if (
            self.number not in self._greetings
            or core is None
            or control is None
            or control.closed
            or self.answer.outcome is not None
        ):
            return None
        control.exchange.greeted()
        facts = self.theirs.facts
        link = Link(
            self.registry.worker,
            Transport(core, facts.connection_id),
            self.id,
            facts.connection_id,
            facts.window,
            facts.threshold,
            self.options,
        )
        link.late_greetings = self.late_greetings - self._greetings
        closing = link.closing
        closing.control_socket = control
        link.local_address, link.remote_address = self.local, self.remote
        closing.lingers = not self._shared_memory
        closing.on_closed = self._end_isolation
        if self._end_isolation is None and self.leads is not None and self.number is not None:
            number, numbers = self.number, self.numbers
            closing.keep_endpoint = lambda core: numbers.keep(number, core)
        control.on_event, control.on_lost = closing.control_said, closing.control_lost
        self.answer.finish(Value(link))
        return link

    # ---- failures ----

    def peer_said(self, event: Event) -> None:
        """On the control socket, after the exchange."""
        match event:
            case Refused(reason=reason):
                self.fail(self._refused(reason))
            case Aborted():
                self.fail(ConnectionResetError(errno.ECONNRESET, f"{self.label} gave up the connection"))
            case Declined() | Assigned():
                self.fail(ConnectionError(errno.EPROTO, f"{self.label} declined what it had chosen"))

    def _refused(self, reason: str) -> OSError:
        return ConnectionRefusedError(errno.ECONNREFUSED, f"{self.label} refused the connection: {reason}")

    def peer_lost(self, reason: str, cause: BaseException | None = None) -> None:
        error = ConnectionResetError(errno.ECONNRESET, f"lost {self.label} while connecting: {reason}")
        error.__cause__ = cause
        self.fail(error)

    def internal_error(self, error: BaseException) -> None:
        """An exception in our own code: ends the attempt to connect. Never raises."""
        report(f"an internal error of trio_ucx, while connecting with {self.label}", error)
        failure = ConnectionError(errno.EIO, f"connecting with {self.label}: an internal error of trio_ucx: {error!r}")
        failure.__cause__ = error
        contained(self.fail, failure)

    def queue_stopped(self, error: UCXError) -> None:
        """The worker's shared-memory queue has stopped: see :mod:`ucp._receive_queue`."""
        if self._ours is not None and self._core is None and (self._theirs is None or self._shared_memory):
            self.fail(ConnectionError(errno.EIO, f"connecting to {self.label}: {error}"))

    def _endpoint_failed(self) -> None:
        assert self._core is not None and self._core.error is not None
        hint = f" ({self.tried})"
        error = os_error_from_status(self._core.error.status, f"connecting to {self.label} over UCX", hint)
        self.fail(error)

    @property
    def tried(self) -> str:
        """Where UCX connects to, in words."""
        if self._theirs is None:
            return "its addresses are not known yet"
        if self._shared_memory:
            return "over shared memory, or " + self._tcp
        return self._tcp

    @property
    def _tcp(self) -> str:
        addresses = ", ".join(format_address(address) for address in self.theirs.tcp_addresses)
        return f"its UCX listens at {addresses or 'no TCP address'}"

    def check(self) -> None:
        """Raises what has made a connection impossible, if something has: a message that came too early, say."""
        if self.answer.outcome is not None:
            self.answer.result()

    def fail(self, error: Exception) -> None:
        """There will be no connection. Failed or opened already: no effect."""
        if self.answer.outcome is None:
            self.answer.finish(Error(error))
            self._let_go("")

    def close(self, reason: str = "") -> None:
        """The task that waited has gone: gives everything up, the link, too.

        Args:
            reason: what to tell the peer.
        """
        if isinstance(self.answer.outcome, Value):
            self.answer.outcome.value.abort()
        elif self.answer.outcome is None:
            self.answer.finish(Error(ConnectionError("given up")))
            self._let_go(reason)

    def _let_go(self, reason: str) -> None:
        engine = self.registry.engine
        if engine.tag_dispatch.sinks.get(self.id) is self:
            del engine.tag_dispatch.sinks[self.id]
        contained(self._give_back)
        if self.control is not None:
            contained(self.control.refuse, reason) if reason else contained(self.control.abort)
        contained(self.drop_endpoint)
        if self._theirs is not None:
            contained(engine.numbering.forget_unused, self._theirs.uid)
        if self._end_isolation is not None:
            contained(self._end_isolation)
