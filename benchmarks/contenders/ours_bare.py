"""The lowest layer by itself: UCX's calls by way of the compiled module, in a bare loop. No Trio, no Connection."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

from trio_ucx._native import ffi, lib

from ..ends import Control, End, ping_blocking
from ..jobs import Batch
from . import ours_raw

LOOP = "trio"  # to connect
RECORDS = 16
FULL = 2**64 - 1


@asynccontextmanager
async def open_end(control: Control, setup: dict[str, Any]) -> AsyncIterator[End]:
    async with ours_raw.open_end(control, setup) as end:
        assert isinstance(end, ours_raw.RawEnd)
        yield BareEnd(end)


class BareEnd(ours_raw.RawEnd):
    """Nothing here is awaited, so Trio and the engine do nothing meanwhile."""

    def __init__(self, end: ours_raw.RawEnd) -> None:
        super().__init__(end.worker, end.endpoint, end.mine, end.theirs)
        self.transports = end.transports

    def _calls(self, outgoing: bytes | bytearray) -> tuple[Callable[[], None], Callable[[], None]]:
        """Sending and receiving one message."""
        worker, endpoint = self.worker._engine.handle, self.endpoint._core.handle
        into, source, size = (
            ffi.from_buffer("char[]", self.buffer),
            ffi.from_buffer("char[]", outgoing),
            len(outgoing),
        )
        records, received = ffi.new("tu_record_t[]", RECORDS), ffi.new("tu_received_t *")
        host, mine, theirs = lib.TU_MEMORY_HOST, self.mine, self.theirs

        def finish(verdict: int) -> None:
            if verdict < 0:
                raise RuntimeError(f"UCX said {verdict}")
            while verdict > 0 and not lib.tu_poll(worker, records, RECORDS):
                pass

        def send() -> None:
            finish(lib.tu_tag_send_one(endpoint, source, size, host, mine))

        def receive() -> None:
            finish(lib.tu_tag_receive_one(worker, into, size, host, theirs, FULL, received))

        return send, receive

    async def ping(self, batch: Batch) -> list[int]:
        self.last = self.buffer
        send, receive = self._calls(self.payload)
        times, _ = ping_blocking(send, receive, batch.count)
        return times

    async def echo(self, batch: Batch) -> None:
        self.last = self.buffer
        send, receive = self._calls(self.buffer)
        for _ in range(batch.count):
            receive()
            send()
