"""Selects the cases that run: the tiers of testing.md.

* By default: one transport of each case that can run over both, and samples of tests that have many cases.
* ``--rest MINUTES``: what the default leaves out, in random order, as much as can begin in that time.
* ``--full``: all cases, and all rounds of each test.
* ``--part 2/5``: the second of five parts of what the other options select, by a checksum of each case's name.

The marker ``root`` is for tests that only root can run. Others skip them.

``--seed`` decides all choices, for each test independently: a test runs the same cases, whichever other tests run, in
whatever order and number of processes.
"""

from __future__ import annotations

import random
import time
import zlib
from collections.abc import Iterable
from typing import Any

import networks
import pytest


def _key(item: pytest.Function, without: str = "") -> str:
    """Identifies the test of a case; with ``without``, also its parameters except this one."""
    assert item.parent is not None
    parameters = item.callspec.params if without else {}
    rest = sorted((name, str(item.callspec.indices[name])) for name in parameters if name != without)
    return f"{item.parent.nodeid}::{item.originalname} {rest}"


def _groups(items: Iterable[pytest.Item], without: str = "") -> dict[str, list[pytest.Item]]:
    groups: dict[str, list[pytest.Item]] = {}
    for item in items:
        assert isinstance(item, pytest.Function)
        groups.setdefault(_key(item, without), []).append(item)
    return groups


def default(items: list[pytest.Item], seed: int) -> set[pytest.Item]:
    """The cases that run by default."""
    chosen = {item for item in items if item.get_closest_marker("full") is None}
    of_one_transport = [
        item
        for item in chosen
        if "transports" in getattr(getattr(item, "callspec", None), "params", ())
        and item.get_closest_marker("both_transports") is None
    ]
    for key, group in _groups(of_one_transport, without="transports").items():
        chosen.difference_update(_sample(group, len(group) - 1, seed, key))
    sampled = [item for item in chosen if item.get_closest_marker("sample") is not None]
    for key, group in _groups(sampled).items():
        marker = group[0].get_closest_marker("sample")
        assert marker is not None
        chosen.difference_update(_sample(group, len(group) - marker.args[0], seed, key))
    return chosen


def _sample(group: list[pytest.Item], count: int, seed: int, key: str) -> list[pytest.Item]:
    ordered = sorted(group, key=lambda item: item.nodeid)
    return random.Random(f"{seed} {key}").sample(ordered, max(0, count))


#: What only root can call.
_OF_ROOT = (networks.need, networks.open_network, networks.unshare, networks.as_user)


def _calls_what_needs_root(function: Any) -> bool:
    code = getattr(function, "__code__", None)
    return code is not None and any(
        function.__globals__.get(name) is privileged for name in code.co_names for privileged in _OF_ROOT
    )


def mark_root(items: list[pytest.Item]) -> None:
    """Gives the marker ``root`` to the tests that call what only root can, by themselves or in a fixture.

    A test that does so in another function needs the marker in its source; otherwise it fails.
    """
    for item in items:
        assert isinstance(item, pytest.Function)
        fixtures = [
            each.func for name in item.fixturenames for each in item._fixtureinfo.name2fixturedefs.get(name, ())
        ]
        if any(map(_calls_what_needs_root, (item.function, *fixtures))):
            item.add_marker(pytest.mark.root)


def select(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Removes all ``items`` that the command line does not ask for."""
    option = config.option
    if option.full or option.rest:
        for item in items:
            if item.get_closest_marker("timeout") is None:
                item.add_marker(pytest.mark.timeout(3600 if option.full else 600))
    selected = set(items) if option.full else default(items, option.seed)
    if option.rest:
        selected = set(items) - selected
    part, parts = map(int, option.part.split("/"))
    selected = {item for item in selected if zlib.crc32(item.nodeid.encode()) % parts == part % parts}
    left_out = [item for item in items if item not in selected]
    if left_out:
        config.hook.pytest_deselected(items=left_out)
    items[:] = [item for item in items if item in selected]
    if option.rest:
        random.Random(option.seed).shuffle(items)


class Deadline:
    """Skips, without a report, the tests that have not begun when the minutes of ``--rest`` are over."""

    def __init__(self, minutes: float) -> None:
        self._ends = time.monotonic() + 60 * minutes

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_protocol(self) -> bool | None:
        return True if time.monotonic() > self._ends else None
