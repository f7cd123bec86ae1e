"""Jobs in a queue of AWS Batch."""

import json
from dataclasses import replace

import pytest

pytest.importorskip("botocore", reason="needs the SageMaker SDK (extra launch)")

from lightning_sm.submit.batch import batch_problems, service_job
from lightning_sm.submit.job_file import Batch, Range, Tune
from lightning_sm.submit.service_limits import request_problems
from tests.unit.submit.test_preflight import JOB
from tests.unit.submit.test_service_limits import REQUEST

pytestmark = pytest.mark.sdk2


def test_the_request_of_the_training_job_travels_as_text():
    """With the same name; its tags become those of the job in the queue, and what is not set is left to the service."""
    arguments = service_job(Batch("queue"), REQUEST)
    payload = json.loads(arguments.pop("serviceRequestPayload"))
    assert payload == {name: value for name, value in REQUEST.items() if name != "Tags"}
    assert arguments == {
        "jobName": "job-1",
        "jobQueue": "queue",
        "serviceJobType": "SAGEMAKER_TRAINING",
        "retryStrategy": {"attempts": 1},
        "tags": {"a b": "ä/c"},
    }


def test_all_settings_of_the_queue_fit_its_api():
    """As botocore's model has it."""
    batch = Batch("queue", priority=0, share="team", quota_share="gpus", attempts=3, timeout_s=3600)
    arguments = service_job(batch, REQUEST)
    assert arguments["schedulingPriority"] == 0
    assert arguments["timeoutConfig"] == {"attemptDurationSeconds": 3600}
    assert (arguments["shareIdentifier"], arguments["quotaShareName"]) == ("team", "gpus")
    assert request_problems(arguments, "SubmitServiceJob", "batch") == []


@pytest.mark.parametrize(
    ("batch", "words"),
    [
        (Batch(""), "batch.queue is empty"),
        (Batch("q", priority=10_000), "batch.priority is 10000"),
        (Batch("q", attempts=0), "batch.attempts is 0"),
        (Batch("q", attempts=11), "batch.attempts is 11"),
        (Batch("q", timeout_s=59), "batch.timeout_s is 59"),
    ],
)
def test_limits_of_the_queue_are_checked_before(batch, words):
    """One problem for each; the service says so only after the job was sent."""
    (problem,) = batch_problems(replace(JOB, batch=batch))
    assert words in problem


def test_a_job_without_a_queue_has_no_problems_with_it():
    """And a tuning job cannot be queued."""
    assert list(batch_problems(JOB)) == []
    tune = Tune("val_acc", {"lr": Range(values=[1, 2])}, "maximize")
    (problem,) = batch_problems(replace(JOB, batch=Batch("q"), tune=tune))
    assert "batch and tune are set" in problem
