"""Messages in device memory: ``python benchmarks/device_memory.py [ROUNDS]``. Needs a CUDA device.

Two processes of one machine send one message after the other in one direction, over shared memory: over a Connection,
by the tag operations of ``trio_ucx.ucp``, and by ucx_perftest, once with our options and with error handling, and once
with UCX's own options and without error handling. The four alternate. Prints medians of the microseconds for a message,
and the ratios of our two to ucx_perftest with error handling.
"""

from __future__ import annotations

import ctypes
import os
import statistics
import subprocess
import sys
import time
from collections import defaultdict
from pathlib import Path

if not __package__:  # run as a file: its folder must not hide other modules
    sys.path[0] = str(Path(__file__).resolve().parent.parent)

import trio
from rich.table import Table

import trio_ucx
from benchmarks import report
from benchmarks.contenders import Contender, perftest
from benchmarks.stats import scaled
from trio_ucx import ucp
from trio_ucx.ucp._memory import cuda

TLS = "tcp,sm,self,cuda"
PATHS = [("cuda", "cuda"), ("cuda", "host"), ("host", "cuda")]
SIZES = [8, 4096, 65536, 2**20, 2**26]
#: Bytes of a round, and the least and the most messages.
BYTES, LEAST, MOST = 2**28, 20, 500
WAYS = ["Connection", "tag_send"]
WITH_ERRORS, WITHOUT = "ucx_perftest -e", "ucx_perftest"
COMMAND, MESSAGE, DONE = 1, 2, 3

Memory = ucp.DeviceBuffer | bytearray


def use_device() -> None:
    """Raises RuntimeError: there is no CUDA device."""
    context = ctypes.c_void_p()
    cuda.driver()._call("cuDevicePrimaryCtxRetain", ctypes.byref(context), 0)
    cuda.driver()._call("cuCtxSetCurrent", context)


def allocate(kind: str, size: int) -> Memory:
    """Memory with a pattern; it lives as long as the process."""
    data = bytearray((bytes(range(251)) * (size // 251 + 1))[:size])
    if kind == "host":
        return data
    pointer = ctypes.c_uint64()
    cuda.driver()._call("cuMemAlloc_v2", ctypes.byref(pointer), ctypes.c_size_t(size))
    cuda.driver().write(pointer.value, bytes(data))
    return ucp.DeviceBuffer(pointer.value, size, ucp.MemoryType.CUDA)


async def receive() -> None:
    """The receiving process."""
    memory = {kind: allocate(kind, SIZES[-1]) for kind in {kind for _, kind in PATHS}}
    async with ucp.open_worker(config={"TLS": TLS}) as worker:
        [listener] = await trio_ucx.open_ucx_listeners(0, host="127.0.0.1", worker=worker)
        print(listener.address[1], bytes(worker.address).hex(), flush=True)
        async with listener, await listener.accept() as connection:
            async for command in connection.messages(tag=COMMAND):
                way, kind, size, count = command.decode().split()
                target = part(memory[kind], int(size))
                for _ in range(int(count)):
                    if way == "Connection":
                        await connection.receive_into(target, tag=MESSAGE)
                    else:
                        await worker.tag_receive(target, MESSAGE)
                await connection.send(b"", tag=DONE)


def part(memory: Memory, size: int) -> ucp.DeviceBuffer | memoryview:
    if isinstance(memory, ucp.DeviceBuffer):
        return ucp.DeviceBuffer(memory.address, size, memory.memory_type)
    return memoryview(memory)[:size]


async def send(port: int, address: bytes, rounds: int) -> None:
    sources = {kind: allocate(kind, SIZES[-1]) for kind in {kind for kind, _ in PATHS}}
    async with ucp.open_worker(config={"TLS": TLS}) as worker:
        async with (
            trio_ucx.connect(f"127.0.0.1:{port}", worker=worker, shared_memory=True) as connection,
            await worker.open_endpoint(ucp.WorkerAddress(address)) as endpoint,
        ):

            async def measure(way: str, path: tuple[str, str], size: int, count: int) -> float:
                source = part(sources[path[0]], size)
                begin = time.perf_counter()
                await connection.send(f"{way} {path[1]} {size} {count}".encode(), tag=COMMAND)
                for _ in range(count):
                    if way == "Connection":
                        await connection.send(source, tag=MESSAGE)
                    else:
                        await endpoint.tag_send(source, MESSAGE)
                await connection.receive(tag=DONE)
                return (time.perf_counter() - begin) / count * 1e6

            made = Table(title=f"microseconds for a message, TLS={TLS}", title_justify="left")
            for name in ("from", "to", "bytes", *WAYS, WITH_ERRORS, WITHOUT, *(f"{way} / -e" for way in WAYS)):
                made.add_column(name, justify="right")
            for path in PATHS:
                for size in SIZES:
                    count = max(LEAST, min(MOST, BYTES // size))
                    taken: dict[str, list[float]] = defaultdict(list)
                    for _ in range(rounds):
                        for way in WAYS:
                            await measure(way, path, size, LEAST)
                            taken[way].append(await measure(way, path, size, count))
                        for name in (WITH_ERRORS, WITHOUT):
                            taken[name].append(by_perftest(path, size, count, ["-e"] if name == WITH_ERRORS else []))
                    medians = {name: statistics.median(times) for name, times in taken.items()}
                    ratios = [f"{medians[way] / medians[WITH_ERRORS]:.2f}" for way in WAYS]
                    made.add_row(*path, str(size), *(scaled(medians[name]) for name in taken), *ratios)
            report.console().print(made)


def by_perftest(path: tuple[str, str], size: int, count: int, options: list[str]) -> float:
    """Microseconds for a message."""
    environment = {**(perftest.ucx_environment("shm") if options else {}), "UCX_TLS": TLS}
    contender = Contender("ucx_perftest", "", "perftest", (), environment=environment)
    both = ["-m", ",".join(path), *options]
    test = ["-t", "tag_bw", "-s", str(size), "-n", str(count), "-w", str(LEAST), "-f", "-v"]
    return perftest.run_pair(contender, both, [*both, *test])["overall_us"]


def main(rounds: int) -> None:
    command = [sys.executable, str(Path(__file__).resolve()), "receive"]
    with subprocess.Popen(command, env=os.environ, stdout=subprocess.PIPE, text=True) as receiver:
        assert receiver.stdout is not None
        try:
            port, address = receiver.stdout.readline().split()
            trio.run(send, int(port), bytes.fromhex(address), rounds)
        finally:
            receiver.terminate()


if __name__ == "__main__":
    try:
        use_device()
    except RuntimeError as error:
        sys.exit(f"skipped: {error}")
    if sys.argv[1:2] == ["receive"]:
        trio.run(receive)
    else:
        main(int(sys.argv[1]) if len(sys.argv) > 1 else 3)
