"""Collective operations: what each rank sends to whom, and receives from whom, without I/O.

Each is a generator. It yields :class:`Post`, which does not wait, and :class:`Take`, which gives it a message. When the
task that has called it was cancelled, another task can therefore continue it.

========== =============================== ======================
operation  algorithm                       rounds for *n* ranks
========== =============================== ======================
barrier    dissemination                   ceil(log2 n)
broadcast  binomial tree                   ceil(log2 n)
gather     binomial tree                   ceil(log2 n)
all_gather Bruck                           ceil(log2 n)
========== =============================== ======================
"""

from __future__ import annotations

import struct
import sys
from collections.abc import Generator, Iterable
from typing import Any

import attrs


@attrs.define
class Post:
    """A message to a rank."""

    rank: int
    data: bytes


@attrs.define
class Take:
    """The next message of a rank."""

    rank: int


Steps = Generator[Post | Take, bytes, Any]


def barrier(rank: int, size: int) -> Steps:
    distance = 1
    while distance < size:
        yield Post((rank + distance) % size, b"")
        yield Take((rank - distance) % size)
        distance *= 2
    return None


def broadcast(rank: int, size: int, data: bytes, root: int) -> Steps:
    place = (rank - root) % size  # in the tree
    bit = 1
    while bit < size and not place & bit:
        bit *= 2
    if place:
        data = yield Take((rank - bit) % size)
    while bit > 1:
        bit //= 2
        if place + bit < size:
            yield Post((rank + bit) % size, data)
    return data


def gather(rank: int, size: int, part: bytes, root: int) -> Steps:
    """Returns the parts by rank at the root, and None elsewhere."""
    place = (rank - root) % size
    parts = [part]  # of this rank, and of those that follow it in the tree
    bit = 1
    while bit < size and not place & bit:
        if place + bit < size:
            parts += unpack((yield Take((rank + bit) % size)))
        bit *= 2
    if place:
        yield Post((rank - bit) % size, pack(parts))
        return None
    return [parts[(one - root) % size] for one in range(size)]


def all_gather(rank: int, size: int, part: bytes) -> Steps:
    """Returns the parts by rank."""
    parts = [part]  # of this rank, and of those that follow it
    distance = 1
    while distance < size:
        missing = min(distance, size - distance)
        yield Post((rank - distance) % size, pack(parts[:missing]))
        parts += unpack((yield Take((rank + distance) % size)))
        distance *= 2
    return [parts[(one - rank) % size] for one in range(size)]


# ---- several parts in one message ----


def pack(parts: list[bytes]) -> bytes:
    lengths = struct.pack(f"<I{len(parts)}Q", len(parts), *map(len, parts))
    return b"".join((lengths, *parts))


def unpack(data: bytes) -> list[bytes]:
    (count,) = struct.unpack_from("<I", data)
    at = 4 + 8 * count
    parts = []
    for length in struct.unpack_from(f"<{count}Q", data, 4):
        parts.append(data[at : at + length])
        at += length
    return parts


# ---- bytes and arrays ----

#: The first byte of a value: what follows are bytes, or a message with an array.
_BYTES, _ARRAY = b"\0", b"\1"


def encode_value(value: Any) -> bytes:
    """bytes for a value of a collective: an object with the buffer protocol, or a NumPy array.

    Raises:
        TypeError: it is neither; or an array with a mask, or with Python objects.
    """
    if type(value) is bytes:
        return _BYTES + value
    numpy = sys.modules.get("numpy")
    if numpy is not None and isinstance(value, (numpy.ndarray, numpy.generic)):
        from .._arrays.messages import pack

        return _ARRAY + pack(value)
    try:
        view = memoryview(value)
    except TypeError:
        raise TypeError(f"a value must be bytes-like or a NumPy array, not {type(value).__name__}") from None
    if not view.contiguous:
        raise TypeError("the buffer is not contiguous; copy it first")
    return _BYTES + view.tobytes()


def decode_value(data: bytes) -> Any:
    """Returns what :func:`encode_value` had.

    Raises:
        UnexpectedMessage: it cannot be made here: numpy is missing, say.
    """
    if data[:1] == _BYTES:
        return data[1:]
    from .._arrays.messages import unpack

    return unpack(data[1:])


def decode_values(parts: Iterable[bytes]) -> list[Any]:
    return [decode_value(part) for part in parts]
