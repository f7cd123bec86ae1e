"""``--fault``: accepted and refused values, and when each fault is due."""

from __future__ import annotations

import re
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lightning_sm.emulator import attempt
from lightning_sm.emulator.faults import HELP, Fault, FaultPlan, FaultSettings, Kind, Moment, check, host_name, parse
from lightning_sm.errors import JobConfigError
from lightning_sm.job.control_folder import ControlFolder

_HOSTS = st.from_regex(r"[A-Za-z0-9][A-Za-z0-9._-]{0,20}", fullmatch=True)
_SECONDS = st.decimals(0, 99999, places=2).map(str)
_WHENS = st.one_of(
    st.just(("start", Moment(), True)),
    st.integers(1, 10**8).map(lambda number: (f"step={number}", Moment(step=number), False)),
    st.integers(1, 10**8).map(lambda number: (f"epoch={number}", Moment(epoch=number), False)),
    _SECONDS.map(lambda seconds: (f"after={seconds}", Moment(seconds=float(seconds)), False)),
)


@given(kind=st.sampled_from([Kind.KILL, Kind.KILL_LAUNCHER, Kind.KILL_RANK, Kind.HANG]), host=_HOSTS, when=_WHENS)
def test_faults_of_a_host_are_read(kind, host, when):
    """Kind, host and time are parsed as written, whatever characters the host's name contains."""
    text = f"{kind.value}:{host}@{when[0]}"
    assert parse(text) == Fault(text, kind, host, not_before=when[1], at_start=when[2])


@given(host=st.none() | _HOSTS, when=_WHENS, skew=st.none() | _SECONDS)
def test_interruptions_are_read(host, when, skew):
    """The host of an interruption and the seconds between its signals are optional."""
    text = "interrupt" + (f":{host}" if host else "") + f"@{when[0]}" + (f",skew={skew}" if skew else "")
    seconds = None if skew is None else float(skew)
    assert parse(text) == Fault(text, Kind.INTERRUPT, host, not_before=when[1], at_start=when[2], seconds=seconds)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("kill-rank:trainer-1/3@step=7", {"kind": Kind.KILL_RANK, "host": "trainer-1", "local_rank": 3}),
        ("hang:algo-1,for=2.5@epoch=2", {"kind": Kind.HANG, "host": "algo-1", "seconds": 2.5}),
        ("hang:algo-1,for=2s@step=2", {"kind": Kind.HANG, "host": "algo-1", "seconds": 2.0}),
        ("interrupt@step=30,skew=1s", {"kind": Kind.INTERRUPT, "host": None, "seconds": 1.0}),
        ("late:data-2=0.5s", {"kind": Kind.LATE, "host": "data-2", "seconds": 0.5}),
        ("stop@after=3,skew=1", {"kind": Kind.STOP, "host": None, "seconds": 1.0}),
        ("restart@start", {"kind": Kind.RESTART, "at_start": True}),
        ("late:data-2=0.5", {"kind": Kind.LATE, "host": "data-2", "seconds": 0.5}),
    ],
)
def test_other_forms_are_read(text, expected):
    """Every other form is parsed."""
    fault = parse(text)
    assert {name: getattr(fault, name) for name in expected} == expected


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "unknown fault ''"),
        ("explode:algo-1@start", "unknown fault 'explode'; expected one of\n  kill:HOST@WHEN\n  kill-rank:"),
        ("kill", "expected kill:HOST@WHEN, where WHEN is start, step=N"),
        ("kill@start", "expected kill:HOST@WHEN"),
        ("kill:algo-1", "expected kill:HOST@WHEN"),
        ("kill:algo-1@", "expected kill:HOST@WHEN"),
        ("kill:algo-1@now", "expected kill:HOST@WHEN"),
        ("kill:algo-1@step=0", "expected kill:HOST@WHEN"),
        ("kill:algo-1@step=1.5", "expected kill:HOST@WHEN"),
        ("kill:algo-1@after=-1", "expected kill:HOST@WHEN"),
        ("kill:algo-1@after=inf", "expected kill:HOST@WHEN"),
        ("kill:algo-1@step=1\n", "expected kill:HOST@WHEN"),
        ("kill:algo-1/1@step=1", "expected kill:HOST@WHEN"),
        ("kill-rank:algo-1/@step=1", "expected kill-rank:HOST[/LOCAL_RANK]@WHEN"),
        ("hang:algo-1@start,for=2", "expected hang:HOST[,for=SECONDS]@WHEN"),
        ("interrupt@step=5,skew=", "expected interrupt[:HOST]@WHEN[,skew=SECONDS]"),
        ("stop:algo-1@step=5", "expected stop@WHEN[,skew=SECONDS]"),
        ("late:algo-1@start", "expected late:HOST=SECONDS."),
        ("late:algo-1", "expected late:HOST=SECONDS."),
    ],
)
def test_malformed_faults_are_refused(text, message):
    """The error quotes the value and shows the expected form."""
    with pytest.raises(JobConfigError, match=re.escape(f"--fault {text!r}: ") + ".*" + re.escape(message)):
        parse(text)


@given(st.text(max_size=40))
def test_other_texts_are_refused(text):
    """The error quotes any other value."""
    with pytest.raises(JobConfigError) as raised:
        parse(text)
    assert repr(text) in str(raised.value)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (
            FaultSettings((parse("kill:algo-4@start"),)),
            "there is no host 'algo-4'; the hosts are algo-1, algo-2, algo-3",
        ),
        (FaultSettings((parse("kill:data-2@start"),)), "by position in their groups trainer-1, trainer-2, data-1"),
        (FaultSettings((parse("late:nix=1"),)), "there is no host 'nix'"),
        (FaultSettings((parse("kill-rank:algo-1/2@start"),)), "no local rank 2; --devices is 2"),
        (FaultSettings(grace_s=-1.0), "--grace-s -1"),
        (FaultSettings(grace_s=float("nan")), "--grace-s nan"),
        (FaultSettings(grace_s=float("inf")), "--grace-s inf"),
    ],
)
def test_faults_without_a_target_are_refused(settings, message):
    """Hosts and local ranks that do not exist are refused, and the error lists the valid ones."""
    with pytest.raises(JobConfigError, match=re.escape(message)):
        check(settings, {"trainer": 2, "data": 1}, devices=2)


def test_faults_with_a_target_pass():
    """Hosts can be given by name or by position in their group."""
    texts = ["kill:algo-3@start", "kill:trainer-2@start", "late:data-1=1", "kill-rank:algo-1/1@start", "restart@start"]
    check(FaultSettings(tuple(map(parse, texts)), 0.0), {"trainer": 2, "data": 1}, devices=2)


def test_places_in_a_group_count_by_number():
    """Positions in a group follow the numbers in the host names, not the order in which the service lists the hosts."""
    members = {"trainer": ["algo-10", "algo-2"], "data-1": ["algo-3", "algo-1"]}
    assert [host_name(f"trainer-{place}", members) for place in (1, 2)] == ["algo-2", "algo-10"]
    assert host_name("data-1-2", members) == "algo-3"
    assert host_name("algo-10", members) == "algo-10"


def test_name_wins_over_place():
    """A host's name takes precedence over a position: in a group called algo, algo-2 is the host of that name."""
    assert host_name("algo-2", {"algo": ["algo-2", "algo-5"]}) == "algo-2"


_MOMENTS = st.builds(Moment, st.floats(0, 100), st.integers(0, 100), st.integers(0, 10))


@given(when=_WHENS, moments=st.lists(_MOMENTS))
def test_a_fault_is_due_from_its_moment_on(when, moments):
    """Once due, a fault stays due for the rest of the attempt, however rarely it is polled."""
    fault = parse(f"kill:algo-1@{when[0]}")
    seconds, step, epoch = 0.0, 0, 0
    was_due = False
    for moment in moments:
        seconds, step, epoch = max(seconds, moment.seconds), max(step, moment.step), max(epoch, moment.epoch)
        is_due = fault.is_due(Moment(seconds, step, epoch))
        wanted = when[1]
        assert is_due == (seconds >= wanted.seconds and step >= wanted.step and epoch >= wanted.epoch)
        assert is_due or not was_due
        was_due = is_due


def test_faults_stay_until_they_happened():
    """A fault stays due until it has been injected, and a fault that is given twice is injected twice."""
    texts = ["kill:algo-1@step=3", "interrupt@step=5", "interrupt@step=5", "late:algo-1=1"]
    plan = FaultPlan(FaultSettings(tuple(map(parse, texts))))
    assert plan.due(Moment(step=2)) == []
    (kill,) = plan.due(Moment(step=4))
    assert plan.due(Moment(step=4)) == [kill]
    plan.done(kill)
    first, second = plan.due(Moment(step=5))
    plan.done(first)
    assert plan.due(Moment(step=5)) == [second]
    assert [fault.text for fault in plan.take_late()] == ["late:algo-1=1"]
    assert plan.take_late() == []
    assert [fault.text for fault in plan.pending] == ["interrupt@step=5"]


@pytest.mark.parametrize(
    ("texts", "attempts", "checkpoints"),
    [
        ([], 1, False),
        (["kill:algo-1@start", "stop@step=1"], 1, False),
        (["interrupt@step=1"], 2, True),
        (["interrupt@step=1", "restart@step=9"], 3, True),
    ],
)
def test_number_of_attempts(texts, attempts, checkpoints):
    """Each interruption or restart is followed by another attempt."""
    settings = FaultSettings(tuple(map(parse, texts)))
    assert (settings.num_attempts, settings.needs_checkpoints) == (attempts, checkpoints)


def test_help_names_every_kind():
    """--help shows the form of every fault."""
    assert all(re.search(rf"^  {kind.value}[:@\[]", HELP, re.MULTILINE) for kind in Kind)


def test_moments_are_shown_as_far_as_they_are_known():
    """A moment shows no step before the first report."""
    assert str(Moment(1.25)) == "1.2 s"
    assert str(Moment(1.25, 7, 2)) == "step 7, epoch 2, 1.2 s"


def test_the_position_is_that_of_rank_0_after_a_batch(tmp_path):
    """The position is rank 0's after its last finished batch; resuming or starting an epoch does not change it."""
    control = ControlFolder(tmp_path)
    host = SimpleNamespace(name="algo-1", group="trainer", env={}, control_dir=control.path)
    found = attempt.Attempt(
        SimpleNamespace(hosts=[host], main_host=host), ["train.py"], None, [], FaultPlan(FaultSettings())
    )

    def position(pid, line):
        (tmp_path / f"process-{pid}").write_text(line)
        found._read_position()
        return found._position

    assert position(2, "1.0 1 9 4 5 TRAINING") == (0, 0)
    assert position(3, "1.0 -1 0 0 0 SERVING") == (0, 0)
    assert position(1, "1.0 0 8 1 0 STARTING_TRAINING") == (0, 0)
    assert position(1, "1.1 0 9 1 2 WAITING_FOR_BATCH") == (9, 2)
    assert position(1, "1.2 0 9 2 2 TRAINING") == (9, 2)
    assert position(1, "1.4 0 10 2 3 WAITING_FOR_BATCH") == (10, 3)
    assert position(4, "1.3 0 5 0 1 WAITING_FOR_BATCH") == (10, 3)
    control.clear()
    assert position(1, "") == (10, 3)
