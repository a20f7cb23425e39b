"""Differences between releases of UCX, and a warning about one that is newer than those that trio_ucx knows.

What the other modules here rely on was measured, or read in UCX's sources, for the releases from 1.13 on. A newer one
may have changed it. trio_ucx cannot detect such a change, so it warns once, at import. What depends on the release
takes the safe way: shared memory is used only between two sides of the same unknown release (:mod:`.address_layout`),
and a worker with operations that never end is left alone rather than destroyed (``_engine/draining.py``). A worker
address whose layout changed is refused by the parser, whatever the release.

It is needed as long as trio_ucx relies on what UCX does not promise. Test: ``tests/test_quirks.py``.
"""

from __future__ import annotations

import warnings

from ..._native import ucx

#: The newest release that was tried and read: its first two numbers.
NEWEST_KNOWN = (1, 22)

#: UCX of an earlier release (1.13 was tried) takes the options of the TCP transport from the environment only, accepts
#: options that it does not know, and fails with large messages over shared memory ("Invalid am_short_iov length").
WELL_CONFIGURABLE = (1, 17)


def is_known(release: tuple[int, ...]) -> bool:
    return release[:2] <= NEWEST_KNOWN


#: Whether a worker can be destroyed while operations on closed endpoints are pending: from 1.17 on
#: (1.13 aborts). Unknown releases count as harmful.
STUCK_OPERATIONS_ARE_HARMLESS = ucx.version >= (1, 17) and is_known(ucx.version)


def warn_if_unknown() -> None:
    """Called once, when the package is imported."""
    if not is_known(ucx.version):
        known = ".".join(map(str, NEWEST_KNOWN))
        warnings.warn(
            f"UCX {ucx.release} ({ucx.file}) is newer than {known}, the newest release that this trio_ucx knows. "
            "Use a newer trio_ucx, or an older UCX "
            f"(pip install 'libucx-cu12<{NEWEST_KNOWN[0]}.{NEWEST_KNOWN[1] + 1}')",
            RuntimeWarning,
            stacklevel=2,
        )
