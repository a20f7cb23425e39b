"""Counts and checks of the native handles that are alive."""

from __future__ import annotations

import gc

from ..ucp import _live_handles


def live_handles() -> dict[str, int]:
    """Counts the native handles that are alive in this process, by kind, such as ``worker`` and ``endpoint``.

    Empty when everything was closed.

    Raises: nothing.
    """
    return _live_handles.live_handles.counts()


def assert_no_live_handles() -> None:
    """Checks that everything native was closed. Call it after each test, outside ``trio.run``.

    Raises:
        AssertionError: something was not closed; the message says how many handles of each kind.
    """
    gc.collect()  # closes what was dropped unclosed, with a ResourceWarning
    alive = live_handles()
    if alive:
        raise AssertionError("not closed: " + ", ".join(f"{count} {kind}(s)" for kind, count in sorted(alive.items())))
