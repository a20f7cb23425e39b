"""The layers: imports point down only, one module imports the compiled one, no public signature has a cffi object."""

from __future__ import annotations

import ast
import graphlib
import inspect
import re
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

import pytest

import trio_ucx
from trio_ucx import ucp
from trio_ucx.ucp import _internal_api, chains

PACKAGE = Path(trio_ucx.__file__).parent

#: By folder, lowest first. The top level's own modules are the layer "".
LAYERS = ["_util", "_native", "ucp", "", "mesh", "rpc", "_cli", "testing"]
#: What a layer may not import although it lies below: the two top ones do not know each other.
APART = {("testing", "_cli")}

#: The rules of a connection: no I/O, and no copies of the memory that they are about.
RULES = ["wire", "byte_stream", "life"]
#: Besides: the rules of the exchange, which is made of bytes, and of who listens. No I/O.
PURE = [
    *(f"_rules/{name}" for name in RULES),
    "_handshake/exchange",
    "_handshake/peer_description",
    "ucp/_transports",
    "ucp/_engine/listening",
]
#: What the rules may import besides each other.
HARMLESS = {
    *("__future__", "collections", "collections.abc", "enum", "secrets", "struct", "typing", "attrs"),
    "trio_ucx._util.picklable",
}
#: What the rules may import besides: the part of an end that Connections and endpoints share, and what users get.
ENDS = {
    *("trio_ucx.ucp._internal_api.CloseState", "trio_ucx.ucp._internal_api.Ending"),
    "trio_ucx._peer_info.PeerState",
}
#: What the rules of the exchange may import besides: they compute codes and checksums, and need records of ``ucp``.
EXCHANGE = {
    *("hashlib", "hmac", "zlib"),
    *("trio_ucx._util.fields.Field", "trio_ucx._util.fields.Layout"),
    *("trio_ucx._util.hidden.HiddenBytes", "trio_ucx._util.text.printable"),
    *("trio_ucx.ucp.WorkerAddress", "trio_ucx.ucp._internal_api.decode_worker_address"),
    *(f"trio_ucx.ucp._internal_api.{name}" for name in ("EndpointSummary", "KeyPair", "new_key")),
    "trio_ucx.ucp._internal_api.check_without_shared_memory",
    "trio_ucx.ucp._internal_api.obstacle_to_shared_memory",
}
#: What copies memory: names that are called. (Packing a head of a few bytes with ``struct`` does not count.)
COPIES = {"bytes", "bytearray", "memoryview", "join", "tobytes", "copy", "deepcopy"}
#: The modules of a folder, lowest first.
ORDER = {
    "_rules": ["wire", "life", "byte_stream", "__init__"],
    "_opening": ["unix", "addresses", "backoff", "authkey", "options", "__init__"],
    "_link": [
        "message_port",
        "native",
        "immutable",
        "sending",
        "conversations",
        "receiving",
        "closing",
        "link",
        "__init__",
    ],
    "_handshake": [
        *("peer_description", "exchange"),
        *("control_stream", "control_sockets", "socket_owner"),
        *("registry", "handshake"),
        *("client", "server"),
        "__init__",
    ],
    "rpc": ["_errors", "_messages", "_service", "_items", "_server", "_connections", "_client", "_connect", "__init__"],
    "_report": ["items", "frames", "network", "causes", "collect", "reporting", "__init__"],
    "ucp/_engine": [
        *("listening", "ending", "statistics", "teardown", "identity", "trio_run", "peer_processes", "waits"),
        *("borrowed", "stream_buffer", "operations", "endpoints_to_worker", "receive_queue"),
        *("tag_dispatch", "links", "dispatch", "progress"),
        "engine",
        *("endpoint_core", "share", "posting", "draining", "lifetime"),
        "__init__",
    ],
}
#: Modules that do not import each other although the order would allow it.
SIBLINGS = {
    *(("_handshake", "server", "client"), ("_handshake", "control_stream", "exchange")),
    *(("_report", "network", "items"), ("_report", "network", "frames"), ("_report", "frames", "items")),
}


#: Inside ``ucp``, lowest first: what is in a line may import what is in it and in those before.
UCP = [
    ["_features", "_status", "_keys"],
    [
        *("_quirks.__init__", "_quirks.releases", "_quirks.address_layout", "_quirks.option_limits"),
        *("_quirks.default_options", "_quirks.rdma"),
        *("_quirks.wake_sockets", "_quirks.shared_memory", "_quirks.descriptors", "_quirks.forks", "_quirks.log"),
        "_quirks.sandboxes",
    ],
    ["_worker_address", "_transports"],
    ["_quirks.key_gate", "_quirks.network_devices"],
    ["_memory"],
    ["_attributes", "_endpoint_options", "_hints", "_context"],
    ["_engine"],
    ["_connecting"],
    ["_tag", "_stream", "_am_send"],
    ["_quirks.stopped_queue"],
    ["_rma", "blocks"],
    ["_endpoint"],
    ["_arrivals", "_active_messages", "_listener", "_requests"],
    ["_internal_api"],
    ["chains"],
    ["_worker"],
    ["__init__"],
]
#: What other layers import from inside ``ucp``.
INTERNAL_API = "_internal_api"
#: By folder above connections: the most lines that may import from inside the connections' layers.
INSIDE_CONNECTIONS = {"mesh": 1, "rpc": 1, "testing": 3, "_report": 10, "_cli": 0}

#: The only import cycles: a module imports one above it for the type of an attribute that users have, such as
#: ``channel.connection``, ``endpoint.worker`` and ``memory.context``.
CYCLES = {
    ("trio_ucx._channels", "trio_ucx._connection"),
    ("trio_ucx.ucp._endpoint", "trio_ucx.ucp._worker"),
    ("trio_ucx.ucp._listener", "trio_ucx.ucp._worker"),
    ("trio_ucx.ucp._memory.registered", "trio_ucx.ucp._context"),
}
#: A build may leave these out. The only module that imports one does so in a method, and for its annotation.
EXTENSIONS = {"trio_ucx.ucp.chains": "_worker.py", "trio_ucx.ucp.blocks": "remote_memory.py"}


def modules() -> list[Path]:
    return sorted(PACKAGE.rglob("*.py"))


def layer_of(path: Path) -> str:
    folder = path.relative_to(PACKAGE).parts[0]
    return folder if folder in LAYERS else "_cli" if folder == "__main__.py" else ""


def imports(path: Path) -> Iterator[str]:
    """Absolute names of what a module imports, ``trio_ucx.ucp._engine.engine`` say."""
    yield from imports_of(path, ast.walk(ast.parse(path.read_text())))


def imports_of(path: Path, nodes: Iterable[ast.AST]) -> Iterator[str]:
    package = ["trio_ucx", *path.relative_to(PACKAGE).parts[:-1]]
    for node in nodes:
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else []
            name = ".".join([*base, *([node.module] if node.module else [])])
            yield from (f"{name}.{alias.name}" for alias in node.names)


def module_name(path: Path) -> str:
    parts = ["trio_ucx", *path.relative_to(PACKAGE).with_suffix("").parts]
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def for_annotations(path: Path) -> set[str]:
    """The names that a module imports under ``if TYPE_CHECKING``."""
    found = set()
    package = ["trio_ucx", *path.relative_to(PACKAGE).parts[:-1]]
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.If) and isinstance(node.test, ast.Name) and node.test.id == "TYPE_CHECKING":
            for inner in node.body:
                if isinstance(inner, ast.ImportFrom) and inner.level:
                    base = [*package[: len(package) - inner.level + 1], *([inner.module] if inner.module else [])]
                    found.add(".".join(base))
    return found


@pytest.mark.parametrize("path", modules(), ids=lambda path: str(path.relative_to(PACKAGE)))
def test_no_module_is_imported_for_annotations_alone(path: Path) -> None:
    if path.parent != PACKAGE / "_native":
        extensions = {name for name, user in EXTENSIONS.items() if user == path.name}
        circular = {imported for importer, imported in CYCLES if importer == module_name(path)}
        assert for_annotations(path) <= extensions | circular


@pytest.mark.parametrize("path", sorted((PACKAGE / "ucp").rglob("*.py")), ids=lambda path: path.stem)
def test_ucp_has_one_direction(path: Path) -> None:
    def line_of(name: str) -> int:
        return next(number for number, line in enumerate(UCP) if name in line)

    def place_of(parts: Sequence[str]) -> str:
        """Each quirk has a place of its own; in other folders all modules have that of the folder."""
        return ".".join(parts[:2]) if parts[0] == "_quirks" else parts[0]

    mine = line_of(place_of(path.relative_to(PACKAGE / "ucp").with_suffix("").parts))
    for imported in imports(path):
        parts = imported.split(".")
        if parts[:2] == ["trio_ucx", "ucp"] and (module_name(path), imported.rpartition(".")[0]) not in CYCLES:
            place = place_of(parts[2:])
            theirs = place if any(place in line for line in UCP) else "__init__"
            assert line_of(theirs) <= mine, f"{path.name} imports {imported}"


@pytest.mark.parametrize("path", modules(), ids=lambda path: str(path.relative_to(PACKAGE)))
def test_other_layers_import_only_the_internal_api_of_ucp(path: Path) -> None:
    if path.relative_to(PACKAGE).parts[0] != "ucp":
        inside = {name.split(".")[2] for name in imports(path) if name.startswith("trio_ucx.ucp._")}
        assert inside <= {INTERNAL_API}


def test_every_name_of_the_internal_api_is_used() -> None:
    above = [path for path in modules() if PACKAGE / "ucp" not in path.parents]
    used = {name.rpartition(".")[2] for path in above for name in imports(path) if name.startswith("trio_ucx.ucp._")}
    assert set(_internal_api.__all__) <= used


@pytest.mark.parametrize("folder", INSIDE_CONNECTIONS)
def test_few_lines_import_from_inside_connections(folder: str) -> None:
    lines = [
        f"{path.name}: {line}"
        for path in (PACKAGE / folder).glob("*.py")
        for line in sorted({name.rpartition(".")[0] for name in imports(path)})
        if line.startswith(("trio_ucx._link", "trio_ucx._handshake", "trio_ucx._rules"))
    ]
    assert len(lines) <= INSIDE_CONNECTIONS[folder], lines


@pytest.mark.parametrize("extension", EXTENSIONS)
def test_nothing_needs_an_extension_to_be_imported(extension: str) -> None:
    inside = PACKAGE.parent.joinpath(*extension.split("."))
    for path in modules():
        at_top = [node for node in ast.parse(path.read_text()).body if isinstance(node, ast.Import | ast.ImportFrom)]
        if inside not in path.parents:
            assert not [name for name in imports_of(path, at_top) if name.startswith(extension)], path
            if path.name != EXTENSIONS[extension]:
                assert not [name for name in imports(path) if name.startswith(extension)], path


def test_there_are_no_import_cycles() -> None:
    """Imports for annotations included."""
    names = {module_name(path): path for path in modules()}
    graph = {}
    for name, path in names.items():
        imported = {each if each in names else each.rpartition(".")[0] for each in imports(path)}
        graph[name] = {each for each in imported & names.keys() if each != name and (name, each) not in CYCLES}
    try:
        graphlib.TopologicalSorter(graph).prepare()
    except graphlib.CycleError as error:
        pytest.fail(f"an import cycle: {error.args[1]}")


#: Classes that two modules have under one name: one is the Protocol, or the user's view, of the other.
TWICE = {"ControlSocket"}


def test_a_class_name_means_one_thing() -> None:
    places: dict[str, list[str]] = {}
    for path in modules():
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ClassDef):
                places.setdefault(node.name, []).append(str(path.relative_to(PACKAGE)))
    assert {name: paths for name, paths in places.items() if len(paths) > 1}.keys() == TWICE


def test_there_are_no_call_cycles_of_c_files() -> None:
    """Neither directly nor through others; ``static`` functions do not count, as no other file can call them."""
    files = {
        path: re.sub(r"/\*.*?\*/", "", path.read_text(), flags=re.DOTALL) for path in PACKAGE.rglob("_native/**/*.c")
    }
    definition = re.compile(r"^(?:const |extern )?\w[\w *]*?\b(tu_\w+)(?:\([^;{]*\)\s*\{| = \{)", re.MULTILINE)
    owners = {name: path for path, text in files.items() for name in definition.findall(text)}
    calls = {
        path: {owners[name] for name in re.findall(r"\btu_\w+", text) if owners.get(name, path) != path}
        for path, text in files.items()
    }
    assert len(owners) > 150 and sum(map(len, calls.values())) > 80
    graphlib.TopologicalSorter(calls).prepare()  # raises CycleError


def test_pure_modules_exist() -> None:
    assert {str(path.relative_to(PACKAGE).with_suffix("")) for path in modules()} >= set(PURE)


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
    path = PACKAGE / "_rules" / f"{name}.py"
    for imported in imports(path):
        module = imported.rpartition(".")[0] or imported
        rules = imported.startswith("trio_ucx._rules.")
        assert imported in HARMLESS | ENDS or module in HARMLESS or rules, imported
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Call):
            called = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
            assert called not in COPIES, f"{path.name}, line {node.lineno}: {called}"


@pytest.mark.parametrize("name", ["peer_description", "exchange"])
def test_rules_of_the_exchange_are_pure(name: str) -> None:
    """No I/O: no trio, no sockets, no UCX. What they import of ``ucp`` is named, one by one."""
    for imported in imports(PACKAGE / "_handshake" / f"{name}.py"):
        module = imported.rpartition(".")[0] or imported
        rules = imported.startswith(("trio_ucx._rules.", "trio_ucx._handshake.peer_description"))
        assert imported in HARMLESS | EXCHANGE or module in HARMLESS or rules, imported


@pytest.mark.parametrize(("folder", "name"), [(folder, name) for folder in ORDER for name in ORDER[folder]])
def test_folder_has_one_direction(folder: str, name: str) -> None:
    order, package = ORDER[folder], f"trio_ucx.{folder.replace('/', '.')}."
    for imported in imports(PACKAGE / folder / f"{name}.py"):
        if imported.startswith(package):
            theirs = imported.removeprefix(package).split(".")[0]
            assert order.index(theirs) < order.index(name), imported
            assert (folder, name, theirs) not in SIBLINGS, imported


@pytest.mark.parametrize("folder", ORDER)
def test_every_module_of_a_folder_has_its_place(folder: str) -> None:
    assert sorted(path.stem for path in (PACKAGE / folder).glob("*.py")) == sorted(ORDER[folder])


@pytest.mark.parametrize("module", [trio_ucx, ucp, chains], ids=["trio_ucx", "ucp", "chains"])
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
