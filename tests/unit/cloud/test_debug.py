"""Remote debugging of a job that runs."""

import pytest

from lightning_sm.cloud.debug import set_remote_debug
from lightning_sm.cloud.find import Found
from lightning_sm.errors import AWSError
from tests.fakes.aws import training_job
from tests.unit.cloud.test_find import tuning_job


@pytest.mark.parametrize(("enable", "words"), [(True, "lightning-sm jobs shell job-1 algo-1"), (False, "is off")])
def test_a_shell_is_allowed_and_forbidden_while_a_job_runs(clients, enable, words):
    """And the command that opens one is shown."""
    arn = {"TrainingJobArn": "arn:aws:sagemaker:us-east-1:111122223333:training-job/job-1"}
    expected = {"TrainingJobName": "job-1", "RemoteDebugConfig": {"EnableRemoteDebug": enable}}
    clients.answers("sagemaker", "update_training_job", arn, **expected)
    found = Found("training", "job-1", training_job(status="InProgress"))
    assert words in set_remote_debug(clients, found, enable=enable)


@pytest.mark.parametrize(
    ("found", "words"),
    [
        (Found("training", "job-1", training_job()), "job-1 is Completed; .* while a job is Downloading or Training"),
        (
            Found("training", "job-1", training_job(status="InProgress", SecondaryStatus="Starting")),
            "job-1 is Starting",
        ),
        (Found("tuning", "tune-1", tuning_job()), "tune-1 is a tuning job"),
    ],
)
def test_what_the_service_would_refuse_is_said_here(clients, found, words):
    """With the state of the job, and those in which it works; nothing is sent."""
    with pytest.raises(AWSError, match=words):
        set_remote_debug(clients, found, enable=True)
