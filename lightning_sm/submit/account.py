"""Read-only checks of the account before a job is submitted: credentials, role, image, buckets and quotas.

What is certain to make the job fail is a problem. What may not be looked at, or cannot be known, is a warning.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping
from fnmatch import fnmatchcase
from typing import Any, NamedTuple

from botocore.exceptions import BotoCoreError, ClientError, HTTPClientError
from botocore.exceptions import ConnectionError as ConnectionFailure

from lightning_sm.cloud.aws import Clients, error_code
from lightning_sm.errors import AWSError
from lightning_sm.submit.job_file import Job
from lightning_sm.submit.preflight import ECR_IMAGE
from lightning_sm.submit.problems import Findings, JobProblem

_DENIED = frozenset({"AccessDenied", "AccessDeniedException", "403"})
# Service Quotas, the quotas of the service "sagemaker", whose codes differ by instance type.
_QUOTA = "{} for training job usage"
_SPOT_QUOTA = "{} for spot training job usage"


class _Check(NamedTuple):
    """A check of the account.

    Attributes:
        what: What it looks at.
        permission: What it needs to look.
        find: Yields problems, and warnings as text.
    """

    what: str
    permission: str
    find: Callable[[Clients, Job, str], Iterator[JobProblem | str]]


def check_account(clients: Clients, job: Job, region: str) -> Findings:
    """Look at what a job needs of the account; nothing is changed.

    Args:
        clients: Clients of the AWS APIs.
        job: The job, which has no problems of its own.
        region: Its region.

    Raises:
        AWSError: AWS does not accept the credentials.
    """
    findings = Findings(source=job.source)
    for check in _CHECKS:
        if check.find is _role and findings.problems:  # the role is of another account
            continue
        found = list(_found(check, clients, job, region))
        findings.add(one for one in found if isinstance(one, JobProblem))
        findings.warnings += [one for one in found if isinstance(one, str)]
    return findings


def _found(check: _Check, clients: Clients, job: Job, region: str) -> Iterator[JobProblem | str]:
    try:
        yield from check.find(clients, job, region)
    except ClientError as error:
        why = f"you may not call {check.permission}" if error_code(error) in _DENIED else str(error)
        yield f"{check.what} was not checked: {why}."
    except BotoCoreError as error:
        yield f"{check.what} was not checked: {error}"


def _credentials(clients: Clients, job: Job, region: str) -> Iterator[JobProblem | str]:
    del region
    try:
        caller = clients.look("sts").get_caller_identity()
    except (
        ConnectionFailure,
        HTTPClientError,
    ):  # no way to the service from here, which says nothing about the credentials
        raise
    except (ClientError, BotoCoreError) as error:  # no permission is needed for this call
        raise AWSError(f"AWS does not accept your credentials: {error}") from error
    account = (job.role or "").split(":")[4]
    if account != caller["Account"]:
        yield JobProblem(
            "role",
            f"role is of account {account}, but your credentials are of account {caller['Account']}, and a role can "
            "only be passed to the service within its account. Name a role of yours, or set AWS_PROFILE.",
        )


def _role(clients: Clients, job: Job, region: str) -> Iterator[JobProblem | str]:
    del region
    name = (job.role or "").rpartition("/")[2]
    try:
        role = clients.look("iam").get_role(RoleName=name)["Role"]
    except ClientError as error:
        if error_code(error) not in {"NoSuchEntity", "NoSuchEntityException"}:
            raise
        yield JobProblem("role", f"role is {job.role!r}, but the account has no role {name}.")
        return
    if role["Arn"] != job.role:
        yield JobProblem("role", f"role is {job.role!r}, but the ARN of the account's role {name} is {role['Arn']}.")
    if not _lets_sagemaker_in(role.get("AssumeRolePolicyDocument", {})):
        yield JobProblem(
            "role",
            f"role is {job.role!r}, whose trust policy does not let sagemaker.amazonaws.com assume it. Add a statement "
            'with that service as Principal and the Action "sts:AssumeRole".',
        )


def _image(clients: Clients, job: Job, region: str) -> Iterator[JobProblem | str]:
    del region
    image = ECR_IMAGE.fullmatch(job.image)
    if image is None or job.build is not None:  # it is built and pushed before the job is sent
        return
    path = job.image.partition("/")[2]
    repository, at, digest = path.partition("@")
    tag = "" if at else repository.partition(":")[2] or "latest"
    repository = repository.partition(":")[0]
    wanted = {"imageDigest": digest} if at else {"imageTag": tag}
    try:
        clients.look("ecr").describe_images(registryId=image["account"], repositoryName=repository, imageIds=[wanted])
    except ClientError as error:
        if error_code(error) == "RepositoryNotFoundException":
            yield JobProblem(
                "image",
                f"image is {job.image}, but there is no repository {repository} in {image['region']}: aws ecr "
                f"create-repository --repository-name {repository}",
            )
        elif error_code(error) == "ImageNotFoundException":
            yield JobProblem(
                "image", f"image is {job.image}, but the repository {repository} has no image {tag or digest}. Push it."
            )
        else:
            raise


def _buckets(clients: Clients, job: Job, region: str) -> Iterator[JobProblem | str]:
    keys: defaultdict[str, list[str]] = defaultdict(list)
    uris = {name: getattr(job, name) for name in ("output", "checkpoints")}
    uris |= {f"channels.{name}": channel.uri for name, channel in job.channels.items()}
    for key, uri in uris.items():
        if uri is not None and uri.startswith("s3://"):
            keys[uri.split("/")[2]].append(key)
    for bucket, users in keys.items():
        yield from _bucket(clients, bucket, users, region)


def _bucket(clients: Clients, bucket: str, keys: list[str], region: str) -> Iterator[JobProblem | str]:
    first, *others = keys
    try:
        answer: Mapping[str, Any] = clients.look("s3").head_bucket(Bucket=bucket)
    except ClientError as error:
        answer = error.response
        if error_code(error) == "404":
            yield JobProblem(
                first,
                f"{', '.join(keys)}: there is no bucket {bucket}. Create it, or name another.",
                also=tuple(others),
            )
            return
        if error_code(error) not in _DENIED:
            raise
        yield f"{', '.join(keys)}: the bucket {bucket} was not checked: you may not call s3:ListBucket on it."
    place = answer.get("ResponseMetadata", {}).get("HTTPHeaders", {}).get("x-amz-bucket-region", region)
    if place == region:
        return
    channels = [key for key in keys if key.startswith("channels.")]
    text = f"the bucket {bucket} is in {place}, and the job in {region}"
    if channels:  # API, S3DataSource: "Your input bucket must be located in same region as your training job."
        yield JobProblem(
            channels[0],
            f"{', '.join(channels)}: {text}; the service takes input of its own region only. Copy the data, or set "
            f"AWS_DEFAULT_REGION={place}.",
            also=tuple(channels[1:]),
        )
    if len(channels) < len(keys):
        yield f"{', '.join(key for key in keys if key not in channels)}: {text}; the service may refuse that."


def _quotas(clients: Clients, job: Job, region: str) -> Iterator[JobProblem | str]:
    if job.requested("ResourceConfig.TrainingPlanArn") or job.requested("ResourceConfig.InstancePreferences"):
        return  # hosts are reserved, or the service chooses them
    wanted: Counter[str] = Counter()
    for group in job.groups.values():
        wanted[group.instance_type] += group.count
    name = _SPOT_QUOTA if job.spot is not None else _QUOTA
    quotas = _values(clients, {name.format(one) for one in wanted})
    for instance_type, count in wanted.items():
        title = name.format(instance_type)
        quota = quotas.get(title)
        if quota is None:
            yield f'the account has no value for the quota "{title}" in {region}: its default applies.'
        elif quota < count:
            yield JobProblem(
                "groups",
                f"groups: the job needs {count} x {instance_type}, but the account's quota "
                f'"{title}" in {region} is {quota:g}. Ask for more in Service Quotas, or lower count.',
            )


def _values(clients: Clients, names: set[str]) -> dict[str, float]:
    """Return the account's values of quotas, reading as few of the service's many hundred as possible."""
    found: dict[str, float] = {}
    pages = (
        clients.look("service-quotas")
        .get_paginator("list_service_quotas")
        .paginate(ServiceCode="sagemaker", PaginationConfig={"PageSize": 100})
    )
    for page in pages:
        found |= {quota["QuotaName"]: quota["Value"] for quota in page["Quotas"] if quota["QuotaName"] in names}
        if found.keys() == names:
            break
    return found


def _lets_sagemaker_in(policy: Mapping[str, Any]) -> bool:
    """Return whether a trust policy lets the service assume the role, conditions aside."""
    for statement in _as_list(policy.get("Statement", [])):
        principal = statement.get("Principal", {})
        services = ["sagemaker."] if principal == "*" else _as_list(principal.get("Service", []))
        actions = [action.lower() for action in _as_list(statement.get("Action", []))]
        if (
            statement.get("Effect") == "Allow"
            and any(service.startswith("sagemaker.") for service in services)
            and any(fnmatchcase("sts:assumerole", action) for action in actions)
        ):
            return True
    return False


def _as_list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else [value]


_CHECKS = (
    _Check("whether AWS accepts the credentials", "sts:GetCallerIdentity", _credentials),
    _Check("role", "iam:GetRole", _role),
    _Check("image", "ecr:DescribeImages", _image),
    _Check("whether the buckets exist", "s3:ListBucket", _buckets),
    _Check("the quota of the hosts", "servicequotas:ListServiceQuotas", _quotas),
)
