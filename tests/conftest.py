"""What every test checks: nothing native is left, no event was missed, nothing is in flight at a worker's end."""

from __future__ import annotations

import gc
import signal
import ssl
from collections.abc import AsyncIterator, Iterator

import pytest
import trustme
from helpers import TRANSPORTS, Certificates

from trio_ucx import ucp
from trio_ucx.testing import assert_no_live_handles
from trio_ucx.ucp import _engine

# Children must take Ctrl-C even where a shell has started us in the background, which ignores it.
signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_collection_finish() -> None:
    """Takes what is there before the first test, some hundred thousand objects, out of the garbage collector's sight:
    it is called after each test."""
    gc.collect()
    gc.freeze()


_closed: list[ucp.WorkerStatistics] = []
_finish_close = _engine.Engine._finish_close


def _recording_finish_close(engine: _engine.Engine) -> None:
    _finish_close(engine)
    assert engine.statistics_at_close is not None
    _closed.append(engine.statistics_at_close)


_engine.Engine._finish_close = _recording_finish_close  # type: ignore[method-assign]


@pytest.fixture(autouse=True)
def nothing_left(request: pytest.FixtureRequest) -> Iterator[None]:
    _closed.clear()
    yield
    assert_no_live_handles()
    for statistics in _closed:
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
    """Which transports the test runs over."""
    value: str = request.param
    return value


@pytest.fixture
async def worker(transports: str) -> AsyncIterator[ucp.Worker]:
    async with ucp.open_worker(config={"TLS": transports}) as worker:
        yield worker
