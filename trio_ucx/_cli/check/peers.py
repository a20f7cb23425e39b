"""``check HOST`` and ``check --listen``: whether two hosts can talk, in both directions, over every transport."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import attrs
import trio

from ... import ucp
from ..._native import ucx
from ..._opening.addresses import outward_address
from ..._util.socket_addresses import format_address, is_loopback
from ..._util.text import printable
from ..._version import __version__
from ...ucp._internal_api import check_without_shared_memory, obstacle_to_shared_memory, rdma
from ..errors import PerfError, describe
from ..info import resources
from ..listener_log import log_line
from .control import ANSWER, ControlChannel, connect
from .finding import Finding, State, warn_unless
from .software import FAILURES

#: The messages, of 8 bytes, 64 KiB and 8 MiB.
MESSAGES = (b"trio_ucx", b"trio_ucx" * 2**13, b"trio_ucx" * 2**20)
#: Seconds for all of them; and for a plain TCP connection to a port of UCX's, after they have failed.
LIMIT, PROBE = 8.0, 2.0
_PORTS = "let both hosts connect to each other's TCP ports; UCX_TCP_PORT_RANGE=20000-20999, on both, makes these few"
_MTU = "long packets are lost: compare the MTU of all devices on the way (ip link, tracepath), and let ICMP through"
_SLOW = "the network carries less than 8 Mbit/s, or failed meanwhile: `perf` measures it"
_FABRIC = "RDMA is not used: does `check` show it on both hosts? Are they in one subnet? UCX_NET_DEVICES names devices"
_DEVICES = "name the devices that lead to the other side (UCX_NET_DEVICES, on both sides), or mend the routes"


#: What ends a check of two hosts; the last four if the other side says something else than this release would.
_FAILURES = (PerfError, *FAILURES, KeyError, TypeError, AttributeError, OverflowError)


@attrs.define
class Outcome:
    """What one side has seen of an attempt.

    Attributes:
        seconds: how long each message took that has arrived.
        transports: that the sender has used.
        error: what went wrong; None if nothing did.
        refused: what became of a plain TCP connection to the other side's UCX; None if it was not tried, or works.
    """

    seconds: list[float] = attrs.field(factory=list)
    transports: list[str] = attrs.field(factory=list)
    error: str | None = None
    refused: str | None = None


@attrs.frozen
class Plan:
    """What one attempt uses.

    Attributes:
        name: of the transport and devices, for the ids of findings.
        ours, theirs: UCX's options of either side.
        our_network, their_network: which of a side's TCP addresses the other one uses; None: all.
        failure: the state if it does not work.
        expected: how the names of transports begin of which one should be used.
    """

    name: str
    ours: Mapping[str, str]
    theirs: Mapping[str, str]
    our_network: str | None = None
    their_network: str | None = None
    failure: State = "problem"
    expected: tuple[str, ...] = ("",)


async def attempt(
    channel: ControlChannel, config: Mapping[str, str], network: str | None, *, sends: bool
) -> tuple[Outcome, Outcome]:
    """Opens a worker, and sends or receives the messages. Returns what this side and the other one have seen.

    Both sides run it at once.

    Args:
        network: which of the other side's TCP addresses to use; None: all.
    """
    mine = Outcome()
    async with ucp.open_worker(config=config) as worker:
        await channel.send({"address": bytes(worker.address).hex()})
        peer = ucp.WorkerAddress(bytes.fromhex((await channel.receive())["address"]))
        try:
            with trio.fail_after(LIMIT):
                endpoint = await worker.open_endpoint(peer, network=network) if sends else None
                for tag, message in enumerate(MESSAGES):
                    start = time.perf_counter()
                    if endpoint is None:
                        await worker.tag_receive(bytearray(len(message)), tag)
                    else:
                        await endpoint.tag_send_sync(message, tag)
                        await endpoint.flush()
                        mine.transports = sorted({f"{each.name}/{each.device}" for each in endpoint.transports})
                    mine.seconds.append(time.perf_counter() - start)
        except trio.TooSlowError:
            mine.error = f"nothing more came through within {LIMIT:g} seconds"
        except FAILURES as error:
            mine.error = describe(error)
        if mine.error:
            mine.refused = await _try_plain_tcp(peer, network)
        await channel.send(attrs.asdict(mine))
        return mine, Outcome(**await channel.receive(LIMIT + 2 * PROBE + 5))


async def _try_plain_tcp(peer: ucp.WorkerAddress, network: str | None) -> str | None:
    """Connects to the port of the other side's UCX without UCX; returns why that fails."""
    for address in peer.tcp_addresses:
        if network in (None, address[0]):
            try:
                await (await connect(address, PROBE)).aclose()
            except PerfError as error:
                return f"{format_address(address)}: {error}"
    return None


def judge(id: str, sides: Mapping[str, Outcome], failure: State, expected: tuple[str, ...] = ("",)) -> Finding:
    """Says whether a direction works.

    Args:
        sides: the sender by its name, and then the receiver.
        failure: the state if it does not work.
        expected: how the names of the transports begin that should be used.
    """
    sender, receiver = sides.values()
    over = f" over {', '.join(sender.transports)}" if sender.transports else ""
    if len(sender.seconds) == (arrived := len(receiver.seconds)) == len(MESSAGES):
        found = "8 bytes in {:.1f} ms, 8 MiB in {:.1f} ms".format(*(1000 * each for each in sender.seconds[::2])) + over
        return warn_unless(any(each.startswith(expected) for each in sender.transports), id, found, _FABRIC)
    parts = [f"8 bytes arrive, {'64 KiB' if arrived == 1 else '8 MiB'} do not{over}"] if arrived else []
    parts += [f"{name}: {side.error}" for name, side in sides.items() if side.error]
    refused = [f"plain TCP from {name} fails, too: {side.refused}" for name, side in sides.items() if side.refused]
    advice = _PORTS if refused else (_DEVICES, _MTU, _SLOW, _SLOW)[arrived]
    return Finding(id, failure, "; ".join(parts + refused), advice)


def describe_self(worker: ucp.Worker, stream: trio.SocketStream) -> dict[str, Any]:
    found = resources(worker.context)
    tcp, ips = [device for name, device in found if name == "tcp"], [ip for ip, _ in worker.address.tcp_addresses]
    at, peer = (end()[0].removeprefix("::ffff:") for end in (stream.socket.getsockname, stream.socket.getpeername))
    return {
        **{"trio_ucx": __version__, "ucx": ucx.release, "address": bytes(worker.address).hex(), "at": at, "peer": peer},
        "rdma": any(name.startswith(rdma.TRANSPORTS) for name, _ in found),
        # The address lists the TCP devices in UCX's order.
        "devices": dict(zip(ips, tcp, strict=True)) if len(ips) == len(tcp) else {},
    }


async def serve(stream: trio.SocketStream, worker: ucp.Worker, authkey: bytes | None) -> None:
    """Serves a client of ``check --listen``. Prints nothing about those that have not shown the key."""
    client, said, channel = "", "checked", ControlChannel(stream, client=False)
    try:
        async with stream:
            client_facts = await channel.begin(authkey, describe_self(worker, stream))
            client = format_address(stream.socket.getpeername()[:2])
            await channel.send({"routes": {ip: outward_address(ip) for ip in client_facts["devices"]}})
            while (request := await channel.receive(2 * ANSWER))["attempt"] is not None:
                await attempt(channel, request["attempt"], request["network"], sends=request["send"])
    except* _FAILURES as error:
        said = printable(describe(error))
    if client:
        log_line(f"client {client}: {said}", sys.stderr)


async def check_peer(address: tuple[str, int], authkey: bytes | None, report: Callable[[Finding], None]) -> None:
    """Reports whether this host and another one can talk."""
    (host, port), theirs = address, None
    try:
        async with await connect(address) as stream, ucp.open_worker() as worker:
            channel, ours = ControlChannel(stream, client=True), describe_self(worker, stream)
            theirs = {**await channel.begin(authkey, ours), **await channel.receive()}
            for step in plan(host, ours, theirs):
                if isinstance(step, Finding):
                    report(step)
                    continue
                for way, sends in (("to", True), ("from", False)):
                    await channel.send({"attempt": step.theirs, "network": step.our_network, "send": not sends})
                    mine, other = await attempt(channel, step.ours, step.their_network, sends=sends)
                    sides = {"this host": mine, host: other} if sends else {host: other, "this host": mine}
                    report(judge(f"{step.name}, {way} {host}", sides, step.failure, step.expected))
            await channel.send({"attempt": None})
    except* _FAILURES as error:
        start = f"if the host is right, start python -m trio_ucx check --listen {port} there: it says what to type here"
        advice = f"{start}, or use one --authkey-file on both sides; let TCP port {port} through"
        if theirs is not None:
            advice = "the other side or the network failed meanwhile: try again, and read what the other side prints"
        report(Finding("control", "problem", f"{format_address(address)}: {describe(error)}", advice))


def plan(host: str, ours: Mapping[str, Any], theirs: Mapping[str, Any]) -> Iterator[Plan | Finding]:
    """Yields what is to be tried, and findings about what need not be tried."""
    found = f"{host}: trio_ucx {theirs['trio_ucx']}, UCX {theirs['ucx']}; here {ours['trio_ucx']}, {ours['ucx']}"
    advice = None if ours["trio_ucx"] == theirs["trio_ucx"] else "use one release of trio_ucx on both sides"
    yield Finding("releases", "problem" if advice else "ok", found, advice)
    if ours["at"] != theirs["peer"]:
        found = f"{host} sees this host as {theirs['peer']} instead of {ours['at']}, to which UCX there connects (NAT)"
        advice = "connect from an address that it reaches: in a container, use the host's network (--network=host)"
        yield Finding("addresses", "problem", found, advice)
    here, there = (ucp.WorkerAddress(bytes.fromhex(side["address"])) for side in (ours, theirs))
    one_machine = here.process.host == there.process.host
    obstacle = obstacle_to_shared_memory(here, there)
    if obstacle is None:
        yield Plan("shared memory", {"TLS": "sm,self"}, {"TLS": "sm,self"})
    elif one_machine:
        advice = "run both as one user, in the same IPC, PID and network namespaces, with one release of UCX"
        if not (here.shared_memory_kinds and there.shared_memory_kinds):
            advice = "raise or free what `check` names there, or allow it on both sides (UCX_TLS)"
        yield Finding(f"shared memory with {host}", "warning", f"both are on one machine, but {obstacle}", advice)
    one_network = one_machine and here.network_namespace == there.network_namespace
    for ip, device in theirs["devices"].items():
        source = outward_address(ip)
        if (one_network and ip != theirs["at"]) or (is_loopback(ip) and not one_network):
            continue
        # Connections use the network of their control socket.
        leads = ip == theirs["at"] or (theirs["at"] not in theirs["devices"] and source == ours["at"])
        # Without a route back, the UCX that is asked for an endpoint would end its process.
        if source is None or theirs["routes"].get(source) != ip or (source == ip and not one_network):
            found = f"not tried: packets between this host and {ip} take other devices"
            advice = "connect by another address of the host, or mend the routes" if leads else None
            yield Finding(f"tcp {device} ({ip})", "problem" if leads else "ok", found, advice)
            continue
        mine, other = ({"TLS": "tcp", "NET_DEVICES": each} for each in (ours["devices"][source], device))
        name = f"tcp {ours['devices'][source]} ({source}) - {device} ({ip})"
        yield Plan(name, mine, other, source, ip, "problem" if leads else "warning")
    if obstacle is not None:
        try:
            check_without_shared_memory(here, there, obstacle)
        except ValueError as error:  # the UCX that is asked for an endpoint might end its process
            yield Finding("all transports", "problem", f"not tried: {error}", "change what it names, on both sides")
            return
    expected = rdma.TRANSPORTS if obstacle and (ours["rdma"] or theirs["rdma"]) else ("",)
    at = [side["at"] if side["at"] in side["devices"] and obstacle else None for side in (ours, theirs)]
    yield Plan("all transports", {}, {}, at[0], at[1], expected=expected)
