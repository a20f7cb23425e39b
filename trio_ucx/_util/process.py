"""Process identity: boot id, PID namespace, pid and start time; and the user and namespaces that it runs with."""

from __future__ import annotations

import errno
import os
import socket
from functools import lru_cache
from pathlib import Path

import attrs

from .limits import CAPACITY_ERRORS

#: Linux's limit for process ids.
MAX_PID = 2**22
#: The kernel's flag of a process that ends.
_PF_EXITING = 0x4


@attrs.frozen
class Process:
    """Names one process, of any host, for ever: its pid alone names another process later.

    Attributes:
        host: the boot id of its kernel; zeros if not known.
        namespace: the inode number of its PID namespace.
        pid: in that namespace; 0 if not known.
        start: when it started, in clock ticks since boot.
    """

    host: bytes = bytes(16)
    namespace: int = 0
    pid: int = 0
    start: int = 0


def check_process(host: bytes, namespace: int, pid: int, start: int) -> Process:
    """Checks a process that a peer names.

    Raises:
        ValueError: no process can have such an id.
    """
    if pid > MAX_PID:
        raise ValueError(f"these bytes name a process with the number {pid}; {MAX_PID} is the highest")
    return Process(host, namespace, pid, start)


#: An unknown process.
NOBODY = Process()


def _boot_id() -> bytes:
    try:
        text = Path("/proc/sys/kernel/random/boot_id").read_text()
        return bytes.fromhex(text.strip().replace("-", ""))
    except (FileNotFoundError, PermissionError, ValueError):
        return bytes(16)


def _namespace(kind: str) -> int:
    try:
        return os.stat(f"/proc/self/ns/{kind}").st_ino
    except OSError:
        return 0


def start_time(pid: int) -> int:
    """When a process started, in clock ticks since boot; 0 if it ends just now, or the kernel's answer is unknown.

    Raises:
        OSError: there is no such process; or the kernel does not say (``hidepid``), or no file can be opened.
    """
    fields = _stat(pid)
    try:
        ends = fields[0] in "ZX" or int(fields[6]) & _PF_EXITING
        return 0 if ends else int(fields[19])
    except (ValueError, IndexError):
        return 0


def _exists(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except OSError as error:
        return error.errno != errno.ESRCH
    return True


def is_stopped(pid: int) -> bool:
    """True if a process is stopped (SIGSTOP, or a debugger); False if that is unknown."""
    try:
        return _stat(pid)[0] in "Tt"
    except (OSError, IndexError):
        return False


def _stat(pid: int) -> list[str]:
    """Returns what the kernel says about a process: the fields of ``/proc/PID/stat`` from its state on."""
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()


def host_name() -> str:
    """The name of this host; bytes that are not UTF-8 become U+FFFD."""
    return os.fsencode(socket.gethostname()).decode(errors="replace")


def this_process() -> Process:
    return this_host().process


def is_visible(process: Process) -> bool:
    """True if this process can look at that one: it is known, on this host, and in this PID namespace."""
    own = this_process()
    known = process.pid != 0 and any(process.host)
    return known and (process.host, process.namespace) == (own.host, own.namespace)


def has_ended(process: Process) -> bool:
    """True if a process has ended; False if that is unknown."""
    if not is_visible(process):
        return False
    try:
        return start_time(process.pid) != process.start
    except OSError:
        return not _exists(process.pid)


def open_pidfd(process: Process) -> int | None:
    """A descriptor that becomes readable when a process ends.

    Returns:
        None: it is this process, or one that cannot be watched from here.

    Raises:
        ProcessLookupError: it has ended.
        OSError: there is no descriptor left (EMFILE, ENFILE), or no memory (ENOMEM).
    """
    if not is_visible(process) or process.pid == this_process().pid:
        return None
    fd: int | None = None
    try:
        fd = os.pidfd_open(process.pid)
    except OSError as error:
        if error.errno in CAPACITY_ERRORS:
            raise
    if has_ended(process):  # the pidfd is another process's, if there is one
        if fd is not None:
            os.close(fd)
        raise ProcessLookupError(f"process {process.pid} has ended")
    return fd


@attrs.frozen
class Host:
    """Where a process runs, as far as that decides which transports reach it.

    Attributes:
        process: which one it is.
        user: its effective user id.
        ipc_namespace, network_namespace: the inode numbers of ``/proc/self/ns/*``; 0 if not known.
    """

    process: Process
    user: int = 0
    ipc_namespace: int = 0
    network_namespace: int = 0

    def shares_network(self, other: Host) -> bool:
        """True if both processes are in one network namespace of one machine."""
        return (self.process.host, self.network_namespace) == (other.process.host, other.network_namespace)


def this_host() -> Host:
    return _host_of(os.getpid(), os.geteuid())


@lru_cache(maxsize=1)
def _host_of(pid: int, user: int) -> Host:
    """Its arguments are what can change while the process runs, by a fork for instance."""
    boot = _boot_id()
    process = Process(boot, _namespace("pid"), pid, start_time(pid) if any(boot) else 0)
    return Host(process, user, _namespace("ipc"), _namespace("net"))
