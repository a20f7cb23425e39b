"""Finds the user who owns the client's end of a TCP connection within this machine.

The kernel is asked by netlink (``NETLINK_SOCK_DIAG``), which needs no privilege and takes some 50 microseconds, however
many sockets there are. Where netlink is blocked or lacks this service, ``/proc/net/tcp`` and ``tcp6`` are read. Linux
needs 3 microseconds for each socket of the machine, closed ones included. A thread therefore reads them, for one client
at a time, and at most MAX_SOCKETS sockets; a client that is not among them has no known owner.

The answer is used only under three conditions:

* The client's end is connected, and has an inode: some process has it open. A socket that its process has closed, or
  that is not accepted yet, has the inode 0, and most kernels report it as root's.
* Our end is connected before and after. As long as it is, no other socket can be connected to us from the same address
  and port, so that the answer is about this client.
* The kernel knows the user. In a user namespace it reports all users without a number there as one: the overflow uid.
"""

from __future__ import annotations

import errno
import os
import socket
import struct
import threading
from collections.abc import Iterable
from itertools import islice
from pathlib import Path

import attrs
import trio

from .._util.private_folder import overflow_uid
from .._util.socket_addresses import family_of

#: Sockets that are read of each table.
MAX_SOCKETS = 50_000
#: How many uids there are.
_ALL_UIDS = 2**32 - 1
#: The state of a connected socket (TCP_ESTABLISHED).
_ESTABLISHED = 1

#: Begins an IPv4-mapped IPv6 address.
_MAPPED = bytes(10) + b"\xff\xff"

_NETLINK_SOCK_DIAG = 4
_SOCK_DIAG_BY_FAMILY = 20
_NLMSG_ERROR = 2
_NLM_F_REQUEST = 1
#: struct nlmsghdr.
_HEAD = struct.Struct("=IHHII")
#: struct inet_diag_req_v2: family, protocol, states; the ports and addresses in network byte order, interface, cookie.
_REQUEST = struct.Struct("=BB2xI2s2s16s16sI8s")
#: struct inet_diag_msg: family, state; uid, inode.
_ANSWER = struct.Struct("=BB2x48x12xII")
_ERROR = struct.Struct("=i")

#: Admits the threads of a run that read tables.
_readers: trio.lowlevel.RunVar[trio.CapacityLimiter] = trio.lowlevel.RunVar("trio_ucx readers of /proc/net/tcp")


@attrs.frozen
class End:
    """One end of a TCP connection.

    Attributes:
        ip: 4 or 16 bytes; an IPv4-mapped IPv6 address is an IPv4 address.
        scope: the interface of a link-local address; otherwise 0.
    """

    ip: bytes
    port: int
    scope: int = 0

    @classmethod
    def of(cls, name: tuple[str, int] | tuple[str, int, int, int]) -> End:
        """Returns the end with this address, as sockets give it."""
        host = name[0].partition("%")[0]
        ip = socket.inet_pton(family_of(host), host)
        return cls(ip.removeprefix(_MAPPED), name[1], name[3] if len(name) == 4 else 0)


@attrs.frozen
class SocketRecord:
    """What the kernel says about a socket."""

    state: int
    uid: int
    inode: int


# ---- formats ----


def encode_request(local: End, remote: End) -> bytes:
    """Returns the netlink message that asks for the socket with these ends."""
    body = _REQUEST.pack(
        socket.AF_INET if len(local.ip) == 4 else socket.AF_INET6,
        socket.IPPROTO_TCP,
        _ALL_UIDS,  # in any state
        local.port.to_bytes(2, "big"),
        remote.port.to_bytes(2, "big"),
        local.ip,
        remote.ip,
        local.scope,
        b"\xff" * 8,  # with any cookie
    )
    return _HEAD.pack(_HEAD.size + len(body), _SOCK_DIAG_BY_FAMILY, _NLM_F_REQUEST, 0, 0) + body


def decode_answer(data: bytes) -> SocketRecord:
    """Returns what a netlink message says about a socket.

    Raises:
        OSError: the message is an error. ENOENT: there is no such socket, or this kernel has no such service.
    """
    try:
        _, kind, *_ = _HEAD.unpack_from(data)
        if kind == _NLMSG_ERROR:
            [number] = _ERROR.unpack_from(data, _HEAD.size)
            raise OSError(-number, os.strerror(-number))
        _, state, uid, inode = _ANSWER.unpack_from(data, _HEAD.size)
    except struct.error:
        kind = 0
    if kind != _SOCK_DIAG_BY_FAMILY:
        raise OSError(errno.EBADMSG, "this is no answer of NETLINK_SOCK_DIAG")
    return SocketRecord(state, uid, inode)


def find_in_table(table: Iterable[bytes], local: End, remote: End, *, mapped: bool = False) -> SocketRecord | None:
    """Returns what ``/proc/net/tcp`` or ``tcp6`` says about the socket with these ends, or None.

    Args:
        table: the lines of the file.
        mapped: whether the table writes IPv4 addresses as IPv4-mapped IPv6 addresses, as ``tcp6`` does.
    """
    wanted = f" {_in_table(local, mapped)} {_in_table(remote, mapped)} ".encode()
    for line in table:
        if wanted in line:
            _, _, _, state, _, _, _, uid, _, inode, *_ = line.split()
            return SocketRecord(int(state, 16), int(uid), int(inode))
    return None


def _in_table(end: End, mapped: bool) -> str:
    """Returns an end as it stands in a table: each 32 bits of the address as a number of this machine."""
    ip = _MAPPED + end.ip if mapped else end.ip
    words = struct.unpack(f"={len(ip) // 4}I", ip)
    return f"{''.join(f'{word:08X}' for word in words)}:{end.port:04X}"


def has_all_uids(uid_map: str) -> bool:
    """True if a user namespace with this ``/proc/self/uid_map`` has a number for every user."""
    return sum(int(line.split()[2]) for line in uid_map.splitlines()) >= _ALL_UIDS


# ---- asking ----


async def owner_of_peer(control: trio.socket.SocketType) -> int | None:
    """Returns the uid of the user who owns the peer's end of a TCP connection within this machine.

    Returns None if the kernel does not say.

    Raises:
        OSError: the peer has ended the connection, or will send nothing more.
    """
    peer, own = End.of(control.getpeername()), End.of(control.getsockname())
    _check_connected(control)
    record = await _find(peer, own)
    _check_connected(control)
    if record is None or record.state != _ESTABLISHED or not record.inode or not _is_known(record.uid):
        return None
    return record.uid


def _check_connected(control: trio.socket.SocketType) -> None:
    """Refuses a connection that has ended in either direction, as far as our kernel knows."""
    if control.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 1)[0] != _ESTABLISHED:
        raise ConnectionResetError(errno.ECONNRESET, "it has ended the connection")


async def _find(local: End, remote: End) -> SocketRecord | None:
    try:
        found = ask_netlink(local, remote)
        if found is not None or ask_netlink(remote, local) is not None:  # our own end: this kernel has the service
            return found
    except OSError:
        pass
    try:
        limiter = _readers.get()
    except LookupError:
        limiter = trio.CapacityLimiter(1)
        _readers.set(limiter)
    folder = f"/proc/self/task/{threading.get_native_id()}/net"  # of this thread's network namespace
    return await trio.to_thread.run_sync(read_tables, folder, local, remote, limiter=limiter, abandon_on_cancel=True)


def ask_netlink(local: End, remote: End) -> SocketRecord | None:
    """Returns what the kernel's NETLINK_SOCK_DIAG says about the socket with these ends.

    Returns None if it knows no such socket, or if this kernel has no such service.

    Raises:
        OSError: netlink is blocked.
    """
    with socket.socket(socket.AF_NETLINK, socket.SOCK_DGRAM, _NETLINK_SOCK_DIAG) as netlink:
        netlink.setblocking(False)  # the answer is there when sendto returns
        netlink.sendto(encode_request(local, remote), (0, 0))
        data, sender = netlink.recvfrom(8192)
        if sender != (0, 0):
            raise OSError(errno.EBADMSG, "a netlink message that is not the kernel's")
    try:
        return decode_answer(data)
    except FileNotFoundError:
        return None


def read_tables(folder: str, local: End, remote: End) -> SocketRecord | None:
    """Returns what the tables ``tcp`` and ``tcp6`` in this folder say about the socket with these ends.

    Returns None if it is not among the first MAX_SOCKETS of either table, or if they cannot be read.
    """
    is_ipv4 = len(local.ip) == 4
    for name in ("tcp", "tcp6") if is_ipv4 else ("tcp6",):
        try:
            with open(f"{folder}/{name}", "rb") as table:
                found = find_in_table(islice(table, MAX_SOCKETS), local, remote, mapped=is_ipv4 and name == "tcp6")
        except OSError:
            continue
        if found is not None:
            return found
    return None


def _is_known(uid: int) -> bool:
    """True if a uid that the kernel has reported stands for one user."""
    try:
        return uid != overflow_uid() or has_all_uids(Path("/proc/self/uid_map").read_text())
    except OSError:
        return False
