"""Endpoints, owners and memory for the tests of remote memory, of atomics and of request chains."""

from __future__ import annotations

import contextlib
import re
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary

import attrs
import pytest
import trio
from helpers import TRANSPORTS, Peer, open_pair, open_peer, open_raw_pair, open_to_peer, until
from outcome import Error, Value
from peers import REMOTE

import trio_ucx
from trio_ucx import ucp

#: What UCX_TLS is, and how an endpoint comes about. Shared memory alone has worker addresses only.
WAYS = [*[(transports, way) for transports in TRANSPORTS for way in ("raw", "connection", "worker")]]
WAYS.append(("sm,self", "worker"))
#: What each atomic operation makes of the integer in memory.
ATOMICS: dict[ucp.AtomicOp, Callable[[int, int], int]] = {
    ucp.AtomicOp.ADD: lambda old, value: old + value,
    ucp.AtomicOp.AND: lambda old, value: old & value,
    ucp.AtomicOp.OR: lambda old, value: old | value,
    ucp.AtomicOp.XOR: lambda old, value: old ^ value,
    ucp.AtomicOp.SWAP: lambda old, value: value,
}
#: How long it may take until a peer's death is noticed, by UCX or by us.
SOON = 5.0


@asynccontextmanager
async def open_two(transports: str, features: ucp.Feature = REMOTE) -> AsyncIterator[tuple[ucp.Worker, ucp.Worker]]:
    """(ours, with these features; the memory's owner's)."""
    config = {"TLS": transports}
    async with ucp.open_worker(config=config, features=features) as worker:
        async with ucp.open_worker(config=config, features=REMOTE) as owner:
            yield worker, owner


_connections: WeakKeyDictionary[ucp.Endpoint, trio_ucx.Connection] = WeakKeyDictionary()


def abort_way(endpoint: ucp.Endpoint) -> None:
    """Closes by force what :func:`open_way` opened."""
    _connections.get(endpoint, endpoint).abort()


@asynccontextmanager
async def open_way(way: str, worker: ucp.Worker, owner: ucp.Worker) -> AsyncIterator[ucp.Endpoint]:
    """A fresh endpoint from ``worker`` to ``owner``, both in this process."""
    if way == "raw":
        async with open_raw_pair(worker, owner) as (client, _):
            yield client
    elif way == "accepted":
        async with open_raw_pair(owner, worker) as (_, server):
            yield server
    elif way == "connection":
        async with open_pair(worker, owner) as (connection, _):
            _connections[connection.endpoint] = connection
            yield connection.endpoint
    else:
        endpoint = await worker.open_endpoint(owner.address)
        try:
            yield endpoint
        finally:
            endpoint.abort()


@asynccontextmanager
async def open_endpoint_and_context(transports: str, way: str) -> AsyncIterator[tuple[ucp.Endpoint, ucp.Context]]:
    """An endpoint, and the context of the worker that it leads to, in this process."""
    async with open_two(transports) as (worker, owner), open_way(way, worker, owner) as endpoint:
        yield endpoint, owner.context


@asynccontextmanager
async def open_owner(
    transports: str, way: str, nbytes: int, kind: str = "allocated"
) -> AsyncIterator[tuple[Peer, ucp.Endpoint, ucp.RemoteMemory]]:
    """(the owner in another process, an endpoint to it, its memory)."""
    async with (
        open_peer("owner", nbytes, kind, transports=transports) as peer,
        ucp.open_worker(config={"TLS": transports}, features=REMOTE) as worker,
    ):
        said = await peer.hear()
        async with open_to_peer(way, worker, said) as endpoint:
            with endpoint.attach(bytes.fromhex(said["descriptor"])) as memory:
                yield peer, endpoint, memory


def for_ucx(descriptor: bytes) -> ucp.MemoryDescriptor:
    """The descriptor as one of a peer without trio_ucx, whose memory UCX's puts and gets reach."""
    return attrs.evolve(ucp.MemoryDescriptor.from_bytes(descriptor), token=b"")


async def ask_the_owner(remote: ucp.RemoteMemory) -> None:
    """Makes gets of registered memory ask its owner, although the kernel lets this process read it."""
    await remote.connect()
    if remote._path is not None:
        remote._path.native.pid = 0


async def expect_broken(function: Any, *args: object) -> None:
    """Calls it until the peer is gone."""
    with pytest.raises(trio.BrokenResourceError) as caught:
        while True:
            await function(*args)
    assert isinstance(caught.value.__cause__, trio_ucx.UCXError)


async def has_begun(worker: ucp.Worker, operations: int = 1) -> None:
    """Waits until so many operations are in flight; the run of a chain is one."""
    await until(lambda: worker.statistics().operations_in_flight >= operations)


async def released(worker: ucp.Worker) -> None:
    """Waits until UCX has let go of every detached operation."""
    await until(lambda: not worker.statistics().left_over_operations)


@attrs.frozen
class Ground:
    """A worker, an endpoint from it, and memory at the other end of that."""

    worker: ucp.Worker
    owner: ucp.Worker
    endpoint: ucp.Endpoint
    memory: ucp.Memory
    remote: ucp.RemoteMemory

    def read(self, offset: int = 0, length: int | None = None) -> bytes:
        end = self.memory.nbytes if length is None else offset + length
        return bytes(self.memory.memoryview[offset:end])

    def write(self, data: bytes, offset: int = 0) -> None:
        self.memory.memoryview[offset : offset + len(data)] = data

    def u64(self, offset: int) -> int:
        return int.from_bytes(self.read(offset, 8), "little")


@asynccontextmanager
async def open_ground(transports: str, way: str = "worker", nbytes: int = 4096) -> AsyncIterator[Ground]:
    with trio.fail_after(200):
        async with open_two(transports) as (worker, owner), open_way(way, worker, owner) as endpoint:
            with owner.context.allocate(nbytes) as memory, endpoint.attach(memory.descriptor) as remote:
                memory.memoryview[:] = bytes(nbytes)
                yield Ground(worker, owner, endpoint, memory, remote)


def error_of(outcome: Any) -> Exception:
    assert isinstance(outcome, Error), outcome
    assert isinstance(outcome.error, Exception)
    return outcome.error


def value_of(outcome: Any) -> Any:
    assert isinstance(outcome, Value), outcome
    return outcome.value


def long_delay_has_begun() -> bool:
    """Whether a timer of this process has more than a minute to go."""
    found = []
    for path in Path("/proc/self/fdinfo").iterdir():
        with contextlib.suppress(FileNotFoundError):  # the one that iterdir has open
            found += re.findall(r"it_value: \((\d+),", path.read_text())
    return any(int(seconds) > 60 for seconds in found)
