"""Addresses on the command line."""

from __future__ import annotations

import argparse

from .._util.socket_addresses import split_address

#: The port of ``check --listen``, unless another one is named.
DEFAULT_PORT = 13337


def parse_address(text: str) -> tuple[str, int]:
    try:
        host, port = split_address(text)
        host.encode("idna")  # as the resolver does
    except UnicodeError as error:
        raise argparse.ArgumentTypeError(f"{host!r} cannot be the name of a host: {error}") from None
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None
    return host, port


def parse_listen(text: str) -> tuple[str | None, int]:
    if not (text.isascii() and text.isdecimal()):
        return parse_address(text)
    if len(text) > 5 or int(text) > 65535:
        raise argparse.ArgumentTypeError(f"the port must be between 0 and 65535, not {text}")
    return None, int(text)


def parse_host(text: str) -> tuple[str, int]:
    """Returns a host and its port, which may be missing."""
    if text and ("]:" not in text if "]" in text else text.count(":") != 1):  # no port
        text = f"{f'[{text}]' if ':' in text and ']' not in text else text}:{DEFAULT_PORT}"
    host, port = parse_address(text)
    if port == 0 or host.isdecimal():
        raise argparse.ArgumentTypeError("write HOST or HOST:PORT, with the port that `check --listen` prints there")
    return host, port
