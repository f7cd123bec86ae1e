"""The container's entry point, ``lightning-sm train``: one training script on this host, from start to exit code.

SageMaker runs ``docker run <image> train`` on every host. The launcher fetches the code of the job if there is any,
turns ``hyperparameters.json`` into a command line, starts the script in a process group of its own, passes signals on,
and leaves the reason of a failure where the service looks for it. It does the same on trainer and data hosts: the
script itself knows the role of its host.
"""

from __future__ import annotations

import importlib.metadata
import logging
import os
import platform
import shlex
import signal
import threading
import time
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path

from lightning_sm._linux import terminate_with_parent
from lightning_sm.errors import HyperparameterError, JobConfigError, LightningSMError
from lightning_sm.job.command_line import job_arguments
from lightning_sm.job.facts import SageMakerJob, base_directory
from lightning_sm.job.rendezvous import own_address
from lightning_sm.job.stopping import StopSchedule
from lightning_sm.job.topology import Role, Topology
from lightning_sm.job.variables import DEVICES, FAREWELL_S, PARENT_PID
from lightning_sm.launcher.child_process import ChildProcess, ignore_signals
from lightning_sm.launcher.failure import failure_reason, is_consequence
from lightning_sm.launcher.peers.connection import Timings
from lightning_sm.launcher.peers.outcome import Outcome, Verdict
from lightning_sm.launcher.peers.peers import Peers
from lightning_sm.launcher.toolkit.distribution import processes_per_host
from lightning_sm.launcher.toolkit.variables import toolkit_variables
from lightning_sm.launcher.user_code.prepare import Steps, Stopped
from lightning_sm.launcher.user_code.script import Program, Script, find_program, find_script, find_submission

_LOG = logging.getLogger(__name__)

_USAGE_EXIT_CODE = 2
# An interpreter needs some tens of milliseconds to leave.
_AFTER_THE_FIRST_S = 1.0
# A rank may close its connections, at which those of other hosts fail, seconds before its process has ended.
_CONSEQUENCE_S = 10.0
# Before a data host's script is started again: memory may be short for a moment. Training goes on meanwhile, and what
# was killed four times will be killed a fifth time.
_RESTART_PAUSES_S = (1.0, 2.0, 4.0)
_POLL_S = 0.05
# Exit codes of a script that was killed, other than by who asks it to end.
_KILLED = frozenset(128 + number for number in signal.valid_signals() - {signal.SIGTERM, signal.SIGINT})
# What ``ChildProcess.end`` sends.
_ENDED = (128 + signal.SIGTERM, 128 + signal.SIGKILL)


def train(script: str | None, args: Sequence[str], env: Mapping[str, str] = os.environ) -> int:
    """Run the training script of this host and return the exit code for the container.

    Args:
        script: Path of the script. Default: the hyperparameter ``sagemaker_program``, else ``SAGEMAKER_PROGRAM``.
        args: Arguments for the script; those made from the hyperparameters follow, and win.
        env: Environment variables.

    Returns:
        The script's exit code; 128 + n if signal n killed it; 2 if it could not be started.
    """
    emulator_pid = PARENT_PID.read(env)
    if emulator_pid is not None and not terminate_with_parent(emulator_pid):
        return 128 + signal.SIGTERM
    output_dir = _output_dir(env)
    if output_dir is not None:
        _remove_failure(output_dir)
    try:
        job = _job_of_this_host(env)
        output_dir = job.output_dir
        ending = _Host(job, env).run(script, args)
    except LightningSMError as error:
        _LOG.error("lightning-sm: error: %s", error)
        ending = Outcome(_USAGE_EXIT_CODE, f"{type(error).__name__}: {error}")
    except Exception as error:  # noqa: BLE001 - a bug here; the service is to know all the same why the host ends
        _LOG.exception("lightning-sm: error in the launcher")
        ending = Outcome(1, f"The launcher failed: {type(error).__name__}: {error}")
    ignore_signals()
    if ending.exit_code != 0:
        if output_dir is not None:
            _write_failure(output_dir, ending.reason)
        _LOG.error("lightning-sm: this host failed with exit code %d.", ending.exit_code)
    return ending.exit_code


class _Host:
    """The launcher of one host among those of the others: runs the script, and agrees with them on how the job ends."""

    def __init__(self, job: SageMakerJob, env: Mapping[str, str]) -> None:
        self._job = job
        self._topology = Topology.from_job(job)
        self._env = env
        self._farewell_s = FAREWELL_S.read(env)
        self._known = threading.Event()
        self._was_stopped_before = False
        self._child = ChildProcess(StopSchedule.from_environment(env), PARENT_PID.read(env))
        self._steps = Steps(self._child, env)
        self._num_restarts = 0

    def run(self, script: str | None, args: Sequence[str]) -> Outcome:
        """Run the script to its end, and return how this host ends.

        Raises:
            LightningSMError: The script cannot be started; the other hosts were told.
        """
        child = self._child
        child.listen()
        with self._peers() as peers:
            child.late_signal = partial(self._hurry, peers)
            if peers.is_alone:
                self._known.set()
            reason = ""
            try:
                exit_code = self._run(*self._prepare(script, args))
            except Stopped as stopped:
                exit_code, reason = stopped.exit_code, str(stopped)
            except LightningSMError as error:
                self._report(peers, Outcome(_USAGE_EXIT_CODE, f"{type(error).__name__}: {error}"))
                raise
            # A data host that fails before it is killed is broken itself; one that is stopped before it handles signals
            # is not.
            is_stopped = child.stopped_by is not None and exit_code == 128 + child.stopped_by
            if self._is_data_host and (is_stopped or (child.is_ended and exit_code in _ENDED)):
                exit_code = 0
            if exit_code and not self._was_stopped and is_consequence(child.stderr_tail):
                self._known.wait(_CONSEQUENCE_S)
            reason = reason or _reason(child, exit_code, self._num_restarts)
            own = Outcome(exit_code, reason if exit_code else "")
            return self._ending(own, self._report(peers, own))

    @property
    def _is_data_host(self) -> bool:
        return self._topology.role is Role.DATA

    @property
    def _was_stopped(self) -> bool:
        return self._child.stopped_by is not None

    def _run(self, script: Script, args: Sequence[str], env: Mapping[str, str]) -> int:
        """Run the script; on a data host again, when it was killed and the job still needs it."""
        child, run = self._child, partial(self._child.run, [*script.command, *args], script.directory, env)
        exit_code = run()
        while self._is_data_host and not child.is_over:
            pause_s = restart_pause_s(exit_code, self._num_restarts)
            if pause_s is None:
                break
            _LOG.warning(
                "lightning-sm: the data host's script was killed (exit code %d); starting it again in %.0f s.",
                *(exit_code, pause_s),
            )
            self._num_restarts += 1
            until = time.monotonic() + pause_s
            while time.monotonic() < until and not child.is_over:
                threading.Event().wait(_POLL_S)
            exit_code = 0 if child.is_over else run()
        return exit_code

    def _prepare(self, name: str | None, args: Sequence[str]) -> tuple[Script, list[str], dict[str, str]]:
        """Do what comes before the script, and return it with its arguments and its environment."""
        job, banner = self._job, _banner(self._job, self._topology)
        program, submission = find_program(name, job, self._env), find_submission(job, self._env)
        folder = devices = None
        if submission is not None:
            devices = self._introduce(banner, program)  # first: nothing else tells that this host has started
            folder = self._steps.fetch(submission, job)
        script = find_script(program, job, self._env, folder)
        argv = command_line(args, job, script.directory)
        shown = shlex.join([*script.shown, *argv])
        if submission is None:
            devices = self._introduce(f"{banner} | {shown}", program)
        else:
            _LOG.info("lightning-sm: starting %s in %s", shown, script.directory)
        self._steps.install(script)
        self._steps.check_not_stopped("starting the script")
        return script, argv, self._environment(program, script, argv, devices)

    def _introduce(self, banner: str, program: Program) -> int | None:
        """Log who this host is, and return how many processes the job's ``distribution`` wants here."""
        _LOG.info("%s", banner)
        for other in program.overruled:
            _LOG.info(
                "lightning-sm: %s names the script %s; %s, which names %s, is not used.",
                *(program.origin, program.name, other.origin, other.name),
            )
        return processes_per_host(self._job, self._topology)

    def _environment(
        self, program: Program, script: Script, argv: Sequence[str], devices: int | None
    ) -> dict[str, str]:
        # Python puts the script's own folder on sys.path; "from app.model import X" needs the one above app as well.
        paths = [*script.module_dirs, *filter(None, [self._env.get("PYTHONPATH")])]
        env = {name: value for name, value in self._env.items() if name != PARENT_PID.name}
        if devices is not None:
            env[DEVICES.name] = str(devices)
        env |= toolkit_variables(self._job, program.name, argv, self._env)
        return {**env, "PYTHONPATH": os.pathsep.join(paths)}

    def _peers(self) -> Peers:
        return Peers(
            job_identity=self._job.name or "unnamed",
            own=self._job.current_host,
            trainers=self._topology.trainer_hosts,
            data_hosts=self._topology.data_hosts,
            main_host=self._topology.main_host,
            addresses=self._job.addresses,
            port=self._topology.peers_port,
            bind=own_address(self._job),
            on_verdict=self._heed,
            timings=Timings(farewell_s=self._farewell_s),
        )

    def _hurry(self, peers: Peers) -> None:
        """Wait for nobody any more: the service, too, ends this host."""
        self._known.set()
        peers.leave()

    def _heed(self, verdict: Verdict) -> None:
        """End the script, if there is nothing left to do for it; called from a thread of the peers."""
        # A SIGTERM that comes after the failure of another host is the service's answer to it, and no reason.
        self._was_stopped_before = self._was_stopped or verdict.exit_code == 128 + signal.SIGTERM
        self._known.set()
        # A data host is done whatever became of the training.
        is_over = verdict.host != self._job.current_host and (verdict.is_failure or self._is_data_host)
        # Where all are stopped, one that has left is no reason to hurry another, which may still write the checkpoint.
        has_left = verdict.kind == "lost" or verdict.exit_code == 128 + signal.SIGTERM
        is_leaving = self._was_stopped and has_left and not self._is_data_host
        if is_over and not is_leaving:
            self._child.end()

    def _report(self, peers: Peers, own: Outcome) -> Verdict | None:
        """Tell the others how the script ended, and return how the job does."""
        peers.report(own)
        # A data host that was told to stop has served all who came; it need not wait for a main host that may be dead.
        if own.exit_code == 0 and not (self._is_data_host and self._was_stopped):
            return peers.farewell()
        if self._is_data_host and len(self._topology.data_hosts) > 1 and not self._was_stopped:
            # The service ends a job as soon as one of its hosts leaves with an error.
            _LOG.warning(
                "lightning-sm: this data host is out of order. It stays until the training has ended, which goes on "
                "with the others. %s",
                own.reason,
            )
            return peers.farewell()
        # Whoever failed leaves as soon as the others know, so that the reason of the job is its own and not theirs.
        # Where all are stopped, nobody needs to know.
        if not self._was_stopped:
            self._known.wait(self._farewell_s)
        return peers.verdict

    def _ending(self, own: Outcome, verdict: Verdict | None) -> Outcome:
        """How this host ends: a trainer's host never looks successful when another one failed."""
        is_elsewhere = verdict is not None and verdict.is_failure and verdict.host != self._job.current_host
        # Of all hosts: it does not matter which one ended first.
        is_stop = self._was_stopped and self._was_stopped_before and own.exit_code != 0
        if self._is_data_host and verdict is not None and not verdict.is_failure and own.exit_code != 0:
            _LOG.warning("lightning-sm: the training succeeded without this host, which therefore ends with 0.")
            return Outcome(0)
        if verdict is None or not is_elsewhere or is_stop or self._is_data_host:
            return own
        # The host that failed leaves first: its exit code and its reason are those of the job.
        threading.Event().wait(_AFTER_THE_FIRST_S)
        said = f"Host {verdict.host} was the first to fail, with exit code {verdict.exit_code}: {verdict.reason}"
        return Outcome(own.exit_code or 1, said)


def restart_pause_s(exit_code: int, num_restarts: int) -> float | None:
    """Tell when to start the script of a data host again.

    What killed it may not happen again; an error that it ended with by itself would.

    Args:
        exit_code: How it ended; 128 + n if signal n killed it.
        num_restarts: How often it was started again before.

    Returns:
        Seconds to wait; None if it is not to be started again.
    """
    is_worth_it = exit_code in _KILLED and num_restarts < len(_RESTART_PAUSES_S)
    return _RESTART_PAUSES_S[num_restarts] if is_worth_it else None


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


def _reason(child: ChildProcess, exit_code: int, num_restarts: int) -> str:
    reason = failure_reason(child.stderr_tail, exit_code)
    if num_restarts:
        reason = f"The data host's script was killed, and started again {num_restarts} times. {reason}"
    if child.stopped_by is None:
        return reason
    return f"The job was stopped or interrupted ({signal.Signals(child.stopped_by).name}). {reason}"


def _banner(job: SageMakerJob, topology: Topology) -> str:
    role = topology.role
    rank = f", node rank {topology.node_rank} of {topology.num_nodes}" if role is Role.TRAINER else ""
    found = filter(None, map(_version, ("lightning-sm", "torch", "pytorch-lightning", "lightning")))
    versions = [*found, f"Python {platform.python_version()}"]
    place = f"host {job.current_host}, group {job.current_group.name}, role {role.value}{rank}"
    return f"{', '.join(versions)} | {place}"


def _version(distribution: str) -> str | None:
    try:  # from the metadata: importing torch takes seconds
        return f"{distribution} {importlib.metadata.version(distribution)}"
    except importlib.metadata.PackageNotFoundError:
        return None


def _job_of_this_host(env: Mapping[str, str]) -> SageMakerJob:
    job = SageMakerJob.from_environment(env)
    if job is None:
        raise JobConfigError(
            "This is not a SageMaker host: neither SM_RESOURCE_CONFIG nor SM_HOSTS is set, and there is no "
            f"{base_directory(env) / 'input' / 'config' / 'resourceconfig.json'}. "
            "To run a cluster on this machine: lightning-sm local --group trainer=2 -- app/train.py fit"
        )
    return job


def _output_dir(env: Mapping[str, str]) -> Path | None:
    base = base_directory(env)
    return base / "output" if (base / "input" / "config").is_dir() else None


def _remove_failure(output_dir: Path) -> None:
    """Remove what an earlier job left in the same container (a warm pool): it is no reason of this one."""
    path = output_dir / "failure"
    try:
        if path.exists():
            path.unlink()
    except OSError as error:
        _LOG.warning("lightning-sm: %s of an earlier job cannot be removed: %s", path, error)


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
