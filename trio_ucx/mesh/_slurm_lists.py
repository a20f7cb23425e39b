"""The lists of hosts and of numbers in Slurm's variables."""

from __future__ import annotations

import re

from ._variables import MAX_SIZE


def expand_nodelist(text: str) -> list[str]:
    """Expands Slurm's list of hosts: ``"node[01-03,7],login"`` is node01, node02, node03, node7 and login.

    Raises:
        ValueError: it is not such a list.
    """
    wrong = ValueError(f"{text!r} is not a list of hosts, such as node[01-03,7],login")
    nodes: list[str] = []
    for item in re.split(r",(?![^\[]*\])", text):  # commas outside of brackets
        names = [""]
        pieces = re.split(r"\[([^\[\]]*)\]", item)  # text, ranges, text, ranges, ..., text
        for number, piece in enumerate(pieces):
            if number % 2 == 0 and (re.search(r"[\[\]\s]", piece) or not piece.isprintable()):
                raise wrong
            endings = [piece] if number % 2 == 0 else _expand_ranges(piece)
            if not endings or len(nodes) + len(names) * len(endings) > MAX_SIZE:
                raise wrong
            names = [name + ending for name in names for ending in endings]
        nodes += names
    if not all(nodes):
        raise wrong
    return nodes


def _expand_ranges(text: str) -> list[str]:
    """Expands ``"01-03,7"``: numbers keep their leading zeros. Returns nothing if it is wrong."""
    numbers: list[str] = []
    for item in text.split(","):
        match = re.fullmatch(r"([0-9]{1,9})(?:-([0-9]{1,9}))?", item)
        if match is None:
            return []
        first, last = match[1], match[2] or match[1]
        if not int(first) <= int(last) < int(first) + MAX_SIZE:
            return []
        numbers += [str(number).zfill(len(first)) for number in range(int(first), int(last) + 1)]
    return numbers


def expand_counts(text: str) -> list[int]:
    """Expands Slurm's tasks of each host: ``"2(x3),1"`` is 2, 2, 2 and 1. Returns nothing if it is wrong."""
    counts: list[int] = []
    for item in text.split(","):
        match = re.fullmatch(r"([0-9]{1,7})(?:\(x([0-9]{1,7})\))?", item)
        if match is None or (repeated := int(match[2] or 1)) > MAX_SIZE:
            return []
        counts += [int(match[1])] * repeated
    return counts
