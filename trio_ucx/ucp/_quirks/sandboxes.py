"""Names the setting where a hardened systemd unit, or another sandbox, denies what UCX needs.

UCX logs "getifaddrs error" for each network device, writes "failed to install bistro hook" to stdout as it is loaded,
or fails with IO_ERROR. Where UCX may not patch the C library, it is told to do without memory hooks (``_native``).
Releases: all, 1.13 to 1.22. Not needed any more when UCX's lines and statuses name the cause. Test:
``tests/test_environments.py``.
"""

from __future__ import annotations

import errno
import logging
import os
import socket

from ..._native import MEMORY_HOOKS, ucx
from .shared_memory import reaches_nobody

logger = logging.getLogger("trio_ucx")

#: The errors by which a seccomp filter or a security module refuses.
_DENIED = {errno.EAFNOSUPPORT, errno.EACCES, errno.EPERM}
_BOOT_ID = "/proc/sys/kernel/random/boot_id"


def check(transports: str) -> None:
    """Warns of what UCX does without.

    Args:
        transports: the option TLS in force.

    Raises:
        OSError: no transport is left that could reach another process.
    """
    if not ucx.may_patch and MEMORY_HOOKS not in os.environ:
        logger.warning(
            "UCX does without memory hooks: this process may not have memory that is writable and executable "
            "(MemoryDenyWriteExecute= of the systemd unit). Only RDMA is slower then; %s=none ends this warning",
            MEMORY_HOOKS,
        )
    wanted = {each.strip() for each in transports.split(",")}
    excludes = transports.startswith("^")
    allowed = not {"tcp", "^tcp"} & wanted if excludes else {"", "all", "tcp"} & wanted
    if not allowed or not (problem := no_network_devices()):
        return
    if not excludes and reaches_nobody(wanted - {"tcp"}):
        raise OSError(errno.ENODEV, f"TLS={transports!r} allows nothing but TCP, and UCX has none: {problem}")
    logger.warning("UCX does without TCP: %s", problem)


def no_network_devices() -> str:
    """Returns why UCX finds no network devices; "" if it may look for them, by netlink."""
    try:
        socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, 0).close()
    except OSError as error:
        if error.errno in _DENIED:
            return (
                "it finds no network devices, because this process may not open netlink sockets: add AF_NETLINK to "
                "RestrictAddressFamilies= of the systemd unit, or allow them in the seccomp filter"
            )
    return ""


def check_proc() -> None:
    """Explains why UCX could not create a worker, if it needs something in /proc that is not there.

    Raises:
        OSError: with the reason.
    """
    if not os.path.exists("/proc/self"):
        raise FileNotFoundError(
            errno.ENOENT, "UCX cannot create a worker: the proc file system is missing (mount -t proc proc /proc)"
        )
    if not os.access(_BOOT_ID, os.R_OK):
        raise FileNotFoundError(
            errno.ENOENT,
            f"UCX cannot create a worker: it cannot read {_BOOT_ID}. Remove ProcSubset=pid from the systemd unit, or "
            "mount proc without subset=pid",
        )
