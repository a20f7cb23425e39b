"""Who the peer of a connection is, and what it has done about the end."""

from __future__ import annotations

import enum
from collections.abc import Awaitable, Callable
from typing import Any

import attrs


class PeerState(enum.Enum):
    """How far the peer of a :class:`Connection` has closed, as far as this side knows.

    Attributes:
        OPEN: not at all; or it is closing, and waits until this side has received what it had sent.
        FINISHED: it has ended its byte stream, closed, or acknowledged our close. What has arrived can be received.
        LOST: it aborted, ended or vanished. What had arrived can be received.
    """

    OPEN = enum.auto()
    FINISHED = enum.auto()
    LOST = enum.auto()


@attrs.frozen
class PeerInfo:
    """Who the peer of a :class:`Connection` is.

    Attributes:
        certificate: its verified certificate, as ``ssl.SSLSocket.getpeercert`` returns it; None without TLS, or if no
            certificate was asked for.
        pid, uid, gid: of its process, as this machine's kernel gives them for a Unix socket (``SO_PEERCRED``); for a
            client these are the process that has opened the listener. None over TCP.
        address: of its control socket, as :attr:`Connection.remote_address`; None for most clients of a Unix socket.
        stated_host: the name of its host, as the peer states it. Nobody has verified that.
        stated_pid: its process id in its PID namespace, as the peer states it.
        stated_software: its release of trio_ucx, such as ``"trio_ucx 1.0, UCX 1.22.0"``, as the peer states it.
    """

    certificate: dict[str, Any] | None
    pid: int | None
    uid: int | None
    gid: int | None
    address: tuple[str, int] | None
    stated_host: str
    stated_pid: int
    stated_software: str


#: Decides whether a client is let in: the ``admit=`` of listeners.
Admit = Callable[[PeerInfo], Awaitable[bool]]
