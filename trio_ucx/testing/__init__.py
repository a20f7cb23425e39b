"""Helpers for tests of programs that use trio_ucx."""

from ..ucp import _operations
from ..ucp._util import publish as _publish

__all__ = ["live_handles"]


def live_handles() -> dict[str, int]:
    """The native handles that are alive in this process, by kind: workers, endpoints, listeners, connections, pidfds.

    Empty when everything was closed: assert that after each test.
    """
    return {kind: count for kind, count in _operations.live_handles.items() if count}


_publish(globals(), __name__)
