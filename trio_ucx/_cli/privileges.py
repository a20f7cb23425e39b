"""What the kernel lets this process do and use: capabilities, reading the memory of peers, shared memory, descriptors.

Looking needs no privilege, and never fails: what cannot be found out is unknown (None).
"""

from __future__ import annotations

import errno
import os
import re
import resource
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import attrs

#: The names of ``capabilities(7)``, without CAP_, by number.
_CAPABILITIES = [
    *("chown", "dac_override", "dac_read_search", "fowner", "fsetid", "kill", "setgid", "setuid", "setpcap"),
    *("linux_immutable", "net_bind_service", "net_broadcast", "net_admin", "net_raw", "ipc_lock", "ipc_owner"),
    *("sys_module", "sys_rawio", "sys_chroot", "sys_ptrace", "sys_pacct", "sys_admin", "sys_boot", "sys_nice"),
    *("sys_resource", "sys_time", "sys_tty_config", "mknod", "lease", "audit_write", "audit_control", "setfcap"),
    *("mac_override", "mac_admin", "syslog", "wake_alarm", "block_suspend", "audit_read", "perfmon", "bpf"),
    "checkpoint_restore",
]
#: Reads from its parent's memory, at an address where nothing is: EFAULT if it may read elsewhere.
_READ_PARENT = """
import ctypes, os
vector = (ctypes.c_size_t * 2)(0, 1)
libc = ctypes.CDLL(None, use_errno=True)
libc.process_vm_readv(os.getppid(), vector, ctypes.c_ulong(1), vector, ctypes.c_ulong(1), ctypes.c_ulong(0))
print(ctypes.get_errno())
"""
#: Seconds for that.
_DEADLINE = 20
_STATUS, _LAST_CAPABILITY = Path("/proc/self/status"), Path("/proc/sys/kernel/cap_last_cap")
#: How ids of users are mapped: all to themselves in the first user namespace.
_USERS, _ALL_USERS = Path("/proc/self/uid_map"), ["0", "0", "4294967295"]
_PTRACE_SCOPE, _SHARED_MEMORY = Path("/proc/sys/kernel/yama/ptrace_scope"), Path("/dev/shm")


@attrs.frozen
class Privileges:
    """What the kernel lets this process do and use. None: unknown.

    Attributes:
        capabilities: the effective ones, such as ``net_admin``.
        without_capabilities: those that the kernel knows, and the process does not have.
        in_user_namespace: True if the process is in a user namespace other than the initial one: its capabilities hold
            only there.
        ptrace_scope: the value of ``kernel.yama.ptrace_scope``, or that this kernel has no Yama.
        cma: whether other processes of this user may copy from and to this process's memory (``process_vm_readv``), as
            UCX's transport cma does: "usable", or why not.
        shared_memory, free_shared_memory: the bytes of ``/dev/shm``.
        descriptors, locked_memory: the soft and the hard limit of the number of descriptors, and of locked bytes
            (RLIMIT_NOFILE, RLIMIT_MEMLOCK); -1: no limit.
    """

    capabilities: list[str] | None
    without_capabilities: list[str] | None
    in_user_namespace: bool | None
    ptrace_scope: str | None
    cma: str | None
    shared_memory: int | None
    free_shared_memory: int | None
    descriptors: tuple[int, int]
    locked_memory: tuple[int, int]

    def as_lines(self) -> list[str]:
        """Returns the lines that ``info`` prints."""
        shared = "unknown"
        if self.shared_memory is not None and self.free_shared_memory is not None:
            shared = f"{format_bytes(self.shared_memory)}, {format_bytes(self.free_shared_memory)} free"
        return [
            f"capabilities   {self._capabilities_as_text()}",
            f"ptrace scope   {self.ptrace_scope or 'unknown'}",
            f"cma            {self.cma or 'unknown'}",
            f"/dev/shm       {shared}",
            f"descriptors    {_limits(self.descriptors, str)}",
            f"locked memory  {_limits(self.locked_memory, format_bytes)}",
        ]

    def _capabilities_as_text(self) -> str:
        if self.capabilities is None or self.without_capabilities is None:
            return "unknown"
        if not self.capabilities:
            return "none"
        text = ", ".join(self.capabilities)
        if len(self.without_capabilities) < len(self.capabilities):
            text = "all" + (f" but {', '.join(self.without_capabilities)}" if self.without_capabilities else "")
        return f"{text} (of a user namespace)" if self.in_user_namespace else text


def look() -> Privileges:
    """Returns what the kernel lets this process do. Takes a moment: it starts a process."""
    names = lacking = None
    if (held := _effective_capabilities()) is not None:
        last = read(_LAST_CAPABILITY) or ""
        count = max(held.bit_length(), int(last) + 1 if last.isdecimal() else len(_CAPABILITIES))
        names = [_name(number) for number in range(count) if held >> number & 1]
        lacking = [_name(number) for number in range(count) if not held >> number & 1]
    total, free = _space(_SHARED_MEMORY)
    return Privileges(
        capabilities=names,
        without_capabilities=lacking,
        in_user_namespace=None if (users := read(_USERS)) is None else users.split() != _ALL_USERS,
        ptrace_scope=read(_PTRACE_SCOPE) if _PTRACE_SCOPE.exists() else "this kernel has no Yama",
        cma=_try_cma(),
        shared_memory=total,
        free_shared_memory=free,
        descriptors=resource.getrlimit(resource.RLIMIT_NOFILE),
        locked_memory=resource.getrlimit(resource.RLIMIT_MEMLOCK),
    )


def lockable_memory() -> int:
    """Returns how many bytes this process may lock; -1: no limit, as with the capability ipc_lock."""
    exempt = (_effective_capabilities() or 0) >> _CAPABILITIES.index("ipc_lock") & 1
    if exempt and (read(_USERS) or "").split() == _ALL_USERS:
        return -1
    return resource.getrlimit(resource.RLIMIT_MEMLOCK)[0]


def _name(capability: int) -> str:
    return _CAPABILITIES[capability] if capability < len(_CAPABILITIES) else str(capability)


def list_folder(path: Path) -> list[str]:
    """Returns the names in a folder; none if it cannot be read."""
    return sorted(each.name for each in path.glob("*"))


def read(path: Path) -> str | None:
    """Returns what is in a file; None if it cannot be read."""
    try:
        return path.read_text().strip()
    except (OSError, ValueError):
        return None


def _effective_capabilities() -> int | None:
    """Returns the set as a bit mask."""
    found = re.search(r"^CapEff:\s*([0-9a-f]+)$", read(_STATUS) or "", re.MULTILINE)
    return None if found is None else int(found[1], 16)


def _space(path: Path) -> tuple[int, int] | tuple[None, None]:
    """Returns the size of a file system, and what is free, in bytes."""
    try:
        found = os.statvfs(path)
    except OSError:
        return None, None
    return found.f_blocks * found.f_frsize, found.f_bavail * found.f_frsize


def _try_cma() -> str | None:
    """Lets a child read from this process. (Not the other way round: Yama lets a parent read from its children.)"""
    try:
        done = subprocess.run(
            [sys.executable, "-I", "-S", "-c", _READ_PARENT],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            timeout=_DEADLINE,
            check=True,
        )
        number = int(done.stdout)
    except (OSError, ValueError, subprocess.SubprocessError):
        return None
    if number == errno.EFAULT:
        return "usable"
    return f"not usable: process_vm_readv: {os.strerror(number)}" if number else None


def format_bytes(size: int) -> str:
    for unit, letter in ((2**30, "GiB"), (2**20, "MiB"), (2**10, "KiB")):
        if size >= unit:
            return f"{size / unit:.3g} {letter}" if size < 1000 * unit else f"{size // unit} {letter}"
    return f"{size} bytes"


def _limits(soft_and_hard: tuple[int, int], as_text: Callable[[int], str]) -> str:
    soft, hard = ("no limit" if limit == resource.RLIM_INFINITY else as_text(limit) for limit in soft_and_hard)
    return f"{soft} (hard limit: {hard})"


def in_control_group(root: Path, name: str) -> str:
    """Returns what is in a file of this process's control group (version 2); or "".

    In a container, the path of the group may be that on the host; then the group is where control groups are mounted.
    """
    base, path = root / "sys/fs/cgroup", (read(root / "proc/self/cgroup") or "").removeprefix("0::/")
    return read(base / path / name) or read(base / name) or ""
