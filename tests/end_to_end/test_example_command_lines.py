"""The examples' command lines: what they refuse, and how those that wait are ended."""

from __future__ import annotations

import functools
import signal
from pathlib import Path
from types import ModuleType

import pytest

from .programs import EXAMPLES, assert_complaint, load, program, run_here

pytest.importorskip("h11")
pytest.importorskip("rich")

NOBODY, NOWHERE, NOT_OURS = "127.0.0.1:9", "no.such.host.invalid:9", "192.0.2.1:0"
#: What a bad address stands for.
ADDRESS = "ADDRESS"

example = functools.cache(lambda name: load(EXAMPLES / f"{name}.py"))


def run(name: str, arguments: list[str]) -> int:
    module: ModuleType = example(name)
    return run_here(module, *arguments)


@pytest.mark.parametrize(
    ("name", "arguments", "reason"),
    [
        ("copy_files", ["send", str(EXAMPLES), NOBODY], NOBODY),
        ("copy_files", ["send", str(EXAMPLES), NOWHERE], "[Errno "),
        ("publish", ["watch", NOWHERE], "[Errno "),
        ("copy_files", ["send", "/does/not/exist", NOBODY], "No such file or directory"),
        ("copy_files", ["send", __file__, NOBODY], "Not a directory"),
        ("copy_files", ["receive", __file__], "File exists"),
        ("copy_files", ["receive", str(EXAMPLES), "--listen", NOT_OURS], "192.0.2.1"),
        ("hash_table", ["get", NOBODY, "key"], NOBODY),
        ("hash_table", ["put", NOWHERE, "key", "value"], "[Errno "),
        ("hash_table", ["serve", "--listen", NOT_OURS], "192.0.2.1"),
        ("hash_table", ["serve", "--size", "100", "--buckets", "1000"], "a table of 1000 buckets takes 32032 "),
        ("hash_table", ["serve", "--size", str(2**47)], "memory"),
        ("http_client", [NOBODY, "/"], NOBODY),
        ("http_client", [NOBODY, "/", "--tcp"], "127.0.0.1"),
        ("http_client", [NOWHERE, "/"], "[Errno "),
        ("http_client", [NOBODY, "/", "--tls", "/does/not/exist"], "/does/not/exist: No such file or directory"),
        ("http_client", [NOBODY, "/", "--tls", __file__], "no certificate or crl found"),
        ("http_server", [str(EXAMPLES), "--listen", NOT_OURS], "192.0.2.1"),
        ("http_server", [str(EXAMPLES), "--tls", "/does/not", "/exist"], "/does/not, /exist: No such file"),
        ("http_server", [str(EXAMPLES), "--tls", __file__, __file__], "PEM"),
        ("kv_cache", ["decode", NOBODY, "prompt"], NOBODY),
        ("kv_cache", ["decode", NOWHERE, "prompt"], "[Errno "),
        ("kv_cache", ["prefill", "--listen", NOT_OURS, "--blocks", "8"], "192.0.2.1"),
        ("kv_cache", ["prefill", "--blocks", str(2**40)], "memory"),
        ("rpc", ["call", NOBODY, "add"], NOBODY),
        ("rpc", ["call", NOWHERE, "add"], "[Errno "),
        ("rpc", ["serve", "--listen", NOT_OURS], "192.0.2.1"),
        ("worker_pool", ["work", NOBODY], NOBODY),
        ("worker_pool", ["work", NOWHERE], "[Errno "),
        ("worker_pool", ["demo", "--listen", NOT_OURS], "192.0.2.1"),
    ],
)
def test_complains_in_one_line(name: str, arguments: list[str], reason: str, capfd: pytest.CaptureFixture[str]) -> None:
    assert run(name, arguments) == 1
    assert_complaint(capfd.readouterr().err, Path(name), reason)


@pytest.mark.parametrize(
    ("name", "arguments"),
    [
        ("copy_files", ["send", ".", ADDRESS]),
        ("copy_files", ["send", ".", NOBODY, "--jobs", "65"]),
        ("hash_table", ["get", ADDRESS, "key"]),
        ("hash_table", ["serve", "--size", "0"]),
        ("hash_table", ["bench", NOBODY, "--tasks", "x"]),
        ("http_client", [ADDRESS, "/"]),
        ("http_server", [".", "--listen", ADDRESS]),
        ("http_server", ["/does/not/exist"]),
        ("http_server", [__file__]),
        ("kv_cache", ["decode", ADDRESS, "prompt"]),
        ("kv_cache", ["prefill", "--listen", ADDRESS]),
        ("kv_cache", ["prefill", "--blocks", "7"]),
        ("rpc", ["call", ADDRESS, "add"]),
        ("rpc", ["call", NOBODY, "add", "{"]),
        ("rpc", ["call", NOBODY, "add", "[]"]),
        ("worker_pool", ["work", ADDRESS]),
        ("worker_pool", ["demo", "--workers", "0"]),
        ("worker_pool", []),
    ],
)
def test_refuses_bad_arguments(name: str, arguments: list[str], capfd: pytest.CaptureFixture[str]) -> None:
    for address in ["nonsense", "host:", "host:port", ":1", "host:65536", "host:-1"]:
        assert run(name, [address if argument is ADDRESS else argument for argument in arguments]) == 2
        assert capfd.readouterr().err.startswith("usage: ")
        if ADDRESS not in arguments:
            break


@pytest.mark.full
@pytest.mark.parametrize(
    ("name", "arguments"),
    [("copy_files", ["receive", "."]), ("hash_table", ["serve"]), ("http_server", ["."]), ("rpc", ["serve"])],
)
async def test_is_interrupted_while_nobody_calls(
    name: str, arguments: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with program(EXAMPLES / f"{name}.py", *arguments) as server:
        await server.wait_address()
        server.process.send_signal(signal.SIGINT)
        assert await server.end() == (130, "")
