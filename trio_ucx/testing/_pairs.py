"""Pairs of Connections: the two ends of one connection, in one process."""

from __future__ import annotations

import tempfile
from collections.abc import AsyncIterator
from contextlib import ExitStack
from typing import Unpack

import trio

from .. import Connection, ConnectionOptions, connect, open_ucx_listeners
from .._rules import wire
from .._util.interrupts import protected_asynccontextmanager
from ..ucp import Worker

Pair = tuple[Connection, Connection]


@protected_asynccontextmanager
async def open_connection_pair(
    *, host: str | None = None, worker: Worker | None = None, **options: Unpack[ConnectionOptions]
) -> AsyncIterator[Pair]:
    """Connects two Connections with each other, over a Unix socket that only this process can find, or over TCP.

    An async context manager, which gives (client, server). Leaving the block aborts those that are still open.

    Args:
        host: an address of this machine to listen at, over TCP, on a free port; by default, a Unix socket is used.
        worker: the worker of both; by default the run's shared worker.
        options: options of both: those that :func:`trio_ucx.connect` and :func:`trio_ucx.open_ucx_listeners` share.

    Cancellation: no connection is left behind.

    Raises: as :func:`trio_ucx.connect`.
    """
    with ExitStack() as stack:
        if host is None:
            host = f"unix:{stack.enter_context(tempfile.TemporaryDirectory())}/socket"
        [listener] = await open_ucx_listeners(0, host=host, worker=worker, **options)
        async with listener:
            client = await connect(listener.address, worker=worker, **options).__aenter__()
            stack.callback(client.abort)
            server = await listener.accept()
            stack.callback(server.abort)
        yield client, server
    await trio.lowlevel.checkpoint()


@protected_asynccontextmanager
async def open_clogged_pair(
    *, worker: Worker | None = None, **options: Unpack[ConnectionOptions]
) -> AsyncIterator[Pair]:
    """Connects two Connections with each other, and fills the byte stream in both directions.

    ``send_all`` waits until the other end has read: a ``clogged_stream_maker`` for ``trio.testing``.

    Args:
        worker, options: as for :func:`open_connection_pair`, which also says what the context manager gives and does.

    Cancellation: as :func:`open_connection_pair`.

    Raises: as :func:`trio_ucx.connect`.
    """
    async with open_connection_pair(worker=worker, **options) as pair:
        for connection in pair:
            for size in (2048, 1):
                try:
                    while True:
                        link = connection._link
                        link.sending.send_nowait(wire.STREAM, bytes(size))
                except trio.WouldBlock:
                    pass
        yield pair
