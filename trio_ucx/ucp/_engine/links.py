"""The links of one worker: what C code does for its Connections' messages (``_native/link``).

C code says that a *token* is due: its receive, or its send, may go on. :class:`WorkerLinks` tells that what waits with
the token. It also sends the batches of small messages, which wait for more until the thread is about to sleep.
"""

from __future__ import annotations

from collections.abc import Callable
from time import perf_counter
from typing import Any, Protocol

from ..._native import ffi, lib
from .tag_dispatch import TagDispatch

_MOST = 64
_BATCHES = lib.TU_NEWS_BATCHES


class Waits(Protocol):
    """What waits with a token."""

    def due(self) -> None:
        """The token is due."""

    def internal_error(self, error: BaseException) -> None:
        """An exception in our own code ends the connection. Never raises."""


class LinkingEngine(Protocol):
    """The part of the engine that links use."""

    handle: Any
    tag_dispatch: TagDispatch

    def submit(self) -> None:
        """Makes UCX begin what was posted and is pending."""

    def reap_soon(self) -> None:
        """Reaps in the next round of Trio's loop."""


class WorkerLinks:
    """All links of one worker.

    Args:
        worker: ``tu_worker_t``, or NULL.
        watch: makes the hook before Trio's waits look, which bounds how long batches wait (``progress.py``).

    Attributes:
        native: ``tu_links_t``.
        news: its first element is true when there is something to settle.
        waiting: what waits with a token.
        deferred: whether there may be batches; ``since``, since when.

    Raises:
        MemoryError: there is no memory for them.
    """

    def __init__(self, engine: LinkingEngine, worker: Any, watch: Callable[[], None]) -> None:
        self._engine = engine
        self._watch = watch
        self.native: Any = lib.tu_links_create(worker)
        if self.native == ffi.NULL:
            raise MemoryError("no memory for the links of a worker")
        self.news: Any = lib.tu_links_has_news(self.native)
        self.waiting: dict[Any, Waits] = {}
        self.deferred = False
        self.since = 0.0
        #: Where C code writes the first bytes of a message that is taken.
        self.out: Any = lib.tu_links_out(self.native)
        self._due = ffi.new("tu_token_t *[]", _MOST)
        self._status = ffi.new("int *")
        self._settling = False

    def settle(self) -> None:
        """Does what calls of C code have made necessary: to be called after those that may wake somebody, or send."""
        if self._settling or self.native is None:
            return  # the outer call goes on; or the worker was destroyed
        self._settling = True
        try:
            while (news := lib.tu_links_news(self.native)) & ~_BATCHES:
                self._do(news)
            if news:
                self.defer()
        finally:
            self._settling = False

    def _do(self, news: int) -> None:
        engine = self._engine
        if news & lib.TU_NEWS_DUE:
            for index in range(lib.tu_links_due(self.native, self._due, _MOST)):
                waits = self.waiting.get(self._due[index])
                if waits is not None:
                    try:
                        waits.due()
                    except BaseException as error:
                        waits.internal_error(error)
        if news & lib.TU_NEWS_DISCARDED:
            while handle := lib.tu_links_discarded(self.native):
                engine.tag_dispatch.discard(handle)
        if news & lib.TU_NEWS_BROKEN:
            while id := lib.tu_links_broken(self.native, self._status):
                sink = engine.tag_dispatch.sinks.get(id)
                if sink is not None:
                    sink.link_broke(self._status[0])
        if news & lib.TU_NEWS_POSTED:
            engine.submit()

    def defer(self) -> None:
        """Small messages were added to a batch."""
        if not self.deferred:
            self.deferred = True
            self.since = perf_counter()
            self._watch()

    def flush(self) -> None:
        """Sends all batches."""
        self.deferred = False
        if self._engine.handle is None:
            return
        lib.tu_links_flush(self.native)
        news = lib.tu_links_news(self.native)
        if news:
            self._flushed(news)

    def _flushed(self, news: int) -> None:
        """UCX has not taken all batches at once, or none any more."""
        if news & lib.TU_NEWS_BROKEN:
            self._engine.reap_soon()  # the caller may be the hook: tasks that go on now end Trio's wait
        self._settling = True
        try:
            self._do(news)
        finally:
            self._settling = False
        self.settle()

    @property
    def sending(self) -> bool:
        """True while UCX has frames or batches that it has not sent."""
        return bool(lib.tu_links_sending(self.native))

    def destroy(self) -> None:
        """The worker was destroyed."""
        native, self.native = self.native, None
        if native is not None:
            lib.tu_links_destroy(native)
