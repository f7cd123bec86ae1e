"""The page, the live view, the log and a comparison show the same numbers for the same record."""

import math
import re
from html import unescape
from pathlib import Path

import pytest

from lightning_sm.__main__ import main
from lightning_sm._text import percent, rate, step_time
from lightning_sm.record.runs import read_run
from lightning_sm.report import live
from lightning_sm.report.figures import Figures

_RECORDS = Path(__file__).parents[2] / "records"


def said_by(capsys, *command):
    """Return the output of a command."""
    assert main(list(map(str, command))) == 0
    return capsys.readouterr().out


def text_of(page):
    """Return the text of a page, without pictures."""
    html = re.sub("<svg.*?</svg>|<style.*?</style>", "", page.read_text(), flags=re.DOTALL)
    return " ".join(unescape(re.sub("<[^>]*>", " ", html)).split())


@pytest.mark.parametrize(
    "name", ["network", "data_host_that_came_back", "transforms_on_data_hosts", "transforms_local", "slow_rank"]
)
def test_rates_and_waits_are_those_that_the_training_measured(name, tmp_path, monkeypatch, capsys):
    """Rates and waits agree to the digit.

    Before, a page had 75% of waiting where the progress lines of the job had 72%, because data hosts start to report at
    another time than the step clock.
    """
    run = Figures(read_run(_RECORDS / name))
    own = run.ranks[run.pace_rank]
    step, waits = step_time(own.step_s), percent(own.waiting)
    samples = rate(run.world_size * own.samples / own.wall_s)
    monkeypatch.setattr(live, "_WINDOW_S", math.inf)  # so that its rates cover the whole job
    shown = live.live(run)
    assert shown.steps_per_s == 1 / own.step_s
    assert own.waiting in [host.waiting for host in shown.hosts]
    screen = said_by(capsys, "report", "--live", "--once", _RECORDS / name)
    assert f"   {rate(1 / own.step_s)} steps/s   {samples} samples/s   waiting for data {waits} of the time" in screen
    said = said_by(capsys, "report", _RECORDS / name, "-o", tmp_path / "page.html")
    assert said.count(f"waits {waits} of the time") == (0 if name == "slow_rank" else 2)
    page = text_of(tmp_path / "page.html")
    assert f" a step {step} " in page
    assert f"samples per second, all ranks {samples} " in page
    assert re.search(rf" waiting for data \S+ m?s \({waits}\) to the device ", page)
    compared = said_by(capsys, "compare", _RECORDS / name, _RECORDS / name)
    assert re.search(rf"^time of a step +{step} +{step} +as fast$", compared, re.MULTILINE)
    assert re.search(rf"^waiting for data +{waits} +{waits} *$", compared, re.MULTILINE)
    assert re.search(rf"^samples per second +{samples} +{samples} +the same$", compared, re.MULTILINE)


@pytest.mark.parametrize(
    "name", ["network", "data_host_that_came_back", "transforms_local", "checkpoints", "validation", "restarts"]
)
def test_a_limit_costs_what_the_table_says(name, tmp_path, capsys):
    """The headline, which is also in the log, has the seconds and the share from the page's table of times."""
    said = said_by(capsys, "report", _RECORDS / name, "-o", tmp_path / "page.html").splitlines()[0]
    page = text_of(tmp_path / "page.html")
    assert said.removeprefix(f"{name}: ") in page
    limit, share, seconds = re.search(r"Limited by ([^,(]*?)(?: \(.*\))?, (\d+%) of the job \(([^)]*)\)", said).groups()
    assert f" {limit} {seconds} ({share}) " in page
