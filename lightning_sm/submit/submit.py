"""The uses of a job file: show the request, run the job in containers here, submit it."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any

from boto3.exceptions import Boto3Error
from botocore.exceptions import BotoCoreError, ClientError

from lightning_sm._log import command_logger
from lightning_sm.cloud.aws import Clients, check_credentials, new_session
from lightning_sm.cloud.find import Found
from lightning_sm.cloud.follow import follow
from lightning_sm.errors import AWSError, HyperparameterError, JobConfigError, SubmitError
from lightning_sm.submit.account import check_account
from lightning_sm.submit.creation import create_training_job, create_tuning_job
from lightning_sm.submit.image_build import build_image, push_image
from lightning_sm.submit.job_file import Job, Tune
from lightning_sm.submit.local import ignored_keys, run_containers
from lightning_sm.submit.preflight import check, with_placeholders
from lightning_sm.submit.price_list import with_list_prices
from lightning_sm.submit.problems import Findings, JobProblem
from lightning_sm.submit.request import TrainingRequest, encode_hyperparameters, make_request
from lightning_sm.submit.retry import submit_until_capacity
from lightning_sm.submit.service_limits import request_problems
from lightning_sm.submit.storage import JobStorage
from lightning_sm.submit.training_job import new_job_name, training_job
from lightning_sm.submit.tuning import tuning_job
from lightning_sm.submit.without_secrets import without_secrets

_LOG = command_logger(__name__)


def dry_run(job: Job) -> dict[str, Any]:
    """Check a job and return the request that would be sent; nothing is sent.

    It is that of CreateTrainingJob; with ``tune`` of CreateHyperParameterTuningJob. It shows ``(hidden)`` in place of
    secrets: the job's own, and those of hyperparameters and variables whose names say so.

    Raises:
        AWSError: No region is configured.
        SubmitError: The job has problems, which the message lists.
    """
    with _problems_first(job):
        region = new_session().region_name
    request = _check_job(job, region)[1]
    if "TrainingJobDefinition" in request:
        return {**request, "TrainingJobDefinition": without_secrets(request["TrainingJobDefinition"])}
    return without_secrets(request)


def send(
    job: Job, *, wait: bool = True, shows_log: bool = False, ask: Callable[[Job], None] | None = None
) -> Mapping[str, Any]:
    """Check a job, submit it, retry while there is no capacity, and wait until it ends.

    Args:
        job: The content of the job file.
        wait: False returns as soon as the service has accepted the job.
        shows_log: Whether to write the job's log to stdout while waiting.
        ask: Asks after all checks whether to submit the job, which it gets with prices of AWS's list where it has
            none, and raises SubmitError if not; None submits it.

    Returns:
        The last answer of DescribeTrainingJob; with ``tune`` of DescribeHyperParameterTuningJob. Without waiting, only
        the job's name.

    Raises:
        AWSError: Region or credentials are missing, or AWS does not accept the credentials.
        ContainerError: The image cannot be built or pushed.
        SubmitError: The job has problems, or the account does, which the message lists; or the service rejects the job.
    """
    with _problems_first(job):
        session = new_session()
        check_credentials(session)
    region = session.region_name
    clients = Clients(session)
    if job.max_cost is not None:
        job = with_list_prices(clients, job, region)
    plan, _ = _check_job(job, region)
    check_account(clients, job, region).report()
    _LOG.info("0 problems")
    if ask is not None:
        ask(with_list_prices(clients, job, region))
    storage = JobStorage(job, region)
    try:
        if job.build is not None:
            build_image(job.image, job.build, job.dockerfile, for_service=True)
            plan = plan.with_image(push_image(clients.look("ecr"), job.image))
        storage.prepare(clients.s3)
        if job.tune is None:
            watch = partial(_watch, clients, shows_log=shows_log) if wait else None
            return submit_until_capacity(partial(_start, plan, clients, storage), watch, job.retries)
        found = _start_tuning(job.tune, plan, clients, storage)
        _LOG.info("Submitted %s. To follow it: lightning-sm jobs logs -f %s", found.name, found.name)
        return follow(clients, found, shows_log=shows_log) if wait else found.description
    except (ClientError, BotoCoreError, Boto3Error) as error:
        raise SubmitError(f"AWS rejected the request or cannot be reached: {error}") from error
    except OSError as error:  # a file of source_dir was removed after the check
        raise SubmitError(f"The job was not submitted: {error}") from error


def run_locally(job: Job, *, timeout_s: float | None = None) -> int:
    """Run a job in containers of its image on this machine.

    Args:
        job: The content of the job file.
        timeout_s: Seconds after which the job is stopped; None for no limit.

    Returns:
        0 if every host ended with 0, else the exit code of the one that failed first; 124 after the time limit.

    Raises:
        ContainerError: Docker is missing, does not have the image, or cannot build it.
        SubmitError: The job has problems, which the message lists; or its code or a channel cannot be copied.
    """
    findings = check(job, "local")
    findings.warnings += ignored_keys(job)
    hyperparameters = _hyperparameters(job, findings)
    findings.report()
    if job.build is not None:
        build_image(job.image, job.build, job.dockerfile, for_service=False)
    return run_containers(make_request(job, hyperparameters), timeout_s)


@contextlib.contextmanager
def _problems_first(job: Job) -> Iterator[None]:
    """Report the problems of a job instead of a missing region or missing credentials: the checks need neither."""
    try:
        yield
    except AWSError:
        check(job, "cloud").report()
        raise


def _watch(clients: Clients, name: str, *, shows_log: bool) -> Mapping[str, Any]:
    return follow(clients, Found("training", name, {}), shows_log=shows_log)


def _start(plan: TrainingRequest, clients: Clients, storage: JobStorage) -> str:
    """Start a training job under a new name, and return the name."""
    request = _with_code_uploaded(plan, clients, storage)
    create_training_job(clients, request)
    return str(request["TrainingJobName"])


def _start_tuning(tune: Tune, plan: TrainingRequest, clients: Clients, storage: JobStorage) -> Found:
    arguments, _ = tuning_job(tune, plan.job.name, _with_code_uploaded(plan, clients, storage))
    create_tuning_job(clients, arguments)
    full_name = arguments["HyperParameterTuningJobName"]
    return Found("tuning", full_name, {"HyperParameterTuningJobName": full_name})


def _with_code_uploaded(plan: TrainingRequest, clients: Clients, storage: JobStorage) -> dict[str, Any]:
    """Return the request of a training job under a new name, with its code in S3."""
    name = new_job_name(plan.job.name)
    if plan.job.source_dir is not None:
        storage.upload_code(clients.s3, storage.code_address(name))
    return _request(plan, name, storage)


def _request(plan: TrainingRequest, name: str, storage: JobStorage) -> dict[str, Any]:
    if plan.job.source_dir is not None:
        plan = plan.with_code(storage.code_address(name))
    return training_job(plan, name, storage.output)


def _check_job(job: Job, region: str) -> tuple[TrainingRequest, dict[str, Any]]:
    """Check everything that can be checked without the service; return the plan and the request."""
    findings = check(job, "cloud", region)
    hyperparameters = _hyperparameters(job, findings)
    stand_in = with_placeholders(job)
    plan = make_request(stand_in, hyperparameters)
    request = _request(plan, new_job_name(stand_in.name), JobStorage(stand_in, region))
    request = _checked_request(job, request, findings)
    findings.report()
    return make_request(job, hyperparameters), request


def _checked_request(job: Job, request: dict[str, Any], findings: Findings) -> dict[str, Any]:
    """Check the request of a training job, and return the one to send: the same, or that of a tuning job."""
    if job.tune is not None:
        arguments, warnings = tuning_job(job.tune, with_placeholders(job).name, request)
        findings.warnings += warnings
        findings.add(request_problems(arguments, "CreateHyperParameterTuningJob"))
        return arguments
    findings.add(request_problems(request))
    return request


def _hyperparameters(job: Job, findings: Findings) -> dict[str, str]:
    try:
        return encode_hyperparameters(job)
    except JobConfigError as error:
        findings.add([JobProblem("config", str(error))])
    except HyperparameterError as error:
        findings.add([JobProblem("hyperparameters", f"config, hyperparameters: {error}", also=("config",))])
    return {}
