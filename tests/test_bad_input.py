"""Every wrong argument raises a clear exception and has no effect: the connection still works afterwards."""

from __future__ import annotations

import contextlib
import errno
import mmap
import os
import socket
import traceback
from collections.abc import Awaitable, Callable
from contextlib import AsyncExitStack
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import trio
from foreign_arrays import Tensor
from helpers import open_listener, open_pair, open_raw_listener, open_raw_pair, pattern, tasks_begin, until
from refused_memory import few_allocations

import trio_ucx
from trio_ucx import ucp

READ_ONLY = np.zeros(10, dtype=np.uint8)
READ_ONLY.flags.writeable = False

BAD_DATA = [
    ("text", TypeError, "cannot send a str"),
    (None, TypeError, "cannot send a NoneType"),
    (17, TypeError, "cannot send a int"),
    (object(), TypeError, "must be a buffer"),
    (np.zeros((4, 4))[:, 1], ValueError, "non-contiguous"),
    (memoryview(b"abcdef")[::2], ValueError, "non-contiguous"),
    (np.zeros((4, 4), order="F"), ValueError, "non-contiguous"),
    ([b"good", "bad"], TypeError, "cannot send a str"),
    ([[b"nested"]], TypeError, "cannot send a list"),
]
BAD_BUFFERS = [
    (b"bytes", TypeError, "read-only bytes"),
    (memoryview(b"bytes"), TypeError, "read-only memoryview"),
    (READ_ONLY, (TypeError, ValueError), "read-only"),
    ("text", TypeError, "cannot receive into a str"),
    (None, TypeError, "cannot receive into a NoneType"),
    (np.zeros(10)[::2], ValueError, "non-contiguous"),
    ([bytearray(3), b"bytes"], TypeError, "read-only"),
]
BAD_TAGS = [
    (-1, ValueError, "between 0 and"),
    (2**31, ValueError, "between 0 and 2147483647"),
    (1.0, TypeError, "must be an integer, not float"),
    ("1", TypeError, "must be an integer, not str"),
    (None, TypeError, "must be an integer"),
]
BAD_RAW_TAGS = [(2**64, ValueError, "between 0 and"), *[case for case in BAD_TAGS if case[0] != 2**31]]


async def refuses(function: Callable[[], Any], kind: Any, match: str) -> None:
    with trio.fail_after(20), pytest.raises(kind, match=match or None):
        result = function()
        if isinstance(result, Awaitable):
            await result


async def works(client: trio_ucx.Connection, server: trio_ucx.Connection) -> None:
    with trio.fail_after(15):
        for size in (3, 100_000):
            async with trio.open_nursery() as nursery:
                nursery.start_soon(partial(client.send, pattern(size), tag=5))
                assert await server.receive(tag=5) == pattern(size)
    assert client.statistics().left_over_operations == server.statistics().left_over_operations == 0


async def test_connection(worker: ucp.Worker) -> None:
    async with open_pair(worker) as (client, server):
        for data, kind, match in BAD_DATA:
            for send in (client.send, client.send_nowait):
                await refuses(lambda send=send, data=data: send(data), kind, match)
            with pytest.raises(kind, match=match):
                async with worker.open_request_group() as group:
                    try:
                        group.send(client, data)
                    except Exception as error:
                        failure = error
                raise failure
        for data in ("text", None, 17):
            await refuses(lambda data=data: client.send_all(data), TypeError, "")
        for buffer, kind, match in BAD_BUFFERS:
            await refuses(lambda buffer=buffer: server.receive_into(buffer), kind, match)
        buffer = bytearray(10)
        for tag, kind, match in BAD_TAGS:
            for function in (
                lambda tag=tag: client.send(b"x", tag=tag),
                lambda tag=tag: client.send_nowait(b"x", tag=tag),
                lambda tag=tag: server.receive(tag=tag),
                lambda tag=tag: server.receive_nowait(tag=tag),
                lambda tag=tag: server.receive_into(buffer, tag=tag),
                lambda tag=tag: server.wait_message(tag=tag),
                lambda tag=tag: server.messages(tag),
            ):
                await refuses(function, kind, match)
        for count, kind in ((0, ValueError), (-1, ValueError), (1.5, TypeError), ("1", TypeError)):
            await refuses(lambda count=count: server.receive_some(count), kind, "max_bytes")
        buffer.append(1)  # nothing is pinned
        await works(client, server)
        assert client.statistics().messages_received == 0


@pytest.mark.both_transports
@pytest.mark.parametrize("offset", [0, mmap.ALLOCATIONGRANULARITY])
async def test_mapped_file_that_was_truncated(worker: ucp.Worker, tmp_path: Path, offset: int) -> None:
    """Touching what lies behind the end of the file would be a SIGBUS."""
    kept, size = mmap.PAGESIZE, 1_000_000
    with open(tmp_path / "file", "wb+") as file:
        file.write(pattern(offset + size))
        file.flush()
        mapped = mmap.mmap(file.fileno(), size, offset=offset)
        file.truncate(offset + kept)
    array = np.frombuffer(mapped, np.uint8)
    async with open_pair(worker) as (client, server):
        for data in (
            mapped,
            memoryview(mapped)[kept : kept + 1],
            array[1:][10:],
            memoryview(array),
            [bytearray(1), mapped],
            np.from_dlpack(array),
            Tensor(array),
            ucp.Strided(Tensor(array[::2])),
        ):
            await refuses(partial(client.send, data), ValueError, "cannot use this .*truncated")
            await refuses(partial(client.send_nowait, data), ValueError, "cannot use this .*truncated")
            if not isinstance(data, np.ndarray) or data.flags.writeable:  # before NumPy 2.1 from_dlpack says it is not
                await refuses(partial(server.receive_into, data), ValueError, "cannot use this .*truncated")
        for view in (array[::2], array[::-1]):
            await refuses(partial(client.send, ucp.Strided(view)), ValueError, "cannot use this .*truncated")
        for data in (mapped, memoryview(mapped)[kept : kept + 1], memoryview(mapped)[kept : kept + 300_000]):
            await refuses(partial(client.send_all, data), ValueError, "cannot use this .*truncated")
        for view in (array, array[kept : kept + 10], array[::2], memoryview(mapped)[kept : kept + 1]):
            await refuses(partial(client.send_array, view), ValueError, "cannot use this .*truncated")
        for part in (memoryview(mapped)[:kept], array[:kept], array[kept:kept]):
            await client.send(part)
            assert await server.receive() == bytes(part)
        await client.send(ucp.Strided(array[:kept][::-1]))
        assert await server.receive() == bytes(array[:kept])[::-1]
        await works(client, server)
    del array, view, part, data
    mapped.close()  # it is not pinned


async def test_message_longer_than_the_buffer(worker: ucp.Worker) -> None:
    async with open_pair(worker, max_message_size=200_000) as (client, server):
        for size in (1000, 100_000):
            for early in (False, True):
                buffer = bytearray(size - 1)

                async def receive(buffer: bytearray, size: int) -> None:
                    with pytest.raises(trio_ucx.MessageTooLong, match="; it was dropped") as caught:
                        await server.receive_into(buffer, tag=1)
                    assert (caught.value.length, caught.value.limit) == (size, size - 1)

                async with trio.open_nursery() as nursery:
                    if early:
                        nursery.start_soon(receive, buffer, size)
                        await tasks_begin()
                    client.send_nowait(pattern(size), tag=1)
                    client.send_nowait(b"other tag", tag=2)
                    client.send_nowait(pattern(size, 1), tag=1)
                    if not early:
                        await receive(buffer, size)
                assert await server.receive(tag=1) == pattern(size, 1)
                assert await server.receive(tag=2) == b"other tag"
                buffer.append(0)
        client.send_nowait(bytes(200_001), tag=1)
        client.send_nowait(bytes(200_000), tag=1)
        await refuses(
            lambda: server.receive(tag=1), trio_ucx.MessageTooLong, "200001 bytes .* max_message_size is 200000"
        )
        assert await server.receive(tag=1) == bytes(200_000)
        await works(client, server)


@pytest.mark.both_transports
@pytest.mark.parametrize("size", [100, 5000, 200_000])
async def test_message_longer_than_max_size(worker: ucp.Worker, size: int) -> None:
    """The limit of one receive: below, and above, that of the connection."""
    async with open_pair(worker, max_message_size=50) as (client, server):

        async def refused(receive: Callable[[], Awaitable[bytes]], limit: int, name: str) -> None:
            with pytest.raises(trio_ucx.MessageTooLong, match=f"{name} is {limit}; it was dropped") as caught:
                await receive()
            assert (caught.value.length, caught.value.limit) == (size, limit)

        async def receive_nowait() -> bytes:
            while True:
                with contextlib.suppress(trio.WouldBlock):
                    return server.receive_nowait(max_size=size - 1)
                await trio.sleep(0)

        for early in (False, True):
            for receive, limit, name in (
                (partial(server.receive, max_size=size - 1), size - 1, "max_size"),
                (partial(server.receive, max_size=0), 0, "max_size"),
                (server.receive, 50, "max_message_size"),
                *([(receive_nowait, size - 1, "max_size")] if size < 65536 else []),
            ):
                with trio.fail_after(15):
                    async with trio.open_nursery() as nursery:
                        if early:
                            nursery.start_soon(refused, receive, limit, name)
                            await tasks_begin()
                        client.send_nowait(pattern(size))
                        if not early:
                            await refused(receive, limit, name)
                    client.send_nowait(pattern(size, 1))
                    assert await server.receive(max_size=size) == pattern(size, 1)
        client.send_nowait(pattern(40))
        with trio.fail_after(15):
            await server.wait_message()
        assert server.receive_nowait() == pattern(40)
        for max_size, kind in ((-1, ValueError), (2**63, ValueError), (1.5, TypeError), ("1", TypeError)):
            for function in (
                lambda max_size=max_size: server.receive(max_size=max_size),
                lambda max_size=max_size: server.receive_nowait(max_size=max_size),
            ):
                await refuses(function, kind, "max_size")


async def test_closed_objects(worker: ucp.Worker) -> None:
    async with open_pair(worker) as (client, server):
        await works(client, server)
        client.abort()
        for function in (
            lambda: client.send(b"x"),
            lambda: client.send_nowait(b"x"),
            client.receive,
            client.receive_nowait,
            lambda: client.receive_into(bytearray(1)),
            client.wait_message,
            lambda: client.messages().__anext__(),
            lambda: client.send_all(b"x"),
            client.send_eof,
            client.wait_send_all_might_not_block,
            client.receive_some,
        ):
            await refuses(function, trio.ClosedResourceError, "closed")
    [listener] = await trio_ucx.open_ucx_listeners(0, host="127.0.0.1", worker=worker)
    raw = await open_raw_listener(worker)
    await listener.aclose()
    await raw.aclose()
    await refuses(listener.accept, trio.ClosedResourceError, "listener was closed")
    await refuses(raw.accept_request, trio.ClosedResourceError, "listener was closed")
    assert [request async for request in raw] == []
    async with ucp.open_worker(config={"TLS": "tcp"}) as other:
        address = other.address
    for function in (
        lambda: other.tag_receive(bytearray(1), 1),
        lambda: other.tag_probe(1),
        other.flush,
        lambda: other.open_endpoint(address),
        lambda: other.open_listener(None, 0),
        other.open_request_group,
        lambda: trio_ucx.connect("127.0.0.1:1", worker=other),
        lambda: trio_ucx.open_ucx_listeners(0, worker=other),
    ):
        await refuses(function, trio.ClosedResourceError, "worker was closed")
    assert "closed" in repr(other)


async def test_raw_operations(worker: ucp.Worker) -> None:
    async with open_raw_pair(worker) as (client, server):
        for data, kind, match in BAD_DATA:
            await refuses(lambda data=data: client.tag_send(data, 1), kind, match)
            await refuses(lambda data=data: client.tag_send_sync(data, 1), kind, match)
        for buffer, kind, match in BAD_BUFFERS:
            await refuses(lambda buffer=buffer: worker.tag_receive(buffer, 1), kind, match)
        buffer = bytearray(10)
        for tag, kind, match in BAD_RAW_TAGS:
            await refuses(lambda tag=tag: client.tag_send(b"x", tag), kind, match)
            await refuses(lambda tag=tag: worker.tag_receive(buffer, tag), kind, match)
            await refuses(lambda tag=tag: worker.tag_probe(tag), kind, match)
            if tag is not None:  # a mask of None means all bits
                await refuses(lambda tag=tag: worker.tag_receive(buffer, 0, tag), kind, match)
                await refuses(lambda tag=tag: worker.tag_probe(0, tag), kind, match)
        await client.tag_send(bytes(20), 1)
        await until(lambda: worker.tag_probe(1) is not None)
        probed = worker.tag_probe(1)
        assert probed is not None and (probed.length, probed.sender_tag) == (20, 1)
        await refuses(lambda: worker.tag_receive_message(probed, buffer), ValueError, "remove=True")
        await refuses(lambda: worker.tag_receive_message(None, buffer), TypeError, "tag_probe")
        removed = worker.tag_probe(1, remove=True)
        assert removed is not None and worker.tag_probe(1) is None
        await refuses(lambda: worker.tag_receive_message(removed, buffer), trio_ucx.UCXError, "20 bytes .* of 10")
        with few_allocations():
            await refuses(lambda: worker.tag_receive_message(removed, [bytearray(10), bytearray(10)]), MemoryError, "")
        assert await worker.tag_receive_message(removed, bytearray(20)) == (20, 1)
        await refuses(lambda: worker.tag_receive_message(removed, bytearray(20)), ValueError, "once")
        await client.tag_send(bytes(20), 2)
        await refuses(lambda: worker.tag_receive(buffer, 2), trio_ucx.UCXError, "longer than the buffer of 10")
        await refuses(lambda: client.aclose("FLUSH"), TypeError, "CloseMode")
        await client.tag_send(b"works", 3)
        assert await worker.tag_receive(buffer, 3) == (5, 3)
        assert server.alive


async def test_addresses(worker: ucp.Worker) -> None:
    for address, kind, match in (
        ("localhost", ValueError, "host:port"),
        ("host:", ValueError, "host:port"),
        (":1", ValueError, "host:port"),
        ("host:http", ValueError, "host:port"),
        ("::1:80", ValueError, "brackets"),
        ("host:65536", ValueError, "between 0 and 65535"),
        (("host", -1), ValueError, "between 0 and 65535"),
        (("host", "80"), TypeError, "port must be an integer"),
        ((b"host", 80), TypeError, "host must be a str"),
        (("host",), ValueError, "pair"),
        (80, TypeError, "address is"),
        (None, TypeError, "address is"),
    ):
        await refuses(lambda address=address: trio_ucx.connect(address, worker=worker), kind, match)
        await refuses(lambda address=address: worker.open_endpoint(address), kind, match)
    good = bytes(worker.address)
    assert ucp.WorkerAddress(good) == worker.address == ucp.WorkerAddress(bytearray(good))
    assert hash(ucp.WorkerAddress(good)) == hash(worker.address)
    for bad in (b"", b"garbage", good[:-1], good + b"x", good[:5] + bytes([good[5] ^ 1]) + good[6:], bytes(200)):
        await refuses(lambda bad=bad: ucp.WorkerAddress(bad), ValueError, "no worker address")
    await refuses(lambda: ucp.WorkerAddress("text"), TypeError, "made from bytes")
    for wrong in (5, "text", None):
        await refuses(lambda wrong=wrong: ucp.WorkerAddress.from_ucx(wrong), TypeError, "is bytes")
    await refuses(lambda: trio_ucx.connect(worker.address, worker=worker), TypeError, "address is")
    await refuses(lambda: worker.open_endpoint(("::1", 80)), OSError, "inet6,inet")
    await refuses(lambda: worker.open_listener("::1", 0), OSError, "inet6,inet")
    await refuses(lambda: trio_ucx.open_ucx_stream("no.such.host.invalid", 80), OSError, "no.such.host")


async def test_listening(worker: ucp.Worker) -> None:
    [listener] = await trio_ucx.open_ucx_listeners(0, host="127.0.0.1", worker=worker)
    worker.admit("127.0.0.1")
    async with listener:
        for open_one in (
            lambda: trio_ucx.open_ucx_listeners(listener.address[1], host="127.0.0.1", worker=worker),
            lambda: worker.open_listener(*listener.address),
        ):
            with pytest.raises(OSError) as caught:
                await open_one()
            assert caught.value.errno == errno.EADDRINUSE
    with pytest.raises(OSError, match="listening at 192.0.2.1") as caught:
        await worker.open_listener("192.0.2.1", 0)
    assert caught.value.errno == errno.EADDRNOTAVAIL
    await refuses(lambda: worker.open_listener(b"127.0.0.1", 0), TypeError, "host")
    for port in (-1, 65536):
        await refuses(lambda port=port: trio_ucx.open_ucx_listeners(port), ValueError, "port")
    await refuses(lambda: trio_ucx.open_ucx_listeners("80"), TypeError, "port")
    await refuses(lambda: trio_ucx.open_ucx_listeners(0, backlog=0), ValueError, "backlog")


async def test_options(worker: ucp.Worker) -> None:
    for options, kind in (
        ({"window": 0}, ValueError),
        ({"window": -5}, ValueError),
        ({"window": 1e6}, TypeError),
        ({"close_timeout": -1}, ValueError),
        ({"close_timeout": "1"}, TypeError),
        ({"connect_timeout": -1}, ValueError),
        ({"connect_timeout": float("nan")}, ValueError),
        ({"connect_timeout": None}, TypeError),
        ({"max_message_size": -1}, ValueError),
        ({"worker": "worker"}, TypeError),
    ):
        name = next(iter(options))
        given: dict[str, Any] = {"worker": worker, **options}
        await refuses(lambda given=given: trio_ucx.connect("127.0.0.1:1", **given), kind, name)
        await refuses(lambda given=given: trio_ucx.open_ucx_stream("127.0.0.1", 1, **given), kind, name)
        await refuses(lambda given=given: trio_ucx.open_ucx_listeners(0, **given), kind, name)


async def test_classes_are_not_called() -> None:
    for name in ("Worker", "Endpoint", "Context", "RawListener", "ConnectionRequest", "RequestGroup", "Request"):
        await refuses(getattr(ucp, name), TypeError, "no public constructor")
    for name in ("Connection", "Listener", "Messages"):
        await refuses(getattr(trio_ucx, name), TypeError, "no public constructor")


async def test_another_thread(transports: str) -> None:
    """Everything is refused, closing included, and has no effect."""
    async with (
        ucp.open_worker(config={"TLS": transports}, features=ucp.Feature.ALL) as worker,
        open_pair(worker) as (client, server),
        open_raw_pair(worker) as (raw, raw_server),
        await open_raw_listener(worker) as raw_listener,
        worker.open_active_messages(3) as queue,
        AsyncExitStack() as stack,
    ):
        [listener] = await trio_ucx.open_ucx_listeners(0, host="127.0.0.1", worker=worker)
        memory = worker.context.allocate(8)
        remote = raw.attach(memory.descriptor)
        chain = worker.new_chain()
        group = await stack.enter_async_context(worker.open_request_group())
        request = group.tag_receive(bytearray(10), 99)
        group.am_send(raw_server, 3, bytes(100_000), protocol=ucp.SendProtocol.EAGER)
        eager = await queue.receive()
        group.am_send(raw_server, 3, bytes(10), protocol=ucp.SendProtocol.RENDEZVOUS)
        rendezvous = await queue.receive()
        await raw_server.stream_send(b"stream")
        stream_data = await raw.stream_receive_some()
        failures: list[BaseException] = []

        async def misuse() -> None:
            for function in (
                lambda: client.send(b"x"),
                client.receive,
                lambda: client.send_nowait(b"x"),
                lambda: worker.tag_receive(bytearray(1), 1),
                lambda: worker.tag_probe(1),
                lambda: trio_ucx.connect("127.0.0.1:1", worker=worker),
                *(closable.aclose for closable in (client, raw, listener, raw_listener)),
                *(client.abort, raw.abort, chain.close, remote.close, lambda: queue.__exit__(None, None, None)),
                *(request.cancel, eager.release, rendezvous.release, stream_data.release),
            ):
                try:
                    result = function()
                    if isinstance(result, Awaitable):
                        await result
                except RuntimeError as error:
                    failures.append(error)

        await trio.to_thread.run_sync(trio.run, misuse)
        assert len(failures) == 19
        assert eager.data == bytes(100_000)
        assert await rendezvous.receive() == bytes(10)
        assert bytes(stream_data) == b"stream"
        for piece in (eager, stream_data):
            piece.release()
        request.cancel()
        assert all("another thread" in str(failure) for failure in failures)
        await works(client, server)
        await raw.tag_send(b"raw", 1)
        assert await worker.tag_receive(bytearray(3), 1) == (3, 1)
        assert await remote.get() == bytes(8)
        got = chain.get(remote, 0, 8)
        assert (await chain.run())[got].unwrap() == bytes(8)
        await raw_server.am_send(3, b"message")
        async with trio_ucx.connect(listener.address, worker=worker) as another:
            async with await listener.accept() as accepted:
                await works(another, accepted)
        with await queue.receive() as message:
            assert await message.receive() == b"message"
        chain.close()
        remote.close()
        memory.close()
        await listener.aclose()


async def test_forked_child(worker: ucp.Worker) -> None:
    async with open_pair(worker) as (client, server):
        await works(client, server)
        read, write = os.pipe()
        child = os.fork()
        if child == 0:
            verdict = b"not run"
            try:
                caught = []
                for function in (
                    lambda: client.send_nowait(b"x"),
                    client.receive_nowait,
                    lambda: worker.tag_probe(1),
                    worker.open_request_group,
                ):
                    try:
                        function()
                    except RuntimeError as error:
                        caught.append("fork" in str(error))
                client.abort()
                client.__del__()
                del client, server
                verdict = b"good" if caught == [True] * 4 else repr(caught).encode()
            except BaseException:
                verdict = traceback.format_exc().encode()
            finally:
                os.write(write, verdict)
                os._exit(0)
        os.close(write)
        os.waitpid(child, 0)
        with open(read, "rb") as pipe:
            assert pipe.read() == b"good"
        await works(client, server)


async def test_context_options() -> None:
    before = dict(os.environ)
    for config, kind, match in (
        ({"NO_SUCH_OPTION": 1}, ValueError, "does not know an option 'NO_SUCH_OPTION'"),
        ({"RNDV_THRESHOLD": "1k"}, ValueError, "did you mean RNDV_THRESH"),
        ({"UCX_TLS": "tcp"}, ValueError, "without their prefix: 'TLS'"),
        ({"RNDV_THRESH": "many"}, ValueError, "cannot take 'many'"),
        ({"TLS": None}, TypeError, "value of UCX option TLS"),
        ({7: "x"}, TypeError, "must be a str"),
        ("TLS=tcp", TypeError, "mapping"),
        ({"TLS": "tc\0p"}, ValueError, "null"),
    ):
        with pytest.raises(kind, match=match), ucp.open_context(config):
            pass
    with pytest.raises(trio_ucx.UCXError, match="nonsense"), ucp.open_context({"TLS": "nonsense"}):
        pass
    with ucp.open_context({"TLS": "tcp", "MM_ERROR_HANDLING": False}) as context:
        assert context.config["MM_ERROR_HANDLING"] == "n"
        with pytest.raises(ValueError, match="open_context"):
            async with ucp.open_worker(context=context, config={"TLS": "tcp"}):
                pass
    with pytest.raises(RuntimeError, match="closed"):
        context.info_text()
    with ucp.open_context({"TLS": "tcp"}, features=ucp.Feature.AM) as context:
        async with ucp.open_worker(context=context) as worker:
            with pytest.raises(ValueError, match="the feature TAG"):
                await trio_ucx.open_ucx_listeners(0, worker=worker)
    with pytest.raises(TypeError, match="Context"):
        async with ucp.open_worker(context="context"):  # type: ignore[arg-type]
            pass
    assert dict(os.environ) == before


@pytest.mark.parametrize("feature", [ucp.Feature.TAG, ucp.Feature.STREAM])
async def test_features_that_the_context_lacks(feature: ucp.Feature) -> None:
    """UCX would print a backtrace for some, and crash with others."""
    with ucp.open_context({"TLS": "tcp"}, features=ucp.Feature.ALL) as able, able.allocate(1) as memory:
        descriptor = memory.descriptor
    async with ucp.open_worker(config={"TLS": "tcp"}, features=feature) as worker:
        endpoint = await worker.open_endpoint(worker.address)
        uses: list[tuple[ucp.Feature, Callable[[], Any]]] = [
            (ucp.Feature.AM, lambda: endpoint.am_send(1, b"x")),
            (ucp.Feature.AM, lambda: worker.open_active_messages(1)),
            (ucp.Feature.AM, lambda: worker.context.register(bytearray(1))),
            (ucp.Feature.AM, lambda: worker.context.allocate(1)),
            (ucp.Feature.AM, lambda: endpoint.attach(descriptor)),
            (ucp.Feature.STREAM, lambda: endpoint.stream_send(b"x")),
            (ucp.Feature.STREAM, lambda: endpoint.stream_receive(bytearray(1))),
            (ucp.Feature.STREAM, lambda: endpoint.stream_receive_some()),
            (ucp.Feature.STREAM, lambda: worker.wait_stream_ready()),
            (ucp.Feature.TAG, lambda: endpoint.tag_send(b"x", 1)),
            (ucp.Feature.TAG, lambda: endpoint.tag_send_sync(b"x", 1)),
            (ucp.Feature.TAG, lambda: worker.tag_receive(bytearray(1), 1)),
            (ucp.Feature.TAG, lambda: worker.tag_probe(1)),
        ]
        for needed, use in uses:
            if needed is not feature:
                await refuses(use, RuntimeError, f"Feature.{needed.name}, and this context was opened without")
        endpoint.abort()


async def test_names_ids_and_keepalive(worker: ucp.Worker) -> None:
    for options, kind, match in (
        ({"name": ""}, ValueError, "1 to 31 bytes"),
        ({"name": "x" * 32}, ValueError, "1 to 31 bytes"),
        ({"name": "a\0b"}, ValueError, "null"),
        ({"name": b"bytes"}, TypeError, "name must be a str"),
        ({"client_id": 0}, ValueError, "client_id must be between 1 and"),
        ({"client_id": 2**64}, ValueError, "client_id"),
        ({"client_id": "1"}, TypeError, "client_id"),
        ({"keepalive_interval": -1}, ValueError, "keepalive_interval"),
        ({"keepalive_interval": "1s"}, TypeError, "keepalive_interval"),
        ({"keepalive_interval": 1, "config": {"KEEPALIVE_INTERVAL": "1s"}}, ValueError, "either keepalive_interval="),
        ({"keepalive_interval": 1, "context": worker.context}, ValueError, "keepalive_interval= to open_context"),
        ({"features": ucp.Feature.TAG, "context": worker.context}, ValueError, "features= to open_context"),
    ):
        given: dict[str, Any] = dict(options)
        with pytest.raises(kind, match=match):
            async with ucp.open_worker(**given):
                pass
    with pytest.raises(ValueError, match="1 to 31 bytes"), ucp.open_context(name="x" * 32):
        pass


async def test_endpoint_options(worker: ucp.Worker) -> None:
    async with await open_raw_listener(worker) as listener:
        for options, kind, match in (
            ({"name": 5}, TypeError, "name must be a str"),
            ({"error_mode": "peer"}, TypeError, "ErrorMode"),
            ({"local_address": 5}, TypeError, "local_address must be a str"),
            ({"local_address": "localhost"}, ValueError, "numeric IP address"),
        ):
            given: dict[str, Any] = dict(options)
            await refuses(lambda given=given: worker.open_endpoint(listener.address, **given), kind, match)
        endpoint = await worker.open_endpoint(listener.address)
        request = await listener.accept_request()
        await refuses(lambda: request.accept(name="x" * 32), ValueError, "1 to 31 bytes")
        await refuses(lambda: request.accept(error_mode=1), TypeError, "ErrorMode")
        with few_allocations():
            await refuses(request.accept, OSError, "memory")
        server = await request.accept()  # it is still to be answered
        await refuses(lambda: endpoint.evaluate(-1), ValueError, "nbytes")
        await refuses(lambda: endpoint.evaluate(1.5), TypeError, "nbytes")
        server.abort()
        endpoint.abort()


async def test_local_address(worker: ucp.Worker) -> None:
    for local, kind in (("localhost", ValueError), ("", ValueError), ("127.0.0.1:80", ValueError), (5, TypeError)):
        given: dict[str, Any] = {"worker": worker, "local_address": local}
        await refuses(lambda given=given: trio_ucx.open_ucx_stream("127.0.0.1", 1, **given), kind, "local_address")
        await refuses(lambda given=given: trio_ucx.connect("127.0.0.1:1", **given), kind, "local_address")
    await refuses(lambda: worker.open_endpoint(worker.address, local_address="127.0.0.1"), ValueError, "worker address")
    await refuses(lambda: trio_ucx.connect("unix:/x", local_address="127.0.0.1"), ValueError, "Unix socket")


async def test_no_transport_in_common() -> None:
    async with ucp.open_worker(config={"TLS": "tcp"}) as worker:
        async with open_listener(worker) as listener, ucp.open_worker(config={"TLS": "sm,self"}) as other:
            with pytest.raises(trio_ucx.NotAdmitted, match=r"no shared memory.*no other transport: add tcp"):
                await trio_ucx.open_ucx_stream(*listener.address, worker=other)


async def test_connect_to_a_port_where_nobody_listens(worker: ucp.Worker) -> None:
    with socket.socket() as bound, pytest.raises(OSError) as caught:
        bound.bind(("127.0.0.1", 0))
        await trio_ucx.open_ucx_stream(*bound.getsockname(), worker=worker, connect_timeout=2)
    assert isinstance(caught.value, (ConnectionRefusedError, TimeoutError))


async def test_accepting_on_what_is_no_worker(worker: ucp.Worker) -> None:
    async with await open_raw_listener(worker) as listener:
        client = await worker.open_endpoint(listener.address)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(client.flush)
            request = await listener.accept_request()
            with pytest.raises(TypeError, match="worker must be a Worker, not str"):
                await request.accept("the worker")  # type: ignore[arg-type]
            server = await request.accept()
        client.abort()
        server.abort()
