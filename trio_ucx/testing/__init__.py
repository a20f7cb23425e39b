"""Helpers for tests of programs that use trio_ucx.

Pairs of Connections in one process, for tests that need no network; a peer in another process, which can be killed or
stopped; faults in what a Connection sends; a check that every native handle was closed. It may import everything but
``_cli``.
"""

from .._util.handles import publish as _publish
from ._faults import Faults
from ._handles import assert_no_live_handles
from ._introspection import internals  # noqa: F401  # for tests of trio_ucx itself, not public
from ._pairs import open_clogged_pair, open_connection_pair
from ._peer_process import PeerFaults, open_peer_process

__all__ = [
    "Faults",
    "PeerFaults",
    "assert_no_live_handles",
    "open_clogged_pair",
    "open_connection_pair",
    "open_peer_process",
]

_publish(globals(), __name__)
