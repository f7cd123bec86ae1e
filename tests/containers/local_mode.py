"""Jobs in the local mode of SDK v2, judged by the exit codes of all containers.

``fit`` hides failures: it returns normally if a container fails after the first one has exited, and its telemetry
swallows KeyboardInterrupt and pytest's timeouts. So it runs in a separate process.
"""

from __future__ import annotations

import json
import os
import re
import secrets
import signal
import subprocess
import tarfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.containers.engine import docker

ROOT = Path(__file__).resolve().parents[2]
ROLE = "arn:aws:iam::111111111111:role/unused"
_FIT = Path(__file__).parent / "scripts" / "fit.py"
# Runs a command in a new network namespace, which has only loopback.
OFFLINE = ("unshare", "--net", "sh", "-c", 'ip link set lo up && exec "$@"', "sh")
# Only a hang reaches this limit: a job of three containers takes one minute on two idle cores, and three under load.
_TIMEOUT_S = 600.0
_NETWORK = "sagemaker-local"  # the SDK uses it for all its local jobs


@dataclass(frozen=True)
class LocalJob:
    """A finished job.

    Attributes:
        returncode: Exit code of the process that ran ``fit``; None if it exceeded the time limit. It is 0 for
            some jobs that failed.
        output: Output of that process, including the containers' output.
        exit_codes: Exit code of each host's container, by host (``algo-1``); None if it was still running.
        logs: Output of each host's container, by host.
        output_dir: The folder that ``output_path`` named.
    """

    returncode: int | None
    output: str
    exit_codes: Mapping[str, int | None]
    logs: Mapping[str, str]
    output_dir: Path

    @property
    def has_succeeded(self) -> bool:
        """Whether ``fit`` returned and every container exited with 0."""
        return self.returncode == 0 and bool(self.exit_codes) and set(self.exit_codes.values()) == {0}

    @property
    def model(self) -> dict[str, bytes]:
        """Content of the files in ``model.tar.gz``, by path."""
        return _archive(self.output_dir / "model.tar.gz")

    @property
    def artifacts(self) -> dict[str, bytes]:
        """Content of the files in ``output.tar.gz``, by path: ``failure``, ``success`` and files below ``data/``."""
        return _archive(self.output_dir / "output.tar.gz")

    def json(self, name: str) -> Any:
        """Return the value in a JSON file of ``output.tar.gz``.

        Args:
            name: Path of the file in the archive.
        """
        return json.loads(self.artifacts[name])

    def __str__(self) -> str:
        return f"fit: {self.returncode}, containers: {dict(self.exit_codes)}\n{self.output}"


def fit(
    python: Path,
    folder: Path,
    estimator_arguments: Mapping[str, Any],
    inputs: Mapping[str, str | Mapping[str, Any]] | None = None,
    *,
    estimator: str = "sagemaker.estimator.Estimator",
    container_config: Mapping[str, Any] | None = None,
    label: str | None = None,
    is_offline: bool = False,
    timeout_s: float = _TIMEOUT_S,
) -> LocalJob:
    """Run a job until it ends, and always remove its containers.

    Args:
        python: An interpreter with version 2 of the SDK.
        folder: Empty folder for everything that the job leaves behind.
        estimator_arguments: Arguments of the estimator, as JSON. ``role`` and ``output_path`` are filled in.
        inputs: ``file://`` address or ``TrainingInput`` arguments of each channel, by name.
        estimator: Class of the estimator.
        container_config: Further settings of all containers, as in a Compose file.
        label: Label by which others can find the job's containers. Default: a new one.
        is_offline: Whether the SDK has no network but loopback; needs root, and an engine behind a Unix socket.
        timeout_s: Time limit of the job, after which its containers are killed.
    """
    label = label or new_label()
    output_dir, root = folder / "output", folder / "sdk"
    root.mkdir(parents=True)
    settings = {
        "estimator": estimator,
        "estimator_arguments": {"role": ROLE, "output_path": output_dir.as_uri(), **estimator_arguments},
        "inputs": inputs or {},
        "local": {
            "local_code": True,
            "container_root": str(root),
            "container_config": {**(container_config or {}), "labels": [label]},
        },
    }
    (folder / "settings.json").write_text(json.dumps(settings))
    command = [*(OFFLINE if is_offline else ()), str(python), str(_FIT), str(folder / "settings.json")]
    return run_job(command, sdk_variables(folder), label, output_dir, timeout_s)


def new_label() -> str:
    """Return a label that no other job has."""
    return f"lightning-sm-test={secrets.token_hex(8)}"


def run_job(
    command: Sequence[str], env: Mapping[str, str], label: str, output_dir: Path, timeout_s: float = _TIMEOUT_S
) -> LocalJob:
    """Run the process of a job, and always remove the job's containers.

    Args:
        command: Program and arguments of the process.
        env: Environment variables of the process.
        label: Label of the job's containers.
        output_dir: Folder where the SDK leaves ``model.tar.gz`` and ``output.tar.gz``.
        timeout_s: Time limit of the job, after which its containers are killed.
    """
    with _removed_containers(label):
        returncode, output = _run(command, env, timeout_s)
        containers = _containers(label)
        logs = {host: docker("logs", identity).stdout for host, (identity, _) in containers.items()}
    exit_codes = {host: exit_code for host, (_, exit_code) in containers.items()}
    return LocalJob(returncode, output, exit_codes, logs, output_dir)


def sdk_variables(folder: Path) -> dict[str, str]:
    """Return variables that keep the SDK from using the network and from finding an account.

    Args:
        folder: Folder for the SDK's settings and temporary files.
    """
    settings, temporary = folder / "sagemaker.yaml", folder / "tmp"
    temporary.mkdir(exist_ok=True)
    # By default, the SDK sends a telemetry request in each job.
    settings.write_text('SchemaVersion: "1.0"\nSageMaker: {PythonSDK: {Modules: {TelemetryOptOut: true}}}\n')
    inherited = {name: value for name, value in os.environ.items() if not name.startswith(("AWS_", "SAGEMAKER_"))}
    return {
        **inherited,
        "AWS_CONFIG_FILE": os.devnull,
        "AWS_DEFAULT_REGION": "us-east-1",
        "AWS_EC2_METADATA_DISABLED": "true",
        "AWS_SHARED_CREDENTIALS_FILE": os.devnull,
        "PYTHONUNBUFFERED": "1",
        "SAGEMAKER_SUPPRESS_V2_WARNING": "1",
        "SAGEMAKER_USER_CONFIG_OVERRIDE": str(settings),
        "TMPDIR": str(temporary),
    }


def _run(command: Sequence[str], env: Mapping[str, str], timeout_s: float) -> tuple[int | None, str]:
    process = subprocess.Popen(
        command,
        env=env,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        start_new_session=True,
    )
    try:
        output, _ = process.communicate(timeout=timeout_s)
    except subprocess.TimeoutExpired:
        returncode = None
    else:
        return process.returncode, output
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)  # kills docker-compose as well
    output, _ = process.communicate()
    return returncode, output


@contextmanager
def removed_network() -> Iterator[None]:
    """Remove the network of the SDK's local jobs, unless it existed before.

    Enter this once for all jobs: Docker lets one job remove the network while another has created its containers but
    not started them yet.
    """
    had_network = _NETWORK in docker("network", "ls", "--format", "{{.Name}}").stdout.splitlines()
    try:
        yield
    finally:
        if not had_network:
            docker("network", "rm", _NETWORK, check=False)  # fails if no job has made it


@contextmanager
def _removed_containers(label: str) -> Iterator[None]:
    try:
        yield
    finally:
        for identity, _ in _containers(label).values():
            docker("rm", "--force", "--volumes", identity)


def _containers(label: str) -> dict[str, tuple[str, int | None]]:
    """Return id and exit code of each host's container, by host."""
    found: dict[str, tuple[str, int | None]] = {}
    for identity in docker("ps", "--all", "--quiet", "--filter", f"label={label}").stdout.split():
        facts = docker("inspect", "--format", "{{.State.Status}} {{.State.ExitCode}} {{.Name}}", identity).stdout
        state, exit_code, name = facts.split()
        # The SDK names containers <random>-algo-1-<suffix of the job>.
        match = re.search(r"algo-\d+", name)
        assert match, f"container {name!r} is none of the SDK's"
        found[match.group()] = identity, int(exit_code) if state in {"exited", "dead"} else None
    return dict(sorted(found.items()))


def _archive(path: Path) -> dict[str, bytes]:
    with tarfile.open(path) as archive:
        files = ((member.name, archive.extractfile(member)) for member in archive.getmembers() if member.isfile())
        return {name: file.read() for name, file in files if file is not None}
