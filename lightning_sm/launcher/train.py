"""The container's entry point, ``lightning-sm train``, which runs the training script on one host.

SageMaker runs ``docker run <image> train`` on every host. The launcher fetches the code that came with the job, if any,
turns ``hyperparameters.json`` into a command line, starts the script in its own process group, forwards signals, and
writes the reason for a failure where SageMaker looks for it. It treats trainer and data hosts alike: the script finds
out its host's role. ``lifecycle`` decides what the launcher does next.
"""

from __future__ import annotations

import math
import os
import signal
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

from lightning_sm._log import command_logger
from lightning_sm.errors import JobConfigError, LightningSMError
from lightning_sm.job.control_folder import Beat, ControlFolder
from lightning_sm.job.facts import SageMakerJob, base_directory
from lightning_sm.job.outcomes import INTERRUPTED_EXIT_CODE, Outcome, OutcomeKind, Reason
from lightning_sm.job.reachability import own_address
from lightning_sm.job.topology import Role, Topology
from lightning_sm.job.variables import (
    CONTROL_DIR,
    HANG_S,
    JOB_SECRET,
    MAIN_PORT,
    MAX_RESTARTS,
    PEERS_TIMEOUT_S,
    PRICES,
    REPORT_S,
    STOP_SCHEDULE,
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
from lightning_sm.launcher.lifecycle import LauncherPhase
from lightning_sm.launcher.peers.client import Client
from lightning_sm.launcher.peers.hub import Hub
from lightning_sm.launcher.peers.messages import peers_key
from lightning_sm.launcher.peers.outcome import Restart, Timings
from lightning_sm.launcher.peers.peers import Peers
from lightning_sm.launcher.run_report import write_report
from lightning_sm.launcher.script_command import CommandBuilder, ScriptCommand
from lightning_sm.launcher.upload import UploadWatch, wait_until_uploaded
from lightning_sm.launcher.user_code import prepare
from lightning_sm.launcher.user_code.prepare import Preparation

_LOG = command_logger(__name__)

_USAGE_EXIT_CODE = 2
_POLL_S = 0.05
# A host that waits longer than this for other hosts logs their names.
_QUIET_S = 30.0
_SAVED = "The script saved a checkpoint and exited, as it was asked to."
# Exit codes caused by the signals of ``ChildProcess.end``.
_ENDED = (128 + signal.SIGTERM, 128 + signal.SIGKILL)


def train(script: str | None, args: Sequence[str], env: Mapping[str, str] = os.environ) -> int:
    """Run this host's training script, and return the exit code for the container.

    Args:
        script: Path of the script. Defaults to the hyperparameter ``sagemaker_program``, else ``SAGEMAKER_PROGRAM``.
        args: Arguments for the script. The hyperparameters are appended to them and take precedence.
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
        with ControlFolder(CONTROL_DIR.read(env) or Path(tempfile.mkdtemp(prefix="lightning_sm-"))) as control:
            launcher = _HostLauncher(job, topology, place, control, env, script=script, args=args)
            outcome = launcher.run()
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
    """The launcher of one host, which does the work of each phase and reports events to ``lifecycle``."""

    def __init__(
        self,
        job: SageMakerJob,
        topology: Topology,
        place: Place,
        control: ControlFolder,
        env: Mapping[str, str],
        *,
        script: str | None,
        args: Sequence[str],
    ) -> None:
        self._job = job
        self._topology = topology
        self._place = place
        self._control = control
        self._env = env
        self._timings = Timings(peers_timeout_s=PEERS_TIMEOUT_S.read(env))
        self._max_restarts = MAX_RESTARTS.read(env)
        self._schedule = STOP_SCHEDULE.read(env)
        self._child = ChildProcess(self._schedule, control)
        self._record = HostRecord(job, topology.role, env)
        builder = CommandBuilder(job, topology, env, Preparation(self._child, env), self._record, control)
        self._build = partial(builder.build, script, args)
        self._hang_s = HANG_S.read(env)
        self._report_s = REPORT_S.read(env)
        self._prices = PRICES.read(env)
        self._is_end_written = False
        self._hang_reason = self._last_seen = ""  # of the script's latest run
        self._interrupted_at = 0.0
        self._state = lifecycle.HostState(topology)
        self._peers: Peers
        self._command: ScriptCommand
        self._watchdog: Watchdog
        self._uploads: UploadWatch
        # Each function returns the event that ends its phase; None stands for Done.
        self._works: dict[LauncherPhase, Callable[[], lifecycle.End | None]] = {
            LauncherPhase.PREPARING: self._prepare,
            LauncherPhase.RUNNING: self._run_script,
            LauncherPhase.PAUSING: self._pause,
            LauncherPhase.JUDGING: self._judge,
            LauncherPhase.UPLOADING: self._await_upload,
            LauncherPhase.AWAITING_TRAINERS: self._await_trainers,
            LauncherPhase.AWAITING_DECISION: self._await_decision,
            LauncherPhase.AWAITING_STOP: self._await_stop,
            LauncherPhase.AWAITING_RESTART: self._await_restart,
            LauncherPhase.AWAITING_FIRST_EXIT: self._await_first_exit,
            LauncherPhase.REPORTING: self._write_report,
        }

    def run(self) -> Outcome:
        """Run the script until it exits for good, and return this host's outcome.

        Raises:
            LightningSMError: The hosts could not be connected.
        """
        child = self._child
        child.listen()
        child.on_kill_is_near = self._on_kill_is_near
        child.on_look = self._look
        self._warn_without_secret()
        self._peers = self._make_peers()
        with self._peers, self._record:
            while self._state.phase is not LauncherPhase.OVER:
                event = self._works[self._state.phase]() or lifecycle.Done()
                self._take_news()
                self._tell(event)
        return self._state.outcome

    def write_end(self, outcome: Outcome) -> None:
        """Write this host's outcome to the run's record, unless it was already written."""
        if not self._is_end_written:
            self._is_end_written = True
            self._record.end(outcome, self._state.known_job, is_saved=self._state.is_saved)

    # ---- Events and actions

    def _tell(self, event: lifecycle.End | lifecycle.News) -> None:
        """Pass an event to ``lifecycle``, and carry out the actions that it returns."""
        self._state, actions = lifecycle.step(self._state, event)
        for action in actions:
            self._act(action)

    def _act(self, action: lifecycle.Action) -> None:
        match action:
            case lifecycle.SendReport(outcome):
                self._peers.report(outcome, self._state.attempt)
            case lifecycle.EndScript(kind, restart):
                where, stacks = self._where() if kind is OutcomeKind.HANG else ("", "")
                if where:
                    _LOG.info("last seen: %s.%s", where, stacks)
                self._child.end(for_good=restart is None)

    def _look(self) -> None:
        """Handle news, and check a running script for hangs and overdue uploads."""
        self._take_news()
        if self._state.phase is LauncherPhase.RUNNING:
            now = time.monotonic()
            self._uploads.look(now)
            beats = self._watchdog.look(self._child.announced, now)
            if beats and not self._hang_reason:
                self._on_hang(beats)

    def _take_news(self) -> None:
        """Handle what has happened since the last call: a stop of this host, a restart, or the outcome of the job."""
        restart, job = self._peers.order, self._peers.job_outcome
        known = self._state.restart
        if restart is not None and (known is None or restart.number > known.number):
            self._on_restart(restart)
        news: list[lifecycle.News] = []
        if job is not None and self._state.job is None:
            self._record.on_job_outcome(job)
            news.append(lifecycle.JobEnded(job))
        stopped_by = self._child.stopped_by
        if stopped_by is not None and stopped_by != self._state.stopped_by:
            self._record.on_stop(stopped_by)
            news.append(lifecycle.HostStopped(stopped_by))
        # SageMaker may have stopped this host because the job ended. But if another host exited because all hosts were
        # stopped, handle the stop first, so that this host keeps its whole stop schedule.
        if job is not None and job.kind is OutcomeKind.INTERRUPTION:
            news.reverse()
        for event in news:
            self._tell(event)

    def _on_restart(self, restart: Restart) -> None:
        start = "the latest valid checkpoint"
        if self._job.checkpoint_dir is None:
            start = "the beginning, because the job has no checkpoint folder"
        _LOG.warning("%s: all trainer hosts restart from %s. Cause: %s", restart, start, restart.cause)
        self._record.event("restart", f"{restart}. Cause: {restart.cause}")
        self._tell(lifecycle.RestartOrdered(restart))

    # ---- The work of each phase

    def _prepare(self) -> lifecycle.End:
        try:
            with self._record.span("preparation"):
                self._command = self._build()
        except prepare.Stopped as stopped:
            exit_code = 0 if self._state.is_data_host else 128 + (self._child.stopped_by or signal.SIGTERM)
            return lifecycle.Judged(Outcome.of_exit_code(exit_code, str(stopped)))
        except LightningSMError as error:
            return self._not_started(error)
        return lifecycle.Done()

    def _not_started(self, error: LightningSMError) -> lifecycle.Judged:
        _LOG.error("error: %s", error)
        return lifecycle.Judged(Outcome.of_exit_code(_USAGE_EXIT_CODE, error_reason(error, self._place)))

    def _run_script(self) -> lifecycle.End:
        self._hang_reason = self._last_seen = ""
        child, command = self._child, self._command
        self._watchdog = Watchdog(self._hang_s)
        self._uploads = UploadWatch(None if self._state.is_data_host else self._job.checkpoint_dir)
        try:
            exit_code = child.run(command.arguments, command.directory, command.env, processes=command.processes)
            return lifecycle.Exited(exit_code)
        except LightningSMError as error:
            return self._not_started(error)

    def _pause(self) -> None:
        state = self._state
        _LOG.warning(
            "the data host's script was killed (exit code %d). Restarting it in %.0f s.", state.exit_code, state.pause_s
        )
        self._record.event("restart", f"the data host's script was killed (exit code {state.exit_code})")
        self._wait(lambda: self._child.must_exit, state.pause_s)

    def _judge(self) -> lifecycle.Judged:
        """Find out how and why the script exited."""
        child, state = self._child, self._state
        exit_code = state.exit_code
        if child.was_killed and child.stopped_by is not None and exit_code != 0 and not state.is_data_host:
            killed = f"The script did not exit within {self._schedule.kill_s:g} s and was killed.{self._last_seen}"
            self._record.event("hang", killed)
            return self._judged(Outcome.of_exit_code(INTERRUPTED_EXIT_CODE, stopped_reason(child.stopped_by, killed)))
        if self._hang_reason and exit_code != 0:  # 0: the script recovered and finished while its stacks were saved
            if child.stopped_by is not None and not state.is_data_host:
                reason = stopped_reason(child.stopped_by, self._hang_reason)
                return self._judged(Outcome.of_exit_code(INTERRUPTED_EXIT_CODE, reason))
            failure = child.failed.failure
            if failure is None or failure.is_consequence:
                may_restart = child.stopped_by is None
                return self._judged(Outcome(OutcomeKind.HANG, 1, Reason(self._hang_reason), may_restart=may_restart))
            exit_code = 1  # a rank raised an exception, and then hung while exiting
        # These signals terminate a data host whose work is done, so an exit by one of them is a success. Any other
        # exit is a failure.
        is_ended_by_stop = child.stopped_by is not None and exit_code == 128 + child.stopped_by
        is_ended_by_job = child.is_ending and exit_code in _ENDED
        if state.is_data_host and (is_ended_by_stop or is_ended_by_job):
            exit_code = 0
        if not (state.is_data_host or is_ended_by_job) and (reason := self._interruption(exit_code)):
            return self._judged(Outcome.of_exit_code(INTERRUPTED_EXIT_CODE, reason))
        if exit_code == 0:
            self._warn_after_success()
            return lifecycle.Judged(Outcome.of_exit_code(0))
        return self._judge_failure(exit_code, is_ended_by_job=is_ended_by_job)

    def _interruption(self, exit_code: int) -> str:
        """Return why an interrupted script exited; empty if it finished or failed."""
        child = self._child
        ending = f"(exit code {exit_code}) on {self._place}"
        if self._control.saved() is not None and exit_code in (0, INTERRUPTED_EXIT_CODE):
            # The signal may have reached another host, but not this one yet.
            return stopped_reason(child.stopped_by or signal.SIGTERM, f"Training saved its state and exited {ending}")
        # Processes that announce themselves exit with 0 only if they have finished.
        if exit_code == 0 and child.stopped_by is not None and not self._control.beats():
            note = "it is not known whether its work is complete"
            return stopped_reason(child.stopped_by, f"The script exited after the signal, and {note} {ending}")
        return ""

    def _judge_failure(self, exit_code: int, *, is_ended_by_job: bool) -> lifecycle.Judged:
        child = self._child
        first = replace(child.failed, exit_code=1) if self._hang_reason else child.failed
        if is_ended_by_job:
            # The job ended this script. Ranks in an NCCL collective need SIGKILL, and others exit on SIGTERM, so report
            # one exit code for all.
            exit_code = INTERRUPTED_EXIT_CODE
            first = replace(first, exit_code=exit_code)
        failed = script_failure(first, exit_code, child.stderr_tail, self._place, stopped_by=child.stopped_by)
        if failed.is_consequence and child.stopped_by is None:
            # Wait for the report from the launcher whose script failed first.
            self._wait_for_peers(
                lambda: self._state.job is not None or self._must_restart(), timeline.CAUSE_ELSEWHERE_S
            )
        state, is_stopped = self._state, child.stopped_by is not None
        is_saved = is_stopped and exit_code == INTERRUPTED_EXIT_CODE and self._control.saved() is not None
        if child.stopped_by is not None and is_saved:
            # The script did what it was asked to, so the last lines of its stderr are not the reason.
            failed = replace(failed, reason=Reason(stopped_reason(child.stopped_by, _SAVED)))
        if not is_ended_by_job:
            self._record.event("interruption" if is_saved else "failure", failed.reason.text)
        is_final = failed.is_permanent and state.pending_restart is None
        may_restart = not (is_final or is_stopped or state.is_data_host)
        if not (is_ended_by_job or is_stopped):
            exit_code = failed.exit_code
        outcome = Outcome.of_exit_code(exit_code, failed.reason, may_restart=may_restart)
        return self._judged(outcome)

    def _judged(self, outcome: Outcome) -> lifecycle.Judged:
        return lifecycle.Judged(outcome, self._control.saved() is not None)

    def _warn_after_success(self) -> None:
        hidden = self._command.hidden
        if hidden and not self._control.are_options_read():
            _LOG.error(
                "The script has succeeded, but no SageMakerCLI has read the values of %s, which are secret and "
                "therefore not on its command line. Pass them to the script in another way.",
                ", ".join(hidden),
            )

    def _await_upload(self) -> None:
        self._interrupted_at = time.monotonic()
        files = self._control.saved() or []
        wait_until_uploaded(files, has_agent=self._job.has_upload_agent, deadline=self._leave_at)

    def _await_decision(self) -> None:
        # Containers start seconds apart. Without this wait, SageMaker would stop a late host before it learns why.
        limit_s = max(self._timings.peers_timeout_s, self._timings.lost_s)
        self._wait_for_peers(lambda: self._peers.is_decided or self._must_restart(), limit_s)

    def _await_restart(self) -> lifecycle.End:
        peers = self._peers
        self._wait_for_peers(lambda: peers.job_outcome is not None or self._next_attempt() is not None)
        attempt = self._next_attempt()
        if peers.job_outcome is not None or attempt is None:
            return lifecycle.Done()
        self._child.prepare_restart()
        return lifecycle.Restarted(attempt)

    def _next_attempt(self) -> int | None:
        order = self._peers.order
        return None if order is None else order.next_attempt(self._state.attempt)

    def _await_trainers(self) -> None:
        outcome = self._state.own
        if outcome is not None and outcome.kind is not OutcomeKind.SUCCESS:
            _LOG.warning(
                "this data host failed. Keeping it alive until training finishes with the remaining data hosts "
                "(SageMaker stops the job when a host exits with an error). Cause: %s",
                outcome.reason.headline,
            )
        self._wait_for_peers(self._must_restart, _QUIET_S)
        if not self._peers.is_done and not self._must_restart():
            _LOG.info("the script on this host has exited. Waiting for: %s.", ", ".join(self._peers.awaited))
        self._wait_for_peers(self._must_restart)

    def _await_stop(self) -> None:
        """Wait, after an interruption, for the other hosts' reports and for the signal that stops this host.

        SageMaker may judge a job by the first host that exits. If that host exits with an error before it is told to
        stop, the job counts as failed rather than interrupted, and is not started again.
        """
        self._wait_for_peers(lambda: False, self._leave_at() - time.monotonic())
        if self._is_stopped() or self._peers.is_alone:
            return
        _LOG.info("this host has saved its checkpoint, but has not been told to stop yet. Waiting for the stop signal.")
        self._wait(self._is_stopped, self._leave_at() - time.monotonic())

    def _await_first_exit(self) -> None:
        job = self._state.job
        if job is not None and job.host == self._topology.main_host:  # it may write a report before it exits
            limit_s = self._report_s + timeline.AFTER_THE_REPORT_S
            self._wait(lambda: not self._peers.is_main_host_there or self._child.has_late_signal, limit_s)
        self._wait(self._is_stopped, timeline.MAIN_HOST_LEAVES_LATER_S)

    def _write_report(self) -> None:
        """Write the run report, if there is time."""
        self.write_end(self._state.outcome)
        limit_s = self._report_s
        if self._is_stopped():
            remaining_s = self._leave_at() - timeline.AFTER_THE_REPORT_S - time.monotonic()
            limit_s = min(limit_s, timeline.REPORT_LIMIT_WHEN_STOPPED_S, remaining_s)
        write_report(self._job, self._prices, limit_s)

    # ---- Helpers

    def _is_stopped(self) -> bool:
        return self._child.stopped_by is not None

    def _must_restart(self) -> bool:
        return self._state.pending_restart is not None

    def _on_hang(self, beats: Sequence[Beat]) -> None:
        """Save the stacks of the script's processes, then kill the script."""
        where, stacks = self._where(beats)
        host = self._job.current_host
        self._hang_reason = f"The training hangs: no progress on host {host}. Last seen: {where}.{stacks}"
        if self._topology.num_nodes > 1:  # this host may be waiting for another one in a collective call
            self._hang_reason += " Any rank may be the cause: compare the stacks of all hosts."
        _LOG.error("%s", self._hang_reason)
        self._record.event("hang", self._hang_reason)
        self._child.kill()

    def _on_kill_is_near(self) -> None:
        """Save the stacks of processes that will soon be killed because they have not exited after a stop signal."""
        where, stacks = self._where()
        self._last_seen = f" Last seen: {where}.{stacks}" if where else ""
        _LOG.error("the script has not exited since the stop signal, and will be killed.%s", self._last_seen)

    def _where(self, beats: Sequence[Beat] | None = None) -> tuple[str, str]:
        """Save stacks; return the processes' positions, and a sentence that names the files."""
        beats, now = self._child.announced() if beats is None else beats, time.monotonic()
        # A frozen process writes no stacks. Do not let that delay its SIGKILL.
        limit_s = min(timeline.STACKS_S, max(0.0, self._leave_at() - now) if self._is_stopped() else math.inf)
        stacks = save_stacks(self._control, beats, self._job.host_output_dir, limit_s)
        sentence = f" Stacks: {', '.join(map(str, stacks))}." if stacks else ""
        return described(beats, now), sentence

    def _leave_at(self) -> float:
        """Return the time by which an interrupted host must exit, as a value of ``time.monotonic()``."""
        child = self._child
        return (child.stopped_at or self._interrupted_at) + self._schedule.kill_s

    def _wait_for_peers(self, is_over: Callable[[], bool], seconds: float = math.inf) -> None:
        """Wait until ``is_over`` returns true, the peers have no more news, or this host must exit."""
        self._wait(lambda: is_over() or self._peers.is_done or self._child.has_late_signal, seconds)

    def _wait(self, is_over: Callable[[], bool], seconds: float) -> None:
        """Wait until ``is_over`` returns true, but at most ``seconds``."""
        deadline = time.monotonic() + seconds
        while not is_over() and (remaining_s := deadline - time.monotonic()) > 0:
            # No threading.Event: the signal handler that sets it could interrupt this thread while it holds the lock.
            time.sleep(min(_POLL_S, remaining_s))
            self._take_news()

    def _warn_without_secret(self) -> None:
        """Warn once per job that launchers authenticate only by its name; data hosts log their own warning."""
        topology = self._topology
        is_main = self._job.current_host == topology.main_host
        if is_main and topology.num_nodes > 1 and not topology.data_hosts and JOB_SECRET.read(self._env) is None:
            _LOG.warning(
                "this job has no secret: anyone who knows its name and can reach port %d of %s can report failures on "
                "behalf of its hosts. Start the job with lightning-sm submit, or set %s to the same random characters "
                "on all hosts.",
                topology.peers_port,
                self._job.current_host,
                JOB_SECRET.name,
            )

    def _make_peers(self) -> Peers:
        job, topology, timings = self._job, self._topology, self._timings
        own, trainers, key = job.current_host, topology.trainer_hosts, peers_key(job.name or "unnamed", self._env)
        is_only_host = {*trainers, *topology.data_hosts} == {own}
        if is_only_host and self._max_restarts == 0:
            return Peers(own, timings)
        main_host, port = topology.main_host, topology.peers_port
        if own != main_host:
            address = job.addresses.get(main_host, main_host), port
            return Client(own, main_host=main_host, address=address, key=key, timings=timings)
        bind = own_address(job), port
        try:
            return Hub(
                own,
                trainers,
                topology.data_hosts,
                address=None if is_only_host else bind,
                key=key,
                timings=timings,
                max_restarts=self._max_restarts,
            )
        except OSError as error:
            _LOG.warning(
                "The launcher of this host cannot listen on %s:%d (%s). The hosts will not learn of each other's "
                "failures: when one fails, the others may hang until their collectives time out, and no script is "
                "restarted. Set %s to use other ports.",
                *bind,
                os.strerror(error.errno or 0),
                MAIN_PORT.name,
            )
            return Peers(own, timings)


def _place(job: SageMakerJob, topology: Topology) -> Place:
    # If the host runs several ranks, stderr names the one that failed.
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
