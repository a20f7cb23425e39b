"""Every field of the exchange is checked where it is decoded, and no value of a peer's does harm."""

from __future__ import annotations

import contextlib
import itertools
import random
import re
import struct
from collections.abc import Callable, Iterator
from functools import partial

import attrs
import pytest
import trio
from helpers import open_listener, open_pair, pattern
from injected_faults import change_descriptions
from samples import some_description, with_field, with_field_of_worker

import trio_ucx
from trio_ucx import ucp
from trio_ucx._handshake import exchange, peer_description
from trio_ucx._handshake.peer_description import PeerDescription
from trio_ucx._rules import wire
from trio_ucx._rules.wire import ProtocolError
from trio_ucx._util.fields import Field
from trio_ucx.testing import internals
from trio_ucx.ucp import _worker_address as worker_address
from trio_ucx.ucp._keys import KEY_SIZE

FRAMES = list(wire._FRAMES.values())


def width(format: str) -> int:
    """How many values a field has."""
    return 1 << 8 * struct.calcsize("<" + format)


def extremes(format: str, limits: tuple[int, int]) -> Iterator[int]:
    """Values at the limits of what is allowed, and of what the field can carry; and some others."""
    least, most = limits
    end = width(format)
    chance = random.Random(1)
    near = {0, 1, least - 1, least, most, most + 1, end // 2 - 1, end // 2, end - 2, end - 1}
    near |= {chance.randrange(end) for _ in range(5)} | {chance.randint(least, most) for _ in range(5)}
    return iter(sorted(value for value in near if 0 <= value < end))


# ---- control frames ----


def test_fields_of_control_frames() -> None:
    named = [thing for thing in vars(wire).values() if attrs.has(thing) and hasattr(thing, "kind")]
    assert sorted(frame.kind for frame in named) == sorted(wire._FRAMES)
    for frame in FRAMES:
        fields = frame.format[2:]
        assert len(attrs.fields(frame)) == len(fields), frame
        for values in ([1] * len(fields), [width(field) - 1 for field in fields]):
            data = struct.pack(frame.format, frame.kind, *values)
            assert wire.encode_frame(frame(*values)) == data and wire.decode_frame(data) == frame(*values)
            assert len(data) <= wire.MAX_FRAME
            for bad in (b"", data + b"x", b"\xff" + data[1:]):
                with pytest.raises(ProtocolError):
                    wire.decode_frame(bad)


# ---- peer descriptions ----

#: Each field, and what changes it in a peer description.
FIELDS = [
    *(
        (field, partial(with_field, layout=peer_description.LAYOUT, number=number))
        for number, field in enumerate(peer_description.LAYOUT.fields)
    ),
    *(
        (field, partial(with_field_of_worker, number=number))
        for number, field in enumerate(worker_address.LAYOUT.fields)
    ),
]


def limits_of(field: Field) -> tuple[int, int]:
    return field.least, width(field.format) - 1 if field.most is None else field.most


def test_ranges() -> None:
    for field, _ in FIELDS:
        assert field.least >= 0 and (field.most is None or field.least < field.most < width(field.format)), field


@pytest.mark.parametrize(("field", "changed"), FIELDS, ids=[field.name for field, _ in FIELDS])
def test_fields_of_descriptions(field: Field, changed: Callable[..., bytes]) -> None:
    good = some_description().encode()
    if field.format.endswith("s"):
        for value in (bytes(16), b"\xff" * 16):
            PeerDescription.decode(changed(good, value=value))
        return
    least, most = limits_of(field)
    for value in extremes(field.format, (least, most)):
        data = changed(good, value=value)
        allowed = least <= value <= most and (data == good or not re.match("(the )?(length|number) of", field.name))
        if allowed and not (field.name == "rendezvous threshold" and 0 < value < wire.MIN_THRESHOLD):
            assert PeerDescription.decode(data).encode() == data
        else:
            with pytest.raises(ProtocolError):
                PeerDescription.decode(data)


# ---- the frames of the exchange ----


def _allowed(allowed: bool, decode: object) -> None:
    assert callable(decode)
    if allowed:
        decode()
    else:
        with pytest.raises(ProtocolError):
            decode()


@pytest.mark.parametrize("is_client", [True, False])
def test_fields_of_other_frames(is_client: bool) -> None:
    """Flags of the preamble, the summary in WELCOME, TAKE, the count in ABORT."""

    def side(state: exchange.ExchangeState) -> exchange.Exchange:
        made = exchange.Exchange(is_client=is_client, software="", authkey=None)
        made.state = state
        return made

    def heard(state: exchange.ExchangeState, data: bytes) -> exchange.Event | None:
        listening = side(state)
        listening.receive_data(data)
        return listening.next_event()

    for flags in extremes("H", (0, 0)):
        preamble = wire.MAGIC + struct.pack("<HH", wire.VERSION, flags) + bytes(32)
        _allowed(flags == 0, lambda preamble=preamble: heard(exchange.ExchangeState.PREAMBLE, preamble))
    for sent in extremes("Q", (0, exchange.MAX_SENT)):
        frame = struct.pack("<IBQ", 9, exchange.FrameKind.ABORT, sent)
        _allowed(sent <= exchange.MAX_SENT, lambda frame=frame: heard(exchange.ExchangeState.OPENED, frame))
    if is_client:
        for made, shared, proven in itertools.product(
            extremes("H", (0, 4)), extremes("H", (0, 4)), extremes("B", (0, 1))
        ):
            body = struct.pack("<HHB", made, shared, proven) + bytes(KEY_SIZE) + some_description().encode()
            frame = struct.pack("<IB", 1 + len(body), exchange.FrameKind.WELCOME) + body
            _allowed(shared <= made and proven <= 1, lambda frame=frame: heard(exchange.ExchangeState.WELCOME, frame))
    else:
        for generation, greet in itertools.product(extremes("H", (0, 4)), extremes("B", (0, 1))):
            frame = struct.pack("<IBHB", 4, exchange.FrameKind.TAKE, generation, greet)
            _allowed(greet <= 1, lambda frame=frame: heard(exchange.ExchangeState.TAKE, frame))


# ---- over UCX: nobody else is harmed ----


@pytest.mark.sample(2)
@pytest.mark.parametrize("liar", ["client", "server"])
async def test_extreme_descriptions_from_a_peer(transports: str, liar: str, monkeypatch: pytest.MonkeyPatch) -> None:
    async with (
        ucp.open_worker(config={"TLS": transports}) as worker,
        ucp.open_worker(config={"TLS": transports}) as other,
        open_pair(worker) as (near, near_server),
    ):
        lies: list[Callable[[bytes], bytes]] = []
        telling: Callable[[bytes], bytes] = bytes
        for field, changed in FIELDS:
            if not field.format.endswith("s"):
                least, most = limits_of(field)
                values = {0, least, most, most + 1, width(field.format) - 1}
                lies += [partial(changed, value=value) for value in sorted(values) if value < width(field.format)]

        change_descriptions(other, lambda data: telling(data), monkeypatch)
        async with open_listener(other if liar == "server" else worker, connect_timeout=0.5) as listener:
            for telling in lies:  # noqa: B007 (change_descriptions() gets it)
                with contextlib.suppress(OSError, trio.BrokenResourceError):
                    client = await trio_ucx.connect(
                        listener.address, worker=worker if liar == "server" else other, connect_timeout=0.5
                    ).__aenter__()
                    client.abort()
                    with trio.move_on_after(0.5):
                        (await listener.accept()).abort()
        await _unharmed(worker, near, near_server)


async def _unharmed(worker: ucp.Worker, client: trio_ucx.Connection, server: trio_ucx.Connection) -> None:
    assert internals(worker).broken is None
    with trio.fail_after(15):
        client.send_nowait(pattern(100_000))
        assert await server.receive() == pattern(100_000)
