"""What is concluded from what hosts show: states, rates, shares."""

import time

import pytest

from lightning_sm.data.protocol.calls import HostReport
from lightning_sm.data.protocol.figures import RankFigures
from lightning_sm.job.control_folder import OwnProcess, Phase
from lightning_sm.job.facts import InstanceGroup, SageMakerJob
from lightning_sm.job.variables import CONTROL_DIR
from lightning_sm.record.events import End, FileHead, HostUse, Recorder, Steps
from lightning_sm.record.runs import read_run
from lightning_sm.report.figures import Figures
from lightning_sm.top import snapshot
from lightning_sm.top.data_hosts import HostAnswer
from lightning_sm.top.running import RunningHost
from lightning_sm.top.snapshot import Watch

GROUPS = (InstanceGroup("trainer", ("algo-1", "algo-2"), "ml.g5.xlarge"), InstanceGroup("data", ("algo-3",)))


class FakeDataHosts:
    """Gives prepared answers."""

    answers = {"algo-3": HostAnswer()}  # noqa: RUF012 - replaced by tests

    def ask(self, job, env):
        """Return the answers that the test has prepared."""
        return self.answers

    def close(self):
        """Nothing is open."""


@pytest.fixture
def clock(monkeypatch):
    """Seconds since the epoch, which the test sets."""
    now = [1000.0]
    monkeypatch.setattr(snapshot.time, "time", lambda: now[0])
    return now


@pytest.fixture
def watch(monkeypatch, clock):
    """Watches a job whose data host gives prepared answers."""
    monkeypatch.setattr(snapshot, "StatusPoller", FakeDataHosts)
    monkeypatch.setattr(FakeDataHosts, "answers", FakeDataHosts.answers)
    with Watch("digits") as looking:
        yield looking


def job(tmp_path, host="algo-1"):
    """The job as one of its hosts sees it."""
    hosts = ("algo-1", "algo-2", "algo-3")
    return SageMakerJob(host, hosts, GROUPS, "test", tmp_path, name="digits", checkpoint_dir=tmp_path / "ck")


def running(tmp_path, **env):
    """One trainer host of it that runs here."""
    return [RunningHost(job(tmp_path), env, since=990.0)]


def state(built, built_s, wait_s=0.0, busy_s=0.0, **facts):
    """What a data host answers, with the figures of a rank on each trainer host."""
    figures = RankFigures(num_batches=1, wait_s=wait_s, busy_s=busy_s)
    ranks = {"rank 0 on algo-1": figures, "rank 1 on algo-2": figures}
    hosts = {"rank 0 on algo-1": "algo-1", "rank 1 on algo-2": "algo-2"}
    known = {"workers": 4, "busy": 2, "queued": 5, "built": built, "built_s": built_s, "figures": ranks, "hosts": hosts}
    return {"algo-3": HostAnswer(HostReport("algo-3", **{**known, **facts}))}


def test_rates_of_data_hosts_and_waits_of_ranks(watch, clock, tmp_path):
    """They are what was added over the last seconds, also for ranks whose host is not this one."""
    FakeDataHosts.answers = state(100, 10.0, 5.0, 50.0)
    first = watch.look(running(tmp_path))
    assert [row.state for row in first.hosts] == ["starting", "not seen from here", "serving"]
    assert (first.wait_share, first.hosts[2].batches_per_s) == (None, None)
    clock[0] += 2
    FakeDataHosts.answers = state(140, 14.0, 5.5, 51.5, busy=0)
    shown = watch.look(running(tmp_path))
    data = shown.hosts[2]
    assert (data.state, data.workers, data.busy, data.queued) == ("idle", 4, 0, 5)
    assert (data.batches_per_s, data.batch_s) == (20.0, pytest.approx(0.1))
    assert [row.wait_share for row in shown.hosts] == [0.25, 0.25, None]
    assert (shown.wait_share, shown.seconds) == (0.25, 12.0)


def test_a_data_host_that_was_restarted_counts_from_zero(watch, clock, tmp_path):
    """Its rates are unknown for a moment, not negative."""
    FakeDataHosts.answers = state(100, 10.0, 5.0, 50.0)
    watch.look(running(tmp_path))
    clock[0] += 1
    FakeDataHosts.answers = state(3, 0.3)
    shown = watch.look(running(tmp_path))
    assert (shown.hosts[2].batches_per_s, shown.wait_share) == (None, None)


def test_a_data_host_that_does_not_answer(watch, tmp_path):
    """Before it has ever answered it is starting."""
    FakeDataHosts.answers = {"algo-3": HostAnswer(problem="does not answer")}
    assert watch.look(running(tmp_path)).hosts[2].state == "starting"
    FakeDataHosts.answers = state(1, 1.0)
    watch.look(running(tmp_path))
    FakeDataHosts.answers = {"algo-3": HostAnswer(problem="does not answer")}
    row = watch.look(running(tmp_path)).hosts[2]
    assert (row.state, row.note) == ("no answer", "does not answer")


def test_a_data_host_that_no_trainer_needs_has_not_failed(watch, tmp_path):
    """It leaves when the last trainer has its batches, and its launcher waits for the end of the job."""
    folder = tmp_path / "control"
    folder.mkdir()
    seen = {CONTROL_DIR.name: str(folder)}
    hosts = [RunningHost(job(tmp_path, host), seen, since=990.0) for host in ("algo-1", "algo-2")]
    process = OwnProcess(folder)
    for phase, expected in ((Phase.TRAINING, "no answer"), (Phase.FINISHING, "finishing")):
        FakeDataHosts.answers = state(1, 1.0)
        watch.look(hosts)
        process.beat(0, 7, 1, phase)
        FakeDataHosts.answers = {"algo-3": HostAnswer(problem="does not answer")}
        row = watch.look(hosts).hosts[2]
        assert row.state == expected
        assert bool(row.note) == (phase is Phase.TRAINING)


def test_a_rank_that_says_nothing_is_silent(watch, tmp_path, monkeypatch):
    """Unless what it does may take any time; the note says for how long."""
    folder = tmp_path / "control"
    folder.mkdir()
    hosts = running(tmp_path, **{CONTROL_DIR.name: str(folder)})
    process = OwnProcess(folder)
    process.beat(0, 7, 1, Phase.TRAINING)
    row = watch.look(hosts).hosts[0]
    assert (row.state, row.step, row.epoch, row.ranks, row.note) == ("training", 7, 2, 1, "")
    later = time.monotonic() + 75
    monkeypatch.setattr(snapshot.time, "monotonic", lambda: later)
    row = watch.look(hosts).hosts[0]
    assert row.state == "silent"
    assert row.note.startswith("rank 0 training for 75 s")
    monkeypatch.undo()
    process.beat(0, 7, 1, Phase.SAVING)
    monkeypatch.setattr(snapshot.time, "monotonic", lambda: later)
    monkeypatch.setattr(snapshot, "StatusPoller", FakeDataHosts)
    assert watch.look(hosts).hosts[0].state == "saving a checkpoint"


def test_what_the_record_says(watch, clock, tmp_path):
    """Use of the hosts, how a host has ended, and rates and waits: those of a report on the same lines.

    Before, it showed the mean of the ranks' waits (35 %) where the report has that of the rank that sets the pace.
    """
    folder = tmp_path / "ck" / "lightning-sm-record" / "2"
    for rank, (host, waiting) in enumerate((("algo-1", 0.1), ("algo-2", 0.6))):
        lines = Recorder(folder / f"{host}-rank-{rank}.jsonl")
        lines.append(FileHead(t=clock[0], host=host, who=f"rank-{rank}", rank=rank, world_size=2))
        parts = {"data_wait": 2.0 * waiting, "forward": 0.2, "backward": 1.8 - 2.0 * waiting}
        for second in range(3):
            t, steps = clock[0] + second, 10 * (second + 1)
            lines.append(Steps(t, steps, 10, wall_s=2.0, longest_s=0.1, samples=80, parts=parts))
        lines.close()
    lines = Recorder(folder / "algo-1-launcher.jsonl")
    lines.append(FileHead(t=clock[0], host="algo-1", who="launcher"))
    lines.append(HostUse(clock[0], 0.5, memory_bytes=1, memory_total_bytes=4, received_bytes_s=3.0))
    lines.append(End(clock[0], "failed", 1, "out of memory"))
    lines.close()
    shown = watch.look(running(tmp_path))
    assert (shown.attempt, shown.steps_per_s, shown.samples_per_s) == (2, pytest.approx(5.0), pytest.approx(80.0))
    run = Figures(read_run(tmp_path / "ck"))
    assert (shown.steps_per_s, shown.wait_share) == (1 / run.pace.step_s, run.pace.waiting)
    assert shown.samples_per_s == run.samples_per_step / run.pace.step_s
    first, second, _ = shown.hosts
    assert (first.state, first.note, first.cpu, first.received_bytes_s) == ("failed", "out of memory", 0.5, 3.0)
    assert (second.state, second.cpu, second.wait_share) == ("not seen from here", None, pytest.approx(0.6))
