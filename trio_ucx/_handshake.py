"""Hellos: from two endpoints that are connected to a Connection on each side.

A worker gets its :class:`Services` when it is first used for Connections. They own the worker's hello handler, the
clients that wait for an answer, and the listeners. The client speaks first; hellos are active messages, because those,
unlike tag messages, tell which endpoint they came from. Decisions are made in the engine's delivery, so that nothing
that follows a hello can arrive before its connection exists.
"""

from __future__ import annotations

import errno
from collections.abc import Callable

import trio
from outcome import Error, Value

from . import _wire as wire
from ._link import Link
from ._native import lib, ucx
from ._session import Options
from ._version import __version__
from .ucp import Feature, Status, UCXError, Worker, WorkerAddress
from .ucp._buffers import Pinned
from .ucp._operations import EndpointCore, under_way
from .ucp._peers import watch_process
from .ucp._pending import Signal
from .ucp._posting import pending_operation
from .ucp._process import this_process
from .ucp._status import os_error_from_status

SOFTWARE = f"trio_ucx {__version__}, UCX {'.'.join(map(str, ucx.version))}"


class Services:
    """A worker's handshakes."""

    def __init__(self, worker: Worker) -> None:
        features = worker.context.features
        if not features & Feature.TAG or not features & Feature.AM:
            raise ValueError(
                f"Connections need a worker whose context has the features TAG and AM; this one has {features!r}"
            )
        self.worker = worker
        self.engine = worker._engine
        self.connecting: dict[int, Connecting] = {}
        #: Endpoints, by id, whose client has yet to say hello.
        self.greeting: dict[int, Callable[[bytes], None]] = {}
        #: What takes the OPENs that come by worker address, by service.
        self.services: dict[int, Callable[[wire.Hello], None]] = {}
        taken = self.engine.am_ids.setdefault(wire.HELLO_AM_ID, "the Connections")
        if taken != "the Connections":
            raise ValueError(
                f"Connections shake hands by active messages with id {wire.HELLO_AM_ID}, which go to {taken} of this "
                "worker: open that with another id, or on another worker"
            )
        status = lib.tu_worker_accept_hellos(self.engine.handle, wire.HELLO_AM_ID, wire.MAX_HELLO)
        if status != Status.OK:
            raise UCXError(status, "registering the hello handler")
        self.engine.mail.claim()
        self.engine.on_hello = self._arrived

    @classmethod
    def of(cls, worker: Worker) -> Services:
        if worker._services is None:
            worker._services = cls(worker)
        services: Services = worker._services
        return services

    def _arrived(self, endpoint_id: int, data: bytes) -> None:
        """A hello came. Called by the engine's delivery; a stranger's nonsense must not raise."""
        greet = self.greeting.pop(endpoint_id, None)
        if greet is not None:
            greet(data)
            return
        try:
            hello = wire.decode_hello(data)
        except wire.ProtocolError as error:
            self._refused(error.client_id, f"{error}; this side is {SOFTWARE}")
            return
        if isinstance(hello, wire.Refusal):
            self._refused(hello.client_id, hello.reason)
        elif isinstance(hello, wire.UnknownVersion):
            if hello.address:
                self._refuse_stranger(hello.address, hello.client_id, wrong_version(hello.version))
            else:
                self._refused(hello.client_id, wrong_version(hello.version))
        elif hello.kind == wire.WELCOME:
            connecting = self.connecting.pop(hello.client_id, None)
            if connecting is not None:
                connecting.welcomed(hello)
        elif hello.address:
            self._opened_by_address(hello)

    def _refused(self, client_id: int, reason: str) -> None:
        connecting = self.connecting.pop(client_id, None)
        if connecting is not None:
            connecting.refused(reason)

    def _opened_by_address(self, hello: wire.Hello) -> None:
        if hello.service:
            take = self.services.get(hello.service)
            reason = "the listener that was meant is closed"
        else:
            take = next(iter(self.services.values())) if len(self.services) == 1 else None
            reason = f"the worker has {len(self.services)} listeners: connect to a listener's worker_address"
        if take is not None:
            take(hello)
        else:
            self._refuse_stranger(hello.address, hello.client_id, reason)

    def _refuse_stranger(self, address: bytes, client_id: int, reason: str) -> None:
        try:
            core = self.worker._connect_worker(WorkerAddress.from_ucx(address))
        except (OSError, UCXError):
            return
        refuse(core, client_id, reason)


def wrong_version(version: int) -> str:
    return f"wire version {version} was asked for, this side speaks {wire.VERSION} ({SOFTWARE})"


def refuse(core: EndpointCore, client_id: int, reason: str) -> None:
    """Tells a client why not, then closes; in the background."""
    engine = core.engine

    async def run() -> None:
        with trio.move_on_after(0.5):
            await send_hello(core, wire.Refusal(client_id, reason).encode(), reply=False)
            # The client closes when it has read why. Closing first might overtake the refusal. (By worker address the
            # client's close is not seen.)
            await core.wait_until(lambda: core.handle is None)
        core.close()

    core.on_failure = core.changed
    if not engine.spawn_background(run, f"trio_ucx refusing {core.label}"):
        core.close()


async def send_hello(core: EndpointCore, data: bytes, *, reply: bool) -> None:
    core.check()
    pins = Pinned(data)
    verdict = lib.tu_endpoint_send_hello(core.handle, wire.HELLO_AM_ID, pins.address, pins.size, reply)
    operation = pending_operation(core.engine, verdict, pins, "sending a hello", core)
    if operation is not None:
        await core.engine.waiting.wait(operation)


#: Seconds that a given-up connection by worker address stays for the server's answer.
GIVE_UP_TIMEOUT = 2.0


class Connecting:
    """A client that waits for its welcome."""

    def __init__(self, services: Services, core: EndpointCore, options: Options) -> None:
        self.services = services
        self.core = core
        self.options = options
        self.id = wire.new_connection_id()
        while self.id in services.engine.mail.boxes or self.id in services.connecting:
            self.id = wire.new_connection_id()
        self.answer = Signal()
        self.by_address = False
        services.connecting[self.id] = self
        core.on_failure = self._failed

    def welcomed(self, hello: wire.Hello) -> None:
        link = Link(self.services.worker, self.core, self.id, hello, self.options)
        self.core.peer = hello.process
        if self.by_address:
            watch_process(self.core, hello.process)
        self.answer.finish(Value(link))

    def refused(self, reason: str) -> None:
        error = ConnectionRefusedError(errno.ECONNREFUSED, f"{self.core.label} refused the connection: {reason}")
        self.answer.finish(Error(error))

    def _failed(self) -> None:
        assert self.core.error is not None
        status = self.core.error.status
        hint = self.services.worker.context.reach_hint(status)
        if status == Status.REJECTED:
            hint = " (the listener has too many waiting clients, or is closing)"
        error = os_error_from_status(status, f"connecting to {self.core.label}", hint)
        if not isinstance(error, OSError):
            error = ConnectionError(str(error))
        self.answer.finish(Error(error))

    async def run(self, timeout: float, *, service: int = 0, address: bytes = b"") -> Link:
        """Shakes hands, within ``timeout`` seconds; closes the endpoint if that fails.

        Args:
            service, address: the listener that is meant, and our worker address, for a connection by worker address.
        """
        engine = self.services.engine
        self.by_address = bool(address)
        hello = wire.Hello(
            kind=wire.OPEN,
            client_id=self.id,
            service=service,
            window=self.options.window,
            threshold=self.services.worker.context.rendezvous_threshold or 0,
            process=this_process(),
            software=SOFTWARE,
            address=address,
        )
        link: Link | None = None
        waiting_for = ""
        try:
            with trio.move_on_after(timeout) as scope:
                try:
                    await send_hello(self.core, hello.encode(), reply=not address)
                except (trio.BrokenResourceError, trio.ClosedResourceError):
                    if self.core.error is not None:
                        self._failed()  # perhaps before we could be told
                link = await engine.waiting.wait(self.answer)
            if scope.cancelled_caught:
                waiting_for = under_way(self.core.under_way())
        finally:
            if link is None and self.by_address and self.answer.outcome is None:
                self._give_up_by_address()
            else:
                self.services.connecting.pop(self.id, None)
                if link is None:
                    if isinstance(self.answer.outcome, Value):
                        self.answer.result().abort()
                    self.core.close()
        if link is None:
            raise TimeoutError(
                errno.ETIMEDOUT,
                f"no hello from {self.core.label} within {timeout:.3g} seconds: is it a trio_ucx listener, of a "
                f"compatible UCX (this side is {SOFTWARE})?{waiting_for}"
                + self.services.worker.context.reach_hint(Status.UNREACHABLE),
            )
        return link

    def _give_up_by_address(self) -> None:
        """Without a socket the server would not notice that we have gone: stay a moment, to tell it when it answers."""
        self.answer = Signal()

        async def run() -> None:
            link: Link | None = None
            try:
                with trio.move_on_after(GIVE_UP_TIMEOUT):
                    link = await self.answer.wait()
            except OSError:
                pass
            finally:
                self.services.connecting.pop(self.id, None)
                if link is not None:
                    link.abort()
                self.core.close()

        if not self.services.engine.spawn_background(run, f"trio_ucx giving up {self.core.label}"):
            self.services.connecting.pop(self.id, None)
            self.core.close()


def welcome(services: Services, core: EndpointCore, hello: wire.Hello, options: Options) -> tuple[Link, bytes]:
    """The server's side of an OPEN: its link, and the answer to be sent."""
    my_id = wire.new_connection_id()
    while my_id in services.engine.mail.boxes:
        my_id = wire.new_connection_id()
    answer = wire.Hello(
        kind=wire.WELCOME,
        client_id=hello.client_id,
        server_id=my_id,
        window=options.window,
        threshold=services.worker.context.rendezvous_threshold or 0,
        process=this_process(),
        software=SOFTWARE,
    )
    link = Link(services.worker, core, my_id, hello, options)
    core.peer = hello.process
    if hello.address:
        watch_process(core, hello.process)
    return link, answer.encode()
