"""The command line, ``python -m trio_ucx`` or ``trio-ucx``.

    errors         errors that are not bugs
    info           the command info: what UCX offers on this machine, and the configuration in force
    privileges     what the kernel lets this process do and use
    check          the command check: what a machine can check of this machine, and of the way to another host
    credentials    the key of --listen and of its clients
    sizes          message sizes, as people write them
    idle_cores     how many cores other programs leave idle
    payload_paths  what carries the payloads of a measurement: a Connection, or plain TCP beside it
    perf_protocol  what the client and the server of a measurement say to each other, and how they verify data
    measuring      measuring for a number of seconds or messages, with a progress bar
    local_pair     a client and a server as processes of this machine
    perf           the command perf: server, client, results
    report         the command report: asks another process for its report
    mesh           the command mesh: starts the ranks of a mesh on this machine
    here           the commands and their exit status

It may import everything but ``testing``. Results go to stdout, everything else to stderr. The exit status is 0, 1 after
an error, 2 for wrong arguments, 130 after Ctrl-C.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from pathlib import Path

from .._version import __version__
from . import info, mesh, perf, report
from .check import command as check
from .errors import AlreadyReported, describe, is_expected, leaves


def make_parser() -> argparse.ArgumentParser:
    called = "trio-ucx" if Path(sys.argv[0]).name == "trio-ucx" else "python -m trio_ucx"
    parser = argparse.ArgumentParser(prog=called, description="Networking over UCX, for Trio.")
    parser.add_argument("--version", action="version", version=f"trio_ucx {__version__}")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    info.add_command(commands)
    check.add_command(commands)
    perf.add_command(commands)
    report.add_command(commands)
    mesh.add_command(commands)
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Runs a command; returns the exit status."""
    arguments = make_parser().parse_args(argv)
    try:
        status: int = arguments.run(arguments)
        sys.stdout.flush()
        return status
    except BaseException as error:
        parts = list(leaves(error))
        if any(isinstance(part, KeyboardInterrupt) for part in parts):
            return 130
        if any(isinstance(part, BrokenPipeError) for part in parts):  # whoever read our output has gone
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # for the interpreter's last flush
            return 1
        if all(isinstance(part, AlreadyReported) for part in parts):
            return 1
        if not is_expected(error):
            raise
        print(f"{arguments.prog}: {describe(error)}", file=sys.stderr)
        return 1


def keep_stdout_for_results() -> None:
    """Sends to stderr what UCX prints: otherwise its warnings would be mixed with the JSON on stdout."""
    sys.stdout.flush()
    sys.stdout = os.fdopen(os.dup(1), "w", encoding=sys.stdout.encoding, closefd=False)
    os.dup2(2, 1)
