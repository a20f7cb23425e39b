"""The bytes of the control socket, with or without TLS.

During the exchange a task reads and writes by a :class:`ControlStream`, which wraps a stream of Trio's. Afterwards the
socket and its TLS state move to ``control.py``, which watches all control sockets of a worker with one descriptor.
"""

from __future__ import annotations

import socket
import ssl

import trio

from .._wire import MAGIC, ProtocolError

_CHUNK = 65536
#: The first bytes of a TLS client: a handshake record.
_TLS_RECORD = b"\x16\x03"


class TLS:
    """One side of a TLS connection, without I/O: what was received goes in, what is to be sent comes out."""

    def __init__(self, context: ssl.SSLContext, *, is_client: bool, server_hostname: str | None) -> None:
        self.incoming = ssl.MemoryBIO()
        self.outgoing = ssl.MemoryBIO()
        self.object = context.wrap_bio(
            self.incoming, self.outgoing, server_side=not is_client, server_hostname=server_hostname
        )

    def encrypt(self, data: bytes) -> bytes:
        if data:
            self.object.write(data)
        return self.outgoing.read()

    def decrypt(self, data: bytes) -> bytes:
        """What the peer sent; b"" when that is not complete yet.

        Raises:
            ssl.SSLError: it is not what the peer encrypted; or the peer has ended the TLS connection.
        """
        self.incoming.write(data)
        plain = bytearray()
        while True:
            try:
                chunk = self.object.read(_CHUNK)
            except ssl.SSLWantReadError:
                return bytes(plain)
            if not chunk:
                return bytes(plain)
            plain += chunk


class ControlStream:
    """A control socket while the exchange goes on."""

    def __init__(self, stream: trio.SocketStream) -> None:
        self._stream = stream
        self.socket = stream.socket
        self.tls: TLS | None = None
        self._begin = b""

    async def start_tls(self, context: ssl.SSLContext, *, is_client: bool, server_hostname: str | None) -> None:
        """Does the TLS handshake.

        Raises:
            ssl.SSLError: it failed; certificates, say.
            ProtocolError: the client does not speak TLS.
            OSError: the socket broke.
        """
        if not is_client:
            self._begin = await self._receive_raw()
            if self._begin and MAGIC.startswith(self._begin[: len(MAGIC)]):
                raise ProtocolError("this listener wants TLS: connect with ssl_context=")
            if not _TLS_RECORD.startswith(self._begin[:2]):
                raise ProtocolError(f"the client does not speak TLS: it began with {self._begin[:24]!r}")
        self.tls = tls = TLS(context, is_client=is_client, server_hostname=server_hostname)
        if self._begin:
            tls.incoming.write(self._begin)
            self._begin = b""
        while True:
            try:
                tls.object.do_handshake()
            except ssl.SSLWantReadError:
                await self._send_raw(tls.outgoing.read())
                data = await self._receive_raw()
                if not data:
                    raise ssl.SSLEOFError(
                        ssl.SSL_ERROR_EOF, "the peer ended the connection in the TLS handshake"
                    ) from None
                tls.incoming.write(data)
            except ssl.SSLError:
                with trio.CancelScope(deadline=trio.current_time() + 1):
                    await self._send_raw(tls.outgoing.read())  # the alert that says why
                raise
            else:
                await self._send_raw(tls.outgoing.read())
                return

    async def send_all(self, data: bytes) -> None:
        await self._send_raw(data if self.tls is None else self.tls.encrypt(data))

    async def receive_some(self) -> bytes:
        """The next bytes; b"" at the end.

        Raises:
            ssl.SSLError, OSError: the connection broke.
        """
        if self.tls is None:
            return await self._receive_raw()
        plain = self.tls.decrypt(b"")  # what came along with the end of the TLS handshake
        while not plain:
            data = await self._receive_raw()
            if not data:
                return b""
            plain = self.tls.decrypt(data)
            await self._send_raw(self.tls.outgoing.read())
        return plain

    async def _send_raw(self, data: bytes) -> None:
        if not data:
            return
        try:
            await self._stream.send_all(data)
        except trio.BrokenResourceError as error:
            raise _as_os_error(error) from None

    async def _receive_raw(self) -> bytes:
        try:
            return bytes(await self._stream.receive_some(_CHUNK))
        except trio.BrokenResourceError as error:
            raise _as_os_error(error) from None

    def detach(self) -> socket.socket:
        """The bare socket, non-blocking, which is the caller's from now on."""
        family, kind, protocol = self.socket.family, self.socket.type, self.socket.proto
        bare = socket.socket(family, kind, protocol, fileno=self.socket.detach())
        bare.setblocking(False)
        return bare

    def close(self) -> None:
        """Closes the socket, unless it was detached."""
        self.socket.close()


def _as_os_error(error: trio.BrokenResourceError) -> OSError:
    return error.__cause__ if isinstance(error.__cause__, OSError) else ConnectionError(str(error))


def keep_alive(control: trio.socket.SocketType, interval: float) -> None:
    """Lets the kernel notice a peer that vanished, on the side that calls this.

    An idle connection is probed after ``interval`` seconds and given up when the peer's kernel has not answered for
    twice as long as that; so is one on which something sent was not acknowledged. A peer's kernel answers for a process
    that is stopped or busy.

    Args:
        interval: seconds, rounded to whole ones, at least 1; 0, or 30,000 and more, switches this off.
    """
    if control.family not in (socket.AF_INET, socket.AF_INET6) or not 0 < interval < 30_000:
        return
    idle = max(1, round(interval))
    control.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    control.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, idle)
    control.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, max(1, idle // 4))
    control.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, 4)
    control.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, int(2 * max(1.0, interval) * 1000))


def leads_to_this_machine(control: trio.socket.SocketType) -> bool:
    """Whether the other end of a socket is on this machine, in the same network namespace."""
    if control.family == socket.AF_UNIX:
        return True
    peer, own = control.getpeername()[0], control.getsockname()[0]
    if peer == own:
        return True
    with socket.socket(control.family, socket.SOCK_DGRAM) as probe:
        try:
            probe.bind((peer, 0))  # only addresses of this machine can be bound
        except OSError:
            return False
    return True
