"""What UCX still owes to peers that read our memory, when a worker closes.

Answers are no operations of ours. UCX crashes when it destroys a worker that has some left for the full shared-memory
queue of a peer that is gone or stopped, because it takes what a get's answer keeps in its request for the description
of a buffer (ucp_request_send_state_ff). As long as there are some, the worker cannot be armed.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import TYPE_CHECKING

from .._native import lib
from ._util import warn_resource

if TYPE_CHECKING:
    from ._engine import Engine


def send_answers(engine: Engine, timeout: float) -> Iterator[None]:
    """Progresses until there are none, yielding in between; after ``timeout`` the worker must not be destroyed."""
    start = time.monotonic()
    while engine.context.lent_memory and engine.turn(arm=True) != lib.TU_ARMED:
        if time.monotonic() > start + timeout:
            engine.unanswered = True
            warn_resource("a UCX worker was left alone: a peer that read its memory does not take the answer")
            return
        yield
        time.sleep(0.0002)
