"""What programs do with a Connection, between two ranks, over whatever UCX_TLS names. Rank 0 serves."""

from __future__ import annotations

import hashlib
import os
import random
import resource
from contextlib import suppress
from functools import partial

import numpy as np
import trio
from common import KEY, PEER, RANK, TWO_GUESTS, barrier, connected, echo, get, main, part, put

import trio_ucx
from trio_ucx import rpc

SLOW = TWO_GUESTS and "rc" in os.environ.get("UCX_TLS", "")
LARGE = 1 << 20 if SLOW or "LAB_QUICK" in os.environ else 16 << 20
SIZES = [0, 1, 8, 1000, 4095, 4096, 8191, 8192, 65_535, 65_536, 66_559, 66_560, 66_561, 262_144, (1 << 20) + 7, LARGE]


def made(size: int, seed: int = 0) -> bytes:
    return np.random.default_rng(seed + size).integers(0, 256, size, dtype=np.uint8).tobytes()


async def send_and_receive(c, data, back):
    async with trio.open_nursery() as nursery:
        nursery.start_soon(c.send, data)
        assert await c.receive(max_size=1 << 28) == back, len(data)


@part
async def messages():
    async def client(c):
        for size in SIZES:
            await send_and_receive(c, made(size), made(size))
        return c.transports

    return await connected("messages", echo, client)


@part
async def buffers():
    """Into the user's buffers, gathered and scattered."""

    async def client(c):
        for size in SIZES:
            buffer = bytearray(size + 3)
            async with trio.open_nursery() as nursery:
                nursery.start_soon(c.send, made(size))
                assert await c.receive_into(buffer) == size
            assert buffer[:size] == made(size)
            one, two = bytearray(size), bytearray(size + 1)
            async with trio.open_nursery() as nursery:
                nursery.start_soon(c.send, [made(size), b"x", made(size, 5)])
                assert await c.receive_into([one, two]) == 2 * size + 1
            assert one + two == made(size) + b"x" + made(size, 5), size

    return await connected("buffers", echo, client)


@part
async def order():
    """300 messages of random lengths on three tags, each in order."""
    draw = random.Random(5)
    sizes = [draw.choice([0, 8, 100, 5000, 9000, 70_000, 200_000]) for _ in range(300)]

    async def handler(c):
        async def read(tag):
            for number in range(tag, len(sizes), 3):
                data = await c.receive(tag=tag)
                assert (len(data), int.from_bytes(data[:4], "big")) == (sizes[number] + 4, number)

        async with trio.open_nursery() as nursery:
            for tag in range(3):
                nursery.start_soon(read, tag)
        await c.send(b"done")

    async def client(c):
        for number, size in enumerate(sizes):
            await c.send(number.to_bytes(4, "big") + bytes(size), tag=number % 3)
        assert await c.receive() == b"done"

    return await connected("order", handler, client)


@part
async def nowait():
    async def handler(c):
        total = 0
        for _ in range(1000):
            total += int.from_bytes(await c.receive(), "little")
        await c.send(total.to_bytes(8, "little"))

    async def client(c):
        for number in range(1000):
            try:
                c.send_nowait(number.to_bytes(4, "little"))
            except trio.WouldBlock:
                await c.send(number.to_bytes(4, "little"))
        assert int.from_bytes(await c.receive(), "little") == 999 * 500

    return await connected("nowait", handler, client)


@part
async def byte_stream():
    async def handler(c):
        digest = hashlib.sha256()
        async for data in c:
            digest.update(data)
        await c.send_all(digest.digest())
        await c.send_eof()
        await c.wait_closed()

    async def client(c):
        digest = hashlib.sha256()
        for size in SIZES:
            digest.update(made(size))
            await c.send_all(made(size))
        await c.send_eof()
        assert b"".join([data async for data in c]) == digest.digest()

    return await connected("byte_stream", handler, client)


@part
async def arrays():
    def sent():
        yield np.arange(60).reshape(3, 4, 5)[:, ::2]
        yield np.asfortranarray(np.ones((3, 1000), ">f4"))
        yield np.arange(300_000, dtype="<c16")

    async def handler(c):
        for _ in sent():
            await c.send_array(await c.receive_array())
        await c.send_arrays(await c.receive_arrays())
        await c.wait_closed()

    async def client(c):
        for array in sent():
            await c.send_array(array)
            got = await c.receive_array()
            assert got.dtype == array.dtype and got.shape == array.shape and (got == array).all()
        with suppress(ValueError):
            await c.send_array(np.zeros(1, np.longdouble))  # which differ between processors
            raise AssertionError("long doubles were sent")
        await c.send_arrays({"w": np.ones((30, 30)), "s": np.array(7)})
        got = await c.receive_arrays()
        assert sorted(got) == ["s", "w"] and got["s"] == 7 and got["w"].sum() == 900

    return await connected("arrays", handler, client)


@part
async def requests():
    async def handler(c):
        async for channel in c.conversations():
            await channel.send(await channel.receive())

    async def client(c):
        for size in 0, 100, 100_000, 1 << 20:
            assert await c.request(made(size), timeout=60) == made(size)
        try:
            with trio.fail_after(0.3):
                await c.receive()
        except trio.TooSlowError:
            assert await c.ping() < 30

    return await connected("requests", handler, client)


class Store(rpc.Service):
    @rpc.method
    async def add(self, call: rpc.Call, a: int, b: int) -> int:
        return a + b

    @rpc.stream
    async def count(self, call: rpc.Call, until: int):
        for number in range(until):
            yield number

    @rpc.method
    async def double(self, call: rpc.Call) -> rpc.Reply:
        [array] = call.arrays()
        return rpc.Reply("ok", buffers=[array * 2])

    @rpc.method
    async def forever(self, call: rpc.Call) -> int:
        await trio.sleep_forever()


@part
async def calls():
    if RANK == 0:
        async with trio.open_nursery() as nursery:
            serve = partial(trio_ucx.serve_ucx, rpc.serving(Store()), 0, host="0.0.0.0", authkey=KEY)
            server = await nursery.start(serve)
            put("port.calls", server.address[1])
            await barrier("done.calls")
            nursery.cancel_scope.cancel()
        return
    address = f"{PEER}:{await get('port.calls')}"
    try:
        async with rpc.connect(address, service=Store, authkey=KEY, connect_timeout=60) as client:
            assert await client.call("add", a=1, b=2) == 3
            async with client.stream("count", until=100) as numbers:
                assert [number async for number in numbers] == list(range(100))
            reply = await client.call("double", buffers=[np.arange(50_000)])
            assert (reply.arrays()[0] == np.arange(50_000) * 2).all()
            try:
                await client.call("forever", timeout=0.5)
            except rpc.CallTimedOut as error:
                assert error.may_have_run
    finally:
        await barrier("done.calls")


# ---- remote memory ----


async def expose(c, allocated):
    size = LARGE + (8 << 20)
    context = c.worker.context
    with context.allocate(size) if allocated else context.register(bytearray(size)) as memory:
        memory.memoryview[:] = bytes(size)
        await c.send(memory.descriptor)
        async with trio.open_nursery() as nursery:

            async def notes():
                async for note in memory.notifications():
                    await c.send(note.data + bytes(memory.memoryview[:4]), tag=3)

            nursery.start_soon(notes)
            await c.wait_closed()
            nursery.cancel_scope.cancel()


async def use_memory(c):
    with await c.attach(await c.receive()) as remote:
        for size in SIZES[1:]:
            await remote.put(made(size), offset=64)
            await remote.flush()
            assert await remote.get(offset=64, nbytes=size) == made(size), size
            into = bytearray(size)
            await remote.get_into(into, offset=64)
            assert into == made(size), size
        mine = bytearray(made(1 << 20))
        plan = remote.plan(mine, block=65536)
        await plan.put(list(range(16)), list(range(100, 116)), notify=b"blocks")
        assert (await c.receive(tag=3))[:6] == b"blocks"
        other = bytearray(1 << 20)
        await remote.plan(other, block=65536).get(list(range(100, 116)), list(range(16)))
        assert other == mine
        await remote.put_blocks([(0, b"here"), (5000, b"y" * 70_000)])
        await remote.notify(b"row")
        assert await c.receive(tag=3) == b"rowhere"
        assert await remote.get(offset=5000, nbytes=70_000) == b"y" * 70_000


@part
async def allocated_memory():
    return await connected("allocated", partial(expose, allocated=True), use_memory)


@part
async def registered_memory():
    return await connected("registered", partial(expose, allocated=False), use_memory)


@part
async def chains():
    async def client(c):
        with await c.attach(await c.receive()) as remote:
            await remote.put((7).to_bytes(8, "little") + bytes(8), offset=0)
            await remote.flush()
            chain = c.worker.new_chain(capacity=16)
            head = chain.get(remote, offset=0, length=64)
            chain.put(remote, b"seven", offset=64, when=head.u8(0) == 7)
            slot = chain.fetch_add(remote, 1, offset=8)
            chain.put(remote, b"a row", offset=slot.u64() * 64 + 512)
            (await chain.run()).values()
            await remote.flush()
            assert await remote.get(offset=64, nbytes=5) == b"seven"
            assert await remote.get(offset=512, nbytes=5) == b"a row"
            chain.close()

    return await connected("chains", partial(expose, allocated=True), client)


@part
async def atomics():
    async def client(c):
        with await c.attach(await c.receive()) as remote:
            drawn = []

            async def draw():
                for _ in range(25):
                    drawn.append(await remote.fetch_add(1, offset=0))

            async with trio.open_nursery() as nursery:
                for _ in range(4):
                    nursery.start_soon(draw)
            assert sorted(drawn) == list(range(100))
            for bits in 32, 64:
                await remote.put(bytes(8), offset=8)
                await remote.flush()
                assert await remote.fetch_add(5, offset=8, bits=bits) == 0
                assert await remote.compare_swap(5, 2**bits - 1, offset=8, bits=bits) == 5
                assert await remote.fetch_add(2, offset=8, bits=bits) == 2**bits - 1
                assert await remote.fetch_add(0, offset=8, bits=bits) == 1

    return await connected("atomics", partial(expose, allocated=True), client)


# ---- cancellation, backpressure, the end ----


@part
async def cancelled_sends():
    """A send that is cancelled before it is received arrives whole, or not at all; later ones arrive in order."""

    async def handler(c):
        await c.receive(tag=4)
        await trio.sleep(1)
        seen = []
        while not seen or seen[-1] != 200:
            message = await c.receive(tag=1, max_size=1 << 28)
            assert message == made(len(message))
            seen.append(len(message))
        assert seen[-2:] == [100, 200] and set(seen[:-2]) <= {LARGE}, seen
        await c.send(b"done")
        return f"arrived: {seen}"

    async def client(c):
        cancelled = 0
        for _ in range(3):
            with trio.move_on_after(0.05) as scope:
                await c.send(made(LARGE), tag=1)
            cancelled += scope.cancelled_caught
        await c.send(b"go", tag=4)
        await c.send(made(100), tag=1)
        await c.send(made(200), tag=1)
        assert await c.receive() == b"done"
        return f"{cancelled} of 3 cancelled"

    return await connected("cancelled_sends", handler, client)


@part
async def cancelled_receives():
    """A receive that is cancelled while a large message is on its way loses nothing."""

    async def handler(c):
        for number in range(3):
            await c.send(made(LARGE, number))
        await c.wait_closed()

    async def client(c):
        cancelled = 0
        for number in range(3):
            wait = 0.001
            while True:
                buffer = bytearray(LARGE)
                with trio.move_on_after(wait) as scope:
                    assert await c.receive_into(buffer) == LARGE
                if not scope.cancelled_caught:
                    break
                cancelled += 1
                wait *= 2
            assert buffer == made(LARGE, number), number
        return f"{cancelled} cancelled"

    return await connected("cancelled_receives", handler, client)


@part
async def backpressure():
    async def handler(c):
        await trio.sleep(2)
        for number in range(100):
            assert (await c.receive())[0] == number
        await c.send(b"all")

    async def client(c):
        for number in range(100):
            await c.send(bytes([number]) * 30_000)
        assert await c.receive() == b"all"

    return await connected("backpressure", handler, client)


@part
async def idle():
    async def client(c):
        await c.ping()
        await trio.sleep(1)
        before = resource.getrusage(resource.RUSAGE_SELF)
        await trio.sleep(5)
        after = resource.getrusage(resource.RUSAGE_SELF)
        used = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
        assert used < 0.5, used
        return f"{used / 5:.2%} of a core"

    return await connected("idle", lambda c: c.wait_closed(), client)


@part
async def close():
    """What was sent before the close arrives."""

    async def handler(c):
        await trio.sleep(1)
        assert sum([len(message) async for message in c.messages()]) == 8 + 100_000 + LARGE

    async def client(c):
        for size in 8, 100_000, LARGE:
            await c.send(made(size))

    return await connected("close", handler, client)


@part
async def abort():
    async def handler(c):
        while True:
            await c.receive(max_size=1 << 28)

    async def client(c):
        async with trio.open_nursery() as nursery:

            async def send():
                with suppress(trio.ClosedResourceError):
                    await c.send(made(LARGE))

            nursery.start_soon(send)
            await trio.sleep(0.01)
            c.abort()

    return await connected("abort", handler, client, ends=trio_ucx.PeerLost)


main()
