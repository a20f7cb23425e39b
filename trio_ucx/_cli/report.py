"""``python -m trio_ucx report``: asks another process what waits there."""

from __future__ import annotations

import argparse
import fcntl
import os
import select
import signal
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

from .._report.reporting import DONE, STATE_SIZE, mark_of
from .._util.process import is_stopped
from .._util.text import printable
from .errors import NoReport

#: Seconds for an answer; those after which an unanswered signal is sent again; and between two looks for the answer.
TIMEOUT, AGAIN, LOOK = 10.0, 2.0, 0.01
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
    try:
        memfd = _open_memfd(pid, number)
    except PermissionError as error:
        raise NoReport(
            f"the kernel does not let this command look into process {pid}, even as its user: {error}"
        ) from None
    if memfd is None:
        raise NoReport(
            f"process {pid} has not called trio_ucx.report_on_signal(signal.{number.name}): the signal would end it, "
            "or do something else. Start it again with TRIO_UCX_REPORT=USR1; now only py-spy or gdb can look into it"
        )
    deadline = time.monotonic() + timeout
    try:
        while not _lock(memfd):
            if time.monotonic() >= deadline:
                raise NoReport("another request for a report of this process is under way, and does not end")
            time.sleep(LOOK)
        return _exchange(memfd, process, number, kind, deadline)
    finally:
        os.close(memfd)


def _lock(memfd: int) -> bool:
    try:
        fcntl.flock(memfd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _open_memfd(pid: int, number: signal.Signals) -> int | None:
    """Opens the memfd of a process that has called ``report_on_signal`` for a signal, which may end it otherwise.

    The process may be another user's and lie: what is opened is a memfd, not a file that the process has access to, but
    could not write to itself.
    """
    status = Path(f"/proc/{pid}/status").read_text()
    if not int(status.partition("\nSigCgt:")[2].split()[0], 16) >> (number - 1) & 1:
        return None
    own = os.memfd_create("")
    memfds = os.fstat(own).st_dev  # the kernel's own file system, where no path leads
    os.close(own)
    for path in Path(f"/proc/{pid}/fd").iterdir():
        with suppress(FileNotFoundError):  # it was closed meanwhile
            if os.readlink(path).startswith(f"/memfd:{mark_of(number)} ") and path.stat().st_dev == memfds:
                found = os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_NONBLOCK)
                if os.fstat(found).st_dev == memfds:
                    return found
                os.close(found)
    return None


def _exchange(memfd: int, process: int, number: signal.Signals, kind: str, deadline: float) -> str:
    """Sends the signal, and returns the report when it is there; "" if the process ends, or the time is over.

    It sends the signal again if nothing comes: when another thread than the main one gets it, Python handles it only
    when the main thread returns from C.
    """
    poll = select.poll()
    poll.register(process, select.POLLIN)
    os.ftruncate(memfd, 0)
    os.pwrite(memfd, kind.encode(), 0)
    again, ended = 0.0, False
    try:
        while os.pread(memfd, STATE_SIZE, 0) != DONE:
            now = time.monotonic()
            if ended or now >= deadline:
                return ""
            if now >= again:
                signal.pidfd_send_signal(process, number)
                again = now + AGAIN
            ended = bool(poll.poll(1000 * LOOK))
        data = os.pread(memfd, LONGEST + 1, STATE_SIZE)
        if len(data) > LONGEST:
            raise NoReport(f"the process sends a report of more than {LONGEST} bytes")
        return printable(data.decode(errors="replace"), len(data), keep="\n\t")  # it may be another user's
    finally:
        os.ftruncate(memfd, 0)
