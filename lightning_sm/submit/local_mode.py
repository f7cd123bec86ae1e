"""Local mode: a job is run by the SDK, and judged by its containers.

The result of ``fit()`` in local mode is unreliable: ``docker compose up --abort-on-container-exit`` returns the exit
code of the first container that stops, so that the same failed job raises or succeeds at random, and SDK v2's
telemetry turns Ctrl-C into success. So the SDK runs in its own process, and a job has succeeded only if every container
ended with 0.
"""

from __future__ import annotations

import os
import pickle
import signal
import subprocess
import sys
import tarfile
from collections.abc import Mapping, Sequence
from pathlib import Path

import yaml

from lightning_sm._log import command_logger
from lightning_sm.errors import LightningSMError, SubmitError
from lightning_sm.submit.request import TrainingRequest
from lightning_sm.submit.sdk.containers import Container, find_containers, remove
from lightning_sm.submit.sdk.version import INSTALL_V2, adapter, sdk_version, without_telemetry

_LOG = command_logger(__name__)

_TIMEOUT_EXIT_CODE = 124  # the same as timeout(1)


def run(plan: TrainingRequest, root: Path, *, timeout_s: float | None, keep: bool) -> int:
    """Run a job and return the exit code for the command.

    Args:
        plan: The job, adapted to local mode.
        root: An empty folder for this job only: its containers are found by what they mount.
        timeout_s: Seconds after which the job is stopped; None for no limit.
        keep: Keep the containers.

    Returns:
        0 if every host ended with 0, else the exit code of one that did not; 124 after the time limit.

    Raises:
        SDKError: The SDK is not installed.
        SubmitError: Docker is missing, or the SDK's local mode cannot run the job.
    """
    adapter()  # raises here what would otherwise fail in the other process
    if plan.single_group is None and sdk_version() == "v3":
        raise SubmitError(
            f"The local mode of SDK v3 does not support instance groups, but the job has {', '.join(plan.job.groups)}. "
            f"Use SDK v2 in another environment ({INSTALL_V2}), or lightning-sm local."
        )
    find_containers(root)  # fails here if Docker is missing
    containers: Sequence[Container] = []
    try:
        sdk_exit_code = _run_sdk(plan, root, timeout_s)
        containers = find_containers(root)
    finally:
        if not keep:
            remove(find_containers(root))
            for path in root.rglob("docker-compose.yaml"):  # contains AWS credentials for the containers
                path.unlink()
    exit_code = judge(containers, plan.job.num_hosts, sdk_exit_code)
    for reason in failure_reasons(root):
        _LOG.error("a host failed: %s", reason)
    _LOG.info("model, output and the SDK's files: %s", root)
    return exit_code


def judge(containers: Sequence[Container], num_hosts: int, sdk_exit_code: int) -> int:
    """Return the exit code of a job, and log the reason if it failed.

    Args:
        containers: The containers of the job.
        num_hosts: The expected number of containers.
        sdk_exit_code: Exit code of the process that called the SDK. It decides only if all containers succeeded.
    """
    for container in containers:
        _LOG.info("host %s: %s with exit code %d", container.host, container.status, container.exit_code)
    if sdk_exit_code == _TIMEOUT_EXIT_CODE:
        _LOG.error("the job exceeded the time limit and was stopped.")
        return _TIMEOUT_EXIT_CODE
    failed = [container.exit_code for container in containers if container.exit_code]
    if failed:
        # Compose kills the other containers when the first one stops.
        own = [code for code in failed if code not in {128 + signal.SIGKILL, 128 + signal.SIGTERM}]
        return (own or failed)[0]
    idle = [container.host for container in containers if not container.is_training]
    if idle:
        _LOG.error("the SDK started %s without the argument 'train': no training ran.", ", ".join(idle))
        return 1
    unfinished = [container.host for container in containers if container.status != "exited"]
    if len(containers) != num_hosts or unfinished or sdk_exit_code:
        _LOG.error(
            "expected hosts: %d, started: %d, unfinished: %s. The SDK exited with code %d; its output is above.",
            num_hosts,
            len(containers),
            ", ".join(unfinished) or "none",
            sdk_exit_code,
        )
        return sdk_exit_code or 1
    return 0


def failure_reasons(root: Path) -> list[str]:
    """Return the contents of the hosts' ``/opt/ml/output/failure``.

    SDK v3 keeps each host's files in the job's folder; v2 keeps an archive in which the hosts overwrite each other.
    """
    texts = [path.read_text(encoding="utf-8", errors="replace") for path in root.rglob("output/failure")]
    for path in root.rglob("output.tar.gz"):
        texts.extend(_failures_in(path))
    return list(dict.fromkeys(texts))


def _failures_in(archive: Path) -> list[str]:
    try:
        with tarfile.open(archive) as files:
            found = [files.extractfile(name) for name in files.getnames() if Path(name).name == "failure"]
            return [file.read().decode(errors="replace") for file in found if file is not None]
    except (tarfile.ReadError, EOFError) as error:
        # The time limit ended the SDK while it wrote the archive.
        _LOG.warning("%s is incomplete, and cannot tell why hosts failed: %s", archive, error)
        return []


def _run_sdk(plan: TrainingRequest, root: Path, timeout_s: float | None) -> int:
    """Call the SDK in a new process group, which has ended when this returns."""
    command = [sys.executable, "-m", "lightning_sm.submit.local_mode", str(root)]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, env=_environment(root), start_new_session=True)
    try:
        process.communicate(pickle.dumps(plan), timeout=timeout_s)
    except subprocess.TimeoutExpired:
        return _TIMEOUT_EXIT_CODE
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
    return process.returncode


def _environment(root: Path) -> Mapping[str, str]:
    """Return variables that keep the SDK off the network: no instance metadata, no telemetry. It requires a region."""
    config = root / "sagemaker-config.yaml"
    config.write_text(yaml.safe_dump(without_telemetry({})), encoding="utf-8")
    defaults = {
        "AWS_DEFAULT_REGION": os.environ.get("AWS_REGION", "us-east-1"),
        "AWS_EC2_METADATA_DISABLED": "true",
        "SAGEMAKER_SUPPRESS_V2_WARNING": "1",
        "SAGEMAKER_USER_CONFIG_OVERRIDE": str(config),
    }
    # The SDKs create the containers' folders in the temporary directory.
    return defaults | os.environ | {"TMPDIR": str(root)}


if __name__ == "__main__":
    try:
        adapter().run_locally(pickle.load(sys.stdin.buffer), sys.argv[1])  # noqa: S301 - from the process that started this
    except LightningSMError as error:
        sys.exit(f"lightning-sm: {error}")
