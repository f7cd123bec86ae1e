"""The creation of a job, once."""

import pytest
from botocore.exceptions import ClientError, ReadTimeoutError

from lightning_sm.job.variables import JOB_SECRET
from lightning_sm.submit.creation import create_training_job, create_tuning_job
from lightning_sm.submit.job_file import Range, Tune
from lightning_sm.submit.tuning import tuning_job
from tests.fakes.aws import stubbed_clients, training_job
from tests.unit.submit.test_service_limits import REQUEST

JOB = {**REQUEST, "Environment": {JOB_SECRET.name: "mine"}}
CREATED = {"TrainingJobArn": "arn:aws:sagemaker:us-east-1:111122223333:training-job/job-1"}


@pytest.fixture
def clients():
    """Clients whose answers the test prepares."""
    with stubbed_clients() as found:
        yield found


def test_the_request_is_sent_as_it_is(clients):
    """Nothing is asked before or after it."""
    clients.answers("sagemaker", "create_training_job", CREATED, **JOB)
    create_training_job(clients.sagemaker, JOB)


def test_a_job_that_a_lost_answer_was_about_is_this_one(clients, caplog):
    """Botocore repeats the request, and the service refuses the name: the secret tells whose job has it."""
    clients.refuses("sagemaker", "create_training_job", "ResourceInUse")
    clients.answers("sagemaker", "describe_training_job", training_job("job-1", Environment={JOB_SECRET.name: "mine"}))
    with caplog.at_level("INFO", "lightning_sm"):
        create_training_job(clients.sagemaker, JOB)
    assert "has job job-1 already" in caplog.text


@pytest.mark.parametrize("environment", [{JOB_SECRET.name: "other"}, {}, None])
def test_a_job_of_somebody_else_is_not_taken_for_this_one(clients, environment):
    """The service's refusal stands."""
    clients.refuses("sagemaker", "create_training_job", "ResourceInUse")
    clients.answers("sagemaker", "describe_training_job", training_job("job-1", Environment=environment))
    with pytest.raises(ClientError, match="ResourceInUse"):
        create_training_job(clients.sagemaker, JOB)


def test_other_refusals_are_raised_at_once(clients):
    """For the caller, who knows which may pass."""
    clients.refuses("sagemaker", "create_training_job", "ResourceLimitExceeded")
    with pytest.raises(ClientError, match="ResourceLimitExceeded"):
        create_training_job(clients.sagemaker, JOB)


@pytest.mark.parametrize("error", [ReadTimeoutError(endpoint_url="https://x"), KeyboardInterrupt()])
def test_without_any_answer_the_job_may_exist(caplog, error):
    """Which is said, with what ends it: a job that nobody knows of is billed all the same."""

    class Client:
        """boto3's client, whose requests get no answer."""

        def create_training_job(self, **_):
            """Wait in vain."""
            raise error

    with pytest.raises(type(error)):
        create_training_job(Client(), JOB)
    assert "job job-1 may run, and be billed" in caplog.text
    assert "lightning-sm jobs stop job-1" in caplog.text


@pytest.mark.parametrize("owner", ["mine", "other"])
def test_a_tuning_job_is_created_once(clients, owner):
    """Its training jobs have the secret."""
    arguments, _ = tuning_job(Tune("val_acc", {"lr": Range(0.1, 1)}, "maximize"), "digits", JOB)
    name = arguments["HyperParameterTuningJobName"]
    described = {
        "HyperParameterTuningJobName": name,
        "HyperParameterTuningJobArn": f"arn:aws:sagemaker:us-east-1:111122223333:hyper-parameter-tuning-job/{name}",
        "HyperParameterTuningJobConfig": arguments["HyperParameterTuningJobConfig"],
        "HyperParameterTuningJobStatus": "InProgress",
        "CreationTime": 0,
        "TrainingJobStatusCounters": {},
        "ObjectiveStatusCounters": {},
        "TrainingJobDefinition": {**arguments["TrainingJobDefinition"], "Environment": {JOB_SECRET.name: owner}},
    }
    clients.refuses("sagemaker", "create_hyper_parameter_tuning_job", "ResourceInUse")
    clients.answers("sagemaker", "describe_hyper_parameter_tuning_job", described)
    if owner == "mine":
        create_tuning_job(clients.sagemaker, arguments)
    else:
        with pytest.raises(ClientError, match="ResourceInUse"):
            create_tuning_job(clients.sagemaker, arguments)
