"""The most that a job can cost, from its time limit and the user's prices, and whether it may cost that much."""

from __future__ import annotations

import math
from collections.abc import Iterator

from lightning_sm._text import count
from lightning_sm.record.prices import Prices, cost
from lightning_sm.submit.job_file import Job
from lightning_sm.submit.problems import JobProblem


def cost_problems(job: Job) -> Iterator[JobProblem]:
    """Find out whether a job can cost more than ``max_cost``.

    Args:
        job: The content of the job file.
    """
    for name, price in job.prices.items():
        if not 0 <= price < math.inf:
            yield JobProblem(f"prices.{name}", f"prices.{name} is {price}; expected an hourly price of 0 or more.")
    if job.max_cost is None:
        return
    unknown = types_without_price(job)
    if _is_chosen_by_service(job):
        text = "max_cost is set, and request has InstancePreferences: the service chooses the hosts. Remove one."
        yield JobProblem("max_cost", text, also=("request",))
    elif unknown:
        types = ", ".join(unknown)
        yield JobProblem(
            "max_cost",
            f"max_cost is {job.max_cost:g}, but there is no price for {types}. Add it, in money per hour of a host: "
            f"prices: {{{unknown[0]}: 1.41}}.",
            also=("prices",),
        )
    elif job.tune is not None and job.tune.max_jobs is None:
        yield JobProblem("max_cost", "max_cost with tune needs tune.max_jobs, the number of training jobs.")
    elif (most := _most(job)) > job.max_cost:
        yield JobProblem(
            "max_cost",
            f"max_cost is {job.max_cost:g}, but the job can cost {_words(job, most)}. Lower max_run_s or the number of "
            "hosts, or raise max_cost.",
            also=("max_run_s", "groups", "prices"),
        )


def shown_cost(job: Job) -> str:
    """Say what a job can cost, in one sentence; that it is unknown, where a price is missing."""
    if _is_chosen_by_service(job):
        return "What the job can cost is unknown: the service chooses the hosts (InstancePreferences)."
    if types_without_price(job):
        return f"What the job can cost is unknown: no prices for {', '.join(types_without_price(job))} (key prices)."
    return f"The job can cost {_words(job, _most(job))}."


def types_without_price(job: Job) -> list[str]:
    """Return the instance types of a job of which it has no price."""
    prices = Prices(job.prices)
    types = [group.instance_type for name, group in job.groups.items() if prices.of(name, group.instance_type) is None]
    return list(dict.fromkeys(types))


def _is_chosen_by_service(job: Job) -> bool:
    return job.requested("ResourceConfig.InstancePreferences") is not None


def _words(job: Job, most: float) -> str:
    prices = Prices(job.prices)
    hosts = " + ".join(
        f"{group.count} x {group.instance_type} at {prices.amount(prices.of(name, group.instance_type) or 0.0)}"
        for name, group in job.groups.items()
    )
    seconds = f"{_seconds(job) / 3600:g} h"
    jobs = "" if job.tune is None else f", for {count(_num_jobs(job), 'training job')}"
    return f"{prices.amount(most)} ({hosts} an hour, for {seconds}{jobs}; without storage and transfer)"


def _most(job: Job) -> float:
    """Return the cost of all hosts until the time limit, kept ones included."""
    prices = Prices(job.prices)
    per_hour = sum((prices.of(name, group.instance_type) or 0.0) * group.count for name, group in job.groups.items())
    return _num_jobs(job) * cost(per_hour, _seconds(job))


def _seconds(job: Job) -> int:
    """Return how long hosts are billed at most: until the time limit, and while a warm pool keeps them."""
    kept = job.requested("ResourceConfig.KeepAlivePeriodInSeconds")
    return job.max_run_s + (kept if isinstance(kept, int) else 0)


def _num_jobs(job: Job) -> int:
    return 1 if job.tune is None else job.tune.max_jobs or 1
