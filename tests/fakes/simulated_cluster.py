"""A discrete-event simulation of data hosts, a feeder's scheduler and its consumers."""

from __future__ import annotations

import heapq
import itertools
import random
from collections import deque
from dataclasses import dataclass, field

from lightning_sm.data.feeder.scheduler import HEDGE_BUDGET, HEDGE_BURST, Liveness, Scheduler
from tests.fakes.schedulers import NO_END, limits, set_stop, step_counts


@dataclass
class Machine:
    """A simulated data host: a queue, workers, and a network that takes ``delay_s`` each way.

    Attributes:
        rate: Relative speed; a worker takes ``service_s(random) / rate`` seconds per batch.
    """

    name: str
    num_workers: int = 4
    num_credits: int = 4
    service_s: object = lambda rng: rng.uniform(0.8, 1.2)
    rate: float = 1.0
    delay_s: float = 0.0
    is_alive: bool = True
    is_frozen: bool = False
    life: int = 0
    queue: deque = field(default_factory=deque)
    running: dict = field(default_factory=dict)
    stuck: list = field(default_factory=list)


@dataclass
class Consumer:
    """The training loop's side of a pass: it takes the steps in order, and each keeps it busy for ``step_s``."""

    pass_id: int
    stop: int
    window: int
    step_s: float = 0.0
    is_busy: bool = False
    taken: list = field(default_factory=list)
    taken_at: list = field(default_factory=list)
    ready: set = field(default_factory=set)
    accepted: set = field(default_factory=set)


class Cluster:
    """A discrete-event simulation of data hosts, one scheduler and its consumers, which checks every invariant."""

    def __init__(self, machines, seed=0, *, crossing=0.0, failure=None):
        self.machines = {machine.name: machine for machine in machines}
        self.rng = random.Random(seed)
        self.scheduler = Scheduler(tie_break=random.Random(seed).random)
        self.crossing, self.failure = crossing, failure
        self.now, self.events, self.order = 0.0, [], itertools.count()
        self.consumers, self.live, self.wakeup, self.num_events, self.sent = {}, {}, None, 0, []
        for machine in machines:
            self.scheduler.host_up(machine.name, machine.num_credits)

    def at(self, time, action, *arguments):
        """Schedule an action."""
        heapq.heappush(self.events, (time, next(self.order), action, arguments))

    def open(self, pass_id, stop, window, *, step_s=0.0, knows_stop=True):
        """Open a pass and its consumer."""
        self.consumers[pass_id] = Consumer(pass_id, stop, window, step_s)
        self.scheduler.open_pass(pass_id, limits(stop if knows_stop else NO_END, window))
        return self.consumers[pass_id]

    def close(self, pass_id):
        """Break out of a pass."""
        self._cancel(self.scheduler.close_pass(pass_id))
        del self.consumers[pass_id]

    def tell_stop(self, pass_id):
        """Tell the scheduler where a pass ends."""
        consumer = self.consumers[pass_id]
        consumer.ready = {step for step in consumer.ready if step < consumer.stop}
        self._cancel(set_stop(self.scheduler, pass_id, consumer.stop))

    def run(self, until=1e9):
        """Advance the time until every consumer has all its steps."""
        self._pump()
        while self.events and any(len(c.taken) < c.stop for c in self.consumers.values()):
            self.now, _, action, arguments = heapq.heappop(self.events)
            assert self.now < until, "no progress"
            action(*arguments)
            self._pump()
        return self.now

    def freeze(self, name, detected_after_s=None):
        """Stop every worker of a host, which never answers and is considered lost after a while."""
        machine = self.machines[name]
        machine.is_frozen = True
        if detected_after_s is not None:
            self.at(self.now + detected_after_s, self._suspect, name)

    def thaw(self, name):
        """Resume a frozen host, which then answers the requests it was working on."""
        machine = self.machines[name]
        machine.is_frozen, stuck, machine.stuck = False, machine.stuck, []
        if machine.is_alive:
            self.scheduler.host_up(name, machine.num_credits)
            for request in stuck:
                self._finish(name, machine.life, request)
            self._start(machine)

    def kill(self, name):
        """Lose a host and everything on it."""
        machine = self.machines[name]
        machine.is_alive, machine.life = False, machine.life + 1
        machine.queue.clear(), machine.running.clear(), machine.stuck.clear()
        self._cancel(self.scheduler.host_lost(name, is_silent=False))

    def revive(self, name):
        """Start a lost host again."""
        machine = self.machines[name]
        machine.is_alive, machine.is_frozen = True, False
        self.scheduler.host_up(name, machine.num_credits)

    def set_rate(self, name, rate):
        """Change the speed of a host."""
        self.machines[name].rate = rate

    def _suspect(self, name):
        if self.machines[name].is_frozen:
            self._cancel(self.scheduler.host_lost(name, is_silent=True))

    def _pump(self):
        progress = True
        while progress:
            progress = False
            for consumer in self.consumers.values():
                progress |= self._take(consumer)
        for request in self.scheduler.next_requests(self.now):
            assert request.request_id not in self.live
            assert request.first_step not in self.consumers[request.pass_id].accepted
            self.live[request.request_id] = request
            self.sent.append(request)
            machine = self.machines[request.host]
            self.at(self.now + machine.delay_s, self._arrive, request.host, machine.life, request)
        wakeup = self.scheduler.next_wakeup(self.now)
        if wakeup is not None and wakeup != self.wakeup:
            assert wakeup > self.now
            self.at(wakeup, lambda: None)
        self.wakeup = wakeup
        # With many hosts, copying their state after each event would take longer than the events.
        self.num_events += 1
        if len(self.machines) <= 8 or self.num_events % 50 == 0:
            self._check(wakeup)

    def _take(self, consumer):
        step = len(consumer.taken)
        if consumer.is_busy or step >= consumer.stop or step not in consumer.ready:
            return False
        consumer.ready.remove(step)
        consumer.taken.append(step)
        consumer.taken_at.append(self.now)
        self.scheduler.advance(consumer.pass_id, step + 1)
        if consumer.step_s:
            consumer.is_busy = True
            self.at(self.now + consumer.step_s, setattr, consumer, "is_busy", False)
        return not consumer.is_busy

    def _arrive(self, name, life, request):
        machine = self.machines[name]
        if machine.life == life and machine.is_alive and request.request_id in self.live:
            machine.queue.append(request)
            self._start(machine)

    def _start(self, machine):
        while machine.queue and not machine.is_frozen and len(machine.running) < machine.num_workers:
            request = machine.queue.popleft()
            machine.running[request.request_id] = request
            duration = machine.service_s(self.rng) / machine.rate
            self.at(self.now + duration, self._finish, machine.name, machine.life, request)

    def _finish(self, name, life, request):
        machine = self.machines[name]
        if machine.life != life:
            return
        if machine.is_frozen:
            machine.stuck.append(request)
            return
        del machine.running[request.request_id]
        # A worker finishes a request even if it was cancelled. Sometimes the answer crosses the cancellation.
        if request.request_id in self.live or self.rng.random() < self.crossing:
            self.at(self.now + machine.delay_s, self._answer, name, life, request)
        self._start(machine)

    def _answer(self, name, life, request):
        if self.machines[name].life != life:
            return
        is_live = self.live.pop(request.request_id, None) is not None
        if is_live and self.failure and (retry := self.failure(self.rng, request)):
            decision = self.scheduler.failed(request.request_id, self.now, retry=retry, reason="simulated")
            assert not decision.is_fatal
            return
        superfluous = self.scheduler.completed(request.request_id, self.now)
        assert (superfluous is not None) is is_live
        self._cancel(superfluous or ())
        if is_live:
            consumer = self.consumers[request.pass_id]
            assert request.first_step not in consumer.accepted
            consumer.accepted.add(request.first_step)
            consumer.ready.add(request.first_step)

    def _cancel(self, requests):
        for request in requests:
            del self.live[request.request_id]
            queue = self.machines[request.host].queue
            if request in queue:
                queue.remove(request)

    def _check(self, wakeup):
        hosts = self.scheduler.hosts()
        steps = {pass_id: step_counts(self.scheduler, pass_id) for pass_id in self.consumers}
        num_live = dict.fromkeys(self.machines, 0)
        for request in self.live.values():
            num_live[request.host] += 1
        for host in hosts:
            assert host.num_in_flight == num_live[host.host] <= host.num_credits
            assert host.num_in_flight == 0 or host.state is Liveness.UP
        for consumer, status in zip(self.consumers.values(), self.scheduler.passes(self.now), strict=True):
            _, num_in_flight, num_ready = steps[consumer.pass_id]
            assert num_in_flight + num_ready <= consumer.window
            assert num_ready == status.ready == len(consumer.ready)
            assert status.waiting_for not in consumer.ready
        num_hedges = sum(host.num_hedges for host in hosts)
        num_completed = sum(host.num_completed for host in hosts)
        burst = HEDGE_BURST + max(machine.num_credits for machine in self.machines.values())
        # The scheduler requests a step that its consumer waits for again after 3 s, whatever the budget.
        num_stuck = self.now / 3.0
        # The budget limits work, not requests, and cheap batches allow more hedges; hence the factor 2.
        assert num_hedges <= burst + 2 * HEDGE_BUDGET * num_completed + num_stuck
        can_send = any(host.state is Liveness.UP and host.num_in_flight < host.num_credits for host in hosts)
        if can_send and any(num_todo for num_todo, _, _ in steps.values()):
            assert self.live or wakeup is not None, "deadlock"
