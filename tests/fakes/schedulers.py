"""Feeder schedulers in a known state, and helpers that read them."""

from __future__ import annotations

from lightning_sm.data.feeder.scheduler import PassLimits, Scheduler

# The stop of a pass whose end is unknown.
NO_END = 1 << 62


class Slots(list):
    """Slots that are free again as soon as they are taken."""

    def pop(self):
        """Take a slot."""
        return self[0]


def limits(stop, window, **others):
    """Return the limits of a pass with at most as many ranges as steps in its window."""
    return PassLimits(stop, window, window, **{"free": Slots(range(1000)), **others})


def set_window(scheduler, pass_id, window, range_length=1):
    """Change the window of a pass, and the length of its future requests."""
    current = scheduler._passes[pass_id].limits
    current.window, current.range_length = window, range_length


def set_stop(scheduler, pass_id, stop):
    """End a pass before a step, and return the requests to cancel."""
    scheduler._passes[pass_id].limits.stop_step = stop
    return scheduler.cut(pass_id)


def make(*hosts, num_credits=1, window=4, stop=100, **options):
    """Return a scheduler with hosts up and pass 1 open, which prefers the first of equal hosts."""
    scheduler = Scheduler(**{"tie_break": lambda: 0.0, **options})
    for host in hosts:
        scheduler.host_up(host, num_credits)
    scheduler.open_pass(1, limits(stop, window))
    return scheduler


def warm(latencies, *, num_credits=1, **options):
    """Return a scheduler that has measured the latencies of its hosts, with no pass open, and the time."""
    scheduler, now = make(*latencies, window=len(latencies), stop=NO_END, **options), 0.0
    for _ in range(5):
        requests = sorted(scheduler.next_requests(now), key=lambda request: latencies[request.host])
        for request in requests:
            assert scheduler.completed(request.request_id, now + latencies[request.host]) is not None
        now += latencies[requests[-1].host]
        scheduler.advance(1, scheduler.passes(now)[0].waiting_for)
    scheduler.close_pass(1)
    for host in latencies:
        scheduler.host_up(host, num_credits)
    return scheduler, now


def make_with_ranges(*hosts, range_length=4, num_ranges=2):
    """Return a scheduler at step 4 that requests ranges of several steps, and its first range requests."""
    scheduler = make(*hosts, num_credits=9, window=4, stop=4 + range_length * num_ranges)
    for request in scheduler.next_requests(0.0):
        scheduler.completed(request.request_id, 1.0)
    set_window(scheduler, 1, 4 * range_length, range_length)
    scheduler.advance(1, 4)
    return scheduler, scheduler.next_requests(1.0)


def asked(requests):
    """Return host and first step of each request."""
    return [(request.host, request.first_step) for request in requests]


def host_status(scheduler, name):
    """Return the status of one host."""
    return next(host for host in scheduler.hosts() if host.host == name)


def step_counts(scheduler, pass_id=1):
    """Return how many steps of a pass are TODO in its window, in flight, and ready."""
    current = scheduler._passes[pass_id]
    current.refill()
    todo = [step_range for step_range in current.todo if step_range.first < current.limit]
    return tuple(sum(each.num_steps for each in ranges) for ranges in (todo, current.in_flight, current.ready.values()))
