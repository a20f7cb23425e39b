"""Keys, whose repr does not show them: tracebacks with local variables, and reports of crashes, print reprs."""

from __future__ import annotations

from typing import Any


class HiddenBytes(bytes):
    """A key, or bytes that have one in them."""

    def __repr__(self) -> str:
        return f"<{len(self)} hidden bytes>"

    __str__ = __repr__


class HiddenText(str):
    """A key as text. It is hidden in reprs; ``str`` and formatting give the text."""

    __slots__ = ()

    def __repr__(self) -> str:
        return f"<{len(self)} hidden characters>"


class HiddenDict(dict[str, Any]):
    """An environment that may have a key in it."""

    def __repr__(self) -> str:
        return f"<{len(self)} hidden values>"


def hide(key: Any) -> Any:
    """Returns an ``authkey=`` that a user has given, whatever it is, with a repr that hides it."""
    if isinstance(key, str):
        return HiddenText(key)
    return HiddenBytes(key) if isinstance(key, (bytes, bytearray)) else key


def hide_authkey(options: Any) -> None:
    """Hides the key in keyword arguments."""
    if "authkey" in options:
        options["authkey"] = hide(options["authkey"])
