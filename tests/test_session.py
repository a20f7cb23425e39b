"""The rules of a connection, put together, over a simulated wire: any interleaving delivers a prefix, in order.

Two sessions exchange messages and frames through queues. Hypothesis chooses what happens next: writes, reads,
cancellations, ends and closes on either side, messages that arrive, transfers that finish. Small messages are out of
the sender's hands at once; large ones (``THRESHOLD``) stay with it until the receiver has moved them.
"""

from __future__ import annotations

import collections
from collections.abc import Iterable
from functools import partial

import pytest
import trio
from helpers import check_stream, numbered_write
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from outcome import Value

from trio_ucx import _stream as stream
from trio_ucx import _wire as wire
from trio_ucx._flow import ANNOUNCEMENT
from trio_ucx._lanes import Message, Receive, State, Want
from trio_ucx._session import Options, Sending, Session
from trio_ucx.ucp._buffers import Pinned
from trio_ucx.ucp._pending import Pending

WINDOWS = [8192, 40_000]  # less and more than an announcement costs
THRESHOLD = 1025


class SimulatedSend(Pending):
    """A message that stays with its sender until it was moved."""

    def __init__(self, session: Simulated, lane: int, pins: Pinned) -> None:
        super().__init__()
        self.session = session
        self.lane = lane
        self.pins = pins
        self.left_over = False
        self.cancelled = False

    def leave_over(self) -> None:
        self.left_over = True

    def abandon(self) -> bool:
        self.session.send_cancelled(self)
        return True

    def taken(self) -> None:
        self.session.sends.discard(self)
        self.pins.release()
        self.finish(Value(None))


#: On the simulated wire: what the control socket says of an abort.
ABORT = b"abort"


class Simulated(Session):
    """One end."""

    peer: Simulated

    def __init__(self, name: str, window: int = WINDOWS[1]) -> None:
        super().__init__(Options(window=window), window, THRESHOLD, THRESHOLD)
        self.name = name
        #: What is on its way to the peer: frames, and (lane, data, send) of messages.
        self.wire: collections.deque[bytes | tuple[int, bytes, SimulatedSend | None]] = collections.deque()
        self.sends: set[SimulatedSend] = set()
        self.here: dict[int, tuple[bytes, SimulatedSend | None]] = {}
        self.transfers: list[tuple[Message, Pinned, SimulatedSend | None]] = []
        self.gone = False
        self.next_handle = 0

    # ---- what a session asks ----

    def problem(self) -> Exception | None:
        return trio.BrokenResourceError("lost") if self.gone else None

    def broken(self, reason: str) -> Exception:
        return trio.BrokenResourceError(reason)

    def post(self, lane: int, pins: Pinned) -> SimulatedSend | None:
        problem = self.problem()
        if problem is not None:
            pins.release()
            raise problem
        data = pins.copy(pins.size)
        send = None
        if pins.size >= THRESHOLD:
            send = SimulatedSend(self, lane, pins)
            self.sends.add(send)
        else:
            pins.release()
        self.wire.append((lane, data, send))
        return send

    def control(self, frame: wire.Frame) -> None:
        if not self.gone and not self.closed:
            self.wire.append(wire.encode_frame(frame))

    def move(self, message: Message, pins: Pinned | None) -> None:
        data, send = self.here.pop(message.handle)
        if pins is None:
            message.data = bytearray(message.length)  # type: ignore[assignment]
            pins = Pinned(message.data, writable=True)
        if send is None:
            pins.fill(memoryview(data))
            message.state = State.READY
            message.data = bytes(message.data or b"")
            if pins is not message.pins:
                pins.release()
        else:
            message.state = State.MOVING
            self.here[-id(message)] = data, send
            self.transfers.append((message, pins, send))

    def discard(self, message: Message) -> None:
        _, send = self.here.pop(message.handle)
        if send is not None:
            send.taken()

    def unfinished(self) -> Iterable[Sending]:
        return list(self.sends)

    def changed(self) -> None:
        pass

    def cut_off(self, reason: str) -> None:
        self.lose()

    # ---- what happens ----

    def lose(self) -> None:
        """The peer disappears: what is under way does not arrive."""
        if not self.gone:
            self.gone = True
            self.wire.clear()
            self.lost()

    @property
    def can_deliver(self) -> bool:
        return bool(self.wire) and not self.peer.closed and not self.peer.gone

    def deliver(self) -> bool:
        """The next thing on its way to the peer arrives."""
        peer = self.peer
        if not self.can_deliver:
            return False
        thing = self.wire.popleft()
        if thing == ABORT:
            peer.cut_off("aborted the connection")
        elif isinstance(thing, bytes):
            peer.told_by_peer(wire.decode_frame(thing))
        else:
            lane, data, send = thing
            peer.next_handle += 1
            peer.here[peer.next_handle] = data, send
            peer.announced(lane, len(data))
            peer.arrived(lane, peer.next_handle, len(data))
        return True

    def finish_transfer(self, which: int) -> bool:
        if not self.transfers:
            return False
        message, pins, send = self.transfers.pop(which % len(self.transfers))
        data, _ = self.here.pop(-id(message))
        pins.fill(memoryview(data))
        if isinstance(message.data, bytearray):
            message.data = bytes(message.data)
        self.moved(message, pins, None)
        if send is not None:
            send.taken()
        return True


class Side:
    """A program at one end: it writes, reads, cancels, closes. Mirrors what ``Connection`` does."""

    def __init__(self, session: Simulated) -> None:
        self.session = session
        self.writes: list[tuple[int, bool]] = []  # size, complete
        self.write: stream.Write | None = None
        self.eof: Pending | None = None
        self.eof_sent = False
        self.reading: Receive | None = None
        self.got = bytearray()
        self.end: str | None = None
        self.closing = False
        self.said_goodbye = False
        self.clean = False

    @property
    def usable(self) -> bool:
        return not self.session.closing and not self.session.closed

    def start_write(self, records: int) -> None:
        if not self.usable or self.write is not None or self.eof_sent or self.session.send_problem() is not None:
            return
        data = numbered_write(len(self.writes), records)
        self.writes.append((len(data), False))
        cut = stream.pieces(len(data), self.session.outbound.window, THRESHOLD)
        self.write = stream.Write(partial(self.session.submit, wire.STREAM), memoryview(data), cut)
        self.advance()

    def advance(self) -> None:
        if self.write is None:
            return
        try:
            if self.write.advance() is None:
                self.writes[-1] = self.writes[-1][0], True
                self.write = None
        except (trio.BrokenResourceError, trio.ClosedResourceError):
            self.cancel_write()

    def cancel_write(self) -> None:
        if self.write is not None:
            self.write.cancel()
            self.write = None

    def send_eof(self) -> None:
        if self.usable and self.write is None and not self.eof_sent and self.session.send_problem() is None:
            self.eof_sent = True
            self.eof = self.session.submit(wire.STREAM, b"")

    def read(self) -> None:
        if self.end is not None or not self.usable:
            return
        if self.reading is None:
            self.reading = self.session.receive(wire.STREAM, Want.BYTES)
        if self.reading.outcome is not None:
            reading, self.reading = self.reading, None
            try:
                piece = reading.result()
            except trio.EndOfChannel:
                piece = b""
            except (trio.BrokenResourceError, trio.ClosedResourceError):
                self.end = "broken"
                return
            if piece:
                self.got += piece
            else:
                self.end = "eof"

    def cancel_read(self) -> None:
        if self.reading is not None and self.reading.outcome is None:
            self.reading.abandon()
            self.reading = None

    def close(self) -> None:
        """Begins the graceful close, or goes on with it."""
        session = self.session
        if session.closed:
            return
        if not self.closing:
            self.cancel_write()
            self.closing = True
            session.begin_close()
        if not self.said_goodbye and session.sent_everything():
            self.said_goodbye = True
            if session.send_problem() is None:
                session.control(wire.Goodbye())
        if self.said_goodbye:
            delivered = session.farewell.acknowledged or session.send_problem() is not None
            if session.gone or (delivered and not session.farewell.peer_waits):
                self.clean = not session.undelivered
                self._leave()

    def abort(self) -> None:
        if not self.session.closed:
            if not self.session.gone:
                self.session.wire.append(ABORT)
            self._leave()

    def _leave(self) -> None:
        self.session.let_go()
        self.write = None


class World:
    def __init__(self, window: int = WINDOWS[1]) -> None:
        a, b = Simulated("a", window), Simulated("b", window)
        a.peer, b.peer = b, a
        self.sides = [Side(a), Side(b)]

    def step(self, action: str, side: int, number: int) -> None:
        it = self.sides[side]
        if action == "deliver":
            for _ in range(number % 8 + 1):
                if not it.session.deliver():
                    break
            self._notice()
        elif action == "transfer":
            it.session.finish_transfer(number)
        elif action == "write":
            it.start_write(number)
        elif action == "message":
            if it.usable and it.session.send_problem() is None:
                it.session.submit(number % 3, bytes(number * 5))
        elif action == "receive":
            if it.usable:
                receive = it.session.receive(number % 3, Want.BYTES)
                if number % 2 and receive.outcome is None:
                    receive.abandon()
        else:
            getattr(it, action)()

    def _notice(self) -> None:
        """An end that is gone is noticed by the other when all that it had sent has arrived."""
        for side in self.sides:
            peer = side.session.peer
            if side.session.closed and not side.session.wire and not peer.gone and not peer.closed:
                peer.lose()

    def settle(self, act: bool) -> None:
        """Runs until nothing happens any more; with ``act``, programs go on reading, and finish what they began."""
        for _ in range(5000):
            moved = False
            for side in self.sides:
                while side.session.deliver():
                    moved = True
                while side.session.finish_transfer(0):
                    moved = True
                if act:
                    before = len(side.got), side.end, side.write, side.session.closed, side.said_goodbye
                    side.advance()
                    side.read()
                    for tag in range(3):
                        lane = side.session.lanes.get(tag)
                        if side.usable and side.session.end_error() is None and not (lane and lane.receives):
                            moved |= side.session.receive(tag, Want.BYTES).outcome is not None
                    if side.closing:
                        side.close()
                    moved |= before != (len(side.got), side.end, side.write, side.session.closed, side.said_goodbye)
                moved |= side.session.can_deliver or bool(side.session.transfers)
            self._notice()
            if not moved:
                return
        raise AssertionError("it goes on for ever")


ACTIONS = st.sampled_from(
    ["deliver"] * 4
    + ["transfer"] * 2
    + ["write"] * 3
    + ["advance", "read", "read", "read", "cancel_read", "cancel_write", "message", "receive"]
)
ENDS = st.sampled_from(["send_eof", "close", "close", "abort"])
STEPS = st.tuples(
    st.one_of(ACTIONS, ACTIONS, ACTIONS, ACTIONS, ENDS),
    st.integers(0, 1),
    st.sampled_from([0, 1, 2, 3, 100, 205, 512, 513, 900]),
)


@pytest.fixture(autouse=True)
def small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stream, "LARGE_WRITE", 4096)
    monkeypatch.setattr(stream, "LARGE_PIECE", 2048)


@settings(max_examples=600, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.lists(STEPS, max_size=80), st.sampled_from(["close", "eof", "leave"]), st.sampled_from(WINDOWS))
def test_any_interleaving_delivers_a_prefix(steps: list[tuple[str, int, int]], ending: str, window: int) -> None:
    world = World(window)
    a, b = world.sides
    for step in steps:
        world.step(*step)
        for reader in world.sides:
            assert reader.session.inbound.unread <= window + 3 * (
                900 * 5 + ANNOUNCEMENT
            )  # one admitted message per lane
    for writer, reader in ((a, b), (b, a)):
        check_stream(writer.writes, reader.got)
    aborted = any(action == "abort" for action, _, _ in steps)
    both_closed = a.closing and b.closing
    if ending == "eof":
        a.send_eof()
        b.send_eof()
    world.settle(act=True)
    if ending != "leave":
        for side in world.sides:
            side.cancel_write()
            if ending == "eof":
                side.send_eof()
            world.settle(act=True)
        if ending == "close" and not aborted:
            a.close()
            world.settle(act=True)
            b.close()
            world.settle(act=True)
            # Sends beyond the window to somebody who closes, too, end with close_timeout, which is not simulated.
            stuck = any(side.session.outbound.queue for side in world.sides)
            assert stuck or (a.session.closed and b.session.closed), "the goodbyes hang"
    for writer, reader in ((a, b), (b, a)):
        cleanly = not aborted and not both_closed and not reader.closing
        ended = writer.closing or (writer.eof_sent and ending == "eof")
        check_stream(writer.writes, reader.got, everything=cleanly and ended)
        if cleanly and ended and not (reader.session.outbound.queue or writer.session.outbound.queue):
            assert reader.end == "eof"
        if reader.end == "eof" and not writer.closing and not writer.session.closed:
            assert writer.eof_sent
    for side in world.sides:
        side.abort()
        assert not side.session.lanes and not side.session.outbound.queue


def test_cancelled_piece_is_waited_for_when_something_follows() -> None:
    """A large piece that was announced, cancelled, and followed by others would be a hole if the close gave it up."""
    world = World()
    a, b = world.sides
    a.start_write(600)  # stays with the sender
    a.cancel_write()
    world.step("write", 0, 1)
    a.close()
    assert not a.said_goodbye
    world.settle(act=True)
    assert a.session.closed and a.clean
    check_stream(a.writes, b.got, everything=True)
    assert len(b.got) > 600 * 8 / 2 and b.end == "eof"


def test_cancelled_piece_at_the_end_is_given_up() -> None:
    world = World()
    a, b = world.sides
    a.start_write(1)
    a.start_write(600)
    a.cancel_write()
    a.close()
    assert a.said_goodbye
    world.settle(act=False)
    a.close()
    assert a.session.closed and a.clean
    b.read()
    b.read()
    assert len(b.got) == 8 and b.end == "eof"


def test_nothing_is_handed_out_behind_a_piece_that_was_lost() -> None:
    world = World()
    a, b = world.sides
    a.start_write(600)
    world.step("cancel_write", 0, 0)
    world.step("write", 0, 1)  # small: arrives whole
    while a.session.deliver():
        pass
    b.session.lose()
    b.read()
    assert b.end == "broken" and not b.got


def test_piece_longer_than_allowed_is_an_error() -> None:
    session = Simulated("a")
    with pytest.raises(wire.ProtocolError, match="allowed"):
        session.announced(wire.STREAM, stream.MAX_PIECE + 1)


@pytest.mark.parametrize("total", [0, 1, 1024, 4095, 4096, 100_000])
@pytest.mark.parametrize("window", [4096, 2**20])
@pytest.mark.parametrize("threshold", [0, 1, 1025, 2**16, 2**62])
def test_pieces_cover_a_write(total: int, window: int, threshold: int) -> None:
    pieces = list(stream.pieces(total, window, threshold))
    assert [each.start for each in pieces] == [0, *(each.stop for each in pieces)][: len(pieces)]
    assert sum(each.stop - each.start for each in pieces) == total
    assert all(0 < each.stop - each.start <= stream.MAX_PIECE for each in pieces)
