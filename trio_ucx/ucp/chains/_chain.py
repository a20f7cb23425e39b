"""Request chains: programs of remote operations that are decided where completions are handled.

What is made here is a description; ``_native/chain/run.c`` runs it, and ``_run.py`` says what came of it.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Unpack

import attrs
import trio
from trio.lowlevel import enable_ki_protection

from ..._util.arguments import ALL_BITS, check_integer
from .._am_send import MAX_ID
from .._endpoint import Endpoint
from .._engine.engine import Engine
from .._engine.posting import completed, pending_operation
from .._engine.waits import Signal
from .._features import Feature
from .._memory.buffers import Pinned, WritableContiguous
from .._memory.pointers import check_elements
from .._memory.protocols import SupportsBuffer
from .._memory.registered import Access
from .._rma.access_paths import Key
from .._rma.remote_memory import AtomicOp, RemoteMemory, no_atomic_op
from .._tag import check_tag
from ._builder import (
    ChainBuilder,
    CheckOptions,
    Choice,
    Draft,
    Payload,
    RequestOptions,
    argument,
    known_value,
    payload,
    release,
    sent_length,
)
from ._errors import DependencyReferenceError
from ._expressions import UNLIMITED, ChainRequest, Condition, Integer, pinned_memory
from ._library import lib
from ._run import NativeChain, Outcomes, Run

MAX_CAPACITY = 2**24


@attrs.define(eq=False, repr=False)
class RequestChain(ChainBuilder):
    """A program of remote operations, posted at once: see :meth:`.Worker.new_chain`.

    Methods add requests, and return a :class:`ChainRequest` to whose result later ones may refer: in a condition
    (``when``), in arguments that are computed (:class:`Integer`), in their payload. A request begins when those that it
    refers to, and those in ``after``, are over. Others are not waited for: they may be under way at the same time,
    unless the chain is ``ordered``. What a put has written is visible at the peer (flushed) before a request begins
    that waits for it, and when the run ends.

    All requests take:

    * ``when``: a :class:`Condition`. If it is false, nothing is posted.
    * ``on_false``: what then. ``"error"``: it ends with :exc:`DependencyFalse`. ``"skip"``: with ``chains.SKIPPED``.
      ``"stop"``: the same, and no request that was added later runs; those wait for it. They do not run either when it
      fails, or its condition cannot be evaluated. A :class:`Retry`.
    * ``after``: requests to wait for: one, or several; a :class:`ChainRequest`, its id, or a negative number for a
      distance (-1: the previous one).

    When a request fails, all that depend on it end with :exc:`DependencyNotEvaluated`. So do those that refer to the
    result of one that was skipped.

    Buffers stay pinned as long as the chain has the request.

    Attributes:
        capacity: the number of requests for which it has room.
        ordered: whether each request waits for all earlier ones.
    """

    #: That goes on, or whose requests UCX still has.
    _run: Run | None = None
    #: Tasks that wait until the chain can be run.
    _idle_waiters: list[Signal] = attrs.field(factory=list)

    # ---- reading and writing ----

    @enable_ki_protection
    def get(
        self,
        remote: RemoteMemory | Choice,
        offset: Integer | int = 0,
        length: Integer | int | None = None,
        *,
        into: WritableContiguous | None = None,
        at_most: int | None = None,
        **options: Unpack[RequestOptions],
    ) -> ChainRequest:
        """Reads remote memory; the result is the bytes.

        As with :meth:`.RemoteMemory.get`, up to 1 MiB of memory that this process has mapped is copied at once.

        Args:
            remote: where from.
            offset: where to begin.
            length: how much; by default as much as ``into`` takes, or all from a constant offset on. If it is computed,
                say ``at_most`` how much, or ``into``.
            into: a writable buffer; otherwise the chain has memory for it.
            **options: ``when``, ``on_false``, ``after``: see :class:`RequestChain`.

        Raises:
            TypeError, ValueError: wrong arguments; beyond the end; not allowed by the memory's ``access``.
            DependencyReferenceError, NoDependencyResource: see there.
            RuntimeError: our context, or the peer's if its features are known, was opened without the feature needed.
            trio.ClosedResourceError: the chain, the endpoint or the worker was closed.
            trio.BusyResourceError: the chain is running, or UCX still has requests of an earlier run: see
                :meth:`wait_idle`.
            trio.BrokenResourceError: the endpoint, or the worker, broke.
        """
        self._check_access(remote, Access.READ, "read")
        where = argument(offset, "the offset")
        pins = None if into is None else Pinned(into, writable=True)
        try:
            room = at_most if at_most is None else check_integer(at_most, "at_most", 0, UNLIMITED)
            if pins is not None:
                room = min(pinned_memory(pins)[1], UNLIMITED if room is None else room)
            if length is None and room is None:
                known = known_value(where)
                if known is None or not isinstance(remote, RemoteMemory):
                    raise ValueError("say the length to get: it is not known yet how much there will be")
                room = max(0, remote.nbytes - known)
            wanted = room if length is None else length
            assert wanted is not None
            size = argument(wanted, "the length")
            known = known_value(size)
            if room is None and known is None:
                raise ValueError("say at_most how much to get, as the length is not known yet")
            if pins is not None and known is not None and known > pins.size:
                raise ValueError(f"{known} bytes are more than there is room for in `into`, which has {pins.size}")
            room = known if room is None else room
            room = check_integer(room, "at_most", known or 0, UNLIMITED)
            self._check_bounds(remote, where, size)
            draft = Draft(lib.TU_CHAIN_GET, "get", remote, size=room)
            draft.set("offset", where)
            draft.set("length", size)
            if pins is not None:
                draft.set_into(pins)
            return self._add(draft, **options)
        except BaseException:
            if pins is not None:
                pins.release()
            raise

    @enable_ki_protection
    def put(
        self,
        remote: RemoteMemory | Choice,
        data: Payload,
        offset: Integer | int = 0,
        *,
        length: Integer | int | None = None,
        **options: Unpack[RequestOptions],
    ) -> ChainRequest:
        """Writes remote memory, as :meth:`.RemoteMemory.put`.

        Args:
            remote: where to.
            data: a buffer; bytes of a result (:meth:`ChainRequest.bytes`); an :class:`Integer`, of 8 bytes unless
                :meth:`Integer.pack` says otherwise; or a tuple of such parts, one behind the other. A buffer by itself
                is not copied.
            offset: where to begin.
            length: how much of it, from the beginning; by default all.
            **options: ``when``, ``on_false``, ``after``: see :class:`RequestChain`.

        Raises: as :meth:`get`.
        """
        self._check_access(remote, Access.WRITE, "write")
        where = argument(offset, "the offset")
        parts = payload(data)
        try:
            size = sent_length(length, parts)
            self._check_bounds(remote, where, size)
            draft = Draft(lib.TU_CHAIN_PUT, "put", remote)
            draft.set("offset", where)
            draft.set("length", size)
            draft.set_parts(parts)
            return self._add(draft, **options)
        except BaseException:
            release(parts)
            raise

    @enable_ki_protection
    def follow(
        self,
        remote: RemoteMemory | Choice,
        start: Integer | int,
        *,
        next_offset: int | Callable[[ChainRequest], Integer],
        until: Callable[[ChainRequest], Condition] | None = None,
        limit: int,
        length: int | None = None,
        end: int | None = 0,
        **options: Unpack[RequestOptions],
    ) -> ChainRequest:
        """Walks a linked structure in remote memory; its result is the node at which the walk ended.

        Args:
            remote: the memory that has the nodes.
            start: the offset of the first.
            next_offset: where in a node the offset of the next one is, an unsigned integer of 8 bytes; or a function
                that makes it of a node, as ``lambda node: node.u32(4) * 64``.
            until: a function that makes the condition of a node at which the walk ends, as
                ``lambda node: node.u64(0) == key``; without, it ends where the structure ends, or at the limit.
            limit: how many nodes are read at most; :attr:`Followed.steps` tells how many were.
            length: bytes of a node; by default as many as ``next_offset`` and ``until`` look at.
            end: the offset that says that there is no next node, nor a first; None: there is no such.
            **options: ``when``, ``on_false``, ``after``: see :class:`RequestChain`. A walk that ends without ``until``
                having been true, or that finds nothing to begin with, does what ``on_false`` says.

        Raises: as :meth:`get`.
        """
        self._check_access(remote, Access.READ, "read")
        where = argument(start, "the start")
        if self._draft is not None:
            raise RuntimeError("the functions that follow() is given cannot add requests")
        name = "follow"
        node = self._request(lib.TU_CHAIN_FOLLOW, name, UNLIMITED)
        self._draft = node
        try:
            following = next_offset(node) if callable(next_offset) else node.u64(next_offset)
            if not isinstance(following, Integer):
                raise TypeError(f"next_offset must make an Integer of a node, not {type(following).__name__}")
            found = None if until is None else until(node)
            if not (found is None or isinstance(found, Condition)):
                raise TypeError(f"until must make a Condition of a node, not {type(found).__name__}")
            node.size = check_integer(node._referred if length is None else length, "the length", 1, UNLIMITED)
            if node._referred > node.size:
                raise DependencyReferenceError(
                    f"next_offset and until look at {node._referred} bytes of a node of {node.size}"
                )
            self._check_bounds(remote, where, node.size)
            draft = Draft(lib.TU_CHAIN_FOLLOW, name, remote, size=node.size)
            draft.request.limit = check_integer(limit, "the limit", 1, UNLIMITED)
            draft.request.has_end = end is not None
            draft.request.end = 0 if end is None else check_integer(end, "the end", 0, ALL_BITS)
            draft.set("offset", where)
            draft.set("next", following)
            if found is not None:
                draft.set("until", found)
            return self._add(draft, node, **options)
        finally:
            self._draft = None

    @enable_ki_protection
    def check(self, when: Condition, **options: Unpack[CheckOptions]) -> ChainRequest:
        """Evaluates a condition, and does nothing else: for other requests to depend on.

        ``on_false`` and ``after`` are those of all requests.

        Raises: as :meth:`get`.
        """
        if not isinstance(when, Condition):
            raise TypeError(f"a check is of a Condition, as a comparison of a result, not of {type(when).__name__}")
        return self._add(Draft(lib.TU_CHAIN_CHECK, "check"), when=when, **options)

    # ---- atomics ----

    @enable_ki_protection
    def atomic(
        self,
        remote: RemoteMemory | Choice,
        op: AtomicOp,
        value: Integer | int,
        offset: Integer | int = 0,
        *,
        bits: int = 64,
        **options: Unpack[RequestOptions],
    ) -> ChainRequest:
        """Changes an integer, as :meth:`.RemoteMemory.atomic` with ``fetch=True``; the result is the old value.

        Atomics of a chain always fetch: the answer says that they have happened, without a flush.

        Args:
            remote: where it is; see :class:`.RemoteMemory` about atomics.
            op: the operation.
            value: its operand, of which the lowest ``bits`` are taken.
            offset: where the integer is, a multiple of its size.
            bits: 64 or 32.
            **options: ``when``, ``on_false``, ``after``: see :class:`RequestChain`.

        Raises: as :meth:`get`.
        """
        if not isinstance(op, AtomicOp):
            raise no_atomic_op(op)
        return self._atomic(f"atomic {op.name}", op, remote, (value,), offset, bits, options)

    @enable_ki_protection
    def fetch_add(
        self,
        remote: RemoteMemory | Choice,
        value: Integer | int,
        offset: Integer | int = 0,
        *,
        bits: int = 64,
        **options: Unpack[RequestOptions],
    ) -> ChainRequest:
        """Adds to an integer: :meth:`atomic` with ``AtomicOp.ADD``.

        Raises: as :meth:`get`.
        """
        return self._atomic("fetch_add", lib.TU_ATOMIC_ADD, remote, (value,), offset, bits, options)

    @enable_ki_protection
    def compare_swap(
        self,
        remote: RemoteMemory | Choice,
        expected: Integer | int,
        value: Integer | int,
        offset: Integer | int = 0,
        *,
        bits: int = 64,
        **options: Unpack[RequestOptions],
    ) -> ChainRequest:
        """Stores ``value`` if ``expected`` is there; otherwise as :meth:`atomic`.

        Raises: as :meth:`get`.
        """
        code = lib.TU_ATOMIC_COMPARE_SWAP
        return self._atomic("compare_swap", code, remote, (expected, value), offset, bits, options)

    # ---- messages ----

    @enable_ki_protection
    def tag_send(
        self,
        endpoint: Endpoint | Choice,
        data: Payload,
        tag: int,
        *,
        length: Integer | int | None = None,
        **options: Unpack[RequestOptions],
    ) -> ChainRequest:
        """Sends a tag message (``ucp_tag_send_nbx``); ``data``, ``length`` and ``**options`` as in :meth:`put`.

        Raises: as :meth:`get`.
        """
        self._check_endpoints(endpoint, Feature.TAG, "sending tag messages")
        draft = Draft(lib.TU_CHAIN_TAG_SEND, "tag_send", endpoint)
        draft.request.tag = check_tag(tag)
        return self._send(draft, data, length, options)

    @enable_ki_protection
    def am_send(
        self,
        endpoint: Endpoint | Choice,
        id: int,
        data: Payload = b"",
        header: SupportsBuffer = b"",
        *,
        reply: bool = False,
        length: Integer | int | None = None,
        **options: Unpack[RequestOptions],
    ) -> ChainRequest:
        """Sends an active message (``ucp_am_send_nbx``): see :meth:`.Endpoint.am_send`.

        ``data``, ``length`` and ``**options`` as in :meth:`put`. The header is copied.

        Raises: as :meth:`get`.
        """
        self._check_endpoints(endpoint, Feature.AM, "sending active messages")
        number = check_integer(id, "the id", 0, MAX_ID)
        check_elements(header, "send")
        with memoryview(header) as view:
            copied = bytes(view)
        longest = self._engine.identity.attributes.max_am_header
        if len(copied) > longest:
            raise ValueError(f"a header of {len(copied)} bytes is too long: this worker's limit is {longest}")
        draft = Draft(lib.TU_CHAIN_AM_SEND, "am_send", endpoint)
        draft.request.tag, draft.request.reply = number, bool(reply)
        draft.set_header(copied)
        return self._send(draft, data, length, options)

    def _check_endpoints(self, endpoint: Endpoint | Choice, feature: Feature, doing: str) -> None:
        self._engine.context._require(feature, doing)
        for one in endpoint.options if isinstance(endpoint, Choice) else (endpoint,):
            if not isinstance(one, Endpoint):
                raise TypeError(f"messages go to an Endpoint or a Choice of some, not to a {type(one).__name__}")
            one._core.require(feature, doing)

    def _send(self, draft: Draft, data: Payload, length: Integer | int | None, options: RequestOptions) -> ChainRequest:
        parts = payload(data)
        try:
            draft.set("length", sent_length(length, parts))
            draft.set_parts(parts)
            return self._add(draft, **options)
        except BaseException:
            release(parts)
            raise

    # ---- running ----

    @enable_ki_protection
    async def run(self) -> Outcomes:
        """Posts the requests, as soon as what they depend on allows; returns what became of all of them.

        Failed requests raise nothing here: see :class:`Outcomes`. A chain can be run again. Python does nothing between
        the first request and the last, except to wake a worker that sleeps.

        Cancellation: nothing more is posted; requests in flight go on. :attr:`outcomes` says what became of each; a put
        that no request waited for may not be visible at the peer yet: flush the memory. :meth:`wait_idle` waits until
        the chain can be run again.

        Raises:
            ValueError: remote memory that it refers to was closed.
            RuntimeError: the owner of the memory would never answer a get or a put, or does no atomics for others: see
                :class:`.RemoteMemory`.
            OSError, UCXError: a connection for memory cannot be opened, or used for this memory.
            trio.BusyResourceError: it is running, or UCX still has requests of an earlier run: see :meth:`wait_idle`.
            trio.ClosedResourceError, trio.BrokenResourceError: it was closed, perhaps meanwhile; the worker was closed,
                or broke.
        """
        try:
            self._check()
        except Exception:
            await trio.lowlevel.checkpoint_if_cancelled()  # being cancelled comes first
            raise
        outcomes = self._native.new_outcomes(self._requests, self._targets.values())
        self._native.restart(lib.TU_CHAIN_WAITING)
        try:
            keys = await self._bind()
        except BaseException:
            self._native.restart(lib.TU_CHAIN_CANCELLED)
            raise
        for key in keys:
            key.hold()
        verdict = lib.tu_chain_run(self._native.handle)
        if verdict <= 0:
            for key in keys:
                key.let_go()
        if verdict < 0:
            self._native.restart(lib.TU_CHAIN_CANCELLED)
        operation = pending_operation(
            self._engine,
            verdict,
            None,
            "running a request chain",
            kind=lambda engine, id, pins, doing, core: self._begun(
                Run(self, self._native.handle, list(self._targets.values()), keys, engine, id)
            ),
        )
        await completed(operation, self._engine)
        return outcomes

    async def _bind(self) -> list[Key]:
        """Waits for connections, and tells C about them. The keys are what it uses then."""
        self._starting = True
        try:
            await trio.lowlevel.checkpoint_if_cancelled()
            for target in self._targets.values():
                await target.connect()
        finally:
            self._starting = False
            self._stands_differently()
        self._check()
        for target in self._targets.values():
            if isinstance(target.thing, RemoteMemory) and target.thing._closed:
                raise ValueError("remote memory that this request chain refers to was closed")
        keys = [key for target in self._targets.values() if (key := target.bind(self._native.handle)) is not None]
        for target in self._targets.values():
            target.scope.operations.unflushed = True
        return keys

    def _begun(self, run: Run) -> Run:
        self._run = run
        return run

    @enable_ki_protection
    async def wait_idle(self) -> None:
        """Waits until the chain can be run or changed: no run goes on, and UCX has no request of an earlier one.

        Requests of a cancelled run complete when the peer answers, or is lost. Those over a connection that has ended
        complete up to some seconds later.

        Cancellation: it has no effect.

        Raises:
            trio.ClosedResourceError: the chain was closed, perhaps meanwhile, or its worker was.
            trio.BrokenResourceError: the worker broke; or a connection broke without an answer, and UCX keeps the
                requests: make another chain, this one cannot run again.
        """
        await trio.lowlevel.checkpoint_if_cancelled()
        self._check_open()
        while self._busy:
            signal = Signal()
            self._idle_waiters.append(signal)
            try:
                await self._engine.waiting.wait(signal)
            finally:
                if signal in self._idle_waiters:
                    self._idle_waiters.remove(signal)
            self._check_open()
        if lib.tu_chain_busy(self._native.handle):
            raise trio.BrokenResourceError(
                "UCX keeps requests of this chain, whose connection broke without an answer: make another chain"
            )
        await self._engine.waiting.schedule_point()

    @property
    def _busy(self) -> bool:
        return self._starting or (self._run is not None and self._run.id in self._engine.in_flight)

    def _stands_differently(self) -> None:
        """Wakes the tasks that wait until the chain can be run, to check again."""
        waiters, self._idle_waiters = self._idle_waiters, []
        for waiter in waiters:
            waiter.set()

    @property
    def outcomes(self) -> Outcomes:
        """Returns what became of the requests in the last run; None of each that is in flight, or if there was no run.

        Of a request that was to run again when the run was cancelled, it is what came of it the last time.

        Raises:
            trio.ClosedResourceError: the chain was closed, and nobody has the outcomes.
        """
        found = self._native.outcomes
        if found is None and self._native.handle is None:
            raise trio.ClosedResourceError("this request chain was closed: take its outcomes before")
        return found or self._native.new_outcomes(self._requests, self._targets.values())

    @property
    def nbytes(self) -> int:
        """Bytes of memory that the chain takes in C, results included.

        Raises:
            trio.BusyResourceError, trio.ClosedResourceError, trio.BrokenResourceError: as for :meth:`run`.
        """
        self._check()
        return int(lib.tu_chain_memory(self._native.handle))

    # ---- the end ----

    @enable_ki_protection
    def clear(self) -> None:
        """Removes all requests, so that others can be added. Whatever refers to one of them is refused from now on.

        Raises:
            trio.BusyResourceError: it is running, or UCX still has requests of an earlier run: see :meth:`wait_idle`.
            trio.ClosedResourceError, trio.BrokenResourceError: the chain or the worker was closed; the worker broke.
        """
        self._check()
        self._end()
        self._native = NativeChain(self._engine)
        self._generation += 1
        self._terms, self._barrier = 0, None
        self._requests, self._targets = [], {}
        self._engine.reap()

    @enable_ki_protection
    def close(self) -> None:
        """Frees what it takes. A run that goes on is cancelled: nothing more is posted. Closed already: no effect.

        Raises: nothing.
        """
        self._engine.run.check_thread()
        if self._native.handle is not None and not self._engine.run.inherited:
            self._end()
            self._engine.reap()

    def _end(self) -> None:
        if self._starting:
            self._native.restart(lib.TU_CHAIN_CANCELLED)
        run, self._run = self._run, None
        running = run is not None and run.id in self._engine.in_flight
        self._native.free(run if running else None)
        self._stands_differently()

    def __del__(self) -> None:
        if self._native.handle is not None and self._engine.handle is not None:
            self._engine.run.call_soon(partial(self._native.free, None))

    def __repr__(self) -> str:
        return f"<trio_ucx.ucp.chains.RequestChain of {len(self._requests)} requests, room for {self.capacity}>"


def new_chain(engine: Engine, capacity: int, ordered: bool) -> RequestChain:
    """:meth:`.Worker.new_chain`."""
    engine.check()
    capacity = check_integer(capacity, "the capacity", 1, MAX_CAPACITY)
    chain: RequestChain = RequestChain._create(engine, NativeChain(engine), capacity, bool(ordered))
    return chain
