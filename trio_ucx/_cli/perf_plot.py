"""The plot of ``perf``, by matplotlib."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from .perf_results import Result
from .sizes import format_size


def new_figure(file: Path) -> Any:
    """Returns an empty figure, which can be saved under that name.

    Raises:
        ValueError: it cannot; the text says what to do.
    """
    if file.is_dir():
        raise ValueError(f"{file} is a folder")
    if not file.parent.is_dir():
        raise ValueError(f"there is no folder {file.parent}")
    if not os.access(file if file.exists() else file.parent, os.W_OK):
        raise ValueError(f"this user may not write {file}")
    try:
        from matplotlib.figure import Figure
    except ImportError:
        raise ValueError("it needs matplotlib: pip install 'trio_ucx[plot]'") from None
    figure = Figure(figsize=(11, 4.5), layout="constrained")
    kinds = sorted(figure.canvas.get_supported_filetypes())
    if file.suffix[1:].lower() not in kinds:
        raise ValueError(f"the name must end with one of {', '.join(f'.{kind}' for kind in kinds)}: {file}")
    return figure


def save(figure: Any, results: Sequence[Result], title: str, file: Path) -> None:
    """Draws latency and bandwidth by size, a line for each operation and path."""
    latency, bandwidth = figure.subplots(1, 2)
    figure.suptitle(title)
    for axes, label in ((latency, "latency (median), us"), (bandwidth, "bandwidth, MB/s")):
        axes.set(xlabel="bytes", ylabel=label, xscale="log", yscale="log")
        sizes = sorted({result.size for result in results})
        axes.set_xticks(sizes, [format_size(size) for size in sizes])
        axes.minorticks_off()
        axes.grid(alpha=0.3)
    for number, operation in enumerate(dict.fromkeys(result.operation for result in results)):
        ours = sorted((one for one in results if one.operation == operation), key=lambda one: one.size)
        plain = [one.plain_tcp for one in ours if one.plain_tcp is not None]
        for name, rows, style in ((operation, ours, "o-"), (f"{operation}, plain TCP", plain, "o--")):
            sizes = [row.size for row in rows]
            how = {"label": name, "color": f"C{number}", "markersize": 4}
            latency.plot(sizes, [row.latency_median_us for row in rows], style, **how)
            bandwidth.plot(sizes, [row.bandwidth_mb_s + row.back_mb_s for row in rows], style, **how)
    latency.legend()
    figure.savefig(file)
