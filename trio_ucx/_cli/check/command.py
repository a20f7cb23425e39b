"""``python -m trio_ucx check``."""

from __future__ import annotations

import argparse
import json
import logging
from functools import partial
from typing import Any

import attrs
import trio

from ... import ucp
from ..._opening.addresses import reachable_address
from ..._util.socket_addresses import format_address
from ..._version import __version__
from ...ucp._internal_api import addresses_of_devices
from ..addresses import DEFAULT_PORT, parse_host, parse_listen
from ..credentials import ABOUT_KEYS, add_key_options, announce, find_key, server_key
from ..errors import PerfError, describe
from .finding import Finding, worst
from .machine import check_machine
from .peers import check_peer, serve
from .software import check_software


def add_command(commands: Any) -> None:
    parser = commands.add_parser(
        "check",
        help="what keeps this machine, or the way to another host, from working well, and what to do",
        description="Checks limits, devices, UCX and its transports; with HOST also whether both hosts can talk, over "
        "every transport, in both directions. The exit status is 1 with a problem; warnings do not count.",
        epilog="Two hosts: `check --listen` on one prints what to type on the other. " + ABOUT_KEYS,
    )
    role = parser.add_mutually_exclusive_group()
    role.add_argument("address", nargs="?", type=parse_host, metavar="HOST[:PORT]", help="where `check --listen` runs")
    about = {"metavar": "[HOST:]PORT", "help": f"serve clients until Ctrl-C; by default at port {DEFAULT_PORT}"}
    role.add_argument("--listen", type=parse_listen, nargs="?", const=(None, DEFAULT_PORT), **about)
    add_key_options(parser)
    parser.add_argument("--json", action="store_true", help="print one JSON object")

    def run(arguments: argparse.Namespace) -> int:
        arguments.authkey = find_key(parser, arguments, connects=arguments.address is not None)
        return trio.run(check if arguments.listen is None else listen, arguments)

    parser.set_defaults(run=run, prog=parser.prog)


async def check(arguments: argparse.Namespace) -> int:
    findings: list[Finding] = []

    def report(finding: Finding) -> None:
        findings.append(finding)
        if not arguments.json:
            print(finding, flush=True)

    software, works = await check_software()
    for finding in (*check_machine(), *software):
        report(finding)
    if arguments.address is not None and works:
        await check_peer(arguments.address, arguments.authkey, report)
    state = worst(findings)
    if arguments.json:
        facts = {"trio_ucx": __version__, "state": state, "findings": [attrs.asdict(each) for each in findings]}
        print(json.dumps(facts, indent=2))
    return 1 if state == "problem" else 0


async def listen(arguments: argparse.Namespace) -> int:
    (host, port), (authkey, new_key) = arguments.listen, server_key(arguments)
    try:
        listeners = await trio.open_tcp_listeners(port, host=host)
    except OSError as error:
        raise PerfError(f"listening at {format_address((host or '*', port))}: {describe(error)}") from None
    logging.getLogger("trio.serve_listeners").disabled = True  # of many strangers, each would cost lines
    async with ucp.open_worker() as worker:
        own = addresses_of_devices(worker.address)
        address = format_address(reachable_address([each.socket.getsockname()[:2] for each in listeners], own))
        announce(arguments, address, new_key)
        await trio.serve_listeners(partial(serve, worker=worker, authkey=authkey), listeners)
    return 0
