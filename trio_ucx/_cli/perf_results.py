"""The results of ``perf``: the figures, their table, CSV, and whether UCX is worth it."""

from __future__ import annotations

import csv
import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, TextIO

import attrs

from .._version import __version__
from .measuring import Measured
from .rounds import PerfOperation
from .sizes import format_size

#: With fewer idle cores for each of the two processes, they wait for a core now and then.
_IDLE = 0.95
#: Differences that are smaller mean nothing.
_ALIKE = 1.1


@attrs.frozen
class Result:
    """What was measured for one operation and size; a megabyte is 10**6 bytes.

    Attributes:
        latency_median_us, latency_p99_us: half of a round trip; of a put or get, the whole, until it is complete.
        bandwidth_mb_s, messages_s: with many in flight, from the client to the server; for gets, to the client.
        back_mb_s: meanwhile from the server to the client; 0 unless both send.
        latency_cpu_us, cpu_us: CPU time of both processes for each message: of those that are sent one by one, and of
            those of which many are in flight.
        latency_messages, stream_messages: how many messages were measured, in each direction.
        plain_tcp: the same over plain TCP, if that could be had.
    """

    operation: str
    size: int
    latency_median_us: float
    latency_p99_us: float
    bandwidth_mb_s: float
    back_mb_s: float
    messages_s: float
    latency_cpu_us: float
    cpu_us: float
    latency_messages: int
    stream_messages: int
    plain_tcp: Result | None = None

    @classmethod
    def of(cls, operation: PerfOperation, size: int, latency: Measured, stream: Measured) -> Result:
        waits = latency.waits if operation.one_sided else latency.half_trips
        rate, back = stream.messages_a_second, stream.messages_back_a_second
        if operation is PerfOperation.GETS:
            back = 0.0
        return cls(
            operation=operation.value,
            size=size,
            latency_median_us=statistics.median(waits),
            latency_p99_us=waits[math.ceil(0.99 * len(waits)) - 1],
            bandwidth_mb_s=rate * size / 1e6,
            back_mb_s=back * size / 1e6,
            messages_s=rate,
            latency_cpu_us=latency.cpu_us / (1 if operation.one_sided else 2),
            cpu_us=stream.cpu_us / (2 if back else 1),
            latency_messages=latency.messages,
            stream_messages=stream.messages,
        )

    @property
    def advantages(self) -> dict[str, float]:
        """The factors by which UCX is better than plain TCP; none if that was not measured."""
        if (plain := self.plain_tcp) is None:
            return {}
        return {
            "latency": plain.latency_median_us / self.latency_median_us,
            "p99": plain.latency_p99_us / self.latency_p99_us,
            "bandwidth": (self.bandwidth_mb_s + self.back_mb_s) / (plain.bandwidth_mb_s + plain.back_mb_s),
            "cpu": plain.cpu_us / self.cpu_us,
        }

    def as_dict(self) -> dict[str, Any]:
        return {**attrs.asdict(self), "advantages": self.advantages}


# ---- the table ----


def header_text(header: Mapping[str, Any]) -> str:
    lanes = ", ".join(dict.fromkeys("/".join(filter(None, one.values())) for one in header["transports"]))
    server, why_not = header["server"], header["without_plain_tcp"]
    lines = [
        f"trio_ucx {__version__}; server {server['address']} (trio_ucx {server['trio_ucx']}, UCX {server['ucx']})",
        f"transports: {lanes}",
        f"plain TCP was not measured: {why_not}" if why_not else "TCP: plain TCP between these processes, with Trio",
        "latency: half of a round trip; of puts and gets the whole; bandwidth and rate: many in flight; MB: 10^6 bytes",
        "CPU: of both processes for each of these many messages; advantage: how many times better UCX is; all data "
        "verified",
    ]
    if header["connections"] > 1 or header["parallel"] > 1 or header["bidirectional"]:
        both = "; both sides send at the same time" if header["bidirectional"] else ""
        lines.append(f"connections: {header['connections']}, with {header['parallel']} tasks each{both}")
    return "\n".join([*lines, *(f"WARNING: {few}: the figures will vary" for few in crowded(header))])


def crowded(header: Mapping[str, Any]) -> list[str]:
    """Says which machine has less than one free core for each process there, if any."""
    here, there = header["idle_cores"], header["server"]["idle_cores"]
    machines = [(here, 2, "for two processes")] if there is None else [(here, 1, "here"), (there, 1, "at the server")]
    return [f"only {idle:.1f} cores are free {where}" for idle, needed, where in machines if idle <= needed * _IDLE]


def titles_text(operation: PerfOperation, both: bool) -> str:
    """Returns the lines above the rows of an operation."""
    titles = ["median us", "p99 us", "MB/s", *(["MB/s back"] if both else []), "messages/s", "CPU us"]
    return f"\n{operation.value}\n{'bytes':>12}" + "".join(f"  {title:>10}" for title in titles)


def row_text(result: Result, both: bool) -> str:
    """A line; with plain TCP, one for that, and one for what UCX's advantage is."""
    size, plain = format_size(result.size), result.plain_tcp
    lines = [_figures(size, result, both)]
    if plain is not None:
        of = result.advantages
        columns = [of["latency"], of["p99"], *[of["bandwidth"]] * (3 if both else 2), of["cpu"]]
        lines.append(_figures(f"{size} TCP", plain, both))
        lines.append(f"{'advantage':>12}" + "".join(f"  {f'{_times(number)} x':>10}" for number in columns))
    return "\n".join(lines)


def _figures(title: str, result: Result, both: bool) -> str:
    speeds = [result.bandwidth_mb_s, *([result.back_mb_s] if both else [])]
    columns = [
        f"{result.latency_median_us:.2f}",
        f"{result.latency_p99_us:.2f}",
        *(f"{speed:.{1 if speed >= 10 else 3}f}" for speed in speeds),
        f"{result.messages_s:,.0f}",
        f"{result.cpu_us:.2f}",
    ]
    return f"{title:>12}" + "".join(f"  {column:>10}" for column in columns)


def write_csv(results: Iterable[Result], out: TextIO) -> None:
    """Writes a row for each operation, size and path."""
    names = [field.name for field in attrs.fields(Result) if field.name != "plain_tcp"]
    writer = csv.DictWriter(out, ["path", *names], extrasaction="ignore", lineterminator="\n")
    writer.writeheader()
    for result in results:
        for path, one in (("ucx", result), ("plain_tcp", result.plain_tcp)):
            if one is not None:
                writer.writerow({"path": path, **attrs.asdict(one, recurse=False)})


# ---- is it worth it? ----


def verdict(results: Sequence[Result], few: Sequence[str]) -> str:
    """Says whether UCX is worth it here, by latency and bandwidth; ``few`` is what :func:`crowded` says."""
    compared = [result for result in results if result.advantages]
    if not compared:
        return "Is UCX worth it here? Unknown: plain TCP was not measured."
    ratios = [result.advantages[name] for result in compared for name in ("latency", "bandwidth")]
    if min(ratios) >= 1 / _ALIKE and max(ratios) > _ALIKE:
        answer = "Yes"
    elif max(ratios) > _ALIKE:
        answer = "Partly"
    else:
        answer = "No"
    parts = []
    for operation in dict.fromkeys(result.operation for result in compared):
        rows = [result for result in compared if result.operation == operation]
        for name in ("latency", "bandwidth"):
            parts.append(f"{operation}, {name}: {_words({row.size: row.advantages[name] for row in rows})}")
    cpu = math.exp(statistics.mean(math.log(result.advantages["cpu"]) for result in compared))
    said = "\n".join(f"  {part}" for part in parts)
    doubt = f"\n  Repeat this when more cores are free: {' and '.join(few)}." if few else ""
    return (
        f"Is UCX worth it here? {answer}. Beside plain TCP:\n{said}\n  CPU for each message: {_share(1 / cpu)}{doubt}"
    )


def _words(ratios: Mapping[int, float]) -> str:
    said = []
    for word, sizes in (
        ("better", [size for size, ratio in ratios.items() if ratio > _ALIKE]),
        ("much the same", [size for size, ratio in ratios.items() if 1 / _ALIKE <= ratio <= _ALIKE]),
        ("worse", [size for size, ratio in ratios.items() if ratio < 1 / _ALIKE]),
    ):
        if sizes:
            numbers = sorted({_times(ratios[size]) for size in sizes}, key=float)
            which = "all sizes" if len(sizes) == len(ratios) else ", ".join(map(format_size, sizes))
            times = "" if word == "much the same" else f" ({' to '.join(dict.fromkeys((numbers[0], numbers[-1])))} x)"
            said.append(f"{word} for {which}{times}")
    return ", ".join(said)


def _share(ratio: float) -> str:
    if 1 / _ALIKE <= ratio <= _ALIKE:
        return "much the same (mean of all rows)"
    return f"{_times(ratio)} x as much (mean of all rows)"


def _times(ratio: float) -> str:
    """Returns a ratio with two digits or more."""
    return f"{ratio:.0f}" if ratio >= 10 else f"{ratio:.1f}" if ratio >= 1 else f"{ratio:.2f}"
