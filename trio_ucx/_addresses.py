"""Addresses as text and as (host, port) pairs."""

from __future__ import annotations

from ._unix import PREFIX, unix_path
from .ucp._address import SocketAddress, split_address
from .ucp._address import format_address as _format


def parse_address(address: SocketAddress) -> tuple[str, int]:
    """Splits an address: ``"10.0.0.5:13337"`` becomes ``("10.0.0.5", 13337)``.

    Looks nothing up: a host stays a name. :attr:`Listener.address` is such a pair, and :func:`connect` takes one;
    :func:`open_ucx_stream` and (as ``port`` and ``host=``) :func:`serve_ucx` take its parts.

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
