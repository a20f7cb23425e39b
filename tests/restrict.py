"""Restricts a command, as containers do: ``restrict.py RESTRICTION... -- COMMAND...``. ``restrict.py`` alone prints, in
JSON, what a process is restricted to.

It needs nothing but Python's standard library: where a command runs, others may be unreadable.

* ``readable PATH...``, as root in a mount namespace: every user can read these paths, whatever folder they are in.
* ``read-only``, in a mount namespace: nothing can be written to but ``/dev/shm``, which has 64 MB and is empty.
* ``seccomp``: the system calls that Docker refuses by default are refused, without a way back (``no_new_privs``).
* ``no-netlink``, ``write-xor-execute``, ``old-write-xor-execute``, and ``processes-only`` in a mount namespace: what a
  systemd unit denies with a RestrictAddressFamilies= without AF_NETLINK, with MemoryDenyWriteExecute=, where the kernel
  is older than 6.3, and with ProcSubset=pid.
"""

from __future__ import annotations

import ctypes
import errno
import json
import os
import platform
import resource
import signal
import socket
import struct
import sys
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

_libc = ctypes.CDLL(None, use_errno=True)


def _checked(result: int, what: str) -> None:
    if result < 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{what}: {os.strerror(number)}")


# ---- files ----

_MS_BIND, _MS_REC = 0x1000, 0x4000
_AT_FDCWD, _AT_RECURSIVE, _MOUNT_ATTR_RDONLY, _SYS_MOUNT_SETATTR = -100, 0x8000, 1, 442


def _mount(source: str, target: Path, kind: str | None, flags: int = 0, options: str | None = None) -> None:
    arguments = [each and each.encode() for each in (source, str(target), kind)]
    _checked(_libc.mount(*arguments, ctypes.c_ulong(flags), options and options.encode()), f"mount {target}")


def _closed_folder(path: Path) -> Path | None:
    """Returns the topmost folder above a path that other users than its owner cannot enter."""
    return next((folder for folder in reversed(path.parents) if not folder.stat().st_mode & 0o001), None)


def make_readable(paths: Sequence[Path]) -> None:
    """Replaces each folder that keeps other users from these paths by one that has nothing but them."""
    inside = [(folder, path) for path in paths if (folder := _closed_folder(path)) is not None]
    if not inside:
        return
    stage = Path("/mnt")
    _mount("tmpfs", stage, "tmpfs", options="mode=755")
    for number, (_, path) in enumerate(inside):
        (stage / str(number)).mkdir()
        _mount(str(path), stage / str(number), None, _MS_BIND | _MS_REC)
    for folder in dict.fromkeys(folder for folder, _ in inside):
        _mount("tmpfs", folder, "tmpfs", options="mode=755")
    for number, (_, path) in enumerate(inside):
        path.mkdir(parents=True, exist_ok=True)
        _mount(str(stage / str(number)), path, None, _MS_BIND | _MS_REC)


def make_read_only() -> None:
    attributes = struct.pack("@4Q", _MOUNT_ATTR_RDONLY, 0, 0, 0)
    _checked(
        _libc.syscall(_SYS_MOUNT_SETATTR, _AT_FDCWD, b"/", _AT_RECURSIVE, attributes, ctypes.c_size_t(len(attributes))),
        "mount_setattr",
    )
    _mount("tmpfs", Path("/dev/shm"), "tmpfs", options="mode=1777,size=64m")


# ---- system calls ----

#: The audit architecture, and which numbers of ``REFUSED`` and the others are its.
_ARCHITECTURES = {"x86_64": (0xC000003E, 0), "aarch64": (0xC00000B7, 1)}
#: Numbers of system calls, by architecture. Docker has allowed process_vm_readv, process_vm_writev and ptrace since
#: 19.03, but older releases and other runtimes refuse them.
REFUSED = {
    "acct": (163, 89),
    "add_key": (248, 217),
    "bpf": (321, 280),
    "clock_adjtime": (305, 266),
    "clock_settime": (227, 112),
    "delete_module": (176, 106),
    "finit_module": (313, 273),
    "get_mempolicy": (239, 236),
    "init_module": (175, 105),
    "io_uring_enter": (426, 426),
    "io_uring_register": (427, 427),
    "io_uring_setup": (425, 425),
    "kcmp": (312, 272),
    "kexec_file_load": (320, 294),
    "kexec_load": (246, 104),
    "keyctl": (250, 219),
    "mbind": (237, 235),
    "mount": (165, 40),
    "move_pages": (279, 239),
    "open_by_handle_at": (304, 265),
    "perf_event_open": (298, 241),
    "pivot_root": (155, 41),
    "process_vm_readv": (310, 270),
    "process_vm_writev": (311, 271),
    "ptrace": (101, 117),
    "reboot": (169, 142),
    "request_key": (249, 218),
    "set_mempolicy": (238, 237),
    "setns": (308, 268),
    "settimeofday": (164, 170),
    "swapoff": (168, 225),
    "swapon": (167, 224),
    "umount2": (166, 39),
    "unshare": (272, 97),
    "userfaultfd": (323, 282),
}
_SOCKET, _CLONE, _CLONE3 = (41, 198), (56, 220), (435, 435)
#: The flags of clone that make a namespace.
_CLONE_NEW = 0x7E020000
_MMAP, _MPROTECT, _PKEY_MPROTECT, _SHMAT = (9, 222), (10, 226), (329, 288), (30, 196)
_LOAD, _AND, _EQUAL, _ANY_BIT, _RETURN = 0x20, 0x54, 0x15, 0x45, 0x06
_ALLOW, _REFUSE, _KILL = 0x7FFF0000, 0x00050000, 0x80000000
#: Where a seccomp filter finds the number, the architecture and the first argument (its lower half).
_NUMBER, _ARCHITECTURE, _ARGUMENT = 0, 4, 16
_PR_SET_SECCOMP, _PR_SET_NO_NEW_PRIVS, _PR_GET_NO_NEW_PRIVS = 22, 38, 39
_PR_SET_MDWE, _PR_MDWE_REFUSE_EXEC_GAIN = 65, 1


def seccomp_filter(machine: str) -> list[tuple[int, int, int, int]]:
    """Returns instructions of BPF: code, jumps if true and false, operand."""
    architecture, column = _ARCHITECTURES[machine]
    program = [
        (_LOAD, 0, 0, _ARCHITECTURE),
        (_EQUAL, 1, 0, architecture),
        (_RETURN, 0, 0, _KILL),
        (_LOAD, 0, 0, _NUMBER),
        (_EQUAL, 0, 1, _CLONE3[column]),  # which glibc then replaces by clone, whose flags a filter can see
        (_RETURN, 0, 0, _REFUSE | errno.ENOSYS),
    ]
    for numbers in REFUSED.values():
        program += [(_EQUAL, 0, 1, numbers[column]), (_RETURN, 0, 0, _REFUSE | errno.EPERM)]
    for number, test, operand in ((_SOCKET, _EQUAL, socket.AF_VSOCK), (_CLONE, _ANY_BIT, _CLONE_NEW)):
        program += [
            (_EQUAL, 0, 4, number[column]),
            (_LOAD, 0, 0, _ARGUMENT),
            (test, 0, 1, operand),
            (_RETURN, 0, 0, _REFUSE | errno.EPERM),
            (_RETURN, 0, 0, _ALLOW),
        ]
    return [*program, (_RETURN, 0, 0, _ALLOW)]


def _refused(
    machine: str, rows: Sequence[tuple[tuple[int, int], int, int, int, int]]
) -> list[tuple[int, int, int, int]]:
    """Returns the instructions that refuse some calls.

    Args:
        rows: the numbers of a system call, which of its arguments is compared, which of its bits, with what, and the
            error.
    """
    architecture, column = _ARCHITECTURES[machine]
    program = [(_LOAD, 0, 0, _ARCHITECTURE), (_EQUAL, 1, 0, architecture), (_RETURN, 0, 0, _KILL)]
    for numbers, argument, mask, value, error in rows:
        program += [
            (_LOAD, 0, 0, _NUMBER),
            (_EQUAL, 0, 4, numbers[column]),
            (_LOAD, 0, 0, _ARGUMENT + 8 * argument),
            (_AND, 0, 0, mask),
            (_EQUAL, 0, 1, value),
            (_RETURN, 0, 0, _REFUSE | error),
        ]
    return [*program, (_RETURN, 0, 0, _ALLOW)]


def refuse_netlink(machine: str) -> list[tuple[int, int, int, int]]:
    return _refused(machine, [(_SOCKET, 0, 0xFFFFFFFF, socket.AF_NETLINK, errno.EAFNOSUPPORT)])


def refuse_executable_memory(machine: str) -> list[tuple[int, int, int, int]]:
    written, executed, attached = 2, 4, 0o100000
    return _refused(
        machine,
        [
            (_MMAP, 2, written | executed, written | executed, errno.EPERM),
            (_MPROTECT, 2, executed, executed, errno.EPERM),
            (_PKEY_MPROTECT, 2, executed, executed, errno.EPERM),
            (_SHMAT, 2, attached, attached, errno.EPERM),
        ],
    )


def deny_write_execute() -> None:
    _checked(_libc.prctl(_PR_SET_MDWE, _PR_MDWE_REFUSE_EXEC_GAIN, 0, 0, 0), "PR_SET_MDWE")


def mount_processes_only() -> None:
    _mount("proc", Path("/proc"), "proc", options="subset=pid")


def refuse_system_calls(filter: Callable[[str], list[tuple[int, int, int, int]]]) -> None:
    instructions = filter(platform.machine())
    code = ctypes.create_string_buffer(b"".join(struct.pack("@HBBI", *each) for each in instructions))
    program = ctypes.create_string_buffer(struct.pack("@HP", len(instructions), ctypes.addressof(code)))
    _checked(_libc.prctl(_PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0), "no_new_privs")
    _checked(_libc.prctl(_PR_SET_SECCOMP, 2, program, 0, 0), "seccomp")


# ---- what a process is restricted to ----


def _refusal(function: Any, *arguments: Any) -> str | None:
    """Returns the name of the error with which a function of C fails; None if it succeeds."""
    return errno.errorcode[ctypes.get_errno()] if function(*arguments) < 0 else None


def _page() -> ctypes.c_void_p:
    _libc.mmap.restype = ctypes.c_void_p
    return ctypes.c_void_p(_libc.mmap(None, 4096, 3, 0x22, -1, 0))


def _read_sibling() -> str | None:
    """Returns the name of the error if memory of a process with the same user cannot be read; None if it can."""
    here = ctypes.create_string_buffer(8)
    vector = ctypes.create_string_buffer(struct.pack("@PN", ctypes.addressof(here), 8))
    reading, writing = os.pipe()
    target = os.fork()
    if not target:
        time.sleep(60)
        os._exit(0)
    reader = os.fork()  # neither parent nor child of what it reads from
    if not reader:
        os.write(writing, (_refusal(_libc.process_vm_readv, target, vector, 1, vector, 1, 0) or "").encode())
        os._exit(0)
    os.waitpid(reader, 0)
    os.close(writing)
    os.kill(target, signal.SIGKILL)
    os.waitpid(target, 0)
    with open(reading) as pipe:
        return pipe.read() or None


def describe() -> dict[str, Any]:
    status = dict(line.split(":\t", 1) for line in Path("/proc/self/status").read_text().splitlines() if ":\t" in line)
    scope = Path("/proc/sys/kernel/yama/ptrace_scope")
    shared = os.statvfs("/dev/shm")
    return {
        "user": os.geteuid(),
        "groups": os.getgroups(),
        "capabilities": int(status["CapEff"], 16) | int(status["CapPrm"], 16),
        "to be had": int(status["CapBnd"], 16),
        "no_new_privs": _libc.prctl(_PR_GET_NO_NEW_PRIVS, 0, 0, 0, 0),
        "seccomp": int(status["Seccomp"]),
        "user ids": Path("/proc/self/uid_map").read_text().split(),
        "ptrace_scope": int(scope.read_text()) if scope.exists() else None,
        "reading a sibling": _read_sibling(),
        "unshare": _refusal(_libc.unshare, 0),
        "executable memory": _refusal(_libc.mprotect, _page(), 4096, 7),
        "vsock": _refusal(_libc.socket, socket.AF_VSOCK, socket.SOCK_STREAM, 0),
        "writable": [path for path in ("/", "/tmp", "/var/tmp", "/run", os.getcwd()) if os.access(path, os.W_OK)],
        "home": os.environ.get("HOME"),
        "home is writable": os.access(os.environ.get("HOME", ""), os.W_OK),
        "/dev/shm": shared.f_blocks * shared.f_frsize,
        "/dev/shm is writable": os.access("/dev/shm", os.W_OK),
        "descriptors": resource.getrlimit(resource.RLIMIT_NOFILE),
    }


RESTRICTIONS: dict[str, Callable[[], None]] = {
    "read-only": make_read_only,
    "seccomp": partial(refuse_system_calls, seccomp_filter),
    "no-netlink": partial(refuse_system_calls, refuse_netlink),
    "old-write-xor-execute": partial(refuse_system_calls, refuse_executable_memory),
    "write-xor-execute": deny_write_execute,
    "processes-only": mount_processes_only,
}


def main(arguments: list[str]) -> None:
    if not arguments:
        print(json.dumps(describe()))
        return
    split = arguments.index("--")
    (restriction, *paths), command = arguments[:split], arguments[split + 1 :]
    if restriction == "readable":
        make_readable([Path(path) for path in paths])
    else:
        RESTRICTIONS[restriction]()
    os.execvp(command[0], command)


if __name__ == "__main__":
    main(sys.argv[1:])
