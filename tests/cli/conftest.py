import pytest

from .page import report
from .runs import write_run


@pytest.fixture(scope="session")
def usual(tmp_path_factory):
    """A run with its full batch, and the text of its report; for tests that only read."""
    folder = write_run(tmp_path_factory.mktemp("usual") / "run")
    return folder, report(folder)
