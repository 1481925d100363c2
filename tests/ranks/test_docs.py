"""Runs the code blocks of docs/distributed.md on every rank."""

import re
from pathlib import Path

import pytest
import torch

from tests.docs.test_readme import what_the_reader_has
from tests.torch.training import flat

PAGE = Path(__file__).parents[2] / "docs" / "distributed.md"


@pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning")  # torch.distributed.checkpoint's own
def test_code_of_the_page(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    training, saving = re.findall(r"```python\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.DOTALL)
    begin = "dist.init_process_group()\n"
    assert begin in training  # the process group exists already
    names = what_the_reader_has(Path())
    before = flat(names["model"])
    exec(compile(training.replace(begin, ""), "page", "exec"), names)
    assert not torch.equal(flat(names["model"]), before)
    folder = [str(tmp_path_factory.mktemp("page"))]
    torch.distributed.broadcast_object_list(folder)
    monkeypatch.chdir(folder[0])
    exec(compile(saving, "page", "exec"), names)
    assert (Path(folder[0]) / "checkpoint" / ".metadata").exists()
