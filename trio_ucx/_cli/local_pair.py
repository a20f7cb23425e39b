"""A client and a server of ``perf`` as processes of this machine: ``perf`` without an address."""

from __future__ import annotations

import argparse
import json
import os
import secrets
import subprocess
import sys
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from functools import partial

import trio

from .._opening.authkey import AUTHKEY
from .._util.hidden import HiddenText
from .errors import AlreadyReported, PerfError, how_it_ended

#: Seconds that the server process may take to start, and to end by itself.
SERVER_START = 30
SERVER_END = 5

#: The command that both processes run.
PERF = [sys.executable, "-m", "trio_ucx", "perf"]
#: Runs a command that ignores Ctrl-C, which would interrupt its imports with a traceback: this process ends it.
ONLY_PARENT_HEEDS_CTRL_C = ["sh", "-c", 'trap "" INT; exec "$@"', "sh"]


async def run_pair(arguments: argparse.Namespace) -> int:
    """Starts a server and a client, and ends both in any case."""
    authkey = HiddenText(secrets.token_hex(16))
    async with open_server(arguments.transports, authkey) as address, trio.open_nursery() as nursery:
        command = [*ONLY_PARENT_HEEDS_CTRL_C, *PERF, *transport_options(arguments.transports)]
        command += [address, *client_options(arguments)]
        client: trio.Process = await nursery.start(
            partial(trio.run_process, command, env=with_authkey(authkey), stdout=sys.stdout, check=False)
        )
        status = await client.wait()
    if status < 0:
        raise PerfError(f"the client process {ending(client)}")
    return status


@asynccontextmanager
async def open_server(
    transports: str | None, authkey: str, options: Mapping[str, str] | None = None
) -> AsyncIterator[str]:
    """Starts a server process, which ends with the block; yields its address. A server that ends early is an error.

    Args:
        options: options of UCX for the server, without ``UCX_``; they take precedence over those in the environment.
    """
    environment = {**with_authkey(authkey), **{f"UCX_{name}": value for name, value in (options or {}).items()}}
    command = [*ONLY_PARENT_HEEDS_CTRL_C, *PERF, *transport_options(transports)]
    listen = [*command, "--listen=127.0.0.1:0", "--json", "--until-stdin-closes"]
    async with trio.open_nursery() as nursery:
        server: trio.Process = await nursery.start(
            partial(
                trio.run_process,
                listen,
                env=environment,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                check=False,
            )
        )
        assert server.stdin is not None
        address = await announced(server)
        async with trio.open_nursery() as watch:
            watch.start_soon(fail_when_ended, server)
            yield address
            watch.cancel_scope.cancel()
        await server.stdin.aclose()
        with trio.move_on_after(SERVER_END):
            await server.wait()
        nursery.cancel_scope.cancel()


def with_authkey(authkey: str) -> dict[str, str]:
    """Returns this environment with a key for ``perf``. (Everybody can see the arguments of a process.)"""
    return {**os.environ, AUTHKEY: authkey}


def transport_options(transports: str | None) -> list[str]:
    return [] if transports is None else [f"--transports={transports}"]


def client_options(arguments: argparse.Namespace) -> list[str]:
    options = []
    for name in ("json", "csv", "bidirectional"):
        if getattr(arguments, name):
            options.append(f"--{name}")
    if arguments.sizes:
        options.append(f"--sizes={','.join(map(str, arguments.sizes))}")
    if arguments.operation:
        options.append(f"--operation={','.join(operation.value for operation in arguments.operation)}")
    for name in ("iterations", "seconds", "connections", "parallel", "plot"):
        if value := getattr(arguments, name):
            options.append(f"--{name}={value}")
    return options


async def announced(server: trio.Process) -> str:
    """Returns the address that a new server prints."""
    assert server.stdout is not None
    text = b""
    with trio.move_on_after(SERVER_START):
        while not text.endswith(b"\n"):
            more = await server.stdout.receive_some()
            if not more:
                if await server.wait() > 0:
                    raise AlreadyReported
                raise PerfError(f"the server process {ending(server)} before it listened")
            text += more
        address: str = json.loads(text)["listening"]
        return address
    raise PerfError(f"the server process did not listen within {SERVER_START} seconds")


async def fail_when_ended(server: trio.Process) -> None:
    await server.wait()
    raise PerfError(f"the server process {ending(server)} during the measurement")


def ending(process: trio.Process) -> str:
    assert process.returncode is not None
    return f"(pid {process.pid}) {how_it_ended(process.returncode)}"
