"""Receivers: what takes the arrivals that belong to no operation and to no Connection."""

from __future__ import annotations

from collections.abc import Callable

from ..._native import lib
from .pending import Waiters


class Receivers:
    """What takes connection requests, active messages and pieces of streams at one worker.

    Args:
        serves_memory: whether the library itself uses an id of active messages.

    Attributes:
        listeners: takes the connection requests of a listener id.
        am_ids: ids of active messages that are taken, and by what.
        am_queues: called when a queue of active messages is no longer empty, by its key.
        stream_watchers: tasks that wait for a piece of any stream.
    """

    def __init__(self, *, serves_memory: bool) -> None:
        self.listeners: dict[int, Callable[[int], None]] = {}
        self.am_ids: dict[int, str] = {lib.TU_REMOTE_AM_ID: "the library itself"} if serves_memory else {}
        self.am_queues: dict[int, Callable[[], None]] = {}
        self._am_waiters: dict[int, Waiters] = {}
        self.stream_watchers = Waiters()

    def add_am_queue(self, key: int, id: int, announce: Callable[[], None], waiters: Waiters) -> None:
        """A queue takes the active messages with an id; ``waiters`` are the tasks that wait for one."""
        self.am_ids[id] = "another open_active_messages"
        self.am_queues[key] = announce
        self._am_waiters[key] = waiters

    def remove_am_queue(self, key: int, id: int) -> None:
        """It takes them no more."""
        self.am_queues.pop(key, None)
        self._am_waiters.pop(key, None)
        self.am_ids.pop(id, None)

    def awaited(self) -> bool:
        """Whether a task waits for an arrival. (Streams may be awaited one by one, too.)"""
        return bool(self.stream_watchers) or any(self._am_waiters.values())
