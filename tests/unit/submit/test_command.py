"""The command line of lightning-sm submit."""

import os

import pytest

from lightning_sm.errors import SubmitError
from lightning_sm.report.command import write_report
from lightning_sm.submit import command


@pytest.fixture
def job_file(tmp_path):
    """Write a small job file."""
    path = tmp_path / "job.yaml"
    path.write_text("image: x\ngroups:\n  trainer: {instance_type: ml.g5.xlarge}\n")
    return str(path)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--chekpoints=s3://bucket/c"], "unknown option --chekpoints. Did you mean --checkpoints, as in"),
        (["--dryrun"], "unknown option --dryrun. Did you mean --dry-run?"),
        (["--dry_run"], "unknown option --dry_run. Did you mean --dry-run?"),
        (["--instance_type=a"], "unknown option --instance_type. Did you mean --groups.NAME.instance_type, as in"),
        (["--image-uri", "a"], "unknown option --image-uri. Did you mean --image, as in"),
        (["--no-wiat"], "unknown option --no-wiat. Did you mean --no-wait?"),
        (["--xyzzy"], "unknown option --xyzzy.\n"),
        (["--grups.trainer.count=4"], "unknown option --grups.trainer.count. Did you mean --groups, as in"),
        (["--spot"], "--spot: expected a value, as in --spot=VALUE."),
        (["other.yaml"], "unexpected arguments: other.yaml"),
        (["--local", "--dry-run"], "argument --dry-run: not allowed with argument --local"),
    ],
)
def test_a_wrong_command_line_says_what_is_right(job_file, capsys, options, words):
    """A wrong option exits with code 2, and the error suggests the right one below the usage."""
    with pytest.raises(SystemExit) as ended:
        command.main([job_file, *options], write_report=write_report)
    assert ended.value.code == 2
    usage, error = capsys.readouterr().err.split("\n", 1)
    assert usage == "usage: lightning-sm submit JOB.yaml [--dry-run | --local] [--KEY=VALUE ...]"
    assert words in error


def test_a_job_file_is_needed(capsys):
    """A job file is required unless options describe a job."""
    with pytest.raises(SystemExit):
        command.main(["--dry-run"], write_report=write_report)
    assert "no job file is given" in capsys.readouterr().err


def test_mistakes_of_a_file_are_reported_before_a_missing_region(job_file, monkeypatch):
    """The job file is checked first, which requires neither a region nor credentials."""
    for name in [name for name in os.environ if name.startswith("AWS_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("AWS_CONFIG_FILE", os.devnull)
    for mode in ("--dry-run", "--yes"):
        with pytest.raises(SubmitError, match="--spot: spot is true; expected"):
            command.main([job_file, mode, "--spot=true"], write_report=write_report)
