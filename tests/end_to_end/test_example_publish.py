"""The publisher: a slow subscriber misses counts and is not late, a fast one misses few; it can be started again."""

from __future__ import annotations

import signal
from itertools import pairwise

import trio
from helpers import free_port

from .programs import EXAMPLES, Program, program

PUBLISH = EXAMPLES / "publish.py"
INTERVAL = ("--interval", "0.01")


async def counts(subscriber: Program, number: int) -> list[int]:
    with trio.fail_after(30):
        return [int(await subscriber.read_line()) for _ in range(number)]


async def test_slow_and_fast_subscribers() -> None:
    with program(PUBLISH, "serve", *INTERVAL) as publisher:
        await publisher.wait_address()
        with (
            program(PUBLISH, "watch", publisher.address, "--count", "100") as fast,
            program(PUBLISH, "watch", publisher.address, "--count", "10", "--pause", "0.2") as slow,
        ):
            got, missed = await counts(fast, 100), await counts(slow, 10)
            assert got == sorted(set(got)) and sum(b - a == 1 for a, b in pairwise(got)) > 80  # but in a pause
            assert missed == sorted(set(missed)) and missed[-1] - missed[0] > 30
            assert await fast.end() == await slow.end() == (0, "")
        publisher.process.send_signal(signal.SIGTERM)
        assert await publisher.end() == (0, "")


async def test_publisher_that_is_started_again() -> None:
    listen = f"127.0.0.1:{free_port()}"  # nobody is given it meanwhile
    with program(PUBLISH, "serve", "--listen", listen, "--interval", "0.001") as publisher:
        await publisher.wait_address()
        with program(PUBLISH, "watch", publisher.address) as subscriber:
            last = 0
            while last < 1000:
                [last] = await counts(subscriber, 1)
            publisher.process.send_signal(signal.SIGTERM)
            assert await publisher.end() == (0, "")
            # It begins at 0, and would take 50 seconds to get there: the subscriber may connect late.
            with program(PUBLISH, "serve", "--listen", publisher.address, "--interval", "0.05") as again:
                await again.wait_address()
                assert again.address == publisher.address
                with trio.fail_after(60):
                    while (await counts(subscriber, 1))[0] >= last:
                        pass  # of the first publisher
                assert len(await counts(subscriber, 10)) == 10
                again.process.send_signal(signal.SIGTERM)
                assert await again.end() == (0, "")
            subscriber.process.send_signal(signal.SIGINT)
            status, errors = await subscriber.end()
            assert status == 130, errors
