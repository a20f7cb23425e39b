"""What an endpoint can be opened with, besides where it leads."""

from __future__ import annotations

import enum
import errno
import socket
from typing import Any

import attrs

from .._native import ffi, lib, ucx
from .._util.socket_addresses import Resolved, check_is_ours

#: The first UCX that knows :attr:`ErrorMode.FAILOVER`.
FAILOVER_UCX = (1, 21)


class ErrorMode(enum.Enum):
    """UCX's error handling mode of an endpoint.

    PEER notices a dead peer and can be closed by FORCE; NONE can neither, and is only for peers that insist on it.
    FAILOVER, of UCX 1.21 and later, is PEER that first tries its other lanes when one fails. It is UCX's youngest:
    in 1.22 it does that for endpoints made from worker addresses only, and for large active messages, puts and gets
    only; other operations, tag messages among them, break such an endpoint.
    """

    NONE = 0
    PEER = 1
    FAILOVER = 2


@attrs.frozen
class EndpointOptions:
    """How a native endpoint is made.

    Attributes:
        error_mode: see :class:`ErrorMode`.
        name: for UCX's logs.
        local: the address of ours to connect from.
    """

    error_mode: ErrorMode = ErrorMode.PEER
    name: str | None = None
    local: Resolved | None = None

    def native(self, client_id: int | None) -> Any:
        return ffi.new(
            "tu_endpoint_options_t *", (self.error_mode.value, client_id is not None, (self.name or "").encode())
        )


DEFAULT = EndpointOptions()


def native_address(address: Resolved | None) -> Any:
    if address is None:
        return ffi.NULL
    return ffi.new("tu_address_t *", (int(address.family), address.ip.encode(), address.port, address.scope))


def check_error_mode(mode: ErrorMode) -> ErrorMode:
    if not isinstance(mode, ErrorMode):
        raise TypeError(f"error_mode must be an ErrorMode, not {mode!r}")
    if mode is ErrorMode.FAILOVER and ucx.version < FAILOVER_UCX:
        raise NotImplementedError(f"ErrorMode.FAILOVER needs UCX 1.21 or later; this is UCX {ucx.release}")
    return mode


def check_source(local: Resolved, remote: Resolved) -> None:
    """UCX would say that connecting failed, or nothing; the kernel says why, when asked to bind a plain socket there.

    Raises:
        OSError: ``local`` is of another family, or not ours.
    """
    if local.family != remote.family:
        raise OSError(
            errno.EAFNOSUPPORT, f"local_address={local.ip!r} is incompatible with the remote address {remote}"
        )
    check_is_ours(local)
    if lib.tu_interface_with(native_address(local)) == 0:
        raise OSError(
            errno.EADDRNOTAVAIL,
            f"connecting from local_address={local.ip!r}: no network interface has this address, as UCX demands",
        )


def wrong_family(address: Resolved, family: socket.AddressFamily) -> OSError:
    """UCX would corrupt its heap: a context's TCP interfaces are of one address family."""
    ours = "IPv6" if family == socket.AF_INET6 else "IPv4"
    wanted = "inet,inet6" if ours == "IPv6" else "inet6,inet"
    return OSError(
        errno.EAFNOSUPPORT,
        f"this worker's TCP is {ours}, but {address} is not: open another worker with "
        f"config={{'TCP_AF_PRIO': '{wanted}'}} (before UCX 1.17 by the environment, UCX_TCP_AF_PRIO)",
    )
