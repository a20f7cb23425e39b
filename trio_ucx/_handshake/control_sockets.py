"""Watches the control sockets of a worker, from TAKE on.

Until the connection is open they carry the rest of the exchange. After that they report that the peer aborted, ended or
vanished, whatever the transport is: the kernel closes the sockets of a process that ends, and probes the host of a
silent peer. All control sockets of a worker are in one epoll, so they need one descriptor in Trio's loop and one task.
"""

from __future__ import annotations

import select
import socket
import ssl
from collections.abc import Callable

import trio

from .._peer_info import PeerInfo
from .._rules.life import Loss
from .._rules.wire import ProtocolError
from .._util.contained import contained, ignoring_late_run
from .._util.live_handles import live_handles
from ..ucp._internal_api import Engine
from .control_stream import CHUNK, TLS, Address, identify
from .exchange import Event, Exchange, Refused
from .peer_description import PeerDescription

_EVENTS = 64


class ControlSocket:
    """One connection's control socket.

    Args:
        on_event: called with each event from the peer.
        on_lost: called once, after the last event.
    """

    def __init__(
        self,
        sockets: ControlSockets,
        bare: socket.socket,
        tls: TLS | None,
        exchange: Exchange,
        on_event: Callable[[Event], None],
        on_lost: Callable[[Loss], None],
    ) -> None:
        self.exchange = exchange
        self.on_event = on_event
        self.on_lost = on_lost
        self._sockets = sockets
        self._socket: socket.socket | None = bare
        self._tls = tls
        sockets.add(bare.fileno(), self)
        live_handles.opened("control socket")

    def start(self) -> None:
        """Processes the bytes that the last read of the exchange returned beyond the exchange."""
        data = b""
        if self._tls is not None:
            try:
                data = self._tls.decrypt(b"")
            except ssl.SSLError as error:
                self._report_loss(Loss(f"its control connection broke: {error}"))
                return
        self._process(data)

    def look(self) -> None:
        """Handles what has arrived, now."""
        if self._socket is None:
            return
        try:
            data = self._socket.recv(CHUNK)
        except BlockingIOError:
            return
        except OSError as error:
            self._report_loss(_loss(error))
            return
        if not data:
            self._report_loss(Loss("its control connection ended"))
            return
        if self._tls is not None:
            try:
                data = self._tls.decrypt(data)
            except ssl.SSLError as error:
                self._report_loss(Loss(f"its control connection ended: {error}"))
                return
        self._process(data)

    def _process(self, data: bytes) -> None:
        self.exchange.receive_data(data)
        try:
            while self._socket is not None and (event := self.exchange.next_event()) is not None:
                self.on_event(event)
        except ProtocolError as error:
            self.flush()
            self._report_loss(Loss(f"it violated the protocol: {error}"))

    def _report_loss(self, loss: Loss) -> None:
        self.close()
        self.on_lost(loss)
        self._sockets.peer_may_have_died()

    def identify(self, peer: PeerDescription, address: Address) -> PeerInfo:
        """Returns who the peer is."""
        assert self._socket is not None
        return identify(self._socket, self._tls, peer, address)

    def internal_error(self, error: BaseException) -> None:
        """An exception in our own code while the socket was read: ends this connection only. Never raises."""
        contained(self._report_loss, Loss(f"an internal error of trio_ucx: {error!r}", cause=error))

    def flush(self) -> None:
        """Sends what the exchange has to send. So little is sent on this socket that its send buffer never fills up."""
        data = self.exchange.data_to_send()
        if self._socket is None or not data:
            return
        try:
            self._socket.send(data if self._tls is None else self._tls.encrypt(data))
        except (OSError, ssl.SSLError):
            pass  # the peer has gone, which the next read of the socket reports

    def abort(self, sent: int = 0) -> None:
        """Tells the peer that this side closes by force, after so many messages over UCX, and closes the socket."""
        if self._socket is not None:
            self.exchange.abort(sent)
            self.flush()
            self.close()

    def refuse(self, refusal: Refused) -> None:
        """Tells the peer why there will be no connection, and closes the socket."""
        if self._socket is not None:
            self.exchange.refuse(refusal.reason, refusal.why)
            self.flush()
            self.close()

    def close(self) -> None:
        bare, self._socket = self._socket, None
        self._tls = None  # frees the buffers at once, even if this object lives on
        self.exchange.drop_data()
        if bare is not None:
            self._sockets.remove(bare.fileno())
            bare.close()
            live_handles.closed("control socket")

    @property
    def closed(self) -> bool:
        return self._socket is None


def _loss(error: OSError) -> Loss:
    if isinstance(error, TimeoutError):
        return Loss("its host no longer answers", vanished=True)
    return Loss(f"its control connection broke: {error.strerror or error}")


class ControlSockets:
    """The control sockets of one worker."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._epoll: select.epoll | None = select.epoll()
        self._sockets: dict[int, ControlSocket] = {}
        engine.run.spawn(self._run, f"trio_ucx control sockets (efd {engine.efd})")

    def add(self, descriptor: int, control: ControlSocket) -> None:
        assert self._epoll is not None
        self._epoll.register(descriptor, select.EPOLLIN)
        self._sockets[descriptor] = control

    def remove(self, descriptor: int) -> None:
        self._sockets.pop(descriptor, None)
        if self._epoll is not None:
            self._epoll.unregister(descriptor)

    def peer_may_have_died(self) -> None:
        self._engine.receive_queue.suspect()

    async def _run(self) -> None:
        try:
            while self._epoll is not None and self._engine.broken is None:
                await trio.lowlevel.wait_readable(self._epoll.fileno())
                self._read_ready()
        except trio.ClosedResourceError:
            pass

    def _read_ready(self) -> None:
        if self._epoll is None or not self._engine.usable:
            return
        ready = self._epoll.poll(0, _EVENTS)
        # First deliver what the peers had sent over UCX before.
        self._engine.reap()
        for descriptor, _ in ready:
            control = self._sockets.get(descriptor)
            if control is not None:
                try:
                    control.look()
                except Exception as error:
                    control.internal_error(error)

    def close(self) -> None:
        """Closes all control sockets, because the worker is being closed."""
        for control in list(self._sockets.values()):
            control.close()
        epoll, self._epoll = self._epoll, None
        if epoll is not None:
            with ignoring_late_run():
                trio.lowlevel.notify_closing(epoll.fileno())
            epoll.close()
