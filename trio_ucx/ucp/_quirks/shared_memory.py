"""Chooses the kind of shared memory for UCX: one that is available here, and preferably one that killed processes free.

UCX has two kinds. It opens a worker with both or not at all, so one that is not available must be left out beforehand.
Of System V's (sysv) nothing remains when a process is killed. POSIX shared memory (posix) is files in /dev/shm, which a
process leaves there when it is killed while it opens a worker. If both are available, UCX uses System V's only.

Reason: ``ucp_worker_create`` fails if one of its transports cannot be opened. Releases: all, 1.13 to 1.22. Not needed
any more when a worker opens without ``/dev/shm`` and with ``kernel.shmmni`` used up. Sizes are upper bounds of what
UCX 1.22 allocates (``uct_mm_iface_t``). Test: ``tests/test_shared_memory.py``.
"""

from __future__ import annotations

import errno
import logging
import os
import resource
from collections.abc import Collection, Mapping
from pathlib import Path

from ..._native import lib, ucx
from .._status import Status, UCXError
from . import option_limits, wake_sockets
from .address_layout import SHARED_MEMORY

logger = logging.getLogger("trio_ucx")

#: With less free space in /dev/shm UCX leaves posix out (POSIX_SHM_MIN_SIZE).
_POSIX_MINIMUM = 16 << 20
#: UCX's names for several transports, and which of these transports copy from or map a peer's memory.
_ALIASES = {"sm": ("cma", "knem", "xpmem"), "shm": ("cma", "knem", "xpmem"), "mm": ("xpmem",)}
_EVERYTHING = ("", "all")
#: Transports that reach no other process by themselves.
_ALONE = {"self", "cma", "knem", "xpmem"}
#: The option that makes UCX leave posix out. Releases before 1.17 need not know it: they use shared memory on request
#: only.
_NO_POSIX = {"POSIX_SHM_MIN_SIZE": "inf"} if ucx.version >= (1, 17) else {}
#: The statuses with which UCX fails for lack of shared memory.
_FAILURES = {Status.NO_MEMORY, Status.NO_RESOURCE, Status.SHMEM_SEGMENT, Status.IO_ERROR}


def restrict(options: Mapping[str, str]) -> dict[str, str]:
    """Returns options that leave out the kinds that are not available, or not needed.

    Args:
        options: the options in force, with the environment's.

    Raises:
        OSError: no transport is left that could reach another process.
    """
    wanted = _wanted(options)
    kinds, problems = _kinds(wanted), _problems(options)
    changes: dict[str, str] = {}
    if {"sysv", "posix"} <= {*kinds} and not problems and "posix" not in wanted:
        changes = {name: value for name, value in _NO_POSIX.items() if name not in options}
    if problems:
        changes["TLS"] = _without(wanted, problems)
    if problems and len(problems) == len(kinds):
        reasons = "; ".join(dict.fromkeys(str(problem.strerror) for problem in problems.values()))
        if not wanted[0].startswith("^") and all(_is_local(each) for each in wanted):
            number = next(iter(problems.values())).errno
            raise OSError(
                number, f"no shared memory can be had, and TLS={','.join(wanted)!r} allows nothing else: {reasons}"
            )
        logger.warning("UCX does without shared memory: %s", reasons)
    return changes


def check(options: Mapping[str, str]) -> bytes:
    """Refuses to create a worker with POSIX shared memory if /dev/shm has no room for it, or cannot be written to.

    :func:`restrict` saw that it had. With less than the minimum, UCX's worker gets no memory, and crashes (SIGSEGV).

    Returns:
        The folder for the worker's wake-up sockets; empty if it has no shared memory.

    Raises:
        OSError: it has not, or there is no such folder any more.
    """
    kinds = _kinds(_wanted(options))
    if not kinds:
        return b""
    folder = wake_sockets.find_folder()
    wake_sockets.sweep(folder)
    if "posix" in kinds and options.get("POSIX_SHM_MIN_SIZE") != "inf":
        problem = _posix_problem(options, max(_POSIX_MINIMUM, sum(_needed("POSIX", options))))
        if problem is not None:
            raise problem
    return folder


def explain(status: int, doing: str, options: Mapping[str, str]) -> Exception:
    """The error for a worker that UCX could not create.

    Args:
        options: the context's, with the environment's.
    """
    error = UCXError(status, doing)
    problems = [*_problems(options).values()] if error.status in _FAILURES else []
    if not problems:
        return error
    found = OSError(problems[0].errno, f"{error}: {'; '.join(str(problem.strerror) for problem in problems)}")
    found.__cause__ = error
    return found


def reaches_nobody(transports: Collection[str]) -> bool:
    """True if none of these transports reaches another process by itself."""
    return _ALONE.issuperset(transports)


def _wanted(options: Mapping[str, str]) -> list[str]:
    return [each.strip() for each in options.get("TLS", "all").split(",")]


def _problems(options: Mapping[str, str]) -> dict[str, OSError]:
    """The kinds of shared memory that the options allow and that are not available, with the reasons."""
    kinds = _kinds(_wanted(options))
    problems: dict[str, OSError] = {}
    try:
        if kinds:
            wake_sockets.find_folder()
    except OSError as error:
        return dict.fromkeys(kinds, error)
    if "sysv" in kinds and (problem := _sysv_problem(options)):
        problems["sysv"] = problem
    if "posix" in kinds and (problem := _posix_problem(options)):
        problems["posix"] = problem
    return problems


def _kinds(wanted: list[str]) -> list[str]:
    """The kinds of shared memory that are allowed, and that this machine may have."""
    return [kind for kind in SHARED_MEMORY if _allows(wanted, kind) and (kind != "xpmem" or _has_device(kind))]


def _has_device(transport: str) -> bool:
    """True if a transport needs no device, or has it."""
    return transport not in ("knem", "xpmem") or os.path.exists(f"/dev/{transport}")


def _allows(wanted: list[str], transport: str) -> bool:
    if wanted[0].startswith("^"):
        return transport not in [each.lstrip("^") for each in wanted]
    return any(each in _EVERYTHING or each in _ALIASES or each == transport for each in wanted)


def _is_local(name: str) -> bool:
    return name in _ALIASES or name in _ALONE or name in ("sysv", "posix")


def _without(wanted: list[str], kinds: Collection[str]) -> str:
    """Returns the transports without some kinds of shared memory."""
    if wanted[0].startswith("^"):
        return ",".join([*wanted, *kinds])
    if any(each in _EVERYTHING for each in wanted):
        return f"^{','.join(kinds)}"
    left: list[str] = []
    for each in wanted:
        left += filter(_has_device, ("sysv", "posix", *_ALIASES[each])) if each in _ALIASES else [each]
    return ",".join(dict.fromkeys(each for each in left if each not in kinds))


def _needed(kind: str, options: Mapping[str, str]) -> tuple[int, int]:
    """Upper bounds of a worker's memory: its queue, and buffers for messages. By default 64 KiB and 4.5 MiB."""
    elements, element, segment = (option_limits.size(f"{kind}_{name}", options) for name in option_limits.QUEUE)
    begin = option_limits.number(option_limits.in_force(f"{kind}_RX_BUFS_GROW", options) or "512") or 512
    buffers = begin if elements < begin else 2 * elements + begin  # they grow, by a factor of up to 2
    return 2 * elements * element, int(min(buffers, 2**31)) * (segment + 960)


def _sysv_problem(options: Mapping[str, str]) -> OSError | None:
    """Returns why a worker cannot have System V shared memory; None if it can."""
    if not lib.tu_keep_segments_private():
        return OSError(
            errno.EPERM,
            "other members of this user's group could open UCX's System V segments (mode 0660), and trio_ucx cannot "
            "change that, because it cannot replace shmget() in this libucs",
        )
    queue, buffers = _needed("SYSV", options)
    number = lib.tu_probe_sysv(queue, buffers)
    if number == 0:
        return None
    limits = ", ".join(f"kernel.{name}={_limit(name)}" for name in ("shmmax", "shmall", "shmmni"))
    return OSError(
        number,
        f"no System V segments of {queue} and {buffers} bytes ({os.strerror(number)}): raise the limits ({limits}), "
        "or remove segments that nobody uses (ipcs -m)",
    )


def _limit(name: str) -> str:
    try:
        return Path("/proc/sys/kernel", name).read_text().strip()
    except OSError:
        return "?"


def _posix_problem(options: Mapping[str, str], minimum: int = _POSIX_MINIMUM) -> OSError | None:
    """Returns why a worker cannot have POSIX shared memory; None if it can."""
    folder = options.get("POSIX_DIR", "/dev/shm")
    try:
        state = os.statvfs(folder)
    except OSError as error:
        return OSError(error.errno, f"{folder}: {error.strerror}")
    if state.f_flag & os.ST_RDONLY or not os.access(folder, os.W_OK | os.X_OK):
        return OSError(errno.EROFS, f"{folder} cannot be written to")
    free = state.f_bavail * state.f_bsize
    if free < minimum and "POSIX_SHM_MIN_SIZE" not in options:
        return OSError(errno.ENOSPC, f"{folder} has {free} bytes left, of {minimum} that UCX asks for")
    longest, (limit, _) = max(_needed("POSIX", options)), resource.getrlimit(resource.RLIMIT_FSIZE)
    if limit != resource.RLIM_INFINITY and limit < longest:
        return OSError(
            errno.EFBIG,
            f"a file in {folder} may have at most {limit} bytes, and UCX needs {longest}: raise the limit (ulimit -f, "
            "RLIMIT_FSIZE)",
        )
    return None
