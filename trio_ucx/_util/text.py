"""Makes text that peers have sent safe to show."""

from __future__ import annotations


def printable(text: str, most: int = 1000, keep: str = "") -> str:
    """Makes text that a peer has sent safe for a log, an error or a terminal.

    Replaces each unprintable character that is not in ``keep`` with ``?``, and cuts the text after ``most`` characters.
    """
    text = text[:most]
    if text.isprintable():
        return text
    return "".join(char if char.isprintable() or char in keep else "?" for char in text)
