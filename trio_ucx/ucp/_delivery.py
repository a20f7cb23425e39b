"""Delivery: what becomes of the records that a turn brings. It wakes tasks, and runs no code of users."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

from .._native import ffi, lib
from ._status import UCXError

if TYPE_CHECKING:
    from ._engine import Engine

FIELDS = lib.TU_RECORD_FIELDS
_OPERATION, _RUN, _MESSAGE = lib.TU_RECORD_OPERATION, lib.TU_RECORD_RUN, lib.TU_RECORD_MESSAGE


class Mailbox(Protocol):
    """Takes the messages of one connection."""

    def message_came(self, lane: int, handle: int, length: int) -> None:
        """A message arrived, and is UCX's until it is received."""

    def run_came(self, lane: int, count: int, length: int, data: bytes) -> None:
        """So many small messages of the same length arrived; none: one that had promised to be small was not."""


def deliver(engine: Engine, rows: list[int]) -> None:
    """Takes the records of one call into C, all their fields in a row."""
    for start in range(0, len(rows), FIELDS):
        kind, id, status, length, tag, pointer = rows[start : start + FIELDS]
        if kind == _OPERATION:
            engine.in_flight.pop(id).complete(-status, length, tag)
        elif kind == _RUN:
            engine.messages += id
            mailbox = engine.mailboxes.get(tag >> 32)
            if mailbox is not None:
                data = engine.arena[pointer : pointer + id * length].tobytes()
                mailbox.run_came(tag & 0xFFFFFFFF, id, length, data)
        elif kind == _MESSAGE:
            engine.messages += 1
            mailbox = engine.mailboxes.get(tag >> 32)
            if mailbox is None:
                engine.discard_message(pointer)
            else:
                mailbox.message_came(tag & 0xFFFFFFFF, pointer, length)
        else:
            _deliver_rare(engine, kind, id, -status, length, pointer)


def _deliver_rare(engine: Engine, kind: int, id: int, status: int, length: int, pointer: int) -> None:
    if kind in (lib.TU_RECORD_FAILURE, lib.TU_RECORD_CUT):
        engine.failures.append((id, status))  # after the messages that had arrived by then
    elif kind == lib.TU_RECORD_REQUEST:
        listener = engine.listeners.get(id)
        assert listener is not None, "a listener's requests end before the listener"
        listener(pointer)
    elif kind == lib.TU_RECORD_HELLO:
        memory = ffi.cast("void *", pointer)
        hello = bytes(ffi.buffer(memory, length)) if length else b""
        lib.free(memory)
        if engine.on_hello is not None:
            engine.on_hello(id, hello)
    elif kind == lib.TU_RECORD_AM:
        engine.counters["arrived"] += 1
        announce = engine.am_queues.get(id)
        if announce is not None:
            announce()
    elif kind == lib.TU_RECORD_STREAM:
        _deliver_piece(engine, id, pointer, length)


def _deliver_piece(engine: Engine, id: int, pointer: int, length: int) -> None:
    engine.counters["arrived"] += 1
    core = engine.endpoints.get(id)
    if core is None or core.handle is None:
        lib.tu_stream_release(engine.handle, pointer)
        return
    core.stream_inbox().arrived(pointer, length)
    while engine.stream_watchers.give(None):
        pass


def deliver_failures(engine: Engine) -> None:
    """Tells of the endpoints that failed, once everything that had arrived before was delivered."""
    failures, engine.failures = engine.failures, []
    for id, status in failures:
        core = engine.endpoints.get(id)
        if core is not None:
            core.fail(UCXError(status, f"talking to {core.label}{engine.context.reach_hint(status)}"))
