"""Pairs of Connections: the two ends of one connection, in one process."""

from __future__ import annotations

import tempfile
from typing import Any

import trio

from .. import _wire as wire
from .._connection import Connection
from .._open import connect
from .._serve import open_ucx_listeners
from ..ucp import Worker

Pair = tuple[Connection, Connection]


async def open_connection_pair(*, worker: Worker | None = None, **options: Any) -> Pair:
    """Connects two Connections with each other, over a Unix socket that only this process can find.

    Args:
        worker: the worker of both; by default the run's shared worker.
        options: options of both: those that :func:`trio_ucx.connect` and :func:`trio_ucx.open_ucx_listeners` share.

    Returns:
        (client, server), like ``trio.testing.memory_stream_pair``; close both.

    Cancellation: no connection is left behind.

    Raises: as :func:`trio_ucx.connect`.
    """
    with tempfile.TemporaryDirectory() as folder:
        return await _open(f"unix:{folder}/socket", worker, options)


async def open_pair_over_listener(host: str = "127.0.0.1", *, worker: Worker | None = None, **options: Any) -> Pair:
    """Connects two Connections with each other over TCP, as a client and a server would.

    Args:
        host: an address of this machine to listen at; the port is a free one.
        worker, options: as for :func:`open_connection_pair`, which also says what is returned.

    Cancellation: as :func:`open_connection_pair`.

    Raises: as :func:`trio_ucx.connect`.
    """
    return await _open(host, worker, options)


async def open_clogged_pair(*, worker: Worker | None = None, **options: Any) -> Pair:
    """Does the same as :func:`open_pair_over_listener`, and fills the byte stream in both directions.

    ``send_all`` waits until the other end has read: a ``clogged_stream_maker`` for ``trio.testing``.

    Cancellation: as :func:`open_connection_pair`.

    Raises: as :func:`trio_ucx.connect`.
    """
    pair = await open_pair_over_listener(worker=worker, **options)
    for connection in pair:
        for size in (2048, 1):
            try:
                while True:
                    connection._link.sending.submit_nowait(wire.STREAM, bytes(size))
            except trio.WouldBlock:
                pass
    return pair


async def _open(host: str, worker: Worker | None, options: dict[str, Any]) -> Pair:
    [listener] = await open_ucx_listeners(0, host=host, worker=worker, **options)
    opened: list[Connection] = []
    try:
        async with listener:
            opened.append(await connect(listener.address, worker=worker, **options).__aenter__())
            opened.append(await listener.accept())
    except BaseException:  # also where closing the listener is cancelled
        for connection in opened:
            connection.abort()
        raise
    client, server = opened
    return client, server
