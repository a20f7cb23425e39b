"""Limits, shared memory, namespaces and cores: what the kernel gives this process."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from pathlib import Path

from ..idle_cores import count_idle_cores, cpu_quota
from ..privileges import Privileges, format_bytes, in_control_group, look, read
from .finding import Finding, first_of, warn_unless

#: Descriptors that a listener leaves to the program and to one more connection, with those of a first worker.
_LISTENER = 23 + 30
#: The usual soft limit of the number of descriptors.
_USUAL = 1024
#: UCX leaves POSIX shared memory out if less than this is free in /dev/shm (POSIX_SHM_MIN_SIZE).
_POSIX_MINIMUM = 16 << 20
_MEMORY = "raise its limit: a worker takes 5 MB, and each connection up to 1 MiB of unread messages (window=)"
_THREADS = "raise its limit (pids.max, docker run --pids-limit): without its thread UCX does not start"
#: What the control group should leave: memory for Python, a worker and unread messages; threads for UCX.
_LEFT = (("memory", "memory", 64 << 20, format_bytes, _MEMORY), ("threads", "pids", 16, str, _THREADS))
#: Inode numbers of the namespaces that the kernel begins with (linux/proc_ns.h).
_INITIAL = {"ipc": 0xEFFFFFFF, "user": 0xEFFFFFFD, "pid": 0xEFFFFFFC}


def check_machine() -> Iterator[Finding]:
    """Checks what the kernel gives this process. Takes half a second: it starts a process, and watches the cores."""
    root, privileges = Path("/"), look()
    yield check_descriptors(privileges.descriptors, len(os.listdir(root / "proc/self/fd")))
    yield from check_control_group(root)
    yield check_dev_shm(root / "dev/shm", privileges)
    yield check_cma(privileges, read(root / "proc/self/status") or "")
    yield check_namespaces(root / "proc/self/ns")
    cores = sorted(os.sched_getaffinity(0))
    yield check_cores(len(cores), count_idle_cores(cores), cpu_quota(root))


def check_descriptors(limits: tuple[int, int], used: int) -> Finding:
    soft, hard = limits
    advice = f"raise the soft limit (ulimit -n, LimitNOFILE=, docker run --ulimit nofile=); the hard one is {hard}"
    left = soft - used - _LISTENER
    found = "no limit" if soft < 0 else f"the limit is {soft}, {used} are open: some {max(left // 2, 0)} connections"
    if soft >= 0 and left <= 0:
        return Finding("descriptors", "problem", found, advice)
    return warn_unless(soft < 0 or soft >= _USUAL, "descriptors", found, advice)


def check_control_group(root: Path) -> Iterator[Finding]:
    for id, controller, least, as_text, advice in _LEFT:
        limit, used = (in_control_group(root, f"{controller}.{what}") for what in ("max", "current"))
        if limit.isdecimal() and used.isdecimal():
            cache = re.search(r"^inactive_file (\d+)$", in_control_group(root, f"{controller}.stat"), re.MULTILINE)
            left = max(int(limit) - int(used) + (int(cache[1]) if cache else 0), 0)
            yield warn_unless(left >= least, id, f"{as_text(left)} left to the control group", advice)


def check_dev_shm(folder: Path, privileges: Privileges) -> Finding:
    size, free = privileges.shared_memory or 0, privileges.free_shared_memory or 0
    found = f"{format_bytes(size)}, {format_bytes(free)} free (UCX's POSIX shared memory needs 16 MiB)"
    enlarge = "delete files there, or enlarge it (docker run --shm-size=1g; Kubernetes: an emptyDir in memory)"
    return first_of(
        "/dev/shm",
        (not folder.is_dir(), "it does not exist", "mount a tmpfs there: UCX's POSIX shared memory needs it"),
        (not os.access(folder, os.W_OK | os.X_OK), "this user cannot write to it", "mount it writable, with mode 1777"),
        (free < _POSIX_MINIMUM, found, enlarge),
        (True, found, None),
    )


def check_cma(privileges: Privileges, status: str) -> Finding:
    scope, seccomp = privileges.ptrace_scope or "", re.search(r"^Seccomp:\s*[12]$", status, re.MULTILINE)
    found = f"{privileges.cma or 'unknown'}: large messages over shared memory take one more copy"
    yama = f"kernel.yama.ptrace_scope is {scope}: set it to 0 (sysctl), or add the capability SYS_PTRACE"
    allow = "a seccomp filter is in force: allow process_vm_readv there (docker run --cap-add=SYS_PTRACE)"
    return first_of(
        "cma",
        (privileges.cma == "usable", "processes of this user may copy from each other's memory", None),
        (scope in ("1", "2", "3"), found, yama),
        (seccomp, found, allow),
        (True, found, "run both processes as one user, in one user namespace"),
    )


def check_namespaces(folder: Path) -> Finding:
    inodes = {kind: (folder / kind).stat().st_ino for kind in _INITIAL if (folder / kind).exists()}
    own = ", ".join(kind for kind, inode in inodes.items() if inode != _INITIAL[kind])
    sharing = "(a container); shared memory only within the same IPC, PID and network namespaces"
    return Finding("namespaces", "ok", f"others than the first: {own} {sharing}" if own else "this machine's first")


def check_cores(count: int, idle: float, quota: float | None) -> Finding:
    found = f"{count}, {idle:.1f} idle" + ("" if quota is None else f"; the control group allows {quota:.3g}")
    advice = (
        "give it a whole core: polling pauses where others use it, and to wake a process takes longer than a message"
    )
    return warn_unless(min(idle, idle if quota is None else quota) >= 0.9, "cores", found, advice)
