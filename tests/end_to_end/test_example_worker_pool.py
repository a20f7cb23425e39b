"""examples/worker_pool.py."""

from __future__ import annotations

import hashlib
import itertools
import os
import signal
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import ExitStack, aclosing, asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
import trio
from helpers import assert_transports, nothing_happens, pattern, until

import trio_ucx

from .programs import DEADLINE, EXAMPLES, Program, load, program, run_here

pytest.importorskip("rich")

WORKER_POOL = EXAMPLES / "worker_pool.py"
worker_pool: Any = load(WORKER_POOL)
Task = worker_pool.Task

#: A program of a user's, whose functions leave traces in the directory that their payload names.
WORKER = """
import os, pathlib, signal, sys, time
import trio
sys.path.insert(0, sys.argv[2])
import worker_pool

def echo(payload):
    return payload

def pid(payload):
    time.sleep(float(payload))
    return b"%d" % os.getpid()

def wait(payload):
    directory = pathlib.Path(os.fsdecode(payload))
    (directory / f"started {os.getpid()}").touch()
    try:
        while not (directory / "go").exists():
            trio.from_thread.check_cancelled()
            time.sleep(0.005)
    except trio.Cancelled:
        (directory / f"cancelled {os.getpid()}").touch()
        raise
    return b"%d" % os.getpid()

def stubborn(payload):
    directory = pathlib.Path(os.fsdecode(payload))
    (directory / f"started {os.getpid()}").touch()
    while not (directory / "go").exists():
        time.sleep(0.005)
    return b"done"

def die(payload):
    directory = pathlib.Path(os.fsdecode(payload))
    (directory / f"died {os.getpid()}").touch()
    if len(list(directory.glob("died *"))) <= int((directory / "deaths").read_text()):
        os.kill(os.getpid(), signal.SIGKILL)
    return b"survived"

def fail(payload):
    raise ZeroDivisionError(payload.decode())

def text(payload):
    return "not bytes"

functions = [echo, pid, wait, stubborn, die, fail, text]
address = worker_pool.parse_address(sys.argv[1])
trio.run(worker_pool.run, lambda: worker_pool.work(address, {f.__name__: f for f in functions}))
"""


@pytest.fixture(params=["tcp"])
def transports(request: pytest.FixtureRequest) -> str:
    """One kind will do: the transports have tests of their own, and processes take their time to start."""
    value: str = request.param
    return value


@pytest.fixture
def hire(tmp_path: Path) -> Iterator[Callable[[Any, int], list[Program]]]:
    """Starts workers; ends those that are left by force."""
    script = tmp_path / "worker.py"
    script.write_text(WORKER)
    with ExitStack() as stack:

        def hire(pool: Any, count: int = 1) -> list[Program]:
            address = "{}:{}".format(*pool.address)
            return [stack.enter_context(program(script, address, EXAMPLES)) for _ in range(count)]

        yield hire


@asynccontextmanager
async def open_pool(**options: Any) -> AsyncIterator[Any]:
    """Whatever is done with it is bounded."""
    with trio.fail_after(DEADLINE):
        async with worker_pool.open_pool(**options) as pool:
            yield pool


def traces(directory: Path, what: str) -> list[int]:
    """The processes that left this trace."""
    return [int(path.name.split()[1]) for path in directory.glob(f"{what} *")]


async def expect(ended: list[object], task: Any, pool: Any) -> None:
    ended.append(await pool.run(task))


async def wait_ended(workers: list[Program]) -> None:
    """Until they have gone home."""
    for worker in workers:
        assert await worker.end() == (0, "")


# ---- results ----


async def test_pool_runs_a_task(over: str, hire: Any) -> None:
    async with open_pool() as pool:
        workers = hire(pool)
        for size in [0, 1, 65_535, 65_536, 16_000_001]:
            payload = pattern(size)
            assert await pool.run(Task("echo", payload)) == payload
            assert await pool.run(Task("echo", memoryview(payload))) == payload
        [post] = pool._posts
        assert_transports(post.connection, over)
        assert (pool.workers, pool.lost, pool.repeated) == (1, 0, 0)
    await wait_ended(workers)


@pytest.mark.full
async def test_pool_maps_in_order(over: str, hire: Any, tmp_path: Path) -> None:
    async with open_pool() as pool:
        workers = hire(pool, 3)
        await until(lambda: pool.workers == 3)
        payloads = [pattern((number * 7919) % 200_000, seed=number) for number in range(200)]
        assert [result async for result in pool.map(Task("echo", payload) for payload in payloads)] == payloads
        pids: list[bytes] = []

        async def collect() -> None:
            async for result in pool.map([Task("wait", os.fsencode(tmp_path))] * 6):
                pids.append(result)

        async with trio.open_nursery() as nursery:
            nursery.start_soon(collect)
            await until(lambda: len(traces(tmp_path, "started")) == 3)  # each does one at the same time
            (tmp_path / "go").touch()
        assert len(pids) == 6 and {int(pid) for pid in pids} == {worker.process.pid for worker in workers}
        assert [result async for result in pool.map([])] == []
    await wait_ended(workers)


@pytest.mark.full
async def test_pool_results_that_come_out_of_order(over: str, hire: Any, tmp_path: Path) -> None:
    async with open_pool() as pool:
        hire(pool, 2)
        results: list[bytes] = []

        async def collect() -> None:
            tasks = [Task("wait", os.fsencode(tmp_path)), *(Task("echo", b"%d" % number) for number in range(20))]
            async for result in pool.map(tasks):
                results.append(result)

        async with trio.open_nursery() as nursery:
            nursery.start_soon(collect)
            await until(lambda: traces(tmp_path, "started"))
            for _ in range(20):
                await pool.run(Task("echo", b""))  # the echoes before it are done
            assert results == []
            (tmp_path / "go").touch()
        assert results[1:] == [b"%d" % number for number in range(20)]
        assert int(results[0]) in traces(tmp_path, "started")


@pytest.mark.full
async def test_pool_map_drops_what_is_not_taken(over: str, hire: Any, tmp_path: Path) -> None:
    async with open_pool() as pool:
        hire(pool)
        tasks = [Task("echo", b"first"), *[Task("wait", os.fsencode(tmp_path))] * 10]
        async with aclosing(pool.map(tasks)) as results:
            assert await anext(results) == b"first"
            await until(lambda: traces(tmp_path, "started"))
        assert await pool.run(Task("echo", b"next")) == b"next"
        assert len(traces(tmp_path, "cancelled")) == 1


@pytest.mark.full
async def test_pool_maps_no_further_than_needed(hire: Any) -> None:
    numbers = itertools.count()
    async with open_pool() as pool:
        hire(pool)
        async with aclosing(pool.map(Task("echo", b"%d" % number) for number in numbers)) as results:
            assert [await anext(results) for _ in range(10)] == [b"%d" % number for number in range(10)]
        assert next(numbers) <= 10 + worker_pool.AHEAD
        assert await pool.run(Task("echo", b"next")) == b"next"


@pytest.mark.full
async def test_pool_tells_what_a_task_raised(hire: Any) -> None:
    async with open_pool() as pool:
        workers = hire(pool)
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
            assert int(await pool.run(Task("pid", b"0"))) == workers[0].process.pid
            assert (pool.lost, pool.repeated) == (0, 0)
    await wait_ended(workers)


def test_pool_task_without_a_function() -> None:
    with pytest.raises(ValueError):
        Task("", b"payload")


@pytest.mark.full
async def test_pool_refuses_what_cannot_be_sent(hire: Any) -> None:
    def tasks(payload: Any) -> Iterator[Any]:
        yield Task("echo", b"first")
        yield Task("echo", payload)

    bad: list[Any] = ["text", None, memoryview(b"strided")[::2]]
    async with open_pool() as pool:
        for payload in bad:
            with pytest.raises((TypeError, ValueError)):
                await pool.run(Task("echo", payload))
            with pytest.raises((TypeError, ValueError)):
                assert [result async for result in pool.map(tasks(payload))]
            assert all(job.ended.is_set() for job in pool._queue)
        hire(pool)
        assert await pool.run(Task("echo", b"next")) == b"next"


# ---- workers that come and go ----


@pytest.mark.full
async def test_pool_survives_a_killed_worker(over: str, hire: Any, tmp_path: Path) -> None:
    ended: list[object] = []
    async with open_pool() as pool:
        workers = hire(pool, 3)
        await until(lambda: pool.workers == 3)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(expect, ended, Task("wait", os.fsencode(tmp_path)), pool)
            await until(lambda: traces(tmp_path, "started"))
            [victim] = traces(tmp_path, "started")
            os.kill(victim, signal.SIGKILL)
            await until(lambda: len(traces(tmp_path, "started")) == 2)
            assert (pool.workers, pool.lost, pool.repeated) == (2, 1, 1)
            (tmp_path / "go").touch()
        assert [int(str(result, "ascii")) for result in ended] == [
            pid for pid in traces(tmp_path, "started") if pid != victim
        ]
        results = [result async for result in pool.map(Task("echo", b"%d" % number) for number in range(50))]
        assert results == [b"%d" % number for number in range(50)]
    await wait_ended([worker for worker in workers if worker.process.pid != victim])


@pytest.mark.full
async def test_pool_survives_many_killed_workers(hire: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """At any time, while payloads are on their way, too. (UCX's shared memory does not survive that.)"""
    monkeypatch.setenv("UCX_TLS", "tcp")
    async with open_pool() as pool:
        payloads = [pattern((number * 79_190) % 2_000_000, seed=number) for number in range(300)]
        workers = hire(pool, 6)
        await until(lambda: pool.workers == 6)
        results: list[bytes] = []
        async for result in pool.map(Task("echo", payload) for payload in payloads):
            results.append(result)
            if len(results) % 50 == 0:
                workers.pop(0).process.kill()
                if len(results) == 100:
                    workers += hire(pool)
        assert results == payloads
        await until(lambda: pool.lost == 6 and pool.workers == len(workers) == 1)


@pytest.mark.full
async def test_pool_notices_that_an_idle_worker_died(over: str, hire: Any) -> None:
    async with open_pool() as pool:
        workers = hire(pool, 2)
        await until(lambda: pool.workers == 2)
        workers[0].process.kill()
        await until(lambda: pool.workers == 1)
        assert (pool.lost, pool.repeated) == (1, 0)
        assert int(await pool.run(Task("pid", b"0"))) == workers[1].process.pid


@pytest.mark.full
async def test_pool_waits_for_workers(over: str, hire: Any, tmp_path: Path) -> None:
    """Also after all have died."""
    ended: list[object] = []
    async with open_pool() as pool, trio.open_nursery() as nursery:
        nursery.start_soon(expect, ended, Task("wait", os.fsencode(tmp_path)), pool)
        workers = hire(pool, 2)
        await until(lambda: pool.workers == 2 and traces(tmp_path, "started"))
        for worker in workers:
            worker.process.kill()
        await until(lambda: pool.workers == 0)
        assert ended == []
        [late] = hire(pool)
        await until(lambda: late.process.pid in traces(tmp_path, "started"))
        (tmp_path / "go").touch()
        await until(lambda: ended)
    assert ended == [b"%d" % late.process.pid]


@pytest.mark.full
async def test_pool_loses_its_patience(over: str) -> None:
    """Only while there is nobody. The worker is in this process, and so there at once."""
    with pytest.raises(ExceptionGroup) as caught:
        async with open_pool(patience=1) as pool, trio.open_nursery() as nursery:
            connection = await trio_ucx.open_ucx_stream(*pool.address)
            await until(lambda: pool.workers == 1)
            await trio.sleep(1.5)
            ended: list[object] = []
            nursery.start_soon(expect, ended, Task("echo", b"there"), pool)
            assert [await connection.receive() for _ in range(2)] == [b"echo", b"there"]
            for part in (b"", b"there"):
                await connection.send(part)
            await until(lambda: ended == [b"there"])
            died = trio.current_time()
            connection.abort()
            await pool.run(Task("echo", b"nobody there"))
    assert 1 <= trio.current_time() - died < DEADLINE
    assert worker_pool.explain(caught.value) == "there has been no worker for 1 seconds"


async def test_pool_without_any_worker_loses_its_patience() -> None:
    with pytest.raises(ExceptionGroup) as caught:
        async with open_pool(patience=0.1):
            await trio.sleep_forever()
    assert worker_pool.explain(caught.value) == "there has been no worker for 0.1 seconds"


@pytest.mark.full
async def test_pool_takes_late_workers(over: str, hire: Any, tmp_path: Path) -> None:
    ended: list[object] = []
    async with open_pool() as pool, trio.open_nursery() as nursery:
        hire(pool)
        nursery.start_soon(expect, ended, Task("wait", os.fsencode(tmp_path)), pool)
        await until(lambda: traces(tmp_path, "started"))
        nursery.start_soon(expect, ended, Task("pid", b"0"), pool)
        await nothing_happens(0.1)
        assert ended == []
        [late] = hire(pool)
        await until(lambda: ended == [b"%d" % late.process.pid])
        (tmp_path / "go").touch()


@pytest.mark.full
@pytest.mark.parametrize("deaths", [worker_pool.MAX_DEATHS - 1, worker_pool.MAX_DEATHS, 100])
async def test_pool_poison(over: str, hire: Any, tmp_path: Path, deaths: int) -> None:
    (tmp_path / "deaths").write_text(str(deaths))
    async with open_pool() as pool:
        workers = hire(pool, worker_pool.MAX_DEATHS + 1)
        await until(lambda: pool.workers == len(workers))
        if deaths < worker_pool.MAX_DEATHS:
            assert await pool.run(Task("die", os.fsencode(tmp_path))) == b"survived"
            assert pool.lost == deaths
        else:
            with pytest.raises(worker_pool.PoisonError, match="3 workers died of a task, 'die'"):
                await pool.run(Task("die", os.fsencode(tmp_path)))
            assert len(traces(tmp_path, "died")) == pool.lost == worker_pool.MAX_DEATHS
        assert await pool.run(Task("echo", b"next")) == b"next"


@pytest.mark.full
async def test_pool_workers_that_leave_are_not_held_against_a_task(over: str, hire: Any, tmp_path: Path) -> None:
    ended: list[object] = []
    async with open_pool() as pool, trio.open_nursery() as nursery:
        nursery.start_soon(expect, ended, Task("wait", os.fsencode(tmp_path)), pool)
        for number in range(worker_pool.MAX_DEATHS + 1):
            [worker] = hire(pool)
            await until(lambda: len(traces(tmp_path, "started")) == number + 1)  # noqa: B023
            worker.process.terminate()
            status, errors = await worker.end()
            assert status != -signal.SIGTERM and "KeyboardInterrupt" in errors
            await until(lambda: pool.workers == 0)
        assert (pool.lost, pool.repeated) == (0, worker_pool.MAX_DEATHS + 1)
        hire(pool)
        (tmp_path / "go").touch()
        await until(lambda: ended)


# ---- cancellation ----


@pytest.mark.full
async def test_pool_cancelled_task_is_dropped(over: str, hire: Any, tmp_path: Path) -> None:
    async with open_pool() as pool:
        [worker] = hire(pool)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(pool.run, Task("wait", os.fsencode(tmp_path)))
            await until(lambda: traces(tmp_path, "started"))
            nursery.cancel_scope.cancel()
        await until(lambda: traces(tmp_path, "cancelled"))
        assert int(await pool.run(Task("pid", b"0"))) == worker.process.pid
        assert (pool.lost, pool.repeated) == (0, 0)
    await wait_ended([worker])


@pytest.mark.full
async def test_pool_cancelled_task_is_never_begun(hire: Any, tmp_path: Path) -> None:
    async with open_pool() as pool:
        with trio.move_on_after(0.05):
            await pool.run(Task("wait", os.fsencode(tmp_path)))
        hire(pool)
        assert await pool.run(Task("echo", b"next")) == b"next"
        assert traces(tmp_path, "started") == []


@pytest.mark.full
async def test_pool_cancelled_task_that_does_not_look(over: str, hire: Any, tmp_path: Path) -> None:
    """Its worker is busy until it is done; nobody gets its result."""
    ended: list[object] = []
    async with open_pool() as pool:
        workers = hire(pool)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(pool.run, Task("stubborn", os.fsencode(tmp_path)))
            await until(lambda: traces(tmp_path, "started"))
            nursery.cancel_scope.cancel()
        async with trio.open_nursery() as nursery:
            nursery.start_soon(expect, ended, Task("echo", b"next"), pool)
            await nothing_happens(0.1)
            assert ended == []
            (tmp_path / "go").touch()
        assert ended == [b"next"]
    await wait_ended(workers)


@pytest.mark.full
async def test_pool_cancellations_at_any_time(over: str, hire: Any) -> None:
    """What is not cancelled has the right result."""
    finished = cancelled = 0

    async def work(pool: Any, seed: int) -> None:
        nonlocal finished, cancelled
        for number in range(20):
            payload = pattern((seed * 7919 + number * 79_190) % 500_000, seed=seed * 100 + number)
            with trio.move_on_after(DEADLINE if number % 3 == 0 else 0.003 * (seed % 7)) as scope:
                assert await pool.run(Task("echo", payload)) == payload
                finished += 1
            cancelled += scope.cancelled_caught

    async with open_pool() as pool:
        workers = hire(pool, 2)
        await until(lambda: pool.workers == 2)
        async with trio.open_nursery() as nursery:
            for seed in range(10):
                nursery.start_soon(work, pool, seed)
        assert finished >= 70 and cancelled >= 20
        assert (pool.workers, pool.lost, pool.repeated) == (2, 0, 0)
    await wait_ended(workers)


# ---- the end ----


@pytest.mark.full
@pytest.mark.parametrize("function", ["wait", None])
async def test_pool_sends_its_workers_home(over: str, hire: Any, tmp_path: Path, function: str | None) -> None:
    async with open_pool() as pool:
        workers = hire(pool, 2)
        await until(lambda: pool.workers == 2)
        if function is not None:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(expect, [], Task(function, os.fsencode(tmp_path)), pool)
                await until(lambda: traces(tmp_path, "started"))
                nursery.cancel_scope.cancel()
    await wait_ended(workers)


@pytest.mark.full
async def test_pool_sends_its_workers_home_after_an_error(over: str, hire: Any, tmp_path: Path) -> None:
    with pytest.raises(ExceptionGroup) as caught:
        async with open_pool() as pool, trio.open_nursery() as nursery:
            workers = hire(pool)
            nursery.start_soon(pool.run, Task("wait", os.fsencode(tmp_path)))
            await until(lambda: traces(tmp_path, "started"))
            raise ZeroDivisionError
    assert caught.group_contains(ZeroDivisionError)
    await wait_ended(workers)


@pytest.mark.full
async def test_pool_closed(hire: Any, tmp_path: Path) -> None:
    ended: list[str] = []

    async def run(pool: Any, function: str) -> None:
        with pytest.raises(trio.ClosedResourceError, match="this pool was closed"):
            await pool.run(Task(function, os.fsencode(tmp_path)))
        ended.append(function)

    with trio.fail_after(DEADLINE):
        async with trio.open_nursery() as nursery:
            async with open_pool() as pool:
                hire(pool)
                nursery.start_soon(run, pool, "wait")
                await until(lambda: traces(tmp_path, "started"))
                nursery.start_soon(run, pool, "queued")
            await run(pool, "late")
    assert sorted(ended) == ["late", "queued", "wait"]


# ---- workers that are not ours ----


@pytest.mark.full
async def test_pool_does_not_trust_its_workers(over: str, hire: Any) -> None:
    async def ask(*answers: bytes) -> None:
        async with trio_ucx.connect(pool.address) as connection:
            for answer in answers:
                await connection.send(answer)
            with pytest.raises((trio.EndOfChannel, trio.BrokenResourceError)):
                await connection.receive()

    async with open_pool() as pool:
        await ask(b"", b"an answer to nothing")
        await ask(b"\xff", b"\xff")
        await until(lambda: pool.workers == 0)
        assert (pool.lost, pool.repeated) == (2, 0)
        hire(pool)
        assert await pool.run(Task("echo", b"next")) == b"next"


@pytest.mark.full
@pytest.mark.parametrize("how", ["aborts", "answers by half", "reads by half"])
async def test_pool_worker_that_takes_a_task_and_leaves(over: str, hire: Any, how: str) -> None:
    ended: list[object] = []
    payload = pattern(10**6)
    async with open_pool() as pool, trio.open_nursery() as nursery:
        nursery.start_soon(expect, ended, Task("echo", payload), pool)
        async with trio_ucx.connect(pool.address) as connection:
            assert await connection.receive() == b"echo"
            if how == "aborts":
                connection.abort()
            elif how == "answers by half":
                assert await connection.receive() == payload
                await connection.send(b"")
        await until(lambda: pool.workers == 0)
        assert (pool.lost, pool.repeated) == (int(how == "aborts"), 1)
        assert ended == []
        hire(pool)
        await until(lambda: ended)
    assert ended == [payload]


# ---- the demonstration ----


async def mandelbrot() -> str:
    whole = worker_pool.ROWS.pack(0, worker_pool.HEIGHT)
    picture = await trio.to_thread.run_sync(worker_pool.mandelbrot, whole)
    assert len(picture) == worker_pool.WIDTH * worker_pool.HEIGHT
    assert picture[0] == 1 and max(picture) == worker_pool.STEPS
    return hashlib.sha256(picture).hexdigest()


@pytest.mark.full
@pytest.mark.sample(1)
@pytest.mark.parametrize("options", [["--workers", 1, "--tasks", 7], ["--workers", 3, "--kill-one"]])
async def test_demo(over: str, options: list[object]) -> None:
    with program(WORKER_POOL, "demo", *options, transports=over) as running:
        await running.wait_address()
        assert await running.end() == (0, "")
    *picture, summary, digest = running.output.splitlines()
    assert 20 < len(picture) < 40 and {len(line) for line in picture} == {75}
    died = int("--kill-one" in options)
    assert f" {died} of the workers died" in summary
    assert digest == f"the picture's SHA-256 is {await mandelbrot()}"


@pytest.mark.full
async def test_demo_takes_late_workers(over: str) -> None:
    with program(WORKER_POOL, "demo", "--workers", 1, transports=over) as running:
        await running.wait_address()
        with program(WORKER_POOL, "work", running.address, transports=over) as late:
            assert await running.end() == (0, "")
            assert await late.end() == (0, "")


@pytest.mark.full
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
async def test_demo_interrupted(over: str, number: signal.Signals) -> None:
    with program(WORKER_POOL, "demo", "--workers", 2, "--tasks", 3, transports=over) as running:
        await running.wait_address()
        with program(WORKER_POOL, "work", running.address, transports=over) as worker:
            await until(lambda: len(children(running.process.pid)) == 2)
            workers = children(running.process.pid)
            await trio.sleep(0.5)
            running.process.send_signal(number)
            assert await running.end() == (130, "")
            assert not any(Path(f"/proc/{pid}").exists() for pid in workers)
            await worker.end()


def children(pid: int) -> list[int]:
    return [int(child) for path in Path(f"/proc/{pid}/task").glob("*/children") for child in path.read_text().split()]


@pytest.mark.full
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
async def test_worker_interrupted(over: str, number: signal.Signals) -> None:
    async with open_pool() as pool:
        with program(WORKER_POOL, "work", "{}:{}".format(*pool.address), transports=over) as worker:
            await until(lambda: pool.workers == 1)
            async with trio.open_nursery() as nursery:
                nursery.start_soon(pool.run, Task("mandelbrot", worker_pool.ROWS.pack(100, 100_000)))
                await until(lambda: all(post.job for post in pool._posts))
                worker.process.send_signal(number)
                assert await worker.end() == (130, "")
                await until(lambda: pool.workers == 0)
                nursery.cancel_scope.cancel()
        assert (pool.lost, pool.repeated) == (0, 1)


@pytest.mark.full
async def test_worker_whose_pool_dies(over: str) -> None:
    with program(WORKER_POOL, "demo", "--workers", 1, "--tasks", 2, transports=over) as running:
        await running.wait_address()
        with program(WORKER_POOL, "work", running.address, transports=over) as worker:
            await until(lambda: children(running.process.pid))
            await trio.sleep(1)
            running.process.kill()
            status, errors = await worker.end()
            assert status == 1
            assert errors.startswith("worker_pool: ") and errors.count("\n") == 1
        await running.end()  # its own worker has noticed, too


# ---- the command line ----


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (["work", "127.0.0.1:9"], "127.0.0.1:9"),
        (["work", "no.such.host.invalid:9"], "[Errno "),
        (["demo", "--listen", "192.0.2.1:0"], "192.0.2.1"),
    ],
)
def test_worker_pool_complains_in_one_line(
    arguments: list[str], complaint: str, capfd: pytest.CaptureFixture[str]
) -> None:
    assert run_here(worker_pool, *arguments) == 1
    errors = capfd.readouterr().err
    assert errors.startswith("worker_pool: ") and errors.count("\n") == 1
    assert complaint in errors


@pytest.mark.parametrize(
    "arguments",
    [["work", "nonsense"], ["demo", "--workers", "0"], ["demo", "--tasks", "x"], ["demo", "--listen", "host:-1"], []],
)
def test_worker_pool_refuses_bad_arguments(arguments: list[str], capfd: pytest.CaptureFixture[str]) -> None:
    assert run_here(worker_pool, *arguments) == 2
    assert capfd.readouterr().err.startswith("usage: ")
