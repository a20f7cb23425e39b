"""Request chains: programs of remote operations that C code runs, each when what it depends on has ended.

:meth:`.Worker.new_chain` makes a chain. An extension: only that method imports this module, when it is called, and a
build may leave it out, with the C code that it needs (``_native/chain``). Modules, lowest first: _errors, _library,
_expressions, _run, _builder, _chain.
"""

from ..._util.handles import publish as _publish
from ._builder import Choice, Retry
from ._chain import RequestChain
from ._errors import (
    DependencyBoundsError,
    DependencyError,
    DependencyFalse,
    DependencyNotEvaluated,
    DependencyReferenceError,
    NoDependencyResource,
)
from ._expressions import ChainRequest, Condition, Integer, Local, ResultSlice
from ._run import SKIPPED, Followed, Outcomes

__all__ = [
    "SKIPPED",
    "ChainRequest",
    "Choice",
    "Condition",
    "DependencyBoundsError",
    "DependencyError",
    "DependencyFalse",
    "DependencyNotEvaluated",
    "DependencyReferenceError",
    "Followed",
    "Integer",
    "Local",
    "NoDependencyResource",
    "Outcomes",
    "ResultSlice",
    "RequestChain",
    "Retry",
]

_publish(globals(), __name__)
