"""Print the package URL of each package in this image, from Debian, conda and Python.

Run it with the image's Python; see ``make sbom``. Package URLs: https://github.com/package-url/purl-spec.
"""

import json
import subprocess
import sys
from importlib.metadata import distributions
from pathlib import Path
from urllib.parse import quote


def main() -> None:
    """Print a line for each package, sorted.

    Python packages from conda appear twice, because known vulnerabilities are listed by the names on PyPI.
    """
    urls = {*_debian(), *_conda(), *_python()}
    sys.stdout.write("".join(f"{url}\n" for url in sorted(urls)))


def _debian() -> set[str]:
    query = ["dpkg-query", "--show", "--showformat", "${Package} ${Version} ${Architecture}\n"]
    lines = subprocess.run(query, check=True, capture_output=True, text=True).stdout.splitlines()
    packages = [line.split(" ") for line in lines]
    return {f"pkg:deb/debian/{name}@{quote(version)}?arch={arch}" for name, version, arch in packages}


def _conda() -> set[str]:
    records = [json.loads(file.read_text()) for file in Path(sys.prefix, "conda-meta").glob("*.json")]
    return {
        f"pkg:conda/{record['name']}@{quote(record['version'])}?build={record['build']}&subdir={record['subdir']}"
        for record in records
    }


def _python() -> set[str]:
    return {f"pkg:pypi/{dist.name.lower().replace('_', '-')}@{quote(dist.version)}" for dist in distributions()}


if __name__ == "__main__":
    main()
