"""A worker's system tasks. An exception that left one would end the run, so it ends the worker at most."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING

import trio

from .._contained import contained, report

if TYPE_CHECKING:
    from .engine import Engine


def spawn(engine: Engine, function: Callable[[], Awaitable[object]], name: str) -> None:
    """Runs an async function in a system task; its errors break the worker."""

    async def run() -> None:
        try:
            await function()
        except Exception as error:
            engine.internal_error(error)

    trio.lowlevel.spawn_system_task(run, name=name)


def spawn_background(engine: Engine, function: Callable[[], Awaitable[object]], name: str) -> bool:
    """Runs an async function in a system task of the background. False when the Trio run has ended too far for that."""
    marker = object()

    async def run() -> None:
        try:
            with trio.CancelScope(shield=True):
                await function()
        except Exception as error:
            report(f"{name} failed", error)
        finally:
            engine.background.discard(marker)
            if not engine.background and engine.background_ended is not None:
                contained(engine.background_ended.set)
            if engine.usable:
                contained(engine.wake)  # the progress task may be waiting for the last background task

    try:
        trio.lowlevel.spawn_system_task(run, name=name)
    except RuntimeError:
        return False
    engine.background.add(marker)
    return True
