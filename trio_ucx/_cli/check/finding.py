"""What a check found, and how findings are printed."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import attrs

from ..._util.text import printable

#: Of what is found, in characters.
_LONGEST = 4000
State = Literal["ok", "warning", "problem"]


@attrs.frozen
class Finding:
    """What a check found.

    Attributes:
        id: names the check; for a transfer, also the transport and the direction.
        state: "ok"; "warning": it works, but worse than it could; "problem": something does not work.
        found: what was found, in words.
        advice: what to do; None if nothing is to be done.
    """

    id: str
    state: State
    found: str
    advice: str | None = None

    def __str__(self) -> str:
        """The line that is printed, and below it what to do."""
        line = f"{self.state:<8} {self.id}: {printable(self.found, _LONGEST)}"
        return line if self.advice is None else f"{line}\n{'':8} -> {self.advice}"


def worst(findings: Sequence[Finding]) -> State:
    return max((each.state for each in findings), key=["ok", "warning", "problem"].index, default="ok")


def first_of(id: str, *rows: tuple[object, str, str | None]) -> Finding:
    """Returns what the first row (condition, found, advice) says whose condition holds. Without advice all is well."""
    found, advice = next((found, advice) for condition, found, advice in rows if condition)
    return Finding(id, "ok" if advice is None else "warning", found, advice)


def warn_unless(good: object, id: str, found: str, advice: str) -> Finding:
    """Returns a warning with advice, or that all is well."""
    return Finding(id, "ok", found) if good else Finding(id, "warning", found, advice)
