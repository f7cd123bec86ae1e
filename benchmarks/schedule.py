"""Measure how well many ranks use their data hosts: the feeder's scheduler, one for each rank, in virtual time.

Hosts serve the ranks in turn, as the worker pool does. Ranks run in lockstep, as with DDP. Requests take 0.3 ms to
arrive, and answers 0.5 ms. "share" is the ranks' rate divided by the highest possible rate: that of busy workers on all
hosts, or that of the training steps if it is lower.

    python benchmarks/schedule.py
"""

from __future__ import annotations

import argparse
import heapq
import itertools
import math
import random
import sys
from collections import OrderedDict, deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import SupportsIndex

from lightning_sm._table import draw_table
from lightning_sm.data.feeder.scheduler import PassLimits, Scheduler, StepRequest
from lightning_sm.data.settings import default_window

BATCH_S = 0.1
REQUEST_S = 0.0003
ANSWER_S = 0.0005
WARM = 0.3  # share of the steps before the measurement
NO_END = 1 << 62  # end of a pass, which this benchmark never reaches
NUM_COLD = 8

# Returns the seconds that a worker takes for a batch. Arguments: a generator with the same state for every build of a
# rank's step, a generator that differs between attempts, the host, and the number of batches that the host has built.
Service = Callable[[random.Random, random.Random, int, int], float]


def even(own: random.Random, attempt: random.Random, host: int, built: int) -> float:
    """Vary by 10%."""
    return BATCH_S * attempt.uniform(0.9, 1.1)


def lognormal(own: random.Random, attempt: random.Random, host: int, built: int) -> float:
    """Vary from attempt to attempt, as storage does."""
    return BATCH_S * attempt.lognormvariate(-0.32, 0.8)


def heavy(own: random.Random, attempt: random.Random, host: int, built: int) -> float:
    """Vary from batch to batch, as videos do, so that a second attempt takes just as long."""
    return BATCH_S * own.lognormvariate(-0.32, 0.8)


def cold(own: random.Random, attempt: random.Random, host: int, built: int) -> float:
    """Let the first batches of one host take 3 s."""
    return 3.0 if host == 0 and built < NUM_COLD else even(own, attempt, host, built)


def slow(own: random.Random, attempt: random.Random, host: int, built: int) -> float:
    """Make one host 8 times slower."""
    return (8.0 if host == 0 else 1.0) * even(own, attempt, host, built)


SERVICES: dict[str, Service] = {
    "even": even,
    "lognormal 0.8": lognormal,
    "heavy by themselves": heavy,
    "one host cold": cold,
    "one 8 x slower": slow,
}


class _Slots(list[int]):
    """Slots that are free again as soon as they are taken."""

    def pop(self, _: SupportsIndex = -1) -> int:
        """Take a slot."""
        return self[0]


@dataclass
class Host:
    """A data host: its free workers, and the requests that wait for a worker."""

    free: int
    waiting: OrderedDict[int, deque[StepRequest]] = field(default_factory=OrderedDict)
    built: int = 0
    busy_s: float = 0.0

    def next(self) -> tuple[int, StepRequest] | None:
        """Remove and return the next request, serving ranks in turn and each rank's requests in order."""
        for rank, requests in list(self.waiting.items()):
            request = requests.popleft()
            if requests:
                self.waiting.move_to_end(rank)
            else:
                del self.waiting[rank]
            return rank, request
        return None


class Simulation:
    """A cluster in virtual time.

    Args:
        ranks: Number of trainer ranks.
        hosts: Number of data hosts.
        workers: Number of workers per host.
        service: Function that returns how long a batch takes.
        steps: Number of steps per rank.
        compute_s: Seconds per training step.
        window: Steps in flight or buffered per rank; None for the data service's default.
    """

    def __init__(
        self,
        ranks: int,
        hosts: int,
        workers: int,
        service: Service,
        *,
        steps: int,
        compute_s: float = 0.0,
        window: int | None = None,
    ) -> None:
        self.now = 0.0
        self._events: list[tuple[float, int, Callable[..., None], tuple[object, ...]]] = []
        self._order = itertools.count()
        self._attempts = random.Random(0)  # noqa: S311  # no secret
        self._service = service
        self._steps = steps
        self._compute_s = compute_s
        self._workers = workers
        self.hosts = [Host(workers) for _ in range(hosts)]
        self.schedulers = [Scheduler(tie_break=self._attempts.random) for _ in range(ranks)]
        self._live: set[tuple[int, int]] = set()  # requests that are still wanted
        self._ready: list[set[int]] = [set() for _ in range(ranks)]
        self._wakeups = [math.inf] * ranks
        self._step = 0
        self.num_requests = self.num_hedges = 0
        self.wasted_s = 0.0
        for rank, scheduler in enumerate(self.schedulers):
            for host in range(hosts):
                scheduler.host_up(f"{host:03}", -(-workers // ranks) + 1)
            steps = window or default_window(workers * hosts, ranks)
            scheduler.open_pass(1, PassLimits(NO_END, steps, steps, free=_Slots([0] * 2 * steps)))
            self._at(self._attempts.uniform(0.0, 0.002), self._request, rank)

    def run(self) -> list[str]:
        """Run the simulation, and return the columns of the table."""
        begin: tuple[float, int, float, list[float]] | None = None
        while self._step < self._steps:
            self.now, _, function, arguments = heapq.heappop(self._events)
            function(*arguments)
            if begin is None and self._step >= WARM * self._steps:
                begin = self.now, self._step, self.wasted_s, [host.busy_s for host in self.hosts]
        began, step, wasted_s, before = begin or (0.0, 0, 0.0, [0.0] * len(self.hosts))
        seconds = self.now - began
        ideal = sum(self._workers * host.built / host.busy_s for host in self.hosts) / len(self.schedulers)
        if self._compute_s:
            ideal = min(ideal, 1 / self._compute_s)
        busy_s = [host.busy_s - earlier for host, earlier in zip(self.hosts, before, strict=True)]
        use = [host_s / seconds / self._workers for host_s in busy_s]
        return [
            f"{(self._step - step) / seconds / ideal:.0%}",
            f"{min(use):.2f}-{max(use):.2f}",
            f"{self.num_hedges / self.num_requests:.1%}",
            f"{(self.wasted_s - wasted_s) / sum(busy_s):.1%}",
        ]

    def _at(self, time: float, function: Callable[..., None], *arguments: object) -> None:
        heapq.heappush(self._events, (time, next(self._order), function, arguments))

    def _request(self, rank: int) -> None:
        """Send the requests that a rank's scheduler makes now."""
        if self._wakeups[rank] <= self.now:
            self._wakeups[rank] = math.inf
        scheduler = self.schedulers[rank]
        for request in scheduler.next_requests(self.now):
            self.num_requests += 1
            self.num_hedges += request.is_hedge
            self._live.add((rank, request.request_id))
            self._at(self.now + REQUEST_S, self._arrive, rank, request)
        wakeup = scheduler.next_wakeup(self.now)
        if wakeup is not None and wakeup < self._wakeups[rank]:
            self._wakeups[rank] = wakeup
            self._at(wakeup, self._request, rank)

    def _arrive(self, rank: int, request: StepRequest) -> None:
        host = int(request.host)
        self.hosts[host].waiting.setdefault(rank, deque()).append(request)
        self._work(host)

    def _work(self, number: int) -> None:
        """Give requests to free workers."""
        host = self.hosts[number]
        while host.free and (waiting := host.next()) is not None:
            rank, request = waiting
            if (rank, request.request_id) not in self._live:
                continue
            own = random.Random(rank << 32 | request.first_step)  # noqa: S311  # no secret
            seconds = sum(
                self._service(own, self._attempts, number, host.built) for _ in range(request.step_range.num_steps)
            )
            host.free -= 1
            host.built += request.step_range.num_steps
            host.busy_s += seconds
            self._at(self.now + seconds, self._built, number, rank, request, seconds)

    def _built(self, number: int, rank: int, request: StepRequest, seconds: float) -> None:
        self.hosts[number].free += 1
        if (rank, request.request_id) in self._live:
            self._at(self.now + ANSWER_S, self._answer, rank, request, seconds)
        else:
            self.wasted_s += seconds
        self._work(number)

    def _answer(self, rank: int, request: StepRequest, seconds: float) -> None:
        self._live.discard((rank, request.request_id))
        superfluous = self.schedulers[rank].completed(request.request_id, self.now, seconds)
        if superfluous is None:
            self.wasted_s += seconds
            return
        for other in superfluous:
            self._live.discard((rank, other.request_id))
        self._ready[rank].update(range(request.first_step, request.step_range.stop))
        self._finish_step(request.step_range)
        self._request(rank)

    def _finish_step(self, arrived: object) -> None:
        """Let all ranks take the current step if all have its batch."""
        if all(self._step in ready for ready in self._ready):
            self._at(self.now + self._compute_s, self._take, self._step)

    def _take(self, step: int) -> None:
        if step != self._step:
            return
        self._step += 1
        for rank, scheduler in enumerate(self.schedulers):
            self._ready[rank].discard(step)
            scheduler.advance(1, self._step)
            self._request(rank)
        self._finish_step(None)


def main() -> None:
    """Print the table."""
    options = argparse.ArgumentParser(description="Measure how well many ranks use their data hosts, in virtual time.")
    options.add_argument("--service", nargs="+", choices=SERVICES, default=list(SERVICES))
    options.add_argument("--shape", nargs="+", default=["8x2x8", "16x4x16", "64x16x8", "256x16x31"])
    options.add_argument("--steps", type=int, default=200)
    options.add_argument("--compute-s", type=float, default=0.0)
    options.add_argument("--window", type=int)
    args = options.parse_args()
    table = []
    for name in args.service:
        for shape in args.shape:
            ranks, hosts, workers = map(int, shape.split("x"))
            simulation = Simulation(
                ranks, hosts, workers, SERVICES[name], steps=args.steps, compute_s=args.compute_s, window=args.window
            )
            table.append([name, shape, *simulation.run()])
    headers = ["batches", "ranks x hosts x workers", "share", "use of hosts", "hedges", "wasted work"]
    sys.stdout.write(draw_table(table, headers) + "\n")


if __name__ == "__main__":
    main()
