"""Does things while a resource is missing, each in a process of its own: run by ``test_resources.py``.

Each attempt does one thing twice over: once while the resource is missing, and once when it is there again. The second
time it must succeed, with the same objects unless they are broken.
"""

from __future__ import annotations

import contextlib
import errno
import faulthandler
import gc
import json
import os
import re
import resource
import select
import signal
import sys
import time
import traceback
import warnings
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import attrs
import trio

sys.path.append(str(Path(__file__).parent.parent))

from refused_memory import few_allocations

import trio_ucx
from trio_ucx import ucp
from trio_ucx.testing import assert_no_live_handles

#: Seconds that one thing may take while a resource is missing; the longest of trio_ucx's timeouts here is 5.
BOUND = 8
#: Seconds for an attempt.
LIMIT = int(os.environ.get("STARVED_LIMIT", "75"))
#: Raw listeners and their clients are on this machine.
HERE = ["127.0.0.1"]
FEATURES = ucp.DEFAULT_FEATURES | ucp.Feature.RMA | ucp.Feature.AMO64 | ucp.Feature.STREAM
SMALL, LARGE = 100, 1_000_000

_, HARD = resource.getrlimit(resource.RLIMIT_NOFILE)
SOFT = min(HARD, 4096)
NO_LIMIT = (resource.RLIM_INFINITY, resource.RLIM_INFINITY)

#: What the library may raise for a missing resource; everything else is a fault.
EXPECTED = (OSError, trio_ucx.UCXError, MemoryError, trio.BrokenResourceError, trio.EndOfChannel)
#: After these, what was used is broken, and the thing is done again with new objects of the same worker.
BREAKS = (trio.BrokenResourceError, trio.EndOfChannel, trio.ClosedResourceError, trio.TooSlowError)


# ---- what is missing ----


@contextmanager
def few_descriptors(count: int) -> Iterator[None]:
    fillers = [os.open("/dev/null", os.O_RDONLY) for _ in range(50)]
    for filler in fillers[:count]:
        os.close(filler)
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (fillers[-1] + 1, HARD))
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (SOFT, HARD))
        for filler in fillers[count:]:
            os.close(filler)


@contextmanager
def little_memory(kilobytes: int) -> Iterator[None]:
    """No more address space than so much."""
    gc.collect()
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    limit = pages * os.sysconf("SC_PAGESIZE") + kilobytes * 1024
    resource.setrlimit(resource.RLIMIT_AS, (limit, resource.RLIM_INFINITY))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, NO_LIMIT)


@contextmanager
def kernel_limit(name: str, value: str) -> Iterator[None]:
    """In an IPC namespace of its own."""
    path = Path("/proc/sys/kernel", name)
    before = path.read_text()
    path.write_text(value)
    try:
        yield
    finally:
        path.write_text(before)


def segments_in_use() -> int:
    return len(Path("/proc/sysvipc/shm").read_text().splitlines()) - 1


def little_sysv(name: str) -> contextlib.AbstractContextManager[None]:
    value = {"shmmax": "4096", "shmall": "16", "shmmni": str(segments_in_use())}[name]
    return kernel_limit(name, value)


@contextmanager
def full_dev_shm(kilobytes: int) -> Iterator[None]:
    """So much is left. In a mount namespace of its own, where /dev/shm is small."""
    state = os.statvfs("/dev/shm")
    path = Path("/dev/shm/filler")
    size = state.f_bavail * state.f_bsize - kilobytes * 1024
    with path.open("wb") as file:
        os.posix_fallocate(file.fileno(), 0, max(1, size))
    try:
        yield
    finally:
        path.unlink()


@contextmanager
def read_only_dev_shm(_: object) -> Iterator[None]:
    """In a mount namespace of its own. What is open there for writing keeps the kernel from it."""
    os.chmod("/dev/shm", 0o555)
    if os.system("mount -o remount,ro /dev/shm 2>/dev/null") != 0:
        os.chmod("/dev/shm", 0o777)
        raise Inapplicable
    try:
        yield
    finally:
        assert os.system("mount -o remount,rw /dev/shm") == 0
        os.chmod("/dev/shm", 0o777)


@contextmanager
def no_locked_memory(_: object) -> Iterator[None]:
    before = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    resource.setrlimit(resource.RLIMIT_MEMLOCK, (0, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_MEMLOCK, before)


@contextmanager
def no_fault(_: object) -> Iterator[None]:
    yield


FAULTS: dict[str, Callable[[Any], contextlib.AbstractContextManager[None]]] = {
    "descriptors": few_descriptors,
    "memory": little_memory,
    "allocations": few_allocations,
    "sysv": little_sysv,
    "dev_shm": full_dev_shm,
    "read_only_dev_shm": read_only_dev_shm,
    "memlock": no_locked_memory,
    "none": no_fault,
}


class Inapplicable(Exception):
    """The fault cannot be made here."""


# ---- what is done ----

Act = Callable[[], Awaitable[object]]
#: Prepares a thing with every resource at hand; what it returns does the thing, perhaps without.
Prepare = Callable[[AsyncExitStack, "Common"], Awaitable[Act]]
THINGS: dict[str, Prepare] = {}


def thing(function: Prepare) -> Prepare:
    THINGS[function.__name__] = function
    return function


class Common:
    """What all the attempts of a thing use: two workers, and a listener; and another process, on demand."""

    def __init__(self, transports: str, other: Other | None) -> None:
        self.transports = transports
        self.config: dict[str, str | int | bool] = {"TLS": transports}
        self._other = other
        self.one: ucp.Worker
        self.two: ucp.Worker
        self.listener: trio_ucx.Listener

    @property
    def other(self) -> Other:
        assert self._other is not None
        return self._other

    @asynccontextmanager
    async def opened(self) -> AsyncIterator[None]:
        async with ucp.open_worker(config=self.config, features=FEATURES, admit=HERE) as self.one:
            async with ucp.open_worker(config=self.config, features=FEATURES, admit=HERE) as self.two:
                [self.listener] = await trio_ucx.open_ucx_listeners(0, host="127.0.0.1", worker=self.two)
                async with self.listener:
                    yield


class Other:
    """A process that lacks nothing. It was forked before this one has opened anything."""

    def __init__(self, transports: str) -> None:
        ours, self._lines = os.pipe()
        self._read, theirs = os.pipe()
        self._buffer = b""
        self.pid = os.fork()
        if not self.pid:
            os.close(self._lines)
            os.close(self._read)
            try:
                faulthandler.dump_traceback_later(LIMIT - 2, exit=True)
                os.environ["UCX_TLS"] = transports
                trio.run(other_process, ours, theirs)
            except BaseException:
                traceback.print_exc()
                sys.stderr.flush()
            finally:
                os._exit(0)
        os.close(ours)
        os.close(theirs)

    def tell(self, *what: Any) -> None:
        os.write(self._lines, json.dumps(what).encode() + b"\n")

    async def hear(self) -> Any:
        while b"\n" not in self._buffer:
            while not select.select([self._read], [], [], 0)[0]:
                await trio.sleep(0.001)
            data = os.read(self._read, 4096)
            assert data, "the other process has ended"
            self._buffer += data
        line, self._buffer = self._buffer.split(b"\n", 1)
        return json.loads(line)

    def close(self) -> None:
        os.close(self._lines)
        os.waitpid(self.pid, 0)
        os.close(self._read)


async def other_process(commands: int, answers: int) -> None:
    """Connects to an address when it is told, or is a server."""

    def say(what: Any) -> None:
        os.write(answers, json.dumps(what).encode() + b"\n")

    async def echo(connection: trio_ucx.Connection) -> None:
        async for message in connection.messages():
            await connection.send(message)

    async def connect(host: str, port: int) -> None:
        async with trio_ucx.connect((host, port), connect_timeout=5) as connection:
            await connection.send(b"hello")
            assert await connection.receive() == b"hello"

    async def send_to(address: str) -> None:
        async with ucp.open_worker() as worker:
            async with await worker.open_endpoint(ucp.WorkerAddress(bytes.fromhex(address))) as endpoint:
                await endpoint.tag_send(bytes(SMALL), 3)

    async def do(function: Callable[..., Awaitable[None]], *arguments: Any) -> None:
        try:
            with trio.fail_after(BOUND):
                await function(*arguments)
            say(None)
        except (OSError, trio_ucx.UCXError, trio.BrokenResourceError, trio.EndOfChannel, trio.TooSlowError) as error:
            say(repr(error))

    buffer = b""
    async with trio.open_nursery() as nursery:
        while True:
            await trio.lowlevel.wait_readable(commands)
            data = os.read(commands, 4096)
            if not data:
                break
            buffer += data
            while b"\n" in buffer:
                line, buffer = buffer.split(b"\n", 1)
                command, *arguments = json.loads(line)
                if command == "serve":
                    [listener] = await nursery.start(partial(trio_ucx.serve_ucx, echo, 0, host="127.0.0.1"))
                    say(listener.address)
                else:
                    await do({"connect": connect, "send_to": send_to}[command], *arguments)
        nursery.cancel_scope.cancel()


@thing
async def context(stack: AsyncExitStack, common: Common) -> Act:
    async def act() -> None:
        with ucp.open_context(common.config):
            pass

    return act


@thing
async def worker(stack: AsyncExitStack, common: Common) -> Act:
    context = stack.enter_context(ucp.open_context(common.config))

    async def act() -> None:
        async with ucp.open_worker(context=context):
            pass

    return act


@thing
async def shared_worker(stack: AsyncExitStack, common: Common) -> Act:
    async def act() -> None:
        [listener] = await trio_ucx.open_ucx_listeners(0, host="127.0.0.1")
        await listener.aclose()

    return act


@thing
async def raw_listener(stack: AsyncExitStack, common: Common) -> Act:
    async def act() -> None:
        async with await common.one.open_listener("127.0.0.1", 0):
            pass

    return act


@thing
async def listener(stack: AsyncExitStack, common: Common) -> Act:
    async def act() -> None:
        [listener] = await trio_ucx.open_ucx_listeners(0, host="127.0.0.1", worker=common.one)
        await listener.aclose()

    return act


async def connected(stack: AsyncExitStack, common: Common) -> tuple[trio_ucx.Connection, trio_ucx.Connection]:
    client = await trio_ucx.connect(common.listener.address, worker=common.one).__aenter__()
    stack.callback(client.abort)
    server = await common.listener.accept()
    stack.callback(server.abort)
    return client, server


async def exchange(client: trio_ucx.Connection, server: trio_ucx.Connection, size: int) -> None:
    data = os.urandom(size)
    for one, other in ((client, server), (server, client)):
        async with trio.open_nursery() as nursery:
            nursery.start_soon(one.send, data)
            assert await other.receive() == data, "corrupted"


@thing
async def connection(stack: AsyncExitStack, common: Common) -> Act:
    """Both sides are here."""

    async def act() -> None:
        async with trio_ucx.connect(common.listener.address, worker=common.one, connect_timeout=5) as client:
            server = await common.listener.accept()
            try:
                await exchange(client, server, SMALL)
            finally:
                server.abort()
                client.abort()

    return act


@thing
async def client(stack: AsyncExitStack, common: Common) -> Act:
    common.other.tell("serve")
    address = tuple(await common.other.hear())

    async def act() -> None:
        async with trio_ucx.connect(address, worker=common.one, connect_timeout=5) as connection:
            await connection.send(b"hello")
            assert await connection.receive() == b"hello", "corrupted"

    return act


@thing
async def server(stack: AsyncExitStack, common: Common) -> Act:
    """Accepts a client of another process."""

    async def act() -> None:
        common.other.tell("connect", *common.listener.address)
        answer = failure = None
        async with trio.open_nursery() as nursery:

            async def serve() -> None:
                nonlocal failure
                server = await common.listener.accept()
                try:
                    async with server:
                        await server.send(await server.receive())
                        await server.wait_closed()
                except trio.BrokenResourceError:
                    pass  # the client says how it was for it
                except MemoryError as error:
                    failure = error  # the client's answer is to be heard first

            async def hear() -> None:
                nonlocal answer
                answer = await common.other.hear()
                if answer is not None:
                    nursery.cancel_scope.cancel()

            nursery.start_soon(serve)
            nursery.start_soon(hear)
        if failure is not None:
            raise failure
        if answer is not None:
            raise OSError(errno.EMFILE, f"the client was told: {answer}")

    return act


@thing
async def reached_by_address(stack: AsyncExitStack, common: Common) -> Act:
    """Another process opens an endpoint by worker address: UCX's own sockets."""
    address = bytes(common.two.address).hex()

    async def act() -> None:
        common.other.tell("send_to", address)
        answer = None
        async with trio.open_nursery() as nursery:

            async def hear() -> None:
                nonlocal answer
                answer = await common.other.hear()
                if answer is not None:
                    nursery.cancel_scope.cancel()

            nursery.start_soon(hear)
            assert await common.two.tag_receive(bytearray(SMALL), 3) == (SMALL, 3)
        if answer is not None:
            raise OSError(errno.EMFILE, f"the client was told: {answer}")

    return act


async def send_raw(endpoint: ucp.Endpoint, receiver: ucp.Worker, size: int) -> None:
    data, buffer = os.urandom(size), bytearray(size)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(endpoint.tag_send, data, 1)
        await receiver.tag_receive(buffer, 1)
    assert buffer == data, "corrupted"


@thing
async def endpoint(stack: AsyncExitStack, common: Common) -> Act:
    """By worker address."""

    async def act() -> None:
        endpoint = await common.one.open_endpoint(common.two.address)
        try:
            await send_raw(endpoint, common.two, SMALL)
        finally:
            endpoint.abort()

    return act


@thing
async def raw_connection(stack: AsyncExitStack, common: Common) -> Act:
    """By socket address."""
    raw = await stack.enter_async_context(await common.two.open_listener("127.0.0.1", 0))

    async def act() -> None:
        endpoint = await common.one.open_endpoint(raw.address)
        accepted: list[ucp.Endpoint] = []
        try:
            async with trio.open_nursery() as nursery:

                async def accept() -> None:
                    async for request in raw:  # perhaps also that of an attempt before, whose client has gone
                        try:
                            accepted.append(await request.accept())
                        except OSError as error:
                            with contextlib.suppress(trio.ClosedResourceError):  # UCX has answered it
                                request.reject()
                            if error.errno in (errno.ENOMEM, errno.EMFILE):
                                raise

                nursery.start_soon(accept)
                await send_raw(endpoint, common.two, SMALL)
                nursery.cancel_scope.cancel()
        finally:
            endpoint.abort()
            for each in accepted:
                each.abort()

    return act


@thing
async def first_message(stack: AsyncExitStack, common: Common) -> Act:
    client, server = await connected(stack, common)
    return lambda: exchange(client, server, SMALL)


@thing
async def large_message(stack: AsyncExitStack, common: Common) -> Act:
    client, server = await connected(stack, common)
    return lambda: exchange(client, server, LARGE)


@thing
async def first_raw_message(stack: AsyncExitStack, common: Common) -> Act:
    endpoint = await common.one.open_endpoint(common.two.address)
    stack.callback(endpoint.abort)
    return lambda: send_raw(endpoint, common.two, LARGE)


@thing
async def active_message(stack: AsyncExitStack, common: Common) -> Act:
    endpoint = await common.one.open_endpoint(common.two.address)
    stack.callback(endpoint.abort)
    queue = stack.enter_context(common.two.open_active_messages(5))

    async def act() -> None:
        for size in (SMALL, LARGE):
            data = os.urandom(size)
            async with trio.open_nursery() as nursery:
                nursery.start_soon(endpoint.am_send, 5, data)
                with await queue.receive() as message:
                    assert await message.receive() == data, "corrupted"

    return act


@thing
async def waiting(stack: AsyncExitStack, common: Common) -> Act:
    """A parked worker is woken."""
    client, server = await connected(stack, common)
    await exchange(client, server, SMALL)

    async def act() -> None:
        async def send_later() -> None:
            await trio.sleep(0.05)
            await client.send(b"now")

        async with trio.open_nursery() as nursery:
            nursery.start_soon(send_later)
            assert await server.receive() == b"now"

    return act


@thing
async def memory(stack: AsyncExitStack, common: Common) -> Act:
    """It is allocated, registered, exported, attached and used."""
    endpoint = await common.one.open_endpoint(common.two.address)
    stack.callback(endpoint.abort)
    await endpoint.flush()
    under_way = False

    async def act() -> None:
        nonlocal under_way
        for get in (common.two.context.allocate, lambda size: common.two.context.register(bytearray(size))):
            with get(LARGE) as memory, endpoint.attach(memory.descriptor) as remote:
                if under_way:  # its memory was closed when an attempt failed: the owner may refuse it, as flush says
                    under_way = False
                    try:
                        await remote.flush()
                    except trio_ucx.UCXError as error:
                        if error.status is not ucp.Status.NO_ELEM:
                            raise
                data = os.urandom(LARGE)
                under_way = True
                await remote.put(data)
                await remote.flush()
                under_way = False
                assert await remote.get() == data, "corrupted"

    return act


@thing
async def atomic(stack: AsyncExitStack, common: Common) -> Act:
    endpoint = await common.one.open_endpoint(common.two.address)
    stack.callback(endpoint.abort)
    memory = stack.enter_context(common.two.context.allocate(64))
    remote = stack.enter_context(endpoint.attach(memory.descriptor))

    async def act() -> None:
        before = await remote.fetch_add(1)
        assert await remote.fetch_add(1) == before + 1, "corrupted"

    return act


@thing
async def chain(stack: AsyncExitStack, common: Common) -> Act:
    endpoint = await common.one.open_endpoint(common.two.address)
    stack.callback(endpoint.abort)
    memory = stack.enter_context(common.two.context.allocate(4096))
    remote = stack.enter_context(endpoint.attach(memory.descriptor))

    async def act() -> None:
        with common.one.new_chain(capacity=8) as chain:
            head = chain.get(remote, 0, 64)
            chain.put(remote, b"data", offset=64, when=head.u32(0) == 0)
            chain.fetch_add(remote, 1, 2048)
            outcomes = await chain.run()
            outcomes.values()  # raises the error of a request
            assert bytes(memory.memoryview[64:68]) == b"data", "corrupted"

    return act


NEEDS_OTHER = {"client", "server", "reached_by_address"}
NEEDS_NOTHING = {"context", "worker", "shared_worker"}


# ---- one attempt ----


def first_of(error: BaseException) -> BaseException:
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error


async def descriptors_at_rest() -> int:
    """How many are open, once what was closed has gone."""
    last, since = 0, trio.current_time()
    while trio.current_time() < since + 0.05:
        count = len(os.listdir("/proc/self/fd"))
        if count != last:
            last, since = count, trio.current_time()
        await trio.sleep(0.01)
    return last


@attrs.define
class Round:
    """What happened while the resource was missing, and after that.

    Attributes:
        error: what the library raised; None: it works without the resource. "hung": neither.
        seconds: how long it took.
        goes_on_with: what was needed when the resource was there again: "same", "new objects" (of the same workers), or
            "new workers".
    """

    error: str | None
    seconds: float
    goes_on_with: str = "same"


async def attempt(name: str, transports: str, fault: str, amount: Any, other: Other | None) -> list[Round]:
    """Makes two rounds; in the second one nothing is done for the first time."""
    rounds: list[Round] = []
    common = Common(transports, other)
    async with AsyncExitStack() as outer:
        if name not in NEEDS_NOTHING:
            await outer.enter_async_context(common.opened())
        for _ in range(2):
            async with AsyncExitStack() as stack:
                act = await THINGS[name](stack, common)
                error, seconds = await starved(act, fault, amount)
                rounds.append(Round(error and describe(error), seconds))
                if error is not None and not isinstance(error, (*EXPECTED, trio.TooSlowError)):
                    raise error
                del error
                gc.collect()
                rounds[-1].goes_on_with = await go_on(act, name, common, stack)
                if rounds[-1].goes_on_with == "new workers":
                    break
    return rounds


async def starved(act: Act, fault: str, amount: Any) -> tuple[BaseException | None, float]:
    error = None
    began = time.monotonic()
    with FAULTS[fault](amount):
        try:
            with trio.fail_after(BOUND):
                await act()
        except BaseException as found:
            error = first_of(found)
        seconds = time.monotonic() - began
    return error, round(seconds, 3)


async def go_on(act: Act, name: str, common: Common, stack: AsyncExitStack) -> str:
    """Does the thing when nothing is missing; tells what was needed for that."""
    try:
        with trio.fail_after(BOUND):
            await act()
        return "same"
    except BaseException as found:
        error = first_of(found)
        if not isinstance(error, BREAKS):
            raise
    try:
        await stack.aclose()
        act = await THINGS[name](stack, common)
        with trio.fail_after(BOUND):
            await act()
        return "new objects"
    except BaseException as found:
        error = first_of(found)
        if not isinstance(error, BREAKS):
            raise
    await stack.aclose()
    fresh = Common(common.transports, common._other)
    async with fresh.opened(), AsyncExitStack() as last:
        act = await THINGS[name](last, fresh)
        with trio.fail_after(BOUND):
            await act()
    return "new workers"


def describe(error: BaseException) -> str:
    return "hung" if isinstance(error, trio.TooSlowError) else f"{type(error).__name__}: {error}"


#: What UCX's thread for events has open. When an accept() fails for want of descriptors, UCX's TCP transport closes the
#: socket that listens, and later does not find the handler to remove ("failed to remove handler for server socket
#: fd=-1"): the thread then stays to the end of the process.
UCX_THREAD = Counter({"pipe:": 2, "anon_inode:[eventpoll]": 1})
#: Seconds in which that thread ends otherwise.
SETTLING = 2


def thread_names() -> set[str]:
    found = set()
    for path in Path("/proc/self/task").iterdir():
        with contextlib.suppress(OSError):  # it has ended
            found.add((path / "comm").read_text().strip())
    return found


def open_descriptors() -> Counter[str]:
    """What the descriptors of this process lead to, and how many to each."""
    found: Counter[str] = Counter()
    for number in os.listdir("/proc/self/fd"):
        with contextlib.suppress(FileNotFoundError):  # that of the listing
            found[re.sub(r"\[\d+\]|/proc/\d+/", "", os.readlink(f"/proc/self/fd/{number}"))] += 1
    return found


def run(case: list[Any]) -> list[Round]:
    name, transports, fault, amount = case
    resource.setrlimit(resource.RLIMIT_NOFILE, (SOFT, HARD))
    other = Other(transports) if name in NEEDS_OTHER else None
    faulthandler.dump_traceback_later(LIMIT, exit=True)
    before = open_descriptors()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        report = trio.run(attempt, name, transports, fault, amount, other)
    assert_no_live_handles()
    ended = time.monotonic()
    while (left := open_descriptors() - before) and time.monotonic() < ended + SETTLING:
        time.sleep(0.01)
    if fault == "descriptors" and "async" in thread_names():
        left -= UCX_THREAD
    assert not left, f"descriptors are left: {left}"
    if other is not None:
        other.close()
    return report


def in_child(case: list[Any]) -> tuple[int, Any]:
    """Returns how a process ended that made this attempt, and its report."""
    read, write = os.pipe()
    pid = os.fork()
    if not pid:
        os.close(read)
        try:
            report = run(case)
            os.write(write, json.dumps([attrs.astuple(each) for each in report]).encode())
        except Inapplicable:
            os.write(write, b"[]")
        except BaseException:
            traceback.print_exc()
            sys.stderr.flush()
            os._exit(1)
        os._exit(0)
    os.close(write)
    with open(read, "rb") as file:
        text = file.read()
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), json.loads(text) if text else None


def main() -> None:
    """Argument: a JSON list of attempts, ``[thing, transports, fault, amount]``."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    faulthandler.enable()
    for case in json.loads(sys.argv[1]):
        print(f"---- {case}", file=sys.stderr, flush=True)
        print(json.dumps([case, *in_child(case)]), flush=True)


if __name__ == "__main__":
    main()
