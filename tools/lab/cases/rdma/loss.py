"""A peer's process is killed, or the link of its machine goes down; guest 0 has the process, and guest 1 notices."""

from __future__ import annotations

import subprocess
import sys
import time
from functools import partial

import trio
from common import KEY, PARTS, PEER, RANK, Losses, get, main, put, shell

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
            status = child.poll()
            child.kill()
            ends = [line for line in child.stderr.read().decode().splitlines() if "Fatal" in line]
            return f"its process ended: {status}; {ends}" if status else ""
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


for name, *arguments in (
    ("idle", b"idle", False),
    ("reading", b"read", True),
    ("unread", b"idle", True),
    ("idle_link", b"idle", False, True),
    ("reading_link", b"read", True, True),
):
    PARTS[name] = partial(lose, name, *arguments)
if "--serve" in sys.argv:
    trio.run(serve, sys.argv[-1])
else:
    main()
