"""Reports of the data service: of all ranks, by rank 0, once per epoch."""

import logging
from dataclasses import replace
from types import SimpleNamespace

import pytest

from lightning_sm.data.ipc.feeder_messages import FeederSnapshot, HostSnapshot
from lightning_sm.data.protocol.figures import BatchFigures, RankFigures
from lightning_sm.data.trainer.reporter import EpochReport, Reporter, data_report
from lightning_sm.errors import DataServiceError

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
        "is_global_zero": True,
        "max_epochs": 10,
    }
    return SimpleNamespace(fit_loop=fit_loop, **{**known, **values})


def train(reporter, trainer, wait_s=0.0, busy_s=1.0):
    """Take the three batches of an epoch."""
    for number in range(3):
        trainer.fit_loop.epoch_loop.batch_progress.current.processed = number
        reporter.batch(trainer, BATCH, wait_s, None if number == 0 else busy_s, is_step=True)


@pytest.fixture
def feeder():
    """The client of the feeder."""
    return Feeder()


@pytest.fixture
def reporter(feeder):
    """The reporter of rank 0."""
    return Reporter(lambda: feeder)


def test_the_report_is_about_the_slowest_rank(feeder, reporter):
    """Rank 0 waits for nothing, and says how long rank 1 waited, since the last report."""
    feeder.ranks["rank 1 on algo-2"] = RankFigures(num_batches=9, num_steps=9, wait_s=100.0)
    train(reporter, make_trainer())
    added = RankFigures(num_batches=12, num_steps=12, wait_s=106.0, busy_s=2.0, produce_s=5.0)
    feeder.ranks["rank 1 on algo-2"] = added
    report = reporter.report()
    assert report.data_wait == pytest.approx(0.75)
    assert report.verdict.startswith("Rank 1 on algo-2 waits 75% of the time")
    assert reporter.report() is None


def test_a_run_does_not_report_what_came_late_from_the_one_before(feeder, reporter):
    """Rank 1 waited in an earlier fit, and rank 0 as well."""
    trainer = make_trainer()
    train(reporter, trainer, wait_s=10.0)
    reporter.end_epoch(trainer)
    feeder.ranks["rank 1 on algo-2"] = RankFigures(num_batches=9, num_steps=9, wait_s=100.0)
    reporter.begin_run()
    train(reporter, trainer)
    assert reporter.report() == EpochReport(0.0, None)


def test_a_healthy_epoch_has_only_a_number(feeder, reporter):
    """No word more."""
    feeder.ranks["rank 1 on algo-2"] = RankFigures()
    train(reporter, make_trainer(), wait_s=0.25, busy_s=0.75)
    assert reporter.report() == EpochReport(0.25, None)


def test_every_rank_shares_its_figures_at_the_end_of_an_epoch(feeder, reporter):
    """Rank 1 reports nothing, logs nothing, and asks for no state."""
    feeder.state = None
    trainer = make_trainer(is_global_zero=False)
    train(reporter, trainer)
    reporter.end_epoch(trainer)
    assert feeder.shared[-1] == replace(feeder.shared[-1], num_steps=3, busy_s=2.0)


def test_without_a_progress_line_the_report_is_a_line(feeder, reporter, caplog):
    """It counts epochs from 1, as progress lines do, and comes once."""
    trainer = make_trainer(epoch=2)
    with caplog.at_level(logging.INFO):
        train(reporter, trainer)
        reporter.end_epoch(trainer)
        reporter.end_epoch(trainer)
    assert caplog.messages == ["epoch=3/10 data_wait=0.0%"]


def test_without_a_trainer_there_is_nothing_to_report(reporter):
    """A script that iterates by itself announces epochs as well."""
    reporter.end_epoch(None)


def test_with_a_progress_line_there_is_no_other(reporter, caplog):
    """The progress line takes the report."""
    trainer = make_trainer(callbacks=[object(), reporter])
    with caplog.at_level(logging.INFO):
        train(reporter, trainer)
        assert data_report(trainer) == EpochReport(0.0, None)
        reporter.end_epoch(trainer)
    assert not caplog.messages


def test_trouble_of_data_hosts_has_lines_of_its_own(feeder, reporter, caplog):
    """Only in the epoch in which it happened."""
    for epoch, lost in enumerate((1, 0)):
        train(reporter, make_trainer(epoch, num_training_batches=float("inf")))
        feeder.host = replace(feeder.host, num_lost=feeder.host.num_lost + lost)
        reporter.report()
        reporter.end_epoch(make_trainer())
    assert caplog.messages == ["Data host algo-3 in this epoch: connection lost once."]


def test_time_with_other_ranks_is_no_own_time(feeder, reporter, monkeypatch):
    """From the first backward pass of a step to its end."""
    clock = iter([10.0, 13.0])
    monkeypatch.setattr("lightning_sm.data.trainer.reporter.time.perf_counter", lambda: next(clock))
    trainer = make_trainer()
    reporter.batch(trainer, BATCH, 0.0, None, is_step=True)
    reporter.on_before_backward(trainer, None, None)
    reporter.on_before_backward(trainer, None, None)
    reporter.on_train_batch_end(trainer, None, None, None, 0)
    trainer.fit_loop.epoch_loop.batch_progress.current.processed = 2
    reporter.batch(trainer, BATCH, 0.0, 5.0, is_step=True)
    assert (feeder.shared[-1].busy_s, feeder.shared[-1].sync_s) == (5.0, 3.0)


def test_a_feeder_that_does_not_answer_costs_the_statistics_only(feeder, reporter, caplog):
    """A training, or a fit that has ended, goes on without them."""

    def snapshot():
        raise DataServiceError("The feeder process did not answer within 10 s.")

    trainer = make_trainer()
    train(reporter, trainer)
    feeder.snapshot = snapshot
    with caplog.at_level(logging.WARNING):
        reporter.end_epoch(trainer)
    assert "no statistics of the data service: The feeder process did not answer" in caplog.text


def test_the_verdict_of_a_run_adds_up_the_slowest_rank_of_each_epoch(feeder, reporter):
    """Rank 0 waits for data in one epoch, and for rank 1 in the next one: training waits in both."""
    feeder.host = replace(feeder.host, workers=1, busy_s=40.0, capacity_s=40.0)
    other = RankFigures(num_batches=3, num_steps=3, num_timed=2, busy_s=10.0, produce_s=9.0)
    feeder.ranks["rank 1 on algo-2"] = RankFigures()
    train(reporter, make_trainer(0), wait_s=4.0)
    feeder.host = replace(feeder.host, busy_s=50.0, capacity_s=50.0)
    feeder.ranks["rank 1 on algo-2"] = other
    assert reporter.report().data_wait == pytest.approx(0.8)
    reporter.end_epoch(make_trainer())
    train(reporter, make_trainer(1), busy_s=5.0)
    feeder.host = replace(feeder.host, busy_s=60.0, capacity_s=60.0)
    feeder.ranks["rank 1 on algo-2"] = RankFigures(6, 6, 4, wait_s=8.0, busy_s=12.0, produce_s=18.0)
    assert "Training waits 80% of the time" in reporter.run_verdict()  # also of an epoch that was interrupted
    assert reporter.report().data_wait == pytest.approx(0.8)
    assert "Training waits 80% of the time" in reporter.run_verdict()


def test_without_batches_a_run_has_no_verdict(reporter):
    """A fit that ends before its first batch."""
    assert reporter.run_verdict() is None


def test_the_record_gets_sums_since_the_start(feeder, reporter):
    """Of this rank, too, whose last figures may not have arrived anywhere yet."""
    feeder.host = replace(feeder.host, busy_s=3.0, num_hedges=2)
    train(reporter, make_trainer())
    (host,), ranks = reporter.sums()
    assert (host.name, host.busy_s, host.num_hedges) == ("algo-3", 3.0, 2)
    assert ranks["rank 0 on algo-1"]["num_steps"] == 3


def test_a_rank_that_has_finished_is_in_the_record(feeder, reporter):
    """Data hosts know it no longer when rank 0 ends its training."""
    feeder.ranks["rank 1 on algo-2"] = RankFigures(num_batches=3, num_steps=3)
    train(reporter, make_trainer())
    reporter.report()
    feeder.ranks.clear()
    assert reporter.sums()[1]["rank 1 on algo-2"]["num_steps"] == 3
