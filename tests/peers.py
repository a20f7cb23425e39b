"""The roles of the tests' other processes: ``python tests/peers.py ROLE ARGUMENTS``. See ``helpers.open_peer``."""

from __future__ import annotations

import contextlib
import ctypes
import hashlib
import json
import logging
import os
import random
import resource
import signal
import sys
import tempfile
import time
import warnings
from collections.abc import Awaitable, Callable
from functools import partial
from typing import Any

import helpers
import trio
from helpers import live_handles, open_listener, open_raw_endpoint, open_raw_listener, open_to_peer, pattern, resident
from shared_queue import take_an_element
from tcp_sockets import is_full, tcp_sockets
from timing import Noise, waited_by

import trio_ucx
from trio_ucx import ucp
from trio_ucx._handshake import handshake as handshake_side
from trio_ucx.testing import internals
from trio_ucx.ucp import chains

#: What remote memory and atomics need.
REMOTE = ucp.DEFAULT_FEATURES | ucp.Feature.RMA | ucp.Feature.AMO32 | ucp.Feature.AMO64

ROLES: dict[str, Callable[..., Any]] = {}


def role(function: Callable[..., Any]) -> Callable[..., Any]:
    ROLES[function.__name__] = function
    return function


def say(thing: Any) -> None:
    os.write(1, json.dumps(thing).encode() + b"\n")


_stdin = b""


async def ask() -> Any:
    """The test's next line; EOFError when the test has ended."""
    global _stdin
    while b"\n" not in _stdin:
        await trio.lowlevel.wait_readable(0)
        chunk = os.read(0, 65536)
        if not chunk:
            raise EOFError
        _stdin += chunk
    line, _stdin = _stdin.split(b"\n", 1)
    return json.loads(line)


async def until_told() -> None:
    try:
        await ask()
    except EOFError:
        pass


async def serve(handler: Callable[[trio_ucx.Connection], Any], *, tell_missed: bool = False, **options: Any) -> None:
    """Serves until the test says so. First reports its addresses: host and port, and a Unix socket."""
    with tempfile.TemporaryDirectory() as folder:
        async with trio.open_nursery() as nursery:

            async def listen(host: str) -> trio_ucx.Listener:
                serving = partial(trio_ucx.serve_ucx, handler, 0, **{**options, "host": host})
                [listener] = await nursery.start(serving)
                return listener

            listener = await listen(options.get("host", "127.0.0.1"))
            say([listener.address, (await listen(f"unix:{folder}/socket")).address[0]])
            await until_told()
            if tell_missed:
                say(listener.worker.statistics().missed_events)
            nursery.cancel_scope.cancel()


@role
async def echo(tags: list[int], tell_missed: bool = False, isolate: bool = False) -> None:
    """Sends every message back with the same tag, and the byte stream, too.

    With ``tell_missed`` it finally reports how many events its workers have missed.
    """

    async def handler(connection: trio_ucx.Connection) -> None:
        async def echo_tag(tag: int) -> None:
            async for message in connection.messages(tag):
                await connection.send(message, tag=tag)

        async def stream() -> None:
            async for chunk in connection:
                await connection.send_all(chunk)

        try:
            async with trio.open_nursery() as nursery:
                for tag in tags:
                    nursery.start_soon(echo_tag, tag)
                nursery.start_soon(stream)
        except* trio.BrokenResourceError:
            pass

    await serve(handler, tell_missed=tell_missed, isolate=isolate)


@role
async def limited(megabytes: int) -> None:
    """Echoes tag 7 with a limited address space, and reports errors."""
    resource.setrlimit(resource.RLIMIT_AS, (megabytes << 20, megabytes << 20))

    async def handler(connection: trio_ucx.Connection) -> None:
        while True:
            try:
                await connection.send(await connection.receive(tag=7), tag=7)
            except trio.EndOfChannel:
                return
            except MemoryError as error:
                say({"error": type(error).__name__, "text": str(error)})

    await serve(handler)


@role
async def drained(port: int, timeout: float) -> None:
    """Sends every message back. SIGTERM drains it, and then it ends."""

    async with trio.open_nursery() as nursery:
        serve = partial(trio_ucx.serve_ucx, helpers.echo, port, host="127.0.0.1", drain_on_signal=timeout)
        await nursery.start(serve)
        say("ready")


@role
async def silent(window: int = 2**20, host: str = "127.0.0.1") -> None:
    """Accepts connections, and receives nothing."""

    async def handler(connection: trio_ucx.Connection) -> None:
        await trio.sleep_forever()

    await serve(handler, window=window, host=host, allow_anyone=True)


@role
async def waiting(host: str, keepalive: float) -> None:
    """A client that receives until the connection ends. Reports how, and how many seconds after the test's line."""
    async with ucp.open_worker() as worker:
        port = await ask()
        connection = await trio_ucx.open_ucx_stream(host, port, worker=worker, keepalive_interval=keepalive)
        say("connected")
        await ask()
        start = trio.current_time()
        with trio.move_on_after(15):
            try:
                await connection.receive()
            except trio.BrokenResourceError as error:
                say([type(error).__name__, trio.current_time() - start])
        connection.abort()


@role
async def source(plan: list[list[int]], rounds: int = 1) -> None:
    """Sends messages, each ``[tag, size, seed]``, then closes gracefully."""

    async def handler(connection: trio_ucx.Connection) -> None:
        for _ in range(rounds):
            for tag, size, seed in plan:
                await connection.send(pattern(size, seed), tag=tag)

    await serve(handler)


@role
async def sink(plan: list[list[int]]) -> None:
    """Checks that the messages ``[tag, size, seed]`` arrive and nothing else does; reports that."""

    async def handler(connection: trio_ucx.Connection) -> None:
        try:
            for tag, size, seed in plan:
                if await connection.receive(tag=tag) != pattern(size, seed):
                    say(f"wrong data with tag {tag}, size {size}")
                    return
            try:
                await connection.receive()
            except trio.EndOfChannel:
                say("complete")
        except trio.BrokenResourceError as error:
            say(f"broken: {error}")

    await serve(handler)


@role
async def numbered(count: int, size: int) -> None:
    """Sends ``count`` messages, the i-th of ``pattern(size, i)``, with tag 1."""

    async def handler(connection: trio_ucx.Connection) -> None:
        for number in range(count):
            await connection.send(pattern(size, number), tag=1)

    await serve(handler)


@role
async def sender_then_wait(plan: list[list[int]]) -> None:
    """Sends messages, reports that, and keeps the connection open."""

    async def handler(connection: trio_ucx.Connection) -> None:
        for tag, size, seed in plan:
            await connection.send(pattern(size, seed), tag=tag)
        say("sent")
        await trio.sleep_forever()

    await serve(handler)


@role
async def raw_listener() -> None:
    """A raw UCP listener: accepts endpoints, and does nothing with them but progress."""
    features = ucp.DEFAULT_FEATURES | ucp.Feature.STREAM
    async with ucp.open_worker(features=features) as worker, await open_raw_listener(worker) as listener:
        say([listener.address, bytes(worker.address).hex()])
        endpoints = []

        async def accept() -> None:
            async for request in listener:
                endpoints.append(await request.accept())
                say("accepted")

        async with trio.open_nursery() as nursery:
            nursery.start_soon(accept)
            await until_told()
            nursery.cancel_scope.cancel()
        for endpoint in endpoints:
            endpoint.abort()


@role
async def am_sender(plan: list[list[int]]) -> None:
    """Asked by an active message with id 1, sends active messages ``pattern(size, seed)`` with id 3, all at once.

    To where the question came from, or to the worker address that is in it.
    """
    async with ucp.open_worker() as worker, await open_raw_listener(worker) as listener:
        with worker.open_active_messages(1, max_bytes=2**30) as queue:
            say([listener.address, bytes(worker.address).hex()])
            endpoints: list[ucp.Endpoint] = []

            async def accept() -> None:
                async for request in listener:
                    endpoints.append(await request.accept())

            async def answer() -> None:
                with await queue.receive() as question:
                    endpoint = question.reply_endpoint
                    address = await question.receive()
                if endpoint is None:
                    endpoint = await worker.open_endpoint(ucp.WorkerAddress(address))
                    endpoints.append(endpoint)
                async with trio.open_nursery() as sends:
                    for size, seed in plan:
                        sends.start_soon(endpoint.am_send, 3, pattern(size, seed))
                        await trio.lowlevel.checkpoint()
                say("sent")
                async for message in queue:
                    message.release()

            async with trio.open_nursery() as nursery:
                nursery.start_soon(accept)
                nursery.start_soon(answer)
                await until_told()
                nursery.cancel_scope.cancel()
        for endpoint in endpoints:
            endpoint.abort()


@role
async def stream_echo() -> None:
    """Sends the data of the first endpoint's UCP stream back."""
    features = ucp.DEFAULT_FEATURES | ucp.Feature.STREAM
    async with ucp.open_worker(features=features) as worker, await open_raw_listener(worker) as listener:
        say([listener.address, bytes(worker.address).hex()])

        async def echo_stream() -> None:
            endpoint = await (await listener.accept_request()).accept()
            try:
                while True:
                    with await endpoint.stream_receive_some() as data:
                        await endpoint.stream_send(data.data)
            except trio.BrokenResourceError:
                pass
            finally:
                endpoint.abort()

        async with trio.open_nursery() as nursery:
            nursery.start_soon(echo_stream)
            await until_told()
            nursery.cancel_scope.cancel()


@role
async def owner(nbytes: int, kind: str = "allocated") -> None:
    """Owns memory, all zero, that any peer may use. Reports its addresses, then answers questions until the test ends
    it.

    The questions: ``["digest"]``, ``["word", offset]``, ``["poll", flag, start, stop]`` (polls until there is a byte
    other than 0 at ``flag``, then the digest of what is from ``start`` to ``stop``), ``["close"]`` (closes the memory,
    and makes another one, of ones, of ``nbytes`` or as many as the question has), ``["intact"]`` (whether that one is).
    """
    tls = os.environ["UCX_TLS"]
    with ucp.open_context(features=REMOTE) as context:
        async with ucp.open_worker(context=context) as worker, trio.open_nursery() as nursery:
            memory = context.allocate(nbytes) if kind == "allocated" else context.register(bytearray(nbytes))
            view = memory.memoryview
            if kind == "allocated":
                view[:] = bytes(nbytes)
            said: dict[str, Any] = {"worker": bytes(worker.address).hex(), "descriptor": memory.descriptor.hex()}
            endpoints: list[Any] = []

            async def accept(listener: ucp.RawListener) -> None:
                async for request in listener:
                    endpoints.append(await request.accept())

            async def keep(connection: trio_ucx.Connection) -> None:
                endpoints.append(connection)
                await trio.sleep_forever()

            if "tcp" in tls:
                raw = await open_raw_listener(worker)
                nursery.start_soon(accept, raw)
                [listener] = await trio_ucx.open_ucx_listeners(0, host="127.0.0.1", worker=worker)
                nursery.start_soon(trio.serve_listeners, keep, [listener])
                said |= {"raw": raw.address, "connection": listener.address}
            say(said)
            while True:
                try:
                    question, *arguments = await ask()
                except EOFError:
                    break
                if question == "digest":
                    say(hashlib.sha256(view).hexdigest())
                elif question == "word":
                    say(int.from_bytes(view[arguments[0] : arguments[0] + 8], sys.byteorder))
                elif question == "close":
                    [nbytes] = arguments or [nbytes]
                    del view
                    memory.close()
                    memory = context.allocate(nbytes) if kind == "allocated" else context.register(bytearray(nbytes))
                    view = memory.memoryview
                    view[:] = b"\x01" * nbytes
                    say("closed")
                elif question == "intact":
                    say(view == b"\x01" * nbytes)
                elif question == "poll":
                    flag, start, stop = arguments
                    while not view[flag]:
                        await trio.lowlevel.checkpoint()
                    say(hashlib.sha256(view[start:stop]).hexdigest())
            nursery.cancel_scope.cancel()
        del view
        memory.close()


@role
async def two_contexts(features: list[int]) -> None:
    """Owns memory of a context with all features, and has a worker of another context for each of ``features``.

    First it reports the workers' addresses, the addresses of their listeners for Connections, and the memory's
    descriptors. The first line from the test is the address of the test's worker: each worker with STREAM opens an
    endpoint to it, and echoes that endpoint's UCP stream. It reports the kind and length of each message that a worker
    receives, until the test ends.
    """
    async with contextlib.AsyncExitStack() as stack, trio.open_nursery() as nursery:
        owner = await stack.enter_async_context(ucp.open_worker(features=ucp.Feature.ALL))
        allocated = stack.enter_context(owner.context.allocate(2**20))
        registered = stack.enter_context(owner.context.register(bytearray(2**20)))
        workers = [await stack.enter_async_context(ucp.open_worker(features=ucp.Feature(each))) for each in features]
        listeners: list[Any] = []
        for worker in workers:
            if ucp.Feature.TAG in worker.context.features:
                serve = partial(trio_ucx.serve_ucx, _echo_on_its_endpoint, 0, host="127.0.0.1", worker=worker)
                [listener] = await nursery.start(serve)
                listeners.append(listener.address)
                nursery.start_soon(_report_tag_messages, worker)
            else:
                listeners.append(None)
            if ucp.Feature.AM in worker.context.features:
                nursery.start_soon(_report_active_messages, worker)
        descriptors = [memory.descriptor.hex() for memory in (allocated, registered)]
        say([[bytes(worker.address).hex() for worker in workers], listeners, descriptors])
        with contextlib.suppress(EOFError):
            address = ucp.WorkerAddress(bytes.fromhex(await ask()))
            for worker in workers:
                if ucp.Feature.STREAM in worker.context.features:
                    nursery.start_soon(_echo_stream, await open_raw_endpoint(worker, address))
            await until_told()
        nursery.cancel_scope.cancel()


async def _report_tag_messages(worker: ucp.Worker) -> None:
    while True:
        length, _ = await worker.tag_receive(bytearray(2**21), 0, 1 << 63)
        say(["tag", length])


async def _report_active_messages(worker: ucp.Worker) -> None:
    with worker.open_active_messages(7) as messages:
        async for message in messages:
            say(["am", len(await message.receive())])


async def _echo_on_its_endpoint(connection: trio_ucx.Connection) -> None:
    if ucp.Feature.STREAM in connection.worker.context.features:
        await _echo_stream(connection.endpoint)
    else:
        with contextlib.suppress(trio.EndOfChannel, trio.BrokenResourceError):
            await connection.receive()


async def _echo_stream(endpoint: ucp.Endpoint) -> None:
    try:
        while True:
            with await endpoint.stream_receive_some() as data:
                await endpoint.stream_send(bytes(data))
    except trio.BrokenResourceError:
        pass
    finally:
        endpoint.abort()


@role
async def transferring_peer(way: str, said: dict[str, Any], kind: str, start: int, stop: int) -> None:
    """Gets or puts (``kind``) pieces of all lengths, from ``start`` to ``stop`` of an owner's memory, until killed:
    with five tasks, one of which uses request chains, and one lists of blocks.
    """
    rng = random.Random(os.getpid())
    data = bytearray(b"\1" * (stop - start))

    def piece() -> tuple[int, int]:
        length = min(2 ** rng.randrange(4, 25), stop - start)
        return rng.randrange(start, stop - length + 1), length

    async def move(memory: ucp.RemoteMemory) -> None:
        while True:
            offset, length = piece()
            if kind == "get":
                await memory.get_into(data[:length], offset)
            else:
                await memory.put(data[:length], offset)

    async def move_by_chains(worker: ucp.Worker, memory: ucp.RemoteMemory) -> None:
        while True:
            with worker.new_chain() as chain:
                for offset, length in [piece() for _ in range(4)]:
                    if kind == "get":
                        chain.get(memory, offset, length)
                    else:
                        chain.put(memory, data[:length], offset)
                (await chain.run()).values()

    async def move_by_lists(memory: ucp.RemoteMemory) -> None:
        while True:
            plan = memory.plan(data, block=rng.choice([1, 100, 4096, 65_536, 10**6]), offset=start)
            most = min(len(data) // plan.block, 2000)
            blocks = rng.sample(range(most), rng.randrange(most + 1))
            await (plan.get if kind == "get" else plan.put)(blocks, blocks)

    async with ucp.open_worker(features=REMOTE) as worker, contextlib.AsyncExitStack() as stack:
        try:
            endpoint = await stack.enter_async_context(open_to_peer(way, worker, said))
        except OSError:
            return  # another mover was killed, and the owner's queue in shared memory has stopped
        nursery = await stack.enter_async_context(trio.open_nursery())
        memory = endpoint.attach(bytes.fromhex(said["descriptor"]))
        for _ in range(3):
            nursery.start_soon(move, memory)
        nursery.start_soon(move_by_chains, worker, memory)
        nursery.start_soon(move_by_lists, memory)
        say("moving")


@role
async def gets_everything(way: str, said: dict[str, Any], nbytes: int) -> None:
    """Gets all of an owner's memory, over and over, with three tasks, until killed."""

    async def get(memory: ucp.RemoteMemory) -> None:
        data = bytearray(nbytes)
        while True:
            await memory.get_into(data)
            say("got")

    async with ucp.open_worker(features=REMOTE) as worker, open_to_peer(way, worker, said) as endpoint:
        memory = endpoint.attach(bytes.fromhex(said["descriptor"]))
        async with trio.open_nursery() as nursery:
            for _ in range(3):
                nursery.start_soon(get, memory)


@role
async def chain_locking(worker_address: str, descriptor: str, me: int, sections: int, runs: int) -> None:
    """After the test's line, adds 1 at offset 8 ``sections * runs`` times, each time holding the lock at offset 0. Each
    holder writes its number at offset 16. Reports how often the lock was found taken.
    """
    async with ucp.open_worker(features=REMOTE) as worker:
        async with await worker.open_endpoint(ucp.WorkerAddress(bytes.fromhex(worker_address))) as endpoint:
            with endpoint.attach(bytes.fromhex(descriptor)) as memory:
                chain = worker.new_chain(capacity=6 * sections)
                released: list[chains.ChainRequest] = []
                counters = []
                for _ in range(sections):
                    lock = chain.compare_swap(memory, 0, me, after=released)
                    held = chain.check(lock.u64() == 0, on_false=chains.Retry(10**9, again=lock))
                    counters.append(chain.get(memory, 8, 8, after=held))
                    mine = chain.put(memory, (counters[-1].u64() + 1, me.to_bytes(8, "little")), 8)
                    seen = chain.get(memory, 8, 16, after=mine)
                    right = (seen.u64(0) == counters[-1].u64() + 1) & (seen.u64(8) == me)
                    released = [chain.put(memory, bytes(8), 0, when=right)]
                say("ready")
                await ask()
                found: list[int] = []
                for _ in range(runs):
                    outcomes = await chain.run()
                    for outcome in outcomes:
                        assert outcome is not None
                        outcome.unwrap()
                    found += [int.from_bytes(outcomes[one].unwrap(), "little") for one in counters]
                assert sorted(set(found)) == found, "the counter went back, or did not move"
                say(len(found))
                await until_told()


@role
async def counting(worker_address: str, descriptor: str, count: int, how: str) -> None:
    """After the test's line, adds 1 at offset 0 so many times; with ``fetch``, reports the sum of the old values."""
    async with ucp.open_worker(features=REMOTE) as worker:
        async with await worker.open_endpoint(ucp.WorkerAddress(bytes.fromhex(worker_address))) as endpoint:
            with endpoint.attach(bytes.fromhex(descriptor)) as memory:
                await memory.fetch_add(0)
                say("ready")
                await ask()
                found = []
                for _ in range(count):
                    if how == "fetch":
                        found.append(await memory.fetch_add(1))
                    else:
                        await memory.atomic(ucp.AtomicOp.ADD, 1)
                await memory.flush()
                say(found)
                await until_told()


@role
async def locking(worker_address: str, descriptor: str, count: int, own: int) -> None:
    """Takes the lock at offset 0 so many times, each time adding 1 at offset 8 by get and put."""
    async with ucp.open_worker(features=REMOTE) as worker:
        async with await worker.open_endpoint(ucp.WorkerAddress(bytes.fromhex(worker_address))) as endpoint:
            with endpoint.attach(bytes.fromhex(descriptor)) as memory:
                await memory.fetch_add(0)
                say("ready")
                await ask()
                for _ in range(count):
                    while await memory.compare_swap(0, own):
                        pass
                    number = int.from_bytes(await memory.get(8, 8), sys.byteorder)
                    await memory.put((number + 1).to_bytes(8, sys.byteorder), 8)
                    await memory.flush()
                    assert await memory.compare_swap(own, 0) == own
                say("done")
                await until_told()


@role
async def raw_echo() -> None:
    """Reports its worker's address, hears that of another one, and sends back each message of 5 bytes with tag 1."""
    async with ucp.open_worker() as worker:
        say(bytes(worker.address).hex())
        address = ucp.WorkerAddress(bytes.fromhex(await ask()))
        buffer = bytearray(5)
        while True:
            with trio.move_on_after(20) as scope:
                await worker.tag_receive(buffer, 1)
            if scope.cancelled_caught:
                return
            async with await worker.open_endpoint(address) as endpoint:
                await endpoint.tag_send(buffer, 2)
            say("echoed")


@role
async def raw_visits(count: int) -> None:
    """Hears a worker's address, reports its own, and sends it so many messages, each by a new endpoint. Reports the
    network devices, or the error.
    """
    async with ucp.open_worker() as worker:
        address = ucp.WorkerAddress(bytes.fromhex(await ask()))
        say(bytes(worker.address).hex())
        await ask()
        devices: set[str] = set()
        try:
            for _ in range(count):
                async with await worker.open_endpoint(address) as endpoint:
                    with trio.fail_after(10):
                        await endpoint.tag_send(b"hello", 1)
                        await worker.tag_receive(bytearray(5), 2)
                    devices |= {each.device for each in endpoint.transports}
            say(sorted(devices))
        except (OSError, trio.TooSlowError) as error:
            say(repr(error))


@role
async def unresponsive_listener() -> None:
    """Accepts control sockets, and never sends anything."""
    listener = (await trio.open_tcp_listeners(0, host="127.0.0.1"))[0]
    async with trio.open_nursery() as nursery:
        nursery.start_soon(trio.serve_listeners, lambda _: trio.sleep_forever(), [listener])
        say([listener.socket.getsockname(), None])
        await until_told()
        nursery.cancel_scope.cancel()


@role
async def busy(address: list[Any], transports: str) -> None:
    """A program that is always busy, to be interrupted: it must end with KeyboardInterrupt, and leave nothing.

    Runs again after each interrupt until the test ends it: see ``interrupted``.
    """
    ready = False
    say("begins")
    async with ucp.open_worker(config={"TLS": transports}) as worker:
        async with open_listener(worker):
            while True:
                async with trio_ucx.connect(tuple(address), worker=worker) as connection:
                    for number in range(20):
                        await in_nursery(use_at_once, connection, number)
                    if not ready:
                        ready = True
                        say("ready")


@trio.lowlevel.disable_ki_protection
async def use_at_once(nursery: trio.Nursery, connection: trio_ucx.Connection, number: int) -> None:
    """Uses the connection to an echo in several ways at once."""
    nursery.start_soon(partial(connection.send, pattern(3000 * number, number), tag=1))
    nursery.start_soon(connection.send_all, pattern(100 * number))
    if await connection.receive(tag=1) != pattern(3000 * number, number):
        raise AssertionError("wrong data")
    nursery.start_soon(connection.receive_some)
    with trio.move_on_after(0.001):
        await connection.receive(tag=0)
    connection.send_nowait(b"x", tag=0)
    await connection.receive(tag=0)
    with trio.move_on_after(0):
        await connection.send(bytes(100_000), tag=2)
    nursery.cancel_scope.cancel()


@trio.lowlevel.enable_ki_protection
async def in_nursery(function: Callable[..., Awaitable[None]], *arguments: Any) -> None:
    """Calls ``function(nursery, *arguments)`` in a nursery of its own.

    Protected, because Trio 0.35 breaks ("Nursery stack corrupted") if a KeyboardInterrupt comes between calling and
    awaiting ``Nursery.__aexit__()``.
    """
    async with trio.open_nursery() as nursery:
        await function(nursery, *arguments)


@role
async def flood(count: int, size: int) -> None:
    """After the first message from its peer, sends ``count`` messages ``pattern(size, i)`` with tag 1; with size 0,
    writes of 64 KB instead.
    """

    async def handler(connection: trio_ucx.Connection) -> None:
        await connection.receive()
        for number in range(count):
            if size:
                await connection.send(pattern(size, number), tag=1)
            else:
                await connection.send_all(pattern(64_000, number))

    await serve(handler)


@role
async def flooded_receiver(address: list[Any], seconds: float, window: int, count: int, size: int) -> None:
    """Makes ``flood`` send, reads nothing for a while, then everything. Reports how far its memory grew meanwhile."""
    async with trio_ucx.connect(tuple(address), window=window) as connection:
        await connection.send(b"warm up", tag=2)
        before = most = resident()
        await connection.send(b"go")
        with trio.move_on_after(seconds):
            while True:
                await trio.sleep(0.02)
                most = max(most, resident())
        statistics = connection.statistics()
        number = 0
        if size:
            async for message in connection.messages(1):
                if message != pattern(size, number):
                    raise AssertionError(f"message {number} is wrong")
                number += 1
        else:
            data = bytearray()
            async for chunk in connection:
                data += chunk
                while len(data) >= 64_000:
                    if data[:64_000] != pattern(64_000, number):
                        raise AssertionError(f"write {number} is wrong")
                    del data[:64_000]
                    number += 1
        say([most - before, statistics.held, number])


@role
async def target() -> None:
    """Echoes tag 7; reports its memory for each line of the test."""

    async def handler(connection: trio_ucx.Connection) -> None:
        with contextlib.suppress(trio.BrokenResourceError):
            async for message in connection.messages(7):
                await connection.send(message, tag=7)

    async with trio.open_nursery() as nursery:
        [listener] = await nursery.start(partial(trio_ucx.serve_ucx, handler, 0, host="127.0.0.1"))
        say(listener.address)
        with contextlib.suppress(EOFError):
            while True:
                await ask()
                say(resident())
        nursery.cancel_scope.cancel()


@role
async def pinger(address: list[Any], server: int) -> None:
    """Makes round trips until the test's line, then reports how many seconds each took, and the noise meanwhile, which
    is also that of the server's process.
    """
    took: list[tuple[float, float]] = []
    async with trio_ucx.connect(tuple(address)) as connection, trio.open_nursery() as nursery:

        async def ping() -> None:
            with Noise(waited_by(server)) as noise:
                while True:
                    start = time.perf_counter()
                    await connection.send(bytes(100), tag=7)
                    await connection.receive(tag=7)
                    now = time.perf_counter()
                    took.append((now - start, noise.since(start, now)))
                    await trio.sleep(0.005)

        nursery.start_soon(ping)
        say("pinging")
        await until_told()
        nursery.cancel_scope.cancel()
    say(took)


@role
async def closes_listeners(count: int) -> None:
    """Opens and closes listeners at the test's lines, and goes on using their memory."""
    async with ucp.open_worker() as worker:
        for _ in range(count):
            [listener] = await trio_ucx.open_ucx_listeners(0, host="127.0.0.1", worker=worker)
            say(listener.address)
            await ask()
            await listener.aclose()
            rubbish = [os.urandom(200 + number) for number in range(300)]
            say("closed")
            await trio.sleep(0.05)
            del rubbish


@role
async def counts_polls(count: int) -> None:
    """Sends so many messages back, and says how often it polled."""
    async with ucp.open_worker() as worker, open_listener(worker) as listener:
        say(listener.address)
        async with await listener.accept() as connection:
            for _ in range(count):
                await connection.send(await connection.receive(tag=1), tag=1)
            say(worker.statistics().polls)
            await connection.wait_closed()


@role
async def echo_with_few_descriptors(spare: int, isolate: bool = False) -> None:
    """``echo`` with few free file descriptors."""
    async with ucp.open_worker():
        used = len(os.listdir("/proc/self/fd"))
    resource.setrlimit(resource.RLIMIT_NOFILE, (used + spare, resource.getrlimit(resource.RLIMIT_NOFILE)[1]))
    await echo([0], isolate=isolate)


@role
async def reconnecting_client(address: list[Any]) -> None:
    """Connects over and over, until it is killed."""
    say("ready")
    async with ucp.open_worker() as worker:
        while True:
            async with trio_ucx.connect(tuple(address), worker=worker) as connection:
                await connection.send(bytes(100_000))
                await connection.receive()
            (await open_raw_endpoint(worker, tuple(address))).abort()


@role
async def clients_of(address: list[Any], count: int) -> None:
    """So many connections, which nobody reads."""
    async with contextlib.AsyncExitStack() as stack:
        for _ in range(count):
            await stack.enter_async_context(trio_ucx.connect(tuple(address)))
        say("connected")
        await until_told()


@role
async def client_of(address: list[Any], number: int) -> None:
    """Connects, sends the number with tag 1, and then receives nothing until it is killed."""
    async with trio_ucx.connect(tuple(address)) as connection:
        await connection.send(b"%d" % number, tag=1)
        await trio.sleep_forever()


def transports_of(connection: trio_ucx.Connection) -> list[str]:
    return sorted({transport.name for transport in connection.endpoint.transports})


def with_authkey(options: dict[str, Any]) -> dict[str, Any]:
    """Options of a connection, of which JSON has no bytes."""
    return {**options, "authkey": options["authkey"].encode()} if "authkey" in options else options


@role
async def host(hosts: list[str], options: dict[str, Any]) -> None:
    """Sends every message back. Reports its addresses; at the end, its connections' transports and its log."""
    log: list[str] = []
    transports: list[list[str]] = []

    async def handler(connection: trio_ucx.Connection) -> None:
        transports.append(transports_of(connection))
        try:
            async for message in connection.messages():
                await connection.send(message)
        except trio.BrokenResourceError as error:
            log.append(repr(error))

    keep_log(log)
    async with trio.open_nursery() as nursery:
        addresses = []
        for name in hosts:
            options = {"allow_anyone": True, **with_authkey(options)}
            server = await nursery.start(partial(trio_ucx.serve_ucx, handler, 0, host=name, **options))
            addresses.append(server.address)
        say(addresses)
        await until_told()
        nursery.cancel_scope.cancel()
    say([transports, log])


def keep_log(log: list[str]) -> None:
    class Keeping(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            log.append(f"{record.levelname} {record.getMessage()}")

    logger = logging.getLogger("trio_ucx")
    logger.addHandler(Keeping())
    logger.setLevel(logging.INFO)


@role
async def visitor(options: dict[str, Any], sizes: list[int]) -> None:
    """Connects to the address that the test sends; messages of these sizes must come back. Reports its transports and
    addresses; or the error: class, errno, text, and the seconds until then.
    """
    address = await ask()
    start = trio.current_time()
    try:
        address = address if isinstance(address, str) else tuple(address)
        async with trio_ucx.connect(address, **with_authkey(options)) as connection:
            for size in sizes:
                data = pattern(size, size)
                for _ in range(3):
                    async with trio.open_nursery() as nursery:
                        nursery.start_soon(connection.send, data)
                        with trio.fail_after(60):
                            if await connection.receive() != data:
                                raise AssertionError("wrong data")
            said = ["connected", transports_of(connection), connection.local_address, connection.remote_address]
        say(said)
    except OSError as error:
        say([type(error).__name__, error.errno, str(error), trio.current_time() - start])


@role
async def visitor_of_a_late_network(options: dict[str, Any]) -> None:
    """Opens its worker, and then waits for an address that the test sends. Reports its transports."""
    async with ucp.open_worker() as worker:
        say("open")
        address = tuple(await ask())
        async with trio_ucx.connect(address, worker=worker, **options) as connection:
            await connection.send(b"x")
            with trio.fail_after(60):
                await connection.receive()
            transports = transports_of(connection)
        say(transports)  # now the other side may end


@role
async def visitor_by_several_ways(sizes: list[int]) -> None:
    """Connects one worker to each of the addresses that the test sends; messages of these sizes must come back over
    each, also after those before it were closed. Reports transports and remote addresses.
    """
    addresses = [tuple(address) for address in await ask()]
    said = []
    async with ucp.open_worker() as worker:
        connections = [await trio_ucx.connect(address, worker=worker).__aenter__() for address in addresses]
        while connections:
            said.append([transports_of(connections[0]), connections[0].remote_address])
            for connection in connections:
                for size in sizes:
                    await connection.send(pattern(size, size))
                    with trio.fail_after(60):
                        if await connection.receive() != pattern(size, size):
                            raise AssertionError("wrong data")
            await connections.pop(0).aclose()
    say(said)


@role
async def visiting_until_told(config: dict[str, str], options: dict[str, Any]) -> None:
    """Connects to the address that the test sends, and reports its transports. When told, exchanges another message."""
    address, options = tuple(await ask()), with_authkey(options)
    async with (
        ucp.open_worker(config=config) as worker,
        trio_ucx.connect(address, worker=worker, **options) as connection,
    ):

        async def exchange() -> None:
            await connection.send(b"hello")
            if await connection.receive() != b"hello":
                raise AssertionError("wrong data")

        await exchange()
        say(["connected", transports_of(connection)])
        await until_told()
        await exchange()
    say(["still connected"])


@role
async def reconnecting(seconds: float) -> None:
    """Connects to the address that the test sends, again and again. Reports how often."""
    address = tuple(await ask())
    end, count = trio.current_time() + seconds, 0
    while trio.current_time() < end:
        async with trio_ucx.connect(address) as connection:
            await connection.send(b"hello")
            if await connection.receive() != b"hello":
                raise AssertionError("wrong data")
        count += 1
        await trio.sleep(0.1)  # each connection takes a port of a small range for a while
    say([count])


@role
async def forwarder(host: str) -> None:
    """Forwards TCP connections to the target that the test sends. Reports its address; finally, the bytes passed."""
    target = await ask()
    passed = 0

    async def pump(source: trio.SocketStream, sink: trio.SocketStream) -> None:
        nonlocal passed
        async for chunk in source:
            passed += len(chunk)
            await sink.send_all(chunk)
        await sink.send_eof()

    async def forward(client: trio.SocketStream) -> None:
        try:
            async with await trio.open_tcp_stream(*target) as server, trio.open_nursery() as nursery:
                nursery.start_soon(pump, client, server)
                nursery.start_soon(pump, server, client)
        except* (trio.BrokenResourceError, OSError):
            pass

    async with trio.open_nursery() as nursery:
        serving = partial(trio.serve_tcp, forward, 0, host=host)
        [listener] = await nursery.start(serving)
        say(listener.socket.getsockname())
        await until_told()
        nursery.cancel_scope.cancel()
    say(passed)


BIG = 2**24


async def load(connection: trio_ucx.Connection, kind: str, task_status: trio.TaskStatus[None]) -> None:
    """The load on a connection while its peer is lost, until the connection ends. It uses tag 2.

    ``full``: as much is sent as the window allows. ``offered``: the same, and a large message that nobody receives.
    ``sending``, ``receiving``: large messages, one after the other. ``busy``: many of 1 MiB in both directions.
    ``echo``: messages with tag 3 are sent back.
    """
    try:
        async with trio.open_nursery() as nursery:
            if kind in ("full", "offered"):
                if kind == "offered":
                    nursery.start_soon(partial(connection.send, bytes(BIG), tag=2))
                    await trio.sleep(0.01)
                with contextlib.suppress(trio.WouldBlock):
                    while True:
                        connection.send_nowait(bytes(4000), tag=2)
            elif kind == "echo":

                async def echo() -> None:
                    async for message in connection.messages(3):
                        await connection.send(message, tag=3)

                nursery.start_soon(echo)
            elif kind in ("sending", "busy", "receiving"):

                async def send(size: int) -> None:
                    while True:
                        await connection.send(bytes(size), tag=2)
                        if kind == "busy":
                            await trio.sleep(0.01)

                async def receive() -> None:
                    buffer = bytearray(BIG)
                    while True:
                        await connection.receive_into(buffer, tag=2)

                if kind != "receiving":
                    nursery.start_soon(send, BIG if kind == "sending" else 2**20)
                if kind != "sending":
                    nursery.start_soon(receive)
                await trio.sleep(0.05)
            else:
                assert kind == "idle"
            task_status.started()
    except* (trio.BrokenResourceError, trio.ClosedResourceError):
        pass


class Leaving(Exception):
    pass


@role
async def lost_peer() -> None:
    """For each case that the test sends: opens a connection, puts it under load, reports that, and ends it at the next
    line.

    A case is ``[host, target, options, load, way]``. If ``host`` is given, the peer listens there and reports the
    address; else it connects to ``target``.
    """
    while True:
        try:
            host, target, options, kind, way = await ask()
        except EOFError:
            return
        with warnings.catch_warnings(), contextlib.suppress(Leaving):
            warnings.simplefilter("ignore" if way == "worker" else "error", ResourceWarning)
            async with ucp.open_worker() as worker, trio.open_nursery() as nursery:
                if host:
                    [listener] = await trio_ucx.open_ucx_listeners(0, host=host, worker=worker, **options)
                    say(listener.address)
                    connection = await listener.accept()
                    await listener.aclose()
                else:
                    connection = await trio_ucx.open_ucx_stream(*target, worker=worker, **options)
                await nursery.start(load, connection, kind)
                say("ready")
                await until_told()
                if way == "exit":
                    os._exit(0)
                elif way == "exception":
                    nursery.cancel_scope.shield = True
                    try:
                        async with connection:
                            raise Leaving
                    except Leaving:
                        nursery.cancel_scope.cancel()
                elif way == "abort":
                    connection.abort()
                else:
                    assert way == "worker"
                    nursery.cancel_scope.cancel()
        say("ended")


@role
async def watcher(host: str | None, cases: list[list[Any]]) -> None:
    """One side of several connections, each ``[load, keepalive_interval]``: listens, or connects to the addresses that
    the test sends. Reports its addresses, if it listens; then "ready"; at the end, for each connection, None, or the
    error, the time, and the seconds until its buffers were released.
    """
    lost: list[Any] = [None] * len(cases)
    ready = 0

    async def watch(number: int, connection: trio_ucx.Connection) -> None:
        nonlocal ready
        try:
            async with trio.open_nursery() as nursery:
                await nursery.start(load, connection, cases[number][0])
                ready += 1
                if ready == len(cases):
                    say("ready")
                try:
                    await connection.receive(tag=1)
                except trio.BrokenResourceError as error:
                    noticed = time.monotonic()
                    connection.abort()
                    await connection.wait_buffers_released()
                    lost[number] = [str(error), noticed, time.monotonic() - noticed]
                await trio.sleep_forever()
        finally:
            connection.abort()

    async def one(number: int, address: list[Any] | None, task_status: trio.TaskStatus[Any]) -> None:
        options = {"keepalive_interval": cases[number][1]}
        async with ucp.open_worker() as worker:
            if address is None:
                async with open_listener(worker, host=host, allow_anyone=True, **options) as listener:
                    task_status.started(listener.address)
                    connection = await listener.accept()
            else:
                connection = await trio_ucx.open_ucx_stream(*address, worker=worker, **options)
                task_status.started()
            await watch(number, connection)

    async with trio.open_nursery() as nursery:
        if host is None:
            for number, address in enumerate(await ask()):
                await nursery.start(one, number, address)
        else:
            say([await nursery.start(one, number, None) for number in range(len(cases))])
        await until_told()
        nursery.cancel_scope.cancel()
    say(lost)


def worker_of(connection: trio_ucx.Connection) -> ucp.WorkerAddress:
    """The worker at the other end."""
    address = internals(connection.endpoint).peer_address
    assert address is not None
    return address


@role
async def dying_client(transport: str, stops: bool = False) -> None:
    """Connects to the address that the test sends, and after the next line dies in the middle of writing, or stops."""
    connection = await trio_ucx.connect(tuple(await ask())).__aenter__()
    await connection.send(b"hello")
    await connection.receive()
    say(sorted(transport.name for transport in connection.endpoint.transports))
    await ask()
    take_an_element(worker_of(connection), transport)
    os.kill(os.getpid(), signal.SIGSTOP if stops else signal.SIGKILL)


@role
async def dying_server(transport: str) -> None:
    """The same as a server: for its first client."""

    async def handler(connection: trio_ucx.Connection) -> None:
        await connection.send(await connection.receive())
        say(sorted(transport.name for transport in connection.endpoint.transports))
        await connection.receive(tag=1)
        take_an_element(worker_of(connection), transport)
        os.kill(os.getpid(), signal.SIGKILL)

    await serve(handler)


@role
async def dying_raw_peer(transport: str) -> None:
    """A raw peer. Gets a worker's address from the test, answers one message, then dies in the middle of writing."""
    async with ucp.open_worker() as worker:
        say(bytes(worker.address).hex())
        address = ucp.WorkerAddress(bytes.fromhex(await ask()))
        endpoint = await open_raw_endpoint(worker, address)
        await endpoint.tag_send(b"hello", 1)
        await ask()
        take_an_element(address, transport)
        os.kill(os.getpid(), signal.SIGKILL)


@role
async def aborts_with_a_full_socket() -> None:
    """Two workers with a TCP connection. When the test has cut it, one sends until the socket's buffer is full, aborts,
    and reports how long that took, and the noise.
    """
    config = {"TLS": "tcp", "TCP_SNDBUF": "8k"}
    async with ucp.open_worker(config=config) as one, ucp.open_worker(config=config) as other:
        there, back = await one.open_endpoint(other.address), await other.open_endpoint(one.address)
        await there.tag_send(b"to", 1)
        await back.tag_send(b"fro", 1)
        await one.tag_receive(bytearray(10), 1)
        await other.tag_receive(bytearray(10), 1)
        say("connected")
        await ask()
        with contextlib.ExitStack() as stack, trio.fail_after(30):
            sockets = [stack.enter_context(found) for found in tcp_sockets()]
            while not any(map(is_full, sockets)):
                await there.tag_send(bytes(3000), 1)
        with Noise() as noise:
            start = time.perf_counter()
            there.abort()
            end = time.perf_counter()
        say((end - start, noise.since(start, end)))
        await until_told()
        back.abort()


@role
async def caller(size: int, shared_memory: bool | str = "auto") -> None:
    """A client that makes one round trip for each line of the test, and reports its outcome and transports. It connects
    again when the server drops a connection because its shared-memory queue has just stopped.
    """
    address = tuple(await ask())
    deadline = time.monotonic() + 4
    while True:
        try:
            connection = await trio_ucx.connect(address, shared_memory=shared_memory).__aenter__()  # type: ignore[arg-type]
            break
        except (ConnectionResetError, ConnectionRefusedError):
            if time.monotonic() > deadline:
                raise
            await trio.sleep(0.05)
    say(sorted(transport.name for transport in connection.endpoint.transports))
    try:
        while True:
            waiting = await ask()
            try:
                with trio.fail_after(60):
                    if not waiting:
                        await connection.send(bytes(size))
                    say(len(await connection.receive()))
            except Exception as error:
                say(type(error).__name__)
                break
        await until_told()
    except EOFError:
        pass
    connection.abort()


async def move_much(connection: trio_ucx.Connection, size: int) -> None:
    """Sends and receives messages of ``size`` with four tags, until the connection ends."""

    async def send(tag: int, data: bytes) -> None:
        while True:
            await connection.send(data, tag=tag)

    async def receive(tag: int, buffer: bytearray) -> None:
        while True:
            await connection.receive_into(buffer, tag=tag)

    try:
        async with trio.open_nursery() as nursery:
            for tag in range(4):
                nursery.start_soon(send, tag, bytes(size))
                nursery.start_soon(receive, tag, bytearray(size))
    except* (trio.BrokenResourceError, trio.ClosedResourceError):
        pass


@role
async def busy_both_ways(size: int) -> None:
    await serve(lambda connection: move_much(connection, size))


@role
async def aborter(address: list[Any], size: int, rounds: int) -> None:
    """Aborts connections while large messages are in flight both ways."""
    rng = random.Random(os.getpid())
    for number in range(rounds):
        async with trio_ucx.connect(tuple(address)) as connection, trio.open_nursery() as nursery:
            nursery.start_soon(move_much, connection, size)
            await trio.sleep(rng.uniform(0.02, 0.1))
            connection.abort()
        say(number)


@role
async def steady_client(limit: float) -> None:
    """Makes round trips until the test ends it, and connects again when a connection breaks. Reports how many there
    were, how often it connected, and the longest time between two round trips, less the noise.
    """
    address = tuple(await ask())
    trips = connects = 0
    longest = 0.0
    last = time.perf_counter()
    say("ready")
    stop = trio.Event()

    async def go() -> None:
        nonlocal trips, connects, longest, last
        while not stop.is_set():
            try:
                async with trio_ucx.connect(address, shared_memory=True, connect_timeout=limit) as connection:
                    connects += 1
                    while not stop.is_set():
                        with trio.fail_after(limit):
                            await connection.send(b"round")
                            await connection.receive()
                        trips += 1
                        now = time.perf_counter()
                        longest, last = max(longest, now - last - noise.since(last, now)), now
                        await trio.sleep(0.005)
            except (OSError, trio.BrokenResourceError, trio.EndOfChannel, trio.TooSlowError) as error:
                if isinstance(error, trio.TooSlowError):
                    longest = max(longest, 2 * limit)  # neither an answer nor an error
                await trio.sleep(0.02)

    with Noise() as noise:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(go)
            await until_told()
            stop.set()
    say([trips, connects, longest])


def killed_clients() -> None:
    """Kills a number of sending clients at random moments; a few run at a time.

    They are forked, as a process takes its time to start.
    """
    [port, size, kills, seed] = json.loads(sys.argv[2])
    chance = random.Random(seed)
    children: dict[int, float] = {}
    connected = 0
    try:
        while kills or children:
            while kills and len(children) < 3:
                kills -= 1
                told, tell = os.pipe()
                pid = os.fork()
                if not pid:
                    os.close(told)
                    end_with_parent()
                    try:
                        trio.run(send_without_end, port, size, tell)
                    finally:
                        os._exit(1)
                os.close(tell)
                with open(told, "rb") as file:  # until it has connected, or ended
                    connected += len(file.read(1))
                children[pid] = time.monotonic() + chance.random() * 0.02
            pid = min(children, key=lambda each: children[each])
            time.sleep(max(0.0, children.pop(pid) - time.monotonic()))
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
    finally:
        for pid in children:
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
    say(connected)


@role
async def killed_in_the_middle_of_a_message(address: list[Any], length: int) -> None:
    """Connects, sends a message of two TCP segments, and kills itself; often when the first of them is sent."""
    async with ucp.open_worker(config={"TLS": "tcp", "TCP_SNDBUF": "16k"}) as worker:
        connection = await trio_ucx.open_ucx_stream(*address, worker=worker)
        await connection.send(b"hello", tag=1)
        await connection.receive(tag=1)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(connection.send, bytes(length))
            await trio.lowlevel.checkpoint()
            await trio.lowlevel.checkpoint()
            os.kill(os.getpid(), signal.SIGKILL)


@role
async def killed_after_its_request(address: str) -> None:
    """Makes an endpoint once it is told, and kills itself."""
    async with ucp.open_worker() as worker:
        say("ready")
        await ask()
        await worker.open_endpoint(ucp.WorkerAddress(bytes.fromhex(address)))
        os.kill(os.getpid(), signal.SIGKILL)


@role
async def killed_while_connecting(address: list[Any], moment: str) -> None:
    """Connects, and kills itself.

    Args:
        moment: "before HELLO": once it is told; its UCX has requested the server's endpoint by then. "in the request":
            it writes that to the server's shared-memory queue.
    """

    def kill(*_: object) -> None:
        os.kill(os.getpid(), signal.SIGKILL)

    def kill_when_told(*_: object) -> None:
        say(moment)
        os.read(0, 1)
        kill()

    def write(engine: object, server: ucp.WorkerAddress, *_: object) -> None:
        take_an_element(server, "sysv")
        kill()

    if moment == "before HELLO":
        handshake_side.post_bytes_send = kill_when_told  # type: ignore[assignment]
    else:
        handshake_side.connect_shared = write  # type: ignore[assignment]
    async with ucp.open_worker() as worker:
        await trio_ucx.open_ucx_stream(*address, worker=worker)


def fork_between_runs() -> None:
    """Connects in a run that ends, then in a child that was forked after that; says what each received."""
    [port] = json.loads(sys.argv[2])

    async def talk() -> None:
        async with trio_ucx.connect(("127.0.0.1", port), connect_timeout=60) as connection:
            await connection.send(b"hello")
            say((await connection.receive()).decode())

    trio.run(talk)
    pid = os.fork()
    if not pid:
        try:
            trio.run(talk)
        finally:
            os._exit(0)
    os.waitpid(pid, 0)


def end_with_parent() -> None:
    """The kernel kills this process when its parent ends."""
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG


async def send_without_end(port: int, size: int, tell: int) -> None:
    """Sends messages with tag 2 for ever."""
    while True:
        try:
            connection = await trio_ucx.connect(("127.0.0.1", port), connect_timeout=4).__aenter__()
        except OSError:
            continue  # the server's queue has stopped just now
        os.write(tell, b"x")
        os.close(tell)
        data = bytes(size)
        try:
            while True:
                await connection.send(data, tag=2)
        except trio.BrokenResourceError:
            await trio.sleep_forever()


def interrupted() -> None:
    """Runs ``busy`` once for each line of the test, as a program would be run, and reports how each run ended."""
    import gc
    import warnings

    # Trio (0.35) does not protect it. A KeyboardInterrupt in the middle, a microsecond of each millisecond of ``busy``,
    # leaves a task that never runs (the program hangs), or one that its nursery does not know (TrioInternalError).
    trio.lowlevel.enable_ki_protection(trio.Nursery.start_soon)
    arguments = json.loads(sys.argv[2])
    while trio.run(told_to_go_on):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", ResourceWarning)  # an interrupt between two lines can drop things
            try:
                trio.run(lambda: busy(*arguments))
            except KeyboardInterrupt:
                ended = "KeyboardInterrupt"
            except BaseExceptionGroup as group:
                rest = group.split(KeyboardInterrupt)[1]
                ended = "KeyboardInterrupt" if rest is None else repr(rest)
            else:
                ended = "returned"
            gc.collect()
        say([ended, live_handles()])


async def told_to_go_on() -> bool:
    try:
        await ask()
    except EOFError:
        return False
    return True


def main() -> None:
    name, arguments = sys.argv[1:]
    without_run = {"busy": interrupted, "killed_clients": killed_clients, "fork_between_runs": fork_between_runs}
    if name in without_run:
        without_run[name]()
        return
    trio.run(lambda: ROLES[name](*json.loads(arguments)))


if __name__ == "__main__":
    main()
