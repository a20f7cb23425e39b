"""One connection over UCX: the rules (``_credit``, ``_tag_queue``, ...) carried out over an endpoint.

Three owners have a connection, and :class:`Link` joins them: sending, receiving, and closing. ``transport`` is their
way to UCX, ``share`` is the connection's part of an endpoint that it shares with others, ``buffers`` are messages in
memory. This folder may import the rules and ``ucp``. Imports inside it run in this order: share, transport, buffers,
sending, receiving, closing, link.
"""

from .link import Link as Link
from .link import Options as Options
from .share import Share as Share
from .transport import Transport as Transport
