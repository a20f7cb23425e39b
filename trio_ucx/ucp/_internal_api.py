"""What the rest of trio_ucx imports from inside ``ucp``: connections, groups of processes, reports and commands.

They import public names from ``ucp`` itself, and from its inside only these (``tests/test_layers.py``). Everything else
in ``ucp`` can change without touching them. Before you add a name here, see whether an object that the caller already
holds has a method for it.
"""

from __future__ import annotations

from ._connecting import connect_shared
from ._endpoint import close_in_background
from ._engine.ending import CloseState, Ending, internal_failure
from ._engine.endpoint_core import EndpointCore, endpoints_of
from ._engine.endpoints_to_worker import EndpointsToWorker, EndpointSummary
from ._engine.engine import Engine, engines
from ._engine.listening import State as ListeningState
from ._engine.operations import Operation, under_way
from ._engine.posting import completed, pending_send_of_bytes, pin
from ._engine.share import Share
from ._engine.waits import Pending, Signal, Waiters
from ._keys import KeyPair, new_key
from ._listener import ListenerCore
from ._memory.buffers import Buffer, Pinned, WritableBuffer, new_bytes
from ._memory.foreign import Array, array_of
from ._memory.pointers import check_elements
from ._memory.strided import check_whole
from ._quirks import descriptors, rdma
from ._quirks.default_options import DEFAULT_OPTIONS
from ._quirks.key_gate import Admission
from ._quirks.network_devices import (
    Ends,
    addresses_of_devices,
    at_control_socket,
    came_later,
    is_own,
    may_lead_to,
    without_own,
)
from ._quirks.option_limits import OptionError
from ._status import (
    Error,
    MessageTooLong,
    Origin,
    UCXError,
    about,
    broken,
    is_about_a_part,
    os_error_from_status,
    separate,
)
from ._tag import check_claim, is_short, post_bytes_send
from ._transports import check_without_shared_memory, obstacle_to_shared_memory
from ._worker_address import decode_worker_address

__all__ = [
    # Public names of trio_ucx that are defined in ucp
    "Buffer",
    "Error",
    "MessageTooLong",
    "UCXError",
    "WritableBuffer",
    # A worker
    "ListeningState",  # who progresses it, for reports
    "Engine",  # what a Worker works with: operations, endpoints, progress
    "check_claim",  # refuses Connections where a raw receive could take their messages
    "engines",  # all engines that are open, for reports
    # Operations, and waiting
    "Operation",  # what UCX has not completed
    "Pending",  # finishes once; a task may wait for it. The base class of operations
    "Signal",  # a Pending that our own code finishes
    "Waiters",  # tasks that wait for the next of several things
    "completed",  # waits for what was just posted
    "under_way",  # describes operations, for an error
    # Endpoints
    "CloseState",  # what this side has done about the end of one
    "Ending",  # the end of an endpoint or a share
    "EndpointCore",  # what an Endpoint works with
    "endpoints_of",  # the endpoints of an engine
    "ListenerCore",  # what a RawListener works with, for reports
    "EndpointsToWorker",  # the shared endpoints to one worker of a peer
    "Share",  # a Connection's share in an endpoint
    "EndpointSummary",  # which endpoints a side's worker has made to the other's
    "close_in_background",  # goes on with a close whose task was cancelled
    "connect_shared",  # makes a shared endpoint, or gets it
    # Buffers, and sending
    "Array",  # memory that is not exported by the buffer protocol
    "Pinned",  # a buffer that UCX uses
    "array_of",  # the Array of a DLPack object, say
    "check_elements",  # refuses a buffer whose elements are pointers
    "check_whole",  # refuses an array in a mapped file that was truncated
    "is_short",  # True if copying a buffer costs less than pinning it
    "new_bytes",  # makes bytes that UCX is to fill
    "pending_send_of_bytes",  # the operation of a send of bytes, if UCX has not taken them
    "pin",  # pins a buffer that the user has passed
    "post_bytes_send",  # sends a few bytes, with a tag
    # Errors
    "OptionError",  # a UCX option that trio_ucx cannot work with
    "Origin",  # what an error is about
    "about",  # records the Origin of an error
    "broken",  # makes the error for something that is lost
    "internal_failure",  # makes the error of an endpoint, after an exception in our own code
    "is_about_a_part",  # True if the error's Origin is a part of something that goes on
    "os_error_from_status",  # makes the error of a connection that could not be set up
    "separate",  # separates the errors with one Origin from others
    # Addresses, transports and keys
    "Admission",  # lets a peer through the key gate
    "KeyPair",  # the keys of two workers
    "addresses_of_devices",  # the IP addresses of the devices that a worker uses
    "Ends",  # the IP addresses of a control socket
    "at_control_socket",  # restricts an address to the device of a control socket
    "came_later",  # True if a network came later than a worker
    "check_without_shared_memory",  # refuses two workers that have no other transport in common
    "decode_worker_address",  # makes a WorkerAddress from its bytes
    "is_own",  # True if this host has an IP address
    "may_lead_to",  # True if packets to an IP address leave by a device of a worker
    "new_key",  # makes a random key
    "obstacle_to_shared_memory",  # says why two workers cannot use shared memory
    "without_own",  # leaves this host's own addresses out of a peer's address
    # This process
    "DEFAULT_OPTIONS",  # UCX's options that trio_ucx sets, for ``info``
    "descriptors",  # checks that enough file descriptors are left
    "rdma",  # leaves RDMA out unless it is named; what check looks at
]
