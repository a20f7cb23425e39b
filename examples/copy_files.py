"""Copies a directory tree from one process to another, several files at a time, with checksums and a progress bar.

    pip install '.[cli]'
    python examples/copy_files.py receive DEST              prints the address that it listens at, takes one tree, ends
    python examples/copy_files.py send SOURCE HOST:PORT

One connection carries everything; its tags are queues that do not wait for each other:

    COMPLAINTS   either side's reason for giving up
    CONTENTS     to the receiver: a PLAN; when the files are there, an Entry per directory, deepest first, and b""
                 to the sender: b"" when everything is in its place
    FILES + n    to the receiver, for each of the n jobs: an Entry per file or link, each file's Entry followed by its
                 contents in pieces and by their checksum; then b""

Neither side counts bytes in flight: a sender that is faster than the receiver waits in `send`.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import secrets
import signal
import stat
import struct
import sys
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from io import BufferedReader
from typing import BinaryIO, ClassVar

import attrs
import trio
from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TaskID, TimeRemainingColumn, TransferSpeedColumn

import trio_ucx

COMPLAINTS, CONTENTS, FILES = 0, 1, 2

PIECE = 4 * 2**20  # each job holds one of these on either side
MAX_JOBS = 64
STALL_TIMEOUT = 60  # seconds in which something has to move
LONGEST_ENTRY = 2**14  # room for two paths of PATH_MAX bytes

#: Both sides need the same one, of 16 bytes or more. Without it a server lets in only clients of its own user.
AUTHKEY = trio_ucx.authkey()

PLAN = struct.Struct("<HQ")  # jobs, bytes altogether


class CopyError(Exception):
    """A failure that the user, and the other side, read in one line."""


#: What may go wrong without a bug in this program.
EXPECTED = CopyError, OSError, trio.BrokenResourceError, trio.EndOfChannel, trio.TooSlowError, trio_ucx.UCXError


@attrs.frozen
class Entry:
    """A directory, file or symbolic link. The path is relative to the tree's root, whose own path is empty."""

    path: str
    mode: int  # as in os.stat, with the file type
    mtime_ns: int
    size: int  # of a file
    target: str  # of a link
    HEAD: ClassVar = struct.Struct("<IqQ")

    def encode(self) -> bytes:
        names = b"\0".join(map(os.fsencode, (self.path, self.target)))
        return self.HEAD.pack(self.mode, self.mtime_ns, self.size) + names

    @classmethod
    def decode(cls, message: bytes) -> Entry:
        try:
            path, target = map(os.fsdecode, message[cls.HEAD.size :].split(b"\0"))
            mode, mtime_ns, size = cls.HEAD.unpack_from(message)
        except (struct.error, ValueError):
            raise CopyError("a malformed entry") from None
        return cls(path, mode, mtime_ns, size, target)


@attrs.frozen
class Transfer:
    """The state that all tasks of one side share."""

    connection: trio_ucx.Connection
    progress: Progress
    bar: TaskID
    watchdog: trio.CancelScope

    def moved(self, size: int = 0) -> None:
        self.progress.advance(self.bar, size)
        self.watchdog.deadline = trio.current_time() + STALL_TIMEOUT


async def converse(connection: trio_ucx.Connection, title: str, work: Callable[[Transfer], Awaitable[None]]) -> None:
    """Runs one side's work until it ends, nothing moves any more, or one of the sides gives up."""
    columns = "{task.description}", BarColumn(), DownloadColumn(), TransferSpeedColumn(), TimeRemainingColumn()
    console = Console(stderr=True)
    with (
        Progress(*columns, console=console, disable=not console.is_terminal) as progress,
        trio.fail_after(STALL_TIMEOUT) as watchdog,
    ):
        async with trio.open_nursery() as nursery:
            nursery.start_soon(heed_complaints, connection)
            try:
                await work(Transfer(connection, progress, progress.add_task(title, total=None), watchdog))
            except* (CopyError, OSError, trio_ucx.UCXError) as group:
                with suppress(trio.BrokenResourceError):
                    await connection.send(explain(group).encode(errors="replace")[:LONGEST_ENTRY], tag=COMPLAINTS)
                    await connection.aclose()  # delivers it, which leaving the connection by an exception would not
                raise
            nursery.cancel_scope.cancel()


async def heed_complaints(connection: trio_ucx.Connection) -> None:
    with suppress(trio.EndOfChannel, trio.BrokenResourceError, trio.ClosedResourceError):  # the work notices these, too
        complaint = await connection.receive(tag=COMPLAINTS)
        raise CopyError(f"the other side gave up: {complaint.decode(errors='replace')}")


# ---- the sender ----


def scan(source: str) -> list[Entry]:
    """Lists a tree, each directory before its contents."""
    entries, paths = [], [""]
    while paths:
        path = paths.pop()
        full = os.path.join(source, path)
        status = os.lstat(full)
        if stat.S_ISDIR(status.st_mode):
            paths += (os.path.join(path, name) for name in os.listdir(full))
        elif not stat.S_ISREG(status.st_mode) and not stat.S_ISLNK(status.st_mode):
            print(f"copy_files: skipped {full!r}, which is no file, directory or link", file=sys.stderr)
            continue
        target = os.readlink(full) if stat.S_ISLNK(status.st_mode) else ""
        size = status.st_size if stat.S_ISREG(status.st_mode) else 0
        entries.append(Entry(path, status.st_mode, status.st_mtime_ns, size, target))
    return entries


def read_piece(file: BufferedReader, piece: memoryview, digest: hashlib.blake2b) -> None:
    if file.readinto(piece) < len(piece):
        raise CopyError(f"{file.name}: became shorter while it was copied")
    digest.update(piece)


async def send_file(transfer: Transfer, tag: int, path: str, size: int, buffer: memoryview) -> None:
    digest = hashlib.blake2b()
    async with await trio.open_file(path, "rb") as file:
        while size:
            piece = buffer[: min(size, PIECE)]
            await trio.to_thread.run_sync(read_piece, file.wrapped, piece, digest)
            await transfer.connection.send(piece, tag=tag)
            transfer.moved(len(piece))
            size -= len(piece)
    await transfer.connection.send(digest.digest(), tag=tag)


async def send_entries(transfer: Transfer, tag: int, source: str, entries: Iterator[Entry]) -> None:
    buffer = memoryview(bytearray(PIECE))
    for entry in entries:
        await transfer.connection.send(entry.encode(), tag=tag)
        if stat.S_ISREG(entry.mode):
            await send_file(transfer, tag, os.path.join(source, entry.path), entry.size, buffer)
        transfer.moved()
    await transfer.connection.send(b"", tag=tag)


async def send_tree(source: str, entries: list[Entry], jobs: int, transfer: Transfer) -> None:
    directories = [entry for entry in reversed(entries) if stat.S_ISDIR(entry.mode)]
    others = [entry for entry in entries if not stat.S_ISDIR(entry.mode)]
    size = sum(entry.size for entry in others)
    transfer.progress.update(transfer.bar, total=size)
    await transfer.connection.send(PLAN.pack(jobs, size), tag=CONTENTS)
    largest_first = iter(sorted(others, key=lambda entry: -entry.size))
    async with trio.open_nursery() as nursery:
        for tag in range(FILES, FILES + jobs):  # each takes its next entry from the same iterator
            nursery.start_soon(send_entries, transfer, tag, source, largest_first)
    await send_entries(transfer, CONTENTS, source, iter(directories))
    await transfer.connection.receive(tag=CONTENTS)


async def send(source: str, address: tuple[str, int], jobs: int) -> None:
    entries = await trio.to_thread.run_sync(scan, source)
    async with trio_ucx.connect(address, max_message_size=LONGEST_ENTRY, authkey=AUTHKEY) as connection:
        await converse(connection, "sending", partial(send_tree, source, entries, jobs))


# ---- the receiver, which does not trust the sender ----


@contextmanager
def open_directory(root: int, parts: list[str]) -> Iterator[int]:
    """Opens a directory below the root, and makes missing ones. Never follows a symbolic link."""
    directory = os.dup(root)
    try:
        for part in parts:
            with suppress(FileExistsError):
                os.mkdir(part, 0o700, dir_fd=directory)
            child = os.open(part, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW, dir_fd=directory)
            os.close(directory)
            directory = child
        yield directory
    finally:
        os.close(directory)


@contextmanager
def put_in_place(directory: int, name: str) -> Iterator[str]:
    """Gives a temporary name, which is renamed at the end; after an error nothing is left of it."""
    temporary = f".copy_files-{secrets.token_hex(8)}"
    try:
        yield temporary
        os.replace(temporary, name, src_dir_fd=directory, dst_dir_fd=directory)
    except BaseException:
        with suppress(FileNotFoundError):
            os.unlink(temporary, dir_fd=directory)
        raise


def create(directory: int, name: str) -> BinaryIO:
    return open(os.open(name, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600, dir_fd=directory), "wb")


def write_piece(file: BinaryIO, piece: memoryview, digest: hashlib.blake2b) -> None:
    digest.update(piece)
    file.write(piece)
    file.flush()


async def receive_file(transfer: Transfer, tag: int, file: BinaryIO, size: int, buffer: memoryview) -> None:
    digest = hashlib.blake2b()
    while size:
        length = await transfer.connection.receive_into(buffer, tag=tag)
        if not 0 < length <= size:
            raise CopyError("the sender's pieces do not add up")
        await trio.to_thread.run_sync(write_piece, file, buffer[:length], digest)
        transfer.moved(length)
        size -= length
    if await transfer.connection.receive(tag=tag) != digest.digest():
        raise CopyError("the checksums differ")


async def receive_entry(transfer: Transfer, tag: int, root: int, entry: Entry, buffer: memoryview) -> None:
    parts = entry.path.split("/") if entry.path else []
    if any(part in ("", ".", "..") for part in parts) or not (parts or stat.S_ISDIR(entry.mode)):
        raise CopyError("refused: the path leads out of the destination")
    permissions = entry.mode & 0o777  # whoever sends us files shall not make set-user-id programs of them
    times = entry.mtime_ns, entry.mtime_ns
    if stat.S_ISDIR(entry.mode):
        with open_directory(root, parts) as directory:
            os.fchmod(directory, permissions)
            os.utime(directory, ns=times)
        return
    with open_directory(root, parts[:-1]) as directory, put_in_place(directory, parts[-1]) as temporary:
        if stat.S_ISLNK(entry.mode):
            os.symlink(entry.target, temporary, dir_fd=directory)
            os.utime(temporary, ns=times, dir_fd=directory, follow_symlinks=False)
        elif stat.S_ISREG(entry.mode):
            with create(directory, temporary) as file:
                await receive_file(transfer, tag, file, entry.size, buffer)
                os.fchmod(file.fileno(), permissions)
                os.utime(file.fileno(), ns=times)
        else:
            raise CopyError("refused: no file, directory or link")


async def receive_entries(transfer: Transfer, tag: int, root: int) -> None:
    buffer = memoryview(bytearray(PIECE))
    while message := await transfer.connection.receive(tag=tag):
        entry = Entry.decode(message)
        try:
            await receive_entry(transfer, tag, root, entry, buffer)
        except (CopyError, OSError) as error:
            raise CopyError(f"{entry.path}: {getattr(error, 'strerror', None) or error}") from error
        transfer.moved()


async def receive_tree(root: int, transfer: Transfer) -> None:
    plan = await transfer.connection.receive(tag=CONTENTS)
    if len(plan) != PLAN.size:
        raise CopyError("this is not copy_files calling")
    jobs, size = PLAN.unpack(plan)
    if not 1 <= jobs <= MAX_JOBS:
        raise CopyError(f"{jobs} jobs are not between 1 and {MAX_JOBS}")
    transfer.progress.update(transfer.bar, total=size)
    async with trio.open_nursery() as nursery:
        for tag in range(FILES, FILES + jobs):
            nursery.start_soon(receive_entries, transfer, tag, root)
    await receive_entries(transfer, CONTENTS, root)
    await transfer.connection.send(b"", tag=CONTENTS)


async def receive(destination: str, address: tuple[str, int]) -> None:
    os.makedirs(destination, exist_ok=True)
    root = os.open(destination, os.O_RDONLY | os.O_DIRECTORY)
    try:
        open_listeners = partial(trio_ucx.open_ucx_listeners, max_message_size=LONGEST_ENTRY, authkey=AUTHKEY)
        listener, *others = await open_listeners(address)
        for other in others:  # a host name may have several addresses
            await other.aclose()
        async with listener:
            print(f"listening at {trio_ucx.format_address(listener.address)}", flush=True)
            connection = await listener.accept()
        async with connection:
            await converse(connection, "receiving", partial(receive_tree, root))
    finally:
        os.close(root)


# ---- the command line ----


async def run(work: Callable[[], Awaitable[None]]) -> None:
    """Makes Ctrl-C a cancellation, which tasks see only where they wait: files are cleaned up, whatever the moment."""

    async def heed_signals(task_status: trio.TaskStatus[None]) -> None:
        with trio.open_signal_receiver(signal.SIGINT, signal.SIGTERM) as signals:
            task_status.started()
            async for _ in signals:
                raise KeyboardInterrupt

    async with trio.open_nursery() as nursery:
        await nursery.start(heed_signals)
        await work()
        nursery.cancel_scope.cancel()


def explain(error: BaseException) -> str:
    """The one line that matters of an exception, or of a group of them."""
    reason = error
    if isinstance(reason, BaseExceptionGroup):
        reason = reason.subgroup(CopyError) or reason  # better than that the connection broke, which comes of it
    while isinstance(reason, BaseExceptionGroup):
        reason = reason.exceptions[0]
    if isinstance(reason, trio.TooSlowError):
        return f"nothing moved for {STALL_TIMEOUT} seconds"
    text = str(reason) or type(reason).__name__
    return "".join(character if character.isprintable() else "?" for character in text)


def main() -> int:
    parser = argparse.ArgumentParser(description="Copies a directory tree from one process to another.")
    commands = parser.add_subparsers(required=True, dest="command")
    receiver = commands.add_parser("receive", help="wait for one tree, and put it into a directory")
    receiver.add_argument("destination")
    receiver.add_argument("--listen", type=trio_ucx.parse_address, default=("127.0.0.1", 0), metavar="HOST:PORT")
    sender = commands.add_parser("send", help="send a directory's contents")
    sender.add_argument("source")
    sender.add_argument("address", type=trio_ucx.parse_address, metavar="HOST:PORT")
    sender.add_argument("--jobs", type=int, default=4, choices=range(1, MAX_JOBS + 1), metavar="N")
    options = parser.parse_args()
    if options.command == "receive":
        work = partial(receive, options.destination, options.listen)
    else:
        work = partial(send, options.source, options.address, options.jobs)
    status = 0
    try:
        trio.run(run, work)
    except* KeyboardInterrupt:
        status = 130
    except* EXPECTED as group:
        print(f"copy_files: {explain(group)}", file=sys.stderr)
        status = 1
    return status


if __name__ == "__main__":
    sys.exit(main())
