"""What ends a command, and with which exit code."""

from ..core.errors import BigBatchError

NOT_EXACT = 1
BAD_INPUT = 2
TASK_RAISED = 3
NOT_WRITTEN = 4
STOPPED = 5
INTERRUPTED = 130  # as shells have it: 128 + SIGINT
CLOSED_PIPE = 141  # 128 + SIGPIPE


def code_of_signal(number: int) -> int:
    """As shells have it."""
    return 128 + number


class TaskError(BigBatchError, ValueError):
    """A task file is missing something, or has something of the wrong kind."""


class TaskRaisedError(Exception):
    """The code of a task raised; its own traceback is what the user needs to see."""

    def __init__(self, error: BaseException) -> None:
        super().__init__(str(error))
        self.error = error
