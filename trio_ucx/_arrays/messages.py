"""Arrays to messages, and messages to arrays.

A message that is as long as expected is written directly into the arrays of the caller, and then its header is compared
with the expected one. Everything else (another order, an array that is not contiguous, short messages) is first in
memory of the library, and is copied. Without arrays of the caller, the arrays are views of one block of memory that is
as long as the message.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, Protocol

import trio

from .._errors import UnexpectedMessage
from .._native import ffi
from ..ucp._internal_api import Buffer, Engine, Pinned, pin
from .describe import Described, describe
from .header import PREFIX_SIZE, ArraysLayout, BadHeader, decode, encode, header_size, numpy_dtype

#: Up to so many bytes, a message is copied rather than gathered or scattered: that is faster.
COPIED = 8192

#: Returns writable host memory of at least so many bytes.
Allocate = Callable[[int], Any]
#: One array, a list of arrays, or a dict of them by name.
Arrays = Any


def _named(arrays: Mapping[str, Any] | Sequence[Any], what: str) -> tuple[tuple[str, ...] | None, list[Any]]:
    """Returns the names of a dict of arrays (None for a list), and the arrays."""
    if isinstance(arrays, Mapping):
        wrong = next((name for name in arrays if type(name) is not str), None)
        if wrong is not None:
            raise TypeError(f"the names of {what} must be strings, not {wrong!r}")
        return tuple(arrays), list(arrays.values())
    if isinstance(arrays, (list, tuple)):
        return None, list(arrays)
    raise TypeError(f"{what} must be a list or a dict of arrays, not {type(arrays).__name__}; see send_array for one")


# ---- sending ----


def message_of(array: Any) -> Buffer:
    """Returns the message with one array."""
    return _message(True, None, [array])


def message_of_many(arrays: Mapping[str, Any] | Sequence[Any]) -> Buffer:
    """Returns the message with a list or a dict of arrays."""
    return _message(False, *_named(arrays, "arrays"))


def _message(single: bool, names: tuple[str, ...] | None, arrays: Sequence[Any]) -> Buffer:
    described = [_contiguous(describe(array, "send")) for array in arrays]
    head, layout = _header_of(single, names, described)
    buffers = (_bytes_of(one.buffer) if one.on_device else one.buffer for one in described)
    parts = [head, *_spread(layout, buffers, bytes)]
    return b"".join(parts) if layout.size <= COPIED and all(one.joins for one in described) else parts


def _header_of(
    single: bool, names: tuple[str, ...] | None, described: Sequence[Described]
) -> tuple[bytes, ArraysLayout]:
    try:
        return encode(single, names, tuple(one.kind for one in described))
    except BadHeader as error:  # of the caller's arrays: rpc tells clients the name of the exception
        raise ValueError(str(error)) from None


def _spread(layout: ArraysLayout, buffers: Iterable[Any], gap: Callable[[int], Any]) -> Iterator[Any]:
    """Yields the buffers with arrays, and what is between them in a message: zeros, which ``gap`` makes."""
    position = layout.header_size
    for buffer, offset, size in zip(buffers, layout.offsets, layout.sizes, strict=True):
        if offset > position:
            yield gap(offset - position)
        if size:
            yield buffer
        position = offset + size


def _contiguous(described: Described) -> Described:
    if described.buffer is not None:
        return described
    import numpy

    return describe(numpy.ascontiguousarray(described.array), "send")


def _bytes_of(buffer: Any) -> bytes:
    """Returns a copy of a device's memory: a message has one kind of memory, and the header is in the host's."""
    pins = Pinned(buffer)
    try:
        return pins.copy(pins.size)
    finally:
        pins.release()


def pack(array: Any) -> bytes:
    """Returns a copy of the message with one array."""
    message = message_of(array)
    return message if isinstance(message, bytes) else b"".join(message)  # type: ignore[arg-type]


def unpack(message: bytes) -> Any:
    """Returns the array of a message of which nobody has another reference: the array is a view of it.

    Raises:
        UnexpectedMessage: the message is no such array.
    """
    target = FreshTarget(True)
    error = target.look(message)
    if error is not None:
        raise error
    return target.value


# ---- receiving into arrays of the caller ----


class ArraysTarget:
    """Receives into arrays of the caller's: a ``_link.receiving.ReceiveTarget``.

    Args:
        engine: of the connection.
        out: the caller's array, list or dict, which is what the receive returns.

    Raises:
        TypeError, ValueError: they are no writable arrays.
    """

    def __init__(self, engine: Engine, single: bool, out: Arrays) -> None:
        names, arrays = (None, [out]) if single else _named(out, "the arrays to receive into")
        self.value = out
        self.pins: Pinned | None = None
        self._described = [describe(array, "receive into") for array in arrays]
        self._head, self._layout = _header_of(single, names, self._described)
        self._found = bytearray(len(self._head))
        if all(one.buffer is not None and not one.on_device for one in self._described):
            parts = _spread(self._layout, [one.buffer for one in self._described], bytearray)
            self.pins = pin(engine, [self._found, *parts], writable=True, copies=True)

    def fits(self, length: int) -> bool:
        return self.pins is not None and length == self._layout.size > COPIED

    def look(self, contents: bytes | None) -> Exception | None:
        if contents is None:
            return None if self._found == self._head else UnexpectedMessage("other arrays")
        if self.pins is not None and len(contents) == self._layout.size and contents.startswith(self._head):
            self.pins.fill(memoryview(contents))
            return None
        try:
            found = layout_of(contents)
            sources = self._sources(found)
            for source, one in zip(sources, self._described, strict=True):
                _copy(found, source, one, contents)
        except (_Mismatch, ImportError) as error:
            return UnexpectedMessage(f"{error}; it was not taken")
        return None

    def _sources(self, found: ArraysLayout) -> list[int]:
        """Returns which array of the message each of the caller's arrays gets.

        Raises:
            _Mismatch: they do not go together.
        """
        wanted = self._layout
        problem = f"the message is {found}, and is to be received into {wanted}"
        if (found.single, len(found.arrays)) != (wanted.single, len(wanted.arrays)):
            raise _Mismatch(problem)
        sources = list(range(len(found.arrays)))
        if found.names is not None and wanted.names is not None:
            places = {name: place for place, name in enumerate(found.names)}
            sources = [places.get(name, -1) for name in wanted.names]
        elif found.names is not wanted.names:
            raise _Mismatch(problem)
        for source, one in zip(sources, self._described, strict=True):
            kind = None if source < 0 else found.arrays[source]
            if kind is None or (kind.dtype, kind.shape) != (one.kind.dtype, one.kind.shape):
                raise _Mismatch(problem)
            if not one.is_numpy and kind.order != one.kind.order:
                raise _Mismatch(
                    f"the message has an array of {kind}, and is to be received into one of {one.kind}: only numpy's "
                    "arrays can be converted"
                )
        return sources


def _copy(found: ArraysLayout, source: int, one: Described, contents: bytes) -> None:
    start, size = found.offsets[source], found.sizes[source]
    if one.is_numpy:
        one.array[...] = _view(found, source, contents)
    elif size:
        pins = Pinned(one.buffer, writable=True)
        try:
            pins.fill(memoryview(contents)[start : start + size])
        finally:
            pins.release()


class _Mismatch(Exception):
    """A message is not what is to be received."""


# ---- receiving into fresh memory ----


class FreshTarget:
    """Receives into memory; the arrays, its value, are views of that. A ``_link.receiving.ReceiveTarget``.

    Args:
        memory: memory of the caller's, for a message of this length; None: that of the message itself.
        pins: the same, pinned.
    """

    def __init__(self, single: bool, memory: memoryview | None = None, pins: Pinned | None = None) -> None:
        self._single = single
        self._memory = memory
        self.pins = pins
        self.value: Any = None

    def fits(self, length: int) -> bool:
        return self.pins is not None and length == self.pins.size

    def look(self, contents: bytes | None) -> Exception | None:
        memory: Any = self._memory
        if contents is not None:
            # Nobody else has these bytes, which were made for the message, so they may become writable.
            memory = ffi.buffer(ffi.from_buffer("char[]", contents))
            if self._memory is not None and len(contents) == len(self._memory):
                memory = self._memory
                memory[:] = contents
        assert memory is not None
        try:
            layout = layout_of(memory)
            if layout.single != self._single:
                right = "receive_array" if layout.single else "receive_arrays"
                raise _Mismatch(f"the message is {layout}: call {right}")
            views = [_view(layout, index, memory) for index in range(len(layout.arrays))]
        except (_Mismatch, ImportError) as error:
            return UnexpectedMessage(f"{error}; it was not taken")
        if self._single:
            self.value = views[0]
        else:
            self.value = views if layout.names is None else dict(zip(layout.names, views, strict=True))
        return None


class ReceivedBuffers(tuple[memoryview, ...]):
    """The bytes of each array at the end of a message, from ``start`` on, as writable memory.

    Nobody may have another reference to that part of the message.

    Raises:
        BadHeader: it does not end with a list of arrays.
        ImportError: see :func:`header.decode`.
    """

    _memory: memoryview
    _layout: ArraysLayout

    def __new__(cls, message: bytes, start: int) -> ReceivedBuffers:
        memory = memoryview(ffi.buffer(ffi.from_buffer("char[]", message)))[start:]
        layout = _layout_of(memory)
        if layout.single or layout.names is not None:
            raise BadHeader("no list of arrays")
        offsets = zip(layout.offsets, layout.sizes, strict=True)
        self = super().__new__(cls, (memory[offset : offset + size] for offset, size in offsets))
        self._memory, self._layout = memory, layout
        return self

    def arrays(self) -> list[Any]:
        """Returns them as numpy's arrays, which are views.

        Raises:
            ImportError: numpy is missing, or ml_dtypes.
            UnexpectedMessage: numpy has no such array.
        """
        _require_numpy()
        try:
            return [_view(self._layout, index, self._memory) for index in range(len(self))]
        except _Mismatch as error:
            raise UnexpectedMessage(str(error)) from None


def _block(memory: Any, size: int) -> memoryview:
    """Returns the first bytes of what ``allocate`` has returned.

    Raises:
        TypeError, ValueError: it is no writable host memory, or too short.
    """
    try:
        view = memoryview(memory)
    except TypeError:
        raise TypeError(f"allocate must return writable host memory, not {type(memory).__name__}") from None
    if view.readonly or not view.c_contiguous:
        raise TypeError("allocate must return writable contiguous memory")
    if view.nbytes < size:
        raise ValueError(f"allocate({size}) has returned {view.nbytes} bytes")
    return view.cast("B")[:size]


def layout_of(message: Any) -> ArraysLayout:
    """Returns what the header of a message says, which describes exactly this message.

    Raises:
        _Mismatch: it has no such header.
        ImportError: see :func:`header.decode`.
    """
    try:
        return _layout_of(message)
    except BadHeader as error:
        raise _Mismatch(
            f"the message, of {len(message)} bytes, has no arrays ({error}): call receive for its bytes"
        ) from None


def _layout_of(message: Any) -> ArraysLayout:
    """Returns what the header of a message says.

    Raises:
        BadHeader: it has no such header.
        ImportError: see :func:`header.decode`.
    """
    size = header_size(bytes(message[:PREFIX_SIZE]), len(message))
    layout = decode(bytes(message[:size]))
    if layout.size != len(message):
        raise BadHeader(f"its header describes {layout.size} bytes")
    return layout


def _view(layout: ArraysLayout, index: int, memory: Any) -> Any:
    """Returns an array in the memory of a message.

    Raises:
        _Mismatch: numpy has no such array.
        ImportError: numpy is missing, or ml_dtypes.
    """
    import numpy

    kind = layout.arrays[index]
    try:
        dtype = numpy_dtype(kind.dtype)
        return numpy.ndarray(kind.shape, dtype, memory, layout.offsets[index], order=kind.order)
    except (ValueError, TypeError, OverflowError, MemoryError) as error:
        raise _Mismatch(f"numpy has no such array ({kind}): {error}") from error


class SupportsReceive(Protocol):
    """What receives from a tag queue: a ``_link.link.Link``."""

    engine: Engine

    @property
    def receiving(self) -> Any: ...
    async def wait_message(self, number: int) -> int: ...
    async def receive_suitable(self, number: int, target: Any) -> Any: ...


async def receive(
    link: SupportsReceive, number: int, check: Callable[[], None], single: bool, into: Arrays, allocate: Allocate | None
) -> Any:
    """Receives the next message of a tag queue, which has arrays.

    Args:
        check: raises an error if nothing can be received.
        single: whether it must be one array, not a list or dict of them.
        into: arrays of the caller's; None: fresh ones.
        allocate: returns memory for a message of so many bytes.
    """
    target: ArraysTarget | FreshTarget
    if into is not None:
        if allocate is not None:
            raise TypeError("receive into arrays of yours, or give allocate, not both")
        target = ArraysTarget(link.engine, single, into)
    else:
        _require_numpy()
        if allocate is not None and not callable(allocate):
            raise TypeError(f"allocate must be a function of a number of bytes, not {type(allocate).__name__}")
        target = FreshTarget(single)
    try:
        await trio.lowlevel.checkpoint_if_cancelled()
        check()
        size = 0 if allocate is None else await link.wait_message(number)
        check()
        if allocate is not None and size <= link.receiving.max_message_size:  # else it will be dropped
            memory = _block(allocate(size), size)
            check()
            target = FreshTarget(single, memory, pin(link.engine, memory, writable=True))
    except BaseException:
        if target.pins is not None:
            target.pins.release()
        raise
    return await link.receive_suitable(number, target)


def _require_numpy() -> None:
    try:
        import numpy  # noqa: F401
    except ImportError:
        raise ImportError(
            "arrays are received as numpy's: install numpy, or receive into arrays of yours, of whatever kind"
        ) from None
