"""The exceptions of calls."""

from __future__ import annotations

import trio

from .. import Error


class CallError(Error):
    """A call has failed.

    Attributes:
        may_have_run: False if it is certain that no handler has begun to work on the call.
    """

    may_have_run: bool = True


class RemoteError(CallError):
    """The handler of a call raised an exception.

    Attributes:
        type: the name of the exception's class, such as ``"KeyError"`` or ``"store.Locked"``.
        text: what ``str`` of the exception gave.
        remote_traceback: the traceback at the server, as text; empty for the types that the method declares.
        may_have_run: True.
    """

    def __init__(self, type: str, text: str, remote_traceback: str = "") -> None:
        super().__init__(f"{type}: {text}" if text else type)
        self.type = type
        self.text = text
        self.remote_traceback = remote_traceback


class CallRefused(CallError):
    """The server could not read the call, and did not run it.

    Attributes:
        may_have_run: False.
    """

    may_have_run = False


class UnknownMethod(CallRefused):
    """The server has no method of this name, or it is a stream.

    Attributes:
        may_have_run: False.
    """


class BadArguments(CallRefused, TypeError):
    """The arguments are not those of the method, or of other types than its annotations say.

    Attributes:
        may_have_run: False.
    """


class CallLost(CallError, trio.BrokenResourceError):
    """The connection ended, or the server broke the call off, before there was a reply; or there is no connection.

    Attributes:
        may_have_run: False if it is certain that no handler has begun to work on the call.
    """

    def __init__(self, text: str, *, may_have_run: bool) -> None:
        super().__init__(text)
        self.may_have_run = may_have_run


class CallTimedOut(CallError, trio.TooSlowError):
    """The ``timeout`` of a call has passed, or its deadline at the server.

    Attributes:
        may_have_run: False if the call was not sent, because it waited for a connection or for other calls.
    """

    def __init__(self, text: str, *, may_have_run: bool) -> None:
        super().__init__(text)
        self.may_have_run = may_have_run
