"""Hints for error messages: why a peer cannot be reached, beyond UCX's status."""

from __future__ import annotations

from typing import Protocol

from .._native import ucx
from ._address import WorkerAddress, in_another_network_namespace
from ._process import has_ended
from ._quirks.address_layout import ParsedAddress, parse_worker_address
from ._status import Status

#: Values of UCX's option TLS that name only transports within a host, which have no socket addresses.
_WITHIN_HOST = frozenset(
    {"self", "sm", "shm", "mm", "sysv", "posix", "xpmem", "cma", "knem", "cuda", "cuda_copy", "cuda_ipc", "gdr_copy"}
)
#: The first minor release whose addresses name it.
_FIRST_RELEASE_SAID = 16


class ReachContext(Protocol):
    """A context, as far as hints look at it."""

    @property
    def transports(self) -> str:
        """Its transports, separated by commas."""

    @property
    def shared_memory_handles_errors(self) -> bool:
        """Whether endpoints with error handling use shared memory."""


def hint(context: ReachContext, status: int, address: WorkerAddress | None) -> str:
    """What is known about a peer that UCX could not reach, in parentheses; "" if UCX's message says it all.

    Args:
        address: the address of its worker; None for an endpoint by socket address.
    """
    if address is not None:
        known = _about_worker(context, status, address)
    elif _within_host(context):
        known = (
            f"transports in use: {context.transports}. Socket addresses need tcp or RDMA among them, as in "
            "TLS=tcp,sm,self; shared memory is reached by worker addresses"
        )
    elif status == Status.UNREACHABLE:
        known = f"transports in use: {context.transports}. No device of theirs reaches this address"
    elif status == Status.REJECTED:
        known = f"its listener refused, or its UCX is of another release: {_same_release()}"
    else:
        known = ""
    return f" ({known})" if known else ""


def accept_hint(context: ReachContext) -> str:
    """What is known about a client that could not be accepted, in parentheses."""
    return (
        f" (the client has none of the transports in use here, {context.transports}; or its UCX is of another release: "
        f"{_same_release()})"
    )


def _same_release() -> str:
    ours = ".".join(map(str, ucx.version[:2]))
    return f"socket addresses work only between workers of the same one, here {ours}; worker addresses do between any"


def _within_host(context: ReachContext) -> bool:
    """Whether none of its transports has socket addresses, which makes such a connection fail."""
    return set(context.transports.split(",")) <= _WITHIN_HOST


def _about_worker(context: ReachContext, status: int, address: WorkerAddress) -> str:
    if has_ended(address.process):
        return "its process has ended"
    if status == Status.SHMEM_SEGMENT:
        return "its shared memory is not there: its process has ended, or has other IPC or PID namespaces than this one"
    if status != Status.UNREACHABLE:
        return ""
    try:
        parsed = parse_worker_address(address.ucx)
    except ValueError:
        return f"transports in use: {context.transports}"
    theirs = ", ".join(sorted({name or "others" for name in parsed.transports})) or "no transports"
    known = f"the address has {theirs}; transports in use here: {context.transports}"
    if not context.shared_memory_handles_errors:
        known += "; shared memory needs MM_ERROR_HANDLING=y on both sides"
    elif in_another_network_namespace(address):
        known += "; it is in another network namespace of this machine, and cannot be woken over shared memory"
    return known + _about_release(parsed)


def _about_release(parsed: ParsedAddress) -> str:
    """A hint when the releases differ. Addresses name the minor release, modulo 16."""
    ours = ucx.version[1]
    if parsed.release is None and ours >= _FIRST_RELEASE_SAID:
        return f"; its UCX is older than 1.{_FIRST_RELEASE_SAID}, and this one is 1.{ours}"
    if parsed.release is not None and parsed.release != ours % 16:
        return f"; its UCX is of another release than this one, 1.{ours}"
    return ""
