"""The client's side of a handshake: connects the control socket, runs the exchange, and waits for the peer's HELLO."""

from __future__ import annotations

import errno
import os
import ssl
from collections.abc import Awaitable, Callable

import trio

from .._link import Link, Options
from .._wire import ProtocolError
from ..ucp import UCXError
from ..ucp._engine.numbering import Numbers
from ..ucp._engine.operations import under_way
from .control_stream import ControlStream, set_keepalive
from .exchange import Aborted, Assigned, Declined, Event, Exchange, NotTrioUCX, Refused, Welcomed
from .handshake import ExchangeOptions, Greeted, Handshake
from .registry import SOFTWARE, Registry


class Connector:
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
        exchange_options: ExchangeOptions,
        options: Options,
        timeout: float,
    ) -> None:
        self.label = label
        self.exchange_options = exchange_options
        self.timeout = timeout
        #: What had not happened yet when the time was over, for the message of the error.
        self.stage = "the connection was not accepted"
        self._open_socket = open_socket
        self._handshake = Handshake(registry, options, label)

    async def run(self) -> Link:
        """Connects.

        Raises:
            TimeoutError: it took longer than ``timeout``.
            OSError: it failed.
            trio.ClosedResourceError: the worker was closed meanwhile.
        """
        link: Link | None = None
        waiting_for = ""
        engine = self._handshake.registry.engine
        try:
            with trio.move_on_after(self.timeout) as scope:
                engine.children[id(self)] = scope.cancel
                link = await self._connect()
            if scope.cancelled_caught:
                waiting_for = under_way(self._handshake.under_way())
        finally:
            engine.children.pop(id(self), None)
            if link is None:
                self._handshake.close()
        if link is None:
            engine.check()
            raise TimeoutError(
                errno.ETIMEDOUT,
                f"connecting to {self.label} took longer than {self.timeout:.3g} seconds: {self.stage}{waiting_for}",
            )
        return link

    async def _connect(self) -> Link:
        handshake, options = self._handshake, self.exchange_options
        stream = ControlStream(await self._open_socket())
        exchange = Exchange(is_client=True, software=SOFTWARE, authkey=options.authkey)
        reason = ""
        try:
            set_keepalive(stream.socket, options.keepalive_interval)
            handshake.set_addresses(stream)
            await self._exchange(stream, exchange)
            handshake.hand_over(stream, exchange, lambda event: self._event_while_greeting(exchange, event))
        except ProtocolError as error:
            reason = str(error)
            hint = "; is it a trio_ucx listener?" if isinstance(error, NotTrioUCX) else ""
            raise ConnectionRefusedError(
                errno.ECONNREFUSED, f"cannot connect to {self.label}: {error}{hint}"
            ) from error
        except UCXError as error:
            reason = str(error)
            raise ConnectionError(errno.EPROTO, f"cannot connect to {self.label} over UCX: {error}") from error
        except OSError as error:
            reason = error.strerror or str(error)
            raise self._named(error) from None
        finally:
            if handshake.control is None:
                if reason:
                    exchange.refuse(reason)
                stream.close(exchange.data_to_send() if reason else b"")
        self._wait_for_messages()
        link: Link = await handshake.registry.engine.waiting.wait(handshake.opened)
        return link

    def _named(self, error: OSError) -> OSError:
        """The error, with the listener's address and a possible cause in its message."""
        if self.label in str(error):
            return error
        if error.errno == errno.ENOTCONN:  # from getpeername
            error = ConnectionResetError(errno.ECONNRESET, os.strerror(errno.ECONNRESET))
        if isinstance(error, ssl.SSLError):
            hint = "does the listener have an ssl_context, and does each side trust the other's certificate?"
        else:
            hint = "the listener may have closed, or may not be a trio_ucx listener; see its log, or try again"
        error.strerror = f"connecting to {self.label}: {error.strerror or error}: {hint}"
        return error

    def _wait_for_messages(self) -> None:
        route = self._handshake.route
        self.stage = f"messages did not get through over UCX ({route}); does a firewall block them?"

    async def _exchange(self, stream: ControlStream, exchange: Exchange) -> None:
        options, handshake = self.exchange_options, self._handshake
        if options.ssl_context is not None:
            self.stage = "the TLS handshake did not end; does the listener have an ssl_context?"
            await stream.start_tls(options.ssl_context, is_client=True, server_hostname=options.server_hostname)
        self.stage = "it did not answer; is it a trio_ucx listener, or is its backlog full?"
        handshake.move_to_running_worker()
        exchange.open(handshake.make_facts(options.shared_memory))
        await handshake.run_exchange(stream, exchange, lambda event: self._answer(exchange, event))

    def _answer(self, exchange: Exchange, event: Event | Greeted) -> None:
        """Answers the server.

        Raises:
            ProtocolError: we cannot connect to this server.
            OSError: the server refuses; UCX cannot reach it.
        """
        handshake = self._handshake
        match event:
            case Refused(reason=reason):
                raise handshake.refusal(reason)
            case Welcomed(facts=facts, number=number, numbers=numbers):
                handshake.peer_facts_arrived(facts)
                handshake.numbers.heard(numbers)
                if number is None:
                    self._choose_number(exchange, numbers)
                else:
                    self._use_number(exchange, number)
            case Assigned(number=number, numbers=numbers):
                handshake.numbers.heard(numbers)
                self._use_number(exchange, number)
            case Declined(numbers=numbers):
                self._choose_number(exchange, numbers)
            case Greeted(number=number):
                if not handshake.adopt_endpoint(number):
                    handshake.choose_number(None)
                    self._expect_greeting(exchange)
            case Aborted():
                raise ConnectionResetError(errno.ECONNRESET, f"{self.label} gave up the connection")
            case _:
                raise ProtocolError(f"the server sent {type(event).__name__}")

    def _choose_number(self, exchange: Exchange, numbers: Numbers) -> None:
        """Chooses a number, and sends TAKE, at once or when our endpoint is made."""
        handshake = self._handshake
        if handshake.chooses_number is False:
            raise ProtocolError("the listener leaves to the client the endpoint number that it has to choose itself")
        number = handshake.choose_number(numbers)
        if handshake.adopts:
            self._expect_greeting(exchange)
        else:
            self._use_number(exchange, number)

    def _expect_greeting(self, exchange: Exchange) -> None:
        """Sends TAKE with the number that we have chosen. Then we wait for the server's HELLO."""
        handshake = self._handshake
        assert handshake.chosen is not None
        handshake.expect_greeting(handshake.chosen)
        exchange.take(handshake.chosen, handshake.numbers_to_send())
        self._wait_for_messages()

    def _use_number(self, exchange: Exchange, number: int) -> None:
        """Makes our endpoint with the server's number, and sends TAKE; or sends DECLINE."""
        handshake = self._handshake
        if handshake.adopts:
            raise ProtocolError("the listener chose the endpoint number that it has to leave to the client")
        if handshake.make_endpoint(number):
            exchange.take(number, handshake.numbers_to_send())
        else:
            exchange.decline(handshake.numbers_to_send())

    def _event_while_greeting(self, exchange: Exchange, event: Event) -> None:
        """Handles an event while we wait for the server's HELLO: the server may still assign another number."""
        handshake = self._handshake
        if not isinstance(event, Assigned) or handshake.chooses_number is not False:
            handshake.event_arrived(event)
            return
        handshake.numbers.heard(event.numbers)
        handshake.replace_endpoint(lambda: self._use_number(exchange, event.number))
