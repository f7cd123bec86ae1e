"""A shell on a host of a job that runs, by AWS's own command line and its Session Manager plugin.

Source: SageMaker developer guide, "Access a training container through AWS Systems Manager (SSM) for remote debugging":
the target of a session is ``sagemaker-training-job:<job>_algo-<n>``.
"""

from __future__ import annotations

import shutil

from lightning_sm._text import listed
from lightning_sm.cloud.find import Found
from lightning_sm.cloud.hosts import groups_of
from lightning_sm.errors import AWSError

# The programs, and where AWS's documentation says how to install them.
_PROGRAMS = {
    "aws": "AWS CLI user guide, 'Installing or updating to the latest version of the AWS CLI'",
    "session-manager-plugin": "Systems Manager user guide, 'Install the Session Manager plugin for the AWS CLI'",
}


def shell_command(found: Found, host: str, region: str) -> list[str]:
    """Return the command that opens a shell on a host.

    Args:
        found: The job.
        host: Name of the host, such as algo-2.
        region: Region of the job.

    Raises:
        AWSError: There cannot be a shell, or a program is missing here; the message says what to do.
    """
    state = found.description.get("SecondaryStatus", found.status)
    if found.has_ended:
        raise AWSError(f"{found.name} has ended: {found.status}. There is a shell on the hosts of a running job only.")
    hosts = [f"algo-{1 + index}" for index in range(sum(group.num_hosts for group in groups_of(found.description)))]
    if host not in hosts:
        raise AWSError(f"{found.name} has no host {host}; its hosts are {listed(hosts)}.")
    if not found.description.get("RemoteDebugConfig", {}).get("EnableRemoteDebug"):
        raise AWSError(
            f"Remote debugging of {found.name} is off. Turn it on: lightning-sm jobs debug {found.name} (for the next "
            "job: remote_debug: true in its file)."
        )
    if state != "Training":
        raise AWSError(f"{found.name} is {state}; its hosts can be reached while it is Training.")
    programs = {name: shutil.which(name) for name in _PROGRAMS}
    missing = [f"{name} ({_PROGRAMS[name]})" for name, path in programs.items() if path is None]
    if missing:
        raise AWSError(f"A shell needs programs that are not on PATH: {', '.join(missing)}.")
    target = f"sagemaker-training-job:{found.name}_{host}"
    return [programs["aws"] or "aws", "ssm", "start-session", "--region", region, "--target", target]
