"""UCP streams: bytes without message boundaries, each endpoint's its own.

UCX has no backpressure for them, no end of file, and loses what is unread when the peer closes; so what arrives is
taken over at once, into the endpoint's stream buffer. (A :class:`trio_ucx.Connection` has a stream with all three.)
"""

from __future__ import annotations

import attrs
import trio
from trio.lowlevel import enable_ki_protection

from .._native import lib
from .._util.handles import OpenedNotConstructed, warn_resource
from ._engine.endpoint_core import Scope
from ._engine.engine import Engine
from ._engine.operations import Operation
from ._engine.posting import pending_operation, pin
from ._engine.stream_buffer import StreamBuffer, StreamChunk
from ._features import Feature
from ._memory.buffers import Buffer, Pinned, WritableBuffer


@attrs.define(eq=False, repr=False)
class StreamData(metaclass=OpenedNotConstructed):
    """A piece of a stream where UCX received it: no copy. Release it; a context manager that releases."""

    _engine: Engine
    _piece: StreamChunk

    @property
    def data(self) -> memoryview:
        """The bytes, as a read-only memoryview that ends with :meth:`release`."""
        return self._piece.view

    def __len__(self) -> int:
        return len(self._piece.view)

    def __bytes__(self) -> bytes:
        return bytes(self._piece.view)

    @enable_ki_protection
    def release(self) -> None:
        """Gives the memory back (``ucp_stream_data_release``). Released already: no effect.

        Raises:
            BufferError: something made from :attr:`data` is still in use.
            RuntimeError: another thread.
        """
        self._piece.end()

    def __enter__(self) -> StreamData:
        return self

    @enable_ki_protection
    def __exit__(self, *exc_info: object) -> None:
        self.release()

    def __del__(self) -> None:
        borrowed = self._piece.borrowed
        if borrowed is not None and not borrowed.ended and self._engine.handle is not None:
            warn_resource(f"unreleased {self!r}", self)
            self._engine.run.call_soon(borrowed.drop)

    def __repr__(self) -> str:
        try:
            return f"<trio_ucx.ucp.StreamData, {len(self)} bytes>"
        except ValueError:
            return "<trio_ucx.ucp.StreamData, released>"


def post_stream_send(core: Scope, data: Buffer) -> Operation | None:
    """Posts a send; None when UCX has taken the data already."""
    core.engine.check()
    core.check()
    core.require(Feature.STREAM, "sending on a UCP stream")
    pins = pin(core.engine, data)
    core.operations.unflushed = True
    verdict = lib.tu_stream_send(core.handle, pins.native_list())
    return pending_operation(core.engine, verdict, pins, "sending on a UCP stream", core)


class StreamReader:
    """One task at a time takes what an endpoint's stream buffer holds, or waits for more."""

    def __init__(self, core: Scope) -> None:
        self._core = core
        self._guard = core.endpoint.stream_guard

    def _open_buffer(self) -> StreamBuffer:
        core = self._core
        core.engine.check()
        core.require(Feature.STREAM, "receiving from a UCP stream")
        stream_buffer = core.endpoint.open_stream_buffer()
        if core.handle is None and core.error is None:
            core.check()  # we closed it
        return stream_buffer

    async def _wait(self, stream_buffer: StreamBuffer) -> None:
        core = self._core
        core.check()
        await stream_buffer.wait()

    async def receive_into(self, buffer: WritableBuffer, exact: bool) -> int:
        pins = Pinned(buffer, writable=True)
        try:
            with self._guard:
                await trio.lowlevel.checkpoint_if_cancelled()
                stream_buffer = self._open_buffer()
                received = stream_buffer.take_into(pins, 0)
                try:
                    while received < (pins.size if exact else min(pins.size, 1)):
                        await self._wait(stream_buffer)
                        received += stream_buffer.take_into(pins, received)
                except BaseException:
                    stream_buffer.put_back(pins.copy(received))
                    raise
        finally:
            pins.release()
        await self._core.engine.waiting.schedule_point()
        return received

    async def receive_some(self) -> StreamData:
        with self._guard:
            await trio.lowlevel.checkpoint_if_cancelled()
            stream_buffer = self._open_buffer()
            while not stream_buffer.size:
                await self._wait(stream_buffer)
            data: StreamData = StreamData._create(self._core.engine, stream_buffer.take())
        await self._core.engine.waiting.schedule_point()
        return data
