"""The report in a real browser: headless Chromium, driven by selenium."""

import json
import shutil

import pytest

from bigbatch.cli.report.page import write_report

from .page import summary_of
from .runs import fail, write_run

webdriver = pytest.importorskip("selenium.webdriver", reason="selenium is not installed")

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
DRIVER = shutil.which("chromedriver")
FLAGS = (
    "--headless=new", "--no-sandbox", "--disable-gpu", "--no-first-run", "--disable-background-networking",
    "--disable-component-update", "--disable-sync",
)  # fmt: skip
WIDTHS = (390, 1400)

pytestmark = [
    pytest.mark.skipif(CHROMIUM is None, reason="Chromium is not installed"),
    pytest.mark.skipif(DRIVER is None, reason="Chromium's driver, chromedriver, is not installed"),
]


@pytest.fixture(scope="module")
def browser(tmp_path_factory):
    options = webdriver.ChromeOptions()
    options.binary_location = CHROMIUM
    for flag in (*FLAGS, f"--user-data-dir={tmp_path_factory.mktemp('profile')}"):
        options.add_argument(flag)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    driver = webdriver.Chrome(options=options, service=webdriver.ChromeService(DRIVER))
    yield driver
    driver.quit()


@pytest.fixture(scope="module")
def pages(tmp_path_factory):
    """All kinds of reports, and their run folders."""
    base = tmp_path_factory.mktemp("runs")
    sizes = [write_run(base / f"size-{size}", micro_batch_size=size, peak_bytes=800_000 * size) for size in (8, 16, 32)]
    long_name = "a-name-that-is-far-too-long-for-the-screen-of-a-phone-" * 3
    kinds = {
        "one": [write_run(base / "one")],
        "several": sizes,
        "failed": [write_run(base / "failed", has_full_batch=False, change=fail)],
        "long": [write_run(base / long_name, change=lambda summary: summary.update(task=long_name * 2)), *sizes],
    }
    for kind, folders in kinds.items():
        write_report(folders, base / f"{kind}.html")
    return base, kinds


def show(browser, pages, kind, *, width=1400, scheme="light"):
    metrics = {"width": width, "height": 900, "deviceScaleFactor": 1, "mobile": width < 500}
    browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", metrics)
    feature = {"name": "prefers-color-scheme", "value": scheme}
    browser.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": [feature]})
    browser.get((pages[0] / f"{kind}.html").as_uri())
    assert browser.execute_script("return innerWidth") == width


KINDS = ("one", "several", "failed", "long")
BOXES = """
return [...document.querySelectorAll('figure > svg')].map(svg => {
  const box = svg.getBoundingClientRect();
  const lines = [...svg.querySelectorAll('g[id*="-line-"] path, g[id*="-point-"] use')];
  const drawn = lines.filter(line => { const b = line.getBoundingClientRect(); return b.width + b.height > 0; });
  const texts = [...svg.querySelectorAll('text')].map(text => text.getBoundingClientRect());
  const spills = texts.filter(b => b.left < box.left - 1 || b.right > box.right + 1).length;
  return {name: svg.parentElement.id, left: box.left, right: box.right, width: box.width, height: box.height,
          drawn: drawn.length, spills: spills, font: Math.min(...texts.map(b => b.height))};
});
"""


@pytest.mark.each_value
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("width", WIDTHS)
def test_every_plot_is_visible_and_nothing_scrolls_sideways(browser, pages, kind, width):
    show(browser, pages, kind, width=width)
    boxes = browser.execute_script(BOXES)
    assert len(boxes) >= 5
    for box in boxes:
        assert box["width"] > 250, box
        assert box["height"] > 150, box
        assert box["left"] >= 0, box
        assert box["right"] <= width, box
        assert box["drawn"] > 0, box
        assert box["spills"] == 0, box
        assert box["font"] >= 8, box
    assert browser.execute_script("return document.documentElement.scrollWidth") <= width
    browser.execute_script("window.scrollTo(500, 0)")
    assert browser.execute_script("return window.scrollX") == 0


@pytest.mark.parametrize("kind", KINDS)
def test_console_is_empty(browser, pages, kind):
    browser.get_log("browser")
    show(browser, pages, kind)
    assert browser.get_log("browser") == []


def test_negative_control_console_shows_errors(browser, pages):
    browser.get_log("browser")
    text = (pages[0] / "one.html").read_text(encoding="utf-8")
    broken = text.replace("</main>", '<img src="https://example.invalid/x.png"><script>x()</script></main>')
    (pages[0] / "broken.html").write_text(broken, encoding="utf-8")
    show(browser, pages, "broken")
    told = " ".join(entry["message"] for entry in browser.get_log("browser"))
    assert "Content Security Policy" in told


@pytest.mark.parametrize("kind", ["one", "several"])
def test_numbers_are_those_of_the_summary(browser, pages, kind):
    show(browser, pages, kind)
    script = (
        "return [...document.querySelectorAll('[data-key]')].map(e => [e.dataset.run, e.dataset.key, e.dataset.value])"
    )
    shown = {(run, key): json.loads(value) for run, key, value in browser.execute_script(script)}
    num_compared = 0
    for folder in pages[1][kind]:
        for (run, key), value in shown.items():
            if run == folder.name and not key.startswith(("difference.", "ratio.")):
                expected = summary_of(folder)
                for part in key.split("."):
                    expected = expected[part]
                assert value == expected, key
                num_compared += 1
    assert num_compared >= 15 * len(pages[1][kind])


COLOURS = """
const colour = (selector, property) => getComputedStyle(document.querySelector(selector))[property];
return [colour('body', 'backgroundColor'), colour('body', 'color'), colour('figure > svg text', 'fill'),
        colour('figure > svg g[id*="-line-"] path', 'stroke'), colour('figure', 'backgroundColor')];
"""


def luminance(colour):
    parts = [int(part) / 255 for part in colour[colour.index("(") + 1 : -1].split(",")[:3]]
    linear = [part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


def contrast(one, other):
    darker, lighter = sorted([luminance(one), luminance(other)])
    return (lighter + 0.05) / (darker + 0.05)


def test_dark_mode_changes_page_and_plots(browser, pages):
    found = {}
    for scheme in ("light", "dark"):
        show(browser, pages, "one", scheme=scheme)
        page, text, label, line, card = found[scheme] = browser.execute_script(COLOURS)
        assert text == label, "the text of a plot has the colour of the page's"
        assert contrast(page, text) > 7
        assert contrast(card, label) > 7
        assert contrast(card, line) > 3
    assert luminance(found["light"][0]) > 0.8
    assert luminance(found["dark"][0]) < 0.05
    assert all(light != dark for light, dark in zip(found["light"], found["dark"], strict=True))


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_all_line_colours_are_visible(browser, pages, scheme):
    show(browser, pages, "one", scheme=scheme)
    script = """
    const probe = document.body.appendChild(document.createElement('i'));
    return ['--card', '--series-0', '--series-1', '--series-2', '--series-3', '--series-4', '--series-5'].map(name => {
      probe.style.color = `var(${name})`; return getComputedStyle(probe).color; });
    """
    card, *series = browser.execute_script(script)
    assert len(set(series)) == 6
    for colour in series:
        assert contrast(card, colour) > 3, colour
