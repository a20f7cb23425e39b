"""Limits, shared memory, namespaces and cores: what the kernel gives this process."""

from __future__ import annotations

import os
import re
import resource
from collections.abc import Iterator
from pathlib import Path

from ..idle_cores import count_idle_cores
from ..privileges import Privileges, format_bytes, look
from .finding import Finding, list_folder, read_text, warn_unless

#: Descriptors that a listener leaves free before it begins an exchange, with those of a first worker.
_LISTENER = 64 + 30
#: The usual soft limit of the number of descriptors.
_USUAL = 1024
#: UCX leaves POSIX shared memory out if less than this is free in /dev/shm (POSIX_SHM_MIN_SIZE).
_POSIX_MINIMUM = 16 << 20
#: What should be left to a process: memory for Python, a worker (5 MB) and unread messages; threads for UCX.
_MEMORY_LEFT, _THREADS_LEFT = 64 << 20, 16
#: Limits of control groups from here on are none.
_NO_LIMIT = 2**60
#: Inode numbers of the namespaces that the kernel begins with (linux/proc_ns.h).
_INITIAL = {"ipc": 0xEFFFFFFF, "user": 0xEFFFFFFD, "pid": 0xEFFFFFFC}


def check_machine(root: Path = Path("/"), privileges: Privileges | None = None) -> Iterator[Finding]:
    """Checks what the kernel gives this process. Takes half a second: it starts a process, and watches the cores.

    Args:
        root: where ``proc``, ``sys`` and ``dev`` are.
        privileges: those of this process, unless they are given.
    """
    privileges = privileges or look()
    status = read_text(root / "proc/self/status")
    yield check_descriptors(privileges.descriptors, len(list_folder(root / "proc/self/fd")))
    yield check_address_space(resource.getrlimit(resource.RLIMIT_AS)[0])
    yield from check_control_group(root)
    yield check_dev_shm(root / "dev/shm", privileges)
    yield check_cma(privileges, status)
    yield check_namespaces(root / "proc/self/ns")
    seccomp = f"{'a' if _seccomp(status) else 'no'} seccomp filter"
    capabilities = privileges.as_lines()[0].split(maxsplit=1)[1]
    yield Finding("privileges", "ok", f"capabilities: {capabilities} (none is needed); {seccomp}")
    cores = sorted(os.sched_getaffinity(0))
    yield check_cores(len(cores), count_idle_cores(cores), cpu_quota(root))


def check_descriptors(limits: tuple[int, int], used: int) -> Finding:
    soft, hard = limits
    advice = f"raise the soft limit (ulimit -n, LimitNOFILE=, docker run --ulimit nofile=); the hard one is {hard}"
    if 0 <= soft <= used + _LISTENER:
        found = f"the limit is {soft}, and {used} are open: a listener needs some {_LISTENER}"
        return Finding("descriptors", "problem", found, advice)
    found = "no limit" if soft < 0 else f"the limit is {soft}: some {(soft - used - _LISTENER) // 2} connections"
    return warn_unless(soft < 0 or soft >= _USUAL, "descriptors", found, advice)


def check_address_space(limit: int) -> Finding:
    found = "no limit" if limit < 0 else f"{format_bytes(limit)}: UCX ends the process when it gets no memory"
    advice = "remove the limit (ulimit -v unlimited); a control group can limit memory instead"
    return warn_unless(limit < 0, "address space", found, advice)


def _in_group(root: Path, controller: str, *names: str) -> str:
    """Returns what is in the first of these files that this process's control group (version 1 or 2) has; or "".

    In a container, the path of the group may be that on the host; then the group is where control groups are mounted.
    """
    for controllers, path in re.findall(r"^\d+:([^:]*):/?(.*)$", read_text(root / "proc/self/cgroup"), re.MULTILINE):
        if controllers == "" or controller in controllers.split(","):
            base = root / "sys/fs/cgroup" / controllers
            for file in (folder / name for folder in (base / path, base) for name in names):
                if text := read_text(file):
                    return text
    return ""


def _left(limit: str, used: str) -> int | None:
    if not (limit.isdecimal() and used.isdecimal()) or int(limit) >= _NO_LIMIT:
        return None
    return max(int(limit) - int(used), 0)


def check_control_group(root: Path) -> Iterator[Finding]:
    limit = _in_group(root, "memory", "memory.max", "memory.limit_in_bytes")
    memory = _left(limit, _in_group(root, "memory", "memory.current", "memory.usage_in_bytes"))
    if memory is not None:
        cache = re.search(r"^inactive_file (\d+)$", _in_group(root, "memory", "memory.stat"), re.MULTILINE)
        memory += 0 if cache is None else int(cache[1])
        advice = "raise its limit: a worker takes 5 MB, and each connection up to 1 MiB of unread messages (window=)"
        yield warn_unless(memory >= _MEMORY_LEFT, "memory", f"{format_bytes(memory)} left to the control group", advice)
    threads = _left(_in_group(root, "pids", "pids.max"), _in_group(root, "pids", "pids.current"))
    if threads is not None:
        advice = "raise its limit (pids.max, docker run --pids-limit): without its thread UCX does not start"
        yield warn_unless(threads >= _THREADS_LEFT, "threads", f"{threads} more for the control group", advice)


def cpu_quota(root: Path) -> float | None:
    """Returns how many cores the control group allows; None without a limit."""
    quota, _, period = _in_group(root, "cpu", "cpu.max").partition(" ")
    if not quota:
        quota, period = _in_group(root, "cpu", "cpu.cfs_quota_us"), _in_group(root, "cpu", "cpu.cfs_period_us")
    return int(quota) / int(period) if quota.isdecimal() and period.isdecimal() else None


def check_dev_shm(folder: Path, privileges: Privileges) -> Finding:
    size, free = privileges.shared_memory, privileges.free_shared_memory
    if size is None or free is None or not folder.is_dir():
        found, advice = "it does not exist", "mount a tmpfs there: UCX's POSIX shared memory needs it"
    elif not os.access(folder, os.W_OK | os.X_OK) or os.statvfs(folder).f_flag & os.ST_RDONLY:
        found, advice = "this user cannot write to it", "mount it writable, with mode 1777, for POSIX shared memory"
    else:
        found = f"{format_bytes(size)}, {format_bytes(free)} free (UCX's POSIX shared memory needs 16 MiB)"
        advice = "delete files there, or enlarge it (docker run --shm-size=1g; Kubernetes: an emptyDir in memory)"
        return warn_unless(free >= _POSIX_MINIMUM, "/dev/shm", found, advice)
    return Finding("/dev/shm", "warning", found, advice)


def check_cma(privileges: Privileges, status: str) -> Finding:
    scope, found = privileges.ptrace_scope or "", privileges.cma or "unknown"
    advice = "run both processes as one user, in one user namespace"
    if _seccomp(status):
        advice = "a seccomp filter is in force: allow process_vm_readv there (docker run --cap-add=SYS_PTRACE)"
    if scope.isdecimal() and int(scope) > 0:
        advice = f"kernel.yama.ptrace_scope is {scope}: set it to 0 (sysctl), or add the capability SYS_PTRACE"
    if found == "usable":
        return Finding("cma", "ok", "processes of this user may copy from each other's memory")
    return Finding("cma", "warning", f"{found}: large messages over shared memory take one more copy", advice)


def _seccomp(status: str) -> bool:
    return re.search(r"^Seccomp:\s*[12]$", status, re.MULTILINE) is not None


def check_namespaces(folder: Path) -> Finding:
    present = [kind for kind in _INITIAL if (folder / kind).exists()]
    own = [kind for kind in present if (folder / kind).stat().st_ino != _INITIAL[kind]]
    if not own:
        return Finding("namespaces", "ok", "this machine's first IPC, PID and user namespaces")
    sharing = "; shared memory only with processes in the same IPC, PID and network namespaces"
    return Finding("namespaces", "ok", f"others than the first: {', '.join(own)} (a container){sharing}")


def check_cores(count: int, idle: float, quota: float | None) -> Finding:
    found = f"{count}, {idle:.1f} idle" + ("" if quota is None else f"; the control group allows {quota:.3g}")
    advice = "give it a whole core: polling for messages does not pay on cores that others use (spin=0: no polling)"
    return warn_unless(min(idle, idle if quota is None else quota) >= 0.9, "cores", found, advice)
