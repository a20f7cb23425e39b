"""Two ranks that sleep between messages: no wake-up may be lost. LAB_ROUNDS: how many messages each way."""

from __future__ import annotations

import os
import time

from common import connected, echo, main, part

from trio_ucx import ucp

ROUNDS = int(os.environ.get("LAB_ROUNDS", "200" if "LAB_QUICK" in os.environ else "1000"))


@part
async def sleeping():
    """Round trips of 8 bytes."""
    times = []
    async with ucp.open_worker(spin=0) as worker:

        async def client(c):
            for number in range(ROUNDS):
                began = time.monotonic()
                await c.send(number.to_bytes(8, "big"))
                assert await c.receive() == number.to_bytes(8, "big")
                times.append(time.monotonic() - began)
            median = sorted(times)[ROUNDS // 2] * 1e3
            return f"{c.transports}: {ROUNDS} rounds, median {median:.1f} ms, {max(times):.2f} s at most"

        note = await connected("sleeping", echo, client, worker=worker)
        assert worker.statistics().missed_events == 0, f"{worker.statistics().missed_events} lost; {note}"
        return f"{worker.statistics().missed_events} lost; {note or ''}"


main(timeout=1400)
