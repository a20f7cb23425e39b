"""Metrics of this process's servers and workers, for Prometheus.

::

    import prometheus_client
    from trio_ucx import metrics

    prometheus_client.REGISTRY.register(metrics.collector())    # beside the program's own metrics
    prometheus_client.start_http_server(9100)

    body, content_type = metrics.text(), metrics.CONTENT_TYPE   # or served by a server of the program's own

Needs prometheus_client (the extra ``metrics``). The servers are those that :func:`trio_ucx.serve_ucx` runs, in all
threads. The workers are those that have Connections, without those that were opened for another worker
(``isolate=True``), whose Connections count with it. The series of a server or worker end with it.

All metrics can be read in any thread, also while Trio's loop is blocked. Nothing is counted for them: they are what
:meth:`trio_ucx.Server.statistics` and :meth:`trio_ucx.ucp.Worker.statistics` return. metrics.md lists them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

try:
    from prometheus_client import CollectorRegistry
    from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
    from prometheus_client.openmetrics.exposition import CONTENT_TYPE_LATEST, generate_latest
    from prometheus_client.registry import Collector
except ModuleNotFoundError as _error:
    raise ModuleNotFoundError(
        f"trio_ucx.metrics needs prometheus_client ({_error}): pip install prometheus_client", name=_error.name
    ) from _error

from ._handshake.registry import named_workers
from ._opening.addresses import format_address
from ._server import servers

__all__ = ["CONTENT_TYPE", "collector", "text"]

#: The content type of what :func:`text` returns, for the HTTP header.
CONTENT_TYPE: str = CONTENT_TYPE_LATEST


def collector() -> Collector:
    """Returns a collector of these metrics, to register with a registry of prometheus_client.

    A registry takes one of them.

    Raises: nothing.
    """
    return _ServersAndWorkers()


def text() -> str:
    """Returns these metrics as OpenMetrics text; its type for HTTP is :data:`CONTENT_TYPE`.

    Raises: nothing.
    """
    registry = CollectorRegistry(auto_describe=False)
    registry.register(_ServersAndWorkers())
    return generate_latest(registry).decode()  # type: ignore[no-untyped-call, no-any-return]


#: A metric: its name, what it is, its help, and how to get it from statistics: a number, or one for each reason.
_Row = tuple[str, type[CounterMetricFamily] | type[GaugeMetricFamily], str, Callable[[Any], int | Mapping[str, int]]]

_CONNECTIONS: Sequence[_Row] = [
    ("connections", GaugeMetricFamily, "Connections that are open", lambda it: it.connections.open),
    ("connections_opened", CounterMetricFamily, "Connections that were opened", lambda it: it.connections.opened),
    ("connections_ended", CounterMetricFamily, "Connections that have ended", lambda it: it.connections.ended),
    ("messages_sent", CounterMetricFamily, "Messages sent", lambda it: it.connections.messages_sent),
    ("messages_received", CounterMetricFamily, "Messages arrived", lambda it: it.connections.messages_received),
    ("sent_bytes", CounterMetricFamily, "Payload of messages sent", lambda it: it.connections.bytes_sent),
    ("received_bytes", CounterMetricFamily, "Payload of messages arrived", lambda it: it.connections.bytes_received),
]
_SERVER: Sequence[_Row] = [
    *_CONNECTIONS,
    ("handlers", GaugeMetricFamily, "Handlers that run", lambda it: it.handlers),
    ("handshakes", GaugeMetricFamily, "Clients whose handshake is not finished", lambda it: it.handshaking),
    ("connections_waiting", GaugeMetricFamily, "Connections that wait to be accepted", lambda it: it.waiting),
    ("clients_refused", CounterMetricFamily, "Clients turned away, or gone too early", lambda it: it.refused),
    ("drains", CounterMetricFamily, "Calls of drain", lambda it: it.drains),
    ("handlers_cancelled", CounterMetricFamily, "Handlers cancelled by drains", lambda it: it.handlers_cancelled),
]
_WORKER: Sequence[_Row] = [
    *_CONNECTIONS,
    ("endpoints", GaugeMetricFamily, "UCX's endpoints that are open", lambda it: it.endpoints),
    (
        "left_over_operations",
        GaugeMetricFamily,
        "Operations cancelled, with pinned buffers",
        lambda it: it.left_over_operations,
    ),
    ("stopped_queues", CounterMetricFamily, "Shared-memory queues that stopped", lambda it: it.stopped_queues),
    ("closed_memories", GaugeMetricFamily, "Closed memory that peers still use", lambda it: it.closed_memories),
    ("strangers", CounterMetricFamily, "TCP connections to UCX that had no key", lambda it: it.strangers),
]


class _ServersAndWorkers(Collector):
    def collect(self) -> Iterator[CounterMetricFamily | GaugeMetricFamily]:
        # Those that are closed, or belong to the parent of a forked process, have no handle.
        serving = [server for server in list(servers) if server.listeners[0]._acceptor.engine.handle is not None]
        at = {format_address(server.listeners[0].address): server.statistics() for server in serving}
        yield from _families("server", _SERVER, at)
        working = [(name, worker) for name, worker in list(named_workers.items()) if worker._engine.handle is not None]
        yield from _families("worker", _WORKER, {name: worker.statistics() for name, worker in working})


def _families(
    kind: str, rows: Sequence[_Row], statistics: Mapping[str, object]
) -> Iterator[CounterMetricFamily | GaugeMetricFamily]:
    for name, make, help_text, value_of in rows:
        reason = ["reason"] if name in ("connections_ended", "clients_refused") else []
        unit = "bytes" if name.endswith("bytes") else ""
        family = make(f"trio_ucx_{kind}_{name}", help_text, labels=[kind, *reason], unit=unit)
        for label, of in statistics.items():
            value = value_of(of)
            if isinstance(value, Mapping):
                for each, count in value.items():
                    family.add_metric([label, each], count)
            else:
                family.add_metric([label], value)
        yield family
