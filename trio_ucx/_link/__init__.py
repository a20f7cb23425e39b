"""One connection over UCX: the rules (``_rules.credit``, ``_rules.tag_queue``, ...) carried out over an endpoint.

Three owners have a connection, and :class:`Link` joins them: sending, receiving, and closing. ``message_port`` is their
way to UCX, ``buffers`` are messages in memory, ``conversations`` are channels within the connection. This folder may
import the rules and ``ucp``. Imports inside it run in this order: message_port, buffers,
immutable, sending, conversations, receiving, closing, link.
"""

from .conversations import ChannelState as ChannelState
from .link import Link as Link
from .link import Options as Options
from .link import Owner as Owner
from .message_port import MessagePort as MessagePort
