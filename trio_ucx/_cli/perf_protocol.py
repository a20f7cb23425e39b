"""The protocol of ``perf``: what its client and its server say to each other, and how they verify data.

The client leads. Control messages are JSON objects in one tag queue; the payloads have a tag queue of their own.

    client                  server
    hello              ->
                       <-   hello         when it is this client's turn: the server serves one client at a time
    round              ->
                       <-   ready         the server's receives are posted
    payloads           ->   payloads      one way; or, with "latency", each is sent back
                       <-   received      the end of the measured time
                       <-   verified
    ... more rounds, until the client closes; instead of any answer: error

For a comparison the client asks for plain TCP between the same two processes (:mod:`.payload_paths`). From then on it
says of each round which path its payloads take.

    client                  server
    tcp                ->
                       <-   plain_port    a listener is there, for one stream that begins with the token
    (connects)
                       <-   ready
    or, if it cannot connect:
    closed             ->
                       <-   closed        after a "ready", if its stream has come through all the same

Instead of plain_port, or of ready, the server may say closed, with the reason: there is no stream then.

Payloads are pieces of a pattern that both ends make from a seed. Each round uses another part of it, so that lost,
stale and swapped data are noticed. Each end keeps all payloads of a round and compares them afterwards, outside the
measured time.
"""

from __future__ import annotations

import enum
import hashlib
import itertools
import json
import secrets
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager
from typing import Any

import attrs
import trio

from .. import Connection
from .._native import ucx
from .._util.arguments import check_integer
from .._util.text import printable
from .._version import __version__
from .errors import PerfError, describe
from .payload_paths import (
    CONTROL_TAG,
    ConnectionPath,
    PayloadPath,
    StreamPath,
    accept_stream,
    broken_stream,
    connect_stream,
)
from .sizes import MAX_SIZE

PROTOCOL = 1
#: The version of a part that servers of protocol 1 need not know: plain TCP.
PLAIN = 1
#: The longest control message.
MAX_CONTROL = 2**14
#: Limits for the payloads of a round: their number, and their bytes (but at least one payload).
ROUND_MESSAGES = 4096
ROUND_BYTES = 8 * 2**20
#: The number of places in the pattern at which rounds begin.
SHIFTS = 4096

#: Seconds that an end waits for the other.
PATIENCE = 60


class RoundKind(enum.Enum):
    """What a round measures. LATENCY: each message is sent back before the next; STREAM: many in flight, one way."""

    LATENCY = "latency"
    STREAM = "stream"


def round_limit(size: int) -> int:
    """Returns how many messages of ``size`` bytes a round has at most."""
    return max(1, min(ROUND_MESSAGES, ROUND_BYTES // size))


@attrs.frozen
class Round:
    """``count`` messages of ``size`` bytes: the pattern of ``seed`` from byte ``shift`` on. ``plain``: by plain TCP."""

    kind: RoundKind
    seed: str
    size: int
    count: int
    shift: int
    plain: bool = False

    @classmethod
    def from_message(cls, message: dict[str, Any]) -> Round:
        """Decodes and checks a client's request, because it decides how much memory we use."""
        try:
            names = ("seed", "size", "count", "shift", "plain")
            asked = cls(RoundKind(message["kind"]), **{name: message[name] for name in names if name in message})
            sensible = (
                isinstance(asked.seed, str)
                and 1 <= asked.size <= MAX_SIZE
                and 1 <= asked.count <= round_limit(asked.size)
                and 0 <= asked.shift < SHIFTS
            )
        except (KeyError, TypeError, ValueError):
            sensible = False
        if not sensible:
            raise PerfError(f"the client asks for an invalid round: {message}")
        return asked


class Payloads:
    """The memory of one end: the pattern that it sends, and the buffer that it receives into."""

    def __init__(self) -> None:
        self._seed: str | None = None
        self._pattern = memoryview(b"")
        self._received = bytearray()

    def prepare(self, round: Round) -> tuple[list[memoryview], list[memoryview]]:
        """Returns the pieces to send, and the pieces of the buffer to receive into."""
        length = max(
            ROUND_BYTES, round.size
        )  # also long enough for rounds of other sizes, because making it takes time
        if self._seed != round.seed or len(self._received) < length:
            self._pattern = memoryview(hashlib.shake_256(round.seed.encode()).digest(length + SHIFTS))
            self._received = bytearray(b"\0") * length  # written, so that no page is new in the measured time
            self._seed = round.seed
        places = memoryview(self._received)[: round.count * round.size]
        return _pieces(self._expected(round), round.size), _pieces(places, round.size)

    def _expected(self, round: Round) -> memoryview:
        return self._pattern[round.shift : round.shift + round.count * round.size]

    def verify(self, round: Round) -> None:
        """Compares all that was received in a round.

        Raises:
            PerfError: it differs from what the other end should have sent.
        """
        expected = self._expected(round)
        if self._received.startswith(expected):
            return
        wrong = next(index for index, byte in enumerate(expected) if self._received[index] != byte)
        number, offset = divmod(wrong, round.size)
        raise PerfError(
            f"wrong data arrived: message {number + 1} of {round.count} ({round.kind.value}, {round.size} bytes each) "
            f"differs from what was sent, from byte {offset} on"
        )


def _pieces(data: memoryview, size: int) -> list[memoryview]:
    return [data[start : start + size] for start in range(0, len(data), size)]


def hello() -> dict[str, Any]:
    return {"perf": PROTOCOL, "plain": PLAIN, "trio_ucx": __version__, "ucx": ucx.release}


def _text(value: Any) -> str:
    if not isinstance(value, str):
        raise ValueError
    return printable(value)


def _number(value: Any) -> int:
    if type(value) is not int or not 0 <= value < 2**63:
        raise ValueError
    return value


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


#: The entries of each control message, by the entry that identifies the message.
SHAPES: dict[str, dict[str, Callable[[Any], Any]]] = {
    "perf": {"perf": _number, "plain": _number, "trio_ucx": _text, "ucx": _text},
    "kind": {"kind": _text, "seed": _text, "size": _number, "count": _number, "shift": _number, "plain": _flag},
    "tcp": {"tcp": _true},
    "plain_port": {"plain_port": _port, "token": _text},
    "ready": {"ready": _true},
    "received": {"received": _true},
    "verified": {"verified": _true},
    "closed": {"closed": _true, "why": _text},
    "error": {"error": _text},
}

#: What peers leave out that do not know it.
_DEFAULTS: dict[str, dict[str, Any]] = {"perf": {"plain": 0}, "kind": {"plain": False}}


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
        raise PerfError(f"the other side is trio_ucx {message['trio_ucx']}, whose perf speaks another protocol")


async def serve(connection: Connection, turn: trio.Lock) -> None:
    """The server's end of a connection, until the client closes it, which gets the text of any error.

    Args:
        turn: held while this client is served.

    Raises:
        PerfError: the client sends nothing or nonsense, or its data are wrong.
    """
    try:
        with trio.fail_after(PATIENCE):
            check_hello(await hear(connection, "perf"))
        async with turn:
            await tell(connection, hello())
            await _serve_orders(connection)
    except trio.EndOfChannel:
        return
    except trio.TooSlowError:
        raise PerfError(f"the client has sent nothing for {PATIENCE} seconds") from None
    except PerfError as error:
        await tell(connection, {"error": printable(str(error))})
        raise


async def _serve_orders(connection: Connection) -> None:
    payloads = Payloads()
    paths: dict[bool, PayloadPath] = {False: ConnectionPath(connection)}
    offered = False  # plain TCP
    async with AsyncExitStack() as streams:
        while True:
            with trio.fail_after(PATIENCE):
                order = await hear(connection, "kind", "tcp", "closed")
                if "kind" in order:
                    with broken_stream():
                        await _serve_round(connection, payloads, Round.from_message(order), paths)
                elif "tcp" in order:
                    found = await accept_stream(connection, tell)
                    offered = not isinstance(found, str)
                    if isinstance(found, str):
                        await tell(connection, {"closed": True, "why": found})
                    elif found is not None:
                        paths[True] = StreamPath(await streams.enter_async_context(found))
                        await tell(connection, {"ready": True})
                elif "closed" in order and offered:
                    offered = False
                    await tell(connection, {"closed": True, "why": ""})


async def _serve_round(
    connection: Connection, payloads: Payloads, round: Round, paths: dict[bool, PayloadPath]
) -> None:
    path = paths.get(round.plain)
    if path is None:
        raise PerfError("the client asks for a round over plain TCP, which it has not opened")
    _, places = payloads.prepare(round)
    if round.kind is RoundKind.LATENCY:
        await tell(connection, {"ready": True})
        for place in places:
            await path.receive(place)
            await path.send(place)
    else:
        async with path.receiving(places):
            await tell(connection, {"ready": True})
    await tell(connection, {"received": True})
    payloads.verify(round)
    await tell(connection, {"verified": True})


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


@attrs.frozen
class Timing:
    """How long a round took, in nanoseconds: in all, and for LATENCY each round trip."""

    total: int
    round_trips: list[int]


def _blank_rounds() -> Iterator[Round]:
    """Yields rounds whose data differ from the previous one's; the caller sets kind, size and count."""
    seed = secrets.token_hex(8)
    for number in itertools.count():
        yield Round(RoundKind.LATENCY, seed, 1, 1, number % SHIFTS)


class PerfClient:
    """The client's end of a connection. Call :meth:`introduce` first, then run any number of rounds."""

    def __init__(self, connection: Connection) -> None:
        self.connection = connection
        self._payloads = Payloads()
        self._rounds = _blank_rounds()
        self._paths: dict[bool, PayloadPath] = {False: ConnectionPath(connection)}

    async def introduce(self) -> dict[str, Any]:
        """Waits for our turn; returns the server's hello."""
        with _within_patience(f"no answer from the server for {PATIENCE} seconds; it may be serving another client"):
            await tell(self.connection, hello())
            answer = await hear(self.connection, "perf")
            check_hello(answer)
            return answer

    @asynccontextmanager
    async def plain_tcp(self, server: dict[str, Any]) -> AsyncIterator[str]:
        """Opens plain TCP between the two processes, if that can be had. Yields why not, else nothing.

        Args:
            server: its hello.
        """
        if server["plain"] != PLAIN:
            yield f"the other side is trio_ucx {server['trio_ucx']}, whose perf cannot"
            return
        with _within_patience(f"no answer from the server for {PATIENCE} seconds"):
            await tell(self.connection, {"tcp": True})
            answer = await hear(self.connection, "plain_port", "closed")
        if "closed" in answer:
            yield f"the other side: {answer['why']}"
            return
        try:
            stream = await connect_stream(self.connection, answer["plain_port"], answer["token"])
        except (OSError, trio.BrokenResourceError) as error:
            with _within_patience(f"no answer from the server for {PATIENCE} seconds"):
                await tell(self.connection, {"closed": True, "why": ""})
                while "closed" not in await hear(self.connection, "ready", "closed"):
                    pass
            yield describe(error)
            return
        async with stream:
            with _within_patience(f"no answer from the server for {PATIENCE} seconds"):
                answer = await hear(self.connection, "ready", "closed")
            self._paths[True] = StreamPath(stream)
            yield f"the other side: {answer['why']}" if "closed" in answer else ""

    async def run_next(self, kind: RoundKind, size: int, count: int, *, plain: bool = False) -> Timing:
        """Runs a round with data that differ from the previous one's, see :meth:`run`."""
        return await self.run(attrs.evolve(next(self._rounds), kind=kind, size=size, count=count, plain=plain))

    async def run(self, round: Round) -> Timing:
        """Runs a round, and verifies its data on both ends.

        Raises:
            PerfError: wrong data arrived on either side; the server does not answer.
            trio.BrokenResourceError, trio.EndOfChannel: the server is gone.
        """
        messages = f"{round.count} messages of {round.size} bytes"
        with _within_patience(f"a round of {messages} did not end in {PATIENCE} seconds"), broken_stream():
            return await self._run(round)

    async def _run(self, round: Round) -> Timing:
        connection, path = self.connection, self._paths[round.plain]
        pieces, places = self._payloads.prepare(round)
        await tell(connection, {**attrs.asdict(round), "kind": round.kind.value})
        await hear(connection, "ready")
        round_trips: list[int] = []
        begin = time.perf_counter_ns()
        if round.kind is RoundKind.LATENCY:
            for piece, place in zip(pieces, places, strict=True):
                start = time.perf_counter_ns()
                await path.send(piece)
                await path.receive(place)
                round_trips.append(time.perf_counter_ns() - start)
        else:
            await path.send_many(pieces)
        await hear(connection, "received")
        total = time.perf_counter_ns() - begin
        await hear(connection, "verified")
        if round.kind is RoundKind.LATENCY:
            self._payloads.verify(round)
        return Timing(total, round_trips)
