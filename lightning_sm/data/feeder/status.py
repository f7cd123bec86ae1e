"""What the feeder tells of hosts, passes and failures. Pure: facts in, words and JSON values out."""

from __future__ import annotations

from typing import Any, Protocol

from lightning_sm.data.feeder.scheduler import FailureDecision, HostState, HostStatus, PassStatus, Retry

# What a data host reports, and whether another try can help.
RETRIES = {
    "RemoteTransformError": Retry.ONCE,
    "WorkerLost": Retry.LIMITED,
    "NotOpen": Retry.ELSEWHERE,
    "ShardMoved": Retry.ELSEWHERE,
}

# Failures that the user knows by these names.
_ERRORS = ("DataSettingsError", "RemoteTransformError", "BatchTypeError", "BatchTooLargeError")

_NUM_SHOWN_KEYS = 16


class Link(Protocol):
    """What is asked of a connection to a data host."""

    state: dict[str, Any]
    why: str

    @property
    def name(self) -> str:
        """Name of the host."""


def explain(error: str, step: int, decision: FailureDecision, keys: list[int]) -> tuple[str, str]:
    """Tell why a pass cannot go on.

    Args:
        error: What the data host reported last.
        step: The step that failed.
        decision: All failures of the step.
        keys: Indices of the step.

    Returns:
        Name of the error, and its text.
    """
    if error == "WorkerLost":
        more = len(keys) - _NUM_SHOWN_KEYS
        shown = f"{keys[:_NUM_SHOWN_KEYS]}" + (f" and {more} more" if more > 0 else "")
        return "DataServiceError", (
            f"Step {step} kills the workers of data hosts: {'; '.join(decision.failures)}. Look for samples that crash "
            f"native code or take too much memory; indices {shown}."
        )
    return (
        error if error in _ERRORS else "DataServiceError",
        f"The batch of step {step} failed on {decision.failures[-1]}",
    )


def host_state(link: Link, status: HostStatus | None) -> dict[str, Any]:
    """Describe a data host.

    Args:
        link: The connection to it.
        status: What the scheduler knows of it; None: it was never reached.
    """
    status = status or HostStatus(link.name)
    return {
        "name": link.name,
        "state": HostState(status.state).value,
        "why": link.why,
        "in_flight": status.num_in_flight,
        "batches": status.num_completed,
        "retries": status.num_retries,
        "hedges": status.num_hedges,
        "latency_s": status.latency_s,
        **{name: link.state.get(name) for name in ("workers", "busy", "queued", "busy_s", "up_s")},
    }


def pass_state(status: PassStatus, now: float) -> dict[str, Any]:
    """Describe a pass.

    Args:
        status: What the scheduler knows of it.
        now: Time.
    """
    return {
        "pass_id": status.pass_id,
        "waiting_for": status.waiting_for,
        "asked": [{"host": request.host, "for_s": now - request.sent_at} for request in status.requests],
        "ready": status.num_ready,
        "in_flight": status.num_in_flight,
    }
