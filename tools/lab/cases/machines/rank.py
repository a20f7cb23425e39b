"""A rank of the groups of groups.py."""

from __future__ import annotations

import socket

import numpy
import trio

from trio_ucx import mesh


async def main() -> None:
    """A sum, a message to each of the others, and a barrier."""
    async with mesh.join(timeout=100) as group:
        total = await group.all_reduce(numpy.arange(100_000.0) + group.rank, "sum")
        n = group.size
        assert n == 4 and (total == numpy.arange(100_000.0) * n + sum(range(n))).all()
        others = [other for other in range(n) if other != group.rank]
        for other in others:
            await group.send(b"%d" % group.rank, to=other)
        for other in others:
            assert await group.receive(source=other) == b"%d" % other
        hosts = [bytes(host).decode() for host in await group.all_gather(socket.gethostname().encode())]
        await group.barrier()
        print(f"rank {group.rank} of {n} is well; hosts {sorted(set(hosts))}", flush=True)


trio.run(main)
