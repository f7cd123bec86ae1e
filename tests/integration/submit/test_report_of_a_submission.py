"""The report that ``lightning-sm submit`` writes to the working directory, with a fake service on this machine."""

from __future__ import annotations

import logging

from lightning_sm.__main__ import main
from tests.fakes.sagemaker_service import FakeService
from tests.unit.report.recorded import input_bound

JOB = """
image: 111122223333.dkr.ecr.us-east-1.amazonaws.com/lightning-sm:1
role: arn:aws:iam::111122223333:role/training
groups: {trainer: {instance_type: ml.g5.xlarge}}
output: s3://bucket/output
checkpoints: s3://bucket/ck
prices: {ml.c5.xlarge: 0.2}
"""
FAILED = {
    "TrainingJobStatus": "Failed",
    "SecondaryStatus": "Failed",
    "FailureReason": "AlgorithmError: no, exit code: 3",
}


def test_the_report_of_the_job_is_written_here_and_its_exit_code_stays(tmp_path, monkeypatch, caplog):
    """A failed job's report has prices from the job file and from AWS's list; a missing record changes nothing."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("lightning_sm.submit.submit.new_job_name", lambda _: "job")
    (tmp_path / "job.yaml").write_text(JOB)
    record = input_bound(tmp_path / "record")
    answers = {"endings": [FAILED], "lines": None, "prices": {"ml.g5.xlarge": 1.41}}
    with FakeService(**answers) as service, caplog.at_level(logging.INFO):
        for name, value in service.environment.items():
            monkeypatch.setenv(name, value)
        for file in record.rglob("*.jsonl"):
            service.objects[f"/bucket/ck/{file.relative_to(record)}"] = file.read_bytes()
        assert main(["submit", "job.yaml", "--yes"]) == 3
        assert "$0.032" in (tmp_path / "job.html").read_text()
        assert "report: job.html" in caplog.text
        service.requests.clear()
        service.objects.clear()
        assert main(["submit", "job.yaml", "--yes"]) == 3
        assert "No report was written here: job has no record in s3://bucket/ck" in caplog.text
