"""How a rank finds rank 0: an address that all know, a file, or a broadcast with MPI."""

from __future__ import annotations

import errno
import json
import logging
import math
import secrets
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from ipaddress import ip_address
from typing import Any

import attrs
import trio

from .. import Backoff, Connection, Listener, NotAdmitted, NotTrioUCX, open_ucx_listeners, open_ucx_stream
from .._opening.backoff import is_temporary, waits
from .._util.hidden import HiddenBytes
from .._util.picklable import with_text
from .._util.process import host_name, this_host
from .._util.socket_addresses import format_address, is_loopback
from .._util.text import printable
from ..ucp import Worker
from ..ucp._internal_api import addresses_of_devices
from . import _meeting_file
from ._errors import MeetingError
from ._mpi import broadcast
from ._place import Place
from ._variables import AtFile, AtPort, ThroughMPI

logger = logging.getLogger("trio_ucx")

#: Seconds for an attempt at one of several addresses, which may lead nowhere.
_ATTEMPT = 10.0
#: Seconds between two attempts to reach rank 0, at most.
_LONGEST_WAIT = 0.5


@attrs.frozen
class Contact:
    """What rank 0 says of itself in a file, or with MPI.

    Attributes:
        hosts: where other hosts may reach it.
        machine: identifies its host and network namespace: ranks with the same one use the loopback interface.
    """

    hosts: list[str]
    port: int
    machine: str
    authkey: str = attrs.field(repr=False)

    def addresses(self) -> list[tuple[str, int]]:
        hosts = ["127.0.0.1"] if self.machine == _machine() else map(printable, self.hosts)
        return [(host, self.port) for host in hosts]


def _machine() -> str:
    host = this_host()
    return f"{host.process.host.hex()} {host.network_namespace}"


def _own_hosts(worker: Worker) -> list[str]:
    """Returns where other hosts may reach this one: the addresses of UCX's devices, and its name."""
    address = worker._engine.identity.address
    hosts = address._tcp_hosts or addresses_of_devices(address)
    return [host for host in hosts if not ip_address(host).is_link_local and not is_loopback(host)] + [host_name()]


@asynccontextmanager
async def open_meeting_point(
    place: Place, worker: Worker | None, allow_anyone: bool, options: dict[str, Any]
) -> AsyncIterator[list[Listener]]:
    """Rank 0 listens, and lets the others know where. ``options`` gets the authkey if rank 0 makes one."""
    if isinstance(place.meeting, AtPort):
        local = place.meeting.host == "localhost" or is_loopback(place.meeting.host)
        host = place.meeting.host if local else None  # None: other hosts may know this one by several addresses
        try:
            listeners = await open_ucx_listeners(
                place.meeting.port, host=host, worker=worker, allow_anyone=allow_anyone, **options
            )
        except OSError as error:
            if error.errno == errno.EADDRINUSE:
                with_text(error, f"{error.strerror}. Rank 0 must listen there ({place.source}): is it another job's?")
            raise
        path, text = None, b""
    else:
        if options["authkey"] is None:
            options["authkey"] = HiddenBytes(secrets.token_hex(32).encode())
        listeners = await open_ucx_listeners(0, worker=worker, **options)
        contact = Contact(
            _own_hosts(listeners[0].worker), listeners[0].address[1], _machine(), options["authkey"].decode("latin-1")
        )
        path = place.meeting.path if isinstance(place.meeting, AtFile) else None
        text = HiddenBytes(json.dumps(attrs.asdict(contact)).encode())
    try:
        if path is not None:
            _meeting_file.write(path, text)
        elif text:
            await broadcast(text, size=place.size)
        yield listeners
    finally:
        for listener in listeners:
            listener._close()
        if path is not None:
            _meeting_file.remove(path, text)


async def reach_rank_0(
    place: Place, timeout: float, worker: Worker | None, options: dict[str, Any], problem: str
) -> Connection:
    """Connects to rank 0, which may begin to listen later. ``problem`` is what has been wrong until now, if anything.

    Raises:
        MeetingError: it does not listen, or cannot be reached.
        NotAdmitted: the authkeys differ, or rank 0 is in protected mode. Only at the end: what refuses this rank may be
            an earlier group, or a stranger that has the port for a moment.
    """
    problem = problem or "nothing was tried"
    where = "there"
    refusal: NotAdmitted | None = None
    with trio.move_on_after(timeout):
        fixed = None
        if isinstance(place.meeting, ThroughMPI):
            fixed = Contact(**json.loads(await broadcast(None, size=place.size)))
        for wait in waits(Backoff(first=0.02, longest=_LONGEST_WAIT)):
            try:
                contact = fixed
                if isinstance(place.meeting, AtFile):
                    where = f"with an address in {printable(str(place.meeting.path))}"
                    contact = Contact(**json.loads(_meeting_file.read(place.meeting.path)))
                if isinstance(place.meeting, AtPort):
                    addresses = [(place.meeting.host, place.meeting.port)]
                else:
                    assert contact is not None
                    addresses = contact.addresses()
                    options["authkey"] = place.authkey or HiddenBytes(contact.authkey.encode("latin-1"))
            except (OSError, ValueError, TypeError) as error:
                problem, addresses = printable(str(error)), []
            for address in addresses:
                where = f"at {format_address(address)}"
                try:
                    with trio.move_on_after(math.inf if len(addresses) == 1 else _ATTEMPT):
                        return await open_ucx_stream(*address, worker=worker, **options)
                except OSError as error:
                    stale = isinstance(place.meeting, AtFile)  # of a job that has ended
                    of_others = isinstance(error, (NotAdmitted, NotTrioUCX, socket.gaierror))
                    if not is_temporary(error) and not stale and not of_others:
                        raise
                    problem = str(error)
                    if isinstance(error, NotAdmitted):
                        if refusal is None:
                            logger.warning("rank %d tries again for up to %.3g s: %s", place.rank, timeout, problem)
                        refusal = error
            await trio.sleep(wait)
    if refusal is not None:
        if problem != str(refusal):
            with_text(refusal, f"{refusal.strerror}; later: {problem}")
        raise refusal
    raise MeetingError(
        f"rank {place.rank} did not find rank 0 {where} within {timeout:.3g} s (from {place.source}): {problem} -- "
        "look whether rank 0 was started, what it has written, and whether this host can connect to its host",
        (0,),
    )
