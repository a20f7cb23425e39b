"""Random programs with channels over a simulated UCX: each message reaches the channel that it was sent in, in order.

Two programs over :mod:`simulation` open, accept, use and leave conversations and channels over tags, beside plain
tags. Numbers of conversations are used again as soon as they are free, and tag queues are forgotten as soon as they are
idle, so a frame that comes too late for one meets the next one.
"""

from __future__ import annotations

import collections
import random
from contextlib import suppress

import attrs
import pytest
import trio
from link_model import cost
from outcome import Error
from simulation import Side, World, simulated

from trio_ucx._link import Want
from trio_ucx._link.conversations import ChannelState
from trio_ucx._link.receiving import PendingReceive
from trio_ucx._rules import wire
from trio_ucx.ucp._engine.waits import Pending

PLAIN_TAGS = range(1, 3)
CHANNEL_TAGS = range(100, 102)
MAX_CHANNELS = 3
WINDOWS = [4096, 4096, 4096, 9000, 40_000]
THRESHOLDS = [5001, 5001, 1025, 0]
SIZES = [8, 8, 8, 300, 900, 3000, 6000, 9000]
#: What a program does, and how often.
ACTIONS = {
    **{"open_conversation": 8, "open_channel": 2, "accept": 6, "leave": 8},
    **{"send": 7, "send_nowait": 5, "cancel_send": 2, "receive": 8, "receive_nowait": 5, "cancel_receive": 2},
    **{"deliver": 14, "flush": 3, "transfer": 5, "busy": 1},
}


@attrs.define(eq=False)
class Message:
    data: bytes
    #: Its send was cancelled, or has failed.
    may_be_missing: bool = False


#: A channel until both sides have left it, or a plain tag: what each side has sent, and the other has not received.
Life = tuple[collections.deque[Message], collections.deque[Message]]


@attrs.define(eq=False)
class End:
    """One side's end of a channel, or of a plain tag."""

    number: int
    life: Life
    channel: ChannelState | None = None

    @property
    def usable(self) -> bool:
        return self.channel is None or self.channel.problem() is None


class Program:
    """What one side does. Any action is possible at any time."""

    def __init__(self, side: Side, which: int, lives: dict[tuple[int, int], Life], chance: random.Random) -> None:
        self.side, self.which, self.chance = side, which, chance
        self.link, self.channels_of_link = side.link, side.link.receiving.conversations
        #: By tag, and how many channels with this tag came before; by the number of a conversation that the other side
        #: reads, and which side has opened it.
        self.lives = lives
        self.over_tags: collections.Counter[int] = collections.Counter()
        self.weights = [weight * chance.choice([0.2, 1, 4]) for weight in ACTIONS.values()]
        self.plain = [End(tag, lives[tag, 0]) for tag in PLAIN_TAGS]
        self.channels: list[End] = []
        self.sent = 0
        self.sends: list[tuple[Message, Pending]] = []
        self.receives: list[tuple[End, PendingReceive, bytearray | None]] = []

    def some_end(self) -> End:
        return self.chance.choice(self.channels if self.channels and self.chance.random() < 0.7 else self.plain)

    def open_conversation(self) -> None:
        if len(self.channels) < MAX_CHANNELS:
            channel = self.channels_of_link.open()
            life = self.lives[wire.other_direction(channel.number), self.which] = new_life()
            self.channels.append(End(channel.number, life, channel))
            if self.chance.random() < 0.5:
                self.send_nowait(self.channels[-1])

    def open_channel(self, tag: int | None = None) -> None:
        tag = tag or self.chance.choice(CHANNEL_TAGS)
        with suppress(RuntimeError):  # the peer has not left the last one
            channel = self.channels_of_link.over_tag(tag)
            if all(end.channel is not channel for end in self.channels):
                self.channels.append(End(tag, self.lives[tag, self.over_tags[tag]], channel))
                self.over_tags[tag] += 1

    def accept(self) -> None:
        number = self.channels_of_link.take_begun() or 0
        channel = self.channels_of_link.accept(number) if number else None
        if channel is not None:
            self.channels.append(End(number, self.lives[number, 1 - self.which], channel))

    def leave(self) -> None:
        if self.channels:
            channel = self.channels.pop(self.chance.randrange(len(self.channels))).channel
            assert channel is not None
            self.channels_of_link.leave(channel, by_force=self.chance.random() < 0.3)

    def next_message(self) -> Message:
        self.sent += 1
        return Message(self.sent.to_bytes(4, "little") * (self.chance.choice(SIZES) // 4))

    def send(self) -> None:
        end = self.some_end()
        if end.usable and len(self.sends) < 5:
            self.submit(end)

    def submit(self, end: End) -> None:
        message, queue = self.next_message(), end.number
        end.life[self.which].append(message)
        sent = self.link.sending.send_short(queue, message.data)
        pending = None if sent is True else sent or self.link.sending.send(queue, message.data)
        if pending is not None:
            self.sends.append((message, pending))

    def send_nowait(self, end: End | None = None) -> None:
        end, message = end or self.some_end(), self.next_message()
        if end.usable:
            with suppress(trio.WouldBlock):
                self.link.send_nowait(end.number, message.data)
                end.life[self.which].append(message)

    def cancel_send(self) -> None:
        if self.sends:
            message, pending = self.sends.pop(self.chance.randrange(len(self.sends)))
            message.may_be_missing = True
            pending.cancel()

    def receive(self, end: End | None = None) -> None:
        end = end or self.some_end()
        if sum(each is end for each, _, _ in self.receives) < 3:
            link, buffer = self.link.receiving, bytearray(max(SIZES)) if self.chance.random() < 0.3 else None
            receive = PendingReceive(link, Want.BYTES, None, max(SIZES)) if buffer is None else link.prepare(buffer)
            self.receives.append((end, link.wait(end.number, receive), buffer))
            self.collect()

    def receive_nowait(self) -> None:
        end, data = self.some_end(), None
        with suppress(trio.WouldBlock, trio.EndOfChannel, trio.BrokenResourceError):
            data = self.link.receiving.receive_nowait(end.number, max(SIZES))
        self.collect()  # receives that waited were served first
        if data is not None:
            self.received(end, data)

    def cancel_receive(self) -> None:
        if self.receives:
            self.receives.pop(self.chance.randrange(len(self.receives)))[1].cancel()

    def received(self, end: End, data: bytes | None) -> None:
        """Checks what was received; None: the end of the channel."""
        expected = end.life[1 - self.which]
        while expected:
            message = expected.popleft()
            if message.data == data:
                return
            assert message.may_be_missing, "a message is missing, or is for another channel"
        assert data is None, "a message was received twice, or is for another channel"

    def deliver(self) -> None:
        self.side.transport.deliver(self.chance.choice([1, 1, 1, 5]))

    def flush(self) -> None:
        self.side.engine.links.flush()

    def transfer(self) -> None:
        self.side.transport.finish_transfer(self.chance.randrange(5))

    def busy(self) -> None:
        self.side.transport.busy = not self.side.transport.busy

    def collect(self) -> None:
        """The tasks run whose waits are over."""
        for message, pending in self.sends:
            message.may_be_missing |= isinstance(pending.outcome, Error)
        self.sends = [send for send in self.sends if send[1].outcome is None]
        for receive in [receive for receive in self.receives if receive[1].outcome is not None]:
            self.receives.remove(receive)
            end, pending, buffer = receive
            try:
                value = pending.result()
            except trio.ClosedResourceError:
                assert end.channel is not None and end.channel.left
            except (trio.EndOfChannel, trio.BrokenResourceError):
                assert end.channel is not None and end.channel.peer_left
                self.received(end, None)
            else:
                self.received(end, value if buffer is None else bytes(buffer[:value]))

    def check_rest(self, other: Program) -> None:
        """When nothing is under way: every wait has a reason."""
        sending, counts = self.link.sending, self.link.native.counts
        assert {pending for _, pending, _ in self.receives} <= set(self.link.receiving.waiting)
        assert counts.tokens == len(self.link.receiving.waiting) + len(sending.waiting)
        # Tag queues take turns, so it may be any of them that is the next one.
        sizes = [send.size for send in sending.waiting]
        assert not sizes or any(cost(size, sending.threshold) > counts.credit for size in sizes), (
            "a send waits for credit that is there"
        )
        assert not any(end.channel is not None and end.channel.peer_left for end, _, _ in self.receives)


def new_life() -> Life:
    return collections.deque(), collections.deque()


def progress_until_quiet(world: World, a: Program, b: Program) -> None:
    """Until nothing happens any more."""
    quiet = False
    while not quiet:
        world.run(act=False)
        a.collect()
        b.collect()
        quiet = not any(side.transport.wire or side.engine.links.deferred for side in world.sides)
    world.check_errors()
    world.check_rest()
    a.check_rest(b)
    b.check_rest(a)


def finish(world: World, a: Program, b: Program) -> None:
    """Both leave all channels, and receive what is left with plain tags."""
    for _ in range(2):  # a send that waited behind one of a channel that was left may begin a conversation
        for program in (a, b):
            for tag in CHANNEL_TAGS:
                program.open_channel(tag)
            for _ in list(program.channels_of_link._announced):
                program.accept()
            while program.channels:
                program.leave()
        progress_until_quiet(world, a, b)
    for program in (a, b):
        channels = program.channels_of_link
        assert sorted(channels._free) == list(range(channels._next)), "the number of a conversation is not free again"
        assert not channels.all() and not channels._announced
        assert {queue.number for queue in program.link.native.queues()} <= {*PLAIN_TAGS, *CHANNEL_TAGS}
    for _ in range(sum(len(messages) for end in a.plain for messages in end.life) + 6):
        for program in (a, b):
            for end in program.plain:
                program.receive(end)
        progress_until_quiet(world, a, b)
    assert all(message.may_be_missing for end in a.plain for messages in end.life for message in messages)


def run_programs(seed: int) -> None:
    chance = random.Random(seed)
    world = World(chance.choice(WINDOWS), chance.choice(THRESHOLDS))
    lives: dict[tuple[int, int], Life] = collections.defaultdict(new_life)
    a, b = (Program(side, which, lives, chance) for which, side in enumerate(world.sides))
    try:
        for _ in range(chance.randrange(800)):
            program = chance.choice([a, b])
            getattr(program, chance.choices([*ACTIONS], program.weights)[0])()
            a.collect()
            b.collect()
            if chance.random() < 0.02:
                progress_until_quiet(world, a, b)
        progress_until_quiet(world, a, b)
        finish(world, a, b)
    finally:
        world.end()
    world.check_errors()
    world.check_nothing_left()


#: Programs for each case of the test.
PROGRAMS = 20


@pytest.mark.sample(8)
@pytest.mark.parametrize("seed", range(0, 200 * PROGRAMS, PROGRAMS))
def test_each_message_reaches_its_channel(seed: int) -> None:
    with simulated():
        for each in range(seed, seed + PROGRAMS):
            run_programs(each)
