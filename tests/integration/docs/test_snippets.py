"""Snippets that readers copy from the pages work: Python runs, and command options and file keys exist.

A block in an unknown language fails its test. ``text`` is for output, which nobody copies.
"""

from __future__ import annotations

import argparse
import importlib
import importlib.metadata
import importlib.util
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from sybil.evaluators.python import PythonEvaluator

from lightning_sm import __main__ as program
from lightning_sm.record.prices import read_prices
from lightning_sm.submit.dataclass_fields import keys_of
from lightning_sm.submit.job_file import Job, read_job
from tests.fakes.sagemaker_service import FakeService, process_environment
from tests.integration.docs.pages import DOCS, PAGES, REPOSITORY, commands, examples, language, place
from tests.integration.emulators import local

EXAMPLES = [example for page in PAGES for example in examples(page)]
# Not checked: programs that readers must install, and commands that change the machine or use the network.
FOREIGN = {".", "aws", "conda", "docker", "export", "mpirun", "tensorboard"}
COMPLETED = {"TrainingJobStatus": "Completed", "SecondaryStatus": "Completed"}


def of(*languages):
    """Return the blocks in these languages as test parameters."""
    return [pytest.param(one, id=place(one)) for one in EXAMPLES if language(one) in languages]


def test_every_block_has_a_language():
    """Every block has a known language; otherwise no test would check it."""
    known = {"bash", "python", "yaml", "mermaid", "text"}
    assert [place(one) for one in EXAMPLES if language(one) not in known] == []


# ---- Python


@pytest.mark.filterwarnings("ignore")  # advice from Lightning
@pytest.mark.parametrize(
    "example", [one for one in of("python") if "sagemaker." not in one.values[0].parsed.replace("lightning_sm", "")]
)
def test_python_runs(example, tmp_path, monkeypatch, restored_signals):
    """Each Python block runs on its own, given the reader's model and data."""
    from tests.fakes.small_app import SmallData, SmallModel, make_trainer

    monkeypatch.chdir(tmp_path)
    example.namespace.clear()
    example.namespace.update(
        __name__="page",
        MyModel=SmallModel,
        MyData=SmallData,
        args=argparse.Namespace(data_dir="data"),
        model=SmallModel(),
        trainer=make_trainer(max_epochs=1),
    )
    PythonEvaluator()(example)


def test_a_loop_without_lightning_reports_its_steps(tmp_path):
    """The emulator injects a fault at an epoch into the loop from docs/emulator.md, which reports its steps."""
    (loop,) = [one for one in examples(DOCS / "emulator.md") if language(one) == "python"]
    (tmp_path / "train.py").write_text(loop.parsed)
    ended = local(tmp_path / "jobs", tmp_path, "--fault", "kill-rank:algo-1@epoch=2", "--", "train.py")
    assert ended.returncode == 137
    fault = r"Fault kill-rank:algo-1@epoch=2: \S+ at step (5[1-9]|[67]\d), epoch 2"
    assert re.search(fault, ended.stdout), ended.stdout


def _sdk(example):
    return "sdk3" if "sagemaker.train " in example.parsed else "sdk2"


class _Service(FakeService):
    """A fake service whose jobs complete at once, without a log."""

    def answer(self, operation, body):
        if operation == "DescribeLogStreams":
            return 200, {"logStreams": []}
        self.endings = [request | COMPLETED for request in self.requests]
        return super().answer(operation, body)


@pytest.mark.parametrize(
    "example",
    [
        pytest.param(*one.values, id=one.id, marks=getattr(pytest.mark, _sdk(one.values[0])))
        for one in of("python")
        if re.search(r"^from sagemaker\.", one.values[0].parsed, re.M)
    ],
)
def test_jobs_start_with_the_sdk(example, tmp_path, request):
    """The SDK accepts the arguments and sends one job to a fake service."""
    python = request.getfixturevalue(f"{_sdk(example)}_python")
    (tmp_path / "src").mkdir()
    (tmp_path / "src" / "train.py").touch()
    (tmp_path / "page.py").write_text(example.parsed, encoding="utf-8")
    with _Service() as service:
        done = subprocess.run(
            [python, "page.py"],
            cwd=tmp_path,
            env=process_environment(service.environment),
            capture_output=True,
            text=True,
            timeout=120,
            check=False,
        )
    assert done.returncode == 0, done.stderr
    assert len(service.requests) == 1


# ---- commands


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("example", of("bash"))
def test_commands_exist(example, monkeypatch, capsys):
    """The options and files in each command exist. Other tests cover what the commands start."""
    monkeypatch.chdir(REPOSITORY)
    # capsys captures the parser's usage message, so pytest shows it if an option is wrong.
    monkeypatch.setattr("lightning_sm.submit.submit.dry_run", _nothing_is_sent)
    monkeypatch.setattr("lightning_sm.submit.submit.send", _nothing_is_sent)
    monkeypatch.setattr("lightning_sm.submit.submit.write_report_here", lambda *_: None)
    monkeypatch.setattr("lightning_sm.submit.submit.run_locally", _no_container_starts)
    for command in commands(example.parsed):
        name, *words = _words(command) or [""]
        if not name:  # the command sets a variable of the shell
            continue
        assert name in CHECKS or name in FOREIGN, f"{place(example)}: how to check {command!r}?"
        if name in CHECKS:
            CHECKS[name](words)
        if name == "docker" and "-f" in words:
            assert Path(words[words.index("-f") + 1]).is_file()


def _nothing_is_sent(job, wait=True, **_options):
    assert isinstance(job, Job)
    return {"TrainingJobStatus": "Completed"} if wait else {}


def _no_container_starts(job):
    assert isinstance(job, Job)
    return 0


def _words(command):
    """Split a command into words, without leading variables, redirections and comments."""
    words = shlex.split(command, comments=True)
    while words and re.fullmatch(r"\w+=.*", words[0]):
        words = words[1:]
    end = next((index for index, word in enumerate(words) if word in {"|", ">", "||", "&&", "&"}), len(words))
    return words[:end]


def _lightning_sm(words):
    if words[0] == "submit":
        own = ["app/job.yaml" if word == "job.yaml" else word for word in words]
        assert program.main(own) == 0
    elif words[0] == "jobs":
        from lightning_sm.cloud.command import _parser

        _parser().parse_args(words[1:])
    else:
        end = words.index("--") if "--" in words else len(words)
        program._parser().parse_args(words[:end])
        if words[end + 1 :]:
            _script(words[end + 1 :])


def _python(words):
    if words[0] == "-m":
        assert importlib.util.find_spec(words[1]) is not None
    else:
        _script(words)


def _script(words):
    """Check the script's options; the reader's train.py has those of app/train.py."""
    script = "app/train.py" if Path(words[0]).name == "train.py" else words[0]
    assert Path(script).is_file()
    if script in {"app/train.py", "app/train_text.py"}:
        _options_of_the_app(Path(script).stem, words[1:])


def _options_of_the_app(module, words):
    app = importlib.import_module(f"app.{module}")
    instead_of_running = [] if "--help" in words else ["--print_config"]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", [f"{module}.py", *words, *instead_of_running])
        with pytest.raises(SystemExit) as ending:
            app.main()
    assert ending.value.code == 0


def _pip(words):
    extras = importlib.metadata.metadata("lightning-sm").get_all("Provides-Extra")
    for named in re.findall(r"\.\[([\w,-]+)\]", " ".join(words)):
        assert set(named.split(",")) <= set(extras)


def _make(words):
    targets = re.findall(r"^([\w-]+):", (REPOSITORY / "Makefile").read_text(encoding="utf-8"), re.MULTILINE)
    assert {word for word in words if "=" not in word} <= set(targets)


CHECKS = {"lightning-sm": _lightning_sm, "python": _python, "pip": _pip, "make": _make}


# ---- files


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("example", of("yaml"))
def test_files_have_these_keys(example, tmp_path, monkeypatch):
    """YAML blocks are valid price files, (partial) job files or configurations of a script."""
    content = yaml.safe_load(example.parsed)
    file = tmp_path / "page.yaml"
    if "per_hour" in content:
        file.write_text(example.parsed, encoding="utf-8")
        assert read_prices(file, [])
    elif content.keys() <= keys_of(Job).keys():
        required = {"image": "lightning-sm", "groups": {"trainer": {"instance_type": "ml.m5.large"}}}
        file.write_text(yaml.safe_dump(required | content), encoding="utf-8")
        assert read_job(file).image
    else:
        file.write_text(example.parsed, encoding="utf-8")
        monkeypatch.chdir(REPOSITORY)
        _options_of_the_app("train", ["fit", f"--config={file}"])
