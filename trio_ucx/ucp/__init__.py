"""UCP in Trio idiom: contexts, workers, endpoints, listeners, tag messages. Any UCP peer can be talked to with this.

Request chains are an extension, ``trio_ucx.ucp.chains``, which only :meth:`Worker.new_chain` imports.

Almost any call can raise some exceptions that its docstring does not repeat: ``MemoryError``, where UCX has no memory;
:exc:`trio_ucx.UCXError`, for a status that no other exception stands for; ``RuntimeError``, in another thread than its
worker's, in a forked child, or where Python has no memory to record an operation that UCX has begun.

Layers, lowest first; imports point down only (``tests/test_layers.py``). Two quirks, ``key_gate`` and
``stopped_queue``, stand higher:

    _features, _status, _keys                         features, statuses and errors, keys of data ports
    _quirks                                           what is done only because of UCX's faults
    _worker_address, _transports                      addresses, and which transports two workers use
    _memory                                           buffers, and memory that peers can get and put
    _attributes, _endpoint_options,
      _hints, _context                                configuration, options, hints for error messages
    _engine                                           what is in flight, and what makes a worker progress
    _connecting                                       making endpoints
    _tag, _stream, _am_send                           one file for each capability
    _rma, blocks                                      puts, gets and atomics; lists of blocks
    _endpoint, _arrivals, _active_messages,
      _listener, _requests                            what users hold
    _internal_api                                     what other layers of trio_ucx import from inside
    chains                                            an extension: request chains, which C runs
    _worker                                           puts them together
"""

from .._util.handles import publish as _publish
from ._active_messages import ActiveMessages, ActiveMessagesStatistics, WhenFull
from ._am_send import SendProtocol
from ._arrivals import ActiveMessage
from ._attributes import ContextAttributes, Library, ThreadMode, WorkerAttributes, library
from ._context import Context, open_context
from ._endpoint import CloseMode, Endpoint, EndpointStatistics, Transport
from ._endpoint_options import ErrorMode
from ._engine.statistics import ConnectionTotals, WorkerStatistics
from ._features import DEFAULT_FEATURES, Feature
from ._listener import ConnectionRequest, RawListener
from ._memory.buffers import Contiguous, WritableContiguous
from ._memory.foreign import DeviceBuffer, MemoryType
from ._memory.notes import Note, Notifications
from ._memory.registered import Access, Memory, MemoryDescriptor
from ._memory.strided import Strided
from ._quirks.releases import warn_if_unknown as _warn_if_unknown
from ._requests import Request, RequestCancelled, RequestGroup
from ._rma.remote_memory import AtomicOp, RemoteMemory
from ._status import Status
from ._stream import StreamData
from ._tag import TagMessage
from ._worker import Worker, open_worker
from ._worker_address import WorkerAddress

__all__ = [
    "DEFAULT_FEATURES",
    "Access",
    "ActiveMessage",
    "ActiveMessages",
    "ActiveMessagesStatistics",
    "AtomicOp",
    "CloseMode",
    "ConnectionRequest",
    "ConnectionTotals",
    "Context",
    "DeviceBuffer",
    "ContextAttributes",
    "Endpoint",
    "EndpointStatistics",
    "ErrorMode",
    "Feature",
    "Memory",
    "MemoryDescriptor",
    "Library",
    "MemoryType",
    "Note",
    "Notifications",
    "RawListener",
    "RemoteMemory",
    "Request",
    "RequestCancelled",
    "RequestGroup",
    "SendProtocol",
    "Status",
    "StreamData",
    "Strided",
    "Contiguous",
    "WritableContiguous",
    "TagMessage",
    "ThreadMode",
    "Transport",
    "WhenFull",
    "Worker",
    "WorkerAddress",
    "WorkerAttributes",
    "WorkerStatistics",
    "library",
    "open_context",
    "open_worker",
]

_publish(globals(), __name__)
_warn_if_unknown()
