"""RDMA devices and GPUs: why UCX does not use them."""

from __future__ import annotations

import ctypes.util
import os
from collections.abc import Sequence
from pathlib import Path

from ...ucp._internal_api import rdma
from ..privileges import format_bytes, list_folder, lockable_memory, read
from .finding import Finding, first_of, warn_unless

#: Transports and their devices, such as ("tcp", "eth0").
Resources = Sequence[tuple[str, str]]
#: Kernel modules by which RDMA reaches GPU memory.
_PEER_MEMORY = ("nvidia_peermem", "nv_peer_mem", "gdrdrv")
#: Locked memory with which RDMA works, roughly: UCX registers its queues and pools of buffers.
_LOCKED = 64 << 20
_MEMLOCK = "raise RLIMIT_MEMLOCK (ulimit -l unlimited, LimitMEMLOCK=infinity, docker run --ulimit memlock=-1)"
_CABLE = "connect the cable; InfiniBand also needs a subnet manager in the network"
_VERBS = "in a container: docker run --device=/dev/infiniband, a device plugin; elsewhere: modprobe ib_uverbs"
_CHOICE = "see docs/operation/rdma.md: with UCX_TLS=all, say, whoever is in its network can take over this process"
_WHEEL = ", and this UCX no InfiniBand transports"
_SYSTEM_UCX = "install the UCX of the distribution, DOCA or MOFED, and set TRIO_UCX_SYSTEM_UCX=1"
_RDMA_CORE = "install rdma-core (Debian: libibverbs1 and ibverbs-providers)"


def _named(resources: Resources, beginnings: str | tuple[str, ...]) -> str:
    return ", ".join(f"{name}/{device}" for name, device in resources if name.startswith(beginnings))


def check_rdma(present: Resources, enabled: Resources, root: Path = Path("/")) -> Finding:
    """Says whether UCX uses InfiniBand or RoCE, and if not, why.

    Args:
        present, enabled: UCX's transports and devices: all, and those that the configuration allows.
        root: where ``sys`` and ``dev`` are.
    """
    locked = lockable_memory()
    little, amount = 0 <= locked < _LOCKED, "no limit" if locked < 0 else format_bytes(locked)
    if used := _named(enabled, rdma.TRANSPORTS):
        return warn_unless(not little, "InfiniBand", f"{used}; memory to lock: {amount}", _MEMLOCK)
    classes, nodes, unused = root / "sys/class/infiniband", root / "dev/infiniband", _named(present, rdma.TRANSPORTS)
    names, verbs = ", ".join(list_folder(classes)), list(nodes.glob("uverbs*"))
    ports = ", ".join(read(port / "state") or "unknown" for port in sorted(classes.glob("*/ports/*")))
    may_open = any(os.access(node, os.R_OK | os.W_OK) for node in verbs)
    return first_of(
        "InfiniBand",
        (unused, f"none: it is a choice (UCX_TLS, UCX_NET_DEVICES, config=), and nothing names {unused}", _CHOICE),
        (not names, f"none: the kernel has no RDMA device{_WHEEL * (not rdma.has_module('ib'))}", None),
        (not rdma.WORKS, f"none: {rdma.TOO_OLD}", "install a newer UCX"),
        ("ACTIVE" not in ports, f"none: no port of {names} is active ({ports})", _CABLE),
        (not verbs, f"none: the kernel has {names}, but there is no /dev/infiniband/uverbs* here", _VERBS),
        (not may_open, "none: this user may not open /dev/infiniband/uverbs*", "give it access (mode 666, udev)"),
        (
            not rdma.has_module("ib"),
            "none: this UCX was built without verbs, as libucx-cu12 is",
            _SYSTEM_UCX,
        ),
        (ctypes.util.find_library("ibverbs") is None, "none: there is no libibverbs", _RDMA_CORE),
        (little, f"none: this process may lock only {amount}", _MEMLOCK),
        (True, f"none: UCX does not use {names}", "UCX_LOG_LEVEL=debug python -m trio_ucx info may say why"),
    )


def check_gpu(present: Resources, enabled: Resources, root: Path = Path("/")) -> Finding:
    gpus, nodes = list_folder(root / "proc/driver/nvidia/gpus"), list((root / "dev").glob("nvidia[0-9]*"))
    peer_memory = [name for name in _PEER_MEMORY if (root / "sys/module" / name).exists()]
    if used := _named(enabled, "cuda"):
        good = peer_memory or not _named(enabled, rdma.TRANSPORTS)
        found = f"{used}; RDMA to its memory: {', '.join(peer_memory) or 'no kernel module'}"
        return warn_unless(good, "GPU", found, "load nvidia_peermem, or install gdrcopy")
    no = "no GPU memory can be sent"
    return first_of(
        "GPU",
        (not gpus and not nodes, "none: there is no NVIDIA device", None),
        (_named(present, "cuda"), f"{no}: the configuration disables it", "add cuda to UCX_TLS"),
        (not nodes, f"{no}: there is no /dev/nvidia* here", "in a container: docker run --gpus all"),
        (
            not rdma.has_module("cuda"),
            f"{no}: this UCX was built without CUDA",
            "install libucx-cu12, or a UCX with CUDA",
        ),
        (True, f"{no}: UCX finds no driver", "install libcuda.so.1 (in a container: docker run --gpus all)"),
    )
