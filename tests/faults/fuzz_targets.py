"""What may come from a stranger, or damaged from a peer, as functions of random bytes.

``test_fuzz.py`` and ``tools/fuzz.py`` call them.

Each target takes any bytes, and raises only if the library is wrong: an exception that is not part of its interface, an
internal error, a buffer that stays pinned, or a state that grows without a bound.
"""

from __future__ import annotations

import contextlib
import struct
import zlib
from collections.abc import Callable
from typing import Any

from simulation import InFlight, Side, World, simulated
from test_exchange import GOOD_BODIES, KEYS, feed, reach, reachable

from trio_ucx._handshake.exchange import ExchangeState, FrameKind
from trio_ucx._handshake.peer_description import PeerDescription
from trio_ucx._link import Want
from trio_ucx._rules import wire
from trio_ucx._rules.life import Loss
from trio_ucx.mesh import _messages as mesh_messages
from trio_ucx.rpc import _messages as rpc_messages
from trio_ucx.ucp import WorkerAddress
from trio_ucx.ucp._memory.buffers import Pinned
from trio_ucx.ucp._quirks.address_layout import parse_worker_address
from trio_ucx.ucp._worker_address import VERSION


class Reader:
    """Random bytes as a source of choices; zeros behind their end."""

    def __init__(self, data: bytes) -> None:
        self._data = data
        self._at = 0

    def __bool__(self) -> bool:
        return self._at < len(self._data)

    def bytes(self, count: int) -> bytes:
        found = self._data[self._at : self._at + count]
        self._at += count
        return found.ljust(count, b"\0")

    def below(self, bound: int) -> int:
        size = 1 if bound <= 256 else 2 if bound <= 65536 else 8
        return int.from_bytes(self.bytes(size), "little") % bound

    def choose(self, things: list[Any]) -> Any:
        return things[self.below(len(things))]


def frame(data: bytes) -> None:
    """A control frame: what is accepted is encoded to the same bytes."""
    try:
        decoded = wire.decode_frame(data)
    except wire.ProtocolError:
        return
    assert wire.encode_frame(decoded) == data


def with_checksum(data: bytes) -> bytes:
    return data + struct.pack("<I", zlib.crc32(data))


def ended(data: bytes) -> bytes:
    """A worker address, with an end that is right."""
    return with_checksum(data + b"TUWA" + bytes([VERSION]))


def description(data: bytes) -> None:
    """What a peer says about itself: as it is, and with checksums that are right."""
    for each in (data, with_checksum(ended(data))):
        try:
            decoded = PeerDescription.decode(each)
        except wire.ProtocolError:
            continue
        assert PeerDescription.decode(decoded.encode()) == decoded


def address(data: bytes) -> None:
    """A worker address of UCX's; and of trio_ucx's, with a checksum that is right."""
    with contextlib.suppress(ValueError):
        found = WorkerAddress(ended(data))
        assert WorkerAddress(bytes(found)) == found
    try:
        parse_worker_address(data)
    except ValueError:
        return


_REACHABLE = {key: reachable(key) for key in KEYS}
_KINDS = list(FrameKind)


def exchange(data: bytes) -> None:
    """The control socket, from any state of either side; half of the time, the peer knows the authkey."""
    reader = Reader(data)
    key = reader.choose(KEYS)
    is_client, state = reader.choose(_REACHABLE[key])
    side, peer = reach(state, is_client, key)
    sent = b""
    for _ in range(12):
        if not reader:
            break
        how = reader.below(4)
        if how == 0:
            sent += reader.bytes(reader.below(60))
            continue
        body = reader.bytes(reader.below(300)) if how == 1 else reader.choose(GOOD_BODIES)
        if how == 3 and body:
            at = reader.below(len(body))
            body = body[:at] + reader.bytes(1) + body[at + 1 :]
        peer._send(reader.choose(_KINDS), body)
        sent += peer.data_to_send()
    feed(side, sent, [1 + reader.below(400) for _ in range(reader.below(6))])
    assert side.exchange.state in ExchangeState


def rank_message(data: bytes) -> None:
    """What a rank says: what is accepted is encoded to the same message."""
    with contextlib.suppress(ValueError):
        message = mesh_messages.decode(data, 3)
        assert mesh_messages.decode(mesh_messages.encode(message), 3) == message


PLAIN_JSON = rpc_messages.Codec(
    b"J", rpc_messages._json_encode, rpc_messages._json_decode, rpc_messages._json_call, rpc_messages._check_names
)


def call(data: bytes) -> None:
    """A message of a call, in each encoding: msgpack, JSON by msgspec, and JSON without it."""
    with contextlib.suppress(rpc_messages.BadMessage):
        rpc_messages.decode_message(data)
    for codec in (*rpc_messages.CODECS.values(), PLAIN_JSON):
        with contextlib.suppress(rpc_messages.BadMessage):
            rpc_messages.decode_head(codec, data)
        with contextlib.suppress(rpc_messages.BadMessage):
            name, left, metadata, _ = rpc_messages.decode_call(codec, data)
            assert isinstance(name, str) and (left is None or 0 <= left < float("inf"))
            assert all(isinstance(text, str) for item in (metadata or {}).items() for text in item)


_FRAMES = list(wire._FRAMES.values())
_SIZES = [0, 1, 8, 1000, 1024, 1025, 5000, 5001, 12_000, 30_000]


def connection(data: bytes) -> None:
    """An open connection: the peer sends any frames and messages, while the program at this end goes on."""
    with simulated():
        _Attack(Reader(data)).run()


class _Attack:
    def __init__(self, reader: Reader) -> None:
        self.reader = reader
        self.world = World(window=reader.choose([4096, 40_000]))
        #: The honest side, and the one whose place the attacker takes.
        self.side, self.other = self.world.sides
        for each in self.world.sides:
            each.engine.peer_is_hostile = True
        self._buffers: list[Pinned] = []

    def run(self) -> None:
        steps: list[Callable[[], object]] = [
            self._raw_frame,
            self._frame,
            self._frame,
            self._message,
            self._message,
            self._deliver,
            self._deliver,
            lambda: self.side.send(self.reader.below(3), self.reader.choose(_SIZES)),
            lambda: self.side.receive(self.reader.below(3), self.reader.choose(list(Want))),
            lambda: self.side.cancel_send(self.reader.below(8)),
            lambda: self.side.cancel_receive(self.reader.below(8)),
            lambda: self.side.start_write(b"x" * self.reader.choose(_SIZES)) if self.side.can_send else None,
            self.side.advance,
            self.side.read,
            self.side.cancel_read,
            self.side.close,
            self._control,
            self._finish_transfer,
            lambda: self.side.transport.deliver(1 + self.reader.below(4)),
        ]
        for _ in range(60):
            if not self.reader:
                break
            self.reader.choose(steps)()
            self.side.engine.links.flush()
            self.side.collect()
            self.world.check_errors()
        self._end()

    def _send(self, queue: int, data: bytes) -> None:
        self.other.transport.wire.append(InFlight(queue, data, sender=self.other.transport))

    def _raw_frame(self) -> None:
        self._send(wire.CONTROL, self.reader.bytes(self.reader.below(40)))

    def _frame(self) -> None:
        cls = self.reader.choose(_FRAMES)
        fields = [self._near(2 ** (8 * struct.calcsize(field)) - 1) for field in cls.format[2:]]
        self._send(wire.CONTROL, struct.pack(cls.format, cls.kind, *fields))

    def _near(self, most: int) -> int:
        """An extreme number, or one that an honest peer could say now."""
        counts = self.side.link.native.counts
        likely = [0, most, 1, self.reader.below(256), counts.sent, self.side.link.sending.window - counts.credit]
        return max(0, min(most, int(self.reader.choose(likely))))

    def _message(self) -> None:
        queue = self.reader.choose([0, 1, 2, 7, wire.STREAM, wire.STREAM, wire.CONTROL, 2**31 - 1, 2**31 + 9])
        size = self.reader.choose(_SIZES)
        if size >= self.side.transport.threshold and queue != wire.CONTROL:
            pins = Pinned(bytearray(size))
            self._buffers.append(pins)
            self.other.transport.wire.append(InFlight(queue, None, pins, sender=self.other.transport))
        else:
            self._send(queue, bytes(size))

    def _deliver(self) -> None:
        self.other.transport.deliver(1 + self.reader.below(4))

    def _finish_transfer(self) -> None:
        self.side.transport.finish_transfer(self.reader.below(8))

    def _control(self) -> None:
        if self.side.link.share.handle is not None:
            if self.reader.below(2):
                self.side.link.closing.peer_aborted(self.reader.below(2**62))
            else:
                self.side.link.closing.control_lost(Loss("ended"))

    def _end(self) -> None:
        """After an abort nothing is left of the connection, whatever the peer has done."""
        side = self.side
        side.abort()
        self.other.abort()
        for each in self.world.sides:
            each.transport.wire.clear()
        while side.transport.finish_transfer(0) or self.other.transport.finish_transfer(0):
            pass
        self.world.check_errors()
        _check_released(side)
        for pins in self._buffers:
            pins.release()


def _check_released(side: Side) -> None:
    side.collect()
    assert not side.engine.in_flight, side.engine.in_flight
    assert not side.receivers and not side.link.receiving.waiting and not side.engine.links.waiting
    assert side.link.buffers_released() and not side.link.sending.waiting
    for buffer in side.buffers:
        buffer.append(0)  # not if it is pinned


TARGETS: dict[str, Callable[[bytes], None]] = {
    target.__name__: target for target in (frame, description, address, exchange, rank_message, call, connection)
}
