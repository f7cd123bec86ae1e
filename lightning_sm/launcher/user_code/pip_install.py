"""``python -m lightning_sm.launcher.user_code.pip_install FOLDER ARGUMENTS``: run pip in the folder of the user's code.

This process starts in another folder: Python imports modules from its working directory, and the user's code may have a
``types.py``. All output of pip goes to stderr, where the launcher reads it.

``CA_REPOSITORY_ARN`` names an AWS CodeArtifact repository to install from, as for sagemaker-training. Here its token
goes into the environment, not into the command line, which every process of the host can read.
"""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Mapping

from lightning_sm.errors import JobConfigError

_REPOSITORY_VARIABLE = "CA_REPOSITORY_ARN"
_REPOSITORY = re.compile(
    r"arn:[^:]+:codeartifact:(?P<region>[^:]+):(?P<owner>[^:]+):repository/(?P<domain>[^/]+)/(?P<name>.+)"
)
_USAGE_EXIT_CODE = 2
# Defaults only: users may set these, and any other variable of "pip install --help", themselves.
_DEFAULTS = {"PIP_DISABLE_PIP_VERSION_CHECK": "1", "PIP_NO_INPUT": "1", "PIP_ROOT_USER_ACTION": "ignore"}


def index_variables(env: Mapping[str, str]) -> dict[str, str]:
    """Return the variables that make pip install from the repository of ``CA_REPOSITORY_ARN``, if that is set.

    Raises:
        JobConfigError: The variable is malformed, or CodeArtifact refuses access.

    Source:
        AWS CodeArtifact user guide, "Configure pip without the login command".
    """
    text = env.get(_REPOSITORY_VARIABLE)
    if not text:
        return {}
    arn = _REPOSITORY.fullmatch(text)
    if arn is None:
        raise JobConfigError(
            f"{_REPOSITORY_VARIABLE}={text!r}: expected arn:aws:codeartifact:REGION:ACCOUNT:repository/DOMAIN/NAME."
        )
    try:
        import boto3  # noqa: PLC0415 - images have it, laptops may not
        import botocore.exceptions  # noqa: PLC0415
    except ImportError as error:
        raise JobConfigError(
            f"{_REPOSITORY_VARIABLE} is set, but boto3 is not installed in the image. Install boto3 there."
        ) from error
    names = {"domain": arn["domain"], "domainOwner": arn["owner"]}
    try:
        client = boto3.session.Session().client("codeartifact", region_name=arn["region"])
        token = client.get_authorization_token(**names)["authorizationToken"]
        endpoint = client.get_repository_endpoint(**names, repository=arn["name"], format="pypi")["repositoryEndpoint"]
    except (botocore.exceptions.BotoCoreError, botocore.exceptions.ClientError) as error:
        raise JobConfigError(f"Cannot use the repository {text} ({_REPOSITORY_VARIABLE}): {error}.") from error
    scheme, _, rest = endpoint.partition("://")
    return {"PIP_INDEX_URL": f"{scheme}://aws:{token}@{rest.rstrip('/')}/simple/"}


def main() -> int:
    """Replace this process with pip; return an exit code only if that fails."""
    folder, *arguments = sys.argv[1:]
    try:
        env = {**_DEFAULTS, **os.environ, **index_variables(os.environ)}
    except JobConfigError as error:
        sys.stderr.write(f"error: {error}\n")
        return _USAGE_EXIT_CODE
    os.dup2(2, 1)
    os.chdir(folder)
    # -P keeps the folder off sys.path for pip, but not for the builds of packages, which may rely on it.
    options = ["-P"] if sys.version_info >= (3, 11) else []
    return os.execve(sys.executable, [sys.executable, *options, "-m", "pip", "install", *arguments], env)  # noqa: S606


if __name__ == "__main__":
    sys.exit(main())
