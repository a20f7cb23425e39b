"""Memory of a peer: put, get, and atomics."""

from __future__ import annotations

import enum
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any, Literal, cast, overload

import attrs
import trio
from trio.lowlevel import enable_ki_protection

from ..._native import ffi, lib
from ..._util.arguments import check_integer
from ..._util.handles import ClosedOnExit, OpenedNotConstructed, warn_resource
from ..._util.process import NOBODY
from .._connecting import connect_beside
from .._engine.borrowed import Borrowed
from .._engine.endpoint_core import EndpointCore, Scope
from .._engine.engine import Engine
from .._engine.operations import Operation
from .._engine.posting import check_reaches, completed, flush, pending_operation
from .._features import Feature
from .._memory.buffers import Contiguous, Pinned, WritableContiguous, new_bytes
from .._memory.pointers import check_elements
from .._memory.registered import Access, MemoryDescriptor, require_answers, ucx_access
from .._status import Status, UCXError
from .access_paths import AccessPath, Key, connect, find_access_path, not_mapped, refusal, try_connect

if TYPE_CHECKING:
    from ..blocks import BlockPlan, BlockProgress


#: Seconds until a notification is sent again for which the owner had no room.
_FIRST_DELAY, _LONGEST_DELAY = 0.001, 0.05


class AtomicOp(enum.IntEnum):
    """What :meth:`RemoteMemory.atomic` does to an integer, with an operand (``ucp_atomic_op_t``).

    ADD, and the bitwise AND, OR and XOR, combine the two. SWAP stores the operand. For compare-and-swap, which has two
    operands, see :meth:`RemoteMemory.compare_swap`.
    """

    ADD = lib.TU_ATOMIC_ADD
    AND = lib.TU_ATOMIC_AND
    OR = lib.TU_ATOMIC_OR
    XOR = lib.TU_ATOMIC_XOR
    SWAP = lib.TU_ATOMIC_SWAP


def no_atomic_op(op: object) -> TypeError:
    """The error for an ``op`` that is no :class:`AtomicOp`. Callers check that themselves, to save a call."""
    return TypeError(
        f"op must be an AtomicOp (ADD, AND, OR, XOR or SWAP), not {op!r}; for compare-and-swap call compare_swap()"
    )


class _Transfer(Operation):
    """A put, a get or an atomic. It releases the key, which is held for it, and keeps memory that C writes to."""

    __slots__ = ("_keep", "_key", "_result")

    def __init__(
        self,
        engine: Engine,
        id: int,
        pins: Pinned | None,
        doing: str,
        scope: Scope | None,
        key: Key | None,
        keep: Any,
        result: Callable[[], Any] | None,
    ) -> None:
        super().__init__(engine, id, pins, doing, scope)
        self._key = key
        self._keep = keep
        self._result = result

    def value(self, length: int, tag: int) -> Any:
        return None if self._result is None else self._result()

    def release(self) -> None:
        super().release()
        if self._key is not None:
            self._key.let_go()

    def error(self, status: int) -> Exception:
        return super().error(status) if self._gone() else refusal(status, self.doing) or super().error(status)

    def _gone(self) -> bool:
        return self.scope is not None and self.scope.problem() is not None


@attrs.define(eq=False, repr=False)
class RemoteMemory(ClosedOnExit, metaclass=OpenedNotConstructed):
    """Memory of a peer, by :meth:`Endpoint.attach`. A context manager.

    Offsets are in bytes from its beginning; whatever would reach beyond its end is refused. A put that has returned has
    left our memory, not yet reached the peer's: :meth:`flush` says when it has.

    What has returned without waiting for the owner (a put, an atomic that fetches nothing) may be overtaken by what is
    posted after it: :meth:`Worker.fence` orders them. Atomics use the CPU's atomic instructions. So they are atomic
    with respect to all others of the same width, the owner's own included.

    UCX's own atomics are not used. Where this process has not mapped the memory, its owner does them, whose worker must
    progress. That needs ``Feature.AM`` in both contexts, and a descriptor with a token. So atomics are refused, with a
    RuntimeError, on memory of programs without trio_ucx and on device memory. Where UCX's own puts and gets are used,
    a fence does not order them with atomics: flush in between.

    Attributes:
        nbytes: its length in bytes.
        access: what its owner allows.
    """

    nbytes: int
    access: Access
    _check_endpoint: Callable[[], None]
    _scope: Scope
    _descriptor: MemoryDescriptor
    #: Remote keys, by what they are for: each is unpacked for one endpoint, when it is up.
    _keys: dict[str, Key] = attrs.field(factory=dict)
    #: The access path of gets and puts, once it is known.
    _path: AccessPath | None = None
    #: That of UCX's own puts and gets, for buffers that the other one does not take.
    _ucx_path: AccessPath | None = None
    _borrowed: Borrowed | None = None
    _closed: bool = False

    # ---- put and get ----

    @enable_ki_protection
    async def get(self, offset: int = 0, nbytes: int | None = None) -> bytes:
        """Reads from the peer's memory: by load, by a message to its owner, or by ``ucp_get_nbx`` (ucp.md).

        Args:
            offset: where to begin.
            nbytes: how much; by default all from there on.

        Cancellation: returns at once; the transfer goes on, into memory of the library.

        Raises:
            TypeError, ValueError: beyond the end; not allowed by :attr:`access`; closed.
            RuntimeError: UCX's own get is needed, and this context, or the owner's, was opened without ``Feature.RMA``.
            UCXError: the owner refused. NO_ELEM: it has closed the memory.
            OSError: the endpoint that reaches the memory of a Connection's peer cannot be opened.
            trio.ClosedResourceError, trio.BrokenResourceError: the endpoint was closed; the peer is gone.
        """
        offset = check_integer(offset, "offset", 0, self.nbytes)
        nbytes = self.nbytes - offset if nbytes is None else check_integer(nbytes, "nbytes", 0, 2**62)
        self._check(Access.READ, "read", offset, nbytes)
        await trio.lowlevel.checkpoint_if_cancelled()
        self._check_open()
        data = new_bytes(nbytes)
        await self._transfer(False, Pinned(data), offset, "reading remote memory")
        return data

    @enable_ki_protection
    async def get_into(self, buffer: WritableContiguous, offset: int = 0) -> int:
        """Reads from the peer's memory into a writable buffer, as much as that takes; otherwise as :meth:`get`.

        Returns:
            The number of bytes.

        Cancellation: returns at once; the buffer stays pinned until UCX lets go of it.

        Raises:
            TypeError, ValueError: not one writable contiguous buffer (see :meth:`get_blocks`); beyond the end; not
                allowed by :attr:`access`; closed.
            RuntimeError, UCXError, OSError: as for :meth:`get`.
            trio.ClosedResourceError, trio.BrokenResourceError: the endpoint was closed; the peer is gone.
        """
        pins = await self._pin(buffer, Access.READ, "read", offset)
        size = pins.size
        await self._transfer(False, pins, offset, "reading remote memory")
        return size

    @enable_ki_protection
    async def put(self, data: Contiguous, offset: int = 0) -> None:
        """Writes into the peer's memory: by store, by a message to its owner, or by ``ucp_put_nbx`` (ucp.md).

        Returns when ``data`` may be used again. The peer does not notice; send it a message after :meth:`flush`.

        Cancellation: the data may or may not be written, wholly or in part; it stays pinned until UCX lets go of it.

        Raises:
            TypeError, ValueError: not one contiguous buffer (see :meth:`put_blocks`); beyond the end; not allowed by
                :attr:`access`; closed.
            RuntimeError, UCXError, OSError: as for :meth:`get`; but :meth:`flush` raises what the owner refused later.
            trio.ClosedResourceError, trio.BrokenResourceError: the endpoint was closed; the peer is gone.
        """
        pins = await self._pin(data, Access.WRITE, "write", offset)
        self._scope.operations.unflushed = True
        await self._transfer(True, pins, offset, "writing remote memory")

    @enable_ki_protection
    async def flush(self) -> None:
        """Waits until everything that was put, and every atomic, has happened at the peer (``ucp_ep_flush_nbx``).

        Cancellation: puts and atomics go on.

        Raises:
            UCXError: the owner has refused a put, or an atomic that fetches nothing, over this endpoint (of a
                Connection: of this Connection), to any of its memory. NO_ELEM: it has closed that memory.
            ValueError: closed.
            trio.ClosedResourceError, trio.BrokenResourceError: the endpoint was closed; the peer is gone.
        """
        await trio.lowlevel.checkpoint_if_cancelled()
        self._check_open()
        await flush(self._scope)
        if self._scope.handle is None:  # another task has closed it meanwhile
            self._scope.check()
        error = refusal(
            lib.tu_transfers_status(self._core.handle, self._scope.id), "a put or an atomic before this flush"
        )
        if error is not None:
            raise error

    @enable_ki_protection
    async def notify(self, data: Contiguous) -> None:
        """Flushes, and then tells the owner, who gets it by :meth:`Memory.notifications`.

        So everything that was put before is there when the owner gets the notification.

        Args:
            data: what to say, at most 4,096 bytes.

        Returns when the owner's library has the notification. If the owner has 1,024 that it has not received, this
        waits until it has received some.

        Cancellation: the owner may or may not get the notification.

        Raises:
            TypeError, ValueError: not bytes, or too long; not allowed by :attr:`access`; closed.
            RuntimeError: the owner takes no messages for this memory, because one of the contexts lacks ``Feature.AM``,
                it is device memory, or of a program without trio_ucx.
            UCXError: the owner refused this, or what was put before. NO_ELEM: it has closed the memory.
            trio.ClosedResourceError, trio.BrokenResourceError: the endpoint was closed; the peer is gone.
        """
        self._check(Access.WRITE, "write", 0, 0)
        check_elements(data, "send")
        with memoryview(cast(Any, data)) as view:
            said = bytes(view)
        if len(said) > lib.TU_LONGEST_NOTE:
            raise ValueError(f"a notification has at most {lib.TU_LONGEST_NOTE} bytes, not {len(said)}")
        await self.flush()
        path = await self._reach_without_ucx_rma()
        if path is None or not path.native.messages:
            raise RuntimeError(
                "the owner takes no notifications about this memory: let a trio_ucx program own it, as host memory, "
                "and open both contexts with Feature.AM, a default"
            )
        engine, delay = path.core.engine, _FIRST_DELAY
        while True:
            pins = Pinned(said)
            verdict = lib.tu_transfer_note(path.core.handle, self._scope.id, path.native, pins.address, len(said))
            try:
                await completed(self._posted(verdict, path, pins, "notifying the owner of remote memory"), engine)
                return
            except UCXError as error:
                if error.status != Status.NO_RESOURCE:
                    raise
            await trio.sleep(delay)  # the owner has too many that it has not received
            delay = min(2 * delay, _LONGEST_DELAY)
            self._check_open()

    @enable_ki_protection
    async def connect(self) -> None:
        """Waits until the endpoint is connected, and the access path known.

        Other async methods do this by themselves. Call it before :meth:`map`, and before a request group.

        Cancellation: it has no effect.

        Raises:
            ValueError: closed; the descriptor says more memory than there is.
            UCXError: NO_ELEM: the owner has closed memory that this process could map.
            trio.ClosedResourceError, trio.BrokenResourceError: the endpoint was closed; the peer is gone.
        """
        await trio.lowlevel.checkpoint_if_cancelled()
        self._check_open()
        await self._reach_without_ucx_rma()
        await trio.lowlevel.cancel_shielded_checkpoint()

    @enable_ki_protection
    async def get_blocks(
        self, blocks: Iterable[tuple[int, WritableContiguous]], *, progress: BlockProgress | None = None
    ) -> None:
        """Reads blocks of this memory into buffers: as :meth:`get_into` for each, but in one call.

        Args:
            blocks: pairs of an offset and a buffer. For blocks of one size in one buffer, :meth:`plan` is faster.
            progress: counts the blocks that have arrived.

        Cancellation: returns at once; no further block is asked for. The buffers stay pinned until UCX lets go of them.

        Raises:
            TypeError, ValueError: not such pairs; an empty buffer; buffers that overlap; as for :meth:`get_into`.
            RuntimeError, UCXError, OSError: as for :meth:`get`; a note says how many blocks are there.
            trio.ClosedResourceError, trio.BrokenResourceError: the endpoint was closed; the peer is gone.
        """
        from ..blocks import transfer_buffers

        await transfer_buffers(self, False, blocks, progress)

    @enable_ki_protection
    async def put_blocks(
        self, blocks: Iterable[tuple[int, Contiguous]], *, progress: BlockProgress | None = None
    ) -> None:
        """Writes buffers into blocks of this memory: as :meth:`put` for each, but in one call.

        Args:
            blocks: pairs of an offset and a buffer.
            progress: counts the blocks whose buffers may be used again.

        Cancellation: any of the blocks may be written, or not, or in part. The buffers stay pinned until UCX lets go of
        them.

        Raises:
            TypeError, ValueError: not such pairs; an empty buffer; blocks that overlap; as for :meth:`put`.
            RuntimeError, UCXError, OSError: as for :meth:`put`.
            trio.ClosedResourceError, trio.BrokenResourceError: the endpoint was closed; the peer is gone.
        """
        from ..blocks import transfer_buffers

        await transfer_buffers(self, True, blocks, progress)

    @enable_ki_protection
    def plan(self, buffer: Contiguous, *, block: int, offset: int = 0) -> BlockPlan:
        """Prepares for lists of blocks between a buffer here and this memory (:mod:`trio_ucx.ucp.blocks`).

        Args:
            buffer: a contiguous buffer, the blocks here; writable if blocks are read into it.
            block: the size of a block in bytes.
            offset: where block 0 begins in this memory.

        Raises:
            TypeError, ValueError: not a contiguous buffer; not an integer, or out of range.
        """
        from ..blocks import plan

        return plan(self, buffer, block, offset)

    @enable_ki_protection
    def map(self) -> memoryview:
        """The memory itself, where this process reaches it by load and store (``ucp_rkey_ptr``).

        That is so for memory that its owner allocated (:meth:`Context.allocate`), over shared memory. Read-only without
        ``Access.WRITE``. It ends with :meth:`close`. When the owner closes the memory, a view keeps the old bytes. Do
        not transfer between overlapping parts of one memory: the bytes would be wrong.

        Raises:
            UCXError: UNREACHABLE: it cannot be reached like that, or this process has no room for it; use :meth:`get`
                and :meth:`put`. NOT_CONNECTED: the connection is not up yet; :meth:`connect` waits for it. NO_ELEM: the
                owner has closed the memory.
            ValueError: not allowed by :attr:`access`; closed; the descriptor says more memory than there is.
            trio.ClosedResourceError, trio.BrokenResourceError: the endpoint was closed; the peer is gone.
        """
        self._check_open()
        self._check(Access.READ, "read", 0, 0)
        if not try_connect(self._core, self._scope):
            raise UCXError(
                Status.NOT_CONNECTED, "mapping remote memory before the connection is up: await connect() first"
            )
        key = self._key("load and store", self._core)
        mapping = key.mapped(self._descriptor)
        if mapping is None:
            raise UCXError(Status.UNREACHABLE, "this memory cannot be reached by load and store: use get and put")
        if self._borrowed is None:
            writable = bool(self.access & Access.WRITE)
            key.hold()  # destroying it would unmap what the view shows
            self._borrowed = Borrowed(self._core.engine, mapping.address, self.nbytes, key.let_go, writable=writable)
        return self._borrowed.view

    # ---- atomics ----

    @overload
    async def atomic(
        self, op: Literal[AtomicOp.SWAP], value: int, offset: int = 0, *, bits: int = 64, fetch: bool = False
    ) -> int: ...
    @overload
    async def atomic(
        self, op: AtomicOp, value: int, offset: int = 0, *, bits: int = 64, fetch: Literal[True]
    ) -> int: ...
    @overload
    async def atomic(
        self, op: AtomicOp, value: int, offset: int = 0, *, bits: int = 64, fetch: bool = False
    ) -> int | None: ...
    @enable_ki_protection
    async def atomic(
        self, op: AtomicOp, value: int, offset: int = 0, *, bits: int = 64, fetch: bool = False
    ) -> int | None:
        """Changes an integer of the peer's: by the processor, here or, after a message, at the owner (ucp.md).

        The operations are those of ``ucp_atomic_op_nbx``, which is not used itself. For compare-and-swap see
        :meth:`compare_swap`.

        Args:
            op: the operation.
            value: its operand; negative numbers as two's complement. A sum wraps around.
            offset: where the integer is, a multiple of its size.
            bits: 64 or 32.
            fetch: return the old value. ``AtomicOp.SWAP`` always does.

        Returns:
            The old value, unsigned, once the operation has happened. None if nothing is fetched, perhaps before the
            operation has happened: :meth:`flush` waits for it, and raises an error if the owner refused it.

        Cancellation: it may or may not happen.

        Raises:
            TypeError, ValueError: no :class:`AtomicOp`; no integer, or out of range; beyond the end; not aligned; not
                allowed by :attr:`access`; closed.
            RuntimeError: the memory is not mapped, and its owner does no atomics for others (see
                :class:`RemoteMemory`).
            UCXError: the owner refused; if nothing is fetched, :meth:`flush` raises that. NO_ELEM: it has closed the
                memory.
            trio.ClosedResourceError, trio.BrokenResourceError: the endpoint was closed; the peer is gone.
        """
        if not isinstance(op, AtomicOp):
            raise no_atomic_op(op)
        fetch = fetch or op is AtomicOp.SWAP
        old = await self._atomic(op, value, None, offset, bits, fetch=fetch)
        return old if fetch else None

    @enable_ki_protection
    async def fetch_add(self, value: int, offset: int = 0, *, bits: int = 64) -> int:
        """Adds to an integer, and returns the old value: :meth:`atomic` with ``AtomicOp.ADD`` and ``fetch=True``.

        Cancellation: as :meth:`atomic`.

        Raises: as :meth:`atomic`.
        """
        return await self._atomic(lib.TU_ATOMIC_ADD, value, None, offset, bits, fetch=True)

    @enable_ki_protection
    async def compare_swap(self, expected: int, value: int, offset: int = 0, *, bits: int = 64) -> int:
        """Stores ``value`` if ``expected`` is there. Returns the old value, as :meth:`atomic` with ``fetch=True``.

        Cancellation: as :meth:`atomic`.

        Raises: as :meth:`atomic`.
        """
        return await self._atomic(lib.TU_ATOMIC_COMPARE_SWAP, expected, value, offset, bits, fetch=True)

    # ---- for request groups: without waiting ----

    def _submit_get_into(self, buffer: WritableContiguous, offset: int) -> Operation | int:
        pins = self._pin_now(buffer, Access.READ, "read", offset)
        size = pins.size
        posted = self._post_now(False, pins, offset, "reading remote memory", lambda: size)
        return size if posted is None else posted

    def _submit_put(self, data: Contiguous, offset: int) -> Operation | None:
        pins = self._pin_now(data, Access.WRITE, "write", offset)
        self._scope.operations.unflushed = True
        return self._post_now(True, pins, offset, "writing remote memory")

    def _post_now(
        self, put: bool, pins: Pinned, offset: int, doing: str, result: Callable[[], Any] | None = None
    ) -> Operation | None:
        if pins.size == 0:
            pins.release()
            return None
        try:
            path = self._path_now(pins.memory)
        except BaseException:
            pins.release()
            raise
        return self._post(put, pins, offset, doing, path, result)

    def _submit_atomic(
        self, kind: int, value: int, swapped: Any, offset: int, bits: int, *, fetch: bool
    ) -> Operation | int | None:
        terms = self._check_atomic(kind, value, swapped, offset, bits)
        self._check_open()
        old = self._new_word(bits, fetch)
        posted = self._post_atomic(self._require_atomics(self._connected_path()), kind, terms, old)
        return posted if posted is not None or not fetch else int(old[0])

    def _pin_now(self, buffer: Contiguous, access: Access, doing: str, offset: int) -> Pinned:
        pins = self._pin_arguments(buffer, access, doing, offset)
        try:
            self._check_open()
            check_reaches(self._core.engine, pins)
        except BaseException:
            pins.release()
            raise
        return pins

    def _path_now(self, memory: int) -> AccessPath:
        """Returns the access path of gets and puts for local memory of this kind.

        Raises:
            UCXError: NOT_CONNECTED: it is not known yet.
        """
        path = self._connected_path()
        if path is not None and path.takes(memory):
            return path
        if self._ucx_path is None or self._ucx_path.core.gone:
            raise UCXError(
                Status.NOT_CONNECTED,
                "UCX's own puts and gets, which this memory needs: await a get or a put of it first",
            )
        return self._ucx_path

    def _connected_path(self) -> AccessPath | None:
        """Returns the access path without UCX's puts and gets; None: there is none.

        Raises:
            UCXError: NOT_CONNECTED: it is not known yet.
        """
        if self._path is None:
            if not try_connect(self._core, self._scope):
                raise UCXError(
                    Status.NOT_CONNECTED, "using remote memory before it is connected: await connect() first"
                )
            self._path = self._find_access_path()
        return self._path

    def _check_aligned(self, offset: int, size: int) -> None:
        if (self._descriptor.address + offset) % size:
            raise ValueError(f"an atomic of {8 * size} bits needs an address that is a multiple of {size}")

    async def _atomic(self, kind: int, value: int, swapped: Any, offset: int, bits: int, *, fetch: bool) -> int:
        terms = self._check_atomic(kind, value, swapped, offset, bits)
        await trio.lowlevel.checkpoint_if_cancelled()
        self._check_open()
        path = await self._reach_for_atomics()
        old = self._new_word(bits, fetch)
        await completed(self._post_atomic(path, kind, terms, old), self._core.engine)
        return int(old[0]) if fetch else 0

    def _check_atomic(self, kind: int, value: int, swapped: Any, offset: int, bits: int) -> tuple[int, int, int, int]:
        """Returns the size of the integer, the operand, what a compare-and-swap stores, and the offset."""
        if type(bits) is not int or bits not in (32, 64):
            raise ValueError(f"bits must be 32 or 64, not {bits!r}")
        size = bits // 8
        operand = _word(value, bits)
        reply = _word(swapped, bits) if kind == lib.TU_ATOMIC_COMPARE_SWAP else 0
        offset = check_integer(offset, "offset", 0, 2**62)
        self._check(Access.ATOMIC, "use atomics on", offset, size)
        self._check_aligned(offset, size)
        return size, operand, reply, offset

    def _new_word(self, bits: int, fetch: bool) -> Any:
        return ffi.new(f"uint{bits}_t *") if fetch else ffi.NULL

    def _post_atomic(self, path: AccessPath, kind: int, terms: tuple[int, int, int, int], old: Any) -> Operation | None:
        self._scope.operations.unflushed = True
        size, operand, reply, offset = terms
        verdict = lib.tu_transfer_atomic(
            path.core.handle, self._scope.id, path.native, kind, size, operand, reply, old, offset
        )
        result = None if old == ffi.NULL else lambda: int(old[0])
        return self._posted(verdict, path, None, "an atomic operation", old, result)

    @property
    def _core(self) -> EndpointCore:
        return self._scope.endpoint

    def _key(self, use: str, core: EndpointCore) -> Key:
        if use not in self._keys:
            try:
                self._keys[use] = Key(core, self._descriptor.rkey)
            except UCXError as error:
                if error.status is not Status.SHMEM_SEGMENT:
                    raise
                instead = "use get and put" if use == "load and store" else "raise RLIMIT_AS, or free descriptors"
                raise not_mapped(self.nbytes, instead) from error
        return self._keys[use]

    # ---- checks ----

    def _check_open(self) -> None:
        if self._closed:
            raise ValueError("this remote memory was closed")
        self._check_endpoint()

    def _check(self, access: Access, doing: str, offset: int, nbytes: int) -> None:
        if access not in self.access:
            raise ValueError(f"its owner does not allow to {doing} this memory: {self.access!r}")
        if offset + nbytes > self.nbytes:
            raise ValueError(f"{nbytes} bytes from offset {offset} on reach beyond the end of {self.nbytes}")

    async def _pin(self, buffer: Contiguous, access: Access, doing: str, offset: int) -> Pinned:
        """Validates the arguments, then checks for cancellation, then whether the memory is open."""
        pins = self._pin_arguments(buffer, access, doing, offset)
        try:
            await trio.lowlevel.checkpoint_if_cancelled()
            self._check_open()
            check_reaches(self._core.engine, pins)
        except BaseException:
            pins.release()
            raise
        return pins

    def _pin_arguments(self, buffer: Contiguous, access: Access, doing: str, offset: int) -> Pinned:
        offset = check_integer(offset, "offset", 0, 2**62)
        pins = Pinned(buffer, writable=access is Access.READ)
        try:
            if pins.address is None:
                raise TypeError(
                    "this takes one contiguous buffer; for several call get_blocks() or put_blocks(). There are no "
                    "strided arrays for remote memory"
                )
            self._check(access, doing, offset, pins.size)
        except BaseException:
            pins.release()
            raise
        return pins

    async def _reach(self, memory: int) -> AccessPath:
        """Finds the access path of gets and puts for local memory of this kind. No checkpoint if it is known.

        After a wait it has checked that the memory is still open.
        """
        path = self._path or await self._reach_without_ucx_rma()
        if path is None or not path.takes(memory):
            path = await self._reach_by_ucx()
        return path

    async def _reach_without_ucx_rma(self) -> AccessPath | None:
        """Finds an access path without UCX's puts and gets; None: there is none. No checkpoint if it is known."""
        if self._path is None:
            await connect(self._core, self._scope)
            self._check_open()
            self._path = self._path or self._find_access_path()
        return self._path

    async def _reach_for_atomics(self) -> AccessPath:
        """Finds the access path of atomics. No checkpoint if it is known.

        Raises:
            RuntimeError: the memory is not mapped, and its owner does no atomics for others; with what to do.
        """
        return self._require_atomics(await self._reach_without_ucx_rma())

    def _require_atomics(self, path: AccessPath | None) -> AccessPath:
        if path is None:
            doing = "an atomic on memory that this process has not mapped"
            self._core.require(Feature.AM, doing)
            raise RuntimeError(
                f"{doing} is done by its owner, which takes no requests for this memory (the descriptor has no token): "
                "let a trio_ucx program own it, as host memory, in a context with ucp.Feature.AM; or send the owner a "
                "message, and let it change the memory itself"
            )
        return path

    async def _reach_by_ucx(self) -> AccessPath:
        """Finds the access path of UCX's puts and gets: for a Connection, over an endpoint beside its own."""
        if self._ucx_path is None or self._ucx_path.core.gone:
            self._core.engine.context._require(Feature.RMA, "UCX's own puts and gets, which this memory needs,")
            self._require_ucx_answers()
            core = connect_beside(self._core) if self._core.is_shared else self._core
            await connect(core, self._scope)
            self._check_open()
            if self._ucx_path is not None and self._ucx_path.core is core:
                return self._ucx_path  # another task was first
            old = self._keys.pop("put and get", None)  # for an endpoint that is gone
            if old is not None:
                old.close()
            self._ucx_path = AccessPath(core, ffi.NULL, self._key("put and get", core))
        return self._ucx_path

    def _require_ucx_answers(self) -> None:
        """Refuses UCX's puts and gets if they would never be answered."""
        self._descriptor._require_ucx()
        address = self._core.peer_address  # of a worker whose context may be another one than the memory's
        if address is not None:
            require_answers(ucx_access(address.features), "the context of the worker at the peer")

    def _find_access_path(self) -> AccessPath | None:
        try:
            key = self._key("load and store", self._core)
        except UCXError:
            return find_access_path(self._core, self._descriptor, None)
        return find_access_path(self._core, self._descriptor, key)

    async def _transfer(self, put: bool, pins: Pinned, offset: int, doing: str) -> None:
        if pins.size == 0:
            pins.release()
            await trio.lowlevel.cancel_shielded_checkpoint()
            return
        try:
            path = await self._reach(pins.memory)
        except BaseException:
            pins.release()
            raise
        await completed(self._post(put, pins, offset, doing, path), path.core.engine)

    def _post(
        self,
        put: bool,
        pins: Pinned,
        offset: int,
        doing: str,
        path: AccessPath,
        result: Callable[[], Any] | None = None,
    ) -> Operation | None:
        handle, scope = path.core.handle, self._scope.id
        if path.native:
            verdict = lib.tu_transfer(handle, scope, path.native, put, pins.address, pins.size, pins.memory, offset)
        else:
            assert path.key is not None
            call = lib.tu_put if put else lib.tu_get
            remote = self._descriptor.address + offset
            verdict = call(handle, pins.address, pins.size, pins.memory, remote, path.key.handle)
        return self._posted(verdict, path, pins, doing, result=result)

    def _posted(
        self,
        verdict: int,
        path: AccessPath,
        pins: Pinned | None,
        doing: str,
        keep: Any = None,
        result: Callable[[], Any] | None = None,
    ) -> Operation | None:
        """Takes the verdict on a transfer. The operation, if there is one, holds the key and ``keep`` until it ends.

        Args:
            result: returns the value of the operation; by default that is None.
        """
        key = path.key
        if verdict > 0 and key is not None:
            key.hold()
        refused = refusal(verdict, doing)
        if refused is not None and self._scope.problem() is None:
            if pins is not None:
                pins.release()
            raise refused
        return pending_operation(
            path.core.engine,
            verdict,
            pins,
            doing,
            self._scope,
            lambda engine, id, pins, doing, scope: _Transfer(engine, id, pins, doing, scope, key, keep, result),
        )

    @enable_ki_protection
    def close(self) -> None:
        """Lets go of it (``ucp_rkey_destroy``), once nothing is under way. Closed already: no effect.

        Raises:
            BufferError: something made from :meth:`map` is still in use.
        """
        if self._closed:
            return
        self._core.engine.run.check_thread()
        if self._borrowed is not None:
            self._borrowed.end()
        self._closed = True
        for key in self._keys.values():
            key.close()

    def __del__(self) -> None:
        if not self._closed and self._core.engine.handle is not None:
            warn_resource(f"unclosed {self!r}", self)
            for key in self._keys.values():
                self._core.engine.run.call_soon(key.close)

    def __repr__(self) -> str:
        state = "closed" if self._closed else repr(self.access)
        return f"<trio_ucx.ucp.RemoteMemory of {self.nbytes} bytes at {self._core.label}, {state}>"


def _word(value: int, bits: int) -> int:
    number: int = check_integer(value, "the value", -(2 ** (bits - 1)), 2**bits - 1)
    return number % (1 << bits)


def attach(check: Callable[[], None], scope: Scope, descriptor: bytes | MemoryDescriptor) -> RemoteMemory:
    """:meth:`Endpoint.attach`."""
    if not isinstance(descriptor, MemoryDescriptor):
        descriptor = MemoryDescriptor.from_bytes(descriptor)
    scope.engine.context._require_memory("using remote memory")
    if NOBODY not in (scope.endpoint.peer, descriptor._process) and scope.endpoint.peer != descriptor._process:
        raise ValueError("this descriptor is of another process's memory than the one that this endpoint leads to")
    memory: RemoteMemory = RemoteMemory._create(descriptor.nbytes, descriptor.access, check, scope, descriptor)
    return memory
