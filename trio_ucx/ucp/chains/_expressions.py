"""What a request of a chain may depend on: integers and conditions that are computed, in C, from results.

A term is a tuple ``(code, request, low, high, extra)``, as ``tu_term_t`` has it; an expression is a tuple of them in
postfix order. Nothing is evaluated here.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NoReturn

import attrs

from ..._util.arguments import check_integer
from ..._util.handles import OpenedNotConstructed
from .._memory.buffers import Contiguous, Pinned
from ._errors import DependencyReferenceError, NoDependencyResource
from ._library import ffi, lib

Term = tuple[int, int, int, int, int]

_WORD = 2**64 - 1
#: More than any offset, length or limit.
UNLIMITED = 2**62
#: Terms that take a value away, and put none in its place.
_COMBINING = range(lib.TU_TERM_ADD, lib.TU_TERM_NOT)


def constant(value: int) -> tuple[Term, ...]:
    return ((lib.TU_TERM_CONSTANT, 0, value & _WORD, value >> 64 & _WORD, 0),)


def depth(terms: Iterable[Term]) -> int:
    """Returns how many values evaluating it takes at once."""
    deepest = used = 0
    for code, *_ in terms:
        if code in _COMBINING:
            used -= 1
        elif code != lib.TU_TERM_NOT:
            used += 1
        deepest = max(deepest, used)
    return deepest


@attrs.frozen(eq=False, repr=False)
class Expression:
    _terms: tuple[Term, ...]
    #: What it refers to.
    _requests: frozenset[ChainRequest]
    #: Local memory that it refers to.
    _pins: tuple[Pinned, ...] = ()

    def __attrs_post_init__(self) -> None:
        if depth(self._terms) > lib.TU_TERM_DEPTH:
            raise NoDependencyResource(
                f"this expression needs more than {lib.TU_TERM_DEPTH} values at once: compute part of it in an "
                "earlier request, or nest less to the right"
            )

    def __bool__(self) -> NoReturn:
        raise TypeError(
            "what a chain's results are is known only when it runs: combine conditions with & | ~, not and, or, not"
        )


class Condition(Expression):
    """What a result is compared for, evaluated when the chain runs. Combine with ``&``, ``|`` and ``~``."""

    def _with(self, other: Condition, code: int) -> Condition:
        if not isinstance(other, Condition):
            return NotImplemented
        terms = (*self._terms, *other._terms, (code, 0, 0, 0, 0))
        return Condition(terms, self._requests | other._requests, self._pins + other._pins)

    def __and__(self, other: Condition) -> Condition:
        return self._with(other, lib.TU_TERM_AND)

    def __or__(self, other: Condition) -> Condition:
        return self._with(other, lib.TU_TERM_OR)

    def __invert__(self) -> Condition:
        return Condition((*self._terms, (lib.TU_TERM_NOT, 0, 0, 0, 0)), self._requests, self._pins)

    def __repr__(self) -> str:
        return f"<trio_ucx.ucp.chains.Condition of {len(self._terms)} terms>"


@attrs.frozen(eq=False, repr=False)
class Integer(Expression):
    """An integer out of a result, or computed from some, when the chain runs.

    It is exact within 128 bits, signed, and wraps around beyond. With an unsigned integer of 128 bits in it, it is
    unsigned, and so is what it is compared with. Operators: ``+ - * & | ^ ~ << >>``, and the comparisons, which make a
    :class:`Condition`.
    """

    #: Whether an unsigned integer of 128 bits is in it.
    _wide: bool = False

    def _with(self, other: Integer | int, code: int, *, reverse: bool = False) -> Integer:
        right = as_integer(other)
        left = self
        if reverse:
            left, right = right, left
        terms = (*left._terms, *right._terms, (code, 0, 0, 0, 0))
        return Integer(
            terms, left._requests | right._requests, left._pins + right._pins, wide=left._wide or right._wide
        )

    def __add__(self, other: Integer | int) -> Integer:
        return self._with(other, lib.TU_TERM_ADD)

    def __radd__(self, other: int) -> Integer:
        return self._with(other, lib.TU_TERM_ADD, reverse=True)

    def __sub__(self, other: Integer | int) -> Integer:
        return self._with(other, lib.TU_TERM_SUBTRACT)

    def __rsub__(self, other: int) -> Integer:
        return self._with(other, lib.TU_TERM_SUBTRACT, reverse=True)

    def __mul__(self, other: Integer | int) -> Integer:
        return self._with(other, lib.TU_TERM_MULTIPLY)

    def __rmul__(self, other: int) -> Integer:
        return self._with(other, lib.TU_TERM_MULTIPLY, reverse=True)

    def __and__(self, other: Integer | int) -> Integer:
        return self._with(other, lib.TU_TERM_AND)

    def __rand__(self, other: int) -> Integer:
        return self._with(other, lib.TU_TERM_AND, reverse=True)

    def __or__(self, other: Integer | int) -> Integer:
        return self._with(other, lib.TU_TERM_OR)

    def __ror__(self, other: int) -> Integer:
        return self._with(other, lib.TU_TERM_OR, reverse=True)

    def __xor__(self, other: Integer | int) -> Integer:
        return self._with(other, lib.TU_TERM_XOR)

    def __rxor__(self, other: int) -> Integer:
        return self._with(other, lib.TU_TERM_XOR, reverse=True)

    def __lshift__(self, other: Integer | int) -> Integer:
        return self._with(_shift(other), lib.TU_TERM_LEFT)

    def __rshift__(self, other: Integer | int) -> Integer:
        return self._with(_shift(other), lib.TU_TERM_RIGHT_UNSIGNED if self._wide else lib.TU_TERM_RIGHT)

    def __rlshift__(self, other: int) -> Integer:
        return as_integer(other) << self

    def __rrshift__(self, other: int) -> Integer:
        return as_integer(other) >> self

    def __neg__(self) -> Integer:
        return 0 - self

    def __invert__(self) -> Integer:
        return self ^ -1

    def _compared(self, other: object, signed: int, unsigned: int) -> Condition:
        right = as_integer(_comparable(other))
        code = unsigned if self._wide or right._wide else signed
        terms = (*self._terms, *right._terms, (code, 0, 0, 0, 0))
        return Condition(terms, self._requests | right._requests, self._pins + right._pins)

    def __eq__(self, other: object) -> Condition:  # type: ignore[override]
        return self._compared(other, lib.TU_TERM_EQUAL, lib.TU_TERM_EQUAL)

    def __ne__(self, other: object) -> Condition:  # type: ignore[override]
        return self._compared(other, lib.TU_TERM_NOT_EQUAL, lib.TU_TERM_NOT_EQUAL)

    def __lt__(self, other: Integer | int) -> Condition:
        return self._compared(other, lib.TU_TERM_LESS, lib.TU_TERM_LESS_UNSIGNED)

    def __le__(self, other: Integer | int) -> Condition:
        return self._compared(other, lib.TU_TERM_LESS_EQUAL, lib.TU_TERM_LESS_EQUAL_UNSIGNED)

    def __gt__(self, other: Integer | int) -> Condition:
        return ~(self <= other)

    def __ge__(self, other: Integer | int) -> Condition:
        return ~(self < other)

    def __hash__(self) -> int:
        return object.__hash__(self)

    def any_bits(self, mask: Integer | int) -> Condition:
        """Returns the condition that any bit of the mask is set.

        Raises:
            TypeError, ValueError: the mask is no integer, or has more than 128 bits.
            NoDependencyResource: the expression needs too many values at once.
        """
        return (self & mask) != 0

    def all_bits(self, mask: Integer | int) -> Condition:
        """Returns the condition that all bits of the mask are set.

        Raises: as :meth:`any_bits`.
        """
        return (self & mask) == mask

    def pack(self, width: int = 8, *, big: bool = False) -> ResultSlice:
        """Its lowest ``width`` bytes (1 to 16), as payload; with ``big`` the most significant byte first.

        Raises:
            TypeError, ValueError: the width is no integer, or out of range.
        """
        width = check_integer(width, "the width", 1, 16)
        return ResultSlice(lib.TU_PART_INTEGER, None, 0, width, big, self)

    def __repr__(self) -> str:
        return f"<trio_ucx.ucp.chains.Integer of {len(self._terms)} terms>"


@attrs.frozen(eq=False, repr=False)
class ResultSlice:
    """A part of a payload that is known only when the chain runs: bytes of a result, or an integer."""

    _kind: int
    _request: ChainRequest | None
    _offset: int
    length: int
    _big: bool = False
    _value: Integer | None = None

    @property
    def _requests(self) -> frozenset[ChainRequest]:
        """The requests whose results it is made of."""
        if self._value is not None:
            return self._value._requests
        assert self._request is not None
        return frozenset((self._request,))

    @property
    def _pins(self) -> tuple[Pinned, ...]:
        """Local memory that it refers to."""
        return () if self._value is None else self._value._pins

    def __repr__(self) -> str:
        return f"<trio_ucx.ucp.chains.Piece of {self.length} bytes>"


def as_integer(value: Any) -> Integer:
    if isinstance(value, Integer):
        return value
    number = check_integer(value, "an integer", -(2**127), 2**128 - 1)
    return Integer(constant(number), frozenset(), wide=number >= 2**127)


def _comparable(value: object) -> Any:
    if not isinstance(value, Integer) and not hasattr(value, "__index__"):
        raise TypeError(f"a result is compared with an int or with another result, not with a {type(value).__name__}")
    return value


def _shift(value: Integer | int) -> Integer | int:
    return value if isinstance(value, Integer) else check_integer(value, "a shift", 0, 128)


class _Loads:
    """What integers can be taken out of."""

    __slots__ = ()

    def _load(self, offset: int, width: int, flags: int, *, big: bool) -> Integer:
        raise NotImplementedError

    def u8(self, offset: int = 0) -> Integer:
        """An unsigned integer of 1 byte at this offset.

        Raises:
            TypeError, ValueError: the offset is no integer, or negative.
            DependencyReferenceError: beyond the end, or there is no result in host memory.
        """
        return self._load(offset, 1, 0, big=False)

    def u16(self, offset: int = 0, *, big: bool = False) -> Integer:
        """An unsigned integer of 2 bytes; least significant byte first, unless ``big``.

        Raises: as :meth:`u8`.
        """
        return self._load(offset, 2, 0, big=big)

    def u32(self, offset: int = 0, *, big: bool = False) -> Integer:
        """An unsigned integer of 4 bytes.

        Raises: as :meth:`u8`.
        """
        return self._load(offset, 4, 0, big=big)

    def u64(self, offset: int = 0, *, big: bool = False) -> Integer:
        """An unsigned integer of 8 bytes.

        Raises: as :meth:`u8`.
        """
        return self._load(offset, 8, 0, big=big)

    def u128(self, offset: int = 0, *, big: bool = False) -> Integer:
        """An unsigned integer of 16 bytes.

        Raises: as :meth:`u8`.
        """
        return self._load(offset, 16, 0, big=big)

    def i8(self, offset: int = 0) -> Integer:
        """A signed integer (two's complement) of 1 byte.

        Raises: as :meth:`u8`.
        """
        return self._load(offset, 1, lib.TU_LOAD_SIGNED, big=False)

    def i16(self, offset: int = 0, *, big: bool = False) -> Integer:
        """A signed integer of 2 bytes.

        Raises: as :meth:`u8`.
        """
        return self._load(offset, 2, lib.TU_LOAD_SIGNED, big=big)

    def i32(self, offset: int = 0, *, big: bool = False) -> Integer:
        """A signed integer of 4 bytes.

        Raises: as :meth:`u8`.
        """
        return self._load(offset, 4, lib.TU_LOAD_SIGNED, big=big)

    def i64(self, offset: int = 0, *, big: bool = False) -> Integer:
        """A signed integer of 8 bytes.

        Raises: as :meth:`u8`.
        """
        return self._load(offset, 8, lib.TU_LOAD_SIGNED, big=big)

    def i128(self, offset: int = 0, *, big: bool = False) -> Integer:
        """A signed integer of 16 bytes.

        Raises: as :meth:`u8`.
        """
        return self._load(offset, 16, lib.TU_LOAD_SIGNED, big=big)


@attrs.frozen(eq=False, repr=False)
class Local(_Loads, metaclass=OpenedNotConstructed):
    """Memory of ours that a chain looks at when it gets there: by :meth:`.RequestChain.local`."""

    _pins: Pinned
    _address: int
    nbytes: int

    def _load(self, offset: int, width: int, flags: int, *, big: bool) -> Integer:
        offset = check_integer(offset, "the offset in a buffer", 0, UNLIMITED)
        if offset + width > self.nbytes:
            raise DependencyReferenceError(f"bytes {offset} to {offset + width} are beyond a buffer of {self.nbytes}")
        flags |= lib.TU_LOAD_BIG if big else 0
        term = (lib.TU_TERM_LOCAL, 0, self._address + offset, width, flags)
        return Integer((term,), frozenset(), (self._pins,), wide=width == 16 and not flags & lib.TU_LOAD_SIGNED)

    def __repr__(self) -> str:
        return f"<trio_ucx.ucp.chains.Local of {self.nbytes} bytes>"


def local(buffer: Contiguous) -> Local:
    """:meth:`.RequestChain.local`."""
    pins = Pinned(buffer)
    address, nbytes, memory = pinned_memory(pins)
    if memory > lib.TU_MEMORY_HOST:
        pins.release()
        raise TypeError("a chain looks at host memory only")
    made: Local = Local._create(pins, int(ffi.cast("uintptr_t", address)), nbytes)
    return made


@attrs.define(eq=False, repr=False)
class ChainRequest(_Loads, metaclass=OpenedNotConstructed):
    """A request of a :class:`RequestChain`, by which later ones refer to its result.

    Attributes:
        id: its number in the chain, from 0 on.
        name: what it does, for messages.
        size: the most bytes that its result can have, or None if it has none.
    """

    _chain: object
    _generation: int
    id: int
    _kind: int
    name: str
    size: int | None
    #: Whether its result goes to the user's memory.
    _into: bool = False
    #: How much of a result that is still to be sized is referred to.
    _referred: int = 0

    def _location(self, offset: int, length: int) -> int:
        offset = check_integer(offset, "the offset in a result", 0, UNLIMITED)
        if self.size is None and self._into:
            raise DependencyReferenceError(f"the result of {self.name} is not in host memory")
        if self.size is None:
            raise DependencyReferenceError(f"{self.name} has no result to refer to")
        if offset + length > self.size:
            raise DependencyReferenceError(
                f"bytes {offset} to {offset + length} are beyond the result of {self.name}, which has {self.size}"
            )
        self._referred = max(self._referred, offset + length)
        return offset

    def _load(self, offset: int, width: int, flags: int, *, big: bool) -> Integer:
        offset = self._location(offset, width)
        flags |= lib.TU_LOAD_BIG if big else 0
        term = (lib.TU_TERM_LOAD, self.id, offset, width, flags)
        return Integer((term,), frozenset((self,)), wide=width == 16 and not flags & lib.TU_LOAD_SIGNED)

    @property
    def offset(self) -> Integer:
        """Returns where in its memory it has read; for :meth:`RequestChain.follow`, the offset of the last node.

        Raises:
            DependencyReferenceError: it has no result in host memory.
        """
        self._location(0, 0)
        return Integer(((lib.TU_TERM_OFFSET, self.id, 0, 0, 0),), frozenset((self,)))

    def _rest(self, offset: int, length: int | None) -> int:
        if length is not None:
            return check_integer(length, "the length", 0, UNLIMITED)
        if self.size == UNLIMITED:
            raise ValueError("say the length: that of the node is not known yet")
        return max(0, (self.size or 0) - offset)

    def bytes(self, offset: int = 0, length: int | None = None) -> ResultSlice:
        """Bytes of the result, as payload of a later request; by default all from the offset on.

        Raises:
            TypeError, ValueError: the offset or length is no integer, or negative; say the length, it is not known yet.
            DependencyReferenceError: beyond the end, or there is no result in host memory.
        """
        length = self._rest(offset, length)
        return ResultSlice(lib.TU_PART_RESULT, self, self._location(offset, length), length)

    def crc32c(self, offset: int = 0, length: int | None = None) -> Integer:
        """The CRC-32C (Castagnoli) of bytes of the result: to be compared, or written by its :meth:`Integer.pack`.

        Raises: as :meth:`bytes`.
        """
        length = self._rest(offset, length)
        term = (lib.TU_TERM_CRC32C, self.id, self._location(offset, length), length, 0)
        return Integer((term,), frozenset((self,)))

    def equals(self, buffer: Contiguous, offset: int = 0) -> Condition:
        """Returns the condition that the result has at this offset what a local buffer has when the chain gets there.

        The buffer, in host memory, stays pinned as long as the chain refers to it.

        Raises:
            TypeError, ValueError: not a contiguous buffer in host memory; the offset is no integer, or negative.
            DependencyReferenceError: beyond the end, or there is no result in host memory.
        """
        other = local(buffer)
        where = self._location(offset, other.nbytes)
        term = (lib.TU_TERM_SAME, self.id, where, other._address, other.nbytes)
        return Condition((term,), frozenset((self,)), (other._pins,))

    def __repr__(self) -> str:
        return f"<trio_ucx.ucp.chains.ChainRequest {self.name}>"


def pinned_memory(pins: Pinned) -> tuple[Any, int, int]:
    """Address, length and kind of contiguous memory.

    Raises:
        TypeError: it is not contiguous.
    """
    if pins.address is None:
        pins.release()
        raise TypeError("a request chain takes contiguous buffers: pass the parts of a payload as a tuple")
    return ffi.cast("void *", pins.address), pins.size, pins.memory
