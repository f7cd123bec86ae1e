"""Read-only checks of the account before a job is submitted: credentials, role, image, buckets and quotas.

A check reports a problem only if the job is certain to fail. Missing permissions and unknown facts only cause warnings.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator, Mapping
from typing import Any

from botocore.exceptions import BotoCoreError, ClientError, SSOError, TokenRetrievalError

from lightning_sm.cloud.aws import Clients, error_code
from lightning_sm.errors import AWSError
from lightning_sm.submit.job_file import Job
from lightning_sm.submit.preflight import ECR_IMAGE
from lightning_sm.submit.problems import Findings, JobProblem

_DENIED = frozenset({"AccessDenied", "AccessDeniedException", "403"})
# Quota names for the service "sagemaker". Quotas are looked up by name, because their codes differ by instance type.
_QUOTA = "{} for training job usage"
_SPOT_QUOTA = "{} for spot training job usage"


def check_account(clients: Clients, job: Job, region: str) -> Findings:
    """Check that the account has what a job needs, without changing anything.

    Args:
        clients: Clients for the AWS APIs.
        job: The job, which has passed the job-file checks.
        region: Region of the job.

    Raises:
        AWSError: AWS does not accept the credentials.
    """
    # For each check: the subject, the required permission, and the findings (problems, and warnings as text).
    checks = [
        ("the validity of the credentials", "sts:GetCallerIdentity", _credentials(clients)),
        ("role", "iam:GetRole", _role(clients, job)),
        ("image", "ecr:DescribeImages", _image(clients, job)),
        *(
            (f"{key}: the bucket {bucket}", "s3:ListBucket", _bucket(clients, key, bucket, region))
            for key, bucket in _buckets(job).items()
        ),
        ("the quota for the hosts", "servicequotas:ListServiceQuotas", _quotas(clients, job, region)),
    ]
    findings = [finding for check in checks for finding in _found(*check)]
    problems = [finding for finding in findings if isinstance(finding, JobProblem)]
    return Findings(problems, [finding for finding in findings if isinstance(finding, str)], job.positions)


def _found(subject: str, permission: str, findings: Iterator[JobProblem | str]) -> Iterator[JobProblem | str]:
    try:
        yield from findings
    except (ClientError, BotoCoreError) as error:
        is_denied = isinstance(error, ClientError) and error_code(error) in _DENIED
        why = f"you are not allowed to call {permission}." if is_denied else str(error)
        yield f"{subject} was not checked: {why}"


def _credentials(clients: Clients) -> Iterator[JobProblem | str]:
    try:
        clients.look("sts").get_caller_identity()
    except (ClientError, SSOError, TokenRetrievalError) as error:  # this call needs no permission
        raise AWSError(f"AWS does not accept your credentials; renew them (aws sso login): {error}") from error
    yield from ()


def _role(clients: Clients, job: Job) -> Iterator[JobProblem | str]:
    name = str(job.role).rpartition("/")[2]
    try:
        role = clients.look("iam").get_role(RoleName=name)["Role"]
    except ClientError as error:
        if error_code(error) not in {"NoSuchEntity", "NoSuchEntityException"}:
            raise
        yield JobProblem("role", f"role is {job.role!r}, but the account has no role {name}.")
        return
    if role["Arn"] != job.role:
        yield JobProblem("role", f"role is {job.role!r}, but the ARN of the account's role {name} is {role['Arn']}.")
    # Policies take many forms, but none can let the service assume the role without naming it.
    elif "sagemaker.amazonaws.com" not in json.dumps(role.get("AssumeRolePolicyDocument", {})):
        yield JobProblem(
            "role",
            f"role is {job.role!r}, whose trust policy does not let sagemaker.amazonaws.com assume it. Add a statement "
            'with that service as Principal and the Action "sts:AssumeRole".',
        )


def _image(clients: Clients, job: Job) -> Iterator[JobProblem | str]:
    image = ECR_IMAGE.fullmatch(job.image)
    if image is None or job.build is not None:  # the image will be built and pushed before submission
        return
    name, at, digest = job.image.partition("/")[2].partition("@")
    repository, _, tag = name.partition(":")
    wanted = {"imageDigest": digest} if at else {"imageTag": tag or "latest"}
    try:
        clients.look("ecr").describe_images(registryId=image["account"], repositoryName=repository, imageIds=[wanted])
    except ClientError as error:
        if error_code(error) not in {"RepositoryNotFoundException", "ImageNotFoundException"}:
            raise
        yield JobProblem(
            "image", f"image is {job.image}, which is not in ECR ({error_code(error)}). Push it, or set build: ."
        )


def _buckets(job: Job) -> Mapping[str, str]:
    """Return a job's buckets, each by the key that names it."""
    uris = {f"channels.{name}": channel.uri for name, channel in job.channels.items()}
    uris |= {"output": job.output or "", "checkpoints": job.checkpoints or ""}
    return {key: uri.split("/")[2] for key, uri in uris.items() if uri}


def _bucket(clients: Clients, key: str, bucket: str, region: str) -> Iterator[JobProblem | str]:
    try:
        answer: Mapping[str, Any] = clients.look("s3").head_bucket(Bucket=bucket)
    except ClientError as error:
        if error_code(error) != "404":
            raise
        yield JobProblem(key, f"{key}: there is no bucket {bucket}. Create it, or name another.")
        return
    place = answer["ResponseMetadata"]["HTTPHeaders"].get("x-amz-bucket-region", region)
    if place == region:
        return
    text = f"{key}: the bucket {bucket} is in {place}, but the job is in {region}"
    if key.startswith("channels."):
        # API, S3DataSource: "Your input bucket must be located in same region as your training job."
        yield JobProblem(key, f"{text}. Copy the data, or set AWS_DEFAULT_REGION={place}.")
    else:
        yield f"{text}; the service may refuse that."


def _quotas(clients: Clients, job: Job, region: str) -> Iterator[JobProblem | str]:
    if job.requested("ResourceConfig.TrainingPlanArn") or job.requested("ResourceConfig.InstancePreferences"):
        return  # hosts are reserved, or the service chooses them
    name = _QUOTA if job.spot is None else _SPOT_QUOTA
    wanted: Counter[str] = Counter()
    for group in job.groups.values():
        wanted[name.format(group.instance_type)] += group.count
    pages = clients.look("service-quotas").get_paginator("list_service_quotas").paginate(ServiceCode="sagemaker")
    quotas = {quota["QuotaName"]: quota["Value"] for page in pages for quota in page["Quotas"]}
    for title, count in wanted.items():
        quota = quotas.get(title)
        if quota is None:
            yield f'the account has no value for the quota "{title}" in {region}: its default applies.'
        elif quota < count:
            yield JobProblem(
                "groups",
                f'groups: the job needs {count}, but the account\'s quota "{title}" in {region} is {quota:g}. '
                "Request an increase in Service Quotas, or lower count.",
            )
