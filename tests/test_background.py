"""A nursery for the tasks of a block that is not inside it."""

from __future__ import annotations

import trio
import trio.testing

from trio_ucx._util.background import BackgroundNursery


async def fails_when_it_is_cancelled() -> None:
    try:
        await trio.sleep_forever()
    finally:
        raise ValueError("internal")


def test_a_task_that_fails_at_the_end_of_the_run_does_not_end_it() -> None:
    """The block was dropped: nobody leaves it."""
    failures: list[Exception] = []

    async def main() -> str:
        nursery = await BackgroundNursery("test", failures.append).__aenter__()
        nursery.start_soon(fails_when_it_is_cancelled)
        await trio.testing.wait_all_tasks_blocked()
        return "ended"

    assert trio.run(main) == "ended"
    [failure] = failures
    assert isinstance(failure, ExceptionGroup) and failure.subgroup(ValueError) is not None


async def test_a_task_that_fails_as_the_block_is_left() -> None:
    failures: list[Exception] = []
    async with BackgroundNursery("test", failures.append) as nursery:
        nursery.start_soon(fails_when_it_is_cancelled)
        await trio.testing.wait_all_tasks_blocked()
    assert len(failures) == 1
