"""What a report consists of, and how it is written."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any

import attrs

#: Before each likely cause of a hang.
MARK = "=>"


@attrs.frozen
class Item:
    """One line of a report, and what is below it.

    Attributes:
        text: for people.
        facts: for tools, by name.
        causes: what keeps it waiting, in sentences.
    """

    text: str
    facts: dict[str, Any] = attrs.Factory(dict)
    causes: list[str] = attrs.Factory(list)
    items: list[Item] = attrs.Factory(list)

    def as_json(self) -> dict[str, Any]:
        items = [item.as_json() for item in self.items]
        return {"text": self.text, **self.facts, "causes": self.causes, "items": items}

    def as_text(self, indent: str = "") -> str:
        lines = [indent + self.text]
        lines += [f"{indent}  {MARK} {cause}" for cause in self.causes]
        lines += [item.as_text(indent + "  ") for item in self.items]
        return "\n".join(lines)

    def all_causes(self) -> Iterator[str]:
        """The causes of this item and of all below it."""
        yield from self.causes
        for item in self.items:
            yield from item.all_causes()


def item(template: str, causes: Iterable[str] = (), items: Iterable[Item] = (), **facts: Any) -> Item:
    """An item whose text has the facts in it: ``seconds`` in a short form, and ``where``: ``call`` and ``place``."""
    where = "".join(f"{word} {facts[name]}" for word, name in ((" in", "call"), (", at", "place")) if facts.get(name))
    found: list[str] = []
    try:
        found.extend(causes)
    except Exception as error:
        found.append(f"(other causes cannot be read just now: {error!r})")
    text = template.replace("{seconds}", "{seconds:.1f} s").format(**facts, where=where)
    return Item(text, facts, found, list(items))


def each(what: str, function: Callable[[Any], Item | None], things: Iterable[Any]) -> list[Item]:
    """An item for each thing for which the function makes one. An exception becomes an item."""
    items = []
    try:
        for thing in list(things):
            try:
                made = function(thing)
            except Exception as error:
                made = Item(f"{what}: it cannot be read just now: {error!r}")
            if made is not None:
                items.append(made)
    except Exception as error:  # another thread has changed `things` meanwhile
        items.append(Item(f"{what}: not all can be read just now: {error!r}"))
    return items


def counted(number: int, noun: str) -> str:
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"
