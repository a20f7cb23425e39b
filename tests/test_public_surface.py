"""The public interface is written down in ``public_surface.txt``: a change of it must change that file, too.

To regenerate it: ``python tests/test_public_surface.py``.
"""

from __future__ import annotations

import enum
import inspect
import re
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

pytest.importorskip("anyio")
pytest.importorskip("prometheus_client")
import trio_ucx.anyio
from trio_ucx import mesh, metrics, rpc, testing, ucp
from trio_ucx._util.handles import OpenedNotConstructed
from trio_ucx.ucp import blocks, chains

FILE = Path(__file__).with_name("public_surface.txt")
MODULES: list[ModuleType] = [trio_ucx, ucp, blocks, chains, mesh, rpc, testing, trio_ucx.anyio, metrics]


def signature(function: Any) -> str:
    """With annotations as they are written, not as strings."""
    return re.sub(r"""(: |-> )(['"])(.*?)\2""", r"\1\3", str(inspect.signature(function)))


def written(annotation: Any) -> str:
    if isinstance(annotation, str):
        return annotation
    return getattr(annotation, "__forward_arg__", None) or inspect.formatannotation(annotation)


def describe(name: str, thing: Any) -> Iterator[str]:
    if inspect.isfunction(thing):
        yield f"{'async ' * inspect.iscoroutinefunction(thing)}def {name}{signature(thing)}"
    elif not inspect.isclass(thing):
        yield f"{name} = {thing if name.endswith('Buffer') else f'<{type(thing).__name__}>'}"
    else:
        yield f"class {name}({', '.join(base.__qualname__ for base in thing.__bases__ if base is not object)})"
        yield from sorted(members(name, thing))


def members(name: str, cls: type) -> Iterator[str]:
    """What users may use of an object: no special methods, and nothing that base classes of other libraries have."""
    if issubclass(cls, enum.Enum):
        yield from (f"{name}.{each} = {value.value!r}" for each, value in cls.__members__.items())
        return
    if "__init__" in vars(cls) and type(cls) is not OpenedNotConstructed:
        yield f"{name}{signature(cls)}"
    ours = [base for base in reversed(cls.__mro__) if base.__module__.startswith("trio_ucx")]
    fields = {field: kind for base in ours for field, kind in inspect.get_annotations(base).items()}
    yield from (f"{name}.{field}: {written(kind)}" for field, kind in fields.items() if not field.startswith("_"))
    for member in {member for base in ours for member in vars(base)} - fields.keys():
        value = inspect.getattr_static(cls, member)
        if member.startswith("_"):
            continue
        if isinstance(value, property):
            yield f"{name}.{member} -> {written(inspect.signature(value.fget).return_annotation)}"
        elif isinstance(value, (classmethod, staticmethod)):
            yield f"{type(value).__name__} {name}.{member}{signature(value.__func__)}"
        else:
            yield from describe(f"{name}.{member}", value)


def surface() -> str:
    lines = [
        line
        for module in MODULES
        for name in sorted(module.__all__)
        if not inspect.ismodule(thing := getattr(module, name))
        for line in describe(f"{module.__name__}.{name}", thing)
    ]
    return "".join(f"{line}\n" for line in lines)


def test_public_surface_is_the_one_that_is_written_down() -> None:
    advice = "the public interface has changed: if it should, run `python tests/test_public_surface.py`"
    assert surface().splitlines() == FILE.read_text().splitlines(), advice


if __name__ == "__main__":
    FILE.write_text(surface())
