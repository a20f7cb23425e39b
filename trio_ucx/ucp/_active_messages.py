"""Receiving active messages: messages with an id and a header, for the queue that was opened for this id.

A handler in C puts what arrives into a queue of bounded size; Python takes it from there. The data of a message is in
one of three places: small enough to have been copied into the queue; in memory borrowed from UCX, until it is released;
or, with a rendezvous, still with the sender, until it is received.
"""

from __future__ import annotations

import enum
import logging
from typing import Any

import attrs
import trio
from trio.lowlevel import enable_ki_protection

from .._native import ffi, lib
from .._util.arguments import check_integer
from .._util.handles import OpenedNotConstructed
from .._util.live_handles import live_handles
from ._am_send import MAX_ID
from ._arrivals import ActiveMessage, Arrival
from ._engine.engine import Engine
from ._engine.waits import Waiters
from ._features import Feature
from ._status import Status, UCXError

logger = logging.getLogger("trio_ucx")


class WhenFull(enum.Enum):
    """What becomes of a message that finds its receiver's queue full.

    HOLD keeps a rendezvous (its data stays with the sender, which waits) and drops an eager message. REFUSE fails a
    rendezvous at its sender, and drops an eager message: there is no way to tell an eager sender. What is dropped is
    counted, and logged: a WARNING for each queue and minute.
    """

    HOLD = "hold"
    REFUSE = "refuse"


@attrs.frozen
class ActiveMessagesStatistics:
    """Figures about a queue of active messages.

    Attributes:
        waiting: messages in the queue.
        waiting_bytes: what they take of its ``max_bytes``: headers, eager data, and 128 bytes for each.
        dropped: eager messages that found the queue full.
        refused: rendezvous that did, and failed at their senders.
    """

    waiting: int
    waiting_bytes: int
    dropped: int
    refused: int


@attrs.define(eq=False, repr=False)
class ActiveMessages(metaclass=OpenedNotConstructed):
    """The messages of one id, see :meth:`Worker.open_active_messages`: a context manager and an async iterator.

    The iteration ends when it is closed.

    Cancellation: an iteration that is cancelled loses no message. Leaving the block closes it in any case.
    """

    _engine: Engine
    _id: int
    _max_size: int
    _handle: Any = None
    _key: int = 0
    _waiters: Waiters = attrs.field(factory=Waiters)
    _statistics: ActiveMessagesStatistics | None = None
    #: How many dropped messages the log has told of.
    _logged: int = 0

    def _open(self, max_messages: int, max_bytes: int, when_full: WhenFull) -> None:
        engine = self._engine
        self._key = engine.next_id()
        out = ffi.new("tu_am_queue_t **")
        refuse = when_full is WhenFull.REFUSE
        status = lib.tu_am_open(engine.handle, self._key, self._id, max_messages, max_bytes, refuse, out)
        if status != Status.OK:
            raise UCXError(status, f"opening active messages with id {self._id}")
        self._handle = out[0]
        engine.receivers.add_am_queue(self._key, self._id, self._announced, self._log_drops, self._waiters)
        engine.teardown.children[self._key] = self._close
        engine.teardown.on_broken[self._key] = self._waiters.fail
        live_handles.opened("active message queue")

    def _announced(self) -> None:
        while self._waiters and self._handle is not None:
            native = lib.tu_am_next(self._handle)
            if native == ffi.NULL:
                return
            self._waiters.give(self._wrap(native))

    def _log_drops(self) -> None:
        dropped = self.statistics().dropped
        new, self._logged = dropped - self._logged, dropped
        if new:
            logger.warning(
                "active messages with id %d: %d were dropped%s, because nobody took those that fill the queue "
                "(max_messages=, max_bytes=, when_full=)",
                self._id,
                new,
                "" if new == dropped else f" since the last such line, {dropped} in all",
            )

    def _wrap(self, native: Any) -> ActiveMessage:
        arrival = Arrival(self._engine, native)
        message: ActiveMessage = ActiveMessage._create(
            self._id, arrival.header, arrival.length, arrival.rendezvous, arrival, self._max_size
        )
        return message

    @enable_ki_protection
    def receive_nowait(self) -> ActiveMessage:
        """Returns the next message that has arrived.

        Raises:
            trio.WouldBlock: there is none.
            trio.ClosedResourceError, trio.BrokenResourceError: it, or its worker, was closed; the worker broke.
        """
        self._check()
        native = lib.tu_am_next(self._handle)
        if native == ffi.NULL:
            self._engine.reap()
            self._check()
            native = lib.tu_am_next(self._handle)
            if native == ffi.NULL:
                raise trio.WouldBlock
        return self._wrap(native)

    @enable_ki_protection
    async def receive(self) -> ActiveMessage:
        """Waits for the next message. Several tasks may wait: first come, first served.

        Cancellation: no message is lost.

        Raises:
            trio.ClosedResourceError: it, or its worker, was closed, perhaps meanwhile.
            trio.BrokenResourceError: the worker broke.
        """
        await trio.lowlevel.checkpoint_if_cancelled()
        self._check()
        if not self._waiters:
            try:
                message = self.receive_nowait()
            except trio.WouldBlock:
                pass
            else:
                await self._engine.waiting.schedule_point()
                return message
        received: ActiveMessage = await self._waiters.wait(self._engine.waiting.wait)
        return received

    def __aiter__(self) -> ActiveMessages:
        return self

    @enable_ki_protection
    async def __anext__(self) -> ActiveMessage:
        try:
            return await self.receive()
        except trio.ClosedResourceError:
            await trio.lowlevel.cancel_shielded_checkpoint()
            raise StopAsyncIteration from None

    def statistics(self) -> ActiveMessagesStatistics:
        """Returns what waits, and what found no room; after the end, as of then.

        Raises: nothing, also after the close.
        """
        if self._handle is not None:
            counts = ffi.new("tu_am_counts_t *")
            lib.tu_am_counts(self._handle, counts)
            self._statistics = ActiveMessagesStatistics(counts.messages, counts.bytes, counts.dropped, counts.refused)
        assert self._statistics is not None
        return self._statistics

    def _check(self) -> None:
        self._engine.check()
        if self._handle is None:
            raise trio.ClosedResourceError("these active messages were closed")

    def _close(self) -> None:
        if self._handle is None:
            return
        self._log_drops()
        engine = self._engine
        handle, self._handle = self._handle, None
        engine.receivers.remove_am_queue(self._key, self._id)
        engine.teardown.children.pop(self._key, None)
        engine.teardown.on_broken.pop(self._key, None)
        lib.tu_am_close(handle)
        live_handles.closed("active message queue")
        self._waiters.fail(trio.ClosedResourceError("these active messages were closed"))
        engine.reap()  # senders of rendezvous are answered

    def __enter__(self) -> ActiveMessages:
        return self

    @enable_ki_protection
    def __exit__(self, *exc_info: object) -> None:
        self._engine.run.check_thread()
        if self._engine.usable:
            self._close()

    @enable_ki_protection
    async def __aenter__(self) -> ActiveMessages:
        try:
            await trio.lowlevel.checkpoint()
        except BaseException:
            self.__exit__()
            raise
        return self

    @enable_ki_protection
    async def __aexit__(self, *exc_info: object) -> None:
        self.__exit__()
        if exc_info[0] is None:
            await trio.lowlevel.checkpoint()
        else:
            await trio.lowlevel.cancel_shielded_checkpoint()

    def __repr__(self) -> str:
        return f"<trio_ucx.ucp.ActiveMessages id {self._id}>"


def open_queue(
    engine: Engine, id: int, max_messages: int, max_bytes: int, max_message_size: int, when_full: WhenFull
) -> ActiveMessages:
    """:meth:`Worker.open_active_messages`."""
    engine.check()
    id = check_integer(id, "the id", 0, MAX_ID)
    max_messages = check_integer(max_messages, "max_messages", 1, 2**62)
    max_bytes = check_integer(max_bytes, "max_bytes", 1, 2**62)
    max_message_size = check_integer(max_message_size, "max_message_size", 0, 2**62)
    if not isinstance(when_full, WhenFull):
        raise TypeError(f"when_full must be a WhenFull, not {when_full!r}")
    engine.context._require(Feature.AM, "receiving active messages")
    taken = engine.receivers.am_ids.get(id)
    if taken is not None:
        raise ValueError(f"active messages with id {id} go to {taken} of this worker already")
    queue: ActiveMessages = ActiveMessages._create(engine, id, max_message_size)
    queue._open(max_messages, max_bytes, when_full)
    return queue
