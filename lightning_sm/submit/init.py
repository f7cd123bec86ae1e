"""``lightning-sm init``, which writes a first job file for a script, with comments on what to fill in.

Required values are placeholders in angle brackets, which ``lightning-sm submit`` rejects until you fill them in.
"""

from __future__ import annotations

import argparse
import json
import os
import re
from collections.abc import Mapping
from importlib import resources
from pathlib import Path

from lightning_sm._log import command_logger
from lightning_sm.errors import SubmitError
from lightning_sm.job.new_file import write_new

_LOG = command_logger(__name__)

EXAMPLES = """\
examples:
  lightning-sm init src/train.py             write job.yaml for this script, whose folder is sent with the job
  lightning-sm submit job.yaml --dry-run     check it, once you have filled in each <...>

exit codes: 0 the file was written, 2 it already exists, or there is no such script"""
# The maximum length of ``name`` in a job file, as enforced by ``preflight``, whose imports ``--help`` does not need.
_NAME_CHARS = 39


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's options."""
    parser.add_argument("script", type=Path, metavar="SCRIPT", help="training script")
    parser.add_argument(
        "-o", "--output", type=Path, default=Path("job.yaml"), metavar="FILE", help="default: job.yaml; must not exist"
    )


def main(options: argparse.Namespace) -> int:
    """Write the job file and return the exit code.

    Raises:
        OutputDirectoryError: The file exists or cannot be written.
        SubmitError: There is no such script.
    """
    file: Path = options.output
    write_new(file, first_job_file(options.script, file, os.environ))
    _LOG.info("Wrote %s for %s. Fill in each <...>; then: lightning-sm submit %s --dry-run", file, options.script, file)
    return 0


def first_job_file(script: Path, file: Path, environment: Mapping[str, str]) -> str:
    """Return the text of a job file for a script.

    Args:
        script: The training script.
        file: Path of the job file; ``source_dir`` is relative to its folder.
        environment: Environment variables, used to find the region.

    Raises:
        SubmitError: There is no such script.
    """
    if not script.is_file():
        raise SubmitError(f"There is no file {script}; expected the path of a training script.")
    name = re.sub(r"[^a-zA-Z0-9]+", "-", script.stem)[:_NAME_CHARS].strip("-")
    source_dir = os.path.relpath(script.absolute().parent, file.absolute().parent)
    template = resources.files(__package__).joinpath("first_job.yaml").read_text(encoding="utf-8")
    return template.format(
        # A JSON string is valid YAML, whatever characters a path contains.
        script=json.dumps(script.name, ensure_ascii=False),
        source_dir=json.dumps(source_dir, ensure_ascii=False),
        file=file.name,
        name=name or "lightning",
        region=environment.get("AWS_DEFAULT_REGION") or "<region>",
    )
