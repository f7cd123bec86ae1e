"""Two ranks that are out of step: neither makes a collective call that the other one misses."""

import subprocess
import sys

import pytest

from tests.integration.hosts import REPOSITORY, SCRIPTS
from tests.quick_processes import python_path

pytestmark = pytest.mark.processes

TIMEOUT_S = 180


def run_job(folder, *options, arguments=()):
    """Run the script on two trainer hosts, and return exit code and output."""
    (folder / "notes").mkdir()
    command = [
        *(sys.executable, "-m", "lightning_sm", "local", "--group", "trainer=2"),
        *("--base-dir", str(folder / "jobs"), "--checkpoints", str(folder / "checkpoints")),
        *("--env", f"NOTES={folder / 'notes'}", "--env", "OMP_NUM_THREADS=1"),
        *("--env", f"PYTHONPATH={python_path(REPOSITORY)}"),
        *options,
        *("--", str(SCRIPTS / "train_and_leave.py"), "fit", "--trainer.max_epochs", "2", *arguments),
    ]
    ended = subprocess.run(command, capture_output=True, text=True, check=False, timeout=TIMEOUT_S)
    return ended.returncode, ended.stdout + ended.stderr


@pytest.mark.matrix(first=1)
@pytest.mark.parametrize("arguments", [("unsized",), ("sized",)], ids=["no length", "a stated length"])
def test_streams_may_end_at_different_batches(tmp_path, arguments):
    """A validation over streams, whose true lengths are unknown, completes on both ranks."""
    code, output = run_job(tmp_path, arguments=("--data.stream", *arguments))
    assert code == 0, output


def test_no_rank_leaves_before_the_checkpoint_is_written(tmp_path):
    """If rank 0 writes the checkpoint in the background, both ranks exit only after it is written."""
    code, output = run_job(tmp_path, "--fault", "stop@step=5", arguments=("--data.num_samples", "8000"))
    assert code == 143, output
    assert {path.name: path.read_text() for path in (tmp_path / "notes").glob("algo-*")} == {
        "algo-1": "True",
        "algo-2": "True",
    }


@pytest.mark.proof
def test_a_checkpoint_that_cannot_be_written_fails_the_job(tmp_path):
    """A rank that cannot write its checkpoint reports it and fails, and so does the rank that waits for it."""
    options = ("--fault", "stop@step=5", "--env", "FULL=1")
    code, output = run_job(tmp_path, *options, arguments=("--data.num_samples", "8000"))
    assert code not in {0, 143}, output
    assert "No space left on device" in output
    assert "is saved in" not in output
