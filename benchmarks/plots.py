"""The pictures for the docs, from the JSON of a run."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from .jobs import KIB, MIB
from .marks import SIZES

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
        if (one["kind"], one["size"]) == (kind, size) and figure in one["medians"] and LOCAL[one["transport"]] == place
    ]


def draw(results: Sequence[Result], folder: Path) -> list[Path]:
    """Draws what was measured. Returns the files that it wrote."""
    folder.mkdir(parents=True, exist_ok=True)
    drawn = [
        _bars(results, folder / f"latency-{size}.svg", "latency", size, "median_us", 1, "microseconds, less is better")
        for size in (8, KIB, 64 * KIB)
    ]
    drawn += [
        _bars(results, folder / f"bandwidth-{size}.svg", "bandwidth", size, "bytes_s", 1e-9, "GB/s, more is better")
        for size in (MIB, 16 * MIB)
    ]
    drawn.append(
        _bars(
            results, folder / "rate-8.svg", "rate", 8, "messages_s", 1e-3, "thousand messages a second, more is better"
        )
    )
    return [path for path in drawn if path is not None]


TITLES = {
    "latency": "Half a round trip of {}",
    "bandwidth": "Messages of {}, one way",
    "rate": "Messages of {}, one way",
}


def _bars(
    results: Sequence[Result], path: Path, kind: str, size: int, figure: str, scale: float, unit: str
) -> Path | None:
    import matplotlib

    matplotlib.use("svg")
    matplotlib.rcParams["svg.hashsalt"] = "trio_ucx"  # equal data, equal file
    from matplotlib import pyplot

    places = [(place, found) for place in ("TCP", "inside the machine")
              if (found := chosen(results, kind, size, figure, place))]  # fmt: skip
    if not places:
        return None
    rows = max(len(found) for _, found in places)
    made, axes = pyplot.subplots(1, len(places), figsize=(6 * len(places), 1.2 + 0.3 * rows), squeeze=False)
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
    made.suptitle(TITLES[kind].format(SIZES[size]), x=0.02, ha="left", fontweight="bold")
    made.tight_layout()
    made.savefig(path, metadata={"Date": None})
    pyplot.close(made)
    return path
