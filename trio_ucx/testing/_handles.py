"""What is alive in UCX."""

from __future__ import annotations

import gc

from ..ucp import _operations


def live_handles() -> dict[str, int]:
    """The native handles that are alive in this process, by kind: workers, endpoints, listeners, connections, pidfds.

    Empty when everything was closed.
    """
    return _operations.live_handles.counts()


def assert_no_live_handles() -> None:
    """To be called after each test, outside ``trio.run``: everything native was closed.

    Raises:
        AssertionError: something was not; the message counts what, by kind.
    """
    gc.collect()  # what was dropped unclosed says so by a ResourceWarning, and is closed
    alive = live_handles()
    if alive:
        raise AssertionError("not closed: " + ", ".join(f"{count} {kind}(s)" for kind, count in sorted(alive.items())))
