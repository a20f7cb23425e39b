"""The exchange on the control socket, as a pure state machine; and listeners while exchanges go on."""

from __future__ import annotations

import itertools
import random
import struct
from collections.abc import Callable, Iterable
from typing import Any

import attrs
import pytest
import trio
import trio.testing
from helpers import expect_closed, free_port, open_listener, open_raw_listener, pattern, until
from hypothesis import given, settings
from hypothesis import strategies as st
from samples import ALL, HOST, NETWORK, ONLY_SHARED, SAMPLES, description_with, some_description, with_checksum

import trio_ucx
from trio_ucx import ucp
from trio_ucx._handshake.exchange import (
    EXPECTED,
    MAX_FRAME,
    Aborted,
    Again,
    Event,
    Exchange,
    ExchangeState,
    FrameKind,
    Opened,
    Refused,
    Taken,
    UnknownProtocol,
    Welcomed,
)
from trio_ucx._handshake.peer_description import PeerDescription, SharedMemory, why_not_shared_memory
from trio_ucx._rules import wire
from trio_ucx._rules.wire import MAGIC, VERSION, ProtocolError
from trio_ucx._util.process import Host, Process
from trio_ucx.ucp._engine.endpoints_to_worker import EndpointSummary
from trio_ucx.ucp._keys import KEY_SIZE
from trio_ucx.ucp._quirks.option_limits import DEFAULT_SIZES
from trio_ucx.ucp._transports import obstacle_to_shared_memory
from trio_ucx.ucp._worker_address import MAX_ADDRESS, WorkerAddress

KEYS = [None, b"secret"]
HEAD = struct.Struct("<IB")
#: Magic, version, flags, nonce.
PREAMBLE = 8 + 2 + 2 + 32
SUMMARIES = [
    EndpointSummary(),
    EndpointSummary(3),
    EndpointSummary(3, 2),
    EndpointSummary(7, 7, True),
    EndpointSummary(65535, 65535, True),
]


@attrs.define(eq=False)
class Side:
    """One side, which answers as the library does.

    Attributes:
        summary: what a server says about its endpoints, in WELCOME.
        choice: what a client takes: the generation, and whether both send HELLO; None: it sends AGAIN.
        again: whether a server answers TAKE with AGAIN.
        silent_after: an event that this side does not answer.
        sent: everything that it has sent.
    """

    exchange: Exchange
    description: PeerDescription
    summary: EndpointSummary = SUMMARIES[0]
    choice: tuple[int, bool] | None = (1, True)
    again: bool = False
    silent_after: type | None = None
    events: list[Event] = attrs.field(factory=list)
    error: ProtocolError | None = None
    sent: bytes = b""

    def take(self, data: bytes) -> None:
        self.exchange.receive_data(data)
        try:
            while (event := self.exchange.next_event()) is not None:
                self.events.append(event)
                if type(event) is not self.silent_after:
                    self.answer(event)
        except ProtocolError as error:
            self.error = error
            self.exchange.refuse(str(error))

    def answer(self, event: Event) -> None:
        exchange = self.exchange
        match event:
            case Opened():
                exchange.welcome(self.description, self.summary)
            case Welcomed():
                if self.choice is None:
                    exchange.again()
                else:
                    generation, greet = self.choice
                    exchange.take(generation, greet=greet)
            case Taken() if self.again:
                exchange.again()

    def data(self) -> bytes:
        data = self.exchange.data_to_send()
        self.sent += data
        return data

    @property
    def said(self) -> list[type]:
        return [type(event) for event in self.events]


def two_sides(
    client_key: bytes | None = None, server_key: bytes | None = None, *, again: bool = False
) -> tuple[Side, Side]:
    client = Exchange(is_client=True, software="client 1", authkey=client_key)
    server = Exchange(is_client=False, software="server 1", authkey=server_key)
    ours = Side(client, some_description(software="client 1"))
    theirs = Side(server, some_description(software="server 1"), again=again)
    client.open(ours.description)
    return ours, theirs


Cut = Callable[[bytes], Iterable[bytes]]


def whole(data: bytes) -> Iterable[bytes]:
    return [data]


def single_bytes(data: bytes) -> Iterable[bytes]:
    return [data[at : at + 1] for at in range(len(data))]


def at_random(chance: random.Random) -> Cut:
    def cut(data: bytes) -> Iterable[bytes]:
        while data:
            length = chance.randrange(1, 2 ** chance.randrange(1, 11))
            yield data[:length]
            data = data[length:]

    return cut


def talk(client: Side, server: Side, cut: Cut = whole) -> None:
    """Carries bytes to and fro until neither side has any to send."""
    while True:
        forth, back = client.data(), server.data()
        if not forth and not back:
            return
        for side, data in ((server, forth), (client, back)):
            for piece in cut(data):
                side.take(piece)


CUTS = [whole, single_bytes, *(at_random(random.Random(seed)) for seed in range(10))]


# ---- both sides against each other ----


@pytest.mark.parametrize("key", KEYS)
@pytest.mark.parametrize("summary", SUMMARIES)
@pytest.mark.parametrize("choice", [(0, True), (8, False), (65535, True)])
@pytest.mark.parametrize("again", [False, True])
def test_both_sides(key: bytes | None, summary: EndpointSummary, choice: tuple[int, bool], again: bool) -> None:
    for cut in CUTS:
        client, server = two_sides(key, key, again=again)
        server.summary, client.choice = summary, choice
        talk(client, server, cut)
        assert client.error is server.error is None
        assert server.events == [Opened(client.description), Taken(*choice)]
        assert client.events == [Welcomed(server.description, summary), *[Again()] * again]
        assert (
            client.exchange.state is server.exchange.state is (ExchangeState.ENDED if again else ExchangeState.GREETING)
        )


@pytest.mark.parametrize("key", KEYS)
def test_client_that_finds_no_endpoint(key: bytes | None) -> None:
    """It sends AGAIN instead of TAKE."""
    for cut in CUTS:
        client, server = two_sides(key, key)
        client.choice = None
        talk(client, server, cut)
        assert client.error is server.error is None
        assert server.events == [Opened(client.description), Again()]
        assert client.events == [Welcomed(server.description, server.summary)]
        assert client.exchange.state is server.exchange.state is ExchangeState.ENDED
        for exchange in (client.exchange, server.exchange):
            exchange.abort()
            assert exchange.data_to_send() == b""


@pytest.mark.parametrize("key", KEYS)
@pytest.mark.parametrize("proven", [False, True])
@pytest.mark.parametrize("how", ["abort", "refuse"])
@pytest.mark.parametrize("who", ["client", "server"])
def test_end_after_the_exchange(key: bytes | None, proven: bool, how: str, who: str) -> None:
    for cut in CUTS:
        client, server = two_sides(key, key)
        talk(client, server)
        if proven:
            client.exchange.mark_opened()
            server.exchange.mark_opened()
        one, other = (client, server) if who == "client" else (server, client)
        del other.events[:]
        one.exchange.abort() if how == "abort" else one.exchange.refuse("no")
        talk(client, server, cut)
        assert one.error is other.error is None
        if how == "abort":
            assert other.events == [Aborted()] and one.exchange.state is other.exchange.state is ExchangeState.ENDED
        elif proven:
            assert other.events == [] and one.exchange.state is ExchangeState.OPENED  # too late to refuse
        else:
            assert other.events == [Refused("no")] and one.exchange.state is other.exchange.state is ExchangeState.ENDED
        one.exchange.abort()
        if not (how == "refuse" and proven):
            assert one.data() == b""


def test_client_whose_connection_is_open_before_the_server_s() -> None:
    """The listener may still close, its connect_timeout may end, or its endpoint may have failed."""
    for key, again in itertools.product(KEYS, (False, True)):
        client, server = two_sides(key, key)
        talk(client, server)
        client.exchange.mark_opened()
        del client.events[:]
        server.exchange.again() if again else server.exchange.refuse("the listener closed")
        talk(client, server)
        assert client.error is None and client.events == [Again() if again else Refused("the listener closed")]
        assert client.exchange.state is server.exchange.state is ExchangeState.ENDED


def test_frames_reflected_to_their_sender_are_refused() -> None:
    """A peer without the key that sends the client's own frames back."""
    client, _ = two_sides(b"k", b"k")
    client.take(client.data())
    assert client.data() == b""  # nothing about itself
    for is_client, kind, state in (
        (True, FrameKind.PROOF, ExchangeState.PROOF),
        (True, FrameKind.WELCOME, ExchangeState.WELCOME),
        (True, FrameKind.AGAIN, ExchangeState.GREETING),
        (True, FrameKind.AGAIN, ExchangeState.OPENED),
        (False, FrameKind.AGAIN, ExchangeState.TAKE),
    ):
        side, peer = reach(state, is_client, b"k")
        peer.is_client = is_client  # the right key, the wrong role
        peer._send(kind, BODIES[kind])
        side.take(peer.data_to_send())
        assert "authkeys" in str(side.error) and side.events == []


# ---- every state and every frame ----


def reach(state: ExchangeState, is_client: bool, key: bytes | None) -> tuple[Side, Exchange]:
    """A side in this state, and a peer whose frames have valid codes whatever they are."""
    client, server = two_sides(key, key)
    side, other = (client, server) if is_client else (server, client)
    if state in (ExchangeState.OPEN, ExchangeState.PROOF):
        server.take(client.data()[:PREAMBLE])
        client.take(server.data()[:PREAMBLE] if is_client else b"")
    elif state is not ExchangeState.PREAMBLE:
        if state is ExchangeState.WELCOME:
            other.silent_after = Opened
        elif state is ExchangeState.TAKE:
            client.silent_after = Welcomed
        talk(client, server)
    if state is ExchangeState.OPENED:
        side.exchange.mark_opened()
    elif state is ExchangeState.ENDED:
        side.exchange.abort()
    side.data()
    assert side.exchange.state is state and side.error is None
    side.events.clear()
    peer = Exchange(is_client=not is_client, software="", authkey=key)
    peer.data_to_send()
    peer._transcript = side.exchange._transcript.copy()
    return side, peer


#: A good body of each kind.
BODIES = {
    FrameKind.REFUSE: b"because",
    FrameKind.PROOF: b"",
    FrameKind.OPEN: some_description().encode(),
    FrameKind.WELCOME: struct.pack("<HHB", 4, 3, 1) + some_description().encode(),
    FrameKind.AGAIN: b"",
    FrameKind.TAKE: struct.pack("<HB", 3, 0),
    FrameKind.ABORT: struct.pack("<Q", 0),
}
#: Those that contain a key if there is no authkey.
WITH_KEY = {
    FrameKind.OPEN: bytes(KEY_SIZE) + some_description().encode(),
    FrameKind.WELCOME: struct.pack("<HHB", 4, 3, 1) + bytes(KEY_SIZE) + some_description().encode(),
}


GOOD_BODIES = [*BODIES.values(), *WITH_KEY.values()]


def body_of(kind: FrameKind, key: bytes | None) -> bytes:
    return WITH_KEY[kind] if key is None and kind in WITH_KEY else BODIES[kind]


EVENTS = {
    FrameKind.REFUSE: Refused,
    FrameKind.OPEN: Opened,
    FrameKind.WELCOME: Welcomed,
    FrameKind.AGAIN: Again,
    FrameKind.TAKE: Taken,
    FrameKind.ABORT: Aborted,
}


def reachable(key: bytes | None) -> list[tuple[bool, ExchangeState]]:
    """All states of both sides; there is no PROOF without an authkey."""
    return [
        (is_client, state)
        for is_client in (True, False)
        for state in ExchangeState
        if (is_client, state) in EXPECTED or state in (ExchangeState.PREAMBLE, ExchangeState.TAKE, ExchangeState.ENDED)
        if state is not ExchangeState.PROOF or key is not None
    ]


def test_where_each_kind_may_come() -> None:
    """The table again, by kind."""
    places = {kind: {place for place, kinds in EXPECTED.items() if kind in kinds} for kind in FrameKind}
    client_late, server_late = (
        {(is_client, ExchangeState.GREETING), (is_client, ExchangeState.OPENED)} for is_client in (True, False)
    )
    assert places == {
        FrameKind.REFUSE: set(EXPECTED) - {(False, ExchangeState.OPENED)},
        FrameKind.PROOF: {(True, ExchangeState.PROOF)},
        FrameKind.OPEN: {(False, ExchangeState.OPEN)},
        FrameKind.WELCOME: {(True, ExchangeState.WELCOME)},
        FrameKind.AGAIN: client_late | {(False, ExchangeState.TAKE)},
        FrameKind.TAKE: {(False, ExchangeState.TAKE)},
        FrameKind.ABORT: client_late | server_late,
    }


@pytest.mark.parametrize("key", KEYS)
def test_every_state_and_every_kind(key: bytes | None) -> None:
    """What is not in the table ends the exchange, as soon as its kind is known."""
    for is_client, state in reachable(key):
        for number in [*range(20), 127, 255]:
            side, peer = reach(state, is_client, key)
            if number in EXPECTED.get((is_client, state), ()):
                kind = FrameKind(number)
                peer._send(kind, body_of(kind, key))
                side.exchange.receive_data(peer.data_to_send())
                event = side.exchange.next_event()
                if kind is FrameKind.PROOF:
                    assert event is None and side.exchange.state is ExchangeState.WELCOME
                else:
                    assert type(event) is EVENTS[kind], (state, kind)
                if kind in (FrameKind.REFUSE, FrameKind.AGAIN, FrameKind.ABORT):
                    assert side.exchange.state is ExchangeState.ENDED
                continue
            side.take(HEAD.pack(40, number))
            if state is ExchangeState.ENDED:
                assert side.error is None
            else:
                assert isinstance(side.error, UnknownProtocol if state is ExchangeState.PREAMBLE else ProtocolError)
                if state is not ExchangeState.PREAMBLE:
                    assert f"kind {number} is out of place" in str(side.error)
            assert side.exchange.state is ExchangeState.ENDED and side.events == []
            side.take(bytes(1000))
            assert side.exchange.next_event() is None and side.exchange.data_to_send() == b""


@pytest.mark.parametrize("key", KEYS)
@pytest.mark.parametrize("length", [0, MAX_FRAME + 1, 2**31, 2**32 - 1])
def test_impossible_lengths(key: bytes | None, length: int) -> None:
    for is_client, state in reachable(key):
        if (is_client, state) not in EXPECTED:
            continue
        for kind in EXPECTED[is_client, state]:
            side, _ = reach(state, is_client, key)
            side.take(HEAD.pack(length, kind))
            assert isinstance(side.error, ProtocolError) and f"{length} bytes" in str(side.error)
            assert side.exchange.state is ExchangeState.ENDED


def test_longest_frame() -> None:
    side, _ = reach(ExchangeState.OPEN, False, None)
    side.take(HEAD.pack(MAX_FRAME, FrameKind.OPEN) + bytes(MAX_FRAME - 2))
    assert side.error is None and side.events == []
    side.take(b"x")
    assert isinstance(side.error, ProtocolError)


MALFORMED: list[tuple[FrameKind, bytes]] = [
    *(
        (FrameKind.OPEN, body)
        for body in (b"", b"x", bytes(500), some_description().encode()[:-1], some_description().encode() + b"x")
    ),
    *((FrameKind.WELCOME, body) for body in (b"", bytes(4), bytes(5), bytes(600), some_description().encode())),
    *((kind, body[:-1]) for bodies in (BODIES, WITH_KEY) for kind, body in bodies.items() if kind in WITH_KEY),
    *((kind, body + b"x") for bodies in (BODIES, WITH_KEY) for kind, body in bodies.items() if kind in WITH_KEY),
    *((kind, bytes(KEY_SIZE)) for kind in WITH_KEY),
    *(
        (FrameKind.WELCOME, struct.pack("<HHB", *summary) + some_description().encode())
        for summary in ((0, 1, 0), (4, 5, 1), (65534, 65535, 0), (4, 4, 2), (4, 4, 255))
    ),
    *((FrameKind.TAKE, body) for body in (b"", bytes(2), bytes(4), bytes(4096))),
    *((FrameKind.TAKE, struct.pack("<HB", 1, greet)) for greet in (2, 255)),
    (FrameKind.AGAIN, b"x"),
    (FrameKind.PROOF, b"x"),
]


@pytest.mark.parametrize("key", KEYS)
def test_malformed_bodies(key: bytes | None) -> None:
    """Their codes are right."""
    seen = set()
    for (is_client, state), (kind, body) in itertools.product(reachable(key), MALFORMED):
        if kind not in EXPECTED.get((is_client, state), ()):
            continue
        side, peer = reach(state, is_client, key)
        peer._send(kind, body)
        side.take(peer.data_to_send())
        assert isinstance(side.error, ProtocolError) and side.events == [], (state, kind, body)
        assert "authkey" not in str(side.error) and side.exchange.state is ExchangeState.ENDED
        seen.add(kind)
    assert seen == {kind for kind, _ in MALFORMED} - ({FrameKind.PROOF} if key is None else set())


def test_reasons_are_printable_and_short() -> None:
    for body in (b"\0\x1b[2J\n" * 10, b"\xff" * 100, b"x" * 50_000, b"", "ü".encode() * 700):
        side, _ = reach(ExchangeState.GREETING, True, None)
        side.take(HEAD.pack(1 + len(body), FrameKind.REFUSE) + body)
        [event] = side.events
        assert isinstance(event, Refused) and event.reason.isprintable() and len(event.reason) <= 1000
    side, _ = reach(ExchangeState.OPEN, False, None)
    side.exchange.refuse("ü" * 5000)
    assert len(side.exchange.data_to_send()) < 1100


# ---- versions and keys ----


def of_version(data: bytes, version: int) -> bytes:
    return data[:8] + struct.pack("<H", version) + data[10:]


@pytest.mark.parametrize("key", KEYS)
@pytest.mark.parametrize("version", [VERSION - 1, VERSION + 1, 99, 65535])
def test_unknown_version_is_refused_by_name(key: bytes | None, version: int) -> None:
    words = f"speaks wire version {version}, and this listener speaks {VERSION} (server 1)"
    client, server = two_sides(key, key)
    server.take(of_version(client.data(), version) + b"what this version says")
    assert words in str(server.error)
    answer = server.data()
    assert answer.startswith(MAGIC + struct.pack("<H", VERSION))
    # A client gets to know the reason, whatever else the other version says.
    client.take(of_version(answer, version))
    assert str(client.error) == str(server.error)

    words = f"the listener speaks wire version {version}, and this client speaks {VERSION} (client 1)"
    for begin in (
        b"",
        b"\x01",
        HEAD.pack(2**31, 1),
        HEAD.pack(50, FrameKind.PROOF) + bytes(100),
        HEAD.pack(2, 99) + b"x",
    ):
        client, server = two_sides(key, key)
        server.take(client.data())
        client.take(of_version(server.data()[:PREAMBLE], version) + begin)
        assert words in str(client.error)
        server.take(client.data())
        assert isinstance(server.events[-1], Refused) and words in server.events[-1].reason


@pytest.mark.parametrize(
    ("client_key", "server_key", "to_client", "to_server"),
    [
        (None, b"s", "this client has no authkey, and its peer wants one", "wants an authkey, and its peer has none"),
        (b"s", None, "this client wants an authkey, and its peer has none", "has no authkey, and its peer wants one"),
        (b"s", b"t", "the authkeys of the two sides differ", "the authkeys of the two sides differ"),
        (b"s", b"s" * 100, "the authkeys of the two sides differ", "the authkeys of the two sides differ"),
    ],
)
def test_keys_that_differ(client_key: bytes, server_key: bytes, to_client: str, to_server: str) -> None:
    for cut in CUTS:
        client, server = two_sides(client_key, server_key)
        talk(client, server, cut)
        for side, words in ((client, to_client), (server, to_server)):
            told = [str(side.error), *(event.reason for event in side.events if isinstance(event, Refused))]
            assert any(words in each for each in told), told
            assert Opened not in side.said and Welcomed not in side.said
            assert side.exchange.state is ExchangeState.ENDED
        for part in (HOST.process.host, ALL[9:], NETWORK[9:]):
            assert part not in server.sent
            if client_key is not None:
                assert part not in client.sent


@pytest.mark.parametrize("choice", [(1, True), None])
def test_wrong_code_at_each_frame(choice: tuple[int, bool] | None) -> None:
    """A byte that is changed on the way, anywhere: refused by whom it reaches, or, in a REFUSE, still a refusal."""
    client, server = two_sides(b"k", b"k", again=True)
    client.choice = choice
    talk(client, server)
    lengths = {"client": len(client.sent), "server": len(server.sent)}
    for who, length in lengths.items():
        for at in range(length):
            client, server = two_sides(b"k", b"k", again=True)
            client.choice = choice
            sender, receiver = (client, server) if who == "client" else (server, client)
            passed = 0
            while True:
                forth, back = bytearray(client.data()), bytearray(server.data())
                if not forth and not back:
                    break
                mine = forth if sender is client else back
                if passed <= at < passed + len(mine):
                    mine[at - passed] ^= 1 << at % 8
                passed += len(mine)
                server.take(forth)
                client.take(back)
            assert not {Taken, Again} & set(receiver.said), (who, at)
            if (
                sender.exchange.state is ExchangeState.GREETING
            ):  # its last frame was changed, and it knows nothing of that
                assert receiver.error is not None or receiver.events


# ---- arbitrary bytes ----

fuzz = settings(max_examples=300, deadline=None, derandomize=True, database=None)
pieces = st.lists(st.integers(1, 400), max_size=30)


def feed(side: Side, data: bytes, cuts: list[int]) -> None:
    """Takes any bytes without any exception but ProtocolError, and neither hoards nor talks much."""
    for length in [*cuts, len(data)]:
        if data[:length]:
            side.take(data[:length])
        data = data[length:]
        if side.exchange.state is not ExchangeState.ENDED:
            assert len(side.exchange._buffer) <= MAX_FRAME + HEAD.size
    assert len(side.data()) <= 80_000
    assert len(side.events) <= 3


def recorded(is_client: bool, again: bool, taken: bool) -> bytes:
    """What one side sends in a whole exchange without an authkey. It can be replayed to the other side."""
    client, server = two_sides(again=again)
    if not taken:
        client.choice = None
    talk(client, server)
    side = client if is_client else server
    side.exchange.abort()
    side.data()
    return side.sent


@fuzz
@given(data=st.data(), is_client=st.booleans(), key=st.sampled_from(KEYS))
def test_mutated_exchanges(data: st.DataObject, is_client: bool, key: bytes | None) -> None:
    words = bytearray(recorded(not is_client, data.draw(st.booleans()), data.draw(st.booleans())))
    for _ in range(data.draw(st.integers(0, 6))):
        at = data.draw(st.integers(0, len(words) - 1))
        how = data.draw(st.sampled_from(["change", "remove", "insert", "double"]))
        length = data.draw(st.integers(1, 60))
        if how == "change":
            words[at] = data.draw(st.integers(0, 255))
        elif how == "remove":
            del words[at : at + length]
        elif how == "insert":
            words[at:at] = data.draw(st.binary(max_size=60))
        else:
            words[at:at] = words[at : at + length]
        words = words or bytearray(b"x")
    client, server = two_sides(key, key)
    feed(client if is_client else server, bytes(words), data.draw(pieces))


@fuzz
@given(data=st.binary(max_size=2000), cuts=pieces, is_client=st.booleans(), preamble=st.booleans())
def test_random_bytes(data: bytes, cuts: list[int], is_client: bool, preamble: bool) -> None:
    client, server = two_sides()
    begin = (server if is_client else client).exchange
    if is_client:
        begin._send_preamble()
    feed(client if is_client else server, (begin.data_to_send()[:PREAMBLE] if preamble else b"") + data, cuts)


@fuzz
@given(
    frames=st.lists(
        st.tuples(
            st.sampled_from(list(FrameKind)),
            st.sampled_from(GOOD_BODIES) | st.binary(max_size=200),
        ),
        max_size=8,
    ),
    is_client=st.booleans(),
    key=st.sampled_from(KEYS),
    state=st.sampled_from(list(ExchangeState)),
    cuts=pieces,
)
def test_frames_with_right_codes(
    frames: list[tuple[FrameKind, bytes]], is_client: bool, key: bytes | None, state: ExchangeState, cuts: list[int]
) -> None:
    """A peer that knows the key, and says anything."""
    if (is_client, state) not in reachable(key):
        state = ExchangeState.GREETING
    side, peer = reach(state, is_client, key)
    for kind, body in frames:
        peer._send(kind, body)
    feed(side, peer.data_to_send(), cuts)


def test_endless_frames_are_not_kept() -> None:
    """A stranger that never stops: nothing is stored beyond one frame."""
    side, _ = reach(ExchangeState.OPEN, False, None)
    side.take(HEAD.pack(MAX_FRAME, FrameKind.OPEN))
    for _ in range(100):
        side.take(bytes(65536))
        if side.error is not None:
            break
        assert len(side.exchange._buffer) < 2 * MAX_FRAME
    assert isinstance(side.error, ProtocolError)


# ---- peer descriptions ----

WORKERS = st.builds(
    WorkerAddress._create,
    ucx=st.binary(min_size=10, max_size=500),
    network=st.binary(max_size=500),
    host=st.builds(
        Host,
        st.builds(
            Process,
            st.binary(min_size=16, max_size=16),
            st.integers(0, 2**64 - 1),
            st.integers(0, 2**22),
            st.integers(0, 2**64 - 1),
        ),
        st.integers(0, 2**32 - 1),
        st.integers(0, 2**64 - 1),
        st.integers(0, 2**64 - 1),
    ),
    uid=st.integers(0, 2**64 - 1),
    release=st.tuples(st.integers(1, 255), st.integers(0, 255)),
    shared_memory=st.booleans(),
    shared_memory_kinds=st.frozensets(st.sampled_from(["sysv", "posix", "xpmem"])),
    features=st.integers(0, 2**32 - 1).map(ucp.Feature),
    sizes=st.tuples(*[st.integers(0, 2**32 - 1)] * len(DEFAULT_SIZES)),
    tcp_addresses=st.lists(
        st.tuples(
            st.one_of(st.ip_addresses(v=4), st.ip_addresses(v=6).filter(lambda ip: ip.ipv4_mapped is None)).map(str),
            st.integers(0, 2**16 - 1),
        ),
        max_size=128,
    ).map(tuple),
)


@fuzz
@given(
    connection_id=st.integers(2**31, 2**32 - 1),
    window=st.integers(wire.MIN_WINDOW, wire.MAX_WINDOW),
    threshold=st.one_of(st.just(0), st.integers(wire.MIN_THRESHOLD, wire.MAX_WINDOW)),
    wish=st.sampled_from(SharedMemory),
    sees_local=st.booleans(),
    software=st.text(st.characters(codec="utf-8", categories=["L", "N", "P"]), max_size=100),
    host_name=st.text(st.characters(codec="utf-8", categories=["L", "N", "P"]), max_size=60),
    worker=WORKERS,
)
def test_descriptions_survive_the_wire(**fields: Any) -> None:
    description = PeerDescription(**fields)
    assert PeerDescription.decode(description.encode()) == description


def test_damaged_descriptions() -> None:
    good = some_description().encode()
    for length in range(len(good)):
        with pytest.raises(ProtocolError):
            PeerDescription.decode(good[:length])
    for at in range(len(good)):
        with pytest.raises(ProtocolError, match="damaged"):
            PeerDescription.decode(good[:at] + bytes([good[at] ^ 1]) + good[at + 1 :])
    with pytest.raises(ProtocolError, match="length of UCX's address"):
        PeerDescription.decode(some_description(ucx=bytes(MAX_ADDRESS + 1)).encode())
    with pytest.raises(ProtocolError, match="does not say which UCX"):
        PeerDescription.decode(some_description(release=(0, 0)).encode())
    software = PeerDescription.decode(some_description(software="\x1b[2J\n" + "x" * 5000).encode()).software
    assert software.isprintable() and len(software) == 200


@fuzz
@given(
    edits=st.lists(st.tuples(st.integers(0, 10**6), st.integers(0, 255)), min_size=1, max_size=8),
    network=st.booleans(),
)
def test_lies_with_the_right_checksum(edits: list[tuple[int, int]], network: bool) -> None:
    """Descriptions that are changed anywhere, the addresses too, are understood or refused."""
    good = some_description(network=NETWORK if network else b"")
    data = bytearray(good.encode()[:-8])  # without both checksums
    worker = len(data) - len(bytes(good.worker)) + 4
    for at, value in edits:
        data[at % len(data)] = value
    try:
        theirs = PeerDescription.decode(with_checksum(bytes(data[:worker]) + with_checksum(bytes(data[worker:]))))
        why_not_shared_memory(some_description(), theirs)
    except ProtocolError:
        pass


# ---- shared memory or not ----

AUTO, NEVER, ALWAYS = SharedMemory.AUTO, SharedMemory.NEVER, SharedMemory.ALWAYS


def elsewhere(**changes: Any) -> Host:
    process = {name: changes.pop(name) for name in ("host", "namespace", "pid") if name in changes}
    return attrs.evolve(HOST, process=attrs.evolve(HOST.process, **process), **changes)


#: What the other side's description has, and what that says against shared memory.
OBSTACLES: dict[str, tuple[dict[str, Any], str | None]] = {
    "none": ({}, None),
    "another process": ({"host": elsewhere(pid=1)}, None),
    "host": ({"host": elsewhere(host=bytes(16), namespace=3)}, "different hosts$"),
    "IPC": ({"host": elsewhere(ipc_namespace=1)}, "different IPC namespaces$"),
    "PID": ({"host": elsewhere(namespace=1)}, "different PID namespaces$"),
    "network": ({"host": elsewhere(network_namespace=1)}, "different network namespaces$"),
    "user": ({"host": elsewhere(user=0)}, "different users$"),
    "two": ({"host": elsewhere(user=0, network_namespace=1)}, "different network namespaces and users$"),
    "three": (
        {"host": elsewhere(user=0, ipc_namespace=1, namespace=1)},
        "different IPC namespaces, PID namespaces and users$",
    ),
    "another machine between": ({"sees_local": False}, "goes through a proxy or another machine"),
    "another release": ({"release": (1, 21)}, "UCX 1.21 and UCX 1.22 describe shared memory differently"),
    "an unknown release": ({"release": (1, 23)}, "UCX 1.22 and UCX 1.23 describe shared memory differently"),
    "no error handling": ({"shared_memory": False}, "MM_ERROR_HANDLING=n"),
    "no shared memory": ({"shared_memory_kinds": frozenset()}, "no shared memory"),
    "another folder": ({"wake_folder": b"another's folder"}, "different folders for wake-up sockets"),
    "no folder": ({"wake_folder": bytes(16)}, "different folders for wake-up sockets"),
}


@pytest.mark.parametrize("obstacle", OBSTACLES)
def test_use_of_shared_memory(obstacle: str) -> None:
    changes, reason = OBSTACLES[obstacle]
    for mine, other in itertools.product(SharedMemory, repeat=2):
        one = some_description(wish=mine)
        two = some_description(wish=other, **changes)
        for ours, theirs in ((one, two), (two, one)):
            if ALWAYS in (mine, other) and NEVER in (mine, other):
                with pytest.raises(ProtocolError, match="one side wants shared_memory=True"):
                    why_not_shared_memory(ours, theirs)
            elif ALWAYS in (mine, other) and reason is not None:
                with pytest.raises(ProtocolError, match=f"shared_memory=True, but .*{reason.rstrip('$')}"):
                    why_not_shared_memory(ours, theirs)
            else:
                uses = why_not_shared_memory(ours, theirs) is None
                assert uses is (reason is None and NEVER not in (mine, other))
            both = ours.worker, theirs.worker
            assert obstacle_to_shared_memory(*both) == obstacle_to_shared_memory(*reversed(both))


def test_nothing_but_shared_memory() -> None:
    for changes, reason in OBSTACLES.values():
        if "shared_memory_kinds" in changes:
            continue
        lonely = description_with(ONLY_SHARED, b"", **changes)
        other = some_description()
        for ours, theirs in ((lonely, other), (other, lonely)):
            if reason is None:
                assert why_not_shared_memory(ours, theirs) is None
            else:
                with pytest.raises(ProtocolError, match=f"cannot be used .*{reason.rstrip('$')}.*no other transport"):
                    why_not_shared_memory(ours, theirs)
        with pytest.raises(ProtocolError, match="shared_memory=False.*no other transport"):
            why_not_shared_memory(lonely, some_description(wish=NEVER))


def test_releases_that_do_not_know_each_other_s_loopback() -> None:
    """Then there must be another network device."""
    for name, works in (("1.21.0 tcp", True), ("1.22.0 in namespaces", False)):
        address = bytes.fromhex(SAMPLES[name])
        one = description_with(address, address, wish=NEVER)
        two = attrs.evolve(one, worker=one.worker._changed(release=(1, 21)))
        for ours, theirs in ((one, two), (two, one)):
            if works:
                assert why_not_shared_memory(ours, theirs)
            else:
                with pytest.raises(ProtocolError, match="use one release on both sides"):
                    why_not_shared_memory(ours, theirs)


# ---- listeners ----


async def test_backlog(worker: ucp.Worker) -> None:
    """Clients beyond it wait, and get in as others are accepted."""
    [listener] = await trio_ucx.open_ucx_listeners(0, host="127.0.0.1", worker=worker, backlog=3)
    clients = listener._acceptor._clients
    async with listener:
        opened: list[trio_ucx.Connection] = []
        accepted: list[trio_ucx.Connection] = []

        async def client() -> None:
            opened.append(await trio_ucx.open_ucx_stream(*listener.address, worker=worker))

        async with trio.open_nursery() as nursery:
            for _ in range(10):
                nursery.start_soon(client)
            await until(lambda: len(clients) == 7 and all(each.is_let_in for each in clients))
            await until(lambda: listener.statistics() == trio_ucx.ListenerStatistics(7, 3, 0, 0))
            await until(lambda: len(opened) == 3)  # the clients' tasks know it, too
            with pytest.raises(TimeoutError, match=f"{listener.address[1]}.*is its backlog full"):
                await trio_ucx.open_ucx_stream(*listener.address, worker=worker, connect_timeout=1)
            with trio.fail_after(15):
                while len(accepted) < 10:
                    accepted.append(await listener.accept())
                    assert listener.statistics().waiting <= 3
        await until(lambda: listener.statistics() == trio_ucx.ListenerStatistics(0, 0, 10, 1))
        for connection in (*opened, *accepted):
            connection.abort()


async def test_exchanges_advance_without_anybody_accepting(worker: ucp.Worker) -> None:
    async with open_listener(worker) as listener:
        clients = [await trio_ucx.open_ucx_stream(*listener.address, worker=worker) for _ in range(5)]
        for number, client in enumerate(clients):
            await client.send(bytes([number]))
        await until(lambda: listener.statistics().waiting == 5)
        for _ in clients:
            with trio.move_on_after(0):
                await listener.accept()
        assert listener.statistics() == trio_ucx.ListenerStatistics(0, 5, 0, 0)
        for _ in clients:
            server = await listener.accept()
            number = (await server.receive())[0]
            assert server.remote_address == clients[number].local_address
            assert server.local_address == clients[number].remote_address == listener.address
            server.abort()
            clients[number].abort()
        assert listener.statistics().accepted == 5


async def test_closing_a_listener(worker: ucp.Worker) -> None:
    [listener] = await trio_ucx.open_ucx_listeners(free_port(), host="127.0.0.1", worker=worker)
    accepted_client = await trio_ucx.open_ucx_stream(*listener.address, worker=worker)
    accepted = await listener.accept()
    waiting = [await trio_ucx.open_ucx_stream(*listener.address, worker=worker) for _ in range(2)]

    await until(lambda: listener.statistics().waiting == 2)
    half_way = await trio.open_tcp_stream(*listener.address)
    await until(lambda: listener.statistics().handshaking == 1)
    async with trio.open_nursery() as nursery:
        taken = [await listener.accept()]
        await listener.aclose()
        await listener.aclose()
        nursery.start_soon(expect_closed, listener.accept)
    with trio.fail_after(15), pytest.raises(trio.BrokenResourceError):
        while True:  # the one that was not accepted
            await waiting[1].receive()
    with trio.fail_after(15):
        try:
            assert await half_way.receive_some() == b""
        except trio.BrokenResourceError:
            pass
    await half_way.aclose()
    await accepted_client.send(pattern(1000))
    assert await accepted.receive() == pattern(1000)
    await until(lambda: listener.statistics().handshaking == 0)
    for connection in (accepted_client, accepted, *waiting, *taken):
        connection.abort()
    with pytest.raises(ConnectionRefusedError):
        await trio_ucx.open_ucx_stream(*listener.address, worker=worker)


async def test_closing_a_listener_ends_a_waiting_accept(worker: ucp.Worker) -> None:
    [listener] = await trio_ucx.open_ucx_listeners(0, host="127.0.0.1", worker=worker)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(expect_closed, listener.accept)
        await trio.testing.wait_all_tasks_blocked()
        await listener.aclose()


async def test_raw_requests_can_be_rejected(worker: ucp.Worker) -> None:
    async with await open_raw_listener(worker) as listener:
        client = await worker.open_endpoint(listener.address)
        request = await listener.accept_request()
        request.reject()
        with pytest.raises(trio.ClosedResourceError, match="answered"):
            request.reject()
        with pytest.raises(trio.ClosedResourceError, match="answered"):
            await request.accept()
        expected = "its listener refused, or its UCX is of another release"
        with trio.fail_after(15), pytest.raises(trio.BrokenResourceError, match=expected) as caught:
            while True:
                await client.tag_send(b"x", 1)
        assert isinstance(caught.value.__cause__, trio_ucx.UCXError)
        assert caught.value.__cause__.status is ucp.Status.REJECTED
        client.abort()
        unanswered = await worker.open_endpoint(listener.address)
        request = await listener.accept_request()
        with pytest.warns(ResourceWarning, match="unanswered"):
            del request
        await until(lambda: not unanswered.alive)
        unanswered.abort()
