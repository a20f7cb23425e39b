"""Structured-concurrency networking over UCX, for Trio: shared memory and TCP messages with real cancellation.

UCX's RDMA is used where UCX has it, and has never been run in this repository.

Layers, lowest first; imports point down only (``tests/test_layers.py``):

    _native        the compiled module, and loading UCX
    ucp            UCP in Trio idiom; any UCP peer can be talked to with it alone
    here           connections between two trio_ucx peers:
                     _wire, _credit, _unread,           the rules, without I/O
                       _tag_queue, _byte_stream,
                       _batch, _close_handshake
                     _errors, _peer_info                why there is no connection, or no more; who the peer is
                     _link                              the rules of one connection, carried out over UCX
                     _handshake                         opening one: the control socket, authentication, the greeting
                     _connection, _channels,            what the user holds
                       _listener, _server, _statistics
                     _addresses, _unix                  addresses as text; Unix sockets
                     _arguments, _shared                what _open and _serve have in common; the run's shared worker
                     _open, _serve, _backoff            what the user calls; when connect tries again
                     _report                            what waits in this process, and why
                     anyio                              Connections for libraries written for anyio
    mesh           groups of processes that a launcher has started
    _cli, testing  ``python -m trio_ucx``; helpers for tests
"""

from . import ucp as ucp
from ._addresses import format_address as format_address
from ._addresses import parse_address as parse_address
from ._arguments import ConnectionOptions as ConnectionOptions
from ._arguments import ConnectOptions as ConnectOptions
from ._arguments import ListenerOptions as ListenerOptions
from ._backoff import Backoff as Backoff
from ._channels import Channel as Channel
from ._connection import Connection as Connection
from ._connection import Conversations as Conversations
from ._connection import Messages as Messages
from ._errors import NotAdmitted as NotAdmitted
from ._errors import NotTrioUCX as NotTrioUCX
from ._errors import PeerClosed as PeerClosed
from ._errors import PeerLost as PeerLost
from ._errors import ServerDraining as ServerDraining
from ._errors import ServerFull as ServerFull
from ._listener import Listener as Listener
from ._listener import ListenerStatistics as ListenerStatistics
from ._open import Connecting as Connecting
from ._open import connect as connect
from ._open import open_ucx_stream as open_ucx_stream
from ._peer_info import PeerInfo as PeerInfo
from ._peer_info import PeerState as PeerState
from ._report import report as report
from ._report import report_on_signal as report_on_signal
from ._serve import open_ucx_listeners as open_ucx_listeners
from ._serve import serve_ucx as serve_ucx
from ._server import Server as Server
from ._statistics import ConnectionStatistics as ConnectionStatistics
from ._version import __version__ as __version__
from .ucp import MessageTooLong as MessageTooLong
from .ucp import UCXError as UCXError
from .ucp._memory.buffers import Buffer as Buffer
from .ucp._memory.buffers import WritableBuffer as WritableBuffer
from .ucp._status import Error as Error
from .ucp._util import publish as _publish

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
    "UCXError",
    "WritableBuffer",
    "__version__",
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
