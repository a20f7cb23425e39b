"""The life of an engine: it is opened, its tasks are started, and it is closed with everything it has.

The progress task is a system task: Trio cancels it when the main task is done. It then lets the closes that still go on
in the background finish (each has its own deadline) and closes the worker. Closing by force needs no progress task: it
is a plain function, which async generators that are finalised after the system tasks still can call.
"""

from __future__ import annotations

import errno
from collections.abc import Callable
from functools import partial
from typing import Any

import trio
from outcome import Error

from ..._native import ffi, lib
from ..._util.contained import contained
from ..._util.live_handles import live_handles
from .._attributes import native_name
from .._context import Context, with_chosen_options
from .._quirks import descriptors, sandboxes, shared_memory
from .._status import Status
from .draining import dispose, drain
from .engine import Engine, engines
from .operations import Operation, under_way
from .receive_queue import ReceiveQueue
from .waits import DEFAULT_SPIN

#: A drain has ended.
_DRAINED = object()


def open_engine(
    context: Context,
    name: str | None = None,
    client_id: int | None = None,
    *,
    spin: float = DEFAULT_SPIN,
    yield_interval: float = 0.0,
    receive_queue: Callable[[Engine], ReceiveQueue] = lambda engine: ReceiveQueue(engine.counters),
    tasks: bool = True,
) -> Engine:
    """Creates a worker (``ucp_worker_create``) and its engine.

    Args:
        receive_queue: makes the watch of its queue in shared memory.
        tasks: starts its system tasks. Without them, the caller makes it progress.

    Raises:
        MemoryError, OSError, UCXError: UCX has no memory, there are too few descriptors left, or UCX refuses.
    """
    with context._held() as native:
        handle = _create_worker(context, native, name, client_id)
        try:
            engine = Engine(context, handle, client_id, spin, yield_interval, receive_queue)
        except BaseException:
            lib.tu_worker_destroy(handle)
            raise
        live_handles.opened("worker")
        context._destroy_postponed()
        context._workers[engine] = partial(_close_with_context, engine)
    engines.add(engine)
    if tasks:
        progress_task = engine.progress_task
        engine.run.spawn(partial(_run, engine), f"trio_ucx progress (efd {engine.efd})")
        engine.run.spawn(progress_task.safety_net.run, f"trio_ucx safety net (efd {engine.efd})")
    return engine


def _create_worker(context: Context, native: Any, name: str | None, client_id: int | None) -> Any:
    """Returns UCX's worker."""
    doing = "opening a worker"
    descriptors.require(context._descriptors_per_worker, doing)
    descriptors.require_thread(doing)
    wake_folder = shared_memory.check(context._options_in_force)
    out = ffi.new("tu_worker_t **")
    lowest, highest = context._tcp_port_range
    ports = ffi.new("tu_port_range_t *", {"lowest": lowest, "highest": highest})
    status = lib.tu_worker_create(native, native_name(name), client_id or 0, ports, wake_folder, out)
    if ports.used_up:
        raise _no_free_port(context)
    if status != Status.OK:
        descriptors.require(context._descriptors_per_worker, doing)  # another thread may have taken the descriptors
        sandboxes.check_proc()
        creating = with_chosen_options("creating a worker", context.config)
        raise shared_memory.explain(status, creating, context._options_in_force)
    return out[0]


def _no_free_port(context: Context) -> OSError:
    lowest, highest = context._tcp_port_range
    devices = context.info_text().count(" -- tcp/")
    ports = "any port" if highest == 0 else f"TCP_PORT_RANGE={lowest}-{highest} (UCX_TCP_PORT_RANGE)"
    return OSError(
        errno.EADDRINUSE,
        f"no free port for UCX's TCP transport in {ports}. Each worker takes one for each network device, here "
        f"{devices}; isolate=True takes a worker for each connection. Close workers, or choose a wider range",
    )


async def _run(engine: Engine) -> None:
    """The progress task."""
    progress_task = engine.progress_task
    progress_task.stop = trio.CancelScope()
    try:
        with progress_task.stop:
            try:
                await progress_task.run()
            except trio.ClosedResourceError:
                pass  # the worker was closed while we waited
            except Exception as error:
                engine.internal_error(error)
            if engine.handle is not None:
                engine.listening.end()
                await trio.sleep_forever()  # broken: nothing moves any more
    finally:
        # The run ends (or the worker was closed, and nothing of this does anything).
        if engine.handle is not None and not engine.teardown.begun:
            with trio.CancelScope(shield=True):
                try:
                    await progress_task.run(ending=True)
                finally:
                    await close(engine)


async def close_after_background(*engines: Engine) -> None:
    """Waits, shielded, for the closes that go on in the background (each has its own deadline), then closes."""
    try:
        with trio.CancelScope(shield=True):
            for engine in engines:
                while engine.run.background and engine.usable and engine.broken is None and engine.progress_task.stop:
                    await engine.run.wait_background_ended()
            await close(*engines)
    finally:
        for engine in engines:
            close_now(engine)
    await trio.lowlevel.checkpoint()


async def close(*engines: Engine) -> None:
    """Closes everything by force and destroys the workers. Shielded; however many they are, the time is bounded."""
    draining = {engine: drain(engine) for engine in engines if _begin_close(engine)}
    try:
        while draining:
            # Not a checkpoint in a shielded scope: Trio raises KeyboardInterrupt there, too, and we would never finish.
            await trio.lowlevel.cancel_shielded_checkpoint()
            for engine, steps in list(draining.items()):
                if next(steps, _DRAINED) is _DRAINED:
                    del draining[engine]
                    _finish_close(engine)
    finally:
        for engine in draining:  # an exception was raised
            contained(_finish_close, engine)


def _close_with_context(engine: Engine) -> None:
    """The context is closed, in whatever thread."""
    if engine.usable:
        close_now(engine)


def close_now(engine: Engine) -> None:
    """Closes one engine as :func:`close` does, without a schedule point."""
    if _begin_close(engine):
        for _ in drain(engine):
            pass
        _finish_close(engine)


def _begin_close(engine: Engine) -> bool:
    if engine.handle is None or engine.teardown.begun:
        return False
    engine.teardown.begun = True
    engine.receivers.stream_watchers.fail(trio.ClosedResourceError("this worker was closed"))
    engine.peer_processes.close()
    engine.teardown.close_children()
    for endpoint in list(engine.endpoints.values()):
        contained(endpoint.close)
    for operation in list(engine.in_flight.values()):
        contained(_end, operation)
    return True


def _end(operation: Operation) -> None:
    operation.finish(Error(trio.ClosedResourceError("this worker was closed")))
    operation.detach()
    lib.tu_operation_cancel(operation.engine.handle, operation.id)


def _finish_close(engine: Engine) -> None:
    engine.teardown.end(engine.statistics())
    stuck = under_way(engine.in_flight.values())
    with engine.figures:
        handle, engine.handle = engine.handle, None
    engine.key_gate.handle = None
    engine.listening.end()
    engine.progress_task.close()
    live_handles.closed("worker")
    engines.discard(engine)
    dispose(engine, handle, stuck)
