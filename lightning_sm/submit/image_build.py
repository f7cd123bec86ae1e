"""The image of a job file's ``build``: built by Docker, pushed to Amazon ECR if it is new there, named by digest."""

from __future__ import annotations

import base64
import json
import os
import subprocess
import sys
from collections.abc import Sequence
from typing import Any

from botocore.exceptions import ClientError

from lightning_sm._log import command_logger
from lightning_sm.cloud.aws import error_code
from lightning_sm.emulator.docker import docker, docker_program
from lightning_sm.errors import ContainerError

_LOG = command_logger(__name__)

# What SageMaker's training instances run, also if this machine is another one.
_PLATFORM = "linux/amd64"
# Images with CUDA have several gigabytes.
_TIMEOUT_S = 4 * 3600.0


def build_image(image: str, folder: str, dockerfile: str | None, *, for_service: bool) -> None:
    """Build an image; Docker's output goes to stderr.

    Args:
        image: Name of the image.
        folder: The folder that Docker reads.
        dockerfile: The Dockerfile; None for that of the folder.
        for_service: Whether it is to run on the service, rather than on this machine.

    Raises:
        ContainerError: Docker is missing, or the build fails.
    """
    platform = ["--platform", _PLATFORM] if for_service else []
    _LOG.info("Building %s from %s", image, folder)
    file = [] if dockerfile is None else ["--file", dockerfile]
    _run_docker("build", *platform, *file, "--tag", image, folder)


def push_image(ecr: Any, image: str) -> str:
    """Push an image, unless its repository has it already; the repository is created if it does not exist.

    Args:
        ecr: boto3's client of ECR.
        image: Name of an image that Docker has on this machine: registry, repository and tag.

    Returns:
        The name of the image by its digest, which no later push changes.

    Raises:
        ClientError: AWS rejects a request.
        ContainerError: Docker cannot push the image.
    """
    repository = _repository(image)
    pushed = _pushed(ecr, repository, _digests(image, repository))
    if pushed is None:
        registry = repository.partition("/")[0]
        token = ecr.get_authorization_token()["authorizationData"][0]["authorizationToken"]
        user, _, password = base64.b64decode(token).decode().partition(":")
        docker("login", "--username", user, "--password-stdin", registry, text=password)
        _LOG.info("Pushing %s", image)
        _run_docker("push", image)
        pushed = _pushed(ecr, repository, _digests(image, repository))
    if pushed is None:
        raise ContainerError(f"Docker has pushed {image}, but {repository} has no image of its digest.")
    return f"{repository}@{pushed}"


def _repository(image: str) -> str:
    """Return an image's name without its tag; the registry of ECR has no port."""
    return image.partition(":")[0]


def _digests(image: str, repository: str) -> list[str]:
    """Return the digests under which Docker knows an image in a repository, from earlier pushes and pulls."""
    names: list[str] = json.loads(docker("image", "inspect", "--format", "{{json .RepoDigests}}", image)) or []
    return [name.partition("@")[2] for name in names if name.startswith(f"{repository}@")]


def _pushed(ecr: Any, repository: str, digests: Sequence[str]) -> str | None:
    """Return the digest that a repository has, if it has one of them; create the repository if it does not exist."""
    registry, _, name = repository.partition("/")
    account = registry.partition(".")[0]
    try:
        ecr.describe_repositories(registryId=account, repositoryNames=[name])
    except ClientError as error:
        if error_code(error) != "RepositoryNotFoundException":
            raise
        _create_repository(ecr, name)
        return None
    return next((digest for digest in digests if _has(ecr, account, name, digest)), None)


def _has(ecr: Any, account: str, name: str, digest: str) -> bool:
    try:
        ecr.describe_images(registryId=account, repositoryName=name, imageIds=[{"imageDigest": digest}])
    except ClientError as error:
        if error_code(error) != "ImageNotFoundException":
            raise
        return False
    return True


def _create_repository(ecr: Any, name: str) -> None:
    try:
        ecr.create_repository(repositoryName=name)
    except ClientError as error:
        if error_code(error) != "RepositoryAlreadyExistsException":  # somebody else has just created it
            raise
    _LOG.info("Created the repository %s", name)


def _run_docker(*arguments: str) -> None:
    """Run a command of Docker's client that takes its time, and show its output."""
    # SageMaker runs images, not the index of an image and its attestations that BuildKit would make.
    env = {**os.environ, "BUILDX_NO_DEFAULT_ATTESTATIONS": "1"}
    try:
        done = subprocess.run(
            [docker_program(), *arguments],
            env=env,
            stdin=subprocess.DEVNULL,
            stdout=sys.stderr.fileno(),
            timeout=_TIMEOUT_S,
            check=False,
        )
    except subprocess.TimeoutExpired as error:
        raise ContainerError(f"docker {arguments[0]} did not end within {_TIMEOUT_S / 3600:g} h.") from error
    if done.returncode:
        raise ContainerError(f"docker {arguments[0]} failed with exit code {done.returncode}; its output says why.")
