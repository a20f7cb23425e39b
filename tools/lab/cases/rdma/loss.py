"""A peer's process is killed over RDMA: idle, while it reads large messages, and while it leaves them unread."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from functools import partial

import trio
from common import ADDRESS, KEY, Losses, get, main, part, put

import trio_ucx

NOTICED = 15


async def serve(name: str) -> None:
    async def handler(c):
        if await c.receive() == b"read":
            async for _ in c.messages(1):
                pass
        await c.wait_closed()

    async with trio.open_nursery() as nursery:
        serve = partial(trio_ucx.serve_ucx, handler, 0, host=ADDRESS, authkey=KEY, on_handler_error="log")
        server = await nursery.start(serve)
        put(f"port.{name}", server.address[1])
        await trio.sleep_forever()


async def kill(name: str, how: bytes, sends: bool) -> str:
    with subprocess.Popen([sys.executable, __file__, "--serve", name]) as child:
        losses, waits = Losses(), ["receive", *(["send"] if sends else [])]
        address = f"{ADDRESS}:{await get(f'port.{name}')}"
        async with trio_ucx.connect(address, authkey=KEY, connect_timeout=60, keepalive_interval=3) as c:
            await c.send(how)
            async with trio.open_nursery() as nursery:
                nursery.start_soon(losses.note, "receive", c.receive)
                if sends:
                    nursery.start_soon(losses.note, "send", partial(c.send, bytes(4 << 20), tag=1))
                await trio.sleep(1)
                began = time.monotonic()
                child.send_signal(signal.SIGKILL)
        return losses.check(waits, began, NOTICED)


@part
async def idle():
    return await kill("idle", b"idle", False)


@part
async def reading():
    return await kill("reading", b"read", True)


@part
async def unread():
    return await kill("unread", b"idle", True)


if "--serve" in sys.argv:
    trio.run(serve, sys.argv[-1])
else:
    main()
