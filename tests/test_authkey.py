"""The key of a user (``trio_ucx.authkey``): where it is found, and which files may hold it."""

from __future__ import annotations

import os
import socket
import stat
from functools import partial
from pathlib import Path
from typing import Any

import attrs
import pytest
import trio
from helpers import echo, serving

import trio_ucx
from trio_ucx import ucp
from trio_ucx._opening import authkey as _authkey

KEY = b"a key of some length"


@attrs.frozen
class Places:
    """Where a key can be: a file of the test's, and the default one."""

    file: Path
    default: Path


@pytest.fixture
def places(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Places:
    monkeypatch.delenv("TRIO_UCX_AUTHKEY", raising=False)
    monkeypatch.delenv("TRIO_UCX_AUTHKEY_FILE", raising=False)
    monkeypatch.delenv("XDG_CONFIG_HOME", raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    default = tmp_path / ".config/trio_ucx/authkey"
    default.parent.mkdir(parents=True)
    return Places(tmp_path / "key", default)


def write(path: Path, key: bytes, mode: int = 0o600) -> None:
    path.touch()
    path.write_bytes(key)
    path.chmod(mode)


def test_order_of_places(places: Places, monkeypatch: pytest.MonkeyPatch) -> None:
    assert trio_ucx.authkey() is None
    write(places.default, b"the default file's key")
    assert trio_ucx.authkey() == b"the default file's key"
    write(places.file, b"another file's key")
    monkeypatch.setenv("TRIO_UCX_AUTHKEY_FILE", "  ")  # as if not set
    assert trio_ucx.authkey() == b"the default file's key"
    monkeypatch.setenv("TRIO_UCX_AUTHKEY_FILE", str(places.file))
    assert trio_ucx.authkey() == b"another file's key"
    monkeypatch.setenv("TRIO_UCX_AUTHKEY", "the variable's key")
    assert trio_ucx.authkey() == b"the variable's key"


def test_configuration_folder(places: Places, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    write(places.default, KEY)
    for ignored in ("", "relative/path"):
        monkeypatch.setenv("XDG_CONFIG_HOME", ignored)
        assert trio_ucx.authkey() == KEY
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "other"))
    assert trio_ucx.authkey() is None
    other = tmp_path / "other/trio_ucx/authkey"
    other.parent.mkdir(parents=True)
    write(other, KEY[::-1])
    assert trio_ucx.authkey() == KEY[::-1]


@pytest.mark.parametrize("home", [None, "", "/dev/null", "/nonexistent", "\udcff"])
def test_no_home(places: Places, monkeypatch: pytest.MonkeyPatch, home: str | None) -> None:
    if home is None:
        monkeypatch.delenv("HOME")
    else:
        monkeypatch.setenv("HOME", home)
    assert trio_ucx.authkey() is None


@pytest.mark.parametrize(
    ("text", "key"),
    [
        ("sixteen letters!", b"sixteen letters!"),
        (" \tsixteen letters!\r\n", b"sixteen letters!"),  # as Kubernetes or an .env file may have it
        ("two words and more", b"two words and more"),
        ("\udcff" * 16, b"\xff" * 16),  # bytes, as os.environ has them
        ("\N{KEY}" * 4, "\N{KEY}".encode() * 4),
    ],
)
def test_white_space_does_not_count(places: Places, monkeypatch: pytest.MonkeyPatch, text: str, key: bytes) -> None:
    """A key is the same, whether it is in a variable or in a file."""
    monkeypatch.setenv("TRIO_UCX_AUTHKEY", text)
    assert trio_ucx.authkey() == key
    monkeypatch.delenv("TRIO_UCX_AUTHKEY")
    write(places.default, os.fsencode(text))
    assert trio_ucx.authkey() == key


@pytest.mark.parametrize("mode", [0o400, 0o440, 0o600, 0o640, 0o700])
def test_modes_of_a_private_file(places: Places, mode: int) -> None:
    write(places.default, KEY, mode)
    assert trio_ucx.authkey() == KEY


@pytest.mark.parametrize("mode", [0o644, 0o604, 0o602, 0o601, 0o660, 0o620, 0o610, 0o666, 0o444])
def test_modes_of_a_file_that_is_not_private(places: Places, monkeypatch: pytest.MonkeyPatch, mode: int) -> None:
    write(places.default, KEY, mode)
    words = rf"other users can read or change this file \(mode {mode:04o}\): chmod 600 it"
    with pytest.raises(PermissionError, match=f"^{places.default}: {words}"):
        trio_ucx.authkey()
    monkeypatch.setenv("TRIO_UCX_AUTHKEY_FILE", str(places.default))
    with pytest.raises(PermissionError, match=f"^TRIO_UCX_AUTHKEY_FILE={places.default}: {words}"):
        trio_ucx.authkey()


@pytest.mark.parametrize("owner", [0, 4321, 1234])
def test_owners(places: Places, monkeypatch: pytest.MonkeyPatch, owner: int) -> None:
    """This user's and root's files count; an ordinary user cannot make others' files, so that fstat tells them."""
    write(places.default, KEY, 0o640)
    monkeypatch.setattr(os, "geteuid", lambda: 4321)
    fstat = os.fstat

    def owned(descriptor: int) -> Any:
        found = list(fstat(descriptor))
        found[stat.ST_UID] = owner
        return os.stat_result(found)

    monkeypatch.setattr(_authkey.os, "fstat", owned)
    if owner == 1234:
        with pytest.raises(PermissionError, match=r"authkey: this file belongs to another user \(uid 1234\)"):
            trio_ucx.authkey()
    else:
        assert trio_ucx.authkey() == KEY


def test_things_that_are_no_files(places: Places, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRIO_UCX_AUTHKEY_FILE", str(places.file))
    with pytest.raises(FileNotFoundError, match=f"TRIO_UCX_AUTHKEY_FILE={places.file}: No such file or directory$"):
        trio_ucx.authkey()
    os.mkfifo(places.file, 0o600)
    with pytest.raises(PermissionError, match="it is not a regular file"):  # at once
        trio_ucx.authkey()
    places.file.unlink()
    places.file.mkdir()
    with pytest.raises(OSError, match=f"TRIO_UCX_AUTHKEY_FILE={places.file}: .*directory"):
        trio_ucx.authkey()
    monkeypatch.setenv("TRIO_UCX_AUTHKEY_FILE", "/dev/zero")
    with pytest.raises(PermissionError, match="it is not a regular file"):
        trio_ucx.authkey()
    monkeypatch.delenv("TRIO_UCX_AUTHKEY_FILE")
    with socket.socket(socket.AF_UNIX) as listener:
        monkeypatch.chdir(places.default.parent)
        listener.bind("authkey")
        with pytest.raises(OSError, match="authkey: No such device"):
            trio_ucx.authkey()


def test_link_to_a_file(places: Places) -> None:
    """Kubernetes mounts secrets so."""
    write(places.file, KEY, 0o440)
    places.default.symlink_to(places.file)
    assert trio_ucx.authkey() == KEY
    places.file.unlink()
    assert trio_ucx.authkey() is None


@pytest.mark.parametrize("text", ["", "  \n", "fifteen letters", "  fifteen letters\n"])
def test_short_keys(places: Places, monkeypatch: pytest.MonkeyPatch, text: str) -> None:
    """The error says where the key is from and what to do, and not the key."""
    length = len(text.strip())
    monkeypatch.setenv("TRIO_UCX_AUTHKEY", text)
    with pytest.raises(ValueError, match=rf"^TRIO_UCX_AUTHKEY: authkey has {length} bytes, but .*token_hex") as caught:
        trio_ucx.authkey()
    assert "letters" not in str(caught.value)
    monkeypatch.delenv("TRIO_UCX_AUTHKEY")
    write(places.default, text.encode())
    words = (
        f"authkey has {length} bytes, but needs at least 16" if length else "the file is empty. Put 16 bytes or more"
    )
    with pytest.raises(ValueError, match=f"^{places.default}: {words}") as caught:
        trio_ucx.authkey()
    assert "letters" not in str(caught.value)


async def test_connections_do_not_look_for_it(
    worker: ucp.Worker, places: Places, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A key that somebody has made for one program changes no other program."""
    monkeypatch.setenv("TRIO_UCX_AUTHKEY", "sixteen letters!")
    for options in ({}, {"authkey": trio_ucx.authkey()}):
        async with serving(echo, worker, **options) as listener:
            connecting = partial(trio_ucx.connect, listener.address, worker=worker)
            with trio.fail_after(15):
                async with connecting(**options) as client:
                    await client.send(b"x")
                    assert await client.receive() == b"x"
                with pytest.raises(trio_ucx.NotAdmitted):
                    await connecting(**({} if options else {"authkey": trio_ucx.authkey()}))
