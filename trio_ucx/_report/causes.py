"""What probably keeps a worker, or a connection, from going on: in sentences that a person understands."""

from __future__ import annotations

import threading
from collections.abc import Iterable, Iterator, Mapping

from .._link import ChannelState, Link
from .._link.sending import SendOperation
from .._rules import wire
from .._util.socket_addresses import is_loopback
from ..ucp._internal_api import Engine, Operation
from .frames import TaskPlace
from .items import counted
from .network import no_answer, stopped_process


def queue_name(queue: int, *, sent: bool = False) -> str:
    """Returns how a report names a tag queue of this side's, or, with ``sent``, one that it sends to."""
    if queue == wire.STREAM:
        return "the byte stream"
    if queue == wire.UNACCEPTED:
        return "new conversations"
    if queue >= wire.CONVERSATIONS:
        number = (queue - wire.CONVERSATIONS) % wire.MAX_CONVERSATIONS
        opened_by_sender = queue < wire.ANSWERS
        return f"conversation {number} (opened {'here' if opened_by_sender == sent else 'by the peer'})"
    return f"tag {queue}"


def is_stream(queue: int) -> bool:
    return queue == wire.STREAM


def _names(queues: Iterable[int], *, sent: bool = False) -> str:
    return ", ".join(queue_name(queue, sent=sent) for queue in dict.fromkeys(queues))


def of_worker(engine: Engine) -> Iterator[str]:
    if engine.broken is not None:
        yield f"the worker broke: {engine.broken!r}"
    if engine.receive_queue.stopped:
        yield (
            "the worker's shared-memory queue has stopped, because a local peer was killed while it wrote to it: "
            "nothing arrives over shared memory any more. Connect again; raw endpoints need another worker"
        )
    elif engine.progress_task.is_quiet:
        yield (
            "UCX has work that it cannot do: the shared-memory queue of a local peer is full because the peer does not "
            "run, or this worker's own queue waits for a peer that was stopped in the middle of writing"
        )


def of_connection(
    link: Link, operations: list[Operation], handler: TaskPlace | None, now: float, silent_hosts: Mapping[str, int]
) -> Iterator[str]:
    """Yields likely causes of a hang of a connection.

    Args:
        operations: the sends that wait for credit, and the operations that UCX has not completed.
        handler: the task that serves it.
    """
    if link.life.broke:
        yield f"it broke, and was not closed: {link.share.error}"
    address = link.share.peer_address
    if address is not None:
        hosts = [host for host in address._tcp_hosts if not is_loopback(host)]
        yield from stopped_process(address.process)
        yield from no_answer(silent_hosts, [*hosts, *(link.remote_address or ())[:1]])
    if link.owner is not None:
        yield from link.owner.causes()
    yield from _of_messages(link, [one for one in operations if isinstance(one, SendOperation)])
    ended = link.closing.peer_ended_at
    if link.life.closing:
        yield "it is being closed: the peer has not received everything, or does not answer"
    elif handler is not None and ended is not None:
        yield (
            f"the peer ended the connection {now - ended:.1f} s ago, and its handler still runs: "
            f"{handler.task}, at {handler.place}"
        )


def of_channel(channel: ChannelState, user: TaskPlace) -> Iterator[str]:
    """Yields why the peer may hang, if it may wait for an answer on this channel.

    Args:
        user: a task of the program that has the channel, and does not wait in a call of trio_ucx.
    """
    opened_by_peer = wire.CONVERSATIONS <= channel.number < wire.ANSWERS
    if opened_by_peer and not channel.peer_left:
        name = queue_name(channel.number)
        yield f"the peer may wait for an answer on {name}: our task {user.task!r} waits for something else"


def _of_messages(link: Link, sends: list[SendOperation]) -> Iterator[str]:
    native, sending = link.native, link.sending
    credit = native.counts.credit
    waiting = [send for send in sends if send.waits_for_credit]
    if waiting:
        yield (
            f"{counted(len(waiting), 'send')} ({sum(send.size for send in waiting)} bytes) on "
            f"{_names((send.written for send in waiting), sent=True)} wait for credit: the peer has "
            f"{sending.window - credit} bytes unread, its window is {sending.window}; the peer must receive"
        )
    queues = native.queues() if link.engine.run.thread == threading.get_ident() else []
    conversations = link.receiving.conversations
    untaken = sum(not one.accepted for one in conversations.all())
    if untaken and not conversations.waiters:
        yield f"no task accepts {counted(untaken, 'conversation')} of the peer's (Connection.conversations)"
    owners = link.owner.queue if link.owner is not None else -1
    unread = [queue for queue in queues if queue.messages and not queue.waiting and queue.number != owners]
    empty = [one.number for one in queues if one.waiting and not one.messages and one.number < wire.CONVERSATIONS]
    large = [send.written for send in sends if not send.waits_for_credit and sending.stays(send.size)]
    offered = [queue.number for queue in unread if queue.with_sender]
    if large and offered:
        yield (
            f"both sides send large messages, on {_names(large, sent=True)} here and {_names(offered)} there, and each "
            "waits for the other to receive: a deadlock. Receive in another task while sending"
        )
        return
    if large:
        yield f"the peer has not received {counted(len(large), 'large message')} on {_names(large, sent=True)}"
    if unread:
        messages = counted(sum(queue.messages for queue in unread), "message")
        cause = f"no task receives {messages} on {_names(queue.number for queue in unread)}"
        if empty:
            cause += f", while a task waits on {_names(empty)}, which is empty: a wrong tag?"
        yield cause + ("; the peer has more to send, and no credit left" if native.counts.stalled else "")
