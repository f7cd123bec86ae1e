"""When a data host may leave: trainers hold leases, and say when they have finished. Pure rules; time comes in."""

from __future__ import annotations

from typing import Any

# What a ``RemoteDataModule`` says that is closed after its training, or at the regular end of its process.
_SUCCESSES = ("finished", "the process ended")


def is_success(outcome: str) -> bool:
    """Tell whether a training that ended like this did without what it did not get from a data host.

    Args:
        outcome: What a trainer said when it finished.
    """
    return outcome in _SUCCESSES


class Leases:
    """Who needs this data host.

    Args:
        lease_s: Seconds without a sign of life after which a trainer counts as gone; None: this host never leaves by
            itself.
        startup_timeout_s: Seconds until the first trainer must have come; None: for ever.
        now: Time at the start.
    """

    def __init__(self, lease_s: float | None, startup_timeout_s: float | None, now: float) -> None:
        self._lease_s = lease_s
        self._startup_timeout_s = startup_timeout_s
        self._started = now
        self._seen: dict[str, float] = {}
        self._finished: dict[str, str] = {}
        self._expected = 1
        self._is_job_ending = False
        self._last_event = now

    def beat(self, client: str, world_size: int, now: float) -> None:
        """Note a sign of life.

        Args:
            client: Name of the trainer rank.
            world_size: Ranks that the trainer expects to be there.
            now: Time.
        """
        self._seen[client] = self._last_event = now
        self._finished.pop(client, None)
        if not self._is_job_ending:
            self._expected = max(self._expected, world_size)

    def finish(self, client: str, outcome: str, now: float) -> None:
        """Note that a trainer needs this host no longer.

        Args:
            client: Name of the trainer rank.
            outcome: How its training ended.
            now: Time.
        """
        self._seen.setdefault(client, now)
        self._finished[client] = outcome
        self._last_event = now

    def expect_no_more(self) -> None:
        """Note that the job ends: this host serves those that have come, and waits for nobody else."""
        self._is_job_ending = True
        self._expected = 0

    def outcome(self, now: float) -> dict[str, Any] | None:
        """Tell whether the host may leave.

        Args:
            now: Time.

        Returns:
            None, or "reason", or "error" if no trainer ever came.
        """
        if not self._seen:
            return self._outcome_without_trainers(now)
        if self._lease_s is None:
            return None
        gone = [client for client, seen in self._seen.items() if now - seen >= self._lease_s]
        left = {*gone, *self._finished}
        if len(left) < len(self._seen):
            return None
        # A rank that never came may still be starting, unless time is up for it, too.
        if len(left) < self._expected and now - self._last_event < self._lease_s:
            return None
        outcomes = ", ".join(sorted({self._finished.get(client, "no sign of life") for client in left}))
        return {"reason": f"all {len(left)} trainer ranks are through ({outcomes})"}

    def _outcome_without_trainers(self, now: float) -> dict[str, Any] | None:
        if self._is_job_ending:
            return {"reason": "the job was stopped before a trainer came"}
        limit = self._startup_timeout_s
        if limit is None or now - self._started < limit:
            return None
        return {"error": f"No trainer came within {limit:.0f} s. Their logs say what they waited for."}
