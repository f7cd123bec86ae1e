"""The container's entry point, ``lightning-sm train``, which runs the training script on one host.

SageMaker runs ``docker run <image> train`` on every host. The launcher fetches the code that came with the job, if any,
turns ``hyperparameters.json`` into a command line, starts the script in its own process group, forwards signals, and
writes the reason for a failure where SageMaker looks for it. It does the same on trainer and data hosts: the script
itself finds out the role of its host.
"""

from __future__ import annotations

import logging
import os
import platform
import shlex
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from lightning_sm._log import command_logger
from lightning_sm._version import installed_version
from lightning_sm.errors import HyperparameterError, JobConfigError, LightningSMError
from lightning_sm.job.command_line import job_arguments
from lightning_sm.job.control_folder import ControlFolder
from lightning_sm.job.facts import SageMakerJob, base_directory
from lightning_sm.job.hash_seed import hash_seed
from lightning_sm.job.redaction import shown_arguments
from lightning_sm.job.rendezvous import own_address
from lightning_sm.job.stopping import (
    INTERRUPTED_EXIT_CODE,
    FinalOutcome,
    JobOutcome,
    Outcome,
    OutcomeKind,
    Reason,
    Stop,
    StopSchedule,
    ends_script,
    final_outcome,
)
from lightning_sm.job.topology import Role, Topology
from lightning_sm.job.variables import (
    CONTROL_DIR,
    DEVICES,
    HANG_S,
    MAX_RESTARTS,
    PEERS_TIMEOUT_S,
    PRICES,
    REPORT_S,
)
from lightning_sm.launcher.child_process import ChildProcess, ignore_signals
from lightning_sm.launcher.failure import (
    Place,
    error_reason,
    is_consequence,
    not_started_reason,
    remove_failure,
    script_reason,
    write_failure,
)
from lightning_sm.launcher.hang import Watchdog, nccl_variables, save_nccl_traces, save_stacks
from lightning_sm.launcher.host_record import HostRecord
from lightning_sm.launcher.peers.connection import Timings, peers_key
from lightning_sm.launcher.peers.outcome import Restart
from lightning_sm.launcher.peers.peers import Peers
from lightning_sm.launcher.permanent_failures import is_permanent_failure
from lightning_sm.launcher.run_report import REPORT_LIMIT_WHEN_STOPPED_S, write_report
from lightning_sm.launcher.toolkit.distribution import processes_per_host
from lightning_sm.launcher.toolkit.variables import toolkit_variables
from lightning_sm.launcher.upload import wait_until_uploaded
from lightning_sm.launcher.user_code.prepare import Preparation, Stopped
from lightning_sm.launcher.user_code.script import Program, Script, find_program, find_script, find_submission

_LOG = command_logger(__name__)

_USAGE_EXIT_CODE = 2
# The host that failed first must exit first, so that SageMaker shows its exit code and reason as the job's. Its
# interpreter needs some tens of milliseconds to exit: all other hosts wait this long.
_MAIN_HOST_LEAVES_LATER_S = 1.0
# SageMaker stops the other hosts when the hanging one exits: give them time to save their stacks first.
_WAIT_FOR_OTHER_HOSTS_STACKS_S = 3.0
# When a rank dies, ranks on other hosts can fail seconds before its own launcher sees the exit. Wait this long for the
# real cause.
_CONSEQUENCE_S = 10.0
# Pauses before a data host's script is restarted: memory may be short only for a moment, and training continues
# meanwhile. After four kills, a fifth is certain.
_RESTART_PAUSES_S = (1.0, 2.0, 4.0)
# After the report, an interrupted host still needs a few seconds to exit.
_AFTER_THE_REPORT_S = 5.0
_POLL_S = 0.05
# Exit codes of a script that was killed rather than asked to exit.
_KILLED = frozenset(128 + number for number in signal.valid_signals() - {signal.SIGTERM, signal.SIGINT})
# Exit codes that the signals of ``ChildProcess.end`` cause.
_ENDED = (128 + signal.SIGTERM, 128 + signal.SIGKILL)


def train(script: str | None, args: Sequence[str], env: Mapping[str, str] = os.environ) -> int:
    """Run the training script of this host and return the exit code for the container.

    Args:
        script: Path of the script. Default: the hyperparameter ``sagemaker_program``, else ``SAGEMAKER_PROGRAM``.
        args: Arguments for the script. Those from the hyperparameters follow them and take precedence.
        env: Environment variables.

    Returns:
        The script's exit code; 128 + n if signal n killed it; 2 if it could not be started.
    """
    output_dir = _output_dir(env)
    if output_dir is not None:
        remove_failure(output_dir)
    place: Place | None = None
    launcher: _HostLauncher | None = None
    try:
        job = _job_of_this_host(env)
        output_dir = job.output_dir
        topology = Topology.from_job(job)
        place = _place(job, topology)
        launcher = _HostLauncher(job, topology, place, env)
        outcome = launcher.run(script, args)
    except LightningSMError as error:
        _LOG.error("error: %s", error)
        outcome = Outcome.of_exit_code(_USAGE_EXIT_CODE, error_reason(error, place))
    except Exception as error:  # noqa: BLE001 - a bug; SageMaker must still show why the host failed
        _LOG.exception("error in the launcher")
        outcome = Outcome.of_exit_code(1, error_reason(error, place))
    ignore_signals()
    if launcher is not None:
        launcher.write_end(outcome)
    if outcome.exit_code != 0:
        if output_dir is not None:
            write_failure(output_dir, outcome.reason.text)
        _LOG.error("this host exits with code %d: %s", outcome.exit_code, outcome.reason.headline)
    return outcome.exit_code


class _HostLauncher:
    """The launcher of one host: runs the script, and agrees with the other launchers on how the job ends."""

    def __init__(self, job: SageMakerJob, topology: Topology, place: Place, env: Mapping[str, str]) -> None:
        self._job = job
        self._topology = topology
        self._place = place
        self._env = env
        self._timings = Timings(peers_timeout_s=PEERS_TIMEOUT_S.read(env))
        self._max_restarts = MAX_RESTARTS.read(env)
        self._schedule = StopSchedule.from_environment(env)
        folder = CONTROL_DIR.read(env) or Path(tempfile.mkdtemp(prefix="lightning_sm-"))
        self._control = ControlFolder(folder)
        self._child = ChildProcess(self._schedule, self._control)
        self._preparation = Preparation(self._child, env)
        self._record = HostRecord(job, topology.role, lambda: self._child.stopped_by, env)
        self._report_s = REPORT_S.read(env)
        self._prices = PRICES.read(env)
        self._is_saved = False
        self._is_end_written = False
        self._hang_reason = ""
        self._num_restarts = 0
        self._may_end_script = False
        self._has_job_failed_first = False  # before this host was stopped
        self._interrupted_at = 0.0

    def run(self, script: str | None, args: Sequence[str]) -> Outcome:
        """Run the script to its end, and return how this host exits.

        Raises:
            LightningSMError: The script could not be started; the other hosts have been told.
        """
        child = self._child
        child.listen()
        with self._connect() as peers, self._control, self._record:
            child.on_late_signal = peers.stop_waiting
            own, job_outcome = self._run_attempts(peers, script, args)
            if own.kind is OutcomeKind.HANG and not peers.is_alone:
                self._wait(_WAIT_FOR_OTHER_HOSTS_STACKS_S)
            final = self._final_outcome(peers, own, job_outcome)
            if self._job.current_host == self._topology.main_host:
                self._write_report(final)
            return final

    def _run_attempts(self, peers: Peers, name: str | None, args: Sequence[str]) -> tuple[Outcome, JobOutcome | None]:
        """Run the script, report its outcome, and run it again whenever all trainer hosts restart.

        Returns:
            The outcome of the last run of the script, and that of the job if it is known.
        """
        command = None
        while True:
            try:
                if command is None:
                    with self._record.span("preparation"):
                        command = self._prepare(name, args)
                own = self._run_script(peers, *command)
            except Stopped as stopped:
                own = Outcome.of_exit_code(0 if self._is_data_host else stopped.exit_code, str(stopped))
            except LightningSMError as error:
                self._report(peers, Outcome.of_exit_code(_USAGE_EXIT_CODE, error_reason(error, self._place)))
                raise
            job_outcome = self._report(peers, own)
            restart = peers.restart
            has_failed_for_good = own.kind is not OutcomeKind.SUCCESS and not own.may_restart
            if restart is None or (self._is_stopped and has_failed_for_good):
                return own, job_outcome
            if not peers.wait_for_start():
                return self._outcome_without_start(peers, own, restart), peers.job_outcome
            self._child.prepare_restart()

    def _outcome_without_start(self, peers: Peers, own: Outcome, restart: Restart) -> Outcome:
        """Return how this host exits after waiting for a restart that never came."""
        stopped_by, job_outcome = self._child.stopped_by, peers.job_outcome
        if job_outcome is not None and job_outcome.kind is not OutcomeKind.INTERRUPTION:
            return own
        # Stopped while waiting for a restart: report an interruption, not this host's failure, which the restart was
        # meant to overcome. SageMaker then starts the job again. Another host may have been stopped first.
        if stopped_by is None:
            return own if job_outcome is None else Outcome.of_exit_code(INTERRUPTED_EXIT_CODE, job_outcome.reason)
        doing = f"waiting for restart {restart.number} of {restart.most}. Its cause: {restart.cause}"
        stopped = Outcome.of_exit_code(128 + stopped_by, not_started_reason(stopped_by, doing))
        peers.report(stopped)
        return stopped

    def write_end(self, outcome: Outcome) -> None:
        """Write the outcome of this host into the record of the run, once."""
        if not self._is_end_written:
            self._is_end_written = True
            self._record.end(outcome, is_saved=self._is_saved)

    def _write_report(self, outcome: Outcome) -> None:
        """Have the report of the run written, if there is time."""
        self.write_end(outcome)
        limit_s = self._report_s
        if self._is_stopped:
            remaining_s = self._leave_at() - _AFTER_THE_REPORT_S - time.monotonic()
            limit_s = min(limit_s, REPORT_LIMIT_WHEN_STOPPED_S, remaining_s)
        write_report(self._job, self._prices, limit_s)

    @property
    def _is_data_host(self) -> bool:
        return self._topology.role is Role.DATA

    @property
    def _is_stopped(self) -> bool:
        return self._child.stopped_by is not None

    def _run_script(self, peers: Peers, script: Script, argv: Sequence[str], env: Mapping[str, str]) -> Outcome:
        child = self._child
        self._hang_reason = ""
        self._may_end_script = True  # before the next line, so that any restart ordered after it ends the script
        if peers.restart is not None:
            why = "The job restarted before the script was started."
            return Outcome.of_exit_code(INTERRUPTED_EXIT_CODE, why, may_restart=True)
        with Watchdog(child.announced, HANG_S.read(self._env), self._on_hang):
            exit_code = self._run_until_it_ends([*script.command, *argv], script.directory, env)
        if self._hang_reason and exit_code != 0:  # 0: the script recovered and finished while its stacks were saved
            return Outcome(OutcomeKind.HANG, 1, Reason(self._hang_reason), may_restart=not self._is_stopped)
        # A data host whose work is over is ended by these signals, which is a success; any other exit is a failure.
        is_ended_by_stop = child.stopped_by is not None and exit_code == 128 + child.stopped_by
        is_ended_by_job = (child.end_requested or child.end_run_requested) and exit_code in _ENDED
        if self._is_data_host and (is_ended_by_stop or is_ended_by_job):
            exit_code = 0
        if exit_code == 0:
            for warning in self._control.warnings():
                _LOG.error("%s", warning)
            return Outcome.of_exit_code(0)
        if is_ended_by_job:
            # The job ended this script. A rank inside an NCCL collective needs SIGKILL, others exit on SIGTERM: report
            # the same code for both.
            exit_code = INTERRUPTED_EXIT_CODE
        if not self._is_stopped and is_consequence(child.stderr_tail):
            peers.wait_for_decision(_CONSEQUENCE_S)  # for the report of the launcher whose script failed first
        reason = script_reason(
            child.stderr_tail, exit_code, self._place, stopped_by=child.stopped_by, num_restarts=self._num_restarts
        )
        self._record.event("failure", reason.headline)
        is_final = is_permanent_failure(child.stderr_tail, exit_code) and not child.end_run_requested
        may_restart = not (is_final or self._is_stopped or self._is_data_host)
        return Outcome.of_exit_code(exit_code, reason, may_restart=may_restart)

    def _run_until_it_ends(self, command: Sequence[str], directory: Path, env: Mapping[str, str]) -> int:
        """Run the script. On a data host, restart it after a kill if the job still needs it."""
        child = self._child
        exit_code = child.run(command, directory, env)
        while self._is_data_host and not child.must_exit:
            pause_s = restart_pause_s(exit_code, self._num_restarts)
            if pause_s is None:
                break
            _LOG.warning(
                "the data host's script was killed (exit code %d). Restarting it in %.0f s.", exit_code, pause_s
            )
            self._record.event("restart", f"the data host's script was killed (exit code {exit_code})")
            self._num_restarts += 1
            self._wait(pause_s, lambda: child.must_exit)
            exit_code = 0 if child.must_exit else child.run(command, directory, env)
        return exit_code

    def _on_hang(self, where: str) -> None:
        """Save the stacks of the script's processes, and kill the script. The watchdog's thread calls this."""
        files = self._save_stacks()
        stacks = f" Stacks: {', '.join(map(str, files))}." if files else ""
        host = self._job.current_host
        self._hang_reason = f"The training hangs: no progress on host {host}. Last seen: {where}.{stacks}"
        _LOG.error("%s", self._hang_reason)
        self._record.event("hang", self._hang_reason)
        self._child.kill()

    def _save_stacks(self) -> list[Path]:
        folder = self._job.host_output_dir
        stacks = save_stacks(self._control, self._child.announced(), folder)
        return [*stacks, *save_nccl_traces(self._control, folder)]

    def _end_because_of(self, kind: OutcomeKind, end: Callable[[], None]) -> None:
        """End the script because of another host, without blocking; if that host hangs, save the stacks here first."""
        if kind is not OutcomeKind.HANG:
            end()
            return

        def save_and_end() -> None:
            for file in self._save_stacks():
                _LOG.info("stacks: %s.", file)
            end()

        threading.Thread(target=save_and_end, name="stacks", daemon=True).start()

    def _leave_at(self) -> float:
        """Return when an interrupted host must exit at the latest, in seconds of ``time.monotonic``."""
        child = self._child
        return (child.stopped_at or self._interrupted_at) + self._schedule.kill_s

    def _stay_until_uploaded(self) -> None:
        """Wait, after an interruption, until the checkpoint is uploaded."""
        self._interrupted_at = time.monotonic()
        wait_until_uploaded(
            self._control.saved() or [],
            has_agent=self._job.has_upload_agent,
            deadline=self._leave_at,
        )

    def _leave_last(self, peers: Peers) -> None:
        """Wait, after an interruption, for the reports of the other hosts and for the signal that stops this host.

        SageMaker may judge a job by the first host that exits. If that host exits with an error before it was stopped,
        the job counts as failed instead of interrupted, and is not restarted.
        """
        peers.wait_for_peers(max(0.0, self._leave_at() - time.monotonic()))
        if self._is_stopped or peers.is_alone:
            return
        _LOG.info("this host has saved its checkpoint, but has not been told to stop yet. Waiting for the stop signal.")
        self._wait(self._leave_at() - time.monotonic())

    def _wait(self, seconds: float, is_over: Callable[[], bool] | None = None) -> None:
        """Wait for some seconds, or until ``is_over`` returns true (default: until this host is told to stop)."""
        is_over = is_over or (lambda: self._is_stopped)
        deadline = time.monotonic() + seconds
        while not is_over() and (remaining_s := deadline - time.monotonic()) > 0:
            # Not an event: the signal handler would set it, and could interrupt this thread while it holds the lock.
            time.sleep(min(_POLL_S, remaining_s))

    def _prepare(self, name: str | None, args: Sequence[str]) -> tuple[Script, list[str], dict[str, str]]:
        """Get the code and install its requirements; return the script, its arguments and its environment."""
        job = self._job
        banner = _banner(job, self._topology)
        program = find_program(name, job, self._env)
        submission = find_submission(job, self._env)
        folder = devices = None
        if submission is not None:
            devices = self._introduce(banner, program)  # before the download, which may take minutes
            folder = self._preparation.fetch(submission, job)
        script = find_script(program, job, self._env, folder)
        argv = command_line(args, job, script.directory)
        command = shown_arguments([*script.shown, *argv])
        self._record.began(command)
        shown = shlex.join(command)
        if submission is None:
            devices = self._introduce(f"{banner} | {shown}", program)
        else:
            _LOG.info("starting %s in %s", shown, script.directory)
        self._preparation.install(script)
        self._preparation.check_not_stopped("starting the script")
        return script, argv, self._environment(program, script, argv, devices)

    def _introduce(self, banner: str, program: Program) -> int | None:
        """Log which host this is; return the number of processes per host that the job's ``distribution`` asks for."""
        logging.getLogger("lightning_sm").info("%s", banner)  # already begins with the name of the command
        for other in program.overruled:
            _LOG.info(
                "%s names the script %s. Ignoring %s, which names %s.",
                program.named_by.value,
                program.name,
                other.named_by.value,
                other.name,
            )
        return processes_per_host(self._job, self._topology)

    def _environment(
        self, program: Program, script: Script, argv: Sequence[str], devices: int | None
    ) -> dict[str, str]:
        env = {**self._env, **hash_seed(self._env)}
        if devices is not None:
            env[DEVICES.name] = str(devices)
        env[CONTROL_DIR.name] = str(self._control.path)
        env |= self._record.variables
        env |= nccl_variables(self._control, env)
        env |= toolkit_variables(self._job, program.name, argv, self._env)
        # Python puts only the script's own folder on sys.path; "from app.model import X" needs the folder above app.
        paths = list(script.module_dirs)
        if self._env.get("PYTHONPATH"):
            paths.append(self._env["PYTHONPATH"])
        env["PYTHONPATH"] = os.pathsep.join(paths)
        return env

    def _connect(self) -> Peers:
        return Peers(
            key=peers_key(self._job.name or "unnamed", self._env),
            own=self._job.current_host,
            trainers=self._topology.trainer_hosts,
            data_hosts=self._topology.data_hosts,
            main_host=self._topology.main_host,
            addresses=self._job.addresses,
            port=self._topology.peers_port,
            bind=own_address(self._job),
            on_job_outcome=self._on_job_outcome,
            on_restart=self._on_restart,
            max_restarts=self._max_restarts,
            timings=self._timings,
        )

    def _on_job_outcome(self, job: JobOutcome) -> None:
        """End the script if the job's outcome leaves it nothing to do. The thread of ``Peers`` calls this."""
        is_stopped = self._is_stopped
        self._record.on_job_outcome(job)
        # A stop after this is SageMaker's response to the failure, unless the failure was itself an interruption.
        self._has_job_failed_first = not is_stopped and job.kind is not OutcomeKind.INTERRUPTION
        if ends_script(self._topology.role, job, self._job.current_host, is_stopped=is_stopped):
            self._end_because_of(job.kind, self._child.end)

    def _on_restart(self, restart: Restart) -> None:
        """End the script, which restarts when those of all trainer hosts have exited. Called as above."""
        start = "the latest valid checkpoint"
        if self._job.checkpoint_dir is None:
            start = "the beginning, because the job has no checkpoint folder"
        _LOG.warning("%s: all trainer hosts restart from %s. Cause: %s", restart, start, restart.cause)
        self._record.event("restart", f"{restart}. Cause: {restart.cause}")
        if self._is_data_host:
            self._end_because_of(restart.kind, lambda: None)
        elif self._may_end_script:
            self._end_because_of(restart.kind, self._child.end_run)

    def _report(self, peers: Peers, own: Outcome) -> JobOutcome | None:
        """Report the script's outcome to the other hosts; return the job's outcome if it becomes known in time."""
        is_interrupted = own.kind is OutcomeKind.INTERRUPTION and not own.may_restart
        is_saved = self._is_saved = is_interrupted and self._control.saved() is not None
        if is_saved:
            self._stay_until_uploaded()
        peers.report(own)
        if is_saved:
            self._leave_last(peers)
            return peers.job_outcome
        if own.kind is OutcomeKind.SUCCESS:
            # A stopped data host has served all ranks: do not wait for a main host that may be dead.
            must_wait_for_peers = not (self._is_data_host and self._is_stopped)
        else:
            # SageMaker stops a job as soon as one of its hosts exits with an error.
            must_wait_for_peers = self._is_data_host and len(self._topology.data_hosts) > 1 and not self._is_stopped
            if must_wait_for_peers:
                _LOG.warning(
                    "this data host failed. Keeping it alive until training finishes on the remaining data hosts "
                    "(SageMaker stops the job when a host exits with an error). Cause: %s",
                    own.reason.headline,
                )
        if must_wait_for_peers:
            return peers.wait_for_peers()
        # A host that failed exits as soon as the others have its report, so that SageMaker shows its reason and not
        # theirs. If this host was stopped, so are the others: they need no report.
        if not self._is_stopped:
            timeout_s = self._timings.peers_timeout_s
            if self._max_restarts and own.may_restart:  # a connection that was just lost may come back
                timeout_s = max(timeout_s, self._timings.reconnect_s)
            peers.wait_for_decision(timeout_s)
            # Containers start seconds apart. A host that connects too late would be stopped without learning why.
            peers.wait_for_absent_hosts(self._timings.peers_timeout_s)
        return peers.job_outcome

    def _final_outcome(self, peers: Peers, own: Outcome, job: JobOutcome | None) -> Outcome:
        """Return how this host exits."""
        stop = Stop.NONE
        if self._is_stopped:
            stop = Stop.AFTER_FAILURE if self._has_job_failed_first else Stop.FIRST
        final = final_outcome(self._topology.role, stop, own.exit_code, job, self._job.current_host)
        if final is FinalOutcome.NOT_NEEDED:
            _LOG.warning("training succeeded without this data host, so this host exits with 0.")
            return Outcome.of_exit_code(0)
        if final is FinalOutcome.FAILED_ELSEWHERE and job is not None:
            if job.host == self._topology.main_host:  # it may write a report before it exits
                peers.wait_until_main_host_leaves(self._report_s + _AFTER_THE_REPORT_S)
            stacks_s = _WAIT_FOR_OTHER_HOSTS_STACKS_S if job.kind is OutcomeKind.HANG else 0.0
            self._wait(_MAIN_HOST_LEAVES_LATER_S + stacks_s)
            return Outcome.of_exit_code(own.exit_code or 1, job.reason)
        if own.kind is OutcomeKind.SUCCESS:
            return own
        if not self._is_stopped and is_consequence(self._child.stderr_tail):
            # No other host has failed: show the tracebacks that were left out as consequences, as there are no others.
            sys.stderr.write(self._child.left_out.decode("utf-8", "replace"))
        if job is not None and job.host == self._job.current_host:
            return replace(own, reason=job.reason)  # the job's reason names the restarts, too
        return own


def restart_pause_s(exit_code: int, num_restarts: int) -> float | None:
    """Return how long to wait before the script of a data host is restarted.

    The cause of a kill may pass; an error of the script itself would recur.

    Args:
        exit_code: Exit code of the script; 128 + n if signal n killed it.
        num_restarts: How often it was restarted before.

    Returns:
        Seconds; None if the script must not be restarted.
    """
    if exit_code in _KILLED and num_restarts < len(_RESTART_PAUSES_S):
        return _RESTART_PAUSES_S[num_restarts]
    return None


def command_line(args: Sequence[str], job: SageMakerJob, directory: Path) -> list[str]:
    """Build the arguments of the training script.

    Args:
        args: Arguments given to the launcher; they come first.
        job: The job. Its hyperparameters become options, and the files of its ``config`` channel ``--config`` options.
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


def _place(job: SageMakerJob, topology: Topology) -> Place:
    # With several processes, stderr names the rank that failed.
    is_one_process = (job.devices or job.num_gpus) == 1
    is_rank_known = topology.role is Role.TRAINER and is_one_process
    return Place(job.current_host, topology.role, topology.node_rank if is_rank_known else None)


def _banner(job: SageMakerJob, topology: Topology) -> str:
    role = topology.role
    rank = f", node rank {topology.node_rank} of {topology.num_nodes}" if role is Role.TRAINER else ""
    names = ("lightning-sm", "torch", "pytorch-lightning", "lightning")
    found = [f"{name} {version}" for name in names if (version := installed_version(name)) is not None]
    versions = [*found, f"Python {platform.python_version()}"]
    place = f"host {job.current_host}, group {job.current_group.name}, role {role.value}{rank}"
    return f"{', '.join(versions)} | {place}"


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
