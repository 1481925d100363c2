"""Reads a report for the tests."""

import json
import re
from html.parser import HTMLParser

from bigbatch.cli.report.page import write_report


class Page(HTMLParser):
    """The tags, the text and the numbers of a page."""

    def __init__(self, text):
        super().__init__()
        self.tags, self.values, self.words = [], {}, []
        self._is_style = False
        self.feed(text)

    def handle_starttag(self, tag, attributes):
        attributes = dict(attributes)
        self.tags.append((tag, attributes))
        self._is_style = tag == "style"
        if "data-key" in attributes:
            self.values[attributes["data-run"], attributes["data-key"]] = attributes["data-value"]

    def handle_endtag(self, tag):
        self._is_style = False

    def handle_data(self, data):
        if not self._is_style:
            self.words.append(data)

    @property
    def text(self):
        return " ".join(" ".join(self.words).split())

    @property
    def plots(self):
        return [attributes["id"] for tag, attributes in self.tags if tag == "figure"]


def report(*folders):
    path = folders[0].parent / "report.html"
    write_report(folders, path)
    return path.read_text(encoding="utf-8")


def assert_readable(page):
    """Asserts that no None, NaN or null is left in the text."""
    found = re.findall(r"\b(None|nan|inf|null|Undefined)\b", page.text)
    assert not found, f"the page says {found}"


def assert_same_numbers(page, name, summary):
    for key in ("loss", "seconds", "samples_per_second", "peak_bytes", "num_steps", "num_samples", "batch_size"):
        assert json.loads(page.values[name, key]) == summary[key]
    for score, value in summary["scores"].items():
        assert json.loads(page.values[name, f"scores.{score}"]) == value
    if summary["full_batch"]:
        for key in ("loss", "seconds", "samples_per_second", "peak_bytes"):
            assert json.loads(page.values[name, f"full_batch.{key}"]) == summary["full_batch"][key]
        for key in ("max_weight_difference", "max_loss_difference"):
            assert json.loads(page.values[name, f"comparison.{key}"]) == summary["comparison"][key]


def summary_of(folder):
    return json.loads((folder / "summary.json").read_text())
