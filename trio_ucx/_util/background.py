"""Background tasks, and a cancel scope, for ``async with`` blocks that another task may leave.

A program drops a block with an async generator that it does not read to its end: Trio then leaves it in another task.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from contextvars import copy_context
from types import TracebackType

import trio

from .contained import contained

logger = logging.getLogger("trio_ucx")


class BackgroundNursery:
    """A nursery in a system task. An ``async with`` block opens it, and cancels it at its end.

    The block's exceptions stay what they are. Trio does not survive a nursery of the block's task that another task
    leaves.

    KeyboardInterrupt would end the run, so all its tasks must be protected from it.

    Args:
        failed: called when the nursery has failed.
    """

    # A class: at the end of a run, Trio finalizes generators in any order.

    def __init__(self, name: str, failed: Callable[[Exception], object]) -> None:
        self._name = name
        self._failed = failed
        self._ended = trio.Event()

    async def __aenter__(self) -> trio.Nursery:
        opened = trio.Event()
        trio.lowlevel.spawn_system_task(self._run, opened, name=self._name, context=copy_context())
        with trio.CancelScope(shield=True):
            await opened.wait()  # it begins at once
        return self._nursery

    async def __aexit__(self, *exc_info: object) -> None:
        self._nursery.cancel_scope.cancel()
        with trio.CancelScope(shield=True):
            await self._ended.wait()

    async def _run(self, opened: trio.Event) -> None:
        try:
            async with trio.open_nursery() as self._nursery:
                opened.set()
                await trio.sleep_forever()
        except BaseExceptionGroup as error:  # at the end of the run, tasks that are cancelled may fail, too
            failure, cancelled = error.split(Exception)
            if failure is not None:
                contained(self._failed, failure)
            if cancelled is not None:
                raise cancelled from None
        finally:
            self._ended.set()


class BlockScope:
    """A cancel scope around a block.

    If another task leaves the block, the scope is not left: Trio would raise, and cancel the task that has entered it.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._scope = trio.CancelScope()
        self._task: trio.lowlevel.Task | None = None

    def cancel(self) -> None:
        """Cancels the block, unless it was dropped."""
        if self._task is not None:
            self._scope.cancel()

    def __enter__(self) -> None:
        self._task = trio.lowlevel.current_task()
        self._scope.__enter__()

    def __exit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, traceback: TracebackType | None
    ) -> bool:
        task, self._task = self._task, None
        if trio.lowlevel.current_task() is task:
            return self._scope.__exit__(exc_type, exc, traceback)
        logger.warning(
            "a block of %s() was dropped before its end: Trio may say that the cancel scopes of %s are corrupted",
            self._name,
            task,
        )
        return False
