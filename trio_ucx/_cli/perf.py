"""``trio-ucx perf``."""

from __future__ import annotations

import argparse
import json
import math
import sys
import time
from collections.abc import Callable
from contextlib import AsyncExitStack, closing, suppress
from functools import partial
from pathlib import Path
from typing import Any

import attrs
import trio

from .. import Connection, NotAdmitted, connect, serve_ucx
from .._opening.authkey import AUTHKEY
from .._util.socket_addresses import format_address
from . import perf_plot
from .addresses import parse_address, parse_listen
from .credentials import ABOUT_KEYS, add_key_options, announce, find_key, server_key
from .errors import EXPECTED, describe
from .idle_cores import own_idle_cores
from .listener_log import log_line
from .local_pair import run_pair, transport_options
from .measuring import DEFAULT_SECONDS, Advance, Measured, chosen_worker, progress_bar, repeat
from .perf_protocol import PerfClient, PerfServer, Session, machine
from .perf_results import Result, crowded, header_text, row_text, titles_text, verdict, write_csv
from .rounds import MAX_FLOWS, PerfOperation, RoundKind
from .sizes import MAX_SIZE, format_size, parse_sizes

DEFAULT_SIZES = "8,256,4k,64k,1M"
#: Seconds that a client may take to read why it is turned away.
_LAST_WORDS = 5


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


def parse_operations(text: str) -> list[PerfOperation]:
    known = {operation.value: operation for operation in PerfOperation}
    names = [part.strip() for part in text.split(",")]
    for name in names:
        if name not in known:
            raise argparse.ArgumentTypeError(f"{name!r} is none of {', '.join(known)}")
    return [known[name] for name in dict.fromkeys(names)]


def parse_flows(text: str) -> int:
    if not (text.isascii() and text.isdecimal() and len(text) < 9 and 1 <= int(text) <= MAX_FLOWS):
        raise argparse.ArgumentTypeError(f"{text!r} is no number from 1 to {MAX_FLOWS}")
    return int(text)


# ---- the arguments ----


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
    parser.add_argument(
        *("-t", "--operation"),
        type=parse_operations,
        metavar="LIST",
        help="what to measure, separated by commas: messages (the default); puts and gets, of memory that the server "
        "has allocated for them; active-messages; stream, the byte stream. Plain TCP answers a put, and is asked for a "
        "get, with one byte",
    )
    parser.add_argument(
        "--connections",
        type=parse_flows,
        metavar="N",
        help="spread the load over N connections (default 1). Those between two processes share an endpoint of UCX",
    )
    parser.add_argument(
        *("-P", "--parallel"),
        type=parse_flows,
        metavar="N",
        help="N tasks send on each connection at the same time (default 1), each with a tag of its own. Plain TCP has "
        "a connection for each task",
    )
    parser.add_argument(
        "--bidirectional",
        action="store_true",
        help="for bandwidth and rate, both sides send at the same time; not for puts and gets",
    )
    form = parser.add_mutually_exclusive_group()
    form.add_argument("--json", action="store_true", help="print one JSON object; with --listen, one for each client")
    form.add_argument("--csv", action="store_true", help="print a row for each operation, size and path")
    parser.add_argument(
        "--plot",
        type=Path,
        metavar="FILE",
        help="draw latency and bandwidth by size, too; the suffix is the format, .png or .svg, say. Needs the extra "
        "plot",
    )
    parser.add_argument("--until-stdin-closes", action="store_true", help=argparse.SUPPRESS)

    def run(arguments: argparse.Namespace) -> int:
        check(parser, arguments)
        if arguments.listen is not None:
            return trio.run(run_server, arguments)
        if arguments.address is not None:
            try:
                return trio.run(run_client, arguments)
            except NotAdmitted as error:
                if "authkey" in str(error):
                    error.add_note(f"perf takes the key from {AUTHKEY} or --authkey-file; perf --listen prints it")
                raise
        return trio.run(run_pair, arguments)

    parser.set_defaults(run=run, prog=parser.prog)


#: The options that the client chooses.
_OF_CLIENT = (
    *("sizes", "iterations", "seconds", "operation", "connections", "parallel", "bidirectional", "csv", "plot"),
)


def check(parser: argparse.ArgumentParser, arguments: argparse.Namespace) -> None:
    """Ends the command if the options do not go together; finds the key."""
    wrong = [f"--{name}" for name in _OF_CLIENT if getattr(arguments, name)]
    if arguments.listen is not None and wrong:
        parser.error(f"with --listen, the client chooses {', '.join(wrong)}")
    if arguments.transports is not None and not arguments.transports.strip():
        parser.error("--transports needs the name of a transport")
    arguments.authkey = find_key(parser, arguments, connects=arguments.address is not None)
    operations = arguments.operation or [PerfOperation.MESSAGES]
    if arguments.bidirectional and any(operation.one_sided for operation in operations):
        parser.error("--bidirectional is not for puts and gets, where only the client acts")
    if (arguments.parallel or 1) > 1 and PerfOperation.BYTE_STREAM in operations:
        parser.error("--parallel is not for the stream, on which one task sends: use --connections")
    flows = (arguments.connections or 1) * (arguments.parallel or 1)
    if flows > MAX_FLOWS:
        parser.error(f"--connections times --parallel is at most {MAX_FLOWS}")
    if max(arguments.sizes or [1]) * flows > MAX_SIZE:
        parser.error(f"{flows} messages of {format_size(max(arguments.sizes))} at the same time are more than 1G")
    try:
        if arguments.plot:
            perf_plot.new_figure(arguments.plot)
    except (OSError, ValueError) as error:
        parser.error(f"--plot: {error}")


# ---- the server ----


async def run_server(arguments: argparse.Namespace) -> int:
    host, port = arguments.listen
    perf_server = PerfServer()
    authkey, new_key = server_key(arguments)
    credentials = {"authkey": authkey, "allow_anyone": arguments.allow_anyone}

    async def handle(connection: Connection) -> None:
        visit = Visit(connection)
        try:
            await perf_server.serve(connection, partial(visit.begin, show=not arguments.json and not quiet))
        except* EXPECTED as problem:
            visit.error = describe(problem)
            if not quiet:
                log_line(visit.left_text(), sys.stderr)
        with trio.move_on_after(_LAST_WORDS), suppress(*EXPECTED):
            await connection.aclose()
        if visit.session is not None and not quiet:
            if arguments.json:
                log_line(json.dumps(visit.as_dict()), sys.stdout)
            elif visit.error is None:
                log_line(visit.left_text(), sys.stdout)

    quiet = arguments.until_stdin_closes  # the client runs on this machine, and prints what is wrong
    async with chosen_worker(arguments.transports) as worker, trio.open_nursery() as nursery:
        server = await nursery.start(partial(serve_ucx, handle, port, host=host, worker=worker, **credentials))
        announce(arguments, format_address(server.address), new_key, *transport_options(arguments.transports))
        if arguments.until_stdin_closes:
            async with trio.lowlevel.FdStream(sys.stdin.fileno()) as stdin:
                await stdin.receive_some(1)
            nursery.cancel_scope.cancel()
    return 0


class Visit:
    """A client of ``--listen``: who it is, and what became of it.

    Attributes:
        session: what it measures, once it is its turn.
        error: why it has left, if not by itself.
    """

    def __init__(self, connection: Connection) -> None:
        self.peer = connection.peer
        address = connection.remote_address
        self.address = "(unknown)" if address is None else format_address(address)
        self.came, self._began = time.strftime("%Y-%m-%d %H:%M:%S"), trio.current_time()
        self.session: Session | None = None
        self.error: str | None = None

    def begin(self, session: Session, show: bool) -> None:
        self.session = session
        if show:
            peer = self.peer
            log_line(
                f"{self.came} client {self.address} came: {peer.stated_software}, process {peer.stated_pid} of "
                f"{peer.stated_host}",
                sys.stdout,
            )

    def as_dict(self) -> dict[str, Any]:
        assert self.session is not None
        return {
            "client": self.address,
            **{name: value for name, value in attrs.asdict(self.peer).items() if name.startswith("stated_")},
            "came": self.came,
            "seconds": trio.current_time() - self._began,
            "connections": len(self.session.paths.connections),
            "messages": dict(self.session.measured),
            "sizes": sorted(self.session.sizes),
            "error": self.error,
        }

    def left_text(self) -> str:
        """Says how it has left, and what it has measured."""
        parts = [f"left after {trio.current_time() - self._began:.1f} s"]
        if self.error is not None:
            parts = [self.error]
        if self.session is not None and self.session.measured:
            sizes = sorted(self.session.sizes)
            span = " to ".join(dict.fromkeys((format_size(sizes[0]), format_size(sizes[-1]))))
            counts = [f"{count:,} {what}" for what, count in self.session.measured.items()]
            parts += [", ".join(counts), f"{span} bytes"]
            if (connections := len(self.session.paths.connections)) > 1:
                parts.append(f"{connections} connections")
        return f"{time.strftime('%Y-%m-%d %H:%M:%S')} client {self.address}: {'; '.join(parts)}"


# ---- the client ----


async def run_client(arguments: argparse.Namespace) -> int:
    sizes = arguments.sizes or parse_sizes(DEFAULT_SIZES)
    operations = arguments.operation or [PerfOperation.MESSAGES]
    connections, parallel, both = arguments.connections or 1, arguments.parallel or 1, arguments.bidirectional
    as_table = not (arguments.json or arguments.csv)
    async with AsyncExitStack() as stack:
        worker = await stack.enter_async_context(chosen_worker(arguments.transports))
        connection, *more = [
            await stack.enter_async_context(connect(arguments.address, worker=worker, authkey=arguments.authkey))
            for _ in range(connections)
        ]
        client = stack.enter_context(closing(PerfClient(connection)))
        server = await client.introduce()
        for each in more:
            await client.join(each, server)
        await client.run_next(RoundKind.LATENCY, 8, 1)  # only after a message UCX knows which lanes it uses
        why_not = await stack.enter_async_context(client.plain_tcp(connections * parallel))
        header = {
            "server": {
                "address": format_address(arguments.address),
                "trio_ucx": server["trio_ucx"],
                "ucx": server["ucx"],
                # None: on this machine, or of an older release
                "idle_cores": None if server["machine"] in ("", machine()) else server["idle_cores"],
            },
            "transports": [attrs.asdict(one) for one in connection.endpoint.transports],
            "without_plain_tcp": why_not,
            "idle_cores": await trio.to_thread.run_sync(own_idle_cores),
            "connections": connections,
            "parallel": parallel,
            "bidirectional": both,
        }
        if as_table:
            print(header_text(header), flush=True)
        results = []
        for operation in operations:
            if as_table:
                print(titles_text(operation, both), flush=True)
            for number, size in enumerate(sizes, 1):
                with progress_bar(
                    f"{operation.value}, {format_size(size)} bytes ({number} of {len(sizes)})"
                ) as advance:
                    options = {"operation": operation, "flows": connections * parallel, "both": both}
                    results.append(await measure(client, size, arguments, options, not why_not, advance))
                if as_table:
                    print(row_text(results[-1], both), flush=True)
    worth_it = verdict(results, crowded(header))
    if arguments.json:
        all_results = [result.as_dict() for result in results]
        print(json.dumps({**header, "results": all_results, "verdict": worth_it}, indent=2))
    elif arguments.csv:
        write_csv(results, sys.stdout)
    else:
        print(f"\n{worth_it}")
    if arguments.plot:
        lanes = ", ".join(dict.fromkeys(one["name"] for one in header["transports"]))
        title = f"trio_ucx over {lanes}; connections: {connections}, tasks on each: {parallel}"
        perf_plot.save(perf_plot.new_figure(arguments.plot), results, title, arguments.plot)
    return 0


async def measure(
    client: PerfClient,
    size: int,
    arguments: argparse.Namespace,
    options: dict[str, Any],
    with_plain: bool,
    advance: Advance,
) -> Result:
    """Measures plain TCP, and then UCX."""
    paths, parts = (True, False) if with_plain else (False,), 4 if with_plain else 2

    async def run(kind: RoundKind, plain: bool, begin: int) -> Measured:
        def show(share: float) -> None:
            advance((begin + share) / parts)

        limits = arguments.iterations, arguments.seconds
        return await repeat(client, kind, size, *limits, show, plain=plain, **options)

    results = []
    for number, plain in enumerate(paths):
        latency = await run(RoundKind.LATENCY, plain, 2 * number)
        results.append(
            Result.of(options["operation"], size, latency, await run(RoundKind.STREAM, plain, 2 * number + 1))
        )
    *plain_result, ours = results
    return attrs.evolve(ours, plain_tcp=plain_result[0] if plain_result else None)
