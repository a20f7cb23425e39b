"""The side that listens: takes control sockets, and lets their exchanges advance whether anybody accepts or not."""

from __future__ import annotations

import errno
import logging
import ssl
import time
from collections import deque
from collections.abc import Callable

import trio

from .._link import Link, Options
from .._wire import ProtocolError
from ..ucp import UCXError, Worker
from ..ucp import _descriptors as descriptors
from ..ucp._address import format_address
from ..ucp._contained import contained, report
from ..ucp._engine.numbering import FILLERS_AT_ONCE
from ..ucp._engine.pending import Waiters
from ..ucp._util import warn_resource
from .client import Entry, own_address, peer_address
from .control import ControlSocket
from .exchange import Declined, Event, Exchange, Opened, Refused, Stranger, Taken
from .registry import SOFTWARE, Introduction, Registry
from .streams import ControlStream, keep_alive, leads_to_this_machine

logger = logging.getLogger("trio_ucx")

#: Exchanges that go on at one time at one listener. When another client comes, the oldest one that has said nothing
#: ends, or else the oldest.
MAX_EXCHANGES = 256
#: What a connection needs, with one TCP lane for each of several network devices; what the program may need besides.
DESCRIPTORS_EACH = 7
SPARE_DESCRIPTORS = 16
#: Seconds to wait when accept() fails for want of a resource, as trio.serve_listeners does.
ACCEPT_PAUSE = 0.1
#: Seconds for which turned away clients of one kind are counted rather than logged each.
LOG_INTERVAL = 60.0
_CAPACITY_ERRORS = frozenset({errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.ENOBUFS})
_HTTP_METHODS = (b"GET ", b"HEAD", b"POST", b"PUT ", b"DELE", b"OPTI", b"CONN", b"TRAC", b"PATC", b"PRI ")


class TurnedAway:
    """Logs the clients that were turned away: one line for each kind in a while, however many come."""

    def __init__(self) -> None:
        self._last: dict[str, float] = {}
        self._unlogged: dict[str, int] = {}

    def log(self, kind: str, client: str, reason: object) -> None:
        now = time.monotonic()
        if now - self._last.get(kind, -LOG_INTERVAL) < LOG_INTERVAL:
            self._unlogged[kind] = self._unlogged.get(kind, 0) + 1
            return
        self._last[kind] = now
        more = self._unlogged.pop(kind, 0)
        others = f" (and {more} others since the last such line)" if more else ""
        logger.info("turned away %s: %s: %s%s", client, kind, reason, others)


def kind_of_stranger(begin: bytes) -> str:
    """What a client is that does not speak our protocol, by its first bytes."""
    if begin.startswith(_HTTP_METHODS):
        return "an HTTP client"
    if begin.startswith(b"\x16\x03"):
        return "a TLS client, and this listener has no ssl_context"
    if begin.startswith((b"PROXY ", b"\r\n\r\n\0\r\nQUIT\n")):
        return "a proxy that sends the PROXY header"
    return "no trio_ucx peer"


class Client:
    """A client whose exchange goes on."""

    def __init__(self, stream: ControlStream, label: str) -> None:
        self.stream = stream
        self.label = label
        #: Whether it has said something.
        self.spoke = False
        self.scope = trio.CancelScope()


class Acceptor:
    """Accepts clients for a Listener: runs their exchanges until they are Connections.

    Args:
        listener: accepts the control sockets.
        timeout: seconds that a client has for the exchange.
        backlog: connections that may wait to be accepted.
        on_close: called when the acceptor is closed.
        isolate: whether each connection has a worker of its own.
    """

    def __init__(
        self,
        worker: Worker,
        listener: trio.SocketListener,
        entry: Entry,
        options: Options,
        timeout: float,
        backlog: int,
        on_close: Callable[[], None] = lambda: None,
        *,
        isolate: bool = False,
    ) -> None:
        self._isolate = isolate
        self.worker = worker
        self.registry = Registry.of(worker)
        self.engine = worker._engine
        self.options = options
        self.accepted = 0
        self.refused = 0
        self.closed = False
        self.address = own_address(listener.socket)
        self._listener = listener
        self._entry = entry
        self._timeout = timeout
        self._backlog = backlog
        self._on_close = on_close
        self._clients: dict[Client, None] = {}
        self._ready: deque[Link] = deque()
        self._acceptors = Waiters()
        self._turned_away = TurnedAway()
        self._id = self.engine.next_id()
        self.engine.children[self._id] = self._unclosed
        self.engine.on_broken[self._id] = self._acceptors.fail
        self.engine.spawn(self._run, f"trio_ucx listener at {self.address}")

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
        """Takes control sockets."""
        while not self.closed:
            try:
                stream = await self._listener.accept()
            except trio.ClosedResourceError:
                return
            except Exception as error:
                if isinstance(error, OSError) and error.errno not in _CAPACITY_ERRORS:
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

    def _begin(self, stream: trio.SocketStream) -> None:
        try:
            label = _label(stream.socket)
            keep_alive(stream.socket, self._entry.keepalive_interval)
        except OSError:
            stream.socket.close()  # it has gone already
            return
        client = Client(ControlStream(stream), label)
        if len(self._clients) >= MAX_EXCHANGES:
            # An exchange takes milliseconds, so the one that takes longest is nobody's who means it.
            oldest = next((each for each in self._clients if not each.spoke), next(iter(self._clients)))
            del self._clients[oldest]
            oldest.scope.cancel()
        self._clients[client] = None
        try:
            trio.lowlevel.spawn_system_task(self._serve, client, name=f"trio_ucx exchange with {label}")
        except BaseException:
            self._clients.pop(client, None)
            raise

    async def _serve(self, client: Client) -> None:
        """One client's exchange. Its task must not fail: that would end the run."""
        try:
            await self._introduce(client)
        except Exception as error:
            report(f"an internal error of trio_ucx: the client {client.label} was turned away", error)
        finally:
            self._clients.pop(client, None)
            contained(client.stream.close)

    async def _introduce(self, client: Client) -> None:
        introduction = Introduction(self.registry, self.options, client.label)
        link: Link | None = None
        kind, reason = "the listener closed", "it was not accepted before"
        try:
            with client.scope, trio.move_on_after(self._timeout) as timeout:
                await self._exchange(client, introduction)
                link = await introduction.answer.wait()
            if timeout.cancelled_caught:
                kind = "too slow" if client.spoke else "it said nothing"
                reason = f"no connection within {self._timeout:.3g} seconds"
                if client.spoke:
                    reason += f" ({introduction.tried})"
            elif client.scope.cancelled_caught and not self.closed:
                kind, reason = "too many at once", f"more than {MAX_EXCHANGES} exchanges"
        except Stranger as error:
            kind, reason = kind_of_stranger(error.begin), str(error)
        except ProtocolError as error:
            kind, reason = "refused", str(error)
        except ssl.SSLError as error:
            kind, reason = "its TLS handshake failed", getattr(error, "reason", None) or str(error)
        except (OSError, UCXError, trio.BrokenResourceError, trio.ClosedResourceError) as error:
            kind, reason = ("it left in the exchange" if client.spoke else "it left without a word"), str(error)
        except Exception as error:
            logger.exception("the exchange with %s failed", client.label)
            kind, reason = "an internal error", repr(error)
        finally:
            self._clients.pop(client, None)
            client.stream.close()
            if link is not None and not link.closed and not self.closed:
                if not contained(self._connected, link):
                    contained(link.abort)
            else:
                self.refused += 1
                contained(introduction.close, f"{kind}: {reason}" if link is None else "")
                self._turned_away.log(kind, client.label, reason)

    async def _exchange(self, client: Client, introduction: Introduction) -> None:
        """Does the exchange, and hands the control socket over.

        Raises:
            ProtocolError, ssl.SSLError: the client was refused.
            OSError, UCXError: the client left, or UCX cannot reach it.
        """
        stream, entry = client.stream, self._entry
        introduction.local, introduction.remote = own_address(stream.socket), peer_address(stream.socket)
        exchange = Exchange(is_client=False, software=SOFTWARE, authkey=entry.authkey)
        try:
            if entry.ssl_context is not None:
                await stream.start_tls(entry.ssl_context, is_client=False, server_hostname=None)
                client.spoke = True
            while introduction.number is None:
                introduction.check()
                event = exchange.next_event()
                if event is not None:
                    self._answer(client, introduction, exchange, event)
                await stream.send_all(exchange.data_to_send())
                if event is None:
                    data = await stream.receive_some()
                    if not data:
                        raise ConnectionResetError(errno.ECONNRESET, "it ended the control connection")
                    client.spoke = True
                    exchange.receive_data(data)
        except (ProtocolError, OSError, UCXError) as error:
            if not isinstance(error, (Stranger, ssl.SSLError)):
                exchange.refuse((isinstance(error, OSError) and error.strerror) or str(error))
            with trio.move_on_after(1):
                try:
                    await stream.send_all(exchange.data_to_send())
                except (OSError, ssl.SSLError):
                    pass
            raise
        introduction.check()
        introduction.control = control = ControlSocket(
            introduction.registry.control,
            stream.detach(),
            stream.tls,
            exchange,
            introduction.peer_said,
            introduction.peer_lost,
        )
        introduction.greet()
        control.start()

    def _answer(self, client: Client, introduction: Introduction, exchange: Exchange, event: Event) -> None:
        """Answers the client.

        Raises:
            ProtocolError: the client must be refused.
            OSError, UCXError: UCX cannot reach it.
        """
        match event:
            case Opened(facts=facts):
                self._check_room(self.worker.context.descriptors_per_worker if self._isolate else 0)
                introduction.isolate() if self._isolate else introduction.find_numbers(facts)
                ours = introduction.say(self._entry.shared_memory, leads_to_this_machine(client.stream.socket))
                introduction.heard(facts)
                number = None if introduction.leads is False else introduction.choose(None)
                exchange.welcome(ours, number, introduction.numbers.numbers())
            case Taken(number=number, numbers=numbers):
                introduction.numbers.heard(numbers)
                missing = number - introduction.numbers.numbers().next
                if missing > 0:
                    self._check_room(DESCRIPTORS_EACH * min(missing, FILLERS_AT_ONCE))
                if introduction.make_endpoint(number):
                    introduction.late_greetings.discard(number)
                    exchange.taken()
                    return
                introduction.late_greetings.add(number)
                if introduction.leads is False:
                    exchange.decline(introduction.numbers.numbers())
                elif number == introduction.chosen:  # a raw endpoint has it, or there are not enough fillers yet
                    exchange.reassign(introduction.choose(None), introduction.numbers.numbers())
                else:
                    raise ProtocolError(f"it took the number {number}, which was not its to take")
            case Declined(numbers=numbers):
                if introduction.leads is False:
                    raise ProtocolError("it declined what it had chosen itself")
                exchange.assign(introduction.choose(numbers), introduction.numbers.numbers())
            case Refused(reason=reason):
                raise ConnectionAbortedError(errno.ECONNABORTED, f"it gave up: {reason}")
            case _:
                raise ProtocolError(f"it said {type(event).__name__}")

    def _check_room(self, more: int = 0) -> None:
        """Refuses a client for which there are not enough descriptors.

        Args:
            more: descriptors that the client needs besides those of one endpoint.

        UCX must never run out of descriptors: its TCP transport stops listening when an accept() fails.

        Raises:
            ProtocolError: with the reason for the client.
        """
        if len(self._ready) >= self._backlog:
            raise ProtocolError("too many clients are waiting to be accepted; try again later")
        try:
            descriptors.require(
                SPARE_DESCRIPTORS + DESCRIPTORS_EACH * len(self._clients) + more, "serving the next clients"
            )
        except OSError as error:
            logger.warning("clients are turned away: %s", error.strerror)
            raise ProtocolError("the listener's process is running out of file descriptors; try again later") from None

    def _connected(self, link: Link) -> None:
        if not self._acceptors.give(link):
            self._ready.append(link)

    def check(self) -> None:
        """Refuses use after the close."""
        self.engine.check()
        if self.closed:
            raise trio.ClosedResourceError("this listener was closed")

    async def accept(self) -> Link:
        """Waits for a connection."""
        self.check()
        await trio.lowlevel.checkpoint_if_cancelled()
        while self._ready:
            link = self._ready.popleft()
            if not link.closed:
                await trio.lowlevel.cancel_shielded_checkpoint()
                break
        else:
            link = await self._acceptors.wait()
        self.accepted += 1
        return link

    def close(self) -> None:
        """Stops listening; clients that were not accepted are turned away. Closed already: no effect."""
        if self.closed:
            return
        self.closed = True
        self.engine.children.pop(self._id, None)
        self.engine.on_broken.pop(self._id, None)
        self._listener.socket.close()
        self._on_close()
        for client in list(self._clients):
            client.scope.cancel()
        while self._ready:
            self._ready.popleft().abort()
        self._acceptors.fail(trio.ClosedResourceError("this listener was closed"))


def _label(control: trio.socket.SocketType) -> str:
    address = peer_address(control)
    return "a local process" if address is None else format_address(address)
