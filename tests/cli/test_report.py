import json
import re

import pytest

from bigbatch.cli.report.page import _names_of, read_run, write_report

from .page import Page, assert_readable, assert_same_numbers, report, summary_of
from .runs import VERIFICATION, fail, write_run

# --- one run ---------------------------------------------------------------------------------------------


def test_one_run_has_headline_numbers_and_all_plots(usual):
    folder, text = usual
    page = Page(text)
    assert (
        "digits on torch: 48 steps with a batch of 256 in 8 micro-batches of 32; "
        "the weights differ from those of full-batch training by at most 3e-07" in page.text
    )
    assert_same_numbers(page, "run", summary_of(folder))
    assert page.plots == ["loss", "loss-time", "difference", "grad-norm", "memory", "throughput", "lr"]
    assert "Triangles at the bottom mark 6 steps without any difference." in page.text
    assert_readable(page)


def test_differences_are_those_of_the_two_trainings(usual):
    folder, text = usual
    ours, page = summary_of(folder), Page(text)
    theirs = ours["full_batch"]
    assert json.loads(page.values["run", "difference.loss"]) == ours["loss"] - theirs["loss"]
    assert json.loads(page.values["run", "ratio.seconds"]) == ours["seconds"] / theirs["seconds"]
    assert json.loads(page.values["run", "ratio.peak_bytes"]) == ours["peak_bytes"] / theirs["peak_bytes"]


def test_verification_shows_the_largest_error_first_and_the_causes(usual):
    _, page = usual
    shown = re.findall(r'data-error="([^"]*)" data-value="([^"]*)"', page)
    assert [name for name, _ in shown] == ["layers.0.weight", "layers.2.bias", "layers.0.bias", "layers.2.weight"]
    assert dict(shown) == {name: json.dumps(error) for name, error in VERIFICATION["errors"].items()}
    assert VERIFICATION["causes"][0] in Page(page).text


def test_failed_verification_is_shown_and_a_long_list_folded(tmp_path):
    errors = {f"p{number}": 0.3 / (number + 1) for number in range(30)} | {"broken": "nan"}
    found = {**VERIFICATION, "is_exact": False, "max_error": "nan", "errors": errors, "causes": ["BatchNorm"]}
    text = report(write_run(tmp_path / "run", verification=found))
    assert "Not exact" in text
    assert re.findall(r'data-error="([^"]*)"', text)[:2] == ["broken", "p0"]
    assert "11 more with smaller errors" in text
    assert_readable(Page(text))


def test_configuration_is_exact(tmp_path):
    page = Page(report(write_run(tmp_path / "run", lr=0.00123, note="two words")))
    assert "lr 0.00123" in page.text
    assert "note two words" in page.text
    assert "warmup_steps 6" in page.text


def test_a_constant_learning_rate_is_not_drawn(tmp_path):
    page = Page(report(write_run(tmp_path / "run", change_record=lambda record: record.update(lr=0.001))))
    assert "lr" not in page.plots


# --- what is missing is said in words --------------------------------------------------------------------


def test_without_full_batch(tmp_path):
    page = Page(report(write_run(tmp_path / "run", has_full_batch=False, verification=None)))
    assert "it was not compared with full-batch training" in page.text
    assert "there is no difference to draw" in page.text
    assert "known for one micro-batch size only, 32" in page.text
    assert "The gradient was not verified" in page.text
    assert "difference" not in page.plots
    assert_readable(page)


def test_a_full_batch_that_failed_says_why(tmp_path):
    page = Page(report(write_run(tmp_path / "run", has_full_batch=False, change=fail)))
    assert "full-batch training failed, so there is nothing to compare with" in page.text
    assert "RuntimeError: out of memory" in page.text
    assert_readable(page)


def test_a_full_batch_that_failed_may_leave_half_a_folder(tmp_path):
    folder = write_run(tmp_path / "run", change=fail)
    (folder / "full_batch" / "summary.json").unlink()
    assert read_run(folder).full_batch is None


def test_interrupted_with_nothing_but_a_loss(tmp_path):
    def change(summary):
        summary.update(status="interrupted", peak_bytes=None, scores={}, verification=None)

    def change_record(record):
        record.update(grad_norm=None, lr=None)

    page = Page(report(write_run(tmp_path / "run", change=change, change_record=change_record)))
    assert "then interrupted" in page.text
    assert "No gradient norm was recorded" not in page.text, "the full batch has one"
    assert "Nothing was recorded for accumulated." in page.text
    assert "not known" in page.text
    assert_readable(page)


def test_interrupted_before_the_first_step(tmp_path):
    page = Page(report(write_run(tmp_path / "run", num_steps=0, has_full_batch=False, peak_bytes=None)))
    assert page.plots == []
    assert "No step was finished." in page.text
    assert_readable(page)


@pytest.mark.parametrize("num_steps", [1, 2])
def test_very_short_runs(tmp_path, num_steps):
    page = Page(report(write_run(tmp_path / "run", num_steps=num_steps)))
    assert f"{num_steps} step{'s' * (num_steps > 1)} with" in page.text
    assert "loss" in page.plots
    assert_readable(page)


def test_equal_runs_have_no_difference_to_draw(tmp_path):
    page = Page(report(write_run(tmp_path / "run", noise=0.0)))
    assert "the weights are exactly those of full-batch training" in page.text
    assert "equal to the last bit in every step" in page.text
    assert "difference" not in page.plots


def test_nonfinite_numbers(tmp_path):
    def change_record(record):
        if record["step"] > 40:
            record.update(loss="nan", grad_norm="inf", is_applied=False)

    page = Page(report(write_run(tmp_path / "run", change=lambda s: s.update(loss="nan"), change_record=change_record)))
    assert page.values["run", "loss"] == "nan"
    assert "7 of 48 steps left the weights alone" in page.text
    assert "7 steps are left out because their loss is not finite." in page.text
    assert "difference" in page.plots
    assert_readable(page)


def test_nothing_but_infinite_losses(tmp_path):
    folder = write_run(tmp_path / "run", has_full_batch=False, change_record=lambda record: record.update(loss="inf"))
    page = Page(report(folder))
    assert "The loss is not finite in any step." in page.text
    assert "loss" not in page.plots


def test_huge_numbers_and_one_size(tmp_path):
    folder = write_run(tmp_path / "run", micro_batch_size=256, change_record=lambda record: record.update(loss=1e308))
    assert "loss" in Page(report(folder)).plots, "the full batch has a loss"


def test_an_uneven_batch(tmp_path):
    page = Page(report(write_run(tmp_path / "run", batch_size=100, micro_batch_size=32)))
    assert "a batch of 100 in 4 micro-batches of at most 32" in page.text


# --- several runs ----------------------------------------------------------------------------------------


def test_several_runs_have_a_column_and_a_line_each(tmp_path):
    folders = [
        write_run(
            tmp_path / f"size-{size}", micro_batch_size=size, peak_bytes=800_000 * size, has_full_batch=size != 16
        )
        for size in (8, 16, 32)
    ]
    text = report(*folders)
    page = Page(text)
    for folder in folders:
        assert_same_numbers(page, folder.name, summary_of(folder))
    assert "Throughput against micro-batch size" in page.text
    assert "size-16 : digits on torch" in page.text
    assert "not trained" in page.text
    loss = text[text.index('<figure id="loss"') : text.index('<figure id="loss-time"')]
    assert len(re.findall(r'id="loss-line-\d"', loss)) == 5, "three runs, two with a full batch"
    memory = text[text.index('<figure id="memory"') : text.index('<figure id="throughput"')]
    assert len(re.findall(r'id="memory-point-\d"', memory)) == 5
    assert_readable(page)


def test_many_runs_can_be_distinguished(tmp_path):
    folders = [write_run(tmp_path / f"run-{number}", num_steps=3) for number in range(12)]
    text = report(*folders)
    loss = text[text.index('<figure id="loss"') : text.index("</figure>")]
    swatches = re.findall(r'<path d="M0 4H30" style="([^"]*)"', loss)
    assert len(swatches) == 13
    assert len(set(swatches)) == 13


def test_several_runs_of_one_size_show_throughput_over_steps(tmp_path):
    page = Page(report(*(write_run(tmp_path / name, has_full_batch=False) for name in "ab")))
    assert "Throughput over steps" in page.text
    assert_readable(page)


def test_equal_names_are_shown_with_their_parent_folders(tmp_path):
    folders = [write_run(tmp_path / parent / "run", num_steps=4) for parent in "ab"]
    assert _names_of(folders) == ["a/run", "b/run"]
    assert "a/run" in Page(report(*folders)).text


def test_the_same_folder_twice_is_one_run(tmp_path, monkeypatch):
    folder = write_run(tmp_path / "run")
    monkeypatch.chdir(folder)
    write_report([folder, folder / ".." / "run"], tmp_path / "twice.html")
    write_report([folder], tmp_path / "once.html")
    assert (tmp_path / "twice.html").read_bytes() == (tmp_path / "once.html").read_bytes()
