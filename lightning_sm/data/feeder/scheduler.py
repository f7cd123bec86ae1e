"""Which batch is asked of which data host, and when: the rules of one trainer rank's feeder process.

Pure rules: no I/O, no clock, no thread, no chance. Events come in with their time (``now``, seconds of one clock that
never goes back); requests to send and to cancel come out. A step of a pass (one iteration over one loader) is TODO,
then in flight (twice when hedged), then ready. It becomes ready once, by whichever answer comes first; every other
answer, late or for a closed pass, is refused. So each step is delivered exactly once, whatever the hosts do.
"""

from __future__ import annotations

import copy
import heapq
import math
from bisect import bisect_left, insort
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from enum import Enum
from itertools import count, takewhile

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


# How far back the median latency looks: enough to outvote the stragglers of one host, and soon past a change of pass.
# With fewer samples than the second number nothing is called late.
_NUM_RECENT, _NUM_SAMPLES_TO_HEDGE = 64, 3
# Another worker of the same host may answer for a frozen one, but all may as well be busy: wait longer.
_SAME_HOST_FACTOR, _SAME_HOST_MINIMUM_S = 10.0, 2.0
# Later than any slow host that still works would take.
_STUCK_FACTOR, _STUCK_MINIMUM_S = 30.0, 3.0
# Another host has to read a shard from its beginning, which takes as long as it took this one.
_MOVE_FACTOR, _MOVE_MINIMUM_S = 30.0, 20.0
# A new sample's weight in the mean interval: equal workers answer in volleys.
_INTERVAL_WEIGHT = 1 / 32
# A lost race is a heavy batch; two without an answer in between are a host that does not answer.
_NUM_LATE_TO_LAG = 2


class Scheduler:
    """Assign the steps of all open passes to data hosts, hedge late requests, and accept each step once.

    The caller reports every event, sends what ``next_requests`` returns and cancels what other calls return; without
    an event it calls ``next_requests`` again at ``next_wakeup``. A cancelled request frees its credit at once.

    Args:
        hedge_factor: A request is late after this many times the median latency; 0: never.
        hedge_budget: Hedges allowed, as a fraction of the answers so far.
        hedge_minimum_s: No request is late before.
        hedge_burst: Hedges allowed beyond that fraction, besides as many as the largest host has credits.
        max_attempts: Failures of kind ``Retry.LIMITED`` that make a step fatal.
    """

    def __init__(
        self,
        *,
        hedge_factor: float = 3.0,
        hedge_budget: float = 0.05,
        hedge_minimum_s: float = 0.05,
        hedge_burst: int = 4,
        max_attempts: int = 4,
    ) -> None:
        self._hedge_factor, self._hedge_minimum_s = hedge_factor, hedge_minimum_s
        self._hedge_budget, self._hedge_burst, self._burst = hedge_budget, hedge_burst, hedge_burst
        self._max_failures = {Retry.LIMITED: max_attempts, Retry.ONCE: 2, Retry.NEVER: 1}
        self._hosts: dict[str, Host] = {}
        self._passes: dict[int, Pass] = {}
        self._requests: dict[int, Request] = {}  # in flight, oldest first
        self._recent: deque[float] = deque(maxlen=_NUM_RECENT)
        self._median_s = self._interval_s = self._measured_until = 0.0
        self._num_sent = self._num_hedges = self._num_completed = self._num_duplicates = 0

    def host_up(self, host: str, num_credits: int, now: float) -> None:
        """Let a host take at most ``num_credits`` requests at a time; the first call with a name adds the host.

        Raises:
            ValueError: ``num_credits`` is below 1: the host could never be asked.
        """
        if num_credits < 1:
            raise ValueError(f"num_credits of host {host!r} is {num_credits}; it must be at least 1.")
        known = self._hosts.setdefault(host, Host(host))
        if known.state is not HostState.UP:
            if known.state is HostState.DOWN:  # another process, perhaps; one that was only silent keeps its pace
                known.latency_s = None
            known.state, known.reason, known.since = HostState.UP, "", now
            known.num_late = known.num_refusals = 0
            known.last_sent_at = known.paused_until = -math.inf
            known.num_credits = num_credits
            for current in self._passes.values():
                current.share_with(known, self._up())
        known.num_credits = num_credits
        self._judge_hosts()

    def host_suspect(self, host: str, now: float, reason: str = "") -> tuple[Request, ...]:
        """Ask a silent host nothing until ``host_up``; its requests, returned, are asked elsewhere."""
        return self._leave(host, HostState.SUSPECT, now, reason)

    def host_down(self, host: str, now: float, reason: str = "") -> tuple[Request, ...]:
        """Ask an unreachable host nothing until ``host_up``; its requests, returned, are asked elsewhere."""
        return self._leave(host, HostState.DOWN, now, reason)

    def open_pass(
        self,
        pass_id: int,
        first_step: int,
        stop_step: int | None,
        window: int,
        shard_of: Callable[[int], int] | None = None,
    ) -> None:
        """Begin to ask for the steps of a pass, from ``first_step`` to before ``stop_step`` (None: not known yet).

        At most ``window`` steps from the oldest that the consumer has not taken are in flight or ready. Steps of the
        same shard (``shard_of``) are asked of the same host, in order, as long as it is up and does what it is asked.

        Raises:
            ValueError: The pass is open already, or the window is below 1.
        """
        if pass_id in self._passes or window < 1:
            raise ValueError(f"Pass {pass_id} cannot be opened with a window of {window}; open: {list(self._passes)}.")
        self._passes[pass_id] = Pass(pass_id, first_step, stop_step, window, cursor=first_step, shard_of=shard_of)
        self._passes[pass_id].refill()

    def set_window(self, pass_id: int, window: int) -> None:
        """Change the window of a pass; requests beyond a smaller one go on. A closed pass is ignored."""
        if (current := self._passes.get(pass_id)) is not None:
            current.window = max(window, 1)
            current.refill()

    def set_stop(self, pass_id: int, stop_step: int) -> tuple[Request, ...]:
        """End a pass before ``stop_step``; returns requests from there on, to be cancelled. Ignores a closed pass."""
        if (current := self._passes.get(pass_id)) is None:
            return ()
        current.stop_step = stop_step
        current.refill()
        current.ready = {step for step in current.ready if step < stop_step}
        return self._forget([r for r in self._requests.values() if r.pass_id == pass_id and r.step >= stop_step])

    def close_pass(self, pass_id: int) -> tuple[Request, ...]:
        """Forget a pass; returns its requests, to be cancelled. Ignores a closed pass."""
        superfluous = self._forget([request for request in self._requests.values() if request.pass_id == pass_id])
        self._passes.pop(pass_id, None)
        return superfluous

    def advance(self, pass_id: int, step: int) -> None:
        """Move the window of a pass: the consumer has taken every step below ``step``. Ignores a closed pass.

        Raises:
            ValueError: A step below is not ready, and would never be delivered.
        """
        if (current := self._passes.get(pass_id)) is None or step <= current.position:
            return
        if step > (missing := current.waiting_for):
            raise ValueError(f"Pass {pass_id} cannot advance to step {step}: step {missing} is not ready.")
        current.ready.difference_update(range(current.position, step))
        current.position = step
        current.refill()

    def next_requests(self, now: float) -> list[Request]:
        """Decide what to send now; the caller sends all of it.

        First a late step for which a consumer waits is hedged, then free credits take TODO steps, then hosts that
        found nothing to do hedge other late steps.
        """
        requests = self._hedge(now, is_urgent=True)
        free = [host for host in self._hosts.values() if host.has_credit(now)]
        queue = [(host.rank, order) for order, host in enumerate(free)]
        heapq.heapify(queue)
        while queue:
            _, order = heapq.heappop(queue)
            if chosen := self._choose(free[order], now):
                requests.append(self._send(free[order], *chosen, now, is_hedge=False))
                heapq.heappush(queue, (free[order].rank, order))
        return requests + self._hedge(now, is_urgent=False)

    def next_wakeup(self, now: float) -> float | None:
        """Return when ``next_requests`` may have something new without an event; None: never."""
        times: list[float] = []
        has_todo = any(current.todo for current in self._passes.values())
        for host in self._up():
            if has_todo or self._requests:
                times.append(host.paused_until)
            if has_todo and host.is_lagging and not host.num_in_flight:
                times.append(host.canary_at)
        after_s = self._late_after_s()
        late_at = (request.sent_at + after_s for request in self._alone())
        times.append(next((time for time in late_at if time > now), math.inf))
        urgent_s = self._late_after_s(is_urgent=True)
        times += [r.sent_at + urgent_s for r in self._alone() if r.step == self._passes[r.pass_id].position]
        return min((time for time in times if now < time < math.inf), default=None)

    def completed(self, request_id: int, now: float) -> Completion:
        """Take an answer; any but the first to a step of an open pass is refused, and never an error."""
        if (request := self._requests.get(request_id)) is None:
            self._num_duplicates += 1
            return Completion(is_accepted=False)
        self._measure(request, now)
        current = self._passes[request.pass_id]
        losers = [other for other in current.flights[request.step] if other is not request]
        for loser in losers:
            host, age_s = self._hosts[loser.host], now - loser.sent_at
            if age_s > (host.latency_s or 0.0):  # less says nothing: it was cancelled
                host.learn(age_s)
        current.ready.add(request.step)
        current.attempts.pop(request.step)
        current.failures.pop(request.step, None)
        self._forget([request, *losers])
        self._judge_hosts()
        return Completion(is_accepted=True, cancel=tuple(losers))

    def failed(self, request_id: int, now: float, *, retry: Retry, reason: str = "") -> Verdict:
        """Take a failure, and ask again if ``retry`` allows; that of a request no longer needed is ignored."""
        if (request := self._requests.get(request_id)) is None:
            return Verdict(is_fatal=False)
        current, step = self._passes[request.pass_id], request.step
        failures = current.failures.setdefault(step, [])
        if retry is not Retry.ELSEWHERE or not current.failed_on(step, request.host):
            failures.append((retry, request.host, reason))
        if retry in (Retry.ELSEWHERE, Retry.LIMITED):
            self._hosts[request.host].pause(now)
        if sum(kind is retry for kind, _, _ in failures) >= self._max_failures.get(retry, math.inf):
            current.fatal.add(step)
            cancel = self._forget(list(current.flights[step]))
            texts = tuple(f"{host}: {text}" for kind, host, text in failures if kind is not Retry.ELSEWHERE)
            return Verdict(is_fatal=True, failures=texts, cancel=tuple(r for r in cancel if r is not request))
        self._hosts[request.host].num_retries += 1
        self._forget([request])
        return Verdict(is_fatal=False)

    def snapshot(self) -> Snapshot:
        """Return what messages and metrics tell about hosts and passes."""
        passes: list[PassStatus] = []
        for current in self._passes.values():
            asked = tuple(current.flights.get(current.waiting_for, ()))
            counts = len(current.todo), len(current.flights), len(current.ready)
            passes.append(PassStatus(current.pass_id, current.waiting_for, asked, *counts))
        return Snapshot(tuple(map(copy.copy, self._hosts.values())), tuple(passes), self._num_duplicates)

    def _up(self) -> list[Host]:
        """In the order of their names, so that what is decided does not depend on who came first."""
        return [host for _, host in sorted(self._hosts.items()) if host.state is HostState.UP]

    def _leave(self, name: str, state: HostState, now: float, reason: str) -> tuple[Request, ...]:
        host = self._hosts.setdefault(name, Host(name))
        host.state, host.reason, host.since = state, reason, now
        lost = self._forget([request for request in self._requests.values() if request.host == name])
        host.num_retries += len(lost)
        self._judge_hosts()
        return lost

    def _send(self, host: Host, current: Pass, step: int, now: float, *, is_hedge: bool) -> Request:
        if not self._requests:
            self._measured_until = now
        attempt = current.attempts[step] = current.attempts.get(step, 0) + 1
        request = Request(self._num_sent, host.host, current.pass_id, step, attempt, is_hedge, now)
        self._num_sent += 1
        self._num_hedges += is_hedge
        host.num_hedges += is_hedge
        host.num_in_flight += 1
        host.last_sent_at = now
        self._requests[request.request_id] = request
        current.flights.setdefault(step, []).append(request)
        if not is_hedge:
            current.todo.remove(step)
        return request

    def _forget(self, requests: list[Request]) -> tuple[Request, ...]:
        """End requests; a step that has no other one, and was neither answered nor given up, is TODO again."""
        for request in requests:
            del self._requests[request.request_id]
            self._hosts[request.host].num_in_flight -= 1
            current, step = self._passes[request.pass_id], request.step
            current.flights[step].remove(request)
            if not current.flights[step]:
                del current.flights[step]
                if step < current.cursor and step not in current.ready and step not in current.fatal:
                    insort(current.todo, step)
        return tuple(requests)

    def _measure(self, request: Request, now: float) -> None:
        host = self._hosts[request.host]
        host.learn(now - request.sent_at)
        host.num_completed += 1
        host.num_late = host.num_refusals = 0
        self._recent.append(now - request.sent_at)
        self._median_s = sorted(self._recent)[len(self._recent) // 2]
        self._num_completed += 1
        # Time in which nothing was in flight (a long checkpoint) says nothing about the pace of the hosts.
        interval_s, self._measured_until = now - self._measured_until, now
        self._interval_s += max(_INTERVAL_WEIGHT, 1 / self._num_completed) * (interval_s - self._interval_s)

    def _judge_hosts(self) -> None:
        """Find the hosts that lag: far slower than the fastest, or silent. At least one does not."""
        up = self._up()
        # So many that all requests of one host that fell silent can be hedged; fewer, and the window may be stuck.
        self._burst = self._hedge_burst + max((host.num_credits for host in up), default=0)
        answering = [host for host in up if host.num_late < _NUM_LATE_TO_LAG] or up
        fastest_s = min((host.latency_s for host in answering if host.latency_s is not None), default=math.inf)
        for host in up:
            is_slow = (host.latency_s or 0.0) > LAG_FACTOR * fastest_s
            host.is_lagging = is_slow or (answering is not up and host.num_late >= _NUM_LATE_TO_LAG)

    def _choose(self, host: Host, now: float) -> tuple[Pass, int] | None:
        """Return the step that a host takes, if it has a credit: of the pass whose window is emptiest."""
        if not host.has_credit(now):
            return None
        for current in sorted((c for c in self._passes.values() if c.todo), key=lambda c: c.fullness):
            for step in self._candidates(host, current, now):
                if (not current.failures and current.shard_of is None) or self._may_take(host, current, step):
                    return current, step
        return None

    def _candidates(self, host: Host, current: Pass, now: float) -> Iterable[int]:
        """Return steps in order of preference; a lagging host leaves those alone that are needed before it answers."""
        if not host.is_lagging or current.shard_of is not None:
            return current.todo
        steady = [other for other in self._up() if not other.is_lagging]
        retried = [step for step in sorted(current.failures) if step in current.todo]
        chosen = [step for step in retried if all(current.failed_on(step, other.host) for other in steady)]
        if host.num_late < _NUM_LATE_TO_LAG and self._interval_s > 0.0:
            ahead = math.ceil((host.latency_s or 0.0) / self._interval_s)
            chosen += current.todo[bisect_left(current.todo, current.position + ahead) :]
        if not host.num_in_flight and host.canary_at <= now:
            chosen.append(current.todo[-1])
        return chosen

    def _may_take(self, host: Host, current: Pass, step: int) -> bool:
        """Tell whether the step has not failed on this host, or has failed on all; its shard must be there, too."""
        if current.shard_of is not None and not current.has_raised(step):
            return current.home(step, self._up()) == host.host
        return not current.failed_on(step, host.host) or all(current.failed_on(step, o.host) for o in self._up())

    def _late_after_s(self, *, is_urgent: bool = False) -> float:
        """Return the age from which a request may be hedged; infinite while hedges are used up or have no measure.

        They are never used up for the step for which a consumer waits: a worker that is frozen would hold it for ever.
        """
        if len(self._recent) < _NUM_SAMPLES_TO_HEDGE or not self._hedge_budget * self._hedge_factor:
            return math.inf
        if self._num_hedges + 1 > self._burst + self._hedge_budget * self._num_completed:
            return max(_STUCK_MINIMUM_S, _STUCK_FACTOR * self._median_s) if is_urgent else math.inf
        if len(self._up()) > 1:
            return max(self._hedge_minimum_s, self._hedge_factor * self._median_s)
        return max(_SAME_HOST_MINIMUM_S, _SAME_HOST_FACTOR * self._median_s)

    def _move_after_s(self) -> float:
        """Return the age from which a shard may be opened on another host, too, and skipped to where it is."""
        return max(_MOVE_MINIMUM_S, _MOVE_FACTOR * self._median_s)

    def _alone(self) -> Iterator[Request]:
        """Yield the requests that have no duplicate, oldest first."""
        for request in self._requests.values():
            if len(self._passes[request.pass_id].flights[request.step]) == 1:
                yield request

    def _hedge(self, now: float, *, is_urgent: bool) -> list[Request]:
        """Duplicate late requests: that for which a consumer waits, or any for which a steady host has the time."""
        requests: list[Request] = []
        after_s = self._late_after_s(is_urgent=is_urgent)
        for late in list(takewhile(lambda request: request.sent_at + after_s <= now, self._alone())):
            current, owner = self._passes[late.pass_id], self._hosts[late.host]
            if (is_urgent and late.step != current.position) or math.isinf(self._late_after_s(is_urgent=is_urgent)):
                continue
            if current.shard_of is not None and (len(self._up()) == 1 or late.sent_at + self._move_after_s() > now):
                continue
            if (host := self._rescuer(late, current, now)) is not None:
                requests.append(self._send(host, current, late.step, now, is_hedge=True))
                owner.num_late += now - late.sent_at > (owner.latency_s or 0.0)
                self._judge_hosts()
        return requests

    def _rescuer(self, late: Request, current: Pass, now: float) -> Host | None:
        """Return the idle host that duplicates a request; a lagging one only where the consumer waits."""
        others = [host for host in self._up() if host.host != late.host] or self._up()
        steady = [host for host in others if not host.is_lagging]
        if not steady and late.step != current.position:
            return None
        free = [host for host in steady or others if host.has_credit(now)]
        return min(free, key=lambda h: (current.failed_on(late.step, h.host), h.latency_s or math.inf), default=None)
