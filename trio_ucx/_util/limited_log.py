"""Log lines about events of which many may come at once."""

from __future__ import annotations

import logging
import time
from collections.abc import Hashable

import attrs
import trio

from .contained import contained

logger = logging.getLogger("trio_ucx")

#: Seconds between two log lines about events of one kind.
LOG_INTERVAL = 60.0


@attrs.frozen
class _Unlogged:
    """The line about the last event of a kind, and how many others there were."""

    level: int
    line: str
    cause: BaseException | None
    others: int


class LimitedLog:
    """Logs the first event of a kind at once; then one line each LOG_INTERVAL: the last event, and how many others."""

    def __init__(self) -> None:
        self._last: dict[Hashable, float] = {}
        #: By kind, what was not logged yet.
        self._unlogged: dict[Hashable, _Unlogged] = {}

    def has_logged(self, kind: Hashable) -> bool:
        return kind in self._last

    def log(self, kind: Hashable, level: int, line: str, cause: BaseException | None = None) -> None:
        contained(self._log, kind, level, line, cause)  # a filter of the user's may raise

    def _log(self, kind: Hashable, level: int, line: str, cause: BaseException | None) -> None:
        now = time.monotonic()
        next_line = self._last.get(kind, -LOG_INTERVAL) + LOG_INTERVAL
        if now >= next_line:
            self._last[kind] = now
            logger.log(level, "%s", line, exc_info=cause)
            return
        before = self._unlogged.get(kind)
        if before is None:
            name = f"trio_ucx log of {kind}"
            trio.lowlevel.spawn_system_task(self._log_later, kind, next_line - now, name=name)
        self._unlogged[kind] = _Unlogged(level, line, cause, 0 if before is None else before.others + 1)

    async def _log_later(self, kind: Hashable, seconds: float) -> None:
        try:
            await trio.sleep(seconds)
        finally:  # also when the run ends
            last = self._unlogged.pop(kind)
            self._last[kind] = time.monotonic()
            more = f" (and {last.others} others since the last such line)" if last.others else ""
            contained(lambda: logger.log(last.level, "%s%s", last.line, more, exc_info=last.cause))
