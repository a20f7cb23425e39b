"""Who gets which message, by itself: a lane with a mover that only keeps notes."""

from __future__ import annotations

import random

import pytest
import trio

from trio_ucx import _lanes, ucp
from trio_ucx._lanes import Lane, Message, Receive, Run, State, Want
from trio_ucx.ucp._buffers import Pinned

LIMIT = 1 << 40


class Mover:
    """Moves a message when the test says so (or at once); its bytes are its number, repeated."""

    def __init__(self, *, at_once: bool = False) -> None:
        self.at_once = at_once
        self.moving: list[tuple[Message, Pinned | None]] = []
        self.consumed_ones: list[Message] = []
        self.discarded: list[Message] = []
        self.orphans: set[Message] = set()
        self.run_messages = 0

    def move(self, message: Message, pins: Pinned | None) -> None:
        if pins is None:
            message.data = bytes(message.length)
        if self.at_once:
            self.write(message, pins)
            message.state = State.READY
        else:
            message.state = State.MOVING
            self.moving.append((message, pins))

    def write(self, message: Message, pins: Pinned | None) -> None:
        data = bytes([message.handle]) * message.length
        if pins is None:
            message.data = data
        else:
            pins.fill(memoryview(data))

    def finish(self, index: int = 0, error: Exception | None = None) -> None:
        message, pins = self.moving.pop(index)
        if error is None:
            self.write(message, pins)
        message.lane.moved(message, error)

    def consumed(self, message: Message) -> None:
        self.consumed_ones.append(message)

    def run_consumed(self, length: int, count: int) -> None:
        self.run_messages += count

    def discard(self, message: Message) -> None:
        self.discarded.append(message)

    def orphaned(self, message: Message, alone: bool) -> None:
        (self.orphans.add if alone else self.orphans.remove)(message)


def into(lane: Lane, size: int) -> tuple[Receive, bytearray]:
    buffer = bytearray(size)
    return lane.wait(Want.INTO, Pinned(buffer, writable=True), size), buffer


def value(receive: Receive) -> object:
    assert receive.outcome is not None
    return receive.outcome.unwrap()


def free(buffer: bytearray) -> bool:
    try:
        buffer.append(0)
    except BufferError:
        return False
    buffer.pop()
    return True


def test_small_messages_are_moved_at_once_and_kept() -> None:
    mover = Mover(at_once=True)
    lane = Lane(1, mover)
    lane.arrived(7, 3, whole=True)
    assert lane.ready_now() is not None
    receive, buffer = into(lane, 5)
    assert (value(receive), buffer) == (3, b"\7\7\7\0\0")
    assert lane.idle and free(buffer)


def test_large_messages_wait_for_a_receive_and_go_to_its_buffer() -> None:
    mover = Mover()
    lane = Lane(1, mover)
    lane.arrived(7, 3, whole=False)
    assert not mover.moving and lane.ready_now() is None
    receive, buffer = into(lane, 3)
    assert [pins is receive.pins for _, pins in mover.moving] == [True]
    assert not free(buffer)
    mover.finish()
    assert value(receive) == 3 and buffer == b"\7\7\7" and free(buffer)


def test_length_is_told_and_the_message_stays() -> None:
    lane = Lane(1, Mover(at_once=True))
    asked = [lane.wait(Want.LENGTH, None, LIMIT) for _ in range(2)]
    taken = lane.wait(Want.BYTES, None, LIMIT)
    after = lane.wait(Want.LENGTH, None, LIMIT)
    lane.arrived(1, 4, whole=True)
    assert [value(receive) for receive in asked] == [4, 4]
    assert value(taken) == b"\1" * 4
    assert after.outcome is None
    lane.arrived(2, 5, whole=True)
    assert value(after) == 5


def test_receives_complete_in_order() -> None:
    mover = Mover()
    lane = Lane(1, mover)
    receives = [into(lane, 3) for _ in range(3)]
    for number in (1, 2, 3):
        lane.arrived(number, 3, whole=False)
    assert len(mover.moving) == 3  # they overlap
    mover.finish(2)
    mover.finish(1)
    assert [receive.outcome for receive, _ in receives] == [None] * 3
    mover.finish(0)
    assert [buffer for _, buffer in receives] == [b"\1\1\1", b"\2\2\2", b"\3\3\3"]


def test_cancelled_in_the_middle_the_next_one_gets_it() -> None:
    mover = Mover()
    lane = Lane(1, mover)
    lane.arrived(1, 3, whole=False)
    receive, buffer = into(lane, 3)
    assert receive.abandon()
    assert len(mover.orphans) == 1 and not free(buffer)
    following = lane.wait(Want.BYTES, None, LIMIT)
    assert len(mover.moving) == 1  # no second transfer
    mover.finish()
    assert value(following) == b"\1\1\1"
    assert not mover.orphans and free(buffer)


def test_cancelled_while_a_later_one_is_served_keeps_the_order() -> None:
    mover = Mover()
    lane = Lane(1, mover)
    (first, first_buffer), (second, second_buffer) = into(lane, 3), into(lane, 3)
    lane.arrived(1, 3, whole=False)
    lane.arrived(2, 3, whole=False)
    mover.finish(1)  # the second message is in the second buffer already
    first.abandon()
    assert second.outcome is None
    mover.finish(0)
    assert value(second) == 3 and second_buffer == b"\1\1\1"  # nevertheless the first message comes first
    assert free(first_buffer) and free(second_buffer)
    third = lane.wait(Want.BYTES, None, LIMIT)
    assert value(third) == b"\2\2\2"


def test_too_long_messages_are_dropped_and_both_lengths_named() -> None:
    mover = Mover()
    lane = Lane(1, mover)
    receive, buffer = into(lane, 2)
    lane.arrived(1, 3, whole=False)
    with pytest.raises(ucp.UCXError, match="3 bytes .* has 2"):
        value(receive)
    assert [message.handle for message in mover.discarded] == [1] == [m.handle for m in mover.consumed_ones]
    assert free(buffer) and lane.idle


def test_failed_transfer() -> None:
    mover = Mover()
    lane = Lane(1, mover)
    receive, buffer = into(lane, 3)
    other = lane.wait(Want.BYTES, None, LIMIT)
    lane.arrived(1, 3, whole=False)
    mover.finish(error=OSError("lost"))
    with pytest.raises(OSError, match="lost"):
        value(receive)
    assert free(buffer) and other.outcome is None
    lane.fail_unserved(EOFError())
    with pytest.raises(EOFError):
        value(other)


def test_the_end_serves_what_is_there() -> None:
    mover = Mover()
    lane = Lane(1, mover)
    receives = [lane.wait(Want.BYTES, None, LIMIT) for _ in range(2)]
    asked = lane.wait(Want.LENGTH, None, LIMIT)
    lane.arrived(1, 3, whole=False)
    lane.arrived(2, 3, whole=False)
    lane.arrived(3, 3, whole=False)
    lane.drop_held()  # the third: its sender has gone
    lane.fail_unserved(EOFError())
    with pytest.raises(EOFError):
        value(asked)
    mover.finish()
    mover.finish()
    assert [value(receive) for receive in receives] == [b"\1\1\1", b"\2\2\2"]


def test_transfers_that_will_never_end() -> None:
    mover = Mover()
    lane = Lane(1, mover)
    receive, buffer = into(lane, 3)
    lane.arrived(1, 3, whole=False)
    lane.arrived(2, 3, whole=True)
    lane.give_up_moving(OSError("died"))
    with pytest.raises(OSError, match="died"):
        value(receive)
    assert lane.idle and not free(buffer)
    mover.finish(error=OSError())  # if UCX lets go after all
    mover.finish()
    assert lane.idle and free(buffer) and not mover.orphans


def test_close_with_transfers_under_way() -> None:
    mover = Mover()
    lane = Lane(1, mover)
    receive, buffer = into(lane, 3)
    lane.arrived(1, 3, whole=False)
    lane.arrived(2, 3, whole=False)
    lane.close(EOFError())
    with pytest.raises(EOFError):
        value(receive)
    assert [message.handle for message in mover.discarded] == [2]
    assert not free(buffer)
    mover.finish(error=OSError())
    assert free(buffer) and not mover.orphans


@pytest.mark.sample(100)
@pytest.mark.parametrize("seed", range(300))
def test_random_programs_lose_nothing(seed: int) -> None:
    """Arrivals, receives of all kinds, cancels and completions in any order: each message once, whole, in order."""
    chance = random.Random(seed)
    mover = Mover()
    lane = Lane(1, mover)
    arrived = 0
    got: list[bytes] = []
    waiting: list[tuple[Receive, bytearray | None]] = []
    buffers: list[bytearray] = []

    def collect() -> None:
        for receive, buffer in list(waiting):
            if receive.outcome is not None:
                waiting.remove((receive, buffer))
                result = receive.outcome.unwrap()
                if receive.want is Want.LENGTH:
                    continue
                got.append(result if buffer is None else bytes(buffer[:result]))

    for _ in range(200):
        action = chance.random()
        if action < 0.25 and arrived < 60:
            arrived += 1
            lane.arrived(arrived, arrived % 5 + 1, whole=chance.random() < 0.5)
        elif action < 0.55:
            want = chance.choice(list(Want))
            buffer = bytearray(6) if want is Want.INTO else None
            if buffer is not None:
                buffers.append(buffer)
            pins = Pinned(buffer, writable=True) if buffer is not None else None
            waiting.append((lane.wait(want, pins, 6 if pins else LIMIT), buffer))
        elif action < 0.7 and waiting:
            index = chance.randrange(len(waiting))
            if waiting[index][0].outcome is None:
                waiting.pop(index)[0].abandon()
        elif mover.moving:
            mover.finish(chance.randrange(len(mover.moving)))
        collect()
    while len(got) < arrived:
        receive = lane.wait(Want.BYTES, None, LIMIT)
        waiting.append((receive, None))
        while mover.moving:
            mover.finish(chance.randrange(len(mover.moving)))
        collect()
    for receive, _ in waiting:
        receive.abandon()
    assert got == [bytes([number]) * (number % 5 + 1) for number in range(1, arrived + 1)]
    assert lane.idle and not mover.orphans
    assert all(free(buffer) for buffer in buffers)


def run(*messages: bytes) -> Run:
    return Run(len(messages), len(messages[0]), b"".join(messages))


def test_runs_are_messages_in_order_with_others() -> None:
    mover = Mover()
    lane = Lane(1, mover)
    lane.run_arrived(run(b"aa", b"bb", b"cc"))
    lane.run_arrived(run(b"ddd"))
    lane.arrived(1, 5, whole=True)
    assert not lane.idle and len(mover.moving) == 1
    mover.finish()
    lane.run_arrived(run(b"e", b"f"))
    assert lane.take_small(2) == b"aa"
    receives = [lane.wait(Want.BYTES, None, 100) for _ in range(7)]
    assert [value(receive) for receive in receives[:3]] == [b"bb", b"cc", b"ddd"]
    assert len(value(receives[3])) == 5
    assert [value(receive) for receive in receives[4:6]] == [b"e", b"f"]
    assert receives[6].outcome is None
    lane.run_arrived(run(b"gg", b"hh"))
    assert value(receives[6]) == b"gg"
    assert lane.take_small(2) == b"hh"
    assert lane.idle


def test_runs_for_receives_of_every_kind() -> None:
    mover = Mover()
    lane = Lane(1, mover)
    length = lane.wait(Want.LENGTH, None, 1 << 62)
    receive, buffer = into(lane, 10)
    short, _ = into(lane, 1)
    whole = lane.wait(Want.BYTES, None, 100)
    lane.run_arrived(run(b"one", b"two", b"six", b"ten"))
    assert value(length) == 3
    assert value(receive) == 3
    assert buffer[:3] == b"one"
    with pytest.raises(ucp.UCXError, match="3 bytes is too long, the buffer has 1"):
        value(short)
    assert value(whole) == b"six"
    lane.spread()
    assert value(lane.wait(Want.BYTES, None, 3)) == b"ten"
    assert lane.idle
    lane.run_arrived(run(b"more"))
    assert lane.take_small(2) is None, "too long: left to a receive, which says so"
    assert lane.ready_now() is not None


def test_what_is_unread_of_a_run_keeps_little_memory() -> None:
    messages = [bytes([number]) * 100 for number in range(250)]
    many = run(*messages)
    for number, message in enumerate(messages):
        assert many.pop() == message
        assert len(many._data) <= 2 * 100 * (250 - number) + 4096
    assert many.left == 0
    some = run(*messages)
    some.pop()
    assert some.rest() == b"".join(messages[1:])


def test_runs_of_a_lane_that_failed_or_closed() -> None:
    mover = Mover()
    lane = Lane(1, mover, sequential=True)
    lane.arrived(1, 5, whole=False)
    lane.drop_held(trio.BrokenResourceError())
    lane.run_arrived(run(b"x", b"y"))
    assert mover.run_messages == 2, "nothing is handed out behind what is missing"
    other = Lane(2, mover)
    other.run_arrived(run(b"x"))
    other.close(trio.ClosedResourceError())
    assert other.idle


def test_few_large_transfers_into_fresh_memory_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_lanes, "FRESH_AHEAD", 10)
    mover = Mover()
    lane = Lane(1, mover)
    receives = [lane.wait(Want.BYTES, None, LIMIT) for _ in range(4)]
    for number in (1, 2, 3, 4):
        lane.arrived(number, 6, whole=False)
    assert len(mover.moving) == 2
    mover.finish(0)
    assert len(mover.moving) == 2  # the next one
    mover.finish(1)
    mover.finish(0)
    mover.finish(0)
    assert [value(receive) for receive in receives] == [bytes([number]) * 6 for number in (1, 2, 3, 4)]


def test_transfers_into_users_buffers_are_not_held_back(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_lanes, "FRESH_AHEAD", 10)
    mover = Mover()
    lane = Lane(1, mover)
    receives = [into(lane, 6) for _ in range(4)]
    for number in (1, 2, 3, 4):
        lane.arrived(number, 6, whole=False)
    assert len(mover.moving) == 4
    for _ in range(4):
        mover.finish(0)
    assert [buffer[0] for _, buffer in receives] == [1, 2, 3, 4]
