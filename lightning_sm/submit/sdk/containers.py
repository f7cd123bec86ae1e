"""The containers of a local job, according to Docker."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lightning_sm.errors import SubmitError

# Docker answers these commands in milliseconds unless it is broken.
_TIMEOUT_S = 60.0
_LIST = ("ps", "--all", "--no-trunc", "--format", "{{.ID}}\t{{.Mounts}}")
# The SDK names the Compose service after the host.
_SERVICE_LABEL = "com.docker.compose.service"


@dataclass(frozen=True)
class Container:
    """One host of a local job.

    Attributes:
        identity: Docker's id.
        host: Name of the host.
        status: For example exited or running.
        exit_code: 0 while the container runs.
        is_training: Whether it was started with the argument ``train``, as on the service.
    """

    identity: str
    host: str
    status: str
    exit_code: int
    is_training: bool = True


def find_containers(root: Path) -> list[Container]:
    """Find all containers, running or not, that mount something from a folder.

    Raises:
        SubmitError: Docker is missing or does not answer.
    """
    inside = f"{root.resolve()}{os.sep}"
    own: list[str] = []
    for line in _docker(*_LIST).splitlines():
        identity, _, mounts = line.partition("\t")
        if any(mount.startswith(inside) for mount in mounts.split(",")):
            own.append(identity)
    # Inspect only these: containers of other jobs may be removed in the meantime.
    found: list[dict[str, Any]] = json.loads(_docker("inspect", *own)) if own else []
    return [
        Container(
            identity=one["Id"],
            host=one["Config"]["Labels"].get(_SERVICE_LABEL, one["Name"].lstrip("/")),
            status=one["State"]["Status"],
            exit_code=one["State"]["ExitCode"],
            is_training="train" in one["Args"],
        )
        for one in found
    ]


def remove(containers: Sequence[Container]) -> None:
    """Stop and remove containers, which the SDK does not."""
    if containers:
        _docker("rm", "--force", "--volumes", *(container.identity for container in containers))


def entry_point(image: str) -> list[str]:
    """Return the entry point of an image.

    Raises:
        SubmitError: Docker does not have the image.
    """
    command: list[str] | None = json.loads(
        _docker("image", "inspect", "--format", "{{json .Config.Entrypoint}}", image)
    )
    return command or []


def _docker(*arguments: str) -> str:
    program = shutil.which("docker")
    if program is None:
        raise SubmitError("Local mode needs Docker with Compose. Without Docker, use lightning-sm local.")
    try:
        done = subprocess.run([program, *arguments], capture_output=True, text=True, timeout=_TIMEOUT_S, check=True)
    except subprocess.CalledProcessError as error:
        raise SubmitError(f"docker {arguments[0]} failed: {error.stderr.strip()}") from error
    except subprocess.TimeoutExpired as error:
        raise SubmitError(f"docker {arguments[0]} did not answer within {_TIMEOUT_S:g} s.") from error
    return done.stdout
