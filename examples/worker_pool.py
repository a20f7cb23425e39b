"""A pool of worker processes, on this or other machines, that fans tasks out and survives the loss of workers.

    pip install '.[examples]'
    python examples/worker_pool.py demo [--workers N] [--tasks M] [--kill-one]    computes a picture in N processes
    python examples/worker_pool.py work HOST:PORT                                 joins a pool, at any time

In programs of your own, whose workers run `await work(address, {"shout": bytes.upper})`:

    async with open_pool(("10.0.0.5", 13337)) as pool:
        assert await pool.run(Task("shout", b"hello")) == b"HELLO"
        async for result in pool.map(Task("shout", line) for line in file): ...

The pool listens. It gives each worker one task at a time, and both use a single tag:

    to the worker   a function's name, then the payload; b"" when the task was dropped
    to the pool     for each task: b"" and the result, or the type and the text of an exception

A worker that leaves gives its task back. If a worker dies, its task goes to another one, until MAX_DEATHS have died.

When a process is killed in the middle of a message over shared memory, connections of other local processes can break.
With UCX_TLS=tcp that does not happen.
"""

from __future__ import annotations

import argparse
import hashlib
import itertools
import math
import signal
import struct
import sys
from collections import deque
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Iterable, Mapping
from contextlib import aclosing, asynccontextmanager, suppress
from functools import partial
from typing import Any

import attrs
import trio
from outcome import Error, Outcome, Value
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TimeElapsedColumn

import trio_ucx

MAX_DEATHS = 3
AHEAD = 64  # tasks that `map` queues ahead
#: Both sides need the same one, of 16 bytes or more. Without it a server lets in only clients of its own user.
AUTHKEY = trio_ucx.authkey()

Function = Callable[[bytes], bytes]


class PoolError(Exception):
    """Something is wrong with a task, a worker, or the pool."""


class TaskError(PoolError):
    """A task raised an exception. The arguments are that exception's type and text, both strings."""

    def __str__(self) -> str:
        return ": ".join(self.args)


class PoisonError(PoolError):
    """Too many workers died of a task."""


@attrs.frozen
class Task:
    """The name of a function that the workers know, and what to call it with: bytes, or another buffer."""

    function: str = attrs.field(validator=attrs.validators.min_len(1))
    payload: Any


# ---- the pool ----


@attrs.define(eq=False)
class Job:
    """A task that was given to the pool. It has ended when it has an outcome, or was dropped."""

    task: Task
    deaths: int = 0
    ended: trio.Event = attrs.field(factory=trio.Event)
    outcome: Outcome[bytes] | None = None

    def end(self, outcome: Outcome[bytes] | None = None) -> None:
        if not self.ended.is_set():
            self.outcome = outcome
            self.ended.set()

    async def wait(self) -> bytes:
        await self.ended.wait()
        assert self.outcome is not None
        return self.outcome.unwrap()


@attrs.define(eq=False)
class Post:
    """A worker, as the pool sees it."""

    connection: trio_ucx.Connection
    job: Job | None = None
    answered: trio.Event = attrs.field(factory=trio.Event)


@attrs.define(eq=False)
class Pool:
    """Open it with :func:`open_pool`.

    Attributes:
        address: where workers join.
        lost: how many have died.
        repeated: how many tasks were given out once more.
    """

    address: tuple[str, int]
    lost: int = 0
    repeated: int = 0
    _patience: float = math.inf
    _alone: trio.CancelScope = attrs.field(factory=trio.CancelScope)
    _posts: set[Post] = attrs.field(factory=set)
    _queue: deque[Job] = attrs.field(factory=deque)
    _queued: trio.Semaphore = attrs.field(factory=lambda: trio.Semaphore(0))
    _closed: bool = False

    @property
    def workers(self) -> int:
        """How many are there now."""
        return len(self._posts)

    async def run(self, task: Task) -> bytes:
        """Gives a task to a worker and returns its result.

        Cancellation: the task is dropped. A function that is running should check for that now and then, with
        ``trio.from_thread.check_cancelled()``.

        Raises:
            TaskError: the function raised, or there is none of this name.
            PoisonError: MAX_DEATHS workers died of it.
            trio.ClosedResourceError: the pool was closed.
            TypeError, ValueError: the payload cannot be sent.
        """
        job = self._submit(task)
        try:
            return await job.wait()
        finally:
            job.end()

    async def map(self, tasks: Iterable[Task]) -> AsyncGenerator[bytes, None]:
        """Gives tasks to workers and yields their results in order; raises what :meth:`run` would.

        If you may not take all results, use it in ``contextlib.aclosing``, which drops the other tasks.
        """
        remaining = iter(tasks)
        jobs = deque[Job]()
        try:
            jobs.extend(map(self._submit, itertools.islice(remaining, AHEAD)))
            while jobs:
                result = await jobs[0].wait()
                jobs.popleft()
                jobs.extend(map(self._submit, itertools.islice(remaining, 1)))
                yield result
        finally:
            for job in jobs:
                job.end()

    def _submit(self, task: Task) -> Job:
        if self._closed:
            raise trio.ClosedResourceError("this pool was closed")
        if not memoryview(task.payload).c_contiguous:
            raise ValueError("a payload that is not contiguous cannot be sent")
        job = Job(task)
        self._queue.append(job)
        self._queued.release()
        return job

    async def _employ(self, connection: trio_ucx.Connection) -> None:
        """Serves one worker, from its connection to its end."""
        post = Post(connection)
        self._posts.add(post)
        self._alone.deadline = math.inf
        died = False
        try:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(self._take_answers, post)
                await self._give_tasks(post)
        except* trio_ucx.PeerClosed:
            pass  # it closes gracefully: a send may learn that before the receive does
        except* (trio.BrokenResourceError, trio_ucx.UCXError, PoolError):
            died = True
        except* trio.EndOfChannel:
            died = False  # it closed gracefully; for that reason sends failed
        finally:
            self.lost += died
            self._posts.remove(post)
            if not self._posts:
                self._alone.deadline = trio.current_time() + self._patience
            if post.job is not None and not post.job.ended.is_set():
                self._give_back(post.job, died)

    async def _give_tasks(self, post: Post) -> None:
        while True:
            await self._queued.acquire()
            job = self._queue.popleft()
            if job.ended.is_set():
                continue  # it was dropped
            post.job, post.answered = job, trio.Event()
            await post.connection.send(job.task.function.encode())
            await post.connection.send(job.task.payload)
            await job.ended.wait()
            if not post.answered.is_set():
                await post.connection.send(b"")
                await post.answered.wait()
            post.job = None

    async def _take_answers(self, post: Post) -> None:
        while True:  # also while it has no task, so that its end is noticed at once
            kind = (await post.connection.receive()).decode(errors="replace")
            result = await post.connection.receive()
            if post.job is None:
                raise PoolError("a worker answers without being asked")
            failure = TaskError(kind, result.decode(errors="replace")) if kind else None
            post.job.end(Error(failure) if failure else Value(result))
            post.answered.set()

    def _give_back(self, job: Job, died: bool) -> None:
        job.deaths += died
        if job.deaths == MAX_DEATHS:
            job.end(Error(PoisonError(f"{MAX_DEATHS} workers died of a task, {job.task.function!r}")))
        else:
            self.repeated += 1
            self._queue.appendleft(job)
            self._queued.release()

    async def _despair(self) -> None:
        with self._alone:
            await trio.sleep_forever()
        raise PoolError(f"there has been no worker for {self._patience:g} seconds")

    def _close(self) -> None:
        self._closed = True
        for job in [*self._queue, *(post.job for post in self._posts if post.job)]:
            job.end(Error(trio.ClosedResourceError("this pool was closed")))


@asynccontextmanager
async def open_pool(address: tuple[str, int] = ("127.0.0.1", 0), patience: float = math.inf) -> AsyncIterator[Pool]:
    """Listens for workers. Leaving the block drops unfinished tasks and dismisses the workers.

    Raises:
        PoolError: there has been no worker for ``patience`` seconds.
    """
    listener, *others = await trio_ucx.open_ucx_listeners(address, authkey=AUTHKEY)
    for other in others:  # a host name may have several addresses
        await other.aclose()
    pool = Pool(listener.address, patience=patience)
    pool._alone.deadline = trio.current_time() + patience
    async with listener, trio.open_nursery() as nursery:
        # Always closes gracefully; serve_ucx aborts after an error, which workers could not tell from our death.
        nursery.start_soon(trio.serve_listeners, pool._employ, [listener])
        nursery.start_soon(pool._despair)
        try:
            yield pool
        finally:
            pool._close()
        nursery.cancel_scope.cancel()


# ---- the worker ----


async def work(address: tuple[str, int], functions: Mapping[str, Function]) -> None:
    """Works for a pool until that closes. Tasks run in a thread: meanwhile the pool can close, or drop the task."""

    async def compute(name: str, payload: bytes, scope: trio.CancelScope) -> None:
        kind, result = "Cancelled", memoryview(b"")
        try:
            with scope:
                if name not in functions:
                    raise LookupError(f"there is no function {name!r}")
                kind, result = "", memoryview(await trio.to_thread.run_sync(functions[name], payload))
        except Exception as error:
            kind, result = type(error).__name__, memoryview(str(error).encode(errors="replace"))
        with suppress(trio.BrokenResourceError):  # the loop below tells whether the pool has closed or died
            await connection.send(kind.encode())
            await connection.send(result)

    connection = await trio_ucx.open_ucx_stream(*address, authkey=AUTHKEY)
    async with aclosing(connection), trio.open_nursery() as nursery:  # closes gracefully even when cancelled
        scope = trio.CancelScope()
        async for name in connection.messages():
            if name:
                scope = trio.CancelScope()
                nursery.start_soon(compute, name.decode(), await connection.receive(), scope)
            else:
                scope.cancel()
        nursery.cancel_scope.cancel()


# ---- the demonstration ----

WIDTH, HEIGHT, STEPS = 600, 400, 255
ROWS = struct.Struct("<II")  # from, to


def mandelbrot(payload: bytes) -> bytes:
    """Some rows of the Mandelbrot set: for each point, after how many steps it is known not to belong to it."""
    first, last = ROWS.unpack(payload)
    rows = bytearray()
    for y in range(first, last):
        trio.from_thread.check_cancelled()
        for x in range(WIDTH):
            point, value, step = complex(3 * x / WIDTH - 2.2, 2 * y / HEIGHT - 1), 0j, 0
            while step < STEPS and abs(value) <= 2:
                value, step = value * value + point, step + 1
            rows.append(step)
    return bytes(rows)


async def demo(address: tuple[str, int], workers: int, tasks: int, kill_one: bool) -> None:
    strips = [ROWS.pack(HEIGHT * n // tasks, HEIGHT * (n + 1) // tasks) for n in range(tasks)]
    picture = bytearray()
    started = trio.current_time()
    columns = "{task.fields[workers]} workers", BarColumn(), MofNCompleteColumn(), TimeElapsedColumn()
    console = Console(stderr=True)
    async with trio.open_nursery() as nursery, open_pool(address, patience=10) as pool:
        joined = trio_ucx.format_address(pool.address)
        print(f"listening at {joined}", flush=True)
        start = partial(trio.run_process, [sys.executable, __file__, "work", joined], check=False)
        processes: list[trio.Process] = [await nursery.start(start) for _ in range(workers)]
        try:
            with Progress(*columns, console=console, disable=not console.is_terminal) as progress:
                bar = progress.add_task("", total=tasks, workers=0)
                async with aclosing(pool.map(Task("mandelbrot", strip) for strip in strips)) as results:
                    async for rows in results:
                        picture += rows
                        progress.update(bar, advance=1, workers=pool.workers)
                        if kill_one and len(picture) >= WIDTH * HEIGHT // 3 and pool.workers == workers:
                            processes[0].kill()
                            kill_one = False
        except trio.Cancelled:
            for process in processes:
                process.terminate()  # now: they would complain about a pool that goes away
            raise
    for y in range(0, HEIGHT, HEIGHT // 25):
        print("".join(" .:-=+*#@"[picture[y * WIDTH + x].bit_length()] for x in range(0, WIDTH, WIDTH // 75)))
    print(f"{tasks} tasks took {trio.current_time() - started:.1f} s;", end=" ")
    print(f"{pool.lost} of the workers died, {pool.repeated} of the tasks had to be done again")
    print(f"the picture's SHA-256 is {hashlib.sha256(picture).hexdigest()}")


async def run(work: Callable[[], Awaitable[None]]) -> None:
    """Makes Ctrl-C a cancellation, which tasks see only where they wait."""

    async def heed_signals(task_status: trio.TaskStatus[None]) -> None:
        with trio.open_signal_receiver(signal.SIGINT, signal.SIGTERM) as signals:
            task_status.started()
            async for _ in signals:
                raise KeyboardInterrupt

    async with trio.open_nursery() as nursery:
        await nursery.start(heed_signals)
        await work()
        nursery.cancel_scope.cancel()


def explain(error: BaseException) -> str:
    """The one line that matters of an exception, or of a group of them."""
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    text = str(error) or type(error).__name__
    return "".join(character if character.isprintable() else "?" for character in text)


def parse_count(text: str) -> int:
    if not 1 <= int(text) <= 1000:
        raise ValueError
    return int(text)


def main() -> int:
    parser = argparse.ArgumentParser(description="Fans tasks out to worker processes.")
    commands = parser.add_subparsers(required=True, dest="command")
    show = commands.add_parser("demo", help="compute a picture")
    show.add_argument("--workers", type=parse_count, default=4, metavar="N", help="processes to start")
    show.add_argument("--tasks", type=parse_count, default=100, metavar="M", help="strips to divide the picture into")
    show.add_argument("--kill-one", action="store_true", help="kill a worker in the middle")
    show.add_argument("--listen", type=trio_ucx.parse_address, default=("127.0.0.1", 0), metavar="HOST:PORT")
    worker = commands.add_parser("work", help="join a pool")
    worker.add_argument("address", type=trio_ucx.parse_address, metavar="HOST:PORT")
    options = parser.parse_args()
    if options.command == "demo":
        job = partial(demo, options.listen, options.workers, options.tasks, options.kill_one)
    else:
        job = partial(work, options.address, {"mandelbrot": mandelbrot})
    status = 0
    try:
        trio.run(run, job)
    except* KeyboardInterrupt:
        status = 130
    except* (PoolError, OSError, trio.BrokenResourceError, trio.EndOfChannel, trio_ucx.UCXError) as group:
        if status == 0:  # else it was interrupted, and that its connections broke needs no words
            print(f"worker_pool: {explain(group)}", file=sys.stderr)
            status = 1
    return status


if __name__ == "__main__":
    sys.exit(main())
