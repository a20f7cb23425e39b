"""100 connections, a fork, and meshes, over RDMA; one rank."""

from __future__ import annotations

import os
import subprocess
import sys
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path

import trio
from common import ADDRESS, KEY, echo, main, part

import trio_ucx

MESH = """
import numpy, trio
from trio_ucx import mesh

async def main():
    async with mesh.join() as group:
        total = await group.all_reduce(numpy.full(100_000, group.rank + 1), "sum")
        assert (total == group.size * (group.size + 1) // 2).all()
        await group.barrier()

trio.run(main)
"""


@asynccontextmanager
async def serving():
    async with trio.open_nursery() as nursery:
        serve = partial(trio_ucx.serve_ucx, echo, 0, host=ADDRESS, authkey=KEY)
        server = await nursery.start(serve)
        yield server.address
        nursery.cancel_scope.cancel()


async def round_trip(c, size):
    async with trio.open_nursery() as nursery:
        nursery.start_soon(c.send, b"a" * size)
        assert await c.receive() == b"a" * size


@part
async def hundred_connections():
    async with serving() as address:
        ready = 0
        all_ready = trio.Event()

        async def client():
            nonlocal ready
            async with trio_ucx.connect(address, authkey=KEY, connect_timeout=60) as c:
                await round_trip(c, 100)
                ready += 1
                if ready == 100:
                    all_ready.set()
                await all_ready.wait()

        async with trio.open_nursery() as nursery:
            for _ in range(100):
                nursery.start_soon(client)


@part
async def fork():
    """The parent goes on after a fork, whose child changes its copies of registered pages."""
    async with serving() as address, trio_ucx.connect(address, authkey=KEY) as c:
        await round_trip(c, 1 << 20)
        pid = os.fork()
        if pid == 0:
            data = bytearray(64 << 20)
            data[::4096] = b"x" * len(data[::4096])
            os._exit(0)
        for size in 10, 1000, 100_000, 1 << 20:
            await round_trip(c, size)
        assert os.waitpid(pid, 0)[1] == 0


@part
async def meshes():
    program = Path("/tmp/program.py")
    program.write_text(MESH)
    for ranks in "2", "4":
        command = [sys.executable, "-m", "trio_ucx", "mesh", "--ranks", ranks, str(program)]
        await trio.run_process(command, stdout=subprocess.DEVNULL)


main()
