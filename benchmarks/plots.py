"""The pictures for the docs, from the JSON of a run."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from .jobs import BY_SIZE, KIB, MIB, size_name

#: Ours, the other Python libraries, UCX in C.
OURS, OTHERS, NATIVE = "#1f77b4", "#b0b0b0", "#e08a2c"
#: Sockets of the file system stay on the machine, as shared memory does.
LOCAL = {"tcp": "TCP", "shm": "inside the machine", "unix": "inside the machine"}

Result = dict[str, Any]


def colour(result: Result) -> str:
    name = result["contender"]
    return OURS if name.startswith("trio_ucx") else NATIVE if name.startswith("ucx_perftest") else OTHERS


def label(result: Result) -> str:
    name, _, transport = result["contender"].rpartition(" ")
    where = " (unix)" if transport == "unix" else ""
    return f"{name}{where}{', ' + result['way'] if result['way'] else ''}"


def chosen(results: Sequence[Result], kind: str, size: int, figure: str, place: str) -> list[Result]:
    return [
        one
        for one in results
        if (one["kind"], one["size"]) == (kind, size)
        and figure in one["medians"]
        and LOCAL[one["transport"]] == place
        and one["way"] != BY_SIZE[0].way
    ]


def draw(results: Sequence[Result], folder: Path) -> list[Path]:
    """Draws what was measured. Returns the files that it wrote."""
    folder.mkdir(parents=True, exist_ok=True)
    drawn = [
        _bars(results, folder / f"latency-{size}.svg", "latency", size, "median_us", 1, "microseconds, less is better")
        for size in (8, KIB, 64 * KIB)
    ]
    drawn += [
        _bars(results, folder / f"bandwidth-{size}.svg", "bandwidth", size, "gb_s", 1, "GB/s, more is better")
        for size in (MIB, 16 * MIB)
    ]
    drawn.append(
        _bars(
            results, folder / "rate-8.svg", "rate", 8, "messages_s", 1e-3, "thousand messages a second, more is better"
        )
    )
    drawn.append(_lines(results, folder / "latency-by-size.svg"))
    return [path for path in drawn if path is not None]


TITLES = {
    "latency": "Half a round trip of {}",
    "bandwidth": "Messages of {}, one way",
    "rate": "Messages of {}, one way",
}


def _pyplot() -> Any:
    import matplotlib

    matplotlib.use("svg")
    matplotlib.rcParams["svg.hashsalt"] = "trio_ucx"  # equal data, equal file
    from matplotlib import pyplot

    return pyplot


def _save(figure: Any, title: str, path: Path) -> Path:
    figure.suptitle(title, x=0.02, ha="left", fontweight="bold")
    figure.tight_layout()
    figure.savefig(path, metadata={"Date": None})
    _pyplot().close(figure)
    return path


def _lines(results: Sequence[Result], path: Path) -> Path | None:
    """Latency by size: a line for each contender."""
    found: dict[str, list[Result]] = {}
    for one in results:
        if one["way"] == BY_SIZE[0].way and "median_us" in one["medians"]:
            found.setdefault(one["contender"], []).append(one)
    if not found:
        return None
    made, axes = _pyplot().subplots(figsize=(9, 5))
    for name, line in found.items():
        values = [one["medians"]["median_us"] for one in line]
        style = "-" if name.endswith("tcp") else "--"
        axes.plot([one["size"] for one in line], values, style, label=name, color=colour(line[0]))
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    ticks = [job.size for job in BY_SIZE[::2]]
    axes.set_xticks(ticks, [size_name(size) for size in ticks])
    axes.set_ylabel("microseconds, less is better (logarithmic)")
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend()
    return _save(made, "Half a round trip by size", path)


def _bars(
    results: Sequence[Result], path: Path, kind: str, size: int, figure: str, scale: float, unit: str
) -> Path | None:
    places = [(place, found) for place in ("TCP", "inside the machine")
              if (found := chosen(results, kind, size, figure, place))]  # fmt: skip
    if not places:
        return None
    rows = max(len(found) for _, found in places)
    made, axes = _pyplot().subplots(1, len(places), figsize=(6 * len(places), 1.2 + 0.3 * rows), squeeze=False)
    better_first = figure.endswith("_us")
    for axis, (place, found) in zip(axes[0], places, strict=True):
        found = sorted(found, key=lambda one: one["medians"][figure], reverse=not better_first)
        values = [one["medians"][figure] * scale for one in found]
        bars = axis.barh([label(one) for one in found], values, color=[colour(one) for one in found])
        axis.bar_label(bars, [f"{value:.3g}" if value < 1000 else f"{value:,.0f}" for value in values], padding=3)
        axis.invert_yaxis()
        axis.set_title(place, loc="left")
        axis.set_xlabel(unit)
        if max(values) > 50 * min(values):
            axis.set_xscale("log")
            axis.set_xlabel(f"{unit} (logarithmic)")
        axis.margins(x=0.15)
        axis.spines[["top", "right"]].set_visible(False)
    return _save(made, TITLES[kind].format(size_name(size)), path)
