"""Emulated hosts that run as containers of an image, as on the service, in one network and with separate files."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import tempfile
import threading
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import psutil

from lightning_sm.emulator.docker import (
    ALIVE,
    bind,
    docker,
    docker_program,
    entry_point,
    label,
    maps_root,
    remove_containers,
    remove_job,
    state_of,
    tell,
)
from lightning_sm.emulator.guard import guarded
from lightning_sm.emulator.hosts import EmulatedHost, HostRuntime
from lightning_sm.emulator.output import Output
from lightning_sm.emulator.script import check_script
from lightning_sm.emulator.spec import CHECKPOINTS, CONTROL, ClusterSpec, LocalHost
from lightning_sm.errors import ContainerError, ScriptError
from lightning_sm.job.variables import HOST_FOLDER

_ML = "/opt/ml"
# The subfolders to mount in a container. Mounting /opt/ml as a whole would hide the image's code.
_FOLDERS = ("input", "model", "output", CONTROL, CHECKPOINTS)
# Where containers see the code folder that is passed to the runtime.
CODE_DIR = f"{_ML}/code"
_LAUNCHER = "lightning-sm"
# A user unknown to the image has neither a home folder nor a name, but PyTorch and Matplotlib look up both.
_USER_VARIABLES = {"HOME": "/tmp", "USER": "user", "LOGNAME": "user"}  # noqa: S108 - in the container
# Time limit for Docker's client to exit after its container.
_KILL_S = 30.0


class ContainerHost(EmulatedHost):
    """A host that is a container; see ``EmulatedHost``.

    Args:
        container: Name of an existing container.
        host: The host to start.
        output: Receives the host's output.
        changed: Event to set when the container has exited.
    """

    def __init__(self, container: str, host: LocalHost, output: Output, changed: threading.Event) -> None:
        self._container = container
        self._is_frozen = self._is_told = self._is_killed = False
        client = [docker_program(), "start", "--attach", container]
        super().__init__(host, client, _client_environment(host), output, changed)

    @property
    def was_killed(self) -> bool:
        """Whether the emulator killed the container."""
        return self._is_killed

    def listens(self) -> bool:
        """Return whether process 1 handles or blocks SIGTERM; see ``EmulatedHost``."""
        if self._is_frozen:  # Docker cannot run a command in a paused container
            return True
        if not self._is_started():
            return False
        try:
            status = docker("exec", self._container, "cat", "/proc/1/status")
        except ContainerError:  # the container has just exited, or the image has no cat
            return self._is_started()
        masks = [line.split()[1] for line in status.splitlines() if line.startswith(("SigCgt:", "SigBlk:"))]
        return any(int(mask, 16) >> (signal.SIGTERM - 1) & 1 for mask in masks)

    def terminate(self) -> None:
        """Send SIGTERM to process 1 once it is no longer frozen; kill a container that does not listen for it yet."""
        if self._is_frozen:  # a signal from Docker would resume the container
            self._is_told = True
        elif not (self.listens() and tell(self._container, "kill", "--signal", "TERM")) and self.exit_code is None:
            self.kill()

    def freeze(self) -> None:
        """Pause the container."""
        if not self._is_frozen:
            self._is_frozen = tell(self._container, "pause")

    def thaw(self) -> None:
        """Resume a paused container."""
        if self._is_frozen:
            self._is_frozen = False
            tell(self._container, "unpause")
            if self._is_told:
                self.terminate()

    def kill(self) -> None:
        """Kill the container: when process 1 dies, the kernel kills all others."""
        self._is_killed = True
        if not tell(self._container, "kill") and self.exit_code is None:
            # The container has exited, or will never start; in the latter case, Docker's client may still wait for it.
            tell(self._container, "rm", "--force")
        self.waiter.join(timeout=_KILL_S)  # wait for the exit code

    def kill_launcher(self) -> None:
        """Kill the container, because the kernel kills all other processes together with process 1."""
        self.kill()

    def kill_process(self, pid: int) -> None:
        """Send SIGKILL to one process, by its id in the container."""
        # Ignore errors: the process, and with it the container, may exit before Docker runs the command.
        tell(self._container, "exec", then=["sh", "-c", f"kill -9 {pid} || true"])

    def _is_started(self) -> bool:
        return state_of(self._container) in ALIVE


class ContainerRuntime(HostRuntime):
    """Runs a job's hosts as containers of an image.

    Args:
        image: Name of an image that Docker has on this machine.
        code: The folder that the containers see as ``/opt/ml/code``; None to keep the image's folder.
        copies_code: Whether each host gets its own copy of that folder, as on the service.

    Raises:
        ContainerError: Docker is missing, or does not have the image.
    """

    interface = "eth0"

    def __init__(self, image: str, code: Path | None = None, *, copies_code: bool = False) -> None:
        self._image = image
        self._code = code
        self._copies_code = copies_code
        self._entry_point = entry_point(image)
        # On Linux, files that root creates in a container belong to root, so a non-root agent could not upload them.
        is_foreign = os.getuid() != 0 and not maps_root()
        self._user = ["--user", f"{os.getuid()}:{os.getgid()}"] if is_foreign else []

    def check_command(self, command: Sequence[str]) -> None:
        """Reject a script outside the code folder, or any script if the image's entry point accepts none.

        Raises:
            ScriptError: The entry point accepts no script, or the script is invalid or outside the code folder.
        """
        if not command:
            return
        if self._code is None or not any(Path(word).name == _LAUNCHER for word in self._entry_point):
            raise ScriptError(
                f"The entry point of {self._image} is {' '.join(self._entry_point) or 'empty'}, which does not accept "
                "a script, unlike lightning-sm. Set the hyperparameter sagemaker_program instead."
            )
        check_script(command[0])
        script = Path(command[0]).absolute()
        if not script.is_relative_to(self._code):
            raise ScriptError(
                f"The training script {command[0]!r} is outside the current folder ({self._code}), which is all that "
                "the containers see of this machine. Change to the folder of your code."
            )

    def system_variables(self, spec: ClusterSpec) -> dict[str, str]:
        """Return the variables that a foreign user needs; containers inherit none of this machine's."""
        return _USER_VARIABLES if self._user else {}

    def base_dir(self, folder: Path) -> Path:
        """Return ``/opt/ml``."""
        return Path(_ML)

    def add_channel(self, path: Path, source: Path) -> None:
        """Create the mount point of the channel."""
        path.mkdir()

    @contextlib.contextmanager
    def running(self, job_dir: Path) -> Iterator[None]:
        """Create a job's network; remove it and all containers on exit, even if this process dies."""
        name = job_dir.name
        with guarded(job_dir, containers_of=name):
            try:
                docker("network", "create", *label(name), name)
                yield
            finally:
                remove_job(name)

    def clear(self, job_dir: Path, hosts: Sequence[EmulatedHost]) -> None:
        """Remove the containers of an attempt."""
        remove_containers(job_dir.name)

    def start(self, host: LocalHost, command: Sequence[str], output: Output, changed: threading.Event) -> ContainerHost:
        """Create a host's container and start it; see ``HostRuntime``."""
        job = host.env["TRAINING_JOB_NAME"]
        container = f"{job}-{host.name}"
        options = ["--name", container, "--hostname", host.name, *label(job), *self._user]
        options += ["--network", job, "--network-alias", host.name]
        # Docker's default of 64 MB is too little for data workers. Linux itself allows half of the memory.
        options += ["--shm-size", str(psutil.virtual_memory().total // 2)]
        for name in _FOLDERS:
            if (host.folder / name).is_dir():
                options += bind(host.folder / name, f"{_ML}/{name}")
        for name, source in host.channels.items():
            options += bind(source.absolute(), f"{_ML}/input/data/{name}", read_only=True)
        if self._code is not None:
            code = shutil.copytree(self._code, host.folder / "code") if self._copies_code else self._code
            options += bind(code, CODE_DIR)
            if command:
                options += ["--workdir", CODE_DIR]
                command = [str(Path(command[0]).absolute().relative_to(self._code)), *command[1:]]
        with _variables(host.env) as (variable_options, client_variables):
            create = ["create", *options, *variable_options, self._image, "train", *command]
            docker(*create, env={**_client_environment(host), **client_variables})
        return ContainerHost(container, host, output, changed)


@contextlib.contextmanager
def _variables(env: Mapping[str, str]) -> Iterator[tuple[list[str], dict[str, str]]]:
    """Pass variables to a container without showing their values, which may be secret, on a command line.

    Yields:
        Options for ``docker create``, and the environment variables that Docker's client needs for these options.
    """
    # The file holds one variable per line, so pass multi-line values through the client's environment.
    several_lines = {name: value for name, value in env.items() if "\n" in value}
    with tempfile.NamedTemporaryFile("w", encoding="utf-8") as file:  # only this user can read it
        file.writelines(f"{name}={value}\n" for name, value in env.items() if name not in several_lines)
        file.flush()
        yield ["--env-file", file.name, *(f"--env={name}" for name in several_lines)], several_lines


def _client_environment(host: LocalHost) -> dict[str, str]:
    """Return an environment for Docker's client that lets the guard find the client."""
    return {**os.environ, HOST_FOLDER.name: str(host.folder)}
