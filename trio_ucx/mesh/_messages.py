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
from typing import Any, get_args

import attrs

from .._util.text import printable

#: An address as rank 0 knows it. A host of "" is rank 0's own host, which each rank knows by another address.
Address = tuple[str, int]


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
        addresses: by rank; None for a lost one.
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
_KINDS: dict[str, type[Any]] = {kind.__name__: kind for kind in get_args(Message)}


#: What JSON has for a field, by its annotation.
_TYPES: dict[str, type[Any] | tuple[type[Any], ...]] = {"int": int, "float": (int, float), "str": str, "bool": bool}


def encode(message: Message) -> bytes:
    fields = attrs.asdict(message, recurse=False)
    return json.dumps([type(message).__name__, fields], separators=(",", ":")).encode()


def decode(data: bytes) -> Message:
    """Returns a message, whose texts are printable: they get into errors and logs.

    Raises:
        ValueError: it is not such a message.
    """
    try:
        name, fields = _printable(json.loads(data))
        if name == "Welcome":
            for field in ("members", "lost"):
                fields[field] = {int(rank): value for rank, value in fields[field].items()}
            fields["addresses"] = [None if one is None else (str(one[0]), int(one[1])) for one in fields["addresses"]]
        elif name == "RankAnswer":
            fields["missing"] = tuple(fields["missing"])
        elif name == "Left":
            fields["ranks"] = tuple(fields["ranks"])
        elif name == "Joined":
            fields["address"] = (str(fields["address"][0]), int(fields["address"][1]))
        message: Message = _KINDS[name](**fields)
        for field in attrs.fields(_KINDS[name]):
            if not isinstance(getattr(message, field.name), _TYPES.get(str(field.type), object)):
                raise TypeError(field.name)
    except (ValueError, TypeError, KeyError, IndexError, AttributeError, RecursionError) as error:
        raise ValueError(f"not a message of trio_ucx.mesh: {data[:100]!r}") from error
    return message


def _printable(value: Any) -> Any:
    """Returns a value of JSON with all its texts made printable."""
    if isinstance(value, str):
        return printable(value, len(value))
    if isinstance(value, list):
        return [_printable(one) for one in value]
    if isinstance(value, dict):
        return {_printable(name): _printable(one) for name, one in value.items()}
    return value
