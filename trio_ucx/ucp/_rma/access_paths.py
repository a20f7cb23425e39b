"""How a peer's memory is reached: by load and store, by messages to its owner, or by UCX's puts and gets.

Theory
======

Over TCP, and over shared memory for memory that the owner did not allocate, UCX does puts, gets and atomics by messages
of its own. The owner's UCX ends the process when the peer dies while answers are in flight. Two trio_ucx peers
therefore avoid them:

* Memory that the owner allocated is mapped in this process over shared memory. It is copied, in pieces, and atomics are
  the CPU's instructions (``rma/mapped.c``), as long as the owner has not erased the token that lies behind it.
* Other memory of a process on this machine is read by the kernel, if that lets us (``rma/direct.c``).
* Otherwise trio_ucx's own active messages ask the owner (``rma/requester.c``; ``rma/owner.c`` at the owner), if both
  contexts have ``Feature.AM`` and the memory's descriptor has a token. The owner checks each request. wire.md
  describes these messages.
* UCX's puts and gets do the rest: for peers without trio_ucx, contexts without ``Feature.AM``, descriptors without a
  token, and device memory; also with RDMA hardware, which is faster than messages.

UCX's atomics are not used at all. UCX cannot run them on an endpoint with error handling. Without it, such an endpoint
does not notice that its peer died, and UCX ends the process when the endpoint goes with atomics that were not sent yet
("'abort' is not implemented for protocol amo/fetch/sw").
"""

from __future__ import annotations

import fcntl
import mmap
import os
import struct
from contextlib import suppress
from typing import Any

import attrs

from ..._native import ffi, lib
from ..._util.live_handles import live_handles
from ..._util.process import is_visible, this_process
from .._engine.endpoint_core import EndpointCore, Scope
from .._engine.posting import completed, post_flush
from .._features import Feature
from .._memory.registered import MemoryDescriptor, is_host_memory, unmap_unused
from .._status import Status, UCXError

#: UCX's transports that do not put and get by RDMA hardware; UD cannot.
_SOFTWARE = ("ud_", "tcp", "sysv", "posix", "self", "cma", "knem", "xpmem", "cuda", "gdr", "rocm", "ze")

#: Linux 6.11 tells of one mapping (``struct procmap_query``). Reading of 30,000 may take 49 ms.
_PROCMAP_QUERY, _PROCMAP_QUERY_VMA_SHARED, _QUERY = 0xC0686611, 0x08, struct.Struct("=9Q4I2Q")

#: Longer gets and puts over TCP go as several messages of so many bytes: as much as finds room in one segment, which
#: the receiver need not put together.
PART_OVER_TCP = 65_000


@attrs.frozen
class Mapping:
    """Memory of a peer that this process has mapped.

    Attributes:
        address: of the memory, in this process.
        token: the address of its token; 0: it has none, being that of a UCP program without trio_ucx.
    """

    address: int
    token: int


class Key:
    """An unpacked remote key. It is destroyed when it was closed and no operation uses it any more."""

    def __init__(self, core: EndpointCore, packed: bytes) -> None:
        self._engine = core.engine
        self._id = core.engine.next_id()
        self._uses = 0
        self._closed = False
        #: C's note of how far it has prepared the mapping. It stays as long as this key.
        self.preparation: Any = ffi.new("tu_preparation_t *")
        #: C's entry of memory of this process, which stays as long as this key.
        self._held: Any = None
        out = ffi.new("ucp_rkey_h *")
        # UCX gets no length: it reads until it finds this byte behind the key.
        status = lib.tu_rkey_unpack(core.handle, ffi.from_buffer("char[]", packed + b"\xff" * 8), out)
        if status != Status.OK:
            raise UCXError(status, "unpacking a remote key: is it this peer's, and are its transports in use here?")
        self.handle: Any = out[0]
        self._engine.teardown.at_end[self._id] = self._destroy
        live_handles.opened("remote key")

    def _destroy(self) -> None:
        if self.handle is None:
            return
        handle, self.handle = self.handle, None
        self._engine.teardown.at_end.pop(self._id, None)
        if self._uses == 0 and self._engine.usable:  # else UCX frees it with the worker
            lib.tu_rkey_destroy(handle)
        if self._held is not None and self._uses == 0:
            self._let_memory_go()
        elif self._held is not None:
            self._engine.teardown.kept.append(self._let_memory_go)
        live_handles.closed("remote key")

    def _let_memory_go(self) -> None:
        lib.tu_memory_let_go(self._held)
        unmap_unused(self._held)

    def hold(self) -> None:
        self._uses += 1

    def let_go(self) -> None:
        self._uses -= 1
        if self._closed and self._uses == 0:
            self._destroy()

    def close(self) -> None:
        self._closed = True
        if self._uses == 0:
            self._destroy()

    def mapped(self, descriptor: MemoryDescriptor) -> Mapping | None:
        """Returns where this process has mapped the memory; None if it has not.

        Raises:
            ValueError: the descriptor claims more memory than there is, or contradicts itself.
            UCXError: NO_ELEM: its owner has closed it.
        """
        pointer = ffi.new("uint64_t *")
        if not is_host_memory(descriptor.rkey):
            return None
        if lib.tu_rkey_pointer(self.handle, descriptor.address, pointer) != Status.OK:
            return None
        start = int(pointer[0])
        end = _end_of_shared_mapping(start)
        if not end:
            return None
        if (start - descriptor.address) % 8:  # else atomics would be carried out on integers that are not aligned
            raise ValueError("this memory descriptor contradicts itself: its key is of memory at another address")
        if descriptor._has_token_behind():
            token = start + descriptor._token_address - descriptor.address
            is_there = token + lib.TU_TOKEN_SIZE <= end and self._hold(descriptor)
            if not is_there or not lib.tu_mapped_has_token(ffi.cast("char *", token), descriptor._token):
                raise closed("mapping remote memory")  # there may be other memory by now
            return Mapping(start, token)
        if descriptor._token and descriptor._token_address:
            return None  # registered memory of this process, whose token is elsewhere
        if start + descriptor.nbytes > end:
            raise ValueError(
                f"this descriptor is of {descriptor.nbytes} bytes of memory, of which only {end - start} exist"
            )
        return Mapping(start, 0)

    def _hold(self, descriptor: MemoryDescriptor) -> bool:
        """Keeps memory of this process, which the kernel would not keep. Returns False if it was closed."""
        if descriptor._process != this_process() or self._held is not None:
            return True
        held = lib.tu_memory_hold(descriptor._token)
        if held != ffi.NULL:
            self._held = held
        return self._held is not None


def _end_of_shared_mapping(address: int) -> int:
    """The end of the shared mapping at this address; 0 if there is none, or the kernel does not tell."""
    with suppress(OSError), open("/proc/self/maps", "rb") as maps:  # no descriptor may be left
        query = bytearray(_QUERY.pack(_QUERY.size, 0, address, *bytes(12)))
        with suppress(OSError):  # an older kernel
            fcntl.ioctl(maps, _PROCMAP_QUERY, query)
            _, _, _, _, last, flags, *_ = _QUERY.unpack(query)
            return int(last) if flags & _PROCMAP_QUERY_VMA_SHARED else 0
        for line in maps:
            span, permissions, _ = line.split(b" ", 2)
            first, _, end = span.partition(b"-")
            if int(first, 16) <= address < int(end, 16):
                return int(end, 16) if permissions.endswith(b"s") else 0
    return 0


async def connect(core: EndpointCore, owner: Scope) -> None:
    """Waits until the endpoint is up. No checkpoint if it is known to be.

    A remote key that is unpacked before an endpoint by socket address is up makes UCX 1.22 crash: UCX adapts the key to
    the new lanes, and the connection manager's has no interface (ucp_ep_reconfig_internal).

    Args:
        owner: what the wait belongs to.

    Raises:
        trio.ClosedResourceError, trio.BrokenResourceError: the endpoint, or the owner, has ended. The error has the
            owner's origin.
    """
    if not core.connected:
        operation = post_flush(core, owner)
        if operation is not None:
            await completed(operation, core.engine)
        core.connected = True
    owner.check(over=core)


def try_connect(core: EndpointCore, owner: Scope) -> bool:
    """Begins what :func:`connect` waits for. Returns True if the endpoint is up."""
    if not core.connected:
        operation = post_flush(core, owner)
        if operation is not None and operation.outcome is None:
            operation.detach()
            return False
        if operation is not None:
            operation.result()
        core.connected = True
    owner.check(over=core)
    return True


def _has_only_tcp(core: EndpointCore) -> bool:
    """True if the endpoint has no other lanes, as far as UCX tells."""
    return all(lane.startswith(b"tcp/") for lane in core.lanes() or ())


def _is_emulated(core: EndpointCore) -> bool:
    """True if UCX would put and get by messages of its own, as far as UCX tells."""
    return all(lane.decode().startswith(_SOFTWARE) for lane in core.lanes() or ())


def not_mapped(nbytes: int, instead: str) -> UCXError:
    """The exception for memory that UCX could not map: it has gone, or this process can map nothing of that size.

    Args:
        instead: what the caller may do in the second case.
    """
    try:
        with open(os.devnull), mmap.mmap(-1, nbytes, mmap.MAP_PRIVATE, mmap.PROT_READ):
            return closed("mapping remote memory")
    except OSError as error:
        doing = f"mapping {nbytes} bytes of remote memory here failed ({error.strerror}): {instead}"
        return UCXError(Status.UNREACHABLE, doing)


def closed(doing: str) -> UCXError:
    return UCXError(Status.NO_ELEM, f"{doing}: its owner refused, having closed it, or never allowed that")


def refusal(status: int, doing: str) -> Exception | None:
    """The exception for a request that the owner of remote memory refused; None if the status says something else."""
    if status == Status.NO_ELEM:
        return closed(doing)
    if status == Status.INVALID_ADDR:
        return UCXError(status, f"{doing}: its owner refused, having less memory than the descriptor says")
    return None


@attrs.frozen(eq=False)
class AccessPath:
    """An access path to a peer's memory.

    Attributes:
        core: the endpoint.
        native: ``tu_access_path_t``; NULL: UCX's puts and gets.
        key: the key that UCX needs, or that keeps the memory mapped.
        hardware: whether UCX puts and gets by RDMA hardware, which messages must not replace.
    """

    core: EndpointCore
    native: Any
    key: Key | None
    hardware: bool = False

    def takes(self, memory: int) -> bool:
        """True if puts and gets use it for local memory of this kind."""
        return bool(
            self.native == ffi.NULL
            or (self.native.local and memory <= lib.TU_MEMORY_HOST)
            or (self.native.messages and not self.hardware)
        )


def find_access_path(core: EndpointCore, descriptor: MemoryDescriptor, key: Key | None) -> AccessPath | None:
    """The access path to a peer's memory without UCX's puts and gets; None if there is none.

    Args:
        core: an endpoint that is up.
        key: the memory's key, unpacked for this endpoint; None if UCX does not accept it.

    Raises:
        ValueError: the descriptor claims more than there is.
        UCXError: NO_ELEM: its owner has closed it.
    """
    native = ffi.new("tu_access_path_t *", {"length": descriptor.nbytes})
    mapping = None if key is None else key.mapped(descriptor)
    ffi.memmove(native.token, descriptor._token, len(descriptor._token))
    if key is not None and mapping is not None:
        native.local = ffi.cast("char *", mapping.address)
        native.local_token = ffi.cast("char *", mapping.token)
        native.preparation = key.preparation
        native.preparation.left = descriptor.nbytes
    if descriptor._token and descriptor._answers_messages and core.features & Feature.AM:
        native.messages = True
        native.part = PART_OVER_TCP if _has_only_tcp(core) else 0
        if mapping is None and not native.part:
            _find_process(core, descriptor, native)
    if mapping is None and not native.messages:
        return None
    hardware = not _is_emulated(core) and Feature.RMA in core.engine.context.features and descriptor._answers_ucx()
    return AccessPath(core, native, None if mapping is None else key, hardware)


def _find_process(core: EndpointCore, descriptor: MemoryDescriptor, native: Any) -> None:
    """Notes the owner's process if this one may read its memory.

    That is another process's word for which process it is. The kernel decides whether we may, and the token, which only
    the owner has at that address, shows that it is the owner.
    """
    process = descriptor._process
    if descriptor._token_address and core.peer == process and is_visible(process):
        native.address = descriptor.address
        native.token_address = descriptor._token_address
        native.pid = process.pid
        if not lib.tu_direct_allowed(native):
            native.pid = 0
