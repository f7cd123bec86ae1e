"""Building a job's image with Docker, and pushing it to Amazon ECR."""

from __future__ import annotations

import base64
import json
import os
import subprocess
import sys
from typing import Any

from botocore.exceptions import ClientError

from lightning_sm._log import command_logger
from lightning_sm.cloud.aws import error_code
from lightning_sm.emulator.docker import docker, docker_program
from lightning_sm.errors import ContainerError

_LOG = command_logger(__name__)

# The platform of SageMaker's training instances, regardless of this machine's platform.
_PLATFORM = "linux/amd64"
# Long enough to build and push CUDA images of several gigabytes.
_TIMEOUT_S = 4 * 3600.0


def build_image(image: str, folder: str, dockerfile: str | None, *, for_service: bool) -> None:
    """Build an image; Docker's output goes to stderr.

    Args:
        image: Name of the image.
        folder: Docker's build context.
        dockerfile: The Dockerfile; None for the one in the folder.
        for_service: Whether the image is to run on the service rather than on this machine.

    Raises:
        ContainerError: Docker is missing, or the build fails.
    """
    platform = ["--platform", _PLATFORM] if for_service else []
    _LOG.info("Building %s from %s", image, folder)
    file = [] if dockerfile is None else ["--file", dockerfile]
    _run_docker("build", *platform, *file, "--tag", image, folder)


def push_image(ecr: Any, image: str) -> str:
    """Push an image unless its repository already has it; create the repository if it does not exist.

    Args:
        ecr: boto3's ECR client.
        image: Name of a local image, with registry, repository and tag.

    Returns:
        The image's name with its digest, so that later pushes do not affect the job.

    Raises:
        ClientError: AWS rejects a request.
        ContainerError: Docker cannot push the image.
    """
    repository = image.partition(":")[0]  # ECR registries have no port
    registry, _, name = repository.partition("/")
    account = registry.partition(".")[0]
    try:
        ecr.describe_repositories(registryId=account, repositoryNames=[name])
    except ClientError as error:
        if error_code(error) != "RepositoryNotFoundException":
            raise
        ecr.create_repository(registryId=account, repositoryName=name)
        _LOG.info("Created the repository %s", name)
    digest = _pushed(ecr, account, repository, image)
    if digest is None:
        token = ecr.get_authorization_token()["authorizationData"][0]["authorizationToken"]
        user, _, password = base64.b64decode(token).decode().partition(":")
        docker("login", "--username", user, "--password-stdin", registry, text=password)
        _LOG.info("Pushing %s", image)
        _run_docker("push", image)
        digest = _pushed(ecr, account, repository, image)
    if digest is None:
        raise ContainerError(f"Docker has pushed {image}, but {repository} has no image with its digest.")
    return f"{repository}@{digest}"


def _pushed(ecr: Any, account: str, repository: str, image: str) -> str | None:
    """Return a digest that Docker lists for an image and that the repository still has, or None."""
    name = repository.partition("/")[2]
    known_names: list[str] = json.loads(docker("image", "inspect", "--format", "{{json .RepoDigests}}", image)) or []
    for known_name in known_names:
        known, _, digest = known_name.partition("@")
        if known != repository:
            continue
        try:
            ecr.describe_images(registryId=account, repositoryName=name, imageIds=[{"imageDigest": digest}])
        except ClientError as error:
            if error_code(error) != "ImageNotFoundException":
                raise
        else:
            return digest
    return None


def _run_docker(*arguments: str) -> None:
    """Run a slow Docker command, and show its output."""
    # SageMaker needs a plain image. By default, BuildKit creates an index of the image and its attestations.
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
        raise ContainerError(f"docker {arguments[0]} did not finish within {_TIMEOUT_S / 3600:g} h.") from error
    if done.returncode:
        raise ContainerError(f"docker {arguments[0]} failed with exit code {done.returncode}; its output says why.")
