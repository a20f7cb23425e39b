"""The end of a worker: it waits for what is in flight, and is destroyed, or left alone where that would do harm."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

from ..._native import lib
from .._contained import contained
from .._memory.registered import unmap_unused
from .._quirks.releases import STUCK_OPERATIONS_ARE_HARMLESS
from .._util import warn_resource
from .answers import send_answers
from .engine import Engine, engines
from .operations import Operation

#: How long closing a worker waits for UCX to let go of what is in flight.
DRAIN_TIMEOUT = 2.0
#: The same when every endpoint is closed: what is still pending then will hardly end.
STUCK_TIMEOUT = 0.1

#: Workers that were left alone, and everything that UCX may still look at.
left_alone: list[Any] = []


def drain(engine: Engine) -> Iterator[None]:
    """Progresses until nothing is in flight, yielding in between; gives up after DRAIN_TIMEOUT of real time."""
    start = time.monotonic()
    engine.progress_and_deliver(arm=False)
    while engine.uses_memory and time.monotonic() < start + (DRAIN_TIMEOUT if engine.endpoints else STUCK_TIMEOUT):
        yield
        time.sleep(0.0002)
        engine.progress_and_deliver(arm=False)
    engine.tag_dispatch.discard_again()
    # Then what nobody asked for. (Messages of Connections are taken whenever the worker is progressed.)
    while engine.tags and (message := lib.tu_tag_probe(engine.handle, 0, 0, True, engine.tag_dispatch.received)):
        engine.tag_dispatch.discard(message)
        if time.monotonic() > start + DRAIN_TIMEOUT:
            break
    yield
    engine.progress_and_deliver(arm=False)
    yield from send_answers(engine, STUCK_TIMEOUT)


def dispose(engine: Engine, handle: Any, stuck: str) -> None:
    """Destroys a worker that was closed, or leaves it alone.

    Args:
        handle: UCX's, which the engine has forgotten.
        stuck: what is still under way, in words.
    """
    if engine.teardown.unanswered or engine.teardown.unreleased:
        _leave_alone(engine, handle)  # a view of UCX's memory is still in use; a warning was given
    elif engine.uses_memory and (engine.endpoints or not STUCK_OPERATIONS_ARE_HARMLESS):
        _leave_alone(engine, handle)  # UCX may still touch those buffers: keep them for ever
        warn_resource(f"a UCX worker was left alone, {len(engine.in_flight)} operation(s) did not end{stuck}")
    elif engine.uses_memory and (others := _operations_of_others(engine)):
        _postpone(engine, handle, others)
    else:
        _destroy(engine, handle)
    engine.context.destroy_postponed()
    unmap_unused()


def _destroy(engine: Engine, handle: Any) -> None:
    # A receive whose sender died in the middle of a message never completes, nor does a send to the full shared-memory
    # queue of a receiver that died. With every endpoint closed, nothing but this worker's own progress could still
    # touch their buffers, and that ends here.
    lib.tu_worker_destroy(handle)
    operations = list(engine.in_flight.values())
    engine.in_flight.clear()
    for operation in operations:
        contained(operation.worker_destroyed)
    engine.teardown.release_kept()
    engine.context._worker_destroyed(engine)
    if engine.teardown.on_closed is not None:
        engine.teardown.on_closed()


def _operations_of_others(engine: Engine) -> list[Operation]:
    """The operations in flight at the context's other workers."""
    others = [other for other in list(engines) if other.context is engine.context and other.handle is not None]
    return [operation for other in others for operation in list(other.in_flight.values()) if operation.pins is not None]


def _postpone(engine: Engine, handle: Any, others: list[Operation]) -> None:
    """Destroys a worker only when these operations have ended.

    The workers of a context share the registrations of memory. When an endpoint is closed, UCX ends its large
    transfers only after everybody else has ended theirs of the same buffer; then it takes the worker's memory, and
    crashes if the worker was destroyed (docs/ucx-reports.md: "A closed endpoint's send ends after its worker").
    """

    def destroy_if_possible() -> bool:
        if any(operation.id in operation.engine.in_flight for operation in others):
            return False
        while lib.tu_worker_progress(handle):
            pass
        _destroy(engine, handle)
        return True

    engine.context.postponed.append(destroy_if_possible)


def _leave_alone(engine: Engine, handle: Any) -> None:
    left_alone.append((engine, handle))
    lib.tu_worker_stop_serving(handle)
