"""No key in a traceback with local variables, which crash reporters print."""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import traceback
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import trio
from helpers import free_port

import trio_ucx
from trio_ucx import mesh, rpc
from trio_ucx._cli import credentials, local_pair
from trio_ucx._cli import mesh as mesh_command
from trio_ucx._util.hidden import HiddenBytes, HiddenText

HERE = Path(__file__).parent
TEXT = "an authkey that nobody may see, 0123456789"
KEY = TEXT.encode()


class Broken(Exception):
    """Raised inside."""


def give_key() -> bytes:
    """The key of the caller: its frame is the user's."""
    return TEXT.encode()


def frames(error: BaseException) -> Iterator[tuple[str, str, str]]:
    """Yields the places, names and reprs of all local variables, and of ``self``'s attributes, in our frames."""
    seen = [error]
    for one in seen:
        seen += [each for each in (one.__cause__, one.__context__, *getattr(one, "exceptions", ())) if each]
        assert traceback.TracebackException.from_exception(one, capture_locals=True)
        for frame, _ in traceback.walk_tb(one.__traceback__):
            if "/trio_ucx/" not in frame.f_code.co_filename:
                continue
            for name, value in frame.f_locals.items():
                yield f"{frame.f_code.co_filename}:{frame.f_code.co_name}", name, repr(value)
                for attribute, inner in getattr(value, "__dict__", {}).items() if name == "self" else ():
                    yield frame.f_code.co_name, f"self.{attribute}", repr(inner)


def check(error: BaseException, key: bytes = KEY) -> None:
    """The key is in no variable, as text, hexadecimal or bytes; and some variables were looked at."""
    shown = list(frames(error))
    assert shown
    for place, name, text in shown:
        assert key.decode() not in text and key.hex() not in text, (place, name, text)


async def connects(port: int) -> None:
    async with trio_ucx.connect(("127.0.0.1", port), authkey=give_key()):
        pass


async def opens_stream(port: int) -> None:
    await trio_ucx.open_ucx_stream("127.0.0.1", port, authkey=give_key())


async def connects_for_rpc(port: int) -> None:
    async with rpc.connect(("127.0.0.1", port), authkey=give_key()):
        pass


async def listens(port: int) -> None:
    await trio_ucx.open_ucx_listeners(port, host="192.0.2.1", authkey=give_key())


async def serves(port: int) -> None:
    await trio_ucx.serve_ucx(trio.sleep, port, host="192.0.2.1", authkey=give_key())


async def joins(port: int) -> None:
    async with mesh.join(rank=1, size=2, meeting=f"127.0.0.1:{port}", authkey=give_key(), timeout=0.2):
        pass


async def joins_as_rank_0(port: int) -> None:
    async with mesh.join(rank=0, size=2, meeting=f"127.0.0.1:{port}", authkey=give_key(), timeout=0.2):
        pass


async def joins_without_a_launcher(port: int) -> None:
    async with mesh.join(authkey=give_key()):
        pass


async def has_wrong_arguments(port: int) -> None:
    async with mesh.join(rank=0, size=2, on_loss="no", authkey=give_key()):  # type: ignore[arg-type]
        pass


async def wrong_timeout(port: int) -> None:
    await trio_ucx.open_ucx_stream("127.0.0.1", port, connect_timeout=-1, authkey=give_key())


CASES: list[Callable[[int], Awaitable[None]]] = [
    *(connects, opens_stream, connects_for_rpc, listens, serves),
    *(joins, joins_as_rank_0, joins_without_a_launcher, has_wrong_arguments, wrong_timeout),
]


@pytest.mark.parametrize("where", ["argument", "environment"])
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.__name__)
async def test_calls(case: Callable[[int], Awaitable[None]], where: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if where == "environment":
        monkeypatch.setenv("TRIO_UCX_AUTHKEY", TEXT)
        monkeypatch.setattr(sys.modules[__name__], "give_key", trio_ucx.authkey)
    with pytest.raises((Exception, BaseExceptionGroup)) as caught:
        await case(free_port())
    check(caught.value)


@pytest.mark.parametrize("case", [connects, opens_stream, connects_for_rpc, joins], ids=lambda case: case.__name__)
async def test_failures_inside(case: Callable[[int], Awaitable[None]], monkeypatch: pytest.MonkeyPatch) -> None:
    """An internal error in the exchange."""

    def fail(*arguments: Any, **more: Any) -> None:
        raise Broken

    async with trio.open_nursery() as nursery:
        server = await nursery.start(lambda task_status: _serve(task_status))
        monkeypatch.setattr("trio_ucx._handshake.exchange.Exchange._next_frame", fail)
        with pytest.raises((Exception, BaseExceptionGroup)) as caught:
            await case(server)
        check(caught.value)
        nursery.cancel_scope.cancel()


async def _serve(task_status: trio.TaskStatus[int]) -> None:
    listeners = await trio_ucx.open_ucx_listeners(0, host="127.0.0.1", authkey=KEY)
    async with listeners[0]:
        task_status.started(listeners[0].address[1])
        await trio.sleep_forever()


def test_a_key_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "key"
    path.write_bytes(KEY[:12])  # too short
    path.chmod(0o600)
    monkeypatch.setenv("TRIO_UCX_AUTHKEY_FILE", str(path))
    with pytest.raises(ValueError) as caught:
        trio_ucx.authkey()
    check(caught.value, KEY[:12])
    monkeypatch.setenv("TRIO_UCX_AUTHKEY", TEXT[:12])
    with pytest.raises(ValueError) as caught:
        trio_ucx.authkey()
    check(caught.value, KEY[:12])


def test_the_command_line() -> None:
    arguments = argparse.Namespace(authkey=None, allow_anyone=False)
    key, text = credentials.server_key(arguments)
    assert type(key) is HiddenBytes and type(text) is HiddenText and text.encode() == key
    environment = local_pair.with_authkey(text)
    assert text not in repr(environment) and f"{text}" == environment["TRIO_UCX_AUTHKEY"]
    for each in mesh_command.environments(2, HERE):
        assert str(each["TRIO_UCX_AUTHKEY"]) not in repr(each)


def test_the_key_is_still_the_key() -> None:
    hidden, text = HiddenBytes(KEY), HiddenText(TEXT)
    assert hidden == KEY and hash(hidden) == hash(KEY) and hidden.hex() == KEY.hex() and hidden.decode() == TEXT
    assert f"{text}" == TEXT and text == TEXT and TEXT not in f"{[hidden, text]} {hidden}"
    done = subprocess.run(["printenv", "KEY"], env={"KEY": text, "PATH": os.environ["PATH"]}, capture_output=True)
    assert done.stdout.decode().strip() == TEXT
