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
        ours: opens our data ports. Where the peer connects to us, each side proves that it knows this key.
        theirs: opens the peer's, in the same way.
    """

    ours: bytes = attrs.field(repr=False)
    theirs: bytes = attrs.field(repr=False)


def new_key() -> bytes:
    """Returns a random key."""
    return secrets.token_bytes(KEY_SIZE)
