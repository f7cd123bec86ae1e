"""The actions on a job file: show its request, run it in local containers, or submit it."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import boto3
from boto3.exceptions import Boto3Error
from botocore.exceptions import BotoCoreError, ClientError, HTTPClientError

from lightning_sm._log import command_logger
from lightning_sm.cloud.aws import Clients, check_credentials, new_session, one_line_errors
from lightning_sm.cloud.follow import follow
from lightning_sm.cloud.records import ReportWriter, write_report_of
from lightning_sm.emulator.docker import docker_program
from lightning_sm.errors import AWSError, JobConfigError, OutputDirectoryError, SubmitError
from lightning_sm.job.redaction import shown
from lightning_sm.record.prices import Prices
from lightning_sm.submit.account_checks import check_account
from lightning_sm.submit.image_build import build_image, push_image
from lightning_sm.submit.job_file import Job
from lightning_sm.submit.local import ignored_keys, run_containers
from lightning_sm.submit.preflight import ECR_IMAGE, check
from lightning_sm.submit.price_list import with_list_prices
from lightning_sm.submit.problems import Findings
from lightning_sm.submit.request_limits import request_problems
from lightning_sm.submit.retry import submit_until_capacity
from lightning_sm.submit.storage import code_address, create_output, output_of, upload_code
from lightning_sm.submit.training_job import new_job_name, prepared, training_job
from lightning_sm.submit.tuning import tuning_job

_LOG = command_logger(__name__)


def session_of(job: Job, region: str | None = None) -> boto3.Session:
    """Open an AWS session for a job, in the given or configured region, or else in the region of its image.

    Raises:
        AWSError: There is no region, or the profile does not exist.
        SubmitError: In either case, if the job also has problems, which the message lists.
    """
    image = ECR_IMAGE.fullmatch(job.image)
    try:
        return new_session(image and image["region"], region_name=region)
    except AWSError:
        check(job, "cloud").report()
        raise


def dry_run(job: Job, region: str | None = None) -> dict[str, Any]:
    """Check a job, and the account if there are credentials, and return the request that would be sent.

    Nothing is sent. The request is for CreateTrainingJob, or for CreateHyperParameterTuningJob with ``tune``. It shows
    ``(hidden)`` in place of the job's secret, and of hyperparameters and variables that look like secrets.

    Args:
        job: The content of the job file.
        region: Region of the job. Defaults to the configured region.

    Raises:
        AWSError: There is no region, or the profile does not exist.
        SubmitError: The job or the account has problems, which the message lists.
    """
    session = session_of(job, region)
    region, clients = session.region_name, Clients(session)
    job, request = _checked(clients, job, region)
    try:
        check_credentials(session)
        check_account(clients, job, region).report()
    except AWSError as error:
        _LOG.warning("warning: the account was not checked: %s", error)
    redacted: dict[str, Any] = shown("", request)
    return redacted


def show_dry_run(job: Job, region: str | None = None) -> None:
    """Print the result of ``dry_run`` as JSON; the errors are the same."""
    sys.stdout.write(json.dumps(dry_run(job, region), indent=2) + "\n")
    sys.stdout.flush()
    _LOG.info("0 problems; nothing was sent")


def send(
    job: Job,
    *,
    wait: bool = True,
    shows_log: bool = False,
    ask: Callable[[Job], None] | None = None,
    region: str | None = None,
) -> Mapping[str, Any]:
    """Check a job, submit it, retry while there is no capacity, and wait until the job ends.

    Args:
        job: The content of the job file.
        wait: If False, return as soon as the service has accepted the job.
        shows_log: Whether to write the job's log to stdout while waiting.
        ask: Called with the job after all checks, with missing prices from AWS's list; raises SubmitError if the job
            must not be submitted. If None, submit without asking.
        region: Region of the job. Defaults to the configured region.

    Returns:
        The last response from DescribeTrainingJob, or DescribeHyperParameterTuningJob with ``tune``. If ``wait`` is
        False, only the job's name.

    Raises:
        AWSError: The region or credentials are missing, or AWS does not accept the credentials.
        ContainerError: Docker is missing, or the image cannot be built or pushed.
        SubmitError: The job or the account has problems, which the message lists, or the service rejects the job.
    """
    session = session_of(job, region)
    check_credentials(session)
    region, clients = session.region_name, Clients(session)
    job, _ = _checked(clients, job, region)
    check_account(clients, job, region).report()
    if job.build is not None:
        docker_program()  # report missing Docker before asking the user
    _LOG.info("0 problems")
    if ask is not None:
        ask(job if job.max_cost is not None else with_list_prices(clients, job, region))
    job = prepared(job)
    try:
        if job.build is not None:
            build_image(job.image, job.build, job.dockerfile, for_service=True)
            job = replace(job, image=push_image(clients.look("ecr"), job.image))
        create_output(clients.s3, job, region)
        if job.tune is None:
            watch = partial(follow, clients, "training", shows_log=shows_log) if wait else None
            return submit_until_capacity(partial(_start, clients, job, region), watch, job.retries)
        name = _start(clients, job, region)
        return follow(clients, "tuning", name, shows_log=shows_log) if wait else {"HyperParameterTuningJobName": name}
    except (ClientError, BotoCoreError, Boto3Error) as error:
        raise SubmitError(f"AWS rejected the request or cannot be reached: {error}") from error
    except OSError as error:  # a file in source_dir cannot be read
        raise SubmitError(f"The job was not submitted: {error}") from error


def write_report_here(job: Job, description: Mapping[str, Any], write: ReportWriter) -> None:
    """Try to write the report of a job that has ended to the current folder; errors are only logged.

    Args:
        job: The content of the job file.
        description: The result of ``send``.
        write: Writes a report.
    """
    page = Path(f"{description['TrainingJobName']}.html")
    try:
        with one_line_errors():
            session = session_of(job)
            clients = Clients(session)
            prices = Prices(with_list_prices(clients, job, session.region_name).prices)
            write_report_of(clients.s3, description, write, page, prices)
    except (AWSError, JobConfigError, OutputDirectoryError) as error:
        _LOG.info("No report was written here: %s", error)


def run_locally(job: Job) -> int:
    """Run a job in containers of its image on this machine.

    Args:
        job: The content of the job file.

    Returns:
        0 if every host exited with 0, else the exit code of the host that failed first.

    Raises:
        ContainerError: Docker is missing, does not have the image, or cannot build it.
        OSError: A folder of the run cannot be written, or a file in ``source_dir`` cannot be copied.
        SubmitError: The job has problems, which the message lists.
    """
    findings = check(job, "local")
    findings.warnings += ignored_keys(job)
    findings.report()
    if job.build is not None:
        build_image(job.image, job.build, job.dockerfile, for_service=False)
    return run_containers(prepared(job))


def create_job(clients: Clients, request: Mapping[str, Any]) -> str:
    """Create a training job or a tuning job, and return its name.

    The request is sent only once. If there is no answer, the job may exist and be billed.

    Args:
        clients: Clients for the AWS APIs.
        request: Arguments of CreateTrainingJob or CreateHyperParameterTuningJob.

    Raises:
        ClientError: The service rejects the request.
        HTTPClientError: There was no answer; the job may exist.
    """
    if "TrainingJobName" in request:
        name, create = request["TrainingJobName"], clients.creator.create_training_job
    else:
        name, create = request["HyperParameterTuningJobName"], clients.creator.create_hyper_parameter_tuning_job
    try:
        create(**request)
    except (HTTPClientError, KeyboardInterrupt):
        _LOG.warning(
            "There was no answer to the request: job %(name)s may be running and billed.\n"
            "  Look for it: lightning-sm jobs logs %(name)s\n"
            "  Stop it:     lightning-sm jobs stop %(name)s",
            {"name": name},
        )
        raise
    _LOG.info("Submitted %s. To follow it: lightning-sm jobs logs -f %s", name, name)
    return str(name)


def _start(clients: Clients, job: Job, region: str) -> str:
    """Upload a job's code, start the job under a new name, and return the name."""
    request = _request(job, region)
    if job.source_dir is not None:
        upload_code(clients.s3, job, code_address(output_of(job, region), request["TrainingJobName"]))
    return create_job(clients, request if job.tune is None else tuning_job(job.tune, job.name, request)[0])


def _request(job: Job, region: str) -> dict[str, Any]:
    """Return the arguments of CreateTrainingJob under a new name."""
    name, output = new_job_name(job.name), output_of(job, region)
    return training_job(job, name, output, None if job.source_dir is None else code_address(output, name))


def _checked(clients: Clients, job: Job, region: str) -> tuple[Job, dict[str, Any]]:
    """Check a job, but not the account; return the job, with the prices used, and its request."""
    if job.max_cost is not None:
        job = with_list_prices(clients, job, region)
    check(job, "cloud", region).report()
    request = _request(prepared(job), region)
    operation, warnings = "CreateTrainingJob", list[str]()
    if job.tune is not None:
        request, warnings = tuning_job(job.tune, job.name, request)
        operation = "CreateHyperParameterTuningJob"
    Findings(request_problems(request, operation), warnings, job.positions).report()
    return job, request
