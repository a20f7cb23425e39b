"""Which receive gets which message: a tag queue with a mover that only records its calls."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest
import trio
from helpers import is_free

import trio_ucx
from trio_ucx._link.buffers import PackedMessages
from trio_ucx._link.receiving import PendingReceive
from trio_ucx._rules import tag_queue as _tag_queue
from trio_ucx._rules import wire
from trio_ucx._rules.tag_queue import Message, MessageState, Receive, TagQueue, Want
from trio_ucx.ucp._engine.ending import Ending
from trio_ucx.ucp._memory.buffers import Pinned

LIMIT = 1 << 40


class Mover:
    """Moves a message when the test says so (or at once); its bytes are its number, repeated."""

    def __init__(self, *, at_once: bool = False) -> None:
        self.at_once = at_once
        self.moving: list[tuple[Message, Receive | None]] = []
        self.dropped_ones: list[Message] = []
        self.ending = Ending()
        self.consumed_ones: list[Message] = []
        self.discarded: list[Message] = []
        self.given_up: list[Message] = []
        self.detached_receives: set[Receive] = set()

    def move(self, message: Message, receive: Receive | None) -> None:
        if receive is None:
            message.contents = bytes(message.length)
        if self.at_once:
            self.write(message, receive)
            message.state = MessageState.READY
        else:
            message.state = MessageState.MOVING
            self.moving.append((message, receive))

    def write(self, message: Message, receive: Receive | None) -> None:
        data = bytes([message.handle]) * message.length
        if receive is None:
            message.contents = data
        else:
            receive.fill(data)

    def finish(self, index: int = 0, error: Exception | None = None) -> None:
        message, receive = self.moving.pop(index)
        if error is None:
            self.write(message, receive)
        message.queue.moved(message, error)
        self.cancelled(message.queue)

    def consumed(self, message: Message) -> None:
        self.consumed_ones.append(message)

    def dropped(self, message: Message) -> None:
        self.dropped_ones.append(message)

    def discard(self, message: Message) -> None:
        self.discarded.append(message)

    def give_up(self, message: Message) -> None:
        self.given_up.append(message)

    def detached(self, receive: Receive, detached: bool) -> None:
        (self.detached_receives.add if detached else self.detached_receives.remove)(receive)

    def cancelled(self, queue: TagQueue) -> None:
        """What ``Receiving`` does when a receive or a transfer has ended."""
        if queue.failure is not None:
            queue.fail_unserved(queue.failure)

    def internal_error(self, error: BaseException) -> None:
        raise error


def wait(queue: TagQueue, want: Want, limit: int = LIMIT, buffer: bytearray | None = None) -> PendingReceive:
    pins = None if buffer is None else Pinned(buffer, writable=True)
    receive = PendingReceive(queue.mover, want, pins, limit)  # type: ignore[arg-type]
    receive.queue = queue
    queue.wait(receive)
    return receive


def into(queue: TagQueue, size: int) -> tuple[PendingReceive, bytearray]:
    buffer = bytearray(size)
    return wait(queue, Want.INTO, size, buffer), buffer


def value(receive: PendingReceive) -> object:
    assert receive.outcome is not None
    return receive.outcome.unwrap()


def test_small_messages_are_moved_at_once_and_kept() -> None:
    mover = Mover(at_once=True)
    queue = TagQueue(1, mover)
    queue.arrived(7, 3, whole=True)
    assert queue.ready_now() is not None
    receive, buffer = into(queue, 5)
    assert (value(receive), buffer) == (3, b"\7\7\7\0\0")
    assert queue.empty and is_free(buffer)


def test_large_messages_wait_for_a_receive_and_go_to_its_buffer() -> None:
    mover = Mover()
    queue = TagQueue(1, mover)
    queue.arrived(7, 3, whole=False)
    assert not mover.moving and queue.ready_now() is None
    receive, buffer = into(queue, 3)
    assert [to is receive for _, to in mover.moving] == [True]
    assert not is_free(buffer)
    mover.finish()
    assert value(receive) == 3 and buffer == b"\7\7\7" and is_free(buffer)


def test_short_messages_do_not_hold_the_buffer_of_a_receive() -> None:
    """If a peer dies while it writes a short message, UCX keeps the memory of that receive, and waits for the rest."""
    mover = Mover()
    queue = TagQueue(1, mover)
    receive, buffer = into(queue, 3)
    queue.arrived(7, 3, whole=True)
    assert [to for _, to in mover.moving] == [None]
    queue.lose(OSError("died"))
    mover.cancelled(queue)
    with pytest.raises(OSError, match="died"):
        value(receive)
    assert is_free(buffer)


def test_length_is_reported_and_the_message_stays() -> None:
    queue = TagQueue(1, Mover(at_once=True))
    asked = [wait(queue, Want.LENGTH) for _ in range(2)]
    taken = wait(queue, Want.BYTES)
    after = wait(queue, Want.LENGTH)
    queue.arrived(1, 4, whole=True)
    assert [value(receive) for receive in asked] == [4, 4]
    assert value(taken) == b"\1" * 4
    assert after.outcome is None
    queue.arrived(2, 5, whole=True)
    assert value(after) == 5


def test_receives_complete_in_order() -> None:
    mover = Mover()
    queue = TagQueue(1, mover)
    receives = [into(queue, 3) for _ in range(3)]
    for number in (1, 2, 3):
        queue.arrived(number, 3, whole=False)
    assert len(mover.moving) == 3  # they overlap
    mover.finish(2)
    mover.finish(1)
    assert [receive.outcome for receive, _ in receives] == [None] * 3
    mover.finish(0)
    assert [buffer for _, buffer in receives] == [b"\1\1\1", b"\2\2\2", b"\3\3\3"]


def test_cancelled_in_the_middle_the_next_one_gets_it() -> None:
    mover = Mover()
    queue = TagQueue(1, mover)
    queue.arrived(1, 3, whole=False)
    receive, buffer = into(queue, 3)
    assert receive.cancel()
    assert len(mover.detached_receives) == 1 and not is_free(buffer)
    following = wait(queue, Want.BYTES)
    assert len(mover.moving) == 1  # no second transfer
    mover.finish()
    assert value(following) == b"\1\1\1"
    assert not mover.detached_receives and is_free(buffer)


def test_cancelled_while_a_later_one_is_served_keeps_the_order() -> None:
    mover = Mover()
    queue = TagQueue(1, mover)
    (first, first_buffer), (second, second_buffer) = into(queue, 3), into(queue, 3)
    queue.arrived(1, 3, whole=False)
    queue.arrived(2, 3, whole=False)
    mover.finish(1)  # the second message is in the second buffer already
    first.cancel()
    assert second.outcome is None
    mover.finish(0)
    assert value(second) == 3 and second_buffer == b"\1\1\1"  # nevertheless the first message comes first
    assert is_free(first_buffer) and is_free(second_buffer)
    third = wait(queue, Want.BYTES)
    assert value(third) == b"\2\2\2"


def test_cancelled_with_its_message_in_the_buffer_the_next_one_gets_it() -> None:
    """The message has arrived, and the receive only waits for the one before it."""
    mover = Mover()
    queue = TagQueue(1, mover)
    first, _ = into(queue, 3)
    second, buffer = into(queue, 3)
    for handle in (1, 2):
        queue.arrived(handle, 3, whole=False)
    mover.finish(1)
    queue.cancel(second)
    assert is_free(buffer)
    mover.finish()
    assert value(first) == 3
    assert value(wait(queue, Want.BYTES)) == b"\2\2\2"


def test_too_long_messages_are_dropped_and_both_lengths_named() -> None:
    mover = Mover()
    queue = TagQueue(1, mover)
    receive, buffer = into(queue, 2)
    queue.arrived(1, 3, whole=False)
    with pytest.raises(trio_ucx.UCXError, match="3 bytes .* has 2"):
        value(receive)
    assert [message.handle for message in mover.discarded] == [1] == [m.handle for m in mover.consumed_ones]
    assert is_free(buffer) and queue.empty


def test_failed_transfer() -> None:
    mover = Mover()
    queue = TagQueue(1, mover)
    receive, buffer = into(queue, 3)
    other = wait(queue, Want.BYTES)
    queue.arrived(1, 3, whole=False)
    mover.finish(error=OSError("lost"))
    with pytest.raises(OSError, match="lost"):
        value(receive)
    assert is_free(buffer)
    with pytest.raises(OSError, match="lost"):
        value(other)
    queue.arrived(2, 3, whole=True)  # behind the hole
    assert not queue.messages and [message.handle for message in mover.discarded] == [2]


@pytest.mark.parametrize("arrived", [True, False])
def test_failed_transfer_and_another_in_the_buffer_of_the_first_receive(arrived: bool) -> None:
    mover = Mover()
    queue = TagQueue(1, mover)
    (first, first_buffer), (second, second_buffer) = into(queue, 3), into(queue, 3)
    queue.arrived(1, 3, whole=False)
    queue.arrived(2, 3, whole=False)
    first.cancel()  # so the first message is for the second receive, and the second message is on its way there
    if arrived:
        mover.finish(1)
    mover.finish(0, OSError("lost"))
    with pytest.raises(OSError, match="lost"):
        value(second)
    assert is_free(first_buffer) and is_free(second_buffer) == arrived
    if not arrived:
        mover.finish(0)
    later = wait(queue, Want.BYTES)  # it does not get the second message, which is behind the missing one
    assert queue.failure is not None and queue.fail_unserved(queue.failure)
    with pytest.raises(OSError, match="lost"):
        value(later)
    assert is_free(second_buffer) and not queue.messages and not mover.detached_receives


def test_held_message_is_lost_and_another_is_in_the_buffer_of_the_first_receive() -> None:
    mover = Mover()
    queue = TagQueue(1, mover)
    receives = [into(queue, 3) for _ in range(2)]
    queue.arrived(1, 3, whole=False)
    queue.arrived(2, 3, whole=False)
    queue.messages[0].state = MessageState.HELD  # as if there had been no memory for its transfer
    message, _ = mover.moving.pop(0)
    queue._part(message)
    queue.lose(OSError("lost"))
    queue.fail_unserved(EOFError())
    (first, first_buffer), (second, second_buffer) = receives
    assert not is_free(second_buffer)
    for receive in (first, second):
        with pytest.raises(EOFError):
            value(receive)
    mover.finish()
    assert is_free(first_buffer) and is_free(second_buffer) and not mover.detached_receives


def test_receives_end_in_order() -> None:
    """No message will come any more, and one is on its way: a later receive ends after the one that it is for.

    Else the next receive could get that message, if the first one is cancelled, after the later one got the error.
    """
    mover = Mover()
    queue = TagQueue(1, mover)
    (first, buffer), second, asked = into(queue, 3), wait(queue, Want.BYTES), wait(queue, Want.LENGTH)
    queue.arrived(1, 3, whole=False)
    assert not queue.fail_unserved(EOFError())
    first.cancel()
    mover.finish()
    assert value(second) == b"\1\1\1" and is_free(buffer)
    assert asked.outcome is None and queue.fail_unserved(EOFError())
    with pytest.raises(EOFError):
        value(asked)


def test_lost_while_a_later_message_is_written_to_the_buffer_of_the_first_receive() -> None:
    """UCX may never release the buffer. The receive gets the error, so no later receive gets the first message."""
    mover = Mover()
    queue = TagQueue(1, mover)
    (first, first_buffer), (second, second_buffer) = into(queue, 3), into(queue, 3)
    queue.arrived(1, 3, whole=False)
    queue.arrived(2, 3, whole=False)
    first.cancel()  # so the first message is for the second receive, and the second message is on its way there
    mover.finish(0)
    assert second.outcome is None and is_free(first_buffer)
    queue.lose(OSError("lost"))
    later = wait(queue, Want.BYTES)
    mover.cancelled(queue)
    for receive in (second, later):
        with pytest.raises(OSError, match="lost"):
            value(receive)
    assert not is_free(second_buffer) and not queue.messages
    mover.finish(0, OSError())
    assert is_free(second_buffer) and not mover.detached_receives


def test_cancelled_after_the_loss() -> None:
    """The same, where the receive becomes the first one only after the peer was lost."""
    mover = Mover()
    queue = TagQueue(1, mover)
    receives = [into(queue, 3)[0] for _ in range(3)]
    for number in (1, 2, 3):
        queue.arrived(number, 3, whole=False)
    receives[0].cancel()
    mover.finish(1, OSError("lost"))  # the second message: the third one, behind it, is on its way to the third buffer
    assert [receive.outcome for receive in receives[1:]] == [None, None]
    receives[1].cancel()
    mover.finish(0)  # the first message, for the third receive
    with pytest.raises(OSError, match="lost"):
        value(receives[2])


def test_the_end_serves_what_is_there() -> None:
    mover = Mover()
    queue = TagQueue(1, mover)
    receives = [wait(queue, Want.BYTES) for _ in range(2)]
    asked = wait(queue, Want.LENGTH)
    queue.arrived(1, 3, whole=False)
    queue.arrived(2, 3, whole=False)
    queue.arrived(3, 3, whole=False)
    queue.drop_held()  # the third: its sender has gone
    assert not queue.fail_unserved(EOFError())
    mover.finish()
    mover.finish()
    assert [value(receive) for receive in receives] == [b"\1\1\1", b"\2\2\2"]
    assert queue.fail_unserved(EOFError())
    with pytest.raises(EOFError):
        value(asked)


def test_transfers_that_will_never_end() -> None:
    mover = Mover()
    queue = TagQueue(1, mover)
    receive, buffer = into(queue, 3)
    queue.arrived(1, 3, whole=False)
    queue.arrived(2, 3, whole=True)
    queue.lose(OSError("died"))
    mover.cancelled(queue)
    with pytest.raises(OSError, match="died"):
        value(receive)
    assert not queue.messages and not is_free(buffer)
    mover.finish(error=OSError())  # if UCX lets go after all
    mover.finish()
    assert not queue.messages and is_free(buffer) and not mover.detached_receives


def test_close_with_transfers_under_way() -> None:
    mover = Mover()
    queue = TagQueue(1, mover)
    receive, buffer = into(queue, 3)
    queue.arrived(1, 3, whole=False)
    queue.arrived(2, 3, whole=False)
    queue.close(EOFError())
    with pytest.raises(EOFError):
        value(receive)
    assert [message.handle for message in mover.discarded] == [2]
    assert not is_free(buffer)
    mover.finish(error=OSError())
    assert is_free(buffer) and not mover.detached_receives


class RandomProgram:
    """Messages that arrive, and receives that wait for them, as chance has it."""

    def __init__(self, seed: int) -> None:
        self.chance = random.Random(seed)
        self.mover = Mover()
        self.queue = TagQueue(1, self.mover)
        self.arrived = 0
        self.got: list[bytes] = []
        self.waiting: list[tuple[PendingReceive, bytearray | None]] = []
        self.buffers: list[bytearray] = []

    @staticmethod
    def message(number: int) -> bytes:
        return bytes([number]) * (number % 5 + 1)

    def arrive(self, *, packed_too: bool = False) -> None:
        self.arrived += 1
        if packed_too and self.chance.random() < 0.3:
            self.queue.packed_arrived(packed(self.message(self.arrived)))
        else:
            self.queue.arrived(self.arrived, self.arrived % 5 + 1, whole=self.chance.random() < 0.5)

    def receive(self, *wants: Want) -> None:
        want = self.chance.choice(wants)
        buffer = bytearray(6) if want is Want.INTO else None
        if buffer is not None:
            self.buffers.append(buffer)
        self.waiting.append((wait(self.queue, want, LIMIT if buffer is None else 6, buffer), buffer))

    def cancel(self) -> None:
        index = self.chance.randrange(len(self.waiting))
        if self.waiting[index][0].outcome is None:
            self.waiting.pop(index)[0].cancel()

    def finish_one(self) -> None:
        self.mover.finish(self.chance.randrange(len(self.mover.moving)))

    def collect(self) -> None:
        for receive, buffer in list(self.waiting):
            if receive.outcome is not None:
                self.waiting.remove((receive, buffer))
                result = receive.outcome.unwrap()
                if receive.want is not Want.LENGTH:
                    self.got.append(result if buffer is None else bytes(buffer[:result]))  # type: ignore[misc, arg-type]

    def receive_until(self, condition: Callable[[], bool], *wants: Want) -> None:
        while not condition():
            self.receive(*wants)
            while self.mover.moving:
                self.finish_one()
            self.collect()
        for receive, _ in self.waiting:
            receive.cancel()
        assert self.queue.unread == 0 and not self.mover.moving and not self.mover.detached_receives
        assert all(is_free(buffer) for buffer in self.buffers)


@pytest.mark.sample(30)
@pytest.mark.parametrize("seed", range(300))
def test_random_programs_lose_nothing(seed: int) -> None:
    """Arrivals, receives of all kinds, cancels and completions in any order: each message once, whole, in order."""
    program = RandomProgram(seed)
    for _ in range(200):
        action = program.chance.random()
        if action < 0.25 and program.arrived < 60:
            program.arrive()
        elif action < 0.55:
            program.receive(*Want)
        elif action < 0.7 and program.waiting:
            program.cancel()
        elif program.mover.moving:
            program.finish_one()
        program.collect()
    program.receive_until(lambda: len(program.got) == program.arrived, Want.BYTES)
    assert program.got == [program.message(number) for number in range(1, program.arrived + 1)]
    assert program.queue.empty


@pytest.mark.sample(30)
@pytest.mark.parametrize("seed", range(300))
def test_random_programs_that_want_the_newest(seed: int) -> None:
    """Messages come in order and whole, the last one comes, and each of the others once or not at all."""
    program = RandomProgram(seed)
    queue = program.queue
    for _ in range(200):
        action = program.chance.random()
        if action < 0.3 and program.arrived < 100:
            program.arrive(packed_too=True)
        elif action < 0.5:
            program.receive(Want.BYTES, Want.INTO)
        elif action < 0.7 and program.waiting:
            program.cancel()
        elif action < 0.8:
            queue.keep_newest()
        elif program.mover.moving:
            program.finish_one()
        if queue.newest_only:
            moving = sum(1 for one, _ in program.waiting if one.message is not None)
            assert queue.unread <= len(queue.receives) + 1 + moving
        program.collect()
    program.arrive()
    last = program.message(program.arrived)
    program.receive_until(lambda: program.got[-1:] == [last], Want.BYTES, Want.INTO)
    numbers = [message[0] for message in program.got]
    assert numbers == sorted(set(numbers))
    assert program.got == [program.message(number) for number in numbers]


def take_ready(queue: TagQueue, limit: int) -> bytes | None:
    """What ``Receiving.take_ready`` does with the queue."""
    packed = queue.packed
    if packed is None:
        message = queue.take_ready(limit)
        return None if message is None else message.contents
    if packed.length > limit:
        return None
    data = packed.pop()
    if not packed.remaining:
        queue.next_packed()
    return data


def packed(*messages: bytes) -> PackedMessages:
    return PackedMessages(len(messages), len(messages[0]), b"".join(messages))


def test_packed_messages_keep_their_order_with_others() -> None:
    mover = Mover()
    queue = TagQueue(1, mover)
    queue.packed_arrived(packed(b"aa", b"bb", b"cc"))
    queue.packed_arrived(packed(b"ddd"))
    queue.arrived(1, 5, whole=True)
    assert not queue.empty and len(mover.moving) == 1
    mover.finish()
    queue.packed_arrived(packed(b"e", b"f"))
    assert take_ready(queue, 2) == b"aa"
    receives = [wait(queue, Want.BYTES, 100) for _ in range(7)]
    assert [value(receive) for receive in receives[:3]] == [b"bb", b"cc", b"ddd"]
    assert len(value(receives[3])) == 5
    assert [value(receive) for receive in receives[4:6]] == [b"e", b"f"]
    assert receives[6].outcome is None
    queue.packed_arrived(packed(b"gg", b"hh"))
    assert value(receives[6]) == b"gg"
    assert take_ready(queue, 2) == b"hh"
    assert queue.empty


def test_packed_messages_for_receives_of_every_kind() -> None:
    mover = Mover()
    queue = TagQueue(1, mover)
    length = wait(queue, Want.LENGTH, 1 << 62)
    receive, buffer = into(queue, 10)
    short, _ = into(queue, 1)
    whole = wait(queue, Want.BYTES, 100)
    queue.packed_arrived(packed(b"one", b"two", b"six", b"ten"))
    assert value(length) == 3
    assert value(receive) == 3
    assert buffer[:3] == b"one"
    with pytest.raises(trio_ucx.UCXError, match="3 bytes is too long, the buffer has 1"):
        value(short)
    assert value(whole) == b"six"
    queue.unpack()
    assert value(wait(queue, Want.BYTES, 3)) == b"ten"
    assert queue.empty
    queue.packed_arrived(packed(b"more"))
    assert take_ready(queue, 2) is None, "too long: left to a receive, which says so"
    assert queue.ready_now() is not None


def test_unread_packed_messages_keep_little_memory() -> None:
    messages = [bytes([number]) * 100 for number in range(250)]
    many = packed(*messages)
    for number, message in enumerate(messages):
        assert many.pop() == message
        assert len(many._data) <= 2 * 100 * (250 - number) + 4096
    assert many.remaining == 0
    some = packed(*messages)
    some.pop()
    assert some.pop_all() == b"".join(messages[1:])


def test_packed_messages_of_a_queue_that_failed_or_closed() -> None:
    mover = Mover()
    queue = TagQueue(wire.STREAM, mover)
    queue.arrived(1, 5, whole=False)
    queue.lose(trio.BrokenResourceError())
    assert queue.packed_arrived(packed(b"x", b"y")) == 2, "nothing is delivered behind what is missing"
    assert queue.empty is False and queue.packed is None
    other = TagQueue(2, mover)
    other.packed_arrived(packed(b"x"))
    other.close(trio.ClosedResourceError())
    assert other.packed is None and not other.messages


def test_few_large_transfers_into_fresh_memory_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_tag_queue, "FRESH_AHEAD", 10)
    mover = Mover()
    queue = TagQueue(1, mover)
    receives = [wait(queue, Want.BYTES) for _ in range(4)]
    for number in (1, 2, 3, 4):
        queue.arrived(number, 6, whole=False)
    assert len(mover.moving) == 2
    mover.finish(0)
    assert len(mover.moving) == 2  # the next one
    mover.finish(1)
    mover.finish(0)
    mover.finish(0)
    assert [value(receive) for receive in receives] == [bytes([number]) * 6 for number in (1, 2, 3, 4)]


def test_transfers_into_users_buffers_are_not_held_back(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_tag_queue, "FRESH_AHEAD", 10)
    mover = Mover()
    queue = TagQueue(1, mover)
    receives = [into(queue, 6) for _ in range(4)]
    for number in (1, 2, 3, 4):
        queue.arrived(number, 6, whole=False)
    assert len(mover.moving) == 4
    for _ in range(4):
        mover.finish(0)
    assert [buffer[0] for _, buffer in receives] == [1, 2, 3, 4]


def test_transfer_that_was_not_recorded_keeps_its_buffer() -> None:
    """UCX has begun it, so the buffer must stay, whatever becomes of the receive."""

    class Unlucky(Mover):
        def move(self, message: Message, receive: Receive | None) -> None:
            super().move(message, receive)
            raise RuntimeError("could not be recorded")

    queue = TagQueue(1, Unlucky())
    queue.arrived(1, 3, whole=False)
    buffer = bytearray(3)
    with pytest.raises(RuntimeError):
        wait(queue, Want.INTO, 3, buffer)
    [receive] = queue.receives
    queue.give_up(receive, trio.BrokenResourceError())
    assert not is_free(buffer)


def test_one_small_message_goes_to_a_waiting_receive() -> None:
    queue = TagQueue(1, Mover())
    receive = wait(queue, Want.BYTES)
    assert queue.give(b"one") and value(receive) == b"one"
    length, (into_buffer, buffer) = wait(queue, Want.LENGTH), into(queue, 5)
    assert not queue.give(b"two")  # the length is asked for first
    assert queue.packed_arrived(packed(b"two")) == 0
    assert value(length) == 3 and value(into_buffer) == 3 and buffer == b"two\0\0"
    _, _ = into(queue, 1)
    assert not queue.give(b"too long")
