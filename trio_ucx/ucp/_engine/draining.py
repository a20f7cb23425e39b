"""Drains a worker that is being closed, and destroys it, or leaves it alone where UCX could crash."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

from ..._native import lib
from ..._util.contained import contained
from ..._util.handles import warn_resource
from ..._util.limits import RealTimeLimit
from .._memory.registered import unmap_unused
from .._quirks.releases import STUCK_OPERATIONS_ARE_HARMLESS
from .engine import Engine
from .operations import Operation

#: How long closing a worker waits for UCX to let go of what is in flight.
DRAIN_TIMEOUT = 2.0
#: The same when every endpoint is closed: what is still pending then will hardly end.
STUCK_TIMEOUT = 0.1
#: How many seconds between two checks count at most for the time limits.
_LONGEST_GAP = 0.01

#: Workers that were left alone, and everything that UCX may still look at.
left_alone: list[Any] = []


def _uses_memory(engine: Engine, handle: Any) -> bool:
    """True if UCX may still use the memory of operations, or holds registrations of it."""
    return bool(engine.in_flight or engine.teardown.unrecorded or lib.tu_long_lingers(handle))


def drain(engine: Engine) -> Iterator[None]:
    """Progresses until nothing is in flight, yielding in between; gives up after DRAIN_TIMEOUT, in real time."""
    limit = RealTimeLimit(_LONGEST_GAP)
    engine.progress_and_deliver(arm=False)
    while _uses_memory(engine, engine.handle):
        if limit.is_over(DRAIN_TIMEOUT if engine.endpoints else STUCK_TIMEOUT):
            break
        yield
        time.sleep(0.0002)
        engine.progress_and_deliver(arm=False)
    engine.tag_dispatch.discard_again()
    # Then what nobody asked for. (Messages of Connections are taken whenever the worker is progressed.)
    tags = engine.tag_dispatch
    while tags.has_tags and (message := lib.tu_tag_probe(engine.handle, 0, 0, True, tags.received)):
        engine.tag_dispatch.discard(message)
        if limit.is_over(DRAIN_TIMEOUT):
            break
    yield
    engine.progress_and_deliver(arm=False)
    yield from _send_answers(engine)


def _send_answers(engine: Engine) -> Iterator[None]:
    """Sends what UCX still has to send, and would crash over when the worker is destroyed.

    That is answers to peers that read our memory, which are no operations of ours: UCX takes what a get's answer keeps
    in its request for the description of a buffer (ucp_request_send_state_ff). They are left when the shared-memory
    queue of a peer that is gone or stopped is full; as long as they are, the worker cannot be armed, and must not be
    destroyed.
    """
    if not engine.context._exposed_memory:
        return
    limit = RealTimeLimit(_LONGEST_GAP)
    while engine.progress_and_deliver(arm=True) != lib.TU_ARMED:
        if limit.is_over(STUCK_TIMEOUT):
            engine.teardown.unanswered = True
            warn_resource(
                "a UCX worker was left alone: a peer that is not reading has not taken all replies to its requests"
            )
            return
        yield
        time.sleep(0.0002)


def dispose(engine: Engine, handle: Any, stuck: str) -> None:
    """Destroys a worker that was closed, or leaves it alone.

    Args:
        handle: UCX's, which the engine has forgotten.
        stuck: what is still under way, in words.
    """
    uses_memory = _uses_memory(engine, handle)
    if engine.teardown.unanswered or engine.teardown.unreleased:
        _leave_alone(engine, handle)  # UCX has unsent answers, or a view of its memory is in use; a warning was given
    elif uses_memory and (engine.endpoints or not STUCK_OPERATIONS_ARE_HARMLESS):
        _leave_alone(engine, handle)  # UCX may still touch those buffers: keep them for ever
        warn_resource(f"a UCX worker was left alone, {len(engine.in_flight)} operation(s) did not end{stuck}")
    elif uses_memory and (wait := _registrations_of_others(engine)):
        _postpone(engine, handle, wait)
    else:
        _destroy(engine, handle)
    engine.context._destroy_postponed()
    unmap_unused()


def _destroy(engine: Engine, handle: Any) -> None:
    # A receive whose sender died in the middle of a message never completes, nor does a send to the full shared-memory
    # queue of a receiver that died. With every endpoint closed, nothing but this worker's own progress could still
    # touch their buffers, and that ends here.
    lib.tu_worker_destroy(handle)
    engine.links.destroy()
    operations = list(engine.in_flight.values())
    engine.in_flight.clear()
    for operation in operations:
        contained(operation.worker_destroyed)
    engine.teardown.release_kept()
    engine.context._worker_destroyed(engine)
    if engine.teardown.on_closed is not None:
        engine.teardown.on_closed()


def _registrations_of_others(engine: Engine) -> list[Callable[[], bool]]:
    """Returns functions that say whether one of the context's other workers still has memory registered."""
    held: list[Callable[[], bool]] = []
    for other in list(engine.context._workers):
        if other.handle is not None:
            held += [partial(_in_flight, one) for one in list(other.in_flight.values()) if one.pins is not None]
            if _lingers(other):
                held.append(partial(_lingers, other))
    return held


def _in_flight(operation: Operation) -> bool:
    return operation.id in operation.engine.in_flight


def _lingers(engine: Engine) -> bool:
    return engine.handle is not None and lib.tu_long_lingers(engine.handle)


def _postpone(engine: Engine, handle: Any, held: list[Callable[[], bool]]) -> None:
    """Destroys a worker only when none of these holds registrations of memory any more.

    The workers of a context share the registrations of memory. When an endpoint is closed, UCX ends its large
    transfers only after everybody else has ended theirs of the same buffer; then it takes the worker's memory, and
    crashes if the worker was destroyed (ucx-reports.md: "A closed endpoint's send ends after its worker").
    """

    def destroy_if_possible() -> bool:
        if any(still() for still in held):
            return False
        while lib.tu_worker_progress(handle):
            pass
        _destroy(engine, handle)
        return True

    engine.context._postponed.append(destroy_if_possible)


def _leave_alone(engine: Engine, handle: Any) -> None:
    left_alone.append((engine, handle))
    lib.tu_worker_stop_serving(handle)
