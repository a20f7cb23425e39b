"""A nursery for the tasks of a block that is not inside it."""

from __future__ import annotations

from collections.abc import Callable
from contextvars import copy_context

import trio

from .contained import contained


class BackgroundNursery:
    """A nursery in a system task. An ``async with`` block opens it, and cancels it at its end.

    The block's exceptions stay what they are. A program may drop the block, with an async generator that it does not
    read to its end: it is then left in another task. Trio does not survive that with a nursery of the block's task.

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
