"""Reads what waits in this process. It runs nothing, and changes nothing."""

from __future__ import annotations

import os
import sys
import threading
import time
from functools import cached_property
from time import perf_counter
from typing import Any, TypeVar

import attrs
import trio

from .._channels import Channel
from .._connection import Connection
from .._handshake.client import Connector
from .._handshake.handshake import Handshake
from .._handshake.server import Acceptor
from .._link import ChannelState, Link, QueueFigures
from .._link.sending import SendOperation
from .._rules.life import Peer
from .._version import SOFTWARE
from ..ucp import ActiveMessages
from ..ucp._internal_api import EndpointCore, Engine, ListenerCore, ListeningState, Operation, endpoints_of, engines
from . import causes
from .frames import (
    TaskPlace,
    is_outside_library,
    library_frames,
    round_of,
    task_place,
    tasks_below,
    variables_of,
)
from .items import MARK, Item, counted, each, item
from .network import silent_hosts, stopped_process

#: Seconds. A round of Trio's loop that takes longer blocks all other tasks.
BLOCKED = 0.5

_STATES = {
    ListeningState.LED: "waits for UCX's events",
    ListeningState.SERVED: "waits for UCX's events",
    ListeningState.FREE: "is progressed by the tasks that use it",
    ListeningState.ENDED: "is not progressed any more",
}
_PEERS = {Peer.OPEN: "open", Peer.STOPPED: "which the peer is closing", Peer.LOST: "lost"}
_T = TypeVar("_T")


def collect() -> Item:
    """Returns the whole report."""
    return _Collector().process()


def _children(engine: Engine, kind: type[_T]) -> list[_T]:
    """Returns the open children of a worker that are of one type."""
    owners = (getattr(close, "__self__", None) for close in list(engine.teardown.children.values()))
    return [owner for owner in owners if isinstance(owner, kind)]


def _thread(thread: int) -> str:
    names = {one.ident: one.name for one in threading.enumerate()}
    return f"thread {names.get(thread, thread)}"


class _Collector:
    def __init__(self) -> None:
        self.now = perf_counter()
        self.thread = threading.get_ident()
        self.may_ask_ucx = is_outside_library()
        #: The tasks that serve a connection, and those that connect.
        self.handlers: dict[Link, TaskPlace] = {}
        self.connects: dict[Connector, TaskPlace] = {}
        #: The tasks that have a channel in a variable: of several, the last below the others.
        self.users: dict[ChannelState, TaskPlace] = {}

    @cached_property
    def silent_hosts(self) -> dict[str, int]:
        return silent_hosts()

    def process(self) -> Item:
        here = [engine for engine in list(engines) if not engine.run.inherited]
        items = each("a loop", self.loop, dict.fromkeys(engine.run.thread for engine in here))
        for root in dict.fromkeys(engine.run.root_task() for engine in here):
            items += each("a task", self.task, tasks_below(root))
        items += each("a worker", self.worker, sorted(here, key=lambda engine: engine.efd))
        if not here:
            items.append(Item("no worker is open"))
        if not self.may_ask_ucx:
            items.append(Item("missing: UCX's words, because a call of trio_ucx was interrupted"))
        count = sum(1 for one in items for _ in one.all_causes())
        return item(
            "trio_ucx report of process {pid} ({command}), {time}, {software}: {summary}",
            items=items,
            pid=os.getpid(),
            command=sys.argv[0],
            time=time.strftime("%Y-%m-%d %H:%M:%S"),
            software=SOFTWARE,
            summary=f"{counted(count, 'likely cause')} of a hang, marked {MARK}"
            if count
            else "no cause of a hang found",
        )

    # ---- Trio ----

    def loop(self, thread: int) -> Item | None:
        current = round_of(thread)
        if current is None or current.seconds < BLOCKED:
            return None
        where = f", at {current.place}" if current.place else ""
        cause = f"Trio's loop has been blocked for {current.seconds:.1f} s in task {current.task!r}{where}"
        return item("the loop of {thread}", [cause], thread=_thread(thread), seconds=current.seconds)

    def task(self, task: trio.lowlevel.Task) -> None:
        """Finds the tasks that connect, those that serve a connection, and those that use a channel."""
        for value in variables_of(task):
            if type(value) is Channel:
                self.users[value._state] = task_place(task)
        for module, variables, runs_program in library_frames(task):
            if module == "trio_ucx._handshake.client":
                if isinstance(connector := variables.get("self"), Connector):
                    self.connects[connector] = task_place(task)
            elif module in ("trio_ucx._serve", "trio_ucx._server", "trio._highlevel_serve_listeners"):
                connection = variables.get("connection") or variables.get("stream")
                if isinstance(connection, Connection) and runs_program:
                    self.handlers[connection._link] = task_place(task)

    def wait(self, pending: Any, what: str = "", **facts: Any) -> Item:
        """The task that waits for something."""
        prefix = "{what}: " if what else ""
        task = pending._task
        if task is None:
            nobody = "a task polls for it" if pending.expected else "no task waits for it"
            return item(prefix + ("a request of a group" if pending.notify else nobody), what=what, **facts)
        text, took = prefix + "task {task!r} has waited for {seconds}{where}", self.now - pending.since
        return item(text, what=what, seconds=took, **attrs.asdict(task_place(task)), **facts)

    def waiting_tasks(self, pendings: Any) -> list[Item]:
        return each("a wait", lambda one: self.wait(one) if one._task is not None else None, pendings)

    # ---- workers ----

    def worker(self, engine: Engine) -> Item:
        state, context = engine.listening.state, engine.context
        template = (
            "worker {name} of {thread} {does} ({state}, the progress task ran {seconds} ago); transports {transports}; "
            "operations in flight: {operations}; closes in the background: {background_closes}"
        )
        if engine.run.thread != self.thread:
            template += "; its thread runs meanwhile, and UCX's words are missing"
        handshakes = [one for one in _children(engine, Handshake) if one.opened.outcome is None]
        own = [endpoint for endpoint in endpoints_of(engine) if not endpoint.is_shared]
        connects = [one for one in self.connects if one._registry.engine is engine]
        memory = [one.nbytes for one in list(context._memories) if one._handle is not None]
        items = [
            *each("a connection", self.connection, _children(engine, Link)),
            *each("a connect", self.connect, connects),
            *each("a handshake", self.handshake, handshakes),
            *each("a listener", self.listener, _children(engine, Acceptor)),
            *each("a raw listener", self.raw_listener, _children(engine, ListenerCore)),
            *each("an endpoint", self.endpoint, own),
            *each("active messages", self.active_messages, _children(engine, ActiveMessages)),
            *each("an operation", self.operation, [one for one in list(engine.in_flight.values()) if not one.scope]),
            *self.waiting_tasks(engine.receivers.stream_watchers._queue),
        ]
        if memory:
            items.append(item("memory that peers can reach: {bytes} bytes", bytes=sum(memory), regions=len(memory)))
        return item(
            template,
            causes.of_worker(engine),
            items,
            name=engine.identity.attributes.name,
            thread=_thread(engine.run.thread),
            does="has work that UCX cannot do yet" if engine.progress_task.backs_off else _STATES[state],
            state=state.name,
            seconds=self.now - engine.progress_task.began,
            transports=context._transports,
            operations=len(engine.in_flight),
            background_closes=engine.run.background,
        )

    def operation(self, operation: Operation) -> Item | None:
        if operation.outcome is not None and not operation.detached:
            return None
        if isinstance(operation, SendOperation):
            size, queue = operation.size, operation.written
            stage = "waits for credit" if operation.waits_for_credit else "with UCX"
            what = f"sending {size} bytes on {causes.queue_name(queue, sent=True)}, {stage}"
            return self.wait(operation, what, tag=queue, bytes=size, stage=stage)
        ask = self.may_ask_ucx and operation.engine.run.thread == self.thread
        return self.wait(operation, operation.describe(ask=ask))

    def endpoint(self, core: EndpointCore) -> Item:
        broke = [f"it broke: {core.error}"] if core.error else []
        buffer = core.stream_buffer
        items = each("an operation", self.operation, core.operations.in_order())
        items += self.waiting_tasks(core.operations._watchers)
        if buffer is not None and buffer._waiter is not None:
            items.append(self.wait(buffer._waiter, "the stream"))
        return item(
            "endpoint to {peer}, {state}, {unread} bytes of its stream unread",
            [*broke, *stopped_process(core.peer)],
            items,
            peer=core.label,
            state=core.ending.state.name.lower(),
            unread=0 if buffer is None else buffer.size,
        )

    def active_messages(self, queue: ActiveMessages) -> Item:
        return item("active messages with id {id}", items=self.waiting_tasks(queue._waiters._queue), id=queue._id)

    # ---- connections ----

    def connection(self, link: Link) -> Item:
        is_ours = link.engine.run.thread == self.thread  # else C code may change them meanwhile
        queues = link.native.queues() if is_ours else []
        counts = link.native.counts
        credit, unread, stalled = counts.credit, counts.unread, counts.stalled
        peer = _PEERS.get(link.life.peer, "closed by the peer")
        state = "closing" if link.life.closing else peer
        operations: list[Operation] = [*link.sending.waiting, *link.share.operations.in_order()]
        items = each("a tag", lambda queue: self.tag(link, queue), queues)
        if waiting := self.waiting_tasks(link.receiving.conversations.waiters._queue):
            items.append(item("{queue}: empty; the peer may still send", items=waiting, queue="conversations"))
        items += each("a channel", self.channel, link.receiving.conversations.all())
        items += each("an operation", self.operation, operations)
        items += self.waiting_tasks(link.share.operations._watchers)
        handler = self.handlers.get(link)
        if handler is not None:
            items.append(item("served by task {task!r}{where}", **attrs.asdict(handler)))
        elif link.owner:
            items.append(Item(f"belongs to {link.owner.name}"))
        elif not items and link.life.open and link.life.peer is Peer.OPEN:
            text = "no task uses it, and it was not closed: a peer that waits for its end needs an aclose()"
            items.append(Item(text))
        return item(
            "connection to {peer}, {state}, for {seconds}; may send {credit} of {peer_window} bytes; holds {unread} of "
            "{window} bytes unread; close_timeout {close_timeout:g} s",
            causes.of_connection(link, operations, handler, self.now, self.silent_hosts),
            items,
            peer=link.share.label,
            remote_address=link.remote_address,
            state=state,
            seconds=self.now - link.opened_at,
            credit=credit,
            peer_window=link.sending.window,
            unread=unread,
            window=link.window,
            peer_lacks_credit=stalled,
            close_timeout=link.closing._timeout,
        )

    def tag(self, link: Link, queue: QueueFigures) -> Item | None:
        count, size = queue.messages, queue.bytes
        if causes.is_stream(queue.number):
            size += len(link.receiving.stream.rest)
        if not (size or count or queue.waiting):
            return None
        text = "{queue}: messages that nobody has received: {messages} ({bytes} bytes)"
        if queue.waiting and not count:
            text = "{queue}: empty; the peer may still send"
        waiting = [one for one in list(link.receiving.waiting) if one.number == queue.number]
        receives = each("a receive", self.wait, waiting)
        name = causes.queue_name(queue.number)
        return item(text, items=receives, queue=name, tag=queue.number, messages=count, bytes=size)

    def channel(self, channel: ChannelState) -> Item | None:
        """The task that uses a channel, unless it waits in a call of trio_ucx, which is described by itself."""
        user = self.users.get(channel)
        if user is None or user.call is not None or channel.left:
            return None
        name = causes.queue_name(channel.number)
        text = "{queue}: used by task {task!r}{where}"
        return item(text, causes.of_channel(channel, user), queue=name, **attrs.asdict(user))

    def connect(self, connector: Connector) -> Item:
        over_ucx = f"messages do not get through over UCX ({connector._handshake.route}); a firewall may block them"
        return item(
            "connecting to {peer}: task {task!r}{where}; connect_timeout {timeout:g} s",
            [connector.stage or over_ucx],
            peer=connector.label,
            timeout=connector.timeout,
            **attrs.asdict(self.connects[connector]),
        )

    def handshake(self, handshake: Handshake) -> Item:
        stage = "on the control socket" if handshake.control is None else "over UCX"
        text = "handshake with {peer}, {stage} ({route})"
        return item(text, peer=handshake.label, stage=stage, route=handshake.route)

    def listener(self, acceptor: Acceptor) -> Item:
        waiting, clients = acceptor.waiting, [client.label for client in list(acceptor._clients)]
        items = self.waiting_tasks(acceptor._acceptors._queue)
        unaccepted = [f"no task accepts {counted(waiting, 'connection')}"] if waiting and not items else []
        text = "listener at {address}: {waiting} not accepted; in the handshake: {handshaking}"
        return item(text, unaccepted, items, address=acceptor.address, waiting=waiting, handshaking=clients)

    def raw_listener(self, listener: ListenerCore) -> Item:
        items = self.waiting_tasks(listener._acceptors._queue)
        text = "raw listener at {address}: {waiting} not accepted"
        return item(text, items=items, address=listener.address, waiting=len(listener.waiting))
