"""The wire format between two trio_ucx peers over UCX: tags and control frames. Pure; described in ``wire.md``.

A connection begins with an exchange on the control socket (``_handshake/exchange.py``), in which each side chooses the
id under which *it* wants to be written to. From then on everything over UCX is a tag message with the tag
``id << 32 | queue``. Tag queues below 2**31 are the user's tags; of those above, some are in use:

    CONTROL   small frames: the greeting, credits, the close handshake
    STREAM    the byte stream; an empty message is its end
    BATCH     several small messages as one, taken apart before anything else looks at them
    LONG      announcements of long messages, which are then as if the messages had arrived

    CONVERSATIONS  and above: messages in conversations that their sender has opened
    ANSWERS        and above: messages in conversations that their receiver has opened
    PIECES         and above: pieces of long messages
"""

from __future__ import annotations

import enum
import secrets
import struct
from typing import ClassVar, get_args

import attrs

from .._util.picklable import Picklable

MAGIC = b"trio_ucx"
VERSION = 2

MAX_TAG = 2**31 - 1
CONTROL = 2**31
STREAM = 2**31 + 1
BATCH = 2**31 + 2
LONG = 2**31 + 3
CONVERSATIONS = 2**31 + 2**29
ANSWERS = CONVERSATIONS + 2**28
PIECES = 2**31 + 2**30
#: So many conversations that one side has opened may be open at once.
MAX_CONVERSATIONS = 2**28
#: So many channels over tags may have been left by one side only.
MAX_LEFT_ALONE = 2**14
#: Not on the wire: the tag queue in which this side keeps the numbers of conversations that nobody has accepted.
UNACCEPTED = CONVERSATIONS - 1

#: The least window: a smaller one would hold hardly any message.
MIN_WINDOW = 4096
MAX_WINDOW = 2**62
#: The least threshold from which on messages stay with their sender (UCX's RNDV_THRESH). Control frames must be
#: shorter.
MIN_THRESHOLD = 64  # more than MAX_FRAME
#: The greatest generation of an endpoint: UCX has 16 bits for it.
MAX_GENERATION = 0xFFFF

#: The longest small message. Small messages cost less credit, may be sent in batches, and are packed by the receiver's
#: C code (TU_SMALL_MESSAGE).
SMALL_MESSAGE = 1024
#: The head of packed messages in a batch: their tag queue, the length of each, their number. The messages follow.
PACKED_HEAD = struct.Struct("<IHH")
#: No batch is longer.
MAX_BATCH = 4096


def other_direction(number: int) -> int:
    """Returns the number of the other direction of a tag queue: the same, unless it is a conversation's."""
    return number ^ (ANSWERS ^ CONVERSATIONS) if number >= CONVERSATIONS else number


class RefusalCode(enum.IntEnum):
    """Why a listener refuses a client."""

    OTHER = 0
    DRAINING = 1
    FULL = 2
    NOT_ADMITTED = 3


class ProtocolError(Picklable, Exception):
    """The peer sent something that the wire format does not allow."""


def new_connection_id() -> int:
    """Random, so that messages that are late for an ended connection reach no other one.

    Its top bit tells a Connection's messages from other tag messages of the worker.
    """
    return 0x8000_0000 | secrets.randbits(31)


def check_queue(queue: int) -> None:
    """Refuses a tag queue that is neither the user's, nor the byte stream's, nor a conversation's.

    Raises:
        ProtocolError: it is reserved.
    """
    if queue > MAX_TAG and queue != STREAM and not CONVERSATIONS <= queue < PIECES:
        raise ProtocolError(f"the peer used the reserved tag queue {queue}")


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
    """The sender has something to send and no credit for it, although ``grants`` GRANTs have arrived so far."""

    grants: int
    kind: ClassVar[int] = 2
    format: ClassVar[str] = "<BQ"


@attrs.frozen
class Admit:
    """The receiver waits at this tag queue: one message for it may be sent whatever the credit.

    It was sent after ``received`` messages had arrived. If a later one was for this queue, it is void: that one is what
    the receiver waits for.
    """

    queue: int
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
class Done:
    """The acknowledgement has arrived: its sender need not stay for it."""

    kind: ClassVar[int] = 7
    format: ClassVar[str] = "<B"


@attrs.frozen
class Hello:
    """The first frame of each side over an endpoint that is not known to work: messages get through."""

    kind: ClassVar[int] = 8
    format: ClassVar[str] = "<B"


@attrs.frozen
class Ping:
    """Asks the peer's library for a PONG with the same number."""

    number: int
    kind: ClassVar[int] = 9
    format: ClassVar[str] = "<BQ"


@attrs.frozen
class Pong:
    """The answer to a PING."""

    number: int
    kind: ClassVar[int] = 10
    format: ClassVar[str] = "<BQ"


@attrs.frozen
class Leave:
    """The sender of this has left a channel, and sends nothing to its tag queue ``queue`` any more.

    ``by_force`` is 1 if that is not the end that it had meant: its block was left by an exception.
    """

    queue: int
    by_force: int
    kind: ClassVar[int] = 11
    format: ClassVar[str] = "<BIB"


@attrs.frozen
class Dropped:
    """The receiver has dropped a message of this tag queue and length: it was too long, or memory was short."""

    queue: int
    length: int
    kind: ClassVar[int] = 12
    format: ClassVar[str] = "<BIQ"


@attrs.frozen
class Stop:
    """The sender of this closes: it receives no message any more. Some of its own may still come."""

    kind: ClassVar[int] = 15
    format: ClassVar[str] = "<B"


Frame = Grant | Stalled | Admit | Stop | Goodbye | GoodbyeAck | Done | Hello | Ping | Pong | Leave | Dropped

_FRAMES: dict[int, type[Frame]] = {frame.kind: frame for frame in get_args(Frame)}

#: No control frame is longer.
MAX_FRAME = 32


def encode_frame(frame: Frame) -> bytes:
    return struct.pack(frame.format, frame.kind, *[getattr(frame, name) for name in frame.__match_args__])


def decode_frame(data: bytes) -> Frame:
    """Reads a control frame.

    Raises:
        ProtocolError: it is not a control frame.
    """
    cls = _FRAMES.get(data[0]) if data else None
    if cls is None or len(data) != struct.calcsize(cls.format):
        raise ProtocolError(f"a malformed control frame: {data[:MAX_FRAME].hex()}")
    return cls(*struct.unpack(cls.format, data)[1:])
