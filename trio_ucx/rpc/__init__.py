"""Remote procedure calls: methods of a server, called by clients, with cancellation, deadlines, errors and streams.

::

    class Store(rpc.Service):
        @rpc.method
        async def get(self, call: rpc.Call, key: str) -> int: ...

    await trio_ucx.serve_ucx(rpc.serving(Store()), 13337)

    async with rpc.connect("10.0.0.5:13337") as client:
        value = await client.call("get", key="a", timeout=2)

A call is one message each way in a conversation (:meth:`trio_ucx.Connection.open_conversation`), which is kept for the
next call. Arguments and results are msgpack with msgspec (the extra ``rpc``), otherwise JSON; arrays and
buffers go beside them without a copy. ``rpc.md`` is the chapter about it.
"""

from .._util.handles import publish as _publish
from ._client import Client, Stream
from ._connect import connect
from ._errors import BadArguments, CallError, CallLost, CallRefused, CallTimedOut, RemoteError, UnknownMethod
from ._server import Call, Hook, serving
from ._service import Reply, Service, method, stream

__all__ = [
    "BadArguments",
    "Call",
    "CallError",
    "CallLost",
    "CallRefused",
    "CallTimedOut",
    "Client",
    "Hook",
    "RemoteError",
    "Reply",
    "Service",
    "Stream",
    "UnknownMethod",
    "connect",
    "method",
    "serving",
    "stream",
]

_publish(globals(), __name__)
