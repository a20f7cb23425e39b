"""Fragments of programs, in the documents and in docstrings, run in a program around them, and name nothing unknown.

The program has a server that echoes what it gets, a connection to it, and values for the names that fragments use. A
fragment may wait for more than the server sends; it is cancelled then.
"""

from __future__ import annotations

import ast
import builtins
import contextlib
import inspect
import re
import symtable
import textwrap
from collections.abc import AsyncIterator, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import trio
from documents import DOCUMENTS, ROOT, Block, blocks
from helpers import until

import trio_ucx
import trio_ucx.testing
from trio_ucx import mesh, rpc, ucp

numpy = pytest.importorskip("numpy")

#: Seconds after which a fragment that still runs is cancelled.
BOUND = 0.5
KEY = bytes(range(32))


def docstring_fragments() -> Iterator[Block]:
    """The indented blocks that are Python, of all docstrings."""
    for path in sorted((ROOT / "trio_ucx").rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if not isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
                continue
            for found in re.finditer(r"\n\n((?: {4}.*\n|\n)+)\n?(?=\S|\Z)", (ast.get_docstring(node) or "") + "\n"):
                text = textwrap.dedent(found[1]).strip() + "\n"
                with contextlib.suppress(SyntaxError):
                    compiled(text)
                    where = str(path.relative_to(ROOT))
                    yield Block(where, getattr(node, "lineno", 1), "python", text, "", None, None)


def compiled(text: str) -> Any:
    return compile(text, "fragment", "exec", ast.PyCF_ALLOW_TOP_LEVEL_AWAIT)


FRAGMENTS = [
    *(
        block
        for document in DOCUMENTS
        for block in blocks(document)
        if block.language == "python" and not (block.is_program or block.file or block.not_run)
    ),
    *docstring_fragments(),
]


async def echo(connection: trio_ucx.Connection) -> None:
    async def echo_conversation(talk: trio_ucx.Channel) -> None:
        async with talk:
            async for message in talk:
                await talk.send(message)

    async def echo_messages() -> None:
        while True:
            tag, message = await connection.receive_any()
            await connection.send(message, tag=tag)

    async with trio.open_nursery() as nursery:
        nursery.start_soon(echo_messages)
        async for talk in connection.conversations():
            nursery.start_soon(echo_conversation, talk)


class Store(rpc.Service):
    @rpc.method
    async def get(self, call: rpc.Call, key: str) -> int:
        return 1


@contextlib.asynccontextmanager
async def context(text: str, folder: Path) -> AsyncIterator[dict[str, Any]]:
    """What fragments find: see the module's docstring."""
    authkey = KEY if "authkey" in text else None
    async with trio.open_nursery() as nursery, contextlib.AsyncExitStack() as stack:
        server = await nursery.start(partial(trio_ucx.serve_ucx, echo, 0, authkey=authkey, on_handler_error="log"))
        store = await nursery.start(partial(trio_ucx.serve_ucx, rpc.serving(Store()), 0))
        connection = await stack.enter_async_context(trio_ucx.connect(server.address, authkey=authkey))
        await until(lambda: server.statistics().handlers)
        names: dict[str, Any] = {
            "contextlib": contextlib,
            "trio": trio,
            "trio_ucx": trio_ucx,
            "ucp": ucp,
            "rpc": rpc,
            "mesh": mesh,
            "numpy": numpy,
            "np": numpy,
            "nursery": nursery,
            "server": server,
            "host": server.address[0],
            "port": server.address[1],
            "address": store.address if "rpc" in text else server.address,
            "connection": connection,
            "worker": connection.worker,
            "endpoint": connection.endpoint,
            "handler": echo,
            "key": KEY,
            "data": b"some data",
            "buffer": bytearray(2**20),
            "array": numpy.arange(6.0).reshape(2, 3),
        }
        yield names
        nursery.cancel_scope.cancel()


def unknown_names(text: str, known: set[str]) -> set[str]:
    """The global names that a fragment uses, and that neither it nor the context defines."""
    wrapped = "async def fragment():\n" + textwrap.indent(text, "    ")
    tables, unknown = [symtable.symtable(wrapped, "fragment", "exec")], set()
    while tables:
        table = tables.pop()
        tables += table.get_children()
        unknown |= {
            symbol.get_name() for symbol in table.get_symbols() if symbol.is_global() and symbol.is_referenced()
        }
    return unknown - known - set(vars(builtins)) - {"fragment"}


# Fragments open what the rest of their program would close.
@pytest.mark.filterwarnings("ignore::ResourceWarning", "ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.parametrize("block", FRAGMENTS, ids=lambda block: block.where)
def test_fragment(block: Block, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    # As a launcher says it: of a group that does not meet.
    for name, value in {"RANK": "0", "SIZE": "4", "MEETING": f"file://{tmp_path}/meeting"}.items():
        monkeypatch.setenv(f"TRIO_UCX_{name}", value)

    async def run() -> None:
        async with context(block.text, tmp_path) as names:
            assert unknown_names(block.text, set(names)) == set()
            host, port = names["address"]
            text = (
                re.sub(r'"[\w.]+:13337"', repr(f"{host}:{port}"), block.text).replace("13337", "0").replace("9100", "0")
            )
            with trio.move_on_after(BOUND):
                result = eval(compiled(text), names)
                if inspect.iscoroutine(result):
                    await result

    trio.run(run)
