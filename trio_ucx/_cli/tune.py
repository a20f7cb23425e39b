"""``python -m trio_ucx perf --tune``: finds values of UCX's options that make messages faster on this machine.

Option by option, each value is compared with trio_ucx's default (:mod:`.trials`). Values that are clearly faster
(:mod:`.verdict`) are measured again, alone and together, before they are proposed.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterable, Sequence

from .. import connect
from .._native import ucx
from ..ucp._address import format_address
from ..ucp._quirks.releases import WELL_CONFIGURABLE
from .ends import TUNING, Client, Kind
from .errors import CandidateError, PerfError
from .measuring import chosen_worker, progress_bar
from .options import OPTIONS, Choice, Figure, Option
from .report import Findings, as_json, closing_text, header_text, trial_text
from .trials import Candidate, Trial
from .verdict import Comparison, best, confirm

#: Seconds for each figure in each round, by default.
SECONDS = 0.2


def tunable() -> list[str]:
    """The options that have more than one value to choose from."""
    return [option.name for option in OPTIONS.values() if len(option.values) > 1]


def parse_options(text: str) -> list[str]:
    names = [part.strip().upper().removeprefix("UCX_") for part in text.split(",")]
    for name in names:
        if name not in tunable():
            raise argparse.ArgumentTypeError(f"{name!r} is not among the options that it tries: {', '.join(tunable())}")
    return names


async def run_tune(arguments: argparse.Namespace) -> int:
    if ucx.version < WELL_CONFIGURABLE:
        wanted = ".".join(map(str, WELL_CONFIGURABLE))
        raise PerfError(
            f"--tune needs UCX {wanted} or newer: an older one takes TCP's options from the environment only"
        )
    async with (
        chosen_worker(arguments.transports) as worker,
        connect(arguments.address, worker=worker, authkey=arguments.authkey) as connection,
    ):
        client = Client(connection, arguments.authkey)
        server = await client.introduce()
        if server["tune"] != TUNING:
            raise PerfError(
                f"the other side is trio_ucx {server['trio_ucx']}, whose perf does not know this --tune: install the "
                "same trio_ucx on both sides"
            )
        await client.run_next(Kind.LATENCY, 8, 1)  # only after a message UCX knows which lanes it uses
        findings = Findings(
            {"address": format_address(arguments.address), "trio_ucx": server["trio_ucx"], "ucx": server["ucx"]},
            list(connection.endpoint.transports),
            arguments.seconds or SECONDS,
        )
        await tune(client, findings, arguments.options or tunable(), quiet=arguments.json)
    if arguments.json:
        print(json.dumps(as_json(findings), indent=2))
    return 0


async def tune(client: Client, findings: Findings, names: Sequence[str], *, quiet: bool) -> None:
    """Compares the values of these options, and records the results; prints them unless ``quiet``."""

    def say(text: str) -> None:
        if not quiet:
            print(text, flush=True)

    async def run(trial: Trial) -> None:
        with progress_bar(trial.title) as advance:
            await trial.run(client, findings.seconds, advance)
        findings.trials.append(trial)
        say(trial_text(trial))

    findings.left_out = {name: why for name in names if (why := OPTIONS[name].unfit(findings.lanes))}
    trials = {name: trial_of(OPTIONS[name], OPTIONS[name].values) for name in names if name not in findings.left_out}
    say(header_text(findings, sum(trial.expected_seconds(findings.seconds) for trial in trials.values())))
    faster: dict[Choice, Comparison] = {}
    for name, trial in trials.items():
        try:
            await run(trial)
        except CandidateError as error:
            findings.left_out[name] = str(error)
            continue
        comparisons = {candidate.choices[0]: comparison for candidate, comparison in trial.comparisons()}
        choice = best(comparisons.items())
        if choice is not None:
            faster[choice] = comparisons[choice]
    if faster:
        findings.faster = list(faster)
        findings.again = trial_of_faster(findings.faster)
        await run(findings.again)
        findings.proposed = confirm(
            (
                changed(candidate),
                frozenset().union(*(faster[choice].better for choice in changed(candidate))),
                comparison,
            )
            for candidate, comparison in findings.again.comparisons()
        )
    say(closing_text(findings))


def trial_of(option: Option, values: Iterable[str]) -> Trial:
    """Compares values of an option."""
    return Trial(
        f"{option.name}: {option.about}",
        option.figures,
        [Candidate(value, [(option.name, value)]) for value in values],
    )


def figures_of(options: Iterable[Option]) -> list[Figure]:
    """Returns the figures of all these options, each once."""
    return list(dict.fromkeys(figure for option in options for figure in option.figures))


def trial_of_faster(faster: Sequence[Choice]) -> Trial:
    """Compares the values that were faster once more: each alone, and all together."""
    sets = [[choice] for choice in faster]
    if len(faster) > 1:
        sets.append(list(faster))
    defaults = {name: OPTIONS[name].default for name, _ in faster}
    return Trial(
        "What was faster, measured again",
        figures_of(OPTIONS[name] for name, _ in faster),
        [
            Candidate("unchanged", list(defaults.items())),
            *(
                Candidate(
                    " ".join(f"{name}={value}" for name, value in chosen), list({**defaults, **dict(chosen)}.items())
                )
                for chosen in sets
            ),
        ],
    )


def changed(candidate: Candidate) -> tuple[Choice, ...]:
    """Returns its values that are not trio_ucx's defaults."""
    return tuple((name, value) for name, value in candidate.choices if value != OPTIONS[name].default)
