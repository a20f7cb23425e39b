"""What trio_ucx's own defaults for UCX's options gain: ``python benchmarks/defaults.py``; see ``--help``."""

from __future__ import annotations

import argparse
import json
import secrets
import sys
from collections.abc import Sequence
from pathlib import Path

if not __package__:  # run as a file: its folder must not hide other modules
    sys.path[0] = str(Path(__file__).resolve().parent.parent)

import trio

from benchmarks.pairs import two_cpus
from trio_ucx import connect
from trio_ucx._cli import quiet
from trio_ucx._cli.ends import Client, Kind
from trio_ucx._cli.errors import CandidateError
from trio_ucx._cli.measuring import chosen_worker, progress_bar
from trio_ucx._cli.options import OPTIONS, Option
from trio_ucx._cli.pair import open_server
from trio_ucx._cli.report import EXPLANATION, paragraph, trial_json, trial_text
from trio_ucx._cli.trials import Candidate, Trial
from trio_ucx._cli.tune import figures_of, trial_of
from trio_ucx.ucp._quirks.default_options import DEFAULT_OPTIONS

#: Over TCP, and as UCX chooses: shared memory, inside a machine.
TRANSPORTS = ("tcp", "all")
SECONDS = 0.2


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="defaults.py",
        description="Compares trio_ucx's defaults for UCX's options with UCX's own, each alone and all together, "
        "between two processes of this machine. Between two machines: `python -m trio_ucx perf HOST:PORT --tune`.",
    )
    add = parser.add_argument
    add("--transports", default=" ".join(TRANSPORTS), help=f"one or more TLS of UCX ('{' '.join(TRANSPORTS)}')")
    add("--seconds", type=float, default=SECONDS, help=f"for each figure in each round ({SECONDS})")
    add("--json", type=Path, metavar="FILE", help="writes everything that was measured")
    return parser.parse_args(arguments)


def trials(options: Sequence[Option]) -> list[Trial]:
    """Our value and UCX's of each option, then of all."""
    alone = [trial_of(option, (option.default, str(option.of_ucx))) for option in options]
    together = Trial(
        "All of them",
        figures_of(options),
        [
            Candidate("trio_ucx's", [(option.name, option.default) for option in options]),
            Candidate("UCX's", [(option.name, str(option.of_ucx)) for option in options]),
        ],
    )
    return [*alone, together]


async def measure(transports: str, seconds: float) -> list[Trial]:
    done = []
    authkey = secrets.token_hex(16)
    async with (
        open_server(transports, authkey) as address,
        chosen_worker(transports) as worker,
        connect(address, worker=worker, authkey=authkey.encode()) as connection,
    ):
        client = Client(connection, authkey.encode())
        await client.introduce()
        await client.run_next(Kind.LATENCY, 8, 1)  # only after a message UCX knows which lanes it uses
        lanes = connection.endpoint.transports
        print(f"\nTLS={transports}: {', '.join(dict.fromkeys(lane.name for lane in lanes))}\n")
        for trial in trials([one for one in OPTIONS.values() if one.of_ucx is not None and not one.unfit(lanes)]):
            try:
                with progress_bar(trial.title) as advance:
                    await trial.run(client, seconds, advance)
            except CandidateError as error:
                print(f"{trial.title}\n  not measured: {error}\n")
                continue
            print(trial_text(trial), flush=True)
            done.append(trial)
    return done


def main(given: Sequence[str] | None = None) -> int:
    arguments = parse(given)
    busy = quiet.others_percent(two_cpus())
    print(paragraph(EXPLANATION))
    found = {one: trio.run(measure, one, arguments.seconds) for one in arguments.transports.split()}
    others = [name for name in DEFAULT_OPTIONS if name not in OPTIONS]
    print(paragraph(f"Not about speed, see trio_ucx/ucp/_context.py: {', '.join(others)}."))
    if warning := quiet.warning(busy):
        print(warning, file=sys.stderr)
    if arguments.json:
        report = {transports: [trial_json(trial) for trial in done] for transports, done in found.items()}
        arguments.json.write_text(json.dumps(report, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
