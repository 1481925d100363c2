"""The page is self-contained, reproducible, safe with hostile names, and written completely or not at all."""

import html
import math
import re

import matplotlib
import numpy as np
import pytest

from bigbatch import StateError
from bigbatch.cli.report import plots
from bigbatch.cli.report.text import count, difference, duration, number, size

from .page import Page, report
from .runs import VERIFICATION, write_run

# --- the page is self-contained -------------------------------------------------------------------------------


def test_one_file_without_network_or_script(usual):
    _, text = usual
    page = Page(text)
    assert not [tag for tag, _ in page.tags if tag in ("script", "img", "iframe", "object", "embed")]
    links = [
        value for _, attributes in page.tags for name, value in attributes.items() if name.endswith(("href", "src"))
    ]
    assert all(link.startswith(("#", "data:")) for link in links)
    assert "http://" not in text
    assert "https://" not in text
    assert "@import" not in text


def test_names_inside_the_plots_are_unique_and_all_references_have_targets(tmp_path):
    text = report(write_run(tmp_path / "a"), write_run(tmp_path / "b", micro_batch_size=16))
    names = re.findall(r'\bid="([^"]*)"', text)
    assert len(names) == len(set(names))
    assert set(re.findall(r'href="#([^"]*)"|url\(#([^)]*)\)', text)) != set()
    for pair in re.findall(r'href="#([^"]*)"|url\(#([^)]*)\)', text):
        assert (pair[0] or pair[1]) in names


def test_plots_take_the_colours_of_the_page(usual):
    _, text = usual
    drawn = "".join(re.findall(r'<svg viewBox="[^"]*" role="img".*?</svg>', text, flags=re.DOTALL))
    assert set(re.findall(r"#[0-9a-f]{6}\b", drawn)) == set(), "no colour is fixed"
    assert "currentColor" in drawn
    assert "var(--series-1)" in drawn


def test_plots_have_a_label_and_keep_text_as_text(usual):
    page = Page(usual[1])
    labels = [a["aria-label"] for tag, a in page.tags if tag == "svg" and a.get("role") == "img"]
    assert len(labels) == len(page.plots)
    assert all(labels)
    assert "seconds since training began" in page.text
    assert "1e-08" in page.text


def test_the_same_input_gives_the_same_bytes_whatever_the_users_style(tmp_path):
    folder = write_run(tmp_path / "run")
    first = report(folder)
    with matplotlib.rc_context({"font.size": 30, "axes.facecolor": "red", "svg.hashsalt": None}):
        assert report(folder) == first
        assert matplotlib.rcParams["font.size"] == 30


HOSTILE = "<script>alert(1)</script>\"'&{{ 7*7 }}$x_{1$</style>"


def test_hostile_names_stay_text(tmp_path):
    def change(summary):
        summary.update(task=HOSTILE, framework=HOSTILE, device=HOSTILE, version=HOSTILE, scores={HOSTILE: 0.5})
        summary["comparison"]["worst_weight"] = HOSTILE
        summary["verification"] = {**VERIFICATION, "errors": {HOSTILE: 1e-9}, "causes": [HOSTILE]}

    folders = [write_run(tmp_path / name, change=change, task=HOSTILE) for name in ("_<b>$1$", "空 & co")]
    for chosen in (folders, folders[:1]):
        text = report(*chosen)
        assert "<script" not in text
        assert "<b>" not in text
        assert html.escape(HOSTILE).replace("&#x27;", "&#39;").replace("&quot;", "&#34;") in text
        assert Page(text).values["_<b>$1$", f"scores.{HOSTILE}"] == "0.5"
        assert text.count("</style>") == 1


def test_text_that_utf8_cannot_write(tmp_path):
    folder = write_run(tmp_path / "run", change=lambda summary: summary.update(device="cpu \ud800"))
    assert "device cpu ?" in Page(report(folder)).text


# --- writing ---------------------------------------------------------------------------------------------


def test_a_failed_report_leaves_the_old_one(tmp_path):
    folder = write_run(tmp_path / "run")
    before = report(folder)
    (folder / "summary.json").write_text("{")
    with pytest.raises(StateError):
        report(folder)
    assert (tmp_path / "report.html").read_text(encoding="utf-8") == before
    assert sorted(path.name for path in tmp_path.iterdir()) == ["report.html", "run"]


# --- numbers ------------------------------------------------------------------------------------


def test_numbers_are_readable():
    assert [number(12000), number(0.0512345678), number(None), number(-math.inf)] == [
        "12,000", "0.0512346", "not known", "minus infinite",
    ]  # fmt: skip
    assert [duration(0.0123), duration(9.1), duration(192), duration(7260)] == [
        "0.0123 s", "9.1 s", "3 min 12 s", "2 h 1 min",
    ]  # fmt: skip
    assert [size(0), size(1023), size(31_457_280), size(2**37)] == ["0 B", "1023 B", "30 MiB", "128 GiB"]
    assert [difference(0.0), difference(3.14e-7), difference(math.nan)] == ["0", "3.1e-07", "not a number"]
    assert [count(1, "micro-batch"), count(2, "micro-batch"), count(1200, "step")] == [
        "1 micro-batch", "2 micro-batches", "1,200 steps",
    ]  # fmt: skip


def test_long_runs_are_thinned_without_losing_a_spike():
    ys = np.random.default_rng(0).normal(size=50_000)
    ys[31_234] = 99.0
    xs, kept = plots._thinned(np.arange(50_000.0), ys)
    assert len(xs) <= plots.MAX_POINTS
    assert kept.max() == 99.0
    assert kept.min() == ys.min()
    assert (np.diff(xs) > 0).all()


def test_a_long_run_makes_a_small_page(tmp_path):
    folder = write_run(tmp_path / "run", num_steps=6_000)
    text = report(folder)
    assert len(text) < 1_000_000
    assert "800 steps are drawn" in text
