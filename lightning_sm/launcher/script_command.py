"""The command that runs the training script: program, arguments and environment."""

from __future__ import annotations

import logging
import os
import platform
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from lightning_sm._installed import installed_version
from lightning_sm._linux import usable_cpus
from lightning_sm._log import command_logger
from lightning_sm.errors import HyperparameterError
from lightning_sm.job.command_line import job_arguments, secret_options, without_options
from lightning_sm.job.control_folder import ControlFolder
from lightning_sm.job.facts import SageMakerJob
from lightning_sm.job.hash_seed import hash_seed
from lightning_sm.job.overrides import to_overrides
from lightning_sm.job.rank_starter import host_variables, rank_variables
from lightning_sm.job.redaction import shown_arguments
from lightning_sm.job.topology import Role, Topology
from lightning_sm.job.variables import CONTROL_DIR, DEVICES, HIDDEN_OPTIONS
from lightning_sm.launcher.host_record import HostRecord
from lightning_sm.launcher.toolkit.distribution import exported_variables, processes_per_host
from lightning_sm.launcher.toolkit.variables import toolkit_variables
from lightning_sm.launcher.user_code.prepare import Preparation
from lightning_sm.launcher.user_code.script import Program, Script, find_program, find_script, find_submission
from lightning_sm.launcher.user_code.script_kind import Parser, parser_of

_LOG = command_logger(__name__)

_THREADS = "OMP_NUM_THREADS"


@dataclass(frozen=True)
class ScriptCommand:
    """The command that runs the script.

    Attributes:
        arguments: Program and arguments.
        directory: Working directory.
        env: Environment.
        processes: Additional environment variables of each process; one process is started for each item.
        hidden: Secret options that are not on the command line, because SageMakerCLI reads them from the job.
    """

    arguments: Sequence[str]
    directory: Path
    env: Mapping[str, str]
    processes: Sequence[Mapping[str, str]]
    hidden: Sequence[str]


@dataclass(frozen=True)
class CommandBuilder:
    """A builder for the script's command, which first fetches the code and installs its requirements.

    Attributes:
        job: The job.
        topology: The job's hosts.
        env: Environment of the launcher.
        preparation: Fetches the code and installs its requirements.
        record: The record of the run.
        control: The control folder.
    """

    job: SageMakerJob
    topology: Topology
    env: Mapping[str, str]
    preparation: Preparation
    record: HostRecord
    control: ControlFolder

    def build(self, name: str | None, args: Sequence[str]) -> ScriptCommand:
        """Fetch the code, install its requirements, and return the command.

        Args:
            name: Path of the script, if the launcher was given one.
            args: Arguments given to the launcher.

        Raises:
            LightningSMError: The script could not be found or fetched, or its arguments are invalid.
            Stopped: The host was told to stop before the script could start.
        """
        job = self.job
        program = find_program(name, job, self.env)
        submission = find_submission(job, self.env)
        folder = None if submission is None else self.preparation.fetch(submission, job)
        script = find_script(program, job, self.env, folder)
        parser = parser_of(script)
        argv = hydra_command_line(args, job) if parser is Parser.HYDRA else command_line(args, job, script.directory)
        command = shown_arguments([str(script.path), *argv])
        self.record.began(command)
        banner = _banner(job, self.topology)  # not logged by ``_LOG``, which would repeat the command's name
        logging.getLogger("lightning_sm").info("%s | %s", banner, shlex.join(command))
        devices = processes_per_host(job, self.topology)
        self.preparation.install(script)
        self.preparation.check_not_stopped("starting the script")
        env = self._environment(program, script, argv, devices)
        processes = variables_of_processes(job, self.topology, script, devices, env)
        hidden = self._hidden_options(parser, argv, args)
        env[HIDDEN_OPTIONS.name] = ",".join(hidden)
        command = [*script.command, *without_options(argv, hidden)]
        return ScriptCommand(command, script.directory, env, processes, hidden)

    def _hidden_options(self, parser: Parser, argv: Sequence[str], args: Sequence[str]) -> tuple[str, ...]:
        """Return the secret hyperparameters among the arguments, if the script reads them from the job."""
        names = secret_options([argument for argument in argv if argument not in args])
        if not names:
            return ()
        options = ", ".join(names)
        if parser is not Parser.SAGEMAKER_CLI:
            _LOG.info(
                "every process on this host, and W&B, can read the script's command line, which contains the values of "
                "%s. They are omitted only if SageMakerCLI, and nothing else in the script, reads its arguments.",
                options,
            )
            return ()
        _LOG.info("%s: not on the script's command line. SageMakerCLI reads the values from the job.", options)
        return tuple(names)

    def _environment(
        self, program: Program, script: Script, argv: Sequence[str], devices: int | None
    ) -> dict[str, str]:
        given = {**self.env, **exported_variables(self.job, self.topology)}
        env = {**given, **hash_seed(given)}
        if devices is not None:
            env[DEVICES.name] = str(devices)
        env[CONTROL_DIR.name] = str(self.control.path)
        env |= self.record.variables
        env |= toolkit_variables(self.job, program.name, argv, given)
        # Python puts only the script's own folder on sys.path; "from app.model import X" needs app's parent folder.
        paths = list(script.module_dirs)
        if given.get("PYTHONPATH"):
            paths.append(given["PYTHONPATH"])
        env["PYTHONPATH"] = os.pathsep.join(paths)
        return env


def command_line(args: Sequence[str], job: SageMakerJob, directory: Path) -> list[str]:
    """Build the arguments of the training script.

    Args:
        args: Arguments given to the launcher; they come first.
        job: The job. Its hyperparameters become options, and the files in its ``config`` channel become ``--config``
            options.
        directory: Working directory of the script.

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


def hydra_command_line(args: Sequence[str], job: SageMakerJob) -> list[str]:
    """Build the arguments of a Hydra script, whose parser accepts options only before all overrides.

    Args:
        args: Arguments given to the launcher.
        job: The job. Its hyperparameters become overrides, which take precedence over overrides in ``args``.

    Raises:
        HyperparameterError: A hyperparameter cannot become an override.
    """
    arguments = to_overrides(job.hyperparameters)
    options = [argument for argument in arguments if argument.startswith("--")]
    return [*options, *args, *arguments[len(options) :]]


def variables_of_processes(
    job: SageMakerJob, topology: Topology, script: Script, devices: int | None, env: Mapping[str, str]
) -> list[dict[str, str]]:
    """Return the additional variables of each process that the launcher starts on this host.

    A script that is not Python is started once, and may start further processes itself.

    Args:
        job: The job.
        topology: Roles and ranks of all hosts.
        script: The script.
        devices: Number of processes per trainer host that the job requests; None if it leaves that to the script.
        env: The variables common to all processes.
    """
    if topology.role is not Role.TRAINER:
        return [{}]
    variables = host_variables(job, topology)
    if devices is None or not script.is_python:
        if devices is not None and devices > 1:
            _LOG.info(
                "the job asks for %d processes on each trainer host, but the script is not a Python file: starting it "
                "once. It can start them itself, for example with torchrun.",
                devices,
            )
        return [variables]
    if devices > 1:
        # Without this, every rank would start as many threads as the host has CPUs.
        variables[_THREADS] = env.get(_THREADS) or str(max(1, usable_cpus() // devices))
    return [{**variables, **rank_variables(topology, devices, local_rank)} for local_rank in range(devices)]


def _banner(job: SageMakerJob, topology: Topology) -> str:
    role = topology.role
    rank = f", node rank {topology.node_rank} of {topology.num_nodes}" if role is Role.TRAINER else ""
    names = ("lightning-sm", "torch", "pytorch-lightning", "lightning")
    found = [f"{name} {version}" for name in names if (version := installed_version(name)) is not None]
    versions = [*found, f"Python {platform.python_version()}"]
    place = f"host {job.current_host}, group {job.current_group.name}, role {role.value}{rank}"
    return f"{', '.join(versions)} | {place}"
