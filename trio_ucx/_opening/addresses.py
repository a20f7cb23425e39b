"""Addresses as text and as (host, port) pairs."""

from __future__ import annotations

import ipaddress
import socket
from collections.abc import Collection, Sequence
from contextlib import suppress
from typing import Any

from .._util.socket_addresses import SocketAddress, check_host, check_port, family_of, split_address
from .._util.socket_addresses import format_address as _format
from .unix import PREFIX, unix_path

#: By the address of a listener at all addresses of its machine: that of the loopback interface, and one that no machine
#: has (RFC 5737, RFC 3849).
_WILDCARDS = {"0.0.0.0": ("127.0.0.1", "192.0.2.1"), "::": ("::1", "2001:db8::1")}


def parse_address(address: SocketAddress) -> tuple[str, int]:
    """Splits an address: ``"10.0.0.5:13337"`` becomes ``("10.0.0.5", 13337)``.

    Looks nothing up: a host stays a name. :attr:`Listener.address` is such a pair; :func:`connect` and
    :func:`serve_ucx` take one, and :func:`open_ucx_stream` takes its parts.

    Args:
        address: ``"host:port"``, ``"[v6]:port"``, ``"unix:/path"``, or a pair, which is checked and returned.

    Returns:
        ``(host, port)``, or ``("unix:/path", 0)``.

    Raises:
        ValueError: ``address`` is not an address; its port is out of range; an IPv6 address has no brackets.
        TypeError: ``address`` is neither a str nor a pair.
    """
    path = unix_path(address)
    return split_address(address, other="'unix:/path'") if path is None else (PREFIX + path, 0)


def format_address(address: tuple[str, int]) -> str:
    """Writes an address as text that :func:`parse_address` and :func:`connect` take: ``"[::1]:13337"``.

    Args:
        address: ``(host, port)``, ``("unix:/path", 0)``, or the address of an IPv6 socket, which has four items.

    Raises:
        ValueError, TypeError: as :func:`parse_address`.
    """
    if isinstance(address, str):
        raise TypeError(f"the address must be a pair (host, port), not the str {address!r}")
    return _format(parse_address(address))


def addresses_in(address: SocketAddress | Sequence[SocketAddress]) -> list[SocketAddress]:
    """Returns the items of a sequence of addresses, or a list with the one address that it is.

    Pairs are one address: ``("host", 5)``, ``["host", 5]``, and ``("host", "5")``, which :func:`split_address` refuses.

    Raises:
        ValueError: the sequence is empty.
    """
    given: Any = address
    may_be_several = isinstance(given, Sequence) and not isinstance(given, str)
    if not may_be_several or not all(isinstance(item, (str, tuple, list)) for item in given):
        return [given]
    if isinstance(given, tuple) and all(isinstance(item, str) and ":" not in item for item in given):
        return [given]
    if not given:
        raise ValueError("the list of addresses is empty: name at least one")
    return list(given)


def listening_address(port: int | SocketAddress, host: str | None) -> tuple[str | None, int]:
    """Returns the host and port of a listener, which are arguments of their own, or together the first one.

    Raises:
        TypeError, ValueError: a wrong argument; or the host is given twice.
    """
    if isinstance(port, (tuple, list)) or (isinstance(port, str) and ":" in port):
        if host is not None:
            raise ValueError(f"the address {port!r} names the host already: leave out host={host!r}")
        return parse_address(port)
    if isinstance(port, str):
        raise TypeError(f"the port must be an integer, or an address such as 'host:port', not the str {port!r}")
    return None if host is None else check_host(host), check_port(port)


def reachable_address(listening: Sequence[tuple[str, int]], own: Collection[str]) -> tuple[str, int]:
    """The address at which clients of this machine and of others reach a server.

    Args:
        listening: the addresses of its listeners.
        own: the IP addresses of the devices that UCX uses. A wildcard stands for one of them: if possible the one from
            which packets take the default route.
    """
    host, port = listening[0]
    for host, port in listening:
        if host not in _WILDCARDS:
            return host, port
        family = family_of(host)
        usable = [one for one in own if family_of(one) is family and _is_for_others(one)]
        if usable:
            outward = outward_address(_WILDCARDS[host][1])
            return outward if outward in usable else usable[0], port
    return _WILDCARDS[listening[0][0]][0], port


def _is_for_others(ip: str) -> bool:
    parsed = ipaddress.ip_address(ip)
    return not (parsed.is_loopback or parsed.is_link_local)


def outward_address(destination: str) -> str | None:
    """Returns the address of this machine from which packets to another IP address go; None without a route.

    The kernel knows it without sending one.
    """
    with suppress(OSError), socket.socket(family_of(destination), socket.SOCK_DGRAM) as probe:
        probe.connect((destination, 9))
        return str(probe.getsockname()[0])
    return None
