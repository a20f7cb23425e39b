"""Broadcasts a few bytes through MPI, with mpi4py: how ranks that only MPI connects learn the address of rank 0.

``MPI_Init`` waits until every rank has called it, and so does ``MPI_Finalize``. Neither can be interrupted. Therefore:

* MPI is initialised in a thread, which a cancelled :func:`broadcast` leaves behind.
* If it was initialised here, it is finalised when the interpreter exits, as mpi4py does by itself; but not after a
  broadcast that was cancelled or failed, and not after :func:`skip_finalize`, because a rank that is lost would never
  take part. A launcher of MPI programs then ends the other ranks: for it, such an exit is a failure.

A program that uses MPI itself is left alone: if MPI is initialised already, it is neither initialised nor finalised
here. A program that imports ``mpi4py.MPI`` later finds MPI initialised, as after any import of it.
"""

from __future__ import annotations

import atexit
import ctypes
import sys
from typing import Any

import attrs
import trio

from .. import Backoff
from .._opening.backoff import waits

#: How long to wait between two looks at a request that MPI has not completed.
_LOOKS = Backoff(first=0.0005, longest=0.02)
#: Longer values are a mistake.
_MAX_LENGTH = 2**20


@attrs.define
class _State:
    """What this module knows about MPI in this process."""

    #: Whether a rank may be lost, which ``MPI_Finalize`` would wait for.
    rank_lost: bool = False
    #: Requests and their buffers, which MPI may still use, of broadcasts that were cancelled.
    pending: list[Any] = attrs.field(factory=list)


_state = _State()


async def broadcast(value: bytes | None, root: int = 0, *, size: int | None = None) -> bytes:
    """Broadcasts bytes from one rank of ``MPI_COMM_WORLD`` to all others. All ranks must call it.

    Args:
        value: what to send; None on all ranks but ``root``.
        root: the rank that sends.
        size: how many ranks the launcher has started. It differs from MPI's number if mpi4py uses another MPI.

    Returns:
        What the root has sent.

    Cancellation: the other ranks may wait for ever; and MPI will not be finalised if it was initialised here.

    Raises:
        RuntimeError: mpi4py or MPI does not work, or MPI has started another number of ranks; the text says why.
        ValueError: ``value`` is too long.
    """
    if value is not None and len(value) > _MAX_LENGTH:
        raise ValueError(f"the value has {len(value)} bytes; at most {_MAX_LENGTH} can be broadcast")
    try:
        MPI = await trio.to_thread.run_sync(_initialise, abandon_on_cancel=True)
        world = MPI.COMM_WORLD
        if size is not None and world.Get_size() != size:
            library = MPI.Get_library_version().splitlines()[0].strip(" \0")
            raise RuntimeError(
                f"the launcher has started {size} ranks, but MPI has {world.Get_size()}: mpi4py uses another MPI than "
                f"the launcher's ({library})"
            )
        if (value is None) == (world.Get_rank() == root):
            raise RuntimeError(
                f"rank {world.Get_rank()} of MPI has another rank for its launcher: let the ranks meet at host:port"
            )
        length = bytearray((len(value) if value is not None else 0).to_bytes(8, "big"))
        await _finish(world, length, root, MPI)
        data = bytearray(value if value is not None else int.from_bytes(length, "big"))
        await _finish(world, data, root, MPI)
        return bytes(data)
    except BaseException:
        skip_finalize()
        raise


def skip_finalize() -> None:
    """Says that a rank was lost: MPI will not be finalised at exit if it was initialised here.

    Otherwise this process could wait for that rank for ever.
    """
    _state.rank_lost = True


async def _finish(world: Any, buffer: bytearray, root: int, MPI: Any) -> None:
    """Broadcasts a buffer. An MPI request of this kind cannot be cancelled; it keeps its buffer if the task is."""
    request = world.Ibcast([buffer, MPI.BYTE], root)
    try:
        for wait in waits(_LOOKS):
            if request.Test():
                break
            await trio.sleep(wait)
    except BaseException:
        _state.pending.append((request, buffer))
        raise


def _initialise() -> Any:
    """Imports mpi4py and initialises MPI, unless the program has. Runs in a thread, and may take for ever."""
    imported = "mpi4py.MPI" in sys.modules
    try:
        import mpi4py

        if not imported:
            mpi4py.rc.initialize = False  # only for now: the next lines do what mpi4py does
            mpi4py.rc.finalize = False
        from mpi4py import MPI
    except (ImportError, RuntimeError) as error:
        raise RuntimeError(
            f"mpi4py cannot be used: {error}. Install one for the launcher's MPI, or let the ranks meet at host:port"
        ) from error
    if MPI.Is_finalized():
        raise RuntimeError("this program has finalised MPI already; MPI cannot be started twice")
    if not MPI.Is_initialized():
        _init_thread(MPI)
        atexit.register(_finalise, MPI)
    return MPI


def _init_thread(MPI: Any) -> None:
    """``MPI.Init_thread``, without the GIL: mpi4py holds it there, and this process could not even time out."""
    try:
        function = ctypes.CDLL(MPI.__file__).MPI_Init_thread
    except (OSError, AttributeError):  # it is linked in some other way
        MPI.Init_thread(MPI.THREAD_MULTIPLE)
        return
    provided = ctypes.c_int()
    status = function(None, None, ctypes.c_int(MPI.THREAD_MULTIPLE), ctypes.byref(provided))
    if status != MPI.SUCCESS:
        raise RuntimeError(
            f"MPI_Init_thread failed: {MPI.Get_error_string(status)}. Let the ranks meet at host:port, without MPI"
        )
    for communicator in (MPI.COMM_SELF, MPI.COMM_WORLD):
        communicator.Set_errhandler(MPI.ERRORS_RETURN)  # as mpi4py does: its errors are exceptions


def _finalise(MPI: Any) -> None:
    if not _state.rank_lost and not MPI.Is_finalized():
        MPI.Finalize()
