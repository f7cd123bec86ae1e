"""Check hyperparameters by the script's own parser, in another process on this machine, before anything is sent."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import tempfile
from importlib.util import find_spec
from pathlib import Path
from random import Random

from lightning_sm._log import command_logger
from lightning_sm.errors import HyperparameterError
from lightning_sm.job.command_line import job_arguments
from lightning_sm.job.emulated_service import GroupSpec, deal_hosts, resource_config_of
from lightning_sm.job.facts import InstanceGroup, SageMakerJob
from lightning_sm.job.instance_types import num_gpus
from lightning_sm.job.redaction import shown
from lightning_sm.job.topology import Role, Topology
from lightning_sm.job.variables import DATA_CHANNELS
from lightning_sm.submit.job_file import Job
from lightning_sm.submit.parser_exit_codes import PARSED
from lightning_sm.submit.problems import Findings, JobProblem
from lightning_sm.submit.tuning import first_values

_LOG = command_logger(__name__)

# PyTorch and Lightning take 5 to 20 s to import.
_TIMEOUT_S = 120.0
_USAGE_ERROR = 2
# Scripts without any of these may have no parser at all, and would train here.
_PARSER = re.compile(r"\b(SageMakerCLI|LightningCLI|ArgumentParser|jsonargparse|auto_cli)\b")
# The script runs in a process whose stderr is all that it says: a traceback, or the usage error of its parser.
_OWN_ERROR = re.compile(r"^lightning_sm\.errors\.\w+: ")
# Where only hosts have files.
_ON_HOSTS = "/opt/ml"


def check_hyperparameters(job: Job, hyperparameters: dict[str, str], findings: Findings) -> None:
    """Let the script parse the command line that it will get, as a trainer host of the job.

    Says in the log that nothing was checked, and why, if it cannot be done here.

    Args:
        job: The content of the job file.
        hyperparameters: The result of ``encode_hyperparameters``.
        findings: Receives what the parser refuses.
    """
    obstacle = _check(job, hyperparameters, findings)
    if obstacle:
        _LOG.info("Hyperparameters were not checked against the script: %s.", obstacle)


def _check(job: Job, hyperparameters: dict[str, str], findings: Findings) -> str:
    """Check, or return why that is not possible."""
    script = _script(job)
    if script is None:
        return "it is in the image; to check them, set local_script to a copy on this machine"
    if not script.is_file():
        return f"{script} is not on this machine"
    if not _PARSER.search(script.read_text(encoding="utf-8", errors="replace")):
        return f"{script} has no parser that can be run alone (SageMakerCLI, LightningCLI, argparse, jsonargparse)"
    if find_spec("torch") is None:
        return "torch is not installed here"
    with tempfile.TemporaryDirectory(prefix="lightning-sm-check-") as folder:
        _write_job(Path(folder), job, hyperparameters)
        facts = SageMakerJob.from_environment({}, folder)
        try:
            arguments = [] if facts is None else job_arguments(facts, script.parent)
        except HyperparameterError as error:
            findings.problems.append(JobProblem("hyperparameters", f"hyperparameters: {error}"))
            return ""
        return _run(job, script, arguments, Path(folder), findings)


def _run(job: Job, script: Path, arguments: list[str], folder: Path, findings: Findings) -> str:
    command = [sys.executable, "-m", "lightning_sm.submit.script_parser", str(script), *arguments]
    trainer = next(group for name, group in job.groups.items() if name == _trainer_group(job))
    environment = {
        **os.environ,
        **job.environment,
        "SAGEMAKER_BASE_DIR": str(folder),
        "SM_NUM_GPUS": str(num_gpus(trainer.instance_type) or 0),
        "CUDA_VISIBLE_DEVICES": "",  # imports that touch a GPU would take it from its user
        "TRAINING_JOB_NAME": job.name,
        DATA_CHANNELS.name: ",".join(job.channels),
    }
    directory = job.source_dir if job.source_dir is not None and job.local_script is None else script.parent
    process = subprocess.Popen(
        command,
        cwd=directory,
        env=environment,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        start_new_session=True,
    )
    try:
        _, stderr = process.communicate(timeout=_TIMEOUT_S)
    except subprocess.TimeoutExpired:
        return f"{script} has not parsed its command line within {_TIMEOUT_S:.0f} s"
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.communicate()
    lines = stderr.decode(errors="replace").strip().splitlines()
    return _judge(process.returncode, lines, script, findings)


def _judge(exit_code: int, lines: list[str], script: Path, findings: Findings) -> str:
    if exit_code == PARSED:
        _LOG.info("The parser of %s accepts the hyperparameters.", script)
        return ""
    last = lines[-1] if lines else f"it ended with exit code {exit_code} and said nothing"
    own = next((index for index, line in enumerate(lines) if _OWN_ERROR.match(line)), None)
    if exit_code == _USAGE_ERROR:
        start = max((index for index, line in enumerate(lines) if "error: " in line), default=len(lines) - 1)
        message = "\n".join(lines[start:]).partition("error: ")[2] or last
    elif own is not None:
        message = "\n".join(lines[own:]).partition(": ")[2]
    else:
        return f"{script} does not run here: {shown('', last)}"
    if _ON_HOSTS in message:
        return f"they name files of the hosts: {shown('', message)}"
    text = f"config, hyperparameters: the parser of {script} says: {shown('', message)}"
    findings.problems.append(JobProblem("hyperparameters", text))
    return ""


def _script(job: Job) -> Path | None:
    if job.local_script is not None:
        return Path(job.local_script)
    if job.source_dir is not None and job.script is not None:
        return Path(job.source_dir) / job.script
    return None


def _trainer_group(job: Job) -> str:
    """Return the name of a group that trains; the job has one, as preflight has checked."""
    groups = tuple(InstanceGroup(name, (name,), group.instance_type) for name, group in job.groups.items())
    hosts = tuple(job.groups)
    for host in hosts:
        facts = SageMakerJob(host, hosts, groups, "the job file")
        if Topology.from_job(facts).role is Role.TRAINER:
            return host
    return hosts[0]


def _write_job(folder: Path, job: Job, hyperparameters: dict[str, str]) -> None:
    """Write what the service would write on the first trainer host."""
    specs = [GroupSpec(name, group.count, group.instance_type) for name, group in job.groups.items()]
    hosts = [f"algo-{number}" for number in range(1, job.num_hosts + 1)]
    groups = deal_hosts(specs, hosts, Random(0))  # noqa: S311 - no secret
    name = _trainer_group(job)
    host = next(group.hosts[0] for group in groups if group.name == name)
    channels = {
        channel: {"TrainingInputMode": "File", "S3DistributionType": "FullyReplicated", "RecordWrapperType": "None"}
        for channel, settings in job.channels.items()
        if settings.groups is None or name in settings.groups
    }
    tuned = {} if job.tune is None else {**first_values(job.tune), "_tuning_objective_metric": job.tune.objective}
    config = folder / "input" / "config"
    config.mkdir(parents=True)
    for channel in channels:
        (folder / "input" / "data" / channel).mkdir(parents=True)
    contents = {
        "resourceconfig.json": resource_config_of(groups, host),
        "inputdataconfig.json": channels,
        "hyperparameters.json": {**hyperparameters, **tuned},
    }
    for file, content in contents.items():
        (config / file).write_text(json.dumps(content), encoding="utf-8")
