"""The creation of jobs on the service. Each request is sent once: without an answer, the job may exist."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from botocore.exceptions import HTTPClientError

from lightning_sm.cloud.aws import Clients

_LOG = logging.getLogger(__name__)


def create_training_job(clients: Clients, arguments: Mapping[str, Any]) -> None:
    """Create a training job.

    Args:
        clients: Clients of the AWS APIs.
        arguments: Those of CreateTrainingJob.

    Raises:
        ClientError: The service rejects the request.
        HTTPClientError: There was no answer; the job may exist.
    """
    with _doubt(arguments["TrainingJobName"]):
        clients.creator.create_training_job(**arguments)


def create_tuning_job(clients: Clients, arguments: Mapping[str, Any]) -> None:
    """Create a tuning job.

    Args:
        clients: Clients of the AWS APIs.
        arguments: Those of CreateHyperParameterTuningJob.

    Raises:
        ClientError: The service rejects the request.
        HTTPClientError: There was no answer; the job may exist.
    """
    with _doubt(arguments["HyperParameterTuningJobName"]):
        clients.creator.create_hyper_parameter_tuning_job(**arguments)


@contextmanager
def _doubt(name: str) -> Iterator[None]:
    """Say that a job may exist, and be billed, if the request to create it got no answer."""
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
