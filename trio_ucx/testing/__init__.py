"""Helpers for tests of programs that use trio_ucx.

Pairs of Connections in one process, for tests that need no network, and for functions such as
``trio.testing.check_two_way_stream``; a check that every native handle was closed; and, for tests of trio_ucx itself,
what the library holds inside. It may import everything but ``_cli``.
"""

from ..ucp._util import publish as _publish
from ._handles import assert_no_live_handles as assert_no_live_handles
from ._handles import live_handles as live_handles
from ._introspection import internals as internals
from ._pairs import open_clogged_pair as open_clogged_pair
from ._pairs import open_connection_pair as open_connection_pair
from ._pairs import open_pair_over_listener as open_pair_over_listener

__all__ = [
    "assert_no_live_handles",
    "internals",
    "live_handles",
    "open_clogged_pair",
    "open_connection_pair",
    "open_pair_over_listener",
]

_publish(globals(), __name__)
