"""The exchange on the control socket. A pure state machine for each side: bytes in, events and bytes out.

::

    client                                         server
    PREAMBLE magic, version, flags, nonce    ->
                                             <-    PREAMBLE, and with an authkey PROOF
    OPEN     the client's peer description   ->
             and key
                                             <-    WELCOME  the server's, and its endpoint summary
    TAKE     the generation of the endpoint  ->
                                            [<-    AGAIN    it cannot be used: connect from another worker]

Each exchange makes a pair of keys, with which each side's UCX can connect to the other's (``ucp/_quirks/key_gate.py``).
With an authkey both sides derive the pair from it and from the nonces. Otherwise OPEN and WELCOME contain a random key.

Without an authkey the client does not wait for the server's PREAMBLE. The *endpoint summary* says which endpoints the
server's worker has made to the client's, and the client chooses one (``ucp/_engine/endpoints_to_worker.py``); if there
is none, it sends AGAIN instead of TAKE, and connects from another worker. If no message has come through the chosen
pair of endpoints yet, each side sends HELLO over UCX, and waits for the other's (``handshake.py``). Otherwise the
connection is open for the client when it has sent TAKE, and for the server when that arrives. REFUSE, with a reason, is
allowed until the connection is open, and ABORT from TAKE on. ``wire.md`` has the layout.
"""

from __future__ import annotations

import enum
import hashlib
import hmac
import secrets
import struct
from typing import ClassVar

import attrs

from .._rules.wire import MAGIC, MAX_GENERATION, VERSION, ProtocolError, RefusalCode
from .._util.hidden import HiddenBytes
from .._util.text import printable
from ..ucp._internal_api import EndpointSummary, KeyPair, new_key
from .peer_description import PeerDescription

#: Magic, version, flags, nonce. It is the same in every version, like REFUSE, so that a peer of another version can be
#: refused.
_PREAMBLE = struct.Struct("<8sHH32s")
#: The length of the rest of the frame, the kind included, and the kind.
_HEAD = struct.Struct("<IB")
_SENT = struct.Struct("<Q")
#: How many endpoints were made, the generation of the shared one, and whether something has arrived over that one.
_SUMMARY = struct.Struct("<HHB")
#: The generation, and whether both sides send HELLO.
_TAKE = struct.Struct("<HB")
_CODE = hashlib.sha256().digest_size

#: The longest frame. (Worker addresses take some kilobytes on machines with many RDMA ports.)
MAX_FRAME = 1 << 16
#: The greatest count of sent messages that ABORT may contain.
MAX_SENT = 2**62
#: The flag of a preamble: its sender has an authkey.
WITH_AUTHKEY = 1


class FrameKind(enum.IntEnum):
    REFUSE = 1
    PROOF = 2
    OPEN = 3
    WELCOME = 4
    AGAIN = 5
    TAKE = 7
    ABORT = 8


class ExchangeState(enum.Enum):
    """Which frame may come next."""

    PREAMBLE = enum.auto()  # the peer's preamble
    PROOF = enum.auto()
    OPEN = enum.auto()
    WELCOME = enum.auto()
    TAKE = enum.auto()  # the client chooses the endpoint
    GREETING = enum.auto()  # both sides get the endpoint, and may greet each other over UCX
    OPENED = enum.auto()  # the connection is open
    ENDED = enum.auto()  # refused, aborted or broken


#: Which frames may come, by side (whether it is the client) and state.
EXPECTED: dict[tuple[bool, ExchangeState], frozenset[FrameKind]] = {
    (True, ExchangeState.PROOF): frozenset({FrameKind.REFUSE, FrameKind.PROOF}),
    (True, ExchangeState.WELCOME): frozenset({FrameKind.REFUSE, FrameKind.WELCOME}),
    (True, ExchangeState.GREETING): frozenset({FrameKind.REFUSE, FrameKind.AGAIN, FrameKind.ABORT}),
    # The connection opens first for the client. The listener may still close, or its connect_timeout may end.
    (True, ExchangeState.OPENED): frozenset({FrameKind.REFUSE, FrameKind.AGAIN, FrameKind.ABORT}),
    (False, ExchangeState.OPEN): frozenset({FrameKind.REFUSE, FrameKind.OPEN}),
    (False, ExchangeState.TAKE): frozenset({FrameKind.REFUSE, FrameKind.TAKE, FrameKind.AGAIN}),
    (False, ExchangeState.GREETING): frozenset({FrameKind.REFUSE, FrameKind.ABORT}),
    (False, ExchangeState.OPENED): frozenset({FrameKind.ABORT}),
}


@attrs.frozen
class Opened:
    """OPEN arrived. Answer by :meth:`Exchange.welcome` or :meth:`Exchange.refuse`."""

    peer: PeerDescription


@attrs.frozen
class Welcomed:
    """WELCOME arrived. Answer by :meth:`Exchange.take` or :meth:`Exchange.refuse`."""

    peer: PeerDescription
    summary: EndpointSummary


@attrs.frozen
class Taken:
    """TAKE arrived. Answer by :meth:`Exchange.again` or :meth:`Exchange.refuse`, or get the endpoint.

    Attributes:
        generation: of the endpoint that both sides use.
        greet: whether both sides send HELLO.
    """

    generation: int
    greet: bool


@attrs.frozen
class Again:
    """AGAIN arrived: there is no endpoint that both workers can use, so that the client connects from another one."""

    reason: ClassVar[str] = "its worker has lost the endpoint; connect again"


@attrs.frozen
class Refused:
    """REFUSE arrived, or is to be sent."""

    reason: str
    why: RefusalCode = RefusalCode.OTHER


@attrs.frozen
class Aborted:
    """ABORT arrived.

    Attributes:
        sent: how many messages the peer had sent over UCX. Some may arrive after ABORT.
    """

    sent: int = 0


Event = Opened | Welcomed | Taken | Again | Refused | Aborted


class UnknownProtocol(ProtocolError):
    """The first bytes are not those of a trio_ucx peer.

    Attributes:
        first_bytes: what the peer has sent.
    """

    def __init__(self, first_bytes: bytes, why: str = "") -> None:
        super().__init__(f"this is not a trio_ucx peer: {why or f'its first bytes were {first_bytes[:24]!r}'}")
        self.first_bytes = first_bytes


class Refusal(ProtocolError):
    """The peer must be refused, and told the reason (:meth:`Exchange.refuse`).

    Attributes:
        kind: what the log counts it as.
    """

    why: ClassVar[RefusalCode] = RefusalCode.NOT_ADMITTED
    kind = "refused"


class NoRoom(Refusal):
    """The listener has no room for the client."""

    why = RefusalCode.FULL


class Draining(Refusal):
    """The server shuts down."""

    why = RefusalCode.DRAINING

    def __init__(self) -> None:
        super().__init__("the server is shutting down: connect to another one, or try again later")


class ProtectedMode(Refusal):
    """Protected mode refuses the client: it is not one of this user, and the listener demands no credentials.

    Args:
        kind: why the client does not count as one of this user, for the log.
        detail: more about it, for the client.
    """

    def __init__(self, kind: str, detail: str = "") -> None:
        super().__init__(
            "protected mode: this listener demands no credentials, and therefore lets in only clients of its own user, "
            f"on its own machine. This client is refused because {kind}{detail}. Give both sides the same authkey=, or "
            "the listener an ssl_context= with verify_mode=ssl.CERT_REQUIRED and each client a certificate; with "
            "allow_anyone=True the listener lets in every client that can reach it"
        )
        self.kind = kind


class AdmitFailed(Refusal):
    """The program's ``admit=`` has raised, from the exception in ``__cause__``."""

    kind = "its admit= failed"

    def __init__(self) -> None:
        super().__init__("the listener's admit= function failed, and its log says why")


class Exchange:
    """One side of the exchange.

    Args:
        is_client: which side.
        software: the releases of trio_ucx and UCX, for error messages.
        authkey: the secret that both sides must know, or None.

    Attributes:
        protected: the error by which this server refuses the client right after its preamble (protected mode), or None.
    """

    def __init__(self, *, is_client: bool, software: str, authkey: bytes | None) -> None:
        self.is_client = is_client
        self.state = ExchangeState.PREAMBLE
        self.protected: ProtectedMode | None = None
        self._software = software
        # Hashed, because HMAC treats keys that differ only in trailing zero bytes as equal.
        self._authkey = None if authkey is None else hashlib.sha256(authkey).digest()
        self._buffer = bytearray()
        self._out = bytearray()
        self._preamble = b""
        self._transcript = hashlib.sha256()
        self._offered: PeerDescription | None = None
        #: The key that this side states; None if the pair is derived from the authkey.
        self._stated_key = new_key() if authkey is None else None
        self._keys: KeyPair | None = None
        if is_client:
            self._send_preamble()

    # ---- sending ----

    def data_to_send(self) -> bytes:
        """Returns the bytes to send to the peer now, each once."""
        data = bytes(self._out)
        self._out.clear()
        return data

    def _send_preamble(self) -> None:
        flags = WITH_AUTHKEY if self._authkey is not None else 0
        self._preamble = preamble = _PREAMBLE.pack(MAGIC, VERSION, flags, secrets.token_bytes(32))
        self._out += preamble
        self._transcript.update(preamble)

    def _send(self, kind: FrameKind, body: bytes = b"") -> None:
        coded = self._authkey is not None and kind not in (FrameKind.REFUSE, FrameKind.ABORT)
        frame = _HEAD.pack(1 + len(body) + (_CODE if coded else 0), kind) + body
        self._transcript.update(frame)
        if coded:
            code = self._code(self.is_client)
            self._transcript.update(code)
            frame += code
        self._out += frame

    @property
    def keys(self) -> KeyPair:
        """The keys with which each side's UCX can connect to the other's, once the peer's description has arrived."""
        assert self._keys is not None
        return self._keys

    def _derive_keys(self) -> None:
        """Makes the pair from the authkey, after both preambles."""
        if self._authkey is not None:
            preambles = self._transcript.digest()
            client, server = (
                hmac.digest(self._authkey, b"trio_ucx key of the " + side + preambles, "sha256")
                for side in (b"client ", b"server ")
            )
            self._keys = KeyPair(client, server) if self.is_client else KeyPair(server, client)

    def _code(self, from_client: bool) -> bytes:
        assert self._authkey is not None
        role = b"trio_ucx client " if from_client else b"trio_ucx server "
        return hmac.digest(self._authkey, role + self._transcript.digest(), "sha256")

    def open(self, description: PeerDescription) -> None:
        """For the client: sends our peer description.

        With an authkey, it is sent only after the server has proved that it knows the key.
        """
        assert self.is_client
        self._offered = description
        if self._authkey is None:
            self._send_open()

    def _send_open(self) -> None:
        assert self._offered is not None
        self._send(FrameKind.OPEN, (self._stated_key or b"") + self._offered.encode())

    def welcome(self, description: PeerDescription, summary: EndpointSummary) -> None:
        """For the server: answers OPEN."""
        numbers = _SUMMARY.pack(summary.made, summary.shared, summary.proven)
        self._send(FrameKind.WELCOME, numbers + (self._stated_key or b"") + description.encode())
        self.state = ExchangeState.TAKE

    def take(self, generation: int, *, greet: bool) -> None:
        """For the client: says which endpoint both sides use, and whether they send HELLO."""
        self._send(FrameKind.TAKE, _TAKE.pack(generation, greet))
        self.state = ExchangeState.GREETING

    def again(self) -> None:
        """Says that there is no endpoint that both workers can use, and ends. Ended already: no effect."""
        if self.state is ExchangeState.ENDED:
            return
        self._send(FrameKind.AGAIN)
        self.state = ExchangeState.ENDED

    def refuse(self, reason: str, why: RefusalCode = RefusalCode.OTHER) -> None:
        """Sends the reason why there will be no connection, and ends."""
        if self.state in (ExchangeState.ENDED, ExchangeState.OPENED):
            return
        if not self.is_client and self.state is ExchangeState.PREAMBLE:
            self._send_preamble()
        self._send(FrameKind.REFUSE, bytes([why]) + reason.encode(errors="replace")[:1000])
        self.state = ExchangeState.ENDED

    def mark_opened(self) -> None:
        """Marks the connection as open for this side."""
        self.state = ExchangeState.OPENED

    def abort(self, sent: int = 0) -> None:
        """Sends ABORT: this side closes by force, after ``sent`` messages over UCX."""
        if self.state in (ExchangeState.GREETING, ExchangeState.OPENED):
            self._send(FrameKind.ABORT, _SENT.pack(sent))
        self.state = ExchangeState.ENDED

    # ---- receiving ----

    def receive_data(self, data: bytes) -> None:
        """Adds bytes from the peer; :meth:`next_event` decodes them."""
        self._buffer += data

    def drop_data(self) -> None:
        """Drops what was received and not decoded."""
        self._buffer.clear()

    def next_event(self) -> Event | None:
        """Returns the peer's next event, or None when more bytes are needed. Answer each before asking for the next.

        Raises:
            ProtocolError: the peer violates the protocol, or must be refused. The exchange has ended.
        """
        try:
            while self.state is not ExchangeState.ENDED:
                if self.state is ExchangeState.PREAMBLE:
                    if not self._receive_preamble():
                        return None
                    continue
                frame = self._next_frame()
                if frame is None:
                    return None
                event = self._receive_frame(*frame)
                if event is not None:
                    return event
        except ProtocolError as error:
            if isinstance(error, Refusal):
                self.refuse(str(error), error.why)
            self.state = ExchangeState.ENDED
            raise
        return None

    def _receive_preamble(self) -> bool:
        begin = bytes(self._buffer[: len(MAGIC)])
        if begin != MAGIC[: len(begin)]:
            raise UnknownProtocol(bytes(self._buffer))
        if len(self._buffer) < _PREAMBLE.size:
            return False
        preamble = bytes(self._buffer[: _PREAMBLE.size])
        del self._buffer[: _PREAMBLE.size]
        if preamble == self._preamble:
            raise UnknownProtocol(preamble, "it sends back what it gets")
        _, version, flags, _ = _PREAMBLE.unpack(preamble)
        self._transcript.update(preamble)
        if not self.is_client:
            self._send_preamble()
        self._derive_keys()
        # Now, so that REFUSE sends no second preamble.
        self.state = ExchangeState.PROOF if self.is_client else ExchangeState.OPEN
        if self.protected is not None:
            raise self.protected
        if version != VERSION:
            raise Refusal(self._wrong_version(version))
        if flags & ~WITH_AUTHKEY:
            raise Refusal(f"the peer sent flags {flags:#x}, of which wire version {VERSION} knows {WITH_AUTHKEY:#x}")
        self._compare_authkeys(bool(flags & WITH_AUTHKEY))
        if not self.is_client:
            if self._authkey is not None:
                self._send(FrameKind.PROOF)
        elif self._authkey is None:
            self.state = ExchangeState.WELCOME
        return True

    def _wrong_version(self, version: int) -> str:
        if self.is_client and len(self._buffer) >= _HEAD.size:
            # The server may have sent its reason: REFUSE is the same in every version.
            length, kind = _HEAD.unpack_from(self._buffer)
            end = _HEAD.size - 1 + length
            if kind == FrameKind.REFUSE and 1 <= length <= MAX_FRAME and len(self._buffer) >= end:
                return _refused(bytes(self._buffer[_HEAD.size : end])).reason
        peer = "listener" if self.is_client else "client"
        return (
            f"the {peer} speaks wire version {version}, and this {self._side} speaks {VERSION} ({self._software}): "
            "both sides need the same release of trio_ucx"
        )

    def _compare_authkeys(self, has_authkey: bool) -> None:
        if self._authkey is not None and not has_authkey:
            raise Refusal(
                f"this {self._side} wants an authkey, and its peer has none: both sides need the same authkey"
            )
        if self._authkey is None and has_authkey:
            raise Refusal(f"this {self._side} has no authkey, and its peer wants one: both sides need the same authkey")

    @property
    def _side(self) -> str:
        return "client" if self.is_client else "listener"

    def _next_frame(self) -> tuple[FrameKind, bytes] | None:
        """Returns the kind and the body of the next frame, after verifying its code."""
        if len(self._buffer) < _HEAD.size:
            return None
        length, number = _HEAD.unpack_from(self._buffer)
        if not 1 <= length <= MAX_FRAME:
            raise ProtocolError(f"a frame of {length} bytes; {MAX_FRAME} are allowed")
        expected = EXPECTED.get((self.is_client, self.state), frozenset())
        if number not in expected:
            raise ProtocolError(f"a frame of kind {number} is out of place in the state {self.state.name}")
        end = _HEAD.size - 1 + length
        kind = FrameKind(number)
        if kind is FrameKind.ABORT and length != 1 + _SENT.size:
            raise ProtocolError("a malformed ABORT: it is shorter or longer than its kind requires")
        if len(self._buffer) < end:
            return None
        frame = bytes(self._buffer[:end])
        del self._buffer[:end]
        if self._authkey is not None and kind not in (FrameKind.REFUSE, FrameKind.ABORT):
            frame, code = frame[:-_CODE], frame[-_CODE:]
            self._transcript.update(frame)
            if len(frame) < _HEAD.size or not hmac.compare_digest(self._code(not self.is_client), code):
                raise Refusal("the authkeys of the two sides differ, or their messages were changed on the way")
            self._transcript.update(code)
        else:
            self._transcript.update(frame)
        return kind, HiddenBytes(frame[_HEAD.size :])  # there may be a key in it

    def _receive_frame(self, kind: FrameKind, body: bytes) -> Event | None:
        match kind:
            case FrameKind.REFUSE:
                self.state = ExchangeState.ENDED
                return _refused(body)
            case FrameKind.ABORT:
                self.state = ExchangeState.ENDED
                [sent] = _fields(body, _SENT)
                return Aborted(_in_range(sent, MAX_SENT))
            case FrameKind.PROOF:
                _expect_empty(body)
                self.state = ExchangeState.WELCOME
                self._send_open()
                return None
            case FrameKind.OPEN:
                self.state = ExchangeState.TAKE
                return Opened(self._description(body))
            case FrameKind.WELCOME:
                self.state = ExchangeState.TAKE
                summary = _summary(body[: _SUMMARY.size])
                return Welcomed(self._description(HiddenBytes(body[_SUMMARY.size :])), summary)
            case FrameKind.TAKE:
                self.state = ExchangeState.GREETING
                generation, greet = _fields(body, _TAKE)
                return Taken(_in_range(generation, MAX_GENERATION), bool(_in_range(greet, 1)))
            case FrameKind.AGAIN:
                _expect_empty(body)
                self.state = ExchangeState.ENDED
                return Again()

    def _description(self, body: bytes) -> PeerDescription:
        if self._stated_key is not None:
            size = len(self._stated_key)
            self._keys = KeyPair(self._stated_key, body[:size])
            body = body[size:]
        try:
            return PeerDescription.decode(body)
        except ProtocolError as error:  # perhaps because of an unusual option: the peer should get the reason
            raise Refusal(str(error)) from error


def _refused(body: bytes) -> Refused:
    known = body[:1] in {bytes([why]) for why in RefusalCode}
    return Refused(
        printable(body[1:1001].decode(errors="replace")), RefusalCode(body[0]) if known else RefusalCode.OTHER
    )


def _summary(body: bytes) -> EndpointSummary:
    made, shared, proven = _fields(body, _SUMMARY)
    return EndpointSummary(_in_range(made, MAX_GENERATION), _in_range(shared, made), bool(_in_range(proven, 1)))


def _fields(body: bytes, format: struct.Struct) -> tuple[int, ...]:
    if len(body) != format.size:
        raise ProtocolError("a malformed frame: it is shorter or longer than its kind requires")
    return format.unpack(body)


def _in_range(number: int, most: int) -> int:
    if number > most:
        raise ProtocolError(f"a number in a frame is out of range: {number} is more than {most}")
    return number


def _expect_empty(body: bytes) -> None:
    if body:
        raise ProtocolError("a malformed frame: it is longer than its kind allows")
