"""Packed numbers of peers: each has a name, a format and a range, and is checked when it is unpacked."""

from __future__ import annotations

import struct
from typing import Any

import attrs


@attrs.frozen
class Field:
    """One number, or ``n`` bytes if its format is ``ns``.

    Attributes:
        least, most: the range of a number. Numbers that are only compared have that of their format.
    """

    name: str
    format: str
    least: int = 0
    most: int | None = None


class Layout:
    """Fields one after the other, little-endian.

    Args:
        what: what they describe, for error messages.
    """

    def __init__(self, what: str, *fields: Field) -> None:
        self.what = what
        self.fields = fields
        self._struct = struct.Struct("<" + "".join(field.format for field in fields))
        self.size = self._struct.size

    def pack(self, *values: Any) -> bytes:
        return self._struct.pack(*values)

    def unpack(self, data: bytes) -> tuple[Any, ...]:
        """Returns the fields at the beginning of the data.

        Raises:
            ValueError: the data are too short, or a field is out of range.
        """
        if len(data) < self.size:
            raise ValueError(f"{self.what} is too short for its fields")
        values = self._struct.unpack_from(data)
        for value, field in zip(values, self.fields, strict=True):
            if field.most is not None and not field.least <= value <= field.most:
                raise ValueError(
                    f"a field of {self.what} is out of range: {field.name} is {value}, not {field.least} to "
                    f"{field.most}"
                )
        return values
