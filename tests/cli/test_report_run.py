import json
import math

import pytest

from bigbatch import StateError
from bigbatch.cli.report.page import read_run, write_report

from .runs import write_run

# --- damaged folders -------------------------------------------------------------------------------------


def test_contents_of_a_run_folder(tmp_path):
    run = read_run(write_run(tmp_path / "run", change_record=lambda r: r.update(grad_norm="inf")))
    assert run.config["batch_size"] == 256
    assert run.summary.task == "digits"
    assert [record.step for record in run.records] == list(range(48))
    assert run.records[0].grad_norm == math.inf
    assert run.full_batch.summary.num_micro_batches == 1


@pytest.mark.parametrize("end", ['{"step": 48, "ep', '{"step": 48, "name": "\u00e9'.encode()[:-1], b"\0\0\0"])
def test_truncated_last_line_is_left_out(tmp_path, end):
    folder = write_run(tmp_path / "run")
    with (folder / "history.jsonl").open("ab") as file:
        file.write(end if isinstance(end, bytes) else end.encode())
    assert len(read_run(folder).records) == 48


def test_last_line_without_a_newline_counts_if_it_is_complete(tmp_path):
    folder = write_run(tmp_path / "run")
    history = folder / "history.jsonl"
    history.write_text(history.read_text().rstrip("\n"))
    assert len(read_run(folder).records) == 48


def test_lost_times_are_left_out(tmp_path):
    folder = write_run(tmp_path / "run")
    lines = (folder / "times.jsonl").read_text().splitlines(keepends=True)
    lines[20] = '{"step": 20, "seconds": null}\n'
    (folder / "times.jsonl").write_text("".join(lines[:40]))
    run = read_run(folder)
    assert [record.step for record in run.records if record.seconds is None] == [20, *range(40, 48)]
    write_report([folder], tmp_path / "report.html")
    assert "Loss over time" in (tmp_path / "report.html").read_text()


def test_folder_without_a_run(tmp_path):
    with pytest.raises(StateError, match=r"absent/config.toml is missing: pass the folder of a run that has ended"):
        read_run(tmp_path / "absent")


@pytest.mark.parametrize("part", ["", "full_batch"])
@pytest.mark.parametrize("name", ["config.toml", "history.jsonl", "times.jsonl", "summary.json"])
def test_a_missing_file(tmp_path, part, name):
    folder = write_run(tmp_path / "run")
    (folder / part / name).unlink()
    with pytest.raises(StateError, match=rf"{(folder / part / name)} is missing: pass the folder"):
        read_run(folder)


def replaced(text, **values):
    return json.dumps({**json.loads(text), **values})


DAMAGE = {
    "no TOML": ("config.toml", lambda text: text + "= 3\n"),
    "no UTF-8": ("config.toml", lambda text: text.encode() + b"\xff"),
    "no JSON": ("summary.json", lambda text: text[:-10]),
    "empty": ("summary.json", lambda text: ""),
    "a list": ("summary.json", lambda text: "[]"),
    "too deep": ("summary.json", lambda text: "[" * 200_000),
    "a key missing": ("summary.json", lambda text: text.replace('"num_steps"', '"steps"')),
    "a comparison cut": ("summary.json", lambda text: text.replace('"worst_weight"', '"worst"')),
    "a full batch in words": ("summary.json", lambda text: replaced(text, full_batch="no")),
    "a line cut in half": ("history.jsonl", lambda text: text[:100] + "\n" + text[100:]),
    "a step without loss": ("history.jsonl", lambda text: text.replace('"loss"', '"los"', 1)),
    "an empty line": ("history.jsonl", lambda text: text + "\n"),
    "a line that is no object": ("history.jsonl", lambda text: text + "3\n"),
}  # fmt: skip


@pytest.mark.parametrize("kind", DAMAGE)
def test_a_damaged_file_is_named_with_the_remedy(tmp_path, kind):
    folder = write_run(tmp_path / "run")
    name, damage = DAMAGE[kind]
    before = (folder / name).read_text()
    after = damage(before)
    assert after != before
    (folder / name).write_bytes(after if isinstance(after, bytes) else after.encode())
    with pytest.raises(StateError) as error:
        write_report([folder], tmp_path / "report.html")
    message = str(error.value)
    assert message.startswith(f"{folder / name} is damaged (")
    assert message.endswith("): train the run again, or leave its folder out")
    assert "\n" not in message
    assert len(message) < 400
    assert not (tmp_path / "report.html").exists()


def places(tree, path=()):
    for name, value in tree.items():
        yield *path, name
        if isinstance(value, dict):
            yield from places(value, (*path, name))


def wrong_for(value):
    if isinstance(value, str):
        return [3]
    return [{}] if value is None else ["\x1b[31m", 10**400, {"a": []}]


def test_a_value_of_another_type_is_refused(tmp_path):
    """Every value of summary.json and of a step, with text for numbers, and numbers for text."""
    folder = write_run(tmp_path / "run")
    for name in ("summary.json", "history.jsonl"):
        before = (folder / name).read_text()
        first, *rest = [before] if name == "summary.json" else before.splitlines(keepends=True)
        for *path, last in places(json.loads(first)):
            record = part = json.loads(first)
            for each in path:
                part = part[each]
            for value in [] if last == "weight" else wrong_for(part[last]):
                part[last] = value
                (folder / name).write_text(json.dumps(record) + "\n" + "".join(rest))
                with pytest.raises(StateError, match=rf"{folder / name} is damaged \("):
                    read_run(folder)
        (folder / name).write_text(before)
    times = folder / "times.jsonl"
    times.write_text(times.read_text().replace('"seconds": ', '"seconds": "x", "was": ', 1))
    with pytest.raises(StateError, match=r"is damaged \(seconds is 'x'\)"):
        read_run(folder)
    assert len(read_run(write_run(tmp_path / "whole")).records) == 48
