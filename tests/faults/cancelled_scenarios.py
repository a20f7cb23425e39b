"""The scenarios of the sweep of cancellations: one for each capability. See ``cancellation_points.py``."""

from __future__ import annotations

import functools
import tempfile
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any

import trio
from helpers import (
    assert_free,
    check_stream,
    echo,
    free_port,
    numbered_write,
    open_pair,
    open_raw_listener,
    open_raw_pair,
    pattern,
    until,
)
from peers import REMOTE

import trio_ucx
from trio_ucx import ucp

from .cancellation_points import Attempt, Begin, Scenario

SMALL, MEDIUM, LARGE = 8, 3_000, 1_000_000
#: A message that says that nothing more comes.
END = b"end"

SCENARIOS: dict[str, Scenario] = {}


def scenario(function: Callable[..., Any], *arguments: Any) -> Callable[..., Any]:
    """Registers a scenario: an asynchronous generator that yields what begins its attempts."""
    name = "-".join([function.__name__, *map(str, arguments)])
    open = asynccontextmanager(function)
    SCENARIOS[name] = lambda transports, spin: open(transports, spin, *arguments)
    return function


def for_each(*values: Any) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    def register(function: Callable[..., Any]) -> Callable[..., Any]:
        for value in values:
            scenario(function, value)
        return function

    return register


@asynccontextmanager
async def open_workers(
    transports: str, spin: float | None, features: ucp.Feature = REMOTE
) -> AsyncIterator[tuple[ucp.Worker, ucp.Worker]]:
    options: dict[str, Any] = {"config": {"TLS": transports}, "features": features | ucp.Feature.STREAM}
    if spin is not None:
        options["spin"] = spin
    async with ucp.open_worker(**options) as one, ucp.open_worker(**options) as other:
        yield one, other


@asynccontextmanager
async def open_connections(
    transports: str, spin: float | None, **options: Any
) -> AsyncIterator[tuple[trio_ucx.Connection, trio_ucx.Connection]]:
    async with open_workers(transports, spin) as workers, open_pair(*workers, **options) as pair:
        yield pair


async def released(*workers: ucp.Worker) -> None:
    """Waits until UCX has let go of everything that was cancelled."""
    await until(lambda: not any(worker.statistics().left_over_operations for worker in workers))


async def take_until_end(connection: trio_ucx.Connection, got: list[bytes]) -> None:
    while (message := await connection.receive()) != END:
        got.append(message)


def whole_or_not_at_all(got: list[bytes], sent: list[bytes], completed: bool) -> None:
    """Of messages that were sent one after the other, each but the last that arrived had been sent."""
    assert got == (sent if completed else sent[: len(got)])


# ---- opening and closing ----


@scenario
async def worker(transports: str, spin: float | None) -> AsyncIterator[Begin]:
    async with open_workers(transports, spin) as (_, other):

        async def operation() -> None:
            with ucp.open_context({"TLS": transports}, features=REMOTE) as context:
                async with ucp.open_worker(context=context) as worker:
                    async with await worker.open_endpoint(other.address) as endpoint:
                        await endpoint.tag_send(b"hello", 1)

        # A worker drains what is in flight before it is destroyed.
        yield lambda number: Attempt(operation, again=operation, limit=0.5)
        while other.tag_probe(1) is not None:
            await other.tag_receive(bytearray(5), 1)


@for_each("tcp", "unix", "authkey")
async def connect(transports: str, spin: float | None, how: str) -> AsyncIterator[Begin]:
    options = {"authkey": b"a key for this test"} if how == "authkey" else {}
    async with open_workers(transports, spin) as (one, other), AsyncExitStack() as stack:
        host = "127.0.0.1"
        if how == "unix":
            host = f"unix:{stack.enter_context(tempfile.TemporaryDirectory())}/socket"
        nursery = await stack.enter_async_context(trio.open_nursery())
        serve = functools.partial(trio_ucx.serve_ucx, echo, 0, host=host, worker=other, **options)
        [listener] = await nursery.start(serve)

        async def operation() -> None:
            async with trio_ucx.connect(listener.address, worker=one, **options) as connection:
                await connection.send(b"request")
                assert await connection.receive() == b"request"

        yield lambda number: Attempt(operation, again=operation)
        nursery.cancel_scope.cancel()


@scenario
async def serve(transports: str, spin: float | None) -> AsyncIterator[Begin]:
    port = free_port()
    async with open_workers(transports, spin) as (one, other):

        async def operation() -> None:
            start = functools.partial(trio_ucx.serve_ucx, echo, port, host="127.0.0.1", worker=other)
            try:
                async with trio.open_nursery() as nursery:
                    await nursery.start(start)
                    async with trio_ucx.connect(("127.0.0.1", port), worker=one) as connection:
                        await connection.send(b"request")
                        assert await connection.receive() == b"request"
                    nursery.cancel_scope.cancel()
            except* (
                trio_ucx.PeerLost,
                ConnectionError,
            ):  # the handler was cancelled first, and the client lost its peer
                await trio.lowlevel.checkpoint_if_cancelled()
                raise

        yield lambda number: Attempt(operation, again=operation)


@scenario
async def accept(transports: str, spin: float | None) -> AsyncIterator[Begin]:
    async with open_workers(transports, spin) as (one, other):
        [listener] = await trio_ucx.open_ucx_listeners(0, host="127.0.0.1", worker=other)

        def begin(number: int) -> Attempt:
            servers: list[trio_ucx.Connection] = []

            async def operation() -> None:
                servers.append(await listener.accept())

            async def beside() -> None:
                async with trio_ucx.connect(listener.address, worker=one) as client:
                    await client.send(b"%d" % number)
                    assert await client.receive() == b"answer"

            async def again() -> None:
                if not servers:
                    servers.append(await listener.accept())
                async with servers[0] as server:
                    assert await server.receive() == b"%d" % number
                    await server.send(b"answer")

            return Attempt(operation, beside, again)

        async with listener:
            yield begin


@scenario
async def graceful_close(transports: str, spin: float | None) -> AsyncIterator[Begin]:
    async with open_workers(transports, spin) as (one, other):
        [listener] = await trio_ucx.open_ucx_listeners(0, host="127.0.0.1", worker=other)

        def begin(number: int) -> Attempt:
            sent = [pattern(SMALL, number), pattern(MEDIUM, number)]
            got: list[bytes] = []
            accepted = trio.Event()

            async def beside() -> None:
                async with await listener.accept() as server:
                    accepted.set()
                    got.extend([message async for message in server.messages()])

            async def operation() -> None:
                with trio.CancelScope(shield=True):
                    connection = await trio_ucx.connect(listener.address, worker=one).__aenter__()
                    await accepted.wait()
                for message in sent:
                    connection.send_nowait(message)
                await connection.aclose()

            async def again() -> None:
                await until(lambda: not one.statistics().background_closes)

            return Attempt(operation, beside, again, lambda completed: check(sent, got), limit=0.5)

        def check(sent: list[bytes], got: list[bytes]) -> None:
            assert got == sent, "what was sent before a close was lost"

        async with listener:
            yield begin


@scenario
async def raw_connections(transports: str, spin: float | None) -> AsyncIterator[Begin]:
    async with open_workers(transports, spin) as (one, other):
        async with await open_raw_listener(other, one) as listener, trio.open_nursery() as nursery:

            async def serve_raw() -> None:
                async for request in listener:
                    try:
                        nursery.start_soon(answer, await request.accept())
                    except ConnectionError:  # the client has gone
                        pass

            async def answer(endpoint: ucp.Endpoint) -> None:
                try:
                    await endpoint.tag_send(b"hello", 1)
                    await until(lambda: not endpoint.alive)
                except trio.BrokenResourceError:
                    pass
                finally:
                    endpoint.abort()

            async def operation() -> None:
                async with await one.open_endpoint(listener.address) as endpoint:
                    await endpoint.flush()

            async def again() -> None:
                await operation()
                while one.tag_probe(1) is not None:
                    assert await one.tag_receive(bytearray(5), 1) == (5, 1)

            nursery.start_soon(serve_raw)
            yield lambda number: Attempt(operation, again=again)
            nursery.cancel_scope.cancel()


@scenario
async def raw_listener(transports: str, spin: float | None) -> AsyncIterator[Begin]:
    async with open_workers(transports, spin) as (one, other):

        def begin(number: int) -> Attempt:
            opened = trio.Event()
            found: list[Any] = []

            async def beside() -> None:
                await opened.wait()
                endpoint = await one.open_endpoint(found[0].address)
                await endpoint.tag_send(b"%d" % number, number)
                await until(lambda: len(found) == 3 and not found[2].alive)
                endpoint.abort()

            async def operation() -> None:
                with trio.CancelScope(shield=True):
                    found.append(await open_raw_listener(other, one))
                    opened.set()
                found.append(await found[0].accept_request())
                found.append(await found[1].accept())

            async def again() -> None:
                if len(found) == 1:
                    found.append(await found[0].accept_request())
                if len(found) == 2:
                    found.append(await found[1].accept())
                buffer = bytearray(10)
                length, _ = await other.tag_receive(buffer, number)
                assert buffer[:length] == b"%d" % number
                found[2].abort()
                await found[0].aclose()

            return Attempt(operation, beside, again)

        yield begin


# ---- messages ----


@for_each(SMALL, MEDIUM, LARGE)
async def send(transports: str, spin: float | None, size: int) -> AsyncIterator[Begin]:
    async with open_connections(transports, spin) as (client, server):

        def begin(number: int) -> Attempt:
            data, got = bytearray(pattern(size, number)), list[bytes]()

            async def again() -> None:
                await client.send(END)
                await client.wait_buffers_released()

            def verify(completed: bool) -> None:
                whole_or_not_at_all(got, [bytes(data)], completed)
                assert_free(data)

            return Attempt(lambda: client.send(data), lambda: take_until_end(server, got), again, verify)

        yield begin


@scenario
async def send_without_credit(transports: str, spin: float | None) -> AsyncIterator[Begin]:
    async with open_connections(transports, spin, window=4096) as (client, server):

        def begin(number: int) -> Attempt:
            sent, got = [pattern(1000, 100 * number + each) for each in range(8)], list[bytes]()

            async def operation() -> None:
                for message in sent:
                    await client.send(message)

            return Attempt(
                operation,
                lambda: take_until_end(server, got),
                lambda: client.send(END),
                lambda completed: whole_or_not_at_all(got, sent, completed),
            )

        yield begin


@scenario
async def nowait_sends(transports: str, spin: float | None) -> AsyncIterator[Begin]:
    async with open_connections(transports, spin) as (client, server):

        def begin(number: int) -> Attempt:
            sent, got = list[bytes](), list[bytes]()

            async def operation() -> None:
                for each in range(4):
                    for part in range(3):
                        message = b"%d %d %d" % (number, each, part)
                        client.send_nowait(message)
                        sent.append(message)
                    await trio.lowlevel.checkpoint()

            return Attempt(
                operation,
                lambda: take_until_end(server, got),
                lambda: client.send(END),
                lambda completed: whole_or_not_at_all(got, sent, True),
            )

        yield begin


async def by_receive(server: trio_ucx.Connection, buffer: bytearray) -> bytes:
    return await server.receive()


async def by_receive_into(server: trio_ucx.Connection, buffer: bytearray) -> bytes:
    length = await server.receive_into(buffer)
    return bytes(buffer[:length])


async def by_scatter(server: trio_ucx.Connection, buffer: bytearray) -> bytes:
    view = memoryview(buffer)
    length = await server.receive_into([view[:3], view[3:]])
    return bytes(view[:length])


async def by_iteration(server: trio_ucx.Connection, buffer: bytearray) -> bytes:
    return await server.messages().__anext__()


async def by_waiting(server: trio_ucx.Connection, buffer: bytearray) -> bytes:
    length = await server.wait_message()
    message = await server.receive()
    assert len(message) == length
    return message


RECEIVES = {
    function.__name__: function for function in (by_receive, by_receive_into, by_scatter, by_iteration, by_waiting)
}


@for_each(*[(name, size) for name in RECEIVES for size in (SMALL, MEDIUM, LARGE)])
async def receive(transports: str, spin: float | None, case: tuple[str, int]) -> AsyncIterator[Begin]:
    """The next receive gets the message of a cancelled one."""
    name, size = case
    take = RECEIVES[name]
    async with open_connections(transports, spin) as (client, server):

        def begin(number: int) -> Attempt:
            data, got, buffer = pattern(size, number), list[bytes](), bytearray(size + 1)

            async def operation() -> None:
                got.append(await take(server, buffer))

            async def again() -> None:
                if not got:
                    got.append(await server.receive())
                await server.wait_buffers_released()

            def verify(completed: bool) -> None:
                assert got == [data]
                assert_free(buffer)

            return Attempt(operation, lambda: client.send(data), again, verify)

        yield begin


# ---- the byte stream ----

RECORDS = 60_000


@asynccontextmanager
async def fresh_pair(
    one: ucp.Worker, listener: trio_ucx.Listener
) -> AsyncIterator[tuple[trio_ucx.Connection, trio_ucx.Connection]]:
    client = await trio_ucx.connect(listener.address, worker=one).__aenter__()
    try:
        yield client, await listener.accept()
    finally:
        client.abort()


@for_each(100, RECORDS)
async def send_all(transports: str, spin: float | None, records: int) -> AsyncIterator[Begin]:
    async with open_connections(transports, spin) as (client, server):
        writes: list[tuple[int, bool]] = []
        got = bytearray()

        def begin(number: int) -> Attempt:
            """Each attempt is two writes, of which the second one is not cancelled."""
            data, rest = bytearray(numbered_write(len(writes), records)), numbered_write(len(writes) + 1, 100)
            end = rest[-8:]

            async def beside() -> None:
                while not got.endswith(end):
                    got.extend(await server.receive_some())

            async def again() -> None:
                await client.send_all(rest)
                await client.wait_buffers_released()

            def verify(completed: bool) -> None:
                writes.extend([(len(data), completed), (len(rest), True)])
                check_stream(writes, got, everything=True)
                assert_free(data)

            return Attempt(lambda: client.send_all(data), beside, again, verify)

        yield begin


@for_each(1000, None)
async def receive_some(transports: str, spin: float | None, most: int | None) -> AsyncIterator[Begin]:
    async with open_connections(transports, spin) as (client, server):

        def begin(number: int) -> Attempt:
            data, got = pattern(5_000 if most else 400_000, number), bytearray()

            async def operation() -> None:
                while len(got) < len(data):
                    got.extend(await server.receive_some(most))

            def verify(completed: bool) -> None:
                assert got == data

            return Attempt(operation, lambda: client.send_all(data), operation, verify)

        yield begin


@scenario
async def end_of_stream(transports: str, spin: float | None) -> AsyncIterator[Begin]:
    async with open_workers(transports, spin) as (one, other):
        [listener] = await trio_ucx.open_ucx_listeners(0, host="127.0.0.1", worker=other)

        def begin(number: int) -> Attempt:
            got, connected = bytearray(), trio.Event()
            client: list[trio_ucx.Connection] = []

            async def beside() -> None:
                async with await listener.accept() as server:
                    async for chunk in server:
                        got.extend(chunk)
                    await server.send_all(b"answer")

            async def operation() -> None:
                with trio.CancelScope(shield=True):
                    client.append(await trio_ucx.connect(listener.address, worker=one).__aenter__())
                    await client[0].send_all(b"request")
                    connected.set()
                await client[0].wait_send_all_might_not_block()
                await client[0].send_eof()

            async def again() -> None:
                async with client[0]:
                    await client[0].send_eof()
                    assert [chunk async for chunk in client[0]] == [b"answer"]

            def verify(completed: bool) -> None:
                assert got == b"request"

            return Attempt(operation, beside, again, verify, limit=0.5)

        async with listener:
            yield begin


# ---- request groups ----


@scenario
async def request_group(transports: str, spin: float | None) -> AsyncIterator[Begin]:
    async with open_connections(transports, spin) as (client, server):

        def begin(number: int) -> Attempt:
            sent = [pattern(size, number) for size in (SMALL, MEDIUM, LARGE)]
            got: list[bytes] = []
            buffers = [bytearray(len(data)) for data in sent]

            async def operation() -> None:
                async with server.worker.open_request_group() as receives, client.worker.open_request_group() as sends:
                    requests = [receives.receive_into(server, buffer) for buffer in buffers]
                    for data in sent:
                        sends.send(client, data)
                    for data, request in zip(sent, requests, strict=True):
                        assert await request == len(data)
                        got.append(data)

            async def again() -> None:
                async with trio.open_nursery() as nursery:
                    nursery.start_soon(client.send, END)
                    await take_until_end(server, got)
                await server.wait_buffers_released()
                await client.wait_buffers_released()

            def verify(completed: bool) -> None:
                # A receive of the group may have got its message, and the group been cancelled before it said so.
                for data, buffer in zip(sent, buffers, strict=True):
                    assert got.count(data) <= 1
                    assert not completed or buffer == data
                assert [data for data in sent if data in got] == got
                assert_free(*buffers)

            return Attempt(operation, again=again, verify=verify)

        yield begin


@for_each(SMALL, LARGE)
async def cancelled_request(transports: str, spin: float | None, size: int) -> AsyncIterator[Begin]:
    """A request is cancelled, not the task that awaits it."""
    async with open_connections(transports, spin) as (client, server):

        def begin(number: int) -> Attempt:
            data, got, buffer = pattern(size, number), list[bytes](), bytearray(size)
            requests: list[ucp.Request] = []

            async def operation() -> None:
                async with server.worker.open_request_group() as group:
                    requests.append(group.receive_into(server, buffer))
                    try:
                        await requests[0]
                        got.append(bytes(buffer))
                    except ucp.RequestCancelled:
                        pass

            async def again() -> None:
                if not got:
                    got.append(await server.receive())
                await server.wait_buffers_released()

            def verify(completed: bool) -> None:
                assert completed
                assert got == [data]
                assert_free(buffer)

            def cancel() -> None:
                for request in requests:
                    request.cancel()

            return Attempt(operation, lambda: client.send(data), again, verify, cancel)

        yield begin


# ---- trio_ucx.ucp: tag messages, streams, active messages ----


@asynccontextmanager
async def open_endpoints(
    transports: str, spin: float | None
) -> AsyncIterator[tuple[ucp.Worker, ucp.Worker, ucp.Endpoint, ucp.Endpoint]]:
    """Two workers, and an endpoint from each to the other."""
    async with open_workers(transports, spin) as (one, other), AsyncExitStack() as stack:
        if "tcp" in transports:
            pair = await stack.enter_async_context(open_raw_pair(one, other))
        else:
            pair = await one.open_endpoint(other.address), await other.open_endpoint(one.address)
            for endpoint in pair:
                stack.callback(endpoint.abort)
        await pair[0].flush()
        yield one, other, *pair


async def take_tags_until_end(worker: ucp.Worker, got: list[bytes]) -> None:
    """Receives messages with the tag 1 until END comes."""
    buffer = bytearray(LARGE)
    while True:
        length, _ = await worker.tag_receive(buffer, 1)
        if buffer[:length] == END:
            return
        got.append(bytes(buffer[:length]))


@for_each(*[(name, size) for name in ("tag_send", "tag_send_sync") for size in (SMALL, MEDIUM, LARGE)])
async def raw_send(transports: str, spin: float | None, case: tuple[str, int]) -> AsyncIterator[Begin]:
    name, size = case
    async with open_endpoints(transports, spin) as (one, other, client, _):

        def begin(number: int) -> Attempt:
            data, got = bytearray(pattern(size, number)), list[bytes]()

            async def again() -> None:
                await client.tag_send(END, 1)
                await client.flush()

            def verify(completed: bool) -> None:
                whole_or_not_at_all(got, [bytes(data)], completed)

            async def operation() -> None:
                await getattr(client, name)(data, 1)
                await client.flush()

            return Attempt(operation, lambda: take_tags_until_end(other, got), again, verify)

        yield begin
        await released(one, other)


@for_each(*[(name, size) for name in ("tag_receive", "tag_receive_message") for size in (SMALL, MEDIUM, LARGE)])
async def raw_receive(transports: str, spin: float | None, case: tuple[str, int]) -> AsyncIterator[Begin]:
    """Only a receive that has matched loses its message."""
    name, size = case
    async with open_endpoints(transports, spin) as (_, other, client, _):

        def begin(number: int) -> Attempt:
            data, got, buffer = pattern(size, number), list[bytes](), bytearray(size)

            async def operation() -> None:
                if name == "tag_receive":
                    await other.tag_receive(buffer, 1)
                else:
                    while (message := other.tag_probe(1, remove=True)) is None:
                        await trio.sleep(0)
                    await other.tag_receive_message(message, buffer)
                got.append(bytes(buffer))

            async def again() -> None:
                async with trio.open_nursery() as nursery:
                    nursery.start_soon(client.tag_send, END, 1)
                    await take_tags_until_end(other, got)
                await released(other)

            def verify(completed: bool) -> None:
                if size != LARGE and name == "tag_receive":
                    assert got == [data]
                else:
                    whole_or_not_at_all(got, [data], completed)
                assert_free(buffer)

            return Attempt(operation, lambda: client.tag_send(data, 1), again, verify)

        yield begin


@for_each(SMALL, MEDIUM, LARGE)
async def raw_stream(transports: str, spin: float | None, size: int) -> AsyncIterator[Begin]:
    """A cancelled receive loses no byte."""
    async with open_endpoints(transports, spin) as (_, _, client, server):

        def begin(number: int) -> Attempt:
            data, buffer, got = pattern(size, number), bytearray(size), bytearray()

            async def operation() -> None:
                with await server.stream_receive_some() as first:
                    got.extend(first.data)
                if len(got) < size:
                    await server.stream_receive(memoryview(buffer)[: size - len(got)], exact=True)
                    got.extend(buffer[: size - len(got)])

            async def again() -> None:
                if len(got) < size:
                    rest = bytearray(size - len(got))
                    assert await server.stream_receive(rest, exact=True) == len(rest)
                    got.extend(rest)

            def verify(completed: bool) -> None:
                assert got == data
                assert_free(buffer)

            return Attempt(operation, lambda: client.stream_send(data), again, verify)

        yield begin


@for_each(SMALL, LARGE)
async def raw_stream_send(transports: str, spin: float | None, size: int) -> AsyncIterator[Begin]:
    async with open_endpoints(transports, spin) as (one, _, client, server):
        writes: list[tuple[int, bool]] = []
        got = bytearray()

        def begin(number: int) -> Attempt:
            data = bytearray(numbered_write(len(writes), size // 8))
            rest = numbered_write(len(writes) + 1, 1)

            async def beside() -> None:
                while not got.endswith(rest):
                    with await server.stream_receive_some() as some:
                        got.extend(some.data)

            async def again() -> None:
                await client.stream_send(rest)
                await released(one)

            def verify(completed: bool) -> None:
                writes.extend([(len(data), completed), (len(rest), True)])
                check_stream(writes, got, everything=True)
                assert_free(data)

            return Attempt(lambda: client.stream_send(data), beside, again, verify)

        yield begin


@for_each(SMALL, MEDIUM, LARGE)
async def active_messages(transports: str, spin: float | None, size: int) -> AsyncIterator[Begin]:
    async with open_endpoints(transports, spin) as (_, other, client, _):
        with other.open_active_messages(7, max_bytes=2**22) as queue:

            def begin(number: int) -> Attempt:
                data, got = pattern(size, number), list[bytes]()
                messages: list[ucp.ActiveMessage] = []

                async def operation() -> None:
                    messages.append(await queue.receive())
                    with trio.CancelScope() as scope:
                        got.append(await messages[0].receive())
                    assert not scope.cancelled_caught

                async def again() -> None:
                    if not messages:
                        messages.append(await queue.receive())
                    if not got:
                        got.append(await messages[0].receive())
                    messages[0].release()

                def verify(completed: bool) -> None:
                    assert messages[0].header == b"%d" % number
                    assert got == [data]

                return Attempt(operation, lambda: client.am_send(7, data, b"%d" % number), again, verify)

            yield begin


@for_each(SMALL, LARGE)
async def active_message_send(transports: str, spin: float | None, size: int) -> AsyncIterator[Begin]:
    async with open_endpoints(transports, spin) as (one, other, client, _):
        with other.open_active_messages(7, max_bytes=2**22) as queue:

            def begin(number: int) -> Attempt:
                data, got = bytearray(pattern(size, number)), list[bytes]()

                async def beside() -> None:
                    async for message in queue:
                        with message:
                            if message.header == END:
                                return
                            assert message.header == b"%d" % number
                            got.append(await message.receive())

                async def again() -> None:
                    await client.am_send(7, b"", END)
                    await released(one, other)

                def verify(completed: bool) -> None:
                    assert got == [data] or (not completed and not got)
                    assert_free(data)

                return Attempt(lambda: client.am_send(7, data, b"%d" % number), beside, again, verify)

            yield begin


@scenario
async def endpoint_close(transports: str, spin: float | None) -> AsyncIterator[Begin]:
    """What was sent before a graceful close arrives, cancelled or not."""
    async with open_workers(transports, spin) as (one, other):

        def begin(number: int) -> Attempt:
            data, buffer = pattern(MEDIUM, number), bytearray(MEDIUM)

            async def operation() -> None:
                with trio.CancelScope(shield=True):
                    endpoint = await one.open_endpoint(other.address)
                    await endpoint.tag_send(data, 1)
                await endpoint.aclose()

            async def again() -> None:
                assert await other.tag_receive(buffer, 1) == (MEDIUM, 1)
                await until(lambda: not one.statistics().background_closes)

            def verify(completed: bool) -> None:
                assert buffer == data

            return Attempt(operation, again=again, verify=verify, limit=0.5)

        yield begin


# ---- remote memory ----


@asynccontextmanager
async def open_memory(
    transports: str, spin: float | None
) -> AsyncIterator[tuple[ucp.Worker, ucp.Worker, ucp.Memory, ucp.RemoteMemory]]:
    async with open_workers(transports, spin) as (one, other):
        endpoint = await one.open_endpoint(other.address)
        try:
            with other.context.allocate(LARGE + 64) as memory, endpoint.attach(memory.descriptor) as remote:
                await remote.flush()
                yield one, other, memory, remote
                await released(one, other)
        finally:
            endpoint.abort()


@for_each(SMALL, MEDIUM, LARGE)
async def put_and_get(transports: str, spin: float | None, size: int) -> AsyncIterator[Begin]:
    async with open_memory(transports, spin) as (one, other, memory, remote):
        last = bytes(memory.memoryview[:size])

        def begin(number: int) -> Attempt:
            data, fresh, target = bytearray(pattern(size, 2 * number)), pattern(size, 2 * number + 1), bytearray(size)

            async def operation() -> None:
                await remote.put(data)
                await remote.flush()
                assert await remote.get_into(target) == size
                assert await remote.get(0, size) == target

            async def again() -> None:
                """A put that was cancelled does not overwrite one that follows it."""
                nonlocal last
                await remote.flush()
                await released(one, other)
                assert bytes(memory.memoryview[:size]) in (bytes(data), last)
                await remote.put(fresh)
                await remote.flush()
                assert await remote.get(0, size) == fresh
                last = fresh

            def verify(completed: bool) -> None:
                assert not completed or target == data
                assert_free(data, target)

            return Attempt(operation, again=again, verify=verify)

        yield begin


@scenario
async def atomics(transports: str, spin: float | None) -> AsyncIterator[Begin]:
    async with open_memory(transports, spin) as (_, _, _, remote):
        least = most = 0

        def begin(number: int) -> Attempt:
            async def operation() -> None:
                nonlocal least, most
                for fetch in (True, False, True):
                    most += 1
                    await remote.atomic(ucp.AtomicOp.ADD, 1, fetch=fetch)
                    least += 1

            async def again() -> None:
                nonlocal least, most
                await remote.flush()
                value = await remote.fetch_add(0)
                assert least <= value <= most
                least = most = value

            return Attempt(operation, again=again)

        yield begin


@scenario
async def chains(transports: str, spin: float | None) -> AsyncIterator[Begin]:
    async with open_memory(transports, spin) as (one, _, memory, remote):
        counter = 4096
        chain = one.new_chain(capacity=16)
        head = chain.get(remote, 0, 64)
        chain.put(remote, b"data", offset=64, when=head.u32(0) == 0)
        slot = chain.fetch_add(remote, 1, counter)
        chain.put(remote, b"row of 8", offset=slot.u64() * 8 + 8192)

        def begin(number: int) -> Attempt:
            async def operation() -> None:
                outcomes = await chain.run()
                assert len(outcomes) == 4

            async def again() -> None:
                await chain.wait_idle()
                await remote.flush()
                before = int.from_bytes(memory.memoryview[counter : counter + 8], "little")
                await operation()
                await remote.flush()
                assert int.from_bytes(memory.memoryview[counter : counter + 8], "little") == before + 1

            return Attempt(operation, again=again)

        yield begin
        chain.close()


# ---- waiting ----

Wait = Callable[[trio_ucx.Connection], Awaitable[object]]
WAITS: dict[str, Wait] = {
    "receive": lambda connection: connection.receive(tag=5),
    "wait_message": lambda connection: connection.wait_message(tag=5),
    "receive_some": lambda connection: connection.receive_some(),
    "wait_closed": lambda connection: connection.wait_closed(),
    "wait_buffers_released": lambda connection: connection.wait_buffers_released(),
    "wait_send_all_might_not_block": lambda connection: connection.wait_send_all_might_not_block(),
    "flush": lambda connection: connection.worker.flush(),
    "wait_stream_ready": lambda connection: connection.worker.wait_stream_ready(),
}


@for_each(*WAITS)
async def wait(transports: str, spin: float | None, name: str) -> AsyncIterator[Begin]:
    """For something that does not happen."""
    async with open_connections(transports, spin) as (client, server):

        def begin(number: int) -> Attempt:
            async def operation() -> None:
                with trio.move_on_after(0.02):
                    await WAITS[name](server)

            async def again() -> None:
                async with trio.open_nursery() as nursery:
                    nursery.start_soon(functools.partial(client.send, b"message", tag=5))
                    assert await server.receive(tag=5) == b"message"

            return Attempt(operation, again=again)

        yield begin
