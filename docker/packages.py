"""Print the address (package URL) of each package in this image: Debian's, conda's and Python's.

Run it with the image's Python; see ``make sbom``. Package URLs: https://github.com/package-url/purl-spec.
"""

import json
import subprocess
import sys
from importlib.metadata import distributions
from pathlib import Path
from urllib.parse import quote


def main() -> None:
    """Print a line for each package, sorted. What conda has installed for Python stands under both names.

    Known vulnerabilities are listed by the names of PyPI.
    """
    found = {*_debian(), *_conda(), *_python()}
    sys.stdout.write("".join(f"{line}\n" for line in sorted(found)))


def _debian() -> set[str]:
    query = ["dpkg-query", "--show", "--showformat", "${Package} ${Version} ${Architecture}\n"]
    lines = subprocess.run(query, check=True, capture_output=True, text=True).stdout.splitlines()
    packages = [line.split(" ") for line in lines]
    return {f"pkg:deb/debian/{name}@{quote(version)}?arch={arch}" for name, version, arch in packages}


def _conda() -> set[str]:
    records = [json.loads(file.read_text()) for file in Path(sys.prefix, "conda-meta").glob("*.json")]
    return {
        f"pkg:conda/{one['name']}@{quote(one['version'])}?build={one['build']}&subdir={one['subdir']}"
        for one in records
    }


def _python() -> set[str]:
    return {f"pkg:pypi/{one.name.lower().replace('_', '-')}@{quote(one.version)}" for one in distributions()}


if __name__ == "__main__":
    main()
