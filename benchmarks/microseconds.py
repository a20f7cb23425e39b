"""Where every microsecond of a message goes: ``python benchmarks/microseconds.py``; ``--help`` says more."""

from __future__ import annotations

import argparse
import dataclasses
import json
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

if not __package__:  # run as a file: its folder must not hide other modules
    sys.path[0] = str(Path(__file__).resolve().parent.parent)

from rich.table import Table

from benchmarks import busy_cores, report, runner, steps
from benchmarks.contenders import Contender, ours, perftest
from benchmarks.jobs import MIB, Job, latency
from benchmarks.pairs import ROOT, two_cpus
from benchmarks.stats import of_rounds, scaled

ROUNDS, SECONDS = 3, 0.25
QUICK_ROUNDS, QUICK_SECONDS = 1, 0.1
(EIGHT,) = latency(8)
YIELD = {"yield_interval": 100e-6}
WORKERS: dict[str, dict[str, float]] = {"yield_interval=100e-6": YIELD, "default": {}, "spin=0": {"spin": 0.0}}
#: Each offers more than the one before.
LADDER = {
    "C": "UCX alone: ucx_perftest, polling",
    "module": "our C functions, called from Python in a bare loop",
    "ucp": "tag_send, tag_receive: checks, operations, a Trio task; no schedule points (yield_interval)",
    "yield_interval=100e-6": "a Connection: tag queues, credit, send and receive_into; no schedule points",
    "default": "the same with schedule points",
    "spin=0": "the same without polling: the process sleeps, and is woken",
}
BESIDE = {
    "C sleep": "UCX alone, sleeping: ucx_perftest",
    "sockets": "TCP by Python's blocking sockets, sleeping",
    "trio stream": "TCP by trio.SocketStream, sleeping",
}
BEGIN, END = "<!-- figures: microseconds.py --markdown -->", "<!-- end of figures -->"
Found = Mapping[str, Mapping[Job, Mapping[str, float]]]


@dataclass
class Sheet:
    """A table, for the terminal and for the docs."""

    title: str
    columns: Sequence[str]
    rows: list[list[str]]

    def table(self) -> Table:
        made = Table(*self.columns, title=self.title, title_justify="left")
        for row in self.rows:
            made.add_row(*row)
        for column in made.columns[1:]:
            column.justify = "right"
        return made

    def markdown(self) -> str:
        lines = [self.columns, ["---", *["---:"] * (len(self.columns) - 1)], *self.rows]
        return f"**{self.title}**\n\n" + "".join(f"| {' | '.join(line)} |\n" for line in lines)


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="microseconds.py",
        description="Measures what each layer adds to a message of 8 bytes, what the single steps cost, and what "
        "copies and fresh memory cost large messages.",
    )
    add = parser.add_argument
    add("--transports", default="tcp,shm", help="of tcp, shm")
    add("--rounds", type=int, help=f"how often everything runs ({ROUNDS})")
    add("--seconds", type=float, help=f"for each figure in each round ({SECONDS})")
    add("--quick", action="store_true", help=f"{QUICK_ROUNDS} round of {QUICK_SECONDS} s: a rough look")
    add("--json", type=Path, metavar="FILE", help="writes everything that was measured")
    add("--markdown", type=Path, metavar="FILE", help="puts the main tables between the marks in this document")
    return parser.parse_args(arguments)


def contenders(transport: str) -> list[Contender]:
    """Their names begin with a key of LADDER or BESIDE, and end with the transport."""

    def make(key: str, module: str, jobs: tuple[Job, ...] = (EIGHT,), **options: object) -> Contender:
        return Contender(
            f"{key} {transport}", transport, module, jobs, options={"tls": ours.TLS[transport], **options},
            environment=perftest.ucx_environment(transport) if module == "perftest" else {},
        )  # fmt: skip

    sizes = tuple(Job("bandwidth", size, "") for size in steps.SIZES)
    ways = tuple(
        Job("bandwidth", size, way) for size in steps.SIZES for way in ("receive_into", "receive", "byte stream")
    )
    found = [make("C", "perftest", (EIGHT, *sizes), mode="poll"), make("module", "ours_bare")]
    found.append(make("ucp", "ours_raw", worker=YIELD))
    for key, worker in WORKERS.items():
        found.append(make(key, "ours", (EIGHT, *ways) if key == "default" else (EIGHT,), worker=worker))
        found.append(make(f"path {key}", "ours_watched", worker=worker, watch="path"))
    # Only without polling: strace makes everything so slow that polling would not pay, and the counts would differ.
    found.append(make("calls spin=0", "ours_watched", worker=WORKERS["spin=0"], watch="calls"))
    if transport == "tcp":
        found += [make("C sleep", "perftest", mode="sleep"), make("sockets", "plain_sockets")]
        found.append(make("trio stream", "trio_sockets", (EIGHT, *sizes)))
    return found


def ladder(found: Found, transports: Sequence[str]) -> Sheet:
    rows = []
    for key, what in (LADDER | BESIDE).items():
        row = [what]
        for transport in transports:
            value = median(found, key, transport)
            keys = list(LADDER)
            before = median(found, keys[keys.index(key) - 1], transport) if key in keys[1:] else None
            row += [cell(value), cell(value - before, "+") if value and before else ""]
        rows.append(row)
    columns = [title for transport in transports for title in (transport, "more")]
    return Sheet("8 bytes, half a round trip, microseconds", ["what", *columns], rows)


def paths(found: Found, transports: Sequence[str]) -> Sheet:
    """Seen from one process: its part of the way, the rest of it, and what the process does during that."""
    rows = []
    for transport in transports:
        for key in WORKERS:
            figures = found[f"path {key} {transport}"].get(EIGHT, {})
            if "post_us" not in figures:
                continue
            half, asleep = figures["median_us"], key == "spin=0"
            deliver, post, send, event = (figures[f"{name}_us"] for name in ("deliver", "post", "send", "event"))
            way = [event if asleep else None, deliver, post, send]
            rest = half - sum(filter(None, way))
            meanwhile = [None if asleep else figures[f"{name}_us"] for name in ("return", "begin", "look")]
            rows.append([f"{transport}, {key}", *map(cell, [*way, rest, half, *meanwhile])])
    columns = [
        "event to record",
        "record to receive's end",
        "send, Python",
        "send, C",
        "rest of the way",
        "half a round trip",
    ]
    columns += ["meanwhile: send returns", "receive begins", "looks"]
    return Sheet("A Connection's message of 8 bytes, watched, microseconds", ["", *columns], rows)


def calls(found: Found, transports: Sequence[str]) -> Sheet:
    rows = []
    for transport in transports:
        for key in WORKERS:
            figures = found.get(f"calls {key} {transport}", {}).get(EIGHT, {})
            made = {name.removeprefix("calls "): many for name, many in figures.items() if name.startswith("calls ")}
            often = sorted(((many, name) for name, many in made.items() if many > 0.05), reverse=True)
            if made:
                rows.append([f"{transport}, {key}", ", ".join(f"{many:.1f} {name}" for many, name in often) or "none"])
    return Sheet("System calls for one message sent and one received", ["", "calls"], rows)


def prices(found: Mapping[str, float], transports: Sequence[str]) -> list[Sheet]:
    steps_of = {name.partition(": ")[2]: None for name in found if name.startswith(f"{transports[0]}: ")}
    each = [[step, *(f"{found[f'{transport}: {step}']:,.0f}" for transport in transports)] for step in steps_of]
    prefixes = tuple(f"{transport}: " for transport in transports)
    common = [
        [name, f"{value:,.0f}"] for name, value in found.items() if "MiB" not in name and not name.startswith(prefixes)
    ]
    return [
        Sheet("Single steps, nanoseconds", ["step", "ns"], common),
        Sheet("Single steps over each transport, nanoseconds", ["step", *transports], each),
    ]


def sums(found: Found, costs: Mapping[str, float], transports: Sequence[str]) -> Sheet:
    """Whether the single steps add up to what was measured between two processes, where some of them overlap."""
    rows = []
    for transport in transports:
        parts = {name: costs[f"{transport}: {name}"] / 1000 for name in steps.PASSES}
        measured = median(found, "yield_interval=100e-6", transport)
        if measured is not None:
            total = sum(parts.values())
            rows.append(
                [transport, *map(cell, parts.values()), cell(total), cell(measured), cell(measured - total, "+")]
            )
    columns = [*steps.PASSES, "together", "measured, yield_interval", "difference"]
    return Sheet("The steps of a message, microseconds", ["", *columns], rows)


def large(found: Found, costs: Mapping[str, float], transports: Sequence[str]) -> Sheet:
    rows = []
    sizes = [f"{size // MIB} MiB" for size in steps.SIZES]
    for name in ("memory in use", "new bytes", "the kernel's"):
        row = [f"copied by one processor, to {name}"]
        for size in sizes:
            row += [cell(MIB / costs[f"{size} to {name}"]), f"{costs[f'{size} to {name}: page faults']:.0f}"]
        rows.append(row)
    asked = [
        ("UCX alone", "C", ""),
        *((f"Connection, {way}", "default", way) for way in ("receive_into", "receive", "byte stream")),
    ]
    for transport in transports:
        for what, key, way in [*asked, *([("trio.SocketStream", "trio stream", "")] if transport == "tcp" else [])]:
            row = [f"{transport}: {what}"]
            for nbytes in steps.SIZES:
                row += [cell(found[f"{key} {transport}"][Job("bandwidth", nbytes, way)].get("gb_s")), ""]
            rows.append(row)
    columns = [title for size in sizes for title in (f"{size}: GB/s", "page faults a MiB")]
    return Sheet("Large messages", ["", *columns], rows)


def median(found: Found, key: str, transport: str) -> float | None:
    return found.get(f"{key} {transport}", {}).get(EIGHT, {}).get("median_us")


def cell(value: float | None, sign: str = "") -> str:
    if value is None:
        return ""
    return ("-" if value < 0 else sign) + scaled(abs(value))


def measure_steps(cpu: int | None, seconds: float, transports: Sequence[str]) -> dict[str, float]:
    """In a process of its own."""
    command = [sys.executable, "-m", "benchmarks.steps", str(cpu), str(seconds), *transports]
    ended = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60 + 100 * seconds, check=False)
    if ended.returncode:
        raise RuntimeError(f"benchmarks.steps: {ended.stderr[-300:]}")
    costs: dict[str, float] = json.loads(ended.stdout)
    return costs


def main(given: Sequence[str] | None = None) -> int:
    arguments = parse(given)
    rounds = arguments.rounds or (QUICK_ROUNDS if arguments.quick else ROUNDS)
    seconds = arguments.seconds or (QUICK_SECONDS if arguments.quick else SECONDS)
    transports = arguments.transports.split(",")
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that our processes are ended
    plan = runner.Plan([one for transport in transports for one in contenders(transport)], 1, seconds, two_cpus())
    busy = busy_cores.others_percent(plan.cpus)
    rows: runner.Rows = {}
    costs = []
    with report.progress(rounds * sum(len(one.jobs) for one in plan.contenders)) as advance:
        for number in range(rounds):
            found = runner.run(dataclasses.replace(plan, contenders=runner.in_turn(plan.contenders, number)), advance)
            for key, row in found.items():
                rows.setdefault(key, row)
                if rows[key] is not row:
                    rows[key].rounds += row.rounds
                    rows[key].errors += row.errors
            costs.append(measure_steps(plan.cpus[0], seconds / 5, transports))
    figures: dict[str, dict[Job, Mapping[str, float]]] = {}
    for (name, job), row in rows.items():
        figures.setdefault(name, {})[job] = row.figures
    price = of_rounds(costs)
    documented = [ladder(figures, transports), paths(figures, transports), large(figures, price, transports)]
    steps_alone = [sums(figures, price, transports), *prices(price, transports)]
    to = report.console()
    for sheet in [*documented, *steps_alone, calls(figures, transports)]:
        to.print(sheet.table())
    failed = [row for row in rows.values() if row.errors]
    for row in failed:
        to.print(f"{row.contender}, {row.job.key}: {report.trouble(row)}")
    busy_cores.warn(busy)
    if arguments.json:
        settings = {"rounds": rounds, "seconds": seconds, "others_percent": busy}
        arguments.json.write_text(
            json.dumps(report.as_json(rows, [], [], settings) | {"steps": price}, indent=1) + "\n"
        )
    if arguments.markdown:
        paste(arguments.markdown, documented)
    return 1 if failed else 0


def paste(document: Path, sheets: Sequence[Sheet]) -> None:
    text = document.read_text()
    begin, end = text.index(BEGIN) + len(BEGIN), text.index(END)
    document.write_text(f"{text[:begin]}\n\n{chr(10).join(sheet.markdown() for sheet in sheets)}\n{text[end:]}")


if __name__ == "__main__":
    sys.exit(main())
