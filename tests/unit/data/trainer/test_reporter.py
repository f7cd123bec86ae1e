"""Tests of the data service's reports, which rank 0 makes for all ranks once per epoch."""

import logging
from types import SimpleNamespace

import pytest
from msgspec.structs import replace

from lightning_sm.data.ipc.feeder_messages import FeederSnapshot, HostSnapshot
from lightning_sm.data.trainer.reporter import Reporter
from lightning_sm.errors import DataServiceError
from lightning_sm.record.data_figures import BatchFigures, RankFigures
from lightning_sm.record.events import DataService, Event
from lightning_sm.record.step_clock import BACKWARD, DATA_WAIT, FORWARD, StepClock

BATCH = BatchFigures(num_bytes=1000, queue_s=0.0, produce_s=0.5, transfer_s=0.0, num_ready=1)
HOST = HostSnapshot("algo-3", workers=1)


class Feeder:
    """A fake feeder that keeps a rank's shared figures, and has the figures of other ranks."""

    name = "rank 0 on algo-1"

    def __init__(self):
        self.shared = []
        self.ranks = {}
        self.host = HOST

    def share(self, figures):
        self.shared.append(figures)

    def snapshot(self):
        return FeederSnapshot([self.host], [], dict(self.ranks))


class Times:
    """A stand-in for ``StepTimes``, with a clock and a record."""

    def __init__(self, now):
        self.clock = StepClock(lambda: now[0])
        self.note_wait = self.clock.note_wait
        self.lines = []
        self.write = self.lines.append

    @property
    def totals(self):
        return self.clock.totals


def make_trainer(epoch=0, **values):
    """Return a fake Trainer in an epoch."""
    fit_loop = SimpleNamespace(epoch_loop=SimpleNamespace(_batches_that_stepped=0))
    known = {"loggers": [], "log_every_n_steps": 50, "is_global_zero": True, "current_epoch": epoch}
    return SimpleNamespace(fit_loop=fit_loop, **{**known, **values})


def train(reporter, times, trainer, now, wait_s=0.0, busy_s=1.0):
    """Train an epoch of three steps."""
    for _ in range(3):
        times.clock.enter(DATA_WAIT)
        now[0] += wait_s
        reporter.batch(trainer, BATCH, is_step=True)
        times.clock.enter(FORWARD)
        now[0] += busy_s
        times.clock.end_step(1)


@pytest.fixture
def now():
    """The current time, which the test sets."""
    return [0.0]


@pytest.fixture
def feeder():
    """A fake client of the feeder."""
    return Feeder()


@pytest.fixture
def times(now):
    """The clock of the training."""
    return Times(now)


@pytest.fixture
def reporter(feeder, times):
    """Rank 0's reporter at the start of training."""
    made = Reporter(lambda: feeder)
    made.begin_run()
    made.follow(times)
    return made


@pytest.fixture
def said(caplog):
    """The messages logged so far."""
    caplog.set_level(logging.INFO)
    return lambda: caplog.messages


def test_the_report_is_about_the_slowest_rank(feeder, reporter, times, now, said):
    """Rank 0, which does not wait, reports how long rank 1 has waited since the last report."""
    feeder.ranks["rank 1 on algo-2"] = RankFigures(num_batches=9, num_steps=9, wait_s=100.0)
    train(reporter, times, make_trainer(), now)
    added = RankFigures(num_batches=12, num_steps=12, wait_s=106.0, busy_s=2.0, produce_s=5.0)
    feeder.ranks["rank 1 on algo-2"] = added
    reporter.end_epoch(make_trainer(epoch=2))
    (line,) = said()
    assert line.startswith("Epoch 3: Rank 1 on algo-2 waits 75% of the time")


def test_a_run_does_not_report_what_came_late_from_the_one_before(feeder, reporter, times, now, said):
    """Waits of an earlier fit are not reported, even if they arrive during the next one."""
    trainer = make_trainer()
    train(reporter, times, trainer, now, wait_s=10.0)
    feeder.ranks["rank 1 on algo-2"] = RankFigures(num_batches=9, num_steps=9, wait_s=100.0)
    reporter.begin_run()
    second = Times(now)
    reporter.follow(second)
    train(reporter, second, trainer, now)
    reporter.end_epoch(trainer)
    assert said() == []


def test_a_healthy_epoch_has_no_line(feeder, reporter, times, now, said):
    """A healthy epoch has no report: the progress line shows its wait."""
    feeder.ranks["rank 1 on algo-2"] = RankFigures()
    train(reporter, times, make_trainer(), now, wait_s=0.25, busy_s=0.75)
    reporter.end_epoch(make_trainer())
    assert said() == []


def test_every_rank_shares_its_figures(feeder, reporter, times, now, said):
    """Ranks other than 0 share their figures, but report and log nothing, and request no snapshot."""
    feeder.snapshot = None
    trainer = make_trainer(is_global_zero=False)
    train(reporter, times, trainer, now)
    reporter.end_epoch(trainer)
    assert feeder.shared[0].num_steps == 1
    assert not said()
    assert not times.lines


def test_an_epoch_without_batches_has_no_report(reporter, said):
    """An epoch without batches has no report: nothing is connected if data hosts do not serve the loader."""
    reporter.end_epoch(make_trainer())
    assert not said()


def test_trouble_of_data_hosts_has_lines_of_its_own(feeder, reporter, times, now, caplog):
    """Problems of a data host are logged only in the epoch in which they happened."""
    for epoch, lost in enumerate((1, 0)):
        train(reporter, times, make_trainer(epoch), now)
        feeder.host = replace(feeder.host, num_lost=feeder.host.num_lost + lost)
        reporter.end_epoch(make_trainer(epoch))
    troubles = [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]
    assert troubles == ["Data host algo-3: connection lost once."]


def test_waits_are_those_of_the_clock_of_steps(feeder, reporter, times, now):
    """The waits that other ranks and the record get match the loggers' ``time/...`` metrics and the page."""
    trainer, clock = make_trainer(), times.clock
    for _ in range(9):
        clock.enter(DATA_WAIT)
        now[0] += 3
        reporter.batch(trainer, BATCH, is_step=True)
        clock.enter(FORWARD)
        now[0] += 0.25
        clock.enter(BACKWARD)
        now[0] += 0.75
        clock.end_step(1)
        clock.begin_span("validation")
        now[0] += 100
        clock.end_span("validation")
    reporter.end_epoch(trainer)
    figures = times.lines[-1].ranks[feeder.name]
    assert (figures["num_timed"], figures["wait_s"], figures["busy_s"], figures["sync_s"]) == (9, 27.0, 9.0, 6.75)
    assert clock.totals.waiting == 0.75


def test_a_later_fit_adds_to_the_sums_of_the_process(feeder, reporter, times, now):
    """Each fit has a new clock, but sums continue: data hosts would take falling sums for a new process."""
    train(reporter, times, make_trainer(), now, wait_s=1.0)
    reporter.begin_run()
    second = Times(now)
    reporter.follow(second)
    train(reporter, second, make_trainer(), now, wait_s=1.0)
    reporter.end_epoch(make_trainer())
    figures = second.lines[-1].ranks[feeder.name]
    assert (figures["num_steps"], figures["num_timed"], figures["wait_s"]) == (6, 6, 6.0)


def test_a_feeder_that_does_not_answer_costs_the_statistics_only(feeder, reporter, times, now, caplog):
    """If the feeder does not answer, training continues, or the fit finishes, without statistics."""

    def snapshot():
        raise DataServiceError("The feeder process did not answer within 10 s.")

    trainer = make_trainer()
    train(reporter, times, trainer, now)
    feeder.snapshot = snapshot
    reporter.end_epoch(trainer)
    assert "Statistics of the data service are unavailable: The feeder process did not answer" in caplog.text


def test_the_record_gets_sums_since_the_start(feeder, reporter, times, now):
    """The record gets the latest sums of every rank, including this one, and the events of data hosts."""
    feeder.host = replace(feeder.host, busy_s=3.0, num_hedges=2)
    train(reporter, times, make_trainer(), now)
    feeder.host = replace(feeder.host, state="down")
    reporter.end_epoch(make_trainer())
    lines = [line for line in times.lines if isinstance(line, DataService)]
    assert [line.ranks[feeder.name]["num_steps"] for line in lines] == [1, 3]
    assert [(host["name"], host["busy_s"], host["num_hedges"]) for host in lines[-1].hosts] == [("algo-3", 3.0, 2)]
    assert "host_lost" in [line.what for line in times.lines if isinstance(line, Event)]


def test_a_rank_that_has_finished_is_in_the_record(feeder, reporter, times, now):
    """The record includes a rank that has finished, although data hosts have forgotten it."""
    feeder.ranks["rank 1 on algo-2"] = RankFigures(num_batches=3, num_steps=3)
    train(reporter, times, make_trainer(), now)
    feeder.ranks.clear()
    reporter.end_epoch(make_trainer())
    assert times.lines[-1].ranks["rank 1 on algo-2"]["num_steps"] == 3


def test_loggers_get_metrics_every_so_many_batches(reporter, times, now):
    """Rank 0 logs metrics every ``log_every_n_steps`` batches."""
    logged = []
    logger = SimpleNamespace(log_metrics=lambda values, step: logged.append(values))
    train(reporter, times, make_trainer(loggers=[logger], log_every_n_steps=2), now)
    assert [values["data/produce_ms"] for values in logged] == [500.0]
