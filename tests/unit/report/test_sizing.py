"""How many workers a training needs, from what a short run measured."""

import pytest

from lightning_sm.errors import JobConfigError
from lightning_sm.record.events import Loader
from lightning_sm.record.prices import Prices
from lightning_sm.record.runs import read_run
from lightning_sm.report.figures import Figures
from lightning_sm.report.sizing import Hosts, as_json, as_text, measure, plan, sentence
from tests.unit.report.recorded import BEGIN, head, input_bound, steps, use, write

PRICES = Prices({"ml.g5.xlarge": 1.41, "ml.c5.xlarge": 0.2, "ml.c5.4xlarge": 0.8}, source="--price")


def of(folder):
    """The figures of the run in a folder."""
    return Figures(read_run(folder))


def local(folder, *, waiting, workers=2, cpus=4, hosts=None, **values):
    """A run whose batches are built on the trainer itself."""
    own = head(1, hosts=hosts or {"algo-1": "trainer"}, cpus=cpus, **values)
    loader = Loader(BEGIN + 2, is_remote=False, workers=workers, cpus=cpus)
    write(folder, own, loader, *(steps(10 + t, waiting=waiting) for t in range(10)))
    write(folder, head(0, who="launcher", hosts=hosts or {"algo-1": "trainer"}, cpus=cpus), use(5), who="launcher")
    return of(folder)


def test_the_work_of_a_step_decides(tmp_path):
    """96 ms of work and 21 ms a step that does not wait: two workers take 48 ms, four 24 ms, and six are enough."""
    planned = plan(of(input_bound(tmp_path)), PRICES)
    assert [(line.workers, line.num_hosts) for line in planned.lines] == [(2, 1), (4, 2), (6, 3)]
    assert planned.lines[0].is_measured
    assert [line.step_s for line in planned.lines] == [
        pytest.approx((0.05, 0.05)),
        pytest.approx((0.024, 0.024)),
        pytest.approx((0.021, 0.021)),
    ]
    assert [line.limit for line in planned.lines] == ["workers", "workers", "training"]


def test_ranks_whose_figures_did_not_arrive_are_like_the_others(tmp_path):
    """Of a training of two ranks, data hosts know only one: a step needs twice its work."""
    input_bound(tmp_path)
    write(tmp_path, head(1, who="rank-1", world_size=2), steps(11), who="rank-1")
    assert measure(of(tmp_path)).model.cost_s == pytest.approx(2 * 0.096)


def test_the_whole_job_has_more_than_steps(tmp_path):
    """Start-up stays, validations grow with the steps; hosts cost by the hour."""
    planned = plan(of(input_bound(tmp_path)), PRICES, steps=12_000)
    first, *_, best = planned.lines
    assert first.seconds[0] == pytest.approx(11 + 10 * 1 + 600)
    assert best.seconds[0] == pytest.approx(11 + 10 * 1 + 12_000 * 0.021)
    assert best.cost[0] == pytest.approx((1.41 + 3 * 0.2) * best.seconds[0] / 3600)
    assert "6 workers on 3 data hosts would remove the wait: a step would take 21 ms instead of 50 ms" in sentence(
        planned, PRICES
    )


def test_other_hosts_were_not_measured(tmp_path):
    """Hosts of another kind get a range, which says why; with a given speed there is none."""
    run = of(input_bound(tmp_path))
    unknown = plan(run, PRICES, Hosts(vcpus=5, kind="ml.c5.4xlarge"))
    line = next(line for line in unknown.lines if line.workers == 4)
    assert line.step_s == pytest.approx((0.021, 0.096 / 0.7 / 4))
    assert "Hosts of this kind were not measured" in as_text(unknown, PRICES)
    known = plan(run, PRICES, Hosts(vcpus=5, kind="ml.c5.4xlarge", speed=2.0))
    assert [(line.workers, line.num_hosts, line.step_s) for line in known.lines[1:]] == [
        (4, 1, pytest.approx((0.021, 0.021)))
    ]
    assert known.best.cost[0] == pytest.approx((1.41 + 0.8) * known.best.seconds[0] / 3600)
    assert "--speed 2 is an assumption" in as_text(known, PRICES)


def test_the_network_is_the_next_limit(tmp_path):
    """1 MB a step needs 80 ms at 0.1 Gbit/s, whatever the workers do."""
    planned = plan(of(input_bound(tmp_path)), Prices(), Hosts(network_gbit=0.1))
    assert planned.best.step_s == pytest.approx((0.08, 0.08))
    assert planned.best.limit == "network"
    assert planned.best.network == pytest.approx(1.0)
    assert "is the most that the network can feed" in sentence(planned, Prices())
    fast = plan(of(input_bound(tmp_path)), Prices(), Hosts(network_gbit=10.0))
    assert fast.best.network == pytest.approx(0.0008 / 0.021)


def test_batches_that_vary_make_a_range(tmp_path):
    """Training takes batches in order: a slow one holds up those behind it, the more the more workers there are."""
    planned = plan(of(input_bound(tmp_path, vary=1.0)), Prices())
    ranges = {line.workers: line.step_s[1] / line.step_s[0] for line in planned.lines[1:]}
    assert ranges == {4: pytest.approx(1.4), 6: pytest.approx(1.0 + 0.2 * 2.585, rel=1e-3)}
    assert "varies by 100%" in as_text(planned, Prices())
    assert "data_service.window_batches" in as_text(planned, Prices())


def test_idle_workers_are_not_the_answer(tmp_path):
    """Where workers wait, too, something else is too slow."""
    planned = plan(of(input_bound(tmp_path, busy=0.5)), Prices())
    assert "busy only 50% of the time, so more of them are not the answer" in sentence(planned, Prices())


def test_a_run_that_does_not_wait_needs_no_plan(tmp_path):
    """It only says how much work a step needs at most."""
    run = local(tmp_path, waiting=0.01)
    assert measure(run).is_bound
    planned = plan(run, Prices())
    assert len(planned.lines) == 1
    assert sentence(planned, Prices()).startswith("Training waits 1% of the time for data: more workers would change")


def test_loaders_of_the_trainers_are_planned_for_too(tmp_path):
    """Two workers that are too slow work all the time: 2 x 50 ms a step, for 21 ms."""
    run = local(tmp_path, waiting=0.58)
    assert measure(run).model.cost_s == pytest.approx(0.1)
    planned = plan(run, Prices({"trainer": 3600.0}))
    assert (planned.best.workers, planned.best.num_hosts) == (6, 1)
    assert planned.best.cost[0] == pytest.approx(planned.best.seconds[0])
    data_hosts = plan(run, Prices({"trainer": 3600.0, "c5": 360.0}), Hosts(vcpus=4, kind="c5", speed=1.0))
    assert [(line.workers, line.num_hosts) for line in data_hosts.lines] == [(2, 1), (3, 1), (6, 2)]
    assert data_hosts.best.cost[0] == pytest.approx(1.2 * data_hosts.best.seconds[0])
    assert sentence(data_hosts, Prices()).startswith("6 workers on 2 data hosts would remove the wait")


def test_more_workers_than_cpus_do_not_work_more(tmp_path):
    """Eight workers on four CPUs get as much done as four."""
    assert measure(local(tmp_path, waiting=0.58, workers=8, cpus=4)).model.cost_s == pytest.approx(4 * 0.05)


def test_without_workers_training_builds_its_batches_itself(tmp_path):
    """The wait is the work: 29 ms, which two workers do beside the 21 ms of training."""
    run = local(tmp_path, waiting=0.58, workers=0)
    assert measure(run).model.cost_s == pytest.approx(0.029)
    planned = plan(run, Prices())
    assert [(line.workers, round(line.step_s[0], 4)) for line in planned.lines] == [(0, 0.05), (1, 0.029), (2, 0.021)]


def test_a_run_that_says_nothing_is_refused(tmp_path):
    """Without steps, or without where batches come from."""
    write(tmp_path / "a", head(1), use(3))
    with pytest.raises(JobConfigError, match="no training steps are recorded"):
        plan(of(tmp_path / "a"), Prices())
    write(tmp_path / "b", head(1), steps(3))
    with pytest.raises(JobConfigError, match="how many workers built the batches"):
        plan(of(tmp_path / "b"), Prices())


def test_the_table_says_what_it_rests_on(tmp_path):
    """Measured figures and limits are part of the text; programs get all of it."""
    planned = plan(of(input_bound(tmp_path)), PRICES)
    text = as_text(planned, PRICES)
    assert "A step needs 96 ms of work by all workers together, which were busy 100% of the time while " in text
    assert "more than 4 workers, twice the measured number, say what is possible at best" in text
    assert "The network carried 20 MB/s and would carry 47.6 MB/s" in text
    assert [line["workers"] for line in as_json(planned)["lines"]] == [2, 4, 6]
