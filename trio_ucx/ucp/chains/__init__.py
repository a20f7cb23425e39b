"""Request chains: programs of remote operations that C code runs, each when what it depends on has ended.

:meth:`Worker.new_chain` makes a chain. An extension: only that method imports this module, when it is called, and a
build may leave it out, with the C code that it needs (``_native/chain``). Modules, lowest first: _errors, _library,
_expressions, _run, _builder, _chain.
"""

from .._util import publish as _publish
from ._builder import Choice as Choice
from ._builder import Retry as Retry
from ._chain import RequestChain as RequestChain
from ._errors import DependencyBoundsError as DependencyBoundsError
from ._errors import DependencyError as DependencyError
from ._errors import DependencyFalse as DependencyFalse
from ._errors import DependencyNotEvaluated as DependencyNotEvaluated
from ._errors import DependencyReferenceError as DependencyReferenceError
from ._errors import NoDependencyResource as NoDependencyResource
from ._expressions import ChainRequest as ChainRequest
from ._expressions import Condition as Condition
from ._expressions import Integer as Integer
from ._expressions import Local as Local
from ._expressions import Piece as Piece
from ._run import SKIPPED as SKIPPED
from ._run import Followed as Followed
from ._run import Outcomes as Outcomes

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
    "Piece",
    "RequestChain",
    "Retry",
]

_publish(globals(), __name__)
