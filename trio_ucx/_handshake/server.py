"""The server's side of handshakes: accepts control sockets and runs their exchanges, whether anybody accepts or not.

Admission and backlog. A client is *let in* when its OPEN has arrived and the program's ``admit=`` has admitted it; with
an authkey, it has proved by then that it knows the key. ``backlog`` limits the clients that were let in and whose
connection was not accepted yet. When it is used up, a client whose OPEN arrives waits for a place. A client that was
not let in yet is a *stranger*, and does not count. All unfinished exchanges together are at most MAX_EXCHANGES, or as
many as file descriptors allow. Further clients wait in the kernel's queue, until an exchange ends. The acceptor itself
ends exchanges of idle strangers: they were accepted more than GRACE seconds ago, and either have sent nothing that we
have not read, or wait for ``admit=``.

Which strangers lose their place. A stranger is *answered* once its first message has arrived and is right: the preamble
or, with TLS, the ClientHello. Strangers are ranked: those that are not answered come before those that are, then those
of the sources with the most strangers come first, then the oldest. Only strangers in the first half of this ranking
lose their place. Two promises follow:

* While at least half of the strangers are not answered, no answered one loses its place, however long it takes, and
  however many sources the others have.
* There is room for new clients, unless more than MAX_EXCHANGES / 2 strangers come in each GRACE: GRACE seconds after
  they came, all in the first half are idle.

Not promised: the first message is no secret. Attackers who send it from many sources, and so hold more than half of the
places, can end the exchanges of clients that take longer than GRACE, first those of a host with several.
"""

from __future__ import annotations

import errno
import logging
import ssl
from collections import Counter, deque
from collections.abc import Callable
from itertools import islice

import trio

from .._link import Link, Options
from .._peer_info import Admit, PeerInfo
from .._rules.wire import ProtocolError, RefusalCode
from .._statistics import REFUSAL_REASONS
from .._util.contained import contained, report
from .._util.handles import warn_resource
from .._util.limited_log import LimitedLog
from .._util.limits import CAPACITY_ERRORS
from .._util.socket_addresses import format_address
from .._version import SOFTWARE
from ..ucp import Worker
from ..ucp._internal_api import UCXError, Waiters, descriptors
from .control_stream import (
    ControlStream,
    identify,
    local_address,
    peer_credentials,
    remote_address,
    set_keepalive,
    source_of,
    why_tls_failed,
)
from .exchange import (
    AdmitFailed,
    Again,
    Draining,
    Event,
    Exchange,
    ExchangeState,
    NoRoom,
    Opened,
    Refusal,
    Refused,
    Taken,
    UnknownProtocol,
)
from .handshake import ANOTHER_MACHINE, ANOTHER_USER, UNKNOWN_USER, ExchangeOptions, Handshake, NeedsAnotherWorker
from .registry import WorkerConnections

logger = logging.getLogger("trio_ucx")

#: Unfinished exchanges at one listener.
MAX_EXCHANGES = 1024
#: Seconds after which the exchange of an idle stranger may end. Honest clients send as soon as they are connected, and
#: as soon as they get an answer.
GRACE = 0.5
#: Seconds between two checks whether there is room.
ROOM_PAUSE = 0.02
#: Descriptors that a connection needs, with one TCP lane for each of several network devices.
DESCRIPTORS_EACH = 7
#: Descriptors that clients leave to the program.
SPARE_DESCRIPTORS = 16
#: Descriptors that strangers also leave, because UCX must never run out of them. Its TCP transport stops listening when
#: an accept() fails. A worker that has none for its first large message never sends large messages again.
RESERVED_DESCRIPTORS = 64
#: Seconds to wait when accept() fails because a resource is used up, as trio.serve_listeners does.
ACCEPT_PAUSE = 0.1
#: The kinds of clients that protected mode refuses.
PROTECTED = (ANOTHER_MACHINE, ANOTHER_USER, UNKNOWN_USER)
#: The kind of clients that are not turned away: they connect again, from another worker.
AGAIN = "it connects from another worker"
_HTTP_METHODS = (b"GET ", b"HEAD", b"POST", b"PUT ", b"DELE", b"OPTI", b"CONN", b"TRAC", b"PATC", b"PRI ")


TLS_CLIENT = "a TLS client, and this listener has no ssl_context"
#: The answer to it: the TLS alert "handshake_failure". (A socket that is only closed may be worth another attempt.)
NO_TLS = b"\x15\x03\x01\x00\x02\x02\x28"


def other_protocol(first_bytes: bytes) -> str:
    """Returns what kind of client does not speak our protocol, judged by its first bytes."""
    if first_bytes.startswith(_HTTP_METHODS):
        return "an HTTP client"
    if first_bytes.startswith(b"\x16\x03"):
        return TLS_CLIENT
    if first_bytes.startswith((b"PROXY ", b"\r\n\r\n\0\r\nQUIT\n")):
        return "a proxy that sends the PROXY header"
    return "not a trio_ucx peer"


class PendingClient:
    """A client whose handshake is not finished."""

    def __init__(self, stream: ControlStream) -> None:
        self.stream = stream
        self.label = _label(stream.socket)
        self.source = source_of(stream.socket)
        self.since = trio.current_time()
        self.scope = trio.CancelScope()
        self.is_let_in = False
        #: Whether the program's ``admit=`` is deciding about it.
        self.awaits_decision = False
        #: Whether it is one of those that ``backlog`` allows.
        self.has_place = False

    @property
    def has_sent(self) -> bool:
        """True if the client has sent anything."""
        return self.stream.peer_has_sent

    @property
    def is_answered(self) -> bool:
        """True if the first message of the client has arrived and is right."""
        return self.stream.has_answered

    @property
    def is_idle(self) -> bool:
        """True if it has had GRACE seconds, and we wait for it to send or to read, or for ``admit=``."""
        waiting = self.awaits_decision or self.stream.is_sending or not self.stream.has_unread
        return waiting and trio.current_time() - self.since >= GRACE


class Acceptor:
    """Accepts clients for a Listener: runs their handshakes until they are Connections.

    Args:
        listener: accepts the control sockets.
        timeout: seconds that a client has for the handshake.
        backlog: clients that were let in and whose connection was not accepted.
        on_close: called when the acceptor is closed, before its socket is.
    """

    def __init__(
        self,
        worker: Worker,
        listener: trio.SocketListener,
        exchange_options: ExchangeOptions,
        options: Options,
        timeout: float,
        backlog: int,
        on_close: Callable[[], None] = lambda: None,
    ) -> None:
        self.worker = worker
        self.registry = WorkerConnections.of(worker)
        self.engine = worker._engine
        self.options = options
        self.accepted = 0
        #: By reason: see ``ServerStatistics.refused``.
        self.refused = Counter(dict.fromkeys(REFUSAL_REASONS, 0))
        self.closed = False
        #: Whether new clients are refused because the server shuts down.
        self.draining = False
        #: How many open connections were not accepted yet.
        self.unaccepted = 0
        #: Called when there is one client less that has a place in the backlog.
        self.on_settled: Callable[[], object] = lambda: None
        self.address = local_address(listener.socket)
        self._listener = listener
        self._exchange_options = exchange_options
        self._timeout = timeout
        self._backlog = backlog
        self._on_close = on_close
        self._clients: dict[PendingClient, None] = {}
        self._ready: deque[Link] = deque()
        #: Clients that have a place in the backlog.
        self._opening = 0
        #: Where clients wait for a place.
        self._places = trio.lowlevel.ParkingLot()
        self._acceptors = Waiters()
        #: The last client of trio_ucx that was turned away, and why; "" if none was.
        self.last_turned_away = ""
        self._log = LimitedLog()
        self._id = self.engine.next_id()
        self.engine.teardown.children[self._id] = self._unclosed
        self.engine.teardown.on_broken[self._id] = self._acceptors.fail
        self.engine.run.spawn(self._run, f"trio_ucx listener at {self.address}")

    @property
    def handshaking(self) -> int:
        return len(self._clients)

    @property
    def waiting(self) -> int:
        return len(self._ready)

    def _unclosed(self) -> None:
        """Called when the worker closes before the listener was closed."""
        warn_resource(f"unclosed <trio_ucx.Listener at {self.address}>, closed with its worker")
        self.close()

    async def _run(self) -> None:
        """Accepts control sockets."""
        while not self.closed:
            try:
                await self._make_room()
                stream = await self._listener.accept()
            except trio.ClosedResourceError:
                return
            except Exception as error:
                if isinstance(error, OSError) and error.errno not in CAPACITY_ERRORS:
                    logger.exception("the listener at %s failed", self.address)
                    self.close()
                    return
                reason = getattr(error, "strerror", None) or repr(error)
                logger.error("accepting at %s: %s; trying again in %g seconds", self.address, reason, ACCEPT_PAUSE)
                await trio.sleep(ACCEPT_PAUSE)
                continue
            try:
                self._begin(stream)
            except Exception as error:
                report("an internal error of trio_ucx: a client was turned away", error)
                contained(stream.socket.close)

    async def _make_room(self) -> None:
        """Waits until there is a client in the kernel's queue, and room for it."""
        await trio.lowlevel.wait_readable(self._listener.socket)
        while not self.closed and not self._has_room() and not self._end_idle_exchanges():
            await trio.sleep(ROOM_PAUSE)

    def _has_room(self) -> bool:
        """True if one more client can be accepted. A single one always can, to get the reason why it is refused."""
        count = RESERVED_DESCRIPTORS + self._descriptors_for(self._opening + 1)
        return not self._clients or (len(self._clients) < MAX_EXCHANGES and descriptors.are_left(count))

    def _end_idle_exchanges(self) -> bool:
        """Ends a few exchanges of idle strangers in the first half of the ranking. Returns True if it ended any."""
        strangers = [client for client in self._clients if not client.is_let_in]
        counts = Counter(client.source for client in strangers)
        strangers.sort(key=lambda client: (client.is_answered, -counts[client.source]))  # the oldest are first already
        first_half = strangers[: (len(strangers) + 1) // 2]
        idle = list(islice((client for client in first_half if client.is_idle), 1 + len(self._clients) // 32))
        for client in idle:
            del self._clients[client]
            client.scope.cancel()
        return bool(idle)

    def _begin(self, stream: trio.SocketStream) -> None:
        try:
            client = PendingClient(ControlStream(stream))
            set_keepalive(stream.socket, self._exchange_options.keepalive_interval)
        except OSError:
            stream.socket.close()  # the client has gone already
            return
        self._clients[client] = None
        try:
            trio.lowlevel.spawn_system_task(self._serve, client, name=f"trio_ucx exchange with {client.label}")
        except BaseException:
            self._clients.pop(client, None)
            raise

    async def _serve(self, client: PendingClient) -> None:
        """Runs one client's handshake. Never raises: an exception that left a system task would end the run."""
        try:
            await self._shake_hands(client)
        except Exception as error:
            report(f"an internal error of trio_ucx: the client {client.label} was turned away", error)
        finally:
            self._clients.pop(client, None)
            contained(client.stream.close)

    async def _shake_hands(self, client: PendingClient) -> None:
        handshake = Handshake(self.registry, self.options, client.label)
        exchange = Exchange(is_client=False, software=SOFTWARE, authkey=self._exchange_options.authkey)
        link: Link | None = None
        kind, reason = "the listener closed", "it was not accepted before"
        why, counted, reason_for_peer = RefusalCode.DRAINING, "", ""
        cause: BaseException | None = None
        answer = b""
        try:
            with client.scope, trio.move_on_after(self._timeout) as timeout:
                await self._exchange(client, handshake, exchange)
                link = await handshake.opened.wait()
            if timeout.cancelled_caught:
                why, kind = RefusalCode.OTHER, "too slow" if client.has_sent else "it sent nothing"
                reason = f"no connection within {self._timeout:.3g} seconds"
                if client.is_let_in and not client.has_place:
                    why, kind = RefusalCode.FULL, "too many clients are waiting to be accepted"
                elif client.awaits_decision:
                    kind = "the listener's admit= function took too long"
                elif handshake.control is not None:
                    reason += f": {handshake.obstacle}"
            elif client.scope.cancelled_caught and not self._ends:
                why, kind, reason = (
                    RefusalCode.FULL,
                    "too many at once",
                    "its exchange was idle while others waited; try again",
                )
        except UnknownProtocol as error:
            kind, reason, counted = other_protocol(error.first_bytes), str(error), "not_trio_ucx"
            answer = NO_TLS if kind is TLS_CLIENT else b""
        except ProtocolError as error:
            why = error.why if isinstance(error, Refusal) else RefusalCode.NOT_ADMITTED
            kind, reason = error.kind if isinstance(error, Refusal) else "refused", str(error)
            cause = error.__cause__ if isinstance(error, AdmitFailed) else None
            exchange.refuse(reason, why)
        except ssl.SSLError as error:
            why = RefusalCode.NOT_ADMITTED
            kind, reason = "its TLS handshake failed", ": ".join(filter(None, why_tls_failed(error)))
        except NeedsAnotherWorker as error:
            kind, reason = AGAIN, str(error)
            exchange.again()
        except (OSError, UCXError, trio.BrokenResourceError, trio.ClosedResourceError) as error:
            kind, reason = (
                ("it left during the exchange" if client.has_sent else "it left without sending anything"),
                str(error),
            )
            number = error.errno if isinstance(error, OSError) else None
            why = RefusalCode.FULL if number in CAPACITY_ERRORS else RefusalCode.OTHER
            counted = "not_admitted" if isinstance(error, RefusedByClient) else ""
            reason_for_peer = getattr(error, "strerror", None) or reason
        except Exception as error:
            logger.exception("the exchange with %s failed", client.label)
            why, kind, reason = RefusalCode.OTHER, "an internal error", repr(error)
            reason_for_peer = "an internal error (its log says which)"  # the client may be a stranger
        finally:
            self._clients.pop(client, None)
            if link is not None and not link.life.closed and not self.closed:
                if not contained(self._connected, link):
                    contained(link.abort)
            else:
                self.refused[counted or why.name.lower()] += kind != AGAIN
                reason_for_peer = reason_for_peer or f"{kind}: {reason}"
                contained(handshake.close, Refused(reason_for_peer, why) if link is None else None)
                if exchange.state is not ExchangeState.PREAMBLE:  # it speaks our protocol
                    if kind != AGAIN:
                        self.last_turned_away = f"{client.label}: {reason}"
                    contained(exchange.refuse, reason_for_peer, why)
                contained(client.stream.close, answer + exchange.data_to_send())
                self._log_rejection(kind, client.label, reason, cause)
            if client.has_place:
                self._give_up_place()

    def _log_rejection(self, kind: str, client: str, reason: str, cause: BaseException | None) -> None:
        """Logs that a client was turned away. The first of each kind that protected mode refuses is a warning."""
        warns = kind in PROTECTED and not self._log.has_logged(kind)
        level = logging.ERROR if cause is not None else logging.WARNING if warns else logging.INFO
        self._log.log(kind, level, f"turned away {client}: {kind}: {reason}", cause)

    async def _exchange(self, client: PendingClient, handshake: Handshake, exchange: Exchange) -> None:
        """Runs the exchange, and hands the control socket over.

        Raises:
            ProtocolError, ssl.SSLError: the client was refused.
            OSError, UCXError: the client left, or UCX cannot reach it.
        """
        stream, options = client.stream, self._exchange_options
        handshake.set_addresses(stream)
        if options.ssl_context is not None:
            await stream.start_tls(options.ssl_context, is_client=False, server_hostname=None)
        exchange.protected = await options.refusal_of(stream, is_local=handshake.is_local)
        opened = await handshake.next_event(stream, exchange)
        if not isinstance(opened, Opened):
            raise _gave_up(opened)
        if options.admit is not None:
            await stream.send_all(exchange.data_to_send())  # the client counts as answered
            client.awaits_decision = True
            await _check_admitted(options.admit, identify(stream.socket, stream.tls, opened.peer, handshake.remote))
            client.awaits_decision = False
        client.is_let_in = True
        if self.draining:
            raise Draining
        if not self._has_place():
            await stream.send_all(exchange.data_to_send())  # REFUSE may follow while the client waits
            while not self._has_place():
                await self._places.park()
        client.has_place = True
        self._opening += 1
        self._check_room()
        if options.isolate:
            handshake.isolate()
        else:
            handshake.registry = self.registry.for_new_connection(ends=handshake.ends)
        description = handshake.describe(options.shared_memory)
        handshake.description_arrived(opened.peer)
        handshake.check_route()  # a client that is let in asks UCX for an endpoint, and without a route UCX crashes
        handshake.let_in(exchange.keys)
        exchange.welcome(description, handshake.endpoint_summary())
        taken = await handshake.next_event(stream, exchange)
        if not isinstance(taken, Taken):
            raise NeedsAnotherWorker(client.label) if isinstance(taken, Again) else _gave_up(taken)
        if taken.greet:
            handshake.peer_has_keys()
        handshake.hand_over(stream, exchange, taken.generation, greet=taken.greet)

    def _has_place(self) -> bool:
        """True if the backlog has room for a client that was let in, and there are descriptors for it.

        If there are too few although no other connection is being opened, :meth:`_check_room` refuses the client.
        """
        return self._opening + len(self._ready) < self._backlog and (
            not self._opening or descriptors.are_left(self._descriptors_for(self._opening + 1))
        )

    def _give_up_place(self) -> None:
        self._opening -= 1
        self._place_may_be_free()
        self.on_settled()

    def _place_may_be_free(self) -> None:
        if self._opening + len(self._ready) < self._backlog:
            self._places.unpark()

    def _descriptors_for(self, clients: int) -> int:
        """Returns how many descriptors must be left for clients whose connections are being opened."""
        each = DESCRIPTORS_EACH + (self.worker.context._descriptors_per_worker if self._exchange_options.isolate else 0)
        return SPARE_DESCRIPTORS + each * clients

    def _check_room(self) -> None:
        """Refuses a client if there are too few descriptors for it.

        UCX must never run out of descriptors: its TCP transport stops listening when an accept() fails.

        Raises:
            NoRoom: with the reason for the client.
        """
        try:
            descriptors.require(self._descriptors_for(self._opening), "serving the next clients")
        except OSError as error:
            self._log.log("descriptors", logging.WARNING, f"clients are turned away: {error.strerror}")
            raise NoRoom("the listener's process is running out of file descriptors; try again later") from None

    def _connected(self, link: Link) -> None:
        self.unaccepted += 1
        if not self._acceptors.give(link):
            self._ready.append(link)

    def check(self) -> None:
        """Refuses to use a listener that was closed."""
        self.engine.check()
        if self.closed:
            raise trio.ClosedResourceError("this listener was closed")

    async def accept(self) -> Link:
        """Waits for a connection."""
        await trio.lowlevel.checkpoint_if_cancelled()
        self.check()
        while self._ready:
            link = self._ready.popleft()
            self._place_may_be_free()
            if not link.life.closed:
                await trio.lowlevel.cancel_shielded_checkpoint()
                break
            self.unaccepted -= 1
            self.on_settled()
        else:
            link = await self._acceptors.wait()
        self.unaccepted -= 1
        self.accepted += 1
        return link

    @property
    def _ends(self) -> bool:
        return self.closed or self.draining

    @property
    def settled(self) -> bool:
        """True if no client is between its admission and the acceptance of its connection."""
        return self.closed or (not self._opening and not self.unaccepted)

    def drain(self) -> None:
        """From now on refuses clients that have no place in the backlog yet; the others become connections."""
        self.draining = True
        for client in list(self._clients):
            if client.is_let_in and not client.has_place:
                client.scope.cancel()

    def close(self) -> None:
        """Stops listening, and turns away the clients that were not accepted. Closed already: no effect."""
        if self.closed:
            return
        self.closed = True
        self.engine.teardown.children.pop(self._id, None)
        self.engine.teardown.on_broken.pop(self._id, None)
        self._on_close()
        self._listener.socket.close()
        for client in list(self._clients):
            client.scope.cancel()
        while self._ready:
            self._ready.popleft().abort()
        self.on_settled()
        self._acceptors.fail(trio.ClosedResourceError("this listener was closed"))


async def _check_admitted(admit: Admit, peer: PeerInfo) -> None:
    """Refuses a client that the program does not let in.

    Raises:
        Refusal: with the reason for the client.
    """
    try:
        admitted = await admit(peer)
        if not isinstance(admitted, bool):
            raise TypeError(f"admit= must return True or False, not {admitted!r}")
    except (Exception, SystemExit, KeyboardInterrupt) as error:  # none may end the run
        raise AdmitFailed from error
    if not admitted:
        raise Refusal("the listener's admit= function does not let this client in")


class RefusedByClient(ConnectionAbortedError):
    """The client does not admit this side: the keys differ, say, and it has noticed first."""


def _gave_up(event: Event) -> OSError:
    """Returns the error for a client that sent this instead of going on."""
    if isinstance(event, Refused) and event.why is RefusalCode.NOT_ADMITTED:
        return RefusedByClient(errno.ECONNABORTED, f"it gave up: {event.reason}")
    if isinstance(event, Refused):
        return ConnectionAbortedError(errno.ECONNABORTED, f"it gave up: {event.reason}")
    return ConnectionAbortedError(errno.ECONNABORTED, "it gave up the connection")


def _label(control: trio.socket.SocketType) -> str:
    address = remote_address(control)
    if address is not None:
        return format_address(address)
    return f"process {peer_credentials(control)[0] or 'of another PID namespace'}"
