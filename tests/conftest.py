"""Options and fixtures. After every test: no native handle is alive, no event was missed, nothing was in flight."""

from __future__ import annotations

import gc
import os
import random
import signal
import ssl
from collections.abc import AsyncIterator, Iterator
from typing import Any

import networks
import pytest
import selection
import trustme
from helpers import SANITIZED, TRANSPORTS, Certificates, Rounds
from hypothesis import settings
from remote import Ground, open_ground

from trio_ucx import ucp
from trio_ucx.testing import assert_no_live_handles
from trio_ucx.ucp._engine import lifetime as _lifetime
from trio_ucx.ucp._engine.engine import Engine

# Children must take Ctrl-C even where a shell has started us in the background, which ignores it.
signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("how much is tested")
    group.addoption("--full", action="store_true", help="all cases of tests that have many, and all their rounds")
    group.addoption("--part", default="1/1", metavar="K/N", help="the K-th of N parts of what runs")
    group.addoption("--rest", type=float, default=0, metavar="MINUTES", help="what is not run by default, at random")
    group.addoption("--seed", type=int, default=None, help="choose cases and random data as a run with this seed did")


def pytest_configure(config: pytest.Config) -> None:
    if hasattr(config, "workerinput"):  # one of pytest-xdist's processes, which choose the same cases
        config.option.seed = config.workerinput["seed"]
    elif config.option.seed is None:
        config.option.seed = random.SystemRandom().randrange(10**6)
    if config.option.rest:
        config.pluginmanager.register(selection.Deadline(config.option.rest))
    # hypothesis: the same examples in each run; with --full others each time, or those of --hypothesis-seed.
    full = config.option.full
    settings.register_profile(
        "model", max_examples=10_000 if full else 400, derandomize=not full, deadline=None, database=None
    )


@pytest.hookimpl(optionalhook=True)
def pytest_configure_node(node: Any) -> None:
    node.workerinput["seed"] = node.config.option.seed


def pytest_report_header(config: pytest.Config) -> str:
    option = config.option
    how = "all cases" if option.full else "the rest" if option.rest else "a sample of all cases"
    return f"{how}, part {option.part} (testing.md); random choices: --seed {option.seed}"


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    selection.mark_root(items)
    selection.select(config, items)


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    networks.marked_root = item.get_closest_marker("root") is not None
    if networks.marked_root and os.geteuid() != 0:
        pytest.skip("only root can run it: pytest -m root")


@pytest.fixture
def rounds(request: pytest.FixtureRequest) -> Rounds:
    """How many rounds a test makes: the first number, or the second with ``--full``."""
    return lambda few, all: all if request.config.option.full else few


@pytest.fixture
def chance(request: pytest.FixtureRequest) -> random.Random:
    """Random data that another run with the same ``--seed`` has, too."""
    return random.Random(f"{request.config.option.seed} {request.node.nodeid}")


def pytest_collection_finish() -> None:
    gc.collect()
    gc.freeze()


_closed: list[ucp.WorkerStatistics] = []
_finish_close = _lifetime._finish_close


def _recording_finish_close(engine: Engine) -> None:
    _finish_close(engine)
    assert engine.teardown.statistics is not None
    _closed.append(engine.teardown.statistics)


_lifetime._finish_close = _recording_finish_close


@pytest.fixture(autouse=True)
def nothing_left(request: pytest.FixtureRequest) -> Iterator[None]:
    _closed.clear()
    yield
    assert_no_live_handles()
    gc.freeze()  # the next collection then skips the hundreds of thousands of objects that exist now
    for statistics in _closed:
        if SANITIZED != "valgrind":  # which is so slow that what the safety net finds has often arrived just then
            assert statistics.missed_events == 0, "an event was missed"
        if request.node.get_closest_marker("cut_off") is None:
            assert statistics.operations_in_flight == 0, "operations were in flight when the worker was closed"


@pytest.fixture(scope="session")
def certificates() -> Certificates:
    authority = trustme.CA()
    server, client = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER), ssl.create_default_context()
    authority.issue_cert("localhost").configure_cert(server)
    authority.configure_trust(client)
    return Certificates(server, client)


@pytest.fixture(params=TRANSPORTS)
def transports(request: pytest.FixtureRequest) -> str:
    """The value of UCX_TLS that the test runs with."""
    value: str = request.param
    return value


@pytest.fixture
async def worker(transports: str) -> AsyncIterator[ucp.Worker]:
    async with ucp.open_worker(config={"TLS": transports}) as worker:
        yield worker


@pytest.fixture
async def ground(transports: str) -> AsyncIterator[Ground]:
    async with open_ground(transports) as ground:
        yield ground


@pytest.fixture
def over(transports: str, monkeypatch: pytest.MonkeyPatch) -> str:
    """The value of UCX_TLS that the test runs with, in this process and in those that it starts."""
    monkeypatch.setenv("UCX_TLS", transports)
    return transports
