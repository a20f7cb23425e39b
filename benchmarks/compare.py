"""Compares trio_ucx with other libraries: ``python benchmarks/compare.py``; ``--help`` says more."""

from __future__ import annotations

import argparse
import fnmatch
import json
import re
import signal
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

if not __package__:  # run as a file: its folder must not hide other modules
    sys.path[0] = str(Path(__file__).resolve().parent.parent)

from benchmarks import busy_cores, marks, report, runner
from benchmarks.contenders import Contender, all_contenders, ours_many
from benchmarks.jobs import BY_SIZE
from benchmarks.pairs import two_cpus

ROUNDS, SECONDS = 5, 1.0
QUICK_ROUNDS, QUICK_SECONDS = 2, 0.2


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="compare.py",
        description="Measures trio_ucx and others that do the same, interleaved and in several rounds, in two "
        "processes, each on a core of its own. Prints tables, and what trio_ucx has to reach.",
    )
    add = parser.add_argument
    add("--rounds", type=int, help=f"how often each contender runs ({ROUNDS})")
    add("--seconds", type=float, help=f"for each figure in each round ({SECONDS})")
    add("--quick", action="store_true", help=f"{QUICK_ROUNDS} rounds of {QUICK_SECONDS} s: a rough look")
    add("--only", action="append", metavar="PATTERN", help="contenders by name, as in 'trio*tcp'; can be repeated")
    add("--figures", action="append", metavar="PATTERN", help="figures by name, as in 'latency/8' or 'rate*'")
    add("--transports", help="of tcp, shm, unix, as in 'tcp,shm'")
    add("--sizes", action="store_true", help="also the latency of every size from 1 KiB to 64 MiB")
    add("--scale", action="store_true", help="also 1 and 1,000 connections, see scale.py")
    add("--json", type=Path, metavar="FILE", help="writes everything that was measured")
    add("--plots", type=Path, metavar="DIR", help="draws the pictures of the docs (needs matplotlib)")
    add("--python", action="append", default=[], metavar="MODULE=PATH",
        help="the interpreter of a contender with an environment of its own, as in ucxx_polling=PATH")  # fmt: skip
    add("--against", type=checkout, metavar="DIR",
        help="another checkout of trio_ucx, built in place: measured, too, and the ratios printed")  # fmt: skip
    add("--list", action="store_true", help="lists contenders and figures, and ends")
    return parser.parse_args(arguments)


def checkout(text: str) -> Path:
    path = Path(text).resolve()
    if not list(path.glob("trio_ucx/_native/_ucx*.so")):
        raise argparse.ArgumentTypeError(f"{text} is no checkout in which trio_ucx was built with `pip install -e .`")
    return path


def matcher(patterns: Sequence[str] | None) -> Callable[[str], bool]:
    """Whether a name matches one of the patterns, at its beginning or all of it; without patterns all do."""
    if not patterns:
        return lambda name: True
    compiled = [re.compile(fnmatch.translate(pattern + "*")) for pattern in patterns]
    return lambda name: any(one.match(name) for one in compiled)


def choose(arguments: argparse.Namespace) -> tuple[list[Contender], list[Contender]]:
    """The contenders to run, and those that are not installed."""
    named = matcher(arguments.only)
    transports = set(arguments.transports.split(",")) if arguments.transports else {"tcp", "shm", "unix"}
    asked = [one for one in all_contenders() if named(one.name) and one.transport in transports]
    elsewhere = {entry.partition("=")[0] for entry in arguments.python}
    there = [one for one in asked if one.installed or one.module in elsewhere]
    return there, [one for one in asked if one not in there]


def main(given: Sequence[str] | None = None) -> int:
    arguments = parse(given)
    rounds = arguments.rounds or (QUICK_ROUNDS if arguments.quick else ROUNDS)
    seconds = arguments.seconds or (QUICK_SECONDS if arguments.quick else SECONDS)
    contenders, missing = choose(arguments)
    if arguments.scale:
        contenders += ours_many.contenders((1, 1000), ("tcp", "shm"))
    if arguments.against:
        contenders = [each for one in contenders for each in one.beside(arguments.against)]
    figures = matcher(arguments.figures)
    if arguments.list:
        for one in contenders:
            print(f"{one.name}: {', '.join(job.key for job in one.jobs)}")
        return 0
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that our processes are ended
    plan = runner.Plan(
        contenders,
        rounds,
        seconds,
        two_cpus(),
        dict(entry.split("=", 1) for entry in arguments.python),
        lambda job: figures(job.key) and (arguments.sizes or job not in BY_SIZE),
    )
    if None in plan.cpus:
        print("There is only one core: both processes share it, and nothing here says much.", file=sys.stderr)
    busy = busy_cores.others_percent(plan.cpus)
    with report.progress(rounds * sum(len(plan.jobs(one)) for one in contenders)) as advance:
        rows = runner.run(plan, advance)
    measured = {key: row.figures for key, row in rows.items()}
    verdicts = marks.verdicts(measured)
    report.show(rows, verdicts, missing, report.console())
    if arguments.against:
        report.console().print(report.against_table(rows))
    busy_cores.warn(busy)
    settings = {"rounds": rounds, "seconds": seconds, "others_percent": busy}
    found = report.as_json(rows, verdicts, missing, settings)
    if arguments.json:
        arguments.json.write_text(json.dumps(found, indent=1) + "\n")
    if arguments.plots:
        from benchmarks import plots

        for path in plots.draw(found["results"], arguments.plots):
            print(f"drew {path.name}")
    return 0 if all(row.rounds or is_known(row.errors) for row in rows.values()) else 1


def is_known(errors: Sequence[str]) -> bool:
    """Whether a figure is missing for a reason that needs nobody's attention."""
    return all("not supported by this trio_ucx" in error for error in errors)


if __name__ == "__main__":
    sys.exit(main())
