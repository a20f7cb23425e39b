"""examples/worker_pool.py. Most workers are tasks of the test's process, as processes take their time to start."""

from __future__ import annotations

import hashlib
import itertools
import signal
import threading
from collections.abc import AsyncIterator
from contextlib import ExitStack, aclosing, asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
import trio
from helpers import children_of, nothing_happens, open_listener, pattern, until

import trio_ucx

from .programs import DEADLINE, EXAMPLES, assert_complaint, load, program

pytest.importorskip("rich")

WORKER_POOL = EXAMPLES / "worker_pool.py"
worker_pool: Any = load(WORKER_POOL)
Task = worker_pool.Task
MAX_DEATHS = worker_pool.MAX_DEATHS


class Gate:
    """A function that waits until it may go on, or is cancelled."""

    def __init__(self) -> None:
        self.started = 0
        self.cancelled = 0
        self.go = threading.Event()

    def __call__(self, payload: bytes) -> bytes:
        self.started += 1
        try:
            while not self.go.wait(0.005):
                trio.from_thread.check_cancelled()
        except trio.Cancelled:
            self.cancelled += 1
            raise
        return payload

    def stubborn(self, payload: bytes) -> bytes:
        """Does not look whether it is cancelled."""
        self.started += 1
        self.go.wait()
        return payload


def fail(payload: bytes) -> bytes:
    raise ZeroDivisionError(payload.decode())


@pytest.fixture
def gate() -> Gate:
    return Gate()


async def work(pool: Any, gate: Gate | None = None) -> None:
    functions: dict[str, Any] = {"echo": bytes, "fail": fail, "text": str}
    if gate is not None:
        functions |= {"wait": gate, "stubborn": gate.stubborn}
    await worker_pool.work(pool.address, functions)


@asynccontextmanager
async def open_pool(gate: Gate | None = None, *, workers: int = 0, **options: Any) -> AsyncIterator[Any]:
    """A pool with workers, all of which must go home when it is closed. Whatever is done with it is bounded."""
    with trio.fail_after(DEADLINE):
        async with trio.open_nursery() as nursery, worker_pool.open_pool(**options) as pool:
            for _ in range(workers):
                nursery.start_soon(work, pool, gate)
            await until(lambda: pool.workers == workers)
            yield pool


async def expect(ended: list[object], pool: Any, function: str, payload: bytes = b"") -> None:
    ended.append(await pool.run(Task(function, payload)))


# ---- results ----


async def test_results() -> None:
    payloads = [pattern((number * 7919) % 200_000, seed=number) for number in range(100)]
    async with open_pool(workers=3) as pool:
        for payload in b"", b"x", memoryview(pattern(5_000_001)):
            assert await pool.run(Task("echo", payload)) == payload
        assert [result async for result in pool.map(Task("echo", payload) for payload in payloads)] == payloads
        assert [result async for result in pool.map([])] == []
        assert (pool.workers, pool.lost, pool.repeated) == (3, 0, 0)


async def test_results_that_come_out_of_order(gate: Gate) -> None:
    """Each of two workers has one task at a time."""
    results: list[bytes] = []

    async def collect(pool: Any) -> None:
        tasks = [Task("wait", b"first"), *(Task("echo", b"%d" % number) for number in range(20))]
        async for result in pool.map(tasks):
            results.append(result)

    async with open_pool(gate, workers=2) as pool:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(collect, pool)
            await until(lambda: gate.started)
            await pool.run(Task("echo", b""))  # the echoes before it are done
            assert results == []
            gate.go.set()
    assert results == [b"first", *(b"%d" % number for number in range(20))]


async def test_map_gives_out_no_more_than_needed(gate: Gate) -> None:
    numbers = itertools.count()
    async with open_pool(gate, workers=1) as pool:
        tasks = (Task("wait" if number else "echo", b"first") for number in numbers)
        async with aclosing(pool.map(tasks)) as results:
            assert await anext(results) == b"first"
            await until(lambda: gate.started)
        assert next(numbers) <= 2 + worker_pool.AHEAD
        assert await pool.run(Task("echo", b"next")) == b"next"
        assert (gate.started, gate.cancelled) == (1, 1)


async def test_errors_of_tasks() -> None:
    async with open_pool(workers=1) as pool:
        for task, kind, text in [
            (Task("fail", "sö\nwhat".encode()), "ZeroDivisionError", "sö\nwhat"),
            (Task("fail", b"\xff"), "UnicodeDecodeError", "0xff"),
            (Task("nothing", b""), "LookupError", "there is no function 'nothing'"),
            (Task("text", b""), "TypeError", "bytes-like"),
        ]:
            with pytest.raises(worker_pool.TaskError) as caught:
                await pool.run(task)
            assert caught.value.args[0] == kind and text in caught.value.args[1]
            assert str(caught.value) == f"{kind}: {caught.value.args[1]}"
            with pytest.raises(worker_pool.TaskError):
                assert [result async for result in pool.map([Task("echo", b""), task, Task("echo", b"")])]
            assert await pool.run(Task("echo", b"next")) == b"next"
        assert (pool.workers, pool.lost, pool.repeated) == (1, 0, 0)


async def test_refuses_what_cannot_be_sent() -> None:
    with pytest.raises(ValueError):
        Task("", b"payload")
    bad: list[Any] = ["text", None, memoryview(b"strided")[::2]]
    async with trio.open_nursery() as nursery, open_pool() as pool:  # whose workers end after it
        for payload in bad:
            with pytest.raises((TypeError, ValueError)):
                await pool.run(Task("echo", payload))
            with pytest.raises((TypeError, ValueError)):
                assert [result async for result in pool.map([Task("echo", b"first"), Task("echo", payload)])]
        nursery.start_soon(work, pool)
        assert await pool.run(Task("echo", b"next")) == b"next"


# ---- workers that come and go ----


#: One that can be killed.
WORKER = """
import sys, trio, trio_ucx
sys.path.insert(0, sys.argv[2])
import worker_pool
trio.run(worker_pool.work, trio_ucx.parse_address(sys.argv[1]), {"echo": bytes})
"""


@pytest.mark.full
async def test_survives_killed_workers(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """At any time, while payloads are on their way, too. (UCX's shared memory does not survive that.)"""
    monkeypatch.setenv("UCX_TLS", "tcp")
    (script := tmp_path / "worker.py").write_text(WORKER)
    payloads = [pattern((number * 79_190) % 2_000_000, seed=number) for number in range(200)]
    results: list[bytes] = []
    async with open_pool() as pool:
        with ExitStack() as stack:
            address = "{}:{}".format(*pool.address)
            workers = [stack.enter_context(program(script, address, EXAMPLES)) for _ in range(4)]
            await until(lambda: pool.workers == 4)
            async for result in pool.map(Task("echo", payload) for payload in payloads):
                results.append(result)
                if len(results) % 50 == 25 and len(workers) > 1:
                    workers.pop().process.kill()
            await until(lambda: (pool.lost, pool.workers) == (3, 1))
    assert results == payloads


@pytest.mark.parametrize(
    ("how", "times"),
    [
        ("dies", MAX_DEATHS - 1),
        ("dies", MAX_DEATHS),
        ("leaves", MAX_DEATHS + 1),
        ("answers by half", 1),
        ("does not read the payload", 1),
    ],
)
async def test_workers_that_go_with_a_task(how: str, times: int) -> None:
    """Another one gets it; also if that comes later. Only so many may die of it."""
    ended: list[object] = []
    payload = pattern(10**6)
    async with trio.open_nursery() as nursery, open_pool() as pool:  # whose workers end after it
        if (how, times) == ("dies", MAX_DEATHS):

            async def run() -> None:
                with pytest.raises(worker_pool.PoisonError, match="3 workers died of a task, 'echo'"):
                    await pool.run(Task("echo", payload))
                ended.append(payload)

            nursery.start_soon(run)
        else:
            nursery.start_soon(expect, ended, pool, "echo", payload)
        for number in range(times):
            assert ended == []
            async with trio_ucx.connect(pool.address) as connection:
                assert await connection.receive() == b"echo"
                if how != "does not read the payload":
                    assert await connection.receive() == payload
                if how == "dies":
                    connection.abort()
                elif how == "answers by half":
                    await connection.send(b"")
            await until(lambda: pool.workers == 0)
            assert pool.lost == (number + 1) * (how == "dies")
        assert pool.repeated == min(times, MAX_DEATHS - 1) if how == "dies" else times
        nursery.start_soon(work, pool)
        await until(lambda: ended == [payload])
        assert await pool.run(Task("echo", b"next")) == b"next"


async def test_workers_that_cannot_be_trusted() -> None:
    """Nor does an idle one's death go unnoticed."""
    async with open_pool() as pool:
        for answers in (b"", b"an answer to nothing"), (b"\xff", b"\xff"):
            async with trio_ucx.connect(pool.address) as connection:
                for answer in answers:
                    await connection.send(answer)
                with pytest.raises((trio.EndOfChannel, trio.BrokenResourceError)):
                    await connection.receive()
        await until(lambda: (pool.workers, pool.lost) == (0, 2))
        async with trio_ucx.connect(pool.address) as connection:
            await until(lambda: pool.workers == 1)
            connection.abort()
            await until(lambda: (pool.workers, pool.lost) == (0, 3))
        assert pool.repeated == 0


async def test_loses_its_patience_without_any_worker() -> None:
    with pytest.raises(ExceptionGroup) as caught:
        async with open_pool(patience=0.1):
            await trio.sleep_forever()
    assert worker_pool.explain(caught.value) == "there has been no worker for 0.1 seconds"


async def test_loses_its_patience_after_the_last_worker() -> None:
    with pytest.raises(ExceptionGroup) as caught:
        async with open_pool(patience=DEADLINE) as pool:
            async with trio_ucx.connect(pool.address) as connection:
                await until(lambda: pool.workers == 1)
                assert pool._alone.deadline == float("inf")
                pool._patience = 0.1
                connection.abort()
            await pool.run(Task("echo", b"nobody there"))
    assert worker_pool.explain(caught.value) == "there has been no worker for 0.1 seconds"


# ---- cancellation, and the end ----


async def test_cancelled_task_is_dropped(gate: Gate) -> None:
    async with trio.open_nursery() as nursery, open_pool(gate) as pool:  # whose workers end after it
        with trio.move_on_after(0.05):
            await pool.run(Task("wait", b"never begun"))
        nursery.start_soon(work, pool, gate)
        assert await pool.run(Task("echo", b"next")) == b"next"
        assert gate.started == 0
        async with trio.open_nursery() as inner:
            inner.start_soon(pool.run, Task("wait", b""))
            await until(lambda: gate.started)
            inner.cancel_scope.cancel()
        await until(lambda: gate.cancelled)
        assert await pool.run(Task("echo", b"next")) == b"next"
        assert (pool.workers, pool.lost, pool.repeated) == (1, 0, 0)


async def test_cancelled_task_that_does_not_look(gate: Gate) -> None:
    """Its worker is busy until it is done; nobody gets its result."""
    ended: list[object] = []
    async with open_pool(gate, workers=1) as pool:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(pool.run, Task("stubborn", b""))
            await until(lambda: gate.started)
            nursery.cancel_scope.cancel()
        async with trio.open_nursery() as nursery:
            nursery.start_soon(expect, ended, pool, "echo", b"next")
            await nothing_happens(0.1)
            assert ended == []
            gate.go.set()
        assert ended == [b"next"]


@pytest.mark.full
async def test_cancellations_at_any_time() -> None:
    """What is not cancelled has the right result."""
    finished = cancelled = 0

    async def ask(pool: Any, seed: int) -> None:
        nonlocal finished, cancelled
        for number in range(20):
            payload = pattern((seed * 7919 + number * 79_190) % 500_000, seed=seed * 100 + number)
            with trio.move_on_after(DEADLINE if number % 3 == 0 else 0.003 * (seed % 7)) as scope:
                assert await pool.run(Task("echo", payload)) == payload
                finished += 1
            cancelled += scope.cancelled_caught

    async with open_pool(workers=2) as pool:
        async with trio.open_nursery() as nursery:
            for seed in range(10):
                nursery.start_soon(ask, pool, seed)
        assert finished >= 70 and cancelled >= 20
        assert (pool.workers, pool.lost, pool.repeated) == (2, 0, 0)


async def test_sends_its_workers_home_after_an_error(gate: Gate) -> None:
    async with trio.open_nursery() as outer:
        with pytest.raises(ExceptionGroup) as caught:
            async with open_pool(gate) as pool, trio.open_nursery() as nursery:
                outer.start_soon(work, pool, gate)  # which raises nothing
                nursery.start_soon(pool.run, Task("wait", b""))
                await until(lambda: gate.started)
                raise ZeroDivisionError
        assert caught.group_contains(ZeroDivisionError)


async def test_closed(gate: Gate) -> None:
    ended: list[str] = []

    async def run(pool: Any, function: str) -> None:
        with pytest.raises(trio.ClosedResourceError, match="this pool was closed"):
            await pool.run(Task(function, b""))
        ended.append(function)

    async with trio.open_nursery() as nursery:
        async with open_pool(gate, workers=1) as pool:
            nursery.start_soon(run, pool, "wait")
            await until(lambda: gate.started)
            nursery.start_soon(run, pool, "queued")
        await run(pool, "late")
    assert sorted(ended) == ["late", "queued", "wait"]


# ---- the programs ----


@pytest.mark.full
@pytest.mark.parametrize(
    ("transports", "options"),
    [("tcp", ["--workers", 3, "--kill-one"]), ("tcp,sm,self", ["--workers", 1, "--tasks", 7])],
)
async def test_demo(over: str, options: list[object]) -> None:
    """Without a worker that dies, there is one that joins late."""
    kills_one = "--kill-one" in options
    with program(WORKER_POOL, "demo", *options) as running, ExitStack() as stack:
        await running.wait_address()
        late = [] if kills_one else [stack.enter_context(program(WORKER_POOL, "work", running.address))]
        for process in running, *late:
            assert await process.end() == (0, "")
    *picture, summary, digest = running.output.splitlines()
    assert 20 < len(picture) < 40 and {len(line) for line in picture} == {75}
    assert f" {int(kills_one)} of the workers died" in summary
    whole = await trio.to_thread.run_sync(worker_pool.mandelbrot, worker_pool.ROWS.pack(0, worker_pool.HEIGHT))
    assert len(whole) == worker_pool.WIDTH * worker_pool.HEIGHT
    assert whole[0] == 1 and max(whole) == worker_pool.STEPS
    assert digest == f"the picture's SHA-256 is {hashlib.sha256(whole).hexdigest()}"


@pytest.mark.full
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
async def test_demo_is_interrupted(number: signal.Signals) -> None:
    """While its workers start, or, as one of them is the test, while there is work for them."""
    with trio.fail_after(DEADLINE), program(WORKER_POOL, "demo", "--workers", 2, "--tasks", 3) as running:
        await running.wait_address()
        await until(lambda: len(children_of(running.process.pid)) == 2)
        workers = children_of(running.process.pid)
        async with trio_ucx.connect(running.address) as connection:
            if number == signal.SIGTERM:
                assert await connection.receive() == b"mandelbrot"
            running.process.send_signal(number)
            assert await running.end() == (130, "")
        assert not any(Path(f"/proc/{pid}").exists() for pid in workers)


@pytest.mark.full
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
async def test_worker_is_interrupted(number: signal.Signals) -> None:
    async with open_pool() as pool:
        with program(WORKER_POOL, "work", "{}:{}".format(*pool.address)) as worker:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(pool.run, Task("mandelbrot", worker_pool.ROWS.pack(100, 100_000)))
                await until(lambda: any(post.job for post in pool._posts))
                worker.process.send_signal(number)
                assert await worker.end() == (130, "")
                await until(lambda: pool.workers == 0)
                nursery.cancel_scope.cancel()
        assert (pool.lost, pool.repeated) == (0, 1)


@pytest.mark.full
async def test_worker_whose_pool_dies() -> None:
    async with open_listener() as listener:
        with program(WORKER_POOL, "work", "{}:{}".format(*listener.address)) as worker:
            (await listener.accept()).abort()
            status, errors = await worker.end()
            assert status == 1
            assert_complaint(errors, WORKER_POOL)
