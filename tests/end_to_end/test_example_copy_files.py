"""examples/copy_files.py."""

from __future__ import annotations

import os
import signal
import stat
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any

import attrs
import pytest
import trio
from helpers import until

import trio_ucx

from .programs import DEADLINE, EXAMPLES, Program, assert_complaint, load, program

pytest.importorskip("rich")

COPY_FILES = EXAMPLES / "copy_files.py"
copy_files: Any = load(COPY_FILES)


@asynccontextmanager
async def copying(source: Path, destination: Path, *options: object) -> AsyncIterator[tuple[Program, Program]]:
    """(receiver, sender)."""
    with program(COPY_FILES, "receive", destination) as receiver:
        await receiver.wait_address()
        with program(COPY_FILES, "send", source, receiver.address, *options) as sender:
            yield receiver, sender


def tree(root: Path) -> dict[str, tuple[object, ...]]:
    """Everything about a tree that shall be copied."""
    found: dict[str, tuple[object, ...]] = {}
    for path in [root, *root.rglob("*")]:
        status = path.lstat()
        contents: object = None
        if stat.S_ISREG(status.st_mode):
            contents = path.read_bytes()
        elif stat.S_ISLNK(status.st_mode):
            contents = os.readlink(path)
        found[str(path.relative_to(root))] = oct(status.st_mode), status.st_mtime_ns, contents
    return found


def files(destination: Path) -> list[str]:
    """All that is there, except directories."""
    found = (path for path in destination.rglob("*") if not path.is_dir() or path.is_symlink())
    return [str(path.relative_to(destination)) for path in found]


def fill(root: Path) -> None:
    (root / "a" / "b" / "c").mkdir(parents=True)
    (root / "empty directory").mkdir()
    (root / "a" / "empty").touch()
    (root / "a" / "b" / "big").write_bytes(os.urandom(20_000_001))
    (root / "two pieces").write_bytes(os.urandom(2 * copy_files.PIECE))
    for number in range(100):
        (root / "a" / "b" / "c" / f"{number}").write_bytes(b"%d" % number * number)
    for name in [" ", "two  words", "ünï-çødé-文件-🚀", "new\nline", "-rf", "back\\slash", "*", "n" * 255]:
        (root / "a" / name).write_text(name)
    Path(os.fsdecode(os.fsencode(root) + b"/not \xff utf-8")).write_bytes(b"\xff")
    (root / "link to directory").symlink_to("a")
    (root / "link to nowhere").symlink_to("/does/not/exist")
    (root / "a" / "link out").symlink_to("../../..")
    (root / "a" / "b" / "big").chmod(0o640)
    (root / "two pieces").chmod(0o400)
    os.utime(root / "a" / "link out", ns=(3, 3_000_000_007), follow_symlinks=False)
    for number, path in enumerate(["a/b/c/7", "a/empty", "a/b/c", "a/b", "empty directory", "."]):
        os.utime(root / path, ns=(0, 1_000_000_007 * number))
    (root / "a" / "b" / "c").chmod(0o555)


@pytest.mark.both_transports
async def test_copies_a_tree(over: str, tmp_path: Path) -> None:
    source, destination = tmp_path / "source", tmp_path / "some" / "destination"
    source.mkdir()
    fill(source)
    async with copying(source, destination) as (receiver, sender):
        for process in (sender, receiver):
            status, output = await process.end()
            assert (status, output.strip()) == (0, "")  # before 15, rich ends its bar with an empty line
    assert tree(destination) == tree(source)


@pytest.mark.full
async def test_replaces_what_is_there(tmp_path: Path) -> None:
    """With more jobs than files. Some things are left behind: what is neither file nor link, and set-user-id bits."""
    source, destination, outside = tmp_path / "source", tmp_path / "destination", tmp_path / "outside"
    source.mkdir()
    destination.mkdir()
    for name in "file", "was a link", "program":
        (source / name).write_text("new")
    (source / "program").chmod(0o4755)
    os.mkfifo(source / "fifo")
    outside.write_text("untouched")
    (destination / "file").write_text("old, and longer")
    (destination / "was a link").symlink_to(outside)
    async with copying(source, destination, "--jobs", 64) as (receiver, sender):
        status, errors = await sender.end()
        assert status == 0
        assert "skipped" in errors and "fifo" in errors
        assert await receiver.end() == (0, "")
    (source / "fifo").unlink()
    (source / "program").chmod(0o755)
    os.utime(source, ns=(0, 0))
    os.utime(destination, ns=(0, 0))
    assert tree(destination) == tree(source)
    assert outside.read_text() == "untouched"


# ---- a receiver whose sender is not to be trusted ----


Receive = Callable[[Path], AbstractAsyncContextManager[tuple[str, list[str]]]]


@pytest.fixture
def receive(monkeypatch: pytest.MonkeyPatch) -> Receive:
    """Runs the receiver in this process: its address, and then the reason for which it has failed."""
    printed: list[str] = []
    monkeypatch.setattr(copy_files, "print", lambda line, flush: printed.append(line), raising=False)

    async def run(destination: Path, reasons: list[str]) -> None:
        with pytest.raises((Exception, BaseExceptionGroup)) as caught:
            await copy_files.receive(destination, ("127.0.0.1", 0))
        error = caught.value if isinstance(caught.value, BaseExceptionGroup) else BaseExceptionGroup("", [caught.value])
        assert error.split(copy_files.EXPECTED)[1] is None
        reasons.append(copy_files.explain(error))

    @asynccontextmanager
    async def receive(destination: Path) -> AsyncIterator[tuple[str, list[str]]]:
        reasons: list[str] = []
        with trio.fail_after(DEADLINE):
            async with trio.open_nursery() as nursery:
                nursery.start_soon(run, destination, reasons)
                await until(lambda: printed)
                yield printed.pop().removeprefix("listening at "), reasons

    return receive


async def refused(receive: Receive, destination: Path, plan: bytes, *messages: bytes) -> str:
    """Why the receiver gave up, which it must say to its user and to the sender."""
    async with receive(destination) as (address, reasons):
        with suppress(trio.BrokenResourceError):  # in the end: the receiver has dropped a message
            async with trio_ucx.connect(address) as connection:
                with suppress(trio.BrokenResourceError):  # the receiver gave up before the last message
                    await connection.send(plan, tag=copy_files.CONTENTS)
                    for message in messages:
                        await connection.send(message, tag=copy_files.FILES)
                complaint = (await connection.receive(tag=copy_files.COMPLAINTS)).decode()
                await until(lambda: reasons)
    assert reasons == [complaint]
    return complaint


ONE_JOB = copy_files.PLAN.pack(1, 0)
DIGEST_OF_NOTHING = copy_files.hashlib.blake2b().digest()
FILE, LINK, DIRECTORY, DEVICE = stat.S_IFREG, stat.S_IFLNK, stat.S_IFDIR, stat.S_IFBLK


def entry(path: str, kind: int = FILE, size: int = 0, target: str = "", mode: int = 0o644) -> bytes:
    encoded: bytes = copy_files.Entry(path, kind | mode, 0, size, target).encode()
    return encoded


LEADS_OUT = "refused: the path leads out of the destination"
NO_SUM = "the sender's pieces do not add up"


@pytest.mark.parametrize(
    ("messages", "complaint"),
    [
        *(
            ([entry(path, kind, target="x"), DIGEST_OF_NOTHING], f"{path}: {LEADS_OUT}")
            for path in ["../evil", "/evil", "a/../../evil", ".", "a//evil", "a/"]
            for kind in [FILE, LINK, DIRECTORY][: 3 if path == "../evil" else 1]
        ),
        ([entry(""), DIGEST_OF_NOTHING], f": {LEADS_OUT}"),
        ([b"?"], "a malformed entry"),
        ([entry("a\0b")], "a malformed entry"),
        ([entry("\x1b[2J", DEVICE)], "?[2J: refused: no file, directory or link"),
        ([entry("file", size=3), b"long"], f"file: {NO_SUM}"),
        ([entry("file", size=3), b""], f"file: {NO_SUM}"),
        ([entry("some/file", size=8), b"right", b"bad", bytes(64)], "some/file: the checksums differ"),
        ([entry("n" * 300), DIGEST_OF_NOTHING], "n" * 300 + ": File name too long"),
        ([bytes(2**16)], "it was dropped"),
        ([entry("file", size=2**40), bytes(copy_files.PIECE + 1)], "it was dropped"),
    ],
)
async def test_refuses_bad_entries(receive: Receive, tmp_path: Path, messages: list[bytes], complaint: str) -> None:
    reason = await refused(receive, tmp_path / "destination", ONE_JOB, *messages)
    assert reason == complaint or (complaint == "it was dropped" and reason.endswith(complaint))
    assert list(tmp_path.iterdir()) == [tmp_path / "destination"]
    assert files(tmp_path / "destination") == []


@pytest.mark.parametrize(
    ("plan", "complaint"),
    [
        (b"hello", "this is not copy_files calling"),
        (copy_files.PLAN.pack(0, 0), "0 jobs are not between 1 and 64"),
        (copy_files.PLAN.pack(65, 0), "65 jobs are not between 1 and 64"),
    ],
)
async def test_refuses_a_strange_plan(receive: Receive, tmp_path: Path, plan: bytes, complaint: str) -> None:
    assert await refused(receive, tmp_path, plan) == complaint


async def test_keeps_the_old_file_when_the_new_one_is_damaged(receive: Receive, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("old")
    reason = await refused(receive, tmp_path, ONE_JOB, entry("file", size=3), b"new", bytes(64))
    assert reason == "file: the checksums differ"
    assert (tmp_path / "file").read_text() == "old"
    assert files(tmp_path) == ["file"]


@pytest.mark.parametrize(("path", "kind"), [("link/evil", FILE), ("link", DIRECTORY)])
async def test_does_not_write_through_symlinks(receive: Receive, tmp_path: Path, path: str, kind: int) -> None:
    destination, outside = tmp_path / "destination", tmp_path / "outside"
    outside.mkdir()
    link, evil = entry("link", LINK, target=str(outside)), entry(path, kind, mode=0o777)
    assert await refused(receive, destination, ONE_JOB, link, evil, DIGEST_OF_NOTHING) == f"{path}: Not a directory"
    assert list(outside.iterdir()) == []
    assert stat.S_IMODE(outside.stat().st_mode) != 0o777
    assert files(destination) == ["link"]


async def test_gives_up_when_nothing_moves(receive: Receive, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(copy_files, "STALL_TIMEOUT", 0.2)
    async with receive(tmp_path) as (address, reasons):
        with suppress(ConnectionResetError):  # if connecting takes 0.2 seconds
            async with trio_ucx.connect(address):
                await until(lambda: reasons)
        await until(lambda: reasons)
    assert reasons == ["nothing moved for 0.2 seconds"]


# ---- things that go wrong half-way ----


async def test_reports_a_file_that_became_shorter(receive: Receive, tmp_path: Path) -> None:
    source, destination = tmp_path / "source", tmp_path / "destination"
    source.mkdir()
    (source / "file").write_bytes(bytes(1000))
    entries = [attrs.evolve(each, size=1001) if each.path else each for each in copy_files.scan(str(source))]
    async with receive(destination) as (address, reasons):
        with pytest.raises(ExceptionGroup) as caught:
            async with trio_ucx.connect(address) as connection:
                await copy_files.converse(connection, "sending", partial(copy_files.send_tree, str(source), entries, 2))
        await until(lambda: reasons)
    reason = f"{source}/file: became shorter while it was copied"
    assert copy_files.explain(caught.value) == reason
    assert reasons == [f"the other side gave up: {reason}"]
    assert files(destination) == []


@pytest.mark.full
async def test_tells_the_sender_why(tmp_path: Path) -> None:
    source, destination = tmp_path / "source", tmp_path / "destination"
    source.mkdir()
    (source / "name").write_bytes(bytes(2**24))
    (destination / "name" / "is a directory").mkdir(parents=True)
    async with copying(source, destination) as (receiver, sender):
        assert await sender.end() == (1, "copy_files: the other side gave up: name: Is a directory\n")
        assert await receiver.end() == (1, "copy_files: name: Is a directory\n")
    assert files(destination) == []


@pytest.mark.full
@pytest.mark.parametrize("victim", ["sender", "receiver"])
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGINT, signal.SIGTERM])
async def test_interrupted(
    tmp_path: Path, victim: str, number: signal.Signals, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("UCX_TLS", "tcp")
    source, destination = tmp_path / "source", tmp_path / "destination"
    source.mkdir()
    for name in ["one", "two"]:
        with open(source / name, "wb") as file:
            file.truncate(2**33)
    async with copying(source, destination) as (receiver, sender):
        await until(lambda: any(path.is_file() and path.stat().st_size for path in destination.iterdir()))
        killed, other = (sender, receiver) if victim == "sender" else (receiver, sender)
        killed.process.send_signal(number)
        status, errors = await other.end()
        assert status == 1
        assert_complaint(errors, COPY_FILES)
        assert await killed.end() == (-number if number == signal.SIGKILL else 130, "")
    if (victim, number) != ("receiver", signal.SIGKILL):
        assert files(destination) == []
