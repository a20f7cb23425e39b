"""Structured-concurrency networking over UCX, for Trio: shared memory and TCP messages with real cancellation.

UCX's RDMA is used where UCX has it, and has never been run in this repository.

Layers, lowest first; imports point down only (``tests/test_layers.py``):

    _native        the compiled module, and loading UCX
    ucp            UCP in Trio idiom; any UCP peer can be talked to with it alone
    here           connections between two trio_ucx peers:
                     _wire, _credit, _tag_queue,        the rules, without I/O
                       _byte_stream, _batch,
                       _close_handshake
                     _link                              the rules of one connection, carried out over UCX
                     _handshake                         opening one: the control socket, authentication, the greeting
                     _connection, _listener,            what the user holds
                       _statistics
                     _addresses, _unix                  addresses as text; Unix sockets
                     _arguments, _shared                what _open and _serve have in common; the run's shared worker
                     _open, _serve                      what the user calls
                     anyio                              Connections for libraries written for anyio
    _cli, testing  ``python -m trio_ucx``; helpers for tests
"""

from . import ucp as ucp
from ._addresses import format_address as format_address
from ._addresses import parse_address as parse_address
from ._connection import Connection as Connection
from ._connection import Messages as Messages
from ._listener import Listener as Listener
from ._listener import ListenerStatistics as ListenerStatistics
from ._open import connect as connect
from ._open import open_ucx_stream as open_ucx_stream
from ._serve import open_ucx_listeners as open_ucx_listeners
from ._serve import serve_ucx as serve_ucx
from ._statistics import ConnectionStatistics as ConnectionStatistics
from ._version import __version__ as __version__
from .ucp._util import publish as _publish

__all__ = [
    "Connection",
    "ConnectionStatistics",
    "Listener",
    "ListenerStatistics",
    "Messages",
    "__version__",
    "connect",
    "format_address",
    "open_ucx_listeners",
    "open_ucx_stream",
    "parse_address",
    "serve_ucx",
    "ucp",
]

_publish(globals(), __name__)
