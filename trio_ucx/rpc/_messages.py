"""What goes over the wire: the messages of a call, and the two encodings, msgpack and JSON.

A call is one message in a conversation, and so is the answer. After a REPLY, both sides keep the conversation for the
next call, until one of them leaves it. A message is a head, and perhaps buffers:

    encoding  1 byte: M is msgpack, J is JSON
    kind      1 byte: see below
    size      4 bytes, little-endian: of the head if there are buffers, otherwise 0
    head
    buffers   from the next multiple of 16 on: what ``Connection.send_arrays`` sends of a list (``_arrays/header.py``)

    kind      head
    CALL      [method, seconds that are left or null, metadata or null, arguments]; from the client
    STREAM    the same, where the client's items follow
    ITEM      a value of a stream; in both directions
    END       null: no more items come; from the client, or after a stream's last item from the server
    CREDIT    null: some of the other side's items were read, see ``_items.py``; in both directions
    REPLY     the result of a method
    ERROR     [category, type, text, traceback, the exception's arguments or null]; from the server

The server answers in the encoding of the call, or in JSON if it cannot read that. It leaves the conversation by force
if it gives no answer to a call that it has read. So a client that sees the orderly end of the conversation knows that
its call has not run.
"""

from __future__ import annotations

import json
import math
import struct
from collections.abc import Callable, Sequence
from typing import Any

from .._arrays.header import ALIGNMENT
from .._arrays.messages import ReceivedBuffers, message_of_many
from .._util.arguments import check_timeout
from .._util.text import printable

try:
    import msgspec
except ImportError:  # pragma: no cover
    msgspec = None  # type: ignore[assignment]

CALL, ITEM, END, REPLY, ERROR, CREDIT, STREAM = range(7)
#: The categories of errors.
RAISED, UNKNOWN_METHOD, BAD_ARGUMENTS, DEADLINE, REFUSED = range(5)

_PREFIX = struct.Struct("<BBI")
_REPLY = bytes([REPLY])
#: Names that :meth:`Client.call` has arguments for itself.
RESERVED = frozenset({"timeout", "buffers", "metadata", "idempotent"})
#: How many conversations of a connection a side keeps for later calls.
MOST_KEPT = 64
MOST_TEXT = 2000
MOST_TRACEBACK = 8000


class BadMessage(ValueError):
    """What the peer has sent is no message of this protocol. Its text is safe to show."""


#: Of each parameter of a method: its name, its type, and whether it has no default.
Parameters = Sequence[tuple[str, Any, bool]]
#: Turns the encoded arguments of a call into keyword arguments; raises ValueError if they are not those of the method.
Check = Callable[[Any], dict[str, Any]]


class Codec:
    """One encoding.

    Attributes:
        encode: of any value that it can encode.
        decode: of a whole head.
        decode_call: of the head of a call; its arguments are left for a :data:`Check`.
        check: makes the :data:`Check` for a method.
        plain: by kind, what is before the head of a message without buffers.
    """

    def __init__(
        self,
        letter: bytes,
        encode: Callable[[Any], bytes],
        decode: Callable[[Any], Any],
        decode_call: Callable[[Any], Sequence[Any]],
        check: Callable[[Parameters], Check],
    ) -> None:
        self.encode = encode
        self.decode = decode
        self.decode_call = decode_call
        self.check = check
        self.letter = letter[0]
        self.plain = [_PREFIX.pack(self.letter, kind, 0) for kind in range(7)]


def encode_message(codec: Codec, kind: int, head: Any, buffers: Sequence[Any] | None = None) -> Any:
    """Returns a message for ``Channel.send``, which is one piece, or the buffers and what is between them.

    Raises:
        TypeError, ValueError: it cannot be encoded, or has too many buffers.
        RuntimeError: a buffer is in CUDA memory, and there is no CUDA driver.
    """
    try:
        body = codec.encode(head)
    except (OverflowError, RecursionError) as error:
        raise ValueError(f"a value that cannot be encoded: {error}") from None
    if buffers is None:
        return codec.plain[kind] + body
    if not isinstance(buffers, (list, tuple)):
        raise TypeError(f"buffers must be a list or a tuple, not {type(buffers).__name__}")
    start = _PREFIX.pack(codec.letter, kind, len(body)) + body
    start += bytes(-len(start) % ALIGNMENT)
    arrays: Any = message_of_many(list(buffers))
    return start + arrays if type(arrays) is bytes else [start, *arrays]


def decode_message(data: bytes) -> tuple[Codec, int, Any, ReceivedBuffers | None]:
    """Takes a message apart, into the encoding, the kind, the encoded head, and the buffers, if it has some.

    Raises:
        BadMessage: it is none.
    """
    view, start = memoryview(data), _PREFIX.size
    if len(data) < start:
        raise BadMessage(f"a message of {len(data)} bytes")
    codec = CODECS.get(data[0])
    if codec is None:
        if data[0] == _MSGPACK:
            raise BadMessage("a message in msgpack, but msgspec is not installed here: pip install msgspec")
        raise BadMessage(f"a message in an unknown encoding, {data[0]}")
    _, kind, size = _PREFIX.unpack_from(data)
    if not size:
        return codec, kind, view[start:], None
    end = start + size
    try:
        return codec, kind, view[start:end], ReceivedBuffers(data, end + -end % ALIGNMENT)
    except Exception as error:  # BadHeader, ImportError, or whatever else a peer can make a header raise
        raise BadMessage(f"a message whose buffers cannot be read: {printable(str(error))}") from None


def is_reply(message: Any) -> bool:
    """True for an answer after which the conversation is kept for another call."""
    return bool((message if type(message) is bytes else message[0])[1:2] == _REPLY)


def decode_head(codec: Codec, head: Any) -> Any:
    """Returns the head of a message.

    Raises:
        BadMessage: it is not in this encoding.
    """
    try:
        return codec.decode(head)
    except Exception as error:  # whatever a peer can make a decoder raise
        raise BadMessage(f"a message that cannot be decoded: {printable(str(error))}") from None


def decode_call(codec: Codec, head: Any) -> tuple[str, float | None, dict[str, str] | None, Any]:
    """Returns the head of a call.

    Raises:
        BadMessage: it is none.
    """
    try:
        method, left, metadata, arguments = codec.decode_call(head)
        if left is not None and not math.isfinite(check_timeout(left, "the time left")):
            raise ValueError("the time left must be finite, or null")
        return method, left, metadata, arguments
    except Exception as error:
        raise BadMessage(f"not a call: {printable(str(error))}") from None


def bounded(text: str, most: int = MOST_TEXT) -> str:
    """Returns the beginning of a text, printable but for its line ends."""
    return printable(text, most, keep="\n")


# ---- JSON without msgspec ----


def _json_encode(value: Any) -> bytes:
    return json.dumps(value, separators=(",", ":")).encode(errors="surrogatepass")


def _json_decode(data: Any) -> Any:
    return json.loads(bytes(data))


def _json_call(data: Any) -> Sequence[Any]:
    match _json_decode(data):
        case [str(), int() | float() | None, dict() | None, dict()] as call:
            if call[2] is None or all(isinstance(value, str) for value in call[2].values()):
                return tuple(call)
    raise ValueError("it is not [method, seconds, metadata, arguments]")


def _check_names(parameters: Parameters) -> Check:
    known = {name: required for name, _, required in parameters}

    def check(arguments: dict[str, Any]) -> dict[str, Any]:
        unknown = arguments.keys() - known
        missing = [name for name, required in known.items() if required and name not in arguments]
        if unknown or missing:
            raise ValueError(
                f"missing: {', '.join(missing) or 'nothing'}; unknown: {', '.join(sorted(unknown)) or 'nothing'}"
            )
        return arguments

    return check


_MSGPACK, JSON = b"MJ"
CODECS: dict[int, Codec] = {JSON: Codec(b"J", _json_encode, _json_decode, _json_call, _check_names)}

# ---- msgspec ----

if msgspec is not None:
    _Call = tuple[str, float | None, dict[str, str] | None, msgspec.Raw]

    def _checked_by(decoder_class: Any) -> Callable[[Parameters], Check]:
        def make(parameters: Parameters) -> Check:
            fields: list[Any] = [
                (name, kind) if required else (name, kind | msgspec.UnsetType, msgspec.UNSET)
                for name, kind, required in sorted(parameters, key=lambda each: not each[2])
            ]
            struct_type = msgspec.defstruct("Arguments", fields, forbid_unknown_fields=True)
            decode, names = decoder_class(struct_type).decode, [name for name, _, _ in parameters]

            def check(encoded: Any) -> dict[str, Any]:
                found = decode(encoded)
                return {name: value for name in names if (value := getattr(found, name)) is not msgspec.UNSET}

            return check

        return make

    for _letter, _module in ((b"M", msgspec.msgpack), (b"J", msgspec.json)):
        CODECS[_letter[0]] = Codec(
            _letter,
            _module.Encoder().encode,
            _module.Decoder().decode,
            _module.Decoder(_Call).decode,
            _checked_by(_module.Decoder),
        )

#: The encoding of this side's calls.
DEFAULT = CODECS.get(_MSGPACK, CODECS[JSON])
