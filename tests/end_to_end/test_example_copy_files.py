"""examples/copy_files.py."""

from __future__ import annotations

import contextlib
import os
import queue
import signal
import stat
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Any, Protocol

import attrs
import pytest
import trio
from helpers import until

import trio_ucx

from .programs import DEADLINE, EXAMPLES, Program, load, program, run_here, trio_thread

pytest.importorskip("rich")

COPY_FILES = EXAMPLES / "copy_files.py"

TRANSPORTS = pytest.mark.parametrize("transports", ["tcp", "tcp,sm,self"])


copy_files: Any = load(COPY_FILES)


@asynccontextmanager
async def receiver(destination: Path, transports: str | None = None) -> AsyncIterator[Program]:
    with program(COPY_FILES, "receive", destination, transports=transports) as receiving:
        await receiving.wait_address()
        yield receiving


async def copy(source: Path, destination: Path, *options: object, transports: str) -> None:
    async with receiver(destination, transports) as receiving:
        with program(COPY_FILES, "send", source, receiving.address, *options, transports=transports) as sending:
            assert await sending.end() == (0, "")
        assert await receiving.end() == (0, "")


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


def leftovers(destination: Path) -> list[str]:
    return [str(path) for path in destination.rglob("*") if not path.is_dir() or path.is_symlink()]


def fill(root: Path) -> None:
    (root / "a" / "b" / "c").mkdir(parents=True)
    (root / "empty directory").mkdir()
    (root / "a" / "b" / "no more files").mkdir()
    (root / "a" / "empty").touch()
    (root / "a" / "b" / "big").write_bytes(os.urandom(20_000_001))
    (root / "two pieces").write_bytes(os.urandom(2 * copy_files.PIECE))
    for number in range(300):
        (root / "a" / "b" / "c" / f"{number}").write_bytes(b"%d" % number * number)
    for name in [" ", "two  words", "ünï-çødé-文件-🚀", "new\nline", "-rf", "back\\slash", "*", "n" * 255]:
        (root / "a" / name).write_text(name)
    Path(os.fsdecode(os.fsencode(root) + b"/not \xff utf-8")).write_bytes(b"\xff")
    (root / "link").symlink_to("a/b/big")
    (root / "link to directory").symlink_to("a")
    (root / "link to nowhere").symlink_to("/does/not/exist")
    (root / "a" / "link out").symlink_to("../../..")
    (root / "a" / "b" / "big").chmod(0o640)
    (root / "two pieces").chmod(0o400)
    (root / "a" / "b" / "c" / "7").chmod(0o755)
    os.utime(root / "a" / "link out", ns=(3, 3_000_000_007), follow_symlinks=False)
    for number, path in enumerate(["a/b/c/7", "a/empty", "a/b/c", "a/b", "empty directory", "."]):
        os.utime(root / path, ns=(0, 1_000_000_007 * number))
    (root / "a" / "b" / "c").chmod(0o555)
    (root / "empty directory").chmod(0o700)


@pytest.mark.sample(1)
@TRANSPORTS
async def test_copy_files_copies_a_tree(tmp_path: Path, transports: str) -> None:
    source, destination = tmp_path / "source", tmp_path / "some" / "destination"
    source.mkdir()
    fill(source)
    await copy(source, destination, transports=transports)
    assert tree(destination) == tree(source)


@pytest.mark.full
@pytest.mark.parametrize(("transports", "jobs"), [("tcp", 64), ("tcp,sm,self", 1)])
async def test_copy_files_replaces_what_is_there(tmp_path: Path, transports: str, jobs: int) -> None:
    source, destination = tmp_path / "source", tmp_path / "destination"
    source.mkdir()
    for number in range(100):
        (source / f"{number}").write_text("new")
    destination.mkdir()
    outside = tmp_path / "outside"
    outside.write_text("untouched")
    (destination / "0").write_text("old, and longer")
    (destination / "1").symlink_to(outside)
    await copy(source, destination, "--jobs", jobs, transports=transports)
    assert tree(destination) == tree(source)
    assert outside.read_text() == "untouched"


@pytest.mark.full
async def test_copy_files_copies_an_empty_tree(tmp_path: Path) -> None:
    (tmp_path / "source").mkdir()
    await copy(tmp_path / "source", tmp_path / "destination", transports="tcp")
    assert tree(tmp_path / "destination") == tree(tmp_path / "source")


@pytest.mark.full
async def test_copy_files_skips_what_cannot_be_copied(tmp_path: Path) -> None:
    source, destination = tmp_path / "source", tmp_path / "destination"
    source.mkdir()
    os.mkfifo(source / "fifo")
    (source / "file").write_text("here")
    async with receiver(destination) as receiving:
        with program(COPY_FILES, "send", source, receiving.address) as sending:
            status, errors = await sending.end()
        assert status == 0
        assert "skipped" in errors and "fifo" in errors
        assert await receiving.end() == (0, "")
    assert leftovers(destination) == [str(destination / "file")]


# ---- a receiver whose sender is not to be trusted ----


class Misbehave(Protocol):
    """Returns why the receiver gave up; asserts that it reported that to its user and to the sender."""

    def __call__(
        self, destination: Path, sender: Callable[[Any], Awaitable[None]], *, plan: bytes = copy_files.PLAN.pack(1, 0)
    ) -> str: ...


@pytest.fixture
def misbehave(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> Misbehave:
    """The receiver is in this process: one of its own would take more time to start than all the rest."""

    def misbehave(
        destination: Path, sender: Callable[[Any], Awaitable[None]], *, plan: bytes = copy_files.PLAN.pack(1, 0)
    ) -> str:
        printed: queue.SimpleQueue[str] = queue.SimpleQueue()
        monkeypatch.setattr(copy_files, "print", Print(printed), raising=False)

        async def send(said: queue.SimpleQueue[Any]) -> None:
            # The receiver may be gone before we have closed. Unless it has complained, the test fails.
            with trio.fail_after(DEADLINE), contextlib.suppress(trio.BrokenResourceError):
                line = await trio.to_thread.run_sync(partial(printed.get, timeout=DEADLINE))
                async with trio_ucx.connect(line.removeprefix("listening at ")) as connection:
                    with contextlib.suppress(trio.BrokenResourceError):  # the receiver gave up before the last message
                        await connection.send(plan, copy_files.CONTENTS)
                        await sender(connection)
                    said.put((await connection.receive(copy_files.COMPLAINTS)).decode())

        with trio_thread(send) as said:
            assert run_here(copy_files, "receive", destination) == 1
        complaint: str = said.get(timeout=DEADLINE)
        assert capfd.readouterr().err == f"copy_files: {complaint}\n"
        return complaint

    return misbehave


@attrs.frozen
class Print:
    """``print``; what goes to stdout is passed on instead."""

    printed: queue.SimpleQueue[str]

    def __call__(self, text: str, **options: Any) -> None:
        if "file" in options:
            print(text, **options)
        else:
            self.printed.put(text)


def entry(path: str, kind: int = stat.S_IFREG, size: int = 0, target: str = "", mode: int = 0o644) -> bytes:
    encoded = copy_files.Entry(path, kind | mode, 0, size, target).encode()
    assert isinstance(encoded, bytes)
    return encoded


def sends(*messages: bytes) -> Callable[[Any], Awaitable[None]]:
    async def send(connection: trio_ucx.Connection) -> None:
        for message in messages:
            await connection.send(message, copy_files.FILES)

    return send


DIGEST_OF_NOTHING = copy_files.hashlib.blake2b().digest()


def test_copy_files_notices_a_wrong_checksum(misbehave: Misbehave, tmp_path: Path) -> None:
    pieces = sends(entry("some/file", size=8), b"right", b"bad", bytes(64))
    assert misbehave(tmp_path, pieces) == "some/file: the checksums differ"
    assert leftovers(tmp_path) == []


def test_copy_files_keeps_the_old_file_when_the_new_one_is_damaged(misbehave: Misbehave, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("old")
    assert misbehave(tmp_path, sends(entry("file", size=3), b"new", bytes(64))) == "file: the checksums differ"
    assert (tmp_path / "file").read_text() == "old"
    assert leftovers(tmp_path) == [str(tmp_path / "file")]


@pytest.mark.sample(4)
@pytest.mark.parametrize(
    ("path", "kind"),
    [(path, stat.S_IFREG) for path in ["../evil", "/evil", "a/../../evil", "..", ".", "a//evil", "a/", "./evil", ""]]
    + [("../evil", stat.S_IFLNK), ("", stat.S_IFLNK), ("../evil", stat.S_IFDIR), ("..", stat.S_IFDIR)],
)
def test_copy_files_refuses_paths_that_lead_out(misbehave: Misbehave, tmp_path: Path, path: str, kind: int) -> None:
    destination = tmp_path / "destination"
    complaint = misbehave(destination, sends(entry(path, kind, target="x"), DIGEST_OF_NOTHING))
    assert complaint == f"{path}: refused: the path leads out of the destination"
    assert list(tmp_path.iterdir()) == [destination]
    assert list(destination.iterdir()) == []


@pytest.mark.parametrize("kind", [stat.S_IFREG, stat.S_IFLNK, stat.S_IFDIR])
def test_copy_files_does_not_write_through_symlinks(misbehave: Misbehave, tmp_path: Path, kind: int) -> None:
    destination, outside = tmp_path / "destination", tmp_path / "outside"
    outside.mkdir()
    evil = "link/evil" if kind != stat.S_IFDIR else "link"
    complaint = misbehave(
        destination,
        sends(entry("link", stat.S_IFLNK, target=str(outside)), entry(evil, kind, mode=0o777), DIGEST_OF_NOTHING),
    )
    assert complaint == f"{evil}: Not a directory"
    assert list(outside.iterdir()) == []
    assert stat.S_IMODE(outside.stat().st_mode) != 0o777
    assert leftovers(destination) == [str(destination / "link")]


#: UCX's status, which is a part of a complaint.
TRUNCATED = "TRUNCATED"


@pytest.mark.sample(3)
@pytest.mark.parametrize(
    ("messages", "complaint"),
    [
        ([b"?"], "a malformed entry"),
        ([entry("a\0b")], "a malformed entry"),
        ([entry("disk", stat.S_IFBLK)], "disk: refused: no file, directory or link"),
        ([entry("file", size=3), b"long"], "file: the sender's pieces do not add up"),
        ([entry("file", size=3), b""], "file: the sender's pieces do not add up"),
        ([entry("n" * 300), DIGEST_OF_NOTHING], "n" * 300 + ": File name too long"),
        ([entry("\x1b[2J", stat.S_IFBLK)], "?[2J: refused: no file, directory or link"),
        ([bytes(2**16)], TRUNCATED),
        ([entry("file", size=2**40), bytes(copy_files.PIECE + 1)], TRUNCATED),
    ],
)
def test_copy_files_survives_nonsense(
    misbehave: Misbehave, tmp_path: Path, messages: list[bytes], complaint: str
) -> None:
    reason = misbehave(tmp_path, sends(*messages))
    if complaint is TRUNCATED:
        assert TRUNCATED in reason
    else:
        assert reason == complaint
    assert leftovers(tmp_path) == []


@pytest.mark.parametrize("plan", [b"", b"hello", copy_files.PLAN.pack(0, 0), copy_files.PLAN.pack(65, 0)])
def test_copy_files_refuses_a_strange_plan(misbehave: Misbehave, tmp_path: Path, plan: bytes) -> None:
    assert misbehave(tmp_path, sends(), plan=plan) in (
        "this is not copy_files calling",
        "0 jobs are not between 1 and 64",
        "65 jobs are not between 1 and 64",
    )


@pytest.mark.full
async def test_copy_files_does_not_take_set_user_id(tmp_path: Path) -> None:
    source, destination = tmp_path / "source", tmp_path / "destination"
    source.mkdir()
    (source / "program").touch()
    (source / "program").chmod(0o4755)
    await copy(source, destination, transports="tcp")
    assert stat.S_IMODE((destination / "program").stat().st_mode) == 0o755


# ---- things that go wrong half-way ----


@pytest.mark.full
async def test_copy_files_reports_a_file_that_became_shorter(tmp_path: Path) -> None:
    source, destination = tmp_path / "source", tmp_path / "destination"
    source.mkdir()
    (source / "file").write_bytes(bytes(1000))
    entries = [attrs.evolve(each, size=1001) if each.path else each for each in copy_files.scan(str(source))]
    async with receiver(destination) as receiving:
        with trio.fail_after(DEADLINE), pytest.raises(ExceptionGroup) as caught:
            async with trio_ucx.connect(receiving.address) as connection:
                await copy_files.converse(connection, "sending", partial(copy_files.send_tree, str(source), entries, 2))
        reason = f"{source}/file: became shorter while it was copied"
        assert copy_files.explain(caught.value) == reason
        assert await receiving.end() == (1, f"copy_files: the other side gave up: {reason}\n")
    assert leftovers(destination) == []


async def test_copy_files_gives_up_when_nothing_moves(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(copy_files, "STALL_TIMEOUT", 0.2)
    root = os.open(tmp_path, os.O_RDONLY)
    try:
        [listener] = await trio_ucx.open_ucx_listeners(0, host="127.0.0.1")
        async with listener, trio_ucx.connect(listener.address), await listener.accept() as connection:
            with pytest.raises(trio.TooSlowError) as caught, trio.fail_after(DEADLINE):
                await copy_files.converse(connection, "receiving", partial(copy_files.receive_tree, root))
        assert copy_files.explain(caught.value) == "nothing moved for 0.2 seconds"
    finally:
        os.close(root)


@pytest.mark.full
async def test_copy_files_tells_the_sender_why(tmp_path: Path) -> None:
    source, destination = tmp_path / "source", tmp_path / "destination"
    source.mkdir()
    (source / "name").write_bytes(bytes(2**24))
    (destination / "name" / "is a directory").mkdir(parents=True)
    async with receiver(destination) as receiving:
        with program(COPY_FILES, "send", source, receiving.address) as sending:
            assert await sending.end() == (1, "copy_files: the other side gave up: name: Is a directory\n")
        assert await receiving.end() == (1, "copy_files: name: Is a directory\n")
    assert leftovers(destination) == []


async def wait_half_way(destination: Path) -> None:
    """Until some of a large file is there."""
    await until(lambda: any(path.is_file() and path.stat().st_size for path in destination.iterdir()), within=DEADLINE)


@pytest.mark.full
@pytest.mark.parametrize("victim", ["sender", "receiver"])
@pytest.mark.parametrize(
    ("transports", "number"),
    [("tcp", signal.SIGKILL), ("tcp", signal.SIGINT), ("tcp", signal.SIGTERM), ("tcp,sm,self", signal.SIGKILL)],
)
async def test_copy_files_interrupted(tmp_path: Path, transports: str, victim: str, number: signal.Signals) -> None:
    source, destination = tmp_path / "source", tmp_path / "destination"
    source.mkdir()
    for name in ["one", "two"]:
        with open(source / name, "wb") as file:
            file.truncate(2**33)
    async with receiver(destination, transports) as receiving:
        with program(COPY_FILES, "send", source, receiving.address, transports=transports) as sending:
            await wait_half_way(destination)
            killed, other = (sending, receiving) if victim == "sender" else (receiving, sending)
            killed.process.send_signal(number)
            started = trio.current_time()
            status, errors = await other.end()
            assert trio.current_time() - started < 20
            assert status == 1
            assert errors.startswith("copy_files: ") and errors.count("\n") == 1, errors
            status, errors = await killed.end()
            assert (status, errors) == (-number if number == signal.SIGKILL else 130, "")
    if (victim, number) != ("receiver", signal.SIGKILL):
        assert leftovers(destination) == []


@pytest.mark.full
async def test_copy_files_interrupted_while_nobody_calls(tmp_path: Path) -> None:
    async with receiver(tmp_path) as receiving:
        receiving.process.send_signal(signal.SIGINT)
        assert await receiving.end() == (130, "")


# ---- the command line ----


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (["send", "/does/not/exist", "127.0.0.1:9"], "No such file or directory"),
        (["send", COPY_FILES, "127.0.0.1:9"], "Not a directory"),
        (["send", COPY_FILES.parent, "127.0.0.1:9"], "127.0.0.1:9"),
        (["send", COPY_FILES.parent, "no.such.host.invalid:9"], "[Errno "),
        (["receive", COPY_FILES], "File exists"),
        (["receive", COPY_FILES.parent, "--listen", "192.0.2.1:0"], "192.0.2.1"),
    ],
)
def test_copy_files_complains_in_one_line(
    arguments: list[object], complaint: str, capfd: pytest.CaptureFixture[str]
) -> None:
    assert run_here(copy_files, *arguments) == 1
    errors = capfd.readouterr().err
    assert errors.startswith("copy_files: ") and errors.count("\n") == 1
    assert complaint in errors


@pytest.mark.parametrize("address", ["nonsense", "host:", "host:port", ":1", "host:65536", "host:-1"])
def test_copy_files_refuses_a_bad_address(address: str, capfd: pytest.CaptureFixture[str]) -> None:
    assert run_here(copy_files, "send", ".", address) == 2
    assert capfd.readouterr().err.startswith("usage: ")
