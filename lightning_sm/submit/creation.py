"""The creation of jobs on the service, once, even where a request has to be repeated.

botocore repeats a request whose answer was lost, and the service then refuses it, since the job exists. The job's
secret, which nobody else has, tells whether it is this one.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from botocore.exceptions import ClientError, HTTPClientError

from lightning_sm.cloud.aws import error_code
from lightning_sm.job.variables import JOB_SECRET

_LOG = logging.getLogger(__name__)

_EXISTS = "ResourceInUse"


def create_training_job(client: Any, arguments: Mapping[str, Any]) -> None:
    """Create a training job.

    Args:
        client: boto3's client of SageMaker.
        arguments: Those of CreateTrainingJob.

    Raises:
        ClientError: The service rejects the request, for example because another job has the name.
        HTTPClientError: No try got an answer; the job may exist.
    """
    name = arguments["TrainingJobName"]
    _create(
        name,
        lambda: client.create_training_job(**arguments),
        arguments,
        lambda: client.describe_training_job(TrainingJobName=name),
    )


def create_tuning_job(client: Any, arguments: Mapping[str, Any]) -> None:
    """Create a tuning job.

    Args:
        client: boto3's client of SageMaker.
        arguments: Those of CreateHyperParameterTuningJob.

    Raises:
        ClientError: The service rejects the request, for example because another job has the name.
        HTTPClientError: No try got an answer; the job may exist.
    """
    name = arguments["HyperParameterTuningJobName"]
    _create(
        name,
        lambda: client.create_hyper_parameter_tuning_job(**arguments),
        arguments["TrainingJobDefinition"],
        lambda: client.describe_hyper_parameter_tuning_job(HyperParameterTuningJobName=name).get(
            "TrainingJobDefinition", {}
        ),
    )


def _create(
    name: str, create: Callable[[], object], sent: Mapping[str, Any], describe: Callable[[], Mapping[str, Any]]
) -> None:
    """Create a job; if the service says that it exists, ask whether it is the one that was sent.

    Args:
        name: Its name.
        create: Sends the request.
        sent: The part of the request that has the environment.
        describe: Returns the same part of the job that exists.
    """
    try:
        with _doubt(name):
            create()
    except ClientError as error:
        if error_code(error) != _EXISTS:
            raise
        _LOG.info("The service says that job %s exists; asking whether it is this one.", name)
        _accept_own(error, name, sent, describe())


@contextmanager
def _doubt(name: str) -> Iterator[None]:
    """Say that a job may exist, and be billed, if no try to create it got an answer."""
    try:
        yield
    except (HTTPClientError, KeyboardInterrupt):
        _LOG.warning(
            "There was no answer to the request: job %s may run, and be billed.\n"
            "  Look for it: lightning-sm jobs logs %s\n"
            "  Stop it:     lightning-sm jobs stop %s",
            name,
            name,
            name,
        )
        raise


def _accept_own(error: ClientError, name: str, sent: Mapping[str, Any], found: Mapping[str, Any]) -> None:
    """Return if the job that exists is the one that was sent, else raise the service's error."""
    secrets = [described.get("Environment", {}).get(JOB_SECRET.name) for described in (sent, found)]
    if None in secrets or secrets[0] != secrets[1]:
        raise error
    _LOG.info("The service has job %s already: the answer to an earlier try was lost.", name)
