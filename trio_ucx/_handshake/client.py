"""The side that connects: opens a control socket, does the exchange, and waits for the greeting over UCX."""

from __future__ import annotations

import errno
import ssl
from collections.abc import Awaitable, Callable

import attrs
import trio

from .._link import Link, Options
from .._wire import ProtocolError
from ..ucp import UCXError
from ..ucp._engine.numbering import FILLERS_AT_ONCE, MAX_FILLERS
from ..ucp._engine.operations import under_way
from .control import ControlSocket
from .exchange import Assigned, Declined, Event, Exchange, Refused, Stranger, Welcomed
from .facts import SharedMemory
from .registry import SOFTWARE, Address, Introduction, Registry
from .streams import ControlStream, keep_alive, leads_to_this_machine


@attrs.frozen
class Entry:
    """The options of the exchange: authentication, keepalive of the control socket, shared memory.

    Attributes:
        server_hostname: whom the server's certificate must name.
        keepalive_interval: see :func:`streams.keep_alive`.
    """

    shared_memory: SharedMemory
    keepalive_interval: float
    authkey: bytes | None
    ssl_context: ssl.SSLContext | None
    server_hostname: str | None = None


class Connecting:
    """One attempt to connect.

    Args:
        open_socket: connects the control socket.
        label: the listener's address, for error messages.
        timeout: seconds for everything.
    """

    def __init__(
        self,
        registry: Registry,
        open_socket: Callable[[], Awaitable[trio.SocketStream]],
        label: str,
        entry: Entry,
        options: Options,
        timeout: float,
    ) -> None:
        self.label = label
        self.entry = entry
        self.options = options
        self.timeout = timeout
        #: What we were doing when the time was over.
        self.stage = "the connection was not accepted"
        self._open_socket = open_socket
        self._introduction = Introduction(registry, options, label)

    async def run(self) -> Link:
        """Connects.

        Raises:
            TimeoutError: it took longer than ``timeout``.
            OSError: it failed.
        """
        link: Link | None = None
        waiting_for = ""
        try:
            with trio.move_on_after(self.timeout) as scope:
                link = await self._connect()
            if scope.cancelled_caught:
                waiting_for = under_way(self._introduction.under_way())
        finally:
            if link is None:
                self._introduction.close()
        if link is None:
            raise TimeoutError(
                errno.ETIMEDOUT,
                f"connecting to {self.label} took longer than {self.timeout:.3g} seconds: {self.stage}{waiting_for}",
            )
        return link

    async def _connect(self) -> Link:
        stream = ControlStream(await self._open_socket())
        try:
            keep_alive(stream.socket, self.entry.keepalive_interval)
            self._introduction.local = own_address(stream.socket)
            self._introduction.remote = peer_address(stream.socket)
            await self._exchange(stream)
        except BaseException:
            stream.close()
            raise
        introduction = self._introduction
        self.stage = f"messages did not get through over UCX ({introduction.tried}); is there a firewall between?"
        link: Link = await introduction.registry.engine.waiting.wait(introduction.answer)
        return link

    async def _exchange(self, stream: ControlStream) -> None:
        entry, introduction = self.entry, self._introduction
        self.stage = "it did not answer; is it a trio_ucx listener?"
        exchange = Exchange(is_client=True, software=SOFTWARE, authkey=entry.authkey)
        try:
            if entry.ssl_context is not None:
                self.stage = "the TLS handshake did not end; does the listener have an ssl_context?"
                await stream.start_tls(entry.ssl_context, is_client=True, server_hostname=entry.server_hostname)
            introduction.leave_stopped_worker()
            exchange.open(introduction.say(entry.shared_memory, leads_to_this_machine(stream.socket)))
            await stream.send_all(exchange.data_to_send())
            while True:
                introduction.check()
                event = exchange.next_event()
                if event is not None:
                    if self._answer(exchange, event):
                        break
                    await stream.send_all(exchange.data_to_send())
                    continue
                await stream.send_all(exchange.data_to_send())
                data = await stream.receive_some()
                if not data:
                    raise ConnectionResetError(errno.ECONNRESET, f"{self.label} ended the connection in the exchange")
                exchange.receive_data(data)
        except ssl.SSLError as error:
            error.add_note(
                f"in the TLS handshake with {self.label}: does it have an ssl_context, and does each trust the other?"
            )
            raise
        except ProtocolError as error:
            reason = f"{error}; is it a trio_ucx listener?" if isinstance(error, Stranger) else str(error)
            await self._refuse(stream, exchange, str(error))
            raise ConnectionRefusedError(errno.ECONNREFUSED, f"cannot connect to {self.label}: {reason}") from error
        except UCXError as error:
            await self._refuse(stream, exchange, str(error))
            raise ConnectionError(errno.EPROTO, f"cannot connect to {self.label} over UCX: {error}") from error
        except OSError as error:  # UCX cannot reach the server, or the socket broke, and then nobody hears this
            await self._refuse(stream, exchange, error.strerror or str(error))
            raise
        introduction.check()
        introduction.control = control = ControlSocket(
            introduction.registry.control,
            stream.detach(),
            stream.tls,
            exchange,
            lambda event: self._said_later(exchange, event),
            introduction.peer_lost,
        )
        control.flush()
        introduction.greet()
        control.start()

    async def _refuse(self, stream: ControlStream, exchange: Exchange, reason: str) -> None:
        """Sends the server the reason why there will be no connection, if the control socket still takes it."""
        exchange.refuse(reason)
        try:
            await stream.send_all(exchange.data_to_send())
        except (OSError, ssl.SSLError):
            pass

    def _answer(self, exchange: Exchange, event: Event) -> bool:
        """Answers the server; whether the number of the endpoints is settled, as far as we know.

        Raises:
            ProtocolError: we cannot connect to this server.
            OSError: the server refuses; UCX cannot reach it.
        """
        introduction = self._introduction
        match event:
            case Refused(reason=reason):
                raise ConnectionRefusedError(errno.ECONNREFUSED, f"{self.label} refused the connection: {reason}")
            case Welcomed(facts=facts, number=number, numbers=numbers):
                introduction.heard(facts)
                introduction.numbers.heard(numbers)
                if number is None:
                    return self._choose(exchange, event)
                return self._try(exchange, number)
            case Assigned(number=number, numbers=numbers):
                introduction.numbers.heard(numbers)
                return self._try(exchange, number)
        raise ProtocolError(f"the server said {type(event).__name__}")

    def _choose(self, exchange: Exchange, event: Welcomed | Declined) -> bool:
        introduction = self._introduction
        if introduction.leads is False:
            raise ProtocolError("the listener leaves to the client the endpoint number that it has to choose itself")
        for _ in range(MAX_FILLERS // FILLERS_AT_ONCE + 1):
            number = introduction.choose(event.numbers)
            if self._take(exchange, number):
                return True
        raise ProtocolError(
            f"the listener's worker has made {event.numbers.next} endpoints to this worker, and this worker far fewer: "
            "connect from another worker"
        )

    def _take(self, exchange: Exchange, number: int) -> bool:
        introduction = self._introduction
        if not introduction.make_endpoint(number):
            return False
        exchange.take(number, introduction.numbers.numbers())
        return True

    def _try(self, exchange: Exchange, number: int) -> bool:
        if self._take(exchange, number):
            return True
        exchange.decline(self._introduction.numbers.numbers())
        return False

    def _said_later(self, exchange: Exchange, event: Event) -> None:
        """Handles what the server says while we wait for its greeting."""
        introduction = self._introduction
        try:
            match event:
                case Declined() if introduction.leads is not False:
                    introduction.keep_as_filler()
                    settled = self._choose(exchange, event)
                case Assigned(number=number, numbers=numbers) if introduction.leads is not True:
                    introduction.numbers.heard(numbers)
                    if number == introduction.number:  # the server has made some of its fillers, and asks for more time
                        exchange.take(number, introduction.numbers.numbers())
                        settled = False
                    else:
                        introduction.keep_as_filler()
                        settled = self._try(exchange, number)
                case _:
                    introduction.peer_said(event)
                    return
        except (OSError, UCXError, ProtocolError) as error:
            introduction.fail(error if isinstance(error, OSError) else ConnectionError(str(error)))
            return
        assert introduction.control is not None
        introduction.control.flush()
        if settled:
            introduction.greet()


def own_address(control: trio.socket.SocketType) -> Address:
    """Our address of a control socket: host and port, or the path of a Unix socket, or None where that has none."""
    return _address(control.getsockname())


def peer_address(control: trio.socket.SocketType) -> Address:
    """The same of the peer's end."""
    return _address(control.getpeername())


def _address(name: object) -> Address:
    if isinstance(name, tuple):
        return name[0], name[1]
    return (f"unix:{name}", 0) if isinstance(name, str) and name else None
