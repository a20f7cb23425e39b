"""What a call costs: round trips of 8 bytes, plain, as a conversation by hand, and as a call of trio_ucx.rpc.

    python benchmarks/rpc.py [--calls N] [--rounds N] [--in-flight N]

The server is another process of this machine, over shared memory, with a connection for each of the three. The rounds
take turns, and the figures are medians. Then so many calls are in flight at once; plain ones have a tag each.
"""

from __future__ import annotations

import argparse
import multiprocessing
import statistics
import tempfile
from collections.abc import Awaitable, Callable
from functools import partial
from time import perf_counter

import trio

import trio_ucx
from trio_ucx import rpc


class Echo(rpc.Service):
    @rpc.method
    async def echo(self, call: rpc.Call, data: bytes) -> bytes:
        return data


async def plain(connection: trio_ucx.Connection) -> None:
    async def answer(tag: int) -> None:
        async for message in connection.messages(tag):
            await connection.send(message, tag=tag)

    async with trio.open_nursery() as nursery:
        for tag in range(int.from_bytes(await connection.receive())):
            nursery.start_soon(answer, tag)


async def by_hand(connection: trio_ucx.Connection) -> None:
    async for talk in connection.conversations():
        async with talk:
            await talk.send(await talk.receive())


HANDLERS = {"plain": plain, "by hand": by_hand, "call": rpc.serving(Echo(), limit=1000)}


def serve(folder: str) -> None:
    async def all_of_them() -> None:
        async with trio.open_nursery() as nursery:
            for name, handler in HANDLERS.items():
                nursery.start_soon(partial(trio_ucx.serve_ucx, handler, 0, host=f"unix:{folder}/{name}"))

    trio.run(all_of_them)


async def measure(folder: str, calls: int, rounds: int, in_flight: int) -> None:
    address, retry = f"unix:{folder}/", trio_ucx.Backoff()
    data = bytes(8)
    async with (
        trio_ucx.connect(address + "plain", retry=retry) as one,
        trio_ucx.connect(address + "by hand", retry=retry) as two,
        rpc.connect(address + "call", retry=retry) as client,
    ):

        async def plain_trip(tag: int) -> None:
            await one.send(data, tag=tag)
            await one.receive(tag=tag)

        async def trip_by_hand(_: int) -> None:
            async with two.open_conversation() as talk:
                await talk.send(data)
                await talk.receive()

        async def call(_: int) -> None:
            await client.call("echo", data=data)

        async def seconds_each(trip: Callable[[int], Awaitable[None]]) -> float:
            begun = perf_counter()
            for _ in range(calls):
                await trip(0)
            return (perf_counter() - begun) / calls

        async def rate(trip: Callable[[int], Awaitable[None]]) -> float:
            async def repeat(tag: int) -> None:
                for _ in range(calls // in_flight + 1):
                    await trip(tag)

            begun = perf_counter()
            async with trio.open_nursery() as nursery:
                for tag in range(in_flight):
                    nursery.start_soon(repeat, tag)
            return in_flight * (calls // in_flight + 1) / (perf_counter() - begun)

        await one.send(in_flight.to_bytes(4))
        trips = {"plain": plain_trip, "by hand": trip_by_hand, "call": call}
        times: dict[str, list[float]] = {name: [] for name in trips}
        rates: dict[str, list[float]] = {name: [] for name in trips}
        for _ in range(rounds):
            for name, trip in trips.items():
                times[name].append(await seconds_each(trip))
            for name, trip in trips.items():
                rates[name].append(await rate(trip))
    base = statistics.median(times["plain"])
    for name, each in times.items():
        middle = statistics.median(each)
        print(f"{name:10} {middle * 1e6:8.1f} us a round trip, {middle / base:5.2f} times plain")
    for name, each in rates.items():
        middle = statistics.median(each)
        times_plain = middle / statistics.median(rates["plain"])
        print(f"{name:10} {middle:8.0f} a second, {in_flight} in flight, {times_plain:5.2f} times plain")


def main() -> None:
    parser = argparse.ArgumentParser(description="What a call costs.")
    parser.add_argument("--calls", type=int, default=2000)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--in-flight", type=int, default=64)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        server = multiprocessing.get_context("spawn").Process(target=serve, args=(folder,), daemon=True)
        server.start()
        try:
            trio.run(measure, folder, options.calls, options.rounds, options.in_flight)
        finally:
            server.kill()
            server.join()


if __name__ == "__main__":
    main()
