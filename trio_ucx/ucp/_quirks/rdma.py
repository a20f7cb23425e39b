"""Leaves RDMA out, unless it is named, and UCX is 1.19 or newer.

RDMA has no key gate: over UD, whoever reaches a device can reach the worker without a key (``key_gate.py`` is for TCP).
So RDMA is a choice. UCX itself uses it wherever it has it.

=====================================  =============================================
The options TLS and NET_DEVICES        RDMA
=====================================  =============================================
TLS is ``all``, or names transports    as it says
NET_DEVICES names one (``mlx5_0:1``)   as TLS says; UCX's default if that is not set
else, TLS is not set                   left out
else, TLS excludes (``^posix``)        left out, besides what TLS excludes
=====================================  =============================================

Where devices that could be used are left out, the log has a line, once in a process. Raw listeners do without UCX's
``rdmacm`` where RDMA is left out: otherwise they would listen at RDMA devices all the same.

Before UCX 1.19, RDMA is left out even if it is named; if nothing else is named, that is an error. Over Soft-RoCE, 1.17
did not connect, 1.13 ended the process, and 1.18 was not tried.

Some releases keep transports although ``ib`` is excluded: 1.17 UD, to connect others, and 1.19 SRD.

Releases: all, 1.13 to 1.22. Not needed any more when UCX authenticates RDMA peers. Test:
``tests/test_rdma_is_a_choice.py``.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Mapping
from pathlib import Path

from ..._native import ucx
from .option_limits import OptionError

logger = logging.getLogger("trio_ucx")

#: Beginnings of the names of UCX's RDMA transports (rc_verbs, ud_mlx5, dc_mlx5, srd, ...), and of ``ib`` for all.
TRANSPORTS = ("ib", "rc", "ud", "dc", "srd", "gga")

#: Whether this UCX gets through over RDMA; what users of another one are told.
WORKS = ucx.version >= (1, 19)
TOO_OLD = f"trio_ucx needs UCX 1.19 or newer for it, and this is {ucx.release}"

DEVICES = Path("/sys/class/infiniband")
#: The options that leave RDMA out, where there are no others.
LEFT_OUT = {"TLS": "^ib", "SOCKADDR_TLS_PRIORITY": "tcp"}
#: What is excluded where there are devices. (Elsewhere, older UCX would warn of names that it does not know.)
_ALL = ("ib", "srd", "rc_gda") if WORKS else ("ib", "ud:aux")

_warned = False


def restrict(options: Mapping[str, str]) -> dict[str, str]:
    """Returns options that leave RDMA out, if nobody has named it, or if UCX is too old.

    Args:
        options: the options in force, with the environment's.

    Raises:
        OptionError: UCX is too old, and an option names only RDMA.
    """
    wanted = [each.strip() for each in options.get("TLS", "").split(",")]
    value = options.get("NET_DEVICES", "all")
    devices = [] if value.startswith("^") else value.split(",")
    names_transports = wanted != [""] and not wanted[0].startswith("^")
    named = "all" in wanted or any(map(_is_transport, wanted)) if names_transports else any(map(_is_device, devices))
    if named and WORKS:
        return {}
    usable = usable_devices() if named or not names_transports else []
    changes = {name: value for name, value in LEFT_OUT.items() if name not in options and name != "TLS"}
    if named:
        changes |= _others("TLS", wanted, _is_transport) | _others("NET_DEVICES", devices, _is_device)
    if not names_transports or "all" in wanted:
        excluded = [] if names_transports else [each.lstrip("^") for each in wanted if each]
        named = named or "ib" not in excluded
        every = dict.fromkeys([*excluded, *(_ALL if usable else ["ib"])])
        if len(every) > len(excluded):
            changes["TLS"] = f"^{','.join(every)}"
    if named:
        _warn(usable)
    return changes


def _is_transport(word: str) -> bool:
    return word.lstrip("\\").startswith(TRANSPORTS)  # "\rc_verbs" is that alone


def _is_device(name: str) -> bool:
    """True if a word of NET_DEVICES names an RDMA device, with its port (``mlx5_0:1``) or without."""
    return ":" in name or bool(name.strip() and (DEVICES / name.strip()).exists())


def _others(option: str, words: list[str], is_rdma: Callable[[str], bool]) -> dict[str, str]:
    """Returns the option without what is RDMA's; nothing if that changes nothing."""
    kept = [each for each in words if not is_rdma(each)]
    if words and not kept:
        raise OptionError(f"UCX's option {option}={','.join(words)} names only RDMA: {TOO_OLD}")
    return {option: ",".join(kept)} if kept != words else {}


def _warn(devices: list[str]) -> None:
    global _warned
    if not _warned and devices:
        _warned = True
        choice = (
            "with UCX_TLS=all, whoever reaches these devices could take over this process. To use them, see "
            "docs/operation/rdma.md: UCX_TLS=rc_mlx5,tcp,sm,self is safer. UCX_TLS=^ib ends this warning"
        )
        logger.warning("UCX does without RDMA (%s): %s", ", ".join(devices), choice if WORKS else TOO_OLD)


def usable_devices(root: Path = Path("/")) -> list[str]:
    """The active ports of RDMA devices that UCX could use, such as ``mlx5_0:1``.

    Args:
        root: where ``sys`` and ``dev`` are.
    """
    nodes = (root / "dev/infiniband").glob("uverbs*")
    if not has_module("ib") or not any(os.access(node, os.R_OK | os.W_OK) for node in nodes):
        return []
    active = (port for port in (root / "sys/class/infiniband").glob("*/ports/*/state") if _is_active(port))
    return sorted(f"{port.parts[-4]}:{port.parts[-2]}" for port in active)


def _is_active(state: Path) -> bool:
    try:
        return "ACTIVE" in state.read_text()
    except OSError:
        return False


def has_module(name: str) -> bool:
    """True if the UCX in use has this module."""
    folder = Path(ucx.file).resolve().parent
    return any(any(place.glob(f"libuct_{name}.so*")) for place in (folder / "ucx", folder))
