"""Contexts: UCX's configuration, and the features that its workers may use."""

from __future__ import annotations

import difflib
import math
import os
import socket
import threading
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import attrs
from trio.lowlevel import enable_ki_protection

from .._native import ffi, lib, ucx
from .._util.arguments import check_timeout
from .._util.handles import OpenedNotConstructed
from .._util.interrupts import protected_contextmanager
from ._attributes import ContextAttributes, check_name, native_name, query_context
from ._features import DEFAULT_FEATURES, Feature
from ._memory.buffers import Contiguous
from ._memory.registered import Access, Memory, allocate, register
from ._quirks import descriptors, forks, option_limits, rdma, sandboxes, shared_memory
from ._quirks import log as ucx_log
from ._quirks.address_layout import auxiliary
from ._quirks.default_options import DEFAULT_OPTIONS
from ._quirks.forks import Birth
from ._quirks.network_devices import Places, active_addresses
from ._quirks.option_limits import OptionError, in_force
from ._quirks.releases import WELL_CONFIGURABLE
from ._status import Status, UCXError

#: What `config` may be: UCX options by their names without the ``UCX_`` prefix.
Config = Mapping[str, str | int | bool]


#: Any of these lets a context register memory.
_MEMORY = Feature.AM | Feature.RMA | Feature.AMO32 | Feature.AMO64


@attrs.define(eq=False, repr=False)
class Context(metaclass=OpenedNotConstructed):
    """UCX's configuration and resources. Open one with :func:`open_context`.

    Attributes:
        config: the options in force that the user or trio_ucx set.
        features: what its workers may be used for.
        family: the address family of its TCP interfaces, ``AF_INET`` or ``AF_INET6`` (``TCP_AF_PRIO``). UCX uses one
            per context.
        rendezvous_threshold: bytes from which on messages go by rendezvous, or None when UCX decides by itself.
    """

    config: Mapping[str, str]
    features: Feature
    family: socket.AddressFamily
    rendezvous_threshold: int | None
    #: Sizes of segments and queues that must be equal on both sides (``option_limits.AGREED``).
    _agreed_sizes: option_limits.Sizes
    _handle: Any
    #: This host's active addresses before UCX looked for network devices: its workers have no other devices.
    _places: Places
    #: How many file descriptors one of its workers needs.
    _descriptors_per_worker: int
    #: The transports that serve only to connect others, as UD does with ``TLS=rc``, or TCP with ``tcp:aux``.
    _auxiliary: frozenset[str]
    #: Its workers that were not destroyed, and what closes each that belongs to this thread and process.
    _workers: dict[Any, Callable[[], None]] = attrs.field(factory=dict)
    #: Destroy closed workers that could not be destroyed at once; False: it is not possible yet.
    _postponed: list[Callable[[], bool]] = attrs.field(factory=list)
    _memories: set[Memory] = attrs.field(factory=set)
    #: Whether peers may ever have read memory of it.
    _exposed_memory: bool = False
    _birth: Birth = attrs.field(factory=Birth)
    _closed: bool = False
    #: The collector may run a destructor that closes memory, and comes here again.
    _lock: threading.RLock = attrs.field(factory=threading.RLock)
    #: How many threads call UCX with it just now.
    _holds: int = 0

    @classmethod
    def _open(
        cls,
        config: Config | None,
        features: Feature,
        name: str | None = None,
        keepalive_interval: float | None = None,
    ) -> Context:
        forks.check_may_open()
        features = Feature(features) | Feature.WAKEUP
        native = native_name(check_name(name))
        chosen = _check_config(config)
        option_limits.check(chosen)
        keepalive = _keepalive_options(keepalive_interval, chosen)
        defaults = {
            name: value
            for name, value in DEFAULT_OPTIONS.items()
            if name not in chosen and f"UCX_{name}" not in os.environ
        }
        received = _memory_units(in_force("TCP_RX_SEG_SIZE", chosen) or "64k")
        if "TCP_TX_SEG_SIZE" in defaults and received is not None and received < 64 << 10:
            defaults["TCP_TX_SEG_SIZE"] = str(received)  # UCX refuses to send longer segments than it receives
        options = {**defaults, **keepalive, **chosen}
        options.update(rdma.restrict({**option_limits.environment(), **options}))
        options.update(shared_memory.restrict({**option_limits.environment(), **options}))
        sandboxes.check(_transports(options))
        places = active_addresses()
        ucx_log.open()
        forks.context_opened()
        try:
            handle = _create(options, chosen, features, native)
            try:
                info = _take_text(lib.tu_context_info_text(handle))
                _check_devices(options, option_limits.devices(info))
            except BaseException:
                lib.tu_context_destroy(handle)
                raise
        except BaseException:
            forks.context_destroyed()
            ucx_log.close()
            raise
        context = cls._create(
            config=options,
            features=features,
            family=_family(options),
            rendezvous_threshold=_rendezvous_threshold(options),
            agreed_sizes=option_limits.agreed_sizes(options),
            handle=handle,
            places=places,
            descriptors_per_worker=descriptors.for_worker(info),
            auxiliary=auxiliary(info),
        )
        _live_contexts.add(context)
        return context

    def _native(self) -> Any:
        self._birth.check("this context")
        if self._handle is None or self._closed:
            raise RuntimeError("this context was closed")
        return self._handle

    @protected_contextmanager
    def _held(self) -> Iterator[Any]:
        """UCX's context, which stays meanwhile, although another thread closes this one.

        Raises:
            RuntimeError: it was closed.
        """
        self._birth.check("this context")  # whose lock another thread of the parent may have held
        with self._lock:
            handle = self._native()
            self._holds += 1
        try:
            yield handle
        finally:
            with self._lock:
                self._holds -= 1
            self._destroy_if_unused()

    def _require(self, feature: Feature, doing: str) -> None:
        """Refuses what the context was not opened for: UCX would crash.

        Raises:
            RuntimeError: with what to do.
        """
        if feature not in self.features:
            raise RuntimeError(
                f"{doing} needs Feature.{feature.name}, and this context was opened without: "
                f"open_context(features=ucp.DEFAULT_FEATURES | ucp.Feature.{feature.name}), or the same with "
                "open_worker"
            )

    def _require_memory(self, doing: str) -> None:
        """Refuses a context whose workers could not use remote memory in any way, as :meth:`require`.

        Raises:
            RuntimeError: with what to do.
        """
        if not self.features & _MEMORY:
            self._require(Feature.AM, doing)

    def attributes(self) -> ContextAttributes:
        """Returns what UCX says about it (``ucp_context_query``).

        Raises:
            RuntimeError: it was closed.
        """
        with self._held() as native:
            return query_context(native)

    def info_text(self) -> str:
        """Returns the resources in use, in the format of ``ucx_info -p`` (``ucp_context_print_info``).

        Raises:
            RuntimeError: it was closed.
        """
        with self._held() as native:
            return _take_text(lib.tu_context_info_text(native))

    def _config_text(self) -> str:
        """The configuration in force, in the format of ``ucx_info -c`` (``ucp_config_print``)."""
        with self._held() as native:
            return _take_text(lib.tu_context_config_text(native))

    def _check_evaluation(self) -> None:
        """Refuses to ask UCX for estimates where it would read past its table of interfaces (ucp_ep_evaluate_perf)."""
        if self._is_on("UNIFIED_MODE"):
            raise UCXError(Status.UNSUPPORTED, "estimating the time of a transfer with the option UNIFIED_MODE")

    @property
    def _options_in_force(self) -> dict[str, str]:
        """Its options, with the environment's where it has none."""
        return {**option_limits.environment(), **self.config}

    @property
    def _least_rendezvous_threshold(self) -> int | None:
        """The least threshold in RNDV_THRESH, which may have several (intra, inter); None if it has none."""
        parts = (in_force("RNDV_THRESH", self.config) or "auto").split(",")
        numbers = [_memory_units(part.rpartition(":")[2]) for part in parts]
        return min((number for number in numbers if number is not None), default=None)

    @property
    def _tcp_port_range(self) -> tuple[int, int]:
        """The lowest and the highest port at which its workers may listen (TCP_PORT_RANGE); (0, 0) if at any."""
        lowest, _, highest = (in_force("TCP_PORT_RANGE", self.config) or "0").partition("-")
        return (int(lowest), int(highest or lowest)) if lowest.isdecimal() and (highest or "0").isdecimal() else (0, 0)

    @property
    def _shared_memory_handles_errors(self) -> bool:
        """True if endpoints with error handling can use shared memory (MM_ERROR_HANDLING)."""
        return self._is_on("MM_ERROR_HANDLING")

    def _is_on(self, option: str) -> bool:
        return (in_force(option, self.config) or "n").lower() in ("y", "yes", "1", "on")

    @property
    def _transports(self) -> str:
        """The transports that it may use (TLS)."""
        return _transports(self.config)

    @enable_ki_protection
    def register(self, buffer: Contiguous, *, access: Access = Access.ALL) -> Memory:
        """Registers a buffer, for peers to reach by themselves (``ucp_mem_map``).

        Peers need its :attr:`Memory.descriptor`, which they :meth:`Endpoint.attach`. The buffer stays pinned (a
        bytearray cannot be resized, say) until the memory is closed. Over shared memory, peers reach what
        :meth:`allocate` gives directly; anything else, and everything over TCP, by messages to this process, which one
        of the context's workers has to progress.

        Args:
            buffer: a contiguous buffer, writable unless ``access`` is ``Access.READ``.
            access: what peers may do. trio_ucx enforces it for requests that come as its own messages, and RDMA
                hardware does; UCX's own puts, gets and atomics over TCP and shared memory do not.

        Raises:
            TypeError, ValueError: not a contiguous buffer, read-only, or empty; ``access`` is no :class:`Access`.
            RuntimeError: it was opened without ``Feature.AM``, ``RMA``, ``AMO32`` and ``AMO64``; it was closed.
            UCXError, MemoryError: UCX cannot register it.
        """
        self._require_memory("registering memory")
        return register(self, buffer, access)

    @enable_ki_protection
    def allocate(self, nbytes: int, *, access: Access = Access.ALL) -> Memory:
        """Allocates memory of the kind that peers reach best (``ucp_mem_map``); its contents are undefined at first.

        Args:
            nbytes: how much, 1 or more.
            access: what peers may do, see :meth:`register`.

        Raises:
            TypeError, ValueError: no integer, or out of range; ``access`` is no :class:`Access`.
            RuntimeError: it was opened without ``Feature.AM``, ``RMA``, ``AMO32`` and ``AMO64``; it was closed.
            UCXError, MemoryError: UCX has none.
        """
        self._require_memory("registering memory")
        return allocate(self, nbytes, access)

    @property
    def _serves_memory(self) -> bool:
        """True if its workers send and answer trio_ucx's own requests for remote memory. They answer for the memory of
        every context of the process."""
        return Feature.AM in self.features

    def _close(self) -> None:
        if self._closed:
            return
        self._closed = True
        _live_contexts.discard(self)
        if self._birth.inherited:
            return
        for close in list(self._workers.values()):
            close()
        self._destroy_postponed()
        for memory in list(self._memories):
            memory._close_unasked()
        self._destroy_if_unused()

    def _worker_destroyed(self, worker: object) -> None:
        """A worker of it was destroyed, in whatever thread."""
        self._workers.pop(worker, None)
        self._destroy_if_unused()

    def _destroy_postponed(self) -> None:
        """To be called when operations may have ended that closed workers have to wait for."""
        postponed, self._postponed = self._postponed, []
        self._postponed += [destroy for destroy in postponed if not destroy()]

    def _added_memory(self, memory: Memory) -> None:
        """Records memory that was registered or allocated. Any thread may call it."""
        self._memories.add(memory)
        self._exposed_memory = True

    def _released_memory(self, memory: Memory) -> None:
        """Forgets memory that was closed. Any thread may call it."""
        self._memories.discard(memory)
        self._destroy_if_unused()

    def _destroy_if_unused(self) -> None:
        with self._lock:
            in_use = self._holds or self._workers or self._memories
            if self._closed and self._handle is not None and not in_use:
                handle, self._handle = self._handle, None
                lib.tu_context_destroy(handle)
                forks.context_destroyed()
                ucx_log.close()

    def __repr__(self) -> str:
        state = "closed" if self._closed else str(self.features)
        return f"<trio_ucx.ucp.Context {state}>"


_live_contexts: set[Context] = set()
#: Whether a context was ever opened in this process.
_opened_before = False


@protected_contextmanager
def open_context(
    config: Config | None = None,
    *,
    features: Feature = DEFAULT_FEATURES,
    name: str | None = None,
    keepalive_interval: float | None = None,
) -> Iterator[Context]:
    """Opens a UCX context (``ucp_init``).

    Args:
        config: UCX options by name, without the ``UCX_`` prefix, such as ``{"TLS": "tcp,sm,self"}``. They go over the
            ``UCX_*`` environment variables, which are not changed.
        features: what its workers are to be used for.
        name: for UCX's logs; at most 31 bytes.
        keepalive_interval: seconds between two checks of each endpoint for whether its peer is still there: for peers
            whose machine or network went away. (When a peer's process ends, that is noticed at once.)
            0 or ``math.inf`` is never, None leaves UCX its own choice, 20 seconds or what the environment says.

            Over TCP that is no bound yet: UCX's checks are bytes on the connection, and while bytes are not
            acknowledged the kernel sends no probes, and gives up after a quarter of an hour only. The option
            TCP_USER_TIMEOUT of UCX 1.22 limits that, on both sides, for idle and busy connections alike; but it also
            cuts off a peer that does not read for so long, as one that is stopped while much is sent to it. (Before
            UCX 1.17 TCP takes such options from the environment only.)

    Raises:
        ValueError: an option that UCX does not know, a value it cannot take, one (also in the environment) with which
            it would crash, hang or lose messages, or a network device that does not exist; the message names it.
        TypeError: a wrong argument.
        UCXError: UCX cannot start, for instance because no transport is left.
        OSError: too few file descriptors are left (EMFILE), or UCX's thread cannot be started (EAGAIN); the message
            says what to do.
        RuntimeError: the parent process had UCX open when it forked this one.
    """
    context = Context._open(config, features, name, keepalive_interval)
    try:
        yield context
    finally:
        context._close()


def _create(options: dict[str, str], chosen: Mapping[str, str], features: Feature, name: Any) -> Any:
    """Creates the native context. Removes from ``options`` those of our defaults that this UCX does not know."""
    global _opened_before
    doing = "starting UCX"
    needed = descriptors.for_context(first=not _opened_before)
    descriptors.require(needed, doing)
    descriptors.require_thread(doing)
    out = ffi.new("tu_context_t **")
    rejected = ffi.new("size_t *")
    while True:
        names = [ffi.new("char[]", option.encode()) for option in options]
        values = [ffi.new("char[]", value.encode(errors="surrogateescape")) for value in options.values()]
        status = lib.tu_context_create(
            ffi.new("char *[]", names),
            ffi.new("char *[]", values),
            len(options),
            int(features),
            name,
            out,
            rejected,
        )
        if status == Status.OK:
            _opened_before = True
            return out[0]
        if rejected[0] == len(options):
            descriptors.require(needed, doing)  # another thread may have taken the descriptors
            _check_devices(options, [])
            raise _initialisation_error(status, options)
        option = list(options)[rejected[0]]
        if option in chosen:
            raise _refused_option(option, options[option])
        del options[option]


def _check_config(config: Config | None) -> dict[str, str]:
    if config is None:
        return {}
    if not isinstance(config, Mapping):
        raise TypeError(f"config must be a mapping of UCX options to values, not {type(config).__name__}")
    chosen: dict[str, str] = {}
    for name, value in config.items():
        if not isinstance(name, str):
            raise TypeError(f"the name of a UCX option must be a str, not {type(name).__name__}")
        if name.startswith("UCX_"):
            raise ValueError(f"write UCX options without their prefix: {name[4:]!r} instead of {name!r}")
        if set("*?[\\") & set(name):  # UCX expands such a pattern, and we would not know which options it set
            raise ValueError(f"write each UCX option by its own name: {name!r} is a pattern")
        if isinstance(value, bool):
            value = "y" if value else "n"
        if not isinstance(value, (str, int)):
            raise TypeError(f"the value of UCX option {name} must be a str, an int or a bool, not {value!r}")
        if "\0" in name or "\0" in str(value):
            raise ValueError(f"UCX option {name!r} contains a null character")
        chosen[name] = str(value)
    return chosen


def _keepalive_options(interval: float | None, chosen: Mapping[str, str]) -> dict[str, str]:
    """``keepalive_interval`` in UCX's options."""
    if interval is None:
        return {}
    seconds = check_timeout(interval, "keepalive_interval")
    if "KEEPALIVE_INTERVAL" in chosen:
        raise ValueError("give either keepalive_interval= or the option KEEPALIVE_INTERVAL in config=")
    each = "inf" if seconds in (0, math.inf) else f"{seconds:.6f}s"
    options = {"KEEPALIVE_INTERVAL": each, "KEEPALIVE_NUM_EPS": "inf"}
    if ucx.version >= WELL_CONFIGURABLE:
        # Over TCP UCX leaves it to the kernel, by default after 10 seconds, and 9 times.
        options |= {"TCP_KEEPIDLE": each, "TCP_KEEPINTVL": each, "TCP_KEEPCNT": "3"}
    return options


def _refused_option(name: str, value: str) -> OptionError:
    known = _known_options()
    close = difflib.get_close_matches(name.upper(), known, n=3)
    if name in known:
        return OptionError(f"UCX cannot take {value!r} as the value of its option {name}")
    hint = f"; did you mean {' or '.join(close)}?" if close else ""
    return OptionError(f"UCX does not know an option {name!r} (value {value!r}){hint}")


def _known_options() -> list[str]:
    with open_context(features=Feature.TAG) as context:
        lines = context._config_text().splitlines()
    return [line.partition("=")[0].removeprefix("UCX_") for line in lines if line.startswith("UCX_")]


def _check_devices(options: Mapping[str, str], in_use: list[str]) -> None:
    """Refuses names of network devices that do not exist.

    Raises:
        OptionError: it lists those that do.
    """
    if option_limits.missing_devices(options, in_use):  # if in TLS there is no transport that uses them, they may exist
        present = _network_devices()
        missing = option_limits.missing_devices(options, present)
        if missing:
            raise option_limits.no_such_device(options, missing, present)


def _network_devices() -> list[str]:
    none = {"SHM_DEVICES": "", "SELF_DEVICES": "", "ACC_DEVICES": ""}
    try:
        with open_context({"TLS": "all", "NET_DEVICES": "all", **none}, features=Feature.TAG) as context:
            return option_limits.devices(context.info_text())
    except UCXError:
        return []


def _transports(options: Mapping[str, str]) -> str:
    chosen = in_force("TLS", options)
    return "all" if chosen is None else chosen


def _initialisation_error(status: int, options: Mapping[str, str]) -> Exception:
    doing = f"starting UCX with the transports {_transports(options)!r} (option TLS, or UCX_TLS)"
    error = UCXError(status, with_chosen_options(doing, options))
    if error.status is Status.EXCEEDS_LIMIT:
        error.add_note("UCX takes at most 128 devices: name the devices, as in UCX_NET_DEVICES=eth0")
    error.add_note("`python -m trio_ucx info` lists the transports of this machine")
    return error


def with_chosen_options(doing: str, options: Mapping[str, str]) -> str:
    """Returns what failed, with the options that may be why: UCX says only in its log which one it refuses."""
    chosen = option_limits.chosen(options, {**DEFAULT_OPTIONS, **rdma.LEFT_OUT, "POSIX_SHM_MIN_SIZE": "inf"})
    return f"{doing}, with the options {chosen} (UCX's log says what it refuses)" if chosen else doing


def _family(options: Mapping[str, str]) -> socket.AddressFamily:
    first = (in_force("TCP_AF_PRIO", options) or "inet").split(",")[0].strip()
    return socket.AF_INET6 if first == "inet6" else socket.AF_INET


def _rendezvous_threshold(options: Mapping[str, str]) -> int | None:
    return _memory_units(in_force("RNDV_THRESH", options) or "auto")  # None: UCX decides, never, or one per fabric


def _memory_units(text: str) -> int | None:
    size = option_limits.number(text)
    return None if size is None or size >= 1 << 62 else int(size)


def _take_text(text: Any) -> str:
    if text == ffi.NULL:
        raise MemoryError("no memory for UCX's description")
    try:
        return ffi.string(text).decode(errors="replace")
    finally:
        lib.tu_text_free(text)
