"""Estimating the number of workers that a training needs, from a short run."""

import re

import pytest

from lightning_sm.errors import JobConfigError
from lightning_sm.record.events import Loader, Span
from lightning_sm.record.prices import Prices
from lightning_sm.record.runs import read_run
from lightning_sm.report.figures import Figures
from lightning_sm.report.job_of_plan import job_of_plan
from lightning_sm.report.sizing import MeasuredRun, as_text, measure, plan, sentence
from tests.unit.report.recorded import BEGIN, head, input_bound, steps, use, write

PRICES = Prices({"ml.g5.xlarge": 1.41, "ml.c5.xlarge": 0.2, "ml.c5.4xlarge": 0.8}, source="--price")


def of(folder):
    """Return the figures of the run in a folder."""
    return Figures(read_run(folder))


def local(folder, *, waiting, workers=2, cpus=4, hosts=None, start_s=0.0, **values):
    """Write a run whose batches are built on the trainer host, and return its figures."""
    own = head(1, hosts=hosts or {"algo-1": "trainer"}, cpus=cpus, **values)
    loader = Loader(BEGIN + 2, workers=workers, cpus=cpus)
    start = Span(BEGIN + 2, "startup", BEGIN + 2 - start_s, start_s)
    write(folder, own, start, loader, *(steps(10 + t, waiting=waiting) for t in range(10)))
    write(folder, head(0, who="launcher", hosts=hosts or {"algo-1": "trainer"}, cpus=cpus), use(5), who="launcher")
    return of(folder)


def test_the_work_of_a_step_decides(tmp_path):
    """With 96 ms of work per step, two workers take 48 ms and four take 24 ms; six keep up with 21 ms of training.

    The 2 ms by which the measured step exceeds this prediction are added to each estimate.
    """
    planned = plan(of(input_bound(tmp_path)), PRICES)
    assert [(line.workers, line.num_hosts) for line in planned.lines] == [(2, 1), (4, 2), (6, 3)]
    assert [line.step_s for line in planned.lines] == [pytest.approx(0.05), pytest.approx(0.026), pytest.approx(0.023)]
    assert [line.limit for line in planned.lines] == ["workers", "workers", "training"]


def test_ranks_whose_figures_did_not_arrive_are_like_the_others(tmp_path):
    """If data hosts have the figures of one of two ranks, a step needs twice that rank's work."""
    input_bound(tmp_path)
    write(tmp_path, head(1, who="rank-1", world_size=2), steps(11), who="rank-1")
    assert measure(of(tmp_path)).cost_s == pytest.approx(2 * 0.096)


def test_a_restart_that_moves_a_rank_to_another_host_doubles_no_work(tmp_path):
    """The figures of a rank are summed over its processes, whichever host each of them ran on."""
    input_bound(tmp_path)
    for path in input_bound(tmp_path, attempt=2, begin=100.0).rglob("2/*-rank-0.jsonl"):
        path.write_text(path.read_text().replace('"rank 0"', '"rank 0 on algo-3"'))
    run = of(tmp_path)
    assert list(run.data[0]) == ["rank 0 on algo-3"]
    assert measure(run).cost_s == pytest.approx(0.096)


def test_the_whole_job_has_more_than_steps(tmp_path):
    """Start-up is constant, validations grow with the steps, and hosts are priced by the hour."""
    planned = plan(of(input_bound(tmp_path)), PRICES, steps=12_000)
    first, *_, best = planned.lines
    assert first.seconds == pytest.approx(11 + 10 * 1 + 600)
    assert best.seconds == pytest.approx(11 + 10 * 1 + 12_000 * 0.023)
    assert best.cost == pytest.approx((1.41 + 3 * 0.2) * best.seconds / 3600)
    said = sentence(planned, PRICES)
    assert "Use 3 data hosts instead of 1, with 6 workers in all, which would remove the wait: a step would" in said
    assert "the job of 12,000 steps 4 min 57 s instead of 10 min 21 s. It would cost $0.17 instead of $0.28." in said


def test_the_measured_transfer_counts(tmp_path):
    """Batches of 20 MB that each took 30 ms to arrive limit the step, whatever the number of workers."""
    run = of(input_bound(tmp_path, num_bytes=20_000_000, transfer_s=0.03))
    *_, last = plan(run, Prices()).lines
    assert (last.limit, last.step_s) == ("network", pytest.approx(0.032))


def test_the_latency_of_small_batches_is_no_limit_of_the_network(tmp_path):
    """Small batches also take 30 ms to arrive, but many are in transit at once."""
    run = of(input_bound(tmp_path, num_bytes=1_000, transfer_s=0.03))
    *_, last = plan(run, Prices()).lines
    assert (last.limit, last.step_s) == ("training", pytest.approx(0.023))


def test_idle_workers_are_not_the_answer(tmp_path):
    """If workers wait, something else is too slow, and the plan raises an error."""
    with pytest.raises(JobConfigError, match=r"more workers would not help\. Training waits 58% .* not always busy"):
        plan(of(input_bound(tmp_path, busy=0.5)), Prices())


def test_transforms_that_keep_up_are_not_said_to_be_too_slow(tmp_path):
    """If removing the whole wait would save less than 2% of the job, no change is worthwhile."""
    planned = plan(local(tmp_path, waiting=0.06, workers=0, start_s=50.0), Prices())
    assert "transforms" not in sentence(planned, Prices())
    assert "No other number of workers or hosts would save at least 2%" in sentence(planned, Prices())


def test_hosts_without_a_price_are_named(tmp_path):
    """If only some prices are given, the plan names the missing ones, and assumes equal prices."""
    prices = Prices({"ml.c5.4xlarge": 0.8}, source="--price")
    said = as_text(plan(of(input_bound(tmp_path)), prices, "ml.c5.4xlarge"), prices)
    assert "longer than its start-up. No price for ml.g5.xlarge. Known prices (--price): ml.c5.4xlarge." in said


def test_a_run_that_does_not_wait_needs_no_plan(tmp_path):
    """A run that does not wait for data gets no prediction."""
    planned = plan(local(tmp_path, waiting=0.01), Prices())
    assert len(planned.lines) == 1
    assert sentence(planned, Prices()).startswith("Training waits 1% of the time for data: more workers would make no")


def test_loaders_of_the_trainers_are_planned_for_too(tmp_path):
    """Two workers that are always busy do 2 x 50 ms of work per step, while training takes 21 ms."""
    run = local(tmp_path, waiting=0.58, cpus=8)
    assert measure(run).cost_s == pytest.approx(0.1)
    planned = plan(run, Prices({"trainer": 3600.0}))
    assert (planned.best.per_rank, planned.best.num_hosts) == (6, 0)
    assert planned.best.cost == pytest.approx(planned.best.seconds)
    assert "Set num_workers=6, which would remove the wait" in sentence(planned, Prices())
    kind = "ml.c5.xlarge"
    prices = Prices({"trainer": 3600.0, kind: 360.0})
    data_hosts = plan(run, prices, kind)
    assert [(line.workers, line.num_hosts) for line in data_hosts.lines] == [(2, 0), (6, 2)]
    assert data_hosts.best.cost == pytest.approx(1.2 * data_hosts.best.seconds)
    said = as_text(data_hosts, prices)
    assert f"Use 2 data hosts of {kind}, with 6 workers in all, which would remove the wait" in said
    assert "Hosts of this kind were not measured" in said


def test_there_are_no_more_workers_than_cpus(tmp_path):
    """Six workers would remove the wait, but four CPUs reach 25 ms per step at best."""
    planned = plan(local(tmp_path, waiting=0.58, cpus=4), Prices())
    assert [line.per_rank for line in planned.lines] == [2, 4]
    said = sentence(planned, Prices())
    assert "Make the transforms cheaper first, or run them beforehand: building a batch takes 4.8 times as long" in said
    assert (
        "keeping up would take 6 workers, each with a CPU of its own. Set num_workers=4: a step would take 25 ms"
        in said
    )
    assert "--price" not in as_text(planned, Prices())  # the hosts stay the same


def test_workers_are_those_of_each_rank(tmp_path):
    """``num_workers`` applies to each rank, and the two ranks of a host share its CPUs."""
    for rank in (0, 1):
        who = f"rank-{rank}"
        loader = Loader(BEGIN + 2, workers=2, cpus=8, ranks_of_host=2)
        own = head(1, who=who, hosts={"algo-1": "trainer"}, cpus=8, world_size=2)
        write(tmp_path, own, loader, *(steps(10 + t, waiting=0.4) for t in range(10)), who=who)
    planned = plan(of(tmp_path), Prices())
    assert [(line.per_rank, line.workers) for line in planned.lines] == [(2, 4), (4, 8)]
    assert "Set num_workers=4 for each of the 2 ranks" in sentence(planned, Prices())


def test_hosts_whose_cpus_are_all_in_use_are_told_so(tmp_path):
    """If all CPUs have a worker, the sentence proposes data hosts instead of more workers."""
    said = sentence(plan(local(tmp_path, waiting=0.58, workers=4, cpus=4), Prices()), Prices())
    assert said.endswith("Every CPU of these hosts already has a worker. Data hosts would add more CPUs.")


def test_the_cheapest_number_of_hosts_is_proposed_and_not_the_last_one(tmp_path):
    """A third host would save 2 ms per step, but costs more than that unless its price is low."""
    run = of(input_bound(tmp_path))
    dear = plan(run, Prices({"ml.g5.xlarge": 1.0, "ml.c5.xlarge": 1.0}), steps=100_000)
    assert (dear.best.num_hosts, dear.lines[-1].num_hosts) == (2, 3)
    assert dear.best.cost == min(line.cost for line in dear.lines)
    cheap = plan(run, Prices({"ml.g5.xlarge": 10.0, "ml.c5.xlarge": 0.1}), steps=100_000)
    assert cheap.best.num_hosts == 3
    assert "(best)" in as_text(cheap, PRICES)


def test_without_prices_all_hosts_count_as_equally_expensive(tmp_path):
    """Without prices, the text states the assumption that all hosts cost the same."""
    planned = plan(of(input_bound(tmp_path)), Prices())
    assert planned.best.num_hosts == 2
    assert as_text(planned, Prices()).endswith(" longer than its start-up. Give prices with --price.")


@pytest.mark.parametrize("missing", ["ml.g5.xlarge", "ml.c5.xlarge", "ml.c5.4xlarge"])
@pytest.mark.parametrize("kind", [None, "ml.c5.4xlarge"])
def test_where_a_price_is_missing_no_cost_is_compared(tmp_path, missing, kind):
    """Costs are shown where all prices are known, and compared only if the prices of both configurations are known."""
    prices = Prices({name: price for name, price in PRICES.per_hour.items() if name != missing}, source="--price")
    planned = plan(of(input_bound(tmp_path)), prices, kind)
    first, *others = planned.lines
    assert (first.cost is None) == (missing != "ml.c5.4xlarge")
    used = {"ml.g5.xlarge", kind or "ml.c5.xlarge"}
    assert {line.cost is None for line in others} == {missing in used}
    assert ("instead of $" in sentence(planned, prices)) == (missing not in used | {"ml.c5.xlarge"})


def test_hosts_that_help_little_are_not_proposed_without_prices(tmp_path):
    """Without prices, five times the data hosts are not proposed for steps of 21 ms instead of 50 ms."""
    planned = plan(of(input_bound(tmp_path, produce_s=0.2)), Prices())
    assert sentence(planned, Prices()) == (
        "Training waits 58% of the time for data. Make the transforms cheaper first, or run them beforehand: building "
        "a batch takes 9.5 times as long as training on it, and keeping up would take 11 workers, each with a CPU of "
        "its own. No other number of workers or hosts would save at least 2% of the job's cost."
    )
    assert "Give prices with --price" in as_text(planned, Prices())


def test_data_hosts_with_idle_cpus_get_more_workers_before_more_hosts(tmp_path):
    """A data host with 8 CPUs and two workers gets more workers first, which cost nothing."""
    input_bound(tmp_path)
    write(tmp_path, head(1, "algo-2", "launcher", cpus=8), use(5), host="algo-2", who="launcher")
    planned = plan(of(tmp_path), PRICES)
    assert (planned.best.workers, planned.best.num_hosts) == (6, 1)
    assert "Set data_service.workers=6, which would remove the wait: a step" in sentence(planned, PRICES)
    assert "Set data_service.workers=6 in the script" in job_of_plan(planned, PRICES)


def test_what_saves_next_to_nothing_is_not_proposed(tmp_path):
    """A change that saves less than 2% of the job's cost is not proposed."""
    run = of(input_bound(tmp_path, produce_s=0.0425, seconds=60))
    prices = Prices({"ml.g5.xlarge": 1000.0, "ml.c5.xlarge": 0.001})
    planned = plan(run, prices, steps=5)
    assert planned.best is planned.lines[0]
    end = "No other number of workers or hosts would save at least 2% of the job's cost."
    assert sentence(planned, prices).endswith(end)


def test_transforms_that_take_most_of_the_time_come_before_hosts(tmp_path):
    """For batches of 5 s, cheaper transforms come before 530 workers: the plan stops at 10 times the measured ones."""
    planned = plan(of(input_bound(tmp_path, produce_s=5.0)), Prices())
    said = sentence(planned, Prices())
    assert "Make the transforms cheaper first, or run them beforehand: building a batch takes 2.4e+02 times" in said
    assert planned.best.workers <= 20


def test_vcpus_follow_from_the_instance_type(tmp_path):
    """A host with 72 vCPUs gets about 70 workers; anything but an instance type raises an error."""
    run = of(input_bound(tmp_path))
    planned = plan(run, Prices(), "ml.c5.18xlarge")
    assert planned.lines[1].num_hosts == 1
    assert planned.lines[1].workers > 60
    with pytest.raises(JobConfigError, match=r"--kind foo: expected an instance type such as ml\.c5\.4xlarge"):
        plan(run, Prices(), "foo")
    assert plan(run, Prices(), "ml.c5.xlarge") == plan(run, Prices())  # the measured type


def test_a_plan_for_the_measured_run_is_the_measured_run(tmp_path):
    """The plan's time for the measured configuration equals the job's time exactly."""
    run = of(input_bound(tmp_path))
    assert plan(run, Prices()).lines[0].seconds == pytest.approx(run.seconds)


def test_more_workers_than_cpus_do_not_work_more(tmp_path):
    """Eight workers on four CPUs do the work of four."""
    assert measure(local(tmp_path, waiting=0.58, workers=8, cpus=4)).cost_s == pytest.approx(4 * 0.05)


def test_without_workers_training_builds_its_batches_itself(tmp_path):
    """The wait of 29 ms is the work, which two workers can do during the 21 ms of training."""
    run = local(tmp_path, waiting=0.58, workers=0)
    assert measure(run).cost_s == pytest.approx(0.029)
    planned = plan(run, Prices())
    assert [(line.workers, round(line.step_s, 4)) for line in planned.lines] == [(0, 0.05), (2, 0.021)]


def test_a_run_that_says_nothing_is_refused(tmp_path):
    """A record with too few steps, or without the number of workers, raises an error."""
    write(tmp_path / "a", head(1), use(3))
    with pytest.raises(JobConfigError, match="0 training steps in the record; a plan needs"):
        plan(of(tmp_path / "a"), Prices())
    write(tmp_path / "short", head(1), Loader(BEGIN + 2), steps(3, n=49))
    with pytest.raises(JobConfigError, match="49 training steps in the record; a plan needs at least 50"):
        plan(of(tmp_path / "short"), Prices())
    write(tmp_path / "b", head(1), steps(3, n=50))
    with pytest.raises(JobConfigError, match="how many workers built the batches"):
        plan(of(tmp_path / "b"), Prices())


@pytest.mark.parametrize(
    ("workers", "measured_ms"), [(1, 99.0), (2, 50.0), (4, 24.7), (8, 15.3)], ids=["1", "2", "4", "8"]
)
def test_the_model_predicts_measured_steps(workers, measured_ms):
    """Predictions match a prototype's steps of 15 ms, with 16 samples of 6 ms, within 4%."""
    measured = MeasuredRun(own_s=0.015, cost_s=16 * 0.006, workers=1)
    assert 1e3 * measured.predict(workers)[0] == pytest.approx(measured_ms, rel=0.04)


def test_the_largest_term_is_the_limit():
    """The slowest of workers, network and training sets the step time; workers get a reserve of a tenth."""
    measured = MeasuredRun(own_s=0.1, cost_s=1.0, workers=2, wire_s=0.2)
    assert [measured.predict(workers)[1] for workers in (2, 5, 100)] == ["workers", "network", "network"]
    assert measured.workers_needed == 12
    assert MeasuredRun(0.1, 0.0, 2).workers_needed == 1
    assert MeasuredRun(0.1, 1.0, 2).predict(100) == (0.1, "training")


def test_the_table_says_what_it_rests_on(tmp_path):
    """The text includes the measured figures, and the table marks the best line."""
    text = as_text(plan(of(input_bound(tmp_path)), PRICES), PRICES)
    assert "A step needs 96 ms of work from all workers together." in text
    assert re.search(r"^2 \(measured\) +1 +50 ms", text, re.MULTILINE)
    assert re.search(r"^4 \(best\) +2 +26 ms", text, re.MULTILINE)
