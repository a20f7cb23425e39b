"""Which transports two workers use. Both sides of a Connection come to the same result."""

from __future__ import annotations

from functools import lru_cache

from .._util.socket_addresses import is_loopback
from ._quirks.address_layout import agree_on_namespaces, parse_worker_address, without_devices
from ._quirks.option_limits import differences
from ._quirks.sandboxes import no_network_devices
from ._worker_address import WorkerAddress

#: What a side can do that has no transport but shared memory.
ADD_TCP = "add tcp to its option TLS (UCX_TLS), as in 'tcp,sm,self', unless its log says why UCX does without TCP"


@lru_cache(maxsize=16)
def obstacle_to_shared_memory(ours: WorkerAddress, theirs: WorkerAddress, *, error_handling: bool = True) -> str | None:
    """Returns why the two sides cannot use shared memory, in words for the user; None if they can.

    UCX itself checks less. Shared segments need the same IPC namespace, copies by process id need the same PID
    namespace, and waking a sleeping peer, by a Unix socket, needs the same folder. The kernel gives access only to the
    same user.

    Args:
        ours, theirs: addresses of workers of trio_ucx, which describe themselves.
        error_handling: whether the endpoints have error handling.
    """
    here, there = ours.host, theirs.host
    differing = [
        what
        for what, mine, other in (
            ("hosts", here.process.host, there.process.host),
            ("IPC namespaces", here.ipc_namespace, there.ipc_namespace),
            ("PID namespaces", here.process.namespace, there.process.namespace),
            ("network namespaces", here.network_namespace, there.network_namespace),
            ("users", here.user, there.user),
        )
        if mine != other
    ]
    if differing:
        return f"the two sides have different {differing[0] if differing[0] == 'hosts' else _listed(differing)}"
    if not agree_on_namespaces(ours.release, theirs.release):
        return f"{_releases(ours, theirs)} describe shared memory differently"
    if error_handling and not (ours.shared_memory and theirs.shared_memory):
        return "one side's UCX has no error handling over shared memory (MM_ERROR_HANDLING=n, or UCX older than 1.17)"
    if not (ours.shared_memory_kinds and theirs.shared_memory_kinds):
        return "one side's UCX has no shared memory (its option TLS, or UCX_TLS, or a limit that its log names)"
    common = sorted(ours.shared_memory_kinds & theirs.shared_memory_kinds)
    if not common:
        kinds = " and ".join(sorted(ours.shared_memory_kinds | theirs.shared_memory_kinds))
        return f"the two sides have different kinds of shared memory ({kinds}: see the option TLS, or UCX_TLS)"
    if ours.wake_folder != theirs.wake_folder or not any(ours.wake_folder):
        return "the two sides have different folders for wake-up sockets (they need the same /dev/shm, or /tmp)"
    return next(filter(None, (differences(ours.sizes, theirs.sizes, kind) for kind in common)), None)


def check_without_shared_memory(ours: WorkerAddress, theirs: WorkerAddress, obstacle: str) -> None:
    """Refuses two sides that cannot use other transports, either.

    Args:
        obstacle: why they do not use shared memory.

    Raises:
        ValueError: with the reason, in words for the user.
    """
    if not agree_on_namespaces(ours.release, theirs.release) and all(map(_only_loopback, (ours, theirs))):
        raise ValueError(
            f"{_releases(ours, theirs)} do not recognise each other's loopback device, and there is no other network "
            "device: use one release on both sides"
        )
    if not (ours.network and theirs.network):
        lacking, advice = (theirs, ADD_TCP) if ours.network else (ours, no_network_devices() or ADD_TCP)
        raise ValueError(
            f"shared memory cannot be used ({obstacle}), and UCX of process {lacking.process.pid} has no other "
            f"transport: {advice}"
        )
    here, there = (_usable(side.auxiliary, side.network) for side in (ours, theirs))
    if not (here & there or None in here | there):
        raise ValueError(
            f"the two sides have no transport in common: UCX of process {ours.process.pid} uses {_names(here)}, and of "
            f"process {theirs.process.pid} {_names(there)}. Give both the same option TLS (UCX_TLS)"
        )
    if ours.tcp_addresses and theirs.tcp_addresses and (difference := differences(ours.sizes, theirs.sizes, "tcp")):
        raise ValueError(f"{difference}: one side would overrun the memory of the other. Give both the same value")


@lru_cache(maxsize=16)
def _usable(auxiliary: frozenset[str], blob: bytes) -> frozenset[str | None]:
    """The transports of a worker that do not only connect others; None stands for those that are not known."""
    try:
        return frozenset(parse_worker_address(blob).transports - auxiliary)
    except ValueError:
        return frozenset({None})


def common_part(ours: WorkerAddress, theirs: WorkerAddress, blob: bytes) -> bytes:
    """Returns UCX's address of a peer without the devices over which UCX could not connect the two sides.

    With TLS=rc, UD serves only to connect. A peer that has UD, but not RC, would send messages over it, and UCX crashes
    (``ucp_ep_set_lanes_failed``).
    """
    differing = ours.auxiliary ^ theirs.auxiliary
    if not differing or None in (there := _usable(theirs.auxiliary, blob)):
        return blob
    return without_devices(blob, differing, _usable(ours.auxiliary, ours.ucx) & there) or blob


def _names(transports: frozenset[str | None]) -> str:
    return ", ".join(sorted(filter(None, transports))) or "none"


def _releases(ours: WorkerAddress, theirs: WorkerAddress) -> str:
    return " and ".join(f"UCX {major}.{minor}" for major, minor in sorted((ours.release, theirs.release)))


def _only_loopback(side: WorkerAddress) -> bool:
    return bool(side.tcp_addresses) and all(map(is_loopback, side._tcp_hosts))


def _listed(words: list[str]) -> str:
    return words[0] if len(words) == 1 else f"{', '.join(words[:-1])} and {words[-1]}"
