"""UCP in Trio idiom: contexts, workers, endpoints, listeners, tag messages. Any UCP peer can be talked to with this.

Request chains are an extension, ``trio_ucx.ucp.chains``, which only :meth:`Worker.new_chain` imports.

Almost any call can raise some exceptions that its docstring does not repeat: ``MemoryError``, where UCX has no memory;
:exc:`UCXError`, for a status that no other exception stands for; ``RuntimeError``, in another thread than its worker's,
or in a forked child.

Layers, lowest first; imports point down only (``tests/test_layers.py``). Two quirks, ``data_ports`` and
``stopped_queue``, stand higher:

    _util, _contained, _live_handles, _process,
      _features, _status, _fields                     utilities, this process, features, statuses and errors
    _quirks                                           what is done only because of UCX's faults
    _address, _worker_address, _transports            addresses, and which transports two workers use
    _memory                                           buffers, and memory that peers can get and put
    _attributes, _endpoint_options,
      _hints, _context                                configuration, options, hints for error messages
    _engine                                           what is in flight, and what makes a worker progress
    _connecting                                       making endpoints
    _tag, _stream, _am_send                           one file for each capability
    _rma                                              puts, gets and atomics
    _endpoint, _arrivals, _active_messages,
      _listener, _requests                            what users hold
    chains                                            an extension: request chains, which C runs
    _worker                                           puts them together
"""

from ._active_messages import ActiveMessages as ActiveMessages
from ._active_messages import ActiveMessagesStatistics as ActiveMessagesStatistics
from ._active_messages import WhenFull as WhenFull
from ._am_send import SendProtocol as SendProtocol
from ._arrivals import ActiveMessage as ActiveMessage
from ._attributes import ContextAttributes as ContextAttributes
from ._attributes import Library as Library
from ._attributes import ThreadMode as ThreadMode
from ._attributes import WorkerAttributes as WorkerAttributes
from ._attributes import library as library
from ._context import Context as Context
from ._context import open_context as open_context
from ._endpoint import CloseMode as CloseMode
from ._endpoint import Endpoint as Endpoint
from ._endpoint import EndpointStatistics as EndpointStatistics
from ._endpoint import Transport as Transport
from ._endpoint_options import ErrorMode as ErrorMode
from ._engine.statistics import WorkerStatistics as WorkerStatistics
from ._features import DEFAULT_FEATURES as DEFAULT_FEATURES
from ._features import Feature as Feature
from ._listener import ConnectionRequest as ConnectionRequest
from ._listener import RawListener as RawListener
from ._memory.foreign import DeviceBuffer as DeviceBuffer
from ._memory.foreign import MemoryType as MemoryType
from ._memory.registered import Access as Access
from ._memory.registered import Memory as Memory
from ._memory.registered import MemoryDescriptor as MemoryDescriptor
from ._memory.strided import Strided as Strided
from ._quirks.releases import warn_if_unknown as _warn_if_unknown
from ._requests import Request as Request
from ._requests import RequestCancelled as RequestCancelled
from ._requests import RequestGroup as RequestGroup
from ._rma.remote_memory import RemoteMemory as RemoteMemory
from ._status import MessageTooLong as MessageTooLong
from ._status import Status as Status
from ._status import UCXError as UCXError
from ._stream import StreamData as StreamData
from ._tag import TagMessage as TagMessage
from ._util import publish as _publish
from ._worker import Worker as Worker
from ._worker import open_worker as open_worker
from ._worker_address import WorkerAddress as WorkerAddress

__all__ = [
    "DEFAULT_FEATURES",
    "Access",
    "ActiveMessage",
    "ActiveMessages",
    "ActiveMessagesStatistics",
    "CloseMode",
    "ConnectionRequest",
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
    "MessageTooLong",
    "RawListener",
    "RemoteMemory",
    "Request",
    "RequestCancelled",
    "RequestGroup",
    "SendProtocol",
    "Status",
    "StreamData",
    "Strided",
    "TagMessage",
    "ThreadMode",
    "Transport",
    "UCXError",
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
