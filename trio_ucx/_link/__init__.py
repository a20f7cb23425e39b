"""One connection over UCX: its rules, which C code has (``_native/link``) and ``_rules``, over an endpoint.

Three owners have a connection, and :class:`Link` joins them: sending, receiving, and closing. ``native`` is the link in
C, ``message_port`` the way to UCX for what C code does not send, ``conversations`` are channels within the connection.
This folder may import the rules and ``ucp``. Imports inside it run in this order: message_port, native, immutable,
sending, conversations, receiving, closing, link.
"""

from .conversations import ChannelState as ChannelState
from .link import Link as Link
from .link import Options as Options
from .link import Owner as Owner
from .message_port import MessagePort as MessagePort
from .native import NativeLink as NativeLink
from .native import QueueFigures as QueueFigures
from .native import divert as divert
from .receiving import Want as Want
