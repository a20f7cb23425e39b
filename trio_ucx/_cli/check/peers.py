"""``check HOST`` and ``check --listen``: whether two hosts can talk, in both directions, over every transport."""

from __future__ import annotations

import socket
import sys
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import attrs
import trio

from ... import ucp
from ..._native import ucx
from ..._util.socket_addresses import family_of, format_address, is_loopback
from ..._util.text import printable
from ..._version import __version__
from ...ucp._internal_api import obstacle_to_shared_memory
from ..errors import PerfError, describe
from ..info import resources
from .control import ANSWER, ControlChannel, WrongKey
from .devices import RDMA
from .finding import Finding, State
from .software import FAILURES
from .transfer import attempt, judge

#: What a side says about itself.
Facts = Mapping[str, Any]


@attrs.frozen
class Plan:
    """What one attempt uses.

    Attributes:
        name: of the transport and devices, for the ids of findings.
        ours, theirs: UCX's options of either side.
        our_network, their_network: which of a side's TCP addresses the other one uses; None: all.
        failure: the state if it does not work.
        expects_rdma: whether messages over other transports deserve a warning.
    """

    name: str
    ours: Mapping[str, str]
    theirs: Mapping[str, str]
    our_network: str | None = None
    their_network: str | None = None
    failure: State = "problem"
    expects_rdma: bool = False


def source_address(ip: str) -> str | None:
    """Returns the address of this host from which packets to another address go; None without a route."""
    with socket.socket(family_of(ip), socket.SOCK_DGRAM) as asking:
        try:
            asking.connect((ip, 9))
            return str(asking.getsockname()[0])
        except OSError:
            return None


def describe_self(worker: ucp.Worker, stream: trio.SocketStream) -> dict[str, Any]:
    found = resources(worker.context)
    tcp, ips = [device for name, device in found if name == "tcp"], [ip for ip, _ in worker.address.tcp_addresses]
    own, peer = stream.socket.getsockname()[0], stream.socket.getpeername()[0]
    return {
        **{"trio_ucx": __version__, "ucx": ucx.release, "address": bytes(worker.address).hex()},
        "rdma": sorted({name for name, _ in found if name.startswith(RDMA)}),
        # The address lists the TCP devices in UCX's order.
        "devices": dict(zip(ips, tcp, strict=True)) if len(ips) == len(tcp) else {},
        **{"at": own.removeprefix("::ffff:"), "peer": peer.removeprefix("::ffff:")},
    }


async def serve(stream: trio.SocketStream, worker: ucp.Worker, authkey: bytes | None, turn: trio.Lock) -> None:
    """Serves a client of ``check --listen``; one after another."""
    client, channel = "that has gone", ControlChannel(stream, client=False)
    try:
        async with stream:
            client = format_address(stream.socket.getpeername()[:2])
            client_facts = await channel.begin(authkey, describe_self(worker, stream))
            await channel.send({"routes": {ip: source_address(ip) for ip in client_facts["devices"]}})
            async with turn:
                while (request := await channel.receive(2 * ANSWER))["attempt"] is not None:
                    await attempt(channel, request["attempt"], request["network"], sends=request["send"])
        print(f"client {client}: checked", file=sys.stderr)
    except* (PerfError, *FAILURES) as error:
        print(f"client {client}: {printable(describe(error))}", file=sys.stderr)


async def check_peer(host: str, port: int, authkey: bytes | None, report: Callable[[Finding], None]) -> None:
    """Reports whether this host and another one can talk."""
    try:
        stream = await connect(host, port)
        async with stream, ucp.open_worker() as worker:
            channel, ours = ControlChannel(stream, client=True), describe_self(worker, stream)
            theirs = {**await channel.begin(authkey, ours), **await channel.receive()}
            for step in (*compare(host, ours, theirs), *plan(host, ours, theirs)):
                if isinstance(step, Finding):
                    report(step)
                    continue
                for id, sends in ((f"{step.name}, to {host}", True), (f"{step.name}, from {host}", False)):
                    await channel.send({"attempt": step.theirs, "network": step.our_network, "send": not sends})
                    mine, other = await attempt(channel, step.ours, step.their_network, sends=sends)
                    sides = {"this host": mine, host: other} if sends else {host: other, "this host": mine}
                    report(judge(id, sides, step.failure, RDMA if step.expects_rdma else ("",)))
            await channel.send({"attempt": None})
    except* WrongKey as error:
        advice = "give both the same --authkey-file, or set TRIO_UCX_AUTHKEY to the key that check --listen prints"
        report(Finding("control", "problem", f"{host}: {describe(error)}", advice))
    except* (PerfError, *FAILURES) as error:
        advice = f"start it there: python -m trio_ucx check --listen {port}; and let TCP port {port} through"
        report(Finding("control", "problem", f"{format_address((host, port))}: {describe(error)}", advice))


async def connect(host: str, port: int) -> trio.SocketStream:
    with trio.move_on_after(ANSWER):
        try:
            return await trio.open_tcp_stream(host, port)
        except socket.gaierror as error:
            raise PerfError(f"the name cannot be looked up ({error.strerror})") from None
        except OSError as error:
            raise PerfError(describe(error.__cause__ or error)) from None
    raise PerfError(f"no answer within {ANSWER:g} seconds")


def compare(host: str, ours: Facts, theirs: Facts) -> Iterator[Finding]:
    same = ours["trio_ucx"] == theirs["trio_ucx"]
    found = f"{host}: trio_ucx {theirs['trio_ucx']}, UCX {theirs['ucx']}; here {ours['trio_ucx']}, {ours['ucx']}"
    advice = None if same else "use one release of trio_ucx on both sides"
    yield Finding("releases", "ok" if same else "problem", found, advice)
    if ours["at"] != theirs["peer"]:
        found = f"{host} sees this host as {theirs['peer']} instead of {ours['at']}, to which UCX there connects (NAT)"
        advice = "connect from an address that it reaches: in a container, use the host's network (--network=host)"
        yield Finding("addresses", "problem", found, advice)


def plan(host: str, ours: Facts, theirs: Facts) -> Iterator[Plan | Finding]:
    """Yields what is to be tried, and findings about what need not be tried."""
    here, there = (ucp.WorkerAddress(bytes.fromhex(side["address"])) for side in (ours, theirs))
    one_machine = here.process.host == there.process.host
    obstacle = obstacle_to_shared_memory(here, there)
    if obstacle is None:
        yield Plan("shared memory", {"TLS": "sm,self"}, {"TLS": "sm,self"})
    elif one_machine:
        advice = "run both as one user, in the same IPC, PID and network namespaces, with one release of UCX"
        yield Finding(f"shared memory with {host}", "warning", f"both are on one machine, but {obstacle}", advice)
    one_network = one_machine and here.network_namespace == there.network_namespace
    for ip, device in theirs["devices"].items():
        source = source_address(ip)
        leads = ip == theirs["at"] or (theirs["at"] not in theirs["devices"] and source == ours["at"])
        if (one_network and ip != theirs["at"]) or (is_loopback(ip) and not one_network):
            continue
        # Without a route back, the UCX that is asked for an endpoint would end its process.
        if source is None or theirs["routes"].get(source) != ip or (source == ip and not one_network):
            found = f"not tried: packets between this host and {ip} take other devices"
            advice = "connect by another address of the host, or mend the routes"
            name = f"tcp {device} ({ip})"
            yield Finding(name, "problem", found, advice) if leads else Finding(name, "ok", found)
            continue
        mine, other = ({"TLS": "tcp", "NET_DEVICES": each} for each in (ours["devices"][source], device))
        name = f"tcp {ours['devices'][source]} ({source}) - {device} ({ip})"
        # Connections use the network of their control socket.
        yield Plan(name, mine, other, source, ip, "problem" if leads else "warning")
    common = {*ours["rdma"]} & {*theirs["rdma"]}
    if not common and (ours["rdma"] or theirs["rdma"]):
        found = f"only {'this host' if ours['rdma'] else host} has transports for it"
        yield Finding("RDMA", "warning", found, "python -m trio_ucx check on the other host says why")
    at = [side["at"] if side["at"] in side["devices"] and obstacle else None for side in (ours, theirs)]
    yield Plan("all transports", {}, {}, at[0], at[1], expects_rdma=bool(common and obstacle))
