"""The launcher's record of a run."""

import signal
from pathlib import Path

import pytest

from lightning_sm.job.facts import InstanceGroup, SageMakerJob
from lightning_sm.job.outcomes import JobOutcome, Outcome, OutcomeKind, Reason
from lightning_sm.job.topology import Role
from lightning_sm.job.variables import RECORD_DIR
from lightning_sm.launcher.host_record import HostRecord
from lightning_sm.record import events


class Launcher:
    """The launcher of the first of two hosts."""

    def __init__(self, base: Path, role=Role.TRAINER):
        groups = (InstanceGroup("trainers", ("algo-1",), "ml.g5.xlarge"), InstanceGroup("data", ("algo-2",)))
        job = SageMakerJob("algo-1", ("algo-1", "algo-2"), groups, "test", base_dir=base, name="job")
        self.record = HostRecord(job, role, {})
        self.folder = Path(self.record.variables[RECORD_DIR.name])

    def lines(self):
        """The lines of its record."""
        return events.read_lines((self.folder / "algo-1-launcher.jsonl").read_bytes())


def test_the_head_comes_first(tmp_path):
    """The head has the command, and nothing is written before that is known; spans are written when they end."""
    launcher = Launcher(tmp_path)
    with launcher.record, launcher.record.span("preparation"):
        launcher.record.event("failure", "host algo-2: too early")
        assert not launcher.folder.exists()
        launcher.record.began(["train.py", "--lr=0.1"])
    launcher.record.end(Outcome.of_exit_code(0), JobOutcome(OutcomeKind.SUCCESS), is_saved=False)
    head, span, use, end = launcher.lines()
    assert (head.command, head.who, head.role) == (["train.py", "--lr=0.1"], "launcher", "trainer")
    assert head.hosts == {"algo-1": "trainers", "algo-2": "data"}
    assert head.instance_types == {"trainers": "ml.g5.xlarge", "data": None}
    assert (span.name, type(use)) == ("preparation", events.HostUse)
    assert 0 <= use.cpu <= 1
    assert (end.outcome, end.exit_code) == ("succeeded", 0)


def test_a_script_that_was_never_found_leaves_a_record_too(tmp_path):
    """If the script is not found, the record still has the stop and an end with the reason."""
    launcher = Launcher(tmp_path)
    with launcher.record:
        launcher.record.on_stop(signal.SIGTERM)
    launcher.record.end(Outcome.of_exit_code(2, "there is no train.py"), None, is_saved=False)
    head, stop, *_, end = launcher.lines()
    assert (head.command, stop.what) == ([], "signal")
    assert end.reason == "there is no train.py"


@pytest.mark.parametrize(
    ("exit_code", "is_stopped", "is_saved", "outcome"),
    [
        (0, False, False, "succeeded"),
        (0, True, False, "stopped"),
        (143, True, True, "interrupted"),
        (143, True, False, "stopped"),
        (1, False, False, "failed"),
        (1, True, False, "failed"),
        (137, False, False, "failed"),
    ],
)
def test_how_a_host_ends(tmp_path, exit_code, is_stopped, is_saved, outcome):
    """A stop counts as an interruption only if a checkpoint was saved; the signal is a separate event."""
    launcher = Launcher(tmp_path)
    with launcher.record:
        launcher.record.began([])
        if is_stopped:
            launcher.record.on_stop(signal.SIGTERM)
        launcher.record.end(Outcome.of_exit_code(exit_code, "why"), None, is_saved=is_saved)
    lines = launcher.lines()
    assert (lines[-1].outcome, lines[-1].job_outcome) == (outcome, None)
    texts = [line.text for line in lines if isinstance(line, events.Event)]
    assert texts == (["SIGTERM: this host was told to stop"] if is_stopped else [])


@pytest.mark.parametrize("role", Role)
@pytest.mark.parametrize(
    ("job", "exit_code", "is_saved", "expected"),
    [
        (JobOutcome(OutcomeKind.FAILURE, "algo-2", 1, Reason("ValueError: x")), 143, False, ("stopped", "failed")),
        (JobOutcome(OutcomeKind.HANG, "algo-2", 1, Reason("no\nprogress", "stuck")), 1, False, ("failed", "failed")),
        (JobOutcome.lost("algo-2", "silent"), 143, False, ("stopped", "failed")),
        (JobOutcome(OutcomeKind.INTERRUPTION, "algo-2", 143, Reason("")), 143, True, ("interrupted", "interrupted")),
        (JobOutcome(OutcomeKind.INTERRUPTION, "algo-2", 143, Reason("")), 0, False, ("succeeded", "stopped")),
        (JobOutcome(OutcomeKind.SUCCESS), 0, False, ("succeeded", "succeeded")),
    ],
)
def test_a_host_that_knows_how_the_job_ended_says_so_beside_its_own_end(
    tmp_path, role, job, exit_code, is_saved, expected
):
    """The end has the host's and the job's outcomes: a host stopped by another's failure is stopped, its job failed."""
    launcher = Launcher(tmp_path, role)
    with launcher.record:
        launcher.record.began([])
        launcher.record.end(Outcome.of_exit_code(exit_code, "own"), job, is_saved=is_saved)
    end = launcher.lines()[-1]
    assert (end.outcome, end.job_outcome, end.reason) == (*expected, job.reason.headline)


@pytest.mark.parametrize(
    ("job", "event"),
    [
        (JobOutcome(OutcomeKind.SUCCESS), None),
        (JobOutcome(OutcomeKind.FAILURE, "algo-1", 1, Reason("own")), None),
        (
            JobOutcome(OutcomeKind.FAILURE, "algo-2", 1, Reason("ValueError: x")),
            ("failure", "host algo-2: ValueError: x"),
        ),
        (
            JobOutcome(OutcomeKind.INTERRUPTION, "algo-2", 143, Reason("stopped")),
            ("interruption", "host algo-2: stopped"),
        ),
        (JobOutcome.lost("algo-2", "silent"), ("host_lost", "Lost host algo-2: silent")),
    ],
)
def test_what_ends_the_job_elsewhere_is_an_event(tmp_path, job, event):
    """A failure, interruption or loss on another host is an event; this host's failure is already recorded."""
    launcher = Launcher(tmp_path)
    launcher.record.began([])
    launcher.record.on_job_outcome(job)
    found = [(line.what, line.text) for line in launcher.lines() if isinstance(line, events.Event)]
    assert found == ([event] if event else [])
