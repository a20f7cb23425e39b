"""Folders that only this user can enter: what another user has put in the way is not used."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

import pytest

from trio_ucx._util import private_folder as module
from trio_ucx._util.private_folder import make_private, private_folder


@pytest.fixture
def places(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    """The three folders that are tried, none of which exists."""
    name = f"trio_ucx-{os.geteuid()}"
    shared, runtime, temporary = (tmp_path / one for one in ("shm", "run", "tmp"))
    for folder in (shared, runtime, temporary):
        folder.mkdir()
    shared.chmod(0o1777)
    monkeypatch.setattr(module, "SHARED", shared)
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(runtime))
    monkeypatch.setattr(tempfile, "tempdir", str(temporary))
    return [shared / name, runtime / "trio_ucx", temporary / name]


def open_to_others(folder: Path) -> None:
    folder.mkdir()
    folder.chmod(0o755)


IN_THE_WAY: dict[str, Callable[[Path], object]] = {
    "a file": lambda path: path.write_text(""),
    "a link": lambda path: path.symlink_to(path.parent),
    "a folder that others can enter": open_to_others,
    "a FIFO": lambda path: os.mkfifo(path),
}
if os.geteuid() == 0:
    IN_THE_WAY["a folder of another user"] = lambda path: (path.mkdir(0o700), os.chown(path, 12345, -1))


@pytest.mark.parametrize("kind", IN_THE_WAY)
def test_the_next_place_is_used(places: list[Path], kind: str) -> None:
    for place in places:
        assert private_folder() == place == private_folder()
        assert place.lstat().st_mode & 0o7777 == 0o700
        place.rmdir()
        IN_THE_WAY[kind](place)
        assert not make_private(place)
    assert private_folder() is None


def test_where_others_can_rename_it(tmp_path: Path) -> None:
    (tmp_path / "above").mkdir()
    (tmp_path / "above").chmod(0o777)
    assert not make_private(tmp_path / "above" / "folder")
    (tmp_path / "above").chmod(0o1777)
    assert make_private(tmp_path / "above" / "folder")


@pytest.mark.skipif(not shutil.which("unshare"), reason="there is no unshare")
@pytest.mark.parametrize("options", [["-Ur"], ["-U", f"--map-user={os.geteuid()}"], ["-U", "--map-user=1"]])
def test_a_user_namespace_uses_the_folder_of_the_user_outside(options: list[str]) -> None:
    """Its root is another user than the machine's, who owns /dev/shm, and whom it does not know."""
    program = "from trio_ucx._util.private_folder import private_folder; print(private_folder())"
    done = subprocess.run(
        ["unshare", *options, sys.executable, "-c", program], capture_output=True, text=True, timeout=30
    )
    if done.returncode and "unshare" in done.stderr:
        pytest.skip(f"no user namespaces here: {done.stderr.strip()}")
    assert done.stdout.strip() == str(private_folder()) == f"/dev/shm/trio_ucx-{os.geteuid()}", done


def test_the_unknown_owner_is_trusted_where_the_machine_s_root_is_unknown(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    stranger = int(Path("/proc/sys/kernel/overflowuid").read_text())
    numbers = tmp_path / "uid_map"
    monkeypatch.setattr(module, "UID_MAP", numbers)
    for text, root, outside in (
        ("0 0 4294967295", 0, 1000),
        ("0 1001 1", stranger, 1000),
        ("1000 1001 1", stranger, 1001),
        ("5 0 1\n1000 7000 10", 5, 7000),
    ):
        numbers.write_text(text + "\n")
        assert (module._machine_root(), module._outside(1000)) == (root, outside), text


def test_a_machine_without_proc_sys(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """As with systemd's ``ProcSubset=pid``."""
    monkeypatch.setattr(module, "OVERFLOW_UID", tmp_path / "none")
    module.overflow_uid.cache_clear()
    try:
        assert make_private(tmp_path / "folder")
        assert module.overflow_uid() == 65534
    finally:
        module.overflow_uid.cache_clear()


def test_a_relative_runtime_folder_is_ignored(places: list[Path], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", "run")
    places[0].write_text("")
    assert private_folder() == places[2]


@pytest.mark.parametrize(("user", "first"), [(999, 0), (1000, 2), (0, 0)])
def test_what_systemd_empties_is_not_the_first_choice(
    places: list[Path], monkeypatch: pytest.MonkeyPatch, tmp_path: Path, user: int, first: int
) -> None:
    monkeypatch.setattr(module, "SYSTEMD", tmp_path)
    monkeypatch.setattr(os, "geteuid", lambda: user)
    monkeypatch.setattr(module, "make_private", lambda folder: True)
    found = private_folder()
    assert found is not None and found.parent == places[first].parent


def test_a_folder_that_does_not_do(places: list[Path]) -> None:
    def refuse(folder: Path) -> None:
        if folder == places[0]:
            raise OSError

    assert private_folder(refuse) == places[1]


def test_any_umask(places: list[Path]) -> None:
    before = os.umask(0o777)
    try:
        assert private_folder() == places[0]
    finally:
        os.umask(before)
    assert places[0].lstat().st_mode & 0o7777 == 0o700
