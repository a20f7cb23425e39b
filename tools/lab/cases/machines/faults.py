"""Faults of the network between two machines: a connection survives them with right data, or its loss is noticed."""

from __future__ import annotations

import hashlib
import random
import time
from functools import partial

import trio
from common import Losses, ask_host, connected, echo, main, part, shell

import trio_ucx

BIG = random.Random(1).randbytes(1 << 20)
#: Seconds after which a vanished peer must have been noticed, with this keepalive.
NOTICED = 25
KEEPALIVE = 5


async def serve(c):
    """Echoes tag 0; tag 1 gets the hash of what it sends; tag 2, the descriptor of memory."""
    with c.worker.context.allocate(8 << 20) as memory:

        async def hashes():
            async for data in c.messages(1):
                await c.send(hashlib.sha256(data).digest() + data[:8], tag=1)

        await c.send(memory.descriptor, tag=2)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(hashes)
            await echo(c)
            await c.wait_closed()
            nursery.cancel_scope.cancel()


async def traffic(c, seconds):
    """Numbered messages, small ones and large ones, each compared with its answer. Returns the longest waits."""
    end = time.monotonic() + seconds
    longest = {0: 0.0, 1: 0.0}

    async def talk(tag):
        number = 0
        while time.monotonic() < end:
            began = time.monotonic()
            data = number.to_bytes(8, "big") + (BIG if tag else b"")
            await c.send(data, tag=tag)
            expected = hashlib.sha256(data).digest() + data[:8] if tag else data
            assert await c.receive(tag=tag) == expected
            longest[tag] = max(longest[tag], time.monotonic() - began)
            number += 1
            await trio.sleep(0.03)

    async with trio.open_nursery() as nursery:
        nursery.start_soon(talk, 0)
        nursery.start_soon(talk, 1)
    return f"longest waits {longest[0]:.1f} s, {longest[1]:.1f} s"


async def survives(name, begin, end=None, during=8.0, after=4.0):
    """The fault begins after two seconds of traffic; the connection must outlive it."""

    async def client(c):
        notes = []
        async with trio.open_nursery() as nursery:

            async def talk():
                notes.append(await traffic(c, 2 + during + after))

            nursery.start_soon(talk)
            await trio.sleep(2)
            await begin()
            await trio.sleep(during)
            if end is not None:
                await end()
        return notes[0]

    return await connected(name, serve, client, keepalive_interval=KEEPALIVE)


async def is_noticed(name, begin, seconds):
    """The peer vanishes for so many seconds: whatever waits for it must end."""

    async def client(c):
        losses = Losses()
        with await c.attach(await c.receive(tag=2)) as remote:
            await c.send(b"x")
            await c.receive()
            began = time.monotonic()
            async with trio.open_nursery() as nursery:
                nursery.start_soon(losses.note, "receive", c.receive)
                nursery.start_soon(losses.note, "send", partial(c.send, BIG, tag=1))
                nursery.start_soon(losses.note, "get", partial(remote.get, offset=0, nbytes=1 << 20))
                await begin()
        await trio.sleep(max(0, seconds + 3 - (time.monotonic() - began)))
        return losses.check(("receive", "send", "get"), began, NOTICED)

    ends = (trio_ucx.PeerLost, trio_ucx.UCXError)
    return await connected(name, serve, client, ends=ends, keepalive_interval=KEEPALIVE, check=False)


def netem(options):
    return partial(shell, f"tc qdisc add dev eth0 root netem {options}"), partial(shell, "tc qdisc del dev eth0 root")


@part
async def cable_out_for_2_seconds():
    return await survives("cable2", partial(ask_host, "cable 2"))


@part
async def cable_out_for_40_seconds():
    return await is_noticed("cable40", partial(ask_host, "cable 40"), 40)


@part
async def stopped_for_4_seconds():
    return await survives("stop4", partial(ask_host, "stop 0 4"))


@part
async def stopped_for_40_seconds():
    return await is_noticed("stop40", partial(ask_host, "stop 0 40"), 40)


@part
async def loss_of_1_percent():
    return await survives("loss1", *netem("loss 1%"))


@part
async def loss_of_10_percent():
    return await survives("loss10", *netem("loss 10%"))


@part
async def delay_reordering_duplicates():
    return await survives("delay", *netem("delay 100ms 30ms reorder 25% duplicate 5%"))


@part
async def corruption():
    return await survives("corrupt", *netem("corrupt 3%"))


@part
async def nothing_gets_out_for_3_seconds():
    return await survives("oneway", *netem("loss 100%"), during=3)


@part
async def low_rate():
    return await survives("rate", *netem("rate 2mbit"), after=10)


@part
async def clock_steps():
    return await survives("clock", partial(shell, "date -s '+1 hour'"), partial(shell, "date -s '-1 hour'"))


main(timeout=150)
