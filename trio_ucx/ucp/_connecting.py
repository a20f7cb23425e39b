"""Making endpoints: to a socket address, to a worker address, from a connection request."""

from __future__ import annotations

import errno
import secrets
from collections.abc import Callable
from typing import Any

from .._native import ffi, lib
from . import _descriptors as descriptors
from . import _opening as opening
from ._address import Resolved, WorkerAddress, format_address, in_another_network_namespace
from ._address_format import PADDING, parse_worker_address, with_uid, without_shared_memory
from ._engine.engine import Engine
from ._engine.operations import EndpointCore
from ._engine.peers import watch_process
from ._opening import EndpointOptions, ErrorMode, wrong_family
from ._option_limits import differences
from ._reach import accept_hint, hint
from ._status import Status, os_error_from_status


def connect_socket(engine: Engine, address: Resolved, options: EndpointOptions = opening.DEFAULT) -> EndpointCore:
    if address.family != engine.context.family:
        raise wrong_family(address, engine.context.family)
    if options.local is not None:
        opening.check_source(options.local, address)
    remote, local = opening.native_address(address), opening.native_address(options.local)
    how = options.native(engine.identity.attributes.client_id)
    return _make(
        engine,
        str(address),
        options,
        lambda id, out: lib.tu_endpoint_connect(engine.handle, id, remote, local, how, out),
        lambda status: hint(engine.context, status, None),
    )


def accept_request(
    engine: Engine, request: int, client: tuple[str, int], options: EndpointOptions, answered: Any
) -> EndpointCore:
    """Accepts a connection request. ``answered`` (``bool *``) says afterwards whether UCX was asked to do that."""
    how = options.native(None)
    return _make(
        engine,
        format_address(client),
        options,
        lambda id, out: lib.tu_endpoint_from_request(engine.handle, id, request, how, answered, out),
        lambda status: accept_hint(engine.context) if status in (Status.UNREACHABLE, Status.INVALID_PARAM) else "",
    )


def connect_worker(engine: Engine, address: WorkerAddress, options: EndpointOptions = opening.DEFAULT) -> EndpointCore:
    """A raw endpoint, which notices by itself that its peer's process died."""
    core = _make_to_worker(engine, address, options, repr(address))
    watch_process(core, address.process)
    return core


def connect_beside(core: EndpointCore) -> EndpointCore:
    """An endpoint beside one that Connections share, for UCX's puts and gets. It ends when that does.

    UCX at the peer makes an endpoint for it, and answers gets and puts by that. It crashes when that is closed with
    answers under way, so it must not be a Connection's, which both sides may close at any time. UCX gets the peer's
    address with a random uid: so this is none of the generations that both sides count (:mod:`._engine.pairs`).
    """
    if core.beside is None or core.beside.handle is None:
        engine, address = core.engine, core.peer_address
        assert address is not None
        label = f"{core.label}, for its memory"
        if address.uid == engine.identity.address.uid:
            endpoint = _make_to_worker(engine, address, opening.DEFAULT, label)
        else:
            uid = secrets.randbits(64)
            blob = with_uid(_usable_part(engine, address, opening.DEFAULT), uid)
            if WorkerAddress.from_ucx(blob).uid != uid:
                raise OSError(errno.EPROTO, f"connecting to {label}: UCX's worker address has an unknown layout")
            endpoint = _make_from(engine, address, blob, opening.DEFAULT, label)
        endpoint.main, core.beside = core, endpoint
        if core.gone:  # it may have failed meanwhile: making an endpoint progresses the worker
            endpoint.follow(core)
    return core.beside


def connect_shared(engine: Engine, address: WorkerAddress, generation: int, label: str) -> EndpointCore | None:
    """Returns the endpoint of this generation, which Connections share: see :mod:`._engine.pairs`.

    An endpoint to this worker itself is not shared: UCX connects it with itself.

    Returns:
        None if the endpoint of this generation cannot be had.
    """

    def make() -> EndpointCore:
        return _make_to_worker(engine, address, opening.DEFAULT, label)

    with_itself = address.uid == engine.identity.address.uid
    return make() if with_itself else engine.pairs.of(address.uid).get(generation, address, make)


def _make_to_worker(engine: Engine, address: WorkerAddress, options: EndpointOptions, label: str) -> EndpointCore:
    blob, pair = _usable_part(engine, address, options), engine.pairs.of(address.uid)

    def count(status: int) -> None:
        if status != Status.NO_MEMORY:  # UCX uses a number up even if it cannot make the endpoint
            pair.made()

    return _make_from(engine, address, blob, options, label, count)


def _make_from(
    engine: Engine,
    address: WorkerAddress,
    blob: bytes,
    options: EndpointOptions,
    label: str,
    tried: Callable[[int], None] = lambda status: None,
) -> EndpointCore:
    """Makes an endpoint from an address as UCX writes it; ``tried`` gets UCX's status."""
    native, how = ffi.from_buffer("char[]", blob + PADDING), options.native(None)

    def create(id: int, out: Any) -> int:
        status = lib.tu_endpoint_to_worker(engine.handle, id, native, how, out)
        tried(status)
        return status

    core = _make(engine, label, options, create, lambda status: hint(engine.context, status, address))
    core.set_peer(address)
    return core


def _usable_part(engine: Engine, address: WorkerAddress, options: EndpointOptions) -> bytes:
    """The part of an address that an endpoint can use: without shared memory, if the two sides cannot use that.

    The peer answers over the transports of this part, because UCX tells it which ones the endpoint has.

    Raises:
        OSError: no part of it can be used.
    """
    try:
        obstacle = _obstacle_to_shared_memory(engine, address, options) or _difference(engine, address)
        if obstacle is None:
            return address.ucx
        rest = without_shared_memory(address.ucx)
    except ValueError:
        return address.ucx  # of a layout that we do not know: UCX decides
    if rest is None:
        raise OSError(errno.EHOSTUNREACH, f"connecting to {address!r}: it has shared memory only, and {obstacle}")
    if "tcp" in parse_worker_address(rest).transports and (difference := _differs(engine, address, "tcp")):
        raise OSError(errno.EHOSTUNREACH, f"connecting to {address!r}: {difference}: give both the same value")
    return rest


def _difference(engine: Engine, address: WorkerAddress) -> str | None:
    """Why the two sides cannot use shared memory: the sizes of a kind differ, or they have no kind in common."""
    if address.sizes in ((), engine.identity.address.sizes):
        return None
    ours, theirs = (parse_worker_address(each.ucx).shared_memory for each in (engine.identity.address, address))
    found = [_differs(engine, address, kind) for kind in sorted(ours & theirs)]
    return next(filter(None, found), None) if found else "the two sides have no kind of shared memory in common"


def _differs(engine: Engine, address: WorkerAddress, kind: str) -> str | None:
    return differences(engine.identity.address.sizes, address.sizes, kind)


def _obstacle_to_shared_memory(engine: Engine, address: WorkerAddress, options: EndpointOptions) -> str | None:
    """Why an endpoint cannot use shared memory although UCX would choose it, and what to do; None if it can."""
    if in_another_network_namespace(address):
        return (
            "its worker is in another network namespace of this machine, where messages over shared memory would not "
            "wake it: let both sides use tcp, too, as in TLS=tcp,sm,self, or run both in one network namespace"
        )
    if options.error_mode is ErrorMode.NONE or not engine.context.shared_memory_handles_errors:
        return None
    # UCX's addresses do not say how the peer is configured.
    if not address.shared_memory:
        return (
            "its program is not known to run with MM_ERROR_HANDLING=y, without which it could not answer an endpoint "
            "with error handling. If it does, say so: WorkerAddress.from_ucx(..., shared_memory=True); else use "
            "error_mode=ErrorMode.NONE on both sides, or let it use tcp, too"
        )
    return None


def _make(
    engine: Engine, label: str, options: EndpointOptions, create: Any, hint_for: Callable[[int], str]
) -> EndpointCore:
    engine.check()
    descriptors.require(descriptors.ENDPOINT, f"connecting to {label}")
    id = engine.next_id()
    out = ffi.new("tu_endpoint_t **")
    status = create(id, out)
    if status == Status.EXCEEDS_LIMIT:
        engine.pairs.is_full = True
    if status != Status.OK:
        raise os_error_from_status(status, f"connecting to {label}", hint_for(status))
    core = EndpointCore(engine, id, out[0], label)
    core.forcible = options.error_mode is not ErrorMode.NONE
    engine.progress()
    return core
