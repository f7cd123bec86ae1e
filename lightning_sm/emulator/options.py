"""The command line of ``lightning-sm local``, checked in full before any host starts."""

from __future__ import annotations

import argparse
import json
import os
import re
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from lightning_sm.emulator import faults
from lightning_sm.emulator.cluster import ClusterSpec, LocalCluster
from lightning_sm.emulator.runner import run
from lightning_sm.errors import HyperparameterError, JobConfigError, ScriptError
from lightning_sm.job.emulated_service import DEFAULT_INSTANCE_TYPE, GroupSpec

EXAMPLES = f"""\
examples:
  two trainer hosts, one process each:
    lightning-sm local --group trainer=2 -- app/train.py fit --config app/configs/digits.yaml
  two trainer hosts and one that serves data, with an input channel:
    lightning-sm local --group trainer=2 --group data=1 --channel training=./data -- app/train.py fit
  arguments as SageMaker passes them, in a file:
    lightning-sm local --hyperparameters hyperparameters.yaml -- app/train.py
  a spot interruption after 20 steps, and the attempt that goes on from the checkpoint:
    lightning-sm local --group trainer=2 --fault interrupt@step=20,skew=0.5 -- app/train.py fit

{faults.HELP}"""

_GROUP = re.compile(r"(?P<name>[A-Za-z0-9][A-Za-z0-9._-]*)=(?P<count>\d{1,4})(?::(?P<type>ml\.[a-z0-9.-]+))?")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of the emulator.

    Args:
        parser: The parser of the subcommand.
    """
    parser.add_argument(
        "--group",
        action="append",
        default=[],
        metavar="NAME=COUNT[:TYPE]",
        help=f"instance group, repeatable (default: trainer=1; instance type: {DEFAULT_INSTANCE_TYPE}); hosts of a "
        "group whose name starts with 'data' serve data",
    )
    parser.add_argument("--devices", type=int, default=1, help="processes on each trainer host (default: 1)")
    parser.add_argument("--hyperparameters", metavar="FILE", help="JSON or YAML file with the job's hyperparameters")
    parser.add_argument(
        "--channel",
        action="append",
        default=[],
        metavar="NAME=DIR",
        help="input channel, repeatable; shared by all hosts",
    )
    parser.add_argument(
        "--env", action="append", default=[], metavar="NAME=VALUE", help="variable for all hosts, repeatable"
    )
    parser.add_argument("--checkpoints", metavar="DIR", help="checkpoint folder of all hosts, kept (default: none)")
    _add_fault_arguments(parser)
    parser.add_argument(
        "--base-dir", metavar="DIR", help="where the folders of the hosts are made (default: a temporary folder)"
    )
    parser.add_argument("--seed", type=int, help="repeat the draw of which host lands in which group")
    parser.add_argument("--keep", action="store_true", help="keep the folders of the hosts after success, too")
    parser.add_argument(
        "command", nargs=argparse.REMAINDER, metavar="-- SCRIPT [ARGS]", help="training script and its arguments"
    )


def _add_fault_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--fault", action="append", default=[], help="bring a fault about, repeatable; see below")
    parser.add_argument(
        "--grace-s",
        type=float,
        default=faults.SERVICE_GRACE_S,
        metavar="SECONDS",
        help=f"between SIGTERM and SIGKILL of an interruption (default: {faults.SERVICE_GRACE_S:g}, as the service)",
    )
    parser.add_argument(
        "--max-attempts",
        type=int,
        metavar="N",
        help="how often the job starts at most (default: once more than it is interrupted or restarted)",
    )


def main(options: argparse.Namespace) -> int:
    """Emulate the job that the options describe, and return its exit code.

    Args:
        options: What the parser of ``add_arguments`` made of the command line.

    Raises:
        LightningSMError: An option is wrong; nothing was started.
    """
    if sys.platform != "linux":
        raise JobConfigError(f"lightning-sm local needs Linux (process groups, 127.0.0.x); this is {sys.platform}.")
    script, *args = options.command or [""]
    _check_script(script)
    base_dir = Path(options.base_dir or Path(tempfile.gettempdir()) / f"lightning-sm-{os.getuid()}")
    settings = faults.FaultSettings(tuple(map(faults.parse, options.fault)), options.grace_s, options.max_attempts)
    spec = _spec(options, settings)
    faults.check(settings, {group.name: group.num_hosts for group in spec.groups}, spec.devices)
    with LocalCluster(spec, base_dir) as cluster:
        return run(cluster, [script, *args], keep=options.keep, settings=settings)


def _spec(options: argparse.Namespace, settings: faults.FaultSettings) -> ClusterSpec:
    return ClusterSpec(
        groups=[_group(text) for text in options.group] or [GroupSpec("trainer", 1)],
        devices=options.devices,
        hyperparameters=_read_hyperparameters(Path(options.hyperparameters)) if options.hyperparameters else {},
        channels={name: Path(folder) for name, folder in _pairs("--channel", "NAME=DIR", options.channel).items()},
        checkpoint_dir=Path(options.checkpoints) if options.checkpoints else None,
        keeps_checkpoints=settings.needs_checkpoints,
        environment=_pairs("--env", "NAME=VALUE", options.env),
        seed=options.seed,
    )


def _group(text: str) -> GroupSpec:
    match = _GROUP.fullmatch(text)
    if match is None:
        raise JobConfigError(
            f"--group {text!r}: expected NAME=COUNT or NAME=COUNT:TYPE, such as data=1:{DEFAULT_INSTANCE_TYPE}."
        )
    return GroupSpec(match["name"], int(match["count"]), match["type"] or DEFAULT_INSTANCE_TYPE)


def _pairs(option: str, form: str, texts: Sequence[str]) -> dict[str, str]:
    pairs: dict[str, str] = {}
    for text in texts:
        name, separator, value = text.partition("=")
        if not name or not separator or "\0" in text:
            raise JobConfigError(f"{option} {text!r}: expected {form}.")
        if name in pairs:
            raise JobConfigError(f"{option} {text!r}: {name!r} is named twice.")
        pairs[name] = value
    return pairs


def _read_hyperparameters(path: Path) -> dict[str, Any]:
    try:
        text = path.read_text(encoding="utf-8")
        values = json.loads(text) if path.suffix == ".json" else _yaml(text)
    except (OSError, ValueError) as error:
        raise HyperparameterError(f"--hyperparameters {path}: {error}") from error
    if not isinstance(values, dict) or not all(isinstance(name, str) for name in values):
        raise HyperparameterError(f"--hyperparameters {path}: expected names and values, got {type(values).__name__}.")
    return values


def _yaml(text: str) -> Any:
    import yaml  # noqa: PLC0415 - 20 ms that only a YAML file needs

    try:
        return yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise ValueError(f"not valid YAML ({error})") from error


def _check_script(script: str) -> None:
    """Refuse here what would otherwise fail on every host at once."""
    if not script:
        raise ScriptError("No training script is named: lightning-sm local --group trainer=2 -- app/train.py fit")
    path = Path(script)
    if path.suffix not in {".py", ".sh"}:
        raise ScriptError(f"The training script {script!r} is neither a Python file (*.py) nor a shell script (*.sh).")
    try:
        content = path.read_bytes()
        if path.suffix == ".py":
            compile(content, script, "exec", dont_inherit=True)
    except OSError as error:
        raise ScriptError(f"The training script {script!r} cannot be read: {error.strerror}.") from error
    except SyntaxError as error:
        raise ScriptError(f"{script}:{error.lineno}: {error.msg}") from error
    except ValueError as error:  # NUL bytes, in Python 3.10 and 3.11
        raise ScriptError(f"{script}: {error}") from error
