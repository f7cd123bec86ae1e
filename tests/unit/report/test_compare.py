"""Comparing the time and cost of two runs for the same work, checked against two published comparisons."""

import re
from dataclasses import dataclass

import pytest

from lightning_sm.errors import JobConfigError
from lightning_sm.record.events import PARTS, Loader, Span
from lightning_sm.record.prices import Prices, cost
from lightning_sm.record.runs import RunRecord, read_run
from lightning_sm.record.totals import Totals
from lightning_sm.report.compare import as_json, as_text, compare, sentence
from lightning_sm.report.figures import RESTARTS, Figures, TrainingRestart
from tests.unit.report.recorded import BEGIN, head, input_bound, steps, write


@dataclass(frozen=True)
class Run:
    """The figures of a run that a comparison needs."""

    run: RunRecord
    kinds: list[tuple[str, str | None]]
    pace: Totals
    num_steps: int = 1000
    samples_per_step: float | None = None
    samples_per_s: float | None = None
    fixed_s: float = 0.0
    growing_step_s: float = 0.0
    restarts: tuple[TrainingRestart, ...] = ()
    outcome: str = "succeeded"


def measured(name, hosts, step_s, **more):
    """Return a run with a given number of hosts per type and a given step time."""
    kinds = [(kind, kind) for kind, number in hosts.items() for _ in range(number)]
    pace = Totals(100, parts=dict.fromkeys(PARTS, 0.0) | {"forward": 100 * step_s})
    return Run(RunRecord(name, name, ()), kinds, pace, **more)


# The PyTorch example of a heterogeneous cluster states step times but no prices. These are list prices of that time.
MNIST_PRICES = Prices({"ml.p3.2xlarge": 3.825, "ml.c5.9xlarge": 1.836}, source="prices.yaml")


@pytest.mark.parametrize(
    ("step_s", "speed_up", "times_cheaper"),
    [
        # From its text: "reduced the training cost by 4.75 times, and the avg. step reduced by 6.5 times" at 0.18 s.
        (0.18, 6.61, 4.47),
        # From the last line of its log.
        (0.196784295383125, 6.05, 4.09),
    ],
)
def test_the_pytorch_example(step_s, speed_up, times_cheaper):
    """Adding an ml.c5.9xlarge to an ml.p3.2xlarge: neither of the published step times makes it 4.75 times cheaper."""
    alone = measured("alone", {"ml.p3.2xlarge": 1}, 1.19)
    both = measured("both", {"ml.p3.2xlarge": 1, "ml.c5.9xlarge": 1}, step_s)
    first, second = compare(alone, both, MNIST_PRICES)
    assert first.seconds / second.seconds == pytest.approx(speed_up, abs=0.005)
    assert first.cost / second.cost == pytest.approx(times_cheaper, abs=0.005)
    assert f"for the same work ({speed_up} times as fast), and costs " in sentence(first, second, MNIST_PRICES)
    # The example states "The avg. step cost was 7.6 cents", then "1.9 cents", 4.0 times less: the prices of 60 steps.
    before, after = (60 * cost(one.per_hour, one.run.pace.step_s) for one in (first, second))
    assert before == pytest.approx(0.0759, abs=0.0001)
    assert after == pytest.approx(0.0186 if step_s > 0.19 else 0.017, abs=0.0001)


@pytest.mark.parametrize(
    ("step_s", "speed_up", "less"),
    [
        (0.192, 2.23, "46.5% less"),  # from its text: 192 ms, 2.2x faster, 45% cheaper
        (0.184, 2.14, "44.2% less"),  # from its log: epochs of 92 s with 500 steps
    ],
)
def test_the_tensorflow_example(step_s, speed_up, less):
    """Adding two ml.c5.18xlarge to an ml.p4d.24xlarge: 46.5% cheaper by its text, 44.2% by its log."""
    prices = Prices({"ml.p4d.24xlarge": 37.7, "ml.c5.18xlarge": 3.67}, source="prices.yaml")
    alone = measured("alone", {"ml.p4d.24xlarge": 1}, step_s, num_steps=5000)
    both = measured("both", {"ml.p4d.24xlarge": 1, "ml.c5.18xlarge": 2}, 0.086)
    first, second = compare(alone, both, prices)
    assert first.seconds / second.seconds == pytest.approx(speed_up, abs=0.005)
    text = as_text(first, second, prices)
    assert less in text
    assert re.search(r"^hourly price +\$37\.70 +\$45\.04 +19\.5% more", text, re.MULTILINE)
    assert f"${37.7 * 5000 * step_s / 3600:.2f}" in text


def test_headline_and_table_compare_the_same_work():
    """Time outside the steps counts in both: with a start of 100 s, twice as fast becomes 1.33 times as fast."""
    prices = Prices({"a": 1.0, "b": 2.0})
    a = measured("first", {"a": 1}, 1.0, num_steps=100, fixed_s=100)
    b = measured("second", {"b": 1}, 0.5, fixed_s=100)
    first, second = compare(a, b, prices)
    assert (first.seconds, second.seconds) == (pytest.approx(200), pytest.approx(150))
    text = as_text(first, second, prices)
    assert text.startswith(
        "B takes 2 min 30 s instead of 3 min 20 s for the same work (1.33 times as fast), and costs $0.083 instead of "
        "$0.056 (50.0% more)."
    )
    assert text.count("50.0% more") == 2
    assert "cost of 1,000 steps" not in text
    first, second = compare(a, b, prices, steps=100_000)
    assert first.seconds / second.seconds == pytest.approx(2.0, rel=0.01)


def test_what_a_training_does_again_and_again_grows_with_its_steps(tmp_path):
    """With ten times the steps, time for validations grows tenfold, and time for start-up stays the same."""
    run = Figures(read_run(input_bound(tmp_path)))
    assert (run.fixed_s, run.growing_step_s) == (pytest.approx(11.0), pytest.approx(1.0 / 1200))
    both = compare(run, run, Prices(), steps=12_000)
    assert [training.apart_s for training in both] == [pytest.approx(11.0 + 10 * 1.0)] * 2
    assert [training.seconds for training in both] == [pytest.approx(21.0 + 600.0)] * 2
    assert re.search("^outside the steps +21 s +21 s", as_text(*both, Prices()), re.MULTILINE)


def test_what_is_between_epochs_grows_with_their_number(tmp_path):
    """Time between epochs grows with their number; the first step, which starts workers, counts once."""
    lines = [head(0), Loader(BEGIN + 5), Span(BEGIN + 10, "first_batch", BEGIN + 5, 5.0)]
    for epoch in range(1, 4):
        lines += [steps(10.0 + 10 * epoch, n=100), Span(BEGIN + 11 + 10 * epoch, "between", BEGIN, 1.0)]
    write(tmp_path, *lines)
    assert 300 * Figures(read_run(tmp_path)).growing_step_s == pytest.approx(3.0)


def test_a_restart_is_not_part_of_the_work(tmp_path):
    """The cost of an interruption and of repeated steps is left out of the comparison, and the headline states this."""
    input_bound(tmp_path / "again", outcome="interrupted")
    again = Figures(read_run(input_bound(tmp_path / "again", attempt=2, begin=1000.0)))
    once = Figures(read_run(input_bound(tmp_path / "once")))
    # The second attempt trains all steps again, after the end of the first attempt, a new start and a first batch.
    assert (len(again.restarts), again.num_steps) == (1, once.num_steps)
    assert again.shares[RESTARTS] + again.repeated_s == pytest.approx(60.0 + 1.0 + 10.0, abs=2.0)
    first, second = compare(once, again, Prices())
    assert second.seconds == pytest.approx(first.seconds, abs=2.0)
    said = sentence(first, second, Prices())
    assert re.match(r"B was restarted once: the time lost \(\S+ s\) is left out\. B takes ", said)


def test_a_run_that_has_not_succeeded_says_so(tmp_path):
    """A comparison with an unsuccessful run starts with a warning."""
    stopped = Figures(read_run(input_bound(tmp_path / "stopped", outcome="interrupted")))
    once = Figures(read_run(input_bound(tmp_path / "once")))
    said = sentence(*compare(stopped, once, Prices()), Prices())
    assert said.startswith("A has not succeeded (interrupted). B takes 72 s instead of 72 s for the same work")


def test_a_run_of_a_few_steps_says_so():
    """A comparison with a run of few steps starts with a warning."""
    first, second = measured("x", {"a": 1}, 1.0, num_steps=3), measured("y", {"a": 1}, 0.5)
    said = sentence(*compare(first, second, Prices()), Prices())
    assert said.startswith("A has only 3 steps: too few for reliable times. B takes 1.5 s instead of 3 s")


def test_steps_of_different_size_are_compared_by_samples():
    """A step with twice the samples may take twice the time at the same speed."""
    small = measured("small", {"a": 1}, 0.1, samples_per_step=32, num_steps=100)
    large = measured("large", {"a": 2}, 0.2, samples_per_step=64)
    first, second = compare(small, large, Prices({"a": 1.0}))
    assert first.seconds == pytest.approx(second.seconds)
    assert second.cost == pytest.approx(2.0 * first.cost)
    assert (first.steps, second.steps) == (100, 50)
    assert "Samples per step: 32 in A, 64 in B. All times are for the same number" in as_text(
        first, second, Prices({"a": 1.0})
    )


@pytest.mark.parametrize(
    ("step_s", "price", "text"),
    [
        (0.5, 10.8, "(2 times as fast), and costs $1.50 instead of $1.00 (50.0% more)."),
        (2.0, 0.36, "(2 times as long), and costs $0.20 instead of $1.00 (80.0% less)."),
        (2.0, 3.6, "(2 times as long), and costs $2.00 instead of $1.00 (100.0% more)."),
        (1.0, 3.6, "(as fast), and costs $1.00 instead of $1.00 (the same)."),
    ],
)
def test_faster_need_not_be_cheaper(step_s, price, text):
    """Time and cost may change in opposite directions, so the sentence states each."""
    prices = Prices({"a": 3.6, "b": price})
    both = compare(measured("x", {"a": 1}, 1.0), measured("y", {"b": 1}, step_s), prices)
    assert sentence(*both, prices).endswith(f" for the same work {text}")


def test_without_prices_times_are_compared():
    """Without prices, only times are compared."""
    both = compare(measured("x", {"a": 1}, 1.0), measured("y", {"b": 1}, 0.5), Prices())
    assert [training.cost for training in both] == [None, None]
    assert "To compare costs, give the prices" in as_text(*both, Prices())
    assert "$" not in as_text(*both, Prices())


def test_a_missing_price_is_named():
    """A missing price raises an error, because the cost of only some hosts would mislead."""
    with pytest.raises(
        JobConfigError, match=r"^both: No price for ml\.c5\.9xlarge\. Known prices \(--price\): ml\.p3\.2xlarge\.$"
    ):
        compare(
            measured("alone", {"ml.p3.2xlarge": 1}, 1.0),
            measured("both", {"ml.p3.2xlarge": 1, "ml.c5.9xlarge": 1}, 0.5),
            Prices({"ml.p3.2xlarge": 3.825}, source="--price"),
        )


def test_programs_get_times_and_costs():
    """The JSON output has times and costs for plots; costs are null without prices."""
    first, second = measured("x", {"a": 1}, 1.0), measured("y", {"b": 1}, 0.5)
    found = as_json(*compare(first, second, Prices({"a": 3.6, "b": 7.2})))
    times = {"step_s": 1.0, "waiting": 0.0, "time_to_train_s": 1000.0, "cost_to_train": 1.0}
    assert found["a"] == times | {"warnings": []}
    assert found["b"]["cost_to_train"] == 1.0
    assert as_json(*compare(first, second, Prices()))["a"]["cost_to_train"] is None
    stopped = measured("z", {"a": 1}, 1.0, outcome="stopped")
    assert as_json(*compare(first, stopped, Prices()))["b"]["warnings"] == ["B has not succeeded (stopped)."]


def test_what_costs_nothing_has_no_percentage():
    """A run on free hosts, such as the user's, has a cost of 0 and no percentage."""
    prices = Prices({"a": 0.0, "b": 3.6})
    both = compare(measured("x", {"a": 1}, 1.0), measured("y", {"b": 1}, 1.0), prices)
    assert sentence(*both, prices).endswith("(as fast), and costs $1.00 instead of $0.00 (more).")


def test_a_run_without_steps_is_refused(tmp_path):
    """A run without steps cannot be compared, because its step time is unknown."""
    write(tmp_path, head(1), Loader(BEGIN + 5))
    run = Figures(read_run(tmp_path))
    with pytest.raises(JobConfigError, match="no training steps are recorded"):
        compare(run, run, Prices())
