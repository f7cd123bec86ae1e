"""Numbers of a run, from what its processes wrote."""

import pytest

from lightning_sm.record.events import End, Event, Loader, Metrics, Span
from lightning_sm.record.prices import Prices
from lightning_sm.record.runs import read_run
from lightning_sm.report import findings
from lightning_sm.report.figures import OTHER, RUNNING, SHUTDOWN, STEPS, WAITING, Figures
from tests.unit.report.recorded import BEGIN, data, head, input_bound, steps, use, write


def of(folder):
    """The figures of the run in a folder."""
    return Figures(read_run(folder))


def test_the_time_of_a_job_is_told_apart(tmp_path):
    """All seconds of the job are somewhere, and those of steps are split into work and waiting."""
    run = of(input_bound(tmp_path))
    assert run.seconds == pytest.approx(72.0)
    assert sum(run.shares.values()) == pytest.approx(72.0)
    found = {name: round(seconds, 1) for name, seconds in run.shares.items() if seconds}
    assert found == {
        "start-up": 5,
        "first batch": 4,
        STEPS: 25.2,
        WAITING: 34.8,
        "validation": 1,
        SHUTDOWN: 1,
        OTHER: 1,
    }
    assert run.apart_s == pytest.approx(12.0)


def test_time_between_attempts_costs_nothing(tmp_path):
    """Only attempts count, and the last one says how the job ended."""
    input_bound(tmp_path, outcome="interrupted")
    run = of(input_bound(tmp_path, attempt=2, begin=10_000.0))
    assert run.seconds == pytest.approx(144.0)
    assert run.outcome == "succeeded"
    assert findings.ending(run) == "Succeeded after 2 min 24 s in 2 attempts."
    prices = Prices({"trainer": 3600.0, "data": 0.0})
    assert findings.price(run, prices) == pytest.approx(144.0)


def test_a_failure_says_its_reason(tmp_path):
    """Of the trainers: a data host that succeeded changes nothing."""
    run = of(input_bound(tmp_path, outcome="failed"))
    assert run.outcome == "failed"
    assert findings.ending(run) == "Failed after 72 s: ValueError: <b>$x$</b> & so on."


def test_an_interruption_needs_no_reason(tmp_path):
    """That a signal ended the processes is what the word says."""
    assert findings.ending(of(input_bound(tmp_path, outcome="interrupted"))) == "Interrupted after 72 s."


def test_a_killed_job_has_no_end(tmp_path):
    """Without a last line, nothing is claimed about how it ended."""
    write(tmp_path, head(1), Loader(BEGIN + 2, is_remote=False), steps(11), steps(12))
    run = of(tmp_path)
    assert run.outcome == RUNNING
    assert "still running, or its hosts were killed" in findings.ending(run)


def test_a_data_host_that_fails_alone_does_not_fail_the_job(tmp_path):
    """The job ends as its trainers do."""
    write(tmp_path, head(0, who="launcher"), End(BEGIN + 50, "succeeded", 0), who="launcher")
    lines = head(0, "algo-2", "launcher"), End(BEGIN + 20, "failed", 1, "it broke")
    write(tmp_path, *lines, host="algo-2", who="launcher")
    assert of(tmp_path).outcome == "succeeded"


def test_hosts_without_a_record_are_listed(tmp_path):
    """The main host knows the others by name only, on SageMaker."""
    write(tmp_path, head(1), steps(11))
    trainer, other = of(tmp_path).hosts
    assert (trainer.name, trainer.role, trainer.instance_type) == ("algo-1", "trainer", "ml.g5.xlarge")
    assert (other.name, other.role, other.instance_type, other.cpu) == ("algo-2", "data", "ml.c5.xlarge", None)


def test_the_first_seconds_are_not_part_of_means(tmp_path):
    """Caches fill; where there is little else, they count."""
    slow = [steps(11, step_s=1.0), *(steps(11 + second, step_s=0.05) for second in range(1, 5))]
    write(tmp_path / "long", head(1), *slow)
    assert of(tmp_path / "long").slowest.step_s == pytest.approx(0.05)
    write(tmp_path / "short", head(1), *slow[:2])
    assert of(tmp_path / "short").slowest.step_s == pytest.approx(0.525)


def test_the_rank_that_waits_the_longest_is_the_one_that_counts(tmp_path):
    """The others wait for it in the backward pass, which looks like work."""
    for rank, waiting in ((0, 0.1), (1, 0.6)):
        who = f"rank-{rank}"
        write(tmp_path, head(1, who=who, world_size=2), *(steps(10 + t, waiting=waiting) for t in range(5)), who=who)
    run = of(tmp_path)
    assert run.slowest.waiting == pytest.approx(0.6)
    assert run.samples_per_step == pytest.approx(64)


def test_samples_of_ranks_without_a_record_are_those_of_the_others(tmp_path):
    """The main host of a job has the record of its own ranks."""
    write(tmp_path, head(1, world_size=4), steps(11))
    assert of(tmp_path).samples_per_step == pytest.approx(128)
    write(tmp_path / "x", head(1), steps(11, samples=0))
    assert of(tmp_path / "x").samples_per_step is None


def test_what_an_attempt_repeats_is_not_there_twice(tmp_path):
    """The curve goes on from the checkpoint, as that of a job that was never interrupted."""
    first = [Metrics(BEGIN + step, step, 0, {"loss": 1.0 / step, "nan": None}) for step in (10, 20, 30)]
    second = [Metrics(BEGIN + 100 + step, step, 0, {"loss": 0.1 * step}) for step in (20, 40)]
    write(tmp_path, head(1), *first)
    write(tmp_path, head(99), *second, attempt=2)
    assert of(tmp_path).metrics == {"loss": [(10, 0.1), (20, 2.0), (40, 4.0)]}


def test_a_value_that_lines_repeat_is_one_point(tmp_path):
    """Metrics of epochs stand in every line until the next epoch; a curve of them has a point for each change."""
    lines = [Metrics(BEGIN + step, step, 0, {"acc": 0.5 if step < 30 else 0.7}) for step in (10, 20, 30, 40)]
    write(tmp_path, head(1), *lines)
    assert of(tmp_path).metrics == {"acc": [(10, 0.5), (30, 0.7)]}


def test_sums_of_data_hosts_start_again_with_a_process(tmp_path):
    """Those of two lives of rank 0 are added up, each without its first figures."""
    life = [data(t, 100 * t) for t in range(1, 6)]
    write(tmp_path, head(1), *life, head(100), *life)
    ranks, (host,) = of(tmp_path).data
    assert ranks["rank 0"].num_steps == 800
    assert host.num_built == 800
    assert (host.workers, host.busy_s / host.capacity_s) == (2, pytest.approx(1.0))


def test_events_of_all_hosts_are_in_the_order_of_time(tmp_path):
    """With seconds since the first process began."""
    write(tmp_path, head(0), Event(BEGIN + 9, "checkpoint_saved", "step 5"), Span(BEGIN + 3, "startup", BEGIN, 3.0))
    lines = head(1, "algo-2", "launcher"), use(2), Event(BEGIN + 4, "signal", "SIGTERM"), End(BEGIN + 20, "stopped", 0)
    write(tmp_path, *lines, host="algo-2", who="launcher")
    found = [(event.seconds, event.host, event.what) for event in of(tmp_path).events]
    assert found == [(4.0, "algo-2", "signal"), (9.0, "algo-1", "checkpoint_saved"), (20.0, "algo-2", "stopped")]


def test_the_verdict_is_that_of_the_log(tmp_path):
    """The same sentences, for data hosts and for loaders on the host itself."""
    remote = findings.bottleneck(of(input_bound(tmp_path / "remote")))
    assert remote.startswith("Training waits 58% of the time for the transforms: the 2 workers")
    own = [head(1, hosts={"algo-1": "trainer"}), Loader(BEGIN + 2, is_remote=False, workers=2, cpus=4)]
    write(tmp_path / "local", *own, *(steps(10 + t) for t in range(5)))
    assert findings.bottleneck(of(tmp_path / "local")).startswith(
        "Input-bound 58% of the time, limited by the loader's 2 workers"
    )
    write(tmp_path / "fast", *own, *(steps(10 + t, waiting=0.01) for t in range(5)))
    text = findings.bottleneck(of(tmp_path / "fast"))
    assert text == "Not input-bound: a step takes 50 ms, 1% of it waiting for data."
    write(tmp_path / "none", head(1))
    write(tmp_path / "none", use(3), who="rank-0")
    assert findings.bottleneck(of(tmp_path / "none")) == "No training step is recorded."


def test_a_long_start_is_said_with_its_cost(tmp_path):
    """Advice names the seconds, the money and the share of the job."""
    lines = [head(0), Span(BEGIN + 60, "startup", BEGIN, 60.0), *(steps(60 + t, waiting=0.0) for t in range(5))]
    write(tmp_path, *lines)
    prices = Prices({"trainer": 3600.0, "data": 0.0})
    (text,) = findings.advice(of(tmp_path), prices)
    assert text.startswith("Start-up took 60 s and $60.00, 94% of the job")
