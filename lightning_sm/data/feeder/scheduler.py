"""Which batch is requested from which data host, and when: the rules of one trainer rank's feeder process.

Pure rules: no I/O, no clock, no thread, no randomness. The caller passes in events with their time (``now``, seconds of
a monotonic clock), and gets back the requests to send and to cancel.

A step of a pass (one iteration over one loader) is first TODO, then in flight (twice when hedged), then ready. The
first answer makes it ready; all others, late or for a closed pass, are rejected. So each step is delivered exactly
once, whatever the hosts do.
"""

from __future__ import annotations

import copy
import heapq
import math
from bisect import bisect_left, insort
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from enum import Enum
from itertools import count, takewhile
from typing import NamedTuple

# Frames carry request ids as 32 bits, which last five days at 10,000 requests per second. Then they start again.
_NUM_REQUEST_IDS = 1 << 32
# Weight of a new sample in a host's moving average: one heavy batch must not make a host look slow.
_LATENCY_WEIGHT = 0.25
# A host lags that is this many times slower than the fastest.
_LAG_FACTOR = 2.0
# So does a host with this many requests overtaken by their hedges, without an answer in between: one may be a heavy
# batch, two are a host that does not answer.
_NUM_LATE_TO_LAG = 2
# A lagging host gets a probe after this many times its latency.
_PROBE_FACTOR = 10.0
# Pauses after failures: without them, an overloaded host that is alone would get requests in a busy loop.
_FIRST_PAUSE_S = 0.05
_LONGEST_PAUSE_S = 2.0

# Hedges allowed: a fraction of the answers so far, and beyond it this many and the credits of the largest host.
HEDGE_BUDGET = 0.05
HEDGE_BURST = 4
# No request is hedged before this age.
_HEDGE_MINIMUM_S = 0.05
# Latencies of which the median is taken: enough to outvote the stragglers of one host, and few enough to adapt soon
# after a change of pass.
_NUM_RECENT = 64
# With fewer latencies no request counts as late.
_NUM_SAMPLES_TO_HEDGE = 3
# Hedges on the same host: another worker may answer for a frozen one, but all workers may simply be busy.
_SAME_HOST_FACTOR = 10.0
_SAME_HOST_MINIMUM_S = 2.0
# Hedges beyond the budget: later than any slow host that still works would take.
_STUCK_FACTOR = 30.0
_STUCK_MINIMUM_S = 3.0
# Hedges of shards: another host has to read the shard from its beginning, which takes as long as it took this one.
_MOVE_FACTOR = 30.0
_MOVE_MINIMUM_S = 20.0
# Weight of a new sample in the mean interval between answers: equal workers answer in bursts.
_INTERVAL_WEIGHT = 1 / 32


class HostState(Enum):
    """The state of a data host; one that was never reached is DOWN."""

    UP = "up"
    SUSPECT = "suspect"
    DOWN = "down"


class Retry(Enum):
    """What a failed request means for its step.

    ELSEWHERE: not the request's fault (connection lost, host overloaded); retried until it succeeds.
    LIMITED: perhaps its fault (a worker was killed); a few attempts in all.
    ONCE: the user's code raised; retried once, on another host if one is up (a disk may be broken).
    NEVER: a retry cannot succeed.
    """

    ELSEWHERE = "elsewhere"
    LIMITED = "limited"
    ONCE = "once"
    NEVER = "never"


# Failures of a kind that end the pass.
_MAX_FAILURES = {Retry.LIMITED: 4, Retry.ONCE: 2, Retry.NEVER: 1}


@dataclass(frozen=True, slots=True)
class Request:
    """One step requested from one host."""

    request_id: int
    host: str
    pass_id: int
    step: int
    is_hedge: bool
    sent_at: float


@dataclass(frozen=True, slots=True)
class Completion:
    """Whether an answer is the first of its step, and the requests that it makes superfluous."""

    is_accepted: bool
    cancel: tuple[Request, ...] = ()


@dataclass(frozen=True, slots=True)
class FailureDecision:
    """Whether a failure ends the pass; if so, the reasons of all failures of the step, and requests to cancel."""

    is_fatal: bool
    failures: tuple[str, ...] = ()
    cancel: tuple[Request, ...] = ()


@dataclass(slots=True)
class HostStatus:
    """One host, for metrics and messages; ``latency_s`` is a moving average from request to answer."""

    host: str
    state: HostState = HostState.DOWN
    num_credits: int = 0
    num_in_flight: int = 0
    latency_s: float | None = None
    is_lagging: bool = False
    num_completed: int = 0
    num_retries: int = 0
    num_hedges: int = 0


@dataclass(frozen=True, slots=True)
class PassStatus:
    """One pass: the step that its consumer waits for, the requests for that step, and the steps in the window."""

    pass_id: int
    waiting_for: int
    requests: tuple[Request, ...]
    num_todo: int
    num_in_flight: int
    num_ready: int


@dataclass(slots=True)
class _Host(HostStatus):
    """One host, as the scheduler sees it."""

    num_late: int = 0
    num_pauses: int = 0
    last_sent_at: float = -math.inf
    paused_until: float = -math.inf

    def has_credit(self, now: float) -> bool:
        """Return whether it may get a request now."""
        return self.state is HostState.UP and self.num_in_flight < self.num_credits and self.paused_until <= now

    @property
    def priority(self) -> tuple[bool, float, float]:
        """The order in which hosts choose steps: lagging ones last, so that the others take the oldest steps."""
        return self.is_lagging, self.num_in_flight / self.num_credits, self.latency_s or 0.0

    @property
    def probe_due_at(self) -> float:
        """When it gets the next probe, while it lags."""
        return self.last_sent_at + _PROBE_FACTOR * (self.latency_s or 0.0)

    def is_probe_due(self, now: float) -> bool:
        """Whether a request shall show that it has recovered."""
        return self.is_lagging and not self.num_in_flight and self.probe_due_at <= now

    @property
    def answers(self) -> bool:
        """Whether it answers at all, if perhaps slowly."""
        return self.num_late < _NUM_LATE_TO_LAG

    def record_latency(self, latency_s: float) -> None:
        """Average, but believe a lagging host's recovery at once: its probes are rare."""
        if self.latency_s is None or (self.is_lagging and latency_s < self.latency_s / _LAG_FACTOR):
            self.latency_s = latency_s
        self.latency_s += _LATENCY_WEIGHT * (latency_s - self.latency_s)

    def pause(self, now: float) -> None:
        """Send it nothing for a moment, twice as long each time."""
        self.paused_until = now + min(_LONGEST_PAUSE_S, _FIRST_PAUSE_S * 2.0 ** min(self.num_pauses, 10))
        self.num_pauses += 1


class _Failure(NamedTuple):
    retry: Retry
    host: str
    reason: str


@dataclass(slots=True)
class _Pass:
    """One pass, as the scheduler sees it."""

    pass_id: int
    position: int  # the consumer has taken every step below
    stop_step: int | None
    window: int
    cursor: int  # no step from here on was ever put into todo
    todo: list[int] = field(default_factory=list)  # sorted
    in_flight: dict[int, list[Request]] = field(default_factory=dict)  # one or two per step
    ready: set[int] = field(default_factory=set)
    fatal: set[int] = field(default_factory=set)
    failures: dict[int, list[_Failure]] = field(default_factory=dict)
    shard_of: Callable[[int], int] | None = None  # shard of a step, for iterable datasets
    assigned_hosts: dict[int, str] = field(default_factory=dict)  # by shard: the host that has its iterator

    @property
    def waiting_for(self) -> int:
        """The step that the consumer needs first."""
        return next(step for step in count(self.position) if step not in self.ready)

    @property
    def fullness(self) -> float:
        """Fraction of the window that is in flight or ready."""
        return (self.cursor - self.position - len(self.todo)) / self.window

    def refill(self) -> None:
        """Adjust the TODO steps after the window has moved, grown or shrunk."""
        limit = self.position + self.window
        if self.stop_step is not None:
            limit = min(limit, self.stop_step)
        del self.todo[bisect_left(self.todo, limit) :]
        for step in range(self.cursor, limit):
            if step not in self.in_flight and step not in self.ready and step not in self.fatal:
                self.todo.append(step)
        self.cursor = limit

    def todo_from(self, step: int) -> list[int]:
        """Return the TODO steps from one on."""
        return self.todo[bisect_left(self.todo, step) :]

    def failed_on(self, step: int, host: str) -> bool:
        """Return whether a step has failed on a host."""
        return any(failure.host == host for failure in self.failures.get(step, ()))

    def failed_on_all(self, step: int, hosts: Sequence[_Host]) -> bool:
        """Return whether a step has failed on all of these hosts."""
        return all(self.failed_on(step, host.host) for host in hosts)

    def has_raised(self, step: int) -> bool:
        """Return whether the user's code has raised in a step."""
        return any(failure.retry is Retry.ONCE for failure in self.failures.get(step, ()))

    def assigned_host(self, step: int, hosts: Sequence[_Host]) -> str:
        """Return the host that has the iterator of a step's shard; assign one of ``hosts``, all UP, if none has."""
        shard = 0 if self.shard_of is None else self.shard_of(step)
        if self.assigned_hosts.get(shard) not in {host.host for host in hosts}:
            self.assigned_hosts.pop(shard, None)
            # Ranks begin with different shards, and so with different hosts.
            turn = {host.host: (order - shard) % len(hosts) for order, host in enumerate(hosts)}
            chosen = min(hosts, key=lambda host: (self._load(host, 1), turn[host.host]))
            self.assigned_hosts[shard] = chosen.host
        return self.assigned_hosts[shard]

    def rebalance(self, newcomer: _Host, hosts: Sequence[_Host]) -> None:
        """Move shards to a host that has come up, from the hosts that have the most."""
        while self.assigned_hosts:
            giver = max(hosts, key=lambda host: self._load(host, 0))
            if giver is newcomer or self._load(newcomer, 1) >= self._load(giver, 0):
                return
            last_shard = max(shard for shard, host in self.assigned_hosts.items() if host == giver.host)
            self.assigned_hosts[last_shard] = newcomer.host

    def _load(self, host: _Host, more: int) -> float:
        """Return the shards per credit that a host would have with so many more shards."""
        num_shards = sum(assigned == host.host for assigned in self.assigned_hosts.values())
        return (num_shards + more) / host.num_credits


class Scheduler:
    """Assign the steps of all open passes to data hosts, hedge late requests, and accept each step once.

    The caller reports every event, sends what ``next_requests`` returns and cancels what other calls return. Without
    an event it calls ``next_requests`` again at ``next_wakeup``. A cancelled request frees its credit at once.

    Args:
        hedge_factor: A request is late after this many times the median latency; 0: never.
    """

    def __init__(self, hedge_factor: float = 3.0) -> None:
        self._hedge_factor = hedge_factor
        self._burst = HEDGE_BURST
        self._hosts: dict[str, _Host] = {}
        self._passes: dict[int, _Pass] = {}
        self._requests: dict[int, Request] = {}  # in flight, oldest first
        self._recent: deque[float] = deque(maxlen=_NUM_RECENT)
        self._median_s = 0.0
        self._interval_s = 0.0
        self._measured_until = 0.0
        self._request_ids = count()
        self._num_hedges = 0
        self._num_completed = 0

    # Events of hosts

    def host_up(self, name: str, num_credits: int) -> None:
        """Send a host at most ``num_credits`` requests at a time, at least 1; a new name adds the host."""
        host = self._hosts.setdefault(name, _Host(name))
        was_up = host.state is HostState.UP
        if host.state is HostState.DOWN:  # it may be another process now; a host that was only silent keeps its latency
            host.latency_s = None
        host.state = HostState.UP
        host.num_credits = num_credits
        if not was_up:
            host.num_late = 0
            host.num_pauses = 0
            host.last_sent_at = -math.inf
            host.paused_until = -math.inf
            for current in self._passes.values():
                current.rebalance(host, self._up())
        self._find_lagging_hosts()

    def host_lost(self, name: str, *, is_silent: bool) -> tuple[Request, ...]:
        """Send a silent or unreachable host nothing until ``host_up``; its requests, returned, go to others."""
        host = self._hosts.setdefault(name, _Host(name))
        host.state = HostState.SUSPECT if is_silent else HostState.DOWN
        lost = self._end_requests([request for request in self._requests.values() if request.host == name])
        host.num_retries += len(lost)
        self._find_lagging_hosts()
        return lost

    # Events of passes

    def open_pass(
        self,
        pass_id: int,
        first_step: int,
        stop_step: int | None,
        window: int,
        shard_of: Callable[[int], int] | None = None,
    ) -> None:
        """Begin to request the steps of a pass, from ``first_step`` to before ``stop_step`` (None: not known yet).

        At most ``window`` steps, at least 1, counted from the oldest that the consumer has not taken, are in flight or
        ready. Steps of the same shard (``shard_of``) are requested in order from the same host, as long as it is up and
        answers.
        """
        self._passes[pass_id] = _Pass(pass_id, first_step, stop_step, window, cursor=first_step, shard_of=shard_of)
        self._passes[pass_id].refill()

    def set_window(self, pass_id: int, window: int) -> None:
        """Change the window of a pass; requests beyond a smaller one stay in flight. Ignores a closed pass."""
        current = self._passes.get(pass_id)
        if current is not None:
            current.window = max(window, 1)
            current.refill()

    def set_stop(self, pass_id: int, stop_step: int) -> tuple[Request, ...]:
        """End a pass before ``stop_step``; return requests from there on, to be cancelled. Ignores a closed pass."""
        current = self._passes.get(pass_id)
        if current is None:
            return ()
        current.stop_step = stop_step
        current.refill()
        current.ready = {step for step in current.ready if step < stop_step}
        return self._end_requests([r for r in self._requests.values() if r.pass_id == pass_id and r.step >= stop_step])

    def close_pass(self, pass_id: int) -> tuple[Request, ...]:
        """Forget a pass; return its requests, to be cancelled. Ignores a closed pass."""
        superfluous = self._end_requests([r for r in self._requests.values() if r.pass_id == pass_id])
        self._passes.pop(pass_id, None)
        return superfluous

    def advance(self, pass_id: int, step: int) -> None:
        """Move the window of a pass: the consumer has taken every step below ``step``. Ignores a closed pass.

        Raises:
            ValueError: A step below is not ready, and would never be delivered.
        """
        current = self._passes.get(pass_id)
        if current is None or step <= current.position:
            return
        missing = current.waiting_for
        if step > missing:
            raise ValueError(f"Pass {pass_id} cannot advance to step {step}: step {missing} is not ready.")
        current.ready.difference_update(range(current.position, step))
        current.position = step
        current.refill()

    # Events of requests

    def completed(self, request_id: int, now: float) -> Completion:
        """Accept the first answer to a step of an open pass; any other is rejected, and never an error."""
        request = self._requests.get(request_id)
        if request is None:
            return Completion(is_accepted=False)
        self._record_answer(request, now)
        current = self._passes[request.pass_id]
        losers = [other for other in current.in_flight[request.step] if other is not request]
        for loser in losers:
            host = self._hosts[loser.host]
            age_s = now - loser.sent_at
            if age_s > (host.latency_s or 0.0):  # a younger request says nothing about the host
                host.record_latency(age_s)
        current.ready.add(request.step)
        current.failures.pop(request.step, None)
        self._end_requests([request, *losers])
        self._find_lagging_hosts()
        return Completion(is_accepted=True, cancel=tuple(losers))

    def withdraw(self, request: Request) -> None:
        """Take back a request that was not sent: it says nothing about the host."""
        if request.is_hedge:
            self._num_hedges -= 1
            self._hosts[request.host].num_hedges -= 1
        self._end_requests([request])

    def failed(self, request_id: int, now: float, *, retry: Retry, reason: str = "") -> FailureDecision:
        """Record a failure, and retry if ``retry`` allows it; the failure of a superfluous request is ignored."""
        request = self._requests.get(request_id)
        if request is None:
            return FailureDecision(is_fatal=False)
        current = self._passes[request.pass_id]
        host = self._hosts[request.host]
        failures = current.failures.setdefault(request.step, [])
        if retry is not Retry.ELSEWHERE or not current.failed_on(request.step, host.host):
            failures.append(_Failure(retry, host.host, reason))
        if retry in (Retry.ELSEWHERE, Retry.LIMITED):
            host.pause(now)
        num_alike = sum(failure.retry is retry for failure in failures)
        if num_alike < _MAX_FAILURES.get(retry, math.inf):
            host.num_retries += 1
            self._end_requests([request])
            return FailureDecision(is_fatal=False)
        current.fatal.add(request.step)
        cancel = self._end_requests(list(current.in_flight[request.step]))
        return FailureDecision(
            is_fatal=True,
            failures=tuple(failure.reason for failure in failures if failure.retry is not Retry.ELSEWHERE),
            cancel=tuple(other for other in cancel if other is not request),
        )

    # Decisions

    def next_requests(self, now: float) -> list[Request]:
        """Decide what to send now; the caller sends all of it.

        First, a late step that a consumer waits for is hedged. Then free credits take TODO steps. Last, hosts that
        still have credits hedge other late steps.
        """
        requests = self._hedge(now, is_urgent=True)
        # Due probes first: where the other hosts have credits to spare, they would leave no step for one.
        free = [
            (not host.is_probe_due(now), host.priority, order, host)
            for order, host in enumerate(self._hosts.values())
            if host.has_credit(now)
        ]
        heapq.heapify(free)
        while free:
            *_, order, host = heapq.heappop(free)
            chosen = self._choose(host, now)
            if chosen is not None:
                requests.append(self._send(host, *chosen, now, is_hedge=False))
                heapq.heappush(free, (True, host.priority, order, host))
        return requests + self._hedge(now, is_urgent=False)

    def next_wakeup(self, now: float) -> float | None:
        """Return when ``next_requests`` may have something new without an event; None: never."""
        times: list[float] = []
        has_todo = any(current.todo for current in self._passes.values())
        for host in self._up():
            if has_todo or self._requests:
                times.append(host.paused_until)
            if has_todo and host.is_lagging and not host.num_in_flight:
                times.append(host.probe_due_at)
        after_s = self._hedge_after_s()
        late_at = (request.sent_at + after_s for request in self._without_hedge())
        times.append(next((time for time in late_at if time > now), math.inf))
        urgent_s = self._hedge_after_s(is_urgent=True)
        urgent = (r for r in self._without_hedge() if r.step == self._passes[r.pass_id].position)
        times += [request.sent_at + urgent_s for request in urgent]
        return min((time for time in times if now < time < math.inf), default=None)

    def hosts(self) -> list[HostStatus]:
        """Return the status of all hosts, for messages and metrics."""
        return [copy.copy(host) for host in self._hosts.values()]

    def passes(self) -> list[PassStatus]:
        """Return the status of all open passes, for messages and metrics."""
        return [
            PassStatus(
                current.pass_id,
                waiting_for=current.waiting_for,
                requests=tuple(current.in_flight.get(current.waiting_for, ())),
                num_todo=len(current.todo),
                num_in_flight=len(current.in_flight),
                num_ready=len(current.ready),
            )
            for current in self._passes.values()
        ]

    # Requests

    def _send(self, host: _Host, current: _Pass, step: int, now: float, *, is_hedge: bool) -> Request:
        if not self._requests:
            self._measured_until = now
        request = Request(next(self._request_ids) % _NUM_REQUEST_IDS, host.host, current.pass_id, step, is_hedge, now)
        self._num_hedges += is_hedge
        host.num_hedges += is_hedge
        host.num_in_flight += 1
        host.last_sent_at = now
        self._requests[request.request_id] = request
        current.in_flight.setdefault(step, []).append(request)
        if not is_hedge:
            current.todo.remove(step)
        return request

    def _end_requests(self, requests: list[Request]) -> tuple[Request, ...]:
        """End requests; a step is TODO again that has no other one, and is neither ready nor fatal."""
        for request in requests:
            del self._requests[request.request_id]
            self._hosts[request.host].num_in_flight -= 1
            current = self._passes[request.pass_id]
            step = request.step
            current.in_flight[step].remove(request)
            if not current.in_flight[step]:
                del current.in_flight[step]
                if step < current.cursor and step not in current.ready and step not in current.fatal:
                    insort(current.todo, step)
        return tuple(requests)

    def _record_answer(self, request: Request, now: float) -> None:
        host = self._hosts[request.host]
        latency_s = now - request.sent_at
        host.record_latency(latency_s)
        host.num_completed += 1
        host.num_late = 0
        host.num_pauses = 0
        self._recent.append(latency_s)
        self._median_s = sorted(self._recent)[len(self._recent) // 2]
        self._num_completed += 1
        # Time in which nothing was in flight (a long checkpoint) says nothing about the pace of the hosts.
        interval_s = now - self._measured_until
        self._measured_until = now
        self._interval_s += max(_INTERVAL_WEIGHT, 1 / self._num_completed) * (interval_s - self._interval_s)

    # Which host takes which step

    def _up(self) -> list[_Host]:
        """Return the hosts that are up, by name, so that decisions do not depend on which connected first."""
        return [host for _, host in sorted(self._hosts.items()) if host.state is HostState.UP]

    def _find_lagging_hosts(self) -> None:
        """Find the hosts that lag: far slower than the fastest, or silent. At least one does not."""
        up = self._up()
        # Enough to hedge all requests of one host that became silent: with fewer, the window could be stuck.
        self._burst = HEDGE_BURST + max((host.num_credits for host in up), default=0)
        answering = [host for host in up if host.answers]
        latencies_s = [host.latency_s for host in answering or up if host.latency_s is not None]
        fastest_s = min(latencies_s, default=math.inf)
        for host in up:
            is_slow = (host.latency_s or 0.0) > _LAG_FACTOR * fastest_s
            is_silent = not host.answers and len(answering) > 0
            host.is_lagging = is_slow or is_silent

    def _choose(self, host: _Host, now: float) -> tuple[_Pass, int] | None:
        """Return the step that a host takes, if it has a credit: from the pass whose window is emptiest."""
        if not host.has_credit(now):
            return None
        passes = [current for current in self._passes.values() if current.todo]
        for current in sorted(passes, key=lambda current: current.fullness):
            for step in self._candidates(host, current, now):
                if self._may_take(host, current, step):
                    return current, step
        return None

    def _candidates(self, host: _Host, current: _Pass, now: float) -> Sequence[int]:
        """Return the steps that a host may take, best first.

        A lagging host would hold up the window, so it only takes
        1. steps that failed on every steady host,
        2. steps so far ahead that they are not needed before it answers,
        3. one probe, to notice that it has recovered.
        """
        if not host.is_lagging or current.shard_of is not None:
            return current.todo
        steady = [other for other in self._up() if not other.is_lagging]
        failed = (step for step in current.todo if step in current.failures)
        steps = [step for step in failed if current.failed_on_all(step, steady)]
        if host.answers and self._interval_s > 0.0:
            num_ahead = math.ceil((host.latency_s or 0.0) / self._interval_s)
            steps += current.todo_from(current.position + num_ahead)
        # Not with one of the two steps that are needed next.
        if host.is_probe_due(now) and current.todo[-1] > current.position + 1:
            steps.append(current.todo[-1])
        return steps

    def _may_take(self, host: _Host, current: _Pass, step: int) -> bool:
        """Return whether a step belongs on a host: its shard is there, and it did not fail only there."""
        if current.shard_of is not None and not current.has_raised(step):
            return current.assigned_host(step, self._up()) == host.host
        return not current.failed_on(step, host.host) or current.failed_on_all(step, self._up())

    # Hedges

    def _hedge(self, now: float, *, is_urgent: bool) -> list[Request]:
        """Duplicate late requests: the ones that a consumer waits for, or any that a steady host has time for."""
        requests: list[Request] = []
        after_s = self._hedge_after_s(is_urgent=is_urgent)
        for late in list(takewhile(lambda request: request.sent_at + after_s <= now, self._without_hedge())):
            current = self._passes[late.pass_id]
            if is_urgent and late.step != current.position:
                continue
            if math.isinf(self._hedge_after_s(is_urgent=is_urgent)):  # the last hedge used up the budget
                break
            if current.shard_of is not None:
                move_after_s = max(_MOVE_MINIMUM_S, _MOVE_FACTOR * self._median_s)
                if len(self._up()) == 1 or late.sent_at + move_after_s > now:
                    continue
            host = self._hedge_host(late, current, now)
            if host is not None:
                requests.append(self._send(host, current, late.step, now, is_hedge=True))
                late_host = self._hosts[late.host]
                late_host.num_late += now - late.sent_at > (late_host.latency_s or 0.0)
                self._find_lagging_hosts()
        return requests

    def _without_hedge(self) -> Iterator[Request]:
        """Yield the requests that have no duplicate, oldest first."""
        for request in self._requests.values():
            if len(self._passes[request.pass_id].in_flight[request.step]) == 1:
                yield request

    def _hedge_after_s(self, *, is_urgent: bool = False) -> float:
        """Return the age from which a request may be hedged; infinite without enough samples, or beyond the budget.

        The budget does not limit the hedge of the step that a consumer waits for (``is_urgent``): a frozen worker would
        block it forever.
        """
        if len(self._recent) < _NUM_SAMPLES_TO_HEDGE or not self._hedge_factor:
            return math.inf
        if self._num_hedges + 1 > self._burst + HEDGE_BUDGET * self._num_completed:
            return max(_STUCK_MINIMUM_S, _STUCK_FACTOR * self._median_s) if is_urgent else math.inf
        if len(self._up()) > 1:
            return max(_HEDGE_MINIMUM_S, self._hedge_factor * self._median_s)
        return max(_SAME_HOST_MINIMUM_S, _SAME_HOST_FACTOR * self._median_s)

    def _hedge_host(self, late: Request, current: _Pass, now: float) -> _Host | None:
        """Return the idle host that duplicates a request; a lagging one only for the step that the consumer needs."""
        others = [host for host in self._up() if host.host != late.host] or self._up()
        steady = [host for host in others if not host.is_lagging]
        if not steady and late.step != current.position:
            return None
        free = [host for host in steady or others if host.has_credit(now)]
        return min(free, key=lambda h: (current.failed_on(late.step, h.host), h.latency_s or math.inf), default=None)
