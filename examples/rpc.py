"""Remote procedure calls: many at once over one connection, with large arguments, errors, cancellation and deadlines.

    pip install trio_ucx
    python examples/rpc.py serve [--listen HOST:PORT]                 prints the address that it listens at
    python examples/rpc.py call HOST:PORT METHOD ['{"name": value}']  prints the result

In programs of your own, which bring their methods along:

    await trio_ucx.serve_ucx(partial(rpc.answer_calls, {"add": add}), 13337, authkey=key)

    async with rpc.open_client("10.0.0.5:13337", authkey=key) as client:
        with trio.fail_after(2):
            assert await client.call("add", a=1, b=2) == 3

An argument or result is JSON, or a buffer (bytes, a numpy array), which is not copied and arrives as bytes.

The protocol: a client numbers its calls, and each is a conversation with a tag of its own. So calls do not wait for
each other, and replies need no sorting.

    REQUESTS   to the server: {"call": number, "method": name, "timeout": seconds or null,
                              "values": {name: value}, "buffers": [name, ...]}, or {"cancel": number}
               to the client: why the server hangs up, in plain text
    number     to the server: the buffers, in order
               to the client: {"values": {"result": value}}, or {"buffers": ["result"]} and the buffer,
                              or {"error": [type, text]}

Each side sends all that it has announced, and receives all that the other side sends, even if the call is cancelled
meanwhile; a cancelled call is answered, too. So no message is left in a tag queue. While MAX_CALLS calls are
unanswered, the server reads no further request.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import os
import signal
import sys
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping
from contextlib import asynccontextmanager, suppress
from functools import partial
from typing import Any

import attrs
import trio
from outcome import Error, Outcome, Value

import trio_ucx

REQUESTS = 0
SILENCE = 2**31 - 1  # nobody sends with this tag: a receive ends when the connection does
MAX_CALLS = 256
MAX_HEADER = 2**16  # bytes of JSON
#: Both sides need the same one, of 16 bytes or more. Without it a server lets in only clients of its own user.
AUTHKEY = trio_ucx.authkey()


class RpcError(Exception):
    """A method raised an exception at the server. The arguments are that exception's type and text, both strings."""

    def __str__(self) -> str:
        return ": ".join(self.args)


class ProtocolError(Exception):
    """The other side does not keep to the protocol."""


GONE = trio.EndOfChannel, trio.BrokenResourceError
REFUSED = ProtocolError, trio_ucx.UCXError  # the latter for messages that are too long

Method = Callable[..., Awaitable[Any]]


def encode(head: Mapping[str, Any], things: Mapping[str, Any]) -> tuple[bytes, list[memoryview]]:
    """Makes a header, and the buffers that go after it."""
    values, buffers = {}, {}
    for name, thing in things.items():
        try:
            buffers[name] = memoryview(thing)
        except TypeError:
            values[name] = thing
    if not all(buffer.c_contiguous for buffer in buffers.values()):
        raise ValueError("a buffer that is not contiguous cannot be sent")
    header = json.dumps({**head, "values": values, "buffers": [*buffers]}).encode()
    if len(header) > MAX_HEADER:
        raise ValueError(f"{len(header)} bytes of JSON are more than {MAX_HEADER}: use buffers for what is large")
    return header, [*buffers.values()]


async def receive_header(connection: trio_ucx.Connection, tag: int) -> Any:
    buffer = bytearray(MAX_HEADER)  # a longer message is refused
    length = await connection.receive_into(buffer, tag=tag)
    try:
        return json.loads(buffer[:length])
    except (ValueError, RecursionError) as error:
        raise ProtocolError(f"not JSON: {error}") from error


# ---- the server, which does not trust its clients ----


async def answer_calls(methods: Mapping[str, Method], connection: trio_ucx.Connection) -> None:
    """Serves one client until it leaves, and cancels its unfinished calls then. A handler for ``serve_ucx``."""
    try:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(partial(connection.receive, tag=SILENCE))
            await Answering(methods, connection, nursery).read_requests()
    except* GONE:
        pass
    except* REFUSED as group:
        with suppress(trio.WouldBlock, trio.BrokenResourceError):
            connection.send_nowait(explain(group).encode(errors="replace"), tag=REQUESTS)


@attrs.frozen(eq=False)
class Answering:
    """The server's side of one connection."""

    methods: Mapping[str, Method]
    connection: trio_ucx.Connection
    nursery: trio.Nursery
    running: dict[int, trio.CancelScope] = attrs.field(factory=dict)
    slots: trio.Semaphore = attrs.field(factory=lambda: trio.Semaphore(MAX_CALLS))

    async def read_requests(self) -> None:
        while True:
            match await receive_header(self.connection, REQUESTS):
                case {"cancel": int(number)}:
                    if number in self.running:  # else its answer is on the way
                        self.running[number].cancel()
                case {
                    "call": int(number),
                    "method": str(method),
                    "timeout": int() | float() | None as timeout,
                    "values": dict(values),
                    "buffers": [*names],
                } if (
                    REQUESTS < number < SILENCE
                    and number not in self.running
                    and (timeout is None or 0 <= timeout <= 2**31)
                    and all(isinstance(name, str) for name in names)
                ):
                    await self.slots.acquire()
                    deadline = math.inf if timeout is None else trio.current_time() + timeout
                    self.running[number] = trio.CancelScope(deadline=deadline)
                    self.nursery.start_soon(self.answer, number, method, values, names)
                case _:
                    raise ProtocolError("neither a call nor a cancellation")

    async def answer(self, number: int, method: str, arguments: dict[str, Any], names: list[str]) -> None:
        """The server's half of a conversation, of which only the method is cancelled."""
        for name in names:
            arguments[name] = await self.connection.receive(tag=number)
        try:
            with self.running[number] as scope:
                if method not in self.methods:
                    raise LookupError(f"there is no method {method!r}")
                result = await self.methods[method](**arguments)
                header, buffers = encode({}, {"result": result})
            if scope.cancelled_caught:
                raise trio.TooSlowError("the call was cancelled, or its deadline has passed")
        except Exception as error:
            header, buffers = encode({"error": [type(error).__name__, str(error)[:1000]]}, {})
        messages: list[trio_ucx.Buffer] = [header, *buffers]
        for message in messages:
            await self.connection.send(message, tag=number)
        del self.running[number]
        self.slots.release()


# ---- the client ----


@attrs.define(eq=False)
class Call:
    number: int
    ended: trio.Event = attrs.field(factory=trio.Event)
    outcome: Outcome[Any] = attrs.field(factory=lambda: Error(trio.ClosedResourceError("this client was closed")))


@attrs.define(eq=False)
class Client:
    """The client's side of one connection. Open it with :func:`open_client`."""

    _connection: trio_ucx.Connection
    _nursery: trio.Nursery
    _requests: trio.MemorySendChannel[bytes]
    _numbers: Iterator[int] = attrs.field(factory=lambda: (1 + count % (SILENCE - 1) for count in itertools.count()))
    _slots: trio.Semaphore = attrs.field(factory=lambda: trio.Semaphore(MAX_CALLS))
    _complaint: str = ""

    async def call(self, method: str, /, **arguments: Any) -> Any:
        """Calls a method of the server's. The deadline of the cancel scopes around it is the method's deadline, too.

        Cancellation: returns at once, and cancels the method. Buffers may go on being sent until the client is closed:
        do not change them.

        Raises:
            RpcError: the method raised, or there is no such method.
            trio.BrokenResourceError: the connection is lost; the method may or may not have run.
            trio.ClosedResourceError: the client was closed.
            TypeError, ValueError: an argument cannot be sent; nothing was.
        """
        await self._slots.acquire()
        call = Call(next(self._numbers))
        timeout = trio.current_effective_deadline() - trio.current_time()
        head = {"call": call.number, "method": method, "timeout": max(timeout, 0) if timeout <= 2**31 else None}
        try:
            header, buffers = encode(head, arguments)
            self._requests.send_nowait(header)
        except BaseException:
            self._slots.release()
            raise
        self._nursery.start_soon(self._converse, call, buffers)
        try:
            await call.ended.wait()
        except trio.Cancelled:
            with suppress(trio.ClosedResourceError):
                self._requests.send_nowait(json.dumps({"cancel": call.number}).encode())
            raise
        return call.outcome.unwrap()

    async def _converse(self, call: Call, buffers: list[memoryview]) -> None:
        """The client's half of a conversation, which is not cancelled with the call."""
        try:
            for buffer in buffers:
                await self._connection.send(buffer, tag=call.number)
            match await receive_header(self._connection, call.number):
                case {"error": [str(kind), str(text)]}:
                    call.outcome = Error(RpcError(kind, text))
                case {"values": {"result": result}}:
                    call.outcome = Value(result)
                case {"buffers": ["result"]}:
                    call.outcome = Value(await self._connection.receive(tag=call.number))
                case _:
                    raise ProtocolError("not a reply")
        except (*GONE, *REFUSED) as error:
            call.outcome = Error(self._lost(error))
        finally:
            self._slots.release()
            call.ended.set()

    def _lost(self, error: Exception) -> trio.BrokenResourceError:
        with suppress(trio.WouldBlock, *GONE):
            complaint = self._connection.receive_nowait(tag=REQUESTS).decode(errors="replace")
            self._complaint = f"the server hung up: {complaint}"
        lost = trio.BrokenResourceError(self._complaint or str(error))
        lost.__cause__ = error
        return lost

    async def _send_requests(self, requests: trio.MemoryReceiveChannel[bytes]) -> None:
        """One task sends them all, so that no cancellation comes before its call."""
        with suppress(trio.BrokenResourceError):  # the calls notice that, too
            async for request in requests:
                await self._connection.send(request, tag=REQUESTS)


@asynccontextmanager
async def open_client(address: str | tuple[str, int], **options: Any) -> AsyncIterator[Client]:
    """Connects to a server; the options are those of ``trio_ucx.connect``."""
    requests, to_send = trio.open_memory_channel[bytes](math.inf)  # holds two for each slot at most
    with to_send:
        async with trio_ucx.connect(address, **options) as connection, trio.open_nursery() as nursery:
            client = Client(connection, nursery, requests)
            nursery.start_soon(client._send_requests, to_send)
            with requests:
                yield client
            nursery.cancel_scope.cancel()


# ---- the demonstration ----


async def add(a: float, b: float) -> float:
    return a + b


async def sleep(seconds: float) -> str:
    await trio.sleep(seconds)
    return f"slept for {seconds} seconds"


async def noise(size: int) -> bytes:
    return os.urandom(size)


async def echo(data: Any) -> Any:
    return data


METHODS: dict[str, Method] = {"add": add, "sleep": sleep, "noise": noise, "echo": echo}


async def serve(address: tuple[str, int]) -> None:
    host, port = address
    async with trio.open_nursery() as nursery:
        serving = partial(trio_ucx.serve_ucx, partial(answer_calls, METHODS), port, host=host, authkey=AUTHKEY)
        for listener in await nursery.start(serving):  # a host name may have several addresses
            print(f"listening at {trio_ucx.format_address(listener.address)}", flush=True)


async def call(address: tuple[str, int], method: str, arguments: dict[str, Any]) -> None:
    async with open_client(address, authkey=AUTHKEY) as client:
        result = await client.call(method, **arguments)
    if isinstance(result, bytes):
        sys.stdout.buffer.write(result)
    else:
        print(json.dumps(result))


async def run(work: Callable[[], Awaitable[None]]) -> None:
    """Makes Ctrl-C a cancellation, which tasks see only where they wait."""

    async def heed_signals(task_status: trio.TaskStatus[None]) -> None:
        with trio.open_signal_receiver(signal.SIGINT, signal.SIGTERM) as signals:
            task_status.started()
            async for _ in signals:
                raise KeyboardInterrupt

    async with trio.open_nursery() as nursery:
        await nursery.start(heed_signals)
        await work()
        nursery.cancel_scope.cancel()


def explain(error: BaseException) -> str:
    """The one line that matters of an exception, or of a group of them."""
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    text = str(error) or type(error).__name__
    return "".join(character if character.isprintable() else "?" for character in text)


def parse_arguments(text: str) -> dict[str, Any]:
    return dict(**json.loads(text))


def main() -> int:
    parser = argparse.ArgumentParser(description="Calls methods in another process.")
    commands = parser.add_subparsers(required=True, dest="command")
    server = commands.add_parser("serve", help=f"answer calls of the methods {', '.join(METHODS)}")
    server.add_argument("--listen", type=trio_ucx.parse_address, default=("127.0.0.1", 0), metavar="HOST:PORT")
    client = commands.add_parser("call", help="call a method, and print its result")
    client.add_argument("address", type=trio_ucx.parse_address, metavar="HOST:PORT")
    client.add_argument("method")
    client.add_argument("arguments", type=parse_arguments, nargs="?", default={}, metavar="JSON-ARGS")
    options = parser.parse_args()
    if options.command == "serve":
        work = partial(serve, options.listen)
    else:
        work = partial(call, options.address, options.method, options.arguments)
    status = 0
    try:
        trio.run(run, work)
    except* KeyboardInterrupt:
        status = 130
    except* (RpcError, OSError, trio.BrokenResourceError, trio_ucx.UCXError) as group:
        print(f"rpc: {explain(group)}", file=sys.stderr)
        status = 1
    return status


if __name__ == "__main__":
    sys.exit(main())
