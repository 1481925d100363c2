"""Exit codes, and the errors of a task."""

from ..core.errors import BigBatchError

NOT_EXACT = 1
BAD_INPUT = 2
TASK_RAISED = 3
NOT_WRITTEN = 4
STOPPED = 5
BY_SIGNAL = 128  # plus the number of the signal, as in shells
INTERRUPTED = BY_SIGNAL + 2
CLOSED_PIPE = BY_SIGNAL + 13


class TaskError(BigBatchError, ValueError):
    """A task file lacks something, or has something of the wrong type."""


class TaskRaisedError(Exception):
    """The code of a task raised an error; the user needs to see its traceback."""

    def __init__(self, error: BaseException) -> None:
        super().__init__(str(error))
        self.error = error
