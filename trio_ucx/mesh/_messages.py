"""What ranks say to each other besides the program's own messages: JSON objects, one in a message.

================  ===========  =====================================================================================
message           direction    meaning
================  ===========  =====================================================================================
:class:`RankHello`    both         the first message of a connection: which rank opens it
:class:`Welcome`  rank 0 to r  all ranks are there, and these are their addresses
:class:`RankAnswer`   both         whether the sender of :class:`RankHello` is wanted, and if not, why
:class:`Suspect`  r to rank 0  this rank cannot reach that one
:class:`Leaving`  r to rank 0  this rank leaves the group
:class:`Left`     rank 0 to r  ranks have left
:class:`Lost`     rank 0 to r  a rank was lost
:class:`Joined`   rank 0 to r  a new process has joined under the number of a lost rank
:class:`Heard`    both         rank r has heard of a generation; from rank 0: all ranks have
================  ===========  =====================================================================================
"""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any, TypeAlias, get_args

import attrs

from .._util.text import printable
from ._variables import MAX_SIZE

#: An address as rank 0 knows it. A host of "" is rank 0's own host, which each rank knows by another address.
Address = tuple[str, int]

#: Seconds: the longest time for which a rank can say that it will wait.
LONGEST_WAIT = 1e9
#: The highest number; characters of a text, which is cut.
_HIGHEST, _LONGEST_TEXT = 2**31 - 1, 2**16


@attrs.frozen
class RankHello:
    """The first message on a connection: a rank says who it is, to rank 0 or to another rank.

    Attributes:
        rank: who says it.
        to: whom it wants to speak to.
        size: how many ranks it expects.
        port: where it listens.
        seconds: how long it will wait for a :class:`Welcome`.
        on_loss: its argument of ``join``, which must be the same for all.
        group: the group's name; "" to rank 0, which gives it.
        member: in which generation it joined; 0 to rank 0.
        host, pid: for messages to people.
    """

    rank: int
    to: int
    size: int
    port: int = 0
    seconds: float = 0
    on_loss: str = ""
    group: str = ""
    member: int = 0
    host: str = ""
    pid: int = 0


@attrs.frozen
class Welcome:
    """Rank 0 lets a rank in, and says where all ranks are.

    Attributes:
        group: a name that no other group has.
        generation: how many processes have joined under the numbers of lost ranks.
        addresses: by rank; None only for lost ones.
        members: by rank, the generation in which it joined.
        lost: by rank, the reasons.
    """

    group: str
    generation: int
    addresses: list[Address | None]
    members: dict[int, int]
    lost: dict[int, str]


@attrs.frozen
class RankAnswer:
    """The answer of a rank other than 0 to :class:`RankHello`, and of rank 0 where it refuses.

    Attributes:
        refused: why not; "" if the connection is wanted.
        missing: ranks that did not come.
        crossed: whether another connection between the two ranks is the one that will be used.
        later: whether the reason may pass: the group of before is not over yet.
    """

    refused: str = ""
    missing: tuple[int, ...] = ()
    crossed: bool = False
    later: bool = False


@attrs.frozen
class Suspect:
    """A rank tells rank 0 that it cannot reach another one.

    Attributes:
        member: the generation in which the suspected process joined; another one may have its number.
    """

    rank: int
    reason: str
    member: int


@attrs.frozen
class Leaving:
    """A rank tells rank 0 that it leaves the group.

    Attributes:
        error: the exception with which it leaves, in words; "" for none.
    """

    error: str = ""


@attrs.frozen
class Left:
    """Rank 0 tells all which ranks have left the group."""

    ranks: tuple[int, ...]


@attrs.frozen
class Lost:
    """Rank 0 tells all that a rank was lost."""

    rank: int
    reason: str


@attrs.frozen
class Joined:
    """Rank 0 tells all that a new process has joined under the number of a lost rank."""

    rank: int
    generation: int
    address: Address


@attrs.frozen
class Heard:
    """A rank has heard of a generation; from rank 0: all ranks have."""

    generation: int


Message = RankHello | Welcome | RankAnswer | Suspect | Leaving | Left | Lost | Joined | Heard
_Reader: TypeAlias = Callable[[Any, int], Any]
_KINDS: dict[str, type[Any]] = {kind.__name__: kind for kind in get_args(Message)}


def _integer(high: int) -> _Reader:
    def read(value: Any, size: int) -> int:
        if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value <= high:
            raise ValueError(f"not an integer from 0 to {high}")
        return int(value)

    return read


def _rank(value: Any, size: int) -> int:
    return int(_integer(size - 1)(value, size))


def _seconds(value: Any, size: int) -> float:
    if type(value) not in (int, float) or not 0 <= value <= LONGEST_WAIT:  # NaN is in no range
        raise ValueError("not a number of seconds")
    return float(value)


def _instance(wanted: type[Any]) -> _Reader:
    def read(value: Any, size: int) -> Any:
        if type(value) is not wanted:
            raise TypeError(f"not a {wanted.__name__}")
        return printable(value, _LONGEST_TEXT) if wanted is str else value

    return read


def _by_rank(read: _Reader) -> _Reader:
    return lambda value, size: {_rank(int(rank), size): read(one, size) for rank, one in value.items()}


def _address(value: Any, size: int) -> Address:
    host, port = value
    return _text(host, size), _port(port, size)


def _addresses(value: Any, size: int) -> list[Address | None]:
    if len(value) > size:
        raise ValueError(f"more addresses than {size} ranks have")
    return [None if one is None else _address(one, size) for one in value]


def _ranks(value: Any, size: int) -> tuple[int, ...]:
    return tuple(_rank(one, size) for one in _instance(list)(value, size))


_number, _port, _text, _flag = _integer(_HIGHEST), _integer(65535), _instance(str), _instance(bool)
#: By the name of a field: returns the value of what JSON has for it, given the size of the group, or raises an error.
_READERS: dict[str, _Reader] = {
    **dict.fromkeys(("to", "size", "member", "generation", "pid"), _number),
    **dict.fromkeys(("on_loss", "group", "host", "refused", "reason", "error"), _text),
    **dict.fromkeys(("crossed", "later"), _flag),
    **dict.fromkeys(("missing", "ranks"), _ranks),
    "rank": _rank,
    "port": _port,
    "seconds": _seconds,
    "address": _address,
    "addresses": _addresses,
    "members": _by_rank(_number),
    "lost": _by_rank(_text),
}


def encode(message: Message) -> bytes:
    fields = attrs.asdict(message, recurse=False)
    return json.dumps([type(message).__name__, fields], separators=(",", ":")).encode()


def decode(data: bytes, size: int = MAX_SIZE) -> Message:
    """Returns a message to a rank of a group of ``size``. Types and ranges of its fields are right, texts printable.

    Raises:
        ValueError: it is not such a message.
    """
    try:
        name, fields = json.loads(data)
        message: Message = _KINDS[name](**{field: _READERS[field](value, size) for field, value in fields.items()})
        if isinstance(message, Welcome) and any(
            address is None and rank not in message.lost for rank, address in enumerate(message.addresses)
        ):
            raise ValueError("a rank that is not lost has no address")
    except Exception as error:  # whatever a peer can make json and the readers raise
        raise ValueError(f"not a message of trio_ucx.mesh: {data[:100]!r}") from error
    return message
