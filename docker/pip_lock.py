"""Print the packages that pip installed in this environment, with checksums, for docker/pip.lock.

The list excludes conda's packages, which are in docker/conda.lock, and the packages that the Dockerfile installs.
pip looks up each checksum in the package index.
"""

import json
import subprocess
import sys
from importlib.metadata import distributions

_OF_THE_DOCKERFILE = {"lightning-bolts", "lightning-sm"}


def main() -> None:
    """Print name, version and SHA-256 of each package, sorted.

    Raises:
        CalledProcessError: The index lacks a package in this version. pip's error message precedes it.
    """
    packages = {
        f"{package.name}=={package.version}"
        for package in distributions()
        if (package.read_text("INSTALLER") or "").strip() == "pip"
        and package.name.lower().replace("_", "-") not in _OF_THE_DOCKERFILE
    }
    if not packages:
        return
    command = [sys.executable, "-m", "pip", "install", "--quiet", "--dry-run", "--ignore-installed", "--no-deps"]
    command += ["--report", "-", *sorted(packages)]
    report = json.loads(subprocess.run(command, check=True, stdout=subprocess.PIPE).stdout)
    lines = [
        f"{package['metadata']['name']}=={package['metadata']['version']}"
        f" --hash=sha256:{package['download_info']['archive_info']['hashes']['sha256']}\n"
        for package in report["install"]
    ]
    sys.stdout.write("".join(sorted(lines, key=str.lower)))


if __name__ == "__main__":
    main()
