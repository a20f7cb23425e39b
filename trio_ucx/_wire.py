"""The wire format between two trio_ucx peers: hellos, tags, control frames. Pure; described in ``docs/wire.md``.

A connection begins with hellos, which are active messages: OPEN from the client, WELCOME or REFUSE from the server.
Each side chooses the id under which *it* wants to be written to. From then on everything is a tag message with the tag
``id << 32 | lane``. Lanes below 2**31 are the user's tags; of those above, three are in use:

    CONTROL   small frames: credits, goodbyes
    STREAM    the byte stream; an empty message is its end
    BATCH     several small messages as one, taken apart before anything else looks at them
"""

from __future__ import annotations

import secrets
import struct
from typing import ClassVar

import attrs

from .ucp._process import NOBODY, Process

MAGIC = b"trio_ucx"
VERSION = 2

#: The active-message id that hellos use.
HELLO_AM_ID = 127
#: No hello is longer. (Worker addresses are: some kilobytes on machines with many RDMA ports.)
MAX_HELLO = 60_000

MAX_TAG = 2**31 - 1
CONTROL = 2**31
STREAM = 2**31 + 1
BATCH = 2**31 + 2

#: A run of messages in a batch: their lane, the length of each, their number; then the messages.
RUN_HEAD = struct.Struct("<IHH")
#: No batch is longer.
MAX_BATCH = 4096

OPEN, WELCOME, REFUSE = 1, 2, 3

#: Magic, version, kind, the client's connection id, length of the client's worker address. This much, and the address
#: after it, is the same in every version, so that a newer peer can be refused by name.
_HEAD = struct.Struct("<8sHBxII")
#: id of the server's side, listener, window, rendezvous threshold (0: unknown); host, pid namespace, pid, start time.
_BODY = struct.Struct("<IQQQ16sQIQ")


class ProtocolError(Exception):
    """The peer sent something that the wire format does not allow.

    Attributes:
        client_id: whom a malformed hello was for; 0 if it does not say.
    """

    client_id = 0


@attrs.frozen
class Hello:
    """OPEN or WELCOME.

    Attributes:
        client_id: under which the client wants to be written to.
        server_id: the same of the server; 0 in OPEN.
        service: which listener is meant; 0 for any.
        window: bytes that the sender of this hello is ready to hold unread.
        threshold: from how many bytes on messages of the sender of this hello stay with it until they are received;
            0 for none.
        software: for error messages.
        address: the client's worker address, when it connects by one.
    """

    kind: int
    client_id: int
    server_id: int = 0
    service: int = 0
    window: int = 0
    threshold: int = 0
    process: Process = NOBODY
    software: str = ""
    address: bytes = b""

    def encode(self) -> bytes:
        process = self.process
        return (
            _HEAD.pack(MAGIC, VERSION, self.kind, self.client_id, len(self.address))
            + self.address
            + _BODY.pack(
                self.server_id,
                self.service,
                self.window,
                self.threshold,
                process.host,
                process.namespace,
                process.pid,
                process.start,
            )
            + self.software.encode()
        )


@attrs.frozen
class Refusal:
    client_id: int
    reason: str

    def encode(self) -> bytes:
        return _HEAD.pack(MAGIC, VERSION, REFUSE, self.client_id, 0) + self.reason.encode()


@attrs.frozen
class UnknownVersion:
    """An OPEN of a version that we do not speak."""

    version: int
    client_id: int
    address: bytes


def decode_hello(data: bytes) -> Hello | Refusal | UnknownVersion:
    """Reads a hello.

    Raises:
        ProtocolError: it is none.
    """
    if len(data) < _HEAD.size or data[: len(MAGIC)] != MAGIC:
        raise ProtocolError("the peer does not speak trio_ucx: its hello has no magic")
    _, version, kind, client_id, address_length = _HEAD.unpack_from(data)
    start = _HEAD.size + address_length
    malformed = ProtocolError("the peer's hello is malformed")
    malformed.client_id = client_id
    if kind == REFUSE:
        return Refusal(client_id, data[_HEAD.size :].decode(errors="replace"))
    if start > len(data):
        raise malformed
    address = data[_HEAD.size : start]
    if version != VERSION:
        return UnknownVersion(version, client_id, address)
    if kind not in (OPEN, WELCOME) or len(data) < start + _BODY.size:
        raise malformed
    server_id, service, window, threshold, host, namespace, pid, began = _BODY.unpack_from(data, start)
    if not is_connection_id(client_id) or (kind == WELCOME and not is_connection_id(server_id)) or window < 1:
        raise malformed
    return Hello(
        kind=kind,
        client_id=client_id,
        server_id=server_id,
        service=service,
        window=window,
        threshold=threshold,
        process=Process(host, namespace, pid, began),
        software=data[start + _BODY.size :].decode(errors="replace"),
        address=address,
    )


def new_connection_id() -> int:
    """Unpredictable; its top bit tells a Connection's messages from other tag messages of the worker."""
    return 0x8000_0000 | secrets.randbits(31)


def is_connection_id(number: int) -> bool:
    return 0x8000_0000 <= number <= 0xFFFF_FFFF


# ---- control frames ----


@attrs.frozen
class Grant:
    """The receiver has read messages that cost ``amount``: as much may be sent again.

    ``received`` is how many messages have arrived so far, read or not.
    """

    amount: int
    received: int
    kind: ClassVar[int] = 1
    format: ClassVar[str] = "<BQQ"


@attrs.frozen
class Stalled:
    """The sender has something to send and no credit for it."""

    kind: ClassVar[int] = 2
    format: ClassVar[str] = "<B"


@attrs.frozen
class Admit:
    """The receiver waits at this lane: one message for it may be sent whatever the credit.

    It says so after ``received`` messages had arrived. If a later one was for this lane, it is void: that one is what
    the receiver waits for.
    """

    lane: int
    received: int
    kind: ClassVar[int] = 3
    format: ClassVar[str] = "<BIQ"


@attrs.frozen
class Goodbye:
    """The sender of this closes: it will send no message any more."""

    kind: ClassVar[int] = 4
    format: ClassVar[str] = "<B"


@attrs.frozen
class GoodbyeAck:
    """The goodbye, and so everything before it, has arrived. The sender of this sends no message any more, either."""

    kind: ClassVar[int] = 5
    format: ClassVar[str] = "<B"


@attrs.frozen
class Abort:
    """The sender of this has closed by force."""

    kind: ClassVar[int] = 6
    format: ClassVar[str] = "<B"


@attrs.frozen
class Done:
    """The acknowledgement has arrived: its sender need not stay for it."""

    kind: ClassVar[int] = 7
    format: ClassVar[str] = "<B"


Frame = Grant | Stalled | Admit | Goodbye | GoodbyeAck | Abort | Done

_FRAMES: dict[int, type[Frame]] = {
    frame.kind: frame for frame in (Grant, Stalled, Admit, Goodbye, GoodbyeAck, Abort, Done)
}

#: No control frame is longer.
MAX_FRAME = 32


def encode_frame(frame: Frame) -> bytes:
    return struct.pack(frame.format, frame.kind, *attrs.astuple(frame))


def decode_frame(data: bytes) -> Frame:
    """Reads a control frame.

    Raises:
        ProtocolError: it is none.
    """
    cls = _FRAMES.get(data[0]) if data else None
    if cls is None or len(data) != struct.calcsize(cls.format):
        raise ProtocolError(f"a malformed control frame: {data[:MAX_FRAME].hex()}")
    return cls(*struct.unpack(cls.format, data)[1:])
