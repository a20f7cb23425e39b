"""The Listener: accepts clients, and lets their handshakes advance whether anybody is accepting or not."""

from __future__ import annotations

import logging
import os
import resource
import secrets
from collections import deque

import attrs
import trio
from outcome import Error, Value
from trio.lowlevel import enable_ki_protection

from . import _wire as wire
from ._connection import Connection
from ._handshake import Services, refuse, send_hello, welcome, wrong_version
from ._link import Link
from ._session import Options
from .ucp import UCXError, Worker, WorkerAddress
from .ucp._address import Resolved, format_address
from .ucp._listener import ListenerCore, client_of
from .ucp._opening import DEFAULT
from .ucp._operations import EndpointCore
from .ucp._pending import Signal, Waiters
from .ucp._util import OpenedNotConstructed

logger = logging.getLogger("trio_ucx")

#: What a client needs, with one TCP lane for each of several network devices, and what the program may need besides.
DESCRIPTORS_EACH = 6
SPARE_DESCRIPTORS = 16


@attrs.frozen
class ListenerStatistics:
    """Figures about a :class:`Listener`.

    Attributes:
        handshaking: clients that have not finished their hello.
        waiting: connections that wait to be accepted.
        accepted: connections that were.
        refused: clients that were turned away, or did not say a proper hello in time.
    """

    handshaking: int
    waiting: int
    accepted: int
    refused: int


class Reception:
    """What is behind a Listener: clients on their way to a Connection."""

    def __init__(self, worker: Worker, address: Resolved, options: Options, hello_timeout: float, backlog: int) -> None:
        self.worker = worker
        self.services = Services.of(worker)
        self.options = options
        self.hello_timeout = hello_timeout
        self.backlog = backlog
        self.core = ListenerCore(worker._engine, address)
        self.service = secrets.randbits(63) | 1
        self.handshaking: set[EndpointCore] = set()
        self.ready: deque[Link] = deque()
        self.acceptors = Waiters()
        self.accepted = 0
        self.refused = 0
        engine = worker._engine
        engine.listeners[self.core.id] = self._client_came
        engine.children[self.core.id] = self.close
        engine.on_broken[self.core.id] = self.acceptors.fail
        self.services.services[self.service] = self._opened_by_address

    @property
    def full(self) -> bool:
        return len(self.handshaking) + len(self.ready) >= self.backlog

    def _client_came(self, request: int) -> None:
        """By socket address. Called by the engine's delivery."""
        client = client_of(request)
        if self.full or not self._descriptors_left(format_address(client)):
            self.refused += 1
            self.core.reject(request)
            return
        try:
            core = self.worker._accept_core(request, client, DEFAULT)
        except (OSError, UCXError):
            self.refused += 1  # it went away meanwhile
            return
        hello = Signal()
        self.services.greeting[core.id] = lambda data: hello.finish(Value(data))
        core.on_failure = lambda: hello.finish(Error(ConnectionError("the client went away")))
        self._start(core, hello)

    def _descriptors_left(self, client: str) -> bool:
        """Whether there are file descriptors for one more client.

        UCX must never run out of them: at the first accept() that fails for that, its TCP stops listening for good.
        """
        limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
        try:
            lowest = os.open("/dev/null", os.O_RDONLY | os.O_CLOEXEC)
        except OSError:
            lowest = limit
        else:
            os.close(lowest)
        if lowest + SPARE_DESCRIPTORS + DESCRIPTORS_EACH * len(self.handshaking) < limit:
            return True
        logger.warning("turned away %s: file descriptors are running out (RLIMIT_NOFILE is %d)", client, limit)
        return False

    def _opened_by_address(self, hello: wire.Hello) -> None:
        """By worker address. Called by the engine's delivery."""
        try:
            core = self.worker._connect_worker(WorkerAddress.from_ucx(hello.address))
        except (OSError, UCXError):
            self.refused += 1
            return
        if self.full or not self._descriptors_left(core.label):
            self.refused += 1
            refuse(core, hello.client_id, "too many clients are waiting to be accepted; try again later")
            return
        came = Signal()
        came.finish(Value(hello.encode()))
        self._start(core, came)

    def _start(self, core: EndpointCore, hello: Signal) -> None:
        self.handshaking.add(core)
        trio.lowlevel.spawn_system_task(self._shake_hands, core, hello, name=f"trio_ucx hello of {core.label}")

    async def _shake_hands(self, core: EndpointCore, came: Signal) -> None:
        link: Link | None = None
        done = False
        try:
            with trio.move_on_after(self.hello_timeout) as scope:
                link = await self._greet(core, came)
                done = link is not None
            if scope.cancelled_caught:
                logger.info("turned away %s: no hello within %s seconds", core.label, self.hello_timeout)
        except (ConnectionError, trio.BrokenResourceError, trio.ClosedResourceError) as error:
            logger.info("lost %s in the handshake: %s", core.label, error)
        except Exception:
            logger.exception("the handshake with %s failed", core.label)
        finally:
            self.services.greeting.pop(core.id, None)
            self.handshaking.discard(core)
            if done and link is not None and self.core.handle is not None:
                self._connected(link)
            else:
                self.refused += 1
                if link is not None:
                    link.abort()
                elif core.on_failure != core.changed:  # else its refusal is under way
                    core.close()

    async def _greet(self, core: EndpointCore, came: Signal) -> Link | None:
        data: bytes = await came.wait()
        try:
            hello = wire.decode_hello(data)
        except wire.ProtocolError as error:
            logger.info("turned away %s: %s", core.label, error)
            return None
        if isinstance(hello, wire.UnknownVersion):
            logger.info("turned away %s: %s", core.label, wrong_version(hello.version))
            refuse(core, hello.client_id, wrong_version(hello.version))
            return None
        if isinstance(hello, wire.Refusal) or hello.kind != wire.OPEN:
            logger.info("turned away %s: it did not ask for a connection", core.label)
            return None
        core.check()
        link, answer = welcome(self.services, core, hello, self.options)
        try:
            await send_hello(core, answer, reply=False)
        except BaseException:
            link.abort()
            raise
        return link

    def _connected(self, link: Link) -> None:
        if not self.acceptors.give(link):
            self.ready.append(link)

    async def accept(self) -> Link:
        self.core.check()
        await trio.lowlevel.checkpoint_if_cancelled()
        if self.ready:
            link = self.ready.popleft()
            await trio.lowlevel.cancel_shielded_checkpoint()
        else:
            link = await self.acceptors.wait()
        self.accepted += 1
        return link

    def close(self) -> None:
        if self.core.handle is None:
            return
        self.services.services.pop(self.service, None)
        self.core.close()
        for core in list(self.handshaking):
            core.fail(UCXError(-25, f"the listener closed before {core.label} was accepted"))
        while self.ready:
            self.ready.popleft().abort()
        self.acceptors.fail(trio.ClosedResourceError("this listener was closed"))


@attrs.define(eq=False, repr=False)
class Listener(trio.abc.Listener[Connection], metaclass=OpenedNotConstructed):
    """Accepts Connections. Open with :func:`open_ucx_listeners`; works with ``trio.serve_listeners``."""

    _reception: Reception

    @property
    def address(self) -> tuple[str, int]:
        """The ``(host, port)`` that it is bound to."""
        return self._reception.core.address

    @property
    def worker_address(self) -> WorkerAddress:
        """Another way to reach this listener: :func:`connect` takes it. Peers that have it need no socket."""
        address = self._reception.worker.address
        return WorkerAddress.from_ucx(address.ucx, service=self._reception.service, process=address.process)

    @property
    def worker(self) -> Worker:
        """The worker that it and its connections live on."""
        return self._reception.worker

    def statistics(self) -> ListenerStatistics:
        """How many clients are where."""
        reception = self._reception
        return ListenerStatistics(
            len(reception.handshaking), len(reception.ready), reception.accepted, reception.refused
        )

    @enable_ki_protection
    async def accept(self) -> Connection:
        """Waits for a connection whose handshake is done.

        Clients that do not say a proper hello are turned away and never seen here.

        Cancellation: nothing is lost.

        Raises:
            trio.ClosedResourceError: the listener was closed, perhaps meanwhile.
        """
        return Connection._wrap(await self._reception.accept())

    @enable_ki_protection
    async def aclose(self) -> None:
        """Closes it. Clients that were not accepted are turned away; accepted connections are not affected."""
        if self._reception.worker._engine.usable:
            self._reception.close()
        await trio.lowlevel.checkpoint()

    def __repr__(self) -> str:
        state = "closed" if self._reception.core.handle is None else "listening"
        return f"<trio_ucx.Listener at {self.address}, {state}>"
