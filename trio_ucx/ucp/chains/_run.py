"""A run of a request chain, as Python sees it: what it is bound to, its operation, and what became of its requests."""

from __future__ import annotations

import os
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from functools import partial
from typing import Any, ClassVar, overload

import attrs
import trio
from outcome import Error, Outcome, Value

from ..._util.contained import ignoring_late_run
from ..._util.handles import OpenedNotConstructed
from ..._util.live_handles import live_handles
from .._endpoint import Endpoint
from .._engine.endpoint_core import Scope
from .._engine.engine import Engine
from .._engine.operations import Operation
from .._engine.progress import wait_timer
from .._memory.buffers import Pinned
from .._quirks.descriptors import opened
from .._requests import RequestCancelled
from .._rma.access_paths import AccessPath, Key, refusal
from .._rma.remote_memory import RemoteMemory
from .._status import Status
from ._errors import DependencyBoundsError, DependencyFalse, DependencyNotEvaluated, DependencyReferenceError
from ._expressions import ChainRequest
from ._library import ffi, lib

#: How requests stand (``tu_chain_report_t``), by their numbers; None: nobody knows any more.
Reports = Callable[[int], Any]

_GET, _ATOMIC, _FOLLOW = lib.TU_CHAIN_GET, lib.TU_CHAIN_ATOMIC, lib.TU_CHAIN_FOLLOW
_DONE, _NO_VALUE = lib.TU_CHAIN_DONE, lib.TU_CHAIN_NO_VALUE


class Skipped:
    """The result of a request that was skipped; the only object of this class is ``chains.SKIPPED``."""

    def __repr__(self) -> str:
        return "trio_ucx.ucp.chains.SKIPPED"


SKIPPED = Skipped()


@attrs.frozen
class Followed:
    """What :meth:`RequestChain.follow` ends with: the last node that was read.

    Attributes:
        data: the node.
        offset: where it is.
        steps: how many nodes were read.
    """

    data: bytes
    offset: int
    steps: int


class Buffers:
    """The user's memory that requests of a chain use."""

    def __init__(self) -> None:
        self._pins: list[Pinned] = []
        #: Those of a :class:`Local`, which others may use, too: released when nobody has them any more.
        self._locals: list[Pinned] = []

    def add(self, pins: Iterable[Pinned], locals: Iterable[Pinned]) -> None:
        self._pins += pins
        self._locals += locals

    def __bool__(self) -> bool:
        return bool(self._pins or self._locals)

    def release(self) -> None:
        for pins in self._pins:
            pins.release()
        self._pins, self._locals = [], []


@attrs.frozen
class CopiedReports:
    reports: Any
    #: What they refer to.
    results: Any

    def __call__(self, number: int) -> Any:
        return self.reports[number]


class NativeChain:
    """The handle of a chain, and the memory that it uses. The engine refers to it, so that it outlives a chain that the
    garbage collector collects; then the engine frees it."""

    def __init__(self, engine: Engine) -> None:
        out = ffi.new("tu_chain_t **")
        if lib.tu_chain_create(engine.handle, out) != Status.OK:
            raise MemoryError("no memory for a request chain")
        self.handle: Any = out[0]
        self.buffers = Buffers()
        self._outcomes: weakref.ref[Outcomes] | None = None
        #: Buffers that are reused: the report of one request, and the lengths of all results.
        self._one = ffi.new("tu_chain_report_t *")
        self._lengths = ffi.new("uint64_t[]", 16)
        self._engine = engine
        self._id = engine.next_id()
        engine.teardown.at_end[self._id] = self.forget
        live_handles.opened("request chain")

    def forget(self) -> None:
        """Forgets the native chain: the worker ends and frees it, or :meth:`free` does."""
        if self.handle is not None:
            self._keep_outcomes()
            if self.buffers and lib.tu_chain_busy(self.handle):
                self._engine.teardown.kept.append(self.buffers.release)
            else:
                self.buffers.release()
            self.handle = None
            self._engine.teardown.at_end.pop(self._id, None)
            live_handles.closed("request chain")

    def free(self, run: Run | None) -> None:
        """Frees the chain now, or when ``run`` has ended, as UCX may still use it."""
        handle, engine = self.handle, self._engine
        if handle is None or engine.handle is None:
            self.forget()
            return
        lib.tu_chain_cancel(handle)  # so that its outcomes say so
        if run is not None:
            run.buffers, self.buffers = self.buffers, Buffers()
            run.closed = handle
        self.forget()
        if run is None:
            lib.tu_chain_free(handle)
        engine.submit()

    def restart(self, state: int) -> None:
        if self.handle is not None:
            lib.tu_chain_restart(self.handle, state)

    @property
    def outcomes(self) -> Outcomes | None:
        """Returns the outcomes of the last run; None if there are none, or the program has dropped them."""
        return None if self._outcomes is None else self._outcomes()

    def new_outcomes(self, requests: Sequence[ChainRequest], targets: Iterable[Target]) -> Outcomes:
        self._keep_outcomes()
        outcomes: Outcomes = Outcomes._create(list(requests), list(targets), self, self.report)
        self._outcomes = weakref.ref(outcomes)
        return outcomes

    def report(self, number: int) -> Any:
        """Returns the state of a request in a report of its own, which does not change."""
        if self.handle is None:
            return None
        report = ffi.new("tu_chain_report_t *")
        lib.tu_chain_report(self.handle, number, report)
        return report

    def look(self, number: int) -> Any:
        """Returns the state of a request in the one shared report, which the next call overwrites."""
        if self.handle is None:
            return None
        lib.tu_chain_report(self.handle, number, self._one)
        return self._one

    @property
    def error_count(self) -> int:
        """Returns how many requests have failed in the last run, or were cancelled."""
        return int(lib.tu_chain_errors(self.handle)) if self.handle is not None else 0

    def results(self, count: int) -> tuple[list[int], bytes] | None:
        """The lengths of the first results, and their bytes (``tu_chain_values``); None if a request failed."""
        if self.handle is None:
            return None
        if len(self._lengths) < count:
            self._lengths = ffi.new("uint64_t[]", count)
        size = lib.tu_chain_values(self.handle, count, self._lengths, ffi.NULL)
        if size < 0:
            return None
        out = ffi.new("char[]", size)
        lib.tu_chain_values(self.handle, count, self._lengths, out)
        return memoryview(ffi.buffer(self._lengths, 8 * count)).cast("Q").tolist(), bytes(ffi.buffer(out, size))

    def _keep_outcomes(self) -> None:
        outcomes = self.outcomes
        if outcomes is not None and not outcomes._kept:
            count = self.error_count
            outcomes._keep(*self._all_reports(len(outcomes)), count)

    def _all_reports(self, count: int) -> tuple[Reports, bool]:
        """A copy of all reports, and whether any request has failed."""
        reports = ffi.new("tu_chain_report_t[]", count)
        failed = ffi.new("uint32_t *")
        results = ffi.new("char[]", lib.tu_chain_reports(self.handle, count, reports, ffi.NULL, failed))
        lib.tu_chain_reports(self.handle, count, reports, results, failed)
        return CopiedReports(reports, results), failed[0] > 0


@attrs.define(eq=False)
class Target:
    """Where requests of a chain go: an endpoint, or memory that it reaches."""

    index: int
    thing: Endpoint | RemoteMemory
    #: Whether they are atomics, which may have another access path than gets and puts.
    atomic: bool
    #: How its memory is reached.
    path: AccessPath | None = None
    _forget: Callable[[], None] = attrs.field(init=False)

    @property
    def scope(self) -> Scope:
        """The endpoint, or a Connection's share in it."""
        return self.thing._scope

    async def connect(self) -> None:
        """Waits until the connection is up, or has failed. No checkpoint if it is known to be."""
        self.path = None
        if isinstance(self.thing, Endpoint) or self.scope.problem() is not None:
            return
        with suppress(trio.BrokenResourceError, trio.ClosedResourceError):  # its requests say so
            find = self.thing._reach_for_atomics() if self.atomic else self.thing._reach(lib.TU_MEMORY_HOST)
            self.path = await find

    def bind(self, native: Any) -> Key | None:
        """Tells C where the requests to this target go in the next run; nowhere, if the connection is gone."""
        path = self.path
        core = self.scope.endpoint if path is None else path.core
        ended = path is None and isinstance(self.thing, RemoteMemory)  # while we looked for an access path
        if ended or core.problem() is not None or self.scope.problem() is not None:
            lib.tu_chain_bind(native, self.index, ffi.NULL, ffi.NULL, ffi.NULL)
            return None
        if path is None:
            lib.tu_chain_bind(native, self.index, core.handle, ffi.NULL, ffi.NULL)
            return None
        handle = ffi.NULL if path.key is None else path.key.handle
        lib.tu_chain_bind(native, self.index, core.handle, handle, path.native)
        return path.key

    def begun(self, native: Any) -> None:
        """The chain runs: its requests to this target end with a Connection."""
        self._forget = partial(lib.tu_chain_forget, native, self.index)
        self.scope.operations.at_end.add(self._forget)

    def over(self) -> None:
        """The run is over."""
        self.scope.operations.at_end.discard(self._forget)

    def error(self, status: int, doing: str) -> Exception:
        refused, scope = refusal(status, doing), self.scope
        error = refused if refused is not None and scope.problem() is None else scope.error_of(status, doing)
        scope.ending.note(error)
        return error


class Run(Operation):
    """A chain that runs: it has the chain, the keys that are held for it, and the buffers of a closed chain.

    A chain that was closed while it ran is freed when the run is over (``closed``): its targets refer to it until then.
    """

    __slots__ = ("_chain", "_keys", "_lost", "_targets", "buffers", "closed")
    engine: Engine

    def __init__(
        self, chain: Any, native: Any, targets: list[Target], keys: list[Key], engine: Engine, id: int
    ) -> None:
        self._chain = chain
        self._keys = keys
        self._targets = targets
        for target in targets:
            target.begun(native)
        self._lost = False
        self.buffers = Buffers()
        self.closed: Any = None
        super().__init__(engine, id, None, "running a request chain")

    def error(self, status: int) -> Exception:
        return trio.ClosedResourceError("this request chain was closed while it ran")

    def complete(self, status: int, length: int, tag: int) -> None:
        self._lost = length > 0  # so many requests UCX keeps, and will say nothing of
        super().complete(status, length, tag)

    def finish(self, result: Outcome[Any]) -> None:
        for target in self._targets:
            target.over()
        self._targets = []
        super().finish(result)
        if self._chain is not None:
            self._chain._stands_differently()

    def release(self) -> None:
        super().release()
        if self.closed is not None:
            lib.tu_chain_free(self.closed)
        chain, self._chain = self._chain, None
        if chain is not None:
            chain._stands_differently()
        if self._lost:
            self.engine.teardown.kept.append(self._let_go)
        else:
            self._let_go()

    def worker_destroyed(self) -> None:
        super().worker_destroyed()
        self._let_go()

    def _let_go(self) -> None:
        self.buffers.release()
        for key in self._keys:
            key.let_go()
        self._keys = []


class Timer:
    """Wakes a worker when a delayed request of a chain may begin."""

    #: Those of the open workers.
    of: ClassVar[dict[Engine, Timer]] = {}

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._fd = opened(lib.tu_timer_create(), "creating the timer of delayed retries")
        self._id = engine.next_id()
        lib.tu_chain_timer(engine.handle, self._fd)
        engine.teardown.at_end[self._id] = self._close
        Timer.of[engine] = self
        engine.run.spawn(self._run, f"trio_ucx chain timer (efd {engine.efd})")

    async def _run(self) -> None:
        while await wait_timer(self._engine, self._fd):
            self._engine.submit()

    def _close(self) -> None:
        self._engine.teardown.at_end.pop(self._id, None)
        Timer.of.pop(self._engine, None)
        lib.tu_chain_timer(self._engine.handle, -1)
        with ignoring_late_run():
            trio.lowlevel.notify_closing(self._fd)
        os.close(self._fd)


# ---- what became of the requests ----


def _value(request: ChainRequest, report: Any) -> Any:
    kind = request._kind
    if kind == lib.TU_CHAIN_GET:
        return report.length if request._into else bytes(ffi.buffer(report.result, report.length))
    if kind == lib.TU_CHAIN_ATOMIC:
        return int.from_bytes(ffi.buffer(report.result, report.length), "little")
    if kind == lib.TU_CHAIN_FOLLOW:
        return Followed(bytes(ffi.buffer(report.result, report.length)), report.offset, report.steps)
    return None


_WHY_OUT_OF_BOUNDS = {
    Status.OUT_OF_RANGE: "there is no choice with the computed index",
    Status.EXCEEDS_LIMIT: "the computed length is negative, or more than there is room for",
    Status.INVALID_ADDR: "the computed offset and the length reach beyond the memory",
    Status.INVALID_PARAM: "the computed address is no multiple of the atomic's size",
}


_WHY_NOT = {
    lib.TU_CHAIN_SKIPPED: "was skipped, or stopped the chain",
    lib.TU_CHAIN_FALSE: "had a false condition",
    lib.TU_CHAIN_NOT_EVALUATED: "was not run either",
    lib.TU_CHAIN_DONE: "had no result when it was needed",
}


def _error(request: ChainRequest, report: Any, targets: Sequence[Target], find: Reports) -> Exception:
    state, name = report.state, request.name
    if state == lib.TU_CHAIN_FALSE:
        tries = f", {report.retries + 1} times" if report.retries else ""
        return DependencyFalse(f"the condition of {name} was false{tries}")
    if state == lib.TU_CHAIN_NOT_EVALUATED:
        why = _WHY_NOT.get(find(report.culprit).state, "failed")
        return DependencyNotEvaluated(f"{name} was not run: request {report.culprit} {why}")
    if state == lib.TU_CHAIN_NO_RESULT:
        return DependencyReferenceError(f"{name} refers to more than the result of request {report.culprit} has")
    if state == lib.TU_CHAIN_OUT_OF_BOUNDS:
        return DependencyBoundsError(f"{name}: {_WHY_OUT_OF_BOUNDS[Status(report.status)]}")
    if state == lib.TU_CHAIN_CANCELLED:
        return RequestCancelled(f"the run was cancelled before {name} was begun, or begun again")
    target: Target = targets[report.target]
    return target.error(report.status, f"running {name}")


def _values(requests: Sequence[ChainRequest], lengths: Sequence[int], data: bytes, find: Reports) -> list[Any]:
    """The values of requests, none of which failed: see :meth:`NativeChain.results`."""
    values: list[Any] = []
    at = 0
    for request, length in zip(requests, lengths, strict=True):
        kind = request._kind
        if length == _NO_VALUE:
            values.append(SKIPPED)
        elif kind == _GET:
            if request._into:
                values.append(length)
            else:
                values.append(data[at : at + length])
                at += length
        elif kind == _ATOMIC:
            values.append(int.from_bytes(data[at : at + length], "little"))
            at += length
        elif kind == _FOLLOW:
            values.append(_value(request, find(request.id)))
            at += length
        else:
            values.append(None)
    return values


def _outcome(request: ChainRequest, targets: Sequence[Target], find: Reports) -> Outcome[Any] | None:
    report = find(request.id)
    if report is None or report.state in (lib.TU_CHAIN_WAITING, lib.TU_CHAIN_POSTED):
        return None
    if report.state == lib.TU_CHAIN_DONE:
        return Value(_value(request, report))
    if report.state == lib.TU_CHAIN_SKIPPED:
        return Value(SKIPPED)
    return Error(_error(request, report, targets, find))


@attrs.define(eq=False, repr=False)
class Outcomes(Sequence["Outcome[Any] | None"], metaclass=OpenedNotConstructed):
    """What became of the requests of a run, by their ids, or by themselves; a sequence.

    Each is an :class:`outcome.Value` or :class:`outcome.Error`; None while the request is in flight, which after a run
    that was cancelled may be for a while yet.

    Values: of a get its bytes (their number, if it went ``into`` a buffer); of an atomic what was there before,
    unsigned; of follow a :class:`Followed`; of all others None. Of what was skipped, ``chains.SKIPPED``.
    """

    _requests: list[ChainRequest]
    _targets: Sequence[Target]
    #: The chain, as long as these are its latest outcomes; then copies of the reports, and the number of errors.
    _native: NativeChain | None
    _find: Reports
    _error_count: int = 0
    #: Errors that depend on what is known of the connection, once the reports are no longer the chain's.
    _errors: dict[int, BaseException] = attrs.field(factory=dict)
    _kept: bool = False

    def _keep(self, find: Reports, failed: bool, error_count: int) -> None:
        """Reads the reports from a copy from now on: the chain is about to overwrite its own."""
        self._find, self._kept = find, True
        self._native, self._error_count = None, error_count
        for number in range(len(self) if failed else 0):
            outcome = self._get(number)
            if isinstance(outcome, Error):
                self._errors[number] = outcome.error

    @property
    def error_count(self) -> int:
        """Returns how many requests have failed, or were not run; 0 if no completed request has failed.

        C counts them while the chain runs, so reading this takes as long for a large chain as for a small one.
        """
        return self._error_count if self._native is None else self._native.error_count

    def value(self, request: int | ChainRequest) -> Any:
        """The value of one request. Cheaper than ``outcomes[request].unwrap()``, and can be called again.

        Raises:
            Exception: its error, if it failed; :exc:`.RequestCancelled` if it is in flight after a run was cancelled.
            DependencyReferenceError: it is not of this run.
            IndexError: there is no request with this id.
        """
        number = self._number(request)
        if self._native is not None:
            report = self._native.look(number)
            if report is not None and report.state == _DONE:
                return _value(self._requests[number], report)
        outcome = self._get(number)
        if outcome is None:
            raise RequestCancelled("this request is in flight")
        if isinstance(outcome, Error):
            raise outcome.error
        assert isinstance(outcome, Value)
        return outcome.value

    def values(self) -> list[Any]:
        """The values of all.

        Raises:
            ExceptionGroup: of the errors of those that failed, or whose run was cancelled.
        """
        found = self._native.results(len(self._requests)) if self._native is not None else None
        if found is not None:
            return _values(self._requests, *found, self._find)
        outcomes = list(self)
        errors = [outcome.error for outcome in outcomes if isinstance(outcome, Error)]
        errors += [RequestCancelled("this request is in flight") for outcome in outcomes if outcome is None]
        if errors:
            raise BaseExceptionGroup("requests of a chain failed", errors)
        return [outcome.value for outcome in outcomes if isinstance(outcome, Value)]

    def _get(self, number: int) -> Outcome[Any] | None:
        error = self._errors.get(number)
        return Error(error) if error is not None else _outcome(self._requests[number], self._targets, self._find)

    @overload
    def __getitem__(self, index: int | ChainRequest) -> Outcome[Any] | None: ...
    @overload
    def __getitem__(self, index: slice) -> list[Outcome[Any] | None]: ...
    def __getitem__(self, index: Any) -> Any:
        if isinstance(index, slice):
            return [self._get(number) for number in range(len(self._requests))[index]]
        return self._get(self._number(index))

    def _number(self, request: Any) -> int:
        if hasattr(request, "__index__"):
            number: int = range(len(self._requests))[request]
            return number
        number = getattr(request, "id", -1)
        if (
            not isinstance(number, int)
            or not 0 <= number < len(self._requests)
            or self._requests[number] is not request
        ):
            raise DependencyReferenceError("this request is not of this run")
        return number

    def __len__(self) -> int:
        return len(self._requests)

    def __iter__(self) -> Iterator[Outcome[Any] | None]:
        return (self._get(number) for number in range(len(self._requests)))

    def __repr__(self) -> str:
        return f"<trio_ucx.ucp.chains.Outcomes {list(self)!r}>"
