"""The first job file, written by ``lightning-sm init``."""

import os
import re

import boto3
import pytest

from lightning_sm.__main__ import main
from lightning_sm.submit import submit
from lightning_sm.submit.job_file import read_job
from lightning_sm.submit.preflight import check

PARSER = "import argparse\nparser = argparse.ArgumentParser()\nparser.add_argument('--lr')\nparser.parse_args()\n"
FILLED = {"account": "111122223333", "region": "us-east-1", "role": "training", "bucket": "bucket"}


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """Change to an empty folder, without a configured region."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("AWS_DEFAULT_REGION", raising=False)
    return tmp_path


def put(folder, **files):
    """Write Python files; __ in a name stands for a slash."""
    for name, text in files.items():
        path = folder / f"{name.replace('__', '/')}.py"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)


def filled(text):
    """Return a job file without comments and with its placeholders filled in."""
    code = "\n".join(line for line in text.splitlines() if not line.startswith("#"))
    return re.sub(r"<(\w+)>", lambda found: FILLED[found[1]], code)


def test_a_dry_run_accepts_it_once_it_is_filled_in(folder, monkeypatch, caplog):
    """The request of a filled-in file has no problems; the only warning is that the account was not checked."""
    put(folder, src__digits=PARSER)
    assert main(["init", "src/digits.py"]) == 0
    (folder / "job.yaml").write_text(filled((folder / "job.yaml").read_text()))
    session = boto3.Session(region_name="us-east-1")
    monkeypatch.setattr(submit, "new_session", lambda *_, **__: session)
    caplog.clear()
    request = submit.dry_run(read_job("job.yaml"))
    assert request["TrainingJobName"].startswith("digits-")
    assert request["HyperParameters"]["sagemaker_program"] == '"digits.py"'
    (warning,) = [record.message for record in caplog.records if record.levelname == "WARNING"]
    assert "the account was not checked: No AWS credentials" in warning


def test_every_comment_that_is_a_key_is_right(folder):
    """Each commented-out key, once uncommented, passes the checks."""
    put(folder, train="LightningCLI")
    main(["init", "train.py"])
    text = (folder / "job.yaml").read_text()
    for key in ("channels", "  training", "hyperparameters", "prices", "max_cost", "spot"):
        assert text.count(f"\n# {key}: ") + text.count(f"\n# {key}:\n") == 1
        text = text.replace(f"\n# {key}:", f"\n{key}:")
    (folder / "job.yaml").write_text(filled(text.replace("<price>", "1.41").replace("<prefix>", "data")))
    check(read_job("job.yaml"), "cloud", "us-east-1").report()


def test_what_is_left_open_is_a_problem(folder):
    """Unfilled placeholders for the account or the bucket are problems, so that nothing is sent."""
    put(folder, train=PARSER)
    main(["init", "train.py"])
    keys = {problem.key for problem in check(read_job("job.yaml"), "cloud", "us-east-1").problems}
    assert keys == {"image", "role", "checkpoints"}


def test_an_existing_file_is_not_replaced(folder, caplog):
    """An existing file is kept, whatever its content; -o chooses another name."""
    put(folder, train=PARSER)
    (folder / "job.yaml").write_text("mine")
    assert main(["init", "train.py"]) == 2
    assert "job.yaml already exists." in caplog.text
    assert (folder / "job.yaml").read_text() == "mine"
    assert main(["init", "train.py", "-o", "other.yaml"]) == 0
    assert read_job("other.yaml").script == "train.py"


@pytest.mark.parametrize(
    ("place", "name"),
    [
        ("my digits/train.py", "train"),
        ("src/true.py", "true"),
        ("src/2026.py", "2026"),
        ("src/null/main.py", "main"),
        ("a: b #c/a 'quoted\" {name}.py", "a-quoted-name"),
        ("no/off/on.py", "on"),
        ("é/ü.py", "lightning"),
        ("1e3/.5.py", "5"),
        (f"a/{'long-' * 20}main.py", "long-long-long-long-long-long-long-long"),
        ("a/b\nc.py", "b-c"),
    ],
)
def test_every_path_is_written_as_text(folder, place, name):
    """Each path is read back unchanged, and the job's name is one that the service allows."""
    script = folder / place
    script.parent.mkdir(parents=True)
    script.write_text(PARSER)
    assert main(["init", place]) == 0
    job = read_job("job.yaml")
    assert (job.name, job.script, os.path.relpath(job.source_dir)) == (name, script.name, os.path.dirname(place))
    assert {problem.key for problem in check(job, "cloud").problems} == {"image", "role", "checkpoints"}


def test_a_script_that_does_not_exist_is_an_error(folder, caplog):
    """A missing script is an error, and no file is written."""
    assert main(["init", "gone.py"]) == 2
    assert "There is no file gone.py" in caplog.text
    assert list(folder.iterdir()) == []


def test_a_name_that_is_no_text_leaves_no_file(folder, caplog):
    """A script whose name is not valid text is an error, because a job file is text."""
    os.close(os.open(b"train\xff.py", os.O_CREAT | os.O_WRONLY))
    assert main(["init", os.fsdecode(b"train\xff.py")]) == 2
    assert "is not UTF-8. Rename that file." in caplog.text
    assert not (folder / "job.yaml").exists()


def test_the_region_of_this_machine_is_filled_in(folder, monkeypatch):
    """The configured region replaces its placeholder."""
    put(folder, train=PARSER)
    monkeypatch.setenv("AWS_DEFAULT_REGION", "eu-west-1")
    main(["init", "train.py"])
    assert "<account>.dkr.ecr.eu-west-1.amazonaws.com" in (folder / "job.yaml").read_text()
