"""The part of a worker address without shared memory, for peers that cannot use that."""

from __future__ import annotations

from ._address_format import LAST, Device, parse_worker_address

#: Shared-memory transports.
_WITHIN_HOST = frozenset({"self", "sysv", "posix", "cma", "xpmem", "knem"})


def without_shared_memory(blob: bytes) -> bytes | None:
    """The same worker address without its transports over shared memory; None if it has no others.

    Raises:
        ValueError: as :func:`parse_worker_address`.
    """
    devices = parse_worker_address(blob).devices
    kept = [device for device in devices if not any(each.name in _WITHIN_HOST for each in device.transports)]
    if not kept:
        return None
    end = devices[-1].place.stop  # behind it, version 1 may have the release
    last = _as_last(blob, kept[-1], last=end == len(blob))
    return b"".join([blob[: devices[0].place.start], *(blob[device.place] for device in kept[:-1]), last, blob[end:]])


def _as_last(blob: bytes, device: Device, *, last: bool) -> bytes:
    """A device as it is written in an address, marked as the last one or not."""
    written = bytearray(blob[device.place])
    # The flag shares a byte with the length of the device address. The memory domain precedes it, with one byte if
    # valid.
    written[1] = written[1] & ~LAST | (LAST if last else 0)
    return bytes(written)
