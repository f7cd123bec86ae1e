"""Reports of the data service: of all ranks, by rank 0, once per epoch."""

import logging
from types import SimpleNamespace

import pytest
from msgspec.structs import replace

from lightning_sm.data.ipc.feeder_messages import FeederSnapshot, HostSnapshot
from lightning_sm.data.protocol.figures import BatchFigures, RankFigures
from lightning_sm.data.trainer.reporter import EpochReport, Reporter, data_report
from lightning_sm.errors import DataServiceError
from lightning_sm.record import step_clock

BATCH = BatchFigures(num_bytes=1000, queue_s=0.0, produce_s=0.5, transfer_s=0.0, num_ready=1)
HOST = HostSnapshot("algo-3", workers=1)


class Feeder:
    """What a rank shares, and what the data hosts know of others."""

    name = "rank 0 on algo-1"

    def __init__(self):
        self.shared = []
        self.ranks = {}
        self.host = HOST

    def share(self, figures):
        self.shared.append(figures)

    def snapshot(self):
        return FeederSnapshot([self.host], [], dict(self.ranks))


def make_trainer(epoch=0, **values):
    """A Trainer in an epoch of three batches; ``taken`` says at which."""
    batches = SimpleNamespace(current=SimpleNamespace(processed=0))
    loop = SimpleNamespace(batch_progress=batches, _batches_that_stepped=0)
    fit_loop = SimpleNamespace(
        epoch_progress=SimpleNamespace(current=SimpleNamespace(processed=epoch)), epoch_loop=loop
    )
    known = {
        "loggers": [],
        "log_every_n_steps": 50,
        "num_training_batches": 3,
        "is_last_batch": False,
        "is_global_zero": True,
        "max_epochs": 10,
    }
    return SimpleNamespace(fit_loop=fit_loop, **{**known, **values})


def train(reporter, trainer, now, wait_s=0.0, busy_s=1.0):
    """Train an epoch of three steps."""
    reporter.on_train_epoch_start(trainer, None)
    for number in range(3):
        trainer.fit_loop.epoch_loop.batch_progress.current.processed = number
        trainer.is_last_batch = number == 2
        reporter.begin_wait()
        now[0] += wait_s
        reporter.batch(trainer, BATCH, is_step=True)
        now[0] += busy_s
        reporter.on_train_batch_end(trainer, None, None, None, number)


@pytest.fixture
def now():
    """The time, which the test sets."""
    return [0.0]


@pytest.fixture
def feeder():
    """The client of the feeder."""
    return Feeder()


@pytest.fixture
def reporter(feeder, now):
    """The reporter of rank 0 of a Trainer without ``StepTimes``, when the training begins."""
    made = Reporter(lambda: feeder)
    made.follow(step_clock.StepClock(lambda: now[0]))
    return made


def test_the_report_is_about_the_slowest_rank(feeder, reporter, now):
    """Rank 0 waits for nothing, and says how long rank 1 waited, since the last report."""
    feeder.ranks["rank 1 on algo-2"] = RankFigures(num_batches=9, num_steps=9, wait_s=100.0)
    train(reporter, make_trainer(), now)
    added = RankFigures(num_batches=12, num_steps=12, wait_s=106.0, busy_s=2.0, produce_s=5.0)
    feeder.ranks["rank 1 on algo-2"] = added
    report = reporter.report()
    assert report.data_wait == pytest.approx(0.75)
    assert report.verdict.startswith("Rank 1 on algo-2 waits 75% of the time")
    assert reporter.report() is None


def test_a_run_does_not_report_what_came_late_from_the_one_before(feeder, reporter, now):
    """Rank 1 waited in an earlier fit, and rank 0 as well."""
    trainer = make_trainer()
    train(reporter, trainer, now, wait_s=10.0)
    reporter.end_epoch(trainer)
    feeder.ranks["rank 1 on algo-2"] = RankFigures(num_batches=9, num_steps=9, wait_s=100.0)
    reporter.begin_run()
    train(reporter, trainer, now)
    assert reporter.report() == EpochReport(0.0, None)


def test_a_healthy_epoch_has_only_a_number(feeder, reporter, now):
    """No word more."""
    feeder.ranks["rank 1 on algo-2"] = RankFigures()
    train(reporter, make_trainer(), now, wait_s=0.25, busy_s=0.5)
    assert reporter.report() == EpochReport(0.25, None)


def test_every_rank_shares_its_figures_at_the_end_of_an_epoch(feeder, reporter, now):
    """Rank 1 reports nothing, logs nothing, and asks for no state."""
    feeder.state = None
    trainer = make_trainer(is_global_zero=False)
    train(reporter, trainer, now)
    reporter.end_epoch(trainer)
    assert feeder.shared[-1] == replace(feeder.shared[-1], num_steps=3, busy_s=2.0)


def test_without_a_progress_line_the_report_is_a_line(feeder, reporter, now, caplog):
    """It counts epochs from 1, as progress lines do, and comes once."""
    trainer = make_trainer(epoch=2)
    with caplog.at_level(logging.INFO):
        train(reporter, trainer, now)
        reporter.end_epoch(trainer)
        reporter.end_epoch(trainer)
    assert caplog.messages == ["epoch=3/10 data_wait=0.0%"]


def test_without_a_trainer_there_is_nothing_to_report(reporter):
    """A script that iterates by itself announces epochs as well."""
    reporter.end_epoch(None)


def test_with_a_progress_line_there_is_no_other(reporter, now, caplog):
    """The progress line takes the report."""
    trainer = make_trainer(callbacks=[object(), reporter])
    with caplog.at_level(logging.INFO):
        train(reporter, trainer, now)
        assert data_report(trainer) == EpochReport(0.0, None)
        reporter.end_epoch(trainer)
    assert not caplog.messages


def test_trouble_of_data_hosts_has_lines_of_its_own(feeder, reporter, now, caplog):
    """Only in the epoch in which it happened."""
    for epoch, lost in enumerate((1, 0)):
        train(reporter, make_trainer(epoch, num_training_batches=float("inf")), now)
        feeder.host = replace(feeder.host, num_lost=feeder.host.num_lost + lost)
        reporter.report()
        reporter.end_epoch(make_trainer())
    assert caplog.messages == ["Data host algo-3: connection lost once."]


def test_time_with_other_ranks_is_no_own_time(feeder, reporter, now):
    """From the first backward pass of a step to its end; a validation is neither."""
    trainer = make_trainer()
    reporter.batch(trainer, BATCH, is_step=True)
    now[0] += 2
    for _ in range(2):
        reporter.on_before_backward(trainer, None, None)
        now[0] += 1.5
    reporter.on_train_batch_end(trainer, None, None, None, 0)
    reporter.on_validation_start(trainer, None)
    now[0] += 100
    reporter.on_validation_end(trainer, None)
    trainer.fit_loop.epoch_loop.batch_progress.current.processed = 2
    reporter.batch(trainer, BATCH, is_step=True)
    assert (feeder.shared[-1].busy_s, feeder.shared[-1].sync_s) == (5.0, 3.0)


def test_waits_are_those_of_the_clock_of_steps(feeder, reporter, now):
    """What other ranks, progress lines and the record get is what the loggers' ``time/...`` and the page show.

    Before, the data service had a clock of its own, in which a validation between two steps was work of the second one.
    """
    clock = step_clock.StepClock(lambda: now[0])
    reporter.follow(clock, lambda: clock.totals)
    trainer = make_trainer(num_training_batches=9)
    for number in range(9):
        trainer.fit_loop.epoch_loop.batch_progress.current.processed = number
        clock.enter(step_clock.DATA_WAIT)
        now[0] += 3
        reporter.begin_wait()
        reporter.batch(trainer, BATCH, is_step=True)
        clock.enter(step_clock.FORWARD)
        now[0] += 1
        reporter.on_train_batch_end(trainer, None, None, None, number)
        clock.end_step(1)
        clock.begin_span("validation")
        now[0] += 100
        clock.end_span("validation")
    assert clock.totals.share("data_wait") == 0.75
    assert reporter.report().data_wait == 0.75


def test_a_later_fit_adds_to_the_sums_of_the_process(feeder, reporter, now):
    """Each fit has a clock of its own, and data hosts take sums that fall for those of a new process."""
    for _ in range(2):
        reporter.follow(step_clock.StepClock(lambda: now[0]))
        train(reporter, make_trainer(), now, wait_s=1.0)
        reporter.end_epoch(make_trainer())
        reporter.begin_run()
    ranks = reporter.sums()[1]["rank 0 on algo-1"]
    assert (ranks["num_steps"], ranks["num_timed"], ranks["wait_s"], ranks["first_wait_s"]) == (6, 6, 4.0, 2.0)


def test_a_feeder_that_does_not_answer_costs_the_statistics_only(feeder, reporter, now, caplog):
    """A training, or a fit that has ended, goes on without them."""

    def snapshot():
        raise DataServiceError("The feeder process did not answer within 10 s.")

    trainer = make_trainer()
    train(reporter, trainer, now)
    feeder.snapshot = snapshot
    with caplog.at_level(logging.WARNING):
        reporter.end_epoch(trainer)
    assert "no statistics of the data service: The feeder process did not answer" in caplog.text


def test_the_record_gets_sums_since_the_start(feeder, reporter, now):
    """Of this rank, too, whose last figures may not have arrived anywhere yet."""
    feeder.host = replace(feeder.host, busy_s=3.0, num_hedges=2)
    train(reporter, make_trainer(), now)
    (host,), ranks = reporter.sums()
    assert (host.name, host.busy_s, host.num_hedges) == ("algo-3", 3.0, 2)
    assert ranks["rank 0 on algo-1"]["num_steps"] == 3


def test_a_rank_that_has_finished_is_in_the_record(feeder, reporter, now):
    """Data hosts know it no longer when rank 0 ends its training."""
    feeder.ranks["rank 1 on algo-2"] = RankFigures(num_batches=3, num_steps=3)
    train(reporter, make_trainer(), now)
    reporter.report()
    feeder.ranks.clear()
    assert reporter.sums()[1]["rank 1 on algo-2"]["num_steps"] == 3
