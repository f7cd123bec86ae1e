"""The faults to inject: the syntax of ``--fault``, the validation of its values, and when a fault is due. No I/O."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import Enum

from lightning_sm.errors import JobConfigError
from lightning_sm.job.variables import SERVICE_GRACE_S

HELP = """\
faults (--fault, repeatable; each is injected once, in the first attempt that reaches it):
  kill:HOST@WHEN                      SIGKILL to all processes of the host at once
  kill-rank:HOST[/LOCAL_RANK]@WHEN    SIGKILL to one training process (default: local rank 0)
  kill-launcher:HOST@WHEN             SIGKILL to the launcher only
  hang:HOST[,for=SECONDS]@WHEN        SIGSTOP to all processes of the host; SIGCONT after SECONDS, if given
  interrupt[:HOST]@WHEN[,skew=SECONDS]
                                      spot interruption: SIGTERM to the launcher of every host (or of one host), in
                                      random order, SECONDS apart; after --grace-s SIGKILL to all remaining
                                      processes; then the next attempt
  stop@WHEN[,skew=SECONDS]            StopTrainingJob: like interrupt, but without another attempt
  restart@WHEN                        SIGKILL to everything, then the next attempt, as after a hardware failure
  late:HOST=SECONDS                   the host starts SECONDS later
  HOST is a host name (algo-2) or a position in a group (data-1: the host of group data with the lowest number).
  WHEN is one of
    step=N          after N global steps
    epoch=N         after the first step of epoch N (epochs count from 1, as in the progress lines)
    after=SECONDS   SECONDS after the start of the attempt
    start           as soon as the process runs; for SIGTERM, as soon as the launchers can handle it
  SageMakerCLI and SageMakerTrainer report ranks and steps. Any other Trainer does so with the Heartbeat callback from
  lightning_sm.training.callbacks.heartbeat.
  The next attempt keeps the job's name, hyperparameters and checkpoint folder (without --checkpoints, one in the
  job's folder). All other folders are empty, and hosts are reassigned to groups at random.
"""


class Kind(Enum):
    """The kind of a fault; the value is its name on the command line."""

    KILL = "kill"
    KILL_RANK = "kill-rank"
    KILL_LAUNCHER = "kill-launcher"
    HANG = "hang"
    INTERRUPT = "interrupt"
    STOP = "stop"
    RESTART = "restart"
    LATE = "late"


# Faults after which the job resumes in another attempt.
RESUMED = frozenset({Kind.INTERRUPT, Kind.RESTART})

_SECONDS = r"\d{1,6}(?:\.\d{1,6})?"
_HOST = r":(?P<host>[A-Za-z0-9][A-Za-z0-9._-]*)"
_WHEN = rf"@(?:(?P<start>start)|(?P<unit>step|epoch)=(?P<count>[1-9]\d{{0,8}})|after=(?P<after>{_SECONDS})s?)"
_SKEW = rf"(?:,skew=(?P<seconds>{_SECONDS})s?)?"
_FORMS = {
    Kind.KILL: ("kill:HOST@WHEN", _HOST + _WHEN),
    Kind.KILL_RANK: ("kill-rank:HOST[/LOCAL_RANK]@WHEN", rf"{_HOST}(?:/(?P<rank>\d{{1,4}}))?{_WHEN}"),
    Kind.KILL_LAUNCHER: ("kill-launcher:HOST@WHEN", _HOST + _WHEN),
    Kind.HANG: ("hang:HOST[,for=SECONDS]@WHEN", rf"{_HOST}(?:,for=(?P<seconds>{_SECONDS})s?)?{_WHEN}"),
    Kind.INTERRUPT: ("interrupt[:HOST]@WHEN[,skew=SECONDS]", rf"(?:{_HOST})?{_WHEN}{_SKEW}"),
    Kind.STOP: ("stop@WHEN[,skew=SECONDS]", _WHEN + _SKEW),
    Kind.RESTART: ("restart@WHEN", _WHEN),
    Kind.LATE: ("late:HOST=SECONDS", rf"{_HOST}=(?P<seconds>{_SECONDS})s?"),
}
_PATTERNS = {kind: re.compile(pattern) for kind, (_, pattern) in _FORMS.items()}
_WHENS = "WHEN is start, step=N, epoch=N (N from 1) or after=SECONDS"


@dataclass(frozen=True)
class Moment:
    """A point in the progress of an attempt.

    Attributes:
        seconds: Seconds since the attempt began.
        step: Global steps completed; 0 before the first report.
        epoch: Epoch of the last step, counted from 1; 0 before the first report.
    """

    seconds: float = 0.0
    step: int = 0
    epoch: int = 0

    def __str__(self) -> str:
        position = f"step {self.step}, epoch {self.epoch}, " if self.step else ""
        return f"{position}{self.seconds:.1f} s"


@dataclass(frozen=True)
class Fault:
    """One fault to inject.

    Attributes:
        text: The text that the user wrote.
        kind: Its kind.
        host: Name of a host, or its position in a group; None for all hosts.
        local_rank: The local rank of the training process to kill.
        not_before: The fault is due once the attempt has reached all three values of this moment.
        at_start: Whether the fault is due as soon as its target runs.
        seconds: The value of ``for`` or ``skew``, or the delay of ``late``; None if not given.
    """

    text: str
    kind: Kind
    host: str | None = None
    local_rank: int = 0
    not_before: Moment = Moment()
    at_start: bool = False
    seconds: float | None = None

    def is_due(self, moment: Moment) -> bool:
        """Return whether the fault is due at this moment of the attempt."""
        return (
            moment.seconds >= self.not_before.seconds
            and moment.step >= self.not_before.step
            and moment.epoch >= self.not_before.epoch
        )


@dataclass(frozen=True)
class FaultSettings:
    """The faults of a job.

    Attributes:
        faults: All faults.
        grace_s: Seconds between SIGTERM and SIGKILL in an interruption.
    """

    faults: tuple[Fault, ...] = ()
    grace_s: float = SERVICE_GRACE_S

    @property
    def num_attempts(self) -> int:
        """The number of attempts if every fault is injected."""
        return 1 + sum(fault.kind in RESUMED for fault in self.faults)

    @property
    def needs_checkpoints(self) -> bool:
        """Whether an attempt may have to resume from an earlier one."""
        return any(fault.kind in RESUMED for fault in self.faults)


def parse(text: str) -> Fault:
    """Parse the value of one ``--fault`` option.

    Raises:
        JobConfigError: The kind is unknown, or the text does not have the form required for its kind.
    """
    name = re.split("[:@]", text, maxsplit=1)[0]
    kind = next((kind for kind in Kind if kind.value == name), None)
    if kind is None:
        raise JobConfigError(
            f"--fault {text!r}: unknown fault {name!r}; expected one of\n"
            + "\n".join(f"  {form}" for form, _ in _FORMS.values())
        )
    form = _FORMS[kind][0]
    match = _PATTERNS[kind].fullmatch(text, len(name))
    if match is None:
        explanation = f", where {_WHENS}" if "WHEN" in form else ""
        raise JobConfigError(f"--fault {text!r}: expected {form}{explanation}.")
    fields = match.groupdict()
    count = int(fields.get("count") or 0)
    return Fault(
        text,
        kind,
        host=fields.get("host"),
        local_rank=int(fields.get("rank") or 0),
        not_before=Moment(
            seconds=float(fields.get("after") or 0.0),
            step=count if fields.get("unit") == "step" else 0,
            epoch=count if fields.get("unit") == "epoch" else 0,
        ),
        at_start=fields.get("start") is not None,
        seconds=float(fields["seconds"]) if fields.get("seconds") else None,
    )


def check(settings: FaultSettings, sizes: Mapping[str, int], devices: int) -> None:
    """Reject faults whose target does not exist in this cluster.

    Args:
        settings: The faults.
        sizes: Number of hosts in each group.
        devices: Number of processes on each trainer host.

    Raises:
        JobConfigError: A host or a local rank does not exist, or a number is out of range.
    """
    if not 0 <= settings.grace_s < float("inf"):
        raise JobConfigError(f"--grace-s {settings.grace_s:g}: expected 0 seconds or more.")
    names = [f"algo-{number}" for number in range(1, sum(sizes.values()) + 1)]
    places = [f"{group}-{number}" for group, size in sizes.items() for number in range(1, size + 1)]
    for fault in settings.faults:
        if fault.host is not None and fault.host not in {*names, *places}:
            raise JobConfigError(
                f"--fault {fault.text!r}: there is no host {fault.host!r}; the hosts are {', '.join(names)}, "
                f"or by position in their groups {', '.join(places)}."
            )
        if fault.local_rank >= devices:
            raise JobConfigError(f"--fault {fault.text!r}: no local rank {fault.local_rank}; --devices is {devices}.")


def host_name(host: str, members: Mapping[str, Sequence[str]]) -> str:
    """Return the name of a host that may be given by its position.

    Args:
        host: Name of the host, or its position in a group. If a group is called ``algo``, names take precedence.
        members: Names of the hosts in each group, in any order.
    """
    if any(host in names for names in members.values()):
        return host
    group, _, place = host.rpartition("-")
    # Sort by number: as text, algo-10 would come before algo-2.
    return sorted(members[group], key=lambda name: int(name.rpartition("-")[2]))[int(place) - 1]


class FaultPlan:
    """The faults that are still to be injected, across all attempts.

    Attributes:
        settings: The faults of the job.
        pending: The faults that have not been injected yet, in the order of the command line.
    """

    def __init__(self, settings: FaultSettings) -> None:
        self.settings = settings
        self.pending = list(settings.faults)

    def due(self, moment: Moment) -> list[Fault]:
        """Return the faults that are due. They stay pending until ``done``: their target may not be running yet."""
        # Late starts are handled by ``take_late``.
        return [fault for fault in self.pending if fault.kind is not Kind.LATE and fault.is_due(moment)]

    def done(self, fault: Fault) -> None:
        """Remove a fault that has been injected."""
        # Compare by identity: the same fault may be given twice, for two attempts.
        self.pending = [other for other in self.pending if other is not fault]

    def take_late(self) -> list[Fault]:
        """Remove and return the pending faults that delay the start of hosts."""
        taken = [fault for fault in self.pending if fault.kind is Kind.LATE]
        self.pending = [fault for fault in self.pending if fault.kind is not Kind.LATE]
        return taken
