"""The loads of ``test_peer_faults.py``: what the test and its peer do to each other when the fault comes.

Both processes run this code. Each has :class:`Ends`, its end of a Connection or of two raw endpoints, and runs the
:class:`Load`'s tasks for its side. A :class:`Board` shows how far each side has come, also after a process was killed.
"""

from __future__ import annotations

import contextlib
import mmap
import struct
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any, Protocol

import attrs
import numpy as np
import trio
from outcome import Error
from peers import REMOTE

import trio_ucx
from trio_ucx import ucp
from trio_ucx.ucp import chains

FEATURES = REMOTE | ucp.Feature.STREAM

#: Sides, as indices.
TEST, PEER = 0, 1

LARGE = 2**26
#: Memory that the other side uses: counters, then an area for puts and gets.
COUNTER, CHAIN_COUNTER, CHAIN_AREA, AREA, NBYTES = 0, 64, 128, 4096, 2**21
#: How many messages a sender without credit may be ahead of its receiver.
AHEAD = 128
AM_ID = 7
#: A message that is a rendezvous.
MIXED = 2**18


class Torn(Exception):
    """Data was torn, doubled, lost or out of order."""


class Planned(Exception):
    """What a handler of the peer's raises."""


# ---- how far each side has come ----


class Board:
    """Counters of both sides in a file that both have mapped: they outlive a process that is killed."""

    NAMES = ("begun", "done", "received", "counted", "count_begun", "chained", "chain_begun", "closed", "ended_at")
    _TEXT = 2048

    def __init__(self, path: Path) -> None:
        with path.open("r+b") as file:
            self._map = mmap.mmap(file.fileno(), 4096)

    @classmethod
    def make(cls, path: Path) -> Board:
        path.write_bytes(bytes(4096))
        return cls(path)

    def close(self) -> None:
        self._map.close()

    def __getitem__(self, key: tuple[int, str]) -> int:
        value: int = struct.unpack_from("<Q", self._map, self._offset(key))[0]
        return value

    def __setitem__(self, key: tuple[int, str], value: int) -> None:
        struct.pack_into("<Q", self._map, self._offset(key), value)

    def _offset(self, key: tuple[int, str]) -> int:
        side, name = key
        return 8 * (side * len(self.NAMES) + self.NAMES.index(name))

    @property
    def complaint(self) -> str:
        """What the peer found wrong."""
        return self._map[self._TEXT :].rstrip(b"\0").decode(errors="replace")

    @complaint.setter
    def complaint(self, text: str) -> None:
        encoded = text.encode()[: 4096 - self._TEXT]
        self._map[self._TEXT : self._TEXT + len(encoded)] = encoded


# ---- messages that describe themselves ----

_WORDS = np.arange(LARGE // 8, dtype=np.uint64)


def message(number: int, size: int) -> np.ndarray:
    """A message: each of its words has the number and the word's index."""
    return _WORDS[: size // 8] + np.uint64(number << 32)


def number_of(data: Any, size: int) -> int:
    """The number of a message that has arrived whole."""
    words = np.frombuffer(data, dtype=np.uint64, count=size // 8)
    number = int(words[0]) >> 32
    if size % 8 or not np.array_equal(words, message(number, size)):
        raise Torn(f"message {number} of {size} bytes is torn")
    return number


def small(number: int) -> int:
    """The length of a message: up to 5.6 kB."""
    return 8 * (1 + number * 7919 % 700)


def mixed(number: int) -> int:
    """The same, and every 16th is a rendezvous."""
    return MIXED if number % 16 == 0 else small(number)


def large(number: int) -> int:
    return LARGE


# ---- one side ----


@attrs.define(eq=False)
class Task:
    """A task of a load.

    Attributes:
        expects: what it may end with, once the peer has gone.
        attached: it waits for something that ends with the endpoint. (A worker's receives belong to no endpoint.)
        outcome: None while it runs; "done", or its exception.
    """

    name: str
    run: Callable[[Ends, Task], Awaitable[None]]
    expects: tuple[type[BaseException], ...] = (trio.BrokenResourceError,)
    attached: bool = True
    outcome: BaseException | str | None = None
    ended_at: int = 0
    scope: trio.CancelScope = attrs.field(factory=trio.CancelScope)


@attrs.define(eq=False)
class Ends:
    """One side's end of everything."""

    side: int
    board: Board
    worker: ucp.Worker
    endpoint: ucp.Endpoint
    connection: trio_ucx.Connection | None
    remote: ucp.RemoteMemory | None
    queue: ucp.ActiveMessages
    #: The loads are to come to their ends.
    ending: bool = False
    #: The peer has gone: nobody needs to wait until it has received.
    lost: bool = False
    #: The next step of a load raises.
    raises: Callable[[], bool] = bool

    @property
    def other(self) -> int:
        return 1 - self.side

    def step(self) -> None:
        """Called by each load with each of its steps."""
        if self.raises():
            raise Planned

    async def wait_until_taken(self, number: int) -> None:
        """Backpressure for what has none."""
        while number - self.board[self.other, "received"] > AHEAD and not self.lost:
            await trio.sleep(0.001)

    async def aclose(self) -> None:
        await (self.connection or self.endpoint).aclose()

    def abort(self) -> None:
        (self.connection or self.endpoint).abort()


class Pipe(Protocol):
    """One way to send and receive messages."""

    async def send(self, ends: Ends, data: Any) -> None: ...

    async def receive(self, ends: Ends, task: Task, buffer: bytearray) -> int:
        """Returns the message's length."""
        ...


class Tagged:
    """Messages of a Connection with a tag, or raw tag messages."""

    TAG = 5

    async def send(self, ends: Ends, data: Any) -> None:
        if ends.connection is not None:
            await ends.connection.send(data, tag=self.TAG)
        else:
            await ends.endpoint.tag_send(data, self.TAG)

    async def receive(self, ends: Ends, task: Task, buffer: bytearray) -> int:
        if ends.connection is not None:
            return await ends.connection.receive_into(buffer, tag=self.TAG)
        if len(buffer) == LARGE:
            task.attached = False
            while (found := ends.worker.tag_probe(self.TAG, remove=True)) is None:
                await trio.sleep(0.001)
            task.attached = True  # its transfer has begun
            return (await ends.worker.tag_receive_message(found, buffer))[0]
        task.attached = False
        length, _ = await ends.worker.tag_receive(buffer, self.TAG)
        task.attached = True
        return length


class Streamed:
    """Messages in a byte stream, each after its length."""

    async def send(self, ends: Ends, data: Any) -> None:
        framed = struct.pack("<Q", data.nbytes) + data.tobytes()
        if ends.connection is not None:
            await ends.connection.send_all(framed)
        else:
            await ends.endpoint.stream_send(framed)

    async def receive(self, ends: Ends, task: Task, buffer: bytearray) -> int:
        header = bytearray(8)
        await self._fill(ends, memoryview(header))
        [length] = struct.unpack("<Q", header)
        await self._fill(ends, memoryview(buffer)[:length])
        return int(length)

    async def _fill(self, ends: Ends, view: memoryview) -> None:
        if ends.connection is None:
            await ends.endpoint.stream_receive(view, exact=True)
            return
        while view:
            chunk = await ends.connection.receive_some(len(view))
            if not chunk:
                raise trio.EndOfChannel
            view[: len(chunk)] = chunk
            view = view[len(chunk) :]


class Active:
    """Active messages."""

    async def send(self, ends: Ends, data: Any) -> None:
        await ends.endpoint.am_send(AM_ID, data)

    async def receive(self, ends: Ends, task: Task, buffer: bytearray) -> int:
        task.attached = False
        arrived = await ends.queue.receive()
        task.attached = True
        with arrived:
            return await arrived.receive_into(buffer)


# ---- loads ----

#: The last message of a load: its number is 0.
_END = message(0, 8)


def sending(pipe: Pipe, length: Callable[[int], int], count: int = 2**31) -> Callable[[Ends, Task], Awaitable[None]]:
    async def send(ends: Ends, task: Task) -> None:
        board, side = ends.board, ends.side
        for number in range(1, count + 1):
            if ends.ending:
                break
            await ends.wait_until_taken(number)
            ends.step()
            board[side, "begun"] = number
            await pipe.send(ends, message(number, length(number)))
            board[side, "done"] = number
        await pipe.send(ends, _END)

    return send


def receiving(
    pipe: Pipe, length: Callable[[int], int], *, in_order: bool = True
) -> Callable[[Ends, Task], Awaitable[None]]:
    async def receive(ends: Ends, task: Task) -> None:
        buffer = bytearray(LARGE if length is large else MIXED)
        ahead: set[int] = set()
        while True:
            size = await pipe.receive(ends, task, buffer)
            number = number_of(buffer, size)
            if number == 0:
                break
            if size != length(number):
                raise Torn(f"message {number} has {size} bytes")
            expected = ends.board[ends.side, "received"] + 1
            if number < expected or number in ahead or (in_order and number != expected):
                raise Torn(f"message {number} came instead of {expected}")
            ahead.add(number)
            while expected in ahead:
                ahead.remove(expected)
                ends.board[ends.side, "received"] = expected
                expected += 1
            ends.step()
        if ahead:
            raise Torn(f"messages before {min(ahead)} are lost")

    return receive


async def put_and_get(ends: Ends, task: Task) -> None:
    assert ends.remote is not None
    number = 0
    while not ends.ending:
        number += 1
        ends.step()
        size = 8 * (1 + number * 104_729 % ((NBYTES - AREA) // 8))
        offset = NBYTES - size
        ends.board[ends.side, "begun"] = number
        await ends.remote.put(message(number, size), offset)
        await ends.remote.flush()
        ends.board[ends.side, "done"] = number
        if number_of(await ends.remote.get(offset, size), size) != number:
            raise Torn(f"put {number} is not there, although it was flushed")


async def count_up(ends: Ends, task: Task) -> None:
    assert ends.remote is not None
    count = 0
    while not ends.ending:
        ends.step()
        ends.board[ends.side, "count_begun"] = count + 1
        found = await ends.remote.fetch_add(1, COUNTER)
        if found != count:
            raise Torn(f"the counter was {found}, not {count}")
        count += 1
        ends.board[ends.side, "counted"] = count


async def run_chains(ends: Ends, task: Task) -> None:
    assert ends.remote is not None
    count = 0
    with ends.worker.new_chain(capacity=8) as chain:
        old = chain.fetch_add(ends.remote, 1, offset=CHAIN_COUNTER)
        chain.put(ends.remote, (old.u64() + 1, old.u64() + 1), CHAIN_AREA, when=old.u64() >= 0)
        seen = chain.get(ends.remote, CHAIN_AREA, 16, after=[chain[-1]])
        chain.check(seen.u64(0) == seen.u64(8))
        while not ends.ending:
            ends.step()
            ends.board[ends.side, "chain_begun"] = count + 1
            outcomes = await chain.run()
            count += 1
            for outcome in outcomes:  # the first that failed, rather than one that was not run for that
                if isinstance(outcome, Error) and not isinstance(outcome.error, chains.DependencyNotEvaluated):
                    raise outcome.error
            if outcomes[seen].unwrap() != struct.pack("<QQ", count, count):
                raise Torn(f"chain {count} read {outcomes[seen].unwrap()!r}")
            outcomes.values()
            ends.board[ends.side, "chained"] = count


async def close(ends: Ends, task: Task) -> None:
    """Closes gracefully once everything was sent."""
    board, side = ends.board, ends.side
    pipe = Tagged()
    for number in range(1, TO_CLOSE + 1):
        await ends.wait_until_taken(number)
        board[side, "begun"] = number
        await pipe.send(ends, message(number, mixed(number)))
        board[side, "done"] = number
    await ends.aclose()
    board[side, "closed"] = 1


async def idle(ends: Ends, task: Task) -> None:
    """Lets the other side work."""
    task.attached = False
    while not ends.ending:
        ends.step()
        await trio.sleep(0.001)


def lend(context: ucp.Context, kind: str) -> ucp.Memory:
    """Memory of this side's, all zero, of a kind, "allocated" or "registered"."""
    memory = context.allocate(NBYTES) if kind == "allocated" else context.register(bytearray(NBYTES))
    memory.memoryview[:] = bytes(NBYTES)
    return memory


# ---- waiting without an end ----


async def wait_message(ends: Ends, task: Task) -> None:
    assert ends.connection is not None
    await ends.connection.wait_message(tag=98)


async def wait_receive(ends: Ends, task: Task) -> None:
    assert ends.connection is not None
    await ends.connection.receive(tag=99)


async def wait_closed(ends: Ends, task: Task) -> None:
    assert ends.connection is not None
    with contextlib.suppress(trio_ucx.PeerLost):  # which the tasks that do something report
        await ends.connection.wait_closed()


async def wait_group(ends: Ends, task: Task) -> None:
    assert ends.connection is not None
    error: BaseException
    try:
        async with ends.worker.open_request_group() as group:
            group.receive_into(ends.connection, bytearray(10), tag=97)
    except ExceptionGroup as errors:
        [error] = errors.exceptions
    raise error


async def wait_chunk(ends: Ends, task: Task) -> None:
    if ends.connection is not None:
        await ends.connection.receive_some()
    else:
        await ends.endpoint.stream_receive(bytearray(1))


async def offer(ends: Ends, task: Task) -> None:
    """Sends what nobody receives: a rendezvous."""
    if ends.connection is not None:
        await ends.connection.send(bytearray(2**20), tag=96)
    else:
        await ends.endpoint.tag_send(bytearray(2**20), 96)


#: How many messages a side sends before it closes, where that is all it does.
TO_CLOSE = 50
ENDS = (trio.BrokenResourceError, trio.ClosedResourceError, trio.EndOfChannel)

Tasks = Callable[[], list[Task]]


@attrs.frozen
class Load:
    """What both sides do.

    Attributes:
        test, peer: make the tasks of each side.
        span: seconds within which the fault comes, from when everything runs (or from the moment "at").
        at: when everything "runs"; or the "hello": both sides are about to open the connection.
        alone: the test has no other task, as the endpoint's close would end it.
        memory: each side lends the other memory.
    """

    test: Tasks
    peer: Tasks
    span: float = 0.15
    at: str = "runs"
    alone: bool = False
    memory: bool = False


def both_ways(pipe: Pipe, length: Callable[[int], int], *, in_order: bool = True) -> Tasks:
    return lambda: [
        Task("send", sending(pipe, length)),
        Task("receive", receiving(pipe, length, in_order=in_order)),
    ]


def one_task(name: str, run: Callable[[Ends, Task], Awaitable[None]]) -> Tasks:
    return lambda: [Task(name, run)]


def nothing() -> list[Task]:
    return [Task("idle", idle)]


TAGGED, STREAMED, ACTIVE = Tagged(), Streamed(), Active()
_SEND, _RECEIVE = one_task("send", sending(TAGGED, large)), one_task("receive", receiving(TAGGED, large))


def closing() -> list[Task]:
    return [
        Task("close", close, (trio.BrokenResourceError,)),
        Task("receive", receiving(TAGGED, mixed), ENDS),
    ]


LOADS = {
    "hello": Load(both_ways(TAGGED, small), both_ways(TAGGED, small), span=0.012, at="hello"),
    "messages": Load(both_ways(TAGGED, small), both_ways(TAGGED, small)),
    "64 MiB to the peer": Load(_SEND, _RECEIVE, span=0.3),
    "64 MiB from the peer": Load(_RECEIVE, _SEND, span=0.3),
    "byte stream": Load(both_ways(STREAMED, mixed), both_ways(STREAMED, mixed)),
    "active messages": Load(both_ways(ACTIVE, mixed, in_order=False), both_ways(ACTIVE, mixed, in_order=False)),
    "puts and gets": Load(one_task("put", put_and_get), one_task("put", put_and_get), memory=True),
    "atomics": Load(one_task("count", count_up), one_task("count", count_up), memory=True),
    "chains, the test's": Load(one_task("chain", run_chains), nothing, memory=True),
    "chains, the peer's": Load(nothing, one_task("chain", run_chains), memory=True),
    "close, the test's": Load(
        closing, lambda: [Task("receive", receiving(TAGGED, mixed), ENDS)], span=0.03, alone=True
    ),
    "close, the peer's": Load(
        lambda: [Task("receive", receiving(TAGGED, mixed), ENDS)], closing, span=0.03, alone=True
    ),
    "close, both": Load(closing, closing, span=0.03, alone=True),
}


def waiting(ends: Ends, load: str) -> list[Task]:
    """Tasks of the test that wait for what never comes."""
    if LOADS[load].alone:
        return []
    tasks = [Task("offer", offer)]
    if load != "byte stream":
        tasks.append(Task("wait for bytes", wait_chunk))
    if ends.connection is not None:
        tasks += [
            Task("wait for a message", wait_message),
            Task("wait to receive", wait_receive),
            Task("wait for the end", wait_closed, ()),
            Task("wait in a group", wait_group),
        ]
    return tasks
