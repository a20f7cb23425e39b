"""What a context's workers may be used for."""

from __future__ import annotations

import enum


class Feature(enum.IntFlag):
    """What a context's workers may be used for (``UCP_FEATURE_*``). WAKEUP is always on: Trio needs it."""

    TAG = 1 << 0
    RMA = 1 << 1
    AMO32 = 1 << 2
    AMO64 = 1 << 3
    WAKEUP = 1 << 4
    STREAM = 1 << 5
    AM = 1 << 6
    ALL = TAG | RMA | AMO32 | AMO64 | WAKEUP | STREAM | AM


#: Tag messages, which Connections need, and active messages, by which trio_ucx peers use remote memory.
DEFAULT_FEATURES = Feature.TAG | Feature.AM | Feature.WAKEUP
