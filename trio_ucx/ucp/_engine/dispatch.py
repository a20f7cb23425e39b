"""Delivery of the records that progressing a worker brings. It wakes tasks, and runs no user code.

Completions go to operations, messages of Connections to tag dispatch, and everything else to :class:`Receivers`.

An exception here is a bug of ours, or lack of memory. It ends the object that the record concerns, most often a
connection, and never more than the worker; all other records are delivered.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, Protocol

from ..._native import lib
from .._memory.registered import note_arrived, unmap_unused
from .._status import UCXError
from .links import WorkerLinks
from .operations import OperatingEngine
from .receive_queue import ClosingEndpoint, ReceiveQueue
from .stream_buffer import StreamBuffer
from .tag_dispatch import TagDispatch, TagSink
from .teardown import Teardown
from .waits import Waiters

_FIELDS = lib.TU_RECORD_FIELDS
_OPERATION, _PACKED, _MESSAGE = lib.TU_RECORD_OPERATION, lib.TU_RECORD_PACKED, lib.TU_RECORD_MESSAGE
_TAKEN = lib.TU_RECORD_TAKEN


class Receivers:
    """What takes connection requests, active messages and pieces of streams at one worker.

    Args:
        serves_memory: whether the library itself uses an id of active messages.

    Attributes:
        listeners: takes the connection requests of a listener id.
        am_ids: ids of active messages that are taken, and by what.
        am_queues: by the key of a queue of active messages, what is called when it is no longer empty, and when it
            drops messages, at most once a minute.
        stream_watchers: tasks that wait for a piece of any stream.
    """

    def __init__(self, *, serves_memory: bool) -> None:
        self.listeners: dict[int, Callable[[int], None]] = {}
        self.am_ids: dict[int, str] = {lib.TU_REMOTE_AM_ID: "the library itself"} if serves_memory else {}
        self.am_queues: dict[int, tuple[Callable[[], None], Callable[[], None]]] = {}
        self._am_waiters: dict[int, Waiters] = {}
        self.stream_watchers = Waiters()

    def add_am_queue(
        self, key: int, id: int, announce: Callable[[], None], drops: Callable[[], None], waiters: Waiters
    ) -> None:
        """A queue takes the active messages with an id; ``waiters`` are the tasks that wait for one."""
        self.am_ids[id] = "another open_active_messages"
        self.am_queues[key] = announce, drops
        self._am_waiters[key] = waiters

    def remove_am_queue(self, key: int, id: int) -> None:
        """Removes a queue, which takes no active messages any more."""
        self.am_queues.pop(key, None)
        self._am_waiters.pop(key, None)
        self.am_ids.pop(id, None)

    def awaited(self) -> bool:
        """True if a task waits for an arrival. (Streams may be awaited one by one, too.)"""
        return bool(self.stream_watchers) or any(self._am_waiters.values())


class EngineEndpoint(ClosingEndpoint, Protocol):
    """The part of an endpoint that its engine uses: see :class:`~.endpoint_core.EndpointCore`."""

    label: str
    stream_buffer: StreamBuffer | None

    def open_stream_buffer(self) -> StreamBuffer: ...
    def user_object(self) -> Any: ...
    def hint(self, status: int) -> str: ...
    def fail(self, error: UCXError) -> None: ...
    def close(self) -> None: ...
    def disown(self) -> None: ...
    def worker_broke(self, error: BaseException) -> None: ...
    def internal_error(self, error: BaseException) -> None: ...


class DeliveringEngine(OperatingEngine, Protocol):
    """The part of the engine that delivery uses."""

    endpoints: dict[int, EngineEndpoint]
    failures: list[tuple[int, int]]
    links: WorkerLinks
    receive_queue: ReceiveQueue
    receivers: Receivers
    tag_dispatch: TagDispatch
    teardown: Teardown

    def user_endpoint(self, id: int) -> Any: ...


def deliver(engine: DeliveringEngine, rows: list[int]) -> None:
    """Delivers the records of one call into C. ``rows`` has their fields, one record after the other."""
    tag_dispatch = engine.tag_dispatch
    for start in range(0, len(rows), _FIELDS):
        kind, id, status, length, tag, pointer = rows[start : start + _FIELDS]
        try:
            if kind == _TAKEN:
                tag_dispatch.messages += id  # their number, in records of this kind
            elif kind == _OPERATION:
                operation = engine.in_flight.pop(id, None)
                if operation is None:
                    engine.teardown.unrecorded.pop(id, None)
                else:
                    try:
                        operation.complete(-status, length, tag)
                    except BaseException as error:
                        operation.internal_error(error)
            elif kind == _PACKED:
                tag_dispatch.messages += id
                sink = tag_dispatch.sinks.get(tag >> 32)
                if sink is not None:
                    sink.packed_arrived(tag & 0xFFFFFFFF, id, length, tag_dispatch.arena + pointer)
            elif kind == _MESSAGE:
                tag_dispatch.messages += 1
                sink = tag_dispatch.sinks.get(tag >> 32)
                if sink is None:
                    tag_dispatch.discard(pointer)
                else:
                    sink.message_arrived(tag & 0xFFFFFFFF, pointer, length)
            else:
                _deliver_rare(engine, kind, id, -status, length, pointer)
        except BaseException as error:
            _failed(engine, kind, id, tag, error)
    if engine.links.news[0]:
        engine.links.settle()


def _failed(engine: DeliveringEngine, kind: int, id: int, tag: int, error: BaseException) -> None:
    """Ends the connection or endpoint that the record concerns, or else the worker, after an internal error."""
    owner: TagSink | EngineEndpoint | None = None
    if kind in (_PACKED, _MESSAGE):
        owner = engine.tag_dispatch.sinks.get(tag >> 32)
    elif kind == lib.TU_RECORD_STREAM:
        owner = engine.endpoints.get(id)
    (engine if owner is None else owner).internal_error(error)


def _deliver_rare(engine: DeliveringEngine, kind: int, id: int, status: int, length: int, pointer: int) -> None:
    if kind == lib.TU_RECORD_FAILURE:
        engine.failures.append((id, status))  # after the messages that had arrived by then
    elif kind == lib.TU_RECORD_REQUEST:
        listener = engine.receivers.listeners.get(id)
        assert listener is not None, "a listener's requests end before the listener"
        listener(pointer)
    elif kind == lib.TU_RECORD_AM:
        engine.counters["arrived"] += 1
        queue = engine.receivers.am_queues.get(id)
        if queue is not None:
            queue[0]()
    elif kind == lib.TU_RECORD_STREAM:
        _deliver_piece(engine, id, pointer, length)
    elif kind == lib.TU_RECORD_DROPS:
        queue = engine.receivers.am_queues.get(id)
        if queue is not None:
            engine.run.call_soon(queue[1])  # it logs, and so may run code of the user's
    elif kind == lib.TU_RECORD_NOTE:
        note_arrived(pointer, length, partial(engine.user_endpoint, id))
    elif kind == lib.TU_RECORD_UNUSED:
        unmap_unused()
    elif kind == lib.TU_RECORD_CONCLUDED and id in engine.in_flight:
        engine.in_flight[id].conclude(status, 0, 0)


def _deliver_piece(engine: DeliveringEngine, id: int, pointer: int, length: int) -> None:
    engine.counters["arrived"] += 1
    core = engine.endpoints.get(id)
    if core is None or core.handle is None:
        lib.tu_stream_release(engine.handle, pointer)
        return
    core.open_stream_buffer().arrived(pointer, length)
    while engine.receivers.stream_watchers.give(None):
        pass


def deliver_failures(engine: DeliveringEngine) -> None:
    """Reports the endpoints that failed, once everything that had arrived before was delivered."""
    failures, engine.failures = engine.failures, []
    for id, status in failures:
        core = engine.endpoints.get(id)
        if core is not None:
            try:
                core.fail(UCXError(status, f"talking to {core.label}", core.hint(status)))
            except BaseException as error:
                core.internal_error(error)
    engine.receive_queue.suspect()
