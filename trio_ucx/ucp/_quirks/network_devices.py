"""Chooses the network devices over which UCX connects to a peer.

A worker's address has all its network devices, and UCX connects to one that it chooses: it assumes that it can reach
every address to which there is a route. If two hosts share one network and each has another one (a VPN, a storage
network, ``docker0``), it may choose an address that it does not reach, or that another host has in its own networks.
Messages then do not get through. Between the two sides of a Connection, however, the control socket has shown which
device leads to the peer. Each side therefore tells the other only the TCP device that has its own end of the control
socket. If that end is a virtual address, at the loopback device, say, it is the device by which packets to the peer
leave. Devices of other transports, such as RDMA's, stay. For raw endpoints the user names the network:
``Worker.open_endpoint(..., network=...)``.

All TCP devices stay in three cases: the user has named devices (``NET_DEVICES=eth0,eth1``: several fast ones, say);
both ends of the control socket are on this machine, which every device reaches; or UCX has no such TCP device.

A context keeps the names of the devices that were up when it was opened, and opens no more workers once one of them has
gone. Therefore a worker for Connections gets a context of its own when it is opened for a network that came later, or
after a device went, or got another name. UCX 1.20 to 1.22 also read the routes once in a process; ``_native/routes.c``
asks again.

Addresses that this host has itself are left out of the address of a peer on another host, or in another network
namespace, unless none would be left: UCX would connect to somebody here (``key_gate.c`` refuses that).

Before 1.20, UCX may also connect from a device that does not lead to the peer; nothing here changes that.

Releases: all, 1.13 to 1.22. Not needed any more when UCX tries one address after another until a connection is up.
Tests: ``tests/test_network_devices.py``.
"""

from __future__ import annotations

import errno
import socket
from collections.abc import Collection, Mapping
from functools import lru_cache
from ipaddress import ip_address
from typing import Any

from ..._native import ffi, lib
from ..._util.socket_addresses import family_of, is_loopback
from .._worker_address import WorkerAddress
from .address_layout import parse_worker_address, with_tcp_at
from .key_gate import parse_networks
from .option_limits import in_force

#: The IP addresses of a control socket to another machine: of our end, and of the peer's.
Ends = tuple[str, str]
#: IP addresses of this host, each with the name of its network device: UCX knows devices by their names.
Places = frozenset[tuple[str, str]]


def names_devices(config: Mapping[str, str]) -> bool:
    """True if the user has named the network devices that UCX may use. (An exclusion, ``^docker0``, names none.)"""
    value = in_force("NET_DEVICES", config) or "all"
    return value != "all" and not value.startswith("^")


def at_control_socket(address: WorkerAddress, ends: Ends, config: Mapping[str, str]) -> WorkerAddress:
    """Returns a worker's address with only the TCP device that leads to the peer of a control socket.

    Args:
        config: the worker's options. If they name devices, all of these stay.
    """
    if not address.tcp_addresses or names_devices(config):
        return address
    return _with_tcp_at(address, _towards_peer(address._tcp_hosts, ends))


def came_later(address: WorkerAddress, ends: Ends, config: Mapping[str, str], before: Places) -> bool:
    """True if another worker may have a TCP device that leads to the peer of a control socket, and this one has none.

    Args:
        config: the worker's options.
        before: the active addresses before the worker's context was opened.
    """
    ours = _plain(ends[0])
    device = _device_with(ours)
    if (ours, device) in before or not device:
        return False
    as_before = {host for host, _ in before & active_addresses()}
    if _towards_peer(as_before.intersection(address._tcp_hosts), ends):
        return False
    return not names_devices(config) or device in (in_force("NET_DEVICES", config) or "").split(",")


def is_outdated(address: WorkerAddress, ends: Ends | None, config: Mapping[str, str], before: Places) -> bool:
    """True if another worker needs another context: as :func:`came_later`, or because one of its devices has gone.

    In a context with a device that has gone, or has another name, UCX opens no worker.
    """
    own = {place for place in before if place[0] in address._tcp_hosts}
    return not own <= active_addresses() or (ends is not None and came_later(address, ends, config, before))


def _towards_peer(hosts: Collection[str], ends: Ends) -> frozenset[str]:
    """Returns which of a worker's TCP addresses belong to the device that leads to the peer.

    That is the device which has our end of the control socket. If UCX has none there, or only loopback, it is the one
    by which packets to the peer leave: our end may be a virtual address, at the loopback device or at a bridge.
    """
    ours, peer = map(_plain, ends)
    if ours in hosts:
        return frozenset([ours])
    return _usable(hosts, _beside(ours)) or _usable(hosts, _leading(ours, peer))


def _usable(hosts: Collection[str], device: Collection[str]) -> frozenset[str]:
    return frozenset(host for host in device if host in hosts and not is_loopback(host))


def _plain(host: str) -> str:
    """An IP address without a zone, and without the prefix of IPv4 on an IPv6 socket."""
    return host.removeprefix("::ffff:").partition("%")[0]


def without_own(address: WorkerAddress, ours: WorkerAddress) -> WorkerAddress:
    """Returns a peer's address without the TCP devices whose IP addresses this host has, if the peer is elsewhere."""
    if not address.tcp_addresses or ours.host.shares_network(address.host):
        return address
    hosts = frozenset(host for host in address._tcp_hosts if not is_own(host))
    return address if len(hosts) == len({*address._tcp_hosts}) else _without_others(address, hosts)


def is_own(host: str, scope: int = 0) -> bool:
    """True if this host has an IP address, in this network namespace."""
    return lib.tu_is_own_address(ffi.new("tu_address_t *", (int(family_of(host)), host.encode(), 0, scope)))


@lru_cache(maxsize=64)
def _without_others(address: WorkerAddress, hosts: frozenset[str]) -> WorkerAddress:
    try:
        ucx, network = (with_tcp_at(part, hosts) if part else b"" for part in (address.ucx, address.network))
    except ValueError:  # it has an unknown layout
        return address
    return address if ucx is None else _changed(address, hosts, ucx=ucx, network=network or b"")


@lru_cache(maxsize=64)
def _with_tcp_at(address: WorkerAddress, hosts: frozenset[str]) -> WorkerAddress:
    network = with_tcp_at(address.network, hosts)
    return address if network is None else _changed(address, hosts, network=network)


def in_network(address: WorkerAddress, network: str) -> WorkerAddress:
    """Returns a worker's address with only those TCP devices that have an address in an IP network.

    Args:
        network: as in ``"10.0.0.0/8"``, or one address.

    Raises:
        TypeError, ValueError: ``network`` is none; or the address has an unknown layout.
        OSError: none of its TCP devices is in it (EHOSTUNREACH).
    """
    [chosen] = parse_networks([network])
    found = parse_worker_address(address.ucx).tcp_addresses
    hosts = {host for host, _ in found if ip_address(host) in chosen}
    ucx = with_tcp_at(address.ucx, hosts)
    if ucx is None:
        raise OSError(
            errno.EHOSTUNREACH,
            f"connecting to {address!r}: none of its TCP addresses is in network={network!r}: "
            f"{', '.join(host for host, _ in found) or 'it has none'}",
        )
    network_part = with_tcp_at(address.network, hosts) if address.network else None
    return _changed(address, hosts, ucx=ucx, network=network_part or b"")


def _changed(address: WorkerAddress, hosts: Collection[str], **parts: bytes) -> WorkerAddress:
    """Returns the address with these parts, and of its TCP addresses only those of these hosts."""
    return address._changed(tcp_addresses=tuple(at for at in address.tcp_addresses if at[0] in hosts), **parts)


def addresses_of_devices(address: WorkerAddress) -> list[str]:
    """Returns the IP addresses of the TCP devices that a worker of this process uses: first those where UCX listens.

    Over RDMA alone, they are those of all devices.
    """
    if address.network and not address.tcp_addresses:
        return sorted(host for host, _ in active_addresses())
    hosts = list(address._tcp_hosts)
    return list(dict.fromkeys([*hosts, *(beside for host in hosts for beside in _beside(host))]))


def _beside(ip: str) -> list[str]:
    """The addresses of the network device that has this address: UCX listens at one of them."""
    return _hosts(lib.tu_interface_with(_native_address(ip)))


def _leading(ours: str, peer: str) -> list[str]:
    """The addresses of the network device by which packets from one address to another leave."""
    return _hosts(lib.tu_interface_between(_native_address(ours), _native_address(peer)))


def may_lead_to(address: WorkerAddress, host: str) -> bool:
    """True if a TCP device of our worker leads to a host, and UCX would use it; or if the kernel does not say."""
    return any(lib.tu_leads_to(_native_address(own), _native_address(host)) for own in address._tcp_hosts)


def active_addresses() -> Places:
    """Returns the addresses of this host's network devices that are up and have a carrier: UCX uses no others."""
    return frozenset(_places(lib.TU_ACTIVE))


def _device_with(ip: str) -> str:
    """The name of the network device that has this address; "" if none has."""
    interface = lib.tu_interface_with(_native_address(ip))
    try:
        return socket.if_indextoname(interface) if interface > 0 else ""
    except OSError:  # it has just gone
        return ""


def _native_address(ip: str) -> Any:
    return ffi.new("tu_address_t *", (int(family_of(ip)), ip.encode(), 0, 0))


def _hosts(interface: int) -> list[str]:
    """The addresses of the network device with this index; none if it is not the index of one."""
    return [host for host, _ in _places(interface)] if interface > 0 else []


def _places(interface: int) -> list[tuple[str, str]]:
    """The addresses of the network device with this index, each with the device's name."""
    size = lib.tu_interface_addresses(interface, ffi.NULL, 0)
    found = ffi.new("tu_address_t[]", size)
    count = min(lib.tu_interface_addresses(interface, found, size), size)
    return [(ffi.string(each.ip).decode(), ffi.string(each.device).decode()) for each in found[0:count]]
