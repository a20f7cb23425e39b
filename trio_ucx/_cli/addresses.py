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
    has_port = text.rpartition(":")[2].isdecimal() and (text.count(":") == 1 or "]:" in text)
    host = f"[{text}]" if text.count(":") > 1 and "]" not in text else text
    return parse_address(text if has_port else f"{host}:{DEFAULT_PORT}")
