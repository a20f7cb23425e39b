"""Compares this library's puts and gets with UCX's own: ``python benchmarks/remote_memory.py [ROUNDS]``.

Two processes; the two ways alternate. Prints medians in microseconds, and their ratio.
"""

from __future__ import annotations

import os
import statistics
import subprocess
import sys
import time

import attrs
import trio

from trio_ucx import ucp

SIZES = [8, 4096, 65536, 2**20, 2**24]
FEATURES = ucp.DEFAULT_FEATURES | ucp.Feature.RMA
#: Calls of a round.
CALLS = {8: 200, 4096: 200, 65536: 50, 2**20: 10, 2**24: 2}


async def own(kind: str) -> None:
    with ucp.open_context(features=FEATURES) as context:
        size = SIZES[-1]
        memory = context.allocate(size) if kind == "allocated" else context.register(bytearray(size))
        with memory:
            memory.memoryview[:] = bytes(size)
            async with ucp.open_worker(context=context) as worker:
                print(bytes(worker.address).hex(), memory.descriptor.hex(), flush=True)
                await trio.to_thread.run_sync(sys.stdin.read)


async def measure(call: str, remote: ucp.RemoteMemory, buffer: memoryview) -> float:
    """Microseconds for each call; a put is flushed."""
    calls = CALLS[len(buffer)]
    start = time.perf_counter()
    for _ in range(calls):
        if call == "get":
            await remote.get_into(buffer)
        else:
            await remote.put(buffer)
            await remote.flush()
    return (time.perf_counter() - start) / calls * 1e6


async def compare(transports: str, kind: str, rounds: int, address: bytes, descriptor: bytes) -> None:
    async with ucp.open_worker(config={"TLS": transports}, features=FEATURES) as worker:
        async with await worker.open_endpoint(ucp.WorkerAddress(address)) as endpoint:
            ours = ucp.MemoryDescriptor.from_bytes(descriptor)
            with endpoint.attach(ours) as remote, endpoint.attach(attrs.evolve(ours, token=b"")) as by_ucx:
                by_ucx._path = await by_ucx._reach_by_ucx()  # also what is mapped
                for call in ("get", "put"):
                    for size in SIZES:
                        buffer = memoryview(bytearray(size))
                        taken: list[tuple[ucp.RemoteMemory, list[float]]] = [(remote, []), (by_ucx, [])]
                        for number in range(rounds):
                            for memory, times in taken if number % 2 else taken[::-1]:
                                times.append(await measure(call, memory, buffer))
                        ours_us, ucx_us = (statistics.median(times) for _, times in taken)
                        print(
                            f"{transports:8} {kind:10} {call} {size:9} "
                            f"ours {ours_us:9.1f}  UCX {ucx_us:9.1f}  ratio {ours_us / ucx_us:.2f}",
                            flush=True,
                        )


def main(rounds: int) -> None:
    for transports, kind in (("tcp", "registered"), ("sm,self", "registered"), ("sm,self", "allocated")):
        environment = {**os.environ, "UCX_TLS": transports}
        command = [sys.executable, __file__, "own", kind]
        pipe = subprocess.PIPE
        with subprocess.Popen(command, env=environment, stdin=pipe, stdout=pipe, text=True) as owner:
            assert owner.stdout is not None and owner.stdin is not None
            address, descriptor = map(bytes.fromhex, owner.stdout.readline().split())
            trio.run(compare, transports, kind, rounds, address, descriptor)
            owner.stdin.close()


if __name__ == "__main__":
    if sys.argv[1:2] == ["own"]:
        trio.run(own, sys.argv[2])
    else:
        main(int(sys.argv[1]) if len(sys.argv) > 1 else 15)
