"""Messages that describe themselves: who sent them, where to, which one of the queue, how long, and a checksum."""

from __future__ import annotations

import hashlib
import random
import struct
import zlib
from typing import Any

import attrs

#: Magic, connection, direction (0 up, 1 down), queue, number in the queue, whether it is the last, length, checksum.
HEADER = struct.Struct("<4s20sBIIBQI")
MAGIC = b"soak"
#: Of the byte stream: magic, checksum of the rest, direction, number of the write, number of the record in it.
RECORD = struct.Struct("<2sHIII")
RECORD_MAGIC = b"re"
DIRECTIONS = ("up", "down")

_POOL = random.Random(1).randbytes(8 << 20)


@attrs.frozen
class Address:
    """A queue of a connection, in one direction."""

    connection: str
    direction: str
    queue: int


def make(to: Address, number: int, length: int, *, last: bool = False) -> bytes:
    """The message with this number. One that is too short for a header is a number and a pattern."""
    if length < HEADER.size:
        return _short(to, number, length)
    at = (number * 7919 + length) % (len(_POOL) - length)
    body = _POOL[at : at + length - HEADER.size]
    checksum = zlib.crc32(body, zlib.crc32(_head(to, number, length, last, 0)))
    return _head(to, number, length, last, checksum) + body


def _head(to: Address, number: int, length: int, last: bool, checksum: int) -> bytes:
    direction = DIRECTIONS.index(to.direction)
    return HEADER.pack(MAGIC, to.connection.encode(), direction, to.queue, number, last, length, checksum)


def _short(to: Address, number: int, length: int) -> bytes:
    pattern = hashlib.blake2b(f"{to}{number}".encode()).digest()
    return (bytes([number % 256]) + pattern)[:length]


def examine(to: Address, data: bytes | memoryview) -> dict[str, Any]:
    """What a received message says, for the log.

    Returns:
        ``len``, and one of: ``n``, its number, and ``last``, if it is whole and ours; ``short``, its bytes in
        hexadecimal, if it is too short to say more; ``fault``, what is wrong with it.
    """
    said: dict[str, Any] = {"len": len(data)}
    if len(data) < HEADER.size:
        return {**said, "short": bytes(data).hex()}
    magic, connection, direction, queue, number, last, length, _ = HEADER.unpack_from(data)
    if magic != MAGIC:
        return {**said, "fault": "torn: it does not begin with a header"}
    try:
        meant = Address(connection.rstrip(b"\0").decode(), DIRECTIONS[direction], queue)
    except (UnicodeDecodeError, IndexError):
        return {**said, "fault": "torn: its header is damaged"}
    if meant != to:
        return {**said, "fault": f"foreign: it is for {meant}"}
    if length != len(data) or bytes(data) != make(to, number, length, last=bool(last)):
        return {**said, "fault": f"torn: it says number {number}, {length} bytes, and its checksum or bytes differ"}
    return {**said, "n": number, "last": bool(last)}


def is_short(to: Address, number: int, length: int, text: str) -> bool:
    """Whether these bytes, in hexadecimal, are the short message with this number."""
    return length < HEADER.size and _short(to, number, length).hex() == text


def make_write(connection: str, direction: str, number: int, records: int) -> bytes:
    """One write to the byte stream."""
    where = zlib.crc32(f"{connection} {direction}".encode())
    out = bytearray()
    for index in range(records):
        rest = struct.pack("<III", where, number, index)
        out += RECORD_MAGIC + struct.pack("<H", zlib.crc32(rest) & 0xFFFF) + rest
    return bytes(out)


class StreamReader:
    """Takes records out of a byte stream."""

    def __init__(self, connection: str, direction: str) -> None:
        self._where = zlib.crc32(f"{connection} {direction}".encode())
        self._rest = b""

    def feed(self, data: bytes) -> dict[str, Any]:
        """What the bytes say: ``runs``, lists of [write, first record, last record]; ``fault`` if they are damaged."""
        buffer = self._rest + data
        runs: list[list[int]] = []
        whole = len(buffer) - len(buffer) % RECORD.size
        for magic, checksum, where, number, index in RECORD.iter_unpack(buffer[:whole]):
            if magic != RECORD_MAGIC or checksum != zlib.crc32(struct.pack("<III", where, number, index)) & 0xFFFF:
                return {"runs": runs, "fault": "torn: a record of the byte stream is damaged"}
            if where != self._where:
                return {"runs": runs, "fault": "foreign: a record of another connection's or direction's byte stream"}
            if runs and runs[-1][0] == number and runs[-1][2] + 1 == index:
                runs[-1][2] = index
            else:
                runs.append([number, index, index])
        self._rest = buffer[whole:]
        return {"runs": runs, "rest": len(self._rest)}
