"""When a data host may exit: trainers hold leases, and report when they have finished. Pure rules over a given time."""

from __future__ import annotations

from lightning_sm.data.ipc.messages import Finished

# What a ``RemoteDataModule`` reports that is closed after its training, or at the regular end of its process.
_SUCCESSES = ("finished", "the process ended")


def is_success(outcome: str) -> bool:
    """Return whether a training with this outcome had all the batches that it needed.

    Args:
        outcome: What a trainer reported when it finished.
    """
    return outcome in _SUCCESSES


class Leases:
    """The trainers that need this data host.

    Args:
        lease_s: Seconds without a heartbeat after which a trainer counts as lost; None: this host never exits by
            itself.
        startup_timeout_s: Seconds until the first trainer must have connected; None: no limit.
        now: Time at the start.
    """

    def __init__(self, lease_s: float | None, startup_timeout_s: float | None, now: float) -> None:
        self._lease_s = lease_s
        self._startup_timeout_s = startup_timeout_s
        self._started = now
        self._last_seen: dict[str, float] = {}
        self._finished: dict[str, str] = {}
        self._num_expected = 1
        self._job_is_ending = False
        self._last_event = now

    def heartbeat(self, client: str, world_size: int, now: float) -> None:
        """Renew a lease.

        Args:
            client: Name of the trainer rank.
            world_size: Ranks of the training, all of which this host waits for.
            now: Time.
        """
        self._last_seen[client] = now
        self._last_event = now
        self._finished.pop(client, None)
        if not self._job_is_ending:
            self._num_expected = max(self._num_expected, world_size)

    def finish(self, client: str, outcome: str, now: float) -> None:
        """End a lease.

        Args:
            client: Name of the trainer rank.
            outcome: How its training ended.
            now: Time.
        """
        self._last_seen.setdefault(client, now)
        self._finished[client] = outcome
        self._last_event = now

    def expect_no_more(self) -> None:
        """Note that the job is ending: this host serves the connected trainers, and does not wait for others."""
        self._job_is_ending = True
        self._num_expected = 0

    def outcome(self, now: float) -> Finished | None:
        """Return why the host may exit, or None while it is needed.

        Args:
            now: Time.
        """
        if not self._last_seen:
            return self._outcome_without_trainers(now)
        if self._lease_s is None:
            return None
        lost = [client for client, seen in self._last_seen.items() if now - seen >= self._lease_s]
        done = {*lost, *self._finished}
        if len(done) < len(self._last_seen):
            return None
        # A rank that has not connected yet may still be starting, but not for longer than a lease.
        if len(done) < self._num_expected and now - self._last_event < self._lease_s:
            return None
        outcomes = ", ".join(sorted({self._finished.get(client, "lost connection") for client in done}))
        ranks = "the trainer rank has" if len(done) == 1 else f"all {len(done)} trainer ranks have"
        return Finished(f"{ranks} finished ({outcomes})")

    def _outcome_without_trainers(self, now: float) -> Finished | None:
        if self._job_is_ending:
            return Finished("the job was stopped before a trainer connected")
        limit_s = self._startup_timeout_s
        if limit_s is None or now - self._started < limit_s:
            return None
        return Finished(f"No trainer connected within {limit_s:.0f} s. See the trainers' logs.", is_error=True)
