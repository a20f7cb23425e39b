"""The service of tests/test_rpc.py; as a program, ``python tests/rpc_service.py``, it serves, and prints its port."""

from __future__ import annotations

import os
import sys
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import suppress
from functools import partial
from typing import Any

import trio

import trio_ucx
from trio_ucx import rpc


class Locked(Exception):
    """Declared by a method."""


class Store(rpc.Service):
    """Counts its handlers."""

    def __init__(self, next_hop: rpc.Client | None = None) -> None:
        self.next_hop = next_hop
        self.running: Counter[str] = Counter()
        self.begun: Counter[str] = Counter()
        self.most = 0
        self.lefts: list[float] = []
        self.runs: Counter[int] = Counter()
        self.release = trio.Event()

    @rpc.method
    async def add(self, call: rpc.Call, a: int, b: int = 10) -> int:
        return a + b

    @rpc.method
    async def echo(self, call: rpc.Call, value: Any = None) -> Any:
        return rpc.Reply(value, [bytes(each) for each in call.buffers]) if call.buffers else value

    @rpc.method
    async def fail(self, call: rpc.Call, how: str) -> object:
        match how:
            case "value":
                raise ValueError("it went\nwrong: \x1b[31m" + "x" * 100_000)
            case "group":
                async with trio.open_nursery():
                    raise KeyError("inside")
            case "broken":
                raise trio.BrokenResourceError("of something else")
            case "text":

                class Textless(Exception):
                    def __str__(self) -> str:
                        raise ZeroDivisionError

                raise Textless
            case "result":
                return object()
        return None

    @rpc.method(raises=[Locked, LookupError])
    async def declared(self, call: rpc.Call, how: str) -> None:
        if how == "locked":
            raise Locked("by", 7)
        raise KeyError("key")

    @rpc.method
    async def wait(self, call: rpc.Call, number: int = 0, shielded: bool = False) -> str:
        self.running["wait"] += 1
        self.begun["wait"] += 1
        self.most = max(self.most, self.running["wait"])
        self.lefts.append(call.time_left())
        self.runs[number] += 1
        try:
            with trio.CancelScope(shield=shielded):
                await self.release.wait()
            return "released"
        finally:
            self.running["wait"] -= 1

    @rpc.method
    async def hop(self, call: rpc.Call) -> Any:
        """Waits at the last of several servers."""
        self.running["hop"] += 1
        try:
            assert self.next_hop is not None
            if self.next_hop._idempotent:
                return await self.next_hop.call("wait")
            return await self.next_hop.call("hop")
        finally:
            self.running["hop"] -= 1

    @rpc.method(idempotent=True)
    async def pid_of(self, call: rpc.Call) -> int:
        return os.getpid()

    @rpc.method(idempotent=True)
    async def again(self, call: rpc.Call, number: int) -> int:
        """Does not answer the first time."""
        self.runs[number] += 1
        if self.runs[number] == 1:
            call.connection.abort()
        return self.runs[number]

    @rpc.method
    async def once(self, call: rpc.Call, number: int) -> int:
        """Like ``again``, but not idempotent."""
        self.runs[number] += 1
        call.connection.abort()
        await trio.sleep_forever()
        return 0

    @rpc.method
    async def metadata(self, call: rpc.Call) -> dict[str, str]:
        return call.metadata

    @rpc.stream
    async def count(self, call: rpc.Call, until: int, fail_at: int = -1, size: int = 0) -> AsyncIterator[Any]:
        self.running["count"] += 1
        try:
            for number in range(until):
                if number == fail_at:
                    raise ValueError("stopped counting")
                self.begun["count"] = number + 1
                yield rpc.Reply(number, [bytes(size)]) if size else number
        finally:
            self.running["count"] -= 1

    @rpc.method
    async def total(self, call: rpc.Call, most: int = 10**9) -> Any:
        self.running["total"] += 1
        try:
            total = 0
            if most == 0:
                await trio.sleep_forever()
            async for item in call.items():
                total += len(item.buffers[0]) if isinstance(item, rpc.Reply) else item
                most -= 1
                if most == 0:
                    break
            return total
        finally:
            self.running["total"] -= 1

    @rpc.stream
    async def double(self, call: rpc.Call) -> AsyncIterator[int]:
        async for item in call.items():
            yield 2 * item


async def main(port: int) -> None:
    async with trio.open_nursery() as nursery:
        serving = partial(trio_ucx.serve_ucx, rpc.serving(Store()), port, host="127.0.0.1", drain_on_signal=5)
        server = await nursery.start(serving)
        print(server.address[1], flush=True)


if __name__ == "__main__":
    with suppress(KeyboardInterrupt):
        trio.run(main, int(sys.argv[1]) if len(sys.argv) > 1 else 0)
