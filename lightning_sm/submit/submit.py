"""What can be done with a job: show the request, run it in local mode, submit it."""

from __future__ import annotations

import tempfile
from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import boto3
from boto3.exceptions import Boto3Error
from botocore.config import Config
from botocore.exceptions import BotoCoreError, ClientError

from lightning_sm.errors import HyperparameterError, SubmitError
from lightning_sm.job.redaction import shown, shown_hyperparameters
from lightning_sm.submit import local_mode
from lightning_sm.submit.job_file import Job
from lightning_sm.submit.plan import Plan, encode_hyperparameters, for_local_mode, make_plan
from lightning_sm.submit.preflight import Findings, check, with_placeholders
from lightning_sm.submit.retry import submit_until_capacity, watch
from lightning_sm.submit.sdk.rehearsal import Gate
from lightning_sm.submit.sdk.version import adapter
from lightning_sm.submit.service_limits import request_problems


def dry_run(job: Job) -> dict[str, Any]:
    """Check a job and return the CreateTrainingJob request that the installed SDK builds; nothing is sent.

    The request shows ``(hidden)`` in place of secrets: the job's own, and those of hyperparameters and variables whose
    names say so.

    Raises:
        SDKError: The SDK is not installed.
        SubmitError: The job has problems, which the message lists; or no region is configured.
    """
    # Placeholder credentials keep the SDK from looking for real ones.
    session = _boto_session(aws_access_key_id="rehearsal", aws_secret_access_key="rehearsal")  # noqa: S106
    request = _rehearse(job, session)[1]
    environment = request.get("Environment", {})
    return {
        **request,
        "HyperParameters": shown_hyperparameters(request.get("HyperParameters", {})),
        "Environment": {name: shown(name, text) for name, text in environment.items()},
    }


def send(job: Job, *, wait: bool = True) -> Mapping[str, Any]:
    """Check a job, submit it, retry while there is no capacity, and wait until it ends.

    Args:
        job: The content of the job file.
        wait: False returns as soon as the service has accepted the job.

    Returns:
        The last answer of DescribeTrainingJob; without waiting, only ``TrainingJobName``.

    Raises:
        SDKError: The SDK is not installed.
        SubmitError: The job has problems, which the message lists; region or credentials are missing; or the service
            rejects the job.
    """
    session = _boto_session()
    if session.get_credentials() is None:
        raise SubmitError(
            "No AWS credentials: run 'aws configure' or 'aws sso login', or set AWS_PROFILE, or AWS_ACCESS_KEY_ID and "
            "AWS_SECRET_ACCESS_KEY. --dry-run and --local need none."
        )
    plan, _ = _rehearse(job, session)
    # Waiting takes hours, in which the API is throttled at times.
    client = session.client("sagemaker", config=Config(retries={"mode": "adaptive", "max_attempts": 10}))
    try:
        return submit_until_capacity(
            partial(adapter().submit, plan, session),
            partial(watch, client, region=session.region_name) if wait else None,
            job.retries,
        )
    except (ClientError, BotoCoreError, Boto3Error) as error:
        raise SubmitError(f"AWS rejected the request or cannot be reached: {error}") from error
    except OSError as error:  # a file of source_dir was removed after the check
        raise SubmitError(f"The job was not submitted: {error}") from error


def run_locally(job: Job, *, timeout_s: float | None = None, keep: bool = False) -> int:
    """Run a job in the SDK's local mode, and judge it by its containers.

    Args:
        job: The content of the job file.
        timeout_s: Seconds after which the job is stopped; None for no limit.
        keep: Keep the containers.

    Returns:
        0 if every container ended with 0, else the exit code of one that did not; 124 after the time limit.

    Raises:
        SDKError: The SDK is not installed.
        SubmitError: The job has problems, which the message lists; or Docker is missing.
    """
    findings = check(job, "local")
    hyperparameters = _hyperparameters(job, findings)
    findings.report()
    root = Path(tempfile.mkdtemp(prefix="lightning-sm-submit-"))
    local, warnings = for_local_mode(job, root / "artifacts")
    Findings(warnings=warnings).report()
    plan = make_plan(local, hyperparameters)
    if job.source_dir is not None:
        plan = plan.with_code(f"file://{Path(job.source_dir).absolute()}")
    return local_mode.run(plan, root, timeout_s=timeout_s, keep=keep)


def _rehearse(job: Job, session: boto3.Session) -> tuple[Plan, dict[str, Any]]:
    """Check everything that can be checked without the service; return the plan and its request."""
    sdk = adapter()
    findings = check(job, "cloud", session.region_name)
    hyperparameters = _hyperparameters(job, findings)
    request: dict[str, Any] = {}
    stand_in = with_placeholders(job)
    # The request names the location of the code and does not depend on its content: upload an empty folder.
    with tempfile.TemporaryDirectory() as empty:
        if job.source_dir is not None:
            stand_in = replace(stand_in, source_dir=empty)
        try:
            request = Gate(session).rehearse(partial(sdk.submit, make_plan(stand_in, hyperparameters), session))
            findings.problems += request_problems(request)
        except SubmitError as error:
            # With other problems, the SDK most likely failed because of one that is already listed, and better worded.
            if not findings.problems:
                findings.problems.append(str(error))
    findings.report()
    return make_plan(job, hyperparameters), request


def _hyperparameters(job: Job, findings: Findings) -> dict[str, str]:
    try:
        return encode_hyperparameters(job)
    except HyperparameterError as error:
        findings.problems.append(f"config, hyperparameters: {error}")
        return {}


def _boto_session(**credentials: str) -> boto3.Session:
    try:
        session = boto3.Session(**credentials)
    except BotoCoreError as error:  # for example, AWS_PROFILE names an unknown profile
        raise SubmitError(f"No AWS session: {error}") from error
    if session.region_name is None:
        raise SubmitError("No AWS region: set AWS_DEFAULT_REGION, or 'region' in ~/.aws/config.")
    return session
