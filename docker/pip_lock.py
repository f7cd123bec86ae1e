"""Print what pip has installed in this environment, for docker/pip.lock; conda's own packages are in docker/conda.lock.

Without what the Dockerfile installs itself.
"""

import sys
from importlib.metadata import distributions

_OF_THE_DOCKERFILE = {"lightning-bolts", "lightning-sm"}


def main() -> None:
    """Print name and version of each package, sorted."""
    packages = {
        f"{one.name}=={one.version}"
        for one in distributions()
        if (one.read_text("INSTALLER") or "").strip() == "pip"
        and one.name.lower().replace("_", "-") not in _OF_THE_DOCKERFILE
    }
    sys.stdout.write("".join(f"{package}\n" for package in sorted(packages, key=str.lower)))


if __name__ == "__main__":
    main()
