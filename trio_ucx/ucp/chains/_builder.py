"""How a request of a chain comes from what its user says to what C runs: references, checks, native descriptions."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any, Literal, TypedDict

import attrs
import trio

from ..._util.arguments import check_integer, check_timeout
from ..._util.handles import ClosedOnExit, OpenedNotConstructed
from .._endpoint import Endpoint
from .._engine.engine import Engine
from .._engine.posting import check_reaches
from .._memory.buffers import Contiguous, Pinned
from .._memory.registered import Access
from .._rma.remote_memory import RemoteMemory
from .._status import Status, UCXError
from ._errors import DependencyReferenceError, NoDependencyResource
from ._expressions import (
    UNLIMITED,
    ChainRequest,
    Condition,
    Expression,
    Integer,
    Local,
    ResultSlice,
    local,
    pinned_memory,
)
from ._library import ffi, lib
from ._run import NativeChain, Target, Timer

#: Terms of conditions and arguments that a chain has room for, for each request of its capacity.
TERMS_EACH = 16

OnFalse = Literal["error", "skip", "stop"]
_ON_FALSE = {"error": lib.TU_FALSE_ERROR, "skip": lib.TU_FALSE_SKIP, "stop": lib.TU_FALSE_STOP}


def _several(requests: Any) -> Any:
    """Returns what can be gone through more than once."""
    return tuple(requests) if isinstance(requests, Iterator) else requests


@attrs.frozen(eq=False)
class Retry:
    """What a false condition may do first: try again.

    Attributes:
        times: how often, at most.
        again: the requests to run again before, one after the other: those whose results the condition looks at. Others
            that depend on them and have not begun wait for that.
        delay: seconds before each.
        then: ``"error"``, ``"skip"`` or ``"stop"``: what happens when it is still false.
    """

    times: int
    again: ChainRequest | int | Iterable[ChainRequest | int] = attrs.field(default=(), converter=_several)
    delay: float = 0.0
    then: OnFalse = "error"


class CheckOptions(TypedDict, total=False):
    on_false: OnFalse | Retry
    after: ChainRequest | int | Iterable[ChainRequest | int]


class RequestOptions(CheckOptions, total=False):
    """The options of all requests: see :class:`RequestChain`."""

    when: Condition | None


@attrs.frozen(eq=False)
class Choice:
    """One of several endpoints, or of several remote memories: by :meth:`.RequestChain.choose`."""

    index: Integer
    options: tuple[Any, ...]


#: What a request writes or sends: a buffer, what is computed when the chain runs, or a list or tuple of such parts.
Part = Contiguous | ResultSlice | Integer
Payload = Part | Sequence[Part]


def argument(value: Integer | int, name: str, low: int = 0, high: int = UNLIMITED) -> Integer | int:
    return value if isinstance(value, Integer) else check_integer(value, name, low, high)


def known_value(value: Integer | int) -> int | None:
    """Returns the value; None if it is computed."""
    return None if isinstance(value, Integer) else value


def payload(data: Payload) -> list[ResultSlice | Pinned]:
    parts: list[ResultSlice | Pinned] = []
    try:
        for part in data if isinstance(data, (tuple, list)) else (data,):
            if isinstance(part, Integer):
                part = part.pack()
            parts.append(part if isinstance(part, ResultSlice) else Pinned(part))
            if isinstance(parts[-1], Pinned):
                pinned_memory(parts[-1])
    except BaseException:
        release(parts)
        raise
    return parts


def release(parts: Iterable[ResultSlice | Pinned]) -> None:
    for part in parts:
        if isinstance(part, Pinned):
            part.release()


def sent_length(length: Integer | int | None, parts: Iterable[ResultSlice | Pinned]) -> Integer | int:
    """Returns how much of a payload is sent."""
    whole = sum(part.length if isinstance(part, ResultSlice) else part.size for part in parts)
    return argument(whole if length is None else length, "the length", 0, whole)


class Draft:
    """A request that is being described, as C takes it.

    Args:
        size: bytes of its result, at most; None: it has none.
        to: where it goes; None: nowhere.

    Attributes:
        request: the ``tu_chain_request_t``.
        computed: what depends on a result, or on local memory.
        term_count: how many terms the request has.
        pins: the buffers that it uses. They are the caller's until the request is added.
        into: the one for its result.
    """

    __slots__ = ("_keep", "atomic", "computed", "into", "name", "pins", "request", "size", "term_count", "to")

    def __init__(
        self,
        kind: int,
        name: str,
        to: Endpoint | RemoteMemory | Choice | None = None,
        *,
        size: int | None = None,
        atomic: bool = False,
    ) -> None:
        self.name = name
        self.to = to
        self.size = size
        self.atomic = atomic
        self.request = request = ffi.new("tu_chain_request_t *")
        request.kind = kind
        if size is not None:
            request.size = size
        self.computed: list[Expression | ResultSlice] = []
        self.term_count = 0
        self.pins: list[Pinned] = []
        self.into: Pinned | None = None
        #: What the request points to, until C has copied it.
        self._keep: list[Any] = []

    def set(self, name: str, value: Expression | int) -> None:
        """Sets a ``tu_terms_t`` of the request."""
        self._put(getattr(self.request, name), value)
        if isinstance(value, Expression):
            self.computed.append(value)

    def set_numbers(self, name: str, numbers: Sequence[int]) -> None:
        """Sets a list of numbers."""
        if numbers:
            setattr(self.request, name, self._new("uint32_t[]", numbers))
            setattr(self.request, f"{name}_count", len(numbers))

    def set_header(self, data: bytes) -> None:
        if data:
            self.request.header = self._new("char[]", data)
            self.request.header_length = len(data)

    def set_into(self, pins: Pinned) -> None:
        """The result goes to a buffer of the user's."""
        self.request.into, _, self.request.memory = pinned_memory(pins)
        self.into = pins
        self.pins.append(pins)

    def set_parts(self, parts: list[ResultSlice | Pinned]) -> None:
        """Sets the payload."""
        if not parts:
            return
        request, host = self.request, lib.TU_MEMORY_HOST
        request.parts, request.part_count, request.memory = self._new("tu_part_t[]", len(parts)), len(parts), host
        for native, part in zip(request.parts[0 : len(parts)], parts, strict=True):
            if isinstance(part, Pinned):
                native.kind = lib.TU_PART_MEMORY
                native.address, native.length, memory = pinned_memory(part)
                self.pins.append(part)
                if len(parts) == 1:
                    request.memory = memory
                elif memory > host:
                    raise TypeError("a payload of several parts takes host memory only")
            else:
                native.kind, native.offset, native.length = part._kind, part._offset, part.length
                native.request = 0 if part._request is None else part._request.id
                native.big = part._big
                self.computed.append(part)
                if part._value is not None:
                    self._put(native.value, part._value)

    def _put(self, target: Any, value: Expression | int) -> None:
        if isinstance(value, Expression):
            target.terms = self._new("tu_term_t[]", value._terms)
            target.count = len(value._terms)
            self.term_count += len(value._terms)
        else:
            target.value = value % 2**64

    def _new(self, kind: str, contents: Any) -> Any:
        self._keep.append(ffi.new(kind, contents))
        return self._keep[-1]


@attrs.define(eq=False, repr=False)
class ChainBuilder(ClosedOnExit, metaclass=OpenedNotConstructed):
    """What a :class:`RequestChain` consists of."""

    _engine: Engine
    _native: NativeChain
    capacity: int
    ordered: bool
    _requests: list[ChainRequest] = attrs.field(factory=list)
    _targets: dict[tuple[int, bool], Target] = attrs.field(factory=dict)
    _terms: int = 0
    _generation: int = 0
    #: The last request that may stop the chain.
    _barrier: int | None = None
    #: One that is being described, and may refer to itself.
    _draft: ChainRequest | None = None
    #: Whether a run waits for connections, before C knows of it.
    _starting: bool = False

    # ---- references ----

    def local(self, buffer: Contiguous) -> Local:
        """Memory of ours to take integers from, as from a result: what is in it when the chain gets there.

        So a chain can be run again with other numbers. The buffer, in host memory, stays pinned as long as the chain
        refers to it.

        Raises:
            TypeError, ValueError: not a contiguous buffer in host memory.
        """
        return local(buffer)

    def choose(self, index: Integer, options: Sequence[Any]) -> Choice:
        """Chooses one of several remote memories, or endpoints, by a computed index, for a request's first argument.

        An index that no option has makes the request end with :exc:`DependencyBoundsError`.

        Raises:
            TypeError, ValueError: the index is not computed from a result; there are no options.
        """
        options = tuple(options)
        if not isinstance(index, Integer):
            raise TypeError(f"the index must be computed from a result, not {type(index).__name__}")
        if not options:
            raise ValueError("there is nothing to choose from")
        return Choice(index, options)

    def previous(self, distance: int = 1) -> ChainRequest:
        """Returns the request that was added last, or so many before.

        Raises:
            TypeError, ValueError: the distance is no integer, or less than 1.
            DependencyReferenceError: there are not so many requests.
        """
        return self[-check_integer(distance, "the distance", 1, UNLIMITED)]

    def __getitem__(self, id: int) -> ChainRequest:
        number = check_integer(id, "the id", -UNLIMITED, UNLIMITED)
        if not -len(self._requests) <= number < len(self._requests):
            raise DependencyReferenceError(f"there is no request {number}: the chain has {len(self._requests)}")
        return self._requests[number]

    def __iter__(self) -> Iterator[ChainRequest]:
        return iter(self._requests)

    def __len__(self) -> int:
        return len(self._requests)

    def _resolve(self, requests: Any) -> list[ChainRequest]:
        """Returns what ``after`` and ``again`` name."""
        if type(requests) is tuple and not requests:
            return []
        if isinstance(requests, ChainRequest) or hasattr(requests, "__index__"):
            requests = (requests,)
        if not isinstance(requests, Iterable):
            raise TypeError(f"a request, its id, or several of them, not a {type(requests).__name__}")
        return [self[request] if hasattr(request, "__index__") else request for request in requests]

    def _check_reference(self, request: ChainRequest, user: str) -> None:
        if not isinstance(request, ChainRequest):
            raise TypeError(f"{user} must refer to requests of this chain, not to a {type(request).__name__}")
        if request._chain is not self:
            raise DependencyReferenceError(f"{user} refers to {request.name} of another chain")
        if request._generation != self._generation:
            raise DependencyReferenceError(f"{user} refers to {request.name}, which went when the chain was cleared")
        if request is not self._draft and self._requests[request.id : request.id + 1] != [request]:
            raise DependencyReferenceError(f"{user} refers to {request.name}, which was not added")

    # ---- adding ----

    def _request(self, kind: int, name: str, size: int | None, *, into: bool = False) -> ChainRequest:
        number = len(self._requests)
        request: ChainRequest = ChainRequest._create(
            self, self._generation, number, kind, f"request {number} ({name})", size, into
        )
        return request

    def _check_access(self, remote: RemoteMemory | Choice, access: Access, doing: str) -> None:
        for memory in remote.options if isinstance(remote, Choice) else (remote,):
            if not isinstance(memory, RemoteMemory):
                raise TypeError(f"remote must be a RemoteMemory or a Choice of some, not {type(memory).__name__}")
            memory._check(access, doing, 0, 0)

    def _check_bounds(self, remote: RemoteMemory | Choice, offset: Integer | int, length: Integer | int) -> None:
        """Refuses bounds beyond the memory, as far as they are known already."""
        start, size = known_value(offset), known_value(length)
        if isinstance(remote, RemoteMemory) and start is not None and size is not None and start + size > remote.nbytes:
            raise ValueError(f"{size} bytes from offset {start} on reach beyond the end of {remote.nbytes}")

    def _atomic(
        self,
        name: str,
        code: int,
        remote: Any,
        values: tuple[Any, ...],
        offset: Any,
        bits: int,
        options: RequestOptions,
    ) -> ChainRequest:
        if type(bits) is not int or bits not in (32, 64):
            raise ValueError(f"bits must be 32 or 64, not {bits!r}")
        self._check_access(remote, Access.ATOMIC, "use atomics on")
        low, high = -(2 ** (bits - 1)), 2**bits - 1
        draft = Draft(lib.TU_CHAIN_ATOMIC, name, remote, size=bits // 8, atomic=True)
        draft.request.atomic = code
        where = argument(offset, "the offset")
        draft.set("offset", where)
        for field, value in zip(("operand", "swapped"), values, strict=False):
            draft.set(field, argument(value, "the value", low, high))
        self._check_bounds(remote, where, bits // 8)
        known = known_value(where)
        if isinstance(remote, RemoteMemory) and known is not None:
            remote._check_aligned(known, bits // 8)
        return self._add(draft, **options)

    def _target(self, thing: Any, atomic: bool) -> int:
        if not isinstance(thing, (Endpoint, RemoteMemory)):
            raise TypeError(f"requests go to an Endpoint or a RemoteMemory, not to a {type(thing).__name__}")
        thing._check_open() if isinstance(thing, RemoteMemory) else thing._check()
        if thing._core.engine is not self._engine:
            raise ValueError("a request chain takes endpoints and remote memory of its own worker only")
        found = self._targets.get((id(thing), atomic))
        if found is None:
            memory = (thing._descriptor.address, thing.nbytes) if isinstance(thing, RemoteMemory) else (0, 0)
            number = lib.tu_chain_target(self._native.handle, *memory)
            if number < 0:
                raise MemoryError("no memory for a request chain")
            found = self._targets[id(thing), atomic] = Target(number, thing, atomic)
        return found.index

    def _add(
        self,
        draft: Draft,
        request: ChainRequest | None = None,
        /,
        *,
        when: Condition | None = None,
        on_false: OnFalse | Retry = "error",
        after: ChainRequest | int | Iterable[ChainRequest | int] = (),
    ) -> ChainRequest:
        self._check()
        if self._draft is not None and request is None:
            raise RuntimeError("the functions that follow() is given cannot add requests")
        into, native = draft.into, draft.request
        if request is None:
            seen = None if into is not None and into.memory > lib.TU_MEMORY_HOST else draft.size  # what C can read
            request = self._request(native.kind, draft.name, seen, into=into is not None)
        if when is not None:
            if not isinstance(when, Condition):
                raise TypeError(f"when must be a Condition, as a comparison of a result, not {type(when).__name__}")
            draft.set("condition", when)
        retry = on_false if isinstance(on_false, Retry) else None
        then = on_false if retry is None else retry.then
        if not isinstance(then, str) or then not in _ON_FALSE:
            raise ValueError(f"on_false must be 'error', 'skip', 'stop' or a chains.Retry, not {then!r}")
        native.on_false = _ON_FALSE[then]
        things = () if draft.to is None else (draft.to,)
        if isinstance(draft.to, Choice):
            draft.set("choice", draft.to.index)
            things = draft.to.options
        before = {one for value in draft.computed for one in value._requests}
        before.update(self._resolve(after))
        if retry is not None:
            again = self._resolve(retry.again)
            before.update(again)
        for one in before:
            self._check_reference(one, request.name)
        before.discard(request)
        if retry is not None:
            native.retries = check_integer(retry.times, "the times of a Retry", 0, UNLIMITED)
            native.delay = int(min(check_timeout(retry.delay, "the delay of a Retry"), 1e9) * 1e9)
            draft.set_numbers("again", sorted({one.id for one in again}))
        self._check()
        for pins in draft.pins:
            check_reaches(self._engine, pins)
        if self._generation != request._generation or len(self._requests) != request.id:
            raise RuntimeError("the chain was changed while this request was described")
        if len(self._requests) >= self.capacity:
            raise NoDependencyResource(f"this chain has room for {self.capacity} requests: make it with more capacity")
        room = self.capacity * TERMS_EACH - self._terms
        if draft.term_count > room:
            raise NoDependencyResource(
                f"{request.name} needs {draft.term_count} terms for what it depends on, and this chain has room for "
                f"{room} more ({TERMS_EACH} for each request of its capacity): make it with more capacity"
            )
        after_ids = sorted(one.id for one in before)
        draft.set_numbers("after", after_ids)
        first = len(self._requests) - 1 if self.ordered and self._requests else self._barrier
        if first is not None and first not in after_ids:
            draft.set_numbers("behind", [first])
        if native.delay and self._engine not in Timer.of:
            Timer(self._engine)
        draft.set_numbers("targets", [self._target(thing, draft.atomic) for thing in things])
        number = lib.tu_chain_add(self._native.handle, native)
        if number == Status.NO_MEMORY:
            raise MemoryError(f"no memory for {request.name}")
        if number < 0:
            raise UCXError(number, f"adding {request.name}")
        self._terms += draft.term_count
        self._native.buffers.add(draft.pins, [pins for value in draft.computed for pins in value._pins])
        self._requests.append(request)
        if then == "stop":
            self._barrier = request.id
        return request

    def _check_open(self) -> None:
        self._engine.check()
        if self._native.handle is None:
            raise trio.ClosedResourceError("this request chain was closed")

    def _check(self) -> None:
        self._check_open()
        if self._starting or lib.tu_chain_busy(self._native.handle):
            raise trio.BusyResourceError(
                "this request chain is running, or UCX still has requests of an earlier run: wait_idle(), or "
                "make another"
            )
