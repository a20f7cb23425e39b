"""Lists of blocks: one call gets or puts many ranges of remote memory.

:meth:`.RemoteMemory.plan`, :meth:`.RemoteMemory.get_blocks` and :meth:`.RemoteMemory.put_blocks` import it when they
are first called.
"""

from __future__ import annotations

from array import array
from bisect import bisect
from collections.abc import Callable, Iterable
from itertools import accumulate, pairwise
from typing import Any, Protocol, cast

import attrs
import trio
from trio.lowlevel import enable_ki_protection

from .._native import ffi, lib
from .._util.arguments import check_integer
from .._util.handles import OpenedNotConstructed
from ._engine.endpoint_core import EndpointCore, Scope
from ._engine.operations import Operation
from ._engine.posting import check_reaches, completed
from ._memory.buffers import Contiguous, Pinned
from ._memory.registered import Access, MemoryDescriptor
from ._rma.access_paths import AccessPath

__all__ = ["BlockNumbers", "BlockPlan", "BlockProgress"]

#: What names blocks, such as a list, a range, an ``array.array``, a numpy array, or anything else that yields integers.
BlockNumbers = Iterable[int]

#: Formats of the buffer protocol for integers of 8 bytes with a sign: such a buffer is copied in one step.
_INT64 = ("q", "l") if array("l").itemsize == 8 else ("q",)


def _numbers(blocks: BlockNumbers, name: str) -> tuple[Any, int]:
    """Returns a copy of the numbers of blocks as C takes them, and how many they are.

    Raises:
        TypeError, ValueError: they are no integers.
    """
    if isinstance(blocks, (str, bytes, bytearray)):
        raise TypeError(f"{name} must be integers, not {type(blocks).__name__}")
    found = array("q")
    if not isinstance(blocks, (list, tuple, range)):
        try:
            view = memoryview(cast(Any, blocks))
        except (TypeError, ValueError, BufferError):
            pass
        else:
            with view:
                if view.ndim != 1:
                    raise ValueError(f"{name} must have one dimension, not {view.ndim}")
                if view.format == "?":
                    raise TypeError(f"{name} must be integers, not a mask of booleans")
                if view.format in _INT64 and view.c_contiguous:
                    found.frombytes(view.cast("B"))
                    return ffi.from_buffer("int64_t[]", found), len(found)
    try:
        found.extend(iter(blocks))
    except TypeError as error:
        raise TypeError(f"{name} must be integers, the numbers of blocks: {error}") from None
    except OverflowError:
        raise ValueError(f"{name} has a number that is no 64-bit integer") from None
    return ffi.from_buffer("int64_t[]", found), len(found)


class _RemoteMemory(Protocol):
    """A :class:`.RemoteMemory`, which imports this module."""

    nbytes: int
    _descriptor: MemoryDescriptor
    _scope: Scope

    @property
    def _core(self) -> EndpointCore: ...
    def _check_open(self) -> None: ...
    def _check(self, access: Access, doing: str, offset: int, nbytes: int) -> None: ...
    async def _reach(self, memory: int) -> AccessPath: ...
    async def notify(self, data: Contiguous) -> None: ...
    def _posted(
        self, verdict: int, path: AccessPath, pins: Pinned | None, doing: str, keep: Any = None
    ) -> Operation | None: ...


@attrs.define(eq=False, repr=False)
class BlockProgress:
    """How far a list has come. Pass it to the call, and look whenever you want: after a cancellation, too.

    A list that goes on without its task still counts.
    """

    #: Bytes that are done, which C counts.
    _word: Any = attrs.field(factory=lambda: ffi.new("uint64_t *"), init=False, repr=False)
    #: The size of all blocks; or where each one ends.
    _sizes: int | list[int] = attrs.field(default=1, init=False, repr=False)

    @property
    def completed(self) -> int:
        """Returns how many blocks, from the beginning of the list, are completed; later ones may be, too."""
        done = int(self._word[0])
        return done // self._sizes if isinstance(self._sizes, int) else bisect(self._sizes, done)

    def _begin(self, sizes: int | list[int]) -> None:
        self._sizes, self._word = sizes, ffi.new("uint64_t *")

    def __repr__(self) -> str:
        return f"<trio_ucx.ucp.blocks.BlockProgress, {self.completed} completed>"


@attrs.define(eq=False, repr=False)
class BlockPlan(metaclass=OpenedNotConstructed):
    """A pool of blocks here and one at a peer, by :meth:`.RemoteMemory.plan`.

    It needs no closing: it pins the buffer only during a call, and works as long as the RemoteMemory is open. Several
    tasks can use it at the same time. Blocks are numbered from 0 on. Bytes at the end of either memory that do not fill
    a block belong to none.

    Attributes:
        block: the size of a block in bytes.
        remote_block_count: how many blocks the peer has.
    """

    block: int
    remote_block_count: int
    _remote: _RemoteMemory
    _buffer: Contiguous
    _offset: int

    @enable_ki_protection
    async def get(
        self, remote_blocks: BlockNumbers, local_blocks: BlockNumbers, *, progress: BlockProgress | None = None
    ) -> None:
        """Reads the peer's block ``remote_blocks[i]`` into block ``local_blocks[i]`` here, for each i.

        Neighbours are read together, with up to 64 messages in flight. Otherwise as :meth:`.RemoteMemory.get_into`.

        Args:
            remote_blocks: numbers of blocks of the peer's: the source, which comes first here and in :meth:`put`.
            local_blocks: as many numbers of blocks here, all different.
            progress: counts the blocks that have arrived.

        Cancellation: returns at once; no further block is asked for. Those in flight are still written, until
        ``Connection.wait_buffers_released`` returns.

        Raises:
            TypeError, ValueError: not integers; not as many; one is beyond the end, or written twice; not allowed by
                :attr:`.RemoteMemory.access`; the remote memory was closed.
            RuntimeError, UCXError, OSError: as for :meth:`.RemoteMemory.get`; a note says how many blocks are there.
            trio.ClosedResourceError, trio.BrokenResourceError: the endpoint was closed; the peer is gone.
        """
        await self._transfer(False, local_blocks, remote_blocks, progress)

    @enable_ki_protection
    async def put(
        self,
        local_blocks: BlockNumbers,
        remote_blocks: BlockNumbers,
        *,
        progress: BlockProgress | None = None,
        notify: Contiguous | None = None,
    ) -> None:
        """Writes block ``local_blocks[i]`` here into the peer's block ``remote_blocks[i]``, for each i.

        Returns when the blocks here may be used again; :meth:`.RemoteMemory.flush` waits until all are there. Otherwise
        as :meth:`get` and :meth:`.RemoteMemory.put`.

        Args:
            local_blocks: numbers of blocks here.
            remote_blocks: as many numbers of blocks of the peer's, all different.
            progress: counts the blocks here that may be used again.
            notify: calls :meth:`.RemoteMemory.notify` afterwards: then this returns when the peer has all blocks, and
                the notification.

        Cancellation: any of the blocks may be written, or not, or in part; those here stay pinned until UCX lets go of
        them.

        Raises:
            TypeError, ValueError: as for :meth:`get`.
            RuntimeError, UCXError, OSError: as for :meth:`.RemoteMemory.put`.
            trio.ClosedResourceError, trio.BrokenResourceError: the endpoint was closed; the peer is gone.
        """
        await self._transfer(True, local_blocks, remote_blocks, progress)
        if notify is not None:
            await self._remote.notify(notify)

    async def _transfer(
        self, put: bool, local_blocks: BlockNumbers, remote_blocks: BlockNumbers, progress: BlockProgress | None
    ) -> None:
        remote, size = self._remote, self.block
        local, count = _numbers(local_blocks, "local_blocks")
        wanted, found = _numbers(remote_blocks, "remote_blocks")
        if count != found:
            raise ValueError(f"local_blocks has {count} numbers, and remote_blocks has {found}: give equally many")
        remote._check(Access.WRITE if put else Access.READ, "write" if put else "read", 0, 0)
        pins = Pinned(self._buffer, writable=not put)
        try:
            local_limit = pins.size // size
            _check_all(local, count, local_limit, "local")
            _check_all(wanted, count, self.remote_block_count, "remote")
            if put:
                _check_different(wanted, count, self.remote_block_count, "remote")
            else:
                _check_different(local, count, local_limit, "local")
        except BaseException:
            pins.release()
            raise
        progress = progress or BlockProgress()
        progress._begin(size)
        rest = (pins.address, pins.memory, local, self._offset, wanted, count, size, progress._word)
        await _carry_out(remote, put, pins, progress, count, lib.tu_transfer_blocks, rest)

    def __repr__(self) -> str:
        return f"<trio_ucx.ucp.blocks.BlockPlan of {self.remote_block_count} blocks of {self.block} bytes at the peer>"


async def transfer_buffers(
    remote: _RemoteMemory, put: bool, blocks: Iterable[tuple[int, Contiguous]], progress: BlockProgress | None
) -> None:
    """:meth:`.RemoteMemory.get_blocks` and :meth:`.RemoteMemory.put_blocks`."""
    offsets: list[int] = []
    buffers: list[Contiguous] = []
    for block in blocks:
        try:
            offset, buffer = block
        except (TypeError, ValueError):
            raise TypeError(f"a block is an offset and a buffer, not {block!r}") from None
        offsets.append(check_integer(offset, "offset", 0, 2**62))
        buffers.append(buffer)
    remote._check(Access.WRITE if put else Access.READ, "write" if put else "read", 0, 0)
    pins = Pinned(buffers, writable=not put)
    try:
        sizes = [int(pins.many.lengths[index]) for index in range(pins.many.count)]
        if len(sizes) < len(buffers) or 0 in sizes:
            raise ValueError("a list of blocks has an empty buffer")
        _check_ranges(remote, offsets, sizes, put)
    except BaseException:
        pins.release()
        raise
    progress = progress or BlockProgress()
    progress._begin(list(accumulate(sizes)))
    rest = (pins.many, ffi.new("uint64_t[]", offsets), progress._word)
    await _carry_out(remote, put, pins, progress, len(sizes), lib.tu_transfer_buffers, rest)


async def _carry_out(
    remote: _RemoteMemory,
    put: bool,
    pins: Pinned,
    progress: BlockProgress,
    count: int,
    post: Callable[..., int],
    arguments: tuple[Any, ...],
) -> None:
    """Posts a list, and waits for it. Releases the pins, whatever happens.

    Args:
        post: the function of C that posts it.
        arguments: what it takes besides the endpoint, the scope, the path and the direction.
    """
    try:
        await trio.lowlevel.checkpoint_if_cancelled()
        remote._check_open()
        check_reaches(remote._core.engine, pins)
        path = await remote._reach(pins.memory)
    except BaseException:
        pins.release()
        raise
    if count == 0:
        pins.release()
        await trio.lowlevel.cancel_shielded_checkpoint()
        return
    if put:
        remote._scope.operations.unflushed = True
    native = path.native or _native_for_ucx(remote, path)
    doing = f"{'writing' if put else 'reading'} {count} blocks of remote memory"
    try:
        verdict = post(path.core.handle, remote._scope.id, native, put, *arguments)
        await completed(remote._posted(verdict, path, pins, doing, progress._word), path.core.engine)
    except Exception as error:
        error.add_note(f"the first {progress.completed} of {count} blocks are completed")
        raise


def _native_for_ucx(remote: _RemoteMemory, path: AccessPath) -> Any:
    """Returns the ``tu_access_path_t`` of UCX's own puts and gets."""
    assert path.key is not None
    descriptor = remote._descriptor
    members = {"length": descriptor.nbytes, "address": descriptor.address, "rkey": path.key.handle}
    return ffi.new("tu_access_path_t *", members)


def _check_ranges(remote: _RemoteMemory, offsets: list[int], sizes: list[int], put: bool) -> None:
    for index, (offset, size) in enumerate(zip(offsets, sizes, strict=True)):
        if offset + size > remote.nbytes:
            raise ValueError(
                f"block {index}: {size} bytes from offset {offset} on reach beyond the end of {remote.nbytes}"
            )
    if put:
        for (start, size), (following, _) in pairwise(sorted(zip(offsets, sizes, strict=True))):
            if start + size > following:
                raise ValueError("the blocks of a list overlap in the remote memory")


def _check_all(blocks: Any, count: int, limit: int, side: str) -> None:
    bad = lib.tu_blocks_beyond(blocks, count, limit)
    if bad < count:
        where = "the buffer" if side == "local" else "the remote memory"
        raise ValueError(f"{side}_blocks[{bad}] is {blocks[bad]}, but {where} has {limit} blocks, numbered from 0 on")


def _check_different(blocks: Any, count: int, limit: int, side: str) -> None:
    bad = lib.tu_blocks_repeated(blocks, count, limit)
    if bad > count:
        raise MemoryError(f"no memory to check {count} numbers of blocks")
    if bad < count:
        raise ValueError(
            f"{side}_blocks[{bad}] is {blocks[bad]}, which is in the list before: a list may write a block only once"
        )


def plan(remote: _RemoteMemory, buffer: Contiguous, block: int, offset: int) -> BlockPlan:
    """:meth:`.RemoteMemory.plan`."""
    block = check_integer(block, "block", 1, 2**62)
    offset = check_integer(offset, "offset", 0, remote.nbytes)
    pins = Pinned(buffer)
    try:
        if pins.address is None:
            raise TypeError("plan() takes one contiguous buffer, not a list or a strided array")
    finally:
        pins.release()
    created: BlockPlan = BlockPlan._create(block, (remote.nbytes - offset) // block, remote, buffer, offset)
    return created
