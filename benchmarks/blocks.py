"""Compares ways to fetch lists of blocks of a peer's memory: ``python -m benchmarks.blocks [--hogs N]``.

Two processes for each way: an owner with a pool of 1,024 blocks of 64 KiB, and a reader that fetches lists of random
blocks. The ways alternate; the processes of the others are suspended meanwhile, because NIXL's are busy even when they
wait. Prints medians in microseconds and, in brackets, the ratio to the first way. At first every block is fetched
once, in lists of the smallest size: the column "new". Later each list is fetched once to check the bytes, and then
several times; a chain is built once for each list, before that. With ``nixl-cu12`` from PyPI installed, NIXL's UCX
backend is one of the ways: it is polled, as its users do.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import random
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable
from contextlib import ExitStack
from typing import Any

import trio

from trio_ucx import ucp

BLOCK = 65536
BLOCKS = 1024
COUNTS = [32, 128, 512]
#: Lists of a round, by how many blocks they have.
LISTS = {32: 20, 128: 8, 512: 3}
WAYS = ["plan, allocated", "plan, registered", "chain, allocated", "one by one, registered", "NIXL"]

Fetch = Callable[[list[int], list[int]], Awaitable[None]]


def say(**answer: Any) -> None:
    print(json.dumps(answer), flush=True)


def hear() -> dict[str, Any]:
    line = sys.stdin.readline()
    return json.loads(line) if line else {"do": "end"}


async def own(way: str) -> None:
    with ucp.open_context() as context:
        allocated = way.endswith("allocated")
        with context.allocate(BLOCK * BLOCKS) if allocated else context.register(bytearray(BLOCK * BLOCKS)) as memory:
            memory.memoryview[:] = random.Random(1).randbytes(BLOCK * BLOCKS)
            async with ucp.open_worker(context=context) as worker:
                say(address=bytes(worker.address).hex(), descriptor=memory.descriptor.hex())
                await trio.to_thread.run_sync(sys.stdin.read)


async def read(way: str) -> None:
    """Carries out orders with one of our own ways."""
    where = hear()
    mine = bytearray(BLOCK * BLOCKS)
    async with ucp.open_worker() as worker:
        async with await worker.open_endpoint(ucp.WorkerAddress(bytes.fromhex(where["address"]))) as endpoint:
            with endpoint.attach(bytes.fromhex(where["descriptor"])) as remote:
                await carry_out(our_way(way, worker, remote, mine), mine)


def our_way(way: str, worker: ucp.Worker, remote: ucp.RemoteMemory, mine: bytearray) -> Fetch:
    if way.startswith("plan"):
        return remote.plan(mine, block=BLOCK).get
    view = memoryview(mine)

    async def one_by_one(remote_blocks: list[int], local_blocks: list[int]) -> None:
        for source, target in zip(remote_blocks, local_blocks, strict=True):
            await remote.get_into(view[target * BLOCK : (target + 1) * BLOCK], source * BLOCK)

    chains: dict[tuple[int, ...], Any] = {}

    async def chain(remote_blocks: list[int], local_blocks: list[int]) -> None:
        """Runs a chain that is built once for each list: the second time counts."""
        key = (*remote_blocks, *local_blocks)
        if key not in chains:
            chains[key] = worker.new_chain(capacity=len(remote_blocks))
            for source, target in zip(remote_blocks, local_blocks, strict=True):
                chains[key].get(remote, source * BLOCK, BLOCK, into=view[target * BLOCK : (target + 1) * BLOCK])
        outcomes = await chains[key].run()
        assert outcomes.error_count == 0

    return chain if way.startswith("chain") else one_by_one


async def carry_out(fetch: Fetch, mine: bytearray) -> None:
    """Fetches lists as often as the parent says, the same list each time; checks the bytes once."""
    say(ready=True)
    content = random.Random(1).randbytes(BLOCK * BLOCKS)
    while (order := await trio.to_thread.run_sync(hear))["do"] != "end":
        if order["do"] == "idle":
            used, begin = time.process_time(), time.perf_counter()
            await trio.sleep(order["seconds"])
            say(cpu=(time.process_time() - used) / (time.perf_counter() - begin))
            continue
        if order["do"] == "new":
            say(times=[await timed(fetch, blocks, blocks) for blocks in shuffled_lists(order["count"])])
            continue
        sources = random.Random(order["seed"]).sample(range(BLOCKS), order["count"])
        targets = random.Random(order["seed"] + 1).sample(range(BLOCKS), order["count"])
        await fetch(sources, targets)
        for source, target in zip(sources, targets, strict=True):
            assert mine[target * BLOCK : (target + 1) * BLOCK] == content[source * BLOCK : (source + 1) * BLOCK]
        say(times=[await timed(fetch, sources, targets) for _ in range(order["lists"])])
    say(ended=True)


def shuffled_lists(count: int) -> list[list[int]]:
    """All blocks, in lists of so many."""
    blocks = random.Random(1).sample(range(BLOCKS), BLOCKS)
    return [blocks[begin : begin + count] for begin in range(0, BLOCKS, count)]


async def timed(fetch: Fetch, sources: list[int], targets: list[int]) -> float:
    begin = time.perf_counter()
    await fetch(sources, targets)
    return (time.perf_counter() - begin) * 1e6


def nixl_agent(name: str) -> Any:
    api = importlib.import_module("nixl_cu12._api")
    return api, api.nixl_agent(name, api.nixl_agent_config(backends=["UCX"], enable_prog_thread=True))


def nixl_pool(agent: Any) -> tuple[Any, list[tuple[int, int, int]]]:
    """A numpy array, registered; and NIXL's descriptors of its blocks."""
    numpy = importlib.import_module("numpy")
    pool = numpy.zeros(BLOCK * BLOCKS, dtype=numpy.uint8)
    start = pool.ctypes.data
    agent.register_memory([(start, BLOCK * BLOCKS, 0, "")], mem_type="DRAM")
    return pool, [(start + number * BLOCK, BLOCK, 0) for number in range(BLOCKS)]


def nixl_own() -> None:
    numpy = importlib.import_module("numpy")
    _, agent = nixl_agent("owner")
    pool, blocks = nixl_pool(agent)
    pool[:] = numpy.frombuffer(random.Random(1).randbytes(BLOCK * BLOCKS), dtype=numpy.uint8)
    say(metadata=agent.get_agent_metadata().hex(), blocks=blocks)
    sys.stdin.read()


async def nixl_read() -> None:
    numpy = importlib.import_module("numpy")
    where = hear()
    _, agent = nixl_agent("reader")
    pool, blocks = nixl_pool(agent)
    owner = agent.add_remote_agent(bytes.fromhex(where["metadata"]))
    local = agent.prep_xfer_dlist("NIXL_INIT_AGENT", blocks, mem_type="DRAM")
    remote = agent.prep_xfer_dlist(owner, [tuple(block) for block in where["blocks"]], mem_type="DRAM")

    async def fetch(remote_blocks: list[int], local_blocks: list[int]) -> None:
        handle = agent.make_prepped_xfer(
            "READ", local, numpy.array(local_blocks), remote, numpy.array(remote_blocks), b""
        )
        state = agent.transfer(handle)
        while state != "DONE":
            assert state != "ERR"
            state = agent.check_xfer_state(handle)
        agent.release_xfer_handle(handle)

    await carry_out(fetch, memoryview(pool))  # type: ignore[arg-type]


class Pair:
    """The owner and the reader of one way."""

    def __init__(self, way: str, transports: str, stack: ExitStack) -> None:
        self.times: dict[int, list[float]] = {count: [] for count in COUNTS}
        self._processes: list[subprocess.Popen[str]] = []
        self._reader = self._start("read", way, transports, stack)
        self.ask(answer_of(self._start("own", way, transports, stack)))

    def _start(self, role: str, way: str, transports: str, stack: ExitStack) -> subprocess.Popen[str]:
        command = [sys.executable, "-m", "benchmarks.blocks", "--role", role, "--way", way]
        environment = {**os.environ, "UCX_TLS": transports}
        if way == "NIXL" and transports != "tcp":  # its endpoints handle errors, and are not made without these
            environment |= {"UCX_TLS": f"{transports},tcp", "UCX_MM_ERROR_HANDLING": "y"}
        pipe = subprocess.PIPE
        process = subprocess.Popen(command, env=environment, stdin=pipe, stdout=pipe, text=True)
        stack.callback(process.wait, 30)
        assert process.stdin is not None
        stack.callback(process.stdin.close)
        stack.callback(process.send_signal, signal.SIGCONT)
        self._processes.append(process)
        return process

    def send_signal(self, number: signal.Signals) -> None:
        for process in self._processes:
            process.send_signal(number)

    def ask(self, order: dict[str, Any]) -> dict[str, Any]:
        assert self._reader.stdin is not None
        self._reader.stdin.write(json.dumps(order) + "\n")
        self._reader.stdin.flush()
        return answer_of(self._reader)


def answer_of(process: subprocess.Popen[str]) -> dict[str, Any]:
    """Reads the next line that is JSON: NIXL writes its log there, too."""
    assert process.stdout is not None
    line = next((line for line in process.stdout if line.startswith("{")), "")
    answer: dict[str, Any] = json.loads(line)
    return answer


def compare(transports: str, ways: list[str], rounds: int, hogs: int) -> None:
    with ExitStack() as stack:
        pairs = {}
        for way in ways:
            pairs[way] = Pair(way, transports, stack)
            pairs[way].send_signal(signal.SIGSTOP)
        for _ in range(hogs):
            hog = subprocess.Popen([sys.executable, "-c", "while True: pass"])
            stack.callback(hog.wait)
            stack.callback(hog.kill)
        new = {}
        for way, pair in pairs.items():
            pair.send_signal(signal.SIGCONT)
            new[way] = statistics.median(pair.ask({"do": "new", "count": COUNTS[0]})["times"])
            pair.send_signal(signal.SIGSTOP)
        for number in range(rounds):
            for count in COUNTS:
                for pair in list(pairs.values())[:: 1 if number % 2 else -1]:
                    order = {"do": "fetch", "count": count, "lists": LISTS[count], "seed": number * 1000}
                    pair.send_signal(signal.SIGCONT)
                    pair.times[count] += pair.ask(order)["times"]
                    pair.send_signal(signal.SIGSTOP)
        print(f"{transports}, {hogs} busy processes: microseconds, and how many times those of the first way")
        print(f"  {'blocks':24}{f'{COUNTS[0]} new':>17}{''.join(f'{count:17}' for count in COUNTS)}")
        for way, pair in pairs.items():
            medians = {count: statistics.median(pair.times[count]) for count in COUNTS}
            first = {count: statistics.median(pairs[ways[0]].times[count]) for count in COUNTS}
            cells = "".join(f"{medians[count]:9.0f} ({medians[count] / first[count]:5.2f})" for count in COUNTS)
            pair.send_signal(signal.SIGCONT)
            idle = pair.ask({"do": "idle", "seconds": 1})["cpu"]
            pair.ask({"do": "end"})
            at_first = f"{new[way]:9.0f} ({new[way] / new[ways[0]]:5.2f})"
            print(f"  {way:24}{at_first}{cells}   waiting: {idle:6.1%} CPU", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--role", choices=["own", "read"], help=argparse.SUPPRESS)
    parser.add_argument("--way", choices=WAYS, action="append", help="only this one; may be repeated")
    parser.add_argument("--transports", action="append", help="UCX_TLS; by default shared memory, and then TCP")
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--hogs", type=int, default=0, help="busy processes beside them")
    options = parser.parse_args()
    if options.role is not None:
        [way] = options.way
        if way == "NIXL":
            nixl_own() if options.role == "own" else trio.run(nixl_read)
        else:
            trio.run(own if options.role == "own" else read, way)
        return
    has_nixl = importlib.util.find_spec("nixl_cu12") is not None
    ways = options.way or [way for way in WAYS if way != "NIXL" or has_nixl]
    for transports in options.transports or ("sm,self", "tcp"):
        compare(transports, ways, options.rounds, options.hogs)


if __name__ == "__main__":
    main()
