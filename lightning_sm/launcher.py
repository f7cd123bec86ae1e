"""The container's entry point, ``lightning-sm train``: one training script on this host, from start to exit code.

SageMaker runs ``docker run <image> train`` on every host. The launcher turns ``hyperparameters.json`` into a command
line, starts the script in a process group of its own, passes signals on, and leaves the reason of a failure where
the service looks for it. It does the same on trainer and data hosts: the script itself knows the role of its host.
"""

from __future__ import annotations

import ctypes
import importlib.metadata
import json
import logging
import os
import platform
import shlex
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import FrameType

from lightning_sm.errors import HyperparameterError, JobConfigError, LightningSMError, ScriptError
from lightning_sm.failure import failure_reason
from lightning_sm.hyperparameters import to_argv
from lightning_sm.job import SageMakerJob
from lightning_sm.topology import Role, Topology

_LOG = logging.getLogger(__name__)

# Set by the emulator to its process id: hosts end with it, however it ends.
PARENT_VARIABLE = "LIGHTNING_SM_PARENT_PID"

_USAGE_EXIT_CODE = 2
_CONFIG_CHANNEL = "config"
_CONFIG_SUFFIXES = (".yaml", ".yml", ".json")
# Enough for the tracebacks of 8 local ranks with deep stacks; the service shows 1024 characters of it.
_TAIL_BYTES = 64 * 1024
# Local ranks end within moments of rank 0 when all is well: they met at the same last barrier.
_LEFTOVERS_GRACE_S = 10.0
# After SIGTERM. Only for what outlives its parent; a training script that saves a checkpoint is not hurried.
_KILL_GRACE_S = 5
# To read what a pipe still holds (64 KiB on Linux).
_DRAIN_S = 2.0
_POLL_S = 0.05
# linux/prctl.h
_PR_SET_PDEATHSIG, _PR_SET_CHILD_SUBREAPER = 1, 36


def train(script: str | None, args: Sequence[str], env: Mapping[str, str] = os.environ) -> int:
    """Run the training script of this host and return the exit code for the container.

    Args:
        script: Path of the script. Default: ``SAGEMAKER_PROGRAM``, else the hyperparameter ``sagemaker_program``.
        args: Arguments for the script; those made from the hyperparameters follow, and win.
        env: Environment variables.

    Returns:
        The script's exit code; 128 + n if signal n killed it; 2 if it could not be started.
    """
    if not _end_with_parent(env):
        return 128 + signal.SIGTERM
    output_dir = _output_dir(env)
    try:
        job = SageMakerJob.from_environment(env)
        if job is None:
            raise JobConfigError(
                "This is not a SageMaker host: neither SM_RESOURCE_CONFIG nor SM_HOSTS is set, and there is no "
                f"{_base_dir(env) / 'input' / 'config' / 'resourceconfig.json'}. "
                "To run a cluster on this machine: lightning-sm local --group trainer=2 -- app/train.py fit"
            )
        output_dir = job.output_dir
        topology = Topology.from_job(job)
        path, directory = find_script(script, job, env)
        argv = command_line(args, job, directory)
        _LOG.info("%s", _banner(job, topology, path, argv))
        command = [sys.executable, "-u", str(path), *argv]
        child = ChildProcess(command, directory, _child_environment(env, directory), env.get(PARENT_VARIABLE))
        exit_code = child.run()
    except LightningSMError as error:
        _LOG.error("lightning-sm: error: %s", error)
        if output_dir is not None:
            _write_failure(output_dir, f"{type(error).__name__}: {error}")
        return _USAGE_EXIT_CODE
    if exit_code != 0:
        _write_failure(job.output_dir, failure_reason(child.stderr_tail, exit_code))
        _LOG.error("lightning-sm: the script on %s failed with exit code %d.", job.current_host, exit_code)
    return exit_code


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
    name = script or env.get("SAGEMAKER_PROGRAM") or _unquoted(job.hyperparameters.get("sagemaker_program"))
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
    built = to_argv(job.hyperparameters)
    resolved = [_in_config_channel(argument, job, directory) for argument in built]
    if resolved == built:  # no file of the channel was named, so that all of them count
        resolved = to_argv(job.hyperparameters, config_files=_config_files(job))
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


class ChildProcess:
    """One script in a process group of its own, with the end of its stderr at hand.

    Args:
        command: Program and arguments; no shell is involved.
        directory: Folder to start it in.
        env: Its environment.
        parent: Process id of the emulator, with which the script ends; None on SageMaker.
    """

    def __init__(
        self, command: Sequence[str], directory: Path, env: Mapping[str, str], parent: str | None = None
    ) -> None:
        self._command = list(command)
        self._directory = directory
        self._env = dict(env)
        self._parent = parent
        self._process: subprocess.Popen[bytes] | None = None
        self._early_signals: list[int] = []
        self._tail = bytearray()

    @property
    def stderr_tail(self) -> str:
        """The last 64 KiB that the processes of the group wrote to stderr."""
        return bytes(self._tail).decode("utf-8", errors="replace")

    def run(self) -> int:
        """Start the script, pass SIGTERM and SIGINT on to its group, and wait until the whole group is gone.

        Returns:
            The script's exit code, 128 + n if signal n killed it.

        Raises:
            ScriptError: The operating system refused to start it.
        """
        _prctl(_PR_SET_CHILD_SUBREAPER, 1)  # local ranks that outlive the script become ours, to wait for and to reap
        self._handle_signals()
        process = self._start()
        copier = threading.Thread(target=self._copy_stderr, args=(process,), daemon=True)
        copier.start()
        exit_code = process.wait()
        self._end_leftovers(process.pid, _LEFTOVERS_GRACE_S if exit_code == 0 else 0.0)
        self._process = None  # its number may soon belong to another process
        copier.join(timeout=_DRAIN_S)  # a process that left the group may keep the pipe open
        return 128 - exit_code if exit_code < 0 else exit_code

    def _handle_signals(self) -> None:
        # Before the child starts: a signal that comes meanwhile must reach it, not end the launcher. And for good:
        # one that comes after its end must not replace its exit code, nor prevent the failure file.
        if threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGTERM, self._forward)
            signal.signal(signal.SIGINT, self._forward)
            signal.signal(signal.SIGALRM, self._kill_if_orphaned)

    def _start(self) -> subprocess.Popen[bytes]:
        try:
            self._process = subprocess.Popen(
                self._command,
                cwd=self._directory,
                env=self._env,
                stdin=subprocess.DEVNULL,
                stderr=subprocess.PIPE,
                start_new_session=True,
            )
        except OSError as error:
            raise ScriptError(f"{shlex.join(self._command)} cannot be started: {error}.") from error
        for signum in self._early_signals:
            self._send(signum)
        return self._process

    def _forward(self, signum: int, _frame: FrameType | None) -> None:
        if self._parent is not None:
            signal.alarm(_KILL_GRACE_S)
        if self._process is None:
            self._early_signals.append(signum)
        else:
            self._send(signum)

    def _kill_if_orphaned(self, _signum: int, _frame: FrameType | None) -> None:
        # Only now, not when the signal came: the kernel sends it while threads of a killed emulator still end, and
        # until they have, it is still the parent. One that lives sends SIGKILL itself.
        if self._parent != str(os.getppid()):
            self._send(signal.SIGKILL)

    def _send(self, signum: int) -> None:
        if self._process is not None:
            _signal_group(self._process.pid, signum)

    def _copy_stderr(self, process: subprocess.Popen[bytes]) -> None:
        if process.stderr is None:
            return
        target: int | None = sys.__stderr__.fileno() if sys.__stderr__ is not None else None
        with process.stderr as pipe:
            while chunk := os.read(pipe.fileno(), _TAIL_BYTES):
                self._tail += chunk
                del self._tail[:-_TAIL_BYTES]
                if target is not None and not _write_all(target, chunk):
                    target = None  # nobody reads any more; go on, else the script would block

    def _end_leftovers(self, group: int, grace_s: float) -> None:
        """Wait for what is left of the process group, then end it."""
        if _group_ended(group, grace_s):
            return
        _signal_group(group, signal.SIGTERM)
        if not _group_ended(group, _KILL_GRACE_S):
            _signal_group(group, signal.SIGKILL)
            _group_ended(group, _KILL_GRACE_S)


def _unquoted(value: str | None) -> str | None:
    """The text of a hyperparameter that some SDKs store as JSON, quotes included."""
    if value is None or not value.startswith('"'):
        return value
    try:
        return str(json.loads(value))
    except json.JSONDecodeError:
        return value


def _in_config_channel(argument: str, job: SageMakerJob, directory: Path) -> str:
    """The argument, or the path in the config channel for ``--config=name`` of a file that is nowhere else."""
    option, _, name = argument.partition("=")
    channel = job.channels.get(_CONFIG_CHANNEL)
    if option != "--config" or channel is None or os.path.exists(directory / name):
        return argument
    path = channel.path / name
    return f"{option}={path}" if os.path.exists(path) else argument


def _config_files(job: SageMakerJob) -> list[str]:
    """The files of the ``config`` channel, for values beyond the service's 2500 characters per hyperparameter."""
    channel = job.channels.get(_CONFIG_CHANNEL)
    if channel is None or not channel.path.is_dir():
        return []
    return sorted(str(path) for path in channel.path.iterdir() if path.suffix in _CONFIG_SUFFIXES and path.is_file())


def _child_environment(env: Mapping[str, str], directory: Path) -> dict[str, str]:
    # Python puts the script's own folder on sys.path; "from app.model import X" needs the one above app as well.
    paths = [str(directory), *filter(None, [env.get("PYTHONPATH")])]
    kept = {name: value for name, value in env.items() if name != PARENT_VARIABLE}
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


def _base_dir(env: Mapping[str, str]) -> Path:
    return Path(env.get("SAGEMAKER_BASE_DIR") or "/opt/ml")


def _output_dir(env: Mapping[str, str]) -> Path | None:
    base = _base_dir(env)
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


def _write_all(target: int, data: bytes) -> bool:
    try:
        while data:
            data = data[os.write(target, data) :]
    except OSError:
        return False
    return True


def _signal_group(group: int, signum: int) -> None:
    try:
        os.killpg(group, signum)
    except (ProcessLookupError, PermissionError):
        return


def _group_ended(group: int, timeout_s: float) -> bool:
    """Reap the processes of a group until none is left, or the time is over."""
    deadline = time.monotonic() + timeout_s
    pause = threading.Event()
    while True:
        try:
            while os.waitpid(-group, os.WNOHANG)[0]:
                pass
        except ChildProcessError:
            pass
        try:
            os.killpg(group, 0)
        except (ProcessLookupError, PermissionError):
            return True
        if time.monotonic() >= deadline:
            return False
        pause.wait(_POLL_S)


def _end_with_parent(env: Mapping[str, str]) -> bool:
    """Ask the kernel for SIGTERM when the emulator dies; False if it is dead already."""
    if PARENT_VARIABLE not in env:
        return True
    _prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
    return env[PARENT_VARIABLE] == str(os.getppid())


def _prctl(option: int, value: int) -> None:
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(option, value, 0, 0, 0)
