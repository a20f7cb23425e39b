"""A program that is interrupted at a chosen point between two bytecodes: run by ``test_interrupts.py``.

CPython looks for signals when a function begins or a generator goes on, after a call of a function in C, and when a
loop goes back to its begin: nowhere else. :class:`Interrupter` sends SIGINT at the n-th of these points, and Trio's
handler decides whether KeyboardInterrupt is raised there (the code is not protected), or at the main task's next
checkpoint.
"""

from __future__ import annotations

import dis
import faulthandler
import functools
import gc
import itertools
import json
import signal
import sys
import tempfile
import warnings
from collections.abc import Awaitable, Callable
from types import CodeType, FrameType
from typing import Any

import trio
from trio._core._wakeup_socketpair import WakeupSocketpair

import trio_ucx
from trio_ucx import mesh, ucp
from trio_ucx._util.live_handles import live_handles

#: Seconds for one run.
LIMIT = 20

# Trio (0.35) protects neither. In the middle of either there are moments at which a KeyboardInterrupt leaves a task
# that never runs, so that the program hangs, or one that its nursery does not know: that is a TrioInternalError.
trio.lowlevel.enable_ki_protection(trio.Nursery.start_soon)
trio.lowlevel.enable_ki_protection(trio.Nursery.start)

FOLDER = tempfile.TemporaryDirectory()

Scenario = Callable[[str], Awaitable[None]]
SCENARIOS: dict[str, Scenario] = {}


def scenario(function: Scenario) -> Scenario:
    SCENARIOS[function.__name__] = function
    return function


# ---- the interrupt ----


@functools.cache
def loops(code: CodeType) -> frozenset[int]:
    """Where in the code loops go back, as values of ``f_lasti``.

    Without the jumps that CPython 3.12 and 3.13 put outside the ``with`` or ``try`` around the loop: in any program, an
    interrupt there leaves the block without its ``__exit__``.
    """
    bytecode = dis.Bytecode(code)

    def handlers(instruction: dis.Instruction) -> list[int]:
        return [each.target for each in bytecode.exception_entries if each.start <= instruction.offset < each.end]

    return frozenset(
        each.offset
        for before, each in itertools.pairwise(bytecode)
        if each.opname == "JUMP_BACKWARD" and handlers(each) == handlers(before)
    )


@functools.cache
def looks_for_signals(code: CodeType, offset: int) -> bool:
    """Whether CPython looks for signals where a frame begins or goes on: not after an ``await`` or ``yield from``."""
    return dis.opname[code.co_code[offset]] == "RESUME" and code.co_code[offset + 1] & 3 < 2


def closes_wakeup(frame: FrameType | None) -> bool:
    """True if this is called where a run of Trio's ends, and its signal handling is taken down."""
    for _ in range(3):  # it calls socket.close, which calls one more
        if frame is None or frame.f_code is WakeupSocketpair.close.__code__:
            break
        frame = frame.f_back
    return frame is not None and frame.f_code is WakeupSocketpair.close.__code__


class Interrupter:
    """Sends SIGINT at one of the points at which CPython looks for signals.

    Args:
        at: which one, from 1 on; 0 is none of them, and counts.
        protected: counts the points in code that is protected from KeyboardInterrupt, rather than in code that is not.
    """

    def __init__(self, at: int, *, protected: bool) -> None:
        self._at = at
        self._protected = protected
        self.points = 0
        self.where: str | None = None

    def __enter__(self) -> Interrupter:
        sys.settrace(self._trace)
        sys.setprofile(self._profile)
        return self

    def __exit__(self, *_: object) -> None:
        sys.setprofile(None)
        sys.settrace(None)

    def _profile(self, frame: FrameType, event: str, argument: object) -> None:
        if event == "call":
            if looks_for_signals(frame.f_code, frame.f_lasti):
                self._point(frame)
        elif event == "c_return" or (event == "return" and frame.f_code.co_name == "__init__"):
            self._point(frame)

    def _trace(self, frame: FrameType, event: str, argument: object) -> Any:
        if not loops(frame.f_code):
            return None
        frame.f_trace_lines = False
        frame.f_trace_opcodes = True
        return self._trace_opcode

    def _trace_opcode(self, frame: FrameType, event: str, argument: object) -> Any:
        if event == "opcode" and frame.f_lasti in loops(frame.f_code):
            self._point(frame)
        return self._trace_opcode

    def _point(self, frame: FrameType) -> None:
        if trio.lowlevel.currently_ki_protected() is not self._protected:
            return
        if frame.f_code.co_filename == "<frozen abc>":
            return  # CPython asks there what kind of exception a Cancelled is, and drops a KeyboardInterrupt
        if closes_wakeup(frame):
            return  # Trio closes one end while CPython's signal handler still writes to the other, which says so
        self.points += 1
        if self.points == self._at:
            self.__exit__()
            self.where = f"{frame.f_code.co_filename}:{frame.f_lineno} {frame.f_code.co_qualname}"
            signal.raise_signal(signal.SIGINT)


# ---- one run ----


def run(name: str, transports: str, at: int, protected: bool) -> list[Any]:
    """Returns how it ended, what is left, errors that nobody got, where it was interrupted, and how many points it has
    had."""
    unraisable: list[str] = []
    sys.unraisablehook = lambda error: unraisable.append(f"{error.exc_value!r} in {error.object!r}")
    faulthandler.dump_traceback_later(LIMIT, exit=True)
    interrupter = Interrupter(at, protected=protected)
    with warnings.catch_warnings():
        # An interrupt between two steps can drop what the first one has made.
        warnings.simplefilter("ignore", ResourceWarning)
        warnings.filterwarnings("ignore", "coroutine .* was never awaited", RuntimeWarning)
        try:
            with interrupter:
                trio.run(SCENARIOS[name], transports)
            ended = "returned"
        except KeyboardInterrupt:
            ended = "KeyboardInterrupt"
        except BaseException as error:
            rest = error.split(KeyboardInterrupt)[1] if isinstance(error, BaseExceptionGroup) else error
            ended = "KeyboardInterrupt" if rest is None else repr(rest)
            if rest is not None:
                sys.excepthook(type(rest), rest, rest.__traceback__)
        # An interrupt in its last lines keeps trio.run from forgetting the run: Trio then refuses the next one.
        trio._core._run.GLOBAL_RUN_CONTEXT.__dict__.clear()
        gc.collect()
    faulthandler.cancel_dump_traceback_later()
    return [ended, live_handles.counts(), unraisable, interrupter.where, interrupter.points]


# ---- the scenarios ----


def pattern(size: int) -> bytes:
    return (bytes(range(251)) * (size // 251 + 1))[:size]


@scenario
async def messages(transports: str) -> None:
    config = {"TLS": transports}
    async with ucp.open_worker(config=config) as worker, ucp.open_worker(config=config) as other:
        [listener] = await trio_ucx.open_ucx_listeners(0, host="127.0.0.1", worker=other)
        async with listener, trio_ucx.connect(listener.address, worker=worker) as client:
            async with await listener.accept() as server:
                await exchange_messages(client, server)


async def exchange_messages(client: trio_ucx.Connection, server: trio_ucx.Connection) -> None:
    for size in (8, 1500, 200_000):
        data = pattern(size)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(client.send, data)
            assert await server.receive() == data
            nursery.start_soon(functools.partial(server.send, data, tag=1))
            buffer = bytearray(size)
            assert await client.receive_into(buffer, tag=1) == size
            assert buffer == data
    for number in range(3):
        client.send_nowait(b"batch %d" % number)
    for number in range(3):
        assert await server.receive() == b"batch %d" % number
    with trio.move_on_after(0.001):
        await client.receive()
    async with trio.open_nursery() as nursery:
        nursery.start_soon(functools.partial(client.send, pattern(200_000), tag=2))
        assert await server.wait_message(tag=2) == 200_000
        nursery.cancel_scope.cancel()
    client.send_nowait(b"last")
    async for message in server.messages():
        assert message == b"last"
        break


@scenario
async def stream(transports: str) -> None:
    async with ucp.open_worker(config={"TLS": transports}) as worker:
        [listener] = await trio_ucx.open_ucx_listeners(0, host="127.0.0.1", worker=worker)
        async with listener, trio_ucx.connect(listener.address, worker=worker) as client:
            async with await listener.accept() as server:
                data = pattern(400_000)
                async with trio.open_nursery() as nursery:
                    nursery.start_soon(client.send_all, data)
                    got = b""
                    while len(got) < len(data):
                        got += await server.receive_some()
                assert got == data
                await client.send_all(b"end")
                await client.send_eof()
                assert [chunk async for chunk in server] == [b"end"]


@scenario
async def served(transports: str) -> None:
    async def handler(connection: trio_ucx.Connection) -> None:
        async for message in connection.messages():
            await connection.send(message)

    async with ucp.open_worker(config={"TLS": transports}) as worker, trio.open_nursery() as nursery:
        serve = functools.partial(trio_ucx.serve_ucx, handler, 0, host="127.0.0.1", worker=worker)
        [listener] = await nursery.start(serve)
        try:
            for _ in range(2):
                async with trio_ucx.connect(listener.address, worker=worker) as connection:
                    await connection.send(b"request")
                    assert await connection.receive() == b"request"
        except (OSError, trio.BrokenResourceError, trio.EndOfChannel):
            await trio.sleep_forever()  # the server's task was interrupted, and this one is cancelled
        nursery.cancel_scope.cancel()


@scenario
async def active_messages(transports: str) -> None:
    config = {"TLS": transports}
    async with ucp.open_worker(config=config) as worker, ucp.open_worker(config=config) as other:
        async with await worker.open_endpoint(other.address) as endpoint:
            with other.open_active_messages(3) as queue:
                for size in (8, 200_000):
                    async with trio.open_nursery() as nursery:
                        nursery.start_soon(endpoint.am_send, 3, pattern(size), b"header")
                        async for message in queue:
                            with message:
                                assert await message.receive() == pattern(size)
                            break


@scenario
async def tags_and_groups(transports: str) -> None:
    config = {"TLS": transports}
    async with ucp.open_worker(config=config) as worker, ucp.open_worker(config=config) as other:
        async with await worker.open_endpoint(other.address) as endpoint:
            buffers = [bytearray(size) for size in (8, 1500, 200_000)]
            async with other.open_request_group() as receives, worker.open_request_group() as sends:
                requests = [receives.tag_receive(buffer, number) for number, buffer in enumerate(buffers)]
                for number, buffer in enumerate(buffers):
                    sends.tag_send(endpoint, pattern(len(buffer)), number)
                for number, request in enumerate(requests):
                    assert await request == (len(buffers[number]), number)
            with trio.move_on_after(0.001):
                await other.tag_receive(bytearray(1), 4)


@scenario
async def raw_streams(transports: str) -> None:
    """By socket address."""
    config = {"TLS": transports}
    features = ucp.DEFAULT_FEATURES | ucp.Feature.STREAM
    async with ucp.open_worker(config=config, features=features, admit=["127.0.0.1"]) as worker:
        async with ucp.open_worker(config=config, features=features, admit=["127.0.0.1"]) as other:
            async with await other.open_listener("127.0.0.1", 0) as listener:
                client = await worker.open_endpoint(listener.address)
                try:
                    server = await (await listener.accept_request()).accept()
                    try:
                        for size in (8, 200_000):
                            async with trio.open_nursery() as nursery:
                                nursery.start_soon(client.stream_send, pattern(size))
                                buffer = bytearray(size)
                                assert await server.stream_receive(buffer, exact=True) == size
                                assert buffer == pattern(size)
                    finally:
                        server.abort()
                finally:
                    client.abort()


@scenario
async def remote_memory(transports: str) -> None:
    features = ucp.DEFAULT_FEATURES | ucp.Feature.RMA | ucp.Feature.AMO64
    with ucp.open_context({"TLS": transports}, features=features) as context:
        async with ucp.open_worker(context=context) as worker, ucp.open_worker(context=context) as other:
            async with await worker.open_endpoint(other.address) as endpoint:
                with context.allocate(70_000) as memory, endpoint.attach(memory.descriptor) as remote:
                    await remote.put(pattern(69_000), 8)
                    await remote.flush()
                    assert await remote.get(8, 69_000) == pattern(69_000)
                    await remote.atomic(ucp.AtomicOp.ADD, 5)
                    assert await remote.fetch_add(1) >= 0


@scenario
async def chains(transports: str) -> None:
    features = ucp.DEFAULT_FEATURES | ucp.Feature.RMA | ucp.Feature.AMO64
    with ucp.open_context({"TLS": transports}, features=features) as context:
        async with ucp.open_worker(context=context) as worker, ucp.open_worker(context=context) as other:
            async with await worker.open_endpoint(other.address) as endpoint:
                with context.allocate(4096) as memory, endpoint.attach(memory.descriptor) as remote:
                    for _ in range(2):
                        chain = worker.new_chain(capacity=16)
                        head = chain.get(remote, 0, 64)
                        chain.put(remote, b"data", offset=64, when=head.u32(0) == 0)
                        slot = chain.fetch_add(remote, 1, 2048)
                        chain.put(remote, b"row of 8", offset=slot.u64() * 64 + 2056)
                        assert len(await chain.run()) == 4


@scenario
async def group(transports: str) -> None:
    """Of one rank: with others, an interrupt of one is a loss for them."""
    async with ucp.open_worker(config={"TLS": transports}) as worker:
        for _ in range(3):
            async with mesh.join(rank=0, size=1, meeting=f"file://{FOLDER.name}/meeting", worker=worker) as alone:
                await alone.barrier()
                assert await alone.all_gather(b"mine") == [b"mine"]


def main() -> None:
    """Arguments: the scenario, the transports, and a JSON list of runs: ``[at, protected]``."""
    name, transports, runs = sys.argv[1:]
    for at, protected in json.loads(runs):
        print(json.dumps([at, protected]), flush=True)
        print(json.dumps(run(name, transports, at, protected)), flush=True)


if __name__ == "__main__":
    main()
