"""Faults that tests inject inside the library, and conditions that it meets too rarely: one function for each.

Tests of what users can do need none of these. The functions that take a ``monkeypatch`` last as long as the test.
"""

from __future__ import annotations

import errno
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from typing import Any

import attrs
import pytest
import trio

import trio_ucx
from trio_ucx import ucp
from trio_ucx._handshake.handshake import Handshake
from trio_ucx._handshake.peer_description import PeerDescription
from trio_ucx._handshake.registry import WorkerConnections
from trio_ucx._native import ffi, lib
from trio_ucx.testing import internals
from trio_ucx.ucp import _endpoint
from trio_ucx.ucp._engine import draining, endpoints_to_worker, identity
from trio_ucx.ucp._engine.lifetime import close_now
from trio_ucx.ucp._engine.tag_dispatch import CONNECTION_BIT
from trio_ucx.ucp._quirks import key_gate, shared_memory, stopped_queue
from trio_ucx.ucp._quirks.key_gate import KeyGate
from trio_ucx.ucp._status import error_from_status

# ---- ends ----


async def close_worker(worker: ucp.Worker) -> None:
    """The worker closes before its block ends."""
    await worker._aclose()


def close_worker_at_once(worker: ucp.Worker) -> None:
    """The worker closes, and nothing that belongs to it is closed before."""
    close_now(internals(worker))


def close_context(context: ucp.Context) -> None:
    """The context closes, although its worker could not be destroyed."""
    context._close()


def break_worker(worker: ucp.Worker) -> None:
    """The library has an internal error that ends a worker."""
    internals(worker).internal_error(RuntimeError("a bug"))


def break_connection(connection: trio_ucx.Connection) -> None:
    """UCX reports that the endpoint of a connection has failed."""
    internals(connection).share.fail(trio_ucx.UCXError(-25, "pretended"))


def break_deliveries(connection: trio_ucx.Connection, monkeypatch: pytest.MonkeyPatch) -> None:
    """Delivering a small message to a connection raises ZeroDivisionError."""
    link = internals(connection)
    lib.tu_link_refer(link.native.handle, True)  # else C code takes it
    monkeypatch.setattr(link.receiving, "packed_arrived", lambda *_: 1 / 0)


def record_workers_left_alone(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Returns a list that gets each worker which is left alone from now on, because it cannot be destroyed."""
    left_alone: list[Any] = []
    monkeypatch.setattr(draining, "left_alone", left_alone)
    return left_alone


# ---- UCX ----


class Library:
    """Stands for the compiled module; subclasses replace functions."""

    def __getattr__(self, name: str) -> Any:
        return getattr(lib, name)


def has_unexpected_messages(worker: ucp.Worker) -> bool:
    """Whether UCX still has messages of Connections, which the library should have taken."""
    engine = internals(worker)
    engine.reap()
    lib.tu_worker_claim_messages(engine.handle, 0)  # or the probe would match none of them
    try:
        return bool(
            lib.tu_tag_probe(engine.handle, CONNECTION_BIT, CONNECTION_BIT, False, engine.tag_dispatch.received)
        )
    finally:
        engine.tag_dispatch.claim()


class _NeverEnding(dict[int, Any]):
    """Operations in flight, of which UCX reports nothing any more."""

    def pop(self, *_: Any) -> None:
        return None


def lose_completions(worker: ucp.Worker) -> None:
    """UCX never completes an operation again."""
    engine = internals(worker)
    engine.in_flight = _NeverEnding(engine.in_flight)


class Unrecording(dict[int, Any]):
    """Operations in flight, to which none can be added for lack of memory."""

    def __setitem__(self, key: int, value: Any) -> None:
        raise MemoryError


@contextmanager
def no_memory_to_record(engine: Any) -> Iterator[None]:
    """The library finds no memory to record the operations that UCX begins meanwhile."""
    recorded = engine.in_flight
    engine.in_flight = Unrecording(recorded)
    try:
        yield
    finally:
        recorded.clear()
        recorded.update(engine.in_flight)  # without those that have ended
        engine.in_flight = recorded


def fail_flushes(monkeypatch: pytest.MonkeyPatch, status: ucp.Status) -> None:
    """Flushing any endpoint fails with this status."""

    async def fails(_: object) -> None:
        await trio.lowlevel.checkpoint()
        raise error_from_status(status, "flushing")

    monkeypatch.setattr(_endpoint, "flush", fails)


def fill_worker(worker: ucp.Worker) -> None:
    """UCX has no room for another kind of endpoint in this worker, as EXCEEDS_LIMIT tells."""
    internals(worker).endpoints_by_worker.is_full = True


def limit_generations(monkeypatch: pytest.MonkeyPatch, limit: int) -> None:
    """Two workers can make so few endpoints to each other, rather than 65,535."""
    monkeypatch.setattr(endpoints_to_worker, "LIMIT", limit)


def delay_handshakes(monkeypatch: pytest.MonkeyPatch, event: type, action: Callable[[], Awaitable[object]]) -> None:
    """A handshake awaits the action between reading an event of this kind and handling it."""
    next_event = Handshake.next_event

    async def late(self: Handshake, *args: Any) -> Any:
        found = await next_event(self, *args)
        if isinstance(found, event):
            await action()
        return found

    monkeypatch.setattr(Handshake, "next_event", late)


def ignore_unreachable_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """The library does not notice that a worker's transports cannot reach memory of some kind."""
    monkeypatch.setattr("trio_ucx.ucp._engine.posting.check_reaches", lambda *_: None)
    monkeypatch.setattr("trio_ucx.ucp.chains._builder.check_reaches", lambda *_: None)


def have_device_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """All remote memory is of devices."""
    monkeypatch.setattr("trio_ucx.ucp._rma.access_paths.is_host_memory", lambda _: False)


def record_probes(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The transports of the shared-memory queues that are probed from now on."""
    found: list[str] = []
    begin = stopped_queue._Probe.__init__

    def recording(probe: Any, engine: Any, transport: str) -> None:
        found.append(transport)
        begin(probe, engine, transport)

    monkeypatch.setattr(stopped_queue._Probe, "__init__", recording)
    return found


def fail_probes(monkeypatch: pytest.MonkeyPatch, error: Exception) -> None:
    """Posting a probe of a shared-memory queue raises the error."""

    def fail(*_: object) -> None:
        raise error

    monkeypatch.setattr(stopped_queue, "post_bytes_send", fail)
    monkeypatch.setattr(stopped_queue, "post_flush", fail)


# ---- the machine ----


def have_an_unknown_address_layout(monkeypatch: pytest.MonkeyPatch) -> None:
    """UCX's worker addresses have a layout that the library does not know."""

    def refuse(address: bytes) -> None:
        raise ValueError("it makes no sense")

    monkeypatch.setattr(identity, "parse_worker_address", refuse)


def miss_where_ucx_listens(monkeypatch: pytest.MonkeyPatch) -> None:
    """UCX calls listen() without the library's replacement."""
    monkeypatch.setattr(KeyGate, "_find_ports", lambda gate: [])


def miss_an_import(monkeypatch: pytest.MonkeyPatch) -> None:
    """UCX's libraries call connect() in another way than the library can replace."""

    class Missing(Library):
        name = ffi.new("char[]", b"connect")

        def tu_gate_missing(self) -> Any:
            return self.name

    monkeypatch.setattr(key_gate, "lib", Missing())


def miss_shmget(monkeypatch: pytest.MonkeyPatch) -> None:
    """UCX's libraries call shmget() in another way than the library can replace."""

    class Missing(Library):
        def tu_keep_segments_private(self) -> bool:
            return False

    monkeypatch.setattr(shared_memory, "lib", Missing())


def have_no_system_v(monkeypatch: pytest.MonkeyPatch) -> None:
    """The machine has no shared memory of System V, and no device files, such as those of xpmem and knem."""
    monkeypatch.setattr("os.path.exists", lambda path: False)
    monkeypatch.setattr(shared_memory, "_sysv_problem", lambda options: OSError(errno.ENOSPC, "none left"))


def fail_accepts(listener: trio_ucx.Listener, errors: list[OSError]) -> None:
    """Accepting a control socket fails once with each of these errors, which are removed from the list."""
    control = listener._acceptor._listener
    accept = control.accept

    async def failing() -> trio.SocketStream:
        stream = await accept()
        if errors:
            stream.socket.close()
            raise errors.pop(0)
        return stream

    control.accept = failing  # type: ignore[method-assign]


# ---- peers ----


def send_false_threshold(worker: ucp.Worker, threshold: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """A worker tells its peers a false rendezvous threshold."""
    describe = WorkerConnections.description

    def changed(registry: WorkerConnections, *args: Any) -> PeerDescription:
        sent = describe(registry, *args)
        return attrs.evolve(sent, threshold=threshold) if registry.worker is worker else sent

    monkeypatch.setattr(WorkerConnections, "description", changed)


def change_descriptions(worker: ucp.Worker, change: Callable[[bytes], bytes], monkeypatch: pytest.MonkeyPatch) -> None:
    """A worker sends other peer descriptions than its own."""
    encode = PeerDescription.encode

    def changed(description: PeerDescription) -> bytes:
        data = encode(description)
        return change(data) if description.worker == worker.address else data

    monkeypatch.setattr(PeerDescription, "encode", changed)


async def send_to_queue(connection: trio_ucx.Connection, queue: int, data: bytes) -> None:
    """Sends a message past the rules of the connection: neither its credit nor its order counts."""
    await connection.endpoint.tag_send(data, (internals(connection).peer_id << 32) | queue)
