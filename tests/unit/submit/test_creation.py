"""Creating a job exactly once."""

from types import SimpleNamespace

import pytest
from botocore.exceptions import ClientError, ReadTimeoutError

from lightning_sm.submit.submit import create_job


def creator(operation, outcome):
    """Return clients with one operation that raises the given exception."""

    def answer(**_):
        raise outcome

    return SimpleNamespace(creator=SimpleNamespace(**{operation: answer}))


CREATE = [
    ("create_training_job", {"TrainingJobName": "job-1"}),
    ("create_hyper_parameter_tuning_job", {"HyperParameterTuningJobName": "job-1"}),
]


@pytest.mark.parametrize(("operation", "request_"), CREATE)
def test_refusals_are_raised_at_once(operation, request_, caplog):
    """Refusals reach the caller, which decides whether to retry."""
    error = ClientError({"Error": {"Code": "ResourceLimitExceeded"}}, "Create")
    with pytest.raises(ClientError, match="ResourceLimitExceeded"):
        create_job(creator(operation, error), request_)
    assert caplog.text == ""


@pytest.mark.parametrize(("operation", "request_"), CREATE)
@pytest.mark.parametrize("error", [ReadTimeoutError(endpoint_url="https://x"), KeyboardInterrupt()])
def test_without_an_answer_the_job_may_exist(operation, request_, caplog, error):
    """Without an answer the job may exist and be billed, so a warning names it and the command that stops it."""
    with pytest.raises(type(error)):
        create_job(creator(operation, error), request_)
    assert "job job-1 may be running and billed" in caplog.text
    assert "lightning-sm jobs stop job-1" in caplog.text
