"""``python -m trio_ucx``, or ``trio-ucx``: see ``python -m trio_ucx --help``."""

import sys

from ._cli import keep_stdout_for_results, main


def run() -> int:
    """Runs the command line of this process; returns the exit status."""
    keep_stdout_for_results()
    return main()


if __name__ == "__main__":
    sys.exit(run())
