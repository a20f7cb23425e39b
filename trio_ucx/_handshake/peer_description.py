"""The peer descriptions that the sides exchange, and whether they use shared memory. Without I/O."""

from __future__ import annotations

import enum
import struct
import zlib

import attrs

from .._rules.wire import MAX_WINDOW, MIN_THRESHOLD, MIN_WINDOW, ProtocolError
from .._util.fields import Field, Layout
from .._util.text import printable
from ..ucp import WorkerAddress
from ..ucp._internal_api import check_without_shared_memory, decode_worker_address, obstacle_to_shared_memory

#: The software, the worker's address and a checksum of everything follow these fields.
LAYOUT = Layout(
    "the peer description",
    Field("connection id", "I", 2**31, 2**32 - 1),
    Field("window", "Q", MIN_WINDOW, MAX_WINDOW),
    Field("rendezvous threshold", "Q", 0, MAX_WINDOW),
    Field("wish for shared memory", "B", 0, 2),
    Field("whether the peer is on this machine", "B", 0, 1),
    Field("length of the software", "H"),
    Field("length of the host's name", "H"),
)
_CHECKSUM = struct.Struct("<I")


class SharedMemory(enum.IntEnum):
    """Whether a side wants to use shared memory."""

    AUTO = 0
    NEVER = 1
    ALWAYS = 2


@attrs.frozen
class PeerDescription:
    """What one side says about itself: its share of the connection, and its worker.

    Attributes:
        connection_id: what the peer puts into the tags of its messages.
        window: bytes of unread messages that it is ready to hold.
        threshold: its messages of at least so many bytes stay with it until they are received; 0 if none do.
        wish: whether it wants to use shared memory.
        sees_local: whether it sees the other end of the control socket on its own machine. (The peer's claim to be on
            the same machine proves nothing.)
        software: its releases of trio_ucx and UCX, for error messages.
        host_name: the name of its host.
        worker: its worker, and how that can be reached.
    """

    connection_id: int
    window: int
    threshold: int
    wish: SharedMemory
    sees_local: bool
    software: str
    host_name: str
    worker: WorkerAddress

    def encode(self) -> bytes:
        software, host_name = self.software.encode(), self.host_name.encode()
        fields = LAYOUT.pack(
            self.connection_id,
            self.window,
            self.threshold,
            self.wish,
            self.sees_local,
            len(software),
            len(host_name),
        )
        body = fields + software + host_name + bytes(self.worker)
        return body + _CHECKSUM.pack(zlib.crc32(body))

    @classmethod
    def decode(cls, data: bytes) -> PeerDescription:
        """Decodes what :meth:`encode` returned.

        Raises:
            ProtocolError: it is damaged, or a field is out of range.
        """
        body, checksum = data[: -_CHECKSUM.size], data[-_CHECKSUM.size :]
        if checksum != _CHECKSUM.pack(zlib.crc32(body)):
            raise ProtocolError("the peer description was damaged on the way")
        try:
            connection_id, window, threshold, wish, sees_local, length, name_length = LAYOUT.unpack(body)
            texts, rest = body[LAYOUT.size :], length + name_length
            software, host_name, worker = texts[:length], texts[length:rest], decode_worker_address(texts[rest:])
        except ValueError as error:
            raise ProtocolError(str(error)) from None
        if not worker._is_described:
            raise ProtocolError("the peer does not say which UCX it has: use one release of trio_ucx on both sides")
        if 0 < threshold < MIN_THRESHOLD:
            raise ProtocolError(
                f"a rendezvous threshold (UCX_RNDV_THRESH) of {threshold} bytes: connections need at least "
                f"{MIN_THRESHOLD}"
            )
        return cls(
            connection_id=connection_id,
            window=window,
            threshold=threshold,
            wish=SharedMemory(wish),
            sees_local=bool(sees_local),
            software=printable(software.decode(errors="replace"), 200),
            host_name=printable(host_name.decode(errors="replace"), 255),
            worker=worker,
        )


def why_not_shared_memory(ours: PeerDescription, theirs: PeerDescription) -> str | None:
    """Returns why the two sides do not use shared memory, in words; None if they do. Both find the same.

    Raises:
        ProtocolError: one side insists on shared memory, and it is not possible; or no other transport is.
    """
    wishes = {ours.wish, theirs.wish}
    if SharedMemory.NEVER in wishes:
        if SharedMemory.ALWAYS in wishes:
            raise ProtocolError("one side wants shared_memory=True, and the other shared_memory=False")
        obstacle: str | None = "shared_memory=False"
    else:
        obstacle = obstacle_to_shared_memory(ours.worker, theirs.worker)
        if obstacle is None and not (ours.sees_local and theirs.sees_local):
            obstacle = "the control socket goes through a proxy or another machine"
        if obstacle is not None and SharedMemory.ALWAYS in wishes:
            raise ProtocolError(f"shared_memory=True, but {obstacle}")
    if obstacle is None:
        return None
    try:
        check_without_shared_memory(ours.worker, theirs.worker, obstacle)
    except ValueError as error:
        raise ProtocolError(str(error)) from None
    return obstacle


def falls_back(ours: PeerDescription, theirs: PeerDescription, obstacle: str | None) -> bool:
    """True if users would expect shared memory here: both sides are on one machine, and both have it."""
    return (
        obstacle is not None
        and SharedMemory.NEVER not in (ours.wish, theirs.wish)
        and ours.worker.process.host == theirs.worker.process.host
        and bool(ours.worker.shared_memory_kinds and theirs.worker.shared_memory_kinds)
    )
