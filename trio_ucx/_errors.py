"""The exceptions that tell apart why there is no connection, and how one ended."""

from __future__ import annotations

import errno

import trio

from ._rules.wire import RefusalCode
from .ucp._internal_api import Error


class _Refused(Error, OSError):
    """There is no connection, because the server refuses it, or is no server of ours.

    Attributes:
        address: what the client wanted to connect to, in the form that :func:`connect` takes.
    """

    address: str

    def __init__(self, number: int, text: str, address: str = "") -> None:
        super().__init__(number, text)
        self.address = address


class ServerDraining(_Refused, ConnectionRefusedError):
    """The server drains (:meth:`Server.drain`), or its listener has closed: connect to another one, or try later.

    Attributes:
        errno: ECONNREFUSED.
        address: what the client wanted to connect to, in the form that :func:`connect` takes.
    """


class ServerFull(_Refused, ConnectionRefusedError):
    """The listener has no room for another client: its backlog is full, or file descriptors are short. Try later.

    Attributes:
        errno: ECONNREFUSED.
        address: what the client wanted to connect to, in the form that :func:`connect` takes.
    """


class NotAdmitted(_Refused, PermissionError):
    """The listener and the client do not accept each other, and trying again will not help.

    An ``authkey`` or certificate is wrong or missing, the listener is in protected mode, its ``admit=`` function does
    not let the client in, or the two sides cannot work together: other releases of trio_ucx, or options that exclude
    each other. The message says which.

    Attributes:
        errno: EACCES.
        address: what the client wanted to connect to, in the form that :func:`connect` takes.
    """


class NotTrioUCX(_Refused, ConnectionError):
    """What listens at the address does not speak the protocol of trio_ucx.

    Attributes:
        errno: EPROTO.
        address: what the client wanted to connect to, in the form that :func:`connect` takes.
    """


_REFUSALS: dict[RefusalCode, tuple[type[_Refused], int]] = {
    RefusalCode.DRAINING: (ServerDraining, errno.ECONNREFUSED),
    RefusalCode.FULL: (ServerFull, errno.ECONNREFUSED),
    RefusalCode.NOT_ADMITTED: (NotAdmitted, errno.EACCES),
}


def refusal(why: RefusalCode, text: str, address: str) -> OSError:
    """The exception for a client that was refused."""
    if why is RefusalCode.OTHER:
        return ConnectionRefusedError(errno.ECONNREFUSED, text)
    kind, number = _REFUSALS[why]
    return kind(number, text, address)


class UnexpectedMessage(Error):
    """The next message is not what the receive is for: of another length, dtype or shape, or no arrays at all.

    It was not taken: the next receive of its tag queue gets it, whatever that is.
    """


class PeerClosed(Error, trio.BrokenResourceError):
    """The peer has closed the connection, or this channel of it, gracefully, or is about to: nothing more can be sent.

    Attributes:
        reason: ``"closed"``.
    """

    reason = "closed"


class PeerLost(Error, trio.BrokenResourceError):
    """The peer is gone, and has not closed the connection gracefully; or it has broken off this channel.

    Attributes:
        reason: ``"aborted"``: it closed by force, left its block with an exception, or its graceful close took longer
            than ``close_timeout``. ``"ended"``: its process has ended, or its control socket was closed by something in
            between. ``"vanished"``: its host does not answer any more. ``"unresponsive"``: within ``close_timeout``
            it did not acknowledge our close, or its program did not receive a large message. ``"broken"``: UCX reported
            that the connection broke, or the worker broke.
    """

    reason: str = "broken"
