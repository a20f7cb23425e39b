"""Load over all capabilities, with processes killed and stopped: ``python tests/faults/soak.py --minutes 60``.

Each process logs what it did. Afterwards a checker reads the logs for violations of what the library promises, and
this program prints its figures, and ends with status 1 if there is any. ``--break KIND`` breaks the library on purpose
in the soak's processes: the checker must notice it.
"""

from __future__ import annotations

import argparse
import random
import sys
import tempfile
from pathlib import Path

if not __package__:  # run as a file: its folder must not hide anybody's modules
    sys.path[0] = str(Path(__file__).resolve().parent.parent)

import trio
from rich.console import Console

from faults.load import broken, checker, injector, log, summary

TRANSPORTS = ("tcp", "tcp,sm,self")


def soak(plan: injector.Plan) -> tuple[list[checker.Violation], checker.Figures]:
    """Runs one soak and checks its logs."""
    trio.run(injector.run, plan)
    return checker.check(log.read(plan.folder))


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=2, help="for all transports together; default 2")
    parser.add_argument("--seed", type=int, help="chooses loads and faults as a soak with this seed did")
    parser.add_argument("--transports", choices=TRANSPORTS, help="UCX_TLS; by default both, one after the other")
    parser.add_argument("--clients", type=int, default=3, help="client processes, of two connections each; default 3")
    parser.add_argument("--log", type=Path, metavar="DIR", help="keep the logs here")
    parser.add_argument("--pause", type=float, default=2, help="seconds between two faults, on average; default 2")
    parser.add_argument("--without-faults", action="store_true", help="kill and stop nobody")
    parser.add_argument("--break", choices=list(broken.KINDS), dest="broken", help="break the library on purpose")
    return parser.parse_args(arguments)


def main() -> None:
    options = parse()
    console = Console(width=None if sys.stdout.isatty() else 120)
    seed = options.seed if options.seed is not None else random.SystemRandom().randrange(10**6)
    console.print(f"--seed {seed}")
    transports = [options.transports] if options.transports else list(TRANSPORTS)
    failed = False
    with tempfile.TemporaryDirectory() as temporary:
        for one in transports:
            plan = injector.Plan(
                folder=(options.log or Path(temporary)) / one.replace(",", "-"),
                seconds=options.minutes * 60 / len(transports),
                seed=seed,
                transports=one,
                clients=options.clients,
                faults=not options.without_faults,
                broken=options.broken,
                pause=options.pause,
            )
            if plan.folder.exists() and any(plan.folder.iterdir()):
                sys.exit(f"{plan.folder} has files already: choose another --log")
            violations, figures = soak(plan)
            title = f"{one}, {plan.seconds:.0f} seconds, {'faults' if plan.faults else 'no faults'}, seed {seed}"
            summary.show(console, title, figures, violations)
            failed = failed or bool(violations)
    sys.exit(1 if failed else 0)


if __name__ == "__main__":
    main()
