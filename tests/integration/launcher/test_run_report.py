"""The report at the end of a job, written by a separate process whose failures do not affect the job."""

import logging
import sys

import pytest

from lightning_sm.job.facts import InstanceGroup, SageMakerJob
from lightning_sm.launcher.run_report import write_report
from lightning_sm.record.events import FOLDER
from tests.unit.report.recorded import input_bound


@pytest.fixture
def job(tmp_path):
    """A job with its record in the output data."""
    hosts = ("algo-1", "algo-2")
    (tmp_path / "output" / "data").mkdir(parents=True)
    return SageMakerJob("algo-1", hosts, (InstanceGroup("g", hosts),), "test", tmp_path, name="job")


@pytest.fixture
def report(job):
    """The path of the report."""
    return job.output_dir / "data" / "report.html"


def test_the_report_is_in_the_output_data(job, report, caplog):
    """The report uses the job's prices, and the log has its path and verdict."""
    input_bound(report.parent)
    with caplog.at_level(logging.INFO):
        write_report(job, {"ml.g5.xlarge": 1.41, "ml.c5.xlarge": 0.2}, 60.0)
    assert "$0.032" in report.read_text()
    said, change, *_, place = caplog.messages
    assert place == f"lightning-sm: report of the run: {report}"
    assert change.startswith("lightning-sm: - Waiting for data (transforms), 48% of the job (34.8 s), $0.016: ")
    assert said.startswith(
        "lightning-sm: job: Succeeded after 72 s. Limited by waiting for data (transforms), 48% of the"
    )
    assert said.removeprefix("lightning-sm: job: ").partition(".")[0] in report.read_text()


def test_a_failing_report_is_a_line_in_the_log(job, report, caplog):
    """If the report cannot be written, the log has the verdict and the error, and nothing is raised."""
    input_bound(report.parent)
    report.mkdir()
    with caplog.at_level(logging.INFO):
        write_report(job, {}, 60.0)
    assert "Limited by waiting for data (transforms), 48% of the job" in caplog.messages[0]
    why = f"lightning-sm: error: {report} cannot be written"
    assert f"the report of the run was not written ({why}" in caplog.messages[-1]


def test_a_report_that_takes_too_long_is_given_up(job, report, caplog):
    """A report that exceeds its time limit is abandoned."""
    input_bound(report.parent)
    write_report(job, {}, 0.01)
    assert "not written within" in caplog.text
    assert not report.exists()


def test_an_interpreter_that_is_gone_is_a_line_in_the_log(job, report, caplog, monkeypatch):
    """A missing interpreter is logged: a script may have replaced the installation."""
    input_bound(report.parent)
    monkeypatch.setattr(sys, "executable", "/nowhere/python")
    write_report(job, {}, 60.0)
    assert "cannot be written: No such file or directory" in caplog.text


@pytest.mark.parametrize("limit_s", [0.0, 60.0])
def test_nothing_to_report_is_no_report(job, report, caplog, limit_s):
    """No report is written for a record without steps, or if reports are turned off with a limit of 0."""
    if limit_s == 0.0:
        input_bound(report.parent)
    else:
        (report.parent / FOLDER / "1").mkdir(parents=True)
        (report.parent / FOLDER / "1" / "algo-1-launcher.jsonl").touch()
    write_report(job, {}, limit_s)
    assert caplog.messages == []
    assert not report.exists()
