"""The link in C of one connection (``_native/link``): its handle, and its figures, which outlive it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from .._native import ffi, lib
from ..ucp import Status
from ..ucp._internal_api import Share, os_error_from_status


class QueueFigures(NamedTuple):
    """What is known of a tag queue: messages that nobody has taken, their bytes, those of them that may be with their
    sender, and the receives that wait.
    """

    number: int
    messages: int
    bytes: int
    with_sender: int
    waiting: int


class NativeLink:
    """Opens the link of a connection.

    Args:
        my_id, peer_id: the ids under which this side and the peer are written to.
        window, peer_window: bytes of unread messages that each side holds.
        threshold, peer_threshold: longer messages stay with their sender; 0: none do.

    Attributes:
        handle: ``tu_link_t``; None once it is closed.

    Raises:
        OSError: there is no memory for it.
    """

    __slots__ = ("_counts", "_lock", "_queue", "handle", "links", "window")

    def __init__(
        self, share: Share, my_id: int, peer_id: int, window: int, peer_window: int, threshold: int, peer_threshold: int
    ) -> None:
        self.links = share.engine.links
        self.window = window
        terms = ffi.new(
            "tu_link_terms_t *",
            {
                "id": my_id,
                "peer_id": peer_id,
                "window": window,
                "peer_window": peer_window,
                "threshold": threshold,
                "peer_threshold": peer_threshold,
                # UCX would keep a batch here until the peer receives it, or split it.
                "defers": not 0 < threshold <= lib.TU_LONGEST_BATCH,
            },
        )
        self.handle: Any = lib.tu_link_open(self.links.native, share.handle, terms)
        if self.handle == ffi.NULL:
            raise os_error_from_status(Status.NO_MEMORY, "opening a connection")
        self._counts = ffi.new("tu_link_counts_t *")
        self._lock = share.engine.figures
        self._queue = ffi.new("tu_queue_counts_t *")
        share.link = self

    @property
    def counts(self) -> Any:
        """Returns the figures, a ``tu_link_counts_t``: after the close, the last ones. Any thread may ask.

        Read them at once: the next call writes to the same place.
        """
        with self._lock:
            if self.handle is not None:
                lib.tu_link_count(self.handle, self._counts)
            return self._counts

    def queue(self, number: int) -> QueueFigures | None:
        """Returns the figures of a tag queue; None if there is none."""
        known = self.handle is not None and lib.tu_link_count_queue(self.handle, number, self._queue)
        return _figures(self._queue) if known else None

    def queues(self) -> list[QueueFigures]:
        """Returns the figures of all tag queues."""
        if self.handle is None:
            return []
        count = lib.tu_link_list(self.handle, ffi.NULL, 0)
        out = ffi.new("tu_queue_counts_t[]", count)
        lib.tu_link_list(self.handle, out, count)
        return [_figures(one) for one in out]

    def answers(self, *, receives_end: bool = False, drains: bool = False, sends_end: bool = False) -> None:
        """From now on receives end where no message is; with ``drains``, those outside conversations; sends end."""
        if self.handle is not None:
            lib.tu_link_answers(self.handle, receives_end, drains, sends_end)
            self.links.settle()

    def detach(self) -> None:
        """The endpoint goes, or has gone: nothing can be sent any more."""
        if self.handle is not None:
            lib.tu_link_detach(self.handle)

    def close(self) -> None:
        """Frees it. Nothing waits there any more."""
        with self._lock:
            _ = self.counts
            handle, self.handle = self.handle, None
            if handle is not None:
                lib.tu_link_close(handle)


def _figures(one: Any) -> QueueFigures:
    return QueueFigures(one.number, one.messages, one.bytes, one.with_sender, one.waiting)


Outlet = Callable[[int, bytes], int]


def divert(link: NativeLink, outlet: Outlet) -> object:
    """Calls ``outlet`` with a tag queue of the peer's and a message instead of sending that; it returns a verdict.

    For tests, and what stands for a faulty network. Keep what is returned as long as the link.
    """
    context = ffi.new_handle(outlet)
    lib.tu_link_divert(link.handle, lib.tu_python_outlet, context)
    return context


@ffi.def_extern(name="tu_python_outlet", error=Status.IO_ERROR)
def _call_outlet(context: Any, number: int, data: Any, length: int) -> int:
    outlet: Outlet = ffi.from_handle(context)
    return outlet(number, ffi.buffer(data, length)[:])
