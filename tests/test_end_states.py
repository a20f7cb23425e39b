"""What a side finds out about the end of a connection: each fault, and each question. closing.md has the table."""

from __future__ import annotations

import contextlib
import signal
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
import trio
from helpers import open_listener, open_pair, open_peer, until

import trio_ucx
from trio_ucx import ucp
from trio_ucx._rules.life import Loss
from trio_ucx.testing import internals

PAGE = Path(__file__).parents[1] / "docs/reference/closing.md"
#: The columns. A message of tag 5 had arrived before the fault.
QUESTIONS = ["closed", "peer_state", "wait_closed()", "send", "receive", "reason"]

Fault = Callable[[trio_ucx.Connection, trio_ucx.Connection], Awaitable[object]]


async def nothing(ours: trio_ucx.Connection, theirs: trio_ucx.Connection) -> None:
    pass


async def peer_ends_its_stream(ours: trio_ucx.Connection, theirs: trio_ucx.Connection) -> None:
    await theirs.send_eof()
    await until(lambda: ours.peer_state is not trio_ucx.PeerState.OPEN)


async def peer_closes(ours: trio_ucx.Connection, theirs: trio_ucx.Connection) -> None:
    await theirs.aclose()


async def peer_aborts(ours: trio_ucx.Connection, theirs: trio_ucx.Connection) -> None:
    theirs.abort()
    await until(lambda: ours.peer_state is not trio_ucx.PeerState.OPEN)


async def peer_waits_for_us(ours: trio_ucx.Connection, theirs: trio_ucx.Connection) -> None:
    theirs.send_nowait(bytes(2**23), tag=9)
    with trio.CancelScope() as scope:
        scope.cancel()
        await theirs.aclose()
    await until(lambda: internals(ours).sending.problem() is not None)


async def peer_gives_up_its_close(ours: trio_ucx.Connection, theirs: trio_ucx.Connection) -> None:
    theirs.send_nowait(bytes(2**23), tag=9)
    internals(theirs).closing._timeout = 0.05
    with pytest.raises(trio_ucx.PeerLost, match="did not acknowledge"):
        await theirs.aclose()
    await until(lambda: ours.peer_state is not trio_ucx.PeerState.OPEN)


async def host_vanishes(ours: trio_ucx.Connection, theirs: trio_ucx.Connection) -> None:
    internals(ours).closing.control_lost(Loss("its host no longer answers", vanished=True))


async def we_close(ours: trio_ucx.Connection, theirs: trio_ucx.Connection) -> None:
    await ours.aclose()


async def we_close_and_are_cancelled(ours: trio_ucx.Connection, theirs: trio_ucx.Connection) -> None:
    with trio.CancelScope() as scope:
        scope.cancel()
        await ours.aclose()


async def we_abort(ours: trio_ucx.Connection, theirs: trio_ucx.Connection) -> None:
    ours.abort()


FAULTS: dict[str, Fault | None] = {
    "nothing": nothing,
    "the peer ends its stream": peer_ends_its_stream,
    "the peer closes": peer_closes,
    "the peer is closing, and waits for us to receive a large message": peer_waits_for_us,
    "the peer's close gives up after `close_timeout`": peer_gives_up_its_close,
    "the peer aborts": peer_aborts,
    "its process is killed": None,
    "its host vanishes": host_vanishes,
    "we close": we_close,
    "`aclose` is cancelled": we_close_and_are_cancelled,
    "we abort": we_abort,
}


@asynccontextmanager
async def after(fault: str, worker: ucp.Worker, transports: str) -> AsyncIterator[trio_ucx.Connection]:
    function = FAULTS[fault]
    if function is not None:
        async with open_pair(worker) as (ours, theirs):
            theirs.send_nowait(b"before", tag=5)
            await ours.wait_message(tag=5)
            await function(ours, theirs)
            yield ours
            for side in (ours, theirs):
                side.abort()
        return
    async with (
        open_listener(worker) as listener,
        open_peer("client_of", list(listener.address), 7, transports=transports) as peer,
    ):
        ours = await listener.accept()
        assert await ours.receive(tag=1) == b"7"
        await ours.send(b"x", tag=5)
        peer.process.send_signal(signal.SIGKILL)
        await until(lambda: ours.peer_state is not trio_ucx.PeerState.OPEN)
        yield ours
        ours.abort()


async def outcome(operation: Callable[[], Awaitable[object]], raised: list[BaseException]) -> str:
    """``returns``, ``waits``, or the exception."""
    with trio.move_on_after(0.05) as scope:
        try:
            await operation()
        except (trio.ClosedResourceError, trio.BrokenResourceError, trio.EndOfChannel) as error:
            raised.append(error)
            return f"`{type(error).__name__}`"
    return "waits" if scope.cancelled_caught else "returns"


async def answers(connection: trio_ucx.Connection, has_message: bool) -> list[str]:
    raised: list[BaseException] = []
    row = [str(connection.closed), connection.peer_state.name]
    # A close in the background is not over yet, and goes on while this waits.
    with trio.fail_after(15):
        row.append(await outcome(connection.wait_closed, raised))
    row.append(await outcome(lambda: connection.send(b"after"), raised))
    received = await outcome(lambda: connection.receive(tag=5), raised) if has_message else "returns"
    if received == "returns":
        received = f"the message, then {await outcome(lambda: connection.receive(tag=5), raised)}"
    reasons = {getattr(error, "reason", None) for error in raised} - {None}
    assert len(reasons) <= 1, reasons
    row += [received, *(f'`"{reason}"`' for reason in reasons)]
    return row if reasons else [*row, ""]


def documented() -> dict[str, list[str]]:
    """The table of that page."""
    lines = PAGE.read_text().splitlines()
    start = next(number for number, line in enumerate(lines) if line.startswith("| what has happened | `closed` |"))
    rows = {}
    for line in lines[start + 2 :]:
        if not line.startswith("|"):
            break
        name, *cells = (cell.strip() for cell in line.strip("|").split("|"))
        rows[name] = cells
    return rows


@pytest.mark.parametrize("fault", FAULTS)
async def test_the_end(worker: ucp.Worker, transports: str, fault: str) -> None:
    async with after(fault, worker, transports) as connection:
        row = await answers(connection, has_message=FAULTS[fault] is not None)
    with contextlib.suppress(KeyError):
        assert row == documented()[fault]
        return
    raise AssertionError(f"missing: | {fault} | {' | '.join(row)} |")


def test_the_table_has_no_other_rows() -> None:
    assert set(documented()) == set(FAULTS)
