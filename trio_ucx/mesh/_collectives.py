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

import json
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


def encode_value(value: Any) -> bytes:
    """bytes for a value of a collective: an object with the buffer protocol, or a NumPy array.

    Raises:
        TypeError: it is neither.
    """
    if type(value) is bytes:
        return b"\0" + value
    numpy = sys.modules.get("numpy")
    if numpy is not None and isinstance(value, (numpy.ndarray, numpy.generic)):
        return _encode_array(numpy, value)
    try:
        view = memoryview(value)
    except TypeError:
        raise TypeError(f"a value must be bytes-like or a NumPy array, not {type(value).__name__}") from None
    if not view.contiguous:
        raise TypeError("the buffer is not contiguous; copy it first")
    return b"\0" + view.tobytes()


def _encode_array(numpy: Any, value: Any) -> bytes:
    dtype = value.dtype
    head = json.dumps([dtype.descr if dtype.names else dtype.str, value.shape], default=str)
    if isinstance(value, numpy.ma.MaskedArray) or dtype.hasobject or _dtype(numpy, json.loads(head)[0]) != dtype:
        raise TypeError(
            f"{type(value).__name__} of {dtype} cannot be sent: masked arrays, Python objects, and dtypes with "
            "padding, titles or fields inside fields are not supported. Send bytes"
        )
    return b"".join((b"\1", struct.pack("<I", len(head)), head.encode(), value.tobytes()))


def _dtype(numpy: Any, text: Any) -> Any:
    """The dtype that was encoded; None for one that cannot be."""
    try:
        return numpy.dtype([(name, *rest) for name, *rest in text] if isinstance(text, list) else text)
    except (TypeError, ValueError):
        return None


def decode_value(data: bytes) -> Any:
    if data[:1] == b"\0":
        return data[1:]
    import numpy

    (length,) = struct.unpack_from("<I", data, 1)
    text, shape = json.loads(data[5 : 5 + length])
    return numpy.frombuffer(data, _dtype(numpy, text), offset=5 + length).reshape(shape).copy()


def decode_values(parts: Iterable[bytes]) -> list[Any]:
    return [decode_value(part) for part in parts]
