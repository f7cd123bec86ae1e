"""boto3 clients with prepared answers, which botocore checks against the API model. Nothing is ever sent."""

from __future__ import annotations

import socket
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from datetime import datetime, timedelta, timezone
from functools import cache
from typing import Any
from unittest.mock import patch

import boto3
from botocore.stub import Stubber

from lightning_sm.cloud.aws import Clients

NOW = datetime(2026, 11, 22, 12, 0, tzinfo=timezone.utc)
_ARN = "arn:aws:sagemaker:us-east-1:111122223333"
_SERVICES = ("sagemaker", "logs", "s3")


class StubbedClients(Clients):
    """Clients with prepared answers.

    Attributes:
        stubbers: botocore's Stubbers by name of the service.
    """

    def __init__(self) -> None:
        super().__init__(_session())
        self.stubbers = {name: Stubber(getattr(self, name)) for name in _SERVICES}
        self._looks = {"pricing": super().look("pricing")}
        self.stubbers |= {name: Stubber(client) for name, client in self._looks.items()}

    def look(self, service: str, region: str | None = None) -> Any:
        """Return the client with prepared answers, or else a real client."""
        return self._looks.get(service) or super().look(service, region)

    def answers(self, service: str, operation: str, answer: Mapping[str, Any], **expected: Any) -> None:
        """Prepare the next answer.

        Args:
            service: Name of the service.
            operation: Name of boto3's method.
            answer: The answer, which must match the API model.
            expected: Expected arguments of the request; if none are given, any arguments are accepted.
        """
        self.stubbers[service].add_response(operation, answer, expected or None)

    def refuses(self, service: str, operation: str, code: str, message: str = "said the service") -> None:
        """Prepare an error as the next answer."""
        self.stubbers[service].add_client_error(operation, code, message)

    def check_nothing_left(self) -> None:
        """Fail if a prepared answer was never requested."""
        for stubber in self.stubbers.values():
            stubber.assert_no_pending_responses()


@contextmanager
def stubbed_clients() -> Iterator[StubbedClients]:
    """Yield clients with prepared answers; block all sockets meanwhile, and check that every answer is requested."""

    def refuse(*_: object, **__: object) -> None:
        raise AssertionError("a test tried to reach the network")

    with patch.object(socket.socket, "connect", refuse):
        clients = StubbedClients()
        for stubber in clients.stubbers.values():
            stubber.activate()
        yield clients
        clients.check_nothing_left()


@cache
def _session() -> boto3.Session:
    """Return one session for all tests, because it caches the API models that it has read."""
    return boto3.Session(
        aws_access_key_id="nobody",
        aws_secret_access_key="nothing",  # noqa: S106
        region_name="us-east-1",
    )


def training_job(name: str = "job-1", status: str = "Completed", **changed: Any) -> dict[str, Any]:
    """Return an answer of DescribeTrainingJob: two GPU hosts and a data host, running for an hour.

    Args:
        name: Name of the job.
        status: Status of the job.
        changed: Values to change; None removes a value.
    """
    description = {
        "TrainingJobName": name,
        "TrainingJobArn": f"{_ARN}:training-job/{name}",
        "ModelArtifacts": {"S3ModelArtifacts": f"s3://bucket/out/{name}/output/model.tar.gz"},
        "TrainingJobStatus": status,
        "SecondaryStatus": "Training" if status == "InProgress" else status,
        "AlgorithmSpecification": {"TrainingInputMode": "File"},
        "OutputDataConfig": {"S3OutputPath": "s3://bucket/out/"},
        "ResourceConfig": {
            "VolumeSizeInGB": 30,
            "InstanceGroups": [
                {"InstanceGroupName": "trainer", "InstanceType": "ml.g5.xlarge", "InstanceCount": 2},
                {"InstanceGroupName": "data", "InstanceType": "ml.c5.xlarge", "InstanceCount": 1},
            ],
        },
        "StoppingCondition": {"MaxRuntimeInSeconds": 86400},
        "CreationTime": NOW - timedelta(hours=2),
        "TrainingStartTime": NOW - timedelta(hours=1),
        **changed,
    }
    return {key: value for key, value in description.items() if value is not None}


def one_host(instance_type: str = "ml.g5.xlarge", count: int = 1, **more: Any) -> dict[str, Any]:
    """Return the ResourceConfig of a job without instance groups."""
    return {"VolumeSizeInGB": 30, "InstanceType": instance_type, "InstanceCount": count, **more}


def event(number: int, host: str, text: str, time_ms: int | None = None, job: str = "job-1") -> dict[str, Any]:
    """Return an event of FilterLogEvents.

    Args:
        number: Number that identifies the event.
        host: Name of the host.
        text: The message.
        time_ms: Time of the event, in milliseconds since the Unix epoch; defaults to ``number`` seconds.
        job: Name of the job.
    """
    return {
        "logStreamName": f"{job}/{host}-1700000000",
        "timestamp": number * 1000 if time_ms is None else time_ms,
        "message": text,
        "ingestionTime": 0,
        "eventId": str(number),
    }
