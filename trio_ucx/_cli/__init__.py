"""The command line, ``python -m trio_ucx`` or ``trio-ucx``.

    errors         errors that are not bugs
    info           the command info: what UCX offers on this machine, and the configuration in force
    privileges     what the kernel lets this process do and use
    check          the command check: what a machine can check of this machine, and of the way to another host
    credentials    the key of --listen and of its clients
    addresses      addresses on the command line
    sizes          message sizes, as people write them
    idle_cores     how many cores other programs leave idle
    listener_log   what a listener prints about its clients
    rounds         the payloads of a measurement, and how they are verified
    payload_paths  what carries the payloads of a measurement: Connections, or plain TCP beside them
    perf_protocol  what the client and the server of a measurement say to each other
    measuring      measuring for a number of seconds or messages, with a progress bar
    local_pair     a client and a server as processes of this machine
    perf_results   what perf prints
    perf_plot      what perf draws
    perf           the command perf: server and client
    report         the command report: asks another process for its report
    mesh           the command mesh: starts the ranks of a mesh on this machine
    completion     the command completion: a script for the shell
    here           the commands and their exit status

It may import everything but ``testing``. Results go to stdout, everything else to stderr. The exit status is 0, 1 after
an error, 2 for wrong arguments, 130 after Ctrl-C.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import NoReturn

from .._util.text import printable
from .._version import __version__
from . import completion, info, mesh, perf, report
from .check import command as check
from .errors import AlreadyReported, describe, is_expected, leaves


class Parser(argparse.ArgumentParser):
    """Says in one line what is wrong with the arguments."""

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: error: {printable(message)}; see {self.prog} --help\n")


def program() -> str:
    """Returns how this command was called."""
    return "trio-ucx" if Path(sys.argv[0]).name == "trio-ucx" else "python -m trio_ucx"


def make_parser(prog: str) -> argparse.ArgumentParser:
    parser = Parser(prog=prog, description="Networking over UCX, for Trio.")
    parser.add_argument("--version", action="version", version=f"trio_ucx {__version__}")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    info.add_command(commands)
    check.add_command(commands)
    perf.add_command(commands)
    report.add_command(commands)
    mesh.add_command(commands)
    completion.add_command(commands, partial(make_parser, "trio-ucx"))
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Runs a command; returns the exit status."""
    prog = program()
    try:
        arguments, unknown = make_parser(prog).parse_known_args(argv)
        prog = arguments.prog
        if unknown:
            Parser(prog=prog).error(f"unknown arguments: {' '.join(unknown)}")
        status: int = arguments.run(arguments)
        sys.stdout.flush()
        return status
    except BaseException as error:
        parts = list(leaves(error))
        lost = lose_output()
        if any(isinstance(part, KeyboardInterrupt) for part in parts):
            return 130
        if any(isinstance(part, BrokenPipeError) for part in (*parts, lost)):  # whoever read our output has gone
            return 1
        if all(isinstance(part, AlreadyReported) for part in parts):
            return 1
        if lost is not None and (is_expected(error) or isinstance(error, SystemExit)):
            print(f"{prog}: the output cannot be written: {describe(lost)}", file=sys.stderr)
            return 1
        if not is_expected(error):
            raise
        print(f"{prog}: {describe(error)}", file=sys.stderr)
        return 1


def lose_output() -> OSError | None:
    """Writes what stdout still holds. If that fails, returns why, and spares the interpreter's last flush the same."""
    try:
        sys.stdout.flush()
    except OSError as error:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return error
    return None


def keep_stdout_for_results() -> None:
    """Sends to stderr what UCX prints: otherwise its warnings would be mixed with the JSON on stdout.

    What the encoding of stdout lacks is written with backslashes. Standard streams that are closed become /dev/null.
    """
    while (null := os.open(os.devnull, os.O_RDWR)) <= 2:  # the lowest that is free
        os.set_inheritable(null, True)
    os.close(null)
    sys.stderr = sys.stderr or os.fdopen(2, "w", closefd=False)
    encoding = None
    if sys.stdout is not None:
        sys.stdout.flush()
        encoding = sys.stdout.encoding
    sys.stdout = os.fdopen(os.dup(1), "w", encoding=encoding, errors="backslashreplace", closefd=False)
    os.dup2(2, 1)
