"""Where Trio's tasks and loops stand, read from their frames: nothing runs for it."""

from __future__ import annotations

import gc
import sys
import threading
import traceback
from collections.abc import Iterator
from types import FrameType
from typing import Any

import attrs
import trio

#: Packages whose frames say nothing about where a program stands.
_LIBRARIES = frozenset({"trio_ucx", "trio", "outcome", "contextlib"})


def _module(frame: FrameType) -> str:
    name: str = frame.f_globals.get("__name__", "")
    return name


def _package(frame: FrameType) -> str:
    return _module(frame).partition(".")[0]


def place(frame: FrameType, line: int) -> str:
    code = frame.f_code
    return f"{code.co_filename}:{line} ({code.co_qualname})"


def innermost_place(error: BaseException) -> str | None:
    """Returns where an exception left the program's own code, innermost; None if it has not been there."""
    frames = traceback.walk_tb(error.__traceback__)
    return next((place(frame, line) for frame, line in reversed([*frames]) if _package(frame) not in _LIBRARIES), None)


def _stack(thread: int) -> Iterator[FrameType]:
    """The frames of a thread, innermost first."""
    frame = sys._current_frames().get(thread)
    while frame is not None:
        yield frame
        frame = frame.f_back


def is_outside_library() -> bool:
    """True if no function of the library is being called in this thread, so that UCX can be asked."""
    own = __name__.rpartition(".")[0]
    return not any(
        _package(frame) == "trio_ucx" and not _module(frame).startswith(own) for frame in _stack(threading.get_ident())
    )


# ---- tasks ----

#: What stands between an object that is awaited and the coroutine or generator that runs for it: types without a name
#: in ``types``.
_STEPS = frozenset({"coroutine_wrapper", "async_generator_asend", "async_generator_athrow"})
#: By the attribute with the frame, the one with what is awaited there.
_AWAITED = {"cr_frame": "cr_await", "gi_frame": "gi_yieldfrom", "ag_frame": "ag_await"}


def _await_frames(task: trio.lowlevel.Task) -> Iterator[tuple[FrameType, int]]:
    """The frames of a task, outermost first, and their lines.

    ``Task.iter_await_frames`` ends at an object with an ``__await__`` of its own, such as :class:`Connecting`.
    """
    awaited: Any = task.coro
    while awaited is not None:
        name = next((name for name in _AWAITED if getattr(awaited, name, None) is not None), None)
        if name is not None:
            frame: FrameType = getattr(awaited, name)
            yield frame, frame.f_lineno
            awaited = getattr(awaited, _AWAITED[name])
        elif type(awaited).__name__ in _STEPS:
            inner = gc.get_referents(awaited)
            awaited = next((one for one in inner if any(hasattr(one, name) for name in _AWAITED)), None)
        else:
            return


@attrs.frozen
class TaskPlace:
    """Where a task that is not running stands.

    Attributes:
        place: the innermost line of the program's own; None in a task of a library.
        call: the function of trio_ucx that it called there.
    """

    task: str
    place: str | None
    call: str | None


def task_place(task: trio.lowlevel.Task) -> TaskPlace:
    where = call = None
    for frame, line in _await_frames(task):
        package = _package(frame)
        if package not in _LIBRARIES:
            where, call = place(frame, line), None
        elif package == "trio_ucx" and call is None and "<locals>" not in frame.f_code.co_qualname:
            call = frame.f_code.co_qualname
    return TaskPlace(task.name, where, call)


def tasks_below(task: trio.lowlevel.Task | None) -> Iterator[trio.lowlevel.Task]:
    """A task, and all tasks in its nurseries and below them."""
    waiting = [] if task is None else [task]
    while waiting:
        task = waiting.pop()
        yield task
        for nursery in list(task.child_nurseries):
            waiting += list(nursery.child_tasks)


def variables_of(task: trio.lowlevel.Task) -> Iterator[Any]:
    """The values of the variables in a task's frames."""
    for frame, _ in _await_frames(task):
        yield from list(frame.f_locals.values())


def library_frames(task: trio.lowlevel.Task) -> Iterator[tuple[str, dict[str, Any], bool]]:
    """For each frame of a library in a task: its module, its variables, and whether it waits for the program's code."""
    frames = [frame for frame, _ in _await_frames(task)]
    for frame, inner in zip(frames, [*frames[1:], None], strict=True):
        if _package(frame) in _LIBRARIES:
            yield _module(frame), frame.f_locals, inner is not None and _package(inner) not in _LIBRARIES


# ---- loops ----


@attrs.frozen
class ReportRound:
    """The round of Trio's loop that a thread is in.

    Attributes:
        seconds: for how long.
        task: which task runs.
        place: the innermost line of the program's own.
    """

    seconds: float
    task: str
    place: str | None


def round_of(thread: int) -> ReportRound | None:
    """The round of Trio's loop that a thread is in; None if it waits for events, or runs no loop.

    Trio keeps the time at which a round began in a local variable (0.22 to 0.35, at least).
    """
    where = None
    for frame in _stack(thread):
        if where is None and _package(frame) not in _LIBRARIES:
            where = place(frame, frame.f_lineno)
        if frame.f_code.co_name == "unrolled_run" and _module(frame) == "trio._core._run":
            variables = frame.f_locals
            began, runner, task = variables.get("now"), variables.get("runner"), variables.get("task")
            if began is None or runner is None or task is None:
                return None
            return ReportRound(runner.clock.current_time() - began, task.name, where)
    return None
