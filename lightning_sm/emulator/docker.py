"""The containers and the network of an emulated job, controlled through Docker's command line."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from collections.abc import Mapping, Sequence

from lightning_sm._linux import CONTAINERS_SHARE_KERNEL
from lightning_sm.errors import ContainerError

# Docker answers these commands in less than a second, but may take several seconds to create a container on a
# busy machine.
_TIMEOUT_S = 120.0
_JOB_LABEL = "lightning-sm.job"
# The states in which a container accepts commands.
ALIVE = ("running", "paused")
_DOCKER_DESKTOP = "docker-desktop"  # the name of its virtual machine


def docker_program() -> str:
    """Return the path of Docker's client.

    Raises:
        ContainerError: Docker is not installed.
    """
    program = shutil.which("docker")
    if program is None:
        raise ContainerError(
            "This needs Docker, but the docker command is not on PATH. lightning-sm local needs it only for --image."
        )
    return program


def docker(*arguments: str, env: Mapping[str, str] | None = None, text: str = "") -> str:
    """Run a command with Docker's client, and return its output.

    Args:
        arguments: The command and its arguments.
        env: Environment variables for the client. Defaults to this process's environment.
        text: Input that the client reads from stdin.

    Raises:
        ContainerError: Docker is missing, refuses the command, or does not answer.
    """
    try:
        done = subprocess.run(
            [docker_program(), *arguments],
            env=env,
            input=text,
            capture_output=True,
            text=True,
            timeout=_TIMEOUT_S,
            check=True,
            start_new_session=True,  # protect it from Ctrl-C
        )
    except subprocess.CalledProcessError as error:
        raise ContainerError(f"docker {' '.join(arguments[:2])} failed: {error.stderr.strip()}") from error
    except subprocess.TimeoutExpired as error:
        raise ContainerError(f"docker {' '.join(arguments[:2])} did not answer within {_TIMEOUT_S:g} s.") from error
    return done.stdout


def tell(container: str, *command: str, then: Sequence[str] = ()) -> bool:
    """Run a command on a container; return False if the container has exited, has not started, or no longer exists.

    Args:
        container: Name of the container.
        command: The Docker command and its options, which precede the name.
        then: Arguments that follow the name.

    Raises:
        ContainerError: Docker is missing, refuses the command for another reason, or does not answer.
    """
    try:
        docker(*command, container, *then)
    except ContainerError:
        if state_of(container) in ALIVE:
            docker(*command, container, *then)  # retry: the container has just started
            return True
        return False
    return True


def state_of(container: str) -> str:
    """Return the state of a container, such as created, running, paused or exited; empty if there is no such container.

    Raises:
        ContainerError: Docker does not answer.
    """
    return docker("ps", "--all", "--filter", f"name=^/?{container}$", "--format", "{{.State}}").strip()


def entry_point(image: str) -> list[str]:
    """Return the entry point of an image.

    Raises:
        ContainerError: Docker does not have the image, or does not answer.
    """
    try:
        text = docker("image", "inspect", "--format", "{{json .Config.Entrypoint}}", image)
    except ContainerError as error:
        docker("version")  # raises if no engine answers
        raise ContainerError(
            f"Docker has no image {image!r} on this machine. Build it (docker build -t {image} ...), or fetch it "
            f"(docker pull {image}). {error}"
        ) from error
    command: list[str] | None = json.loads(text)
    return command or []


def label(job: str) -> list[str]:
    """Return the option that marks a container or a network as part of a job."""
    return ["--label", f"{_JOB_LABEL}={job}"]


def bind(source: os.PathLike[str], target: str, *, read_only: bool = False) -> list[str]:
    """Return the option that mounts a folder of this machine in a container.

    Args:
        source: The folder.
        target: Its path in the container.
        read_only: Whether to mount it read-only.
    """
    fields = ["type=bind", f"source={os.fspath(source)}", f"target={target}", *(["readonly"] if read_only else [])]
    # Docker parses the option as a line of CSV: quote the fields, since a path may contain commas.
    return ["--mount", ",".join('"' + field.replace('"', '""') + '"' for field in fields)]


def maps_root() -> bool:
    """Return whether files that root creates in a container belong to this user.

    They do if the engine is rootless, or runs in a virtual machine that shares folders with this system.
    """
    if not CONTAINERS_SHARE_KERNEL:
        return True
    about = json.loads(docker("info", "--format", "{{json .}}"))
    options = about.get("SecurityOptions") or []
    return about.get("Name") == _DOCKER_DESKTOP or any("rootless" in option for option in options)


def remove_containers(job: str) -> None:
    """Kill and remove all containers of a job.

    Raises:
        ContainerError: Docker does not answer, or a container cannot be removed.
    """
    containers = docker("ps", "--all", "--quiet", "--no-trunc", "--filter", f"label={_JOB_LABEL}={job}").split()
    if containers:
        docker("rm", "--force", "--volumes", *containers)


def remove_job(job: str) -> None:
    """Remove all containers and the network of a job, if they exist.

    Raises:
        ContainerError: Docker does not answer, or something cannot be removed.
    """
    remove_containers(job)
    networks = docker("network", "ls", "--quiet", "--filter", f"label={_JOB_LABEL}={job}").split()
    if networks:
        docker("network", "rm", *networks)
