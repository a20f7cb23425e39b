"""The options of UCX about speed whose values in trio_ucx are not UCX's own, and the figures that they may change."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Literal

import attrs

from trio_ucx._cli.sizes import format_size
from trio_ucx.ucp import Transport
from trio_ucx.ucp._quirks.address_layout import SHARED_MEMORY


@attrs.frozen
class Figure:
    """A figure to measure: half of a round trip of ``size`` bytes, messages per second, or bytes per second."""

    what: Literal["latency", "rate", "bandwidth"]
    size: int

    @property
    def key(self) -> str:
        return f"{self.what}/{format_size(self.size)}"

    @property
    def title(self) -> str:
        return f"{self.what} {format_size(self.size)}"


def latencies(*sizes: int) -> tuple[Figure, ...]:
    return tuple(Figure("latency", size) for size in sizes)


def bandwidths(*sizes: int) -> tuple[Figure, ...]:
    return tuple(Figure("bandwidth", size) for size in sizes)


#: Figures that no default may make worse.
GENERAL = (Figure("latency", 8), Figure("rate", 8), *bandwidths(16 * 2**10, 2**20))


def over_tcp(lanes: Sequence[Transport]) -> bool:
    return all(lane.name == "tcp" for lane in lanes)


def over_shared_memory(lanes: Sequence[Transport]) -> bool:
    return any(lane.name in SHARED_MEMORY for lane in lanes)


def everywhere(lanes: Sequence[Transport]) -> bool:
    return True


@attrs.frozen
class Option:
    """An option of UCX with two values.

    Attributes:
        about: what it is, in a few words.
        ours: trio_ucx's default.
        of_ucx: UCX's own.
        figures: what is measured: what it may improve, and what every option must leave as it is.
        matters: True if it matters between two ends with these lanes.
    """

    name: str
    about: str
    ours: str
    of_ucx: str
    figures: tuple[Figure, ...] = GENERAL
    matters: Callable[[Sequence[Transport]], bool] = everywhere


OPTIONS: Mapping[str, Option] = {
    option.name: option
    for option in (
        Option(
            "MM_ERROR_HANDLING",
            "shared memory for connections with error handling, which ours are",
            *("y", "n"),
            (*GENERAL, *latencies(64 * 2**10)),
            over_shared_memory,
        ),
        Option(
            "TCP_TX_SEG_SIZE",
            "how much goes into the socket at once",
            *("64k", "8k"),
            (*GENERAL, *latencies(64 * 2**10)),
            over_tcp,
        ),
        Option(
            "RNDV_THRESH",
            "from how many bytes on messages stay with the sender until they are received",
            *("65k", "auto"),
            (*GENERAL, *latencies(32 * 2**10, 128 * 2**10), *bandwidths(128 * 2**10)),
        ),
        Option(
            "ADAPTIVE_PROGRESS",
            "whether UCX looks only at those transports that an endpoint uses",
            *("n", "y"),
        ),
    )
}


def figures_of(options: Iterable[Option]) -> list[Figure]:
    """Returns the figures of all these options, each once."""
    return list(dict.fromkeys(figure for option in options for figure in option.figures))
