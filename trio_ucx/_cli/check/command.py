"""``python -m trio_ucx check``."""

from __future__ import annotations

import argparse
import json
import secrets
from functools import partial
from typing import Any

import attrs
import trio

from ... import ucp
from ..._opening.addresses import reachable_address
from ..._opening.authkey import AUTHKEY
from ..._util.socket_addresses import format_address
from ..._version import __version__
from ..credentials import ABOUT_KEYS, add_key_options, find_key
from ..perf import parse_address, parse_listen
from .devices import check_gpu, check_rdma
from .finding import Finding, worst
from .machine import check_machine
from .peers import check_peer, serve
from .software import check_software, read_software

#: The port of ``check --listen``, unless another one is named.
DEFAULT_PORT = 13337


def parse_host(text: str) -> tuple[str, int]:
    """Returns a host and its port, which may be missing."""
    has_port = text.rpartition(":")[2].isdecimal() and (text.count(":") == 1 or "]:" in text)
    host = f"[{text}]" if text.count(":") > 1 and "]" not in text else text
    return parse_address(text if has_port else f"{host}:{DEFAULT_PORT}")


def add_command(commands: Any) -> None:
    parser = commands.add_parser(
        "check",
        help="what keeps this machine, or the way to another host, from working well, and what to do",
        description="Checks limits, shared memory, namespaces, devices, UCX and its transports; with HOST also whether "
        "this host and that one can talk, in both directions, over every transport. The exit status is 1 if there is "
        "a problem; warnings do not count.",
        epilog="Two hosts: `check --listen` on one prints what to type on the other. " + ABOUT_KEYS,
    )
    role = parser.add_mutually_exclusive_group()
    about = f"where `check --listen` runs; by default port {DEFAULT_PORT}"
    role.add_argument("address", nargs="?", type=parse_host, metavar="HOST[:PORT]", help=about)
    about = f"serve one client after another until Ctrl-C; by default at port {DEFAULT_PORT}"
    default = (None, DEFAULT_PORT)
    role.add_argument("--listen", type=parse_listen, nargs="?", const=default, metavar="[HOST:]PORT", help=about)
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

    for finding in check_machine():
        report(finding)
    software = await read_software()
    of_devices = (look(software.present, software.enabled) for look in (check_rdma, check_gpu))
    for finding in (*check_software(software), *of_devices):
        report(finding)
    if arguments.address is not None and software.error is None:
        host, port = arguments.address
        await check_peer(host, port, arguments.authkey, report)
    state = worst(findings)
    if arguments.json:
        facts = {"trio_ucx": __version__, "state": state, "findings": [attrs.asdict(each) for each in findings]}
        print(json.dumps(facts, indent=2))
    return 1 if state == "problem" else 0


async def listen(arguments: argparse.Namespace) -> int:
    host, port = arguments.listen
    new_key = None if arguments.authkey or arguments.allow_anyone else secrets.token_hex(16)
    authkey = arguments.authkey if new_key is None else new_key.encode()
    listeners = await trio.open_tcp_listeners(port, host=host)
    async with ucp.open_worker() as worker:
        own = [ip for ip, _ in worker.address.tcp_addresses]
        address = format_address(reachable_address([each.socket.getsockname()[:2] for each in listeners], own))
        if arguments.json:
            print(json.dumps({"listening": address, **({"authkey": new_key} if new_key else {})}), flush=True)
        else:
            command = f"{f'{AUTHKEY}={new_key} ' if new_key else ''}python -m trio_ucx check {address}"
            same = ", with the same key" if arguments.authkey else ""
            print(f"listening at {address}\non the other machine{same}: {command}", flush=True)
        await trio.serve_listeners(partial(serve, worker=worker, authkey=authkey, turn=trio.Lock()), listeners)
    return 0
