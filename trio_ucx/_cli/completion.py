"""``trio-ucx completion``: completes commands and options in a shell."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import Any

from .errors import MissingPackage

#: The shells for which shtab writes scripts.
SHELLS = ("bash", "zsh", "fish", "tcsh")


def add_command(commands: Any, make_parser: Callable[[], argparse.ArgumentParser]) -> None:
    """Adds the command.

    Args:
        make_parser: makes the parser to complete for.
    """
    parser = commands.add_parser(
        "completion",
        help="print a script that completes commands and options in a shell",
        description="Prints a script that completes the arguments of trio-ucx in a shell. For bash: "
        'eval "$(trio-ucx completion bash)" in ~/.bashrc. Needs the extra cli.',
    )
    parser.add_argument("shell", choices=SHELLS, metavar="SHELL", help=", ".join(SHELLS))

    def run(arguments: argparse.Namespace) -> int:
        try:
            import shtab
        except ImportError:
            raise MissingPackage("this needs shtab: pip install 'trio_ucx[cli]'") from None
        print(shtab.complete(make_parser(), arguments.shell))
        return 0

    parser.set_defaults(run=run, prog=parser.prog)
