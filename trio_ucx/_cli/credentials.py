"""The key of ``--listen`` and of its clients: options of the command line, and where the key is found."""

from __future__ import annotations

import argparse
import json
import secrets
import shlex
from pathlib import Path

from .._opening.authkey import AUTHKEY, AUTHKEY_FILE, DEFAULT_FILE, authkey, read_authkey
from .._util.hidden import HiddenBytes, HiddenText

#: For the help of a command.
ABOUT_KEYS = (
    "Both need the same key: a new one that it prints, or the one in --authkey-file, or the one of this user: in "
    f"the environment variable {AUTHKEY}, in the file that {AUTHKEY_FILE} names, or in ~/.config/{DEFAULT_FILE}."
)


def add_key_options(parser: argparse.ArgumentParser) -> None:
    door = parser.add_mutually_exclusive_group()
    door.add_argument(
        "--authkey-file", type=Path, metavar="FILE", help="the key that both sides need, 16 bytes or more"
    )
    door.add_argument(
        "--allow-anyone",
        action="store_true",
        help="with --listen: let in every client that can reach the port, without a key; it can take over the process",
    )


def find_key(parser: argparse.ArgumentParser, arguments: argparse.Namespace, *, connects: bool) -> bytes | None:
    """Returns the key that the options or the environment give, or None. Ends the process if an option is wrong.

    Args:
        connects: whether it is for a client; otherwise for a server if ``listen`` is there, or for nobody.
    """
    listens = arguments.listen is not None
    if arguments.allow_anyone and not listens:
        parser.error("--allow-anyone is for --listen")
    if arguments.authkey_file and not (listens or connects):
        parser.error("--authkey-file is for --listen, or with an ADDRESS")
    try:
        if arguments.allow_anyone or not (listens or connects):
            return None
        if file := arguments.authkey_file:
            return read_authkey(file, f"--authkey-file={file}")
        return authkey()
    except (OSError, ValueError) as error:
        parser.error(str(error))


def server_key(arguments: argparse.Namespace) -> tuple[bytes | None, str | None]:
    """Returns the key of ``--listen``; and its text, if it is a new one."""
    if arguments.authkey or arguments.allow_anyone:
        return arguments.authkey, None
    new_key = HiddenText(secrets.token_hex(16))
    return HiddenBytes(new_key.encode()), new_key


def announce(arguments: argparse.Namespace, address: str, new_key: str | None, *options: str) -> None:
    """Prints where ``--listen`` listens, and what to type on the other machine.

    Args:
        address: one that other machines can connect to.
        options: for that command.
    """
    if arguments.json:
        print(json.dumps({"listening": address, **({"authkey": new_key} if new_key else {})}), flush=True)
        return
    command = f"{f'{AUTHKEY}={new_key} ' if new_key else ''}{arguments.prog} {shlex.join([*options, address])}"
    same = ", with the same key" if arguments.authkey else ""
    print(f"listening at {address}\non the other machine{same}: {command}", flush=True)
