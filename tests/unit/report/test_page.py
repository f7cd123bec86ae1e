"""The page of a report: its content and its restrictions."""

import re
from html.parser import HTMLParser

import pytest

from lightning_sm.errors import JobConfigError
from lightning_sm.record.events import GpuUse, HostUse, Metrics
from lightning_sm.record.prices import Prices
from lightning_sm.record.runs import read_run
from lightning_sm.report import page
from lightning_sm.report.figures import Figures
from tests.unit.report.recorded import BEGIN, head, input_bound, steps, use, write

PRICES = Prices({"ml.g5.xlarge": 1.41, "ml.c5.xlarge": 0.2}, source="--price")


def rendered(*folders, prices=PRICES):
    """Render the page for the runs in some folders."""
    return page.render([Figures(read_run(folder)) for folder in folders], prices)


class Text(HTMLParser):
    """Collect a page's text, its tags and its attributes that may load something."""

    def __init__(self, text):
        super().__init__()
        self.words = []
        self.links = []
        self.tags = []
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        """Record the tag and the attributes that could load something."""
        self.tags.append(tag)
        self.links += [value for name, value in attrs if name in ("src", "href", "xlink:href", "srcset", "action")]

    def handle_data(self, data):
        """Record the text."""
        self.words.append(data)


def test_the_verdict_comes_first_and_then_the_numbers(tmp_path):
    """The first screen on a phone shows the outcome, the duration, the cost and the quality."""
    text = " ".join(" ".join(Text(rendered(input_bound(tmp_path)).partition("<body")[2]).words).split())
    begin = "job Succeeded after 72 s. Limited by waiting for data (transforms), 48% of the job (34.8 s)."
    assert begin in text
    numbers = (
        "duration 72 s cost $0.032 steps wait for data 58% best val_acc 0.9 samples per second 640 time of a step 50 ms"
    )
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
    """The page opens offline, in mail programs and on a phone."""
    html = rendered(input_bound(tmp_path))
    found = Text(html)
    assert all(link.startswith(("data:", "#")) for link in found.links)
    assert not {"script", "iframe", "object", "embed", "form"} & set(found.tags)
    assert "default-src 'none'" in html
    assert not re.search(r"url\((?!#)", html)


def test_all_numbers_of_a_page_are_those_of_one_rank(tmp_path):
    """Headline, box, pictures and tables show the rank that sets the pace, even if it is not the first.

    Before, pictures and tables had rank 0's 12% beside a headline with rank 1's 58%.
    """
    folder = input_bound(tmp_path)
    for path in folder.rglob("*-rank-0.jsonl"):
        other = path.with_name("algo-2-rank-1.jsonl")
        other.write_text(path.read_text().replace('"rank":0', '"rank":1').replace('"host":"algo-1"', '"host":"algo-2"'))
        own = [head(1, world_size=2), *(steps(10 + second, waiting=0.12) for second in range(1, 61))]
        path.unlink()
        write(folder, *own)
    html = rendered(folder)
    text = " ".join(" ".join(Text(html).words).split())
    assert "48% of the job (34.8 s)" in text
    assert "steps wait for data 58%" in text
    assert "waiting for data 34.8 s (48%)" in text
    assert "The steps are those of rank 1 on algo-2, for which the others wait" in text
    assert "On average: waiting for data 58%" in html
    assert "waiting for data 29 ms (58%)" in text
    assert "12%" not in re.sub("<svg.*?</svg>", "", html, flags=re.DOTALL)
    assert "rank 1 on algo-2 1,200 50 ms 29 ms" in text


def test_text_of_users_is_text(tmp_path):
    """HTML in reasons is escaped, and Matplotlib does not read names as mathematics."""
    html = rendered(input_bound(tmp_path / "a<b>$x$", outcome="failed"))
    assert "&lt;b&gt;$x$&lt;/b&gt; &amp; so on" in html
    assert "<b>" not in html


def test_names_with_dollars_can_be_drawn(tmp_path):
    """Hosts, metrics and runs may have dollar signs in their names."""
    hosts = {"algo-1": "trainer", "a$b^{": "trainer"}
    write(tmp_path, head(1, hosts=hosts, job="r$_{"), steps(3), Metrics(BEGIN + 3, 1, 0, {"$a^": 1.0}), use(4))
    assert "r$_{" in rendered(tmp_path, tmp_path)


def test_ids_are_unique(tmp_path):
    """Each picture of a page refers only to the hatches and clips that it defines."""
    ids = re.findall(r'<(?:clipPath|pattern|path) id="([^"]+)"', rendered(input_bound(tmp_path)))
    hatches = [name for name in ids if name.startswith(("h", "p"))]
    assert len(hatches) == len(set(hatches))


def test_colours_are_those_of_the_page(tmp_path):
    """Ink, grid and paper are CSS variables, so that one file suits light and dark mode."""
    html = rendered(input_bound(tmp_path))
    assert {"#010203", "#040506", "#070809"}.isdisjoint(re.findall("#[0-9a-f]{6}", html))
    assert "var(--ink)" in html
    assert "prefers-color-scheme: dark" in html


def test_every_picture_has_words(tmp_path):
    """Pictures have a label for screen readers, and their numbers in tables."""
    html = rendered(input_bound(tmp_path))
    labels = re.findall(r'<figure role="img" aria-label="([^"]+)"', html)
    assert len(labels) == html.count("<figure") == 4
    assert labels[0] == (
        "Time of a step over the run. On average: waiting for data 58%, to the device 2%, forward 10%, backward, "
        "with gradient exchange 20%, optimizer 5%, other 5%."
    )
    assert html.count("<details") >= 6


def test_runs_are_side_by_side(tmp_path):
    """Each run has a column."""
    input_bound(tmp_path / "a", outcome="interrupted")
    input_bound(tmp_path / "a", attempt=2, begin=100.0)
    html = rendered(tmp_path / "a", input_bound(tmp_path / "b"))
    text = " ".join(" ".join(Text(html).words).split())
    assert "Succeeded after 2 min 24 s in 2 attempts" in text
    assert text.count("Where the time went") == text.count("What to change") == 2


def test_charts_that_are_side_by_side_have_the_same_scale(tmp_path):
    """The bars of a step that takes a third of the time have a third of the height."""
    for name, step_s in (("slow", 0.06), ("quick", 0.02)):
        write(tmp_path / name, head(1), *(steps(10 + second, step_s=step_s) for second in range(60)))

    def numbers(*names):
        pictures = re.findall(
            r"<svg(?:(?!</svg>).)*ms per step.*?</svg>", rendered(*map(tmp_path.joinpath, names)), re.DOTALL
        )
        return [re.findall(r">(\d+)</text>", picture) for picture in pictures]

    both = numbers("slow", "quick")
    assert both[0] == both[1] == numbers("slow")[0] != numbers("quick")[0]


def test_a_run_without_anything_has_a_page(tmp_path):
    """A job that failed at its start has a page that shows what is known."""
    write(tmp_path, head(0, who="launcher"), use(1), who="launcher")
    text = " ".join(Text(rendered(tmp_path, prices=Prices())).words)
    assert "The end was not recorded" in text
    assert "No training step is recorded." in text


def test_the_numbers_are_those_that_say_something_of_this_run(tmp_path):
    """Without prices, waiting and metrics, their boxes are left out."""
    write(tmp_path, head(1), *(steps(10 + t, waiting=0.01) for t in range(5)))
    text = " ".join(" ".join(Text(rendered(tmp_path, prices=Prices())).words).split())
    assert "duration 13 s samples per second 640 time of a step 50 ms Time of a step" in text
    write(tmp_path, Metrics(BEGIN + 15, 100, 0, {"val_acc": 0.9}), Metrics(BEGIN + 16, 110, 0, {"val_acc": 0.8}))
    text = " ".join(" ".join(Text(rendered(tmp_path, prices=Prices())).words).split())
    assert "best val_acc 0.9 (last 0.8) samples per second 640" in text


@pytest.mark.parametrize(
    ("name", "best"), [("val/MeanSquaredError", 1), ("val_rmse", 1), ("val_wer", 1), ("val_f1", 3), ("val_power", 3)]
)
def test_the_best_value_is_the_smallest_of_an_error(tmp_path, name, best):
    """Names of errors are recognised in several spellings."""
    write(tmp_path, head(1), *(Metrics(BEGIN + t, t, 0, {name: value}) for t, value in ((1, 3), (2, 1), (3, 2))))
    text = " ".join(" ".join(Text(rendered(tmp_path, prices=Prices())).words).split())
    assert f"best {name} {best} (last 2)" in text


@pytest.mark.parametrize(
    ("values", "shown"), [([0.5, 0.7, None], "best val_acc 0.7 (last nan)"), ([None, None], "best val_acc nan")]
)
def test_a_metric_that_becomes_nan_is_shown(tmp_path, values, shown):
    """The page shows a NaN as the last value."""
    lines = [Metrics(BEGIN + 10 + n, n, 0, {"val_acc": value}) for n, value in enumerate(values, 1)]
    write(tmp_path, head(1), *(steps(10 + t) for t in range(4)), *lines)
    text = " ".join(" ".join(Text(rendered(tmp_path)).words).split())
    assert shown in text
    assert "The model logged nothing" not in text


def test_too_few_steps_are_no_advice(tmp_path):
    """With too few steps, the page gives that as the reason for having no advice."""
    write(tmp_path, head(1), steps(10, step=20))
    text = " ".join(" ".join(Text(rendered(tmp_path)).words).split())
    assert "Too few steps for advice, which needs 50." in text


def test_the_use_of_each_host_is_drawn_over_time(tmp_path):
    """CPUs and memory are drawn for each host with a record, GPUs and their memory for those that have GPUs."""
    gpus = [GpuUse(0.7, 8 * 10**9, 16 * 10**9)]
    lines = [HostUse(BEGIN + t, 0.5, 2 * 10**9, 16 * 10**9, gpus=gpus if t > 5 else []) for t in range(1, 9)]
    write(tmp_path, head(0, who="launcher"), *lines, who="launcher")
    html = rendered(tmp_path, prices=Prices())
    (picture,) = re.findall('aria-label="Use of hosts over the run.*?</figure>', html, flags=re.DOTALL)
    for name in ("CPUs", "memory", "GPUs (any kernel running)", "GPU memory", "algo-1 (trainer)"):
        assert f">{name}<" in picture, name
    assert "algo-2 (data)" not in picture


def test_a_host_without_a_record_says_so(tmp_path):
    """The table has no numbers about a host whose record is missing."""
    input_bound(tmp_path)
    for path in tmp_path.rglob("algo-2*"):
        path.unlink()
    assert "<td>ml.c5.xlarge</td><td>no record here</td><td></td>" in rendered(tmp_path)


def test_hyperparameters_are_on_the_page(tmp_path):
    """The page shows the recorded hyperparameters, in which secrets are hidden."""
    assert "Hyperparameters" not in rendered(input_bound(tmp_path / "none"))
    first = head(0, who="launcher", hyperparameters={"lr": "0.1", "hub.token": "(hidden)"})
    write(tmp_path / "some", first, use(1), who="launcher")
    text = " ".join(" ".join(Text(rendered(tmp_path / "some")).words).split())
    assert "Hyperparameters of the job name value lr 0.1 hub.token (hidden)" in text


def test_without_matplotlib_it_says_what_to_install(tmp_path, monkeypatch):
    """A missing library causes an error that names it in one line."""
    monkeypatch.setattr(page, "_NEEDED", ("matplotlib", "no_such_library"))
    with pytest.raises(page.JobConfigError, match=r"needs no_such_library: pip install no_such_library\."):
        rendered(input_bound(tmp_path))


def test_what_is_missing_is_named_alone(monkeypatch):
    """The error proposes the library alone: the package would install torch on a laptop that only submits jobs."""
    monkeypatch.setattr(page, "find_spec", {"matplotlib": "there"}.get)
    with pytest.raises(JobConfigError, match=r"A report needs jinja2: pip install jinja2\."):
        page.render([], Prices())
