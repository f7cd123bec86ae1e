"""Interrupted jobs of several hosts: all ranks save the same step, and the next attempt resumes there."""

import re
import subprocess
import sys

import pytest

from tests.integration.hosts import REPOSITORY, SCRIPTS
from tests.quick_processes import python_path

pytestmark = pytest.mark.processes

TIMEOUT_S = 150
NUM_STEPS = 2 * 30  # two epochs of 480 samples in batches of 8 over two ranks


def run_job(folder, *options, arguments=(), env=(), script="train_and_note.py"):
    """Run two trainer hosts, and others that the options add; return exit code and output."""
    command = [
        *(sys.executable, "-m", "lightning_sm", "local", "--group", "trainer=2", "--seed", "3"),
        *("--base-dir", str(folder / "jobs"), "--checkpoints", str(folder / "checkpoints")),
        *("--env", f"NOTES={folder / 'notes'}", "--env", "OMP_NUM_THREADS=1"),
        *("--env", f"PYTHONPATH={python_path(REPOSITORY)}"),
        *(word for pair in env for word in ("--env", pair)),
        *options,
        *("--", str(SCRIPTS / script)),
        *(("fit", "--trainer.max_epochs", "2", *arguments) if script == "train_and_note.py" else ()),
    ]
    folder.mkdir(exist_ok=True)
    ended = subprocess.run(command, capture_output=True, text=True, check=False, timeout=TIMEOUT_S)
    return ended.returncode, ended.stdout + ended.stderr


def told_after(step):
    """Script arguments with which training waits for the signal of a fault soon after the fault's step.

    Steps take 0.05 s, so that the ranks exchange flags at least every 20 steps.
    """
    return "--model.step_s", "0.05", "--model.told_by", str(step + 4)


def notes(folder):
    """Read all lines of each rank's notes, and the last loss of each training step and validation batch."""
    ranks = []
    for path in sorted((folder / "notes").glob("*.txt")):
        lines = [line.split() for line in path.read_text().splitlines()]
        ranks.append((lines, {tuple(line[:3]): float(line[3]) for line in lines}))
    return ranks


@pytest.fixture(scope="module")
def references(tmp_path_factory):
    """The notes of uninterrupted runs, without and with a data host."""
    made = {}

    def reference(*groups):
        if groups not in made:
            folder = tmp_path_factory.mktemp("reference")
            code, output = run_job(folder, *groups)
            assert code == 0, output
            made[groups] = notes(folder)
        return made[groups]

    return reference


def exit_codes(output):
    """Parse exit codes by attempt and role from the printed table."""
    rows = re.findall(r"^ *(\d)? *algo-\d+ +\S+ +(trainer|data) +(\d+) ", output, re.MULTILINE)
    return sorted((int(attempt or 1), role, int(code)) for attempt, role, code in rows)


@pytest.mark.matrix(first=1)
@pytest.mark.parametrize(
    ("groups", "step", "skew"),
    [
        pytest.param((), 32, 0.05, id="own data, in the second epoch"),
        pytest.param(("--group", "data=1"), 20, 1.0, id="one data host, one second apart"),
    ],
)
def test_an_interrupted_job_resumes_exactly_where_it_was(tmp_path, references, groups, step, skew):
    """No step is lost or repeated and every loss is the same, however far apart the hosts get the signal."""
    expected = references(*groups)
    code, output = run_job(
        tmp_path, *groups, "--fault", f"interrupt@step={step},skew={skew}", arguments=told_after(step)
    )
    assert code == 0, output
    trainers = [(1, "trainer", 143)] * 2 + [(2, "trainer", 0)] * 2
    data = [(1, "data", 0), (2, "data", 0)] if groups else []
    assert exit_codes(output) == sorted(trainers + data), output
    for (_, wanted), (lines, found) in zip(expected, notes(tmp_path), strict=True):
        assert found == pytest.approx(wanted, rel=1e-12)
        assert sum(line[0] == "train" for line in lines) == NUM_STEPS


@pytest.mark.proof
def test_a_signal_to_one_host_stops_all(tmp_path):
    """A host that is told to stop does not leave the other host waiting in a collective call."""
    code, output = run_job(tmp_path, "--fault", "interrupt:trainer-2@step=5", arguments=told_after(5))
    assert code == 0, output
    assert exit_codes(output) == [(1, "trainer", 143)] * 2 + [(2, "trainer", 0)] * 2


def test_a_stopped_job_leaves_a_checkpoint_and_a_model_and_says_so(tmp_path):
    """After StopTrainingJob, all trainers exit with 143 and a reason that names the signal, and none restarts."""
    code, output = run_job(tmp_path, "--fault", "stop@step=5,skew=0.2", arguments=told_after(5))
    assert code == 143, output
    assert exit_codes(output) == [(1, "trainer", 143)] * 2
    reasons = [path.read_text() for path in tmp_path.glob("jobs/*/algo-*/output/failure")]
    assert len(reasons) == 2
    assert all(reason.startswith("The job was stopped or interrupted (SIGTERM)") for reason in reasons)
    (checkpoint,) = tmp_path.glob("jobs/*/algo-*/checkpoints/interrupted-*.ckpt")
    assert (tmp_path / "checkpoints" / checkpoint.name).read_bytes() == checkpoint.read_bytes()
    (model,) = tmp_path.glob("jobs/*/algo-*/model/model.ckpt")
    assert model.samefile(checkpoint)
    assert not list((tmp_path / "checkpoints").glob("*.sagemaker-ignore"))


@pytest.mark.proof
def test_a_hardware_failure_resumes_from_the_last_periodic_checkpoint(tmp_path, references):
    """If all hosts are killed, the next attempt repeats the steps since the last checkpoint on the same data."""
    expected = references()
    code, output = run_job(tmp_path, *("--fault", "restart@step=40"), arguments=("--model.step_s", "0.05"))
    assert code == 0, output
    for (_, wanted), (_, found) in zip(expected, notes(tmp_path), strict=True):
        assert found == pytest.approx(wanted, rel=1e-12)


@pytest.mark.proof
def test_what_an_epoch_has_collected_goes_on_on_each_rank(tmp_path):
    """On every rank, accumulated gradients and a random curriculum match an undisturbed job."""
    noted = []
    # Step 9 ends with batch 7 of the epoch.
    options = ("--fault", "interrupt@step=9", "--env", "TOLD_IN=1 9")
    for name, faults in (("undisturbed", ()), ("interrupted", options)):
        code, output = run_job(tmp_path / name, *faults, script="train_together.py")
        assert code == 0, output
        assert ("Attempt 2 of 2" in output) is bool(faults)
        noted.append([path.read_text().splitlines() for path in sorted((tmp_path / name / "notes").glob("*.txt"))])
    undisturbed, interrupted = noted
    assert [len(lines) for lines in undisturbed] == [1, 1]
    assert interrupted == undisturbed
