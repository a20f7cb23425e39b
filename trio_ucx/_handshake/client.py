"""The client's side: connects the control socket, runs the exchange, and waits until the connection is open."""

from __future__ import annotations

import errno
import os
import ssl
from collections.abc import Awaitable, Callable

import trio

from .._errors import NotTrioUCX, refusal
from .._link import Link, Options
from .._rules.wire import ProtocolError, RefusalCode
from .._util.picklable import with_text
from .._version import SOFTWARE
from ..ucp._internal_api import UCXError, under_way
from .control_stream import Address, ControlStream, set_keepalive, why_tls_failed
from .exchange import Exchange, ExchangeState, Refused, UnknownProtocol, Welcomed
from .handshake import ExchangeOptions, Handshake, NeedsAnotherWorker
from .registry import WorkerConnections

#: How many workers one connect tries before it opens its own, which has made no endpoints.
SHARED_WORKERS = 2


class Connector:
    """One call of connect: up to three handshakes, each from another worker.

    Args:
        open_socket: connects the control socket.
        label: the listener's address, for error messages.
        timeout: seconds for everything.
    """

    def __init__(
        self,
        registry: WorkerConnections,
        open_socket: Callable[[], Awaitable[trio.SocketStream]],
        label: str,
        exchange_options: ExchangeOptions,
        options: Options,
        timeout: float,
    ) -> None:
        self.label = label
        self.exchange_options = exchange_options
        self.timeout = timeout
        #: What the client waits for, for the TimeoutError; "": messages over UCX.
        self.stage = ""
        #: Whether something other than a trio_ucx listener has answered the last attempt, or ended it at once.
        self.met_other_program = False
        self._registry = registry
        self._options = options
        self._open_socket = open_socket
        self._handshake = Handshake(registry, options, label)
        #: Those of workers that were tried; each is used once.
        self._tried: list[WorkerConnections] = []

    @property
    def remote(self) -> Address:
        """The address to which the last attempt was connected; None if it was not."""
        return self._handshake.remote

    async def run(self) -> Link:
        """Connects, trying one worker after another until one can be used. Returns the open connection.

        Raises:
            TimeoutError: it took longer than ``timeout``.
            OSError: it failed.
            trio.ClosedResourceError: the worker was closed meanwhile.
        """
        link: Link | None = None
        waiting_for = ""
        engine = self._registry.engine
        try:
            with trio.move_on_after(self.timeout) as scope:
                engine.teardown.children[id(self)] = scope.cancel
                link = await self._connect_from_some_worker()
            if scope.cancelled_caught:
                waiting_for = under_way(self._handshake.under_way())
        except OSError:
            engine.check()  # the worker was closed, or broke, meanwhile
            raise
        finally:
            engine.teardown.children.pop(id(self), None)
            if link is None:
                self._handshake.close()
        if link is None:
            engine.check()
            raise TimeoutError(
                errno.ETIMEDOUT,
                f"connecting to {self.label} took longer than {self.timeout:.3g} seconds: "
                f"{self.stage or self._handshake.obstacle}{waiting_for}",
            )
        return link

    async def _connect_from_some_worker(self) -> Link:
        for _ in range(SHARED_WORKERS):
            try:
                return await self._connect(self.exchange_options.isolate)
            except NeedsAnotherWorker:
                self._handshake.close()
        return await self._connect(True)

    async def _connect(self, isolate: bool) -> Link:
        self._handshake = handshake = Handshake(self._registry, self._options, self.label)
        options = self.exchange_options
        self.stage = "the connection was not accepted"
        stream = ControlStream(await self._open_socket())
        exchange = Exchange(is_client=True, software=SOFTWARE, authkey=options.authkey)
        reason = ""
        try:
            set_keepalive(stream.socket, options.keepalive_interval)
            handshake.set_addresses(stream)
            if handshake.local is not None and handshake.local == handshake.remote:
                # The kernel had taken this port for the client's end: TCP connects such a socket with itself.
                raise ConnectionRefusedError(errno.ECONNREFUSED, "nobody listens there")
            await self._exchange(stream, exchange, isolate)
            self.stage = ""
            link: Link = await handshake.registry.engine.waiting.wait(handshake.opened)
            return link
        except ProtocolError as error:
            reason = str(error)
            text = f"cannot connect to {self.label}: {error}"
            if isinstance(error, UnknownProtocol):
                self.met_other_program = True
                raise NotTrioUCX(errno.EPROTO, f"{text}; is it a trio_ucx listener?", self.label) from error
            raise refusal(RefusalCode.NOT_ADMITTED, text, self.label) from error
        except UCXError as error:
            reason = str(error)
            raise ConnectionError(errno.EPROTO, f"cannot connect to {self.label} over UCX: {error}") from error
        except NeedsAnotherWorker as error:
            reason = str(error)
            if exchange.state is ExchangeState.TAKE:
                exchange.again()
            raise
        except OSError as error:
            reason = error.strerror or str(error)
            self.met_other_program = exchange.state is ExchangeState.PREAMBLE
            error = self._named(error)
            raise error from error.__cause__
        finally:
            if handshake.control is not None:
                if reason:
                    handshake.close(Refused(reason))
            else:
                if reason:
                    exchange.refuse(reason)
                stream.close(exchange.data_to_send() if reason else b"")

    def _named(self, error: OSError) -> OSError:
        """Returns the error, with the listener's address and a possible cause in its message."""
        if self.label in str(error):
            return error
        if error.errno == errno.ENOTCONN:  # from getpeername
            error = ConnectionResetError(errno.ECONNRESET, os.strerror(errno.ECONNRESET))
        text = f"connecting to {self.label}: {error.strerror or error}"
        hint = "the listener may have closed, or may not be a trio_ucx listener; see its log"
        if isinstance(error, (ssl.SSLEOFError, ssl.SSLZeroReturnError)):
            hint += "; does it have an ssl_context?"
            error = ConnectionResetError(errno.ECONNRESET, "it ended the connection during the TLS handshake")
        elif isinstance(error, ssl.SSLError):
            _, of_dates = why_tls_failed(error)
            hint = of_dates or (
                "does the listener have an ssl_context? Does each side have a certificate that the other trusts?"
            )
            refused = refusal(RefusalCode.NOT_ADMITTED, f"{text}: {hint}", self.label)
            refused.__cause__ = error
            return refused
        return with_text(error, f"{text}: {hint}")

    async def _exchange(self, stream: ControlStream, exchange: Exchange, isolate: bool) -> None:
        """Runs the exchange, and hands the control socket over.

        Raises:
            ProtocolError: we cannot connect to this server.
            OSError, UCXError: the server refuses, or gave up; UCX cannot reach it.
        """
        options, handshake = self.exchange_options, self._handshake
        if options.ssl_context is not None:
            self.stage = "the TLS handshake did not end; does the listener have an ssl_context?"
            await stream.start_tls(options.ssl_context, is_client=True, server_hostname=options.server_hostname)
        self.stage = "it did not answer; is it a trio_ucx listener, or is its backlog full?"
        if isolate:
            handshake.isolate()
        else:
            handshake.registry = self._registry.for_new_connection(self._tried, handshake.ends)
            self._tried.append(handshake.registry)
        exchange.open(handshake.describe(options.shared_memory))
        event = await handshake.next_event(stream, exchange)
        if isinstance(event, Refused):
            raise handshake.refusal(event)
        assert isinstance(event, Welcomed), event
        handshake.description_arrived(event.peer)
        generation, greet = handshake.choose(event.summary)
        if greet:
            handshake.let_in(exchange.keys)
            handshake.peer_has_keys()
        exchange.take(generation, greet=greet)
        handshake.hand_over(stream, exchange, generation, greet=greet)
