"""The proofs of the key gate, written a second time: from wire.md, with Python's hash."""

from __future__ import annotations

import hashlib
import secrets
import struct
from ipaddress import ip_address

import attrs

Place = tuple[str, int]

PROOF_SIZE, ANSWER_SIZE = 72, 40


def code(key: bytes, role: str, place: Place | None, epoch: int, nonce: bytes) -> bytes:
    ip, port = bytes(16), 0
    if place is not None:
        ip, port = ip_address(place[0]).packed, place[1]
        ip = ip if len(ip) == 16 else bytes(10) + b"\xff\xff" + ip
    return hashlib.blake2s(struct.pack("<8s16sHQ16s", role.encode(), ip, port, epoch, nonce), key=key).digest()


def name_of(key: bytes) -> bytes:
    return code(key, "name", None, 0, bytes(16))[:16]


@attrs.frozen
class Proof:
    """A proof that its maker knows the key of a port.

    Args:
        place: where the port is.
    """

    key: bytes
    place: Place
    epoch: int = 0
    nonce: bytes = attrs.field(factory=lambda: secrets.token_bytes(16))
    role: str = "connect"

    def __bytes__(self) -> bytes:
        head = struct.pack("<16sQ16s", name_of(self.key), self.epoch, self.nonce)
        return head + code(self.key, self.role, self.place, self.epoch, self.nonce)

    def answer(self, role: str = "accept", epoch: int | None = None) -> bytes:
        epoch = self.epoch if epoch is None else epoch
        return struct.pack("<Q", epoch) + code(self.key, role, self.place, epoch, self.nonce)

    @property
    def accepted(self) -> bytes:
        return self.answer()
