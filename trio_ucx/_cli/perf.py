"""``python -m trio_ucx perf``."""

from __future__ import annotations

import argparse
import json
import math
import os
import secrets
import shlex
import statistics
import sys
from collections.abc import Callable
from functools import partial
from typing import Any

import attrs
import trio

from .. import Connection, NotAdmitted, connect, serve_ucx
from .._opening.authkey import AUTHKEY
from .._util.socket_addresses import format_address, split_address
from .._version import __version__
from .credentials import ABOUT_KEYS, add_key_options, find_key
from .errors import EXPECTED, describe
from .idle_cores import count_idle_cores
from .local_pair import run_pair, transport_options
from .measuring import DEFAULT_SECONDS, Advance, chosen_worker, half_trips, messages_a_second, progress_bar, repeat
from .perf_protocol import PerfClient, RoundKind, Timing, serve
from .sizes import format_size, parse_sizes

DEFAULT_SIZES = "8,256,4k,64k,1M"
#: With fewer idle cores, the two processes wait for a core now and then.
_IDLE = 1.9


def parse_address(text: str) -> tuple[str, int]:
    try:
        return split_address(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def parse_listen(text: str) -> tuple[str | None, int]:
    if not (text.isascii() and text.isdecimal()):
        return parse_address(text)
    if int(text) > 65535:
        raise argparse.ArgumentTypeError(f"the port must be between 0 and 65535, not {text}")
    return None, int(text)


def parse_positive(convert: Callable[[str], float], what: str) -> Callable[[str], float]:
    def parse(text: str) -> float:
        try:
            number = convert(text)
        except ValueError:
            number = 0
        if not 0 < number < math.inf:
            raise argparse.ArgumentTypeError(f"{text!r} is no {what}")
        return number

    return parse


def add_command(commands: Any) -> None:
    parser = commands.add_parser(
        "perf",
        help="measure latency, bandwidth and message rate between two processes",
        description="Measures latency, bandwidth and message rate, beside those of plain TCP, and verifies all data. "
        "Without ADDRESS and --listen between two new processes of this machine.",
        epilog="Two machines: `perf --listen 13337` on one prints what to type on the other, which prints the results. "
        + ABOUT_KEYS,
    )
    role = parser.add_mutually_exclusive_group()
    role.add_argument("address", nargs="?", type=parse_address, metavar="ADDRESS", help="host:port of a listening perf")
    role.add_argument(
        "--listen",
        type=parse_listen,
        metavar="[HOST:]PORT",
        help="serve one client after another until Ctrl-C; port 0 chooses a free one",
    )
    add_key_options(parser)
    parser.add_argument(
        "--sizes", type=parse_sizes, metavar="SIZES", help=f"message sizes in bytes (default {DEFAULT_SIZES})"
    )
    length = parser.add_mutually_exclusive_group()
    length.add_argument(
        "--iterations", type=parse_positive(int, "number of messages"), metavar="N", help="messages per measurement"
    )
    length.add_argument(
        "--seconds",
        type=parse_positive(float, "number of seconds"),
        metavar="S",
        help=f"time per measurement, of which there are four per size (default {DEFAULT_SECONDS})",
    )
    parser.add_argument(
        "--transports", metavar="TLS", help="UCX transports to use, such as tcp or tcp,sm,self (UCX's option TLS)"
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument("--until-stdin-closes", action="store_true", help=argparse.SUPPRESS)

    def run(arguments: argparse.Namespace) -> int:
        if arguments.listen is not None and any((arguments.sizes, arguments.iterations, arguments.seconds)):
            parser.error("with --listen, the client chooses --sizes, --iterations and --seconds")
        if arguments.transports is not None and not arguments.transports.strip():
            parser.error("--transports needs the name of a transport")
        arguments.authkey = find_key(parser, arguments, connects=arguments.address is not None)
        if arguments.listen is not None:
            return trio.run(run_server, arguments)
        if arguments.address is not None:
            try:
                return trio.run(run_client, arguments)
            except NotAdmitted as error:
                error.add_note(f"perf takes the key from {AUTHKEY} or --authkey-file; perf --listen prints it")
                raise
        return trio.run(run_pair, arguments)

    parser.set_defaults(run=run, prog=parser.prog)


# ---- the server ----


async def run_server(arguments: argparse.Namespace) -> int:
    host, port = arguments.listen
    turn = trio.Lock()
    new_key = None if arguments.authkey or arguments.allow_anyone else secrets.token_hex(16)
    authkey = new_key.encode() if new_key is not None else arguments.authkey
    credentials = {"authkey": authkey, "allow_anyone": arguments.allow_anyone}

    async def handle(connection: Connection) -> None:
        try:
            await serve(connection, turn)
        except* EXPECTED as problem:
            if not arguments.until_stdin_closes:  # else the client runs on this machine, and prints it
                print(f"client {connection.remote_address}: {describe(problem)}", file=sys.stderr)

    async with chosen_worker(arguments.transports) as worker, trio.open_nursery() as nursery:
        server = await nursery.start(partial(serve_ucx, handle, port, host=host, worker=worker, **credentials))
        address = format_address(server[0].address)
        if arguments.json:
            print(json.dumps({"listening": address, **({"authkey": new_key} if new_key else {})}), flush=True)
        else:
            print(f"listening at {address}\n{other_side(arguments, server.address, new_key)}", flush=True)
        if arguments.until_stdin_closes:
            async with trio.lowlevel.FdStream(sys.stdin.fileno()) as stdin:
                await stdin.receive_some(1)
            nursery.cancel_scope.cancel()
    return 0


def other_side(arguments: argparse.Namespace, address: tuple[str, int], new_key: str | None) -> str:
    """Returns what to type on the other machine."""
    options = transport_options(arguments.transports)
    command = shlex.join(["python", "-m", "trio_ucx", "perf", *options, format_address(address)])
    if new_key is not None:
        return f"on the other machine: {AUTHKEY}={new_key} {command}"
    return f"on the other machine{', with the same key' if arguments.authkey else ''}: {command}"


# ---- the client ----


@attrs.frozen
class Result:
    """What was measured for one size; the latency is half of a round trip, a megabyte 10**6 bytes.

    Attributes:
        plain_tcp: the same over plain TCP, if that could be had.
    """

    size: int
    latency_median_us: float
    latency_p99_us: float
    bandwidth_mb_s: float
    messages_s: float
    latency_messages: int
    stream_messages: int
    plain_tcp: Result | None = None


async def run_client(arguments: argparse.Namespace) -> int:
    sizes = arguments.sizes or parse_sizes(DEFAULT_SIZES)
    async with (
        chosen_worker(arguments.transports) as worker,
        connect(arguments.address, worker=worker, authkey=arguments.authkey) as connection,
    ):
        client = PerfClient(connection)
        server = await client.introduce()
        await client.run_next(RoundKind.LATENCY, 8, 1)  # only after a message UCX knows which lanes it uses
        async with client.plain_tcp(server) as why_not:
            header = {
                "server": {
                    "address": format_address(arguments.address),
                    "trio_ucx": server["trio_ucx"],
                    "ucx": server["ucx"],
                },
                "transports": [attrs.asdict(one) for one in connection.endpoint.transports],
                "without_plain_tcp": why_not,
                "idle_cores": await trio.to_thread.run_sync(count_idle_cores, list(os.sched_getaffinity(0))),
            }
            if not arguments.json:
                print(header_text(header), flush=True)
            results = []
            for number, size in enumerate(sizes, 1):
                with progress_bar(f"{format_size(size)} bytes ({number} of {len(sizes)})") as advance:
                    results.append(await measure(client, size, arguments, not why_not, advance))
                if not arguments.json:
                    print(row_text(results[-1]), flush=True)
    if arguments.json:
        print(json.dumps({**header, "results": [attrs.asdict(result) for result in results]}, indent=2))
    return 0


async def measure(
    client: PerfClient, size: int, arguments: argparse.Namespace, with_plain: bool, advance: Advance
) -> Result:
    if not with_plain:
        return await measure_path(client, size, arguments, False, advance)
    plain = await measure_path(client, size, arguments, True, lambda share: advance(share / 2))
    ours = await measure_path(client, size, arguments, False, lambda share: advance((1 + share) / 2))
    return attrs.evolve(ours, plain_tcp=plain)


async def measure_path(
    client: PerfClient, size: int, arguments: argparse.Namespace, plain: bool, advance: Advance
) -> Result:
    async def run(kind: RoundKind, begin: float) -> list[tuple[Timing, int]]:
        return await repeat(
            client,
            kind,
            size,
            arguments.iterations,
            arguments.seconds,
            lambda share: advance(begin + share / 2),
            plain=plain,
        )

    latency = await run(RoundKind.LATENCY, 0)
    stream = await run(RoundKind.STREAM, 0.5)
    trips = half_trips(latency)
    rate = messages_a_second(stream)
    return Result(
        size=size,
        latency_median_us=statistics.median(trips),
        latency_p99_us=trips[math.ceil(0.99 * len(trips)) - 1],
        bandwidth_mb_s=rate * size / 1e6,
        messages_s=rate,
        latency_messages=len(trips),
        stream_messages=sum(count for _, count in stream),
    )


# ---- what the user sees ----


def header_text(header: dict[str, Any]) -> str:
    lanes = ", ".join(dict.fromkeys("/".join(filter(None, one.values())) for one in header["transports"]))
    server = header["server"]
    why_not = header["without_plain_tcp"]
    lines = [
        f"trio_ucx {__version__}; server {server['address']} (trio_ucx {server['trio_ucx']}, UCX {server['ucx']})",
        f"transports: {lanes}",
        f"plain TCP was not measured: {why_not}" if why_not else "TCP: plain TCP between these processes, with Trio",
        "latency: half of a round trip; bandwidth and rate: one way, many in flight; MB: 10^6 bytes; data verified",
        *crowded(header["idle_cores"]),
        "",
        f"{'bytes':>12}  {'median us':>10}  {'p99 us':>10}  {'MB/s':>10}  {'messages/s':>11}",
    ]
    return "\n".join(lines)


def crowded(idle_cores: float) -> list[str]:
    """A warning, if less than two cores are free."""
    if idle_cores > _IDLE:
        return []
    return [f"WARNING: only {idle_cores:.1f} cores are free for two processes: the figures will vary"]


def row_text(result: Result) -> str:
    """A line, and one for plain TCP if that was measured."""
    size = format_size(result.size)
    lines = [_figures(size, result)]
    if result.plain_tcp is not None:
        lines.append(_figures(f"{size} TCP", result.plain_tcp))
    return "\n".join(lines)


def _figures(title: str, result: Result) -> str:
    return (
        f"{title:>12}  {result.latency_median_us:>10.2f}  {result.latency_p99_us:>10.2f}  "
        f"{result.bandwidth_mb_s:>10.1f}  {result.messages_s:>11,.0f}"
    )
