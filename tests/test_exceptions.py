"""All exceptions of the package can be pickled and copied, so they come out of jobs in other processes."""

from __future__ import annotations

import copy
import importlib
import inspect
import multiprocessing
import pickle
import pkgutil
import socket
import ssl
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any, NoReturn

import pytest
import trio
from helpers import open_listener, open_pair, until

import trio_ucx
from trio_ucx import rpc, ucp
from trio_ucx._util.picklable import with_text
from trio_ucx.ucp._status import Origin, about, is_about

for module in pkgutil.walk_packages(trio_ucx.__path__, "trio_ucx."):
    try:
        importlib.import_module(module.name)
    except ImportError as missing:  # an optional package
        assert not str(missing.name).startswith("trio_ucx")

#: An argument for each type of parameter that a constructor has.
ARGUMENTS = {"str": "a text", "int": -25, "bytes": b"some", "bool": False, "tuple[int, ...]": (1, 2)}
#: Classes of Trio's and of Python's that trio_ucx raises, and marks with what they are about.
FOREIGN = (trio.EndOfChannel, trio.ClosedResourceError, trio.BrokenResourceError, MemoryError, OSError)


def classes(base: type[BaseException] = BaseException) -> Iterator[type[BaseException]]:
    for each in type.__subclasses__(base):
        if each.__module__.split(".")[0] == "trio_ucx":
            yield each
        yield from classes(each)


CLASSES = sorted({*classes()}, key=str)


class Unpicklable(Exception):
    def __reduce__(self) -> NoReturn:
        raise TypeError


def sample(kind: type[BaseException]) -> BaseException:
    """Makes an exception that has all that one can have."""
    own = any("__init__" in vars(each) for each in kind.__mro__ if each in CLASSES)
    parameters = inspect.signature(kind).parameters.values() if own else ()
    positional = [ARGUMENTS[each.annotation] for each in parameters if each.kind is each.POSITIONAL_OR_KEYWORD]
    named = {each.name: ARGUMENTS[each.annotation] for each in parameters if each.kind is each.KEYWORD_ONLY}
    error = kind(*positional, **named) if own else kind("a text")
    error.add_note("a note")
    error.__cause__, error.__context__ = Unpicklable(), Unpicklable()
    if issubclass(kind, trio_ucx.PeerLost):
        error.reason = "aborted"  # type: ignore[attr-defined]
    origin = Origin()
    origin.lost = lambda text: trio.BrokenResourceError(text)  # cannot be pickled
    return about(origin, error)


def seen(error: BaseException) -> dict[str, Any]:
    """What a user sees of an exception."""
    names = [name for name in dir(error) if not name.startswith("_")]
    attributes = {name: getattr(error, name, None) for name in names if not callable(getattr(error, name, None))}
    notes = getattr(error, "__notes__", [])
    return attributes | {"kind": type(error), "str": str(error), "repr": repr(error), "notes": notes}


def check_copies(error: BaseException) -> None:
    for protocol in range(pickle.HIGHEST_PROTOCOL + 1):
        assert seen(pickle.loads(pickle.dumps(error, protocol))) == seen(error)
    for copied in (copy.copy(error), copy.deepcopy(error)):
        assert seen(copied) == seen(error)


def fail_with(error: BaseException) -> NoReturn:
    raise error


@pytest.fixture(scope="module")
def pool() -> Iterator[ProcessPoolExecutor]:
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as pool:
        yield pool


def test_all_classes_are_found() -> None:
    assert len(CLASSES) > 40 and {trio_ucx.PeerLost, rpc.CallLost, ucp.RequestCancelled} < {*CLASSES}


@pytest.mark.parametrize("kind", [*CLASSES, *FOREIGN], ids=lambda kind: kind.__name__)
def test_an_exception_is_copied(kind: type[BaseException], pool: ProcessPoolExecutor) -> None:
    error = sample(kind)
    check_copies(error)
    for copied in (copy.copy(error), copy.deepcopy(error)):
        assert is_about(copied, error._trio_ucx_origin)  # type: ignore[attr-defined]
    with pytest.raises(kind) as caught:
        pool.submit(fail_with, error).result(60)
    assert seen(caught.value) == seen(error)


@pytest.mark.parametrize("kind", [*(each for each in CLASSES if issubclass(each, OSError)), OSError])
def test_a_text_that_was_changed_is_copied(kind: type[OSError]) -> None:
    foreign = [FileNotFoundError(2, "a text", "its file"), socket.gaierror(-2, "a text"), ssl.SSLError(1, "a text")]
    for error in (sample(kind), *foreign):
        assert isinstance(error, OSError)
        number = error.errno
        assert with_text(error, "another text") is error
        assert error.errno == number and error.strerror in (None, "another text")
        assert "another text" in str(error) and "a text" not in str(error)
        check_copies(error)


def test_only_one_function_changes_texts() -> None:
    for path in Path(trio_ucx.__file__).parent.rglob("*.py"):
        assert ".strerror = " not in path.read_text() or path.name == "picklable.py", path


async def test_what_is_raised_for_a_port_in_use_is_copied() -> None:
    async with open_listener() as listener:
        with pytest.raises(OSError, match="listening at 127.0.0.1:") as caught:
            await trio_ucx.open_ucx_listeners(listener.address[1], host="127.0.0.1")
    check_copies(caught.value)


def test_a_subclass_of_a_program_is_copied() -> None:
    class Sold(trio_ucx.PeerLost):
        def __init__(self, item: str, *, price: int) -> None:
            super().__init__(f"{item} for {price}")
            self.price = price

    assert seen(copy.copy(Sold("a book", price=3))) == seen(Sold("a book", price=3))


class Failing(rpc.Service):
    @rpc.method
    async def fail(self, call: rpc.Call) -> None:
        raise ValueError("no")

    @rpc.method
    async def wait(self, call: rpc.Call) -> None:
        await trio.sleep_forever()


def job(how: str) -> None:
    """Ends with an exception that trio_ucx has raised."""
    trio.run(_fail, how)


async def _fail(how: str) -> None:
    async with ucp.open_worker(config={"TLS": "tcp"}) as worker, open_pair(worker) as (client, server):
        with trio.fail_after(30):
            if how in ("EndOfChannel", "PeerClosed"):
                async with trio.open_nursery() as nursery:
                    nursery.start_soon(server.aclose)
                    await until(lambda: client.peer_state is not trio_ucx.PeerState.OPEN)
                    await (client.receive() if how == "EndOfChannel" else client.send(b""))
            elif how == "PeerLost":
                server.abort()
                await client.receive()
            elif how == "UnexpectedMessage":
                await server.send(b"no array")
                await client.receive_array()
            else:
                async with trio.open_nursery() as nursery:
                    nursery.start_soon(rpc.serving(Failing()), server)
                    called = rpc.Client(client)
                    if how == "RemoteError":
                        await called.call("fail")
                    else:
                        await called.call("wait", timeout=0.01)


@pytest.mark.parametrize(
    "kind",
    [
        *(trio.EndOfChannel, trio_ucx.PeerClosed, trio_ucx.PeerLost, trio_ucx.UnexpectedMessage),
        *(rpc.RemoteError, rpc.CallTimedOut),
    ],
)
def test_a_job_ends_with_an_exception(kind: type[Exception], pool: ProcessPoolExecutor) -> None:
    with pytest.raises((kind, ExceptionGroup)) as caught:
        pool.submit(job, kind.__name__).result(60)
    error: BaseException = caught.value
    while isinstance(error, ExceptionGroup):
        [error] = error.exceptions
    assert type(error) is kind
    assert kind is not trio_ucx.PeerLost or error.reason == "aborted"  # type: ignore[attr-defined]
    pool.submit(int).result(60)  # it goes on
