"""Worker identity: UCX's attributes of a worker, and the address that its peers get."""

from __future__ import annotations

import errno
import logging
from typing import Any

import attrs

from ..._native import ffi, lib, ucx
from ..._util.process import this_host
from .._attributes import WorkerAttributes, query_worker
from .._context import Context
from .._quirks import wake_sockets
from .._quirks.address_layout import ParsedAddress, parse_worker_address, read_uid
from .._quirks.option_limits import longest_am_header
from .._status import read_sized
from .._worker_address import WorkerAddress

logger = logging.getLogger("trio_ucx")


@attrs.frozen
class Identity:
    """What one worker is to UCX, and what it says about itself to its peers.

    Attributes:
        has_only_tcp: whether it reaches peers on other machines by TCP only.
        unknown_layout: why trio_ucx cannot read its UCX address; None if it can. The worker then tells its peers the
            part without shared memory only, because nobody could tell whether shared memory can be used.
    """

    attributes: WorkerAttributes
    address: WorkerAddress
    has_only_tcp: bool
    unknown_layout: str | None

    @classmethod
    def of(cls, handle: Any, context: Context, client_id: int | None) -> Identity:
        """Asks UCX for the identity of a worker.

        Raises:
            OSError, UCXError: UCX does not tell.
            PermissionError: other users can reach the sockets that wake it.
        """
        found = query_worker(handle, client_id)
        blob, network = (_ask(handle, network_only) for network_only in (False, True))
        unknown_layout, wake_folder = None, ffi.string(lib.tu_worker_wake_folder(handle))
        parsed = parsed_network = ParsedAddress(())
        try:
            parsed, parsed_network = parse_worker_address(blob), parse_worker_address(network)
        except ValueError as error:
            unknown_layout, blob = str(error), network
            logger.warning(
                "trio_ucx cannot read the UCX address of a worker (%s): it can have no Connections, and uses no shared "
                "memory with peers. Use UCX 1.13 to 1.22, without UCX_UNIFIED_MODE",
                error,
            )
        else:
            network = network if parsed_network.transports else b""
        if parsed.shared_memory and not wake_folder:
            raise PermissionError(
                errno.EPERM,
                "other users could wake or break this worker, because this UCX makes the sockets that wake it in an "
                "unknown way. Use UCX 1.13 to 1.22, or a worker without shared memory (config={'TLS': 'tcp,self'})",
            )
        return cls(
            attrs.evolve(found, max_am_header=min(found.max_am_header, longest_am_header(context.config))),
            WorkerAddress._create(
                ucx=blob,
                network=network,
                host=this_host(),
                uid=read_uid(blob),
                wake_folder=wake_sockets.identify(wake_folder),
                release=(ucx.version[0], ucx.version[1]),
                shared_memory=context._shared_memory_handles_errors,
                shared_memory_kinds=parsed.shared_memory,
                auxiliary=context._auxiliary,
                features=context.features,
                sizes=context._agreed_sizes,
                tcp_addresses=parsed.tcp_addresses,
            ),
            parsed_network.transports == {"tcp"},
            unknown_layout,
        )


def _ask(handle: Any, network_only: bool) -> bytes:
    """UCX's address of a worker.

    Args:
        network_only: leave out shared memory (``UCP_WORKER_ADDRESS_FLAG_NET_ONLY``).
    """
    return read_sized(lambda *out: lib.tu_worker_address(handle, network_only, *out), "asking for the worker's address")
