"""Making endpoints: to a socket address, to a worker address, from a connection request."""

from __future__ import annotations

import errno
import secrets
from collections.abc import Callable
from typing import Any, cast

from .._native import ffi, lib
from .._util.socket_addresses import Resolved, format_address
from . import _endpoint_options as endpoint_options
from ._endpoint_options import EndpointOptions, ErrorMode, wrong_family
from ._engine.endpoint_core import EndpointCore
from ._engine.engine import Engine
from ._hints import accept_hint, hint
from ._quirks import descriptors
from ._quirks.address_layout import PADDING, read_uid, with_uid, without_shared_memory
from ._quirks.network_devices import without_own
from ._status import Status, os_error_from_status
from ._transports import check_without_shared_memory, common_part, obstacle_to_shared_memory
from ._worker_address import WorkerAddress


def connect_socket(
    engine: Engine, address: Resolved, options: EndpointOptions = endpoint_options.DEFAULT
) -> EndpointCore:
    if address.family != engine.context.family:
        raise wrong_family(address, engine.context.family)
    if options.local is not None:
        endpoint_options.check_source(options.local, address)
    remote, local = endpoint_options.native_address(address), endpoint_options.native_address(options.local)
    how = options.native(engine.identity.attributes.client_id)
    return _make(
        engine,
        str(address),
        options,
        lambda id, out: lib.tu_endpoint_connect(engine.handle, id, remote, local, how, out),
        lambda status: hint(engine.context._transports, status, None),
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
        lambda status: accept_hint(engine.context._transports, status),
    )


def connect_worker(
    engine: Engine, address: WorkerAddress, options: EndpointOptions = endpoint_options.DEFAULT
) -> EndpointCore:
    """A raw endpoint, which notices by itself that its peer's process died."""
    usable = without_own(_usable_part(engine, address, options), engine.identity.address)
    admission = engine.key_gate.let_in_by_address(usable)
    try:
        core = _make_to_worker(engine, usable, options, repr(address))
    except BaseException:
        if admission is not None:
            admission.end()
        raise
    if admission is not None:
        core.keep(admission)
    try:
        core.watch_process()
    except OSError:
        core.close()
        raise
    return core


def connect_beside(core: EndpointCore) -> EndpointCore:
    """Returns the memory endpoint, for UCX's puts and gets, beside an endpoint that Connections share; may make it.

    It ends when that endpoint does. The peer's UCX makes an endpoint of its own for it, over which it answers puts and
    gets. UCX crashes if that one is closed with answers under way, so it must not be the Connections' endpoint, which
    both sides may close at any time. UCX gets the peer's address with a random uid, so the memory endpoint is none of
    the generations that both sides count (:mod:`._engine.endpoints_to_worker`).
    """
    if core.beside is None or core.beside.handle is None:
        engine, address = core.engine, core.peer_address
        assert address is not None
        label = f"{core.label}, for its memory"
        if address.uid == engine.identity.address.uid:
            endpoint = _make_to_worker(engine, address, endpoint_options.DEFAULT, label)
        else:
            uid = secrets.randbits(64)
            blob = with_uid(address.ucx, uid)
            if read_uid(blob) != uid:
                raise OSError(errno.EPROTO, f"connecting to {label}: UCX's worker address has an unknown layout")
            endpoint = _make_from(engine, address, blob, endpoint_options.DEFAULT, label)
        endpoint.main, core.beside = core, endpoint
    return core.beside


def connect_shared(engine: Engine, address: WorkerAddress, generation: int | None, label: str) -> EndpointCore | None:
    """Returns the endpoint of this generation, which Connections share: see :mod:`._engine.endpoints_to_worker`.

    Args:
        address: the peer worker's, with the transports that the Connections use.
        generation: None if the worker connects with itself. UCX connects such an endpoint with itself, so it cannot be
            shared.

    Returns:
        None if the endpoint of this generation cannot be had.
    """

    def make() -> EndpointCore:
        return _make_to_worker(engine, address, endpoint_options.DEFAULT, label)

    if generation is None:
        return make()
    return cast(EndpointCore | None, engine.endpoints_by_worker.of(address.uid).get(generation, address, make))


def _make_to_worker(engine: Engine, address: WorkerAddress, options: EndpointOptions, label: str) -> EndpointCore:
    endpoints = engine.endpoints_by_worker.of(address.uid)

    def count(status: int) -> None:
        if status != Status.NO_MEMORY:  # UCX uses a number up even if it cannot make the endpoint
            endpoints.count_made()

    return _make_from(engine, address, address.ucx, options, label, count)


def _make_from(
    engine: Engine,
    address: WorkerAddress,
    blob: bytes,
    options: EndpointOptions,
    label: str,
    tried: Callable[[int], None] = lambda status: None,
) -> EndpointCore:
    """Makes an endpoint from an address as UCX writes it; ``tried`` gets UCX's status."""
    blob = common_part(engine.identity.address, address, blob)
    native, how = ffi.from_buffer("char[]", blob + PADDING), options.native(None)

    def create(id: int, out: Any) -> int:
        status = lib.tu_endpoint_to_worker(engine.handle, id, native, how, out)
        tried(status)
        return status

    core = _make(engine, label, options, create, lambda status: hint(engine.context._transports, status, address))
    core.set_peer(address)
    return core


def _usable_part(engine: Engine, address: WorkerAddress, options: EndpointOptions) -> WorkerAddress:
    """The part of an address that a raw endpoint can use: without shared memory, if the two sides cannot use that.

    The peer answers over the transports of this part, because UCX tells it which ones the endpoint has.

    Raises:
        OSError: no part of it can be used.
    """
    ours, error_handling = engine.identity.address, options.error_mode is not ErrorMode.NONE
    try:
        if not address._is_described:
            needs_error_handling = error_handling and ours.shared_memory and not address.shared_memory
            return _network_part(address) if needs_error_handling else address
        if address.uid == ours.uid:
            return address
        obstacle = obstacle_to_shared_memory(ours, address, error_handling=error_handling)
        if obstacle is None:
            return address
        check_without_shared_memory(ours, address, obstacle)
    except ValueError as error:
        raise OSError(errno.EHOSTUNREACH, f"connecting to {address!r}: {error}") from None
    return address._without_shared_memory() if address.shared_memory_kinds else address


def _network_part(address: WorkerAddress) -> WorkerAddress:
    """The address of a program without trio_ucx, without shared memory: it may not handle errors there.

    Raises:
        ValueError: it has no other transport, or an unknown layout.
    """
    advice = (
        "its program is not known to run with MM_ERROR_HANDLING=y, without which it could not answer an endpoint with "
        "error handling over shared memory. If it does, say so: WorkerAddress.from_ucx(..., shared_memory=True); else "
        "use error_mode=ErrorMode.NONE on both sides, or let it use tcp, too"
    )
    try:
        network = without_shared_memory(address.ucx)
    except ValueError as error:
        raise ValueError(f"shared memory cannot be left out, because the address has an {error}. {advice}") from None
    if network is None:
        raise ValueError(f"it has shared memory only, and {advice}")
    return address._changed(ucx=network)


def _make(
    engine: Engine, label: str, options: EndpointOptions, create: Any, hint_for: Callable[[int], str]
) -> EndpointCore:
    engine.check()
    descriptors.require(descriptors.ENDPOINT, f"connecting to {label}")
    id = engine.next_id()
    out = ffi.new("tu_endpoint_t **")
    status = create(id, out)
    if status == Status.EXCEEDS_LIMIT:
        engine.endpoints_by_worker.is_full = True
    if status != Status.OK:
        raise os_error_from_status(status, f"connecting to {label}", hint_for(status))
    core = EndpointCore(engine, id, out[0], label, forcible=options.error_mode is not ErrorMode.NONE)
    engine.submit()
    return core
