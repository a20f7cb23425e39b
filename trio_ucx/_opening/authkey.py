"""The key of this user, which ``authkey=`` takes: where it is found, and which files may hold it."""

from __future__ import annotations

import os
import stat
from collections.abc import Mapping
from pathlib import Path

from .._util.hidden import HiddenBytes, HiddenDict
from .._util.text import printable

#: The environment variables with the key, and with the path of a file that holds it.
AUTHKEY, AUTHKEY_FILE = "TRIO_UCX_AUTHKEY", "TRIO_UCX_AUTHKEY_FILE"
#: The file in the user's configuration folder.
DEFAULT_FILE = "trio_ucx/authkey"
#: The shortest authkey, in bytes: a client may try some 300,000 keys a second.
MIN_AUTHKEY = 16
#: The permissions that a key file must not give: the group may only read it, and others nothing.
_TOO_OPEN = 0o037


def authkey() -> bytes | None:
    """Returns the key of this user, for the ``authkey=`` of both sides; None if there is none.

    It is in the environment variable ``TRIO_UCX_AUTHKEY``; else in the file that ``TRIO_UCX_AUTHKEY_FILE`` names; else
    in the file ``trio_ucx/authkey`` of the user's configuration folder (``$XDG_CONFIG_HOME``, by default
    ``~/.config``), if it exists. White space around it does not count. A key file must belong to this user or to root;
    its group may read it (mode 640), and other users may neither read nor change it. ::

        await trio_ucx.serve_ucx(handler, 13337, authkey=trio_ucx.authkey())

    ``python -m trio_ucx`` and :func:`trio_ucx.mesh.join` look there by themselves. Connections and listeners do not:
    without ``authkey=`` they use no key.

    Raises:
        ValueError: the key is empty or shorter than 16 bytes.
        PermissionError: the file belongs to another user, other users can read or change it, it is not a regular file,
            or this process may not read it.
        OSError: the file that ``TRIO_UCX_AUTHKEY_FILE`` names cannot be read.
    """
    return find_authkey(HiddenDict(os.environ))


def find_authkey(environment: Mapping[str, str]) -> bytes | None:
    """Returns the key that :func:`authkey` finds in this environment."""
    if AUTHKEY in environment:
        return _check(HiddenBytes(os.fsencode(environment[AUTHKEY]).strip()), AUTHKEY)
    if path := environment.get(AUTHKEY_FILE, "").strip():
        return read_authkey(path, f"{AUTHKEY_FILE}={printable(path)}")
    folder = environment.get("XDG_CONFIG_HOME", "")
    if not os.path.isabs(folder):  # the XDG specification says to ignore it
        if not (home := environment.get("HOME")):
            return None
        folder = f"{home}/.config"
    path = f"{folder}/{DEFAULT_FILE}"
    # A service may have the HOME of another user, in which it may not even look.
    return read_authkey(path, printable(path)) if os.path.exists(path) else None


def read_authkey(path: str | Path, name: str) -> bytes:
    """Returns the key in a file.

    Args:
        name: what to call the file in errors.

    Raises:
        ValueError, OSError: as :func:`authkey`.
    """
    try:
        file = open(path, "rb", opener=lambda path, flags: os.open(path, flags | os.O_NONBLOCK))  # noqa: SIM115
    except OSError as error:
        raise OSError(error.errno, f"{name}: {error.strerror}") from None
    with file:
        found = os.fstat(file.fileno())
        mode = stat.S_IMODE(found.st_mode)
        if not stat.S_ISREG(found.st_mode):
            raise PermissionError(f"{name}: it is not a regular file")
        if found.st_uid not in (0, os.geteuid()):
            raise PermissionError(
                f"{name}: this file belongs to another user (uid {found.st_uid}), who can change it. "
                "Use a copy of your own; or a file of root's, which your group may read"
            )
        if mode & _TOO_OPEN:
            raise PermissionError(
                f"{name}: other users can read or change this file (mode {mode:04o}): chmod 600 it; "
                "for a Secret of Kubernetes, set defaultMode: 0440"
            )
        key = HiddenBytes(file.read().strip())
    if not key:
        raise ValueError(f"{name}: the file is empty. Put {MIN_AUTHKEY} bytes or more there, and on the other side")
    return _check(key, name)


def _check(key: bytes, name: str) -> bytes:
    try:
        check_authkey(key, "token_hex(32)")
    except ValueError as error:
        raise ValueError(f"{name}: {error}") from None
    return key


def check_authkey(authkey: bytes | None, make: str = "token_bytes(32)") -> bytes | None:
    if authkey is None:
        return None
    if not isinstance(authkey, (bytes, bytearray)):
        raise TypeError(f"authkey must be bytes, not {type(authkey).__name__}")
    if len(authkey) < MIN_AUTHKEY:
        raise ValueError(
            f"authkey has {len(authkey)} bytes, but needs at least {MIN_AUTHKEY}, because shorter keys can be guessed. "
            f"Make one with secrets.{make}, for instance, and give it to both sides"
        )
    return HiddenBytes(authkey)
