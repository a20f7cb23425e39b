"""Reports: as text, when a signal arrives to a file, or to the process that asks.

``python -m trio_ucx report PID`` makes a FIFO, whose path both processes know, and sends the signal. The handler writes
to the FIFO if it is there and belongs to this process's user. So nobody else can read a report, or make this process
write to a file.
"""

from __future__ import annotations

import json as json_format
import logging
import os
import select
import signal
import stat
import sys
import threading
import traceback
from types import FrameType
from typing import TextIO

from .collect import collect

logger = logging.getLogger("trio_ucx")

#: Seconds for which a reader may be slow.
_PATIENCE = 5.0
#: Environment variable: the signal for which each process that imports trio_ucx writes its report.
VARIABLE = "TRIO_UCX_REPORT"
#: What can be asked for.
KINDS = ("text", "json")

#: Where the report of each signal goes.
_files: dict[int, TextIO] = {}
#: By signal, the descriptor whose name tells other processes that this one handles it.
_marks: dict[int, int] = {}


def answer_path(pid: int, user: int, kind: str) -> str:
    """The FIFO to which a process of a user writes its answer."""
    return f"/tmp/trio_ucx-report-{user}-{pid}.{kind}"


def mark_of(signum: int) -> str:
    """The name of a descriptor of a process whose handler of a signal is that of :func:`report_on_signal`."""
    return f"trio_ucx.report_on_signal {signum:d}"


def report(*, json: bool = False) -> str:
    """Describes everything in this process that waits, and names likely causes of a hang, in lines that begin with
    ``=>``.

    Per worker: what progresses it, its Connections (peer, age, credit in each direction; for each tag the messages that
    nobody has received, and the receives that wait: which task, where, for how long), sends that wait for credit or for
    the peer's receive, the byte stream, handshakes, listeners, closes, raw operations, request chains, and memory that
    peers can reach. A task that polls instead of being parked may be missing.

    It can be called from any thread, and from a signal handler. Only what belongs to the calling thread is described in
    UCX's words, too (``ucp_request_query``), and not while one of the library's own calls is interrupted.

    Args:
        json: returns one JSON object instead. It and its ``items`` have a ``text``, the ``causes``, ``items`` of the
            same form, and facts by name, such as ``seconds``.

    Raises: nothing, whatever state the library is in.
    """
    found = collect()
    return json_format.dumps(found.as_json(), indent=1, default=str) if json else found.as_text()


def report_on_signal(signum: int = signal.SIGUSR1, file: TextIO | None = None) -> None:
    """Writes a :func:`report` to a file whenever a signal arrives.

    ``python -m trio_ucx report PID`` sends the signal to a process that has called this, and prints the report instead.

    The main thread writes it when it runs Python code; so it is there also while Trio's loop is blocked, and says
    where. While the main thread stays in C code, nothing is written. (``faulthandler.register`` writes stacks even
    then, but with CPython 3.12 and 3.13 it can crash a process that runs.) When the signal interrupts a call of
    trio_ucx, UCX's words are missing.

    Importing trio_ucx calls it if TRIO_UCX_REPORT in the environment names a signal: ``USR1``, say.

    It replaces the signal's handler. Called again for the same signal, it replaces the file.

    Args:
        signum: the signal.
        file: where to write; it must have a descriptor, and stay open. By default ``sys.stderr``.

    Raises:
        ValueError: not the main thread, or not a signal.
        OSError: the file has no descriptor, or the signal cannot be handled; no descriptor is left for a mark.
        RuntimeError: there is no ``sys.stderr``.
    """
    if file is None:
        file = sys.stderr
        if file is None:
            raise RuntimeError("sys.stderr is None: give report_on_signal a file")
    file.fileno()
    if threading.current_thread() is not threading.main_thread():
        raise ValueError("report_on_signal works only in the main thread, as all signal handlers of Python's")
    if signum not in _marks:
        _marks[signum] = os.memfd_create(mark_of(signum))
    _files[signum] = file
    signal.signal(signum, _answer)


def report_as_environment_says() -> None:
    """Calls :func:`report_on_signal` for the signal that the environment variable TRIO_UCX_REPORT names: USR1, say.

    Raises:
        ValueError: it names none.
    """
    name = os.environ.get(VARIABLE, "")
    if not name:
        return
    try:
        signum = signal.Signals[f"SIG{name.upper().removeprefix('SIG')}"]
    except KeyError:
        raise ValueError(f"{VARIABLE}={name} in the environment is not the name of a signal: write USR1") from None
    try:
        # Without stderr the file is never used: `python -m trio_ucx report PID` has a FIFO.
        report_on_signal(signum, sys.stderr or open(os.devnull, "w"))  # noqa: SIM115
    except (ValueError, OSError) as error:
        logger.warning("%s=%s has no effect: %s", VARIABLE, name, error)


def _answer(signum: int, frame: FrameType | None) -> None:
    """Handles the signal: writes the report where it was asked for. Never raises."""
    try:
        asked = [kind for kind in KINDS if _answer_to_fifo(kind)]
        if not asked:
            _write(_files[signum].fileno(), _text("text") + "\n")
    except Exception:
        pass  # nobody can be told: the file was closed, or the process that asked has gone


def _text(kind: str) -> str:
    try:
        return report(json=kind == "json")
    except Exception:
        return f"trio_ucx report failed:\n{traceback.format_exc()}"


def _answer_to_fifo(kind: str) -> bool:
    """Writes the report to a process that waits for it. True if there was one."""
    path = answer_path(os.getpid(), os.geteuid(), kind)
    try:
        descriptor = os.open(path, os.O_WRONLY | os.O_NONBLOCK | os.O_NOFOLLOW | os.O_CLOEXEC)
    except OSError:  # there is none, or nobody reads it any more
        return False
    try:
        found = os.fstat(descriptor)
        waits = stat.S_ISFIFO(found.st_mode) and found.st_uid == os.geteuid()
        if waits:
            _write(descriptor, _text(kind))
        return waits
    finally:
        os.close(descriptor)


def _write(descriptor: int, text: str) -> None:
    """Writes without a buffer: the signal may have interrupted a write to the same file."""
    data = text.encode(errors="replace")
    poll = select.poll()
    poll.register(descriptor, select.POLLOUT)
    while data and poll.poll(1000 * _PATIENCE):
        data = data[os.write(descriptor, data) :]
