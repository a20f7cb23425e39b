"""Requests and replies in one line each: the side that answers. ``Connection.request`` asks."""

from __future__ import annotations

from collections.abc import Awaitable, Callable

import trio

from ._channels import Channel
from ._connection import Connection
from ._server import Handler, name_of
from ._util.arguments import check_integer
from .ucp._internal_api import Buffer

#: So many tasks of a connection may wait for its next request. Others end when they have answered.
_IDLE = 4


def answering(function: Callable[[bytes], Awaitable[Buffer]], *, limit: int = 100) -> Handler:
    """Returns a handler for :func:`serve_ucx` that answers what clients send with :meth:`Connection.request`.

    ``await trio_ucx.serve_ucx(trio_ucx.answering(function), 13337)`` is a whole server. If a client does not wait any
    longer, or is gone, the call that works on its request is cancelled. When the server drains, requests that are being
    answered are finished. An exception ends the connection, like one of any handler (``on_handler_error=``).

    Args:
        function: an async function that takes a request, and returns the reply: anything that can be sent.
        limit: the most requests of one connection that it works on at the same time. Others wait.

    Raises:
        TypeError, ValueError: wrong arguments.
    """
    if not callable(function):
        raise TypeError(f"answering takes an async function, not {type(function).__name__}")
    limit = check_integer(limit, "limit", 1, 2**31)

    async def handler(connection: Connection) -> None:
        await _Answering(connection, function, limit).run()

    handler.__qualname__ = f"answering({name_of(function)})"  # for logs and reports
    return handler


class _Answering:
    """The tasks that answer the requests of one connection. There is always one that waits, up to the limit."""

    def __init__(self, connection: Connection, function: Callable[[bytes], Awaitable[Buffer]], limit: int) -> None:
        self._requests = connection.conversations()
        self._function = function
        self._limit = limit
        self._tasks = 0
        self._waiting = 0

    async def run(self) -> None:
        async with trio.open_nursery() as nursery:
            self._nursery = nursery
            self._start()

    def _start(self) -> None:
        self._tasks += 1
        self._nursery.start_soon(self._answer_all)

    async def _answer_all(self) -> None:
        try:
            while self._waiting < _IDLE:
                self._waiting += 1
                try:
                    talk = await anext(self._requests)
                except StopAsyncIteration:
                    return
                finally:
                    self._waiting -= 1
                if not self._waiting and self._tasks < self._limit:
                    self._start()
                await self._answer(talk)
        finally:
            self._tasks -= 1

    async def _answer(self, talk: Channel) -> None:
        async with talk:
            request = await talk.receive()
            with talk.cancel_when_left():
                reply = self._function(request)
                if not hasattr(reply, "__await__"):
                    name = name_of(self._function)
                    raise TypeError(f"answering takes an async function; {name} returned {type(reply).__name__}")
                await talk._send_last(await reply)
