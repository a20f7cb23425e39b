"""The rules of a connection, carried out over a simulated UCX: any interleaving delivers messages and bytes in order.

Two programs send and receive over :mod:`simulation`, whose every delay the test chooses. Random steps, chosen by
hypothesis: messages of all sizes and ways, receives of all kinds, writes, reads, cancellations, ends and closes on
either side; batches that are sent, messages that arrive one by one or many at once, transfers that end.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import trio
from helpers import check_stream, numbered_write
from hypothesis import given, settings
from hypothesis import strategies as st
from injected_faults import no_memory_to_record
from outcome import Error, Value
from simulation import World, simulated

from trio_ucx._link import Want
from trio_ucx._link.closing import Closing
from trio_ucx._link.receiving import PendingReceive, Receiving, Transfer
from trio_ucx._link.sending import Sending, SendOperation
from trio_ucx._rules import byte_stream as stream
from trio_ucx._rules.life import Loss, Peer
from trio_ucx.ucp import Status
from trio_ucx.ucp._engine.links import WorkerLinks
from trio_ucx.ucp._engine.waits import Signal

#: What a message costs that stays with its sender (``link/sending.c``).
ANNOUNCEMENT_COST = 8960
WINDOWS = [8192, 40_000]  # less and more than an announcement costs
#: Rendezvous thresholds: more than a batch, so that there are batches; the least with which C code receives all small
#: messages; none. Less one they are multiples of 8, as the records of numbered_write: pieces end where records do.
THRESHOLDS = [5001, 5001, 1025, 0]
SIZES = [0, 1, 8, 8, 8, 8, 300, 1000, 1024, 1025, 3000, 5000, 5001, 12_000]
RECORDS = [0, 1, 2, 100, 128, 600, 1400, 2200, 2900]

Step = tuple[str, int, int]
ACTIONS = (
    *(["deliver"] * 4 + ["transfer"] * 2 + ["flush"]),
    *(["send"] * 3 + ["send_nowait"] * 3 + ["send_mutable", "cancel_send", "busy", "refuse"]),
    *(["receive"] * 4 + ["receive_nowait", "cancel_receive", "cancel_receive"]),
    *(["write"] * 3 + ["advance", "read", "read", "read", "cancel_read", "cancel_write"]),
)
#: Receives wait at the tags 1 and 2, and tag 0 has no reader.
BESIDE_A_FULL_QUEUE = (
    *("deliver", "deliver", "transfer", "flush", "busy"),
    *("send", "refuse", "receive", "receive", "cancel_receive", "refuse_receive"),
)
ENDS = ("send_eof", "close", "close", "abort")
ENDINGS = ("close", "eof", "leave")
NUMBERS = 3 * len(SIZES)


def step(world: World, action: str, which: int, number: int) -> None:
    side = world.sides[which]
    tag, size = number % 3, SIZES[number % len(SIZES)]
    if action == "deliver":
        side.transport.deliver(number % 8 + 1)
        world.notice()
    elif action == "transfer":
        side.transport.finish_transfer(number)
    elif action == "flush":
        side.engine.links.flush()
    elif action == "busy":
        side.transport.busy = not side.transport.busy
    elif action == "refuse":
        side.transport.refuses = True
    elif action == "refuse_receive":
        # Without a threshold nobody knows which messages UCX has: those that are not received are lost with the peer.
        side.transport.refuses_receive = side.transport.threshold > 0
    elif action == "send":
        side.send(tag, size)
    elif action == "send_mutable":
        side.send(tag, size, mutable=True)
    elif action == "send_nowait":
        side.send_nowait(tag, size)
    elif action == "receive":
        want = list(Want)[number % 3]
        side.receive(tag, want, 4 if number % 11 == 0 else 20_000)
    elif action == "receive_nowait":
        side.receive_nowait(tag)
    elif action == "write":
        side.start_write(numbered_write(len(side.writes), RECORDS[number % len(RECORDS)]))
    elif action in ("cancel_send", "cancel_receive"):
        getattr(side, action)(number)
    else:
        getattr(side, action)()


def run_programs(steps: list[Step], ending: str, window: int, threshold: int) -> None:
    world = World(window, threshold)
    a, b = world.sides
    try:
        for each in steps:
            step(world, *each)
            for side in world.sides:
                side.collect()
                # For each tag queue one admitted message, or as many as receives have waited there.
                admitted = side.most_waiting() * (max(SIZES[-1], ANNOUNCEMENT_COST) + 512)
                assert side.link.native.counts.unread <= window + admitted
        world.check_messages()
        for writer, reader in ((a, b), (b, a)):
            check_stream(writer.writes, reader.got)
        if ending == "leave":
            world.run(act=False)
            world.check_rest()
        _finish(world, ending, aborted=any(action == "abort" for action, _, _ in steps))
        world.check_errors()
    finally:
        world.end()
    world.check_errors()
    world.check_nothing_left()


def _finish(world: World, ending: str, *, aborted: bool) -> None:
    """The programs go on until nothing happens, and end."""
    a, b = world.sides
    both_closed = a.closing and b.closing
    if ending == "eof":
        a.send_eof()
        b.send_eof()
    world.run(act=True)
    if ending != "leave":
        for side in world.sides:
            side.cancel_write()
            if ending == "eof":
                side.send_eof()
            world.run(act=True)
        if ending == "close" and not aborted:
            a.close()
            world.run(act=True)
            b.close()
            world.run(act=True)
            # Neither waits for close_timeout, whatever it has sent and the other does not take.
            assert a.link.life.closed and b.link.life.closed, "the close handshake hangs"
    world.check_messages(everything=ending == "eof" and not aborted and not a.closing and not b.closing)
    for writer, reader in ((a, b), (b, a)):
        cleanly = not aborted and not both_closed and not reader.closing
        ended = writer.closing or (writer.eof_sent and ending == "eof")
        check_stream(writer.writes, reader.got, everything=cleanly and ended)
        waiting = reader.link.sending.waiting or writer.link.sending.waiting
        if cleanly and ended and not waiting:
            assert reader.end == "eof"
        if reader.end == "eof" and not writer.closing and not writer.link.life.closed:
            assert writer.eof_sent


STEPS = st.tuples(
    st.one_of(*[st.sampled_from(ACTIONS)] * 4, st.sampled_from(ENDS)),
    st.integers(0, 1),
    st.integers(0, NUMBERS - 1),
)


@settings(settings.get_profile("model"), max_examples=600)
@given(
    st.lists(STEPS, max_size=80),
    st.sampled_from(ENDINGS),
    st.sampled_from(WINDOWS),
    st.sampled_from(THRESHOLDS),
)
def test_any_interleaving_delivers_in_order(steps: list[Step], ending: str, window: int, threshold: int) -> None:
    with simulated():
        run_programs(steps, ending, window, threshold)


def random_program(seed: int) -> tuple[list[Step], str, int, int]:
    chance = random.Random(seed)
    steps = []
    for _ in range(chance.randrange(20, 120)):
        action = chance.choice(ACTIONS if chance.random() < 0.98 else ENDS)
        steps.append((action, chance.randrange(2), chance.randrange(NUMBERS)))
    return steps, chance.choice(ENDINGS), chance.choice(WINDOWS), chance.choice(THRESHOLDS)


@pytest.mark.parametrize("window", WINDOWS)
@pytest.mark.parametrize("threshold", [5001, 1025, 0])
def test_all_receives_of_a_queue_are_served_beside_a_full_one(window: int, threshold: int) -> None:
    for seed in range(60):
        chance = random.Random(seed)
        with simulated():
            world = World(window, threshold)
            try:
                sender, receiver = world.sides
                while sender.send_nowait(0, 1000):
                    pass
                for _ in range(chance.randrange(10, 60)):
                    action = chance.choice(BESIDE_A_FULL_QUEUE)
                    number = chance.choice([number for number in range(NUMBERS) if number % 3])
                    which = {"send": 0, "refuse": 0, "transfer": 1, "flush": 0}.get(action, chance.randrange(2))
                    step(world, action, 1 if "receive" in action else which, number)
                world.run(act=False)
                world.check_rest()
                assert not receiver.received[0], f"seed {seed}"
                world.check_messages()
            except AssertionError as error:
                raise AssertionError(f"seed {seed}, window {window}, threshold {threshold}") from error
            finally:
                world.end()
            world.check_errors()
            world.check_nothing_left()


PROGRAMS = 400


def test_the_simulation_takes_every_path(monkeypatch: pytest.MonkeyPatch) -> None:
    """Among them the paths of real small messages: packed messages, batches, the short path."""
    counts: dict[str, int] = {}

    def counted(cls: type, name: str, when: Callable[..., bool] = lambda *_: True) -> None:
        function = getattr(cls, name)

        def instead(self: Any, *arguments: Any, **options: Any) -> Any:
            key = f"{cls.__name__}.{name}"
            counts[key] = counts.get(key, 0) + bool(when(self, *arguments))
            return function(self, *arguments, **options)

        counts[f"{cls.__name__}.{name}"] = 0
        monkeypatch.setattr(cls, name, instead)

    counted(WorkerLinks, "flush", lambda links: links.deferred)
    counted(Sending, "send_short")
    counted(Sending, "_keep")
    counted(SendOperation, "post")
    counted(SendOperation, "due")
    counted(SendOperation, "cancel")
    counted(Receiving, "take_ready")
    counted(Receiving, "packed_arrived", lambda receiving, queue, count, length, data: count > 2)
    counted(Receiving, "next_piece")
    counted(Receiving, "receive_nowait")
    counted(Receiving, "save")
    counted(Receiving, "begin_transfer", lambda receiving, item, number, length, receive, verdict: receive is None)
    counted(PendingReceive, "_transfer")
    counted(PendingReceive, "transfer_ended", lambda receive: receive._token is None)
    counted(Transfer, "complete")
    with simulated():
        for seed in range(PROGRAMS):
            run_programs(*random_program(seed))
    assert min(counts.values()) >= 5, counts


# ---- the simulation finds faults ----


def fault(cls: type, name: str) -> Callable[[Any], Any]:
    """Registers a fault: this function instead of a method; it gets the method first."""

    def register(function: Callable[..., Any]) -> Callable[..., Any]:
        FAULTS[function.__name__] = (cls, name, function)
        return function

    return register


FAULTS: dict[str, tuple[type, str, Callable[..., Any]]] = {}


@fault(Receiving, "taken")
def gives_a_message_twice(method: Callable[..., Any], receiving: Receiving, length: int) -> bytes:
    data: bytes = method(receiving, length)
    return data * 2 if data.startswith(b"\1") else data


@fault(SendOperation, "_leave")
def keeps_the_credit_of_a_send_that_left(method: Callable[..., Any], send: SendOperation) -> None:
    send._token = None
    method(send)


@fault(Sending, "withdraw")
def sends_the_pieces_behind_a_refused_one(method: Callable[..., Any], sending: Sending, *which: Any) -> None:
    if not isinstance(which[1], MemoryError):
        method(sending, *which)


@fault(Receiving, "save")
def saves_nothing(method: Callable[..., Any], receiving: Receiving, item: Any, copy: Callable[[], bytes]) -> None:
    method(receiving, item, lambda: bytes(len(copy())))


@fault(PendingReceive, "_leave")
def leaves_what_has_arrived(method: Callable[..., Any], receive: PendingReceive) -> None:
    if receive._moving:
        receive._receiving.detached_receives.add(receive)
        receive._token = None
    else:
        method(receive)


@fault(SendOperation, "post")
def releases_a_buffer_too_early(method: Callable[..., Any], send: SendOperation) -> SendOperation | None:
    result: SendOperation | None = method(send)
    send.release_unsent()
    return result


@fault(PendingReceive, "transfer_ended")
def keeps_the_buffer_of_a_detached_receive(method: Callable[..., Any], receive: PendingReceive) -> None:
    if receive._token is not None:
        method(receive)


@fault(Sending, "finished")
def closes_when_everything_was_acknowledged(method: Callable[..., Any], sending: Sending) -> bool:
    return bool(method(sending)) and not sending.undelivered


@fault(Closing, "stop_arrived")
def waits_for_a_peer_that_receives_nothing_any_more(method: Callable[..., Any], closing: Closing) -> None:
    pass


@pytest.mark.parametrize("name", FAULTS)
def test_the_simulation_finds_faults(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """A program fails with the fault, and only with it."""
    cls, method, function = FAULTS[name]
    real = getattr(cls, method)
    with simulated():
        for seed in range(3 * PROGRAMS):
            with monkeypatch.context() as patch:
                patch.setattr(cls, method, lambda *arguments: function(real, *arguments))
                try:
                    run_programs(*random_program(seed))
                except Exception:
                    break
        else:
            raise AssertionError("no program noticed it")
        run_programs(*random_program(seed))


# ---- single cases ----


@pytest.fixture
def world() -> Iterator[World]:
    with simulated():
        world = World()
        yield world
        world.end()
        world.check_errors()
        world.check_nothing_left()


LARGE = 2200  # records: the pieces of a write stay with the sender


@pytest.mark.parametrize("by_force", [False, True])
@pytest.mark.parametrize("waits", [False, True])
def test_both_sides_leave_a_conversation_at_once(world: World, by_force: bool, waits: bool) -> None:
    """The peer's LEAVE arrives while ours is being sent, or while a send goes on for which the conversation's last one
    had made no room. The next conversation gets the same number."""
    a, b = (side.link.receiving for side in world.sides)
    sending = world.sides[0].link.sending
    numbers = set()
    for _ in range(3):
        talk = a.conversations.open()
        numbers.add(talk.number)
        assert sending.send_short(talk.number, b"request")
        world.run(act=False)
        [begun] = b.conversations.all()
        answer = b.conversations.accept(begun.number)
        assert answer is not None and b.take_ready(answer.number, 100) == b"request"
        assert world.sides[1].link.sending.send_short(answer.number, b"answer")
        world.run(act=False)
        receive = a.receive(talk.number, Want.BYTES)
        assert receive.result() == b"answer"
        if waits:
            while not sending.waiting:
                world.sides[0].send(0, 5000)
            for send in list(sending.waiting):
                send.cancel()
            last = sending.send(talk.number, bytes(5000))
            assert last is not None and last in sending.waiting
            world.sides[0].send(1, 300)  # there is room for it
        b.conversations.leave(answer, by_force=by_force)
        world.sides[0].transport.busy = True
        a.conversations.leave(talk)
        world.sides[0].transport.busy = False
        world.run(act=waits)
        for receiving in (a, b):
            assert not receiving.conversations.all() and receiving.native.queue(talk.number) is None
    assert len(numbers) == 1
    world.check_errors()


def test_cancelled_piece_is_waited_for_when_something_follows(world: World) -> None:
    """A large piece that was announced, cancelled, and followed by others would be a hole if the close gave it up."""
    a, b = world.sides
    a.start_write(numbered_write(0, LARGE))
    a.cancel_write()
    a.start_write(numbered_write(1, 1))
    a.close()
    assert not a.close_sent
    world.run(act=True)
    assert a.link.life.closed and a.clean
    check_stream(a.writes, b.got, everything=True)
    assert len(b.got) > LARGE * 8 / 2 and b.end == "eof"


def test_cancelled_piece_at_the_end_is_given_up(world: World) -> None:
    a, b = world.sides
    a.start_write(numbered_write(0, 1))
    a.start_write(numbered_write(1, LARGE))
    a.cancel_write()
    a.close()
    assert a.close_sent
    world.run(act=False)
    a.close()
    assert a.link.life.closed and a.clean
    b.read()
    b.read()
    assert len(b.got) == 8 and b.end == "eof"


def test_nothing_is_delivered_behind_a_piece_that_was_lost(world: World) -> None:
    a, b = world.sides
    a.start_write(numbered_write(0, LARGE))
    a.cancel_write()
    a.start_write(numbered_write(1, 1))  # small: arrives whole
    a.engine.links.flush()
    while a.transport.deliver():
        pass
    b.link.closing.control_lost(Loss("ended"))
    b.read()
    b.read()
    assert b.end == "broken" and not b.got


def test_the_end_of_the_control_socket_after_a_message_was_broken_off(world: World) -> None:
    """The connection has ended, although the peer could not say that it closes by force."""
    a, b = world.sides
    a.send(0, 12_000)
    b.receive(0, Want.INTO)
    a.transport.deliver(8)
    b.cancel_receive(0)
    [operation] = b.engine.in_flight.values()
    b.engine.complete(operation.id, Status.CANCELED)
    b.transport.transfers.clear()
    assert b.link.life.broken_off and not b.link.life.over
    b.link.closing.control_lost(Loss("ended"))
    assert b.link.life.over and b.link.sending.problem() is not None


def test_what_the_control_socket_does_after_an_abort_says_nothing(world: World) -> None:
    """What the peer had sent before it aborted still has its time to arrive."""
    a, b = world.sides
    a.send(0, 12_000)
    b.receive(0, Want.INTO)
    receive = b.receivers[-1]
    a.transport.deliver(8)
    b.engine.run.spawn = lambda function, name: None  # it would end the wait after a while
    b.link.closing.peer_aborted(2)
    b.link.closing.goodbye_arrived()
    b.link.closing.control_lost(Loss("ended"))
    assert receive.pending.outcome is None
    assert b.transport.finish_transfer(0)
    assert isinstance(receive.pending.outcome, Value)


def test_an_acknowledgement_waits_for_transfers(world: World) -> None:
    a, b = world.sides
    a.send(0, 12_000)
    a.send(1, 12_000)
    b.receive(0, Want.INTO)
    receive = b.receivers[-1]
    a.transport.deliver(8)
    a.cancel_send(0)  # its transfer goes on
    a.cancel_send(0)
    a.close()
    assert a.close_sent
    a.transport.deliver(8)
    assert b.link.life.peer is Peer.CLOSING
    assert b.transport.finish_transfer(0)
    assert receive.pending.outcome is not None
    assert b.link.life.peer is Peer.ACKNOWLEDGED
    world.run(act=True)
    assert a.link.life.closed and a.clean


def test_bytes_whose_send_is_not_recorded_are_kept(world: World) -> None:
    """UCX has begun it, and reads them until it has completed it."""
    a, _ = world.sides
    a.transport.busy = True
    data = b"x" * 2000
    with no_memory_to_record(a.engine), pytest.raises(RuntimeError, match="no memory to record"):
        a.link.sending.send_short(0, data)
    [(_, arguments)] = a.engine.teardown.unrecorded.values()
    assert data in arguments
    assert not a.engine.in_flight
    a.transport.deliver(8)
    assert not a.engine.teardown.unrecorded


def test_messages_keep_their_order_after_an_internal_error_has_ended_receives(world: World) -> None:
    a, b = world.sides
    for _ in range(2):
        a.send(0, 12_000)
        b.receive(0, Want.INTO)
    a.transport.deliver(8)
    assert len(b.transport.transfers) == 2
    b.transport.finish_transfer(1)  # the second receive has its message, and waits for the first one
    b.link.receiving.end_waits(trio.BrokenResourceError())
    b.transport.finish_transfer(0)
    for _ in range(2):
        b.receive(0, Want.BYTES)
    b.collect()
    world.check_messages()


@pytest.mark.parametrize("total", [0, 1, 1024, 4095, 4096, 100_000])
@pytest.mark.parametrize("window", [4096, 2**20])
@pytest.mark.parametrize("threshold", [0, 1, 1025, 2**16, 2**62])
def test_pieces_cover_a_write(total: int, window: int, threshold: int) -> None:
    pieces = list(stream.pieces(total, window, threshold))
    assert [each.start for each in pieces] == [0, *(each.stop for each in pieces)][: len(pieces)]
    assert sum(each.stop - each.start for each in pieces) == total
    assert all(0 < each.stop - each.start <= stream.LARGE_PIECE for each in pieces)


def test_write_sends_nothing_behind_a_piece_that_failed() -> None:
    """That would be a hole in the byte stream."""
    pieces = [Signal() for _ in range(5)]
    sent: list[int] = []

    def submit(piece: slice) -> Signal:
        sent.append(piece.start)
        return pieces[piece.start]

    write = stream.Write(submit, iter([slice(start, start + 1) for start in range(5)]))
    assert write.advance() is pieces[0] and sent == [0, 1, 2]
    pieces[0].set()
    pieces[2].finish(Error(MemoryError()))
    with pytest.raises(MemoryError):
        write.advance()
    assert sent == [0, 1, 2]
