"""Passes UCX's log to the logger ``trio_ucx.ucx``, by a thread that runs while contexts are open.

Lines of our own C code, without the number of a source line, go to the logger ``trio_ucx``.

Reports: "UCX logs to stdout" and "libucm writes to stdout", in ucx-reports.md. Releases: all, 1.13 to 1.22. Not
needed any more when ``log_stdout.c`` there writes nothing to stdout; the Python logger would still be of use. Private
to UCX are the names of the source files in :data:`HARMLESS`: a line that does not match is logged as UCX says. Test:
``tests/test_ucx_log.py``.
"""

from __future__ import annotations

import atexit
import errno
import logging
import os
import re
import threading
from contextlib import suppress
from typing import Any

from ..._native import ffi, lib
from ..._util.text import printable
from .default_options import DEFAULT_OPTIONS

logger = logging.getLogger("trio_ucx.ucx")
own_logger = logging.getLogger("trio_ucx")

#: Python's levels for UCX's (``ucs_log_level_t``): fatal, error, warn, diag, info. Then come debug and the kinds of
#: trace, and lines that UCX prints at any level.
_LEVELS = [logging.ERROR, logging.ERROR, logging.WARNING, logging.INFO, logging.INFO]
_PRINT = 13
#: Lines that UCX logs as errors in ordinary use, and we log at DEBUG: the end of the file name, the begin of the text.
HARMLESS = (
    # UCX has closed the socket of a connection that its peer closed, and then handles an earlier event of that socket.
    # It reports the endpoint's failure in another way.
    (b"/tcp_ep.c", re.compile(rb"tcp_ep \S+ \(state=\w+\): (recv|send|sendv)\(-1\) failed: ")),
    # The peer ended while UCX connected to it. The endpoint fails, and the waiting tasks get the error. Or the peer has
    # closed a connection that UCX accepts: when both sides connect at once, one of them closes its own.
    (b"/tcp_cm.c", re.compile(rb"tcp_(ep|iface) \S+: connection establishment for socket fd -?\d+ ")),
    # A sandbox lets UCX find no network device: our own warning says so (``sandboxes``).
    (
        b"/sock.c",
        re.compile(rb"getifaddrs error: (Address family not supported|Operation not permitted|Permission denied)"),
    ),
    # The same, when the Connection was given up before UCX connected: ``gate_connect`` in ``key_gate.c``.
    (b"/sock.c", re.compile(rb"connect\(fd=-?\d+, dest_addr=\S+\) failed: Operation canceled")),
    # Shared memory has gone: its process has ended while UCX connected to it, or its owner has closed it. The waiting
    # tasks get the error.
    (b"/mm_sysv.c", re.compile(rb"shmat\(shmid=\d+\) failed: (Invalid argument|Identifier removed)")),
    (b"/mm_posix.c", re.compile(rb"open\(file_name=/proc/\d+/fd/\d+ .*\) failed: No such file or directory")),
    (b"/mm_ep.c", re.compile(rb"mm ep failed to connect to remote FIFO id \S+: Shared memory error")),
    (b"/ucp_rkey.c", re.compile(rb"failed to unpack remote key from remote md\[\d+\]: Shared memory error")),
    # In 1.17 and 1.19: options that we set, of transports that are not in use.
    (b"/ucp_worker.c", re.compile(rb"invalid configurations?: ((%s)=\w+,?)+$" % "|".join(DEFAULT_OPTIONS).encode())),
    # The worker was destroyed, and nobody had received the messages that had arrived.
    (b"/tag_match.c", re.compile(rb"unexpected tag-receive descriptor \S+ was not matched")),
    # The worker was destroyed, and a receive had not ended: of a message whose sender died in the middle (see
    # ``_engine/draining.py``).
    (b"/mpool.c", re.compile(rb"object \S+ \{.*\brecv\b.*\} was not returned to mpool ucp_requests")),
)
#: Seconds that closing the last context waits for the thread to log the remaining lines.
_PATIENCE = 1.0

_lock = threading.Lock()
_contexts = 0
_thread: threading.Thread | None = None

if (os.environ.get("UCX_LOG_LEVEL") or os.environ.get("UCX_PROTO_INFO")) and logger.level == logging.NOTSET:
    logger.setLevel(logging.DEBUG)  # UCX itself drops lines of other levels


def open() -> None:
    """Called before a context is opened: starts the thread with the first one.

    Raises:
        OSError: EAGAIN: no thread can be started.
    """
    global _contexts, _thread
    with _lock:
        if _thread is None:
            reader = lib.tu_log_open()
            thread = threading.Thread(target=_log_lines, args=(reader,), name="trio_ucx log of UCX", daemon=True)
            try:
                thread.start()
            except RuntimeError as error:
                lib.tu_log_close()
                raise OSError(
                    errno.EAGAIN,
                    "starting UCX needs a thread, and none can be started: raise the limits of memory and of threads "
                    "(ulimit -v, RLIMIT_AS; ulimit -u, RLIMIT_NPROC; pids.max of the control group)",
                ) from error
            _thread = thread
        _contexts += 1


def close() -> None:
    """Called when a context was closed. The last one waits until all lines are logged."""
    global _contexts
    with _lock:
        _contexts = max(0, _contexts - 1)  # in a forked child the context may be the parent's
        if _contexts == 0:
            _end()


@atexit.register
def _end() -> None:
    """Ends the thread: from now on UCX's lines go to stderr."""
    global _thread
    thread, _thread = _thread, None
    if thread is not None:
        lib.tu_log_close()
        thread.join(_PATIENCE)


def _after_fork() -> None:
    """In a forked child there is no such thread, and no context of this process yet."""
    global _lock, _contexts, _thread
    _lock, _contexts, _thread = threading.Lock(), 0, None


os.register_at_fork(after_in_child=_after_fork)


def _log_lines(reader: int) -> None:
    lost = ffi.new("uint64_t *")
    line = ffi.NULL
    while True:
        line = lib.tu_log_take(reader, line, lost)
        with suppress(BaseException):  # from a handler or filter of the user's, which must not end this thread
            if lost[0] and _can_write(reader, logger, logging.WARNING):
                logger.warning(
                    "%d lines of UCX's log came too fast and are lost: UCX_LOG_FILE has UCX write them itself", lost[0]
                )
        if line == ffi.NULL:
            return
        try:
            _log(line, reader)
        except BaseException:  # the same
            lib.tu_log_print(line)


def _can_write(reader: int, to: logging.Logger, level: int) -> bool:
    """Waits until the handlers of a logger can write a line without blocking, as far as they write to descriptors.

    A thread that is blocked in a handler holds its lock, for which the interpreter's end would wait.

    Returns:
        False: this thread is to end, and they cannot.
    """
    found = [] if to.hasHandlers() else [2]
    at: logging.Logger | None = to
    while at is not None:
        for handler in at.handlers:
            if level >= handler.level:
                with suppress(Exception):  # it has no stream, or one without a descriptor
                    found.append(handler.stream.fileno())  # type: ignore[attr-defined]
        at = at.parent if at.propagate else None
    return all(lib.tu_log_can_write(reader, descriptor) for descriptor in found)


def _log(line: Any, reader: int) -> None:
    if line.number == 0:
        if own_logger.isEnabledFor(logging.INFO) and _can_write(reader, own_logger, logging.INFO):
            own_logger.info("%s", ffi.string(line.text).decode(errors="replace"))
        return
    level = _level(line.level)
    if level > logging.DEBUG and _is_harmless(line):
        level = logging.DEBUG
    if not logger.hasHandlers():
        if level > logging.DEBUG and _can_write(reader, logger, level):
            lib.tu_log_print(line)
        return
    if logger.isEnabledFor(level) and _can_write(reader, logger, level):
        file, function, text = (
            ffi.string(each).decode(errors="replace") for each in (line.file, line.function, line.text)
        )
        message = f"{os.path.basename(file)}:{line.number} {printable(text, len(text))}"  # it may quote a peer
        logger.handle(logger.makeRecord(logger.name, level, file, line.number, message, (), None, function))


def _level(level: int) -> int:
    if level == _PRINT:
        return logging.INFO
    return _LEVELS[level] if level < len(_LEVELS) else logging.DEBUG


def _is_harmless(line: Any) -> bool:
    file, text = ffi.string(line.file), ffi.string(line.text)
    return any(file.endswith(ending) and start.match(text) for ending, start in HARMLESS)
