"""What the library itself holds of a Worker, an Endpoint or a Connection."""

from __future__ import annotations

from typing import overload

from .. import Connection
from .._link import Link
from ..ucp import Endpoint, Worker
from ..ucp._internal_api import EndpointCore, Engine


@overload
def internals(of: Worker) -> Engine: ...
@overload
def internals(of: Endpoint) -> EndpointCore: ...
@overload
def internals(of: Connection) -> Link: ...
def internals(of: Worker | Endpoint | Connection) -> Engine | EndpointCore | Link:
    """The object of the library's that does the work of a public one. For tests that look inside trio_ucx itself.

    It is not a public interface: any release may change it.

    Returns:
        The engine of a Worker, the core of an Endpoint, the link of a Connection. See design.md.

    Raises:
        TypeError: it is none of these.
    """
    if isinstance(of, Worker):
        return of._engine
    if isinstance(of, Endpoint):
        return of._core
    if isinstance(of, Connection):
        return of._link
    raise TypeError(f"a Worker, an Endpoint or a Connection has internals, not {type(of).__name__}")
