"""The container's entry point, ``lightning-sm train``: one training script on this host, from start to exit code.

SageMaker runs ``docker run <image> train`` on every host. The launcher turns ``hyperparameters.json`` into a command
line, starts the script in a process group of its own, passes signals on, and leaves the reason of a failure where
the service looks for it. It does the same on trainer and data hosts: the script itself knows the role of its host.
"""

from __future__ import annotations

import importlib.metadata
import logging
import os
import platform
import shlex
import signal
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from lightning_sm.arguments import job_arguments
from lightning_sm.child_process import ChildProcess
from lightning_sm.errors import HyperparameterError, JobConfigError, LightningSMError, ScriptError
from lightning_sm.failure import failure_reason
from lightning_sm.hyperparameters import unquoted
from lightning_sm.job import SageMakerJob, base_directory
from lightning_sm.peers.endings import Outcome, Verdict
from lightning_sm.peers.links import Timings
from lightning_sm.peers.star import Peers, peers_port
from lightning_sm.prctl import EMULATOR_VARIABLE, end_with_emulator
from lightning_sm.rendezvous import own_address
from lightning_sm.topology import Role, Topology

_LOG = logging.getLogger(__name__)

_USAGE_EXIT_CODE = 2
# Seconds to wait, after the script, for hosts that were never heard of.
_FAREWELL_VARIABLE = "LIGHTNING_SM_FAREWELL_S"


def train(script: str | None, args: Sequence[str], env: Mapping[str, str] = os.environ) -> int:
    """Run the training script of this host and return the exit code for the container.

    Args:
        script: Path of the script. Default: ``SAGEMAKER_PROGRAM``, else the hyperparameter ``sagemaker_program``.
        args: Arguments for the script; those made from the hyperparameters follow, and win.
        env: Environment variables.

    Returns:
        The script's exit code; 128 + n if signal n killed it; 2 if it could not be started.
    """
    if not end_with_emulator(env):
        return 128 + signal.SIGTERM
    output_dir = _output_dir(env)
    try:
        job = SageMakerJob.from_environment(env)
        if job is None:
            raise JobConfigError(
                "This is not a SageMaker host: neither SM_RESOURCE_CONFIG nor SM_HOSTS is set, and there is no "
                f"{base_directory(env) / 'input' / 'config' / 'resourceconfig.json'}. "
                "To run a cluster on this machine: lightning-sm local --group trainer=2 -- app/train.py fit"
            )
        output_dir = job.output_dir
        ending = _run(job, Topology.from_job(job), script, args, env)
    except LightningSMError as error:
        _LOG.error("lightning-sm: error: %s", error)
        ending = Outcome(_USAGE_EXIT_CODE, f"{type(error).__name__}: {error}")
    if ending.exit_code != 0:
        if output_dir is not None:
            _write_failure(output_dir, ending.reason)
        _LOG.error("lightning-sm: this host failed with exit code %d.", ending.exit_code)
    return ending.exit_code


def _run(
    job: SageMakerJob, topology: Topology, script: str | None, args: Sequence[str], env: Mapping[str, str]
) -> Outcome:
    """Run the script, and agree with the launchers of the other hosts on how the job ended."""
    child: ChildProcess | None = None
    try:
        path, directory = find_script(script, job, env)
        argv = command_line(args, job, directory)
        _LOG.info("%s", _banner(job, topology, path, argv))
        command = [sys.executable, "-u", str(path), *argv]
        child = ChildProcess(command, directory, _child_environment(env, directory), env.get(EMULATOR_VARIABLE))
    except LightningSMError as error:
        with _peers(job, topology, env, lambda _: None) as peers:
            peers.report(Outcome(_USAGE_EXIT_CODE, f"{type(error).__name__}: {error}"))
            peers.farewell()
        raise
    script_of_host = child

    def heed(verdict: Verdict) -> None:
        # A data host has nothing left to do, whatever became of the training.
        if verdict.host != job.current_host and (verdict.is_failure or topology.role is Role.DATA):
            script_of_host.end()

    with _peers(job, topology, env, heed) as peers:
        child.late_signal = peers.leave
        exit_code = child.run()
        if child.is_ended and topology.role is Role.DATA:
            exit_code = 0
        own = Outcome(exit_code, _reason(child, exit_code) if exit_code else "")
        peers.report(own)
        verdict = peers.farewell()
    return _ending(job, topology, child, own, verdict)


def _ending(
    job: SageMakerJob, topology: Topology, child: ChildProcess, own: Outcome, verdict: Verdict | None
) -> Outcome:
    """How the host ends: a trainer's host never looks successful when another one failed."""
    is_elsewhere = verdict is not None and verdict.is_failure and verdict.host != job.current_host
    if verdict is None or not is_elsewhere or topology.role is Role.DATA:
        return own
    if child.stopped_by is not None and own.exit_code:
        return own  # all hosts were stopped; it does not matter who was the first
    return Outcome(
        own.exit_code or 1,
        f"Host {verdict.host} was the first to fail, with exit code {verdict.exit_code}: {verdict.reason}",
    )


def _peers(
    job: SageMakerJob, topology: Topology, env: Mapping[str, str], on_verdict: Callable[[Verdict], None]
) -> Peers:
    text = env.get(_FAREWELL_VARIABLE, "10")
    try:
        timings = Timings(farewell_s=float(text))
    except ValueError as error:
        raise JobConfigError(f"{_FAREWELL_VARIABLE}={text!r} is no number of seconds.") from error
    return Peers(
        job_identity=job.name or "unnamed",
        own=job.current_host,
        trainers=topology.trainer_hosts,
        data_hosts=topology.data_hosts,
        main_host=topology.main_host,
        addresses=job.addresses,
        port=peers_port(topology.main_port),
        bind=own_address(job),
        on_verdict=on_verdict,
        timings=timings,
    )


def find_script(script: str | None, job: SageMakerJob, env: Mapping[str, str]) -> tuple[Path, Path]:
    """Find the training script and the directory to start it in.

    Args:
        script: Path from the command line, or None to look where SageMaker names it.
        job: The facts.
        env: Environment variables.

    Returns:
        The absolute path of the script, and the folder that its relative path starts from.

    Raises:
        ScriptError: No script was named, it is not where it could be, or it is no Python file.
    """
    name = script or env.get("SAGEMAKER_PROGRAM") or unquoted(job.hyperparameters.get("sagemaker_program"))
    if not name:
        raise ScriptError(
            "No training script is named. Name it on the command line (lightning-sm train app/train.py), in "
            "SAGEMAKER_PROGRAM, or in the hyperparameter sagemaker_program."
        )
    if not name.endswith(".py"):
        raise ScriptError(f"The training script {name!r} is no Python file (*.py); only those can be started.")
    submit_dir = env.get("SAGEMAKER_SUBMIT_DIRECTORY")
    folders = [Path.cwd()]
    if submit_dir and "://" not in submit_dir:  # else the address of an archive in S3
        folders.append(Path(submit_dir).absolute())
    folders.append(job.code_dir.absolute())
    for folder in folders:
        if (folder / name).is_file():
            return folder / name, folder
    tried = list(dict.fromkeys(str(folder / name) for folder in folders))
    raise ScriptError(f"The training script {name!r} does not exist. Tried: {', '.join(tried)}.")


def command_line(args: Sequence[str], job: SageMakerJob, directory: Path) -> list[str]:
    """Build the arguments of the training script.

    Args:
        args: Arguments given to the launcher; they come first.
        job: The facts: hyperparameters, and the ``config`` channel whose files become ``--config`` options.
        directory: Folder that the script is started in.

    Raises:
        HyperparameterError: A hyperparameter cannot become an argument, or the hyperparameter ``subcommand``
            contradicts the one in ``args``.
    """
    resolved = job_arguments(job, directory)
    if not resolved or resolved[0].startswith("-"):
        return [*args, *resolved]
    subcommand, *options = resolved
    if not args or args[0].startswith("-"):
        return [subcommand, *args, *options]
    if args[0] != subcommand:
        raise HyperparameterError(
            f"The hyperparameter subcommand is {subcommand!r}, but the command line says {args[0]!r}. Remove one."
        )
    return [*args, *options]


def _reason(child: ChildProcess, exit_code: int) -> str:
    reason = failure_reason(child.stderr_tail, exit_code)
    if child.stopped_by is None:
        return reason
    return f"The job was stopped or interrupted ({signal.Signals(child.stopped_by).name}). {reason}"


def _child_environment(env: Mapping[str, str], directory: Path) -> dict[str, str]:
    # Python puts the script's own folder on sys.path; "from app.model import X" needs the one above app as well.
    paths = [str(directory), *filter(None, [env.get("PYTHONPATH")])]
    kept = {name: value for name, value in env.items() if name != EMULATOR_VARIABLE}
    return {**kept, "PYTHONPATH": os.pathsep.join(paths)}


def _banner(job: SageMakerJob, topology: Topology, script: Path, argv: Sequence[str]) -> str:
    role = topology.role
    rank = f", node rank {topology.node_rank} of {topology.num_nodes}" if role is Role.TRAINER else ""
    found = filter(None, map(_version, ("lightning-sm", "torch", "pytorch-lightning", "lightning")))
    versions = [*found, f"Python {platform.python_version()}"]
    place = f"host {job.current_host}, group {job.current_group.name}, role {role.value}{rank}"
    return f"{', '.join(versions)} | {place} | {shlex.join([str(script), *argv])}"


def _version(distribution: str) -> str | None:
    try:  # from the metadata: importing torch takes seconds
        return f"{distribution} {importlib.metadata.version(distribution)}"
    except importlib.metadata.PackageNotFoundError:
        return None


def _output_dir(env: Mapping[str, str]) -> Path | None:
    base = base_directory(env)
    return base / "output" if (base / "input" / "config").is_dir() else None


def _write_failure(output_dir: Path, reason: str) -> None:
    """Leave the reason where the service reads it, unless the script left its own."""
    path = output_dir / "failure"
    try:
        if path.exists():
            return
        output_dir.mkdir(parents=True, exist_ok=True)
        path.write_text(reason[:1024], encoding="utf-8", errors="replace")
    except OSError as error:
        _LOG.warning("lightning-sm: %s cannot be written (%s); the reason was: %s", path, error, reason)
