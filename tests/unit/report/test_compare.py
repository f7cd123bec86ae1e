"""Time and cost of two runs for the same work; both published comparisons, with the arithmetic right."""

import json

import pytest

from lightning_sm.errors import JobConfigError
from lightning_sm.record.prices import Prices
from lightning_sm.record.runs import read_run
from lightning_sm.report.compare import FIGURES_FORMAT, as_json, as_text, compare, of_run, read_figures, sentence
from lightning_sm.report.figures import Figures
from tests.unit.report.recorded import input_bound


@pytest.fixture
def measured(tmp_path):
    """Reads figures that were measured elsewhere."""

    def read(name, hosts, step_s, **more):
        file = tmp_path / f"{name}.yaml"
        file.write_text(json.dumps({"name": name, "hosts": hosts, "step_s": step_s, **more}))
        return read_figures(file)

    return read


# The PyTorch example of a heterogeneous cluster states step times, and no prices. These are list prices of its time.
MNIST_PRICES = Prices({"ml.p3.2xlarge": 3.825, "ml.c5.9xlarge": 1.836}, source="prices.yaml")


@pytest.mark.parametrize(
    ("step_s", "speed_up", "times_cheaper"),
    [
        # Its text: "reduced the training cost by 4.75 times, and the avg. step reduced by 6.5 times" at 0.18 s.
        (0.18, 6.61, 4.47),
        # The last line of its log.
        (0.196784295383125, 6.05, 4.09),
    ],
)
def test_the_pytorch_example(measured, step_s, speed_up, times_cheaper):
    """One ml.p3.2xlarge against the same with an ml.c5.9xlarge: 4.75 times cheaper fits neither of its step times."""
    alone = measured("alone", {"ml.p3.2xlarge": 1}, 1.19)
    both = measured("both", {"ml.p3.2xlarge": 1, "ml.c5.9xlarge": 1}, step_s)
    comparison = compare(alone, both, MNIST_PRICES)
    assert comparison.speed_up == pytest.approx(speed_up, abs=0.005)
    assert 1 / comparison.cost_ratio == pytest.approx(times_cheaper, abs=0.005)
    assert f"B is {speed_up} times as fast as A, and costs" in sentence(comparison, MNIST_PRICES)
    # "The avg. step cost was 7.6 cents" is the price of 60 steps.
    step = as_json(comparison, MNIST_PRICES)["a"]["cost_per_step"]
    assert 60 * step == pytest.approx(0.0759, abs=0.0001)


@pytest.mark.parametrize(
    ("step_s", "speed_up", "less"),
    [
        (0.192, 2.23, "46.5% less"),  # its words: 192 ms, 2.2x faster, 45% cheaper
        (0.184, 2.14, "44.2% less"),  # its log: epochs of 92 s with 500 steps
    ],
)
def test_the_tensorflow_example(measured, step_s, speed_up, less):
    """One ml.p4d.24xlarge against the same with two ml.c5.18xlarge: 46.5% from its words, 44.2% from its log."""
    prices = Prices({"ml.p4d.24xlarge": 37.7, "ml.c5.18xlarge": 3.67}, source="prices.yaml")
    alone = measured("alone", {"ml.p4d.24xlarge": 1}, step_s, steps=5000)
    both = measured("both", {"ml.p4d.24xlarge": 1, "ml.c5.18xlarge": 2}, 0.086)
    comparison = compare(alone, both, prices)
    assert comparison.speed_up == pytest.approx(speed_up, abs=0.005)
    assert comparison.price_ratio == pytest.approx(1.19, abs=0.005)
    text = as_text(comparison, prices)
    assert less in text
    assert "1.19 times as fast" in text  # from where on the data hosts pay
    assert "$45.04" in text
    assert as_json(comparison, prices)["a"]["cost_to_train"] == pytest.approx(37.7 * 5000 * step_s / 3600)


def test_steps_of_different_size_are_compared_by_samples(measured):
    """A step with twice the samples may take twice the time and be as fast."""
    small = measured("small", {"a": 1}, 0.1, samples_per_step=32, steps=100)
    large = measured("large", {"a": 2}, 0.2, samples_per_step=64)
    comparison = compare(small, large, Prices({"a": 1.0}))
    assert comparison.speed_up == pytest.approx(1.0)
    assert comparison.cost_ratio == pytest.approx(2.0)
    assert as_json(comparison, Prices({"a": 1.0}))["b"]["steps"] == 50
    assert "32 samples, one of B 64" in as_text(comparison, Prices({"a": 1.0}))


@pytest.mark.parametrize(
    ("step_s", "price", "text"),
    [
        (0.5, 3, "B is 2 times as fast as A, but costs 50.0% more"),
        (2.0, 0.1, "B takes 2 times as long as A, but costs 80.0% less for the same work (5 times cheaper)"),
        (2.0, 1, "B takes 2 times as long as A, and costs 100.0% more"),
        (1.0, 0.5, "B is as fast as A, and costs 50.0% less"),
    ],
)
def test_faster_need_not_be_cheaper(measured, step_s, price, text):
    """Time and cost may go in opposite directions, and the sentence says so."""
    comparison = compare(measured("x", {"a": 1}, 1.0), measured("y", {"b": 1}, step_s), Prices({"a": 1, "b": price}))
    assert sentence(comparison, Prices({"a": 1, "b": price})).startswith(text)


def test_without_prices_times_are_compared(measured):
    """No price is invented."""
    comparison = compare(measured("x", {"a": 1}, 1.0), measured("y", {"b": 1}, 0.5), Prices())
    assert comparison.cost_ratio is None
    assert "To compare costs, give the prices" in as_text(comparison, Prices())
    assert "$" not in as_text(comparison, Prices())


def test_a_missing_price_is_named(measured):
    """A cost of some of the hosts would mislead."""
    with pytest.raises(JobConfigError, match=r"both .*without a price: ml\.c5\.9xlarge.*known: ml\.p3\.2xlarge"):
        compare(
            measured("alone", {"ml.p3.2xlarge": 1}, 1.0),
            measured("both", {"ml.p3.2xlarge": 1, "ml.c5.9xlarge": 1}, 0.5),
            Prices({"ml.p3.2xlarge": 3.825}, source="--price"),
        )


def test_a_recorded_run_is_compared_with_all_it_took(tmp_path):
    """Start-up, first batch and validation are part of the time to train, besides the steps."""
    run = of_run(Figures(read_run(input_bound(tmp_path))))
    assert run.step_s == pytest.approx(0.05)
    assert run.samples_per_step == pytest.approx(32)
    assert (run.steps, run.waiting) == (1200, pytest.approx(0.58))
    assert run.apart_s == pytest.approx(12.0)
    assert run.hosts == (("trainer", "ml.g5.xlarge"), ("data", "ml.c5.xlarge"))


def test_the_documented_file_is_valid(tmp_path):
    """The file that messages and help show can be read."""
    file = tmp_path / "figures.yaml"
    file.write_text(FIGURES_FORMAT)
    run = read_figures(file)
    assert (run.name, run.step_s, run.steps, run.apart_s, len(run.hosts)) == ("two hosts", 0.1968, 4800, 90, 2)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("step_s: [", "is not valid YAML"),
        ("- 1", r"(?s)file of figures .* is not a mapping .*\nstep_s: 0\.1968"),
        ("{hosts: {a: 1}, step_s: 1, stepsize: 2}", "unknown key stepsize"),
        ("{step_s: 1}", "hosts is None"),
        ("{hosts: {a: 1.5}, step_s: 1}", r"hosts\.a is 1\.5; expected a positive whole number"),
        ("{hosts: {a: 1}, step_s: 0}", "step_s is 0; expected a positive number"),
        ("{hosts: {a: 1}, step_s: fast}", "step_s is 'fast'"),
        ("{hosts: {a: 1}}", "step_s is None"),
        ("{hosts: {a: 1}, step_s: .inf}", "step_s is inf"),
        ("{hosts: {a: 1}, step_s: 1, steps: true}", "steps is True"),
    ],
)
def test_a_wrong_file_is_refused(tmp_path, content, message):
    """The message names the key and its value."""
    file = tmp_path / "figures.yaml"
    file.write_text(content)
    with pytest.raises(JobConfigError, match=message):
        read_figures(file)
