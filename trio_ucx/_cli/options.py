"""The options of UCX that ``perf --tune`` tries, and their values: a fixed table, the same on both sides.

A client names an option and a value, and the server looks them up here. So nothing from the wire reaches UCX's
configuration, and clients can choose these few settings only.

The table leaves out MM_SEG_SIZE and MM_FIFO_SIZE: two processes that differ in them cannot use shared memory together,
and with segments of up to 32k nothing became faster.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Literal

import attrs

from ..ucp import Transport
from ..ucp._quirks.address_layout import SHARED_MEMORY
from .sizes import format_size

#: An option's name, and the name of one of its values.
Choice = tuple[str, str]


@attrs.frozen
class Figure:
    """A figure to measure: half of a round trip of ``size`` bytes, messages per second, or bytes per second."""

    what: Literal["latency", "rate", "bandwidth"]
    size: int

    @property
    def key(self) -> str:
        return f"{self.what}/{format_size(self.size)}"


def latencies(*sizes: int) -> tuple[Figure, ...]:
    return tuple(Figure("latency", size) for size in sizes)


def bandwidths(*sizes: int) -> tuple[Figure, ...]:
    return tuple(Figure("bandwidth", size) for size in sizes)


#: Figures that no change may make worse.
GENERAL = (Figure("latency", 8), Figure("rate", 8), *bandwidths(16 * 2**10, 2**20))


def over_tcp(lanes: Sequence[Transport]) -> str:
    return "" if all(lane.name == "tcp" for lane in lanes) else "messages do not go over TCP here"


def over_shared_memory(lanes: Sequence[Transport]) -> str:
    return "" if any(lane.name in SHARED_MEMORY for lane in lanes) else "messages do not go over shared memory here"


def over_several_lanes(lanes: Sequence[Transport]) -> str:
    return "" if over_shared_memory(lanes) and len(lanes) > 1 else "messages go over one lane here"


def everywhere(lanes: Sequence[Transport]) -> str:
    return ""


def same(name: str, *values: str) -> dict[str, Mapping[str, str]]:
    """Values that are set as they are named."""
    return {value: {name: value} for value in values}


@attrs.frozen
class Option:
    """An option, and the values that are tried.

    Attributes:
        about: what it is, in a few words.
        values: by name, what is set on both sides; the first is trio_ucx's default.
        figures: what is measured: what it may improve, and what every option must leave as it is.
        unfit: why it does not matter between two ends with these lanes; "" if it does.
        warning: what a user of another value must know; "" if there is nothing to know.
        of_ucx: UCX's own value if ours differs; measured by ``benchmarks/defaults.py``, proposed only if it is among
            the ``values``.
    """

    name: str
    about: str
    values: Mapping[str, Mapping[str, str]]
    figures: tuple[Figure, ...] = GENERAL
    unfit: Callable[[Sequence[Transport]], str] = everywhere
    warning: str = ""
    of_ucx: str | None = None

    @property
    def default(self) -> str:
        return next(iter(self.values))

    def config(self, value: str) -> Mapping[str, str] | None:
        """Returns what to set for a value; None for a value that is not in the table."""
        return {self.name: value} if value == self.of_ucx else self.values.get(value)


OPTIONS: Mapping[str, Option] = {
    option.name: option
    for option in (
        Option(
            "MM_ERROR_HANDLING",
            "shared memory for connections with error handling, which ours are",
            same("MM_ERROR_HANDLING", "y", "n"),
            (*GENERAL, *latencies(64 * 2**10)),
            over_shared_memory,
            of_ucx="n",
        ),
        Option(
            "TCP_TX_SEG_SIZE",
            "how much goes into the socket at once",
            {
                "64k": {"TCP_TX_SEG_SIZE": "64k"},
                **same("TCP_TX_SEG_SIZE", "8k", "32k"),
                **{size: {"TCP_TX_SEG_SIZE": size, "TCP_RX_SEG_SIZE": size} for size in ("256k", "1m")},
            },
            (*GENERAL, *latencies(64 * 2**10)),
            over_tcp,
            "Segments of more than 64k overrun the memory of a receiver whose TCP_RX_SEG_SIZE is smaller than they "
            "are, and UCX's own is 64k: set both options in every process that this one talks to, whatever UCX "
            "library it uses, or leave them as they are.",
            of_ucx="8k",
        ),
        Option(
            "RNDV_THRESH",
            "from how many bytes on messages stay with the sender until they are received",
            same("RNDV_THRESH", "65k", "16k", "32k", "256k"),
            (*GENERAL, *latencies(32 * 2**10, 128 * 2**10), *bandwidths(128 * 2**10)),
            warning="Messages below RNDV_THRESH are held by the receiver before they are received, and count in full "
            "against the window of their connection.",
            of_ucx="auto",
        ),
        Option(
            "RNDV_SCHEME",
            "who fetches or writes large messages",
            same("RNDV_SCHEME", "auto", "am"),
            (*GENERAL, *latencies(2**20), *bandwidths(128 * 2**10)),
        ),
        Option(
            "ZCOPY_THRESH",
            "from how many bytes on smaller messages are sent from where they are, without a copy",
            same("ZCOPY_THRESH", "auto", "2k", "inf"),
            (*GENERAL, *latencies(4 * 2**10, 32 * 2**10)),
        ),
        Option(
            "MAX_RNDV_RAILS",
            "over how many devices a large message is spread",
            same("MAX_RNDV_RAILS", "2", "1", "4"),
            (*GENERAL, *latencies(2**20), *bandwidths(4 * 2**20)),
            over_several_lanes,
        ),
        Option(
            # The user cannot choose it: with "y", UCX loses events (DEFAULT_OPTIONS says which).
            "ADAPTIVE_PROGRESS",
            "whether UCX looks only at those transports that an endpoint uses",
            same("ADAPTIVE_PROGRESS", "n"),
            of_ucx="y",
        ),
    )
}


def config_of(choices: Iterable[Choice]) -> dict[str, str] | None:
    """Returns what to set for these values of these options; None unless all are in the table."""
    config: dict[str, str] = {}
    for name, value in choices:
        found = OPTIONS[name].config(value) if name in OPTIONS else None
        if found is None:
            return None
        config.update(found)
    return config
