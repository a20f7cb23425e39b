"""Remote procedure calls, with trio_ucx.rpc: a service of four methods, and a client for the command line.

    pip install '.[rpc]'
    python examples/rpc.py serve [--listen HOST:PORT]                 prints the address that it listens at
    python examples/rpc.py call HOST:PORT METHOD ['{"name": value}']  prints the result

rpc.md says what else there is: streams, deadlines, retries, several servers.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from functools import partial
from typing import Any

import trio

import trio_ucx
from trio_ucx import rpc

#: Both sides need the same one, of 16 bytes or more. Without it a server lets in only clients of its own user.
AUTHKEY = trio_ucx.authkey()


class Demonstration(rpc.Service):
    @rpc.method
    async def add(self, call: rpc.Call, a: int | float, b: int | float) -> int | float:
        return a + b

    @rpc.method
    async def sleep(self, call: rpc.Call, seconds: float) -> str:
        await trio.sleep(seconds)
        return f"slept for {seconds} seconds"

    @rpc.method
    async def noise(self, call: rpc.Call, size: int) -> rpc.Reply:
        return rpc.Reply(buffers=[os.urandom(size)])

    @rpc.method
    async def echo(self, call: rpc.Call, data: Any = None) -> Any:
        return rpc.Reply(data, call.buffers) if call.buffers else data


async def serve(address: tuple[str, int]) -> None:
    host, port = address
    async with trio.open_nursery() as nursery:
        serving = partial(trio_ucx.serve_ucx, rpc.serving(Demonstration()), port, host=host, authkey=AUTHKEY)
        for listener in await nursery.start(serving):  # a host name may have several addresses
            print(f"listening at {trio_ucx.format_address(listener.address)}", flush=True)


async def call(address: tuple[str, int], method: str, arguments: dict[str, Any]) -> None:
    async with rpc.connect(address, authkey=AUTHKEY) as client:
        result = await client.call(method, **arguments)
    if isinstance(result, rpc.Reply):
        for buffer in result.buffers:
            sys.stdout.buffer.write(buffer)
    else:
        print(json.dumps(result))


# ---- the command line ----


def explain(error: BaseException) -> str:
    """The one line that matters of an exception, or of a group of them."""
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    text = str(error) or type(error).__name__
    return "".join(character if character.isprintable() else "?" for character in text)


def parse_arguments(text: str) -> dict[str, Any]:
    return dict(**json.loads(text))


def main() -> int:
    parser = argparse.ArgumentParser(description="Calls methods in another process.")
    commands = parser.add_subparsers(required=True, dest="command")
    server = commands.add_parser("serve", help="answer calls of the methods add, sleep, noise, echo")
    server.add_argument("--listen", type=trio_ucx.parse_address, default=("127.0.0.1", 0), metavar="HOST:PORT")
    client = commands.add_parser("call", help="call a method, and print its result")
    client.add_argument("address", type=trio_ucx.parse_address, metavar="HOST:PORT")
    client.add_argument("method")
    client.add_argument("arguments", type=parse_arguments, nargs="?", default={}, metavar="JSON-ARGS")
    options = parser.parse_args()
    if options.command == "serve":
        work = partial(serve, options.listen)
    else:
        work = partial(call, options.address, options.method, options.arguments)
    status = 0
    try:
        trio.run(work)
    except* KeyboardInterrupt:
        status = 130
    except* (rpc.CallError, OSError, trio.BrokenResourceError, trio_ucx.UCXError, TypeError, ValueError) as group:
        print(f"rpc: {explain(group)}", file=sys.stderr)
        status = 1
    return status


if __name__ == "__main__":
    sys.exit(main())
