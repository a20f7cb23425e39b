"""Ranks that die, fail, leave or are replaced. All are tasks of one process; ``test_processes.py`` has real deaths."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Literal

import pytest
import trio
import trio.testing
from helpers import until

import trio_ucx
from trio_ucx import mesh, ucp
from trio_ucx.mesh import _links, _meeting, _running
from trio_ucx.mesh._collectives import barrier
from trio_ucx.mesh._members import Members
from trio_ucx.mesh._messages import RankAnswer, RankHello, encode

Body = Callable[[mesh.Group], Awaitable[Any]]


class Ranks:
    """Ranks that run independently: an exception of one does not end the others."""

    def __init__(self, folder: Path, size: int, on_loss: Literal["cancel", "continue"]) -> None:
        self.size = size
        self.yield_interval = 0.0
        self._options: dict[str, Any] = {"meeting": f"file://{folder}/meeting", "on_loss": on_loss, "size": size}
        #: By rank, what its last run has ended with.
        self.ends: dict[int, Any] = {}
        self._met = 0
        self._all_met = trio.Event()

    async def meet(self, group: mesh.Group) -> None:
        """A barrier that returns in all ranks at the same time.

        All go on in one round of Trio's, so a rank that fails next interrupts the others in what they do next.
        """
        await group.barrier()
        self._met += 1
        if self._met == self.size:
            self._all_met.set()
        await self._all_met.wait()

    async def run(self, rank: int, body: Body, **options: Any) -> None:
        async with ucp.open_worker(yield_interval=self.yield_interval) as worker:
            try:
                async with mesh.join(rank=rank, worker=worker, **{**self._options, **options}) as group:
                    self.ends[rank] = await body(group)
            except Exception as error:
                self.ends[rank] = error

    async def run_all(self, body: Body, seconds: float = 20) -> dict[int, Any]:
        with trio.fail_after(seconds):
            async with trio.open_nursery() as nursery:
                for rank in range(self.size):
                    nursery.start_soon(self.run, rank, body)
        return self.ends

    async def run_and_replace(self, replaced: int, body: Body, when: Callable[[], Awaitable[object]]) -> None:
        """Also starts a second process for a rank, as soon as ``when`` returns."""
        with trio.fail_after(20):
            async with trio.open_nursery() as nursery:
                for rank in range(self.size):
                    nursery.start_soon(self.run, rank, body)
                await when()
                nursery.start_soon(self.run, replaced, body)


WAITS: dict[str, Callable[[mesh.Group], Awaitable[Any]]] = {
    "barrier": lambda group: group.barrier(),
    "all_gather": lambda group: group.all_gather(b""),
    "receive from it": lambda group: trio.sleep_forever() if group.rank == 2 else group.receive(source=2, tag=1),
    "receive from another": lambda group: group.receive(source=1 if group.rank != 1 else 3, tag=1),
    "receive_from_any": lambda group: group.receive_from_any(tag=1),
    "sleep": lambda group: trio.sleep_forever(),
}


@pytest.mark.parametrize("wait", WAITS)
@pytest.mark.parametrize("victim", [0, 2])
async def test_a_rank_that_fails_is_named_by_all(tmp_path: Path, wait: str, victim: int) -> None:
    async def body(group: mesh.Group) -> None:
        await group.barrier()
        if group.rank == victim:
            raise ValueError("mine")
        await WAITS[wait](group)

    ends = await Ranks(tmp_path, 4, "cancel").run_all(body)
    for rank, end in ends.items():
        if rank == victim:
            assert isinstance(end, ValueError)
        else:
            assert isinstance(end, mesh.RankLostError), (rank, end)
            assert end.rank == victim
            assert end.reason == "it left with ValueError('mine')"


@pytest.mark.parametrize("victim", [0, 2])
async def test_a_rank_that_leaves_is_lost_when_somebody_needs_it(tmp_path: Path, victim: int) -> None:
    async def body(group: mesh.Group) -> None:
        await group.barrier()
        if group.rank == victim:
            return
        await trio.sleep(0.05)
        if group.rank == 1:
            await group.receive(source=victim)
        await trio.sleep_forever()

    ends = await Ranks(tmp_path, 4, "cancel").run_all(body)
    for rank, end in ends.items():
        if rank == victim and rank:
            assert end is None
        else:
            assert isinstance(end, mesh.RankLostError), (rank, end)
            assert (end.rank, end.reason) == (victim, "it has left the group")


async def test_a_rank_that_leaves_early_and_is_not_missed(tmp_path: Path) -> None:
    async def body(group: mesh.Group) -> int:
        await group.barrier()
        if group.rank == 1:
            await group.send(b"later", to=2)
            return 1
        await trio.sleep(0.1)
        if group.rank == 2:
            assert await group.receive(source=1) == b"later"
        return group.rank

    assert await Ranks(tmp_path, 4, "cancel").run_all(body) == {0: 0, 1: 1, 2: 2, 3: 3}


async def test_a_cancelled_rank_is_lost(tmp_path: Path) -> None:
    ranks = Ranks(tmp_path, 3, "cancel")

    async def cancelled(rank: int) -> None:
        async def body(group: mesh.Group) -> None:
            if rank == 1:
                scope.cancel()
            await trio.sleep_forever()

        with trio.CancelScope() as scope:
            await ranks.run(rank, body)

    with trio.fail_after(20):
        async with trio.open_nursery() as nursery:
            for rank in range(3):
                nursery.start_soon(cancelled, rank)
    for rank in (0, 2):
        assert str(ranks.ends[rank]) == "rank 1 was lost: it left with a cancellation"


async def test_a_broken_pair(tmp_path: Path) -> None:
    """One connection breaks, and both ranks live: one of the two counts as lost, the same for all."""

    async def body(group: mesh.Group) -> None:
        await group.barrier()
        if group.rank == 1:
            (await group.connection(3)).abort()
            await group.receive(source=3)
        await trio.sleep_forever()

    ends = await Ranks(tmp_path, 4, "cancel").run_all(body)
    assert all(isinstance(end, mesh.RankLostError) and end.rank == 3 for end in ends.values()), ends
    assert "rank 1 cannot reach it" in ends[0].reason


async def test_the_block_of_a_rank_that_ends_with_its_own_error(tmp_path: Path) -> None:
    """A loss cancels the block; what the program raises in its clean-up is what it gets."""

    async def body(group: mesh.Group) -> None:
        await ranks.meet(group)
        if group.rank == 1:
            raise ValueError
        try:
            await trio.sleep_forever()
        finally:
            if group.rank == 2:
                raise KeyError("clean-up")

    ranks = Ranks(tmp_path, 3, "cancel")
    ends = await ranks.run_all(body)
    assert isinstance(ends[0], mesh.RankLostError)
    assert isinstance(ends[2], KeyError)


async def test_a_block_with_a_nursery_raises_the_same(tmp_path: Path) -> None:
    """Whether its tasks were cancelled first, or got the error."""

    async def body(group: mesh.Group) -> None:
        await group.barrier()
        if group.rank == 1:
            raise ValueError
        async with trio.open_nursery() as nursery:
            nursery.start_soon(trio.sleep_forever)
            nursery.start_soon(partial(group.receive, source=1))
            nursery.start_soon(partial(group.receive, source=1))

    ends = await Ranks(tmp_path, 3, "cancel").run_all(body)
    assert all(isinstance(ends[rank], mesh.RankLostError) and ends[rank].rank == 1 for rank in (0, 2)), ends


@pytest.mark.parametrize("wait", ["barrier", "receive from it"])
async def test_rank_0_has_left_before_anybody_needed_it(tmp_path: Path, wait: str) -> None:
    """There is no connection with it yet."""

    async def body(group: mesh.Group) -> None:
        if group.rank:
            await trio.sleep(0.2)
            await (group.barrier() if wait == "barrier" else group.receive(source=0))

    ends = await Ranks(tmp_path, 2, "cancel").run_all(body)
    assert isinstance(ends[1], mesh.RankLostError) and ends[1].rank == 0
    assert ends[1].reason == "it has left the group"


OUTSIDE: dict[str, Callable[[mesh.Group], Awaitable[Any]]] = {
    "receive": lambda group: group.receive(source=2),
    "receive_from_any": lambda group: group.receive_from_any(),
    "send, not connected": lambda group: group.send(b"", to=2),
    "barrier": lambda group: group.barrier(),
}


@pytest.mark.parametrize("operation", OUTSIDE)
async def test_a_task_outside_the_block_harms_nobody_when_this_rank_leaves(tmp_path: Path, operation: str) -> None:
    errors = []
    left = trio.Event()

    async def outside(group: mesh.Group) -> None:
        try:
            await OUTSIDE[operation](group)
        except trio.ClosedResourceError as error:
            errors.append(error)

    ranks = Ranks(tmp_path, 3, "cancel")

    async def run(rank: int, nursery: trio.Nursery) -> None:
        async def body(group: mesh.Group) -> None:
            if "connected" not in operation:
                await group.barrier()
            if rank == 1:
                nursery.start_soon(outside, group)
                if "connected" in operation:  # it is about to connect
                    for _ in range(3):
                        await trio.lowlevel.checkpoint()
                else:
                    await trio.sleep(0.05)
            else:
                await left.wait()

        await ranks.run(rank, body)
        if rank == 1:
            left.set()

    with trio.fail_after(20):
        async with trio.open_nursery() as nursery:
            for rank in range(3):
                nursery.start_soon(run, rank, nursery)
    assert ranks.ends == {0: None, 1: None, 2: None}
    assert len(errors) == 1


async def test_groups_one_after_the_other(tmp_path: Path) -> None:
    """With the same meeting point. A rank that comes back waits until the group of before is over."""
    ranks = Ranks(tmp_path, 3, "cancel")

    async def body(group: mesh.Group) -> list[bytes]:
        result = await group.all_gather(b"%d" % group.rank)
        await trio.sleep(0.3 * (group.rank == 2))
        return result

    async def three_times(rank: int) -> None:
        for _ in range(3):
            await ranks.run(rank, body)
            assert ranks.ends[rank] == [b"0", b"1", b"2"], ranks.ends

    with trio.fail_after(30):
        async with trio.open_nursery() as nursery:
            for rank in range(3):
                nursery.start_soon(three_times, rank)


@pytest.mark.parametrize("options", [{"on_loss": "continue"}, {"size": 2}, {"size": 4}], ids=str)
async def test_the_next_group_is_another_one(tmp_path: Path, options: dict[str, Any]) -> None:
    """Its ranks wait until the previous group has ended, and then form one of another size, or with other options."""
    ranks = Ranks(tmp_path, 3, "cancel")

    async def body(group: mesh.Group) -> list[bytes]:
        result = await group.all_gather(b"%d" % group.rank)
        met.set()
        await trio.sleep(0.5 * (group.rank == 0))
        return result

    met = trio.Event()

    async def both(rank: int) -> None:
        if rank < 3:
            await ranks.run(rank, body)
        await met.wait()
        if rank < options.get("size", 3):
            await ranks.run(rank, body, **options)
            assert ranks.ends[rank] == [b"%d" % rank for rank in range(options.get("size", 3))], ranks.ends

    with trio.fail_after(30):
        async with trio.open_nursery() as nursery:
            for rank in range(4):
                nursery.start_soon(both, rank)


async def test_leaving_that_waits_for_a_collective_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(_running, "_LONG", 0.1)
    ranks = Ranks(tmp_path, 2, "cancel")

    async def body(group: mesh.Group) -> None:
        if group.rank == 1:
            await until(lambda: "cannot leave" in caplog.text)
        with trio.move_on_after(0.1 if group.rank == 0 else 60):
            await group.barrier()

    assert await ranks.run_all(body) == {0: None, 1: None}
    [line] = [one.getMessage() for one in caplog.records if "cannot leave" in one.getMessage()]
    assert "rank 0" in line and "barrier" in line


@pytest.mark.parametrize("cancelled", [False, True])
async def test_a_collective_that_gets_too_long_a_message(tmp_path: Path, cancelled: bool) -> None:
    ranks = Ranks(tmp_path, 2, "cancel")
    given_up = trio.Event()

    async def body(group: mesh.Group) -> Any:
        await group.barrier()
        if group.rank == 0:
            if cancelled:
                await given_up.wait()
            await group.broadcast(bytes(5000))
        else:
            with trio.move_on_after(0.1 if cancelled else 10):
                await group.broadcast()
            given_up.set()
        return await group.all_gather(bytes([group.rank]))

    with trio.fail_after(20):
        async with trio.open_nursery() as nursery:
            for rank in range(2):
                nursery.start_soon(partial(ranks.run, rank, body, max_message_size=1000))
    if cancelled:
        what = "an error in a cancelled broadcast: a message of 5010 bytes is too long"
        assert f"rank 1 was lost: {what}" in str(ranks.ends[1])
        assert f"rank 1 was lost: it left with {what}" in str(ranks.ends[0])
    else:
        assert isinstance(ranks.ends[1], trio_ucx.MessageTooLong)
    assert isinstance(ranks.ends[0], mesh.RankLostError)
    assert ranks.ends[0].rank == 1


async def test_a_loss_heard_with_a_message_of_the_next_generation() -> None:
    """The message has arrived before the task that waits for it runs: it is kept for the next operation."""
    members = Members(0, 2, fatal=False)
    message = _running._HEAD.pack(1, 1, 0)

    class Channel:
        def send_nowait(self, data: bytes) -> None:
            pass

        async def receive(self) -> bytes:
            await trio.lowlevel.checkpoint()
            members.lose(1, "dead")
            return message

    link: Any = SimpleNamespace(channel=Channel(), outbox=[], pending=[], take=lambda: None)
    links: Any = SimpleNamespace(by_rank={1: link})
    running = _running.Collectives(members, links, lambda link, error: trio.sleep_forever())
    with pytest.raises(mesh.RankLostError, match="dead"):
        await running.run(0, barrier(0, 2), False)
    assert link.pending == [message]


class _Control:
    """The channel of a rank's control connection, whose end comes when the test wants."""

    def __init__(self) -> None:
        self.connection = SimpleNamespace(remote_address=("127.0.0.1", 1), _link=SimpleNamespace(owner=""))
        self.connection.abort = lambda: None
        self.end, self._ended = trio.open_memory_channel[bytes](0)

    async def receive(self) -> bytes:
        try:
            return await self._ended.receive()
        except trio.EndOfChannel:
            raise trio.BrokenResourceError("it died") from None

    async def send(self, data: bytes) -> None:
        pass

    def send_nowait(self, data: bytes) -> None:
        pass


@pytest.mark.parametrize("number", range(8))
@pytest.mark.parametrize("when", ["meeting", "replacing"])
async def test_a_rank_that_dies_at_the_moment_it_is_admitted(when: str, number: int) -> None:
    """It is no member, whichever of the two tasks Trio runs first. (Trio chooses at random.)"""
    members = Members(0, 3, fatal=False)
    first, second, replacement = _Control(), _Control(), _Control()
    async with trio.open_nursery() as nursery:
        listener, links = SimpleNamespace(address=("", 1)), SimpleNamespace(nursery=nursery)
        coordinator = _meeting.Coordinator(Any, members, links, [listener])  # type: ignore[arg-type, list-item]

        def arrive(rank: int, control: _Control) -> None:
            hello = RankHello(rank, 0, 3, 5, 30.0, "continue")
            nursery.start_soon(coordinator._admit, _meeting._Arrival(control, hello))  # type: ignore[arg-type]

        arrive(1, first)
        await trio.testing.wait_all_tasks_blocked()
        if when == "meeting":
            coordinator._controls[2] = second  # type: ignore[assignment]
            coordinator._complete.set()
        else:
            arrive(2, second)
            await trio.testing.wait_all_tasks_blocked()
            arrive(1, replacement)
            await trio.testing.wait_all_tasks_blocked()
        for control in first, replacement:
            control.end.close()
        await trio.testing.wait_all_tasks_blocked()
        assert list(members.lost) == [1] and list(coordinator._controls) == [2]
        nursery.cancel_scope.cancel()


class TestContinue:
    """``on_loss="continue"``: the group survives, and the lost rank may be replaced."""

    async def test_a_server_goes_on_and_gets_a_new_worker(self, tmp_path: Path) -> None:
        ranks = Ranks(tmp_path, 4, "continue")
        replaced = trio.Event()

        async def server(group: mesh.Group) -> list[Any]:
            log: list[Any] = []
            while True:
                try:
                    rank, data = await group.receive_from_any(tag=1)
                except mesh.RankLostError as error:
                    assert error.rank == 2 and group.lost == {2: error.reason}
                    with pytest.raises(mesh.RankLostError):
                        await group.send(b"", to=2)
                    with pytest.raises(mesh.RankLostError):
                        await group.barrier()
                    log.append("lost 2")
                    replaced.set()
                except trio.EndOfChannel:
                    assert group.generation == 1 and not group.lost
                    return log
                else:
                    log.append((rank, data))
                    await group.send(b"go on", to=rank, tag=2)

        async def worker(group: mesh.Group) -> None:
            for number in range(3):
                if group.rank == 2 and group.generation == 0 and number == 2:
                    raise ValueError("dead")
                await group.send(b"%d of %d" % (number, group.generation), to=0, tag=1)
                assert await group.receive(source=0, tag=2) == b"go on"
            if group.rank != 2:
                with trio.fail_after(10):
                    while group.generation == 0:
                        await trio.sleep(0.01)
            await group.send_receive(b"hello", to={1: 2, 2: 3, 3: 1}[group.rank], source={1: 3, 2: 1, 3: 2}[group.rank])

        async def second_worker() -> None:
            await replaced.wait()
            await ranks.run(2, worker)

        with trio.fail_after(20):
            async with trio.open_nursery() as nursery:
                nursery.start_soon(ranks.run, 0, server)
                for rank in (1, 2, 3):
                    nursery.start_soon(ranks.run, rank, worker)
                nursery.start_soon(second_worker)
        log = ranks.ends[0]
        assert ranks.ends[1] is ranks.ends[2] is ranks.ends[3] is None, ranks.ends
        assert log.count("lost 2") == 1
        assert [data for one in log if one != "lost 2" for rank, data in [one] if rank == 2] == [
            b"0 of 0", b"1 of 0", b"0 of 1", b"1 of 1", b"2 of 1"
        ]  # fmt: skip

    async def test_lost_ranks_have_not_left(self, tmp_path: Path) -> None:
        """``receive_from_any`` waits for a replacement, also when all others are lost."""
        ranks = Ranks(tmp_path, 3, "continue")

        async def server(group: mesh.Group) -> list[Any]:
            for rank in (1, 2):  # one leaves, the other one is lost
                await group.send(b"go", to=rank)
            with pytest.raises(mesh.RankLostError):
                await group.receive_from_any()
            with trio.move_on_after(0.3) as waits:
                await group.receive_from_any()
            assert waits.cancelled_caught
            with trio.move_on_after(0.01) as waits:
                await group.wait_replaced(2)
            assert waits.cancelled_caught and list(group.lost) == [2]
            lost.set()
            await group.wait_replaced(2)
            assert group.generation == 1
            found = [await group.receive_from_any()]
            with pytest.raises(trio.EndOfChannel):
                await group.receive_from_any()
            return found

        async def worker(group: mesh.Group) -> None:
            if group.generation:
                await group.send(b"new", to=0)
                return
            await group.receive(source=0)
            if group.rank == 2:
                raise ValueError("dead")

        lost = trio.Event()
        with trio.fail_after(20):
            async with trio.open_nursery() as nursery:
                nursery.start_soon(ranks.run, 0, server)
                for rank in (1, 2):
                    nursery.start_soon(ranks.run, rank, worker)
                await lost.wait()
                nursery.start_soon(ranks.run, 2, worker)
        assert ranks.ends[0] == [(2, b"new")], ranks.ends

    async def test_collectives_are_in_step_after_a_replacement(self, tmp_path: Path) -> None:
        """However many each rank had done, and whichever was interrupted."""
        ranks = Ranks(tmp_path, 4, "continue")

        async def body(group: mesh.Group) -> list[bytes]:
            if group.generation == 0:
                await ranks.meet(group)
                if group.rank == 3:
                    raise ValueError("dead")
                with pytest.raises(mesh.RankLostError) as caught:
                    for _ in range(10):
                        await group.all_gather(b"old")
                assert caught.value.rank == 3
                while group.generation == 0:
                    await trio.sleep(0.005)
            return await group.all_gather(b"%d" % group.rank)

        async def twice() -> None:
            await ranks.run(3, body)
            assert isinstance(ranks.ends[3], ValueError)
            await ranks.run(3, body)

        with trio.fail_after(20):
            async with trio.open_nursery() as nursery:
                for rank in (0, 1, 2):
                    nursery.start_soon(ranks.run, rank, body)
                nursery.start_soon(twice)
        assert [ranks.ends[rank] for rank in range(4)] == [[b"0", b"1", b"2", b"3"]] * 4

    async def test_one_rank_waits_for_a_replacement_and_tells_another(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """The message does not overtake what rank 0 says of the replacement."""
        ranks = Ranks(tmp_path, 4, "continue")
        send_soon = _meeting._send_soon

        def send_late(nursery: trio.Nursery, *args: Any) -> None:
            async def send() -> None:
                await trio.sleep(0.1)
                send_soon(nursery, *args)

            nursery.start_soon(send)

        async def body(group: mesh.Group) -> list[bytes]:
            if group.generation == 0:
                await ranks.meet(group)
                if group.rank == 3:
                    raise ValueError("dead")
                if group.rank == 0:
                    with pytest.raises(mesh.RankLostError):
                        await group.receive(source=3)
                    lost.set()
                    await group.wait_replaced(3)
                    for rank in (1, 2):
                        await group.send(b"go on", to=rank)
                else:
                    assert await group.receive(source=0) == b"go on"
            return await group.all_gather(b"%d" % group.rank)

        async def when_lost() -> None:
            await lost.wait()
            monkeypatch.setattr(_meeting, "_send_soon", send_late)

        lost = trio.Event()
        await ranks.run_and_replace(3, body, when_lost)
        assert [ranks.ends[rank] for rank in range(4)] == [[b"0", b"1", b"2", b"3"]] * 4

    @pytest.mark.parametrize("gives_up", [False, True])
    async def test_a_replacement_that_waits_before_the_loss(self, tmp_path: Path, gives_up: bool) -> None:
        """It joins as soon as the rank is lost; or it gives up before, and nobody notices."""
        ranks = Ranks(tmp_path, 3, "continue")

        async def body(group: mesh.Group) -> Any:
            if group.generation == 0:
                await ranks.meet(group)
                met.set()
                if group.rank == 2:
                    await (gave_up.wait() if gives_up else trio.sleep(0.3))
                    raise ValueError("dead")
                with pytest.raises(mesh.RankLostError) as caught:  # also if another process has joined since
                    await group.receive_from_any(tag=1)
                assert (caught.value.rank, caught.value.reason) == (2, "it left with ValueError('dead')")
                if gives_up:
                    return await group.send_receive(b"", to=1 - group.rank, source=1 - group.rank)
                while group.generation == 0:
                    await trio.sleep(0.01)
            return await group.all_gather(b"%d" % group.rank)

        async def replacement() -> None:
            await met.wait()
            with trio.move_on_after(0.2 if gives_up else 60):
                await ranks.run(2, body)
            gave_up.set()

        met, gave_up = trio.Event(), trio.Event()
        with trio.fail_after(20):
            async with trio.open_nursery() as nursery:
                nursery.start_soon(replacement)
                for rank in range(3):
                    nursery.start_soon(ranks.run, rank, body)
        result = b"" if gives_up else [b"0", b"1", b"2"]
        assert ranks.ends[0] == ranks.ends[1] == result, ranks.ends

    async def test_what_was_called_before_a_loss_fails(self, tmp_path: Path) -> None:
        """Also behind a cancelled operation, when this rank hears of the loss and of the replacement at once."""
        ranks = Ranks(tmp_path, 3, "continue")
        ranks.yield_interval = 0.5

        async def body(group: mesh.Group) -> Any:
            if group.generation == 0:
                await ranks.meet(group)
                met.set()
                if group.rank == 2:
                    await trio.sleep(0.5)
                    raise ValueError("dead")
                if group.rank == 1:
                    with trio.move_on_after(0.05):
                        await group.barrier()
                    with pytest.raises(mesh.RankLostError):
                        await group.barrier()
                while group.generation == 0:
                    await trio.sleep(0.01)
                await group.wait_replaced(2)
            return await group.all_gather(b"%d" % group.rank)

        met = trio.Event()
        await ranks.run_and_replace(2, body, met.wait)
        assert ranks.ends == {rank: [b"0", b"1", b"2"] for rank in range(3)}

    async def test_a_message_that_waits_when_a_rank_is_lost_is_dropped(self, tmp_path: Path) -> None:
        """Nobody would take it: whoever posted it would wait for ever with the next operation."""
        ranks = Ranks(tmp_path, 3, "continue")

        async def body(group: mesh.Group) -> Any:
            if group.generation == 0:
                await ranks.meet(group)
                if group.rank == 0:
                    with trio.move_on_after(0.3):  # rank 1 does not read: its window gets full
                        while True:
                            await group.send(bytes(8000), to=1, tag=5)
                    await group.broadcast(bytes(9000))  # the root does not wait
                    waits.set()
                if group.rank == 2:
                    await waits.wait()
                    raise ValueError("dead")
                while not group.lost:
                    await trio.sleep(0.01)
                lost.set()
                await group.wait_replaced(2)
            gathered = await group.gather(b"%d" % group.rank, root=2)
            return gathered, await group.broadcast(b"go on" if group.rank == 2 else None, root=2)

        lost, waits = trio.Event(), trio.Event()
        await ranks.run_and_replace(2, body, lost.wait)
        assert ranks.ends == {0: (None, b"go on"), 1: (None, b"go on"), 2: ([b"0", b"1", b"2"], b"go on")}

    async def test_wait_lost_ends_a_ring(self, tmp_path: Path) -> None:
        """Also at a rank that waits for one that lives; and again after the lost rank was replaced."""
        ranks = Ranks(tmp_path, 4, "continue")

        async def ring(group: mesh.Group) -> None:
            right, left = (group.rank + 1) % group.size, (group.rank - 1) % group.size
            while True:
                await group.send_receive(bytes(100), to=right, source=left, tag=group.generation)

        async def body(group: mesh.Group) -> list[tuple[int, str]]:
            losses = []
            if group.generation < 2 and group.rank == 2:
                await lost_here.wait()
                with trio.move_on_after(0.05):
                    await ring(group)
                raise ValueError("dead")
            while group.generation < 2:
                if group.rank == 0:
                    lost_here.set()
                try:
                    async with trio.open_nursery() as nursery:
                        nursery.start_soon(group.wait_lost)
                        await ring(group)
                except* mesh.RankLostError as errors:
                    error = errors.exceptions[0]
                    assert isinstance(error, mesh.RankLostError)
                    losses.append((error.rank, error.reason))
                await group.wait_replaced(2)
            return losses

        async def three_times() -> None:
            for _ in range(3):
                await ranks.run(2, body)

        lost_here = trio.Event()
        with trio.fail_after(20):
            async with trio.open_nursery() as nursery:
                nursery.start_soon(three_times)
                for rank in (0, 1, 3):
                    nursery.start_soon(ranks.run, rank, body)
        assert ranks.ends == {2: [], **dict.fromkeys((0, 1, 3), [(2, "it left with ValueError('dead')")] * 2)}

    async def test_what_wait_lost_counts(self, tmp_path: Path) -> None:
        """A rank that is lost when it is called, and any loss since, also when the rank was replaced meanwhile."""
        ranks = Ranks(tmp_path, 3, "continue")

        async def body(group: mesh.Group) -> None:
            with trio.move_on_after(0.02) as scope:
                await group.wait_lost()
            assert scope.cancelled_caught  # also at the replacement
            if group.generation == 0:
                await ranks.meet(group)
                if group.rank == 2:
                    raise ValueError("dead")
                with pytest.raises(mesh.RankLostError) as caught:
                    await group.wait_lost()
                assert caught.value.rank == 2
                with pytest.raises(mesh.RankLostError), trio.testing.assert_checkpoints():
                    await group.wait_lost()
                lost.set()
                await group.wait_replaced(2)
                with trio.move_on_after(0.02) as scope:
                    await group.wait_lost()
                assert scope.cancelled_caught
                if group.rank == 1:  # both at once: the task that waits runs only after them
                    async with trio.open_nursery() as nursery:

                        async def wait() -> None:
                            with pytest.raises(mesh.RankLostError, match="again"):
                                await group.wait_lost()

                        nursery.start_soon(wait)
                        await trio.testing.wait_all_tasks_blocked()
                        members = group._members
                        members.losses[2] = mesh.RankLostError(2, "again")
                        members.changed.unpark_all()
            await group.barrier()

        lost = trio.Event()
        await ranks.run_and_replace(2, body, lost.wait)
        assert ranks.ends == {0: None, 1: None, 2: None}

    async def test_wait_lost_when_the_group_ends(self, tmp_path: Path) -> None:
        groups: list[mesh.Group] = []

        async def body(group: mesh.Group) -> None:
            groups.append(group)
            await group.barrier()
            if group.rank:
                with pytest.raises(mesh.RankLostError) as caught:
                    await group.wait_lost()
                assert caught.value.rank == 0
                return
            raise ValueError("dead")

        ends = await Ranks(tmp_path, 2, "continue").run_all(body)
        assert isinstance(ends[1], mesh.RankLostError)
        with pytest.raises(trio.ClosedResourceError):
            await groups[0].wait_lost()

    async def test_the_loss_of_rank_0_ends_the_group(self, tmp_path: Path) -> None:
        async def body(group: mesh.Group) -> None:
            await group.barrier()
            if group.rank == 0:
                raise ValueError("mine")
            await trio.sleep_forever()

        ends = await Ranks(tmp_path, 3, "continue").run_all(body)
        assert all(isinstance(ends[rank], mesh.RankLostError) and ends[rank].rank == 0 for rank in (1, 2))

    async def test_a_rank_that_has_not_been_lost_cannot_be_replaced(self, tmp_path: Path) -> None:
        ranks = Ranks(tmp_path, 2, "continue")

        async def body(group: mesh.Group) -> None:
            if group.rank == 0:
                async with ucp.open_worker() as worker:
                    with pytest.raises(ConnectionRefusedError, match="rank 1 has joined already"):
                        async with mesh.join(
                            rank=1,
                            size=2,
                            meeting=f"file://{tmp_path}/meeting",
                            worker=worker,
                            timeout=3,
                            on_loss="continue",
                        ):
                            pass
            await group.barrier()

        assert await ranks.run_all(body) == {0: None, 1: None}


async def test_a_connection_that_is_made_while_the_group_ends_is_not_kept() -> None:
    """The other rank's answer has come, and before the task that waits for it runs, the group's links are ended."""
    peer_sees = []
    with trio.fail_after(10):
        async with ucp.open_worker() as worker, trio.open_nursery() as nursery:
            members = Members(0, 2, fatal=True, name="group")
            links = _links.Links(members, nursery, worker, {})

            async def answering(connection: trio_ucx.Connection) -> None:
                channel, _hello = await _links.first_message(connection)
                channel.send_nowait(encode(RankAnswer()))
                links.end()
                with pytest.raises((trio.BrokenResourceError, trio.EndOfChannel)) as caught:
                    await channel.receive()
                peer_sees.append(caught.value)
                nursery.cancel_scope.cancel()

            listeners = await nursery.start(trio_ucx.serve_ucx, answering, 0)
            members.addresses[1] = ("127.0.0.1", listeners[0].address[1])
            link = links.link(1)
            await links._try_to_connect(link)
            assert link.connection is None
            assert not links.leaving  # otherwise the group's operations would not say why it has ended
    assert len(peer_sees) == 1
