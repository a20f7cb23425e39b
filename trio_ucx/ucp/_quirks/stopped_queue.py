"""Notices that the queue through which a worker receives over shared memory has stopped.

All local peers of a worker write to one queue. A writer takes the next element, fills it, and marks it as filled. If it
is killed between the first step and the last, the reader waits for that element for ever: nothing arrives over shared
memory any more, and UCX tells nobody.

:class:`WatchedQueue` finds that out in two steps.

1. *Suspicion.* Whenever a peer's process may have died, it checks whether UCX can be armed. UCX refuses that while a
   queue contains something unread. A dead process writes nothing more, so one success proves that the queue has not
   stopped. That is the usual case, and costs next to nothing.
2. *Probe.* If arming fails for a while, there may be other reasons: heavy traffic, or sends to a peer that is stopped.
   Then a second worker in this process sends a message to each of the worker's queues. A message that arrives shows
   that its queue is read. If one does not arrive, its queue has stopped.

Both steps count little of the time between two checks of the worker, so a program that is busy or stopped does not take
its own slowness for a stopped queue. (A peer that is stopped in the middle of writing, while another one dies, is taken
for a dead one, because nothing distinguishes the two.)

A peer may be suspended in the middle of writing, and be killed after its endpoint was closed here. So its process is
watched until UCX can be armed once: that shows that the peer had finished writing.

When a queue has stopped, every endpoint over shared memory fails, and the worker is not used for new Connections
(``WorkerConnections.for_new_connection``); a handshake that is under way begins again with another worker. Endpoints
over other transports go on.

Report: "Shared memory: a killed writer stops the queue", in ucx-reports.md. Releases: all, 1.13 to 1.22. Not
needed any more when ``killed_writer.c`` there shows that messages still arrive. Test: ``tests/test_receive_queue.py``.
"""

from __future__ import annotations

import logging
import os
import random
import time
from collections.abc import Awaitable, Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from typing import Any

import trio

from ..._native import lib
from ..._util.contained import report
from ..._util.limits import RealTimeLimit
from ..._util.process import Process
from .._connecting import connect_worker
from .._context import Context
from .._engine.engine import Engine
from .._engine.lifetime import close_now, open_engine
from .._engine.posting import post_flush
from .._engine.receive_queue import ClosingEndpoint, ReceiveQueue
from .._engine.tag_dispatch import CONNECTION_BIT
from .._features import Feature
from .._status import Status, UCXError, broken
from .._tag import post_bytes_send
from .address_layout import SHARED_MEMORY

logger = logging.getLogger("trio_ucx")

#: Seconds between two checks.
_INTERVAL = 0.02
#: The longest interval while peers' processes are watched, which may be suspended for long.
_LONG_INTERVAL = 0.1
#: For so many seconds UCX cannot be armed before probes are sent.
_SUSPICION_TIME = 0.4
#: For so many seconds a probe may be on its way.
_PROBE_TIME = 1.0
#: How many seconds between two checks count at most for these times: it takes 14 checks to send probes, and 34 to give
#: them up.
_LONGEST_GAP = 0.03
#: Seconds between two rounds of probes, which block the program for some 10 ms. (There may be many suspicions while a
#: worker is never idle.)
_SPACING = 2.0


def uses_queue(core: ClosingEndpoint) -> bool:
    """True if an endpoint has a lane over shared memory; also if UCX cannot say (before 1.14)."""
    if core.handle is None:
        return False
    lanes = core.lanes()
    return lanes is None or not {lane.decode().partition("/")[0] for lane in lanes}.isdisjoint(SHARED_MEMORY)


def check_queue(engine: Engine, doing: str) -> None:
    """Refuses what may use a queue that has stopped. (An endpoint by socket address gets its lanes later.)

    Raises:
        trio.BrokenResourceError: it has stopped.
    """
    if engine.receive_queue.stopped:
        error = stopped_error()
        raise broken(f"{doing}: {error}", error)


class _Probe:
    """A message to one queue of a worker, from another worker of this process.

    A worker with Connections receives it like their messages. On another worker the program might receive the message:
    there the probe is a new endpoint, to which the worker's UCX must answer.
    """

    def __init__(self, engine: Engine, transport: str) -> None:
        self._target = engine
        self.arrived = False
        #: Whether there is an endpoint to which the target's UCX must answer.
        self._asks = False
        by_message = engine.tag_dispatch.claimed
        options = {**engine.context.config, "TLS": transport, "RESOLVE_REMOTE_EP_ID": "n" if by_message else "y"}
        context = Context._open(options, Feature.TAG | Feature.WAKEUP)
        try:
            self._engine = open_engine(context, tasks=False)
        except BaseException:
            context._close()
            raise
        self._engine.teardown.on_closed = context._close
        self._tag = self._sink() if by_message else 0
        engine.teardown.children[id(self)] = self.close
        try:
            self._asks = not by_message
            core = connect_worker(self._engine, engine.identity.address)
            core.check()
            self._operation = post_bytes_send(core, b"", self._tag << 32) if by_message else post_flush(core)
        except BaseException:
            self.close()
            raise
        self._flushed = not by_message and self._operation is None

    def _sink(self) -> int:
        sinks = self._target.tag_dispatch.sinks
        tag = 0
        while not tag or tag in sinks:
            tag = (CONNECTION_BIT >> 32) | random.SystemRandom().getrandbits(31)
        sinks[tag] = self
        return tag

    def packed_arrived(self, queue: int, count: int, length: int, data: Any) -> None:
        """The worker has received the probe's message."""
        self.arrived = True

    def message_arrived(self, queue: int, handle: int, length: int) -> None:
        self._target.tag_dispatch.discard(handle)
        self.arrived = True

    def link_broke(self, status: int) -> None:
        raise AssertionError("a probe has no link")

    def internal_error(self, error: BaseException) -> None:
        report("an internal error of trio_ucx, while a shared-memory queue was probed", error)

    def look(self) -> None:
        """Progresses the probe's worker: sends the message, or takes the answer."""
        self._engine.progress_and_deliver(arm=False)
        if not self._tag:
            self.arrived = self._flushed or (self._operation is not None and self._operation.outcome is not None)

    def close(self) -> None:
        """Closes the probe's worker; if its endpoint was not answered, only when the target is destroyed.

        UCX would crash if it read the request for that endpoint, and could not reach the probe's worker any more.
        """
        teardown = self._target.teardown
        teardown.children.pop(id(self), None)
        if self._tag:
            self._target.tag_dispatch.remove(self._tag)
        if self._asks and not self.arrived:
            teardown.at_end[id(self)] = lambda: close_now(self._engine)
        else:
            close_now(self._engine)


class WatchedQueue(ReceiveQueue):
    """Watches the queues of one worker."""

    def __init__(self, engine: Engine) -> None:
        super().__init__(engine.counters)
        self._engine = engine
        # With MM_ERROR_HANDLING=n no endpoint with error handling uses shared memory, so none could report a stop.
        kinds = [kind for kind in SHARED_MEMORY if kind in engine.identity.address.shared_memory_kinds]
        self._queues = kinds if engine.context._shared_memory_handles_errors else []
        #: The number of suspicions; and whether a task is checking.
        self._suspicions = 0
        self._checking = False
        #: The processes that may still be writing, though their endpoints were closed here; and whether a task looks
        #: when they cannot any more.
        self._suspects: set[Process] = set()
        self._watching = False
        self._next_probe = 0.0

    def suspect(self) -> None:
        self._suspicions += 1
        if not self._checking and self._queues and not self.stopped:
            self._checking = self._spawn(self._run, "receive queue")

    def endpoint_closing(self, core: ClosingEndpoint) -> None:
        if self._needs_watching(core.peer) and uses_queue(core):
            self._watch(core.peer)

    def may_be_writing(self, process: Process) -> None:
        if self._needs_watching(process):
            self._watch(process)

    def _needs_watching(self, process: Process) -> bool:
        return process not in self._suspects and bool(self._queues) and not self.stopped

    def _watch(self, process: Process) -> None:
        """Watches a process until it cannot be in the middle of writing."""
        try:
            watched = self._engine.peer_processes.watch(process, self, partial(self._ended, process))
        except OSError:  # it has ended, or cannot be watched just now
            self.suspect()
            return
        if not watched:
            return
        self._suspects.add(process)
        if not self._watching:
            self._watching = self._spawn(self._watch_suspects, "processes that may be writing")
            if not self._watching:
                self._forget(list(self._suspects))

    def _ended(self, process: Process) -> None:
        self._suspects.discard(process)
        self.suspect()

    def _spawn(self, function: Callable[[], Awaitable[None]], what: str) -> bool:
        """Starts a system task; False if Trio's run is over."""
        try:
            self._engine.run.spawn(function, f"trio_ucx {what} (efd {self._engine.efd})")
        except RuntimeError:
            return False
        return True

    async def _run(self) -> None:
        try:
            with _timer() as timer:
                await self._check(timer)
        finally:
            self._checking = False

    async def _watch_suspects(self) -> None:
        """Watches these processes until none of them can be in the middle of writing."""
        interval = _INTERVAL
        try:
            with _timer() as timer:
                while self._suspects and self._engine.usable and self._engine.broken is None:
                    watched = list(self._suspects)
                    await _sleep(timer, interval)
                    if self._engine.usable and self._armed():  # what was being written has arrived
                        self._forget(watched)
                    interval = min(2 * interval, _LONG_INTERVAL)
        finally:
            self._watching = False
            self._forget(list(self._suspects))

    def _forget(self, processes: Iterable[Process]) -> None:
        for process in processes:
            self._suspects.discard(process)
            self._engine.peer_processes.forget(process, self)

    async def _check(self, timer: int) -> None:
        """Returns when the queues are known to be read, when one is known to have stopped, or when the worker ends."""
        engine = self._engine
        limit = RealTimeLimit(_LONGEST_GAP)
        while True:
            await _sleep(timer, _INTERVAL)
            if not engine.usable or engine.broken is not None:
                return
            suspicions = self._suspicions
            if self._armed():
                if suspicions == self._suspicions:
                    return
                limit = RealTimeLimit(_LONGEST_GAP)
            elif limit.is_over(_SUSPICION_TIME) and time.monotonic() >= self._next_probe:
                verdict = await self._probe(timer)
                self._next_probe = time.monotonic() + _SPACING
                if verdict is False:
                    return self._stopped()
                if verdict and suspicions == self._suspicions:
                    return
                limit = RealTimeLimit(_LONGEST_GAP)

    def _armed(self) -> bool:
        """True if UCX can be armed."""
        self._engine.listening.serve()
        return self._engine.try_to_arm()

    async def _probe(self, timer: int) -> bool | None:
        """Returns True if messages arrive in all queues; None if the probes could not be sent."""
        engine = self._engine
        probes: list[_Probe] = []
        complete = True
        try:
            try:
                for transport in self._queues:
                    probes.append(_Probe(engine, transport))
            except (OSError, ValueError, RuntimeError, MemoryError, UCXError, trio.BrokenResourceError) as error:
                logger.warning("cannot probe the shared-memory queue of a worker: %s", error)
                complete = False  # those that were sent must be answered all the same: see _Probe.close
            limit = RealTimeLimit(_LONGEST_GAP)
            while True:
                engine.reap()
                for probe in probes:
                    probe.look()
                engine.reap()
                if all(probe.arrived for probe in probes):
                    return True if complete else None
                if limit.is_over(_PROBE_TIME):
                    return False
                await _sleep(timer, _INTERVAL)
                if not engine.usable or engine.broken is not None:
                    return None
        finally:
            for probe in probes:
                probe.close()

    def _stopped(self) -> None:
        engine = self._engine
        self.stopped = True
        self.counters["stopped_queues"] += 1
        error = stopped_error()
        failing = [core for core in engine.endpoints.values() if uses_queue(core)]
        logger.error(
            "a local peer was killed while it wrote to the shared-memory queue of a worker, which has stopped: "
            "%d endpoint(s) over shared memory fail, new connections use another worker",
            len(failing),
        )
        for core in failing:
            core.fail(error)


def stopped_error() -> UCXError:
    return UCXError(
        Status.IO_ERROR,
        "a local process was killed while it wrote to this worker's queue in shared memory, which all local peers "
        "share; nothing arrives there any more (connect again; a raw endpoint needs another worker)",
    )


@contextmanager
def _timer() -> Iterator[int]:
    """A timer of real time: a Trio deadline would pass at once with autojump_clock. -1: there is none."""
    timer = lib.tu_timer_create()
    try:
        yield timer
    finally:
        if timer >= 0:
            os.close(timer)


async def _sleep(timer: int, seconds: float) -> None:
    if timer < 0:  # no descriptor was left for a timer
        await trio.sleep(seconds)
        return
    lib.tu_timer_set(timer, int(seconds * 1e9), False)
    with suppress(trio.ClosedResourceError):
        await trio.lowlevel.wait_readable(timer)
