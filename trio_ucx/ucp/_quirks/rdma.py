"""Leaves RDMA out, unless the program or the environment names it.

RDMA has no gate: whoever reaches a device reaches the worker, without a key (``key_gate.py`` is for TCP). So RDMA is a
choice. UCX itself uses it wherever it has it.

=====================================  =============================================
The options TLS and NET_DEVICES        RDMA
=====================================  =============================================
TLS is not set                         left out
TLS excludes (``^posix``)              left out, besides what it excludes
TLS is ``all``, or names transports    as it says
NET_DEVICES names one (``mlx5_0:1``)   as TLS says; UCX's default if that is not set
=====================================  =============================================

Where devices that could be used are left out, the log has a line, once in a process. Raw listeners do without UCX's
``rdmacm`` where RDMA is left out: otherwise they would listen at RDMA devices all the same.

Releases: all, 1.13 to 1.22. Not needed any more when UCX authenticates RDMA peers. Test:
``tests/test_rdma_is_a_choice.py``.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping
from pathlib import Path

from ..._native import ucx

logger = logging.getLogger("trio_ucx")

#: Beginnings of the names of UCX's RDMA transports (rc_verbs, ud_mlx5, dc_mlx5, srd, ...), and of ``ib`` for all.
TRANSPORTS = ("ib", "rc", "ud", "dc", "srd", "gga")

_DEVICES = Path("/sys/class/infiniband")
#: The options that leave RDMA out, where there are no others.
LEFT_OUT = {"TLS": "^ib", "SOCKADDR_TLS_PRIORITY": "tcp"}

_warned = False


def restrict(options: Mapping[str, str]) -> dict[str, str]:
    """Returns options that leave RDMA out, if nobody has named it.

    Args:
        options: the options in force, with the environment's.
    """
    wanted = [each.strip().lstrip("\\") for each in options.get("TLS", "").split(",")]  # "\rc_verbs" is that alone
    names_transports = wanted != [""] and not wanted[0].startswith("^")
    named = (
        any(each == "all" or each.startswith(TRANSPORTS) for each in wanted)
        if names_transports
        else _names_device(options.get("NET_DEVICES", "all"))
    )
    if named:
        return {}
    changes = {name: value for name, value in LEFT_OUT.items() if name not in options and name != "TLS"}
    excluded = [each.lstrip("^") for each in wanted if each]
    if not names_transports and "ib" not in excluded:
        changes["TLS"] = f"^{','.join([*excluded, 'ib'])}"
        _warn()
    return changes


def _names_device(devices: str) -> bool:
    """True if the option NET_DEVICES names an RDMA device, with its port (``mlx5_0:1``) or without."""
    names = [] if devices.startswith("^") else devices.split(",")
    return any(":" in name or (name.strip() and (_DEVICES / name.strip()).exists()) for name in names)


def _warn() -> None:
    global _warned
    if not _warned and (devices := usable_devices()):
        _warned = True
        logger.warning(
            "UCX does without RDMA (%s): whoever reaches these devices could take over this process. To use them in a "
            "network that you trust, set UCX_TLS=all or UCX_NET_DEVICES=%s; UCX_TLS=^ib ends this warning",
            ", ".join(devices),
            devices[0],
        )


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
