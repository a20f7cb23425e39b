"""Counts the native handles that are alive in this process, so that leaks show."""

from __future__ import annotations

import collections
import threading


class LiveHandles:
    """Native handles alive in this process, by kind; after everything is closed, none. Any thread may count."""

    def __init__(self) -> None:
        self._counts: collections.Counter[str] = collections.Counter()
        self._lock = threading.Lock()

    def opened(self, kind: str) -> None:
        with self._lock:
            self._counts[kind] += 1

    def closed(self, kind: str) -> None:
        with self._lock:
            self._counts[kind] -= 1

    def counts(self) -> dict[str, int]:
        """The number of handles that are alive, by kind, such as ``worker`` and ``endpoint``."""
        with self._lock:
            return {kind: count for kind, count in self._counts.items() if count}


live_handles = LiveHandles()
