"""The environment variables of lightning_sm: their names, meanings, defaults and parsers.

Only this module contains the names; other modules call ``read``, as in ``MAIN_PORT.read(env)``. ``lightning-sm doctor``
reads all variables, and the reference pages list them.
"""

from __future__ import annotations

import math
import re
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import Annotated, Any, Generic, NamedTuple, TypeVar

import msgspec

from lightning_sm._text import closest, shortened
from lightning_sm.errors import JobConfigError
from lightning_sm.job.redaction import shown

PREFIX = "LIGHTNING_SM_"
_PIDS = (0, 999_999_999)
# The service shows 1024 characters of a failure's reason, so a long value must leave room for the error.
_MAX_SHOWN_CHARS = 200
# Shorter secrets, such as handwritten ones, could be guessed.
_MIN_SECRET_CHARS = 32

_Value = TypeVar("_Value")
_Kind = TypeVar("_Kind", bound=Enum)


@dataclass(frozen=True)
class Setting(Generic[_Value]):
    """One environment variable.

    Attributes:
        name: Name of the variable.
        parse: Converts the text to a value. Its ``ValueError`` message states what text is expected.
        default: The value if the variable is unset or empty.
        default_text: The default in words, for the reference pages; empty if the default is a number or a flag.
        meaning: The meaning of the variable, for the reference pages; empty if users do not set it.
        accepts_empty: Whether empty text is itself a value, instead of meaning the default.
    """

    name: str
    parse: Callable[[str], _Value]
    default: _Value
    default_text: str = ""
    meaning: str = ""
    accepts_empty: bool = False

    def read(self, env: Mapping[str, str]) -> _Value:
        """Return the value of the variable.

        Raises:
            JobConfigError: The value of the variable is invalid.
        """
        text = env.get(self.name)
        if text is None or (not text and not self.accepts_empty):
            return self.default
        try:
            return self.parse(text)
        except ValueError as error:
            safe = shortened(str(shown(self.name, text)), _MAX_SHOWN_CHARS)
            raise JobConfigError(f"{self.name}={safe!r}: {error}.") from error


class Install(Enum):
    """When to install the requirements of the user's code."""

    IF_SUBMITTED = ""
    NEVER = "0"
    ALWAYS = "1"
    UNPROTECTED = "unprotected"


class Model(Enum):
    """The content of a job's model directory."""

    FULL = "full"
    WEIGHTS = "weights"
    NONE = "none"


def whole_number(least: int, most: int) -> Callable[[str], int]:
    """Return a parser for whole numbers within inclusive bounds."""

    def parse(text: str) -> int:
        if not re.fullmatch(r"[0-9]{1,9}", text) or not least <= int(text) <= most:
            raise ValueError(f"expected a whole number from {least} to {most}")
        return int(text)

    return parse


def _flag(text: str) -> bool:
    if text not in ("0", "1"):
        raise ValueError("expected 0 or 1")
    return text == "1"


def _seconds(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    # Python's waits and timers accept at most 292 years.
    if not 0 <= value <= threading.TIMEOUT_MAX:
        raise ValueError("expected a number of seconds, 0 or more")
    return value


def _positive_seconds(text: str) -> float:
    value = _seconds(text)
    if value == 0:
        raise ValueError("expected a number of seconds, more than 0")
    return value


# The service's time from SIGTERM to SIGKILL: "Using Your Own Training Algorithms" (docker stop -t 120).
SERVICE_GRACE_S = 120.0
# Whatever the launcher does after killing the script must fit into the remaining time (see ``launcher/timeline.py``).
LATEST_KILL_S = 112.0


class StopSchedule(NamedTuple):
    """The launcher's schedule of signals when SageMaker stops the job, in seconds since SageMaker's SIGTERM.

    At 0 s, the processes that handle the gentle signal receive it. If none does, all receive SIGTERM at 0 s. The
    launcher's ``ChildProcess`` sends the signals.

    Attributes:
        term_s: When the remaining processes receive SIGTERM.
        kill_s: When the remaining processes receive SIGKILL.
    """

    term_s: float
    kill_s: float


def _stop_schedule(text: str) -> StopSchedule:
    term, _, kill = text.partition(",")
    expected = (
        "expected the seconds from the stop signal to SIGTERM and to SIGKILL, the latter not smaller, such as 95,110"
    )
    try:
        term_s = _seconds(term)
        kill_s = _seconds(kill)
    except ValueError as error:
        raise ValueError(expected) from error
    if term_s > kill_s:
        raise ValueError(expected)
    if kill_s > LATEST_KILL_S:
        raise ValueError(
            f"expected at most {LATEST_KILL_S:g} s to SIGKILL: SageMaker kills the container {SERVICE_GRACE_S:g} s "
            "after SIGTERM, and the launcher needs the rest for its last report"
        )
    return StopSchedule(term_s, kill_s)


def _names(text: str) -> tuple[str, ...]:
    return tuple(name.strip() for name in text.split(",") if name.strip())


def _one_of(kind: type[_Kind], expected: str) -> Callable[[str], _Kind]:
    def parse(text: str) -> _Kind:
        try:
            return kind(text)
        except ValueError as error:
            raise ValueError(f"expected {expected}") from error

    return parse


def _mapping(kind: type[_Value], expected: str) -> Callable[[str], _Value]:
    """Return a parser for JSON objects."""

    def parse(text: str) -> _Value:
        try:
            return msgspec.json.decode(text, type=kind)
        except (msgspec.DecodeError, ValueError, RecursionError) as error:
            raise ValueError(f"expected a JSON object {expected}: {error}") from error

    return parse


def _secret(text: str) -> str:
    if len(text) < _MIN_SECRET_CHARS:
        raise ValueError(
            f"expected at least {_MIN_SECRET_CHARS} characters, not {len(text)}; secrets.token_hex() returns 64"
        )
    return text


# ---- Set by users, in the order of the reference pages.

DATA_GROUPS = Setting[tuple[str, ...] | None](
    name="LIGHTNING_SM_DATA_GROUPS",
    parse=_names,
    default=None,
    default_text="groups named data*, else CPU groups beside GPU groups",
    meaning="Names of the instance groups that serve data, separated by commas; empty for none.",
    accepts_empty=True,
)
MAIN_PORT = Setting[int | None](
    name="LIGHTNING_SM_MAIN_PORT",
    parse=whole_number(1, 65535),
    default=None,
    default_text="20000 to 29999, derived from the job's name",
    meaning="Port on which rank 0 listens.",
)
DEVICES = Setting[int | None](
    name="LIGHTNING_SM_DEVICES",
    parse=whole_number(1, 1024),
    default=None,
    default_text="the script starts one per GPU",
    meaning="Number of processes that the launcher starts on each trainer host.",
)
SEPARATE_HOSTS = Setting[bool](
    name="LIGHTNING_SM_SEPARATE_HOSTS",
    parse=_flag,
    default=False,
    meaning="Whether each trainer host may train a separate model, as with Trainer(num_nodes=1). With 0, this is an "
    "error in a job with several trainer hosts.",
)
STOP_SCHEDULE = Setting[StopSchedule](
    name="LIGHTNING_SM_STOP_SCHEDULE",
    parse=_stop_schedule,
    default=StopSchedule(95.0, 110.0),
    default_text="95,110",
    meaning="Seconds from the stop signal until the script receives SIGTERM, and until it receives SIGKILL.",
)
MODEL = Setting[Model](
    name="LIGHTNING_SM_MODEL",
    parse=_one_of(Model, "full, weights or none"),
    default=Model.FULL,
    default_text="full",
    meaning="Content of the job's model directory: full (checkpoint, weights and configuration), weights (without the "
    "checkpoint), or none.",
)
INSTALL_REQUIREMENTS = Setting[Install](
    name="LIGHTNING_SM_INSTALL_REQUIREMENTS",
    parse=_one_of(
        Install,
        "0 (install nothing), 1 (install requirements.txt even if it came with the image), or unprotected (also "
        "replace torch and other packages of the image)",
    ),
    default=Install.IF_SUBMITTED,
    default_text="if the code came with the job",
    meaning="Whether to install the code's requirements.txt: 0 never, 1 always, unprotected (always, and pip may "
    "replace packages of the image).",
)
PREPARE_S = Setting[float](
    name="LIGHTNING_SM_PREPARE_S",
    parse=_positive_seconds,
    # Limited, because a job is billed while it waits for the network.
    default=1800.0,
    meaning="Time limit in seconds, both for fetching the code and for installing its requirements.",
)
PEERS_TIMEOUT_S = Setting[float](
    name="LIGHTNING_SM_PEERS_TIMEOUT_S",
    parse=_seconds,
    default=10.0,
    meaning="Seconds that a host waits, after its script has exited, for hosts that never connected.",
)
HANG_S = Setting[float](
    name="LIGHTNING_SM_HANG_S",
    parse=_seconds,
    default=1200.0,
    meaning="Seconds without a training step after which a job is considered hung, if that is 20 times as long as any "
    "earlier step. The launcher saves the stacks of all ranks and kills the script. 0 turns this off.",
)
MAX_RESTARTS = Setting[int](
    name="LIGHTNING_SM_MAX_RESTARTS",
    parse=whole_number(0, 1000),
    default=0,
    meaning="How often the scripts of all trainer hosts may be restarted together, from the latest valid checkpoint, "
    "after one of them fails.",
)
REPORT_S = Setting[float](
    name="LIGHTNING_SM_REPORT_S",
    parse=_seconds,
    default=30.0,
    meaning="Seconds that the main host may spend, at the end of the job, on the report of the run (report.html in the "
    "output data). 0 turns this off.",
)
PRICES = Setting[Mapping[str, float]](
    name="LIGHTNING_SM_PRICES",
    parse=_mapping(dict[str, Annotated[float, msgspec.Meta(ge=0)]], 'of hourly prices, such as {"ml.g5.xlarge": 1.41}'),
    default={},
    default_text="none",
    meaning="Hourly prices for the costs in the report, by instance type or group: a JSON object such as "
    '{"ml.g5.xlarge": 1.41}.',
)
HOST_ADDRESSES = Setting[Mapping[str, str]](
    name="LIGHTNING_SM_HOST_ADDRESSES",
    parse=_mapping(dict[str, Annotated[str, msgspec.Meta(min_length=1)]], "of host name to IP address"),
    default={},
    default_text="names are resolved",
    meaning="JSON object of host name to IP address, for hosts whose names do not resolve.",
)

JOB_SECRET = Setting[str | None](
    name="LIGHTNING_SM_JOB_SECRET",
    parse=_secret,
    default=None,
    default_text="none: keys are derived from the job's name",
    meaning="Random secret of the job, the same on all hosts, with which they authenticate each other; lightning-sm "
    "submit and local create one.",
)

# ---- Passed on by our own processes, so no page shows them.

# Folder in which training processes report their progress to the launcher, and show that they save a checkpoint on
# SIGUSR2. Unset without a launcher.
CONTROL_DIR = Setting[Path | None]("LIGHTNING_SM_CONTROL_DIR", Path, None)
# Process id of SageMakerEnvironment's process; a child of it with a LOCAL_RANK was started by Lightning.
RANK_ZERO_PID = Setting[int | None]("LIGHTNING_SM_RANK_ZERO_PID", whole_number(*_PIDS), None)
# Folder that the processes of an emulated host see in place of /opt/ml, as a path outside the host.
HOST_FOLDER = Setting[Path | None]("LIGHTNING_SM_HOST_FOLDER", Path, None)
# Folder for this attempt's part of the run's record. If unset, the next attempt's folder in the job's record is used.
RECORD_DIR = Setting[Path | None]("LIGHTNING_SM_RECORD_DIR", Path, None)
# Input channels of the data hosts, for checking a trainer's command line before there are any hosts. If unset, the data
# hosts are asked.
DATA_CHANNELS = Setting[tuple[str, ...] | None]("LIGHTNING_SM_DATA_CHANNELS", _names, None, accepts_empty=True)
# Options that SageMakerCLI reads from the job, because their values are secret and command lines are not.
HIDDEN_OPTIONS = Setting[tuple[str, ...]]("LIGHTNING_SM_HIDDEN_OPTIONS", _names, ())

SETTINGS: tuple[Setting[Any], ...] = tuple(value for value in list(globals().values()) if isinstance(value, Setting))
USER_SETTINGS = tuple(setting for setting in SETTINGS if setting.meaning)


def misspelled(env: Mapping[str, str]) -> dict[str, str]:
    """Find variables that nothing reads but whose names are similar to a setting's.

    Returns:
        The name that was probably intended, for each such name that is set.
    """
    known = {setting.name for setting in SETTINGS}
    # Compare without the prefix, which would make any two names similar.
    endings = [setting.name.removeprefix(PREFIX) for setting in USER_SETTINGS]
    suggestions = {}
    for name in sorted(env):
        near = closest(name.removeprefix(PREFIX), endings) if name.startswith(PREFIX) and name not in known else None
        if near is not None:
            suggestions[name] = PREFIX + near
    return suggestions
