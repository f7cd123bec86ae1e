"""``lightning-sm local --chaos``: undisturbed runs, drawn faults, and the fewest that change how a script ends."""

from __future__ import annotations

import re
import shlex
import subprocess
import sys

import pytest

from tests.integration.emulators import local
from tests.integration.hosts import REPOSITORY, SCRIPTS

# Undisturbed twice, then a job or two for each draw.
TIMEOUT_S = 600
TWO_HOSTS = ("--group", "trainer=2")
DROPOUT = SCRIPTS / "train_dropout.py"
FORGETS = ("--env", "FORGETS=1")
# So long that a restart within the job has the random numbers of its step.
LONG_STEPS = ("--env", "STEP_S=0.1")


@pytest.fixture
def jobs(tmp_path):
    """The folder of the runs."""
    return tmp_path / "jobs"


def chaos(jobs, script, *options, arguments=()):
    """Run draws of a script to their end."""
    words = [*options, "--", str(script), *arguments]
    return local(jobs, REPOSITORY, "--chaos", *words, timeout_s=TIMEOUT_S)


def test_a_script_that_fails_by_itself_is_not_disturbed(jobs, tmp_path):
    """The error has the end of its log."""
    (tmp_path / "fail.py").write_text("raise ArithmeticError('by itself')\n")
    ended = chaos(jobs, tmp_path / "fail.py", "3", "--seed", "1")
    assert ended.returncode == 2, ended.stdout + ended.stderr
    assert "The script fails without any fault, with exit code 1. The end of" in ended.stderr
    assert "ArithmeticError: by itself" in ended.stderr
    assert "1 of 3" not in ended.stdout


def test_a_script_that_leaves_nothing_to_compare_is_refused(jobs, tmp_path):
    """Instead of twenty draws that prove nothing."""
    (tmp_path / "pass.py").write_text("print('done')\n")
    ended = chaos(jobs, tmp_path / "pass.py", "3", "--seed", "1")
    assert ended.returncode == 2, ended.stdout + ended.stderr
    assert "there is nothing that faults could change" in ended.stderr


def test_what_a_script_saves_at_random_is_not_compared(jobs, tmp_path):
    """Scripts of any kind are compared by the files of their model; nothing is left if none differs."""
    (tmp_path / "save.py").write_text(
        "import os, pathlib, secrets, time\n"
        "folder = pathlib.Path(os.environ['SM_MODEL_DIR'])\n"
        "(folder / 'same.txt').write_text('the same')\n"
        "(folder / 'other.txt').write_text(secrets.token_hex())\n"
    )
    ended = chaos(jobs, tmp_path / "save.py", "2", "--seed", "1")
    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert "Not compared, because they differ between these runs: other.txt." in ended.stdout
    assert re.findall(r"^(\d) of 2 .*  same  ", ended.stdout, re.MULTILINE) == ["1", "2"]
    assert ended.stdout.endswith("2 of 2 draws (seed 1) ended as the undisturbed run did.\n")
    assert list(jobs.iterdir()) == []


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("3", "--fault", "restart@step=1"), "leave out --fault"),
        (("3", "--max-attempts", "2"), "leave out --max-attempts"),
        (("3", "--checkpoints", "ck"), "leave out --checkpoints"),
        (("3", "--group", "trainer"), "--group 'trainer': expected NAME=COUNT"),
        (("0",), "expected a positive whole number, got '0'"),
    ],
)
def test_options_that_contradict_each_other_are_refused(jobs, tmp_path, options, message):
    """Before anything runs."""
    (tmp_path / "pass.py").touch()
    ended = chaos(jobs, tmp_path / "pass.py", *options)
    assert ended.returncode == 2
    assert message in ended.stderr
    assert not jobs.exists()


def test_a_folder_that_cannot_be_written_is_an_error(tmp_path):
    """As for a single job."""
    (tmp_path / "pass.py").touch()
    (tmp_path / "file").touch()
    ended = chaos(tmp_path / "file", tmp_path / "pass.py", "1")
    assert ended.returncode == 2
    assert re.search(r"error: .*: cannot be written \(Not a directory\)\.", ended.stderr)


@pytest.mark.proof
@pytest.mark.processes
def test_a_sound_script_ends_the_same_whatever_happens(jobs):
    """A killed rank beside a frozen data host, a lost host, an interrupted data host: same bits, same samples."""
    ended = chaos(
        jobs,
        DROPOUT,
        *("3", "--seed", "175", *TWO_HOSTS, *LONG_STEPS, "--group", "data=1"),
        arguments=["fit"],
    )
    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert "steps, samples, 2 metrics of 2, model." in ended.stdout
    faults = [line.partition("  same  ")[2] for line in ended.stdout.splitlines() if "  same  " in line]
    assert faults == [
        "kill-rank:trainer-1@step=43 hang:data-1,for=4.5@step=66",
        "kill:trainer-1@epoch=4",
        "interrupt:data-1@step=75,skew=2.0 restart@step=42",
    ]


@pytest.mark.proof
@pytest.mark.processes
def test_the_example_app_ends_the_same_in_twenty_draws(jobs):
    """ResNet-18 with random augmentation on data hosts: same bits, same samples, same model."""
    options = ("20", "--seed", "36", *TWO_HOSTS, "--group", "data=1", "--", "app/train.py", "fit")
    arguments = ("--config", "app/configs/digits.yaml", "--trainer.max_epochs", "2")
    ended = local(jobs, REPOSITORY, "--chaos", *options, *arguments, timeout_s=6 * TIMEOUT_S)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert "steps, samples, 5 metrics of 5, model." in ended.stdout
    assert ended.stdout.endswith("20 of 20 draws (seed 36) ended as the undisturbed run did.\n")


@pytest.mark.proof
@pytest.mark.processes
def test_short_steps_are_no_false_alarm(jobs):
    """A restart that lacks the random numbers of its step is compared by steps, and the line says so."""
    ended = chaos(
        jobs,
        DROPOUT,
        *("1", "--seed", "13", *TWO_HOSTS, "--env", "STEP_S=0.005"),
        arguments=["fit"],
    )
    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert re.search(r"^1 of 1 .*  same( steps)?  late", ended.stdout, re.MULTILINE)
    assert ended.stdout.count("same steps") in (0, 2)


@pytest.mark.proof
@pytest.mark.processes
def test_a_script_that_forgets_is_found_and_its_faults_are_fewer(jobs):
    """Of a late host and a killed rank, only the latter matters; the command that is printed repeats it."""
    ended = chaos(jobs, DROPOUT, *("1", "--seed", "13", *TWO_HOSTS, *LONG_STEPS, *FORGETS), arguments=["fit"])
    assert ended.returncode == 1, ended.stdout + ended.stderr
    assert re.search(
        r"^1 of 1 .*  FAILED  late:trainer-2=0\.8 kill-rank:trainer-1@step=52$", ended.stdout, re.MULTILINE
    )
    assert re.search(r"^  metric train_loss is .* instead of ", ended.stdout, re.MULTILINE)
    assert "  With fewer faults, too: kill-rank:trainer-1@step=52: metric train_loss" in ended.stdout
    (command,) = re.findall(r"^    lightning-sm (local .*)$", ended.stdout, re.MULTILINE)
    repeated = subprocess.run(
        [sys.executable, "-m", "lightning_sm", *shlex.split(command)],
        cwd=REPOSITORY,
        capture_output=True,
        text=True,
        check=False,
        timeout=TIMEOUT_S,
    )
    assert repeated.returncode == 0, repeated.stdout
    assert "Fault kill-rank:trainer-1@step=52" in repeated.stdout
