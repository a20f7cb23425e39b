"""UCP in Trio idiom: contexts, workers, endpoints, listeners, tag messages. Any UCP peer can be talked to with this.

Almost any call can raise some exceptions that its docstring does not repeat: ``MemoryError``, where UCX has no memory;
:exc:`UCXError`, for a status that no other exception stands for; ``RuntimeError``, in another thread than its worker's,
or in a forked child.

Layers, lowest first; imports point down only (``tests/test_layers.py``):

    _util, _contained, _pending, _status, _process,
      _address, _forks                                no engine
    _cuda, _memory_kinds, _pointers, _strided,
      _buffers                                        what can be sent, and received into
    _memory                                           memory that peers can get and put
    _attributes                                       UCX's attributes of the library, contexts and workers
    _opening                                          options of endpoints
    _context                                          configuration
    _reach                                            why a peer cannot be reached
    _loans, _inbox                                    buffers borrowed from UCX
    _operations, _safety_net, _engine                 what is in flight; the progress task: read their docstrings
    _peers, _receive_queue                            noticing dead processes, and queues that they have stopped
    _posting                                          from checked arguments to an operation in flight
    _tag, _arrivals, _active_messages, _stream        one file per capability
    _atomics, _remote_memory, _endpoint, _listener,
      _requests
    _chain_errors, _chain_terms, _chain_run,
      _chain_building, _chains                        request chains: C runs them
    _worker                                           puts them together
"""

from ._active_messages import ActiveMessages as ActiveMessages
from ._active_messages import ActiveMessagesStatistics as ActiveMessagesStatistics
from ._active_messages import WhenFull as WhenFull
from ._address import WorkerAddress as WorkerAddress
from ._am_send import SendProtocol as SendProtocol
from ._arrivals import ActiveMessage as ActiveMessage
from ._attributes import ContextAttributes as ContextAttributes
from ._attributes import Library as Library
from ._attributes import ThreadMode as ThreadMode
from ._attributes import WorkerAttributes as WorkerAttributes
from ._attributes import library as library
from ._chain_building import Choice as Choice
from ._chain_building import Retry as Retry
from ._chain_errors import DependencyBoundsError as DependencyBoundsError
from ._chain_errors import DependencyError as DependencyError
from ._chain_errors import DependencyFalse as DependencyFalse
from ._chain_errors import DependencyNotEvaluated as DependencyNotEvaluated
from ._chain_errors import DependencyReferenceError as DependencyReferenceError
from ._chain_errors import NoDependencyResource as NoDependencyResource
from ._chain_run import SKIPPED as SKIPPED
from ._chain_run import Followed as Followed
from ._chain_run import Outcomes as Outcomes
from ._chain_terms import ChainRequest as ChainRequest
from ._chain_terms import Condition as Condition
from ._chain_terms import Integer as Integer
from ._chain_terms import Local as Local
from ._chain_terms import Piece as Piece
from ._chains import RequestChain as RequestChain
from ._context import DEFAULT_FEATURES as DEFAULT_FEATURES
from ._context import Context as Context
from ._context import Feature as Feature
from ._context import open_context as open_context
from ._endpoint import CloseMode as CloseMode
from ._endpoint import Endpoint as Endpoint
from ._endpoint import EndpointStatistics as EndpointStatistics
from ._endpoint import Transport as Transport
from ._listener import ConnectionRequest as ConnectionRequest
from ._listener import RawListener as RawListener
from ._memory import Access as Access
from ._memory import Memory as Memory
from ._memory import MemoryDescriptor as MemoryDescriptor
from ._memory_kinds import DeviceBuffer as DeviceBuffer
from ._memory_kinds import MemoryType as MemoryType
from ._opening import ErrorMode as ErrorMode
from ._pending import RequestCancelled as RequestCancelled
from ._remote_memory import RemoteMemory as RemoteMemory
from ._requests import Request as Request
from ._requests import RequestGroup as RequestGroup
from ._statistics import WorkerStatistics as WorkerStatistics
from ._status import Status as Status
from ._status import UCXError as UCXError
from ._stream import StreamData as StreamData
from ._strided import Strided as Strided
from ._tag import TagMessage as TagMessage
from ._util import FULL as FULL
from ._util import publish as _publish
from ._worker import Worker as Worker
from ._worker import open_worker as open_worker

__all__ = [
    "DEFAULT_FEATURES",
    "FULL",
    "SKIPPED",
    "ChainRequest",
    "Choice",
    "Condition",
    "DependencyBoundsError",
    "DependencyError",
    "DependencyFalse",
    "DependencyNotEvaluated",
    "DependencyReferenceError",
    "Followed",
    "Integer",
    "NoDependencyResource",
    "Outcomes",
    "Local",
    "Piece",
    "RequestChain",
    "Retry",
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
