"""Two connections over a simulated UCX: everything above ``trio_ucx._link.message_port`` is real.

Each end has a real :class:`Connection` over a real :class:`Link`; its messages reach the other end by way of the real
``ucp._engine.dispatch``, in the records that C code makes of them: small messages are packed with their neighbours, and
batches taken apart. Of UCX itself is simulated what matters to the rules: messages from a threshold on stay with
their sender until the receiver's transfer has read them there, out of the sender's pinned buffer; a small message
may have to wait as well, while UCX is *busy*; and closing an endpoint ends what is in flight there. All of that takes
as long as the test wants.
"""

from __future__ import annotations

import collections
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from types import SimpleNamespace
from typing import Any

import attrs
import pytest
import trio
from outcome import Error

import trio_ucx
from trio_ucx._link import Link, MessagePort, Options, Want, closing, divert
from trio_ucx._native import ffi, lib
from trio_ucx._rules import byte_stream as stream
from trio_ucx._rules import wire
from trio_ucx._rules.life import Loss
from trio_ucx._util.live_handles import live_handles
from trio_ucx.ucp import Status
from trio_ucx.ucp._engine.dispatch import deliver, deliver_failures
from trio_ucx.ucp._engine.ending import CloseState
from trio_ucx.ucp._engine.endpoint_core import EndpointCore
from trio_ucx.ucp._engine.engine import Engine
from trio_ucx.ucp._engine.links import WorkerLinks
from trio_ucx.ucp._engine.operations import Operation, OperationSet
from trio_ucx.ucp._engine.share import Share
from trio_ucx.ucp._engine.teardown import Teardown
from trio_ucx.ucp._engine.waits import Pending
from trio_ucx.ucp._features import Feature
from trio_ucx.ucp._memory.buffers import Pinned

#: What was reported as internal errors of trio_ucx.
internal_errors: list[BaseException] = []

SMALL = 1024  # up to this length C code receives messages


@attrs.define(eq=False)
class InFlight:
    """A message between two ends: on the wire, then held by the receiver's UCX."""

    queue: int
    #: None: it stays in this buffer of the sender's.
    data: bytes | None
    pins: Pinned | None = None
    #: The sender's operation, until UCX has completed it.
    operation: int = 0
    sender: SimulatedTransport | None = None

    @property
    def size(self) -> int:
        if self.data is not None:
            return len(self.data)
        assert self.pins is not None
        return self.pins.size

    def taken(self) -> None:
        """The sender's UCX is done with it."""
        operation, self.operation = self.operation, 0
        assert self.sender is not None
        if operation and self.sender.share.handle is not None:  # else the operation ends with the endpoint
            self.sender.engine.complete(operation, Status.OK)


@attrs.define(eq=False)
class Moving:
    """A transfer into memory."""

    id: int
    pins: Pinned
    message: InFlight


class SimulatedTagDispatch:
    def __init__(self, engine: SimulatedEngine) -> None:
        self._engine = engine
        self.sinks: dict[int, Any] = {}
        self.messages = 0
        self.arena: Any = ffi.NULL

    def remove(self, id: int) -> None:
        self.sinks.pop(id, None)

    def discard(self, message: int) -> None:
        self._engine.held.pop(message).taken()


class SimulatedEngine:
    """What the connection's code uses of a worker."""

    usable = True
    handle: Any = "worker"
    adopt = Engine.adopt
    peer_is_hostile = False
    broken: Exception | None = None
    context = SimpleNamespace(features=Feature.TAG, rendezvous_threshold=None)

    def __init__(self) -> None:
        self.tag_dispatch = SimulatedTagDispatch(self)
        self.in_flight: dict[int, Any] = {}
        self.teardown = Teardown()
        self.endpoints: dict[int, EndpointCore] = {}
        self.counters: collections.Counter[str] = collections.Counter()
        self.failures: list[tuple[int, int]] = []
        self.figures = threading.RLock()
        self.links = WorkerLinks(self, ffi.NULL, lambda: None)  # type: ignore[arg-type]
        self.waiting = SimpleNamespace(look=lambda: False)
        self.run = SimpleNamespace(inherited=False, spawn=self.spawn, thread=threading.get_ident())
        self.peer_processes = SimpleNamespace(forget=lambda process, who: None)
        self.receive_queue = SimpleNamespace(suspect=lambda: None, endpoint_closing=lambda core: None)
        #: The messages that UCX holds here, by handle.
        self.held: dict[int, InFlight] = {}
        self.errors: list[BaseException] = []
        #: Lets some of what was sent to this side arrive.
        self.arrive: Callable[[], object] = lambda: None
        self._last_id = 0

    def next_id(self) -> int:
        self._last_id += 1
        return self._last_id

    def complete(self, id: int, status: int) -> None:
        if id in self.teardown.unrecorded:
            del self.teardown.unrecorded[id]
        else:
            self.in_flight.pop(id).complete(status, 0, 0)

    def check(self) -> None:
        pass

    def submit(self) -> None:
        pass

    def reap(self) -> None:
        self.arrive()

    def reap_soon(self) -> None:
        pass

    def watch_events(self) -> None:
        pass

    def internal_error(self, error: BaseException) -> None:
        self.errors.append(error)

    def spawn(self, function: object, name: str) -> None:
        assert self.peer_is_hostile, "an honest peer's abort arrives after all its messages here"


class SimulatedEndpoint(EndpointCore):
    __slots__ = ("transport",)
    transport: SimulatedTransport

    def _force_close(self) -> None:
        self._let_go()
        self.transport.closed()
        self.engine.endpoints.pop(self.id)
        live_handles.closed("endpoint")


class SimulatedOperations(OperationSet):
    __slots__ = ()

    def in_order(self) -> list[Operation]:
        return []  # UCX, which would describe them, is not here


class SimulatedShare(Share):
    __slots__ = ()
    endpoint: SimulatedEndpoint

    def __init__(self, endpoint: SimulatedEndpoint) -> None:
        super().__init__(endpoint, "the other")
        self.operations = SimulatedOperations(endpoint.engine, endpoint.operations)

    def hint(self, status: int) -> str:
        return ""

    def _cancel(self, operations: list[Operation]) -> None:
        pass  # nothing waits here before UCX

    def fail(self, error: trio_ucx.UCXError, *, left_clean: bool = False) -> None:
        assert self.engine.peer_is_hostile or error.status != Status.INVALID_PARAM, f"nobody misbehaves here: {error}"
        if not self.gone:
            self.endpoint.transport.wire.clear()  # the peer has gone, too
        super().fail(error, left_clean=left_clean)


#: On the wire: what the control socket says of an abort.
ABORT = "abort"


class SimulatedTransport(MessagePort):
    """UCX between two ends: the calls of ``_link.message_port``."""

    __slots__ = ("busy", "closing", "dying", "peer", "refuses", "refuses_receive", "threshold", "transfers", "wire")
    engine: Any
    peer: SimulatedTransport
    closing: Any

    def __init__(self, share: Share, threshold: int) -> None:
        super().__init__(share, 0)
        self.threshold = threshold
        #: What is on its way to the peer.
        self.wire: collections.deque[InFlight | tuple[str, int]] = collections.deque()
        #: Whether UCX keeps what it is given until it arrives.
        self.busy = False
        #: Whether there is no memory for the next message.
        self.refuses = False
        #: The same for the next receive.
        self.refuses_receive = False
        #: Transfers into memory here.
        self.transfers: list[Moving] = []
        #: Operations that closing the endpoint has ended; their records are still to come.
        self.dying: list[int] = []

    # ---- what a link asks ----

    def send_bytes(self, queue: int, data: bytes) -> int:
        """What C code sends. (UCX is never busy with its frames and batches: ``native_link.py`` is about that.)"""
        assert self.share.handle is not None
        is_message = queue not in (wire.CONTROL, wire.BATCH)
        if is_message and self._refused():
            return Status.NO_MEMORY
        message = InFlight(queue, data, sender=self)
        self.wire.append(message)
        if self.busy and is_message:
            message.operation = self.engine.next_id()
        return message.operation

    def send(self, queue: int, pins: Pinned) -> int:
        assert self.share.handle is not None
        if self._refused():
            return Status.NO_MEMORY
        stays = 0 < self.threshold <= pins.size
        message = InFlight(queue, None if stays else pins.copy(pins.size), pins if stays else None, sender=self)
        if stays or self.busy:
            message.operation = self.engine.next_id()
        self.wire.append(message)
        return message.operation

    def _refused(self) -> bool:
        refused, self.refuses = self.refuses, False
        return refused

    def receive(self, handle: int, pins: Pinned) -> int:
        if self.refuses_receive:
            self.refuses_receive = False
            return Status.NO_MEMORY
        message = self.engine.held.pop(handle)
        if message.data is None:
            moving = Moving(self.engine.next_id(), pins, message)
            self.transfers.append(moving)
            return moving.id
        write(pins, message.data)
        return 0

    def receive_at(self, handle: int, address: Any, size: int, memory: int = lib.TU_MEMORY_HOST) -> int:
        if self.refuses_receive:
            self.refuses_receive = False
            return Status.NO_MEMORY
        data = self.engine.held.pop(handle).data
        assert data is not None and len(data) == size, "it would wait for its sender"
        ffi.memmove(address, data, size)
        return 0

    def give_up(self, id: int) -> None:
        self.transfers = [moving for moving in self.transfers if moving.id != id]
        self.dying.append(id)

    # ---- what happens ----

    def closed(self) -> None:
        """The endpoint was closed."""
        self.dying += [operation.id for operation in self.share.operations.pending]

    @property
    def can_deliver(self) -> bool:
        return bool(self.wire) and self.peer.share.handle is not None

    def deliver(self, most: int = 1) -> bool:
        """The next things on the wire arrive at the peer, in one call to C there. Returns whether something did."""
        if not self.can_deliver:
            return False
        peer = self.peer
        engine = peer.engine
        lib.tu_links_progressed(engine.links.native)
        rows: list[list[int]] = []
        arena = bytearray()

        def packed(queue: int, count: int, length: int, data: bytes) -> None:
            continues = rows and rows[-1][0] == lib.TU_RECORD_PACKED and rows[-1][3:5] == [length, tag_of(queue)]
            if continues and queue != wire.CONTROL:
                rows[-1][1] += count
            else:
                rows.append([lib.TU_RECORD_PACKED, count, 0, length, tag_of(queue), len(arena)])
            arena.extend(data)

        aborted = None
        taken: list[InFlight] = []
        for _ in range(min(most, len(self.wire))):
            thing = self.wire.popleft()
            if isinstance(thing, tuple):
                aborted = thing[1]
                break
            if thing.size <= SMALL or thing.queue == wire.BATCH:
                assert thing.data is not None
                if thing.queue == wire.BATCH:
                    for queue, count, length, data in taken_apart(thing.data):
                        packed(queue, count, length, data)
                else:
                    packed(thing.queue, 1, len(thing.data), thing.data)
                taken.append(thing)
            else:
                handle = engine.next_id()
                engine.held[handle] = thing
                rows.append([lib.TU_RECORD_MESSAGE, 0, 0, thing.size, tag_of(thing.queue), handle])
                if thing.data is not None:
                    taken.append(thing)
        engine.tag_dispatch.arena = ffi.from_buffer("char[]", bytes(arena) + b"behind")

        deliver(engine, [field for row in rows for field in row])
        deliver_failures(engine)
        for message in taken:
            message.taken()
        if aborted is not None:
            while peer.transfers or peer.dying:  # the peer waits for them
                peer.finish_transfer(0)
            if peer.share.handle is not None:
                peer.closing.peer_aborted(aborted)
        return True

    def finish_transfer(self, which: int) -> bool:
        """One of the transfers into memory here ends, or an operation of an endpoint that was closed."""
        if self.dying:
            operation = self.dying.pop(which % len(self.dying))
            if operation in self.engine.in_flight:
                self.engine.complete(operation, Status.CANCELED)
            return True
        if not self.transfers:
            return False
        moving = self.transfers.pop(which % len(self.transfers))
        message = moving.message
        sender = message.sender
        assert sender is not None and message.pins is not None
        if sender.share.handle is None or self.share.handle is None:
            self.engine.complete(moving.id, Status.CONNECTION_RESET)
            return True
        assert message.pins._exports, "the buffer was released while UCX used it"
        write(moving.pins, message.pins.copy(message.pins.size))
        self.engine.complete(moving.id, Status.OK)
        message.taken()
        return True


def write(pins: Pinned, data: bytes) -> None:
    """Writes to pinned memory, as UCX does, bytes objects included."""
    assert pins._exports, "the memory was released while UCX used it"
    assert len(data) <= pins.size
    if pins.many is None:
        ffi.memmove(pins.address, data, len(data))
    else:
        pins.fill(memoryview(data))


def tag_of(queue: int) -> int:
    """The UCX tag of a message; each engine here has one connection, with the id 0."""
    return queue


def taken_apart(batch: bytes) -> list[tuple[int, int, int, bytes]]:
    """The packed messages of a batch: queue, count, length, data."""
    groups = []
    while batch:
        queue, length, count = wire.PACKED_HEAD.unpack_from(batch)
        end = wire.PACKED_HEAD.size + length * count
        groups.append((queue, count, length, batch[wire.PACKED_HEAD.size : end]))
        batch = batch[end:]
    return groups


class SimulatedControlSocket:
    def __init__(self, transport: SimulatedTransport) -> None:
        self._transport = transport

    def abort(self, sent: int = 0) -> None:
        self._transport.wire.append((ABORT, sent))

    def look(self) -> None:
        pass

    def close(self) -> None:
        pass


@attrs.define(eq=False)
class Sent:
    data: bytes
    pending: Pending | None = None
    cancelled: bool = False
    failed: bool = False
    #: What a mutable buffer of the user's holds it.
    buffer: bytearray | None = None


@attrs.define(eq=False)
class Receiver:
    """A receive that waits."""

    pending: Any
    tag: int
    buffer: bytearray | None


class Side:
    """A program at one end: it sends, receives, writes, reads, cancels and closes.

    Where a method of ``Connection`` waits, this does what the method does before and after it.
    """

    def __init__(self, window: int, threshold: int) -> None:
        self.engine = SimulatedEngine()
        endpoint = SimulatedEndpoint(self.engine, self.engine.next_id(), ffi.NULL, "the other", forcible=True)  # type: ignore[arg-type]
        self.transport = endpoint.transport = SimulatedTransport(SimulatedShare(endpoint), threshold)
        worker: Any = SimpleNamespace(context=SimpleNamespace(rendezvous_threshold=threshold), _engine=self.engine)
        self.link = Link(worker, self.transport, 0, 0, window, threshold, Options(window=window))
        self._outlet = divert(self.link.native, self.transport.send_bytes)
        self.link.closing.control_socket = SimulatedControlSocket(self.transport)
        self.transport.closing = self.link.closing
        self.connection = trio_ucx.Connection._create(self.link, SimpleNamespace())
        # Messages, by tag.
        self.sent: dict[int, list[Sent]] = {tag: [] for tag in range(3)}
        self.received: dict[int, list[bytes | None]] = {tag: [] for tag in range(3)}
        #: Tags on which a receive has reported the end.
        self.ended_tags: set[int] = set()
        self.receivers: list[Receiver] = []
        #: The most receives that have waited at each tag queue.
        self._most_waiting: dict[int, int] = {}
        #: Buffers of the user's that were received into.
        self.buffers: list[bytearray] = []
        # The byte stream.
        self.writes: list[tuple[int, bool]] = []  # size, complete
        self.write: stream.Write[Any] | None = None
        self.eof: Pending | None = None
        self.eof_sent = False
        self.reading: Any = None
        self.got = bytearray()
        self.end: str | None = None
        # The end.
        self.closing = False
        self.close_sent = False
        self.waits_for_ack = False
        self.clean = False

    @property
    def open(self) -> bool:
        return self.link.ending.state is CloseState.OPEN

    @property
    def can_send(self) -> bool:
        return self.open and self.link.sending.problem() is None

    # ---- messages ----

    def send(self, tag: int, size: int, *, mutable: bool = False) -> None:
        if not self.can_send:
            return
        number = len(self.sent[tag])
        data = bytes([number % 251, tag]) * (size // 2) + bytes([number % 251]) * (size % 2)
        sent = Sent(data, buffer=bytearray(data) if mutable else None)
        self.sent[tag].append(sent)
        try:
            sent.pending = self.connection._submit_send(data if sent.buffer is None else sent.buffer, tag)
        except (trio.BrokenResourceError, MemoryError):
            sent.failed = True

    def send_nowait(self, tag: int, size: int) -> bool:
        """Returns whether it was sent."""
        if not self.can_send:
            return False
        number = len(self.sent[tag])
        data = bytes([number % 251, tag]) * (size // 2) + bytes([number % 251]) * (size % 2)
        try:
            self.connection.send_nowait(data, tag=tag)
        except (trio.WouldBlock, MemoryError, trio.BrokenResourceError):
            return False
        self.sent[tag].append(Sent(data))
        return True

    def cancel_send(self, which: int) -> None:
        waiting = [
            sent
            for sents in self.sent.values()
            for sent in sents
            if sent.pending is not None and sent.pending.outcome is None and not sent.cancelled
        ]
        if waiting:
            sent = waiting[which % len(waiting)]
            sent.cancelled = True
            assert sent.pending is not None
            sent.pending.cancel()

    def receive(self, tag: int, want: Want, size: int = 20_000) -> None:
        if not self.open:
            return
        receiving = self.link.receiving
        buffer: bytearray | None = None
        pending: Any = None
        if want is Want.INTO:
            buffer = bytearray(size)
            self.buffers.append(buffer)
            pending = receiving.prepare(buffer)
        try:
            data = None if want is Want.LENGTH else receiving.take_ready(tag, size)
        except (trio_ucx.MessageTooLong, MemoryError):
            self.received[tag].append(None)
            if pending is not None:
                pending.release()
            return
        if data is not None:
            if pending is not None:
                pending.accept(data)
                assert buffer is not None and buffer.startswith(data)
            self.received[tag].append(data)
            return
        pending = receiving.receive(tag, want, size) if pending is None else receiving.wait(tag, pending)
        self.receivers.append(Receiver(pending, tag, buffer))
        self.collect()

    def most_waiting(self) -> int:
        """The sum of the most receives that have waited at each tag queue, but at least one for each."""
        for queue in self.link.native.queues():
            self._most_waiting[queue.number] = max(self._most_waiting.get(queue.number, 1), queue.waiting)
        return sum(self._most_waiting.values())

    def receive_nowait(self, tag: int) -> None:
        if self.open:
            try:
                data = self.connection.receive_nowait(tag=tag)
            except trio.WouldBlock:
                return
            except (trio.EndOfChannel, trio.BrokenResourceError):
                self.collect()  # receives that waited were served first
                self.ended_tags.add(tag)
                return
            except (trio_ucx.MessageTooLong, MemoryError):
                self.received[tag].append(None)
                return
            self.collect()
            assert tag not in self.ended_tags
            self.received[tag].append(data)

    def collect(self) -> None:
        """The tasks run whose operations have ended."""
        for sent in [sent for sents in self.sent.values() for sent in sents]:
            if sent.pending is not None and ran_out_of_memory(sent.pending):
                sent.failed = True
        if self.eof is not None and ran_out_of_memory(self.eof):
            self.eof, self.eof_sent = None, False
        for receiver in [one for one in self.receivers if one.pending.outcome is not None]:
            before = self.receivers[: self.receivers.index(receiver)]
            if was_dropped(receiver.pending) and any(one.tag == receiver.tag for one in before):
                continue  # those in front may still wait for their messages
            self.receivers.remove(receiver)
            try:
                value = receiver.pending.result()
            except (trio.EndOfChannel, trio.BrokenResourceError, trio.ClosedResourceError):
                self.ended_tags.add(receiver.tag)
                continue
            except (trio_ucx.MessageTooLong, MemoryError):
                self.received[receiver.tag].append(None)
                continue
            assert self.engine.peer_is_hostile or receiver.tag not in self.ended_tags, (
                "a receive succeeded after one that said that nothing comes"
            )
            if receiver.pending.want is Want.LENGTH:
                continue
            self.received[receiver.tag].append(value if receiver.buffer is None else bytes(receiver.buffer[:value]))

    def cancel_receive(self, which: int) -> None:
        self.collect()
        if self.receivers:
            self.receivers.pop(which % len(self.receivers)).pending.cancel()

    # ---- the byte stream ----

    def start_write(self, data: bytes) -> None:
        if not self.can_send or self.write is not None or self.eof_sent:
            return
        self.writes.append((len(data), False))
        sending = self.link.sending
        try:
            if 0 < len(data) <= stream.small_piece(sending.window) and sending.send_short(wire.STREAM, data):
                self.writes[-1] = len(data), True
                return
            view = memoryview(data)
            written = sending.write_short(view)
        except (MemoryError, trio.BrokenResourceError):
            return
        cut = stream.pieces(len(view), sending.window, sending.threshold, written)

        def submit(piece: slice) -> Any:
            self.link.check()
            return sending.send(wire.STREAM, view[piece])

        self.write = stream.Write(submit, cut)
        self.advance()

    def advance(self) -> None:
        if self.write is None:
            return
        try:
            if self.write.advance() is None:
                self.writes[-1] = self.writes[-1][0], True
                self.write = None
        except (trio.BrokenResourceError, trio.ClosedResourceError, MemoryError):
            self.cancel_write()

    def cancel_write(self) -> None:
        if self.write is not None:
            self.write.cancel()
            self.write = None

    def send_eof(self) -> None:
        if self.can_send and self.write is None and not self.eof_sent:
            with suppress(MemoryError, trio.BrokenResourceError):
                self.eof = self.link.sending.send(wire.STREAM, b"")
                self.eof_sent = True

    def read(self) -> None:
        if self.end is not None or not self.open:
            return
        receiving = self.link.receiving
        piece: bytes | None = None
        if self.reading is None:
            piece = receiving.stream.take(1000) or receiving.next_piece(1000)
            if piece is None:
                self.reading = receiving.receive(wire.STREAM, Want.BYTES, 1000)
        if self.reading is not None and self.reading.outcome is not None:
            reading, self.reading = self.reading, None
            try:
                receiving.stream.rest = reading.result()
                piece = receiving.stream.take(1000)
            except trio.EndOfChannel:
                piece = b""
            except (trio.BrokenResourceError, trio.ClosedResourceError):
                self.end = "broken"
                return
            except MemoryError:
                return
        if piece:
            self.got += piece
        elif piece is not None:
            self.end = "eof"

    def cancel_read(self) -> None:
        if self.reading is not None and self.reading.outcome is None:
            self.reading.cancel()
            self.reading = None

    # ---- the end ----

    def close(self) -> None:
        """Begins the graceful close, or goes on with it, as ``Closing.close_gracefully``."""
        closing, life = self.link.closing, self.link.life
        if life.closed:
            return
        if not self.closing:
            self.closing = True
            closing.begin()
        if not self.close_sent and closing.may_say_goodbye():
            self.close_sent = True
            self.waits_for_ack = closing.say_goodbye()
        if self.close_sent:
            answered = not self.waits_for_ack or life.acknowledged or self.link.share.handle is None
            if answered and closing.peer_is_done():
                try:
                    closing.finish()
                    self.clean = True
                except trio.BrokenResourceError:
                    pass
                self.write = None

    def abort(self) -> None:
        self.link.abort()
        self.write = None


def was_dropped(pending: Pending) -> bool:
    """True if it has ended because its message was dropped."""
    return isinstance(pending.outcome, Error) and isinstance(
        pending.outcome.error, (trio_ucx.MessageTooLong, MemoryError)
    )


def ran_out_of_memory(pending: Pending) -> bool:
    return isinstance(pending.outcome, Error) and isinstance(pending.outcome.error, MemoryError)


@contextmanager
def simulated() -> Iterator[None]:
    """What a :class:`World` needs: deferring depends on the steps alone, and writes of a few KB go in large pieces."""
    internal_errors.clear()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(closing, "report", lambda what, error: internal_errors.append(error))
        patch.setattr(stream, "LARGE_WRITE", 12_000)
        patch.setattr(stream, "LARGE_PIECE", 8000)
        yield


class World:
    """Two connected programs."""

    def __init__(self, window: int = 40_000, threshold: int = 5001) -> None:
        self.sides = [Side(window, threshold) for _ in range(2)]
        a, b = self.sides
        a.transport.peer, b.transport.peer = b.transport, a.transport
        for side in self.sides:
            side.engine.arrive = partial(self.other(side).transport.deliver, 3)
        #: Which sides know that the other has gone.
        self._told: set[Side] = set()

    def other(self, side: Side) -> Side:
        return self.sides[side is self.sides[0]]

    def notice(self) -> None:
        """An end that is gone is noticed by the other when all that it had sent has arrived."""
        for side in self.sides:
            other = self.other(side)
            gone = other.link.share.handle is None and not other.transport.wire
            if gone and side.link.share.handle is not None and side not in self._told:
                self._told.add(side)
                if side.link.life.closing and not side.link.life.graceful:
                    side.link.closing.cut_off("ended", "has ended")  # control_lost would wait, but nothing is late here
                else:
                    side.link.closing.control_lost(Loss("ended"))

    def run(self, *, act: bool) -> None:
        """Until nothing happens any more; with ``act`` programs go on reading, and finish what they began."""
        for _ in range(5000):
            before = self._state()
            moved = False
            for side in self.sides:
                side.engine.links.flush()
                while side.transport.deliver(3):
                    moved = True
                while side.transport.finish_transfer(0):
                    moved = True
                side.collect()
                if act:
                    side.advance()
                    side.read()
                    for tag in range(3):
                        if side.open and not any(one.tag == tag for one in side.receivers):
                            side.receive(tag, Want.BYTES)
                    side.collect()
                    if side.closing:
                        side.close()
            self.notice()
            if not moved and before == self._state():
                return
        raise AssertionError("it goes on for ever")

    def _state(self) -> list[object]:
        return [
            (
                *(
                    len(side.got),
                    side.end,
                    side.write,
                    side.link.life.closed,
                    side.close_sent,
                    len(side.transport.wire),
                ),
                *(len(side.transport.transfers), side.engine.links.deferred, len(side.transport.dying)),
                *(sum(map(len, side.received.values())), side.link.share.handle is None),
            )
            for side in self.sides
        ]

    def check_messages(self, *, everything: bool = False) -> None:
        """What was received of each tag is what was sent, in order; nothing twice, and nothing is missing between.

        Args:
            everything: nothing is missing at the end, either.
        """
        for side in self.sides:
            other = self.other(side)
            for tag, received in other.received.items():
                missing = [sent.cancelled or sent.failed for sent in side.sent[tag]]
                # How many of what was sent may have been accounted for, by what was received so far.
                reached = {0}
                for data in received:
                    following = set()
                    for start in reached:
                        for number in range(start, len(missing)):
                            if data is None or data == side.sent[tag][number].data:
                                following.add(number + 1)
                            if not missing[number]:
                                break
                    reached = following
                    assert reached, f"tag {tag}: {data and data[:2]!r} was received out of order"
                if everything:
                    assert any(all(missing[number:]) for number in reached), f"tag {tag}: messages did not arrive"

    def check_rest(self) -> None:
        """When nothing is under way: both sides agree on the credit, and no send and receive wait for each other. UCX
        holds the messages that the tag queues say it does."""
        for side in self.sides:
            out, into = self.other(side).link, side.link
            with_sender = sum(queue.with_sender for queue in into.native.queues())
            assert with_sender <= len(side.engine.held) <= sum(queue.messages for queue in into.native.queues())
            sends = {send.written for send in out.sending.waiting}
            receives = {queue.number for queue in into.native.queues() if queue.waiting}
            assert not sends & receives, f"sends and receives of {sends & receives} wait for each other"
            if all(one.open and one.link.share.error is None for one in self.sides):
                sent, got = out.native.counts, into.native.counts
                assert (sent.sent, out.sending.window - sent.credit) == (got.received, got.outstanding)

    def check_errors(self) -> None:
        assert not internal_errors
        for side in self.sides:
            assert not side.engine.errors
            assert not side.engine.teardown.unrecorded

    def check_nothing_left(self) -> None:
        """After both ends were closed: nothing is in flight, and every buffer is its owner's again."""
        for side in self.sides:
            side.collect()
            assert not side.engine.in_flight, side.engine.in_flight
            assert not side.receivers and not side.link.receiving.waiting and not side.link.receiving.transfers
            assert not side.link.receiving.detached_receives and side.link.buffers_released()
            assert not side.link.sending.waiting and not side.engine.links.waiting
            buffers = [sent.buffer for sents in side.sent.values() for sent in sents if sent.buffer is not None]
            for buffer in [*side.buffers, *buffers]:
                buffer.append(0)  # not if it is pinned

    def end(self) -> None:
        for side in self.sides:
            side.abort()
        for side in self.sides:
            side.transport.wire.clear()
            while side.transport.finish_transfer(0):
                pass
