#!/usr/bin/env python3
"""A publisher of changing values. A slow subscriber skips values instead of falling further and further behind.

    python examples/publish.py serve [--listen HOST:PORT] [--interval SECONDS]     # prints its address
    python examples/publish.py watch HOST:PORT [--count N] [--pause SECONDS]

The publisher counts, and sends each count to every subscriber. A subscriber that reads slowly (``--pause``) gets the
newest count: its library keeps no other one. While its process is suspended, the publisher sends it as much as its
window takes, and then nothing. SIGTERM or Ctrl-C ends the publisher gracefully; subscribers then wait until it is there
again.
"""

from __future__ import annotations

import argparse
import sys
from contextlib import suppress
from functools import partial

import trio

import trio_ucx

AUTHKEY = trio_ucx.authkey()


async def subscribed(connection: trio_ucx.Connection) -> None:
    """Serves a subscriber, which says nothing: until it closes, or the server drains."""
    async for _ in connection.messages():
        pass


async def publish(server: trio_ucx.Server, interval: float) -> None:
    count = 0
    while True:
        for connection in server.connections:
            with suppress(trio.WouldBlock, trio.BrokenResourceError, trio.ClosedResourceError):
                connection.send_nowait(b"%d" % count)
        count += 1
        await trio.sleep(interval)


async def serve(address: tuple[str, int], interval: float) -> None:
    async with trio.open_nursery() as nursery:

        async def run(task_status: trio.TaskStatus[trio_ucx.Server]) -> None:
            await trio_ucx.serve_ucx(subscribed, address, authkey=AUTHKEY, drain_on_signal=5, task_status=task_status)
            nursery.cancel_scope.cancel()  # it has drained

        server = await nursery.start(run)
        print("listening at", trio_ucx.format_address(server.address), flush=True)
        nursery.start_soon(publish, server, interval)


async def watch(address: tuple[str, int], count: int, pause: float) -> None:
    """Prints ``count`` counts; connects again when the publisher has gone."""
    while count:
        with suppress(trio.BrokenResourceError):
            async with trio_ucx.connect(address, authkey=AUTHKEY, retry=trio_ucx.Backoff()) as connection:
                while count:
                    try:
                        print((await connection.receive_newest()).decode(), flush=True)
                    except trio.EndOfChannel:
                        break
                    count -= 1
                    await trio.sleep(pause)


def main() -> int:
    parser = argparse.ArgumentParser(description="Publishes a count to subscribers, which may be slow.")
    commands = parser.add_subparsers(required=True, dest="command")
    server = commands.add_parser("serve", help="publish")
    server.add_argument("--listen", type=trio_ucx.parse_address, default=("127.0.0.1", 0), metavar="HOST:PORT")
    server.add_argument("--interval", type=float, default=0.1, metavar="SECONDS", help="between two counts")
    client = commands.add_parser("watch", help="subscribe, and print what comes")
    client.add_argument("address", type=trio_ucx.parse_address, metavar="HOST:PORT")
    client.add_argument("--count", type=int, default=-1, metavar="N", help="end after so many")
    client.add_argument("--pause", type=float, default=0, metavar="SECONDS", help="after each")
    options = parser.parse_args()
    if options.command == "serve":
        work = partial(serve, options.listen, options.interval)
    else:
        work = partial(watch, options.address, options.count, options.pause)
    try:
        trio.run(work)
    except KeyboardInterrupt:
        return 130
    except (OSError, trio_ucx.Error) as error:
        print(f"publish: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
