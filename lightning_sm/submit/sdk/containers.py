"""The containers of a local job, as Docker tells of them."""

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

# Docker answers such questions in milliseconds, unless it is broken.
_TIMEOUT_S = 60.0
_LIST = ("ps", "--all", "--no-trunc", "--format", "{{.ID}}\t{{.Mounts}}")
# What Compose calls a host, and with it the SDK.
_SERVICE_LABEL = "com.docker.compose.service"


@dataclass(frozen=True)
class Container:
    """How one host of a local job ended.

    Attributes:
        identity: Docker's id.
        host: Name of the host.
        status: For example exited or running.
        exit_code: 0 while it runs.
        is_training: Whether it was started as the service does, with ``train``.
    """

    identity: str
    host: str
    status: str
    exit_code: int
    is_training: bool = True


def find_containers(root: Path) -> list[Container]:
    """All containers, running or not, that mount something from a folder.

    Args:
        root: The folder.

    Raises:
        SubmitError: Docker does not answer.
    """
    inside = f"{root.resolve()}{os.sep}"
    # Only then more about those of this job: others may be removed meanwhile.
    listed = (line.partition("\t") for line in _docker(*_LIST).splitlines())
    own = [identity for identity, _, mounts in listed if any(mount.startswith(inside) for mount in mounts.split(","))]
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
    """End and remove containers; the SDK leaves them.

    Args:
        containers: Which.
    """
    if containers:
        _docker("rm", "--force", "--volumes", *(container.identity for container in containers))


def entry_point(image: str) -> list[str]:
    """The command that an image starts with.

    Args:
        image: Its name.

    Raises:
        SubmitError: Docker does not know the image.
    """
    stated: list[str] | None = json.loads(_docker("image", "inspect", "--format", "{{json .Config.Entrypoint}}", image))
    return stated or []


def _docker(*arguments: str) -> str:
    program = shutil.which("docker")
    if program is None:
        raise SubmitError("Local mode needs Docker with Compose. Without: lightning-sm local emulates a cluster.")
    try:
        done = subprocess.run([program, *arguments], capture_output=True, text=True, timeout=_TIMEOUT_S, check=True)
    except subprocess.CalledProcessError as error:
        raise SubmitError(f"docker {arguments[0]} failed: {error.stderr.strip()}") from error
    except subprocess.TimeoutExpired as error:
        raise SubmitError(f"docker {arguments[0]} gave no answer within {_TIMEOUT_S:g} s.") from error
    return done.stdout
