"""Message sizes, as people write them."""

from __future__ import annotations

import argparse

MAX_SIZE = 2**30

_UNITS = {"": 1, "k": 2**10, "m": 2**20, "g": 2**30}


def parse_sizes(text: str) -> list[int]:
    sizes = []
    for part in text.lower().split(","):
        digits = part.strip().rstrip("kmg")
        unit = _UNITS.get(part.strip()[len(digits) :])
        if unit is None or not (digits.isascii() and digits.isdecimal()):
            raise argparse.ArgumentTypeError(f"{part!r} is not a message size: write bytes, as in 8,1k,64k,1M")
        if len(digits) > 10 or not 1 <= int(digits) * unit <= MAX_SIZE:
            raise argparse.ArgumentTypeError(f"messages have from 1 byte to 1G, not {part!r}")
        sizes.append(int(digits) * unit)
    return sizes


def format_size(size: int) -> str:
    for letter in "GMk":
        if size % _UNITS[letter.lower()] == 0:
            return f"{size // _UNITS[letter.lower()]}{letter}"
    return str(size)
