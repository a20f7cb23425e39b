"""Hosts with several networks, of which not all lead to the peer: connections work, or say what to set.

The choice of the network device (``trio_ucx/ucp/_quirks/network_devices.py``) is tested with addresses of made-up
workers; the matrix with real ones in network namespaces.
"""

from __future__ import annotations

import errno
from collections.abc import Iterator, Sequence
from itertools import count
from typing import Any

import attrs
import pytest
from networks import QUIET, Host, Meeting, Network, Side, meet, open_network

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
