"""What UCX still has to send when a worker closes, and would crash over when the worker is destroyed.

That is answers to peers that read our memory, which are no operations of ours: UCX takes what a get's answer keeps in
its request for the description of a buffer (ucp_request_send_state_ff). They are left when the shared-memory queue of a
peer that is gone or stopped is full; as long as they are, the worker cannot be armed.
"""

from __future__ import annotations

import time
from collections.abc import Iterator

from ..._native import lib
from .._util import warn_resource
from .engine import Engine


def send_answers(engine: Engine, timeout: float) -> Iterator[None]:
    """Progresses until there are none, yielding in between; after ``timeout`` the worker must not be destroyed."""
    if not engine.context.lent_memory:
        return
    start = time.monotonic()
    while engine.progress_and_deliver(arm=True) != lib.TU_ARMED:
        if time.monotonic() > start + timeout:
            engine.teardown.unanswered = True
            warn_resource(
                "a UCX worker was left alone: a peer that is not reading has not taken all replies to its requests"
            )
            return
        yield
        time.sleep(0.0002)
