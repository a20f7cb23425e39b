"""What can go wrong with the dependencies of a request chain."""

from __future__ import annotations

from .._status import Error


class DependencyError(Error):
    """A request of a :class:`RequestChain` did not run, because of what it depends on."""


class DependencyFalse(DependencyError):
    """Its condition was false, after all retries."""


class DependencyNotEvaluated(DependencyError):
    """Something that it depends on failed or was not run, so nobody knows whether its condition is true."""


class DependencyReferenceError(DependencyError, ValueError):
    """It refers to a request that is unknown, added later, of another chain or gone; or to more than a result has."""


class DependencyBoundsError(DependencyError, ValueError):
    """A computed offset, length or choice is out of bounds: nothing was posted."""


class NoDependencyResource(DependencyError):
    """The chain has no room for this request, or for what it depends on: make it with more ``capacity``."""
