"""Statistics of servers and workers, which outlive their connections, and trio_ucx.metrics, which shows them."""

from __future__ import annotations

import os
import re
import socket
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Awaitable, Callable
from typing import Any

import prometheus_client
import pytest
import trio
from helpers import open_listener, open_pair, until, until_over
from prometheus_client.openmetrics.parser import text_string_to_metric_families
from test_server import echo, serving

import trio_ucx
from trio_ucx import metrics, ucp
from trio_ucx._statistics import Totals
from trio_ucx.testing import internals, open_peer_process

KEY, OTHER_KEY = b"k" * 16, b"o" * 16


async def exchange(server: trio_ucx.Server, worker: ucp.Worker, *messages: bytes) -> None:
    async with trio_ucx.connect(server.address, worker=worker) as client:
        for message in messages:
            await client.send(message)
            assert await client.receive() == message


def ended(totals: ucp.ConnectionTotals) -> dict[str, int]:
    return {reason: count for reason, count in totals.ended.items() if count}


# ---- totals ----


async def test_sums_outlive_the_connections(worker: ucp.Worker) -> None:
    async with serving(echo, worker) as server:
        assert server.statistics().connections == ucp.ConnectionTotals(
            ended=dict.fromkeys(["closed", "aborted_here", "aborted", "ended", "vanished", "unresponsive", "broken"], 0)
        )
        for round in range(3):
            await exchange(server, worker, b"abc", b"", bytes(100_000))
            await until(lambda: not server.statistics().connections.open)
            totals = server.statistics().connections
            count = round + 1
            assert (totals.opened, ended(totals)) == (count, {"closed": count})
            assert (totals.messages_sent, totals.bytes_sent) == (3 * count, 100_003 * count)
            assert (totals.messages_received, totals.bytes_received) == (3 * count, 100_003 * count)
        both = worker.statistics().connections
        assert (both.opened, both.open, ended(both)) == (6, 0, {"closed": 6})
        assert both.messages_sent == both.messages_received == 18 and both.bytes_sent == both.bytes_received == 600_018
    assert server.statistics().connections == totals


async def test_open_connections_count_as_they_are(worker: ucp.Worker) -> None:
    async with serving(echo, worker) as server, trio_ucx.connect(server.address, worker=worker) as client:
        for count in (1, 2):
            await client.send(b"12345")
            await client.receive()
            totals = server.statistics().connections
            assert (totals.open, totals.opened, ended(totals)) == (1, 1, {})
            assert totals.messages_sent == totals.messages_received == count and totals.bytes_sent == 5 * count
        assert server.statistics().handlers == 1


async def test_one_connection_is_counted_by_both_workers(transports: str, worker: ucp.Worker) -> None:
    async with ucp.open_worker(config={"TLS": transports}) as other:
        assert worker.statistics().connections == ucp.ConnectionTotals()
        async with open_pair(other, worker) as (client, server):
            await client.send(bytes(9))
            await server.receive()
            await server.send(b"")
            await client.receive()
        theirs, ours = other.statistics().connections, worker.statistics().connections
    assert (ours.messages_sent, ours.bytes_sent, ours.messages_received, ours.bytes_received) == (1, 0, 1, 9)
    assert (theirs.messages_sent, theirs.bytes_sent, theirs.messages_received, theirs.bytes_received) == (1, 9, 1, 0)
    assert other.statistics().connections == theirs  # after its close


@pytest.mark.parametrize("side", ["client", "server"])
async def test_isolated_connections_count_at_the_worker_that_was_given(worker: ucp.Worker, side: str) -> None:
    async with ucp.open_worker(config={"TLS": "tcp"}) as other:
        client_options: dict[str, Any] = {"isolate": side == "client", "worker": other}
        async with serving(echo, worker, isolate=side == "server") as server:
            async with trio_ucx.connect(server.address, **client_options) as client:
                await client.send(b"x")
                await client.receive()
                assert (client.worker is not other) == (side == "client")
                assert client.worker.statistics().connections == other.statistics().connections
                names = [line for line in metrics.text().splitlines() if line.startswith("trio_ucx_worker_endpoints{")]
                assert len(names) == 2
            await until(lambda: not server.statistics().connections.open)
            for each in (worker, other):
                totals = each.statistics().connections
                assert (totals.opened, totals.messages_sent, ended(totals)) == (1, 1, {"closed": 1})


Use = Callable[[trio_ucx.Connection, trio_ucx.Connection], Awaitable[None]]


async def close(client: trio_ucx.Connection, server: trio_ucx.Connection) -> None:
    async with trio.open_nursery() as nursery:
        nursery.start_soon(client.aclose)
        nursery.start_soon(server.aclose)


async def abort(client: trio_ucx.Connection, server: trio_ucx.Connection) -> None:
    client.abort()
    await until_over(server)
    server.abort()


async def abort_at_once(client: trio_ucx.Connection, server: trio_ucx.Connection) -> None:
    client.abort()
    server.abort()


async def abort_after_a_close(client: trio_ucx.Connection, server: trio_ucx.Connection) -> None:
    await client.aclose()
    server.abort()


async def break_the_connection(client: trio_ucx.Connection, server: trio_ucx.Connection) -> None:
    internals(server).share.fail(trio_ucx.UCXError(-25, "pretended"))
    await until_over(client)
    server.abort()
    client.abort()


async def do_not_receive(client: trio_ucx.Connection, server: trio_ucx.Connection) -> None:
    client.send_nowait(bytes(2**20))
    with pytest.raises(trio.BrokenResourceError, match="close_timeout"):
        await client.aclose()
    await until_over(server)
    server.abort()


@pytest.mark.parametrize(
    ("end", "client_reason", "server_reason"),
    [
        (close, "closed", "closed"),
        (abort, "aborted_here", "aborted"),
        (abort_at_once, "aborted_here", "aborted_here"),
        (abort_after_a_close, "closed", "closed"),
        (break_the_connection, "aborted", "broken"),
        (do_not_receive, "unresponsive", "aborted"),
    ],
)
async def test_reasons(transports: str, worker: ucp.Worker, end: Use, client_reason: str, server_reason: str) -> None:
    async with ucp.open_worker(config={"TLS": transports}) as other:
        async with open_pair(other, worker, close_timeout=0.3) as (client, server):
            with trio.fail_after(15):
                await end(client, server)
        assert ended(other.statistics().connections) == {client_reason: 1}
        assert ended(worker.statistics().connections) == {server_reason: 1}
        for each in (worker, other):
            assert (each.statistics().connections.opened, each.statistics().connections.open) == (1, 0)


@pytest.mark.cut_off
async def test_killed_peer_has_ended(worker: ucp.Worker) -> None:
    async with open_peer_process(echo, worker=worker) as (connection, faults):
        await connection.send(b"x")
        await connection.receive()
        faults.kill_peer()
        await until_over(connection)
    assert ended(worker.statistics().connections) == {"ended": 1}


async def test_worker_that_closes_aborts(transports: str) -> None:
    with pytest.warns(ResourceWarning, match="unclosed"):
        async with ucp.open_worker(config={"TLS": transports}) as worker, open_listener(worker) as listener:
            client = await trio_ucx.connect(listener.address, worker=worker).__aenter__()
            server = await listener.accept()
    assert ended(worker.statistics().connections) in ({"aborted_here": 2}, {"aborted_here": 1, "aborted": 1})
    assert client.closed and server.closed


# ---- what else a server counts ----


async def test_handlers_and_drains(worker: ucp.Worker) -> None:
    async def wait_for_ever(connection: trio_ucx.Connection) -> None:
        await trio.sleep_forever()

    async with serving(wait_for_ever, worker) as server:
        async with trio_ucx.connect(server.address, worker=worker) as client:
            await until(lambda: server.statistics().handlers == 1)
            assert (server.statistics().drains, server.statistics().handlers_cancelled) == (0, 0)
            async with trio.open_nursery() as nursery:
                for _ in range(2):
                    nursery.start_soon(server.drain, 0.01)
                await until_over(client)
        statistics = server.statistics()
        assert (statistics.drains, statistics.handlers_cancelled, statistics.handlers) == (2, 1, 0)
        assert ended(statistics.connections) == {"aborted_here": 1}


async def test_a_drain_that_cancels_nothing(worker: ucp.Worker) -> None:
    async with serving(echo, worker) as server, trio_ucx.connect(server.address, worker=worker):
        await until(lambda: server.statistics().handlers == 1)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(server.drain, 5)
            await until(lambda: not server.statistics().handlers)
        assert (server.statistics().drains, server.statistics().handlers_cancelled) == (1, 0)


def refusals(server: trio_ucx.Server) -> dict[str, int]:
    return {reason: count for reason, count in server.statistics().refused.items() if count}


async def test_refused_clients_by_reason(worker: ucp.Worker) -> None:
    async with serving(echo, worker, authkey=KEY, connect_timeout=0.5) as server:
        assert set(server.statistics().refused.values()) == {0}
        with socket.create_connection(server.address) as stranger:
            stranger.sendall(b"GET / HTTP/1.1\r\n\r\n")
            await until(lambda: refusals(server) == {"not_trio_ucx": 1})
        with pytest.raises(trio_ucx.NotAdmitted):
            await trio_ucx.connect(server.address, worker=worker, authkey=OTHER_KEY).__aenter__()
        await until(lambda: refusals(server) == {"not_trio_ucx": 1, "not_admitted": 1})
        with socket.create_connection(server.address):
            await until(lambda: server.statistics().handshaking == 1)
        await until(lambda: refusals(server) == {"not_trio_ucx": 1, "not_admitted": 1, "other": 1})
        server[0]._acceptor.draining = True  # as during a drain that waits for a handler
        with pytest.raises(trio_ucx.ServerDraining):
            await trio_ucx.connect(server.address, worker=worker, authkey=KEY).__aenter__()
        await until(lambda: refusals(server).get("draining") == 1)
        assert [listener.statistics().refused for listener in server] == [4]


async def test_refused_because_the_server_is_full(worker: ucp.Worker, monkeypatch: pytest.MonkeyPatch) -> None:
    async with serving(echo, worker, backlog=1, connect_timeout=0.3) as server:
        monkeypatch.setattr(server[0]._acceptor, "_has_place", lambda: False)
        with pytest.raises(trio_ucx.ServerFull):
            await trio_ucx.connect(server.address, worker=worker).__aenter__()
        await until(lambda: refusals(server) == {"full": 1})


# ---- as text ----


def parsed(text: str | None = None) -> dict[str, float]:
    """The samples of the text, by name and labels."""
    samples = [sample for family in text_string_to_metric_families(text or metrics.text()) for sample in family.samples]
    named = [sample.name + "".join(f" {value}" for _, value in sorted(sample.labels.items())) for sample in samples]
    assert len(named) == len(set(named)), "a series appears twice"
    return {name: sample.value for name, sample in zip(named, samples, strict=True)}


async def test_text() -> None:
    assert parsed() == {}
    async with ucp.open_worker(name="red", config={"TLS": "tcp"}) as worker, ucp.open_worker(name="red") as other:
        async with serving(echo, worker) as server:
            async with trio_ucx.connect(server.address, worker=other) as client:
                await client.send(bytes(10))
                await client.receive()
                at, values = trio_ucx.format_address(server.address), parsed()
                assert values[f"trio_ucx_server_connections {at}"] == values["trio_ucx_worker_connections red"] == 1
                assert values[f"trio_ucx_server_handlers {at}"] == 1
            await until(lambda: not server.statistics().connections.open)
            values = parsed()
            assert values[f"trio_ucx_server_connections {at}"] == values["trio_ucx_worker_connections red"] == 0
            for name, value in {"connections_opened": 1, "messages_sent": 1, "received_bytes": 10}.items():
                assert values[f"trio_ucx_server_{name}_total {at}"] == value
                assert values[f"trio_ucx_worker_{name}_total red"] == value
            assert values[f"trio_ucx_server_connections_ended_total closed {at}"] == 1
            assert values[f"trio_ucx_server_clients_refused_total full {at}"] == 0
            [second] = {name.split(" ", 1)[1] for name in values if name.startswith("trio_ucx_worker_endpoints r")} - {
                "red"
            }
            assert re.fullmatch(r"red \d+", second)  # its name is taken
            assert values[f"trio_ucx_worker_sent_bytes_total {second}"] == 10
        values = parsed()
        assert not [name for name in values if name.startswith("trio_ucx_server")]  # it has ended
        assert values["trio_ucx_worker_sent_bytes_total red"] == 10
    assert parsed() == {}  # they have closed


async def test_kinds_of_metrics(worker: ucp.Worker) -> None:
    async with serving(echo, worker):
        families = list(text_string_to_metric_families(metrics.text()))
    kinds = {family.name.removeprefix("trio_ucx_"): (family.type, family.unit) for family in families}
    gauges = {name for name, (kind, _) in kinds.items() if kind == "gauge"}
    assert gauges == {
        *("server_connections", "server_handlers", "server_handshakes", "server_connections_waiting"),
        *("worker_connections", "worker_endpoints", "worker_left_over_operations", "worker_closed_memories"),
    }
    assert {kind for kind, _ in kinds.values()} == {"gauge", "counter"}
    assert {name for name, (_, unit) in kinds.items() if unit == "bytes"} == {
        f"{who}_{what}_bytes" for who in ("server", "worker") for what in ("sent", "received")
    }
    assert all(family.documentation for family in families)


async def test_registering_twice_is_refused_by_the_registry() -> None:
    registry = prometheus_client.CollectorRegistry(auto_describe=True)  # as prometheus_client.REGISTRY
    registry.register(metrics.collector())
    with pytest.raises(ValueError, match="Duplicated"):
        registry.register(metrics.collector())


async def test_strangers_and_unix_sockets(tmp_path: Any) -> None:
    async with ucp.open_worker(name="key gate", config={"TLS": "tcp", "NET_DEVICES": "lo"}) as worker:
        async with serving(echo, worker, host=f"unix:{tmp_path}/socket"):
            port = worker.address.tcp_addresses[0][1]
            with socket.create_connection(("127.0.0.1", port)) as stranger:
                stranger.sendall(bytes(100))
                await until(lambda: parsed()["trio_ucx_worker_strangers_total key gate"] == 1)
            assert parsed()[f"trio_ucx_server_connections unix:{tmp_path}/socket"] == 0


# ---- from other threads ----


async def test_scraped_over_http_from_another_thread(worker: ucp.Worker) -> None:
    registry = prometheus_client.CollectorRegistry()
    registry.register(metrics.collector())
    server, thread = prometheus_client.start_http_server(0, addr="127.0.0.1", registry=registry)
    try:

        def scrape() -> str:
            request = urllib.request.Request(
                f"http://127.0.0.1:{server.server_port}/metrics", headers={"Accept": "application/openmetrics-text"}
            )
            with urllib.request.urlopen(request, timeout=20) as response:
                return str(response.read().decode())

        async with serving(echo, worker) as serving_here:
            await exchange(serving_here, worker, bytes(7))
            at = trio_ucx.format_address(serving_here.address)
            values = parsed(await trio.to_thread.run_sync(scrape))
            assert values[f"trio_ucx_server_received_bytes_total {at}"] == 7
            # The loop is blocked: a scrape works all the same.
            texts: list[str] = []
            scraping = threading.Thread(target=lambda: texts.append(scrape()))
            scraping.start()
            scraping.join(20)
            assert not scraping.is_alive()
            assert parsed(texts[0])[f"trio_ucx_server_messages_received_total {at}"] == 1
    finally:
        server.shutdown()
        server.server_close()
        await trio.to_thread.run_sync(thread.join)


async def test_scrapes_while_connections_and_workers_come_and_go(rounds: Callable[[int, int], int]) -> None:
    """No scrape fails, and no counter of a server that stays ever goes back."""
    interval = sys.getswitchinterval()
    over, failures, scrapes = threading.Event(), [], 0

    def scrape_always(at: str) -> None:
        nonlocal scrapes
        last: dict[str, float] = {}
        try:
            while not over.is_set():
                values = {
                    name: value
                    for name, value in parsed().items()
                    if name.split(" ")[0].endswith("_total") and at in name
                }
                assert all(value >= last.get(name, 0) for name, value in values.items()), (last, values)
                assert last.keys() <= values.keys()
                last = values
                scrapes += 1
        except BaseException as error:
            failures.append(error)

    sys.setswitchinterval(1e-5)
    try:
        async with ucp.open_worker(config={"TLS": "tcp"}) as worker, serving(echo, worker) as server:
            at = trio_ucx.format_address(server.address)
            scraping = threading.Thread(target=scrape_always, args=(at,))
            scraping.start()
            try:
                with trio.fail_after(100):
                    for _ in range(rounds(10, 100)):
                        async with ucp.open_worker(config={"TLS": "tcp"}) as other:
                            async with trio.open_nursery() as nursery:
                                for _ in range(5):
                                    nursery.start_soon(exchange, server, other, b"x", b"yy")
            finally:
                over.set()
                await trio.to_thread.run_sync(scraping.join)
    finally:
        sys.setswitchinterval(interval)
    assert not failures, failures
    assert scrapes > 3


def test_connections_that_end_while_somebody_reads() -> None:
    """Each is counted once."""

    class Ending:
        totals: tuple[Totals, ...] = ()
        reason: str | None = None

        def end_reason(self) -> str | None:
            return self.reason

        def traffic(self) -> tuple[int, int, int, int]:
            if self.reason is None:
                self.reason = "closed"
                self.totals[0].end(self)
            return (1, 10, 2, 20)

    totals = Totals()
    for _ in range(3):
        totals.add(Ending())
    read = totals.read()
    assert (read.open, read.messages_sent, read.bytes_sent, read.messages_received, read.bytes_received) == (
        *(3, 3, 30),
        *(6, 60),
    )
    later = totals.read()
    assert (later.open, later.opened, ended(later), later.bytes_received) == (0, 3, {"closed": 3}, 60)


async def test_a_worker_is_not_destroyed_while_another_thread_reads() -> None:
    reading, there = threading.Event(), []

    def read(engine: Any) -> None:
        with engine.figures:
            reading.set()
            time.sleep(0.1)
            there.append(engine.handle is not None)

    def begin_to_read() -> None:
        thread.start()
        reading.wait(10)

    async with ucp.open_worker(config={"TLS": "self"}) as worker:
        thread = threading.Thread(target=read, args=(internals(worker),))
        internals(worker).teardown.at_end[0] = begin_to_read  # just before its end
    thread.join(10)
    assert there == [True]


async def test_statistics_of_a_worker_that_another_thread_closes() -> None:
    """UCX's worker is not asked any more once it is gone."""
    for _ in range(20):
        async with ucp.open_worker(config={"TLS": "self"}) as worker:
            over = threading.Event()

            def ask(worker: ucp.Worker = worker, over: threading.Event = over) -> None:
                while not over.is_set():
                    worker.statistics()

            thread = threading.Thread(target=ask)
            thread.start()
        time.sleep(0.001)
        over.set()
        await trio.to_thread.run_sync(thread.join)


async def test_a_forked_child_shows_nothing_of_its_parent(worker: ucp.Worker) -> None:
    async with serving(echo, worker) as server:
        await exchange(server, worker, b"x")
        reader, writer = os.pipe()
        child = os.fork()
        if not child:
            try:
                os.write(writer, repr(parsed()).encode())
            finally:
                os._exit(0)
        os.close(writer)
        assert os.read(reader, 1000) == b"{}"
        os.close(reader)
        os.waitpid(child, 0)


# ---- importing ----


def run(program: str) -> str:
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_who_does_not_ask_for_metrics_does_not_import_prometheus_client() -> None:
    assert run("import sys, trio_ucx; print('prometheus_client' in sys.modules)") == "False\n"


def test_error_without_prometheus_client() -> None:
    program = (
        "import sys; sys.modules['prometheus_client'] = None\n"
        "try: import trio_ucx.metrics\n"
        "except ImportError as error: print(type(error).__name__, error)"
    )
    assert re.fullmatch(r"ModuleNotFoundError .*pip install prometheus_client\n", run(program))
