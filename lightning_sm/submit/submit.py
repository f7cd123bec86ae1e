"""The uses of a job file: show the request, run the job in local mode, submit it."""

from __future__ import annotations

import contextlib
import sys
import tempfile
from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import boto3
from boto3.exceptions import Boto3Error
from botocore.exceptions import BotoCoreError, ClientError

from lightning_sm._log import command_logger
from lightning_sm.cloud.aws import Clients, check_credentials, new_session
from lightning_sm.cloud.find import Found
from lightning_sm.cloud.follow import follow
from lightning_sm.errors import HyperparameterError, SubmitError
from lightning_sm.job.redaction import shown, shown_hyperparameters
from lightning_sm.submit import local_mode
from lightning_sm.submit.job_file import Job, Tune
from lightning_sm.submit.preflight import Findings, check, with_placeholders
from lightning_sm.submit.request import TrainingRequest, encode_hyperparameters, for_local_mode, make_request
from lightning_sm.submit.retry import submit_until_capacity
from lightning_sm.submit.script_check import check_hyperparameters
from lightning_sm.submit.sdk.rehearsal import Gate
from lightning_sm.submit.sdk.version import adapter
from lightning_sm.submit.service_limits import request_problems
from lightning_sm.submit.tuning import count_problem, tuning_job

_LOG = command_logger(__name__)


def dry_run(job: Job) -> dict[str, Any]:
    """Check a job and return the request that would be sent, as the installed SDK builds it; nothing is sent.

    It is that of CreateTrainingJob; with ``tune`` of CreateHyperParameterTuningJob. It shows ``(hidden)`` in place of
    secrets: the job's own, and those of hyperparameters and variables whose names say so.

    Raises:
        AWSError: No region is configured.
        SDKError: The SDK is not installed.
        SubmitError: The job has problems, which the message lists.
    """
    # Placeholder credentials keep the SDK from looking for real ones.
    session = new_session(aws_access_key_id="rehearsal", aws_secret_access_key="rehearsal")  # noqa: S106
    request = _rehearse(job, session, Gate(session))[1]
    if "TrainingJobDefinition" in request:
        return {**request, "TrainingJobDefinition": _without_secrets(request["TrainingJobDefinition"])}
    return _without_secrets(request)


def send(job: Job, *, wait: bool = True, shows_log: bool = False) -> Mapping[str, Any]:
    """Check a job, submit it, retry while there is no capacity, and wait until it ends.

    Args:
        job: The content of the job file.
        wait: False returns as soon as the service has accepted the job.
        shows_log: Whether to write the job's log to stdout while waiting.

    Returns:
        The last answer of DescribeTrainingJob; with ``tune`` of DescribeHyperParameterTuningJob. Without waiting, only
        the job's name.

    Raises:
        AWSError: Region or credentials are missing.
        SDKError: The SDK is not installed.
        SubmitError: The job has problems, which the message lists; or the service rejects the job.
    """
    session = new_session()
    check_credentials(session)
    gate = Gate(session)
    plan, _ = _rehearse(job, session, gate)
    _LOG.info("0 problems")
    submit = partial(_call_sdk, plan, session)
    clients = Clients(session)
    try:
        if job.tune is not None:
            found = _start_tuning(job.tune, job.name, clients, gate.capture(submit))
        else:
            watch = partial(_watch, clients, shows_log=shows_log) if wait else None
            return submit_until_capacity(submit, watch, job.retries)
        _LOG.info("Submitted %s. To follow it: lightning-sm jobs logs -f %s", found.name, found.name)
        return follow(clients, found, shows_log=shows_log) if wait else found.description
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
    plan = make_request(local, hyperparameters)
    if job.source_dir is not None:
        plan = plan.with_code(f"file://{Path(job.source_dir).absolute()}")
    return local_mode.run(plan, root, timeout_s=timeout_s, keep=keep)


def _watch(clients: Clients, name: str, *, shows_log: bool) -> Mapping[str, Any]:
    return follow(clients, Found("training", name, {}), shows_log=shows_log)


def _start_tuning(tune: Tune, name: str, clients: Clients, request: Mapping[str, Any]) -> Found:
    arguments, _ = tuning_job(tune, name, request)
    clients.sagemaker.create_hyper_parameter_tuning_job(**arguments)
    full_name = arguments["HyperParameterTuningJobName"]
    return Found("tuning", full_name, {"HyperParameterTuningJobName": full_name})


def _call_sdk(plan: TrainingRequest, session: boto3.Session) -> str:
    """Let the SDK submit a job; what version 2 prints belongs to stderr, beside our own lines."""
    with contextlib.redirect_stdout(sys.stderr):
        name: str = adapter().submit(plan, session)
    return name


def _rehearse(job: Job, session: boto3.Session, gate: Gate) -> tuple[TrainingRequest, dict[str, Any]]:
    """Check everything that can be checked without the service; return the plan and the request."""
    with contextlib.redirect_stdout(sys.stderr):  # to which the SDK's logging then writes, too
        adapter()
    findings = check(job, "cloud", session.region_name)
    hyperparameters = _hyperparameters(job, findings)
    request: dict[str, Any] = {}
    stand_in = with_placeholders(job)
    # The request names the location of the code and does not depend on its content: upload an empty folder.
    with tempfile.TemporaryDirectory() as empty:
        if job.source_dir is not None:
            stand_in = replace(stand_in, source_dir=empty)
        try:
            request = gate.rehearse(partial(_call_sdk, make_request(stand_in, hyperparameters), session))
            request = _checked(job, request, findings)
        except SubmitError as error:
            # With other problems, the SDK most likely failed because of one that is already listed, and better worded.
            if not findings.problems:
                findings.problems.append(str(error))
    if not findings.problems:  # last, as it takes seconds
        check_hyperparameters(job, hyperparameters, findings)
    findings.report()
    return make_request(job, hyperparameters), request


def _checked(job: Job, request: dict[str, Any], findings: Findings) -> dict[str, Any]:
    """Check the request of a training job, and return the one to send: the same, or that of a tuning job."""
    if job.tune is not None:
        arguments, warnings = tuning_job(job.tune, with_placeholders(job).name, request)
        findings.warnings += warnings
        problem = count_problem(job.tune, request)
        findings.problems += [problem] if problem else request_problems(arguments, "CreateHyperParameterTuningJob")
        return arguments
    findings.problems += request_problems(request)
    return request


def _hyperparameters(job: Job, findings: Findings) -> dict[str, str]:
    try:
        return encode_hyperparameters(job)
    except HyperparameterError as error:
        findings.problems.append(f"config, hyperparameters: {error}")
        return {}


def _without_secrets(request: Mapping[str, Any]) -> dict[str, Any]:
    """Return a request, or its description of a training job, with ``(hidden)`` in place of secrets."""
    safe = dict(request)
    for name in ("HyperParameters", "StaticHyperParameters"):
        if name in request:
            safe[name] = shown_hyperparameters(request[name])
    if "Environment" in request:
        safe["Environment"] = {name: shown(name, text) for name, text in request["Environment"].items()}
    return safe
