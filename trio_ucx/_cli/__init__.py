"""The command line, ``python -m trio_ucx``.

    errors      what goes wrong without being a bug
    info        what UCX offers on this machine, and the configuration in force
    sizes       message sizes, as people write them
    exchange    the two ends of a measurement: what they say to each other, and what they check
    measuring   what every way of measuring shares
    perf        the measurements: server, client, results
    options     the options of UCX that --tune tries, and their values
    verdict     whether a value is clearly faster than the default
    trials      values measured beside each other
    tune        the client that does that, and what it proposes
    report      how it is told
    pair        both ends as processes of this machine
    here        the commands, and how they end

Results go to stdout, everything else to stderr. The exit status is 0, 1 after an error, 2 for wrong arguments, 130
after Ctrl-C.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence

from .._version import __version__
from . import info, perf
from .errors import describe, is_expected, leaves


def make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m trio_ucx", description="Networking over UCX, for Trio.")
    parser.add_argument("--version", action="version", version=f"trio_ucx {__version__}")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    info.add_command(commands)
    perf.add_command(commands)
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
        if any(isinstance(part, BrokenPipeError) for part in parts):  # nobody reads our output any more
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # for the interpreter's last flush
            return 1
        if not is_expected(error):
            raise
        print(f"{arguments.prog}: {describe(error)}", file=sys.stderr)
        return 1


def keep_stdout_for_results() -> None:
    """Sends to stderr what UCX prints: its warnings would otherwise land amid the JSON on stdout."""
    sys.stdout.flush()
    sys.stdout = os.fdopen(os.dup(1), "w", encoding=sys.stdout.encoding, closefd=False)
    os.dup2(2, 1)
