"""Every field of the exchange is checked where it is decoded, and no value of a peer's does harm."""

from __future__ import annotations

import contextlib
import itertools
import random
import struct
import zlib
from collections.abc import Iterator

import attrs
import pytest
import trio
from helpers import open_pair, pattern
from injected_faults import change_facts
from samples import ALL, some_facts

import trio_ucx
from trio_ucx import _wire as wire
from trio_ucx import ucp
from trio_ucx._handshake import exchange, facts
from trio_ucx._handshake.facts import Facts
from trio_ucx._wire import ProtocolError
from trio_ucx.testing import internals

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
            assert wire.decode_frame(struct.pack(frame.format, frame.kind, *values)) == frame(*values)


# ---- facts ----


def with_field(data: bytes, number: int, value: object) -> bytes:
    """Facts with one field changed, and the checksum corrected."""
    values = list(facts._FACTS.unpack_from(data))
    values[number] = value
    body = facts._FACTS.pack(*values) + data[facts._FACTS.size : -4]
    return body + struct.pack("<I", zlib.crc32(body))


NUMBERED = list(enumerate(facts.FIELDS))


def test_every_fact_has_limits() -> None:
    for _, format, limits in facts.FIELDS:
        if limits is None:
            assert format.endswith("s")
        else:
            assert 0 <= limits[0] < limits[1] < width(format)
    assert len(facts._FACTS.unpack(bytes(facts._FACTS.size))) == len(facts.FIELDS)


@pytest.mark.parametrize(("number", "field"), NUMBERED, ids=[name for _, (name, _, _) in NUMBERED])
def test_fields_of_facts(number: int, field: tuple[str, str, tuple[int, int] | None]) -> None:
    name, format, limits = field
    good = some_facts().encode()
    if limits is None:
        for value in (bytes(16), b"\xff" * 16):
            Facts.decode(with_field(good, number, value))
        return
    for value in extremes(format, limits):
        unchanged = facts._FACTS.unpack_from(good)[number] == value
        allowed = limits[0] <= value <= limits[1] and (unchanged or not name.startswith("length"))
        if allowed and not (name == "rendezvous threshold" and 0 < value < wire.MIN_THRESHOLD):
            assert Facts.decode(with_field(good, number, value)).encode() == with_field(good, number, value)
        else:
            with pytest.raises(ProtocolError):
                Facts.decode(with_field(good, number, value))


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
    """Flags of the preamble, the standing in WELCOME, TAKE, the count in ABORT."""

    def side(state: exchange.State) -> exchange.Exchange:
        made = exchange.Exchange(is_client=is_client, software="", authkey=None)
        made.state = state
        return made

    def heard(state: exchange.State, data: bytes) -> exchange.Event | None:
        listening = side(state)
        listening.receive_data(data)
        return listening.next_event()

    for flags in extremes("H", (0, 0)):
        preamble = wire.MAGIC + struct.pack("<HH", wire.VERSION, flags) + bytes(32)
        _allowed(flags == 0, lambda preamble=preamble: heard(exchange.State.PREAMBLE, preamble))
    for sent in extremes("Q", (0, exchange.MAX_SENT)):
        frame = struct.pack("<IBQ", 9, exchange.Kind.ABORT, sent)
        _allowed(sent <= exchange.MAX_SENT, lambda frame=frame: heard(exchange.State.OPENED, frame))
    if is_client:
        for made, shared, greeted in itertools.product(
            extremes("H", (0, 4)), extremes("H", (0, 4)), extremes("B", (0, 1))
        ):
            body = struct.pack("<HHB", made, shared, greeted) + some_facts().encode()
            frame = struct.pack("<IB", 1 + len(body), exchange.Kind.WELCOME) + body
            _allowed(shared <= made and greeted <= 1, lambda frame=frame: heard(exchange.State.WELCOME, frame))
    else:
        for generation, greet in itertools.product(extremes("H", (0, 4)), extremes("B", (0, 1))):
            frame = struct.pack("<IBHB", 4, exchange.Kind.TAKE, generation, greet)
            _allowed(greet <= 1, lambda frame=frame: heard(exchange.State.TAKE, frame))


def test_process_ids_in_addresses() -> None:
    """Process ids in the addresses and descriptors of peers are checked, too."""
    for pid in (2**22 + 1, 2**31, 2**32 - 1):
        address = ucp.WorkerAddress.from_ucx(ALL, process=attrs.evolve(some_facts().host.process, pid=pid))
        with pytest.raises(ValueError, match="process"):
            ucp.WorkerAddress(bytes(address))


# ---- over UCX: nobody else is harmed ----


@pytest.mark.sample(2)
@pytest.mark.parametrize("liar", ["client", "server"])
async def test_extreme_facts_from_a_peer(transports: str, liar: str, monkeypatch: pytest.MonkeyPatch) -> None:
    async with (
        ucp.open_worker(config={"TLS": transports}) as worker,
        ucp.open_worker(config={"TLS": transports}) as other,
        open_pair(worker) as (near, near_server),
    ):
        lies: list[tuple[int, int]] = []
        telling = 0, 0
        for number, (_, format, limits) in NUMBERED:
            if limits is not None:
                lies += [(number, value) for value in extremes(format, limits) if value in (0, *limits, limits[1] + 1)]
                lies.append((number, width(format) - 1))

        change_facts(other, lambda data: with_field(data, *telling), monkeypatch)
        [listener] = await trio_ucx.open_ucx_listeners(
            0, host="127.0.0.1", worker=other if liar == "server" else worker, connect_timeout=0.5
        )
        async with listener:
            for telling in lies:  # noqa: B007 (with_field() gets it)
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
