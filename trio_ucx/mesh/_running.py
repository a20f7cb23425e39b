"""Running collective operations: one at a time, in the same order on all ranks."""

from __future__ import annotations

import logging
import struct
from collections import deque
from collections.abc import Awaitable, Callable, Iterator
from typing import Any, TypeVar

import attrs
import trio
from trio.lowlevel import enable_ki_protection

from .. import UCXError
from ._collectives import Post, Steps, Take, unreadable
from ._errors import RankLostError
from ._links import GONE, Links, RankConnection
from ._meeting import VERDICT
from ._members import Members

#: What each message begins with: the group's generation, the number of the operation in it, and its kind.
_HEAD = struct.Struct("<IIB")
KINDS = ("barrier", "broadcast", "gather", "all_gather", "scatter", "reduce", "all_reduce")
#: Seconds after which a line in the log says that leaving waits.
_LONG = 10.0

logger = logging.getLogger("trio_ucx")
_T = TypeVar("_T")


@attrs.define(eq=False)
class _Call:
    """One operation. It can go on in another task."""

    kind: int
    steps: Steps
    generation: int = 0
    number: int = 0
    step: Any = None
    over: bool = False
    out_of_step: bool = False
    value: Any = None
    error: Exception | None = None

    def raise_error(self) -> None:
        if self.error is not None:
            raise self.error

    def advance(self, answer: Any) -> None:
        try:
            self.step = next(self.steps) if answer is None else self.steps.send(answer)
        except StopIteration as end:
            self.over, self.value = True, end.value


def _head(message: bytes) -> tuple[int, int, int]:
    """Returns the generation, number and kind of the operation that a message belongs to.

    Raises:
        trio.BrokenResourceError: it has none of these.
    """
    if len(message) < _HEAD.size or message[_HEAD.size - 1] >= len(KINDS):
        raise unreadable()
    generation, number, kind = _HEAD.unpack_from(message)
    return generation, number, kind


class Collectives:
    """Runs the collective operations of this rank.

    Args:
        explain: returns the error for an operation that failed because a rank has gone.
    """

    def __init__(
        self,
        members: Members,
        links: Links,
        explain: Callable[[RankConnection, Exception], Awaitable[Exception]],
    ) -> None:
        self._members = members
        self._links = links
        self._explain = explain
        self._generation = self._number = 0
        #: The operation that a task is in.
        self._current: _Call | None = None
        #: Interrupts the operation that runs here or in the background, while it waits.
        self._scope: trio.CancelScope | None = None
        #: What goes on in the background, one after the other: a cancelled operation, and what was called meanwhile.
        self._background: deque[_Call] = deque()
        #: Links with messages that wait for the peer's window, and the scope of the task that sends them.
        self._behind: dict[RankConnection, trio.CancelScope] = {}
        #: Where tasks wait for progress in the background.
        self._progress = trio.lowlevel.ParkingLot()
        members.on_change.append(self._interrupt)
        links.causes = self._causes

    def _causes(self, link: RankConnection) -> Iterator[str]:
        """Returns why an operation with a rank may hang, for reports."""
        message, call = link.first, self._current
        if message is not None:
            generation, number, kind = _head(message)
            if (generation, number) > (self._generation, self._number):
                yield (
                    f"rank {link.rank} waits in collective operation {number} ({KINDS[kind]}), which this rank has not "
                    "begun: all ranks must call the same operations in the same order"
                )
        elif call is not None and isinstance(call.step, Take) and call.step.rank == link.rank:
            yield (
                f"this rank waits in collective operation {call.number} ({KINDS[call.kind]}) for rank {link.rank}, "
                "which has not reached it"
            )

    def _interrupt(self, rank: int) -> None:
        """When a rank is lost, all operations that were called before fail. Nobody would receive their messages."""
        if self._members.any_error() is None:
            return
        for call in (self._current, *self._background):
            if call is not None and not call.over and call.error is None:
                call.error = self._members.any_error()
        for scope in (self._scope, *self._behind.values()):
            if scope is not None:
                scope.cancel()

    async def run(self, kind: int, steps: Steps, in_background: bool) -> Any:
        """Runs a collective operation. If the task is cancelled, the rest of it is done in the background.

        Args:
            in_background: do all of it there: a step that was interrupted cannot be repeated.
        """
        if self._current is not None:
            raise trio.BusyResourceError(
                "another task runs a collective operation: all ranks must call them in one order"
            )
        error = self._members.any_error()
        if error is not None:
            raise error
        call = self._current = _Call(kind, steps)
        try:
            if self._background or in_background:
                if not self._background:
                    self._links.nursery.start_soon(self._go_on)
                self._background.append(call)
                while call in self._background:
                    await self._progress.park()
            elif not await self._run(call):
                await trio.lowlevel.checkpoint()
        except (trio.Cancelled, KeyboardInterrupt):
            if not call.over and call.error is None and call not in self._background:
                self._background.append(call)
                self._links.nursery.start_soon(self._go_on)
            raise
        finally:
            self._current = None
            if call not in self._background:
                call.steps.close()
        call.raise_error()
        return call.value

    async def finish(self) -> None:
        """Waits until the operations in the background are over; when that takes long, a line in the log says so."""
        with trio.move_on_after(_LONG):
            await self._idle()
            return
        names = ", ".join(KINDS[call.kind] for call in list(self._background)) or "messages of collective operations"
        logger.warning(
            "rank %d cannot leave the group yet: it was cancelled in %s, and other ranks have not done their part",
            self._members.rank,
            names,
        )
        await self._idle()

    async def _idle(self) -> None:
        while self._background or self._behind:
            await self._progress.park()

    @enable_ki_protection
    async def _go_on(self) -> None:
        """Runs the operations in the background, one after the other."""
        try:
            while self._background:
                call = self._background[0]
                try:
                    await self._run(call)
                except Exception as error:
                    call.error = error  # if nobody waits for it, the next operation of this rank finds that out
                    known = call.out_of_step or isinstance(error, (RankLostError, trio.ClosedResourceError))
                    if call is not self._current and not known:
                        self._give_up(f"a cancelled {KINDS[call.kind]}", error)
                finally:
                    call.steps.close()
                self._background.popleft()
                self._progress.unpark_all()
        finally:
            for call in self._background:
                call.error = trio.ClosedResourceError("the group has ended")
            self._background.clear()
            self._progress.unpark_all()

    def _give_up(self, what: str, error: Exception) -> None:
        """This rank cannot do its part. No caller learns that, so the rank counts as lost."""
        self._members.lose(self._members.rank, f"an error in {what}: {error}")

    async def _run(self, call: _Call) -> bool:
        """Runs an operation, or the rest of it. Returns True if it has passed a checkpoint: each receive is one."""
        received = False
        if not call.number:
            await self._begin(call)
        while not call.over:
            call.raise_error()
            link = self._links.by_rank.get(call.step.rank)
            if link is None or link.channel is None:
                await self._wait(call, self._links.connected, call.step.rank)
                continue
            try:
                if isinstance(call.step, Post):
                    self._post(link, _HEAD.pack(call.generation, call.number, call.kind) + call.step.data)
                    call.advance(None)
                elif isinstance(call.step, Take):
                    call.advance(await self._take(link, call))
                    received = True
                else:
                    call.advance(await self._use(link, call))
            except GONE as error:
                raise await self._wait(call, self._explain, link, error) from error
        return received

    async def _wait(self, call: _Call, function: Callable[..., Awaitable[_T]], *arguments: Any) -> _T:
        """Awaits a function. The loss of any rank ends the wait, and the operation."""
        call.raise_error()
        with trio.CancelScope() as self._scope:
            try:
                return await function(*arguments)  # also if a rank was lost after that: it may have been the last step
            finally:
                self._scope = None
        assert call.error is not None
        raise call.error

    async def _use(self, link: RankConnection, call: _Call) -> Any:
        try:
            return await self._wait(call, call.step.function, link.connection)
        except UCXError:  # the other rank has closed its memory, perhaps because it has heard of a loss already
            with trio.move_on_after(VERDICT):
                await self._wait(call, trio.sleep_forever)
            raise

    async def _begin(self, call: _Call) -> None:
        while self._behind:
            await self._wait(call, self._progress.park)
        call.raise_error()
        if self._generation != self._members.generation:
            self._generation, self._number = self._members.generation, 0
        self._number += 1
        call.generation, call.number = self._generation, self._number
        call.advance(None)

    # ---- messages ----

    def _post(self, link: RankConnection, message: bytes) -> None:
        assert link.channel is not None
        if not link.outbox:
            try:
                link.channel.send_nowait(message)
                return
            except trio.WouldBlock:
                self._behind[link] = trio.CancelScope()
                self._links.nursery.start_soon(self._catch_up, link)
        link.outbox.append(message)

    @enable_ki_protection
    async def _catch_up(self, link: RankConnection) -> None:
        assert link.channel is not None
        try:
            with self._behind[link]:
                while link.outbox:
                    await link.channel.send(link.outbox[0])
                    link.outbox.pop(0)
        except GONE:
            pass
        except (RuntimeError, MemoryError) as error:
            self._give_up("a collective operation", error)
        finally:
            link.outbox.clear()
            del self._behind[link]
            self._progress.unpark_all()

    async def _take(self, link: RankConnection, call: _Call) -> bytes:
        await trio.lowlevel.checkpoint_if_cancelled()
        while True:
            message = link.pending.pop(0) if link.pending else link.take()
            if message is None:
                assert link.channel is not None
                message = await self._wait(call, link.channel.receive)
            else:
                await link.schedule_point()
            generation, number, kind = _head(message)
            if generation > call.generation:
                link.pending.insert(0, message)
                await self._wait(call, trio.sleep_forever)  # for the loss, which the other rank has heard of already
            elif generation == call.generation:
                if (number, kind) != (call.number, call.kind):
                    link.pending.insert(0, message)
                    call.out_of_step = True
                    raise RuntimeError(
                        f"rank {link.rank} is in collective operation {number}, {KINDS[kind]}, but this rank is in "
                        f"{call.number}, {KINDS[call.kind]}: all ranks must call the same operations in the same order"
                    )
                return message[_HEAD.size :]
