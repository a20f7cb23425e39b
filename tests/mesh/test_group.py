"""The Group: messages and collective operations. All ranks are tasks of one process, each with its own worker."""

from __future__ import annotations

import errno
import itertools
from collections.abc import Awaitable, Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import trio
from helpers import until

import trio_ucx
from trio_ucx import mesh, ucp
from trio_ucx._link.sending import Sending
from trio_ucx.mesh import _links

Body = Callable[[mesh.Group], Awaitable[Any]]


async def run_ranks(
    folder: Path, size: int, body: Body, config: Mapping[str, str] | None = None, **options: Any
) -> list[Any]:
    """Runs a function in each rank of a group, and returns their results. ``config`` is of the workers."""
    results: list[Any] = [None] * size

    async def run(rank: int) -> None:
        async with (
            ucp.open_worker(config=config) as worker,
            mesh.join(rank=rank, size=size, meeting=f"file://{folder}/meeting", worker=worker, **options) as group,
        ):
            results[rank] = await body(group)

    with trio.fail_after(30):
        async with trio.open_nursery() as nursery:
            for rank in range(size):
                nursery.start_soon(run, rank)
    return results


async def test_messages_between_all_pairs(tmp_path: Path) -> None:
    async def body(group: mesh.Group) -> list[bytes]:
        others = [rank for rank in range(group.size) if rank != group.rank]
        async with trio.open_nursery() as nursery:
            for rank in others:  # all pairs connect at once, from both sides
                nursery.start_soon(partial(group.send, f"{group.rank} to {rank}".encode(), to=rank))
        return [await group.receive(source=rank) for rank in others]

    results = await run_ranks(tmp_path, 5, body)
    for rank, got in enumerate(results):
        assert got == [f"{other} to {rank}".encode() for other in range(5) if other != rank]


async def test_one_connection_for_each_pair(tmp_path: Path) -> None:
    async def body(group: mesh.Group) -> None:
        other = 1 - group.rank
        found = []

        async def find() -> None:
            found.append(await group.connection(other))

        async with trio.open_nursery() as nursery:
            for _ in range(5):
                nursery.start_soon(find)
        assert len({id(connection) for connection in found}) == 1
        await found[0].send(b"directly", tag=5)
        assert await group.receive(source=other, tag=5) == b"directly"

    for _ in range(5):
        await run_ranks(tmp_path, 2, body)


async def test_descriptors_are_short_for_a_moment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A rank that cannot connect for want of descriptors tries again: the other rank is not to blame."""
    attempts = itertools.count()

    async def open_late(*arguments: Any, **options: Any) -> trio_ucx.Connection:
        if next(attempts) < 2:
            raise OSError(errno.EMFILE, "no descriptors")
        return await trio_ucx.open_ucx_stream(*arguments, **options)

    async def body(group: mesh.Group) -> Any:
        if group.rank == 0:
            return None
        monkeypatch.setattr(_links, "open_ucx_stream", open_late)
        await group.send(b"hello", to=3 - group.rank)
        return await group.receive(source=3 - group.rank)

    assert await run_ranks(tmp_path, 3, body) == [None, b"hello", b"hello"]
    assert next(attempts) > 2


async def test_report_says_whose_connections_they_are(tmp_path: Path) -> None:
    async def body(group: mesh.Group) -> str:
        await group.barrier()
        text = trio_ucx.report()
        await group.barrier()
        return text

    for text in await run_ranks(tmp_path, 2, body):
        for rank in (0, 1):
            for what in ("the connection", "the control connection"):
                assert f"belongs to a group: {what} with rank {rank}" in text
        assert "needs an aclose" not in text


async def test_report_names_the_operation_that_waits_and_the_rank(tmp_path: Path) -> None:
    """Ranks that disagree about what comes next: the usual hang of such programs."""

    async def body(group: mesh.Group) -> None:
        if group.rank == 1:
            await group.barrier()
            return
        with trio.CancelScope() as scope:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(partial(group.receive, source=1, tag=5))

                def causes() -> list[str]:
                    lines = [line.strip() for line in trio_ucx.report().splitlines()]
                    return [line for line in lines if line.startswith("=>")]

                await until(lambda: sorted(causes()) == expected)
                scope.cancel()
        await group.barrier()

    expected = [
        "=> rank 1 waits in collective operation 1 (barrier), which this rank has not begun: all ranks must call the "
        "same operations in the same order",
        "=> this rank waits in collective operation 1 (barrier) for rank 0, which has not reached it",
    ]
    await run_ranks(tmp_path, 2, body)


async def test_send_receive_in_a_ring(tmp_path: Path) -> None:
    """Messages of 1 MiB: if all ranks sent first, nobody would receive."""
    size = 2**20

    async def body(group: mesh.Group) -> None:
        right, left = (group.rank + 1) % group.size, (group.rank - 1) % group.size
        buffer = bytearray(size)
        data = bytes([group.rank]) * size
        assert await group.send_receive(data, to=right, source=left, into=buffer, tag=7) == size
        assert buffer == bytes([left]) * size
        assert await group.send_receive(b"short", to=right, source=left) == b"short"

    await run_ranks(tmp_path, 4, body)


async def test_send_receive_of_arrays(tmp_path: Path) -> None:
    """They may be changed as soon as it has returned, whether they were copied or not."""

    async def body(group: mesh.Group) -> None:
        right, left = (group.rank + 1) % group.size, (group.rank - 1) % group.size
        for rows in (0, 1, 8, 9, 200):  # 8 KiB each
            data = np.full((rows, 1024), float(group.rank))
            into = np.full((rows, 1024), -1.0)
            assert await group.send_receive(data, to=right, source=left, into=into) == into.nbytes
            data[:] = -2
            await group.barrier()
            assert (into == left).all()
        with pytest.raises(ValueError, match=r"ucp\.Strided"):
            await group.send_receive(data[:, 1], to=right, source=left, tag=1)
        with pytest.raises(TypeError, match="objects"):
            await group.send_receive(np.array([{}], dtype=object), to=right, source=left, tag=1)
        column = np.zeros(rows)
        data[:, 1] = range(rows)
        await group.send_receive(ucp.Strided(data[:, 1]), to=right, source=left, into=column)
        assert list(column) == list(range(rows))

    await run_ranks(tmp_path, 3, body)


async def test_send_receive_sends_once_when_ucx_is_busy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """``send_short`` gives an operation then, and the message has been posted."""
    original = Sending.send_short

    def busy(self: Sending, number: int, data: Any) -> Any:
        sent = original(self, number, data)
        return object() if sent is True and number == 3 else sent

    monkeypatch.setattr(Sending, "send_short", busy)

    async def body(group: mesh.Group) -> None:
        other = 1 - group.rank
        connection = await group.connection(other)
        assert await group.send_receive(b"once", to=other, source=other, tag=3) == b"once"
        await group.barrier()
        with pytest.raises((trio.WouldBlock, trio.EndOfChannel)):
            connection.receive_nowait(tag=3)

    await run_ranks(tmp_path, 2, body)


async def test_send_receive_at_the_ends_of_a_line(tmp_path: Path) -> None:
    async def body(group: mesh.Group) -> bytes | int | None:
        to = group.rank + 1 if group.rank + 1 < group.size else None
        source = group.rank - 1 if group.rank else None
        return await group.send_receive(bytes([group.rank]), to=to, source=source)

    assert await run_ranks(tmp_path, 3, body) == [None, b"\0", b"\1"]


async def test_receive_from_any_takes_turns_and_ends(tmp_path: Path) -> None:
    async def body(group: mesh.Group) -> list[int]:
        if group.rank:
            for number in range(3):
                await group.send(b"%d %d" % (group.rank, number), to=0, tag=9)
            await group.barrier()
            return []
        await group.barrier()  # now all messages have been sent
        for other in range(1, group.size):
            await (await group.connection(other)).wait_message(tag=9)
        await trio.testing.wait_all_tasks_blocked(0.05)
        order = []
        while True:
            try:
                rank, data = await group.receive_from_any(tag=9)
            except trio.EndOfChannel:
                return order
            assert data == b"%d %d" % (rank, order.count(rank))
            order.append(rank)

    results = await run_ranks(tmp_path, 4, body)
    assert results[0] == [1, 2, 3] * 3


async def test_receive_from_any_keeps_nothing(tmp_path: Path) -> None:
    async def body(group: mesh.Group) -> None:
        for _ in range(10):
            with trio.move_on_after(0.001):
                await group.receive_from_any(tag=1)
        assert not group._waiters
        await group.barrier()

    await run_ranks(tmp_path, 2, body)


async def test_receive_from_any_waits(tmp_path: Path) -> None:
    async def body(group: mesh.Group) -> None:
        if group.rank:
            await trio.sleep(0.02 * group.rank)
            await group.send(bytes(100_000), to=0, tag=group.rank)
            return
        with trio.move_on_after(0.01):
            await group.receive_from_any(tag=1)
        for rank in (1, 2, 3):
            got = await group.receive_from_any(tag=rank)
            assert got == (rank, bytes(100_000))

    await run_ranks(tmp_path, 4, body)


@pytest.mark.parametrize("size", [1, 2, 3, 4, 5, 8])
async def test_collectives(tmp_path: Path, size: int) -> None:
    async def body(group: mesh.Group) -> None:
        rank = group.rank
        for root in range(size):
            await group.barrier()
            assert await group.broadcast(b"from %d" % rank, root=root) == b"from %d" % root
            gathered = await group.gather(b"x" * rank, root=root)
            assert gathered == ([b"x" * one for one in range(size)] if rank == root else None)
        assert await group.all_gather(bytes([rank]) * rank) == [bytes([one]) * one for one in range(size)]

    await run_ranks(tmp_path, size, body)


async def test_barrier_waits_for_all(tmp_path: Path) -> None:
    entered: set[int] = set()

    async def body(group: mesh.Group) -> None:
        await trio.sleep(0.03 * (group.rank == 2))
        entered.add(group.rank)
        await group.barrier()
        assert entered == set(range(4))

    await run_ranks(tmp_path, 4, body)


@pytest.mark.parametrize(
    "array",
    [
        np.arange(6, dtype=np.float32).reshape(2, 3),
        np.zeros((0, 3)),
        np.array(5),
        np.array([(1, 2.5)], dtype=[("a", "i4"), ("b", "f8")]),
        np.arange(10)[::2],
        np.array(["2026-01-01"], dtype="M8[D]"),
        np.arange(3, dtype=">i4"),
        np.zeros(2, dtype=[("a", "f4", (2,))]),
        np.zeros(1, dtype=[("a", [("x", "i4")])]),
        np.zeros(1, dtype=np.dtype([("a", "i1"), ("b", "i4")], align=True)),
        np.zeros((0, 2)),
    ],
    ids=lambda array: str(array.dtype),
)
async def test_arrays_keep_shape_and_dtype(tmp_path: Path, array: np.ndarray[Any, Any]) -> None:
    async def body(group: mesh.Group) -> Any:
        return await group.broadcast(array if group.rank == 0 else None), await group.all_gather(array)

    for one, all_of_them in await run_ranks(tmp_path, 2, body):
        for got in (one, *all_of_them):
            assert got.dtype == array.dtype and got.shape == array.shape
            assert np.array_equal(got, array)
            assert got.flags.writeable


async def test_arrays_between_ranks(tmp_path: Path) -> None:
    async def body(group: mesh.Group) -> Any:
        other = 1 - group.rank
        for size in (3, 300_000):
            sent = np.arange(size).reshape(-1, 3) + group.rank
            out = np.zeros_like(sent)
            async with trio.open_nursery() as nursery:
                nursery.start_soon(partial(group.send_array, sent, to=other, tag=2))
                assert await group.receive_array(source=other, tag=2, out=out) is out
            assert (out == sent - group.rank + other).all()
            async with trio.open_nursery() as nursery:
                nursery.start_soon(partial(group.send_arrays, {"a": sent}, to=other))
                got = await group.receive_arrays(source=other)
            assert (got["a"] == out).all()
            async with trio.open_nursery() as nursery:
                nursery.start_soon(partial(group.send, bytes(size), to=other))
                with pytest.raises(trio_ucx.UnexpectedMessage):
                    await group.receive_array(source=other)
                assert await group.receive_into(bytearray(size), source=other, exact=True) == size

    await run_ranks(tmp_path, 2, body)


async def test_large_values(tmp_path: Path) -> None:
    """More than the window holds: such messages go when the peer receives."""
    value = bytes(range(256)) * 2**13

    async def body(group: mesh.Group) -> None:
        for _ in range(3):
            assert await group.broadcast(value, root=1) == value
            assert await group.all_gather(value) == [value] * group.size

    await run_ranks(tmp_path, 3, body)


async def test_cancelled_collective_goes_on_in_the_background(tmp_path: Path) -> None:
    """The others do not notice, and the next operation is in step."""

    async def body(group: mesh.Group) -> list[Any]:
        if group.rank == 1:
            with trio.move_on_after(0.02) as scope:
                await group.all_gather(b"cancelled")
            assert scope.cancelled_caught
            cancelled.set()
        else:
            await (cancelled.wait() if group.rank == 2 else trio.sleep(0))
            assert await group.all_gather(b"x") == [b"x", b"cancelled", b"x", b"x"]
        return await group.all_gather(bytes([group.rank]))

    cancelled = trio.Event()
    for result in await run_ranks(tmp_path, 4, body):
        assert result == [b"\0", b"\1", b"\2", b"\3"]


async def test_a_collective_later_than_a_cancelled_one(tmp_path: Path) -> None:
    """It waits for the one in the background, which is not busy in the sense of another task."""

    async def body(group: mesh.Group) -> None:
        if group.rank:
            await trio.sleep(0.2)
        else:
            with trio.move_on_after(0.02):
                await group.barrier()
            await trio.sleep(0.05)
        for _ in range(1 if group.rank == 0 else 2):
            await group.barrier()

    await run_ranks(tmp_path, 2, body)


async def test_every_cancelled_collective_counts(tmp_path: Path) -> None:
    """Also one that is cancelled while the one before goes on in the background."""

    async def body(group: mesh.Group) -> list[list[Any]]:
        if group.rank == 1:
            await all_cancelled.wait()
        results: list[list[Any]] = []
        for number in range(3):
            with trio.CancelScope() as scope:
                if group.rank == 0:
                    scope.deadline = trio.current_time() + 0.02
                results.append(await group.all_gather(b"%d" % number))
        all_cancelled.set()
        results.append(await group.all_gather(b"%d" % group.rank))
        return results

    all_cancelled = trio.Event()
    cancelled, patient = await run_ranks(tmp_path, 2, body)
    assert cancelled == [[b"0", b"1"]]
    assert patient == [[b"0", b"0"], [b"1", b"1"], [b"2", b"2"], [b"0", b"1"]]


async def test_different_collectives_are_an_error(tmp_path: Path) -> None:
    async def body(group: mesh.Group) -> None:
        with pytest.raises(RuntimeError, match="all ranks must call the same operations"):
            await (group.barrier() if group.rank else group.all_gather(b""))

    await run_ranks(tmp_path, 2, body)


async def test_two_collectives_at_once_are_an_error(tmp_path: Path) -> None:
    async def body(group: mesh.Group) -> None:
        if group.rank:
            await tried.wait()
            await group.barrier()
            return
        async with trio.open_nursery() as nursery:
            nursery.start_soon(group.barrier)
            await trio.testing.wait_all_tasks_blocked()
            with pytest.raises(trio.BusyResourceError):
                await group.barrier()
            tried.set()

    tried = trio.Event()
    await run_ranks(tmp_path, 2, body)


async def test_wrong_arguments(tmp_path: Path) -> None:
    async def body(group: mesh.Group) -> None:
        with pytest.raises(ValueError, match="no connection to itself"):
            await group.send(b"", to=group.rank)
        for wrong in (-1, 2, 100):
            with pytest.raises(ValueError, match="rank"):
                await group.receive(source=wrong)
        with pytest.raises(TypeError):
            await group.send(b"", to="1")  # type: ignore[arg-type]
        with pytest.raises(ValueError, match="tag"):
            await group.send(b"", to=1 - group.rank, tag=-1)
        for call in (lambda: group.broadcast(object(), root=group.rank), lambda: group.all_gather("text")):
            with pytest.raises(TypeError):
                await call()
        with pytest.raises(ValueError, match="root"):
            await group.gather(b"", root=2)
        with pytest.raises(TypeError, match="objects"):
            await group.all_gather(np.array([{}], dtype=object))
        with pytest.raises(TypeError, match="mask"):
            await group.all_gather(np.ma.masked_array([1], [True]))
        for wrong in (group.rank, 99):
            with pytest.raises(ValueError, match="rank"):
                await group.send_receive(b"not sent", to=1 - group.rank, source=wrong, tag=3)
        with pytest.raises(TypeError, match="bytes-like or a NumPy array, not str"):
            await group.all_gather("text")
        with pytest.raises(TypeError, match="contiguous"):
            await group.all_gather(memoryview(bytes(10))[::2])
        await group.barrier()  # none of these has put the ranks out of step
        with pytest.raises((trio.WouldBlock, trio.EndOfChannel)):
            (await group.connection(1 - group.rank)).receive_nowait(tag=3)

    await run_ranks(tmp_path, 2, body)


async def test_after_leaving(tmp_path: Path) -> None:
    groups: list[mesh.Group] = []

    async def body(group: mesh.Group) -> None:
        groups.append(group)
        await group.barrier()

    await run_ranks(tmp_path, 2, body)
    group = groups[0]
    operations: list[Callable[[], Awaitable[Any]]] = [
        lambda: group.send(b"", to=1 - group.rank),
        lambda: group.receive(source=1 - group.rank),
        lambda: group.connection(1 - group.rank),
        lambda: group.receive_from_any(),
        lambda: group.barrier(),
    ]
    for operation in operations:
        with pytest.raises(trio.ClosedResourceError):
            await operation()


async def test_what_was_sent_before_leaving_arrives(tmp_path: Path) -> None:
    async def body(group: mesh.Group) -> None:
        if group.rank:
            await group.send(bytes(1000), to=0, tag=1)
        else:
            await trio.sleep(0.1)
            assert await group.receive(source=1, tag=1) == bytes(1000)

    await run_ranks(tmp_path, 2, body)


async def test_exceptions_of_the_block_stay_what_they_are(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="mine"):
        async with mesh.join(rank=0, size=1, meeting=f"file://{tmp_path}/meeting"):
            raise ValueError("mine")


async def test_every_operation_is_a_checkpoint(tmp_path: Path) -> None:
    async def body(group: mesh.Group) -> None:
        other = 1 - group.rank
        await group.send(b"", to=other, tag=1)
        await group.send(b"", to=other, tag=2)
        await (await group.connection(other)).wait_message(tag=2)
        operations: list[Callable[[], Awaitable[Any]]] = [
            lambda: group.connection(other),
            lambda: group.receive(source=other, tag=1),
            lambda: group.receive_from_any(tag=2),
            lambda: group.send(b"", to=other, tag=3),
            lambda: group.send_receive(to=None, source=None),
            lambda: group.broadcast(b"") if group.rank == 0 else group.barrier(),
        ]
        for operation in operations[: None if group.rank == 0 else -1]:
            with trio.testing.assert_checkpoints():
                await operation()
        if group.rank:
            await group.broadcast()
        await reduce_and_scatter(group)

    async def reduce_and_scatter(group: mesh.Group) -> None:
        for length in (1, 100_000):
            for call in (group.reduce, group.all_reduce):
                with trio.testing.assert_checkpoints():
                    await call(np.zeros(length), "sum")
        with trio.testing.assert_checkpoints():
            await group.scatter([b""] * group.size)

    await run_ranks(tmp_path, 2, body)
    await run_ranks(tmp_path, 1, reduce_and_scatter)


async def test_connections_on_demand(tmp_path: Path) -> None:
    """The pairs of a barrier, and nothing else, have connections."""
    size = 16

    async def body(group: mesh.Group) -> None:
        for _ in itertools.repeat(None, 3):
            await group.barrier()
        assert len(group._links.by_rank) <= 2 * 4

    await run_ranks(tmp_path, size, body)


@pytest.mark.parametrize("size", [1, 2, 3, 4, 5, 8, 11])
async def test_scatter(tmp_path: Path, size: int) -> None:
    async def body(group: mesh.Group) -> None:
        for root in range(size):
            parts = [b"x" * one for one in range(size)] if group.rank == root else None
            assert await group.scatter(parts, root=root) == b"x" * group.rank
        assert np.array_equal(await group.scatter(np.eye(size)), np.eye(size)[group.rank])
        arrays = [np.arange(one) for one in range(size)]
        assert np.array_equal(await group.scatter(arrays), np.arange(group.rank))  # ignored but at the root

    await run_ranks(tmp_path, size, body)


async def test_scatter_of_wrong_parts(tmp_path: Path) -> None:
    async def body(group: mesh.Group) -> None:
        for parts in (None, [], [b""], [b""] * 3):
            with pytest.raises(ValueError, match=f"a value for each of the 2 ranks, not {len(parts or ())}"):
                await group.scatter(parts, root=group.rank)
        with pytest.raises(TypeError):
            await group.scatter([b"", "text"], root=group.rank)
        with pytest.raises(ValueError, match="root"):
            await group.scatter([b"", b""], root=2)
        assert await group.scatter([b"a", b"b"]) == [b"a", b"b"][group.rank]

    await run_ranks(tmp_path, 2, body)


async def test_cancelled_scatter_goes_on_in_the_background(tmp_path: Path) -> None:
    """Rank 2 passes on what rank 3 gets."""

    async def body(group: mesh.Group) -> bytes | None:
        if group.rank == 2:
            with trio.move_on_after(0.02):
                await group.scatter()
            cancelled.set()
            return None
        await cancelled.wait()
        return await group.scatter([b"0", b"1", b"2", b"3"])

    cancelled = trio.Event()
    assert await run_ranks(tmp_path, 4, body) == [b"0", b"1", None, b"3"]
