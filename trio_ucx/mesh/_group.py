"""The Group: what the ranks of a job do together."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from types import MappingProxyType
from typing import Any, Literal, NoReturn, TypeVar

import trio
from trio.lowlevel import enable_ki_protection

from .. import Buffer, Connection, WritableBuffer
from .._connection import check_tag
from .._opening.options import check_max_size
from .._util.arguments import check_integer
from .._util.handles import OpenedNotConstructed
from ..ucp._internal_api import Signal
from . import _collectives as collectives
from . import _reductions as reductions
from ._errors import RankLostError, again
from ._links import GONE, Links, RankConnection, has_left
from ._meeting import VERDICT, Coordinator, Follower, why
from ._members import Members
from ._running import KINDS, Collectives

#: The longest message, in bytes, that :meth:`Group.send_receive` copies: to start a task that sends it takes longer.
_COPIED = 64 * 1024

_T = TypeVar("_T")


class Group(metaclass=OpenedNotConstructed):
    """The ranks of a job, of which this process is one. :func:`join` gives it.

    The connections to the other ranks belong to the group: use them, and do not close them.
    """

    def __init__(self, members: Members, links: Links, centre: Coordinator | Follower) -> None:
        self._members = members
        self._links = links
        self._centre = centre
        self._collectives = Collectives(members, links, self._explain)
        #: Losses that :meth:`receive_from_any` has not raised yet.
        self._unreported: list[RankLostError] = []
        self._reported: RankLostError | None = None
        #: The rank from which :meth:`receive_from_any` has received last.
        self._served = -1
        self._waiters: set[Signal] = set()
        members.on_change.append(self._member_changed)
        links.on_established = self._wake

    # ---- the ranks ----

    @property
    def rank(self) -> int:
        """This process's number in the group, from 0 on."""
        return self._members.rank

    @property
    def size(self) -> int:
        """Returns how many ranks the group has, lost ones included."""
        return self._members.size

    @property
    def generation(self) -> int:
        """Returns how many processes have joined under the numbers of lost ranks, as far as this rank knows."""
        return self._members.generation

    @property
    def lost(self) -> Mapping[int, str]:
        """The lost ranks that have not been replaced, and why they were lost."""
        return MappingProxyType({rank: error.reason for rank, error in self._members.lost.items()})

    def __repr__(self) -> str:
        lost = f", lost: {sorted(self._members.lost)}" if self._members.lost else ""
        return f"<trio_ucx.mesh.Group, rank {self.rank} of {self.size}{lost}>"

    def _member_changed(self, rank: int) -> None:
        loss = self._members.lost.get(rank)
        if loss is not None and loss is not self._reported:
            self._unreported.append(loss)
            self._reported = loss
        self._wake()

    def _leave(self) -> None:
        """From now on, operations raise ``trio.ClosedResourceError``, and this rank's ends are no losses of others."""
        self._links.leaving = True
        self._members.changed.unpark_all()
        self._wake()

    def _wake(self) -> None:
        waiters, self._waiters = self._waiters, set()
        for waiter in waiters:
            waiter.set()

    def _check(self) -> None:
        if self._links.leaving:
            raise has_left()

    def _check_rank(self, rank: int) -> int:
        rank = check_integer(rank, "the rank", 0, self.size - 1)
        if rank == self.rank:
            raise ValueError(f"this is rank {rank}: a rank has no connection to itself")
        return rank

    async def _link(self, rank: int) -> RankConnection:
        link = self._links.by_rank.get(rank)
        if link is None or link.connection is None or self._members.lost or self._links.leaving:
            rank = self._check_rank(rank)
            self._check()
            await trio.lowlevel.checkpoint_if_cancelled()
            link = await self._links.connected(rank)
        return link

    async def _use(self, rank: int, operation: Callable[[Connection], Awaitable[_T]]) -> _T:
        """Calls ``operation`` with the connection to a rank, and makes its errors name the rank."""
        link = await self._link(rank)
        assert link.connection is not None
        try:
            return await operation(link.connection)
        except GONE as error:
            raise await self._explain(link, error) from error

    async def _explain(self, link: RankConnection, error: Exception) -> Exception:
        """The error for an operation with a rank whose connection has ended: rank 0 says which rank was lost."""
        rank = link.rank
        if self._links.leaving:
            return has_left()
        if self._links.by_rank.get(rank) is not link:
            return again(self._members.losses[rank])  # and another process has its number
        if rank not in self._members.lost:
            self._suspect(link, error)
        with trio.move_on_after(VERDICT):
            while (lost := self._members.error(rank)) is None:
                await self._members.changed.park()
                if self._links.leaving:
                    return has_left()
            return lost
        return RankLostError(rank, why(error))

    def _suspect(self, link: RankConnection, error: Exception) -> None:
        self._links.suspect(link.rank, f"rank {self.rank} cannot reach it: {why(error)}")

    # ---- messages ----

    @enable_ki_protection
    async def connection(self, rank: int) -> Connection:
        """Returns the connection to another rank; opens it if there is none yet.

        There is one for each pair of ranks, the same for all tasks. Its own operations raise errors that do not name
        the rank.

        Cancellation: the connection is opened all the same.

        Raises:
            RankLostError: the rank was lost; or any rank was, if a loss ends the group.
            trio.ClosedResourceError: this rank has left the group.
            TypeError, ValueError: not another rank of the group.
        """
        link = await self._link(rank)
        await trio.lowlevel.checkpoint()
        assert link.connection is not None
        return link.connection

    @enable_ki_protection
    async def send(self, data: Buffer, *, to: int, tag: int = 0) -> None:
        """Sends one message to a rank; see :meth:`trio_ucx.Connection.send`.

        Cancellation: as :meth:`trio_ucx.Connection.send`.

        Raises:
            RankLostError, trio.ClosedResourceError: as :meth:`connection`.
            TypeError, ValueError, RuntimeError, MemoryError: as :meth:`trio_ucx.Connection.send`.
        """
        await self._use(to, lambda connection: connection.send(data, tag=tag))

    @enable_ki_protection
    async def receive(self, *, source: int, tag: int = 0, max_size: int | None = None) -> bytes:
        """Receives the next message of a rank; see :meth:`trio_ucx.Connection.receive`.

        What a rank has sent before it left can still be received.

        Cancellation: nothing is lost.

        Raises:
            RankLostError, trio.ClosedResourceError: as :meth:`connection`.
            MessageTooLong, MemoryError, TypeError, ValueError: as :meth:`trio_ucx.Connection.receive`.
        """
        return await self._use(source, lambda connection: connection.receive(tag=tag, max_size=max_size))

    @enable_ki_protection
    async def receive_into(self, buffer: WritableBuffer, *, source: int, tag: int = 0, exact: bool = False) -> int:
        """Receives the next message of a rank into a buffer; see :meth:`trio_ucx.Connection.receive_into`.

        Cancellation: as :meth:`trio_ucx.Connection.receive_into`.

        Raises:
            RankLostError, trio.ClosedResourceError: as :meth:`connection`.
            MessageTooLong, RuntimeError, TypeError, ValueError: as :meth:`trio_ucx.Connection.receive_into`.
        """
        return await self._use(source, lambda connection: connection.receive_into(buffer, tag=tag, exact=exact))

    @enable_ki_protection
    async def send_array(self, array: Any, *, to: int, tag: int = 0) -> None:
        """Sends an array to a rank; see :meth:`trio_ucx.Connection.send_array`.

        Cancellation: as :meth:`trio_ucx.Connection.send`.

        Raises:
            RankLostError, trio.ClosedResourceError: as :meth:`connection`.
            TypeError, ValueError, RuntimeError, MemoryError: as :meth:`trio_ucx.Connection.send_array`.
        """
        await self._use(to, lambda connection: connection.send_array(array, tag=tag))

    @enable_ki_protection
    async def receive_array(
        self, *, source: int, tag: int = 0, out: Any = None, allocate: Callable[[int], Any] | None = None
    ) -> Any:
        """Receives the next message of a rank, which has one array; see :meth:`trio_ucx.Connection.receive_array`.

        Cancellation: as :meth:`trio_ucx.Connection.receive_array`.

        Raises:
            RankLostError, trio.ClosedResourceError: as :meth:`connection`.
            UnexpectedMessage, MessageTooLong, MemoryError: as :meth:`trio_ucx.Connection.receive_array`.
            TypeError, ValueError, ImportError, RuntimeError: as :meth:`trio_ucx.Connection.receive_array`.
        """
        return await self._use(source, lambda connection: connection.receive_array(tag=tag, out=out, allocate=allocate))

    @enable_ki_protection
    async def send_arrays(self, arrays: Mapping[str, Any] | Sequence[Any], *, to: int, tag: int = 0) -> None:
        """Sends a list or a dict of arrays to a rank; see :meth:`trio_ucx.Connection.send_arrays`.

        Cancellation: as :meth:`trio_ucx.Connection.send`.

        Raises:
            RankLostError, trio.ClosedResourceError: as :meth:`connection`.
            TypeError, ValueError, RuntimeError, MemoryError: as :meth:`trio_ucx.Connection.send_array`.
        """
        await self._use(to, lambda connection: connection.send_arrays(arrays, tag=tag))

    @enable_ki_protection
    async def receive_arrays(
        self,
        *,
        source: int,
        tag: int = 0,
        into: Mapping[str, Any] | Sequence[Any] | None = None,
        allocate: Callable[[int], Any] | None = None,
    ) -> Any:
        """Receives the next message of a rank, which has a list or a dict of arrays.

        See :meth:`trio_ucx.Connection.receive_arrays`.

        Cancellation: as :meth:`trio_ucx.Connection.receive_array`.

        Raises:
            RankLostError, trio.ClosedResourceError: as :meth:`connection`.
            UnexpectedMessage, MessageTooLong, MemoryError: as :meth:`trio_ucx.Connection.receive_array`.
            TypeError, ValueError, ImportError, RuntimeError: as :meth:`trio_ucx.Connection.receive_array`.
        """
        return await self._use(
            source, lambda connection: connection.receive_arrays(tag=tag, into=into, allocate=allocate)
        )

    @enable_ki_protection
    async def send_receive(
        self,
        data: Buffer = b"",
        *,
        to: int | None,
        source: int | None,
        into: WritableBuffer | None = None,
        tag: int = 0,
    ) -> bytes | int | None:
        """Sends to one rank and receives from another at the same time, as ``MPI_Sendrecv`` does.

        Ranks that all send first do not wait for each other then.

        Args:
            data: what to send.
            to: the rank to send to; None: send nothing.
            source: the rank to receive from; None: receive nothing.
            into: the buffer to receive into.
            tag: the tag of both messages.

        Returns:
            The message; its length with ``into``; None without a ``source``.

        Cancellation: as :meth:`send` and :meth:`receive`.

        Raises:
            RankLostError, trio.ClosedResourceError: as :meth:`connection`.
            TypeError, ValueError, RuntimeError, MemoryError: as :meth:`send` and :meth:`receive`.
            MessageTooLong: as :meth:`receive_into`.
        """
        received: bytes | int | None = None

        async def receive(rank: int) -> None:
            nonlocal received
            if into is None:
                received = await self.receive(source=rank, tag=tag)
            else:
                received = await self.receive_into(into, source=rank, tag=tag)

        async def sent_at_once(connection: Connection) -> bool:
            try:
                connection.send_nowait(data, tag=tag)
            except trio.WouldBlock:
                return False
            return True

        for rank in (to, source):
            if rank is not None:
                self._check_rank(rank)
        if to is None and source is None:
            await trio.lowlevel.checkpoint()
        elif to is None:
            assert source is not None
            await receive(source)
        elif source is None:
            await self.send(data, to=to, tag=tag)
        elif _is_small(data) and await self._use(to, sent_at_once):
            await receive(source)
        else:
            error: Exception | None = None  # raised outside: in `except*`, Python before 3.11.4 makes a group of it
            try:
                async with trio.open_nursery() as nursery:
                    nursery.start_soon(partial(self.send, data, to=to, tag=tag))
                    await receive(source)
            except* Exception as group:
                error = group.exceptions[0]
            if error is not None:
                raise error from None
        return received

    @enable_ki_protection
    async def receive_from_any(self, *, tag: int = 0, max_size: int | None = None) -> tuple[int, bytes]:
        """Receives the next message that any other rank sends with this tag. Returns the rank and the message.

        Ranks that have sent something take turns.

        Cancellation: nothing is lost.

        Raises:
            trio.EndOfChannel: all other ranks have left, and everything was received.
            RankLostError: a rank was lost. With ``on_loss="continue"``, each loss is raised once; then this can be
                called again.
            trio.ClosedResourceError: this rank has left the group.
            MessageTooLong, MemoryError, TypeError, ValueError: as for :meth:`receive`.
        """
        tag = check_tag(tag)
        if max_size is not None:
            check_max_size(max_size)
        await trio.lowlevel.checkpoint_if_cancelled()
        while True:
            self._check()
            link = self._next_ready(tag)
            if link is not None:
                self._served = link.rank
                return link.rank, await self.receive(source=link.rank, tag=tag, max_size=max_size)
            await self._wait_any(tag)

    def _next_ready(self, tag: int) -> RankConnection | None:
        ready = [link for link in self._links.by_rank.values() if link.has_message(tag)]
        later = [link for link in ready if link.rank > self._served]
        return min(later or ready, key=lambda link: link.rank, default=None)

    async def _wait_any(self, tag: int) -> None:
        """Waits until something has changed that a :meth:`receive_from_any` must look at.

        Raises:
            RankLostError, trio.EndOfChannel: see there.
        """
        members = self._members
        if members.ended is not None:
            raise again(members.ended)
        if self._unreported:
            raise again(self._unreported.pop(0))
        links = [link for link in self._links.by_rank.values() if link.connection is not None]
        ends = {link: link.ended(tag) for link in links}
        for link, end in ends.items():
            if end is not None and not isinstance(end, trio.EndOfChannel) and not members.gone(link.rank):
                self._suspect(link, end)
        open_links = [link for link, end in ends.items() if end is None]
        if not open_links and all(rank in members.departed for rank in range(members.size) if rank != self.rank):
            raise trio.EndOfChannel("all other ranks have left the group")
        signal = Signal()
        self._waiters.add(signal)
        wait = signal.wait
        with ExitStack() as stack:
            stack.callback(self._waiters.discard, signal)
            for link in open_links:
                assert link.connection is not None
                stack.enter_context(link.watching(tag, signal))
                wait = partial(link.connection.worker._engine.waiting.wait, signal)  # it polls before it parks
            await wait()

    @enable_ki_protection
    async def wait_lost(self) -> NoReturn:
        """Waits until a rank is lost, and raises that. It never returns.

        With ``on_loss="continue"`` a loss interrupts only operations with the lost rank, and collective operations. A
        rank that waits for another one, which waits for the lost one, would wait for ever. This task beside it, in
        the same nursery, ends both.

        Cancellation: it has no effect.

        Raises:
            RankLostError: a rank is lost that has not been replaced; or one is lost after this was called.
            trio.ClosedResourceError: this rank has left the group.
        """
        members = self._members
        before = dict(members.losses)
        await trio.lowlevel.checkpoint()
        while True:
            self._check()
            error = members.any_error()
            new = [loss for rank, loss in members.losses.items() if loss is not before.get(rank)]
            if error is not None or new:
                raise error or again(new[0])
            await members.changed.park()

    @enable_ki_protection
    async def wait_replaced(self, rank: int) -> None:
        """Waits until a new process has joined under the number of a lost rank, and all ranks have heard of it.

        Returns at once if the rank was not lost. Afterwards each rank's next collective operation is one of the new
        generation, also on a rank that has not called this.

        Cancellation: it has no effect.

        Raises:
            RankLostError: the group has ended.
            trio.ClosedResourceError: this rank has left the group.
            TypeError, ValueError: not another rank of the group.
        """
        rank = self._check_rank(rank)
        await trio.lowlevel.checkpoint()
        while True:
            self._check()
            if self._members.ended is not None:
                raise again(self._members.ended)
            if rank not in self._members.lost and self._members.member(rank) <= self._members.heard:
                return
            await self._members.changed.park()

    # ---- collective operations ----

    @enable_ki_protection
    async def barrier(self) -> None:
        """Waits until all ranks have called it (dissemination: ceil(log2(size)) rounds).

        All ranks must call the collective operations in the same order; within a rank, one task at a time.

        Cancellation: this rank does not wait any longer. For the others it counts as having arrived: its part is done
        in the background, and its next collective operation begins after that.

        Raises:
            RankLostError: a rank was lost after this was called, or before, and has not been replaced.
            RuntimeError: another rank is in another operation.
            trio.BusyResourceError: another task of this rank is in one.
            trio.ClosedResourceError: this rank has left the group.
        """
        await self._run("barrier", collectives.barrier(self.rank, self.size))

    @enable_ki_protection
    async def broadcast(self, data: Any = None, *, root: int = 0) -> Any:
        """Sends the same value from one rank to all (a binomial tree).

        Args:
            data: at the root: an object with the buffer protocol, which arrives as ``bytes``, or a NumPy array, which
                arrives as an array of the same shape and dtype. It is copied: this is for small values.
            root: the rank that has it.

        Returns:
            The value, at the root as well.

        Cancellation: as for :meth:`barrier`; the value is passed on in the background.

        Raises:
            RankLostError, RuntimeError, trio.BusyResourceError, trio.ClosedResourceError: as for :meth:`barrier`.
            MessageTooLong, MemoryError: as for :meth:`receive`. This rank has not done its part then, so it should
                leave the group. (If the operation was cancelled, the rank counts as lost.)
            TypeError, ValueError: wrong data or root.
        """
        root = check_integer(root, "root", 0, self.size - 1)
        value = collectives.encode_value(data) if self.rank == root else b""
        return collectives.decode_value(
            await self._run("broadcast", collectives.broadcast(self.rank, self.size, value, root))
        )

    @enable_ki_protection
    async def gather(self, part: Any, *, root: int = 0) -> list[Any] | None:
        """Collects one value of each rank at one rank (a binomial tree).

        Args:
            part: this rank's value; see :meth:`broadcast`. The values may differ in length, shape and dtype.
            root: the rank that gets them.

        Returns:
            At the root, the values by rank; None elsewhere.

        Cancellation: as for :meth:`barrier`; the values are passed on in the background.

        Raises: as :meth:`broadcast`.
        """
        root = check_integer(root, "root", 0, self.size - 1)
        value = collectives.encode_value(part)
        parts = await self._run("gather", collectives.gather(self.rank, self.size, value, root))
        return None if parts is None else collectives.decode_values(parts)

    @enable_ki_protection
    async def all_gather(self, part: Any) -> list[Any]:
        """Collects one value of each rank at all ranks (Bruck: ceil(log2(size)) rounds).

        Args:
            part: this rank's value; see :meth:`gather`.

        Returns:
            The values by rank.

        Cancellation: as for :meth:`barrier`; the values are passed on in the background.

        Raises: as :meth:`broadcast`.
        """
        value = collectives.encode_value(part)
        return collectives.decode_values(
            await self._run("all_gather", collectives.all_gather(self.rank, self.size, value))
        )

    @enable_ki_protection
    async def scatter(self, parts: Sequence[Any] | None = None, *, root: int = 0) -> Any:
        """Gives each rank one value of a list that one rank has (a binomial tree).

        Args:
            parts: at the root: the values by rank, each as for :meth:`broadcast`. They may differ in length, shape and
                dtype.
            root: the rank that has them.

        Returns:
            This rank's value, at the root as well.

        Cancellation: as for :meth:`barrier`; the values are passed on in the background.

        Raises:
            TypeError, ValueError: wrong parts or root; not as many parts as ranks.
            Exception: as for :meth:`broadcast`.
        """
        root = check_integer(root, "root", 0, self.size - 1)
        values: list[bytes] = []
        if self.rank == root:
            values = [collectives.encode_value(part) for part in (() if parts is None else parts)]
            if len(values) != self.size:
                raise ValueError(f"scatter needs a value for each of the {self.size} ranks, not {len(values)}")
        return collectives.decode_value(
            await self._run("scatter", collectives.scatter(self.rank, self.size, values, root))
        )

    @enable_ki_protection
    async def reduce(
        self,
        array: Any,
        op: Literal["sum", "min", "max", "prod"] | Callable[[Any, Any], Any],
        *,
        root: int = 0,
        out: Any = None,
    ) -> Any:
        """Combines the arrays of all ranks at one rank, element by element (a binomial tree).

        Args:
            array: a NumPy array, or a number. It must have the same shape and dtype on all ranks.
            op: ``"sum"``, ``"min"``, ``"max"``, ``"prod"``; or a function of two arrays, which returns a new one of the
                same shape and dtype. It must be associative and commutative, and is called with parts of the arrays,
                in one dimension. It must be the same on all ranks.
            root: the rank that gets the result.
            out: at the root: a C-contiguous array of the same shape and dtype for the result, which may be ``array``.

        Returns:
            At the root, ``out`` or a new array; None elsewhere. It has the shape and dtype of ``array``: sums of
            integers can overflow, and the sum of bools is their "or".

        Cancellation: as for :meth:`barrier`. Until this rank's next collective operation begins, ``array`` and
        ``out`` must not be used.

        Raises:
            RankLostError: as for :meth:`barrier`. The content of ``out`` is undefined then, and a transfer into it may
                still go on.
            ValueError: the arrays or operations of the ranks differ; all ranks raise this. A wrong op, root or out.
            TypeError: wrong arguments, or an ``op`` that does not take this dtype.
            RuntimeError: another rank is in another operation; or the worker has no features for remote memory, which
                arrays of 256 KiB and more need.
            Exception: what the function ``op`` raises; MemoryError, UCXError, OSError: another rank's array cannot be
                read. This rank has not done its part then; see :meth:`broadcast`.
            trio.BusyResourceError, trio.ClosedResourceError: as for :meth:`barrier`.
        """
        root = check_integer(root, "root", 0, self.size - 1)
        job = reductions.Reduction.create(array, op, out if self.rank == root else None)
        return await self._reduce("reduce", job, reductions.reduce(self.rank, self.size, job, root))

    @enable_ki_protection
    async def all_reduce(
        self, array: Any, op: Literal["sum", "min", "max", "prod"] | Callable[[Any, Any], Any], *, out: Any = None
    ) -> Any:
        """Combines the arrays of all ranks, element by element, and gives all ranks the result.

        Arrays of less than 256 KiB go up and down a binomial tree. Larger ones go around a ring, where each rank reads
        about twice the size of the array from its left neighbour, however many ranks there are.

        Args:
            array, op: as for :meth:`reduce`.
            out: as for :meth:`reduce`, at all ranks.

        Returns:
            ``out`` or a new array, the same to the last bit on all ranks; see :meth:`reduce`.

        Cancellation: as for :meth:`reduce`.

        Raises:
            Exception: as for :meth:`reduce`.
        """
        job = reductions.Reduction.create(array, op, out)
        return await self._reduce("all_reduce", job, reductions.all_reduce(self.rank, self.size, job))

    async def _reduce(self, kind: str, job: reductions.Reduction, steps: collectives.Steps) -> Any:
        found = await self._run(kind, steps, in_background=not job.small)
        if isinstance(found, ValueError):
            raise found
        return found

    async def _run(self, kind: str, steps: collectives.Steps, *, in_background: bool = False) -> Any:
        self._check()
        return await self._collectives.run(KINDS.index(kind), steps, in_background)


def _is_small(data: Any) -> bool:
    """True if it is contiguous host memory, and so short that a copy costs less than a task that sends it."""
    try:
        with memoryview(data) as view:
            return view.c_contiguous and view.nbytes <= _COPIED
    except (TypeError, ValueError, BufferError):
        return False
