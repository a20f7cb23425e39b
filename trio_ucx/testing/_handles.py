"""A check that no native handle is alive."""

from __future__ import annotations

import gc

from .._util.live_handles import live_handles


def assert_no_live_handles() -> None:
    """Checks that everything native was closed. Call it after each test, outside ``trio.run``.

    Raises:
        AssertionError: something was not closed; the message says how many handles of each kind.
    """
    gc.collect()  # closes what was dropped unclosed, with a ResourceWarning
    alive = live_handles.counts()
    if alive:
        raise AssertionError("not closed: " + ", ".join(f"{count} {kind}(s)" for kind, count in sorted(alive.items())))
