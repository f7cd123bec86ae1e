"""``lightning-sm jobs report`` against a fake service on this machine. Nothing is ever sent to AWS."""

from __future__ import annotations

import io
import os
import tarfile

import pytest

from tests.fakes.sagemaker_service import FakeService
from tests.unit.report.recorded import head, input_bound, steps, write

ENDED = {"TrainingJobStatus": "Completed", "SecondaryStatus": "Completed"}
RUNNING = {"TrainingJobStatus": "InProgress", "SecondaryStatus": "Training"}
JOB = {"TrainingJobName": "job", "OutputDataConfig": {"S3OutputPath": "s3://bucket/out"}, "ResourceConfig": {}}
WITH_CHECKPOINTS = {**JOB, "CheckpointConfig": {"S3Uri": "s3://bucket/ck"}}


def upload(service, folder, address):
    """Put all records of a folder into S3, with a checkpoint beside them."""
    for file in folder.rglob("*.jsonl"):
        service.objects[f"{address}{file.relative_to(folder)}"] = file.read_bytes()
    service.objects[f"{address}epoch=1 step=20.ckpt"] = b"much"


def archive(folder):
    """Return a job's output archive, with its records and a member that points outside."""
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w:gz") as tar:
        tar.add(folder, ".")
        tar.addfile(tarfile.TarInfo("../../algo-1-rank-0.jsonl"), io.BytesIO())
    return buffer.getvalue()


@pytest.fixture
def record(tmp_path):
    """The record of a run on two hosts."""
    return input_bound(tmp_path / "record")


def test_the_report_of_a_job_is_made_of_its_checkpoints_and_its_output(record, jobs, tmp_path):
    """The report uses the records of all hosts of this job alone, and nothing else is fetched."""
    here = tmp_path / "here"
    requests = [WITH_CHECKPOINTS, {**JOB, "TrainingJobName": "job-2"}]
    with FakeService(endings=[RUNNING, ENDED], requests=requests) as service:
        upload(service, record, "/bucket/ck/")
        upload(service, write(tmp_path / "other", head(job="other"), steps(1.0)).parents[2], "/bucket/ck/deeper/")
        service.objects["/bucket/ck2/lightning-sm-record/1/algo-1-rank-0.jsonl"] = b"of others"
        code, output, _ = jobs(service, "report", "job", "--price", "ml.g5.xlarge=1.41")
        assert code == 0
        assert "job: Succeeded after 72 s. Limited by waiting for data" in output
        assert [path.name for path in here.iterdir()] == ["job.html"]
        fetched = [one for one in service.seen if one.startswith("GET")]
        assert not [one for one in fetched if "ckpt" in one or "ck2" in one], fetched

        write(tmp_path / "second", head(job="job-2"), steps(1.0))
        service.objects["/bucket/out/job-2/output/output.tar.gz"] = archive(tmp_path / "second")
        assert jobs(service, "report", "job-2", "-o", "page.html", "--records", "kept")[0] == 0
        assert (here / "page.html").read_text().startswith("<!doctype html>")
        assert [path.name for path in (here / "kept").rglob("*.jsonl")] == ["algo-1-rank-0.jsonl"]
        code, _, log = jobs(service, "report", "job-2", "--records", "kept")
        assert code == 2
        assert "kept is not empty. Name another folder with --records." in log


def test_a_job_without_a_record_says_why(jobs, tmp_path):
    """The error says why a running or finished job has no record, and names an unreadable archive."""
    (tmp_path / "empty").mkdir()
    output = "/bucket/out/job-2/output/output.tar.gz"
    with FakeService(endings=[RUNNING, ENDED], requests=[JOB, {**JOB, "TrainingJobName": "job-2"}]) as service:
        code, _, log = jobs(service, "report", "job")
        assert code == 2
        assert "job has no record in s3://bucket/out/job/output/. The job is InProgress" in log
        service.objects[output] = archive(tmp_path / "empty")
        assert "Only scripts started by lightning-sm train" in jobs(service, "report", "job-2")[2]
        service.objects[output] = os.urandom(4000)
        assert f"s3:/{output} cannot be read as an archive" in jobs(service, "report", "job-2")[2]
    assert list((tmp_path / "here").iterdir()) == []
