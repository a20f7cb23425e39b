"""The arguments that several calls have in common, above all connecting and listening: types, defaults and checks."""

from __future__ import annotations

import inspect
import ssl
from typing import Literal, TypedDict

from .._handshake.handshake import ExchangeOptions
from .._handshake.peer_description import SharedMemory
from .._link import Options
from .._peer_info import Admit
from .._rules.wire import MAX_WINDOW, MIN_WINDOW
from .._util.arguments import check_integer, check_timeout
from ..ucp import Worker
from .authkey import check_authkey
from .backoff import Backoff

#: Seconds of silence after which the kernel asks whether the peer's host is still there.
KEEPALIVE_INTERVAL = 20.0


class ConnectionOptions(TypedDict, total=False):
    """The options that both sides of a connection have: see :func:`connect` and :func:`open_ucx_listeners`."""

    connect_timeout: float
    close_timeout: float
    window: int
    max_message_size: int
    shared_memory: Literal["auto"] | bool
    keepalive_interval: float
    authkey: bytes | None
    ssl_context: ssl.SSLContext | None
    isolate: bool


class ConnectOptions(ConnectionOptions, total=False):
    """The options of :func:`connect`, besides ``worker``."""

    happy_eyeballs_delay: float | None
    local_address: str | None
    server_hostname: str | None
    retry: Backoff | None


class ListenerOptions(ConnectionOptions, total=False):
    """The options of :func:`open_ucx_listeners`, besides ``host`` and ``worker``."""

    backlog: int | None
    allow_anyone: bool
    admit: Admit | None


def check_options(close_timeout: float, window: int, max_message_size: int) -> Options:
    return Options(
        close_timeout=check_timeout(close_timeout, "close_timeout"),
        window=check_integer(window, "window", MIN_WINDOW, MAX_WINDOW),
        max_message_size=check_integer(max_message_size, "max_message_size", 0, 2**62),
    )


def check_exchange_options(
    shared_memory: Literal["auto"] | bool,
    keepalive_interval: float,
    authkey: bytes | None,
    ssl_context: ssl.SSLContext | None,
    server_hostname: str | None = None,
    *,
    isolate: bool = False,
    allow_anyone: bool = False,
    admit: Admit | None = None,
) -> ExchangeOptions:
    wishes = {"auto": SharedMemory.AUTO, True: SharedMemory.ALWAYS, False: SharedMemory.NEVER}
    if not isinstance(shared_memory, (str, bool)) or shared_memory not in wishes:
        raise ValueError(f"shared_memory must be 'auto', True or False, not {shared_memory!r}")
    authkey = check_authkey(authkey)
    if ssl_context is not None and not isinstance(ssl_context, ssl.SSLContext):
        raise TypeError(f"ssl_context must be an ssl.SSLContext, not {type(ssl_context).__name__}")
    if server_hostname is not None and not isinstance(server_hostname, str):
        raise TypeError(f"server_hostname must be a str, not {type(server_hostname).__name__}")
    for name, flag in (("isolate", isolate), ("allow_anyone", allow_anyone)):
        if not isinstance(flag, bool):
            raise TypeError(f"{name} must be a bool, not {type(flag).__name__}")
    if admit is not None and (
        not callable(admit) or (inspect.isroutine(admit) and not inspect.iscoroutinefunction(admit))
    ):
        raise TypeError(f"admit must be an async function that takes a trio_ucx.PeerInfo, not {admit!r}")
    interval = check_timeout(keepalive_interval, "keepalive_interval")
    return ExchangeOptions(
        wishes[shared_memory], interval, authkey, ssl_context, server_hostname, isolate, allow_anyone, admit
    )


def check_worker(worker: Worker | None) -> Worker | None:
    if worker is not None:
        if not isinstance(worker, Worker):
            raise TypeError(f"worker must be a trio_ucx.ucp.Worker, not {type(worker).__name__}")
        worker._engine.check()
    return worker


def check_max_size(max_size: int) -> int:
    return check_integer(max_size, "max_size", 0, 2**62)
