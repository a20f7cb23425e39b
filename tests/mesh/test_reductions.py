"""``reduce`` and ``all_reduce``. All ranks are tasks of one process, each with its own worker."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import trio
from helpers import until

import trio_ucx
from trio_ucx import mesh
from trio_ucx.mesh import _collectives, _reductions, _running
from trio_ucx.mesh._members import Members

from .test_group import run_ranks
from .test_losses import Ranks

Array = np.ndarray[Any, Any]


@pytest.fixture(params=["small", "large"])
def path(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """With ``large``, short arrays are reduced as large ones are, in many pieces."""
    if request.param == "large":
        monkeypatch.setattr(_reductions, "_SMALL", 1)
        monkeypatch.setattr(_reductions, "_PIECE", 40)
    return str(request.param)


def as_sum(one: Array, other: Array) -> Array:
    assert one.ndim == other.ndim == 1
    return one + other


ARRAYS: dict[str, tuple[Any, Any, Any]] = {
    "float32": (lambda rank: np.arange(60, dtype=np.float32).reshape(3, 4, 5) + rank, "sum", np.add),
    "ints that overflow": (lambda rank: np.full(7, 100, np.int8), "sum", np.add),
    "min": (lambda rank: np.array([[3, 1], [2, 5]]) * (-1) ** rank, "min", np.minimum),
    "max": (lambda rank: np.arange(33, dtype=">i4") * rank, "max", np.maximum),
    "prod of complex": (lambda rank: np.arange(20) + 1j * rank, "prod", np.multiply),
    "bool": (lambda rank: np.arange(9) == rank, "sum", np.logical_or),
    "dates": (lambda rank: np.array([f"20{26 + rank}-01-01", "2000-01-01"], "M8[D]"), "max", np.maximum),
    "a function": (lambda rank: np.arange(50.0) + rank, as_sum, np.add),
    "a ufunc": (lambda rank: np.arange(50) + rank, np.bitwise_xor, np.bitwise_xor),
    "records": (
        lambda rank: np.array([(rank, 2.5)] * 20, [("a", "i4"), ("b", "f8")]),
        lambda one, other: np.where(one["a"] > other["a"], one, other),
        lambda one, other: np.where(one["a"] > other["a"], one, other),
    ),
    "not contiguous": (lambda rank: (np.arange(40.0) + rank)[::2], "sum", np.add),
    "Fortran order": (lambda rank: np.asfortranarray(np.arange(40.0).reshape(5, 8) + rank), "sum", np.add),
    "read-only": (lambda rank: np.frombuffer(bytes(range(64)), "u1"), "sum", np.add),
    "a number": (lambda rank: 1.5 * rank, "sum", np.add),
    "empty": (lambda rank: np.zeros((0, 3)), "sum", np.add),
    "fewer elements than ranks": (lambda rank: np.array([1, rank]), "sum", np.add),
}


@pytest.mark.sample(12)
@pytest.mark.parametrize("what", ARRAYS)
async def test_reduce_and_all_reduce(tmp_path: Path, path: str, what: str) -> None:
    make, op, combine = ARRAYS[what]
    size = 3

    async def body(group: mesh.Group) -> None:
        mine = make(group.rank)
        before = np.array(mine)
        for root in range(size):
            result = await group.reduce(mine, op, root=root)
            assert (result is None) == (group.rank != root)
            if result is not None:
                check(result)
        check(await group.all_reduce(mine, op))
        assert np.array_equal(mine, before)
        out = np.empty(before.shape, before.dtype)
        assert await group.all_reduce(mine, op, out=out) is out
        check(out)
        if isinstance(mine, np.ndarray) and mine.flags.writeable and mine.flags.c_contiguous:
            assert await group.all_reduce(mine, op, out=mine) is mine
            check(mine)

    def check(result: Array) -> None:
        assert type(result) is np.ndarray and result.dtype == expected.dtype and result.shape == expected.shape
        assert np.array_equal(result, expected)

    expected = np.asarray(make(0))
    for rank in range(1, size):
        expected = np.asarray(combine(expected, np.asarray(make(rank))))
    await run_ranks(tmp_path, size, body)


@pytest.mark.parametrize("size", [1, 2, 4, 5, 8])
async def test_number_of_ranks(tmp_path: Path, path: str, size: int) -> None:
    async def body(group: mesh.Group) -> Any:
        array = np.arange(101.0) * (group.rank + 1)
        for root in {0, size // 2, size - 1}:
            out = np.empty(101) if group.rank == root else None
            assert await group.reduce(array, "sum", root=root, out=out) is out
            assert out is None or np.array_equal(out, expected)
        assert await group.reduce(array, "sum", root=size - 1, out=array) is (array if group.rank == size - 1 else None)
        return await group.all_reduce(np.arange(101.0) * (group.rank + 1), "sum")

    expected = np.arange(101.0) * sum(range(size + 1))
    for result in await run_ranks(tmp_path, size, body):
        assert np.array_equal(result, expected)


over_each = pytest.mark.parametrize("config", [None, {"TLS": "tcp"}], ids=["shared memory", "tcp"])


@over_each
async def test_many_megabytes(tmp_path: Path, config: dict[str, str] | None) -> None:
    """The result is the same to the last bit, although sums of floats depend on the order."""

    async def body(group: mesh.Group) -> Any:
        array = np.random.default_rng(group.rank).normal(size=500_001)
        result = await group.all_reduce(array, "sum")
        assert np.allclose(result, sum(np.random.default_rng(rank).normal(size=500_001) for rank in range(3)))
        array *= 0  # nobody needs it any more
        return result, await group.reduce(array, "sum")

    results = await run_ranks(tmp_path, 3, body, config)
    assert len({result.tobytes() for result, _ in results}) == 1
    assert not results[0][1].any() and results[1][1] is results[2][1] is None


async def test_the_result_may_overlap_the_array(tmp_path: Path, path: str) -> None:
    async def body(group: mesh.Group) -> None:
        memory = np.arange(50.0)
        out = memory[1:]
        await group.all_reduce(memory[:-1], "sum", out=out)
        assert np.array_equal(out, 3 * np.arange(49.0))

    await run_ranks(tmp_path, 3, body)


DIFFERENT: dict[str, tuple[Any, Any]] = {
    "shape": (np.zeros(9), "sum"),
    "shape, of the same length": (np.zeros((5, 2)), "sum"),
    "dtype": (np.zeros(10, np.int64), "sum"),
    "op": (np.zeros(10), "max"),
    "a function": (np.zeros(10), as_sum),
    "much longer": (np.zeros(100_000), "sum"),
    "empty": (np.zeros(0), "sum"),
}


@pytest.mark.sample(8)
@pytest.mark.parametrize("what", DIFFERENT)
@pytest.mark.parametrize("other", [0, 2, 3])
async def test_ranks_that_differ_all_raise(tmp_path: Path, path: str, what: str, other: int) -> None:
    array, op = DIFFERENT[what]

    async def body(group: mesh.Group) -> None:
        arguments = (array, op) if group.rank == other else (np.zeros(10), "sum")
        for call in (group.all_reduce, group.reduce):
            with pytest.raises(ValueError, match=rf"do not agree .*rank {other} has ") as caught:
                await call(*arguments)
            assert "float64 (10,), sum" in str(caught.value)
        assert (await group.all_reduce(np.ones(10), "sum"))[9] == 4

    await run_ranks(tmp_path, 4, body)


async def test_wrong_arguments(tmp_path: Path) -> None:
    array = np.zeros(4)
    wrong: list[tuple[type[Exception], str, dict[str, Any]]] = [
        (TypeError, "masked", {"array": np.ma.masked_array([1.0], [True])}),
        (TypeError, "masked", {"out": np.ma.masked_array(array)}),
        (TypeError, "Python objects", {"array": np.array([{}])}),
        (TypeError, "Python objects", {"array": None}),
        (ValueError, "as float64, or as bytes", {"array": np.zeros(4, np.longdouble)}),
        (ValueError, "as complex128, or as bytes", {"array": np.zeros(4, [("a", np.clongdouble)]), "op": np.add}),
        (ValueError, "'sum', 'min', 'max', 'prod' or a function of two arrays, not 'mean'", {"op": "mean"}),
        (TypeError, "op must be a str or a function of two arrays, not NoneType", {"op": None}),
        (TypeError, ".", {"array": np.array(["text"]), "op": "prod"}),
        (TypeError, ".", {"array": np.zeros(4, int), "op": np.true_divide}),
        (TypeError, "out must be a NumPy array, not bytearray", {"out": bytearray(32)}),
        (ValueError, r"out has shape \(5,\) and dtype float64, but the array has \(4,\)", {"out": np.zeros(5)}),
        (ValueError, "and dtype float32, but the array has .* float64", {"out": np.zeros(4, np.float32)}),
        (ValueError, "writable and C-contiguous", {"out": np.zeros(8)[::2]}),
        (ValueError, "writable and C-contiguous", {"out": np.frombuffer(bytes(32))}),
    ]

    async def body(group: mesh.Group) -> None:
        for kind, text, arguments in wrong:
            with pytest.raises(kind, match=text):
                await group.all_reduce(**{"array": array, "op": "sum", **arguments})
            with pytest.raises(kind, match=text):
                await group.reduce(**{"array": array, "op": "sum", "root": group.rank, **arguments})
        with pytest.raises(ValueError, match="root"):
            await group.reduce(array, "sum", root=2)
        await group.barrier()  # none of these has put the ranks out of step

    await run_ranks(tmp_path, 2, body)


async def test_a_cancelled_one_goes_on_in_the_background(tmp_path: Path, path: str) -> None:
    async def body(group: mesh.Group) -> Any:
        mine = np.arange(100.0) * group.rank
        if group.rank == 1:
            with trio.move_on_after(0.05) as scope:
                await group.all_reduce(mine, "sum")
            assert scope.cancelled_caught
            cancelled.set()
            if path == "small":
                mine *= 0  # it was copied
        else:
            await cancelled.wait()
            assert np.array_equal(await group.all_reduce(mine, "sum"), np.arange(100.0) * 3)
        return await group.all_gather(bytes([group.rank]))

    cancelled = trio.Event()
    assert await run_ranks(tmp_path, 3, body) == [[b"\0", b"\1", b"\2"]] * 3


@over_each
async def test_cancelled_at_any_moment(
    tmp_path: Path, config: dict[str, str] | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The others get the right sum, and the operations stay in step."""
    monkeypatch.setattr(_reductions, "_PIECE", 16_000)

    async def body(group: mesh.Group) -> None:
        took = 30.0
        for number in range(30):
            mine = np.full(200_000, group.rank + 1)
            await group.barrier()
            begin = trio.current_time()
            with trio.move_on_after(took * number / 30 if number and group.rank == 1 else 30) as scope:
                result = await group.all_reduce(mine, "sum", out=mine)
                assert (result == 6).all()
                took = min(took, trio.current_time() - begin)
            assert group.rank == 1 or not scope.cancelled_caught
        assert await group.all_gather(bytes([group.rank])) == [b"\0", b"\1", b"\2"]

    await run_ranks(tmp_path, 3, body, config)


def broken(one: Array, other: Array) -> Array:
    raise KeyError("mine")


@pytest.mark.parametrize("op", [broken, lambda one, other: one[:-1], lambda one, other: one > other])
async def test_a_function_that_fails(tmp_path: Path, path: str, op: Any) -> None:
    """Its rank raises that, and leaves; the others learn that it was lost."""
    ranks = Ranks(tmp_path, 3, "cancel")

    async def body(group: mesh.Group) -> None:
        await ranks.meet(group)
        await group.all_reduce(np.arange(100.0), partial(op if group.rank == 0 else as_sum))
        await group.barrier()

    ends = await ranks.run_all(body)
    assert isinstance(ends[0], (KeyError, ValueError)) and ("mine" in str(ends[0]) or "must keep" in str(ends[0]))
    assert all(isinstance(ends[rank], mesh.RankLostError) and ends[rank].rank == 0 for rank in (1, 2)), ends


async def test_a_function_that_fails_in_the_background(tmp_path: Path, path: str) -> None:
    ranks = Ranks(tmp_path, 2, "cancel")

    async def body(group: mesh.Group) -> None:
        await group.barrier()
        if group.rank == 0:
            with trio.move_on_after(0.05):
                await group.all_reduce(np.arange(100.0), partial(broken))
            cancelled.set()
            await trio.sleep_forever()
        await cancelled.wait()
        await group.all_reduce(np.arange(100.0), partial(as_sum))

    cancelled = trio.Event()
    ends = await ranks.run_all(body)
    for end in ends.values():
        assert isinstance(end, mesh.RankLostError) and end.rank == 0
        assert "an error in a cancelled all_reduce: 'mine'" in end.reason


async def test_a_rank_that_is_lost_meanwhile(tmp_path: Path) -> None:
    """The others raise, and reduce again when it was replaced."""
    ranks = Ranks(tmp_path, 4, "continue")

    async def body(group: mesh.Group) -> Any:
        mine = np.full(200_000, group.rank + 1.0)
        if group.generation == 0:
            await ranks.meet(group)
            if group.rank == 2:
                with trio.move_on_after(0.002):
                    await group.all_reduce(mine, "sum")
                raise ValueError("dead")
            with pytest.raises(mesh.RankLostError) as caught:
                while True:
                    await group.all_reduce(mine, "sum")
            assert caught.value.rank == 2
            lost.set()
            await group.wait_replaced(2)
        return float((await group.all_reduce(mine, "sum"))[-1])

    lost = trio.Event()
    await ranks.run_and_replace(2, body, lost.wait)
    assert ranks.ends == dict.fromkeys(range(4), 10.0)


@pytest.mark.parametrize("heard", [True, False])
async def test_another_rank_has_closed_its_memory(monkeypatch: pytest.MonkeyPatch, heard: bool) -> None:
    """Because it has heard of a loss sooner than this one. Without a loss, the error is what it is."""
    monkeypatch.setattr(_running, "VERDICT", 20 if heard else 0.05)
    members = Members(0, 3, fatal=False)

    async def use(connection: object) -> None:
        if heard:
            nursery.start_soon(lose_later)
        raise trio_ucx.UCXError(-12, "reading")

    async def lose_later() -> None:
        await until(lambda: running._scope is not None)
        members.lose(2, "dead")

    def steps() -> _collectives.Steps:
        yield _collectives.Use(1, use)

    link: Any = SimpleNamespace(channel=object(), connection=object())
    async with trio.open_nursery() as nursery:
        links: Any = SimpleNamespace(by_rank={1: link}, nursery=nursery)
        running = _running.Collectives(members, links, lambda link, error: trio.sleep_forever())
        with pytest.raises(mesh.RankLostError if heard else trio_ucx.UCXError):
            await running.run(0, steps(), True)


async def test_memory_is_released(tmp_path: Path) -> None:
    """However an operation ends; the result can be used after it."""

    async def body(group: mesh.Group) -> None:
        connection = await group.connection(1 - group.rank)
        context = connection.worker.context
        for root in (0, 1):
            await group.all_reduce(np.zeros(100_000), "sum")
            await group.reduce(np.zeros(100_000), "sum", root=root)
        assert not context._memories

    await run_ranks(tmp_path, 2, body)


async def test_a_worker_without_remote_memory(tmp_path: Path) -> None:
    from trio_ucx import ucp

    async def run(rank: int) -> None:
        meeting = f"file://{tmp_path}/meeting"
        async with ucp.open_worker(features=ucp.Feature.TAG) as worker:
            async with mesh.join(rank=rank, size=2, meeting=meeting, worker=worker) as group:
                assert (await group.all_reduce(np.ones(10), "sum"))[0] == 2
                with pytest.raises(RuntimeError, match="Feature"):
                    await group.all_reduce(np.ones(100_000), "sum")

    with trio.fail_after(20):
        async with trio.open_nursery() as nursery:
            nursery.start_soon(run, 0)
            nursery.start_soon(run, 1)
