"""Memory that peers may read and write by themselves: registration, and the descriptor that lets them."""

from __future__ import annotations

import enum
import os
import struct
import threading
import weakref
import zlib
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import attrs
from trio.lowlevel import enable_ki_protection

from ..._native import ffi, lib
from ..._util.arguments import check_integer
from ..._util.handles import ClosedOnExit, OpenedNotConstructed, warn_resource
from ..._util.live_handles import live_handles
from ..._util.process import NOBODY, Process, check_process, this_process
from .._features import Feature
from .._status import Status, UCXError, read_sized
from .buffers import Contiguous, Pinned, new_bytes
from .foreign import MemoryType
from .notes import Note, NoteQueue, Notifications
from .window import Window

if TYPE_CHECKING:
    from .._context import Context


class Access(enum.IntFlag):
    """What peers may do with registered memory."""

    READ = lib.TU_ACCESS_READ
    WRITE = lib.TU_ACCESS_WRITE
    ATOMIC = lib.TU_ACCESS_ATOMIC
    ALL = 7


#: The type, for the class that has a property of that name.
View = memoryview

#: UCX's protection bits: what we do with the memory, what peers do.
_LOCAL_READ, _LOCAL_WRITE, _REMOTE_READ, _REMOTE_WRITE = 1 << 0, 1 << 1, 1 << 8, 1 << 9

#: What of the kinds of memory that a Pinned may be in we can look at.
_HOST_MEMORY = (lib.TU_MEMORY_UNKNOWN, lib.TU_MEMORY_HOST)

#: Magic and version, access, access by UCX, whether its owner answers messages, address, length; the process (host, pid
#: namespace, pid, start time); the token, and where its owner has it; the length of the remote key, which follows; then
#: a checksum of everything before.
_DESCRIPTOR = struct.Struct("<4sBBBBQQ16sQIQ16sQI")
_MAGIC, _VERSION = b"TURM", 2
#: The token in a descriptor of memory that has none.
_NO_TOKEN = bytes(lib.TU_TOKEN_SIZE)
_CHECKSUM = struct.Struct("<I")
_MAX_ADDRESS = 2**64 - 1
_MAX_LENGTH = 2**63 - 1

#: A packed remote key: which memory domains it has keys for, 64 bits, and the kind of memory; then for each domain the
#: length of its key and the key. Of what follows UCX finds the end by itself (ucp_ep_rkey_unpack_internal).
_RKEY = struct.Struct("=QB")


def _is_rkey(packed: bytes) -> bool:
    """True if it looks like one, and is not cut off: UCX does not check, and would crash."""
    if len(packed) < _RKEY.size:
        return False
    domains, memory_type = _RKEY.unpack_from(packed)
    end = _RKEY.size
    for _ in range(domains.bit_count()):
        if end >= len(packed):
            return False
        end += 1 + packed[end]
    return memory_type <= max(MemoryType) and end <= len(packed)


def is_host_memory(packed: bytes) -> bool:
    """True if the memory of a packed remote key is host memory: that of a device, loads and stores do not reach."""
    return bool(_RKEY.unpack_from(packed)[1] == MemoryType.HOST)


def ucx_access(features: Feature) -> Access:
    """Returns which of UCX's puts and gets the workers of a context with these features answer."""
    return Access.READ | Access.WRITE if Feature.RMA in features else Access(0)


def require_answers(answered: Access, context: str) -> None:
    """Refuses UCX's puts and gets if a peer's context gives no answer to them.

    Raises:
        RuntimeError: with what to do.
    """
    if Access.READ | Access.WRITE not in answered:
        raise RuntimeError(
            f"{context} was opened without Feature.RMA, so it would never answer UCX's puts and gets: "
            "open it with ucp.DEFAULT_FEATURES | ucp.Feature.RMA"
        )


@attrs.frozen(repr=False)
class MemoryDescriptor:
    """What a peer needs in order to reach a piece of our memory, for :meth:`Endpoint.attach`.

    ``bytes(descriptor)`` serialises it, :meth:`from_bytes` brings it back. :attr:`Memory.descriptor` makes one. For the
    memory of a UCP program without trio_ucx, make one of the address, the length and the packed key that it sends.

    Attributes:
        address: where the memory begins, in its process.
        nbytes: its length.
        rkey: UCX's packed remote key.
        access: what peers may do. UCX itself checks that only with RDMA hardware.
    """

    address: int
    nbytes: int
    rkey: bytes
    access: Access = Access.ALL
    #: Whose memory it is, so that :meth:`Endpoint.attach` notices an endpoint to another process.
    _process: Process = NOBODY
    #: 16 random bytes, which the owner erases when it closes the memory, and which requests by messages must have.
    #: Empty: device memory, or memory of a program without trio_ucx.
    _token: bytes = b""
    #: Which of UCX's puts and gets the owner's UCX answers; the features of its context decide.
    _ucx_access: Access = Access.ALL
    #: Where the owner's process has the token as long as the memory is open: of allocated memory, behind it; 0: not
    #: known.
    _token_address: int = 0
    #: Whether the owner answers trio_ucx's own messages about this memory.
    _answers_messages: bool = True

    def __attrs_post_init__(self) -> None:
        check_integer(self.address, "the address", 0, _MAX_ADDRESS)
        check_integer(self.nbytes, "nbytes", 0, min(_MAX_LENGTH, _MAX_ADDRESS - self.address))
        check_access(self.access)
        check_access(self._ucx_access)
        check_integer(self._token_address, "the token's address", 0, _MAX_ADDRESS)
        if not isinstance(self.rkey, bytes):
            raise TypeError(f"a remote key is bytes, not {type(self.rkey).__name__}")
        if not isinstance(self._token, bytes):
            raise TypeError(f"a token is bytes, not {type(self._token).__name__}")
        if len(self._token) not in (0, lib.TU_TOKEN_SIZE):
            raise ValueError(f"a token has {lib.TU_TOKEN_SIZE} bytes, not {len(self._token)}")
        if not _is_rkey(self.rkey):
            raise ValueError(f"these {len(self.rkey)} bytes are no packed remote key of UCX's, or not all of one")

    def __bytes__(self) -> bytes:
        body = (
            _DESCRIPTOR.pack(
                _MAGIC,
                _VERSION,
                self.access,
                self._ucx_access,
                self._answers_messages,
                self.address,
                self.nbytes,
                *attrs.astuple(self._process),
                self._token or _NO_TOKEN,
                self._token_address,
                len(self.rkey),
            )
            + self.rkey
        )
        return body + _CHECKSUM.pack(zlib.crc32(body))

    @classmethod
    def from_bytes(cls, data: bytes | bytearray | memoryview) -> MemoryDescriptor:
        """Reads what ``bytes(descriptor)`` gave.

        Raises:
            TypeError: not bytes.
            ValueError: it is damaged or something else. (UCX itself would crash.)
        """
        if not isinstance(data, (bytes, bytearray, memoryview)):
            raise TypeError(f"a memory descriptor is made from bytes, not {type(data).__name__}")
        data = bytes(data)
        body, checksum = data[: -_CHECKSUM.size], data[-_CHECKSUM.size :]
        if len(body) < _DESCRIPTOR.size or body[:4] != _MAGIC:
            raise ValueError(
                f"these {len(data)} bytes are no memory descriptor: it is Memory.descriptor that makes them"
            )
        if checksum != _CHECKSUM.pack(zlib.crc32(body)):
            raise ValueError("this memory descriptor was damaged on the way")
        _, version, access, ucx_access, answers_messages, address, nbytes, *rest = _DESCRIPTOR.unpack_from(body)
        if version != _VERSION:
            raise ValueError(f"a memory descriptor of version {version}: this trio_ucx speaks version {_VERSION}")
        process, (token, token_address, rkey_length) = check_process(*rest[:4]), rest[4:]
        rkey = body[_DESCRIPTOR.size :]
        if len(rkey) != rkey_length:
            raise ValueError("this memory descriptor contradicts itself")
        return cls(
            address,
            nbytes,
            rkey,
            Access(access & 7),
            process,
            b"" if token == _NO_TOKEN else token,
            Access(ucx_access & 7),
            token_address,
            bool(answers_messages),
        )

    def _has_token_behind(self) -> bool:
        """True if the owner has allocated the memory, and the token lies behind it, where peers map it."""
        distance = self._token_address - self.address
        return bool(self._token) and distance == -(-self.nbytes // lib.TU_TOKEN_ALIGNMENT) * lib.TU_TOKEN_ALIGNMENT

    def _answers_ucx(self) -> bool:
        """True if the owner's UCX answers UCX's puts and gets."""
        return Access.READ | Access.WRITE in self._ucx_access

    def _require_ucx(self) -> None:
        """Refuses UCX's puts and gets if the owner's UCX would never answer them.

        Raises:
            RuntimeError: with what to do.
        """
        require_answers(self._ucx_access, "the owner's context")

    def __repr__(self) -> str:
        return f"<trio_ucx.ucp.MemoryDescriptor of {self.nbytes} bytes at {self.address:#x}, {self.access!r}>"


@attrs.define(eq=False, repr=False)
class Memory(ClosedOnExit, metaclass=OpenedNotConstructed):
    """Memory that UCX knows, for peers to reach: :meth:`Context.register`, :meth:`Context.allocate`. A context manager.

    Attributes:
        context: the context that it is registered with.
        address: where it begins.
        nbytes: its length in bytes.
        access: what peers may do.
    """

    context: Context
    address: int
    nbytes: int
    access: Access
    _handle: Any
    _window: Window | None
    _pins: Pinned | None
    #: See :attr:`MemoryDescriptor._token`.
    _token: bytes = b""
    #: C's entry, by which it serves peers; None: there is none, or no more.
    _served: Any = None
    _rkey: bytes | None = None
    _notes: NoteQueue = attrs.field(factory=NoteQueue)

    def notifications(self) -> Notifications:
        """Returns an asynchronous iterator of what peers say about this memory (:meth:`RemoteMemory.notify`).

        Notifications that come before the first call are kept, too.

        Cancellation: a cancelled ``async for`` loses none.

        Raises:
            ValueError: it was closed; or it is device memory.
            RuntimeError: its context was closed, or opened without ``Feature.AM``.
        """
        self._check()
        self.context._require(Feature.AM, "receiving notifications")
        if not self._token:
            raise ValueError("there are no notifications about device memory")
        notifications: Notifications = Notifications._create(self._notes, self._note_taken)
        return notifications

    def _note_taken(self) -> None:
        if self._served is not None:
            lib.tu_memory_note_taken(self._served)

    @property
    def memoryview(self) -> View:
        """The memory itself, as bytes. It ends with :meth:`close`.

        Raises:
            ValueError: it was closed; or it is device memory.
            RuntimeError: its context was closed.
        """
        self._check()
        if self._window is None:
            raise ValueError("this is no host memory")
        return self._window.view

    @property
    def rkey(self) -> bytes:
        """UCX's packed remote key (``ucp_rkey_pack``).

        Raises:
            ValueError: it was closed.
            RuntimeError: its context was closed.
        """
        self._check()
        if self._rkey is None:
            with self.context._held() as native:
                self._rkey = read_sized(
                    lambda *out: lib.tu_memory_pack(native, self._handle, *out), "packing a remote key"
                )
        return self._rkey

    @property
    def descriptor(self) -> bytes:
        """Returns what a peer needs for :meth:`Endpoint.attach`, to be sent to it by whatever means there are.

        Raises:
            ValueError: it was closed.
            RuntimeError: its context was closed.
        """
        self._check()
        return bytes(
            MemoryDescriptor(
                self.address,
                self.nbytes,
                self.rkey,
                self.access,
                this_process(),
                self._token,
                ucx_access(self.context.features),
                lib.tu_memory_token_address(self._served) if self._served is not None else 0,
                self.context._serves_memory,
            )
        )

    def _check(self) -> None:
        if self._handle is None:
            raise ValueError("this memory was closed")
        self.context._native()

    def __len__(self) -> int:
        return self.nbytes

    def __buffer__(self, flags: int, /) -> View:
        return self.memoryview

    @enable_ki_protection
    def close(self) -> None:
        """Ends the registration (``ucp_mem_unmap``); frees allocated memory. Closed already: no effect.

        Returns at once. Whatever trio_ucx peers begin later is refused (NO_ELEM), and what is under way ends with its
        next step; messages in flight are carried out. Until then the memory stays, and a registered buffer stays pinned
        and must not be used again. Allocated memory also stays while a peer in this process has a
        :class:`RemoteMemory` of it; ``statistics().closed_memories`` of a worker counts what stays.

        The end of the context closes it, too, unless its view is still in use.

        UCX's own puts and gets are not refused, except with RDMA hardware. Peers without trio_ucx, say, write to
        whatever is at that address then: tell them first.

        Raises:
            BufferError: something made from :attr:`memoryview` (a numpy array, say) is still in use.
        """
        if self._handle is None:
            return
        if self.context._birth.inherited:  # it belongs to the parent
            self._handle = None
            return
        if self._window is not None:
            self._window.close()
        handle, self._handle = self._handle, None
        self._notes.close()
        served, self._served = self._served, None
        if served is not None and lib.tu_memory_withdraw(served):
            with _lock:
                _closing[served] = self, handle
            unmap_unused(served)  # another thread may have ended the last use just now
        else:
            self._unmap(handle)

    def _unmap(self, handle: Any) -> None:
        lib.tu_memory_unmap(self.context._handle, handle)
        if self._pins is not None:
            self._pins.release()
        live_handles.closed("memory")
        self.context._released_memory(self)

    def _close_unasked(self) -> None:
        """Closes it at the end of its context. Memory that is in use stays."""
        if self._handle is None:
            return  # it was closed while peers' requests were in flight
        warn_resource(f"unclosed {self!r}", self)
        with suppress(BufferError):
            self.close()

    def __repr__(self) -> str:
        state = "closed" if self._handle is None else repr(self.access)
        return f"<trio_ucx.ucp.Memory of {self.nbytes} bytes at {self.address:#x}, {state}>"


#: Memory that was closed while it was in use (peers' requests in flight, keys of this process), and UCX's handle of it,
#: by C's entry.
_closing: dict[Any, tuple[Memory, Any]] = {}
#: Open memory that peers reach by messages.
_by_token: weakref.WeakValueDictionary[bytes, Memory] = weakref.WeakValueDictionary()
#: Threads take turns: what is found unused was freed. (The collector may run a destructor that comes here again.)
_lock = threading.RLock()


def note_arrived(pointer: int, length: int, find_endpoint: Callable[[], Any]) -> None:
    """Takes a notification from C."""
    token, data = ffi.new("char[]", lib.TU_TOKEN_SIZE), new_bytes(length)
    lib.tu_note_take(pointer, token, ffi.from_buffer("char[]", data))
    memory = _by_token.get(bytes(ffi.buffer(token)))
    if memory is not None:
        memory._notes.add(Note(data, find_endpoint))


def unmap_unused(*some: Any) -> None:
    """Ends the registration of closed memory that is not in use any more.

    Args:
        some: C's entries to look at; by default all.
    """
    done = []
    with _lock:
        for served in some or list(_closing):
            entry = _closing.pop(served, None)
            if entry is not None and lib.tu_memory_unused(served):
                done.append(entry)  # C has freed it, and may give its address to another one
            elif entry is not None:
                _closing[served] = entry
    for memory, handle in done:
        memory._unmap(handle)


def register(context: Context, buffer: Contiguous, access: Access) -> Memory:
    """:meth:`Context.register`."""
    access = check_access(access)
    writable = bool(access & (Access.WRITE | Access.ATOMIC))
    pins = Pinned(buffer, writable=writable)
    try:
        if pins.address is None:
            raise TypeError("register contiguous buffers, one by one: no list, no strided array")
        if pins.size == 0:
            raise ValueError("there is nothing to register in an empty buffer")
        protection = _protection(access, writable)
        return _map(context, pins.address, pins.size, access, protection, pins)
    except BaseException:
        pins.release()
        raise


def allocate(context: Context, nbytes: int, access: Access) -> Memory:
    """:meth:`Context.allocate`."""
    access = check_access(access)
    nbytes = check_integer(nbytes, "nbytes", 1, 2**62)
    if nbytes > _available():
        raise MemoryError(f"this machine does not have {nbytes} bytes of memory to allocate")
    return _map(context, ffi.NULL, nbytes, access, _protection(access, True), None)


def closed_memories(context: Context) -> int:
    """Returns how much memory of a context was closed, and stays because it is in use. Any thread may call it."""
    with _lock:
        return sum(memory.context is context for memory, _ in _closing.values())


def _available() -> int:
    """Bytes of memory that can be had without swapping.

    UCX itself fills a file in /dev/shm to find out whether there is enough (uct_posix_mem_alloc): asked for too much,
    it takes all memory of the machine, and the file stays when the kernel kills us for that.
    """
    try:
        for line in Path("/proc/meminfo").read_text().splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    except (OSError, ValueError, IndexError):
        pass
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGESIZE")


def check_access(access: Access) -> Access:
    if not isinstance(access, Access):
        raise TypeError(f"access must be of Access.READ, WRITE and ATOMIC, not {access!r}")
    return access


def _protection(access: Access, writable: bool) -> int:
    protection = _LOCAL_READ | (_LOCAL_WRITE if writable else 0)
    if access & (Access.READ | Access.ATOMIC):
        protection |= _REMOTE_READ
    if access & (Access.WRITE | Access.ATOMIC):
        protection |= _REMOTE_WRITE
    return protection


def _map(
    context: Context,
    address: Any,
    nbytes: int,
    access: Access,
    protection: int,
    pins: Pinned | None,
) -> Memory:
    with context._held() as native:
        out = ffi.new("ucp_mem_h *")
        kind = pins.memory - 1 if pins is not None else -1  # -1: UCX looks, or allocates in host memory
        size = nbytes if pins is not None else nbytes + lib.TU_TOKEN_ALIGNMENT + lib.TU_TOKEN_SIZE  # the token, behind
        status = lib.tu_memory_map(native, address, size, kind, protection, out)
        if status == Status.NO_MEMORY:
            raise MemoryError(f"UCX has no {nbytes} bytes of memory to allocate or register")
        if status != Status.OK:
            raise UCXError(status, f"registering {nbytes} bytes of memory")
        base, on_host = int(ffi.cast("uintptr_t", address)), pins is None or pins.memory in _HOST_MEMORY
        if pins is None:
            found, length, found_kind = ffi.new("uint64_t *"), ffi.new("size_t *"), ffi.new("int *")
            lib.tu_memory_query(out[0], found, length, found_kind)  # the length may be more than was asked for
            base = found[0]
        window = Window(base, nbytes, writable=bool(protection & _LOCAL_WRITE)) if on_host else None
        memory: Memory = Memory._create(context, base, nbytes, access, out[0], window, pins)
        if on_host:
            memory._token = os.urandom(lib.TU_TOKEN_SIZE)
            memory._served = lib.tu_memory_serve(native, out[0], memory._token, base, nbytes, access, pins is None)
            if memory._served == ffi.NULL:
                lib.tu_memory_unmap(native, out[0])
                memory._handle = memory._served = None
                raise MemoryError(f"no memory to register {nbytes} bytes of memory")
            _by_token[memory._token] = memory
        context._added_memory(memory)
        live_handles.opened("memory")
        return memory
