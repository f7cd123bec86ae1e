"""Print the packages that pip has installed in this environment, with checksums, for docker/pip.lock.

Without those that the Dockerfile installs itself; docker/conda.lock has conda's.
pip asks the package index for each file that it would install here.
"""

import json
import subprocess
import sys
from importlib.metadata import distributions

_OF_THE_DOCKERFILE = {"lightning-bolts", "lightning-sm"}


def main() -> None:
    """Print name, version and SHA-256 of each package, sorted.

    Raises:
        CalledProcessError: The index lacks a package in this version; pip's own message precedes it.
    """
    packages = {
        f"{one.name}=={one.version}"
        for one in distributions()
        if (one.read_text("INSTALLER") or "").strip() == "pip"
        and one.name.lower().replace("_", "-") not in _OF_THE_DOCKERFILE
    }
    if not packages:
        return
    command = [sys.executable, "-m", "pip", "install", "--quiet", "--dry-run", "--ignore-installed", "--no-deps"]
    command += ["--report", "-", *sorted(packages)]
    report = json.loads(subprocess.run(command, check=True, stdout=subprocess.PIPE).stdout)
    lines = [
        f"{one['metadata']['name']}=={one['metadata']['version']}"
        f" --hash=sha256:{one['download_info']['archive_info']['hashes']['sha256']}\n"
        for one in report["install"]
    ]
    sys.stdout.write("".join(sorted(lines, key=str.lower)))


if __name__ == "__main__":
    main()
