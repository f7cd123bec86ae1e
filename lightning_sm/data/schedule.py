"""What the scheduler keeps of hosts, passes and requests, and what it tells of them. Pure data."""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from enum import Enum
from itertools import count

# A new sample's weight in the moving average: one heavy batch must not make a slow host.
_LATENCY_WEIGHT = 0.25
# A host that is so many times slower than the fastest lags.
LAG_FACTOR = 2.0
# A lagging host is tried again after so many times its latency.
_CANARY_FACTOR = 10.0
# After a refusal: else an overloaded host that is alone would be asked again in a busy loop.
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.05, 2.0


class HostState(Enum):
    """What the feeder knows of a data host; one that was not reached yet is DOWN."""

    UP = "up"
    SUSPECT = "suspect"
    DOWN = "down"


class Retry(Enum):
    """What a failed request means for its step.

    ELSEWHERE: not the request's fault (connection lost, host overloaded); asked again until it succeeds.
    LIMITED: perhaps its fault (a worker died of it); asked again, ``max_attempts`` times in all.
    ONCE: the user's code raised; asked once more, of another host if one is up (a disk may be broken).
    NEVER: asking again cannot help.
    """

    ELSEWHERE = "elsewhere"
    LIMITED = "limited"
    ONCE = "once"
    NEVER = "never"


@dataclass(frozen=True, slots=True)
class Request:
    """One step asked of one host; ``attempt`` counts the requests of the step from 1."""

    request_id: int
    host: str
    pass_id: int
    step: int
    attempt: int
    is_hedge: bool
    sent_at: float


@dataclass(frozen=True, slots=True)
class Completion:
    """Whether an answer is the first of its step, and the requests that it makes superfluous."""

    is_accepted: bool
    cancel: tuple[Request, ...] = ()


@dataclass(frozen=True, slots=True)
class Verdict:
    """Whether a failure ends the pass; if so, the failures that led there ("host: reason") and requests to cancel."""

    is_fatal: bool
    failures: tuple[str, ...] = ()
    cancel: tuple[Request, ...] = ()


@dataclass(slots=True)
class HostStatus:
    """One host, for metrics and messages; ``latency_s`` is a moving average from request to answer."""

    host: str
    state: HostState = HostState.DOWN
    reason: str = ""
    since: float = 0.0
    num_credits: int = 0
    num_in_flight: int = 0
    latency_s: float | None = None
    is_lagging: bool = False
    num_completed: int = 0
    num_retries: int = 0
    num_hedges: int = 0


@dataclass(frozen=True, slots=True)
class PassStatus:
    """One pass: the step that is awaited, of which hosts it was asked and when, and the steps in the window."""

    pass_id: int
    waiting_for: int
    asked: tuple[Request, ...]
    num_todo: int
    num_in_flight: int
    num_ready: int


@dataclass(frozen=True, slots=True)
class Snapshot:
    """All hosts and open passes, and the answers refused so far."""

    hosts: tuple[HostStatus, ...]
    passes: tuple[PassStatus, ...]
    num_duplicates: int


@dataclass(slots=True)
class Host(HostStatus):
    """One host, as the scheduler sees it."""

    num_late: int = 0
    num_refusals: int = 0
    last_sent_at: float = -math.inf
    paused_until: float = -math.inf

    def has_credit(self, now: float) -> bool:
        """Tell whether it may be asked for something now."""
        return self.state is HostState.UP and self.num_in_flight < self.num_credits and self.paused_until <= now

    @property
    def rank(self) -> tuple[bool, float, float]:
        """The order in which hosts choose: lagging ones last, as the oldest steps are for the others."""
        return self.is_lagging, self.num_in_flight / self.num_credits, self.latency_s or 0.0

    @property
    def canary_at(self) -> float:
        """When it is tried again while it lags."""
        return self.last_sent_at + _CANARY_FACTOR * (self.latency_s or 0.0)

    def learn(self, latency_s: float) -> None:
        """Average, but believe a lagging host's recovery at once: its canaries are rare."""
        if self.latency_s is None or (self.is_lagging and latency_s < self.latency_s / LAG_FACTOR):
            self.latency_s = latency_s
        self.latency_s += _LATENCY_WEIGHT * (latency_s - self.latency_s)

    def pause(self, now: float) -> None:
        """Leave it alone for a moment, longer every time."""
        self.paused_until = now + min(_LONGEST_PAUSE_S, _FIRST_PAUSE_S * 2.0 ** min(self.num_refusals, 10))
        self.num_refusals += 1


@dataclass(slots=True)
class Pass:
    """One pass, as the scheduler sees it."""

    pass_id: int
    position: int  # the consumer has taken every step below
    stop_step: int | None
    window: int
    cursor: int  # no step from here on was ever put into todo
    todo: list[int] = field(default_factory=list)  # sorted
    flights: dict[int, list[Request]] = field(default_factory=dict)  # one or two per step
    ready: set[int] = field(default_factory=set)
    fatal: set[int] = field(default_factory=set)
    attempts: dict[int, int] = field(default_factory=dict)
    failures: dict[int, list[tuple[Retry, str, str]]] = field(default_factory=dict)  # kind, host, reason
    shard_of: Callable[[int], int] | None = None  # of a step, for datasets that are iterated over
    homes: dict[int, str] = field(default_factory=dict)  # of shards: the hosts that have their iterators

    def refill(self) -> None:
        """Bring the TODO steps in line with the window after it moved, grew or shrank."""
        limit = self.position + self.window
        limit = limit if self.stop_step is None else min(limit, self.stop_step)
        del self.todo[bisect_left(self.todo, limit) :]
        new = range(self.cursor, limit)
        self.todo += [s for s in new if s not in self.flights and s not in self.ready and s not in self.fatal]
        self.cursor = limit

    def failed_on(self, step: int, host: str) -> bool:
        """Tell whether a step has failed on a host."""
        return any(name == host for _, name, _ in self.failures.get(step, ()))

    def has_raised(self, step: int) -> bool:
        """Tell whether the user's code failed in a step."""
        return any(kind is Retry.ONCE for kind, _, _ in self.failures.get(step, ()))

    def home(self, step: int, hosts: Sequence[Host]) -> str:
        """Return the host that has the shard of a step, or that takes it from now on: one of ``hosts``, all UP."""
        shard = 0 if self.shard_of is None else self.shard_of(step)
        if self.homes.get(shard) not in {host.host for host in hosts}:
            self.homes.pop(shard, None)
            # Ranks begin with different shards, and so with different hosts.
            turn = {host.host: (order - shard) % len(hosts) for order, host in enumerate(hosts)}
            self.homes[shard] = min(hosts, key=lambda h: (self._load(h, 1), turn[h.host])).host
        return self.homes[shard]

    def share_with(self, newcomer: Host, hosts: Sequence[Host]) -> None:
        """Give a host that came up its part of the shards, from those that have the most."""
        while self.homes:
            giver = max(hosts, key=lambda host: self._load(host, 0))
            if giver is newcomer or self._load(newcomer, 1) >= self._load(giver, 0):
                return
            self.homes[max(shard for shard, home in self.homes.items() if home == giver.host)] = newcomer.host

    def _load(self, host: Host, more: int) -> float:
        return (sum(home == host.host for home in self.homes.values()) + more) / host.num_credits

    @property
    def waiting_for(self) -> int:
        """The step that the consumer needs first."""
        return next(step for step in count(self.position) if step not in self.ready)

    @property
    def fullness(self) -> float:
        """Fraction of the window that is in flight or ready."""
        return (self.cursor - self.position - len(self.todo)) / self.window
