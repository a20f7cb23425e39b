"""Collective operations: what each rank sends to whom, and receives from whom, without I/O.

Each is a generator. It yields :class:`Post`, which does not wait, and :class:`Take`, which gives it a message. When the
task that has called it was cancelled, another task can therefore continue it. One that yields :class:`Use` runs in
another task from its beginning.

========== =============================== ======================
operation  algorithm                       rounds for *n* ranks
========== =============================== ======================
barrier    dissemination                   ceil(log2 n)
broadcast  binomial tree                   ceil(log2 n)
gather     binomial tree                   ceil(log2 n)
scatter    binomial tree                   ceil(log2 n)
all_gather Bruck                           ceil(log2 n)
========== =============================== ======================

:mod:`trio_ucx.mesh._reductions` has those that compute.
"""

from __future__ import annotations

import struct
import sys
from collections.abc import Awaitable, Callable, Generator, Iterable, Iterator
from typing import Any

import attrs
import trio

from .. import Connection


@attrs.define
class Post:
    """A message to a rank."""

    rank: int
    data: bytes


@attrs.define
class Take:
    """The next message of a rank."""

    rank: int


@attrs.define
class Use:
    """A call of an async function with the connection to a rank; gives what it returns."""

    rank: int
    function: Callable[[Connection], Awaitable[Any]]


Steps = Generator[Post | Take | Use, Any, Any]


# ---- the binomial tree ----


def children(rank: int, size: int, root: int) -> Iterator[int]:
    """Returns the ranks from which a rank collects: each has collected from those between it and the next one."""
    place, bit = (rank - root) % size, 1
    while place + bit < size and not place & bit:
        yield (rank + bit) % size
        bit *= 2


def parent(rank: int, size: int, root: int) -> int:
    """Returns the rank that collects from a rank other than the root."""
    place = (rank - root) % size
    return (rank - (place & -place)) % size


def _collected(place: int, size: int) -> int:
    """Returns how many ranks' parts the rank at a place other than the root's collects, with its own."""
    return min(place & -place, size - place)


def barrier(rank: int, size: int) -> Steps:
    distance = 1
    while distance < size:
        yield Post((rank + distance) % size, b"")
        yield Take((rank - distance) % size)
        distance *= 2
    return None


def broadcast(rank: int, size: int, data: bytes, root: int) -> Steps:
    if rank != root:
        data = yield Take(parent(rank, size, root))
    for child in reversed(list(children(rank, size, root))):
        yield Post(child, data)
    return data


def gather(rank: int, size: int, part: bytes, root: int) -> Steps:
    """Returns the parts by rank at the root, and None elsewhere."""
    parts = [part]  # of this rank, and of those that follow it in the tree
    for child in children(rank, size, root):
        parts += unpack((yield Take(child)), _collected((child - root) % size, size))
    if rank != root:
        yield Post(parent(rank, size, root), pack(parts))
        return None
    return [parts[(one - root) % size] for one in range(size)]


def scatter(rank: int, size: int, parts: list[bytes], root: int) -> Steps:
    """Returns this rank's part of what the root has."""
    parts = parts[root:] + parts[:root]
    if rank != root:
        # Of this rank, and of those that follow it in the tree.
        parts = unpack((yield Take(parent(rank, size, root))), _collected((rank - root) % size, size))
    for child in reversed(list(children(rank, size, root))):
        first = (child - rank) % size
        yield Post(child, pack(parts[first:]))
        del parts[first:]
    return parts[0]


def all_gather(rank: int, size: int, part: bytes) -> Steps:
    """Returns the parts by rank."""
    parts = [part]  # of this rank, and of those that follow it
    distance = 1
    while distance < size:
        missing = min(distance, size - distance)
        yield Post((rank - distance) % size, pack(parts[:missing]))
        parts += unpack((yield Take((rank + distance) % size)), missing)
        distance *= 2
    return [parts[(one - rank) % size] for one in range(size)]


# ---- several parts in one message ----


def pack(parts: list[bytes]) -> bytes:
    lengths = struct.pack(f"<I{len(parts)}Q", len(parts), *map(len, parts))
    return b"".join((lengths, *parts))


def unpack(data: bytes, count: int) -> list[bytes]:
    """Returns the parts of a message.

    Raises:
        trio.BrokenResourceError: it does not have ``count`` parts.
    """
    at = 4 + 8 * count
    lengths = struct.unpack_from(f"<{count}Q", data, 4) if len(data) >= at else ()
    if data[:4] != struct.pack("<I", count) or at + sum(lengths) != len(data):
        raise unreadable()
    parts = []
    for length in lengths:
        parts.append(data[at : at + length])
        at += length
    return parts


def unreadable() -> trio.BrokenResourceError:
    return trio.BrokenResourceError("its message of a collective operation cannot be read")


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
