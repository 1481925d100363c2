"""Everything that bigbatch raises on purpose.

A message says what was found, what was expected, and what to do. Parameters and optimizer are unchanged; an
interrupted step keeps its gradients, and a failed micro_batch() may drop the open window.
"""

import contextlib
import os
import sys
import warnings


class BigBatchError(Exception):
    """The parent of everything that bigbatch raises on purpose."""


# tells TensorFlow's AutoGraph that it can raise the same class again, with the user's lines
BigBatchError.__init__ = Exception.__init__  # type: ignore[method-assign]


class OptionError(BigBatchError, ValueError):
    """An argument has a value that cannot work."""


class BatchError(BigBatchError, ValueError):
    """A batch or a stream of micro-batches cannot be cut or fed as asked."""


class WeightError(BigBatchError, ValueError):
    """A weight is negative, not finite, or of the wrong kind."""


class LossError(BigBatchError, ValueError):
    """A loss is not a scalar, has no graph, or reaches no parameter."""


class NonFiniteError(BigBatchError, ArithmeticError):
    """A gradient or a loss is not finite, and the caller asked for an error."""


class GradientError(BigBatchError, RuntimeError):
    """The parameters hold gradients that did not come from this window."""


class OrderError(BigBatchError, RuntimeError):
    """Calls came in an order that makes no sense."""


class Interrupted(BigBatchError):  # noqa: N818 - nothing went wrong
    """A step stopped between two micro-batches, because it was asked to. Its gradients so far are kept."""


class CaptureError(BigBatchError, RuntimeError):
    """A pass cannot be captured as a CUDA graph, or its replay is not what it should be."""


class RankError(BigBatchError, RuntimeError):
    """Another process that trains the same model refused, so this one did nothing either."""


class StateError(BigBatchError, ValueError):
    """A saved state does not fit the object that should load it."""


class MissingExtraError(BigBatchError, ImportError):
    """Something optional is not installed; the message names the extra."""


class BigBatchWarning(UserWarning):
    """A problem that does not stop training but that the user should know of."""


_OURS = (os.path.dirname(os.path.dirname(__file__)), contextlib.__file__)


def warn(message: str) -> None:
    """Issues a BigBatchWarning that points to the user's line, however deep inside bigbatch it is called."""
    frame, level = sys._getframe(1), 2
    while frame.f_back is not None and frame.f_code.co_filename.startswith(_OURS):
        frame, level = frame.f_back, level + 1
    warnings.warn(message, BigBatchWarning, stacklevel=level)
