"""Checks that enough file descriptors and a thread are left, before UCX runs out of them.

UCX ends the process when it cannot start its thread, for want of descriptors or of threads. It starts the thread with a
context or a worker. Without descriptors it also leaves out transports that it cannot open, and its TCP transport stops
listening when an ``accept`` fails.

Reports: "Few descriptors left" (two), in ucx-reports.md. Releases: all, 1.13 to 1.22. Not needed any more when
``few_descriptors.c`` and ``am_handlers.c`` there end with an error. Test: ``tests/test_descriptors.py``.
"""

from __future__ import annotations

import os
import resource

from ..._native import ffi, lib
from .option_limits import RESOURCE
from .rdma import DEVICES

#: For the first context: two pipes and an epoll of UCX's, and those that it opens for a moment to find devices.
_CONTEXT = 5 + 3
#: Whatever its transports, the first context also starts NVIDIA's drivers, and before UCX's own thread. The drivers
#: keep descriptors: 22 with one H100. How many more they keep for each further GPU is an estimate.
_CUDA, _EACH_GPU, _MOST_GPUS = 15, 8, 16
#: Every context opens each RDMA device, mlx5's twice (GGA): a device file, and another one for its events.
_RDMA_DEVICE = 4
#: For a worker, besides its transports: an epoll and an eventfd of UCX's, two timers and an epoll of ours; one of
#: rdmacm, if there is RDMA; and some more for a moment.
WORKER = 5 + 2
#: For each interface of a transport: tcp an epoll and a socket, posix two files and a socket, sysv a socket, cuda an
#: eventfd, RDMA a completion channel (of mlx5 an estimate, the same as of others).
_EACH = {"self": 0, "tcp": 2, "sysv": 1, "posix": 3, "cma": 0, "knem": 0, "xpmem": 1, "cuda_copy": 1, "cuda_ipc": 1}
_EACH |= {"rc_verbs": 1, "ud_verbs": 1}
_OTHERS = 4
#: For a raw listener: its socket, and those of the first clients.
LISTENER = 4
#: For an endpoint: sockets to the peer and from it. (The first one over UD starts a timer; others over RDMA need none.)
ENDPOINT = 8
#: For a connection: the same, and control sockets, of which there may be several until one is connected.
CONNECTION = ENDPOINT + 3


def are_left(count: int) -> bool:
    """True if so many descriptors can be opened."""
    return lib.tu_descriptors_left(count) >= count


def require(count: int, doing: str) -> None:
    """Refuses an action that needs more descriptors than are left.

    Raises:
        OSError: EMFILE (or ENFILE); the message says how many are needed.
    """
    left = lib.tu_descriptors_left(count)
    if left < count:
        limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
        raise OSError(
            ffi.errno,
            f"{doing} needs {count} file descriptors, and {left} are left: close some, or raise the limit "
            f"(ulimit -n, RLIMIT_NOFILE: {limit})",
        )


def require_thread(doing: str) -> None:
    """Refuses an action for which UCX may start its thread, if none can be started.

    Raises:
        OSError: EAGAIN; the message names the limits.
    """
    number = lib.tu_probe_thread()
    if number != 0:
        raise OSError(
            number,
            f"{doing} needs a thread of UCX's, and none can be started: raise the limits of memory and of threads "
            "(ulimit -v, RLIMIT_AS; ulimit -u, RLIMIT_NPROC; pids.max of the control group)",
        )


def for_context(first: bool) -> int:
    """Returns how many descriptors a context needs.

    Args:
        first: no other context was opened in this process before.
    """
    try:
        needed = _CONTEXT + _RDMA_DEVICE * len(os.listdir(DEVICES))
    except OSError:  # there are none; or no descriptors
        needed = _CONTEXT
    if not first:
        return needed
    gpus = sum(os.path.exists(f"/dev/nvidia{number}") for number in range(_MOST_GPUS))  # exists() opens nothing
    return needed + (_CUDA + gpus * _EACH_GPU if gpus else 0)


def for_worker(context_info: str) -> int:
    """Returns how many descriptors a worker needs.

    Args:
        context_info: UCX's description of the context's resources.
    """
    return WORKER + sum(_EACH.get(transport, _OTHERS) for transport, _ in RESOURCE.findall(context_info))


def opened(descriptor: int, doing: str) -> int:
    """Checks the descriptor that a C function has opened, and returns it.

    Raises:
        OSError: the function failed.
    """
    if descriptor < 0:
        number = ffi.errno
        raise OSError(number, f"{doing}: {os.strerror(number)}")
    return descriptor
