"""Reports in Chromium: on a phone, in dark mode, and without a network."""

from pathlib import Path

import pytest

from lightning_sm.record.prices import Prices
from lightning_sm.record.runs import read_run
from lightning_sm.report.figures import Figures
from lightning_sm.report.page import render
from tests.integration.report.browser import PROGRAM, browser
from tests.unit.report.recorded import input_bound

pytestmark = [
    pytest.mark.chromium,
    pytest.mark.skipif(PROGRAM is None, reason="Chromium is not installed (Debian: chromium, fonts-dejavu-core)"),
]
DOCS = Path(__file__).parents[3] / "docs"
WIDTH = "Math.max(document.documentElement.scrollWidth, document.body.scrollWidth)"
COLOUR = "getComputedStyle(document.{}).{}"


@pytest.fixture(scope="module")
def reports(tmp_path_factory):
    """Reports of one run, and of two runs side by side."""
    folder = tmp_path_factory.mktemp("reports")
    runs = [
        Figures(read_run(input_bound(folder / name, outcome=how)))
        for name, how in (("a", "failed"), ("b", "succeeded"))
    ]
    for number in (1, 2):
        (folder / f"{number}.html").write_text(render(runs[:number], Prices()), encoding="utf-8")
    return folder


@pytest.fixture
def page(tmp_path):
    """A page in a new Chromium."""
    with browser(tmp_path) as shown:
        yield shown


def test_reports_open_everywhere(page, reports):
    """At every width, a report does not scroll sideways, loads no other file and logs no error."""
    for name in ("1.html", "2.html"):
        for width in (390, 1000, 1600):
            page.open(reports / name, width=width)
            assert page.evaluate(WIDTH) <= width, f"{name} is too wide for {width} pixels"
            assert page.evaluate("innerWidth") == width
            page.evaluate("document.querySelectorAll('details').forEach(one => one.open = true)")
            assert page.evaluate(WIDTH) <= width, f"{name} with its tables is too wide for {width} pixels"
            assert page.requests == [(reports / name).as_uri()]
            assert page.errors == []


def test_text_in_pictures_can_be_read(page, reports):
    """Text in figures is readable even on a phone, where a figure keeps its size and scrolls sideways."""
    for width in (390, 1000):
        page.open(reports / "1.html", width=width)
        sizes = page.evaluate(
            "[...document.querySelectorAll('figure text')].filter(one => one.getClientRects().length)"
            ".map(one => one.getBoundingClientRect().height).filter(height => height > 0)"
        )
        assert min(sizes) > 8


def test_the_first_screen_of_a_phone_has_the_verdict_and_the_numbers(page, reports):
    """On a phone, the verdict and the numbers are visible without scrolling."""
    page.open(reports / "1.html", width=390, height=844)
    assert page.evaluate("document.querySelector('dl.numbers').getBoundingClientRect().bottom") < 844


def test_each_picture_of_a_report_has_an_end(page, reports, monkeypatch):
    """Reports have the elements at which docs/pictures.py crops its screenshots.

    Without this test, a missing element would only be noticed after jobs that take minutes.
    """
    monkeypatch.syspath_prepend(str(DOCS))
    import pictures

    for name, picture in pictures.REPORTS.items():
        for width in picture.widths.values():
            page.open(reports / f"{1 + ('side-by-side' in name)}.html", width=width)
            assert picture.height(page) > 0, name


def test_the_dark_is_dark(page, reports):
    """In light and dark mode, text and figures have the same colour and contrast with the page."""
    colours = {}
    for is_dark in (False, True):
        page.open(reports / "1.html", is_dark=is_dark)
        paper = page.evaluate(COLOUR.format("body", "backgroundColor"))
        ink = page.evaluate(COLOUR.format("body", "color"))
        drawn = page.evaluate(COLOUR.format("querySelector('figure text')", "fill"))
        assert drawn == ink
        colours[is_dark] = (paper, ink)
    light, dark = (
        {
            name: sum(map(int, value[4:-1].split(",")))
            for name, value in zip(("paper", "ink"), colours[key], strict=True)
        }
        for key in (False, True)
    )
    assert light["paper"] - light["ink"] > 500
    assert dark["ink"] - dark["paper"] > 500


def test_a_page_that_loads_something_would_be_noticed(page, tmp_path):
    """The checks above detect console errors, requests for other files, and pages that are too wide."""
    file = tmp_path / "bad.html"
    file.write_text('<img src="missing.png"><script>console.error("x")</script><div style="width: 2000px">wide</div>')
    page.open(file, width=390)
    assert (tmp_path / "missing.png").as_uri() in page.requests
    assert page.errors
    assert page.evaluate(WIDTH) > 390
