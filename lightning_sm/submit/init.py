"""``lightning-sm init``: a first job file for a script, with comments that say what to fill in.

What is needed to submit the job stands in angle brackets, which the checks of ``lightning-sm submit`` refuse.
"""

from __future__ import annotations

import argparse
import json
import os
import re
from collections.abc import Mapping
from pathlib import Path

from lightning_sm._log import command_logger
from lightning_sm._text import listed
from lightning_sm.errors import SubmitError
from lightning_sm.job.new_file import write_new

_LOG = command_logger(__name__)

EXAMPLES = """\
examples:
  lightning-sm init src/train.py             write job.yaml for this script, whose folder is sent with the job
  lightning-sm init                          for train.py in this folder, or its only Python file
  lightning-sm submit job.yaml --dry-run     then: fill in what stands in <...>, and check

exit codes: 0 the file is written, 2 it exists, or there is no such script"""
_USUAL = ("train.py", "main.py")
# The part of a job's name that the user chooses may have this many characters, as preflight checks.
_NAME_CHARS = 39
_DEFAULT_NAME = "lightning"
# Read as text by every YAML parser; everything else is quoted.
_PLAIN = re.compile(r"\.|(\.\./)*(\.\.|[A-Za-z_][\w-]*(/\w[\w-]*)*(\.[A-Za-z]\w*)?)", re.ASCII)
_NOT_TEXT = {"true", "false", "null", "yes", "no", "on", "off", "y", "n"}

_FILE = """\
# The job of {script}. Fill in what stands in <...>; then:
#   lightning-sm submit {file} --dry-run                  checks everything, and sends nothing
#   lightning-sm submit {file} --local --image=<image>    runs the job here, in containers
#   lightning-sm submit {file}                            submits it
# All keys: lightning-sm submit --help
name: {name}

# An image with lightning_sm in Amazon ECR, and the role that the job runs under.
image: <account>.dkr.ecr.{region}.amazonaws.com/lightning-sm:latest
role: arn:aws:iam::<account>:role/<role>

# The folder is sent with the job, all of it; the image starts the script in it.
source_dir: {source_dir}
script: {program}
# Packages that the image lacks: name them in a file requirements.txt in this folder.

# Hosts that train. To build the batches on CPU hosts, add: data: {{instance_type: ml.c6i.4xlarge}}
groups:
  trainer: {{instance_type: ml.g5.xlarge, count: 1}}

# The files of a channel are at /opt/ml/input/data/<channel> on the hosts (SM_CHANNEL_<CHANNEL>).
# channels:
#   training: {{uri: s3://<bucket>/<prefix>}}

# Options of the script, such as --data.batch_size=64; config is a file of them, for LightningCLI and SageMakerCLI.
# config: config.yaml
# hyperparameters: {{data.batch_size: 64}}

# A job that was interrupted, or is submitted again, goes on from its checkpoints there. Model and output go to the
# account's own bucket, unless output names another address.
checkpoints: s3://<bucket>/{name}/checkpoints
# output: s3://<bucket>/{name}/output

# The job ends after this time, in seconds. At prices of a host and hour, submit says what it can cost, and max_cost
# refuses more.
max_run_s: 3600
# prices: {{ml.g5.xlarge: <price>}}
# max_cost: 20

# Spot capacity is cheaper, and may be interrupted; max_wait_s includes waiting and restarts.
# spot: {{max_wait_s: 7200}}
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of the command."""
    parser.add_argument(
        "script",
        nargs="?",
        type=Path,
        metavar="SCRIPT",
        help="training script (default: train.py or main.py in this folder, or its only Python file)",
    )
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
    script = _script_here() if options.script is None else options.script
    text = first_job_file(script, file, os.environ)
    write_new(file, text)
    _LOG.info(
        "Wrote %s for %s. Fill in what stands in <...>; then: lightning-sm submit %s --dry-run", file, script, file
    )
    return 0


def first_job_file(script: Path, file: Path, environment: Mapping[str, str]) -> str:
    """Return the text of a job file for a script.

    Args:
        script: The training script.
        file: Where the job file will be; ``source_dir`` starts from its folder.
        environment: Environment variables, of which the region is read.

    Raises:
        SubmitError: There is no such script, or a job file cannot name it.
    """
    if not script.is_file():
        raise SubmitError(f"There is no file {script}; expected the path of a training script.")
    folder = _source_folder(script)
    program = script.absolute().relative_to(folder).as_posix()
    source_dir = Path(os.path.relpath(folder, file.absolute().parent)).as_posix()
    return _FILE.format(
        script=_value(program),
        file=_value(file.name),
        name=_job_name(folder, script),
        region=environment.get("AWS_DEFAULT_REGION") or "<region>",
        source_dir=_value(source_dir),
        program=_value(program),
    )


def _script_here() -> Path:
    """Return the script of this folder that is most likely meant."""
    names = sorted(path.name for path in Path().glob("*.py") if path.is_file())
    usual = [name for name in _USUAL if name in names]
    if not usual and len(names) != 1:
        found = f"has {listed(names)}" if names else "has no Python file"
        raise SubmitError(f"This folder {found}. Name the training script: lightning-sm init SCRIPT.")
    return Path((usual or names)[0])


def _source_folder(script: Path) -> Path:
    """Return the folder to send: that of the script; of a script in a package, the folder that has the package.

    The hosts have this folder on ``PYTHONPATH``, so the package can be imported by its name.
    """
    folder = script.absolute().parent
    while (folder / "__init__.py").is_file() and folder != folder.parent:
        folder = folder.parent
    return folder


def _job_name(folder: Path, script: Path) -> str:
    """Return the start of the job's name: after the script, or after its folder if many scripts have that name."""
    for name in (folder.name if script.name in _USUAL else script.stem, script.stem):
        cleaned = re.sub(r"[^a-zA-Z0-9]+", "-", name).strip("-")[:_NAME_CHARS].strip("-")
        # A name of digits alone would be read as a number.
        if cleaned[:1].isalpha() and cleaned.lower() not in _NOT_TEXT:
            return cleaned
    return _DEFAULT_NAME


def _value(path: str) -> str:
    """Return a path as a value of a YAML file, on one line.

    Raises:
        SubmitError: It has characters that a YAML file cannot have.
    """
    if _PLAIN.fullmatch(path) and path.lower() not in _NOT_TEXT:
        return path
    if not path.isprintable():
        raise SubmitError(f"A job file cannot contain the path {path!r}: it has characters that are not printable.")
    return json.dumps(path, ensure_ascii=False)
