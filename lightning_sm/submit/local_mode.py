"""Run a job in the SDK's local mode, and judge it by what the containers did.

``fit()`` in local mode is no judge: ``docker compose up --abort-on-container-exit`` ends with the code of the first
container to stop, so that the same failed job raises or succeeds at random, and SDK v2's telemetry turns Ctrl-C into
success. The SDK therefore runs in a process of its own, and afterwards every container must have ended with 0.
"""

from __future__ import annotations

import logging
import os
import pickle
import signal
import subprocess
import sys
import tarfile
from collections.abc import Mapping, Sequence
from pathlib import Path

import yaml

from lightning_sm.errors import LightningSMError, SubmitError
from lightning_sm.submit.plan import Plan
from lightning_sm.submit.sdk.containers import Container, find_containers, remove
from lightning_sm.submit.sdk.version import INSTALL_V2, SDK_WITHOUT_ESTIMATOR, adapter, sdk_version, without_telemetry

_LOG = logging.getLogger(__name__)

_TIMEOUT_EXIT_CODE = 124  # as of coreutils' timeout


def run(plan: Plan, root: Path, *, timeout_s: float | None, keeps: bool) -> int:
    """Run a job and return the exit code for the command.

    Args:
        plan: The job, made for local mode.
        root: An empty folder of this job alone: its containers are known by what they mount.
        timeout_s: Seconds until everything is ended; None for none.
        keeps: Leave the containers.

    Returns:
        0 if every host ended with 0, else the exit code of one that did not; 124 after the time limit.

    Raises:
        SDKError: There is no SDK.
        SubmitError: There is no Docker, or the SDK's local mode cannot run the job.
    """
    adapter()  # fails here, if at all, and not in the other process
    if plan.single_group is None and sdk_version() == SDK_WITHOUT_ESTIMATOR:
        raise SubmitError(
            f"SDK v3 has no instance groups in local mode, and the job has {', '.join(plan.job.groups)}. Use SDK v2 in "
            f"another environment ({INSTALL_V2}), or lightning-sm local."
        )
    find_containers(root)  # so does Docker's absence
    containers: Sequence[Container] = []
    try:
        sdk_exit_code = _run_sdk(plan, root, timeout_s)
        containers = find_containers(root)
    finally:
        if not keeps:
            remove(find_containers(root))
            for path in root.rglob("docker-compose.yaml"):  # holds the AWS credentials, which containers may use
                path.unlink()
    exit_code = judge(containers, plan.job.num_hosts, sdk_exit_code)
    for reason in failure_reasons(root):
        _LOG.error("lightning-sm: a host failed: %s", reason)
    _LOG.info("Model, output and what the SDK wrote: %s", root)
    return exit_code


def judge(containers: Sequence[Container], num_hosts: int, sdk_exit_code: int) -> int:
    """Decide how a job ended, and say why.

    Args:
        containers: Of this job.
        num_hosts: How many there should be.
        sdk_exit_code: Of the process that called the SDK; it counts only if it contradicts good containers.

    Returns:
        The exit code for the command.
    """
    for container in containers:
        _LOG.info("Host %s: %s with exit code %d", container.host, container.status, container.exit_code)
    if sdk_exit_code == _TIMEOUT_EXIT_CODE:
        _LOG.error("lightning-sm: the time limit passed; everything was ended.")
        return _TIMEOUT_EXIT_CODE
    bad = [one.exit_code for one in containers if one.exit_code]
    if bad:
        # Compose kills the others once the first has left.
        own = [code for code in bad if code not in {128 + signal.SIGKILL, 128 + signal.SIGTERM}]
        return (own or bad)[0]
    idle = [one.host for one in containers if not one.is_training]
    if idle:
        _LOG.error(
            "lightning-sm: the SDK started %s without the argument 'train': nothing was trained.", ", ".join(idle)
        )
        return 1
    unfinished = [one.host for one in containers if one.status != "exited"]
    if len(containers) != num_hosts or unfinished or sdk_exit_code:
        _LOG.error(
            "lightning-sm: %d of %d hosts started, not finished: %s; the SDK ended with %d. Its output is above.",
            *(len(containers), num_hosts, ", ".join(unfinished) or "none", sdk_exit_code),
        )
        return sdk_exit_code or 1
    return 0


def failure_reasons(root: Path) -> list[str]:
    """What the hosts left in ``/opt/ml/output/failure``.

    Args:
        root: Folder of the job. Version 3 of the SDK keeps the files of the hosts there, version 2 an archive in which
            they overwrite each other.
    """
    texts = [path.read_text(encoding="utf-8", errors="replace") for path in root.rglob("output/failure")]
    for path in root.rglob("output.tar.gz"):
        with tarfile.open(path) as archive:
            files = [archive.extractfile(name) for name in archive.getnames() if Path(name).name == "failure"]
            texts += [file.read().decode(errors="replace") for file in files if file is not None]
    return list(dict.fromkeys(texts))


def _run_sdk(plan: Plan, root: Path, timeout_s: float | None) -> int:
    """Call the SDK in a process group of its own, which is gone when this returns."""
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
    """Let the SDK ask nobody: no instance metadata, no telemetry; it insists on a region."""
    config = root / "sagemaker-config.yaml"
    config.write_text(yaml.safe_dump(without_telemetry({})), encoding="utf-8")
    defaults = {
        "AWS_DEFAULT_REGION": os.environ.get("AWS_REGION", "us-east-1"),
        "AWS_EC2_METADATA_DISABLED": "true",
        "SAGEMAKER_SUPPRESS_V2_WARNING": "1",
        "SAGEMAKER_USER_CONFIG_OVERRIDE": str(config),
    }
    # Where the SDKs make the folders of the containers, too.
    return defaults | os.environ | {"TMPDIR": str(root)}


if __name__ == "__main__":
    try:
        adapter().run_locally(pickle.load(sys.stdin.buffer), sys.argv[1])  # noqa: S301 - from the process that started this
    except LightningSMError as error:
        sys.exit(f"lightning-sm: {error}")
