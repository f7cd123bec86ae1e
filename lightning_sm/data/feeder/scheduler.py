"""The scheduler of one trainer rank: decides which steps to request from which data host, and when.

Pure logic: no I/O, no clock, no thread. The caller passes in events with their time (``now``, in seconds on a monotonic
clock), and gets back the requests to send and to cancel.

Each request asks for a step range: consecutive steps of a pass (one iteration over one loader). A range is first TODO,
then in flight (twice when hedged), then ready. The first answer makes the range ready; all other answers, late or for a
closed pass, are rejected. Each step is thus delivered exactly once, whatever the hosts do.
"""

from __future__ import annotations

import copy
import math
import random
import sys
from bisect import bisect_left, insort
from collections import deque
from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import dataclass, field
from enum import Enum
from itertools import count, takewhile
from typing import NamedTuple

from lightning_sm.data.ipc.feeder_messages import PassSnapshot

# Frames carry request ids in 32 bits. At 10,000 requests per second, ids wrap around after five days.
_NUM_REQUEST_IDS = 1 << 32

# Number of recent latencies in a loader's median: enough to outvote the stragglers of one host, few enough to adapt
# quickly.
_NUM_RECENT = 64
# With fewer measured latencies than this, no request counts as late.
_NUM_SAMPLES_TO_HEDGE = 3
# Weight of a new sample in moving averages.
_WEIGHT = 1 / 4
# Weight of a new interval between answers. Equal workers finish at the same moment, so intervals vary: the average
# covers about 32 of them.
_INTERVAL_WEIGHT = 1 / 32

# A host this many times slower than the median gets only steps that are not needed before it answers. If batches differ
# widely in cost, a lower factor would exclude hosts by chance.
_SLOW_FACTOR = 3.0
# Requests also queue on a slow host, so expect its answers only after this many times its latency.
_SLOW_MARGIN = 2.0
# Halve a host's measured slowness whenever it has not answered for this many times its latency. Otherwise, a host that
# was slow once (cold cache, other jobs) would never get requests again.
_FORGET_LATENCIES = 10.0

# Pauses after failures. Without them, an overloaded host would get requests in a busy loop if it is the only host.
_FIRST_PAUSE_S = 0.05
_LONGEST_PAUSE_S = 2.0

# Hedges may cost this fraction of the work, plus HEDGE_BURST requests, plus one request for each credit of the largest
# host: enough to hedge all requests of a host that goes silent at the start.
HEDGE_BUDGET = 0.05
HEDGE_BURST = 4


class _Late(NamedTuple):
    """The age at which a request becomes late: a multiple of the loader's median latency, but at least a minimum."""

    factor: float
    minimum_s: float

    def after_s(self, median_s: float) -> float:
        return max(self.minimum_s, self.factor * median_s)


_LATE = _Late(3.0, 0.05)
# With one host, a hedge goes to that host again. This helps if a worker is frozen, but not if all workers are busy, so
# wait longer before hedging.
_LATE_ON_THE_ONLY_HOST = _Late(10.0, 2.0)
# Beyond the budget, hedge only requests that take longer than they would on any working host. Without these hedges, a
# frozen worker would block the pass forever.
_STUCK = _Late(30.0, 3.0)


class Liveness(Enum):
    """The state of a data host. A host that was never reached is DOWN."""

    UP = "up"
    SUSPECT = "suspect"
    DOWN = "down"


class Retry(Enum):
    """The retry policy for a failed request for a single step.

    ELSEWHERE: retry until the request succeeds, because the cause is elsewhere (connection lost, host overloaded).
    LIMITED: retry a few times, because the request may be the cause (a worker was killed).
    ONCE: retry once, on another host if one is up. The user's code raised, perhaps because a disk is broken.
    NEVER: do not retry, because no retry can succeed.
    """

    ELSEWHERE = "elsewhere"
    LIMITED = "limited"
    ONCE = "once"
    NEVER = "never"


# A pass fails when one of its steps has failed this many times under the same policy.
_MAX_FAILURES = {Retry.LIMITED: 4, Retry.ONCE: 2, Retry.NEVER: 1}


class StepRange(NamedTuple):
    """Consecutive steps of a pass."""

    first: int
    num_steps: int

    @property
    def stop(self) -> int:
        """The step after the last one."""
        return self.first + self.num_steps


@dataclass(slots=True)
class PassLimits:
    """How far a pass may go. The caller may change the limits, which hold from the next requests on.

    Attributes:
        stop_step: The step after the last one; after lowering it, call ``Scheduler.cut``.
        window: Limit on steps in flight or ready (at least 1), from the oldest step not taken.
        max_ranges: Limit on ranges in flight or ready, whatever the window.
        free: The unused slots, each for the answer to one request.
        known: The first step that cannot be requested yet.
        range_length: Number of steps per future request.
    """

    stop_step: int
    window: int
    max_ranges: int
    free: list[int]
    known: int = sys.maxsize
    range_length: int = 1


@dataclass(frozen=True, slots=True)
class StepRequest:
    """A step range requested from one host."""

    request_id: int
    host: str
    pass_id: int
    step_range: StepRange
    slot: int
    is_hedge: bool
    sent_at: float

    @property
    def first_step(self) -> int:
        """The first step."""
        return self.step_range.first


@dataclass(frozen=True, slots=True)
class FailureDecision:
    """The result of a failure: whether it ends the pass and, if so, the step's failures and the requests to cancel."""

    is_fatal: bool
    failures: tuple[str, ...] = ()
    cancel: tuple[StepRequest, ...] = ()


@dataclass(slots=True)
class HostStatus:
    """The status of a host, for metrics and messages; ``slowness`` is its latency relative to the loaders' medians."""

    host: str
    state: Liveness = Liveness.DOWN
    num_credits: int = 0
    num_in_flight: int = 0
    slowness: float = 1.0
    num_completed: int = 0
    num_retries: int = 0
    num_hedges: int = 0


@dataclass(slots=True)
class _ScheduledHost(HostStatus):
    """One host, as the scheduler sees it."""

    num_pauses: int = 0
    paused_until: float = -math.inf
    measured_at: float = -math.inf
    forget_s: float = math.inf

    def has_credit(self, now: float) -> bool:
        """Return whether the host may get a request now."""
        return self.state is Liveness.UP and self.num_in_flight < self.num_credits and self.paused_until <= now

    def expected_slowness(self, now: float) -> float:
        """Return the slowness to expect: an idle host's measurement loses weight over time."""
        if self.slowness <= 1.0 or self.num_in_flight:
            return self.slowness
        return 1.0 + (self.slowness - 1.0) * math.exp2(-(now - self.measured_at) / self.forget_s)

    @property
    def forgotten_at(self) -> float:
        """Time at which the host stops counting as slow, unless a new measurement comes first."""
        if self.slowness <= _SLOW_FACTOR:
            return -math.inf
        return self.measured_at + self.forget_s * math.log2((self.slowness - 1.0) / (_SLOW_FACTOR - 1.0))

    def measure(self, latency_s: float, median_s: float, now: float) -> None:
        """Update the average slowness. A slow host gets few requests, so one quick answer proves that it recovered."""
        measured = latency_s / max(median_s, 1e-9)
        is_news = math.isinf(self.measured_at) or measured < _SLOW_FACTOR < self.slowness
        self.slowness = measured if is_news else self.slowness + _WEIGHT * (measured - self.slowness)
        self.measured_at = now
        self.forget_s = _FORGET_LATENCIES * max(latency_s, 1e-9)

    def pause(self, now: float) -> None:
        """Send the host nothing for a while, doubling the pause each time."""
        self.paused_until = now + min(_LONGEST_PAUSE_S, _FIRST_PAUSE_S * 2.0 ** min(self.num_pauses, 10))
        self.num_pauses += 1


@dataclass(slots=True)
class _Latencies:
    """The latencies of one loader's requests. Loaders differ: validation batches may be much cheaper."""

    recent: deque[float] = field(default_factory=lambda: deque(maxlen=_NUM_RECENT))
    median_s: float = 0.0
    work_s: float = 0.0  # moving average

    def add(self, latency_s: float, work_s: float) -> None:
        self.recent.append(latency_s)
        self.median_s = sorted(self.recent)[(len(self.recent) - 1) // 2]
        self.work_s += max(_WEIGHT, 1 / len(self.recent)) * (work_s - self.work_s)


class _StepFailure(NamedTuple):
    retry: Retry
    host: str
    reason: str


@dataclass(slots=True)
class _ScheduledPass:
    """One pass, as the scheduler sees it."""

    pass_id: int
    limits: PassLimits
    pace: _Latencies
    may_hedge: bool  # whether a late request may go to a second host
    can_take: Callable[[str], bool]  # whether a host has what the pass needs
    position: int = 0  # the consumer has taken every step below this one
    cursor: int = 0  # the first step that was never put into todo
    todo: list[StepRange] = field(default_factory=list)  # sorted
    in_flight: dict[StepRange, list[StepRequest]] = field(default_factory=dict)  # one or two requests per range
    ready: dict[int, StepRange] = field(default_factory=dict)  # by first step
    failures: dict[int, list[_StepFailure]] = field(default_factory=dict)

    @property
    def limit(self) -> int:
        """The step after the window."""
        return min(self.position + self.limits.window, self.limits.stop_step, self.limits.known)

    def takers(self, hosts: list[_ScheduledHost]) -> list[_ScheduledHost]:
        """Return the hosts that have what the pass needs."""
        return [host for host in hosts if self.can_take(host.host)]

    @property
    def waiting_for(self) -> int:
        """The step that the consumer needs first."""
        step = self.position
        while step in self.ready:
            step = self.ready[step].stop
        return step

    @property
    def fullness(self) -> float:
        """Fraction of the window before the first TODO step."""
        return (self.todo[0].first - self.position) / self.limits.window

    def has_todo(self) -> bool:
        """Return whether a range can be requested."""
        return next(self.todo_from(self.position), None) is not None

    def refill(self) -> None:
        """Add the steps that have entered the window to TODO, in complete ranges.

        The window moves by one delivered range at a time. Adding less than a range would split all later ranges.
        """
        limit = self.limit
        while self.cursor < limit:
            length = min(self.limits.range_length, self.limits.stop_step - self.cursor)
            if self.cursor + length > limit and self.cursor > self.position:
                return
            step_range = StepRange(self.cursor, min(length, limit - self.cursor))
            self.todo.append(step_range)
            self.cursor = step_range.stop

    def todo_from(self, step: int) -> Iterator[StepRange]:
        """Yield the TODO ranges in the window, starting at a step.

        A range may be sent only if all earlier ones have slots, too: if later ranges took all slots, the pass would
        stall. If the window has shrunk, TODO also has ranges beyond it.
        """
        limit = self.limit
        num_slots = min(self.limits.max_ranges - len(self.in_flight) - len(self.ready), len(self.limits.free))
        for index in range(bisect_left(self.todo, (step, 0)), min(len(self.todo), num_slots)):
            if self.todo[index].first >= limit:
                return
            yield self.todo[index]

    def failed_on(self, step: int, host: str) -> bool:
        """Return whether a step has failed on a host."""
        return any(failure.host == host for failure in self.failures.get(step, ()))

    def failed_on_all(self, step: int, hosts: Sequence[_ScheduledHost]) -> bool:
        """Return whether a step has failed on all of these hosts."""
        return all(self.failed_on(step, host.host) for host in hosts)

    def raised_on(self, step: int) -> set[str]:
        """Return the hosts on which the user's code has raised for a step."""
        return {failure.host for failure in self.failures.get(step, ()) if failure.retry is Retry.ONCE}


class Scheduler:
    """The scheduler of one rank: assigns the steps of all passes to data hosts, and hedges late requests.

    The caller reports every event, sends the requests that ``next_requests`` returns, and cancels those that other
    calls return. If no event occurs, the caller calls ``next_requests`` again at ``next_wakeup``. A cancelled request
    frees its credit at once.

    Args:
        tie_break: Returns a number for each host. Among equally good hosts, the one with the lowest number is chosen.
            If all ranks preferred the same host, the others would be idle.
    """

    def __init__(self, tie_break: Callable[[], float] = random.random) -> None:
        self._tie_break = tie_break
        self._hosts: dict[str, _ScheduledHost] = {}
        self._up: list[_ScheduledHost] = []  # sorted by name, so that the order of connections does not matter
        self._passes: dict[int, _ScheduledPass] = {}
        self._paces: dict[Hashable, _Latencies] = {}
        self._requests: dict[int, StepRequest] = {}  # in flight, oldest first
        self._interval_s = 0.0  # between arrivals of steps
        self._measured_until = 0.0
        self._request_ids = count()
        self._num_completed = 0
        self._num_open_hedges = 0
        self._work_s = 0.0
        self._hedged_work_s = 0.0

    # Host events

    def host_up(self, name: str, num_credits: int) -> None:
        """Start using a host, with up to ``num_credits`` (at least 1) requests at a time; add it if it is new."""
        host = self._hosts.setdefault(name, _ScheduledHost(name))
        # The host may have restarted, so its measured latency is void. A host that was only silent keeps its latency.
        if host.state is Liveness.DOWN:
            host.slowness = 1.0
            host.measured_at = -math.inf
        self._set_state(host, Liveness.UP)
        host.num_credits = num_credits

    def host_lost(self, name: str, *, is_silent: bool) -> tuple[StepRequest, ...]:
        """Stop using a silent or unreachable host until ``host_up``; return its requests, which go to other hosts."""
        host = self._hosts.setdefault(name, _ScheduledHost(name))
        self._set_state(host, Liveness.SUSPECT if is_silent else Liveness.DOWN)
        lost = self._end_requests([request for request in self._requests.values() if request.host == name])
        host.num_retries += len(lost)
        return lost

    def _set_state(self, host: _ScheduledHost, state: Liveness) -> None:
        host.state = state
        self._up = [host for _, host in sorted(self._hosts.items()) if host.state is Liveness.UP]

    # Pass events

    def open_pass(
        self,
        pass_id: int,
        limits: PassLimits,
        *,
        may_hedge: bool = True,
        loader: Hashable = None,
        can_take: Callable[[str], bool] = lambda _: True,
    ) -> None:
        """Start requesting the steps of a pass, from step 0.

        Args:
            pass_id: Number of the pass.
            limits: How far the pass may go.
            may_hedge: Whether late requests may go to a second host.
            loader: The loader. All passes over it share their latencies.
            can_take: Returns whether a host has what the pass needs. By default, all hosts do.
        """
        pace = self._paces.setdefault(loader, _Latencies())
        self._passes[pass_id] = _ScheduledPass(pass_id, limits, pace, may_hedge, can_take)

    def cut(self, pass_id: int) -> tuple[StepRequest, ...]:
        """Forget what a pass has beyond its lowered ``stop_step``, and return the requests to cancel."""
        current = self._passes[pass_id]
        stop_step = current.limits.stop_step
        current.ready = {first: step_range for first, step_range in current.ready.items() if first < stop_step}
        beyond = [r for r in self._requests.values() if r.pass_id == pass_id and r.first_step >= stop_step]
        return self._end_requests(beyond)

    def close_pass(self, pass_id: int) -> tuple[StepRequest, ...]:
        """Forget a pass, and return its requests, which must be cancelled."""
        superfluous = self._end_requests([r for r in self._requests.values() if r.pass_id == pass_id])
        del self._passes[pass_id]
        return superfluous

    def advance(self, pass_id: int, step: int) -> None:
        """Move a pass's window after the consumer has taken every step below ``step``.

        Raises:
            ValueError: An earlier step is not ready, and would never be delivered.
        """
        current = self._passes[pass_id]
        while current.position < step:
            step_range = current.ready.pop(current.position, None)
            if step_range is None:
                raise ValueError(f"Pass {pass_id} cannot advance to step {step}: step {current.position} is not ready.")
            current.position = step_range.stop

    # Request events

    def request(self, request_id: int, host: str) -> StepRequest | None:
        """Return a request in flight to a host, or None if it was answered, cancelled, or never sent there."""
        request = self._requests.get(request_id)
        return request if request is not None and request.host == host else None

    def completed(self, request_id: int, now: float, work_s: float | None = None) -> tuple[StepRequest, ...] | None:
        """Accept the first answer for a range of an open pass; silently reject any other.

        Args:
            request_id: Number of the request.
            now: When the answer arrived.
            work_s: Seconds that a worker took. Defaults to the latency.

        Returns:
            The requests that the answer makes superfluous, or None if it was rejected.
        """
        request = self._requests.get(request_id)
        if request is None:
            return None
        current = self._passes[request.pass_id]
        work_s = now - request.sent_at if work_s is None else work_s
        self._record_answer(request, current.pace, now, work_s)
        losers = [other for other in current.in_flight[request.step_range] if other is not request]
        for loser in losers:
            # _end_requests counts a hedge as average work. Add the difference, because this range costs the other
            # host as much work as it cost this one.
            self._hedged_work_s += work_s - current.pace.work_s
            host = self._hosts[loser.host]
            age_s = now - loser.sent_at
            # A request younger than the host's usual latency says nothing about the speed of the host.
            if age_s > host.slowness * current.pace.median_s:
                host.measure(age_s, current.pace.median_s, now)
        current.ready[request.first_step] = request.step_range
        current.failures.pop(request.first_step, None)
        self._end_requests([request, *losers])
        return tuple(losers)

    def failed(self, request_id: int, now: float, *, retry: Retry, reason: str = "") -> FailureDecision:
        """Record a failure, and retry if ``retry`` allows it; the failure of a superfluous request is ignored.

        The steps of a failed range are requested again one by one, so that a failure counts only for its own step.
        """
        request = self._requests.get(request_id)
        if request is None:
            return FailureDecision(is_fatal=False)
        current = self._passes[request.pass_id]
        host = self._hosts[request.host]
        first = request.first_step
        failures = current.failures.setdefault(first, [])
        is_known = retry is Retry.ELSEWHERE and current.failed_on(first, host.host)
        if request.step_range.num_steps == 1 and not is_known:
            failures.append(_StepFailure(retry, host.host, reason))
        if retry in (Retry.ELSEWHERE, Retry.LIMITED):
            host.pause(now)
        num_alike = sum(failure.retry is retry for failure in failures)
        if num_alike < _MAX_FAILURES.get(retry, math.inf):
            host.num_retries += 1
            self._end_requests([request], in_single_steps=retry is not Retry.ELSEWHERE)
            return FailureDecision(is_fatal=False)
        cancel = self._end_requests(list(current.in_flight[request.step_range]))
        # The range is neither TODO nor in flight now, so the pass cannot get beyond it.
        current.todo.remove(request.step_range)
        return FailureDecision(
            is_fatal=True,
            failures=tuple(failure.reason for failure in failures if failure.retry is not Retry.ELSEWHERE),
            cancel=tuple(other for other in cancel if other is not request),
        )

    # Decisions

    def next_requests(self, now: float) -> list[StepRequest]:
        """Return the requests to send now; the caller must send all of them.

        First, hedge late requests that a consumer will wait for. Then give TODO ranges to hosts with credits, the least
        busy host first.
        """
        for current in self._passes.values():
            current.refill()
        requests = self._hedge(now)
        free = [host for host in self._hosts.values() if host.has_credit(now)]
        while free:
            passes = [current for current in self._passes.values() if current.has_todo()]
            if not passes:
                break
            passes.sort(key=lambda current: current.fullness)
            host = min(free, key=lambda host: (*self._load(host, now), self._tie_break()))
            chosen = self._choose(host, passes, now)
            if chosen is None:
                free.remove(host)
                continue
            requests.append(self._send(host, *chosen, now, is_hedge=False))
            if not host.has_credit(now):
                free.remove(host)
        return requests

    def next_wakeup(self, now: float) -> float | None:
        """Return when ``next_requests`` may return new requests without an event, or None if it will not."""
        times: list[float] = []
        has_todo = any(current.has_todo() for current in self._passes.values())
        for host in self._up:
            if has_todo or self._requests:
                times.append(host.paused_until)
            if has_todo and not host.num_in_flight:
                times.append(host.forgotten_at)
        late_after_s = {pass_id: self._late_after_s(current) for pass_id, current in self._passes.items()}
        for request in self._requests.values():
            late_at = request.sent_at + late_after_s.get(request.pass_id, math.inf)
            if late_at > now and not self._is_hedged(request):
                times.append(late_at)
                # All other requests of the pass were sent later.
                late_after_s.pop(request.pass_id, None)
                if not late_after_s:
                    break
        return min((time for time in times if now < time < math.inf), default=None)

    def hosts(self) -> list[HostStatus]:
        """Return the status of all hosts, for messages and metrics."""
        return [copy.copy(host) for host in self._hosts.values()]

    def passes(self, now: float) -> list[PassSnapshot]:
        """Return the status of all open passes, for messages."""
        return [self._status(current, now) for current in self._passes.values()]

    def _status(self, current: _ScheduledPass, now: float) -> PassSnapshot:
        waiting_for, in_flight = current.waiting_for, current.in_flight.items()
        requests = [request for step_range, sent in in_flight if step_range.first == waiting_for for request in sent]
        num_ready = sum(step_range.num_steps for step_range in current.ready.values())
        return PassSnapshot(waiting_for, [(request.host, now - request.sent_at) for request in requests], num_ready)

    # Requests

    def _send(
        self, host: _ScheduledHost, current: _ScheduledPass, step_range: StepRange, now: float, *, is_hedge: bool
    ) -> StepRequest:
        if not self._requests:
            self._measured_until = now
        request_id = next(self._request_ids) % _NUM_REQUEST_IDS
        slot = current.limits.free.pop()
        request = StepRequest(request_id, host.host, current.pass_id, step_range, slot, is_hedge, now)
        self._num_open_hedges += is_hedge
        host.num_in_flight += 1
        self._requests[request.request_id] = request
        current.in_flight.setdefault(step_range, []).append(request)
        if not is_hedge:
            del current.todo[bisect_left(current.todo, step_range)]
        return request

    def _end_requests(self, requests: list[StepRequest], *, in_single_steps: bool = False) -> tuple[StepRequest, ...]:
        """End requests, and make their steps TODO again unless they are ready or have another request."""
        for request in requests:
            del self._requests[request.request_id]
            self._hosts[request.host].num_in_flight -= 1
            current = self._passes[request.pass_id]
            if request.is_hedge:
                self._num_open_hedges -= 1
                self._hedged_work_s += current.pace.work_s
            step_range = request.step_range
            current.in_flight[step_range].remove(request)
            if not current.in_flight[step_range]:
                del current.in_flight[step_range]
                if step_range.first not in current.ready:
                    again = (
                        [StepRange(step, 1) for step in range(step_range.first, step_range.stop)]
                        if in_single_steps
                        else [step_range]
                    )
                    for part in again:
                        insort(current.todo, part)
        return tuple(requests)

    def _record_answer(self, request: StepRequest, pace: _Latencies, now: float, work_s: float) -> None:
        host = self._hosts[request.host]
        latency_s = now - request.sent_at
        pace.add(latency_s, work_s)
        host.measure(latency_s, pace.median_s, now)
        slownesses = sorted(each.expected_slowness(now) for each in self._up)
        # Compare the median host or, with two hosts, the quicker one.
        if slownesses and slownesses[(len(slownesses) - 1) // 2] > _SLOW_FACTOR:
            # The loader's batches have become costlier. Until the median reflects that, all hosts would count as slow
            # and stay idle, so start a new median.
            pace.recent.clear()
            pace.add(latency_s, work_s)
            for each in self._up:
                each.slowness = 1.0
        host.num_completed += request.step_range.num_steps
        host.num_pauses = 0
        self._work_s += work_s
        self._num_completed += 1
        # ``_measured_until`` skips time in which nothing was in flight, such as a long checkpoint.
        interval_s = (now - self._measured_until) / request.step_range.num_steps
        self._measured_until = now
        self._interval_s += max(_INTERVAL_WEIGHT, 1 / self._num_completed) * (interval_s - self._interval_s)

    # Which host takes which range

    def _load(self, host: _ScheduledHost, now: float) -> tuple[bool, float]:
        """Return a sort key that puts slow hosts last, so that the others take the steps that are needed soonest."""
        return host.expected_slowness(now) > _SLOW_FACTOR, host.num_in_flight / host.num_credits

    def _choose(
        self, host: _ScheduledHost, passes: Sequence[_ScheduledPass], now: float
    ) -> tuple[_ScheduledPass, StepRange] | None:
        """Return the first range that a host may take, preferring the pass whose window is emptiest."""
        slowness = host.expected_slowness(now)
        for current in passes:
            first = current.position
            if slowness > _SLOW_FACTOR and not self._is_last_resort(host, current):
                first += self._num_steps_in(_SLOW_MARGIN * slowness * current.pace.median_s)
            for step_range in current.todo_from(first):
                if self._may_take(host, current, step_range.first):
                    return current, step_range
        return None

    def _num_steps_in(self, seconds: float) -> int:
        """Return how many steps arrive in this time, but at least 1."""
        return max(1, math.ceil(seconds / self._interval_s)) if self._interval_s > 0.0 else 1

    def _is_last_resort(self, host: _ScheduledHost, current: _ScheduledPass) -> bool:
        """Return whether a host is the only one, or the only one on which the first TODO step has not failed."""
        others = [other for other in current.takers(self._up) if other is not host]
        return current.failed_on_all(current.todo[0].first, others)

    def _may_take(self, host: _ScheduledHost, current: _ScheduledPass, step: int) -> bool:
        """Return whether a host may take a step.

        The host must have what the pass needs, and the step must not have failed there, unless it failed on all hosts.
        """
        if not current.can_take(host.host):
            return False
        return not current.failed_on(step, host.host) or current.failed_on_all(step, current.takers(self._up))

    # Hedges

    def _hedge(self, now: float) -> list[StepRequest]:
        """Send a second host the late requests that a consumer will soon wait for."""
        hedges: list[StepRequest] = []
        late_after_s = {pass_id: self._late_after_s(current) for pass_id, current in self._passes.items()}
        soonest_s = min(late_after_s.values(), default=math.inf)
        for late in list(takewhile(lambda request: request.sent_at + soonest_s <= now, self._requests.values())):
            current = self._passes[late.pass_id]
            if late.sent_at + late_after_s[late.pass_id] > now or self._is_hedged(late):
                continue
            is_urgent = late.first_step < current.position + self._num_steps_in(current.pace.median_s)
            if is_urgent and current.limits.free:
                host = self._hedge_host(late, current, now)
                if host is not None:
                    self._hosts[late.host].num_hedges += 1
                    hedges.append(self._send(host, current, late.step_range, now, is_hedge=True))
                    late_after_s[late.pass_id] = self._late_after_s(current)
        return hedges

    def _is_hedged(self, request: StepRequest) -> bool:
        return len(self._passes[request.pass_id].in_flight[request.step_range]) > 1

    def _late_after_s(self, current: _ScheduledPass) -> float:
        """Return the age at which a pass's requests become late, or infinity if they never do."""
        if not current.may_hedge or len(current.pace.recent) < _NUM_SAMPLES_TO_HEDGE:
            return math.inf
        late = _LATE_ON_THE_ONLY_HOST if len(current.takers(self._up)) == 1 else _LATE
        # Assume that the next hedge and all open ones have the average cost.
        burst = HEDGE_BURST + max((host.num_credits for host in self._up), default=0)
        cost_s = self._hedged_work_s + (self._num_open_hedges + 1) * current.pace.work_s
        if cost_s > HEDGE_BUDGET * self._work_s + burst * current.pace.work_s:
            late = _STUCK
        return late.after_s(current.pace.median_s)

    def _hedge_host(self, late: StepRequest, current: _ScheduledPass, now: float) -> _ScheduledHost | None:
        """Return the least busy host that can take a hedge; a slow host only if all others are slow.

        Skip hosts on which the user's code has raised for this step, unless only one host is up: the code would raise
        again and end the pass, although the late request may still be answered.
        """
        up = current.takers(self._up)
        others = [host for host in up if host.host != late.host] or up
        raised_on = current.raised_on(late.first_step) if len(up) > 1 else ()
        free = [host for host in others if host.has_credit(now) and host.host not in raised_on]
        return min(
            free,
            key=lambda h: (current.failed_on(late.first_step, h.host), *self._load(h, now), self._tie_break()),
            default=None,
        )
