"""Reports: as text, when a signal arrives to a file, or to the process that asks.

A process that handles the signal has a memfd for it, whose name tells others so. ``python -m trio_ucx report PID``
opens that memfd as ``/proc/PID/fd/N``, which the kernel permits to the same user and to root, whatever container either
is in. It locks the memfd, writes the kind of report into it, and sends the signal; the handler answers there:

    4 bytes   "text" or "json": the request; "busy": the handler works on it; "done": the report follows
    report

No path is involved that another user could take, and a request that was killed leaves no lock.
"""

from __future__ import annotations

import fcntl
import json as json_format
import logging
import os
import select
import signal
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
#: What can be asked for, and the other states of a request.
KINDS, BUSY, DONE = ("text", "json"), b"busy", b"done"
STATE_SIZE = 4
#: Bytes that are written at once.
_PART = 2**20

#: Where the report of each signal goes.
_files: dict[int, TextIO] = {}
#: By signal, the memfd for requests, and its identity: a program may close all descriptors.
_mailboxes: dict[int, tuple[int, os.stat_result]] = {}


def mark_of(signum: int) -> str:
    """The name of the memfd of a process whose handler of a signal is that of :func:`report_on_signal`."""
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
        OSError: the file has no descriptor, or the signal cannot be handled; no descriptor is left for requests.
        RuntimeError: there is no ``sys.stderr``.
    """
    if file is None:
        file = sys.stderr
        if file is None:
            raise RuntimeError("sys.stderr is None: give report_on_signal a file")
    file.fileno()
    if threading.current_thread() is not threading.main_thread():
        raise ValueError("report_on_signal works only in the main thread, as all signal handlers of Python's")
    if signum not in _mailboxes:
        descriptor = os.memfd_create(mark_of(signum))
        _mailboxes[signum] = descriptor, os.fstat(descriptor)
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
        # Without stderr the file is never used: `python -m trio_ucx report PID` does not need it.
        report_on_signal(signum, sys.stderr or open(os.devnull, "w"))  # noqa: SIM115
    except (ValueError, OSError) as error:
        logger.warning("%s=%s has no effect: %s", VARIABLE, name, error)


def _answer(signum: int, frame: FrameType | None) -> None:
    """Handles the signal: writes the report where it was asked for. Never raises."""
    try:
        if not _answer_request(*_mailboxes[signum]):
            _write(_files[signum].fileno(), _text("text") + "\n")
    except Exception:
        pass  # nobody can be told: the file was closed, or the process that asked has gone


def _text(kind: str) -> str:
    try:
        return report(json=kind == "json")
    except Exception:
        return f"trio_ucx report failed:\n{traceback.format_exc()}"


def _answer_request(memfd: int, identity: os.stat_result) -> bool:
    """Writes the report to a process that waits for it. True if there is one."""
    try:
        if not os.path.samestat(os.fstat(memfd), identity):
            return False
        fcntl.flock(memfd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        pass
    except OSError:  # it was closed
        return False
    else:
        fcntl.flock(memfd, fcntl.LOCK_UN)
        return False
    kind = os.pread(memfd, STATE_SIZE, 0).decode(errors="replace")
    if kind in KINDS:
        os.pwrite(memfd, BUSY, 0)  # the signal may come again meanwhile
        data = _text(kind).encode(errors="replace")
        os.ftruncate(memfd, STATE_SIZE)
        for at in range(0, len(data), _PART):
            os.pwrite(memfd, data[at : at + _PART], STATE_SIZE + at)
        os.pwrite(memfd, DONE, 0)
    return True


def _write(descriptor: int, text: str) -> None:
    """Writes without a buffer: the signal may have interrupted a write to the same file."""
    data = text.encode(errors="replace")
    poll = select.poll()
    poll.register(descriptor, select.POLLOUT)
    while data and poll.poll(1000 * _PATIENCE):
        data = data[os.write(descriptor, data) :]
