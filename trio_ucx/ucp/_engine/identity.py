"""Which worker it is, to its peers and to UCX."""

from __future__ import annotations

from typing import Any

import attrs

from .._address import WorkerAddress, worker_address
from .._attributes import WorkerAttributes, query_worker
from .._context import Context


@attrs.frozen
class Identity:
    """What UCX says about one worker.

    Attributes:
        network_address: the address without shared memory.
    """

    attributes: WorkerAttributes
    address: WorkerAddress
    network_address: WorkerAddress

    @classmethod
    def of(cls, handle: Any, context: Context, client_id: int | None) -> Identity:
        """Asks UCX.

        Raises:
            OSError, UCXError: UCX does not tell.
        """
        found = query_worker(handle, client_id)
        handles_errors = context.shared_memory_handles_errors
        features, sizes = context.features, context.agreed_sizes
        return cls(
            attrs.evolve(found, max_am_header=min(found.max_am_header, context.longest_am_header)),
            worker_address(handle, features, sizes, shared_memory=handles_errors),
            worker_address(handle, features, sizes, shared_memory=handles_errors, network_only=True),
        )
