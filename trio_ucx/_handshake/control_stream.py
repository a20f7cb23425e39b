"""The control socket during the exchange: its bytes, with or without TLS, its addresses and its keepalive.

A task reads and writes through a :class:`ControlStream`, which wraps a stream of Trio's. After the exchange the socket
and its TLS state move to ``control_sockets``, which watches all control sockets of a worker with one descriptor.
"""

from __future__ import annotations

import errno
import ipaddress
import select
import socket
import ssl
import struct
import time
from contextlib import suppress

import trio

from .._peer_info import PeerInfo
from .._rules.wire import MAGIC, ProtocolError
from .._util.text import printable
from ..ucp._internal_api import is_own
from .peer_description import PeerDescription

#: Host and port; ``("unix:/path", 0)`` for a Unix socket, or None where that has no name.
Address = tuple[str, int] | None

#: Unanswered probes after which the peer's host has vanished: where the interval has the seconds for so many, and at
#: least. Of one or two packets each may be lost on a network that works.
PROBES, LEAST_PROBES = 10, 3
#: Bytes that are read at once. OpenSSL needs a millisecond for the KeyUpdate messages that fit into them.
CHUNK = 2048
#: Bytes of TLS records that are accepted from a peer during the TLS handshake. An honest peer sends a few certificates.
#: OpenSSL keeps them until the connection ends, and needs 11 times their size if they are many small ones.
MAX_TLS_HANDSHAKE_BYTES = 2**15
#: Bytes that are accepted in the whole life of a connection. An honest peer sends its worker addresses
#: (``exchange.MAX_FRAME``), and little else.
MAX_TLS_BYTES = 2**19
#: The first bytes of a TLS client: a handshake record.
_TLS_RECORD = b"\x16\x03"
#: OpenSSL's codes for a certificate that is not valid yet (X509_V_ERR_CERT_NOT_YET_VALID), or not any more.
_WRONG_DATES = (9, 10)
#: The kernel's struct ucred.
_CREDENTIALS = struct.Struct("=iII")


def why_tls_failed(error: ssl.SSLError) -> tuple[str, str]:
    """Returns why a TLS handshake failed, and what to look at if that is about a certificate's dates (otherwise "")."""
    reason, advice = getattr(error, "reason", None) or str(error), ""
    if isinstance(error, ssl.SSLCertVerificationError):
        reason = error.verify_message
        if error.verify_code in _WRONG_DATES:
            now = time.strftime("%Y-%m-%d %H:%M", time.gmtime())
            advice = f"is this machine's clock right? It says {now} UTC, and the certificate is not valid then"
    elif "CERTIFICATE_EXPIRED" in reason:
        advice = "is the clock of the peer's machine right? By it, the certificate of this side has expired"
    elif "ALERT_BAD_CERTIFICATE" in reason:
        advice = (
            "is the clock of the peer's machine right? By it, the certificate of this side is not valid yet, or it "
            "does not have the name that the peer wants"
        )
    return reason, advice


class TLS:
    """One side of a TLS connection, without I/O: received bytes go in, bytes to send come out.

    It accepts a limited number of bytes, which bounds what OpenSSL keeps: received data that it has not processed, and
    answers that are not sent.
    """

    def __init__(self, context: ssl.SSLContext, *, is_client: bool, server_hostname: str | None) -> None:
        self.incoming = ssl.MemoryBIO()
        self.outgoing = ssl.MemoryBIO()
        self.object = context.wrap_bio(
            self.incoming, self.outgoing, server_side=not is_client, server_hostname=server_hostname
        )
        self._received, self._most = 0, MAX_TLS_HANDSHAKE_BYTES

    def do_handshake(self) -> None:
        """Goes on with the TLS handshake.

        Raises:
            ssl.SSLWantReadError: it needs more bytes.
            ssl.SSLError: it failed.
        """
        self.object.do_handshake()
        self._most = MAX_TLS_BYTES

    def receive(self, data: bytes) -> None:
        """Adds bytes from the peer; :meth:`decrypt` returns what they contain.

        Raises:
            ssl.SSLError: it sent more than is accepted.
        """
        self._received += len(data)
        if self._received > self._most:
            raise ssl.SSLError(ssl.SSL_ERROR_SSL, f"it sent more than {self._most} bytes of TLS records")
        self.incoming.write(data)

    def encrypt(self, data: bytes) -> bytes:
        if data:
            self.object.write(data)
        return self.outgoing.read()

    def decrypt(self, data: bytes) -> bytes:
        """Returns what the peer sent; b"" while a record is incomplete.

        Raises:
            ssl.SSLError: the data were changed on the way, the peer has ended the TLS connection, or it sent more than
                is accepted.
        """
        self.receive(data)
        plain = bytearray()
        while True:
            try:
                chunk = self.object.read(CHUNK)
            except ssl.SSLWantReadError:
                return bytes(plain)
            if not chunk:  # close_notify: OpenSSL reads nothing after it
                raise ssl.SSLZeroReturnError(ssl.SSL_ERROR_ZERO_RETURN, "the peer has ended the TLS connection")
            plain += chunk


class ControlStream:
    """A control socket during the exchange."""

    def __init__(self, stream: trio.SocketStream) -> None:
        self._stream = stream
        self.socket = stream.socket
        self.tls: TLS | None = None
        #: Whether the peer has sent anything.
        self.peer_has_sent = False
        #: Whether we have sent anything, or have begun to. A server sends nothing before the client's first message has
        #: arrived and is right: the preamble, or a TLS ClientHello.
        self.has_answered = False
        #: Whether a send is under way, or was cut off, so that nothing that follows could be understood.
        self.is_sending = False
        #: What a send was to send that was cancelled before it began.
        self._unsent = b""

    @property
    def has_unread(self) -> bool:
        """True if the peer has sent something that we have not read yet, or has closed its end."""
        poll = select.poll()
        poll.register(self.socket.fileno(), select.POLLIN)
        return bool(poll.poll(0))

    async def start_tls(self, context: ssl.SSLContext, *, is_client: bool, server_hostname: str | None) -> None:
        """Does the TLS handshake.

        Raises:
            ssl.SSLError: it failed, because of a certificate for instance.
            ProtocolError: the client does not speak TLS, has shown no certificate, or has resumed a TLS session.
            OSError: the socket broke.
        """
        first = b""
        if not is_client:
            first = await self._receive_raw()
            if first and MAGIC.startswith(first[: len(MAGIC)]):
                raise ProtocolError("this listener wants TLS: connect with ssl_context=")
            if not _TLS_RECORD.startswith(first[:2]):
                raise ProtocolError(f"the client does not speak TLS: its first bytes were {first[:24]!r}")
        self.tls = tls = TLS(context, is_client=is_client, server_hostname=server_hostname)
        tls.receive(first)
        while True:
            try:
                tls.do_handshake()
            except ssl.SSLWantReadError:
                await self._send_raw(tls.outgoing.read())
                data = await self._receive_raw()
                if not data:
                    raise ssl.SSLEOFError(
                        ssl.SSL_ERROR_EOF, "the peer closed the connection during the TLS handshake"
                    ) from None
                tls.receive(data)
            else:
                await self._send_raw(tls.outgoing.read())
                break
        # OpenSSL verifies no certificate again when a session is resumed: it may have expired, or been revoked.
        if not is_client and context.verify_mode != ssl.CERT_NONE and tls.object.session_reused:
            raise ProtocolError(
                "this listener verifies certificates, and a resumed TLS session skips that: connect with a new session"
            )
        # A context with post_handshake_auth requires a certificate, but does not ask for it in the handshake.
        if not is_client and context.verify_mode == ssl.CERT_REQUIRED and tls.object.getpeercert(True) is None:
            raise ProtocolError("this listener requires a certificate: load one into the client's ssl_context")

    async def send_all(self, data: bytes) -> None:
        await self._send_raw(data if self.tls is None else self.tls.encrypt(data))

    async def receive_some(self) -> bytes:
        """The next bytes; b"" at the end.

        Raises:
            ssl.SSLError, OSError: the connection broke.
        """
        if self.tls is None:
            return await self._receive_raw()
        plain = self.tls.decrypt(b"")  # what arrived together with the end of the TLS handshake
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
        self._unsent = data
        await trio.lowlevel.checkpoint_if_cancelled()
        self._unsent = b""
        self.has_answered = self.is_sending = True
        try:
            await self._stream.send_all(data)
        except trio.BrokenResourceError as error:
            raise _as_os_error(error) from None
        self.is_sending = False

    async def _receive_raw(self) -> bytes:
        try:
            data = bytes(await self._stream.receive_some(CHUNK))
        except trio.BrokenResourceError as error:
            raise _as_os_error(error) from None
        self.peer_has_sent = self.peer_has_sent or bool(data)
        return data

    def detach(self) -> socket.socket:
        """Returns the bare, non-blocking socket, which belongs to the caller from now on."""
        family, kind, protocol = self.socket.family, self.socket.type, self.socket.proto
        bare = socket.socket(family, kind, protocol, fileno=self.socket.detach())
        bare.setblocking(False)
        return bare

    def close(self, last: bytes = b"") -> None:
        """Closes the socket, unless it was detached.

        Args:
            last: sent before, as far as the socket takes it at once, after what an earlier send was cancelled before
                it began. (So is a TLS alert that says why TLS failed.) Not if an earlier send was cut off.
        """
        tls, self.tls = self.tls, None  # frees the buffers at once, even if this object lives on
        if self.socket.fileno() < 0:
            return
        if tls is not None:
            try:
                last = tls.encrypt(last)
            except ssl.SSLError:  # the TLS handshake did not end
                last = tls.outgoing.read()
        last = self._unsent + last
        with self.detach() as bare, suppress(OSError):
            if last and not self.is_sending:
                bare.send(last)


def _as_os_error(error: trio.BrokenResourceError) -> OSError:
    if isinstance(error.__cause__, OSError):
        return error.__cause__
    return ConnectionResetError(errno.ECONNRESET, str(error))


def local_address(control: trio.socket.SocketType) -> Address:
    """The address of our end of a control socket."""
    return _address(control.getsockname())


def remote_address(control: trio.socket.SocketType) -> Address:
    """The address of the peer's end of a control socket. A peer chooses the path that its Unix socket is bound to."""
    name = control.getpeername()
    return _address(printable(name) if isinstance(name, str) else name)


def _address(name: object) -> Address:
    if isinstance(name, tuple):
        return name[0], name[1]
    return (f"unix:{name}", 0) if isinstance(name, str) and name else None


def peer_credentials(control: trio.socket.SocketType | socket.socket) -> tuple[int, int, int]:
    """The pid, uid and gid of the process at the other end of a Unix socket."""
    pid, uid, gid = _CREDENTIALS.unpack(control.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size))
    return pid, uid, gid


def identify(
    control: trio.socket.SocketType | socket.socket, tls: TLS | None, peer: PeerDescription, address: Address
) -> PeerInfo:
    """Returns who the peer at the other end of a control socket is."""
    pid, uid, gid = peer_credentials(control) if control.family == socket.AF_UNIX else (None, None, None)
    return PeerInfo(
        certificate=(tls and tls.object.getpeercert()) or None,
        pid=pid,
        uid=uid,
        gid=gid,
        address=address,
        stated_host=peer.host_name,
        stated_pid=peer.worker.process.pid,
        stated_software=peer.software,
    )


def source_of(control: trio.socket.SocketType) -> bytes | int:
    """The source of a client: its IPv4 address, its IPv6 /64 network, or its user."""
    if control.family == socket.AF_UNIX:
        return peer_credentials(control)[1]
    ip = ipaddress.ip_address(control.getpeername()[0].partition("%")[0])
    if isinstance(ip, ipaddress.IPv6Address):
        return ip.packed[:8] if ip.ipv4_mapped is None else ip.ipv4_mapped.packed
    return ip.packed


def set_keepalive(control: trio.socket.SocketType, interval: float) -> None:
    """Makes our kernel report a peer that has vanished.

    The kernel probes an idle connection after ``interval`` seconds. It ends the connection when the peer's kernel has
    not answered a probe, or acknowledged data, for twice as long. The peer's kernel answers also while its process is
    stopped or busy. At least three probes are sent: a network that loses some packets is no reason to give up.

    Args:
        interval: seconds, rounded to whole ones, at least 1; 0, or 30,000 and more, switches keepalive off.
    """
    if control.family not in (socket.AF_INET, socket.AF_INET6) or not 0 < interval < 30_000:
        return
    idle = max(1, round(interval))
    between = max(1, idle // PROBES)
    silence = max(2 * interval, idle + LEAST_PROBES * between)
    control.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    control.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, idle)
    control.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, between)
    control.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, PROBES)  # not asked while there is TCP_USER_TIMEOUT
    control.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, int(silence * 1000))


def leads_to_this_machine(control: trio.socket.SocketType) -> bool:
    """True if the peer's end of a socket is on this machine, in the same network namespace."""
    if control.family == socket.AF_UNIX:
        return True
    peer, own = control.getpeername(), control.getsockname()
    return bool(peer[0] == own[0]) or is_own(peer[0].partition("%")[0], *peer[3:])
