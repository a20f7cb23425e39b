"""Groups of processes that an existing launcher has started: they find each other, and talk.

::

    async with mesh.join() as group:
        await group.send(data, to=3, tag=7)
        rank, data = await group.receive_from_any(tag=7)
        await group.barrier()

Nothing here starts, places or restarts processes: that is the launcher's.

Imports the top level, and nothing imports it.
"""

from .._util.handles import publish as _publish
from ._errors import MeetingError, RankLostError
from ._group import Group
from ._joining import join

__all__ = ["Group", "MeetingError", "RankLostError", "join"]

_publish(globals(), __name__)
