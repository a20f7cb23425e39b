"""Hosts with several networks, of which not all lead to the peer: connections work, or say what to set.

The choice of the network device (``trio_ucx/ucp/_quirks/network_devices.py``) is tested with addresses of made-up
workers; the matrix with real ones in network namespaces.
"""

from __future__ import annotations

import errno
import struct
import sys
from collections.abc import Sequence
from ipaddress import ip_address
from itertools import count
from typing import Any

import attrs
import pytest
import trio
from helpers import open_peer
from networks import QUIET, SIZES, Host, Network, Side, meet, need, open_network
from samples import some_description
from test_address_layout import Device, pack

from trio_ucx import ucp
from trio_ucx._util.socket_addresses import family_of
from trio_ucx.ucp import WorkerAddress
from trio_ucx.ucp._quirks import network_devices
from trio_ucx.ucp._quirks.address_layout import parse_worker_address

#: Names of devices: the first comes before the others in every order of names, and in that in which devices are made.
BEFORE, MAIN, AFTER = "aside", "main", "zone"


@attrs.frozen
class End:
    """The devices of one host.

    Attributes:
        main: the addresses of its device in the network that both hosts have.
        aside: the addresses of others, which lead nowhere.
    """

    main: Sequence[str]
    aside: Sequence[str] = ()

    @property
    def ip(self) -> str:
        return self.main[0].partition("/")[0]


@attrs.frozen
class Layout:
    """Two hosts with one network that leads from one to the other.

    Attributes:
        kind: of the devices that lead nowhere: "cable" ends at a third host, "bridge" has no carrier.
        default_route: whether both have a default route, over the network that they share, to a silent router.
    """

    server: End
    client: End
    kind: str = "cable"
    default_route: bool = False


ONE, TWO = End(["10.201.0.1/24"]), End(["10.201.0.2/24"])
SIX, SEVEN = End(["fd00:201::1/64"]), End(["fd00:201::2/64"])

LAYOUTS = {
    "one network": Layout(ONE, TWO),
    "a second one at the server": Layout(attrs.evolve(ONE, aside=["10.8.0.1/24"]), TWO),
    "a second one at the client": Layout(ONE, attrs.evolve(TWO, aside=["10.8.0.1/24"])),
    "the same subnet and address at both": Layout(
        attrs.evolve(ONE, aside=["172.17.0.1/16"]), attrs.evolve(TWO, aside=["172.17.0.1/16"])
    ),
    "one subnet that is not connected": Layout(
        attrs.evolve(ONE, aside=["10.77.0.1/24"]), attrs.evolve(TWO, aside=["10.77.0.2/24"])
    ),
    "a /32 of an overlay": Layout(attrs.evolve(ONE, aside=["10.244.0.0/32"]), TWO),
    "three at both": Layout(
        attrs.evolve(ONE, aside=["172.17.0.1/16", "192.168.122.1/24"]),
        attrs.evolve(TWO, aside=["172.17.0.1/16", "10.8.0.2/24"]),
    ),
    "IPv6 only": Layout(SIX, SEVEN),
    "IPv6, and others with IPv4": Layout(
        attrs.evolve(SIX, aside=["172.17.0.1/16"]), attrs.evolve(SEVEN, aside=["172.17.0.1/16"])
    ),
    "IPv6 for the control socket, IPv4 for UCX": Layout(
        End([*SIX.main, *ONE.main], ["172.17.0.1/16"]), End([*SEVEN.main, *TWO.main], ["172.17.0.1/16"])
    ),
    "a second address of the device": Layout(
        End(["10.201.1.1/24", *ONE.main], ["172.17.0.1/16"]), End(["10.201.1.2/24", *TWO.main], ["172.17.0.1/16"])
    ),
}


def build(network: Network, layout: Layout, aside: str) -> tuple[Host, Host]:
    """Makes the two hosts; the devices that lead nowhere have names that begin with ``aside``."""
    server, client, nowhere = (network.host() for _ in range(3))
    numbers = count()
    for host, end in (server, layout.server), (client, layout.client):
        for address in end.aside if aside == BEFORE else ():
            lead_nowhere(network, host, f"{aside}{next(numbers)}", address, layout.kind, nowhere)
    network.cable((server, MAIN, layout.server.main[0]), (client, MAIN, layout.client.main[0]))
    for host, end in (server, layout.server), (client, layout.client):
        for address in end.main[1:]:
            host.add_address(MAIN, address)
        for address in end.aside if aside == AFTER else ():
            lead_nowhere(network, host, f"{aside}{next(numbers)}", address, layout.kind, nowhere)
    if layout.default_route:
        for host in server, client:
            router = "fd00:201::fe" if ":" in layout.server.ip else "10.201.0.254"
            host.ip("route", "add", "default", "via", router, "dev", MAIN)
    return server, client


def lead_nowhere(network: Network, host: Host, device: str, address: str, kind: str, nowhere: Host) -> None:
    if kind == "cable":
        network.cable((host, device, address), (nowhere, f"{device}-{host.name[-3:]}", "198.18.0.1/32"))
    else:
        host.ip("link", "add", device, "type", kind)
        host.add_address(device, address)
        host.ip("link", "set", device, "up")


@pytest.mark.root
@pytest.mark.sample(4)
@pytest.mark.parametrize("aside", [BEFORE, AFTER])
@pytest.mark.parametrize("default_route", [False, True], ids=["", "default route"])
@pytest.mark.parametrize("kind", ["bridge", "cable"])
@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=list(LAYOUTS))
async def test_hosts_with_several_networks(layout: Layout, kind: str, default_route: bool, aside: str) -> None:
    with open_network() as network:
        layout = attrs.evolve(layout, kind=kind, default_route=default_route)
        server, client = build(network, layout, aside)
        await network.ready()
        (await meet(Side(client.under), Side(server.under), layout.server.ip)).assert_tcp()


@pytest.mark.root
@pytest.mark.parametrize(("listening", "reached"), [("::", "fd00:201::1"), ("0.0.0.0", "10.201.0.1")])
async def test_the_address_of_a_server_at_all_addresses(listening: str, reached: str) -> None:
    """UCX has one address of each device, and IPv4 if it can choose."""
    with open_network() as network:
        server, client = build(network, LAYOUTS["IPv6 for the control socket, IPv4 for UCX"], AFTER)
        await network.ready()
        meeting = await meet(Side(client.under), Side(server.under), listening)
    meeting.assert_tcp()
    assert meeting.client[3][0] == reached


def forward(network: Network) -> tuple[Host, Host, Host]:
    """A server, a client, and between them a host that forwards from one network to the other."""
    server, client, gate = (network.host() for _ in range(3))
    network.cable((gate, "out", "10.202.0.254/24"), (server, MAIN, "10.202.0.1/24"))
    network.cable((gate, "in", "10.203.0.254/24"), (client, MAIN, "10.203.0.2/24"))
    gate.forward(True)
    server.ip("route", "add", "default", "via", "10.202.0.254")
    client.ip("route", "add", "default", "via", "10.203.0.254")
    return server, client, gate


def filter_packets(host: Host, rule: str) -> None:
    """Adds a rule of iptables. Skips the test where that cannot be had."""
    need(*host.under, "iptables", "-t", "nat", "-L", why="forwarded ports")
    host.run("iptables", *rule.split())


@pytest.mark.root
@pytest.mark.full
@pytest.mark.parametrize("reply", ["DROP", "REJECT"])
async def test_a_client_behind_address_translation(reply: str) -> None:
    """UCX connects back to the client. Where that cannot be, the side that gives up first says why."""
    with open_network() as network:
        server, client, gate = forward(network)
        await network.ready()
        filter_packets(gate, "-t nat -A POSTROUTING -o out -j MASQUERADE")
        filter_packets(gate, f"-A FORWARD -i out -m conntrack --ctstate NEW -j {reply}")
        meeting = await meet(Side(client.under), Side(server.under), "10.202.0.1")
    kind, _, text, _ = meeting.client
    assert kind in ("TimeoutError", "ConnectionRefusedError"), meeting.client
    assert "does a firewall or NAT block them?" in text
    if kind == "ConnectionRefusedError":  # the server gave up first
        assert "its UCX listens at 10.203.0.2:" in text and "(and not at 10.202.0.254, where its" in text


@pytest.mark.root
@pytest.mark.parametrize("reply", ["icmp-port-unreachable", "tcp-reset"])
@pytest.mark.parametrize("closed", ["server", "client", "both"])
async def test_a_firewall_that_rejects(closed: str, reply: str) -> None:
    """UCX chooses the side that connects. The side that fails first knows why, and tells the client."""
    with open_network() as network:
        server, client = build(network, LAYOUTS["one network"], AFTER)
        await network.ready()
        for host, name in (server, "server"), (client, "client"):
            if closed in (name, "both"):
                filter_packets(host, f"-A INPUT -p tcp --dport 20000:20999 -j REJECT --reject-with {reply}")
        ports = {"UCX_TCP_PORT_RANGE": "20000-20999"}
        sides = (Side(host.under, environment={**QUIET, **ports}) for host in (client, server))
        meeting = await meet(*sides, ONE.ip)
    if meeting.client[0] == "connected":  # the other side has connected
        assert closed != "both"
        return
    kind, _, text, _ = meeting.client
    assert kind in ("TimeoutError", "ConnectionRefusedError") and f"{ONE.ip}:" in text
    assert "messages did not get through over UCX (its UCX listens at " in text
    assert "does a firewall or NAT block them?" in text


@pytest.mark.root
@pytest.mark.full
async def test_a_forwarded_port() -> None:
    """The client does not reach the server's own address. The server's UCX connects to the client."""
    with open_network() as network:
        server, client, gate = forward(network)
        await network.ready()
        filter_packets(gate, "-t nat -A PREROUTING -i in -p tcp -d 10.203.0.254 -j DNAT --to-destination 10.202.0.1")
        filter_packets(gate, "-A FORWARD -i in -m conntrack ! --ctstate DNAT,ESTABLISHED -j DROP")
        meeting = await meet(Side(client.under), Side(server.under), "10.202.0.1", through="10.203.0.254")
        meeting.assert_tcp()
        assert meeting.client[3][0] == "10.203.0.254"


@pytest.mark.root
@pytest.mark.sample(1)
@pytest.mark.parametrize("default_route", [False, True], ids=["", "default route"])
async def test_one_worker_over_two_networks(default_route: bool) -> None:
    """Both networks lead to one server, whose two connections may share an endpoint."""
    ips = [ONE.ip, "10.202.0.1"]
    with open_network() as network:
        server, client = network.host(), network.host()
        network.cable((server, MAIN, ONE.main[0]), (client, MAIN, TWO.main[0]))
        network.cable((server, AFTER, "10.202.0.1/24"), (client, AFTER, "10.202.0.2/24"))
        if default_route:
            client.ip("route", "add", "default", "via", "10.201.0.254", "dev", MAIN)
        await network.ready()
        async with (
            open_peer("host", ["0.0.0.0"], {}, under=server.under, **QUIET) as listening,
            open_peer("visitor_by_several_ways", SIZES, under=client.under, **QUIET) as connecting,
        ):
            [[_, port]] = await listening.hear()
            await connecting.tell([[ip, port] for ip in [*ips, *ips]])
            assert await connecting.hear(40) == [[["tcp"], [ip, port]] for ip in [*ips, *ips]]
            await listening.tell()
            await listening.hear()


@pytest.mark.root
@pytest.mark.sample(2)
@pytest.mark.parametrize("others", [False, True], ids=["", "other networks"])
@pytest.mark.parametrize("at", [("server",), ("client",), ("server", "client")], ids="-".join)
@pytest.mark.parametrize("layout", [Layout(ONE, TWO), Layout(SIX, SEVEN)], ids=["IPv4", "IPv6"])
async def test_virtual_addresses(layout: Layout, at: Sequence[str], others: bool) -> None:
    """...at the loopback device, with a route through the network: routing on the host, or anycast."""
    virtual = ("fd00:99::1", "fd00:99::2") if ":" in layout.server.ip else ("10.99.0.1", "10.99.0.2")
    if others:
        ends = [attrs.evolve(layout.server, aside=["10.8.0.1/24"]), attrs.evolve(layout.client, aside=["10.9.0.1/24"])]
        layout = Layout(*ends, default_route=True)
    with open_network() as network:
        server, client = build(network, layout, BEFORE)
        for host, own, peer, address in (
            (server, layout.server, client, virtual[0]),
            (client, layout.client, server, virtual[1]),
        ):
            host.add_address("lo", f"{address}/{128 if ':' in address else 32}")
            peer.ip("route", "add", address, "via", own.ip)
        await network.ready()
        options = {"local_address": virtual[1]} if "client" in at else {}
        target = virtual[0] if "server" in at else layout.server.ip
        (await meet(Side(client.under, options), Side(server.under), target)).assert_tcp()


@pytest.mark.root
@pytest.mark.parametrize("addresses", [("169.254.1.1/16", "169.254.1.2/16"), ("fe80::a:1/64", "fe80::a:2/64")], ids=str)
async def test_hosts_with_only_link_local_addresses(addresses: tuple[str, str]) -> None:
    """UCX uses no such address, and does not say so. Both sides do."""
    ip = addresses[0].partition("/")[0]
    with open_network() as network:
        server, client = network.host(), network.host()
        network.cable((server, MAIN, addresses[0]), (client, MAIN, addresses[1]))
        await network.ready()
        through, everywhere = (f"{ip}%{MAIN}", "::") if ":" in ip else (ip, "0.0.0.0")
        meeting = await meet(Side(client.under), Side(server.under), everywhere, through=through)
    kind, number, text, seconds = meeting.client
    assert (kind, number) == ("ConnectionRefusedError", errno.ECONNREFUSED) and seconds < 9
    for said in text, meeting.log:
        assert "UCX uses no link-local addresses: give the network device there another address" in said
        assert "NET_DEVICES" not in said and "select.c" not in said


async def ask_to_visit(client: Host, ip: str, port: int) -> list[Any]:
    async with open_peer("visitor", {}, SIZES, under=client.under, **QUIET) as connecting:
        await connecting.tell([ip, port])
        said: list[Any] = await connecting.hear(40)
        return said


@pytest.mark.root
@pytest.mark.sample(2)
@pytest.mark.parametrize("isolate", [False, True], ids=["", "isolate"])
@pytest.mark.parametrize("before", [{}, {BEFORE: "10.77.0", AFTER: "10.78.0"}], ids=["no network", "two networks"])
async def test_a_network_comes_later(before: dict[str, str], isolate: bool) -> None:
    """...than the server's worker, and perhaps than the first client of another network. It goes, and comes again. At
    last one of the first networks goes.
    """
    with open_network() as network:
        server, client = network.host(), network.host()

        def lay(device: str, net: str) -> str:
            network.cable((server, device, f"{net}.1/24"), (client, device, f"{net}.2/24"))
            return f"{net}.1"

        others = [lay(device, net) for device, net in before.items()][:1]
        await network.ready()
        async with open_peer("host", ["0.0.0.0"], {"isolate": isolate}, under=server.under, **QUIET) as listening:
            [[_, port]] = await listening.hear()

            async def visit(*ips: str) -> None:
                for ip in ips:
                    said = await ask_to_visit(client, ip, port)
                    assert said[:2] == ["connected", ["tcp"]], (ip, said)

            await visit(*others)
            for net in ("10.201.0", "10.201.0", "10.202.0"):
                ip = lay(MAIN, net)
                await network.ready()
                await visit(ip, *others)
                if net == "10.201.0":
                    network.cut(server, MAIN)
                    await visit(*others)
            if others:
                network.cut(server, AFTER)
                await visit(others[0])
            await listening.tell()
            await listening.hear()


@pytest.mark.root
@pytest.mark.parametrize("isolate", [False, True], ids=["", "isolate"])
@pytest.mark.parametrize("named", [{}, {"UCX_NET_DEVICES": f"{MAIN},lo"}], ids=["", "named device"])
async def test_an_address_changes(named: dict[str, str], isolate: bool) -> None:
    """...of the device that the server uses."""
    with open_network() as network:
        server, client = network.host(), network.host()
        network.cable((server, MAIN, ONE.main[0]), (client, MAIN, TWO.main[0]))
        await network.ready()
        options = {"isolate": isolate}
        async with open_peer("host", ["0.0.0.0"], options, under=server.under, **QUIET, **named) as listening:
            [[_, port]] = await listening.hear()
            assert (await ask_to_visit(client, ONE.ip, port))[:2] == ["connected", ["tcp"]]
            server.ip("addr", "del", ONE.main[0], "dev", MAIN)
            server.add_address(MAIN, "10.201.0.9/24")
            for _ in range(2):
                assert (await ask_to_visit(client, "10.201.0.9", port))[:2] == ["connected", ["tcp"]]
            await listening.tell()
            await listening.hear()


@pytest.mark.root
@pytest.mark.sample(2)
@pytest.mark.parametrize("isolate", [False, True], ids=["", "isolate"])
@pytest.mark.parametrize("swapped", [False, True], ids=["", "swapped"])
async def test_a_device_is_renamed(swapped: bool, isolate: bool) -> None:
    """...and keeps its address: udev renames devices, and a card that is replaced may have another name. UCX knows
    devices by their names.
    """
    with open_network() as network:
        server, client = network.host(), network.host()
        network.cable((server, MAIN, ONE.main[0]), (client, MAIN, TWO.main[0]))
        network.cable((server, AFTER, "10.202.0.1/24"), (client, AFTER, "10.202.0.2/24"))
        await network.ready()
        async with open_peer("host", ["0.0.0.0"], {"isolate": isolate}, under=server.under, **QUIET) as listening:
            [[_, port]] = await listening.hear()
            for renamed in (), [(MAIN, "other")], [(AFTER, MAIN), ("other", AFTER)] if swapped else [("other", MAIN)]:
                for device, name in renamed:
                    network.rename(server, device, name)
                await network.ready()
                for ip in (ONE.ip, "10.202.0.1") * 2:
                    said = await ask_to_visit(client, ip, port)
                    assert said[:2] == ["connected", ["tcp"]], (ip, renamed, said)
            await listening.tell()
            await listening.hear()


@pytest.mark.root
@pytest.mark.parametrize("at", [("server",), ("client",), ("server", "client")], ids="-".join)
@pytest.mark.parametrize("address", ["main", "loopback"])
async def test_routes_by_source(address: str, at: Sequence[str]) -> None:
    """A host with two uplinks: each address has a routing table of its own, and there is no default route besides."""
    with open_network() as network:
        server, client, gate = forward(network)
        virtual = {server.name: "10.99.0.1", client.name: "10.99.0.2"}
        own = {server.name: "10.202.0.1", client.name: "10.203.0.2"}
        for host, router in (server, "10.202.0.254"), (client, "10.203.0.254"):
            if ("server" if host is server else "client") in at:
                host.ip("route", "del", "default")
                host.ip("route", "add", "default", "via", router, "dev", MAIN, "table", "100")
                for source in (own[host.name], virtual[host.name]):
                    host.ip("rule", "add", "from", source, "table", "100")
            if address == "loopback":
                host.add_address("lo", f"{virtual[host.name]}/32")
                gate.ip("route", "add", virtual[host.name], "via", own[host.name])
        await network.ready()
        found = virtual if address == "loopback" else own
        options = {"local_address": found[client.name]}
        (await meet(Side(client.under, options), Side(server.under), found[server.name])).assert_tcp()


@pytest.mark.root
async def test_labels_are_no_devices() -> None:
    """...such as those that ifconfig gives further addresses."""
    with open_network() as network:
        host = network.host()
        host.ip("addr", "add", "10.99.0.1/32", "dev", "lo", "label", "lo:0")
        found = "from trio_ucx.ucp._quirks import network_devices; print(*network_devices.active_addresses())"
        assert "('10.99.0.1', 'lo')" in host.run(sys.executable, "-c", found)


@pytest.mark.root
async def test_two_devices_in_one_network() -> None:
    """The kernel sends by the first; the user names the second."""
    with open_network() as network:
        server, client, switch = (network.host() for _ in range(3))
        switch.ip("link", "add", "bridge", "type", "bridge")
        switch.ip("link", "set", "bridge", "up")
        ends = (server, MAIN, "10.201.0.10/24"), (server, AFTER, "10.201.0.11/24"), (client, MAIN, "10.201.0.2/24")
        for number, end in enumerate(ends):
            network.cable(end, (switch, f"port{number}", "198.18.0.1/32"))
            switch.ip("link", "set", f"port{number}", "master", "bridge")
        await network.ready()
        for device in (MAIN, AFTER):
            environment = {**QUIET, "UCX_NET_DEVICES": device}
            (await meet(Side(client.under), Side(server.under, environment=environment), "10.201.0.10")).assert_tcp()


@pytest.mark.root
async def test_a_client_is_there_before_its_network() -> None:
    with open_network() as network:
        server, client = network.host(), network.host()
        async with open_peer("visitor_of_a_late_network", {}, under=client.under, **QUIET) as connecting:
            await connecting.hear()
            network.cable((server, MAIN, ONE.main[0]), (client, MAIN, TWO.main[0]))
            await network.ready()
            async with open_peer("host", [ONE.ip], {}, under=server.under, **QUIET) as listening:
                await connecting.tell(*(await listening.hear()))
                assert await connecting.hear(40) == ["tcp"]
                await listening.tell()
                await listening.hear()


# ---- the choice, with addresses of made-up workers ----


def made_up(*hosts: str) -> WorkerAddress:
    """The address of a worker with a TCP device for each of these hosts, and another network device."""
    devices = [
        Device("tcp", bytes([0, family_of(host)]) + ip_address(host).packed, struct.pack(">H", 1000 + number))
        for number, host in enumerate(hosts)
    ]
    blob = pack(*devices, Device("rc_mlx5", bytes(20), bytes(4)))
    places = parse_worker_address(blob).tcp_addresses
    return some_description().worker._changed(ucx=blob, network=blob, tcp_addresses=places)


def kept(address: WorkerAddress) -> list[str]:
    parsed = parse_worker_address(address.network)
    assert parsed.tcp_addresses == address.tcp_addresses
    assert "rc_mlx5" in parsed.transports
    return [host for host, _ in parsed.tcp_addresses]


@pytest.mark.parametrize(
    ("hosts", "control", "beside", "leading", "expected"),
    [
        (["10.0.0.1"], "10.0.0.1", [], [], ["10.0.0.1"]),
        (["10.0.0.1", "172.17.0.1"], "10.0.0.1", [], ["172.17.0.1"], ["10.0.0.1"]),
        (["172.17.0.1", "10.0.0.1", "10.8.0.1"], "10.0.0.1", [], [], ["10.0.0.1"]),
        (["172.17.0.1", "fd00::1"], "fd00::1", [], [], ["fd00::1"]),
        (["172.17.0.1", "10.0.0.1"], "::ffff:10.0.0.1", [], [], ["10.0.0.1"]),
        (["172.17.0.1", "10.0.0.1"], "fd00::1", ["fd00::1", "10.0.0.1"], ["172.17.0.1"], ["10.0.0.1"]),
        (["172.17.0.1", "10.0.0.1"], "fe80::1%lo", ["fe80::1", "10.0.0.1"], [], ["10.0.0.1"]),
        (["172.17.0.1", "10.0.0.1"], "10.0.0.5", ["10.0.0.1", "10.0.0.5"], [], ["10.0.0.1"]),
        (["172.17.0.1", "10.0.0.1"], "10.77.0.1", ["10.77.0.1"], [], ["172.17.0.1", "10.0.0.1"]),
        (["172.17.0.1", "10.0.0.1"], "10.77.0.1", [], [], ["172.17.0.1", "10.0.0.1"]),
        (["172.17.0.1", "10.0.0.1"], "10.77.0.1", ["10.77.0.1"], ["fd00::1", "10.0.0.1"], ["10.0.0.1"]),
        (["127.0.0.1", "10.0.0.1"], "10.99.0.1", ["127.0.0.1", "10.99.0.1"], ["10.0.0.1"], ["10.0.0.1"]),
    ],
)
def test_the_device_of_the_control_socket(
    hosts: list[str],
    control: str,
    beside: list[str],
    leading: list[str],
    expected: list[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It is the only TCP device that the peer is told, if UCX uses it; else the one that leads to the peer. Devices of
    other transports stay.
    """
    monkeypatch.setattr(network_devices, "_beside", lambda ip: beside)
    monkeypatch.setattr(network_devices, "_leading", lambda ours, peer: leading)
    ends = control, "198.51.100.7"
    assert kept(network_devices.at_control_socket(made_up(*hosts), ends, {"NET_DEVICES": "all"})) == expected


@pytest.mark.parametrize(
    ("config", "environment", "named"),
    [
        ({}, None, False),
        ({}, "all", False),
        ({}, "^docker0", False),
        ({}, "eth0", True),
        ({"NET_DEVICES": "eth0,eth1"}, None, True),
        ({"NET_DEVICES": "all"}, "eth0", False),
    ],
)
def test_devices_that_the_user_names(
    config: dict[str, str], environment: str | None, named: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if environment is None:
        monkeypatch.delenv("UCX_NET_DEVICES", raising=False)
    else:
        monkeypatch.setenv("UCX_NET_DEVICES", environment)
    assert network_devices.names_devices(config) is named


def test_addresses_of_a_network_device() -> None:
    assert "127.0.0.1" in network_devices._beside("127.0.0.1")
    assert network_devices._beside("198.51.100.7") == []
    assert "127.0.0.1" in network_devices._leading("127.0.0.1", "127.0.0.1")
    assert network_devices._leading("::1", "127.0.0.1") == []
    assert ("127.0.0.1", "lo") in network_devices.active_addresses()


async def test_the_network_of_a_raw_endpoint() -> None:
    """The user names it: the peer's other TCP devices are not used."""
    address = made_up("172.17.0.1", "10.0.0.1", "fd00::1")
    assert kept(network_devices.in_network(address, "10.0.0.0/8")) == ["10.0.0.1"]
    assert kept(network_devices.in_network(address, "fd00::1")) == ["fd00::1"]
    config = {"TLS": "tcp"}
    async with ucp.open_worker(config=config) as one, ucp.open_worker(config=config) as two:
        endpoint = await one.open_endpoint(two.address, network="127.0.0.0/8")
        with trio.fail_after(15):
            await endpoint.tag_send(b"x", 1)
            assert await two.tag_receive(bytearray(1), 1) == (1, 1)
        assert {each.device for each in endpoint.transports} == {"lo"}
        endpoint.abort()
        with pytest.raises(
            OSError, match=r"none of its TCP addresses is in network='198.51.100.0/24': .*127.0.0.1"
        ) as caught:
            await one.open_endpoint(two.address, network="198.51.100.0/24")
        assert caught.value.errno == errno.EHOSTUNREACH
        with pytest.raises(ValueError, match="does not appear to be an IPv4 or IPv6 network"):
            await one.open_endpoint(two.address, network="eth0")
        with pytest.raises(TypeError, match="a network must be a str"):
            await one.open_endpoint(two.address, network=10)  # type: ignore[arg-type]
        with pytest.raises(ValueError, match="network= is for connections to a worker address"):
            await one.open_endpoint("127.0.0.1:1", network="127.0.0.0/8")
