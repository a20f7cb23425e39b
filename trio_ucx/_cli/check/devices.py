"""RDMA devices and GPUs: why UCX does not use them."""

from __future__ import annotations

import ctypes.util
import os
import resource
from collections.abc import Sequence
from pathlib import Path

from ..._native import ucx
from .finding import Finding, list_folder, read_text, warn_unless

#: Transports and their devices, such as ("tcp", "eth0").
Resources = Sequence[tuple[str, str]]
#: Beginnings of the names of UCX's RDMA transports (rc_verbs, ud_mlx5, dc_mlx5, srd, ...).
RDMA = ("rc", "ud", "dc", "srd", "gga")
#: Kernel modules by which RDMA reaches GPU memory.
_PEER_MEMORY = ("nvidia_peermem", "nv_peer_mem", "gdrdrv")
#: Locked memory with which RDMA works, roughly: UCX registers its queues and pools of buffers.
_LOCKED = 64 << 20
_MEMLOCK = "raise RLIMIT_MEMLOCK (ulimit -l unlimited, LimitMEMLOCK=infinity, docker run --ulimit memlock=-1)"


def _named(resources: Resources, beginnings: str | tuple[str, ...]) -> str:
    return ", ".join(f"{name}/{device}" for name, device in resources if name.startswith(beginnings))


def _has_module(name: str) -> bool:
    """True if the UCX in use has this module."""
    folder = Path(ucx.file).resolve().parent
    return any(file.startswith(f"libuct_{name}.so") for file in list_folder(folder / "ucx") + list_folder(folder))


def check_rdma(present: Resources, enabled: Resources, root: Path = Path("/")) -> Finding:
    """Says whether UCX uses InfiniBand or RoCE, and if not, why.

    Args:
        present, enabled: UCX's transports and devices: all, and those that the configuration allows.
        root: where ``sys`` and ``dev`` are.
    """
    locked, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    if used := _named(enabled, RDMA):
        return warn_unless(not 0 <= locked < _LOCKED, "InfiniBand", f"{used}; memory to lock: {locked}", _MEMLOCK)
    classes, nodes = root / "sys/class/infiniband", root / "dev/infiniband"
    known = list_folder(classes)
    ports = [read_text(port / "state") for port in sorted(classes.glob("*/ports/*"))]
    verbs = list(nodes.glob("uverbs*"))
    names = ", ".join(known)
    if unused := _named(present, RDMA):
        found, advice = f"the configuration disables {unused}", "change UCX_TLS and UCX_NET_DEVICES (or config=)"
    elif not known:
        return Finding("InfiniBand", "ok", "none: the kernel has no RDMA device")
    elif not any("ACTIVE" in state for state in ports):
        found = f"no port of {names} is active ({', '.join(ports)})"
        advice = "connect the cable; InfiniBand also needs a subnet manager in the network"
    elif not verbs:
        found = f"the kernel has {names}, but there is no /dev/infiniband/uverbs* here"
        advice = "in a container: docker run --device=/dev/infiniband, a device plugin; elsewhere: modprobe ib_uverbs"
    elif not any(os.access(node, os.R_OK | os.W_OK) for node in verbs):
        found, advice = "this user may not open /dev/infiniband/uverbs*", "give it access (mode 666, udev)"
    elif not _has_module("ib"):
        found = "this UCX was built without InfiniBand, as that of libucx-cu12 is"
        advice = "install the UCX of the distribution, DOCA or MOFED, and set TRIO_UCX_SYSTEM_UCX=1"
    elif ctypes.util.find_library("ibverbs") is None:
        found, advice = "there is no libibverbs", "install rdma-core (Debian: libibverbs1 and ibverbs-providers)"
    elif 0 <= locked < _LOCKED:
        found, advice = f"this process may lock only {locked} bytes of memory", _MEMLOCK
    else:
        found, advice = f"UCX does not use {names}", "UCX_LOG_LEVEL=debug python -m trio_ucx info may say why"
    return Finding("InfiniBand", "warning", f"none: {found}", advice)


def check_gpu(present: Resources, enabled: Resources, root: Path = Path("/")) -> Finding:
    gpus, nodes = list_folder(root / "proc/driver/nvidia/gpus"), list((root / "dev").glob("nvidia[0-9]*"))
    peer_memory = [name for name in _PEER_MEMORY if (root / "sys/module" / name).exists()]
    if used := _named(enabled, "cuda"):
        good = peer_memory or not _named(enabled, RDMA)
        found = f"{used}; RDMA to its memory: {', '.join(peer_memory) or 'no kernel module'}"
        return warn_unless(good, "GPU", found, "load nvidia_peermem, or install gdrcopy")
    if not gpus and not nodes:
        return Finding("GPU", "ok", "none: there is no NVIDIA device")
    found, advice = "UCX finds no driver", "install libcuda.so.1 (in a container: docker run --gpus all)"
    if _named(present, "cuda"):
        found, advice = "the configuration disables it", "add cuda to UCX_TLS"
    elif not nodes:
        found, advice = "there is no /dev/nvidia* here", "in a container: docker run --gpus all"
    elif not _has_module("cuda"):
        found, advice = "this UCX was built without CUDA", "install libucx-cu12 or libucx-cu13, or a UCX with CUDA"
    return Finding("GPU", "warning", f"no GPU memory can be sent: {found}", advice)
