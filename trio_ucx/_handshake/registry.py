"""The handshake registry: what a worker needs for its handshakes.

A worker gets one when it is first used for Connections. The registry also finds the worker for a new connection: its
data ports and shared-memory queue must work, it must know the network to the peer, and it must be able to make an
endpoint that UCX pairs with the peer's.
"""

from __future__ import annotations

import itertools
from collections.abc import Collection
from functools import partial

from .._link import Options
from .._rules import wire
from .._statistics import Totals
from .._util.process import host_name
from .._version import SOFTWARE
from ..ucp import Feature, Worker
from ..ucp._internal_api import Ends, Engine, OptionError, at_control_socket, came_later, check_claim
from .control_sockets import ControlSockets
from .peer_description import PeerDescription, SharedMemory

#: The workers that have Connections, in all threads, without those that were opened for another one. By name; workers
#: without a name, or with one that is taken, have a number. Iterate over a copy: other threads change it.
named_workers: dict[str, Worker] = {}
_numbers = itertools.count(1)


class WorkerConnections:
    """A worker's control sockets, its successors, and the sums over its Connections.

    Args:
        parent: of the worker for which this one was opened.
    """

    def __init__(self, worker: Worker, parent: WorkerConnections | None = None) -> None:
        if not worker.context.features & Feature.TAG:
            raise ValueError(
                f"Connections need a worker whose context has the feature TAG; this one has {worker.context.features!r}"
            )
        least = worker.context._least_rendezvous_threshold
        if least is not None and least < wire.MIN_THRESHOLD:
            raise ValueError(
                f"Connections need a worker with an RNDV_THRESH (UCX_RNDV_THRESH) of {wire.MIN_THRESHOLD} or more; "
                f"here it is {least}: the receiver must get their control frames without asking for them"
            )
        if least is not None and worker.context.rendezvous_threshold is None and least <= wire.MAX_BATCH:
            raise ValueError(
                f"Connections need a worker with one RNDV_THRESH (UCX_RNDV_THRESH) for all fabrics, or several of more "
                f"than {wire.MAX_BATCH}; here the least is {least}: the peer must know which short messages stay "
                "with their sender"
            )
        if worker.context._is_on("UNIFIED_MODE"):
            raise OptionError(
                "Connections need a worker without UCX's option UNIFIED_MODE (UCX_UNIFIED_MODE in the environment), "
                "with which trio_ucx cannot read UCX's addresses"
            )
        worker._engine.key_gate.check_shut()
        check_claim(worker._engine)
        self.worker = worker
        self.engine: Engine = worker._engine
        self.control = ControlSockets(self.engine)
        self.engine.teardown.at_end[self.engine.next_id()] = self.control.close
        self.engine.tag_dispatch.claim()
        self.totals: Totals = Totals() if parent is None else parent.totals
        if parent is None:
            self._list()

    def _list(self) -> None:
        name = self.worker._name
        if not name or name in named_workers:
            name = f"{name or 'worker'} {next(_numbers)}"
        named_workers[name] = self.worker
        self.engine.teardown.at_end[self.engine.next_id()] = partial(self._unlist, name)

    def _unlist(self, name: str) -> None:
        del named_workers[name]

    def for_new_connection(
        self, tried: Collection[WorkerConnections] = (), ends: Ends | None = None
    ) -> WorkerConnections:
        """The registry for a new connection: this one, the newest successor's, or that of a new one.

        A successor without connections is closed when a new one is opened: the caller describes this side at once.

        Args:
            tried: registries whose worker has no endpoint for that.
            ends: of the control socket, if the peer is on another machine: a network that came later than a worker
                needs a newer one.

        Raises:
            trio.ClosedResourceError, trio.BrokenResourceError: the worker was closed, or broke.
        """
        self.engine.check()
        for worker in (self.worker, *list(self.worker._successors.values())[-1:]):
            engine, context = worker._engine, worker.context
            if not (
                engine.receive_queue.stopped
                or engine.key_gate.lost
                or engine.endpoints_by_worker.is_full
                or (ends and came_later(engine.identity.address, ends, context.config, context._places))
            ):
                registry = WorkerConnections.of(worker, self)
                if registry not in tried:
                    return registry
        return WorkerConnections.of(self.worker._open_successor(ends), self)

    @classmethod
    def of(cls, worker: Worker, parent: WorkerConnections | None = None) -> WorkerConnections:
        if worker._connections is None:
            worker._connections = cls(worker, parent)
        registry: WorkerConnections = worker._connections
        return registry

    def description(
        self, connection_id: int, options: Options, wish: SharedMemory, sees_local: bool, ends: Ends | None
    ) -> PeerDescription:
        """The peer description that this side sends.

        Args:
            ends: of the control socket, if the peer is on another machine.
        """
        engine = self.engine
        worker = engine.identity.address
        if ends is not None:
            worker = at_control_socket(worker, ends, engine.context.config)
        return PeerDescription(
            connection_id=connection_id,
            window=options.window,
            threshold=engine.context.rendezvous_threshold or 0,
            wish=wish,
            sees_local=sees_local,
            software=SOFTWARE,
            host_name=host_name(),
            worker=worker,
        )
