"""Every public callable says what it raises, and every asynchronous one what cancellation does.

In these forms, so that they can be checked:

* ``Raises:`` on a line of its own, then entries such as ``ValueError, trio.WouldBlock: when that happens``.
* ``Raises: nothing.``, or with a clause, ``Raises: nothing, also after the close.``: no exception is to be expected.
* ``Raises: as :meth:`fetch_add`.``: what that callable raises, which must have one of the two forms above.
* ``Cancellation:`` begins a paragraph that says what a cancelled call has done, or left undone.
* ``Cancellation: as :meth:`fetch_add`.``: the same as there, where it must be said in full.

Properties are included if they raise. Classes that are awaited, iterated over or entered asynchronously say in their
own docstring what cancelling that does. Not included are methods that attrs generates, and exceptions that almost any
call can raise: the docstring of ``trio_ucx.ucp`` names those.
"""

from __future__ import annotations

import ast
import builtins
import inspect
import re
import ssl
import textwrap
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import attrs
import pytest
import trio

import trio_ucx
from trio_ucx import mesh, rpc, testing, ucp
from trio_ucx.ucp import blocks, chains

anyio = pytest.importorskip("anyio")
pytest.importorskip("prometheus_client")
import trio_ucx.anyio  # noqa: E402
from trio_ucx import metrics  # noqa: E402

MODULES: list[ModuleType] = [trio_ucx, ucp, blocks, chains, mesh, rpc, testing, trio_ucx.anyio, metrics]

ASYNC_METHODS = ("__aenter__", "__aexit__", "__anext__", "__await__")
REFERENCE = re.compile(r":(?:meth|func|class|exc|attr):`([\w.]+)`")
ENTRY = re.compile(r"([\w.]+(?:, [\w.]+)*): \S.*")


@attrs.frozen
class Documented:
    """Something whose docstring is checked.

    Attributes:
        owner: the class that it was found in, None of a function.
        function: what is called, unwrapped.
    """

    name: str
    owner: type | None
    function: Callable[..., Any]
    doc: str

    @property
    def lines(self) -> list[str]:
        return self.doc.splitlines()


def is_ours(thing: Any) -> bool:
    return str(getattr(thing, "__module__", "")).startswith("trio_ucx")


def methods(cls: type) -> Iterator[Documented]:
    """The public ones that are written in the library, in whatever base class."""
    for member in dir(cls):
        name = f"{cls.__name__}.{member}"
        if member.startswith("_"):
            continue
        value = inspect.getattr_static(cls, member)
        if isinstance(value, property):
            function: Any = value.fget
            if not (is_ours(function) and raises(function, cls)):
                continue
        else:
            function = inspect.unwrap(getattr(value, "__func__", value))
        if inspect.isfunction(function) and is_ours(function):
            yield Documented(name, cls, function, inspect.cleandoc(function.__doc__ or ""))


def find() -> dict[str, Documented]:
    found: dict[str, Documented] = {}
    seen: set[Any] = set()
    for module in MODULES:
        for name in module.__all__:
            thing = getattr(module, name)
            if inspect.isfunction(thing):
                function = inspect.unwrap(thing)
                name = f"rpc.{name}" if module is rpc else name  # there is another connect
                each = [Documented(name, None, function, inspect.cleandoc(thing.__doc__ or ""))]
            elif inspect.isclass(thing) and is_ours(thing):
                each = list(methods(thing))
            else:
                continue
            for one in each:
                if one.function not in seen:  # inherited by several, or a second name
                    seen.add(one.function)
                    found[one.name] = one
    return found


def raises(function: Callable[..., Any], cls: type | None, deep: int = 2) -> bool:
    """Whether it has a ``raise``, calls something named check, or calls something of ours of which that is true."""
    tree = ast.parse(textwrap.dedent(inspect.getsource(inspect.unwrap(function))))
    for node in ast.walk(tree):
        if isinstance(node, ast.Raise):
            return True
        if not isinstance(node, ast.Call):
            continue
        called: Any = None
        if isinstance(node.func, ast.Name):
            called = inspect.unwrap(function).__globals__.get(node.func.id)
        elif isinstance(node.func, ast.Attribute):
            if re.fullmatch(r"_?check(_\w+)?", node.func.attr):
                return True
            if cls is not None and isinstance(node.func.value, ast.Name) and node.func.value.id == "self":
                called = getattr(cls, node.func.attr, None)
        if deep and inspect.isfunction(called) and is_ours(called) and raises(called, cls, deep - 1):
            return True
    return False


def resolve(reference: str, owner: type | None) -> Any:
    """What a reference in a docstring of ``owner`` means; None if there is no such thing."""
    reference = reference.removeprefix(".")  # in Sphinx: wherever it is
    for scope in (owner, *MODULES, builtins):
        thing: Any = scope
        for part in reference.split("."):
            thing = getattr(thing, part, None)
        if thing is not None:
            return thing
    parts = reference.split(".")
    thing = {"trio_ucx": trio_ucx, "trio": trio, "ssl": ssl, "anyio": anyio}.get(parts[0])
    for part in parts[1:]:
        thing = getattr(thing, part, None)
    return thing


def documented(thing: Any) -> Documented | None:
    """What a reference leads to, if that is a public callable."""
    function = inspect.unwrap(getattr(thing, "__func__", thing))
    return next((each for each in DOCUMENTED.values() if each.function is function), None)


def gives_async(one: Documented) -> bool:
    """Whether it returns what is to be entered or iterated over asynchronously."""
    written = str(one.function.__annotations__.get("return", "")).partition("[")[0]
    returned = {**vars(ucp), **vars(trio_ucx), **one.function.__globals__}.get(written)
    if one.owner is not None and written == one.owner.__name__:
        return False
    return inspect.isclass(returned) and any(hasattr(returned, name) for name in ASYNC_METHODS[:3])


def is_async(one: Documented) -> bool:
    function = one.function
    return inspect.iscoroutinefunction(function) or inspect.isasyncgenfunction(function) or gives_async(one)


def raises_problem(one: Documented, *, direct: bool = False) -> str:
    """What is wrong with what it says about exceptions; "" if nothing is."""
    at = [number for number, line in enumerate(one.lines) if line.startswith("Raises:")]
    if len(at) != 1:
        return f"says Raises: {len(at)} times"
    rest = one.lines[at[0]].removeprefix("Raises:").strip()
    paragraph = one.lines[at[0] + 1 :]
    if re.fullmatch(r"nothing(, .+)?\.", rest):
        return "" if not paragraph or not paragraph[0] else "says that it raises nothing, and more"
    reference = re.fullmatch(r"as (:(?:meth|func):`([\w.]+)`)\.", rest)
    if reference is not None:
        return "refers to a reference" if direct else target_problem(one, reference[2], raises_problem)
    if rest:
        return f"has something behind Raises: that is none of the forms: {rest}"
    entries = 0
    for line in paragraph:
        if not line.strip():
            break
        if not line.startswith("    "):
            return f"has an entry of Raises: that is not indented: {line}"
        if not line.startswith("     "):
            match = ENTRY.fullmatch(line.strip())
            if match is None:
                return f"has an entry of Raises: without an exception: {line.strip()}"
            for name in match[1].split(", "):
                exception = resolve(name, one.owner)
                if not (inspect.isclass(exception) and issubclass(exception, BaseException)):
                    return f"names {name}, which is no exception"
            entries += 1
    return "" if entries else "has no entries of Raises:"


def cancellation_problem(one: Documented, *, direct: bool = False) -> str:
    """What is wrong with what it says about cancellation; "" if nothing is."""
    found = [part for part in one.doc.split("\n\n") if part.startswith("Cancellation:")]
    if len(found) != 1:
        return f"has {len(found)} paragraphs Cancellation:"
    text = " ".join(found[0].removeprefix("Cancellation:").split())
    reference = re.fullmatch(r"as (:(?:meth|func):`([\w.]+)`)\.", text)
    if reference is not None:
        return "refers to a reference" if direct else target_problem(one, reference[2], cancellation_problem)
    if len(text.split()) < 3 or not text.endswith((".", ")")):
        return f"does not say what cancellation does: {text}"
    return ""


def target_problem(one: Documented, name: str, check: Callable[..., str]) -> str:
    target = documented(resolve(name, one.owner))
    if target is None:
        return f"refers to {name}, which is no public callable"
    problem: str = check(target, direct=True)
    return f"refers to {name}, which {problem}" if problem else ""


DOCUMENTED = find()


def async_classes() -> dict[str, Documented]:
    """Public classes with asynchronous special methods of ours."""
    found = {}
    for module in MODULES:
        for name in module.__all__:
            cls = getattr(module, name)
            if inspect.isclass(cls) and any(is_ours(inspect.getattr_static(cls, each, None)) for each in ASYNC_METHODS):
                found[name] = Documented(name, cls, cls, inspect.cleandoc(cls.__doc__ or ""))
    return found


@pytest.mark.parametrize("name", DOCUMENTED)
def test_says_what_it_raises(name: str) -> None:
    problem = raises_problem(DOCUMENTED[name])
    assert not problem, f"{name} {problem}"


@pytest.mark.parametrize("name", [name for name, one in DOCUMENTED.items() if is_async(one)])
def test_says_what_cancellation_does(name: str) -> None:
    problem = cancellation_problem(DOCUMENTED[name])
    assert not problem, f"{name} {problem}"


@pytest.mark.parametrize("name", async_classes())
def test_class_says_what_cancellation_does(name: str) -> None:
    problem = cancellation_problem(async_classes()[name])
    assert not problem, f"{name} {problem}"


@pytest.mark.parametrize("name", DOCUMENTED)
def test_references_exist(name: str) -> None:
    one = DOCUMENTED[name]
    for reference in REFERENCE.findall(one.doc):
        assert resolve(reference, one.owner) is not None, f"{name} refers to {reference}"


def test_finds_each_kind() -> None:
    assert {
        "connect",  # a function that returns an async context manager
        "open_worker",  # an async generator, which is one
        "Connection.send",
        "RequestChain.local",  # of a private base class
        "WorkerAddress.from_ucx",  # a class method
        "Memory.descriptor",  # a property that raises, in a function that it calls
        "assert_no_live_handles",
        "UCXStream.receive",
    } <= set(DOCUMENTED)
    asynchronous = {name for name, one in DOCUMENTED.items() if is_async(one)}
    assert {"connect", "open_worker", "Connection.send", "Connection.messages"} <= asynchronous
    assert "Connection.closed" not in DOCUMENTED and "Connection.abort" not in asynchronous
    assert {"Connection", "Messages", "Request"} <= set(async_classes())


@pytest.mark.parametrize(
    ("doc", "problem"),
    [
        ("Does it.", "says Raises: 0 times"),
        ("Does it.\n\nRaises:\n    OSError: why.", ""),
        ("Does it.\n\nRaises:\n    OSError, trio.WouldBlock: why,\n        at length.", ""),
        ("Does it.\n\nRaises: nothing.", ""),
        ("Does it.\n\nRaises: nothing, ever.", ""),
        ("Does it.\n\nRaises: as :meth:`Connection.send`.", ""),
        ("Does it.\n\nRaises: as :meth:`Connection.sent`.", "refers to Connection.sent, which is no public callable"),
        ("Does it.\n\nRaises:\n    Others: why.", "names Others, which is no exception"),
        ("Does it.\n\nRaises:\n", "has no entries of Raises:"),
    ],
)
def test_forms_of_raises(doc: str, problem: str) -> None:
    assert raises_problem(Documented("it", None, find, doc)) == problem


@pytest.mark.parametrize(
    ("doc", "good"),
    [
        ("Does it.\n\nCancellation: nothing was sent.", True),
        ("Does it.\n\nCancellation: as :meth:`Connection.send`.", True),
        ("Does it.\n\nCancellation: as :meth:`Connection.abort`.", False),
        ("Does it.\n\nCancellation: possible.", False),
        ("Does it. It can be cancelled.", False),
    ],
)
def test_forms_of_cancellation(doc: str, good: bool) -> None:
    assert (cancellation_problem(Documented("it", None, find, doc)) == "") == good


@pytest.mark.parametrize("path", sorted(Path(trio_ucx.__file__).parent.rglob("*.py")), ids=lambda path: path.name)
def test_a_first_line_says_what_is_returned(path: Path) -> None:
    """ "Returns ..." or "True if ...", rather than "Whether ..."; and it names its object, rather than "the same"."""
    questions = ("Whether", "What", "Why", "How", "Where", "Which", "Who", "The same", "Does the same", "As ")
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            first = (ast.get_docstring(node) or "").partition("\n")[0]
            assert not first.startswith(questions), f"line {node.lineno}, {node.name}: {first}"
