"""Finds the place of this process in a mesh: its rank, the size, and where the ranks meet.

Each of them is in the arguments, in trio_ucx's own variables, which ``python -m trio_ucx mesh`` sets, or in those of a
launcher. :func:`find_place` depends on nothing else but a key file, a folder for the address file, and the host name of
a pod.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import attrs

from .._opening.authkey import check_authkey, find_authkey
from .._util.arguments import check_integer
from ._launchers import LAUNCHERS, Machine, recognise
from ._variables import MAX_SIZE, MEETING, RANK, SIZE, Found, Meeting, Variables, parse_meeting

#: What overrides a launcher, as :attr:`Found.name` says it.
_OWN_NAMES = frozenset({RANK, SIZE, MEETING, "the argument rank", "the argument size", "the argument meeting"})


@attrs.frozen
class Place:
    """The place of this process in a mesh.

    Attributes:
        rank: its number, from 0 on.
        size: the number of ranks.
        meeting: where the other ranks learn the address of rank 0.
        authkey: the key that all ranks share.
        source: which launcher and variables said so, for the texts of errors.
        hosts: the host of each rank, or empty if the launcher does not say.
    """

    rank: int
    size: int
    meeting: Meeting
    authkey: bytes | None = attrs.field(repr=False)
    source: str
    hosts: tuple[str, ...] = ()

    def host_of(self, rank: int) -> str | None:
        """The host of a rank; None if the launcher does not say."""
        return self.hosts[rank] if self.hosts else None


_THIS_MACHINE = Machine()


def find_place(
    environment: Mapping[str, str],
    *,
    rank: int | None = None,
    size: int | None = None,
    meeting: str | None = None,
    authkey: bytes | None = None,
    machine: Machine = _THIS_MACHINE,
) -> Place:
    """Finds rank, size and meeting: each in the arguments, in trio_ucx's variables, or in those of a launcher.

    Args:
        environment: usually ``os.environ``.
        rank, size: instead of what the environment says.
        meeting: ``"host:port"``, where rank 0 listens; ``"file:///path"``, which all ranks can read; or ``"mpi"``.
        authkey: instead of the one that :func:`trio_ucx.authkey` finds.

    Raises:
        RuntimeError: the environment does not say enough.
        ValueError: a value is wrong; the text names the variable or argument.
        TypeError: an argument has the wrong type.
        OSError: the key file, or the folder for the address file, cannot be used, or others can.
    """
    variables = Variables(environment)
    launcher = recognise(variables, machine)
    found_rank = _choose("rank", rank, variables, RANK, None if launcher is None else launcher.rank)
    found_size = _choose("size", size, variables, SIZE, None if launcher is None else launcher.size)
    _check(found_rank, found_size)
    found_meeting: Found[Meeting]
    if meeting is not None:
        found_meeting = Found(parse_meeting(meeting), "the argument meeting")
    elif (text := variables.text(MEETING)) is not None:
        found_meeting = Found(_parse_meeting_of(MEETING, text), MEETING)
    elif launcher is not None:
        found_meeting = launcher.meeting()
    else:
        raise _nothing_found(variables, "where the ranks meet")
    names = (found_rank.name, found_size.name, found_meeting.name)
    foreign = [name not in _OWN_NAMES for name in names]
    return Place(
        rank=found_rank.value,
        size=found_size.value,
        meeting=found_meeting.value,
        authkey=find_authkey(environment) if authkey is None else check_authkey(authkey),
        source=f"{launcher.name} ({', '.join(names)})" if launcher is not None and any(foreign) else ", ".join(names),
        hosts=launcher.hosts(found_size.value) if launcher is not None and foreign[0] and foreign[1] else (),
    )


def _choose(
    what: str,
    argument: int | None,
    variables: Variables,
    name: str,
    from_launcher: Callable[[], Found[int]] | None,
) -> Found[int]:
    if argument is not None:
        return Found(check_integer(argument, what, -(2**62), 2**62), f"the argument {what}")
    if variables.text(name) is not None:
        return variables.integer(name)
    if from_launcher is None:
        raise _nothing_found(variables, f"the {what} of this process" if what == "rank" else "the number of ranks")
    return from_launcher()


def _check(rank: Found[int], size: Found[int]) -> None:
    if not 1 <= size.value <= MAX_SIZE:
        raise ValueError(f"{size.name} is {size.value}: the number of ranks is 1 to {MAX_SIZE}")
    if not 0 <= rank.value < size.value:
        raise ValueError(
            f"{rank.name} is {rank.value}, but {size.name} is {size.value}: ranks are 0 to {size.value - 1}"
        )


def _parse_meeting_of(name: str, text: str) -> Meeting:
    try:
        return parse_meeting(text)
    except ValueError as error:
        raise ValueError(f"{name}: {error}") from None


def _nothing_found(variables: Variables, what: str) -> RuntimeError:
    known = [f"{RANK}, {SIZE} and {MEETING}", *(f"{kind.name} ({kind.looks_for})" for kind in LAUNCHERS)]
    given = [name for name in (RANK, SIZE, MEETING) if variables.has(name)]
    also = f" Set: only {' and '.join(given)}." if given else ""
    return RuntimeError(
        f"the environment does not say {what}.{also} Looked for, in this order: {'; '.join(known)}. Start the program "
        "with one of these launchers; or, on one machine, with python -m trio_ucx mesh --ranks 4 program.py; or call "
        "join(rank=, size=, meeting=)"
    )
