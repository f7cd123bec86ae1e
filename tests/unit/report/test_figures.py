"""Figures of a run, computed from the records of its processes."""

from pathlib import Path

import msgspec
import pytest
from msgspec.structs import replace

from lightning_sm.record.events import FOLDER, DataService, End, Event, Loader, Metrics, Span, Steps
from lightning_sm.record.prices import Prices
from lightning_sm.record.runs import read_run
from lightning_sm.report import verdict
from lightning_sm.report.figures import OTHER, RESTARTS, RUNNING, SHUTDOWN, STEPS, WAITING, Figures
from lightning_sm.report.limits import limits
from lightning_sm.report.sizing import measure
from tests.unit.report.recorded import BEGIN, data, head, input_bound, steps, use, write


def of(folder):
    """Return the figures of the run in a folder."""
    return Figures(read_run(folder))


def test_the_time_of_a_job_is_told_apart(tmp_path):
    """Each second of the job is attributed, and the time of steps is divided into work and waiting."""
    run = of(input_bound(tmp_path))
    assert run.seconds == pytest.approx(72.0)
    assert sum(run.shares.values()) == pytest.approx(72.0)
    found = {name: round(seconds, 1) for name, seconds in run.shares.items() if seconds}
    assert found == {"start-up": 5, "first step": 4, STEPS: 25.2, WAITING: 34.8, "validation": 1, SHUTDOWN: 1, OTHER: 1}
    assert run.fixed_s == pytest.approx(11.0)


def test_time_between_attempts_costs_nothing(tmp_path):
    """Time between attempts is not counted, and the last attempt determines the outcome."""
    input_bound(tmp_path, outcome="interrupted")
    run = of(input_bound(tmp_path, attempt=2, begin=10_000.0))
    assert run.seconds == pytest.approx(144.0)
    assert run.outcome == "succeeded"
    assert verdict.ending(run) == "Succeeded after 2 min 24 s in 2 attempts."
    prices = Prices({"trainer": 3600.0, "data": 0.0})
    assert verdict.price(run, prices) == pytest.approx(144.0)


def test_a_failure_says_its_reason(tmp_path):
    """The reason is that of the failed trainer, even if a data host succeeded."""
    run = of(input_bound(tmp_path, outcome="failed"))
    assert run.outcome == "failed"
    assert verdict.ending(run) == "Failed after 72 s: ValueError: <b>$x$</b> & so on."


@pytest.mark.parametrize(
    ("outcome", "ending"),
    [
        ("interrupted", "Interrupted after 72 s: the job can resume from the checkpoint that it saved."),
        ("stopped", "Stopped after 72 s. No checkpoint was saved."),
    ],
)
def test_an_interruption_reads_unlike_a_failure(tmp_path, outcome, ending):
    """An interruption is reported as one, together with whether the work was saved."""
    assert verdict.ending(of(input_bound(tmp_path, outcome=outcome))) == ending


def test_a_record_that_is_cut_off_is_no_long_shutdown(tmp_path):
    """The time after a training process's last line counts as shutdown only if the process has recorded its end."""
    path = input_bound(tmp_path) / FOLDER / "1" / "algo-1-rank-0.jsonl"
    assert of(tmp_path).shares["shutdown"] == pytest.approx(1.0)
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])
    assert of(tmp_path).shares["shutdown"] == 0.0


def test_a_stopped_run_names_its_last_checkpoint(tmp_path):
    """The checkpoint may even be of the last step, if it was saved just before the signal."""
    input_bound(tmp_path, outcome="stopped")
    write(tmp_path, Event(BEGIN + 70, "checkpoint_saved", "step 1200 in /opt/ml/checkpoints/last.ckpt"))
    said = verdict.ending(of(tmp_path))
    assert said == "Stopped after 72 s. Last checkpoint: step 1200 in /opt/ml/checkpoints/last.ckpt."


_BROKEN = "ValueError: label 7 on trainer host algo-2, rank 1 (exit code 1)"


@pytest.mark.parametrize("host", ["algo-1", "algo-2"])
def test_the_end_of_the_job_is_on_the_page_of_every_host(tmp_path, host):
    """A host stopped because of another's failure shows that failure, even if its record is the only one."""
    hosts = {"algo-1": "trainer", "algo-2": "trainer"}
    own = "stopped" if host == "algo-1" else "failed"
    lines = head(0, host, "launcher", hosts=hosts), End(BEGIN + 50, own, 143, _BROKEN, "failed")
    write(tmp_path, *lines, host=host, who="launcher")
    run = of(tmp_path)
    assert run.outcome == "failed"
    place = "on trainer host algo-2, rank 1 (exit code 1)"
    assert verdict.ending(run) == f"Failed after 50 s: ValueError: label 7 {place}."


def test_a_data_host_knows_how_its_job_ended(tmp_path):
    """A data host exits successfully whatever the trainers do, but its page shows the outcome of the job."""
    lines = head(0, "algo-2", "launcher"), End(BEGIN + 50, "succeeded", 0, "ValueError: x", "failed")
    write(tmp_path, *lines, host="algo-2", who="launcher")
    assert verdict.ending(of(tmp_path)) == "Failed after 50 s: ValueError: x."


def test_a_host_that_knows_how_the_job_ended_is_believed_before_one_that_does_not(tmp_path):
    """A trainer also fails if its peer dies, so a host that recorded the job's outcome takes precedence."""
    hosts = {"algo-1": "trainer", "algo-2": "trainer"}
    for host, end in (
        ("algo-1", End(BEGIN + 9, "failed", 1, "lost")),
        ("algo-2", End(BEGIN + 10, "x", 143, "", "stopped")),
    ):
        write(tmp_path, head(0, host, "launcher", hosts=hosts), end, host=host, who="launcher")
    assert of(tmp_path).outcome == "stopped"


def test_a_host_that_was_killed_is_named(tmp_path):
    """A killed host is named, because the other hosts fail or save a checkpoint without knowing of it."""
    for host, ends in (("algo-1", [End(BEGIN + 9, "interrupted", 143)]), ("algo-2", [use(5)])):
        write(tmp_path, head(0, host, "launcher"), *ends, host=host, who="launcher")
    assert verdict.ending(of(tmp_path)).endswith(" saved. The end of algo-2 was not recorded: killed or still running.")


@pytest.mark.parametrize(
    ("own", "group", "lines", "role"),
    [
        ("algo-2", "trainer", [], "trainer"),
        ("algo-1", "data-1", [], "data"),
        ("algo-1", "more", [], "trainer"),
        ("algo-1", "more", [data(31, 400)], "data"),
    ],
)
def test_the_role_of_a_group_without_a_record(tmp_path, own, group, lines, role):
    """The role follows from the group's name or rank 0's data, because a page may have the record of one host only."""
    other = {"algo-1": "algo-2", "algo-2": "algo-1"}[own]
    write(tmp_path, head(0, own, hosts={own: "own", other: group}, group="own"), use(1), *lines, host=own)
    assert {host.name: host.role for host in of(tmp_path).hosts}[other] == role


def test_a_killed_job_has_no_end(tmp_path):
    """Without an end line, the outcome counts as unknown."""
    write(tmp_path, head(1), Loader(BEGIN + 2), steps(11), steps(12))
    run = of(tmp_path)
    assert run.outcome == RUNNING
    assert "still running, or its hosts were killed" in verdict.ending(run)


def test_a_data_host_that_fails_alone_does_not_fail_the_job(tmp_path):
    """The outcome of the job is that of its trainers."""
    write(tmp_path, head(0, who="launcher"), End(BEGIN + 50, "succeeded", 0), who="launcher")
    lines = head(0, "algo-2", "launcher"), End(BEGIN + 20, "failed", 1, "it broke")
    write(tmp_path, *lines, host="algo-2", who="launcher")
    assert of(tmp_path).outcome == "succeeded"


def test_hosts_without_a_record_are_listed(tmp_path):
    """On SageMaker, the main host has only the names and types of other hosts."""
    write(tmp_path, head(1), steps(11))
    trainer, other = of(tmp_path).hosts
    assert (trainer.name, trainer.role, trainer.instance_type) == ("algo-1", "trainer", "ml.g5.xlarge")
    assert (other.name, other.role, other.instance_type, other.cpu) == ("algo-2", "data", "ml.c5.xlarge", None)


def test_a_mean_step_is_the_time_of_all_steps_by_their_number(tmp_path):
    """Page and log use the same mean, including the first seconds, in which caches fill."""
    slow = [steps(11, step_s=1.0), *(steps(11 + second, step_s=0.05) for second in range(1, 5))]
    write(tmp_path, head(1), *slow)
    run = of(tmp_path)
    assert run.pace.step_s == pytest.approx(0.24)
    assert run.pace.wall_s == pytest.approx(run.shares[STEPS] + run.shares[WAITING])


def test_a_rank_on_another_host_may_wait_longer(tmp_path):
    """The main host sees the wait of a rank elsewhere as a backward pass; data hosts report the actual wait."""
    line = data(16, 320)
    own, other = ({**line.ranks["rank 0"], "wait_s": wait_s, "busy_s": 16 - wait_s} for wait_s in (1.6, 14.0))
    write(
        tmp_path, head(1, world_size=2), *(steps(10 + t, waiting=0.1) for t in range(16)),
        DataService(line.t, line.hosts, {"rank 0": own, "rank 1": other}),
    )  # fmt: skip
    run = of(tmp_path)
    assert run.ranks[0].waiting == pytest.approx(0.1)
    assert run.pace.waiting == pytest.approx(14 / 16)
    assert run.pace.parts["backward"] == 0
    assert sum(run.pace.parts.values()) == pytest.approx(run.ranks[0].wall_s)


def test_the_main_host_says_what_all_records_say(tmp_path):
    """Pages from the main host's records and from those of all hosts agree.

    On SageMaker, a job's page has the records of one host, and a page from the archive those of all hosts. Before, the
    first one planned with its rank's steps, which include waiting for other ranks: 54 ms without waiting for data,
    instead of 6 ms.
    """
    sums = {"wait_s": 18.0, "busy_s": 2.0, "num_timed": 400, "num_steps": 400, "produce_s": 20.0, "num_bytes": 1}
    host = data(31, 400).hosts[0]
    figures = DataService(BEGIN + 31, [host], {"rank 0": {**sums, "wait_s": 4.0, "busy_s": 16.0}, "rank 1": sums})
    main = [head(1, world_size=2), *(steps(10 + t, waiting=0.2) for t in range(1, 21)), figures]
    write(tmp_path / "main", *main)
    for place in ("main", "all"):
        write(tmp_path / place, head(0, who="launcher"), use(5), who="launcher")
    write(tmp_path / "all", *main)
    other = [head(1, who="rank-1", world_size=2), *(steps(10 + t, waiting=0.9) for t in range(1, 21))]
    write(tmp_path / "all", *other, who="rank-1")
    one, both = of(tmp_path / "main"), of(tmp_path / "all")
    assert (one.pace.waiting, both.pace.waiting) == (pytest.approx(0.9), pytest.approx(0.9))
    assert measure(one).own_s == pytest.approx(measure(both).own_s) == pytest.approx(0.005)


def test_the_rank_that_waits_the_longest_is_the_one_that_counts(tmp_path):
    """The rank with the longest wait counts: the others wait for it in the backward pass, which looks like work."""
    for rank, waiting in ((0, 0.1), (1, 0.6)):
        who = f"rank-{rank}"
        write(tmp_path, head(1, who=who, world_size=2), *(steps(10 + t, waiting=waiting) for t in range(5)), who=who)
    run = of(tmp_path)
    assert run.pace.waiting == pytest.approx(0.6)
    assert run.samples_per_step == pytest.approx(64)


def test_samples_of_ranks_without_a_record_are_those_of_the_others(tmp_path):
    """The main host has records of its ranks only, so the other ranks are assumed to have as many samples."""
    write(tmp_path, head(1, world_size=4), steps(11))
    assert of(tmp_path).samples_per_step == pytest.approx(128)
    write(tmp_path / "x", head(1), steps(11, samples=0))
    assert of(tmp_path / "x").samples_per_step is None


def test_what_an_attempt_repeats_is_not_there_twice(tmp_path):
    """A curve continues from the checkpoint, as in a job that was never interrupted."""
    first = [Metrics(BEGIN + step, step, 0, {"loss": 1.0 / step}) for step in (10, 20, 30)]
    second = [Metrics(BEGIN + 100 + step, step, 0, {"loss": 0.1 * step}) for step in (20, 40)]
    write(tmp_path, head(1), *first)
    write(tmp_path, head(99), *second, attempt=2)
    assert of(tmp_path).metrics == {"loss": [(10, 0.1), (20, 2.0), (40, 4.0)]}


def test_a_value_that_lines_repeat_is_not_lost(tmp_path):
    """Lines repeat an epoch's metrics until the next epoch, so a curve extends to the end of the run."""
    lines = [Metrics(BEGIN + step, step, 0, {"acc": 0.5 if step < 30 else 0.7}) for step in (10, 20, 30, 40)]
    write(tmp_path, head(1), *lines)
    assert of(tmp_path).metrics == {"acc": [(10, 0.5), (20, 0.5), (30, 0.7), (40, 0.7)]}


def test_what_only_another_version_knows_of_data_hosts_is_left_out(tmp_path):
    """Unknown fields are ignored, and lines with damaged values count as empty, so the rest is still reported."""
    known = data(1, 100)
    newer = msgspec.structs.replace(known, hosts=[{**host, "newer": 1} for host in known.hosts])
    write(tmp_path / "newer", head(1), newer)
    assert of(tmp_path / "newer").data[1][0].workers == 2
    for damage in ({"num_built": "many"}, {"name": None}):
        damaged = msgspec.structs.replace(known, hosts=[{**host, **damage} for host in known.hosts])
        folder = tmp_path / next(iter(damage))
        write(folder, head(1), damaged)
        assert [host.workers for host in of(folder).data[1]] in ([], [2])


def test_sums_of_data_hosts_start_again_with_a_process(tmp_path):
    """The sums of two processes of rank 0 are added, each without its first figures."""
    life = [data(t, 100 * t) for t in range(1, 6)]
    write(tmp_path, head(1), *life, head(100), *life)
    ranks, (host,) = of(tmp_path).data
    assert ranks["rank 0"].num_steps == 800
    assert host.num_built == 800
    assert (host.workers, host.busy_s / host.capacity_s) == (2, pytest.approx(1.0))


def test_only_data_hosts_of_the_last_attempt_have_workers(tmp_path):
    """The service may rename an instance group's hosts; the batches of both names count."""
    for attempt, name in ((1, "algo-1"), (2, "algo-2")):
        lines = [replace(line, hosts=[{**line.hosts[0], "name": name}]) for line in (data(1, 100), data(2, 200))]
        write(tmp_path, head(100 * attempt), *lines, attempt=attempt)
    ranks, hosts = of(tmp_path).data
    assert ranks["rank 0"].num_steps == 400
    assert [(host.name, host.num_built, host.workers) for host in hosts] == [("algo-1", 200, 0), ("algo-2", 200, 2)]


def test_events_of_all_hosts_are_in_the_order_of_time(tmp_path):
    """Events are sorted by the seconds since the first process began."""
    write(tmp_path, head(0), Event(BEGIN + 9, "checkpoint_saved", "step 5"), Span(BEGIN + 3, "startup", BEGIN, 3.0))
    lines = head(1, "algo-2", "launcher"), use(2), Event(BEGIN + 4, "signal", "SIGTERM"), End(BEGIN + 20, "stopped", 0)
    write(tmp_path, *lines, host="algo-2", who="launcher")
    found = [(event.seconds, event.host, event.what) for event in of(tmp_path).events]
    assert found == [(4.0, "algo-2", "signal"), (9.0, "algo-1", "checkpoint_saved"), (20.0, "algo-2", "stopped")]


def test_the_headline_of_a_wait_says_where_the_batches_come_from(tmp_path):
    """The headline uses the log's sentences, for data hosts and for loaders on the trainer host."""
    remote = verdict.headline(of(input_bound(tmp_path / "remote")))
    assert remote.startswith("Limited by waiting for data (transforms), 48% of the job (34.8 s). Training waits 58% of")
    assert "for the transforms: the 2 workers of the data hosts are busy 100% of the time" in remote
    own = [head(1, hosts={"algo-1": "trainer"}), Loader(BEGIN + 2, workers=2, cpus=4)]
    write(tmp_path / "local", *own, *(steps(10 + t) for t in range(5)))
    assert verdict.headline(of(tmp_path / "local")).startswith("Limited by waiting for data (transforms), ")
    write(tmp_path / "fast", *own, *(steps(10 + t, waiting=0.01) for t in range(5)))
    assert verdict.headline(of(tmp_path / "fast")).startswith("Limited by the backward pass, ")
    write(tmp_path / "none", head(1))
    write(tmp_path / "none", use(3), who="rank-0")
    assert verdict.headline(of(tmp_path / "none")) == "No training step is recorded."


def test_a_long_start_is_said_with_its_cost(tmp_path):
    """Proposed changes name the seconds, the cost and the share of the job."""
    lines = [head(0), Loader(BEGIN + 60), Span(BEGIN + 60, "startup", BEGIN, 60.0)]
    write(tmp_path, *lines, *(steps(60 + t, waiting=0.0) for t in range(5)))
    prices = Prices({"trainer": 3600.0, "data": 0.0})
    text, *_ = verdict.changes(of(tmp_path), prices)
    assert text.startswith("Start-up, 47% of the job (30 s), $30.00: It took 60 s until training began")


def _attempts(folder, *, gap):
    """Write two attempts of 20 s and return their figures: the second repeats the last 40 of 200 steps after 6 s."""
    for attempt, begin, first in ((1, 0.0, 0), (2, 20.0 + gap, 160)):
        lines = [head(begin), Loader(BEGIN + begin + 5, batch=first)]
        lines += [
            Span(BEGIN + begin + 5, "startup", BEGIN + begin, 5.0),
            Span(BEGIN + begin + 6, "first_batch", BEGIN + begin + 5, 1.0),
        ]
        lines += [steps(begin + 6 + second, n=20, waiting=0.0, step=first + 20 * second) for second in range(1, 11)]
        write(folder, *lines, attempt=attempt)
    return of(folder)


def test_restarts_cost_their_starts_and_the_steps_that_are_trained_again(tmp_path):
    """The time between attempts is not counted, because no host costs anything in it."""
    run = _attempts(tmp_path, gap=1000.0)
    (restart,) = run.restarts
    assert restart.num_repeated == 40
    assert restart.seconds == run.shares[RESTARTS] == pytest.approx(6.0)
    assert run.spans == {"start-up": [5.0], "first step": [1.0]}
    assert sum(run.shares.values()) == pytest.approx(run.seconds, abs=0.1)
    (limit,) = [limit for limit in limits(run) if limit.name == "restarts"]
    assert limit.seconds == pytest.approx(6.0 + 40 * 0.05)
    assert limit.finding == (
        "Training was restarted once: 6 s from the last step to the next, and 40 steps were trained again (2 s)."
    )
    assert limit.change.endswith("Save checkpoints more often (every_n_train_steps).")


def test_advice_on_restarts_is_what_their_numbers_support():
    """Saving more often is not proposed after an interruption that lost no step; before, each restart led to it."""
    for name in ("restarts", "restart_within_job"):
        run = of(Path(__file__).parents[2] / "records" / name)
        change, *_ = verdict.changes(run, Prices())
        assert change.startswith("Restarts, ")
        assert "every_n_train_steps" not in change


@pytest.mark.parametrize("name", ["restarts", "restart_within_job"])
def test_a_run_has_the_steps_of_the_training(name):
    """The count includes the first step of each start, which means exclude, and steps lost in a killed process."""
    run = of(Path(__file__).parents[2] / "records" / name)
    (loader, *_), (*_, last) = (
        [line for record in run.main_records for line in record.lines if isinstance(line, kind)]
        for kind in (Loader, Steps)
    )
    assert run.num_steps == last.step - loader.batch == 200
    assert (run.pace.num_untimed, run.restarts[0].num_repeated) == (2, 0)
    assert run.num_steps == 200


def test_steps_that_are_trained_again_count_once(tmp_path):
    """Repeated steps count once in the total and twice in the measurement, even if one step has several batches."""
    for attempt, begin, resumed, last in ((1, 0.0, 0, 20), (2, 100.0, 40, 30)):
        begun = Loader(BEGIN + begin + 5, batch=resumed)
        line = replace(steps(begin + 20, n=79, step=last), untimed=1)
        write(tmp_path, head(begin), begun, line, attempt=attempt)
    run = of(tmp_path)
    assert (run.num_steps, run.pace.num_trained, run.pace.num_steps) == (120, 160, 158)
    assert run.restarts[0].num_repeated == 40


def test_a_process_that_waits_for_a_restart_takes_no_time_before_it(tmp_path):
    """A standby process counts from the restart on, and all its time until its first step is part of the restart."""
    for begin in (0.0, 20.0):
        lines = [head(begin + 5), Span(BEGIN + begin + 5, "startup", BEGIN, begin + 5), Loader(BEGIN + begin + 5)]
        write(tmp_path, *lines, Span(BEGIN + begin + 6, "first_batch", BEGIN + begin + 5, 1.0))
        write(tmp_path, *(steps(begin + 6 + second, waiting=0.0, step=20 * second) for second in range(1, 11)))
    run = of(tmp_path)
    (restart,) = run.restarts
    assert (restart.seconds, restart.num_repeated) == (pytest.approx(26.0 - 16.0), 200)
    assert run.spans == {"start-up": [5.0], "first step": [1.0]}
    assert sum(run.shares.values()) == pytest.approx(run.seconds) == pytest.approx(36.0)


def test_attempts_that_never_trained_are_part_of_a_restart(tmp_path):
    """An attempt that dies before its first step counts as time of the restart."""
    _attempts(tmp_path, gap=1000.0)
    write(tmp_path, head(500, who="launcher"), use(504), who="launcher", attempt=3)
    for path in (tmp_path / FOLDER / "3", tmp_path / FOLDER / "2"):
        path.rename(path.with_name({"3": "2.new", "2": "3"}[path.name]))
    (tmp_path / FOLDER / "2.new").rename(tmp_path / FOLDER / "2")
    (restart,) = of(tmp_path).restarts
    assert restart.seconds == pytest.approx(4.0 + 6.0)


def test_the_use_of_a_host_is_that_of_all_attempts(tmp_path):
    """The use of a host covers all attempts, including the time before an interruption."""
    input_bound(tmp_path, outcome="interrupted", seconds=10)
    run = of(input_bound(tmp_path, attempt=2, begin=100.0, seconds=10))
    seconds = [[use.t - BEGIN for use in host.uses] for host in run.hosts]
    assert seconds == [[5.0, 10.0, 15.0, 105.0, 110.0, 115.0]] * 2


def test_what_an_interruption_costs_belongs_together():
    """In a real job, a restart includes the checkpoint, the end of the attempt, the next start and its first batch."""
    run = of(Path(__file__).parents[2] / "records" / "restarts")
    (restart,) = run.restarts
    assert restart.num_repeated == 0
    before, after = ([line for line in record.lines if isinstance(line, Span)] for record in run.main_records)
    (saved,) = [span for span in before if span.name == "checkpoint"]
    (fetched,) = [span for span in after if span.name == "first_batch"]
    ending_s, starting_s = run.attempts[0].end - saved.begin, fetched.t - run.attempts[1].begin
    assert restart.seconds == pytest.approx(ending_s + starting_s, abs=0.01)
    assert {name: len(spans) for name, spans in run.spans.items()} == {
        "start-up": 2,  # of the training process and of its launcher
        "first step": 1,
        "checkpoints": 1,  # at the end
        "between epochs": 2,
        "model export": 1,
    }
    assert sum(run.shares.values()) == pytest.approx(run.seconds, abs=0.1)


def test_the_rank_that_comes_last_to_the_backward_pass_sets_the_pace(tmp_path):
    """The rank that starts the backward pass last limits the other ranks."""
    for rank, forward in ((0, 0.1), (1, 0.7)):
        parts = {"data_wait": 0.0, "forward": forward, "backward": 0.9 - forward}
        lines = [Steps(BEGIN + 10 + t, 20 * t, 20, 20, parts) for t in range(5)]
        write(tmp_path, head(1, who=f"rank-{rank}", world_size=2), *lines, who=f"rank-{rank}")
    run = of(tmp_path)
    assert run.pace.parts["forward"] == pytest.approx(3.5)
    assert [pace.own_s for pace in run.rank_paces] == [pytest.approx(0.005), pytest.approx(0.035)]


def test_a_rank_whose_last_record_is_elsewhere_does_not_set_the_pace(tmp_path):
    """A rank whose records are from earlier attempts only is ignored, because it would hide the last attempt."""
    for attempt, rank, forward in ((1, 0, 0.1), (1, 1, 0.7), (2, 0, 0.1)):
        who, begin = f"rank-{rank}", 100.0 * attempt
        parts = {"data_wait": 0.0, "forward": forward, "backward": 0.9 - forward}
        line = Steps(BEGIN + begin + 10, 40 * attempt, 40, 20, parts)
        write(tmp_path, head(begin, who=who, world_size=2), Loader(BEGIN + begin), line, who=who, attempt=attempt)
    run = of(tmp_path)
    assert (run.pace_rank, run.pace.num_trained, len(run.rank_paces)) == (0, 80, 2)
