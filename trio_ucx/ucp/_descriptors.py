"""File descriptors: whether there are enough left, asked before UCX finds out, which it does not survive everywhere.

UCX ends the process when it cannot start its thread, leaves out transports that it cannot look at, and its TCP stops
listening at the first ``accept`` that fails.
"""

from __future__ import annotations

import os
import re
import resource

from .._native import ffi, lib

#: What UCX opens for the first context, two pipes and an epoll, and for a moment to see which devices there are.
CONTEXT = 5 + 3
#: A worker's, besides its transports': an epoll and an eventfd of UCX's, two timers and an epoll of ours; and some more
#: for a moment.
WORKER = 5 + 2
#: What an interface of a transport has: tcp an epoll and a socket, posix two files and a socket, sysv a socket.
_EACH = {"self": 0, "tcp": 2, "sysv": 1, "posix": 3, "cma": 0, "knem": 0, "xpmem": 1}
_OTHERS = 4
#: A raw listener: its socket, and the first clients'.
LISTENER = 4
#: An endpoint: sockets to the peer and from it.
ENDPOINT = 8
#: A connection: the same, and its control socket, of which there may be several until one is connected.
CONNECTION = ENDPOINT + 3


def require(count: int, doing: str) -> None:
    """Refuses what more descriptors are needed for than are left.

    Raises:
        OSError: EMFILE (or ENFILE); the message says how many are needed.
    """
    count = min(count, lib.TU_DESCRIPTORS)
    left = lib.tu_descriptors_left(count)
    if left < count:
        limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
        raise OSError(
            ffi.errno,
            f"{doing} needs {count} file descriptors, and {left} are left: close some, or raise the limit "
            f"(ulimit -n, RLIMIT_NOFILE: {limit})",
        )


def for_worker(context_info: str) -> int:
    """How many a worker needs.

    Args:
        context_info: what UCX says about its context's resources.
    """
    transports = re.findall(r"^# +resource .* -- (\w+)/", context_info, re.MULTILINE)
    return WORKER + sum(_EACH.get(transport, _OTHERS) for transport in transports)


def opened(descriptor: int, doing: str) -> int:
    """What a C function opened.

    Raises:
        OSError: it could not.
    """
    if descriptor < 0:
        number = ffi.errno
        raise OSError(number, f"{doing}: {os.strerror(number)}")
    return descriptor
