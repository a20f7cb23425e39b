"""``python -m trio_ucx report``: asks another process what waits there."""

from __future__ import annotations

import argparse
import fcntl
import os
import select
import signal
import stat
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from .._report.reporting import answer_path, mark_of
from .._util.process import is_stopped
from .._util.text import printable
from .errors import NoReport

#: Seconds for an answer; and those after which an unanswered signal is sent again.
TIMEOUT, AGAIN = 10.0, 2.0
#: The longest report, in bytes: that of some 40,000 connections.
LONGEST = 2**24


def add_command(commands: Any) -> None:
    parser = commands.add_parser(
        "report",
        help="what waits in another process, and why",
        description="Prints the report of a process that has called trio_ucx.report_on_signal(): everything that waits "
        "there, and likely causes of a hang.",
    )
    parser.add_argument("pid", type=int, metavar="PID")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument("--signal", default="SIGUSR1", metavar="NAME", help="that of report_on_signal: SIGUSR1")
    parser.set_defaults(run=run, prog=parser.prog)


def run(arguments: argparse.Namespace) -> int:
    name = arguments.signal.upper()
    number = getattr(signal, name if name.startswith("SIG") else f"SIG{name}", None)
    if not isinstance(number, signal.Signals):
        raise NoReport(f"there is no signal {arguments.signal}")
    print(ask(arguments.pid, number, "json" if arguments.json else "text"))
    return 0


def ask(pid: int, number: signal.Signals, kind: str = "text", timeout: float = TIMEOUT) -> str:
    """The report of a process.

    Raises:
        NoReport: there is none; the text says why.
        OSError: ``pid`` cannot be that of a process.
    """
    if pid <= 0:
        raise NoReport(f"{pid} is not the number of a process")
    try:
        process = os.pidfd_open(pid)
        try:
            text = _ask(pid, process, number, kind, timeout)
        finally:
            os.close(process)
    except (ProcessLookupError, OverflowError):
        raise NoReport(f"there is no process {pid}") from None
    if not text:
        why = f"it has ended; or its main thread is in C code; or its handler of {number.name} is not trio_ucx's"
        if is_stopped(pid):
            why = "it is stopped"
        raise NoReport(f"process {pid} has not answered within {timeout:g} seconds: {why}")
    return text


def _ask(pid: int, process: int, number: signal.Signals, kind: str, timeout: float) -> str:
    user = os.stat(f"/proc/{pid}").st_uid
    if os.geteuid() not in (0, user):
        raise NoReport(f"process {pid} belongs to another user")
    if not _handles(pid, number):
        raise NoReport(
            f"process {pid} has not called trio_ucx.report_on_signal(signal.{number.name}): the signal would end it, "
            "or do something else. Start it again with TRIO_UCX_REPORT=USR1; now only py-spy or gdb can look into it"
        )
    with _fifo(answer_path(pid, user, kind), user) as answer:
        return _read(answer, process, number, time.monotonic() + timeout)


def _handles(pid: int, number: signal.Signals) -> bool:
    """True if a process has called ``report_on_signal`` for a signal, which may end it otherwise."""
    status = Path(f"/proc/{pid}/status").read_text()
    if not int(status.partition("\nSigCgt:")[2].split()[0], 16) >> (number - 1) & 1:
        return False
    mark = f"/memfd:{mark_of(number)} "
    for descriptor in Path(f"/proc/{pid}/fd").iterdir():
        with suppress(FileNotFoundError):  # it was closed meanwhile
            if os.readlink(descriptor).startswith(mark):
                return True
    return False


@contextmanager
def _fifo(path: str, user: int) -> Iterator[int]:
    """A FIFO that only this user, and that of the process, can use; its end for reading.

    A request that was killed leaves its FIFO, which the next one takes over: while a request is under way, it has a
    lock on it.
    """
    with suppress(FileExistsError):
        os.mkfifo(path, 0o600)
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_NOFOLLOW | os.O_CLOEXEC)
    except OSError:
        descriptor = os.open(path, os.O_PATH | os.O_NOFOLLOW | os.O_CLOEXEC)  # a link, or of another user
    try:
        found = os.fstat(descriptor)
        if not stat.S_ISFIFO(found.st_mode) or found.st_uid not in (os.geteuid(), user):
            raise NoReport(f"{path} exists, of user {found.st_uid}: it is in the way of a report; remove it")
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if not os.path.samestat(os.lstat(path), found):
                raise FileNotFoundError
        except (BlockingIOError, FileNotFoundError):
            raise NoReport("another request for a report of this process is under way: try again") from None
        try:
            if user != found.st_uid:
                os.fchown(descriptor, user, -1)
            yield descriptor
        finally:
            os.unlink(path)
    finally:
        os.close(descriptor)


def _read(answer: int, process: int, number: signal.Signals, deadline: float) -> str:
    """Sends the signal, and reads what comes until the writer closes its end, the process ends, or the time is over.

    It sends the signal again if nothing comes: when another thread than the main one gets it, Python handles it only
    when the main thread returns from C.
    """
    poll = select.poll()
    for descriptor in (answer, process):
        poll.register(descriptor, select.POLLIN)
    data = bytearray()
    while (left := deadline - time.monotonic()) > 0:
        if not data:
            signal.pidfd_send_signal(process, number)
        ready = dict(poll.poll(1000 * min(left, AGAIN)))
        if answer in ready:
            part = os.read(answer, 65536)
            if not part:
                break
            data += part
            if len(data) > LONGEST:
                raise NoReport(f"the process sends a report of more than {LONGEST} bytes")
        elif process in ready:
            break
    return printable(data.decode(errors="replace"), len(data), keep="\n\t")  # the process may be another user's
