"""UCX's options that trio_ucx sets, each only where neither the user nor the environment chose.

UCX's own defaults are slower, or meet one of its faults: the comments say which. Options that a UCX
does not know are left out. Releases: all, 1.13 to 1.22, unless an entry's comment or condition names others. An entry
is not needed any more when the tests pass without it, and ``benchmarks/defaults.py`` shows no loss. Tests:
``tests/end_to_end/test_benchmarks.py``, and those of what each option is for.
"""

from __future__ import annotations

from collections.abc import Mapping

from ..._native import ucx
from .releases import WELL_CONFIGURABLE

#: Messages of at least this many bytes are sent by rendezvous: they stay with the sender until they are received. A
#: little more than 64 KiB, a common length, because without polling a rendezvous takes twice as long.
RENDEZVOUS_THRESHOLD = 65 * 1024

#: The first UCX that has no keys for memory reached over TCP.
TCP_WITHOUT_KEYS = (1, 19)

#: Better choices than UCX's own, each only where neither the user nor the environment chose.
DEFAULT_OPTIONS: Mapping[str, str] = {
    # A number instead of "auto", because both sides of a Connection must know which messages are held by whom.
    "RNDV_THRESH": str(RENDEZVOUS_THRESHOLD),
    # Endpoints by worker address resolve the peer's endpoint at once, and are up then. Otherwise the first large
    # message resolves it, and a peer of UCX 1.13 or 1.17 crashes when a newer one has chosen other network devices.
    "RESOLVE_REMOTE_EP_ID": "y",
}
if ucx.version >= WELL_CONFIGURABLE:
    DEFAULT_OPTIONS = {
        # Without it, shared memory is silently left out of every endpoint with error handling.
        "MM_ERROR_HANDLING": "y",
        # UCX's 8k make large messages over TCP several times slower. No more than 64k: that is how much UCX receives by
        # default, and a larger segment would overrun the memory of a peer that is not ours.
        "TCP_TX_SEG_SIZE": "64k",
        # A server connects back to its clients. With UCX's default it waits for that in connect(), and when a client
        # has died meanwhile, UCX frees the TCP endpoint twice (uct_tcp_ep_create_socket_and_connect).
        "TCP_CONN_NB": "y",
        # Else UCX looks at transports that no endpoint uses only when their descriptor says so, and loses such events
        # after a peer without error handling has gone: an idle worker would hear of no new client by worker address.
        "ADAPTIVE_PROGRESS": "n",
        # As Trio does for TCP: a server that starts again gets its port back, connections in TIME_WAIT or not.
        "TCP_CM_REUSEADDR": "y",
        **DEFAULT_OPTIONS,
    }

if WELL_CONFIGURABLE <= ucx.version < TCP_WITHOUT_KEYS:
    DEFAULT_OPTIONS = {
        # UCX 1.16 to 1.18 give out keys for memory that is to be written over TCP, and from 1.19 on UCX refuses them: a
        # large message between the two would fail, or never end.
        "TCP_PUT_ENABLE": "n",
        **DEFAULT_OPTIONS,
    }
