"""The three things that can be done with a job: show the request, run it in local mode, send it."""

from __future__ import annotations

import logging
import tempfile
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import boto3
from boto3.exceptions import Boto3Error
from botocore.config import Config
from botocore.exceptions import BotoCoreError, ClientError

from lightning_sm.errors import HyperparameterError, SubmitError
from lightning_sm.submit import local_mode
from lightning_sm.submit.job_file import Job
from lightning_sm.submit.plan import Plan, encode_hyperparameters, for_local_mode, make_plan
from lightning_sm.submit.preflight import Findings, check, presentable
from lightning_sm.submit.retry import run_until_capacity, watch
from lightning_sm.submit.sdk.rehearsal import Gate
from lightning_sm.submit.sdk.version import adapter
from lightning_sm.submit.service_limits import request_problems

_LOG = logging.getLogger(__name__)


def dry_run(job: Job) -> dict[str, Any]:
    """Check a job and return the CreateTrainingJob request that the installed SDK makes of it; nothing is sent.

    Args:
        job: What the file says.

    Raises:
        SDKError: There is no SDK.
        SubmitError: The job has problems, all of which are named; or there is no region.
    """
    # Credentials of nobody, so that the SDK looks for none.
    session = _boto_session(aws_access_key_id="rehearsal", aws_secret_access_key="rehearsal")  # noqa: S106
    return _rehearse(job, session, Gate(session))[1]


def send(job: Job, *, waits: bool = True) -> Mapping[str, Any]:
    """Check a job, send it, again while there is no capacity, and wait for its end.

    Args:
        job: What the file says.
        waits: False to return once the service has accepted the job.

    Returns:
        What DescribeTrainingJob says at the end; without waiting, only the name.

    Raises:
        SDKError: There is no SDK.
        SubmitError: The job has problems, all of which are named; there is no region, there are no credentials, or
            the service refuses it.
    """
    session = _boto_session()
    if session.get_credentials() is None:
        raise SubmitError(
            "No AWS credentials: run 'aws configure' or 'aws sso login', or set AWS_PROFILE, or AWS_ACCESS_KEY_ID and "
            "AWS_SECRET_ACCESS_KEY. --dry-run and --local need none."
        )
    plan, _ = _rehearse(job, session, Gate(session))
    # A long wait must outlive a busy API.
    client = session.client("sagemaker", config=Config(retries={"mode": "adaptive", "max_attempts": 10}))
    submission = adapter().Submission(plan, session)
    try:
        return run_until_capacity(
            submission.submit, (lambda name: watch(client, name, session.region_name)) if waits else None, job.retries
        )
    except (ClientError, BotoCoreError, Boto3Error) as error:
        raise SubmitError(f"AWS refuses, or cannot be reached: {error}") from error
    except OSError as error:  # a file of source_dir that is gone since it was checked
        raise SubmitError(f"The job was not sent: {error}") from error


def run_locally(job: Job, *, timeout_s: float | None = None, keeps: bool = False) -> int:
    """Run a job in the SDK's local mode, and judge it by its containers.

    Args:
        job: What the file says.
        timeout_s: Seconds until everything is ended; None for none.
        keeps: Leave containers and folders for a closer look.

    Returns:
        0 if every container ended with 0, else the exit code of one that did not; 124 after the time limit.

    Raises:
        SDKError: There is no SDK.
        SubmitError: The job has problems, all of which are named; or there is no Docker.
    """
    findings = check(job, "local")
    hyperparameters = _hyperparameters(job, findings)
    _report(findings)
    root = Path(tempfile.mkdtemp(prefix="lightning-sm-submit-"))
    local, warnings = for_local_mode(job, root / "artifacts")
    for warning in warnings:
        _LOG.warning("lightning-sm: warning: %s", warning)
    plan = make_plan(local, hyperparameters)
    if job.source_dir is not None:
        plan = plan.with_code(f"file://{Path(job.source_dir).absolute()}")
    return local_mode.run(plan, root, timeout_s=timeout_s, keeps=keeps)


def _rehearse(job: Job, session: boto3.Session, gate: Gate) -> tuple[Plan, dict[str, Any]]:
    """Check everything that can be checked without the service."""
    sdk = adapter()
    findings = check(job, "cloud", session.region_name)
    hyperparameters = _hyperparameters(job, findings)
    request: dict[str, Any] = {}
    # The request names the code, and does not depend on what is in it: there is nothing to read and upload.
    with tempfile.TemporaryDirectory() as no_code:
        shown = presentable(job) if job.source_dir is None else replace(presentable(job), source_dir=no_code)
        plan = make_plan(shown, hyperparameters)
        try:
            request = gate.rehearse(lambda: sdk.Submission(plan, session).submit())
            findings.problems += request_problems(request)
        except SubmitError as error:
            # What the SDK stumbles over has most likely been named already, and better.
            findings.problems += [] if findings.problems else [str(error)]
    _report(findings)
    return make_plan(job, hyperparameters), request


def _hyperparameters(job: Job, findings: Findings) -> dict[str, str]:
    try:
        return encode_hyperparameters(job)
    except HyperparameterError as error:
        findings.problems.append(f"config, hyperparameters: {error}")
        return {}


def _report(findings: Findings) -> None:
    for warning in findings.warnings:
        _LOG.warning("lightning-sm: warning: %s", warning)
    findings.raise_problems()


def _boto_session(**credentials: str) -> boto3.Session:
    try:
        session = boto3.Session(**credentials)
    except BotoCoreError as error:  # AWS_PROFILE names none
        raise SubmitError(f"No AWS session: {error}") from error
    if session.region_name is None:
        raise SubmitError("No AWS region: set AWS_DEFAULT_REGION, or 'region' in ~/.aws/config.")
    return session
