"""``python -m lightning_sm.launcher.user_code.pip_install FOLDER ARGUMENTS``: pip, in the folder of the user's code.

A process of its own, started in another folder: Python looks for modules in the folder where it starts, and the user's
code may have a ``types.py``. What pip says goes to stderr as a whole, where the launcher reads it.

``CA_REPOSITORY_ARN`` names a repository of AWS CodeArtifact to install from, as for sagemaker-training. Here its token
gets into the environment, not into the command line that every process of the host can read.
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
# Of those that a user may set; "pip install --help" has them all.
_DEFAULTS = {"PIP_DISABLE_PIP_VERSION_CHECK": "1", "PIP_NO_INPUT": "1", "PIP_ROOT_USER_ACTION": "ignore"}


def index_variables(env: Mapping[str, str]) -> dict[str, str]:
    """The variables that make pip install from the repository of ``CA_REPOSITORY_ARN``, if that is set.

    Args:
        env: Environment variables.

    Raises:
        JobConfigError: The variable is malformed, or CodeArtifact cannot be asked.

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
        import boto3  # noqa: PLC0415 - installed in images, not on laptops
        import botocore.exceptions  # noqa: PLC0415
    except ImportError as error:
        raise JobConfigError(f"{_REPOSITORY_VARIABLE} is set, and boto3 is not installed in the image.") from error
    names = {"domain": arn["domain"], "domainOwner": arn["owner"]}
    try:
        client = boto3.session.Session().client("codeartifact", region_name=arn["region"])
        token = client.get_authorization_token(**names)["authorizationToken"]
        endpoint = client.get_repository_endpoint(**names, repository=arn["name"], format="pypi")["repositoryEndpoint"]
    except (botocore.exceptions.BotoCoreError, botocore.exceptions.ClientError) as error:
        raise JobConfigError(f"The repository {text} ({_REPOSITORY_VARIABLE}) cannot be used: {error}.") from error
    scheme, _, rest = endpoint.partition("://")
    return {"PIP_INDEX_URL": f"{scheme}://aws:{token}@{rest.rstrip('/')}/simple/"}


def main() -> int:
    """Become pip; return an exit code only if that is not possible."""
    folder, *arguments = sys.argv[1:]
    try:
        env = {**_DEFAULTS, **os.environ, **index_variables(os.environ)}
    except JobConfigError as error:
        sys.stderr.write(f"error: {error}\n")
        return _USAGE_EXIT_CODE
    os.dup2(2, 1)
    os.chdir(folder)
    # -P keeps the folder off sys.path, of pip alone: builds of packages may count on it.
    options = ["-P"] if sys.version_info >= (3, 11) else []
    return os.execve(sys.executable, [sys.executable, *options, "-m", "pip", "install", *arguments], env)  # noqa: S606


if __name__ == "__main__":
    sys.exit(main())
