"""The settings of a job that are environment variables: their names, and how those in seconds are read."""

from __future__ import annotations

import threading
from collections.abc import Mapping

from lightning_sm.errors import JobConfigError

PREPARE_VARIABLE = "LIGHTNING_SM_PREPARE_S"
_FAREWELL_VARIABLE = "LIGHTNING_SM_FAREWELL_S"
# All that users set; our own processes pass others on.
NAMES = (
    "LIGHTNING_SM_DATA_GROUPS",
    "LIGHTNING_SM_DEVICES",
    _FAREWELL_VARIABLE,
    "LIGHTNING_SM_HOST_ADDRESSES",
    "LIGHTNING_SM_INSTALL_REQUIREMENTS",
    "LIGHTNING_SM_MAIN_PORT",
    PREPARE_VARIABLE,
    "LIGHTNING_SM_STOP_SCHEDULE",
)


def prepare_s(env: Mapping[str, str]) -> float:
    """How long fetching the code, and installing what it needs, may each take, in seconds.

    Args:
        env: Environment variables, of which ``LIGHTNING_SM_PREPARE_S`` says so. Default: 1800.

    Raises:
        JobConfigError: It is no positive number of seconds.
    """
    # A job that waits for a network does so at full price.
    limit_s = _stated(env, PREPARE_VARIABLE, 1800.0)
    if limit_s == 0:
        raise JobConfigError(f"{PREPARE_VARIABLE}={env[PREPARE_VARIABLE]!r}: expected more than 0 seconds.")
    return limit_s


def farewell_s(env: Mapping[str, str]) -> float:
    """How long a host that has ended waits for hosts that it never heard of, in seconds.

    Args:
        env: Environment variables, of which ``LIGHTNING_SM_FAREWELL_S`` says so. Default: 10.

    Raises:
        JobConfigError: It is no number of seconds.
    """
    return _stated(env, _FAREWELL_VARIABLE, 10.0)


def seconds(text: str) -> float:
    """Read a time that can be waited for.

    Args:
        text: A number of seconds.

    Raises:
        ValueError: It is no number, negative, or longer than Python's waits and timers can be (292 years).
    """
    value = float(text)
    if not 0 <= value <= threading.TIMEOUT_MAX:
        raise ValueError(f"{text!r} is no time that can be waited for")
    return value


def _stated(env: Mapping[str, str], variable: str, default: float) -> float:
    text = env.get(variable, "")
    try:
        return seconds(text) if text else default
    except ValueError as error:
        raise JobConfigError(f"{variable}={text!r}: expected a number of seconds.") from error
