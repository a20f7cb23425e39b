"""An active message that arrived: its data, wherever that is, until it was received or released."""

from __future__ import annotations

from typing import Any

import attrs
import trio
from trio.lowlevel import enable_ki_protection

from .._native import ffi, lib
from .._util.handles import ConflictDetector, OpenedNotConstructed, warn_resource
from ._endpoint import Endpoint
from ._engine.borrowed import Borrowed
from ._engine.engine import Engine
from ._engine.operations import Operation
from ._engine.posting import check_reaches, completed, pending_operation
from ._memory.buffers import Buffer, Pinned, WritableBuffer, new_bytes
from ._status import MessageTooLong, Status


class Arrival:
    """A message that was taken from the queue: owns UCX's part of it, until released."""

    def __init__(self, engine: Engine, native: Any) -> None:
        self.engine = engine
        self.id = engine.next_id()
        self.native: Any = native  # None once UCX's part has ended
        self.length: int = native.length
        self.sender: int = native.endpoint
        self.rendezvous: bool = native.kind == lib.TU_AM_RENDEZVOUS
        self.header = bytes(ffi.buffer(native.header, native.header_length)) if native.header_length else b""
        self.borrowed: Borrowed | None = None
        self.copied: bytes | None = None
        if native.kind == lib.TU_AM_BORROWED:
            self.borrowed = Borrowed(engine, int(ffi.cast("uintptr_t", native.data)), self.length, self._release_native)
        elif self.rendezvous:
            engine.teardown.children[self.id] = self.release
        else:
            self.copied = bytes(ffi.buffer(native.data, self.length)) if self.length else b""
            self._release_native()

    def _release_native(self) -> None:
        native, self.native = self.native, None
        lib.tu_am_release(self.engine.handle, native)

    def release(self) -> None:
        """Gives up what has not been received. Released already: no effect.

        Raises:
            BufferError: something made from the data is still in use.
            RuntimeError: another thread.
        """
        if self.borrowed is not None:
            self.borrowed.end()
        elif self.native is not None:
            self.engine.run.check_thread()
            self.engine.teardown.children.pop(self.id, None)
            if self.engine.usable:
                self._release_native()

    def drop(self) -> None:
        if self.borrowed is not None:
            self.borrowed.drop()
        else:
            self.release()

    def take(self) -> Any:
        """UCX's message, which an operation owns from now on."""
        native, self.native = self.native, None
        self.engine.teardown.children.pop(self.id, None)
        return native


class _ReceiveData(Operation):
    """A rendezvous under way. Its value is the message's length."""

    __slots__ = ("length", "native")

    def __init__(self, engine: Engine, id: int, pins: Pinned | None, doing: str, native: Any, length: int) -> None:
        super().__init__(engine, id, pins, doing)
        self.native = native
        self.length = length

    def complete(self, status: int, length: int, tag: int) -> None:
        lib.tu_am_forget(self.native)
        super().complete(status, length, tag)

    def value(self, length: int, tag: int) -> int:
        return self.length


@attrs.define(eq=False, repr=False)
class ActiveMessage(metaclass=OpenedNotConstructed):
    """An active message that arrived. Receive it, or release it; a context manager that releases.

    Attributes:
        id: the id that it was sent to.
        header: its header.
        length: the bytes of its data.
        rendezvous: whether the data is still with the sender, and only :meth:`receive` and :meth:`receive_into` get it.
    """

    id: int
    header: bytes
    length: int
    rendezvous: bool
    _arrival: Arrival
    _max_size: int
    _operation: Operation | None = None
    _target: Any = None
    _received: bool = False
    _guard: ConflictDetector = attrs.field(factory=lambda: ConflictDetector("another task is receiving this message"))

    @property
    def reply_endpoint(self) -> Endpoint | None:
        """Our endpoint to the sender, if the sender asked for a reply.

        None if it did not, if that endpoint was closed, and if the sender connected by worker address to a worker that
        has opened no endpoint to it: what UCX has then, it may take away at any time.
        """
        endpoint: Endpoint | None = self._arrival.engine.user_endpoint(self._arrival.sender)
        return endpoint

    @property
    def data(self) -> memoryview:
        """The data of an eager message, read-only, where it arrived and not copied. It ends with :meth:`release`.

        Raises:
            ValueError: a rendezvous; or the message was released, or received.
        """
        if self.rendezvous:
            raise ValueError("the data of a rendezvous is with the sender: receive it")
        arrival = self._arrival
        if arrival.borrowed is not None and not arrival.borrowed.ended:
            return arrival.borrowed.view
        if arrival.copied is not None:
            return memoryview(arrival.copied)
        raise self._gone()

    def _gone(self) -> ValueError:
        return ValueError("this message was received or released already")

    @enable_ki_protection
    async def receive(self) -> bytes:
        """Receives the data (``ucp_am_recv_data_nbx``), and releases the message.

        Cancellation: the message can be received again; a rendezvous that has begun goes on.

        Raises:
            ValueError: the message was received, released, or its worker closed; it is being received into a buffer.
            MessageTooLong: it is longer than the queue's ``max_message_size``. It can be received into a buffer, or
                released.
            MemoryError: there is no memory for that now. It can be received later, or released.
            BufferError: something made from :attr:`data` is still in use; the message stays.
            trio.BusyResourceError: another task is receiving it.
            trio.BrokenResourceError: the sender was lost before all had arrived; the worker broke.
            trio.ClosedResourceError: the worker was closed meanwhile.
        """
        await trio.lowlevel.checkpoint_if_cancelled()
        if self._operation is None and self.length > self._max_size:
            text = f"receiving a message of {self.length} bytes, more than the max_message_size of {self._max_size}"
            raise MessageTooLong(self.length, self._max_size, text)
        if not self.rendezvous:
            data = bytes(self.data)
            self._end()
            await trio.lowlevel.cancel_shielded_checkpoint()
            return data
        if self._operation is None:
            self._begin(new_bytes(self.length), writable=False)
        elif not isinstance(self._target, bytes):
            raise ValueError("this message is being received into a buffer: go on with receive_into and that buffer")
        target = self._target
        await self._finish()
        assert isinstance(target, bytes)
        return target

    @enable_ki_protection
    async def receive_into(self, buffer: WritableBuffer) -> int:
        """Receives the data into a writable buffer, or a list of them (``ucp_am_recv_data_nbx``); returns the length.

        Cancellation: the message can be received again; a rendezvous that has begun goes on, into the same buffer,
        which stays pinned, and which the next call must be given.

        Raises:
            TypeError: not a writable contiguous buffer.
            MessageTooLong: it is longer than the buffer. It can be received into a larger one, or released.
            ValueError: the message was received, released, or its worker closed; it is being received into another
                buffer.
            MemoryError, BufferError, trio.BusyResourceError, trio.BrokenResourceError, trio.ClosedResourceError: as
                for :meth:`receive`.
        """
        await trio.lowlevel.checkpoint_if_cancelled()
        if self._operation is not None:
            if buffer is not self._target:
                raise ValueError("this message is being received into another buffer: go on with that one")
            await self._finish()
            return self.length
        if not self.rendezvous:
            with memoryview(self.data) as data:
                pins = self._pin(buffer, writable=True)
                pins.fill(data)
            pins.release()
            self._end()
            await trio.lowlevel.cancel_shielded_checkpoint()
            return self.length
        self._begin(buffer, writable=True)
        await self._finish()
        return self.length

    def _pin(self, buffer: Buffer, *, writable: bool) -> Pinned:
        pins = Pinned(buffer, writable=writable)
        if pins.size < self.length:
            size = pins.size
            pins.release()
            text = f"a message of {self.length} bytes does not fit into a buffer of {size}; it stays"
            raise MessageTooLong(self.length, size, text)
        return pins

    def _begin(self, buffer: Buffer, *, writable: bool) -> None:
        arrival = self._arrival
        engine = arrival.engine
        if arrival.native is None or self._received:
            raise self._gone()
        engine.check()
        pins = self._pin(buffer, writable=writable)
        try:
            check_reaches(engine, pins)
            buffers = pins.native_list()
        except BaseException:
            pins.release()
            raise
        native = arrival.native
        verdict = lib.tu_am_receive(engine.handle, native, buffers)
        if verdict != Status.NO_MEMORY:  # without memory nothing has happened
            arrival.take()
            self._received = True
            self._target = buffer
            if verdict <= 0:
                lib.tu_am_forget(native)
        self._operation = pending_operation(
            engine,
            verdict,
            pins,
            "receiving an active message",
            kind=lambda engine, id, pins, doing, _: _ReceiveData(engine, id, pins, doing, native, self.length),
        )

    async def _finish(self) -> None:
        """Waits for the rendezvous; a cancelled wait leaves it going on."""
        operation = self._operation
        if operation is None:
            self._target = None
            await trio.lowlevel.cancel_shielded_checkpoint()
            return
        with self._guard:
            await completed(operation, self._arrival.engine, watch=True)
        self._operation = self._target = None

    @enable_ki_protection
    def release(self) -> None:
        """Gives up what has not been received (``ucp_am_data_release``). Released or received already: no effect.

        The sender of a rendezvous is told that it was received: UCX has no other answer.

        Raises:
            BufferError: something made from :attr:`data` is still in use.
            RuntimeError: another thread.
        """
        self._end()

    def _end(self) -> None:
        self._arrival.release()
        self._arrival.copied = None

    def __enter__(self) -> ActiveMessage:
        return self

    @enable_ki_protection
    def __exit__(self, *exc_info: object) -> None:
        self.release()

    def __del__(self) -> None:
        arrival = self._arrival
        if arrival.native is not None and arrival.engine.handle is not None:
            if self.rendezvous:
                warn_resource(f"{self!r} was neither received nor released", self)
            arrival.engine.run.call_soon(arrival.drop)

    def __repr__(self) -> str:
        kind = "rendezvous" if self.rendezvous else "eager"
        return f"<trio_ucx.ucp.ActiveMessage id {self.id}, {kind}, {self.length} bytes>"
