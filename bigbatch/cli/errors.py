"""Exit codes, and the errors of a task."""

from ..core.errors import BigBatchError

NOT_EXACT = 1
BAD_INPUT = 2
TASK_RAISED = 3
NOT_WRITTEN = 4
STOPPED = 5
INTERRUPTED = 130  # 128 + SIGINT, as in shells
CLOSED_PIPE = 141  # 128 + SIGPIPE


def code_of_signal(number: int) -> int:
    """The exit code of a process that a signal ended, as in shells."""
    return 128 + number


class TaskError(BigBatchError, ValueError):
    """A task file lacks something, or has something of the wrong type."""


class TaskRaisedError(Exception):
    """The code of a task raised an error; the user needs to see its traceback."""

    def __init__(self, error: BaseException) -> None:
        super().__init__(str(error))
        self.error = error
