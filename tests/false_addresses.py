"""Worker addresses that are well formed and false: the worker's own UCX sends a different one later."""

from __future__ import annotations

import random
from collections.abc import Callable

from trio_ucx.ucp._address_format import parse_worker_address

_LAST, _HAS_PATHS, _HAS_SYSTEM_DEVICE, _LENGTH = 0x80, 0x40, 0x20, 0x1F
_TRANSPORT_NAME, _ATTRIBUTES = 2, 16


def change_devices(blob: bytes, change: Callable[[bytearray], None], *, backwards: bool = False) -> bytes:
    """Changes each device of an address of version 1.

    Args:
        backwards: whether the devices also change their order.
    """
    places = [device.place for device in parse_worker_address(blob).devices]
    devices = [bytearray(blob[place]) for place in (places[::-1] if backwards else places)]
    for device in devices:
        device[1] &= ~_LAST
        change(device)
    if places[-1].stop == len(blob):  # otherwise the release follows
        devices[-1][1] |= _LAST
    return blob[: places[0].start] + b"".join(devices) + blob[places[-1].stop :]


def set_system_device(device: bytearray, number: int = 3) -> None:
    at = 3 if device[1] & _HAS_PATHS else 2
    if device[1] & _HAS_SYSTEM_DEVICE:
        device[at] = number
    else:
        device[1] |= _HAS_SYSTEM_DEVICE
        device[at:at] = bytes([number])


def set_memory_domain(device: bytearray, number: int | None = None) -> None:
    """Sets the number of the memory domain; without a number, to another one than the device has."""
    device[0] = device[0] ^ 1 if number is None else number


def set_paths(device: bytearray, number: int = 2) -> None:
    if device[1] & _HAS_PATHS:
        device[2] = number
    else:
        device[1] |= _HAS_PATHS
        device[2:2] = bytes([number])


def make_slow(device: bytearray) -> None:
    """Changes the performance of the first transport, so that UCX chooses another."""
    at = 2 + bool(device[1] & _HAS_PATHS) + bool(device[1] & _HAS_SYSTEM_DEVICE) + (device[1] & _LENGTH)
    at += _TRANSPORT_NAME
    device[at + 8 : at + 12] = b"\0\0\x80\x3f"  # a latency of a second


LIES: dict[str, Callable[[bytearray], None]] = {
    "system device": set_system_device,
    "memory domain": set_memory_domain,
    "paths": set_paths,
    "performance": make_slow,
}


def random_lie(blob: bytes, chance: random.Random) -> bytes:
    """Several lies, each about some devices."""
    lies = chance.sample(
        [
            lambda device: set_system_device(device, chance.randrange(8)),
            lambda device: set_memory_domain(device, chance.randrange(8)),
            lambda device: set_paths(device, chance.randrange(2, 5)),
            make_slow,
        ],
        chance.choice([1, 1, 2, 3]),
    )

    def change(device: bytearray) -> None:
        for lie in lies:
            if chance.random() < 0.6:
                lie(device)

    return change_devices(blob, change, backwards=chance.random() < 0.3)
