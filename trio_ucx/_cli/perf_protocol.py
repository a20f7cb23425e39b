"""The protocol of ``perf``: what its client and its server say to each other, and how they verify data.

The client leads. Control messages are JSON objects in tag queue 0 of its first connection; the payloads have tag queues
of their own. Both sides need the same version of the protocol.

    client                  server
    hello              ->
                       <-   hello         when it is this client's turn: the server serves one client at a time; with
                                          the name of the session, by which more connections of this client join,
                                          its machine, and how many cores are idle there
    kind (a round)     ->
                       <-   ready         the server's receives are posted
    go                 ->                 only if the server is to send without being asked each time
    payloads           <->  payloads
                       <-   received      the end of the measured time
                       <-   verified      with the CPU time of the server
    ... more rounds, until the client closes; instead of any answer: error

Puts and gets need only the client:

    kind (a round)     ->
                       <-   memory        its descriptor; for gets the payloads are in it
    (puts or gets)
    done               ->
                       <-   received, verified, as above

Each further connection of a client begins with

    join               ->                 the name of the session
                       <-   ready

For a comparison the client asks for plain TCP between the same two processes (:mod:`.payload_paths`), once for each
flow. From then on it says of each round which path its payloads take.

    client                  server
    tcp                ->
                       <-   plain_port    a listener is there, for one stream that begins with the token
    (connects)
                       <-   ready
    or, if it cannot connect:
    closed             ->
                       <-   closed        after a "ready", if its stream has come through all the same

Instead of plain_port, or of ready, the server may say closed, with the reason: there is no stream then.

Over plain TCP a put is answered, and a get asked for, by one byte.
"""

from __future__ import annotations

import itertools
import json
import secrets
import time
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager
from functools import partial
from typing import Any

import attrs
import trio

from .. import Connection
from .._native import ucx
from .._util.arguments import check_integer
from .._util.process import this_host
from .._util.text import printable
from .._version import __version__
from ..ucp import Memory, RemoteMemory
from .errors import PerfError, describe, leaves
from .idle_cores import own_idle_cores
from .payload_paths import (
    CONTROL_TAG,
    Paths,
    PayloadPath,
    RemoteMemoryPath,
    StreamPath,
    accept_stream,
    broken_stream,
    connect_stream,
)
from .rounds import MAX_FLOWS, ROUND_BYTES, SHIFTS, Part, Payloads, Round, RoundKind

PROTOCOL = 2
#: The longest control message.
MAX_CONTROL = 2**14
#: Asks for a payload, or acknowledges it.
_ONE_BYTE = memoryview(bytearray(1))

#: Seconds that an end waits for the other.
PATIENCE = 60


def hello(session: str = "", idle_cores: float = 0.0) -> dict[str, Any]:
    own = {"session": session, "machine": machine(), "idle_cores": idle_cores}
    return {"perf": PROTOCOL, "trio_ucx": __version__, "ucx": ucx.release, **own}


def machine() -> str:
    """Returns what tells machines apart."""
    return this_host().process.host.hex()


def _text(value: Any) -> str:
    if not isinstance(value, str):
        raise ValueError
    return printable(value)


def _number(value: Any) -> int:
    if type(value) is not int or not 0 <= value < 2**63:
        raise ValueError
    return value


def _cores(value: Any) -> float:
    if type(value) not in (int, float) or not 0 <= value < 2**20:
        raise ValueError
    return float(value)


def _port(value: Any) -> int:
    return check_integer(value, "the port", 1, 65535)


def _true(value: Any) -> bool:
    if value is not True:
        raise ValueError
    return value


def _flag(value: Any) -> bool:
    if type(value) is not bool:
        raise ValueError
    return value


def _packed(value: Any) -> bytes:
    return bytes.fromhex(value)


#: The entries of each control message, by the entry that identifies the message.
SHAPES: dict[str, dict[str, Callable[[Any], Any]]] = {
    "perf": {
        **{"perf": _number, "trio_ucx": _text, "ucx": _text, "session": _text},
        **{"machine": _text, "idle_cores": _cores},
    },
    "join": {"join": _text},
    "kind": {
        **{"kind": _text, "seed": _text, "size": _number, "count": _number, "shift": _number, "plain": _flag},
        **{"operation": _text, "flows": _number, "both": _flag},
    },
    "go": {"go": _true},
    "memory": {"memory": _packed},
    "done": {"done": _true},
    "tcp": {"tcp": _true},
    "plain_port": {"plain_port": _port, "token": _text},
    "ready": {"ready": _true},
    "received": {"received": _true},
    "verified": {"verified": _true, "cpu_ns": _number},
    "closed": {"closed": _true, "why": _text},
    "error": {"error": _text},
}

#: What the hello of other releases leaves out.
_DEFAULTS: dict[str, dict[str, Any]] = {"perf": {"session": "", "machine": "", "idle_cores": 0}}


def read_message(data: bytearray, *wanted: str) -> dict[str, Any] | None:
    """Decodes a control message and makes its texts printable; None if it is none of the ``wanted``."""
    try:
        message = json.loads(data)
        [entry, *_] = [entry for entry in wanted if entry in message]
        shape = SHAPES[entry]
        message = {**_DEFAULTS.get(entry, {}), **message}
        return {name: read(message[name]) for name, read in shape.items()}
    except (ValueError, TypeError, KeyError, RecursionError):
        return None


async def tell(connection: Connection, message: dict[str, Any]) -> None:
    """Sends a control message.

    Raises:
        PerfError: the other side does not read.
    """
    with _within_patience(f"the other side has read nothing for {PATIENCE} seconds"):
        await connection.send(json.dumps(message).encode(), tag=CONTROL_TAG)


async def hear(connection: Connection, *wanted: str) -> dict[str, Any]:
    """Receives the next control message, which must have one of the ``wanted`` entries."""
    buffer = bytearray(MAX_CONTROL)
    data = buffer[: await connection.receive_into(buffer, tag=CONTROL_TAG)]
    message = read_message(data, "error", *wanted)
    if message is None:
        said = " or ".join(map(repr, wanted))
        raise PerfError(f"the other side says {bytes(data[:100])!r} instead of {said}: is it trio_ucx's perf?")
    if "error" in message:
        raise PerfError(f"the other side says: {message['error']}")
    return message


def check_hello(message: dict[str, Any]) -> None:
    if message["perf"] != PROTOCOL:
        raise PerfError(
            f"the protocols of perf differ: trio_ucx {__version__} has version {PROTOCOL}, trio_ucx "
            f"{message['trio_ucx']} has version {message['perf']}. Install the same release on both sides"
        )


@contextmanager
def _one_error() -> Iterator[None]:
    """Raises one of the errors in a group instead of the group."""
    try:
        yield
    except BaseExceptionGroup as group:
        errors = [error for error in leaves(group) if not isinstance(error, trio.Cancelled)]
        errors.sort(key=lambda error: isinstance(error, Exception))  # Ctrl-C first
        if not errors:
            raise
        raise errors[0] from None


async def _together(jobs: list[Callable[[], Awaitable[None]]]) -> None:
    """Runs the jobs of all flows."""
    if len(jobs) == 1:
        await jobs[0]()
        return
    async with trio.open_nursery() as nursery:
        for job in jobs:
            nursery.start_soon(job)


async def _receive(path: PayloadPath, part: Part, task_status: trio.TaskStatus[None]) -> None:
    async with path.receiving(part):
        task_status.started()


# ---- the server ----


@attrs.define(eq=False)
class Session:
    """A client that is served.

    Attributes:
        name: the secret by which more connections of the client join.
        connections: all of its connections.
        measured: the number of messages, by operation and path, and their sizes.
    """

    paths: Paths
    name: str = attrs.field(factory=lambda: secrets.token_hex(16))
    measured: Counter[str] = attrs.field(factory=Counter)
    sizes: set[int] = attrs.field(factory=set)
    _over: trio.Event = attrs.field(factory=trio.Event)
    _payloads: Payloads = attrs.field(factory=Payloads)
    _memory: Memory | None = None

    async def join(self, connection: Connection) -> None:
        """Lends the session a further connection, until its end."""
        if len(self.paths.connections) == MAX_FLOWS:
            raise PerfError(f"a client has at most {MAX_FLOWS} connections")
        self.paths.connections.append(connection)
        await tell(connection, {"ready": True})
        await self._over.wait()

    async def serve(self) -> None:
        """Serves the client until it closes its first connection."""
        connection = self.paths.connections[0]
        offered = False  # plain TCP
        async with AsyncExitStack() as streams:
            streams.callback(self._end)
            while True:
                with trio.fail_after(PATIENCE):
                    order = await hear(connection, "kind", "tcp", "closed")
                    if "kind" in order:
                        with broken_stream():
                            await self._serve_round(connection, Round.from_message(order))
                    elif "tcp" in order:
                        if len(self.paths.streams) == MAX_FLOWS:
                            raise PerfError(f"a client has at most {MAX_FLOWS} streams of plain TCP")
                        found = await accept_stream(connection, tell)
                        offered = not isinstance(found, str)
                        if isinstance(found, str):
                            await tell(connection, {"closed": True, "why": found})
                        elif found is not None:
                            self.paths.streams.append(StreamPath(await streams.enter_async_context(found)))
                            await tell(connection, {"ready": True})
                    elif "closed" in order and offered:
                        offered = False
                        await tell(connection, {"closed": True, "why": ""})

    async def _serve_round(self, connection: Connection, round: Round) -> None:
        if round.acts_alone:
            memory = self._expose(connection, round)
            await tell(connection, {"memory": bytes(memory.descriptor).hex()})
            began = time.process_time_ns()
            await hear(connection, "done")
            received = memory.memoryview
            await tell(connection, {"received": True})
        else:
            paths = self.paths.for_round(round)
            sent, places = self._payloads.prepare(round)
            began = time.process_time_ns()
            if round.kind is RoundKind.LATENCY:
                await tell(connection, {"ready": True})
                await _together([partial(_answer, *each, round) for each in zip(paths, sent, places, strict=False)])
                await tell(connection, {"received": True})
            else:
                await self._serve_stream(connection, round, paths, sent, places)
            received = None
        cpu = time.process_time_ns() - began
        if round.goes:
            self._payloads.verify(round, received)
        self.measured[f"{round.operation.value} over {'plain TCP' if round.plain else 'UCX'}"] += round.count
        self.sizes.add(round.size)
        await tell(connection, {"verified": True, "cpu_ns": cpu})

    async def _serve_stream(
        self, connection: Connection, round: Round, paths: list[PayloadPath], sent: list[Part], places: list[Part]
    ) -> None:
        async with trio.open_nursery() as sending:
            async with trio.open_nursery() as receiving:
                if round.goes:
                    for path, place in zip(paths, places, strict=False):
                        await receiving.start(_receive, path, place)
                await tell(connection, {"ready": True})
                if round.comes_back:
                    await hear(connection, "go")
                    for path, part in zip(paths, sent, strict=False):
                        sending.start_soon(path.send_many, part)
            await tell(connection, {"received": True})

    def _expose(self, connection: Connection, round: Round) -> Memory:
        """Returns memory for a round of puts; or of gets, with the payloads in it."""
        self._payloads.prepare(round)
        size = round.size * round.count
        if self._memory is None or self._memory.nbytes < size:
            if self._memory is not None:
                self._memory.close()
            self._memory = connection.worker.context.allocate(max(size, ROUND_BYTES))
            self._memory.memoryview[:] = bytes(self._memory.nbytes)  # so that no page is new in the measured time
        if not round.goes:
            self._memory.memoryview[:size] = self._payloads.expected(round)
        return self._memory

    def _end(self) -> None:
        self._over.set()
        if self._memory is not None:
            self._memory.close()


async def _answer(path: PayloadPath, sent: Part, places: Part, round: Round) -> None:
    """Sends each message back; a put is only acknowledged, and a get only asked for."""
    incoming = places.pieces if round.goes else [_ONE_BYTE] * len(places.pieces)
    outgoing = sent.pieces if round.comes_back else [_ONE_BYTE] * len(sent.pieces)
    for piece, place in zip(outgoing, incoming, strict=True):
        await path.receive(place)
        await path.send(piece)


class PerfServer:
    """Serves one client after another; a client may have several connections."""

    def __init__(self) -> None:
        self._turn = trio.Lock()
        self._sessions: dict[str, Session] = {}

    async def serve(self, connection: Connection, begun: Callable[[Session], None] = lambda session: None) -> None:
        """The server's end of a connection, until the client closes it, which gets the text of any error.

        Args:
            begun: called when the client's turn has come.

        Raises:
            PerfError: the client sends nothing or nonsense, or its data are wrong.
        """
        try:
            with _one_error():
                with trio.fail_after(PATIENCE):
                    message = await hear(connection, "perf", "join")
                if "join" in message:
                    if (session := self._sessions.get(message["join"])) is None:
                        raise PerfError("there is no such session")
                    await session.join(connection)
                    return
                check_hello(message)
                async with self._turn:
                    with Paths([connection]) as paths:
                        session, idle_cores = Session(paths), await trio.to_thread.run_sync(own_idle_cores)
                        begun(session)
                        self._sessions[session.name] = session
                        try:
                            await tell(connection, hello(session.name, idle_cores))
                            await session.serve()
                        finally:
                            del self._sessions[session.name]
        except trio.EndOfChannel:
            return
        except trio.TooSlowError:
            raise PerfError(f"the client has sent nothing for {PATIENCE} seconds") from None
        except PerfError as error:
            await tell(connection, {"error": printable(str(error))})
            raise


@contextmanager
def _within_patience(problem: str) -> Iterator[None]:
    """Limits how long the server may take.

    Raises:
        PerfError: with the text ``problem``, after PATIENCE seconds.
    """
    with trio.move_on_after(PATIENCE) as scope:
        yield
    if scope.cancelled_caught:
        raise PerfError(problem)


# ---- the client ----


@attrs.frozen
class Timing:
    """What a round took, in nanoseconds.

    Attributes:
        total: from the first message until the server has received all.
        round_trips: for LATENCY, until each message was answered; until each put or get was complete.
        back: until all that the server sends is here; 0 if it sends nothing by itself.
        cpu: CPU time of both processes.
    """

    total: int
    round_trips: list[int]
    back: int
    cpu: int


def _blank_rounds() -> Iterator[Round]:
    """Yields rounds whose data differ from the previous one's; the caller sets kind, size and count."""
    seed = secrets.token_hex(8)
    for number in itertools.count():
        yield Round(RoundKind.LATENCY, seed, 1, 1, number % SHIFTS)


class PerfClient:
    """The client's end of its connections. Call :meth:`introduce` first, then run any number of rounds."""

    def __init__(self, connection: Connection) -> None:
        self.connection = connection
        self._payloads = Payloads()
        self._rounds = _blank_rounds()
        self._paths = Paths([connection])
        self._memories: dict[bytes, list[RemoteMemory]] = {}

    def close(self) -> None:
        """Closes what it has opened on its connections."""
        self._paths.__exit__()
        self._detach()

    async def introduce(self) -> dict[str, Any]:
        """Waits for our turn; returns the server's hello."""
        with _within_patience(f"no answer from the server for {PATIENCE} seconds; it may be serving another client"):
            await tell(self.connection, hello())
            answer = await hear(self.connection, "perf")
            check_hello(answer)
            return answer

    async def join(self, connection: Connection, server: dict[str, Any]) -> None:
        """Uses a further connection from now on.

        Args:
            server: its hello.
        """
        with _within_patience(f"no answer from the server for {PATIENCE} seconds"):
            await tell(connection, {"join": server["session"]})
            await hear(connection, "ready")
        self._paths.connections.append(connection)

    @asynccontextmanager
    async def plain_tcp(self, flows: int = 1) -> AsyncIterator[str]:
        """Opens plain TCP between the two processes, if that can be had. Yields why not, else nothing."""
        why_not = ""
        async with AsyncExitStack() as stack:
            while not why_not and len(self._paths.streams) < flows:
                stream = await self._open_stream()
                if isinstance(stream, str):
                    why_not = stream
                else:
                    self._paths.streams.append(StreamPath(await stack.enter_async_context(stream)))
            yield why_not
            self._paths.streams.clear()

    async def _open_stream(self) -> trio.SocketStream | str:
        """Returns a stream; or why there is none."""
        with _within_patience(f"no answer from the server for {PATIENCE} seconds"):
            await tell(self.connection, {"tcp": True})
            answer = await hear(self.connection, "plain_port", "closed")
        if "closed" in answer:
            return f"the other side: {answer['why']}"
        try:
            stream = await connect_stream(self.connection, answer["plain_port"], answer["token"])
        except (OSError, trio.BrokenResourceError) as error:
            with _within_patience(f"no answer from the server for {PATIENCE} seconds"):
                await tell(self.connection, {"closed": True, "why": ""})
                while "closed" not in (answer := await hear(self.connection, "ready", "closed")):
                    pass
            return f"the other side: {answer['why']}" if answer["why"] else describe(error)
        try:
            with _within_patience(f"no answer from the server for {PATIENCE} seconds"):
                answer = await hear(self.connection, "ready", "closed")
        except BaseException:
            await trio.aclose_forcefully(stream)
            raise
        if "closed" in answer:
            await trio.aclose_forcefully(stream)
            return f"the other side: {answer['why']}"
        return stream

    async def run_next(self, kind: RoundKind, size: int, count: int, **options: Any) -> Timing:
        """Runs a round with data that differ from the previous one's, see :meth:`run`.

        Args:
            options: further fields of the :class:`Round`.
        """
        return await self.run(attrs.evolve(next(self._rounds), kind=kind, size=size, count=count, **options))

    async def run(self, round: Round) -> Timing:
        """Runs a round, and verifies its data on both ends.

        Raises:
            PerfError: wrong data arrived on either side; the server does not answer.
            trio.BrokenResourceError, trio.EndOfChannel: the server is gone.
        """
        messages = f"{round.count} messages of {round.size} bytes"
        with (
            _within_patience(f"a round of {messages} did not end in {PATIENCE} seconds"),
            broken_stream(),
            _one_error(),
        ):
            return await self._run(round)

    async def _run(self, round: Round) -> Timing:
        connection = self.connection
        sent, places = self._payloads.prepare(round)
        if round.acts_alone:
            await tell(connection, round.to_message())
            memories = await self._attach((await hear(connection, "memory"))["memory"])
            timed = partial(self._act_alone, round, memories, sent, places)
        else:
            paths = self._paths.for_round(round)  # before the server can send anything
            await tell(connection, round.to_message())
            await hear(connection, "ready")
            act = self._ask if round.kind is RoundKind.LATENCY else self._stream
            timed = partial(act, round, list(zip(paths, sent, places, strict=False)))
        cpu = time.process_time_ns()
        total, back, round_trips = await timed()
        cpu = time.process_time_ns() - cpu
        verified = await hear(connection, "verified")
        if round.comes_back:
            self._payloads.verify(round)
        return Timing(total, round_trips, back, cpu + verified["cpu_ns"])

    async def _ask(self, round: Round, flows: list[tuple[PayloadPath, Part, Part]]) -> tuple[int, int, list[int]]:
        """Sends a message of each flow when the one before it was answered."""
        round_trips: list[int] = []

        async def ask(path: PayloadPath, sent: Part, places: Part) -> None:
            out = sent.pieces if round.goes else [_ONE_BYTE] * len(sent.pieces)
            back = places.pieces if round.comes_back else [_ONE_BYTE] * len(sent.pieces)
            for piece, place in zip(out, back, strict=True):
                start = time.perf_counter_ns()
                await path.send(piece)
                await path.receive(place)
                round_trips.append(time.perf_counter_ns() - start)

        begin = time.perf_counter_ns()
        await _together([partial(ask, *flow) for flow in flows])
        await hear(self.connection, "received")
        return time.perf_counter_ns() - begin, 0, round_trips

    async def _stream(self, round: Round, flows: list[tuple[PayloadPath, Part, Part]]) -> tuple[int, int, list[int]]:
        async with trio.open_nursery() as nursery:
            if round.comes_back:
                for path, _, places in flows:
                    await nursery.start(_receive, path, places)
            begin = time.perf_counter_ns()
            if round.comes_back:
                await tell(self.connection, {"go": True})
            if round.goes:
                await _together([partial(path.send_many, sent) for path, sent, _ in flows])
            await hear(self.connection, "received")
            total = time.perf_counter_ns() - begin
        back = time.perf_counter_ns() - begin
        return (total if round.goes else back), (back if round.comes_back else 0), []

    async def _act_alone(
        self, round: Round, memories: list[RemoteMemory], sent: list[Part], places: list[Part]
    ) -> tuple[int, int, list[int]]:
        """Puts, or gets."""
        round_trips: list[int] = []
        paths = itertools.cycle(map(RemoteMemoryPath, self._paths.connections, memories))

        async def one_by_one(path: RemoteMemoryPath, part: Part) -> None:
            act = path.put if round.goes else path.get
            for number, piece in enumerate(part.pieces):
                start = time.perf_counter_ns()
                await act(piece, part.offset + number * round.size)
                round_trips.append(time.perf_counter_ns() - start)

        async def many(path: RemoteMemoryPath, part: Part) -> None:
            await (path.put_many if round.goes else path.get_many)(part)

        job = one_by_one if round.kind is RoundKind.LATENCY else many
        jobs: list[Callable[[], Awaitable[None]]] = [
            partial(job, path, part) for path, part in zip(paths, sent if round.goes else places, strict=False)
        ]
        begin = time.perf_counter_ns()
        await _together(jobs)
        total = time.perf_counter_ns() - begin
        await tell(self.connection, {"done": True})
        await hear(self.connection, "received")
        return total, 0, round_trips

    async def _attach(self, descriptor: bytes) -> list[RemoteMemory]:
        """Returns the server's memory, for each connection."""
        if descriptor not in self._memories:
            self._detach()
            self._memories[descriptor] = []
            for connection in self._paths.connections:
                try:
                    self._memories[descriptor].append(await connection.attach(descriptor))
                except ValueError as error:
                    raise PerfError(f"the server's memory cannot be used: {error}") from None
                await self._memories[descriptor][-1].get_into(bytearray(1))  # now it can be reached without waiting
        return self._memories[descriptor]

    def _detach(self) -> None:
        for memories in self._memories.values():
            for memory in memories:
                memory.close()
        self._memories.clear()
