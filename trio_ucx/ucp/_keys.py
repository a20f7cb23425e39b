"""The keys that open data ports (``_quirks/key_gate.py``). Without I/O."""

from __future__ import annotations

import secrets

import attrs

#: Bytes of a key.
KEY_SIZE = 32


@attrs.frozen
class KeyPair:
    """The keys of two workers.

    Attributes:
        ours: opens our data ports. The peer shows it where it connects to us, and as its answer where we connect.
        theirs: opens the peer's.
    """

    ours: bytes = attrs.field(repr=False)
    theirs: bytes = attrs.field(repr=False)


def new_key() -> bytes:
    """Returns a random key."""
    return secrets.token_bytes(KEY_SIZE)
