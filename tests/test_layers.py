"""The layers: imports point down only, one module imports the compiled one, no cffi object is in a public signature."""

from __future__ import annotations

import ast
import inspect
from collections.abc import Iterator
from pathlib import Path

import pytest

import trio_ucx
from trio_ucx import ucp

PACKAGE = Path(trio_ucx.__file__).parent

#: By folder, lowest first. The top level's own modules are the layer "".
LAYERS = ["_native", "ucp", "", "_cli", "testing"]
#: What a layer may not import although it lies below: the two top ones do not know each other.
APART = {("testing", "_cli")}

#: The rules of a connection: no I/O, and no copies of the memory that they are about.
RULES = ["_wire", "_credit", "_tag_queue", "_byte_stream", "_close_handshake", "_batch"]
#: Besides: the rules of the exchange, which is made of bytes, and of arming. No I/O.
PURE = [*RULES, "_handshake/exchange", "_handshake/facts", "ucp/_arming"]
#: What the rules may import besides each other.
HARMLESS = {"__future__", "collections", "collections.abc", "enum", "secrets", "struct", "typing", "attrs"}
#: What copies memory: names that are called. (Packing a head of a few bytes with ``struct`` does not count.)
COPIES = {"bytes", "bytearray", "memoryview", "join", "tobytes", "copy", "deepcopy"}
#: Inside ``_link``, lowest first.
LINK = ["transport", "buffers", "sending", "receiving", "closing", "link", "__init__"]


def modules() -> list[Path]:
    return sorted(PACKAGE.rglob("*.py"))


def layer_of(path: Path) -> str:
    folder = path.relative_to(PACKAGE).parts[0]
    return folder if folder in LAYERS else "_cli" if folder == "__main__.py" else ""


def imports(path: Path) -> Iterator[str]:
    """Absolute names of what a module imports, ``trio_ucx.ucp._engine.engine`` say."""
    package = ["trio_ucx", *path.relative_to(PACKAGE).parts[:-1]]
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else []
            name = ".".join([*base, *([node.module] if node.module else [])])
            yield from (f"{name}.{alias.name}" for alias in node.names)


@pytest.mark.parametrize("path", modules(), ids=lambda path: str(path.relative_to(PACKAGE)))
def test_imports_point_down(path: Path) -> None:
    mine = layer_of(path)
    for name in imports(path):
        parts = name.split(".")
        if parts[0] == "trio_ucx" and len(parts) > 1:
            theirs = parts[1] if parts[1] in LAYERS else ""
            assert LAYERS.index(theirs) <= LAYERS.index(mine), f"{path.name} imports {name}"
            assert (mine, theirs) not in APART, f"{path.name} imports {name}"
        if parts[0] in ("libucx", "cffi", "_cffi_backend") or parts[-1] == "_ucx":
            assert path == PACKAGE / "_native" / "__init__.py", f"{path.name} imports {name}"
        if str(path.relative_to(PACKAGE).with_suffix("")) in PURE:
            assert parts[0] not in ("trio", "outcome") and "_native" not in parts, f"{path.name} imports {name}"


@pytest.mark.parametrize("name", RULES)
def test_rules_are_pure(name: str) -> None:
    """No trio, no cffi, no UCX, not even for annotations; and no copy of a message."""
    path = PACKAGE / f"{name}.py"
    for imported in imports(path):
        module = imported.rpartition(".")[0] or imported
        parts = imported.split(".")
        assert module in HARMLESS or imported in HARMLESS or (parts[0] == "trio_ucx" and parts[1] in RULES), imported
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Call):
            called = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
            assert called not in COPIES, f"{path.name}, line {node.lineno}: {called}"


@pytest.mark.parametrize("name", LINK)
def test_link_has_one_direction(name: str) -> None:
    for imported in imports(PACKAGE / "_link" / f"{name}.py"):
        if imported.startswith("trio_ucx._link."):
            theirs = imported.split(".")[2]
            assert LINK.index(theirs) < LINK.index(name), imported


def test_every_module_of_a_link_has_its_place() -> None:
    assert sorted(path.stem for path in (PACKAGE / "_link").glob("*.py")) == sorted(LINK)


@pytest.mark.parametrize("module", [trio_ucx, ucp], ids=["trio_ucx", "ucp"])
def test_public_names(module: object) -> None:
    for name in module.__all__:  # type: ignore[attr-defined]
        thing = getattr(module, name)
        if inspect.isclass(thing) or inspect.isfunction(thing):
            assert not thing.__module__.split(".")[-1].startswith("_"), f"{name} says it is from {thing.__module__}"
            assert thing.__doc__, f"{name} has no docstring"
        if inspect.isclass(thing):
            for member, value in vars(thing).items():
                if not member.startswith("_") and (inspect.isfunction(value) or isinstance(value, property)):
                    assert value.__doc__, f"{name}.{member} has no docstring"
                    signature = str(inspect.signature(value.fget if isinstance(value, property) else value))
                    assert "CData" not in signature and "Handle" not in signature
