"""Hints for error messages: why a peer cannot be reached, beyond UCX's status."""

from __future__ import annotations

from .._native import ucx
from .._util.process import has_ended
from ._quirks.address_layout import parse_worker_address
from ._status import Status
from ._worker_address import WorkerAddress

#: Values of UCX's option TLS that name only transports within a host, which have no socket addresses.
_WITHIN_HOST = frozenset(
    {
        *("self", "sm", "shm", "mm", "sysv", "posix", "xpmem", "cma", "knem"),
        *("cuda", "cuda_copy", "cuda_ipc", "gdr_copy", "rocm", "rocm_copy", "rocm_gdr", "rocm_ipc"),
        *("ze", "ze_copy", "ze_gdr", "ze_ipc", "gaudi", "gaudi_gdr"),
    }
)


def hint(transports: str, status: int, address: WorkerAddress | None) -> str:
    """Returns what is known about a peer that UCX could not reach, in parentheses; "" if UCX's message says it all.

    Args:
        transports: those of this side's context.
        address: the address of its worker; None for an endpoint by socket address.
    """
    if address is not None:
        known = _about_worker(transports, status, address)
    elif _within_host(transports):
        known = (
            f"transports in use: {transports}. Socket addresses need tcp or RDMA among them, as in "
            "TLS=tcp,sm,self; shared memory is reached by worker addresses"
        )
    elif status == Status.UNREACHABLE:
        known = f"transports in use: {transports}. No device of theirs reaches this address"
    elif status == Status.REJECTED:
        known = f"its listener refused, or its UCX is of another release: {_same_release()}"
    else:
        known = ""
    return f" ({known})" if known else ""


def accept_hint(transports: str, status: int) -> str:
    """Returns what is known about a client that was not accepted, in parentheses; "" if UCX's message says it all."""
    if status not in (Status.UNREACHABLE, Status.INVALID_PARAM):
        return ""
    return (
        f" (the client has none of the transports in use here, {transports}; or its UCX is of another release: "
        f"{_same_release()})"
    )


def _same_release() -> str:
    ours = ".".join(map(str, ucx.version[:2]))
    return f"connections by socket address need one release on both sides, here {ours}; try a worker address"


def _within_host(transports: str) -> bool:
    """True if none of its transports has socket addresses, which makes such a connection fail."""
    return set(transports.split(",")) <= _WITHIN_HOST


def _about_worker(transports: str, status: int, address: WorkerAddress) -> str:
    if has_ended(address.process):
        return "its process has ended"
    if status == Status.SHMEM_SEGMENT:
        return "its shared memory is not there: its process has ended, or has other IPC or PID namespaces than this one"
    if status != Status.UNREACHABLE:
        return ""
    return f"{_transports(address)}transports in use here: {transports}{_about_release(address)}"


def _transports(address: WorkerAddress) -> str:
    try:
        parsed = parse_worker_address(address.ucx)
    except ValueError:
        return ""
    theirs = ", ".join(sorted({name or "others" for name in parsed.transports})) or "no transports"
    return f"the address has {theirs}; "


def _about_release(address: WorkerAddress) -> str:
    """A hint when the releases differ."""
    if not address._is_described or address.release == ucx.version[:2]:
        return ""
    theirs, ours = (".".join(map(str, release[:2])) for release in (address.release, ucx.version))
    return f"; its UCX is {theirs}, and this one is {ours}"
