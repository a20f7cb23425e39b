"""The C code when memory runs out: it tries again later, and loses no message and no announcement.

Two workers in this process, without Trio; ``tu_test_refuse_memory`` makes allocations of the C code (not of UCX) fail.
"""

from __future__ import annotations

import itertools
import struct
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from ipaddress import ip_network
from typing import Any

import pytest
from refused_memory import few_allocations
from samples import some_worker

from trio_ucx import ucp
from trio_ucx._native import ffi, lib
from trio_ucx.ucp import Access, Status
from trio_ucx.ucp._quirks.key_gate import KeyGate

FEATURES = ucp.DEFAULT_FEATURES | ucp.Feature.STREAM | ucp.Feature.AM | ucp.Feature.RMA | ucp.Feature.WAKEUP
FULL = 2**64 - 1
CLAIMED = 1 << 63
SECONDS = 10.0


def buffers(data: bytes | bytearray | Any) -> Any:
    """A native list of one buffer, which keeps what it points to alive."""
    address = ffi.from_buffer("char[]", data)
    parts = ffi.new("void *[]", [address]), ffi.new("size_t[]", [len(data)])
    return Kept(ffi.new("tu_buffers_t *", (1, *parts, lib.TU_MEMORY_HOST, ffi.NULL)), (address, parts))


class Kept:
    def __init__(self, native: Any, kept: object) -> None:
        self.native, self._kept = native, kept


class Side:
    """A worker, and an endpoint to the other one."""

    def __init__(self, stack: ExitStack, **options: str) -> None:
        options = {"TLS": "tcp", **options}
        names = [ffi.new("char[]", name.encode()) for name in options]
        values = [ffi.new("char[]", value.encode()) for value in options.values()]
        context, worker, rejected = ffi.new("tu_context_t **"), ffi.new("tu_worker_t **"), ffi.new("size_t *")
        arrays = ffi.new("char *[]", names), ffi.new("char *[]", values)
        assert lib.tu_context_create(*arrays, len(names), int(FEATURES), ffi.NULL, context, rejected) == Status.OK
        self.context = context[0]
        stack.callback(lib.tu_context_destroy, self.context)
        ports = ffi.new("tu_port_range_t *")
        assert lib.tu_worker_create(self.context, ffi.NULL, 0, ports, b"", worker) == Status.OK
        self.worker = worker[0]
        KeyGate(self.worker, some_worker(tcp_addresses=()), None).admit([ip_network("0.0.0.0/0")])
        stack.callback(lib.tu_worker_destroy, self.worker)
        self.records = ffi.new("tu_record_t[]", 64)
        self.armed = ffi.new("int *")
        self.endpoint: Any = None

    def connect(self, other: Side) -> None:
        address, size, out = ffi.new("char[4096]"), ffi.new("size_t *", 4096), ffi.new("tu_endpoint_t **")
        assert lib.tu_worker_address(other.worker, False, address, size) == Status.OK
        options = ffi.new("tu_endpoint_options_t *", {"error_mode": 1})
        assert lib.tu_endpoint_to_worker(self.worker, 77, address, options, out) == Status.OK
        self.endpoint = out[0]

    def progress(self, arm: bool = False) -> list[tuple[int, ...]]:
        """Records: kind, id, status, length, tag, pointer."""
        count = lib.tu_worker_progress_and_arm(self.worker, self.records, 64, arm, False, self.armed)
        assert count >= 0
        view = memoryview(ffi.buffer(self.records)).cast("Q").tolist()
        width = lib.TU_RECORD_FIELDS
        return [tuple(view[width * number : width * (number + 1)]) for number in range(count)]

    def fill(self) -> list[int]:
        """Posts receives until no more room can be reserved without memory."""
        posted = [self.receive()]
        with few_allocations():
            while (verdict := self.receive()) > 0:
                posted.append(verdict)
        assert verdict == Status.NO_MEMORY
        return posted

    def receive(self) -> int:
        address = ffi.new("char[8]")
        received = ffi.new("tu_received_t *")
        verdict = lib.tu_tag_receive_one(self.worker, address, 8, lib.TU_MEMORY_HOST, 1, FULL, received)
        if verdict > 0:
            _KEPT.append(address)
        return verdict

    def cancel(self, operations: list[int]) -> None:
        for operation in operations:
            lib.tu_operation_cancel(self.worker, operation)


_KEPT: list[object] = []


@pytest.fixture
def sides() -> Iterator[tuple[Side, Side]]:
    with ExitStack() as stack:
        one, other = Side(stack), Side(stack)
        one.connect(other)
        yield one, other
        lib.tu_endpoint_free(one.endpoint)
    _KEPT.clear()


def until(found: Callable[[], Any], *others: Side) -> Any:
    """Progresses the other sides until something is found."""
    deadline = time.monotonic() + SECONDS
    while not (result := found()):
        assert time.monotonic() < deadline, "it did not come"
        for side in others:
            lib.tu_worker_progress(side.worker)
    return result


def of_kind(side: Side, kind: int) -> Callable[[], list[tuple[int, ...]]]:
    return lambda: [record for record in side.progress() if record[0] == kind]


# ---- active messages ----


@pytest.mark.parametrize("memory_is_back", [True, False])
def test_messages_are_announced_after_a_reservation_failed(sides: tuple[Side, Side], memory_is_back: bool) -> None:
    sender, receiver = sides
    out, sent = ffi.new("tu_am_queue_t **"), buffers(b"12345678")

    def send() -> None:
        assert lib.tu_am_send(sender.endpoint, 5, ffi.NULL, 0, sent.native, False, lib.TU_AM_SEND_EAGER) >= 0

    assert lib.tu_am_open(receiver.worker, 1, 5, 100, 100_000, False, out) == Status.OK
    queue = out[0]
    send()
    assert [record[1] for record in until(of_kind(receiver, lib.TU_RECORD_AM), sender)] == [1]
    posted = receiver.fill()
    lib.tu_am_release(receiver.worker, lib.tu_am_next(queue))
    with few_allocations():
        assert lib.tu_am_next(queue) == ffi.NULL  # and room for the next record cannot be reserved
    send()
    with few_allocations(-1 if memory_is_back else 1):  # memory for the message, none for the ring
        assert [record[1] for record in until(of_kind(receiver, lib.TU_RECORD_AM), sender)] == [1]
    lib.tu_am_release(receiver.worker, lib.tu_am_next(queue))
    assert lib.tu_am_next(queue) == ffi.NULL
    send()
    until(of_kind(receiver, lib.TU_RECORD_AM), sender)
    lib.tu_am_close(queue)
    receiver.cancel(posted)


def test_queue_is_closed_after_a_reservation_failed(sides: tuple[Side, Side]) -> None:
    sender, receiver = sides
    out, sent = ffi.new("tu_am_queue_t **"), buffers(b"12345678")
    assert lib.tu_am_open(receiver.worker, 1, 5, 100, 100_000, False, out) == Status.OK
    assert lib.tu_am_send(sender.endpoint, 5, ffi.NULL, 0, sent.native, False, lib.TU_AM_SEND_EAGER) >= 0
    until(of_kind(receiver, lib.TU_RECORD_AM), sender)
    posted = receiver.fill()
    lib.tu_am_release(receiver.worker, lib.tu_am_next(out[0]))
    with few_allocations():
        assert lib.tu_am_next(out[0]) == ffi.NULL
    lib.tu_am_close(out[0])
    receiver.progress()
    receiver.cancel(posted)


# ---- streams ----


@pytest.mark.parametrize("pieces", [1, 400])
def test_stream_data_that_found_no_room_is_taken_later(sides: tuple[Side, Side], pieces: int) -> None:
    """With 400 pieces the slack of the ring is used up, too. No further data arrives that could draw attention."""
    sender, receiver = sides
    receiver.connect(sender)  # stream data belongs to an endpoint of the receiver's
    sent = buffers(b"12345678")
    posted = receiver.fill()
    for _ in range(pieces):
        assert lib.tu_stream_send(sender.endpoint, sent.native) >= 0
    with few_allocations():
        end = time.monotonic() + 0.3
        while time.monotonic() < end:
            sender.progress()
            lib.tu_worker_progress(receiver.worker)
    got = 0

    def rest() -> bool:
        nonlocal got
        for record in of_kind(receiver, lib.TU_RECORD_STREAM)():
            got += record[3]
            lib.tu_stream_release(receiver.worker, record[5])
        return got == 8 * pieces

    until(rest, sender)
    receiver.cancel(posted)
    lib.tu_endpoint_free(receiver.endpoint)


# ---- Connections' messages ----


def test_worker_is_not_armed_while_messages_lack_memory(sides: tuple[Side, Side]) -> None:
    """An announcement takes the memory that is kept for it. Until there is more, messages stay with UCX, which does not
    tell of them again."""
    sender, receiver = sides
    lib.tu_worker_claim_messages(receiver.worker, CLAIMED)
    receiver.progress()
    head = struct.pack("<IIQ", 1, lib.TU_PIECE_QUEUES, LENGTH)
    first, second = ffi.new("char[]", head), ffi.new("char[]", b"12345678")
    lib.tu_tag_send_one(sender.endpoint, first, len(head), lib.TU_MEMORY_HOST, CLAIMED | lib.TU_LONG_QUEUE)
    with few_allocations():
        assert until(of_kind(receiver, lib.TU_RECORD_MESSAGE), sender)[0][3] == LENGTH
    lib.tu_tag_send_one(sender.endpoint, second, 8, lib.TU_MEMORY_HOST, CLAIMED | 2)
    with few_allocations():
        end = time.monotonic() + 0.3
        while time.monotonic() < end:
            sender.progress()
            assert receiver.progress(arm=True) == []
            assert receiver.armed[0] != lib.TU_ARMED
    [record] = until(of_kind(receiver, lib.TU_RECORD_PACKED), sender)
    assert record[1:5] == (1, 0, 8, CLAIMED | 2)


# ---- long messages ----

LENGTH = 2 * lib.TU_LONG + 3
FIRST, SECOND = CLAIMED | 1 << 32 | 1, CLAIMED | 1 << 32 | 2


def listed(data: bytearray) -> Kept:
    """A native list of three buffers; the C code describes the parts of each piece to UCX."""
    whole = ffi.from_buffer("char[]", data)
    cuts = [0, 5, len(data) // 2, len(data)]
    addresses = ffi.new("void *[]", [whole + start for start in cuts[:-1]])
    lengths = ffi.new("size_t[]", [end - start for start, end in itertools.pairwise(cuts)])
    native = ffi.new("tu_buffers_t *", (3, addresses, lengths, lib.TU_MEMORY_HOST, ffi.NULL))
    return Kept(native, (whole, addresses, lengths))


@pytest.fixture
def long() -> Iterator[LongMessages]:
    with ExitStack() as stack:
        sender, receiver = Side(stack, RNDV_THRESH="64k"), Side(stack, RNDV_THRESH="64k")
        sender.connect(receiver)
        yield LongMessages(sender, receiver)
        lib.tu_endpoint_free(sender.endpoint)
    _KEPT.clear()


class LongMessages:
    """Sends long messages from one side to the other."""

    def __init__(self, sender: Side, receiver: Side) -> None:
        self.sender, self.receiver = sender, receiver
        self.data = bytearray(bytes(range(251)) * (LENGTH // 251 + 1))[:LENGTH]
        self.announced: list[tuple[int, ...]] = []
        self.ended: dict[tuple[Side, int], int] = {}
        lib.tu_worker_claim_messages(receiver.worker, CLAIMED)

    def send(self, tag: int, data: Kept | None = None) -> int:
        data = data or buffers(self.data)
        _KEPT.append(data)
        verdict: int = lib.tu_long_send(self.sender.endpoint, data.native, LENGTH, tag)
        return verdict

    def receive(self, target: Kept) -> int:
        """Receives the first message that was announced."""
        _KEPT.append(target)
        until(lambda: self.progress() or self.announced)
        handle = self.announced[0][5]
        received = ffi.new("tu_received_t *")
        verdict: int = lib.tu_message_receive(self.receiver.worker, handle, target.native, received)
        if verdict != Status.NO_MEMORY:
            del self.announced[0]
        return verdict

    def progress(self) -> None:
        for side in (self.sender, self.receiver):
            for record in side.progress():
                if record[0] == lib.TU_RECORD_MESSAGE:
                    self.announced.append(record)
                else:
                    assert record[0] == lib.TU_RECORD_OPERATION
                    self.ended[side, record[1]] = -record[2]

    def end(self, side: Side, operation: int) -> int:
        """Waits for the end of an operation, and returns its status."""
        assert operation > 0
        until(lambda: self.progress() or (side, operation) in self.ended)
        return self.ended.pop((side, operation))

    def drop_rest(self) -> None:
        assert self.receive(buffers(b"")) == Status.OK


def test_long_message_is_announced_when_memory_is_back(long: LongMessages) -> None:
    """There is memory for one announcement; the next one stays with UCX, which does not tell of it again."""
    sender, receiver = long.sender, long.receiver
    receiver.progress()
    sent = [long.send(FIRST), long.send(SECOND)]
    with few_allocations():
        until(lambda: long.progress() or long.announced)
        assert len(long.announced) == 1
        end = time.monotonic() + 0.3
        while time.monotonic() < end:
            sender.progress()
            assert receiver.progress(arm=True) == []
            assert receiver.armed[0] != lib.TU_ARMED
    for tag, operation in zip((FIRST, SECOND), sent, strict=True):
        until(lambda: long.progress() or long.announced)
        assert long.announced[0][3:5] == (LENGTH, tag)
        target = bytearray(LENGTH)
        received = long.receive(buffers(target))
        assert long.end(receiver, received) == long.end(sender, operation) == Status.OK
        assert target == long.data


def test_long_message_is_received_when_memory_is_back(long: LongMessages) -> None:
    sender, receiver = long.sender, long.receiver
    sent, target = long.send(FIRST), bytearray(LENGTH)
    until(lambda: long.progress() or long.announced)
    posted = receiver.fill()
    with few_allocations():
        assert long.receive(buffers(target)) == Status.NO_MEMORY
    received = long.receive(buffers(target))
    assert long.end(receiver, received) == long.end(sender, sent) == Status.OK
    assert target == long.data
    receiver.cancel(posted)


def test_sender_runs_out_of_memory(long: LongMessages) -> None:
    """At first nothing is sent; with more memory some pieces are, and the operation fails."""
    sender, receiver = long.sender, long.receiver
    statuses = []
    for allocations in range(20):
        with few_allocations(allocations):
            sent = long.send(FIRST, listed(long.data))
        if sent < 0:
            statuses.append(sent)
            continue
        target = bytearray(LENGTH)
        received = long.receive(buffers(target))
        with few_allocations(0 if allocations < 12 else -1):
            statuses.append(long.end(sender, sent))
        if statuses[-1] == Status.OK:
            assert long.end(receiver, received) == Status.OK
            assert target == long.data
        else:
            lib.tu_operation_cancel(receiver.worker, received)
            assert long.end(receiver, received) == Status.CANCELED
    assert set(statuses) == {Status.NO_MEMORY, Status.OK}


def test_receiver_runs_out_of_memory(long: LongMessages) -> None:
    """The sender is rid of the message all the same."""
    sender, receiver = long.sender, long.receiver
    statuses = []
    for allocations in range(20):
        sent, target = long.send(FIRST), bytearray(LENGTH)
        until(lambda: long.progress() or long.announced)
        lib.tu_worker_reserve_scratch(receiver.worker)
        with few_allocations(allocations):
            received = long.receive(listed(target))
            if received > 0:
                statuses.append(long.end(receiver, received))
        if received < 0:
            statuses.append(received)
            long.drop_rest()
        assert long.end(sender, sent) == Status.OK
        assert statuses[-1] != Status.OK or target == long.data
    assert set(statuses) == {Status.NO_MEMORY, Status.OK}


@pytest.mark.parametrize("begun", [False, True])
@pytest.mark.parametrize("who", ["sender", "receiver"])
def test_given_up_between_two_pieces(long: LongMessages, who: str, begun: bool) -> None:
    """The operation ends with the pieces that UCX works on, and both workers are then rid of the message."""
    sender, receiver = long.sender, long.receiver
    sent, target = long.send(FIRST), bytearray(LENGTH)
    until(lambda: long.progress() or long.announced)
    if who == "receiver":
        received = long.receive(buffers(target))
        if begun:
            lib.tu_worker_progress(receiver.worker)
        lib.tu_operation_cancel(receiver.worker, received)
        assert long.end(receiver, received) == Status.CANCELED
        assert long.end(sender, sent) == Status.OK, "nobody wants the rest, which is no concern of the sender's"
    else:
        lib.tu_operation_cancel(sender.worker, sent)
        received = long.receive(buffers(target))
        assert long.end(sender, sent) == Status.CANCELED, "it has no pieces at UCX any more"
        lib.tu_operation_cancel(receiver.worker, received)
        assert long.end(receiver, received) == Status.CANCELED
    again = bytearray(LENGTH)
    sent = long.send(SECOND)
    received = long.receive(buffers(again))
    assert long.end(sender, sent) == long.end(receiver, received) == Status.OK
    assert again == long.data


@pytest.mark.parametrize("moment", range(0, 40, 4))
def test_one_of_two_is_given_up(long: LongMessages, moment: int) -> None:
    """The other one arrives."""
    sender, receiver = long.sender, long.receiver
    targets = [bytearray(LENGTH), bytearray(LENGTH)]
    sent = [long.send(FIRST), long.send(SECOND)]
    received = [long.receive(buffers(target)) for target in targets]
    for _ in range(moment):
        lib.tu_worker_progress(sender.worker)
        lib.tu_worker_progress(receiver.worker)
    lib.tu_operation_cancel(sender.worker, sent[0])
    assert long.end(sender, sent[0]) in (Status.OK, Status.CANCELED)
    assert long.end(sender, sent[1]) == long.end(receiver, received[1]) == Status.OK
    assert targets[1] == long.data
    lib.tu_operation_cancel(receiver.worker, received[0])
    assert long.end(receiver, received[0]) in (Status.OK, Status.CANCELED)


def test_endpoint_closes_with_long_messages(long: LongMessages) -> None:
    sender = long.sender
    sent = [long.send(FIRST), long.send(SECOND)]
    until(lambda: long.progress() or len(long.announced) == 2)
    closing = lib.tu_endpoint_close(sender.endpoint, lib.TU_CLOSE_EXACT)
    assert closing == Status.OK or long.end(sender, closing) == Status.OK
    assert [long.end(sender, each) for each in sent] == [Status.CANCELED] * 2
    long.drop_rest()
    long.drop_rest()


# ---- remote memory ----


@pytest.mark.parametrize("way_out", ["cancelled", "no memory"])
def test_fence_outlives_the_put_behind_it(sides: tuple[Side, Side], way_out: str) -> None:
    """Between a fence and a put there was another one, which never began: the put still waits for what was before."""
    sender, owner = sides
    long, length = 2**20, 2**20 + 64
    memory, base, size = ffi.new("ucp_mem_h *"), ffi.new("uint64_t *"), ffi.new("size_t *")
    assert lib.tu_memory_map(owner.context, ffi.NULL, length, -1, 0b1111, memory) == Status.OK
    assert lib.tu_memory_query(memory[0], base, size, ffi.new("int *")) == Status.OK
    token = bytes(range(16))
    served = lib.tu_memory_serve(owner.context, memory[0], token, base[0], length, Access.ALL, False)
    seen = memoryview(ffi.buffer(ffi.cast("char *", base[0]), length))
    seen[:] = bytes(length)
    way = ffi.new("tu_access_path_t *", {"messages": True, "length": length})
    ffi.memmove(way.token, token, 16)

    def put(data: bytes, offset: int) -> int:
        address = kept.setdefault(offset, ffi.from_buffer("char[]", data))
        operation: int = lib.tu_transfer(sender.endpoint, 0, way, True, address, len(data), lib.TU_MEMORY_HOST, offset)
        return operation

    kept: dict[int, Any] = {}
    word = b"87654321"

    assert put(b"x" * long, 0) > 0
    assert lib.tu_worker_fence(sender.worker) == Status.OK
    if way_out == "cancelled":
        cancelled = put(word, long)
        assert cancelled > 0
        assert lib.tu_operation_cancel(sender.worker, cancelled)
    else:
        with few_allocations(0):
            assert put(word, long) == Status.NO_MEMORY
    assert put(word, long + 8) > 0
    until(lambda: seen[long + 8 : long + 16] == b"87654321", sender, owner)
    assert seen[:long] == b"x" * long, "the put behind the fence has overtaken the one before it"
    assert lib.tu_memory_withdraw(served) == 0
    lib.tu_memory_unmap(owner.context, memory[0])


def test_owner_without_memory_says_so(sides: tuple[Side, Side]) -> None:
    """Otherwise the request would wait for its answer for ever."""
    sender, owner = sides
    memory, base, size = ffi.new("ucp_mem_h *"), ffi.new("uint64_t *"), ffi.new("size_t *")
    assert lib.tu_memory_map(owner.context, ffi.NULL, 4096, -1, 0b1111, memory) == Status.OK
    assert lib.tu_memory_query(memory[0], base, size, ffi.new("int *")) == Status.OK
    token = bytes(range(16))
    served = lib.tu_memory_serve(owner.context, memory[0], token, base[0], 4096, Access.ALL, False)
    way = ffi.new("tu_access_path_t *", {"messages": True, "length": 4096})
    ffi.memmove(way.token, token, 16)
    target = ffi.new("char[8]")

    def get(without: bool) -> int:
        operation = lib.tu_transfer(sender.endpoint, 0, way, False, target, 8, lib.TU_MEMORY_HOST, 0)
        assert operation > 0
        with few_allocations(0 if without else -1):
            [record] = until(lambda: [each for each in sender.progress() if each[1] == operation], owner)
        return -record[2]  # records have it without its sign

    assert get(without=False) == Status.OK
    assert get(without=True) == Status.NO_MEMORY
    assert get(without=False) == Status.OK
    assert lib.tu_memory_withdraw(served) == 0
    lib.tu_memory_unmap(owner.context, memory[0])


# ---- chains ----


def test_request_that_could_not_be_added_leaves_no_trace(sides: tuple[Side, Side]) -> None:
    side, _ = sides
    out = ffi.new("tu_chain_t **")
    assert lib.tu_chain_create(side.worker, out) == Status.OK
    chain = out[0]
    check, again = ffi.new("tu_chain_request_t *"), ffi.new("tu_chain_request_t *")
    after = ffi.new("uint32_t[]", [0])
    again.after, again.after_count = after, 1
    assert lib.tu_chain_add(chain, check) == 0
    memory = lib.tu_chain_memory(chain)
    for allowed in range(2):
        with few_allocations(allowed):
            assert lib.tu_chain_add(chain, again) == Status.NO_MEMORY
        assert lib.tu_chain_memory(chain) == memory
    assert lib.tu_chain_add(chain, again) == 1
    verdict = lib.tu_chain_run(chain)
    assert verdict == Status.OK
    assert lib.tu_chain_errors(chain) == 0
    lib.tu_chain_free(chain)
