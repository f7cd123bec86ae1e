"""The options of ``lightning-sm local``, all checked before any host starts."""

from __future__ import annotations

import argparse
import re
from collections.abc import Sequence
from pathlib import Path

from lightning_sm.emulator import faults
from lightning_sm.emulator.cluster import LocalCluster
from lightning_sm.emulator.container_hosts import ContainerRuntime
from lightning_sm.emulator.hosts import HostRuntime
from lightning_sm.emulator.process_hosts import ProcessRuntime
from lightning_sm.emulator.run_folders import MAX_RUNS, default_parent, remove_old_runs
from lightning_sm.emulator.runner import run
from lightning_sm.emulator.spec import ClusterSpec
from lightning_sm.errors import JobConfigError
from lightning_sm.job.emulated_service import DEFAULT_INSTANCE_TYPE, GroupSpec
from lightning_sm.job.redaction import shown_arguments
from lightning_sm.job.variables import SERVICE_GRACE_S
from lightning_sm.job.yaml_file import read_mapping

EXAMPLES = f"""\
examples:
  two trainer hosts with one process each:
    lightning-sm local --group trainer=2 -- app/train.py fit --config app/configs/digits.yaml
  two trainer hosts, one data host, and an input channel:
    lightning-sm local --group trainer=2 --group data=1 --channel training=./data -- app/train.py fit
  hyperparameters from a file, passed to the script as SageMaker would:
    lightning-sm local --hyperparameters hyperparameters.yaml -- app/train.py
  a spot interruption after 20 steps, and a second attempt that resumes from the checkpoint:
    lightning-sm local --group trainer=2 --fault interrupt@step=20,skew=0.5 -- app/train.py fit
  two trainer hosts as containers, with the packages and operating system of an image:
    lightning-sm local --image lightning-sm --group trainer=2 -- app/train.py fit

{faults.HELP}"""

_GROUP = re.compile(r"(?P<name>[A-Za-z0-9][A-Za-z0-9._-]*)=(?P<count>\d{1,4})(?::(?P<type>ml\.[a-z0-9.-]+))?")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the emulator's options to the subcommand's parser."""
    parser.add_argument(
        "--group",
        action="append",
        default=[],
        metavar="NAME=COUNT[:TYPE]",
        help=f"instance group, repeatable (default: trainer=1; default instance type: {DEFAULT_INSTANCE_TYPE}); hosts "
        "of groups named data* serve data",
    )
    parser.add_argument(
        "--image",
        help="run each host as a container of this local Docker image; without SCRIPT, the hosts run the "
        "image's own script",
    )
    parser.add_argument("--devices", type=int, default=1, help="processes per trainer host (default: 1)")
    parser.add_argument("--hyperparameters", metavar="FILE", help="JSON or YAML file with the job's hyperparameters")
    parser.add_argument(
        "--channel", action="append", default=[], metavar="NAME=DIR", help="input channel of all hosts, repeatable"
    )
    parser.add_argument(
        "--env", action="append", default=[], metavar="NAME=VALUE", help="environment variable of all hosts, repeatable"
    )
    parser.add_argument(
        "--checkpoints",
        metavar="DIR",
        help="folder that stands in for the checkpoints' location in S3 (default: none); each host starts with a copy, "
        "and an agent uploads changed files",
    )
    parser.add_argument(
        "--upload-delay",
        type=float,
        metavar="SECONDS",
        help="how long the upload of a checkpoint file takes (default: 0)",
    )
    parser.add_argument("--fault", action="append", default=[], help="inject a fault, repeatable; see below")
    parser.add_argument(
        "--grace-s",
        type=float,
        default=SERVICE_GRACE_S,
        metavar="SECONDS",
        help=f"time from SIGTERM to SIGKILL in an interruption (default: {SERVICE_GRACE_S:g}, as on SageMaker)",
    )
    parser.add_argument(
        "--base-dir",
        metavar="DIR",
        help=f"parent folder of the run folders (default: a temporary folder that keeps the last {MAX_RUNS} runs)",
    )
    parser.add_argument("--seed", type=int, help="seed for the random assignment of hosts to groups")
    parser.add_argument(
        "--discard", action="store_true", help="delete the folders of a run that succeeds, including the model"
    )
    parser.add_argument(
        "command", nargs=argparse.REMAINDER, metavar="-- SCRIPT [ARGS]", help="training script and its arguments"
    )


def check_order(options: argparse.Namespace) -> None:
    """Reject emulator options after a script without ``--``, because they would be passed to the script.

    Raises:
        JobConfigError: There is such an option.
    """
    script, *args = options.command or [""]
    own = next((word for word in args if word.partition("=")[0] in options.own_options), None)
    if own is not None:
        before = " ".join(shown_arguments(args[: args.index(own)]))
        raise JobConfigError(
            f"{own} comes after {script}, so the script would get it. If it is for lightning-sm, put it before the "
            f"script: lightning-sm local {own} ... -- {script} {before}".rstrip()
            + f". If it is for the script: lightning-sm local -- {script} {f'{before} ' if before else ''}{own} ..."
        )


def main(options: argparse.Namespace) -> int:
    """Emulate the job that the options describe, and return its exit code.

    Raises:
        LightningSMError: An option is invalid; nothing was started.
    """
    base_dir = Path(options.base_dir).expanduser() if options.base_dir else default_parent()
    spec, settings, runtime = _job_of(options)
    with LocalCluster(spec, base_dir, runtime) as cluster:
        if not options.base_dir:
            remove_old_runs(base_dir)
        return run(cluster, options.command, settings, discard=options.discard)


def _job_of(options: argparse.Namespace) -> tuple[ClusterSpec, faults.FaultSettings, HostRuntime]:
    """Return the cluster and faults that the options describe, and the system that runs the hosts.

    Raises:
        LightningSMError: An option is invalid.
    """
    code = Path.cwd() if options.command else None
    runtime = ContainerRuntime(options.image, code) if options.image else ProcessRuntime()
    runtime.check_command(options.command)
    settings = faults.FaultSettings(tuple(map(faults.parse, options.fault)), options.grace_s)
    channels = _pairs("--channel", "NAME=DIR", options.channel)
    hyperparameters = options.hyperparameters
    spec = ClusterSpec(
        groups=[_group(text) for text in options.group] or [GroupSpec("trainer", 1)],
        devices=options.devices,
        hyperparameters=read_mapping(Path(hyperparameters), "hyperparameter file") if hyperparameters else {},
        channels={name: Path(folder) for name, folder in channels.items()},
        bucket=Path(options.checkpoints) if options.checkpoints else None,
        keeps_checkpoints=settings.needs_checkpoints or options.upload_delay is not None,
        upload_delay_s=options.upload_delay or 0.0,
        environment=_pairs("--env", "NAME=VALUE", options.env),
        seed=options.seed,
    )
    faults.check(settings, {group.name: group.num_hosts for group in spec.groups}, options.devices)
    return spec, settings, runtime


def _group(text: str) -> GroupSpec:
    match = _GROUP.fullmatch(text)
    if match is None:
        raise JobConfigError(f"--group {text!r}: expected NAME=COUNT[:TYPE], such as data=1:{DEFAULT_INSTANCE_TYPE}.")
    return GroupSpec(match["name"], int(match["count"]), match["type"] or DEFAULT_INSTANCE_TYPE)


def _pairs(option: str, form: str, texts: Sequence[str]) -> dict[str, str]:
    pairs: dict[str, str] = {}
    for text in texts:
        name, separator, value = text.partition("=")
        argument = f"{option} {shown_arguments([text])[0]!r}"
        if not name or not separator or "\0" in text:
            raise JobConfigError(f"{argument}: expected {form}.")
        if name in pairs:
            raise JobConfigError(f"{argument}: {name!r} is given twice.")
        pairs[name] = value
    return pairs
