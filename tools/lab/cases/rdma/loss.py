"""A peer's process is killed, or the link of its machine goes down; guest 0 has the process, and guest 1 notices."""

from __future__ import annotations

import subprocess
import sys
import time
from functools import partial

import trio
from common import KEY, PEER, RANK, Losses, get, main, part, put, shell

import trio_ucx

NOTICED = 20


async def serve(name: str) -> None:
    async def handler(c):
        if await c.receive() == b"read":
            async for _ in c.messages(1):
                pass
        await c.wait_closed()

    async with trio.open_nursery() as nursery:
        options = {"host": "0.0.0.0", "authkey": KEY, "on_handler_error": "log", "keepalive_interval": 3}
        server = await nursery.start(partial(trio_ucx.serve_ucx, handler, 0, **options))
        put(f"port.{name}", server.address[1])
        await trio.sleep_forever()


async def lose(name: str, how: bytes, sends: bool, link: bool = False) -> str:
    if RANK == 0:
        with subprocess.Popen([sys.executable, __file__, "--serve", name], stderr=subprocess.PIPE) as child:
            await get(f"connected.{name}")
            put(f"begin.{name}")
            if link:
                await shell("ip link set eth0 down; sleep 25; ip link set eth0 up")
                said = f"its own process: {child.poll() or 'lives'}"
            child.kill()
            text = child.stderr.read().decode() if link else ""
            return f"{said}; {[line for line in text.splitlines() if 'atal' in line]}" if link else ""
    losses, waits = Losses(), ["receive", *(["send"] if sends else [])]
    address = f"{PEER}:{await get(f'port.{name}')}"
    async with trio_ucx.connect(address, authkey=KEY, connect_timeout=60, keepalive_interval=3) as c:
        await c.send(how)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(losses.note, "receive", c.receive)
            if sends:
                nursery.start_soon(losses.note, "send", partial(c.send, bytes(1 << 20), tag=1))
            await trio.sleep(1)
            put(f"connected.{name}")
            await get(f"begin.{name}")
            began = time.monotonic()
    return losses.check(waits, began, NOTICED)


@part
async def idle():
    return await lose("idle", b"idle", False)


@part
async def reading():
    return await lose("reading", b"read", True)


@part
async def unread():
    return await lose("unread", b"idle", True)


@part
async def idle_link():
    return await lose("idle_link", b"idle", False, link=True)


@part
async def reading_link():
    return await lose("reading_link", b"read", True, link=True)


if "--serve" in sys.argv:
    trio.run(serve, sys.argv[-1])
else:
    main()
