"""``join``: from the launcher's environment to a Group, and out of it again."""

from __future__ import annotations

import os
from collections.abc import AsyncIterator
from contextlib import ExitStack, asynccontextmanager
from typing import Any, Literal, Unpack

import trio

from .. import ConnectionOptions, open_ucx_listeners
from .._opening.authkey import check_authkey
from .._opening.options import check_worker
from .._util.arguments import check_in_trio, check_timeout
from .._util.background import BackgroundNursery, BlockScope
from .._util.contained import report
from .._util.hidden import HiddenDict, hide_authkey
from .._util.interrupts import protected_asynccontextmanager
from ..ucp import Worker
from ._contact import open_meeting_point, reach_rank_0
from ._errors import RankLostError, again
from ._group import Group
from ._links import Links
from ._meeting import Coordinator, Follower, NotYet
from ._members import Members
from ._mpi import skip_finalize
from ._place import Place, find_place

#: Seconds for which a rank that leaves with an error tries to tell the others.
_LAST_WORDS = 2.0
#: If rank 0 still belongs to a group that is ending: seconds until the next attempt.
_AGAIN = 0.1


@protected_asynccontextmanager
async def join(
    *,
    rank: int | None = None,
    size: int | None = None,
    meeting: str | None = None,
    timeout: float = 60,
    allow_anyone: bool = False,
    on_loss: Literal["cancel", "continue"] = "cancel",
    worker: Worker | None = None,
    **options: Unpack[ConnectionOptions],
) -> AsyncIterator[Group]:
    """Joins the group of processes that a launcher has started: ``async with join() as group``.

    The rank, the size and the meeting point come from the launcher's environment: ``python -m trio_ucx mesh``,
    torchrun, mpirun, srun, Kubernetes; or from ``TRIO_UCX_RANK``, ``TRIO_UCX_SIZE`` and ``TRIO_UCX_MEETING``. Rank 0
    listens at the meeting point; the ranks may start in any order. All have joined when the block begins.

    When the block is left normally, the connections are closed gracefully: what this rank has sent arrives. Rank 0
    waits there until all others have left. When it is left with an exception, the others learn that this rank was lost.

    Args:
        rank, size: this process's number, and how many processes there are.
        meeting: where rank 0 listens: ``"host:port"``; ``"file:///path"`` of a file that rank 0 writes and the others
            read, in a folder where only this user can write; or ``"mpi"``, to broadcast its address with mpi4py.
        timeout: seconds for which to wait for the others.
        allow_anyone: let in ranks from other hosts, and of other users, although there is no ``authkey``.
        on_loss: ``"cancel"``: if a rank is lost, the block is cancelled, and raises :class:`RankLostError`.
            ``"continue"``: operations with the lost rank raise it, and collective operations; a new process may join
            under its number. The loss of rank 0 ends the group in both cases. It must be the same for all ranks.
        worker: the worker for the connections; by default the run's shared one.
        options: of the connections; see :func:`trio_ucx.connect`. ``authkey`` must be the same for all ranks; without
            it, the one that :func:`trio_ucx.authkey` finds; if they meet by a file or by MPI, rank 0
            makes one.

    Cancellation: a cancelled join has no effect on the others, which go on waiting for this rank. A cancelled block is
    left as with an exception.

    Raises:
        MeetingError: the ranks did not find each other in time.
        RankLostError: a rank was lost.
        NotAdmitted: the authkeys differ; or there is none, and rank 0 runs on another host or as another user. The
            logger ``trio_ucx`` warns at once, but the rank tries again until ``timeout``: an earlier group or a
            stranger may have the port for a moment.
        RuntimeError: no launcher's environment was found; not in a Trio task.
        OSError: rank 0 cannot listen at the meeting point, or write its file there; or it does not accept this rank.
        TypeError, ValueError: a wrong argument, or a wrong value in the environment.
    """
    hide_authkey(options)
    check_in_trio()
    if on_loss not in ("cancel", "continue"):
        raise ValueError(f"on_loss must be 'cancel' or 'continue', not {on_loss!r}")
    for name in options.keys() - ConnectionOptions.__annotations__.keys():
        raise TypeError(f"join() got an unexpected keyword argument {name!r}")
    timeout = check_timeout(timeout, "timeout")
    worker = check_worker(worker)
    authkey = check_authkey(options.pop("authkey", None))
    place = find_place(HiddenDict(os.environ), rank=rank, size=size, meeting=meeting, authkey=authkey)
    members = Members(place.rank, place.size, fatal=on_loss == "cancel")
    scope = BlockScope("trio_ucx.mesh.join")

    def changed(rank: int) -> None:
        if rank in members.lost:
            skip_finalize()
        if members.ended is not None:
            scope.cancel()

    members.on_change.append(changed)
    # Many ranks may come at once: one that is slow to be served must not come again.
    with_timeout: dict[str, Any] = {"connect_timeout": max(10.0, timeout), **options, "authkey": place.authkey}
    async with _services(members, worker, with_timeout) as links:
        try:
            with scope:
                async with _meet(place, links, timeout, allow_anyone) as group:
                    try:
                        yield group
                        await _leave(group)
                    except BaseException as error:
                        members.on_change.remove(changed)
                        await _leave_by_force(group, error)
                        raise
        except BaseExceptionGroup as error:
            if members.ended is not None and error.split(RankLostError)[1] is None:
                raise again(members.ended) from error  # also if the block has a nursery
            raise
        if members.ended is not None:
            raise again(members.ended)


@asynccontextmanager
async def _services(members: Members, worker: Worker | None, options: dict[str, Any]) -> AsyncIterator[Links]:
    """The tasks of a group."""

    def failed(error: Exception) -> None:
        report("trio_ucx.mesh failed", error)
        members.lose(members.rank, f"an internal error: {error!r}")
        links.end()

    async with BackgroundNursery("trio_ucx.mesh", failed) as nursery:
        links = Links(members, nursery, worker, options)
        try:
            yield links
        finally:
            links.end()


@asynccontextmanager
async def _meet(place: Place, links: Links, timeout: float, allow_anyone: bool) -> AsyncIterator[Group]:
    members, worker, options, nursery = links.members, links.worker, links.options, links.nursery
    if place.rank == 0:
        async with open_meeting_point(place, worker, allow_anyone, options) as listeners:
            coordinator = Coordinator(place, members, links, listeners)
            links.suspect = coordinator.suspect
            for listener in listeners:
                nursery.start_soon(links.serve, listener, coordinator.greet)
            await coordinator.meet(timeout)
            yield Group._create(members, links, coordinator)
        return
    follower = Follower(members, links)
    links.suspect = follower.suspect
    async with _joined(place, links, follower, timeout, allow_anyone):
        nursery.start_soon(follower.listen)
        yield Group._create(members, links, follower)


@asynccontextmanager
async def _joined(
    place: Place, links: Links, follower: Follower, timeout: float, allow_anyone: bool
) -> AsyncIterator[None]:
    """Meets the others at rank 0. If it finds the rank 0 of an earlier group, which is ending, it tries again."""
    deadline, problem = trio.current_time() + timeout, ""
    with ExitStack() as stack:
        while True:
            left = max(0.0, deadline - trio.current_time())
            connection = await reach_rank_0(place, left, links.worker, links.options, problem)
            stack.callback(connection.abort)
            assert connection.remote_address is not None
            links.meeting_host = connection.remote_address[0]
            listeners = await open_ucx_listeners(0, worker=links.worker, allow_anyone=allow_anyone, **links.options)
            for listener in listeners:
                stack.callback(listener._close)
                links.nursery.start_soon(links.serve, listener, links.greet)
            try:
                await follower.meet(connection, listeners[0].address[1], max(0.0, deadline - trio.current_time()))
                break
            except NotYet as error:
                problem = str(error)
                stack.close()
                await trio.sleep(_AGAIN)
        yield


async def _leave(group: Group) -> None:
    """The block was left normally."""
    await group._collectives.finish()
    group._leave()
    await group._links.close()
    await group._centre.leave()


async def _leave_by_force(group: Group, error: BaseException) -> None:
    words = _last_words(group, error)
    group._leave()
    skip_finalize()  # the others may never finalise MPI
    with trio.CancelScope(shield=True), trio.move_on_after(_LAST_WORDS):
        await group._centre.leave_with(words)


def _last_words(group: Group, error: BaseException) -> str:
    ended = group._members.ended
    if ended is None:
        return _words(error)
    return ended.reason if ended.rank == group.rank else ""  # the others know the reason already


def _words(error: BaseException) -> str:
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    if isinstance(error, trio.Cancelled):
        return "a cancellation"
    try:
        return repr(error)[:300]
    except Exception:
        return f"a {type(error).__name__}"
