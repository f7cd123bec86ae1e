"""The container's entry point, ``lightning-sm train``, which runs the training script on one host.

SageMaker runs ``docker run <image> train`` on every host. The launcher fetches the code that came with the job, if any,
turns ``hyperparameters.json`` into a command line, starts the script in its own process group, forwards signals, and
writes the reason for a failure where SageMaker looks for it. It does the same on trainer and data hosts: the script
itself finds out the role of its host. What it does when is decided in ``lifecycle``.
"""

from __future__ import annotations

import os
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from lightning_sm._log import command_logger
from lightning_sm.errors import JobConfigError, LightningSMError
from lightning_sm.job.control_folder import Beat, ControlFolder
from lightning_sm.job.facts import SageMakerJob, base_directory
from lightning_sm.job.rendezvous import own_address
from lightning_sm.job.stopping import (
    INTERRUPTED_EXIT_CODE,
    JobOutcome,
    Outcome,
    OutcomeKind,
    Reason,
    StopSchedule,
)
from lightning_sm.job.topology import Role, Topology
from lightning_sm.job.variables import (
    CONTROL_DIR,
    HANG_S,
    JOB_SECRET,
    MAX_RESTARTS,
    PEERS_TIMEOUT_S,
    PRICES,
    REPORT_S,
)
from lightning_sm.launcher import lifecycle, timeline
from lightning_sm.launcher.child_process import ChildProcess, ignore_signals
from lightning_sm.launcher.failure import (
    Place,
    error_reason,
    remove_failure,
    script_failure,
    stopped_reason,
    write_failure,
)
from lightning_sm.launcher.hang import Watchdog, described, save_stacks
from lightning_sm.launcher.host_record import HostRecord
from lightning_sm.launcher.lifecycle import (
    Action,
    Done,
    End,
    EndScript,
    Exited,
    Host,
    HostState,
    HostStopped,
    JobEnded,
    Judged,
    LauncherPhase,
    News,
    NotStarted,
    Restarted,
    RestartOrdered,
    SaveStacks,
    SendReport,
)
from lightning_sm.launcher.peers.connection import Timings, peers_key
from lightning_sm.launcher.peers.outcome import Restart
from lightning_sm.launcher.peers.peers import Peers
from lightning_sm.launcher.run_report import write_report
from lightning_sm.launcher.script_command import CommandBuilder, ScriptCommand
from lightning_sm.launcher.upload import UploadWatch, wait_until_uploaded
from lightning_sm.launcher.user_code import prepare
from lightning_sm.launcher.user_code.prepare import Preparation

_LOG = command_logger(__name__)

_USAGE_EXIT_CODE = 2
_POLL_S = 0.05
_SAVED = "The script saved a checkpoint and exited, as it was asked to."
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
    """The launcher of one host: does the work of each phase, and tells ``lifecycle`` what has happened."""

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
        self._is_end_written = False
        self._hang_reason = self._last_seen = ""  # of the script that has been started last
        self._interrupted_at = 0.0
        # Events come from the main thread and from that of the peers.
        self._transition = threading.Lock()
        host = Host(job.current_host, topology.role, topology.main_host, len(topology.data_hosts))
        self._state = HostState(host)
        self._peers: Peers
        self._build: Callable[[], ScriptCommand]
        self._command: ScriptCommand
        self._waits = {
            LauncherPhase.PAUSING: self._pause,
            LauncherPhase.UPLOADING: self._await_upload,
            LauncherPhase.AWAITING_TRAINERS: self._await_trainers,
            LauncherPhase.AWAITING_DECISION: self._await_decision,
            LauncherPhase.AWAITING_ABSENT_HOSTS: self._await_absent_hosts,
            LauncherPhase.AWAITING_STOP: self._await_stop,
            LauncherPhase.AWAITING_STACKS: self._await_stacks,
            LauncherPhase.AWAITING_FIRST_EXIT: self._await_first_exit,
            LauncherPhase.REPORTING: self._write_report,
        }

    def run(self, script: str | None, args: Sequence[str]) -> Outcome:
        """Run the script to its end, and return how this host exits.

        Raises:
            LightningSMError: The hosts could not be connected.
        """
        child = self._child
        child.listen()
        child.on_kill_is_near = self._on_kill_is_near
        self._warn_without_secret()
        self._peers = self._make_peers()
        with self._peers, self._control, self._record:
            child.on_late_signal = self._peers.stop_waiting
            builder = CommandBuilder(
                self._job,
                self._topology,
                self._env,
                preparation=self._preparation,
                record=self._record,
                control=self._control,
            )
            self._build = lambda: builder.build(script, args)
            while self._state.phase is not LauncherPhase.OVER:
                self._tell(self._work())
            if self._state.shows_consequences:
                sys.stderr.write(child.left_out)
        return self._state.outcome

    def write_end(self, outcome: Outcome) -> None:
        """Write the outcome of this host into the record of the run, once."""
        if not self._is_end_written:
            self._is_end_written = True
            self._record.end(outcome, self._state.known_job, is_saved=self._state.is_saved)

    # ---- Events and actions

    def _tell(self, event: End | News) -> None:
        """Take an event, and do at once what follows from it."""
        with self._transition:
            stopped_by = self._child.stopped_by
            if stopped_by is not None and stopped_by != self._state.stopped_by:
                self._state, _ = lifecycle.step(self._state, HostStopped(stopped_by))
            self._state, actions = lifecycle.step(self._state, event)
        for action in actions:
            self._act(action)

    def _act(self, action: Action) -> None:
        match action:
            case SendReport(outcome):
                self._peers.report(outcome)
            case SaveStacks():
                self._save_stacks_and(lambda: None)
            case EndScript(kind, restart):
                end = self._child.end if restart is None else lambda: self._child.end_run(restart)
                if kind is OutcomeKind.HANG:
                    self._save_stacks_and(end)
                else:
                    end()

    def _save_stacks_and(self, end: Callable[[], None]) -> None:
        """Save the stacks of this host, as another one hangs, without blocking; then end the script."""

        def save_and_end() -> None:
            where, stacks = self._where()
            if where:
                _LOG.info("last seen: %s.%s", where, stacks)
            end()

        threading.Thread(target=save_and_end, name="stacks", daemon=True).start()

    def _on_job_outcome(self, job: JobOutcome) -> None:
        self._record.on_job_outcome(job)
        self._tell(JobEnded(job))

    def _on_restart(self, restart: Restart) -> None:
        start = "the latest valid checkpoint"
        if self._job.checkpoint_dir is None:
            start = "the beginning, because the job has no checkpoint folder"
        _LOG.warning("%s: all trainer hosts restart from %s. Cause: %s", restart, start, restart.cause)
        self._record.event("restart", f"{restart}. Cause: {restart.cause}")
        self._tell(RestartOrdered(restart))

    # ---- The work of each phase

    def _work(self) -> End:
        """Do the work of the phase, and return the event with which it has ended."""
        match self._state.phase:
            case LauncherPhase.PREPARING:
                return self._prepare()
            case LauncherPhase.RUNNING:
                return self._run_script(self._command)
            case LauncherPhase.JUDGING:
                return self._judge(self._state.exit_code)
            case LauncherPhase.AWAITING_RESTART:
                return self._await_restart()
            case phase:
                self._waits[phase]()
                return Done()

    def _prepare(self) -> End:
        try:
            with self._record.span("preparation"):
                self._command = self._build()
        except prepare.Stopped as stopped:
            exit_code = 0 if self._state.is_data_host else stopped.exit_code
            return NotStarted(Outcome.of_exit_code(exit_code, str(stopped)))
        except LightningSMError as error:
            return self._not_started(error)
        return Done()

    def _not_started(self, error: LightningSMError) -> NotStarted:
        _LOG.error("error: %s", error)
        return NotStarted(Outcome.of_exit_code(_USAGE_EXIT_CODE, error_reason(error, self._place)))

    def _run_script(self, command: ScriptCommand) -> End:
        self._hang_reason = self._last_seen = ""
        child = self._child
        checkpoints = None if self._state.is_data_host else self._job.checkpoint_dir
        try:
            with Watchdog(child.announced, HANG_S.read(self._env), self._on_hang), UploadWatch(checkpoints):
                return Exited(child.run(command.arguments, command.directory, command.env))
        except LightningSMError as error:
            return self._not_started(error)

    def _pause(self) -> None:
        state = self._state
        _LOG.warning(
            "the data host's script was killed (exit code %d). Restarting it in %.0f s.", state.exit_code, state.pause_s
        )
        self._record.event("restart", f"the data host's script was killed (exit code {state.exit_code})")
        self._wait(state.pause_s, lambda: self._child.must_exit)

    def _judge(self, exit_code: int) -> Judged:
        """Find out how and why the script has ended."""
        child, state = self._child, self._state
        if child.was_killed and child.stopped_by is not None and exit_code != 0 and not state.is_data_host:
            killed = f"The script did not exit within {self._schedule.kill_s:g} s and was killed.{self._last_seen}"
            self._record.event("hang", killed)
            return self._judged(Outcome.of_exit_code(INTERRUPTED_EXIT_CODE, stopped_reason(child.stopped_by, killed)))
        if self._hang_reason and exit_code != 0:  # 0: the script recovered and finished while its stacks were saved
            if child.stopped_by is not None and not state.is_data_host:
                reason = stopped_reason(child.stopped_by, self._hang_reason)
                return self._judged(Outcome.of_exit_code(INTERRUPTED_EXIT_CODE, reason))
            own = child.failed.failure
            if own is None or own.is_consequence:
                may_restart = child.stopped_by is None
                return self._judged(Outcome(OutcomeKind.HANG, 1, Reason(self._hang_reason), may_restart=may_restart))
            exit_code = 1  # a rank has raised an exception, and its exit has hung
        # A data host whose work is over is ended by these signals, which is a success; any other exit is a failure.
        is_ended_by_stop = child.stopped_by is not None and exit_code == 128 + child.stopped_by
        is_ended_by_job = (child.end_requested or child.end_run_requested) and exit_code in _ENDED
        if state.is_data_host and (is_ended_by_stop or is_ended_by_job):
            exit_code = 0
        if not (state.is_data_host or is_ended_by_job) and (left := self._interruption(exit_code)):
            return self._judged(Outcome.of_exit_code(INTERRUPTED_EXIT_CODE, left))
        if exit_code == 0:
            self._warn_after_success()
            return Judged(Outcome.of_exit_code(0))
        return self._judge_failure(exit_code, is_ended_by_job=is_ended_by_job)

    def _interruption(self, exit_code: int) -> str:
        """Say that the script has left because the job was stopped or interrupted; empty if it finished or failed."""
        child = self._child
        ending = f"(exit code {exit_code}) on {self._place}"
        if self._control.saved() is not None and exit_code in (0, INTERRUPTED_EXIT_CODE):
            # Another host may have been told to stop, and this one may not have been yet.
            return stopped_reason(
                child.stopped_by or signal.SIGTERM, f"The training has saved its state and left {ending}"
            )
        # Those that announce themselves leave with another code, unless they have finished.
        if exit_code == 0 and child.stopped_by is not None and not child.has_announced:
            note = "whether its work is complete is not known"
            return stopped_reason(child.stopped_by, f"The script has exited after the signal, and {note} {ending}")
        return ""

    def _judge_failure(self, exit_code: int, *, is_ended_by_job: bool) -> Judged:
        child = self._child
        first = replace(child.failed, exit_code=1) if self._hang_reason else child.failed
        if is_ended_by_job:
            # The job ended this script. A rank inside an NCCL collective needs SIGKILL, others exit on SIGTERM: report
            # the same code for both.
            exit_code = INTERRUPTED_EXIT_CODE
            first = replace(first, exit_code=exit_code)
        failed = script_failure(first, exit_code, child.stderr_tail, self._place, stopped_by=child.stopped_by)
        is_consequence = failed.is_consequence and child.stopped_by is None
        if is_consequence:
            # For the report of the launcher whose script failed first.
            self._peers.wait_for_decision(timeline.CAUSE_ELSEWHERE_S)
        state, is_stopped = self._state, child.stopped_by is not None
        is_saved = is_stopped and exit_code == INTERRUPTED_EXIT_CODE and self._control.saved() is not None
        if child.stopped_by is not None and is_saved:
            # What the script last wrote to stderr is not the reason: it did what it was asked to.
            failed = replace(failed, reason=Reason(stopped_reason(child.stopped_by, _SAVED)))
        if not is_ended_by_job:
            self._record.event("interruption" if is_saved else "failure", failed.reason.headline)
        is_final = failed.is_permanent and state.pending_restart is None
        may_restart = not (is_final or is_stopped or state.is_data_host)
        if not (is_ended_by_job or is_stopped):
            exit_code = failed.exit_code
        outcome = Outcome.of_exit_code(exit_code, failed.reason, may_restart=may_restart)
        return self._judged(outcome, is_consequence=is_consequence)

    def _judged(self, outcome: Outcome, *, is_consequence: bool = False) -> Judged:
        return Judged(outcome, self._control.saved() is not None, is_consequence)

    def _warn_after_success(self) -> None:
        hidden = self._command.hidden
        if hidden and not self._control.are_options_read():
            _LOG.error(
                "The script has succeeded, but no SageMakerCLI has read the values of %s, which are not on its "
                "command line because they are secret. Give them to the script in another way.",
                ", ".join(hidden),
            )

    def _await_upload(self) -> None:
        self._interrupted_at = time.monotonic()
        files = self._control.saved() or []
        wait_until_uploaded(files, has_agent=self._job.has_upload_agent, deadline=self._leave_at)

    def _await_decision(self) -> None:
        own, timeout_s = self._state.own, self._timings.peers_timeout_s
        if self._max_restarts and own is not None and own.may_restart:  # a connection just lost may come back
            timeout_s = max(timeout_s, self._timings.reconnect_s)
        self._peers.wait_for_decision(timeout_s)

    def _await_absent_hosts(self) -> None:
        # Containers start seconds apart. A host that connects too late would be stopped without learning why.
        self._peers.wait_for_absent_hosts(self._timings.peers_timeout_s)

    def _await_restart(self) -> End:
        if not self._peers.wait_for_start():
            return Done()
        attempt = self._peers.attempt
        self._child.prepare_restart(attempt)
        return Restarted(attempt)

    def _await_stacks(self) -> None:
        if not self._peers.is_alone:
            self._wait(timeline.STACKS_ELSEWHERE_S)

    def _await_trainers(self) -> None:
        own = self._state.own
        if own is not None and own.kind is not OutcomeKind.SUCCESS:
            _LOG.warning(
                "this data host failed. Keeping it alive until training finishes on the remaining data hosts "
                "(SageMaker stops the job when a host exits with an error). Cause: %s",
                own.reason.headline,
            )
        self._peers.wait_for_peers()

    def _await_stop(self) -> None:
        """Wait, after an interruption, for the reports of the other hosts and for the signal that stops this host.

        SageMaker may judge a job by the first host that exits. If that host exits with an error before it was stopped,
        the job counts as failed instead of interrupted, and is not restarted.
        """
        self._peers.wait_for_peers(max(0.0, self._leave_at() - time.monotonic()))
        if self._is_stopped or self._peers.is_alone:
            return
        _LOG.info("this host has saved its checkpoint, but has not been told to stop yet. Waiting for the stop signal.")
        self._wait(self._leave_at() - time.monotonic())

    def _await_first_exit(self) -> None:
        job = self._state.job
        is_hang = job is not None and job.kind is OutcomeKind.HANG
        if job is not None and job.host == self._topology.main_host:  # it may write a report before it exits
            self._peers.wait_until_main_host_leaves(self._report_s + timeline.AFTER_THE_REPORT_S)
        self._wait(timeline.MAIN_HOST_LEAVES_LATER_S + (timeline.STACKS_ELSEWHERE_S if is_hang else 0.0))

    def _write_report(self) -> None:
        """Have the report of the run written, if there is time."""
        self.write_end(self._state.outcome)
        limit_s = self._report_s
        if self._is_stopped:
            remaining_s = self._leave_at() - timeline.AFTER_THE_REPORT_S - time.monotonic()
            limit_s = min(limit_s, timeline.REPORT_LIMIT_WHEN_STOPPED_S, remaining_s)
        write_report(self._job, self._prices, limit_s)

    # ---- What the work needs

    @property
    def _is_stopped(self) -> bool:
        return self._child.stopped_by is not None

    def _on_hang(self, beats: Sequence[Beat]) -> None:
        """Save the stacks of the script's processes, and kill the script. The watchdog's thread calls this."""
        where, stacks = self._where(beats)
        host = self._job.current_host
        self._hang_reason = f"The training hangs: no progress on host {host}. Last seen: {where}.{stacks}"
        _LOG.error("%s", self._hang_reason)
        self._record.event("hang", self._hang_reason)
        self._child.kill()

    def _on_kill_is_near(self) -> None:
        """Save the stacks of processes that have not exited after a stop, before they are killed."""
        where, stacks = self._where()
        self._last_seen = f" Last seen: {where}.{stacks}" if where else ""
        _LOG.error("the script has not exited since the stop, and will be killed.%s", self._last_seen)

    def _where(self, beats: Sequence[Beat] | None = None) -> tuple[str, str]:
        """Save stacks; return where the script's processes stand, and a sentence with the files."""
        beats, now = self._child.announced() if beats is None else beats, time.monotonic()
        stacks = save_stacks(self._control, beats, self._job.host_output_dir)
        sentence = f" Stacks: {', '.join(str(one.file) for one in stacks)}." if stacks else ""
        return described(beats, now, stacks), sentence

    def _leave_at(self) -> float:
        """Return when an interrupted host must exit at the latest, in seconds of ``time.monotonic``."""
        child = self._child
        return (child.stopped_at or self._interrupted_at) + self._schedule.kill_s

    def _wait(self, seconds: float, is_over: Callable[[], bool] | None = None) -> None:
        """Wait for some seconds, or until ``is_over`` returns true (default: until this host is told to stop)."""
        is_over = is_over or (lambda: self._is_stopped)
        deadline = time.monotonic() + seconds
        while not is_over() and (remaining_s := deadline - time.monotonic()) > 0:
            # Not an event: the signal handler would set it, and could interrupt this thread while it holds the lock.
            time.sleep(min(_POLL_S, remaining_s))

    def _warn_without_secret(self) -> None:
        """Say once per job that its launchers recognise each other by its name alone; data hosts say it themselves."""
        topology = self._topology
        is_main = self._job.current_host == topology.main_host
        if is_main and topology.num_nodes > 1 and not topology.data_hosts and JOB_SECRET.read(self._env) is None:
            _LOG.warning(
                "this job has no secret: whoever knows its name and can reach port %d of %s can report failures in the "
                "name of its hosts. Start the job with lightning-sm submit, or set %s to random characters, the same "
                "on all hosts.",
                topology.peers_port,
                self._job.current_host,
                JOB_SECRET.name,
            )

    def _make_peers(self) -> Peers:
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


def _place(job: SageMakerJob, topology: Topology) -> Place:
    # With several processes, stderr names the rank that failed.
    is_one_process = (job.devices or job.num_gpus) == 1
    is_rank_known = topology.role is Role.TRAINER and is_one_process
    return Place(job.current_host, topology.role, topology.node_rank if is_rank_known else None)


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
