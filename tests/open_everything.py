"""Opens all that trio_ucx can open, and says where it listens: ``open_everything.py everything '["FOLDER"]'``."""

from __future__ import annotations

import json
import sys
from contextlib import AsyncExitStack
from functools import partial
from typing import Any

import trio
from helpers import echo
from peers import REMOTE, say, until_told

import trio_ucx
from trio_ucx import metrics, ucp


async def open_everything(folder: str) -> None:
    """Runs servers with clients, a raw listener, and memory that a peer reads.

    Args:
        folder: for the Unix socket of a server.
    """
    with ucp.open_context(features=REMOTE) as context:
        async with (
            ucp.open_worker(context=context) as worker,
            ucp.open_worker(context=context) as other,
            trio.open_nursery() as nursery,
        ):
            async with AsyncExitStack() as stack:
                listening: list[Any] = []
                for where in ({"port": 0, "host": "127.0.0.1"}, {"port": f"unix:{folder}/server.socket"}):
                    server = await nursery.start(partial(trio_ucx.serve_ucx, echo, worker=worker, **where))
                    listening.append(server.address)
                    for shared_memory in (False, True):
                        opening = trio_ucx.connect(server.address, worker=other, shared_memory=shared_memory)
                        client = await stack.enter_async_context(opening)
                        await client.send(b"x")
                        assert await client.receive() == b"x"
                for each in (worker, other):
                    each.admit("127.0.0.1")
                raw = await stack.enter_async_context(await worker.open_listener("127.0.0.1", 0))
                endpoint = await other.open_endpoint(worker.address)
                stack.callback(endpoint.abort)
                for memory in (context.allocate(2**20), context.register(bytearray(2**20))):
                    remote = stack.enter_context(endpoint.attach(stack.enter_context(memory).descriptor))
                    assert len(await remote.get(0, 100_000)) == 100_000
                assert trio_ucx.report() and metrics.text()
                say([listening[0][1], raw.address[1]])
                await until_told()
            nursery.cancel_scope.cancel()


if __name__ == "__main__":
    trio.run(open_everything, *json.loads(sys.argv[2]))
