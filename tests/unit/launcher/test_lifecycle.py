"""A host's life cycle as a state machine: tables of transitions, and random sequences of events."""

from __future__ import annotations

import signal
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lightning_sm.job.outcomes import INTERRUPTED_EXIT_CODE, JobOutcome, Outcome, OutcomeKind, Reason
from lightning_sm.job.topology import Role, Topology
from lightning_sm.launcher.lifecycle import (
    Done,
    EndScript,
    Exited,
    HostState,
    HostStopped,
    JobEnded,
    Judged,
    LauncherPhase,
    Restarted,
    RestartOrdered,
    SendReport,
    Stop,
    step,
)
from lightning_sm.launcher.peers.outcome import Restart

_HOST = "algo-1"
_MAIN = Topology(_HOST, (_HOST, "algo-2"), ("algo-9",), groups=(), main_port=20000, source="")
_TRAINER = replace(_MAIN, trainer_hosts=("algo-0", _HOST))
_DATA = replace(_MAIN, trainer_hosts=("algo-2",), data_hosts=(_HOST,))
_ONE_OF_TWO = replace(_DATA, data_hosts=(_HOST, "algo-9"))
_UNKNOWN = None
_FINISHED = JobOutcome(OutcomeKind.SUCCESS)
_FAILED_HERE = JobOutcome(OutcomeKind.FAILURE, _HOST, 7, Reason("ValueError: broken"))
_FAILED_ELSEWHERE = JobOutcome(OutcomeKind.FAILURE, "algo-2", 7, Reason("ValueError: broken"))
_STOPPED_ELSEWHERE = JobOutcome(OutcomeKind.INTERRUPTION, "algo-2", INTERRUPTED_EXIT_CODE, Reason("killed by SIGTERM"))
_LOST_ELSEWHERE = JobOutcome.lost("algo-2", "it closed the connection")
_ALL = (_UNKNOWN, _FINISHED, _FAILED_HERE, _FAILED_ELSEWHERE, _STOPPED_ELSEWHERE, _LOST_ELSEWHERE)
_ELSEWHERE = (_FAILED_ELSEWHERE, _STOPPED_ELSEWHERE, _LOST_ELSEWHERE)


@pytest.mark.parametrize("stop", Stop)
@pytest.mark.parametrize("exit_code", [0, 1, INTERRUPTED_EXIT_CODE])
@pytest.mark.parametrize("job", _ALL)
def test_a_data_host_exits_as_its_script_unless_training_succeeded_without_it(stop, exit_code, job):
    """A data host keeps its script's exit code and reason after a stop or a failure elsewhere."""
    own = Outcome.of_exit_code(exit_code, "its own reason")
    state = HostState(_DATA, stop=stop, own=own, job=job)
    assert state.outcome.exit_code == (0 if job is _FINISHED else exit_code)
    assert state.outcome.reason in (own.reason, Reason(""), _FAILED_HERE.reason)
    assert not state.is_first_failure_elsewhere


@pytest.mark.parametrize(
    ("stop", "exit_code", "jobs", "expected"),
    [
        *((stop, code, (_UNKNOWN, _FINISHED, _FAILED_HERE), code) for stop in Stop for code in (0, 1)),
        (Stop.NONE, 0, _ELSEWHERE, 1),
        (Stop.NONE, 7, _ELSEWHERE, 7),
        (Stop.AFTER_FAILURE, 0, _ELSEWHERE, 1),
        (Stop.AFTER_FAILURE, 143, _ELSEWHERE, 143),
        (Stop.FIRST, 143, _ELSEWHERE, 143),
        (Stop.FIRST, 0, _ELSEWHERE, 1),
    ],
)
def test_a_trainer_host_never_looks_successful_when_another_failed(stop, exit_code, jobs, expected):
    """A trainer host fails if another host did. If it was stopped first, it keeps its reason unless it succeeded."""
    own = Outcome.of_exit_code(exit_code, "its own reason")
    for job in jobs:
        state = HostState(_TRAINER, stop=stop, own=own, job=job)
        assert state.outcome.exit_code == expected
        is_of_other = job in _ELSEWHERE and (exit_code == 0 or stop is not Stop.FIRST)
        assert state.is_first_failure_elsewhere is is_of_other
        assert not is_of_other or state.outcome.reason == job.reason


@pytest.mark.parametrize(
    ("host", "stop", "ending"),
    [
        (_TRAINER, Stop.NONE, _ELSEWHERE),
        (_TRAINER, Stop.FIRST, (_FAILED_ELSEWHERE,)),
        (_DATA, Stop.NONE, (_FINISHED, *_ELSEWHERE)),
        (_DATA, Stop.FIRST, (_FINISHED, *_ELSEWHERE)),
    ],
)
def test_which_outcomes_of_the_job_end_a_script(host, stop, ending):
    """A data host stops after training. A stopped trainer host keeps its time to save a checkpoint."""
    for job in (_FINISHED, _FAILED_HERE, *_ELSEWHERE):
        state = HostState(host, LauncherPhase.RUNNING, stop)
        assert step(state, JobEnded(job))[1] == ((EndScript(job.kind),) if job in ending else ()), job


@pytest.mark.parametrize(
    ("stop", "own", "job", "known"),
    [
        (Stop.NONE, Outcome.of_exit_code(143), _FAILED_ELSEWHERE, _FAILED_ELSEWHERE),
        (Stop.AFTER_FAILURE, Outcome.of_exit_code(143), _FAILED_ELSEWHERE, _FAILED_ELSEWHERE),
        (Stop.FIRST, Outcome.of_exit_code(143), _FAILED_ELSEWHERE, None),
        (Stop.FIRST, Outcome.of_exit_code(0), _FINISHED, _FINISHED),
        (Stop.NONE, Outcome.of_exit_code(1), None, None),
    ],
)
def test_a_host_knows_how_the_job_ended_unless_it_was_stopped_before(stop, own, job, known):
    """A stopped host ignores a later failure elsewhere, which is a consequence of the stop."""
    assert HostState(_MAIN, stop=stop, own=own, job=job).known_job is known


_SUCCESS = Outcome.of_exit_code(0)
_BROKEN = Outcome.of_exit_code(1, "ValueError: broken")
_KILLED = Outcome.of_exit_code(137, "killed by SIGKILL", may_restart=True)
_INTERRUPTED = Outcome.of_exit_code(INTERRUPTED_EXIT_CODE, "interrupted")
_HANGS = Outcome(OutcomeKind.HANG, 1, Reason("no progress"), may_restart=True)
_TOLD = Outcome.of_exit_code(INTERRUPTED_EXIT_CODE, "ended for a restart", may_restart=True)
_TERM = HostStopped(signal.SIGTERM)
_FIRST = Restart(1, 2, OutcomeKind.FAILURE, "killed")
_SECOND = Restart(2, 2, OutcomeKind.FAILURE, "killed again")


def _life(host, *events):
    """Return a host's phases, its actions and its final state."""
    state = HostState(host)
    phases, actions = [state.phase], []
    for event in events:
        state, new = step(state, event)
        actions += new
        if state.phase is not phases[-1]:
            phases.append(state.phase)
    return phases, actions, state


@pytest.mark.parametrize(
    ("host", "events", "phases", "actions", "outcome"),
    [
        pytest.param(
            _MAIN,
            [Done(), Exited(0), Judged(_SUCCESS), JobEnded(_FINISHED), Done(), Done()],
            "PREPARING RUNNING JUDGING AWAITING_TRAINERS REPORTING OVER",
            [SendReport(_SUCCESS)],
            _SUCCESS,
            id="success",
        ),
        pytest.param(
            _TRAINER,
            [Done(), Exited(1), Judged(_BROKEN), JobEnded(_FAILED_HERE), Done()],
            "PREPARING RUNNING JUDGING AWAITING_DECISION OVER",
            [SendReport(_BROKEN)],
            replace(_BROKEN, reason=_FAILED_HERE.reason),
            id="failure here",
        ),
        pytest.param(
            _TRAINER,
            [Done(), JobEnded(_FAILED_ELSEWHERE), Exited(143), Judged(_TOLD), Done(), Done()],
            "PREPARING RUNNING JUDGING AWAITING_DECISION AWAITING_FIRST_EXIT OVER",
            [EndScript(OutcomeKind.FAILURE), SendReport(_TOLD)],
            Outcome.of_exit_code(143, _FAILED_ELSEWHERE.reason),
            id="failure elsewhere",
        ),
        pytest.param(
            _TRAINER,
            [Done(), Exited(1), Judged(_HANGS), JobEnded(replace(_FAILED_HERE, kind=OutcomeKind.HANG)), Done()],
            "PREPARING RUNNING JUDGING AWAITING_DECISION OVER",
            [SendReport(_HANGS)],
            replace(_HANGS, reason=_FAILED_HERE.reason),
            id="hang here",
        ),
        pytest.param(
            _TRAINER,
            [Done(), _TERM, Exited(143), Judged(_INTERRUPTED, has_saved=True), Done(), Done()],
            "PREPARING RUNNING JUDGING UPLOADING AWAITING_STOP OVER",
            [SendReport(_INTERRUPTED)],
            _INTERRUPTED,
            id="interruption with a checkpoint",
        ),
        pytest.param(
            _TRAINER,
            [Done(), _TERM, Exited(143), Judged(_INTERRUPTED)],
            "PREPARING RUNNING JUDGING OVER",
            [SendReport(_INTERRUPTED)],
            _INTERRUPTED,
            id="interruption without a checkpoint",
        ),
        pytest.param(
            _TRAINER,
            [Judged(_BROKEN), JobEnded(_FAILED_HERE), Done()],
            "PREPARING AWAITING_DECISION OVER",
            [SendReport(_BROKEN)],
            replace(_BROKEN, reason=_FAILED_HERE.reason),
            id="no code",
        ),
        pytest.param(
            _TRAINER,
            [
                *[Done(), RestartOrdered(_FIRST), Exited(143), Judged(_TOLD), Done()],
                *[Restarted(1), Exited(0), Judged(_SUCCESS), Done()],
            ],
            "PREPARING RUNNING JUDGING AWAITING_DECISION AWAITING_RESTART RUNNING JUDGING AWAITING_TRAINERS OVER",
            [EndScript(OutcomeKind.FAILURE, restart=1), SendReport(_TOLD), SendReport(_SUCCESS)],
            _SUCCESS,
            id="restart after a failure elsewhere",
        ),
        pytest.param(
            _TRAINER,
            [
                *[RestartOrdered(_FIRST), Done(), Done()],
                *[Restarted(1), RestartOrdered(_SECOND), Exited(143), Judged(_TOLD), Done()],
                *[Restarted(2), Exited(0), Judged(_SUCCESS), Done()],
            ],
            "PREPARING AWAITING_DECISION AWAITING_RESTART"
            " RUNNING JUDGING AWAITING_DECISION AWAITING_RESTART"
            " RUNNING JUDGING AWAITING_TRAINERS OVER",
            [
                SendReport(
                    Outcome.of_exit_code(143, "The job restarted before the script was started.", may_restart=True)
                ),
                *[EndScript(OutcomeKind.FAILURE, restart=2), SendReport(_TOLD), SendReport(_SUCCESS)],
            ],
            _SUCCESS,
            id="restart while preparing, and another one",
        ),
        pytest.param(
            _TRAINER,
            [
                *[Done(), Exited(137), Judged(_KILLED), RestartOrdered(_FIRST), Done()],
                *[RestartOrdered(_SECOND), Restarted(1), Done(), Restarted(2)],
            ],
            "PREPARING RUNNING JUDGING AWAITING_DECISION AWAITING_RESTART AWAITING_DECISION AWAITING_RESTART RUNNING",
            [
                SendReport(_KILLED),
                SendReport(
                    Outcome.of_exit_code(143, "The job restarted before the script was started.", may_restart=True)
                ),
            ],
            None,
            id="a start that was missed",
        ),
        pytest.param(
            _TRAINER,
            [Done(), Exited(137), Judged(_KILLED), RestartOrdered(_FIRST), Done(), _TERM, Done()],
            "PREPARING RUNNING JUDGING AWAITING_DECISION AWAITING_RESTART OVER",
            [
                SendReport(_KILLED),
                SendReport(
                    Outcome.of_exit_code(
                        143,
                        "The job was stopped or interrupted (SIGTERM). This host was waiting for restart 1 of 2. "
                        "Its cause: killed.",
                    )
                ),
            ],
            Outcome.of_exit_code(
                143,
                "The job was stopped or interrupted (SIGTERM). This host was waiting for restart 1 of 2. "
                "Its cause: killed.",
            ),
            id="stopped while waiting for a restart",
        ),
        pytest.param(
            _TRAINER,
            [
                *[Done(), Exited(137), Judged(_KILLED), RestartOrdered(_FIRST), Done()],
                *[JobEnded(_STOPPED_ELSEWHERE), Done(), Done()],
            ],
            "PREPARING RUNNING JUDGING AWAITING_DECISION AWAITING_RESTART AWAITING_FIRST_EXIT OVER",
            [SendReport(_KILLED)],
            Outcome.of_exit_code(143, _STOPPED_ELSEWHERE.reason),
            id="another host stopped while waiting for a restart",
        ),
        pytest.param(
            _TRAINER,
            [
                *[Done(), Exited(137), Judged(_KILLED), RestartOrdered(_FIRST), Done()],
                *[JobEnded(_FAILED_ELSEWHERE), Done(), Done()],
            ],
            "PREPARING RUNNING JUDGING AWAITING_DECISION AWAITING_RESTART AWAITING_FIRST_EXIT OVER",
            [SendReport(_KILLED)],
            Outcome.of_exit_code(137, _FAILED_ELSEWHERE.reason),
            id="another host failed while waiting for a restart",
        ),
        pytest.param(
            _TRAINER,
            [Done(), Exited(137), Judged(_KILLED), RestartOrdered(_FIRST), Done(), Done()],
            "PREPARING RUNNING JUDGING AWAITING_DECISION AWAITING_RESTART OVER",
            [SendReport(_KILLED)],
            _KILLED,
            id="a restart that never came",
        ),
        pytest.param(
            _TRAINER,
            [Done(), Exited(0), Judged(_SUCCESS), JobEnded(_FAILED_ELSEWHERE), Done(), Done()],
            "PREPARING RUNNING JUDGING AWAITING_TRAINERS AWAITING_FIRST_EXIT OVER",
            [SendReport(_SUCCESS)],
            Outcome.of_exit_code(1, _FAILED_ELSEWHERE.reason),
            id="success before a failure elsewhere",
        ),
        pytest.param(
            _TRAINER,
            [Done(), RestartOrdered(_FIRST), _TERM, Exited(1), Judged(_BROKEN)],
            "PREPARING RUNNING JUDGING OVER",
            [EndScript(OutcomeKind.FAILURE, restart=1), SendReport(_BROKEN)],
            _BROKEN,
            id="stopped while ending for a restart",
        ),
        pytest.param(
            _TRAINER,
            [Done(), Exited(0), Judged(_SUCCESS), RestartOrdered(_FIRST), _TERM, Done()],
            "PREPARING RUNNING JUDGING AWAITING_TRAINERS AWAITING_RESTART",
            [SendReport(_SUCCESS)],
            None,
            id="restart after a success here, and a stop",
        ),
        pytest.param(
            _TRAINER,
            [Done(), Exited(137), Judged(_KILLED), RestartOrdered(_FIRST), _TERM, Done()],
            "PREPARING RUNNING JUDGING AWAITING_DECISION AWAITING_RESTART",
            [SendReport(_KILLED)],
            None,
            id="restart after a kill here, and a stop",
        ),
        pytest.param(
            _TRAINER,
            [Done(), RestartOrdered(_FIRST), Exited(143), Judged(_TOLD, has_saved=True)],
            "PREPARING RUNNING JUDGING AWAITING_DECISION",
            [EndScript(OutcomeKind.FAILURE, restart=1), SendReport(_TOLD)],
            None,
            id="a checkpoint before the end for a restart",
        ),
        pytest.param(
            _TRAINER,
            [Done(), Exited(0), Judged(_SUCCESS), JobEnded(_FAILED_HERE), Done()],
            "PREPARING RUNNING JUDGING AWAITING_TRAINERS OVER",
            [SendReport(_SUCCESS)],
            _SUCCESS,
            id="success after a failure here",
        ),
        pytest.param(
            _TRAINER,
            [Done(), JobEnded(_STOPPED_ELSEWHERE), _TERM, Exited(143), Judged(_INTERRUPTED)],
            "PREPARING RUNNING JUDGING OVER",
            [EndScript(OutcomeKind.INTERRUPTION), SendReport(_INTERRUPTED)],
            _INTERRUPTED,
            id="stopped after another host",
        ),
        pytest.param(
            _TRAINER,
            [Done(), _TERM, JobEnded(_FAILED_ELSEWHERE), HostStopped(signal.SIGINT), Exited(143), Judged(_INTERRUPTED)],
            "PREPARING RUNNING JUDGING OVER",
            [EndScript(OutcomeKind.FAILURE), SendReport(_INTERRUPTED)],
            _INTERRUPTED,
            id="stopped twice, the first time before a failure elsewhere",
        ),
        pytest.param(
            _ONE_OF_TWO,
            [Done(), _TERM, Exited(1), Judged(_BROKEN)],
            "PREPARING RUNNING JUDGING OVER",
            [SendReport(_BROKEN)],
            _BROKEN,
            id="error of one of two data hosts after a stop",
        ),
        pytest.param(
            _DATA,
            [Done(), Exited(137), Done(), Exited(139), Done(), Exited(137), Done(), Exited(137)],
            "PREPARING RUNNING PAUSING RUNNING PAUSING RUNNING PAUSING RUNNING JUDGING",
            [],
            None,
            id="kills of a data host",
        ),
        pytest.param(
            _DATA,
            [Done(), Exited(1), Judged(_BROKEN), Done()],
            "PREPARING RUNNING JUDGING AWAITING_DECISION OVER",
            [SendReport(_BROKEN)],
            _BROKEN,
            id="error of the only data host",
        ),
        pytest.param(
            _ONE_OF_TWO,
            [Done(), Exited(1), Judged(_BROKEN), JobEnded(_FINISHED), Done()],
            "PREPARING RUNNING JUDGING AWAITING_TRAINERS OVER",
            [SendReport(_BROKEN)],
            _SUCCESS,
            id="error of one of two data hosts",
        ),
        pytest.param(
            _DATA,
            [Done(), JobEnded(_FINISHED), Exited(0), Judged(_SUCCESS), Done()],
            "PREPARING RUNNING JUDGING AWAITING_TRAINERS OVER",
            [EndScript(OutcomeKind.SUCCESS), SendReport(_SUCCESS)],
            _SUCCESS,
            id="end of a data host",
        ),
        pytest.param(
            _DATA,
            [Done(), Exited(137), JobEnded(_FINISHED), Done(), Done()],
            "PREPARING RUNNING PAUSING AWAITING_TRAINERS OVER",
            [EndScript(OutcomeKind.SUCCESS), SendReport(_SUCCESS)],
            _SUCCESS,
            id="end of a data host that was killed",
        ),
        pytest.param(
            _DATA,
            [Done(), _TERM, Exited(137), Judged(_SUCCESS)],
            "PREPARING RUNNING JUDGING OVER",
            [SendReport(_SUCCESS)],
            _SUCCESS,
            id="stopped data host",
        ),
        pytest.param(
            _DATA,
            [RestartOrdered(_FIRST), Done(), RestartOrdered(_SECOND)],
            "PREPARING RUNNING",
            [],
            None,
            id="restarts of the trainers",
        ),
    ],
)
def test_lives(host, events, phases, actions, outcome):
    """Check a host's phases, its actions and its outcome."""
    gone_through, done, state = _life(host, *events)
    assert [phase.name for phase in gone_through] == phases.split()
    assert done == actions
    if outcome is not None:
        assert state.outcome == outcome


@pytest.mark.parametrize(
    ("host", "restart", "attempt", "is_pending"),
    [
        *[(_MAIN, None, 0, False), (_MAIN, _FIRST, 0, True), (_MAIN, _FIRST, 1, False), (_MAIN, _FIRST, 2, False)],
        *[(_MAIN, _SECOND, 1, True), (_DATA, _FIRST, 0, False)],
    ],
)
def test_a_restart_is_pending_until_the_script_takes_part_in_it(host, restart, attempt, is_pending):
    """A restart is pending until the script has joined it; data hosts join none, and late orders change nothing."""
    state = HostState(host, restart=restart, attempt=attempt)
    assert state.pending_restart is (restart if is_pending else None)


@pytest.mark.parametrize("exit_code", [0, 1, 2, 255, 128 + signal.SIGTERM, 128 + signal.SIGINT])
def test_only_a_script_that_was_killed_is_started_again(exit_code):
    """Only a data host's killed script restarts: others would exit again, and trainer hosts need each other."""
    assert _life(_DATA, Done(), Exited(exit_code))[2].phase is LauncherPhase.JUDGING
    assert _life(_TRAINER, Done(), Exited(137))[2].phase is LauncherPhase.JUDGING
    states = [_life(_DATA, Done(), *[Exited(137), Done()] * number, Exited(137))[2] for number in range(3)]
    assert [state.pause_s for state in states] == [1, 2, 4]


def test_a_host_has_no_outcome_before_its_script_has_exited():
    """To ask for it too early, a bug in the launcher, raises an error that names the phase."""
    with pytest.raises(ValueError, match="A launcher that is running the script has no outcome"):
        _ = HostState(_MAIN, LauncherPhase.RUNNING).outcome


_OUTCOMES = st.sampled_from([_SUCCESS, _BROKEN, _KILLED, _INTERRUPTED, _HANGS, _TOLD])
_JUDGED = st.builds(Judged, _OUTCOMES, st.booleans())
_JOBS = st.sampled_from([_FINISHED, _FAILED_HERE, *_ELSEWHERE])
_MOST_RESTARTS = 3
# The types of events with which the work of a phase may end; Done if it is not listed.
_ENDS = {
    LauncherPhase.PREPARING: (Done, Judged),
    LauncherPhase.RUNNING: (Exited, Judged),
    LauncherPhase.JUDGING: (Judged,),
    LauncherPhase.AWAITING_RESTART: (Done, Restarted),
}


def _ends(state, draw):
    """Return an event that may end the phase's work."""
    kind = draw(st.sampled_from(_ENDS.get(state.phase, (Done,))))
    if kind is Restarted:
        restart = state.pending_restart
        return Done() if restart is None or state.job is not None else Restarted(restart.number)
    values = {Exited: st.builds(Exited, st.sampled_from([0, 1, 137, 143])), Judged: _JUDGED}
    made = {**values, Done: st.just(Done())}
    return draw(made[kind])


def _news(state, draw):
    """Return news that may arrive now: the job's outcome and each restart once, in order."""
    number = 0 if state.restart is None else state.restart.number
    choices = [st.just(None), st.sampled_from([_TERM, HostStopped(signal.SIGINT)])]
    if state.job is None:
        choices.append(st.builds(JobEnded, _JOBS))
        if number < _MOST_RESTARTS and number <= state.attempt:
            kinds = st.sampled_from([OutcomeKind.FAILURE, OutcomeKind.HANG])
            choices.append(kinds.map(lambda kind: RestartOrdered(Restart(number + 1, _MOST_RESTARTS, kind, "a cause"))))
    return draw(st.one_of(choices))


@given(st.sampled_from([_MAIN, _TRAINER, _DATA, _ONE_OF_TWO]), st.data())
def test_whatever_happens_a_host_exits(host, data):
    """Every phase can end, whatever events arrive, so every host exits in the end.

    A script starts only when it is allowed to, each exit is reported, and a trainer host never looks successful after a
    failure elsewhere.
    """
    state, num_steps, must_report = HostState(host), 0, False
    while state.phase is not LauncherPhase.OVER:
        num_steps += 1
        assert num_steps <= 12 * (_MOST_RESTARTS + 1), "this life has no end"
        while (news := _news(state, data.draw)) is not None and num_steps < 100:
            before = state
            state, actions = step(state, news)
            assert state.phase is before.phase
            has_script = state.phase in (LauncherPhase.PREPARING, LauncherPhase.RUNNING, LauncherPhase.PAUSING)
            assert all(isinstance(action, EndScript) for action in actions)
            assert has_script or not actions
            if state.pending_restart != before.pending_restart and state.phase is LauncherPhase.RUNNING:
                assert actions
            if state.must_end and not before.must_end and not state.is_stopped and has_script:
                assert actions == (EndScript(state.job.kind),)
            if isinstance(news, HostStopped):
                break
        before, event = state, _ends(state, data.draw)
        state, actions = step(state, event)
        must_report |= isinstance(event, Judged)
        if must_report and state.phase is not LauncherPhase.UPLOADING:
            assert SendReport(state.own) in actions or event.outcome in [action.outcome for action in actions]
            must_report = False
        if state.phase is LauncherPhase.RUNNING:
            assert state.pending_restart is None
            assert not (before.phase is LauncherPhase.PAUSING and before.must_end)
    failed_elsewhere = state.job is not None and state.job.is_failure and state.job.host != _HOST
    if host.role is Role.TRAINER and failed_elsewhere:
        assert state.outcome.exit_code != 0
    assert state.outcome.exit_code == 0 or state.outcome.reason.text
