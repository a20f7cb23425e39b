"""Addresses of sockets: host and port."""

from __future__ import annotations

import ipaddress
import os
import re
import socket

import attrs
import trio

from .arguments import check_integer

#: A socket address as people write it.
SocketAddress = str | tuple[str, int]


@attrs.frozen
class Resolved:
    """A numeric socket address."""

    family: socket.AddressFamily
    ip: str
    port: int
    scope: int = 0

    def __str__(self) -> str:
        return format_address((self.ip, self.port))


def family_of(ip: str) -> socket.AddressFamily:
    return socket.AF_INET6 if ":" in ip else socket.AF_INET


def is_loopback(ip: str) -> bool:
    return ip.startswith("127.") or ip == "::1"


def format_address(address: tuple[str, int]) -> str:
    host, port = address
    if host.startswith("unix:"):
        return host
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def check_port(port: int) -> int:
    return check_integer(port, "the port", 0, 65535)


def check_host(host: str) -> str:
    """Refuses what is no host. Looks no name up."""
    if not isinstance(host, str):
        raise TypeError(f"the host must be a str, not {type(host).__name__}")
    _refuse_scheme(host)
    return host


def _refuse_scheme(text: str, missing: str = "") -> None:
    """Refuses ``"tcp://host:port"`` and the like, and says what to write.

    Args:
        missing: what must follow the host if no port does.
    """
    _, scheme, rest = text.partition("://")
    if scheme:
        meant = rest.partition("/")[0] or "host"
        meant += "" if re.search(r":\d+$", meant) else missing
        raise ValueError(f"{text!r} has a scheme, which is no part of an address: write {meant!r}")


def split_address(address: SocketAddress, *, other: str = "a WorkerAddress") -> tuple[str, int]:
    """``"host:port"``, ``"[v6]:port"`` or ``(host, port)`` as ``(host, port)``.

    Args:
        other: what else the caller takes, for the message of an error.

    Raises:
        TypeError: something else.
        ValueError: no port, or one out of range.
    """
    if isinstance(address, (tuple, list)):
        if len(address) not in (2, 4):
            raise ValueError(f"an address is a pair (host, port), not {address!r}")
        host, port = address[0], address[1]
        return check_host(host), check_port(port)
    if not isinstance(address, str):
        raise TypeError(
            f"an address is 'host:port', '[v6]:port', (host, port) or {other}, not {type(address).__name__}"
        )
    _refuse_scheme(address, ":port")
    host, colon, text = address.rpartition(":")
    problem = "" if host and text.isascii() and text.isdecimal() else "is not an address"
    if not colon or address.endswith("]"):
        problem = "has no port"
    elif host.startswith("[") and host.endswith("]"):
        host = host[1:-1]
    elif ":" in host:
        meant = [f"[{address}]:port"] * _is_ipv6(address) + [f"[{host}]:{text}"] * _is_ipv6(host)
        if meant:
            raise ValueError(f"write an IPv6 address with brackets: {' or '.join(meant)}")
        problem = "is not an address"
    if problem:
        raise ValueError(f"{address!r} {problem}: write 'host:port' or '[v6 address]:port'")
    return host, check_port(int(text))


def _is_ipv6(text: str) -> bool:
    try:
        return ipaddress.ip_address(text.partition("%")[0]).version == 6
    except ValueError:
        return False


def numeric(host: str, port: int) -> Resolved | None:
    """A numeric address, which needs no look-up, or None for a name."""
    ip, _, zone = host.partition("%")
    try:
        parsed = ipaddress.ip_address(ip)
    except ValueError:
        return None
    family = socket.AF_INET6 if parsed.version == 6 else socket.AF_INET
    return Resolved(family, str(parsed), port, socket.if_nametoindex(zone) if zone else 0)


def check_local_address(address: str | None) -> Resolved | None:
    """Returns the address in ``local_address=`` with port 0, so that the kernel chooses a port; None if it is None.

    Raises:
        TypeError: it is not a str.
        ValueError: it is not a numeric IP address.
    """
    if address is None:
        return None
    if not isinstance(address, str):
        raise TypeError(f"local_address must be a str or None, not {type(address).__name__}")
    found = numeric(address, 0)
    if found is None:
        raise ValueError(f"local_address must be a numeric IP address of this machine, not {address!r}")
    return found


def check_is_ours(local: Resolved) -> None:
    """Refuses an address that no socket of this machine can be bound to.

    Raises:
        OSError: the kernel's.
    """
    with socket.socket(local.family, socket.SOCK_STREAM) as probe:
        try:
            probe.bind((local.ip, 0, 0, local.scope) if local.scope else (local.ip, 0))
        except OSError as error:
            assert error.errno is not None
            raise OSError(
                error.errno, f"connecting from local_address={local.ip!r}: {os.strerror(error.errno)}"
            ) from None


async def resolve(host: str, port: int, family: int = 0) -> list[Resolved]:
    """Looks a host name up; numeric addresses need no look-up and no checkpoint.

    Raises:
        OSError: the name is unknown (``socket.gaierror``).
    """
    found = numeric(host, port)
    if found is not None:
        return [found]
    try:
        answers = await trio.socket.getaddrinfo(host, port, family=family, type=socket.SOCK_STREAM)
    except socket.gaierror as error:
        raise socket.gaierror(error.errno, f"{error.strerror}: {host!r}") from None
    resolved = []
    for kind, _, _, _, address in answers:
        if kind in (socket.AF_INET, socket.AF_INET6):
            scope = address[3] if len(address) == 4 else 0
            one = Resolved(socket.AddressFamily(kind), str(address[0]), port, int(scope))
            if one not in resolved:
                resolved.append(one)
    return resolved
