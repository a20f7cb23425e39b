"""Limits of UCX's options: values that UCX must not get, and values that must be equal on both sides.

Network devices that do not exist are refused, too: UCX only warns of them in its log, and does without a network.

UCX accepts most of these values without an error, and then crashes, hangs, or loses messages. Both tables apply to what
the user chose with ``config=`` and with the environment.

Report: the last section of ucx-reports.md; each entry says what UCX does. Releases: all, 1.13 to 1.22, unless the
entry names others. An entry is not needed any more when UCX refuses the value, or works with it:
``tests/faults/test_sizes.py`` tries some. Tests: ``tests/test_option_limits.py``.
"""

from __future__ import annotations

import math
import os
import re
from collections.abc import Mapping

import attrs

from ..._native import ucx
from .address_layout import SHARED_MEMORY
from .releases import WELL_CONFIGURABLE


class OptionError(ValueError):
    """An option that UCX does not have, or cannot have with this value."""


@attrs.frozen
class Limit:
    """What an option may be.

    Attributes:
        options: a pattern of names.
        least, most: of a number; ``inf`` counts, and -1 is ``inf``.
        units: whether UCX reads units. Where it does not, 64k is 64 to it.
        words: words that are allowed, too, such as "auto".
        exact: whether upper case is another word to UCX.
        separator: between several values, each of which must be allowed; None: there is one.
        reason: what happens otherwise. UCX 1.22 does it, and so does every release from 1.13 on whose sources have the
            same lines, unless the reason names others.
    """

    options: str
    least: float
    most: float
    reason: str
    units: bool = True
    words: tuple[str, ...] = ()
    exact: bool = False
    separator: str | None = None

    def allows(self, text: str) -> bool:
        """True if UCX may get this value. What is no number to us is refused: UCX ignores what follows a number."""
        for part in text.split(self.separator) if self.separator else [text]:
            part = part.strip()
            if (part if self.exact else part.lower()) in self.words:
                continue
            value = number(part)
            if value is None or not self.least <= value <= self.most or not (self.units or _PLAIN.fullmatch(part)):
                return False
        return True


_PLAIN = re.compile(r"-?\d+|inf", re.IGNORECASE)

#: A control frame, a batch of small messages (4,096 bytes), or UCX's own wire-up messages, with their headers.
LEAST_SEGMENT = 4352
_ONE_PIECE = "trio_ucx and UCX send up to 4 KiB in one piece, which does not fit into a shorter segment"
_ONLY_LONG = "which trio_ucx expects only for long messages"

_NO_NUMBER = (1.0, 0.0)
_YES = ("y", "yes", "on", "1")
_NO = ("n", "no", "off", "0")
_OLD_NAME = "this is an option's old name, for which UCX crashes if it cannot read the value"

LIMITS = (
    Limit(
        "(MM|SYSV|POSIX|XPMEM)_SEG_SIZE",
        LEAST_SEGMENT,
        65535,
        "UCX has 16 bits for the length of a message in shared memory (uct_mm_fifo_element_t), and loses longer ones; "
        f"and {_ONE_PIECE}",
    ),
    Limit("(TCP_TX|TCP_RX|SELF|IB|RC|DC|SRD|(RC|DC)_(VERBS|MLX5))_SEG_SIZE", LEAST_SEGMENT, math.inf, _ONE_PIECE),
    Limit("UD(_VERBS|_MLX5)?_SEG_SIZE", 512, math.inf, "UCX's wire-up messages do not fit into a shorter segment"),
    Limit(
        "(MM|SYSV|POSIX|XPMEM)_FIFO_ELEM_SIZE",
        0,
        65535,
        "UCX has 16 bits for the length of a message in shared memory (uct_mm_fifo_element_t)",
        units=False,
    ),
    Limit(
        "(MM|SYSV|POSIX|XPMEM)_FIFO_SIZE",
        0,
        65536,
        "UCX allocates a segment for each element at once, and crashes where a queue is too large for its counters",
        units=False,
    ),
    Limit(
        "(MM|SYSV|POSIX|XPMEM|TCP|IB|UD|RC|DC|SRD|(UD|RC|DC)_(VERBS|MLX5))_(RX|TX)_MAX_BUFS",
        math.inf,
        math.inf,
        "when its buffers are used up, UCX loses messages (shared memory), loops for ever (TCP, while peers do not "
        "read), or keeps all peers waiting (RDMA, while messages of one are unread)",
    ),
    Limit("(CMA|KNEM)_(SEG_SIZE|TX_QUOTA)", 1, math.inf, "UCX would never copy anything, and wait for ever"),
    Limit("TCP_MAX_POLL", 1, math.inf, "UCX would not receive anything (epoll_wait refuses 0)"),
    Limit("TCP_MAX_IOV", 1, math.inf, "UCX 1.22 writes past the end of its segments"),
    Limit("SEG_SIZE", 512, math.inf, "UCX writes headers of active messages to such a segment, whatever its size"),
    Limit(
        "MAX_RNDV_(RAILS|LANES)", 1, math.inf, "UCX would cancel messages that need more than one segment", units=False
    ),
    Limit(
        "MAX_EAGER_(RAILS|LANES)",
        1,
        1,
        f"with more UCX may send a short message in several pieces, over several network devices at once, {_ONLY_LONG}",
    ),
    Limit(
        "BCOPY_THRESH",
        0,
        1,
        f"with a larger value UCX 1.22 may send short lists of buffers by rendezvous, {_ONLY_LONG}",
        words=("auto",),
    ),
    Limit(
        "RNDV_PERF_DIFF",
        0,
        1,
        f"with a larger value and RNDV_THRESH=auto UCX sends short messages by rendezvous, {_ONLY_LONG}",
    ),
    Limit(
        "RNDV_SCHEME",
        *_NO_NUMBER,
        "if a transport does not support a scheme (TCP supports no other, shared memory hardly any), UCX sends long "
        "messages before the peer asks for them, and trio_ucx loses those that are unread when this side closes",
        words=("auto", "am"),
    ),
    Limit("RX_MPOOL_SIZES", 1, 32768, "UCX 1.22 crashes when a message comes into a buffer of 64k", separator=","),
    Limit(
        "TOPO_PRIO",
        *_NO_NUMBER,
        "UCX crashes if the value contains no name that it knows",
        words=("sysfs", "default"),
        exact=True,
        separator=",",
    ),
    Limit("MULTI_LANE_MAX_RATIO", 1, math.inf, "UCX 1.22 finds no transport for active messages, and loops for ever"),
    Limit("NUM_PPN", 1, 2**31 - 1, "UCX is ended by the signal SIGFPE", units=False, words=("auto",)),
    Limit("PROTOS", *_NO_NUMBER, "UCX crashes when it has no protocol for an operation", words=("all",), exact=True),
    Limit("MAX_RMA_LANES|MAX_WORKER_NAME", 0, math.inf, _OLD_NAME, units=False),
    Limit(r"\w+_TM_MAX_BCOPY", 0, math.inf, _OLD_NAME, units=False),
    Limit(
        "RNDV_FRAG_MEM_TYPE",
        *_NO_NUMBER,
        f"{_OLD_NAME} (with the new name, RNDV_FRAG_MEM_TYPES, it says what is wrong)",
        words=("host", "cuda", "cuda-managed", "rocm", "rocm-managed", "ze-host", "ze-device", "ze-managed"),
        separator=",",
    ),
    Limit("MEMTYPE_COPY_ENABLE", *_NO_NUMBER, "UCX cancels what it sends, in host memory, too", words=_YES),
    Limit("USE_MT_MUTEX", *_NO_NUMBER, "UCX waits for a lock that it holds", words=_NO),
    Limit("RCACHE_CHECK_PFN", 0, 0, "UCX frees memory twice", units=False),
    Limit("RCACHE_STAT_(MIN|MAX)", 0, 1 << 40, "UCX loops for ever"),
    Limit("SELF_NUM_DEVICES", 0, 128, "UCX has room for no more, and hangs with -1", units=False),
    Limit("TCP_PORT_RANGE", 0, 65535, "there are no other ports", units=False, separator="-"),
)


def check(config: Mapping[str, str]) -> None:
    """Refuses values that cannot work.

    Args:
        config: what the user chose, over the environment.

    Raises:
        OptionError: it names the option, the value, the reason, and what to do.
    """
    inherited = {name: value for name, value in environment().items() if name not in config}
    for options, where in ((config, "in config="), (inherited, "in the environment")):
        for name, value in options.items():
            limit = next((limit for limit in LIMITS if re.fullmatch(limit.options, name)), None)
            if limit is not None and not limit.allows(value):
                full = name if options is config else f"UCX_{name}"
                raise OptionError(f"UCX's option {full}={value} {where}: give it {_range(limit)}. {_sentence(limit)}")


# ---- devices that do not exist ----

#: In UCX's description of a context: a transport and its device; after "--", or "a-" if only other transports need it.
RESOURCE = re.compile(r"^# +resource .* (\w+)/(\S+)", re.MULTILINE)


def devices(info: str) -> list[str]:
    """The devices in UCX's description of a context."""
    return sorted({device for _, device in RESOURCE.findall(info)})


def missing_devices(config: Mapping[str, str], present: list[str]) -> list[str]:
    """The network devices that NET_DEVICES names and that are not there. UCX warns in its log, and does without them.

    Exclusions and patterns name none. A device of several ports, ``mlx5_0:1``, may be named without the port.
    """
    value = in_force("NET_DEVICES", config) or "all"
    names = value.split(",")  # UCX takes spaces for a part of a name
    if value.startswith("^") or "all" in names or set("*?[(") & set(value):
        return []
    known = {*present, *(device.partition(":")[0] for device in present)}
    return [name for name in names if name and name not in known]


def no_such_device(config: Mapping[str, str], missing: list[str], present: list[str]) -> OptionError:
    """The error for devices that are missing."""
    where = "NET_DEVICES={} in config=" if "NET_DEVICES" in config else "UCX_NET_DEVICES={} in the environment"
    return OptionError(
        f"UCX's option {where.format(in_force('NET_DEVICES', config))}: there is no device "
        f"{' and no device '.join(map(repr, missing))}; give it one or more of {', '.join(present) or '(none)'}"
    )


def _range(limit: Limit) -> str:
    if limit.least > limit.most:
        return " or ".join(limit.words)
    if limit.least == math.inf:
        return "inf, its default, or leave it out"
    if limit.most == math.inf:
        return f"at least {limit.least}"
    if limit.least == limit.most:
        return f"{limit.least}"
    return f"{limit.least} to {limit.most}" if limit.least else f"at most {limit.most}"


def _sentence(limit: Limit) -> str:
    return limit.reason[0].upper() + limit.reason[1:]


def chosen(config: Mapping[str, str], defaults: Mapping[str, str]) -> str:
    """The options in force other than trio_ucx's defaults, for the error when UCX refuses one of them; "" if none."""
    ours = {name: value for name, value in config.items() if defaults.get(name) != value and name != "TLS"}
    theirs = {f"UCX_{name}": value for name, value in environment().items() if name not in config}
    return ", ".join(f"{name}={value}" for name, value in {**ours, **theirs}.items())


# ---- what both sides must have in common ----

#: Of each kind of shared memory, and UCX's defaults.
QUEUE = {"FIFO_SIZE": 256 if ucx.version >= (1, 16) else 64, "FIFO_ELEM_SIZE": 128, "SEG_SIZE": 8256}
#: Options that must be equal on both sides, and UCX's defaults. A sender over shared memory counts the elements of the
#: receiver's queue with its own FIFO_SIZE and FIFO_ELEM_SIZE, and fills the receiver's segments up to its own SEG_SIZE;
#: over TCP it sends up to its own RX_SEG_SIZE at once. UCX does not compare the values: if they differ, the sender
#: overruns the receiver's memory, or the receiver never reads the messages.
AGREED: Mapping[str, int] = {
    **{f"{kind.upper()}_{name}": size for kind in SHARED_MEMORY for name, size in QUEUE.items()},
    "TCP_RX_SEG_SIZE": 64 << 10,
}
#: The values of these options, in this order.
Sizes = tuple[int, ...]
DEFAULT_SIZES: Sizes = tuple(AGREED.values())
_GREATEST = 2**32 - 1


def agreed_sizes(config: Mapping[str, str]) -> Sizes:
    """Returns the values of the options in AGREED that are in force here."""
    return tuple(size(name, config) for name in AGREED)


def size(name: str, config: Mapping[str, str]) -> int:
    """Returns the value in force of an option in AGREED."""
    value = number(in_force(name, config) or "")
    return AGREED[name] if value is None else int(min(value, _GREATEST))


def differences(ours: Sizes, theirs: Sizes, kind: str) -> str | None:
    """The first option of a transport whose values differ, as text for the user; None if all are equal.

    ``()`` stands for unknown sizes (of a peer without trio_ucx).
    """
    for name, mine, other in zip(AGREED, ours, theirs, strict=False):
        if name.startswith(kind.upper()) and mine != other:
            return f"UCX's option {name} (UCX_{name}) is {mine} on one side and {other} on the other"
    return None


def in_force(name: str, config: Mapping[str, str]) -> str | None:
    """The value of an option that the user or trio_ucx chose, under its own name or as MM_..., which sets all kinds of
    shared memory.

    As in UCX, the last one in ``config`` counts, and in the environment the more specific name.
    """
    kind, _, rest = name.partition("_")
    names = (name, f"MM_{rest}") if kind.lower() in SHARED_MEMORY else (name,)
    if kind != "TCP" or ucx.version >= WELL_CONFIGURABLE:
        for each in reversed(list(config)):
            if each in names:
                return config[each]
    return next((value for each in names if (value := os.environ.get(f"UCX_{each}")) is not None), None)


def longest_am_header(config: Mapping[str, str]) -> int:
    """Returns what UCX has room for when it sends an active message from where it is.

    Such a message's header goes through a buffer of SEG_SIZE, and what UCX adds to it, too. But UCX says that headers
    may be as long as the transports' segments, which are longer over TCP, and checks nothing: it would overrun the
    buffer.
    """
    size = number(in_force("SEG_SIZE", config) or "8k")
    return max(0, int(8192 if size is None or size == math.inf else size) - 128)


# ---- UCX's notation ----

_UNITS = {"": 1, "b": 1, "k": 1 << 10, "m": 1 << 20, "g": 1 << 30, "t": 1 << 40}
_NUMBER = re.compile(r"\s*(-?\d+(?:\.\d+)?)([bkmgt]?)b?\s*", re.IGNORECASE)


def number(text: str) -> float | None:
    """A number in UCX's notation: ``64k``, ``inf`` (and ``auto``, which is as much); None if it is none."""
    if text.strip().lower() in ("inf", "auto"):
        return math.inf
    match = _NUMBER.fullmatch(text)
    if match is None:
        return None
    value = float(match[1]) * _UNITS[match[2].lower()]
    return math.inf if value < 0 else value


def environment() -> dict[str, str]:
    """UCX's options in the environment, without their prefix."""
    return {name[4:]: value for name, value in os.environ.items() if name.startswith("UCX_")}
