"""Structured-concurrency networking over UCX, for Trio: shared memory and TCP messages with real cancellation.

RDMA is used where it is chosen; it was run in emulated machines only.

Layers, lowest first; imports point down only (``tests/test_layers.py``):

    _util          utilities that have nothing to do with UCX
    _native        the compiled module, and loading UCX
    ucp            UCP in Trio idiom; any UCP peer can be talked to with it alone
    here           connections between two trio_ucx peers:
                     _rules                             what is sent, kept, granted and ended; without I/O
                     _errors, _peer_info                why there is no connection, or no more; who the peer is
                     _link                              the rules of one connection, carried out over UCX
                     _arrays                            arrays as messages
                     _handshake                         how a connection begins: the control socket, authentication
                     _opening                           addresses, keys, options, attempts
                     _connection, _channels,            what the user holds
                       _listener, _server, _statistics
                     _open, _serve, _answering          what the user calls
                     _report                            what waits in this process, and why
                     anyio                              Connections for libraries written for anyio
                     metrics                            figures for Prometheus
    mesh           groups of processes that a launcher has started
    rpc            remote procedure calls on conversations
    _cli, testing  ``python -m trio_ucx``; helpers for tests
"""

from . import ucp
from ._answering import answering
from ._channels import Channel
from ._connection import Connection, Conversations, Messages
from ._errors import (
    NotAdmitted,
    NotTrioUCX,
    PeerClosed,
    PeerLost,
    ServerDraining,
    ServerFull,
    UnexpectedMessage,
)
from ._listener import Listener, ListenerStatistics
from ._open import Connecting, connect, open_ucx_stream
from ._opening.addresses import format_address, parse_address
from ._opening.authkey import authkey
from ._opening.backoff import Backoff
from ._opening.options import ConnectionOptions, ConnectOptions, ListenerOptions
from ._peer_info import PeerInfo, PeerState
from ._report import report, report_on_signal
from ._report import report_as_environment_says as _report_as_environment_says
from ._serve import open_ucx_listeners, serve_ucx
from ._server import Server
from ._statistics import ConnectionStatistics, ServerStatistics
from ._util.handles import publish as _publish
from ._version import __version__
from .ucp._internal_api import Buffer, Error, MessageTooLong, UCXError, WritableBuffer

__all__ = [
    "Backoff",
    "Buffer",
    "Channel",
    "ConnectOptions",
    "Connecting",
    "Connection",
    "ConnectionOptions",
    "ConnectionStatistics",
    "Conversations",
    "Error",
    "Listener",
    "ListenerOptions",
    "ListenerStatistics",
    "MessageTooLong",
    "Messages",
    "NotAdmitted",
    "NotTrioUCX",
    "PeerClosed",
    "PeerInfo",
    "PeerLost",
    "PeerState",
    "Server",
    "ServerDraining",
    "ServerFull",
    "ServerStatistics",
    "UCXError",
    "UnexpectedMessage",
    "WritableBuffer",
    "__version__",
    "answering",
    "authkey",
    "connect",
    "format_address",
    "open_ucx_listeners",
    "open_ucx_stream",
    "parse_address",
    "report",
    "report_on_signal",
    "serve_ucx",
    "ucp",
]

_publish(globals(), __name__)
_report_as_environment_says()
