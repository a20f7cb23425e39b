"""Workers: what makes progress, and where messages arrive."""

from __future__ import annotations

import errno
from collections.abc import AsyncIterator, Sequence
from contextlib import AbstractAsyncContextManager
from functools import partial
from typing import TYPE_CHECKING, Any, cast

import attrs
import trio
from trio.lowlevel import enable_ki_protection

from .._native import lib
from .._util.arguments import check_in_trio
from .._util.handles import OpenedNotConstructed
from .._util.interrupts import protected_asynccontextmanager
from .._util.socket_addresses import Resolved, SocketAddress, check_local_address, check_port, resolve, split_address
from . import _endpoint_options as endpoint_options
from ._active_messages import ActiveMessages, WhenFull, open_queue
from ._attributes import WorkerAttributes, check_client_id, check_name
from ._connecting import connect_socket, connect_worker
from ._context import Config, Context
from ._endpoint import Endpoint
from ._endpoint_options import EndpointOptions, ErrorMode
from ._engine.endpoint_core import endpoints_of
from ._engine.engine import Engine
from ._engine.lifetime import close_after_background, close_now, open_engine
from ._engine.posting import completed, pending_operation, pin, post_flush
from ._engine.statistics import WorkerStatistics
from ._engine.waits import check_spin, check_yield_interval
from ._features import DEFAULT_FEATURES, Feature
from ._listener import ListenerCore, RawListener
from ._memory.buffers import WritableBuffer
from ._quirks.key_gate import parse_networks
from ._quirks.network_devices import Ends, in_network, is_outdated
from ._quirks.option_limits import OptionError
from ._quirks.stopped_queue import WatchedQueue, check_queue, uses_queue
from ._requests import RequestGroup, open_request_group
from ._status import MessageTooLong, Status, UCXError
from ._tag import (
    TagMessage,
    check_feature,
    check_mask,
    check_not_claimed,
    check_tag,
    post_message_receive,
    post_receive,
    post_wait,
)
from ._worker_address import WorkerAddress

if TYPE_CHECKING:
    from .chains import RequestChain


@attrs.define(eq=False, repr=False)
class Worker(metaclass=OpenedNotConstructed):
    """A UCP worker in a Trio run. Open one with :func:`open_worker`.

    It belongs to the thread and the run that opened it. Raw tag messages of any sender arrive at the worker, not at an
    endpoint. From the first Connection or listener for Connections on, tags with bit 63 set belong to the Connections:
    :meth:`tag_receive` and :meth:`tag_probe` match no such messages, whatever the mask. A worker that never
    has Connections leaves all 64 bits to the program.
    """

    _context: Context
    _engine: Engine
    #: What its Connections have in common, which the layer above makes; None until it has any.
    _connections: Any = None
    #: Workers that take its new Connections when UCX's numbers for endpoints to some peer are used up, or when its
    #: shared-memory queue has stopped.
    _successors: dict[int, Worker] = attrs.field(factory=dict)
    #: Workers that have one Connection each (``isolate=True``).
    _isolated: dict[int, Worker] = attrs.field(factory=dict)
    _waiting_options: dict[str, float] = attrs.field(factory=dict)
    #: The name that the program gave it.
    _name: str = ""

    @classmethod
    def _open(
        cls,
        context: Context | None,
        config: Config | None,
        features: Feature | None = None,
        keepalive_interval: float | None = None,
        name: str | None = None,
        client_id: int | None = None,
        spin: float | None = None,
        yield_interval: float = 0.0,
    ) -> Worker:
        if context is not None:
            given = {"config": config, "features": features, "keepalive_interval": keepalive_interval}
            for option, value in given.items():
                if value is not None:
                    raise ValueError(f"give {option}= to open_context, or to open_worker without a context")
        name, client_id = check_name(name), check_client_id(client_id)
        spin, yield_interval = check_spin(spin), check_yield_interval(yield_interval)
        owned = context is None
        if context is None:
            features = DEFAULT_FEATURES if features is None else features
            context = Context._open(config, features, keepalive_interval=keepalive_interval)
        elif not isinstance(context, Context):
            raise TypeError(f"context must be a Context, not {type(context).__name__}")
        try:
            engine = open_engine(
                context, name, client_id, spin=spin, yield_interval=yield_interval, receive_queue=WatchedQueue
            )
        except BaseException:
            if owned:
                context._close()
            raise
        worker = cls._create(context, engine)
        worker._waiting_options = {"spin": spin, "yield_interval": yield_interval}
        worker._name = name or ""
        if owned:
            engine.teardown.on_closed = context._close
        return worker

    @classmethod
    def _shared(cls) -> Worker:
        """Returns the run's shared worker, for all that is opened without ``worker=``.

        Opens one if the program has opened none with ``shared=True``, and there is none yet that can be used.

        Raises:
            trio.ClosedResourceError, trio.BrokenResourceError: the program's own was closed, or broke.
        """
        worker, is_own = _shared_worker.get()
        if worker is not None:
            worker._engine.run.check("this run's worker")
        if worker is not None and is_own:
            worker._engine.check()
        elif worker is None or not worker._is_usable:
            worker = cls._open(None, None)
            _shared_worker.set((worker, False))
        return worker

    @property
    def _is_usable(self) -> bool:
        return self._engine.handle is not None and self._engine.broken is None

    def _open_successor(self, ends: Ends | None = None) -> Worker:
        """Another worker like this one, which is closed with it. Earlier ones that are idle are closed now.

        Args:
            ends: of the control socket for which it is opened, if the peer is on another machine.
        """
        children = self._engine.teardown.children
        for id, earlier in list(self._successors.items()):
            if not earlier._engine.tag_dispatch.sinks:  # no connection, and none that is being opened
                del self._successors[id], children[id]
                close_now(earlier._engine)
        return self._open_beside(self._successors, ends)

    def _open_isolated(self, ends: Ends | None = None) -> Worker:
        """Opens another worker like this one, for one Connection. The argument is :meth:`_open_successor`'s."""
        return self._open_beside(self._isolated, ends)

    def _open_beside(self, kind: dict[int, Worker], ends: Ends | None) -> Worker:
        options: dict[str, Any] = self._waiting_options
        context, address = self._context, self._engine.identity.address
        if is_outdated(address, ends, context.config, context._places):  # a context keeps its network devices
            try:
                worker = Worker._open(None, context.config, context.features, **options)
            except OptionError as error:
                raise OSError(errno.ENODEV, str(error)) from None
        else:
            worker = Worker._open(context, None, **options)
        worker._engine.receive_queue.counters = self._engine.counters
        worker._engine.key_gate.admit(self._engine.key_gate.networks)
        id = self._engine.next_id()
        kind[id] = worker
        self._engine.teardown.children[id] = partial(close_now, worker._engine)
        return worker

    def _close_isolated(self, worker: Worker) -> None:
        """Closes the worker of one Connection in the background. Closed already: no effect."""
        id = next((id for id, each in self._isolated.items() if each is worker), None)
        if id is None:
            return
        del self._isolated[id]

        async def close() -> None:
            await close_after_background(worker._engine)
            self._engine.teardown.children.pop(id, None)

        run = self._engine.run
        if not self._engine.usable or not run.spawn_background(close, "trio_ucx close of an isolated worker"):
            close_now(worker._engine)

    @property
    def context(self) -> Context:
        """The context that it was opened in."""
        return self._context

    @property
    def address(self) -> WorkerAddress:
        """Returns where peers can reach it without a listener (``ucp_worker_query``).

        It contains keys. Whoever has the address can connect over TCP, and can take over this process: give it to peers
        only. The keys are made when a program first asks for the address, and are valid until the worker is closed.
        """
        return self._engine.key_gate.public_address

    def admit(self, *networks: str) -> None:
        """Lets the hosts of some networks reach the worker over TCP without a key: for UCP programs without trio_ucx.

        Connections do not need this, nor do raw endpoints by the address of another worker of trio_ucx. Raw endpoints
        and listeners by socket address do. Every process on these hosts, of whatever user, can take over this one. A
        network that contains an address of this machine ("127.0.0.1") admits this machine by all its addresses. The
        workers that are opened for this one, such as those of ``isolate=True``, admit the same networks. What is
        admitted is logged (logger ``trio_ucx``, WARNING), and stays admitted.

        Args:
            networks: IP addresses ("10.0.0.7") and networks ("10.0.0.0/8").

        Raises:
            TypeError, ValueError: not such text.
            RuntimeError: another thread.
            MemoryError: there is no memory for that.
            trio.ClosedResourceError, trio.BrokenResourceError: the worker was closed, or broke.
        """
        parsed = parse_networks(networks)
        self._engine.check()
        for worker in (self, *self._successors.values(), *self._isolated.values()):
            worker._engine.key_gate.admit(parsed)

    def attributes(self) -> WorkerAttributes:
        """Returns what UCX says about it (``ucp_worker_query``).

        Raises: nothing, also after the close.
        """
        return self._engine.identity.attributes

    def statistics(self) -> WorkerStatistics:
        """Returns what it has in flight, how it has been progressing, and sums over its Connections.

        Any thread may call it.

        Raises: nothing, also after the close, when it returns the last figures.
        """
        statistics = self._engine.statistics()
        if self._connections is None:
            return statistics
        return attrs.evolve(statistics, connections=self._connections.totals.read())

    # ---- endpoints and listeners ----

    @enable_ki_protection
    async def open_endpoint(
        self,
        address: SocketAddress | WorkerAddress,
        *,
        error_mode: ErrorMode = ErrorMode.PEER,
        name: str | None = None,
        local_address: str | None = None,
        network: str | None = None,
    ) -> Endpoint:
        """Opens a raw UCP endpoint to any UCP peer (``ucp_ep_create``); no handshake.

        It returns before the connection is up. A peer that cannot be reached is noticed by the first operation.

        Args:
            address: ``"host:port"``, ``"[v6]:port"`` or ``(host, port)`` of a listener, or a worker's address. By a
                worker's address an endpoint with error handling uses shared memory only if the peer's worker can, too:
                see :meth:`WorkerAddress.from_ucx`. It never does if the address names another user, or another IPC, PID
                or network namespace, or if the sizes of the peer's queues differ (UCX's options SEG_SIZE, FIFO_SIZE and
                FIFO_ELEM_SIZE of the kind of shared memory). A socket address does not contain these sizes: both sides
                must have the same, and the same TCP_RX_SEG_SIZE.
            error_mode: see :class:`ErrorMode`; the peer's must be the same.
            name: for UCX's logs and ``endpoint.name``; at most 31 bytes.
            local_address: the numeric address of ours to connect from; see :func:`trio_ucx.connect`.
            network: for a worker's address: which of the peer's TCP devices UCX may use, as in ``"10.0.0.0/8"``. The
                address has all its devices, and UCX may choose one that cannot be reached from here.

        Cancellation: no endpoint is opened.

        Raises:
            PermissionError: the peer has no key (it has no trio_ucx, or ``address`` is a socket address), and its
                hosts are not admitted without one: see :meth:`admit`.
            OSError: unknown host; not of the worker's address family; no transport reaches the peer, or only shared
                memory would, and the two sides cannot use that (EHOSTUNREACH); the peer has another TCP_RX_SEG_SIZE;
                its process has ended (noticed at once over shared memory only); ``local_address`` is not ours, or of
                another family than ``address``; too few file descriptors are left (EMFILE).
            TypeError, ValueError: a wrong argument.
            NotImplementedError: this UCX does not know the ``error_mode``.
            trio.ClosedResourceError: the worker was closed.
            trio.BrokenResourceError: the worker broke; or the endpoint may use shared memory, and the worker's queue
                there has stopped (``statistics().stopped_queues``): open another worker.
        """
        options = EndpointOptions(
            endpoint_options.check_error_mode(error_mode),
            check_name(name),
            check_local_address(local_address),
        )
        if isinstance(address, WorkerAddress):
            if local_address is not None:
                raise ValueError("local_address= is for connections to a host and port, not to a worker address")
            if network is not None:
                address = in_network(address, network)
            await trio.lowlevel.checkpoint_if_cancelled()
            self._engine.check()
            await trio.lowlevel.checkpoint()
            self._engine.check()
            core = connect_worker(self._engine, address, options)
            if self._engine.receive_queue.stopped and uses_queue(core):
                core.close()
                check_queue(self._engine, f"connecting to {core.label}")
        else:
            if network is not None:
                raise ValueError("network= is for connections to a worker address, not to a host and port")
            host, port = split_address(address)
            resolved = await self._resolve(host, port)
            check_queue(self._engine, f"connecting to {resolved}")
            self._engine.key_gate.check_admitted([resolved.ip])
            core = connect_socket(self._engine, resolved, options)
        return Endpoint._create(self, core, name=name)

    @enable_ki_protection
    async def open_listener(self, host: str | None, port: int) -> RawListener:
        """Opens a listener for raw UCP clients (``ucp_listener_create``).

        UCX asks nobody for credentials: everybody who can reach the listener's port can end the process.

        Args:
            host: a numeric address or a name; None is every interface of the worker's address family.
            port: 0 chooses a free one; ``listener.address`` tells.

        Cancellation: no listener is opened.

        Raises:
            PermissionError: clients of a raw listener have no key, and no host is admitted without one: see
                :meth:`admit`.
            OSError: the address is in use, or not ours; unknown host; too few file descriptors are left (EMFILE).
            TypeError, ValueError: a wrong argument.
            trio.ClosedResourceError, trio.BrokenResourceError: the worker was closed, or broke.
        """
        port = check_port(port)
        if host is None:
            host = "::" if self._context.family.name == "AF_INET6" else "0.0.0.0"
        elif not isinstance(host, str):
            raise TypeError(f"the host must be a str or None, not {type(host).__name__}")
        resolved = await self._resolve(host, port)
        self._engine.key_gate.check_admits_anybody()
        return RawListener._create(self, ListenerCore(self._engine, resolved))

    async def _resolve(self, host: str, port: int) -> Resolved:
        await trio.lowlevel.checkpoint_if_cancelled()
        self._engine.check()
        await trio.lowlevel.checkpoint()
        resolved = await resolve(host, port, family=self._context.family)
        self._engine.check()
        usable = [one for one in resolved if one.family == self._context.family]
        if not usable:
            raise endpoint_options.wrong_family(resolved[0], self._context.family)
        return usable[0]

    # ---- tag messages ----

    @enable_ki_protection
    async def tag_receive(self, buffer: WritableBuffer, tag: int, mask: int | None = None) -> tuple[int, int]:
        """Receives one message of any sender (``ucp_tag_recv_nbx``).

        Args:
            buffer: a writable contiguous buffer, or a list of them; or a :class:`Strided`. In device memory, too.
            tag: the tag of the messages that may be received.
            mask: the bits of the tag that count, by default all; the others may differ. On a worker that has
                Connections, bit 63 counts in any case, and must be 0 in the tag.

        Returns:
            ``(length, sender_tag)``; a message may be shorter than the buffer.

        Cancellation: if no message had matched, nothing was consumed. A message whose transfer had begun is lost, and
        the buffer stays pinned until UCX lets go of it. (A :class:`trio_ucx.Connection` loses nothing.)

        Raises:
            UCXError: MESSAGE_TRUNCATED: it was longer than the buffer, and is lost. (UCX does not always say how
                long it was.)
            TypeError, ValueError: not such a buffer; tag or mask out of range; the tag is one of Connections.
            RuntimeError: the context was opened without ``Feature.TAG``.
            trio.ClosedResourceError: the worker was closed, perhaps meanwhile.
            trio.BrokenResourceError: the sender was lost in the middle of the message; the worker broke.
        """
        tag, mask = check_tag(tag), check_mask(mask)
        await trio.lowlevel.checkpoint_if_cancelled()
        self._engine.check()
        return await self._received(post_receive(self._engine, buffer, tag, mask))

    async def _received(self, posted: Any) -> tuple[int, int]:
        if isinstance(posted, tuple):
            await self._engine.waiting.schedule_point()
            return posted
        return cast(tuple[int, int], await completed(posted, self._engine))

    @enable_ki_protection
    def tag_probe(self, tag: int, mask: int | None = None, *, remove: bool = False) -> TagMessage | None:
        """Looks for a message that has arrived, without waiting (``ucp_tag_probe_nb``).

        Args:
            tag, mask: as for :meth:`tag_receive`.
            remove: take it off the queue, so that only :meth:`tag_receive_message` can receive it, and must.

        Returns:
            Its length and tag, or None.

        Raises:
            TypeError, ValueError: tag or mask out of range; the tag is one of Connections.
            RuntimeError: the context was opened without ``Feature.TAG``.
            trio.ClosedResourceError, trio.BrokenResourceError: the worker was closed, or broke.
        """
        tag, mask = check_tag(tag), check_mask(mask)
        self._engine.check()
        check_feature(self._engine)
        self._engine.reap()
        received = self._engine.tag_dispatch.received
        handle = lib.tu_tag_probe(self._engine.handle, tag, mask, bool(remove), received)
        if handle == 0:
            check_not_claimed(self._engine, tag, mask)
            return None
        return TagMessage._create(received.length, received.tag, self._engine, handle if remove else None)

    @enable_ki_protection
    async def tag_wait(self, tag: int, mask: int | None = None) -> TagMessage:
        """Waits until :meth:`tag_probe` would find a message, and returns what it would (``ucp_tag_probe_nb``).

        The message stays in UCX's queue. Several tasks may wait for the same one, and all of them return.

        Args:
            tag: the tag of the messages that count.
            mask: as for :meth:`tag_receive`; None is all bits.

        Returns:
            Its length and tag. By the time the task runs, another task may have received the message.

        Cancellation: it has no effect.

        Raises:
            TypeError, ValueError: tag or mask out of range; the tag is one of Connections.
            RuntimeError: the context was opened without ``Feature.TAG``.
            trio.ClosedResourceError: the worker was closed, perhaps meanwhile.
            trio.BrokenResourceError: the worker broke.
        """
        check_tag(tag)
        mask = check_mask(mask)
        await trio.lowlevel.checkpoint_if_cancelled()
        message = self.tag_probe(tag, mask)
        if message is not None:
            await self._engine.waiting.schedule_point()
            return message
        length, sender_tag = await completed(post_wait(self._engine, tag, mask), self._engine)
        return TagMessage._create(length, sender_tag, self._engine, None)

    @enable_ki_protection
    async def tag_receive_message(self, message: TagMessage, buffer: WritableBuffer) -> tuple[int, int]:
        """Receives a message that :meth:`tag_probe` removed from the queue (``ucp_tag_msg_recv_nbx``).

        Returns:
            ``(length, sender_tag)``.

        Cancellation: a call that was cancelled before it began consumes nothing. Later the message is lost, and the
        buffer stays pinned until UCX lets go of it.

        Raises:
            MessageTooLong: it is longer than the buffer. It can be received into a larger one.
            MemoryError: there is no memory for that now. It can be received later.
            ValueError: the message was not removed by its probe, or received before, or is at another worker.
            TypeError: not a message; not a writable contiguous buffer.
            trio.ClosedResourceError, trio.BrokenResourceError: as for :meth:`tag_receive`.
        """
        if not isinstance(message, TagMessage):
            raise TypeError(f"message must come from tag_probe, not be a {type(message).__name__}")
        if message._handle is None:
            raise ValueError("probe with remove=True for a message to receive; each can be received once")
        if message._engine is not self._engine:
            raise ValueError("this message is at another worker")
        await trio.lowlevel.checkpoint_if_cancelled()
        self._engine.check()
        pins = pin(self._engine, buffer, writable=True)
        if pins.size < message.length:
            size = pins.size
            pins.release()
            text = f"receiving a message of {message.length} bytes into a buffer of {size}"
            raise MessageTooLong(message.length, size, text)
        await self._received(post_message_receive(self._engine, message, pins))
        return message.length, message.sender_tag

    # ---- active messages and streams ----

    @enable_ki_protection
    def open_active_messages(
        self,
        id: int,
        *,
        max_messages: int = 2**62,
        max_bytes: int = 2**20,
        max_message_size: int = 2**30,
        when_full: WhenFull = WhenFull.HOLD,
    ) -> ActiveMessages:
        """Opens the queue of active messages with this id, from any sender (``ucp_worker_set_am_recv_handler``).

        A context manager, with ``with`` or ``async with``, and an async iterator::

            async with worker.open_active_messages(7) as messages:
                async for message in messages:
                    print(message.header, await message.receive())

        Messages that come before, or after it was left, are dropped, and rendezvous refused. The queue takes messages
        whether or not somebody iterates; what does not fit is dealt with as ``when_full`` says.

        Args:
            id: 0 to 65535, but not 4095, which the library itself uses.
            max_messages, max_bytes: what the queue may hold: headers, the data of eager messages, and 128 bytes for
                each message. An empty queue takes any message.
            max_message_size: what :meth:`ActiveMessage.receive` allocates at most.
            when_full: see :class:`WhenFull`.

        Cancellation: an iteration that is cancelled loses no message. Leaving the block closes the queue in any case.

        Raises:
            TypeError, ValueError: a wrong argument; the id is taken on this worker.
            RuntimeError: the context was opened without ``Feature.AM``.
            trio.ClosedResourceError, trio.BrokenResourceError: the worker was closed, or broke.
        """
        return open_queue(self._engine, id, max_messages, max_bytes, max_message_size, when_full)

    def _with_stream_data(self) -> list[Endpoint]:
        ready = [
            core.user_object()
            for core in self._engine.endpoints.values()
            if core.stream_buffer is not None and core.stream_buffer.size
        ]
        return [endpoint for endpoint in ready if endpoint is not None]

    @enable_ki_protection
    async def wait_stream_ready(self) -> list[Endpoint]:
        """Waits until some endpoint's UCP stream has unread data (``ucp_stream_worker_poll``).

        Returns:
            All endpoints whose stream has unread data.

        Cancellation: nothing is lost.

        Raises:
            RuntimeError: the context was opened without ``Feature.STREAM``.
            trio.ClosedResourceError, trio.BrokenResourceError: the worker was closed, or broke, perhaps meanwhile.
        """
        await trio.lowlevel.checkpoint_if_cancelled()
        self._engine.check()
        self._context._require(Feature.STREAM, "receiving from UCP streams")
        self._engine.reap()
        ready = self._with_stream_data()
        if ready:
            await trio.lowlevel.cancel_shielded_checkpoint()
            return ready
        while not ready:
            await self._engine.receivers.stream_watchers.wait(self._engine.waiting.wait)
            self._engine.check()
            ready = self._with_stream_data()
        return ready

    @enable_ki_protection
    def fence(self) -> None:
        """Orders remote memory operations: those after it happen after those before it, endpoint by endpoint.

        If UCX's own puts and gets are in flight, this calls ``ucp_worker_fence``, which may wait for them and block the
        thread. It does not order atomics with UCX's own puts and gets: flush in between.

        Raises:
            trio.ClosedResourceError, trio.BrokenResourceError: the worker was closed, or broke.
            UCXError: UCX cannot; nothing is ordered.
        """
        self._engine.check()
        status = lib.tu_worker_fence(self._engine.handle)
        self._engine.submit()
        if status != Status.OK:
            raise UCXError(status, "fencing the worker")

    @enable_ki_protection
    async def flush(self) -> None:
        """Waits until everything sent on all endpoints is out of this process.

        ``ucp_ep_flush_nbx`` for each endpoint, then ``ucp_worker_flush_nbx``, which by itself does not wait for sends
        that have no room in the peer's shared-memory queue. As :meth:`Endpoint.flush`, it does not count rendezvous
        messages that their receivers have not asked for.

        Cancellation: it has no effect; the messages go on.

        Raises:
            trio.BrokenResourceError: a peer was lost meanwhile; the worker broke.
            trio.ClosedResourceError: the worker, or an endpoint, was closed meanwhile.
        """
        engine = self._engine
        await trio.lowlevel.checkpoint_if_cancelled()
        engine.check()
        flushes = [post_flush(core) for core in endpoints_of(engine) if core.handle is not None]
        flushes.append(pending_operation(engine, lib.tu_worker_flush(engine.handle), None, "flushing the worker"))
        for operation in flushes:
            if operation is not None:
                await completed(operation, engine)
        await trio.lowlevel.cancel_shielded_checkpoint()

    @enable_ki_protection
    def open_request_group(self) -> AbstractAsyncContextManager[RequestGroup]:
        """Opens a nursery for requests: many operations in flight without a task for each.

        An async context manager. Leaving the block waits for all requests. If one fails, or the block is left by an
        exception or cancelled, the others are cancelled. Entering is no checkpoint, leaving is one, as with a nursery.

        Cancellation: requests that have not completed are cancelled, as :meth:`Request.cancel` does.

        Raises:
            ExceptionGroup: leaving the block: of the errors of requests, and the exception that left the block.
            trio.ClosedResourceError, trio.BrokenResourceError: the worker was closed, or broke.
        """
        self._engine.check()
        return open_request_group(self._engine)

    @enable_ki_protection
    def new_chain(self, *, capacity: int = 1024, ordered: bool = False) -> RequestChain:
        """Makes an empty request chain: a program of remote operations that is posted at once.

        :mod:`trio_ucx.ucp.chains` has what else a program needs for chains.

        Args:
            capacity: how many requests it has room for, 1 to 2**24, and how much dependency information: 16 terms for
                each.
            ordered: whether each request waits for the end, good or bad, of the one before.

        Raises:
            TypeError, ValueError: a wrong capacity.
            MemoryError: there is no memory for it.
            ModuleNotFoundError: this build of trio_ucx is without request chains.
            trio.ClosedResourceError, trio.BrokenResourceError: the worker was closed, or broke.
        """
        from .chains._chain import new_chain

        return new_chain(self._engine, capacity, ordered)

    async def _aclose(self) -> None:
        others = *self._successors.values(), *self._isolated.values()
        try:
            if others:
                await close_after_background(*(other._engine for other in others))
        finally:
            await close_after_background(self._engine)

    def __repr__(self) -> str:
        state = "closed" if self._engine.handle is None else f"{len(self._engine.endpoints)} endpoints"
        return f"<trio_ucx.ucp.Worker, {state}>"


#: The run's shared worker, and whether the program has opened it itself.
_shared_worker = trio.lowlevel.RunVar[tuple[Worker | None, bool]]("trio_ucx worker", (None, False))


def _check_none_is_shared() -> None:
    worker, is_own = _shared_worker.get()
    if worker is not None and is_own:
        raise RuntimeError(
            "this Trio run has a shared worker already, which another open_worker(shared=True) has opened: leave that "
            "block first, or open this worker without shared=True and pass it as worker="
        )
    if worker is not None and worker._is_usable:
        raise RuntimeError(
            "something was opened without worker= before, for which trio_ucx has opened this Trio run's shared worker: "
            "enter open_worker(shared=True) before the first connect, listener, serve_ucx or mesh.join"
        )


@protected_asynccontextmanager
async def open_worker(
    *,
    context: Context | None = None,
    config: Config | None = None,
    features: Feature | None = None,
    keepalive_interval: float | None = None,
    name: str | None = None,
    client_id: int | None = None,
    spin: float | None = None,
    yield_interval: float = 0.0,
    admit: Sequence[str] = (),
    shared: bool = False,
) -> AsyncIterator[Worker]:
    """Opens a worker in the current Trio run (``ucp_worker_create``); an async context manager.

    Leaving the block closes what is still open on it by force, after closes that go on in the background ended (each
    has its own limit); that part is shielded from cancellation and bounded.

    Args:
        context: a context to share with other workers; by default the worker has its own.
        config, features, keepalive_interval: for its own context, see :func:`open_context`.
        name: for UCX's logs, here and at its peers; at most 31 bytes.
        client_id: a number, 1 to 2**64 - 1, that listeners see in the connection requests of this worker.
        spin: seconds, the longest time for which a task that waits polls before it parks, which saves the cost of
            waking it. It polls only while no other task is runnable, and only as long as that has been paying; timers
            and other descriptors wait for up to a millisecond meanwhile. None is 100e-6; 0 turns polling off; at most
            1. ``statistics()`` says what it did.
        yield_interval: seconds. An operation that need not wait lets other tasks run only if this has not been done for
            so long; it notices cancellation all the same. 0, the default, is Trio's rule: every operation does.
        admit: networks whose hosts need no key: see :meth:`Worker.admit`.
        shared: makes it the run's shared worker until the block is left: whatever is opened in this Trio run without
            ``worker=`` uses it, connections, listeners and groups.

    Cancellation: a call that was cancelled before it began opens nothing. Leaving a cancelled block closes the worker.

    Raises:
        OSError: too few file descriptors are left (EMFILE), or limits leave no room for shared memory.
        PermissionError: strangers cannot be kept away from the worker's TCP ports.
        TypeError, ValueError: a wrong argument; an option that UCX does not know.
        UCXError: UCX cannot start, or create a worker.
        RuntimeError: ``context`` was closed; the parent process had UCX open when it forked this one; with ``shared``,
            the run has a shared worker already.
    """
    check_in_trio()
    networks = parse_networks(admit)
    if not isinstance(shared, bool):
        raise TypeError(f"shared must be a bool, not {type(shared).__name__}")
    await trio.lowlevel.checkpoint()
    if shared:
        _check_none_is_shared()
    worker = Worker._open(context, config, features, keepalive_interval, name, client_id, spin, yield_interval)
    try:
        worker._engine.key_gate.admit(networks)
        if shared:
            _shared_worker.set((worker, True))
        yield worker
    finally:
        if shared:
            _shared_worker.set((None, False))
        await worker._aclose()
