"""Trainer leases, which decide when a data host may exit. Pure logic; callers pass in the current time."""

from __future__ import annotations

from lightning_sm._text import listed
from lightning_sm.data.ipc.host_messages import Finished
from lightning_sm.errors import DataHostMismatchError

# If ``lease_s`` is None, a trainer that is silent for this long no longer keeps others out: it may have been killed.
_SILENT_S = 60.0
_MAX_NAMES = 4


class Leases:
    """The trainers that need this data host.

    Args:
        lease_s: Seconds without a heartbeat after which a trainer is considered lost. If None, this host does not
            exit when trainers finish or are lost.
        startup_timeout_s: Seconds within which the first trainer must connect; None for no limit.
        now: The current time.
        may_restart: Whether to wait ``startup_timeout_s`` for trainers to restart after all have finished, however they
            exited: even a rank whose script calls ``sys.exit(1)`` reports that it has finished.

    Attributes:
        job_is_ending: Whether this host waits for no more trainers than those that are connected.
    """

    def __init__(
        self, lease_s: float | None, startup_timeout_s: float | None, now: float, *, may_restart: bool = False
    ) -> None:
        self._lease_s = lease_s
        self._restart_s = (startup_timeout_s or 0.0) if may_restart else 0.0
        self._startup_timeout_s = startup_timeout_s
        self._last_seen: dict[str, float] = {}
        self._world_sizes: dict[str, int] = {}
        self._finished: set[str] = set()
        self.job_is_ending = False
        self._last_event = now

    def heartbeat(self, client: str, world_size: int, now: float) -> None:
        """Renew a lease, or grant one to a new trainer of the same run.

        Args:
            client: Name of the trainer rank.
            world_size: Number of ranks in the run; this host waits for all of them.
            now: The current time.

        Raises:
            DataHostMismatchError: The trainer is new, but the connected ranks have a different world size, or all of
                their run's ranks are already connected.
        """
        running = self.running(now)
        if client not in running:
            _check_newcomer(client, world_size, {other: self._world_sizes[other] for other in running})
        self._world_sizes[client] = world_size
        self._last_seen[client] = now
        self._last_event = now
        self._finished.discard(client)

    def finish(self, client: str, now: float) -> None:
        """End a trainer's lease, if it has, or had, one.

        Args:
            client: Name of the trainer rank.
            now: The current time.
        """
        if self.has(client):
            self._finished.add(client)
            self._last_event = now

    def has(self, client: str) -> bool:
        """Return whether a trainer has, or had, a lease."""
        return client in self._last_seen

    def outcome(self, now: float) -> Finished | None:
        """Return why the host may exit, or None while it is still needed.

        Args:
            now: The current time.
        """
        if not self._last_seen:
            return self._outcome_without_trainers(now)
        if self._lease_s is None:
            return None
        lost = [client for client, seen in self._last_seen.items() if now - seen >= self._lease_s]
        done = {*lost, *self._finished}
        if len(done) < len(self._last_seen):
            return None
        if not self.job_is_ending:
            # Wait for restarts. If the job is over, the launcher stops this host earlier.
            silent_s = now - self._last_event
            if silent_s < self._restart_s:
                return None
            # A rank that has not connected may still be starting. Wait for it, but no longer than a lease.
            if len(done) < max(self._world_sizes.values()) and silent_s < self._lease_s:
                return None
        ranks = {1: "the only rank has", 2: "both ranks have"}.get(len(done), f"all {len(done)} ranks have")
        return Finished(f"{ranks} finished" + (" (lost connection)" if len(done) > len(self._finished) else ""))

    def running(self, now: float) -> list[str]:
        """Return the trainers that have not finished and whose leases have not expired."""
        silent_s = _SILENT_S if self._lease_s is None else self._lease_s
        seen = [client for client, at in self._last_seen.items() if now - at < silent_s]
        return [client for client in seen if client not in self._finished]

    def _outcome_without_trainers(self, now: float) -> Finished | None:
        if self.job_is_ending:
            return Finished("the job was stopped before a trainer connected")
        limit_s = self._startup_timeout_s
        if limit_s is None or now - self._last_event < limit_s:
            return None
        return Finished(f"No trainer connected within {limit_s:.0f} s. See the trainers' logs.", is_error=True)


def _check_newcomer(client: str, world_size: int, others: dict[str, int]) -> None:
    """Check that a trainer can belong to the same run as ``others``, the world size of each connected trainer."""
    if not others or (world_size in others.values() and len(others) < world_size):
        return
    connected = listed([f"{other} (world size {size})" for other, size in sorted(others.items())], _MAX_NAMES)
    raise DataHostMismatchError(
        f"{client} (world size {world_size}) is one too many; already connected: {connected}. A data host serves one "
        "run at a time: wait until the others have exited, or start data hosts with a different secret for each run."
    )
