"""Reductions: the arrays of all ranks, combined element by element.

First the ranks agree: a binomial tree collects what each of them has, and its root tells all of them. Ranks whose
arrays differ in shape or dtype all learn that. Small arrays go with these messages. Of large ones the messages only say
when they are ready: their owner registers them, and another rank reads them from there, a piece at a time.

========== ================================ =============================================
operation  algorithm for large arrays       what each of *n* ranks reads
========== ================================ =============================================
reduce     binomial tree                    the array of each child
all_reduce ring: reduce-scatter, all-gather 2 (n - 1) / n arrays, from its left neighbour
========== ================================ =============================================

numpy is imported only here, and only when an array is reduced.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import attrs

from .. import Connection
from .._util.text import printable
from ..ucp import Access, Memory, RemoteMemory
from ._collectives import Post, Steps, Take, Use, broadcast, children, pack, parent, unpack, unreadable

#: The functions of numpy that have a name here.
OPERATIONS = {"sum": "add", "min": "minimum", "max": "maximum", "prod": "multiply"}
#: Bytes: shorter arrays go in messages.
_SMALL = 256 * 1024
#: Bytes that are read and combined at once; other tasks run in between.
_PIECE = 2**20


@attrs.define(eq=False)
class Reduction:
    """What this rank has, and what is to become of it.

    Attributes:
        array: what it has, in one dimension. It is a copy if it is small.
        result: where the result goes, with the shape that it was given; :attr:`out` is the same in one dimension.
        combine: puts the combination of two arrays into a third one, which may be the first.
        description: what must be the same for all ranks.
    """

    array: Any
    result: Any
    out: Any
    combine: Callable[[Any, Any, Any], None]
    description: str

    @property
    def small(self) -> bool:
        return bool(self.array.nbytes < _SMALL)

    @classmethod
    def create(cls, array: Any, op: Any, out: Any) -> Reduction:
        """Checks the arguments of a reduction.

        Raises:
            TypeError, ValueError: one of them is wrong.
        """
        import numpy

        from .._arrays.describe import dtype_name
        from .._arrays.header import item_size

        if isinstance(array, numpy.ma.MaskedArray) or isinstance(out, numpy.ma.MaskedArray):
            raise TypeError("masked arrays cannot be reduced: fill the masked elements first")
        array = numpy.asarray(array)
        if array.dtype.hasobject:
            raise TypeError(f"an array of {array.dtype} cannot be reduced: it has Python objects")
        if array.dtype.kind in "fc" or array.dtype.names is not None:
            item_size(dtype_name(array.dtype))  # raises BadHeader if they differ between kinds of machines
        if out is None:
            out = numpy.empty(array.shape, array.dtype)
        elif not isinstance(out, numpy.ndarray):
            raise TypeError(f"out must be a NumPy array, not {type(out).__name__}")
        elif (out.shape, out.dtype) != (array.shape, array.dtype):
            raise ValueError(
                f"out has shape {out.shape} and dtype {out.dtype}, but the array has {array.shape} and {array.dtype}"
            )
        elif not out.flags.c_contiguous or not out.flags.writeable:
            raise ValueError("out must be writable and C-contiguous")
        flat = numpy.ascontiguousarray(array).reshape(-1)
        if flat.nbytes < _SMALL or (out is not array and numpy.may_share_memory(flat, out)):
            flat = flat.copy()
        name = op if isinstance(op, str) else getattr(op, "__name__", "a function")
        return cls(flat, out, out.reshape(-1), _combine(op, array.dtype), f"{array.dtype} {array.shape}, {name}")

    def pieces(self, begin: int, end: int) -> Iterator[slice]:
        """Returns slices of at most ``_PIECE`` bytes, from element ``begin`` to ``end``."""
        step = max(1, _PIECE // self.array.itemsize)
        return (slice(at, min(at + step, end)) for at in range(begin, end, step))


def _combine(op: Any, dtype: Any) -> Callable[[Any, Any, Any], None]:
    import numpy

    if isinstance(op, str):
        if op not in OPERATIONS:
            raise ValueError(f"op must be {', '.join(map(repr, OPERATIONS))} or a function of two arrays, not {op!r}")
        op = getattr(numpy, OPERATIONS[op])
    elif not callable(op):
        raise TypeError(f"op must be a str or a function of two arrays, not {type(op).__name__}")
    if isinstance(op, numpy.ufunc):
        nothing = numpy.empty(0, dtype)
        op(nothing, nothing, out=nothing)  # raises TypeError if it does not take this dtype, or gives another one
        return lambda one, other, out: op(one, other, out=out)

    def combine(one: Any, other: Any, out: Any) -> None:
        found = numpy.asarray(op(one, other))
        if (found.shape, found.dtype) != (out.shape, out.dtype):
            raise ValueError(
                f"the function has made of two arrays of {out.dtype} {out.shape} one of {found.dtype} {found.shape}; "
                "it must keep shape and dtype"
            )
        out[...] = found

    return combine


# ---- the operations ----


def reduce(rank: int, size: int, job: Reduction, root: int) -> Steps:
    """Returns the result at the root, None elsewhere; or, at all ranks, the error."""
    error = yield from _agree(rank, size, job, root, tell_result=False)
    if error is None and not job.small:
        yield from _reduce_in_tree(rank, size, job, root)
    return error or (job.result if rank == root else None)


def all_reduce(rank: int, size: int, job: Reduction) -> Steps:
    """Returns the result, or the error."""
    error = yield from _agree(rank, size, job, 0, tell_result=True)
    if error is None and not job.small:
        yield from _all_reduce_in_ring(rank, size, job)
    return error or job.result


def _agree(rank: int, size: int, job: Reduction, root: int, tell_result: bool) -> Steps:
    """Returns an error if the ranks have different arrays. Reduces small ones, with the result at the root."""
    import numpy

    mine, error, description = job.array, b"", job.description.encode()
    for child in children(rank, size, root):
        theirs, its_description, its_error, data = unpack((yield Take(child)), 4)
        if its_description == description and not its_error and len(data) not in (0, mine.nbytes):
            raise unreadable()
        if not error and its_error:
            error = its_error
        elif not error and its_description != description:
            error = b"rank %d has %b; rank %b has %b" % (rank, description, theirs, its_description)
        elif not error and data:
            job.combine(mine, numpy.ndarray(mine.shape, mine.dtype, data), job.out)
            mine = job.out
    if mine is not job.out and (job.small or size == 1):
        job.out[...] = mine
    data = job.out.tobytes() if job.small and not error else b""
    if rank != root:
        yield Post(parent(rank, size, root), pack([b"%d" % rank, description, error, data]))
    verdict = pack([error, data if tell_result else b""])
    error, data = unpack((yield from broadcast(rank, size, verdict, root)), 2)
    if error:
        return ValueError(
            f"the ranks do not agree about what they reduce: {printable(error.decode(errors='replace'), len(error))}"
        )
    if data:
        if len(data) != job.out.nbytes:
            raise unreadable()
        job.out[...] = numpy.ndarray(job.out.shape, job.out.dtype, data)
    return None


def _reduce_in_tree(rank: int, size: int, job: Reduction, root: int) -> Steps:
    mine = job.array
    for child in children(rank, size, root):
        with (yield Use(child, partial(_attach, (yield Take(child))))) as remote:
            yield Use(child, partial(_read_and_combine, job, remote, mine, 0, len(mine)))
        yield Post(child, b"")
        mine = job.out
    if rank != root:
        with (yield Use(parent(rank, size, root), partial(_register, mine))) as memory:
            yield Post(parent(rank, size, root), bytes(memory.descriptor))
            yield Take(parent(rank, size, root))  # it has read it


def _all_reduce_in_ring(rank: int, size: int, job: Reduction) -> Steps:
    if size == 1:
        return
    left, right = (rank - 1) % size, (rank + 1) % size
    bounds = [len(job.out) * part // size for part in range(size + 1)]
    with (
        (yield Use(right, partial(_register, job.array))) as array,
        (yield Use(right, partial(_register, job.out))) as out,
    ):
        yield Post(right, pack([bytes(array.descriptor), bytes(out.descriptor)]))
        descriptors = unpack((yield Take(left)), 2)
        with (
            (yield Use(left, partial(_attach, descriptors[0]))) as its_array,
            (yield Use(left, partial(_attach, descriptors[1]))) as its_out,
        ):
            for step in range(2 * (size - 1)):
                if step:  # the right neighbour may read what this rank has made in the step before
                    yield Post(right, b"")
                    yield Take(left)
                part = (rank - 1 - step) % size
                begin, end = bounds[part], bounds[part + 1]
                if step < size - 1:
                    source = its_out if step else its_array
                    yield Use(left, partial(_read_and_combine, job, source, job.array, begin, end))
                else:  # the part is complete
                    yield Use(left, partial(_read, job, its_out, begin, end))
        yield Post(left, b"")
        yield Take(right)  # it has read everything


# ---- what is awaited ----


async def _register(array: Any, connection: Connection) -> Memory:
    return connection.worker.context.register(array.view("u1"), access=Access.READ)


async def _attach(descriptor: bytes, connection: Connection) -> RemoteMemory:
    return await connection.attach(descriptor)


async def _read(job: Reduction, remote: RemoteMemory, begin: int, end: int, connection: Connection) -> None:
    """Reads a part of another rank's result."""
    if begin < end:
        await remote.get_blocks([(begin * job.out.itemsize, job.out[begin:end].view("u1"))])


async def _read_and_combine(
    job: Reduction, remote: RemoteMemory, mine: Any, begin: int, end: int, connection: Connection
) -> None:
    """Combines a part of another rank's array with ours, into the result."""
    import numpy

    longest = max(1, _PIECE // mine.itemsize)
    buffer = numpy.empty(min(longest, end - begin), mine.dtype)
    for piece in job.pieces(begin, end):
        theirs = buffer[: piece.stop - piece.start]
        await remote.get_into(theirs.view("u1"), piece.start * mine.itemsize)
        job.combine(mine[piece], theirs, job.out[piece])
