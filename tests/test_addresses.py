"""Addresses as text, and as pairs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import trio

import trio_ucx
from trio_ucx import ucp

PAIRS = {
    "10.0.0.5:13337": ("10.0.0.5", 13337),
    "some.host.example:1": ("some.host.example", 1),
    "[::1]:65535": ("::1", 65535),
    "[fe80::1%eth0]:7": ("fe80::1%eth0", 7),
    "unix:/run/with:colon": ("unix:/run/with:colon", 0),
}


@pytest.mark.parametrize("text", PAIRS)
def test_there_and_back(text: str) -> None:
    pair = PAIRS[text]
    assert trio_ucx.parse_address(text) == pair == trio_ucx.parse_address(pair)
    assert trio_ucx.format_address(pair) == text


def test_addresses_of_sockets() -> None:
    assert trio_ucx.format_address(("::1", 5, 0, 0)) == "[::1]:5"  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "wrong",
    [
        "",
        "host",
        "host:",
        ":5",
        "::1:5",
        "host:65536",
        "host:-1",
        "host:5x",
        "unix:",
        ("unix:/x", 1),
        ("host",),
        ("h", -1),
    ],
)
def test_values_that_are_no_addresses(wrong: Any) -> None:
    with pytest.raises(ValueError):
        trio_ucx.parse_address(wrong)
    if not isinstance(wrong, str):
        with pytest.raises(ValueError):
            trio_ucx.format_address(wrong)


@pytest.mark.parametrize("wrong", [None, 5, b"host:5", (5, 5), ("host", "5"), ucp])
def test_types_that_are_no_addresses(wrong: Any) -> None:
    for function in trio_ucx.parse_address, trio_ucx.format_address:
        with pytest.raises(TypeError):
            function(wrong)
    with pytest.raises(TypeError, match="pair"):
        trio_ucx.format_address("host:5")  # type: ignore[arg-type]


async def test_what_listeners_give_and_connect_takes(worker: ucp.Worker, tmp_path: Path) -> None:
    for host in "127.0.0.1", f"unix:{tmp_path}/socket":
        [listener] = await trio_ucx.open_ucx_listeners(0, host=host, worker=worker)
        async with listener:
            text = trio_ucx.format_address(listener.address)
            assert trio_ucx.parse_address(text) == listener.address
            with trio.fail_after(10):
                async with trio_ucx.connect(text, worker=worker) as client, await listener.accept():
                    assert client.remote_address == listener.address
