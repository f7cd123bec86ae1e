"""Write the bill of materials of an image in CycloneDX, which most scanners read."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from cyclonedx.model.bom import Bom
from cyclonedx.model.component import Component, ComponentType
from cyclonedx.output import make_outputter
from cyclonedx.schema import OutputFormat, SchemaVersion
from cyclonedx.validation.json import JsonStrictValidator
from packageurl import PackageURL

_VERSION = SchemaVersion.V1_6


def main() -> None:
    """Read the output of docker/packages.py from stdin, and write both files."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("image", help="name of the image")
    parser.add_argument("bill", type=Path, help="file to write, *.cdx.json")
    parser.add_argument("requirements", type=Path, help="file to write with the Python packages, for pip-audit")
    options = parser.parse_args()
    packages = [PackageURL.from_string(line.strip()) for line in sys.stdin]
    if not packages:
        parser.error(f"{options.image} listed no packages: its Python did not run")
    image = Component(name=options.image, type=ComponentType.CONTAINER, bom_ref=options.image)
    parts = [Component(name=url.name, version=url.version, purl=url, bom_ref=url.to_string()) for url in packages]
    bill = Bom(components=parts)
    bill.metadata.component = image
    bill.register_dependency(image, parts)
    text = make_outputter(bill, OutputFormat.JSON, _VERSION).output_as_string(indent=2)
    if problem := JsonStrictValidator(_VERSION).validate_str(text):
        sys.exit(f"The bill of {options.image} is not valid: {problem}")
    options.bill.parent.mkdir(parents=True, exist_ok=True)
    options.bill.write_text(text, encoding="utf-8")
    python = [url for url in packages if url.type == "pypi" and url.name != "lightning-sm"]
    options.requirements.write_text("".join(f"{url.name}=={url.version}\n" for url in python), encoding="utf-8")
    sys.stdout.write(f"{options.bill}: {len(packages)} packages\n")


if __name__ == "__main__":
    main()
