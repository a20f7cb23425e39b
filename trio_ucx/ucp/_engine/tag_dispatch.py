"""Tag dispatch: the engine takes the tag messages of Connections off UCX's queue, and hands each to its connection."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol, TypeVar, TypeVarTuple

from ..._native import ffi, lib
from .._context import Context
from .._features import Feature
from .._status import Status, os_error_from_status
from .operations import OperatingEngine, ReceiveOperation

_Made = TypeVar("_Made")
_Arguments = TypeVarTuple("_Arguments")

#: Tags with this bit set are Connections' messages, on a worker that has Connections: conn ids have it.
CONNECTION_BIT = 1 << 63


class TagSink(Protocol):
    """Takes the messages of one connection."""

    def message_arrived(self, queue: int, handle: int, length: int) -> None:
        """A message arrived, and is UCX's until it is received."""

    def packed_arrived(self, queue: int, count: int, length: int, data: Any) -> None:
        """``count`` small messages of one length arrived; 0: one that had to come in one piece did not.

        Args:
            data: where they are, one after the other, until the call returns.
        """

    def link_broke(self, status: int) -> None:
        """Its link in C has broken: there was no memory, say."""

    def internal_error(self, error: BaseException) -> None:
        """Ends this connection, and no other, after an exception in our own code. Never raises."""


class ReceivingEngine(OperatingEngine, Protocol):
    """The part of the engine that :class:`TagDispatch` uses."""

    context: Context

    def adopt(self, id: int, make: Callable[[*_Arguments], _Made], *arguments: *_Arguments) -> _Made:
        """Makes our object for an operation that UCX has begun."""

    def watch_events(self) -> None:
        """Makes the safety net look, because something is awaited."""


class TagDispatch:
    """Where the messages of one worker's Connections go."""

    def __init__(self, engine: ReceivingEngine) -> None:
        self._engine = engine
        #: Whether tag messages may be used at all: a bool, which is faster to ask than the context's flags.
        self.has_tags = Feature.TAG in engine.context.features
        #: How many have arrived.
        self.messages = 0
        #: Where C code writes the length and the tag of a message.
        self.received = ffi.new("tu_received_t *")
        #: Messages to be thrown away, for which there was no memory.
        self.undiscarded: list[int] = []
        #: What takes the messages of a connection id, while it is open.
        self.sinks: dict[int, TagSink] = {}
        #: Whether the messages of Connections are dispatched here.
        self.claimed = False
        #: Where C code receives small messages; a record says at which offset.
        self.arena: Any = lib.tu_worker_arena(engine.handle)

    def claim(self) -> None:
        """Makes C code take the messages of Connections off UCX's queue from now on."""
        self.claimed = True
        lib.tu_worker_claim_messages(self._engine.handle, CONNECTION_BIT)

    def reserve_memory(self) -> None:
        """Makes sure that a small message can be received.

        Raises:
            OSError: there is no memory.
        """
        if not lib.tu_worker_reserve_scratch(self._engine.handle):
            raise os_error_from_status(Status.NO_MEMORY, "receiving messages")

    def discard(self, message: int) -> None:
        """Takes a message off UCX's hands, by its handle, and throws it away.

        If there is no memory for that, the safety net tries again. After the end of the worker: no effect.
        """
        engine = self._engine
        if engine.handle is None:
            return
        verdict = lib.tu_message_receive_one(engine.handle, message, ffi.NULL, 0, lib.TU_MEMORY_HOST, self.received)
        if verdict > 0:
            engine.adopt(verdict, ReceiveOperation, engine, verdict, None, "discarding a message").detach()
        elif verdict == Status.NO_MEMORY:
            self.undiscarded.append(message)
            engine.watch_events()

    def discard_again(self) -> None:
        """Throws away the messages for which there was no memory before."""
        messages, self.undiscarded = self.undiscarded, []
        for message in messages:
            self.discard(message)

    def remove(self, id: int) -> None:
        """A connection has ended: messages that are late for it are dropped. (Removed already: no effect.)"""
        self.sinks.pop(id, None)
