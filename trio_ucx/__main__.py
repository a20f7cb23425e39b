"""``python -m trio_ucx``: see ``python -m trio_ucx --help``."""

import sys

from ._cli import keep_stdout_for_results, main

if __name__ == "__main__":
    keep_stdout_for_results()
    sys.exit(main())
