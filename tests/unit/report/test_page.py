"""The page of a report: what it says, and what it must not do."""

import re
from html.parser import HTMLParser

import pytest

from lightning_sm.record.events import Metrics
from lightning_sm.record.prices import Prices
from lightning_sm.record.runs import read_run
from lightning_sm.report import page
from lightning_sm.report.charts import thinned
from lightning_sm.report.figures import Figures
from tests.unit.report.recorded import BEGIN, head, input_bound, steps, use, write

PRICES = Prices({"ml.g5.xlarge": 1.41, "ml.c5.xlarge": 0.2}, source="--price")


def rendered(*folders, prices=PRICES):
    """The page about the runs in some folders."""
    return page.render([Figures(read_run(folder)) for folder in folders], prices)


class Text(HTMLParser):
    """The text of a page, without pictures, and the attributes that may load something."""

    def __init__(self, text):
        super().__init__()
        self.words = []
        self.links = []
        self.tags = []
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        """Note what could load something."""
        self.tags.append(tag)
        self.links += [value for name, value in attrs if name in ("src", "href", "xlink:href", "srcset", "action")]

    def handle_data(self, data):
        """Note words."""
        self.words.append(data)


def test_the_verdict_comes_first_and_then_four_numbers(tmp_path):
    """What a phone's first screen shows answers whether it worked, how long, for how much, and whether it waited."""
    text = " ".join(" ".join(Text(rendered(input_bound(tmp_path)).partition("<body")[2]).words).split())
    begin = "job Succeeded after 72 s. Training waits 58% of the time for the transforms"
    assert begin in text
    numbers = "outcome succeeded duration 72 s cost $0.032 waiting for data 58%"
    assert numbers in text
    titles = [
        "Time of a step",
        "What to change",
        "Where the time went",
        "Hosts",
        "Loss and metrics",
        "Events",
        "How it was measured",
    ]
    places = [text.index(part) for part in (begin, numbers, *(f" {title} " for title in titles))]
    assert places == sorted(places)


def test_the_page_loads_nothing_and_runs_nothing(tmp_path):
    """It opens offline, in mail programs and on a phone."""
    html = rendered(input_bound(tmp_path))
    found = Text(html)
    assert all(link.startswith(("data:", "#")) for link in found.links)
    assert not {"script", "iframe", "object", "embed", "form"} & set(found.tags)
    assert "default-src 'none'" in html
    assert not re.search(r"url\((?!#)", html)


def test_text_of_users_is_text(tmp_path):
    """A reason may hold HTML, and a metric's name what Matplotlib takes for mathematics."""
    html = rendered(input_bound(tmp_path / "a<b>$x$", outcome="failed"))
    assert "&lt;b&gt;$x$&lt;/b&gt; &amp; so on" in html
    assert "<b>" not in html


def test_names_with_dollars_can_be_drawn(tmp_path):
    """In hosts, metrics and runs."""
    hosts = {"algo-1": "trainer", "a$b^{": "trainer"}
    write(tmp_path, head(1, hosts=hosts, job="r$_{"), steps(3), Metrics(BEGIN + 3, 1, 0, {"$a^": 1.0}), use(4))
    assert "r$_{" in rendered(tmp_path, tmp_path)


def test_the_same_record_gives_the_same_page(tmp_path):
    """Byte for byte: reports can be compared."""
    folder = input_bound(tmp_path)
    assert rendered(folder) == rendered(folder)


def test_ids_are_unique(tmp_path):
    """Pictures of one page refer to their own hatches and clips only."""
    ids = re.findall(r'<(?:clipPath|pattern|path) id="([^"]+)"', rendered(input_bound(tmp_path)))
    hatches = [name for name in ids if name.startswith(("h", "p"))]
    assert len(hatches) == len(set(hatches))


def test_colours_are_those_of_the_page(tmp_path):
    """Ink, grid and paper are variables, so that one file is right in the dark, too."""
    html = rendered(input_bound(tmp_path))
    assert {"#010203", "#040506", "#070809"}.isdisjoint(re.findall("#[0-9a-f]{6}", html))
    assert "var(--ink)" in html
    assert "prefers-color-scheme: dark" in html


def test_every_picture_has_words(tmp_path):
    """Who does not see it reads its label, and its numbers in tables."""
    html = rendered(input_bound(tmp_path))
    labels = re.findall(r'<figure role="img" aria-label="([^"]+)"', html)
    assert len(labels) == html.count("<figure") == 4
    assert labels[0] == (
        "Time of a step over the run. On average: waiting for data 58%, to the device 2%, forward 10%, backward, "
        "with gradient exchange 20%, optimizer 5%, other 5%."
    )
    assert html.count("<details") >= 7


def test_runs_are_side_by_side(tmp_path):
    """Each has its column; what can be compared has one picture."""
    input_bound(tmp_path / "a", outcome="interrupted")
    input_bound(tmp_path / "a", attempt=2, begin=100.0)
    html = rendered(tmp_path / "a", input_bound(tmp_path / "b"))
    text = " ".join(" ".join(Text(html).words).split())
    assert "Succeeded after 2 min 24 s in 2 attempts" in text
    assert "Time of a step: all runs" in text
    assert text.count("What to change") == 2


def test_a_run_without_anything_has_a_page(tmp_path):
    """A job that failed at its start has a report, too, which says what there is."""
    write(tmp_path, head(0, who="launcher"), use(1), who="launcher")
    text = " ".join(Text(rendered(tmp_path, prices=Prices())).words)
    assert "The end is not recorded" in text
    assert "No training step is recorded." in text
    assert "no prices" in text


def test_without_matplotlib_it_says_what_to_install(tmp_path, monkeypatch):
    """The extra is named, in one line."""
    monkeypatch.setattr(page, "_NEEDED", ("matplotlib", "no_such_library"))
    with pytest.raises(page.JobConfigError, match=r"needs no_such_library: pip install 'lightning-sm\[report\]'"):
        rendered(input_bound(tmp_path))


@pytest.mark.parametrize("number", [0, 1, 200, 201, 1999])
def test_long_curves_are_thinned_and_keep_their_end(number):
    """The last value is what one looks for."""
    points = [(step, float(step)) for step in range(number)]
    thin = thinned(points, 200)
    assert len(thin) == min(number, 200) or 100 <= len(thin) <= 200
    assert thin[-1:] == points[-1:]
    assert [step for step, _ in thin] == sorted({step for step, _ in thin})
