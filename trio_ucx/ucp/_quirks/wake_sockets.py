"""The sockets that wake a worker which sleeps on shared memory: in a folder that only this user can enter.

UCX makes an abstract Unix socket for each kind of shared memory. Every process in the network namespace can send to
it, of whatever user: an empty datagram ends the process or breaks the worker, and a flood keeps it awake.
``_native/wake_sockets.c`` therefore gives the sockets of our workers a path. UCX passes that on to peers in the shared
memory, so UCP programs of this user need not know of it.

Both sides of a connection must have the same folder, or wake-ups would be lost. A worker therefore states its folder in
its address (``WorkerAddress.wake_folder``). Where no folder can be had, workers have no shared memory.

A killed process leaves its sockets there. Whoever opens a worker removes some of those to which nobody listens.

Report: "Shared memory: anybody can send to the socket that wakes a worker", in ucx-reports.md. Releases: all, 1.13 to
1.22. Not needed any more when ``ucx-reports/empty_datagram.c`` no longer finds a socket to which it can send. Tests:
``tests/test_wake_sockets.py``, ``tests/test_doors.py``.
"""

from __future__ import annotations

import errno
import hashlib
import os
import random
import socket
import stat
import tempfile
import time
from contextlib import suppress
from pathlib import Path

from ..._native import lib
from ..._util.private_folder import SHARED, private_folder

#: How the names of these sockets end (TU_WAKE_SUFFIX).
SUFFIX = ".wake"
#: What an address states for no folder.
NONE = bytes(16)
#: So many sockets are looked at when a worker is opened.
_LOOKED_AT = 32
#: Seconds for which a socket may be unable to receive, because its process is just making it.
_BEING_MADE = 60


def find_folder() -> bytes:
    """Returns the path of the folder for a worker's sockets; makes it if it is missing.

    Raises:
        OSError: there is none; says what to do.
    """
    if not lib.tu_keep_wakes_private():
        raise OSError(
            errno.EPERM,
            "other users could wake or break a worker, because this UCX's libuct does not import bind(), close(), "
            "sendto() and recvfrom() from the C library",
        )
    folder = private_folder(_try)
    if folder is None:
        raise OSError(
            errno.EACCES,
            "no folder for wake-up sockets, into which only this user can write: the folder "
            f"trio_ucx-{os.geteuid()} in {SHARED} and {tempfile.gettempdir()} cannot be made, or is not this user's. "
            "Make one of the two writable, or set XDG_RUNTIME_DIR to a folder of this user",
        )
    return os.fsencode(folder)


def _try(folder: Path) -> None:
    """Makes a socket there.

    Raises:
        OSError: that does not work, or the path is too long.
    """
    if len(os.fsencode(folder)) >= lib.TU_WAKE_FOLDER:
        raise OSError(errno.ENAMETOOLONG, os.strerror(errno.ENAMETOOLONG), str(folder))
    path = folder / f"{random.SystemRandom().getrandbits(64):016x}{SUFFIX}"
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as made:
        made.bind(os.fsencode(path))
        path.unlink()


def identify(folder: bytes) -> bytes:
    """Returns what an address says of a folder: two sides with equal values reach each other's sockets there."""
    if not folder:
        return NONE
    found = os.stat(folder)
    return hashlib.blake2s(b"%d %d %b" % (found.st_dev, found.st_ino, folder), digest_size=len(NONE)).digest()


def sweep(folder: bytes) -> None:
    """Removes sockets that killed processes have left, of a few that are chosen at random."""
    names = [name for name in os.listdir(folder) if name.endswith(os.fsencode(SUFFIX))]
    for name in random.sample(names, min(_LOOKED_AT, len(names))):
        path = os.path.join(folder, name)
        with suppress(OSError), socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as probe:
            found = os.lstat(path)
            if not stat.S_ISSOCK(found.st_mode) or time.time() - found.st_mtime < _BEING_MADE:
                continue
            try:
                probe.connect(path)
            except ConnectionRefusedError:
                os.unlink(path)
